package iwarp

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The calls of the data path. They are made on non-blocking descriptors and
// return at once, so they go without the scheduler's bookkeeping (RawSyscall).

func sysRecv(fd int, p []byte) (int, unix.Errno) {
	for {
		n, _, e := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)), unix.MSG_DONTWAIT, 0, 0)
		if e != unix.EINTR {
			return int(n), e
		}
	}
}

func sysRecvmsg(fd int, m *unix.Msghdr) (int, unix.Errno) {
	for {
		n, _, e := unix.RawSyscall(unix.SYS_RECVMSG, uintptr(fd), uintptr(unsafe.Pointer(m)), unix.MSG_DONTWAIT)
		if e != unix.EINTR {
			return int(n), e
		}
	}
}

// iovec is struct iovec with an address that the garbage collector does not look
// at: it names memory outside the Go heap, or a staging buffer that the QP holds.
type iovec struct { // layout as the kernel's
	base uintptr
	len  uint64
}

func iov(p []byte) iovec {
	return iovec{uintptr(unsafe.Pointer(unsafe.SliceData(p))), uint64(len(p))}
}

// setIOV makes m name the pieces of v.
func setIOV(m *unix.Msghdr, v []iovec) {
	m.Iov = (*unix.Iovec)(unsafe.Pointer(unsafe.SliceData(v)))
	m.SetIovlen(len(v))
}

func sysSend(fd int, p uintptr, n int, flags uintptr) (int, unix.Errno) {
	for {
		n, _, e := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), p, uintptr(n), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL|flags, 0, 0)
		if e != unix.EINTR {
			return int(n), e
		}
	}
}

// sysSendBytes sends a slice; its memory cannot go away meanwhile.
func sysSendBytes(fd int, p []byte) (int, unix.Errno) {
	n, e := sysSend(fd, uintptr(unsafe.Pointer(unsafe.SliceData(p))), len(p), 0)
	runtime.KeepAlive(p)
	return n, e
}

func sysSendmsg(fd int, m *unix.Msghdr, flags uintptr) (int, unix.Errno) {
	for {
		n, _, e := unix.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(m)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL|flags)
		if e != unix.EINTR {
			return int(n), e
		}
	}
}

func sysEpollNow(epfd int, ev []unix.EpollEvent) int {
	n, _, e := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(epfd), uintptr(unsafe.Pointer(&ev[0])), uintptr(len(ev)), 0, 0, 0)
	if e != 0 {
		return 0
	}
	return int(n)
}

// addrPointer turns the address in an SGE of inline data back into a pointer. The
// memory is the caller's and stays where it is for the length of the call: it
// is either outside the Go heap or held by the caller.
func addrPointer(addr uint64) unsafe.Pointer {
	p := uintptr(addr)
	return *(*unsafe.Pointer)(unsafe.Pointer(&p))
}

func addrOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// dupConn takes the socket out of the hands of package net: a duplicate of the
// non-blocking descriptor, then the original is closed.
func dupConn(nc *net.TCPConn) (int, error) {
	rc, err := nc.SyscallConn()
	if err != nil {
		return -1, err
	}
	fd := -1
	var derr error
	if err := rc.Control(func(s uintptr) {
		fd, derr = unix.FcntlInt(s, unix.F_DUPFD_CLOEXEC, 0)
	}); err != nil {
		return -1, err
	}
	if derr != nil {
		return -1, derr
	}
	nc.Close()
	return fd, nil
}

// tune sets what every connection wants: no delay of small segments, and an end
// for peers that went away silently.
func tune(fd int, userTimeout time.Duration) {
	unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	if userTimeout <= 0 {
		return
	}
	sec := max(int(userTimeout/time.Second), 1)
	probe := max(sec/4, 1)
	unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1)
	unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, probe)
	unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, probe)
	unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 3)
	unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(userTimeout/time.Millisecond))
}

func setCongestion(fd int, name string) error {
	return os.NewSyscallError("setsockopt TCP_CONGESTION "+name, unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, name))
}

// CheckCongestion says why Config.CongestionControl may not be name, for example that the kernel does not offer it to
// this process. It may make the kernel load the module.
func CheckCongestion(name string) error {
	switch name {
	case "", CongestionAuto, CongestionSystem:
		return nil
	}
	odd := func(r rune) bool {
		return (r|0x20 < 'a' || r|0x20 > 'z') && (r < '0' || r > '9') && r != '-' && r != '_'
	}
	if len(name) >= 16 || strings.ContainsFunc(name, odd) { // TCP_CA_NAME_MAX; the kernel would cut it off
		return fmt.Errorf("%.20q is no name of an algorithm, which has up to 15 letters and digits: auto, system, or one that sysctl net.ipv4.tcp_available_congestion_control shows", name)
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	switch err := setCongestion(fd, name); {
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("the kernel has no %q (sysctl net.ipv4.tcp_available_congestion_control shows those it has; more come as modules: modprobe tcp_%s)", name, name)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%q is for privileged processes here: add it to sysctl net.ipv4.tcp_allowed_congestion_control", name)
	default:
		return err
	}
}

func setBuffers(fd, snd, rcv int) {
	if snd > 0 {
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, snd)
	}
	if rcv > 0 {
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, rcv)
	}
}

// segmentSize is TCP's current segment payload (EMSS).
func segmentSize(fd int) int {
	n, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG)
	if err != nil || n < minEMSS {
		return minEMSS
	}
	return n
}

// abort closes with a reset: what the send queue holds is thrown away.
func abort(fd int) {
	unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	unix.Close(fd)
}

var _ = [1]struct{}{}[unsafe.Sizeof(iovec{})-unsafe.Sizeof(unix.Iovec{})]
