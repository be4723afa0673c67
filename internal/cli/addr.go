package cli

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// DefaultPort is the port that IANA gave NVMe over Fabrics.
const DefaultPort = 4420

// SplitAddr takes ADDR, ADDR:PORT, [V6]:PORT or a bare IPv6 address apart. A
// missing port becomes def; the host may be empty (":4420").
func SplitAddr(s string, def uint16) (host string, port uint16, err error) {
	bad := func(why string) (string, uint16, error) {
		return "", 0, fmt.Errorf("%q is no address: %s; write ADDR:PORT, ADDR or [IPv6]:PORT", s, why)
	}
	if s == "" {
		return bad("it is empty")
	}
	bare := s
	if strings.HasPrefix(s, "[") && strings.HasSuffix(s, "]") {
		bare = s[1 : len(s)-1]
	}
	if a, err := netip.ParseAddr(bare); err == nil {
		return a.String(), def, nil
	}
	host, p, found := s, "", false
	if strings.Contains(s, ":") || strings.Contains(s, "[") {
		host, p, err = net.SplitHostPort(s)
		if err != nil {
			return bad(strings.TrimPrefix(err.Error(), "address "+s+": "))
		}
		found = true
	}
	if !found {
		return host, def, nil
	}
	n, err := strconv.ParseUint(p, 10, 16)
	if err != nil {
		return bad(fmt.Sprintf("port %q is not a number from 0 to 65535", p))
	}
	return host, uint16(n), nil
}

// A LookupError says that a name could not be made an address.
type LookupError struct{ err error }

func (e *LookupError) Error() string { return Plain(e.err).Error() }

func (e *LookupError) Unwrap() error { return e.err }

// ListenAddr checks an ADDR:PORT to listen at, in which a port must be named; def is one for the example.
func ListenAddr(s string, def uint16) error {
	if _, err := strconv.ParseUint(s, 10, 16); err == nil {
		return fmt.Errorf("%q is no ADDR:PORT; for that port on this machine alone write 127.0.0.1:%s", s, s)
	}
	_, port, err := SplitAddr(s, 0)
	if err == nil && port == 0 && !strings.HasSuffix(s, ":0") {
		err = fmt.Errorf("%q has no port; write ADDR:PORT, for example 127.0.0.1:%d", s, def)
	}
	return err
}

// ResolveAddr makes an address of what the user wrote; a name is looked up and
// the first answer taken, IPv4 before IPv6. An empty host is the wildcard.
func ResolveAddr(ctx context.Context, s string, def uint16) (netip.AddrPort, error) {
	host, port, err := SplitAddr(s, def)
	if err != nil {
		return netip.AddrPort{}, Usage(err)
	}
	if host == "" || host == "*" {
		return netip.AddrPortFrom(netip.IPv6Unspecified(), port), nil
	}
	if a, err := netip.ParseAddr(host); err == nil {
		return netip.AddrPortFrom(a.Unmap(), port), nil
	}
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("look up %q: %w (is the name right, and a name server reachable? An IP address needs none)", host, &LookupError{err})
	}
	best := ips[0].Unmap()
	for _, ip := range ips {
		if ip = ip.Unmap(); ip.Is4() {
			best = ip
			break
		}
	}
	return netip.AddrPortFrom(best, port), nil
}
