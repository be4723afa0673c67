package nbd

import (
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

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
