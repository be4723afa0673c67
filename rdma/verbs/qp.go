//go:build cgo && linux && !noverbs

package verbs

/*
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"rdblk/rdma"
)

// entry is a work request that has been posted and has not come back.
type entry struct {
	id       uint64
	length   uint32
	signaled bool // the device tells when it is done
	hidden   bool // and nobody asked for that
	soft     bool // this package completes it, with status
	held     bool // soft because the device completed it before what is in front of it
	status   rdma.Status
	window   *mw
}

// ring is a send or receive queue: slots[tail:tail+count], wrapping, in order of posting.
type ring struct {
	q         *qp
	cq        *cq
	recv      bool
	slots     []entry
	tail      int
	count     int
	softCount int
	base      uint64 // upper part of work request numbers
}

// head is where the next request goes.
func (r *ring) head() int {
	if h := r.tail + r.count; h < len(r.slots) {
		return h
	} else {
		return h - len(r.slots)
	}
}

// waits tells whether one of the d oldest entries has still to complete by itself.
func (r *ring) waits(d int) bool {
	if r.recv {
		return false
	}
	for i, k := r.tail, 0; k < d; k++ {
		if s := &r.slots[i]; s.signaled || s.soft {
			return true
		}
		if i++; i == len(r.slots) {
			i = 0
		}
	}
	return false
}

// due tells how many entries, done without a completion, stand before the first soft one that may be handed out; -1: none may.
func (r *ring) due() int {
	for i, k := r.tail, 0; k < r.count; k++ {
		s := &r.slots[i]
		if s.soft {
			if k == 0 || s.held {
				return k
			}
			return -1
		}
		if s.signaled {
			return -1
		}
		if i++; i == len(r.slots) {
			i = 0
		}
	}
	return -1
}

// pop takes the oldest entry out.
func (r *ring) pop() {
	if s := &r.slots[r.tail]; s.soft {
		s.soft, s.held = false, false
		r.softCount--
	}
	r.count--
	if r.tail++; r.tail == len(r.slots) {
		r.tail = 0
	}
}

// soften makes the last entry one that this package completes.
func (r *ring) soften(i int, st rdma.Status) {
	r.slots[i].soft, r.slots[i].status = true, st
	r.softCount++
	for _, x := range r.cq.soft {
		if x == r {
			return
		}
	}
	r.cq.soft = append(r.cq.soft, r)
}

// qp is a queue pair.
type qp struct {
	c   *conn
	dev *device
	pd  *pd
	q   *C.struct_vb_qp
	num uint32
	cfg rdma.QPConfig

	sq, rq  ring
	sends   []C.struct_vb_send_wr // C memory, as are the next three; linked in a circle
	sendSGE []C.struct_vb_sge
	recvs   []C.struct_vb_recv_wr
	recvSGE []C.struct_vb_sge
	maxS    int // SGEs per request in those
	maxR    int
	copies  *copies

	bad     bool // a request has failed: what is posted now is flushed here. Owner only
	told    bool // the connection has been told of the first failure
	binds   int  // among the requests that wait for the doorbell
	windows []*mw
	byKey   map[uint32]*mw // windows by the upper part of their keys, which stays
	last    *mr            // of the latest SGE: the next one is probably of the same region
	closed  atomic.Bool
}

// CreateQP makes the Conn's queue pair.
func (c *conn) CreateQP(domain rdma.PD, cfg rdma.QPConfig) (rdma.QP, error) {
	fail := func(err error) (rdma.QP, error) {
		return nil, &rdma.OpError{Op: "create queue pair", Provider: providerName, Addr: c.remote, Err: err}
	}
	bad := func(format string, a ...any) (rdma.QP, error) {
		return fail(fmt.Errorf("%w: "+format, append([]any{rdma.ErrInvalid}, a...)...))
	}
	p, _ := domain.(*pd)
	scq, _ := cfg.SendCQ.(*cq)
	rcq, _ := cfg.RecvCQ.(*cq)
	info := c.dev.info
	if cfg.MaxSendSGE == 0 {
		cfg.MaxSendSGE = 1
	}
	if cfg.MaxRecvSGE == 0 {
		cfg.MaxRecvSGE = 1
	}
	switch {
	case p == nil || p.dev != c.dev:
		return bad("no protection domain of device %s", info.Name)
	case scq == nil || rcq == nil || scq.dev != c.dev || rcq.dev != c.dev:
		return bad("no completion queues of device %s", info.Name)
	case cfg.MaxSend < 0 || cfg.MaxRecv < 0 || cfg.MaxSend > info.MaxQPWR || cfg.MaxRecv > info.MaxQPWR:
		return bad("%d send and %d receive requests; device %s has 0 to %d", cfg.MaxSend, cfg.MaxRecv, info.Name, info.MaxQPWR)
	case cfg.MaxSendSGE < 0 || cfg.MaxRecvSGE < 0 || cfg.MaxSendSGE > info.MaxSGE || cfg.MaxRecvSGE > info.MaxSGE:
		return bad("%d and %d SGEs; device %s has 1 to %d", cfg.MaxSendSGE, cfg.MaxRecvSGE, info.Name, info.MaxSGE)
	case cfg.MaxInline < 0 || cfg.MaxInline > info.MaxInline:
		return bad("%d bytes inline; device %s has 0 to %d", cfg.MaxInline, info.Name, info.MaxInline)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return fail(rdma.ErrClosed)
	case c.q != nil:
		return bad("the connection has a queue pair")
	}
	err := p.use(1)
	if err != nil {
		return fail(err)
	}
	undo := []func(){func() { p.use(-1) }}
	back := func(err error) (rdma.QP, error) {
		for _, f := range undo {
			f()
		}
		return fail(err)
	}
	q := &qp{c: c, dev: c.dev, pd: p, cfg: cfg, maxS: max(cfg.MaxSendSGE, 1), maxR: max(cfg.MaxRecvSGE, 1)}
	for _, x := range []struct {
		r    *ring
		cq   *cq
		n    int
		recv bool
	}{{&q.sq, scq, cfg.MaxSend, false}, {&q.rq, rcq, cfg.MaxRecv, true}} {
		if err := x.cq.reserve(x.n); err != nil {
			return back(err)
		}
		undo = append(undo, func() { x.cq.unreserve(x.n) })
		*x.r = ring{q: q, cq: x.cq, recv: x.recv, slots: make([]entry, x.n)}
	}
	if c.dev.siw && cfg.MaxInline > 0 && cfg.MaxSend > 0 {
		if q.copies, err = newCopies(p, cfg.MaxSend, cfg.MaxInline); err != nil {
			return back(err)
		}
		undo = append(undo, q.copies.close)
	}
	hw := C.struct_vb_qp_cap{max_send_wr: C.uint32_t(max(cfg.MaxSend, 1)), max_recv_wr: C.uint32_t(max(cfg.MaxRecv, 1)),
		max_send_sge: C.uint32_t(q.maxS), max_recv_sge: C.uint32_t(q.maxR), max_inline_data: C.uint32_t(cfg.MaxInline)}
	if e := C.vb_cm_create_qp(c.id, p.p, scq.q, rcq.q, &hw); e != 0 {
		return back(errnoError(syscall.Errno(e)))
	}
	undo = append(undo, func() { C.vb_qp_destroy(C.vb_cm_take_qp(c.id)) })
	if int(hw.max_inline_data) < cfg.MaxInline {
		return back(fmt.Errorf("%w: the device gave %d bytes inline of %d", rdma.ErrInvalid, hw.max_inline_data, cfg.MaxInline))
	}
	q.q = c.id.qp
	q.num = uint32(q.q.qp_num)
	var base uint64
	if base, err = scq.attach(q); err != nil {
		return back(err)
	}
	q.sq.base, q.rq.base = base, base
	if rcq != scq {
		if q.rq.base, err = rcq.attach(q); err != nil {
			scq.detach(q)
			return back(err)
		}
	}
	q.alloc()
	c.q = q
	c.dev.p.lib.mu.Lock()
	c.dev.p.lib.qps[uintptr(unsafe.Pointer(q.q))] = q
	c.dev.p.lib.mu.Unlock()
	return q, nil
}

// alloc makes the rings in C memory: the device's library follows the pointers in them.
func (q *qp) alloc() {
	if n := q.cfg.MaxSend; n > 0 {
		q.sends = unsafe.Slice((*C.struct_vb_send_wr)(C.calloc(C.size_t(n), C.sizeof_struct_vb_send_wr)), n)
		q.sendSGE = unsafe.Slice((*C.struct_vb_sge)(C.calloc(C.size_t(n*q.maxS), C.sizeof_struct_vb_sge)), n*q.maxS)
		for i := range q.sends {
			w := &q.sends[i]
			w.wr_id = C.uint64_t(q.sq.base | uint64(i))
			w.next = C.uintptr_t(uintptr(unsafe.Pointer(&q.sends[(i+1)%n])))
			w.sg_list = C.uintptr_t(uintptr(unsafe.Pointer(&q.sendSGE[i*q.maxS])))
		}
	}
	if n := q.cfg.MaxRecv; n > 0 {
		q.recvs = unsafe.Slice((*C.struct_vb_recv_wr)(C.calloc(C.size_t(n), C.sizeof_struct_vb_recv_wr)), n)
		q.recvSGE = unsafe.Slice((*C.struct_vb_sge)(C.calloc(C.size_t(n*q.maxR), C.sizeof_struct_vb_sge)), n*q.maxR)
		for i := range q.recvs {
			w := &q.recvs[i]
			w.wr_id = C.uint64_t(q.rq.base | idRecv | uint64(i))
			w.next = C.uintptr_t(uintptr(unsafe.Pointer(&q.recvs[(i+1)%n])))
			w.sg_list = C.uintptr_t(uintptr(unsafe.Pointer(&q.recvSGE[i*q.maxR])))
		}
	}
}

func (q *qp) free() {
	if len(q.sends) > 0 {
		C.free(unsafe.Pointer(&q.sends[0]))
		C.free(unsafe.Pointer(&q.sendSGE[0]))
	}
	if len(q.recvs) > 0 {
		C.free(unsafe.Pointer(&q.recvs[0]))
		C.free(unsafe.Pointer(&q.recvSGE[0]))
	}
	q.sends, q.sendSGE, q.recvs, q.recvSGE = nil, nil, nil, nil
	if q.copies != nil {
		q.copies.close()
	}
}

// copies is where inline data waits that the device does not take inline: siw stops for ever at an inline Send with
// Invalidate.
type copies struct {
	mem  []byte
	m    *C.struct_vb_mr
	size int
}

func newCopies(p *pd, n, size int) (*copies, error) {
	x := &copies{size: size}
	var err error
	if x.mem, err = unix.Mmap(-1, 0, n*size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
		return nil, err
	}
	if e := C.vb_reg_mr(p.p, C.uintptr_t(uintptr(unsafe.Pointer(&x.mem[0]))), C.size_t(n*size), 0, &x.m); e != 0 {
		unix.Munmap(x.mem)
		return nil, memoryError(syscall.Errno(e), n*size)
	}
	return x, nil
}

func (x *copies) close() {
	C.vb_dereg_mr(x.m)
	unix.Munmap(x.mem)
}

// put copies what an SGL names to place i and returns it as one SGE.
func (x *copies) put(i int, sgl []rdma.SGE) C.struct_vb_sge {
	addr := C.uintptr_t(uintptr(unsafe.Pointer(&x.mem[i*x.size])))
	n := C.uintptr_t(0)
	for j := range sgl {
		C.vb_copy(addr+n, C.uintptr_t(sgl[j].Addr), C.size_t(sgl[j].Len))
		n += C.uintptr_t(sgl[j].Len)
	}
	return C.struct_vb_sge{addr: C.uint64_t(addr), length: C.uint32_t(n), lkey: x.m.lkey}
}

func (q *qp) Num() uint32 { return q.num }

// region finds the region of an SGE and checks the piece.
func (q *qp) region(s *rdma.SGE, need rdma.Access) *mr {
	m := q.last
	if m == nil || m.lkey != s.LKey || m.dead.Load() {
		m = (*q.pd.mrs.Load())[s.LKey]
		if m == nil {
			return nil
		}
		q.last = m
	}
	if !m.holds(s.Addr, s.Len, need) {
		return nil
	}
	return m
}

func invalid(format string, a ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{rdma.ErrInvalid}, a...)...)
}

const allFlags = rdma.FlagSignaled | rdma.FlagFence | rdma.FlagSolicited | rdma.FlagInline

// Opcodes, enum ibv_wr_opcode.
var opcodes = [...]C.int32_t{rdma.OpSend: 2, rdma.OpSendInvalidate: 9, rdma.OpWrite: 0, rdma.OpRead: 4, rdma.OpBindMW: 8, rdma.OpLocalInvalidate: 7}

// fillSend checks a request and writes it to the ring's entry i.
func (q *qp) fillSend(wr *rdma.SendWR, i int) error {
	w := &q.sends[i]
	s := &q.sq.slots[i]
	inline := wr.Flags&rdma.FlagInline != 0
	switch {
	case wr.Op == 0 || int(wr.Op) >= len(opcodes):
		return invalid("unknown opcode %d", wr.Op)
	case wr.Flags&^allFlags != 0:
		return invalid("unknown flag in %#x", uint8(wr.Flags))
	case len(wr.SGL) > q.cfg.MaxSendSGE:
		return invalid("%d SGEs; the queue pair has %d", len(wr.SGL), q.cfg.MaxSendSGE)
	}
	flags := C.uint32_t(0)
	if wr.Flags&rdma.FlagFence != 0 && (wr.Op != rdma.OpRead || !q.dev.iwarp()) {
		flags |= 1 // iWARP peers serve Reads in order, so that none overtakes another; siw stops for ever at a Read with a fence
	}
	if wr.Flags&rdma.FlagSignaled != 0 {
		flags |= 2
	}
	need := rdma.Access(0)
	switch wr.Op {
	case rdma.OpSend, rdma.OpSendInvalidate:
		if wr.Flags&rdma.FlagSolicited != 0 {
			flags |= 4
		}
		if wr.Op == rdma.OpSendInvalidate && !q.dev.info.SendInv {
			return invalid("%s has no Send with Invalidate", q.dev.info.Name)
		}
		fallthrough
	case rdma.OpWrite:
		if inline {
			flags |= 8
		}
	case rdma.OpRead:
		if len(wr.SGL) > 1 {
			return invalid("a Read has one SGE, not %d", len(wr.SGL))
		}
		need = rdma.AccessLocalWrite
		if q.dev.iwarp() {
			need |= rdma.AccessRemoteWrite
		}
	}
	if inline && flags&8 == 0 {
		return invalid("%v cannot be inline", wr.Op)
	}
	*s = entry{id: wr.ID, signaled: wr.Flags&rdma.FlagSignaled != 0}
	if wr.Op == rdma.OpRead && q.dev.siw && !s.signaled {
		// siw completes what is behind a Read before it. Who is told of that takes the Read for done.
		flags |= 2
		s.signaled, s.hidden = true, true
	}
	w.opcode = opcodes[wr.Op]
	w.send_flags = flags
	w.remote_addr, w.rkey, w.invalidate_rkey = C.uint64_t(wr.RemoteAddr), C.uint32_t(wr.RKey), 0
	w.num_sge = 0
	switch wr.Op {
	case rdma.OpSendInvalidate:
		// Some take the key from the one place, siw from the other.
		w.invalidate_rkey, w.rkey = C.uint32_t(wr.InvalidateRKey), C.uint32_t(wr.InvalidateRKey)
	case rdma.OpLocalInvalidate:
		if !q.dev.info.MemWindows {
			return invalid("%s has no windows", q.dev.info.Name)
		}
		w.invalidate_rkey = C.uint32_t(wr.InvalidateRKey)
		if win := q.byKey[wr.InvalidateRKey>>8]; win != nil && win.key.Load() == wr.InvalidateRKey && win.qp.Load() == q {
			if !win.bound && q.dev.rxe {
				// The kernel would fall over (NULL pointer in rxe_invalidate_mw, seen in 6.1) where the
				// contract says that nothing happens. An empty Write keeps the order and touches nothing.
				w.opcode, w.remote_addr, w.rkey = opcodes[rdma.OpWrite], 0, 0
			}
			win.bound = false
		}
		return nil
	case rdma.OpBindMW:
		return q.fillBind(wr, w, s)
	}
	var total uint64
	n := 0
	for j := range wr.SGL {
		g := &wr.SGL[j]
		if g.Len == 0 {
			continue // names nothing
		}
		if total += uint64(g.Len); !inline && q.region(g, need) == nil {
			return invalid("SGE %d (%d bytes at %#x, key %#x) is not in a region of this domain with the right", j, g.Len, g.Addr, g.LKey)
		}
		x := &q.sendSGE[q.maxS*int(uint(i))+n]
		x.addr, x.length, x.lkey = C.uint64_t(g.Addr), C.uint32_t(g.Len), C.uint32_t(g.LKey)
		n++
	}
	switch {
	case inline && total > uint64(q.cfg.MaxInline):
		return invalid("%d bytes inline; the queue pair has %d", total, q.cfg.MaxInline)
	case total > 1<<31:
		return invalid("%d bytes in one message", total)
	}
	if inline && wr.Op == rdma.OpSendInvalidate && q.copies != nil {
		q.sendSGE[q.maxS*i] = q.copies.put(i, wr.SGL)
		n = 1
		w.send_flags &^= 8
	}
	if n == 0 && q.dev.iwarp() { // siw wants an SGE
		q.sendSGE[q.maxS*i] = C.struct_vb_sge{}
		n = 1
	}
	w.num_sge = C.int32_t(n)
	s.length = uint32(total)
	return nil
}

func (q *qp) fillBind(wr *rdma.SendWR, w *C.struct_vb_send_wr, s *entry) error {
	win, _ := wr.Window.(*mw)
	switch {
	case win == nil || win.pd != q.pd:
		return invalid("bind without a window of this domain")
	case win.closed.Load():
		return invalid("bind of a closed window")
	case len(wr.SGL) != 1 || wr.SGL[0].Len == 0:
		return invalid("bind without a range")
	case wr.Access&^(rdma.AccessRemoteRead|rdma.AccessRemoteWrite) != 0:
		return invalid("a window has remote rights only")
	}
	g := &wr.SGL[0]
	need := rdma.AccessMWBind
	if wr.Access&rdma.AccessRemoteWrite != 0 {
		need |= rdma.AccessLocalWrite
	}
	m := q.region(g, need) // the remote rights are the window's, the region itself may be closed to the peer
	if m == nil {
		return invalid("bind to %d bytes at %#x, key %#x: not in a region of this domain with the rights", g.Len, g.Addr, g.LKey)
	}
	key := rdma.NextKey(win.key.Load())
	w.mw = C.uintptr_t(uintptr(unsafe.Pointer(win.w)))
	w.mw_rkey = C.uint32_t(key)
	w.mr = C.uintptr_t(uintptr(unsafe.Pointer(m.m)))
	w.mw_addr, w.mw_length, w.mw_access = C.uint64_t(g.Addr), C.uint64_t(g.Len), C.uint32_t(accessBits(wr.Access))
	s.window = win
	return nil
}

func (q *qp) PostSend(wrs ...rdma.SendWR) (int, error) {
	if q.closed.Load() {
		return 0, rdma.ErrClosed
	}
	if !q.c.sendable.Load() {
		return 0, invalid("the connection is not established")
	}
	r := &q.sq
	if !q.bad && q.c.ended.Load() {
		q.bad = true
	}
	done, first := 0, r.head() // wrs[:done] are posted, from ring entry first on others are waiting
	pending := 0
	var err error
	for i := range wrs {
		if r.count == len(r.slots) {
			err = rdma.ErrQueueFull
			break
		}
		h := r.head()
		wr := &wrs[i]
		if win, _ := wr.Window.(*mw); win != nil && win.waiting {
			// The device's library takes the window's present key when it is posted.
			if n, e := q.flushSend(first, pending); e != nil {
				return done + n, e
			}
			done, pending, first = done+pending, 0, h
		}
		if err = q.fillSend(wr, h); err != nil {
			break
		}
		r.count++
		if win := r.slots[h].window; win != nil {
			q.bind(win, uint32(q.sends[h].mw_rkey))
		}
		if q.bad {
			r.soften(h, rdma.StatusFlush)
			done++
			first = r.head()
			continue
		}
		if st := q.refuse(wr); st != rdma.StatusSuccess {
			r.count--
			n, e := q.flushSend(first, pending)
			if e != nil {
				return done + n, e
			}
			r.count++
			done, pending = done+pending, 0
			r.soften(h, st)
			done++
			C.vb_qp_error(q.q)
			q.failed(st, false)
			first = r.head()
			continue
		}
		pending++
		if win := r.slots[h].window; win != nil {
			win.waiting = true
			q.binds++
		}
	}
	n, e := q.flushSend(first, pending)
	if e != nil {
		return done + n, e
	}
	return done + pending, err
}

// refuse tells the error with which a request must fail that devices would not refuse.
func (q *qp) refuse(wr *rdma.SendWR) rdma.Status {
	switch {
	case wr.Op == rdma.OpRead && q.c.ord.Load() == 0:
		return rdma.StatusLocalQPOperation // they would wait for ever, for the peer does not serve it
	case wr.Op == rdma.OpLocalInvalidate && q.dev.rxe:
		// rxe_check_invalidate_mw does not look at the queue pair.
		if w := q.byKey[wr.InvalidateRKey>>8]; w == nil || w.qp.Load() != q {
			return rdma.StatusLocalProtection
		}
	}
	return rdma.StatusSuccess
}

// bind notes that a window has a new key, and whose it is.
func (q *qp) bind(w *mw, key uint32) {
	w.key.Store(key)
	w.bound = true
	if w.qp.Swap(q) != q {
		q.windows = append(q.windows, w)
		if q.byKey == nil {
			q.byKey = map[uint32]*mw{}
		}
		q.byKey[key>>8] = w
	}
}

// flushSend hands n entries from first on, which the ring counts already, to the device. Those that it does
// not take are taken out of the ring again, or flushed if the queue pair has failed.
func (q *qp) flushSend(first, n int) (int, error) {
	if n == 0 {
		return 0, nil
	}
	last := (first + n - 1) % len(q.sends)
	var bad C.uintptr_t
	e := C.vb_post_send(q.q, &q.sends[first], &q.sends[last], &bad)
	if e == 0 {
		q.bound(first, n, n)
		return n, nil
	}
	k := int((uintptr(bad)-uintptr(unsafe.Pointer(&q.sends[0])))/C.sizeof_struct_vb_send_wr) - first
	if k < 0 {
		k += len(q.sends)
	}
	if k < 0 || k > n {
		k = 0
	}
	q.bound(first, k, n)
	return q.refused(&q.sq, first, k, n, syscall.Errno(e))
}

// bound ends the waiting of the windows whose binds are among n entries from first on, of which the device took k.
// Its library leaves it to the caller to note the new key.
func (q *qp) bound(first, k, n int) {
	for i := 0; i < n && q.binds > 0; i++ {
		h := (first + i) % len(q.sends)
		win := q.sq.slots[h].window
		if win == nil {
			continue
		}
		if win.waiting = false; i < k {
			win.w.rkey = q.sends[h].mw_rkey
		}
		q.binds--
	}
}

// refused deals with entries first+k to first+n-1, which the device refused.
func (q *qp) refused(r *ring, first, k, n int, e syscall.Errno) (int, error) {
	if k < 0 || k > n {
		k = 0
	}
	if q.dead() {
		q.bad = true
		for i := k; i < n; i++ {
			r.soften((first+i)%len(r.slots), rdma.StatusFlush)
		}
		return n, nil
	}
	r.count -= n - k
	return k, &rdma.OpError{Op: "post", Provider: providerName, Addr: q.c.remote, Err: errnoError(e)}
}

// dead asks whether the queue pair has failed or its connection has ended.
func (q *qp) dead() bool {
	return q.bad || q.c.ended.Load() || q.c.ending.Load() || int(C.vb_qp_state(q.q)) != C.VB_QPS_RTS && q.c.sendable.Load()
}

func (q *qp) PostRecv(wrs ...rdma.RecvWR) (int, error) {
	if q.closed.Load() {
		return 0, rdma.ErrClosed
	}
	r := &q.rq
	if !q.bad && q.c.sendable.Load() && q.c.ended.Load() {
		q.bad = true
	}
	first, pending := r.head(), 0
	var err error
	for i := range wrs {
		if r.count == len(r.slots) {
			err = rdma.ErrQueueFull
			break
		}
		h := r.head()
		if err = q.fillRecv(&wrs[i], h); err != nil {
			break
		}
		r.count++
		pending++
		if q.bad {
			r.soften(h, rdma.StatusFlush)
		}
	}
	if pending == 0 || q.bad {
		return pending, err
	}
	last := (first + pending - 1) % len(q.recvs)
	var bad C.uintptr_t
	if e := C.vb_post_recv(q.q, &q.recvs[first], &q.recvs[last], &bad); e != 0 {
		k := int((uintptr(bad)-uintptr(unsafe.Pointer(&q.recvs[0])))/C.sizeof_struct_vb_recv_wr) - first
		if k < 0 {
			k += len(q.recvs)
		}
		if n, e := q.refused(r, first, k, pending, syscall.Errno(e)); e != nil {
			return n, e
		}
	}
	return pending, err
}

func (q *qp) fillRecv(wr *rdma.RecvWR, i int) error {
	if len(wr.SGL) > q.cfg.MaxRecvSGE {
		return invalid("%d SGEs; the queue pair has %d", len(wr.SGL), q.cfg.MaxRecvSGE)
	}
	n := 0
	for j := range wr.SGL {
		g := &wr.SGL[j]
		if g.Len == 0 {
			continue
		}
		if q.region(g, rdma.AccessLocalWrite) == nil {
			return invalid("SGE %d (%d bytes at %#x, key %#x) is not in a region of this domain with local write", j, g.Len, g.Addr, g.LKey)
		}
		x := &q.recvSGE[q.maxR*i+n]
		x.addr, x.length, x.lkey = C.uint64_t(g.Addr), C.uint32_t(g.Len), C.uint32_t(g.LKey)
		n++
	}
	if n == 0 && q.dev.iwarp() {
		q.recvSGE[q.maxR*i] = C.struct_vb_sge{}
		n = 1
	}
	q.recvs[i].num_sge = C.int32_t(n)
	q.rq.slots[i] = entry{id: wr.ID, signaled: true}
	return nil
}

// failed is told of every unsuccessful completion, by the owner.
func (q *qp) failed(st rdma.Status, recv bool) {
	q.bad = true
	if q.told || q.c.ended.Load() || q.c.ending.Load() {
		return
	}
	kind := "send queue"
	if recv {
		kind = "receive queue"
	}
	if st == rdma.StatusFlush {
		if q.dev.iwarp() {
			return // the connection manager tells whether this is an orderly end
		}
		q.told = true
		go q.c.fail(fmt.Errorf("%w: the queue pair failed; the peer refused or broke a request", rdma.ErrProtocol))
		return
	}
	q.told = true
	go q.c.fail(fmt.Errorf("%w: %s: %v", rdma.ErrProtocol, kind, st))
}

// asyncText says what the events mean that are about a queue pair.
var asyncText = map[int]string{asyncQPFatal: "the queue pair failed", asyncQPRequest: "a request of the peer is invalid", asyncQPAccess: "a request of the peer is not allowed"}

// async is told of asynchronous events, by the goroutine that reads them.
func (q *qp) async(kind int) {
	q.c.asyncErr.CompareAndSwap(nil, &asyncError{fmt.Errorf("%w: %s", rdma.ErrProtocol, asyncText[kind])})
	go q.c.fail(q.c.asyncErr.Load().err)
}

// commEst is told that a message has arrived before the connection manager heard that the connection is up.
func (q *qp) commEst() {
	c := q.c
	if !c.mu.TryLock() {
		return // something is being done about the connection, perhaps waiting for this event to be acknowledged
	}
	defer c.mu.Unlock()
	if c.id != nil && !c.isUp && !c.active {
		l := c.p.lib
		l.cm.Lock()
		C.vb_cm_comm_est(c.id)
		l.cm.Unlock()
	}
}

type asyncError struct{ err error }

// Close destroys the queue pair.
func (q *qp) Close() error {
	if q.closed.Swap(true) {
		return nil
	}
	c := q.c
	l := c.dev.p.lib
	connected := c.sendable.Load()
	for _, w := range q.windows {
		w.renew(q)
	}
	c.mu.Lock()
	if connected && !c.ending.Load() && !c.ended.Load() {
		c.ending.Store(true)
		if q.dev.iwarp() {
			C.vb_qp_error(q.q) // nothing that is queued leaves
		} else {
			l.cm.Lock()
			C.vb_cm_disconnect(c.id)
			l.cm.Unlock()
		}
	}
	hw := q.q
	slow := c.slow()
	q.q = nil
	l.mu.Lock()
	delete(l.qps, uintptr(unsafe.Pointer(hw)))
	l.mu.Unlock()
	l.cm.Lock()
	C.vb_cm_take_qp(c.id) // the library looks at it when it fetches events
	l.cm.Unlock()
	c.endLocked(rdma.ErrDisconnected)
	c.mu.Unlock()
	q.sq.cq.detach(q)
	q.rq.cq.detach(q)
	if slow {
		done := make(chan struct{})
		q.pd.linger(done)
		q.sq.cq.linger(done)
		q.rq.cq.linger(done)
		quiet := c.call.TryLock()
		if quiet {
			C.vb_qp_error(hw) // receives are flushed; whatever the peer answers now brings nothing
			c.call.Unlock()
			q.give(false)
		} // else the request is being sent: the peer speaks second, and nothing arrives
		go func() {
			defer close(done)
			c.call.Lock()
			C.vb_qp_error(hw)
			C.vb_qp_destroy(hw)
			c.call.Unlock()
			if !quiet {
				q.give(false)
			}
		}()
	} else {
		C.vb_qp_destroy(hw)
		q.give(connected)
	}
	c.mu.Lock()
	if c.closed {
		c.destroyLocked()
	}
	c.mu.Unlock()
	return q.pd.use(-1)
}

// give returns what a destroyed queue pair had of its completion queues, and its memory. The owner calls it if it has
// ever known the queue pair.
func (q *qp) give(owner bool) {
	for _, r := range []*ring{&q.sq, &q.rq} {
		stale := 0
		if owner {
			r.cq.purge(q)
		} else {
			// The owner may be polling now and never knew this queue pair; it takes out what is there.
			stale = r.count
			r.cq.release.Add(int64(stale))
		}
		r.cq.unreserve(len(r.slots) - stale)
	}
	q.free()
}
