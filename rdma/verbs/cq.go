//go:build cgo && linux && !noverbs

package verbs

/*
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"rdblk/rdma"
)

// batch is how many completions one call brings at most.
const batch = 64

// A work request's number at the device says where it belongs: the queue pair's slot in the CQ, the
// generation of that slot, which queue, which entry of its ring. Late completions of a queue pair
// that is closed are recognised by the generation.
const (
	idSlot  = 48 // 16 bits
	idGen   = 25 // 23 bits
	idRecv  = 1 << 24
	idEntry = 1<<24 - 1
	maxRing = idEntry
	genMask = 1<<23 - 1
)

// cqEntry is a slot for a queue pair.
type cqEntry struct {
	q   *qp
	gen uint64
}

// cq is a completion queue with its completion channel.
type cq struct {
	dev   *device
	q     *C.struct_vb_cq
	fd    int
	depth int

	lingering

	entries atomic.Pointer[[]cqEntry] // copied on write: queue pairs come from other goroutines
	release atomic.Int64              // entries that closed queue pairs may still occupy
	closed  atomic.Bool

	mu   sync.Mutex
	used int // entries promised to queue pairs
	gen  uint64

	// The owner's.
	wcs   []C.struct_vb_wc // C memory
	stash []rdma.WC        // polled and not handed out yet, from next on
	next  int
	armed C.int   // an event has been asked for and not been taken
	soft  []*ring // rings that hold requests which this package completes
}

func (d *device) CreateCQ(depth int) (rdma.CQ, error) {
	if depth < 1 || depth > d.info.MaxCQE {
		return nil, &rdma.OpError{Op: "create completion queue", Provider: providerName, Err: fmt.Errorf("%w: depth %d is not in 1 to %d", rdma.ErrInvalid, depth, d.info.MaxCQE)}
	}
	if err := d.hold(); err != nil {
		return nil, err
	}
	c := &cq{dev: d}
	if e := C.vb_create_cq(d.ctx, C.int(depth), C.int(d.vector.Add(1)-1), &c.q); e != 0 {
		d.drop()
		return nil, &rdma.OpError{Op: fmt.Sprintf("create completion queue of %d entries", depth), Provider: providerName, Err: errnoError(syscall.Errno(e))}
	}
	c.depth = int(c.q.cqe)
	c.fd = int(c.q.channel.fd)
	c.wcs = unsafe.Slice((*C.struct_vb_wc)(C.calloc(batch, C.sizeof_struct_vb_wc)), batch)
	c.entries.Store(&[]cqEntry{})
	l := d.p.lib
	l.mu.Lock()
	l.cqs[uintptr(unsafe.Pointer(c.q))] = c
	l.mu.Unlock()
	return c, nil
}

// reserve promises entries.
func (c *cq) reserve(n int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed.Load() {
		return rdma.ErrClosed
	}
	if c.used+n > c.depth {
		return fmt.Errorf("%w: completion queue of %d entries, %d of them taken, has no room for %d more", rdma.ErrInvalid, c.depth, c.used, n)
	}
	c.used += n
	return nil
}

func (c *cq) unreserve(n int) {
	c.mu.Lock()
	c.used -= n
	c.mu.Unlock()
}

// attach gives a queue pair its slot and returns the upper part of its work request numbers.
func (c *cq) attach(q *qp) (uint64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gen = (c.gen + 1) & genMask
	old := *c.entries.Load()
	l := append(make([]cqEntry, 0, len(old)+1), old...)
	slot := 0
	for slot < len(l) && l[slot].q != nil {
		slot++
	}
	if slot == len(l) {
		l = append(l, cqEntry{})
	}
	if slot >= 1<<16 {
		return 0, fmt.Errorf("%w: %d queue pairs on one completion queue", rdma.ErrNoResources, slot)
	}
	l[slot] = cqEntry{q, c.gen}
	c.entries.Store(&l)
	return uint64(slot)<<idSlot | c.gen<<idGen, nil
}

func (c *cq) detach(q *qp) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := append([]cqEntry(nil), *c.entries.Load()...)
	for i := range l {
		if l[i].q == q {
			l[i].q = nil
		}
	}
	c.entries.Store(&l)
}

// translate makes a completion of the device ours; false if it is to be dropped.
func (c *cq) translate(w *C.struct_vb_wc, out *rdma.WC) bool {
	id := uint64(w.wr_id)
	slot := id >> idSlot
	l := *c.entries.Load()
	if slot >= uint64(len(l)) || l[slot].q == nil || l[slot].gen != id>>idGen&genMask {
		return false
	}
	q := l[slot].q
	q.c.sendable.Load() // what the creator has posted happened before
	r := &q.sq
	if id&idRecv != 0 {
		r = &q.rq
	}
	i := int(id & idEntry)
	d := i - r.tail
	if d < 0 {
		d += len(r.slots)
	}
	if d >= r.count || r.slots[i].soft {
		return false
	}
	s := &r.slots[i]
	st := rdma.StatusSuccess
	if w.status != 0 {
		st = rdma.StatusGeneral
		if int(w.status) < len(statuses) {
			st = statuses[w.status]
		}
		if r.recv && (st == rdma.StatusRemoteInvalid || st == rdma.StatusLocalQPOperation) {
			// rxe's words for a message that is too long; what they mean elsewhere cannot be: receives were checked.
			st = rdma.StatusLocalLength
		}
		q.failed(st, r.recv)
	}
	if d > 0 && r.waits(d) {
		// siw completes Sends before Reads in front of them. The contract is order.
		if !r.recv {
			s.held = true
			r.soften(i, st)
		}
		return false
	}
	r.tail, r.count = i+1, r.count-d-1
	if r.tail == len(r.slots) {
		r.tail = 0
	}
	*out = rdma.WC{ID: s.id, QPNum: q.num, Status: st, Recv: r.recv}
	if st != rdma.StatusSuccess {
		return true
	}
	if !r.recv {
		out.ByteLen = s.length
		return s.signaled && !s.hidden
	}
	out.ByteLen = uint32(w.byte_len)
	if w.wc_flags&c.dev.inv != 0 {
		out.Invalidated, out.RKey = true, uint32(w.invalidated_rkey)
		if win := q.byKey[out.RKey>>8]; win != nil && win.key.Load() == out.RKey && win.qp.Load() == q {
			win.bound = false
		}
	}
	return true
}

// statuses translates enum ibv_wc_status.
var statuses = [...]rdma.Status{
	0: rdma.StatusSuccess, 1: rdma.StatusLocalLength, 2: rdma.StatusLocalQPOperation, 3: rdma.StatusGeneral, 4: rdma.StatusLocalProtection,
	5: rdma.StatusFlush, 6: rdma.StatusMWBind, 7: rdma.StatusBadResponse, 8: rdma.StatusRemoteAccess, 9: rdma.StatusRemoteInvalid,
	10: rdma.StatusRemoteAccess, 11: rdma.StatusRemoteOperation, 12: rdma.StatusRetryExceeded, 13: rdma.StatusRNRRetryExceeded,
	14: rdma.StatusGeneral, 15: rdma.StatusGeneral, 16: rdma.StatusGeneral, 17: rdma.StatusGeneral, 18: rdma.StatusGeneral, 19: rdma.StatusGeneral,
	20: rdma.StatusRetryExceeded,
}

func (c *cq) Poll(wc []rdma.WC) (n int, busy bool, err error) {
	if c.closed.Load() {
		return 0, false, rdma.ErrClosed
	}
	if c.next < len(c.stash) {
		n = copy(wc, c.stash[c.next:])
		if c.next += n; c.next == len(c.stash) {
			c.stash, c.next = c.stash[:0], 0
		}
	}
	for n < len(wc) {
		stale := c.release.Load()
		want := min(len(wc)-n, batch)
		k := int(C.vb_poll(c.q, C.int(want), &c.wcs[0]))
		if k < 0 {
			return n, busy, &rdma.OpError{Op: "poll completion queue", Provider: providerName, Err: errnoError(syscall.Errno(-k))}
		}
		busy = busy || k > 0
		for i := range c.wcs[:k] {
			if c.translate(&c.wcs[i], &wc[n]) {
				n++
			}
		}
		if k < want {
			if stale > 0 {
				c.release.Add(-stale)
				c.unreserve(int(stale))
			}
			break
		}
	}
	if c.dev.o.removed.Load() {
		c.flushRemoved()
	}
	if len(c.soft) > 0 && n < len(wc) {
		n += c.emit(wc[n:])
	}
	return n, busy || n > 0, nil
}

// emit hands out what this package completes, once the device has returned all in front of it.
func (c *cq) emit(wc []rdma.WC) (n int) {
	keep := c.soft[:0]
	for _, r := range c.soft {
		for n < len(wc) {
			k := r.due()
			if k < 0 {
				break
			}
			for range k {
				r.pop()
			}
			s := &r.slots[r.tail]
			if s.hidden && s.status == rdma.StatusSuccess {
				r.pop()
				continue
			}
			wc[n] = rdma.WC{ID: s.id, QPNum: r.q.num, Status: s.status, Recv: r.recv}
			if s.status == rdma.StatusSuccess {
				wc[n].ByteLen = s.length
			}
			n++
			r.pop()
		}
		if r.softCount > 0 {
			keep = append(keep, r)
		}
	}
	clear(c.soft[len(keep):])
	c.soft = keep
	return n
}

// ready tells whether emit would bring something.
func (c *cq) ready() bool {
	for _, r := range c.soft {
		if r.due() >= 0 {
			return true
		}
	}
	return false
}

func (c *cq) Arm() (again bool, err error) {
	if c.closed.Load() {
		return false, rdma.ErrClosed
	}
	if c.dev.o.removed.Load() {
		c.flushRemoved()
	}
	if c.next < len(c.stash) || c.ready() {
		return true, nil
	}
	k := int(C.vb_arm(c.q, &c.armed, batch, &c.wcs[0]))
	if k < 0 {
		return false, &rdma.OpError{Op: "arm completion queue", Provider: providerName, Err: errnoError(syscall.Errno(-k))}
	}
	c.keep(k)
	return c.next < len(c.stash) || k == batch || c.ready(), nil
}

// overrun ends the connections on a completion queue that the device has given up.
func (c *cq) overrun() {
	for _, e := range *c.entries.Load() {
		if e.q != nil {
			go e.q.c.fail(fmt.Errorf("%w: the completion queue failed", rdma.ErrProtocol))
		}
	}
}

// flushRemoved completes by itself what a device that was removed will not.
func (c *cq) flushRemoved() {
	for _, e := range *c.entries.Load() {
		if e.q == nil || !e.q.c.sendable.Load() {
			continue // what was never connected is its creator's
		}
		for _, r := range [...]*ring{&e.q.sq, &e.q.rq} {
			if r.cq != c {
				continue
			}
			e.q.bad = true
			for i, k := r.tail, 0; k < r.count; k++ {
				if !r.slots[i].soft {
					r.soften(i, rdma.StatusFlush)
				}
				if i++; i == len(r.slots) {
					i = 0
				}
			}
		}
	}
}

// keep puts polled completions aside.
func (c *cq) keep(k int) {
	for i := range c.wcs[:k] {
		var wc rdma.WC
		if c.translate(&c.wcs[i], &wc) {
			c.stash = append(c.stash, wc)
		}
	}
}

// purge takes all completions of a closed queue pair out of the queue and puts the others aside. Owner only.
func (c *cq) purge(q *qp) {
	for {
		k := int(C.vb_poll(c.q, batch, &c.wcs[0]))
		if k > 0 {
			c.keep(k)
		}
		if k < batch {
			break
		}
	}
	rest := c.stash[c.next:]
	c.stash, c.next = c.stash[:0], 0
	for _, wc := range rest {
		if wc.QPNum != q.num {
			c.stash = append(c.stash, wc)
		}
	}
	keep := c.soft[:0]
	for _, r := range c.soft {
		if r.q != q {
			keep = append(keep, r)
		}
	}
	clear(c.soft[len(keep):])
	c.soft = keep
}

func (c *cq) FD() int { return c.fd }

func (c *cq) Close() error {
	err := c.settle() // without the lock: what it waits for gives entries back
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed.Load() {
		return nil
	}
	for _, e := range *c.entries.Load() {
		if e.q != nil {
			return &rdma.OpError{Op: "close completion queue", Provider: providerName, Err: fmt.Errorf("%w: queue pairs are attached", rdma.ErrInvalid)}
		}
	}
	if err != nil {
		return &rdma.OpError{Op: "close completion queue", Provider: providerName, Err: err}
	}
	l := c.dev.p.lib
	l.mu.Lock()
	delete(l.cqs, uintptr(unsafe.Pointer(c.q)))
	l.mu.Unlock()
	if e := C.vb_destroy_cq(c.q); e != 0 {
		return opError("close completion queue", e)
	}
	c.closed.Store(true)
	C.free(unsafe.Pointer(&c.wcs[0]))
	c.wcs = nil
	c.dev.drop()
	return nil
}
