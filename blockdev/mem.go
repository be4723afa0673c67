package blockdev

import (
	"fmt"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// mem is a device in memory. There is no stable storage behind it: what was
// written lives as long as the process and not longer, flushed or not. So it
// tells of no write cache, as RAM disks do: a flush has nothing to add, and no
// crash leaves anything to be in doubt about.
type mem struct {
	info  Info
	data  []byte
	page  int64
	locks *rangeLocks
}

var _ TryDevice = (*mem)(nil)

// NewMem makes a device of size bytes of memory, zeros at first. Pages are taken
// when first written and given back by Discard and Zero.
func NewMem(name string, size int64, o Options) (Device, error) {
	in, err := madeInfo(name, size, &o)
	if err != nil {
		return nil, err
	}
	in.PhysBlock = max(in.BlockSize, os.Getpagesize())
	in.Discard, in.DiscardZeros, in.WriteZeroes = !o.ReadOnly, !o.ReadOnly, !o.ReadOnly
	in.UUID = randomUUID()
	if int64(int(in.Size)) != in.Size {
		return nil, fmt.Errorf("%s: %d bytes are more than this machine can address", name, in.Size)
	}
	data, err := unix.Mmap(-1, 0, int(in.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("%s: map %d bytes: %w (make it smaller)", name, in.Size, err)
	}
	return &mem{info: in, data: data, page: int64(os.Getpagesize()), locks: newRangeLocks(MaxBlockSize, 256)}, nil
}

// madeInfo is what mem and null have in common.
func madeInfo(name string, size int64, o *Options) (Info, error) {
	bs, err := o.blockSize(name, MinBlockSize)
	if err != nil {
		return Info{}, err
	}
	if size <= 0 {
		return Info{}, fmt.Errorf("%s: a device of %d bytes: it must have at least one block of %d", name, size, bs)
	}
	whole, err := o.wholeBlocks(name, size, bs)
	if err != nil {
		return Info{}, err
	}
	return Info{Name: name, Size: whole, BlockSize: bs, PhysBlock: bs, FUA: true, ReadOnly: o.ReadOnly}, nil
}

func (d *mem) Info() Info { return d.info }

func (d *mem) fail(op string, off, n int64, err error) error {
	return fmt.Errorf("%s: %s %d bytes at %d: %w", d.info.Name, op, n, off, err)
}

func (d *mem) check(op string, off, n int64, modify bool) error {
	if d.locks.closed.Load() {
		return ErrClosed
	}
	if err := CheckRange(d.info.Size, d.info.BlockSize, off, n); err != nil {
		return d.fail(op, off, n, err)
	}
	if modify && d.info.ReadOnly {
		return fmt.Errorf("%s: %w", d.info.Name, ErrReadOnly)
	}
	return nil
}

func (d *mem) ReadAt(p []byte, off int64) error {
	if err := d.check("read", off, int64(len(p)), false); err != nil || len(p) == 0 {
		return err
	}
	s := d.locks.span(off, int64(len(p)))
	if !d.locks.rlock(s) {
		return ErrClosed
	}
	copy(p, d.data[off:])
	d.locks.runlock(s)
	return nil
}

func (d *mem) TryReadAt(p []byte, off int64) error {
	if err := d.check("read", off, int64(len(p)), false); err != nil || len(p) == 0 {
		return err
	}
	s := d.locks.span(off, int64(len(p)))
	if !d.locks.tryRLock(s) {
		return ErrWouldBlock
	}
	defer d.locks.runlock(s)
	if d.locks.closed.Load() {
		return ErrClosed
	}
	copy(p, d.data[off:])
	return nil
}

func (d *mem) WriteAt(p []byte, off int64, _ WriteFlags) error {
	if err := d.check("write", off, int64(len(p)), true); err != nil || len(p) == 0 {
		return err
	}
	s := d.locks.span(off, int64(len(p)))
	if !d.locks.lock(s) {
		return ErrClosed
	}
	copy(d.data[off:], p)
	d.locks.unlock(s)
	return nil
}

func (d *mem) TryWriteAt(p []byte, off int64, _ WriteFlags) error {
	if err := d.check("write", off, int64(len(p)), true); err != nil || len(p) == 0 {
		return err
	}
	s := d.locks.span(off, int64(len(p)))
	if !d.locks.tryLock(s) {
		return ErrWouldBlock
	}
	defer d.locks.unlock(s)
	if d.locks.closed.Load() {
		return ErrClosed
	}
	copy(d.data[off:], p)
	return nil
}

func (d *mem) Zero(off, n int64, flags WriteFlags) error {
	if err := d.check("zero", off, n, true); err != nil {
		return err
	}
	for n > 0 {
		m := min(n, zeroPiece)
		s := d.locks.span(off, m)
		if !d.locks.lock(s) {
			return ErrClosed
		}
		err := d.zero(d.data[off:off+m], off, flags&ZeroNoUnmap != 0)
		d.locks.unlock(s)
		if err != nil {
			return d.fail("zero", off, m, err)
		}
		off, n = off+m, n-m
	}
	return nil
}

// zero gives whole pages back to the system and clears the rest.
func (d *mem) zero(p []byte, off int64, keep bool) error {
	first := (off + d.page - 1) &^ (d.page - 1)
	last := (off + int64(len(p))) &^ (d.page - 1)
	if keep || last-first < 16*d.page { // a page fault later costs more
		clear(p)
		return nil
	}
	clear(p[:first-off])
	clear(p[last-off:])
	return unix.Madvise(d.data[first:last], unix.MADV_DONTNEED)
}

func (d *mem) Discard(off, n int64) error { return d.Zero(off, n, 0) }

func (d *mem) Flush() error {
	if d.locks.closed.Load() {
		return ErrClosed
	}
	return nil
}

func (d *mem) Close() error {
	if !d.locks.close() {
		return ErrClosed
	}
	return unix.Munmap(d.data)
}

// null is a device without a store: for measuring everything else.
type null struct {
	info   Info
	closed atomic.Bool
}

var _ TryDevice = (*null)(nil)

// NewNull makes a device of size bytes that reads as zeros and forgets what is
// written to it. It has no UUID: it is not a store.
func NewNull(name string, size int64, o Options) (Device, error) {
	in, err := madeInfo(name, size, &o)
	if err != nil {
		return nil, err
	}
	in.Discard, in.DiscardZeros, in.WriteZeroes = !o.ReadOnly, !o.ReadOnly, !o.ReadOnly
	return &null{info: in}, nil
}

func (d *null) Info() Info { return d.info }

func (d *null) check(off, n int64, modify bool) error {
	if d.closed.Load() {
		return ErrClosed
	}
	if err := CheckRange(d.info.Size, d.info.BlockSize, off, n); err != nil {
		return fmt.Errorf("%s: %w", d.info.Name, err)
	}
	if modify && d.info.ReadOnly {
		return fmt.Errorf("%s: %w", d.info.Name, ErrReadOnly)
	}
	return nil
}

func (d *null) ReadAt(p []byte, off int64) error {
	err := d.check(off, int64(len(p)), false)
	if err == nil {
		clear(p)
	}
	return err
}

func (d *null) WriteAt(p []byte, off int64, _ WriteFlags) error {
	return d.check(off, int64(len(p)), true)
}

func (d *null) TryReadAt(p []byte, off int64) error { return d.ReadAt(p, off) }

func (d *null) TryWriteAt(p []byte, off int64, f WriteFlags) error { return d.WriteAt(p, off, f) }

func (d *null) Zero(off, n int64, _ WriteFlags) error { return d.check(off, n, true) }

func (d *null) Discard(off, n int64) error { return d.check(off, n, true) }

func (d *null) Flush() error {
	if d.closed.Load() {
		return ErrClosed
	}
	return nil
}

// Close does not wait: a call that runs touches nothing but its caller's buffer.
func (d *null) Close() error {
	if d.closed.Swap(true) {
		return ErrClosed
	}
	return nil
}
