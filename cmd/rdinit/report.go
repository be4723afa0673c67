package main

import (
	"fmt"
	"strings"
	"time"

	"rdblk/initiator"
	"rdblk/internal/config"
)

// A report is the state of one attachment: the answer at its control socket, at
// /status of its HTTP endpoint, and an element of what "rdinit status -o json" and
// "rdinit list -o json" print. Fields are added, never renamed or removed.
type report struct {
	Name      string    `json:"name"`
	PID       int       `json:"pid"`
	Version   string    `json:"version"`
	StartedAt time.Time `json:"started_at"`

	// State is the session's: live (connected), reconnecting, or lost (reconnecting for
	// longer than the loss timeout: requests fail); and detaching.
	State string `json:"state"`
	// LastError is why the connection was lost or could not be made again; empty when live.
	LastError string `json:"last_error,omitempty"`

	NQN     string `json:"nqn"`
	NSID    uint32 `json:"nsid"`
	Address string `json:"address"`
	// Provider and RDMADevice carry the connection: iwarp is the software NIC, verbs a device.
	Provider   string `json:"provider"`
	RDMADevice string `json:"rdma_device"`
	HostNQN    string `json:"host_nqn"`

	Size      int64 `json:"size"`       // bytes
	BlockSize int   `json:"block_size"` // bytes
	ReadOnly  bool  `json:"read_only"`

	Device string `json:"device"` // /dev/nbdN; empty with a socket
	Socket string `json:"socket"` // path of the NBD socket; empty with a device
	URI    string `json:"uri"`    // for NBD clients; empty with a device

	Queues int `json:"queues"`
	Depth  int `json:"depth"`
	// Clients are the NBD connections. Requests have been accepted and not answered; of
	// these InFlight are with the target, Waiting are not (it is away, or has enough to do).
	Clients        int    `json:"clients"`
	Requests       int    `json:"requests"`
	InFlight       int    `json:"in_flight"`
	Waiting        int    `json:"waiting"`
	Reconnects     uint64 `json:"reconnects"`      // successful ones
	FailedAttempts uint64 `json:"failed_attempts"` // to reconnect

	// Namespaces are those that the subsystem has for this host, the attached one too, as the
	// target told last.
	Namespaces []initiator.NamespaceInfo `json:"namespaces"`

	// Unflushed: something was written that no flush has made durable yet. Fault is why all
	// requests fail (or wait, for a namespace that the target has no more), FlushFault why all
	// flushes fail; absent if they do not.
	Unflushed  bool   `json:"unflushed"`
	Fault      string `json:"fault,omitempty"`
	FlushFault string `json:"flush_fault,omitempty"`

	ReadOps      uint64 `json:"read_ops"`
	WriteOps     uint64 `json:"write_ops"`
	FlushOps     uint64 `json:"flush_ops"`
	ReadBytes    uint64 `json:"read_bytes"`
	WrittenBytes uint64 `json:"written_bytes"`
	Errors       uint64 `json:"errors"`
}

// shortState is the state in one word for a list: a connection that is up is not all.
func (r *report) shortState() string {
	switch {
	case r.Fault != "":
		return r.State + "/fault"
	case r.FlushFault != "":
		return r.State + "/flush-fault"
	}
	return r.State
}

// otherNamespaces lists the namespaces of the subsystem that are not the attached one.
func (r *report) otherNamespaces() string {
	var l []string
	for _, n := range r.Namespaces {
		if n.NSID != r.NSID {
			l = append(l, fmt.Sprintf("%d (%s)", n.NSID, config.FormatSize(n.Size)))
		}
	}
	const show = 8
	if len(l) > show {
		l = append(l[:show], fmt.Sprintf("and %d more", len(l)-show))
	}
	return strings.Join(l, ", ")
}
