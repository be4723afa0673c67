package target

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// rateLog limits log lines that a stranger can cause: a burst, then some per
// interval; what was left out is counted and told with the next line. It may be
// used by several goroutines.
type rateLog struct {
	log      *slog.Logger
	now      func() time.Time
	burst    int
	interval time.Duration // one more line per interval

	mu         sync.Mutex
	tokens     int
	last       time.Time
	suppressed int
}

func newRateLog(log *slog.Logger, now func() time.Time, burst int, interval time.Duration) *rateLog {
	return &rateLog{log: log, now: now, burst: burst, interval: interval, tokens: burst, last: now()}
}

// Log writes the line or counts it.
func (r *rateLog) Log(level slog.Level, msg string, attrs ...slog.Attr) {
	r.mu.Lock()
	if n := int(r.now().Sub(r.last) / r.interval); n > 0 {
		r.last = r.last.Add(time.Duration(n) * r.interval)
		r.tokens = min(r.tokens+n, r.burst)
	}
	if r.tokens == 0 {
		r.suppressed++
		r.mu.Unlock()
		return
	}
	r.tokens--
	left := r.suppressed
	r.suppressed = 0
	r.mu.Unlock()
	if left > 0 {
		attrs = append(attrs, slog.Int("suppressed", left))
	}
	r.log.LogAttrs(context.Background(), level, msg, attrs...)
}
