package target

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"rdblk/internal/trace"
	"rdblk/internal/worker"
	"rdblk/protocol"
	"rdblk/rdma"
)

// A listener that fails is asked again after acceptBackoff, then after twice as long, and so on up to
// maxAcceptBackoff: its device may have been removed and come back, the process may get descriptors again.
const (
	acceptBackoff    = 100 * time.Millisecond
	maxAcceptBackoff = 2 * time.Second
)

// maxRejecting bounds the goroutines that are busy telling somebody no; beyond it
// connections are just closed.
const maxRejecting = 64

// listener is one address that hosts connect to.
type listener struct {
	t    *Target
	l    rdma.Listener
	addr netip.AddrPort
	port uint16 // PORTID in the discovery log
	done chan struct{}

	provider string // its name
}

// Listen accepts connections at addr, which may be a wildcard address and port 0,
// with provider p, and returns the address in use. A Target may listen at several.
func (t *Target) Listen(p rdma.Provider, addr netip.AddrPort) (netip.AddrPort, error) {
	t.mu.Lock()
	if t.closing {
		t.mu.Unlock()
		return netip.AddrPort{}, ErrClosed
	}
	t.mu.Unlock()
	// Those who only open a connection cost little and the provider ends them soon, but
	// when its bound is reached others are closed too: so it is well above ours.
	l, err := p.Listen(addr, rdma.ListenConfig{MaxPending: 2 * t.cfg.MaxPending})
	if err != nil {
		return netip.AddrPort{}, err // names operation and address
	}
	ln := &listener{t: t, l: l, addr: l.Addr(), done: make(chan struct{}), provider: p.Name()}
	t.mu.Lock()
	if t.closing {
		t.mu.Unlock()
		l.Close()
		return netip.AddrPort{}, ErrClosed
	}
	t.nextPort++
	ln.port = t.nextPort
	t.listeners = append(t.listeners, ln)
	t.discoveryChanged()
	t.mu.Unlock()
	go ln.serve()
	t.log.Info("listening", "addr", ln.addr, "provider", p.Name())
	return ln.addr, nil
}

func (ln *listener) serve() {
	defer close(ln.done)
	wait, told := acceptBackoff, map[string]bool{} // of one failure what was said already
	for {
		asked := ln.t.cfg.clock.Now()
		conn, err := ln.l.Accept()
		if errors.Is(err, rdma.ErrClosed) {
			return
		}
		if err == nil || ln.t.cfg.clock.Now().Sub(asked) > maxAcceptBackoff {
			// It worked, or waited at least.
			if len(told) > 0 {
				ln.t.log.Info("listening again", "addr", ln.addr, "provider", ln.provider)
				clear(told)
			}
			wait = acceptBackoff
		}
		if err == nil {
			ln.t.admit(ln, conn)
			continue
		}
		if text := err.Error(); !told[text] && len(told) < 16 {
			told[text] = true
			ln.t.log.Warn("accept failed, it is tried again", "addr", ln.addr, "provider", ln.provider, "err", err)
		}
		select {
		case <-time.After(wait):
		case <-ln.t.closingCh:
			return
		}
		wait = min(2*wait, maxAcceptBackoff)
	}
}

// admit decides whether there is room for one more connection and hands it to a
// goroutine, which establishes it and then watches it until its end.
func (t *Target) admit(ln *listener, conn rdma.Conn) {
	t.stats.connections.Add(1)
	t.mu.Lock()
	var oldest *queue
	refuse := t.closing || t.connections >= t.cfg.MaxQueues
	if !refuse && t.halfOpen >= t.cfg.MaxPending {
		// Somebody opens connections and leaves them: the one that has had the most time
		// goes, so that those who mean it get in.
		if oldest = t.oldestPending(); oldest == nil {
			refuse = true
		}
	}
	if !refuse {
		t.connections++
		t.halfOpen++
	} else if t.rejecting >= maxRejecting {
		t.mu.Unlock()
		t.stats.reject(protocol.RejectNoResources)
		conn.Close()
		return
	} else {
		t.rejecting++
	}
	t.mu.Unlock()
	if oldest != nil {
		oldest.end(errEvicted)
	}
	if refuse {
		go func() {
			t.reject(conn, protocol.RejectNoResources, errors.New("too many connections"))
			t.mu.Lock()
			t.rejecting--
			t.mu.Unlock()
		}()
		return
	}
	go t.serveConn(ln, conn)
}

// oldestPending takes the oldest connection without a Connect from the list. t.mu is held.
func (t *Target) oldestPending() *queue {
	var oldest *queue
	for q := range t.pending {
		if oldest == nil || q.num < oldest.num {
			oldest = q
		}
	}
	if oldest != nil {
		t.notPendingLocked(oldest)
	}
	return oldest
}

// notPending tells that q has completed its Connect, or is going.
func (t *Target) notPending(q *queue) {
	t.mu.Lock()
	t.notPendingLocked(q)
	t.mu.Unlock()
}

func (t *Target) notPendingLocked(q *queue) {
	if _, ok := t.pending[q]; ok {
		delete(t.pending, q)
		t.halfOpen--
	}
}

// serveConn establishes one connection and returns when it has ended.
func (t *Target) serveConn(ln *listener, conn rdma.Conn) {
	q, status, err := t.establish(ln, conn)
	if err != nil {
		t.mu.Lock()
		t.connections--
		t.halfOpen--
		t.mu.Unlock()
		t.reject(conn, status, err)
		return
	}
	accept := protocol.RDMAConnectAccept{CRQSIZE: uint16(q.depth)}
	private, _ := accept.AppendBinary(nil)
	reads := min(conn.Request().ResponderResources, t.cfg.ReadDepth)
	if n := q.dev.info.MaxReadDepth; n > 0 {
		reads = min(reads, n)
	}
	est, err := conn.Accept(q.ctx, rdma.ConnParam{PrivateData: private, InitiatorDepth: reads, RNRRetry: 7, Retry: 7})
	if err != nil {
		t.stats.acceptFailed.Add(1)
	} else if est.ORD > 0 {
		reads = min(reads, est.ORD)
	}
	if err == nil {
		t.trace.Accepted(q.remote, q.qid, accept.CRQSIZE, reads)
	}
	// A worker is closed after its last queue is gone.
	_ = q.lane.w.Submit(worker.TaskFunc(func() { q.acceptDone(reads, err) }))
	if err == nil {
		select {
		case <-conn.Done():
			q.end(q.lost())
		case <-q.gone:
		}
	}
	<-q.gone
}

// establish checks the connection request and makes the queue for it.
func (t *Target) establish(ln *listener, conn rdma.Conn) (*queue, protocol.RejectStatus, error) {
	cr := conn.Request()
	var req protocol.RDMAConnectRequest
	if err := req.UnmarshalBinary(cr.PrivateData); err != nil {
		return nil, rejectStatus(err, protocol.RejectInvalidLength), err
	}
	t.trace.Request(conn.RemoteAddr(), &req, cr.ResponderResources)
	if err := req.Check(); err != nil {
		return nil, rejectStatus(err, protocol.RejectNoResources), err
	}
	switch {
	case int(req.QID) > t.cfg.MaxQueuesPerController:
		return nil, protocol.RejectInvalidQID, fmt.Errorf("queue %d: the limit is %d I/O queues", req.QID, t.cfg.MaxQueuesPerController)
	case req.QID == 0 && req.Depth() > max(adminDepth, t.cfg.QueueDepth),
		req.QID > 0 && req.Depth() > t.cfg.QueueDepth:
		return nil, protocol.RejectInvalidHSQSIZE, fmt.Errorf("queue %d: depth %d is over the limit", req.QID, req.Depth())
	case cr.ResponderResources < 1:
		return nil, protocol.RejectInvalidIRD, errors.New("the host serves no RDMA Reads")
	}
	l := t.assign(req.QID)
	q, err := newQueue(t, ln, l, conn, &req)
	if err != nil {
		l.load.Add(-1)
		t.strangers.Log(slog.LevelError, "no resources for a connection", slog.Any("remote", conn.RemoteAddr()), slog.Any("err", err))
		return nil, protocol.RejectNoResources, err
	}
	t.mu.Lock()
	t.nextQueue++
	q.num = t.nextQueue
	t.pending[q] = struct{}{}
	t.queues[q] = struct{}{}
	if t.closing {
		q.end(errShutdown)
	}
	t.mu.Unlock()
	var addErr error
	if err := l.w.Call(func() { addErr = q.attach() }); err != nil {
		addErr = err
	}
	if addErr != nil {
		q.cancel()
		q.qp.Close()
		q.cq.Close()
		q.unregister()
		t.mu.Lock()
		delete(t.pending, q)
		delete(t.queues, q)
		t.mu.Unlock()
		l.load.Add(-1)
		return nil, protocol.RejectNoResources, addErr
	}
	return q, 0, nil
}

// connectTimeout ends a queue that is still without a Connect command.
func (q *queue) connectTimeout() {
	_ = q.lane.w.Submit(worker.TaskFunc(func() {
		if q.state < queueLive {
			q.close(errConnectTime)
		}
	}))
}

func rejectStatus(err error, def protocol.RejectStatus) protocol.RejectStatus {
	var s protocol.RejectStatus
	if errors.As(err, &s) {
		return s
	}
	return def
}

// reject refuses a connection with private data that tells why.
func (t *Target) reject(conn rdma.Conn, status protocol.RejectStatus, why error) {
	t.stats.reject(status)
	t.trace.Rejected(conn.RemoteAddr(), trace.NoQueue, status, why)
	t.strangers.Log(slog.LevelWarn, "connection rejected", slog.Any("remote", conn.RemoteAddr()),
		slog.String("status", status.String()), slog.String("why", why.Error()))
	r := protocol.RDMAConnectReject{Status: status}
	private, _ := r.AppendBinary(nil)
	conn.Reject(private)
	conn.Close()
}

// assign chooses the worker for a queue: of the I/O workers the one with the fewest
// queues; workers with equally many take turns.
func (t *Target) assign(qid uint16) *lane {
	t.mu.Lock()
	defer t.mu.Unlock()
	best := t.admin
	if qid > 0 {
		t.turn++
		best = t.lanes[t.turn%len(t.lanes)]
		for i := range t.lanes {
			if l := t.lanes[(t.turn+i)%len(t.lanes)]; l.load.Load() < best.load.Load() {
				best = l
			}
		}
	}
	best.load.Add(1)
	return best
}

// queueGone is called when a queue has released everything.
func (t *Target) queueGone(q *queue) {
	q.lane.load.Add(-1)
	if q.ctrl != nil {
		q.ctrl.queueGone(q)
	}
	t.mu.Lock()
	t.notPendingLocked(q)
	delete(t.queues, q)
	t.connections--
	t.mu.Unlock()
	close(q.gone)
}
