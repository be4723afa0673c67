package blockdev

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Bounds of Info.BlockSize in bytes.
const (
	MinBlockSize = 512
	MaxBlockSize = 65536
)

// Options tell how to open a device. The zero value is good.
type Options struct {
	// ReadOnly refuses every modification; the store is opened for reading only.
	ReadOnly bool
	// Direct goes round the page cache (O_DIRECT). The smallest block and the
	// alignment of buffers are then what the store demands.
	Direct bool
	// BlockSize is the logical block in bytes, a power of two from 512 to 65536; 0 = the
	// smallest that the store can do: 512 for a file, the disk's own for a disk.
	BlockSize int
	// ExactSize refuses a store whose size is no multiple of the block. Otherwise
	// the size is rounded down with a warning.
	ExactSize bool
	// NoLock serves without a lock, for file systems that have none. Nothing then
	// keeps a second server from destroying the content.
	NoLock bool
	// OnFlushFailed is called whenever a Flush or a FUA write finds that earlier writes
	// may be lost, on the goroutine of that call and before anybody hears of it by an
	// error; it must not call the device. The kernel tells of a failed write-back once, so
	// that a store opened anew looks clean: who wants to know then must remember it.
	// It may be called more than once, for one device not concurrently. nil = nobody is told.
	OnFlushFailed func(error)
	// Logger gets warnings; nil = none.
	Logger *slog.Logger
}

func (o *Options) logger() *slog.Logger {
	if o.Logger != nil {
		return o.Logger
	}
	return slog.New(slog.DiscardHandler)
}

// blockSize is the block to use on a store that can do no smaller one than least.
func (o *Options) blockSize(name string, least int) (int, error) {
	b := o.BlockSize
	if b == 0 {
		b = max(least, MinBlockSize)
	}
	if b < MinBlockSize || b > MaxBlockSize || b&(b-1) != 0 {
		return 0, fmt.Errorf("%s: block size %d: it must be a power of two from %d to %d", name, b, MinBlockSize, MaxBlockSize)
	}
	if b < least {
		return 0, fmt.Errorf("%s: block size %d is less than the %d bytes that the store can address (use %d or more)", name, b, least, least)
	}
	return b, nil
}

// wholeBlocks is size rounded down to blocks.
func (o *Options) wholeBlocks(name string, size int64, block int) (int64, error) {
	whole := size &^ (int64(block) - 1)
	if size == 0 {
		return 0, fmt.Errorf("%s: it is empty (give it a size first: truncate -s 10G %s)", name, name)
	}
	if whole == 0 {
		return 0, fmt.Errorf("%s: its %d bytes are less than one block of %d", name, size, block)
	}
	if whole != size {
		if o.ExactSize {
			return 0, fmt.Errorf("%s: its size of %d bytes is no multiple of the block of %d (truncate -s %%%d %s rounds it up)", name, size, block, block, name)
		}
		o.logger().Warn("size is no multiple of the block: the rest at the end is not served", "dev", name, "size", size, "block", block, "rest", size-whole)
	}
	return whole, nil
}

// Open opens the device that spec names:
//
//	PATH       a regular file or a raw block device; it must exist
//	mem:SIZE   memory, empty at first and gone at Close
//	null:SIZE  reads as zeros, forgets what is written
//
// SIZE is read by ParseSize. A path that looks like one of the latter is written ./mem:1G.
//
// A file or disk is locked as long as it is open: for itself alone, or shared with
// other readers if ReadOnly. ErrInUse says that somebody else has it, a disk also
// when it is mounted.
func Open(spec string, o Options) (Device, error) {
	if size, ok := strings.CutPrefix(spec, "mem:"); ok {
		n, err := ParseSize(size)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", spec, err)
		}
		return NewMem(spec, n, o)
	}
	if size, ok := strings.CutPrefix(spec, "null:"); ok {
		n, err := ParseSize(size)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", spec, err)
		}
		return NewNull(spec, n, o)
	}
	return openFile(spec, o)
}

// howToMake is the advice for a path that does not exist. A disk that is not there is
// not made by making a file in its place.
func howToMake(path string) string {
	abs, err := filepath.Abs(path)
	if err == nil && strings.HasPrefix(abs, "/dev/") {
		return "there is no such device: is it plugged in, and its name right?"
	}
	if _, err := os.Lstat(path); err == nil {
		return "it is a symbolic link that leads nowhere: is what it leads to mounted?"
	}
	if _, err := os.Stat(filepath.Dir(path)); err != nil {
		return "its directory does not exist either: is it mounted, and the path right?"
	}
	if _, size, ok := strings.Cut(path, ":"); ok {
		if _, err := ParseSize(size); err == nil {
			return fmt.Sprintf("memory is mem:%s, a device that forgets null:%s", size, size)
		}
	}
	return "create it first: truncate -s 10G " + path
}

func openFile(path string, o Options) (_ Device, err error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		if err == unix.ENOENT {
			return nil, fmt.Errorf("open %s: %w (%s)", path, err, howToMake(path))
		}
		if err == unix.EACCES {
			return nil, fmt.Errorf("open %s: %w (this user may not enter its directory: change that, or be root)", path, err)
		}
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	if err := servable(path, &st); err != nil {
		return nil, err
	}
	block := st.Mode&unix.S_IFMT == unix.S_IFBLK

	fd, err := openStore(path, block, &o)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	var now unix.Stat_t
	if err := unix.Fstat(fd, &now); err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	if now.Mode&unix.S_IFMT != st.Mode&unix.S_IFMT { // it was replaced in between
		return nil, fmt.Errorf("open %s: it changed its type while it was opened", path)
	}
	if !o.NoLock {
		if err := lockStore(fd, path, block, o.ReadOnly); err != nil {
			return nil, err
		}
	}
	if block {
		err = checkBacking(path, uint64(now.Rdev), o)
	} else {
		err = checkLoop(path, &now, o)
	}
	if err != nil {
		return nil, err
	}

	d := &file{path: path, fd: fd, block: block, direct: o.Direct, log: o.logger(), guard: newWriteGuard(), dev: uint64(now.Dev), notesReads: notesReads(fd)}
	if block {
		d.dev = uint64(now.Rdev)
		d.info, err = diskInfo(fd, path, &now, &o)
	} else {
		d.info, err = fileInfo(fd, path, &now, &o)
	}
	if err != nil {
		return nil, err
	}
	size, err := storeSize(fd, block)
	if err != nil {
		return nil, fmt.Errorf("%s: find its size: %w", path, err)
	}
	if size, err = o.wholeBlocks(path, size, d.info.BlockSize); err != nil {
		return nil, err
	}
	d.size.Store(size)
	d.intact.Store(size)
	d.info.Name = path
	d.info.ReadOnly = o.ReadOnly
	if err := d.chooseTry(); err != nil {
		return nil, err
	}
	if !block && !o.ReadOnly {
		if err := d.probePunch(&now); err != nil {
			return nil, err
		}
	}
	if o.ReadOnly {
		d.info.Discard, d.info.DiscardZeros, d.info.WriteZeroes = false, false, false
	}

	// Buffered I/O is bounded by copying, so coarse locks cost least; direct I/O
	// holds its range for as long as the disk takes, so fine ones matter.
	if o.Direct {
		d.locks = newRangeLocks(max(4096, d.info.BlockSize), 1024)
	} else {
		d.locks = newRangeLocks(MaxBlockSize, 256)
	}
	d.flush = newFlusher(path, d.sync, o.OnFlushFailed)
	return d, nil
}

func servable(path string, st *unix.Stat_t) error {
	what := "a special file"
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG, unix.S_IFBLK:
		return nil
	case unix.S_IFDIR:
		what = "a directory"
	case unix.S_IFCHR:
		what = "a character device"
	case unix.S_IFIFO:
		what = "a pipe"
	case unix.S_IFSOCK:
		what = "a socket"
	}
	return fmt.Errorf("open %s: it is %s (name a regular file or a block device)", path, what)
}

func openStore(path string, block bool, o *Options) (int, error) {
	mode := unix.O_RDWR
	if o.ReadOnly {
		mode = unix.O_RDONLY
	}
	mode |= unix.O_CLOEXEC
	if !block {
		mode |= unix.O_NONBLOCK // should the name be a pipe by now, opening it must not hang
	}
	if o.Direct {
		mode |= unix.O_DIRECT
	}
	if block && !o.ReadOnly && !o.NoLock {
		mode |= unix.O_EXCL // refused by the kernel while it is mounted, swapped on, part of a RAID …
	}
	fd, err := unix.Open(path, mode|unix.O_NOATIME, 0)
	if err == unix.EPERM { // somebody else's file
		fd, err = unix.Open(path, mode, 0)
	}
	switch {
	case err == nil:
	case err == unix.EBUSY && block:
		return -1, fmt.Errorf("open %s: %w%s: it or a partition of it is mounted or held by a driver or another server (lsblk %s and findmnt show by what; unmount it, or serve it read-only)",
			path, ErrInUse, heldBy(path), path)
	case err == unix.EINVAL && o.Direct:
		return -1, fmt.Errorf("open %s: %w: its file system has no direct I/O (open it without)", path, err)
	case (err == unix.EACCES || err == unix.EPERM || err == unix.EROFS) && !o.ReadOnly:
		return -1, fmt.Errorf("open %s for writing: %w (change its permissions or serve it read-only)", path, err)
	case err == unix.EACCES, err == unix.EPERM:
		return -1, fmt.Errorf("open %s: %w (change its permissions, or be root)", path, err)
	default:
		return -1, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	if block && !o.ReadOnly {
		if ro, err := unix.IoctlGetInt(fd, unix.BLKROGET); err == nil && ro != 0 {
			unix.Close(fd)
			return -1, fmt.Errorf("open %s for writing: %w: the disk is write-protected (blockdev --getro; serve it read-only)", path, ErrReadOnly)
		}
	}
	if block && o.ReadOnly {
		// Shared readers must not exclude each other, so this only looks.
		if x, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_EXCL, 0); err == nil {
			unix.Close(x)
		} else if err == unix.EBUSY {
			o.logger().Warn("the disk is mounted or held by somebody: what is read while it changes does not fit together", "dev", path)
		}
	}
	return fd, nil
}

// fileInfo is the geometry of a regular file.
func fileInfo(fd int, path string, st *unix.Stat_t, o *Options) (Info, error) {
	least, memAlign := MinBlockSize, 0
	var x unix.Statx_t
	statxErr := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_BASIC_STATS|unix.STATX_BTIME|unix.STATX_DIOALIGN, &x)
	if o.Direct {
		switch {
		case statxErr == nil && x.Mask&unix.STATX_DIOALIGN != 0 && x.Dio_offset_align != 0:
			least, memAlign = max(least, int(x.Dio_offset_align)), int(x.Dio_mem_align)
		case statxErr == nil && x.Mask&unix.STATX_DIOALIGN != 0:
			return Info{}, fmt.Errorf("open %s: %w: this file cannot do direct I/O: it is encrypted, compressed or journaled (open it without)", path, ErrNotSupported)
		default:
			least, memAlign = 4096, 4096 // before Linux 6.1: good for every disk
		}
	}
	bs, err := o.blockSize(path, least)
	if err != nil {
		return Info{}, err
	}
	in := Info{BlockSize: bs, PhysBlock: max(bs, os.Getpagesize()), MemAlign: memAlign, WriteCache: true, FUA: hasDsync(fd)}
	if b := int(st.Blksize); b > 0 && b&(b-1) == 0 {
		if b <= MaxBlockSize {
			in.PhysBlock = max(in.PhysBlock, b)
		} else {
			in.OptimalIO = b
		}
	}
	in.Rotational = sysfsInt(sysfsDisk(uint64(st.Dev)), "queue/rotational") == 1
	in.UUID = fileUUID(fd, st, &x)
	return in, nil
}

// diskInfo is the geometry of a block device.
func diskInfo(fd int, path string, st *unix.Stat_t, o *Options) (Info, error) {
	logical, err := unix.IoctlGetInt(fd, unix.BLKSSZGET)
	if err != nil {
		return Info{}, fmt.Errorf("%s: find its block size: %w", path, err)
	}
	bs, err := o.blockSize(path, logical)
	if err != nil {
		return Info{}, err
	}
	in := Info{BlockSize: bs, PhysBlock: bs, WriteCache: true, FUA: true}
	if v, err := ioctlUint32(fd, unix.BLKPBSZGET); err == nil && v&(v-1) == 0 {
		in.PhysBlock = max(in.PhysBlock, int(v))
	}
	if v, err := ioctlUint32(fd, unix.BLKIOOPT); err == nil && int(v)%in.PhysBlock == 0 {
		in.OptimalIO = int(v)
	}
	dir := sysfsDisk(uint64(st.Rdev))
	in.Rotational = sysfsInt(dir, "queue/rotational") == 1
	in.Discard = sysfsInt(dir, "queue/discard_max_bytes") > 0
	in.WriteZeroes = sysfsInt(dir, "queue/write_zeroes_max_bytes") > 0
	if v, err := ioctlUint32(fd, unix.BLKDISCARDZEROES); err == nil && in.Discard {
		in.DiscardZeros = v != 0
	}
	if o.Direct {
		in.MemAlign = logical
		var x unix.Statx_t
		if unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &x) == nil && x.Mask&unix.STATX_DIOALIGN != 0 && x.Dio_mem_align != 0 {
			in.MemAlign = int(x.Dio_mem_align)
		}
		// Without a page cache of ours, what the disk says of its own cache is the whole truth.
		in.WriteCache = sysfsString(dir, "queue/write_cache") != "write through"
	} else if v, err := unix.IoctlGetInt(fd, unix.BLKBSZGET); err == nil && v > 0 && v&(v-1) == 0 {
		in.PhysBlock = max(in.PhysBlock, v) // smaller writes read the rest first
	}
	in.UUID = deviceUUID(uint64(st.Rdev))
	return in, nil
}

// notesReads reports whether reading by fd makes the file system note the time.
func notesReads(fd int) bool {
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err == nil && flags&unix.O_NOATIME != 0 {
		return false
	}
	var s unix.Statfs_t
	return unix.Fstatfs(fd, &s) != nil || s.Flags&(unix.ST_NOATIME|unix.ST_RDONLY) == 0
}

// fsMagic is the type of the file system that fd is on.
func fsMagic(fd int) uint32 {
	var s unix.Statfs_t
	if unix.Fstatfs(fd, &s) != nil {
		return 0
	}
	return uint32(s.Type)
}

// hasDsync reports whether the file system is known to honour RWF_DSYNC. The flag
// is accepted everywhere, but network, FUSE and out-of-tree file systems look at the
// open mode alone: they get a write and an fdatasync.
func hasDsync(fd int) bool {
	switch fsMagic(fd) {
	case unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, f2fsMagic, unix.TMPFS_MAGIC:
		return true
	}
	return false
}

// chooseTry decides how Try calls are made. Kernels and file systems that lack
// RWF_NOWAIT are found out by asking, harmlessly: a read of one byte.
func (d *file) chooseTry() error {
	d.pageMask = int64(os.Getpagesize()) - 1
	d.noDsync.Store(!d.info.FUA)
	if !d.block {
		switch fsMagic(d.fd) {
		case unix.TMPFS_MAGIC, ramfsMagic:
			d.local, d.inMemory = true, true // an ordinary read waits for swap at most
		case unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, f2fsMagic, unix.OVERLAYFS_SUPER_MAGIC:
			d.local = true
		}
	}
	if d.direct {
		d.tryRead.Store(int32(nowaitNever))
		d.tryWrite.Store(int32(nowaitNever))
		return nil
	}
	var b [1]byte
	_, err := preadNow(d.fd, b[:], 0)
	inMemory := d.inMemory
	switch {
	case err == nil, err == unix.EAGAIN:
	case inMemory:
		d.tryRead.Store(int32(nowaitPlain))
	case unsupported(err), err == unix.EINVAL:
		d.tryRead.Store(int32(nowaitNever))
	default:
		return d.fail("read", 0, 1, err)
	}
	switch m := fsMagic(d.fd); {
	case d.info.ReadOnly:
		d.tryWrite.Store(int32(nowaitNever))
	case !d.block && (m == unix.XFS_SUPER_MAGIC || m == unix.BTRFS_SUPER_MAGIC):
		d.tryWrite.Store(int32(nowaitKernel))
	case d.block, inMemory, m == unix.EXT4_SUPER_MAGIC, m == f2fsMagic, m == unix.OVERLAYFS_SUPER_MAGIC:
		d.tryWrite.Store(int32(nowaitPlain))
	default: // a write may be a conversation with a server
		d.tryWrite.Store(int32(nowaitNever))
	}
	return nil
}

// probePunch asks the file system whether it can punch holes, where nothing can be:
// far behind the end of the file.
func (d *file) probePunch(st *unix.Stat_t) error {
	const page = 1 << 20
	at := (max(st.Size, st.Blocks*512)+page-1)/page*page + page
	err := unix.Fallocate(d.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at, page)
	switch {
	case err == nil, err == unix.EFBIG: // as large as a file can be
		d.info.Discard, d.info.DiscardZeros, d.info.WriteZeroes = true, true, true
	case err == unix.ETXTBSY:
		return fmt.Errorf("open %s for writing: %w: it is swapped on (swapoff %s)", d.path, ErrInUse, d.path)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("open %s for writing: %w: it is append-only or immutable (lsattr %s; serve it read-only)", d.path, err, d.path)
	default:
		d.noPunch.Store(true)
	}
	return nil
}
