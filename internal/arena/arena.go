// Package arena gives buffers from one bounded piece of memory outside the Go
// heap, as registered RDMA memory and direct I/O need it.
//
// An Arena is a buddy allocator: sizes are rounded up to a power of two of at
// least 4 KiB, buffers are aligned to their size (so to the page), free
// neighbours merge at once. A request that finds no room gets nil and waits with
// its owner; when waiters are served first come first served and everything in
// flight comes back, the arena is whole again, so every size up to its own is
// obtained in the end.
//
// An Arena has one owner and no lock. Pages are touched only when used, so an
// idle arena costs address space alone; the most recently freed buffer is handed
// out first, so a light load stays in cache.
package arena

import (
	"fmt"
	"math/bits"
	"unsafe"

	"golang.org/x/sys/unix"
)

// MinSize is the smallest buffer and the alignment of every one, in bytes.
const MinSize = 4096

const minShift = 12

// Arena is a bounded pool of buffers. Methods are the owner's only.
type Arena struct {
	mem   []byte
	base  uintptr
	free  [][]uint32 // per order: stack of free block starts, in MinSize units; may hold stale entries
	state []uint8    // per unit: 0 = no block starts here, else stFree or stUsed with the order
	inUse int
	peak  int
}

const (
	stFree = 0x40 // free block starts here, order in the low bits
	stUsed = 0x80 // allocated block starts here, order in the low bits
)

// New maps size bytes, rounded up to a power of two of at least MinSize.
func New(size int) (*Arena, error) {
	if size < MinSize {
		size = MinSize
	}
	if size > 1<<40 {
		return nil, fmt.Errorf("arena: %d bytes is more than the limit of 1 TiB", size)
	}
	order := bits.Len(uint(size-1)) - minShift
	if order < 0 {
		order = 0
	}
	size = MinSize << order
	mem, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("arena: map %d bytes of buffer memory: %w (lower the buffer memory setting or the number of queues)", size, err)
	}
	a := &Arena{mem: mem, base: uintptr(unsafe.Pointer(&mem[0])), state: make([]uint8, size/MinSize), free: make([][]uint32, order+1)}
	for o := range a.free {
		n := size / (MinSize << o)
		a.free[o] = make([]uint32, 0, min(n, 1024))
	}
	a.push(0, order)
	return a, nil
}

// Populate touches the first n bytes, or all if there are fewer: those that are handed out first while
// little is in use. Nothing may be allocated yet.
func (a *Arena) Populate(n int) {
	for i := 0; i < min(n, len(a.mem)); i += MinSize {
		a.mem[i] = 0
	}
}

// Bytes is the whole arena, for registration.
func (a *Arena) Bytes() []byte { return a.mem }

// Size is the arena's size in bytes; InUse what is handed out; Peak its maximum.
func (a *Arena) Size() int  { return len(a.mem) }
func (a *Arena) InUse() int { return a.inUse }
func (a *Arena) Peak() int  { return a.peak }

// Owns reports whether b lies in the arena.
func (a *Arena) Owns(b []byte) bool {
	if cap(b) == 0 {
		return false
	}
	p := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	return p >= a.base && p-a.base < uintptr(len(a.mem))
}

// Addr is the virtual address of b's first byte.
func Addr(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

func (a *Arena) push(unit uint32, order int) {
	a.state[unit] = stFree | uint8(order)
	a.free[order] = append(a.free[order], unit)
}

// pop takes a free block of exactly this order; entries whose block has merged
// or been taken since they were pushed are dropped here.
func (a *Arena) pop(order int) (uint32, bool) {
	l := a.free[order]
	for len(l) > 0 {
		u := l[len(l)-1]
		l = l[:len(l)-1]
		if a.state[u] == stFree|uint8(order) {
			a.state[u] = 0
			a.free[order] = l
			return u, true
		}
	}
	a.free[order] = l
	return 0, false
}

// Alloc returns n bytes (0 <= n), or nil if there is no room now or ever
// (n > Size). Contents are what the last user left.
func (a *Arena) Alloc(n int) []byte {
	if n > len(a.mem) || n < 0 {
		return nil
	}
	order := 0
	if n > MinSize {
		order = bits.Len(uint(n-1)) - minShift
	}
	for o := order; o < len(a.free); o++ {
		u, ok := a.pop(o)
		if !ok {
			continue
		}
		for o > order { // split: give back the upper halves
			o--
			a.push(u+1<<o, o)
		}
		a.state[u] = stUsed | uint8(order)
		a.inUse += MinSize << order
		a.peak = max(a.peak, a.inUse)
		off := int(u) << minShift
		return a.mem[off : off+n : off+MinSize<<order]
	}
	return nil
}

// Free gives back a buffer from Alloc: the slice itself or a prefix of it.
// Anything else is a bug of the caller and panics before it can corrupt data.
func (a *Arena) Free(b []byte) {
	off := uintptr(unsafe.Pointer(unsafe.SliceData(b))) - a.base
	if cap(b) == 0 || off >= uintptr(len(a.mem)) || off%MinSize != 0 || a.state[off>>minShift]&stUsed == 0 {
		panic("arena: Free of memory that is not an allocated buffer")
	}
	u := uint32(off >> minShift)
	order := int(a.state[u] &^ stUsed)
	a.inUse -= MinSize << order
	a.state[u] = 0
	for order < len(a.free)-1 {
		buddy := u ^ 1<<order
		if a.state[buddy] != stFree|uint8(order) {
			break
		}
		a.state[buddy] = 0 // its entry in the free list is stale now
		u &= buddy
		order++
	}
	a.push(u, order)
	// Stale entries are bounded: compact when a list is longer than it can have live blocks.
	if l := a.free[order]; len(l) > len(a.state)>>order {
		a.compact(order)
	}
}

func (a *Arena) compact(order int) {
	l := a.free[order]
	w := 0
	for _, u := range l {
		if a.state[u] == stFree|uint8(order) {
			a.state[u] = 0 // each live block once
			l[w] = u
			w++
		}
	}
	l = l[:w]
	for _, u := range l {
		a.state[u] = stFree | uint8(order)
	}
	a.free[order] = l
}

// Close unmaps the memory. Every buffer and registration must be back.
func (a *Arena) Close() error {
	if a.mem == nil {
		return nil
	}
	err := unix.Munmap(a.mem)
	a.mem = nil
	return err
}
