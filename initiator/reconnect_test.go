package initiator

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"rdblk/blockdev"
	"rdblk/protocol"
	"rdblk/rdma"

	"golang.org/x/sys/unix"
)

var seedFlag = flag.Uint64("seed", 0, "seed of the random tests, 0 = a new one")

func newRand(t testing.TB) *rand.Rand {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// player keeps one request after the other going on one queue, in a part of the disk of
// its own, and checks what it reads against what it wrote.
type player struct {
	t       testing.TB
	q       blockdev.Queue
	base    int64
	size    int
	rnd     *rand.Rand
	model   []byte
	r       blockdev.Request
	buf     []byte
	from    int
	pending bool
	answers atomic.Int64
	asked   atomic.Int64
	stop    atomic.Bool
	end     chan struct{}
	mayFail func(error) bool
}

func newPlayer(t testing.TB, q blockdev.Queue, base int64, size int, seed uint64) *player {
	p := &player{t: t, q: q, base: base, size: size, rnd: rand.New(rand.NewPCG(seed, 1)), model: make([]byte, size), end: make(chan struct{})}
	p.r.Done = p.done
	return p
}

// start and everything below run on the queue's worker.
func (p *player) start() {
	p.buf = p.q.Alloc(p.size)
	// What was there before is not known: begin with a write of everything.
	p.fill(p.buf)
	copy(p.model, p.buf)
	p.r.Op, p.r.Off, p.r.Buf, p.r.Flags = blockdev.OpWrite, p.base, p.buf[:p.size], 0
	p.submit()
}

func (p *player) fill(b []byte) {
	for i := range b {
		b[i] = byte(p.rnd.Uint32())
	}
}

func (p *player) submit() {
	p.pending = true
	p.asked.Add(1)
	p.q.Submit(&p.r)
}

func (p *player) done(r *blockdev.Request) {
	p.answers.Add(1)
	if !p.pending {
		p.t.Error("a request was answered twice")
		return
	}
	p.pending = false
	if r.Err != nil && (p.mayFail == nil || !p.mayFail(r.Err)) {
		p.t.Errorf("%s at %d: %v", r.Op, r.Off, r.Err)
	}
	if r.Op == blockdev.OpRead && r.Err == nil && !bytes.Equal(r.Buf, p.model[p.from:p.from+len(r.Buf)]) {
		p.t.Errorf("read of %d bytes at %d: not what was written", len(r.Buf), r.Off)
	}
	if p.stop.Load() || p.t.Failed() {
		p.q.Free(p.buf)
		close(p.end)
		return
	}
	const block = 512
	n := (1 + p.rnd.IntN(p.size/block)) * block
	if p.rnd.IntN(2) == 0 {
		n = min(n, 4096) // what fits the capsule
	}
	p.from = p.rnd.IntN((p.size-n)/block+1) * block
	p.r = blockdev.Request{Off: p.base + int64(p.from), Buf: p.buf[:n], Len: int64(n), Done: p.done}
	switch k := p.rnd.IntN(20); {
	case k < 9:
		p.r.Op = blockdev.OpRead
	case k < 17:
		p.r.Op = blockdev.OpWrite
		p.fill(p.r.Buf)
		copy(p.model[p.from:], p.r.Buf)
	case k < 18:
		p.r.Op = blockdev.OpZero
		clear(p.model[p.from : p.from+n])
	case k < 19:
		p.r.Op = blockdev.OpWrite
		p.r.Flags = blockdev.WriteFUA
		p.fill(p.r.Buf)
		copy(p.model[p.from:], p.r.Buf)
	default:
		p.r.Op = blockdev.OpFlush
	}
	p.submit()
}

// play starts players on the device: n on each queue.
func play(t testing.TB, d *Device, n, size int, rnd *rand.Rand) []*player {
	var all []*player
	for i := range d.NumQueues() {
		q, err := d.OpenQueue(i)
		if err != nil {
			t.Fatal(err)
		}
		for range n {
			p := newPlayer(t, q, int64(len(all)*size), size, rnd.Uint64())
			all = append(all, p)
			_ = q.Worker().Call(p.start)
		}
	}
	return all
}

func finishPlay(t testing.TB, all []*player) {
	t.Helper()
	for _, p := range all {
		p.stop.Store(true)
	}
	limit := time.NewTimer(2 * time.Minute)
	defer limit.Stop()
	for i, p := range all {
		select {
		case <-p.end:
		case <-limit.C:
			t.Fatalf("player %d: %d requests, %d answers", i, p.asked.Load(), p.answers.Load())
		}
		if a, b := p.asked.Load(), p.answers.Load(); a != b {
			t.Errorf("%d requests, %d answers", a, b)
		}
	}
}

// The ledger: whatever breaks whenever, every request is answered exactly once, none
// fails, and reads see what was written.
func TestLedgerUnderRandomDisconnects(t *testing.T) {
	rnd := newRand(t)
	f := newFakeTarget(t)
	f.spaces[1] = newFakeSpace(4<<20, 9)
	cfg := testConfig(f, newProvider(t))
	cfg.Queues, cfg.BufferMemory = 3, 8<<20
	s := connect(t, cfg)
	d := device(t, s)
	all := play(t, d, 8, 128<<10, rnd)
	cuts := 40
	if testing.Short() {
		cuts = 8
	}
	for i := range cuts {
		var answers int64
		for _, p := range all {
			answers += p.answers.Load()
		}
		more := int64(rnd.IntN(300))
		eventually(t, "requests go on", func() bool {
			var n int64
			for _, p := range all {
				n += p.answers.Load()
			}
			return n >= answers+more || t.Failed()
		})
		kind, grant := rnd.IntN(4), 1+rnd.IntN(4)
		if i == 0 { // so that commands cross workers in every run, however short
			kind, grant = 3, 1
		}
		switch kind {
		case 0:
			f.cut(nil)
		case 1:
			qid := uint16(rnd.IntN(4))
			f.cut(func(c *fakeConn) bool { return c.req.QID == qid })
		case 2:
			f.down()
			f.up()
		case 3:
			f.set(func() { f.grant = grant })
			f.cut(func(c *fakeConn) bool { return c.req.QID == 0 })
		}
		if i == 0 { // before the next cut grants all of them again
			eventually(t, "commands cross workers", func() bool { return s.Stats().Forwarded > 0 || t.Failed() })
		}
		if t.Failed() {
			t.Fatalf("after cut %d", i)
		}
	}
	finishPlay(t, all)
	st, stats := s.Status(), s.Stats()
	if st.Requests != 0 || st.OldestRequest != 0 {
		t.Errorf("%d requests are left in the ledger", st.Requests)
	}
	if st.Reconnects == 0 || stats.Resent == 0 || stats.Forwarded == 0 {
		t.Errorf("nothing was tested: %d reconnects, %d sent again, %d forwarded", st.Reconnects, stats.Resent, stats.Forwarded)
	}
	var n uint64
	for _, o := range stats.Ops {
		n += o.Answered
		if o.Failed != 0 || o.Latency.Count() != o.Answered {
			t.Errorf("%+v", o)
		}
	}
	t.Logf("%d requests, %d reconnects, %d sent again, %d forwarded", n, st.Reconnects, stats.Resent, stats.Forwarded)
}

func TestTargetRestart(t *testing.T) {
	f := newFakeTarget(t)
	s := connect(t, testConfig(f, newProvider(t)))
	d := device(t, s)
	first := s.Status()
	f.down()
	eventually(t, "the loss is noticed", func() bool { return s.Status().State == StateReconnecting })
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			if err := d.WriteAt(pattern(byte(i), 4096), int64(i)*4096, 0); err != nil {
				t.Error(err)
			}
		})
	}
	eventually(t, "requests wait", func() bool { return s.Status().Waiting == 16 && s.Status().OldestRequest > 0 })
	if st := s.Status(); st.Sent != 0 || st.LastError == "" || st.LastErrorAt.IsZero() {
		t.Errorf("%+v", st)
	}
	eventually(t, "it tries", func() bool { return s.Status().FailedAttempts >= 3 })
	f.up()
	wg.Wait()
	for i := range 16 {
		if !bytes.Equal(f.spaces[1].content(int64(i)*4096, 4096), pattern(byte(i), 4096)) {
			t.Errorf("write %d is not there", i)
		}
	}
	st := s.Status()
	if st.State != StateLive || st.Reconnects != 1 || st.CNTLID == first.CNTLID || st.Requests != 0 {
		t.Errorf("%+v", st)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.hostIDs) != 2 || f.hostIDs[0] != f.hostIDs[1] || f.hostIDs[0].IsZero() {
		t.Errorf("host identifiers %v: the target could not tell that it is the same host", f.hostIDs)
	}
}

// The new association may break at every step on its way.
func TestDiesAtEveryStage(t *testing.T) {
	f := newFakeTarget(t)
	cfg := testConfig(f, newProvider(t))
	cfg.ReconnectMaxDelay = 5 * time.Millisecond
	s := connect(t, cfg)
	d := device(t, s)
	f.mu.Lock()
	steps := len(f.log) // commands of an initialisation
	f.mu.Unlock()
	var seen, limit atomic.Int32
	silent := false
	f.set(func() {
		f.hook = func(k *fakeCommand) bool {
			if seen.Add(1) <= limit.Load() {
				return false
			}
			limit.Add(1)
			seen.Store(0)
			k.killed.Store(!silent)
			return true
		}
	})
	f.cut(nil)
	if err := d.WriteAt(pattern(1, 8192), 0, 0); err != nil {
		t.Fatal(err)
	}
	if n := int(limit.Load()); n < steps-1 {
		t.Errorf("%d stages of %d were tried", n, steps)
	}
	if !bytes.Equal(f.spaces[1].content(0, 8192), pattern(1, 8192)) {
		t.Error("not written")
	}
}

func TestLossTimeout(t *testing.T) {
	f := newFakeTarget(t)
	cfg := testConfig(f, newProvider(t))
	cfg.LossTimeout = 150 * time.Millisecond
	var events []EventKind
	var mu sync.Mutex
	cfg.OnEvent = func(e Event) {
		mu.Lock()
		defer mu.Unlock()
		events = append(events, e.Kind)
	}
	s := connect(t, cfg)
	d := device(t, s)
	if err := d.WriteAt(pattern(1, 512), 0, 0); err != nil {
		t.Fatal(err)
	}
	f.down()
	start := time.Now()
	err := d.ReadAt(make([]byte, 512), 0)
	if !errors.Is(err, blockdev.ErrLost) || !strings.Contains(err.Error(), "150ms") {
		t.Errorf("%v", err)
	}
	if took := time.Since(start); took > 30*time.Second {
		t.Errorf("after %v", took)
	}
	start = time.Now()
	if err := d.WriteAt(pattern(2, 512), 0, 0); !errors.Is(err, blockdev.ErrLost) {
		t.Errorf("a new request: %v", err)
	}
	if took := time.Since(start); took > 30*time.Second {
		t.Errorf("a new request failed after %v", took)
	}
	if st := s.Status(); st.State != StateLost || st.Requests != 0 {
		t.Errorf("%+v", st)
	}
	f.up()
	eventually(t, "it comes back", func() bool { return s.Status().State == StateLive })
	got := make([]byte, 512)
	if err := d.ReadAt(got, 0); err != nil || !bytes.Equal(got, pattern(1, 512)) {
		t.Errorf("afterwards: %v", err)
	}
	want := []EventKind{EventConnected, EventDisconnected, EventLost, EventConnected}
	eventually(t, "events", func() bool { mu.Lock(); defer mu.Unlock(); return len(events) == len(want) })
	if !slices.Equal(events, want) {
		t.Errorf("events %v", events)
	}
}

// The loss timeout counts although an attempt to connect hangs.
func TestLossTimeoutDuringAnAttempt(t *testing.T) {
	f := newFakeTarget(t)
	cfg := testConfig(f, newProvider(t))
	cfg.LossTimeout, cfg.ConnectTimeout = 100*time.Millisecond, 30*time.Second
	s := connect(t, cfg)
	d := device(t, s)
	f.set(func() { f.hook = func(*fakeCommand) bool { return true } })
	f.cut(nil)
	start := time.Now()
	if err := d.ReadAt(make([]byte, 512), 0); !errors.Is(err, blockdev.ErrLost) {
		t.Error(err)
	}
	if took := time.Since(start); took > 15*time.Second {
		t.Errorf("after %v", took)
	}
}

func TestWaitForEver(t *testing.T) {
	f := newFakeTarget(t)
	cfg := testConfig(f, newProvider(t))
	cfg.LossTimeout = -1
	s := connect(t, cfg)
	d := device(t, s)
	f.down()
	done := make(chan error)
	go func() { done <- d.ReadAt(make([]byte, 512), 0) }()
	eventually(t, "many attempts", func() bool { return s.Status().FailedAttempts >= 5 })
	f.up()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// What a target refuses for good it may take later: someone puts the list of hosts
// right.
func TestRefusedForGoodWhileReconnecting(t *testing.T) {
	f := newFakeTarget(t)
	s := connect(t, testConfig(f, newProvider(t)))
	d := device(t, s)
	f.set(func() { f.hook = answer("Connect", protocol.StatusConnectInvalidHost.WithDNR(), 0) })
	f.cut(nil)
	done := make(chan error)
	go func() { done <- d.ReadAt(make([]byte, 512), 0) }()
	eventually(t, "the status says so", func() bool {
		st := s.Status()
		return st.Refused && st.FailedAttempts >= 2 && strings.Contains(st.LastError, "does not allow host")
	})
	f.set(func() { f.hook = nil })
	if err := <-done; err != nil {
		t.Error(err)
	}
	eventually(t, "forgotten", func() bool { return !s.Status().Refused })
}

// Nothing is written to another disk.
func TestAnotherDiskAfterReconnect(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*fakeTarget)
	}{
		{"UUID", func(f *fakeTarget) { f.spaces[1].id.UUID[0] ^= 1 }},
		{"NGUID", func(f *fakeTarget) { f.spaces[1].id.NGUID[0] ^= 1 }},
		{"identifiers gone", func(f *fakeTarget) { f.spaces[1].id = protocol.NamespaceIDs{} }},
		{"smaller", func(f *fakeTarget) { f.spaces[1].resize(512 << 10) }},
		{"block size", func(f *fakeTarget) {
			f.spaces[1].shift, f.spaces[1].ns.LBAF[0].LBADS = 12, 12
			f.spaces[1].resize(1 << 20)
		}},
		{"metadata", func(f *fakeTarget) { f.spaces[1].ns.LBAF[0].MS = 8 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFakeTarget(t)
			changed := make(chan Event, 1)
			cfg := testConfig(f, newProvider(t))
			cfg.OnEvent = func(e Event) {
				if e.Kind == EventChanged {
					select {
					case changed <- e:
					default:
					}
				}
			}
			s := connect(t, cfg)
			d := device(t, s)
			old := f.spaces[1]
			copied := &fakeSpace{data: old.content(0, 1<<20), shift: old.shift, id: old.id, ns: old.ns}
			f.down()
			eventually(t, "down", func() bool { return s.Status().State == StateReconnecting })
			done := make(chan error)
			go func() { done <- d.WriteAt(pattern(1, 4096), 4096, 0) }()
			eventually(t, "waits", func() bool { return s.Status().Waiting == 1 })
			f.set(func() { f.spaces[1] = copied; c.change(f) })
			f.up()
			if err := <-done; !errors.Is(err, ErrChanged) {
				t.Errorf("%v", err)
			}
			if err := d.ReadAt(make([]byte, 512), 0); !errors.Is(err, ErrChanged) {
				t.Errorf("read: %v", err)
			}
			if n := copied.writes.Load(); n != 0 {
				t.Errorf("%d writes to another disk", n)
			}
			if e := <-changed; e.NSID != 1 || !errors.Is(e.Err, ErrChanged) {
				t.Errorf("event %+v", e)
			}
			if st := s.Status(); st.State != StateLive || st.Namespaces[0].Fault == "" || d.Info().Size != 1<<20 || d.Info().BlockSize != 512 {
				t.Errorf("%+v", st)
			}
			// The right one is taken again.
			f.down()
			f.set(func() { f.spaces[1] = old })
			f.up()
			eventually(t, "the right disk is back", func() bool { return d.WriteAt(pattern(1, 4096), 4096, 0) == nil })
			if !bytes.Equal(old.content(4096, 4096), pattern(1, 4096)) {
				t.Error("not written")
			}
		})
	}
}

func TestGrownAfterReconnect(t *testing.T) {
	f := newFakeTarget(t)
	resized := make(chan Event, 4)
	cfg := testConfig(f, newProvider(t))
	cfg.OnEvent = func(e Event) {
		if e.Kind == EventResized {
			resized <- e
		}
	}
	s := connect(t, cfg)
	d := device(t, s)
	f.down()
	f.spaces[1].resize(2 << 20)
	f.up()
	if e := <-resized; e.Size != 2<<20 || e.NSID != 1 {
		t.Errorf("%+v", e)
	}
	if err := d.WriteAt(pattern(1, 4096), 2<<20-4096, 0); err != nil || d.Info().Size != 2<<20 {
		t.Errorf("%v, %d bytes", err, d.Info().Size)
	}
	_ = s
}

// A target that starts listening before it has its namespaces is waited for.
func TestNamespaceComesLate(t *testing.T) {
	f := newFakeTarget(t)
	s := connect(t, testConfig(f, newProvider(t)))
	d := device(t, s)
	ns := f.spaces[1]
	f.down()
	f.set(func() { delete(f.spaces, 1) })
	f.up()
	done := make(chan error)
	go func() { done <- d.WriteAt(pattern(1, 512), 0, 0) }()
	eventually(t, "it asks for the namespace", func() bool { return strings.Contains(s.Status().LastError, "no such namespace (yet)") })
	f.set(func() { f.spaces[1] = ns })
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// Fewer queues than workers: some share a connection, and all go on.
func TestFewerQueuesAfterReconnect(t *testing.T) {
	rnd := newRand(t)
	f := newFakeTarget(t)
	f.spaces[1] = newFakeSpace(4<<20, 9)
	cfg := testConfig(f, newProvider(t))
	cfg.Queues = 4
	s := connect(t, cfg)
	d := device(t, s)
	if d.NumQueues() != 4 || s.Status().Granted != 4 {
		t.Fatalf("%d queues", d.NumQueues())
	}
	all := play(t, d, 4, 64<<10, rnd)
	for i, grant := range []int{1, 3, 2, 1, 1, 4} {
		f.set(func() { f.grant = grant })
		f.cut(func(c *fakeConn) bool { return c.req.QID == 1 })
		eventually(t, fmt.Sprintf("reconnect %d with %d queues", i, grant), func() bool {
			st := s.Status()
			return st.State == StateLive && st.Granted == grant && st.Reconnects == uint64(i+1)
		})
		marks := make([]int64, len(all))
		for i, p := range all {
			marks[i] = p.answers.Load()
		}
		eventually(t, "every queue goes on", func() bool {
			for i, p := range all {
				if p.answers.Load() < marks[i]+5 {
					return false
				}
			}
			return true
		})
	}
	if n := s.Stats().Forwarded; n == 0 {
		t.Error("nothing was forwarded")
	}
	// A dead connection of another worker is not tried over and over: each loss costs a
	// request one repetition.
	if n, most := s.Stats().Resent, uint64(len(all))*s.Status().Reconnects; n > most {
		t.Errorf("%d repetitions in %d reconnects with %d requests", n, s.Status().Reconnects, len(all))
	}
	before := s.Stats().Forwarded
	finishPlay(t, all)
	if n := s.Stats().Forwarded; n != before {
		t.Error("commands are forwarded although every queue has its connection")
	}
}

// What is sent again goes in the order in which it was accepted.
func TestResentInOrder(t *testing.T) {
	f := newFakeTarget(t)
	cfg := testConfig(f, newProvider(t))
	cfg.Queues, cfg.Depth = 1, 8
	s := connect(t, cfg)
	d := device(t, s)
	var mu sync.Mutex
	var order []uint64
	silent, swallowed := true, 0
	f.set(func() {
		f.hook = func(k *fakeCommand) bool {
			if k.req.QID == 0 || k.cmd.Opcode() != protocol.OpWrite {
				return false
			}
			mu.Lock()
			defer mu.Unlock()
			if silent {
				swallowed++
				return true
			}
			order = append(order, k.cmd.SLBA())
			return false
		}
	})
	q, _ := d.OpenQueue(0)
	var wg sync.WaitGroup
	const n = 20 // more than the queue holds
	_ = q.Worker().Call(func() {
		for i := range n {
			wg.Add(1)
			q.Submit(&blockdev.Request{Op: blockdev.OpWrite, Off: int64(n-i) * 512, Buf: q.Alloc(512), Done: func(r *blockdev.Request) {
				if r.Err != nil {
					t.Error(r.Err)
				}
				q.Free(r.Buf)
				wg.Done()
			}})
		}
	})
	eventually(t, "the queue is full", func() bool { mu.Lock(); defer mu.Unlock(); return swallowed == 7 })
	mu.Lock()
	silent = false
	mu.Unlock()
	f.cut(nil)
	wg.Wait()
	mu.Lock()
	defer mu.Unlock()
	if len(order) != n || !slices.IsSortedFunc(order, func(a, b uint64) int { return int(int64(b) - int64(a)) }) {
		t.Errorf("order %v", order)
	}
}

// A request that kills its target every time fails in the end; the others do not.
func TestPoisonousRequest(t *testing.T) {
	f := newFakeTarget(t)
	cfg := testConfig(f, newProvider(t))
	cfg.LossTimeout = 8 * time.Second // a reconnect takes some of it on a busy machine
	s := connect(t, cfg)
	d := device(t, s)
	f.set(func() {
		f.hook = func(k *fakeCommand) bool {
			if k.req.QID > 0 && k.cmd.Opcode() == protocol.OpRead && k.cmd.SLBA() == 7 {
				k.killed.Store(true)
				return true
			}
			return false
		}
	})
	done := make(chan error)
	go func() { done <- d.ReadAt(make([]byte, 512), 7*512) }()
	for {
		select {
		case err := <-done:
			if !errors.Is(err, blockdev.ErrLost) || !strings.Contains(err.Error(), "times") {
				t.Error(err)
			}
			return
		default:
		}
		if err := d.WriteAt(pattern(1, 512), 0, 0); err != nil {
			t.Fatalf("a harmless request: %v", err)
		}
	}
}

// flushing tells how a device's flushes fare over what happens to the target.
func TestFailedFlushStaysFailed(t *testing.T) {
	f := newFakeTarget(t)
	s := connect(t, testConfig(f, newProvider(t)))
	d := device(t, s)
	if err := errors.Join(d.WriteAt(pattern(1, 512), 0, 0), d.Flush()); err != nil {
		t.Fatal(err)
	}
	f.set(func() { f.hook = answer("Flush", protocol.StatusWriteFault.WithDNR(), 0) })
	if err := d.Flush(); !errors.Is(err, protocol.StatusWriteFault) {
		t.Errorf("%v", err)
	}
	f.set(func() { f.hook = nil })
	f.cut(nil) // a restart opens the store anew, and there flushing works
	flushes := f.spaces[1].flushes.Load()
	for range 2 {
		if err := d.Flush(); !errors.Is(err, blockdev.ErrFlushFailed) {
			t.Errorf("flush: %v", err)
		}
		if err := d.WriteAt(pattern(2, 512), 0, blockdev.WriteFUA); !errors.Is(err, blockdev.ErrFlushFailed) {
			t.Errorf("FUA: %v", err)
		}
	}
	if f.spaces[1].flushes.Load() != flushes {
		t.Error("a flush was sent")
	}
	if err := d.WriteAt(pattern(2, 512), 0, 0); err != nil {
		t.Errorf("plain write: %v", err)
	}
	if err := d.ReadAt(make([]byte, 512), 0); err != nil {
		t.Errorf("read: %v", err)
	}
	if st := s.Status(); st.Namespaces[0].FlushFault == "" {
		t.Errorf("%+v", st)
	}
	again := device(t, connect(t, testConfig(f, newProvider(t))))
	if err := again.Flush(); err != nil {
		t.Errorf("attached anew: %v", err)
	}
}

func TestFailedFUA(t *testing.T) {
	for _, c := range []struct {
		s      protocol.Status
		sticky bool
	}{
		{protocol.StatusWriteFault.WithDNR(), true},
		{protocol.StatusInternalError.WithDNR(), true},
		{protocol.StatusCapacityExceeded.WithDNR(), false},
		{protocol.StatusNamespaceWriteProtected, false},
		{protocol.StatusLBAOutOfRange.WithDNR(), false},
	} {
		f := newFakeTarget(t)
		d := device(t, connect(t, testConfig(f, newProvider(t))))
		f.set(func() { f.hook = answer("Write", c.s, 0) })
		if err := d.WriteAt(pattern(1, 512), 0, 0); !errors.Is(err, c.s) {
			t.Errorf("%v", err)
		}
		if err := d.Flush(); err != nil {
			t.Errorf("flush after a failed plain write: %v", err)
		}
		if err := d.WriteAt(pattern(1, 512), 0, blockdev.WriteFUA); !errors.Is(err, c.s) {
			t.Errorf("%v", err)
		}
		if err := d.Flush(); errors.Is(err, blockdev.ErrFlushFailed) != c.sticky {
			t.Errorf("flush after FUA with %v: %v", c.s, err)
		}
	}
}

// A target whose machine crashed has lost what was not flushed. It must not be possible
// to flush that successfully.
func TestCacheLost(t *testing.T) {
	cycle := func(f *fakeTarget, power, unsafe uint64) {
		f.down()
		f.set(func() {
			f.smart.PowerCycles.Lo += power
			f.smart.UnsafeShutdowns.Lo += unsafe
		})
		f.up()
	}
	for _, c := range []struct {
		name          string
		start         uint64 // power cycles
		power, unsafe uint64
		write         func(*Device) error
		lost          bool
	}{
		{"process restarted", 3, 0, 0, func(d *Device) error { return d.WriteAt(pattern(1, 512), 0, 0) }, false},
		{"power cycle, unflushed write", 3, 1, 0, func(d *Device) error { return d.WriteAt(pattern(1, 512), 0, 0) }, true},
		{"unsafe shutdown, unflushed write", 3, 0, 1, func(d *Device) error { return d.WriteAt(pattern(1, 512), 0, 0) }, true},
		{"power cycle, unflushed zeroes", 3, 1, 1, func(d *Device) error { return d.Zero(0, 512, 0) }, true},
		{"power cycle, flushed", 3, 1, 1, func(d *Device) error {
			return errors.Join(d.WriteAt(pattern(1, 512), 0, 0), d.WriteAt(pattern(1, 512), 512, 0), d.WriteAt(pattern(1, 512), 1024, 0), d.Flush())
		}, false},
		{"power cycle, FUA only", 3, 1, 1, func(d *Device) error { return d.WriteAt(pattern(1, 512), 0, blockdev.WriteFUA) }, false},
		{"power cycle, reads only", 3, 1, 1, func(d *Device) error { return d.ReadAt(make([]byte, 512), 0) }, false},
		{"power cycle, flushed and written again", 3, 1, 1, func(d *Device) error {
			return errors.Join(d.WriteAt(pattern(1, 512), 0, 0), d.Flush(), d.WriteAt(pattern(1, 512), 0, 0))
		}, true},
		{"target does not count", 0, 0, 0, func(d *Device) error { return d.WriteAt(pattern(1, 512), 0, 0) }, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFakeTarget(t)
			f.smart.PowerCycles.Lo = c.start
			s := connect(t, testConfig(f, newProvider(t)))
			d := device(t, s)
			if err := c.write(d); err != nil {
				t.Fatal(err)
			}
			cycle(f, c.power, c.unsafe)
			eventually(t, "reconnected", func() bool { st := s.Status(); return st.State == StateLive && st.Reconnects == 1 })
			if err := d.Flush(); errors.Is(err, blockdev.ErrFlushFailed) != c.lost || !c.lost && err != nil {
				t.Errorf("flush: %v", err)
			}
			// Reads would see what was there before the writes that are gone.
			f.cut(nil)
			if err := d.ReadAt(make([]byte, 512), 0); errors.Is(err, ErrCacheLost) != c.lost || !c.lost && err != nil {
				t.Errorf("read: %v", err)
			}
			if fault := s.Status().Namespaces[0].Fault; (fault != "") != c.lost {
				t.Errorf("status says %q", fault)
			}
			if err := device(t, connect(t, testConfig(f, newProvider(t)))).Flush(); err != nil {
				t.Errorf("attached anew: %v", err)
			}
		})
	}
	// What counts is the namespace's own number, if the target has one for each: the sum changes
	// with the namespaces that there are, and stays the same when one with a loss goes and
	// another one has a loss.
	for _, c := range []struct {
		name       string
		sum, other uint64
		own        uint64
		lost       bool
	}{
		{"another namespace with losses comes", 5, 2, 3, false},
		{"it went, and this one has a loss", 3, 0, 4, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFakeTarget(t)
			f.ctrl.LPA |= protocol.LPASmartPerNamespace
			f.smart.PowerCycles.Lo, f.smart.UnsafeShutdowns.Lo, f.losses = 1, 3, map[uint32]uint64{1: 3}
			s := connect(t, testConfig(f, newProvider(t)))
			d := device(t, s)
			if err := d.WriteAt(pattern(1, 512), 0, 0); err != nil {
				t.Fatal(err)
			}
			f.set(func() { f.smart.UnsafeShutdowns.Lo, f.losses = c.sum, map[uint32]uint64{1: c.own, 2: c.other} })
			cycle(f, 0, 0)
			eventually(t, "reconnected", func() bool { st := s.Status(); return st.State == StateLive && st.Reconnects == 1 })
			if err := d.Flush(); errors.Is(err, ErrCacheLost) != c.lost || !c.lost && err != nil {
				t.Errorf("flush: %v", err)
			}
		})
	}
	t.Run("flush on its way", func(t *testing.T) {
		f := newFakeTarget(t)
		f.smart.PowerCycles.Lo = 1
		s := connect(t, testConfig(f, newProvider(t)))
		d := device(t, s)
		if err := d.WriteAt(pattern(1, 512), 0, 0); err != nil {
			t.Fatal(err)
		}
		arrived := make(chan struct{})
		f.set(func() { f.hook = once(protocol.OpFlush, func(*fakeCommand) { close(arrived) }) })
		done := make(chan error)
		go func() { done <- d.Flush() }()
		<-arrived
		cycle(f, 1, 0)
		if err := <-done; !errors.Is(err, ErrCacheLost) {
			t.Errorf("the flush that was sent again: %v", err)
		}
	})
}

func TestKeepAlive(t *testing.T) {
	f := newFakeTarget(t)
	cfg := testConfig(f, newProvider(t))
	cfg.KeepAlive = 2 * time.Second // less, and a busy machine may answer late
	s := connect(t, cfg)
	d := device(t, s)
	eventually(t, "keep alives", func() bool { return f.count("Keep Alive") >= 3 })
	if st := s.Status(); st.Reconnects != 0 {
		t.Errorf("%+v", st)
	}
	// A target that refuses it is no dead target.
	f.set(func() { f.hook = answer("Keep Alive", protocol.StatusKeepAliveInvalid, 0) })
	n := f.count("Keep Alive")
	eventually(t, "more of them", func() bool { return f.count("Keep Alive") >= n+3 })
	if st := s.Status(); st.Reconnects != 0 {
		t.Errorf("%+v", st)
	}
	// One that does not answer is.
	var dead atomic.Bool
	dead.Store(true)
	f.set(func() {
		f.hook = func(k *fakeCommand) bool {
			return k.req.QID == 0 && k.cmd.AdminOpcode() == protocol.AdminKeepAlive && dead.Load()
		}
	})
	eventually(t, "reconnected", func() bool { return s.Status().Reconnects >= 1 })
	if st := s.Status(); !strings.Contains(st.LastError, "Keep Alive") {
		t.Errorf("%s", st.LastError)
	}
	dead.Store(false)
	if err := d.ReadAt(make([]byte, 512), 0); err != nil {
		t.Error(err)
	}
}

func TestNamespaceEvents(t *testing.T) {
	f := newFakeTarget(t)
	events := make(chan Event, 64)
	cfg := testConfig(f, newProvider(t))
	cfg.RetryTimeout = 100 * time.Millisecond
	cfg.OnEvent = func(e Event) {
		if e.Kind != EventConnected && e.Kind != EventNamespaces {
			events <- e
		}
	}
	s := connect(t, cfg)
	d := device(t, s)
	changed := func(fn func()) {
		fn()
		eventually(t, "an event request", func() bool {
			n := make(chan int, 1)
			f.admins(func(c *fakeConn) { n <- len(c.aers) })
			return <-n == 1
		})
		f.event(protocol.EventNamespaceChanged)
	}
	changed(func() { f.spaces[1].resize(2 << 20) })
	if e := <-events; e.Kind != EventResized || e.Size != 2<<20 || d.Info().Size != 2<<20 {
		t.Errorf("grow: %+v, %d bytes", e, d.Info().Size)
	}
	if err := d.WriteAt(pattern(1, 512), 2<<20-512, 0); err != nil {
		t.Error(err)
	}
	changed(func() { f.spaces[1].resize(1 << 20) })
	if e := <-events; e.Kind != EventShrunk || e.Size != 1<<20 || d.Info().Size != 2<<20 {
		t.Errorf("shrink: %+v, %d bytes", e, d.Info().Size)
	}
	if err := d.WriteAt(pattern(1, 512), 0, 0); err != nil {
		t.Errorf("what is left of a shrunk namespace: %v", err)
	}
	if err := d.ReadAt(make([]byte, 512), 2<<20-512); !errors.Is(err, blockdev.ErrOutOfRange) {
		t.Errorf("what is not: %v", err)
	}
	changed(func() { f.spaces[1].resize(2 << 20) })
	changed(func() { f.set(func() { f.spaces[2] = newFakeSpace(1<<20, 9) }) })
	eventually(t, "a new namespace is seen", func() bool { return len(s.Namespaces()) == 2 })
	if _, err := s.Device(2); err != nil {
		t.Error(err)
	}
	ns := f.spaces[1]
	changed(func() { f.set(func() { delete(f.spaces, 1) }) })
	if e := <-events; e.Kind != EventNamespaceGone || e.NSID != 1 {
		t.Errorf("gone: %+v", e)
	}
	if err := d.ReadAt(make([]byte, 512), 0); !errors.Is(err, ErrNoNamespace) {
		t.Errorf("read of a namespace that is gone: %v", err)
	}
	changed(func() { f.set(func() { f.spaces[1] = ns }) })
	eventually(t, "back", func() bool { return d.ReadAt(make([]byte, 512), 0) == nil })
	changed(func() { f.set(func() { f.spaces[1] = newFakeSpace(2<<20, 9) }) })
	if e := <-events; e.Kind != EventChanged || e.NSID != 1 {
		t.Errorf("another disk: %+v", e)
	}
	if err := d.WriteAt(make([]byte, 512), 0, 0); !errors.Is(err, ErrChanged) {
		t.Errorf("write to another disk: %v", err)
	}
	if st := s.Status(); st.Reconnects != 0 {
		t.Errorf("%+v", st)
	}
}

// A namespace that is disabled and enabled again is a pause, one that stays away an error
// in time, and nothing is written to what comes in its place; with and without a notice
// from the target, and whatever it answers meanwhile.
func TestNamespaceGone(t *testing.T) {
	for _, c := range []struct {
		name   string
		notice bool
		status protocol.Status
	}{
		{"told", true, protocol.StatusInvalidNamespace.WithDNR()},
		{"told, path error", true, protocol.StatusInternalPathError},
		{"not told", false, protocol.StatusInvalidNamespace.WithDNR()},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFakeTarget(t)
			f.hook = func(k *fakeCommand) bool { // what a target that has disabled it answers
				if k.req.QID == 0 || k.cmd.IsFabrics() {
					return false
				}
				k.f.mu.Lock()
				there := k.f.spaces[k.cmd.NSID()] != nil
				k.f.mu.Unlock()
				if !there {
					_ = k.respond(c.status, 0)
				}
				return !there
			}
			cfg := testConfig(f, newProvider(t))
			cfg.RetryTimeout = 5 * time.Second
			s := connect(t, cfg)
			d := device(t, s)
			swap := func(ns *fakeSpace) {
				f.set(func() {
					if ns == nil {
						delete(f.spaces, 1)
					} else {
						f.spaces[1] = ns
					}
				})
				if c.notice {
					eventually(t, "an event request", func() bool {
						n := make(chan int, 1)
						f.admins(func(c *fakeConn) { n <- len(c.aers) })
						return <-n == 1
					})
					f.event(protocol.EventNamespaceChanged)
				}
			}
			fault := func() string { return s.Status().Namespaces[0].Fault }
			old := f.spaces[1]
			swap(nil)
			done := make(chan error, 1)
			go func() { done <- d.WriteAt(pattern(1, 4096), 4096, 0) }()
			eventually(t, "status says so", func() bool { return strings.Contains(fault(), ErrNoNamespace.Error()) })
			select {
			case err := <-done:
				t.Fatalf("did not wait: %v", err)
			default:
			}
			swap(old)
			if err := <-done; err != nil || !bytes.Equal(old.content(4096, 4096), pattern(1, 4096)) {
				t.Errorf("after a pause: %v", err)
			}
			eventually(t, "status is clean", func() bool { return fault() == "" })

			swap(nil)
			start := time.Now()
			if err := d.WriteAt(pattern(2, 512), 0, 0); !errors.Is(err, ErrNoNamespace) || !strings.Contains(err.Error(), "put it back") {
				t.Errorf("stayed away: %v", err)
			}
			if took := time.Since(start); took < time.Second || took > 60*time.Second {
				t.Errorf("failed after %v", took)
			}
			start = time.Now()
			if err := d.ReadAt(make([]byte, 512), 0); !errors.Is(err, ErrNoNamespace) {
				t.Errorf("%v", err)
			}
			if took := time.Since(start); took >= cfg.RetryTimeout {
				t.Errorf("one that came later failed after %v", took)
			}
			other := newFakeSpace(1<<20, 9)
			swap(other)
			eventually(t, "the other disk is seen", func() bool { return strings.Contains(fault(), ErrChanged.Error()) })
			if err := d.WriteAt(pattern(3, 512), 0, 0); !errors.Is(err, ErrChanged) || other.writes.Load() != 0 {
				t.Errorf("another disk in its place: %v, %d writes", err, other.writes.Load())
			}
			swap(nil)
			swap(old)
			if !c.notice {
				if _, err := d.Refresh(); err != nil {
					t.Error(err)
				}
			}
			eventually(t, "the right one again", func() bool { return fault() == "" })
			if err := d.WriteAt(pattern(3, 512), 0, 0); err != nil {
				t.Error(err)
			}
			if st := s.Status(); st.Reconnects != 0 || st.FailedAttempts != 0 {
				t.Errorf("%+v", st)
			}
		})
	}
}

// A Flush waits for a target that is away only if there is something to make durable.
func TestFlushWhileTheTargetIsAway(t *testing.T) {
	f := newFakeTarget(t)
	cfg := testConfig(f, newProvider(t))
	cfg.LossTimeout = 300 * time.Millisecond
	s := connect(t, cfg)
	d := device(t, s)
	away := func(want State) {
		t.Helper()
		f.down()
		eventually(t, want.String(), func() bool { return s.Status().State == want })
	}
	back := func() {
		f.up()
		eventually(t, "back", func() bool { return s.Status().Live() })
	}
	if err := errors.Join(d.WriteAt(pattern(1, 512), 0, 0), d.Flush()); err != nil {
		t.Fatal(err)
	}
	flushes := f.spaces[1].flushes.Load()
	away(StateLost)
	if err := d.Flush(); err != nil {
		t.Errorf("nothing is unflushed: %v", err)
	}
	if err := d.WriteAt(pattern(1, 512), 0, blockdev.WriteFUA); !errors.Is(err, blockdev.ErrLost) {
		t.Errorf("FUA: %v", err)
	}
	if err := d.Flush(); err == nil && s.Status().Namespaces[0].FlushFault != "" {
		t.Error("a Flush after a failed one succeeded")
	}
	back()
	if n := f.spaces[1].flushes.Load(); n != flushes {
		t.Errorf("%d flushes were sent", n-flushes)
	}

	f2 := newFakeTarget(t)
	cfg = testConfig(f2, newProvider(t))
	cfg.LossTimeout = 300 * time.Millisecond
	s = connect(t, cfg)
	d = device(t, s)
	f = f2
	if err := errors.Join(d.Flush(), d.WriteAt(pattern(2, 512), 0, 0)); err != nil {
		t.Fatal(err)
	}
	away(StateLost)
	if err := d.Flush(); !errors.Is(err, blockdev.ErrLost) {
		t.Errorf("with an unflushed write: %v", err)
	}

	// Whoever attached before and died may have left writes that the first flush is for.
	f3 := newFakeTarget(t)
	cfg = testConfig(f3, newProvider(t))
	cfg.LossTimeout = 300 * time.Millisecond
	s = connect(t, cfg)
	d = device(t, s)
	f = f3
	away(StateLost)
	if err := d.Flush(); !errors.Is(err, blockdev.ErrLost) {
		t.Errorf("the first flush of an attachment: %v", err)
	}
}

func TestRefresh(t *testing.T) {
	f := newFakeTarget(t)
	s := connect(t, testConfig(f, newProvider(t)))
	d := device(t, s)
	f.spaces[1].resize(2 << 20)
	if in, err := d.Refresh(); err != nil || in.Size != 2<<20 {
		t.Errorf("%d bytes, %v", in.Size, err)
	}
	f.spaces[1].resize(1 << 20)
	if in, err := d.Refresh(); err == nil || in.Size != 2<<20 {
		t.Errorf("%d bytes, %v", in.Size, err)
	}
	f.down()
	eventually(t, "down", func() bool { return s.Status().State != StateLive })
	if _, err := d.Refresh(); err == nil {
		t.Error("refreshed without a target")
	}
}

// A persistent error of the controller ends the association.
func TestPersistentErrorEvent(t *testing.T) {
	f := newFakeTarget(t)
	s := connect(t, testConfig(f, newProvider(t)))
	eventually(t, "an event request", func() bool { return f.count("Asynchronous Event Request") == 1 })
	f.event(protocol.EventPersistentError)
	eventually(t, "reconnected", func() bool { st := s.Status(); return st.State == StateLive && st.Reconnects == 1 })
}

func TestCloseDrains(t *testing.T) {
	f := newFakeTarget(t)
	s := connect(t, testConfig(f, newProvider(t)))
	d := device(t, s)
	hold := make(chan struct{})
	arrived := make(chan struct{})
	f.set(func() {
		f.hook = once(protocol.OpWrite, func(k *fakeCommand) { close(arrived); <-hold; _ = k.run() })
	})
	done := make(chan error, 1)
	go func() { done <- d.WriteAt(pattern(1, 512), 0, 0) }()
	<-arrived
	closed := make(chan error, 1)
	go func() {
		ctx, stop := context.WithTimeout(context.Background(), 60*time.Second)
		defer stop()
		closed <- s.Close(ctx)
	}()
	eventually(t, "closing", func() bool { return s.Status().State == StateClosing })
	eventually(t, "new requests are refused", func() bool {
		return errors.Is(d.ReadAt(make([]byte, 512), 0), ErrClosed)
	})
	select {
	case err := <-closed:
		t.Fatalf("closed (%v) before the write was answered", err)
	default:
	}
	close(hold)
	if err := errors.Join(<-done, <-closed); err != nil {
		t.Error(err)
	}
	if !bytes.Equal(f.spaces[1].content(0, 512), pattern(1, 512)) || f.shutdowns.Load() != 1 {
		t.Error("the write was lost")
	}
	if _, err := s.Device(0); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	if st := s.Status(); st.State != StateClosed || s.Stats().Ops[blockdev.OpWrite].Answered != 1 {
		t.Errorf("%+v", st)
	}
}

// A call that its caller has given up is the lane's until it ends; whoever reads it then is
// seen by the race detector.
func TestCallGivenUp(t *testing.T) {
	for name, call := range map[string]func(context.Context, *controller) error{
		"set features": func(ctx context.Context, c *controller) error {
			_, err := c.setFeature(ctx, protocol.FeatureNumberOfQueues, 0)
			return err
		},
		"log": func(ctx context.Context, c *controller) error {
			_, err := c.log(ctx, protocol.LogSmart, protocol.NSIDAll, 0, 512, false)
			return err
		},
		"identify": func(ctx context.Context, c *controller) error {
			_, err := c.identify(ctx, protocol.CNSController, 0)
			return err
		},
		"property": func(ctx context.Context, c *controller) error {
			_, err := c.property(ctx, protocol.PropertyCSTS)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFakeTarget(t)
			prov := &crooked{Provider: newProvider(t)}
			s := connect(t, testConfig(f, prov))
			ctrl := s.as.ctrl
			ctx, cancel := context.WithCancel(context.Background())
			// How the lane learns that the caller has gone: by nothing that the race detector takes for an
			// order of the two.
			gone := filepath.Join(t.TempDir(), "gone")
			prov.mu.Lock()
			prov.poll = func(qid uint16, wcs []rdma.WC) []rdma.WC {
				if qid == 0 && ctx.Err() == nil && slices.ContainsFunc(wcs, func(wc rdma.WC) bool { return wc.Recv }) {
					cancel() // the answer is there, but not yet seen
					for start := time.Now(); unix.Access(gone, unix.F_OK) != nil && time.Since(start) < 60*time.Second; {
						_ = unix.Nanosleep(&unix.Timespec{Nsec: 1e6}, nil)
					}
				}
				return wcs
			}
			prov.mu.Unlock()
			err := call(ctx, ctrl)
			if e := unix.Mkdir(gone, 0o700); e != nil {
				t.Fatal(e)
			}
			if !errors.Is(err, context.Canceled) {
				t.Errorf("%v", err)
			}
			eventually(t, "reconnected", func() bool { st := s.Status(); return st.State == StateLive && st.Reconnects == 1 })
		})
	}
}

func TestCloseGivesUp(t *testing.T) {
	for _, down := range []bool{false, true} {
		f := newFakeTarget(t)
		prov := newProvider(t)
		s := connect(t, testConfig(f, prov))
		d := device(t, s)
		f.set(func() { f.hook = func(k *fakeCommand) bool { return k.req.QID > 0 } })
		if down {
			f.down()
			eventually(t, "down", func() bool { return s.Status().State == StateReconnecting })
		}
		done := make(chan error, 1)
		go func() { done <- d.WriteAt(pattern(1, 512), 0, 0) }()
		eventually(t, "a request", func() bool { return s.Status().Requests == 1 })
		ctx, stop := context.WithTimeout(context.Background(), 50*time.Millisecond)
		defer stop()
		start := time.Now()
		if err := s.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
		if took := time.Since(start); took > 30*time.Second {
			t.Errorf("took %v", took)
		}
		if err := <-done; !errors.Is(err, ErrClosed) {
			t.Errorf("%v", err)
		}
		if err := prov.Device().Close(); err != nil {
			t.Error(err)
		}
	}
}

// Closing while there is no target takes no time and does not hide what may be lost.
func TestCloseWithoutTarget(t *testing.T) {
	for _, c := range []struct {
		dirty, hang, lost bool
	}{{false, false, false}, {true, false, false}, {false, true, false}, {true, true, false}, {true, false, true}} {
		f := newFakeTarget(t)
		prov := newProvider(t)
		cfg := testConfig(f, prov)
		cfg.ConnectTimeout = 30 * time.Second
		if c.lost {
			cfg.LossTimeout = 10 * time.Millisecond
		}
		s := connect(t, cfg)
		d := device(t, s)
		if c.dirty {
			if err := d.WriteAt(pattern(1, 512), 0, 0); err != nil {
				t.Fatal(err)
			}
		}
		if c.hang {
			f.set(func() { f.hook = func(k *fakeCommand) bool { return true } })
			n := f.count("Connect")
			f.cut(nil)
			eventually(t, "an attempt hangs", func() bool { return f.count("Connect") > n })
		} else {
			f.down()
			eventually(t, "down", func() bool { return s.Status().State != StateLive })
		}
		if c.lost {
			eventually(t, "lost", func() bool { return s.Status().State == StateLost })
		}
		ctx, stop := context.WithTimeout(context.Background(), 60*time.Second)
		defer stop()
		start := time.Now()
		if err := s.Close(ctx); (err != nil) != c.dirty {
			t.Errorf("%+v: %v", c, err)
		}
		if took := time.Since(start); took > 30*time.Second {
			t.Errorf("%+v: took %v", c, took)
		}
		if err := prov.Device().Close(); err != nil {
			t.Error(err)
		}
	}
}
