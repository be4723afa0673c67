package target

import (
	"errors"
	"fmt"
	"time"

	"rdblk/internal/arena"
	"rdblk/protocol"
	"rdblk/rdma"
)

// This file is the transport side of a queue: capsules come out of receive
// completions, data moves by RDMA Read and Write, responses go out as Sends.
//
// Work requests are collected while completions are worked on and handed to the
// device in one batch by flush: receives first, so that a response never
// overtakes the receive that the host's next command needs. Only Reads and the
// last request of a batch are signalled. Every work request has an entry in ring;
// its ID is the entry's sequence number. Completions come in order, so one for
// entry k ends every entry up to k and gives back their send queue slots.

type sendKind uint8

const (
	sendWrite    sendKind = iota // data to the host; a response follows
	sendRead                     // data from the host
	sendResponse                 // ends the request
)

type sendEntry struct {
	r    *request
	kind sendKind
}

// pollRounds bounds what one queue does before the worker's other queues have their turn.
const pollRounds = 4

// Poll is the worker's.
func (q *queue) Poll() bool {
	progress := false
	for range pollRounds {
		if q.over() {
			return false
		}
		q.flush()
		if q.over() { // a work request was refused
			return true
		}
		wcs := &q.lane.wcs
		n, busy, err := q.cq.Poll(wcs[:])
		if err != nil {
			q.breakdown(fmt.Errorf("%w: %w", errWorkerPoll, err))
			return false
		}
		if n == 0 {
			return progress || busy
		}
		progress = true
		q.now = timeNow()
		for i := range n {
			q.complete(&wcs[i])
			if q.over() {
				return true
			}
		}
		q.resume()
	}
	return progress
}

// Arm is the worker's.
func (q *queue) Arm() bool {
	if q.over() {
		return true
	}
	if len(q.sends)+len(q.reposts) > 0 {
		return false
	}
	again, err := q.cq.Arm()
	if err != nil {
		q.breakdown(fmt.Errorf("%w: %w", errWorkerPoll, err))
		return false
	}
	return !again || !q.Poll()
}

// kick makes the worker poll the queue before it sleeps.
func (q *queue) kick() {
	if q.h != nil {
		q.h.Kick()
	}
}

var clockStart = time.Now()

// timeNow is time.Now with one look at the clock instead of two.
func timeNow() time.Time { return clockStart.Add(time.Since(clockStart)) }

// takeTimes ends the time of the requests that are answered.
func (q *queue) takeTimes() {
	if len(q.timed) == 0 {
		return
	}
	now := timeNow()
	for i := range q.timed {
		q.timed[i].latency.Observe(now.Sub(q.timed[i].start))
	}
	q.timed = q.timed[:0]
}

// flush hands the collected work requests to the device.
func (q *queue) flush() {
	q.takeTimes()
	if len(q.reposts) > 0 {
		_, err := q.qp.PostRecv(q.reposts...)
		q.reposts = q.reposts[:0]
		if err != nil {
			q.breakdown(fmt.Errorf("%w: post receive: %w", errPostRefused, err))
			return
		}
	}
	if n := len(q.sends); n > 0 {
		q.sends[n-1].Flags |= rdma.FlagSignaled
		_, err := q.qp.PostSend(q.sends...)
		q.sends = q.sends[:0]
		if err != nil {
			q.breakdown(fmt.Errorf("%w: post send: %w", errPostRefused, err))
		}
	}
}

func (q *queue) complete(wc *rdma.WC) {
	if wc.Status != rdma.StatusSuccess {
		q.failedCompletion(wc)
		return
	}
	if wc.Recv {
		if wc.ID >= uint64(q.depth) {
			q.breakdown(fmt.Errorf("%w: completion of an unknown receive", errTransferError))
			return
		}
		q.capsule(int32(wc.ID), wc.ByteLen)
		return
	}
	if wc.ID-q.tail >= q.head-q.tail {
		q.breakdown(fmt.Errorf("%w: completion of an unknown send", errTransferError))
		return
	}
	for q.tail <= wc.ID {
		e := &q.ring[q.tail&q.ringMask]
		r, kind := e.r, e.kind
		if kind == sendRead && q.tail != wc.ID {
			// A Read has a completion of its own, in order. Without it the data is not there,
			// and nothing may be written.
			q.breakdown(fmt.Errorf("%w: completions out of order", errTransferError))
			return
		}
		e.r = nil
		q.tail++
		switch kind {
		case sendRead:
			q.reads--
			r.setState(reqExecuting)
			q.run(r)
		case sendResponse:
			q.release(r)
		}
		if q.over() {
			return
		}
	}
}

// failedCompletion ends the connection. Which requests were hit does not matter:
// the queue pair is in error, nothing more is executed or answered on it.
func (q *queue) failedCompletion(wc *rdma.WC) {
	switch {
	case wc.Status == rdma.StatusFlush, wc.Status == rdma.StatusRetryExceeded:
		q.close(q.lost())
	case wc.Recv && wc.Status == rdma.StatusLocalLength:
		q.breakdown(fmt.Errorf("%w: command capsule longer than advertised", errTransferError))
	default:
		q.breakdown(fmt.Errorf("%w: %v", errTransferError, wc.Status))
	}
}

// lost is the reason of a connection that ended by itself.
func (q *queue) lost() error {
	if err := q.conn.Err(); err != nil && !errors.Is(err, rdma.ErrDisconnected) {
		return fmt.Errorf("%w: %w", errPeerGone, err)
	}
	return errPeerGone
}

// capsule takes a received message of n bytes in receive buffer i.
func (q *queue) capsule(i int32, n uint32) {
	q.commands.Add(1)
	q.lane.stats.commands.Add(1)
	if n < protocol.CommandSize {
		q.breakdown(errShortCapsule)
		return
	}
	if q.state == queueDraining {
		// Not executed, not answered: the host sends it again after it has reconnected.
		return
	}
	r := q.free.pop()
	if r == nil {
		q.lane.stats.waitContext.Add(1)
		q.received = append(q.received, receivedCapsule{i, n})
		return
	}
	q.accept(r, i, n)
}

// accept starts request r with the capsule in receive buffer i.
func (q *queue) accept(r *request, i int32, n uint32) {
	q.active++
	q.lane.active(1)
	r.setState(reqReceived)
	r.start = q.now
	r.recv, r.recvLen = i, n
	copy(r.cmd[:], q.sqes[int(i)*protocol.CommandSize:])
	q.t.trace.Command(q.remote, q.qid, &r.cmd)
	if q.state == queueAccepting {
		r.setState(reqParked)
		q.parked.push(r)
		return
	}
	q.dispatch(r)
}

// transfer brings what the command needs before it can run: a buffer, and the
// host's data in it. r has its kind, transfer length and checked SGL.
func (q *queue) transfer(r *request) {
	if r.xfer > 0 && r.sgl.Kind == protocol.DataInCapsule {
		base := int(r.recv)*q.inCapsule + int(r.sgl.Addr) - protocol.CommandSize
		r.data = q.data[base : base+int(r.xfer) : base+int(r.xfer)]
		q.lane.stats.inCapsule.Add(uint64(r.xfer))
		if r.ns != nil && misaligned(r.data, r.ns.ns.info.MemAlign) {
			r.bounce = true
		}
	}
	if n := r.bufferLen(); n > 0 {
		if !q.pool.alloc(r, n) {
			return
		}
	}
	q.gotBuffer(r)
}

// gotBuffer goes on with a request that has its buffer, or needs none.
func (q *queue) gotBuffer(r *request) {
	r.layout()
	if r.xfer > 0 && r.kind.dir == protocol.HostToController && r.sgl.Kind == protocol.DataKeyed {
		if !q.waitRead.empty() || q.reads >= q.maxReads || q.room() < 1 {
			r.setState(reqWaitRead)
			q.waitRead.push(r)
			q.lane.stats.waitRead.Add(1)
			return
		}
		q.postRead(r)
		return
	}
	r.setState(reqExecuting)
	q.run(r)
}

// run calls the command's handler.
func (q *queue) run(r *request) { r.kind.run(r) }

// room is how many work requests the send queue still takes.
func (q *queue) room() int { return q.maxSend - int(q.head-q.tail) }

// post appends a work request to the batch and an entry to the ring.
func (q *queue) post(r *request, kind sendKind, wr rdma.SendWR, sge rdma.SGE) {
	slot := q.head & q.ringMask
	q.ring[slot] = sendEntry{r, kind}
	q.sges[slot] = sge
	wr.ID = q.head
	wr.SGL = q.sges[slot : slot+1 : slot+1]
	q.head++
	q.sends = append(q.sends, wr)
	q.kick()
}

func (q *queue) postRead(r *request) {
	r.setState(reqReading)
	r.sweeps = 0
	q.reads++
	q.lane.stats.readBytes.Add(uint64(r.xfer))
	q.post(r, sendRead, rdma.SendWR{Op: rdma.OpRead, Flags: rdma.FlagSignaled, RemoteAddr: r.sgl.Addr, RKey: r.sgl.Key},
		rdma.SGE{Addr: arena.Addr(r.data), Len: r.xfer, LKey: q.bufKey})
}

// respond answers r, or drops the answer if the connection is gone.
func (q *queue) respond(r *request) {
	if r.kind == fabricsCommands[protocol.FabricsConnect] && q.state == queueConnecting && !r.status.OK() {
		q.state = queueUnconnected // the host may try again
	}
	if q.state >= queueClosing {
		q.release(r)
		return
	}
	q.account(r)
	r.dropNamespace() // the back end is done with it
	if !q.waitSend.empty() || q.room() < q.needed(r) {
		r.setState(reqWaitSend)
		q.waitSend.push(r)
		q.lane.stats.waitSend.Add(1)
		return
	}
	q.postResponse(r)
}

func (q *queue) needed(r *request) int {
	if r.out > 0 {
		return 2
	}
	return 1
}

func (q *queue) postResponse(r *request) {
	r.setState(reqResponding)
	r.sweeps = 0
	q.lane.stats.responses.Add(1)
	if r.recv >= 0 { // from here on the capsule, in-capsule data included, is gone
		q.reposts = append(q.reposts, q.recvWRs[r.recv])
		r.recv = -1
	}
	if r.out > 0 {
		q.lane.stats.writeBytes.Add(uint64(r.out))
		q.post(r, sendWrite, rdma.SendWR{Op: rdma.OpWrite, RemoteAddr: r.sgl.Addr, RKey: r.sgl.Key},
			rdma.SGE{Addr: arena.Addr(r.data), Len: r.out, LKey: q.bufKey})
	}
	if q.flowControl {
		if q.sqhd++; q.sqhd >= q.sqSize {
			q.sqhd = 0
		}
	}
	b := q.cqes[int(q.head&q.ringMask)*protocol.CompletionSize:][:protocol.CompletionSize]
	cqe, _ := protocol.CompletionView(b)
	cqe.Init(r.cmd.ID(), r.status)
	cqe.SetDW0(r.dw0)
	cqe.SetDW1(r.dw1)
	cqe.SetSQHD(q.sqhd)
	cqe.SetSQID(q.qid)
	q.t.trace.Completion(q.remote, q.qid, cqe, &r.cmd)
	wr := rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagSolicited}
	if q.inline {
		wr.Flags |= rdma.FlagInline
	}
	if q.sendInv && r.xfer > 0 && r.sgl.Invalidate {
		wr.Op, wr.InvalidateRKey = rdma.OpSendInvalidate, r.sgl.Key
		q.lane.stats.sendInv.Add(1)
	}
	q.post(r, sendResponse, wr, rdma.SGE{Addr: arena.Addr(b), Len: protocol.CompletionSize, LKey: q.mr.LKey()})
}

// resume goes on with what waited for resources that came back.
func (q *queue) resume() {
	for r := q.waitSend.head; r != nil && q.room() >= q.needed(r); r = q.waitSend.head {
		q.waitSend.remove(r)
		q.postResponse(r)
	}
	for q.waitRead.head != nil && q.waitSend.empty() && q.reads < q.maxReads && q.room() >= 1 {
		q.postRead(q.waitRead.pop())
	}
	for len(q.received) > 0 && !q.free.empty() && q.state < queueDraining {
		c := q.received[0]
		q.received = append(q.received[:0], q.received[1:]...)
		q.accept(q.free.pop(), c.recv, c.len)
	}
	if q.state == queueDraining {
		q.drained()
	}
}

// release ends a request: its response is completed, or will never be sent.
func (q *queue) release(r *request) {
	if r.recv >= 0 && q.state < queueClosing {
		q.reposts = append(q.reposts, q.recvWRs[r.recv])
	}
	r.dropNamespace()
	buf, shares := r.buf, r.shares
	r.setState(reqFree)
	r.shares = [2]*share{}
	r.recv, r.kind, r.buf, r.data, r.tmp = -1, nil, nil, nil, nil
	r.xfer, r.scratch, r.out, r.step, r.moved, r.bounce = 0, 0, 0, 0, 0, false
	r.status, r.dw0, r.dw1 = 0, 0, 0
	r.sgl = protocol.Data{}
	q.active--
	q.lane.active(-1)
	q.free.push(r)
	if buf != nil {
		q.pool.free(buf, shares)
	}
	if q.state == queueClosing && q.executing == 0 {
		q.closed()
	}
}
