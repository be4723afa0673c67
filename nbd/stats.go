package nbd

import (
	"sync/atomic"
	"time"

	"rdblk/internal/histogram"
)

// Op names what requests are counted as.
type Op uint8

// Operations. OpOther is what is no valid command.
const (
	OpRead Op = iota
	OpWrite
	OpFlush
	OpTrim
	OpWriteZeroes
	OpOther
	NumOps
)

func (o Op) String() string {
	switch o {
	case OpRead:
		return "read"
	case OpWrite:
		return "write"
	case OpFlush:
		return "flush"
	case OpTrim:
		return "trim"
	case OpWriteZeroes:
		return "write_zeroes"
	}
	return "other"
}

func (c command) op() Op {
	switch c {
	case cmdRead:
		return OpRead
	case cmdWrite:
		return OpWrite
	case cmdFlush:
		return OpFlush
	case cmdTrim:
		return OpTrim
	case cmdWriteZeroes:
		return OpWriteZeroes
	}
	return OpOther
}

// OpStats count one operation on one export since the server was made.
type OpStats struct {
	Count  uint64 `json:"count"`  // requests answered
	Errors uint64 `json:"errors"` // of those: with an error
	Bytes  uint64 `json:"bytes"`  // of successful requests: data moved, trimmed or zeroed
	// Latency is the time from the request's header to its reply being in the socket, of
	// successful requests; for writes it has the time that the payload took to arrive.
	Latency histogram.Snapshot `json:"latency"`
}

// ExportStats are the counters of an export.
type ExportStats struct {
	Name        string          `json:"name"`
	Connections int             `json:"connections"`  // in transmission now
	Connected   uint64          `json:"connected"`    // ever
	InFlight    int64           `json:"in_flight"`    // requests with the device now
	BufferWaits uint64          `json:"buffer_waits"` // requests that found no buffer
	Evacuations uint64          `json:"evacuations"`  // requests whose data was moved out of shared memory because the client stood still
	Stalls      uint64          `json:"stalls"`       // connections ended by StallTimeout
	SpillCuts   uint64          `json:"spill_cuts"`   // connections ended because SpillMemory was used up
	Ops         [NumOps]OpStats `json:"ops"`          // by Op
}

// Stats are a server's counters.
type Stats struct {
	Handshakes        int           `json:"handshakes"`         // connections in the handshake now
	HandshakesFailed  uint64        `json:"handshakes_failed"`  // ended by a violation, the deadline or a hang-up
	HandshakesEvicted uint64        `json:"handshakes_evicted"` // ended to make room for newer ones
	Refused           uint64        `json:"refused"`            // for Config.MaxConnections
	SpillBytes        int64         `json:"spill_bytes"`        // of Config.SpillMemory in use now
	Exports           []ExportStats `json:"exports"`
}

// ConnStatus describes one connection.
type ConnStatus struct {
	ID     uint64    `json:"id"`
	Peer   string    `json:"peer"`
	Export string    `json:"export"` // empty during the handshake
	Queue  int       `json:"queue"`  // of the device
	Since  time.Time `json:"since"`
	// State is "handshake", or what the reader does: "open", or it waits for a reply to leave
	// ("paused: requests", "paused: bytes"), for memory ("paused: memory"), or reads no more ("closing").
	State    string `json:"state"`
	Blocked  bool   `json:"blocked"`   // replies wait for the client to read
	InFlight int    `json:"in_flight"` // requests with the device
	Requests int    `json:"requests"`  // requests held, from header to reply in the socket
	Bytes    int64  `json:"bytes"`     // buffer memory held
	Answered uint64 `json:"answered"`  // requests so far
}

// counter is written by one goroutine and read by any.
type counter struct{ v atomic.Uint64 }

func (c *counter) add(n uint64) { c.v.Store(c.v.Load() + n) }

type opCounters struct {
	count, errors, bytes counter
	latency              histogram.Histogram
}

// domainCounters are written by the domain's worker.
type domainCounters struct {
	ops         [NumOps]opCounters
	bufferWaits counter
	evacuations counter
	stalls      counter
	spillCuts   counter
	inFlight    atomic.Int64
}

func (d *domainCounters) addTo(s *ExportStats) {
	s.InFlight += d.inFlight.Load()
	s.BufferWaits += d.bufferWaits.v.Load()
	s.Evacuations += d.evacuations.v.Load()
	s.Stalls += d.stalls.v.Load()
	s.SpillCuts += d.spillCuts.v.Load()
	for i := range d.ops {
		o, t := &d.ops[i], &s.Ops[i]
		t.Count += o.count.v.Load()
		t.Errors += o.errors.v.Load()
		t.Bytes += o.bytes.v.Load()
		t.Latency.Merge(o.latency.Snapshot())
	}
}
