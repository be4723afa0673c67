package initiator

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/internal/envtest"
	"rdblk/protocol"
	"rdblk/rdma"
	"rdblk/rdma/iwarp"
)

// fakeTarget is a small NVMe over RDMA target for scripts: it does what a decent target
// does unless a hook does something else. Every connection is served by a goroutine
// that handles one command after the other. It is written from the specification notes
// alone and shares no code with package target.
type fakeTarget struct {
	t    testing.TB
	prov rdma.Provider
	addr netip.AddrPort

	mu        sync.Mutex
	ln        rdma.Listener
	ctrl      protocol.IdentifyController
	nvm       protocol.IdentifyNVMController
	cap       protocol.CAP
	vs        protocol.Version
	grant     int // I/O queues
	spaces    map[uint32]*fakeSpace
	smart     protocol.SmartLog
	noSmart   bool
	losses    map[uint32]uint64 // unsafe shutdowns in the log of a namespace
	noNVM     bool              // Identify CNS 6 is refused
	plainSend bool              // never Send with Invalidate
	entries   []protocol.DiscoveryLogEntry
	genctr    uint64
	onRequest func(protocol.RDMAConnectRequest) []byte // not nil: private data of a reject
	accept    func(protocol.RDMAConnectRequest) []byte // private data of the accept
	hook      func(*fakeCommand) bool                  // true: it has dealt with the command
	conns     map[*fakeConn]struct{}
	nextCtrl  uint16
	hostIDs   []protocol.UUID // of admin Connects
	subnqns   []string
	log       []string // commands by name, in order of arrival
	shutdowns atomic.Int64

	wg sync.WaitGroup
}

// fakeSpace is a RAM disk.
type fakeSpace struct {
	mu    sync.Mutex
	data  []byte
	shift uint8
	id    protocol.NamespaceIDs
	ns    protocol.IdentifyNamespace
	gone  bool

	reads, writes, flushes, zeroes, discards, fua atomic.Int64
}

func newFakeSpace(size int, shift uint8) *fakeSpace {
	s := &fakeSpace{data: make([]byte, size), shift: shift}
	s.id.UUID = protocol.RandomUUID()
	s.id.NGUID = protocol.NGUID(protocol.RandomUUID())
	s.ns.NSZE = uint64(size) >> shift
	s.ns.NCAP = s.ns.NSZE
	s.ns.LBAF[0].LBADS = shift
	s.ns.DLFEAT = protocol.DLFEATReadZeros | protocol.DLFEATDEAC
	return s
}

// content is a copy of n bytes at off.
func (s *fakeSpace) content(off int64, n int) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return bytes.Clone(s.data[off : off+int64(n)])
}

func (s *fakeSpace) resize(size int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := make([]byte, size)
	copy(d, s.data)
	s.data = d
	s.ns.NSZE = uint64(size) >> s.shift
	s.ns.NCAP = s.ns.NSZE
}

const fakeNQN = "nqn.2026-11.io.rdblk:fake"

func newProvider(t testing.TB) *iwarp.Provider {
	t.Helper()
	p, err := iwarp.New(iwarp.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// newFakeTarget starts a target with one namespace of 1 MiB with blocks of 512 bytes.
func newFakeTarget(t testing.TB) *fakeTarget {
	t.Helper()
	f := &fakeTarget{
		t: t, prov: newProvider(t), grant: 4, vs: protocol.Version1_4,
		cap:    protocol.CAP(0).WithMQES(127).WithCQR(true).WithTO(15 * time.Second).WithCSS(protocol.CSSNVM),
		spaces: map[uint32]*fakeSpace{1: newFakeSpace(1<<20, 9)},
		conns:  map[*fakeConn]struct{}{}, genctr: 1,
	}
	f.ctrl = protocol.IdentifyController{
		SN: "fake", MN: "fake", FR: "1", MDTS: 5, VER: f.vs, CNTRLTYPE: protocol.ControllerTypeIO, KAS: 10, MAXCMD: 128, NN: 1024,
		ONCS: protocol.ONCSDatasetManagement | protocol.ONCSWriteZeroes, VWC: protocol.VWCPresent, SUBNQN: fakeNQN,
		OAES: protocol.EventConfigNamespace, LPA: protocol.LPAExtended,
	}
	f.ctrl.SetInCapsuleSize(4096)
	f.listen(envtest.Port(t)) // which is its own while it is down, too
	t.Cleanup(f.stop)
	return f
}

func (f *fakeTarget) listen(at netip.AddrPort) {
	ln, err := f.prov.Listen(at, rdma.ListenConfig{})
	if err != nil {
		f.t.Fatal(err)
	}
	f.mu.Lock()
	f.ln = ln
	f.addr = ln.Addr()
	f.mu.Unlock()
	f.wg.Go(func() {
		for {
			conn, err := ln.Accept()
			if errors.Is(err, rdma.ErrClosed) {
				return
			}
			if err != nil {
				f.t.Errorf("fake target: accept: %v", err)
				return
			}
			f.wg.Go(func() { f.serve(conn) })
		}
	})
}

// down is the death of the target's process: nothing listens, every connection is
// reset.
func (f *fakeTarget) down() {
	f.mu.Lock()
	ln := f.ln
	f.ln = nil
	f.mu.Unlock()
	if ln != nil {
		ln.Close()
	}
	f.cut(nil)
}

// up starts it again at the same address.
func (f *fakeTarget) up() { f.listen(f.addr) }

// cut resets the connections that which chooses, nil all.
func (f *fakeTarget) cut(which func(*fakeConn) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for c := range f.conns {
		if which == nil || which(c) {
			c.killed.Store(true)
		}
	}
}

func (f *fakeTarget) stop() {
	f.down()
	f.wg.Wait()
}

func (f *fakeTarget) set(fn func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	fn()
}

// fence ends what is left of an older association of the same host, so that nothing of
// it happens later.
func (f *fakeTarget) fence(me *fakeConn, host protocol.UUID) error {
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(100 * time.Microsecond)
	defer tick.Stop()
	for {
		others := 0
		f.set(func() {
			for c := range f.conns {
				if c != me && c.host == host {
					c.killed.Store(true)
					others++
				}
			}
		})
		if others == 0 {
			return nil
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			f.t.Errorf("fake target: %d connections of the old association do not end", others)
			return errFakeKilled
		}
	}
}

// count is how many commands of this name have come.
func (f *fakeTarget) count(name string) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, l := range f.log {
		if l == name {
			n++
		}
	}
	return n
}

const fakeData = 1 << 20 // bytes of the data buffer of a connection

// fakeConn is one queue.
type fakeConn struct {
	f       *fakeTarget
	conn    rdma.Conn
	pd      rdma.PD
	cq      rdma.CQ
	qp      rdma.QP
	req     protocol.RDMAConnectRequest
	qid     uint16
	cntlid  uint16
	host    protocol.UUID
	mem     []byte
	mr      rdma.MR
	slot    int // bytes of a receive buffer
	depth   int
	room    uint32 // for in-capsule data
	wcs     [16]rdma.WC
	backlog []rdma.WC // receives that came while something else was waited for
	done    map[uint64]bool
	nextID  uint64
	killed  atomic.Bool
	cc      protocol.CC
	aers    []protocol.Command
	inbox   chan func(*fakeConn)
	sent    int
}

// fakeCommand is a command that has arrived.
type fakeCommand struct {
	*fakeConn
	cmd  protocol.Command
	data protocol.Data
	in   []byte // in-capsule data
}

var errFakeKilled = errors.New("killed by the test")

func (f *fakeTarget) serve(conn rdma.Conn) {
	c := &fakeConn{f: f, conn: conn, done: map[uint64]bool{}, inbox: make(chan func(*fakeConn), 64)}
	defer c.close()
	if err := c.req.UnmarshalBinary(conn.Request().PrivateData); err != nil {
		f.t.Errorf("fake target: private data: %v", err)
		return
	}
	f.mu.Lock()
	onRequest, accept := f.onRequest, f.accept
	c.room = f.ctrl.InCapsuleSize()
	f.mu.Unlock()
	if onRequest != nil {
		if p := onRequest(c.req); p != nil {
			conn.Reject(p)
			return
		}
	}
	if c.req.QID == 0 {
		c.room = 0
	}
	if err := c.open(); err != nil {
		f.t.Errorf("fake target: open queue: %v", err)
		return
	}
	private, _ := (&protocol.RDMAConnectAccept{CRQSIZE: uint16(c.depth)}).AppendBinary(nil)
	if accept != nil {
		private = accept(c.req)
	}
	f.mu.Lock()
	f.conns[c] = struct{}{}
	f.mu.Unlock()
	ctx, stop := context.WithTimeout(context.Background(), 60*time.Second)
	defer stop()
	if _, err := conn.Accept(ctx, rdma.ConnParam{PrivateData: private, InitiatorDepth: conn.Request().ResponderResources, RNRRetry: 7}); err != nil {
		return // the host may have gone again
	}
	c.run()
}

func (c *fakeConn) open() (err error) {
	dev := c.conn.Device()
	c.depth = c.req.Depth()
	c.slot = protocol.CommandSize + int(c.room)
	size := c.depth*c.slot + fakeData
	if c.mem, err = unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE); err != nil {
		return err
	}
	if c.pd, err = dev.AllocPD(); err != nil {
		return err
	}
	if c.mr, err = c.pd.Register(c.mem, rdma.AccessLocalWrite|rdma.AccessRemoteWrite); err != nil {
		return err
	}
	if c.cq, err = dev.CreateCQ(2*c.depth + 64); err != nil {
		return err
	}
	if c.qp, err = c.conn.CreateQP(c.pd, rdma.QPConfig{SendCQ: c.cq, RecvCQ: c.cq, MaxSend: 64, MaxRecv: c.depth}); err != nil {
		return err
	}
	for i := range c.depth {
		if err := c.repost(uint64(i)); err != nil {
			return err
		}
	}
	return nil
}

func (c *fakeConn) sge(off, n int) []rdma.SGE {
	return []rdma.SGE{{Addr: c.mr.Addr() + uint64(off), Len: uint32(n), LKey: c.mr.LKey()}}
}

func (c *fakeConn) repost(i uint64) error {
	_, err := c.qp.PostRecv(rdma.RecvWR{ID: i, SGL: c.sge(int(i)*c.slot, c.slot)})
	return err
}

func (c *fakeConn) close() {
	c.f.mu.Lock()
	delete(c.f.conns, c)
	c.f.mu.Unlock()
	if c.qp != nil {
		c.qp.Close()
	}
	if c.cq != nil {
		c.cq.Close()
	}
	if c.mr != nil {
		c.mr.Deregister()
	}
	if c.pd != nil {
		c.pd.Close()
	}
	c.conn.Close()
	if c.mem != nil {
		unix.Munmap(c.mem)
	}
}

// poll moves things on; it sleeps up to a millisecond if there is nothing to do.
func (c *fakeConn) poll() error {
	if c.killed.Load() {
		return errFakeKilled
	}
	n, busy, err := c.cq.Poll(c.wcs[:])
	if err != nil {
		return err
	}
	for _, wc := range c.wcs[:n] {
		if wc.Status != rdma.StatusSuccess {
			return fmt.Errorf("work completion: %v", wc.Status)
		}
		if wc.Recv {
			c.backlog = append(c.backlog, wc)
		} else {
			c.done[wc.ID] = true
		}
	}
	if n > 0 || busy {
		return nil
	}
	if again, err := c.cq.Arm(); err != nil || again {
		return err
	}
	unix.Poll([]unix.PollFd{{Fd: int32(c.cq.FD()), Events: unix.POLLIN}}, 1)
	return nil
}

// execute posts a request and waits for its completion.
func (c *fakeConn) execute(wrs ...rdma.SendWR) error {
	for i := range wrs {
		c.nextID++
		wrs[i].ID = c.nextID
	}
	last := &wrs[len(wrs)-1]
	last.Flags |= rdma.FlagSignaled
	if _, err := c.qp.PostSend(wrs...); err != nil {
		return err
	}
	for !c.done[last.ID] {
		if err := c.poll(); err != nil {
			return err
		}
	}
	delete(c.done, last.ID)
	return nil
}

func (c *fakeConn) run() {
	for {
		select {
		case fn := <-c.inbox:
			fn(c)
		default:
		}
		if len(c.backlog) == 0 {
			if err := c.poll(); err != nil {
				return
			}
			continue
		}
		wc := c.backlog[0]
		c.backlog = c.backlog[1:]
		capsule := bytes.Clone(c.mem[int(wc.ID)*c.slot:][:wc.ByteLen])
		if err := c.repost(wc.ID); err != nil {
			return
		}
		if err := c.handle(capsule); err != nil {
			return
		}
	}
}

func (c *fakeConn) handle(capsule []byte) error {
	v, ok := protocol.CommandView(capsule)
	if !ok {
		c.f.t.Errorf("fake target: capsule of %d bytes", len(capsule))
		return errors.New("short capsule")
	}
	k := &fakeCommand{fakeConn: c, cmd: *v}
	if s := k.cmd.CheckFlags(); !s.OK() {
		c.f.t.Errorf("fake target: flags %#x", k.cmd.Flags())
		return k.respond(s, 0)
	}
	var s protocol.Status
	if k.data, s = k.cmd.Data(k.cmd.Direction(), protocol.Capsule{InCapsuleSize: c.room, Received: uint32(len(capsule))}); !s.OK() {
		c.f.t.Errorf("fake target: %s: data pointer % x: %v", commandName(&k.cmd, c.qid), k.cmd.SGL()[:], s)
		return k.respond(s, 0)
	}
	k.in = k.data.Bytes(capsule)
	c.f.mu.Lock()
	hook := c.f.hook
	c.f.log = append(c.f.log, commandName(&k.cmd, c.req.QID))
	c.f.mu.Unlock()
	if hook != nil && hook(k) {
		if c.killed.Load() {
			return errFakeKilled
		}
		return nil
	}
	return k.run()
}

// payload is the host's data: what came along, or what an RDMA Read brings.
func (k *fakeCommand) payload() ([]byte, error) {
	switch k.data.Kind {
	case protocol.DataInCapsule:
		return k.in, nil
	case protocol.DataKeyed:
		at := k.depth * k.slot
		if err := k.execute(rdma.SendWR{Op: rdma.OpRead, SGL: k.sge(at, int(k.data.Len)), RemoteAddr: k.data.Addr, RKey: k.data.Key}); err != nil {
			return nil, err
		}
		return k.mem[at : at+int(k.data.Len)], nil
	}
	return nil, nil
}

// deliver writes b to the host and answers with success.
func (k *fakeCommand) deliver(b []byte) error {
	if k.data.Kind != protocol.DataKeyed {
		k.f.t.Errorf("fake target: %s without a keyed buffer", commandName(&k.cmd, k.req.QID))
		return k.respond(protocol.StatusInvalidField.WithDNR(), 0)
	}
	at := k.depth * k.slot
	buf := k.mem[at+64 : at+64+int(k.data.Len)]
	clear(buf[copy(buf, b):])
	w := rdma.SendWR{Op: rdma.OpWrite, SGL: k.sge(at+64, len(buf)), RemoteAddr: k.data.Addr, RKey: k.data.Key}
	return k.execute(w, k.response(0, 0))
}

// response is the Send of the answer.
func (k *fakeCommand) response(s protocol.Status, result uint64) rdma.SendWR {
	var cqe protocol.Completion
	cqe.Init(k.cmd.ID(), s)
	cqe.SetResult(result)
	wr := k.raw(cqe)
	k.f.mu.Lock()
	plain := k.f.plainSend
	k.f.mu.Unlock()
	if k.data.Invalidate && !plain {
		wr.Op, wr.InvalidateRKey = rdma.OpSendInvalidate, k.data.Key
	}
	return wr
}

// raw is the Send of any 16 bytes.
func (c *fakeConn) raw(cqe protocol.Completion) rdma.SendWR {
	at := c.depth*c.slot + c.sent%4*16
	c.sent++
	copy(c.mem[at:], cqe[:])
	return rdma.SendWR{Op: rdma.OpSend, SGL: c.sge(at, 16)}
}

func (k *fakeCommand) respond(s protocol.Status, result uint64) error {
	return k.execute(k.response(s, result))
}

func (k *fakeCommand) run() error {
	switch {
	case k.cmd.IsFabrics():
		return k.fabrics()
	case k.req.QID == 0:
		return k.admin()
	}
	return k.io()
}

func (k *fakeCommand) fabrics() error {
	f := k.f
	switch k.cmd.FabricsType() {
	case protocol.FabricsConnect:
		b, err := k.payload()
		if err != nil {
			return err
		}
		var d protocol.ConnectData
		if err := d.UnmarshalBinary(b); err != nil {
			return err
		}
		if k.cmd.SQSIZE() != k.req.HSQSIZE || k.cmd.QID() != k.req.QID {
			f.t.Errorf("fake target: Connect of queue %d with SQSIZE %d, but the connection request said %d and %d", k.cmd.QID(), k.cmd.SQSIZE(), k.req.QID, k.req.HSQSIZE)
		}
		k.qid = k.cmd.QID()
		f.set(func() { k.fakeConn.host = d.HOSTID })
		if k.qid != 0 {
			k.cntlid = d.CNTLID
			return k.respond(0, uint64(d.CNTLID))
		}
		if err := f.fence(k.fakeConn, d.HOSTID); err != nil {
			return err
		}
		f.mu.Lock()
		f.nextCtrl++
		k.fakeConn.cntlid = f.nextCtrl
		f.hostIDs = append(f.hostIDs, d.HOSTID)
		f.subnqns = append(f.subnqns, d.SUBNQN)
		f.mu.Unlock()
		return k.respond(0, uint64(k.cntlid))
	case protocol.FabricsPropertyGet:
		var v uint64
		switch k.cmd.Property() {
		case protocol.PropertyCAP:
			v = uint64(f.cap)
		case protocol.PropertyVS:
			v = uint64(f.vs)
		case protocol.PropertyCC:
			v = uint64(k.cc)
		case protocol.PropertyCSTS:
			v = uint64(protocol.CSTS(0).WithRDY(k.cc.EN()))
			if k.cc.SHN() != 0 {
				v = uint64(protocol.CSTS(0).WithSHST(protocol.SHSTComplete))
			}
		default:
			return k.respond(protocol.StatusInvalidField.WithDNR(), 0)
		}
		return k.respond(0, v)
	case protocol.FabricsPropertySet:
		if k.cmd.Property() != protocol.PropertyCC {
			return k.respond(protocol.StatusInvalidField.WithDNR(), 0)
		}
		k.fakeConn.cc = protocol.CC(k.cmd.PropertyValue())
		if k.cc.SHN() != 0 {
			f.shutdowns.Add(1)
		}
		return k.respond(0, 0)
	}
	return k.respond(protocol.StatusInvalidOpcode.WithDNR(), 0)
}

func (k *fakeCommand) admin() error {
	f := k.f
	invalid := protocol.StatusInvalidField.WithDNR()
	switch k.cmd.AdminOpcode() {
	case protocol.AdminIdentify:
		b, s := k.identify()
		if !s.OK() {
			return k.respond(s, 0)
		}
		return k.deliver(b)
	case protocol.AdminGetLogPage:
		var page []byte
		f.mu.Lock()
		smart, noSmart, losses, entries, gen := f.smart, f.noSmart, maps.Clone(f.losses), f.entries, f.genctr
		f.mu.Unlock()
		switch k.cmd.LID() {
		case protocol.LogSmart:
			if noSmart {
				return k.respond(protocol.StatusInvalidLogPage.WithDNR(), 0)
			}
			switch nsid := k.cmd.NSID(); {
			case nsid == 0 || nsid == protocol.NSIDAll:
			case f.ctrl.LPA&protocol.LPASmartPerNamespace == 0:
				return k.respond(invalid, 0)
			default:
				smart.UnsafeShutdowns.Lo = losses[nsid]
			}
			page, _ = smart.AppendBinary(nil)
		case protocol.LogChangedNamespaces:
			page = protocol.AppendChangedNamespaces(nil, []uint32{1})
		case protocol.LogDiscovery:
			page, _ = (&protocol.DiscoveryLogHeader{GENCTR: gen, NUMREC: uint64(len(entries))}).AppendBinary(nil)
			for i := range entries {
				page, _ = entries[i].AppendBinary(page)
			}
		default:
			return k.respond(protocol.StatusInvalidLogPage.WithDNR(), 0)
		}
		if k.cmd.LogLength() != uint64(k.data.Len) {
			return k.respond(protocol.StatusDataSGLLengthInvalid.WithDNR(), 0)
		}
		return k.deliver(protocol.LogWindow(page, k.cmd.LPO(), k.cmd.LogLength()))
	case protocol.AdminSetFeatures:
		switch k.cmd.FID() {
		case protocol.FeatureNumberOfQueues:
			f.mu.Lock()
			n := f.grant
			f.mu.Unlock()
			return k.respond(0, uint64(protocol.NewQueueCount(n, n)))
		case protocol.FeatureAsyncEventConfig:
			return k.respond(0, 0)
		}
		return k.respond(invalid, 0)
	case protocol.AdminKeepAlive:
		return k.respond(0, 0)
	case protocol.AdminAsyncEventRequest:
		k.fakeConn.aers = append(k.aers, k.cmd)
		return nil
	}
	return k.respond(protocol.StatusInvalidOpcode.WithDNR(), 0)
}

func (k *fakeCommand) identify() ([]byte, protocol.Status) {
	f := k.f
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.spaces[k.cmd.NSID()]
	if s != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
	}
	var b []byte
	switch k.cmd.CNS() {
	case protocol.CNSController:
		d := f.ctrl
		d.CNTLID = k.cntlid
		b, _ = d.AppendBinary(nil)
	case protocol.CNSNamespace:
		var d protocol.IdentifyNamespace
		if s != nil && !s.gone {
			d = s.ns
		}
		b, _ = d.AppendBinary(nil)
	case protocol.CNSActiveNamespaces:
		var ids []uint32
		for id, s := range f.spaces {
			if id > k.cmd.NSID() && !s.gone {
				ids = append(ids, id)
			}
		}
		slices.Sort(ids)
		b = protocol.AppendNamespaceList(nil, ids)
	case protocol.CNSNamespaceDescriptors:
		if s == nil || s.gone {
			return nil, protocol.StatusInvalidNamespace.WithDNR()
		}
		b, _ = s.id.AppendBinary(nil)
	case protocol.CNSCommandSetController:
		if f.noNVM {
			return nil, protocol.StatusInvalidField.WithDNR()
		}
		b, _ = f.nvm.AppendBinary(nil)
	default:
		return nil, protocol.StatusInvalidField.WithDNR()
	}
	return b, 0
}

func (k *fakeCommand) io() error {
	f := k.f
	f.mu.Lock()
	s := f.spaces[k.cmd.NSID()]
	f.mu.Unlock()
	if s == nil || s.gone {
		return k.respond(protocol.StatusInvalidNamespace.WithDNR(), 0)
	}
	var payload []byte
	if k.cmd.Direction() == protocol.HostToController {
		var err error
		if payload, err = k.payload(); err != nil {
			return err
		}
	}
	op := k.cmd.Opcode()
	s.mu.Lock()
	var out []byte
	var st protocol.Status
	switch op {
	case protocol.OpFlush:
		s.flushes.Add(1)
	case protocol.OpDatasetManagement:
		s.discards.Add(1)
		r, ok := protocol.DSMRangesView(payload, k.cmd.DSMRangeCount())
		if !ok {
			st = protocol.StatusDataSGLLengthInvalid.WithDNR()
			break
		}
		for d := range r.All() {
			if off, n, ok := protocol.ByteRange(d.SLBA, uint64(d.NLB), s.shift, s.ns.NSZE); ok {
				clear(s.data[off : off+n])
			} else {
				st = protocol.StatusLBAOutOfRange.WithDNR()
			}
		}
	case protocol.OpRead, protocol.OpWrite, protocol.OpWriteZeroes:
		off, n, ok := protocol.ByteRange(k.cmd.SLBA(), uint64(k.cmd.Blocks()), s.shift, s.ns.NSZE)
		if !ok {
			st = protocol.StatusLBAOutOfRange.WithDNR()
			break
		}
		if op != protocol.OpWriteZeroes && uint64(n) != uint64(k.data.Len) {
			st = protocol.StatusDataSGLLengthInvalid.WithDNR()
			break
		}
		if k.cmd.FUA() {
			s.fua.Add(1)
		}
		switch op {
		case protocol.OpRead:
			s.reads.Add(1)
			out = bytes.Clone(s.data[off : off+n])
		case protocol.OpWrite:
			s.writes.Add(1)
			copy(s.data[off:], payload)
		default:
			s.zeroes.Add(1)
			clear(s.data[off : off+n])
		}
	default:
		st = protocol.StatusInvalidOpcode.WithDNR()
	}
	s.mu.Unlock()
	if !st.OK() {
		return k.respond(st, 0)
	}
	if out != nil {
		return k.deliver(out)
	}
	return k.respond(0, 0)
}

// admins runs fn on each live admin connection's goroutine.
func (f *fakeTarget) admins(fn func(*fakeConn)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for c := range f.conns {
		if c.req.QID == 0 {
			c.inbox <- fn
		}
	}
}

// event completes an Asynchronous Event Request.
func (f *fakeTarget) event(e protocol.AsyncEvent) {
	f.admins(func(c *fakeConn) {
		if len(c.aers) == 0 {
			f.t.Error("fake target: no Asynchronous Event Request is outstanding")
			return
		}
		k := &fakeCommand{fakeConn: c, cmd: c.aers[0]}
		c.aers = c.aers[1:]
		_ = k.respond(0, uint64(e))
	})
}

// --- a provider on the initiator's side that can lie a little ---

// crooked wraps a provider and passes every batch of completions of a lane through a
// function, which may hold back, reorder or change them.
type crooked struct {
	rdma.Provider
	mu     sync.Mutex
	poll   func(qid uint16, wcs []rdma.WC) []rdma.WC // on the worker; the result is at most as long
	info   func(*rdma.DeviceInfo)
	on     func(op string) error // asked before each operation: its error is the operation's
	closed atomic.Int64          // queue pairs
	opened atomic.Int64
}

func (p *crooked) ask(op string) error {
	p.mu.Lock()
	on := p.on
	p.mu.Unlock()
	if on == nil {
		return nil
	}
	return on(op)
}

type crookedConn struct {
	rdma.Conn
	p   *crooked
	qid uint16
}

type crookedDevice struct {
	rdma.Device
	p *crooked
	c *crookedConn
}

type crookedCQ struct {
	rdma.CQ
	p *crooked
	c *crookedConn
}

type crookedPD struct {
	rdma.PD
	p *crooked
}

type crookedQP struct {
	rdma.QP
	p *crooked
}

func (p *crooked) Dial(ctx context.Context, local netip.Addr, remote netip.AddrPort) (rdma.Conn, error) {
	if err := p.ask("dial"); err != nil {
		return nil, err
	}
	c, err := p.Provider.Dial(ctx, local, remote)
	if err != nil {
		return nil, err
	}
	return &crookedConn{Conn: c, p: p}, nil
}

func (c *crookedConn) Device() rdma.Device {
	return &crookedDevice{Device: c.Conn.Device(), p: c.p, c: c}
}

func (c *crookedConn) CreateQP(pd rdma.PD, cfg rdma.QPConfig) (rdma.QP, error) {
	if err := c.p.ask("create queue pair"); err != nil {
		return nil, err
	}
	cfg.SendCQ, cfg.RecvCQ = cfg.SendCQ.(*crookedCQ).CQ, cfg.RecvCQ.(*crookedCQ).CQ
	q, err := c.Conn.CreateQP(pd.(*crookedPD).PD, cfg)
	if err != nil {
		return nil, err
	}
	c.p.opened.Add(1)
	return &crookedQP{q, c.p}, nil
}

func (q *crookedQP) Close() error {
	q.p.closed.Add(1)
	return q.QP.Close()
}

func (c *crookedConn) Connect(ctx context.Context, p rdma.ConnParam) (rdma.Established, error) {
	if err := c.p.ask("connect"); err != nil {
		return rdma.Established{}, err
	}
	var r protocol.RDMAConnectRequest
	if r.UnmarshalBinary(p.PrivateData) == nil {
		c.qid = r.QID
	}
	return c.Conn.Connect(ctx, p)
}

func (d *crookedDevice) Info() rdma.DeviceInfo {
	in := d.Device.Info()
	if d.p.info != nil {
		d.p.info(&in)
	}
	return in
}

func (d *crookedDevice) AllocPD() (rdma.PD, error) {
	if err := d.p.ask("allocate protection domain"); err != nil {
		return nil, err
	}
	pd, err := d.Device.AllocPD()
	if err != nil {
		return nil, err
	}
	return &crookedPD{pd, d.p}, nil
}

func (d *crookedDevice) CreateCQ(depth int) (rdma.CQ, error) {
	if err := d.p.ask("create completion queue"); err != nil {
		return nil, err
	}
	cq, err := d.Device.CreateCQ(depth)
	if err != nil {
		return nil, err
	}
	return &crookedCQ{cq, d.p, d.c}, nil
}

func (p *crookedPD) Register(mem []byte, a rdma.Access) (rdma.MR, error) {
	if err := p.p.ask("register memory"); err != nil {
		return nil, err
	}
	return p.PD.Register(mem, a)
}

func (p *crookedPD) AllocMW() (rdma.MW, error) {
	if err := p.p.ask("allocate memory window"); err != nil {
		return nil, err
	}
	return p.PD.AllocMW()
}

func (c *crookedCQ) Poll(wcs []rdma.WC) (int, bool, error) {
	n, busy, err := c.CQ.Poll(wcs)
	c.p.mu.Lock()
	fn := c.p.poll
	c.p.mu.Unlock()
	if fn != nil && err == nil {
		out := fn(c.c.qid, wcs[:n])
		n = copy(wcs, out)
	}
	return n, busy, err
}

// --- helpers ---

func testConfig(f *fakeTarget, p rdma.Provider) Config {
	return Config{
		Provider: p, Addr: f.addr, SubNQN: fakeNQN, Queues: 2, Depth: 16, BufferMemory: 4 << 20,
		ReconnectDelay: 5 * time.Millisecond, ReconnectMaxDelay: 50 * time.Millisecond,
		ConnectTimeout: 20 * time.Second, LossTimeout: 2 * time.Minute,
		Logger: testLogger(f.t),
	}
}

// connect attaches the fake target and closes the session at the end.
func connect(t testing.TB, cfg Config) *Session {
	t.Helper()
	s, err := Connect(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, stop := context.WithTimeout(context.Background(), 60*time.Second)
		defer stop()
		s.Close(ctx)
	})
	return s
}

func device(t testing.TB, s *Session) *Device {
	t.Helper()
	d, err := s.Device(0)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// eventually waits for a condition that other goroutines bring about.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("timed out: %s", what)
		}
	}
}

func pattern(seed byte, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i)*7 + byte(i>>8)*3 + seed
	}
	return b
}
