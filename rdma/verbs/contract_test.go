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
	case p.lib.known[l[0].Name].vendor == rxeVendor:
		const bounds = "rxe checks an access through a window against the bounds of the memory region, not of the window (check_rkey)"
		return map[string]string{
			"WindowRights/Write one byte over the end":             bounds,
			"WindowRights/Write one byte before the start":         bounds,
			"WindowRights/Read over the end":                       bounds,
			"SendInvalidateForeign/a window of another connection": "rxe lets a peer invalidate windows of other connections (rxe_check_invalidate_mw does not look at the queue pair)",
		}
	case l[0].Transport == rdma.TransportIWARP:
		const depth = "siw serves as many Reads as the connecting side asks for, whatever Accept allows (siw_accept, relaxed_ird_negotiation)"
		return map[string]string{
			"ReadWithoutDepth":             depth,
			"Depths/lowered":               depth,
			"EndReasons":                   "siw ends a connection for an unknown key or a missing receive without an asynchronous event (siw_proc_write, siw_proc_send), and for a received Terminate too (siw_proc_terminate)",
			"RemoteKeysRead/right missing": "siw does not look at the right to read (siw_qp_sq_proc_tx: siw_check_sgl_tx with no rights)",
			"RandomTraffic/both wait":      "siw serves no Reads while its send queue waits for Reads of its own, because of a fence or for want of depth, so that two sides can wait for each other (siw_init_rresp, siw_check_tx_fence; TestReadsWaitForEachOther)",
			"RandomTraffic/empty Reads":    "siw answers an empty Read that had to wait with as many bytes as it has sent before (siw_activate_tx; TestEmptyReadBehindWrite)",
			"RemoteKeysRead/status":        "siw flushes a Read that the peer refused, and does not say why (siw_proc_terminate)",
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
