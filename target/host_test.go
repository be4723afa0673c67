package target

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/blockdev"
	"rdblk/internal/arena"
	"rdblk/protocol"
	"rdblk/rdma"
	"rdblk/rdma/iwarp"
)

// This file is a small raw host: it speaks the protocol over the rdma engine, one
// queue per value, driven by the test's goroutine. It knows nothing of the rules
// that a host keeps, so that tests can break them.

// patience bounds every wait of the tests.
const patience = 60 * time.Second

var (
	verbose  = flag.Bool("target.log", false, "show the target's log")
	seedFlag = flag.Uint64("target.seed", 0, "seed of random tests, 0 = another one each time")
)

// newSeed is the seed of a random test; it is printed when the test fails.
func newSeed(t testing.TB) uint64 {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("seed: -target.seed=%d", seed)
	return seed
}

const testNQN = "nqn.2026-11.io.rdblk:test:target"

// fakeClock is a clock that tests move.
type fakeClock struct {
	mu     sync.Mutex
	now    time.Time
	timers map[*fakeTimer]struct{}
}

type fakeTimer struct {
	c  *fakeClock
	at time.Time
	f  func()
}

func newFakeClock() *fakeClock {
	return &fakeClock{now: time.Unix(1_000_000, 0), timers: map[*fakeTimer]struct{}{}}
}

func (c *fakeClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *fakeClock) AfterFunc(d time.Duration, f func()) timer {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := &fakeTimer{c, c.now.Add(d), f}
	c.timers[t] = struct{}{}
	return t
}

func (t *fakeTimer) Stop() bool {
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	_, ok := t.c.timers[t]
	delete(t.c.timers, t)
	return ok
}

// Advance moves the time on and runs what is due, in order, before it returns.
func (c *fakeClock) Advance(d time.Duration) {
	c.mu.Lock()
	end := c.now.Add(d)
	for {
		var next *fakeTimer
		for t := range c.timers {
			if !t.at.After(end) && (next == nil || t.at.Before(next.at)) {
				next = t
			}
		}
		if next == nil {
			break
		}
		delete(c.timers, next)
		c.now = next.at
		c.mu.Unlock()
		next.f()
		c.mu.Lock()
	}
	c.now = end
	c.mu.Unlock()
}

// rig is a target with a listener, and the NIC that its hosts use.
type rig struct {
	t    testing.TB
	tgt  *Target
	addr netip.AddrPort
	nic  *iwarp.Provider // the target's
	host *iwarp.Provider
}

func testLogger(t testing.TB) *slog.Logger {
	if *verbose {
		return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	return slog.New(slog.DiscardHandler)
}

func newNIC(t testing.TB) *iwarp.Provider {
	t.Helper()
	p, err := iwarp.New(iwarp.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// newRig starts a target on the loopback address. The test checks at its end that
// nothing is left of it.
func newRig(t testing.TB, cfg Config, devs ...blockdev.Device) *rig {
	t.Helper()
	if cfg.NQN == "" {
		cfg.NQN = testNQN
	}
	if cfg.Hosts == nil {
		cfg.AllowAnyHost = true
	}
	if cfg.Workers == 0 {
		cfg.Workers = 2
	}
	if cfg.Logger == nil {
		cfg.Logger = testLogger(t)
	}
	r := &rig{t: t, nic: newNIC(t), host: newNIC(t)}
	var err error
	if r.tgt, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	for _, d := range devs {
		if _, err := r.tgt.AddNamespace(0, d); err != nil {
			t.Fatal(err)
		}
	}
	if r.addr, err = r.tgt.Listen(r.nic, netip.MustParseAddrPort("127.0.0.1:0")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.tgt.Close(); err != nil {
			t.Errorf("close target: %v", err)
		}
		r.checkReleased()
	})
	return r
}

// checkReleased fails unless the target's NIC has no objects left.
func (r *rig) checkReleased() {
	r.t.Helper()
	s := r.nic.Stats()
	if s.QPs+s.CQs+s.PDs+s.MRs+s.MWs != 0 {
		r.t.Errorf("objects left on the target's device: %d QPs, %d CQs, %d PDs, %d MRs, %d MWs", s.QPs, s.CQs, s.PDs, s.MRs, s.MWs)
	}
}

func memDevice(t testing.TB, size int64) blockdev.Device {
	t.Helper()
	d, err := blockdev.NewMem("mem", size, blockdev.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// cached makes a device claim a volatile write cache.
type cached struct{ blockdev.TryDevice }

func (c cached) Info() blockdev.Info {
	i := c.TryDevice.Info()
	i.WriteCache = true
	return i
}

// identity is who a host says it is.
type identity struct {
	nqn string
	id  protocol.UUID
}

func newIdentity() identity {
	u := protocol.RandomUUID()
	return identity{nqn: protocol.UUIDNQN(u), id: u}
}

// hostQueue is the host's end of one queue.
type hostQueue struct {
	t     testing.TB
	conn  rdma.Conn
	pd    rdma.PD
	cq    rdma.CQ
	qp    rdma.QP
	est   rdma.Established
	depth int
	qid   uint16

	mem  *arena.Arena
	mr   rdma.MR
	caps []byte // depth slots of capsuleSlot bytes
	cqes []byte
	data []byte // the rest, for transfers

	nextCID uint16
	slot    int
	sends   int // outstanding
	answers map[uint16]answer
	order   []uint16 // CIDs in the order of their answers
	broken  error
	wcs     [32]rdma.WC
	sge     [1]rdma.SGE
	wr      [1]rdma.SendWR
	rwr     [1]rdma.RecvWR

	// quick counts answers instead of keeping them.
	quick bool
	count int
	sent  int // capsules, for inFlight
	taken int // answers, of those kept
	last  protocol.Completion
}

type answer struct {
	protocol.Completion
	invalidated bool
	key         uint32
}

const (
	capsuleSlot = 64 + 16384
	hostMemory  = 16 << 20
)

type dialOptions struct {
	depth   int
	hrq     int // HRQSIZE; 0 = depth
	private []byte
	reads   int            // responder resources; 0 = 16, negative = 0
	from    netip.Addr     // source address; zero = any
	to      netip.AddrPort // zero = the rig's listener
}

// dial connects a queue without sending a command.
func (r *rig) dial(qid uint16, o dialOptions) (*hostQueue, error) {
	r.t.Helper()
	if o.depth == 0 {
		o.depth = 32
	}
	if o.hrq == 0 {
		o.hrq = o.depth
	}
	switch {
	case o.reads == 0:
		o.reads = 16
	case o.reads < 0:
		o.reads = 0
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if !o.to.IsValid() {
		o.to = r.addr
	}
	conn, err := r.host.Dial(ctx, o.from, o.to)
	if err != nil {
		return nil, err
	}
	q := &hostQueue{t: r.t, conn: conn, depth: o.depth, qid: qid, answers: map[uint16]answer{}}
	fail := func(err error) (*hostQueue, error) {
		q.close()
		return nil, err
	}
	dev := conn.Device()
	if q.pd, err = dev.AllocPD(); err != nil {
		return fail(err)
	}
	if q.cq, err = dev.CreateCQ(4 * o.depth); err != nil {
		return fail(err)
	}
	if q.mem, err = arena.New(hostMemory); err != nil {
		return fail(err)
	}
	b := q.mem.Bytes()
	access := rdma.AccessLocalWrite | rdma.AccessRemoteRead | rdma.AccessRemoteWrite | rdma.AccessMWBind
	if q.mr, err = q.pd.Register(b, access); err != nil {
		return fail(err)
	}
	q.caps, b = b[:o.depth*capsuleSlot], b[o.depth*capsuleSlot:]
	q.cqes, b = b[:o.depth*16], b[o.depth*16:]
	q.data = b[-int(arena.Addr(b))&4095:]
	if q.qp, err = conn.CreateQP(q.pd, rdma.QPConfig{SendCQ: q.cq, RecvCQ: q.cq, MaxSend: 2 * o.depth, MaxRecv: o.depth, MaxInline: 64}); err != nil {
		return fail(err)
	}
	for i := range o.depth {
		q.postRecv(i)
	}
	if o.private == nil {
		req := protocol.RDMAConnectRequest{QID: qid, HRQSIZE: uint16(o.hrq), HSQSIZE: uint16(o.depth - 1)}
		o.private, _ = req.AppendBinary(nil)
	}
	if q.est, err = conn.Connect(ctx, rdma.ConnParam{PrivateData: o.private, ResponderResources: o.reads, RNRRetry: 7, Retry: 7}); err != nil {
		return fail(err)
	}
	return q, nil
}

func (r *rig) mustDial(qid uint16, depth int) *hostQueue {
	r.t.Helper()
	q, err := r.dial(qid, dialOptions{depth: depth})
	if err != nil {
		r.t.Fatalf("dial queue %d: %v", qid, err)
	}
	r.t.Cleanup(q.close)
	var a protocol.RDMAConnectAccept
	if err := a.UnmarshalBinary(q.est.PrivateData); err != nil || int(a.CRQSIZE) != depth {
		r.t.Fatalf("accept private data: %v, CRQSIZE %d, want %d", err, a.CRQSIZE, depth)
	}
	return q
}

// close ends the queue in whatever state it is.
func (q *hostQueue) close() {
	if q.qp != nil {
		q.qp.Close()
		q.qp = nil
	}
	if q.cq != nil {
		q.cq.Close()
		q.cq = nil
	}
	if q.mr != nil {
		q.mr.Deregister()
		q.mr = nil
	}
	if q.mem != nil {
		q.mem.Close()
		q.mem = nil
	}
	if q.pd != nil {
		q.pd.Close()
		q.pd = nil
	}
	if q.conn != nil {
		q.conn.Close()
		q.conn = nil
	}
}

func (q *hostQueue) postRecv(i int) {
	q.sge[0] = rdma.SGE{Addr: arena.Addr(q.cqes) + uint64(i*16), Len: 16, LKey: q.mr.LKey()}
	q.rwr[0] = rdma.RecvWR{ID: uint64(i), SGL: q.sge[:]}
	if _, err := q.qp.PostRecv(q.rwr[:]...); err != nil {
		q.broken = err
	}
}

// sendRaw sends bytes as one message.
func (q *hostQueue) sendRaw(b []byte) {
	for q.sends >= q.depth {
		if q.poll(true); q.broken != nil {
			return
		}
	}
	off := q.slot * capsuleSlot
	q.slot = (q.slot + 1) % q.depth
	copy(q.caps[off:off+capsuleSlot], b)
	q.sge[0] = rdma.SGE{Addr: arena.Addr(q.caps) + uint64(off), Len: uint32(len(b)), LKey: q.mr.LKey()}
	q.wr[0] = rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: q.sge[:]}
	if _, err := q.qp.PostSend(q.wr[:]...); err != nil {
		q.broken = err
		return
	}
	q.sends++
	q.sent++
	q.poll(false) // the software NIC moves nothing by itself
}

// send sends a command with in-capsule data behind it.
func (q *hostQueue) send(cmd *protocol.Command, inCapsule []byte) {
	if len(inCapsule) == 0 {
		q.sendRaw(cmd[:])
		return
	}
	q.sendRaw(append(append(make([]byte, 0, capsuleSlot), cmd[:]...), inCapsule...))
}

// poll takes what has arrived; with wait it sleeps until there is something, but
// not for long.
func (q *hostQueue) poll(wait bool) bool {
	n, busy, err := q.cq.Poll(q.wcs[:])
	if err != nil {
		q.broken = err
	}
	for i := range n {
		wc := &q.wcs[i]
		if wc.Status != rdma.StatusSuccess {
			if q.broken == nil || wc.Status != rdma.StatusFlush {
				q.broken = fmt.Errorf("work completion: %v", wc.Status)
			}
			continue
		}
		if !wc.Recv {
			q.sends--
			continue
		}
		b := q.cqes[int(wc.ID)*16:][:16]
		if wc.ByteLen != 16 {
			q.t.Errorf("response of %d bytes", wc.ByteLen)
		}
		if q.quick {
			q.count++
			q.last = protocol.Completion(b)
		} else {
			a := answer{Completion: protocol.Completion(b), invalidated: wc.Invalidated, key: wc.RKey}
			if _, dup := q.answers[a.ID()]; dup {
				q.t.Errorf("two answers to command %d", a.ID())
			}
			q.answers[a.ID()] = a
			q.order = append(q.order, a.ID())
		}
		q.postRecv(int(wc.ID))
	}
	if n == 0 && !busy && wait && q.broken == nil {
		if again, _ := q.cq.Arm(); !again {
			unix.Poll([]unix.PollFd{{Fd: int32(q.cq.FD()), Events: unix.POLLIN}}, 20)
		}
	}
	return n > 0 || busy
}

var errNoAnswer = errors.New("no answer")

// take waits for the answer to cid.
func (q *hostQueue) take(cid uint16) (answer, error) {
	end := time.Now().Add(patience)
	for {
		if a, ok := q.answers[cid]; ok {
			delete(q.answers, cid)
			q.taken++
			return a, nil
		}
		if q.broken != nil {
			return answer{}, fmt.Errorf("command %d: %w: %w", cid, errNoAnswer, q.broken)
		}
		if time.Now().After(end) {
			return answer{}, fmt.Errorf("command %d: %w in %v", cid, errNoAnswer, patience)
		}
		q.poll(true)
	}
}

// inFlight is how many commands have no answer.
func (q *hostQueue) inFlight() int { return q.sent - q.count - q.taken - len(q.answers) }

// awaitEnd waits until the target has ended the connection.
func (q *hostQueue) awaitEnd() error {
	q.t.Helper()
	end := time.Now().Add(patience)
	for q.broken == nil {
		if time.Now().After(end) {
			q.t.Fatal("the target did not end the connection")
		}
		q.poll(true)
	}
	return q.broken
}

func (q *hostQueue) cid() uint16 {
	q.nextCID += 7 // jumps, and goes round
	return q.nextCID
}

// do sends a command and waits for the answer; it fails the test if there is none.
func (q *hostQueue) do(cmd *protocol.Command, inCapsule ...byte) answer {
	q.t.Helper()
	q.send(cmd, inCapsule)
	a, err := q.take(cmd.ID())
	if err != nil {
		q.t.Fatalf("%s: %v", protocol.Describe(cmd, q.qid == 0), err)
	}
	return a
}

// want is do, and checks the status code (without More and retry delay).
func (q *hostQueue) want(s protocol.Status, cmd *protocol.Command, inCapsule ...byte) answer {
	q.t.Helper()
	a := q.do(cmd, inCapsule...)
	if got := a.Status() &^ protocol.StatusMore; got != s {
		q.t.Fatalf("%s: status %v, want %v", protocol.Describe(cmd, q.qid == 0), got, s)
	}
	return a
}

func (q *hostQueue) ok(cmd *protocol.Command, inCapsule ...byte) answer {
	q.t.Helper()
	return q.want(protocol.StatusSuccess, cmd, inCapsule...)
}

// keyed points cmd at n bytes of the data area at off.
func (q *hostQueue) keyed(cmd *protocol.Command, off, n int) []byte {
	cmd.SetKeyedSGL(arena.Addr(q.data)+uint64(off), uint32(n), q.mr.RKey(), false)
	return q.data[off : off+n]
}

const dnr = protocol.StatusDNR

// connectCommand makes a Connect with keyed data at the start of the data area.
func (q *hostQueue) connectCommand(who identity, subnqn string, cntlid uint16, kato uint32) *protocol.Command {
	d := protocol.ConnectData{HOSTID: who.id, CNTLID: cntlid, SUBNQN: subnqn, HOSTNQN: who.nqn}
	b, err := d.AppendBinary(nil)
	if err != nil {
		q.t.Fatal(err)
	}
	copy(q.data, b)
	cmd := new(protocol.Command)
	cmd.InitConnect(q.cid(), q.qid, uint16(q.depth-1), kato, 0)
	q.keyed(cmd, 0, protocol.ConnectDataSize)
	return cmd
}

// session is an association of a raw host.
type session struct {
	*rig
	who    identity
	cntlid uint16
	admin  *hostQueue
	io     []*hostQueue
}

type sessionOptions struct {
	who     identity
	subnqn  string
	kato    uint32
	queues  int
	depth   int
	disable bool // do not enable
}

// attach makes an association with I/O queues, or fails the test.
func (r *rig) attach(o sessionOptions) *session {
	r.t.Helper()
	if o.who.nqn == "" {
		o.who = newIdentity()
	}
	if o.subnqn == "" {
		o.subnqn = testNQN
	}
	if o.depth == 0 {
		o.depth = 32
	}
	s := &session{rig: r, who: o.who, admin: r.mustDial(0, 32)}
	a := s.admin.ok(s.admin.connectCommand(o.who, o.subnqn, protocol.CNTLIDDynamic, o.kato))
	s.cntlid = protocol.ConnectResult(a.DW0()).CNTLID()
	if o.disable {
		return s
	}
	s.enable()
	for i := range o.queues {
		s.io = append(s.io, s.addQueue(uint16(i+1), o.depth))
	}
	return s
}

func (s *session) addQueue(qid uint16, depth int) *hostQueue {
	s.t.Helper()
	q := s.mustDial(qid, depth)
	if a := q.ok(q.connectCommand(s.who, testNQN, s.cntlid, 0)); uint16(a.DW0()) != s.cntlid {
		s.t.Fatalf("I/O Connect answers controller %d, want %d", a.DW0(), s.cntlid)
	}
	return q
}

func (s *session) close() {
	for _, q := range s.io {
		q.close()
	}
	s.admin.close()
}

func (s *session) get(p protocol.Property) uint64 {
	s.t.Helper()
	var cmd protocol.Command
	cmd.InitPropertyGet(s.admin.cid(), p)
	a := s.admin.ok(&cmd)
	return a.Result()
}

func (s *session) setCC(v protocol.CC) {
	s.t.Helper()
	var cmd protocol.Command
	cmd.InitPropertySet(s.admin.cid(), protocol.PropertyCC, uint64(v))
	s.admin.ok(&cmd)
}

func (s *session) csts() protocol.CSTS {
	s.t.Helper()
	return protocol.CSTS(s.get(protocol.PropertyCSTS))
}

func (s *session) enable() {
	s.t.Helper()
	s.setCC(protocol.CCDefault)
	s.setCC(protocol.CCDefault.WithEN(true))
	if c := s.csts(); !c.RDY() || c.CFS() {
		s.t.Fatalf("CSTS %#x after enabling", uint32(c))
	}
}

// identify runs Identify on the admin queue and returns the page.
func (s *session) identify(cns protocol.CNS, nsid uint32) []byte {
	s.t.Helper()
	var cmd protocol.Command
	cmd.InitIdentify(s.admin.cid(), cns, nsid)
	b := s.admin.keyed(&cmd, 0, protocol.IdentifySize)
	fill(b, 0xEE)
	s.admin.ok(&cmd)
	return b
}

// log reads a log page.
func (s *session) log(lid protocol.LogID, off uint64, n int, rae bool) []byte {
	s.t.Helper()
	return s.logOf(protocol.NSIDAll, lid, off, n, rae)
}

// logOf reads a log page of a namespace.
func (s *session) logOf(nsid uint32, lid protocol.LogID, off uint64, n int, rae bool) []byte {
	s.t.Helper()
	var cmd protocol.Command
	cmd.InitGetLogPage(s.admin.cid(), lid, nsid, off, uint32(n), rae)
	b := s.admin.keyed(&cmd, 0, n)
	fill(b, 0xEE)
	s.admin.ok(&cmd)
	return b
}

func fill(b []byte, v byte) {
	for i := range b {
		b[i] = v
	}
}

// pattern is content that tells where it belongs.
func pattern(seed uint64, n int) []byte {
	b := make([]byte, n)
	for i := 0; i+8 <= n; i += 8 {
		seed += 0x9E3779B97F4A7C15
		binary.LittleEndian.PutUint64(b[i:], seed^seed>>29)
	}
	return b
}

// rw makes a read or write of n bytes of the data area at off.
func (q *hostQueue) rw(op protocol.Opcode, lba uint64, n, off int, control uint16) *protocol.Command {
	cmd := new(protocol.Command)
	cmd.InitRW(op, q.cid(), 1, lba, uint32(n/512), control)
	q.keyed(cmd, off, n)
	return cmd
}

// eventually polls cond, without sleeping for a fixed time, until it holds.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	end := time.Now().Add(patience)
	for !cond() {
		if time.Now().After(end) {
			t.Fatalf("%s: not in %v", what, patience)
		}
		runtime.Gosched()
	}
}

// goroutines counts those that run code of this module.
func goroutines() (int, string) {
	buf := make([]byte, 1<<20)
	buf = buf[:runtime.Stack(buf, true)]
	n := 0
	var left []string
	for _, g := range strings.Split(string(buf), "\n\n") {
		if strings.Contains(g, "rdblk/") && !strings.Contains(g, "testing.tRunner") && !strings.Contains(g, "TestMain") {
			n++
			left = append(left, g)
		}
	}
	return n, strings.Join(left, "\n\n")
}

func descriptors() int {
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return len(d)
}

func TestMain(m *testing.M) {
	flag.Parse()
	before := descriptors()
	code := m.Run()
	if code == 0 {
		end := time.Now().Add(patience)
		for {
			n, dump := goroutines()
			fds := descriptors()
			if n == 0 && fds <= before+2 { // the runtime's own poller
				break
			}
			if time.Now().After(end) {
				fmt.Fprintf(os.Stderr, "leak: %d goroutines, %d descriptors (%d before)\n%s\n", n, fds, before, dump)
				code = 1
				break
			}
			runtime.Gosched()
		}
	}
	os.Exit(code)
}
