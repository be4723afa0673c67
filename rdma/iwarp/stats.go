package iwarp

import (
	"fmt"
	"net/netip"
	"sort"
	"sync/atomic"
)

// QPStats are the counters of a QP, or of all QPs of the device.
type QPStats struct {
	RxFPDUs, TxFPDUs   uint64
	RxBytes, TxBytes   uint64 // on the TCP stream
	RecvCalls          uint64 // receive system calls that brought something
	RecvEmpty          uint64 // and those that did not
	SendCalls          uint64 // send system calls
	SendBlocked        uint64 // times the socket took less than was offered
	DirectBytes        uint64 // received straight into registered memory
	ReadsServed        uint64
	ReadStalls         uint64 // times the send queue waited for a read slot or a fence
	CRCErrors          uint64
	Sends, Writes      uint64 // messages sent
	Reads, Receives    uint64 // Reads issued, messages received
	Binds, Invalidates uint64
}

func (s *QPStats) add(o QPStats) {
	s.RxFPDUs += o.RxFPDUs
	s.TxFPDUs += o.TxFPDUs
	s.RxBytes += o.RxBytes
	s.TxBytes += o.TxBytes
	s.RecvCalls += o.RecvCalls
	s.RecvEmpty += o.RecvEmpty
	s.SendCalls += o.SendCalls
	s.SendBlocked += o.SendBlocked
	s.DirectBytes += o.DirectBytes
	s.ReadsServed += o.ReadsServed
	s.ReadStalls += o.ReadStalls
	s.CRCErrors += o.CRCErrors
	s.Sends += o.Sends
	s.Writes += o.Writes
	s.Reads += o.Reads
	s.Receives += o.Receives
	s.Binds += o.Binds
	s.Invalidates += o.Invalidates
}

// Stats are the counters of the software NIC.
type Stats struct {
	// Open objects.
	QPs, CQs, PDs, MRs, MWs int
	// Data path, summed over QPs that are open or were. The owner of a QP
	// publishes its counters when it arms its CQ, and now and then.
	QPStats
	// Connection manager.
	Accepted          uint64 // TCP connections accepted
	Requests          uint64 // with a valid MPA Request
	Established       uint64 // as either side
	Rejected          uint64 // Requests refused by the application or the provider
	PendingRefused    uint64 // closed because too many were pending
	HandshakeTimeouts uint64 // no whole Request or Reply in time
	HandshakeFailures uint64 // not MPA, or broken MPA
	// Lingering is the number of sockets being drained after their end.
	Lingering int
	// Terminates by code.
	Terminates []TerminateCount
}

// TerminateCount counts Terminate messages of one kind.
type TerminateCount struct {
	Sent              bool
	Layer, Type, Code uint8
	Count             uint64
}

func (c TerminateCount) String() string {
	dir := "received"
	if c.Sent {
		dir = "sent"
	}
	return fmt.Sprintf("%s %s: %d", dir, termText(c.Layer, c.Type, c.Code), c.Count)
}

type termKey struct {
	sent              bool
	layer, etype, cod uint8
}

type cmCounters struct {
	accepted, requests, established, rejected, pendingRefused, timeouts, failures atomic.Uint64
}

func (d *device) countTerminate(e *TerminateError, peer netip.AddrPort) {
	d.warn("iwarp: connection ended by a Terminate message", "peer", peer, "err", e.Error())
	d.mu.Lock()
	d.terms[termKey{e.Sent, e.Layer, e.Type, e.Code}]++
	d.mu.Unlock()
}

// Stats may be called from any goroutine.
func (p *Provider) Stats() Stats {
	d := p.dev
	s := Stats{
		Accepted: d.cm.accepted.Load(), Requests: d.cm.requests.Load(), Established: d.cm.established.Load(),
		Rejected: d.cm.rejected.Load(), PendingRefused: d.cm.pendingRefused.Load(),
		HandshakeTimeouts: d.cm.timeouts.Load(), HandshakeFailures: d.cm.failures.Load(),
		Lingering: len(d.lingering),
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	s.QPs, s.CQs, s.PDs, s.MRs, s.MWs = len(d.qps), len(d.cqs), d.pds, d.mrs, d.mws
	s.QPStats = d.closedQP
	for _, q := range d.qps {
		s.QPStats.add(q.Stats())
	}
	for k, n := range d.terms {
		s.Terminates = append(s.Terminates, TerminateCount{k.sent, k.layer, k.etype, k.cod, n})
	}
	sort.Slice(s.Terminates, func(i, j int) bool {
		a, b := s.Terminates[i], s.Terminates[j]
		if a.Sent != b.Sent {
			return a.Sent
		}
		return uint32(a.Layer)<<16|uint32(a.Type)<<8|uint32(a.Code) < uint32(b.Layer)<<16|uint32(b.Type)<<8|uint32(b.Code)
	})
	return s
}
