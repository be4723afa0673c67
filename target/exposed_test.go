package target

import (
	"bytes"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"rdblk/internal/arena"
	"rdblk/internal/envtest"
	"rdblk/protocol"
	"rdblk/rdma"
	"rdblk/rdma/iwarp"
)

// adapter is a software NIC that says of itself what an adapter would, and fails like one.
type adapter struct {
	*iwarp.Provider
	dev *adapterDevice

	mu     sync.Mutex
	broken error // of Accept
}

type adapterDevice struct {
	rdma.Device
	change func(*rdma.DeviceInfo)

	mu      sync.Mutex
	failCQ  error
	regions []int // bytes registered, in order
	domains int   // protection domains that are open
	removed chan struct{}
}

func (d *adapterDevice) fail(err error) {
	d.mu.Lock()
	d.failCQ = err
	d.mu.Unlock()
}

func (d *adapterDevice) registered(n int) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Contains(d.regions, n)
}

type adapterListener struct {
	rdma.Listener
	a *adapter
}

type adapterConn struct {
	rdma.Conn
	dev *adapterDevice
}

type adapterPD struct {
	rdma.PD
	dev *adapterDevice
}

func newAdapter(nic *iwarp.Provider, change func(*rdma.DeviceInfo)) *adapter {
	return &adapter{Provider: nic, dev: &adapterDevice{Device: nic.Device(), change: change, removed: make(chan struct{})}}
}

func (a *adapter) Listen(addr netip.AddrPort, cfg rdma.ListenConfig) (rdma.Listener, error) {
	l, err := a.Provider.Listen(addr, cfg)
	return &adapterListener{l, a}, err
}

func (l *adapterListener) Accept() (rdma.Conn, error) {
	l.a.mu.Lock()
	err := l.a.broken
	l.a.mu.Unlock()
	if err != nil {
		return nil, err
	}
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.a.mu.Lock()
	defer l.a.mu.Unlock()
	return &adapterConn{c, l.a.dev}, nil
}

// breakAccept makes Accept fail from its next call on, until it is called with nil.
func (a *adapter) breakAccept(err error) {
	a.mu.Lock()
	a.broken = err
	a.mu.Unlock()
}

func (d *adapterDevice) Removed() <-chan struct{} { return d.removed }

func (d *adapterDevice) openDomains() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.domains
}

func (p *adapterPD) Close() error {
	p.dev.mu.Lock()
	p.dev.domains--
	p.dev.mu.Unlock()
	return p.PD.Close()
}

func (c *adapterConn) Device() rdma.Device { return c.dev }

func (c *adapterConn) CreateQP(pd rdma.PD, cfg rdma.QPConfig) (rdma.QP, error) {
	return c.Conn.CreateQP(pd.(*adapterPD).PD, cfg)
}

func (d *adapterDevice) Info() rdma.DeviceInfo {
	i := d.Device.Info()
	d.change(&i)
	return i
}

func (d *adapterDevice) AllocPD() (rdma.PD, error) {
	d.mu.Lock()
	d.domains++
	d.mu.Unlock()
	pd, err := d.Device.AllocPD()
	return &adapterPD{pd, d}, err
}

func (d *adapterDevice) CreateCQ(n int) (rdma.CQ, error) {
	d.mu.Lock()
	err := d.failCQ
	d.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return d.Device.CreateCQ(n)
}

func (p *adapterPD) Register(mem []byte, access rdma.Access) (rdma.MR, error) {
	p.dev.mu.Lock()
	p.dev.regions = append(p.dev.regions, len(mem))
	p.dev.mu.Unlock()
	return p.PD.Register(mem, access)
}

func (r *rig) listenOn(a *adapter) {
	r.t.Helper()
	var err error
	if r.addr, err = r.tgt.Listen(a, netip.MustParseAddrPort("127.0.0.1:0")); err != nil {
		r.t.Fatal(err)
	}
}

// On a device that shows its peer the keys of Read sinks each connection has buffers and a protection domain of its
// own: what one host knows opens nothing of another's.
func TestConnectionsOfAnExposedDeviceShareNothing(t *testing.T) {
	dev := memDevice(t, 64<<20)
	r := newRig(t, Config{Workers: 1, MaxIO: 1 << 20, BufferMemory: 64 << 20}, dev, memDevice(t, 1<<20))
	a := newAdapter(r.nic, func(i *rdma.DeviceInfo) { i.Autonomous = true })
	r.listenOn(a)
	one, two := r.attach(sessionOptions{queues: 1}), r.attach(sessionOptions{queues: 1})
	if a.dev.registered(64 << 20) {
		t.Error("the buffers of the whole worker were registered")
	}
	l := r.tgt.lanes[0]
	var queues []*queue
	if err := l.w.Call(func() {
		for q := range l.queues {
			queues = append(queues, q)
		}
	}); err != nil {
		t.Fatal(err)
	}
	if len(queues) != 2 || queues[0].pool == queues[1].pool || queues[0].pool == &l.pool || queues[0].pd == queues[1].pd {
		t.Fatalf("%d queues, buffers or domains are shared", len(queues))
	}
	if n := r.tgt.Stats().Workers[0].BufferSize; n != 64<<20+2*int64(queues[0].pool.size) {
		t.Errorf("the worker's buffers are said to be %d bytes", n)
	}
	// More at a time than the connection's buffers hold: some wait, all are done.
	q := one.io[0]
	const n = 1 << 20
	fill(q.data[:n], 9)
	var cids []uint16
	for i := range 20 {
		c := q.rw(protocol.OpWrite, uint64(i)*n/512, n, 0, 0)
		cids = append(cids, c.ID())
		q.send(c, nil)
	}
	for _, id := range cids {
		if ans, err := q.take(id); err != nil || !ans.Status().OK() {
			t.Fatalf("%v, %v", ans.Status(), err)
		}
	}
	if r.tgt.Stats().Workers[0].WaitBuffer == 0 {
		t.Error("nothing had to wait")
	}
	got := make([]byte, n)
	if err := dev.ReadAt(got, 19*n); err != nil || !bytes.Equal(got, q.data[:n]) {
		t.Fatalf("written data is wrong: %v", err)
	}
	clear(two.io[0].data[:n])
	two.io[0].ok(two.io[0].rw(protocol.OpRead, 0, n, 0, 0))
	if !bytes.Equal(two.io[0].data[:n], got) {
		t.Error("read data is wrong")
	}
	// The second host has the first one's key, as its Read Requests showed it.
	victim := queues[0]
	if victim.remote != q.conn.LocalAddr() {
		victim = queues[1]
	}
	before := bytes.Clone(victim.pool.arena.Bytes())
	bad := two.io[0]
	fill(bad.data[:4096], 77)
	bad.post(rdma.SendWR{Op: rdma.OpWrite, RemoteAddr: victim.bufMR.Addr(), RKey: victim.bufMR.RKey(),
		SGL: []rdma.SGE{{Addr: arena.Addr(bad.data), Len: 4096, LKey: bad.mr.LKey()}}})
	bad.awaitEnd()
	if !bytes.Equal(victim.pool.arena.Bytes(), before) {
		t.Error("one host wrote into another's buffers")
	}
	q.ok(q.rw(protocol.OpRead, 0, n, 0, 0))
	if !bytes.Equal(q.data[:n], got) {
		t.Error("the first host's data is wrong")
	}
}

// A device that has nothing left costs the host its connection, and the target nothing.
func TestDeviceOutOfResources(t *testing.T) {
	for _, autonomous := range []bool{false, true} {
		r := newRig(t, Config{Workers: 1}, memDevice(t, 1<<20))
		a := newAdapter(r.nic, func(i *rdma.DeviceInfo) { i.Autonomous = autonomous })
		r.listenOn(a)
		a.dev.fail(errors.New("no more completion queues"))
		var rej *rdma.RejectError
		if _, err := r.dial(0, dialOptions{}); !errors.As(err, &rej) {
			t.Errorf("%v", err)
		}
		a.dev.fail(nil)
		s := r.attach(sessionOptions{queues: 1})
		s.io[0].ok(s.io[0].rw(protocol.OpRead, 0, 4096, 0, 0))
	}
}

// A device that is being removed is given up when its last connection has ended, for the kernel waits for that; one
// that comes in its place is used like any other.
func TestDeviceRemoved(t *testing.T) {
	for _, autonomous := range []bool{false, true} {
		r := newRig(t, Config{Workers: 2}, memDevice(t, 1<<20))
		a := newAdapter(r.nic, func(i *rdma.DeviceInfo) { i.Autonomous, i.MaxQPWR = autonomous, 100 })
		r.listenOn(a)
		old := a.dev
		s := r.attach(sessionOptions{queues: 2})
		if old.openDomains() != 3 { // the admin worker's and two of I/O, or those of three connections
			t.Fatalf("%d protection domains", old.openDomains())
		}
		// A queue that does not come about leaves nothing.
		if _, err := r.dial(0, dialOptions{depth: 101}); err == nil {
			t.Fatal("connected with a queue that the device has no room for")
		}
		old.fail(errors.New("no more completion queues"))
		if _, err := r.dial(0, dialOptions{}); err == nil {
			t.Fatal("connected")
		}
		old.fail(nil)
		a.mu.Lock()
		a.dev = newAdapter(r.nic, old.change).dev
		a.mu.Unlock()
		close(old.removed)
		// Others use what has come in its place, while the old connections stand.
		s2 := r.attach(sessionOptions{queues: 1})
		s2.io[0].ok(s2.io[0].rw(protocol.OpRead, 0, 4096, 0, 0))
		s.io[0].ok(s.io[0].rw(protocol.OpRead, 0, 4096, 0, 0))
		if old.openDomains() == 0 || a.dev.openDomains() == 0 {
			t.Errorf("protection domains: %d on the old device, %d on the new one", old.openDomains(), a.dev.openDomains())
		}
		for _, q := range append(s.io, s.admin) {
			q.close()
		}
		eventually(t, "the old device to be given up", func() bool { return old.openDomains() == 0 })
		s2.io[0].ok(s2.io[0].rw(protocol.OpRead, 0, 4096, 0, 0))
	}
}

// A listener that fails is asked again, and its failure told once; with it when it works again.
func TestListenerThatFails(t *testing.T) {
	var log envtest.Log
	r := newRig(t, Config{Workers: 1, Logger: slog.New(slog.NewTextHandler(&log, nil))}, memDevice(t, 1<<20))
	a := newAdapter(r.nic, func(*rdma.DeviceInfo) {})
	var asked atomic.Int32
	a.breakAccept(&countedError{n: &asked, text: "the RDMA device was removed"})
	r.listenOn(a)
	eventually(t, "Accept to be called again and again", func() bool { return asked.Load() >= 4 })
	if n := strings.Count(log.String(), "the RDMA device was removed"); n != 1 {
		t.Errorf("told %d times:\n%s", n, log.String())
	}
	a.breakAccept(nil)
	s := r.attach(sessionOptions{queues: 1})
	s.io[0].ok(s.io[0].rw(protocol.OpRead, 0, 4096, 0, 0))
	log.Await(t, "listening again")
}

// countedError counts how often it was looked at.
type countedError struct {
	n    *atomic.Int32
	text string
}

func (e *countedError) Error() string { e.n.Add(1); return e.text }

// Hosts are offered queues that the device can do.
func TestQueueDepthOfADevice(t *testing.T) {
	r := newRig(t, Config{Workers: 1}, memDevice(t, 1<<20))
	a := newAdapter(r.nic, func(i *rdma.DeviceInfo) { i.MaxQPWR = 48; i.MaxCQE = 1000; i.MaxReadDepth = 4 })
	r.listenOn(a)
	s := r.attach(sessionOptions{queues: 1, depth: 48})
	if c := protocol.CAP(s.get(protocol.PropertyCAP)); c.MQES() != 47 {
		t.Errorf("MQES is %d", c.MQES())
	}
	q := s.io[0]
	for i := range 3 {
		q.ok(q.rw(protocol.OpWrite, 0, 64<<10, i*4096, 0))
		q.ok(q.rw(protocol.OpRead, 0, 64<<10, i*4096, 0))
	}
	for _, st := range r.tgt.Status().Queues {
		if st.ReadDepth > 4 {
			t.Errorf("read depth %d", st.ReadDepth)
		}
	}
}

// quietProvider listens and nobody ever comes.
type quietProvider struct {
	rdma.Provider
	at netip.AddrPort
}

type quietListener struct {
	at   netip.AddrPort
	stop chan struct{}
	once sync.Once
}

func (p *quietProvider) Name() string { return "verbs" }

func (p *quietProvider) Listen(netip.AddrPort, rdma.ListenConfig) (rdma.Listener, error) {
	return &quietListener{at: p.at, stop: make(chan struct{})}, nil
}

func (l *quietListener) Accept() (rdma.Conn, error) { <-l.stop; return nil, rdma.ErrClosed }
func (l *quietListener) Addr() netip.AddrPort       { return l.at }
func (l *quietListener) Close() error               { l.once.Do(func() { close(l.stop) }); return nil }

// Two providers at one address are one path for a host, and show as two listeners.
func TestTwoProvidersAtOneAddress(t *testing.T) {
	who := newIdentity()
	r := newRig(t, Config{Hosts: []string{who.nqn}}, memDevice(t, 1<<20))
	if _, err := r.tgt.Listen(&quietProvider{at: r.addr}, r.addr); err != nil {
		t.Fatal(err)
	}
	if _, list := r.discover(who, 0).page(); len(nvm(list)) != 1 || len(list) != 2 {
		t.Errorf("discovery lists %d entries, %q", len(list), nvm(list))
	}
	st := r.tgt.Status()
	want := []ListenerStatus{{r.addr.String(), "iwarp"}, {r.addr.String(), "verbs"}}
	if len(st.Listeners) != 1 || !slices.Equal(st.Listening, want) {
		t.Errorf("%q, %+v", st.Listeners, st.Listening)
	}
}
