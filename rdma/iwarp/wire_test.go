package iwarp

import (
	"bytes"
	"fmt"
	"testing"

	"rdblk/rdma"
	"rdblk/rdma/rdmatest"
)

// Vectors that were generated with an independent CRC-32C, from the layouts of
// RFC 5044, 5041 and 5040.
var golden = struct {
	sendABC, emptySend, sendSEInv, part1, part2, write, readReq, readResp, termCRC, termOpcode, termSTag []byte
}{
	sendABC:    hexBytes("0015 4143 00000000 00000000 00000001 00000000 616263 00 447065aa"),
	emptySend:  hexBytes("0012 4143 00000000 00000000 00000002 00000000 accbdb8c"),
	sendSEInv:  hexBytes("0016 4146 11223344 00000000 00000003 00000000 68692121 5b9f4d82"),
	part1:      hexBytes("0022 0143 00000000 00000000 00000001 00000000 30313233343536373839616263646566 ff873ac7"),
	part2:      hexBytes("0014 4143 00000000 00000000 00000001 00000010 797a 0000 a4fd3cb3"),
	write:      hexBytes("0012 c140 a1b2c300 0000000000001000 deadbeef 93015ac4"),
	readReq:    hexBytes("002e 4141 00000000 00000001 00000001 00000000 aabbcc01 0000000000001000 00000010 a1b2c300 00007f0000001000 30f33876"),
	readResp:   hexBytes("001e c142 aabbcc01 0000000000001000 30313233343536373839616263646566 33350fb3"),
	termCRC:    hexBytes("0016 4147 00000000 00000002 00000001 00000000 20020000 7fe42585"),
	termOpcode: hexBytes("0016 4147 00000000 00000002 00000001 00000000 02060000 6f77b973"),
	termSTag:   hexBytes("0026 4147 00000000 00000002 00000001 00000000 1100c000 001e c140 12345678 0000000000000000 ca7816d6"),
}

// Frames captured from Linux siw 6.1 with CRC.
var captured = struct {
	request, reply, rtr, send, readReq, terminate []byte
	plainSend                                     []byte
}{
	request:   hexBytes("4d504120494420526571204672616d65 50 02 0004 8001 c001"),
	reply:     hexBytes("4d504120494420526570204672616d65 50 02 0004 8001 8001"),
	rtr:       hexBytes("000e c140 00000001 0000000000000000 ebd34c5f"),
	send:      hexBytes("0022 4143 00000000 00000000 00000001 00000000 0000555b56d192604a02e8000000fde8 db2e380a"),
	readReq:   hexBytes("002e 4141 00000000 00000001 00000001 00000000 04442100 0000559110b9f960 0000fde8 4a02e800 0000555b56d19260 daf940df"),
	terminate: hexBytes("0026 4147 00000000 00000002 00000001 00000000 1100 0300 0010 c140 12345678 0000000000000000 df3154d8"),
	plainSend: hexBytes("001a 4143 00000000 00000000 00000001 00000000 0000000000000000 00000000"),
}

func same(t *testing.T, what string, got, want []byte) {
	t.Helper()
	if !bytes.Equal(got, want) {
		t.Errorf("%s:\ngot  %x\nwant %x", what, got, want)
	}
}

func TestGoldenTransmit(t *testing.T) {
	r := newRig(t, agreed{crc: true, ird: 4, ord: 4})
	mem := r.side.Mem
	copy(mem, "abc")
	copy(mem[16:], "hi!!")
	copy(mem[32:], "0123456789abcdefyz")
	copy(mem[64:], "\xde\xad\xbe\xef")
	sgl := func(off, n int) []rdma.SGE { return []rdma.SGE{r.side.SGE(off, n)} }
	r.send(rdma.SendWR{Op: rdma.OpSend, SGL: sgl(0, 3)},
		rdma.SendWR{Op: rdma.OpSend},
		rdma.SendWR{Op: rdma.OpSendInvalidate, Flags: rdma.FlagSolicited, InvalidateRKey: 0x11223344, SGL: sgl(16, 4)},
		rdma.SendWR{Op: rdma.OpWrite, SGL: sgl(64, 4), RKey: 0xA1B2C300, RemoteAddr: 0x1000})
	r.poll()
	same(t, "three Sends and a Write", r.take(), bytes.Join([][]byte{golden.sendABC, golden.emptySend, golden.sendSEInv, golden.write}, nil))

	// Inline and gathered from pieces is the same on the wire.
	r = newRig(t, agreed{crc: true})
	mem = r.side.Mem
	copy(mem, "a.b.c")
	copy(mem[16:], "hi!!")
	r.send(rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{r.side.SGE(0, 1), r.side.SGE(2, 1), r.side.SGE(4, 1)}},
		rdma.SendWR{Op: rdma.OpSend},
		rdma.SendWR{Op: rdma.OpSendInvalidate, Flags: rdma.FlagSolicited | rdma.FlagInline, InvalidateRKey: 0x11223344, SGL: sgl(16, 2)[:0:0]})
	r.poll()
	if out := r.take(); !bytes.HasPrefix(out, append(bytes.Clone(golden.sendABC), golden.emptySend...)) {
		t.Errorf("gathered: %x", out)
	}

	r = newRig(t, agreed{crc: true})
	copy(r.side.Mem[32:], "0123456789abcdefyz")
	r.q.tx.maxUntagged = 16
	r.send(rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{r.side.SGE(32, 18)}})
	r.poll()
	same(t, "Send in two segments", r.take(), append(bytes.Clone(golden.part1), golden.part2...))

	// Without CRC the field is there and zero.
	r = newRig(t, agreed{})
	r.send(rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{r.side.SGE(0, 8)}})
	r.poll()
	same(t, "Send without CRC", r.take(), captured.plainSend)

	// The ready-to-receive message is siw's.
	r = newRig(t, agreed{crc: true, rtr: enhRTRWrite})
	r.poll()
	same(t, "ready to receive", r.take(), captured.rtr)
}

func TestGoldenRead(t *testing.T) {
	req := readRequest{sinkSTag: 0xAABBCC01, sinkTO: 0x1000, size: 16, srcSTag: 0xA1B2C300, srcTO: 0x7F0000001000}
	same(t, "Read Request", readReq(1, req), golden.readReq)
	r := newRig(t, agreed{crc: true, ird: 1})
	copy(r.side.Mem, "0123456789abcdef")
	r.feed(golden.readReq, 1000)
	same(t, "Read Response", r.take(), golden.readResp)

	// As requester: the sink on the wire is a tag made for it, at offset 0.
	r = newRig(t, agreed{crc: true, ord: 1})
	r.send(rdma.SendWR{ID: 1, Op: rdma.OpRead, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{r.side.SGE(100, 16)}, RKey: req.srcSTag, RemoteAddr: req.srcTO})
	r.poll()
	out := r.take()
	if len(out) != len(golden.readReq) || !crcOK(out) {
		t.Fatalf("Read Request %x", out)
	}
	var got readRequest
	got.get(out[untaggedHeader:])
	if got.sinkTO != 0 || got.size != 16 || got.srcSTag != req.srcSTag || got.srcTO != req.srcTO {
		t.Errorf("Read Request %+v", got)
	}
	if got.sinkSTag == r.side.MR.RKey() || r.dev.tags.lookup(got.sinkSTag) == nil {
		t.Errorf("sink of a Read is named by %#x", got.sinkSTag)
	}
	r.feed(tagged(opReadResp, true, got.sinkSTag, 0, []byte("0123456789abcdef")), 1000)
	if l := r.done(); len(l) != 1 || l[0].ID != 1 || l[0].Status != rdma.StatusSuccess || string(r.side.Mem[100:116]) != "0123456789abcdef" {
		t.Errorf("%+v %q", l, r.side.Mem[100:116])
	}
	// The tag opens nothing.
	r.feed(tagged(opWrite, true, got.sinkSTag, 0, []byte("x")), 1000)
	if c, _ := terminateOf(t, r.take()); c != termSTag {
		t.Errorf("Write to the sink of a Read: %v", r.err())
	}
}

func TestGoldenTerminate(t *testing.T) {
	same(t, "CRC", appendTerminate(nil, termCRC, nil, true), golden.termCRC)
	same(t, "opcode", appendTerminate(nil, termOpcode, golden.sendABC, true), golden.termOpcode)
	seg := tagged(opWrite, true, 0x12345678, 0, make([]byte, 16))
	same(t, "STag", appendTerminate(nil, termSTag, seg, true), golden.termSTag)

	for _, c := range []struct {
		what              string
		fpdu              []byte
		layer, etype, cod uint8
	}{
		{"CRC", golden.termCRC, 2, 0, 2},
		{"opcode", golden.termOpcode, 0, 2, 6},
		{"STag", golden.termSTag, 1, 1, 0},
		{"siw, Write to a bad STag", captured.terminate, 1, 1, 0},
		{"siw, bad CRC", untagged(opTerminate, true, 0, 2, 1, 0, hexBytes("02020000")), 2, 0, 2},
		{"siw, MSN", untagged(opTerminate, true, 0, 2, 1, 0, hexBytes("21060000")), 1, 2, 6},
		{"siw, Read of a bad STag", untagged(opTerminate, true, 0, 2, 1, 0, append(hexBytes("10000700 0000 4141 00000000 00000001 00000010 00000000"), make([]byte, 28)...)), 0, 1, 0},
	} {
		if !crcOK(c.fpdu) {
			t.Errorf("%s: CRC of %x", c.what, c.fpdu)
		}
		e := parseTerminate(c.fpdu[untaggedHeader : 2+be16(c.fpdu)])
		if e == nil || e.Layer != c.layer || e.Type != c.etype || e.Code != c.cod {
			t.Errorf("%s: %v", c.what, e)
		}
	}
	// A Read that fails is quoted whole.
	r := readRequest{sinkSTag: 1, size: 9, srcSTag: 2, srcTO: 3}
	b := appendTerminate(nil, termReadSTag, readReq(7, r), true)
	e := parseTerminate(b[untaggedHeader : 2+be16(b)])
	if !crcOK(b) || e.read == nil || *e.read != r || e.msn != 7 {
		t.Errorf("%x: %+v", b, e)
	}
}

func TestCaptured(t *testing.T) {
	for _, f := range [][]byte{captured.rtr, captured.send, captured.readReq, captured.terminate} {
		if !crcOK(f) || fpduLen(be16(f)) != len(f) {
			t.Errorf("%x", f)
		}
	}
	f, n, err := parseMPA(captured.request, mpaKeyRequest)
	if err != nil || n != len(captured.request) || f.flags != mpaCRC|mpaEnhanced || f.rev != 2 {
		t.Errorf("request: %+v %d %v", f, n, err)
	}
	if d, rest := parseDepths(f.private); d.ird != 0x8001 || d.ord != 0xC001 || len(rest) != 0 {
		t.Errorf("request: %+v", d)
	}
	same(t, "reply", appendMPA(nil, mpaKeyReply, mpaFrame{flags: mpaCRC | mpaEnhanced, rev: 2, private: depths{0x8001, 0x8001}.append(nil)}), captured.reply)
	// siw's first messages, on the receiving side.
	r := newRig(t, agreed{crc: true, ird: 4, responder: true})
	r.recv(1, 0, 16)
	r.feed(captured.rtr, 100)
	r.feed(captured.send, 100)
	if l := r.done(); len(l) != 1 || l[0].ByteLen != 16 || !bytes.Equal(r.side.Mem[:16], captured.send[20:36]) {
		t.Errorf("%+v", l)
	}
	r.feed(captured.terminate, 100)
	if te, ok := r.err().(*TerminateError); !ok || te.Sent || te.Layer != 1 || te.Type != 1 || te.Code != 0 {
		t.Errorf("%v", r.err())
	}
}

// stream is a mix of everything that a peer sends, and what must come of it.
func stream(r *rig) (in []byte, check func(t *testing.T)) {
	for i := range 6 {
		r.recv(uint64(i), 128<<10+i*4096, 4096)
	}
	r.send(rdma.SendWR{ID: 50, Op: rdma.OpRead, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{r.side.SGE(200<<10, 9000)}, RKey: 1})
	r.poll()
	var rq readRequest
	out := r.take()
	rq.get(out[len(out)-fpduCRCSize-readReqPayload:])
	big := make([]byte, 20000)
	for i := range big {
		big[i] = byte(i * 7)
	}
	seq := [][]byte{
		tagged(opWrite, true, 1, 0, nil),
		untagged(opSend, true, 0, 0, 1, 0, []byte("first")),
		tagged(opWrite, false, rigSTag, rigBase+1000, big[:16000]),
		untagged(opSend, true, 0, 0, 2, 0, nil), // inside of an open Write, as siw takes it
		tagged(opWrite, true, rigSTag, rigBase+17000, big[16000:]),
		untagged(opSend, false, 0, 0, 3, 0, big[:1001]), // odd length, pad inside of the message
		untagged(opSend, false, 0, 0, 3, 1001, big[1001:1002]),
		tagged(opReadResp, false, rq.sinkSTag, 0, big[:8192]),
		untagged(opSend, true, 0, 0, 3, 1002, big[1002:3001]),
		tagged(opReadResp, true, rq.sinkSTag, 8192, big[8192:9000]),
		readReq(1, readRequest{sinkSTag: 7, sinkTO: 5, size: 20000, srcSTag: rigSTag, srcTO: rigBase + 1000}),
		readReq(2, readRequest{sinkSTag: 8, sinkTO: 6}),
		untagged(opSendSE, true, 0, 0, 4, 0, []byte("se")),
		tagged(opWrite, true, rigHigh, ^uint64(0), []byte{0xEE}), // the last byte there is
		untagged(opSend, true, 0, 0, 5, 0, big[:4096]),
	}
	return bytes.Join(seq, nil), func(t *testing.T) {
		t.Helper()
		if err := r.err(); err != nil {
			t.Fatal(err)
		}
		var ids []string
		for _, w := range r.done() {
			ids = append(ids, fmt.Sprintf("%d:%d:%d", w.ID, w.ByteLen, w.Status))
		}
		want := "[0:5:0 1:0:0 2:3001:0 50:9000:0 3:2:0 4:4096:0]"
		if got := fmt.Sprint(ids); got != want {
			t.Errorf("completions %v, want %v", got, want)
		}
		m := r.side.Mem
		if b := m[248<<10-1]; b != 0xEE {
			t.Errorf("last byte of the address space: %#x", b)
		}
		if !bytes.Equal(m[1000:21000], big) || string(m[128<<10:128<<10+5]) != "first" || !bytes.Equal(m[136<<10:136<<10+3001], big[:3001]) ||
			!bytes.Equal(m[200<<10:200<<10+9000], big[:9000]) {
			t.Error("data wrong")
		}
		// Two Read Responses, in order.
		out := r.take()
		var got []byte
		for len(out) > 0 {
			n := fpduLen(be16(out))
			switch {
			case out[3] != rdmapVersion|opReadResp:
				t.Fatalf("peer got %x", out[:n])
			case be32(out[4:]) == 7:
				if be64(out[8:]) != 5+uint64(len(got)) {
					t.Errorf("Read Response at %d", be64(out[8:]))
				}
				got = append(got, out[16:2+be16(out)]...)
			case be32(out[4:]) == 8:
				if be16(out) != 14 || be64(out[8:]) != 6 || len(got) != 20000 {
					t.Errorf("empty Read Response %x after %d bytes", out[:n], len(got))
				}
			}
			out = out[n:]
		}
		if !bytes.Equal(got, big) {
			t.Error("Read Response wrong")
		}
	}
}

// TestChunks: how TCP cuts the stream makes no difference.
func TestChunks(t *testing.T) {
	for _, crc := range []bool{false, true} {
		for _, chunk := range []int{1, 2, 3, 7, 19, 20, 21, 64, 1000, 4096, 8191, 16384, 1 << 20} {
			t.Run(fmt.Sprintf("crc=%v/%d", crc, chunk), func(t *testing.T) {
				r := newRig(t, agreed{crc: crc, ird: 4, ord: 4})
				in, check := stream(r)
				r.feed(in, chunk)
				check(t)
			})
		}
	}
}

// TestSegmentSizes: whatever the segment size, the pieces add up.
func TestSegmentSizes(t *testing.T) {
	for _, u := range []int{128, 134, 256, 1442, 8942, 32762, 65535} {
		for _, crc := range []bool{false, true} {
			r := newRig(t, agreed{crc: crc, ird: 1})
			r.q.tx.maxTagged, r.q.tx.maxUntagged = uint32(u-taggedULPDU)&^7, uint32(u-untaggedULPDU)&^7
			m := r.side.Mem
			for i := range m {
				m[i] = byte(i * 13)
			}
			const n = 70001
			r.send(rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{r.side.SGE(1, 30000), r.side.SGE(50001, n-30000)}},
				rdma.SendWR{Op: rdma.OpWrite, SGL: []rdma.SGE{r.side.SGE(3, n)}, RKey: 5, RemoteAddr: 1 << 40})
			r.poll()
			var send, write []byte
			out := r.take()
			for len(out) > 0 {
				l := be16(out)
				f := out[:fpduLen(l)]
				if l > u {
					t.Fatalf("ULPDU of %d bytes, limit %d", l, u)
				}
				if crc && !crcOK(f) || !crc && be32(f[len(f)-4:]) != 0 {
					t.Fatalf("CRC of %x", f[:20])
				}
				last := f[2]&ddpLast != 0
				if f[2]&ddpTagged == 0 {
					if int(be32(f[16:])) != len(send) || be32(f[12:]) != 1 {
						t.Fatalf("segment %x after %d bytes", f[:20], len(send))
					}
					send = append(send, f[20:2+l]...)
					if last != (len(send) == n) {
						t.Fatal("L bit")
					}
				} else {
					if be64(f[8:]) != 1<<40+uint64(len(write)) || be32(f[4:]) != 5 {
						t.Fatalf("segment %x after %d bytes", f[:16], len(write))
					}
					write = append(write, f[16:2+l]...)
					if last != (len(write) == n) {
						t.Fatal("L bit")
					}
				}
				if !last && padLen(l) != 0 {
					t.Fatal("pad inside of a message")
				}
				out = out[len(f):]
			}
			if !bytes.Equal(send, append(bytes.Clone(m[1:30001]), m[50001:50001+n-30000]...)) || !bytes.Equal(write, m[3:3+n]) {
				t.Fatalf("data in segments of %d wrong", u)
			}
		}
	}
}

func TestMULPDU(t *testing.T) {
	for emss, want := range map[int]int{1448: 1442, 1460: 1454, 8948: 8942, 65483: 65474, 1447: 1438, 100: 128} {
		if got := mulpdu(emss); got != want {
			t.Errorf("EMSS %d: %d, want %d", emss, got, want)
		}
		if emss >= 134 && fpduLen(mulpdu(emss)) > emss {
			t.Errorf("EMSS %d: FPDU of %d", emss, fpduLen(mulpdu(emss)))
		}
	}
}

// TestResponderHolds: the side that accepted sends nothing before it has heard
// from the other (RFC 5044 section 7.1.2).
func TestResponderHolds(t *testing.T) {
	r := newRig(t, agreed{responder: true})
	r.recv(1, 0, 64)
	r.send(rdma.SendWR{ID: 1, Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{r.side.SGE(0, 8)}})
	r.poll()
	if out := r.take(); len(out) != 0 || len(r.done()) != 0 {
		t.Fatalf("responder spoke first: %x", out)
	}
	f := tagged(opWrite, true, 1, 0, nil)
	r.feed(f[:len(f)-1], 100)
	if out := r.take(); len(out) != 0 {
		t.Fatalf("responder spoke before the first FPDU was whole: %x", out)
	}
	r.feed(f[len(f)-1:], 100)
	if out := r.take(); !bytes.Equal(out, captured.plainSend) {
		t.Fatalf("%x", out)
	}
	if l := r.done(); len(l) != 1 {
		t.Fatalf("%+v", l)
	}
	_ = rdmatest.Patience
}
