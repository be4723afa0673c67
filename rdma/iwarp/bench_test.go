package iwarp

import (
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/rdma"
	"rdblk/rdma/rdmatest"
)

// The benchmarks carry the bytes of 4 KiB reads: a 64-byte Send one way, an RDMA
// Write of 4096 bytes and a 16-byte Send the other, both ends in this process on
// threads of their own. BenchmarkTCP does the same with nothing but sockets.

const (
	benchIO  = 4096
	benchCmd = 64
	benchRsp = 16
)

// benchEnd drives one end; the memory layout is slot i's 4 KiB at i*4096, then
// the receive buffers, then the capsules.
type benchEnd struct {
	e     *rdmatest.End
	depth int
	wc    []rdma.WC
	send  []rdma.SendWR
	recv  []rdma.RecvWR
}

func newBenchEnd(e *rdmatest.End, depth int) *benchEnd {
	b := &benchEnd{e: e, depth: depth, wc: make([]rdma.WC, 64)}
	for i := range depth {
		b.recv = append(b.recv, rdma.RecvWR{ID: uint64(i), SGL: []rdma.SGE{e.SGE(b.recvOff(i), benchCmd)}})
	}
	return b
}

func (b *benchEnd) recvOff(i int) int { return b.depth*benchIO + i*benchCmd }
func (b *benchEnd) capsOff(i int) int { return b.depth*(benchIO+benchCmd) + i*benchCmd }

type benchPair struct {
	p            *rdmatest.Pair
	host, target *benchEnd
}

func newBenchPair(t testing.TB, cfg Config, depth int) *benchPair {
	prov, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	s := rdmatest.NewSuite(t, prov, loopback)
	bp := &benchPair{}
	pc := rdmatest.PairConfig{QP: rdma.QPConfig{MaxSend: 4 * depth, MaxRecv: depth}, CQDepth: 8 * depth, MemSize: depth * (benchIO + 2*benchCmd)}
	post := func(b *benchEnd) {
		if _, err := b.e.QP.PostRecv(b.recv...); err != nil {
			t.Fatal(err)
		}
	}
	bp.p = s.Connect(nil, nil, pc, func(e *rdmatest.End) { bp.host = newBenchEnd(e, depth); post(bp.host) },
		func(e *rdmatest.End) { bp.target = newBenchEnd(e, depth); post(bp.target) })
	h, tg := bp.host, bp.target
	for i := range depth {
		h.send = append(h.send, rdma.SendWR{ID: uint64(i), Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{h.e.SGE(h.capsOff(i), benchCmd)}})
		tg.send = append(tg.send,
			rdma.SendWR{ID: uint64(i), Op: rdma.OpWrite, SGL: []rdma.SGE{tg.e.SGE(i*benchIO, benchIO)}, RemoteAddr: h.e.At(i * benchIO), RKey: h.e.MR.RKey()},
			rdma.SendWR{ID: uint64(i), Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{tg.e.SGE(tg.capsOff(i), benchRsp)}})
	}
	return bp
}

// serve answers what has come. It returns the number of commands.
func (b *benchEnd) serve(t testing.TB) int {
	n, _, err := b.e.CQ.Poll(b.wc)
	if err != nil {
		t.Error(err)
		return 0
	}
	cmds := 0
	for i := range b.wc[:n] {
		wc := &b.wc[i]
		if wc.Status != rdma.StatusSuccess {
			return -1
		}
		if !wc.Recv {
			continue
		}
		cmds++
		b.e.QP.PostRecv(b.recv[wc.ID : wc.ID+1]...)
		if _, err := b.e.QP.PostSend(b.send[2*wc.ID : 2*wc.ID+2]...); err != nil {
			t.Error(err)
		}
	}
	return cmds
}

// drive keeps depth commands going until total are answered, or does one poll if total is 0.
func (b *benchEnd) drive(t testing.TB, total int) {
	sent, got := 0, 0
	for ; sent < min(b.depth, total); sent++ {
		b.e.QP.PostSend(b.send[sent : sent+1]...)
	}
	for got < total {
		n, busy, err := b.e.CQ.Poll(b.wc)
		if err != nil {
			t.Error(err)
			return
		}
		for i := range b.wc[:n] {
			wc := &b.wc[i]
			if wc.Status != rdma.StatusSuccess {
				t.Errorf("%v", wc.Status)
				return
			}
			if !wc.Recv {
				continue
			}
			got++
			b.e.QP.PostRecv(b.recv[wc.ID : wc.ID+1]...)
			if sent < total {
				b.e.QP.PostSend(b.send[wc.ID : wc.ID+1]...)
				sent++
			}
		}
		if !busy {
			unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		}
	}
}

func benchmarkPair(b *testing.B, cfg Config, depth int) {
	bp := newBenchPair(b, cfg, depth)
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		runtime.LockOSThread()
		for !stop.Load() {
			if bp.target.serve(b) == 0 {
				unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
			}
		}
		bp.target.e.CQ.Arm()
	}()
	runtime.LockOSThread()
	b.SetBytes(benchIO)
	b.ReportAllocs()
	b.ResetTimer()
	bp.host.drive(b, b.N)
	b.StopTimer()
	stop.Store(true)
	wg.Wait()
	bp.host.e.CQ.Arm()
	h, t := bp.host.e.QP.(*qp).Stats(), bp.target.e.QP.(*qp).Stats()
	n := float64(b.N)
	b.ReportMetric(float64(h.SendCalls+h.RecvCalls)/n, "host-calls/op")
	b.ReportMetric(float64(t.SendCalls+t.RecvCalls)/n, "target-calls/op")
	b.ReportMetric(float64(h.RecvEmpty+t.RecvEmpty)/n, "empty/op")
}

func BenchmarkPingPong4K(b *testing.B)    { benchmarkPair(b, Config{}, 1) }
func BenchmarkPingPong4KCRC(b *testing.B) { benchmarkPair(b, Config{CRC: CRCOn}, 1) }
func BenchmarkRate4K(b *testing.B)        { benchmarkPair(b, Config{}, 128) }
func BenchmarkRate4KCRC(b *testing.B)     { benchmarkPair(b, Config{CRC: CRCOn}, 128) }

// Bytes on the wire of one operation.
const (
	benchUp   = untaggedHeader + benchCmd + 4
	benchDown = taggedHeader + benchIO + 4 + untaggedHeader + benchRsp + 4
)

// rawPair is a connected pair of non-blocking TCP sockets.
func rawPair(b *testing.B) (int, int) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp4", l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	s, err := l.Accept()
	if err != nil {
		b.Fatal(err)
	}
	x, err1 := dupConn(c.(*net.TCPConn))
	y, err2 := dupConn(s.(*net.TCPConn))
	if err1 != nil || err2 != nil {
		b.Fatal(err1, err2)
	}
	b.Cleanup(func() { unix.Close(x); unix.Close(y) })
	tune(x, 0)
	tune(y, 0)
	return x, y
}

// pump receives until at least one whole unit has come and returns how many units
// that made; rest carries what is left over.
func pump(fd int, buf []byte, unit int, rest *int, stop *atomic.Bool) int {
	for {
		n, e := sysRecv(fd, buf)
		if e == unix.EAGAIN {
			if stop != nil && stop.Load() {
				return 0
			}
			unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
			continue
		}
		if e != 0 || n == 0 {
			return 0
		}
		if *rest += n; *rest >= unit {
			k := *rest / unit
			*rest %= unit
			return k
		}
	}
}

func pushAll(fd int, buf []byte) {
	for len(buf) > 0 {
		n, e := sysSendBytes(fd, buf)
		if e == unix.EAGAIN {
			unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
			continue
		}
		if e != 0 {
			return
		}
		buf = buf[n:]
	}
}

func benchmarkTCP(b *testing.B, depth int) {
	h, t := rawPair(b)
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		runtime.LockOSThread()
		in, out := make([]byte, 64<<10), make([]byte, depth*benchDown)
		rest := 0
		for {
			n := pump(t, in, benchUp, &rest, &stop)
			if n == 0 {
				return
			}
			pushAll(t, out[:n*benchDown])
		}
	}()
	runtime.LockOSThread()
	in, out := make([]byte, 64<<10), make([]byte, depth*benchUp)
	rest := 0
	b.SetBytes(benchIO)
	b.ResetTimer()
	sent, got := min(depth, b.N), 0
	pushAll(h, out[:sent*benchUp])
	for got < b.N {
		n := pump(h, in, benchDown, &rest, nil)
		got += n
		if n = min(n, b.N-sent); n > 0 {
			pushAll(h, out[:n*benchUp])
			sent += n
		}
	}
	b.StopTimer()
	stop.Store(true)
	wg.Wait()
}

func BenchmarkTCPPingPong4K(b *testing.B) { benchmarkTCP(b, 1) }
func BenchmarkTCPRate4K(b *testing.B)     { benchmarkTCP(b, 128) }

// threadCPU is the processor time of the calling thread.
func threadCPU() time.Duration {
	var u unix.Rusage
	unix.Getrusage(unix.RUSAGE_THREAD, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// benchmarkOneThread has both ends on one thread, so that its processor time is
// all that an operation costs, also on a busy machine.
func benchmarkOneThread(b *testing.B, cfg Config, depth int) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	bp := newBenchPair(b, cfg, depth)
	h, tg := bp.host, bp.target
	b.ReportAllocs()
	b.ResetTimer()
	start := threadCPU()
	h.e.QP.PostSend(h.send[:min(depth, b.N)]...)
	sent := min(depth, b.N)
	for got := 0; got < b.N; {
		tg.serve(b)
		n, _, _ := h.e.CQ.Poll(h.wc)
		for i := range h.wc[:n] {
			id := h.wc[i].ID
			if !h.wc[i].Recv {
				continue
			}
			got++
			h.e.QP.PostRecv(h.recv[id : id+1]...)
			if sent < b.N {
				h.e.QP.PostSend(h.send[id : id+1]...)
				sent++
			}
		}
	}
	b.ReportMetric(float64(threadCPU()-start)/float64(b.N), "cpu-ns/op")
}

func BenchmarkOneThread1(b *testing.B)      { benchmarkOneThread(b, Config{}, 1) }
func BenchmarkOneThread32(b *testing.B)     { benchmarkOneThread(b, Config{}, 32) }
func BenchmarkOneThread128(b *testing.B)    { benchmarkOneThread(b, Config{}, 128) }
func BenchmarkOneThread128CRC(b *testing.B) { benchmarkOneThread(b, Config{CRC: CRCOn}, 128) }

// BenchmarkTCPOneThread is the same with sockets alone: one send and one receive
// call for a batch each way, nothing placed anywhere.
func BenchmarkTCPOneThread1(b *testing.B)   { benchmarkTCPOneThread(b, 1) }
func BenchmarkTCPOneThread32(b *testing.B)  { benchmarkTCPOneThread(b, 32) }
func BenchmarkTCPOneThread128(b *testing.B) { benchmarkTCPOneThread(b, 128) }

func benchmarkTCPOneThread(b *testing.B, depth int) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	h, t := rawPair(b)
	in, out := make([]byte, depth*benchDown), make([]byte, depth*benchDown)
	b.ResetTimer()
	start := threadCPU()
	for done := 0; done < b.N; done += depth {
		pushAll(h, out[:depth*benchUp])
		for n := 0; n < depth*benchUp; {
			k, _ := sysRecv(t, in)
			n += max(k, 0)
		}
		for sent, n := 0, 0; n < depth*benchDown; {
			if sent < len(out) {
				if k, e := sysSendBytes(t, out[sent:min(len(out), sent+256<<10)]); e == 0 {
					sent += k
				}
			}
			k, _ := sysRecv(h, in[:min(len(in), 64<<10)])
			n += max(k, 0)
		}
	}
	b.ReportMetric(float64(threadCPU()-start)/float64(b.N), "cpu-ns/op")
}

// TestNoAllocations: an operation costs no allocation on either end.
func TestNoAllocations(t *testing.T) {
	for _, cfg := range []Config{{}, {CRC: CRCOn}} {
		bp := newBenchPair(t, cfg, 8)
		h, tg := bp.host, bp.target
		op := func() {
			h.e.QP.PostSend(h.send...)
			for got := 0; got < h.depth; {
				tg.serve(t)
				n, _, _ := h.e.CQ.Poll(h.wc)
				for i := range h.wc[:n] {
					if h.wc[i].Recv {
						h.e.QP.PostRecv(h.recv[h.wc[i].ID : h.wc[i].ID+1]...)
						got++
					}
				}
			}
		}
		op()
		if n := testing.AllocsPerRun(200, op); n != 0 {
			t.Errorf("CRC %v: Send, Write and Recv: %v allocations per 8 operations", cfg.CRC, n)
		}
		rd := []rdma.SendWR{{Op: rdma.OpRead, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{h.e.SGE(0, benchIO)}, RemoteAddr: tg.e.At(0), RKey: tg.e.MR.RKey()}}
		read := func() {
			h.e.QP.PostSend(rd...)
			for n := 0; n == 0; {
				tg.serve(t)
				n, _, _ = h.e.CQ.Poll(h.wc)
			}
		}
		read()
		if n := testing.AllocsPerRun(200, read); n != 0 {
			t.Errorf("CRC %v: Read: %v allocations", cfg.CRC, n)
		}
		if err := tg.e.QP.Close(); err != nil {
			t.Error(err)
		}
	}
}

// benchmarkLarge moves 128 KiB by Write (and a Send) or by Read, depth at a time,
// both ends on one thread.
func benchmarkLarge(b *testing.B, cfg Config, op rdma.Opcode, depth int) {
	const size = 128 << 10
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	prov, err := New(cfg)
	if err != nil {
		b.Fatal(err)
	}
	s := rdmatest.NewSuite(b, prov, loopback)
	p := s.Connect(nil, nil, rdmatest.PairConfig{QP: rdma.QPConfig{MaxSend: 4 * depth, MaxRecv: 4 * depth}, CQDepth: 16 * depth, MemSize: (depth + 1) * size}, nil, nil)
	var wrs []rdma.SendWR
	var recv []rdma.RecvWR
	for i := range depth {
		wrs = append(wrs, rdma.SendWR{Op: op, SGL: []rdma.SGE{p.A.SGE(i*size, size)}, RemoteAddr: p.B.At(i * size), RKey: p.B.MR.RKey(), Flags: rdma.FlagSignaled})
		recv = append(recv, rdma.RecvWR{SGL: []rdma.SGE{p.B.SGE(depth*size, 16)}})
	}
	wrs = append(wrs, rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagFence, SGL: []rdma.SGE{p.A.SGE(0, 16)}})
	b.SetBytes(size)
	b.ReportAllocs()
	b.ResetTimer()
	start := threadCPU()
	var wc [64]rdma.WC
	for done := 0; done < b.N; done += depth {
		p.B.QP.PostRecv(recv[:1]...)
		p.A.QP.PostSend(wrs...)
		for left := depth + 1; left > 0; {
			n, _, _ := p.A.CQ.Poll(wc[:])
			left -= n
			n, _, _ = p.B.CQ.Poll(wc[:])
			left -= n
		}
	}
	b.ReportMetric(float64(threadCPU()-start)/float64(b.N), "cpu-ns/op")
	p.A.CQ.Arm()
	p.B.CQ.Arm()
	st := prov.Stats()
	b.ReportMetric(float64(st.DirectBytes)/float64(st.RxBytes), "direct")
	b.ReportMetric(float64(st.RecvCalls+st.SendCalls)/float64(b.N), "calls/op")
}

func BenchmarkWrite128K(b *testing.B)    { benchmarkLarge(b, Config{}, rdma.OpWrite, 4) }
func BenchmarkRead128K(b *testing.B)     { benchmarkLarge(b, Config{}, rdma.OpRead, 4) }
func BenchmarkWrite128KCRC(b *testing.B) { benchmarkLarge(b, Config{CRC: CRCOn}, rdma.OpWrite, 4) }
func BenchmarkTCP128K(b *testing.B) {
	const size = 128 << 10
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	h, t := rawPair(b)
	in, out := make([]byte, size), make([]byte, size)
	b.SetBytes(size)
	start := threadCPU()
	for b.Loop() {
		for sent, got := 0, 0; got < size; {
			if sent < size {
				if k, e := sysSendBytes(h, out[sent:]); e == 0 {
					sent += k
				}
			}
			if k, e := sysRecv(t, in); e == 0 {
				got += k
			}
		}
	}
	b.ReportMetric(float64(threadCPU()-start)/float64(b.N), "cpu-ns/op")
}

// BenchmarkEmptyPoll is what looking for work costs.
func BenchmarkEmptyPoll(b *testing.B) {
	bp := newBenchPair(b, Config{}, 1)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	start := threadCPU()
	for b.Loop() {
		bp.host.e.CQ.Poll(bp.host.wc)
	}
	b.ReportMetric(float64(threadCPU()-start)/float64(b.N), "cpu-ns/op")
}
