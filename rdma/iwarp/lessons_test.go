package iwarp

import (
	"bytes"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/rdma"
	"rdblk/rdma/rdmatest"
)

// Tests of what others' software NICs stumbled over; docs/interop.md lists where.

// TestShortWrites: a socket that takes a few bytes at a time gets the same stream as one
// that takes all, whatever the cuts fall on: header, memory, pad, CRC.
func TestShortWrites(t *testing.T) {
	post := func(r *rig) {
		for i := range r.side.Mem {
			r.side.Mem[i] = byte(i*7 + i>>8)
		}
		r.send(rdma.SendWR{ID: 1, Op: rdma.OpWrite, SGL: []rdma.SGE{r.side.SGE(1, 70001), r.side.SGE(100000, 3)}, RKey: 5, RemoteAddr: 77},
			rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.FlagInline, SGL: []rdma.SGE{r.side.SGE(9, 33)}},
			rdma.SendWR{ID: 3, Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{r.side.SGE(11, 13), r.side.SGE(90000, 30001)}})
	}
	for _, crc := range []bool{false, true} {
		whole := newRig(t, agreed{crc: crc})
		whole.q.tx.maxTagged, whole.q.tx.maxUntagged = 8192, 8192
		post(whole)
		whole.poll()
		want := whole.take()
		if len(want) < 100000 {
			t.Fatalf("%d bytes", len(want))
		}
		r := newRig(t, agreed{crc: crc})
		r.q.tx.maxTagged, r.q.tx.maxUntagged = 8192, 8192
		if err := unix.SetsockoptInt(r.q.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 4096); err != nil {
			t.Fatal(err)
		}
		post(r)
		var wc [8]rdma.WC
		var got []byte
		buf := make([]byte, 1500)
		n, done := 0, 0
		for len(got) < len(want) {
			k, _, err := r.side.CQ.Poll(wc[:])
			if err != nil || r.err() != nil {
				t.Fatal(err, r.err())
			}
			done += k
			if done > 0 && len(got) < len(want)-1<<17 {
				t.Fatalf("completed when the peer had %d of %d bytes", len(got), len(want))
			}
			n++
			m, e := sysRecv(r.peer, buf[:1+n*389%len(buf)])
			if e == 0 && m > 0 {
				got = append(got, buf[:m]...)
			} else if e != unix.EAGAIN {
				t.Fatal(e)
			}
		}
		if r.q.st.SendBlocked == 0 {
			t.Error("the socket took everything at once")
		}
		if !bytes.Equal(got, want) {
			t.Error("the stream is another one")
		}
	}
}

// TestTurns: a peer's Reads do not hold up our own messages, nor these the responses.
func TestTurns(t *testing.T) {
	r := newRig(t, agreed{ird: 16, ord: 1})
	const reads, sends = 12, 4
	var in []byte
	for i := range reads {
		in = append(in, readReq(uint32(i+1), readRequest{sinkSTag: 1, size: 100, srcSTag: rigSTag, srcTO: rigBase})...)
	}
	r.poll() // it is on its queue
	if n, e := sysSendBytes(r.peer, in); e != 0 || n != len(in) {
		t.Fatal(n, e)
	}
	r.q.receive() // as Poll does before it transmits
	if n := r.q.inTail - r.q.inHead; n != reads {
		t.Fatalf("%d Reads waiting", n)
	}
	for i := range sends {
		r.send(rdma.SendWR{ID: uint64(i), Op: rdma.OpSend, SGL: []rdma.SGE{r.side.SGE(0, 8)}})
	}
	r.poll()
	var order []byte
	for out := r.take(); len(out) > 0; out = out[fpduLen(be16(out)):] {
		switch out[3] & rdmapOpMask {
		case opSend:
			order = append(order, 's')
		case opReadResp:
			order = append(order, 'r')
		}
	}
	if bytes.Count(order, []byte("s")) != sends || bytes.Count(order, []byte("r")) != reads {
		t.Fatalf("%s", order)
	}
	for rest := order; bytes.ContainsRune(rest, 's'); {
		i := bytes.IndexByte(rest, 's')
		if i > respInARow {
			t.Errorf("%s: %d responses in a row", order, i)
		}
		rest = rest[i+1:]
		if len(rest) > 0 && rest[0] == 's' && bytes.ContainsRune(rest, 'r') {
			t.Errorf("%s: responses are held up", order)
		}
	}
}

// TestFloodIsTakenInPortions: one Poll handles a bounded amount of what a peer sends
// without end, so that the owner's other queues and duties get their turn.
func TestFloodIsTakenInPortions(t *testing.T) {
	_, e, nc := connectRaw(t, Config{RecvBuffer: 8 << 20})
	q := e.QP.(*qp)
	flood := bytes.Repeat(tagged(opWrite, true, e.MR.RKey(), e.At(0), make([]byte, 32000)), 40)
	stop := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			nc.SetWriteDeadline(time.Now().Add(rdmatest.Patience))
			if _, err := nc.Write(flood); err != nil {
				return
			}
			select {
			case <-stop:
				return
			default:
			}
		}
	}()
	var wc [8]rdma.WC
	most := uint64(0)
	rdmatest.Until(t, "50 MB", func() {
		before := q.st.RxBytes
		if _, _, err := e.CQ.Poll(wc[:]); err != nil {
			t.Fatal(err)
		}
		most = max(most, q.st.RxBytes-before)
	}, func() bool { return q.st.RxBytes > 50e6 })
	if most > rxBudget+rxStaging+rxSlack {
		t.Errorf("%d bytes in one Poll, the budget is %d", most, rxBudget)
	}
	close(stop)
	e.QP.Close()
	<-ended
}

// TestSinkKeyOpensNothing: what a Read names as its sink is a key made up for it. The peer
// can answer that Read with it and do nothing else, and never learns a key of memory.
func TestSinkKeyOpensNothing(t *testing.T) {
	for _, c := range []struct {
		what string
		in   func(sink readRequest) []byte
		want termCode
	}{
		{"Write", func(s readRequest) []byte { return tagged(opWrite, true, s.sinkSTag, s.sinkTO, make([]byte, 16)) }, termSTag},
		{"Write at the memory's address", func(s readRequest) []byte { return tagged(opWrite, true, s.sinkSTag, s.srcTO, make([]byte, 16)) }, termSTag},
		{"Read", func(s readRequest) []byte {
			return readReq(1, readRequest{sinkSTag: 1, size: 16, srcSTag: s.sinkSTag, srcTO: s.sinkTO})
		}, termReadSTag},
		{"Send with Invalidate", func(s readRequest) []byte { return untagged(opSendInv, true, s.sinkSTag, 0, 1, 0, nil) }, termInvUnknown},
	} {
		r := newRig(t, agreed{ird: 2, ord: 2})
		r.recv(1, 4096, 64)
		for i := range r.side.Mem {
			r.side.Mem[i] = 0xA5
		}
		r.send(rdma.SendWR{ID: 2, Op: rdma.OpRead, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{r.side.SGE(1000, 100)}})
		r.poll()
		var s readRequest
		s.get(r.take()[untaggedHeader:])
		if s.sinkSTag == r.side.MR.RKey() || s.sinkSTag == r.side.MR.LKey() || s.sinkTO == r.side.At(1000) {
			t.Errorf("%s: the peer was told %#x at %#x, which is the memory's own", c.what, s.sinkSTag, s.sinkTO)
		}
		s.srcTO = r.side.At(1000)
		r.feed(c.in(s), 1<<20)
		out := r.take()
		if got, _ := terminateOf(t, out); got != c.want {
			t.Errorf("%s: Terminate %06x, want %06x: %v", c.what, got, c.want, r.err())
		}
		if bytes.Contains(out, bytes.Repeat([]byte{0xA5}, 16)) {
			t.Errorf("%s: memory went to the peer", c.what)
		}
		if n := bytes.Count(r.side.Mem, []byte{0xA5}); n != len(r.side.Mem) {
			t.Errorf("%s: %d bytes of memory changed", c.what, len(r.side.Mem)-n)
		}
	}
}

// TestNoDepth: queues without room for Reads refuse them and do nothing worse.
func TestNoDepth(t *testing.T) {
	r := newRig(t, agreed{})
	r.feed(readReq(1, readRequest{sinkSTag: 1, size: 16, srcSTag: rigSTag, srcTO: rigBase}), 100)
	if got, _ := terminateOf(t, r.take()); got != termStream {
		t.Errorf("Terminate %06x: %v", got, r.err())
	}
	r = newRig(t, agreed{})
	r.send(rdma.SendWR{ID: 7, Op: rdma.OpRead, SGL: []rdma.SGE{r.side.SGE(0, 16)}})
	r.poll()
	if l := r.done(); len(l) != 1 || l[0].ID != 7 || l[0].Status != rdma.StatusLocalQPOperation {
		t.Errorf("%+v", l)
	}
	r = newRig(t, agreed{ord: 1})
	r.feed(tagged(opReadResp, true, 0, 0, nil), 100)
	if got, _ := terminateOf(t, r.take()); got != termDDPLocal {
		t.Errorf("Terminate %06x: %v", got, r.err())
	}
}
