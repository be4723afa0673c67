package nbd

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// limitedLog writes lines that strangers can cause, at most burst of them every
// period; what is left out is counted in the next line.
type limitedLog struct {
	log *slog.Logger
	now func() time.Time

	mu      sync.Mutex // guards what follows
	start   time.Time
	lines   int
	omitted int
}

const (
	logBurst  = 20
	logPeriod = 5 * time.Second
)

func (l *limitedLog) Log(level slog.Level, msg string, attrs ...slog.Attr) {
	if !l.log.Enabled(context.Background(), level) {
		return
	}
	l.mu.Lock()
	now := l.now()
	if now.Sub(l.start) >= logPeriod {
		l.start, l.lines = now, 0
	}
	if l.lines >= logBurst {
		l.omitted++
		l.mu.Unlock()
		return
	}
	l.lines++
	if l.omitted > 0 {
		attrs = append(attrs, slog.Int("omitted", l.omitted))
		l.omitted = 0
	}
	l.mu.Unlock()
	l.log.LogAttrs(context.Background(), level, msg, attrs...)
}
