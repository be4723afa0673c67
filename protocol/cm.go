package protocol

import (
	"fmt"
	"strconv"
)

// Sizes of the RDMA_CM private data in bytes. InfiniBand and RoCE deliver it
// padded with zeros to the maximum of their message, iWARP as it was sent.
const (
	RDMAConnectRequestSize = 32
	RDMAConnectAcceptSize  = 32
	RDMAConnectRejectSize  = 4
)

// DefaultPort is the port of NVMe over RDMA, for I/O and for discovery.
const DefaultPort = 4420

// DiscoveryPort is the port registered for discovery; over RDMA hosts use
// DefaultPort unless told otherwise.
const DiscoveryPort = 8009

// AdminQueueDepth is the admin queue depth that every target takes; its SQSIZE
// is one less.
const AdminQueueDepth = 32

// RejectStatus is STS of a reject: why a target refused a connection before any
// command. It is an error. It has no Do Not Retry meaning.
type RejectStatus uint16

// Reject statuses (NVMe over Fabrics, "RDMA_CM_REJECT Private Data").
const (
	RejectInvalidLength       RejectStatus = 0x01 // Invalid Private Data Length
	RejectInvalidRECFMT       RejectStatus = 0x02
	RejectInvalidQID          RejectStatus = 0x03
	RejectInvalidHSQSIZE      RejectStatus = 0x04
	RejectInvalidHRQSIZE      RejectStatus = 0x05
	RejectNoResources         RejectStatus = 0x06
	RejectInvalidIRD          RejectStatus = 0x07
	RejectInvalidORD          RejectStatus = 0x08
	RejectInvalidControllerID RejectStatus = 0x0A
)

func (s RejectStatus) String() string {
	switch s {
	case RejectInvalidLength:
		return "invalid private data length"
	case RejectInvalidRECFMT:
		return "invalid RECFMT"
	case RejectInvalidQID:
		return "invalid queue ID"
	case RejectInvalidHSQSIZE:
		return "invalid host SQ size"
	case RejectInvalidHRQSIZE:
		return "invalid host RQ size"
	case RejectNoResources:
		return "no RDMA resources"
	case RejectInvalidIRD:
		return "invalid inbound RDMA read depth"
	case RejectInvalidORD:
		return "invalid outbound RDMA read depth"
	case RejectInvalidControllerID:
		return "invalid controller ID"
	}
	return "RejectStatus(" + strconv.Itoa(int(s)) + ")"
}

// Error returns what String does.
func (s RejectStatus) Error() string { return s.String() }

// RDMAConnectRequest is the 32-byte private data of a host's connect request
// (NVMe over Fabrics, "RDMA_CM_REQUEST Private Data").
type RDMAConnectRequest struct {
	QID uint16 // 0 is the admin queue
	// HRQSIZE is the number of receives the host posts for responses, not 0's
	// based.
	HRQSIZE uint16
	// HSQSIZE is SQSIZE of the Connect that follows, 0's based.
	HSQSIZE uint16
	// CNTLID is the controller of an I/O queue. Most Linux kernels leave it 0:
	// the Connect data counts.
	CNTLID uint16
}

// Depth returns the number of commands the host may have outstanding if it fills
// every slot: HSQSIZE + 1.
func (r *RDMAConnectRequest) Depth() int { return int(r.HSQSIZE) + 1 }

func (r *RDMAConnectRequest) layout(x codec) {
	x.u16(2, &r.QID)
	x.u16(4, &r.HRQSIZE)
	x.u16(6, &r.HSQSIZE)
	x.u16(8, &r.CNTLID)
}

// AppendBinary appends the 32 bytes. The error is always nil.
func (r *RDMAConnectRequest) AppendBinary(b []byte) ([]byte, error) {
	all, part := grow(b, RDMAConnectRequestSize)
	r.layout(codec{part, true})
	return all, nil
}

// UnmarshalBinary parses the private data of a connect request. Bytes after the
// defined fields are ignored. The error is a [RejectStatus] to answer with, and
// is ErrShort or ErrFormat too.
func (r *RDMAConnectRequest) UnmarshalBinary(b []byte) error {
	if err := short("RDMA connect request", b, RDMAConnectRequestSize); err != nil {
		return fmt.Errorf("%w: %w", RejectInvalidLength, err)
	}
	if v := le16(b); v != 0 {
		return fmt.Errorf("RDMA connect request: %w: %w %d", RejectInvalidRECFMT, ErrFormat, v)
	}
	r.layout(codec{b: b})
	return nil
}

// Check returns the sizes a target can refuse by themselves: zero where there
// must be something. nil is fine.
func (r *RDMAConnectRequest) Check() error {
	switch {
	case r.HSQSIZE == 0:
		return RejectInvalidHSQSIZE
	case r.HRQSIZE == 0:
		return RejectInvalidHRQSIZE
	}
	return nil
}

// RDMAConnectAccept is the 32-byte private data of a target's accept. It must
// always be sent: some hosts fail without.
type RDMAConnectAccept struct {
	CRQSIZE uint16 // receives the target posted: HSQSIZE + 1, not 0's based
}

// AppendBinary appends the 32 bytes. The error is always nil.
func (r *RDMAConnectAccept) AppendBinary(b []byte) ([]byte, error) {
	all, part := grow(b, RDMAConnectAcceptSize)
	codec{part, true}.u16(2, &r.CRQSIZE)
	return all, nil
}

// UnmarshalBinary parses the private data of an accept. Four bytes are enough,
// what follows is reserved.
func (r *RDMAConnectAccept) UnmarshalBinary(b []byte) error {
	if err := short("RDMA connect accept", b, 4); err != nil {
		return err
	}
	if v := le16(b); v != 0 {
		return fmt.Errorf("RDMA connect accept: %w %d", ErrFormat, v)
	}
	codec{b: b}.u16(2, &r.CRQSIZE)
	return nil
}

// RDMAConnectReject is the 4-byte private data of a target's reject.
type RDMAConnectReject struct {
	Status RejectStatus
}

// AppendBinary appends the 4 bytes. The error is always nil.
func (r *RDMAConnectReject) AppendBinary(b []byte) ([]byte, error) {
	all, part := grow(b, RDMAConnectRejectSize)
	codec{part, true}.u16(2, (*uint16)(&r.Status))
	return all, nil
}

// UnmarshalBinary parses the private data of a reject; padding is ignored.
func (r *RDMAConnectReject) UnmarshalBinary(b []byte) error {
	if err := short("RDMA connect reject", b, RDMAConnectRejectSize); err != nil {
		return err
	}
	if v := le16(b); v != 0 {
		return fmt.Errorf("RDMA connect reject: %w %d", ErrFormat, v)
	}
	codec{b: b}.u16(2, (*uint16)(&r.Status))
	return nil
}

// ConnectDataSize is the size of the data of a Connect command in bytes.
const ConnectDataSize = 1024

// Offsets in the Connect data, also for [ConnectInvalid].
const (
	connectOffHostID  = 0
	connectOffCNTLID  = 16
	connectOffSUBNQN  = 256
	connectOffHOSTNQN = 512
)

// CNTLIDDynamic asks for any controller in an admin queue's Connect data, and
// marks the dynamic controller model in a discovery log entry.
const CNTLIDDynamic = 0xFFFF

// CNTLIDStatic marks the static controller model in a discovery log entry.
const CNTLIDStatic = 0xFFFE

// MaxCNTLID is the largest controller identifier that may be assigned.
const MaxCNTLID = 0xFFEF

// ConnectData is the 1024-byte data of a Connect command (NVMe over Fabrics,
// "Connect Command - Data").
type ConnectData struct {
	HOSTID  UUID
	CNTLID  uint16 // CNTLIDDynamic on the admin queue
	SUBNQN  string
	HOSTNQN string
}

func (d *ConnectData) layout(x codec) {
	x.bytes(connectOffHostID, d.HOSTID[:])
	x.u16(connectOffCNTLID, &d.CNTLID)
	x.nqn(connectOffSUBNQN, &d.SUBNQN)
	x.nqn(connectOffHOSTNQN, &d.HOSTNQN)
}

// AppendBinary appends the 1024 bytes. It refuses names that are too long or
// hold a NUL, which would arrive as other names.
func (d *ConnectData) AppendBinary(b []byte) ([]byte, error) {
	if err := CheckNQN(d.SUBNQN); err != nil {
		return b, fmt.Errorf("connect data: SUBNQN: %w", err)
	}
	if err := CheckNQN(d.HOSTNQN); err != nil {
		return b, fmt.Errorf("connect data: HOSTNQN: %w", err)
	}
	all, part := grow(b, ConnectDataSize)
	d.layout(codec{part, true})
	return all, nil
}

// UnmarshalBinary parses Connect data. Its only error is ErrShort: the names are
// what stands before the first NUL, at most 256 bytes, and not judged. Ask
// [ConnectData.Check].
func (d *ConnectData) UnmarshalBinary(b []byte) error {
	if err := short("connect data", b, ConnectDataSize); err != nil {
		return err
	}
	d.layout(codec{b: b})
	return nil
}

// Check judges the names. If one cannot be used it returns the field for DW0 of
// the completion, [StatusConnectInvalidParameters], and why; else a nil error.
func (d *ConnectData) Check() (ConnectInvalid, error) {
	if err := CheckNQN(d.SUBNQN); err != nil {
		return ConnectInvalidSUBNQN, err
	}
	if err := CheckNQN(d.HOSTNQN); err != nil {
		return ConnectInvalidHOSTNQN, err
	}
	return 0, nil
}
