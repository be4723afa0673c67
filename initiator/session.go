package initiator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"rdblk/internal/arena"
	"rdblk/internal/trace"
	"rdblk/internal/worker"
	"rdblk/protocol"
	"rdblk/rdma"
)

// State is what a Session is doing.
//
//	live ─► reconnecting ─┬─► live
//	             ▲        └─► lost ─► live
//	             └─────────────────────┘ (live again, then lost again)
//	any ─► closing ─► closed
type State uint8

// States of a session.
const (
	StateLive         State = iota // requests flow
	StateReconnecting              // requests wait
	StateLost                      // requests fail; it still tries to reconnect
	StateClosing                   // no new requests
	StateClosed
)

var stateNames = [...]string{"live", "reconnecting", "lost", "closing", "closed"}

func (s State) String() string {
	if int(s) < len(stateNames) {
		return stateNames[s]
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// MarshalText gives the state's name.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads what MarshalText gives.
func (s *State) UnmarshalText(b []byte) error {
	for i, n := range stateNames {
		if n == string(b) {
			*s = State(i)
			return nil
		}
	}
	return fmt.Errorf("unknown session state %q", b)
}

// A Session attaches one subsystem of a target: it keeps an association with it,
// reconnects when that is lost, and offers the subsystem's namespaces as devices.
// Methods may be called from any goroutine.
type Session struct {
	cfg    Config
	log    *slog.Logger
	trace  *trace.Tracer // nil = off
	addr   netip.AddrPort
	subnqn string

	admin  *adminSide
	queues []*ioQueue // fixed once the first association has been made
	next   atomic.Uint64
	events *dispatcher

	ctx      context.Context // ends when the session is to stop trying
	cancel   context.CancelFunc
	scanning chan struct{}        // holds one while the namespaces are read
	missing  chan struct{}        // holds one when a namespace has become gone since watchGone looked
	stop     chan context.Context // Close asks the manager for an orderly end
	done     chan struct{}        // the manager has ended
	closed   sync.Once
	closeE   error

	reconnects, attempts atomic.Uint64 // associations after the first; attempts that failed
	gaveUp               atomic.Bool   // a request was given up since the last association was made
	postponedAt          atomic.Int64  // nano of the last word in the log about requests that the target wants later

	mu         sync.Mutex   // guards what follows; taken for moments only
	as         *association // nil while there is none
	state      State
	since      time.Time
	cntlid     uint16
	granted    int
	via        via   // of the admin queue
	viaIO      []via // of the I/O queues
	depth      int
	lastErr    error
	lastErrAt  time.Time
	permanent  bool // the last failed attempt said that repeating it cannot help
	found      map[uint32]*foundNamespace
	namespaces map[uint32]*namespace // those that a Device was made for
}

// via is what a connection runs on.
type via struct{ provider, device string }

func (l *lane) via() via { return via{l.info.Provider, l.info.Name} }

// foundNamespace is what the last scan found.
type foundNamespace struct {
	d     *description
	g     *geometry
	epoch cacheEpoch
	err   error
}

// Connect attaches the subsystem that cfg names. It makes one attempt, repeated within
// ConnectTimeout only while the target says that it is busy; the error tells what was
// refused by whom and what helps. The session must be closed.
func Connect(ctx context.Context, cfg Config) (*Session, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	cfg = cfg.withDefaults()
	s := &Session{
		cfg: cfg, addr: cfg.Addr, subnqn: cfg.SubNQN,
		scanning: make(chan struct{}, 1), missing: make(chan struct{}, 1), stop: make(chan context.Context, 1), done: make(chan struct{}),
		found: map[uint32]*foundNamespace{}, namespaces: map[uint32]*namespace{},
		since: time.Now(), trace: trace.New(cfg.Trace),
	}
	fail := func(err error) (*Session, error) {
		s.trace.Close()
		var asked *AttemptError
		if errors.As(err, &asked) { // of discovery, which says it all
			return nil, err
		}
		return nil, &AttemptError{Op: "connect to", Addr: s.addr, SubNQN: s.subnqn, Err: err}
	}
	if s.subnqn == "" {
		if err := s.discover(ctx); err != nil {
			return fail(err)
		}
	}
	s.log = cfg.Logger.With("subsys", s.subnqn, "addr", s.addr.String())
	s.ctx, s.cancel = context.WithCancel(context.Background())
	var err error
	if s.admin, err = newAdminSide(); err != nil {
		return fail(err)
	}
	s.events = newDispatcher(cfg.OnEvent)
	as, err := s.first(ctx)
	if err != nil {
		s.cancel()
		s.events.close()
		s.release()
		return fail(err)
	}
	s.goLive(as)
	go s.manage(as)
	return s, nil
}

// first makes the first association.
func (s *Session) first(ctx context.Context) (*association, error) {
	stop := context.AfterFunc(ctx, s.cancel)
	defer stop()
	until := time.Now().Add(s.cfg.ConnectTimeout)
	b := backoff{first: s.cfg.ReconnectDelay, limit: s.cfg.ReconnectMaxDelay, loss: -1}
	for try := 1; ; try++ {
		as, err := s.establish(s.ctx)
		switch {
		case err == nil && stop():
			return as, nil
		case err == nil: // cancelled at the last moment
			as.teardown()
			return nil, context.Cause(ctx)
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		}
		wait, _ := b.next(try, 0, rand.Float64())
		busy := isStatus(err, protocol.StatusConnectControllerBusy) && !permanent(err)
		if !busy || time.Now().Add(wait).After(until) {
			return nil, err
		}
		s.log.Info("target is busy, trying again", "wait", wait, "error", withoutAddr(err, s.addr))
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// makeQueues makes the workers, once it is known how many queues there are.
func (s *Session) makeQueues(n int) error {
	for i := range n {
		q := &ioQueue{s: s, i: i}
		wc := worker.Config{Name: fmt.Sprintf("queue %d", i+1), MaxPoll: s.cfg.MaxPoll, Busy: s.cfg.Busy}
		if len(s.cfg.PinCPUs) > 0 {
			wc.Pin, wc.CPU = true, s.cfg.PinCPUs[i%len(s.cfg.PinCPUs)]
		}
		var err error
		if q.mem, err = arena.New(s.cfg.BufferMemory); err == nil {
			q.mem.Populate(s.cfg.ResidentMemory)
			if q.side, err = arena.New(sideMemory); err == nil {
				q.w, err = worker.New(wc)
			}
		}
		if err != nil {
			for _, a := range []*arena.Arena{q.mem, q.side} {
				if a != nil {
					a.Close()
				}
			}
			s.dropQueues()
			return err
		}
		q.data = region{id: 2 * i, mem: q.mem.Bytes()}
		q.aux = region{id: 2*i + 1, mem: q.side.Bytes()}
		s.queues = append(s.queues, q)
	}
	return nil
}

// dropQueues ends the workers and frees their memory. Memory that a user did not give
// back stays mapped: a leak is better than a fault in whoever still uses it.
func (s *Session) dropQueues() {
	for _, q := range s.queues {
		q.w.Close()
		for _, a := range []*arena.Arena{q.mem, q.side} {
			if n := a.InUse(); n > 0 {
				s.log.Error("buffers were not given back, their memory is lost", "queue", q.i+1, "bytes", n)
				continue
			}
			a.Close()
		}
	}
}

func (s *Session) release() {
	s.dropQueues()
	if s.admin != nil {
		s.admin.close()
	}
	if err := s.trace.Close(); err != nil {
		s.log.Warn("the trace is not complete", "error", err)
	}
}

// goLive lets requests flow through a new association.
func (s *Session) goLive(as *association) {
	s.mu.Lock()
	s.as = as
	s.cntlid, s.granted, s.depth = as.ctrl.cntlid, len(as.lanes), len(as.lanes[0].slots)+1
	s.via, s.viaIO = as.ctrl.lane.via(), nil
	for _, l := range as.lanes {
		s.viaIO = append(s.viaIO, l.via())
	}
	s.permanent = false
	if s.state != StateClosing {
		s.state = StateLive
	}
	s.since = time.Now()
	s.mu.Unlock()
	s.gaveUp.Store(false)
	as.attachQueues()
	s.log.Info("connected", "provider", as.lanes[0].info.Provider, "device", as.lanes[0].info.Name, "cntlid", as.ctrl.cntlid, "queues", len(as.lanes), "depth", as.depth, "windows", as.lanes[0].windows,
		"in_capsule", as.lanes[0].inCapsule, "max_transfer", s.maxTransfer())
	s.events.post(Event{Kind: EventConnected})
}

// giveUp reports whether r is the request to give up: the oldest of all, and the first
// since the last association was made.
func (s *Session) giveUp(r *request) bool {
	for _, q := range s.queues {
		if at := q.oldest.Load(); at != 0 && at < r.accepted {
			return false
		}
	}
	return s.gaveUp.CompareAndSwap(false, true)
}

// manage is the session's manager: it waits for the association to fail, takes it
// apart, and makes a new one.
func (s *Session) manage(as *association) {
	defer close(s.done)
	attempt := 0 // of reconnecting; goes on from the last loss if that was a moment ago
	for {
		up := time.Now()
		select {
		case ctx := <-s.stop:
			s.closeE = as.close(ctx)
			return
		case <-as.ctx.Done():
			select {
			case ctx := <-s.stop:
				s.closeE = as.close(ctx)
				return
			default:
			}
		}
		cause := context.Cause(as.ctx)
		s.disconnected(cause)
		s.log.Warn("connection lost, reconnecting", "error", withoutAddr(cause, s.addr))
		s.events.post(Event{Kind: EventDisconnected, Err: cause})
		as.teardown()
		if time.Since(up) > s.cfg.ReconnectMaxDelay {
			attempt = 0
		}
		if as = s.reconnect(&attempt); as == nil {
			return
		}
	}
}

// reconnect tries until it has a new association or the session is closed (nil).
func (s *Session) reconnect(attempt *int) *association {
	start := time.Now()
	b := backoff{first: s.cfg.ReconnectDelay, limit: s.cfg.ReconnectMaxDelay, loss: s.cfg.LossTimeout}
	for {
		wait, lost := b.next(*attempt, time.Since(start), rand.Float64())
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-s.stop:
			timer.Stop()
			s.closeE = s.unflushed()
			return nil
		case <-s.ctx.Done():
			timer.Stop()
			return nil
		}
		if lost {
			s.declareLost()
			b.loss = -1 // from now on it only tries
			continue
		}
		as, err := s.attempt(b, start)
		if err == nil {
			*attempt++ // a loss right after this does not reconnect at once
			s.reconnects.Add(1)
			s.goLive(as)
			return as
		}
		if s.ctx.Err() != nil {
			return nil
		}
		s.attempts.Add(1)
		s.report(*attempt, err)
		*attempt++
	}
}

// attempt makes one attempt. The loss timeout does not wait for its end, requests fail
// although it still runs, and neither does Close.
func (s *Session) attempt(b backoff, start time.Time) (*association, error) {
	type result struct {
		as  *association
		err error
	}
	c := make(chan result, 1)
	go func() {
		as, err := s.establish(s.ctx)
		c <- result{as, err}
	}()
	var expired <-chan time.Time
	if b.loss >= 0 {
		timer := time.NewTimer(max(b.loss-time.Since(start), 0))
		defer timer.Stop()
		expired = timer.C
	}
	for {
		select {
		case r := <-c:
			return r.as, r.err
		case <-expired:
			s.declareLost()
		case <-s.stop:
			s.cancel()
			r := <-c
			if r.as != nil {
				r.as.teardown()
			}
			s.closeE = s.unflushed()
			return nil, ErrClosed
		}
	}
}

// report notes a failed attempt: in the status always, in the log when it is the first,
// another one, or now and then.
func (s *Session) report(attempt int, err error) {
	s.mu.Lock()
	changed := s.lastErr == nil || s.lastErr.Error() != err.Error()
	s.lastErr, s.lastErrAt = err, time.Now()
	s.permanent = permanent(err)
	perm := s.permanent
	s.mu.Unlock()
	if !changed && attempt%64 != 0 {
		return
	}
	if perm && errors.Is(err, rdma.ErrNotSupported) {
		s.log.Error("reconnect not possible on this machine as it is; still trying, since that may change", "attempt", attempt+1, "error", withoutAddr(err, s.addr))
	} else if perm {
		s.log.Error("reconnect refused for good by the target; still trying, since it may be put right there", "attempt", attempt+1, "error", withoutAddr(err, s.addr))
	} else {
		s.log.Warn("reconnect failed", "attempt", attempt+1, "error", withoutAddr(err, s.addr))
	}
}

// declareLost fails what waits.
func (s *Session) declareLost() {
	s.mu.Lock()
	if s.state != StateReconnecting && s.state != StateClosing {
		s.mu.Unlock()
		return
	}
	err := &LostError{After: s.cfg.LossTimeout, Cause: s.lastErr}
	if s.state == StateReconnecting {
		s.state, s.since = StateLost, time.Now()
	}
	s.mu.Unlock()
	s.log.Error("target is lost: requests fail from now on", "error", err)
	s.events.post(Event{Kind: EventLost, Err: err})
	for _, q := range s.queues {
		_ = q.w.Call(func() { q.fail(err) })
	}
}

// disconnected notes the loss of the association.
func (s *Session) disconnected(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.as = nil
	if s.state != StateClosing {
		s.state, s.since = StateReconnecting, time.Now()
	}
	s.lastErr, s.lastErrAt = err, time.Now()
}

// maxNamespaces bounds what is kept about a target's namespaces.
const maxNamespaces = 1024

// scan reads the namespaces. Those that devices were made for are checked: one that is
// missing is an error unless live (a target that restarts may not have it yet), one
// that is another is marked so that its requests fail.
func (s *Session) scan(ctx context.Context, c *controller, live bool) error {
	// One at a time: what an older scan saw must not undo what a newer one found.
	select {
	case s.scanning <- struct{}{}:
		defer func() { <-s.scanning }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	lim := &controllerLimits{ctrl: c.ident, mpsmin: c.cap.MPSMIN(), maxTransfer: s.cfg.MaxTransfer, subnqn: s.subnqn}
	var err error
	if lim.nvm, err = c.nvmLimits(ctx); err != nil {
		return err
	}
	ids, err := c.activeNamespaces(ctx, maxNamespaces)
	if err != nil {
		return err
	}
	// A target that counts losses of each namespace is asked for each: the sum of all changes
	// with namespaces that come and go, and with losses that are not ours.
	each := c.ident.LPA&protocol.LPASmartPerNamespace != 0
	var common cacheEpoch
	if !each {
		if common, err = c.epoch(ctx, protocol.NSIDAll); err != nil {
			return err
		}
	}
	found := make(map[uint32]*foundNamespace, len(ids))
	for _, id := range ids {
		f := &foundNamespace{epoch: common}
		if each {
			switch f.epoch, err = c.epoch(ctx, id); {
			case isStatus(err, protocol.StatusInvalidNamespace):
				continue // went away meanwhile
			case err != nil:
				return err
			}
		}
		if f.d, f.err = c.describe(ctx, id); f.err == nil {
			f.g, f.err = geometryOf(lim, f.d)
		} else if errors.Is(f.err, ErrNoNamespace) {
			continue // went away meanwhile
		} else if ctx.Err() != nil || !isRefusal(f.err) && !errors.Is(f.err, ErrUnsupported) && !errors.Is(f.err, ErrProtocol) {
			return f.err // of the association, which may have ended for a breach of protocol, not of the namespace
		}
		found[id] = f
	}
	s.mu.Lock()
	s.found = found
	var mine []*namespace
	for _, n := range s.namespaces {
		mine = append(mine, n)
	}
	s.mu.Unlock()
	for _, n := range mine {
		if err := s.recheck(n, found[n.nsid], live); err != nil {
			return err
		}
	}
	if live {
		s.events.post(Event{Kind: EventNamespaces})
	}
	return nil
}

// anyGone reports whether a namespace that a Device was made for is not at the target.
func (s *Session) anyGone() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.namespaces {
		if n.gone.Load() != 0 {
			return true
		}
	}
	return false
}

// recheck compares a namespace that is in use with what was found.
func (s *Session) recheck(n *namespace, f *foundNamespace, live bool) error {
	switch {
	case f == nil && live:
		n.vanished()
		return nil
	case f == nil:
		return fmt.Errorf("namespace %d: %w (yet)", n.nsid, ErrNoNamespace)
	case f.err != nil:
		err := fmt.Errorf("%s: %w: %w", n.name(), ErrChanged, f.err)
		n.fault.Store(&err)
		s.log.Error("namespace cannot be used any more, its requests fail", "ns", n.nsid, "error", f.err)
		s.events.post(Event{Kind: EventChanged, NSID: n.nsid, Err: err})
		return nil
	}
	if !live || n.gone.Load() != 0 {
		s.checkCache(n, f.epoch)
	}
	before := n.geometry().info.Size
	grown, err := n.adopt(f.d, f.g, live)
	switch size := f.g.info.Size; {
	case err != nil && n.fault.Load() == nil:
		s.log.Error("namespace became smaller at the target; the size that was attached stays in force, and requests beyond the end fail", "ns", n.nsid, "error", err)
		s.events.post(Event{Kind: EventShrunk, NSID: n.nsid, Size: size, Err: err})
	case err != nil:
		s.log.Error("namespace is another one than was attached, its requests fail so that nothing is written to it", "ns", n.nsid, "error", err)
		s.events.post(Event{Kind: EventChanged, NSID: n.nsid, Err: err})
	case grown:
		s.log.Info("namespace grew", "ns", n.nsid, "before", before, "size", size)
		s.events.post(Event{Kind: EventResized, NSID: n.nsid, Size: size})
	}
	return nil
}

// checkCache makes a device fail if the target lost writes to it that it had
// acknowledged and nobody had flushed; see the package comment, "Durability". Requests
// do not flow at that time.
func (s *Session) checkCache(n *namespace, now cacheEpoch) {
	n.mu.Lock()
	before := n.epoch
	n.epoch = now
	n.mu.Unlock()
	if !n.dirty() {
		return
	}
	switch {
	case before.known() && now != before:
		err := fmt.Errorf("%s: %w", n.name(), ErrCacheLost)
		n.ruined.Store(&err)
		s.log.Error("the target lost acknowledged writes; requests fail until the device is attached anew", "ns", n.nsid, "error", err)
		s.events.post(Event{Kind: EventCacheLost, NSID: n.nsid, Err: err})
	case !before.known():
		s.log.Warn("reconnected with unflushed writes to a target that does not tell whether its write cache survived", "ns", n.nsid)
	}
}

// unflushed is the error of an end without the target.
func (s *Session) unflushed() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.namespaces {
		if n.dirty() {
			return fmt.Errorf("the target is not connected, and writes that it acknowledged were not flushed: %w", s.lastErr)
		}
	}
	return nil
}

func (s *Session) maxTransfer() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.found {
		if f.g != nil {
			return f.g.maxTransfer
		}
	}
	return 0
}

// Close ends the session: new requests fail with ErrClosed, the accepted ones are
// waited for (through a reconnect if need be) until ctx ends, and then fail; the
// controller is shut down in order, which makes it flush; the workers end and all
// memory is freed. Users of queues (blockdev.Queue) must have closed them and returned
// their buffers. The error tells what could not be done in order. Closing again waits
// and returns the same. Not to be called on a worker.
func (s *Session) Close(ctx context.Context) error {
	s.closed.Do(func() {
		s.mu.Lock()
		s.state, s.since = StateClosing, time.Now()
		s.mu.Unlock()
		var waits []<-chan struct{}
		for _, q := range s.queues {
			_ = q.w.Call(func() {
				q.closed = true
				waits = append(waits, q.drain())
			})
		}
		var cut error
		for _, w := range waits {
			select {
			case <-w:
			case <-ctx.Done():
				cut = fmt.Errorf("requests have failed: %w", context.Cause(ctx))
			}
		}
		if cut != nil {
			for _, q := range s.queues {
				_ = q.w.Call(func() { q.fail(ErrClosed) })
			}
		}
		s.stop <- ctx
		grace := context.AfterFunc(ctx, s.cancel) // also ends an attempt to reconnect
		<-s.done
		grace()
		s.cancel()
		s.events.close()
		s.release()
		s.mu.Lock()
		s.state, s.since = StateClosed, time.Now()
		s.mu.Unlock()
		if cut != nil && errors.Is(s.closeE, context.Cause(ctx)) {
			s.closeE = nil // the same reason, no need to say it twice
		}
		if err := errors.Join(cut, s.closeE); err != nil {
			s.closeE = fmt.Errorf("close %q: %w", s.subnqn, err)
		}
		if s.closeE != nil {
			s.log.Info("closed", "error", s.closeE)
		} else {
			s.log.Info("closed")
		}
	})
	return s.closeE
}
