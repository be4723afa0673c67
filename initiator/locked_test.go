package initiator

import (
	"testing"

	"rdblk/internal/worker"
	"rdblk/protocol"
	"rdblk/rdma"
	"rdblk/rdma/iwarp"
)

// pinning counts what is registered at a time.
type pinning struct {
	rdma.PD
	bytes *int
}

func (p *pinning) Register(mem []byte, a rdma.Access) (rdma.MR, error) {
	*p.bytes += len(mem)
	return p.PD.Register(mem, a)
}

// What is said beforehand to be pinned is what the queues register.
func TestLockedMemoryIsWhatIsRegistered(t *testing.T) {
	nic, err := iwarp.New(iwarp.Config{})
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{Provider: nic, Queues: 3, BufferMemory: 3 << 20, Depth: 33}.withDefaults()
	s := &Session{cfg: cfg, log: cfg.Logger}
	if err := s.makeQueues(cfg.Queues); err != nil {
		t.Fatal(err)
	}
	defer s.dropQueues()
	admin, err := newAdminSide()
	if err != nil {
		t.Fatal(err)
	}
	defer admin.close()
	total := 0
	lane := func(depth int, regions ...region) {
		pd, err := nic.Device().AllocPD()
		if err != nil {
			t.Fatal(err)
		}
		l := &lane{cfg: laneConfig{regions: regions, numRegion: 6, log: cfg.Logger}, w: (*worker.Worker)(nil), pd: &pinning{pd, &total}}
		defer l.release()
		if err := l.register(depth); err != nil {
			t.Fatal(err)
		}
	}
	for _, q := range s.queues {
		lane(cfg.Depth, q.data, q.aux)
	}
	io := total
	lane(protocol.AdminQueueDepth, admin.region)
	if said := cfg.LockedMemory(); said != uint64(total) {
		t.Errorf("session: %d bytes are said to be pinned, %d are", said, total)
	}
	if said := (DiscoverConfig{}).LockedMemory(); said != uint64(total-io) {
		t.Errorf("discovery: %d bytes are said to be pinned, %d are", said, total-io)
	}
}
