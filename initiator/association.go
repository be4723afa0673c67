package initiator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"rdblk/internal/timeout"
	"rdblk/internal/worker"
	"rdblk/protocol"
)

// An association is one admin queue and the I/O queues that belong to it. It is one
// unit: whatever breaks ends all of it (fail), and the session's manager takes it apart
// (teardown) and makes a new one.
type association struct {
	s     *Session
	log   *slog.Logger
	ctrl  *controller
	lanes []*lane // of the I/O queues
	depth int

	ctx    context.Context // ends with fail; its cause is the reason
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup // goroutines that end with ctx
}

var errTornDown = errors.New("association torn down")

// fail ends the association; the first reason counts. Any goroutine, never blocks.
func (a *association) fail(err error) { a.cancel(err) }

// establish makes an association: admin queue, initialisation, I/O queues, namespaces
// (NVMe over Fabrics, "Controller Initialization"). On success requests flow.
// ConnectTimeout bounds it.
func (s *Session) establish(parent context.Context) (_ *association, err error) {
	a := &association{s: s, log: s.log}
	a.ctx, a.cancel = context.WithCancelCause(parent)
	ctx, stop := timeout.WithKind(a.ctx, s.cfg.ConnectTimeout, "connect_timeout", ErrTimeout)
	defer stop()
	defer func() {
		if err != nil {
			if cause := context.Cause(a.ctx); errors.Is(err, errLaneDown) && cause != nil {
				err = cause // what a queue saw first says more than the command that suffered
			}
			a.fail(err)
			a.teardown()
		}
	}()
	if err := a.connectAdmin(ctx); err != nil {
		return nil, err
	}
	if err := a.connectIO(ctx); err != nil {
		return nil, err
	}
	if err := s.scan(ctx, a.ctrl, false); err != nil {
		return nil, err
	}
	a.watchEvents(ctx)
	a.watchGone()
	a.supervise()
	if err := context.Cause(a.ctx); err != nil {
		return nil, err
	}
	return a, nil
}

// connectAdmin brings the admin queue up to and including Identify Controller, and
// starts Keep Alive.
func (a *association) connectAdmin(ctx context.Context) error {
	s := a.s
	c, err := connectController(ctx, controllerConfig{
		lane: laneConfig{
			provider: s.cfg.Provider, local: s.cfg.LocalAddr, remote: s.addr,
			depth: protocol.AdminQueueDepth, noWindows: s.cfg.NoWindows,
			w: s.admin.w, regions: []region{s.admin.region}, numRegion: 1, log: s.log, trace: s.trace, fail: a.fail,
		},
		mem:  s.admin.mem,
		data: protocol.ConnectData{HOSTID: s.cfg.HostID, CNTLID: protocol.CNTLIDDynamic, SUBNQN: s.subnqn, HOSTNQN: s.cfg.HostNQN},
		kato: s.cfg.KeepAlive,
	})
	a.ctrl = c
	if err != nil {
		return err
	}
	a.watch(c.lane)
	a.goKeepAlive()
	return nil
}

// connectIO makes the I/O queues (NVMe Base, feature Number of Queues).
func (a *association) connectIO(ctx context.Context) error {
	s, c := a.s, a.ctrl
	want := s.cfg.Queues
	if s.queues != nil {
		want = len(s.queues)
	}
	v, err := c.setFeature(ctx, protocol.FeatureNumberOfQueues, uint32(protocol.NewQueueCount(want, want)))
	if err != nil {
		return err
	}
	n := min(want, protocol.QueueCount(v).Pairs())
	if s.queues == nil {
		if n < want {
			a.log.Warn("target grants fewer I/O queues than were asked for (its max_queues_per_controller)", "queues", want, "granted", n)
		}
		if err := s.makeQueues(n); err != nil {
			return err
		}
	} else if n < want {
		a.log.Warn("target grants fewer I/O queues than before, some share a connection", "queues", want, "granted", n)
	}
	a.depth = c.ioDepth(s.cfg.Depth)
	inCapsule := c.ident.InCapsuleSize()
	if s.cfg.NoInCapsule {
		inCapsule = 0
	}
	for i := range n {
		cfg := laneConfig{
			provider: s.cfg.Provider, local: s.cfg.LocalAddr, remote: s.addr,
			qid: uint16(i + 1), cntlid: c.cntlid, depth: a.depth, inCapsule: inCapsule, noWindows: s.cfg.NoWindows,
			w: s.queues[i].w, numRegion: 2 * len(s.queues), log: s.log, trace: s.trace, fail: a.fail,
		}
		for j := i; j < len(s.queues); j += n { // its own queue, and those without a lane of their own
			cfg.regions = append(cfg.regions, s.queues[j].data, s.queues[j].aux)
		}
		l, err := dialLane(ctx, cfg)
		if err != nil {
			return err
		}
		a.lanes = append(a.lanes, l)
		if err := l.attach(); err != nil {
			return err
		}
		a.watch(l)
		data := &protocol.ConnectData{HOSTID: s.cfg.HostID, CNTLID: c.cntlid, SUBNQN: s.subnqn, HOSTNQN: s.cfg.HostNQN}
		if _, err := connectQueue(ctx, l, data, 0); err != nil {
			return err
		}
	}
	return nil
}

// attachQueues lets requests flow.
func (a *association) attachQueues() {
	n := len(a.lanes)
	for j, q := range a.s.queues {
		l := a.lanes[j%n]
		sharers := 0
		for k := j % n; k < len(a.s.queues); k += n {
			sharers++
		}
		quota := max(1, l.usable/sharers)
		_ = q.w.Call(func() { q.attach(l, quota) })
	}
}

// watch ends the association when the connection of a lane ends; what the target
// answered before that counts.
func (a *association) watch(l *lane) {
	a.wg.Go(func() {
		select {
		case <-l.conn.Done():
			_ = l.w.Submit(worker.TaskFunc(l.disconnected))
		case <-a.ctx.Done():
		}
	})
}

// goKeepAlive sends a Keep Alive twice per timeout (NVMe Base, "Keep Alive"). One
// without an answer within the timeout is a lost connection; one that is answered with
// an error is not.
func (a *association) goKeepAlive() {
	c, kato := a.ctrl, a.s.cfg.KeepAlive
	a.wg.Go(func() {
		tick := time.NewTicker(kato / 2)
		defer tick.Stop()
		warned := false
		for {
			select {
			case <-tick.C:
			case <-a.ctx.Done():
				return
			}
			ctx, stop := timeout.WithKind(a.ctx, kato, "keep_alive", ErrTimeout)
			k := &call{op: "Keep Alive"}
			k.sqe.InitAdmin(protocol.AdminKeepAlive, 0, 0)
			err := c.exec(ctx, k)
			stop()
			if isRefusal(err) && !warned {
				warned = true
				a.log.Warn("keep alive refused", "error", err)
			}
		}
	})
}

// watchEvents asks for notices about namespaces and keeps one Asynchronous Event
// Request outstanding.
func (a *association) watchEvents(ctx context.Context) {
	c := a.ctrl
	if c.lane.usable < 2 {
		a.log.Warn("admin queue has no room for an Asynchronous Event Request: changes at the target are not seen", "usable", c.lane.usable)
		return
	}
	if want := c.ident.OAES & protocol.EventConfigNamespace; want != 0 {
		if _, err := c.setFeature(ctx, protocol.FeatureAsyncEventConfig, uint32(want)); err != nil {
			a.log.Warn("asynchronous events not configured", "error", err)
		}
	}
	a.wg.Go(func() {
		for {
			k := &call{op: "Asynchronous Event Request"}
			k.sqe.InitAdmin(protocol.AdminAsyncEventRequest, 0, 0)
			if err := c.exec(a.ctx, k); err != nil {
				if isRefusal(err) {
					a.log.Warn("no asynchronous events from now on", "error", err)
				}
				return
			}
			a.event(protocol.AsyncEvent(uint32(k.result)))
		}
	})
}

// goneCheck is how often the target is asked for a namespace that was there.
const goneCheck = time.Second

// watchGone looks for namespaces that are gone until they are back: not every target
// sends a notice, and a command's answer may be what told that it is gone.
func (a *association) watchGone() {
	a.wg.Go(func() {
		tick := time.NewTicker(goneCheck)
		defer tick.Stop()
		for {
			for !a.s.anyGone() {
				tick.Stop() // a session whose namespaces are there is not woken up for this
				select {
				case <-a.s.missing:
				case <-a.ctx.Done():
					return
				}
				tick.Reset(goneCheck)
			}
			select {
			case <-tick.C:
			case <-a.ctx.Done():
				return
			}
			ctx, stop := timeout.WithKind(a.ctx, a.s.cfg.ConnectTimeout, "connect_timeout", ErrTimeout)
			if err := a.s.scan(ctx, a.ctrl, true); err != nil && a.ctx.Err() == nil {
				a.log.Warn("namespaces not read", "error", err)
			}
			stop()
		}
	})
}

// event deals with an asynchronous event.
func (a *association) event(e protocol.AsyncEvent) {
	a.log.Info("asynchronous event", "event", e.String())
	ctx, stop := timeout.WithKind(a.ctx, a.s.cfg.ConnectTimeout, "connect_timeout", ErrTimeout)
	defer stop()
	switch e & 0xFFFF07 {
	case protocol.EventNamespaceChanged:
		// Reading the log re-arms the event; what changed is found by looking at
		// everything.
		if _, err := a.ctrl.log(ctx, protocol.LogChangedNamespaces, protocol.NSIDAll, 0, protocol.ChangedNamespacesLogSize, false); err != nil {
			a.log.Warn("changed namespace list not read", "error", err)
		}
		if err := a.s.scan(ctx, a.ctrl, true); err != nil {
			a.log.Warn("namespaces not read", "error", err)
		}
	case protocol.EventPersistentError:
		a.fail(fmt.Errorf("%w: controller reports a persistent internal error", ErrProtocol))
	default:
		if lid := e.LogPage(); lid == protocol.LogSmart { // read to re-arm
			if _, err := a.ctrl.log(ctx, lid, protocol.NSIDAll, 0, protocol.SmartLogSize, false); err != nil {
				a.log.Warn("log page not read", "page", lid.String(), "error", err)
			}
		}
	}
}

// laneCheck is the task that looks for commands without an answer.
type laneCheck struct {
	l       *lane
	limit   time.Duration
	pending atomic.Bool
}

func (c *laneCheck) Run() {
	c.pending.Store(false)
	c.l.supervise(c.limit)
}

// supervise looks at every I/O queue for commands that are out for too long. A
// worker whose requests are not at the target is left asleep. (What is made on the
// admin queue has a limit of its own each, see lane.do.)
func (a *association) supervise() {
	limit := a.s.cfg.RequestTimeout
	checks := make([]laneCheck, len(a.lanes))
	for i, l := range a.lanes {
		checks[i].l, checks[i].limit = l, limit
	}
	a.wg.Go(func() {
		tick := time.NewTicker(min(max(limit/8, 5*time.Millisecond), time.Second))
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
			case <-a.ctx.Done():
				return
			}
			for j, q := range a.s.queues {
				if c := &checks[j%len(checks)]; q.sent.Load() > 0 && !c.pending.Swap(true) {
					_ = c.l.w.Submit(c)
				}
			}
		}
	})
}

// stopLanes ends the I/O queues. When it returns nothing the target does on them
// reaches our memory any more, nothing we posted reaches the target, and every command
// without an answer is back with its request.
func (a *association) stopLanes(orderly bool) {
	for _, q := range a.s.queues {
		_ = q.w.Call(q.detach)
	}
	for _, l := range a.lanes {
		l.end(orderly)
	}
	a.lanes = nil
}

// partingTime bounds an orderly disconnect.
const partingTime = time.Second

// end stops and releases a lane from an ordinary goroutine. Without orderly the
// connection is reset, so that no command that still waits to be sent reaches the
// target later.
func (l *lane) end(orderly bool) {
	if orderly && l.conn.Disconnect() == nil {
		t := time.NewTimer(partingTime)
		select {
		case <-l.conn.Done():
		case <-t.C:
		}
		t.Stop()
	}
	_ = l.w.Call(l.stop)
	l.release()
}

// teardown takes an association that has failed apart. It waits for the workers and for
// the association's goroutines.
func (a *association) teardown() {
	a.cancel(errTornDown)
	a.stopLanes(false)
	if a.ctrl != nil {
		a.ctrl.lane.end(false)
	}
	a.wg.Wait()
}

// close ends a live association in order: I/O queues first, then CC.SHN, then the admin
// queue (as Linux does). ctx bounds the wait for the controller.
func (a *association) close(ctx context.Context) error {
	a.stopLanes(true)
	err := a.ctrl.shutdown(ctx)
	if cause := context.Cause(a.ctx); errors.Is(err, errLaneDown) && cause != nil {
		err = cause
	}
	a.cancel(errTornDown)
	a.ctrl.lane.end(err == nil)
	a.wg.Wait()
	return err
}
