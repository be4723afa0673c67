package protocol

import (
	"bytes"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
)

// TestIdentifyController compares a controller of the recommended profile with
// bytes written by hand.
func TestIdentifyController(t *testing.T) {
	d := IdentifyController{
		SN: "0123456789", MN: "rdblk", FR: "0.1",
		RAB: 6, CMIC: CMICMultiPort | CMICMultiController, MDTS: 8, CNTLID: 7, VER: Version1_4,
		OAES: EventConfigNamespace, CTRATT: CTRATTHostID128, CNTRLTYPE: ControllerTypeIO,
		ACL: 3, AERL: 3, FRMW: 3, LPA: LPAEffects | LPAExtended, KAS: 10,
		SQES: 0x66, CQES: 0x44, MAXCMD: 128, NN: 1024, ONCS: ONCSDatasetManagement | ONCSWriteZeroes,
		VWC: VWCPresent, MSDBD: 1, SUBNQN: "nqn.2026-11.io.rdblk:a",
	}
	d.PSD[0].MP = 2500
	d.SetInCapsuleSize(4096)
	if d.SGLS != 0x00100005 || d.IOCCSZ != 260 || d.IORCSZ != 1 || d.InCapsuleSize() != 4096 {
		t.Errorf("in-capsule: SGLS %#x IOCCSZ %d size %d", d.SGLS, d.IOCCSZ, d.InCapsuleSize())
	}
	checkStructure(t, &d, golden(t, "identify-controller.hex"), IdentifySize)
}

func TestInCapsuleSize(t *testing.T) {
	for _, tc := range []struct {
		name string
		d    IdentifyController
		want uint32
	}{
		{"4 KiB", IdentifyController{SGLS: SGLSOffset, IOCCSZ: 260}, 4096},
		{"16 KiB", IdentifyController{SGLS: SGLSOffset, IOCCSZ: 1028}, 16384},
		{"none", IdentifyController{SGLS: SGLSOffset, IOCCSZ: 4}, 0},
		{"less than a command", IdentifyController{SGLS: SGLSOffset, IOCCSZ: 3}, 0},
		{"no offsets", IdentifyController{IOCCSZ: 260}, 0},
		{"gap", IdentifyController{SGLS: SGLSOffset, IOCCSZ: 260, ICDOFF: 1}, 4080},
		{"all gap", IdentifyController{SGLS: SGLSOffset, IOCCSZ: 260, ICDOFF: 256}, 0},
		{"gap too large", IdentifyController{SGLS: SGLSOffset, IOCCSZ: 5, ICDOFF: 0xFFFF}, 0},
		{"beyond 32 bits", IdentifyController{SGLS: SGLSOffset, IOCCSZ: math.MaxUint32}, 0},
		{"largest", IdentifyController{SGLS: SGLSOffset, IOCCSZ: 1 << 28}, (1<<28 - 4) * 16},
	} {
		if got := tc.d.InCapsuleSize(); got != tc.want {
			t.Errorf("%s: %d, want %d", tc.name, got, tc.want)
		}
	}
	d := IdentifyController{SGLS: SGLSOffset | SGLSBitBucket, ICDOFF: 9}
	d.SetInCapsuleSize(0)
	if d.SGLS != SGLSBitBucket|SGLSByteAligned|SGLSKeyed || d.IOCCSZ != 4 || d.ICDOFF != 0 || d.InCapsuleSize() != 0 {
		t.Errorf("none: %+v", d)
	}
}

func TestIdentifyControllerTexts(t *testing.T) {
	d := IdentifyController{SN: strings.Repeat("s", 30), MN: strings.Repeat("m", 50), FR: strings.Repeat("f", 10)}
	b, err := d.AppendBinary(nil)
	if err != nil {
		t.Fatal(err)
	}
	var got IdentifyController
	if err := got.UnmarshalBinary(b); err != nil {
		t.Fatal(err)
	}
	if got.SN != d.SN[:20] || got.MN != d.MN[:40] || got.FR != d.FR[:8] || got.RAB != 0 {
		t.Errorf("%q %q %q", got.SN, got.MN, got.FR)
	}
	// SPDK leaves texts of a discovery controller zero.
	if err := got.UnmarshalBinary(make([]byte, IdentifySize)); err != nil || got.SN != "" || got.MN != "" || got.SUBNQN != "" {
		t.Errorf("%q %q %v", got.SN, got.MN, err)
	}
	d.SUBNQN = strings.Repeat("x", 224)
	if b, err := d.AppendBinary([]byte{1}); !errors.Is(err, ErrInvalid) || len(b) != 1 {
		t.Errorf("long SUBNQN: %v", err)
	}
}

func TestNamespaceFormat(t *testing.T) {
	var d IdentifyNamespace
	for i := range d.LBAF {
		d.LBAF[i] = LBAFormat{MS: uint16(i), LBADS: 9}
	}
	for _, tc := range []struct {
		nlbaf, flbas uint8
		want         int // format, -1 for an error
	}{
		{0, 0, 0}, {3, 2, 2}, {3, 3, 3}, {3, 4, -1}, {0, 1, -1},
		{0, FLBASExtended, 0},     // metadata bit is no index
		{15, 0x60, 0},             // upper bits do not count with 16 formats
		{16, 0x20, 16},            // index 16
		{63, 0x6F, 63},            // all bits
		{62, 0x6F, -1},            // one too far
		{255, 0xFF, 63},           // nonsense stays inside the table
		{16, 0x40, -1},            // index 32
		{63, 0x40 | 0x10 | 5, 37}, // 2<<4 | 5
	} {
		d.NLBAF, d.FLBAS = tc.nlbaf, tc.flbas
		f, err := d.Format()
		if tc.want < 0 {
			if !errors.Is(err, ErrInvalid) {
				t.Errorf("NLBAF %d FLBAS %#x: format %d, %v", tc.nlbaf, tc.flbas, f.MS, err)
			}
		} else if err != nil || int(f.MS) != tc.want {
			t.Errorf("NLBAF %d FLBAS %#x: format %d, %v, want %d", tc.nlbaf, tc.flbas, f.MS, err, tc.want)
		}
	}
	d.NLBAF, d.FLBAS = 0, 0
	for lbads := range 256 {
		d.LBAF[0].LBADS = uint8(lbads)
		_, err := d.Format()
		if ok := lbads >= 9 && lbads <= 31; ok != (err == nil) {
			t.Errorf("LBADS %d: %v", lbads, err)
		}
	}
}

func TestNamespaceIDs(t *testing.T) {
	b := golden(t, "namespace-descriptors.hex")
	want := NamespaceIDs{
		EUI64:  EUI64{1, 2, 3, 4, 5, 6, 7, 8},
		NGUID:  NGUID{0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, 0x19, 0x1a, 0x1b, 0x1c, 0x1d, 0x1e, 0x1f},
		UUID:   UUID{0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff},
		HasCSI: true,
	}
	checkStructure(t, &want, b, 0)

	for _, tc := range []struct {
		name string
		b    []byte
		want NamespaceIDs
		bad  bool
	}{
		{"nothing", nil, NamespaceIDs{}, false},
		{"empty", make([]byte, 4096), NamespaceIDs{}, false},
		{"unknown type is skipped", []byte{9, 3, 0, 0, 1, 2, 3, 4, 1, 0, 0, 2, 0, 0, 0, 0}, NamespaceIDs{CSI: 2, HasCSI: true}, false},
		{"wrong length", []byte{4, 1, 0, 0, 2, 3, 8, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8}, NamespaceIDs{CSI: 2, HasCSI: true}, true},
		{"cut off", []byte{4, 1, 0, 0, 2, 3, 16, 0, 0, 1, 2}, NamespaceIDs{CSI: 2, HasCSI: true}, false},
		{"twice", []byte{4, 1, 0, 0, 2, 4, 1, 0, 0, 0}, NamespaceIDs{CSI: 2, HasCSI: true}, false},
		{"ends at zero length", []byte{3, 0, 0, 0, 4, 1, 0, 0, 2}, NamespaceIDs{}, false},
	} {
		got := NamespaceIDs{UUID: UUID{1}} // must not survive
		err := got.UnmarshalBinary(tc.b)
		if got != tc.want || (err != nil) != tc.bad {
			t.Errorf("%s: %+v %v, want %+v", tc.name, got, err, tc.want)
		}
		if tc.bad && !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
	// Bytes behind 4096 are no part of the list.
	long := bytes.Repeat([]byte{9, 1, 0, 0, 0}, 1000)
	n := 0
	for range NamespaceDescriptors(long) {
		n++
	}
	if n != 4096/5 {
		t.Errorf("%d descriptors", n)
	}
	for range NamespaceDescriptors(long) {
		break // the iterator must stop
	}
}

func TestNamespaceList(t *testing.T) {
	list := func(nsids ...uint32) []byte { return AppendNamespaceList(nil, nsids) }
	for _, tc := range []struct {
		name string
		b    []byte
		want []uint32
	}{
		{"none", list(), nil},
		{"some", list(1, 2, 0xFFFFFFFE), []uint32{1, 2, 0xFFFFFFFE}},
		{"ends at zero", list(1, 0, 2), []uint32{1}},
		{"repeats", list(1, 2, 2, 3), []uint32{1, 2}},
		{"falls", list(5, 3), []uint32{5}},
		{"cut off", list(1, 2)[:7], []uint32{1}},
		{"nothing", nil, nil},
	} {
		if got := collect(NamespaceList(tc.b)); !slices.Equal(got, tc.want) {
			t.Errorf("%s: %v, want %v", tc.name, got, tc.want)
		}
	}
	full := make([]uint32, MaxNamespaceList+5)
	for i := range full {
		full[i] = uint32(i + 1)
	}
	b := list(full...)
	if len(b) != IdentifySize {
		t.Fatalf("%d bytes", len(b))
	}
	if got := collect(NamespaceList(append(b, 1, 2, 3, 4))); !slices.Equal(got, full[:MaxNamespaceList]) {
		t.Errorf("full list has %d entries", len(got))
	}
	for range NamespaceList(b) {
		break
	}
}

func TestIDs(t *testing.T) {
	const text = "00112233-4455-6677-8899-aabbccddeeff"
	u, err := ParseUUID(strings.ToUpper(text))
	if err != nil || u.String() != text || u[0] != 0 || u[15] != 0xff || u[4] != 0x44 {
		t.Errorf("%v %v", u, err)
	}
	var v UUID
	if err := v.UnmarshalText([]byte(text)); err != nil || v != u {
		t.Errorf("%v %v", v, err)
	}
	if b, _ := v.MarshalText(); string(b) != text {
		t.Errorf("%q", b)
	}
	for _, s := range []string{"", "00112233445566778899aabbccddeeff", text + "0", text[:35], text[:35] + "g",
		"00112233-4455-6677-8899_aabbccddeeff", "0011223--4455-6677-8899-aabbccddeeff"} {
		if _, err := ParseUUID(s); !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: %v", s, err)
		}
	}
	if !(UUID{}).IsZero() || u.IsZero() {
		t.Error("zero")
	}

	a, b := RandomUUID(), RandomUUID()
	if a == b || a[6]>>4 != 4 || a[8]>>6 != 2 {
		t.Errorf("random: %v %v", a, b)
	}
	// RFC 9562, appendix A.4: version 5 of "www.example.com" in the DNS name space.
	dns, _ := ParseUUID("6ba7b810-9dad-11d1-80b4-00c04fd430c8")
	if got := NameUUID(dns, "www.example.com").String(); got != "2ed6657d-e927-568b-95e1-2665a8aea6a2" {
		t.Errorf("name: %s", got)
	}

	// Computed with Python's hashlib from the description of SinglePathHostID.
	const single = "7264626c-6b01-83ad-8d7d-6e9a083f04f6"
	parts := []string{"nqn.2026-11.io.rdblk:host", "socket", "/run/disk.sock"}
	if got := SinglePathHostID(parts...); got.String() != single || !got.SinglePath() {
		t.Errorf("single path: %s %v", got, got.SinglePath())
	}
	if SinglePathHostID("ab", "c") == SinglePathHostID("a", "bc") || SinglePathHostID("a") == SinglePathHostID("a", "") ||
		RandomSinglePathHostID() == RandomSinglePathHostID() || !RandomSinglePathHostID().SinglePath() {
		t.Error("single path: not told apart, or not of the form")
	}
	for bit := range 128 { // exactly tag, version and variant make the form
		o, _ := ParseUUID(single)
		o[bit/8] ^= 0x80 >> (bit % 8)
		fixed := bit < 48 || bit/4 == 12 || bit == 64 || bit == 65
		if o.SinglePath() == fixed {
			t.Errorf("single path: bit %d: %s %v", bit, o, o.SinglePath())
		}
	}
	if (UUID{}).SinglePath() || a.SinglePath() || NameUUID(dns, "rdblk").SinglePath() {
		t.Error("single path: others have the form")
	}

	g, err := ParseNGUID("101112131415161718191a1b1c1d1e1f")
	if err != nil || g.String() != "101112131415161718191a1b1c1d1e1f" || g[0] != 0x10 || g.IsZero() || !(NGUID{}).IsZero() {
		t.Errorf("%v %v", g, err)
	}
	if g, err := ParseNGUID(text); err != nil || g != NGUID(u) {
		t.Errorf("%v %v", g, err)
	}
	e, err := ParseEUI64("0102030405060708")
	if err != nil || e.String() != "0102030405060708" || e[0] != 1 || e.IsZero() || !(EUI64{}).IsZero() {
		t.Errorf("%v %v", e, err)
	}
	for _, s := range []string{"", "01", "xx02030405060708", "010203040506070809"} {
		if _, err := ParseEUI64(s); !errors.Is(err, ErrInvalid) {
			t.Errorf("EUI64 %q: %v", s, err)
		}
		if _, err := ParseNGUID(s); !errors.Is(err, ErrInvalid) {
			t.Errorf("NGUID %q: %v", s, err)
		}
	}
}

func TestNQN(t *testing.T) {
	for _, tc := range []struct {
		nqn             string
		usable, allowed bool // CheckNQN, ValidateNQN
	}{
		{"nqn.2026-11.io.rdblk:host:disk.img", true, true},
		{DiscoveryNQN, true, true},
		{"nqn.2014-08.org.nvmexpress:uuid:00112233-4455-6677-8899-aabbccddeeff", true, true},
		{"nqn.2001-01.com.example:a:b:c", true, true},
		{"nqn.2001-01.com.example", true, true},
		{"nqn.2001-01.com.example:größe", true, true},
		{"nqn.2001-01.com.ex_ample-1:x", true, true},
		{"nqn.2001-01.c" + strings.Repeat(".x", 105), true, true}, // 223 bytes

		{"testnqn", true, false},
		{"blktests-subsystem-1", true, false},
		{"nqn.2014.08.org.nvmexpress:8086", true, false},
		{"nqn.2001-13.com.example:x", true, false},
		{"nqn.2001-00.com.example:x", true, false},
		{"nqn.20a1-01.com.example:x", true, false},
		{"nqn.2001-01.:x", true, false},
		{"nqn.2001-01..example:x", true, false},
		{"nqn.2001-01.-example:x", true, false},
		{"nqn.2001-01.com.exa!mple:x", true, false},
		{"nqn.2001-01.com." + strings.Repeat("x", 64), true, false},
		{"nqn.2001-01.", true, false},
		{"NQN.2001-01.com.example:x", true, false},
		{"nqn.2014-08.org.nvmexpress:uuid:1234", true, false},

		{"", false, false},
		{"nqn.2001-01.com.example:a b", false, false},
		{"nqn.2001-01.com.example:\n", false, false},
		{"nqn.2001-01.com.example:\x00", false, false},
		{"nqn.2001-01.com.example:\x7f", false, false},
		{"nqn.2001-01.com.example:\xff", false, false},
		{"nqn.2001-01.com.example:\u202e", false, false}, // turns the text around
		{"nqn.2001-01.c" + strings.Repeat(".x", 106), false, false},
	} {
		if err := CheckNQN(tc.nqn); (err == nil) != tc.usable || err != nil && !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: CheckNQN: %v", tc.nqn, err)
		}
		if err := ValidateNQN(tc.nqn); (err == nil) != tc.allowed || err != nil && !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: ValidateNQN: %v", tc.nqn, err)
		}
	}
	u := RandomUUID()
	if got, ok := NQNUUID(UUIDNQN(u)); !ok || got != u {
		t.Errorf("%v %v, want %v", got, ok, u)
	}
	if err := ValidateNQN(UUIDNQN(u)); err != nil {
		t.Error(err)
	}
	for _, s := range []string{DiscoveryNQN, "nqn.2014-08.org.nvmexpress:uuid:", "x"} {
		if _, ok := NQNUUID(s); ok {
			t.Errorf("%q has a UUID", s)
		}
	}
}
