package iwarp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/internal/envtest"
	"rdblk/rdma"
	"rdblk/rdma/rdmatest"
)

// rawTarget accepts one connection as an iWARP responder made by hand and hands
// out the bare socket behind the handshake.
func rawTarget(t *testing.T) (addr netip.AddrPort, conn chan *net.TCPConn) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	conn = make(chan *net.TCPConn, 1)
	go func() {
		nc, err := l.Accept()
		if err != nil {
			return
		}
		io.ReadFull(nc, make([]byte, mpaHeaderSize+4))
		nc.Write(mpa(mpaKeyReply, 0x10, 2, depths{4, 4}.append(nil)))
		nc.SetDeadline(time.Now().Add(rdmatest.Patience))
		conn <- nc.(*net.TCPConn)
	}()
	return l.Addr().(*net.TCPAddr).AddrPort(), conn
}

// connectRaw connects an end to a rawTarget.
func connectRaw(t *testing.T, cfg Config) (*Provider, *rdmatest.End, *net.TCPConn) {
	t.Helper()
	p := newProvider(t, cfg)
	addr, conn := rawTarget(t)
	e := &rdmatest.End{Side: rdmatest.NewSide(t, "initiator", p.dev, 256, 1<<20)}
	var err error
	if e.Conn, err = p.Dial(context.Background(), netip.Addr{}, addr); err != nil {
		t.Fatal(err)
	}
	if e.QP, err = e.Conn.CreateQP(e.PD, rdma.QPConfig{SendCQ: e.CQ, RecvCQ: e.CQ, MaxSend: 64, MaxRecv: 64}); err != nil {
		t.Fatal(err)
	}
	if e.Est, err = e.Conn.Connect(context.Background(), rdma.ConnParam{ResponderResources: 4, InitiatorDepth: 4}); err != nil {
		t.Fatal(err)
	}
	nc := <-conn
	t.Cleanup(func() {
		e.Close(t)
		nc.Close()
		e.Side.Close(t)
	})
	return p, e, nc
}

func TestSocketOptions(t *testing.T) {
	_, e, _ := connectRaw(t, Config{UserTimeout: 12 * time.Second})
	fd := e.QP.(*qp).fd
	for _, o := range []struct {
		name             string
		level, opt, want int
	}{
		{"TCP_NODELAY", unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
		{"TCP_USER_TIMEOUT", unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 12000},
		{"SO_KEEPALIVE", unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
		{"TCP_KEEPIDLE", unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 3},
		{"SO_PROTOCOL", unix.SOL_SOCKET, unix.SO_PROTOCOL, unix.IPPROTO_TCP},
	} {
		if got, err := unix.GetsockoptInt(fd, o.level, o.opt); err != nil || got != o.want {
			t.Errorf("%s is %d (%v), want %d", o.name, got, err, o.want)
		}
	}
	if fl, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || fl&unix.FD_CLOEXEC == 0 {
		t.Error("socket is inherited by other programs")
	}
	if fl, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0); err != nil || fl&unix.O_NONBLOCK == 0 {
		t.Error("socket blocks")
	}
	// The accepting side speaks plain TCP as well, whatever package net prefers.
	a := newAnswerer(t, Config{}, rdma.ListenConfig{})
	go a.one()
	nc := a.dial()
	nc.Write(mpa(mpaKeyRequest, 0x10, 2, make([]byte, 4)))
	a.request()
	end := <-a.ends
	if got, err := unix.GetsockoptInt(end.QP.(*qp).fd, unix.SOL_SOCKET, unix.SO_PROTOCOL); err != nil || got != unix.IPPROTO_TCP {
		t.Errorf("accepted socket has protocol %d, %v", got, err)
	}
	end.Close(t)
}

// TestCloseCuts: after Close nothing that was still queued leaves; after Disconnect
// all of it does.
func TestCloseCuts(t *testing.T) {
	const n = 1 << 20
	for _, orderly := range []bool{false, true} {
		_, e, nc := connectRaw(t, Config{SendBuffer: 4 * n, CloseLinger: rdmatest.Patience})
		e.Post(t, rdma.SendWR{Op: rdma.OpWrite, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{e.SGE(0, n)}, RemoteAddr: 1, RKey: 2})
		rdmatest.Until(t, "the Write", func() { e.Poll(t) }, func() bool { return len(e.Pending()) == 1 })
		// All of it is in the socket, and the peer has not read any.
		if orderly {
			e.Conn.Disconnect()
			e.Poll(t)
		} else if err := e.QP.Close(); err != nil {
			t.Fatal(err)
		}
		got, err := io.Copy(io.Discard, nc)
		if orderly && (err != nil || got < n) {
			t.Errorf("Disconnect: peer got %d of %d bytes, %v", got, n, err)
		}
		if !orderly && (!errors.Is(err, unix.ECONNRESET) || got >= n) {
			t.Errorf("Close: peer got %d of %d bytes, %v", got, n, err)
		}
	}
}

// TestLinger: a peer that does not close after Disconnect holds the socket for
// CloseLinger and no longer.
func TestLinger(t *testing.T) {
	p, e, nc := connectRaw(t, Config{CloseLinger: time.Second}) // long enough to be seen on a busy machine
	e.Conn.Disconnect()
	e.Poll(t)
	if n := p.Stats().Lingering; n != 1 {
		t.Errorf("%d lingering", n)
	}
	if _, err := nc.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("peer reads %v", err)
	}
	// We go on sending into the void until the reset.
	rdmatest.Until(t, "the reset", func() {}, func() bool {
		_, err := nc.Write(make([]byte, 1)) // no more: what is drained is bounded, too
		return err != nil
	})
	rdmatest.Until(t, "the socket", func() {}, func() bool { return p.Stats().Lingering == 0 })

	// More of them than there may be: the rest is reset at once.
	p2 := newProvider(t, Config{CloseLinger: time.Minute})
	for range maxLingering {
		p2.dev.lingering <- struct{}{}
	}
	sp, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	p2.dev.linger(sp[0])
	var b [1]byte
	if n, err := unix.Read(sp[1], b[:]); n != 0 || err != nil {
		t.Errorf("socket is still open: %d, %v", n, err)
	}
	unix.Close(sp[1])
}

// TestTerminateArrives although the peer had more on its way: a reset for unread
// data must not destroy it.
func TestTerminateArrives(t *testing.T) {
	for range 20 {
		_, e, nc := connectRaw(t, Config{})
		junk := bytes.Repeat(tagged(opWrite, true, 0x12345600, 0, make([]byte, 4000)), 100)
		go nc.Write(junk)
		rdmatest.Until(t, "the end", func() { e.Poll(t) }, func() bool {
			select {
			case <-e.Conn.Done():
				return true
			default:
				return false
			}
		})
		got, err := io.ReadAll(nc)
		if c, _ := terminateOf(t, got); c != termSTag || err != nil {
			t.Fatalf("peer got %x, %v", got, err)
		}
	}
}

// TestCareful: towards what may be siw with CRC, FPDUs go one a call and fit a segment.
func TestCareful(t *testing.T) {
	_, e, nc := connectRaw(t, Config{CRC: CRCOn})
	nc.SetReadBuffer(1 << 20)
	q := e.QP.(*qp)
	if q.tx.eor == 0 {
		t.Fatal("not careful")
	}
	e.Post(t, rdma.SendWR{Op: rdma.OpWrite, SGL: []rdma.SGE{e.SGE(0, 300000)}, RKey: 2},
		rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{e.SGE(0, 64)}})
	done := make(chan []byte)
	go func() {
		b := make([]byte, 300000+64)
		io.ReadFull(nc, b)
		done <- b
	}()
	rdmatest.Until(t, "the requests", func() { e.Poll(t) }, func() bool { return len(e.Pending()) == 1 })
	<-done
	if q.st.SendCalls < q.st.TxFPDUs || int(q.tx.maxTagged)+taggedULPDU > mulpdu(segmentSize(q.fd)) {
		t.Errorf("%d calls for %d FPDUs of %d bytes, segment %d", q.st.SendCalls, q.st.TxFPDUs, q.tx.maxTagged, segmentSize(q.fd))
	}
}

// TestIPv6: addresses of the other family work as well, and a wildcard listener
// tells connections their real address.
func TestIPv6(t *testing.T) {
	p := newProvider(t, Config{})
	l, err := p.Listen(netip.AddrPortFrom(netip.IPv6Unspecified(), 0), rdma.ListenConfig{})
	if err != nil {
		if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EADDRNOTAVAIL) {
			t.Skipf("no IPv6 here: %v", err)
		}
		t.Fatal(err)
	}
	s := &rdmatest.Suite{T: t, P: p, L: wildcard{l, netip.IPv6Loopback()}}
	defer l.Close()
	pair := s.Connect(nil, nil, rdmatest.PairConfig{}, nil, nil)
	if a := pair.B.Conn.LocalAddr().Addr(); a != netip.IPv6Loopback() {
		t.Errorf("local address %v", a)
	}
	s.L = wildcard{l, loopback}
	pair = s.Connect(nil, nil, rdmatest.PairConfig{}, nil, nil)
	if a := pair.B.Conn.LocalAddr().Addr(); a != loopback {
		t.Errorf("local address %v", a)
	}
}

// wildcard is a listener that names one of its addresses.
type wildcard struct {
	rdma.Listener
	addr netip.Addr
}

func (w wildcard) Addr() netip.AddrPort { return netip.AddrPortFrom(w.addr, w.Listener.Addr().Port()) }

func TestStats(t *testing.T) {
	var log envtest.Log
	p := newProvider(t, Config{Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	s := rdmatest.NewSuite(t, p, loopback)
	pair := s.Connect(nil, nil, rdmatest.PairConfig{}, nil, func(b *rdmatest.End) { b.PostRecv(t, 1, 0, 64) })
	pair.A.Post(t, rdma.SendWR{Op: rdma.OpWrite, SGL: []rdma.SGE{pair.A.SGE(0, 100000)}, RemoteAddr: pair.B.At(0), RKey: pair.B.MR.RKey()},
		rdma.SendWR{Op: rdma.OpRead, SGL: []rdma.SGE{pair.A.SGE(0, 100)}, RemoteAddr: pair.B.At(0), RKey: pair.B.MR.RKey()},
		rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagSignaled})
	pair.WaitOK(pair.B, 1)
	pair.WaitOK(pair.A, 1)
	pair.A.CQ.Arm()
	pair.B.CQ.Arm()
	st := p.Stats()
	if st.QPs != 2 || st.CQs != 2 || st.PDs != 2 || st.MRs != 2 || st.Established != 2 || st.Requests != 1 || st.Accepted != 1 {
		t.Errorf("%+v", st)
	}
	if st.Writes != 1 || st.Reads != 1 || st.Sends != 1 || st.Receives != 1 || st.ReadsServed != 1 || st.TxFPDUs != st.RxFPDUs || st.TxFPDUs != 5 || st.TxBytes != st.RxBytes {
		t.Errorf("%+v", st.QPStats)
	}
	pair.A.Post(t, rdma.SendWR{Op: rdma.OpWrite, SGL: []rdma.SGE{pair.A.SGE(0, 8)}, RKey: 1})
	pair.Ended(pair.A)
	pair.Ended(pair.B)
	pair.Close()
	st = p.Stats()
	want := TerminateCount{Sent: true, Layer: 1, Type: 1, Count: 1}
	if len(st.Terminates) != 2 || st.Terminates[0] != want || st.Terminates[1].Sent || st.QPs != 0 || st.Writes != 2 {
		t.Errorf("%+v", st)
	}
	if s := st.Terminates[0].String(); s != "sent DDP invalid STag (1/1/0x00): 1" {
		t.Errorf("%q", s)
	}
	for _, want := range []string{"connection established", "Terminate", "invalid STag"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("log does not mention %q:\n%s", want, log.String())
		}
	}
}

// TestWarnIsRateLimited: strangers do not fill the log.
func TestWarnIsRateLimited(t *testing.T) {
	var log envtest.Log
	p := newProvider(t, Config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	for range 1000 {
		p.dev.warn("stranger")
	}
	if n := strings.Count(log.String(), "stranger"); n > 2 {
		t.Errorf("%d lines", n)
	}
}

// TestTagsAreRandom: neither the index nor the first key byte follows from others, and keys leave nothing behind.
func TestTagsAreRandom(t *testing.T) {
	p := newProvider(t, Config{})
	dom, _ := p.dev.AllocPD()
	mem := rdmatest.Mem(t, 4096)
	seen := map[uint32]bool{}
	var high [16]int
	var steps = map[uint32]int{}
	last := uint32(0)
	var mrs []rdma.MR
	for range 2000 {
		mr, err := dom.Register(mem, 0)
		if err != nil {
			t.Fatal(err)
		}
		mrs = append(mrs, mr)
		if k := mr.RKey(); seen[k>>8] || k>>8 == 0 {
			t.Fatalf("key %#x", k)
		} else {
			seen[k>>8] = true
			high[k>>28]++
			steps[k-last]++
			last = k
		}
	}
	for i, n := range high {
		if n < 50 {
			t.Errorf("%d of 2000 keys begin with %x", n, i)
		}
	}
	for s, n := range steps {
		if n > 2 {
			t.Errorf("step %#x happens %d times", s, n)
		}
	}
	for _, mr := range mrs {
		if err := mr.Deregister(); err != nil {
			t.Fatal(err)
		}
		if p.dev.tags.lookup(mr.RKey()) != nil {
			t.Fatal("deregistered key is found")
		}
	}
	if p.dev.tags.count != 0 {
		t.Errorf("%d keys left", p.dev.tags.count)
	}
	leaves := 0
	for i := range p.dev.tags.root {
		if p.dev.tags.root[i].Load() != nil {
			leaves++
		}
	}
	if leaves != 0 {
		t.Errorf("%d leaves of the table are left without a key", leaves)
	}
	if err := errors.Join(dom.Close(), p.dev.Close()); err != nil {
		t.Error(err)
	}
}
