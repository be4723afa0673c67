package timeout

import (
	"context"
	"errors"
	"testing"
	"time"
)

func TestError(t *testing.T) {
	kind := errors.New("lost")
	ctx, cancel := WithKind(context.Background(), time.Millisecond, "connect_timeout", kind)
	defer cancel()
	<-ctx.Done()
	err := context.Cause(ctx)
	if err.Error() != "no answer within 1ms (connect_timeout)" || !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, kind) {
		t.Errorf("%v", err)
	}
	var net interface{ Timeout() bool }
	if !errors.As(err, &net) || !net.Timeout() {
		t.Error("it is no timeout to package net's users")
	}
	// The first reason stays.
	ctx, cancel = With(context.Background(), time.Hour, "")
	cancel()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestText(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0s", 8 * time.Second: "8s", 10 * time.Minute: "10m", time.Hour: "1h", 90 * time.Minute: "1h30m", 100 * time.Millisecond: "100ms",
		8*time.Second + 1: "8s", time.Hour + time.Second: "1h0m1s", 50 * time.Microsecond: "50µs",
	} {
		if got := Text(d); got != want {
			t.Errorf("%d: %s, want %s", d, got, want)
		}
	}
}
