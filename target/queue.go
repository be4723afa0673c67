package target

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"rdblk/internal/arena"
	"rdblk/internal/histogram"
	"rdblk/internal/timeout"
	"rdblk/internal/worker"
	"rdblk/protocol"
	"rdblk/rdma"
)

// firstRequests is how many request contexts a queue has before its Connect.
const firstRequests = 4

// extraRequests is how many contexts a queue has beyond its depth, for responses
// that the device has not completed while the host's next commands are here already.
const extraRequests = 32

// queue is one NVMe queue: a queue pair, its completion queue and everything in
// flight on it. See queueState for its life.
type queue struct {
	t      *Target
	lane   *lane
	ln     *listener
	num    uint64 // serial number, for logs and dumps
	conn   rdma.Conn
	dev    *laneDevice
	remote netip.AddrPort
	local  netip.AddrPort
	born   time.Time

	// From the connection request; constant.
	qid       uint16
	depth     int // receive buffers: HSQSIZE + 1
	hsqsize   uint16
	inCapsule int

	// Work requests; constant.
	cq       rdma.CQ
	qp       rdma.QP
	maxSend  int
	ringMask uint64
	inline   bool
	sendInv  bool

	// The data buffers: the lane's, or the connection's own, see laneDevice.exposed.
	pool   *pool
	pd     rdma.PD
	bufMR  rdma.MR // of the connection's own
	bufKey uint32

	// Registered memory: commands, responses, in-capsule data.
	mem  *arena.Arena
	mr   rdma.MR
	sqes []byte
	cqes []byte
	data []byte

	commands atomic.Uint64 // capsules received

	// ctx bounds Conn.Accept; cancel gives it up.
	ctx    context.Context
	cancel context.CancelFunc

	endOnce sync.Once
	endTask endTask
	gone    chan struct{} // closed when everything is released

	// The worker's.
	state    queueState
	accepted bool // Conn.Accept has returned
	doomed   bool // to be closed as soon as it has
	h        *worker.Handle
	now      time.Time
	reason   error // why it ended
	connTask timer // ConnectTimeout
	maxReads int
	reads    int // RDMA Reads outstanding
	ring     []sendEntry
	head     uint64 // next send sequence number
	tail     uint64 // oldest not completed
	sends    []rdma.SendWR
	sges     []rdma.SGE
	recvWRs  []rdma.RecvWR
	reposts  []rdma.RecvWR
	timed    []timedRequest    // answered by what is in sends
	received []receivedCapsule // waiting for a context

	requests    []*request
	free        requestList
	parked      requestList
	waitRead    requestList
	waitSend    requestList
	active      int
	executing   int
	sweeping    bool
	sqSize      uint16
	sqhd        uint16
	flowControl bool

	ctrl  *controller // nil until Connect succeeded
	share *share      // of the controller on this lane
}

// timedRequest is a request whose time is still to be taken: one look at the clock, which may be a system call and a
// slow device, is for all that leave together.
type timedRequest struct {
	latency *histogram.Histogram
	start   time.Time
}

type receivedCapsule struct {
	recv int32
	len  uint32
}

type endTask struct {
	q      *queue
	reason error
}

// Run ends the queue, on its worker.
func (e *endTask) Run() {
	if e.q.h == nil { // not attached yet; attach will look
		e.q.reason = e.reason
		return
	}
	e.q.close(e.reason)
}

// newQueue makes everything that a connection needs, up to posted receives. It
// blocks for registration. On error everything is released but conn.
func newQueue(t *Target, ln *listener, l *lane, conn rdma.Conn, req *protocol.RDMAConnectRequest) (_ *queue, err error) {
	d, err := l.device(conn.Device())
	if err != nil {
		return nil, err
	}
	q := &queue{
		t: t, lane: l, ln: ln, conn: conn, dev: d, remote: conn.RemoteAddr(), local: conn.LocalAddr(), born: time.Now(),
		qid: req.QID, depth: req.Depth(), hsqsize: req.HSQSIZE, inCapsule: t.cfg.InCapsule,
		gone: make(chan struct{}), flowControl: true, sqSize: uint16(req.Depth()),
	}
	q.endTask.q = q
	// Two work requests per command (Write and Send, or Read and Send), and some slack
	// for those whose completion has not been seen yet. A smaller send queue works too.
	q.maxSend = 2*q.depth + 8
	if n := d.info.MaxQPWR; n > 0 {
		if n < q.depth {
			l.leave(d)
			return nil, fmt.Errorf("%w: device %s takes %d receives per queue, the host wants %d", rdma.ErrNoResources, d.info.Name, n, q.depth)
		}
		q.maxSend = min(q.maxSend, n)
	}
	if n := d.info.MaxCQE; n > 0 {
		if n < q.depth+2 {
			l.leave(d)
			return nil, fmt.Errorf("%w: device %s has completion queues of %d entries, a queue of depth %d needs more", rdma.ErrNoResources, d.info.Name, n, q.depth)
		}
		q.maxSend = min(q.maxSend, n-q.depth)
	}
	ring := 1
	for ring < q.maxSend {
		ring *= 2
	}
	q.ringMask = uint64(ring - 1)
	q.ring = make([]sendEntry, ring)
	q.sges = make([]rdma.SGE, ring)
	q.sends = make([]rdma.SendWR, 0, q.maxSend)
	q.inline = d.info.MaxInline >= protocol.CompletionSize
	q.sendInv = d.info.SendInv && !t.cfg.NoSendInvalidate

	q.ctx, q.cancel = timeout.With(context.Background(), t.cfg.AcceptTimeout, "accept_timeout")
	if err = q.buffers(); err == nil {
		err = q.register(ring)
	}
	if err != nil {
		q.cancel()
		q.unregister()
		return nil, err
	}
	defer func() {
		if err != nil {
			q.cancel()
			if q.qp != nil {
				q.qp.Close()
			}
			if q.cq != nil {
				q.cq.Close()
			}
			q.unregister()
		}
	}()
	// Every receive and every send, signalled or flushed, has its place: no overrun.
	if q.cq, err = d.dev.CreateCQ(q.depth + q.maxSend); err != nil {
		return nil, fmt.Errorf("create completion queue on %s: %w", d.info.Name, err)
	}
	cfg := rdma.QPConfig{SendCQ: q.cq, RecvCQ: q.cq, MaxSend: q.maxSend, MaxRecv: q.depth, MaxSendSGE: 1, MaxRecvSGE: 1}
	if q.inCapsule > 0 {
		cfg.MaxRecvSGE = 2
	}
	if q.inline {
		cfg.MaxInline = protocol.CompletionSize
	}
	if q.qp, err = conn.CreateQP(q.pd, cfg); err != nil {
		return nil, fmt.Errorf("create queue pair on %s: %w", d.info.Name, err)
	}
	if _, err = q.qp.PostRecv(q.recvWRs...); err != nil {
		return nil, fmt.Errorf("post %d receives on %s: %w", q.depth, d.info.Name, err)
	}
	q.grow(firstRequests)
	return q, nil
}

// buffers decides where the data of commands goes.
func (q *queue) buffers() error {
	l, d := q.lane, q.dev
	if !d.exposed {
		q.pool, q.pd, q.bufKey = &l.pool, d.pd, d.mr.LKey()
		return nil
	}
	p := &pool{shares: map[*nsLane]*share{}}
	if err := p.make(l, q.t.privateMemory(q.depth)); err != nil {
		return err
	}
	pd, mr, err := l.registerPool(p, d.dev)
	if err != nil {
		p.arena.Close()
		return err
	}
	q.pool, q.pd, q.bufMR, q.bufKey = p, pd, mr, mr.LKey()
	l.private.Add(int64(p.size))
	return nil
}

// unregister gives registered memory back. No queue pair uses it any more. It may block.
func (q *queue) unregister() {
	bad := func(what string, err error) {
		if err != nil {
			q.t.log.Error(what, "err", err)
		}
	}
	if q.mr != nil {
		bad("deregister receive buffers", q.mr.Deregister())
		q.mem.Close()
	}
	if q.bufMR != nil {
		bad("deregister buffers", q.bufMR.Deregister())
		bad("close protection domain", q.pd.Close())
		q.pool.arena.Close()
		q.lane.private.Add(-int64(q.pool.size))
	}
	q.lane.leave(q.dev)
}

// register maps and registers the queue's own memory and prepares its receives.
// In-capsule data is kept apart from the commands so that it lies on a page
// boundary, as direct I/O wants it.
func (q *queue) register(ring int) error {
	sqes := q.depth * protocol.CommandSize
	cqes := ring * protocol.CompletionSize
	data := q.depth * q.inCapsule
	head := pageUp(sqes + cqes)
	mem, err := arena.New(head + data)
	if err != nil {
		return err
	}
	b := mem.Bytes()[:head+data]
	mr, err := q.pd.Register(b, rdma.AccessLocalWrite)
	if err != nil {
		mem.Close()
		return fmt.Errorf("register %d bytes of receive buffers with %s: %w", len(b), q.dev.info.Name, err)
	}
	q.mem, q.mr = mem, mr
	q.sqes, q.cqes, q.data = b[:sqes], b[sqes:sqes+cqes], b[head:]
	q.recvWRs = make([]rdma.RecvWR, q.depth)
	q.reposts = make([]rdma.RecvWR, 0, q.depth)
	per := 1
	if q.inCapsule > 0 {
		per = 2
	}
	sges := make([]rdma.SGE, q.depth*per)
	for i := range q.recvWRs {
		s := sges[i*per : (i+1)*per : (i+1)*per]
		s[0] = rdma.SGE{Addr: arena.Addr(q.sqes) + uint64(i*protocol.CommandSize), Len: protocol.CommandSize, LKey: mr.LKey()}
		if per == 2 {
			s[1] = rdma.SGE{Addr: arena.Addr(q.data) + uint64(i*q.inCapsule), Len: uint32(q.inCapsule), LKey: mr.LKey()}
		}
		q.recvWRs[i] = rdma.RecvWR{ID: uint64(i), SGL: s}
	}
	return nil
}

// grow adds n request contexts.
func (q *queue) grow(n int) {
	chunk := make([]request, n)
	for i := range chunk {
		r := &chunk[i]
		r.q, r.recv = q, -1
		r.bd.User = r
		r.bd.Done = backendDone
		q.requests = append(q.requests, r)
		q.free.push(r)
	}
}

// growFull gives a connected queue all its contexts.
func (q *queue) growFull() {
	if n := q.depth + min(q.depth, extraRequests) - len(q.requests); n > 0 {
		q.grow(n)
	}
	q.timed = make([]timedRequest, 0, len(q.requests))
}

// attach makes the worker drive the queue. Worker only, as what follows.
func (q *queue) attach() error {
	h, err := q.lane.w.Add(q.cq.FD(), q)
	if err != nil {
		return err
	}
	h.SetMute(q.dev.info.Autonomous)
	q.h = h
	q.now = timeNow()
	q.lane.queues[q] = struct{}{}
	q.connTask = q.t.cfg.clock.AfterFunc(q.t.cfg.ConnectTimeout, q.connectTimeout)
	if q.reason != nil {
		q.close(q.reason)
	}
	return nil
}

// acceptDone is called when Conn.Accept has returned: with an error, or with what
// the connection allows of RDMA Reads. Capsules that came early run now.
func (q *queue) acceptDone(reads int, err error) {
	q.accepted = true
	switch {
	case q.doomed:
		q.close(q.reason)
		return
	case err != nil:
		q.close(fmt.Errorf("accept: %w", err))
		return
	}
	q.maxReads = reads
	q.state = queueUnconnected
	q.now = timeNow()
	for r := q.parked.pop(); r != nil; r = q.parked.pop() {
		r.setState(reqReceived)
		q.dispatch(r)
		if q.over() {
			return
		}
	}
	q.kick()
}

// over says that nothing more is to be done for the connection.
func (q *queue) over() bool { return q.state >= queueClosing || q.doomed }

// end closes the queue from any goroutine; the first reason counts.
func (q *queue) end(reason error) {
	q.endOnce.Do(func() {
		q.endTask.reason = reason
		// A worker is closed after its last queue is gone, so this cannot fail.
		_ = q.lane.w.Submit(&q.endTask)
	})
}

// breakdown ends the queue for a fault of the host or of the device; the
// association goes with it.
func (q *queue) breakdown(reason error) {
	c := q.ctrl
	q.close(reason)
	if c != nil {
		c.kill(fmt.Errorf("queue %d: %w", q.qid, reason))
	}
}

// close cuts the connection. When it returns the device touches no memory of this
// queue's requests any more; those that the back end has are waited for, all
// others are dropped without an answer.
func (q *queue) close(reason error) {
	if q.state >= queueClosing {
		return
	}
	if !q.accepted {
		// The queue pair is in the hands of Conn.Accept, which ends soon now.
		if !q.doomed {
			q.doomed, q.reason = true, reason
			q.h.Remove()
			q.cancel()
		}
		return
	}
	q.cancel()
	wasLive := q.state == queueLive || q.state == queueDraining
	orderly := q.state == queueDraining
	q.state = queueClosing
	q.reason = reason
	q.connTask.Stop()
	q.h.Remove()
	if orderly {
		// All responses are out of the send queue. Closing the queue pair alone would
		// reset the connection, and what the transport still holds with it.
		q.conn.Disconnect()
	}
	q.qp.Close()
	q.takeTimes()
	q.sends, q.reposts, q.received = q.sends[:0], q.reposts[:0], nil
	q.parked, q.waitRead, q.waitSend = requestList{}, requestList{}, requestList{}
	q.sweeping = true
	for _, r := range q.requests { // first, so that no buffer that comes back goes to one of them
		if r.state == reqWaitBuffer {
			q.pool.unwait(r)
			q.release(r)
		}
	}
	for _, r := range q.requests {
		if r.state != reqFree && r.state != reqExecuting {
			r.prev, r.next = nil, nil
			q.release(r)
		}
	}
	q.sweeping = false
	q.pool.serve()
	q.t.logQueueEnd(q, wasLive)
	if q.ctrl != nil {
		q.ctrl.queueClosing(q)
	}
	if q.executing == 0 {
		q.closed()
	}
}

// closed releases what is left after the back end has answered everything. What
// may block goes to a goroutine.
func (q *queue) closed() {
	if q.state == queueClosed || q.sweeping {
		return
	}
	if invariants && (q.active != 0 || q.executing != 0) {
		panic(fmt.Sprintf("target: queue released with %d requests active, %d executing", q.active, q.executing))
	}
	q.state = queueClosed
	delete(q.lane.queues, q)
	if err := q.cq.Close(); err != nil {
		q.t.log.Error("close completion queue", "err", err)
	}
	go func() {
		q.unregister()
		q.conn.Close()
		q.t.queueGone(q)
	}()
}

// drain makes the queue answer what it has and then disconnect.
func (q *queue) drain(reason error) {
	switch {
	case q.state >= queueClosing:
	case q.state < queueLive:
		q.close(reason)
	default:
		q.state = queueDraining
		q.reason = reason
		q.flush() // posted responses are on their way before we look
		q.drained()
		q.kick()
	}
}

// drained disconnects a draining queue that has answered everything.
func (q *queue) drained() {
	for _, r := range q.requests {
		switch r.state {
		case reqFree, reqEvent: // an event request is never answered without an event
		default:
			return
		}
	}
	if q.head != q.tail {
		return // responses are not out yet
	}
	q.close(q.reason)
}

// account counts a finished request and records its error.
func (q *queue) account(r *request) {
	if r.kind != nil && r.ns != nil && r.kind.op < numOps {
		r.ns.stats[r.kind.op].observe(r)
	}
	if r.status.OK() {
		return
	}
	if c := q.ctrl; c != nil {
		r.status = c.recordError(r)
	}
	if q.t.log.Enabled(context.Background(), slog.LevelDebug) {
		q.t.log.Debug("command failed", "remote", q.remote, "qid", q.qid, "opcode", r.opcodeName(),
			"cid", r.cmd.ID(), "status", r.status.Name(r.cmd.IsFabrics()))
	}
}

// logQueueEnd writes one line for the end of a queue that mattered.
func (t *Target) logQueueEnd(q *queue, wasLive bool) {
	t.trace.Disconnected(q.remote, q.qid, q.reason)
	attrs := []slog.Attr{slog.Any("remote", q.remote), slog.Int("qid", int(q.qid)), slog.String("reason", q.reason.Error()),
		slog.Int("executing", q.executing)}
	if !wasLive {
		t.strangers.Log(slog.LevelInfo, "connection ended before its Connect command", attrs...)
		return
	}
	level := slog.LevelInfo
	if errors.Is(q.reason, errTransferError) || errors.Is(q.reason, errShortCapsule) || errors.Is(q.reason, errPostRefused) || errors.Is(q.reason, errWorkerPoll) {
		level = slog.LevelWarn
	}
	t.hostLog.Log(level, "queue ended", append(attrs, q.ctrl.logAttr())...)
}
