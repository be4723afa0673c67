package target

import (
	"strings"
	"sync/atomic"

	"rdblk/blockdev"
	"rdblk/internal/histogram"
	"rdblk/internal/worker"
	"rdblk/protocol"
)

// targetStats are counters of rare things, from any goroutine.
type targetStats struct {
	connections       atomic.Uint64
	acceptFailed      atomic.Uint64
	connectRefused    atomic.Uint64
	keepAliveTimeouts atomic.Uint64
	fenced            atomic.Uint64
	events            atomic.Uint64
	rejects           [16]atomic.Uint64 // by RejectStatus
}

func (s *targetStats) reject(st protocol.RejectStatus) { s.rejects[int(st)&15].Add(1) }

// Stats are a target's counters since its start and its gauges. Bytes and counts
// of operations are those of finished commands.
type Stats struct {
	Connections       uint64            // RDMA connection requests
	Rejected          map[string]uint64 // of those, refused, by reason
	AcceptFailed      uint64            // of those, not established
	ConnectRefused    uint64            // Connect commands refused
	KeepAliveTimeouts uint64            // associations ended by their keep-alive timer
	Fenced            uint64            // associations replaced by the return of their host
	Events            uint64            // asynchronous events delivered

	Controllers, DiscoveryControllers int // that exist
	Queues                            int // connections that exist
	Pending                           int // of those, without a Connect command
	// Devices counts the connections by RDMA device.
	Devices []DeviceStats

	Namespaces []NamespaceStats
	Workers    []WorkerStats // the admin worker last
}

// DeviceStats are those of an RDMA device that has connections.
type DeviceStats struct {
	Provider, Device string
	Queues           int
}

// NamespaceStats are the counters of one namespace. They end with it.
type NamespaceStats struct {
	NSID     uint32
	Name     string // of the device
	Size     int64  // bytes
	Ops      [NumOps]OpStats
	Executor blockdev.ExecutorStats
	Queues   blockdev.QueueStats
}

// NumOps is the number of operations that are told apart, see OpName.
const NumOps = int(numOps)

// OpName is the name of operation i of NamespaceStats: "read", "write", "flush",
// "write_zeroes", "discard", "compare", "verify".
func OpName(i int) string { return op(i).String() }

// OpStats count the commands of one operation. Latency is from the capsule's
// arrival to the response being handed to the device.
type OpStats struct {
	Ops     uint64 // finished, with success or not
	Errors  uint64 // of those, not with success
	FUA     uint64 // of those with success, with Force Unit Access
	Bytes   uint64 // of those with success
	Latency histogram.Snapshot
}

// WorkerStats are those of one worker.
type WorkerStats struct {
	Name   string
	Queues int // assigned
	Loop   worker.Stats

	BufferSize, BufferInUse, BufferPeak int64 // bytes
	WaitingBuffer                       int64 // requests that wait for a buffer now

	WaitBuffer  uint64 // requests that had to wait for a buffer,
	WaitRead    uint64 // for a read credit or room to read,
	WaitSend    uint64 // for room to answer,
	WaitContext uint64 // for a request context

	Commands, Responses uint64
	ReadBytes           uint64 // fetched from hosts by RDMA Read
	WriteBytes          uint64 // delivered to hosts by RDMA Write
	InCapsuleBytes      uint64
	SendInvalidate      uint64 // responses that closed a key of the host
}

// Stats takes a snapshot. It does not disturb the workers.
func (t *Target) Stats() Stats {
	s := Stats{
		Connections: t.stats.connections.Load(), AcceptFailed: t.stats.acceptFailed.Load(),
		ConnectRefused: t.stats.connectRefused.Load(), KeepAliveTimeouts: t.stats.keepAliveTimeouts.Load(),
		Fenced: t.stats.fenced.Load(), Events: t.stats.events.Load(), Rejected: map[string]uint64{},
	}
	for i := range t.stats.rejects {
		// Reasons that the protocol has are there from the start.
		name, n := protocol.RejectStatus(i).String(), t.stats.rejects[i].Load()
		if n > 0 || !strings.HasPrefix(name, "RejectStatus(") {
			s.Rejected[name] = n
		}
	}
	t.mu.Lock()
	s.Controllers, s.DiscoveryControllers = len(t.sub.controllers), len(t.discovery.controllers)
	s.Queues, s.Pending = t.connections, t.halfOpen
	devs := map[DeviceStats]int{}
	for q := range t.queues {
		devs[DeviceStats{Provider: q.dev.info.Provider, Device: q.dev.info.Name}]++
	}
	t.mu.Unlock()
	for d, n := range devs {
		d.Queues = n
		s.Devices = append(s.Devices, d)
	}
	for _, ns := range *t.sub.ns.Load() {
		if ns != nil {
			s.Namespaces = append(s.Namespaces, ns.snapshot())
		}
	}
	for _, l := range t.lanes {
		s.Workers = append(s.Workers, l.snapshot())
	}
	s.Workers = append(s.Workers, t.admin.snapshot())
	return s
}

func (ns *namespace) snapshot() NamespaceStats {
	s := NamespaceStats{NSID: ns.id, Name: ns.info.Name, Size: ns.size.Load(), Executor: ns.exec.Stats()}
	for i := range ns.lanes {
		nl := &ns.lanes[i]
		for o := range nl.stats {
			from, to := &nl.stats[o], &s.Ops[o]
			to.Ops += from.ops.Load()
			to.Errors += from.errors.Load()
			to.FUA += from.fua.Load()
			to.Bytes += from.bytes.Load()
			to.Latency.Merge(from.latency.Snapshot())
		}
		q := blockdev.StatsOf(nl.q)
		s.Queues.Inline += q.Inline
		s.Queues.Executed += q.Executed
		s.Queues.WouldBlock += q.WouldBlock
	}
	return s
}

func (l *lane) snapshot() WorkerStats {
	st := &l.stats
	return WorkerStats{
		Name: l.w.Name(), Queues: int(l.load.Load()), Loop: l.w.Stats(),
		BufferSize: int64(l.size) + l.private.Load(), BufferInUse: st.inUse.Load(), BufferPeak: st.peak.Load(),
		WaitingBuffer: st.waitingNow.Load(),
		WaitBuffer:    st.waitBuffer.Load(), WaitRead: st.waitRead.Load(), WaitSend: st.waitSend.Load(), WaitContext: st.waitContext.Load(),
		Commands: st.commands.Load(), Responses: st.responses.Load(),
		ReadBytes: st.readBytes.Load(), WriteBytes: st.writeBytes.Load(), InCapsuleBytes: st.inCapsule.Load(),
		SendInvalidate: st.sendInv.Load(),
	}
}
