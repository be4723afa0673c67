package protocol

import (
	"testing"
	"time"
)

func TestCAP(t *testing.T) {
	// The recommended target profile, worked out in the implementer's notes.
	const want CAP = 0x000000201E01007F
	got := CAP(0).WithMQES(127).WithCQR(true).WithTO(15 * time.Second).WithCSS(CSSNVM)
	if got != want {
		t.Errorf("%#016x, want %#016x", uint64(got), uint64(want))
	}
	if want.MQES() != 127 || !want.CQR() || want.TO() != 15*time.Second || want.CSS() != CSSNVM ||
		want.DSTRD() != 0 || want.MPSMIN() != 0 || want.MPSMAX() != 0 || want.CRWMS() || want.CRIMS() {
		t.Errorf("accessors disagree with %#x", uint64(want))
	}
	if c := want.WithCQR(false).WithMQES(0).WithTO(0).WithCSS(0); c != 0 {
		t.Errorf("cleared: %#x", uint64(c))
	}
	// Single bits, by position.
	for bit, ok := range map[uint]func(CAP) bool{
		0:  func(c CAP) bool { return c.MQES() == 1 },
		15: func(c CAP) bool { return c.MQES() == 1<<15 },
		16: func(c CAP) bool { return c.CQR() && c.MQES() == 0 },
		24: func(c CAP) bool { return c.TO() == 500*time.Millisecond },
		31: func(c CAP) bool { return c.TO() == 64*time.Second },
		32: func(c CAP) bool { return c.DSTRD() == 1 && c.TO() == 0 },
		37: func(c CAP) bool { return c.CSS() == CSSNVM },
		43: func(c CAP) bool { return c.CSS() == CSSCommand },
		44: func(c CAP) bool { return c.CSS() == CSSAdminOnly },
		48: func(c CAP) bool { return c.MPSMIN() == 1 },
		51: func(c CAP) bool { return c.MPSMIN() == 8 },
		52: func(c CAP) bool { return c.MPSMAX() == 1 },
		59: func(c CAP) bool { return c.CRWMS() && !c.CRIMS() },
		60: func(c CAP) bool { return c.CRIMS() && !c.CRWMS() },
	} {
		if !ok(CAP(1) << bit) {
			t.Errorf("bit %d", bit)
		}
	}
	for d, want := range map[time.Duration]time.Duration{
		0: 0, time.Millisecond: 500 * time.Millisecond, 500 * time.Millisecond: 500 * time.Millisecond,
		501 * time.Millisecond: time.Second, time.Hour: 127500 * time.Millisecond, -time.Second: 0,
	} {
		if got := CAP(0).WithTO(d).TO(); got != want {
			t.Errorf("TO %v becomes %v, want %v", d, got, want)
		}
	}
}

func TestCC(t *testing.T) {
	c := CCDefault
	if c.EN() || c.IOSQES() != 6 || c.IOCQES() != 4 || c.CSS() != 0 || c.MPS() != 0 || c.AMS() != 0 || c.SHN() != 0 || c.CRIME() {
		t.Errorf("default %#x", uint32(c))
	}
	if got := c.WithEN(true); got != 0x00460001 || !got.EN() {
		t.Errorf("enabled %#x", uint32(got))
	}
	if got := c.WithEN(true).WithSHN(SHNNormal); got != 0x00464001 || got.SHN() != SHNNormal {
		t.Errorf("shutdown %#x", uint32(got))
	}
	if got := CC(0xFFFFFFFF); got.CSS() != 7 || got.MPS() != 15 || got.AMS() != 7 || got.SHN() != 3 || !got.CRIME() {
		t.Errorf("all bits %#x", uint32(got))
	}
	if CC(0x60).CSS() != 6 || CC(1<<7).MPS() != 1 || CC(1<<11).AMS() != 1 || CC(1<<14).SHN() != 1 || !CC(1<<24).CRIME() {
		t.Error("bit positions")
	}
}

func TestCSTS(t *testing.T) {
	if c := CSTS(0).WithRDY(true); c != 1 || !c.RDY() || c.WithRDY(false) != 0 {
		t.Errorf("ready %#x", uint32(c))
	}
	if c := CSTS(0).WithCFS(true); c != 2 || !c.CFS() || c.WithCFS(false) != 0 {
		t.Errorf("fatal %#x", uint32(c))
	}
	if c := CSTS(1).WithSHST(SHSTComplete); c != 9 || c.SHST() != SHSTComplete {
		t.Errorf("shutdown %#x", uint32(c))
	}
	if !CSTS(1<<4).NSSRO() || !CSTS(1<<5).PP() || CSTS(1<<5).NSSRO() {
		t.Error("bit positions")
	}
}

func TestCRTO(t *testing.T) {
	c := NewCRTO(15*time.Second, time.Millisecond)
	if c != 0x0001001E || c.CRWMT() != 15*time.Second || c.CRIMT() != 500*time.Millisecond {
		t.Errorf("%#x", uint32(c))
	}
	if NewCRTO(1e18, 1e18) != 0xFFFFFFFF {
		t.Error("not clipped")
	}
}

func TestPropertySizes(t *testing.T) {
	for p, n := range map[Property]int{PropertyCAP: 8, PropertyVS: 4, PropertyCC: 4, PropertyCSTS: 4, PropertyNSSR: 4, PropertyCRTO: 4, 0x999: 4} {
		if p.Size() != n {
			t.Errorf("%v: %d bytes, want %d", p, p.Size(), n)
		}
	}
	for p, off := range map[Property]uint32{PropertyCAP: 0, PropertyVS: 8, PropertyCC: 0x14, PropertyCSTS: 0x1C, PropertyNSSR: 0x20, PropertyCRTO: 0x68} {
		if uint32(p) != off {
			t.Errorf("%v at %#x, want %#x", p, uint32(p), off)
		}
	}
}

func TestQueueCount(t *testing.T) {
	for _, tc := range []struct {
		sq, cq int
		want   QueueCount
		pairs  int
	}{
		{1, 1, 0, 1}, {8, 4, 0x00030007, 4}, {4, 8, 0x00070003, 4}, {0, -5, 0, 1},
		{65535, 65535, 0xFFFEFFFE, 65535}, {1 << 20, 65536, 0xFFFEFFFE, 65535},
	} {
		got := NewQueueCount(tc.sq, tc.cq)
		if got != tc.want || got.Pairs() != tc.pairs || !got.Valid() {
			t.Errorf("%d, %d: %#x, %d pairs, valid %v", tc.sq, tc.cq, uint32(got), got.Pairs(), got.Valid())
		}
	}
	for _, q := range []QueueCount{0xFFFF0000, 0x0000FFFF, 0xFFFFFFFF} {
		if q.Valid() {
			t.Errorf("%#x is valid", uint32(q))
		}
	}
	if q := QueueCount(0xFFFFFFFF); q.SQ() != 65536 || q.CQ() != 65536 {
		t.Errorf("%d %d", q.SQ(), q.CQ())
	}
}

func TestAsyncEvent(t *testing.T) {
	for e, want := range map[AsyncEvent]AsyncEvent{
		EventPersistentError:    NewAsyncEvent(EventError, 3, LogError),
		EventNamespaceChanged:   NewAsyncEvent(EventNotice, 0, LogChangedNamespaces),
		EventFirmwareActivation: NewAsyncEvent(EventNotice, 1, LogFirmwareSlot),
		EventANAChanged:         NewAsyncEvent(EventNotice, 3, LogANA),
		EventDiscoveryChanged:   NewAsyncEvent(EventNotice, 0xF0, LogDiscovery),
	} {
		if e != want {
			t.Errorf("%v is %#x, want %#x", e, uint32(e), uint32(want))
		}
	}
	e := EventDiscoveryChanged
	if e.Type() != EventNotice || e.Info() != 0xF0 || e.LogPage() != LogDiscovery {
		t.Errorf("%v %#x %v", e.Type(), e.Info(), e.LogPage())
	}
	if e := NewAsyncEvent(7, 0xAB, 0xCD); uint32(e) != 0x00CDAB07 {
		t.Errorf("%#x", uint32(e))
	}
	// Reserved bits of a peer do not hide a known event.
	if got := AsyncEvent(0xFF0400FA).String(); got != EventNamespaceChanged.String() {
		t.Errorf("%q", got)
	}
	if EventConfigNamespace != 0x100 || EventConfigANA != 0x800 || EventConfigDiscovery != 0x80000000 || EventConfigSmart != 0x1F || EventConfigFirmware != 0x200 {
		t.Error("configuration bits")
	}
}
