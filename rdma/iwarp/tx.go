package iwarp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"golang.org/x/sys/unix"

	"rdblk/rdma"
)

const (
	txStaging  = 32 << 10  // headers, trailers and small payload of a batch
	txIOV      = 192       // pieces of a batch
	txBatch    = 256 << 10 // bytes of a batch: bounds the time of one system call
	txBudget   = 1 << 20   // bytes per QP and Poll
	txCopyMax  = 512       // payload up to this size is copied into the staging buffer
	txRoom     = readReqHeader + txCopyMax + 8
	respInARow = 4 // Read Responses in a row while the send queue has work
)

// msgKind is what the transmitter is in the middle of.
type msgKind uint8

const (
	msgNone msgKind = iota
	msgSend         // the request at sqNext
	msgResp         // the response at inNext
)

// source tells where a piece of a batch comes from, so that it can be checked
// again if the socket did not take it at once.
type source struct {
	mr   *region // nil: staging buffer
	win  uint32  // tag, if the peer named the memory
	addr uint64
}

// txState is the transmitter. It fills a batch (whole FPDUs), hands it to the
// socket, and fills the next when all of it is taken.
type txState struct {
	stage  []byte
	used   int
	iov    [txIOV]iovec
	src    [txIOV]source
	first  int // iov not taken yet
	n      int // iov filled
	bytes  int // in the batch
	inline bool

	queued, sent uint64 // positions in the stream: filled, taken by TCP

	kind   msgKind
	off    uint32 // bytes of the message that are queued
	sge    int    // next piece of local memory
	sgeOff uint32
	msn    uint32 // of the next Send
	rmsn   uint32 // of the next Read Request
	resps  int    // responses in a row

	maxTagged   uint32 // payload of a segment
	maxUntagged uint32
	batch       int // bytes per system call
	eor         uintptr
	hold        bool   // responder: the peer sends first
	rtr         uint16 // ready-to-receive message to send first
	blocked     bool   // the socket is full
	err         unix.Errno
	msg         unix.Msghdr
}

func (t *txState) init(q *qp, emss int, a agreed) {
	t.stage = make([]byte, txStaging)
	t.msn, t.rmsn = 1, 1
	t.hold = a.responder
	t.rtr = a.rtr
	u := mulpdu(emss)
	t.batch = txBatch
	if a.largeFPDU && !q.dev.cfg.StrictMSS {
		u = maxULPDU
	}
	if a.careful {
		// siw cannot take a pad or CRC that is split over two segments. One FPDU group
		// per call, marked as a record, starts and ends with a segment.
		u = mulpdu(emss)
		t.batch = 0
		t.eor = unix.MSG_EOR
	}
	u = min(u, q.dev.cfg.MaxFPDU-fpduLenSize-3-fpduCRCSize)
	// A multiple of 8 keeps segments aligned and free of pads.
	t.maxTagged = uint32(u-taggedULPDU) &^ 7
	t.maxUntagged = uint32(u-untaggedULPDU) &^ 7
}

// room tells whether one more segment fits the batch.
func (t *txState) room() bool {
	return t.used+txRoom <= len(t.stage) && t.n+maxSGE+2 <= txIOV && t.bytes <= t.batch
}

// staged adds the next k bytes of the staging buffer, just written, to the batch.
func (t *txState) staged(k int) {
	if !t.inline { // the last piece is not the end of the staging buffer
		t.iov[t.n] = iov(t.stage[t.used:t.used])
		t.src[t.n] = source{}
		t.n++
		t.inline = true
	}
	t.iov[t.n-1].len += uint64(k)
	t.used += k
	t.bytes += k
}

// memory adds registered memory to the batch.
func (t *txState) memory(p []byte, s source) {
	t.iov[t.n] = iov(p)
	t.src[t.n] = s
	t.n++
	t.inline = false
	t.bytes += len(p)
}

// appendCRC ends an FPDU that began at start: the CRC field is there in any case.
func appendCRC(b []byte, start int, on bool) []byte {
	var c uint32
	if on {
		c = crc32.Checksum(b[start:], castagnoli)
	}
	return binary.LittleEndian.AppendUint32(b, c)
}

// trailer ends a segment of l bytes ULPDU: pad and CRC. crc covers what precedes.
func (q *qp) trailer(l int, crc uint32) {
	t := &q.tx
	b := t.stage[t.used:]
	pad := padLen(l)
	b[0], b[1], b[2] = 0, 0, 0
	if q.crc {
		crc = crc32.Update(crc, castagnoli, b[:pad])
	} else {
		crc = 0
	}
	binary.LittleEndian.PutUint32(b[pad:], crc)
	t.staged(pad + fpduCRCSize)
	t.queued += uint64(fpduLen(l))
	q.st.TxFPDUs++
}

// transmit sends as much as the budget and the socket allow.
func (q *qp) transmit() bool {
	t := &q.tx
	if t.err != 0 {
		return false
	}
	moved := false
	wasBlocked := t.blocked
	t.blocked = false
	if t.first != t.n && !q.recheck() {
		return true
	}
	budget := txBudget
	for q.state == stateRTS {
		if t.first == t.n {
			q.fill()
			if t.n == 0 || q.state != stateRTS {
				break
			}
		}
		n := q.send()
		if n > 0 {
			moved = true
			budget -= n
		}
		if t.blocked || t.err != 0 {
			break
		}
		if budget <= 0 {
			q.scq.kick(q)
			if !q.scq.running { // driven by the other CQ
				q.scq.wake()
			}
			break
		}
	}
	if q.state != stateRTS {
		return true
	}
	q.retire()
	if t.err != 0 {
		q.receive() // the reason may be there to read: a Terminate
		return true
	}
	if (t.blocked || wasBlocked) && (len(q.scq.live) > directQPs || len(q.rcq.live) > directQPs) {
		q.watchWrite(t.blocked)
	}
	return moved
}

// send offers the batch to the socket once.
func (q *qp) send() int {
	t := &q.tx
	var n int
	var e unix.Errno
	want := 0
	for i := t.first; i < t.n; i++ {
		want += int(t.iov[i].len)
	}
	if t.n-t.first == 1 {
		v := &t.iov[t.first]
		n, e = sysSend(q.fd, v.base, int(v.len), t.eor)
	} else {
		setIOV(&t.msg, t.iov[t.first:t.n])
		n, e = sysSendmsg(q.fd, &t.msg, t.eor)
	}
	q.st.SendCalls++
	if e != 0 {
		if e == unix.EAGAIN {
			t.blocked = true
			q.st.SendBlocked++
		} else {
			t.err = e
		}
		return 0
	}
	q.st.TxBytes += uint64(n)
	t.sent += uint64(n)
	if n == want {
		t.reset()
	} else {
		t.blocked = true
		q.st.SendBlocked++
		left := uint64(n)
		for left >= t.iov[t.first].len {
			left -= t.iov[t.first].len
			t.first++
		}
		v := &t.iov[t.first]
		v.base += uintptr(left)
		v.len -= left
		t.src[t.first].addr += left
	}
	for q.inHead != q.inNext && q.in[q.inHead&uint32(len(q.in)-1)].end <= t.sent {
		q.inHead++
	}
	return n
}

func (t *txState) reset() {
	t.first, t.n, t.used, t.bytes, t.inline = 0, 0, 0, 0, false
}

// recheck looks again at the memory that a batch refers to which the socket did
// not take at once: it may have been deregistered, and what a peer reads
// through a window may have been invalidated. The rest of an FPDU cannot be
// replaced by anything, so the connection ends.
func (q *qp) recheck() bool {
	t := &q.tx
	for i := t.first; i < t.n; i++ {
		s := &t.src[i]
		switch {
		case s.win != 0:
			if _, f := q.remote(s.win, s.addr, uint32(t.iov[i].len), rdma.AccessRemoteRead); f != faultNone {
				q.fail(failure{err: errors.New("memory that the peer was reading was closed")})
				return false
			}
		case s.mr != nil:
			if s.mr.dead.Load() {
				q.fail(failure{err: errors.New("memory that was being sent was deregistered"), sendPos: q.sqHead, sendStatus: rdma.StatusLocalProtection})
				return false
			}
		}
	}
	return true
}

// fill puts segments into the empty batch until it is full or nothing may be sent.
func (q *qp) fill() {
	t := &q.tx
	if t.hold {
		return
	}
	if t.rtr != 0 {
		q.readyToReceive()
	}
	for t.room() && q.next() {
	}
}

// next queues one segment, or executes one local request. Messages are not
// interleaved; responses and own requests take turns at message boundaries.
func (q *qp) next() bool {
	t := &q.tx
	switch t.kind {
	case msgSend:
		return q.sendSegment()
	case msgResp:
		return q.respSegment()
	}
	own, resp := q.sqNext != q.sqTail, q.inNext != q.inTail
	if own && (!resp || t.resps >= respInARow) {
		t.resps = 0
		if q.startSend() {
			return true
		}
		if q.state != stateRTS {
			return false
		}
	}
	if resp {
		t.kind = msgResp
		return q.respSegment()
	}
	return false
}

// startSend begins the request at sqNext. It returns false if that has to wait,
// with everything behind it, or has ended the connection.
func (q *qp) startSend() bool {
	t := &q.tx
	e := &q.sq[q.sqNext&q.sqMask]
	if e.flags&rdma.FlagFence != 0 && q.outHead != q.outTail {
		q.st.ReadStalls++
		return false
	}
	switch e.op {
	case rdma.OpBindMW:
		p := &q.sqSGE[int(q.sqNext&q.sqMask)*q.cfg.MaxSendSGE]
		if !e.mw.bind(q, e.key, p.mr, p.mr.base+p.off, p.n, e.access) {
			q.fail(failure{err: errors.New("memory window could not be bound: it is bound already, or it or its region is closed"),
				sendPos: q.sqNext, sendStatus: rdma.StatusMWBind, linger: true})
			return false
		}
		q.st.Binds++
		q.sqNext++
	case rdma.OpLocalInvalidate:
		if c := q.invalidate(e.key); c != 0 {
			q.fail(failure{err: fmt.Errorf("local invalidate of key %#x: not a window of this queue pair", e.key),
				sendPos: q.sqNext, sendStatus: rdma.StatusLocalQPOperation, linger: true})
			return false
		}
		q.st.Invalidates++
		q.sqNext++
	case rdma.OpRead:
		if q.ord == 0 {
			q.fail(failure{err: errors.New("read posted on a connection that was set up without outbound Reads (InitiatorDepth, or the peer's depth, is 0)"),
				sendPos: q.sqNext, sendStatus: rdma.StatusLocalQPOperation, linger: true})
			return false
		}
		if q.outTail-q.outHead >= q.ord {
			q.st.ReadStalls++
			return false
		}
		q.readRequest(e.length, e.raddr, e.key, outRead{wqe: q.sqNext})
		q.st.Reads++
		q.sqNext++
	default:
		t.kind, t.off, t.sge, t.sgeOff = msgSend, 0, 0, 0
		return q.sendSegment()
	}
	return true
}

// readRequest queues a Read Request and notes what will answer it.
func (q *qp) readRequest(size uint32, addr uint64, key uint32, o outRead) {
	t := &q.tx
	o.stag, o.size = q.sink|t.rmsn&0xFF, size
	r := readRequest{sinkSTag: o.stag, size: size, srcSTag: key, srcTO: addr}
	b := t.stage[t.used:]
	putUntagged(b, opReadReq, true, readReqPayload, 0, qnRead, t.rmsn, 0)
	r.put(b[untaggedHeader:])
	t.rmsn++
	q.out[q.outTail&uint32(len(q.out)-1)] = o
	q.outTail++
	q.finish(b, readReqHeader)
}

// finish ends a segment that is all in the staging buffer.
func (q *qp) finish(b []byte, n int) {
	var crc uint32
	if q.crc {
		crc = crc32.Update(0, castagnoli, b[:n])
	}
	q.tx.staged(n)
	q.trailer(n-fpduLenSize, crc)
}

// readyToReceive queues the first message of the peer-to-peer model (RFC 6581
// section 4.3): it lets the other side send.
func (q *qp) readyToReceive() {
	t := &q.tx
	rtr := t.rtr
	t.rtr = 0
	if rtr == enhRTRRead {
		q.readRequest(0, 0, 1, outRead{rtr: true})
		return
	}
	b := t.stage[t.used:]
	putTagged(b, opWrite, true, 0, 1, 0) // some hardware treats STag 0 specially
	q.finish(b, taggedHeader)
}

// sendSegment queues the next segment of the Send or Write at sqNext.
func (q *qp) sendSegment() bool {
	t := &q.tx
	pos := q.sqNext & q.sqMask
	e := &q.sq[pos]
	b := t.stage[t.used:]
	left := e.length - t.off
	var n uint32
	var h int
	last := true
	if e.op == rdma.OpWrite {
		if n = left; n > t.maxTagged {
			n, last = t.maxTagged, false
		}
		putTagged(b, opWrite, last, int(n), e.key, e.raddr+uint64(t.off))
		h = taggedHeader
	} else {
		if n = left; n > t.maxUntagged {
			n, last = t.maxUntagged, false
		}
		op, inv := uint8(opSend), uint32(0)
		if e.op == rdma.OpSendInvalidate {
			op, inv = opSendInv, e.key
		}
		if e.flags&rdma.FlagSolicited != 0 {
			op += opSendSE - opSend
		}
		putUntagged(b, op, last, int(n), inv, qnSend, t.msn, t.off)
		h = untaggedHeader
	}
	if e.flags&rdma.FlagInline != 0 {
		copy(b[h:], q.inline[int(pos)*q.cfg.MaxInline+int(t.off):][:n])
		q.finish(b, h+int(n))
	} else if !q.gather(e, pos, b, h, n) {
		return false
	}
	t.off += n
	if last {
		t.kind = msgNone
		e.end = t.queued
		q.sqNext++
		if e.op == rdma.OpWrite {
			q.st.Writes++
		} else {
			t.msn++
			q.st.Sends++
		}
	}
	return true
}

// gather adds a header of h bytes at b and the next n bytes of a request's memory.
func (q *qp) gather(e *sendWQE, pos uint32, b []byte, h int, n uint32) bool {
	t := &q.tx
	sge := q.sqSGE[int(pos)*q.cfg.MaxSendSGE:][:e.nsge]
	copied := n <= txCopyMax
	k := h
	var crc uint32
	if !copied {
		if q.crc {
			crc = crc32.Update(0, castagnoli, b[:h])
		}
		t.staged(h)
	}
	for left := n; left > 0; {
		p := &sge[t.sge]
		m := min(left, p.n-t.sgeOff)
		if p.mr.dead.Load() {
			q.fail(failure{err: errors.New("memory of a posted request was deregistered"), sendPos: q.sqNext, sendStatus: rdma.StatusLocalProtection})
			return false
		}
		mem := p.mr.mem[p.off+uint64(t.sgeOff):][:m]
		if copied {
			k += copy(b[k:], mem)
		} else {
			if q.crc {
				crc = crc32.Update(crc, castagnoli, mem)
			}
			t.memory(mem, source{mr: p.mr})
		}
		left -= m
		if t.sgeOff += m; t.sgeOff == p.n {
			t.sge, t.sgeOff = t.sge+1, 0
		}
	}
	if copied {
		q.finish(b, k)
	} else {
		q.trailer(h-fpduLenSize+int(n), crc)
	}
	return true
}

// respSegment queues the next segment of the Read Response at inNext. The source
// is looked up again for each segment: it may have been closed in between.
func (q *qp) respSegment() bool {
	t := &q.tx
	r := &q.in[q.inNext&uint32(len(q.in)-1)]
	n, last := r.req.size-r.sent, true
	if n > t.maxTagged {
		n, last = t.maxTagged, false
	}
	b := t.stage[t.used:]
	putTagged(b, opReadResp, last, int(n), r.req.sinkSTag, r.req.sinkTO+uint64(r.sent))
	if n == 0 {
		q.finish(b, taggedHeader)
	} else {
		src := source{win: r.req.srcSTag, addr: r.req.srcTO + uint64(r.sent)}
		mem, fault := q.remote(src.win, src.addr, n, rdma.AccessRemoteRead)
		if fault != faultNone {
			var seg [readReqHeader]byte
			putUntagged(seg[:], opReadReq, true, readReqPayload, 0, qnRead, r.msn, 0)
			r.req.put(seg[untaggedHeader:])
			q.fail(failure{term: readFault[fault], seg: seg[:], detail: "source of a Read was closed while it was being read"})
			return false
		}
		if n <= txCopyMax {
			q.finish(b, taggedHeader+copy(b[taggedHeader:], mem))
		} else {
			var crc uint32
			if q.crc {
				crc = crc32.Update(crc32.Update(0, castagnoli, b[:taggedHeader]), castagnoli, mem)
			}
			t.staged(taggedHeader)
			t.memory(mem, src)
			q.trailer(taggedULPDU+int(n), crc)
		}
	}
	r.sent += n
	if last {
		t.kind = msgNone
		t.resps++
		r.end = t.queued
		q.inNext++
		q.st.ReadsServed++
	}
	return true
}

// sendTerminate sends a Terminate if the socket takes it at once, behind what is
// already queued. It is the last message of a stream.
func (q *qp) sendTerminate(c termCode, seg []byte) {
	t := &q.tx
	if t.err != 0 {
		return
	}
	if t.first != t.n {
		for i := t.first; i < t.n; i++ {
			s := &t.src[i]
			if s.mr != nil && s.mr.dead.Load() {
				return
			}
			if s.win != 0 {
				if _, f := q.remote(s.win, s.addr, uint32(t.iov[i].len), rdma.AccessRemoteRead); f != faultNone {
					return
				}
			}
		}
		if q.send(); t.first != t.n {
			return
		}
	}
	var buf [untaggedHeader + termMaxPayload + 8]byte
	b := appendTerminate(buf[:0], c, seg, q.crc)
	sysSendBytes(q.fd, b)
	q.st.TxFPDUs++
	q.st.SendCalls++
}
