package main

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"hash/crc32"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"

	"rdblk/internal/envtest"
)

// pcapOf writes an Ethernet capture: each packet from the initiator (dir 0) or the responder.
type pkt struct {
	dir  int
	seq  uint32
	syn  bool
	data []byte
}

func pcapOf(ps []pkt) []byte {
	var b bytes.Buffer
	le, be := binary.LittleEndian, binary.BigEndian
	head := make([]byte, pcapFileLen)
	le.PutUint32(head, pcapMicros)
	le.PutUint32(head[20:], linkEthernet)
	b.Write(head)
	for _, p := range ps {
		f := make([]byte, 14+20+20+len(p.data)+3) // 3 bytes of Ethernet padding
		be.PutUint16(f[12:], etherIPv4)
		ip := f[14:]
		ip[0], ip[9] = 0x45, protocolTCP
		be.PutUint16(ip[2:], uint16(40+len(p.data)))
		ends := [2][6]byte{{10, 0, 0, 1, 0x80, 0}, {10, 0, 0, 2, 0x11, 0x44}}
		src, dst := ends[p.dir], ends[1-p.dir]
		copy(ip[12:], src[:4])
		copy(ip[16:], dst[:4])
		tcp := ip[20:]
		copy(tcp, src[4:])
		copy(tcp[2:], dst[4:])
		be.PutUint32(tcp[4:], p.seq)
		tcp[12] = 5 << 4
		if p.syn {
			tcp[13] = flagSYN
		}
		copy(tcp[20:], p.data)
		e := make([]byte, pcapEntryLen)
		le.PutUint32(e[8:], uint32(len(f)))
		le.PutUint32(e[12:], uint32(len(f)))
		b.Write(e)
		b.Write(f)
	}
	return b.Bytes()
}

// fpdu builds one FPDU out of the bytes that follow the length, with CRC.
func fpdu(t testing.TB, hexHead string, payload string) []byte {
	h, err := hex.DecodeString(strings.ReplaceAll(hexHead, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	h = append(h, payload...)
	b := binary.BigEndian.AppendUint16(nil, uint16(len(h)))
	b = append(b, h...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// stream0 is what an initiator says: a Request that wants CRC, a Send in two FPDUs with a Write
// of odd length between them.
func stream0(t testing.TB) []byte {
	b := append([]byte("MPA ID Req Frame"), 0x50, 2, 0, 4, 0, 1, 0, 1)
	b = append(b, fpdu(t, "0143 00000000 00000000 00000001 00000000", "0123456789abcdef")...)
	b = append(b, fpdu(t, "c140 a1b2c300 0000000000001000", "odd")...)
	return append(b, fpdu(t, "4143 00000000 00000000 00000001 00000010", "yz")...)
}

func stream1(t testing.TB) []byte {
	b := append([]byte("MPA ID Rep Frame"), 0x10, 2, 0, 4, 0, 1, 0, 1)
	return append(b, fpdu(t, "4144 11223344 00000000 00000001 00000000", "answer")...)
}

func parse(file []byte) ([]message, error) {
	segs, err := readPcap(bytes.NewReader(file))
	if err != nil {
		return nil, err
	}
	cs, err := connections(segs)
	if err != nil || len(cs) == 0 {
		return nil, err
	}
	return messages(cs[0])
}

// However TCP cut, repeated and reordered it, and wherever the sequence number wraps, the
// messages are the same.
func TestReassembly(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	s0, s1 := stream0(t), stream1(t)
	for range 200 {
		isn := uint32(r.Uint64())
		if r.IntN(2) == 0 {
			isn = ^uint32(0) - uint32(r.IntN(60))
		}
		ps := []pkt{{dir: 0, seq: isn, syn: true}, {dir: 1, seq: 77, syn: true}}
		var mid []pkt
		for off := 0; off < len(s0); {
			n := 1 + r.IntN(len(s0)-off)
			mid = append(mid, pkt{dir: 0, seq: isn + 1 + uint32(off), data: s0[off : off+n]})
			if r.IntN(3) == 0 { // repeated, with more or less of what surrounds it
				a, z := r.IntN(off+1), off+r.IntN(n)
				mid = append(mid, pkt{dir: 0, seq: isn + 1 + uint32(a), data: s0[a : z+1]})
			}
			off += n
		}
		r.Shuffle(len(mid), func(i, j int) { mid[i], mid[j] = mid[j], mid[i] })
		ps = append(append(ps, mid...), pkt{dir: 1, seq: 78, data: s1})
		ms, err := parse(pcapOf(ps))
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, m := range ms {
			got = append(got, m.name()+" "+string(m.payload))
		}
		want := "MPA Request \x00\x01\x00\x01|Write odd|Send 0123456789abcdefyz|MPA Reply \x00\x01\x00\x01|SendInv answer"
		a := strings.Join(got, "|")
		// In one packet the Request, the Write and the Send may end together; their order holds anyway.
		if a != want {
			t.Fatalf("got %q, want %q", a, want)
		}
		if ms[1].stag != 0xa1b2c300 || ms[1].to != 0x1000 || ms[4].stag != 0x11223344 || ms[2].fpdus != 2 {
			t.Fatalf("headers: %+v", ms)
		}
	}
}

func TestRefuses(t *testing.T) {
	s0 := stream0(t)
	mk := func(change func(b []byte) []byte) []byte {
		b := change(bytes.Clone(s0))
		return pcapOf([]pkt{{seq: 9, syn: true}, {seq: 10, data: b}, {dir: 1, seq: 1, syn: true}, {dir: 1, seq: 2, data: stream1(t)}})
	}
	for name, change := range map[string]func(b []byte) []byte{
		"CRC":        func(b []byte) []byte { b[50] ^= 1; return b },
		"key":        func(b []byte) []byte { b[3] ^= 1; return b },
		"cut":        func(b []byte) []byte { return b[:len(b)-1] },
		"ulpdu zero": func(b []byte) []byte { b[24], b[25] = 0, 0; return b },
		"ulpdu max":  func(b []byte) []byte { b[24], b[25] = 255, 255; return b },
	} {
		if _, err := parse(mk(change)); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if _, err := parse(pcapOf([]pkt{{seq: 9, syn: true}, {seq: 12, data: s0}})); err == nil || !strings.Contains(err.Error(), "missing") {
		t.Errorf("hole: %v", err)
	}
}

// The golden files in protocol/testdata/kernel are what mpadump says they are.
func TestGolden(t *testing.T) {
	for name, want := range map[string]struct {
		size  int
		label string
	}{
		"admin-connect-capsule":             {64, "connect"},
		"io-connect-capsule":                {1088, "connect"},
		"admin-property-get-cap-capsule":    {64, "property-get-cap"},
		"admin-identify-ctrl-capsule":       {64, "identify-ctrl"},
		"admin-keep-alive-capsule":          {64, "keep-alive"},
		"io-read-131072-capsule":            {64, "read-131072"},
		"io-write-4096-capsule":             {4160, "write-4096"},
		"io-flush-capsule":                  {64, "flush"},
		"discovery-get-log-70-1024-capsule": {64, "get-log-70-1024"},
	} {
		b := envtest.Hex(t, filepath.Join("..", "..", "..", "protocol", "testdata", "kernel", name+".hex"))
		if len(b) != want.size {
			t.Errorf("%s: %d bytes, want %d", name, len(b), want.size)
			continue
		}
		if got := newCommand(b, !strings.HasPrefix(name, "io-")).label; got != want.label {
			t.Errorf("%s: label %q", name, got)
		}
	}
}

func FuzzPcap(f *testing.F) {
	s0 := stream0(f)
	f.Add(pcapOf([]pkt{{seq: 9, syn: true}, {seq: 10, data: s0}, {dir: 1, seq: 1, syn: true}, {dir: 1, seq: 2, data: stream1(f)}}))
	f.Add(pcapOf([]pkt{{seq: 9, syn: true}, {seq: 11, data: s0[1:]}, {seq: 10, data: s0[:9]}}))
	f.Fuzz(func(t *testing.T, file []byte) {
		if ms, err := parse(file); err == nil {
			_, _ = records(ms)
		}
	})
}
