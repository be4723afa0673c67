package iwarp

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"rdblk/rdma"
)

func FuzzMPA(f *testing.F) {
	f.Add(captured.request)
	f.Add(captured.reply)
	f.Add([]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
	f.Add(mpa(mpaKeyRequest, 0xFF, 2, make([]byte, 512)))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, key := range []string{mpaKeyRequest, mpaKeyReply} {
			fr, n, err := parseMPA(b, key)
			if err != nil {
				if err == errFrameShort && len(b) >= mpaMaxFrame {
					t.Fatalf("%d bytes are not enough", len(b))
				}
				continue
			}
			if n > len(b) || n > mpaMaxFrame || !bytes.Equal(appendMPA(nil, key, fr), b[:n]) {
				t.Fatalf("%x: %+v, %d", b, fr, n)
			}
			if len(fr.private) >= enhSize {
				d, rest := parseDepths(fr.private)
				if !bytes.Equal(append(d.append(nil), rest...), fr.private) || depth(d.ird, 128) > 128 {
					t.Fatalf("%+v", d)
				}
			}
			// Every beginning of a frame asks for more.
			for i := range n {
				if _, _, err := parseMPA(b[:i], key); err != errFrameShort {
					t.Fatalf("%d of %d bytes: %v", i, n, err)
				}
			}
			_ = rejectFrame(fr, nil)
		}
	})
}

func FuzzTerminate(f *testing.F) {
	for _, b := range [][]byte{golden.termCRC, golden.termOpcode, golden.termSTag, captured.terminate} {
		f.Add(b[untaggedHeader : 2+be16(b)])
	}
	f.Add(append(hexBytes("0102E000 0000"), make([]byte, 46)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		e := parseTerminate(b)
		if (e == nil) != (len(b) < termControl) {
			t.Fatalf("%x: %v", b, e)
		}
		if e != nil {
			_ = e.Error()
			if e.Layer > 15 || e.Type > 15 {
				t.Fatalf("%+v", e)
			}
		}
	})
}

// FuzzReceiver gives arbitrary bytes to a QP that has everything open: receives,
// regions with various rights, a window, Reads. Whatever they are, memory that
// was not opened stays as it was, every request comes back at most once, and it
// makes no difference how TCP cut the stream.
func FuzzReceiver(f *testing.F) {
	join := func(b ...[]byte) []byte { return bytes.Join(b, nil) }
	pay := bytes.Repeat([]byte("0123456789abcdef"), 100)
	for _, b := range [][]byte{
		golden.sendABC, golden.emptySend, golden.write, golden.readReq, golden.readResp, golden.termSTag, captured.rtr, captured.terminate,
		join(golden.part1, golden.part2),
		join(tagged(opWrite, false, rigSTag, rigBase+100, pay), tagged(opWrite, true, rigSTag, rigBase+100+1600, pay)),
		join(tagged(opReadResp, false, fuzzSink|1, 0, pay[:100]), tagged(opReadResp, true, fuzzSink|1, 100, pay[:900]), tagged(opReadResp, true, fuzzSink|2, 0, pay[:10])),
		join(untagged(opSend, false, 0, 0, 1, 0, pay), untagged(opSend, true, 0, 0, 1, 1600, pay), untagged(opSendInv, true, fuzzWindow+1, 0, 2, 0, pay)),
		join(tagged(opWrite, true, fuzzWindow+1, fuzzWindowAt, pay[:64]), readReq(1, readRequest{1, 2, 64, fuzzWindow + 1, fuzzWindowAt}), readReq(2, readRequest{1, 2, 100000, rigSTag, rigBase})),
		tagged(opWrite, true, rigSTag, rigBase+rigMem-60000, make([]byte, 60001)),
		tagged(opWrite, true, rigHigh, ^uint64(0)-99, pay[:100]),
	} {
		f.Add(b, true, uint16(1))
		f.Add(b, false, uint16(7))
	}
	dev := newProvider(f, Config{CloseLinger: 50 * time.Millisecond}).dev
	f.Fuzz(func(t *testing.T, in []byte, crc bool, chunk uint16) {
		if crc {
			in = sign(in)
		}
		n := max(1+int(chunk%4096), len(in)/256)
		whole := fuzzRun(t, dev, in, crc, 1<<20)
		parts := fuzzRun(t, dev, in, crc, n)
		if whole != parts {
			t.Fatalf("the stream cut in pieces of %d gives another result:\n%s\n%s", n, whole, parts)
		}
	})
}

const (
	fuzzSink     = 0x5A5A5A00
	fuzzWindow   = 0x33333300
	fuzzWindowAt = rigBase + 64<<10
)

// sign gives FPDUs good CRCs, so that a fuzzer gets past them.
func sign(in []byte) []byte {
	b := bytes.Clone(in)
	for at := 0; len(b)-at >= 2; {
		n := fpduLen(be16(b[at:]))
		if len(b)-at < n {
			break
		}
		fix(b[at : at+n])
		at += n
	}
	return b
}

func fuzzRun(t *testing.T, dev *device, in []byte, crc bool, chunk int) string {
	r := newRigOn(t, dev, agreed{crc: crc, ird: 2, ord: 3})
	defer func() { r.close() }()
	q, m := r.q, r.side.Mem
	q.sink = fuzzSink
	// Layout: 0 to 128K is open, the rest is not; receives and sinks are in the open part.
	open := 128 << 10
	region := func(stag uint32, mem []byte) {
		r.dev.tags.lookup(stag).mr.mem = mem
	}
	region(rigSTag, m[:open])
	region(rigHigh, m[96<<10:104<<10])
	w := &window{pd: q.pd}
	w.key.Store(fuzzWindow)
	r.dev.tags.place(fuzzWindow, &stagEntry{mw: w})
	for i := open; i < len(m); i++ {
		m[i] = byte(i)
	}
	keep := bytes.Clone(m[open:])
	for i := range 4 {
		if _, err := q.PostRecv(rdma.RecvWR{ID: uint64(i), SGL: []rdma.SGE{r.side.SGE(i*8192, 3), r.side.SGE(i*8192+100, 4000)}}); err != nil {
			t.Fatal(err)
		}
	}
	whole := r.dev.tags.lookup(rigSTag).mr
	q.PostSend(
		rdma.SendWR{ID: 10, Op: rdma.OpBindMW, Window: w, Access: rdma.AccessRemoteRead | rdma.AccessRemoteWrite, SGL: []rdma.SGE{{Addr: fuzzWindowAt, Len: 100, LKey: whole.stag}}},
		rdma.SendWR{ID: 11, Op: rdma.OpRead, SGL: []rdma.SGE{r.side.SGE(40<<10, 1000)}},
		rdma.SendWR{ID: 12, Op: rdma.OpRead, SGL: []rdma.SGE{r.side.SGE(50<<10, 10)}},
		rdma.SendWR{ID: 13, Op: rdma.OpRead, Flags: rdma.FlagSignaled},
		rdma.SendWR{ID: 14, Op: rdma.OpSend, Flags: rdma.FlagSignaled | rdma.FlagFence, SGL: []rdma.SGE{r.side.SGE(0, 600)}})
	r.poll()
	r.take()
	r.feed(in, chunk)
	r.poll()
	out := r.take()
	err := r.finish()
	seen := map[uint64]bool{}
	var ids []string
	for _, wc := range r.done() {
		if seen[wc.ID] {
			t.Fatalf("request %d completed twice", wc.ID)
		}
		seen[wc.ID] = true
		ids = append(ids, fmt.Sprintf("%d/%v/%v/%d", wc.ID, wc.Status, wc.Invalidated, wc.ByteLen))
	}
	if !seen[0] || !seen[1] || !seen[2] || !seen[3] || !seen[13] || !seen[14] {
		t.Fatalf("not everything came back: %v", ids)
	}
	if !bytes.Equal(m[open:], keep) {
		t.Fatal("memory that was not opened has changed")
	}
	if err == nil {
		t.Fatal("the connection has not ended")
	}
	code, _ := terminateOf(t, out)
	return fmt.Sprintf("%v | %x | %v | %x", err, code, ids, sum(m[:open]))
}

func sum(b []byte) (h uint64) {
	h = 14695981039346656037
	for _, c := range b {
		h = (h ^ uint64(c)) * 1099511628211
	}
	return
}
