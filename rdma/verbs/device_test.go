//go:build cgo && linux && !noverbs

package verbs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/internal/envtest"
	"rdblk/rdma"
	"rdblk/rdma/rdmatest"
)

// The tests of this file need an RDMA device, as TestContract does. Those that change the device change it back.

// address is the device's address.
func address(t testing.TB) netip.Addr {
	t.Helper()
	s := os.Getenv("RDBLK_VERBS_ADDR")
	if s == "" {
		t.Skip("RDBLK_VERBS_ADDR is not set; test/vm/guest/verbs.sh runs this on software devices")
	}
	return netip.MustParseAddr(s)
}

func provider(t testing.TB, cfg Config) *Provider {
	t.Helper()
	p, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// suite is a provider with a listener on the device.
func suite(t testing.TB) (*Provider, *rdmatest.Suite) {
	t.Helper()
	a := address(t)
	p := provider(t, Config{})
	return p, rdmatest.NewSuite(t, p, a)
}

// here is what the device behind an address offers.
func here(t testing.TB, p *Provider, a netip.Addr) rdma.DeviceInfo {
	t.Helper()
	l, err := p.Devices()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range l {
		for _, x := range d.Addrs {
			if x == a {
				return d
			}
		}
	}
	t.Fatalf("no device has the address %v: %+v", a, l)
	return rdma.DeviceInfo{}
}

func isSiw(p *Provider, d rdma.DeviceInfo) bool {
	p.lib.mu.Lock()
	defer p.lib.mu.Unlock()
	return p.lib.known[d.Name].vendor == siwVendor
}

// run runs a command of the system.
func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func closed(c <-chan struct{}) func() bool {
	return func() bool {
		select {
		case <-c:
			return true
		default:
			return false
		}
	}
}

// A batch is one call into C, and nothing on the way to and from the device allocates.
func TestDataPathCost(t *testing.T) {
	_, s := suite(t)
	const n = 16
	p := s.Connect(nil, nil, rdmatest.PairConfig{}, nil, nil)
	recvs, sends := make([]rdma.RecvWR, n), make([]rdma.SendWR, n)
	for i := range n {
		recvs[i] = rdma.RecvWR{ID: uint64(i), SGL: []rdma.SGE{p.B.SGE(i*64, 64)}}
		sends[i] = rdma.SendWR{ID: uint64(i), Op: rdma.OpSend, SGL: []rdma.SGE{p.A.SGE(i*64, 64)}}
	}
	sends[n-1].Flags = rdma.FlagSignaled
	calls := func(what string, most int64, f func()) {
		t.Helper()
		before := runtime.NumCgoCall()
		f()
		if got := runtime.NumCgoCall() - before; got > most {
			t.Errorf("%s: %d calls into C, want %d", what, got, most)
		}
	}
	var wc [64]rdma.WC
	poll := func(q rdma.CQ, want int) (polls int64) {
		for end := time.Now().Add(rdmatest.Patience); want > 0; polls++ {
			k, _, err := q.Poll(wc[:])
			if err != nil || time.Now().After(end) {
				t.Fatalf("%d completions missing: %v", want, err)
			}
			for _, w := range wc[:k] {
				if w.Status != rdma.StatusSuccess {
					t.Fatalf("%+v", w)
				}
			}
			want -= k
		}
		return polls
	}
	round := func() {
		if _, err := p.B.QP.PostRecv(recvs...); err != nil {
			t.Fatal(err)
		}
		if _, err := p.A.QP.PostSend(sends...); err != nil {
			t.Fatal(err)
		}
		poll(p.B.CQ, n)
		poll(p.A.CQ, 1)
	}
	round()
	calls("post 16 receives", 1, func() { p.B.QP.PostRecv(recvs...) })
	calls("post 16 sends", 1, func() { p.A.QP.PostSend(sends...) })
	before := runtime.NumCgoCall()
	polls := poll(p.B.CQ, n) + poll(p.A.CQ, 1)
	if got := runtime.NumCgoCall() - before; got > polls {
		t.Errorf("%d polls: %d calls into C", polls, got)
	}
	calls("arm", 1, func() { p.A.CQ.Arm() })
	if a := testing.AllocsPerRun(100, round); a != 0 {
		t.Errorf("%v allocations for 16 messages", a)
	}
}

// The retry count that a side announces is how often the other's device tries again.
func TestRetryCounts(t *testing.T) {
	p, s := suite(t)
	if !here(t, p, s.Addr).RNRRetry {
		t.Skip("the device does not wait for receives")
	}
	few := rdma.ConnParam{RNRRetry: 1, Retry: 2}
	pair := s.Connect(nil, nil, rdmatest.PairConfig{ActiveP: few, PassiveP: few}, nil, nil)
	pair.A.Post(t, rdma.SendWR{ID: 3, Op: rdma.OpSend, SGL: []rdma.SGE{pair.A.SGE(0, 8)}})
	if wc := pair.Wait(pair.A, 1)[0]; wc.ID != 3 || wc.Status != rdma.StatusRNRRetryExceeded {
		t.Errorf("Send to a peer without receives, two attempts: %+v", wc)
	}
	if err := pair.Ended(pair.A); err == nil || !strings.Contains(err.Error(), "RNR retry exceeded") {
		t.Errorf("end of the connection: %v", err)
	}
}

// A peer that does not answer any more ends the connection, also where the device takes 7 attempts for endlessly many.
func TestSilentPeer(t *testing.T) {
	p, s := suite(t)
	if here(t, p, s.Addr).Transport != rdma.TransportIB {
		t.Skip("TCP finds out by itself")
	}
	pair := s.Connect(nil, nil, rdmatest.PairConfig{ActiveP: rdma.ConnParam{Retry: 7, RNRRetry: 7}}, nil, nil)
	// B fails in silence: nothing was posted to it that could come back, and nobody is told.
	b := pair.B.QP.(*qp)
	b.told = true
	b.c.ord.Store(0)
	if _, err := b.PostSend(rdma.SendWR{Op: rdma.OpRead}); err != nil {
		t.Fatal(err)
	}
	pair.A.Post(t, rdma.SendWR{ID: 1, Op: rdma.OpSend})
	start := time.Now()
	if wc := pair.Wait(pair.A, 1)[0]; wc.Status != rdma.StatusRetryExceeded {
		t.Errorf("%+v", wc)
	}
	t.Logf("given up after %v", time.Since(start))
	pair.Ended(pair.A)
	pair.Ended(pair.B)
}

// siw's library refuses the mapping offset 0x90000, and the queue with it. More queues than lie below it can be made.
func TestManyQueues(t *testing.T) {
	_, s := suite(t)
	p := s.Connect(nil, nil, rdmatest.PairConfig{}, nil, nil)
	var cqs []rdma.CQ
	for i := range 300 {
		q, err := p.A.Dev.CreateCQ(1)
		if err != nil {
			t.Errorf("completion queue %d: %v", i, err)
			break
		}
		cqs = append(cqs, q)
	}
	for _, q := range cqs {
		if err := q.Close(); err != nil {
			t.Error(err)
		}
	}
}

// Inline data may leave with any kind of Send.
func TestInlineSendInvalidate(t *testing.T) {
	p, s := suite(t)
	if !isSiw(p, here(t, p, s.Addr)) {
		t.Skip("only siw invalidates registered memory of a user; windows are in the contract")
	}
	pair := s.Connect(nil, nil, rdmatest.PairConfig{}, nil, func(e *rdmatest.End) {
		for i := range 4 {
			e.PostRecv(t, uint64(i), i*64, 64)
		}
	})
	spare, err := pair.B.PD.Register(rdmatest.Mem(t, 4096), rdmatest.AllAccess)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { spare.Deregister() })
	for i, piece := range []int{16, 64} {
		copy(pair.A.Mem, bytes.Repeat([]byte{byte(7 + i)}, 64))
		sgl := []rdma.SGE{{Addr: pair.A.At(0), Len: uint32(piece / 2)}, {Addr: pair.A.At(piece / 2), Len: uint32(piece / 2)}}
		op := rdma.OpSend
		if i == 1 {
			op = rdma.OpSendInvalidate
		}
		pair.A.Post(t, rdma.SendWR{ID: uint64(i), Op: op, Flags: rdma.FlagInline | rdma.FlagSignaled, SGL: sgl, InvalidateRKey: spare.RKey()})
		clear(pair.A.Mem[:64])                                            // the buffer is ours again
		if wc := pair.WaitOK(pair.B, 1)[0]; wc.ByteLen != uint32(piece) { // its library does not tell of the invalidation
			t.Errorf("%+v", wc)
		}
		if !bytes.Equal(pair.B.Mem[i*64:i*64+piece], bytes.Repeat([]byte{byte(7 + i)}, piece)) {
			t.Errorf("%v of %d bytes arrived wrong", op, piece)
		}
		pair.WaitOK(pair.A, 1)
	}
	// And it has invalidated.
	pair.A.Post(t, rdma.SendWR{Op: rdma.OpWrite, SGL: []rdma.SGE{pair.A.SGE(0, 64)}, RemoteAddr: spare.Addr(), RKey: spare.RKey()})
	pair.Ended(pair.A)
	pair.Ended(pair.B)
}

// farApart delays what siw's ends in this machine send each other, so that what both have posted by then is posted
// before either hears of the other. Nothing else is connected through lo.
func farApart(t *testing.T) time.Duration {
	t.Helper()
	run(t, "modprobe", "sch_netem")
	run(t, "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "300ms")
	t.Cleanup(func() { run(t, "tc", "qdisc", "del", "dev", "lo", "root") })
	return 300 * time.Millisecond
}

// Both sides read from each other at once, and neither has the other's requests yet when its own send queue comes to
// a request that must wait for its Reads: to one with a fence, or to more Reads than may be outstanding. The
// Reads in front must be served. siw does not (siw_init_rresp puts a request of the peer aside while the send queue has
// something in hand, and only the end of a Read of its own, in siw_check_tx_fence, takes it up again), so that
// both stand still for ever; it does as soon as one side has nothing that waits. That is why TestContract excepts
// RandomTraffic/both wait there; should siw ever serve, this test fails, and the exception can go.
func TestReadsWaitForEachOther(t *testing.T) {
	p, s := suite(t)
	siw := isSiw(p, here(t, p, s.Addr))
	const ord, size = 2, 3000
	const none, plain, fence, depth = "nothing", "Reads that nothing waits for", "a Send with a fence", "more Reads than may be outstanding"
	waits := func(what string) bool { return what == fence || what == depth }
	type pair struct {
		*rdmatest.Pair
		ends  [2]*rdmatest.End
		does  [2]string
		want  [2]int // completions
		still bool   // both wait, for ever with siw
		took  time.Duration
	}
	var pairs []*pair
	for _, does := range [][2]string{{fence, none}, {depth, none}, {plain, plain}, {fence, plain}, {depth, plain}, {plain, fence}, {plain, depth},
		{fence, fence}, {depth, depth}, {fence, depth}} {
		p := &pair{does: does, still: siw && waits(does[0]) && waits(does[1])}
		p.Pair = s.Connect(nil, nil, rdmatest.PairConfig{IRD: ord, ORD: ord}, nil, func(b *rdmatest.End) { b.PostRecv(t, 0, 0, 16) })
		p.A.Post(t, rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagSignaled}) // lets B speak
		p.WaitOK(p.A, 1)
		p.WaitOK(p.B, 1)
		p.ends = [2]*rdmatest.End{p.A, p.B}
		for _, e := range p.ends {
			copy(e.Mem[1<<10:], bytes.Repeat([]byte(e.Name), size))
			e.PostRecv(t, 100, 0, 16)
		}
		pairs = append(pairs, p)
	}
	delay := time.Hour
	if siw {
		delay = farApart(t)
	}
	begin := time.Now()
	for _, p := range pairs {
		var wrs [2][]rdma.SendWR
		for i, from := range p.ends {
			to := p.ends[1-i]
			reads := map[string]int{none: 0, plain: ord, fence: ord, depth: 3 * ord}[p.does[i]]
			for k := range reads {
				wrs[i] = append(wrs[i], rdma.SendWR{ID: uint64(k), Op: rdma.OpRead, Flags: rdma.FlagSignaled,
					SGL: []rdma.SGE{from.SGE(100<<10+k*size, size)}, RemoteAddr: to.At(1 << 10), RKey: to.MR.RKey()})
			}
			last := rdma.SendWR{ID: uint64(reads), Op: rdma.OpSend, Flags: rdma.FlagSignaled}
			if p.does[i] == fence {
				last.Flags |= rdma.FlagFence
			}
			wrs[i] = append(wrs[i], last)
			p.want[i] += reads + 1 // and the send
			p.want[1-i]++          // and its receive
		}
		start := time.Now()
		p.A.Post(t, wrs[0]...)
		p.B.Post(t, wrs[1]...)
		p.took = time.Since(start)
	}
	for _, p := range pairs {
		if p.still {
			continue
		}
		p.Until(fmt.Sprintf("%s, %s: %d and %d completions", p.does[0], p.does[1], p.want[0], p.want[1]), func() bool {
			return len(p.A.Pending()) == p.want[0] && len(p.B.Pending()) == p.want[1]
		})
		for i, e := range p.ends {
			for _, wc := range p.WaitOK(e, p.want[i]) {
				if !wc.Recv && wc.ByteLen == size && !bytes.Equal(e.Mem[100<<10+int(wc.ID)*size:][:size], p.ends[1-i].Mem[1<<10:][:size]) {
					t.Errorf("%s, %s: %s: Read %d arrived wrong", p.does[0], p.does[1], e.Name, wc.ID)
				}
			}
		}
	}
	t.Logf("all that siw can serve: after %v", time.Since(begin))
	for end := time.Now().Add(2 * time.Since(begin)); siw && time.Now().Before(end); { // as long again, twice
		for _, p := range pairs {
			p.Progress()
		}
	}
	judged := 0
	for _, p := range pairs {
		if !p.still {
			continue
		}
		if p.took > delay/3 { // what is posted then is not sent yet: siw's thread has the rest of the time for that
			t.Logf("%s, %s: posting took %v: one side may have heard of the other", p.does[0], p.does[1], p.took)
			continue
		}
		judged++
		if a, b := len(p.A.Pending()), len(p.B.Pending()); a != 0 || b != 0 {
			t.Errorf("%s, %s: siw served Reads while its send queue waited (%d and %d completions of %v): the exception can go", p.does[0], p.does[1], a, b, p.want)
		}
		for _, e := range p.ends {
			if e.Conn.Err() != nil {
				t.Errorf("%s, %s: %s: %v", p.does[0], p.does[1], e.Name, e.Conn.Err())
			}
		}
	}
	if siw && judged == 0 {
		t.Error("every post took too long for a verdict")
	}
}

// An empty Read whose turn at the peer comes behind something else is answered without bytes. siw answers it with as
// many as it has sent before: siw_activate_tx takes the request from its queue, and leaves the length of the last
// transmission in place; the requester ends the connection ("rresp len" in its log). Without anything in front it
// answers right, as ReadSizes of the contract holds. That is why TestContract excepts RandomTraffic/empty Reads.
func TestEmptyReadBehindWrite(t *testing.T) {
	p, s := suite(t)
	siw := isSiw(p, here(t, p, s.Addr))
	pair := s.Connect(nil, nil, rdmatest.PairConfig{MemSize: 8 << 20}, nil, func(b *rdmatest.End) { b.PostRecv(t, 0, 0, 16) })
	pair.A.Post(t, rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagSignaled}) // lets B speak
	pair.WaitOK(pair.A, 1)
	pair.WaitOK(pair.B, 1)
	if siw {
		farApart(t)
	}
	pair.B.Post(t, rdma.SendWR{ID: 1, Op: rdma.OpWrite, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{pair.B.SGE(0, 8<<20)}, RemoteAddr: pair.A.At(0), RKey: pair.A.MR.RKey()})
	pair.A.Post(t, rdma.SendWR{ID: 2, Op: rdma.OpRead, Flags: rdma.FlagSignaled, RemoteAddr: pair.B.At(0), RKey: pair.B.MR.RKey()})
	wc := pair.Wait(pair.A, 1)[0]
	switch {
	case !siw && (wc.ID != 2 || wc.Status != rdma.StatusSuccess || wc.ByteLen != 0):
		t.Errorf("%+v", wc)
	case !siw:
		pair.WaitOK(pair.B, 1)
	case wc.Status == rdma.StatusSuccess:
		t.Error("siw answered an empty Read that had to wait: the exception can go")
	default:
		pair.Ended(pair.A)
		pair.Ended(pair.B)
	}
}

// Whoever gives up a connection request does not wait for the peer, nor do others.
func TestUnansweredRequest(t *testing.T) {
	p, s := suite(t)
	pair := s.Connect(nil, nil, rdmatest.PairConfig{}, nil, nil)
	side := pair.A.Side
	for range 3 {
		c, err := p.Dial(t.Context(), netip.Addr{}, s.L.Addr())
		if err != nil {
			t.Fatal(err)
		}
		q, err := c.CreateQP(side.PD, rdma.QPConfig{SendCQ: side.CQ, RecvCQ: side.CQ, MaxSend: 4, MaxRecv: 4})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := q.PostRecv(rdma.RecvWR{SGL: []rdma.SGE{side.SGE(0, 64)}}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		_, err = c.Connect(ctx, rdma.ConnParam{})
		cancel()
		asked, e := s.L.Accept() // and says nothing
		if e != nil {
			t.Fatal(e)
		}
		t.Cleanup(func() { asked.Close() })
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("connect without an answer: %v", err)
		}
		start := time.Now()
		if err := errors.Join(q.Close(), c.Close()); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(start); d > 3*time.Second {
			t.Errorf("closing took %v", d)
		}
	}
	// What the closed ones have taken is free again, and a request that is answered gets through.
	side.Poll(t) // an owner polls anyway; until then room is kept for what may lie in the queue
	for range 3 {
		s.Connect(side, pair.B.Side, rdmatest.PairConfig{}, nil, nil)
	}
	start := time.Now()
	p2 := s.Connect(nil, nil, rdmatest.PairConfig{}, nil, nil)
	p2.A.Post(t, rdma.SendWR{Op: rdma.OpWrite, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{p2.A.SGE(0, 64)}, RemoteAddr: p2.B.At(0), RKey: p2.B.MR.RKey()})
	p2.WaitOK(p2.A, 1)
	if d := time.Since(start); d > 3*time.Second {
		t.Errorf("another connection took %v", d)
	}
}

// A queue pair is closed while its connection request is on its way into the kernel, and then what it was made of.
func TestCloseWhileAsking(t *testing.T) {
	p, s := suite(t)
	c, err := p.Dial(t.Context(), netip.Addr{}, s.L.Addr())
	if err != nil {
		t.Fatal(err)
	}
	if !c.Device().(*device).iwarp() {
		c.Close()
		t.Skip("only iWARP drivers make the end of a queue pair wait for a connection request")
	}
	side := rdmatest.NewSide(t, "active", c.Device(), 64, 4096)
	q, err := c.CreateQP(side.PD, rdma.QPConfig{SendCQ: side.CQ, RecvCQ: side.CQ, MaxSend: 4, MaxRecv: 4})
	if err != nil {
		t.Fatal(err)
	}
	call := &c.(*conn).call
	call.Lock() // the kernel has the request
	done := sync.OnceFunc(call.Unlock)
	defer done()
	gone, cancel := context.WithCancel(t.Context())
	time.AfterFunc(10*time.Millisecond, cancel)
	if _, err := c.Connect(gone, rdma.ConnParam{}); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if err := errors.Join(q.Close(), c.Close()); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error)
	go func() { ended <- side.CQ.Close() }()
	l := &side.CQ.(*cq).lingering
	rdmatest.Until(t, "the completion queue's end to wait", func() { time.Sleep(time.Millisecond) }, func() bool {
		l.lmu.Lock()
		defer l.lmu.Unlock()
		return l.list == nil
	})
	done() // the kernel is done with it
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(side.MR.Deregister(), side.PD.Close()); err != nil {
		t.Fatal(err)
	}
}

// resources counts the kernel's objects of a device.
func resources(t testing.TB, dev string) string {
	t.Helper()
	m := regexp.MustCompile(`pd \d+ cq \d+ qp \d+ cm_id \d+ mr \d+`).FindString(run(t, "rdma", "resource", "show", dev))
	if m == "" {
		t.Fatal("rdma resource show says nothing of " + dev)
	}
	return m
}

// A thousand connections leave nothing behind in the kernel.
func TestRoundsLeaveNothing(t *testing.T) {
	p, s := suite(t)
	dev := here(t, p, s.Addr).Name
	rounds := 1000
	if testing.Short() {
		rounds = 60
	}
	pair := s.Connect(nil, nil, rdmatest.PairConfig{}, nil, nil) // what stays open all the time
	a, b := pair.A.Side, pair.B.Side
	var before string
	var g, f int
	for round := range rounds + 5 {
		if round == 5 {
			rdmatest.NoLeakSoon(t)
			rdmatest.Until(t, "the kernel to rest", func() {}, func() bool { // it does when what it holds stays so
				last := before
				before = resources(t, dev)
				return before == last
			})
			g, f = rdmatest.Resources(t)
		}
		q := &rdmatest.Suite{T: roundT{t}, P: p, L: s.L, Addr: s.Addr}
		x := q.Connect(a, b, rdmatest.PairConfig{QP: rdma.QPConfig{MaxSend: 4, MaxRecv: 4}}, nil, func(e *rdmatest.End) { e.PostRecv(t, 1, 0, 16) })
		mr, err := a.PD.Register(a.Mem[:8192], rdmatest.AllAccess)
		if err != nil {
			t.Fatal(err)
		}
		x.A.Post(t, rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{{Addr: mr.Addr(), Len: 16, LKey: mr.LKey()}}})
		x.WaitOK(x.B, 1)
		switch round % 3 {
		case 0:
			x.A.Conn.Disconnect()
			x.Ended(x.B)
		case 1:
			x.B.QP.Close()
			x.Ended(x.A)
		}
		x.Close()
		mr.Deregister()
	}
	var after string
	rdmatest.Until(t, "the kernel to be done", func() { time.Sleep(10 * time.Millisecond) }, func() bool { after = resources(t, dev); return after == before })
	t.Logf("%d connections: %s before, %s after", rounds, before, after)
	rdmatest.NoLeak(t, g, f)
}

// roundT keeps what one of many rounds registers for its end from piling up: the round cleans up by itself.
type roundT struct{ testing.TB }

func (roundT) Cleanup(func()) {}

// Failures are told by asynchronous events where the device has them, and a port that goes down and up again is told.
func TestAsynchronousEvents(t *testing.T) {
	a := address(t)
	var log envtest.Log
	p := provider(t, Config{Logger: log.Logger()})
	s := rdmatest.NewSuite(t, p, a)
	info := here(t, p, a)
	netdev := netdevOf(t, info.Name)
	if info.Transport == rdma.TransportIWARP {
		pair := s.Connect(nil, nil, rdmatest.PairConfig{}, nil, nil)
		local, err := pair.B.PD.Register(rdmatest.Mem(t, 4096), rdma.AccessLocalWrite)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { local.Deregister() })
		pair.A.Post(t, rdma.SendWR{Op: rdma.OpWrite, SGL: []rdma.SGE{pair.A.SGE(0, 64)}, RemoteAddr: local.Addr(), RKey: local.RKey()})
		if err := pair.Ended(pair.B); !errors.Is(err, rdma.ErrProtocol) {
			t.Errorf("end after a Write to memory that is not open: %v", err)
		}
		log.Await(t, `event="a request of the peer is not allowed"`)
		pair.Ended(pair.A)
	}
	pair := s.Connect(nil, nil, rdmatest.PairConfig{}, func(e *rdmatest.End) { e.PostRecv(t, 1, 0, 64) }, func(e *rdmatest.End) { e.PostRecv(t, 1, 0, 64) })
	run(t, "ip", "link", "set", netdev, "down")
	log.Await(t, `msg="RDMA port is down"`)
	if isSiw(p, info) { // it ends its connections
		pair.Ended(pair.A)
		pair.Ended(pair.B)
		for _, e := range []*rdmatest.End{pair.A, pair.B} {
			if wc := pair.Wait(e, 1)[0]; wc.Status != rdma.StatusFlush {
				t.Errorf("receive when the port went down: %+v", wc)
			}
		}
	}
	run(t, "ip", "link", "set", netdev, "up")
	log.Await(t, `msg="RDMA port is up"`)
	rdmatest.Until(t, "the device to be active", func() { time.Sleep(10 * time.Millisecond) }, func() bool { return strings.Contains(run(t, "rdma", "link", "show", info.Name+"/1"), "state ACTIVE") })
	again(t, p, a)
	if !isSiw(p, info) { // it has lost nothing but time
		pair.A.Post(t, rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{pair.A.SGE(0, 8)}})
		pair.WaitOK(pair.A, 1)
		pair.WaitOK(pair.B, 1)
	}
	t.Logf("log:\n%s", log.String())
}

// again listens and connects anew, until it works: addresses come back some time after a device.
func again(t *testing.T, p *Provider, a netip.Addr) {
	t.Helper()
	rdmatest.Until(t, "a connection to "+a.String(), func() { time.Sleep(50 * time.Millisecond) }, func() bool {
		l, err := p.Listen(netip.AddrPortFrom(a, 0), rdma.ListenConfig{})
		if err != nil {
			t.Log(err)
			return false
		}
		defer l.Close()
		c, err := p.Dial(t.Context(), netip.Addr{}, l.Addr())
		if err != nil {
			t.Log(err)
			return false
		}
		c.Close()
		return true
	})
	t.Run("again", func(t *testing.T) {
		s := rdmatest.NewSuite(t, p, a)
		pair := s.Connect(nil, nil, rdmatest.PairConfig{}, nil, func(e *rdmatest.End) { e.PostRecv(t, 1, 0, 64) })
		pair.A.Post(t, rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{pair.A.SGE(0, 64)}})
		pair.WaitOK(pair.B, 1)
	})
}

func netdevOf(t testing.TB, dev string) string {
	t.Helper()
	m := regexp.MustCompile(`netdev (\S+)`).FindStringSubmatch(run(t, "rdma", "link", "show", dev+"/1"))
	if m == nil {
		t.Fatal("no network device under " + dev)
	}
	return m[1]
}

// The device is removed while there are connections in every stage: all of them end, sleepers wake, everything can
// be closed, the kernel gets the device back, and one that is added afterwards works.
func TestDeviceRemoval(t *testing.T) {
	a := address(t)
	var log envtest.Log
	p := provider(t, Config{Logger: log.Logger()})
	info := here(t, p, a)
	netdev, kind := netdevOf(t, info.Name), "rxe"
	if isSiw(p, info) {
		kind = "siw"
	}
	// A listener that is there all the time works again afterwards.
	old, err := p.Listen(netip.AddrPortFrom(a, 0), rdma.ListenConfig{})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan int, 1)
	go func() {
		failures := 0
		for {
			c, err := old.Accept()
			switch {
			case errors.Is(err, rdma.ErrClosed):
				ended <- failures
				return
			case err != nil:
				failures++
				time.Sleep(20 * time.Millisecond) // as those who serve do
			default:
				c.Reject([]byte("old"))
				c.Close()
			}
		}
	}()
	for range 2 {
		removal, deleter := make(chan string, 1), 0
		ok := t.Run("remove", func(t *testing.T) {
			s := rdmatest.NewSuite(t, p, a)
			var conns []rdma.Conn
			dial := func() rdma.Conn {
				c, err := p.Dial(t.Context(), netip.Addr{}, s.L.Addr())
				if err != nil {
					t.Fatal(err)
				}
				conns = append(conns, c)
				t.Cleanup(func() { c.Close() })
				return c
			}
			post := func(e *rdmatest.End) { e.PostRecv(t, 1, 0, 64) }
			idle := s.Connect(nil, nil, rdmatest.PairConfig{}, post, post)
			busy := s.Connect(nil, nil, rdmatest.PairConfig{MemSize: 8 << 20}, post, post)
			over := s.Connect(nil, nil, rdmatest.PairConfig{}, post, post)
			over.A.Conn.Disconnect()
			over.Ended(over.B)
			for _, x := range []*rdmatest.Pair{idle, busy} {
				conns = append(conns, x.A.Conn, x.B.Conn)
			}
			dial() // resolved only
			withQP := func(c rdma.Conn) {
				q, err := c.CreateQP(idle.A.PD, rdma.QPConfig{SendCQ: idle.A.CQ, RecvCQ: idle.A.CQ, MaxSend: 4, MaxRecv: 4})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { q.Close() })
			}
			withQP(dial())
			asking := dial()
			withQP(asking)
			asked := make(chan error, 1)
			go func() {
				_, err := asking.Connect(context.Background(), rdma.ConnParam{})
				asked <- err
			}()
			waiting, err := s.L.Accept() // and never answered
			if err != nil {
				t.Fatal(err)
			}
			conns = append(conns, waiting)
			t.Cleanup(func() { waiting.Close() })
			accepting := make(chan error, 1)
			go func() {
				_, err := s.L.Accept()
				accepting <- err
			}()
			for _, e := range []*rdmatest.End{idle.A, idle.B} {
				e.Poll(t)
				if again, err := e.CQ.Arm(); err != nil || again {
					t.Fatalf("arm: %v, %v", again, err)
				}
			}
			for range 8 {
				busy.A.Post(t, rdma.SendWR{Op: rdma.OpWrite, SGL: []rdma.SGE{busy.A.SGE(0, 8<<20)}, RemoteAddr: busy.B.At(0), RKey: busy.B.MR.RKey()})
			}
			del := exec.Command("rdma", "link", "del", info.Name)
			var said bytes.Buffer
			del.Stdout, del.Stderr = &said, &said
			if err := del.Start(); err != nil {
				t.Fatal(err)
			}
			deleter = del.Process.Pid
			go func() {
				err := del.Wait()
				removal <- fmt.Sprint(said.String(), err)
			}()
			for i, c := range conns {
				rdmatest.Until(t, fmt.Sprintf("the end of connection %d", i), func() { time.Sleep(time.Millisecond) }, closed(c.Done()))
			}
			if err := <-asked; err == nil {
				t.Error("connected on a device that was removed")
			}
			select {
			case err := <-accepting:
				if !errors.Is(err, errRemoved) {
					t.Errorf("Accept: %v", err)
				}
			case <-time.After(rdmatest.Patience):
				t.Error("Accept waits on")
			}
			for _, e := range []*rdmatest.End{idle.A, idle.B} {
				n, err := unix.Poll([]unix.PollFd{{Fd: int32(e.CQ.FD()), Events: unix.POLLIN}}, int(rdmatest.Patience/time.Millisecond))
				if n != 1 || err != nil {
					t.Errorf("an owner sleeps on: %v", err)
				}
				if wc := idle.Wait(e, 1)[0]; wc.Status != rdma.StatusFlush {
					t.Errorf("%+v", wc)
				}
			}
			if _, err := idle.A.Dev.AllocPD(); !errors.Is(err, errRemoved) {
				t.Errorf("domain on a device that was removed: %v", err)
			}
		}) // which closes everything
		if !ok {
			t.Fatalf("log:\n%s", log.String())
		}
		select {
		case out := <-removal:
			if out != "<nil>" {
				t.Fatalf("rdma link del: %s", out)
			}
		case <-time.After(rdmatest.Patience):
			where, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stack", deleter))
			files, _ := exec.Command("ls", "-l", fmt.Sprintf("/proc/%d/fd/", os.Getpid())).Output()
			maps, _ := os.ReadFile("/proc/self/maps")
			t.Fatalf("the kernel does not get the device back; it waits in\n%s\nlog:\n%s\nfiles:\n%s\nmappings:\n%s", where, log.String(), files,
				regexp.MustCompile(`(?m)^.*uverbs.*$`).FindAll(maps, -1))
		}
		if out := run(t, "rdma", "link", "show"); strings.Contains(out, info.Name) {
			t.Fatal("it is still there: " + out)
		}
		if _, err := p.Listen(netip.AddrPortFrom(a, 0), rdma.ListenConfig{}); err == nil {
			t.Error("listening on a device that is not there")
		}
		run(t, "rdma", "link", "add", info.Name, "type", kind, "netdev", netdev)
		again(t, p, a)
		t.Run("old listener", func(t *testing.T) {
			rdmatest.Until(t, "an answer of the old listener", func() { time.Sleep(50 * time.Millisecond) }, func() bool {
				c, err := p.Dial(t.Context(), netip.Addr{}, old.Addr())
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				side := rdmatest.NewSide(t, "side", c.Device(), 16, 4096)
				defer side.Close(t)
				q, err := c.CreateQP(side.PD, rdma.QPConfig{SendCQ: side.CQ, RecvCQ: side.CQ, MaxSend: 1, MaxRecv: 1})
				if err != nil {
					t.Fatal(err)
				}
				defer q.Close()
				ctx, cancel := context.WithTimeout(t.Context(), rdmatest.Patience)
				defer cancel()
				_, err = c.Connect(ctx, rdma.ConnParam{})
				var rej *rdma.RejectError
				return errors.As(err, &rej) && bytes.HasPrefix(rej.PrivateData, []byte("old"))
			})
		})
	}
	old.Close()
	if n := <-ended; n == 0 {
		t.Error("the old listener has not noticed")
	}
	log.Await(t, `msg="RDMA device was removed"`)
}

// child starts this program again as a peer that TestMain's caller kills.
func child(t *testing.T, env ...string) (*exec.Cmd, func() string) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestChild$")
	cmd.Env = append(os.Environ(), env...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	var b [256]byte
	return cmd, func() string { // a line
		t.Helper()
		line := ""
		for !strings.HasSuffix(line, "\n") {
			n, err := out.Read(b[:1])
			if err != nil {
				t.Fatalf("the other process: %q, %v", line, err)
			}
			line += string(b[:n])
		}
		return strings.TrimSpace(line)
	}
}

// TestChild is the other process of tests.
func TestChild(t *testing.T) {
	switch os.Getenv("RDBLK_VERBS_CHILD") {
	case "peer":
		peer(t, os.Getenv("RDBLK_VERBS_STAGE"), netip.MustParseAddrPort(os.Getenv("RDBLK_VERBS_REMOTE")))
	case "memory":
		lockMemory(t)
	default:
		t.Skip("this is the other process of other tests")
	}
}

// peer connects, gets to a stage, says so and waits to be killed.
func peer(t *testing.T, stage string, remote netip.AddrPort) {
	p := provider(t, Config{})
	c, err := p.Dial(t.Context(), netip.Addr{}, remote)
	if err != nil {
		t.Fatal(err)
	}
	side := rdmatest.NewSide(t, "peer", c.Device(), 64, 4<<20)
	q, err := c.CreateQP(side.PD, rdma.QPConfig{SendCQ: side.CQ, RecvCQ: side.CQ, MaxSend: 16, MaxRecv: 16})
	if err != nil {
		t.Fatal(err)
	}
	if stage == "asking" {
		go c.Connect(t.Context(), rdma.ConnParam{})
		fmt.Println("asking")
		select {}
	}
	var addr [2]uint64
	est, err := c.Connect(t.Context(), rdma.ConnParam{InitiatorDepth: 4})
	if err != nil {
		t.Fatal(err)
	}
	for i := range addr {
		addr[i] = leUint64(est.PrivateData[8*i:])
	}
	if _, err := q.PostSend(rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{side.SGE(0, 8)}}); err != nil {
		t.Fatal(err)
	}
	fmt.Println(stage)
	var wc [16]rdma.WC
	for stage == "busy" {
		q.PostSend(rdma.SendWR{Op: rdma.OpWrite, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{side.SGE(0, 2<<20)}, RemoteAddr: addr[0], RKey: uint32(addr[1])},
			rdma.SendWR{Op: rdma.OpRead, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{side.SGE(2<<20, 2<<20)}, RemoteAddr: addr[0], RKey: uint32(addr[1])})
		side.CQ.Poll(wc[:])
	}
	select {}
}

func leUint64(b []byte) (v uint64) {
	for i := range 8 {
		v |= uint64(b[i]) << (8 * i)
	}
	return v
}

// The peer's process dies at each stage: this side's connection ends, or its Accept fails, and everything closes at once.
func TestPeerKilled(t *testing.T) {
	p, s := suite(t)
	for _, stage := range []string{"asking", "idle", "busy"} {
		t.Run(stage, func(t *testing.T) {
			// Its own, since a client that dies can take siw's listener along (docs/interop.md).
			l, err := p.Listen(netip.AddrPortFrom(s.Addr, 0), rdma.ListenConfig{})
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			cmd, line := child(t, "RDBLK_VERBS_CHILD=peer", "RDBLK_VERBS_STAGE="+stage, "RDBLK_VERBS_REMOTE="+l.Addr().String())
			late := time.AfterFunc(rdmatest.Patience, func() { l.Close() })
			defer late.Stop()
			c, err := l.Accept()
			if err != nil {
				t.Fatalf("no request of the peer within %v: %v", rdmatest.Patience, err)
			}
			side := rdmatest.NewSide(t, "here", c.Device(), 64, 2<<20)
			q, err := c.CreateQP(side.PD, rdma.QPConfig{SendCQ: side.CQ, RecvCQ: side.CQ, MaxSend: 16, MaxRecv: 16})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := q.PostRecv(rdma.RecvWR{SGL: []rdma.SGE{side.SGE(0, 64)}}, rdma.RecvWR{SGL: []rdma.SGE{side.SGE(0, 64)}}); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), rdmatest.Patience)
			defer cancel()
			if stage != "asking" {
				private := make([]byte, 16)
				for i := range 8 {
					private[i], private[8+i] = byte(side.MR.Addr()>>(8*i)), byte(uint64(side.MR.RKey())>>(8*i))
				}
				if _, err := c.Accept(ctx, rdma.ConnParam{PrivateData: private, ResponderResources: 4}); err != nil {
					t.Fatal(err)
				}
			}
			if got := line(); got != stage {
				t.Fatalf("the other process says %q", got)
			}
			cmd.Process.Kill()
			cmd.Wait()
			if stage == "asking" {
				if _, err := c.Accept(ctx, rdma.ConnParam{}); err == nil {
					rdmatest.Until(t, "the end of the connection", func() { side.Poll(t) }, closed(c.Done()))
				}
			} else {
				if stage == "idle" && here(t, p, s.Addr).Transport == rdma.TransportIB {
					// A device tells nobody that its process died; who has something to say finds out.
					if _, err := q.PostSend(rdma.SendWR{Op: rdma.OpSend}); err != nil {
						t.Fatal(err)
					}
				}
				rdmatest.Until(t, "the end of the connection", func() { side.Poll(t) }, closed(c.Done()))
				t.Logf("%s: %v", stage, c.Err())
			}
			start := time.Now()
			if err := errors.Join(q.Close(), c.Close()); err != nil {
				t.Error(err)
			}
			side.Close(t)
			if d := time.Since(start); d > 5*time.Second {
				t.Errorf("closing took %v", d)
			}
		})
	}
}

// An ordinary user with the old default limit of locked memory learns how much is needed, and where to change that.
func TestLockedMemoryLimit(t *testing.T) {
	address(t)
	cmd := exec.Command("/bin/sh", "-c", "ulimit -l 64 && exec /proc/self/fd/3 -test.run='^TestChild$'")
	cmd.Env = append(os.Environ(), "RDBLK_VERBS_CHILD=memory")
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	cmd.ExtraFiles = []*os.File{self}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	cmd.Dir = "/"
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Logf("%s", out)
}

func lockMemory(t *testing.T) {
	a := address(t)
	p := provider(t, Config{})
	l, err := p.Listen(netip.AddrPortFrom(a, 0), rdma.ListenConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := p.Dial(t.Context(), netip.Addr{}, l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	pd, err := c.Device().AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	if mr, err := pd.Register(rdmatest.Mem(t, 16<<10), rdmatest.AllAccess); err != nil {
		t.Errorf("16 KiB: %v", err)
	} else {
		defer mr.Deregister()
	}
	_, err = pd.Register(rdmatest.Mem(t, 1<<20), rdmatest.AllAccess)
	if !errors.Is(err, rdma.ErrNoResources) {
		t.Fatalf("1 MiB: %v", err)
	}
	for _, want := range []string{"register 1024 KiB", "may have 64 KiB", "takes 1024 KiB more", "ulimit -l", "LimitMEMLOCK", "--ulimit memlock"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in: %v", want, err)
		}
	}
	if m := regexp.MustCompile(`at least (\d+) KiB`).FindStringSubmatch(err.Error()); m == nil {
		t.Errorf("not how much is needed: %v", err)
	} else if n, _ := strconv.Atoi(m[1]); n < 1024 || n > 4096 {
		t.Errorf("%d KiB are said to be needed", n)
	}
	fmt.Println(err)
}

// With several devices the address says which one it is, for both sides, and a wildcard listener is on all of them.
func TestDeviceByAddress(t *testing.T) {
	more := os.Getenv("RDBLK_VERBS_ADDR2")
	if more == "" {
		t.Skip("RDBLK_VERBS_ADDR2 is not set; test/vm/guest/verbs.sh sets it with two devices")
	}
	p := provider(t, Config{})
	l, err := p.Listen(netip.AddrPortFrom(netip.IPv4Unspecified(), 0), rdma.ListenConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	seen := map[string]bool{}
	for _, a := range []netip.Addr{address(t), netip.MustParseAddr(more)} {
		want := here(t, p, a)
		seen[want.Name] = true
		c, err := p.Dial(t.Context(), netip.Addr{}, netip.AddrPortFrom(a, l.Addr().Port()))
		if err != nil {
			t.Fatal(err)
		}
		if got := c.Device().Info(); got.Name != want.Name || got.Transport != want.Transport || c.LocalAddr().Addr() != a {
			t.Errorf("%v: device %s with local address %v, want %s", a, got.Name, c.LocalAddr(), want.Name)
		}
		side := rdmatest.NewSide(t, "active", c.Device(), 64, 4096)
		q, err := c.CreateQP(side.PD, rdma.QPConfig{SendCQ: side.CQ, RecvCQ: side.CQ, MaxSend: 4, MaxRecv: 4})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), rdmatest.Patience)
		asked := make(chan error, 1)
		go func() {
			_, err := c.Connect(ctx, rdma.ConnParam{})
			asked <- err
		}()
		r, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if got := r.Device().Info().Name; got != want.Name {
			t.Errorf("%v: request on device %s, want %s", a, got, want.Name)
		}
		r.Reject(nil)
		var rej *rdma.RejectError
		if err := <-asked; !errors.As(err, &rej) {
			t.Errorf("%v: %v", a, err)
		}
		cancel()
		r.Close()
		q.Close()
		c.Close()
		side.Close(t)
		// A listener on the one address is not reached by the other.
		own, err := p.Listen(netip.AddrPortFrom(a, 0), rdma.ListenConfig{})
		if err != nil {
			t.Fatal(err)
		}
		own.Close()
		// The kernel's own table says what the address was resolved to: RoCE v2 with this address.
		if want.Transport == rdma.TransportIB {
			port, found := "/sys/class/infiniband/"+want.Name+"/ports/1/", false
			for i := 0; !found; i++ {
				b, err := os.ReadFile(fmt.Sprintf("%sgids/%d", port, i))
				if err != nil {
					t.Errorf("no GID of %s is %v with RoCE v2: %v", want.Name, a, err)
					break
				}
				if gid, err := netip.ParseAddr(strings.TrimSpace(string(b))); err == nil && gid.Unmap() == a {
					kind, _ := os.ReadFile(fmt.Sprintf("%sgid_attrs/types/%d", port, i))
					found = strings.TrimSpace(string(kind)) == "RoCE v2"
				}
			}
		}
	}
	if len(seen) != 2 {
		t.Fatalf("both addresses are on %v", seen)
	}
	if c, err := p.Dial(t.Context(), netip.Addr{}, netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), 4420)); err == nil {
		c.Close()
		t.Error("a device for an address without route")
	} else if !errors.Is(err, rdma.ErrNotSupported) && !errors.Is(err, rdma.ErrTimeout) && !errors.Is(err, unix.ENETUNREACH) {
		t.Errorf("address without route: %v", err)
	}
}
