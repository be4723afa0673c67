// Package provider chooses the RDMA provider for an address: an RDMA device of the machine
// (package rdma/verbs) or the software NIC (package rdma/iwarp).
//
// The rule is the same in both programs. With [Verbs] or [IWARP] that provider does everything. With [Auto]
// the device that owns the address does it: towards a target the local address of the route, at a target
// the address that is listened on; for every other address, and where no device can be used, the software
// NIC does it.
//
// # One port, two providers
//
// InfiniBand and RoCE have a port space of their own, so a target listens with the device and with the
// software NIC on the same address and port, and hosts with and without RDMA hardware find it there. An iWARP
// device takes the TCP port itself (siw opens a socket of the kernel) and speaks the software NIC's wire: it
// listens alone, hosts of both kinds reach it. A wildcard address on a machine with an iWARP device is
// therefore taken apart into the machine's addresses, see [Chooser.Endpoints].
package provider

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"

	"rdblk/rdma"
	"rdblk/rdma/iwarp"
	"rdblk/rdma/verbs"
)

// Modes, as they are written in configuration.
const (
	Auto  = "auto"
	IWARP = "iwarp"
	Verbs = "verbs"
)

// CheckMode says what is wrong with a mode; nil if it is one.
func CheckMode(s string) error {
	switch s {
	case Auto, IWARP, Verbs:
		return nil
	}
	return fmt.Errorf("%q is none of auto, verbs (RDMA devices), iwarp (software)", s)
}

// Config says what to choose from.
type Config struct {
	Mode     string
	Software iwarp.Config
	// LockedMemory is how many bytes a device will have to pin for the program to work, as far as it is known
	// beforehand. A device is not used if the process may not lock so much.
	LockedMemory uint64
	// Logger takes what was chosen and why; nil: none.
	Logger *slog.Logger
}

// A Chooser is the rdma.Provider that dials with whichever provider suits the address. It may be used by any
// goroutine.
type Chooser struct {
	mode    string
	log     *slog.Logger
	soft    *iwarp.Provider
	hard    rdma.Provider // nil: cannot be used, for the reason hardErr
	hardErr error
	m       machine
	said    atomic.Bool // that a dial went to software though a device has the address
}

var _ rdma.Provider = (*Chooser)(nil)

// machine is what a Chooser asks of the machine; tests have another.
type machine struct {
	verbs   func(*slog.Logger) (rdma.Provider, error)
	memlock func(need uint64) error
	route   func(remote netip.AddrPort) (netip.Addr, error)
	local   func() ([]netip.Addr, error)
}

func thisMachine() machine {
	return machine{
		verbs: func(log *slog.Logger) (rdma.Provider, error) {
			p, err := verbs.New(verbs.Config{Logger: log})
			if err != nil {
				return nil, err
			}
			return p, nil
		},
		memlock: LockedMemory, route: route, local: localAddrs,
	}
}

// New makes a Chooser. With the mode Verbs it fails unless there is a device that can be used, and says what
// is missing.
func New(cfg Config) (*Chooser, error) { return newChooser(cfg, thisMachine()) }

func newChooser(cfg Config, m machine) (*Chooser, error) {
	if err := CheckMode(cfg.Mode); err != nil {
		return nil, fmt.Errorf("provider: %w", err)
	}
	c := &Chooser{mode: cfg.Mode, log: cfg.Logger, m: m}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	var err error
	if c.soft, err = iwarp.New(cfg.Software); err != nil {
		return nil, err
	}
	if c.mode == IWARP {
		return c, nil
	}
	c.hard, c.hardErr = m.verbs(c.log)
	if c.hardErr == nil {
		var l []rdma.DeviceInfo
		if l, c.hardErr = c.hard.Devices(); len(l) > 0 {
			if c.hardErr != nil { // of another device
				c.log.Warn("an RDMA device cannot be used", "err", c.hardErr)
			}
			c.hardErr = m.memlock(cfg.LockedMemory)
		} else if c.hardErr == nil {
			c.hardErr = noDevice()
		}
	}
	if c.hardErr == nil {
		return c, nil
	}
	c.hard = nil
	if c.mode == Verbs {
		return nil, &missingError{c.hardErr}
	}
	if len(kernelDevices()) > 0 {
		c.log.Warn("this machine's RDMA devices are not used, the software NIC does their work", "err", plain(c.hardErr))
	} else {
		c.log.Debug("no RDMA devices", "err", plain(c.hardErr))
	}
	return c, nil
}

// missingError says why devices cannot be used, in words for people: without the sentinels in front.
type missingError struct{ err error }

func (e *missingError) Error() string {
	return "provider verbs: " + plain(e.err) + " (or use the software NIC: --provider iwarp)"
}

func (e *missingError) Unwrap() error { return e.err }

// Name is the mode.
func (c *Chooser) Name() string { return c.mode }

// Software is the software NIC, which exists also when it has nothing to do.
func (c *Chooser) Software() *iwarp.Provider { return c.soft }

// Devices lists what there is to choose from, the software NIC last.
func (c *Chooser) Devices() ([]rdma.DeviceInfo, error) {
	var list []rdma.DeviceInfo
	var err error
	if c.hard != nil {
		list, err = c.hard.Devices()
	}
	if c.mode != Verbs {
		soft, _ := c.soft.Devices()
		list = append(list, soft...)
	}
	return list, err
}

// owner is the device that has the address.
func (c *Chooser) owner(devs []rdma.DeviceInfo, a netip.Addr) (rdma.DeviceInfo, bool) {
	a = a.Unmap().WithZone("")
	for _, d := range devs {
		if slices.ContainsFunc(d.Addrs, func(x netip.Addr) bool { return x.Unmap().WithZone("") == a }) {
			return d, true
		}
	}
	return rdma.DeviceInfo{}, false
}

// hardDevices lists the devices of the machine, as far as they can be used.
func (c *Chooser) hardDevices() []rdma.DeviceInfo {
	if c.hard == nil {
		return nil
	}
	devs, err := c.hard.Devices()
	if err != nil {
		c.log.Warn("an RDMA device cannot be used", "err", err)
	}
	return devs
}

// Dial connects with the provider that the mode names, or with the device that has the local address of the
// route to remote, else with the software NIC.
func (c *Chooser) Dial(ctx context.Context, local netip.Addr, remote netip.AddrPort) (rdma.Conn, error) {
	switch c.mode {
	case IWARP:
		return c.soft.Dial(ctx, local, remote)
	case Verbs:
		if remote.Addr().IsLoopback() {
			return nil, errLoopback(remote)
		}
		conn, err := c.hard.Dial(ctx, local, remote)
		if err != nil {
			err = fmt.Errorf("%w (%s)", err, owned(c.hardDevices()))
		}
		return conn, err
	}
	if c.hard == nil || remote.Addr().IsLoopback() {
		return c.soft.Dial(ctx, local, remote)
	}
	src := local
	if !src.IsValid() || src.IsUnspecified() {
		var err error
		if src, err = c.m.route(remote); err != nil {
			return c.soft.Dial(ctx, local, remote) // says why it cannot be reached
		}
	}
	dev, ok := c.owner(c.hardDevices(), src)
	if !ok {
		return c.soft.Dial(ctx, local, remote)
	}
	conn, err := c.hard.Dial(ctx, local, remote)
	switch {
	case err == nil && dev.Transport != rdma.TransportIWARP:
		return &hinting{Conn: conn, dev: dev}, nil
	case err != nil && errors.Is(err, rdma.ErrNotSupported):
		if !c.said.Swap(true) {
			c.log.Warn("the RDMA device does not reach the target, the software NIC is used", "device", dev.Name, "err", err)
		}
		return c.soft.Dial(ctx, local, remote)
	}
	return conn, err
}

// hinting is a connection that a device was chosen for, whose wire the software NIC does not speak.
type hinting struct {
	rdma.Conn
	dev rdma.DeviceInfo
}

func (h *hinting) Connect(ctx context.Context, p rdma.ConnParam) (rdma.Established, error) {
	est, err := h.Conn.Connect(ctx, p)
	var rejected *rdma.RejectError
	if err != nil && ctx.Err() == nil && !errors.As(err, &rejected) {
		err = fmt.Errorf("%w (tried with %s, which has this machine's address; a target without RDMA hardware is reached with --provider iwarp)", err, h.dev.Name)
	}
	return est, err
}

// An Endpoint is where a target is to listen, and with what.
type Endpoint struct {
	Provider rdma.Provider
	Addr     netip.AddrPort
	// Extra may fail: the target is of use without it.
	Extra bool
}

// Listen listens with the one provider of the mode, or the first of Endpoints.
func (c *Chooser) Listen(addr netip.AddrPort, cfg rdma.ListenConfig) (rdma.Listener, error) {
	l, err := c.Endpoints(addr)
	if err != nil {
		return nil, err
	}
	return l[0].Provider.Listen(l[0].Addr, cfg)
}

// Endpoints says how to listen on an address, in this order; there is at least one. If the port is 0 the first
// one gets a port, and the others are to use it. On a wildcard address with an iWARP device in the machine
// they are the addresses that the machine has now.
func (c *Chooser) Endpoints(addr netip.AddrPort) ([]Endpoint, error) {
	soft := func(a netip.Addr) Endpoint {
		return Endpoint{Provider: c.soft, Addr: netip.AddrPortFrom(a, addr.Port())}
	}
	hard := func(a netip.Addr) Endpoint {
		return Endpoint{Provider: c.hard, Addr: netip.AddrPortFrom(a, addr.Port())}
	}
	extra := func(e Endpoint) Endpoint { e.Extra = true; return e }
	a := addr.Addr()
	switch {
	case c.mode == IWARP:
		return []Endpoint{soft(a)}, nil
	case c.mode == Verbs && a.IsLoopback():
		// The connection manager takes it for a wildcard and would listen on every device.
		return nil, errLoopback(addr)
	case c.mode == Verbs:
		if _, ok := c.owner(c.hardDevices(), a); !ok && !a.IsUnspecified() {
			return nil, fmt.Errorf("listen on %s: no RDMA device has this address (%s), or listen with the software NIC: --provider iwarp", a, owned(c.hardDevices()))
		}
		return []Endpoint{hard(a)}, nil
	case c.hard == nil || a.IsLoopback():
		return []Endpoint{soft(a)}, nil
	}
	devs := c.hardDevices()
	if !a.IsUnspecified() {
		dev, ok := c.owner(devs, a)
		switch {
		case !ok:
			return []Endpoint{soft(a)}, nil
		case dev.Transport == rdma.TransportIWARP:
			return []Endpoint{hard(a)}, nil
		}
		return []Endpoint{hard(a), extra(soft(a))}, nil
	}
	used := slices.ContainsFunc(devs, func(d rdma.DeviceInfo) bool { return len(d.Addrs) > 0 })
	iw := slices.ContainsFunc(devs, func(d rdma.DeviceInfo) bool { return len(d.Addrs) > 0 && d.Transport == rdma.TransportIWARP })
	switch {
	case !used:
		return []Endpoint{soft(a)}, nil
	case !iw:
		return []Endpoint{soft(a), hard(a)}, nil // both follow addresses that come and go
	}
	all, err := c.m.local()
	if err != nil {
		return nil, fmt.Errorf("listen on %s: list this machine's addresses: %w", addr, err)
	}
	var first, rest []Endpoint
	for _, x := range all {
		if a.Is4() && !x.Is4() {
			continue
		}
		switch dev, ok := c.owner(devs, x); {
		case !ok:
			rest = append(rest, soft(x))
		case dev.Transport == rdma.TransportIWARP:
			first = append(first, hard(x))
		default:
			first = append(first, hard(x))
			rest = append(rest, extra(soft(x)))
		}
	}
	list := append(first, rest...)
	if len(list) == 0 {
		return []Endpoint{soft(a)}, nil
	}
	c.log.Info("an iWARP device takes TCP ports itself, so the wildcard address is served as the addresses that there are now", "addr", addr, "addresses", len(list))
	return list, nil
}

func errLoopback(a netip.AddrPort) error {
	return fmt.Errorf("%s: RDMA devices have no loopback address: name an address of a device, as 'devices' lists them, or use the software NIC: --provider iwarp", a)
}

// owned lists the addresses of devices for a message.
func owned(devs []rdma.DeviceInfo) string {
	var s []string
	for _, d := range devs {
		for _, a := range d.Addrs {
			s = append(s, d.Name+" has "+a.String())
		}
	}
	if len(s) == 0 {
		return "none has an IP address"
	}
	if len(s) > 8 {
		s = append(s[:8], "and so on")
	}
	return strings.Join(s, ", ")
}

// route asks the kernel which local address packets to remote would have. Nothing is sent.
func route(remote netip.AddrPort) (netip.Addr, error) {
	u, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(remote))
	if err != nil {
		return netip.Addr{}, err
	}
	defer u.Close()
	a, ok := netip.AddrFromSlice(u.LocalAddr().(*net.UDPAddr).IP)
	if !ok {
		return netip.Addr{}, errors.New("no local address")
	}
	return a.Unmap(), nil
}

// localAddrs lists the addresses that can be listened on, IPv6 link-local ones aside: those need a zone.
func localAddrs() ([]netip.Addr, error) {
	l, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	var list []netip.Addr
	for _, x := range l {
		if n, ok := x.(*net.IPNet); ok {
			if a, ok := netip.AddrFromSlice(n.IP); ok && !a.Unmap().IsLinkLocalUnicast() && !slices.Contains(list, a.Unmap()) {
				list = append(list, a.Unmap())
			}
		}
	}
	slices.SortFunc(list, func(a, b netip.Addr) int { return cmp.Or(cmp.Compare(a.BitLen(), b.BitLen()), a.Compare(b)) })
	return list, nil
}

// Via says what a connection runs on, for people: "iwarp", or "verbs mlx5_0".
func Via(provider, device string) string {
	if provider == IWARP || device == "" {
		return provider
	}
	return provider + " " + device
}
