package protocol

import (
	"bytes"
	"slices"
	"strings"
	"testing"
)

// goldenCommand is a command of the golden files, how it is built, what its
// accessors say and how it is described.
type goldenCommand struct {
	name     string
	admin    bool
	build    func(c *Command)
	check    func(c *Command) bool
	dir      Direction
	describe string
}

var goldenCommands = []goldenCommand{
	{
		name:  "connect, admin queue",
		admin: true,
		build: func(c *Command) {
			c.InitConnect(0, 0, 31, 5000, 0)
			c.SetKeyedSGL(0x7f1200345000, 1024, 0x0012abcd, true)
		},
		check: func(c *Command) bool {
			return c.IsFabrics() && c.FabricsType() == FabricsConnect && c.RECFMT() == 0 && c.QID() == 0 &&
				c.SQSIZE() == 31 && c.KATO() == 5000 && c.CATTR() == 0
		},
		dir: HostToController,
		describe: "Fabrics Connect cid=0x0 qid=0 sqsize=31 kato=5000" +
			" sgl=keyed addr=0x7f1200345000 len=1024 key=0x12abcd invalidate",
	},
	{
		name:  "property get CAP",
		admin: true,
		build: func(c *Command) { c.InitPropertyGet(1, PropertyCAP) },
		check: func(c *Command) bool {
			return c.FabricsType() == FabricsPropertyGet && c.Property() == PropertyCAP && c.PropertySize() == 8 && c.ID() == 1
		},
		dir:      NoData,
		describe: `Fabrics Property Get cid=0x1 property="CAP" size=8`,
	},
	{
		name:  "property set CC",
		admin: true,
		build: func(c *Command) { c.InitPropertySet(2, PropertyCC, uint64(CCDefault.WithEN(true))) },
		check: func(c *Command) bool {
			return c.FabricsType() == FabricsPropertySet && c.Property() == PropertyCC && c.PropertySize() == 4 &&
				c.PropertyValue() == 0x00460001
		},
		dir:      NoData,
		describe: `Fabrics Property Set cid=0x2 property="CC" size=4 value=0x460001`,
	},
	{
		name: "read",
		build: func(c *Command) {
			c.InitRW(OpRead, 0x1005, 1, 0x12345678, 8, 0)
			c.SetKeyedSGL(0x7f1200346000, 4096, 0x00089f01, true)
		},
		check: func(c *Command) bool {
			return c.Opcode() == OpRead && c.ID() == 0x1005 && c.NSID() == 1 && c.SLBA() == 0x12345678 &&
				c.NLB() == 7 && c.Blocks() == 8 && !c.FUA() && c.Control() == 0
		},
		dir: ControllerToHost,
		describe: "Read cid=0x1005 nsid=1 slba=305419896 blocks=8" +
			" sgl=keyed addr=0x7f1200346000 len=4096 key=0x89f01 invalidate",
	},
	{
		name: "write, FUA, in capsule",
		build: func(c *Command) {
			c.InitRW(OpWrite, 0x2006, 1, 0x10, 8, ControlFUA)
			c.SetInCapsuleSGL(0, 4096)
		},
		check: func(c *Command) bool {
			return c.Opcode() == OpWrite && c.SLBA() == 0x10 && c.FUA() && !c.LR() && !c.DEAC() && c.PRINFO() == 0 &&
				c.DTYPE() == 0 && c.DSM() == 0
		},
		dir:      HostToController,
		describe: "Write cid=0x2006 nsid=1 slba=16 blocks=8 fua sgl=in-capsule offset=0 len=4096",
	},
	{
		name:     "flush",
		build:    func(c *Command) { c.Init(OpFlush, 1, 1) },
		check:    func(c *Command) bool { return c.Opcode() == OpFlush && c.NSID() == 1 },
		dir:      NoData,
		describe: "Flush cid=0x1 nsid=1",
	},
	{
		name: "compare",
		build: func(c *Command) {
			c.InitRW(OpCompare, 0x1234, 2, 0xffffffffffffff, 1, ControlPRACT)
			c.SetKeyedSGL(0x100000000, 512, 0x12345678, false)
		},
		check: func(c *Command) bool { return c.SLBA() == 1<<56-1 && c.Blocks() == 1 && c.PRINFO() == ControlPRACT },
		dir:   HostToController,
		describe: "Compare cid=0x1234 nsid=2 slba=72057594037927935 blocks=1 prinfo=0x8" +
			" sgl=keyed addr=0x100000000 len=512 key=0x12345678",
	},
	{
		name: "write zeroes",
		build: func(c *Command) {
			c.InitRW(OpWriteZeroes, 3, 1, 1<<32, MaxBlocks, 0)
			c.SetDEAC(true)
			c.SetFUA(true)
		},
		check:    func(c *Command) bool { return c.Blocks() == 65536 && c.NLB() == 0xffff && c.DEAC() && c.FUA() },
		dir:      NoData,
		describe: "Write Zeroes cid=0x3 nsid=1 slba=4294967296 blocks=65536 fua deac",
	},
	{
		name: "dataset management",
		build: func(c *Command) {
			c.InitDSM(4, 1, 2, DSMDeallocate)
			c.SetKeyedSGL(0x1000, 4096, 0x11223344, true)
		},
		check: func(c *Command) bool { return c.DSMRangeCount() == 2 && c.DSMAttributes() == DSMDeallocate },
		dir:   HostToController,
		describe: "Dataset Management cid=0x4 nsid=1 ranges=2 ad" +
			" sgl=keyed addr=0x1000 len=4096 key=0x11223344 invalidate",
	},
	{
		name:  "identify",
		admin: true,
		build: func(c *Command) {
			c.InitIdentify(0x102, CNSNamespaceDescriptors, 5)
			c.SetCNTID(0x708)
			c.SetIdentifyCSI(CSIZNS)
			c.SetKeyedSGL(0x1000, IdentifySize, 0x11223344, true)
		},
		check: func(c *Command) bool {
			return c.AdminOpcode() == AdminIdentify && c.CNS() == CNSNamespaceDescriptors && c.CNTID() == 0x708 &&
				c.CNSSID() == 0 && c.IdentifyCSI() == CSIZNS && c.NSID() == 5
		},
		dir: ControllerToHost,
		describe: `Identify cid=0x102 nsid=5 cns="namespace identification descriptors" cntid=1800 csi=2` +
			" sgl=keyed addr=0x1000 len=4096 key=0x11223344 invalidate",
	},
	{
		name:  "set features, number of queues",
		admin: true,
		build: func(c *Command) {
			c.InitSetFeatures(5, FeatureNumberOfQueues, 0, uint32(NewQueueCount(8, 4)))
			c.SetSV(true)
		},
		check: func(c *Command) bool {
			q := QueueCount(c.FeatureValue())
			return c.FID() == FeatureNumberOfQueues && c.SV() && q.SQ() == 8 && q.CQ() == 4 && q.Pairs() == 4
		},
		dir:      HostToController, // by opcode; the SGL says there is none
		describe: `Set Features cid=0x5 fid="Number of Queues" value=0x30007 sv`,
	},
	{
		name:     "get features, keep alive timer",
		admin:    true,
		build:    func(c *Command) { c.InitGetFeatures(6, FeatureKeepAliveTimer, SelectSupported, 0) },
		check:    func(c *Command) bool { return c.FID() == FeatureKeepAliveTimer && c.SEL() == SelectSupported },
		dir:      ControllerToHost,
		describe: `Get Features cid=0x6 fid="Keep Alive Timer" sel="supported capabilities"`,
	},
	{
		name:  "get log page, discovery",
		admin: true,
		build: func(c *Command) {
			c.InitGetLogPage(7, LogDiscovery, 0, 1024, 4096, true)
			c.SetKeyedSGL(0x2000, 4096, 1, false)
		},
		check: func(c *Command) bool {
			return c.LID() == LogDiscovery && c.RAE() && c.LSP() == 0 && c.NUMD() == 1023 && c.LogLength() == 4096 && c.LPO() == 1024
		},
		dir: ControllerToHost,
		describe: `Get Log Page cid=0x7 lid="Discovery" lpo=1024 bytes=4096 rae` +
			" sgl=keyed addr=0x2000 len=4096 key=0x1",
	},
	{
		name:  "get log page, effects, all fields",
		admin: true,
		build: func(c *Command) {
			c.InitGetLogPage(8, LogEffects, NSIDAll, 0x0102030405060708, 0x80000000, true)
			c.SetLSP(10)
			c.SetLSI(0x1234)
			c.SetLogCSI(CSIZNS)
			c[56], c[58] = 1, 0x80 // UUID index and OT, which no host of ours sends
		},
		check: func(c *Command) bool {
			return c.LID() == LogEffects && c.RAE() && c.LSP() == 10 && c.LogLength() == 1<<31 && c.LSI() == 0x1234 &&
				c.LPO() == 0x0102030405060708 && c.UUIDIndex() == 1 && c.OT() && c.LogCSI() == CSIZNS && c.NSID() == NSIDAll
		},
		dir: ControllerToHost,
		describe: `Get Log Page cid=0x8 nsid=all lid="Commands Supported and Effects" lpo=72623859790382856` +
			" bytes=2147483648 lsp=10 lsi=4660 csi=2 ot rae",
	},
	{
		name:     "abort",
		admin:    true,
		build:    func(c *Command) { c.InitAbort(9, 3, 0x1005) },
		check:    func(c *Command) bool { return c.AbortSQID() == 3 && c.AbortCID() == 0x1005 },
		dir:      NoData,
		describe: "Abort cid=0x9 sqid=3 abort-cid=0x1005",
	},
	{
		name:     "asynchronous event request",
		admin:    true,
		build:    func(c *Command) { c.InitAdmin(AdminAsyncEventRequest, 31, 0) },
		check:    func(c *Command) bool { return c.AdminOpcode() == AdminAsyncEventRequest },
		dir:      NoData,
		describe: "Asynchronous Event Request cid=0x1f",
	},
	{
		name:     "keep alive",
		admin:    true,
		build:    func(c *Command) { c.InitAdmin(AdminKeepAlive, 10, 0) },
		check:    func(c *Command) bool { return c.AdminOpcode() == AdminKeepAlive },
		dir:      NoData,
		describe: "Keep Alive cid=0xa",
	},
	{
		name: "connect, queue 3, in capsule",
		build: func(c *Command) {
			c.InitConnect(11, 3, 127, 0, ConnectDisableSQFlow|ConnectIndividualIOQueue)
			c.SetInCapsuleSGL(0, ConnectDataSize)
		},
		check: func(c *Command) bool {
			return c.QID() == 3 && c.SQSIZE() == 127 && c.CATTR()&ConnectDisableSQFlow != 0 && c.KATO() == 0
		},
		dir:      HostToController,
		describe: "Fabrics Connect cid=0xb qid=3 sqsize=127 kato=0 cattr=0xc sgl=in-capsule offset=0 len=1024",
	},
	{
		name: "authentication send",
		build: func(c *Command) {
			c.InitFabrics(FabricsAuthSend, 12)
			c[41], c[42], c[43] = 1, 1, 0xe9
			c.SetDW(11, 72)
			c.SetKeyedSGL(0, 72, 2, true)
		},
		check: func(c *Command) bool {
			a, b, p := c.AuthProtocol()
			return c.AuthTransferLength() == 72 && a == 1 && b == 1 && p == 0xe9
		},
		dir:      HostToController,
		describe: "Fabrics Authentication Send cid=0xc length=72 sgl=keyed addr=0x0 len=72 key=0x2 invalidate",
	},
	{
		name:     "disconnect",
		build:    func(c *Command) { c.InitDisconnect(13) },
		check:    func(c *Command) bool { return c.FabricsType() == FabricsDisconnect && c.RECFMT() == 0 },
		dir:      NoData,
		describe: "Fabrics Disconnect cid=0xd",
	},
}

func TestGoldenCommands(t *testing.T) {
	records := readGolden(t, "worked-examples.hex")
	for name, b := range readGolden(t, "commands.hex") {
		records[name] = b
	}
	seen := map[string]bool{}
	for _, g := range goldenCommands {
		seen[g.name] = true
		t.Run(g.name, func(t *testing.T) {
			want := records[g.name]
			if len(want) != CommandSize {
				t.Fatalf("golden record has %d bytes", len(want))
			}
			c := Command(bytes.Repeat([]byte{0xEE}, CommandSize)) // Init must clear it
			g.build(&c)
			same(t, "built", c[:], want)
			v, ok := CommandView(want)
			if !ok {
				t.Fatal("no view")
			}
			if !g.check(v) {
				t.Errorf("accessors disagree with %x", want)
			}
			if v.Direction() != g.dir {
				t.Errorf("direction %v, want %v", v.Direction(), g.dir)
			}
			if v.CheckFlags() != StatusSuccess {
				t.Errorf("flags: %v", v.CheckFlags())
			}
			if got := Describe(v, g.admin); got != g.describe {
				t.Errorf("described as\n     %s\nwant %s", got, g.describe)
			}
		})
	}
	for name := range records {
		if !seen[name] && !strings.Contains(name, "completion") && !strings.Contains(name, "rdma connect") {
			t.Errorf("golden record %q is not tested", name)
		}
	}
}

func TestGoldenCompletions(t *testing.T) {
	records := readGolden(t, "worked-examples.hex")

	want := records["completion, connect"]
	var e Completion
	e.Init(0, StatusSuccess)
	e.SetDW0(1)
	e.SetSQHD(1)
	same(t, "connect", e[:], want)
	v, ok := CompletionView(want)
	if !ok || !v.Status().OK() || ConnectResult(v.DW0()).CNTLID() != 1 || v.SQHD() != 1 || v.ID() != 0 {
		t.Errorf("connect: accessors disagree with %x", want)
	}
	var connect Command
	connect.InitConnect(0, 0, 31, 0, 0)
	if got, want := DescribeCompletion(v, &connect, true), `Completion cid=0x0 sqhd=1 status="success" cntlid=1`; got != want {
		t.Errorf("connect described as %s, want %s", got, want)
	}

	want = records["completion, invalid field, do not retry"]
	e.Init(0x1005, StatusInvalidField.WithDNR())
	e.SetSQHD(9)
	e.SetSQID(1)
	same(t, "invalid field", e[:], want)
	v, _ = CompletionView(want)
	if v.Status() != 0x4002 || v.SQHD() != 9 || v.SQID() != 1 || v.ID() != 0x1005 || v.Phase() || v.Result() != 0 {
		t.Errorf("invalid field: accessors disagree with %x", want)
	}
	if got, want := DescribeCompletion(v, nil, false), `Completion cid=0x1005 sqhd=9 status="invalid field in command (0x2, do not retry)"`; got != want {
		t.Errorf("invalid field described as %s, want %s", got, want)
	}
}

func TestDescribeCompletion(t *testing.T) {
	var connect, get, setCC, aer, abort, set, read Command
	connect.InitConnect(0, 0, 31, 0, 0)
	get.InitPropertyGet(0, PropertyCAP)
	setCC.InitPropertySet(0, PropertyCC, 1)
	aer.InitAdmin(AdminAsyncEventRequest, 0, 0)
	abort.InitAbort(0, 1, 2)
	set.InitSetFeatures(0, FeatureNumberOfQueues, 0, 0)
	read.InitRW(OpRead, 0, 1, 0, 1, 0)
	for _, tc := range []struct {
		name   string
		c      *Command
		admin  bool
		status Status
		result uint64
		want   string
	}{
		{"bad parameter", &connect, true, StatusConnectInvalidParameters.WithDNR(), uint64(ConnectInvalidSUBNQN),
			`status="connect invalid parameters (0x182, do not retry)" invalid="SUBNQN"`},
		{"authentication", &connect, true, StatusSuccess, uint64(ConnectATR | 7), `status="success" cntlid=7 auth-required`},
		{"property", &get, true, StatusSuccess, 0x201E01007F, `status="success" value=0x201e01007f`},
		{"property set with a result", &setCC, true, StatusSuccess, 3, `status="success" result=0x3`},
		{"event", &aer, true, StatusSuccess, uint64(EventNamespaceChanged), `status="success" event="namespace attribute changed"`},
		{"not aborted", &abort, true, StatusSuccess, 1, `status="success" not-aborted`},
		{"aborted", &abort, true, StatusSuccess, 0, `status="success"`},
		{"queues", &set, true, StatusSuccess, 0x30003, `status="success" result=0x30003`},
		{"read only range", &read, false, StatusWriteToReadOnlyRange | StatusMore, 0,
			`status="attempted write to read only range (0x182)" more`},
		{"unknown command", nil, false, StatusConnectControllerBusy, 5,
			`status="invalid protection information or connect controller busy (0x181)" result=0x5`},
	} {
		var e Completion
		e.Init(0, tc.status)
		e.SetResult(tc.result)
		if got, want := DescribeCompletion(&e, tc.c, tc.admin), "Completion cid=0x0 sqhd=0 "+tc.want; got != want {
			t.Errorf("%s: described as\n     %s\nwant %s", tc.name, got, want)
		}
	}
}

func TestDescribeOddCommands(t *testing.T) {
	var c Command
	for _, tc := range []struct {
		name  string
		build func()
		admin bool
		want  string
	}{
		{"unknown I/O", func() { c.Init(0x90, 1, NSIDAll); c.SetDW(12, 7) }, false, "Opcode(0x90) cid=0x1 nsid=all cdw12=0x7"},
		{"unknown admin", func() { c.InitAdmin(0xC0, 1, 0); c.SetDW(15, 1) }, true, "AdminOpcode(0xc0) cid=0x1 cdw15=0x1"},
		{"unknown fabrics", func() { c.InitFabrics(0x20, 1) }, true, "Fabrics FabricsType(0x20) cid=0x1"},
		{"all zero", func() { c = Command{} }, false, `Flush cid=0x0 sgl=in-capsule offset=0 len=0 subtype=0 flags=0x0`},
		{"fused", func() { c.Init(OpFlush, 0, 1); c.SetFlags(0x41) }, false, "Flush cid=0x0 nsid=1 flags=0x41"},
		{"DEAC where it is none", func() { c.InitRW(OpWrite, 0, 1, 0, 1, ControlDEAC) }, false, "Write cid=0x0 nsid=1 slba=0 blocks=1"},
		{"last segment", func() { c.Init(OpWrite, 0, 1); c.SGL()[15] = 0x31; c.SGL()[8] = 32 }, false,
			`Write cid=0x0 nsid=1 slba=0 blocks=1 sgl="last segment" len=32`},
		{"keyed subtype", func() { c.Init(OpFlush, 0, 1); c.SGL()[15] = 0x43 }, false,
			"Flush cid=0x0 nsid=1 sgl=keyed addr=0x0 len=0 key=0x0 subtype=3"},
		{"record formats", func() { c.InitDisconnect(0); c.SetRECFMT(1) }, false, "Fabrics Disconnect cid=0x0 recfmt=1"},
	} {
		tc.build()
		if got := Describe(&c, tc.admin); got != tc.want {
			t.Errorf("%s: described as\n     %s\nwant %s", tc.name, got, tc.want)
		}
	}
}

// TestCommandFields sets each field alone and reads it back: no setter touches
// another field, and no field is cut.
func TestCommandFields(t *testing.T) {
	for _, f := range []struct {
		name string
		set  func(*Command)
		want map[int]byte // bytes that are not zero afterwards
		ok   func(*Command) bool
	}{
		{"opcode", func(c *Command) { c.SetOpcode(0xA5) }, map[int]byte{0: 0xA5}, func(c *Command) bool { return c.Opcode() == 0xA5 }},
		{"admin opcode", func(c *Command) { c.SetAdminOpcode(0xA5) }, map[int]byte{0: 0xA5}, func(c *Command) bool { return c.AdminOpcode() == 0xA5 }},
		{"flags", func(c *Command) { c.SetFlags(0xC2) }, map[int]byte{1: 0xC2}, func(c *Command) bool { return c.Flags() == 0xC2 && c.Fuse() == 2 && c.PSDT() == 3 }},
		{"cid", func(c *Command) { c.SetID(0x0102) }, map[int]byte{2: 2, 3: 1}, func(c *Command) bool { return c.ID() == 0x0102 }},
		{"nsid", func(c *Command) { c.SetNSID(0x01020304) }, map[int]byte{4: 4, 5: 3, 6: 2, 7: 1}, func(c *Command) bool { return c.NSID() == 0x01020304 }},
		{"fctype", func(c *Command) { c.SetFabricsType(8) }, map[int]byte{4: 8}, func(c *Command) bool { return c.FabricsType() == 8 }},
		{"slba", func(c *Command) { c.SetSLBA(0x0102030405060708) },
			map[int]byte{40: 8, 41: 7, 42: 6, 43: 5, 44: 4, 45: 3, 46: 2, 47: 1}, func(c *Command) bool { return c.SLBA() == 0x0102030405060708 }},
		{"blocks", func(c *Command) { c.SetBlocks(0x0304) }, map[int]byte{48: 3, 49: 3}, func(c *Command) bool { return c.Blocks() == 0x0304 && c.NLB() == 0x0303 }},
		{"control", func(c *Command) { c.SetControl(0xFF50) }, map[int]byte{50: 0x50, 51: 0xFF},
			func(c *Command) bool { return c.LR() && c.FUA() && c.DEAC() && c.DTYPE() == 5 && c.PRINFO() == 0x3C00 }},
		{"fua", func(c *Command) { c.SetFUA(true) }, map[int]byte{51: 0x40}, func(c *Command) bool { return c.Control() == ControlFUA }},
		{"deac", func(c *Command) { c.SetDEAC(true) }, map[int]byte{51: 0x02}, func(c *Command) bool { return c.Control() == ControlDEAC }},
		{"tags", func(c *Command) { c.SetDW(13, 0xAB); c.SetDW(14, 0x01020304); c.SetDW(15, 0x05060708) },
			map[int]byte{52: 0xAB, 56: 4, 57: 3, 58: 2, 59: 1, 60: 8, 61: 7, 62: 6, 63: 5},
			func(c *Command) bool {
				tag, mask := c.ApplicationTag()
				return c.DSM() == 0xAB && c.ReferenceTag() == 0x01020304 && tag == 0x0708 && mask == 0x0506
			}},
		{"mptr", func(c *Command) { c.SetDW(4, 1); c.SetDW(5, 2) }, map[int]byte{16: 1, 20: 2}, func(c *Command) bool { return c.MPTR() == 2<<32|1 }},
		{"cns", func(c *Command) { c.SetCNS(8) }, map[int]byte{40: 8}, func(c *Command) bool { return c.CNS() == 8 }},
		{"cnssid", func(c *Command) { c.SetDW(11, 0x0506) }, map[int]byte{44: 6, 45: 5}, func(c *Command) bool { return c.CNSSID() == 0x0506 }},
		{"fid", func(c *Command) { c.SetFID(0x81) }, map[int]byte{40: 0x81}, func(c *Command) bool { return c.FID() == 0x81 }},
		{"sel", func(c *Command) { c[41] = 0xF8; c.SetSEL(3) }, map[int]byte{41: 0xFB}, func(c *Command) bool { return c.SEL() == 3 }},
		{"sv off", func(c *Command) { c[43] = 0xFF; c.SetSV(false) }, map[int]byte{43: 0x7F}, func(c *Command) bool { return !c.SV() }},
		{"value", func(c *Command) { c.SetFeatureValue(0x01020304) }, map[int]byte{44: 4, 45: 3, 46: 2, 47: 1}, func(c *Command) bool { return c.FeatureValue() == 0x01020304 }},
		{"lid", func(c *Command) { c.SetLID(0x70) }, map[int]byte{40: 0x70}, func(c *Command) bool { return c.LID() == 0x70 }},
		{"lsp", func(c *Command) { c.SetRAE(true); c.SetLSP(0x7F); c.SetRAE(false) }, map[int]byte{41: 0x7F}, func(c *Command) bool { return c.LSP() == 0x7F && !c.RAE() }},
		{"lsp keeps rae", func(c *Command) { c.SetLSP(0x7F); c.SetRAE(true); c.SetLSP(2) }, map[int]byte{41: 0x82}, func(c *Command) bool { return c.LSP() == 2 && c.RAE() }},
		{"log length", func(c *Command) { c.SetLogLength(0xFFFFFFFC) }, map[int]byte{42: 0xFE, 43: 0xFF, 44: 0xFF, 45: 0x3F}, func(c *Command) bool { return c.LogLength() == 0xFFFFFFFC }},
		{"numd", func(c *Command) { c.SetDW(10, 0xFFFF0000); c.SetDW(11, 0xFFFF) },
			map[int]byte{42: 0xFF, 43: 0xFF, 44: 0xFF, 45: 0xFF}, func(c *Command) bool { return c.LogLength() == 1<<34 }},
		{"property", func(c *Command) { c.SetDW(11, 0x68) }, map[int]byte{44: 0x68}, func(c *Command) bool { return c.Property() == PropertyCRTO && c.PropertySize() == 4 }},
		{"property size", func(c *Command) { c[40] = 2 }, map[int]byte{40: 2}, func(c *Command) bool { return c.PropertySize() == 0 }},
		{"property value", func(c *Command) { c.SetDW(12, 1); c.SetDW(13, 2) }, map[int]byte{48: 1, 52: 2}, func(c *Command) bool { return c.PropertyValue() == 1 }},
		{"property value 8", func(c *Command) { c[40] = 1; c.SetDW(12, 1); c.SetDW(13, 2) }, map[int]byte{40: 1, 48: 1, 52: 2}, func(c *Command) bool { return c.PropertyValue() == 2<<32|1 }},
	} {
		var c, want Command
		f.set(&c)
		for i, v := range f.want {
			want[i] = v
		}
		if c != want {
			t.Errorf("%s: %x, want %x", f.name, c, want)
		}
		if !f.ok(&c) {
			t.Errorf("%s: does not read back", f.name)
		}
		if c.DW(3) != 0 {
			t.Errorf("%s: dword 3 is set", f.name)
		}
	}
}

func TestCommandFlags(t *testing.T) {
	for flags := range 256 {
		var c Command
		c.SetFlags(uint8(flags))
		want := StatusInvalidField.WithDNR()
		if flags&3 == 0 && flags>>6 == 1 {
			want = StatusSuccess
		}
		if got := c.CheckFlags(); got != want {
			t.Errorf("flags %#02x: %v, want %v", flags, got, want)
		}
	}
}

func TestSettersPanic(t *testing.T) {
	var c Command
	for name, f := range map[string]func(){
		"no blocks":         func() { c.SetBlocks(0) },
		"too many blocks":   func() { c.SetBlocks(MaxBlocks + 1) },
		"no ranges":         func() { c.InitDSM(0, 1, 0, 0) },
		"too many ranges":   func() { c.InitDSM(0, 1, MaxDSMRanges+1, 0) },
		"no log":            func() { c.SetLogLength(0) },
		"half a dword":      func() { c.SetLogLength(6) },
		"odd log offset":    func() { c.SetLPO(2) },
		"keyed length":      func() { c.SetKeyedSGL(0, MaxKeyedLength+1, 0, false) },
		"rw without blocks": func() { c.InitRW(OpRead, 0, 1, 0, 0, 0) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			f()
		}()
	}
	c.SetBlocks(1)
	c.SetBlocks(MaxBlocks)
	c.InitDSM(0, 1, 1, 0)
	if c.DSMRangeCount() != 1 {
		t.Errorf("%d ranges", c.DSMRangeCount())
	}
	c.InitDSM(0, 1, MaxDSMRanges, 0)
	if c.DSMRangeCount() != MaxDSMRanges {
		t.Errorf("%d ranges", c.DSMRangeCount())
	}
}

func TestViews(t *testing.T) {
	b := make([]byte, CommandSize+8)
	for n := range CommandSize {
		if _, ok := CommandView(b[:n]); ok {
			t.Fatalf("a command in %d bytes", n)
		}
	}
	for n := range CompletionSize {
		if _, ok := CompletionView(b[:n]); ok {
			t.Fatalf("a completion in %d bytes", n)
		}
	}
	c, _ := CommandView(b)
	c.SetID(0x1234)
	c.SetKeyedSGL(1, 2, 3, true)
	e, _ := CompletionView(b)
	e.SetDW1(0x55)
	if b[2] != 0x34 || b[24] != 1 || b[32] != 2 || b[35] != 3 || b[4] != 0x55 || e.DW1() != 0x55 {
		t.Errorf("views do not write through: %x", b)
	}
}

func TestStrings(t *testing.T) {
	for _, tc := range []struct {
		got  interface{ String() string }
		want string
	}{
		{OpRead, "Read"}, {OpDatasetManagement, "Dataset Management"}, {Opcode(0x7E), "Opcode(0x7e)"},
		{AdminKeepAlive, "Keep Alive"}, {AdminOpcode(0x80), "AdminOpcode(0x80)"},
		{FabricsAuthReceive, "Authentication Receive"}, {FabricsType(2), "FabricsType(0x02)"},
		{HostToController, "host to controller"}, {Direction(9), "Direction(9)"},
		{SGLKeyedDataBlock, "keyed data block"}, {SGLType(15), "SGLType(15)"},
		{DataInCapsule, "in capsule"}, {DataKind(7), "DataKind(7)"},
		{CNSController, "controller"}, {CNS(0x77), "CNS(0x77)"}, {CSIZNS, "Zoned Namespace"}, {CSI(9), "CSI(9)"},
		{FeatureKeepAliveTimer, "Keep Alive Timer"}, {FeatureID(0xFF), "FeatureID(0xff)"},
		{SelectDefault, "default"}, {FeatureSelect(6), "FeatureSelect(6)"},
		{LogDiscovery, "Discovery"}, {LogID(0xC0), "LogID(0xc0)"},
		{PropertyCSTS, "CSTS"}, {Property(0x1000), "Property(0x1000)"},
		{Version1_4, "1.4"}, {Version(0x00010203), "1.2.3"},
		{TransportRDMA, "rdma"}, {TransportType(9), "TransportType(9)"},
		{FamilyIPv6, "ipv6"}, {AddressFamily(9), "AddressFamily(9)"},
		{SubsystemNVM, "nvme subsystem"}, {SubsystemType(9), "SubsystemType(9)"},
		{NIDUUID, "UUID"}, {NIDType(9), "NIDType(9)"},
		{EventANAChanged, "asymmetric namespace access change"}, {AsyncEvent(0x020201), "event type 1 info 0x02 log page 0x02"},
		{ConnectInvalidQID, "QID"}, {ConnectInvalid(1<<16 | 3), "byte 3 of the Connect data"}, {ConnectInvalid(7), "byte 7 of the command"},
		{RejectNoResources, "no RDMA resources"}, {RejectStatus(9), "RejectStatus(9)"},
	} {
		if got := tc.got.String(); got != tc.want {
			t.Errorf("%T: %q, want %q", tc.got, got, tc.want)
		}
	}
	// No two values of an enumeration print alike, and none prints nothing.
	for _, f := range []func(uint8) string{
		func(i uint8) string { return Opcode(i).String() },
		func(i uint8) string { return AdminOpcode(i).String() },
		func(i uint8) string { return FabricsType(i).String() },
		func(i uint8) string { return CNS(i).String() },
		func(i uint8) string { return FeatureID(i).String() },
		func(i uint8) string { return LogID(i).String() },
		func(i uint8) string { return RejectStatus(i).String() },
		func(i uint8) string { return SubsystemType(i).String() },
		func(i uint8) string { return AddressFamily(i).String() },
		func(i uint8) string { return TransportType(i).String() },
		func(i uint8) string { return NIDType(i).String() },
		func(i uint8) string { return Direction(i).String() },
	} {
		seen := map[string]int{}
		for i := range 256 {
			s := f(uint8(i))
			if j, dup := seen[s]; dup || s == "" {
				t.Errorf("%d and %d both print %q", j, i, s)
			}
			seen[s] = i
		}
	}
}

// TestNumbers has the numbers of the enumerations that no golden file holds.
func TestNumbers(t *testing.T) {
	check := func(name string, got, want []int) {
		if !slices.Equal(got, want) {
			t.Errorf("%s: %#x, want %#x", name, got, want)
		}
	}
	check("opcodes", ints(OpFlush, OpWrite, OpRead, OpWriteUncorrectable, OpCompare, OpWriteZeroes, OpDatasetManagement, OpVerify,
		OpReservationRegister, OpReservationReport, OpReservationAcquire, OpReservationRelease, OpCopy, OpFabrics),
		[]int{0, 1, 2, 4, 5, 8, 9, 0x0C, 0x0D, 0x0E, 0x11, 0x15, 0x19, 0x7F})
	check("admin opcodes", ints(AdminDeleteSQ, AdminCreateSQ, AdminGetLogPage, AdminDeleteCQ, AdminCreateCQ, AdminIdentify, AdminAbort,
		AdminSetFeatures, AdminGetFeatures, AdminAsyncEventRequest, AdminKeepAlive, AdminFabrics),
		[]int{0, 1, 2, 4, 5, 6, 8, 9, 0x0A, 0x0C, 0x18, 0x7F})
	check("fabrics types", ints(FabricsPropertySet, FabricsConnect, FabricsPropertyGet, FabricsAuthSend, FabricsAuthReceive, FabricsDisconnect),
		[]int{0, 1, 4, 5, 6, 8})
	check("CNS", ints(CNSNamespace, CNSController, CNSActiveNamespaces, CNSNamespaceDescriptors, CNSCommandSetNamespace,
		CNSCommandSetController, CNSCommandSetActiveList, CNSIndependentNamespace, CNSAllocatedNamespaceList, CNSAllocatedNamespace,
		CNSNamespaceControllers, CNSControllers, CNSCommandSets),
		[]int{0, 1, 2, 3, 5, 6, 7, 8, 0x10, 0x11, 0x12, 0x13, 0x1C})
	check("features", ints(FeatureArbitration, FeaturePowerManagement, FeatureTemperature, FeatureErrorRecovery, FeatureVolatileCache,
		FeatureNumberOfQueues, FeatureInterruptCoalesce, FeatureInterruptVector, FeatureWriteAtomicity, FeatureAsyncEventConfig,
		FeatureAutonomousPower, FeatureTimestamp, FeatureKeepAliveTimer, FeatureHostBehavior, FeatureHostIdentifier,
		FeatureReservationMask, FeatureReservationPersis, FeatureWriteProtection),
		[]int{1, 2, 4, 5, 6, 7, 8, 9, 0x0A, 0x0B, 0x0C, 0x0E, 0x0F, 0x16, 0x81, 0x82, 0x83, 0x84})
	check("log pages", ints(LogSupportedPages, LogError, LogSmart, LogFirmwareSlot, LogChangedNamespaces, LogEffects, LogANA,
		LogDiscovery, LogReservation), []int{0, 1, 2, 3, 4, 5, 0x0C, 0x70, 0x80})
	check("transports", ints(TransportRDMA, TransportFC, TransportTCP, TransportLoop), []int{1, 2, 3, 254})
	check("families", ints(FamilyIPv4, FamilyIPv6, FamilyIB, FamilyFC, FamilyLoop), []int{1, 2, 3, 4, 254})
	check("subsystems", ints(SubsystemReferral, SubsystemNVM, SubsystemDiscovery), []int{1, 2, 3})
	check("RDMA", []int{RDMAQPConnected, RDMAQPDatagram, RDMAProviderAny, RDMAProviderIB, RDMAProviderRoCE, RDMAProviderRoCEv2,
		RDMAProviderIWARP, RDMACMSRdmaCM}, []int{1, 2, 1, 2, 3, 4, 5, 1})
	check("TREQ", []int{TREQSecureRequired, TREQSecureNotRequired, TREQDisableSQFlow}, []int{1, 2, 4})
	check("EFLAGS", []int{EFLAGSDuplicate, EFLAGSPersistent, EFLAGSNoCDC}, []int{1, 2, 4})
	check("ONCS", []int{ONCSCompare, ONCSWriteUncorrectable, ONCSDatasetManagement, ONCSWriteZeroes, ONCSSaveSelect,
		ONCSReservations, ONCSTimestamp, ONCSVerify, ONCSCopy}, []int{1, 2, 4, 8, 16, 32, 64, 128, 256})
	check("VWC", []int{VWCPresent, VWCFlushNoAll, VWCFlushAll}, []int{1, 4, 6})
	check("SGLS", []int{SGLSByteAligned, SGLSDwordAligned, SGLSKeyed, SGLSBitBucket, SGLSOffset, SGLSTransportData},
		[]int{1, 2, 4, 0x10000, 0x100000, 0x200000})
	check("CMIC, LPA, CTRATT", []int{CMICMultiPort, CMICMultiController, CMICANA, LPASmartPerNamespace, LPAEffects, LPAExtended,
		CTRATTHostID128, CTRATTTrafficKeep, CTRATTExtendedLBA}, []int{1, 2, 8, 1, 2, 4, 1, 0x40, 0x8000})
	check("namespace", []int{NSFEATThin, NSFEATAtomic, NSFEATDeallocErr, NSFEATUIDReuse, NSFEATOptPerf, NMICShared, NSATTRProtected,
		DLFEATReadZeros, DLFEATReadOnes, DLFEATDEAC, FLBASExtended, IndependentRotational, IndependentNoWriteCache, NSTATReady},
		[]int{1, 2, 4, 8, 16, 1, 1, 1, 2, 8, 16, 16, 32, 1})
	check("limits", []int{CommandSize, CompletionSize, IdentifySize, ConnectDataSize, DefaultPort, DiscoveryPort, MaxNQNLength,
		MaxDSMRanges, MaxBlocks, MaxKeyedLength, CNTLIDDynamic, CNTLIDStatic, MaxCNTLID, AdminQueueDepth, NSSRReset},
		[]int{64, 16, 4096, 1024, 4420, 8009, 223, 256, 65536, 0xFFFFFF, 0xFFFF, 0xFFFE, 0xFFEF, 32, 0x4E564D65})
}

func ints[T ~uint8](all ...T) []int {
	var n []int
	for _, v := range all {
		n = append(n, int(v))
	}
	return n
}

// TestDirections compares what the opcodes claim with the specification's table.
func TestDirections(t *testing.T) {
	for op, want := range map[Opcode]Direction{
		OpFlush: NoData, OpWrite: HostToController, OpRead: ControllerToHost, OpWriteUncorrectable: NoData,
		OpCompare: HostToController, OpWriteZeroes: NoData, OpDatasetManagement: HostToController, OpVerify: NoData,
		OpReservationRegister: HostToController, OpReservationReport: ControllerToHost,
		OpReservationAcquire: HostToController, OpReservationRelease: HostToController, OpCopy: HostToController,
	} {
		if op.Direction() != want {
			t.Errorf("%v: %v, want %v", op, op.Direction(), want)
		}
	}
	for op, want := range map[AdminOpcode]Direction{
		AdminGetLogPage: ControllerToHost, AdminIdentify: ControllerToHost, AdminAbort: NoData,
		AdminSetFeatures: HostToController, AdminGetFeatures: ControllerToHost,
		AdminAsyncEventRequest: NoData, AdminKeepAlive: NoData,
	} {
		if op.Direction() != want {
			t.Errorf("%v: %v, want %v", op, op.Direction(), want)
		}
	}
	for ft, want := range map[FabricsType]Direction{
		FabricsPropertySet: NoData, FabricsConnect: HostToController, FabricsPropertyGet: NoData,
		FabricsAuthSend: HostToController, FabricsAuthReceive: ControllerToHost, FabricsDisconnect: NoData,
	} {
		var c Command
		c.InitFabrics(ft, 0)
		if ft.Direction() != want || c.Direction() != want {
			t.Errorf("%v: %v, command %v, want %v", ft, ft.Direction(), c.Direction(), want)
		}
	}
}

func collect[T any](seq func(func(T) bool)) []T {
	var all []T
	seq(func(v T) bool { all = append(all, v); return true })
	return all
}
