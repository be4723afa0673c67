package nbd

import (
	"encoding/binary"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/nbd/nbdtest"
)

// fuzzServer serves a small device on socket pairs.
func fuzzServer(f *testing.F) *Server {
	s, err := NewServer(Config{
		Exports:          []Export{{Name: "", Device: tryMemDevice{newMemDevice(1 << 20)}}, {Name: "other", Device: newMemDevice(1 << 16)}},
		Workers:          1,
		QueueMemory:      1 << 20,
		MaxInFlight:      8,
		MaxConnBytes:     128 << 10,
		MaxPayload:       256 << 10,
		HandshakeTimeout: 5 * time.Second,
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() {
		if err := s.Close(); err != nil {
			f.Error(err)
		}
	})
	return s
}

// pair gives both ends of a connection.
func pair(t testing.TB) (server, client *net.UnixConn) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	return fileConn(t, fds[0]), fileConn(t, fds[1])
}

// feed sends b, closes the sending side, and reads all that comes until the server closes.
func feed(t testing.TB, s *Server, b []byte) []byte {
	server, client := pair(t)
	defer client.Close()
	client.SetDeadline(time.Now().Add(patience))
	s.admit(server)
	go func() {
		client.Write(b) // the server may close in the middle
		client.CloseWrite()
	}()
	got, err := io.ReadAll(client)
	if err != nil && isTimeout(err) {
		t.Fatalf("the server neither answers nor closes (%d bytes came)", len(got))
	}
	return got
}

func isTimeout(err error) bool {
	ne, ok := err.(net.Error)
	return ok && ne.Timeout()
}

// alive makes sure that the server still serves and holds nothing.
func alive(t testing.TB, s *Server) {
	if !within(patience, func() bool { return len(s.Connections()) == 0 }) {
		t.Fatalf("connections left: %+v", s.Connections())
	}
	for _, e := range s.exports {
		for _, d := range e.opened() {
			d.w.Call(func() {
				if d.waiters.head != nil || d.attention.Load() != 0 || d.stats.inFlight.Load() != 0 {
					t.Errorf("waiters %v, attention %d, in flight %d", d.waiters.head, d.attention.Load(), d.stats.inFlight.Load())
				}
				b := d.q.Alloc(d.maxAlloc)
				if b == nil {
					t.Error("memory was lost")
					return
				}
				d.q.Free(b)
			})
		}
	}
}

func optionBytes(opt uint32, data []byte) []byte {
	b := binary.BigEndian.AppendUint64(nil, magicOption)
	b = binary.BigEndian.AppendUint32(b, opt)
	b = binary.BigEndian.AppendUint32(b, uint32(len(data)))
	return append(b, data...)
}

// FuzzHandshake sends anything as the client's side of the handshake.
func FuzzHandshake(f *testing.F) {
	flags := []byte{0, 0, 0, 3}
	for _, o := range [][]byte{
		optionBytes(optExportName, nil), optionBytes(optExportName, []byte("other")), optionBytes(optList, nil), optionBytes(optAbort, nil),
		optionBytes(optInfo, nbdtest.InfoData("", 0, 1, 2, 3)), optionBytes(optGo, nbdtest.InfoData("other", 3)), optionBytes(optStructuredReply, nil),
		optionBytes(optStartTLS, nil), optionBytes(10, nbdtest.InfoData("")), optionBytes(77, make([]byte, 20000)),
	} {
		f.Add(append(append([]byte(nil), flags...), o...))
		f.Add(append(append(append([]byte(nil), flags...), optionBytes(optStructuredReply, nil)...), o...))
	}
	f.Add([]byte{0, 0, 0, 0})
	f.Add([]byte("GET / HTTP/1.0\r\n\r\n"))
	s := fuzzServer(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		got := feed(t, s, b)
		if len(got) < 18 || string(got[:8]) != "NBDMAGIC" {
			t.Fatalf("greeting %x", got)
		}
		alive(t, s)
	})
}

// FuzzTransmission sends anything after a good handshake. Whatever it is, the
// replies are a valid stream and the connection ends when the client's side does.
func FuzzTransmission(f *testing.F) {
	payload := make([]byte, 4096)
	add := func(structured bool, parts ...[]byte) {
		var b []byte
		for _, p := range parts {
			b = append(b, p...)
		}
		f.Add(structured, b)
	}
	for cmd := range uint16(9) {
		add(true, nbdtest.Header(0, cmd, 1, 0, 4096), payload)
		add(false, nbdtest.Header(0, cmd, 1, 0, 0), nbdtest.Header(1, cmd, 2, 1<<20-512, 1024), payload)
		add(true, nbdtest.Header(0xffff, cmd, 1, 1<<64-512, 1024), payload)
	}
	add(true, nbdtest.Header(0, nbdtest.CmdRead, 1, 0, 262144), nbdtest.Header(0, nbdtest.CmdRead, 2, 0, 262144), nbdtest.Header(0, nbdtest.CmdFlush, 3, 0, 0))
	add(false, nbdtest.Header(0, nbdtest.CmdWrite, 1, 0, 1<<32-1), payload)
	add(true, nbdtest.Header(0, nbdtest.CmdWrite, 1, 512, 16384), make([]byte, 16384), nbdtest.Header(0, nbdtest.CmdRead, 2, 512, 16384), nbdtest.Header(0, nbdtest.CmdDisc, 3, 0, 0))
	s := fuzzServer(f)
	f.Fuzz(func(t *testing.T, structured bool, b []byte) {
		in := []byte{0, 0, 0, 3}
		if structured {
			in = append(in, optionBytes(optStructuredReply, nil)...)
		}
		in = append(in, optionBytes(optExportName, nil)...)
		got := feed(t, s, append(in, b...))
		skip := 18 + 10
		if structured {
			skip += 20
		}
		if len(got) < skip {
			t.Fatalf("handshake: %x", got)
		}
		checkReplies(t, structured, b, got[skip:])
		alive(t, s)
	})
}

// checkReplies parses what the server sent against the requests that are in the stream.
func checkReplies(t *testing.T, structured bool, sent, got []byte) {
	// What must be answered: every complete request up to DISC or a wrong magic number.
	pending := map[uint64][]request{}
	n := 0
	for len(sent) >= requestSize {
		r, ok := parseRequest(sent)
		if !ok || r.cmd == cmdDisc {
			break
		}
		sent = sent[requestSize:]
		if r.cmd == cmdWrite {
			if uint64(len(sent)) < uint64(r.length) {
				break
			}
			sent = sent[r.length:]
		}
		pending[r.cookie] = append(pending[r.cookie], r)
		n++
	}
	wrongMagic := len(sent) >= requestSize && binary.BigEndian.Uint32(sent) != magicRequest
	replies := 0
	for len(got) > 0 {
		if len(got) < simpleReplySize {
			if wrongMagic {
				return // cut off
			}
			t.Fatalf("half a reply: %x", got)
		}
		cookie := binary.BigEndian.Uint64(got[8:])
		l := pending[cookie]
		if len(l) == 0 {
			t.Fatalf("reply with cookie %#x that was not sent", cookie)
		}
		// Requests with the same cookie are answered in any order; find one that fits.
		size, fits := 0, false
		for i, r := range l {
			if size, fits = replySize(got, r, structured); fits {
				pending[cookie] = append(l[:i:i], l[i+1:]...)
				break
			}
		}
		if !fits || size > len(got) {
			if wrongMagic {
				return
			}
			t.Fatalf("reply %x… fits none of %+v", got[:simpleReplySize], l)
		}
		got = got[size:]
		replies++
	}
	if replies != n && !wrongMagic {
		t.Fatalf("%d replies to %d requests", replies, n)
	}
}

// replySize is the length of the reply that b starts with, if it can be one to r.
func replySize(b []byte, r request, structured bool) (int, bool) {
	switch binary.BigEndian.Uint32(b) {
	case magicSimple:
		switch {
		case r.cmd == cmdRead && structured:
			return 0, false
		case r.cmd == cmdRead && binary.BigEndian.Uint32(b[4:]) == 0:
			return simpleReplySize + int(r.length), true
		}
		return simpleReplySize, true
	case magicStructured:
		if !structured || len(b) < structuredReplySize {
			return 0, false
		}
		n := binary.BigEndian.Uint32(b[16:])
		switch typ := binary.BigEndian.Uint16(b[6:]); {
		case typ == replyError:
			return structuredReplySize + int(n), true
		case typ == replyOffsetData && r.cmd == cmdRead && n == r.length+8:
			return structuredReplySize + int(n), true
		}
	}
	return 0, false
}

// FuzzParseInfo: what is accepted is made of exactly the input.
func FuzzParseInfo(f *testing.F) {
	f.Add(nbdtest.InfoData("", 0, 3))
	f.Add(nbdtest.InfoData("name"))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		name, reqs, ok := parseInfo(b)
		if ok && 4+len(name)+2+len(reqs) != len(b) {
			t.Fatalf("%d bytes: a name of %d and requests of %d", len(b), len(name), len(reqs))
		}
	})
}
