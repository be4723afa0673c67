package envtest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// Whoever waits sees what comes, and what has come before; nothing is lost between many writers.
func TestLog(t *testing.T) {
	var l Log
	const writers, lines = 8, 100
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for n := range lines {
				fmt.Fprintf(&l, "writer %d line %d.\n", w, n)
			}
		})
		wg.Go(func() {
			if m := l.Await(t, fmt.Sprintf(`writer %d line (9\d)\.`, w)); m[1] != "90" {
				t.Errorf("%q", m)
			}
		})
	}
	wg.Wait()
	if n := strings.Count(l.String(), "\n"); n != writers*lines || l.Len() != len(l.String()) {
		t.Errorf("%d lines, %d bytes", n, l.Len())
	}
	l.Await(t, "writer 3 line 99")
	l.Reset()
	l.Logger().Debug("message", "key", "value")
	if s := l.String(); !strings.HasSuffix(s, "level=DEBUG msg=message key=value\n") || strings.Count(s, "\n") != 1 {
		t.Errorf("%q", s)
	}
}

func TestHex(t *testing.T) {
	f := filepath.Join(t.TempDir(), "x.hex")
	if err := os.WriteFile(f, []byte("# a comment\n00ff\n# another\n7F\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if b := Hex(t, f); string(b) != "\x00\xff\x7f" {
		t.Errorf("% x", b)
	}
}
