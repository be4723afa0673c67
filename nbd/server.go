package nbd

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"rdblk/blockdev"
	"rdblk/internal/timeout"
	"rdblk/internal/worker"
)

// Export is a device under a name.
type Export struct {
	// Name is what clients ask for; at most 4096 bytes of UTF-8. The empty name is the
	// default export. A server with a single export serves it under the empty name too.
	Name string
	// Description is shown to people; optional, at most 4096 bytes.
	Description string
	// Device is used until Shutdown or Close has returned and is never closed by the server.
	Device blockdev.Device
}

// Config tells what to serve and within which limits. For numbers and durations
// zero means the default and, where it says so, a negative value no limit.
type Config struct {
	// Logger gets one line per connection and refusal, rate-limited; nil = nothing.
	Logger *slog.Logger
	// Exports is what is served; at least one. Names differ.
	Exports []Export

	// Workers is the number of workers for devices without queues of their own;
	// default the number of processors, at most 4. 1 … 256.
	Workers int
	// Worker is how they run. Name and CPU are given a number by the server: with Pin,
	// worker i runs on processor CPU + i.
	Worker worker.Config
	// QueueMemory is the buffer memory per worker and export in bytes, for the same
	// devices; default 128 MiB, at least 1 MiB. It is address space: pages are used
	// as they are needed. A quarter of it bounds a single read or write.
	QueueMemory int

	// MaxConnections bounds connections in transmission, over all exports; default 128.
	MaxConnections int
	// MaxHandshakes bounds connections that have not chosen an export yet; default 64.
	// One more ends the oldest of them.
	MaxHandshakes int
	// HandshakeTimeout bounds the handshake as a whole; default 30 s.
	HandshakeTimeout time.Duration
	// MaxInFlight bounds the requests of a connection from header to reply; default
	// 256, at most 65536. A client that sends more waits.
	MaxInFlight int
	// MaxPayload bounds a single read or write in bytes and is announced to
	// clients; default 32 MiB, at least 64 KiB. A queue that has no such
	// buffers lowers it.
	MaxPayload int
	// MaxConnBytes bounds the buffers of a connection in bytes, in flight and in
	// replies that it has not read; default 32 MiB. A single request may exceed it.
	// The buffers are the queues', which have a bound of their own; a request that finds none
	// waits in line.
	MaxConnBytes int
	// SpillMemory bounds the data, in bytes over all connections, that is moved out of the
	// queues' buffers because clients who do not read their replies, or do not go on with
	// their requests, are in the way of others; default 64 MiB, negative none. When it is used
	// up the connection that has stood still for the longest time is ended. With the
	// queues' buffers, and about 200 KiB for each connection and 64 KiB for each handshake,
	// it is all that clients can do to memory.
	SpillMemory int
	// StallTimeout ends a connection whose client does not move for so long while
	// it owes something: the rest of a request, or to read replies. Default 5 min, negative never.
	// A client between requests may be idle for ever.
	StallTimeout time.Duration
	// AllowRemote lets Serve take TCP listeners that are not on the loopback
	// interface. NBD has no encryption and no authentication.
	AllowRemote bool

	tickPeriod    time.Duration // tests make these smaller
	evacuateAfter time.Duration
	sendBuffer    int
}

// Defaults and bounds of Config that commands name too.
const (
	DefaultMaxConnections = 128
	DefaultMaxConnBytes   = 32 << 20
	DefaultSpillMemory    = 64 << 20
	MaxMaxConnections     = 1 << 20
	MinMaxConnBytes       = 4096
	MaxMemory             = 1 << 40
)

const (
	defaultQueueMemory      = 128 << 20
	defaultMaxHandshakes    = 64
	defaultHandshakeTimeout = 30 * time.Second
	defaultMaxInFlight      = 256
	defaultMaxPayload       = 32 << 20
	defaultStallTimeout     = 5 * time.Minute

	// closeWait is how long Close waits for the device to answer what it has.
	closeWait = 5 * time.Second
)

func (c Config) withDefaults() Config {
	def := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	def(&c.Workers, min(runtime.NumCPU(), 4))
	def(&c.QueueMemory, defaultQueueMemory)
	def(&c.MaxConnections, DefaultMaxConnections)
	def(&c.MaxHandshakes, defaultMaxHandshakes)
	def(&c.MaxInFlight, defaultMaxInFlight)
	def(&c.MaxPayload, defaultMaxPayload)
	def(&c.MaxConnBytes, DefaultMaxConnBytes)
	def(&c.SpillMemory, DefaultSpillMemory)
	def(&c.sendBuffer, socketBuffer)
	dur := func(p *time.Duration, v time.Duration) {
		if *p == 0 {
			*p = v
		}
	}
	dur(&c.HandshakeTimeout, defaultHandshakeTimeout)
	dur(&c.StallTimeout, defaultStallTimeout)
	dur(&c.tickPeriod, tickPeriod)
	dur(&c.evacuateAfter, evacuateAfter)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate returns all problems of the configuration, joined.
func (c Config) Validate() error {
	c = c.withDefaults()
	var errs []error
	bad := func(format string, a ...any) { errs = append(errs, fmt.Errorf(""+format, a...)) }
	between := func(name string, v, lo, hi int) {
		if v < lo || v > hi {
			bad("%s is %d, not between %d and %d", name, v, lo, hi)
		}
	}
	between("Workers", c.Workers, 1, 256)
	between("QueueMemory", c.QueueMemory, 1<<20, 1<<40)
	between("MaxConnections", c.MaxConnections, 1, MaxMaxConnections)
	between("MaxHandshakes", c.MaxHandshakes, 1, 1<<20)
	between("MaxInFlight", c.MaxInFlight, 1, 1<<16)
	between("MaxPayload", c.MaxPayload, 64<<10, 1<<31)
	between("MaxConnBytes", c.MaxConnBytes, MinMaxConnBytes, MaxMemory)
	if c.SpillMemory > MaxMemory {
		bad("SpillMemory is %d, more than %d", c.SpillMemory, MaxMemory)
	}
	if c.HandshakeTimeout < 0 {
		bad("HandshakeTimeout is %v; it cannot be switched off", c.HandshakeTimeout)
	}
	if len(c.Exports) == 0 {
		bad("Exports is empty: there is nothing to serve")
	}
	names := map[string]bool{}
	for i, e := range c.Exports {
		if e.Device == nil {
			bad("Exports[%d] (%q) has no device", i, e.Name)
			continue
		}
		for _, s := range []string{e.Name, e.Description} {
			if len(s) > maxString || !utf8.ValidString(s) || strings.ContainsRune(s, 0) {
				bad("Exports[%d]: name or description is over %d bytes, has a NUL or is not UTF-8", i, maxString)
			}
		}
		if names[e.Name] {
			bad("Exports[%d]: the name %q is there twice", i, e.Name)
		}
		names[e.Name] = true
		in := e.Device.Info()
		if in.BlockSize < 1 || in.BlockSize > 1<<16 || in.BlockSize&(in.BlockSize-1) != 0 || in.Size < 0 || in.Size%int64(in.BlockSize) != 0 {
			bad("Exports[%d] (%q): a block of %d bytes and a size of %d cannot be served", i, e.Name, in.BlockSize, in.Size)
		}
	}
	return errors.Join(errs...)
}

// Server serves exports to NBD clients on any number of listeners.
//
// Lock order: export.opening before export.mu. Server.mu and export.mu are leaves:
// nothing is waited for and no other lock taken under them but the worker's mailbox.
type Server struct {
	cfg     Config
	log     *slog.Logger
	lines   limitedLog // for what clients cause
	exports []*export
	byName  map[string]*export
	workers []*worker.Worker

	mu         sync.Mutex // guards what follows
	state      serverState
	listeners  map[net.Listener]struct{}
	handshakes list.List // of *handshake, oldest first
	conns      map[*conn]struct{}
	reserved   int // connections in transmission or about to be
	nextID     uint64
	changed    chan struct{} // closed and replaced when a handshake or connection ends

	tearOnce sync.Once
	torn     chan struct{} // closed when nothing is left
	stop     chan struct{} // ends the clock
	endMu    sync.Mutex    // serialises what is done in place of workers that have ended

	handshakesFailed, handshakesEvicted, refused atomic.Uint64

	spilled atomic.Int64 // bytes of Config.SpillMemory in use

	dozing    atomic.Bool   // the clock waits for attention
	attention chan struct{} // holds one when a connection has woken the clock
}

type serverState uint8

const (
	serving serverState = iota
	draining
	closed
)

// export is an Export at work.
type export struct {
	Export
	srv       *Server
	dev       blockdev.Device
	qdev      blockdev.QueueDevice // nil if dev has no queues of its own
	executor  *blockdev.Executor   // for all queues on dev; nil with qdev
	connected atomic.Uint64

	load []int // connections per queue; guarded by Server.mu

	opening sync.Mutex // held while a queue is opened, which may take its time
	mu      sync.Mutex // guards domains
	domains []*domain  // by queue, nil until it is used
}

// NewServer makes a server and its workers. Close it.
func NewServer(cfg Config) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Server{
		cfg:       cfg.withDefaults(),
		byName:    map[string]*export{},
		listeners: map[net.Listener]struct{}{},
		conns:     map[*conn]struct{}{},
		changed:   make(chan struct{}),
		torn:      make(chan struct{}),
		stop:      make(chan struct{}),
		attention: make(chan struct{}, 1),
	}
	s.log = s.cfg.Logger
	s.lines = limitedLog{log: s.log, now: time.Now}
	for _, e := range s.cfg.Exports {
		x := &export{Export: e, srv: s, dev: e.Device}
		n := 0
		if x.qdev, _ = e.Device.(blockdev.QueueDevice); x.qdev != nil {
			n = max(x.qdev.NumQueues(), 1)
		} else {
			n = s.cfg.Workers
			x.executor = blockdev.NewExecutor(0)
			if err := s.startWorkers(); err != nil {
				s.teardown()
				return nil, err
			}
		}
		x.load = make([]int, n)
		x.domains = make([]*domain, n)
		s.exports = append(s.exports, x)
		s.byName[e.Name] = x
	}
	if _, ok := s.byName[""]; !ok && len(s.exports) == 1 {
		s.byName[""] = s.exports[0]
	}
	go s.clock()
	return s, nil
}

func (s *Server) startWorkers() error {
	for i := len(s.workers); i < s.cfg.Workers; i++ {
		wc := s.cfg.Worker
		wc.Name = fmt.Sprintf("nbd%s%d", wc.Name, i)
		wc.CPU += i
		w, err := worker.New(wc)
		if err != nil {
			return err
		}
		s.workers = append(s.workers, w)
	}
	return nil
}

// Serve accepts connections on ln until Shutdown or Close, which close ln, and then
// returns ErrServerClosed. It may be called for several listeners at a time.
// A TCP listener has to be on the loopback interface unless Config.AllowRemote is set.
func (s *Server) Serve(ln net.Listener) error {
	if a, ok := ln.Addr().(*net.TCPAddr); ok && !a.IP.IsLoopback() && !s.cfg.AllowRemote {
		ln.Close()
		return fmt.Errorf("serve on %v: %w: whoever reaches it could read and write the device (listen on 127.0.0.1 or a Unix socket, or allow remote clients)", a, ErrNotLoopback)
	}
	s.mu.Lock()
	if s.state != serving {
		s.mu.Unlock()
		ln.Close()
		return ErrServerClosed
	}
	s.listeners[ln] = struct{}{}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.listeners, ln)
		s.mu.Unlock()
		ln.Close()
	}()
	const minBackoff, maxBackoff = 5 * time.Millisecond, time.Second
	backoff := minBackoff
	for {
		nc, err := ln.Accept()
		if err == nil {
			backoff = minBackoff
			s.admit(nc)
			continue
		}
		if s.stopping() {
			return ErrServerClosed
		}
		if !temporary(err) {
			return fmt.Errorf("accept on %v: %w", ln.Addr(), err)
		}
		s.lines.Log(slog.LevelWarn, "nbd: cannot accept a connection, trying again", slog.String("listener", ln.Addr().String()),
			slog.String("error", err.Error()), slog.Duration("after", backoff))
		select {
		case <-time.After(backoff):
		case <-s.stop:
		}
		backoff = min(2*backoff, maxBackoff)
	}
}

// temporary tells whether accepting may work again later.
func temporary(err error) bool {
	for _, e := range []syscall.Errno{unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM, unix.ECONNABORTED, unix.EPERM, unix.EPROTO} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// stopping reports whether Shutdown or Close was called.
func (s *Server) stopping() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state != serving
}

// admit starts the handshake of a new connection. Too many of them end the oldest
// one: a client that means it is through in milliseconds, and so others that hold
// connections open and say nothing cannot keep it out.
func (s *Server) admit(nc net.Conn) {
	h := &handshake{srv: s, nc: nc, peer: peerName(nc), since: time.Now()}
	var evict *handshake
	s.mu.Lock()
	if s.state != serving {
		s.mu.Unlock()
		nc.Close()
		return
	}
	s.nextID++
	h.id = s.nextID
	h.elem = s.handshakes.PushBack(h)
	if s.handshakes.Len() > s.cfg.MaxHandshakes {
		evict = s.handshakes.Front().Value.(*handshake)
		s.unlist(evict)
	}
	s.mu.Unlock()
	if evict != nil {
		s.handshakesEvicted.Add(1)
		evict.nc.Close()
	}
	go h.serve()
}

// unlist takes h out of the handshakes; under s.mu.
func (s *Server) unlist(h *handshake) {
	if h.elem != nil {
		s.handshakes.Remove(h.elem)
		h.elem = nil
		s.signal()
	}
}

// signal wakes who waits for connections to end; under s.mu.
func (s *Server) signal() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// find gives the export for a name that a client has sent.
func (s *Server) find(name []byte) *export { return s.byName[string(name)] }

// reserve takes a place for a connection to e and gives the queue it will be on:
// the one with the fewest connections, so that those of one client are spread over all.
func (s *Server) reserve(e *export) (queue int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state != serving {
		return 0, ErrServerClosed
	}
	if s.reserved >= s.cfg.MaxConnections {
		s.refused.Add(1)
		return 0, fmt.Errorf("the server has its maximum of %d connections", s.cfg.MaxConnections)
	}
	for i, n := range e.load {
		if n < e.load[queue] {
			queue = i
		}
	}
	e.load[queue]++
	s.reserved++
	return queue, nil
}

func (s *Server) unreserve(e *export, queue int) {
	s.mu.Lock()
	e.load[queue]--
	s.reserved--
	s.signal()
	s.mu.Unlock()
}

// domain gives the export's queue i, opened if it is not yet.
func (e *export) domain(i int) (*domain, error) {
	e.opening.Lock()
	defer e.opening.Unlock()
	d := e.domains[i] // written under both locks
	if d != nil {
		return d, nil
	}
	d, err := e.openDomain(i)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	e.domains[i] = d
	e.mu.Unlock()
	return d, nil
}

// opened lists the export's queues that are open.
func (e *export) opened() []*domain {
	e.mu.Lock()
	defer e.mu.Unlock()
	var l []*domain
	for _, d := range e.domains {
		if d != nil {
			l = append(l, d)
		}
	}
	return l
}

// start hands a connection over to its worker. The place was reserved; h is the
// handshake that ends with it.
func (s *Server) start(h *handshake, d *domain, fd int, lim limits) error {
	c := newConn(s, d, fd, lim)
	c.id, c.peer, c.kernel = h.id, h.peer, h.kernel
	if c.kernel != nil {
		c.kernel.joined(c)
	}
	s.mu.Lock()
	if s.state != serving {
		s.mu.Unlock()
		unix.Close(fd)
		c.leaveKernel()
		return ErrServerClosed
	}
	s.conns[c] = struct{}{}
	// Under the lock, so that Shutdown's and Close's tasks for it come later.
	err := d.w.Submit(c)
	if err != nil {
		delete(s.conns, c)
	}
	s.mu.Unlock()
	if err != nil {
		unix.Close(fd)
		c.leaveKernel()
		return err
	}
	d.exp.connected.Add(1)
	return nil
}

// connGone is called on the connection's worker when nothing of it is left.
func (s *Server) connGone(c *conn) {
	s.mu.Lock()
	if _, ok := s.conns[c]; ok {
		delete(s.conns, c)
		c.dom.exp.load[c.dom.index]--
		s.reserved--
		s.signal()
	}
	s.mu.Unlock()
	c.leaveKernel()
}

// spill takes n bytes of Config.SpillMemory; unspill gives those of b back.
func (s *Server) spill(n int) bool {
	if s.spilled.Add(int64(n)) <= int64(s.cfg.SpillMemory) {
		return true
	}
	s.spilled.Add(-int64(n))
	return false
}

func (s *Server) unspill(b []byte) { s.spilled.Add(-int64(len(b))) }

// clock lets workers look after connections whose client stands still. A worker
// without such connections is left asleep, and so is the clock when no worker has any.
func (s *Server) clock() {
	t := time.NewTicker(s.cfg.tickPeriod)
	defer t.Stop()
	for {
		s.dozing.Store(true) // before the look: who comes after it wakes the clock
		for !s.attentive() {
			t.Stop()
			select {
			case <-s.stop:
				return
			case <-s.attention:
			}
			t.Reset(s.cfg.tickPeriod)
		}
		s.dozing.Store(false)
		select {
		case <-s.stop:
			return
		case <-t.C:
		}
		for _, e := range s.exports {
			for _, d := range e.opened() {
				if d.attention.Load() > 0 && !d.ticking.Swap(true) {
					// A worker that has ended needs no clock.
					_ = d.w.Submit(&d.tick)
				}
			}
		}
	}
}

// attentive reports whether a connection needs the clock.
func (s *Server) attentive() bool {
	for _, e := range s.exports {
		for _, d := range e.opened() {
			if d.attention.Load() > 0 {
				return true
			}
		}
	}
	return false
}

// Shutdown stops softly: it closes the listeners, ends handshakes, and lets each
// connection answer the requests that the device has; requests that came later are
// refused or not read. It returns when all connections are closed and nothing touches the
// devices any more, or with ctx's error; then call Close.
//
// Stop the server before its devices: requests of a connection wait for their device's answer.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	if s.state == serving {
		s.state = draining
	}
	s.mu.Unlock()
	for _, c := range s.endIntake() {
		s.onWorker(c, (*conn).drain)
	}
	if err := s.wait(ctx); err != nil {
		n, m := s.left()
		return fmt.Errorf("shutdown: %d connections with %d requests at the device are left: %w", n, m, err)
	}
	s.teardown()
	return nil
}

// Close cuts all connections. Requests that the device has are waited for, up to
// 5 s; if some are left then, the error is ErrBusy and what belongs to them is freed
// when the device answers, at the latest when it is closed.
func (s *Server) Close() error {
	s.mu.Lock()
	s.state = closed
	s.mu.Unlock()
	for _, c := range s.endIntake() {
		s.onWorker(c, func(c *conn) { c.closeWhy = "server closed"; c.cut("") })
	}
	ctx, cancel := timeout.With(context.Background(), closeWait, "")
	defer cancel()
	if s.wait(ctx) != nil {
		n, m := s.left()
		go func() {
			if s.wait(context.Background()) == nil {
				s.teardown()
			}
		}()
		return fmt.Errorf("%w: %d connections, %d requests after %v", ErrBusy, n, m, closeWait)
	}
	s.teardown()
	return nil
}

// endIntake closes listeners and handshakes and lists the connections. The state
// says already that there will be no new ones.
func (s *Server) endIntake() []*conn {
	s.mu.Lock()
	listeners := slices.Collect(maps.Keys(s.listeners))
	conns := slices.Collect(maps.Keys(s.conns))
	for e := s.handshakes.Front(); e != nil; e = e.Next() {
		// The goroutine sees it and takes itself off the list.
		e.Value.(*handshake).interrupt()
	}
	s.mu.Unlock()
	for _, ln := range listeners {
		// Serve sees that it is closed; there is nothing else to tell.
		_ = ln.Close()
	}
	return conns
}

// onWorker runs fn for c on its worker, without waiting. If the worker has ended, because the
// device was closed before the server, fn runs here and the connection is buried.
func (s *Server) onWorker(c *conn, fn func(*conn)) {
	if c.dom.w.Submit(worker.TaskFunc(func() { fn(c) })) == nil {
		return
	}
	s.bury(c)
}

// bury ends a connection whose worker has been closed: no answer will ever come.
func (s *Server) bury(c *conn) {
	c.dom.w.Close() // waits for its thread, so that the connection is ours
	s.endMu.Lock()
	defer s.endMu.Unlock()
	c.orphan = true
	c.cut("device closed")
	if c.phase != phaseGone {
		c.gone()
	}
}

// wait returns when no connection and no handshake is left.
func (s *Server) wait(ctx context.Context) error {
	// Connections whose worker ends while they wait are not signalled; look after them.
	look := time.NewTicker(200 * time.Millisecond)
	defer look.Stop()
	for {
		s.mu.Lock()
		if s.reserved == 0 && s.handshakes.Len() == 0 {
			s.mu.Unlock()
			return nil
		}
		changed := s.changed
		s.mu.Unlock()
		select {
		case <-changed:
		case <-look.C:
			s.mu.Lock()
			conns := slices.Collect(maps.Keys(s.conns))
			s.mu.Unlock()
			for _, c := range conns {
				if c.dom.w.Submit(nothing{}) != nil {
					s.bury(c)
				}
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

type nothing struct{}

func (nothing) Run() {}

// left counts connections and the requests that their devices have.
func (s *Server) left() (conns, requests int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		requests += int(c.pub.inflight.Load())
	}
	return s.reserved + s.handshakes.Len(), requests
}

// teardown frees queues, executors and workers once nothing uses them.
func (s *Server) teardown() {
	s.tearOnce.Do(func() {
		close(s.stop)
		for _, e := range s.exports {
			for _, d := range e.opened() {
				d.close()
			}
			if e.executor != nil {
				e.executor.Close()
			}
		}
		for _, w := range s.workers {
			w.Close()
		}
		close(s.torn)
	})
	<-s.torn
}

// Stats may be called at any time.
func (s *Server) Stats() Stats {
	st := Stats{
		HandshakesFailed:  s.handshakesFailed.Load(),
		HandshakesEvicted: s.handshakesEvicted.Load(),
		Refused:           s.refused.Load(),
		SpillBytes:        s.spilled.Load(),
	}
	s.mu.Lock()
	st.Handshakes = s.handshakes.Len()
	st.Exports = make([]ExportStats, len(s.exports))
	for i, e := range s.exports {
		for _, n := range e.load {
			st.Exports[i].Connections += n
		}
	}
	s.mu.Unlock()
	for i, e := range s.exports {
		x := &st.Exports[i]
		x.Name = e.Name
		x.Connected = e.connected.Load()
		for _, d := range e.opened() {
			d.stats.addTo(x)
		}
	}
	return st
}

// Connections describes all connections, oldest first.
func (s *Server) Connections() []ConnStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := make([]ConnStatus, 0, s.handshakes.Len()+len(s.conns))
	for e := s.handshakes.Front(); e != nil; e = e.Next() {
		h := e.Value.(*handshake)
		l = append(l, ConnStatus{ID: h.id, Peer: h.peer, Since: h.since, State: "handshake"})
	}
	for c := range s.conns {
		st := c.pub.state.Load()
		l = append(l, ConnStatus{
			ID: c.id, Peer: c.peer, Export: c.dom.exp.Name, Queue: c.dom.index, Since: c.since,
			State: stateName(phase(st>>8), pauseReason(st)), Blocked: c.pub.blocked.Load(),
			InFlight: int(c.pub.inflight.Load()), Requests: int(c.pub.used.Load()),
			Bytes: c.pub.held.Load(), Answered: c.pub.answered.Load(),
		})
	}
	sortByID(l)
	return l
}

func stateName(p phase, r pauseReason) string {
	switch {
	case p != phaseOpen:
		return "closing"
	case r == pauseRequests:
		return "paused: requests"
	case r == pauseBytes:
		return "paused: bytes"
	case r == pauseMemory:
		return "paused: memory"
	}
	return "open"
}
