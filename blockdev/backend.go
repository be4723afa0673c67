package blockdev

import (
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"

	"github.com/pojntfx/go-nbd/pkg/backend"
)

// backendDevice makes a Device of a go-nbd Backend.
type backendDevice struct {
	b     backend.Backend
	info  Info
	size  atomic.Int64
	locks *rangeLocks
	gate  sync.RWMutex
	grow  sync.Mutex
	flush *flusher
}

var _ Resizer = (*backendDevice)(nil)

// FromBackend makes a Device of anything that was written for go-nbd's server. The
// Backend must allow concurrent calls on ranges that do not overlap, as io.ReaderAt
// and io.WriterAt ask. It is taken to have a cache that Sync makes durable.
//
// What it cannot do is done with what it has: Zero writes zeros, FUA is a write and
// a Sync, Discard does nothing. A short count is an error and io.EOF with a full
// count is not. Close closes b if it is an io.Closer.
//
// Of o, Direct and NoLock mean nothing here.
func FromBackend(name string, b backend.Backend, o Options) (Device, error) {
	bs, err := o.blockSize(name, MinBlockSize)
	if err != nil {
		return nil, err
	}
	size, err := b.Size()
	if err != nil {
		return nil, fmt.Errorf("%s: find its size: %w", name, err)
	}
	if size < 0 {
		return nil, fmt.Errorf("%s: its size is %d", name, size)
	}
	if size, err = o.wholeBlocks(name, size, bs); err != nil {
		return nil, err
	}
	d := &backendDevice{b: b, locks: newRangeLocks(MaxBlockSize, 256), flush: newFlusher(name, b.Sync, o.OnFlushFailed)}
	d.info = Info{Name: name, BlockSize: bs, PhysBlock: max(bs, os.Getpagesize()), WriteCache: true, ReadOnly: o.ReadOnly}
	d.size.Store(size)
	return d, nil
}

func (d *backendDevice) Info() Info {
	in := d.info
	in.Size = d.size.Load()
	return in
}

func (d *backendDevice) fail(op string, off, n int64, err error) error {
	return fmt.Errorf("%s: %s %d bytes at %d: %w", d.info.Name, op, n, off, err)
}

func (d *backendDevice) check(op string, off, n int64, modify bool, flags WriteFlags) error {
	if d.locks.closed.Load() {
		return ErrClosed
	}
	if err := CheckRange(d.size.Load(), d.info.BlockSize, off, n); err != nil {
		return d.fail(op, off, n, err)
	}
	if modify && d.info.ReadOnly {
		return fmt.Errorf("%s: %w", d.info.Name, ErrReadOnly)
	}
	if flags&WriteFUA != 0 {
		return d.flush.Failed()
	}
	return nil
}

func (d *backendDevice) ReadAt(p []byte, off int64) error {
	if err := d.check("read", off, int64(len(p)), false, 0); err != nil || len(p) == 0 {
		return err
	}
	s := d.locks.span(off, int64(len(p)))
	if !d.locks.rlock(s) {
		return ErrClosed
	}
	n, err := d.b.ReadAt(p, off)
	d.locks.runlock(s)
	if n == len(p) && (err == nil || err == io.EOF) {
		return nil
	}
	if err == nil || err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return d.fail("read", off, int64(len(p)), err)
}

// write is a write within one hold of the range.
func (d *backendDevice) write(p []byte, off int64) error {
	s := d.locks.span(off, int64(len(p)))
	if !d.locks.lock(s) {
		return ErrClosed
	}
	n, err := d.b.WriteAt(p, off)
	d.locks.unlock(s)
	if err == nil && n != len(p) {
		err = io.ErrShortWrite
	}
	if err != nil {
		return d.fail("write", off, int64(len(p)), err)
	}
	return nil
}

func (d *backendDevice) WriteAt(p []byte, off int64, flags WriteFlags) error {
	d.gate.RLock()
	defer d.gate.RUnlock()
	if err := d.check("write", off, int64(len(p)), true, flags); err != nil || len(p) == 0 {
		return err
	}
	if err := d.write(p, off); err != nil {
		return err
	}
	if flags&WriteFUA != 0 {
		return d.flush.Flush()
	}
	return nil
}

func (d *backendDevice) Zero(off, n int64, flags WriteFlags) error {
	d.gate.RLock()
	defer d.gate.RUnlock()
	if err := d.check("zero", off, n, true, flags); err != nil {
		return err
	}
	for z := make([]byte, min(n, 1<<20)); n > 0; {
		m := min(n, int64(len(z)))
		if err := d.write(z[:m], off); err != nil {
			return err
		}
		off, n = off+m, n-m
	}
	if flags&WriteFUA != 0 {
		return d.flush.Flush()
	}
	return nil
}

func (d *backendDevice) Discard(off, n int64) error { return d.check("discard", off, n, true, 0) }

func (d *backendDevice) Flush() error {
	d.gate.RLock()
	defer d.gate.RUnlock()
	if d.locks.closed.Load() {
		return ErrClosed
	}
	if d.info.ReadOnly {
		return nil
	}
	return d.flush.Flush()
}

func (d *backendDevice) Refresh() (Info, error) {
	d.gate.RLock()
	defer d.gate.RUnlock()
	d.grow.Lock()
	defer d.grow.Unlock()
	if d.locks.closed.Load() {
		return d.Info(), ErrClosed
	}
	size, err := d.b.Size()
	if err != nil {
		return d.Info(), fmt.Errorf("%s: look at the size: %w", d.info.Name, err)
	}
	size &^= int64(d.info.BlockSize) - 1
	if old := d.size.Load(); size < old {
		return d.Info(), shrunk(d.info.Name, old, size)
	}
	d.size.Store(size)
	return d.Info(), nil
}

func (d *backendDevice) Close() error {
	d.gate.Lock()
	defer d.gate.Unlock()
	if !d.locks.close() {
		return ErrClosed
	}
	if c, ok := d.b.(io.Closer); ok {
		return c.Close()
	}
	return nil
}
