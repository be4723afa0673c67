package nbd

import (
	"bytes"
	"encoding/hex"
	"errors"
	"maps"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

func littleEndian() bool {
	x := uint16(1)
	return *(*byte)(unsafe.Pointer(&x)) == 1
}

func hexBytes(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// The bytes follow from linux/netlink.h, linux/genetlink.h and linux/nbd-netlink.h, put
// together by hand, on a little-endian machine.
func TestNetlinkGolden(t *testing.T) {
	if !littleEndian() {
		t.Skip("the golden bytes are little-endian")
	}
	b := binding{index: 3, size: 1 << 30, blockSize: 512, timeout: 0, deadConn: 660, serverFlags: 0x12d, backend: "rdblk", sockets: []int{7, 8}}
	const common = `
		08000100 03000000
		0c000200 0000004000000000
		0c000300 0002000000000000
		0c000400 0000000000000000
		0c000800 9402000000000000
		0c000600 0000000000000000`
	const tail = `
		0a000a00 7264626c6b00 0000
		1c000780 0c000180 08000100 07000000 0c000180 08000100 08000000`
	connect := hexBytes(t, common+"0c000500 2d01000000000000"+tail)
	if got := b.attrs(genlConnect); !bytes.Equal(got, connect) {
		t.Errorf("CONNECT\n%x, want\n%x", got, connect)
	}
	if got := b.attrs(genlReconfigure); !bytes.Equal(got, hexBytes(t, common+tail)) {
		t.Errorf("RECONFIGURE\n%x", got)
	}
	got := appendMessage(nil, 0x21, 1, genlDisconnect, genlVersionNBD, appendU32(nil, attrIndex, 3))
	if want := hexBytes(t, "1c000000 2100 0500 01000000 00000000 02010000 08000100 03000000"); !bytes.Equal(got, want) {
		t.Errorf("DISCONNECT\n%x, want\n%x", got, want)
	}

	// An answer on CONNECT and the acknowledgement, with another request's error before them.
	var a nlAnswer
	if err := a.add(hexBytes(t, `24000000 0200 0000 09000000 00000000 f0ffffff 00000000 00000000 00000000 00000000
		1c000000 2100 0000 01000000 00000000 01000000 08000100 03000000
		24000000 0200 0000 01000000 00000000 00000000 1c000000 21000500 01000000 00000000`), 1); err != nil {
		t.Fatal(err)
	}
	if i, err := parseIndex(a.attrs); !a.done || a.errno != 0 || a.cmd != genlConnect || i != 3 || err != nil {
		t.Errorf("%+v, index %d, %v", a, i, err)
	}
	a = nlAnswer{}
	if err := a.add(hexBytes(t, "24000000 0200 0000 01000000 00000000 f0ffffff 1c000000 21000500 01000000 00000000"), 1); err != nil || !a.done || a.errno != unix.EBUSY {
		t.Errorf("%+v, %v", a, err)
	}
	m, err := parseStatus(hexBytes(t, "2c000900 14000100 08000100 00000000 05000200 01000000 14000100 08000100 01000000 05000200 00000000"))
	if err != nil || !maps.Equal(m, map[int]bool{0: true, 1: false}) {
		t.Errorf("status %v, %v", m, err)
	}
	if id, err := parseFamily(hexBytes(t, "08000200 6e626400 06000100 21000000")); id != 0x21 || err != nil {
		t.Errorf("family %d, %v", id, err)
	}
}

func TestNetlinkMalformed(t *testing.T) {
	if !littleEndian() {
		t.Skip("the bytes are little-endian")
	}
	for _, c := range []struct{ name, bytes string }{
		{"half a header", "080001"},
		{"shorter than its header", "03000100"},
		{"longer than the message", "0c000100 03000000"},
		{"index of two bytes", "06000100 03000000"},
		{"index out of range", "08000100 ffffffff"},
		{"no index", "08000b00 03000000"},
	} {
		if i, err := parseIndex(hexBytes(t, c.bytes)); !errors.Is(err, errMessage) {
			t.Errorf("%s: %d, %v", c.name, i, err)
		}
	}
	for _, c := range []struct{ name, bytes string }{
		{"item without index", "10000900 0c000100 05000200 01000000"},
		{"connected of four bytes", "18000900 14000100 08000100 00000000 08000200 01000000"},
		{"item longer than the list", "0c000900 14000100 08000100"},
	} {
		if m, err := parseStatus(hexBytes(t, c.bytes)); !errors.Is(err, errMessage) {
			t.Errorf("%s: %v, %v", c.name, m, err)
		}
	}
	for _, c := range []struct{ name, bytes string }{
		{"half a header", "10000000 0200"},
		{"shorter than its header", "0f000000 0200 0000 01000000 00000000"},
		{"longer than the datagram", "11000000 0200 0000 01000000 00000000"},
		{"an error without number", "12000000 0200 0000 01000000 00000000 0000"},
		{"an error that is none", "14000000 0200 0000 01000000 00000000 05000000"},
		{"no generic header", "12000000 2100 0000 01000000 00000000 0000"},
	} {
		var a nlAnswer
		if err := a.add(hexBytes(t, c.bytes), 1); !errors.Is(err, errMessage) {
			t.Errorf("%s: %+v, %v", c.name, a, err)
		}
	}
	if id, err := parseFamily(nil); !errors.Is(err, errMessage) {
		t.Errorf("no family: %d, %v", id, err)
	}
}

// The real controller knows itself: socket, request and answer work on this machine, with or without nbd.
func TestNetlinkController(t *testing.T) {
	a, err := ask(unix.GENL_ID_CTRL, ctrlGetFamily, 1, appendAttr(nil, ctrlAttrFamilyName, []byte("nlctrl\x00")))
	if err != nil {
		t.Fatal(err)
	}
	if id, err := parseFamily(a.attrs); id != unix.GENL_ID_CTRL || err != nil {
		t.Errorf("nlctrl is family %d, %v", id, err)
	}
	if id, err := lookupFamily(); err != nil && !errors.Is(err, errNoFamily) || err == nil && id < unix.NLMSG_MIN_TYPE {
		t.Errorf("nbd is family %d, %v", id, err)
	}
}

func FuzzNetlink(f *testing.F) {
	f.Add([]byte{})
	b := binding{index: 3, size: 1 << 30, blockSize: 512, backend: "rdblk", sockets: []int{7, 8}}
	f.Add(appendMessage(nil, 0x21, 1, genlConnect, 1, b.attrs(genlConnect)))
	f.Add(appendMessage(nil, unix.NLMSG_ERROR, 1, 0xf0, 0xff, []byte{0, 0, 0, 0}))
	f.Add(appendMessage(nil, 0x21, 1, genlStatus, 1, appendAttr(nil, attrDeviceList|attrNested,
		appendAttr(nil, attrDeviceItem|attrNested, append(appendU32(nil, attrDeviceIndex, 1), appendAttr(nil, attrDeviceConnected, []byte{1})...)))))
	f.Fuzz(func(t *testing.T, data []byte) {
		var a nlAnswer
		if a.add(data, 1) != nil {
			return
		}
		if a.done && a.errno > 4095 {
			t.Errorf("errno %d", a.errno)
		}
		if i, err := parseIndex(a.attrs); err == nil && (i < 0 || i > maxIndex) {
			t.Errorf("index %d", i)
		}
		if m, err := parseStatus(a.attrs); err == nil {
			for i := range m {
				if i < 0 || i > maxIndex {
					t.Errorf("index %d", i)
				}
			}
		}
		if id, err := parseFamily(a.attrs); err == nil && id < unix.NLMSG_MIN_TYPE {
			t.Errorf("family %d", id)
		}
	})
}
