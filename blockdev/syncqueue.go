package blockdev

import (
	"errors"
	"fmt"
	"sync/atomic"

	"rdblk/internal/arena"
	"rdblk/internal/worker"
)

// Defaults and bounds of a queue made by NewQueue.
const (
	DefaultArenaSize = 32 << 20
	DefaultMaxInline = 256 << 10

	// sliceCost bounds what is done at one time before the worker's other sources
	// have their turn, in bytes moved plus requestCost per request.
	sliceCost   = 1 << 20
	requestCost = 8 << 10
)

// QueueConfig tells NewQueue how to serve a device. The zero value is good.
type QueueConfig struct {
	// Executor makes the calls that may wait; nil = one of the queue's own with
	// DefaultExecutors. All queues of a device should share one.
	Executor *Executor
	// ArenaSize is the memory for Alloc in bytes; 0 = DefaultArenaSize, negative =
	// none: Alloc returns nil and the user brings the buffers. Pages are taken from the system when
	// first used.
	ArenaSize int
	// MaxInline is the largest read or write in bytes that is tried on the worker;
	// 0 = DefaultMaxInline, negative = none.
	MaxInline int
	// NoURing never uses io_uring.
	NoURing bool
}

// QueueStats count what a queue from NewQueue did.
type QueueStats struct {
	Inline     uint64 // requests answered on the worker
	Async      uint64 // requests that went through io_uring
	Executed   uint64 // requests that went to the executor
	WouldBlock uint64 // requests of the latter two that were tried on the worker first
}

// syncQueue is a Queue over a Device.
//
// A request goes one of three ways. Reads and writes of a TryDevice are tried on the
// worker. What would block goes through the worker's io_uring if the device is
// a file or disk (see ringState). Everything else is linked into the executor's list; the goroutine that executed it pushes it on done, and the first to find
// done empty posts the queue itself as a Task to the worker, which then answers
// the whole batch.
//
// Done may submit again. Such requests go to backlog and are begun when the
// callback is back, so the stack does not grow, and only for sliceCost; the rest
// waits for the next turn of the worker's loop.
type syncQueue struct {
	dev       Device
	try       TryDevice // nil if dev is none
	w         *worker.Worker
	ex        *Executor
	ownEx     bool
	mem       *arena.Arena // nil if the user brings buffers
	maxAlloc  int
	maxInline int
	file      *file // nil if dev is another
	near      *neighbours
	left      bool // near knows it no more

	// The worker's.
	busy        bool // inside Submit or a task: Submit only queues
	posted      bool // a continueTask is in the mail
	backlog     requestList
	cost        int // spent in this slice
	outstanding int // at the executor or on done
	cont        continueTask
	ring        ringState
	inline      atomic.Uint64
	async       atomic.Uint64
	executed    atomic.Uint64
	wouldBlock  atomic.Uint64

	closed atomic.Bool

	// The executor's, under its lock.
	waiting requestList
	turn    *syncQueue

	done atomic.Pointer[Request] // executed requests, last first
}

type continueTask struct{ q *syncQueue }

func (t *continueTask) Run() {
	t.q.posted = false
	t.q.slice(nil)
}

// NewQueue gives dev an asynchronous queue on w. The device may be anything but
// should be a TryDevice to be fast. The queue may be made on any goroutine; from
// then on it is the worker's.
//
// Read and write buffers may be any memory (aligned to Info.MemAlign), not only
// that of Alloc.
//
// The worker must run until everything is answered: what is in an io_uring holds
// its range of the device, and the device's Close waits for it.
//
// Close frees the memory. Requests that are outstanding against the rule of Queue
// are still answered on the worker: those that have begun with their result, others
// with ErrClosed. The memory stays until they and every buffer are back.
func NewQueue(dev Device, w *worker.Worker, cfg QueueConfig) (Queue, error) {
	q := &syncQueue{dev: dev, w: w, ex: cfg.Executor, maxInline: cfg.MaxInline}
	q.cont.q = q
	q.try, _ = dev.(TryDevice)
	q.file, _ = dev.(*file)
	if !cfg.NoURing {
		q.ring.disk = q.file
	}
	if q.maxInline == 0 {
		q.maxInline = DefaultMaxInline
	}
	if cfg.ArenaSize >= 0 {
		size := cfg.ArenaSize
		if size == 0 {
			size = DefaultArenaSize
		}
		var err error
		if q.mem, err = arena.New(size); err != nil {
			return nil, fmt.Errorf("queue of %s: %w", dev.Info().Name, err)
		}
		// A quarter, so that one large request does not wait for all others to end.
		q.maxAlloc = max(q.mem.Size()/4, arena.MinSize)
	}
	if q.ex == nil {
		q.ex, q.ownEx = NewExecutor(0), true
	}
	q.near = neighboursOf(w)
	q.near.join(q)
	return q, nil
}

// StatsOf gives the counters of a queue from NewQueue, zeros for another. Any goroutine.
func StatsOf(q Queue) QueueStats {
	if q, ok := q.(*syncQueue); ok {
		return QueueStats{Inline: q.inline.Load(), Async: q.async.Load(), Executed: q.executed.Load(), WouldBlock: q.wouldBlock.Load()}
	}
	return QueueStats{}
}

func (q *syncQueue) Info() Info             { return q.dev.Info() }
func (q *syncQueue) Worker() *worker.Worker { return q.w }

func (q *syncQueue) Alloc(n int) []byte {
	if q.mem == nil {
		return nil
	}
	return q.mem.Alloc(n)
}

func (q *syncQueue) Free(b []byte) {
	if q.mem != nil {
		q.mem.Free(b)
		q.release()
	}
}

func (q *syncQueue) MaxAlloc() int { return q.maxAlloc }

func (q *syncQueue) Submit(r *Request) {
	if q.busy || q.posted {
		q.backlog.push(r)
		return
	}
	q.slice(r)
}

// slice begins first and what is in the backlog, up to sliceCost.
func (q *syncQueue) slice(first *Request) {
	q.busy = true
	q.cost = 0
	if first != nil {
		q.begin(first)
	}
	q.drain()
	q.busy = false
	q.release()
}

func (q *syncQueue) drain() {
	for q.cost < sliceCost {
		r := q.backlog.pop()
		if r == nil {
			return
		}
		q.begin(r)
	}
	if !q.backlog.empty() && !q.posted {
		q.posted = q.w.Submit(&q.cont) == nil
	}
}

// Run answers what the executor has done; it is the worker's.
func (q *syncQueue) Run() {
	// Take all and turn it round: first done, first answered.
	var l *Request
	for r := q.done.Swap(nil); r != nil; {
		next := r.next
		r.next, l = l, r
		r = next
	}
	q.busy = true
	q.cost = 0
	for l != nil {
		r := l
		l, r.next = r.next, nil
		q.outstanding--
		q.cost += requestCost
		r.Done(r)
	}
	q.drain()
	q.busy = false
	q.release()
}

func (q *syncQueue) begin(r *Request) {
	r.Err = nil
	r.pos = 0
	q.cost += requestCost
	if q.closed.Load() {
		r.Err = ErrClosed
		r.Done(r)
		return
	}
	if r.Op <= OpWrite && q.try != nil && len(r.Buf) <= q.maxInline && r.Flags&WriteFUA == 0 && q.near.mayTry(q.file, r.Op) {
		if q.tryInline(r) {
			q.inline.Store(q.inline.Load() + 1)
			r.Done(r)
			return
		}
		q.wouldBlock.Store(q.wouldBlock.Load() + 1)
	}
	if q.toRing(r) {
		return
	}
	q.toExecutor(r)
}

// toExecutor hands over r, of which r.pos bytes are done.
func (q *syncQueue) toExecutor(r *Request) {
	q.executed.Store(q.executed.Load() + 1)
	q.outstanding++
	if !q.ex.push(q, r) {
		q.outstanding--
		r.Err = ErrClosed
		r.Done(r)
	}
}

// tryInline reports whether r has been answered. If not, r.pos bytes of it are done.
func (q *syncQueue) tryInline(r *Request) bool {
	q.cost += len(r.Buf)
	in := q.dev.Info()
	if in.MaxIO > 0 && len(r.Buf) > in.MaxIO {
		if r.Err = in.CheckRange(r.Off, int64(len(r.Buf))); r.Err != nil {
			return true
		}
	}
	for {
		p := r.Buf[r.pos:]
		if in.MaxIO > 0 && len(p) > in.MaxIO {
			p = p[:in.MaxIO]
		}
		off := r.Off + int64(r.pos)
		var err error
		if r.Op == OpRead {
			err = q.try.TryReadAt(p, off)
		} else {
			err = q.try.TryWriteAt(p, off, r.Flags)
		}
		if err != nil {
			if err == ErrWouldBlock || errors.Is(err, ErrWouldBlock) {
				return false
			}
			r.Err = err
			return true
		}
		if r.pos += len(p); r.pos >= len(r.Buf) {
			return true
		}
	}
}

// execute runs on an executor's goroutine.
func (q *syncQueue) execute(r *Request) {
	if q.closed.Load() {
		r.Err = ErrClosed
	} else {
		r.Err = q.perform(r)
	}
	for {
		old := q.done.Load()
		r.next = old
		if q.done.CompareAndSwap(old, r) {
			if old == nil {
				// A worker that is closed runs nothing any more, so nobody waits for an answer.
				_ = q.w.Submit(q)
			}
			return
		}
	}
}

func (q *syncQueue) perform(r *Request) error {
	switch r.Op {
	case OpRead, OpWrite:
		in := q.dev.Info()
		if in.MaxIO > 0 && len(r.Buf) > in.MaxIO {
			if err := in.CheckRange(r.Off, int64(len(r.Buf))); err != nil {
				return err
			}
		}
		for {
			p := r.Buf[r.pos:]
			if in.MaxIO > 0 && len(p) > in.MaxIO {
				p = p[:in.MaxIO]
			}
			off := r.Off + int64(r.pos)
			var err error
			if r.Op == OpRead {
				err = q.dev.ReadAt(p, off)
			} else {
				err = q.dev.WriteAt(p, off, r.Flags)
			}
			if err != nil {
				return err
			}
			if r.pos += len(p); r.pos >= len(r.Buf) {
				return nil
			}
		}
	case OpZero:
		return q.dev.Zero(r.Off, r.Len, r.Flags)
	case OpDiscard:
		return q.dev.Discard(r.Off, r.Len)
	case OpFlush:
		return q.dev.Flush()
	}
	return fmt.Errorf("%w: operation %d", ErrNotSupported, r.Op)
}

func (q *syncQueue) Close() {
	if q.closed.Swap(true) {
		return
	}
	if !q.busy {
		q.slice(nil) // answers the backlog
	}
}

// release frees what the queue holds once it is closed and everything is back.
func (q *syncQueue) release() {
	if q.busy || !q.closed.Load() || q.outstanding > 0 || !q.backlog.empty() {
		return
	}
	q.closeRing()
	if !q.left {
		q.left = true
		q.near.leave(q)
	}
	if q.mem != nil && q.mem.InUse() == 0 {
		q.mem.Close()
		q.mem = nil
	}
	if q.ownEx {
		q.ex.Close() // idle: nothing to wait for
		q.ownEx = false
	}
}
