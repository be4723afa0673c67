package blockdev

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Linux calls that golang.org/x/sys has not or that would allocate there.

const (
	fsIocGetFSUUID = 0x80111500 // FS_IOC_GETFSUUID, Linux 6.9
	ramfsMagic     = 0x858458f6
	f2fsMagic      = 0xf2f52010

	// maxSyscall bounds a single call; the kernel's own limit is 2 GiB less a page.
	maxSyscall = 1 << 30
)

// preadNow reads without waiting for a medium: only what is in memory, which may
// be less than asked, else EAGAIN. It never blocks, so it skips the scheduler's bookkeeping.
func preadNow(fd int, p []byte, off int64) (int, error) {
	iov := unix.Iovec{Base: unsafe.SliceData(p)}
	iov.SetLen(len(p))
	n, _, errno := unix.RawSyscall6(unix.SYS_PREADV2, uintptr(fd), uintptr(unsafe.Pointer(&iov)), 1,
		uintptr(off), posHigh(off), unix.RWF_NOWAIT)
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

func pwriteFlags(fd int, p []byte, off int64, flags int) (int, error) {
	iov := unix.Iovec{Base: unsafe.SliceData(p)}
	iov.SetLen(len(p))
	n, _, errno := unix.Syscall6(unix.SYS_PWRITEV2, uintptr(fd), uintptr(unsafe.Pointer(&iov)), 1,
		uintptr(off), posHigh(off), uintptr(flags))
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

// posHigh is the second half of an offset, which the kernel wants on 32 bits and ignores on 64.
func posHigh(off int64) uintptr { return uintptr(uint64(off) >> 32) }

// fileEnd is where a file ends. Nobody uses the position that this moves. On a local file system
// it looks at the inode in memory, so that the scheduler need not hear of it.
func fileEnd(fd int, local bool) (int64, error) {
	call := unix.Syscall
	if local {
		call = unix.RawSyscall
	}
	n, _, errno := call(unix.SYS_LSEEK, uintptr(fd), 0, unix.SEEK_END)
	if errno != 0 {
		return 0, fmt.Errorf("look at the size: %w", errno)
	}
	return int64(n), nil
}

func ioctlUint64(fd int, req uint, arg *uint64) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(req), uintptr(unsafe.Pointer(arg))); errno != 0 {
		return errno
	}
	return nil
}

func ioctlUint32(fd int, req uint) (uint32, error) {
	var v uint32
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(req), uintptr(unsafe.Pointer(&v))); errno != 0 {
		return 0, errno
	}
	return v, nil
}

// ioctlRange is BLKDISCARD and BLKZEROOUT.
func ioctlRange(fd int, req uint, off, n int64) error {
	r := [2]uint64{uint64(off), uint64(n)}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(req), uintptr(unsafe.Pointer(&r))); errno != 0 {
		return errno
	}
	return nil
}

// fsUUID is the identity of the mounted file system; false if the kernel does not tell.
func fsUUID(fd int) (id [16]byte, ok bool) {
	var a struct {
		len uint8
		id  [16]byte
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), fsIocGetFSUUID, uintptr(unsafe.Pointer(&a))); errno != 0 {
		return id, false
	}
	return a.id, a.len > 0 && a.id != [16]byte{}
}

// unsupported tells the errors with which file systems and drivers say that they
// lack an operation, from those that it met.
func unsupported(err error) bool {
	return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.ENODEV)
}

// noSpace is the family of "no room for this write".
func noSpace(err error) bool {
	return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EFBIG)
}

// zeroes is a buffer of zeros for writing, aligned to the page. Nothing can write
// to it, and it costs one page.
var zeroes = sync.OnceValue(func() []byte {
	b, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		panic(fmt.Sprintf("blockdev: map a megabyte of zeros: %v", err))
	}
	return b
})
