package initiator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/internal/arena"
	"rdblk/internal/trace"
	"rdblk/internal/worker"
	"rdblk/protocol"
	"rdblk/rdma"
)

// zeroSize is the memory that stands in for data when zeros have to be written to a
// target without Write Zeroes.
const zeroSize = 64 << 10

// Kinds of work requests in the low bits of a send queue work request ID, the slot
// above them: of an error completion nothing but the ID can be trusted.
const (
	kindSend = iota
	kindBind
	kindInvalidate
	kindNudge
	kindBits = 2
	kindMask = 1<<kindBits - 1
)

// A CID is the slot's number with a generation above it, so that an answer to a command
// of the slot's past is recognised as wrong.
const (
	slotBits = 10
	slotMask = 1<<slotBits - 1
)

var _ = [1]struct{}{}[MaxDepth-1<<slotBits]

var clockStart = time.Now()

// nano is a monotonic clock in nanoseconds; it is never 0.
func nano() int64 { return int64(time.Since(clockStart)) + 1 }

// A region is memory that the data of commands may lie in. It outlives associations.
type region struct {
	id  int
	mem []byte
}

// regionKey is a region's registration in the protection domain of one lane.
type regionKey struct {
	mr         rdma.MR
	lkey, rkey uint32
}

// source tells where the data of a command is.
type source uint8

const (
	sourceNone    source = iota
	sourceRegion         // addr, length in the memory of region
	sourceRanges         // a Dataset Management range, put into the slot's memory
	sourceZeros          // length zero bytes
	sourceScratch        // the lane's scratch memory: the data of Connect
)

// completer takes back the commands it gave to a lane. It is called on the lane's
// worker.
type completer interface {
	commandDone(l *lane, c *command)
}

// A command is one NVMe command on its way. Its maker fills in the first part; from
// lane.admit until commandDone it belongs to the lane.
type command struct {
	sqe     protocol.Command // complete but for CID and data pointer
	source  source
	toHost  bool // the data comes from the target
	keyed   bool // not in the capsule even if it would fit
	region  int32
	length  uint32
	addr    uint64
	rangeAt uint64 // of sourceRanges, in blocks
	rangeN  uint32
	owner   completer

	// The outcome. If lost is set there was no answer and the target may have done it,
	// wholly, partly or not at all.
	lost   bool
	status protocol.Status
	result uint64

	req  *request
	lane *lane
	back bool // on its way from a lane on another worker
	next *command
}

type commandList struct{ head, tail *command }

func (l *commandList) push(c *command) {
	c.next = nil
	if l.tail == nil {
		l.head = c
	} else {
		l.tail.next = c
	}
	l.tail = c
}

func (l *commandList) pop() *command {
	c := l.head
	if c == nil {
		return nil
	}
	if l.head = c.next; l.head == nil {
		l.tail = nil
	}
	c.next = nil
	return c
}

// A slot is one place in the submission queue.
//
//	free ─► started ─► posted ─► any order of: sent, answered, closed ─► free
//
// A command is finished when its answer is here and nothing names its memory any more:
// its Send has completed, and its window, if it has one, is invalid (closed), by the
// target's Send with Invalidate or by our own Local Invalidate.
type slot struct {
	cmd      *command
	cid      uint16
	gen      uint16
	nsge     uint8
	window   bool // the data is behind mw
	answered bool
	sent     bool
	closed   bool
	status   protocol.Status
	rkey     uint32 // of the window
	result   uint64
	dataAddr uint64
	postedAt int64 // nano
	mw       rdma.MW
	sqe      *protocol.Command
	send     [2]rdma.SGE // the command, in-capsule data
	bind     [1]rdma.SGE
	ranges   []byte // room for one Dataset Management range
}

// laneConfig tells what kind of queue to connect.
type laneConfig struct {
	provider  rdma.Provider
	local     netip.Addr
	remote    netip.AddrPort
	qid       uint16
	cntlid    uint16
	depth     int    // entries of the submission queue; one less can be outstanding
	inCapsule uint32 // bytes of data that the target takes behind a command
	noWindows bool
	regions   []region
	numRegion int
	w         *worker.Worker
	log       *slog.Logger
	trace     *trace.Tracer // nil = off
	fail      func(error)   // ends the association; any goroutine, never blocks
}

// A lane is one NVMe queue of one association: a connection with its queue pair and
// completion queue, receives for the responses and slots for the commands. The
// goroutine that connects makes it; from attach on it belongs to its worker, and stop
// ends it. It is never used again.
type lane struct {
	cfg  laneConfig
	w    *worker.Worker
	h    *worker.Handle
	conn rdma.Conn
	info rdma.DeviceInfo
	pd   rdma.PD
	cq   rdma.CQ
	qp   rdma.QP

	mem       []byte // commands and completions, and on pages of their own ranges and zeros
	ctl, aux  rdma.MR
	keys      []regionKey // by region
	windows   bool
	inline    bool // commands without data behind them are copied when they are posted
	inCapsule uint32
	zeros     uint64
	scratch   []byte

	slots   []slot
	usable  int // slots that the target has receives for
	free    []uint16
	cqes    []byte
	recvs   []rdma.RecvWR // by receive buffer
	reposts []rdma.RecvWR // to be posted
	first   []rdma.SendWR // binds and invalidations to be posted
	started []uint16      // slots whose command is to be posted, behind those
	sends   []rdma.SendWR
	out     int   // commands posted and not answered
	usual   int   // the most of them lately: follows out up at once, down slowly
	heldAt  int64 // nano when the oldest command that waits in started was put off, 0: none
	wcs     [64]rdma.WC
	waiting commandList // commands without a slot, except those of local
	local   *ioQueue    // the queue of this worker, if it uses this lane
	turn    bool        // whose turn it is when a slot is free: waiting's or local's
	dead    bool
	reason  error // why, if it died
	rearmed bool  // the last Arm asked for another Poll
	quiet   int   // how often in a row that brought nothing

	inCapsuleSent uint64 // commands that took their data along
}

// dialLane connects a queue: everything up to and including the RDMA connection, not
// the Connect command. The private data is that of NVMe over Fabrics, "RDMA transport".
// ctx bounds it.
func dialLane(ctx context.Context, cfg laneConfig) (_ *lane, err error) {
	l := &lane{cfg: cfg, w: cfg.w}
	defer func() {
		if err != nil {
			l.abandon()
		}
	}()
	if l.conn, err = cfg.provider.Dial(ctx, cfg.local, cfg.remote); err != nil {
		return nil, err
	}
	dev := l.conn.Device()
	l.info = dev.Info()
	depth := l.fitDepth(cfg.depth)
	if depth < MinDepth {
		return nil, fmt.Errorf("queue %d: %w: RDMA device %s has room for %d work requests per queue", cfg.qid, ErrUnsupported, l.info.Name, l.info.MaxQPWR)
	}
	if depth < cfg.depth {
		cfg.log.Info("queue cut to what the RDMA device has room for", "qid", cfg.qid, "device", l.info.Name, "asked", cfg.depth, "depth", depth,
			"max_qp_wr", l.info.MaxQPWR, "max_cqe", l.info.MaxCQE)
	}
	l.windows = l.info.MemWindows && !cfg.noWindows
	// An adapter saves a trip to memory; the software NIC would copy what it sends from where it is.
	l.inline = l.info.Autonomous && l.info.MaxInline >= protocol.CommandSize
	inline := 0
	if l.inline {
		inline = protocol.CommandSize
	}
	sges := 1
	if cfg.inCapsule > 0 && (l.info.MaxSGE == 0 || l.info.MaxSGE >= 2) {
		l.inCapsule, sges = cfg.inCapsule, 2
	}
	if l.pd, err = dev.AllocPD(); err != nil {
		return nil, err
	}
	if err = l.register(depth); err != nil {
		return nil, err
	}
	maxSend := 3 * depth // bind, Send, invalidate
	if l.cq, err = dev.CreateCQ(maxSend + depth); err != nil {
		return nil, err
	}
	if l.qp, err = l.conn.CreateQP(l.pd, rdma.QPConfig{SendCQ: l.cq, RecvCQ: l.cq, MaxSend: maxSend, MaxRecv: depth, MaxSendSGE: sges, MaxInline: inline}); err != nil {
		return nil, err
	}
	if _, err = l.qp.PostRecv(l.recvs...); err != nil {
		return nil, fmt.Errorf("queue %d: post receives: %w", cfg.qid, err)
	}
	req := protocol.RDMAConnectRequest{QID: cfg.qid, HRQSIZE: uint16(depth), HSQSIZE: uint16(depth - 1), CNTLID: cfg.cntlid}
	private, _ := req.AppendBinary(nil)
	cfg.trace.Request(cfg.remote, &req, l.info.MaxReadDepth)
	est, err := l.conn.Connect(ctx, rdma.ConnParam{
		PrivateData:        private,
		ResponderResources: l.info.MaxReadDepth, // all we have: the target may read for every write at once
		RNRRetry:           7,
		Retry:              7,
	})
	if err != nil {
		var r *rdma.RejectError
		if errors.As(err, &r) {
			var p protocol.RDMAConnectReject
			_ = p.UnmarshalBinary(r.PrivateData) // without a reason it stays 0
			cfg.trace.Rejected(cfg.remote, cfg.qid, p.Status, err)
			err = &RejectedError{QID: cfg.qid, Status: p.Status, Err: err}
		}
		return nil, err
	}
	// SQSIZE stays what was asked for: targets compare it with HSQSIZE. But a target
	// that says it posted fewer receives than that must not be overrun, which on iWARP
	// ends the connection.
	usable := depth - 1
	var acc protocol.RDMAConnectAccept
	if err := acc.UnmarshalBinary(est.PrivateData); err != nil {
		cfg.log.Debug("accept private data ignored", "qid", cfg.qid, "error", err)
	} else if n := int(acc.CRQSIZE); n > 0 && n <= usable {
		usable = max(n-1, 1)
		cfg.log.Info("target posted fewer receives than the queue has entries", "qid", cfg.qid, "depth", depth, "crqsize", n)
	}
	cfg.trace.Accepted(cfg.remote, cfg.qid, acc.CRQSIZE, est.IRD)
	l.usable = usable
	for i := usable - 1; i >= 0; i-- {
		l.free = append(l.free, uint16(i))
	}
	return l, nil
}

// fitDepth lowers a queue depth to the device's limits.
func (l *lane) fitDepth(depth int) int {
	if n := l.info.MaxQPWR; n > 0 {
		depth = min(depth, n/3)
	}
	if n := l.info.MaxCQE; n > 0 {
		depth = min(depth, n/4)
	}
	return depth
}

// sqsize is SQSIZE of the Connect command, 0's based.
func (l *lane) sqsize() uint16 { return uint16(len(l.slots)) }

func pageUp(n int) int { return (n + arena.MinSize - 1) &^ (arena.MinSize - 1) }

// laneMemory is how much memory a lane has of its own: for commands and their answers, and for data.
func laneMemory(depth int) (ctl, aux int) {
	return pageUp(depth * (protocol.CommandSize + protocol.CompletionSize)),
		zeroSize + pageUp(protocol.ConnectDataSize) + pageUp(depth*protocol.DSMRangeSize)
}

// register maps the lane's own memory and registers it and the regions.
func (l *lane) register(depth int) error {
	const sqe, cqe, rng = protocol.CommandSize, protocol.CompletionSize, protocol.DSMRangeSize
	ctlSize, auxSize := laneMemory(depth)
	var err error
	l.mem, err = unix.Mmap(-1, 0, ctlSize+auxSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("queue %d: map %d bytes: %w", l.cfg.qid, ctlSize+auxSize, err)
	}
	ctl, aux := l.mem[:ctlSize:ctlSize], l.mem[ctlSize:]
	if l.ctl, err = l.pd.Register(ctl, rdma.AccessLocalWrite); err != nil {
		return err
	}
	remote := func(a rdma.Access) rdma.Access { // what the target needs comes by window, or stands open
		if l.windows {
			return a&rdma.AccessLocalWrite | rdma.AccessMWBind
		}
		return a
	}
	if l.aux, err = l.pd.Register(aux, remote(rdma.AccessRemoteRead)); err != nil {
		return err
	}
	l.zeros = l.aux.Addr()
	l.scratch = aux[zeroSize : zeroSize+protocol.ConnectDataSize]
	ranges := aux[zeroSize+pageUp(protocol.ConnectDataSize):]
	l.keys = make([]regionKey, l.cfg.numRegion)
	for _, r := range l.cfg.regions {
		mr, err := l.pd.Register(r.mem, remote(rdma.AccessLocalWrite|rdma.AccessRemoteRead|rdma.AccessRemoteWrite))
		if err != nil {
			return err
		}
		l.keys[r.id] = regionKey{mr: mr, lkey: mr.LKey(), rkey: mr.RKey()}
	}

	n := depth - 1
	l.slots = make([]slot, n)
	for i := range l.slots {
		s := &l.slots[i]
		s.sqe = (*protocol.Command)(ctl[i*sqe:])
		s.send[0] = rdma.SGE{Addr: arena.Addr(s.sqe[:]), Len: sqe, LKey: l.ctl.LKey()}
		s.ranges = ranges[i*rng : (i+1)*rng : (i+1)*rng]
		if l.windows {
			if s.mw, err = l.pd.AllocMW(); err != nil {
				return err
			}
		}
	}
	l.cqes = ctl[depth*sqe:]
	l.recvs = make([]rdma.RecvWR, depth)
	sgl := make([]rdma.SGE, depth)
	for i := range l.recvs {
		sgl[i] = rdma.SGE{Addr: arena.Addr(l.cqes[i*cqe:]), Len: cqe, LKey: l.ctl.LKey()}
		l.recvs[i] = rdma.RecvWR{ID: uint64(i), SGL: sgl[i : i+1 : i+1]}
	}
	l.free = make([]uint16, 0, n)
	l.reposts = make([]rdma.RecvWR, 0, depth)
	l.first = make([]rdma.SendWR, 0, 2*depth)
	l.started = make([]uint16, 0, n)
	l.sends = make([]rdma.SendWR, 0, 3*depth)
	return nil
}

// attach gives the lane to its worker. Not on the worker.
func (l *lane) attach() error {
	err := errLaneDown
	e := l.w.Call(func() {
		if l.h, err = l.w.Add(l.cq.FD(), l); err == nil {
			l.h.SetMute(l.info.Autonomous)
		}
	})
	if e != nil {
		return e
	}
	return err
}

// stop ends the lane on its worker: the connection is cut, and once the queue pair is
// gone nothing the target does reaches our memory any more. Commands without an answer
// go back to their owners as lost.
func (l *lane) stop() {
	if l.qp != nil {
		l.cfg.trace.Disconnected(l.cfg.remote, l.cfg.qid, l.reason)
	}
	l.dead = true
	l.local = nil
	if l.h != nil {
		l.h.Remove()
	}
	if err := l.qp.Close(); err != nil {
		l.cfg.log.Warn("close queue pair", "qid", l.cfg.qid, "error", err)
	}
	if err := l.cq.Close(); err != nil {
		l.cfg.log.Warn("close completion queue", "qid", l.cfg.qid, "error", err)
	}
	l.qp, l.cq = nil, nil
	l.started, l.first, l.reposts = l.started[:0], l.first[:0], l.reposts[:0]
	for i := range l.slots {
		if c := l.slots[i].cmd; c != nil {
			l.slots[i].cmd = nil
			l.lose(c)
		}
	}
	for c := l.waiting.pop(); c != nil; c = l.waiting.pop() {
		l.lose(c)
	}
}

func (l *lane) lose(c *command) {
	c.lost, c.status, c.result = true, 0, 0
	c.owner.commandDone(l, c)
}

// abandon releases a lane that was never attached.
func (l *lane) abandon() {
	if l.qp != nil {
		l.qp.Close()
		l.qp = nil
	}
	if l.cq != nil {
		l.cq.Close()
		l.cq = nil
	}
	l.release()
}

// release gives back what is left after stop. It may block. Any goroutine.
func (l *lane) release() {
	warn := func(what string, err error) {
		if err != nil {
			l.cfg.log.Warn(what, "qid", l.cfg.qid, "error", err)
		}
	}
	for i := range l.slots {
		if mw := l.slots[i].mw; mw != nil {
			warn("close memory window", mw.Close())
		}
	}
	for _, k := range l.keys {
		if k.mr != nil {
			warn("deregister memory", k.mr.Deregister())
		}
	}
	for _, mr := range []rdma.MR{l.ctl, l.aux} {
		if mr != nil {
			warn("deregister memory", mr.Deregister())
		}
	}
	if l.pd != nil {
		warn("close protection domain", l.pd.Close())
	}
	if l.conn != nil {
		warn("close connection", l.conn.Close())
	}
	if l.mem != nil {
		warn("unmap", unix.Munmap(l.mem))
		l.mem = nil
	}
}

// die ends the lane after a failure and tells the association, which calls stop later.
// Commands keep their slots until then.
func (l *lane) die(err error) {
	if l.dead {
		return
	}
	l.dead, l.reason = true, err
	l.h.Remove()
	l.cfg.fail(fmt.Errorf("queue %d: %w", l.cfg.qid, err))
}

// disconnected takes what has arrived before the connection ended, and ends the lane.
func (l *lane) disconnected() {
	for range 1 << slotBits { // more rounds than there can be responses
		if l.dead || !l.Poll() {
			break
		}
	}
	err := l.conn.Err()
	if err == nil {
		err = rdma.ErrDisconnected
	}
	l.die(fmt.Errorf("connection lost: %w", err))
}

// admit takes a command. Worker only, as everything below.
func (l *lane) admit(c *command) {
	switch {
	case l.dead:
		l.lose(c)
	case len(l.free) > 0 && l.waiting.head == nil:
		l.start(c)
		l.h.Kick()
	default:
		l.waiting.push(c)
	}
}

// start puts a command into a free slot; post sends it.
func (l *lane) start(c *command) {
	i := l.free[len(l.free)-1]
	l.free = l.free[:len(l.free)-1]
	s := &l.slots[i]
	s.cmd = c
	s.gen++
	s.cid = s.gen<<slotBits | i
	s.postedAt = 0
	s.answered, s.sent, s.window, s.closed = false, false, false, true
	s.nsge = 1
	*s.sqe = c.sqe
	s.sqe.SetID(s.cid)

	var addr uint64
	var lkey, rkey uint32
	switch c.source {
	case sourceRegion:
		k := &l.keys[c.region]
		addr, lkey, rkey = c.addr, k.lkey, k.rkey
	case sourceScratch:
		addr, lkey, rkey = arena.Addr(l.scratch), l.aux.LKey(), l.aux.RKey()
	case sourceRanges:
		protocol.PutDSMRange(s.ranges, protocol.DSMRange{SLBA: c.rangeAt, NLB: c.rangeN})
		addr, lkey, rkey = arena.Addr(s.ranges), l.aux.LKey(), l.aux.RKey()
	case sourceZeros:
		addr, lkey, rkey = l.zeros, l.aux.LKey(), l.aux.RKey()
	}
	switch {
	case c.source == sourceNone:
		s.sqe.SetNoDataSGL()
	case !c.toHost && !c.keyed && c.length <= l.inCapsule:
		s.sqe.SetInCapsuleSGL(0, c.length)
		s.send[1] = rdma.SGE{Addr: addr, Len: c.length, LKey: lkey}
		s.nsge = 2
		l.inCapsuleSent++
	case l.windows:
		// The key is put in when the command is posted.
		s.window, s.closed = true, false
		s.dataAddr = addr
		s.bind[0] = rdma.SGE{Addr: addr, Len: c.length, LKey: lkey}
		access := rdma.AccessRemoteRead
		if c.toHost {
			access = rdma.AccessRemoteWrite
		}
		l.first = append(l.first, rdma.SendWR{ID: uint64(i)<<kindBits | kindBind, Op: rdma.OpBindMW, Access: access, SGL: s.bind[:], Window: s.mw})
	default:
		s.sqe.SetKeyedSGL(addr, c.length, rkey, false)
	}
	l.started = append(l.started, i)
}

// With a software device a post is a system call that costs more than what it carries.
// So on a busy queue, one that had holdDepth commands out lately, a few commands wait
// for company: until they are a third of what is usual, but no longer than holdEach for each of
// those, and holdMax. Measured at depth 32: 60 µs instead of 30 give 4 to 10 % more reads with 9 to 15 %
// less processor time; at depth 16 they would take 10 %.
const (
	holdDepth = 12
	holdShare = 3
	holdEach  = int64(2 * time.Microsecond)
	holdMax   = int64(60 * time.Microsecond)
)

// hold tells whether to put post off. The worker does not sleep meanwhile.
func (l *lane) hold() bool {
	n := len(l.started)
	if n == 0 || l.usual < holdDepth || n >= l.usual/holdShare || l.info.Autonomous {
		return false
	}
	return l.holdAt(nano())
}

func (l *lane) holdAt(now int64) bool {
	if l.heldAt == 0 {
		l.heldAt = now
	}
	longest := min(int64(l.usual)*holdEach, holdMax)
	if now-l.heldAt >= longest {
		return false
	}
	l.h.Rest(time.Duration(longest / 3)) // so that what has come meanwhile is looked at
	return true
}

// post hands everything that has gathered to the queue pair: receives first, so that no
// response can meet an empty receive queue, then with one doorbell invalidations and
// binds and, behind them, the commands.
func (l *lane) post() {
	if l.heldAt != 0 {
		l.heldAt = 0
		l.h.Rest(0)
	}
	if len(l.reposts) > 0 {
		_, err := l.qp.PostRecv(l.reposts...)
		l.reposts = l.reposts[:0]
		if err != nil {
			l.die(fmt.Errorf("post receives: %w", err))
			return
		}
	}
	if len(l.started)+len(l.first) == 0 {
		return
	}
	l.sends = append(l.sends[:0], l.first...)
	l.first = l.first[:0]
	now := int64(0)
	if len(l.started) > 0 {
		now = nano()
	}
	for _, i := range l.started {
		s := &l.slots[i]
		if s.window {
			s.rkey = rdma.NextKey(s.mw.RKey()) // the bind is in front
			s.sqe.SetKeyedSGL(s.dataAddr, s.bind[0].Len, s.rkey, l.info.SendInv)
		}
		s.postedAt = now
		l.cfg.trace.Command(l.cfg.remote, l.cfg.qid, s.sqe)
		flags := rdma.FlagSignaled
		if l.inline && s.nsge == 1 {
			flags |= rdma.FlagInline
		}
		l.sends = append(l.sends, rdma.SendWR{ID: uint64(i)<<kindBits | kindSend, Op: rdma.OpSend, Flags: flags, SGL: s.send[:s.nsge]})
	}
	if n := len(l.started); n > 0 {
		if l.out += n; l.out >= l.usual {
			l.usual = l.out
		} else {
			l.usual -= (l.usual - l.out + 7) / 8
		}
		l.started = l.started[:0]
	}
	if _, err := l.qp.PostSend(l.sends...); err != nil {
		l.die(fmt.Errorf("post commands: %w", err))
	}
}

// Poll is worker.Source: one doorbell for what was submitted since the last time, then
// what has completed, then one for what that brought.
func (l *lane) Poll() bool {
	if l.dead {
		return false
	}
	if !l.hold() {
		if l.post(); l.dead {
			return true
		}
	}
	n, busy, err := l.cq.Poll(l.wcs[:])
	if err != nil {
		l.die(fmt.Errorf("completion queue: %w", err))
		return true
	}
	if n == 0 {
		if busy {
			l.quiet = 0
		} else if l.rearmed {
			l.quiet++
		}
		l.rearmed = false
		return busy
	}
	l.rearmed, l.quiet = false, 0
	for i := range l.wcs[:n] {
		if l.complete(&l.wcs[i]); l.dead {
			return true
		}
	}
	l.feed()
	if !l.dead && !l.hold() {
		l.post()
	}
	return true
}

// Arm is worker.Source. A completion queue that asks for another Poll after it was
// armed gets one. If that brings nothing the worker may sleep, but the Poll may have
// changed what there is to wait for (a socket that is full now), so the first time it
// is armed once more.
func (l *lane) Arm() bool {
	if l.dead {
		return true
	}
	if len(l.started) > 0 || len(l.first) > 0 || len(l.reposts) > 0 {
		if l.info.Autonomous {
			return false
		}
		if l.post(); l.dead {
			return true
		}
		l.quiet = 0 // it leaves with Arm of the completion queue
	}
	if l.quiet >= 2 {
		l.quiet = 0
		return true
	}
	again, err := l.cq.Arm()
	if err != nil {
		l.die(fmt.Errorf("completion queue: %w", err))
		return true
	}
	if l.rearmed = again; !again {
		l.quiet = 0
	}
	return !again
}

// feed fills free slots from those that wait, in turns.
func (l *lane) feed() {
	for len(l.free) > 0 && l.waiting.head != nil && !l.dead {
		if l.turn = !l.turn; l.turn && l.local != nil && l.local.pumpOne() {
			continue
		}
		l.start(l.waiting.pop())
	}
	if l.local != nil {
		l.local.pump()
	}
}

// hasRoom tells local whether a command can start now.
func (l *lane) hasRoom() bool { return len(l.free) > 0 && !l.dead }

// An RDMA Write of no bytes follows a Connect that has no answer after nudgeAfter, again after twice that time,
// and so on. It is for the kernel's siw at the target's end, which sends its MPA Reply before it hooks the socket:
// a first message that is faster than that stays in the socket, and is found only when more comes.
// On iWARP nobody looks at the tag of such a Write (RFC 5040, "zero-length"), and no target sees it.
const (
	nudgeAfter = time.Second
	maxNudges  = 3 // the send queue has room for that beside Connect, however long it takes
)

// nudge is the goroutine for that, until answered is closed.
func (l *lane) nudge(answered <-chan struct{}) {
	t := time.NewTimer(nudgeAfter)
	defer t.Stop()
	for i := range maxNudges {
		select {
		case <-answered:
			return
		case <-t.C:
		}
		t.Reset(nudgeAfter << (i + 1))
		l.cfg.log.Info("no answer to Connect yet, an empty RDMA Write follows it: siw may not have noticed it", "qid", l.cfg.qid)
		_ = l.w.Submit(worker.TaskFunc(func() {
			if !l.dead {
				l.first = append(l.first, rdma.SendWR{ID: kindNudge, Op: rdma.OpWrite, Flags: rdma.FlagSignaled, RKey: 1})
				l.h.Kick()
			}
		}))
	}
}

// complete deals with one work completion.
func (l *lane) complete(wc *rdma.WC) {
	if wc.Status != rdma.StatusSuccess {
		l.die(l.failure(wc))
		return
	}
	if wc.Recv {
		l.response(wc)
		return
	}
	s := &l.slots[wc.ID>>kindBits]
	switch wc.ID & kindMask {
	case kindSend:
		s.sent = true
	case kindInvalidate:
		s.closed = true
	default:
		return
	}
	l.finish(uint16(wc.ID>>kindBits), s)
}

// failure says what an error completion means.
func (l *lane) failure(wc *rdma.WC) error {
	if wc.Status == rdma.StatusFlush {
		err := l.conn.Err()
		if err == nil { // a device flushes before it tells of the end
			err = rdma.ErrDisconnected
		}
		return fmt.Errorf("connection lost: %w", err)
	}
	what := "Send"
	switch {
	case wc.Recv:
		what = "Receive"
	case wc.ID&kindMask == kindBind:
		what = "Bind MW"
	case wc.ID&kindMask == kindInvalidate:
		what = "Local Invalidate"
	case wc.ID&kindMask == kindNudge:
		what = "RDMA Write"
	}
	if wc.Status == rdma.StatusRetryExceeded || wc.Status == rdma.StatusRNRRetryExceeded {
		return fmt.Errorf("%s failed: %s: %w", what, wc.Status, rdma.ErrDisconnected)
	}
	return fmt.Errorf("%s failed: %s", what, wc.Status)
}

// response deals with a response capsule (NVMe over Fabrics, "RDMA transport",
// completions).
func (l *lane) response(wc *rdma.WC) {
	at := int(wc.ID) * protocol.CompletionSize
	if wc.ByteLen != protocol.CompletionSize {
		l.die(fmt.Errorf("%w: response of %d bytes instead of %d", ErrProtocol, wc.ByteLen, protocol.CompletionSize))
		return
	}
	cqe := (*protocol.Completion)(l.cqes[at:])
	cid := cqe.ID()
	i := cid & slotMask
	if int(i) >= len(l.slots) || l.slots[i].cmd == nil || l.slots[i].cid != cid || l.slots[i].answered || l.slots[i].postedAt == 0 {
		l.die(fmt.Errorf("%w: response to command %#04x, which is not outstanding", ErrProtocol, cid))
		return
	}
	s := &l.slots[i]
	l.cfg.trace.Completion(l.cfg.remote, l.cfg.qid, cqe, s.sqe)
	s.answered = true
	l.out--
	s.status, s.result = cqe.Status(), cqe.Result()
	l.reposts = append(l.reposts, l.recvs[wc.ID])
	if wc.Invalidated {
		if !s.window || wc.RKey != s.rkey {
			l.die(fmt.Errorf("%w: the response to command %#04x invalidated key %#x, which is not the command's", ErrProtocol, cid, wc.RKey))
			return
		}
		s.closed = true
	} else if s.window {
		l.first = append(l.first, rdma.SendWR{ID: uint64(i)<<kindBits | kindInvalidate, Op: rdma.OpLocalInvalidate, Flags: rdma.FlagSignaled, InvalidateRKey: s.rkey})
	}
	l.finish(i, s)
}

// finish gives a command back once everything about it is over.
func (l *lane) finish(i uint16, s *slot) {
	if !s.answered || !s.sent || !s.closed {
		return
	}
	c := s.cmd
	s.cmd = nil
	l.free = append(l.free, i)
	c.lost, c.status, c.result = false, s.status, s.result
	c.owner.commandDone(l, c)
}

// oldest is when the command that waits longest for its end was posted; 0 if there is
// none.
func (l *lane) oldest() (at int64, op string) {
	for i := range l.slots {
		if s := &l.slots[i]; s.cmd != nil && s.postedAt != 0 && (at == 0 || s.postedAt < at) {
			at = s.postedAt
			op = commandName(s.sqe, l.cfg.qid)
		}
	}
	return at, op
}

// supervise ends the association if a command is out for longer than limit.
func (l *lane) supervise(limit time.Duration) {
	if l.dead {
		return
	}
	if at, op := l.oldest(); at != 0 && time.Duration(nano()-at) > limit {
		l.die(fmt.Errorf("%s: %w (request_timeout %v)", op, ErrTimeout, limit))
	}
}

// commandName names a command for a message.
func commandName(c *protocol.Command, qid uint16) string {
	switch {
	case c.IsFabrics():
		return c.FabricsType().String()
	case qid == 0:
		return c.AdminOpcode().String()
	}
	return c.Opcode().String()
}

// A call is one command made by an ordinary goroutine, with data of its own.
type call struct {
	command
	op  string
	out []byte       // data to the target
	in  int          // bytes of data from the target
	mem *arena.Arena // for the data, region 0; nil: the lane's scratch memory, for one call at a time
	buf []byte
	got []byte
	err error
	end chan struct{}
}

// Run is worker.Task: the call arrives at the lane's worker.
func (k *call) Run() {
	l := k.lane
	switch n := max(len(k.out), k.in); {
	case n == 0 || l.dead:
	case k.mem == nil:
		copy(l.scratch, k.out)
		k.source, k.keyed, k.length = sourceScratch, true, uint32(n)
	default:
		if k.buf = k.mem.Alloc(n); k.buf == nil {
			k.err = fmt.Errorf("%s: no buffer of %d bytes", k.op, n)
			close(k.end)
			return
		}
		copy(k.buf, k.out)
		if k.in > 0 {
			clear(k.buf) // what a target leaves out is not what was there before
		}
		k.source, k.keyed, k.toHost = sourceRegion, true, k.in > 0
		k.addr, k.length = arena.Addr(k.buf), uint32(n)
	}
	l.admit(&k.command)
}

func (k *call) commandDone(l *lane, _ *command) {
	if k.buf != nil {
		if k.in > 0 && !k.lost && k.status.OK() {
			k.got = append([]byte(nil), k.buf[:k.in]...)
		}
		k.mem.Free(k.buf)
		k.buf = nil
	}
	if k.lost {
		k.err = fmt.Errorf("%s: %w", k.op, errLaneDown)
	}
	close(k.end)
}

// do makes the call and waits for its end. A failure status is not an error here. If
// ctx ends first the association ends too, since the target still owns the command. After
// an error k may be in use by the lane and must not be read. Not on the worker.
func (l *lane) do(ctx context.Context, k *call) error {
	k.owner, k.lane, k.end = k, l, make(chan struct{})
	if err := l.w.Submit(k); err != nil {
		return fmt.Errorf("%s: %w", k.op, ErrClosed)
	}
	select {
	case <-k.end:
		return k.err
	case <-ctx.Done():
		select {
		case <-k.end: // the answer came first
			return k.err
		default:
		}
		err := context.Cause(ctx)
		if err == context.DeadlineExceeded { // a caller's, who did not say whose it is
			err = ErrTimeout
		}
		err = fmt.Errorf("%s: %w", k.op, err)
		l.cfg.fail(fmt.Errorf("queue %d: %w", l.cfg.qid, err))
		return err
	}
}
