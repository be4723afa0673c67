//go:build !cgo || !linux || noverbs

package verbs

import (
	"context"
	"fmt"
	"net/netip"

	"rdblk/rdma"
)

// Provider is never made by this build.
type Provider struct{}

var _ rdma.Provider = (*Provider)(nil)

var errBuild = fmt.Errorf("%w: this program was built without RDMA hardware support; build it on Linux with cgo and without the tag noverbs, and %s", rdma.ErrNotSupported, installHint)

// New returns an error that is rdma.ErrNotSupported.
func New(Config) (*Provider, error) { return nil, errBuild }

// Name returns "verbs".
func (*Provider) Name() string { return providerName }

// Devices returns an error that is rdma.ErrNotSupported.
func (*Provider) Devices() ([]rdma.DeviceInfo, error) { return nil, errBuild }

// Listen returns an error that is rdma.ErrNotSupported.
func (*Provider) Listen(netip.AddrPort, rdma.ListenConfig) (rdma.Listener, error) {
	return nil, errBuild
}

// Dial returns an error that is rdma.ErrNotSupported.
func (*Provider) Dial(context.Context, netip.Addr, netip.AddrPort) (rdma.Conn, error) {
	return nil, errBuild
}
