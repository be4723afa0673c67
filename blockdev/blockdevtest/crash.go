package blockdevtest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"rdblk/blockdev"
)

// ErrPowerCut is the answer of a Crashable that was switched off; it is an EIO.
var ErrPowerCut = fmt.Errorf("power is off: %w", unix.EIO)

// Lies make a Crashable break a promise, to show that a test would notice.
type Lies struct {
	Flush bool // Flush does nothing
	FUA   bool // FUA is an ordinary write
	Zero  bool // FUA on Zero is ignored
	Tear  bool // a crash may leave half of a block
	Read  bool // now and then a read returns what the medium has and not what the cache has
}

// Crashable is a disk in memory with a volatile write cache. What is written is
// in the cache and is lost by a power cut, block by block as chance has it, until Flush or FUA
// brings it to the medium; the cache may also write back any block at any time.
// A block is never torn, a write of several blocks may be.
//
// It is a TryDevice of which some calls would block, as chance has it too.
type Crashable struct {
	info blockdev.Info
	lies Lies

	mu     sync.Mutex
	rng    *rand.Rand
	medium []byte
	cache  map[int64][][]byte // per block: the versions since the last write-back, oldest first
	off    bool
	closed bool
	stats  CrashStats
}

// CrashStats tell whether a test exercised what it was meant to.
type CrashStats struct {
	Writes, FUAs, Zeros, Discards, Flushes int
	Lost                                   int // blocks whose newest content the last crash lost
	Kept                                   int // blocks that were dirty but survived it
}

var _ blockdev.TryDevice = (*Crashable)(nil)

// maxVersions bounds what is kept of a block; a version that is dropped can just not be left by a crash.
const maxVersions = 6

// NewCrashable makes a disk of size bytes with blocks of 512, zeros at first. The same
// seed and the same calls in the same order give the same crashes.
func NewCrashable(size int64, seed uint64) *Crashable {
	d := &Crashable{rng: NewRand(seed, 0xc4a5), medium: make([]byte, size), cache: map[int64][][]byte{}}
	d.info = blockdev.Info{Name: "crashable", Size: size, BlockSize: 512, PhysBlock: 4096,
		WriteCache: true, FUA: true, Discard: true, WriteZeroes: true}
	for i := range d.info.UUID {
		d.info.UUID[i] = byte(seed >> (i % 8 * 8))
	}
	d.info.UUID[15] = 1
	return d
}

// SetBlockSize changes the block before the first use.
func (d *Crashable) SetBlockSize(n int) { d.info.BlockSize, d.info.PhysBlock = n, max(n, 4096) }

// SetDiscardZeros makes Discard promise zeros; before the first use.
func (d *Crashable) SetDiscardZeros(on bool) { d.info.DiscardZeros = on }

// SetLies makes the disk lie; before the first use.
func (d *Crashable) SetLies(l Lies) { d.lies = l }

// Stats counts what was done.
func (d *Crashable) Stats() CrashStats {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.stats
}

// Info is constant.
func (d *Crashable) Info() blockdev.Info { return d.info }

// begin checks a call and leaves d.mu locked if it is good.
func (d *Crashable) begin(off, n int64) error {
	d.mu.Lock()
	err := d.info.CheckRange(off, n)
	if d.closed {
		err = blockdev.ErrClosed
	} else if d.off {
		err = ErrPowerCut
	}
	if err != nil {
		d.mu.Unlock()
	}
	return err
}

// each runs fn for the blocks of a range and lets go of the lock in between, so
// that a power cut comes in the middle of an operation.
func (d *Crashable) each(off, n int64, fn func(b, at int64)) error {
	bs := int64(d.info.BlockSize)
	for at := int64(0); at < n; at += bs {
		if at > 0 {
			if err := d.begin(off, n); err != nil {
				return err
			}
		}
		fn((off+at)/bs, at)
		d.mu.Unlock()
	}
	if n == 0 {
		d.mu.Unlock()
	}
	return nil
}

func (d *Crashable) onMedium(b int64) []byte {
	bs := int64(d.info.BlockSize)
	return d.medium[b*bs:][:bs]
}

func (d *Crashable) current(b int64) []byte {
	if l := d.cache[b]; len(l) > 0 {
		return l[len(l)-1]
	}
	return d.onMedium(b)
}

// put writes one block.
func (d *Crashable) put(b int64, content []byte, durable bool) {
	if durable {
		copy(d.onMedium(b), content)
		delete(d.cache, b)
		return
	}
	l := append(d.cache[b], slices.Clone(content))
	if len(l) > maxVersions {
		i := d.rng.IntN(len(l) - 1)
		l = slices.Delete(l, i, i+1)
	}
	if d.rng.IntN(16) == 0 { // written back by itself
		copy(d.onMedium(b), l[len(l)-1])
		l = nil
	}
	if l == nil {
		delete(d.cache, b)
	} else {
		d.cache[b] = l
	}
}

// ReadAt is part of Device.
func (d *Crashable) ReadAt(p []byte, off int64) error {
	if err := d.begin(off, int64(len(p))); err != nil {
		return err
	}
	return d.each(off, int64(len(p)), func(b, at int64) {
		if d.lies.Read && d.rng.IntN(64) == 0 {
			copy(p[at:], d.onMedium(b))
			return
		}
		copy(p[at:], d.current(b))
	})
}

// WriteAt is part of Device.
func (d *Crashable) WriteAt(p []byte, off int64, flags blockdev.WriteFlags) error {
	if err := d.begin(off, int64(len(p))); err != nil {
		return err
	}
	fua := flags&blockdev.WriteFUA != 0 && !d.lies.FUA
	d.stats.Writes++
	if fua {
		d.stats.FUAs++
	}
	bs := int64(d.info.BlockSize)
	return d.each(off, int64(len(p)), func(b, at int64) { d.put(b, p[at:at+bs], fua) })
}

// wouldBlock is chance.
func (d *Crashable) wouldBlock() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.rng.IntN(3) == 0
}

// TryReadAt is part of TryDevice.
func (d *Crashable) TryReadAt(p []byte, off int64) error {
	if d.wouldBlock() {
		return blockdev.ErrWouldBlock
	}
	return d.ReadAt(p, off)
}

// TryWriteAt is part of TryDevice.
func (d *Crashable) TryWriteAt(p []byte, off int64, flags blockdev.WriteFlags) error {
	if d.wouldBlock() {
		return blockdev.ErrWouldBlock
	}
	return d.WriteAt(p, off, flags)
}

// Zero is part of Device.
func (d *Crashable) Zero(off, n int64, flags blockdev.WriteFlags) error {
	if err := d.begin(off, n); err != nil {
		return err
	}
	d.stats.Zeros++
	fua := flags&blockdev.WriteFUA != 0 && !d.lies.Zero
	z := make([]byte, d.info.BlockSize)
	return d.each(off, n, func(b, _ int64) { d.put(b, z, fua) })
}

// Discard is part of Device. Unless it promises zeros it leaves the old content
// or zeros or garbage, block by block.
func (d *Crashable) Discard(off, n int64) error {
	if err := d.begin(off, n); err != nil {
		return err
	}
	d.stats.Discards++
	z := make([]byte, d.info.BlockSize)
	return d.each(off, n, func(b, _ int64) {
		if !d.info.DiscardZeros {
			switch d.rng.IntN(3) {
			case 0:
				return
			case 1:
				g := make([]byte, d.info.BlockSize)
				for i := range g {
					g[i] = byte(d.rng.Uint32())
				}
				d.put(b, g, false)
				return
			}
		}
		d.put(b, z, false)
	})
}

// Flush is part of Device.
func (d *Crashable) Flush() error {
	if err := d.begin(0, 0); err != nil {
		return err
	}
	defer d.mu.Unlock()
	d.stats.Flushes++
	if d.lies.Flush {
		return nil
	}
	for b, l := range d.cache {
		copy(d.onMedium(b), l[len(l)-1])
	}
	clear(d.cache)
	return nil
}

// Close is part of Device. It does not flush, and the medium stays for Crash.
func (d *Crashable) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return blockdev.ErrClosed
	}
	d.closed = true
	return nil
}

// Crash cuts the power: every call that runs or comes later fails with
// ErrPowerCut. It returns the disk as it is when power is back. The medium belongs to that
// one from now on.
func (d *Crashable) Crash() *Crashable {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.off = true
	return d.clone()
}

// CrashClone is a disk in a state that a power cut now may leave, while this one goes on.
func (d *Crashable) CrashClone() *Crashable {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.clone()
}

func (d *Crashable) clone() *Crashable {
	c := &Crashable{info: d.info, lies: d.lies, medium: slices.Clone(d.medium), cache: map[int64][][]byte{},
		rng: rand.New(rand.NewPCG(d.rng.Uint64(), d.rng.Uint64()))}
	d.stats.Lost, d.stats.Kept = 0, 0
	dirty := make([]int64, 0, len(d.cache))
	for b := range d.cache {
		dirty = append(dirty, b)
	}
	slices.Sort(dirty) // the same seed, the same crash
	bs := int64(d.info.BlockSize)
	// How much of the cache had been written back differs from crash to crash.
	keep := d.rng.IntN(101)
	for _, b := range dirty {
		l := d.cache[b]
		if d.rng.IntN(100) >= keep {
			d.stats.Lost++
			continue
		}
		i := d.rng.IntN(len(l))
		if d.rng.IntN(2) == 0 {
			i = len(l) - 1
		}
		if i == len(l)-1 {
			d.stats.Kept++
		} else {
			d.stats.Lost++
		}
		n := bs
		if d.lies.Tear && d.rng.IntN(4) == 0 {
			n /= 2
		}
		copy(c.medium[b*bs:][:n], l[i])
	}
	c.stats = d.stats
	return c
}

// Record is dev with every call recorded in h and every read checked. A violation
// is the error of the read that shows it, and h.Err.
func Record(dev blockdev.Device, h *History) blockdev.Device { return &recorded{dev, h} }

type recorded struct {
	blockdev.Device
	h *History
}

func (d *recorded) ReadAt(p []byte, off int64) error {
	op := d.h.Read(off, int64(len(p)))
	err := d.Device.ReadAt(p, off)
	return errors.Join(err, op.DoneRead(p, err))
}

func (d *recorded) WriteAt(p []byte, off int64, flags blockdev.WriteFlags) error {
	op := d.h.Write(off, p, flags&blockdev.WriteFUA != 0)
	err := d.Device.WriteAt(p, off, flags)
	op.Done(err)
	return err
}

func (d *recorded) Zero(off, n int64, flags blockdev.WriteFlags) error {
	op := d.h.Zero(off, n, flags&blockdev.WriteFUA != 0)
	err := d.Device.Zero(off, n, flags)
	op.Done(err)
	return err
}

func (d *recorded) Discard(off, n int64) error {
	in := d.Device.Info()
	if !in.Discard {
		return d.Device.Discard(off, n)
	}
	op := d.h.Discard(off, n, in.DiscardZeros)
	err := d.Device.Discard(off, n)
	op.Done(err)
	return err
}

func (d *recorded) Flush() error {
	op := d.h.Flush()
	err := d.Device.Flush()
	op.Done(err)
	return err
}
