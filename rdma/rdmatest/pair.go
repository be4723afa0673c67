package rdmatest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/rdma"
)

// Patience bounds every wait of the suite.
const Patience = 60 * time.Second

// Mem maps n bytes outside the Go heap; they are unmapped when the test ends.
func Mem(t testing.TB, n int) []byte {
	t.Helper()
	m, err := unix.Mmap(-1, 0, max(n, 1), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatalf("map %d bytes: %v", n, err)
	}
	t.Cleanup(func() { unix.Munmap(m) })
	return m[:n]
}

// AllAccess is every access right.
const AllAccess = rdma.AccessLocalWrite | rdma.AccessRemoteWrite | rdma.AccessRemoteRead | rdma.AccessMWBind

// Side is one side's objects: device, domain, completion queue, memory.
type Side struct {
	Name string
	Dev  rdma.Device
	PD   rdma.PD
	CQ   rdma.CQ
	Mem  []byte
	MR   rdma.MR

	got map[uint32][]rdma.WC // completions polled and not taken, by QP
	wc  [64]rdma.WC
}

// End is one end of a connection.
type End struct {
	*Side
	Conn rdma.Conn
	QP   rdma.QP
	Est  rdma.Established
}

// PairConfig shapes a pair; zero values have defaults.
type PairConfig struct {
	QP       rdma.QPConfig // without CQs
	CQDepth  int
	MemSize  int
	IRD, ORD int // both sides; default 16, -1 is none
	PassiveP rdma.ConnParam
	ActiveP  rdma.ConnParam
	// TweakA and TweakB change the QP configuration of one end.
	TweakA, TweakB func(*rdma.QPConfig)
}

func (c PairConfig) withDefaults() PairConfig {
	def := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	def(&c.QP.MaxSend, 64)
	def(&c.QP.MaxRecv, 64)
	def(&c.QP.MaxSendSGE, 4)
	def(&c.QP.MaxRecvSGE, 4)
	def(&c.QP.MaxInline, 64)
	def(&c.CQDepth, 512)
	def(&c.MemSize, 1<<20)
	def(&c.IRD, 16)
	def(&c.ORD, 16)
	for _, p := range []*rdma.ConnParam{&c.PassiveP, &c.ActiveP} {
		def(&p.ResponderResources, c.IRD)
		def(&p.InitiatorDepth, c.ORD)
		p.ResponderResources = max(p.ResponderResources, 0)
		p.InitiatorDepth = max(p.InitiatorDepth, 0)
	}
	return c
}

// Suite is an open provider with a listener.
type Suite struct {
	T      testing.TB
	P      rdma.Provider
	L      rdma.Listener
	Addr   netip.Addr
	seen   func(rdma.Device)
	except map[string]string
}

// NewSuite listens on addr, any port.
func NewSuite(t testing.TB, p rdma.Provider, addr netip.Addr) *Suite {
	t.Helper()
	l, err := p.Listen(netip.AddrPortFrom(addr, 0), rdma.ListenConfig{})
	if err != nil {
		t.Fatal(err)
	}
	s := &Suite{T: t, P: p, L: l, Addr: addr}
	t.Cleanup(func() { l.Close() })
	return s
}

// NewSide makes the objects of one side on a device.
func NewSide(t testing.TB, name string, dev rdma.Device, cqDepth, memSize int) *Side {
	t.Helper()
	s := &Side{Name: name, Dev: dev, got: map[uint32][]rdma.WC{}}
	var err error
	if s.PD, err = dev.AllocPD(); err != nil {
		t.Fatal(err)
	}
	if s.CQ, err = dev.CreateCQ(cqDepth); err != nil {
		t.Fatal(err)
	}
	s.Mem = Mem(t, memSize)
	if s.MR, err = s.PD.Register(s.Mem, AllAccess); err != nil {
		t.Fatal(err)
	}
	return s
}

// Close releases the side's objects and reports what does not go.
func (s *Side) Close(t testing.TB) {
	t.Helper()
	if err := s.MR.Deregister(); err != nil {
		t.Errorf("%s: deregister: %v", s.Name, err)
	}
	if err := s.CQ.Close(); err != nil {
		t.Errorf("%s: close CQ: %v", s.Name, err)
	}
	if err := s.PD.Close(); err != nil {
		t.Errorf("%s: close PD: %v", s.Name, err)
	}
}

// Close destroys the end.
func (e *End) Close(t testing.TB) {
	t.Helper()
	if err := e.QP.Close(); err != nil {
		t.Errorf("%s: close QP: %v", e.Name, err)
	}
	if err := e.Conn.Close(); err != nil {
		t.Errorf("%s: close connection: %v", e.Name, err)
	}
	delete(e.got, e.QP.Num())
}

// Pair is an established connection with both ends in this process. A is the
// side that connected, B the one that accepted.
type Pair struct {
	T    testing.TB
	A, B *End
}

// Connect makes one connection between two sides (nil: new ones, closed with the
// test). prepA and prepB run before it is established, to post receives.
func (s *Suite) Connect(a, b *Side, cfg PairConfig, prepA, prepB func(*End)) *Pair {
	t := s.T
	t.Helper()
	cfg = cfg.withDefaults()
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	ca, err := s.P.Dial(ctx, netip.Addr{}, s.L.Addr())
	if err != nil {
		t.Fatal(err)
	}
	if s.seen != nil {
		s.seen(ca.Device())
	}
	own := func(p **Side, name string, dev rdma.Device) {
		if *p == nil {
			side := NewSide(t, name, dev, cfg.CQDepth, cfg.MemSize)
			t.Cleanup(func() { side.Close(t) })
			*p = side
		}
	}
	own(&a, "active", ca.Device())
	p := &Pair{T: t, A: &End{Side: a, Conn: ca}}
	p.A.QP, err = ca.CreateQP(a.PD, qpConfig(cfg.QP, a.CQ, cfg.TweakA))
	if err != nil {
		t.Fatal(err)
	}
	if prepA != nil {
		prepA(p.A)
	}
	active := make(chan error, 1)
	go func() {
		var err error
		p.A.Est, err = ca.Connect(ctx, cfg.ActiveP)
		active <- err
	}()
	cb := s.accept(active)
	own(&b, "passive", cb.Device())
	p.B = &End{Side: b, Conn: cb}
	if p.B.QP, err = cb.CreateQP(b.PD, qpConfig(cfg.QP, b.CQ, cfg.TweakB)); err != nil {
		t.Fatal(err)
	}
	if prepB != nil {
		prepB(p.B)
	}
	if p.B.Est, err = cb.Accept(ctx, cfg.PassiveP); err != nil {
		t.Fatal(err)
	}
	if err := <-active; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func qpConfig(c rdma.QPConfig, cq rdma.CQ, tweak func(*rdma.QPConfig)) rdma.QPConfig {
	c.SendCQ, c.RecvCQ = cq, cq
	if tweak != nil {
		tweak(&c)
	}
	return c
}

// Close destroys both ends.
func (p *Pair) Close() {
	p.A.Close(p.T)
	p.B.Close(p.T)
}

// SGE names n bytes of the side's memory at off.
func (s *Side) SGE(off, n int) rdma.SGE {
	return rdma.SGE{Addr: s.MR.Addr() + uint64(off), Len: uint32(n), LKey: s.MR.LKey()}
}

// At is the address of the side's memory at off.
func (s *Side) At(off int) uint64 { return s.MR.Addr() + uint64(off) }

// PostRecv posts a receive of n bytes at off.
func (e *End) PostRecv(t testing.TB, id uint64, off, n int) {
	t.Helper()
	if _, err := e.QP.PostRecv(rdma.RecvWR{ID: id, SGL: []rdma.SGE{e.SGE(off, n)}}); err != nil {
		t.Fatalf("%s: post receive: %v", e.Name, err)
	}
}

// Post posts send requests.
func (e *End) Post(t testing.TB, wrs ...rdma.SendWR) {
	t.Helper()
	if n, err := e.QP.PostSend(wrs...); err != nil {
		t.Fatalf("%s: post send, request %d of %d: %v", e.Name, n, len(wrs), err)
	}
}

// Poll polls the side's CQ once and keeps what it brings.
func (s *Side) Poll(t testing.TB) bool {
	t.Helper()
	n, busy, err := s.CQ.Poll(s.wc[:])
	if err != nil {
		t.Fatalf("%s: poll: %v", s.Name, err)
	}
	for _, wc := range s.wc[:n] {
		s.got[wc.QPNum] = append(s.got[wc.QPNum], wc)
	}
	return busy || n > 0
}

// Progress polls both sides once.
func (p *Pair) Progress() bool {
	p.T.Helper()
	a := p.A.Poll(p.T)
	if p.A.Side != p.B.Side {
		return p.B.Poll(p.T) || a
	}
	return a
}

// Until polls both sides until cond holds.
func (p *Pair) Until(what string, cond func() bool) {
	p.T.Helper()
	Until(p.T, what, func() { p.Progress() }, cond)
}

// Until calls step until cond holds.
func Until(t testing.TB, what string, step func(), cond func() bool) {
	t.Helper()
	deadline := time.Now().Add(Patience)
	for !cond() {
		if time.Now().After(deadline) {
			t.Fatalf("waited %v for %s", Patience, what)
		}
		step()
		runtime.Gosched()
	}
}

// Settle polls both sides until nothing has moved for a while.
func (p *Pair) Settle() {
	p.T.Helper()
	least := 2 * time.Millisecond
	if p.A.Dev.Info().Autonomous {
		least = 50 * time.Millisecond // what the device does meanwhile does not show in Poll
	}
	for quiet, start := 0, time.Now(); quiet < 200 || time.Since(start) < least; quiet++ {
		if p.Progress() {
			quiet = 0
		}
		if time.Since(start) > Patience {
			p.T.Fatalf("still moving after %v", Patience)
		}
		runtime.Gosched()
	}
}

// Wait returns the next n completions of an end's QP.
func (p *Pair) Wait(e *End, n int) []rdma.WC {
	p.T.Helper()
	num := e.QP.Num()
	p.Until(fmt.Sprintf("%d completions of %s", n, e.Name), func() bool { return len(e.got[num]) >= n })
	l := e.got[num]
	e.got[num] = l[n:]
	return l[:n:n]
}

// WaitOK is Wait for successful completions.
func (p *Pair) WaitOK(e *End, n int) []rdma.WC {
	p.T.Helper()
	l := p.Wait(e, n)
	for i, wc := range l {
		if wc.Status != rdma.StatusSuccess {
			p.T.Fatalf("%s: completion %d of %d: request %d: %v", e.Name, i+1, n, wc.ID, wc.Status)
		}
	}
	return l
}

// Pending are the completions of an end that were polled and not taken.
func (e *End) Pending() []rdma.WC { return e.got[e.QP.Num()] }

// Ended waits for the end of an end's connection and returns its reason.
func (p *Pair) Ended(e *End) error {
	p.T.Helper()
	p.Until("the end of the connection of "+e.Name, func() bool {
		select {
		case <-e.Conn.Done():
			return true
		default:
			return false
		}
	})
	return e.Conn.Err()
}

// wantErr fails unless err is target.
func wantErr(t testing.TB, what string, err, target error) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Errorf("%s: error %v, want %v", what, err, target)
	}
}
