package blockdevtest

import (
	"errors"
	"sync"

	"rdblk/blockdev"
)

// ViaTry is d over its Try methods: each transfer is tried first, and what would
// block is made in the ordinary way.
func ViaTry(d blockdev.TryDevice) blockdev.Device { return &viaTry{d} }

type viaTry struct{ blockdev.TryDevice }

func (d *viaTry) ReadAt(p []byte, off int64) error {
	if err := d.TryReadAt(p, off); !errors.Is(err, blockdev.ErrWouldBlock) {
		return err
	}
	return d.TryDevice.ReadAt(p, off)
}

func (d *viaTry) WriteAt(p []byte, off int64, flags blockdev.WriteFlags) error {
	if err := d.TryWriteAt(p, off, flags); !errors.Is(err, blockdev.ErrWouldBlock) {
		return err
	}
	return d.TryDevice.WriteAt(p, off, flags)
}

// ViaQueue is the device d over q, one of its queues, as a synchronous device again: every
// call becomes a request. Calls may be concurrent. Close closes q and d.
func ViaQueue(q blockdev.Queue, d blockdev.Device) blockdev.Device {
	v := &viaQueue{q: q, d: d}
	if err := q.Worker().Call(func() { v.most = q.MaxAlloc() }); err != nil {
		panic(err) // a queue whose worker is closed is of no use to a test
	}
	return v
}

type viaQueue struct {
	q blockdev.Queue
	d blockdev.Device

	most int // MaxAlloc

	mu     sync.RWMutex // held for reading by calls
	closed bool

	waiting []*call // for memory; the worker's
}

// call is one request on its way.
type call struct {
	v    *viaQueue
	r    blockdev.Request
	p    []byte // the caller's buffer
	n    int    // to allocate
	done chan struct{}
}

// Run starts the call on the worker.
func (c *call) Run() {
	if c.n > 0 {
		if len(c.v.waiting) == 0 { // first come, first served
			c.r.Buf = c.v.q.Alloc(c.n)
		}
		if c.r.Buf == nil {
			c.v.waiting = append(c.v.waiting, c)
			return
		}
		if c.r.Op == blockdev.OpWrite {
			copy(c.r.Buf, c.p)
		}
	}
	c.r.Done = c.answered
	c.v.q.Submit(&c.r)
}

func (c *call) answered(r *blockdev.Request) {
	if c.n > 0 {
		if r.Op == blockdev.OpRead && r.Err == nil {
			copy(c.p, r.Buf)
		}
		c.v.q.Free(r.Buf)
	}
	close(c.done)
	if w := c.v.waiting; len(w) > 0 { // try them again, in their order
		c.v.waiting = nil
		for _, o := range w {
			o.Run()
		}
	}
}

func (v *viaQueue) do(op blockdev.Op, p []byte, off, n int64, flags blockdev.WriteFlags) error {
	v.mu.RLock()
	defer v.mu.RUnlock()
	if v.closed {
		return blockdev.ErrClosed
	}
	c := &call{v: v, p: p, n: len(p), done: make(chan struct{})}
	c.r = blockdev.Request{Op: op, Off: off, Len: n, Flags: flags}
	if err := v.q.Worker().Submit(c); err != nil {
		return err
	}
	<-c.done
	return c.r.Err
}

// split makes several calls of a transfer that no buffer could hold.
func (v *viaQueue) split(op blockdev.Op, p []byte, off int64, flags blockdev.WriteFlags) error {
	most := v.most
	in := v.d.Info()
	if len(p) > most {
		if err := in.CheckRange(off, int64(len(p))); err != nil {
			return err
		}
	}
	for {
		n := min(len(p), most)
		if err := v.do(op, p[:n], off, int64(n), flags); err != nil {
			return err
		}
		if p, off = p[n:], off+int64(n); len(p) == 0 {
			return nil
		}
	}
}

func (v *viaQueue) Info() blockdev.Info { return v.d.Info() }

func (v *viaQueue) ReadAt(p []byte, off int64) error { return v.split(blockdev.OpRead, p, off, 0) }

func (v *viaQueue) WriteAt(p []byte, off int64, flags blockdev.WriteFlags) error {
	return v.split(blockdev.OpWrite, p, off, flags)
}

func (v *viaQueue) Zero(off, n int64, flags blockdev.WriteFlags) error {
	return v.do(blockdev.OpZero, nil, off, n, flags)
}

func (v *viaQueue) Discard(off, n int64) error { return v.do(blockdev.OpDiscard, nil, off, n, 0) }

func (v *viaQueue) Flush() error { return v.do(blockdev.OpFlush, nil, 0, 0, 0) }

func (v *viaQueue) Close() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed {
		return blockdev.ErrClosed
	}
	v.closed = true
	return errors.Join(v.q.Worker().Call(v.q.Close), v.d.Close())
}

// crashAfter tells when so many calls have been made. The calls go on, so that the crash hits some.
type crashAfter struct {
	blockdev.Device
	mu    sync.Mutex
	left  int
	crash chan struct{}
}

func (c *crashAfter) count() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left--; c.left == 0 {
		close(c.crash)
	}
}

func (c *crashAfter) ReadAt(p []byte, off int64) error {
	c.count()
	return c.Device.ReadAt(p, off)
}

func (c *crashAfter) WriteAt(p []byte, off int64, flags blockdev.WriteFlags) error {
	c.count()
	return c.Device.WriteAt(p, off, flags)
}

func (c *crashAfter) Zero(off, n int64, flags blockdev.WriteFlags) error {
	c.count()
	return c.Device.Zero(off, n, flags)
}

func (c *crashAfter) Discard(off, n int64) error {
	c.count()
	return c.Device.Discard(off, n)
}

func (c *crashAfter) Flush() error {
	c.count()
	return c.Device.Flush()
}
