package protocol

import (
	"bytes"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
)

func TestLogWindow(t *testing.T) {
	page := []byte{0, 1, 2, 3, 4, 5, 6, 7}
	for _, tc := range []struct {
		off, n uint64
		want   []byte
	}{
		{0, 8, page}, {0, 4, page[:4]}, {4, 4, page[4:]}, {4, 100, page[4:]}, {0, 1 << 34, page},
		{8, 4, nil}, {9, 4, nil}, {math.MaxUint64 - 3, 8, nil}, {math.MaxUint64, math.MaxUint64, nil},
		{4, math.MaxUint64, page[4:]}, {0, 0, nil},
	} {
		if got := LogWindow(page, tc.off, tc.n); !bytes.Equal(got, tc.want) {
			t.Errorf("%d bytes at %d: %v, want %v", tc.n, tc.off, got, tc.want)
		}
	}
	if LogWindow(nil, 0, 4) != nil {
		t.Error("empty page")
	}
}

func TestSupportedLogPages(t *testing.T) {
	b := AppendSupportedLogPages([]byte{9}, LogError, LogReservation, 0xFF)[1:]
	if len(b) != SupportedLogPagesSize {
		t.Fatalf("%d bytes", len(b))
	}
	for p := range 256 {
		want := p == 1 || p == 0x80 || p == 0xFF
		if got := LogPageSupported(b, LogID(p)); got != want {
			t.Errorf("page %#x: %v", p, got)
		}
	}
	if LogPageSupported(nil, LogError) || LogPageSupported(b[:1020], 0xFF) {
		t.Error("short page")
	}
}

func TestChangedNamespaces(t *testing.T) {
	for n, want := range map[int]int{0: 0, 1: 1, 1023: 1023, 1024: 1024, 1025: 1, 5000: 1} {
		nsids := make([]uint32, n)
		for i := range nsids {
			nsids[i] = uint32(n - i) // order of change, not of number
		}
		b := AppendChangedNamespaces(nil, nsids)
		if len(b) != ChangedNamespacesLogSize {
			t.Fatalf("%d bytes", len(b))
		}
		got := collect(ChangedNamespaces(b))
		if len(got) != want {
			t.Errorf("%d changes: %d entries, want %d", n, len(got), want)
			continue
		}
		if n > 1024 {
			nsids = []uint32{NSIDAll}
		}
		if !slices.Equal(got, nsids) {
			t.Errorf("%d changes: wrong entries", n)
		}
	}
	for range ChangedNamespaces(AppendChangedNamespaces(nil, []uint32{1, 2})) {
		break
	}
}

func TestSmartDataUnits(t *testing.T) {
	for n, want := range map[uint64]uint64{0: 0, 1: 1, 512000: 1, 512001: 2, math.MaxUint64: math.MaxUint64/512000 + 1} {
		if got := SmartDataUnits(n); got != (Uint128{Lo: want}) {
			t.Errorf("%d bytes: %v, want %d", n, got, want)
		}
	}
}

func TestEffects(t *testing.T) {
	if e := EffectsSupported | EffectsLBContent; uint32(e) != 3 || e.CSE() != 0 || Effects(5<<16).CSE() != 5 {
		t.Error("bits")
	}
	// What the Linux target says of Write, by opcode.
	d := EffectsLog{}
	d.IO[OpWrite] = EffectsSupported | EffectsLBContent
	b, _ := d.AppendBinary(nil)
	if b[1024+4] != 3 {
		t.Errorf("write is at another place")
	}
}

func TestFirmwareSlotLog(t *testing.T) {
	d := FirmwareSlotLog{AFI: 1, Revisions: [7]string{"0.1"}}
	b, _ := d.AppendBinary(nil)
	if string(b[8:16]) != "0.1     " || !bytes.Equal(b[16:64], make([]byte, 48)) {
		t.Errorf("% x", b[8:64])
	}
}

// TestDiscoveryPeek reads the head of a discovery log page of a Linux target as
// it stands in a public report (linux-nvme/libnvme issue 807), with the four
// bytes that follow there being reserved.
func TestDiscoveryPeek(t *testing.T) {
	b := []byte{9, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
	var h DiscoveryLogHeader
	if err := h.UnmarshalBinary(b[:DiscoveryLogPeek]); err != nil || h.GENCTR != 9 || h.NUMREC != 4 {
		t.Errorf("%+v %v", h, err)
	}
	b[16] = 1
	if err := h.UnmarshalBinary(b); !errors.Is(err, ErrFormat) {
		t.Errorf("record format: %v", err)
	}
}

func TestDiscoveryEntryPadding(t *testing.T) {
	d := DiscoveryLogEntry{TRTYPE: TransportRDMA, ADRFAM: FamilyIPv4, SUBTYPE: SubsystemNVM, CNTLID: CNTLIDDynamic, ASQSZ: 32,
		TRSVCID: "4420", SUBNQN: "testnqn", TRADDR: "192.0.2.1", RDMA_QPTYPE: RDMAQPConnected, RDMA_PRTYPE: RDMAProviderAny, RDMA_CMS: RDMACMSRdmaCM}
	b, err := d.AppendBinary(nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, pad := range []string{"\x00", " ", "\n", " \n\x00garbage", "\t"} {
		p := bytes.Clone(b)
		for i := 32 + 4; i < 64; i++ {
			p[i] = pad[min(i-36, len(pad)-1)]
		}
		for i := 512 + 9; i < 768; i++ {
			p[i] = pad[min(i-521, len(pad)-1)]
		}
		var got DiscoveryLogEntry
		if err := got.UnmarshalBinary(p); err != nil || got != d {
			t.Errorf("padded with %q: %+v %v", pad, got, err)
		}
	}
	// Texts that fill their fields, between bytes that are not theirs.
	p := bytes.Repeat([]byte{'x'}, DiscoveryLogEntrySize)
	copy(p[32:64], strings.Repeat("4", 32))
	copy(p[256:512], strings.Repeat("n", 256))
	copy(p[512:768], strings.Repeat("a", 256))
	var full DiscoveryLogEntry
	if err := full.UnmarshalBinary(p); err != nil || full.TRSVCID != strings.Repeat("4", 32) ||
		full.SUBNQN != strings.Repeat("n", 256) || full.TRADDR != strings.Repeat("a", 256) {
		t.Errorf("full texts: %+v %v", full, err)
	}
	for name, change := range map[string]func(*DiscoveryLogEntry){
		"long address": func(d *DiscoveryLogEntry) { d.TRADDR = strings.Repeat("1", 256) },
		"long port":    func(d *DiscoveryLogEntry) { d.TRSVCID = strings.Repeat("1", 32) },
		"long name":    func(d *DiscoveryLogEntry) { d.SUBNQN = strings.Repeat("1", 224) },
		"no name":      func(d *DiscoveryLogEntry) { d.SUBNQN = "" },
	} {
		bad := d
		change(&bad)
		if b, err := bad.AppendBinary([]byte{1}); !errors.Is(err, ErrInvalid) || len(b) != 1 {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestDSMRanges(t *testing.T) {
	var b []byte
	want := []DSMRange{{1, 2, 3}, {0, math.MaxUint32, math.MaxUint64}, {0, 0, 5}}
	for _, r := range want {
		b = AppendDSMRange(b, r)
	}
	r, ok := DSMRangesView(append(b, make([]byte, 4096)...), 3)
	if !ok || r.Len() != 3 || !slices.Equal(collect(r.All()), want) {
		t.Errorf("%v %v", ok, collect(r.All()))
	}
	for n, ok := range map[int]bool{-1: false, 0: true, 3: true, 4: false, 256: false} {
		if _, got := DSMRangesView(b, n); got != ok {
			t.Errorf("%d ranges in %d bytes: %v", n, len(b), got)
		}
	}
	if _, ok := DSMRangesView(make([]byte, 8192), 257); ok {
		t.Error("257 ranges")
	}
	for range r.All() {
		break
	}
	for _, tc := range []struct {
		r    DSMRange
		nsze uint64
		want bool
	}{
		{DSMRange{SLBA: 0, NLB: 8}, 8, true}, {DSMRange{SLBA: 1, NLB: 8}, 8, false},
		{DSMRange{SLBA: 8, NLB: 0}, 8, true}, {DSMRange{SLBA: 9, NLB: 0}, 8, false},
		{DSMRange{SLBA: math.MaxUint64, NLB: 2}, math.MaxUint64, false},
		{DSMRange{SLBA: math.MaxUint64 - 1, NLB: 1}, math.MaxUint64, true},
	} {
		r := DSMRanges(AppendDSMRange(AppendDSMRange(nil, DSMRange{}), tc.r))
		if got := r.Inside(tc.nsze); got != tc.want {
			t.Errorf("%+v in %d blocks: %v", tc.r, tc.nsze, got)
		}
	}
}
