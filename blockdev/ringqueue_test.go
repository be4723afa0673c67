package blockdev

import (
	"bytes"
	"errors"
	"io"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// needRing skips where the kernel or the administrator gives no io_uring.
func needRing(t *testing.T) {
	t.Helper()
	w := newWorker(t)
	var err error
	w.Call(func() {
		var u *uring
		if u, err = newURing(8); err == nil {
			u.close()
		}
	})
	if err != nil {
		if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) {
			t.Skipf("no io_uring for us here: %v", err) // switched off, or a container's filter
		}
		t.Fatal(err)
	}
}

func TestDirectIOGoesThroughTheRing(t *testing.T) {
	needRing(t)
	for _, off := range []bool{false, true} {
		d, err := Open(benchFile(t, 4<<20), Options{Direct: true})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		w := newWorker(t)
		q := newQueue(t, d, w, QueueConfig{NoURing: off})
		// More than the ring takes: the rest goes to the executor.
		const n = ringEntries + 200
		var wg sync.WaitGroup
		wg.Add(n)
		w.Call(func() {
			for i := range n {
				r := &Request{Op: OpWrite, Off: int64(i) * 4096, Buf: q.Alloc(4096)}
				for j := range r.Buf {
					r.Buf[j] = byte(i * 7)
				}
				r.Done = func(r *Request) {
					if r.Err != nil {
						t.Error(r.Err)
					}
					if r.Op == OpWrite {
						clear(r.Buf)
						r.Op = OpRead
						q.Submit(r)
						return
					}
					if r.Buf[0] != byte(i*7) || !bytes.Equal(r.Buf[1:], r.Buf[:4095]) {
						t.Errorf("wrong content at %d", r.Off)
					}
					q.Free(r.Buf)
					wg.Done()
				}
				q.Submit(r)
			}
		})
		wg.Wait()
		s := StatsOf(q)
		if off && s.Async != 0 || !off && (s.Async < ringEntries || s.Executed == 0) || s.Async+s.Executed != 2*n || s.Inline != 0 {
			t.Errorf("switched off %v: %+v", off, s)
		}
	}
}

func TestColdReadsGoThroughTheRing(t *testing.T) {
	needRing(t)
	d, err := Open(benchFile(t, 4<<20), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	d.(*file).tryRead.Store(int32(nowaitNever)) // as cold as can be
	w := newWorker(t)
	q := newQueue(t, d, w, QueueConfig{})
	done := make(chan error, 1)
	w.Call(func() {
		r := &Request{Op: OpRead, Off: 1 << 20, Buf: q.Alloc(4096)}
		r.Done = func(r *Request) {
			for i, b := range r.Buf {
				if b != byte(i) {
					t.Errorf("wrong content at %d", i)
					break
				}
			}
			q.Free(r.Buf)
			done <- r.Err
		}
		q.Submit(r)
	})
	if err := <-done; err != nil {
		t.Error(err)
	}
	if s := StatsOf(q); s.Async != 1 {
		t.Errorf("%+v", s)
	}
}

// What does not go well in the ring has the result of the ordinary way.
func TestErrorsOfTheRing(t *testing.T) {
	needRing(t)
	path := benchFile(t, 1<<20)
	d, err := Open(path, Options{Direct: true})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	w := newWorker(t)
	q := newQueue(t, d, w, QueueConfig{})
	do := func(op Op, off int64, skew int) (err error) {
		done := make(chan error, 1)
		w.Call(func() {
			b := q.Alloc(8192)
			q.Submit(&Request{Op: op, Off: off, Buf: b[skew:][:4096], Done: func(r *Request) { q.Free(b); done <- r.Err }})
		})
		return <-done
	}
	if err := do(OpRead, 0, 0); err != nil {
		t.Error(err)
	}
	for _, op := range []Op{OpRead, OpWrite} {
		if err := do(op, 1<<20, 0); !errors.Is(err, ErrOutOfRange) {
			t.Errorf("%v behind the end: %v", op, err)
		}
		if err := do(op, 100, 0); !errors.Is(err, ErrUnaligned) {
			t.Errorf("%v at 100: %v", op, err)
		}
		if err := do(op, 0, 1); !errors.Is(err, ErrUnaligned) {
			t.Errorf("%v into an odd buffer: %v", op, err)
		}
	}
	if err := os.Truncate(path, 512<<10); err != nil {
		t.Fatal(err)
	}
	if err := do(OpRead, 768<<10, 0); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("read of what was cut off: %v", err)
	}
	if err := do(OpRead, 512<<10-2048, 0); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("read across the new end: %v", err)
	}
	if s := StatsOf(q); s.Async != 2 { // the first and the one that found the cut
		t.Errorf("%+v", s)
	}
}

// A range that somebody holds sends the request to the executor, where it waits.
func TestTheRingDoesNotWaitForARange(t *testing.T) {
	needRing(t)
	d, err := Open(benchFile(t, 1<<20), Options{Direct: true})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	f := d.(*file)
	s := f.locks.span(0, 4096)
	f.locks.lock(s)
	w := newWorker(t)
	q := newQueue(t, d, w, QueueConfig{})
	done := make(chan error, 2)
	w.Call(func() {
		for i := range 2 {
			b := q.Alloc(4096)
			q.Submit(&Request{Op: OpRead, Off: int64(i) * 8192, Buf: b, Done: func(r *Request) { q.Free(b); done <- r.Err }})
		}
	})
	if err := <-done; err != nil {
		t.Error(err)
	}
	if s := StatsOf(q); s.Async != 1 || s.Executed != 1 {
		t.Errorf("%+v", s)
	}
	f.locks.unlock(s)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// Close waits for what is in the ring.
func TestDeviceCloseWithTheRingBusy(t *testing.T) {
	needRing(t)
	d, err := Open(benchFile(t, 4<<20), Options{Direct: true})
	if err != nil {
		t.Fatal(err)
	}
	w := newWorker(t)
	q, err := NewQueue(d, w, QueueConfig{})
	if err != nil {
		t.Fatal(err)
	}
	const n = 64
	errs := make(chan error, n)
	w.Call(func() {
		for i := range n {
			b := q.Alloc(64 << 10)
			q.Submit(&Request{Op: OpRead, Off: int64(i) << 16, Buf: b, Done: func(r *Request) { errs <- r.Err; q.Free(b) }})
		}
		q.Close() // against the rule, with all of it in flight
	})
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	for range n {
		if err := <-errs; err != nil && !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	}
	w.Call(func() {
		if sq := q.(*syncQueue); sq.mem != nil || sq.ring.u != nil {
			t.Error("memory or ring stays")
		}
	})
}
