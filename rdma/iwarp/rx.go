package iwarp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"golang.org/x/sys/unix"

	"rdblk/rdma"
)

const (
	rxStaging    = 64 << 10
	rxStagingCRC = 4 * maxFPDU // whole FPDUs are staged; room to move the rest seldom
	rxBudget     = 512 << 10   // bytes per QP and Poll
	rxDirectMin  = 8 << 10     // the rest of a segment is read directly if it is at least so long
	rxSlack      = 512         // room behind it for what follows
	rxSlackMore  = 64          // and if more segments of the message follow
	rxShort      = 4 << 10     // bytes staged at a time while segments are long
)

// target is where the payload of the current segment goes.
type target uint8

const (
	toNone   target = iota
	toRecv          // the receive at rqHead
	toRemote        // memory the peer named: Write
	toRead          // the sink of the oldest Read: Read Response
)

// rxState is the receiver: a staging buffer and the segment it is in.
type rxState struct {
	buf  []byte
	r, w int  // bytes between are not looked at yet
	long bool // the last segment with payload was long: stage little, most will be read directly

	// The current segment, while active.
	active  bool
	to      target
	last    bool
	op      uint8
	rest    uint32 // payload still to come
	trailer int    // pad and CRC behind it
	stag    uint32
	off     uint64 // tagged offset of the next payload byte
	mem     []byte // resolved memory for the rest of a tagged segment; good for this system call only
	inv     uint32

	// The open untagged message (Send).
	msn    uint32 // expected
	rmsn   uint32 // expected of Read Requests
	mo     uint32 // bytes so far
	sendOp uint8
	sge    int
	sgeOff uint32

	// The open tagged message.
	open     target // toRemote, toRead or toNone
	openSTag uint32
	openOff  uint64

	iov [maxSGE + 2]iovec
	msg unix.Msghdr
}

func (r *rxState) init(crc bool) {
	size := rxStaging
	if crc {
		size = rxStagingCRC
	}
	r.buf = make([]byte, size)
	r.msn, r.rmsn = 1, 1
}

// receive reads and handles what the socket has, within the budget.
func (q *qp) receive() bool {
	moved := false
	for budget := rxBudget; budget > 0 && q.state == stateRTS; {
		n, more := q.read()
		if n <= 0 {
			break
		}
		moved = true
		budget -= n
		q.parse()
		if !more {
			break
		}
	}
	return moved
}

// read makes one receive call and tells whether the socket may have more.
func (q *qp) read() (n int, more bool) {
	r := &q.rx
	if r.active && r.rest > 0 {
		if !q.revalidate() {
			return 0, false
		}
	}
	var e unix.Errno
	var want int
	direct := 0
	if r.active && !q.crc && r.rest >= rxDirectMin {
		r.r, r.w = 0, 0 // parse has used up everything
		k := q.scatter()
		direct = int(r.rest)
		slack := rxSlack
		if !r.last {
			slack = rxSlackMore
		}
		r.iov[k] = iov(r.buf[:slack])
		setIOV(&r.msg, r.iov[:k+1])
		want = direct + slack
		n, e = sysRecvmsg(q.fd, &r.msg)
	} else {
		if r.r == r.w {
			r.r, r.w = 0, 0
		} else if len(r.buf)-r.r < maxFPDU || len(r.buf)-r.w < rxSlack {
			r.w = copy(r.buf, r.buf[r.r:r.w])
			r.r = 0
		}
		want = len(r.buf) - r.w
		if r.long {
			want = min(want, rxShort)
		}
		n, e = sysRecv(q.fd, r.buf[r.w:r.w+want])
	}
	switch {
	case e == unix.EAGAIN:
		q.st.RecvEmpty++
		if q.tx.err != 0 {
			q.lost(q.tx.err)
		}
		return 0, false
	case e != 0:
		q.lost(e)
		return 0, false
	case n == 0:
		q.lost(0)
		return 0, false
	}
	q.st.RecvCalls++
	q.st.RxBytes += uint64(n)
	if direct > 0 {
		d := min(n, direct)
		q.st.DirectBytes += uint64(d)
		q.advance(uint32(d))
		r.w = n - d
	} else {
		r.w += n
	}
	return n, n == want
}

// lost ends the connection when the stream has ended: e, or its orderly end.
func (q *qp) lost(e unix.Errno) {
	r := &q.rx
	var err error
	switch {
	case e == 0 && q.tx.err != 0 && q.tx.err != unix.EPIPE:
		err = fmt.Errorf("send: %w", q.tx.err)
	case e == 0 && (r.active || r.r != r.w || r.mo != 0 || r.open != toNone):
		err = fmt.Errorf("peer closed the connection in the middle of a message: %w", io.ErrUnexpectedEOF)
	case e == 0:
		err = rdma.ErrDisconnected
	case e == unix.ETIMEDOUT:
		err = fmt.Errorf("%w: peer does not answer (TCP)", rdma.ErrTimeout)
	default:
		err = fmt.Errorf("connection lost: %w", e)
	}
	q.fail(failure{err: err, eof: e == 0})
}

// segment fields
func be16(b []byte) int    { return int(binary.BigEndian.Uint16(b)) }
func be32(b []byte) uint32 { return binary.BigEndian.Uint32(b) }
func be64(b []byte) uint64 { return binary.BigEndian.Uint64(b) }

// parse handles what is in the staging buffer, as far as it is complete enough.
// Checks are made in the order in which the headers nest.
func (q *qp) parse() {
	r := &q.rx
	for q.state == stateRTS {
		if r.active {
			if !q.payload() {
				return
			}
			continue
		}
		b := r.buf[r.r:r.w]
		if len(b) < fpduLenSize+2 {
			return
		}
		l := be16(b)
		op := lookupOp(b[2], b[3])
		if l < op.minULPDU {
			q.reject(termLength, nil, "FPDU shorter than its header")
			return
		}
		total := fpduLen(l)
		if q.crc {
			if len(b) < total {
				return
			}
			if !crcOK(b[:total]) {
				q.st.CRCErrors++
				q.reject(termCRC, nil, "CRC of an FPDU is wrong")
				return
			}
		} else if len(b) < op.header {
			return
		}
		b = b[:min(len(b), total)]
		tagged := b[2]&ddpTagged != 0
		if b[2]&ddpVerMask != ddpVersion {
			c := termUntaggedVersion
			if tagged {
				c = termTaggedVersion
			}
			q.reject(c, b, "")
			return
		}
		if b[3]&rdmapVerMask != rdmapVersion {
			q.reject(termRDMAPVersion, b, "")
			return
		}
		if !op.known {
			q.reject(termOpcode, b, fmt.Sprintf("opcode %#x", b[3]&rdmapOpMask))
			return
		}
		if tagged != op.tagged {
			q.reject(termDDPLocal, b, "T bit does not suit the opcode")
			return
		}
		q.st.RxFPDUs++
		r.last = b[2]&ddpLast != 0
		r.op = b[3] & rdmapOpMask
		r.trailer = total - fpduLenSize - l
		var ok bool
		var used int
		if tagged {
			used = taggedHeader
			r.rest = uint32(l - taggedULPDU)
			r.stag, r.off = be32(b[4:]), be64(b[8:])
			if r.op == opWrite {
				ok = q.beginWrite(b)
			} else {
				ok = q.beginReadResponse(b)
			}
		} else {
			used = untaggedHeader
			r.rest = uint32(l - untaggedULPDU)
			if be32(b[8:]) != op.qn {
				q.reject(termQN, b, fmt.Sprintf("queue number %d", be32(b[8:])))
				return
			}
			switch r.op {
			case opReadReq:
				used = readReqHeader
				ok = q.beginReadRequest(b, l)
			case opTerminate:
				if len(b) < min(fpduLenSize+l, untaggedHeader+termMaxPayload) {
					return // the quoted headers are still to come
				}
				q.terminated(b[untaggedHeader:min(len(b), fpduLenSize+l)])
				return
			default:
				ok = q.beginSend(b)
			}
		}
		if !ok {
			return
		}
		if r.rest > rxShort/8 { // a capsule says nothing
			r.long = !q.crc && r.rest >= rxDirectMin
		}
		r.r += used
		r.active = true
	}
}

// reject answers a fault of the peer.
func (q *qp) reject(c termCode, seg []byte, detail string) {
	q.fail(failure{term: c, seg: seg, detail: detail})
}

// beginSend checks a segment of a Send.
func (q *qp) beginSend(b []byte) bool {
	r := &q.rx
	msn, mo := be32(b[12:]), be32(b[16:])
	switch {
	case msn != r.msn:
		q.reject(termMSN, b, fmt.Sprintf("message %d where %d is due", msn, r.msn))
		return false
	case mo != r.mo:
		q.reject(termMO, b, fmt.Sprintf("offset %d where %d is due", mo, r.mo))
		return false
	case mo != 0 && r.op != r.sendOp:
		q.reject(termOpcode, b, "opcode changes within a message")
		return false
	case q.rqHead == q.rqTail:
		q.fail(failure{term: termNoBuffer, seg: b, detail: "no receive posted"})
		return false
	case uint64(mo)+uint64(r.rest) > q.rq[q.rqHead&q.rqMask].length:
		q.fail(failure{term: termTooLong, seg: b, recvStatus: rdma.StatusLocalLength,
			detail: fmt.Sprintf("message of %d bytes or more, receive buffer of %d", uint64(mo)+uint64(r.rest), q.rq[q.rqHead&q.rqMask].length)})
		return false
	}
	if mo == 0 {
		r.sge, r.sgeOff = 0, 0
	}
	r.sendOp = r.op
	r.inv = be32(b[4:])
	r.to = toRecv
	return true
}

// continues checks that a tagged segment continues the open tagged message, if
// there is one (RFC 5041 section 5.2: segments of a message come in order).
func (q *qp) continues(kind target, b []byte) bool {
	r := &q.rx
	if r.open == toNone {
		return true
	}
	if r.open != kind || r.openSTag != r.stag {
		q.reject(termSTag, b, "tagged message begins inside of another")
		return false
	}
	if r.openOff != r.off {
		q.reject(termBounds, b, "tagged message does not continue where it stopped")
		return false
	}
	return true
}

// beginWrite checks a segment of an RDMA Write.
func (q *qp) beginWrite(b []byte) bool {
	r := &q.rx
	r.mem = nil
	if r.rest > 0 { // the tag of an empty one is not looked at
		mem, fault := q.remote(r.stag, r.off, r.rest, rdma.AccessRemoteWrite)
		if fault != faultNone {
			q.reject(taggedFault[fault], b, fmt.Sprintf("RDMA Write of %d bytes", r.rest))
			return false
		}
		r.mem = mem
	}
	if !q.continues(toRemote, b) {
		return false
	}
	r.to = toRemote
	return true
}

// beginReadResponse checks a segment of a response to our oldest Read.
func (q *qp) beginReadResponse(b []byte) bool {
	r := &q.rx
	if q.outHead == q.outTail {
		q.reject(termDDPLocal, b, "Read Response without a Read")
		return false
	}
	o := &q.out[q.outHead&uint32(len(q.out)-1)]
	switch {
	case r.stag != o.stag:
		q.reject(termSTag, b, "Read Response for another sink than the oldest Read's")
		return false
	case r.off != uint64(o.got) || r.rest > o.size-o.got || r.last != (r.rest == o.size-o.got):
		q.fail(failure{term: termBounds, seg: b, detail: "Read Response does not match what was asked for",
			sendPos: o.wqe, sendStatus: o.status(rdma.StatusBadResponse)})
		return false
	}
	if !q.continues(toRead, b) {
		return false
	}
	r.mem = nil
	r.to = toRead
	return r.rest == 0 || q.resolveSink(o)
}

// status is st, except for a Read that is no work request.
func (o *outRead) status(st rdma.Status) rdma.Status {
	if o.rtr {
		return rdma.StatusFlush
	}
	return st
}

// resolveSink finds the memory for the rest of a segment of a Read Response.
func (q *qp) resolveSink(o *outRead) bool {
	r := &q.rx
	p := &q.sqSGE[int(o.wqe&q.sqMask)*q.cfg.MaxSendSGE]
	if p.mr.dead.Load() { // no fault of the peer
		q.fail(failure{term: termLocal, err: errors.New("sink of a Read was deregistered"), sendPos: o.wqe, sendStatus: rdma.StatusLocalProtection})
		return false
	}
	r.mem = p.mr.mem[p.off+r.off:][:r.rest]
	return true
}

// beginReadRequest checks a Read Request and queues it for the transmitter.
func (q *qp) beginReadRequest(b []byte, l int) bool {
	r := &q.rx
	msn := be32(b[12:])
	switch {
	case msn != r.rmsn:
		q.reject(termMSN, b, fmt.Sprintf("Read Request %d where %d is due", msn, r.rmsn))
		return false
	case be32(b[16:]) != 0:
		q.reject(termMO, b, "Read Request with an offset")
		return false
	}
	var req readRequest
	req.get(b[untaggedHeader:])
	if req.size > 0 {
		if _, fault := q.remote(req.srcSTag, req.srcTO, req.size, rdma.AccessRemoteRead); fault != faultNone {
			q.reject(readFault[fault], b, fmt.Sprintf("RDMA Read of %d bytes", req.size))
			return false
		}
	}
	if q.inTail-q.inHead >= q.ird {
		q.reject(termStream, b, fmt.Sprintf("more than %d Reads at a time", q.ird))
		return false
	}
	if l != readReqULPDU || !r.last {
		q.reject(termTooLong, b, "Read Request is not one segment of 28 bytes")
		return false
	}
	q.in[q.inTail&uint32(len(q.in)-1)] = inRead{req: req, msn: msn, end: ^uint64(0)}
	q.inTail++
	r.rmsn++
	r.rest = 0
	r.to = toNone
	q.scq.kick(q)
	return true
}

// revalidate resolves the rest of the current segment's memory again: since the
// last system call it may have been closed.
func (q *qp) revalidate() bool {
	r := &q.rx
	switch r.to {
	case toRemote:
		mem, fault := q.remote(r.stag, r.off, r.rest, rdma.AccessRemoteWrite)
		if fault != faultNone {
			q.reject(taggedFault[fault], nil, "sink of an RDMA Write was closed while it was being written")
			return false
		}
		r.mem = mem
	case toRead:
		return q.resolveSink(&q.out[q.outHead&uint32(len(q.out)-1)])
	case toRecv:
		return q.recvAlive()
	}
	return true
}

// recvAlive checks the regions of the receive at rqHead.
func (q *qp) recvAlive() bool {
	pos := q.rqHead & q.rqMask
	for i := range int(q.rq[pos].nsge) {
		if q.rqSGE[int(pos)*q.cfg.MaxRecvSGE+i].mr.dead.Load() {
			q.fail(failure{term: termLocal, err: errors.New("memory of a posted receive was deregistered"), recvStatus: rdma.StatusLocalProtection})
			return false
		}
	}
	return true
}

// scatter lists the memory for the rest of the current segment in iov.
func (q *qp) scatter() int {
	r := &q.rx
	if r.to != toRecv {
		r.iov[0] = iov(r.mem[:r.rest])
		return 1
	}
	sge := q.rqSGE[int(q.rqHead&q.rqMask)*q.cfg.MaxRecvSGE:]
	n, i, off := 0, r.sge, r.sgeOff
	for left := r.rest; left > 0; {
		p := &sge[i]
		k := min(left, p.n-off)
		r.iov[n] = iov(p.mr.mem[p.off+uint64(off):][:k])
		n++
		left -= k
		i, off = i+1, 0
	}
	return n
}

// advance counts n payload bytes as placed.
func (q *qp) advance(n uint32) {
	r := &q.rx
	r.rest -= n
	if r.to != toRecv {
		r.off += uint64(n)
		r.mem = r.mem[n:]
		if r.to == toRead {
			q.out[q.outHead&uint32(len(q.out)-1)].got += n
		}
		return
	}
	r.mo += n
	sge := q.rqSGE[int(q.rqHead&q.rqMask)*q.cfg.MaxRecvSGE:]
	for n > 0 {
		k := min(n, sge[r.sge].n-r.sgeOff)
		n -= k
		if r.sgeOff += k; r.sgeOff == sge[r.sge].n {
			r.sge, r.sgeOff = r.sge+1, 0
		}
	}
}

// payload places what is staged of the current segment and ends it when it is
// complete. It returns false if more bytes are needed.
func (q *qp) payload() bool {
	r := &q.rx
	if r.rest > 0 {
		n := min(uint32(r.w-r.r), r.rest)
		if n == 0 {
			return false
		}
		p := r.buf[r.r : r.r+int(n)]
		if r.to == toRecv {
			if !q.recvAlive() {
				return false
			}
			sge := q.rqSGE[int(q.rqHead&q.rqMask)*q.cfg.MaxRecvSGE:]
			for i, off := r.sge, r.sgeOff; len(p) > 0; i, off = i+1, 0 {
				s := &sge[i]
				p = p[copy(s.mr.mem[s.off+uint64(off):s.off+uint64(s.n)], p):]
			}
		} else {
			copy(r.mem, p)
		}
		r.r += int(n)
		q.advance(n)
		if r.rest > 0 {
			return false
		}
	}
	if r.w-r.r < r.trailer {
		return false
	}
	r.r += r.trailer
	r.active = false
	q.tx.release(q)
	switch r.to {
	case toRecv:
		if r.last {
			q.deliver()
		}
	case toRemote, toRead:
		if r.last {
			r.open = toNone
		} else {
			r.open, r.openSTag, r.openOff = r.to, r.stag, r.off
		}
		if r.to == toRead && r.last {
			q.readDone()
		}
	}
	return true
}

// release lets a responder send: the peer has sent its first FPDU (RFC 5044
// section 7.1.2).
func (t *txState) release(q *qp) {
	if t.hold {
		t.hold = false
		q.resume()
	}
}

// deliver completes the receive at rqHead.
func (q *qp) deliver() {
	r := &q.rx
	e := &q.rq[q.rqHead&q.rqMask]
	wc := rdma.WC{ID: e.id, QPNum: q.num, Recv: true, ByteLen: r.mo}
	if r.op == opSendInv || r.op == opSendSEInv {
		if c := q.invalidate(r.inv); c != 0 {
			q.fail(failure{term: c, detail: fmt.Sprintf("Send with Invalidate of key %#x", r.inv), recvStatus: rdma.StatusRemoteInvalid})
			return
		}
		wc.Invalidated, wc.RKey = true, r.inv
		q.st.Invalidates++
	}
	q.rqHead++
	r.msn++
	r.mo = 0
	q.st.Receives++
	q.rcq.push(q, 1, wc)
}

// readDone completes the oldest Read.
func (q *qp) readDone() {
	o := &q.out[q.outHead&uint32(len(q.out)-1)]
	q.outHead++
	if !o.rtr {
		q.sq[o.wqe&q.sqMask].done = true
		q.retire()
	}
	if q.sqNext != q.sqTail { // a slot is free, and a fence may be open
		q.scq.kick(q)
	}
}

// terminated handles a Terminate from the peer.
func (q *qp) terminated(p []byte) {
	e := parseTerminate(p)
	if e == nil {
		q.end(rdma.ErrProtocol)
		return
	}
	q.dev.countTerminate(e, q.conn.RemoteAddr())
	f := failure{err: e, linger: true}
	switch {
	case e.Layer == 0 && e.Code == 9 && e.Type != 0:
		f.sendPos, f.sendStatus = q.firstOf(rdma.OpSendInvalidate), rdma.StatusRemoteInvalid
	case e.Layer == 0 && e.Type == 1 && q.outHead != q.outTail:
		// The quoted request names the Read by its sink. siw quotes it, but with a wrong
		// MSN; without a quote it is the oldest.
		o := &q.out[q.outHead&uint32(len(q.out)-1)]
		for i := q.outHead; e.read != nil && i != q.outTail; i++ {
			if c := &q.out[i&uint32(len(q.out)-1)]; c.stag == e.read.sinkSTag {
				o = c
				break
			}
		}
		f.sendPos, f.sendStatus = o.wqe, o.status(rdma.StatusRemoteAccess)
	case e.Layer == 1 && e.Type == 2 && (e.Code == 2 || e.Code == 5):
		f.sendPos, f.sendStatus = q.firstOf(rdma.OpSend), rdma.StatusRemoteOperation
	}
	q.fail(f)
}

// firstOf is the position of the oldest request of a kind.
func (q *qp) firstOf(op rdma.Opcode) uint32 {
	for i := q.sqHead; i != q.sqTail; i++ {
		if q.sq[i&q.sqMask].op == op {
			return i
		}
	}
	return q.sqTail
}
