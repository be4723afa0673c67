package initiator

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"rdblk/blockdev"
	"rdblk/internal/timeout"
	"rdblk/internal/worker"
)

// Device is a namespace of the target as a block device. Its queues
// (blockdev.QueueDevice) are the session's: one per I/O queue, each bound to that
// queue's worker. The synchronous methods go through them too, with a copy, and wait
// like any request for a target that is away: at most about Config.LossTimeout.
type Device struct {
	s       *Session
	ns      *namespace
	owns    bool // Close closes the session too
	running sync.RWMutex
	closed  bool // under running
}

var (
	_ blockdev.QueueDevice = (*Device)(nil)
	_ blockdev.Resizer     = (*Device)(nil)
)

// Open connects and gives the one device: Connect and Device(cfg.NSID) for those who
// need no more. Closing the device closes the session.
func Open(ctx context.Context, cfg Config) (*Device, error) {
	s, err := Connect(ctx, cfg)
	if err != nil {
		return nil, err
	}
	d, err := s.Device(cfg.NSID)
	if err != nil {
		return nil, errors.Join(err, s.Close(ctx))
	}
	d.owns = true
	return d, nil
}

// Device gives the namespace nsid as a block device; 0 is Config.NSID or, if that is 0
// too, the usable namespace with the lowest number. It may be called several times.
func (s *Session) Device(nsid uint32) (*Device, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state >= StateClosing {
		return nil, ErrClosed
	}
	if nsid == 0 {
		nsid = s.cfg.NSID
	}
	if nsid == 0 {
		for id, f := range s.found {
			if f.err == nil && (nsid == 0 || id < nsid) {
				nsid = id
			}
		}
		if nsid == 0 {
			for id, f := range s.found {
				return nil, fmt.Errorf("%s has no usable namespace: namespace %d: %w", s.subnqn, id, f.err)
			}
			return nil, fmt.Errorf("%s: %w (it has none for this host)", s.subnqn, ErrNoNamespace)
		}
	}
	n := s.namespaces[nsid]
	if n == nil {
		f := s.found[nsid]
		if f == nil {
			return nil, fmt.Errorf("namespace %d of %s: %w", nsid, s.subnqn, ErrNoNamespace)
		}
		if f.err != nil {
			return nil, fmt.Errorf("namespace %d of %s: %w", nsid, s.subnqn, f.err)
		}
		n = newNamespace(s, f.d, f.g)
		n.epoch = f.epoch
		s.namespaces[nsid] = n
		if n.id.none() {
			s.log.Warn("namespace has no UUID, NGUID or EUI64: after a reconnect only the controller's serial number and the size tell whether it is the same", "ns", nsid)
		}
	}
	return &Device{s: s, ns: n}, nil
}

// Session is the session that the device belongs to.
func (d *Device) Session() *Session { return d.s }

// Fault is why requests or flushes of the device fail, for as long as nothing changes at
// the target or for good; nil if they do not. It matches ErrCacheLost, ErrChanged,
// ErrNoNamespace or blockdev.ErrFlushFailed.
func (d *Device) Fault() error {
	n := d.ns
	for _, f := range []*error{n.ruined.Load(), n.fault.Load()} {
		if f != nil {
			return *f
		}
	}
	if err := n.goneError(); err != nil {
		return err
	}
	if f := n.flushFailed.Load(); f != nil {
		return *f
	}
	return nil
}

// NSID is the namespace identifier.
func (d *Device) NSID() uint32 { return d.ns.nsid }

// Info describes the device as the target's Identify data does.
func (d *Device) Info() blockdev.Info { return d.ns.geometry().info }

// NumQueues is the number of I/O queues.
func (d *Device) NumQueues() int { return len(d.s.queues) }

// OpenQueue gives a handle on I/O queue i mod NumQueues.
func (d *Device) OpenQueue(i int) (blockdev.Queue, error) {
	d.running.RLock()
	defer d.running.RUnlock()
	if d.closed {
		return nil, ErrClosed
	}
	if i < 0 {
		return nil, fmt.Errorf("queue %d: %w", i, blockdev.ErrOutOfRange)
	}
	return &handle{q: d.s.queues[i%len(d.s.queues)], ns: d.ns}, nil
}

// Refresh reads the namespace's description again, as a notice from the target makes it
// by itself.
func (d *Device) Refresh() (blockdev.Info, error) {
	d.running.RLock()
	defer d.running.RUnlock()
	if d.closed {
		return blockdev.Info{}, ErrClosed
	}
	ctx, stop := timeout.WithKind(d.s.ctx, d.s.cfg.ConnectTimeout, "connect_timeout", ErrTimeout)
	defer stop()
	d.s.mu.Lock()
	as := d.s.as
	d.s.mu.Unlock()
	if as == nil {
		return d.Info(), fmt.Errorf("%s: %w: not connected now", d.ns.name(), blockdev.ErrWouldBlock)
	}
	before := d.Info().Size
	err := d.s.scan(ctx, as.ctrl, true)
	if f := d.ns.fault.Load(); err == nil && f != nil {
		err = *f
	}
	if err == nil {
		d.s.mu.Lock()
		f := d.s.found[d.ns.nsid]
		d.s.mu.Unlock()
		switch {
		case f == nil:
			err = fmt.Errorf("%s: %w", d.ns.name(), ErrNoNamespace)
		case f.g != nil && f.g.info.Size < before:
			err = fmt.Errorf("%s: %w: it had %d bytes and has %d; the old size stays", d.ns.name(), ErrChanged, before, f.g.info.Size)
		}
	}
	return d.Info(), err
}

// Close ends the device: it waits for running calls, and later ones return ErrClosed.
// Queues that were opened stay usable until the session is closed. A device from Open
// closes its session, waiting for requests as long as the session would wait for the
// target.
func (d *Device) Close() error {
	d.running.Lock()
	was := d.closed
	d.closed = true
	d.running.Unlock()
	if was {
		return ErrClosed
	}
	if !d.owns {
		return nil
	}
	return d.s.Close(context.Background())
}

// ReadAt reads len(p) bytes at off.
func (d *Device) ReadAt(p []byte, off int64) error {
	return d.do(blockdev.OpRead, p, off, 0, 0)
}

// WriteAt writes p at off.
func (d *Device) WriteAt(p []byte, off int64, flags blockdev.WriteFlags) error {
	return d.do(blockdev.OpWrite, p, off, 0, flags)
}

// Zero makes n bytes at off read as zeros.
func (d *Device) Zero(off, n int64, flags blockdev.WriteFlags) error {
	return d.do(blockdev.OpZero, nil, off, n, flags)
}

// Discard tells the target that n bytes at off are not needed.
func (d *Device) Discard(off, n int64) error { return d.do(blockdev.OpDiscard, nil, off, n, 0) }

// Flush makes what has been written before, through any queue, durable.
func (d *Device) Flush() error { return d.do(blockdev.OpFlush, nil, 0, 0, 0) }

// syncChunk is how much of a synchronous read or write is under way at a time.
const syncChunk = 512 << 10

func (d *Device) do(op blockdev.Op, p []byte, off, n int64, flags blockdev.WriteFlags) error {
	d.running.RLock()
	defer d.running.RUnlock()
	if d.closed {
		return ErrClosed
	}
	q := d.s.queues[d.s.next.Add(1)%uint64(len(d.s.queues))]
	data := op == blockdev.OpRead || op == blockdev.OpWrite
	if data {
		// The whole range first: a call that cannot be done does nothing.
		info := d.Info()
		if err := info.CheckRange(off, int64(len(p))); err != nil {
			return fmt.Errorf("%s: %w", op, err)
		}
	}
	o := syncPool.Get().(*syncOp)
	defer o.put()
	o.q, o.ns = q, d.ns
	for {
		o.r = blockdev.Request{Op: op, Flags: flags, Off: off, Len: n, Done: syncDone, User: o}
		o.p = p[:min(len(p), syncChunk)]
		if err := q.w.Submit(o); err != nil {
			return ErrClosed
		}
		<-o.end
		if o.err != nil {
			return o.err
		}
		off += int64(len(o.p))
		if p = p[len(o.p):]; len(p) == 0 {
			return nil
		}
	}
}

// A syncOp carries one synchronous call to the worker and back.
type syncOp struct {
	q    *ioQueue
	ns   *namespace
	r    blockdev.Request
	p    []byte // the caller's
	buf  []byte
	err  error
	end  chan struct{}
	next *syncOp
}

var syncPool = sync.Pool{New: func() any { return &syncOp{end: make(chan struct{}, 1)} }}

var _ worker.Task = (*syncOp)(nil)

func (o *syncOp) put() {
	o.q, o.ns, o.p, o.r, o.err = nil, nil, nil, blockdev.Request{}, nil
	syncPool.Put(o)
}

// Run is worker.Task. An operation that finds no memory waits its turn.
func (o *syncOp) Run() {
	q := o.q
	if len(o.p) > 0 {
		if q.sideWait.head != nil {
			q.sideWait.push(o)
			return
		}
		if o.buf = q.side.Alloc(len(o.p)); o.buf == nil {
			q.sideWait.push(o)
			return
		}
	}
	o.start()
}

func (o *syncOp) start() {
	o.r.Buf = o.buf
	if o.r.Op == blockdev.OpWrite {
		copy(o.buf, o.p)
	}
	o.q.submit(o.ns, &o.r)
}

func syncDone(r *blockdev.Request) {
	o := r.User.(*syncOp)
	q := o.q
	if o.buf != nil {
		if r.Op == blockdev.OpRead && r.Err == nil {
			copy(o.p, o.buf)
		}
		q.side.Free(o.buf)
		o.buf = nil
	}
	o.finish(r.Err)
	q.serveSide()
}

// finish lets the caller go on; the operation is its again.
func (o *syncOp) finish(err error) {
	o.err = err
	o.end <- struct{}{}
}

// serveSide starts what waits for side memory, first come first served.
func (q *ioQueue) serveSide() {
	if q.serving {
		return // by the loop below, under whose start this operation ended
	}
	q.serving = true
	for o := q.sideWait.head; o != nil; o = q.sideWait.head {
		if o.buf = q.side.Alloc(len(o.p)); o.buf == nil {
			break
		}
		q.sideWait.pop()
		o.start()
	}
	q.serving = false
}

// syncList is a FIFO of operations.
type syncList struct{ head, tail *syncOp }

func (l *syncList) push(o *syncOp) {
	o.next = nil
	if l.tail == nil {
		l.head = o
	} else {
		l.tail.next = o
	}
	l.tail = o
}

func (l *syncList) pop() *syncOp {
	o := l.head
	if o == nil {
		return nil
	}
	if l.head = o.next; l.head == nil {
		l.tail = nil
	}
	o.next = nil
	return o
}

// handle is a blockdev.Queue for one namespace on one I/O queue.
type handle struct {
	q  *ioQueue
	ns *namespace
}

func (h *handle) Info() blockdev.Info { return h.ns.geometry().info }

func (h *handle) Worker() *worker.Worker { return h.q.w }

// MaxAlloc is half of the queue's memory, so that a large request does not have to wait
// for all others to end.
func (h *handle) MaxAlloc() int { return len(h.q.data.mem) / 2 }

func (h *handle) Alloc(n int) []byte {
	b := h.q.mem.Alloc(n)
	if b == nil {
		add(&h.q.allocMiss, 1)
	}
	h.q.memUsed.Store(int64(h.q.mem.InUse()))
	return b
}

func (h *handle) Free(b []byte) {
	h.q.mem.Free(b)
	h.q.memUsed.Store(int64(h.q.mem.InUse()))
}

func (h *handle) Submit(r *blockdev.Request) { h.q.submit(h.ns, r) }

// Close does nothing: what a handle uses belongs to the session.
func (h *handle) Close() {}
