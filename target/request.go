package target

import (
	"fmt"
	"time"

	"rdblk/blockdev"
	"rdblk/internal/arena"
	"rdblk/protocol"
)

// request is the context of one command, from its capsule to the completion of
// its response. It belongs to its queue's worker; blockdev owns bd between Submit
// and Done.
type request struct {
	q     *queue
	state requestState

	cmd     protocol.Command // copied from the capsule
	recv    int32            // the receive buffer it holds, -1 = posted again
	recvLen uint32           // bytes received
	kind    *command
	sgl     protocol.Data // valid if xfer > 0
	xfer    uint32        // bytes that the command transfers
	scratch uint32        // bytes of local memory that it needs besides
	bounce  bool          // in-capsule data must move to where the store's direct I/O can use it

	allocLen int    // what it waits for in reqWaitBuffer
	buf      []byte // from the lane's arena, nil = none
	data     []byte // the transfer's bytes: in buf, or in the receive buffer
	tmp      []byte // the scratch bytes, in buf
	out      uint32 // bytes of data to write to the host before the response

	status protocol.Status
	dw0    uint32
	dw1    uint32

	ns    *nsLane // namespace in use, nil = none
	bd    blockdev.Request
	step  uint16    // of a handler with several
	off   int64     // its position and what is left, bytes
	left  int64     //
	moved uint64    // bytes of the namespace that it was about, for statistics
	start time.Time // capsule arrival

	sweeps int // how often sweep has seen it since its Read or response was posted

	shares     [2]*share    // on whose account buf is: its namespace's, its association's
	stage      int          // how many of them it has passed
	list       *requestList // that it waits in for a buffer
	prev, next *request     // in one requestList
}

func (r *request) setState(s requestState) {
	if invariants && requestNext[r.state]&(1<<s) == 0 {
		panic(fmt.Sprintf("target: request goes from %v to %v", r.state, s))
	}
	if s == reqExecuting {
		r.q.executing++
	} else if r.state == reqExecuting {
		r.q.executing--
	}
	r.state = s
}

// opcodeName is for logs and dumps.
func (r *request) opcodeName() string {
	switch {
	case r.cmd.IsFabrics():
		return r.cmd.FabricsType().String()
	case r.q.qid == 0:
		return r.cmd.AdminOpcode().String()
	}
	return r.cmd.Opcode().String()
}

// fail ends the request with an error status.
func (r *request) fail(s protocol.Status) { r.finish(s, 0, 0) }

// ok ends the request with success.
func (r *request) ok() { r.finish(protocol.StatusSuccess, 0, 0) }

// finish ends the request: the response is posted now or when there is room. Of a
// successful command with data for the host, data[:xfer] is written first.
func (r *request) finish(s protocol.Status, dw0, dw1 uint32) {
	r.status, r.dw0, r.dw1 = s, dw0, dw1
	r.out = 0
	if r.kind != nil && r.kind.dir == protocol.ControllerToHost && s.OK() {
		r.out = r.xfer
	}
	r.q.respond(r)
}

// layout divides buf, which has r.bufferLen() bytes, into data and scratch.
func (r *request) layout() {
	b := r.buf
	if n := r.dataLen(); n > 0 {
		if r.bounce {
			copy(b[:n], r.data)
		}
		r.data = b[:n:n]
		b = b[min(pageUp(n), len(b)):]
	}
	if r.scratch > 0 {
		r.tmp = b[:r.scratch:r.scratch]
	}
}

// bufferLen is how much of the arena the request needs.
func (r *request) bufferLen() int {
	n := r.dataLen()
	if r.scratch > 0 {
		n = pageUp(n) + int(r.scratch)
	}
	return n
}

// dataLen is how much of it is for the transfer's bytes.
func (r *request) dataLen() int {
	if r.xfer > 0 && (r.sgl.Kind == protocol.DataKeyed || r.bounce) {
		return int(r.xfer)
	}
	return 0
}

// misaligned reports whether b cannot be used with a store that wants align.
func misaligned(b []byte, align int) bool {
	return align > 1 && arena.Addr(b)%uint64(align) != 0
}

func pageUp(n int) int { return (n + arena.MinSize - 1) &^ (arena.MinSize - 1) }
