package protocol

import (
	"bytes"
	"errors"
	"strings"
	"testing"
)

func TestRDMAConnectRequest(t *testing.T) {
	records := readGolden(t, "worked-examples.hex")
	for name, want := range map[string]RDMAConnectRequest{
		"rdma connect request, admin queue of Linux":             {QID: 0, HRQSIZE: 32, HSQSIZE: 31},
		"rdma connect request, queue 1, depth 128, controller 1": {QID: 1, HRQSIZE: 128, HSQSIZE: 127, CNTLID: 1},
	} {
		t.Run(name, func(t *testing.T) {
			checkStructure(t, &want, records[name], RDMAConnectRequestSize)
			if want.Depth() != int(want.HRQSIZE) || want.Check() != nil {
				t.Errorf("depth %d, check %v", want.Depth(), want.Check())
			}
			// InfiniBand and RoCE deliver 56 bytes.
			var r RDMAConnectRequest
			if err := r.UnmarshalBinary(append(bytes.Clone(records[name]), make([]byte, 24)...)); err != nil || r != want {
				t.Errorf("padded: %+v %v", r, err)
			}
		})
	}
}

// TestRDMAConnectRequestRefused: each bad request carries the status to answer
// with.
func TestRDMAConnectRequestRefused(t *testing.T) {
	good, _ := (&RDMAConnectRequest{QID: 1, HRQSIZE: 2, HSQSIZE: 1}).AppendBinary(nil)
	for _, tc := range []struct {
		name string
		b    []byte
		want RejectStatus
		also error
	}{
		{"nothing", nil, RejectInvalidLength, ErrShort},
		{"short", good[:31], RejectInvalidLength, ErrShort},
		{"record format", append([]byte{0, 1}, good[2:]...), RejectInvalidRECFMT, ErrFormat},
	} {
		var r RDMAConnectRequest
		err := r.UnmarshalBinary(tc.b)
		var s RejectStatus
		if !errors.As(err, &s) || s != tc.want || !errors.Is(err, tc.also) {
			t.Errorf("%s: %v, want %v and %v", tc.name, err, tc.want, tc.also)
		}
		if r != (RDMAConnectRequest{}) {
			t.Errorf("%s: changed the result", tc.name)
		}
	}
	for want, r := range map[RejectStatus]RDMAConnectRequest{
		RejectInvalidHSQSIZE: {HRQSIZE: 1},
		RejectInvalidHRQSIZE: {HSQSIZE: 1},
	} {
		if err := r.Check(); !errors.Is(err, want) {
			t.Errorf("%+v: %v, want %v", r, err, want)
		}
	}
	if d := (&RDMAConnectRequest{HSQSIZE: 0xFFFF}).Depth(); d != 65536 {
		t.Errorf("depth %d", d)
	}
}

func TestRDMAConnectAccept(t *testing.T) {
	want := RDMAConnectAccept{CRQSIZE: 128}
	b := append([]byte{0, 0, 0x80, 0}, make([]byte, 28)...)
	checkStructure(t, &want, b, 4)
	var a RDMAConnectAccept
	if err := a.UnmarshalBinary(append(bytes.Clone(b), make([]byte, 164)...)); err != nil || a != want {
		t.Errorf("padded to 196 bytes: %+v %v", a, err)
	}
	if err := a.UnmarshalBinary([]byte{1, 0, 0x80, 0}); !errors.Is(err, ErrFormat) {
		t.Errorf("record format: %v", err)
	}
}

func TestRDMAConnectReject(t *testing.T) {
	want := RDMAConnectReject{Status: RejectNoResources}
	checkStructure(t, &want, []byte{0, 0, 6, 0}, RDMAConnectRejectSize)
	var r RDMAConnectReject
	if err := r.UnmarshalBinary(append([]byte{0, 0, 6, 0}, make([]byte, 144)...)); err != nil || r != want {
		t.Errorf("padded to 148 bytes: %+v %v", r, err)
	}
	if err := r.UnmarshalBinary([]byte{0, 1, 6, 0}); !errors.Is(err, ErrFormat) {
		t.Errorf("record format: %v", err)
	}
	for s, n := range map[RejectStatus]int{
		RejectInvalidLength: 1, RejectInvalidRECFMT: 2, RejectInvalidQID: 3, RejectInvalidHSQSIZE: 4, RejectInvalidHRQSIZE: 5,
		RejectNoResources: 6, RejectInvalidIRD: 7, RejectInvalidORD: 8, RejectInvalidControllerID: 10,
	} {
		if int(s) != n || strings.Contains(s.Error(), "RejectStatus") {
			t.Errorf("%v is %d, want %d", s, int(s), n)
		}
	}
}

func TestConnectDataNames(t *testing.T) {
	const host = "nqn.2014-08.org.nvmexpress:uuid:00112233-4455-6677-8899-aabbccddeeff"
	good := ConnectData{HOSTID: UUID{1}, CNTLID: CNTLIDDynamic, SUBNQN: "testnqn", HOSTNQN: host}
	if f, err := good.Check(); err != nil || f != 0 {
		t.Errorf("%v %v", f, err)
	}
	for _, tc := range []struct {
		name     string
		sub, hst string
		want     ConnectInvalid
	}{
		{"no subsystem", "", host, ConnectInvalidSUBNQN},
		{"long subsystem", strings.Repeat("x", 224), host, ConnectInvalidSUBNQN},
		{"subsystem with an escape", "nqn.\x1b[2J", host, ConnectInvalidSUBNQN},
		{"no host", "testnqn", "", ConnectInvalidHOSTNQN},
		{"host with a NUL", "testnqn", "a\x00b", ConnectInvalidHOSTNQN},
	} {
		d := ConnectData{SUBNQN: tc.sub, HOSTNQN: tc.hst}
		if f, err := d.Check(); f != tc.want || !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v %v, want %v", tc.name, f, err, tc.want)
		}
		if b, err := d.AppendBinary([]byte{1}); !errors.Is(err, ErrInvalid) || len(b) != 1 {
			t.Errorf("%s: appended %d bytes, %v", tc.name, len(b)-1, err)
		}
	}
	// Names that are not terminated: all 256 bytes, and Check refuses.
	b, err := good.AppendBinary(nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 256 {
		b[256+i] = 'a'
	}
	var d ConnectData
	if err := d.UnmarshalBinary(b); err != nil || len(d.SUBNQN) != 256 || d.HOSTNQN != host {
		t.Errorf("not terminated: %v, %d bytes", err, len(d.SUBNQN))
	}
	if f, err := d.Check(); f != ConnectInvalidSUBNQN || err == nil {
		t.Errorf("not terminated: %v %v", f, err)
	}
	// Numbers that hosts find in DW0.
	for f, want := range map[ConnectInvalid]uint32{
		ConnectInvalidQID: 0x2A, ConnectInvalidSQSIZE: 0x2C, ConnectInvalidCNTLID: 0x10010,
		ConnectInvalidSUBNQN: 0x10100, ConnectInvalidHOSTNQN: 0x10200, ConnectInvalidHostID: 0x10000,
	} {
		if uint32(f) != want || f.InData() != (want>>16 == 1) || f.Offset() != uint16(want) {
			t.Errorf("%v is %#x, want %#x", f, uint32(f), want)
		}
	}
}

func TestConnectResult(t *testing.T) {
	for r, auth := range map[ConnectResult]bool{
		0x00000001: false, 0x0000FFEF: false, 0x00020001: true, 0x00040001: true, 0x00010001: true, 0xFFF80001: false,
	} {
		if r.AuthRequired() != auth || r.CNTLID() != uint16(r) {
			t.Errorf("%#x: auth %v, CNTLID %d", uint32(r), r.AuthRequired(), r.CNTLID())
		}
	}
}
