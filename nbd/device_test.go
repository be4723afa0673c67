package nbd

import (
	"bytes"
	"fmt"
	"sync"
	"testing"

	"rdblk/blockdev"
	"rdblk/internal/arena"
	"rdblk/internal/worker"
)

// memDevice is a device in memory with a fault to order and a log.
type memDevice struct {
	mu   sync.Mutex
	info blockdev.Info
	data []byte
	// fail, if set, is asked before each operation.
	fail func(op blockdev.Op, off, n int64) error
	// ops is what was done, in order, if keep is set.
	keep bool
	ops  []string
}

func newMemDevice(size int64, mod ...func(*blockdev.Info)) *memDevice {
	d := &memDevice{data: make([]byte, size), info: blockdev.Info{
		Name: "test", Size: size, BlockSize: 512, PhysBlock: 4096, WriteCache: true, FUA: true, Discard: true, WriteZeroes: true,
	}}
	for _, m := range mod {
		m(&d.info)
	}
	return d
}

func (d *memDevice) do(op blockdev.Op, off, n int64, flags blockdev.WriteFlags, fn func()) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fail != nil {
		if err := d.fail(op, off, n); err != nil {
			return err
		}
	}
	if d.keep {
		s := fmt.Sprintf("%v %d+%d", op, off, n)
		if flags != 0 {
			s += fmt.Sprintf(" flags %d", flags)
		}
		d.ops = append(d.ops, s)
	}
	if err := blockdev.CheckRange(d.info.Size, d.info.BlockSize, off, n); err != nil {
		return err
	}
	if fn != nil {
		fn()
	}
	return nil
}

func (d *memDevice) log() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.ops
	d.ops = nil
	return l
}

// content is a copy of the data. The lock is also what tells the race detector that
// what a reply promised has happened before.
func (d *memDevice) content() []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	return bytes.Clone(d.data)
}

func (d *memDevice) setFail(f func(op blockdev.Op, off, n int64) error) {
	d.mu.Lock()
	d.fail = f
	d.mu.Unlock()
}

func (d *memDevice) Info() blockdev.Info {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.info
}

func (d *memDevice) ReadAt(p []byte, off int64) error {
	return d.do(blockdev.OpRead, off, int64(len(p)), 0, func() { copy(p, d.data[off:]) })
}

func (d *memDevice) WriteAt(p []byte, off int64, flags blockdev.WriteFlags) error {
	return d.do(blockdev.OpWrite, off, int64(len(p)), flags, func() { copy(d.data[off:], p) })
}

func (d *memDevice) Zero(off, n int64, flags blockdev.WriteFlags) error {
	return d.do(blockdev.OpZero, off, n, flags, func() { clear(d.data[off : off+n]) })
}

func (d *memDevice) Discard(off, n int64) error {
	return d.do(blockdev.OpDiscard, off, n, 0, func() { clear(d.data[off : off+n]) })
}

func (d *memDevice) Flush() error { return d.do(blockdev.OpFlush, 0, 0, 0, nil) }
func (d *memDevice) Close() error { return nil }

// tryMemDevice does reads and writes on the worker.
type tryMemDevice struct{ *memDevice }

func (d tryMemDevice) TryReadAt(p []byte, off int64) error { return d.ReadAt(p, off) }
func (d tryMemDevice) TryWriteAt(p []byte, off int64, f blockdev.WriteFlags) error {
	return d.WriteAt(p, off, f)
}

// heldDevice has queues of its own that answer when the test says so.
type heldDevice struct {
	*memDevice
	queues []*heldQueue
}

// newHeldDevice makes a device with n queues of memory bytes each. Workers end with the test.
func newHeldDevice(t testing.TB, size int64, n, memory int) *heldDevice {
	d := &heldDevice{memDevice: newMemDevice(size)}
	for i := range n {
		w, err := worker.New(worker.Config{Name: fmt.Sprintf("held%d", i)})
		if err != nil {
			t.Fatal(err)
		}
		a, err := arena.New(memory)
		if err != nil {
			t.Fatal(err)
		}
		q := &heldQueue{d: d, w: w, a: a}
		d.queues = append(d.queues, q)
		t.Cleanup(func() { w.Close(); a.Close() })
	}
	return d
}

func (d *heldDevice) NumQueues() int { return len(d.queues) }
func (d *heldDevice) OpenQueue(i int) (blockdev.Queue, error) {
	q := d.queues[i%len(d.queues)]
	q.mu.Lock()
	q.opened++
	q.mu.Unlock()
	return q, nil
}

type heldQueue struct {
	d *heldDevice
	w *worker.Worker
	a *arena.Arena

	mu     sync.Mutex
	pass   bool // answer at once
	held   []*blockdev.Request
	opened int
	closed int
}

func (q *heldQueue) Info() blockdev.Info    { return q.d.Info() }
func (q *heldQueue) Alloc(n int) []byte     { return q.a.Alloc(n) }
func (q *heldQueue) Free(b []byte)          { q.a.Free(b) }
func (q *heldQueue) MaxAlloc() int          { return q.a.Size() }
func (q *heldQueue) Worker() *worker.Worker { return q.w }
func (q *heldQueue) Close() {
	q.mu.Lock()
	q.closed++
	q.mu.Unlock()
}

func (q *heldQueue) Submit(r *blockdev.Request) {
	q.mu.Lock()
	if !q.pass {
		q.held = append(q.held, r)
		q.mu.Unlock()
		return
	}
	q.mu.Unlock()
	q.answer(r)
}

func (q *heldQueue) answer(r *blockdev.Request) {
	switch r.Op {
	case blockdev.OpRead:
		r.Err = q.d.ReadAt(r.Buf, r.Off)
	case blockdev.OpWrite:
		r.Err = q.d.WriteAt(r.Buf, r.Off, r.Flags)
	case blockdev.OpZero:
		r.Err = q.d.Zero(r.Off, r.Len, r.Flags)
	case blockdev.OpDiscard:
		r.Err = q.d.Discard(r.Off, r.Len)
	case blockdev.OpFlush:
		r.Err = q.d.Flush()
	}
	r.Done(r)
}

// count is the number of requests that wait for an answer.
func (q *heldQueue) count() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.held)
}

// release answers request i of those held.
func (q *heldQueue) release(i int) {
	q.mu.Lock()
	r := q.held[i]
	q.held = append(q.held[:i:i], q.held[i+1:]...)
	q.mu.Unlock()
	q.w.Call(func() { q.answer(r) })
}

// open answers everything that is held and from now on at once.
func (q *heldQueue) open() {
	q.mu.Lock()
	l := q.held
	q.held, q.pass = nil, true
	q.mu.Unlock()
	q.w.Call(func() {
		for _, r := range l {
			q.answer(r)
		}
	})
}

// memory is how much of the queue's memory is in use.
func (q *heldQueue) memory() (n int) {
	q.w.Call(func() { n = q.a.InUse() })
	return n
}
