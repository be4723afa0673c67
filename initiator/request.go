package initiator

import (
	"fmt"
	"time"

	"rdblk/blockdev"
	"rdblk/protocol"
)

// A request is the ledger entry of one blockdev.Request: it is made when the request is
// accepted and ends when that is answered.
//
//	accepted ─► waiting ─► sent ─┬─► answered
//	               ▲  ▲          │
//	               │  └──────────┤ connection lost, or refused form of the command
//	               └── delayed ◄─┘ target asks to try later
//
// It is cut into as many commands as the target's limits ask for, which are made one by
// one as the queue has room, in turns with those of other requests. If any of them has
// to be sent again the whole request is, once none of its commands is with the target:
// nothing of it has been acknowledged, so doing parts twice is invisible.
type request struct {
	r      *blockdev.Request
	ns     *namespace
	op     blockdev.Op
	fua    bool
	region int32

	// What no command has been made for yet.
	off  int64
	left int64 // bytes; of a flush 1 until it is sent
	pos  int   // in r.Buf

	inflight int  // commands with the target
	parts    int  // commands since the last (re)start
	ready    bool // in the queue's list of requests with something to send
	delayed  bool // a timer will make it ready
	again    bool // to be started anew when inflight is 0
	lost     bool // ... since the connection was lost
	err      error
	later    protocol.Status // ... since the target said so

	accepted  int64 // nano
	busySince int64 // nano of the first answer to try later
	goneSince int64 // since when the namespace was gone when it first had to wait for that
	tries     int   // answers to try later
	losses    int   // times that the connection was lost under it
	gen       uint32

	// Of a flush: what had been acknowledged on each queue when it was sent.
	marks []uint64

	next, prev   *request // the ledger, in order of acceptance
	rnext, rprev *request // the ready list
}

// maxParts bounds the commands that a request has with the target at a time, so that a
// huge one does not take all slots.
func (r *request) maxParts() int {
	if r.op == blockdev.OpZero || r.op == blockdev.OpDiscard {
		return 4
	}
	return 32
}

// writes tells whether the request changes the medium.
func (r *request) writes() bool {
	return r.op == blockdev.OpWrite || r.op == blockdev.OpZero || r.op == blockdev.OpDiscard
}

// durable tells whether success promises stable storage.
func (r *request) durable() bool { return r.fua || r.op == blockdev.OpFlush }

// rewind makes all of the request unsent.
func (r *request) rewind() {
	r.off, r.pos, r.parts = r.r.Off, 0, 0
	switch r.op {
	case blockdev.OpRead, blockdev.OpWrite:
		r.left = int64(len(r.r.Buf))
	case blockdev.OpFlush:
		r.left = 1
	default:
		r.left = r.r.Len
	}
	r.again, r.lost, r.later = false, false, 0
}

// String describes the request for messages.
func (r *request) String() string {
	switch r.op {
	case blockdev.OpFlush:
		return "flush"
	case blockdev.OpRead, blockdev.OpWrite:
		return fmt.Sprintf("%s of %d bytes at %d", r.op, len(r.r.Buf), r.r.Off)
	}
	return fmt.Sprintf("%s of %d bytes at %d", r.op, r.r.Len, r.r.Off)
}

// requestList is the ledger.
type requestList struct{ head, tail *request }

func (l *requestList) push(r *request) {
	r.next, r.prev = nil, l.tail
	if l.tail == nil {
		l.head = r
	} else {
		l.tail.next = r
	}
	l.tail = r
}

func (l *requestList) remove(r *request) {
	if r.prev == nil {
		l.head = r.next
	} else {
		r.prev.next = r.next
	}
	if r.next == nil {
		l.tail = r.prev
	} else {
		r.next.prev = r.prev
	}
	r.next, r.prev = nil, nil
}

// readyList holds the requests that have something to send.
type readyList struct{ head, tail *request }

func (l *readyList) push(r *request) {
	r.ready = true
	r.rnext, r.rprev = nil, l.tail
	if l.tail == nil {
		l.head = r
	} else {
		l.tail.rnext = r
	}
	l.tail = r
}

func (l *readyList) remove(r *request) {
	if !r.ready {
		return
	}
	r.ready = false
	if r.rprev == nil {
		l.head = r.rnext
	} else {
		r.rprev.rnext = r.rnext
	}
	if r.rnext == nil {
		l.tail = r.rprev
	} else {
		r.rnext.rprev = r.rprev
	}
	r.rnext, r.rprev = nil, nil
}

// verdict is what a failure status means for a request.
type verdict uint8

const (
	verdictFail  verdict = iota // the request fails with it
	verdictLater                // try again after a while
	verdictOther                // the target cannot do it in this form: try another
	verdictGone                 // the target has no such namespace: try again when it is back
	numVerdicts  = iota
)

// judge decides what the answer to a command of op means (NVMe Base, "Status Code
// Definitions"). What a target calls temporary is tried again. An error that might have
// hit the data is not for a Flush: a second one would find nothing left to write and
// succeed. A namespace that was attached and is not there now may come back whatever Do
// Not Retry says: targets disable one to change it.
func judge(op blockdev.Op, s protocol.Status) verdict {
	code := s.Code()
	switch code {
	case protocol.StatusInvalidOpcode, protocol.StatusInvalidField, protocol.StatusCommandSizeExceeded:
		if op == blockdev.OpZero || op == blockdev.OpDiscard {
			return verdictOther
		}
		return verdictFail
	case protocol.StatusInvalidNamespace:
		return verdictGone
	}
	if s.DoNotRetry() {
		return verdictFail
	}
	switch code {
	case protocol.StatusNamespaceNotReady, protocol.StatusCommandInterrupted, protocol.StatusTransientTransportError,
		protocol.StatusAdminMediaNotReady, protocol.StatusAbortedSQDeletion, protocol.StatusAbortRequested:
		return verdictLater
	case protocol.StatusInternalError, protocol.StatusDataTransferError:
		if op != blockdev.OpFlush {
			return verdictLater // no buffer, a transfer that failed
		}
	}
	if s.IsPath() {
		return verdictLater
	}
	return verdictFail
}

// harmless tells whether a failed FUA write says nothing about the durability of
// anything else: the target refused it before it reached the medium.
func harmless(s protocol.Status) bool {
	switch s.Code() {
	case protocol.StatusNamespaceWriteProtected, protocol.StatusWriteToReadOnlyRange, protocol.StatusLBAOutOfRange,
		protocol.StatusCapacityExceeded, protocol.StatusInvalidField, protocol.StatusInvalidOpcode,
		protocol.StatusCommandSizeExceeded, protocol.StatusInvalidNamespace, protocol.StatusDataSGLLengthInvalid,
		protocol.StatusSGLOffsetInvalid, protocol.StatusSGLTypeInvalid, protocol.StatusAccessDenied, protocol.StatusOperationDenied:
		return true
	}
	return false
}

// retryDelay is how long to wait before a request is repeated, the try-th time: what
// the target's command retry delay (CRD) asks for, else from 50 ms doubling to 1 s.
func retryDelay(try int, asked time.Duration) time.Duration {
	if asked > 0 {
		return min(asked, 10*time.Second)
	}
	return min(50*time.Millisecond<<min(max(try-1, 0), 10), time.Second)
}
