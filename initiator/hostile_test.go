package initiator

import (
	"bytes"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"rdblk/blockdev"
	"rdblk/internal/arena"
	"rdblk/protocol"
	"rdblk/rdma"
	"rdblk/rdma/iwarp"
)

const (
	guardByte  = 0xA5
	secretByte = 0x5A // what the application puts into its buffer once it has its answer
	hostileLen = 8192
)

// A siege is a target that attacks an attachment on a command of its first queue, with a
// bystander: another attachment of the same machine to the same target.
type siege struct {
	t         *testing.T
	f         *fakeTarget
	s, other  *Session
	memory    uint32       // key of the memory of the first queue
	victim    *fakeCommand // a read under way elsewhere, if the attack wants one
	released  chan struct{}
	answered  chan struct{} // the application has its answer, and uses its buffer for something else
	leaked    []byte        // what an attack brought back
	succeeded bool          // it got an answer though it should have had none
}

// write tries an RDMA Write of n bytes of the attacker's.
func (g *siege) write(k *fakeCommand, addr uint64, n int, key uint32) {
	at := k.depth * k.slot
	for i := range n {
		k.mem[at+i] = 0xEE
	}
	if k.execute(rdma.SendWR{Op: rdma.OpWrite, SGL: k.sge(at, n), RemoteAddr: addr, RKey: key}) == nil {
		// A Write completes when TCP has it. Only what follows it tells whether it was taken: an answer to
		// this would say so.
		_ = k.execute(rdma.SendWR{Op: rdma.OpRead, SGL: k.sge(at, 0)})
		g.succeeded = k.execute(rdma.SendWR{Op: rdma.OpRead, SGL: k.sge(at, 0)}) == nil
	}
}

// read tries an RDMA Read of n bytes.
func (g *siege) read(k *fakeCommand, addr uint64, n int, key uint32) {
	at := k.depth * k.slot
	clear(k.mem[at : at+n])
	g.succeeded = k.execute(rdma.SendWR{Op: rdma.OpRead, SGL: k.sge(at, n), RemoteAddr: addr, RKey: key}) == nil
	g.leaked = bytes.Clone(k.mem[at : at+n])
}

// invalidate answers with the invalidation of a key.
func (g *siege) invalidate(k *fakeCommand, key uint32) {
	wr := k.response(0, 0)
	wr.Op, wr.InvalidateRKey = rdma.OpSendInvalidate, key
	if k.execute(wr) == nil {
		at := k.depth * k.slot
		g.succeeded = k.execute(rdma.SendWR{Op: rdma.OpRead, SGL: k.sge(at, 0)}) == nil
	}
}

// An attack is what the target does when the command comes. Whom it needs a key of is
// under way then.
type attack struct {
	name   string
	op     protocol.Opcode
	victim int // 0: none; 1: a read on the second queue; 2: a read of the bystander; 3: another read on the first queue
	// after: the attack comes when the application has its answer.
	after bool
	fn    func(g *siege, k *fakeCommand)
	// says is why the initiator itself ends the association, of what a provider cannot know to be wrong.
	says string
}

func attacks() []attack {
	end := func(k *fakeCommand) uint64 { return k.data.Addr + uint64(k.data.Len) }
	const r, w = protocol.OpRead, protocol.OpWrite
	return []attack{
		{"Write: one byte behind the end", r, 0, false, func(g *siege, k *fakeCommand) { g.write(k, end(k), 1, k.data.Key) }, ""},
		{"Write: over the end by one byte", r, 0, false, func(g *siege, k *fakeCommand) { g.write(k, k.data.Addr+1, hostileLen, k.data.Key) }, ""},
		{"Write: one byte before the start", r, 0, false, func(g *siege, k *fakeCommand) { g.write(k, k.data.Addr-1, 1, k.data.Key) }, ""},
		{"Write: from one byte before the start", r, 0, false, func(g *siege, k *fakeCommand) { g.write(k, k.data.Addr-1, hostileLen, k.data.Key) }, ""},
		{"Write: with the window's next key", r, 0, false, func(g *siege, k *fakeCommand) { g.write(k, k.data.Addr, 512, k.data.Key&^0xFF|(k.data.Key+1)&0xFF) }, ""},
		{"Write: with the window's key before", r, 0, false, func(g *siege, k *fakeCommand) { g.write(k, k.data.Addr, 512, k.data.Key&^0xFF|(k.data.Key-1)&0xFF) }, ""},
		{"Write: address 0", r, 0, false, func(g *siege, k *fakeCommand) { g.write(k, 0, 512, k.data.Key) }, ""},
		{"Write: wraps the address space", r, 0, false, func(g *siege, k *fakeCommand) { g.write(k, ^uint64(0)-100, 512, k.data.Key) }, ""},
		{"Write: with the key of the memory itself", r, 0, false, func(g *siege, k *fakeCommand) {
			g.write(k, k.data.Addr, 512, g.memory)
		}, ""},
		{"Write: into a read's buffer after its completion", r, 0, true, func(g *siege, k *fakeCommand) { g.write(k, k.data.Addr, hostileLen, k.data.Key) }, ""},
		{"Read: of a read's buffer", r, 0, false, func(g *siege, k *fakeCommand) { g.read(k, k.data.Addr, 512, k.data.Key) }, ""},
		{"Read: of a read's buffer after its completion", r, 0, true, func(g *siege, k *fakeCommand) { g.read(k, k.data.Addr, 512, k.data.Key) }, ""},
		{"Read: of a write's buffer after its completion", w, 0, true, func(g *siege, k *fakeCommand) { g.read(k, k.data.Addr, hostileLen, k.data.Key) }, ""},
		{"Read: one byte behind the end", w, 0, false, func(g *siege, k *fakeCommand) { g.read(k, end(k), 1, k.data.Key) }, ""},
		{"Read: over the end by one byte", w, 0, false, func(g *siege, k *fakeCommand) { g.read(k, k.data.Addr+1, hostileLen, k.data.Key) }, ""},
		{"Read: from one byte before the start", w, 0, false, func(g *siege, k *fakeCommand) { g.read(k, k.data.Addr-1, hostileLen, k.data.Key) }, ""},
		{"Write: into the buffer of a write", w, 0, false, func(g *siege, k *fakeCommand) { g.write(k, k.data.Addr, 512, k.data.Key) }, ""},
		{"Write: into the buffer of a write after its completion", w, 0, true, func(g *siege, k *fakeCommand) { g.write(k, k.data.Addr, 512, k.data.Key) }, ""},
		{"Write: with the key of another queue", r, 1, false, func(g *siege, k *fakeCommand) { g.write(k, g.victim.data.Addr, 512, g.victim.data.Key) }, ""},
		{"Write: with the key of another attachment", r, 2, false, func(g *siege, k *fakeCommand) { g.write(k, g.victim.data.Addr, 512, g.victim.data.Key) }, ""},
		{"Write: own address, key of another attachment", r, 2, false, func(g *siege, k *fakeCommand) { g.write(k, k.data.Addr, 512, g.victim.data.Key) }, ""},
		{"Write: address of another attachment, own key", r, 2, false, func(g *siege, k *fakeCommand) { g.write(k, g.victim.data.Addr, 512, k.data.Key) }, ""},
		{"Invalidate: the key of another queue", r, 1, false, func(g *siege, k *fakeCommand) { g.invalidate(k, g.victim.data.Key) }, ""},
		{"Invalidate: the key of another attachment", r, 2, false, func(g *siege, k *fakeCommand) { g.invalidate(k, g.victim.data.Key) }, ""},
		{"Invalidate: the key of another command", r, 3, false, func(g *siege, k *fakeCommand) { g.invalidate(k, g.victim.data.Key) }, "is not the command's"},
		{"Invalidate: the key of the memory itself", r, 0, false, func(g *siege, k *fakeCommand) { g.invalidate(k, g.memory) }, ""},
		{"Invalidate: a key twice", r, 0, true, func(g *siege, k *fakeCommand) { g.invalidate(k, k.data.Key) }, "not outstanding"},
	}
}

// A target that reaches for memory which no command has opened to it, at that time and in
// that direction, is stopped by the provider: not a byte of the attachment's memory changes or leaves,
// the request is carried out by the next association, and no other attachment notices.
func TestHostileTarget(t *testing.T) {
	for _, a := range attacks() {
		for _, plain := range []bool{false, true} { // how completed commands' keys were closed
			if plain && !a.after {
				continue
			}
			name := a.name
			if plain {
				name += ", closed by Local Invalidate"
			}
			t.Run(name, func(t *testing.T) { besiege(t, a, plain) })
		}
	}
}

func besiege(t *testing.T, a attack, plain bool) {
	f := newFakeTarget(t)
	f.plainSend = plain
	content := pattern(9, 1<<20)
	copy(f.spaces[1].data, content)
	f.spaces[2] = newFakeSpace(1<<20, 9)
	copy(f.spaces[2].data, content)
	g := &siege{t: t, f: f, released: make(chan struct{}), answered: make(chan struct{})}
	prov := newProvider(t)
	var mu sync.Mutex
	var reason error
	cfg := testConfig(f, prov)
	cfg.OnEvent = func(e Event) {
		mu.Lock()
		defer mu.Unlock()
		if e.Kind == EventDisconnected && reason == nil {
			reason = e.Err
		}
	}
	g.s = connect(t, cfg)
	g.s.mu.Lock()
	g.memory = g.s.as.lanes[0].keys[0].rkey
	g.s.mu.Unlock()
	cfg.OnEvent, cfg.NSID = nil, 2
	g.other = connect(t, cfg)
	dev := device(t, g.s)
	bystander, err := g.other.Device(2)
	if err != nil {
		t.Fatal(err)
	}
	const at, victimAt = 64 << 10, 256 << 10
	attacked := make(chan struct{})
	var once sync.Once
	victimHere := make(chan struct{})
	f.set(func() {
		f.hook = func(k *fakeCommand) bool {
			if k.req.QID == 0 || k.cmd.IsFabrics() {
				return false
			}
			switch {
			case k.cmd.SLBA() == victimAt/512 && a.victim != 0:
				mu.Lock()
				first := g.victim == nil
				if first {
					g.victim = k
				}
				mu.Unlock()
				if !first {
					return false // sent again
				}
				close(victimHere)
				if a.victim == 3 {
					return true // on the same connection, whose goroutine has to go on
				}
				<-g.released
				return k.run() == nil
			case k.cmd.SLBA() == at/512 && k.req.QID == 1 && k.cmd.NSID() == 1 && k.cmd.Opcode() == a.op:
				mine := false
				once.Do(func() { mine = true })
				if !mine {
					return false
				}
				if a.victim != 0 {
					<-victimHere
				}
				if a.after {
					_ = k.run()
					<-g.answered
				}
				a.fn(g, k)
				close(attacked)
				return true
			}
			return false
		}
	})

	// All memory that belongs to the two attachments is guarded, but the buffers of the requests.
	open := func(d *Device, i int) *handle {
		q, err := d.OpenQueue(i)
		if err != nil {
			t.Fatal(err)
		}
		return q.(*handle)
	}
	h := open(dev, 0)
	vh := h
	switch a.victim {
	case 1:
		vh = open(dev, 1)
	case 2:
		vh = open(bystander, 0)
	}
	submit := func(h *handle, op blockdev.Op, off int64) (*blockdev.Request, chan error) {
		done := make(chan error, 1)
		r := &blockdev.Request{Op: op, Off: off, Done: func(r *blockdev.Request) {
			if off == at && a.after { // the application goes on with its memory at once
				for i := range r.Buf {
					r.Buf[i] = secretByte
				}
				close(g.answered)
			}
			done <- r.Err
		}}
		_ = h.Worker().Call(func() {
			r.Buf = h.Alloc(hostileLen)
			copy(r.Buf, pattern(7, hostileLen))
			h.Submit(r)
		})
		return r, done
	}
	var memory [][]byte
	for _, s := range []*Session{g.s, g.other} {
		for _, q := range s.queues {
			for _, b := range [][]byte{q.mem.Bytes(), q.side.Bytes()} {
				for i := range b {
					b[i] = guardByte
				}
				memory = append(memory, b)
			}
		}
	}
	var vr *blockdev.Request
	var vdone chan error
	if a.victim != 0 {
		vr, vdone = submit(vh, blockdev.OpRead, victimAt)
		<-victimHere
	}
	op := blockdev.OpRead
	if a.op == protocol.OpWrite {
		op = blockdev.OpWrite
	}
	r, done := submit(h, op, at)
	select {
	case <-attacked:
	case <-time.After(time.Minute):
		t.Fatal("the attack did not happen")
	}
	eventually(t, "the association ends", func() bool { mu.Lock(); defer mu.Unlock(); return reason != nil })
	close(g.released)
	if err := <-done; err != nil {
		t.Errorf("the request: %v", err)
	}
	if vdone != nil {
		if err := <-vdone; err != nil {
			t.Errorf("the other request: %v", err)
		}
	}
	if g.succeeded && a.says == "" {
		t.Error("the attack went through")
	}
	want := content[at : at+hostileLen]
	switch {
	case a.after:
		want = bytes.Repeat([]byte{secretByte}, hostileLen)
	case a.op == protocol.OpWrite:
		want = pattern(7, hostileLen)
	}
	if !bytes.Equal(r.Buf, want) {
		t.Error("the request's buffer is not what it should be")
	}
	if a.op == protocol.OpWrite && !bytes.Equal(f.spaces[1].content(at, hostileLen), pattern(7, hostileLen)) {
		t.Error("the write is not what the application gave")
	}
	if vr != nil && !bytes.Equal(vr.Buf, content[victimAt:victimAt+hostileLen]) {
		t.Error("the other request's buffer is not what it should be")
	}
	if i := bytes.IndexByte(g.leaked, secretByte); i >= 0 && bytes.Count(g.leaked, []byte{secretByte}) > 512 || bytes.Contains(g.leaked, bytes.Repeat([]byte{guardByte}, 2)) {
		t.Errorf("memory left the attachment: % x...", g.leaked[:16])
	}
	_ = h.Worker().Call(func() { fillByte(r.Buf, guardByte); h.Free(r.Buf) })
	if vr != nil {
		_ = vh.Worker().Call(func() { fillByte(vr.Buf, guardByte); vh.Free(vr.Buf) })
	}
	for i, b := range memory {
		if n := len(b) - bytes.Count(b, []byte{guardByte}); n != 0 {
			t.Errorf("%d bytes of memory %d changed", n, i)
		}
	}
	mu.Lock()
	why := reason
	mu.Unlock()
	var te *iwarp.TerminateError
	switch invalid := strings.HasPrefix(a.name, "Invalidate"); {
	case a.says != "":
		if !errors.Is(why, ErrProtocol) || !strings.Contains(why.Error(), a.says) {
			t.Errorf("ended with %v", why)
		}
	case invalid && strings.Contains(why.Error(), "Receive failed: "+rdma.StatusRemoteInvalid.String()):
	case !errors.As(why, &te) || !te.Sent:
		t.Errorf("not stopped by the provider: %v", why)
	}
	eventually(t, "it works again", func() bool { return g.s.Status().State == StateLive })
	b := make([]byte, 4096)
	if err := dev.ReadAt(b, 0); err != nil || !bytes.Equal(b, content[:4096]) {
		t.Errorf("afterwards: %v", err)
	}
	if err := bystander.ReadAt(b, 0); err != nil || !bytes.Equal(b, content[:4096]) {
		t.Errorf("bystander: %v", err)
	}
	if st := g.other.Status(); st.Reconnects != 0 {
		t.Errorf("the bystander lost its association %d times", st.Reconnects)
	}
}

func fillByte(b []byte, v byte) {
	for i := range b {
		b[i] = v
	}
}

// Answers that are lies in other ways, and what becomes of each.
func TestUntrueAnswers(t *testing.T) {
	// SQHD says how far the target is. Nothing is computed from it: a slot is free when its command is answered.
	t.Run("SQHD", func(t *testing.T) {
		f := newFakeTarget(t)
		copy(f.spaces[1].data, pattern(3, 1<<20))
		n := uint16(0)
		var mu sync.Mutex
		f.hook = func(k *fakeCommand) bool {
			if k.req.QID == 0 || k.cmd.IsFabrics() || k.cmd.Opcode() != protocol.OpFlush {
				return false
			}
			var cqe protocol.Completion
			cqe.Init(k.cmd.ID(), 0)
			mu.Lock()
			n += 0x5557
			cqe.SetSQHD(n)
			mu.Unlock()
			return k.execute(k.raw(cqe)) == nil
		}
		s := connect(t, testConfig(f, newProvider(t)))
		d := device(t, s)
		for range 100 {
			if err := d.Flush(); err != nil {
				t.Fatal(err)
			}
		}
		if st := s.Status(); st.Reconnects != 0 {
			t.Errorf("%+v", st)
		}
	})
	// A write is answered while its data is still being read: from the answer on nothing leaves,
	// since the memory is the application's again. (That the target did not have the data it
	// acknowledged is its lie, and no host can know.)
	t.Run("answer before the data has been read", func(t *testing.T) {
		const size = 1 << 20
		f := newFakeTarget(t)
		f.ctrl.MDTS = 8
		answered, over := make(chan struct{}), make(chan struct{})
		var leaked []byte
		f.hook = once(protocol.OpWrite, func(k *fakeCommand) {
			defer close(over)
			// The peer's socket takes little: most of the response is unsent when the answer is acted on.
			at := k.depth * k.slot
			clear(k.mem[at : at+fakeData])
			wrs := []rdma.SendWR{{Op: rdma.OpRead, SGL: k.sge(at+4096, fakeData-4096), RemoteAddr: k.data.Addr, RKey: k.data.Key}, k.response(0, 0)}
			if err := k.execute(wrs...); err == nil {
				<-answered
				_ = k.execute(rdma.SendWR{Op: rdma.OpRead, SGL: k.sge(at, 0)})
			}
			leaked = bytes.Clone(k.mem[at+4096 : at+fakeData])
		})
		cfg := testConfig(f, newProvider(t))
		cfg.Queues = 1
		s := connect(t, cfg)
		q, err := device(t, s).OpenQueue(0)
		if err != nil {
			t.Fatal(err)
		}
		h := q.(*handle)
		done := make(chan error, 1)
		r := &blockdev.Request{Op: blockdev.OpWrite}
		r.Done = func(r *blockdev.Request) {
			fillByte(r.Buf, secretByte)
			select {
			case <-answered:
			default:
				close(answered)
			}
			done <- r.Err
		}
		_ = h.Worker().Call(func() {
			r.Buf = h.Alloc(size)
			fillByte(r.Buf, 0x11)
			h.Submit(r)
		})
		if err := <-done; err != nil {
			t.Error(err)
		}
		<-over
		if n := bytes.Count(leaked, []byte{secretByte}); n != 0 {
			t.Errorf("%d bytes of what the application wrote after its answer reached the target", n)
		}
		_ = h.Worker().Call(func() { h.Free(r.Buf) })
	})
}

// Without windows the target has the key of a queue's whole memory for as long as the
// association lasts (package comment, "Requests"): what is left is that this ends there,
// and opens nothing to other connections.
func TestWithoutWindows(t *testing.T) {
	f := newFakeTarget(t)
	p := newProvider(t)
	cfg := testConfig(f, p)
	cfg.NoWindows = true
	s := connect(t, cfg)
	d := device(t, s)
	other := connect(t, cfg)
	type region struct {
		mem []byte
		key uint32
	}
	regionOf := func(s *Session, q int) region {
		s.mu.Lock()
		defer s.mu.Unlock()
		return region{s.queues[q].mem.Bytes(), s.as.lanes[q].keys[2*q].rkey}
	}
	for _, c := range []struct {
		name string
		at   func() (addr uint64, key uint32, n int, guards [][]byte)
		ok   bool
	}{
		{"within", func() (uint64, uint32, int, [][]byte) {
			r := regionOf(s, 0)
			return arena.Addr(r.mem), r.key, 4096, nil
		}, true},
		{"over the end", func() (uint64, uint32, int, [][]byte) {
			r := regionOf(s, 0)
			return arena.Addr(r.mem) + uint64(len(r.mem)) - 511, r.key, 512, [][]byte{r.mem}
		}, false},
		{"before the start", func() (uint64, uint32, int, [][]byte) {
			r := regionOf(s, 0)
			return arena.Addr(r.mem) - 1, r.key, 512, [][]byte{r.mem}
		}, false},
		{"of another queue", func() (uint64, uint32, int, [][]byte) {
			r := regionOf(s, 1)
			return arena.Addr(r.mem), r.key, 512, [][]byte{r.mem}
		}, false},
		{"of another attachment", func() (uint64, uint32, int, [][]byte) {
			r := regionOf(other, 0)
			return arena.Addr(r.mem), r.key, 512, [][]byte{r.mem}
		}, false},
	} {
		addr, key, n, guards := c.at()
		for _, b := range guards {
			fillByte(b, guardByte)
		}
		before := s.Status().Reconnects
		var through atomic.Bool
		f.set(func() {
			f.hook = func(k *fakeCommand) bool {
				if k.req.QID != 1 || k.host != s.cfg.HostID || k.cmd.IsFabrics() || k.cmd.Opcode() != protocol.OpFlush || s.Status().Reconnects != before {
					return false
				}
				g := &siege{}
				g.write(k, addr, n, key)
				through.Store(g.succeeded)
				_ = k.run()
				return true
			}
		})
		for range 2 { // one of them is queue 1's
			if err := d.Flush(); err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
		}
		if through.Load() != c.ok || c.ok == (s.Status().Reconnects != before) {
			t.Errorf("%s: went through: %v, %d associations", c.name, through.Load(), s.Status().Reconnects-before)
		}
		for _, b := range guards {
			if n := len(b) - bytes.Count(b, []byte{guardByte}); n != 0 {
				t.Errorf("%s: %d bytes changed", c.name, n)
			}
		}
	}
	if st := other.Status(); st.Reconnects != 0 {
		t.Errorf("%+v", st)
	}
}
