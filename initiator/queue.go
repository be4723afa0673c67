package initiator

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"rdblk/blockdev"
	"rdblk/internal/arena"
	"rdblk/internal/histogram"
	"rdblk/internal/worker"
	"rdblk/protocol"
)

// sideMemory is the memory of a queue for the synchronous Device methods, apart from
// that for Alloc so that neither starves the other.
const sideMemory = 4 << 20

// lostTries is how often a connection may break under a request before the request can
// be the reason: once the loss timeout is over too, the oldest such request is given
// up, one per association. It ends the life of a request that kills its target, and
// spares those that only suffer from it.
const lostTries = 5

// An ioQueue is a worker with its buffer memory and the ledger of the requests that
// came to it. It lives as long as the session; the lane it sends through changes with
// each association. If the target grants fewer queues after a reconnect than there are
// workers, the lane may be another worker's: commands then cross threads by
// worker.Submit and come back the same way. All methods but the atomics are the
// worker's.
type ioQueue struct {
	s    *Session
	i    int
	w    *worker.Worker
	mem  *arena.Arena // Alloc
	side *arena.Arena
	data region // of mem
	aux  region // of side

	lane   *lane // nil while there is no association
	quota  int   // commands that may be with a lane of another worker
	out    int   // commands that are
	refuse error // what new and waiting requests fail with: lost, closed
	closed bool  // new requests fail with ErrClosed

	ledger   requestList
	toSend   readyList
	freeReq  *request
	freeCmd  *command
	pumping  bool
	sideWait syncList // synchronous operations that wait for side memory
	serving  bool
	drained  chan struct{}

	// Read from everywhere.
	count     atomic.Int64  // requests in the ledger
	sent      atomic.Int64  // of these: with commands at the target
	oldest    atomic.Int64  // nano of the acceptance of the oldest, 0 = none
	resent    atomic.Uint64 // requests sent again after a loss
	retried   atomic.Uint64 // requests repeated on the target's word
	hopped    atomic.Uint64 // commands that went through another worker's lane
	ops       [blockdev.NumOps]opCounters
	allocMiss atomic.Uint64 // Alloc calls that found no memory
	memUsed   atomic.Int64  // bytes
}

// opCounters counts the requests of one operation; the worker is the only writer.
type opCounters struct {
	answered, failed, bytes atomic.Uint64
	latency                 histogram.Histogram
}

func add(c *atomic.Uint64, n uint64) { c.Store(c.Load() + n) }

// submit accepts a request.
func (q *ioQueue) submit(ns *namespace, br *blockdev.Request) {
	br.Err = nil
	n, region, err := q.check(ns, br)
	if err != nil || n == 0 && br.Op != blockdev.OpFlush || br.Op == blockdev.OpFlush && q.needless(ns) {
		if br.Op < blockdev.NumOps {
			c := &q.ops[br.Op]
			add(&c.answered, 1)
			if err != nil {
				add(&c.failed, 1)
			}
		}
		br.Err = err
		br.Done(br)
		return
	}
	r := q.freeReq
	if r == nil {
		r = new(request)
	} else {
		q.freeReq = r.next
		r.next = nil
	}
	r.r, r.ns, r.op, r.region = br, ns, br.Op, region
	r.fua = br.Flags&blockdev.WriteFUA != 0 && (br.Op == blockdev.OpWrite || br.Op == blockdev.OpZero)
	r.accepted = nano()
	r.rewind()
	if q.ledger.push(r); r.prev == nil {
		q.oldest.Store(r.accepted)
	}
	q.count.Store(q.count.Load() + 1)
	q.toSend.push(r)
	q.pump()
}

// check validates a request; n is its length.
func (q *ioQueue) check(ns *namespace, br *blockdev.Request) (n int64, reg int32, err error) {
	if q.closed {
		return 0, 0, ErrClosed
	}
	info := &ns.geometry().info
	if br.Op == blockdev.OpFlush && q.needless(ns) {
		return 0, 0, nil
	}
	if q.refuse != nil {
		return 0, 0, q.refuse
	}
	switch br.Op {
	case blockdev.OpFlush:
		return 0, 0, nil
	case blockdev.OpRead, blockdev.OpWrite:
		if n = int64(len(br.Buf)); n == 0 {
			break
		}
		switch {
		case q.mem.Owns(br.Buf):
			reg = int32(q.data.id)
		case q.side.Owns(br.Buf):
			reg = int32(q.aux.id)
		default:
			return 0, 0, fmt.Errorf("%s: %w: the buffer is not from this queue's Alloc", br.Op, blockdev.ErrUnaligned)
		}
	case blockdev.OpZero, blockdev.OpDiscard:
		n = br.Len
	default:
		return 0, 0, fmt.Errorf("operation %d: %w", br.Op, blockdev.ErrNotSupported)
	}
	if err := info.CheckRange(br.Off, n); err != nil {
		return 0, 0, fmt.Errorf("%s: %w", br.Op, err)
	}
	if br.Op != blockdev.OpRead && info.ReadOnly {
		return 0, 0, fmt.Errorf("%s: %w", br.Op, blockdev.ErrReadOnly)
	}
	if br.Op == blockdev.OpDiscard && !info.Discard {
		return 0, 0, fmt.Errorf("%s: %w", br.Op, blockdev.ErrNotSupported)
	}
	return n, reg, nil
}

// needless tells whether a Flush need not wait for a target that is away, or that has
// the namespace no more: one has succeeded, and no write was acknowledged since. What is
// detached then needs no target.
func (q *ioQueue) needless(ns *namespace) bool {
	if q.lane != nil && ns.gone.Load() == 0 {
		return false // it can be asked
	}
	return ns.covered.Load() && ns.fault.Load() == nil && ns.ruined.Load() == nil && ns.flushFailed.Load() == nil && !ns.dirty()
}

// room tells whether a command can be sent.
func (q *ioQueue) room() bool {
	if q.lane == nil {
		return false
	}
	if q.lane.w == q.w {
		return q.lane.hasRoom()
	}
	return q.out < q.quota
}

// pump sends what can be sent.
func (q *ioQueue) pump() {
	for q.pumpOne() {
	}
}

// pumpOne sends the next command of the first request that has one and puts the request
// behind the others. A request that ends here may bring new ones by its Done; those
// wait for the pump that is at work already.
func (q *ioQueue) pumpOne() bool {
	r := q.toSend.head
	if r == nil || q.pumping || !q.room() {
		return false
	}
	q.pumping = true
	q.toSend.remove(r)
	q.issue(r)
	q.pumping = false
	return true
}

func (q *ioQueue) issue(r *request) {
	if r.err == nil {
		r.err = q.hopeless(r)
	}
	if since := r.ns.gone.Load(); r.err == nil && since != 0 {
		r.again, r.later = true, protocol.StatusInvalidNamespace
		// All that waits fails at the same time, and what comes later at once. What the request had
		// to wait for before is over; but a target that lists the namespace and refuses it all the
		// same makes it come and go without end, and that is one wait.
		if r.goneSince == 0 {
			r.goneSince = since
		}
		r.busySince = max(r.busySince, r.goneSince)
	} else if r.err == nil {
		if r.op == blockdev.OpFlush && !r.ns.geometry().info.WriteCache {
			r.left = 0 // what has been acknowledged is stable
		}
		if r.left > 0 {
			q.send(r)
		}
	}
	q.settle(r)
}

// hopeless is why a request cannot be sent at all.
func (q *ioQueue) hopeless(r *request) error {
	if q.refuse != nil {
		return q.refuse
	}
	if f := r.ns.ruined.Load(); f != nil {
		return *f
	}
	if f := r.ns.fault.Load(); f != nil {
		return *f
	}
	if r.durable() {
		if f := r.ns.flushFailed.Load(); f != nil {
			return *f
		}
	}
	return nil
}

// send makes the request's next command and gives it to the lane.
func (q *ioQueue) send(r *request) {
	g := r.ns.geometry()
	c := q.freeCmd
	if c == nil {
		c = new(command)
	} else {
		q.freeCmd = c.next
		c.next = nil
	}
	c.req, c.owner, c.back, c.lane = r, q, false, nil
	c.source, c.toHost, c.keyed = sourceNone, false, false

	n := g.part(r.op, r.left)
	lba := uint64(r.off) >> g.shift
	blocks := uint32(n >> g.shift)
	var control uint16
	if r.fua && g.info.WriteCache {
		control = protocol.ControlFUA
	}
	switch r.op {
	case blockdev.OpRead, blockdev.OpWrite:
		op := protocol.OpWrite
		if r.op == blockdev.OpRead {
			op, c.toHost = protocol.OpRead, true
		}
		c.sqe.InitRW(op, 0, r.ns.nsid, lba, blocks, control)
		c.source, c.region = sourceRegion, r.region
		c.addr, c.length = arena.Addr(r.r.Buf[r.pos:]), uint32(n)
		r.pos += int(n)
	case blockdev.OpZero:
		if !g.writeZeroes {
			c.sqe.InitRW(protocol.OpWrite, 0, r.ns.nsid, lba, blocks, control)
			c.source, c.length = sourceZeros, uint32(n)
			break
		}
		if g.deallocate && r.r.Flags&blockdev.ZeroNoUnmap == 0 {
			control |= protocol.ControlDEAC
		}
		c.sqe.InitRW(protocol.OpWriteZeroes, 0, r.ns.nsid, lba, blocks, control)
	case blockdev.OpDiscard:
		c.sqe.InitDSM(0, r.ns.nsid, 1, protocol.DSMDeallocate)
		c.source, c.length = sourceRanges, protocol.DSMRangeSize
		c.rangeAt, c.rangeN = lba, blocks
	case blockdev.OpFlush:
		c.sqe.Init(protocol.OpFlush, 0, r.ns.nsid)
		r.marks = r.ns.mark(r.marks[:0])
	}
	r.off += n
	r.left -= n
	r.parts++
	if r.inflight++; r.inflight == 1 {
		q.sent.Store(q.sent.Load() + 1)
	}
	if q.lane.w == q.w {
		q.lane.start(c)
		q.lane.h.Kick()
		return
	}
	c.lane = q.lane
	q.out++
	add(&q.hopped, 1)
	if q.lane.w.Submit(c) != nil { // the session is being closed
		q.lane = nil
		c.lost = true
		q.done(c)
	}
}

// Run is worker.Task for a command that crosses threads.
func (c *command) Run() {
	if c.back {
		q := c.owner.(*ioQueue)
		q.done(c)
		q.pump()
		return
	}
	c.lane.admit(c)
}

// commandDone is completer; it runs on the lane's worker.
func (q *ioQueue) commandDone(l *lane, c *command) {
	if l.w == q.w {
		q.done(c)
		return
	}
	c.back = true
	_ = q.w.Submit(c) // fails only when the worker has ended, and with it everything that waits
}

// done takes a command back.
func (q *ioQueue) done(c *command) {
	r := c.req
	if r.inflight--; r.inflight == 0 {
		q.sent.Store(q.sent.Load() - 1)
	}
	if c.lane != nil {
		q.out--
	}
	switch {
	case c.lost:
		r.again, r.lost = true, true
		q.toSend.remove(r)
		if c.lane != nil && c.lane == q.lane {
			q.lane = nil // it is dead; what else is to be sent waits for the next one
		}
	case !c.status.OK():
		q.refused(r, c)
		q.toSend.remove(r)
	}
	c.req, c.lane = nil, nil
	c.next = q.freeCmd
	q.freeCmd = c
	q.settle(r)
}

// refused deals with a failure status.
func (q *ioQueue) refused(r *request, c *command) {
	switch judge(r.op, c.status) {
	case verdictLater:
		r.again, r.later = true, c.status
		return
	case verdictGone:
		r.ns.vanished()
		r.again, r.later = true, c.status
		return
	case verdictOther:
		if r.ns.withdraw(c.sqe.Opcode(), c.sqe.DEAC()) {
			r.again = true
			return
		}
	}
	if r.err == nil {
		r.err = &CommandError{Op: r.String(), What: r.ns.name(), Status: c.status}
	}
}

// settle decides what is next for a request after anything happened to it.
func (q *ioQueue) settle(r *request) {
	switch {
	case r.err != nil:
		if r.inflight == 0 {
			q.finish(r)
		}
	case r.again:
		if r.inflight == 0 {
			q.restart(r)
		}
	case r.left > 0:
		if !r.ready && !r.delayed && r.inflight < r.maxParts() {
			q.toSend.push(r)
		}
	case r.inflight == 0:
		q.finish(r)
	}
}

// restart sends a request again, now or later, or gives it up.
func (q *ioQueue) restart(r *request) {
	lost, later := r.lost, r.later
	r.rewind()
	switch now := nano(); {
	case q.refuse != nil:
		r.err = q.refuse
		q.finish(r)
		return
	case lost:
		r.losses++
		r.busySince, r.goneSince = 0, 0 // it had been taken: what it was refused for before is over
		add(&q.resent, 1)
		if limit := q.s.cfg.LossTimeout; limit >= 0 && r.losses >= lostTries && time.Duration(now-r.accepted) > limit && q.s.giveUp(r) {
			r.err = &LostError{After: limit, Cause: fmt.Errorf("%s was sent %d times and the association broke each time", r, r.losses)}
			q.finish(r)
			return
		}
	case later != 0:
		r.tries++
		add(&q.retried, 1)
		if r.busySince == 0 {
			r.busySince = now
		}
		if time.Duration(now-r.busySince) > q.s.cfg.RetryTimeout {
			hint := fmt.Sprintf("repeated for the retry timeout of %v", q.s.cfg.RetryTimeout)
			if later.Code() == protocol.StatusInvalidNamespace {
				hint = goneHint
			}
			r.err = &CommandError{Op: r.String(), What: r.ns.name(), Status: later, Hint: hint}
			q.finish(r)
			return
		}
		if later.Code() != protocol.StatusInvalidNamespace && time.Duration(now-r.busySince) > postponedLong { // that one was told of
			q.s.postponed(r, later, now)
		}
		r.delayed = true
		gen := r.gen
		time.AfterFunc(retryDelay(r.tries, r.ns.geometry().crdt[later.CRD()]), func() {
			_ = q.w.Submit(worker.TaskFunc(func() { q.wake(r, gen) }))
		})
		return
	}
	q.toSend.push(r)
}

// A request that the target has put off for postponedLong is worth a line in the log, one each postponedEvery.
const (
	postponedLong  = 500 * time.Millisecond
	postponedEvery = 10 * time.Second
)

// postponed tells why requests wait at a target that lives: the state of the session does not.
func (s *Session) postponed(r *request, later protocol.Status, now int64) {
	if at := s.postponedAt.Load(); (at == 0 || time.Duration(now-at) > postponedEvery) && s.postponedAt.CompareAndSwap(at, now) {
		s.log.Warn("the target puts requests off: they are repeated, and fail when the retry timeout is over", "ns", r.ns.nsid, "request", r.String(),
			"status", later.Name(false), "for", time.Duration(now-r.busySince).Round(time.Millisecond), "retry_timeout", s.cfg.RetryTimeout)
	}
}

// wake ends the delay of a request, unless it has been answered since.
func (q *ioQueue) wake(r *request, gen uint32) {
	if r.gen != gen || !r.delayed {
		return
	}
	r.delayed = false
	q.toSend.push(r)
	q.pump()
}

// finish answers a request: the end of its ledger entry.
func (q *ioQueue) finish(r *request) {
	now := nano()
	c := &q.ops[r.op]
	add(&c.answered, 1)
	c.latency.Observe(time.Duration(now - r.accepted))
	if r.err == nil {
		switch r.op {
		case blockdev.OpRead, blockdev.OpWrite:
			add(&c.bytes, uint64(len(r.r.Buf)))
		case blockdev.OpFlush:
			r.ns.flushDone(r.marks)
		default:
			add(&c.bytes, uint64(r.r.Len))
		}
		if !r.durable() && r.writes() {
			r.ns.acknowledged(q.i)
		}
	} else {
		add(&c.failed, 1)
		r.ns.failed(r)
	}
	q.toSend.remove(r)
	if q.ledger.remove(r); q.ledger.head == nil {
		q.oldest.Store(0)
		if q.drained != nil {
			close(q.drained)
			q.drained = nil
		}
	} else if at := q.ledger.head.accepted; at != q.oldest.Load() {
		q.oldest.Store(at)
	}
	q.count.Store(q.count.Load() - 1)

	br, err := r.r, r.err
	marks := r.marks
	*r = request{gen: r.gen + 1, marks: marks[:0], next: q.freeReq}
	q.freeReq = r
	br.Err = err
	br.Done(br)
}

// attach gives the queue a lane. What has no answer is sent again in the order in which
// it was accepted; what still has commands on their way back from an old lane follows
// when they are here.
func (q *ioQueue) attach(l *lane, quota int) {
	q.lane, q.quota = l, quota
	if l.w == q.w {
		l.local = q
	}
	if !errors.Is(q.refuse, ErrClosed) {
		q.refuse = nil
	}
	for r := q.toSend.head; r != nil; r = q.toSend.head {
		q.toSend.remove(r)
	}
	for r := q.ledger.head; r != nil; r = r.next {
		if r.inflight == 0 && !r.delayed {
			q.toSend.push(r)
		}
	}
	q.pump()
}

// detach takes the lane away; lane.stop brings the commands back.
func (q *ioQueue) detach() {
	if q.lane != nil {
		if q.lane.local == q {
			q.lane.local = nil
		}
		q.lane = nil
	}
}

// fail answers everything with err and refuses what comes until the next attach.
func (q *ioQueue) fail(err error) {
	q.refuse = err
	for r := q.ledger.head; r != nil; {
		next := r.next
		if r.inflight == 0 {
			r.err = err
			q.finish(r)
		}
		r = next
	}
	for o := q.sideWait.pop(); o != nil; o = q.sideWait.pop() {
		o.finish(err)
	}
}

// drain gives a channel that is closed when the ledger is empty.
func (q *ioQueue) drain() <-chan struct{} {
	done := make(chan struct{})
	if q.ledger.head == nil {
		close(done)
	} else {
		q.drained = done
	}
	return done
}
