package target

import (
	"sync/atomic"

	"rdblk/protocol"
)

// subsystem is what a host connects to by its NQN: the one with the namespaces,
// or the discovery subsystem.
type subsystem struct {
	nqn       string
	discovery bool

	ns atomic.Pointer[nsTable] // replaced as a whole under Target.mu

	// Target.mu.
	controllers map[uint16]*controller
	lastID      uint16
}

func newSubsystem(nqn string, discovery bool) *subsystem {
	s := &subsystem{nqn: nqn, discovery: discovery, controllers: map[uint16]*controller{}}
	s.ns.Store(&nsTable{})
	return s
}

// nsTable has namespace n at index n-1; nil where there is none.
type nsTable []*namespace

func (t nsTable) get(nsid uint32) *namespace {
	if nsid-1 < uint32(len(t)) { // 0 wraps around
		return t[nsid-1]
	}
	return nil
}

// with returns a copy of t in which ns has the identifier.
func (t nsTable) with(nsid uint32, ns *namespace) nsTable {
	n := make(nsTable, max(len(t), int(nsid)))
	copy(n, t)
	n[nsid-1] = ns
	return n
}

// disk is what an identifier stood for to a host: which one, how blocks are counted on it,
// and how often it had lost writes when it was added. If that last number is another one
// than before, a host that had written to it must not flush it as if nothing had happened: it
// learns of the loss when it connects again.
type disk struct {
	uuid   protocol.UUID
	shift  uint8
	losses uint64
}

func (ns *namespace) disk() disk { return disk{ns.uuid, ns.shift, ns.losses} }

// added lets the host see a namespace, unless it knew another disk under that identifier,
// and reports whether it does. all is the subsystem's table with it. Target.mu is held.
func (c *controller) added(ns *namespace, all *nsTable) bool {
	if was, ok := c.knew[ns.id]; ok && was != ns.disk() {
		c.hidden++
		return false
	}
	c.see(ns.id, ns, all)
	return true
}

// removed is the opposite. It reports whether the host saw the namespace. Target.mu is held.
func (c *controller) removed(ns *namespace, all *nsTable) bool {
	if c.ns.Load().get(ns.id) != ns {
		c.hidden--
		return false
	}
	if c.knew == nil {
		c.knew = map[uint32]disk{}
	}
	c.knew[ns.id] = ns.disk()
	c.see(ns.id, nil, all)
	return true
}

func (c *controller) see(nsid uint32, ns *namespace, all *nsTable) {
	if c.hidden > 0 {
		own := c.ns.Load().with(nsid, ns)
		all = &own
	}
	c.ns.Store(all)
}

const maxCNTLID = protocol.MaxCNTLID

// newID takes the next controller identifier that is free. Going round keeps a
// late I/O Connect of an old association from meeting a new one. Target.mu is held.
func (s *subsystem) newID() (uint16, bool) {
	id := s.lastID
	for range maxCNTLID {
		if id++; id > maxCNTLID {
			id = 1
		}
		if s.controllers[id] == nil {
			s.lastID = id
			return id, true
		}
	}
	return 0, false
}
