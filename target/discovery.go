package target

import (
	"net/netip"
	"strconv"

	"rdblk/protocol"
)

// The discovery subsystem answers every host, with the entries that this host may
// use. The page is computed for each command; it is the same for one generation
// and one host, so a host may read it in pieces.

// discoveryChanged moves the generation on and tells every discovery controller.
// Target.mu is held.
func (t *Target) discoveryChanged() { t.discoveryChangedFor(func(string) bool { return true }) }

// discoveryChangedFor tells those whose host is affected. Target.mu is held.
func (t *Target) discoveryChangedFor(affected func(hostNQN string) bool) {
	t.generation.Add(1)
	t.trace.Event(protocol.EventDiscoveryChanged.String(), 0)
	for _, c := range t.discovery.controllers {
		if affected(c.hostNQN) {
			c.mu.Lock()
			c.raise(eventDiscovery)
			c.mu.Unlock()
		}
	}
}

// discoveryLog is the page for this controller's host.
func (c *controller) discoveryLog() []byte {
	t := c.t
	t.mu.Lock()
	defer t.mu.Unlock()
	var entries []byte
	n := uint64(0)
	type where struct {
		nqn  string
		addr netip.AddrPort
	}
	listed := map[where]bool{} // two providers may listen at one address
	add := func(ln *listener, nqn string, kind protocol.SubsystemType, flags uint16) {
		addr, ok := ln.advertise(c.admin)
		if !ok || listed[where{nqn, addr}] {
			return
		}
		listed[where{nqn, addr}] = true
		e := protocol.DiscoveryLogEntry{
			TRTYPE: protocol.TransportRDMA, ADRFAM: protocol.FamilyIPv4, SUBTYPE: kind,
			TREQ:   protocol.TREQDisableSQFlow, // and nothing about secure channels: nvme-cli does not know the sum
			PORTID: ln.port, CNTLID: protocol.CNTLIDDynamic, ASQSZ: minAdminDepth, EFLAGS: flags,
			TRSVCID: strconv.Itoa(int(addr.Port())), SUBNQN: nqn, TRADDR: addr.Addr().String(),
			RDMA_QPTYPE: protocol.RDMAQPConnected, RDMA_PRTYPE: protocol.RDMAProviderAny, RDMA_CMS: protocol.RDMACMSRdmaCM,
		}
		if addr.Addr().Is6() {
			e.ADRFAM = protocol.FamilyIPv6
		}
		if b, err := e.AppendBinary(entries); err == nil {
			entries = b
			n++
		}
	}
	allowed := t.hosts.Load().allows(c.hostNQN)
	for _, ln := range t.listeners {
		if ln == c.admin.ln {
			add(ln, t.discovery.nqn, protocol.SubsystemDiscovery, protocol.EFLAGSPersistent)
		}
		if allowed {
			add(ln, t.sub.nqn, protocol.SubsystemNVM, 0)
		}
	}
	h := protocol.DiscoveryLogHeader{GENCTR: t.generation.Load(), NUMREC: n}
	b, _ := h.AppendBinary(nil)
	return append(b, entries...)
}

// advertise is the address under which the host of q reaches the listener: its own
// if it has one; of a wildcard listener the address that the host used, if that is
// of the listener's family.
func (ln *listener) advertise(q *queue) (netip.AddrPort, bool) {
	a := ln.addr.Addr()
	if !a.IsUnspecified() {
		return netip.AddrPortFrom(a.Unmap().WithZone(""), ln.addr.Port()), true
	}
	used := q.local.Addr().Unmap().WithZone("")
	if a.Is4() && !used.Is4() || used.IsUnspecified() || !used.IsValid() {
		return netip.AddrPort{}, false
	}
	return netip.AddrPortFrom(used, ln.addr.Port()), true
}
