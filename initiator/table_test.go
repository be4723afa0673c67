package initiator

import (
	"context"
	"errors"
	"net/netip"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"rdblk/blockdev"
	"rdblk/protocol"
)

func TestConfigDefaultsAreValid(t *testing.T) {
	c := Config{Provider: newProvider(t), Addr: netip.MustParseAddrPort("192.0.2.1:0")}
	if err := c.Validate(); err != nil {
		t.Errorf("the zero values are refused: %v", err)
	}
	d := c.withDefaults()
	if err := d.Validate(); err != nil {
		t.Errorf("the defaults are refused: %v", err)
	}
	if d.Addr.Port() != 4420 || d.Depth != 128 || d.KeepAlive != 5*time.Second || d.LossTimeout != 600*time.Second ||
		d.RequestTimeout != 30*time.Second || d.BufferMemory != 64<<20 || d.ReconnectDelay != 100*time.Millisecond || d.Queues < 1 {
		t.Errorf("defaults %+v", d)
	}
	if !d.HostID.SinglePath() || d.HostNQN != protocol.UUIDNQN(d.HostID) || d.HostID == c.withDefaults().HostID {
		t.Errorf("host identity %v %q", d.HostID, d.HostNQN)
	}
}

func TestConfigValidateTellsEverything(t *testing.T) {
	c := Config{
		Addr: netip.MustParseAddrPort("0.0.0.0:4420"), HostNQN: "a b", SubNQN: strings.Repeat("x", 300), NSID: protocol.NSIDAll,
		Queues: -1, Depth: 1, KeepAlive: time.Millisecond, ReconnectDelay: time.Second, ReconnectMaxDelay: time.Millisecond,
		RequestTimeout: -1, ConnectTimeout: 48 * time.Hour, RetryTimeout: -time.Second, BufferMemory: 1, MaxTransfer: 512, PinCPUs: []int{0, -1},
	}
	err := c.Validate()
	if err == nil {
		t.Fatal("accepted")
	}
	for _, field := range []string{"Provider", "Addr", "HostNQN", "SubNQN", "NSID", "Queues", "Depth", "KeepAlive", "ReconnectMaxDelay",
		"RequestTimeout", "ConnectTimeout", "RetryTimeout", "BufferMemory", "MaxTransfer", "PinCPUs"} {
		if !strings.Contains(err.Error(), field+": ") {
			t.Errorf("nothing about %s in:\n%v", field, err)
		}
	}
	if _, err := Connect(context.Background(), c); err == nil || !strings.Contains(err.Error(), "configuration") {
		t.Errorf("Connect: %v", err)
	}
	if _, err := Discover(context.Background(), DiscoverConfig{}); err == nil || !strings.Contains(err.Error(), "Provider") {
		t.Errorf("Discover: %v", err)
	}
}

func TestBackoff(t *testing.T) {
	const ms = time.Millisecond
	b := backoff{first: 100 * ms, limit: 5 * time.Second, loss: 600 * time.Second}
	forever := backoff{first: 100 * ms, limit: 5 * time.Second, loss: -1}
	for _, c := range []struct {
		b       backoff
		attempt int
		elapsed time.Duration
		rnd     float64
		wait    time.Duration
		lost    bool
	}{
		{b, 0, 0, 0.9, 0, false},
		{b, 1, 0, 0, 50 * ms, false},
		{b, 1, 0, 0.5, 75 * ms, false},
		{b, 2, 0, 0, 100 * ms, false},
		{b, 3, 0, 0, 200 * ms, false},
		{b, 6, 0, 0, 1600 * ms, false},
		{b, 7, 0, 0, 2500 * ms, false},
		{b, 1 << 30, 0, 0, 2500 * ms, false},
		{b, 1 << 30, 0, 0.5, 3750 * ms, false},
		{b, 100, 598 * time.Second, 0, 2 * time.Second, true},
		{b, 100, 600 * time.Second, 0, 0, true},
		{b, 100, 900 * time.Second, 0, 0, true},
		{forever, 100, 900 * time.Hour, 0, 2500 * ms, false},
		{backoff{first: ms, limit: ms, loss: 0}, 0, 0, 0, 0, true},
	} {
		wait, lost := c.b.next(c.attempt, c.elapsed, c.rnd)
		if wait != c.wait || lost != c.lost {
			t.Errorf("attempt %d after %v with %v: %v %v, want %v %v", c.attempt, c.elapsed, c.rnd, wait, lost, c.wait, c.lost)
		}
	}
}

func TestJudge(t *testing.T) {
	read, write, zero, discard, flush := blockdev.OpRead, blockdev.OpWrite, blockdev.OpZero, blockdev.OpDiscard, blockdev.OpFlush
	for _, c := range []struct {
		op   blockdev.Op
		s    protocol.Status
		want verdict
	}{
		{read, protocol.StatusNamespaceNotReady, verdictLater},
		{write, protocol.StatusCommandInterrupted, verdictLater},
		{write, protocol.StatusInternalPathError, verdictLater},
		{flush, protocol.StatusInternalPathError, verdictLater},
		{flush, protocol.StatusNamespaceNotReady, verdictLater},
		{write, protocol.StatusInternalError, verdictLater},
		{flush, protocol.StatusInternalError, verdictFail},
		{flush, protocol.StatusDataTransferError, verdictFail},
		{write, protocol.StatusInternalError.WithDNR(), verdictFail},
		{write, protocol.StatusNamespaceNotReady.WithDNR(), verdictFail},
		{write, protocol.StatusInternalPathError.WithDNR(), verdictFail},
		{write, protocol.StatusInvalidPI, verdictFail}, // 0x181 is "controller busy" only to a Connect
		{write, protocol.StatusWriteFault, verdictFail},
		{read, protocol.StatusUnrecoveredRead, verdictFail},
		{write, protocol.StatusCapacityExceeded.WithDNR(), verdictFail},
		{write, protocol.StatusNamespaceWriteProtected, verdictFail},
		{read, protocol.StatusLBAOutOfRange.WithDNR(), verdictFail},
		{write, protocol.StatusInvalidField.WithDNR(), verdictFail},
		{zero, protocol.StatusInvalidField.WithDNR(), verdictOther},
		{zero, protocol.StatusInvalidOpcode.WithDNR(), verdictOther},
		{discard, protocol.StatusCommandSizeExceeded.WithDNR(), verdictOther},
		{discard, protocol.StatusWriteFault.WithDNR(), verdictFail},
		{write, protocol.StatusInvalidNamespace.WithDNR(), verdictGone},
		{flush, protocol.StatusInvalidNamespace, verdictGone},
	} {
		if got := judge(c.op, c.s); got != c.want {
			t.Errorf("%s, %v: %d, want %d", c.op, c.s, got, c.want)
		}
	}
}

func TestCommandErrorMeanings(t *testing.T) {
	for _, c := range []struct {
		s     protocol.Status
		is    []error
		isNot []error
	}{
		{protocol.StatusCapacityExceeded.WithDNR(), []error{syscall.ENOSPC, protocol.StatusCapacityExceeded}, []error{blockdev.ErrReadOnly, syscall.EIO}},
		{protocol.StatusNamespaceWriteProtected, []error{blockdev.ErrReadOnly, syscall.EROFS}, nil},
		{protocol.StatusLBAOutOfRange, []error{blockdev.ErrOutOfRange}, nil},
		{protocol.StatusUnrecoveredRead, []error{syscall.EIO}, []error{blockdev.ErrLost}},
		{protocol.StatusWriteFault, []error{syscall.EIO}, nil},
		{protocol.StatusInternalError, []error{syscall.EIO}, nil},
		{protocol.StatusInvalidOpcode, []error{blockdev.ErrNotSupported, syscall.EOPNOTSUPP}, nil},
		{protocol.StatusInvalidNamespace, []error{ErrNoNamespace, syscall.ENODEV}, nil},
	} {
		var err error = &CommandError{Op: "write", Status: c.s}
		for _, want := range c.is {
			if !errors.Is(err, want) {
				t.Errorf("%v is not %v", err, want)
			}
		}
		for _, not := range c.isNot {
			if errors.Is(err, not) {
				t.Errorf("%v is %v", err, not)
			}
		}
	}
	lost := error(&LostError{After: time.Second, Cause: ErrTimeout})
	if !errors.Is(lost, blockdev.ErrLost) || !errors.Is(lost, ErrTimeout) || !errors.Is(lost, syscall.EIO) {
		t.Errorf("%v", lost)
	}
}

func TestRetryDelay(t *testing.T) {
	for _, c := range []struct {
		try   int
		asked time.Duration
		want  time.Duration
	}{
		{0, 0, 50 * time.Millisecond}, {1, 0, 50 * time.Millisecond}, {2, 0, 100 * time.Millisecond}, {5, 0, 800 * time.Millisecond},
		{6, 0, time.Second}, {1 << 20, 0, time.Second}, {1, 300 * time.Millisecond, 300 * time.Millisecond}, {9, time.Hour, 10 * time.Second},
	} {
		if got := retryDelay(c.try, c.asked); got != c.want {
			t.Errorf("try %d, asked for %v: %v, want %v", c.try, c.asked, got, c.want)
		}
	}
}

func describeSpace(size int, shift uint8, change func(*controllerLimits, *description)) (*geometry, error) {
	s := newFakeSpace(size, shift)
	lim := &controllerLimits{maxTransfer: 1 << 20, subnqn: fakeNQN}
	lim.ctrl.MDTS = 5
	lim.ctrl.ONCS = protocol.ONCSDatasetManagement | protocol.ONCSWriteZeroes
	lim.ctrl.VWC = protocol.VWCPresent
	d := &description{nsid: 1, ns: s.ns, id: identity{IDs: s.id}}
	change(lim, d)
	return geometryOf(lim, d)
}

func TestGeometry(t *testing.T) {
	type lim = controllerLimits
	type desc = description
	for _, c := range []struct {
		name   string
		shift  uint8
		change func(*lim, *desc)
		check  func(*geometry) bool
	}{
		{"as it is", 9, func(*lim, *desc) {}, func(g *geometry) bool {
			return g.maxTransfer == 128<<10 && g.maxZero == 32<<20 && g.maxDiscard == (1<<32-1)<<9 && g.writeZeroes && g.deallocate && g.info.WriteCache && g.info.PhysBlock == 512
		}},
		{"no MDTS: the configuration's limit", 9, func(l *lim, _ *desc) { l.ctrl.MDTS = 0 }, func(g *geometry) bool { return g.maxTransfer == 1<<20 }},
		{"MDTS beyond a keyed descriptor", 9, func(l *lim, _ *desc) { l.ctrl.MDTS, l.maxTransfer = 200, 16<<20 }, func(g *geometry) bool { return g.maxTransfer == 16<<20-512 }},
		{"64 KiB blocks", 16, func(l *lim, _ *desc) {}, func(g *geometry) bool { return g.maxTransfer == 128<<10 && g.info.BlockSize == 65536 }},
		{"odd maximum is rounded to blocks", 12, func(l *lim, _ *desc) { l.maxTransfer = 10000 }, func(g *geometry) bool { return g.maxTransfer == 8192 }},
		{"NLB bounds Write Zeroes", 9, func(l *lim, _ *desc) { l.nvm.WZSL = 60 }, func(g *geometry) bool { return g.maxZero == 65536*512 }},
		{"WZSL", 9, func(l *lim, _ *desc) { l.nvm.WZSL = 2 }, func(g *geometry) bool { return g.maxZero == 16<<10 }},
		{"WZSL below a block", 16, func(l *lim, _ *desc) { l.nvm.WZSL = 1 }, func(g *geometry) bool { return g.maxZero == 65536 }},
		{"DMRSL", 9, func(l *lim, _ *desc) { l.nvm.DMRSL = 8 }, func(g *geometry) bool { return g.maxDiscard == 4096 }},
		{"DMSL", 9, func(l *lim, _ *desc) { l.nvm.DMSL = 4 }, func(g *geometry) bool { return g.maxDiscard == 2048 }},
		{"no Write Zeroes", 9, func(l *lim, _ *desc) { l.ctrl.ONCS = 0 }, func(g *geometry) bool {
			return !g.writeZeroes && !g.info.WriteZeroes && !g.info.Discard && g.part(blockdev.OpZero, 1<<30) == zeroSize
		}},
		{"no zeros after deallocation", 9, func(_ *lim, d *desc) { d.ns.DLFEAT = protocol.DLFEATDEAC }, func(g *geometry) bool { return !g.deallocate }},
		{"no write cache", 9, func(l *lim, _ *desc) { l.ctrl.VWC = 0 }, func(g *geometry) bool { return !g.info.WriteCache && g.info.FUA }},
		{"write protected", 9, func(_ *lim, d *desc) { d.ns.NSATTR = 1 }, func(g *geometry) bool { return g.info.ReadOnly }},
		{"hints", 9, func(_ *lim, d *desc) { d.ns.NSFEAT, d.ns.NPWG, d.ns.NOWS = protocol.NSFEATOptPerf, 7, 255 }, func(g *geometry) bool {
			return g.info.PhysBlock == 4096 && g.info.OptimalIO == 128<<10
		}},
		{"hints that are not there", 9, func(_ *lim, d *desc) { d.ns.NPWG, d.ns.NOWS = 7, 255 }, func(g *geometry) bool {
			return g.info.PhysBlock == 512 && g.info.OptimalIO == 0
		}},
		{"odd hints", 9, func(_ *lim, d *desc) { d.ns.NSFEAT, d.ns.NPWG, d.ns.NOIOB = protocol.NSFEATOptPerf, 6, 16 }, func(g *geometry) bool {
			return g.info.PhysBlock == 512 && g.info.OptimalIO == 8192
		}},
		{"NGUID stands in for the UUID", 9, func(_ *lim, d *desc) { d.id.IDs.UUID = protocol.UUID{} }, func(g *geometry) bool { return g.info.UUID != [16]byte{} }},
		{"retry delays", 9, func(l *lim, _ *desc) { l.ctrl.CRDT = [3]uint16{1, 2, 3} }, func(g *geometry) bool {
			return g.crdt == [4]time.Duration{0, 100 * time.Millisecond, 200 * time.Millisecond, 300 * time.Millisecond}
		}},
	} {
		g, err := describeSpace(1<<20, c.shift, c.change)
		if err != nil || !c.check(g) {
			t.Errorf("%s: %+v, %v", c.name, g, err)
		}
		if err == nil && (g.maxTransfer%int64(g.info.BlockSize) != 0 || g.maxZero%int64(g.info.BlockSize) != 0 || g.maxDiscard%int64(g.info.BlockSize) != 0) {
			t.Errorf("%s: limits are not whole blocks: %+v", c.name, g)
		}
	}
	for _, c := range []struct {
		name   string
		change func(*lim, *desc)
	}{
		{"metadata", func(_ *lim, d *desc) { d.ns.LBAF[0].MS = 8 }},
		{"blocks of 128 KiB", func(_ *lim, d *desc) { d.ns.LBAF[0].LBADS = 17 }},
		{"blocks of 256 bytes", func(_ *lim, d *desc) { d.ns.LBAF[0].LBADS = 8 }},
		{"a format that is not there", func(_ *lim, d *desc) { d.ns.FLBAS = 3 }},
		{"2^63 bytes", func(_ *lim, d *desc) { d.ns.NSZE = 1 << 54 }},
		{"2^73 bytes", func(_ *lim, d *desc) { d.ns.NSZE = 1<<64 - 1 }},
		{"transfers below a block", func(l *lim, d *desc) { l.ctrl.MDTS, d.ns.LBAF[0].LBADS = 1, 14 }},
	} {
		if g, err := describeSpace(1<<20, 9, c.change); err == nil {
			t.Errorf("%s: accepted as %+v", c.name, g)
		}
	}
}

func TestParts(t *testing.T) {
	g, err := describeSpace(1<<20, 9, func(l *controllerLimits, _ *description) { l.nvm.DMRSL = 100 })
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		op   blockdev.Op
		n    int64
		want []int64
	}{
		{blockdev.OpRead, 512, []int64{512}},
		{blockdev.OpRead, 128 << 10, []int64{128 << 10}},
		{blockdev.OpWrite, 128<<10 + 512, []int64{128 << 10, 512}},
		{blockdev.OpWrite, 384 << 10, []int64{128 << 10, 128 << 10, 128 << 10}},
		{blockdev.OpZero, 64<<20 + 512, []int64{32 << 20, 32 << 20, 512}},
		{blockdev.OpDiscard, 101 * 512, []int64{100 * 512, 512}},
		{blockdev.OpFlush, 1, []int64{1}},
	} {
		var got []int64
		for left := c.n; left > 0; {
			n := g.part(c.op, left)
			got = append(got, n)
			left -= n
		}
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s of %d: %v, want %v", c.op, c.n, got, c.want)
		}
	}
}

func TestIdentity(t *testing.T) {
	a := protocol.NamespaceIDs{UUID: protocol.UUID{1}, NGUID: protocol.NGUID{2}, EUI64: protocol.EUI64{3}}
	only := func(ids protocol.NamespaceIDs, serial string) identity { return identity{IDs: ids, Serial: serial} }
	for _, c := range []struct {
		name string
		x, y identity
		same bool
	}{
		{"all equal", only(a, "s"), only(a, "s"), true},
		{"serial does not count beside an identifier", only(a, "s"), only(a, "t"), true},
		{"UUID differs", only(a, ""), only(protocol.NamespaceIDs{UUID: protocol.UUID{9}, NGUID: a.NGUID, EUI64: a.EUI64}, ""), false},
		{"NGUID differs", only(a, ""), only(protocol.NamespaceIDs{UUID: a.UUID, NGUID: protocol.NGUID{9}}, ""), false},
		{"EUI64 differs", only(a, ""), only(protocol.NamespaceIDs{UUID: a.UUID, EUI64: protocol.EUI64{9}}, ""), false},
		{"one in common", only(a, ""), only(protocol.NamespaceIDs{NGUID: a.NGUID}, ""), true},
		{"none in common", only(protocol.NamespaceIDs{UUID: a.UUID}, "s"), only(protocol.NamespaceIDs{NGUID: a.NGUID}, "s"), false},
		{"identifiers gone", only(a, "s"), only(protocol.NamespaceIDs{}, "s"), false},
		{"never any, same controller", only(protocol.NamespaceIDs{}, "s"), only(protocol.NamespaceIDs{}, "s"), true},
		{"never any, another controller", only(protocol.NamespaceIDs{}, "s"), only(protocol.NamespaceIDs{}, "t"), false},
	} {
		if err := c.x.same(c.y); (err == nil) != c.same {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func entry(nqn, addr, port string) protocol.DiscoveryLogEntry {
	return protocol.DiscoveryLogEntry{TRTYPE: protocol.TransportRDMA, ADRFAM: protocol.FamilyIPv4, SUBTYPE: protocol.SubsystemNVM,
		SUBNQN: nqn, TRADDR: addr, TRSVCID: port, CNTLID: protocol.CNTLIDDynamic, ASQSZ: 32}
}

func TestChooseSubsystem(t *testing.T) {
	asked := netip.MustParseAddrPort("192.0.2.1:4420")
	disc := entry(protocol.DiscoveryNQN, "192.0.2.1", "4420")
	disc.SUBTYPE = protocol.SubsystemDiscovery
	tcp := entry("nqn.t", "192.0.2.1", "4420")
	tcp.TRTYPE = protocol.TransportTCP
	type l = []protocol.DiscoveryLogEntry
	for _, c := range []struct {
		name string
		list l
		nqn  string
		addr string
		err  string
	}{
		{"the only one", l{disc, entry("nqn.a", "192.0.2.1", "4420")}, "nqn.a", "192.0.2.1:4420", ""},
		{"elsewhere", l{entry("nqn.a", "192.0.2.7", "4421")}, "nqn.a", "192.0.2.7:4421", ""},
		{"two paths, the asked one wins", l{entry("nqn.a", "192.0.2.7", "4420"), entry("nqn.a", "192.0.2.1", "4420"), entry("nqn.a", "192.0.2.8", "4420")}, "nqn.a", "192.0.2.1:4420", ""},
		{"IPv6", l{entry("nqn.a", "2001:db8::1", "4420")}, "nqn.a", "[2001:db8::1]:4420", ""},
		{"other transports do not count", l{tcp, entry("nqn.a", "192.0.2.1", "4420")}, "nqn.a", "192.0.2.1:4420", ""},
		{"nothing", l{disc, tcp}, "", "", "no NVM subsystem"},
		{"unusable addresses", l{entry("nqn.a", "0.0.0.0", "4420"), entry("nqn.b", "host", "4420"), entry("nqn.c", "192.0.2.1", "x")}, "", "", "no NVM subsystem"},
		{"two", l{entry("nqn.b", "192.0.2.1", "4420"), entry("nqn.a", "192.0.2.1", "4420")}, "", "", `"nqn.a", "nqn.b"`},
	} {
		nqn, addr, err := choose(c.list, asked)
		switch {
		case c.err == "":
			if err != nil || nqn != c.nqn || addr.String() != c.addr {
				t.Errorf("%s: %q %v %v", c.name, nqn, addr, err)
			}
		case !errors.Is(err, ErrNoSubsystem) || !strings.Contains(err.Error(), c.err):
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestReadDiscovery(t *testing.T) {
	log := func(gens ...uint64) (readLog, *int) { // the generation at each look at the head
		reads, heads := 0, 0
		entries := make([]protocol.DiscoveryLogEntry, 9)
		for i := range entries {
			entries[i] = entry("nqn."+string(rune('a'+i)), "192.0.2.1", "4420")
		}
		return func(_ context.Context, _ protocol.LogID, _ uint32, off uint64, n int, retain bool) ([]byte, error) {
			gen := gens[min(heads, len(gens)-1)]
			if reads++; off == 0 {
				heads++
			}
			if off != 0 && retain != (int(off)+n < (1+len(entries))*1024) {
				t.Errorf("RAE %v for %d bytes at %d", retain, n, off)
			}
			page, _ := (&protocol.DiscoveryLogHeader{GENCTR: gen, NUMREC: uint64(len(entries))}).AppendBinary(nil)
			for i := range entries {
				page, _ = entries[i].AppendBinary(page)
			}
			b := make([]byte, n)
			copy(b, protocol.LogWindow(page, off, uint64(n)))
			return b, nil
		}, &reads
	}
	fn, reads := log(7)
	list, err := readDiscovery(context.Background(), fn)
	if err != nil || len(list) != 9 || *reads != 5 || list[8].SUBNQN != "nqn.i" {
		t.Errorf("quiet log: %d entries, %d reads, %v", len(list), *reads, err)
	}
	fn, reads = log(7, 8, 8)
	if list, err = readDiscovery(context.Background(), fn); err != nil || len(list) != 9 || *reads != 10 {
		t.Errorf("changed once: %d entries, %d reads, %v", len(list), *reads, err)
	}
	n := uint64(0)
	restless := func(_ context.Context, _ protocol.LogID, _ uint32, off uint64, n2 int, _ bool) ([]byte, error) {
		n++
		b, _ := (&protocol.DiscoveryLogHeader{GENCTR: n}).AppendBinary(nil)
		return b, nil
	}
	if _, err = readDiscovery(context.Background(), restless); !errors.Is(err, ErrGenerationChanged) {
		t.Errorf("restless log: %v", err)
	}
	huge := func(context.Context, protocol.LogID, uint32, uint64, int, bool) ([]byte, error) {
		b, _ := (&protocol.DiscoveryLogHeader{GENCTR: 1, NUMREC: 1 << 60}).AppendBinary(nil)
		return b, nil
	}
	if _, err = readDiscovery(context.Background(), huge); err == nil {
		t.Error("a log of 2^60 entries was read")
	}
	lying := 0
	short := func(context.Context, protocol.LogID, uint32, uint64, int, bool) ([]byte, error) {
		lying++
		b, _ := (&protocol.DiscoveryLogHeader{GENCTR: 1, NUMREC: uint64(lying)}).AppendBinary(nil)
		return b, nil
	}
	if _, err = readDiscovery(context.Background(), short); !errors.Is(err, ErrProtocol) {
		t.Errorf("entries changed within a generation: %v", err)
	}
}

func TestStateNames(t *testing.T) {
	for s := StateLive; s <= StateClosed; s++ {
		b, _ := s.MarshalText()
		var back State
		if err := back.UnmarshalText(b); err != nil || back != s {
			t.Errorf("%v: %v %v", s, back, err)
		}
	}
	var s State
	if s.UnmarshalText([]byte("sleeping")) == nil {
		t.Error("unknown name accepted")
	}
	for k := EventConnected; k <= EventCacheLost; k++ {
		if strings.HasPrefix(k.String(), "EventKind") {
			t.Errorf("event %d has no name", k)
		}
	}
}
