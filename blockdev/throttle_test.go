package blockdev_test

import (
	"os"
	"path/filepath"
	"strings"
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
	// What is set stays with a loop device that is detached, and whoever gets it next would be throttled. max_bytes is
	// kept as a part of all dirty pages, which max_ratio_fine gives back exactly.
	for _, name := range []string{"strict_limit", "max_ratio_fine"} {
		old, err := os.ReadFile(filepath.Join(bdi, name))
		if err != nil {
			t.Skipf("this kernel cannot limit the dirty pages of one disk: %v", err)
		}
		t.Cleanup(func() {
			if err := os.WriteFile(filepath.Join(bdi, name), []byte(strings.TrimSpace(string(old))), 0); err != nil {
				t.Errorf("the limit of %s stays: %v", dev, err)
			}
		})
	}
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
	written := 0
	limit := time.Now().Add(60 * time.Second)
	w.Call(func() {
		r := &blockdev.Request{Op: blockdev.OpWrite, Buf: q.Alloc(64 << 10)}
		r.Done = func(r *blockdev.Request) {
			if r.Err != nil {
				t.Error(r.Err)
			}
			if written++; blockdev.StatsOf(q).WouldBlock > 0 || time.Now().After(limit) {
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
	t.Logf("%+v of %d, the worker stalled for %v in all", s, written, stalled)
	if s.Executed == 0 || s.WouldBlock == 0 {
		t.Errorf("all writes of a throttled writer were made on the worker: %+v", s)
	}
}
