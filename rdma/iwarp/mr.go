package iwarp

import (
	crand "crypto/rand"
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"

	"rdblk/rdma"
)

// Steering tags (RFC 5041 section 2, RFC 5040 section 2.1): a 24-bit index and an
// 8-bit key. Index and first key are random, so that a tag cannot be guessed from
// another; a window's key moves on with every bind.
//
// The table has two levels and is read without locks: the receive path of every
// QP looks tags up in it while other goroutines register and deregister.
const (
	leafBits  = 8
	leafSize  = 1 << leafBits
	rootSize  = 1 << (24 - leafBits)
	stagTries = 1 << 12
	maxSTags  = 1 << 20 // a sixteenth of the space: a random index is soon found
)

// stagEntry is what a tag stands for: a region, a window, or (neither) a tag that
// is only ever the sink of Reads and opens nothing.
type stagEntry struct {
	mr *region
	mw *window
}

type stagLeaf struct {
	slots [leafSize]atomic.Pointer[stagEntry]
	used  int // slots that are taken; of the writers
}

type stagTable struct {
	root [rootSize]atomic.Pointer[stagLeaf]

	mu    sync.Mutex // guards writers
	count int
}

func (t *stagTable) lookup(stag uint32) *stagEntry {
	l := t.root[stag>>(8+leafBits)].Load()
	if l == nil {
		return nil
	}
	return l.slots[stag>>8&(leafSize-1)].Load()
}

// insert gives e a random tag. fill is called with the tag before it can be found.
func (t *stagTable) insert(e *stagEntry, fill func(stag uint32)) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.count >= maxSTags {
		return fmt.Errorf("%w: %d memory keys in use", rdma.ErrNoResources, t.count)
	}
	for range stagTries {
		var b [4]byte
		if _, err := crand.Read(b[:]); err != nil {
			return err
		}
		stag := binary.NativeEndian.Uint32(b[:])
		if stag>>8 == 0 { // some hardware gives index 0 a meaning of its own
			continue
		}
		p := &t.root[stag>>(8+leafBits)]
		l := p.Load()
		if l == nil {
			l = new(stagLeaf)
			p.Store(l)
		}
		slot := &l.slots[stag>>8&(leafSize-1)]
		if slot.Load() != nil {
			continue
		}
		fill(stag)
		slot.Store(e)
		l.used++
		t.count++
		return nil
	}
	return fmt.Errorf("%w: no free memory key", rdma.ErrNoResources)
}

// remove ends a tag. A leaf goes with its last tag: tags are random, and each would leave one behind. Who has
// just looked the leaf up finds nothing in it.
func (t *stagTable) remove(stag uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := &t.root[stag>>(8+leafBits)]
	l := p.Load()
	if l == nil || l.slots[stag>>8&(leafSize-1)].Swap(nil) == nil {
		return
	}
	t.count--
	if l.used--; l.used == 0 {
		p.Store(nil)
	}
}

// pd is a protection domain.
type pd struct {
	dev    *device
	users  atomic.Int64 // regions, windows, QPs
	closed atomic.Bool
}

var _ rdma.PD = (*pd)(nil)

func (p *pd) use() error {
	p.users.Add(1)
	if p.closed.Load() {
		p.users.Add(-1)
		return rdma.ErrClosed
	}
	return nil
}

func (p *pd) release() { p.users.Add(-1) }

// Close fails while regions, windows or QPs of the domain exist.
func (p *pd) Close() error {
	if p.closed.Load() {
		return nil
	}
	if !p.closed.CompareAndSwap(false, true) {
		return nil
	}
	if n := p.users.Load(); n != 0 {
		p.closed.Store(false)
		return fmt.Errorf("%w: close protection domain: %d regions, windows and queue pairs still use it", rdma.ErrInvalid, n)
	}
	p.dev.count(&p.dev.pds, -1)
	return nil
}

const accessAll = rdma.AccessLocalWrite | rdma.AccessRemoteWrite | rdma.AccessRemoteRead | rdma.AccessMWBind

// Register makes mem reachable. Nothing is pinned: the kernel copies.
func (p *pd) Register(mem []byte, access rdma.Access) (rdma.MR, error) {
	switch {
	case len(mem) == 0:
		return nil, fmt.Errorf("%w: register memory: empty", rdma.ErrInvalid)
	case int64(len(mem)) > maxMRBytes:
		return nil, fmt.Errorf("%w: register memory: %d bytes, limit %d", rdma.ErrInvalid, len(mem), int64(maxMRBytes))
	case access&^accessAll != 0:
		return nil, fmt.Errorf("%w: register memory: unknown access right %#x", rdma.ErrInvalid, access&^accessAll)
	case access&rdma.AccessRemoteWrite != 0 && access&rdma.AccessLocalWrite == 0:
		return nil, fmt.Errorf("%w: register memory: remote write requires local write", rdma.ErrInvalid)
	}
	if err := p.use(); err != nil {
		return nil, err
	}
	r := &region{pd: p, access: access, base: addrOf(mem), mem: mem[:len(mem):len(mem)]}
	if err := p.dev.tags.insert(&stagEntry{mr: r}, func(stag uint32) { r.stag = stag }); err != nil {
		p.release()
		return nil, fmt.Errorf("register memory: %w", err)
	}
	p.dev.count(&p.dev.mrs, 1)
	return r, nil
}

// region is a memory region. Its fields do not change; dead ends it.
type region struct {
	pd     *pd
	stag   uint32 // lkey and rkey
	access rdma.Access
	base   uint64
	mem    []byte
	dead   atomic.Bool
}

var _ rdma.MR = (*region)(nil)

func (r *region) LKey() uint32 { return r.stag }
func (r *region) RKey() uint32 { return r.stag }
func (r *region) Addr() uint64 { return r.base }
func (r *region) Len() int     { return len(r.mem) }

// Deregister ends every access and waits for those that are running: the memory
// may be unmapped afterwards.
func (r *region) Deregister() error {
	if r.dead.Swap(true) {
		return nil
	}
	r.pd.dev.tags.remove(r.stag)
	r.pd.dev.quiesce()
	r.pd.release()
	r.pd.dev.count(&r.pd.dev.mrs, -1)
	return nil
}

// slice is the memory at addr, or nil if it is not all within the region.
func (r *region) slice(addr uint64, n uint32) []byte {
	off := addr - r.base // wraps to something huge below the base
	size := uint64(len(r.mem))
	if off > size || uint64(n) > size-off {
		return nil
	}
	return r.mem[off : off+uint64(n) : off+uint64(n)]
}

// AllocMW makes an unbound window.
func (p *pd) AllocMW() (rdma.MW, error) {
	if err := p.use(); err != nil {
		return nil, err
	}
	w := &window{pd: p}
	if err := p.dev.tags.insert(&stagEntry{mw: w}, func(stag uint32) { w.key.Store(stag) }); err != nil {
		p.release()
		return nil, fmt.Errorf("allocate memory window: %w", err)
	}
	p.dev.count(&p.dev.mws, 1)
	return w, nil
}

// window is a type 2B memory window: bound, it belongs to one QP, and only that
// QP's owner looks at what it opens. So neither bind nor invalidate nor the
// checks of the receive path need a lock.
type window struct {
	pd    *pd
	key   atomic.Uint32      // tag of the binding posted last
	owner atomic.Pointer[qp] // the QP it is bound on; nil: unbound
	dead  atomic.Bool

	// The owner's, while bound.
	stag       uint32 // tag of the binding in force
	mr         *region
	base       uint64
	size       uint64
	access     rdma.Access
	prev, next *window // the QP's bound windows
}

var _ rdma.MW = (*window)(nil)

func (w *window) RKey() uint32 { return w.key.Load() }

// Close ends the window. A binding that is in force ends with it; accesses that
// are running have returned when Close does.
func (w *window) Close() error {
	if w.dead.Swap(true) {
		return nil
	}
	w.pd.dev.tags.remove(w.key.Load())
	w.pd.dev.quiesce()
	w.pd.release()
	w.pd.dev.count(&w.pd.dev.mws, -1)
	return nil
}

// bind puts a binding in force. Owner of q, inside Poll or Arm.
func (w *window) bind(q *qp, stag uint32, mr *region, base uint64, size uint32, access rdma.Access) bool {
	if w.dead.Load() || mr.dead.Load() || !w.owner.CompareAndSwap(nil, q) {
		return false // a bound type 2 window must be invalidated first
	}
	w.stag, w.mr, w.base, w.size, w.access = stag, mr, base, uint64(size), access
	w.prev, w.next = nil, q.windows
	if q.windows != nil {
		q.windows.prev = w
	}
	q.windows = w
	return true
}

// unbind ends the binding. Owner of the QP it is bound on.
func (w *window) unbind(q *qp) {
	if w.prev != nil {
		w.prev.next = w.next
	} else {
		q.windows = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	}
	w.prev, w.next, w.mr = nil, nil, nil
	w.owner.Store(nil)
}

// remoteFault says why the peer may not touch what it named.
type remoteFault uint8

const (
	faultNone     remoteFault = iota
	faultSTag                 // no such tag, or not valid now
	faultNotAssoc             // not of this QP or its protection domain
	faultAccess               // right missing
	faultWrap                 // offset and length wrap 2^64
	faultBounds               // outside
)

// Terminate codes by fault, for tagged messages (RFC 5041 section 8.1, rights:
// RFC 5040 section 7.1) and for the source of a Read.
var (
	taggedFault = [...]termCode{0, termSTag, termNotAssoc, termAccess, termWrap, termBounds}
	readFault   = [...]termCode{0, termReadSTag, termReadNotAssoc, termAccess, termReadWrap, termReadBounds}
)

// remote resolves memory that the peer names. Owner, inside Poll or Arm; the
// slice is good until that returns.
func (q *qp) remote(stag uint32, to uint64, n uint32, need rdma.Access) ([]byte, remoteFault) {
	e := q.dev.tags.lookup(stag)
	if e == nil {
		return nil, faultSTag
	}
	var (
		mr     *region
		base   uint64
		size   uint64
		access rdma.Access
	)
	switch {
	case e.mr != nil:
		mr = e.mr
		if mr.stag != stag || mr.dead.Load() {
			return nil, faultSTag
		}
		if mr.pd != q.pd {
			return nil, faultNotAssoc
		}
		base, size, access = mr.base, uint64(len(mr.mem)), mr.access
	case e.mw != nil:
		w := e.mw
		if o := w.owner.Load(); o != q {
			if o == nil || w.key.Load() != stag {
				return nil, faultSTag
			}
			return nil, faultNotAssoc
		}
		if w.stag != stag || w.dead.Load() || w.mr.dead.Load() {
			return nil, faultSTag
		}
		mr, base, size, access = w.mr, w.base, w.size, w.access
	default:
		return nil, faultSTag
	}
	if access&need != need {
		return nil, faultAccess
	}
	if n > 0 && to+uint64(n-1) < to { // the last byte, not the one behind it
		return nil, faultWrap
	}
	off := to - base
	if off > size || uint64(n) > size-off {
		return nil, faultBounds
	}
	off = to - mr.base
	return mr.mem[off : off+uint64(n) : off+uint64(n)], faultNone
}

// invalidate ends the binding that stag names, as a local request or a message of
// the peer asks. Doing it again is harmless. Owner, inside Poll or Arm.
func (q *qp) invalidate(stag uint32) termCode {
	e := q.dev.tags.lookup(stag)
	if e == nil {
		return termInvUnknown
	}
	if e.mw == nil { // registered memory is ended by Deregister alone
		if e.mr == nil || e.mr.stag != stag {
			return termInvUnknown
		}
		return termInvProtected
	}
	w := e.mw
	switch o := w.owner.Load(); {
	case o == q:
		if w.stag != stag {
			return termInvUnknown
		}
		w.unbind(q)
		return 0
	case o != nil || w.pd != q.pd:
		return termInvProtected
	case w.key.Load() != stag:
		return termInvUnknown
	}
	return 0
}
