package iwarp

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"rdblk/rdma"
)

// state of a QP. A software QP needs three of the verbs states:
//
//	INIT --established--> RTS --disconnect, error--> ERR
//	INIT --Close--> ERR <--Close-- RTS
type state uint8

const (
	stateInit state = iota // receives may be posted
	stateRTS               // connected
	stateErr               // socket gone; posts come back flushed
)

func (s state) String() string {
	switch s {
	case stateInit:
		return "INIT"
	case stateRTS:
		return "RTS"
	case stateErr:
		return "ERR"
	}
	return "unknown"
}

// piece is a part of a work request's local memory, resolved when it was posted.
type piece struct {
	mr  *region
	off uint64
	n   uint32
}

// sendWQE is an entry of the send queue.
type sendWQE struct {
	id     uint64
	raddr  uint64
	end    uint64 // position in the transmit stream behind its last byte
	length uint32
	key    uint32 // remote key; key to invalidate; key of the new binding
	op     rdma.Opcode
	flags  rdma.SendFlags
	access rdma.Access
	nsge   uint8
	done   bool // a Read whose response has come
	mw     *window
}

// recvWQE is an entry of the receive queue.
type recvWQE struct {
	id     uint64
	length uint64 // of the whole buffer
	nsge   uint8
}

// outRead is a Read that waits for its response.
type outRead struct {
	wqe  uint32 // send queue position; ready-to-receive Reads have none
	stag uint32 // sink on the wire
	size uint32
	got  uint32
	rtr  bool
}

// inRead is a Read that we serve.
type inRead struct {
	req  readRequest
	msn  uint32
	sent uint32
	end  uint64 // position in the transmit stream behind the response; 0 while it is not all queued
}

// qp is a queue pair. Everything but the fields in the last group belongs to the
// owner of its CQs; before it is established, to the goroutine that made it.
//
// Positions of queues count up for ever and are taken modulo the ring's size.
type qp struct {
	dev      *device
	pd       *pd
	conn     *conn
	scq, rcq *cq
	num      uint32
	cfg      rdma.QPConfig

	state  state
	closed bool
	fd     int
	inTx   bool // on the CQ's list
	outSet bool // epoll tells when the socket is writable

	// Send queue: head (oldest without completion) <= next (to transmit) <= tail.
	sq                     []sendWQE
	sqSGE                  []piece
	inline                 []byte
	sqMask                 uint32
	sqHead, sqNext, sqTail uint32
	sqUsed                 uint32 // slots not given back yet
	sqQuiet                uint32 // finished without completion; the next one gives their slots back

	// Receive queue.
	rq             []recvWQE
	rqSGE          []piece
	rqMask         uint32
	rqHead, rqTail uint32
	rqUsed         uint32

	windows *window // bound on this QP

	// Outbound Reads. sink is a tag that names the sinks of our Reads on the wire.
	out              []outRead
	outHead, outTail uint32
	ord              uint32
	sink             uint32

	// Inbound Reads: head (oldest not handed to TCP) <= next (to transmit) <= tail.
	in                     []inRead
	inHead, inNext, inTail uint32
	ird                    uint32

	crc bool
	tx  txState
	rx  rxState
	st  QPStats

	// Any goroutine.
	hangup  atomic.Bool // disconnect asked for
	statsMu sync.Mutex
	stats   QPStats
}

var _ rdma.QP = (*qp)(nil)

func pow2(n int) uint32 {
	s := uint32(1)
	for s < uint32(n) {
		s *= 2
	}
	return s
}

// newQP checks the configuration and allocates everything the data path needs,
// except what depends on the peer.
func newQP(c *conn, p *pd, cfg rdma.QPConfig) (*qp, error) {
	scq, ok1 := cfg.SendCQ.(*cq)
	rcq, ok2 := cfg.RecvCQ.(*cq)
	if cfg.MaxSendSGE == 0 {
		cfg.MaxSendSGE = 1
	}
	if cfg.MaxRecvSGE == 0 {
		cfg.MaxRecvSGE = 1
	}
	switch {
	case !ok1 || !ok2 || scq.dev != c.dev || rcq.dev != c.dev:
		return nil, fmt.Errorf("%w: completion queue missing or of another device", rdma.ErrInvalid)
	case p.dev != c.dev:
		return nil, fmt.Errorf("%w: protection domain of another device", rdma.ErrInvalid)
	case cfg.MaxSend < 0 || cfg.MaxSend > maxQPWR || cfg.MaxRecv < 0 || cfg.MaxRecv > maxQPWR:
		return nil, fmt.Errorf("%w: queue depths %d and %d, limit %d", rdma.ErrInvalid, cfg.MaxSend, cfg.MaxRecv, maxQPWR)
	case cfg.MaxSendSGE < 0 || cfg.MaxSendSGE > maxSGE || cfg.MaxRecvSGE < 0 || cfg.MaxRecvSGE > maxSGE:
		return nil, fmt.Errorf("%w: %d and %d SGEs per request, limit %d", rdma.ErrInvalid, cfg.MaxSendSGE, cfg.MaxRecvSGE, maxSGE)
	case cfg.MaxInline < 0 || cfg.MaxInline > maxInline:
		return nil, fmt.Errorf("%w: %d bytes inline, limit %d", rdma.ErrInvalid, cfg.MaxInline, maxInline)
	}
	if err := p.use(); err != nil {
		return nil, fmt.Errorf("protection domain: %w", err)
	}
	if err := scq.reserve(cfg.MaxSend); err != nil {
		p.release()
		return nil, fmt.Errorf("send queue: %w", err)
	}
	if err := rcq.reserve(cfg.MaxRecv); err != nil {
		scq.unreserve(cfg.MaxSend)
		p.release()
		return nil, fmt.Errorf("receive queue: %w", err)
	}
	q := &qp{dev: c.dev, pd: p, conn: c, scq: scq, rcq: rcq, cfg: cfg, fd: -1}
	if err := q.dev.tags.insert(&stagEntry{}, func(stag uint32) { q.sink = stag &^ 0xFF }); err != nil {
		rcq.unreserve(cfg.MaxRecv)
		scq.unreserve(cfg.MaxSend)
		p.release()
		return nil, err
	}
	n := pow2(cfg.MaxSend)
	q.sq, q.sqSGE, q.sqMask = make([]sendWQE, n), make([]piece, int(n)*cfg.MaxSendSGE), n-1
	q.inline = make([]byte, int(n)*cfg.MaxInline)
	n = pow2(cfg.MaxRecv)
	q.rq, q.rqSGE, q.rqMask = make([]recvWQE, n), make([]piece, int(n)*cfg.MaxRecvSGE), n-1
	q.dev.addQP(q)
	return q, nil
}

// agreed is what the start-up frames settled.
type agreed struct {
	ird, ord  int
	crc       bool
	largeFPDU bool // FPDUs may be larger than a segment
	careful   bool // keep trailers whole: the peer may be siw
	responder bool // may not send before the peer has
	rtr       uint16
}

// start connects q to its socket. The caller then posts it to its CQs.
func (q *qp) start(fd int, a agreed) {
	q.fd = fd
	q.crc = a.crc
	q.ird, q.ord = uint32(a.ird), uint32(a.ord)
	q.in = make([]inRead, pow2(a.ird))
	q.out = make([]outRead, pow2(max(a.ord, 1)))
	emss := segmentSize(fd)
	q.tx.init(q, emss, a)
	q.rx.init(a.crc)
	q.state = stateRTS
	q.scq.post(q)
	if q.rcq != q.scq {
		q.rcq.post(q)
	}
}

// Num is random in 24 bits.
func (q *qp) Num() uint32 { return q.num }

var (
	errSGECount   = fmt.Errorf("%w: too many SGEs for the queue pair", rdma.ErrInvalid)
	errLKey       = fmt.Errorf("%w: local key is not of a region in the protection domain of the queue pair", rdma.ErrInvalid)
	errLBounds    = fmt.Errorf("%w: local memory is outside of the region of its key", rdma.ErrInvalid)
	errLWrite     = fmt.Errorf("%w: region has no local write right", rdma.ErrInvalid)
	errReadSink   = fmt.Errorf("%w: region is no Read sink: on iWARP that needs the local and the remote write right", rdma.ErrInvalid)
	errReadSGE    = fmt.Errorf("%w: a Read has one SGE", rdma.ErrInvalid)
	errInlineSize = fmt.Errorf("%w: more inline data than the queue pair was made for", rdma.ErrInvalid)
	errInlineOp   = fmt.Errorf("%w: only Send and Write have inline data", rdma.ErrInvalid)
	errOpcode     = fmt.Errorf("%w: unknown opcode", rdma.ErrInvalid)
	errFlags      = fmt.Errorf("%w: unknown send flag", rdma.ErrInvalid)
	errTooLong    = fmt.Errorf("%w: message longer than 2 GiB", rdma.ErrInvalid)
	errNotReady   = fmt.Errorf("%w: queue pair is not connected yet", rdma.ErrInvalid)
	errWindow     = fmt.Errorf("%w: window missing, closed, or of another protection domain", rdma.ErrInvalid)
	errBindRight  = fmt.Errorf("%w: region does not allow this binding", rdma.ErrInvalid)
)

const flagsAll = rdma.FlagSignaled | rdma.FlagFence | rdma.FlagSolicited | rdma.FlagInline

// local resolves an SGE.
func (q *qp) local(s *rdma.SGE, need rdma.Access) (piece, error) {
	e := q.dev.tags.lookup(s.LKey)
	if e == nil || e.mr == nil || e.mr.stag != s.LKey || e.mr.pd != q.pd || e.mr.dead.Load() {
		return piece{}, errLKey
	}
	mr := e.mr
	if mr.access&need != need {
		return piece{}, errLWrite
	}
	off := s.Addr - mr.base
	if size := uint64(len(mr.mem)); off > size || uint64(s.Len) > size-off {
		return piece{}, errLBounds
	}
	return piece{mr, off, s.Len}, nil
}

// PostSend queues requests; they leave with the next Poll or Arm.
func (q *qp) PostSend(wrs ...rdma.SendWR) (int, error) {
	if q.closed {
		return 0, rdma.ErrClosed
	}
	if q.state == stateInit {
		return 0, errNotReady
	}
	n := 0
	var err error
	for n < len(wrs) {
		if err = q.postSend(&wrs[n]); err != nil {
			break
		}
		n++
	}
	if n > 0 && q.state == stateRTS {
		q.scq.kick(q)
	}
	return n, err
}

func (q *qp) postSend(w *rdma.SendWR) error {
	if q.sqUsed >= uint32(q.cfg.MaxSend) {
		return rdma.ErrQueueFull
	}
	if len(w.SGL) > q.cfg.MaxSendSGE {
		return errSGECount
	}
	if w.Flags&^flagsAll != 0 {
		return errFlags
	}
	pos := q.sqTail & q.sqMask
	e := &q.sq[pos]
	sge := q.sqSGE[int(pos)*q.cfg.MaxSendSGE:][:q.cfg.MaxSendSGE]
	var length uint64
	key := w.RKey
	nsge := 0
	switch w.Op {
	case rdma.OpSend, rdma.OpSendInvalidate, rdma.OpWrite:
		if w.Op == rdma.OpSendInvalidate {
			key = w.InvalidateRKey
		}
		if w.Flags&rdma.FlagInline != 0 {
			for j := range w.SGL {
				length += uint64(w.SGL[j].Len)
			}
			if length > uint64(q.cfg.MaxInline) {
				return errInlineSize
			}
			dst := q.inline[int(pos)*q.cfg.MaxInline:]
			for j := range w.SGL {
				s := &w.SGL[j]
				if s.Len > 0 {
					dst = dst[copy(dst, unsafe.Slice((*byte)(addrPointer(s.Addr)), s.Len)):]
				}
			}
			break
		}
		for j := range w.SGL {
			if w.SGL[j].Len == 0 {
				continue
			}
			p, err := q.local(&w.SGL[j], 0)
			if err != nil {
				return err
			}
			sge[nsge] = p
			nsge++
			length += uint64(p.n)
		}
		if length > maxMessage {
			return errTooLong
		}
	case rdma.OpRead:
		if w.Flags&rdma.FlagInline != 0 {
			return errInlineOp
		}
		if len(w.SGL) > 1 {
			return errReadSGE
		}
		if len(w.SGL) == 1 && w.SGL[0].Len > 0 {
			p, err := q.local(&w.SGL[0], rdma.AccessLocalWrite|rdma.AccessRemoteWrite)
			if err == errLWrite {
				err = errReadSink
			}
			if err != nil {
				return err
			}
			sge[0], nsge, length = p, 1, uint64(p.n)
			if length > maxMessage {
				return errTooLong
			}
		}
	case rdma.OpBindMW:
		if w.Flags&rdma.FlagInline != 0 {
			return errInlineOp
		}
		mw, ok := w.Window.(*window)
		if !ok || mw == nil || mw.pd != q.pd || mw.dead.Load() {
			return errWindow
		}
		if len(w.SGL) != 1 {
			return errReadSGE
		}
		p, err := q.local(&w.SGL[0], rdma.AccessMWBind)
		if err == errLWrite || err == nil && (w.Access&^(rdma.AccessRemoteRead|rdma.AccessRemoteWrite) != 0 ||
			w.Access&rdma.AccessRemoteWrite != 0 && p.mr.access&rdma.AccessLocalWrite == 0) {
			err = errBindRight
		}
		if err != nil {
			return err
		}
		sge[0], nsge = p, 1
		key = rdma.NextKey(mw.key.Load())
		mw.key.Store(key)
		e.mw = mw
	case rdma.OpLocalInvalidate:
		if w.Flags&rdma.FlagInline != 0 {
			return errInlineOp
		}
		key = w.InvalidateRKey
	default:
		return errOpcode
	}
	e.id, e.raddr, e.key, e.op, e.flags, e.access = w.ID, w.RemoteAddr, key, w.Op, w.Flags, w.Access
	e.length, e.nsge, e.done, e.end = uint32(length), uint8(nsge), false, 0
	q.sqTail++
	q.sqUsed++
	if q.state == stateErr {
		q.flushSend(0, rdma.StatusFlush)
	}
	return nil
}

// PostRecv queues receive buffers.
func (q *qp) PostRecv(wrs ...rdma.RecvWR) (int, error) {
	if q.closed {
		return 0, rdma.ErrClosed
	}
	n := 0
	var err error
	for n < len(wrs) {
		if err = q.postRecv(&wrs[n]); err != nil {
			break
		}
		n++
	}
	if n > 0 && q.state == stateErr {
		q.flushRecv(rdma.StatusFlush)
	}
	return n, err
}

func (q *qp) postRecv(w *rdma.RecvWR) error {
	if q.rqUsed >= uint32(q.cfg.MaxRecv) {
		return rdma.ErrQueueFull
	}
	if len(w.SGL) > q.cfg.MaxRecvSGE {
		return errSGECount
	}
	pos := q.rqTail & q.rqMask
	sge := q.rqSGE[int(pos)*q.cfg.MaxRecvSGE:][:q.cfg.MaxRecvSGE]
	nsge := 0
	var length uint64
	for j := range w.SGL {
		if w.SGL[j].Len == 0 {
			continue
		}
		p, err := q.local(&w.SGL[j], rdma.AccessLocalWrite)
		if err != nil {
			return err
		}
		sge[nsge] = p
		nsge++
		length += uint64(p.n)
	}
	q.rq[pos] = recvWQE{id: w.ID, length: length, nsge: uint8(nsge)}
	q.rqTail++
	q.rqUsed++
	return nil
}

// retire completes send queue requests in order, as far as they are done.
func (q *qp) retire() {
	for q.sqHead != q.sqNext {
		e := &q.sq[q.sqHead&q.sqMask]
		switch e.op {
		case rdma.OpRead:
			if !e.done {
				return
			}
		default: // handed to TCP, or executed
			if e.end > q.tx.sent {
				return
			}
		}
		q.sqHead++
		q.sqQuiet++
		if e.flags&rdma.FlagSignaled != 0 {
			q.scq.push(q, q.sqQuiet, rdma.WC{ID: e.id, QPNum: q.num, ByteLen: e.length})
			q.sqQuiet = 0
		}
		e.mw = nil
	}
}

// flushSend completes what is left of the send queue in error: the request at
// position blame, if it is still there, with its own status.
func (q *qp) flushSend(blame uint32, status rdma.Status) {
	for ; q.sqHead != q.sqTail; q.sqHead++ {
		e := &q.sq[q.sqHead&q.sqMask]
		st := rdma.StatusFlush
		if q.sqHead == blame {
			st = status
		}
		q.scq.push(q, q.sqQuiet+1, rdma.WC{ID: e.id, QPNum: q.num, Status: st})
		q.sqQuiet = 0
		e.mw = nil
	}
	q.sqNext = q.sqTail
}

// flushRecv completes what is left of the receive queue: the oldest with status.
func (q *qp) flushRecv(status rdma.Status) {
	for ; q.rqHead != q.rqTail; q.rqHead++ {
		e := &q.rq[q.rqHead&q.rqMask]
		q.rcq.push(q, 1, rdma.WC{ID: e.id, QPNum: q.num, Status: status, Recv: true})
		status = rdma.StatusFlush
	}
}

// resume puts q on the list of those that transmit, if there is anything.
func (q *qp) resume() {
	if q.tx.first != q.tx.n || q.tx.rtr != 0 || q.sqNext != q.sqTail || q.inNext != q.inTail {
		q.scq.kick(q)
	}
}

// watchWrite chooses whether epoll tells when the socket is writable.
func (q *qp) watchWrite(on bool) {
	if on == q.outSet || q.state != stateRTS {
		return
	}
	q.outSet = on
	ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(q.fd)}
	if on {
		ev.Events |= unix.EPOLLOUT
	}
	unix.EpollCtl(q.scq.epfd, unix.EPOLL_CTL_MOD, q.fd, &ev)
	if q.rcq != q.scq {
		unix.EpollCtl(q.rcq.epfd, unix.EPOLL_CTL_MOD, q.fd, &ev)
	}
}

// failure describes why a QP ends.
type failure struct {
	err        error
	term       termCode // to send
	seg        []byte   // beginning of the offending FPDU
	detail     string
	sendStatus rdma.Status // for the send request at sendPos
	sendPos    uint32
	recvStatus rdma.Status // for the oldest receive
	linger     bool        // deliver what TCP has
	eof        bool        // the peer has closed: nothing is unread
}

// end ends the connection without a Terminate.
func (q *qp) end(err error) { q.fail(failure{err: err, linger: true}) }

// fail moves q to ERR: Terminate if there is one, socket closed, everything
// outstanding flushed. Owner, inside Poll or Arm.
func (q *qp) fail(f failure) {
	if q.state != stateRTS {
		return
	}
	if f.term != 0 {
		te := &TerminateError{Sent: true, Layer: f.term.layer(), Type: f.term.etype(), Code: f.term.code(), Detail: f.detail}
		q.dev.countTerminate(te, q.conn.RemoteAddr())
		if f.err == nil {
			f.err = te
		}
		f.linger = true
		q.sendTerminate(f.term, f.seg)
	}
	if f.sendStatus == 0 {
		f.sendStatus = rdma.StatusFlush
	}
	if f.recvStatus == 0 {
		f.recvStatus = rdma.StatusFlush
	}
	q.retire()
	q.hangUp(f.linger, f.eof)
	q.flushSend(f.sendPos, f.sendStatus)
	q.flushRecv(f.recvStatus)
	q.publish()
	q.conn.ended(f.err)
}

// hangUp closes the socket and leaves RTS.
func (q *qp) hangUp(linger, eof bool) {
	q.state = stateErr
	q.scq.drop(q)
	q.rcq.drop(q)
	switch {
	case eof:
		unix.Close(q.fd)
	case linger:
		unix.Shutdown(q.fd, unix.SHUT_WR)
		q.dev.linger(q.fd)
	default:
		abort(q.fd)
	}
}

// disconnect asks the owner to end the connection. The owner alone touches the
// socket, so its descriptor cannot be another's by the time it is used. Any goroutine.
func (q *qp) disconnect() {
	q.hangup.Store(true)
	q.scq.wake()
	if q.rcq != q.scq {
		q.rcq.wake()
	}
}

// Close destroys the QP. On a connection that is still up it resets the socket.
func (q *qp) Close() error {
	if q.closed {
		return nil
	}
	q.closed = true
	if q.state == stateRTS {
		q.hangUp(false, false)
		q.conn.ended(errors.New("queue pair closed"))
	}
	q.state = stateErr
	for q.windows != nil {
		q.windows.unbind(q)
	}
	q.scq.detach(q, q.cfg.MaxSend)
	q.rcq.detach(q, q.cfg.MaxRecv)
	q.dev.tags.remove(q.sink)
	q.publish()
	q.dev.removeQP(q)
	q.pd.release()
	return nil
}

// publish makes the counters visible to other goroutines.
func (q *qp) publish() {
	q.statsMu.Lock()
	q.stats = q.st
	q.statsMu.Unlock()
}

// Stats are the counters as of the last time the owner armed its CQ. Any goroutine.
func (q *qp) Stats() QPStats {
	q.statsMu.Lock()
	defer q.statsMu.Unlock()
	return q.stats
}
