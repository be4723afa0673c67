package rdmatest

import (
	"bytes"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/rdma"
)

// readable waits up to ms milliseconds until fd is readable.
func readable(t testing.TB, fd, ms int) bool {
	t.Helper()
	for {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, ms)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		return n == 1
	}
}

func testDisconnectFlushes(s *Suite) {
	t := s.T
	for _, who := range []string{"A", "B"} {
		p := s.Connect(nil, nil, PairConfig{IRD: 1, ORD: 1}, func(e *End) {
			for i := range 5 {
				e.PostRecv(t, uint64(100+i), i*64, 64)
			}
		}, nil)
		stillWorks(t, p)
		n := 8
		switch info := p.A.Dev.Info(); {
		case !info.Autonomous:
			// A Read that will not be answered, because B is not polled, and requests behind it.
			p.A.Post(t, rdma.SendWR{ID: 1, Op: rdma.OpRead, SGL: []rdma.SGE{p.A.SGE(0, 64)}, RemoteAddr: p.B.At(0), RKey: p.B.MR.RKey()},
				rdma.SendWR{ID: 2, Op: rdma.OpRead, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{p.A.SGE(0, 64)}, RemoteAddr: p.B.At(0), RKey: p.B.MR.RKey()},
				rdma.SendWR{ID: 3, Op: rdma.OpSend, Flags: rdma.FlagFence})
		case info.RNRRetry:
			// The device would answer. It waits with Sends for which B has no receive.
			p.A.Post(t, rdma.SendWR{ID: 1, Op: rdma.OpSend}, rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.FlagSignaled},
				rdma.SendWR{ID: 3, Op: rdma.OpSend, Flags: rdma.FlagFence})
		default:
			n = 5 // nothing would stay in the send queue
		}
		p.A.Poll(t)
		end := p.A
		if who == "B" {
			end = p.B
		}
		done := make(chan error)
		go func() { done <- end.Conn.Disconnect() }() // not the owner
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		// Everything comes back, flushed, signalled or not, in order of posting.
		var sends, recvs []rdma.WC
		for _, wc := range p.Wait(p.A, n) {
			if wc.Status != rdma.StatusFlush {
				t.Errorf("%s disconnects: %+v", who, wc)
			}
			if wc.Recv {
				recvs = append(recvs, wc)
			} else {
				sends = append(sends, wc)
			}
		}
		for i, wc := range sends {
			if wc.ID != uint64(1+i) {
				t.Errorf("send queue flushed %d where %d is due", wc.ID, 1+i)
			}
		}
		for i, wc := range recvs {
			if wc.ID != uint64(100+i) {
				t.Errorf("receive queue flushed %d where %d is due", wc.ID, 100+i)
			}
		}
		wantErr(t, "orderly end, the one side", p.Ended(p.A), rdma.ErrDisconnected)
		wantErr(t, "orderly end, the other side", p.Ended(p.B), rdma.ErrDisconnected)
		// Later posts are accepted and flushed.
		p.A.Post(t, rdma.SendWR{ID: 8, Op: rdma.OpSend})
		p.A.PostRecv(t, 9, 0, 64)
		for _, wc := range p.Wait(p.A, 2) {
			if wc.Status != rdma.StatusFlush || wc.ID != 8 && wc.ID != 9 || wc.Recv != (wc.ID == 9) {
				t.Errorf("posted after the end: %+v", wc)
			}
		}
		if err := p.A.Conn.Disconnect(); err != nil {
			t.Errorf("second disconnect: %v", err)
		}
	}
}

// testDisconnectFlushesReads: Reads that wait for their answers come back when their own side disconnects, in order:
// those that are answered, and from the first that is not all others flushed.
func testDisconnectFlushesReads(s *Suite) {
	t := s.T
	const n, size = 8, 1 << 20
	for range rounds(10, 3) {
		p := s.Connect(nil, nil, PairConfig{MemSize: n * size}, nil, nil)
		for i := range n {
			p.A.Post(t, rdma.SendWR{ID: uint64(i), Op: rdma.OpRead, Flags: rdma.FlagSignaled,
				SGL: []rdma.SGE{p.A.SGE(i*size, size)}, RemoteAddr: p.B.At(0), RKey: p.B.MR.RKey()})
		}
		if err := p.A.Conn.Disconnect(); err != nil {
			t.Fatal(err)
		}
		flushed := false
		for i, wc := range p.Wait(p.A, n) {
			flushed = flushed || wc.Status == rdma.StatusFlush
			if wc.ID != uint64(i) || wc.Status != rdma.StatusFlush && (flushed || wc.Status != rdma.StatusSuccess) {
				t.Errorf("completion %d: %+v", i, wc)
			}
		}
		if !flushed {
			t.Log("all Reads were answered before the end")
		}
		wantErr(t, "orderly end", p.Ended(p.A), rdma.ErrDisconnected)
		if p.Ended(p.B) == nil { // its answers are cut short: siw takes that for a fault of the peer's
			t.Error("no reason on the other side")
		}
	}
}

// testDisconnectDelivers: what had completed before an orderly end arrives.
func testDisconnectDelivers(s *Suite) {
	t := s.T
	for range rounds(20, 8) {
		p := s.Connect(nil, nil, PairConfig{}, nil, func(e *End) {
			for i := range 10 {
				e.PostRecv(t, uint64(i), i*20000, 20000)
			}
		})
		for i := range 10 {
			p.A.Post(t, rdma.SendWR{ID: uint64(i), Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{p.A.SGE(i, 20000)}})
		}
		// B is not polled before A is gone.
		Until(t, "sends", func() { p.A.Poll(t) }, func() bool { return len(p.A.Pending()) == 10 })
		p.A.Conn.Disconnect()
		p.A.Poll(t)
		p.WaitOK(p.B, 10)
		wantErr(t, "end", p.Ended(p.B), rdma.ErrDisconnected)
	}
}

// testDisconnectWakes: an owner that sleeps on the descriptor learns of a
// Disconnect from elsewhere, and of one by the peer.
func testDisconnectWakes(s *Suite) {
	t := s.T
	for round := range rounds(20, 8) {
		p := s.Connect(nil, nil, PairConfig{}, func(e *End) { e.PostRecv(t, 1, 0, 64) }, func(e *End) { e.PostRecv(t, 1, 0, 64) })
		p.Settle()
		for _, e := range []*End{p.A, p.B} {
			if again, err := e.CQ.Arm(); err != nil || again {
				t.Fatalf("idle CQ: again %v, %v", again, err)
			}
			if readable(t, e.CQ.FD(), 0) {
				t.Fatal("descriptor of an idle CQ is readable")
			}
		}
		who, peer := p.A, p.B
		if round%2 == 1 {
			who, peer = peer, who
		}
		go who.Conn.Disconnect()
		for _, e := range []*End{who, peer} {
			if !readable(t, e.CQ.FD(), int(Patience/time.Millisecond)) {
				t.Fatalf("%s sleeps on", e.Name)
			}
			Until(t, "the flushed receive", func() { e.Poll(t) }, func() bool { return len(e.Pending()) == 1 })
		}
	}
}

// testCloseDrops: after Close no completion comes, and no memory is touched.
func testCloseDrops(s *Suite) {
	t := s.T
	dev := deviceOf(s)
	a, b := NewSide(t, "active", dev, 4096, 4<<20), NewSide(t, "passive", dev, 4096, 4<<20)
	t.Cleanup(func() { a.Close(t); b.Close(t) })
	witness := s.Connect(a, b, PairConfig{}, nil, nil)
	for round := range rounds(30, 9) {
		p := s.Connect(a, b, PairConfig{}, func(e *End) {
			for i := range 8 {
				e.PostRecv(t, uint64(i), i*4096, 4096)
			}
		}, func(e *End) {
			for i := range 8 {
				e.PostRecv(t, uint64(i), i*4096, 4096)
			}
		})
		post := func(from, to *End) {
			for range 4 {
				from.Post(t, rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{from.SGE(1<<20, 3000)}},
					rdma.SendWR{Op: rdma.OpWrite, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{from.SGE(1<<20, 1<<20)}, RemoteAddr: to.At(2 << 20), RKey: to.MR.RKey()},
					rdma.SendWR{Op: rdma.OpRead, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{from.SGE(3<<20, 1<<20)}, RemoteAddr: to.At(0), RKey: to.MR.RKey()})
			}
		}
		post(p.A, p.B)
		post(p.B, p.A)
		for range round {
			p.Progress()
		}
		num := p.A.QP.Num()
		if round%3 == 0 { // completions lie in the CQ
			var none []rdma.WC
			a.CQ.Poll(none)
		}
		if err := p.A.QP.Close(); err != nil {
			t.Fatal(err)
		}
		a.got[num] = nil
		fill(a.Mem, uint64(round))
		before := bytes.Clone(a.Mem)
		p.Ended(p.B)
		p.Settle()
		if l := a.got[num]; len(l) != 0 {
			t.Fatalf("completions of a closed QP: %+v", l)
		}
		if !bytes.Equal(a.Mem, before) {
			t.Fatal("memory of a closed QP changed")
		}
		if err := p.A.QP.Close(); err != nil {
			t.Errorf("second Close: %v", err)
		}
		p.Close()
		stillWorks(t, witness)
	}
}

func testCloseOrder(s *Suite) {
	t := s.T
	dev := deviceOf(s)
	a := NewSide(t, "active", dev, 512, 4096)
	t.Cleanup(func() { a.Close(t) })
	p := s.Connect(a, nil, PairConfig{}, nil, nil)
	wantErr(t, "close CQ with a QP", a.CQ.Close(), rdma.ErrInvalid)
	wantErr(t, "close PD with a QP", a.PD.Close(), rdma.ErrInvalid)
	wantErr(t, "close device with objects", dev.Close(), rdma.ErrInvalid)
	stillWorks(t, p) // a refused Close changes nothing
	p.A.Conn.Disconnect()
	p.Ended(p.B)
	p.Settle()
	wantErr(t, "close CQ with a QP in error", a.CQ.Close(), rdma.ErrInvalid)
}

func testClosedObjects(s *Suite) {
	t := s.T
	p := s.Connect(nil, nil, PairConfig{}, nil, nil)
	p.A.QP.Close()
	_, err := p.A.QP.PostSend(rdma.SendWR{Op: rdma.OpSend})
	wantErr(t, "PostSend after Close", err, rdma.ErrClosed)
	_, err = p.A.QP.PostRecv(rdma.RecvWR{})
	wantErr(t, "PostRecv after Close", err, rdma.ErrClosed)
	p.A.Conn.Close()
	wantErr(t, "Disconnect after Close", p.A.Conn.Disconnect(), rdma.ErrClosed)
	if p.A.Conn.Err() == nil {
		t.Error("closed connection without a reason")
	}
	dev := deviceOf(s)
	cq, err := dev.CreateCQ(16)
	if err != nil {
		t.Fatal(err)
	}
	pd, err := dev.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(cq.Close(), cq.Close(), pd.Close(), pd.Close()); err != nil {
		t.Errorf("close twice: %v", err)
	}
	_, _, err = cq.Poll(make([]rdma.WC, 1))
	wantErr(t, "Poll after Close", err, rdma.ErrClosed)
	_, err = cq.Arm()
	wantErr(t, "Arm after Close", err, rdma.ErrClosed)
	_, err = pd.Register(p.A.Mem, 0)
	wantErr(t, "Register after Close", err, rdma.ErrClosed)
	c := s.dial()
	if _, err := c.CreateQP(p.B.PD, qpConfig(rdma.QPConfig{MaxSend: 1, MaxRecv: 1}, cq, nil)); err == nil {
		t.Error("QP on a closed CQ")
	}
	if _, err := c.CreateQP(pd, qpConfig(rdma.QPConfig{MaxSend: 1, MaxRecv: 1}, p.B.CQ, nil)); err == nil {
		t.Error("QP on a closed domain")
	}
	c.Close()
}

// testBetweenPollAndArm: what comes after the last empty Poll and before Arm, or
// after Arm, makes the descriptor readable or is reported by Arm.
func testBetweenPollAndArm(s *Suite) {
	t := s.T
	p := s.Connect(nil, nil, PairConfig{}, nil, func(e *End) {
		for range 64 {
			e.PostRecv(t, 1, 0, 16)
		}
	})
	send := func() {
		p.A.Post(t, rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{p.A.SGE(0, 16)}})
		if _, err := p.A.CQ.Arm(); err != nil { // Arm sends too
			t.Fatal(err)
		}
	}
	expect := func(what string) {
		t.Helper()
		again, err := p.B.CQ.Arm()
		if err != nil {
			t.Fatal(err)
		}
		if !again && !readable(t, p.B.CQ.FD(), int(Patience/time.Millisecond)) {
			t.Fatalf("%s: owner would sleep", what)
		}
		p.WaitOK(p.B, 1)
		p.WaitOK(p.A, 1)
		p.B.PostRecv(t, 1, 0, 16)
	}
	for range rounds(20, 8) {
		p.Settle()
		send() // between Poll and Arm
		expect("message between Poll and Arm")
		p.Settle()
		if again, _ := p.B.CQ.Arm(); again {
			t.Fatal("idle CQ wants to be polled")
		}
		if readable(t, p.B.CQ.FD(), 0) {
			t.Fatal("descriptor of an idle CQ is readable")
		}
		send() // after Arm
		if !readable(t, p.B.CQ.FD(), int(Patience/time.Millisecond)) {
			t.Fatal("message after Arm: descriptor not readable")
		}
		p.B.CQ.Arm() // arming twice without a poll is harmless
		expect("armed twice")
	}
	// A completion that was left in the CQ because the caller's array was full.
	send()
	send()
	var one [1]rdma.WC
	Until(t, "the first of two", func() {}, func() bool {
		n, _, err := p.B.CQ.Poll(one[:])
		if err != nil {
			t.Fatal(err)
		}
		return n == 1
	})
	again, err := p.B.CQ.Arm()
	if err != nil {
		t.Fatal(err)
	}
	if !again && !readable(t, p.B.CQ.FD(), int(Patience/time.Millisecond)) {
		t.Fatal("completion left in the CQ: owner would sleep")
	}
	p.WaitOK(p.B, 1)
	// A send completion that arises while arming.
	p.Settle()
	p.A.got[p.A.QP.Num()] = nil
	p.A.Post(t, rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagSignaled})
	again, err = p.A.CQ.Arm()
	if err != nil {
		t.Fatal(err)
	}
	if !again && !readable(t, p.A.CQ.FD(), int(Patience/time.Millisecond)) {
		t.Fatal("completion of what Arm sent: owner would sleep")
	}
	p.WaitOK(p.A, 1)
}

// sleeper owns a side and sleeps whenever it can.
func sleeper(t testing.TB, s *Side, stop *atomic.Bool, step func(wc []rdma.WC) bool) {
	var wc [16]rdma.WC
	for !stop.Load() {
		n, busy, err := s.CQ.Poll(wc[:])
		if err != nil {
			t.Error(err)
			return
		}
		if n > 0 && !step(wc[:n]) {
			return
		}
		if n > 0 || busy {
			continue
		}
		again, err := s.CQ.Arm()
		if err != nil {
			t.Error(err)
			return
		}
		if !again && !readable(t, s.CQ.FD(), int(Patience/time.Millisecond)) && !stop.Load() {
			t.Errorf("%s slept for %v", s.Name, Patience)
			return
		}
	}
}

// testSleepingOwners: two owners that never poll twice in vain keep a ping-pong of
// messages and large Reads going.
func testSleepingOwners(s *Suite) {
	t := s.T
	most := rounds(2000, 300)
	p := s.Connect(nil, nil, PairConfig{MemSize: 2 << 20, QP: rdma.QPConfig{MaxSend: 8, MaxRecv: 8}}, func(e *End) { e.PostRecv(t, 1, 0, 64) }, func(e *End) { e.PostRecv(t, 1, 0, 64) })
	var stop atomic.Bool
	end := func(e, other *End, first bool) func() {
		count := 0
		send := func() {
			wrs := []rdma.SendWR{{ID: 1, Op: rdma.OpSend, SGL: []rdma.SGE{e.SGE(0, 64)}}}
			if count%16 == 0 { // sometimes by way of a Read that fills the socket
				wrs = []rdma.SendWR{{ID: 2, Op: rdma.OpRead, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{e.SGE(1<<20, 1<<20)}, RemoteAddr: other.At(1 << 20), RKey: other.MR.RKey()},
					{ID: 1, Op: rdma.OpSend, Flags: rdma.FlagFence, SGL: []rdma.SGE{e.SGE(0, 64)}}}
			}
			wrs[len(wrs)-1].Flags |= rdma.FlagSignaled
			if _, err := e.QP.PostSend(wrs...); err != nil {
				t.Error(err)
			}
		}
		return func() {
			if first {
				send()
			}
			sleeper(t, e.Side, &stop, func(wc []rdma.WC) bool {
				for _, w := range wc {
					if w.Status == rdma.StatusFlush && stop.Load() {
						return false // the other end has had its messages, and disconnected
					}
					if w.Status != rdma.StatusSuccess {
						t.Errorf("%+v", w)
						return false
					}
					if !w.Recv {
						continue
					}
					count++
					if count == most && first {
						return false
					}
					if _, err := e.QP.PostRecv(rdma.RecvWR{ID: 1, SGL: []rdma.SGE{e.SGE(0, 64)}}); err != nil {
						t.Error(err)
					}
					send()
				}
				return true
			})
		}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		end(p.B, p.A, false)()
	}()
	end(p.A, p.B, true)()
	stop.Store(true)
	p.A.Conn.Disconnect()
	p.A.Poll(t)
	<-done
}

// testManyOwners: owners on goroutines of their own do traffic while others
// register memory and connect, all on one device. For the race detector.
func testManyOwners(s *Suite) {
	t := s.T
	const owners = 3
	most := int64(rounds(300, 100))
	var wg sync.WaitGroup
	var stop atomic.Bool
	dev := deviceOf(s)
	pd, err := dev.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	mem := Mem(t, 65536)
	wg.Add(1)
	go func() {
		defer wg.Done()
		for !stop.Load() {
			mr, err := pd.Register(mem, AllAccess)
			if err != nil {
				t.Error(err)
				return
			}
			mr.Deregister()
			if mw, err := pd.AllocMW(); err == nil {
				mw.Close()
			}
			runtime.Gosched()
		}
	}()
	var work sync.WaitGroup
	for range owners {
		p := s.Connect(nil, nil, PairConfig{}, nil, func(e *End) { e.PostRecv(t, 1, 0, 16) })
		a, b := p.A, p.B
		loop := func(e *End, step func() bool) {
			defer work.Done()
			deadline := time.Now().Add(Patience)
			for !step() {
				n, _, err := e.CQ.Poll(e.wc[:])
				if err != nil {
					t.Error(err)
					return
				}
				e.got[e.QP.Num()] = append(e.got[e.QP.Num()], e.wc[:n]...)
				runtime.Gosched()
				if time.Now().After(deadline) {
					t.Errorf("%s: waited %v", e.Name, Patience)
					return
				}
			}
		}
		work.Add(2)
		var answered atomic.Int64 // messages that B has taken
		go func() {
			sent := int64(0)
			loop(a, func() bool {
				a.got[a.QP.Num()] = nil
				if sent == answered.Load() && sent < most {
					sent++
					a.QP.PostSend(rdma.SendWR{Op: rdma.OpWrite, SGL: []rdma.SGE{a.SGE(0, 3000)}, RemoteAddr: b.At(4096), RKey: b.MR.RKey()},
						rdma.SendWR{Op: rdma.OpRead, SGL: []rdma.SGE{a.SGE(8192, 3000)}, RemoteAddr: b.At(4096), RKey: b.MR.RKey()},
						rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagSignaled | rdma.FlagFence, SGL: []rdma.SGE{a.SGE(0, 16)}})
				}
				return answered.Load() == most
			})
		}()
		go loop(b, func() bool {
			for _, wc := range b.got[b.QP.Num()] {
				if wc.Status != rdma.StatusSuccess {
					t.Errorf("%+v", wc)
				}
				b.QP.PostRecv(rdma.RecvWR{ID: 1, SGL: []rdma.SGE{b.SGE(0, 16)}})
				answered.Add(1)
			}
			b.got[b.QP.Num()] = nil
			return answered.Load() == most
		})
	}
	work.Wait()
	stop.Store(true)
	wg.Wait()
	if err := pd.Close(); err != nil {
		t.Error(err)
	}
}

// testPeerNeverPolls: a peer that takes nothing stops its own connection and
// nothing else.
func testPeerNeverPolls(s *Suite) {
	t := s.T
	dev := deviceOf(s)
	a := NewSide(t, "active", dev, 4096, 1<<20)
	dead := NewSide(t, "dead", dev, 4096, 1<<20)
	b := NewSide(t, "passive", dev, 4096, 1<<20)
	t.Cleanup(func() { a.Close(t); dead.Close(t); b.Close(t) })
	stuck := s.Connect(a, dead, PairConfig{QP: rdma.QPConfig{MaxSend: 64, MaxRecv: 8}}, nil, nil)
	alive := s.Connect(a, b, PairConfig{}, nil, nil)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	sent := 0
	full := 0
	wr := rdma.SendWR{ID: 1, Op: rdma.OpWrite, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{a.SGE(0, 1<<20)}, RemoteAddr: dead.At(0), RKey: dead.MR.RKey()}
	switch info := dev.Info(); {
	case info.Autonomous && info.RNRRetry:
		wr.Op, wr.SGL[0].Len = rdma.OpSend, 64 // the device takes Writes by itself, but no Send without a receive
	case info.Autonomous:
		// The device serves a peer that never polls: that must go well, beside others.
		for range 64 {
			stuck.A.Post(t, wr)
			stuck.A.Poll(t)
		}
		Until(t, "Writes to a peer that does not poll", func() { a.Poll(t) }, func() bool { return len(stuck.A.Pending()) == 64 })
		stillWorks(t, alive)
		return
	}
	for full < 100000 && sent < 4096 { // until the queue has been full for long
		_, err := stuck.A.QP.PostSend(wr)
		switch {
		case err == nil:
			sent++
			full = 0
		case errors.Is(err, rdma.ErrQueueFull):
			full++
		default:
			t.Fatal(err)
		}
		a.Poll(t)
		a.got[stuck.A.QP.Num()] = nil
		if full%1000 == 1 {
			stillWorks(t, alive)
		}
	}
	if sent >= 4096 {
		t.Fatal("a peer that never polls took 4 GiB")
	}
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapSys) - int64(before.HeapSys); grown > 32<<20 {
		t.Errorf("heap grew by %d bytes", grown)
	}
	// The owner can sleep meanwhile, and the others still work.
	stillWorks(t, alive)
	alive.Settle()
	if again, _ := a.CQ.Arm(); again {
		t.Error("blocked connection keeps its owner awake")
	}
	if readable(t, a.CQ.FD(), 20) {
		t.Error("blocked connection keeps its owner awake")
	}
	// It wakes up where it stopped.
	stuck.B.PostRecv(t, 5, 0, 64)
	stuck.Until("room in the send queue", func() bool {
		_, err := stuck.A.QP.PostSend(rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.FlagSignaled})
		return err == nil
	})
	stuck.WaitOK(stuck.B, 1)
}

// testRounds connects and disconnects again and again.
func testRounds(s *Suite) {
	t := s.T
	most := rounds(1000, 40)
	dev := deviceOf(s)
	a, b := NewSide(t, "active", dev, 64, 4096), NewSide(t, "passive", dev, 64, 4096)
	t.Cleanup(func() { a.Close(t); b.Close(t) })
	var g, f int
	for round := range most + 10 {
		if round == 10 { // warm
			NoLeakSoon(t)
			g, f = Resources(t)
		}
		p := s.Connect(a, b, PairConfig{QP: rdma.QPConfig{MaxSend: 4, MaxRecv: 4}}, nil, func(e *End) { e.PostRecv(t, 1, 0, 16) })
		mem := a.Mem
		mr, err := a.PD.Register(mem, AllAccess)
		if err != nil {
			t.Fatal(err)
		}
		p.A.Post(t, rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{{Addr: mr.Addr(), Len: 16, LKey: mr.LKey()}}})
		p.WaitOK(p.B, 1)
		switch round % 4 {
		case 0:
			p.A.Conn.Disconnect()
			p.Ended(p.B)
		case 1:
			p.B.Conn.Disconnect()
			p.Ended(p.A)
		case 2:
			p.A.QP.Close()
			p.Ended(p.B)
		}
		p.A.QP.Close()
		p.B.QP.Close()
		p.A.Conn.Close()
		p.B.Conn.Close()
		delete(a.got, p.A.QP.Num())
		delete(b.got, p.B.QP.Num())
		mr.Deregister()
	}
	NoLeak(t, g, f)
}

// NoLeakSoon waits until the number of goroutines has stopped to fall.
func NoLeakSoon(t testing.TB) {
	t.Helper()
	for low, same := int(^uint(0)>>1), 0; same < 1000; same++ {
		if g, _ := Resources(t); g < low {
			low, same = g, 0
		}
		runtime.Gosched()
	}
}
