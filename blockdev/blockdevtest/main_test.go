package blockdevtest

import (
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"
)

// TestMain looks for goroutines and descriptors that were left behind.
func TestMain(m *testing.M) {
	count := func() int { l, _ := os.ReadDir("/proc/self/fd"); return len(l) }
	if r, w, err := os.Pipe(); err == nil { // starts the runtime's poller, which has descriptors too
		r.Close()
		w.Close()
	}
	before := count()
	code := m.Run()
	for limit := time.Now().Add(30 * time.Second); code == 0 && (count() > before || runtime.NumGoroutine() > 2); runtime.Gosched() {
		if time.Now().After(limit) {
			fmt.Printf("leak: %d descriptors (%d at the start), %d goroutines\n", count(), before, runtime.NumGoroutine())
			buf := make([]byte, 1<<20)
			os.Stdout.Write(buf[:runtime.Stack(buf, true)])
			code = 1
		}
	}
	os.Exit(code)
}
