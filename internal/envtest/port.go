package envtest

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// Port gives an address of the loopback device with a port that is the caller's for the length of the test: the kernel
// gives it to nobody who asks for any port. So a server that is started again, or late, finds it free, and nobody else is
// met there meanwhile. It can be listened on as package net does, with SO_REUSEADDR; until then connections are refused.
func Port(t testing.TB) netip.AddrPort {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	loopback := [4]byte{127, 0, 0, 1}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		t.Fatal(err)
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: loopback}); err != nil {
		t.Fatal(err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	return netip.AddrPortFrom(netip.AddrFrom4(loopback), uint16(sa.(*unix.SockaddrInet4).Port))
}
