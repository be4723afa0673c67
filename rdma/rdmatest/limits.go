package rdmatest

import (
	"bytes"
	"errors"

	"rdblk/rdma"
)

func testQueueFull(s *Suite) {
	t := s.T
	const depth = 10
	p := s.Connect(nil, nil, PairConfig{QP: rdma.QPConfig{MaxSend: depth, MaxRecv: depth}}, nil, nil)
	var recvs []rdma.RecvWR
	for i := range depth + 3 {
		recvs = append(recvs, rdma.RecvWR{ID: uint64(i), SGL: []rdma.SGE{p.B.SGE(0, 16)}})
	}
	for round := range 5 {
		n, err := p.B.QP.PostRecv(recvs...)
		if n != depth || !errors.Is(err, rdma.ErrQueueFull) {
			t.Fatalf("round %d: posted %d receives to a queue of %d: %v", round, n, depth, err)
		}
		var sends []rdma.SendWR
		for i := range depth + 3 {
			sends = append(sends, rdma.SendWR{ID: uint64(i), Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{p.A.SGE(0, 16)}})
		}
		n, err = p.A.QP.PostSend(sends...)
		if n != depth || !errors.Is(err, rdma.ErrQueueFull) {
			t.Fatalf("round %d: posted %d sends to a queue of %d: %v", round, n, depth, err)
		}
		// What was accepted is done, and no more.
		for i, wc := range p.WaitOK(p.A, depth) {
			if wc.ID != uint64(i) {
				t.Fatalf("%+v", wc)
			}
		}
		p.WaitOK(p.B, depth)
	}
	p.Settle()
	if a, b := p.A.Pending(), p.B.Pending(); len(a)+len(b) != 0 {
		t.Fatalf("completions of requests that were refused: %+v %+v", a, b)
	}
}

func testPostLimits(s *Suite) {
	t := s.T
	info := deviceInfo(s)
	p := s.Connect(nil, nil, PairConfig{QP: rdma.QPConfig{MaxSendSGE: 2, MaxRecvSGE: 2, MaxInline: 32}}, nil, nil)
	a := p.A
	reg := func(n int, access rdma.Access) rdma.MR {
		mr, err := a.PD.Register(Mem(t, n), access)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { mr.Deregister() })
		return mr
	}
	sge := func(mr rdma.MR, off, n int) []rdma.SGE {
		return []rdma.SGE{{Addr: mr.Addr() + uint64(off), Len: uint32(n), LKey: mr.LKey()}}
	}
	readOnly := reg(4096, 0)
	localWrite := reg(4096, rdma.AccessLocalWrite)
	gone := reg(4096, AllAccess)
	gone.Deregister()
	otherPD, err := a.Dev.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := otherPD.Register(Mem(t, 4096), AllAccess)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { foreign.Deregister(); otherPD.Close() })
	mr := a.MR
	size := mr.Len()
	three := []rdma.SGE{a.SGE(0, 1), a.SGE(1, 1), a.SGE(2, 1)}
	bad := []struct {
		what string
		wr   rdma.SendWR
	}{
		{"no opcode", rdma.SendWR{SGL: sge(mr, 0, 1)}},
		{"unknown opcode", rdma.SendWR{Op: 99, SGL: sge(mr, 0, 1)}},
		{"unknown flag", rdma.SendWR{Op: rdma.OpSend, Flags: 0x80, SGL: sge(mr, 0, 1)}},
		{"too many SGEs", rdma.SendWR{Op: rdma.OpSend, SGL: three}},
		{"too many SGEs in a Write", rdma.SendWR{Op: rdma.OpWrite, SGL: three}},
		{"too much inline", rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagInline, SGL: []rdma.SGE{a.SGE(0, 33)}}},
		{"too much inline in two pieces", rdma.SendWR{Op: rdma.OpWrite, Flags: rdma.FlagInline, SGL: []rdma.SGE{a.SGE(0, 32), a.SGE(0, 1)}}},
		{"inline Read", rdma.SendWR{Op: rdma.OpRead, Flags: rdma.FlagInline, SGL: sge(mr, 0, 1)}},
		{"Read with two SGEs", rdma.SendWR{Op: rdma.OpRead, SGL: three[:2]}},
		{"wrong lkey", rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{{Addr: mr.Addr(), Len: 1, LKey: mr.LKey() ^ 1}}}},
		{"wrong index", rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{{Addr: mr.Addr(), Len: 1, LKey: mr.LKey() ^ 1<<20}}}},
		{"lkey 0", rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{{Addr: mr.Addr(), Len: 1}}}},
		{"key of another domain", rdma.SendWR{Op: rdma.OpSend, SGL: sge(foreign, 0, 1)}},
		{"deregistered", rdma.SendWR{Op: rdma.OpSend, SGL: sge(gone, 0, 1)}},
		{"one byte over the end", rdma.SendWR{Op: rdma.OpSend, SGL: sge(mr, size-1, 2)}},
		{"one byte before the start", rdma.SendWR{Op: rdma.OpWrite, SGL: sge(mr, -1, 2)}},
		{"far outside", rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{{Addr: 8, Len: 1, LKey: mr.LKey()}}}},
		{"wraps 2^64", rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{{Addr: ^uint64(0), Len: 0xFFFFFFFF, LKey: mr.LKey()}}}},
		{"second SGE bad", rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{a.SGE(0, 1), {Addr: mr.Addr(), Len: 1, LKey: 0}}}},
		{"Read into memory without local write", rdma.SendWR{Op: rdma.OpRead, SGL: sge(readOnly, 0, 8)}},
	}
	if info.Transport == rdma.TransportIWARP {
		bad = append(bad, struct {
			what string
			wr   rdma.SendWR
		}{"Read into memory without remote write", rdma.SendWR{Op: rdma.OpRead, SGL: sge(localWrite, 0, 8)}})
	}
	if info.MemWindows {
		mw, err := a.PD.AllocMW()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { mw.Close() })
		fmw, err := otherPD.AllocMW()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { fmw.Close() })
		key := mw.RKey()
		for _, w := range []struct {
			what string
			wr   rdma.SendWR
		}{
			{"bind without window", rdma.SendWR{Op: rdma.OpBindMW, SGL: sge(mr, 0, 8)}},
			{"bind of another domain's window", rdma.SendWR{Op: rdma.OpBindMW, Window: fmw, SGL: sge(mr, 0, 8)}},
			{"bind without range", rdma.SendWR{Op: rdma.OpBindMW, Window: mw}},
			{"bind over the end", rdma.SendWR{Op: rdma.OpBindMW, Window: mw, SGL: sge(mr, size-8, 9)}},
			{"bind of local rights", rdma.SendWR{Op: rdma.OpBindMW, Window: mw, Access: rdma.AccessLocalWrite, SGL: sge(mr, 0, 8)}},
			{"bind to memory without that right", rdma.SendWR{Op: rdma.OpBindMW, Window: mw, Access: rdma.AccessRemoteRead, SGL: sge(localWrite, 0, 8)}},
			{"inline bind", rdma.SendWR{Op: rdma.OpBindMW, Flags: rdma.FlagInline, Window: mw, SGL: sge(mr, 0, 8)}},
		} {
			bad = append(bad, w)
		}
		t.Cleanup(func() {
			if mw.RKey() != key {
				t.Error("a refused bind changed the window's key")
			}
		})
	}
	good := rdma.SendWR{ID: 1, Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: sge(mr, 0, 8)}
	never := rdma.SendWR{ID: 3, Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: sge(mr, 0, 8)}
	for _, b := range bad {
		p.B.PostRecv(t, 1, 0, 64)
		b.wr.ID, b.wr.Flags = 2, b.wr.Flags|rdma.FlagSignaled
		if n, err := a.QP.PostSend(good, b.wr, never); n != 1 || !errors.Is(err, rdma.ErrInvalid) {
			t.Fatalf("%s: %d posted, %v", b.what, n, err)
		}
		p.WaitOK(a, 1)
		p.WaitOK(p.B, 1)
	}
	for _, r := range []struct {
		what string
		wr   rdma.RecvWR
	}{
		{"too many SGEs", rdma.RecvWR{SGL: three}},
		{"wrong lkey", rdma.RecvWR{SGL: []rdma.SGE{{Addr: mr.Addr(), Len: 1, LKey: mr.LKey() + 1}}}},
		{"no local write", rdma.RecvWR{SGL: sge(readOnly, 0, 8)}},
		{"over the end", rdma.RecvWR{SGL: sge(mr, size-1, 2)}},
		{"other domain", rdma.RecvWR{SGL: sge(foreign, 0, 2)}},
	} {
		if n, err := a.QP.PostRecv(rdma.RecvWR{SGL: sge(mr, 0, 8)}, r.wr, rdma.RecvWR{}); n != 1 || !errors.Is(err, rdma.ErrInvalid) {
			t.Fatalf("receive, %s: %d posted, %v", r.what, n, err)
		}
	}
	// Legal corners: a zero-length SGE names nothing, a region's last byte is its own.
	p.B.PostRecv(t, 1, 0, 64)
	a.Post(t, rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{{LKey: 77}, a.SGE(size-1, 1)}})
	p.WaitOK(a, 1)
	if wc := p.WaitOK(p.B, 1)[0]; wc.ByteLen != 1 {
		t.Fatalf("%+v", wc)
	}
}

func testCreateLimits(s *Suite) {
	t := s.T
	info := deviceInfo(s)
	p := s.Connect(nil, nil, PairConfig{}, nil, nil)
	if _, err := p.A.Conn.CreateQP(p.A.PD, qpConfig(rdma.QPConfig{MaxSend: 1, MaxRecv: 1}, p.A.CQ, nil)); !errors.Is(err, rdma.ErrInvalid) {
		t.Errorf("second QP on a connection: %v", err)
	}
	for what, cfg := range map[string]rdma.QPConfig{
		"send queue":     {MaxSend: info.MaxQPWR + 1, MaxRecv: 1},
		"receive queue":  {MaxSend: 1, MaxRecv: info.MaxQPWR + 1},
		"negative depth": {MaxSend: -1, MaxRecv: 1},
		"send SGEs":      {MaxSend: 1, MaxRecv: 1, MaxSendSGE: info.MaxSGE + 1},
		"receive SGEs":   {MaxSend: 1, MaxRecv: 1, MaxRecvSGE: info.MaxSGE + 1},
		"inline":         {MaxSend: 1, MaxRecv: 1, MaxInline: info.MaxInline + 1},
	} {
		c := s.dial()
		if q, err := c.CreateQP(p.A.PD, qpConfig(cfg, p.A.CQ, nil)); !errors.Is(err, rdma.ErrInvalid) {
			t.Errorf("%s over the limit: %v", what, err)
			if err == nil {
				q.Close()
			}
		}
		c.Close()
	}
	c := s.dial()
	if _, err := c.CreateQP(p.A.PD, rdma.QPConfig{MaxSend: 1, MaxRecv: 1}); !errors.Is(err, rdma.ErrInvalid) {
		t.Errorf("QP without CQs: %v", err)
	}
	if _, err := c.CreateQP(nil, qpConfig(rdma.QPConfig{MaxSend: 1, MaxRecv: 1}, p.A.CQ, nil)); !errors.Is(err, rdma.ErrInvalid) {
		t.Errorf("QP without domain: %v", err)
	}
	c.Close()
	for _, depth := range []int{0, -1, info.MaxCQE + 1} {
		if cq, err := p.A.Dev.CreateCQ(depth); !errors.Is(err, rdma.ErrInvalid) {
			t.Errorf("CQ of depth %d: %v", depth, err)
			if err == nil {
				cq.Close()
			}
		}
	}
	for what, f := range map[string]func() (rdma.MR, error){
		"empty memory":                     func() (rdma.MR, error) { return p.A.PD.Register(nil, AllAccess) },
		"remote write without local write": func() (rdma.MR, error) { return p.A.PD.Register(p.A.Mem, rdma.AccessRemoteWrite) },
		"unknown right":                    func() (rdma.MR, error) { return p.A.PD.Register(p.A.Mem, 0x80) },
	} {
		if mr, err := f(); !errors.Is(err, rdma.ErrInvalid) {
			t.Errorf("register %s: %v", what, err)
			if err == nil {
				mr.Deregister()
			}
		}
	}
}

// testCQDepth: a CQ cannot overrun.
func testCQDepth(s *Suite) {
	t := s.T
	dev := deviceOf(s)
	a := NewSide(t, "active", dev, 32, 4096)
	b := NewSide(t, "passive", dev, 64, 4096)
	t.Cleanup(func() { a.Close(t); b.Close(t) })
	c := s.dial()
	if q, err := c.CreateQP(a.PD, qpConfig(rdma.QPConfig{MaxSend: 1 << 10, MaxRecv: 16}, a.CQ, nil)); err == nil {
		t.Error("QP with more requests than its CQ has entries")
		q.Close()
	}
	c.Close()
	p := s.Connect(a, b, PairConfig{QP: rdma.QPConfig{MaxSend: 16, MaxRecv: 16}}, nil, nil)
	// Fill every slot many times over while completions are taken one by one.
	next := 0
	for got := 0; got < 500; {
		for {
			if _, err := p.B.QP.PostRecv(rdma.RecvWR{SGL: []rdma.SGE{b.SGE(0, 16)}}); err != nil {
				break
			}
		}
		for next < got+16 { // for each of which there is a receive: a Send may complete before it has arrived
			if _, err := p.A.QP.PostSend(rdma.SendWR{ID: uint64(next), Op: rdma.OpSend, Flags: rdma.FlagSignaled}); err != nil {
				break
			}
			next++
		}
		b.Poll(t)
		got += len(b.got[p.B.QP.Num()])
		b.got[p.B.QP.Num()] = nil
		var one [1]rdma.WC
		n, _, err := a.CQ.Poll(one[:])
		if err != nil {
			t.Fatal(err)
		}
		if n == 1 && one[0].Status != rdma.StatusSuccess {
			t.Fatalf("%+v", one[0])
		}
		if n == 0 {
			b.Poll(t)
		}
		if next > 100000 {
			t.Fatal("no progress")
		}
	}
}

func testReceiverNotReady(s *Suite) {
	t := s.T
	if deviceInfo(s).RNRRetry {
		p := s.Connect(nil, nil, PairConfig{ActiveP: rdma.ConnParam{RNRRetry: 7}}, nil, nil)
		p.A.Post(t, rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{p.A.SGE(0, 8)}})
		p.Settle()
		p.B.PostRecv(t, 1, 0, 8)
		p.WaitOK(p.A, 1)
		return
	}
	p := s.Connect(nil, nil, PairConfig{}, nil, func(b *End) { b.PostRecv(t, 1, 0, 16) })
	fill(p.A.Mem[:32], 9)
	before := bytes.Clone(p.B.Mem[16:])
	p.A.Post(t, rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{p.A.SGE(0, 16)}}, rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{p.A.SGE(0, 16)}})
	p.WaitOK(p.B, 1)
	if err := p.Ended(p.B); err == nil || errors.Is(err, rdma.ErrDisconnected) && s.except["EndReasons"] == "" {
		t.Errorf("the side without a receive: %v", err)
	}
	if err := p.Ended(p.A); err == nil || errors.Is(err, rdma.ErrDisconnected) && s.except["EndReasons"] == "" {
		t.Errorf("the sending side: %v", err)
	}
	if !bytes.Equal(p.B.Mem[16:], before) {
		t.Error("memory changed")
	}
}

func testMessageTooLong(s *Suite) {
	t := s.T
	for _, n := range []int{17, 5000, 300000} {
		p := s.Connect(nil, nil, PairConfig{}, nil, func(b *End) {
			b.PostRecv(t, 1, 64, 16)
			b.PostRecv(t, 2, 64, 16)
		})
		fill(p.A.Mem[:n], 3)
		before := bytes.Clone(p.B.Mem)
		p.A.Post(t, rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{p.A.SGE(0, n)}})
		l := p.Wait(p.B, 2)
		if l[0].ID != 1 || l[0].Status != rdma.StatusLocalLength || !l[0].Recv || l[1].ID != 2 || l[1].Status != rdma.StatusFlush {
			t.Errorf("%d bytes into a buffer of 16: %+v", n, l)
		}
		p.Ended(p.A)
		p.Ended(p.B)
		copy(before[64:80], p.B.Mem[64:80]) // may hold the beginning
		if !bytes.Equal(p.B.Mem, before) {
			t.Errorf("%d bytes: memory beyond the receive buffer changed", n)
		}
	}
}
