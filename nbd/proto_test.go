package nbd

import (
	"bytes"
	"encoding/hex"
	"strings"
	"testing"
)

func unhex(s string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		panic(err)
	}
	return b
}

// The bytes are laid out by hand after "Request message", "Simple reply message" and
// "Structured reply chunk message" of proto.md.
func TestGoldenBytes(t *testing.T) {
	r, ok := parseRequest(unhex("25609513 0001 0006 0102030405060708 0000001000000000 00010000"))
	if want := (request{flags: cmdFlagFUA, cmd: cmdWriteZeroes, cookie: 0x0102030405060708, off: 64 << 30, length: 65536}); !ok || r != want {
		t.Errorf("request %+v %v, want %+v", r, ok, want)
	}
	for _, magic := range []string{"12560953", "25609514", "21e41c71", "67446698"} {
		if _, ok := parseRequest(unhex(magic + strings.Repeat("00", 24))); ok {
			t.Errorf("magic number %s was taken", magic)
		}
	}
	b := make([]byte, 64)
	for _, c := range []struct {
		name string
		n    int
		want string
	}{
		{"simple", putSimpleReply(b, ENOSPC, 0x1122334455667788), "67446698 0000001c 1122334455667788"},
	} {
		if !bytes.Equal(b[:c.n], unhex(c.want)) {
			t.Errorf("%s: %x", c.name, b[:c.n])
		}
	}
	n := putDataChunk(b, 0x1122334455667788, 0x200, 512)
	if want := unhex("668e33ef 0001 0001 1122334455667788 00000208 0000000000000200"); !bytes.Equal(b[:n], want) {
		t.Errorf("data chunk: %x", b[:n])
	}
	n = putErrorChunk(b, EINVAL, 0x1122334455667788, "why")
	if want := unhex("668e33ef 0001 8001 1122334455667788 00000009 00000016 0003 776879"); !bytes.Equal(b[:n], want) {
		t.Errorf("error chunk: %x", b[:n])
	}
}

func TestClip(t *testing.T) {
	long := strings.Repeat("ä", 200)
	for _, s := range []string{"", "short", long, "a" + long} {
		got := clip(s)
		if len(got) > maxWhy || !strings.HasPrefix(s, got) || len(got) < min(len(s), maxWhy-3) {
			t.Errorf("clip(%d bytes) = %d bytes", len(s), len(got))
		}
		if strings.ContainsRune(got, '\uFFFD') {
			t.Error("cut inside a character")
		}
	}
}

func TestParseInfo(t *testing.T) {
	for _, c := range []struct {
		data       string
		name, reqs string
		ok         bool
	}{
		{"00000000 0000", "", "", true},
		{"00000003 616263 0000", "abc", "", true},
		{"00000003 616263 0002 0000 0003", "abc", "00000003", true},
		{"", "", "", false},
		{"00000000 00", "", "", false},
		{"00000001 0000", "", "", false},
		{"00000000 0001", "", "", false},         // one request announced, none there
		{"00000000 0000 0001", "", "", false},    // and the reverse
		{"00000000 0001 0001 00", "", "", false}, // half a request
		{"ffffffff 0000", "", "", false},
		{"00000004 616263 0000", "", "", false},
		{"80000000 616263 0000", "", "", false},
	} {
		name, reqs, ok := parseInfo(unhex(c.data))
		if ok != c.ok || ok && (string(name) != c.name || hex.EncodeToString(reqs) != c.reqs) {
			t.Errorf("%s: %q %x %v", c.data, name, reqs, ok)
		}
	}
	if _, _, ok := parseInfo(append(append([]byte{0, 0, 0x10, 1}, make([]byte, 4097)...), 0, 0)); ok {
		t.Error("a name of 4097 bytes was taken")
	}
	if _, _, ok := parseInfo(append(append([]byte{0, 0, 0x10, 0}, make([]byte, 4096)...), 0, 0)); !ok {
		t.Error("a name of 4096 bytes was refused")
	}
}
