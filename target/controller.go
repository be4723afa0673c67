package target

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"rdblk/blockdev"
	"rdblk/internal/worker"
	"rdblk/protocol"
)

// path tells that two associations are the same host coming over the same way, so
// that the second replaces the first. A host whose HOSTID says that it has a single
// path comes the same way wherever it comes from and to: its address may be another
// one after the loss. Hosts of any other kind may hold an association per path, and
// there the addresses tell them apart.
type path struct {
	hostNQN string
	hostID  protocol.UUID
	local   netip.AddrPort // the address that the host connected to; zero with a single path
	remote  netip.Addr     // zero with a single path
}

func pathOf(d *protocol.ConnectData, local netip.AddrPort, remote netip.Addr) path {
	p := path{hostNQN: d.HOSTNQN, hostID: d.HOSTID}
	if !d.HOSTID.SinglePath() {
		p.local, p.remote = local, remote
	}
	return p
}

// controller is one association: what a host has made by an admin Connect, with
// all queues that belong to it. See controllerState for its life.
type controller struct {
	t       *Target
	sub     *subsystem
	id      uint16
	hostNQN string
	path    path
	admin   *queue
	born    time.Time
	gone    chan struct{} // closed when every queue has released everything
	limits  limits        // as they were when it began: what the host has been told

	// ns is what the host sees of the subsystem's namespaces. That is all of them but
	// those that took the identifier of one which this host knew as another disk: what it has
	// sent to that one may still be on its way, on any queue, and must not land here. Replaced
	// as a whole under Target.mu, which guards knew and hidden, too.
	ns     atomic.Pointer[nsTable]
	knew   map[uint32]disk // namespaces that it saw and that were removed; at most MaxNamespaces
	hidden int             // namespaces that it does not see

	// traffic says that a command came since the keep-alive timer looked last. All
	// queues set it.
	traffic atomic.Bool

	// shares are by lane, the admin worker's first; each is its worker's.
	shares []share

	mu        sync.Mutex
	state     controllerState
	reason    error // of its end
	cc        protocol.CC
	fatal     bool  // CSTS.CFS
	shst      uint8 // CSTS.SHST
	adminGone bool
	draining  error             // not nil: the admin queue is drained after the I/O queues, for this reason
	queues    map[uint16]*queue // I/O queues by QID, until they have released everything
	flushing  bool              // for CC.SHN
	hostQuiet bool              // reset or shut down: the host sends no Keep Alive

	timer    timer
	timerGen uint64
	timerFor timerKind
	kato     time.Duration // 0 = none

	aec      protocol.AsyncEventConfig
	pending  eventSet // to be told
	masked   eventSet // told, and their log page not read yet
	changed  []uint32 // log page 4
	genSeen  uint64   // discovery: generation that the host was told of
	events   []*request
	aborts   int // Abort commands being worked on
	power    uint32
	arbit    uint32
	recovery uint32
	tempTh   uint32

	errCount uint64
	errLog   [errorLogSize]protocol.ErrorLogEntry // entry n at n % errorLogSize
}

func (c *controller) logAttr() slog.Attr {
	if c == nil {
		return slog.Group("ctrl")
	}
	return slog.Group("ctrl", slog.Int("id", int(c.id)), slog.String("host", c.hostNQN), slog.Bool("discovery", c.sub.discovery))
}

// newController is called with Target.mu held.
func (t *Target) newController(sub *subsystem, id uint16, q *queue, p path, kato uint32) *controller {
	c := &controller{
		t: t, sub: sub, id: id, hostNQN: p.hostNQN, path: p, admin: q, born: time.Now(),
		gone: make(chan struct{}), queues: map[uint16]*queue{}, shares: make([]share, len(t.lanes)+1), limits: t.limits(),
	}
	if sub.discovery {
		c.aec = protocol.EventConfigDiscovery
	} else {
		c.aec = protocol.EventConfigNamespace
	}
	c.kato = roundKATO(kato)
	c.mu.Lock()
	c.startTimer()
	c.mu.Unlock()
	c.ns.Store(sub.ns.Load())
	sub.controllers[id] = c
	t.numControllers++
	return c
}

// csts is the CSTS property. c.mu is held.
func (c *controller) csts() protocol.CSTS {
	rdy := c.state == ctrlEnabled || c.state == ctrlResetting || c.cc.EN() && (c.state == ctrlShuttingDown || c.state == ctrlShutDown)
	return protocol.CSTS(0).WithRDY(rdy && !c.fatal).WithCFS(c.fatal).WithSHST(c.shst)
}

// setCC is the host's write to CC. Admin worker.
func (c *controller) setCC(v protocol.CC) {
	c.mu.Lock()
	old := c.cc
	c.cc = v
	var drop []*request
	var end []*queue
	var why error
	if c.state < ctrlDying {
		if v.EN() && !old.EN() && c.state != ctrlResetting {
			c.enable()
		}
		if !v.EN() && old.EN() && c.state != ctrlDisabled {
			c.state, c.shst, c.fatal, c.hostQuiet = ctrlResetting, protocol.SHSTNone, false, true
			drop, c.events, c.pending, c.masked = c.events, nil, 0, 0
			end, why = c.ioQueues(), errHostDisabled
			c.startTimer()
		}
		switch {
		case v.SHN() != protocol.SHNNone && old.SHN() == protocol.SHNNone && c.state <= ctrlEnabled:
			end, why = c.ioQueues(), errHostShutdown
			c.shutdown()
		case v.SHN() == protocol.SHNNone && old.SHN() != protocol.SHNNone && c.state == ctrlShutDown:
			c.shst = protocol.SHSTNone
		}
		c.quiet()
	}
	c.mu.Unlock()
	for _, q := range end {
		q.end(why)
	}
	for _, r := range drop {
		r.fail(protocol.StatusAbortRequested)
	}
}

// shutdown is CC.SHN being set. c.mu is held.
func (c *controller) shutdown() {
	c.state, c.shst, c.hostQuiet = ctrlShuttingDown, protocol.SHSTInProgress, true
	c.startTimer()
}

// enable is CC.EN going to 1. c.mu is held.
func (c *controller) enable() {
	v := c.cc
	c.shst = protocol.SHSTNone
	if v.MPS() != 0 || v.AMS() != 0 || v.CSS() != 0 && v.CSS() != 6 ||
		!c.sub.discovery && (v.IOSQES() != 6 || v.IOCQES() != 4) {
		c.fatal = true
		c.t.hostLog.Log(slog.LevelWarn, "host enables its controller with settings that do not work", slog.String("cc", fmt.Sprintf("%#x", uint32(v))), c.logAttr())
		return
	}
	c.fatal, c.hostQuiet = false, false
	c.state = ctrlEnabled
	c.startTimer()
}

// quiet goes on with a reset or a shutdown once there is no I/O queue left. c.mu is held.
func (c *controller) quiet() {
	if len(c.queues) > 0 {
		return
	}
	if c.state == ctrlResetting {
		c.state = ctrlDisabled
		if c.cc.EN() { // the host did not wait
			c.enable()
		}
		if c.cc.SHN() != protocol.SHNNone {
			c.shutdown()
		}
	}
	if c.state == ctrlShuttingDown && !c.flushing {
		c.flushing = true
		go c.shutdownFlush()
	}
}

// shutdownFlush makes what the host wrote durable before CSTS says so.
func (c *controller) shutdownFlush() {
	var err error
	if !c.sub.discovery {
		err = c.t.flushAll()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.flushing = false
	if c.state != ctrlShuttingDown {
		return
	}
	if err != nil {
		// SHST never becomes "complete": the host must not believe its data is safe.
		c.fatal = true
		c.t.log.Error("flush at the shutdown of a controller failed", c.logAttr(), "err", err)
		return
	}
	c.state = ctrlShutDown
	if c.cc.SHN() != protocol.SHNNone {
		c.shst = protocol.SHSTComplete
	}
}

// flushAll flushes every namespace that has a write cache.
func (t *Target) flushAll() error {
	t.mu.Lock()
	var list []*namespace
	for _, ns := range *t.sub.ns.Load() {
		if ns != nil && ns.info.WriteCache && !ns.info.ReadOnly {
			ns.users.Add(1)
			list = append(list, ns)
		}
	}
	t.flushes++
	t.mu.Unlock()
	defer func() {
		t.mu.Lock()
		t.flushes--
		t.mu.Unlock()
	}()
	// All at once: one that hangs keeps the host waiting, but not the others' data from the medium.
	errs := make([]error, len(list))
	var wait sync.WaitGroup
	for i, ns := range list {
		wait.Go(func() {
			defer ns.users.Done()
			if err := ns.dev.Flush(); err != nil {
				errs[i] = fmt.Errorf("namespace %d (%s): %w", ns.id, ns.info.Name, err)
			}
		})
	}
	wait.Wait()
	return errors.Join(errs...)
}

// ioQueues lists them. c.mu is held.
func (c *controller) ioQueues() []*queue {
	l := make([]*queue, 0, len(c.queues))
	for _, q := range c.queues {
		l = append(l, q)
	}
	return l
}

// kill tears the association down, from any goroutine; the first reason counts.
// Wait for gone if it matters when it is over.
func (c *controller) kill(reason error) {
	c.mu.Lock()
	if c.state >= ctrlDying {
		c.mu.Unlock()
		return
	}
	c.state, c.reason, c.fatal = ctrlDying, reason, true
	c.events, c.pending = nil, 0 // the requests end with their queue
	c.stopTimer()
	list := append(c.ioQueues(), c.admin)
	c.mu.Unlock()
	level := slog.LevelInfo
	if errors.Is(reason, errKeepAlive) || errors.Is(reason, errTransferError) || errors.Is(reason, errShortCapsule) || errors.Is(reason, errPostRefused) || errors.Is(reason, errStalled) {
		level = slog.LevelWarn
	}
	if errors.Is(reason, errKeepAlive) {
		c.t.stats.keepAliveTimeouts.Add(1)
	}
	c.t.hostLog.Log(level, "association ends", slog.String("reason", reason.Error()), slog.Int("io_queues", len(list)-1), c.logAttr())
	for _, q := range list {
		q.end(reason)
	}
}

// drain ends the association after its commands in flight have been answered: the
// I/O queues first, since the end of the admin queue cuts them.
func (c *controller) drain(reason error) {
	c.mu.Lock()
	c.draining = reason
	list := c.ioQueues()
	if len(list) == 0 {
		list = append(list, c.admin)
	}
	c.mu.Unlock()
	for _, q := range list {
		q.startDrain(reason)
	}
}

// startDrain drains q from any goroutine.
func (q *queue) startDrain(reason error) {
	_ = q.lane.w.Submit(worker.TaskFunc(func() { q.drain(reason) }))
}

// queueClosing is called on q's worker when q has disconnected.
func (c *controller) queueClosing(q *queue) {
	if q != c.admin {
		return
	}
	c.mu.Lock()
	orderly := c.state == ctrlShutDown || c.state == ctrlDisabled && c.hostQuiet
	c.mu.Unlock()
	if orderly {
		c.kill(errHostShutdown)
		return
	}
	c.kill(fmt.Errorf("%w: %w", errAdminLost, q.reason))
}

// queueGone is called when q has released everything.
func (c *controller) queueGone(q *queue) {
	c.mu.Lock()
	if q == c.admin {
		c.adminGone = true
	} else if c.queues[q.qid] == q {
		delete(c.queues, q.qid)
	}
	c.quiet()
	if c.draining != nil && len(c.queues) == 0 && !c.adminGone {
		c.admin.startDrain(c.draining)
	}
	last := c.adminGone && len(c.queues) == 0
	if last {
		c.state = ctrlGone
	}
	c.mu.Unlock()
	if !last {
		return
	}
	t := c.t
	t.mu.Lock()
	delete(c.sub.controllers, c.id)
	t.numControllers--
	t.mu.Unlock()
	close(c.gone)
}

// recordError stores an error log entry and returns the status that says so.
func (c *controller) recordError(r *request) protocol.Status {
	switch r.status.Code() {
	case protocol.StatusAbortRequested, protocol.StatusAbortedSQDeletion:
		return r.status
	}
	s := r.status | protocol.StatusMore
	e := protocol.ErrorLogEntry{SQID: r.q.qid, CID: r.cmd.ID(), Status: s, TRTYPE: protocol.TransportRDMA, Location: 0xFFFF}
	if !r.cmd.IsFabrics() {
		e.NSID = r.cmd.NSID()
		if r.q.qid > 0 {
			e.LBA = r.cmd.SLBA()
		}
	}
	c.mu.Lock()
	c.errCount++
	e.Count = c.errCount
	c.errLog[c.errCount%errorLogSize] = e
	c.mu.Unlock()
	return s
}

// errorLog appends the error log page, newest first.
func (c *controller) errorLog(b []byte) []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range uint64(min(c.errCount, errorLogSize)) {
		b, _ = c.errLog[(c.errCount-i)%errorLogSize].AppendBinary(b)
	}
	return b
}

// connectResult is the answer to a Connect.
type connectResult struct {
	c      *controller // nil: refused
	status protocol.Status
	dw0    uint32
	why    string
}

func refuse(s protocol.Status, why string) connectResult { return connectResult{status: s, why: why} }

// refuseField refuses a Connect for the field at fault.
func refuseField(f protocol.ConnectInvalid, dnr bool, why string) connectResult {
	r := connectResult{status: protocol.StatusConnectInvalidParameters, dw0: uint32(f), why: why}
	if dnr {
		r.status = r.status.WithDNR()
	}
	return r
}

// connectCommon checks what admin and I/O Connects have in common.
func (t *Target) connectCommon(q *queue, cmd *protocol.Command, d *protocol.ConnectData) (*subsystem, connectResult) {
	if f, err := d.Check(); err != nil {
		return nil, refuseField(f, true, err.Error())
	}
	var sub *subsystem
	switch d.SUBNQN {
	case t.sub.nqn:
		sub = t.sub
	case t.discovery.nqn:
		sub = t.discovery
	default:
		return nil, refuseField(protocol.ConnectInvalidSUBNQN, true, "no such subsystem")
	}
	if !sub.discovery && !t.hosts.Load().allows(d.HOSTNQN) {
		r := refuse(protocol.StatusConnectInvalidHost.WithDNR(), "host is not on the allow list")
		r.dw0 = uint32(protocol.ConnectInvalidHOSTNQN)
		return nil, r
	}
	switch {
	case cmd.QID() != q.qid:
		return nil, refuseField(protocol.ConnectInvalidQID, true, fmt.Sprintf("queue %d on a connection for queue %d", cmd.QID(), q.qid))
	case sub.discovery && q.qid != 0:
		return nil, refuseField(protocol.ConnectInvalidQID, true, "a discovery controller has no I/O queues")
	case cmd.SQSIZE() == 0 || cmd.SQSIZE() > q.hsqsize:
		return nil, refuseField(protocol.ConnectInvalidSQSIZE, true, fmt.Sprintf("SQSIZE %d, the connection has HSQSIZE %d", cmd.SQSIZE(), q.hsqsize))
	}
	return sub, connectResult{}
}

// connectIO adds q to the controller that the Connect data names. On q's worker.
func (t *Target) connectIO(q *queue, cmd *protocol.Command, d *protocol.ConnectData) connectResult {
	sub, res := t.connectCommon(q, cmd, d)
	if sub == nil {
		return res
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	c := sub.controllers[d.CNTLID]
	if c == nil || c.hostNQN != d.HOSTNQN {
		return refuseField(protocol.ConnectInvalidCNTLID, false, fmt.Sprintf("no controller %d of this host", d.CNTLID))
	}
	if c.path.hostID != d.HOSTID {
		return refuseField(protocol.ConnectInvalidHostID, true, "HOSTID differs from the admin queue's")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case t.closing:
		return refuse(protocol.StatusConnectControllerBusy, "target shuts down")
	case c.state >= ctrlDying:
		return refuseField(protocol.ConnectInvalidCNTLID, false, fmt.Sprintf("controller %d is going", d.CNTLID))
	case c.state != ctrlEnabled:
		return refuseField(protocol.ConnectInvalidQID, false, fmt.Sprintf("controller %d is %v", d.CNTLID, c.state))
	case c.queues[q.qid] != nil:
		return refuse(protocol.StatusCommandSequenceError, fmt.Sprintf("queue %d exists", q.qid))
	}
	c.queues[q.qid] = q
	return connectResult{c: c, dw0: uint32(c.id)}
}

// connectAdmin makes a controller for q. It waits for the end of an association
// that the host has lost, so it runs on a goroutine.
func (t *Target) connectAdmin(q *queue, cmd *protocol.Command, d *protocol.ConnectData) connectResult {
	sub, res := t.connectCommon(q, cmd, d)
	if sub == nil {
		return res
	}
	if d.CNTLID != protocol.CNTLIDDynamic {
		return refuseField(protocol.ConnectInvalidCNTLID, true, "only dynamic controllers are supported (CNTLID 0xFFFF)")
	}
	p := pathOf(d, q.local, q.remote.Addr().Unmap())
	var timeout chan struct{}
	for {
		t.mu.Lock()
		var old []*controller
		if !sub.discovery { // nothing of a discovery controller can have a late effect
			for _, c := range sub.controllers {
				if c.path == p {
					old = append(old, c)
				}
			}
		}
		if len(old) == 0 {
			res := t.addController(sub, q, p, cmd.KATO())
			t.mu.Unlock()
			return res
		}
		t.mu.Unlock()
		if timeout == nil {
			timeout = make(chan struct{})
			stop := t.cfg.clock.AfterFunc(t.cfg.FenceTimeout, func() { close(timeout) })
			defer stop.Stop()
			t.stats.fenced.Add(uint64(len(old)))
		}
		for _, c := range old {
			if was, is := c.admin.remote.Addr().Unmap(), q.remote.Addr().Unmap(); was != is {
				// It moved; or, if this comes again and again, two machines think they are it.
				t.hostLog.Log(slog.LevelWarn, "host came back from another address", slog.String("host", c.hostNQN),
					slog.String("hostid", p.hostID.String()), slog.Int("cntlid", int(c.id)), slog.String("was", was.String()), slog.String("is", is.String()))
			}
			c.kill(errHostReturned)
		}
		for _, c := range old {
			select {
			case <-c.gone:
			case <-timeout:
				return refuse(protocol.StatusConnectControllerBusy, fmt.Sprintf("the storage still works on commands of the host's old association (controller %d)", c.id))
			case <-t.closingCh:
				return refuse(protocol.StatusConnectControllerBusy, "target shuts down")
			}
		}
	}
}

// addController is called with Target.mu held.
func (t *Target) addController(sub *subsystem, q *queue, p path, kato uint32) connectResult {
	if t.closing {
		return refuse(protocol.StatusConnectControllerBusy, "target shuts down")
	}
	// The list may have changed while we waited.
	if !sub.discovery && !t.hosts.Load().allows(p.hostNQN) {
		return refuse(protocol.StatusConnectInvalidHost.WithDNR(), "host is not on the allow list")
	}
	if t.numControllers >= t.cfg.MaxControllers {
		return refuse(protocol.StatusConnectControllerBusy, fmt.Sprintf("%d controllers exist, the limit", t.numControllers))
	}
	id, ok := sub.newID()
	if !ok {
		return refuse(protocol.StatusConnectControllerBusy, "no controller ID is free")
	}
	c := t.newController(sub, id, q, p, kato)
	return connectResult{c: c, dw0: uint32(id)}
}

// backendStatus is the status of a failed back-end call.
func backendStatus(op protocol.Opcode, err error) protocol.Status {
	switch {
	case err == nil:
		return protocol.StatusSuccess
	case errors.Is(err, blockdev.ErrReadOnly):
		return protocol.StatusNamespaceWriteProtected.WithDNR()
	case errors.Is(err, blockdev.ErrOutOfRange):
		return protocol.StatusLBAOutOfRange.WithDNR()
	case errors.Is(err, blockdev.ErrNotSupported):
		return protocol.StatusNotSupported(op)
	case errors.Is(err, blockdev.ErrFlushFailed):
		return protocol.StatusMediaError(op)
	case errors.Is(err, blockdev.ErrLost), errors.Is(err, blockdev.ErrClosed):
		return protocol.StatusInternalPathError
	}
	return protocol.StatusFromError(op, err)
}

// sortedControllers lists them by identifier. Target.mu is held.
func (s *subsystem) sortedControllers() []*controller {
	l := make([]*controller, 0, len(s.controllers))
	for _, c := range s.controllers {
		l = append(l, c)
	}
	slices.SortFunc(l, func(a, b *controller) int { return int(a.id) - int(b.id) })
	return l
}
