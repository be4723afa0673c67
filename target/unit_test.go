package target

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"rdblk/blockdev"
	"rdblk/internal/worker"
	"rdblk/protocol"
)

func TestConfigValidate(t *testing.T) {
	good := Config{NQN: testNQN}
	if err := good.Validate(); err != nil {
		t.Errorf("defaults: %v", err)
	}
	bad := Config{
		NQN: "", Serial: strings.Repeat("s", 21), Model: "a\nb", Firmware: "123456789", Hosts: []string{"ok", ""},
		Workers: -1, PinCPUs: []int{-1}, QueueDepth: 1, InCapsule: 100, MaxIO: 5000, BufferMemory: 4096, Executors: -1,
		ReadDepth: 1000, MaxControllers: -1, MaxQueuesPerController: 70000, MaxQueues: 1, MaxPending: -1,
		AcceptTimeout: -1, ConnectTimeout: -1, AssociationTimeout: -1, DiscoveryTimeout: -1, FenceTimeout: -1, TransferTimeout: -1,
	}
	err := bad.Validate()
	for _, f := range []string{"NQN", "Serial", "Model", "Firmware", "Hosts", "Workers", "PinCPUs", "QueueDepth", "InCapsule", "MaxIO", "BufferMemory",
		"Executors", "ReadDepth", "MaxControllers", "MaxQueuesPerController", "MaxQueues", "MaxPending", "AcceptTimeout", "ConnectTimeout",
		"AssociationTimeout", "DiscoveryTimeout", "FenceTimeout", "TransferTimeout"} {
		if !strings.Contains(fmt.Sprint(err), f+": ") {
			t.Errorf("no problem with %s in: %v", f, err)
		}
	}
	if _, err := New(bad); err == nil {
		t.Error("New takes what Validate refuses")
	}
	if c := (Config{NQN: protocol.DiscoveryNQN}); c.Validate() == nil {
		t.Error("the discovery NQN is taken")
	}
	for maxIO, want := range map[int]uint8{4096: 0, 8192: 1, 128 << 10: 5, 1 << 20: 8, 8 << 20: 11} {
		if got := mdts(maxIO); got != want {
			t.Errorf("MDTS of %d is %d, want %d", maxIO, got, want)
		}
	}
}

// MDTS 0 would mean "no limit".
func TestSmallestMaxIO(t *testing.T) {
	c := Config{NQN: testNQN, MaxIO: 4096}
	if c.Validate() == nil {
		t.Error("a MaxIO of 4096 is accepted, but MDTS 0 says that there is no limit")
	}
}

func TestAddNamespaceValidates(t *testing.T) {
	r := newRig(t, Config{MaxIO: 32 << 10})
	big, err := blockdev.NewMem("big", 1<<20, blockdev.Options{BlockSize: 65536})
	if err != nil {
		t.Fatal(err)
	}
	defer big.Close()
	if _, err := r.tgt.AddNamespace(0, big); err == nil {
		t.Error("a block larger than the largest transfer is accepted")
	}
	if _, err := r.tgt.AddNamespace(1025, memDevice(t, 1<<20)); !errors.Is(err, ErrTooMany) {
		t.Errorf("namespace 1025: %v", err)
	}
}

func TestDescribeNamespace(t *testing.T) {
	for _, c := range []struct {
		name string
		info blockdev.Info
		want func(d *protocol.IdentifyNamespace)
	}{
		{"plain", blockdev.Info{BlockSize: 512, PhysBlock: 512}, func(d *protocol.IdentifyNamespace) {}},
		{"4k physical", blockdev.Info{BlockSize: 512, PhysBlock: 4096, OptimalIO: 65536}, func(d *protocol.IdentifyNamespace) {
			d.NPWG, d.NPWA, d.NPDG, d.NPDA, d.NOWS = 7, 7, 7, 7, 127
		}},
		{"sparse", blockdev.Info{BlockSize: 4096, PhysBlock: 4096, Discard: true, DiscardZeros: true, WriteZeroes: true}, func(d *protocol.IdentifyNamespace) {
			d.LBAF[0].LBADS = 12
			d.DLFEAT = 9
		}},
		{"discard without zeros", blockdev.Info{BlockSize: 512, PhysBlock: 512, Discard: true}, func(d *protocol.IdentifyNamespace) {}},
		{"read-only", blockdev.Info{BlockSize: 512, PhysBlock: 512, ReadOnly: true, Discard: true, DiscardZeros: true}, func(d *protocol.IdentifyNamespace) {
			d.NSATTR, d.DLFEAT = 1, 1
		}},
		{"huge optimum", blockdev.Info{BlockSize: 512, PhysBlock: 512, OptimalIO: 1 << 30}, func(d *protocol.IdentifyNamespace) { d.NOWS = 65535 }},
	} {
		want := protocol.IdentifyNamespace{NSZE: 99, NCAP: 99, NUSE: 99, NMIC: 1, NSFEAT: 0x10}
		want.LBAF[0].LBADS = 9
		c.want(&want)
		if got := describe(&c.info, 99); got != want {
			t.Errorf("%s: %+v, want %+v", c.name, got, want)
		}
	}
}

func TestBackendStatus(t *testing.T) {
	for _, c := range []struct {
		op   protocol.Opcode
		err  error
		want protocol.Status
	}{
		{protocol.OpRead, nil, 0},
		{protocol.OpWrite, blockdev.ErrReadOnly, protocol.StatusNamespaceWriteProtected | dnr},
		{protocol.OpWrite, fmt.Errorf("x: %w", blockdev.ErrOutOfRange), protocol.StatusLBAOutOfRange | dnr},
		{protocol.OpDatasetManagement, blockdev.ErrNotSupported, protocol.StatusCommandSizeExceeded | dnr},
		{protocol.OpFlush, blockdev.ErrFlushFailed, protocol.StatusWriteFault | dnr},
		{protocol.OpWrite, fmt.Errorf("%w (%w)", blockdev.ErrFlushFailed, syscall.ENOSPC), protocol.StatusWriteFault | dnr},
		{protocol.OpRead, blockdev.ErrLost, protocol.StatusInternalPathError},
		{protocol.OpRead, syscall.EIO, protocol.StatusUnrecoveredRead | dnr},
		{protocol.OpWrite, syscall.ENOSPC, protocol.StatusCapacityExceeded | dnr},
		{protocol.OpWrite, errors.New("strange"), protocol.StatusInternalError | dnr},
	} {
		if got := backendStatus(c.op, c.err); got != c.want {
			t.Errorf("%v after %v: %v, want %v", c.op, c.err, got, c.want)
		}
	}
}

func TestStateNames(t *testing.T) {
	for s := range numRequestStates + 1 {
		if s.String() == "" {
			t.Errorf("request state %d has no name", s)
		}
	}
	for s := range numQueueStates + 1 {
		if s.String() == "" {
			t.Errorf("queue state %d has no name", s)
		}
	}
	for s := range numControllerStates + 1 {
		if s.String() == "" {
			t.Errorf("controller state %d has no name", s)
		}
	}
	if got := requestState(99).String(); got != "requestState(99)" {
		t.Error(got)
	}
	// Every state can be left and reached.
	reached := uint16(1)
	for s, next := range requestNext {
		if next == 0 {
			t.Errorf("request state %v cannot be left", requestState(s))
		}
		reached |= next
	}
	if reached != 1<<numRequestStates-1 {
		t.Errorf("request states %b are reached", reached)
	}
}

func TestRateLog(t *testing.T) {
	var buf bytes.Buffer
	now := time.Unix(0, 0)
	r := newRateLog(slog.New(slog.NewTextHandler(&buf, nil)), func() time.Time { return now }, 3, time.Second)
	lines := func() int { n := strings.Count(buf.String(), "\n"); return n }
	for range 10 {
		r.Log(slog.LevelInfo, "x")
	}
	if lines() != 3 {
		t.Errorf("%d lines in a burst of 3", lines())
	}
	now = now.Add(1500 * time.Millisecond)
	r.Log(slog.LevelInfo, "x")
	r.Log(slog.LevelInfo, "x")
	if lines() != 4 || !strings.Contains(buf.String(), "suppressed=7") {
		t.Errorf("%d lines after a second:\n%s", lines(), buf.String())
	}
	now = now.Add(time.Hour)
	for range 10 {
		r.Log(slog.LevelInfo, "x")
	}
	if lines() != 7 {
		t.Errorf("%d lines after an hour", lines())
	}
}

func TestRoundKATO(t *testing.T) {
	for ms, want := range map[uint32]time.Duration{0: 0, 1: time.Second, 1000: time.Second, 1001: 2 * time.Second, math.MaxUint32: 4294968 * time.Second} {
		if got := roundKATO(ms); got != want {
			t.Errorf("%d ms: %v, want %v", ms, got, want)
		}
	}
}

// The buffers of a worker: first come first served, and half of them at most for
// one association.
func TestLaneSharesBuffers(t *testing.T) {
	tgt := &Target{cfg: Config{NQN: testNQN, MaxIO: 64 << 10}.withDefaults()}
	l, err := newLane(tgt, 0, 256<<10, worker.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	var a, b share
	var got []string
	kind := &command{run: func(r *request) { got = append(got, r.cmd.SGL().Type().String()) }}
	ask := func(s *share, n int) *request {
		q := &queue{lane: l, share: s, t: tgt}
		r := &request{q: q, kind: kind, scratch: uint32(n), recv: -1}
		r.state = reqReceived
		if l.alloc(r, n) {
			r.state = reqExecuting
		}
		return r
	}
	give := func(r *request) {
		t.Helper()
		if r.buf == nil {
			t.Fatal("has no buffer")
		}
		buf, s := r.buf, r.shares
		r.buf, r.shares = nil, [2]*share{}
		l.free(buf, s)
	}
	waits := func(r *request, want bool) {
		t.Helper()
		if (r.buf == nil) != want {
			t.Errorf("waits: %v, want %v", r.buf == nil, want)
		}
	}
	a1, a2 := ask(&a, 64<<10), ask(&a, 64<<10)
	a3 := ask(&a, 4096) // over the half
	waits(a2, false)
	waits(a3, true)
	b1, b2 := ask(&b, 64<<10), ask(&b, 60<<10)
	waits(b2, false)
	c1 := ask(nil, 4096) // of no association: the memory is gone
	waits(c1, true)
	give(b2) // c1 is first in turn; a3 is still over its half
	waits(c1, false)
	waits(a3, true)
	give(a1)
	waits(a3, false)
	a4 := ask(&a, 64<<10)
	waits(a4, true)
	l.unwait(a4) // as when its connection dies
	give(a2)
	give(a3)
	give(b1)
	give(c1)
	if a.used != 0 || b.used != 0 || l.arena.InUse() != 0 || len(l.blocked) != 0 || !l.waiting.empty() || l.stats.waitingNow.Load() != 0 {
		t.Errorf("left: a %d, b %d, arena %d, %d blocked, %d waiting", a.used, b.used, l.arena.InUse(), len(l.blocked), l.waiting.n)
	}
	if len(got) != 2 {
		t.Errorf("%d requests went on after waiting, want 2", len(got))
	}
}

func TestStatusAndStats(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	s := r.attach(sessionOptions{queues: 2, kato: 60_000})
	s.admin.aer()
	q := s.io[0]
	q.ok(q.rw(protocol.OpWrite, 0, 65536, 0, 0))
	q.ok(q.rw(protocol.OpRead, 0, 4096, 0, 0))
	s.none(0)
	var st Status
	eventually(t, "an answer of every worker", func() bool {
		st = r.tgt.Status()
		return !slices.ContainsFunc(st.Workers, func(w WorkerStatus) bool { return !w.Responding })
	})
	b, err := json.Marshal(st)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{testNQN, s.who.nqn, `"state":"enabled"`, `"state":"live"`, `"event":1`, `"kato":"1m0s"`, `"responding":true`} {
		if !bytes.Contains(b, []byte(want)) {
			t.Errorf("no %s in %s", want, b)
		}
	}
	if len(st.Controllers) != 1 || len(st.Queues) != 3 || len(st.Workers) != 3 || len(st.Namespaces) != 1 || st.Controllers[0].IOQueues != 2 {
		t.Errorf("status %+v", st)
	}
	// Queues are spread over the workers.
	if st.Workers[0].Queues != 1 || st.Workers[1].Queues != 1 || st.Workers[2].Queues != 1 {
		t.Errorf("workers %+v", st.Workers)
	}
	x := r.tgt.Stats()
	ops := x.Namespaces[0].Ops
	if ops[opWrite].Ops != 1 || ops[opWrite].Bytes != 65536 || ops[opRead].Bytes != 4096 || ops[opRead].Latency.Count() != 1 || x.Controllers != 1 || x.Queues != 3 {
		t.Errorf("stats %+v", x)
	}
	var rd, wr uint64
	for _, w := range x.Workers[:2] {
		rd, wr = rd+w.ReadBytes, wr+w.WriteBytes
	}
	if rd != 65536+2*1024 || wr != 4096 { // the two Connects too
		t.Errorf("%d bytes read from and %d written to hosts", rd, wr)
	}
	// A worker that hangs is told of, and does not hang the dump.
	resume := r.pause(0)
	eventually(t, "the answers of the others", func() bool { // on a busy machine they may take longer than the second there is
		st = r.tgt.Status()
		return st.Workers[0].Responding || st.Workers[1].Responding && st.Workers[2].Responding
	})
	resume()
	if st.Workers[0].Responding || len(st.Queues) != 2 {
		t.Errorf("workers %+v", st.Workers)
	}
}
