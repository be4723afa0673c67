package target

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"rdblk/blockdev"
	"rdblk/blockdev/blockdevtest"
	"rdblk/protocol"
	"rdblk/rdma"
)

// private builds the private data of a connect request.
func private(qid, hrq, hsq uint16) []byte {
	b, _ := (&protocol.RDMAConnectRequest{QID: qid, HRQSIZE: hrq, HSQSIZE: hsq}).AppendBinary(nil)
	return b
}

func TestPrivateDataIsChecked(t *testing.T) {
	r := newRig(t, Config{MaxQueuesPerController: 4, QueueDepth: 64}, memDevice(t, 1<<20))
	badFormat := private(0, 32, 31)
	badFormat[0] = 1
	for _, c := range []struct {
		name  string
		data  []byte
		reads int
		want  protocol.RejectStatus // 0: accepted
	}{
		{"empty", []byte{}, 0, protocol.RejectInvalidLength},
		{"one byte", []byte{0}, 0, protocol.RejectInvalidLength},
		{"31 bytes", private(0, 32, 31)[:31], 0, protocol.RejectInvalidLength},
		{"32 bytes", private(0, 32, 31), 0, 0},
		{"padded", append(private(0, 32, 31), make([]byte, 24)...), 0, 0},
		{"record format", badFormat, 0, protocol.RejectInvalidRECFMT},
		{"QID at the limit", private(4, 32, 31), 0, 0},
		{"QID over the limit", private(5, 32, 31), 0, protocol.RejectInvalidQID},
		{"QID 0xffff", private(0xFFFF, 32, 31), 0, protocol.RejectInvalidQID},
		{"HSQSIZE 0", private(1, 32, 0), 0, protocol.RejectInvalidHSQSIZE},
		{"HSQSIZE at the limit", private(1, 64, 63), 0, 0},
		{"HSQSIZE over the limit", private(1, 65, 64), 0, protocol.RejectInvalidHSQSIZE},
		{"HSQSIZE 0xffff", private(1, 32, 0xFFFF), 0, protocol.RejectInvalidHSQSIZE},
		{"admin HSQSIZE at the limit", private(0, 128, adminDepth-1), 0, 0},
		{"admin HSQSIZE over the limit", private(0, 129, adminDepth), 0, protocol.RejectInvalidHSQSIZE},
		{"HRQSIZE 0", private(1, 0, 31), 0, protocol.RejectInvalidHRQSIZE},
		{"no reads served", private(1, 32, 31), -1, protocol.RejectInvalidIRD},
	} {
		t.Run(c.name, func(t *testing.T) {
			q, err := r.dial(1, dialOptions{private: c.data, reads: c.reads})
			if c.want == 0 {
				if err != nil {
					t.Fatal(err)
				}
				q.close()
				return
			}
			var rej *rdma.RejectError
			if !errors.As(err, &rej) {
				t.Fatalf("error %v, want a reject", err)
			}
			var d protocol.RDMAConnectReject
			if err := d.UnmarshalBinary(rej.PrivateData); err != nil || d.Status != c.want {
				t.Errorf("reject says %v (%v), want %v", d.Status, err, c.want)
			}
		})
	}
	// Nobody noticed: a good host is served.
	s := r.attach(sessionOptions{queues: 1})
	s.io[0].ok(s.io[0].rw(protocol.OpRead, 0, 4096, 0, 0))
}

func TestConnectIsChecked(t *testing.T) {
	allowed, stranger := newIdentity(), newIdentity()
	r := newRig(t, Config{Hosts: []string{allowed.nqn}, QueueDepth: 64}, memDevice(t, 1<<20))
	type change func(q *hostQueue, cmd *protocol.Command)
	data := func(off int, b ...byte) change {
		return func(q *hostQueue, _ *protocol.Command) { copy(q.data[off:], b) }
	}
	dword := func(i int, v uint32) change {
		return func(_ *hostQueue, cmd *protocol.Command) { cmd.SetDW(i, v) }
	}
	for _, c := range []struct {
		name   string
		who    identity
		change change
		want   protocol.Status
		dw0    uint32
	}{
		{"fine", allowed, func(*hostQueue, *protocol.Command) {}, 0, 0},
		{"fine without flow control", allowed, func(_ *hostQueue, c *protocol.Command) { c[46] = byte(protocol.ConnectDisableSQFlow) }, 0, 0},
		{"record format", allowed, func(_ *hostQueue, c *protocol.Command) { c.SetRECFMT(1) }, protocol.StatusConnectIncompatibleFormat | dnr, 0},
		{"static controller", allowed, data(16, 1, 0), protocol.StatusConnectInvalidParameters | dnr, 0x10010},
		{"CNTLID 0xFFFE", allowed, data(16, 0xFE, 0xFF), protocol.StatusConnectInvalidParameters | dnr, 0x10010},
		{"unknown subsystem", allowed, data(256, 'x'), protocol.StatusConnectInvalidParameters | dnr, 0x10100},
		{"empty subsystem", allowed, data(256, 0), protocol.StatusConnectInvalidParameters | dnr, 0x10100},
		{"unterminated subsystem", allowed, data(256, []byte(strings.Repeat("n", 256))...), protocol.StatusConnectInvalidParameters | dnr, 0x10100},
		{"subsystem in other case", allowed, data(256, 'N'), protocol.StatusConnectInvalidParameters | dnr, 0x10100},
		{"empty host", allowed, data(512, 0), protocol.StatusConnectInvalidParameters | dnr, 0x10200},
		{"unterminated host", allowed, data(512, []byte(strings.Repeat("h", 256))...), protocol.StatusConnectInvalidParameters | dnr, 0x10200},
		{"host not allowed", stranger, func(*hostQueue, *protocol.Command) {}, protocol.StatusConnectInvalidHost | dnr, 0x10200},
		{"QID of another connection", allowed, dword(10, 1<<16), protocol.StatusConnectInvalidParameters | dnr, 42},
		{"SQSIZE 0", allowed, dword(11, 0), protocol.StatusConnectInvalidParameters | dnr, 44},
		{"SQSIZE over HSQSIZE", allowed, dword(11, 32), protocol.StatusConnectInvalidParameters | dnr, 44},
		{"SQSIZE 0xffff", allowed, dword(11, 0xFFFF), protocol.StatusConnectInvalidParameters | dnr, 44},
		{"data too short", allowed, func(q *hostQueue, c *protocol.Command) { q.keyed(c, 0, 1020) }, protocol.StatusDataSGLLengthInvalid | dnr, 0},
		{"no data", allowed, func(_ *hostQueue, c *protocol.Command) { c.SetNoDataSGL() }, protocol.StatusDataSGLLengthInvalid | dnr, 0},
		{"all-zero data pointer", allowed, func(_ *hostQueue, c *protocol.Command) { *c.SGL() = protocol.SGL{} }, protocol.StatusInvalidField | dnr, 0},
		{"fused", allowed, func(_ *hostQueue, c *protocol.Command) { c.SetFlags(0x41) }, protocol.StatusInvalidField | dnr, 0},
		{"PRP", allowed, func(_ *hostQueue, c *protocol.Command) { c.SetFlags(0) }, protocol.StatusInvalidField | dnr, 0},
		{"not Connect", allowed, func(_ *hostQueue, c *protocol.Command) { c.InitPropertyGet(c.ID(), protocol.PropertyCAP) }, protocol.StatusCommandSequenceError | dnr, 0},
		{"admin command", allowed, func(_ *hostQueue, c *protocol.Command) { c.InitAdmin(protocol.AdminKeepAlive, c.ID(), 0) }, protocol.StatusCommandSequenceError | dnr, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			q := r.mustDial(0, 32)
			defer q.close()
			cmd := q.connectCommand(c.who, testNQN, protocol.CNTLIDDynamic, 0)
			c.change(q, cmd)
			a := q.want(c.want, cmd)
			if c.want != 0 && a.DW0() != c.dw0 {
				t.Errorf("DW0 %#x, want %#x", a.DW0(), c.dw0)
			}
			if c.want == 0 {
				if id := a.DW0(); id == 0 || id > maxCNTLID {
					t.Errorf("DW0 %#x", id)
				}
				if noflow := cmd.CATTR()&protocol.ConnectDisableSQFlow != 0; noflow != (a.SQHD() == protocol.SQHDNone) {
					t.Errorf("SQHD %#x", a.SQHD())
				}
				// Connected is connected.
				q.want(protocol.StatusCommandSequenceError|dnr, q.connectCommand(allowed, testNQN, protocol.CNTLIDDynamic, 0))
				return
			}
			// The queue takes another, correct Connect.
			q.ok(q.connectCommand(allowed, testNQN, protocol.CNTLIDDynamic, 0))
		})
	}
}

func TestConnectInCapsule(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	q := r.mustDial(0, 32)
	cmd := q.connectCommand(newIdentity(), testNQN, protocol.CNTLIDDynamic, 0)
	cmd.SetInCapsuleSGL(0, protocol.ConnectDataSize)
	q.ok(cmd, append([]byte(nil), q.data[:protocol.ConnectDataSize]...)...)
}

func TestIOConnectIsChecked(t *testing.T) {
	r := newRig(t, Config{QueueDepth: 64, MaxQueuesPerController: 8}, memDevice(t, 1<<20))
	s := r.attach(sessionOptions{queues: 1})
	other := r.attach(sessionOptions{})
	off := r.attach(sessionOptions{disable: true})
	const bad = protocol.StatusConnectInvalidParameters
	sameNQN := identity{nqn: s.who.nqn, id: protocol.RandomUUID()}
	for _, c := range []struct {
		name   string
		who    identity
		nqn    string
		cntlid uint16
		qid    uint16
		want   protocol.Status
		dw0    uint32
	}{
		{"duplicate QID", s.who, testNQN, s.cntlid, 1, protocol.StatusCommandSequenceError, 0},
		{"unknown controller", s.who, testNQN, 999, 2, bad, 0x10010},
		{"dynamic", s.who, testNQN, protocol.CNTLIDDynamic, 2, bad, 0x10010},
		{"another host's controller", s.who, testNQN, other.cntlid, 2, bad, 0x10010},
		{"another host ID", sameNQN, testNQN, s.cntlid, 2, bad | dnr, 0x10000},
		{"controller not enabled", off.who, testNQN, off.cntlid, 2, bad, 42},
		{"discovery", s.who, protocol.DiscoveryNQN, s.cntlid, 2, bad | dnr, 42},
		{"unknown subsystem", s.who, "nqn.2020-01.io.example:none", s.cntlid, 2, bad | dnr, 0x10100},
	} {
		t.Run(c.name, func(t *testing.T) {
			q := r.mustDial(c.qid, 32)
			defer q.close()
			a := q.want(c.want, q.connectCommand(c.who, c.nqn, c.cntlid, 0))
			if a.DW0() != c.dw0 {
				t.Errorf("DW0 %#x, want %#x", a.DW0(), c.dw0)
			}
			q.want(protocol.StatusCommandSequenceError|dnr, q.rw(protocol.OpRead, 0, 512, 0, 0))
		})
	}
	q := s.addQueue(8, 64)
	q.ok(q.rw(protocol.OpRead, 0, 512, 0, 0))
	// After the reset of the controller its queues are gone and none is taken.
	s.setCC(protocol.CCDefault)
	eventually(t, "reset", func() bool { return !s.csts().RDY() })
	late := r.mustDial(2, 32)
	late.want(bad, late.connectCommand(s.who, testNQN, s.cntlid, 0))
	if err := s.io[0].awaitEnd(); err == nil {
		t.Error("I/O queue survives the reset")
	}
	s.setCC(protocol.CCDefault.WithEN(true))
	eventually(t, "ready", func() bool { return s.csts().RDY() })
	late.ok(late.connectCommand(s.who, testNQN, s.cntlid, 0))
	late.ok(late.rw(protocol.OpRead, 0, 512, 0, 0))
}

func TestCommandsBeforeEnable(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	s := r.attach(sessionOptions{disable: true, kato: 5000})
	var cmd protocol.Command
	cmd.InitIdentify(s.admin.cid(), protocol.CNSController, 0)
	s.admin.keyed(&cmd, 0, 4096)
	s.admin.want(protocol.StatusCommandSequenceError|dnr, &cmd)
	cmd.InitAdmin(protocol.AdminKeepAlive, s.admin.cid(), 0)
	s.admin.ok(&cmd)
	s.enable()
	s.identify(protocol.CNSController, 0)
}

func TestProperties(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	s := r.attach(sessionOptions{disable: true})
	if got := s.get(protocol.PropertyCAP); got != 0x000000201E01007F {
		t.Errorf("CAP %#x", got)
	}
	if got := s.get(protocol.PropertyVS); got != uint64(protocol.Version1_4) {
		t.Errorf("VS %#x", got)
	}
	// CC reads back what was written, odd bits too.
	for _, v := range []uint64{0x00460000, 0x80460002 &^ 1, 0x01460000} {
		s.setCC(protocol.CC(v))
		if got := s.get(protocol.PropertyCC); got != v {
			t.Errorf("CC %#x, wrote %#x", got, v)
		}
		if c := s.csts(); c.RDY() || c.CFS() {
			t.Errorf("CSTS %#x with EN 0", uint32(c))
		}
	}
	for _, v := range []protocol.CC{0x00450001, 0x00360001, 0x00460081, 0x00460801, 0x00460011} { // IOSQES, IOCQES, MPS, AMS, CSS
		s.setCC(v)
		if c := s.csts(); c.RDY() || !c.CFS() {
			t.Errorf("CC %#x: CSTS %#x, want CFS", uint32(v), uint32(c))
		}
		s.setCC(protocol.CCDefault)
	}
	s.enable()
	bad := func(change func(c *protocol.Command)) {
		t.Helper()
		var c protocol.Command
		c.InitPropertyGet(s.admin.cid(), protocol.PropertyCAP)
		change(&c)
		s.admin.want(protocol.StatusInvalidField|dnr, &c)
	}
	bad(func(c *protocol.Command) { c[40] = 0 })                                                    // 4 bytes of CAP
	bad(func(c *protocol.Command) { c.InitPropertyGet(c.ID(), protocol.PropertyCC); c[40] = 1 })    // 8 of CC
	bad(func(c *protocol.Command) { c.InitPropertyGet(c.ID(), protocol.PropertyCRTO) })             // not there
	bad(func(c *protocol.Command) { c.InitPropertyGet(c.ID(), protocol.Property(0xFFFFFFFC)) })     // nor there
	bad(func(c *protocol.Command) { c.InitPropertySet(c.ID(), protocol.PropertyCSTS, 1) })          // read-only
	bad(func(c *protocol.Command) { c.InitPropertySet(c.ID(), protocol.PropertyCC, 1); c[40] = 1 }) // size
}

func TestShutdownNotificationFlushes(t *testing.T) {
	dev := blockdevtest.Delayed(cached{memDevice(t, 1<<20).(blockdev.TryDevice)})
	r := newRig(t, Config{}, dev)
	s := r.attach(sessionOptions{queues: 1})
	gate := dev.Hold(blockdevtest.Match{Ops: []blockdev.Op{blockdev.OpFlush}})
	s.io[0].close()
	s.setCC(protocol.CCDefault.WithEN(true).WithSHN(protocol.SHNNormal))
	gate.Await(t, 1)
	if c := s.csts(); c.SHST() != protocol.SHSTInProgress {
		t.Fatalf("CSTS %#x while the flush runs", uint32(c))
	}
	gate.Open()
	eventually(t, "shutdown complete", func() bool { return s.csts().SHST() == protocol.SHSTComplete })
	// A host that comes back enables anew.
	s.setCC(protocol.CCDefault)
	s.enable()
	if c := s.csts(); c.SHST() != protocol.SHSTNone {
		t.Errorf("CSTS %#x after enabling again", uint32(c))
	}
}

// One device whose flush hangs does not keep the others' data from the medium.
func TestShutdownFlushesAllAtOnce(t *testing.T) {
	a, b := blockdevtest.Delayed(cached{memDevice(t, 1<<20).(blockdev.TryDevice)}), blockdevtest.Delayed(cached{memDevice(t, 1<<20).(blockdev.TryDevice)})
	r := newRig(t, Config{}, a, b)
	s := r.attach(sessionOptions{})
	gates := []*blockdevtest.Gate{hold(a, blockdev.OpFlush), hold(b, blockdev.OpFlush)}
	s.setCC(protocol.CCDefault.WithEN(true).WithSHN(protocol.SHNNormal))
	for _, g := range gates {
		g.Await(t, 1)
	}
	gates[1].Open()
	if c := s.csts(); c.SHST() != protocol.SHSTInProgress {
		t.Errorf("CSTS %#x while a flush runs", uint32(c))
	}
	gates[0].Open()
	eventually(t, "shutdown complete", func() bool { return s.csts().SHST() == protocol.SHSTComplete })
}

func TestShutdownNotificationWithFailedFlush(t *testing.T) {
	dev := blockdevtest.Faulty(cached{memDevice(t, 1<<20).(blockdev.TryDevice)},
		blockdevtest.Rule{Match: blockdevtest.Match{Ops: []blockdev.Op{blockdev.OpFlush}}, Err: errors.New("gone")})
	r := newRig(t, Config{}, dev)
	s := r.attach(sessionOptions{})
	s.setCC(protocol.CCDefault.WithEN(true).WithSHN(protocol.SHNNormal))
	eventually(t, "fatal status", func() bool { return s.csts().CFS() })
	if c := s.csts(); c.SHST() == protocol.SHSTComplete {
		t.Errorf("CSTS %#x: complete although the flush failed", uint32(c))
	}
}

func TestDisconnectCommand(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	s := r.attach(sessionOptions{queues: 2})
	var cmd protocol.Command
	cmd.InitDisconnect(s.admin.cid())
	s.admin.want(statusInvalidQueueType|dnr, &cmd)
	cmd.InitDisconnect(s.io[0].cid())
	cmd.SetRECFMT(1)
	s.io[0].want(protocol.StatusConnectIncompatibleFormat|dnr, &cmd)
	cmd.InitDisconnect(s.io[0].cid())
	s.io[0].ok(&cmd)
	s.io[0].awaitEnd()
	s.io[1].ok(s.io[1].rw(protocol.OpRead, 0, 512, 0, 0))
	eventually(t, "QID free", func() bool {
		q := r.mustDial(1, 32)
		a := q.do(q.connectCommand(s.who, testNQN, s.cntlid, 0))
		if a.Status().OK() {
			q.ok(q.rw(protocol.OpRead, 0, 512, 0, 0))
			return true
		}
		q.close()
		return false
	})
}

func TestControllerLimitAndIDs(t *testing.T) {
	r := newRig(t, Config{MaxControllers: 3}, memDevice(t, 1<<20))
	var list []*session
	seen := map[uint16]bool{}
	for range 3 {
		s := r.attach(sessionOptions{})
		if seen[s.cntlid] {
			t.Fatalf("controller ID %d twice", s.cntlid)
		}
		seen[s.cntlid] = true
		list = append(list, s)
	}
	q := r.mustDial(0, 32)
	q.want(protocol.StatusConnectControllerBusy, q.connectCommand(newIdentity(), testNQN, protocol.CNTLIDDynamic, 0))
	list[0].close()
	eventually(t, "room", func() bool { return r.tgt.Stats().Controllers == 2 })
	a := q.ok(q.connectCommand(newIdentity(), testNQN, protocol.CNTLIDDynamic, 0))
	if seen[uint16(a.DW0())] {
		t.Errorf("controller ID %d is used again at once", a.DW0())
	}
}

func TestConnectionLimit(t *testing.T) {
	r := newRig(t, Config{MaxQueues: 4}, memDevice(t, 1<<20))
	s := r.attach(sessionOptions{queues: 3})
	_, err := r.dial(0, dialOptions{})
	var rej *rdma.RejectError
	if !errors.As(err, &rej) {
		t.Fatalf("error %v, want a reject", err)
	}
	var d protocol.RDMAConnectReject
	if d.UnmarshalBinary(rej.PrivateData); d.Status != protocol.RejectNoResources {
		t.Errorf("reject says %v", d.Status)
	}
	if n := r.tgt.Stats().Rejected[protocol.RejectNoResources.String()]; n != 1 {
		t.Errorf("%d rejects counted", n)
	}
	s.io[0].ok(s.io[0].rw(protocol.OpRead, 0, 512, 0, 0))
}

// Connections that never send Connect must not keep others out: the oldest goes.
func TestUnconnectedQueuesMakeRoom(t *testing.T) {
	r := newRig(t, Config{MaxPending: 3}, memDevice(t, 1<<20))
	var idle []*hostQueue
	for range 3 {
		idle = append(idle, r.mustDial(1, 32))
	}
	s := r.attach(sessionOptions{queues: 1})
	idle[0].awaitEnd()
	s.io[0].ok(s.io[0].rw(protocol.OpRead, 0, 512, 0, 0))
	if n := r.tgt.Stats().Pending; n > 3 {
		t.Errorf("%d connections without Connect, the limit is 3", n)
	}
}

func TestConnectTimeout(t *testing.T) {
	clock := newFakeClock()
	r := newRig(t, Config{clock: clock}, memDevice(t, 1<<20))
	idle := r.mustDial(0, 32)
	refused := r.mustDial(0, 32)
	refused.want(protocol.StatusConnectInvalidParameters|dnr, refused.connectCommand(newIdentity(), "nqn.2020-01.io.example:none", protocol.CNTLIDDynamic, 0))
	live := r.attach(sessionOptions{kato: 120_000})
	clock.Advance(31 * time.Second)
	idle.awaitEnd()
	refused.awaitEnd()
	live.identify(protocol.CNSController, 0)
}

// A stranger that opens TCP connections and says nothing, or the wrong thing, is
// the provider's affair, but it must not keep a host from being served.
func TestStrangersOnThePort(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	for i := range 50 {
		c, err := net.Dial("tcp", r.addr.String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if i%2 == 0 {
			fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		}
	}
	s := r.attach(sessionOptions{queues: 1})
	s.io[0].ok(s.io[0].rw(protocol.OpRead, 0, 4096, 0, 0))
}

func TestAllowListChanges(t *testing.T) {
	a, b := newIdentity(), newIdentity()
	r := newRig(t, Config{Hosts: []string{a.nqn}}, memDevice(t, 1<<20))
	s := r.attach(sessionOptions{who: a, queues: 1})
	q := r.mustDial(0, 32)
	q.want(protocol.StatusConnectInvalidHost|dnr, q.connectCommand(b, testNQN, protocol.CNTLIDDynamic, 0))
	if err := r.tgt.SetHosts([]string{b.nqn}, false); err != nil {
		t.Fatal(err)
	}
	s.admin.awaitEnd()
	s.io[0].awaitEnd()
	q.ok(q.connectCommand(b, testNQN, protocol.CNTLIDDynamic, 0))
	if hosts, anyHost := r.tgt.Hosts(); anyHost || len(hosts) != 1 || hosts[0] != b.nqn {
		t.Errorf("Hosts: %v %v", hosts, anyHost)
	}
	if err := r.tgt.SetHosts([]string{""}, false); err == nil {
		t.Error("an empty host NQN is taken")
	}
}
