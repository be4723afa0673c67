package target

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"rdblk/internal/timeout"
	"rdblk/internal/trace"
	"rdblk/internal/worker"
	"rdblk/protocol"
)

// closeTimeout is how long Close waits for what the back end is doing.
const closeTimeout = 5 * time.Second

// Target serves namespaces of one subsystem, and the discovery subsystem beside
// it. Its methods may be called from any goroutine. Make it with New, end it with
// Shutdown or Close.
type Target struct {
	cfg        Config
	log        *slog.Logger
	trace      *trace.Tracer // nil = off
	strangers  *rateLog      // lines that anybody can cause
	hostLog    *rateLog      // lines that allowed hosts can cause
	storageLog *rateLog
	start      time.Time

	admin *lane
	lanes []*lane // I/O workers

	sub        *subsystem
	discovery  *subsystem
	hosts      atomic.Pointer[hostList]
	generation atomic.Uint64 // GENCTR
	namespaces atomic.Int32  // how many there are

	stats targetStats

	mu             sync.Mutex // guards what follows, the controllers of both subsystems, and writes of tables
	closing        bool
	closingCh      chan struct{}
	listeners      []*listener
	nextPort       uint16
	turn           int // see assign
	nextQueue      uint64
	queues         map[*queue]struct{} // all that exist
	pending        map[*queue]struct{} // of those, without a Connect
	connections    int                 // accepted and not gone
	halfOpen       int                 // of those, without a Connect
	rejecting      int
	flushes        int // of controllers that shut down
	retiring       int // namespaces that are being removed
	numControllers int

	sweeper *time.Ticker // real time: it looks at what really moves
	endOnce sync.Once
	ended   chan struct{} // everything is released
}

// New makes a target without namespaces and listeners. It starts the workers.
func New(cfg Config) (*Target, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	cfg = cfg.withDefaults()
	t := &Target{
		cfg: cfg, log: cfg.Logger, start: cfg.clock.Now(),
		strangers:  newRateLog(cfg.Logger, cfg.clock.Now, 20, time.Second),
		hostLog:    newRateLog(cfg.Logger, cfg.clock.Now, 200, 50*time.Millisecond),
		storageLog: newRateLog(cfg.Logger, cfg.clock.Now, 20, time.Second),
		sub:        newSubsystem(cfg.NQN, false), discovery: newSubsystem(protocol.DiscoveryNQN, true),
		closingCh: make(chan struct{}), queues: map[*queue]struct{}{}, pending: map[*queue]struct{}{},
		ended: make(chan struct{}),
	}
	t.trace = trace.New(cfg.Trace)
	t.hosts.Store(newHostList(cfg.Hosts, cfg.AllowAnyHost))
	t.generation.Store(1)
	var err error
	if t.admin, err = newLane(t, -1, max(adminMemory, 2*cfg.MaxIO), worker.Config{Name: "admin", MaxPoll: -1, Quiet: true}); err != nil {
		t.trace.Close()
		return nil, fmt.Errorf("admin worker: %w", err)
	}
	for i := range cfg.Workers {
		wc := worker.Config{Name: fmt.Sprintf("io%d", i), MaxPoll: cfg.MaxPoll, Busy: cfg.BusyPoll}
		if len(cfg.PinCPUs) > 0 {
			wc.Pin, wc.CPU = true, cfg.PinCPUs[i%len(cfg.PinCPUs)]
		}
		l, err := newLane(t, i, cfg.BufferMemory, wc)
		if err != nil {
			t.trace.Close()
			t.admin.close()
			for _, l := range t.lanes {
				l.close()
			}
			return nil, fmt.Errorf("I/O worker %d: %w", i, err)
		}
		t.lanes = append(t.lanes, l)
	}
	t.sweeper = time.NewTicker(max(cfg.TransferTimeout/sweepTicks, 10*time.Millisecond))
	go func() {
		for {
			select {
			case <-t.sweeper.C:
				for _, l := range t.lanes {
					if l.stats.active.Load() > 0 { // else it is left asleep
						_ = l.w.Submit(worker.TaskFunc(l.sweep))
					}
				}
				_ = t.admin.w.Submit(worker.TaskFunc(t.admin.sweep))
			case <-t.ended:
				return
			}
		}
	}()
	return t, nil
}

// NQN is the subsystem's name.
func (t *Target) NQN() string { return t.sub.nqn }

func (t *Target) uptime() time.Duration { return t.cfg.clock.Now().Sub(t.start) }

// stop refuses everything new.
func (t *Target) stop() []*listener {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closing {
		return nil
	}
	t.closing = true
	close(t.closingCh)
	l := t.listeners
	t.listeners = nil
	return l
}

// snapshot lists queues and controllers.
func (t *Target) snapshot() (queues []*queue, ctrls []*controller) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for q := range t.queues {
		queues = append(queues, q)
	}
	for _, s := range []*subsystem{t.sub, t.discovery} {
		ctrls = append(ctrls, s.sortedControllers()...)
	}
	return queues, ctrls
}

// Shutdown ends the target in order: no new connections and commands; what has
// been received is executed and answered; then the connections are closed. When it
// returns nil nothing touches the devices any more. If ctx ends first the
// connections are cut, and Shutdown returns as Close does, with ctx's error.
//
// It does not flush: what was acknowledged without a Flush of the host has the
// durability of the store.
func (t *Target) Shutdown(ctx context.Context) error {
	t.closeListeners()
	queues, ctrls := t.snapshot()
	for _, c := range ctrls {
		c.drain(errShutdown)
	}
	live := map[*queue]bool{}
	for _, c := range ctrls {
		c.mu.Lock()
		for _, q := range c.ioQueues() {
			live[q] = true
		}
		live[c.admin] = true
		c.mu.Unlock()
	}
	for _, q := range queues {
		if !live[q] {
			q.end(errShutdown)
		}
	}
	if err := t.wait(ctx); err != nil {
		return errors.Join(fmt.Errorf("shutdown: %w", err), t.Close())
	}
	return t.end()
}

// wait waits for all queues to be gone.
func (t *Target) wait(ctx context.Context) error {
	for {
		queues, _ := t.snapshot()
		t.mu.Lock()
		n := t.connections + t.rejecting + t.flushes + t.retiring
		t.mu.Unlock()
		if len(queues) == 0 && n == 0 {
			return nil
		}
		if len(queues) == 0 { // being established or refused, or a flush runs: look again soon
			select {
			case <-time.After(time.Millisecond):
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			continue
		}
		for _, q := range queues {
			select {
			case <-q.gone:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
	}
}

// Close ends the target at once: connections are cut. It waits for what the back
// end is doing, but not longer than 5 seconds: then it returns ErrBusy, and what
// the back end still uses (buffers, devices) must be left alone. A later Close
// waits again.
func (t *Target) Close() error {
	t.closeListeners()
	queues, ctrls := t.snapshot()
	for _, c := range ctrls {
		c.kill(errShutdown)
	}
	for _, q := range queues {
		q.end(errShutdown)
	}
	ctx, cancel := timeout.With(context.Background(), t.cfg.closeTimeout, "")
	defer cancel()
	if err := t.wait(ctx); err != nil {
		n := 0
		for _, q := range t.Status().Queues {
			n += q.Executing
		}
		return fmt.Errorf("close: %w (%d requests)", ErrBusy, n)
	}
	return t.end()
}

func (t *Target) closeListeners() {
	for _, ln := range t.stop() {
		if err := ln.l.Close(); err != nil {
			t.log.Warn("close listener", "addr", ln.addr, "err", err)
		}
		<-ln.done
	}
}

// end releases what is left when there are no queues.
func (t *Target) end() error {
	t.endOnce.Do(func() {
		t.mu.Lock()
		table := *t.sub.ns.Load()
		t.sub.ns.Store(&nsTable{})
		t.mu.Unlock()
		for _, ns := range table {
			if ns != nil {
				ns.retire()
			}
		}
		t.sweeper.Stop()
		for _, l := range t.lanes {
			l.close()
		}
		t.admin.close()
		if err := t.trace.Close(); err != nil {
			t.log.Warn("the trace is not complete", "err", err)
		}
		t.log.Debug("target ended")
		close(t.ended)
	})
	<-t.ended
	return nil
}
