package metrics

import (
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"rdblk/internal/histogram"
)

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	r, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, _ := io.ReadAll(r.Body)
	return r.StatusCode, string(b)
}

func TestPages(t *testing.T) {
	var h histogram.Histogram
	h.Observe(15 * time.Microsecond)
	h.Observe(time.Minute)
	ops := Counter("x_operations_total", "Operations.", "op")
	lat := Gauge("x_operation_seconds", "Latency.", "op")
	var unhealthy error
	cfg := Config{
		Registry: Registry("x_", func(s Sink) {
			s.Put(ops, 3, "read")
			s.PutHistogram(lat, h.Snapshot(), "read")
		}),
		Status:  func() any { return map[string]int{"a": 1} },
		Healthy: func() error { return unhealthy },
		Log:     slog.New(slog.DiscardHandler),
	}
	srv := httptest.NewServer(Handler(cfg))
	defer srv.Close()

	code, text := get(t, srv.URL+"/metrics")
	for _, want := range []string{
		"# TYPE x_operations_total counter\n", `x_operations_total{op="read"} 3` + "\n", `x_build_info{goversion="go`,
		"# TYPE x_operation_seconds histogram\n",
		`x_operation_seconds_bucket{op="read",le="1e-05"} 0` + "\n", `x_operation_seconds_bucket{op="read",le="2e-05"} 1` + "\n",
		`x_operation_seconds_bucket{op="read",le="10"} 1` + "\n", `x_operation_seconds_bucket{op="read",le="+Inf"} 2` + "\n",
		`x_operation_seconds_sum{op="read"} 60.000015` + "\n", `x_operation_seconds_count{op="read"} 2` + "\n",
	} {
		if code != 200 || !strings.Contains(text, want) {
			t.Errorf("/metrics (%d) lacks %q", code, want)
		}
	}
	if code, text := get(t, srv.URL+"/status"); code != 200 || !strings.Contains(text, `"a": 1`) {
		t.Errorf("/status: %d %q", code, text)
	}
	if code, text := get(t, srv.URL+"/healthz"); code != 200 || text != "ok\n" {
		t.Errorf("/healthz: %d %q", code, text)
	}
	unhealthy = errors.New("reconnecting")
	if code, text := get(t, srv.URL+"/healthz"); code != 503 || text != "reconnecting\n" {
		t.Errorf("/healthz: %d %q", code, text)
	}
	if code, _ := get(t, srv.URL+"/debug/pprof/"); code != 404 {
		t.Errorf("the profiler answers (%d) though it is not switched on", code)
	}
	cfg.Pprof = true
	srv2 := httptest.NewServer(Handler(cfg))
	defer srv2.Close()
	if code, _ := get(t, srv2.URL+"/debug/pprof/"); code != 200 {
		t.Errorf("the profiler answers %d", code)
	}
}

func TestListenAndClose(t *testing.T) {
	cfg := Config{Registry: Registry("x_", func(Sink) {}), Log: slog.New(slog.DiscardHandler), Status: func() any { return nil }, Healthy: func() error { return nil }}
	s, err := Listen("127.0.0.1:0", cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(s.Addr.String(), cfg); err == nil || !strings.Contains(err.Error(), "http endpoint") {
		t.Errorf("second listener on %v: %v", s.Addr, err)
	}
	if code, _ := get(t, "http://"+s.Addr.String()+"/healthz"); code != 200 {
		t.Errorf("healthz %d", code)
	}
	s.Close()
	if _, err := http.Get("http://" + s.Addr.String() + "/healthz"); err == nil {
		t.Error("it answers after Close")
	}
}
