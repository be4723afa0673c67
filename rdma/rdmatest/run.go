package rdmatest

import (
	"bytes"
	"net/netip"
	"testing"

	"rdblk/rdma"
)

// Option changes how the suite runs.
type Option func(*options)

type options struct{ addr netip.Addr }

// WithAddr is the address to listen on and connect to; default 127.0.0.1.
func WithAddr(a netip.Addr) Option { return func(o *options) { o.addr = a } }

// Run runs the whole suite. open makes a fresh provider for each test.
func Run(t *testing.T, open func(t testing.TB) rdma.Provider, opts ...Option) {
	o := options{addr: netip.AddrFrom4([4]byte{127, 0, 0, 1})}
	for _, f := range opts {
		f(&o)
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) { c.run(NewSuite(t, open(t), o.addr)) })
	}
}

var cases = []struct {
	name string
	run  func(*Suite)
}{
	{"SendRecv", testSendRecv},
	{"WriteThenSend", testWriteThenSend},
	{"Read", testRead},
}

func testSendRecv(s *Suite) {
	p := s.Connect(nil, nil, PairConfig{}, nil, func(b *End) { b.PostRecv(s.T, 7, 0, 4096) })
	copy(p.A.Mem[100:], "hello")
	p.A.Post(s.T, rdma.SendWR{ID: 3, Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{p.A.SGE(100, 5)}})
	p.WaitOK(p.A, 1)
	wc := p.WaitOK(p.B, 1)[0]
	if wc.ID != 7 || !wc.Recv || wc.ByteLen != 5 || !bytes.Equal(p.B.Mem[:5], []byte("hello")) {
		s.T.Fatalf("got %+v %q", wc, p.B.Mem[:5])
	}
}

func testWriteThenSend(s *Suite) {
	const n = 300000
	p := s.Connect(nil, nil, PairConfig{}, nil, func(b *End) { b.PostRecv(s.T, 7, 0, 16) })
	fill(p.A.Mem[1:1+n], 42)
	p.A.Post(s.T,
		rdma.SendWR{ID: 1, Op: rdma.OpWrite, SGL: []rdma.SGE{p.A.SGE(1, n)}, RemoteAddr: p.B.At(4097), RKey: p.B.MR.RKey()},
		rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{p.A.SGE(0, 16)}})
	p.WaitOK(p.B, 1)
	if !bytes.Equal(p.B.Mem[4097:4097+n], p.A.Mem[1:1+n]) {
		s.T.Fatal("data of the Write not there when the Send completed")
	}
	if wc := p.WaitOK(p.A, 1)[0]; wc.ID != 2 {
		s.T.Fatalf("completion of %d", wc.ID)
	}
}

func testRead(s *Suite) {
	const n = 300000
	p := s.Connect(nil, nil, PairConfig{}, nil, nil)
	fill(p.B.Mem[:n], 43)
	p.A.Post(s.T, rdma.SendWR{ID: 1, Op: rdma.OpRead, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{p.A.SGE(4096, n)}, RemoteAddr: p.B.At(0), RKey: p.B.MR.RKey()})
	wc := p.WaitOK(p.A, 1)[0]
	if wc.ByteLen != n || !bytes.Equal(p.B.Mem[:n], p.A.Mem[4096:4096+n]) {
		s.T.Fatal("Read data differ")
	}
}

// fill writes a pattern that differs for every seed and position.
func fill(b []byte, seed uint64) {
	x := seed*0x9E3779B97F4A7C15 + 1
	for i := range b {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b[i] = byte(x)
	}
}
