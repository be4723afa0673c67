package protocol

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/big"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"
)

// seed adds golden records as they are, cut, and padded.
func seed(f *testing.F, records ...[]byte) {
	f.Helper()
	f.Add([]byte{})
	for _, b := range records {
		f.Add(b)
		f.Add(b[:len(b)/2])
		f.Add(append(bytes.Clone(b), 0xFF))
		f.Add(bytes.Repeat([]byte{0xFF}, len(b)))
	}
}

func goldens(f *testing.F, file string) [][]byte {
	f.Helper()
	var all [][]byte
	for _, b := range readGolden(f, file) {
		all = append(all, b)
	}
	return all
}

// fuzzStructure checks what every parser of a structure owes: no panic, no
// reading past the size, a result that survives being written and read again,
// and the bytes are not touched. Writing may refuse what a peer sent.
func fuzzStructure[T any, P interface {
	*T
	structure
}](f *testing.F, size int, seeds ...[]byte) {
	seed(f, seeds...)
	f.Fuzz(func(t *testing.T, b []byte) {
		before := bytes.Clone(b)
		var v T
		err := P(&v).UnmarshalBinary(b)
		if !bytes.Equal(b, before) {
			t.Fatal("the parser changed its input")
		}
		if err != nil {
			if !errors.Is(err, ErrShort) && !errors.Is(err, ErrFormat) && !errors.Is(err, ErrInvalid) {
				t.Fatalf("error without a sentinel: %v", err)
			}
			return
		}
		if len(b) > size {
			var cut T
			if err := P(&cut).UnmarshalBinary(b[:size]); err != nil || !reflect.DeepEqual(cut, v) {
				t.Fatalf("bytes behind %d matter: %v", size, err)
			}
		}
		out, err := P(&v).AppendBinary(nil)
		if err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Fatalf("append: %v", err)
			}
			return
		}
		if len(out) != size {
			t.Fatalf("%d bytes, want %d", len(out), size)
		}
		var again T
		if err := P(&again).UnmarshalBinary(out); err != nil {
			t.Fatalf("second parse: %v", err)
		}
		if !reflect.DeepEqual(again, v) {
			t.Fatalf("changed on the way:\n got %+v\nwant %+v", again, v)
		}
	})
}

func FuzzRDMAConnectRequest(f *testing.F) {
	r := readGolden(f, "worked-examples.hex")
	fuzzStructure[RDMAConnectRequest](f, RDMAConnectRequestSize, r["rdma connect request, admin queue of Linux"],
		r["rdma connect request, queue 1, depth 128, controller 1"])
}

func FuzzRDMAConnectAccept(f *testing.F) {
	fuzzStructure[RDMAConnectAccept](f, RDMAConnectAcceptSize, make([]byte, 32), []byte{0, 0, 0x80, 0})
}

func FuzzRDMAConnectReject(f *testing.F) {
	fuzzStructure[RDMAConnectReject](f, RDMAConnectRejectSize, []byte{0, 0, 6, 0}, make([]byte, 148))
}

func FuzzConnectData(f *testing.F) {
	fuzzStructure[ConnectData](f, ConnectDataSize, golden(f, "libnvme-connect-data.hex"))
}

func FuzzIdentifyController(f *testing.F) {
	fuzzStructure[IdentifyController](f, IdentifySize, golden(f, "identify-controller.hex"), golden(f, "libnvme-id-ctrl.hex"))
}

func FuzzIdentifyNamespace(f *testing.F) {
	fuzzStructure[IdentifyNamespace](f, IdentifySize, golden(f, "libnvme-id-ns.hex"))
}

func FuzzIdentifyNVMController(f *testing.F) {
	fuzzStructure[IdentifyNVMController](f, IdentifySize, golden(f, "libnvme-id-ctrl-nvm.hex"))
}

func FuzzIdentifyIndependentNamespace(f *testing.F) {
	fuzzStructure[IdentifyIndependentNamespace](f, IdentifySize, golden(f, "libnvme-id-independent-ns.hex"))
}

func FuzzSmartLog(f *testing.F) {
	fuzzStructure[SmartLog](f, SmartLogSize, golden(f, "libnvme-smart-log.hex"))
}

func FuzzErrorLogEntry(f *testing.F) {
	fuzzStructure[ErrorLogEntry](f, ErrorLogEntrySize, golden(f, "libnvme-error-log.hex"))
}

func FuzzFirmwareSlotLog(f *testing.F) {
	fuzzStructure[FirmwareSlotLog](f, FirmwareSlotLogSize, golden(f, "libnvme-fw-slot.hex"))
}

func FuzzEffectsLog(f *testing.F) {
	fuzzStructure[EffectsLog](f, EffectsLogSize, golden(f, "libnvme-effects.hex"))
}

func FuzzDiscoveryLogHeader(f *testing.F) {
	fuzzStructure[DiscoveryLogHeader](f, DiscoveryLogHeaderSize, golden(f, "libnvme-discovery-header.hex"))
}

func FuzzDiscoveryLogEntry(f *testing.F) {
	fuzzStructure[DiscoveryLogEntry](f, DiscoveryLogEntrySize, golden(f, "libnvme-discovery-entry.hex"))
}

// FuzzNamespaceIDs: the list ends, whatever its lengths say, and an identifier
// never reaches behind the list.
func FuzzNamespaceIDs(f *testing.F) {
	seed(f, golden(f, "namespace-descriptors.hex"), []byte{9, 3, 0, 0, 1, 2, 3, 4, 1, 0, 0, 2}, []byte{3, 255, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		before := bytes.Clone(b)
		total := 0
		for typ, id := range NamespaceDescriptors(b) {
			if len(id) == 0 || len(id) > 255 || cap(id) != len(id) || typ.String() == "" {
				t.Fatalf("%v: %d bytes, capacity %d", typ, len(id), cap(id))
			}
			total += 4 + len(id)
		}
		if total > len(b) || total > IdentifySize {
			t.Fatalf("%d bytes of descriptors in %d", total, len(b))
		}
		var v, again NamespaceIDs
		if err := v.UnmarshalBinary(b); err != nil && !errors.Is(err, ErrInvalid) {
			t.Fatalf("error without a sentinel: %v", err)
		}
		out, err := v.AppendBinary(nil)
		if err != nil || len(out) != IdentifySize {
			t.Fatalf("append: %d bytes, %v", len(out), err)
		}
		if err := again.UnmarshalBinary(out); err != nil || again != v {
			t.Fatalf("changed on the way: %+v %v, want %+v", again, err, v)
		}
		if !bytes.Equal(b, before) {
			t.Fatal("the parser changed its input")
		}
	})
}

// FuzzNamespaceLists covers the active and the changed namespace list.
func FuzzNamespaceLists(f *testing.F) {
	seed(f, golden(f, "libnvme-ns-list.hex"), AppendNamespaceList(nil, []uint32{1, 2, 3}))
	f.Fuzz(func(t *testing.T, b []byte) {
		active := collect(NamespaceList(b))
		for i, n := range active {
			if n == 0 || i > 0 && n <= active[i-1] {
				t.Fatalf("entry %d of %v", i, active)
			}
		}
		if again := collect(NamespaceList(AppendNamespaceList(nil, active))); !reflect.DeepEqual(again, active) {
			t.Fatalf("%v, want %v", again, active)
		}
		changed := collect(ChangedNamespaces(b))
		if len(changed) > MaxNamespaceList || len(active) > len(changed) {
			t.Fatalf("%d active, %d changed", len(active), len(changed))
		}
		if again := collect(ChangedNamespaces(AppendChangedNamespaces(nil, changed))); !reflect.DeepEqual(again, changed) {
			t.Fatalf("%v, want %v", again, changed)
		}
	})
}

// FuzzCommand: whatever the 64 bytes are, no accessor panics, the description is
// one printable line, and setting a field to what it was changes nothing.
func FuzzCommand(f *testing.F) {
	for _, b := range append(goldens(f, "worked-examples.hex"), goldens(f, "commands.hex")...) {
		f.Add(b, true)
		f.Add(b, false)
	}
	f.Add(bytes.Repeat([]byte{0xFF}, CommandSize), true)
	f.Fuzz(func(t *testing.T, b []byte, admin bool) {
		v, ok := CommandView(b)
		if ok != (len(b) >= CommandSize) {
			t.Fatalf("view of %d bytes: %v", len(b), ok)
		}
		if !ok {
			return
		}
		line := Describe(v, admin)
		if line == "" || !utf8.ValidString(line) || strings.ContainsFunc(line, func(r rune) bool { return r < ' ' || r > '~' }) {
			t.Fatalf("described as %q", line)
		}
		c := *v
		c.SetOpcode(v.Opcode())
		c.SetAdminOpcode(v.AdminOpcode())
		c.SetFlags(v.Flags())
		c.SetID(v.ID())
		c.SetNSID(v.NSID())
		c.SetFabricsType(v.FabricsType())
		c.SetSLBA(v.SLBA())
		c.SetBlocks(v.Blocks())
		c.SetControl(v.Control())
		c.SetFUA(v.FUA())
		c.SetDEAC(v.DEAC())
		c.SetCNS(v.CNS())
		c.SetCNTID(v.CNTID())
		c.SetIdentifyCSI(v.IdentifyCSI())
		c.SetFID(v.FID())
		c.SetSEL(v.SEL())
		c.SetSV(v.SV())
		c.SetFeatureValue(v.FeatureValue())
		c.SetLID(v.LID())
		c.SetLSP(v.LSP())
		c.SetRAE(v.RAE())
		c.SetLSI(v.LSI())
		c.SetLogCSI(v.LogCSI())
		c.SetRECFMT(v.RECFMT())
		if n := v.LogLength(); n <= 0xFFFFFFFC {
			c.SetLogLength(uint32(n))
		}
		if v.LPO()%4 == 0 {
			c.SetLPO(v.LPO())
		}
		for i := range CommandSize / 4 {
			c.SetDW(i, v.DW(i))
		}
		if c != *v {
			t.Fatalf("setters change\n%x to\n%x", *v, c)
		}
		if v.Blocks() < 1 || v.Blocks() > MaxBlocks || v.DSMRangeCount() < 1 || v.DSMRangeCount() > MaxDSMRanges || v.LogLength() > 1<<34 {
			t.Fatal("a count is outside its field")
		}
		if n := v.PropertySize(); n != 0 && n != 4 && n != 8 {
			t.Fatalf("property of %d bytes", n)
		}
	})
}

// FuzzCommandSGL checks the data pointer against big integers: what is accepted
// lies inside what was advertised, what was received and what memory there is.
func FuzzCommandSGL(f *testing.F) {
	for _, b := range append(goldens(f, "worked-examples.hex"), goldens(f, "commands.hex")...) {
		if len(b) == CommandSize {
			f.Add(b[24:40], uint8(1), uint32(4096), uint32(4160))
			f.Add(b[24:40], uint8(2), uint32(0), uint32(64))
		}
	}
	f.Add(bytes.Repeat([]byte{0xFF}, 16), uint8(1), uint32(0xFFFFFFFF), uint32(0xFFFFFFFF))
	f.Add([]byte{0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 1, 0, 0, 0, 0, 0, 0, 1}, uint8(1), uint32(4096), uint32(4160))
	f.Fuzz(func(t *testing.T, sgl []byte, dir uint8, room, received uint32) {
		if len(sgl) < SGLSize {
			return
		}
		var c Command
		*c.SGL() = SGL(sgl)
		d, st := c.Data(Direction(dir), Capsule{InCapsuleSize: room, Received: received})
		if !st.OK() {
			if !st.DoNotRetry() || d != (Data{}) {
				t.Fatalf("%v with %+v", st, d)
			}
			return
		}
		if (d.Kind == DataNone) != (d.Len == 0) || d.Len == 0 && d != (Data{}) {
			t.Fatalf("%+v", d)
		}
		end := new(big.Int).Add(bigOf(d.Addr), bigOf(uint64(d.Len)))
		switch d.Kind {
		case DataKeyed:
			if d.Len > MaxKeyedLength || !end.IsUint64() || sgl[15]>>4 != 4 ||
				d.Addr != binary.LittleEndian.Uint64(sgl) || d.Key != binary.LittleEndian.Uint32(sgl[11:]) {
				t.Fatalf("%+v", d)
			}
		case DataInCapsule:
			if Direction(dir) != HostToController || d.Addr < CommandSize || end.Cmp(bigOf(uint64(received))) > 0 ||
				end.Cmp(bigOf(uint64(room)+CommandSize)) > 0 || d.Invalidate || d.Key != 0 {
				t.Fatalf("%+v of a capsule of %d bytes with room for %d", d, received, room)
			}
			if received < 1<<20 {
				if got := d.Bytes(make([]byte, received)); len(got) != int(d.Len) {
					t.Fatalf("%d bytes, want %d", len(got), d.Len)
				}
			}
		}
	})
}

// FuzzCompletion: the description of a completion is one printable line whatever
// command it answers.
func FuzzCompletion(f *testing.F) {
	for _, b := range goldens(f, "worked-examples.hex") {
		f.Add(b, b, true)
	}
	f.Add(bytes.Repeat([]byte{0xFF}, CompletionSize), bytes.Repeat([]byte{0xFF}, CommandSize), false)
	f.Fuzz(func(t *testing.T, b, command []byte, admin bool) {
		e, ok := CompletionView(b)
		if ok != (len(b) >= CompletionSize) {
			t.Fatalf("view of %d bytes: %v", len(b), ok)
		}
		if !ok {
			return
		}
		c, _ := CommandView(command)
		line := DescribeCompletion(e, c, admin)
		if line == "" || strings.ContainsFunc(line, func(r rune) bool { return r < ' ' || r > '~' }) {
			t.Fatalf("described as %q", line)
		}
		s := e.Status()
		again := *e
		again.SetStatus(s)
		again[14] |= e[14] & 1 // the phase is always written as 0
		again.SetResult(e.Result())
		again.SetSQHD(e.SQHD())
		again.SetSQID(e.SQID())
		again.SetID(e.ID())
		if again != *e {
			t.Fatalf("setters change %x to %x", *e, again)
		}
		if s.OK() != (s.Errno() == 0) || s.OK() != (s.Err() == nil) {
			t.Fatalf("%v: errno %v", s, s.Errno())
		}
	})
}

// FuzzDSMRanges: the view is inside the data, and a range that is accepted fits
// the namespace.
func FuzzDSMRanges(f *testing.F) {
	f.Add(golden(f, "libnvme-dsm-range.hex"), 1, uint64(1<<62))
	f.Add(bytes.Repeat([]byte{0xFF}, 4096), 256, ^uint64(0))
	f.Add([]byte{}, -1, uint64(0))
	f.Fuzz(func(t *testing.T, b []byte, n int, nsze uint64) {
		r, ok := DSMRangesView(b, n)
		if !ok {
			if n >= 0 && n <= MaxDSMRanges && len(b) >= n*DSMRangeSize {
				t.Fatalf("%d ranges in %d bytes refused", n, len(b))
			}
			return
		}
		if r.Len() != n || cap(r) != len(r) {
			t.Fatalf("%d ranges, want %d", r.Len(), n)
		}
		inside := true
		var out []byte
		for d := range r.All() {
			end := new(big.Int).Add(bigOf(d.SLBA), bigOf(uint64(d.NLB)))
			inside = inside && end.Cmp(bigOf(nsze)) <= 0
			out = AppendDSMRange(out, d)
		}
		if inside != r.Inside(nsze) {
			t.Fatalf("inside %v, want %v", r.Inside(nsze), inside)
		}
		if !bytes.Equal(out, r) {
			t.Fatalf("% x, want % x", out, []byte(r))
		}
	})
}

// FuzzNQN: a name that passes can be put on the wire and comes back the same.
func FuzzNQN(f *testing.F) {
	for _, s := range []string{DiscoveryNQN, "nqn.2014-08.org.nvmexpress:uuid:00112233-4455-6677-8899-aabbccddeeff",
		"testnqn", "nqn.2001-01.com.example:\xff", "nqn.2001-01.com.example:größe", "", "nqn.", strings.Repeat("x", 256)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		strict, loose := ValidateNQN(s), CheckNQN(s)
		if strict == nil && loose != nil {
			t.Fatalf("%q is valid but not usable", s)
		}
		d := ConnectData{SUBNQN: s, HOSTNQN: DiscoveryNQN}
		b, err := d.AppendBinary(nil)
		if (err == nil) != (loose == nil) {
			t.Fatalf("%q: %v, %v", s, loose, err)
		}
		if err != nil {
			return
		}
		var got ConnectData
		if err := got.UnmarshalBinary(b); err != nil || got != d {
			t.Fatalf("%q comes back as %q", s, got.SUBNQN)
		}
		if strings.ContainsAny(s, " \t\r\n\x00") || len(s) > MaxNQNLength {
			t.Fatalf("%q is usable", s)
		}
	})
}

// FuzzIDs: what parses prints as what it was.
func FuzzIDs(f *testing.F) {
	for _, s := range []string{"00112233-4455-6677-8899-aabbccddeeff", "101112131415161718191a1b1c1d1e1f", "0102030405060708", "", "--------"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if u, err := ParseUUID(s); err == nil && !strings.EqualFold(u.String(), s) {
			t.Fatalf("UUID %q is %v", s, u)
		}
		if g, err := ParseNGUID(s); err == nil && !strings.EqualFold(g.String(), strings.ReplaceAll(s, "-", "")) {
			t.Fatalf("NGUID %q is %v", s, g)
		}
		if e, err := ParseEUI64(s); err == nil && !strings.EqualFold(e.String(), s) {
			t.Fatalf("EUI64 %q is %v", s, e)
		}
	})
}

// FuzzRanges checks the arithmetic against big integers.
func FuzzRanges(f *testing.F) {
	for _, a := range edges {
		f.Add(a, uint64(1), a, uint8(9))
		f.Add(a, a, uint64(1<<40), uint8(12))
	}
	f.Fuzz(func(t *testing.T, off, n, limit uint64, shift uint8) {
		end := new(big.Int).Add(bigOf(off), bigOf(n))
		inside := end.Cmp(bigOf(limit)) <= 0
		if RangeOK(off, n, limit) != inside {
			t.Fatalf("%d+%d in %d", off, n, limit)
		}
		o, l, ok := ByteRange(off, n, shift, limit)
		if want := inside && new(big.Int).Lsh(end, uint(shift)).IsInt64(); ok != want {
			t.Fatalf("%d+%d blocks of 2^%d in %d: %v", off, n, shift, limit, ok)
		}
		if ok && (o < 0 || l < 0 || o+l < 0) {
			t.Fatalf("%d+%d bytes", o, l)
		}
		page := make([]byte, limit%64)
		if w := LogWindow(page, off, n); uint64(len(w)) > n || len(w) > len(page) {
			t.Fatalf("window of %d bytes", len(w))
		}
	})
}
