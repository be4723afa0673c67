package rdmatest

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"rdblk/rdma"
)

// dial makes a connection that is not connected yet.
func (s *Suite) dial() rdma.Conn {
	s.T.Helper()
	c, err := s.P.Dial(context.Background(), netip.Addr{}, s.L.Addr())
	if err != nil {
		s.T.Fatal(err)
	}
	return c
}

// half is one connection attempt from the active side.
type half struct {
	*End
	est rdma.Established
	err chan error
}

// attempt starts to connect; the result comes on err.
func (s *Suite) attempt(side *Side, ctx context.Context, p rdma.ConnParam) *half {
	t := s.T
	t.Helper()
	h := &half{End: &End{Side: side, Conn: s.dial()}, err: make(chan error, 1)}
	var err error
	if h.QP, err = h.Conn.CreateQP(side.PD, qpConfig(rdma.QPConfig{MaxSend: 4, MaxRecv: 4}, side.CQ, nil)); err != nil {
		t.Fatal(err)
	}
	go func() {
		var err error
		h.est, err = h.Conn.Connect(ctx, p)
		h.err <- err
	}()
	return h
}

// accept accepts the request of a Connect whose end comes on active. If that ends first the test does too: there would be
// nothing to accept.
func (s *Suite) accept(active <-chan error) rdma.Conn {
	t := s.T
	t.Helper()
	type accepted struct {
		conn rdma.Conn
		err  error
	}
	passive := make(chan accepted, 1)
	go func() {
		c, err := s.L.Accept()
		passive <- accepted{c, err}
	}()
	select {
	case p := <-passive:
		if p.err != nil {
			t.Fatal(p.err)
		}
		return p.conn
	case err := <-active:
		t.Fatalf("connect: %v, before anybody accepted", err)
		return nil
	}
}

func patient() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), Patience)
}

func testPrivateData(s *Suite) {
	t := s.T
	max := deviceInfo(s).MaxPrivate
	dev := deviceOf(s)
	a, b := NewSide(t, "active", dev, 64, 4096), NewSide(t, "passive", dev, 64, 4096)
	t.Cleanup(func() { a.Close(t); b.Close(t) })
	data := make([]byte, max+1)
	fill(data, 4)
	// IB pads what it carries, so only the beginning is compared there.
	same := func(what string, got, want []byte) {
		t.Helper()
		exact := dev.Info().Transport == rdma.TransportIWARP
		if !bytes.HasPrefix(got, want) || exact && len(got) != len(want) {
			t.Fatalf("%s: %d bytes of private data arrived as %d: %x, want %x", what, len(want), len(got), got, want)
		}
	}
	for n := 0; n <= max; n++ {
		if testing.Short() && n > 8 && n < max-8 && n%25 != 0 {
			continue
		}
		req, rep := data[:n], data[max-n:max]
		p := s.Connect(a, b, PairConfig{QP: rdma.QPConfig{MaxSend: 4, MaxRecv: 4}, ActiveP: rdma.ConnParam{PrivateData: req}, PassiveP: rdma.ConnParam{PrivateData: rep}}, nil, nil)
		same("request", p.B.Conn.Request().PrivateData, req)
		same("reply", p.A.Est.PrivateData, rep)
		if p.A.Conn.Request() != nil {
			t.Fatal("the connecting side has a request")
		}
		p.Close()
	}
	for n := 0; n <= max; n += 50 {
		s.reject(a, data[:n], data[:n], same)
	}
	s.reject(a, data[:max], data[:max], same)
	// One byte too many is refused, at once and without harm to the object.
	ctx, cancel := patient()
	defer cancel()
	h := s.attempt(a, ctx, rdma.ConnParam{PrivateData: data})
	wantErr(t, "too much private data", <-h.err, rdma.ErrInvalid)
	h.Close(t)
}

// reject refuses one connection.
func (s *Suite) reject(a *Side, req, rep []byte, same func(string, []byte, []byte)) {
	t := s.T
	t.Helper()
	ctx, cancel := patient()
	defer cancel()
	h := s.attempt(a, ctx, rdma.ConnParam{PrivateData: req, InitiatorDepth: 3})
	c := s.accept(h.err)
	same("request", c.Request().PrivateData, req)
	if err := c.Reject(rep); err != nil {
		t.Fatal(err)
	}
	var rej *rdma.RejectError
	if err := <-h.err; !errors.As(err, &rej) {
		t.Fatalf("rejected connection: %v", err)
	}
	same("reject", rej.PrivateData, rep)
	select {
	case <-c.Done():
	default:
		t.Error("rejected connection is not done")
	}
	if _, err := c.Accept(ctx, rdma.ConnParam{}); err == nil {
		t.Error("accept after reject")
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	h.Close(t)
}

func testReject(s *Suite) {
	a := NewSide(s.T, "active", deviceOf(s), 64, 4096)
	s.T.Cleanup(func() { a.Close(s.T) })
	for range rounds(50, 15) {
		s.reject(a, []byte("let me in"), []byte("no"), func(what string, got, want []byte) {
			if !bytes.HasPrefix(got, want) {
				s.T.Errorf("%s: %q", what, got)
			}
		})
	}
}

func testConnectFailures(s *Suite) {
	t := s.T
	dev := deviceOf(s)
	a := NewSide(t, "active", dev, 64, 4096)
	t.Cleanup(func() { a.Close(t) })
	try := func(what string, remote netip.AddrPort, ctx context.Context, want error) {
		t.Helper()
		c, err := s.P.Dial(context.Background(), netip.Addr{}, remote)
		if err != nil {
			t.Fatal(err)
		}
		q, err := c.CreateQP(a.PD, qpConfig(rdma.QPConfig{MaxSend: 1, MaxRecv: 2}, a.CQ, nil))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := q.PostRecv(rdma.RecvWR{SGL: []rdma.SGE{a.SGE(0, 8)}}); err != nil {
			t.Fatal(err)
		}
		if _, err := q.PostSend(rdma.SendWR{Op: rdma.OpSend}); err == nil {
			t.Errorf("%s: posted a send before the connection", what)
		}
		_, err = c.Connect(ctx, rdma.ConnParam{})
		var oe *rdma.OpError
		if !errors.As(err, &oe) || oe.Op != "connect" || oe.Addr != remote || oe.Provider != s.P.Name() {
			t.Errorf("%s: %v", what, err)
		}
		if want != nil && !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
		if _, err := c.Connect(ctx, rdma.ConnParam{}); err == nil {
			t.Errorf("%s: connected at the second attempt on one connection", what)
		}
		q.Close()
		c.Close()
		a.Poll(t)
	}
	ctx, cancel := patient()
	defer cancel()
	// A port where nobody listens.
	l, err := net.Listen("tcp", netip.AddrPortFrom(s.Addr, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	closed := l.Addr().(*net.TCPAddr).AddrPort()
	l.Close()
	try("closed port", netip.AddrPortFrom(s.Addr, closed.Port()), ctx, nil)
	// A listener that nobody accepts from.
	quiet, err := s.P.Listen(netip.AddrPortFrom(s.Addr, 0), rdma.ListenConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer quiet.Close()
	short, cancel2 := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel2()
	try("no answer", quiet.Addr(), short, context.DeadlineExceeded)
	gone, cancel3 := context.WithCancel(context.Background())
	cancel3()
	try("cancelled", quiet.Addr(), gone, context.Canceled)
	// Closing the connection ends a Connect that is running.
	h := s.attempt(a, ctx, rdma.ConnParam{})
	c := s.accept(h.err)
	h.Conn.Close()
	if err := <-h.err; err == nil {
		t.Error("connected although closed")
	}
	h.Close(t)
	c.Close()
	// Without a QP.
	d := s.dial()
	_, err = d.Connect(ctx, rdma.ConnParam{})
	wantErr(t, "connect without QP", err, rdma.ErrInvalid)
	d.Close()
	_, err = d.Connect(ctx, rdma.ConnParam{})
	wantErr(t, "connect after close", err, rdma.ErrClosed)
	if _, err := s.P.Dial(ctx, netip.Addr{}, netip.AddrPort{}); err == nil {
		t.Error("dial without address")
	}
}

func testConnectTwice(s *Suite) {
	t := s.T
	p := s.Connect(nil, nil, PairConfig{}, nil, nil)
	ctx, cancel := patient()
	defer cancel()
	_, err := p.A.Conn.Connect(ctx, rdma.ConnParam{})
	wantErr(t, "connect twice", err, rdma.ErrInvalid)
	_, err = p.B.Conn.Accept(ctx, rdma.ConnParam{})
	wantErr(t, "accept twice", err, rdma.ErrInvalid)
	_, err = p.A.Conn.Accept(ctx, rdma.ConnParam{})
	wantErr(t, "accept on the active side", err, rdma.ErrInvalid)
	wantErr(t, "reject after accept", p.B.Conn.Reject(nil), rdma.ErrInvalid)
	if a, b := p.A.Conn, p.B.Conn; a.LocalAddr() != b.RemoteAddr() || a.RemoteAddr() != b.LocalAddr() || a.RemoteAddr() != s.L.Addr() {
		t.Errorf("addresses: %v to %v, and %v to %v", a.LocalAddr(), a.RemoteAddr(), b.LocalAddr(), b.RemoteAddr())
	}
	stillWorks(t, p)
}

// testDepths: what each side may have outstanding is what the other serves.
func testDepths(s *Suite) {
	t := s.T
	dev := deviceOf(s)
	max := dev.Info().MaxReadDepth
	a, b := NewSide(t, "active", dev, 64, 4096), NewSide(t, "passive", dev, 64, 4096)
	t.Cleanup(func() { a.Close(t); b.Close(t) })
	for _, d := range []struct{ aIRD, aORD, bIRD, bORD int }{
		{1, 1, 1, 1}, {4, 8, 16, 16}, {16, 16, 4, 2}, {-1, 4, 4, 4}, {4, -1, 4, 4}, {-1, -1, -1, -1}, {max, max, max, max}, {max, 1, 1, max},
	} {
		p := s.Connect(a, b, PairConfig{QP: rdma.QPConfig{MaxSend: 4, MaxRecv: 4},
			ActiveP:  rdma.ConnParam{ResponderResources: d.aIRD, InitiatorDepth: d.aORD},
			PassiveP: rdma.ConnParam{ResponderResources: d.bIRD, InitiatorDepth: d.bORD}}, nil, nil)
		none := func(n int) int { return max0(n) }
		if r := p.B.Conn.Request(); r.ResponderResources != none(d.aIRD) || r.InitiatorDepth != none(d.aORD) {
			t.Errorf("%+v: request %+v", d, r)
		}
		want := min(none(d.aORD), none(d.bIRD))
		if most := none(d.aORD); s.except["Depths/lowered"] != "" && want < most && p.A.Est.ORD >= want && p.A.Est.ORD <= most {
			want = p.A.Est.ORD
			p.B.Est.IRD = want
		}
		if p.A.Est.ORD != want || p.B.Est.IRD < want {
			t.Errorf("%+v: active ORD %d, passive IRD %d", d, p.A.Est.ORD, p.B.Est.IRD)
		}
		if want := min(none(d.bORD), none(d.aIRD)); p.B.Est.ORD != want || p.A.Est.IRD < want {
			t.Errorf("%+v: passive ORD %d, active IRD %d", d, p.B.Est.ORD, p.A.Est.IRD)
		}
		p.Close()
	}
	ctx, cancel := patient()
	defer cancel()
	h := s.attempt(a, ctx, rdma.ConnParam{InitiatorDepth: -1})
	wantErr(t, "negative depth", <-h.err, rdma.ErrInvalid)
	h.Close(t)
}

func max0(n int) int { return max(n, 0) }

// testAcceptGone: the connecting side gave up before it was answered.
func testAcceptGone(s *Suite) {
	t := s.T
	dev := deviceOf(s)
	a, b := NewSide(t, "active", dev, 64, 4096), NewSide(t, "passive", dev, 64, 4096)
	t.Cleanup(func() { a.Close(t); b.Close(t) })
	for range 10 {
		ctx, cancel := context.WithCancel(context.Background())
		h := s.attempt(a, ctx, rdma.ConnParam{})
		c := s.accept(h.err)
		q, err := c.CreateQP(b.PD, qpConfig(rdma.QPConfig{MaxSend: 4, MaxRecv: 4}, b.CQ, nil))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := q.PostRecv(rdma.RecvWR{ID: 1, SGL: []rdma.SGE{b.SGE(0, 64)}}); err != nil {
			t.Fatal(err)
		}
		cancel()
		if err := <-h.err; err == nil {
			t.Fatal("connected although cancelled")
		}
		h.Close(t)
		actx, acancel := patient()
		if _, err := c.Accept(actx, rdma.ConnParam{}); err == nil {
			// The news of it had not arrived. It does, to the owner.
			e := &End{Side: b, Conn: c, QP: q}
			Until(t, "the end of the connection", func() { b.Poll(t) }, func() bool {
				select {
				case <-c.Done():
					return true
				default:
					return false
				}
			})
			delete(b.got, e.QP.Num())
		}
		acancel()
		if c.Err() == nil {
			t.Error("no reason for the end")
		}
		q.Close()
		c.Close()
	}
}

func testListenerClose(s *Suite) {
	t := s.T
	a := NewSide(t, "active", deviceOf(s), 64, 4096)
	t.Cleanup(func() { a.Close(t) })
	l, err := s.P.Listen(netip.AddrPortFrom(s.Addr, 0), rdma.ListenConfig{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.P.Listen(l.Addr(), rdma.ListenConfig{}); err == nil {
		t.Error("two listeners on one address")
	} else {
		var oe *rdma.OpError
		if !errors.As(err, &oe) || oe.Op != "listen" || oe.Addr != l.Addr() {
			t.Errorf("second listener: %v", err)
		}
	}
	waiting := make(chan error)
	go func() {
		_, err := l.Accept()
		waiting <- err
	}()
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	wantErr(t, "Accept during Close", <-waiting, rdma.ErrClosed)
	_, err = l.Accept()
	wantErr(t, "Accept after Close", err, rdma.ErrClosed)
	if err := l.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
	// The port is free at once, and a request that nobody had accepted is dropped.
	l2, err := s.P.Listen(l.Addr(), rdma.ListenConfig{})
	if err != nil {
		t.Fatal(err)
	}
	c, err := s.P.Dial(context.Background(), netip.Addr{}, l2.Addr())
	if err != nil {
		t.Fatal(err)
	}
	q, err := c.CreateQP(a.PD, qpConfig(rdma.QPConfig{MaxSend: 1, MaxRecv: 1}, a.CQ, nil))
	if err != nil {
		t.Fatal(err)
	}
	res := make(chan error, 1)
	ctx, cancel := patient()
	defer cancel()
	go func() {
		_, err := c.Connect(ctx, rdma.ConnParam{})
		res <- err
	}()
	l2.Close()
	if err := <-res; err == nil {
		t.Error("connected to a closed listener")
	}
	q.Close()
	c.Close()
}
