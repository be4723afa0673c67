package protocol

import (
	"bytes"
	"math"
	"testing"
)

func TestSGL(t *testing.T) {
	var s SGL
	s.SetKeyed(0x0102030405060708, MaxKeyedLength, 0xA1A2A3A4, true)
	same(t, "keyed", s[:], []byte{8, 7, 6, 5, 4, 3, 2, 1, 0xFF, 0xFF, 0xFF, 0xA4, 0xA3, 0xA2, 0xA1, 0x4F})
	if s.Type() != SGLKeyedDataBlock || s.Subtype() != SGLSubtypeInvalidate || s.Address() != 0x0102030405060708 ||
		s.Length() != MaxKeyedLength || s.Key() != 0xA1A2A3A4 {
		t.Errorf("keyed: accessors disagree with %x", s)
	}
	s.SetInCapsule(0x10, 0xFFFFFFFF)
	same(t, "in capsule", s[:], []byte{0x10, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 1})
	if s.Type() != SGLDataBlock || s.Subtype() != SGLSubtypeOffset || s.Length() != 0xFFFFFFFF {
		t.Errorf("in capsule: accessors disagree with %x", s)
	}
	s.SetNoData()
	same(t, "no data", s[:], []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x40})
}

// TestData is the table of what a target owes each descriptor.
func TestData(t *testing.T) {
	const room = 4096
	in := Capsule{InCapsuleSize: room, Received: CommandSize + room}
	invalid := StatusInvalidField.WithDNR()
	offset := StatusSGLOffsetInvalid.WithDNR()
	length := StatusDataSGLLengthInvalid.WithDNR()
	badType := StatusSGLTypeInvalid.WithDNR()
	keyed := func(addr uint64, n uint32, inv bool) SGL {
		var s SGL
		s.SetKeyed(addr, n, 7, inv)
		return s
	}
	inCapsule := func(off uint64, n uint32) SGL {
		var s SGL
		s.SetInCapsule(off, n)
		return s
	}
	typed := func(b byte) SGL { return SGL{8: 1, 15: b} }
	for _, tc := range []struct {
		name   string
		sgl    SGL
		dir    Direction
		in     Capsule
		want   Data
		status Status
	}{
		{"keyed, one byte", typed(0x40), NoData, in, Data{Kind: DataKeyed, Len: 1}, 0},
		{"keyed without length", keyed(0x1000, 0, false), ControllerToHost, in, Data{}, 0},
		{"keyed without length, invalidate", keyed(0x1000, 0, true), ControllerToHost, in, Data{}, 0},
		{"keyed", keyed(0x1000, 512, false), HostToController, in, Data{Kind: DataKeyed, Addr: 0x1000, Len: 512, Key: 7}, 0},
		{"keyed, invalidate", keyed(0x1000, 512, true), ControllerToHost, in, Data{Kind: DataKeyed, Addr: 0x1000, Len: 512, Key: 7, Invalidate: true}, 0},
		{"keyed, largest", keyed(0, MaxKeyedLength, true), ControllerToHost, Capsule{Received: CommandSize},
			Data{Kind: DataKeyed, Len: MaxKeyedLength, Key: 7, Invalidate: true}, 0},
		{"keyed, last byte of memory", keyed(math.MaxUint64-512, 512, false), ControllerToHost, in,
			Data{Kind: DataKeyed, Addr: math.MaxUint64 - 512, Len: 512, Key: 7}, 0},
		{"keyed, wraps", keyed(math.MaxUint64-511, 512, false), ControllerToHost, in, Data{}, length},
		{"keyed, wraps far", keyed(math.MaxUint64, MaxKeyedLength, true), ControllerToHost, in, Data{}, length},
		{"keyed, offset subtype", typed(0x41), ControllerToHost, in, Data{}, invalid},
		{"keyed, subtype 14", typed(0x4E), ControllerToHost, in, Data{}, invalid},

		{"in capsule", inCapsule(0, 4096), HostToController, in, Data{Kind: DataInCapsule, Addr: 64, Len: 4096}, 0},
		{"in capsule, at an offset", inCapsule(512, 512), HostToController, in, Data{Kind: DataInCapsule, Addr: 576, Len: 512}, 0},
		{"in capsule, last byte", inCapsule(4095, 1), HostToController, in, Data{Kind: DataInCapsule, Addr: 4159, Len: 1}, 0},
		{"in capsule, nothing", inCapsule(0, 0), HostToController, in, Data{}, 0},
		{"in capsule, nothing at the end", inCapsule(4096, 0), HostToController, in, Data{}, 0},
		{"in capsule, nothing behind the end", inCapsule(4097, 0), HostToController, in, Data{}, offset},
		{"in capsule, one byte too long", inCapsule(1, 4096), HostToController, in, Data{}, offset},
		{"in capsule, too long", inCapsule(0, 0xFFFFFFFF), HostToController, in, Data{}, offset},
		{"in capsule, offset wraps", inCapsule(math.MaxUint64-10, 100), HostToController, in, Data{}, offset},
		{"in capsule, offset wraps to 0", inCapsule(math.MaxUint64, 1), HostToController, in, Data{}, offset},
		{"in capsule, none taken", inCapsule(0, 1), HostToController, Capsule{Received: 4160}, Data{}, offset},
		{"in capsule, read", inCapsule(0, 512), ControllerToHost, in, Data{}, invalid},
		{"in capsule, flush", inCapsule(0, 512), NoData, in, Data{}, invalid},
		{"in capsule, both", inCapsule(0, 512), Bidirectional, in, Data{}, invalid},
		{"all zero", SGL{}, HostToController, in, Data{}, invalid},
		{"data block, subtype 15", typed(0x0F), HostToController, in, Data{}, invalid},

		// What the Linux target does not look at: bytes that did not come.
		{"nothing came", inCapsule(0, 512), HostToController, Capsule{room, CommandSize}, Data{}, length},
		{"a byte is missing", inCapsule(0, 512), HostToController, Capsule{room, CommandSize + 511}, Data{}, length},
		{"just enough came", inCapsule(0, 512), HostToController, Capsule{room, CommandSize + 512}, Data{Kind: DataInCapsule, Addr: 64, Len: 512}, 0},
		{"behind what came", inCapsule(1024, 512), HostToController, Capsule{room, CommandSize + 512}, Data{}, length},
		{"short capsule", inCapsule(0, 1), HostToController, Capsule{room, 10}, Data{}, length},

		{"bit bucket", typed(0x10), ControllerToHost, in, Data{}, badType},
		{"segment", typed(0x20), ControllerToHost, in, Data{}, badType},
		{"last segment", typed(0x31), HostToController, in, Data{}, badType},
		{"transport", typed(0x5A), HostToController, in, Data{}, badType},
		{"vendor", typed(0xF0), HostToController, in, Data{}, badType},
	} {
		var c Command
		*c.SGL() = tc.sgl
		got, st := c.Data(tc.dir, tc.in)
		if got != tc.want || st != tc.status {
			t.Errorf("%s: %+v %v, want %+v %v", tc.name, got, st, tc.want, tc.status)
		}
	}
}

func TestDataLength(t *testing.T) {
	d := Data{Kind: DataKeyed, Len: 4096}
	bad := StatusDataSGLLengthInvalid.WithDNR()
	for _, tc := range []struct {
		got, want Status
	}{
		{d.Exactly(4096), StatusSuccess}, {d.Exactly(4095), bad}, {d.Exactly(4097), bad},
		{d.Exactly(1<<32 + 4096), bad}, // not compared modulo 2^32
		{d.AtLeast(4096), StatusSuccess}, {d.AtLeast(16), StatusSuccess}, {d.AtLeast(4097), bad},
		{d.AtLeast(1 << 34), bad},
		{d.None(), bad}, {Data{}.None(), StatusSuccess},
	} {
		if tc.got != tc.want {
			t.Errorf("got %v, want %v", tc.got, tc.want)
		}
	}
}

func TestDataBytes(t *testing.T) {
	capsule := make([]byte, CommandSize+1024)
	for i := range capsule {
		capsule[i] = byte(i)
	}
	c, _ := CommandView(capsule)
	c.Init(OpWrite, 1, 1)
	c.SetInCapsuleSGL(256, 512)
	d, st := c.Data(c.Direction(), Capsule{InCapsuleSize: 4096, Received: uint32(len(capsule))})
	if !st.OK() {
		t.Fatal(st)
	}
	got := d.Bytes(capsule)
	if !bytes.Equal(got, capsule[64+256:64+256+512]) {
		t.Errorf("wrong bytes")
	}
	if cap(got) != 512 {
		t.Errorf("bytes behind the data can be reached: capacity %d", cap(got))
	}
	if (Data{Kind: DataKeyed, Len: 5}).Bytes(capsule) != nil {
		t.Errorf("keyed data has bytes in the capsule")
	}
}
