package blockdev_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"rdblk/blockdev"
	"rdblk/internal/worker"
)

// TestThrottledWritesLeaveTheWorker lets the kernel throttle a writer for real: a
// disk that may have hardly any dirty pages.
func TestThrottledWritesLeaveTheWorker(t *testing.T) {
	dev := loop(t, newFile(t, t.TempDir(), 256<<20))
	bdi := filepath.Join("/sys/block", filepath.Base(dev), "bdi")
	for _, s := range [][2]string{{"strict_limit", "1"}, {"max_bytes", "1048576"}} {
		if err := os.WriteFile(filepath.Join(bdi, s[0]), []byte(s[1]), 0); err != nil {
			t.Skipf("this kernel cannot limit the dirty pages of one disk: %v", err)
		}
	}
	d := open(t, dev, blockdev.Options{})
	w, err := worker.New(worker.Config{})
	must(t, "worker", err)
	defer w.Close()
	q, err := blockdev.NewQueue(d, w, blockdev.QueueConfig{})
	must(t, "queue", err)
	defer w.Call(q.Close)
	var stalled time.Duration
	done := make(chan struct{})
	left := 20000
	limit := time.Now().Add(2 * time.Second)
	w.Call(func() {
		r := &blockdev.Request{Op: blockdev.OpWrite, Buf: q.Alloc(64 << 10)}
		r.Done = func(r *blockdev.Request) {
			if r.Err != nil {
				t.Error(r.Err)
			}
			if left--; left <= 0 || time.Now().After(limit) {
				q.Free(r.Buf)
				close(done)
				return
			}
			r.Off = (r.Off + 64<<10) % (256 << 20)
			start := time.Now()
			q.Submit(r)
			if took := time.Since(start); took > 2*time.Millisecond {
				stalled += took
			}
		}
		q.Submit(r)
	})
	<-done
	s := blockdev.StatsOf(q)
	t.Logf("%+v of %d, the worker stalled for %v in all", s, 20000-left, stalled)
	if s.Executed == 0 || s.WouldBlock == 0 {
		t.Errorf("all writes of a throttled writer were made on the worker: %+v", s)
	}
}
