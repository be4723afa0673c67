package iwarp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"testing"

	"golang.org/x/sys/unix"

	"rdblk/rdma"
)

// fix makes the CRC of an FPDU good again after a test has bent it.
func fix(f []byte) []byte {
	n := len(f) - fpduCRCSize
	binary.LittleEndian.PutUint32(f[n:], crc32.Checksum(f[:n], castagnoli))
	return f
}

func bend(f []byte, at int, v byte) []byte {
	f = bytes.Clone(f)
	f[at] = v
	return fix(f)
}

// TestChecks: each fault of a peer is answered with its Terminate, nothing is
// placed, and everything outstanding comes back.
func TestChecks(t *testing.T) {
	pay := []byte("0123456789abcdef")
	var p28 [readReqPayload]byte
	w := func(stag uint32, to uint64, n int) []byte { return tagged(opWrite, true, stag, to, make([]byte, n)) }
	rr := func(stag uint32, to uint64, n uint32) []byte {
		return readReq(1, readRequest{sinkSTag: 1, size: n, srcSTag: stag, srcTO: to})
	}
	send := func(msn, mo uint32, n int) []byte { return untagged(opSend, true, 0, 0, msn, mo, make([]byte, n)) }
	for _, c := range []struct {
		row  int
		what string
		in   []byte
		want termCode
	}{
		{1, "ULPDU_Length 0", hexBytes("0000 c140 00000000"), termLength},
		{1, "tagged, shorter than its header", fpdu(tagged(opWrite, true, 1, 0, nil)[2:15]), termLength},
		{1, "untagged, shorter than its header", fpdu(send(1, 0, 0)[2:19]), termLength},
		{1, "Read Request without all of its payload", fpdu(rr(rigSTag, rigBase, 8)[2:47]), termLength},
		{1, "Terminate without control word", untagged(opTerminate, true, 0, 2, 1, 0, []byte{1, 2, 3}), termLength},
		{1, "unknown opcode, tagged, short", fpdu([]byte{ddpTagged | ddpLast | 1, rdmapVersion | 0xF, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}), termLength},
		{3, "DDP version 0, tagged", bend(w(rigSTag, rigBase, 4), 2, 0xC0), termTaggedVersion},
		{3, "DDP version 2, untagged", bend(send(1, 0, 4), 2, 0x42), termUntaggedVersion},
		{4, "RDMAP version 0", bend(send(1, 0, 4), 3, 0x03), termRDMAPVersion},
		{4, "RDMAP version 2, tagged", bend(w(rigSTag, rigBase, 4), 3, 0x80), termRDMAPVersion},
		{5, "immediate data", untagged(0x8, true, 0, 0, 1, 0, pay[:8]), termOpcode},
		{5, "atomic request", untagged(0xA, true, 0, 1, 1, 0, make([]byte, 52)), termOpcode},
		{5, "opcode 15, tagged", tagged(0xF, true, rigSTag, rigBase, pay), termOpcode},
		{5, "Send with T", bend(tagged(opSend, true, 0, 0, pay), 3, rdmapVersion|opSend), termDDPLocal},
		{5, "Write without T", untagged(opWrite, true, 0, 0, 1, 0, pay), termDDPLocal},
		{6, "Send to queue 1", untagged(opSend, true, 0, 1, 1, 0, pay), termQN},
		{6, "Send to queue 2^32-1", untagged(opSend, true, 0, ^uint32(0), 1, 0, pay), termQN},
		{6, "Read Request to queue 0", untagged(opReadReq, true, 0, 0, 1, 0, p28[:]), termQN},
		{6, "Read Request to queue 5", untagged(opReadReq, true, 0, 5, 1, 0, p28[:]), termQN},
		{6, "Terminate to queue 0", untagged(opTerminate, true, 0, 0, 1, 0, pay[:4]), termQN},
		{7, "Send skips a number", send(2, 0, 4), termMSN},
		{7, "Send number 0", send(0, 0, 4), termMSN},
		{7, "Read Request skips a number", readReq(2, readRequest{size: 1, srcSTag: rigSTag, srcTO: rigBase}), termMSN},
		{8, "Send begins in the middle", send(1, 4, 4), termMO},
		{8, "Send leaves a gap", append(untagged(opSend, false, 0, 0, 1, 0, pay), untagged(opSend, true, 0, 0, 1, 20, pay)...), termMO},
		{8, "Send goes back", append(untagged(opSend, false, 0, 0, 1, 0, pay), untagged(opSend, true, 0, 0, 1, 0, pay)...), termMO},
		{8, "Read Request with offset", untagged(opReadReq, true, 0, 1, 1, 8, p28[:]), termMO},
		{9, "no receive left", bytes.Join([][]byte{send(1, 0, 1), send(2, 0, 1), send(3, 0, 1)}, nil), termNoBuffer},
		{9, "no receive left, empty message", bytes.Join([][]byte{send(1, 0, 0), send(2, 0, 0), send(3, 0, 0)}, nil), termNoBuffer},
		{10, "message one byte too long", send(1, 0, 65), termTooLong},
		{10, "message too long in its second segment", append(untagged(opSend, false, 0, 0, 1, 0, pay), untagged(opSend, true, 0, 0, 1, 16, make([]byte, 49))...), termTooLong},
		{11, "no such STag", w(0x12345600, rigBase, 4), termSTag},
		{11, "STag 0", w(0, rigBase, 4), termSTag},
		{11, "key byte wrong", w(rigSTag+1, rigBase, 4), termSTag},
		{12, "STag of another domain", w(rigPD2, rigBase, 4), termNotAssoc},
		{13, "no remote write right", w(rigRO, rigBase, 4), termAccess},
		{14, "TO wraps", w(rigHigh, ^uint64(0), 2), termWrap},
		{14, "TO wraps far outside", w(rigSTag, ^uint64(0)-2, 16), termWrap},
		{15, "one byte over the end", w(rigSTag, rigBase+rigMem-15, 16), termBounds},
		{15, "one byte before the start", w(rigSTag, rigBase-1, 16), termBounds},
		{15, "before the start by far", w(rigHigh, 0, 16), termBounds},
		{15, "large, over the end", w(rigSTag, rigBase+rigMem-60000, 60001), termBounds},
		{16, "Read: no such STag", rr(0x12345600, rigBase, 4), termReadSTag},
		{17, "Read: STag of another domain", rr(rigPD2, rigBase, 4), termReadNotAssoc},
		{18, "Read: no remote read right", rr(rigWO, rigBase, 4), termAccess},
		{19, "Read: TO wraps", rr(rigHigh, ^uint64(0), 2), termReadWrap},
		{19, "Read: over the end", rr(rigSTag, rigBase+rigMem-15, 16), termReadBounds},
		{19, "Read: 4 GiB", rr(rigSTag, rigBase, ^uint32(0)), termReadBounds},
		{20, "no room for a Read", bytes.Join([][]byte{readReq(1, readRequest{}), readReq(2, readRequest{}), readReq(3, readRequest{}), readReq(4, readRequest{}), readReq(5, readRequest{})}, nil), termStream},
		{21, "Read Response without a Read", tagged(opReadResp, true, 1, 0, pay), termDDPLocal},
		{22, "Read Request too long", untagged(opReadReq, true, 0, 1, 1, 0, append(p28[:], 0)), termTooLong},
		{22, "Read Request in two segments", untagged(opReadReq, false, 0, 1, 1, 0, p28[:]), termTooLong},
		{23, "invalidates nothing that exists", untagged(opSendInv, true, 0x12345600, 0, 1, 0, pay), termInvUnknown},
		{23, "invalidates registered memory", untagged(opSendSEInv, true, rigSTag, 0, 1, 0, pay), termInvProtected},
		{24, "Write continues at another STag", append(tagged(opWrite, false, rigSTag, rigBase, pay), tagged(opWrite, true, rigWO, rigBase+16, pay)...), termSTag},
		{24, "Write leaves a gap", append(tagged(opWrite, false, rigSTag, rigBase, pay), tagged(opWrite, true, rigSTag, rigBase+17, pay)...), termBounds},
		{24, "opcode changes within a message", append(untagged(opSend, false, 0, 0, 1, 0, pay), untagged(opSendSE, true, 0, 0, 1, 16, pay)...), termOpcode},
	} {
		for _, crc := range []bool{true, false} {
			for _, chunk := range []int{1 << 20, 1} {
				if chunk == 1 && len(c.in) > 4096 {
					continue
				}
				t.Run(fmt.Sprintf("%d/%s/crc=%v/%d", c.row, c.what, crc, chunk), func(t *testing.T) {
					r := newRig(t, agreed{crc: crc, ird: 4, ord: 4})
					// Reads are answered only when all of it has been looked at.
					hold := c.row == 20 && chunk > 1
					if c.row == 20 && !hold {
						t.Skip("one at a time they are answered at once")
					}
					r.recv(1, 1000, 64)
					r.recv(2, 1000, 64)
					keep := bytes.Clone(r.side.Mem)
					r.feed(c.in, chunk)
					got, frame := terminateOf(t, r.take())
					if got != c.want {
						t.Fatalf("Terminate %06x, want %06x: %v", got, c.want, r.err())
					}
					if crc && !crcOK(frame) {
						t.Errorf("CRC of the Terminate %x", frame)
					}
					te, ok := r.err().(*TerminateError)
					if !ok || !te.Sent || newTermCode(te.Layer, te.Type, te.Code) != c.want || !errors.Is(te, rdma.ErrProtocol) {
						t.Errorf("%v", r.err())
					}
					// Both receives are back, whatever became of them, and nothing else.
					if l := r.done(); len(l) != 2 || l[0].ID != 1 || l[1].ID != 2 {
						t.Errorf("%+v", l)
					}
					if c.row >= 11 && c.row <= 19 && !bytes.Equal(r.side.Mem, keep) {
						t.Error("memory changed")
					}
					// The peer sees the end.
					if n, e := sysRecv(r.peer, make([]byte, 1)); n != 0 || e != 0 {
						t.Errorf("stream goes on: %d %v", n, e)
					}
				})
			}
		}
	}
}

// TestCheckCRC: every bit of an FPDU is covered, and nothing of a bad one is placed.
func TestCheckCRC(t *testing.T) {
	good := tagged(opWrite, true, rigSTag, rigBase+10, []byte("data!"))
	for i := range len(good) * 8 {
		f := bytes.Clone(good)
		f[i/8] ^= 1 << (i % 8)
		r := newRig(t, agreed{crc: true})
		r.feed(f, 100)
		if r.err() == nil { // the length grew: more is awaited, and the end of the stream ends it
			if err := r.finish(); !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Fatalf("bit %d: %v", i, err)
			}
		} else if got, _ := terminateOf(t, r.take()); got != termCRC && got != termLength {
			t.Fatalf("bit %d: %v", i, r.err())
		}
		if !bytes.Equal(r.side.Mem[:64], make([]byte, 64)) {
			t.Fatalf("bit %d: placed", i)
		}
		r.close()
	}
	// Without CRC the field is not looked at, nor are pads.
	r := newRig(t, agreed{})
	f := bytes.Clone(good)
	for i := 2 + be16(f); i < len(f); i++ {
		f[i] = 0xA5
	}
	r.feed(f, 100)
	if string(r.side.Mem[10:15]) != "data!" || r.err() != nil {
		t.Errorf("%v", r.err())
	}
	// A pad that is not zero but covered by the CRC is fine; so are reserved bits.
	r = newRig(t, agreed{crc: true})
	f = bend(good, 2+be16(good), 0x77)
	f = bend(f, 2, f[2]|0x3C)
	f = bend(f, 3, f[3]|0x30)
	r.feed(f, 100)
	if string(r.side.Mem[10:15]) != "data!" || r.err() != nil {
		t.Errorf("%v", r.err())
	}
	for _, st := range []QPStats{r.q.st} {
		if st.CRCErrors != 0 || st.RxFPDUs != 1 {
			t.Errorf("%+v", st)
		}
	}
}

// TestReadResponses: a response is taken only if it is what was asked for.
func TestReadResponses(t *testing.T) {
	pay := make([]byte, 100)
	for i := range pay {
		pay[i] = byte(i + 1)
	}
	for _, c := range []struct {
		what   string
		in     func(a, b readRequest) []byte
		want   termCode
		status rdma.Status
	}{
		{"second Read's response first", func(a, b readRequest) []byte { return tagged(opReadResp, true, b.sinkSTag, 0, pay) }, termSTag, rdma.StatusFlush},
		{"unknown sink", func(a, b readRequest) []byte { return tagged(opReadResp, true, 5, 0, pay) }, termSTag, rdma.StatusFlush},
		{"key of real memory", func(a, b readRequest) []byte { return tagged(opReadResp, true, rigSTag, rigBase, pay) }, termSTag, rdma.StatusFlush},
		{"offset", func(a, b readRequest) []byte { return tagged(opReadResp, true, a.sinkSTag, 1, pay[:99]) }, termBounds, rdma.StatusBadResponse},
		{"too long", func(a, b readRequest) []byte { return tagged(opReadResp, true, a.sinkSTag, 0, append(pay, 0)) }, termBounds, rdma.StatusBadResponse},
		{"too short", func(a, b readRequest) []byte { return tagged(opReadResp, true, a.sinkSTag, 0, pay[:99]) }, termBounds, rdma.StatusBadResponse},
		{"complete but not last", func(a, b readRequest) []byte { return tagged(opReadResp, false, a.sinkSTag, 0, pay) }, termBounds, rdma.StatusBadResponse},
		{"gap", func(a, b readRequest) []byte {
			return append(tagged(opReadResp, false, a.sinkSTag, 0, pay[:10]), tagged(opReadResp, true, a.sinkSTag, 11, pay[11:])...)
		}, termBounds, rdma.StatusBadResponse},
		{"same segment twice", func(a, b readRequest) []byte {
			return append(tagged(opReadResp, false, a.sinkSTag, 0, pay[:10]), tagged(opReadResp, false, a.sinkSTag, 0, pay[:10])...)
		}, termBounds, rdma.StatusBadResponse},
		{"Write inside of it", func(a, b readRequest) []byte {
			return append(tagged(opReadResp, false, a.sinkSTag, 0, pay[:10]), tagged(opWrite, true, rigSTag, rigBase+5000, pay)...)
		}, termSTag, rdma.StatusFlush},
		{"three responses to two Reads", func(a, b readRequest) []byte {
			return bytes.Join([][]byte{tagged(opReadResp, true, a.sinkSTag, 0, pay), tagged(opReadResp, true, b.sinkSTag, 0, pay), tagged(opReadResp, true, a.sinkSTag, 0, pay)}, nil)
		}, termDDPLocal, rdma.StatusSuccess},
	} {
		t.Run(c.what, func(t *testing.T) {
			r := newRig(t, agreed{ord: 2})
			rd := rdma.SendWR{ID: 1, Op: rdma.OpRead, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{r.side.SGE(1000, 100)}}
			r.send(rd, rd)
			r.poll()
			out := r.take()
			var a, b readRequest
			a.get(out[untaggedHeader:])
			b.get(out[readReqHeader+fpduCRCSize+untaggedHeader:])
			if a.sinkSTag == b.sinkSTag {
				t.Fatal("two Reads have one sink")
			}
			r.feed(c.in(a, b), 1<<20)
			if got, _ := terminateOf(t, r.take()); got != c.want {
				t.Errorf("Terminate %06x, want %06x: %v", got, c.want, r.err())
			}
			if l := r.done(); len(l) != 2 || l[0].Status != c.status {
				t.Errorf("%+v", l)
			}
			if !bytes.Equal(r.side.Mem[:1000], make([]byte, 1000)) || !bytes.Equal(r.side.Mem[1100:], make([]byte, rigMem-1100)) {
				t.Error("memory beside the sink changed")
			}
		})
	}
}

// TestVanishing: memory that is deregistered while a message is under way ends
// the connection, and is not touched again.
func TestVanishing(t *testing.T) {
	data := bytes.Repeat([]byte("z"), 30000)
	reg := func(r *rig, off, n int) *region {
		mr, err := r.side.PD.Register(r.side.Mem[off:off+n], rdma.AccessLocalWrite|rdma.AccessRemoteWrite|rdma.AccessRemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		return mr.(*region)
	}
	check := func(t *testing.T, r *rig, want termCode) {
		t.Helper()
		if got, _ := terminateOf(t, r.take()); got != want {
			t.Errorf("Terminate %06x, want %06x: %v", got, want, r.err())
		}
		for i, b := range r.side.Mem {
			if b != 0 {
				t.Fatalf("memory touched at %d", i)
			}
		}
	}
	for _, cut := range []int{17, 100, 29000} {
		t.Run(fmt.Sprintf("Write/%d", cut), func(t *testing.T) {
			r := newRig(t, agreed{})
			mr := reg(r, 1000, 40000)
			f := tagged(opWrite, true, mr.stag, mr.base, data)
			r.feed(f[:cut], 1<<20)
			mr.Deregister()
			clear(r.side.Mem)
			r.feed(f[cut:], 1<<20)
			check(t, r, termSTag)
		})
		t.Run(fmt.Sprintf("Send/%d", cut), func(t *testing.T) {
			r := newRig(t, agreed{})
			mr := reg(r, 1000, 40000)
			r.q.PostRecv(rdma.RecvWR{ID: 1, SGL: []rdma.SGE{r.side.SGE(0, 10), {Addr: mr.base, Len: 40000, LKey: mr.stag}}})
			f := untagged(opSend, true, 0, 0, 1, 0, data)
			r.feed(f[:cut+4], 1<<20)
			mr.Deregister()
			clear(r.side.Mem)
			r.feed(f[cut+4:], 1<<20)
			check(t, r, termLocal)
			if l := r.done(); len(l) != 1 || l[0].Status != rdma.StatusLocalProtection {
				t.Errorf("%+v", l)
			}
		})
		t.Run(fmt.Sprintf("Read/%d", cut), func(t *testing.T) {
			r := newRig(t, agreed{ord: 1})
			mr := reg(r, 1000, 40000)
			r.send(rdma.SendWR{ID: 1, Op: rdma.OpRead, SGL: []rdma.SGE{{Addr: mr.base, Len: 30000, LKey: mr.stag}}})
			r.poll()
			var rq readRequest
			rq.get(r.take()[untaggedHeader:])
			f := tagged(opReadResp, true, rq.sinkSTag, 0, data)
			r.feed(f[:cut], 1<<20)
			mr.Deregister()
			clear(r.side.Mem)
			r.feed(f[cut:], 1<<20)
			check(t, r, termLocal)
			if l := r.done(); len(l) != 1 || l[0].Status != rdma.StatusLocalProtection {
				t.Errorf("%+v", l)
			}
		})
	}
	t.Run("source of a Read, between segments", func(t *testing.T) {
		r := newRig(t, agreed{ird: 1})
		r.q.tx.maxTagged = 1024
		mr := reg(r, 0, 200000)
		unix.SetsockoptInt(r.q.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 4096)
		f := readReq(1, readRequest{sinkSTag: 9, size: 200000, srcSTag: mr.stag, srcTO: mr.base})
		sysSendBytes(r.peer, f)
		var wc [4]rdma.WC
		for range 3 { // the peer does not read
			r.side.CQ.Poll(wc[:])
		}
		if r.q.state != stateRTS || !r.q.tx.blocked {
			t.Fatal("not blocked")
		}
		mr.Deregister()
		r.poll()
		if r.err() == nil {
			t.Fatal("goes on")
		}
		sent := 0
		for out := r.take(); len(out) >= taggedHeader && out[3] == rdmapVersion|opReadResp; out = out[min(len(out), fpduLen(be16(out))):] {
			sent += be16(out) - taggedULPDU
		}
		if sent > 100000 {
			t.Errorf("%d of 200000 bytes sent", sent)
		}
	})
}

// TestTerminated: what a Terminate from the peer does to outstanding requests.
func TestTerminated(t *testing.T) {
	var pad [28]byte
	quote := func(r readRequest) []byte {
		b := appendTerminate(nil, termAccess, readReq(77, r), true) // siw quotes a wrong MSN
		return b[untaggedHeader+termControl : 2+be16(b)]
	}
	for _, c := range []struct {
		what   string
		raw    func(reads []readRequest) []byte
		status [4]rdma.Status // Read, Read, Send with Invalidate, Send: all outstanding
	}{
		{"access, second Read quoted", func(q []readRequest) []byte { return append(hexBytes("0102E000"), quote(q[1])...) },
			[4]rdma.Status{rdma.StatusFlush, rdma.StatusRemoteAccess, rdma.StatusFlush, rdma.StatusFlush}},
		{"access, siw's form", func(q []readRequest) []byte { return append(hexBytes("10020700"), quote(q[1])...) },
			[4]rdma.Status{rdma.StatusFlush, rdma.StatusRemoteAccess, rdma.StatusFlush, rdma.StatusFlush}},
		{"access, nothing quoted", func([]readRequest) []byte { return hexBytes("01020000") },
			[4]rdma.Status{rdma.StatusRemoteAccess, rdma.StatusFlush, rdma.StatusFlush, rdma.StatusFlush}},
		{"STag of a Write", func([]readRequest) []byte { return hexBytes("11000000") },
			[4]rdma.Status{rdma.StatusFlush, rdma.StatusFlush, rdma.StatusFlush, rdma.StatusFlush}},
		{"no buffer", func([]readRequest) []byte { return hexBytes("12020000") },
			[4]rdma.Status{rdma.StatusFlush, rdma.StatusFlush, rdma.StatusFlush, rdma.StatusRemoteOperation}},
		{"cannot invalidate", func([]readRequest) []byte { return hexBytes("01090000") },
			[4]rdma.Status{rdma.StatusFlush, rdma.StatusFlush, rdma.StatusRemoteInvalid, rdma.StatusFlush}},
		{"cannot invalidate, unknown", func([]readRequest) []byte { return hexBytes("02090000") },
			[4]rdma.Status{rdma.StatusFlush, rdma.StatusFlush, rdma.StatusRemoteInvalid, rdma.StatusFlush}},
		{"CRC", func([]readRequest) []byte { return hexBytes("20020000") },
			[4]rdma.Status{rdma.StatusFlush, rdma.StatusFlush, rdma.StatusFlush, rdma.StatusFlush}},
		{"nonsense with a long tail", func([]readRequest) []byte { return append(hexBytes("FFFFFFFF"), bytes.Repeat(pad[:], 40)...) },
			[4]rdma.Status{rdma.StatusFlush, rdma.StatusFlush, rdma.StatusFlush, rdma.StatusFlush}},
	} {
		for _, chunk := range []int{1 << 20, 1} {
			t.Run(fmt.Sprintf("%s/%d", c.what, chunk), func(t *testing.T) {
				r := newRig(t, agreed{ord: 2})
				r.recv(9, 0, 64)
				rd := rdma.SendWR{ID: 0, Op: rdma.OpRead, SGL: []rdma.SGE{r.side.SGE(1000, 100)}}
				rd1 := rd
				rd1.ID = 1
				r.send(rd, rd1, rdma.SendWR{ID: 2, Op: rdma.OpSendInvalidate, InvalidateRKey: 5}, rdma.SendWR{ID: 3, Op: rdma.OpSend})
				r.poll()
				out := r.take()
				reads := make([]readRequest, 2)
				reads[0].get(out[untaggedHeader:])
				reads[1].get(out[readReqHeader+fpduCRCSize+untaggedHeader:])
				r.feed(untagged(opTerminate, true, 0, qnTerminate, 1, 0, c.raw(reads)), chunk)
				l := r.done()
				if len(l) != 5 {
					t.Fatalf("%+v", l)
				}
				for i, st := range c.status {
					if l[i].ID != uint64(i) || l[i].Status != st {
						t.Errorf("request %d: %+v, want %v", i, l[i], st)
					}
				}
				te, ok := r.err().(*TerminateError)
				if !ok || te.Sent || !bytes.Equal(te.Raw[:], c.raw(reads)[:4]) {
					t.Errorf("%v", r.err())
				}
				if out := r.take(); len(out) != 0 {
					t.Errorf("a Terminate was answered: %x", out)
				}
			})
		}
	}
}

// TestStreamEnds: where the stream ends decides what the end is called.
func TestStreamEnds(t *testing.T) {
	f := untagged(opSend, true, 0, 0, 1, 0, []byte("whole"))
	for n := 0; n <= len(f); n++ {
		r := newRig(t, agreed{crc: n%2 == 0})
		r.recv(1, 0, 64)
		r.feed(f[:n], 100)
		err := r.finish()
		if whole := n == 0 || n == len(f); whole != errors.Is(err, rdma.ErrDisconnected) || !whole && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("after %d of %d bytes: %v", n, len(f), err)
		}
		if l := r.done(); len(l) != 1 || (l[0].Status == rdma.StatusSuccess) != (n == len(f)) {
			t.Errorf("after %d bytes: %+v", n, l)
		}
	}
	r := newRig(t, agreed{})
	r.recv(1, 0, 64)
	r.feed(untagged(opSend, false, 0, 0, 1, 0, []byte("half")), 100)
	if err := r.finish(); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("between two segments: %v", err)
	}
}

// TestTerminateBehindFailedSend: the reason that a peer gave is read, though
// sending has failed before.
func TestTerminateBehindFailedSend(t *testing.T) {
	r := newRig(t, agreed{ord: 1})
	f := untagged(opTerminate, true, 0, qnTerminate, 1, 0, hexBytes("11000000"))
	sysSendBytes(r.peer, f)
	unix.Close(r.peer)
	r.peer = -1
	r.send(rdma.SendWR{ID: 1, Op: rdma.OpSend, SGL: []rdma.SGE{r.side.SGE(0, 8)}})
	r.poll()
	if te, ok := r.err().(*TerminateError); !ok || te.Sent {
		t.Errorf("%v", r.err())
	}
}

// TestMSNWraps: message numbers go on after 2^32-1 with 0.
func TestMSNWraps(t *testing.T) {
	r := newRig(t, agreed{ird: 1, ord: 1})
	q := r.q
	q.rx.msn, q.rx.rmsn, q.tx.msn, q.tx.rmsn = ^uint32(0), ^uint32(0), ^uint32(0), ^uint32(0)
	r.recv(1, 0, 8)
	r.recv(2, 0, 8)
	for _, msn := range []uint32{^uint32(0), 0} {
		r.feed(untagged(opSend, true, 0, 0, msn, 0, nil), 100)
		r.feed(readReq(msn, readRequest{sinkSTag: 1, size: 1, srcSTag: rigSTag, srcTO: rigBase}), 100)
	}
	if l := r.done(); len(l) != 2 || r.err() != nil {
		t.Fatalf("%+v %v", l, r.err())
	}
	r.take()
	r.send(rdma.SendWR{Op: rdma.OpSend}, rdma.SendWR{Op: rdma.OpSend})
	r.poll()
	out := r.take()
	if be32(out[12:]) != ^uint32(0) || be32(out[24+12:]) != 0 {
		t.Errorf("%x", out)
	}
	// Queue positions wrap too.
	q.sqHead, q.sqNext, q.sqTail = ^uint32(0)-2, ^uint32(0)-2, ^uint32(0)-2
	q.sqUsed, q.sqQuiet = 0, 0
	q.rqHead, q.rqTail = ^uint32(0)-2, ^uint32(0)-2
	q.outHead, q.outTail = ^uint32(0), ^uint32(0)
	for i := range 6 {
		r.recv(uint64(i), 16*i, 16)
		r.send(rdma.SendWR{ID: uint64(i), Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{r.side.SGE(i, 1)}})
	}
	r.poll()
	for i := range 6 {
		r.feed(untagged(opSend, true, 0, 0, uint32(1+i), 0, []byte{byte(i)}), 100)
	}
	l := r.done()
	if len(l) != 12 || r.err() != nil {
		t.Fatalf("%+v %v", l, r.err())
	}
	for i, wc := range l {
		if wc.Status != rdma.StatusSuccess || wc.ID != uint64(i%6) {
			t.Errorf("%+v", wc)
		}
	}
}
