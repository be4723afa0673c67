package rdmatest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"rdblk/rdma"
)

// badKey is a way to name memory that the peer has not opened.
type badKey struct {
	what string
	key  uint32
	addr uint64
	n    int
}

// protected makes B's memory with things around it that A must not reach.
func protected(s *Suite, b *Side, right, missing rdma.Access) []badKey {
	t := s.T
	reg := func(pd rdma.PD, mem []byte, access rdma.Access) rdma.MR {
		mr, err := pd.Register(mem, access)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { mr.Deregister() })
		return mr
	}
	other, err := b.Dev.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { other.Close() })
	foreign := reg(other, b.Mem[:65536], AllAccess)
	part := reg(b.PD, b.Mem[65536:131072], right|rdma.AccessLocalWrite)
	noRight := reg(b.PD, b.Mem[:65536], missing|rdma.AccessLocalWrite)
	gone := reg(b.PD, b.Mem[:65536], AllAccess)
	if err := gone.Deregister(); err != nil {
		t.Fatal(err)
	}
	k := part.RKey()
	return []badKey{
		{"key byte wrong", k ^ 0x5A, part.Addr(), 100},
		{"index wrong", k ^ 0x00400000, part.Addr(), 100},
		{"key 0", 0, part.Addr(), 100},
		{"all ones", ^uint32(0), part.Addr(), 100},
		{"stale key", gone.RKey(), gone.Addr(), 100},
		{"other protection domain", foreign.RKey(), foreign.Addr(), 100},
		{"right missing", noRight.RKey(), noRight.Addr(), 100},
		{"one byte over the end", k, part.Addr() + 65536 - 99, 100},
		{"starts at the end", k, part.Addr() + 65536, 1},
		{"one byte before the start", k, part.Addr() - 1, 100},
		{"large and over the end", k, part.Addr() + 1, 65536},
		{"address 0", k, 0, 100},
		{"ends at 2^64", k, ^uint64(0) - 99, 100},
		{"wraps 2^64", k, ^uint64(0) - 49, 100},
	}
}

func testRemoteKeys(s *Suite) {
	t := s.T
	dev := deviceOf(s)
	a, b := NewSide(t, "active", dev, 4096, 1<<20), NewSide(t, "passive", dev, 4096, 1<<20)
	t.Cleanup(func() { a.Close(t); b.Close(t) })
	witness := s.Connect(a, b, PairConfig{}, nil, nil)
	for _, k := range protected(s, b, rdma.AccessRemoteWrite, rdma.AccessRemoteRead) {
		p := s.Connect(a, b, PairConfig{}, nil, func(e *End) { e.PostRecv(t, 1, 1<<20-64, 64) })
		fill(a.Mem, 1)
		clear(b.Mem)
		p.A.Post(t, rdma.SendWR{ID: 1, Op: rdma.OpWrite, SGL: []rdma.SGE{a.SGE(0, k.n)}, RemoteAddr: k.addr, RKey: k.key},
			rdma.SendWR{ID: 2, Op: rdma.OpSend, SGL: []rdma.SGE{a.SGE(0, 8)}})
		// A Write may complete before the peer has looked at it, so the requester learns
		// of it by the end of the connection. The Send behind it must not arrive.
		errA, errB := p.Ended(p.A), p.Ended(p.B)
		for _, err := range []error{errA, errB} {
			if err == nil || errors.Is(err, rdma.ErrDisconnected) && s.except["EndReasons"] == "" {
				t.Errorf("%s: connection ended with %v", k.what, err)
			}
		}
		if wc := p.Wait(p.B, 1)[0]; wc.Status == rdma.StatusSuccess {
			t.Errorf("%s: message behind a forbidden Write arrived", k.what)
		}
		for i, c := range b.Mem {
			if k.n > 1000 && i >= 65536 && i < 131072 {
				continue // providers check segment by segment: the first ones may be placed
			}
			if c != 0 {
				t.Fatalf("%s: forbidden Write changed memory at %d", k.what, i)
			}
		}
		stillWorks(t, witness)
	}
}

func testRemoteKeysRead(s *Suite) {
	t := s.T
	dev := deviceOf(s)
	a, b := NewSide(t, "active", dev, 4096, 1<<20), NewSide(t, "passive", dev, 4096, 1<<20)
	t.Cleanup(func() { a.Close(t); b.Close(t) })
	witness := s.Connect(a, b, PairConfig{}, nil, nil)
	for _, k := range protected(s, b, rdma.AccessRemoteRead, rdma.AccessRemoteWrite) {
		if why := s.except["RemoteKeysRead/"+k.what]; why != "" {
			t.Logf("left out: %s: this device does not keep the contract here: %s", k.what, why)
			continue
		}
		p := s.Connect(a, b, PairConfig{}, nil, nil)
		fill(b.Mem, 1)
		clear(a.Mem)
		p.A.Post(t, rdma.SendWR{ID: 1, Op: rdma.OpRead, SGL: []rdma.SGE{a.SGE(0, k.n)}, RemoteAddr: k.addr, RKey: k.key},
			rdma.SendWR{ID: 2, Op: rdma.OpRead, SGL: []rdma.SGE{a.SGE(1<<19, 8)}, RemoteAddr: b.At(0), RKey: b.MR.RKey()})
		l := p.Wait(p.A, 2)
		if s.except["RemoteKeysRead/status"] != "" && l[0].Status == rdma.StatusFlush {
			l[0].Status = rdma.StatusRemoteAccess
		}
		if l[0].ID != 1 || l[0].Status != rdma.StatusRemoteAccess || l[1].ID != 2 || l[1].Status != rdma.StatusFlush {
			t.Errorf("%s: %+v", k.what, l)
		}
		p.Ended(p.A)
		p.Ended(p.B)
		for i, c := range a.Mem[:1<<19] {
			if c != 0 {
				t.Fatalf("%s: forbidden Read brought data to %d", k.what, i)
			}
		}
		stillWorks(t, witness)
	}
}

func stillWorks(t testing.TB, p *Pair) {
	t.Helper()
	p.B.PostRecv(t, 99, 0, 64)
	p.A.Post(t, rdma.SendWR{ID: 98, Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{p.A.SGE(0, 64)}})
	p.WaitOK(p.B, 1)
	p.WaitOK(p.A, 1)
}

// testZeroLength: a Write or Read of no bytes touches nothing, so nobody looks at its key and address: it completes,
// what is behind it arrives, and the peer sees nothing of it. That is so on every transport. InfiniBand and RoCE
// forbid to look (InfiniBand specification, C9-88: the R_Key of a zero-length READ or WRITE shall not be validated, on
// a reliable connection). On iWARP the checks of an STag and its offset are those of data that is placed (RFC 5041,
// RFC 5040), of which there is none; RFC 6581 begins connections with such a Write, whose STag nobody has
// opened. Initiators rely on it, as a message that makes a peer look at what came before.
func testZeroLength(s *Suite) {
	t := s.T
	dev := deviceOf(s)
	a, b := NewSide(t, "active", dev, 4096, 1<<20), NewSide(t, "passive", dev, 4096, 1<<20)
	t.Cleanup(func() { a.Close(t); b.Close(t) })
	witness := s.Connect(a, b, PairConfig{}, nil, nil)
	for _, op := range []struct {
		op   rdma.Opcode
		name string
		keys []badKey
	}{
		{rdma.OpWrite, "Write", protected(s, b, rdma.AccessRemoteWrite, rdma.AccessRemoteRead)},
		{rdma.OpRead, "Read", protected(s, b, rdma.AccessRemoteRead, rdma.AccessRemoteWrite)},
	} {
		for _, k := range op.keys {
			what := op.name + ", " + k.what
			if why := s.except["ZeroLengthSkipsKeys/"+what]; why != "" {
				t.Logf("left out: %s: this device does not keep the contract here: %s", what, why)
				continue
			}
			const data = 1<<20 - 256 // what nothing may change; messages go behind it
			p := s.Connect(a, b, PairConfig{}, nil, func(e *End) {
				for id := range 3 {
					e.PostRecv(t, uint64(id), data+64*id, 64)
				}
			})
			fill(a.Mem, 1)
			fill(b.Mem, 2)
			before := [][]byte{bytes.Clone(a.Mem[:data]), bytes.Clone(b.Mem[:data])}
			empty := rdma.SendWR{ID: 10, Op: op.op, Flags: rdma.FlagSignaled, RemoteAddr: k.addr, RKey: k.key}
			send := rdma.SendWR{ID: 11, Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{a.SGE(0, 8)}}
			// It is the first message of the connection, one between others, and the last one.
			p.A.Post(t, empty, send, empty, send, send, empty)
			for i, wc := range p.Wait(p.A, 6) {
				if want := []uint64{10, 11, 10, 11, 11, 10}[i]; wc.Status != rdma.StatusSuccess || wc.ID != want {
					t.Errorf("%s: completion %d: %+v", what, i, wc)
				}
			}
			for i, wc := range p.Wait(p.B, 3) {
				if wc.Status != rdma.StatusSuccess || wc.ID != uint64(i) || wc.ByteLen != 8 {
					t.Errorf("%s: message %d: %+v", what, i, wc)
				}
			}
			if !bytes.Equal(a.Mem[:data], before[0]) || !bytes.Equal(b.Mem[:data], before[1]) {
				t.Errorf("%s: memory changed", what)
			}
			if !t.Failed() { // what came last was taken, too
				stillWorks(t, p)
			}
			p.Close()
		}
	}
	stillWorks(t, witness)
}

// newWindow skips tests of windows where there are none.
func newWindow(s *Suite, side *Side) rdma.MW {
	s.T.Helper()
	mw, err := side.PD.AllocMW()
	if !deviceInfo(s).MemWindows {
		if !errors.Is(err, rdma.ErrNotSupported) {
			s.T.Fatalf("window from a device without windows: %v", err)
		}
		s.T.Skip("device has no memory windows")
	}
	if err != nil {
		s.T.Fatal(err)
	}
	s.T.Cleanup(func() { mw.Close() })
	return mw
}

func bindWR(id uint64, mw rdma.MW, e *End, off, n int, access rdma.Access) rdma.SendWR {
	return rdma.SendWR{ID: id, Op: rdma.OpBindMW, Flags: rdma.FlagSignaled, Window: mw, SGL: []rdma.SGE{e.SGE(off, n)}, Access: access}
}

func testWindows(s *Suite) {
	t := s.T
	dev := deviceOf(s)
	a, b := NewSide(t, "active", dev, 4096, 1<<20), NewSide(t, "passive", dev, 4096, 1<<20)
	t.Cleanup(func() { a.Close(t); b.Close(t) })
	mw := newWindow(s, a)
	p := s.Connect(a, b, PairConfig{}, nil, nil)
	keys := map[uint32]bool{}
	const off, n = 1000, 5000
	// Bind, let the peer use it both ways, invalidate locally; again and again, every
	// time with another key.
	for round := range 20 {
		before := mw.RKey()
		p.A.Post(t, bindWR(1, mw, p.A, off, n, rdma.AccessRemoteWrite|rdma.AccessRemoteRead))
		key := mw.RKey()
		if key != rdma.NextKey(before) || keys[key] {
			t.Fatalf("key %#x after %#x", key, before)
		}
		keys[key] = true
		p.B.PostRecv(t, 1, 1<<20-64, 64)
		p.A.Post(t, rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagSignaled})
		p.WaitOK(p.A, 2)
		p.WaitOK(p.B, 1)
		clear(a.Mem)
		fill(b.Mem[:n], uint64(round))
		p.B.Post(t, rdma.SendWR{Op: rdma.OpWrite, SGL: []rdma.SGE{b.SGE(0, n)}, RemoteAddr: a.At(off), RKey: key},
			rdma.SendWR{Op: rdma.OpRead, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{b.SGE(8192, n)}, RemoteAddr: a.At(off), RKey: key})
		p.WaitOK(p.B, 1)
		if !bytes.Equal(a.Mem[off:off+n], b.Mem[:n]) || !bytes.Equal(b.Mem[8192:8192+n], b.Mem[:n]) {
			t.Fatal("data through the window wrong")
		}
		p.A.Post(t, rdma.SendWR{ID: 2, Op: rdma.OpLocalInvalidate, Flags: rdma.FlagSignaled, InvalidateRKey: key})
		if wc := p.WaitOK(p.A, 1)[0]; wc.ID != 2 {
			t.Fatalf("%+v", wc)
		}
	}
	// Closed again.
	clear(a.Mem)
	p.B.Post(t, rdma.SendWR{Op: rdma.OpWrite, SGL: []rdma.SGE{b.SGE(0, 8)}, RemoteAddr: a.At(off), RKey: mw.RKey()})
	if err := p.Ended(p.A); errors.Is(err, rdma.ErrDisconnected) {
		t.Error("Write through an invalidated window was allowed")
	}
	if a.Mem[off] != 0 {
		t.Error("Write through an invalidated window changed memory")
	}
}

func testWindowRights(s *Suite) {
	t := s.T
	dev := deviceOf(s)
	a, b := NewSide(t, "active", dev, 8192, 1<<20), NewSide(t, "passive", dev, 8192, 1<<20)
	t.Cleanup(func() { a.Close(t); b.Close(t) })
	const off, n = 4096, 8192
	mw := newWindow(s, a)
	stranger := s.Connect(a, b, PairConfig{}, nil, nil) // of the same domain, on the same CQs
	type try struct {
		what   string
		op     rdma.Opcode
		access rdma.Access
		addr   uint64
		n      int
		key    func(k uint32) uint32
		via    func(p *Pair) *End
	}
	own := func(p *Pair) *End { return p.B }
	same := func(k uint32) uint32 { return k }
	tries := []try{
		{"Write to a window for reading", rdma.OpWrite, rdma.AccessRemoteRead, a.At(off), 8, same, own},
		{"Read from a window for writing", rdma.OpRead, rdma.AccessRemoteWrite, a.At(off), 8, same, own},
		{"Write one byte over the end", rdma.OpWrite, rdma.AccessRemoteWrite, a.At(off + n - 7), 8, same, own},
		{"Write one byte before the start", rdma.OpWrite, rdma.AccessRemoteWrite, a.At(off - 1), 8, same, own},
		{"Read over the end", rdma.OpRead, rdma.AccessRemoteRead, a.At(off + 1), n, same, own},
		{"Write with an older key", rdma.OpWrite, rdma.AccessRemoteWrite, a.At(off), 8, func(k uint32) uint32 { return k&^0xFF | (k-1)&0xFF }, own},
		{"Write on another connection", rdma.OpWrite, rdma.AccessRemoteWrite, a.At(off), 8, same, nil},
		{"Read on another connection", rdma.OpRead, rdma.AccessRemoteRead, a.At(off), 8, same, nil},
	}
	for _, tr := range tries {
		if why := s.except["WindowRights/"+tr.what]; why != "" {
			t.Logf("left out: %s: this device does not keep the contract here: %s", tr.what, why)
			continue
		}
		t.Log(tr.what)
		p := s.Connect(a, b, PairConfig{}, nil, func(e *End) { e.PostRecv(t, 1, 1<<20-64, 64) })
		clear(a.Mem)
		clear(b.Mem)
		copy(a.Mem[off-8:], "12345678")
		p.A.Post(t, bindWR(1, mw, p.A, off, n, tr.access), rdma.SendWR{Op: rdma.OpSend})
		p.WaitOK(p.A, 1)
		p.WaitOK(p.B, 1)
		from, bystander := p, stranger
		if tr.via == nil {
			from, bystander = s.Connect(a, b, PairConfig{}, nil, nil), p
			from.B.PostRecv(t, 1, 1<<20-64, 64) // the active side speaks first
			from.A.Post(t, rdma.SendWR{Op: rdma.OpSend})
			from.WaitOK(from.B, 1)
		}
		fill(b.Mem[:n], 7)
		want := bytes.Clone(b.Mem[:n])
		from.B.Post(t, rdma.SendWR{ID: 5, Op: tr.op, SGL: []rdma.SGE{b.SGE(0, tr.n)}, RemoteAddr: tr.addr, RKey: tr.key(mw.RKey())})
		if err := from.Ended(from.A); err == nil || errors.Is(err, rdma.ErrDisconnected) {
			t.Errorf("%s: owner of the window: %v", tr.what, err)
		}
		from.Ended(from.B)
		if tr.op == rdma.OpRead {
			if wc := from.Wait(from.B, 1)[0]; wc.Status != rdma.StatusRemoteAccess {
				t.Errorf("%s: %+v", tr.what, wc)
			}
			if !bytes.Equal(b.Mem[:n], want) {
				t.Errorf("%s: data came back", tr.what)
			}
		}
		clear(a.Mem[off-8 : off])
		for i, c := range a.Mem {
			if c != 0 {
				t.Fatalf("%s: memory changed at %d", tr.what, i)
			}
		}
		stillWorks(t, bystander)
		p.Close() // unbinds
	}
}

// Binds of several windows, one of them twice, and the message that tells the peer of the keys, all in one post: what
// the keys will be is known before.
func testWindowsInOnePost(s *Suite) {
	t := s.T
	dev := deviceOf(s)
	a, b := NewSide(t, "active", dev, 4096, 1<<20), NewSide(t, "passive", dev, 4096, 1<<20)
	t.Cleanup(func() { a.Close(t); b.Close(t) })
	var mws [5]rdma.MW
	for i := range mws {
		mws[i] = newWindow(s, a)
	}
	p := s.Connect(a, b, PairConfig{}, nil, nil)
	const size, told = 4096, 1 << 19 // of a window; where the keys are in a's memory
	for round := range 10 {
		var wrs []rdma.SendWR
		bind := func(i int) {
			wrs = append(wrs, rdma.SendWR{Op: rdma.OpBindMW, Window: mws[i], SGL: []rdma.SGE{p.A.SGE(i*size, size)}, Access: rdma.AccessRemoteWrite})
		}
		shut := func(key uint32) {
			wrs = append(wrs, rdma.SendWR{Op: rdma.OpLocalInvalidate, InvalidateRKey: key})
		}
		for i, mw := range mws {
			key := mw.RKey()
			if round > 0 {
				shut(key)
			}
			bind(i)
			if key = rdma.NextKey(key); i == 2 {
				shut(key)
				bind(i)
				key = rdma.NextKey(key)
			}
			binary.BigEndian.PutUint32(a.Mem[told+4*i:], key)
		}
		p.B.PostRecv(t, 1, told, 64)
		p.A.Post(t, append(wrs, rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{p.A.SGE(told, 4*len(mws))}})...)
		p.WaitOK(p.A, 1)
		p.WaitOK(p.B, 1)
		clear(a.Mem[:len(mws)*size])
		fill(b.Mem[:len(mws)*size], uint64(round))
		p.A.PostRecv(t, 2, 1<<20-64, 64)
		var back []rdma.SendWR
		for i, mw := range mws {
			key := binary.BigEndian.Uint32(b.Mem[told+4*i:])
			if key != mw.RKey() {
				t.Fatalf("round %d, window %d: key %#x was told, it is %#x", round, i, key, mw.RKey())
			}
			back = append(back, rdma.SendWR{Op: rdma.OpWrite, SGL: []rdma.SGE{b.SGE(i*size, size)}, RemoteAddr: a.At(i * size), RKey: key})
		}
		p.B.Post(t, append(back, rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagSignaled})...)
		p.WaitOK(p.B, 1)
		p.WaitOK(p.A, 1)
		if !bytes.Equal(a.Mem[:len(mws)*size], b.Mem[:len(mws)*size]) {
			t.Fatalf("round %d: data through the windows wrong", round)
		}
	}
}

// A window opens a part of a region that is shut to the peer itself: the region needs the right to have windows, and
// local write for a window that is written to.
func testWindowOfShutRegion(s *Suite) {
	t := s.T
	dev := deviceOf(s)
	a, b := NewSide(t, "active", dev, 4096, 1<<20), NewSide(t, "passive", dev, 4096, 1<<20)
	t.Cleanup(func() { a.Close(t); b.Close(t) })
	mr, err := a.PD.Register(a.Mem, rdma.AccessLocalWrite|rdma.AccessMWBind)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mr.Deregister() })
	mw := newWindow(s, a)
	ready := func(e *End) { e.PostRecv(t, 1, 1<<20-64, 64) }
	p := s.Connect(a, b, PairConfig{}, ready, ready)
	wr := bindWR(1, mw, p.A, 0, 4096, rdma.AccessRemoteWrite)
	wr.SGL[0].LKey = mr.LKey()
	p.A.Post(t, wr, rdma.SendWR{Op: rdma.OpSend})
	p.WaitOK(p.A, 1)
	p.WaitOK(p.B, 1)
	fill(b.Mem[:4096], 3)
	p.B.Post(t, rdma.SendWR{ID: 2, Op: rdma.OpWrite, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{b.SGE(0, 4096)}, RemoteAddr: a.At(0), RKey: mw.RKey()},
		rdma.SendWR{Op: rdma.OpSend})
	p.WaitOK(p.B, 1)
	p.WaitOK(p.A, 1)
	if !bytes.Equal(a.Mem[:4096], b.Mem[:4096]) {
		t.Error("data through the window wrong")
	}
}

func testSendInvalidate(s *Suite) {
	t := s.T
	dev := deviceOf(s)
	a, b := NewSide(t, "active", dev, 4096, 1<<20), NewSide(t, "passive", dev, 4096, 1<<20)
	t.Cleanup(func() { a.Close(t); b.Close(t) })
	mw := newWindow(s, a)
	p := s.Connect(a, b, PairConfig{}, nil, nil)
	for round := range 10 {
		p.B.PostRecv(t, 1, 1<<20-64, 64)
		p.A.PostRecv(t, 7, 1<<20-64, 64)
		p.A.Post(t, bindWR(1, mw, p.A, 0, 4096, rdma.AccessRemoteWrite), rdma.SendWR{Op: rdma.OpSend})
		p.WaitOK(p.A, 1)
		p.WaitOK(p.B, 1)
		key := mw.RKey()
		op := rdma.SendWR{Op: rdma.OpSendInvalidate, InvalidateRKey: key, SGL: []rdma.SGE{b.SGE(0, 16)}}
		if round%2 == 1 {
			op.Flags |= rdma.FlagSolicited | rdma.FlagInline
		}
		p.B.Post(t, rdma.SendWR{Op: rdma.OpWrite, SGL: []rdma.SGE{b.SGE(0, 4096)}, RemoteAddr: a.At(0), RKey: key}, op)
		wc := p.WaitOK(p.A, 1)[0]
		if !wc.Recv || wc.ID != 7 || wc.ByteLen != 16 || !wc.Invalidated || wc.RKey != key {
			t.Fatalf("%+v, want key %#x invalidated", wc, key)
		}
		if round == 5 { // what is invalid already may be invalidated again
			p.A.Post(t, rdma.SendWR{ID: 3, Op: rdma.OpLocalInvalidate, Flags: rdma.FlagSignaled, InvalidateRKey: key})
			p.WaitOK(p.A, 1)
		}
	}
	clear(a.Mem)
	p.B.Post(t, rdma.SendWR{Op: rdma.OpWrite, SGL: []rdma.SGE{b.SGE(0, 8)}, RemoteAddr: a.At(0), RKey: mw.RKey()})
	if err := p.Ended(p.A); errors.Is(err, rdma.ErrDisconnected) {
		t.Error("Write through an invalidated window was allowed")
	}
	if a.Mem[0] != 0 {
		t.Error("Write through an invalidated window changed memory")
	}
}

// testSendInvalidateForeign: a peer closes only what was opened to it.
func testSendInvalidateForeign(s *Suite) {
	t := s.T
	dev := deviceOf(s)
	a, b := NewSide(t, "active", dev, 4096, 1<<20), NewSide(t, "passive", dev, 4096, 1<<20)
	t.Cleanup(func() { a.Close(t); b.Close(t) })
	mw := newWindow(s, a)
	owner := s.Connect(a, b, PairConfig{}, nil, func(e *End) { e.PostRecv(t, 1, 1<<20-64, 64) })
	owner.A.Post(t, bindWR(1, mw, owner.A, 0, 4096, rdma.AccessRemoteWrite), rdma.SendWR{Op: rdma.OpSend})
	owner.WaitOK(owner.A, 1)
	owner.WaitOK(owner.B, 1)
	for what, key := range map[string]uint32{"a window of another connection": mw.RKey(), "registered memory": a.MR.RKey(), "nothing": mw.RKey() ^ 0x40000000} {
		if why := s.except["SendInvalidateForeign/"+what]; why != "" {
			t.Logf("left out: %s: this device does not keep the contract here: %s", what, why)
			continue
		}
		p := s.Connect(a, b, PairConfig{}, func(e *End) { e.PostRecv(t, 2, 1<<20-128, 64) }, func(e *End) { e.PostRecv(t, 1, 1<<20-64, 64) })
		p.A.Post(t, rdma.SendWR{Op: rdma.OpSend})
		p.WaitOK(p.B, 1)
		p.B.Post(t, rdma.SendWR{ID: 4, Op: rdma.OpSendInvalidate, InvalidateRKey: key})
		if wc := p.Wait(p.A, 1)[0]; wc.Status == rdma.StatusSuccess {
			t.Errorf("message that invalidates %s was received: %+v", what, wc)
		}
		if err := p.Ended(p.A); errors.Is(err, rdma.ErrDisconnected) {
			t.Errorf("%s: %v", what, err)
		}
		p.Ended(p.B)
	}
	// The window is open still.
	fill(b.Mem[:4096], 77)
	owner.A.PostRecv(t, 1, 1<<20-64, 64)
	owner.B.Post(t, rdma.SendWR{Op: rdma.OpWrite, SGL: []rdma.SGE{b.SGE(0, 4096)}, RemoteAddr: a.At(0), RKey: mw.RKey()}, rdma.SendWR{Op: rdma.OpSend})
	owner.WaitOK(owner.A, 1)
	if !bytes.Equal(a.Mem[:4096], b.Mem[:4096]) {
		t.Error("data through the window wrong")
	}
	// Local invalidate is as strict.
	p := s.Connect(a, b, PairConfig{}, nil, nil)
	p.A.Post(t, rdma.SendWR{ID: 8, Op: rdma.OpLocalInvalidate, InvalidateRKey: mw.RKey()})
	if wc := p.Wait(p.A, 1)[0]; wc.ID != 8 || wc.Status == rdma.StatusSuccess {
		t.Errorf("local invalidate of another connection's window: %+v", wc)
	}
	// And a bound window is not bound again.
	p = s.Connect(a, b, PairConfig{}, nil, nil)
	p.A.Post(t, bindWR(9, mw, p.A, 0, 16, rdma.AccessRemoteRead))
	if wc := p.Wait(p.A, 1)[0]; wc.ID != 9 || wc.Status != rdma.StatusMWBind {
		t.Errorf("bind of a bound window: %+v", wc)
	}
}

func testWindowOfClosedQP(s *Suite) {
	t := s.T
	dev := deviceOf(s)
	a, b := NewSide(t, "active", dev, 4096, 1<<20), NewSide(t, "passive", dev, 4096, 1<<20)
	t.Cleanup(func() { a.Close(t); b.Close(t) })
	mw := newWindow(s, a)
	for range 3 {
		p := s.Connect(a, b, PairConfig{}, nil, nil)
		p.A.Post(t, bindWR(1, mw, p.A, 0, 4096, rdma.AccessRemoteWrite))
		p.WaitOK(p.A, 1)
		p.Close() // with the window bound: it is free again
	}
	if err := mw.Close(); err != nil {
		t.Fatal(err)
	}
	p := s.Connect(a, b, PairConfig{}, nil, nil)
	if _, err := p.A.QP.PostSend(bindWR(1, mw, p.A, 0, 16, rdma.AccessRemoteRead)); !errors.Is(err, rdma.ErrInvalid) && !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("bind of a closed window: %v", err)
	}
}

// testDeregister unmaps memory right after Deregister has returned, while a peer
// is writing to it and reading from it as fast as it can: if the provider touched it
// once more, the process would die.
func testDeregister(s *Suite) {
	t := s.T
	dev := deviceOf(s)
	a, b := NewSide(t, "active", dev, 4096, 1<<20), NewSide(t, "passive", dev, 4096, 1<<20)
	t.Cleanup(func() { a.Close(t); b.Close(t) })
	const n = 256 << 10
	for round := range rounds(30, 6) {
		mem, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			t.Fatal(err)
		}
		mr, err := b.PD.Register(mem, AllAccess)
		if err != nil {
			t.Fatal(err)
		}
		p := s.Connect(a, b, PairConfig{}, nil, nil)
		op := rdma.OpWrite
		if round%2 == 1 {
			op = rdma.OpRead
		}
		addr, key := mr.Addr(), mr.RKey()
		done := make(chan struct{})
		started := make(chan struct{})
		go func() { // not the owner of either CQ
			defer close(done)
			<-started
			mr.Deregister()
			unix.Munmap(mem)
		}()
		posted := 0
		Until(t, "the end of the connection", func() {
			if _, err := p.A.QP.PostSend(rdma.SendWR{ID: uint64(posted), Op: op, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{a.SGE(0, n)}, RemoteAddr: addr, RKey: key}); err == nil {
				posted++
			}
			p.Progress()
			a.got[p.A.QP.Num()] = nil
			if posted == 8 {
				posted++
				close(started)
			}
		}, func() bool {
			select {
			case <-p.B.Conn.Done():
				return true
			default:
				return false
			}
		})
		<-done
		if err := p.Ended(p.A); errors.Is(err, rdma.ErrDisconnected) && s.except["EndReasons"] == "" {
			t.Errorf("%v", err)
		}
		p.Close()
	}
}
