// Package timeout gives waits that end by themselves a reason that an operator can
// act on: how long was waited, and which setting says so. "Context deadline
// exceeded" tells neither.
package timeout

import (
	"context"
	"strings"
	"time"
)

// An Error is the end of a wait. It is context.DeadlineExceeded.
type Error struct {
	After time.Duration
	Of    string // the setting or the event that After belongs to; may be empty
	Kind  error  // what it is besides; may be nil
}

func (e *Error) Error() string {
	s := "no answer within " + Text(e.After)
	if e.Of != "" {
		s += " (" + e.Of + ")"
	}
	return s
}

// Unwrap gives context.DeadlineExceeded, and Kind.
func (e *Error) Unwrap() []error {
	if e.Kind != nil {
		return []error{context.DeadlineExceeded, e.Kind}
	}
	return []error{context.DeadlineExceeded}
}

// Timeout is what package net's errors have.
func (e *Error) Timeout() bool { return true }

// With is context.WithTimeout with a cause that says what ended: read it with context.Cause.
func With(parent context.Context, d time.Duration, of string) (context.Context, context.CancelFunc) {
	return WithKind(parent, d, of, nil)
}

// WithKind is With for an error that is kind as well.
func WithKind(parent context.Context, d time.Duration, of string, kind error) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(parent, d, &Error{After: d, Of: of, Kind: kind})
}

// Text writes a duration as people do: 10m, not 10m0s; 8s, not 8.000000001s.
func Text(d time.Duration) string {
	switch {
	case d > 10*time.Second:
		d = d.Round(100 * time.Millisecond)
	case d > 10*time.Millisecond:
		d = d.Round(time.Millisecond)
	}
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
