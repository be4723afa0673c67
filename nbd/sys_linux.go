package nbd

import (
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// socketBuffer is what one end of a Unix socket may send ahead of the other, in bytes (the kernel counts its
// own structures besides and takes twice as much): a few of the largest requests that are usual. With the
// kernel's own 208 KiB a reply of 128 KiB goes out in pieces, each with a wake-up of both sides, which
// costs a quarter of the processor time of both programs.
const socketBuffer = 1 << 20

// widen gives a Unix socket a send buffer of n bytes, or what the kernel lets others than root have
// (net.core.wmem_max). A smaller one does as well, only slower.
func widen(fd, n int) {
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, n) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, n)
	}
}

// The descriptors of connections never block, so these calls skip the
// scheduler's bookkeeping. They run on the worker's locked thread.

// recvInto receives into the buffers of iov, in order.
func recvInto(fd int, iov []unix.Iovec, m *unix.Msghdr) (int, unix.Errno) {
	m.Iov = &iov[0]
	m.SetIovlen(len(iov))
	m.Flags = 0
	for {
		n, _, errno := unix.RawSyscall(unix.SYS_RECVMSG, uintptr(fd), uintptr(unsafe.Pointer(m)), unix.MSG_DONTWAIT)
		if errno != unix.EINTR {
			return int(n), errno
		}
	}
}

// sendFrom sends what iov names as far as the socket takes it.
func sendFrom(fd int, iov []unix.Iovec, m *unix.Msghdr) (int, unix.Errno) {
	m.Iov = &iov[0]
	m.SetIovlen(len(iov))
	for {
		n, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(m)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		if errno != unix.EINTR {
			return int(n), errno
		}
	}
}

// hungUp reports whether the peer has closed both directions or the socket has failed.
func hungUp(fd int) bool {
	p := unix.PollFd{Fd: int32(fd)}
	var ts unix.Timespec // zero: look, do not wait
	n, _, errno := unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&p)), 1, uintptr(unsafe.Pointer(&ts)), 0, 0, 0)
	return errno == 0 && n > 0 && p.Revents&(unix.POLLHUP|unix.POLLERR|unix.POLLNVAL) != 0
}

func iovec(b []byte) unix.Iovec {
	v := unix.Iovec{Base: unsafe.SliceData(b)}
	v.SetLen(len(b))
	return v
}

var epoch = time.Now()

// nanotime is a monotonic clock in nanoseconds.
func nanotime() int64 { return int64(time.Since(epoch)) }
