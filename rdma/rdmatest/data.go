package rdmatest

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"

	"rdblk/rdma"
)

// Interesting lengths: around alignments, capsules, pages, segments.
var sizes = []int{0, 1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 127, 255, 256, 257, 511, 512, 513, 1023, 1447, 1448, 1449, 2047, 2048, 4095, 4096, 4097,
	8191, 8192, 8193, 16383, 32751, 32768, 65481, 65483, 65517, 65518, 65521, 65535, 65536, 65537, 131072, 131073, 300001, 1 << 20, 4<<20 + 3}

func testSendSizes(s *Suite) {
	t := s.T
	p := s.Connect(nil, nil, PairConfig{MemSize: 5 << 20}, nil, nil)
	for i, n := range sizes {
		for _, dir := range []bool{true, false} { // A first: the connecting side speaks first
			from, to := p.A, p.B
			if !dir {
				from, to = p.B, p.A
			}
			off := 1 + i%7
			clear(to.Mem[:n+32])
			fill(from.Mem[off:off+n], uint64(n)+1)
			to.PostRecv(t, uint64(i), off+3, n)
			from.Post(t, rdma.SendWR{ID: uint64(i), Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{from.SGE(off, n)}})
			wc := p.WaitOK(to, 1)[0]
			if !wc.Recv || wc.ID != uint64(i) || wc.ByteLen != uint32(n) || wc.Invalidated {
				t.Fatalf("receive of %d bytes: %+v", n, wc)
			}
			if !bytes.Equal(to.Mem[off+3:off+3+n], from.Mem[off:off+n]) || to.Mem[off+2] != 0 || to.Mem[off+3+n] != 0 {
				t.Fatalf("%d bytes from %s arrived wrong", n, from.Name)
			}
			if wc := p.WaitOK(from, 1)[0]; wc.Recv || wc.ID != uint64(i) {
				t.Fatalf("send of %d bytes: %+v", n, wc)
			}
		}
	}
}

func testGatherScatter(s *Suite) {
	t := s.T
	const room = 400 << 10
	max := deviceInfo(s).MaxSGE
	p := s.Connect(nil, nil, PairConfig{QP: rdma.QPConfig{MaxSendSGE: max, MaxRecvSGE: max}}, nil, nil)
	r := rng(t)
	for round := range 60 {
		cut := func(total int) []int { // max pieces, some of them empty, some odd
			l := make([]int, max)
			for left := total; left > 0; {
				n := min(1+r.IntN(1+left), left)
				l[r.IntN(max)] += n
				left -= n
			}
			return l
		}
		total := r.IntN(3000)
		if round%4 == 0 {
			total = r.IntN(room)
		}
		layout := func(e *End, l []int) (sgl []rdma.SGE, off []int) {
			at := r.IntN(5)
			for _, n := range l {
				sgl, off = append(sgl, e.SGE(at, n)), append(off, at)
				at += n + r.IntN(5)
			}
			return
		}
		src, dst := cut(total), cut(total)
		ssg, soff := layout(p.A, src)
		dsg, doff := layout(p.B, dst)
		fill(p.A.Mem[:room*2], uint64(round))
		clear(p.B.Mem[:room*2])
		var want []byte
		for i, n := range src {
			want = append(want, p.A.Mem[soff[i]:soff[i]+n]...)
		}
		if round%2 == 0 {
			if _, err := p.B.QP.PostRecv(rdma.RecvWR{SGL: dsg}); err != nil {
				t.Fatal(err)
			}
			p.A.Post(t, rdma.SendWR{Op: rdma.OpSend, SGL: ssg})
			if wc := p.WaitOK(p.B, 1)[0]; wc.ByteLen != uint32(total) {
				t.Fatalf("round %d: %d bytes, want %d", round, wc.ByteLen, total)
			}
			var got []byte
			for i, n := range dst {
				got = append(got, p.B.Mem[doff[i]:doff[i]+n]...)
			}
			if !bytes.Equal(got, want) {
				t.Fatalf("round %d: message of %d bytes gathered from %v, scattered to %v arrived wrong", round, total, src, dst)
			}
			continue
		}
		p.B.PostRecv(t, 0, 0, 0)
		p.A.Post(t, rdma.SendWR{Op: rdma.OpWrite, SGL: ssg, RemoteAddr: p.B.At(7), RKey: p.B.MR.RKey()}, rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagSignaled})
		p.WaitOK(p.B, 1)
		p.WaitOK(p.A, 1)
		if !bytes.Equal(p.B.Mem[7:7+total], want) {
			t.Fatalf("round %d: Write of %d bytes gathered from %v arrived wrong", round, total, src)
		}
	}
}

func testInline(s *Suite) {
	t := s.T
	max := deviceInfo(s).MaxInline
	p := s.Connect(nil, nil, PairConfig{QP: rdma.QPConfig{MaxInline: max}}, nil, nil)
	for i, n := range []int{0, 1, 3, 64, max - 1, max} {
		p.B.PostRecv(t, 1, 0, max)
		fill(p.A.Mem[:n], uint64(i))
		want := bytes.Clone(p.A.Mem[:n])
		sgl := []rdma.SGE{{Addr: p.A.At(0), Len: uint32(n / 2)}, {Addr: p.A.At(n / 2), Len: uint32(n - n/2)}} // no lkey
		p.A.Post(t,
			rdma.SendWR{Op: rdma.OpWrite, Flags: rdma.FlagInline, SGL: sgl, RemoteAddr: p.B.At(4096), RKey: p.B.MR.RKey()},
			rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagInline | rdma.FlagSignaled, SGL: sgl})
		clear(p.A.Mem[:n]) // the buffer is ours again at once
		p.WaitOK(p.A, 1)
		p.WaitOK(p.B, 1)
		if !bytes.Equal(p.B.Mem[:n], want) || !bytes.Equal(p.B.Mem[4096:4096+n], want) {
			t.Fatalf("%d bytes inline arrived wrong", n)
		}
	}
	// In two batches, more than the staging of a provider is likely to hold.
	for range 2 {
		for i := range 32 {
			p.B.PostRecv(t, uint64(i), i*max, max)
			fill(p.A.Mem[:max], uint64(i))
			p.A.Post(t, rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagInline | rdma.FlagSignaled, SGL: []rdma.SGE{{Addr: p.A.At(0), Len: uint32(max)}}})
		}
		p.WaitOK(p.B, 32)
		p.WaitOK(p.A, 32)
		for i := range 32 {
			fill(p.A.Mem[:max], uint64(i))
			if !bytes.Equal(p.B.Mem[i*max:(i+1)*max], p.A.Mem[:max]) {
				t.Fatalf("inline message %d of a batch arrived wrong", i)
			}
		}
	}
}

func testSendOrder(s *Suite) {
	t := s.T
	const n = 48
	p := s.Connect(nil, nil, PairConfig{}, nil, nil)
	for round := range 20 {
		for i := range n {
			p.B.PostRecv(t, uint64(100+i), 1024*i, 1024)
		}
		for i := range n {
			p.A.Mem[i] = byte(round + i)
			p.A.Post(t, rdma.SendWR{ID: uint64(i), Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{p.A.SGE(i, 1+i*21)}})
		}
		for i, wc := range p.WaitOK(p.B, n) {
			if wc.ID != uint64(100+i) || wc.ByteLen != uint32(1+i*21) || p.B.Mem[1024*i] != byte(round+i) {
				t.Fatalf("receive %d: %+v", i, wc)
			}
		}
		for i, wc := range p.WaitOK(p.A, n) {
			if wc.ID != uint64(i) {
				t.Fatalf("send %d completed as %d", wc.ID, i)
			}
		}
	}
}

func testWriteSizes(s *Suite) {
	t := s.T
	p := s.Connect(nil, nil, PairConfig{MemSize: 5 << 20}, nil, nil)
	for i, n := range sizes {
		off := 1 + i%5
		fill(p.A.Mem[:n+16], uint64(i))
		clear(p.B.Mem[:n+64])
		p.B.PostRecv(t, 1, len(p.B.Mem)-1, 1)
		p.A.Post(t, rdma.SendWR{ID: 1, Op: rdma.OpWrite, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{p.A.SGE(off, n)}, RemoteAddr: p.B.At(off + 8), RKey: p.B.MR.RKey()},
			rdma.SendWR{ID: 2, Op: rdma.OpSend})
		if wc := p.WaitOK(p.A, 1)[0]; wc.ID != 1 {
			t.Fatalf("%+v", wc)
		}
		p.WaitOK(p.B, 1)
		if !bytes.Equal(p.B.Mem[off+8:off+8+n], p.A.Mem[off:off+n]) || p.B.Mem[off+7] != 0 || p.B.Mem[off+8+n] != 0 {
			t.Fatalf("Write of %d bytes arrived wrong", n)
		}
	}
}

func testWriteThenSend(s *Suite) {
	t := s.T
	p := s.Connect(nil, nil, PairConfig{}, nil, nil)
	r := rng(t)
	for round := range 300 {
		n := 1 + r.IntN(20000)
		if round%20 == 0 {
			n = 1 + r.IntN(500000)
		}
		fill(p.A.Mem[:n], uint64(round))
		p.B.PostRecv(t, 1, len(p.B.Mem)-64, 64)
		// Two Writes and the Send that tells of them, one batch.
		h := n / 2
		p.A.Post(t,
			rdma.SendWR{Op: rdma.OpWrite, SGL: []rdma.SGE{p.A.SGE(0, h)}, RemoteAddr: p.B.At(0), RKey: p.B.MR.RKey()},
			rdma.SendWR{Op: rdma.OpWrite, SGL: []rdma.SGE{p.A.SGE(h, n-h)}, RemoteAddr: p.B.At(h), RKey: p.B.MR.RKey()},
			rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{p.A.SGE(0, 16)}})
		p.WaitOK(p.B, 1)
		if !bytes.Equal(p.B.Mem[:n], p.A.Mem[:n]) {
			t.Fatalf("round %d: a Send completed before the Writes in front of it were visible", round)
		}
		p.WaitOK(p.A, 1)
	}
}

func testReadSizes(s *Suite) {
	t := s.T
	p := s.Connect(nil, nil, PairConfig{MemSize: 5 << 20}, nil, nil)
	for i, n := range sizes {
		off := 1 + i%5
		fill(p.B.Mem[:n+16], uint64(i))
		clear(p.A.Mem[:n+64])
		sgl := []rdma.SGE{p.A.SGE(off+8, n)}
		if n == 0 && i%2 == 0 {
			sgl = nil
		}
		p.A.Post(t, rdma.SendWR{ID: uint64(i), Op: rdma.OpRead, Flags: rdma.FlagSignaled, SGL: sgl, RemoteAddr: p.B.At(off), RKey: p.B.MR.RKey()})
		if wc := p.WaitOK(p.A, 1)[0]; wc.ID != uint64(i) || wc.ByteLen != uint32(n) || wc.Recv {
			t.Fatalf("%+v", wc)
		}
		if !bytes.Equal(p.A.Mem[off+8:off+8+n], p.B.Mem[off:off+n]) || p.A.Mem[off+7] != 0 || p.A.Mem[off+8+n] != 0 {
			t.Fatalf("Read of %d bytes arrived wrong", n)
		}
	}
}

func testReadDepth(s *Suite) {
	t := s.T
	const n, size = 40, 5000
	for _, depth := range []int{1, 2, 3, 16} {
		p := s.Connect(nil, nil, PairConfig{IRD: depth, ORD: depth}, nil, func(b *End) {
			for i := range n {
				b.PostRecv(t, uint64(i), 600<<10+i*16, 16)
			}
		})
		if p.A.Est.ORD != depth || p.B.Est.IRD != depth {
			t.Fatalf("depth %d: active ORD %d, passive IRD %d", depth, p.A.Est.ORD, p.B.Est.IRD)
		}
		fill(p.B.Mem[:n*size], uint64(depth))
		// More Reads than may be outstanding, with Sends between: all wait their turn,
		// and complete in the order of posting.
		for i := range 30 {
			p.A.Post(t, rdma.SendWR{ID: uint64(2 * i), Op: rdma.OpRead, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{p.A.SGE(i*size, size)}, RemoteAddr: p.B.At(i * size), RKey: p.B.MR.RKey()},
				rdma.SendWR{ID: uint64(2*i + 1), Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{p.A.SGE(900<<10, 16)}})
		}
		for i, wc := range p.WaitOK(p.A, 60) {
			if wc.ID != uint64(i) {
				t.Fatalf("depth %d: completion of %d where %d is due", depth, wc.ID, i)
			}
		}
		if !bytes.Equal(p.A.Mem[:30*size], p.B.Mem[:30*size]) {
			t.Fatalf("depth %d: data wrong", depth)
		}
		p.WaitOK(p.B, 30)
	}
}

func testReadWithoutDepth(s *Suite) {
	t := s.T
	p := s.Connect(nil, nil, PairConfig{ActiveP: rdma.ConnParam{InitiatorDepth: 4}, PassiveP: rdma.ConnParam{ResponderResources: -1}}, nil, nil)
	if p.A.Est.ORD != 0 {
		t.Fatalf("ORD %d towards a peer that serves no Reads", p.A.Est.ORD)
	}
	p.A.Post(t, rdma.SendWR{ID: 5, Op: rdma.OpRead, SGL: []rdma.SGE{p.A.SGE(0, 8)}, RemoteAddr: p.B.At(0), RKey: p.B.MR.RKey()})
	if wc := p.Wait(p.A, 1)[0]; wc.ID != 5 || wc.Status != rdma.StatusLocalQPOperation {
		t.Fatalf("%+v", wc)
	}
}

func testFence(s *Suite) {
	t := s.T
	const n = 200000
	for _, op := range []rdma.Opcode{rdma.OpSend, rdma.OpWrite, rdma.OpRead} {
		p := s.Connect(nil, nil, PairConfig{}, nil, func(b *End) {
			b.PostRecv(t, 1, 0, 16)
		})
		fill(p.B.Mem[4096:4096+n], 5)
		want := bytes.Clone(p.B.Mem[4096 : 4096+n])
		wr := rdma.SendWR{ID: 2, Op: op, Flags: rdma.FlagFence | rdma.FlagSignaled, SGL: []rdma.SGE{p.A.SGE(900<<10, 16)}}
		switch op {
		case rdma.OpWrite: // into what is being read
			wr.RemoteAddr, wr.RKey = p.B.At(4096+n-16), p.B.MR.RKey()
		case rdma.OpRead:
			wr.RemoteAddr, wr.RKey = p.B.At(0), p.B.MR.RKey()
		}
		p.A.Post(t, rdma.SendWR{ID: 1, Op: rdma.OpRead, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{p.A.SGE(0, n)}, RemoteAddr: p.B.At(4096), RKey: p.B.MR.RKey()}, wr)
		if op == rdma.OpSend {
			// When the fenced Send is there, the Read must have completed.
			p.WaitOK(p.B, 1)
			p.A.Poll(t)
			if l := p.A.Pending(); len(l) == 0 || l[0].ID != 1 {
				t.Fatalf("fenced Send arrived before the Read in front of it had completed")
			}
		}
		for i, wc := range p.WaitOK(p.A, 2) {
			if wc.ID != uint64(i+1) {
				t.Fatalf("%v: completion of %d", op, wc.ID)
			}
		}
		if !bytes.Equal(p.A.Mem[:n], want) {
			t.Fatalf("%v with a fence overtook a Read", op)
		}
	}
}

func testUnsignalled(s *Suite) {
	t := s.T
	const depth = 8
	p := s.Connect(nil, nil, PairConfig{QP: rdma.QPConfig{MaxSend: depth}}, nil, nil)
	for round := range 50 {
		for i := range depth {
			p.B.PostRecv(t, 0, 0, 16)
			var f rdma.SendFlags
			if i == depth-1 {
				f = rdma.FlagSignaled
			}
			p.A.Post(t, rdma.SendWR{ID: uint64(round*depth + i), Op: rdma.OpSend, Flags: f, SGL: []rdma.SGE{p.A.SGE(0, 16)}})
		}
		// Slots come back with the completion of a later signalled one, not before.
		if _, err := p.A.QP.PostSend(rdma.SendWR{Op: rdma.OpSend}); err == nil {
			t.Fatal("posted more than the queue holds")
		}
		if wc := p.WaitOK(p.A, 1)[0]; wc.ID != uint64(round*depth+depth-1) {
			t.Fatalf("%+v", wc)
		}
		p.WaitOK(p.B, depth)
	}
	p.Settle()
	if l := p.A.Pending(); len(l) != 0 {
		t.Fatalf("unsignalled requests completed: %+v", l)
	}
}

// testUnsignalledRead: the completion of a later request says that a Read in front of it is done, too.
func testUnsignalledRead(s *Suite) {
	t := s.T
	const size = 300000
	p := s.Connect(nil, nil, PairConfig{MemSize: 2 << 20}, nil, nil)
	for round := range rounds(50, 15) {
		fill(p.B.Mem[:size], uint64(round))
		p.B.PostRecv(t, 1, 1<<20, 16)
		behind := rdma.SendWR{ID: 3, Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{p.A.SGE(1<<20, 16)}}
		p.A.Post(t, rdma.SendWR{ID: 1, Op: rdma.OpRead, SGL: []rdma.SGE{p.A.SGE(0, size)}, RemoteAddr: p.B.At(0), RKey: p.B.MR.RKey()},
			rdma.SendWR{ID: 2, Op: rdma.OpWrite, SGL: []rdma.SGE{p.A.SGE(1<<20, 64)}, RemoteAddr: p.B.At(1 << 20), RKey: p.B.MR.RKey()}, behind)
		if wc := p.WaitOK(p.A, 1)[0]; wc.ID != 3 {
			t.Fatalf("%+v", wc)
		}
		if !bytes.Equal(p.A.Mem[:size], p.B.Mem[:size]) {
			t.Fatalf("round %d: a Send completed before the Read in front of it", round)
		}
		p.WaitOK(p.B, 1)
	}
	p.Settle()
	if l := p.A.Pending(); len(l) != 0 {
		t.Fatalf("unsignalled requests completed: %+v", l)
	}
}

// testRandomTraffic runs random batches of all operations both ways at once and
// compares both memories with what they must be.
func testRandomTraffic(s *Suite) {
	t := s.T
	r := rng(t)
	const slots, slotSize = 32, 24 << 10
	cfg := PairConfig{IRD: 4, ORD: 4, MemSize: 4 * slots * slotSize}
	oneWaits := s.except["RandomTraffic/both wait"] != ""
	if oneWaits { // B has depth for all its Reads, and no fences
		cfg.ActiveP.ResponderResources, cfg.PassiveP.InitiatorDepth = slots, slots
	}
	p := s.Connect(nil, nil, cfg, nil, nil)
	if oneWaits && p.B.Est.ORD < slots {
		t.Fatalf("passive ORD %d", p.B.Est.ORD)
	}
	// Layout of each side: out (what it sends), in (what it receives by Send), window
	// (what the peer writes), sink (what it reads).
	out := func(i int) int { return i * slotSize }
	in := func(i int) int { return (slots + i) * slotSize }
	win := func(i int) int { return (2*slots + i) * slotSize }
	sink := func(i int) int { return (3*slots + i) * slotSize }
	if _, err := p.B.QP.PostRecv(rdma.RecvWR{}); err != nil {
		t.Fatal(err)
	}
	p.A.Post(t, rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagSignaled}) // lets B speak
	p.WaitOK(p.B, 1)
	p.WaitOK(p.A, 1)
	for round := range rounds(120, 20) {
		type check struct {
			what     string
			got, exp []byte
		}
		var checks []check
		signaled := map[*End]int{}
		recvs := map[*End]int{}
		fill(p.A.Mem[:slots*slotSize], r.Uint64())
		fill(p.B.Mem[:slots*slotSize], r.Uint64())
		for _, ends := range [][2]*End{{p.A, p.B}, {p.B, p.A}} {
			from, to := ends[0], ends[1]
			var wrs []rdma.SendWR
			n := 1 + r.IntN(slots)
			for i := range n {
				size := r.IntN(slotSize)
				if r.IntN(3) == 0 {
					size = r.IntN(600)
				}
				op := r.IntN(3)
				if op == 2 && s.except["RandomTraffic/empty Reads"] != "" {
					size = max(size, 1)
				}
				wr := rdma.SendWR{ID: uint64(i), SGL: []rdma.SGE{from.SGE(out(i), size)}}
				if r.IntN(2) == 0 || i == n-1 {
					wr.Flags |= rdma.FlagSignaled
					signaled[from]++
				}
				if r.IntN(8) == 0 && !(oneWaits && from == p.B) {
					wr.Flags |= rdma.FlagFence
				}
				src := from.Mem[out(i) : out(i)+size]
				switch op {
				case 0:
					wr.Op = rdma.OpSend
					k := recvs[to]
					recvs[to]++
					to.PostRecv(t, uint64(k), in(k), slotSize)
					checks = append(checks, check{fmt.Sprintf("Send %d of %d bytes", i, size), to.Mem[in(k) : in(k)+size], src})
				case 1:
					wr.Op = rdma.OpWrite
					wr.RemoteAddr, wr.RKey = to.At(win(i)), to.MR.RKey()
					checks = append(checks, check{fmt.Sprintf("Write %d of %d bytes", i, size), to.Mem[win(i) : win(i)+size], src})
				case 2:
					wr.Op = rdma.OpRead
					j := r.IntN(slots)
					wr.SGL[0] = from.SGE(sink(i), size)
					wr.RemoteAddr, wr.RKey = to.At(out(j)), to.MR.RKey()
					checks = append(checks, check{fmt.Sprintf("Read %d of %d bytes", i, size), from.Mem[sink(i) : sink(i)+size], to.Mem[out(j) : out(j)+size]})
				}
				wrs = append(wrs, wr)
			}
			for len(wrs) > 0 {
				k := 1 + r.IntN(len(wrs))
				from.Post(t, wrs[:k]...)
				wrs = wrs[k:]
				if r.IntN(3) == 0 {
					from.Poll(t)
				}
			}
		}
		for _, e := range []*End{p.A, p.B} {
			last := -1
			lastRecv := -1
			for _, wc := range p.WaitOK(e, signaled[e]+recvs[e]) {
				ord := &last
				if wc.Recv {
					ord = &lastRecv
				}
				if int(wc.ID) <= *ord {
					t.Fatalf("round %d: %s: completion of %d after %d", round, e.Name, wc.ID, *ord)
				}
				*ord = int(wc.ID)
			}
		}
		p.Settle()
		for _, c := range checks { // where a Write completes when it has been sent, the last ones may be on their way for long
			p.Until(fmt.Sprintf("round %d: %s to arrive right", round, c.what), func() bool { return bytes.Equal(c.got, c.exp) })
		}
	}
}

// testTwoQueues: send and receive completions on CQs of their own, which one
// owner polls, arms and sleeps on.
func testTwoQueues(s *Suite) {
	t := s.T
	a := NewSide(t, "active", deviceOf(s), 256, 1<<20)
	b := NewSide(t, "passive", deviceOf(s), 256, 1<<20)
	rcq := NewSide(t, "receive", deviceOf(s), 256, 4096)
	t.Cleanup(func() { a.Close(t); b.Close(t); rcq.Close(t) })
	p := s.Connect(a, b, PairConfig{TweakB: func(c *rdma.QPConfig) { c.RecvCQ = rcq.CQ }}, nil, func(e *End) {
		for i := range 32 {
			e.PostRecv(t, uint64(i), i*64, 64)
		}
	})
	num := p.B.QP.Num()
	fill(p.A.Mem[:100<<10], 1)
	p.A.Post(t, rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{p.A.SGE(0, 64)}})
	Until(t, "the first message", func() { a.Poll(t); rcq.Poll(t) }, func() bool { return len(rcq.got[num]) == 1 })
	if len(b.got[num]) != 0 {
		t.Fatalf("receive completion on the send queue's CQ: %+v", b.got[num])
	}
	// The Read's response is brought in by whichever CQ is polled; its completion
	// belongs to the send CQ, and makes the descriptor of that readable.
	for round := range 50 {
		p.B.Post(t, rdma.SendWR{ID: 9, Op: rdma.OpRead, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{b.SGE(8192, 100<<10)}, RemoteAddr: a.At(0), RKey: a.MR.RKey()})
		b.Poll(t)
		again, err := b.CQ.Arm()
		if err != nil {
			t.Fatal(err)
		}
		if again {
			b.Poll(t)
		}
		if len(b.got[num]) == round+1 {
			continue // the Read was that fast
		}
		Until(t, "the descriptor of the send CQ", func() { a.Poll(t); rcq.Poll(t) }, func() bool { return readable(t, b.CQ.FD(), 0) })
		Until(t, "the Read", func() { a.Poll(t); rcq.Poll(t); b.Poll(t) }, func() bool { return len(b.got[num]) == round+1 })
		if !bytes.Equal(b.Mem[8192:8192+100<<10], a.Mem[:100<<10]) {
			t.Fatal("Read data wrong")
		}
	}
	p.A.Post(t, rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{p.A.SGE(0, 64)}})
	Until(t, "the second message", func() { a.Poll(t); rcq.Poll(t); b.Poll(t) }, func() bool { return len(rcq.got[num]) == 2 })
	if err := p.B.Conn.Disconnect(); err != nil {
		t.Fatal(err)
	}
	Until(t, "flushed receives", func() { a.Poll(t); rcq.Poll(t); b.Poll(t) }, func() bool { return len(rcq.got[num]) == 32 })
}

// testManyQPs: more QPs on a CQ than a provider may want to look at one by one.
func testManyQPs(s *Suite) {
	t := s.T
	const n, msgs = 24, 40
	a := NewSide(t, "active", deviceOf(s), n*64, 4<<20)
	b := NewSide(t, "passive", deviceOf(s), n*64, 4<<20)
	t.Cleanup(func() { a.Close(t); b.Close(t) })
	cfg := PairConfig{QP: rdma.QPConfig{MaxSend: 16, MaxRecv: 16}, IRD: 2, ORD: 2}
	const room = 128 << 10
	var pairs []*Pair
	sent, got := make([]int, n), make([]int, n)
	byNum := map[uint32]int{}
	for i := range n {
		pairs = append(pairs, s.Connect(a, b, cfg, nil, func(e *End) {
			for range 16 {
				e.PostRecv(t, uint64(i), i*room, 64<<10)
			}
		}))
		byNum[pairs[i].B.QP.Num()] = i
	}
	if len(byNum) != n {
		t.Fatal("QP numbers are not unique")
	}
	for i := range n {
		fill(a.Mem[i*room:i*room+64<<10], uint64(i))
	}
	r := rng(t)
	Until(t, "all messages", func() {
		i := r.IntN(n)
		if sent[i] < msgs && sent[i]-got[i] < 8 {
			pairs[i].A.Post(t, rdma.SendWR{ID: uint64(i), Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{a.SGE(i*room, 1+r.IntN(64<<10))}})
			sent[i]++
		}
		a.Poll(t)
		b.Poll(t)
		for num, l := range b.got {
			i := byNum[num]
			for _, wc := range l {
				if wc.Status != rdma.StatusSuccess || !wc.Recv || wc.ID != uint64(i) {
					t.Fatalf("QP %d: %+v", i, wc)
				}
				if !bytes.Equal(b.Mem[i*room:i*room+int(wc.ByteLen)], a.Mem[i*room:i*room+int(wc.ByteLen)]) {
					t.Fatalf("QP %d: message wrong", i)
				}
				got[i]++
				pairs[i].B.PostRecv(t, uint64(i), i*room, 64<<10)
			}
			delete(b.got, num)
		}
	}, func() bool {
		for i := range n {
			if got[i] < msgs {
				return false
			}
		}
		return true
	})
	// One of them ends; the others do not notice.
	pairs[3].A.Conn.Disconnect()
	pairs[3].Ended(pairs[3].B)
	for i, p := range pairs {
		if i == 3 {
			continue
		}
		p.A.Post(t, rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{a.SGE(0, 100)}})
		p.WaitOK(p.B, 1)
	}
}

// deviceOf is the device behind the suite's address.
func deviceOf(s *Suite) rdma.Device {
	s.T.Helper()
	c, err := s.P.Dial(context.Background(), netip.Addr{}, s.L.Addr())
	if err != nil {
		s.T.Fatal(err)
	}
	defer c.Close()
	if s.seen != nil {
		s.seen(c.Device())
	}
	return c.Device()
}

func deviceInfo(s *Suite) rdma.DeviceInfo {
	d, err := s.P.Devices()
	if err != nil || len(d) == 0 {
		s.T.Fatalf("devices: %v, %d of them", err, len(d))
	}
	return d[0]
}
