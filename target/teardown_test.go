package target

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"rdblk/blockdev"
	"rdblk/blockdev/blockdevtest"
	"rdblk/internal/worker"
	"rdblk/protocol"
)

// gone waits until the target has no association and no buffer in use.
func (r *rig) gone() {
	r.t.Helper()
	eventually(r.t, "everything released", func() bool {
		s := r.tgt.Stats()
		if s.Queues+s.Pending+s.Controllers+s.DiscoveryControllers != 0 {
			return false
		}
		for _, w := range s.Workers {
			if w.BufferInUse != 0 || w.WaitingBuffer != 0 || w.Queues != 0 {
				return false
			}
		}
		return true
	})
}

func hold(dev *blockdevtest.DelayedDevice, ops ...blockdev.Op) *blockdevtest.Gate {
	return dev.Hold(blockdevtest.Match{Ops: ops})
}

// state waits until n requests of an I/O queue are in a state.
func (r *rig) state(state requestState, n int) {
	r.t.Helper()
	var last Status
	end := time.Now().Add(patience)
	for {
		last = r.tgt.Status()
		have := 0
		for _, q := range last.Queues {
			have += q.States[state.String()]
		}
		if have >= n {
			return
		}
		if time.Now().After(end) {
			r.t.Fatalf("%d requests in state %v, want %d: %+v", have, state, n, last.Queues)
		}
	}
}

// pause stops an I/O worker until the returned function is called.
func (r *rig) pause(lane int) (resume func()) {
	r.t.Helper()
	paused, goOn := make(chan struct{}), make(chan struct{})
	err := r.tgt.lanes[lane].w.Submit(worker.TaskFunc(func() { close(paused); <-goOn }))
	if err != nil {
		r.t.Fatal(err)
	}
	<-paused
	return func() { close(goOn) }
}

// The connection dies while a request is in each of its states. Nothing may stay
// behind, and a write whose data did not come must not be executed.
func TestConnectionDiesInEachState(t *testing.T) {
	const maxIO = 256 << 10
	for _, c := range []struct {
		state requestState
		cause func(r *rig, s *session, dev *blockdevtest.DelayedDevice) *blockdevtest.Gate
		wrote bool // the device was written to
	}{
		{reqReading, func(r *rig, s *session, dev *blockdevtest.DelayedDevice) *blockdevtest.Gate {
			resume := r.pause(0)
			s.io[0].send(s.io[0].rw(protocol.OpWrite, 0, maxIO, 0, 0), nil)
			resume() // the host's NIC rests from now on
			return nil
		}, false},
		{reqWaitRead, func(r *rig, s *session, dev *blockdevtest.DelayedDevice) *blockdevtest.Gate {
			resume := r.pause(0)
			for range 20 { // more than the 16 reads that the host serves
				s.io[0].send(s.io[0].rw(protocol.OpWrite, 0, 4096, 0, 0), nil)
			}
			resume()
			return nil
		}, false},
		{reqExecuting, func(r *rig, s *session, dev *blockdevtest.DelayedDevice) *blockdevtest.Gate {
			g := hold(dev, blockdev.OpWrite)
			s.io[0].send(s.io[0].rw(protocol.OpWrite, 0, 65536, 0, 0), nil)
			for g.Waiting() == 0 {
				s.io[0].poll(false)
			}
			return g
		}, true},
		{reqExecuting, func(r *rig, s *session, dev *blockdevtest.DelayedDevice) *blockdevtest.Gate {
			g := hold(dev, blockdev.OpWrite) // from the receive buffer
			w := s.io[0].rw(protocol.OpWrite, 0, 4096, 0, 0)
			w.SetInCapsuleSGL(0, 4096)
			s.io[0].send(w, bytes.Repeat([]byte{0xAB}, 4096))
			g.Await(r.t, 1)
			return g
		}, true},
		{reqWaitBuffer, func(r *rig, s *session, dev *blockdevtest.DelayedDevice) *blockdevtest.Gate {
			g := hold(dev, blockdev.OpRead)
			for range 4 {
				s.io[0].send(s.io[0].rw(protocol.OpRead, 0, maxIO, 0, 0), nil)
			}
			return g
		}, false},
		{reqResponding, func(r *rig, s *session, dev *blockdevtest.DelayedDevice) *blockdevtest.Gate {
			for range 30 { // more than the sockets take
				s.io[0].send(s.io[0].rw(protocol.OpRead, 0, maxIO, 0, 0), nil)
			}
			return nil
		}, false},
		{reqEvent, func(r *rig, s *session, dev *blockdevtest.DelayedDevice) *blockdevtest.Gate {
			s.admin.aer()
			return nil
		}, false},
	} {
		for _, how := range []string{"reset", "admin queue lost", "killed"} {
			t.Run(c.state.String()+" "+how, func(t *testing.T) {
				base := memDevice(t, 16<<20)
				dev := blockdevtest.Delayed(base)
				memory := 512 << 10
				if c.state == reqResponding {
					memory = 64 << 20
				}
				r := newRig(t, Config{Workers: 1, MaxIO: maxIO, BufferMemory: memory}, dev)
				s := r.attach(sessionOptions{queues: 1})
				fill(s.io[0].data[:maxIO], 0xAB)
				gate := c.cause(r, s, dev)
				r.state(c.state, 1)
				switch how {
				case "reset":
					s.io[0].close()
					s.admin.close()
				case "admin queue lost":
					s.admin.close()
				case "killed":
					_, ctrls := r.tgt.snapshot()
					ctrls[0].kill(errKeepAlive)
				}
				if gate != nil {
					// The back end holds what it uses, and only that.
					eventually(t, "connections cut", func() bool {
						for _, q := range r.tgt.Status().Queues {
							if q.State != queueClosing.String() {
								return false
							}
						}
						return true
					})
					if c.state == reqExecuting && r.tgt.Stats().Controllers != 1 {
						t.Error("the controller is gone before its command")
					}
					gate.Open()
				}
				r.gone()
				got := make([]byte, 4096)
				base.ReadAt(got, 0)
				if wrote := got[0] == 0xAB; wrote != c.wrote {
					t.Errorf("device written: %v, want %v", wrote, c.wrote)
				}
				// The next host finds everything in order.
				r.attach(sessionOptions{queues: 1}).io[0].ok(s.io[0].rwOf(protocol.OpRead))
			})
		}
	}
}

// rwOf is a command without a queue of its own data area: a flush.
func (q *hostQueue) rwOf(protocol.Opcode) *protocol.Command {
	c := new(protocol.Command)
	c.Init(protocol.OpFlush, 1, 1)
	return c
}

// A write of the old association that is still with the storage must not land
// after the host's new association has begun.
func TestReturningHostIsFenced(t *testing.T) {
	base := memDevice(t, 1<<20)
	dev := blockdevtest.Delayed(base)
	clock := newFakeClock()
	r := newRig(t, Config{clock: clock}, dev)
	who := newIdentity()
	old := r.attach(sessionOptions{who: who, queues: 1})
	gate := hold(dev, blockdev.OpWrite)
	fill(old.io[0].data[:4096], 0x01)
	old.io[0].send(old.io[0].rw(protocol.OpWrite, 0, 4096, 0, 0), nil)
	for gate.Waiting() == 0 {
		old.io[0].poll(false)
	}
	// Others are none of its business: another host ID of the same NQN, another NQN.
	other := r.attach(sessionOptions{who: identity{nqn: who.nqn, id: protocol.RandomUUID()}, queues: 1})
	r.attach(sessionOptions{})

	// The first attempt runs out of patience and is told to come again.
	q := r.mustDial(0, 32)
	cmd := q.connectCommand(who, testNQN, protocol.CNTLIDDynamic, 0)
	q.send(cmd, nil)
	eventually(t, "fencing", func() bool { q.poll(false); return r.tgt.Stats().Fenced == 1 })
	old.admin.awaitEnd()
	old.io[0].awaitEnd()
	if gate.Waiting() != 1 {
		t.Fatal("the old write is not with the storage any more")
	}
	for range 100 {
		if q.poll(false); len(q.answers) != 0 {
			t.Fatal("Connect is answered while the old write runs")
		}
	}
	clock.Advance(6 * time.Second)
	a, err := q.take(cmd.ID())
	if err != nil || a.Status()&^protocol.StatusMore != protocol.StatusConnectControllerBusy {
		t.Fatalf("Connect: %v %v, want controller busy without Do Not Retry", a.Status(), err)
	}
	// The second is answered when the old write is over, not before.
	cmd = q.connectCommand(who, testNQN, protocol.CNTLIDDynamic, 0)
	q.send(cmd, nil)
	eventually(t, "fencing again", func() bool { q.poll(false); return r.tgt.Stats().Fenced == 2 })
	gate.Pass(1)
	if a, err = q.take(cmd.ID()); err != nil || !a.Status().OK() {
		t.Fatalf("Connect: %v %v", a.Status(), err)
	}
	if gate.Waiting() != 0 {
		t.Error("Connect is answered while the old write runs")
	}
	gate.Open()
	got := make([]byte, 4096)
	base.ReadAt(got, 0)
	if got[0] != 1 {
		t.Error("the old write, which had begun, did not end")
	}
	other.io[0].ok(other.io[0].rw(protocol.OpRead, 0, 512, 0, 0))
	if n := r.tgt.Stats().Controllers; n != 3 {
		t.Errorf("%d controllers, want 3", n)
	}
}

// A host with a single path is the same wherever it comes from and to. One that may
// have several paths is left alone on all others: its association there may live.
func TestFencingByPath(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	second, err := r.tgt.Listen(r.host, netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	from := netip.MustParseAddr("127.0.0.2")
	for _, c := range []struct {
		name   string
		id     protocol.UUID
		again  dialOptions
		fenced bool
	}{
		{"several paths, the same", protocol.RandomUUID(), dialOptions{}, true},
		{"several paths, another source", protocol.RandomUUID(), dialOptions{from: from}, false},
		{"several paths, another listener", protocol.RandomUUID(), dialOptions{to: second}, false},
		{"single path, the same", protocol.RandomSinglePathHostID(), dialOptions{}, true},
		{"single path, another source", protocol.RandomSinglePathHostID(), dialOptions{from: from}, true},
		{"single path, another listener", protocol.RandomSinglePathHostID(), dialOptions{to: second}, true},
		{"single path, another source and listener", protocol.RandomSinglePathHostID(), dialOptions{from: from, to: second}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			who := identity{nqn: protocol.UUIDNQN(c.id), id: c.id}
			// Neither the name nor the identifier alone is the host.
			for _, other := range []identity{{nqn: who.nqn, id: protocol.RandomSinglePathHostID()}, {nqn: who.nqn + "-2", id: who.id}} {
				r.attach(sessionOptions{who: other})
			}
			old := r.attach(sessionOptions{who: who, queues: 1})
			was := r.tgt.Stats()
			q, err := r.dial(0, c.again)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(q.close)
			if a := q.do(q.connectCommand(who, testNQN, protocol.CNTLIDDynamic, 0)); !a.Status().OK() {
				t.Fatalf("Connect: %v", a.Status())
			}
			is := r.tgt.Stats()
			if c.fenced {
				if is.Fenced != was.Fenced+1 || is.Controllers != was.Controllers {
					t.Errorf("fenced %d, %d controllers more; want the old association replaced", is.Fenced-was.Fenced, is.Controllers-was.Controllers)
				}
				old.admin.awaitEnd()
				old.io[0].awaitEnd()
				return
			}
			if is.Fenced != was.Fenced || is.Controllers != was.Controllers+1 {
				t.Errorf("fenced %d, %d controllers more; want the other path left alone", is.Fenced-was.Fenced, is.Controllers-was.Controllers)
			}
			old.io[0].ok(old.io[0].rw(protocol.OpRead, 0, 512, 0, 0))
		})
	}
}

// Many hosts lose and make associations at the same time; the last of each stays.
func TestReconnectStorm(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	var wg sync.WaitGroup
	for range 4 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			who := newIdentity()
			for range 15 {
				q, err := r.dial(0, dialOptions{})
				if err != nil {
					t.Error(err)
					return
				}
				a := q.do(q.connectCommand(who, testNQN, protocol.CNTLIDDynamic, 5000))
				if !a.Status().OK() {
					t.Errorf("Connect: %v", a.Status())
				}
				if rand.IntN(2) == 0 {
					q.close()
				} else {
					t.Cleanup(q.close) // left for the target to find
				}
			}
		}()
	}
	wg.Wait()
	eventually(t, "old associations gone", func() bool { return r.tgt.Stats().Controllers <= 4 })
}

func TestRemoveNamespaceWaits(t *testing.T) {
	dev := blockdevtest.Delayed(memDevice(t, 1<<20))
	r := newRig(t, Config{}, dev, memDevice(t, 1<<20))
	s := r.attach(sessionOptions{queues: 2})
	gate := hold(dev, blockdev.OpRead)
	c := s.io[0].rw(protocol.OpRead, 0, 4096, 0, 0)
	s.io[0].send(c, nil)
	gate.Await(t, 1)
	removed := make(chan error)
	go func() { removed <- r.tgt.RemoveNamespace(1) }()
	eventually(t, "namespace gone", func() bool {
		a := s.io[1].do(s.io[1].rw(protocol.OpWrite, 0, 512, 0, 0))
		return a.Status().Code() == protocol.StatusInvalidNamespace
	})
	select {
	case <-removed:
		t.Error("RemoveNamespace returned while the device is in use")
	default:
	}
	gate.Open()
	if err := <-removed; err != nil {
		t.Error(err)
	}
	if a, err := s.io[0].take(c.ID()); err != nil || !a.Status().OK() {
		t.Errorf("read that was under way: %v %v", a.Status(), err)
	}
	if err := r.tgt.RemoveNamespace(1); !errors.Is(err, ErrNoNamespace) {
		t.Errorf("second removal: %v", err)
	}
	if _, err := r.tgt.AddNamespace(2, memDevice(t, 1<<20)); !errors.Is(err, ErrNamespaceExists) {
		t.Errorf("second namespace 2: %v", err)
	}
	if id, err := r.tgt.AddNamespace(0, memDevice(t, 1<<20)); id != 1 || err != nil {
		t.Errorf("lowest free identifier: %d %v", id, err)
	}
}

// called is a device with a UUID of the test's choice.
type called struct {
	blockdev.TryDevice
	uuid [16]byte
}

func (d called) Info() blockdev.Info {
	in := d.TryDevice.Info()
	in.UUID = d.uuid
	return in
}

// A host that knew one disk under an identifier does not reach another one that takes its
// place, since what it sent to the first may arrive at any time; neither does it see it. A host
// that connects later does.
func TestNamespaceReplaced(t *testing.T) {
	opened := func(block int, uuid byte) blockdev.Device {
		d, err := blockdev.NewMem("mem", 1<<20, blockdev.Options{BlockSize: block})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		return called{d.(blockdev.TryDevice), [16]byte{uuid}}
	}
	a, b, wide := opened(512, 1), opened(512, 2), opened(4096, 1)
	var losses atomic.Uint64
	r := newRig(t, Config{UnsafeShutdowns: func(uint32) uint64 { return losses.Load() }}, a, memDevice(t, 1<<20))
	old := r.attach(sessionOptions{queues: 1})
	old.io[0].ok(old.io[0].rw(protocol.OpWrite, 0, 4096, 0, 0))
	replace := func(d blockdev.Device) {
		t.Helper()
		if err := r.tgt.RemoveNamespace(1); err != nil {
			t.Fatal(err)
		}
		if _, err := r.tgt.AddNamespace(1, d); err != nil {
			t.Fatal(err)
		}
	}
	sees := func(s *session, want ...uint32) {
		t.Helper()
		if got := slices.Collect(protocol.NamespaceList(s.identify(protocol.CNSActiveNamespaces, 0))); !slices.Equal(got, want) {
			t.Errorf("active namespaces %v, want %v", got, want)
		}
	}
	for _, other := range []blockdev.Device{b, wide, b} {
		replace(other)
		for _, op := range []protocol.Opcode{protocol.OpWrite, protocol.OpRead} {
			old.io[0].want(protocol.StatusInvalidNamespace|dnr, old.io[0].rw(op, 0, 4096, 0, 0))
		}
		sees(old, 2)
	}
	if _, err := r.tgt.AddNamespace(3, memDevice(t, 1<<20)); err != nil {
		t.Fatal(err)
	}
	sees(old, 2, 3)
	new := r.attach(sessionOptions{queues: 1})
	sees(new, 1, 2, 3)
	new.io[0].ok(new.io[0].rw(protocol.OpWrite, 0, 4096, 0, 0))

	replace(a) // now it is the other way round
	old.io[0].ok(old.io[0].rw(protocol.OpRead, 0, 4096, 0, 0))
	new.io[0].want(protocol.StatusInvalidNamespace|dnr, new.io[0].rw(protocol.OpWrite, 0, 4096, 0, 0))
	sees(old, 1, 2, 3)
	sees(new, 2, 3)
	replace(a)
	sees(old, 1, 2, 3)
	if err := r.tgt.RemoveNamespace(2); err != nil {
		t.Fatal(err)
	}
	sees(old, 1, 3)
	sees(new, 3)

	// The same one, but what was written to it and not flushed is gone. Nobody who wrote may
	// flush it now and hear of success.
	losses.Add(1)
	replace(a)
	var flush protocol.Command
	flush.Init(protocol.OpFlush, old.io[0].cid(), 1)
	old.io[0].want(protocol.StatusInvalidNamespace|dnr, &flush)
	sees(old, 3)
	sees(r.attach(sessionOptions{}), 1, 3)
}

// Close and Shutdown wait for a namespace that is being removed as for any other.
func TestCloseWhileNamespaceIsRemoved(t *testing.T) {
	dev := blockdevtest.Delayed(memDevice(t, 1<<20))
	r := newRig(t, Config{closeTimeout: 50 * time.Millisecond}, dev)
	s := r.attach(sessionOptions{queues: 1})
	gate := hold(dev, blockdev.OpRead)
	s.io[0].send(s.io[0].rw(protocol.OpRead, 0, 4096, 0, 0), nil)
	gate.Await(t, 1)
	removed := make(chan error, 1)
	go func() { removed <- r.tgt.RemoveNamespace(1) }()
	eventually(t, "namespace gone", func() bool { return len(r.tgt.Status().Namespaces) == 0 })
	if err := r.tgt.Close(); !errors.Is(err, ErrBusy) {
		t.Errorf("Close while the storage works: %v", err)
	}
	select {
	case err := <-removed:
		t.Errorf("removed while the storage works: %v", err)
	default:
	}
	gate.Open()
	if err := <-removed; err != nil {
		t.Error(err)
	}
	eventually(t, "Close once the storage has answered", func() bool { return r.tgt.Close() == nil })
	if err := r.tgt.RemoveNamespace(1); err == nil {
		t.Error("a namespace of a closed target is removed")
	}
}

// load runs commands on a queue until the connection ends. It returns what was
// acknowledged: block i of the queue's area has the value of the last write there.
type load struct {
	q      *hostQueue
	base   uint64 // first block of its area
	blocks int
	acked  map[int]byte
	maybe  map[int][]byte // written without an answer since
	ops    atomic.Int64
}

func (l *load) run(rng *rand.Rand) {
	type op struct {
		block int
		val   byte
		write bool
	}
	inFlight := map[uint16]op{}
	busy := map[int]bool{}
	q := l.q
	for q.broken == nil {
		if len(inFlight) < q.depth-1 {
			b := rng.IntN(l.blocks)
			if !busy[b] {
				o := op{b, byte(1 + rng.IntN(255)), rng.IntN(3) > 0}
				code := protocol.OpRead
				slot := q.data[b*4096 : (b+1)*4096]
				if o.write {
					code = protocol.OpWrite
					fill(slot, o.val)
				}
				c := q.rw(code, l.base+uint64(b)*8, 4096, b*4096, 0)
				// Before it is sent: a send that sees the connection end may have been executed, and answered.
				inFlight[c.ID()], busy[b] = o, true
				if o.write && rng.IntN(2) == 0 {
					c.SetInCapsuleSGL(0, 4096)
					q.send(c, slot)
				} else {
					q.send(c, nil)
				}
			}
		}
		q.poll(len(inFlight) >= q.depth-1)
		for id, a := range q.answers {
			o, ok := inFlight[id]
			if !ok {
				q.t.Errorf("answer to command %d, which is not in flight", id)
			}
			delete(q.answers, id)
			delete(inFlight, id)
			delete(busy, o.block)
			l.ops.Add(1)
			if !a.Status().OK() {
				q.t.Errorf("status %v", a.Status())
				continue
			}
			if o.write {
				l.acked[o.block] = o.val
			} else if want, ok := l.acked[o.block]; ok && q.data[o.block*4096] != want {
				q.t.Errorf("block %d reads %#x, want %#x", o.block, q.data[o.block*4096], want)
			}
		}
	}
	for _, o := range inFlight {
		if o.write {
			l.maybe[o.block] = append(l.maybe[o.block], o.val)
		}
	}
}

func (l *load) check(t *testing.T, dev blockdev.Device) {
	t.Helper()
	got := make([]byte, 4096)
	for b, want := range l.acked {
		if err := dev.ReadAt(got, int64(l.base)*512+int64(b)*4096); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, bytes.Repeat(got[:1], 4096)) {
			t.Errorf("block %d is torn", b)
		}
		if got[0] != want && !bytes.Contains(l.maybe[b], got[:1]) {
			t.Errorf("block %d has %#x, acknowledged was %#x", b, got[0], want)
		}
	}
}

func TestShutdownUnderLoad(t *testing.T) {
	seed := newSeed(t)
	dev := memDevice(t, 64<<20)
	var rec recorder
	rec.TryDevice = dev.(blockdev.TryDevice)
	r := newRig(t, Config{}, &rec)
	var loads []*load
	var wg sync.WaitGroup
	for i := range 3 {
		s := r.attach(sessionOptions{queues: 2, kato: 5000})
		s.admin.aer()
		for k, q := range s.io {
			l := &load{q: q, base: uint64(len(loads)) * 8192, blocks: 500, acked: map[int]byte{}, maybe: map[int][]byte{}}
			loads = append(loads, l)
			wg.Add(1)
			go func() {
				defer wg.Done()
				l.run(rand.New(rand.NewPCG(seed, uint64(i*10+k))))
			}()
		}
	}
	eventually(t, "load", func() bool {
		for _, l := range loads {
			if l.ops.Load() < 300 {
				return false
			}
		}
		return true
	})
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	begin := time.Now()
	if err := r.tgt.Shutdown(ctx); err != nil {
		t.Errorf("shutdown: %v", err)
	}
	t.Logf("shutdown took %v", time.Since(begin))
	rec.take()
	r.checkReleased()
	wg.Wait()
	if got := rec.take(); got != "" {
		t.Errorf("device used after Shutdown: %.200s", got)
	}
	unanswered := 0
	for _, l := range loads {
		l.check(t, dev)
		unanswered += len(l.maybe)
	}
	t.Logf("%d writes unanswered", unanswered)
	if _, err := r.tgt.Listen(r.nic, r.addr); !errors.Is(err, ErrClosed) {
		t.Errorf("Listen after Shutdown: %v", err)
	}
	if _, err := r.tgt.AddNamespace(0, dev); !errors.Is(err, ErrClosed) {
		t.Errorf("AddNamespace after Shutdown: %v", err)
	}
}

// What was received before the shutdown began is executed and answered.
func TestShutdownAnswersWhatIsInFlight(t *testing.T) {
	dev := blockdevtest.Delayed(memDevice(t, 1<<20))
	r := newRig(t, Config{}, dev)
	s := r.attach(sessionOptions{queues: 1})
	q := s.io[0]
	gate := hold(dev, blockdev.OpWrite, blockdev.OpRead)
	var cids []uint16
	for i := range 8 {
		op := []protocol.Opcode{protocol.OpWrite, protocol.OpRead}[i%2]
		c := q.rw(op, uint64(i*8), 4096, i*4096, 0)
		q.send(c, nil)
		cids = append(cids, c.ID())
	}
	for gate.Waiting() < 8 {
		q.poll(false)
	}
	done := make(chan error)
	go func() { done <- r.tgt.Shutdown(context.Background()) }()
	eventually(t, "draining", func() bool {
		for _, q := range r.tgt.Status().Queues {
			if q.QID == 1 && q.State == queueDraining.String() {
				return true
			}
		}
		return false
	})
	late := q.rw(protocol.OpRead, 0, 4096, 0, 0)
	q.send(late, nil)
	gate.Open()
	for _, id := range cids {
		if a, err := q.take(id); err != nil || !a.Status().OK() {
			t.Errorf("command in flight: %v %v", a.Status(), err)
		}
	}
	if _, err := q.take(late.ID()); err == nil {
		t.Error("a command that came later is answered")
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, err := r.dial(0, dialOptions{}); err == nil {
		t.Error("a connection after Shutdown")
	}
}

// Storage that hangs must not hang the end of the program, and must not lose its buffers.
func TestShutdownWithHungStorage(t *testing.T) {
	dev := blockdevtest.Delayed(memDevice(t, 1<<20))
	r := newRig(t, Config{closeTimeout: 50 * time.Millisecond}, dev)
	s := r.attach(sessionOptions{queues: 1})
	gate := hold(dev, blockdev.OpRead)
	s.io[0].send(s.io[0].rw(protocol.OpRead, 0, 4096, 0, 0), nil)
	gate.Await(t, 1)
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	err := r.tgt.Shutdown(ctx)
	if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, ErrBusy) {
		t.Errorf("shutdown: %v", err)
	}
	if err := r.tgt.Close(); !errors.Is(err, ErrBusy) {
		t.Errorf("close: %v", err)
	}
	s.io[0].awaitEnd() // the host knows already
	gate.Open()
	eventually(t, "end", func() bool { return r.tgt.Close() == nil })
}

// The same for a flush that CC.SHN began.
func TestCloseWithHungShutdownFlush(t *testing.T) {
	dev := blockdevtest.Delayed(cached{memDevice(t, 1<<20).(blockdev.TryDevice)})
	r := newRig(t, Config{closeTimeout: 50 * time.Millisecond}, dev)
	s := r.attach(sessionOptions{})
	gate := hold(dev, blockdev.OpFlush)
	s.setCC(protocol.CCDefault.WithEN(true).WithSHN(protocol.SHNNormal))
	gate.Await(t, 1)
	if err := r.tgt.Close(); !errors.Is(err, ErrBusy) {
		t.Errorf("close: %v", err)
	}
	gate.Open()
	eventually(t, "end", func() bool { return r.tgt.Close() == nil })
}

func TestCloseUnderLoad(t *testing.T) {
	dev := memDevice(t, 16<<20)
	r := newRig(t, Config{}, dev)
	s := r.attach(sessionOptions{queues: 2})
	var wg sync.WaitGroup
	var loads []*load
	for i, q := range s.io {
		l := &load{q: q, base: uint64(i) * 8192, blocks: 500, acked: map[int]byte{}, maybe: map[int][]byte{}}
		loads = append(loads, l)
		wg.Add(1)
		go func() { defer wg.Done(); l.run(rand.New(rand.NewPCG(1, uint64(i)))) }()
	}
	eventually(t, "load", func() bool { return loads[0].ops.Load() > 200 && loads[1].ops.Load() > 200 })
	if err := r.tgt.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
	for _, l := range loads {
		l.check(t, dev)
	}
}

// A thousand hosts come and go; nothing accumulates.
func TestThousandRounds(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 16<<20))
	r.attach(sessionOptions{queues: 2}).close() // what is made once
	r.gone()
	measure := func() [6]int { // goroutines, descriptors, QPs, CQs, PDs, MRs
		s := r.nic.Stats()
		_, dump := goroutines()
		n := bytes.Count([]byte(dump), []byte("goroutine "))
		return [...]int{n, descriptors(), s.QPs, s.CQs, s.PDs, s.MRs}
	}
	var start [6]int
	eventually(t, "rest", func() bool { s := measure(); same := s == start; start = s; return same })
	rounds := 1000
	if testing.Short() {
		rounds = 100
	}
	for i := range rounds {
		s := r.attach(sessionOptions{queues: 2, kato: 5000})
		q := s.io[i%2]
		switch i % 5 {
		case 0:
			q.ok(q.rw(protocol.OpRead, 0, 65536, 0, 0))
		case 1: // leave with a command in flight
			q.send(q.rw(protocol.OpWrite, 0, 65536, 0, 0), nil)
		case 2:
			s.admin.aer()
			s.admin.close() // in this order
		case 3:
			s.setCC(protocol.CCDefault)
		case 4:
			s.setCC(protocol.CCDefault.WithEN(true).WithSHN(protocol.SHNNormal))
		}
		s.close()
	}
	r.gone()
	eventually(t, fmt.Sprintf("start values of goroutines, descriptors, QPs, CQs, PDs and MRs: %d", start), func() bool {
		runtime.Gosched()
		for i, n := range measure() {
			if n > start[i] { // less: something had not ended at the start
				return false
			}
		}
		return true
	})
}

// A thousand connections that say nothing do not keep a host out, and go away.
func TestThousandHalfOpenConnections(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	s := r.attach(sessionOptions{queues: 1})
	var list []net.Conn
	for range 1000 {
		c, err := net.Dial("tcp", r.addr.String())
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, c)
	}
	s.io[0].ok(s.io[0].rw(protocol.OpRead, 0, 4096, 0, 0))
	n := r.attach(sessionOptions{queues: 1})
	n.io[0].ok(n.io[0].rw(protocol.OpRead, 0, 4096, 0, 0))
	for _, c := range list {
		c.Close()
	}
}
