package initiator

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"rdblk/blockdev"
	"rdblk/internal/histogram"
	"rdblk/internal/worker"
	"rdblk/protocol"
)

// Status is a snapshot of a session, for people and as JSON. Ages and times are of the
// moment it was taken.
type Status struct {
	State  State     `json:"state"`
	Since  time.Time `json:"since"` // of the state
	Addr   string    `json:"addr"`
	SubNQN string    `json:"subnqn"`
	// HostNQN and HostID are what the target knows this attachment by.
	HostNQN string        `json:"hostnqn"`
	HostID  protocol.UUID `json:"hostid"`
	CNTLID  uint16        `json:"cntlid"`  // of the last association
	Granted int           `json:"granted"` // I/O queues of the last association
	// Provider and RDMADevice carry the last association (its admin queue).
	Provider   string `json:"provider"`
	RDMADevice string `json:"rdma_device"`
	Depth      int    `json:"depth"` // of an I/O queue

	Requests int `json:"requests"` // accepted and not answered
	Sent     int `json:"sent"`     // of these: commands are with the target
	Waiting  int `json:"waiting"`  // of these: nothing is
	// OldestRequest is how long the oldest request has been waiting for its answer, 0
	// without one.
	OldestRequest time.Duration `json:"oldest_request_ns"`

	Reconnects     uint64    `json:"reconnects"`      // associations after the first
	FailedAttempts uint64    `json:"failed_attempts"` // to reconnect
	LastError      string    `json:"last_error,omitempty"`
	LastErrorAt    time.Time `json:"last_error_at,omitzero"`
	// Refused: the last attempt was refused in a way that repeating does not change.
	Refused bool `json:"refused,omitempty"`

	Queues     []QueueStatus     `json:"queues"`
	Namespaces []NamespaceStatus `json:"namespaces"` // those with a Device
}

// Live reports whether requests flow.
func (st Status) Live() bool { return st.State == StateLive }

// QueueStatus is the part of one I/O queue.
type QueueStatus struct {
	QID           int           `json:"qid"`
	Provider      string        `json:"provider"` // of its last connection
	RDMADevice    string        `json:"rdma_device"`
	Requests      int           `json:"requests"`
	Sent          int           `json:"sent"`
	OldestRequest time.Duration `json:"oldest_request_ns"`
	BufferMemory  int           `json:"buffer_memory"` // bytes
	BufferInUse   int           `json:"buffer_in_use"` // bytes
}

// NamespaceStatus is the part of one namespace that a Device was made for.
type NamespaceStatus struct {
	NSID       uint32        `json:"nsid"`
	Size       int64         `json:"size"`       // bytes
	BlockSize  int           `json:"block_size"` // bytes
	UUID       protocol.UUID `json:"uuid"`
	ReadOnly   bool          `json:"read_only,omitempty"`
	WriteCache bool          `json:"write_cache"`
	// Unflushed: writes were acknowledged that no Flush has covered since.
	Unflushed bool `json:"unflushed"`
	// Fault is why its requests fail (or wait, while it is not at the target), FlushFault why its flushes do; "" if they do not.
	Fault      string `json:"fault,omitempty"`
	FlushFault string `json:"flush_fault,omitempty"`
}

// SubNQN is the name of the subsystem, also when discovery found it.
func (s *Session) SubNQN() string { return s.subnqn }

// Addr is the target's address, also when discovery found it.
func (s *Session) Addr() netip.AddrPort { return s.addr }

// Status tells what the session is doing. It never waits.
func (s *Session) Status() Status {
	now := nano()
	s.mu.Lock()
	defer s.mu.Unlock()
	st := Status{
		State: s.state, Since: s.since, Addr: s.addr.String(), SubNQN: s.subnqn, HostNQN: s.cfg.HostNQN, HostID: s.cfg.HostID,
		CNTLID: s.cntlid, Granted: s.granted, Provider: s.via.provider, RDMADevice: s.via.device, Depth: s.depth,
		Reconnects: s.reconnects.Load(), FailedAttempts: s.attempts.Load(),
		LastErrorAt: s.lastErrAt, Refused: s.permanent,
	}
	if s.lastErr != nil {
		st.LastError = s.lastErr.Error()
	}
	for _, q := range s.queues {
		n, sent := int(q.count.Load()), int(q.sent.Load())
		qs := QueueStatus{QID: q.i + 1, Requests: n, Sent: min(sent, n), BufferMemory: s.cfg.BufferMemory, BufferInUse: int(q.memUsed.Load())}
		if n := len(s.viaIO); n > 0 {
			v := s.viaIO[q.i%n]
			qs.Provider, qs.RDMADevice = v.provider, v.device
		}
		if at := q.oldest.Load(); at != 0 {
			qs.OldestRequest = max(time.Duration(now-at), 0)
		}
		st.Queues = append(st.Queues, qs)
		st.Requests += n
		st.Sent += qs.Sent
		st.OldestRequest = max(st.OldestRequest, qs.OldestRequest)
	}
	st.Waiting = st.Requests - st.Sent
	for id := range s.namespaces {
		n := s.namespaces[id]
		in := n.geometry().info
		ns := NamespaceStatus{NSID: id, Size: in.Size, BlockSize: in.BlockSize, UUID: in.UUID, ReadOnly: in.ReadOnly, WriteCache: in.WriteCache, Unflushed: n.dirty()}
		if err := n.goneError(); err != nil {
			ns.Fault = err.Error()
		}
		if f := n.fault.Load(); f != nil {
			ns.Fault = (*f).Error()
		}
		if f := n.ruined.Load(); f != nil {
			ns.Fault = (*f).Error()
		}
		if f := n.flushFailed.Load(); f != nil {
			ns.FlushFault = (*f).Error()
		}
		st.Namespaces = append(st.Namespaces, ns)
	}
	slices.SortFunc(st.Namespaces, func(a, b NamespaceStatus) int { return cmp.Compare(a.NSID, b.NSID) })
	return st
}

// Namespaces lists what the last look at the target found, sorted by number.
func (s *Session) Namespaces() []NamespaceInfo {
	s.mu.Lock()
	defer s.mu.Unlock()
	var l []NamespaceInfo
	for id, f := range s.found {
		n := NamespaceInfo{NSID: id}
		if f.d != nil {
			n.UUID, n.NGUID, n.EUI64 = f.d.id.IDs.UUID, f.d.id.IDs.NGUID, f.d.id.IDs.EUI64
		}
		if f.g != nil {
			n.Size, n.BlockSize, n.ReadOnly = f.g.info.Size, f.g.info.BlockSize, f.g.info.ReadOnly
		}
		if f.err != nil {
			n.Problem = f.err.Error()
		}
		l = append(l, n)
	}
	slices.SortFunc(l, func(a, b NamespaceInfo) int { return cmp.Compare(a.NSID, b.NSID) })
	return l
}

// OpStats counts the requests of one operation.
type OpStats struct {
	Answered uint64             `json:"answered"` // failed ones too
	Failed   uint64             `json:"failed"`
	Bytes    uint64             `json:"bytes"`   // of those that did not fail
	Latency  histogram.Snapshot `json:"latency"` // from acceptance to answer, waiting for a reconnect included
}

// Stats are a session's counters since it was made, for metrics.
type Stats struct {
	Ops            [blockdev.NumOps]OpStats `json:"ops"`          // by blockdev.Op
	Resent         uint64                   `json:"resent"`       // requests sent again after a loss
	Retried        uint64                   `json:"retried"`      // requests repeated on the target's word
	Forwarded      uint64                   `json:"forwarded"`    // commands through another worker's connection
	AllocMisses    uint64                   `json:"alloc_misses"` // buffers asked for and not had at once
	Reconnects     uint64                   `json:"reconnects"`
	FailedAttempts uint64                   `json:"failed_attempts"`
	Workers        []worker.Stats           `json:"workers"`
}

// Stats gives the counters. It never waits.
func (s *Session) Stats() Stats {
	st := Stats{Reconnects: s.reconnects.Load(), FailedAttempts: s.attempts.Load()}
	for _, q := range s.queues {
		for op := range st.Ops {
			o, c := &st.Ops[op], &q.ops[op]
			o.Answered += c.answered.Load()
			o.Failed += c.failed.Load()
			o.Bytes += c.bytes.Load()
			o.Latency.Merge(c.latency.Snapshot())
		}
		st.Resent += q.resent.Load()
		st.Retried += q.retried.Load()
		st.Forwarded += q.hopped.Load()
		st.AllocMisses += q.allocMiss.Load()
		st.Workers = append(st.Workers, q.w.Stats())
	}
	return st
}
