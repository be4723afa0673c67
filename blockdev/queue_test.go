package blockdev

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"rdblk/internal/worker"
)

func uintptrOf(ts *unix.Timespec) uintptr { return uintptr(unsafe.Pointer(ts)) }

func newWorker(t testing.TB) *worker.Worker {
	t.Helper()
	w, err := worker.New(worker.Config{Name: "test"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return w
}

func newQueue(t testing.TB, d Device, w *worker.Worker, cfg QueueConfig) Queue {
	t.Helper()
	q, err := NewQueue(d, w, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Call(q.Close) })
	return q
}

// gated is a device whose calls wait for a token and are noted.
type gated struct {
	Device
	maxIO int
	enter chan string
	leave chan error
}

func newGated(t testing.TB, size int64) *gated {
	t.Helper()
	m, err := NewMem("mem", size, Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return &gated{Device: m, enter: make(chan string), leave: make(chan error)}
}

func (d *gated) Info() Info {
	in := d.Device.Info()
	in.MaxIO = d.maxIO
	return in
}

func (d *gated) ReadAt(p []byte, off int64) error {
	d.enter <- fmt.Sprintf("read %d at %d", len(p), off)
	if err := <-d.leave; err != nil {
		return err
	}
	return d.Device.ReadAt(p, off)
}

func (d *gated) WriteAt(p []byte, off int64, f WriteFlags) error {
	d.enter <- fmt.Sprintf("write %d at %d flags %d", len(p), off, f)
	if err := <-d.leave; err != nil {
		return err
	}
	return d.Device.WriteAt(p, off, f)
}

func (d *gated) Flush() error {
	d.enter <- "flush"
	return <-d.leave
}

func TestExecutorIsBoundedAndFair(t *testing.T) {
	w := newWorker(t)
	e := NewExecutor(2)
	defer e.Close()
	a, b := newGated(t, 1<<20), newGated(t, 1<<20)
	qa, qb := newQueue(t, a, w, QueueConfig{Executor: e, ArenaSize: -1}), newQueue(t, b, w, QueueConfig{Executor: e, ArenaSize: -1})
	done := make(chan struct{}, 100)
	answered := func(*Request) { done <- struct{}{} }
	w.Call(func() {
		for i := range 20 {
			qa.Submit(&Request{Op: OpRead, Off: int64(i) * 512, Buf: make([]byte, 512), Done: answered})
		}
		for i := range 3 {
			qb.Submit(&Request{Op: OpRead, Off: int64(i) * 512, Buf: make([]byte, 512), Done: answered})
		}
	})
	// Two run: the first of a and, as queues take turns, soon b. Before b's three are
	// through, a must not have had more than a turn between each.
	fromA, fromB := 0, 0
	for fromB < 3 {
		select {
		case <-a.enter:
			if fromA++; fromA > 2+2*3 {
				t.Fatalf("%d of queue a went before %d of b", fromA, fromB)
			}
			go func() { a.leave <- nil }()
		case <-b.enter:
			fromB++
			go func() { b.leave <- nil }()
		}
	}
	for range 20 - fromA {
		<-a.enter
		if n := e.Stats().Running; n > 2 {
			t.Fatalf("%d calls at one time, want 2", n)
		}
		a.leave <- nil
	}
	for range 23 {
		<-done
	}
	s := e.Stats()
	if s.Max != 2 || s.Executed != 23 || s.Waiting != 0 || s.Peak < 20 {
		t.Errorf("%+v", s)
	}
}

func TestExecutorRunsInOrderOfArrival(t *testing.T) {
	w := newWorker(t)
	e := NewExecutor(1)
	d := newGated(t, 1<<20)
	q := newQueue(t, d, w, QueueConfig{Executor: e, ArenaSize: -1})
	var order []int64
	done := make(chan struct{}, 10)
	w.Call(func() {
		for i := range 10 {
			q.Submit(&Request{Op: OpRead, Off: int64(i) * 512, Buf: make([]byte, 512), Done: func(r *Request) { order = append(order, r.Off/512); done <- struct{}{} }})
		}
	})
	for range 10 {
		<-d.enter
		d.leave <- nil
	}
	for range 10 {
		<-done
	}
	if !slices.IsSorted(order) {
		t.Errorf("order %v", order)
	}
	e.Close()
	var err error
	w.Call(func() { q.Submit(&Request{Op: OpFlush, Done: func(r *Request) { err = r.Err; done <- struct{}{} }}) })
	<-done
	if !errors.Is(err, ErrClosed) {
		t.Errorf("after the executor's Close: %v", err)
	}
}

func TestQueueSplitsToMaxIO(t *testing.T) {
	w := newWorker(t)
	d := newGated(t, 1<<20)
	d.maxIO = 4096
	q := newQueue(t, d, w, QueueConfig{})
	for _, c := range []struct {
		op    Op
		flags WriteFlags
		off   int64
		n     int
		calls []string
		fail  int // the call that fails, from 1
		want  error
	}{
		{OpRead, 0, 512, 4096, []string{"read 4096 at 512"}, 0, nil},
		{OpRead, 0, 512, 4608, []string{"read 4096 at 512", "read 512 at 4608"}, 0, nil},
		{OpWrite, WriteFUA, 0, 12288, []string{"write 4096 at 0 flags 1", "write 4096 at 4096 flags 1", "write 4096 at 8192 flags 1"}, 0, nil},
		{OpWrite, 0, 0, 12288, []string{"write 4096 at 0 flags 0", "write 4096 at 4096 flags 0"}, 2, unix.ENOSPC},
		// Refused as a whole, nothing of it is done.
		{OpWrite, 0, 1<<20 - 8192, 12288, nil, 0, ErrOutOfRange},
		{OpRead, 0, 1<<20 - 8192, 12288, nil, 0, ErrOutOfRange},
		{OpRead, 0, 100, 12288, nil, 0, ErrUnaligned},
	} {
		done := make(chan error, 1)
		w.Call(func() {
			r := &Request{Op: c.op, Flags: c.flags, Off: c.off, Buf: q.Alloc(c.n)}
			r.Done = func(r *Request) { q.Free(r.Buf); done <- r.Err }
			q.Submit(r)
		})
		for i, want := range c.calls {
			if got := <-d.enter; got != want {
				t.Errorf("call %d: %s, want %s", i, got, want)
			}
			if c.fail == i+1 {
				d.leave <- c.want
			} else {
				d.leave <- nil
			}
		}
		if err := <-done; !errors.Is(err, c.want) {
			t.Errorf("%v of %d at %d: %v, want %v", c.op, c.n, c.off, err, c.want)
		}
	}
}

// halfTry answers the first of several pieces on the worker and blocks on the second.
type halfTry struct {
	*gated
	tried []int64
}

func (d *halfTry) TryReadAt(p []byte, off int64) error {
	d.tried = append(d.tried, off)
	if off > 0 {
		return ErrWouldBlock
	}
	return d.Device.ReadAt(p, off)
}

func (d *halfTry) TryWriteAt(p []byte, off int64, f WriteFlags) error { return ErrWouldBlock }

func TestAHalfDoneTryGoesOnInTheExecutor(t *testing.T) {
	w := newWorker(t)
	d := &halfTry{gated: newGated(t, 1<<20)}
	d.maxIO = 4096
	want := make([]byte, 12288)
	for i := range want {
		want[i] = byte(i / 7)
	}
	if err := d.Device.WriteAt(want, 0, 0); err != nil {
		t.Fatal(err)
	}
	q := newQueue(t, d, w, QueueConfig{})
	done := make(chan error, 1)
	w.Call(func() {
		r := &Request{Op: OpRead, Buf: q.Alloc(len(want))}
		r.Done = func(r *Request) {
			if !slices.Equal(r.Buf, want) {
				t.Error("wrong content")
			}
			q.Free(r.Buf)
			done <- r.Err
		}
		q.Submit(r)
	})
	for _, c := range []string{"read 4096 at 4096", "read 4096 at 8192"} {
		if got := <-d.enter; got != c {
			t.Errorf("%s, want %s", got, c)
		}
		d.leave <- nil
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if !slices.Equal(d.tried, []int64{0, 4096}) {
		t.Errorf("tried %v", d.tried)
	}
	if s := StatsOf(q); s.Inline != 0 || s.Executed != 1 || s.WouldBlock != 1 {
		t.Errorf("%+v", s)
	}
}

// Close with requests outstanding breaks the contract; nothing may break because of it.
func TestQueueCloseWithWorkOutstanding(t *testing.T) {
	w := newWorker(t)
	e := NewExecutor(1)
	defer e.Close()
	d := newGated(t, 1<<20)
	q, err := NewQueue(d, w, QueueConfig{Executor: e})
	if err != nil {
		t.Fatal(err)
	}
	errs := make(chan error, 3)
	var bufs [][]byte
	w.Call(func() {
		for range 2 {
			b := q.Alloc(4096)
			bufs = append(bufs, b)
			q.Submit(&Request{Op: OpRead, Buf: b, Done: func(r *Request) {
				r.Buf[0]++ // still mapped
				errs <- r.Err
			}})
		}
	})
	<-d.enter
	w.Call(func() {
		q.Close()
		q.Submit(&Request{Op: OpFlush, Done: func(r *Request) { errs <- r.Err }})
	})
	if err := <-errs; !errors.Is(err, ErrClosed) {
		t.Errorf("submitted after Close: %v", err)
	}
	d.leave <- nil
	if err := <-errs; err != nil {
		t.Errorf("the one that had begun: %v", err)
	}
	if err := <-errs; !errors.Is(err, ErrClosed) {
		t.Errorf("the one that had not begun: %v", err)
	}
	w.Call(func() {
		if q.(*syncQueue).mem == nil {
			t.Error("memory is gone while buffers are out")
		}
		for _, b := range bufs {
			b[0]++
			q.Free(b)
		}
		if q.(*syncQueue).mem != nil {
			t.Error("memory stays")
		}
		if q.Alloc(4096) != nil {
			t.Error("Alloc after Close")
		}
		q.Close()
	})
}

func TestQueueWithoutMemory(t *testing.T) {
	w := newWorker(t)
	d, err := NewMem("mem", 1<<20, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	q := newQueue(t, d, w, QueueConfig{ArenaSize: -1})
	done := make(chan error, 1)
	w.Call(func() {
		if q.Alloc(512) != nil || q.MaxAlloc() != 0 {
			t.Error("memory from nowhere")
		}
		q.Submit(&Request{Op: OpWrite, Buf: make([]byte, 512), Done: func(r *Request) { done <- r.Err }})
	})
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A device that says at random that it would block, and many requests that submit
// themselves again: all ways through the queue at once.
func TestQueueUnderLoad(t *testing.T) {
	w := newWorker(t)
	m, err := NewMem("mem", 1<<20, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	d := &moody{TryDevice: m.(TryDevice)}
	q := newQueue(t, d, w, QueueConfig{})
	const n, rounds = 64, 500
	var wg sync.WaitGroup
	wg.Add(n)
	w.Call(func() {
		for i := range n {
			left := rounds
			ops := []Op{OpRead, OpWrite, OpFlush, OpZero, OpDiscard}
			r := &Request{Op: ops[i%len(ops)], Off: int64(i) * 4096, Len: 4096, Buf: q.Alloc(4096)}
			r.Done = func(r *Request) {
				if r.Err != nil {
					t.Error(r.Err)
				}
				if left--; left == 0 {
					q.Free(r.Buf)
					wg.Done()
					return
				}
				q.Submit(r)
			}
			q.Submit(r)
		}
	})
	wg.Wait()
	s := StatsOf(q)
	if s.Inline+s.Executed != n*rounds || s.Inline == 0 || s.WouldBlock == 0 {
		t.Errorf("%+v", s)
	}
}

type moody struct {
	TryDevice
	n int
}

func (d *moody) TryReadAt(p []byte, off int64) error {
	if d.n++; d.n%3 == 0 {
		return ErrWouldBlock
	}
	return d.TryDevice.TryReadAt(p, off)
}

func (d *moody) TryWriteAt(p []byte, off int64, f WriteFlags) error {
	if d.n++; d.n%3 == 0 {
		return ErrWouldBlock
	}
	return d.TryDevice.TryWriteAt(p, off, f)
}

func TestNoAllocationPerRequest(t *testing.T) {
	file := benchFile(t, 1<<20)
	for _, c := range []struct {
		name string
		spec string
		o    Options
		cfg  QueueConfig
	}{
		{"null", "null:1M", Options{}, QueueConfig{}},
		{"mem", "mem:1M", Options{}, QueueConfig{}},
		{"file", file, Options{}, QueueConfig{}},
		{"file, executor", file, Options{}, QueueConfig{MaxInline: -1}},
		{"file, direct", file, Options{Direct: true}, QueueConfig{}},
	} {
		for _, flags := range []WriteFlags{0, WriteFUA} {
			for _, op := range []Op{OpRead, OpWrite, OpFlush} {
				t.Run(fmt.Sprintf("%s/%v/%d", c.name, op, flags), func(t *testing.T) {
					if flags != 0 && op != OpWrite {
						return
					}
					d, err := Open(c.spec, c.o)
					if err != nil {
						t.Fatal(err)
					}
					defer d.Close()
					w := newWorker(t)
					q := newQueue(t, d, w, c.cfg)
					done := make(chan struct{}, 1)
					var r *Request
					submit := worker.TaskFunc(func() { q.Submit(r) })
					var task worker.Task = submit
					w.Call(func() {
						r = &Request{Op: op, Flags: flags, Off: 8192, Buf: q.Alloc(4096)}
						r.Done = func(r *Request) {
							if r.Err != nil {
								t.Error(r.Err)
							}
							done <- struct{}{}
						}
					})
					if n := testing.AllocsPerRun(100, func() {
						w.Submit(task)
						<-done
					}); n != 0 && !raceDetector {
						t.Errorf("%v allocations", n)
					}
					w.Call(func() { q.Free(r.Buf) })
				})
			}
		}
	}
	runtime.KeepAlive(file)
}

// A write that would be made on the worker is not any more when a queue on another store is
// there, and is again when that has gone.
func TestNeighboursOnOtherStores(t *testing.T) {
	w := newWorker(t)
	openQueue := func(spec string) Queue {
		d, err := Open(spec, Options{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		return newQueue(t, d, w, QueueConfig{})
	}
	do := func(q Queue, op Op) (inline uint64) {
		before := StatsOf(q)
		done := make(chan error, 1)
		w.Call(func() {
			b := q.Alloc(4096)
			q.Submit(&Request{Op: op, Buf: b, Done: func(r *Request) { q.Free(b); done <- r.Err }})
		})
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		return StatsOf(q).Inline - before.Inline
	}
	dir := t.TempDir()
	specs := [2]string{dir + "/a", dir + "/b"}
	for _, s := range specs {
		if err := os.WriteFile(s, make([]byte, 1<<20), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	a, b := openQueue(specs[0]), openQueue(specs[1])
	if do(a, OpWrite) != 1 || do(b, OpWrite) != 1 {
		t.Error("two files of one file system: writes are not made on the worker")
	}
	m := openQueue("mem:1M")
	if do(a, OpWrite) != 0 || do(b, OpWrite) != 0 {
		t.Error("beside another store: a write is made on the worker")
	}
	if do(a, OpRead) != 1 || do(m, OpWrite) != 1 || do(m, OpRead) != 1 {
		t.Error("what never waits is not done on the worker")
	}
	w.Call(m.Close)
	if do(a, OpWrite) != 1 {
		t.Error("the other store has gone: writes are not made on the worker")
	}
	w.Call(a.Close)
	w.Call(b.Close)
	neighbourhood.mu.Lock()
	defer neighbourhood.mu.Unlock()
	if neighbourhood.of[w] != nil {
		t.Error("the worker is remembered though all its queues are closed")
	}
}
