package cli

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// ListenAdvice is what to do when a program cannot listen at addr, where flag says where it does; empty if
// there is no advice.
func ListenAdvice(err error, addr netip.AddrPort, flag string) string {
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		return fmt.Sprintf("another program listens there, 'ss -ltnp sport = :%d' names it: end it, or choose another port with %s", addr.Port(), flag)
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return fmt.Sprintf("this machine has no such address, it has %s: choose one with %s", strings.Join(localAddrs(), ", "), flag)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		if addr.Port() > 0 && addr.Port() < 1024 {
			return fmt.Sprintf("ports below 1024 are for root and who has CAP_NET_BIND_SERVICE: choose another with %s", flag)
		}
		return "something forbids it: a firewall of the system (SELinux, AppArmor), or its service manager"
	}
	return ""
}

// WithAdvice adds advice to an error, if there is any.
func WithAdvice(err error, advice string) error {
	if advice == "" {
		return err
	}
	return fmt.Errorf("%w (%s)", err, advice)
}

// LacksAddr tells whether this machine does not have the address. If that cannot be told it has it.
func LacksAddr(a netip.Addr) bool {
	addrs, err := net.InterfaceAddrs()
	if err != nil || a.IsUnspecified() || a.IsLoopback() { // all of 127.0.0.0/8 is there with its first address
		return false
	}
	return !slices.ContainsFunc(addrs, func(x net.Addr) bool {
		n, ok := x.(*net.IPNet)
		if !ok {
			return false
		}
		ip, ok := netip.AddrFromSlice(n.IP)
		return ok && ip.Unmap() == a.Unmap().WithZone("")
	})
}

// localAddrs lists this machine's addresses, at most a dozen.
func localAddrs() []string {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return []string{"what 'ip address' shows"}
	}
	var list []string
	for _, a := range addrs {
		n, ok := a.(*net.IPNet)
		if !ok || n.IP.IsLinkLocalUnicast() {
			continue
		}
		if len(list) == 12 {
			return append(list, "and more ('ip address' shows all)")
		}
		list = append(list, n.IP.String())
	}
	if len(list) == 0 {
		return []string{"none"}
	}
	return list
}

// Plain takes what the standard library puts around an error of the system away: the operation, the
// address and the system call, which the one who reports it says better.
func Plain(err error) error {
	var op *net.OpError
	var dns *net.DNSError
	var errno unix.Errno
	switch {
	case errors.As(err, &dns):
		return errors.New(dns.Err)
	case errors.As(err, &op), errors.As(err, &errno):
		if errors.As(err, &errno) {
			return errno
		}
		return op.Err
	}
	return err
}
