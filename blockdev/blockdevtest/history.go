package blockdevtest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"sort"
	"strings"
	"sync"
	"unsafe"
)

// Reader is what a History checks: a device, or whatever else has the content.
type Reader interface {
	ReadAt(p []byte, off int64) error
}

// ReaderFunc makes a Reader of a function.
type ReaderFunc func(p []byte, off int64) error

// ReadAt calls f.
func (f ReaderFunc) ReadAt(p []byte, off int64) error { return f(p, off) }

// History is what was asked of a device and what it answered. It tells which
// contents the device may show: to a read now (CheckRead), and after a power cut (Check).
//
// Operations are recorded where the test issues them: Write before the request is sent,
// Done when the answer is there. What lies between (a queue, NBD, a network, a
// target) does not matter; the promise is to the client. All methods may be
// called concurrently; operations may overlap in any way.
//
// The rule, per block. Operation a is before b if a was answered before b was issued, or
// if a read that was issued after a was answered has seen b. A write is durable if it was
// answered with success and was FUA, or was answered before a Flush was issued that was answered with success. Then
//
//   - a read may return a write that was issued before the read ended, unless
//     another write comes after that one and was answered before the read was issued;
//   - a crash may leave any write that was ever issued, unless a durable one comes after it.
//
// A write that failed may have taken effect or not, block by block, but a block is
// never a mixture. A discard without the promise of zeros leaves anything.
//
// Writes are told apart by their content: use Fill. Only hashes are kept.
type History struct {
	bs   int64
	size int64
	seed maphash.Seed
	zero uint64

	mu      sync.Mutex
	clock   uint64
	flushes []flushTimes // rising in both: the successful ones that cover more than those answered before them
	base    []uint64
	blocks  map[int64]*blockHistory
	readers map[*Pending]struct{}
	ops     int
	err     error
}

// blockHistory are the writes of a block that may still be seen, the initial
// content first as long as it is one of them.
type blockHistory struct {
	l         []*record
	prune     int  // when there are so many, look which can be forgotten
	discarded bool // once, so that it may have had any content
}

// record is one write to one block; shared by the blocks of a write as far as times go.
type record struct {
	*opTimes
	value  uint64
	any    bool      // discarded: any value
	beaten []*record // reads have shown these to come after this one
}

// flushTimes: at the time end it was known that what was answered before begin is durable.
type flushTimes struct{ begin, end uint64 }

type opTimes struct {
	kind  string
	fua   bool
	begin uint64
	end   uint64 // 0 = not answered
	ok    bool
}

// NewHistory begins with a device of zeros; use Restart for another content.
func NewHistory(size int64, blockSize int) *History {
	h := &History{bs: int64(blockSize), size: size, seed: maphash.MakeSeed(),
		blocks: map[int64]*blockHistory{}, readers: map[*Pending]struct{}{}}
	h.zero = maphash.Bytes(h.seed, make([]byte, blockSize))
	return h
}

// Pending is an operation that has no answer yet.
type Pending struct {
	h      *History
	t      *opTimes
	off, n int64
	flush  bool
	read   bool
}

func (h *History) tick() uint64 { h.clock++; return h.clock }

// Write records that p is going to be written at off. p is not kept.
func (h *History) Write(off int64, p []byte, fua bool) *Pending {
	values := make([]uint64, int64(len(p))/h.bs)
	for i := range values {
		values[i] = maphash.Bytes(h.seed, p[int64(i)*h.bs:][:h.bs])
	}
	return h.modify("write", off, int64(len(p)), fua, false, func(i int64) uint64 { return values[i] })
}

// Zero records that n bytes at off are going to be zeroed.
func (h *History) Zero(off, n int64, fua bool) *Pending {
	return h.modify("zero", off, n, fua, false, func(int64) uint64 { return h.zero })
}

// Discard records a discard; zeros tells whether the device promises them.
func (h *History) Discard(off, n int64, zeros bool) *Pending {
	return h.modify("discard", off, n, false, !zeros, func(int64) uint64 { return h.zero })
}

func (h *History) modify(kind string, off, n int64, fua, anything bool, value func(i int64) uint64) *Pending {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ops++
	t := &opTimes{kind: kind, fua: fua, begin: h.tick()}
	for i := range n / h.bs {
		b := off/h.bs + i
		bh := h.block(b)
		if len(bh.l) >= bh.prune {
			h.prune(bh)
		}
		bh.discarded = bh.discarded || anything
		bh.l = append(bh.l, &record{opTimes: t, value: value(i), any: anything})
	}
	return &Pending{h: h, t: t, off: off, n: n}
}

// Flush records that a flush is going to be issued.
func (h *History) Flush() *Pending {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ops++
	return &Pending{h: h, t: &opTimes{kind: "flush", begin: h.tick()}, flush: true}
}

// Read records that a read is going to be issued; answer it with DoneRead.
func (h *History) Read(off, n int64) *Pending {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ops++
	p := &Pending{h: h, t: &opTimes{kind: "read", begin: h.tick()}, off: off, n: n, read: true}
	h.readers[p] = struct{}{}
	return p
}

// Done records the answer. An operation without one may take effect at any time
// until Restart: do not call Done for it, also not when the client gave up on it.
func (p *Pending) Done(err error) {
	h := p.h
	h.mu.Lock()
	defer h.mu.Unlock()
	if p.read {
		delete(h.readers, p)
		return
	}
	p.t.end = h.tick()
	p.t.ok = err == nil
	if n := len(h.flushes); p.flush && p.t.ok && (n == 0 || p.t.begin > h.flushes[n-1].begin) {
		h.flushes = append(h.flushes, flushTimes{p.t.begin, p.t.end})
	}
}

// flushedAt: what was answered before it was durable at the time at.
func (h *History) flushedAt(at uint64) uint64 {
	i := sort.Search(len(h.flushes), func(i int) bool { return h.flushes[i].end > at })
	if i == 0 {
		return 0
	}
	return h.flushes[i-1].begin
}

// DoneRead records the answer of a read and checks what it returned.
func (p *Pending) DoneRead(data []byte, err error) error {
	h := p.h
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.readers, p)
	if err != nil {
		return nil
	}
	end := h.tick()
	var bad []error
	for i := int64(0); i < p.n/h.bs; i++ {
		b := p.off/h.bs + i
		block := data[i*h.bs:][:h.bs]
		if e := h.readBlock(b, block, p.t.begin, end); e != nil {
			bad = append(bad, e)
		}
	}
	return h.violation("read", bad)
}

func (h *History) block(b int64) *blockHistory {
	bh := h.blocks[b]
	if bh == nil {
		bh = &blockHistory{l: []*record{h.initial(b)}, prune: 8}
		h.blocks[b] = bh
	}
	return bh
}

// initial is the content that a block began with, as a write at the beginning of time.
func (h *History) initial(b int64) *record {
	v := h.zero
	if h.base != nil {
		v = h.base[b]
	}
	return &record{opTimes: &opTimes{kind: "initial content", fua: true, ok: true}, value: v}
}

func (r *record) isInitial() bool { return r.begin == 0 }

func (r *record) answered() bool { return r.isInitial() || r.end != 0 }

func (a *record) before(b *record) bool {
	if a.answered() && a.end < b.begin {
		return true
	}
	for _, r := range a.beaten {
		if r == b {
			return true
		}
	}
	return false
}

// durable tells whether r was known to be durable at a time.
func (h *History) durable(r *record, at uint64) bool {
	return r.isInitial() || r.ok && r.end != 0 && r.end <= at && (r.fua || r.end < h.flushedAt(at))
}

func (h *History) readBlock(b int64, block []byte, begin, end uint64) error {
	l := h.block(b).l
	v := maphash.Bytes(h.seed, block)
	var seen []*record
	for _, w := range l {
		if (w.any || w.value == v) && w.begin < end {
			seen = append(seen, w)
		}
	}
	legal := false
	for _, w := range seen {
		stale := false
		for _, u := range l {
			if u != w && w.before(u) && u.ok && u.end != 0 && u.end < begin {
				stale = true
				break
			}
		}
		if !stale {
			legal = true
			break
		}
	}
	if !legal {
		return h.describe(b, block, v, h.clock, fmt.Sprintf("a read from %d to %d", begin, end), seen)
	}
	if len(seen) == 1 && !seen[0].any {
		w := seen[0]
		for _, u := range l {
			if u != w && u.ok && u.answered() && u.end < begin && !u.before(w) {
				u.beaten = append(u.beaten, w)
			}
		}
	}
	return nil
}

func (h *History) crashBlock(b int64, block []byte, at uint64) error {
	v := maphash.Bytes(h.seed, block)
	if _, touched := h.blocks[b]; !touched {
		if h.initial(b).value == v {
			return nil
		}
	}
	l := h.block(b).l
	var seen []*record
	for _, w := range l {
		if !w.any && w.value != v {
			continue
		}
		seen = append(seen, w)
		lost := false
		for _, u := range l {
			if u != w && w.before(u) && h.durable(u, at) {
				lost = true
				break
			}
		}
		if !lost {
			return nil
		}
	}
	return h.describe(b, block, v, at, "the state after the crash", seen)
}

// prune forgets writes that no read and no crash can show any more.
func (h *History) prune(bh *blockHistory) {
	oldest := h.clock + 1 // issue of the oldest read without an answer
	for r := range h.readers {
		oldest = min(oldest, r.t.begin)
	}
	var keep []*record
	for _, w := range bh.l {
		gone := false
		for _, u := range bh.l {
			if u != w && w.before(u) && h.durable(u, oldest) && u.end != 0 && u.end < oldest {
				gone = true
				break
			}
		}
		if !gone {
			keep = append(keep, w)
		}
	}
	bh.l = keep
	bh.prune = max(8, 2*len(keep))
}

func (h *History) describe(b int64, block []byte, v, at uint64, what string, seen []*record) error {
	var s strings.Builder
	fmt.Fprintf(&s, "block %d (offset %d): %s shows content %016x", b, b*h.bs, what, v)
	if v == h.zero {
		s.WriteString(" (zeros)")
	} else if tag, ok := Tag(block, b*h.bs); ok {
		fmt.Fprintf(&s, " (tag %d)", tag)
	}
	switch len(seen) {
	case 0:
		// What was overwritten for good is forgotten in the end.
		s.WriteString(", which nobody wrote there, at least not lately")
		if v != h.zero && mixed(block, b*h.bs) {
			if h.block(b).discarded {
				s.WriteString(": a mixture, or what was there after a discard")
			} else {
				s.WriteString(": a mixture, the block is torn")
			}
		}
	default:
		s.WriteString(", which was overwritten for good")
	}
	fmt.Fprintf(&s, "; last flush covers what was answered before %d; the block's writes:", h.flushedAt(at))
	for _, r := range h.block(b).l {
		fmt.Fprintf(&s, "\n\t%s %016x from %d to %d", r.kind, r.value, r.begin, r.end)
		if r.fua {
			s.WriteString(" FUA")
		}
		if !r.ok {
			s.WriteString(" not acknowledged")
		}
		if h.durable(r, at) {
			s.WriteString(" durable")
		}
	}
	return errors.New(s.String())
}

// mixed reports whether the first and the last word of a block carry tags of different fills.
func mixed(block []byte, off int64) bool {
	last := int64(len(block)) - 8
	return wordTag(block, off, 0) != wordTag(block, off, last)
}

func (h *History) violation(what string, bad []error) error {
	if len(bad) == 0 {
		return nil
	}
	n := len(bad)
	if n > 4 {
		bad = bad[:4]
	}
	err := fmt.Errorf("%d illegal blocks in a %s:\n%w", n, what, errors.Join(bad...))
	if h.err == nil {
		h.err = err
	}
	return err
}

// Err is the first violation found so far.
func (h *History) Err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.err
}

// Ops is how many operations were recorded.
func (h *History) Ops() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.ops
}

// Check tells whether a power cut now may leave the state in r. Operations that have no
// answer count as cut off. The error names each illegal block and its writes.
func (h *History) Check(r Reader) error {
	_, err := h.check(r, nil)
	return err
}

// Mark is taken before a state is captured while operations go on; give it to CheckAt.
func (h *History) Mark() *Pending { return h.Read(0, 0) }

// CheckAt tells whether a power cut at the time of the mark or later may have left the state in r. It uses up the mark.
func (h *History) CheckAt(mark *Pending, r Reader) error {
	_, err := h.check(r, mark)
	mark.Done(nil)
	return err
}

func (h *History) check(r Reader, mark *Pending) ([]uint64, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	at := h.clock
	if mark != nil {
		at = mark.t.begin
	}
	base := make([]uint64, h.size/h.bs)
	var bad []error
	err := h.scan(r, func(b int64, block []byte) {
		base[b] = maphash.Bytes(h.seed, block)
		if e := h.crashBlock(b, block, at); e != nil {
			bad = append(bad, e)
		}
	})
	if err != nil {
		return nil, err
	}
	return base, h.violation("state after a crash", bad)
}

func (h *History) scan(r Reader, each func(b int64, block []byte)) error {
	buf := Buffer(int(min(h.size, 1<<20/h.bs*h.bs)))
	for off := int64(0); off < h.size; off += int64(len(buf)) {
		p := buf[:min(int64(len(buf)), h.size-off)]
		if err := r.ReadAt(p, off); err != nil {
			return fmt.Errorf("read the state: %w", err)
		}
		for i := int64(0); i < int64(len(p)); i += h.bs {
			each((off+i)/h.bs, p[i:i+h.bs])
		}
	}
	return nil
}

// Restart checks the state in r as Check does and begins anew with it. Nothing
// that was issued before may take effect any more.
func (h *History) Restart(r Reader) error {
	base, err := h.check(r, nil)
	if base == nil {
		return err
	}
	h.adopt(base)
	return err
}

// Adopt begins anew with the state in r without checking it: the content that a
// device happened to have when the test began.
func (h *History) Adopt(r Reader) error {
	base := make([]uint64, h.size/h.bs)
	h.mu.Lock()
	err := h.scan(r, func(b int64, block []byte) { base[b] = maphash.Bytes(h.seed, block) })
	h.mu.Unlock()
	if err == nil {
		h.adopt(base)
	}
	return err
}

func (h *History) adopt(base []uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.base = base
	clear(h.blocks)
	clear(h.readers)
}

// CheckCurrent reads all of r as one client would now, without a crash, and checks it.
func (h *History) CheckCurrent(r Reader) error {
	buf := Buffer(int(min(h.size, 1<<20/h.bs*h.bs)))
	for off := int64(0); off < h.size; off += int64(len(buf)) {
		p := buf[:min(int64(len(buf)), h.size-off)]
		read := h.Read(off, int64(len(p)))
		err := r.ReadAt(p, off)
		if e := read.DoneRead(p, err); err == nil {
			err = e
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Fill writes into p, which is going to offset off, a content that no other tag
// and no other place has. Tag reads the tag back from a block.
func Fill(p []byte, off int64, tag uint64) {
	tag *= fillMul
	for i := 0; i+8 <= len(p); i += 8 {
		binary.LittleEndian.PutUint64(p[i:], tag^uint64(off+int64(i))*fillStep)
	}
}

const (
	fillStep = 0x9e3779b97f4a7c15 // makes neighbouring words differ
	fillMul  = 0xd1342543de82ef95 // odd, so multiplying with it can be undone
)

func wordTag(block []byte, off, i int64) uint64 {
	inv := uint64(1)
	for range 6 { // Newton's iteration for the inverse modulo 2^64
		inv *= 2 - fillMul*inv
	}
	return (binary.LittleEndian.Uint64(block[i:]) ^ uint64(off+i)*fillStep) * inv
}

// Tag is the tag with which Fill made the block at off; false if no Fill made it, or not one alone.
func Tag(block []byte, off int64) (uint64, bool) {
	tag := wordTag(block, off, 0)
	for i := int64(8); i+8 <= int64(len(block)); i += 8 {
		if wordTag(block, off, i) != tag {
			return 0, false
		}
	}
	return tag, true
}

// Buffer is n bytes on the heap that begin at a page, as direct I/O wants them.
func Buffer(n int) []byte {
	const page = 4096
	b := make([]byte, n+page)
	skip := -int(uintptr(unsafe.Pointer(&b[0]))) & (page - 1)
	return b[skip : skip+n : skip+n]
}
