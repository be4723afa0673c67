// Package trace writes what passes between host and controller, one line for each
// capsule, connection event and status, in the words of the NVMe specifications:
//
//	14:03:07.418203 10.0.0.2:50312 q1 > Read cid=0x7005 nsid=1 slba=0 blocks=8 sgl=keyed addr=0x7f12… len=4096 key=0x89f01 invalidate
//	14:03:07.418291 10.0.0.2:50312 q1 < Completion cid=0x7005 sqhd=6 status="success"
//	14:03:09.000412 10.0.0.2:50311 q0 - disconnected: keep-alive timeout
//
// That is the time of day, the address of the other side, the queue, the direction (>
// host to controller, < controller to host, - neither), and what it was. A keyed SGL's
// data is fetched and delivered without a capsule, so it has no line of its own. No
// data of commands is written, only the commands.
//
// # Cost
//
// A nil *Tracer is a trace that is off: every method returns at once, nothing is
// formatted or allocated. One that is on formats into a buffer that all queues share,
// under a lock, without allocating; a goroutine writes the buffer out. A reader that is
// slow (a terminal, a full disk) slows nothing down: at most [BufferSize] bytes wait for
// it, what comes then is left out, and the next line that has room says how many were.
package trace

import (
	"fmt"
	"io"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"time"

	"rdblk/protocol"
)

// BufferSize is how many bytes of lines may wait to be written, beside as many that are
// being written.
const BufferSize = 1 << 20

// maxLine bounds one line. Descriptions are of bounded numbers and known words; only
// errors have texts of any length, and are cut.
const maxLine = 1024

// closeTimeout is how long Close waits for the writer.
const closeTimeout = time.Second

// A Tracer writes lines. Its methods may be called from any goroutine, and on nil.
type Tracer struct {
	w   io.Writer
	now func() time.Time

	mu      sync.Mutex
	wake    sync.Cond
	pending []byte // lines to be written
	writing []byte // lines being written: the goroutine's
	dropped uint64 // lines left out since the last that said so
	lost    uint64 // lines left out altogether
	closed  bool
	err     error // of w; nothing is written after it

	done chan struct{}
}

// New makes a Tracer that writes to w, one Write for many lines. Close it. A nil w gives
// a nil Tracer.
func New(w io.Writer) *Tracer {
	if w == nil {
		return nil
	}
	return newTracer(w, time.Now)
}

func newTracer(w io.Writer, now func() time.Time) *Tracer {
	t := &Tracer{w: w, now: now, pending: make([]byte, 0, BufferSize), writing: make([]byte, 0, BufferSize), done: make(chan struct{})}
	t.wake.L = &t.mu
	go t.run()
	return t
}

// Command traces a command capsule that was sent (by a host) or received (by a
// controller) on queue qid of the connection with peer.
func (t *Tracer) Command(peer netip.AddrPort, qid uint16, c *protocol.Command) {
	if t == nil {
		return
	}
	t.mu.Lock()
	if b := t.begin(peer, qid, '>'); b != nil {
		t.end(protocol.AppendDescription(b, c, qid == 0))
	}
	t.mu.Unlock()
}

// Completion traces a response capsule. c is the command that it answers.
func (t *Tracer) Completion(peer netip.AddrPort, qid uint16, e *protocol.Completion, c *protocol.Command) {
	if t == nil {
		return
	}
	t.mu.Lock()
	if b := t.begin(peer, qid, '<'); b != nil {
		t.end(protocol.AppendCompletionDescription(b, e, c, qid == 0))
	}
	t.mu.Unlock()
}

// Request traces the private data of an RDMA_CM connection request.
func (t *Tracer) Request(peer netip.AddrPort, r *protocol.RDMAConnectRequest, reads int) {
	if t == nil {
		return
	}
	t.mu.Lock()
	if b := t.begin(peer, r.QID, '>'); b != nil {
		b = append(b, " RDMA connection request"...)
		b = field(b, "hrqsize", uint64(r.HRQSIZE))
		b = field(b, "hsqsize", uint64(r.HSQSIZE))
		if r.CNTLID != 0 {
			b = field(b, "cntlid", uint64(r.CNTLID))
		}
		t.end(field(b, "responder-resources", uint64(max(reads, 0))))
	}
	t.mu.Unlock()
}

// Accepted traces the establishment of a connection.
func (t *Tracer) Accepted(peer netip.AddrPort, qid uint16, crqsize uint16, reads int) {
	if t == nil {
		return
	}
	t.mu.Lock()
	if b := t.begin(peer, qid, '<'); b != nil {
		b = append(b, " RDMA connection accepted"...)
		b = field(b, "crqsize", uint64(crqsize))
		t.end(field(b, "initiator-depth", uint64(max(reads, 0))))
	}
	t.mu.Unlock()
}

// NoQueue stands for a queue identifier that is not known.
const NoQueue = 0xFFFF

// Rejected traces a connection request that was refused.
func (t *Tracer) Rejected(peer netip.AddrPort, qid uint16, status protocol.RejectStatus, why error) {
	if t == nil {
		return
	}
	t.mu.Lock()
	if b := t.begin(peer, qid, '<'); b != nil {
		b = append(b, " RDMA connection rejected status="...)
		b = strconv.AppendQuote(b, status.String())
		t.end(reason(b, why))
	}
	t.mu.Unlock()
}

// Disconnected traces the end of a connection.
func (t *Tracer) Disconnected(peer netip.AddrPort, qid uint16, why error) {
	if t == nil {
		return
	}
	t.mu.Lock()
	if b := t.begin(peer, qid, '-'); b != nil {
		t.end(reason(append(b, " disconnected"...), why))
	}
	t.mu.Unlock()
}

// Event traces something that happened in this program and that the other side will be
// told of or not: what changed, in the specification's words.
func (t *Tracer) Event(what string, nsid uint32) {
	if t == nil {
		return
	}
	t.mu.Lock()
	if b := t.begin(netip.AddrPort{}, 0, '-'); b != nil {
		b = append(append(b, ' '), what...)
		if nsid != 0 {
			b = field(b, "nsid", uint64(nsid))
		}
		t.end(b)
	}
	t.mu.Unlock()
}

func field(b []byte, k string, v uint64) []byte {
	b = append(b, ' ')
	b = append(b, k...)
	b = append(b, '=')
	return strconv.AppendUint(b, v, 10)
}

// reason appends an error, whose text a peer may have had a part in, on one line.
func reason(b []byte, err error) []byte {
	if err == nil {
		return b
	}
	b = append(b, " reason="...)
	s := err.Error()
	if len(s) > maxLine/4 {
		s = s[:maxLine/4]
	}
	return strconv.AppendQuote(b, s)
}

// begin starts a line and returns the buffer to append it to, a space first, or nil if
// there is no room. t.mu is held.
func (t *Tracer) begin(peer netip.AddrPort, qid uint16, dir byte) []byte {
	if t.closed || t.err != nil || len(t.pending)+2*maxLine > cap(t.pending) {
		t.dropped++
		t.lost++
		return nil
	}
	b := t.pending
	now := t.now()
	if n := t.dropped; n > 0 {
		t.dropped = 0
		b = append(clock(b, now), " - "...)
		b = strconv.AppendUint(b, n, 10)
		b = append(b, " lines left out: they came faster than they could be written\n"...)
	}
	b = append(clock(b, now), ' ')
	if peer.IsValid() {
		b = append(peer.AppendTo(b), ' ')
		if qid != NoQueue {
			b = append(strconv.AppendUint(append(b, 'q'), uint64(qid), 10), ' ')
		}
	}
	return append(b, dir)
}

// end takes a finished line. t.mu is held.
func (t *Tracer) end(b []byte) {
	t.pending = append(b, '\n')
	t.wake.Signal()
}

// clock appends the time of day with microseconds.
func clock(b []byte, at time.Time) []byte { return at.AppendFormat(b, "15:04:05.000000") }

// run writes lines until Close.
func (t *Tracer) run() {
	defer close(t.done)
	t.mu.Lock()
	defer t.mu.Unlock()
	for {
		for len(t.pending) == 0 && !t.closed {
			t.wake.Wait()
		}
		if len(t.pending) == 0 {
			return
		}
		t.pending, t.writing = t.writing[:0], t.pending
		t.mu.Unlock()
		_, err := t.w.Write(t.writing)
		t.mu.Lock()
		if err != nil && t.err == nil {
			t.err = err
			t.pending = t.pending[:0]
		}
	}
}

// Lost is how many lines were left out so far.
func (t *Tracer) Lost() uint64 {
	if t == nil {
		return 0
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.lost
}

// Close writes what is left, without closing the writer, and returns the first error of
// the writer. One that hangs is not waited for longer than a second. Lines that come
// later are left out.
func (t *Tracer) Close() error {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	t.closed = true
	t.wake.Signal()
	t.mu.Unlock()
	timeout := time.NewTimer(closeTimeout)
	defer timeout.Stop()
	select {
	case <-t.done:
	case <-timeout.C:
		return fmt.Errorf("trace: %w: the last lines may be missing", os.ErrDeadlineExceeded)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err != nil {
		return fmt.Errorf("trace: %w", t.err)
	}
	return nil
}
