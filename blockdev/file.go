package blockdev

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const (
	// Zero and Discard hold their range; these bound for how long.
	zeroPiece    = 16 << 20
	discardPiece = 128 << 20

	// maxInlineWrite bounds a buffered write on a worker: 20 µs of copying.
	maxInlineWrite = 128 << 10

	maxSyncFDs = 64
)

// nowait is how a Try call is made.
type nowait int32

const (
	nowaitKernel nowait = iota // with RWF_NOWAIT
	nowaitPlain                // an ordinary call: reads of a file system in memory; writes see writeGuard
	nowaitNever                // not at all
)

// file is a regular file or a raw block device.
//
// Lock order: gate, a range of locks, then one of grow, flusher.mu and fds.
type file struct {
	path   string
	fd     int
	info   Info // all but Size
	size   atomic.Int64
	intact atomic.Int64 // less than size once somebody has cut off what is behind; see uncut
	log    *slog.Logger
	block  bool // a block device
	direct bool
	dev    uint64 // of the file system or the disk
	local  bool   // what the kernel tells of the file it knows itself
	// inMemory is a file of a file system in memory; notesReads one whose time of
	// access is kept, so that a read may have to wait for the journal.
	inMemory, notesReads bool

	locks *rangeLocks
	gate  sync.RWMutex // held for reading by what has no range or many; Close takes it
	grow  sync.Mutex   // one Refresh at a time
	flush *flusher
	guard *writeGuard

	tryRead, tryWrite atomic.Int32 // nowait
	pageMask          int64

	// What the store was found to lack; set once, never cleared.
	doubt atomic.Bool // see Watchable

	noDsync, noPunch, noZeroRange, noZeroOut, noDiscard atomic.Bool

	fds struct {
		sync.Mutex
		free   []int
		opened int
	}
}

var (
	_ TryDevice = (*file)(nil)
	_ Resizer   = (*file)(nil)
	_ Watchable = (*file)(nil)
)

func (d *file) Info() Info {
	in := d.info
	in.Size = d.size.Load()
	return in
}

// check is what every transfer passes first.
func (d *file) check(p []byte, off int64) error {
	if d.locks.closed.Load() {
		return ErrClosed
	}
	if err := CheckRange(d.size.Load(), d.info.BlockSize, off, int64(len(p))); err != nil {
		return d.fail("access", off, int64(len(p)), err)
	}
	if off+int64(len(p)) > d.intact.Load() {
		return d.fail("access", off, int64(len(p)), errCutOff)
	}
	if d.info.MemAlign > 1 {
		return d.info.CheckBuffer(p)
	}
	return nil
}

func (d *file) fail(op string, off, n int64, err error) error {
	return fmt.Errorf("%s: %s %d bytes at %d: %w", d.path, op, n, off, err)
}

func (d *file) ReadAt(p []byte, off int64) error {
	if err := d.check(p, off); err != nil || len(p) == 0 {
		return err
	}
	s := d.locks.span(off, int64(len(p)))
	if !d.locks.rlock(s) {
		return ErrClosed
	}
	err := d.pread(p, off)
	d.locks.runlock(s)
	if err != nil {
		return d.fail("read", off, int64(len(p)), err)
	}
	return nil
}

func (d *file) pread(p []byte, off int64) error {
	for len(p) > 0 {
		n, err := unix.Pread(d.fd, p[:min(len(p), maxSyscall)], off)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		if n = d.whole(n, len(p)); n == 0 {
			return d.ended()
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// ended is the error of a read that came to the end of the store before the end of its range.
func (d *file) ended() error {
	if err := d.uncut(); err != nil {
		return err
	}
	return io.ErrUnexpectedEOF // a disk that became smaller
}

// uncut looks whether the file is as long as it was. Whoever cuts it off behind our back
// destroys data, which reads behind its end find out as long as it stays short. A write makes it long
// again, though, with zeros in the place of what was there, and nobody could tell them from
// the truth any more. So every write looks first, by a call that never waits and takes 0.3 µs on the
// file systems where writes are made on a worker, and every flush does. From then on nothing
// behind the cut can be read or written, and as acknowledged writes are gone flushes fail.
//
// A disk does not grow by being written.
func (d *file) uncut() error {
	if d.block {
		return nil
	}
	size, err := fileEnd(d.fd, d.local)
	if err != nil {
		return err
	}
	was := d.intact.Load()
	if size >= was {
		return nil
	}
	for !d.intact.CompareAndSwap(was, size) {
		if was = d.intact.Load(); size >= was {
			return errCutOff
		}
	}
	err = fmt.Errorf("%s: at %d of %d bytes: %w", d.path, size, d.size.Load(), errCutOff)
	if d.info.ReadOnly {
		d.log.Error("what is served has been damaged", "dev", d.path, "err", err)
	} else {
		d.flush.fail(err)
	}
	return err
}

// whole rounds a short count of direct I/O down to blocks, from where it can go on.
func (d *file) whole(n, asked int) int {
	if d.direct && n < asked {
		n &^= d.info.BlockSize - 1
	}
	return n
}

func (d *file) TryReadAt(p []byte, off int64) error {
	mode := nowait(d.tryRead.Load())
	if mode == nowaitNever {
		return ErrWouldBlock
	}
	if err := d.check(p, off); err != nil || len(p) == 0 {
		return err
	}
	s := d.locks.span(off, int64(len(p)))
	if !d.locks.tryRLock(s) {
		return ErrWouldBlock
	}
	if d.locks.closed.Load() {
		d.locks.runlock(s)
		return ErrClosed
	}
	var err error
	if mode == nowaitPlain {
		err = d.pread(p, off)
	} else {
		err = d.preadNow(p, off)
	}
	d.locks.runlock(s)
	if err != nil && err != ErrWouldBlock {
		err = d.fail("read", off, int64(len(p)), err)
	}
	return err
}

// preadNow reads what is in memory. A short count is where the cached part ends,
// or only where the kernel chose to look; the next call tells.
func (d *file) preadNow(p []byte, off int64) error {
	for len(p) > 0 {
		n, err := preadNow(d.fd, p[:min(len(p), maxSyscall)], off)
		switch {
		case err == nil && n == 0:
			return d.ended()
		case err == nil:
			p, off = p[n:], off+int64(n)
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			return ErrWouldBlock
		case unsupported(err) || err == unix.EINVAL:
			d.tryRead.Store(int32(nowaitNever))
			return ErrWouldBlock
		default:
			return err
		}
	}
	return nil
}

// cached reports whether the page at off is in memory.
func (d *file) cached(off int64) bool {
	if nowait(d.tryRead.Load()) == nowaitPlain {
		return true
	}
	var b [1]byte
	n, err := preadNow(d.fd, b[:], off)
	return err == nil && n == 1
}

// writable is what every modification passes after the range check.
func (d *file) writable() error {
	if d.info.ReadOnly {
		return fmt.Errorf("%s: %w", d.path, ErrReadOnly)
	}
	return nil
}

func (d *file) WriteAt(p []byte, off int64, flags WriteFlags) error {
	if err := d.check(p, off); err != nil {
		return err
	}
	if err := d.writable(); err != nil {
		return err
	}
	fua := flags&WriteFUA != 0
	if fua {
		if err := d.flush.Failed(); err != nil {
			return err
		}
	}
	if len(p) == 0 {
		return nil
	}
	s := d.locks.span(off, int64(len(p)))
	if !d.locks.lock(s) {
		return ErrClosed
	}
	err := d.uncut()
	switch {
	case err != nil:
	case fua:
		err = d.pwriteFUA(p, off)
	default:
		start := d.guard.now()
		err = d.pwrite(p, off)
		d.guard.executed(start)
	}
	d.locks.unlock(s)
	if err != nil {
		return d.fail("write", off, int64(len(p)), err)
	}
	return nil
}

func (d *file) pwrite(p []byte, off int64) error {
	for len(p) > 0 {
		n, err := unix.Pwrite(d.fd, p[:min(len(p), maxSyscall)], off)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		if n = d.whole(n, len(p)); n == 0 {
			return io.ErrShortWrite
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

func (d *file) TryWriteAt(p []byte, off int64, flags WriteFlags) error {
	mode := nowait(d.tryWrite.Load())
	if mode == nowaitNever || flags&WriteFUA != 0 || len(p) > maxInlineWrite {
		return ErrWouldBlock
	}
	if err := d.check(p, off); err != nil {
		return err
	}
	if err := d.writable(); err != nil || len(p) == 0 {
		return err
	}
	s := d.locks.span(off, int64(len(p)))
	if !d.locks.tryLock(s) {
		return ErrWouldBlock
	}
	if d.locks.closed.Load() {
		d.locks.unlock(s)
		return ErrClosed
	}
	err := d.uncut()
	switch {
	case err != nil:
	case mode == nowaitKernel:
		err = d.pwriteNow(p, off)
	default:
		err = d.pwriteGuarded(p, off)
	}
	d.locks.unlock(s)
	if err != nil && err != ErrWouldBlock {
		err = d.fail("write", off, int64(len(p)), err)
	}
	return err
}

// pwriteNow writes as the kernel knows how to without waiting (XFS, btrfs). It says that it
// would wait, too, when a block is new or the time stamp is due, so one write per tick of the clock takes the other way.
// What a partial write has done, its repetition does again.
func (d *file) pwriteNow(p []byte, off int64) error {
	for len(p) > 0 {
		n, err := pwriteFlags(d.fd, p, off, unix.RWF_NOWAIT)
		switch {
		case err == nil && n == 0, err == unix.EAGAIN:
			return ErrWouldBlock
		case err == nil:
			p, off = p[n:], off+int64(n)
		case err == unix.EINTR:
		case unsupported(err) || err == unix.EINVAL:
			d.tryWrite.Store(int32(nowaitPlain))
			return d.pwriteGuarded(p, off)
		default:
			return err
		}
	}
	return nil
}

// pwriteGuarded makes an ordinary write if it is likely to be a copy only.
func (d *file) pwriteGuarded(p []byte, off int64) error {
	end := off + int64(len(p))
	if off&d.pageMask != 0 && !d.cached(off) || end&d.pageMask != 0 && !d.cached(end-1) {
		return ErrWouldBlock // the rest of the page must be read first
	}
	m, ok := d.guard.begin()
	if !ok {
		return ErrWouldBlock
	}
	err := d.pwrite(p, off)
	d.guard.end(m)
	return err
}

// pwriteFUA writes and makes durable, if possible in one call that waits for this
// range only.
func (d *file) pwriteFUA(p []byte, off int64) error {
	if d.noDsync.Load() {
		return d.pwriteFlush(p, off)
	}
	fd, ok := d.syncFD()
	if !ok {
		return d.pwriteFlush(p, off)
	}
	defer d.putSyncFD(fd)
	d.flush.busy.Add(1)
	defer d.flush.busy.Add(^uint32(0))
	for whole, at := p, off; len(p) > 0; {
		n, err := pwriteFlags(fd, p[:min(len(p), maxSyscall)], off, unix.RWF_DSYNC)
		switch {
		case err == unix.EINTR:
			continue
		case err == nil:
			if n = d.whole(n, len(p)); n == 0 {
				return io.ErrShortWrite
			}
			p, off = p[n:], off+int64(n)
		case unsupported(err):
			d.noDsync.Store(true)
			return d.pwriteFlush(whole, at)
		case noSpace(err):
			// Did the write find no room, which harms nobody else, or its write-back,
			// which may have lost what others wrote? Write again, and ask by a flush through the
			// main descriptor, which has not heard of an error yet. At once, even if there is no room
			// again: this descriptor has been told, and nobody would be any more after our death.
			if err := d.pwrite(whole, at); err != nil {
				if lost := d.flush.Flush(); lost != nil {
					return lost
				}
				return err
			}
			return d.flush.Flush()
		default:
			d.flush.fail(d.fail("durable write", at, int64(len(whole)), err))
			return err
		}
	}
	return d.flush.Failed()
}

func (d *file) pwriteFlush(p []byte, off int64) error {
	if err := d.pwrite(p, off); err != nil {
		return err
	}
	return d.flush.Flush()
}

// syncFD gives a descriptor with a write-back error state of its own (see
// flusher): durable writes run at the same time and each must hear of an error.
func (d *file) syncFD() (int, bool) {
	d.fds.Lock()
	defer d.fds.Unlock()
	if n := len(d.fds.free); n > 0 {
		fd := d.fds.free[n-1]
		d.fds.free = d.fds.free[:n-1]
		return fd, true
	}
	if d.fds.opened >= maxSyncFDs {
		return 0, false
	}
	mode := unix.O_WRONLY | unix.O_CLOEXEC
	if d.direct {
		mode |= unix.O_DIRECT
	}
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", d.fd), mode, 0)
	if err != nil { // no /proc, privileges dropped, no descriptors left: durable all the same, only slower
		return 0, false
	}
	d.fds.opened++
	return fd, true
}

func (d *file) putSyncFD(fd int) {
	d.fds.Lock()
	d.fds.free = append(d.fds.free, fd)
	d.fds.Unlock()
}

func (d *file) Zero(off, n int64, flags WriteFlags) error {
	d.gate.RLock()
	defer d.gate.RUnlock()
	if d.locks.closed.Load() {
		return ErrClosed
	}
	if err := CheckRange(d.size.Load(), d.info.BlockSize, off, n); err != nil {
		return d.fail("zero", off, n, err)
	}
	if err := d.writable(); err != nil {
		return err
	}
	if flags&WriteFUA != 0 {
		if err := d.flush.Failed(); err != nil {
			return err
		}
	}
	if off+n > d.intact.Load() {
		return d.fail("zero", off, n, errCutOff)
	}
	for n > 0 {
		m := min(n, zeroPiece)
		s := d.locks.span(off, m)
		if !d.locks.lock(s) {
			return ErrClosed
		}
		err := d.uncut()
		if err == nil {
			err = d.zero(off, m, flags&ZeroNoUnmap != 0)
		}
		d.locks.unlock(s)
		if err != nil {
			return d.fail("zero", off, m, err)
		}
		off, n = off+m, n-m
	}
	if flags&WriteFUA != 0 {
		return d.flush.Flush()
	}
	return nil
}

// zero takes the cheapest way that the store has. On block devices PUNCH_HOLE is
// zeros by unmapping if, and only if, the device promises that they read as zeros.
func (d *file) zero(off, n int64, noUnmap bool) error {
	if !noUnmap {
		if done, err := d.attempt(&d.noPunch, func() error {
			return unix.Fallocate(d.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
		}); done {
			return err
		}
	}
	if done, err := d.attempt(&d.noZeroRange, func() error {
		return unix.Fallocate(d.fd, unix.FALLOC_FL_ZERO_RANGE|unix.FALLOC_FL_KEEP_SIZE, off, n)
	}); done {
		return err
	}
	if d.block {
		if done, err := d.attempt(&d.noZeroOut, func() error { return ioctlRange(d.fd, unix.BLKZEROOUT, off, n) }); done {
			return err
		}
	}
	for z := zeroes(); n > 0; {
		m := min(n, int64(len(z)))
		if err := d.pwrite(z[:m], off); err != nil {
			return err
		}
		off, n = off+m, n-m
	}
	return nil
}

// attempt makes a call unless the store is known to lack it; done says that it
// was made and that err is its result.
func (d *file) attempt(lacks *atomic.Bool, call func() error) (done bool, err error) {
	if lacks.Load() {
		return false, nil
	}
	for {
		err = call()
		switch {
		case err == unix.EINTR:
		case err != nil && unsupported(err), err == unix.EREMOTEIO && d.block: // a disk that refused the command it was thought to have
			lacks.Store(true)
			return false, nil
		default:
			return true, err
		}
	}
}

func (d *file) Discard(off, n int64) error {
	d.gate.RLock()
	defer d.gate.RUnlock()
	if d.locks.closed.Load() {
		return ErrClosed
	}
	if err := CheckRange(d.size.Load(), d.info.BlockSize, off, n); err != nil {
		return d.fail("discard", off, n, err)
	}
	if err := d.writable(); err != nil {
		return err
	}
	if !d.info.Discard {
		return nil
	}
	for n > 0 {
		m := min(n, discardPiece)
		s := d.locks.span(off, m)
		if !d.locks.lock(s) {
			return ErrClosed
		}
		if off+m > d.intact.Load() { // what is cut off needs no discarding
			d.locks.unlock(s)
			return nil
		}
		done, err := d.attempt(&d.noDiscard, func() error {
			if d.block {
				return ioctlRange(d.fd, unix.BLKDISCARD, off, m)
			}
			return unix.Fallocate(d.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, m)
		})
		if !done && d.info.DiscardZeros { // promised when it still worked
			done, err = true, d.zero(off, m, false)
		}
		d.locks.unlock(s)
		if err != nil {
			return d.fail("discard", off, m, err)
		}
		if !done {
			return nil
		}
		off, n = off+m, n-m
	}
	return nil
}

func (d *file) Flush() error {
	d.gate.RLock()
	defer d.gate.RUnlock()
	if d.locks.closed.Load() {
		return ErrClosed
	}
	if d.info.ReadOnly {
		return nil
	}
	if err := d.flush.Flush(); err != nil {
		return err
	}
	return d.uncut()
}

// Watch is part of Watchable.
func (d *file) Watch(busy *atomic.Uint32, doubt bool) {
	d.flush.busy = busy
	d.doubt.Store(doubt && !d.block)
}

// sync is what a flush does.
func (d *file) sync() error {
	if err := retry(func() error { return unix.Fdatasync(d.fd) }); err != nil {
		return err
	}
	if !d.doubt.Load() {
		return nil
	}
	// The file system keeps an account of its own of what could not be written, which fdatasync does
	// not touch and syncfs reports (Linux 5.8). It is one for all its files: better one alarm too many.
	err := retry(func() error { return unix.Syncfs(d.fd) })
	if err != nil {
		return fmt.Errorf("a write to its file system may have been lost while the last who had it open was killed in a flush: %w", err)
	}
	d.doubt.Store(false)
	return nil
}

func retry(call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return err
		}
	}
}

func (d *file) Refresh() (Info, error) {
	d.gate.RLock()
	defer d.gate.RUnlock()
	d.grow.Lock()
	defer d.grow.Unlock()
	if d.locks.closed.Load() {
		return d.Info(), ErrClosed
	}
	size, err := storeSize(d.fd, d.block)
	if err != nil {
		return d.Info(), fmt.Errorf("%s: look at the size: %w", d.path, err)
	}
	old := d.size.Load()
	size &^= int64(d.info.BlockSize) - 1
	if size < old || d.intact.Load() < old {
		if err := d.uncut(); err != nil || d.intact.Load() < old {
			return d.Info(), fmt.Errorf("%s: the file shrank from %d to %d bytes: refused, the old size stays; what was cut off is lost, it can neither be read nor written, and flushes fail (bring the file to its size, repair its content, serve it anew)", d.path, old, d.intact.Load())
		}
		return d.Info(), shrunk(d.path, old, size)
	}
	// In this order: what is inside the size is intact. A cut in between wins.
	if d.intact.CompareAndSwap(old, size) {
		d.size.Store(size)
	}
	return d.Info(), nil
}

func shrunk(name string, old, size int64) error {
	return fmt.Errorf("%s: the store shrank from %d to %d bytes: refused, the old size stays and what was cut off cannot be read (grow it back)", name, old, size)
}

func (d *file) Close() error {
	d.gate.Lock()
	defer d.gate.Unlock()
	if !d.locks.close() {
		return ErrClosed
	}
	for _, fd := range d.fds.free {
		unix.Close(fd)
	}
	if err := unix.Close(d.fd); err != nil { // the locks go with it
		return &os.PathError{Op: "close", Path: d.path, Err: err}
	}
	return nil
}

// storeSize is the size in bytes of an open file or block device.
func storeSize(fd int, block bool) (int64, error) {
	if block {
		var n uint64
		if err := ioctlUint64(fd, unix.BLKGETSIZE64, &n); err != nil {
			return 0, err
		}
		if int64(n) < 0 {
			return 0, errors.New("size does not fit into 63 bits")
		}
		return int64(n), nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, err
	}
	return st.Size, nil
}
