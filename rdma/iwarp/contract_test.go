package iwarp

import (
	"testing"
	"time"

	"rdblk/rdma"
	"rdblk/rdma/rdmatest"
)

func TestContract(t *testing.T) {
	for _, c := range []struct {
		name string
		cfg  Config
	}{
		{"plain", Config{}},
		{"CRC", Config{CRC: CRCOn}},
		{"siw care", Config{CRC: CRCOn, PlainFlags: true}},
		{"small FPDUs", Config{MaxFPDU: 256}},
		{"peer to peer", Config{PeerToPeer: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			rdmatest.Run(t, func(t testing.TB) rdma.Provider {
				c.cfg.UserTimeout = time.Minute // one test stops a peer, and machines are slow
				p, err := New(c.cfg)
				if err != nil {
					t.Fatal(err)
				}
				return p
			})
		})
	}
}
