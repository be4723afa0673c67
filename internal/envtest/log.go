package envtest

import (
	"bytes"
	"log/slog"
	"regexp"
	"sync"
	"testing"
	"time"
)

// Patience bounds how long Await waits: long, because a machine may be busy.
const Patience = 60 * time.Second

// A Log takes what several goroutines or a process write, and can be read and waited on
// meanwhile. The zero value is empty.
type Log struct {
	mu   sync.Mutex
	buf  bytes.Buffer
	news chan struct{} // closed by the next Write; nil if nobody waits
}

func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.news != nil {
		close(l.news)
		l.news = nil
	}
	return l.buf.Write(p)
}

// String is all that was written since the last Reset.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// Len is how many bytes that is.
func (l *Log) Len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Len()
}

// Reset forgets what was written.
func (l *Log) Reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buf.Reset()
}

// Logger writes to l from the level debug on.
func (l *Log) Logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// Await waits for a match of a pattern and returns it with its groups.
func (l *Log) Await(t testing.TB, pattern string) []string {
	t.Helper()
	re := regexp.MustCompile(pattern)
	end := time.After(Patience)
	for {
		l.mu.Lock()
		m := re.FindStringSubmatch(l.buf.String())
		if l.news == nil {
			l.news = make(chan struct{})
		}
		news := l.news
		l.mu.Unlock()
		if m != nil {
			return m
		}
		select {
		case <-news:
		case <-end:
			t.Fatalf("no %q within %v in:\n%s", pattern, Patience, l)
		}
	}
}
