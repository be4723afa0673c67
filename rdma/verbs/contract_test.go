//go:build cgo && linux && !noverbs

package verbs

import (
	"errors"
	"net/netip"
	"os"
	"testing"

	"rdblk/rdma"
	"rdblk/rdma/rdmatest"
)

// TestContract needs an RDMA device with an IP address: RDBLK_VERBS_ADDR names the address.
func TestContract(t *testing.T) {
	s := os.Getenv("RDBLK_VERBS_ADDR")
	if s == "" {
		t.Skip("RDBLK_VERBS_ADDR is not set; test/vm/guest/verbs.sh runs this on software devices")
	}
	rdmatest.Run(t, func(t testing.TB) rdma.Provider {
		p, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}, rdmatest.WithAddr(netip.MustParseAddr(s)), rdmatest.Except(exceptions(t)))
}

// exceptions are what the kernel's software devices do not keep; each is shown when the test runs.
func exceptions(t *testing.T) map[string]string {
	p, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	l, err := p.Devices()
	if err != nil || len(l) == 0 {
		t.Fatalf("devices: %v, %d of them", err, len(l))
	}
	t.Logf("%+v", l)
	switch {
	case p.lib.rxe[l[0].Name]:
		const bounds = "rxe checks an access through a window against the bounds of the memory region, not of the window"
		return map[string]string{
			"WindowRights/Write one byte over the end":     bounds,
			"WindowRights/Write one byte before the start": bounds,
			"WindowRights/Read over the end":               bounds,
			"SendInvalidateForeign":                        "rxe lets a peer invalidate windows of other connections (rxe_check_invalidate_mw does not look at the queue pair)",
		}
	case l[0].Transport == rdma.TransportIWARP:
		return map[string]string{
			"ReadWithoutDepth": "siw reports its own ORD to the connecting side, not what the peer serves",
			"Depths":           "siw reports its own ORD to the connecting side, not what the peer serves",
			"EndReasons":       "siw ends a connection for an unknown key or a missing receive without an asynchronous event",
			"RemoteKeysRead":   "siw flushes a Read that the peer refused, and does not say why",
		}
	}
	return nil
}

// Without libraries, modules or devices the provider says so, and what to do.
func TestNewSaysWhatIsMissing(t *testing.T) {
	p, err := New(Config{})
	if err != nil {
		if !errors.Is(err, rdma.ErrNotSupported) || len(err.Error()) < 40 {
			t.Fatalf("%v", err)
		}
		return
	}
	if _, err := p.Devices(); err != nil {
		t.Logf("devices: %v", err)
	}
}
