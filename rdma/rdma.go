package rdma

import (
	"context"
	"net/netip"
)

// A Provider gives access to the RDMA devices of one kind.
type Provider interface {
	// Name is the provider's name in configuration: "iwarp", "verbs".
	Name() string
	// Devices lists what this provider offers on this machine.
	Devices() ([]DeviceInfo, error)
	// Listen opens a listener; addr may be a wildcard address and port 0.
	Listen(addr netip.AddrPort, cfg ListenConfig) (Listener, error)
	// Dial resolves remote to a device and returns a Conn that is not yet connected:
	// create the QP on it, post receives, then Connect. local may be the zero Addr.
	// It blocks for address resolution only, bounded by ctx.
	Dial(ctx context.Context, local netip.Addr, remote netip.AddrPort) (Conn, error)
}

// Transport is the wire protocol family of a device.
type Transport uint8

// Transports.
const (
	TransportIWARP Transport = iota + 1
	TransportIB              // InfiniBand and RoCE
)

func (t Transport) String() string {
	switch t {
	case TransportIWARP:
		return "iWARP"
	case TransportIB:
		return "IB/RoCE"
	}
	return "unknown"
}

// DeviceInfo tells a device's name and limits. Zero limits mean "none of these".
type DeviceInfo struct {
	Name      string // "iwarp0", "mlx5_0"
	Provider  string
	Transport Transport
	Addrs     []netip.Addr // addresses that select this device; empty: any local address

	MaxQPWR      int // work requests per send or receive queue
	MaxSGE       int // SGEs per Send, Write or Recv
	MaxReadSGE   int // SGEs per Read (1 on iWARP)
	MaxInline    int // bytes of FlagInline data
	MaxCQE       int // entries per CQ
	MaxReadDepth int // largest IRD and ORD per QP
	MaxMRBytes   int64
	MaxPrivate   int  // private data bytes in a connect request
	MemWindows   bool // type 2B memory windows (AllocMW, OpBindMW)
	SendInv      bool // OpSendInvalidate works
	RNRRetry     bool // the transport waits for the peer to post a receive
	// Autonomous devices serve the peer's requests, and flush, without anybody polling their
	// CQs; a software provider does so inside Poll.
	Autonomous bool
}

// A Device is an open RDMA device. Close it after everything made from it.
type Device interface {
	Info() DeviceInfo
	AllocPD() (PD, error)
	// CreateCQ makes a completion queue with at least depth entries. Its owner polls it.
	// It needs an entry for each work request that its QPs can hold (MaxSend and
	// MaxRecv, also of unsignalled ones: they complete when they are flushed).
	CreateCQ(depth int) (CQ, error)
	// Removed is closed when the device is being taken out of the machine; nil where that does not happen. Connections
	// on it end by themselves. The kernel may wait with the removal until all that was made from the device is closed.
	Removed() <-chan struct{}
	Close() error
}

// Access is a set of access rights of a memory region or window.
type Access uint8

// Access rights. Local read is always allowed.
const (
	AccessLocalWrite  Access = 1 << iota // receive buffers, Read sinks
	AccessRemoteWrite                    // RDMA Write by the peer; Read sinks on iWARP. Requires AccessLocalWrite
	AccessRemoteRead                     // RDMA Read by the peer
	AccessMWBind                         // windows may be bound to this region
)

// A PD is a protection domain: MRs, MWs and QPs of different PDs never meet.
type PD interface {
	// Register makes mem, which lies outside the Go heap and stays mapped until
	// Deregister, reachable for work requests. It may block (pinning pages).
	Register(mem []byte, access Access) (MR, error)
	// AllocMW makes an unbound type 2B memory window, or ErrNotSupported.
	AllocMW() (MW, error)
	Close() error
}

// An MR is a registered memory region. Remote addresses are virtual: Addr plus offset.
type MR interface {
	LKey() uint32
	RKey() uint32
	Addr() uint64
	Len() int
	// Deregister ends every access. Call it when no work request that names the
	// region is outstanding; the peer's later accesses fail.
	Deregister() error
}

// An MW is a memory window: a key that opens a part of an MR on one QP, bound by
// OpBindMW, closed by OpLocalInvalidate or by the peer's Send with Invalidate.
type MW interface {
	// RKey is the current key; every bind changes it to NextKey of it. After PostSend of an
	// OpBindMW has returned, RKey is the key of the new binding.
	RKey() uint32
	Close() error
}

// NextKey is the key that a window with this key gets by the next bind: its low byte is counted on. Who tells the
// peer of it can so post the bind and the message together.
func NextKey(key uint32) uint32 { return key&^0xFF | (key+1)&0xFF }

// An SGE is a piece of registered local memory.
type SGE struct {
	Addr uint64 // virtual address, inside the MR of LKey
	Len  uint32
	LKey uint32
}

// Opcode is the kind of a send queue work request.
type Opcode uint8

// Opcodes.
const (
	OpSend            Opcode = iota + 1
	OpSendInvalidate         // Send that invalidates InvalidateRKey at the peer
	OpWrite                  // RDMA Write to RemoteAddr/RKey
	OpRead                   // RDMA Read from RemoteAddr/RKey into one SGE
	OpBindMW                 // bind Window to the SGE's range (one SGE), rights in Access
	OpLocalInvalidate        // invalidate InvalidateRKey, a window of this QP
)

func (o Opcode) String() string {
	switch o {
	case OpSend:
		return "Send"
	case OpSendInvalidate:
		return "Send with Invalidate"
	case OpWrite:
		return "RDMA Write"
	case OpRead:
		return "RDMA Read"
	case OpBindMW:
		return "Bind MW"
	case OpLocalInvalidate:
		return "Local Invalidate"
	}
	return "unknown"
}

// SendFlags modify a send queue work request.
type SendFlags uint8

// Send flags.
const (
	FlagSignaled  SendFlags = 1 << iota // produce a WC on success (errors always produce one)
	FlagFence                           // wait for this QP's earlier Reads
	FlagSolicited                       // solicited event at the peer
	FlagInline                          // copy the data now; LKey is not looked at. Send and Write only
)

// A SendWR is a send queue work request. The provider copies it, SGL included;
// the memory that the SGL names is the provider's until completion. With an SGL of no
// bytes RemoteAddr and RKey of a Write or Read are arbitrary, nobody looks at them.
type SendWR struct {
	ID             uint64
	Op             Opcode
	Flags          SendFlags
	Access         Access // OpBindMW
	SGL            []SGE
	RemoteAddr     uint64
	RKey           uint32
	InvalidateRKey uint32
	Window         MW // OpBindMW
}

// A RecvWR is a receive buffer. The message is scattered over SGL in order; a
// longer message is a fatal error of the connection. The provider copies the WR.
type RecvWR struct {
	ID  uint64
	SGL []SGE
}

// QPConfig sizes a queue pair.
type QPConfig struct {
	SendCQ, RecvCQ CQ // both of one owner; usually the same CQ
	MaxSend        int
	MaxRecv        int
	MaxSendSGE     int // default 1
	MaxRecvSGE     int // default 1
	MaxInline      int // bytes
}

// A QP is one end of a reliable connection. It is created by Conn.CreateQP and
// belongs to the owner of its CQ. Post methods never block.
type QP interface {
	// Num is the QP number that WC.QPNum shows; unique among live QPs of the device.
	Num() uint32
	// PostSend posts in order and returns how many were accepted. A request that
	// breaks a limit (SGE count, inline size, local key or bounds, unknown opcode) is
	// refused with ErrInvalid and nothing after it is posted; ErrQueueFull when the
	// send queue is full. After an error of the connection posts are accepted and
	// come back flushed. A slot is free again when the completion of its request, or
	// of a later signalled one, has been polled. On a hot path pass a slice that exists
	// already (wrs[i:j]...): arguments written out one by one are allocated for the call.
	PostSend(wrs ...SendWR) (int, error)
	// PostRecv posts receive buffers; same rules.
	PostRecv(wrs ...RecvWR) (int, error)
	// Close destroys the QP: the connection is cut (unless it was disconnected before,
	// nothing that is still queued in this host leaves it afterwards), outstanding work requests are
	// dropped WITHOUT completions, and from its return on the provider touches none
	// of their buffers. Completions already in the CQ for this QP are discarded. To see every flush
	// completion, Disconnect the Conn and poll until all have arrived, then Close.
	// Owner only. Closing twice is harmless.
	Close() error
}

// Status is the status of a work completion.
type Status uint8

// Work completion statuses (the verbs names).
const (
	StatusSuccess          Status = iota
	StatusLocalLength             // receive buffer too small
	StatusLocalProtection         // local key, bounds or rights
	StatusLocalQPOperation        // malformed work request
	StatusFlush                   // the QP is in error: not executed, or outcome unknown
	StatusMWBind                  // window could not be bound
	StatusBadResponse             // the peer's answer broke the protocol
	StatusRemoteInvalid           // peer refused: length, operation, invalidation
	StatusRemoteAccess            // remote key, bounds or rights
	StatusRemoteOperation         // peer could not complete
	StatusRetryExceeded           // peer gone
	StatusRNRRetryExceeded        // peer had no receive posted
	StatusGeneral
)

var statusNames = [...]string{"success", "local length error", "local protection error", "local QP operation error",
	"work request flushed", "memory window bind error", "bad response", "remote invalid request", "remote access error",
	"remote operation error", "transport retry exceeded", "RNR retry exceeded", "general error"}

func (s Status) String() string {
	if int(s) < len(statusNames) {
		return statusNames[s]
	}
	return "unknown status"
}

// A WC is a work completion. On error only ID, QPNum, Status and Recv are valid.
type WC struct {
	ID          uint64
	QPNum       uint32
	Status      Status
	Recv        bool // of a receive; otherwise of a send queue request
	Invalidated bool // the received message invalidated RKey
	ByteLen     uint32
	RKey        uint32
}

// A CQ is a completion queue. All methods but FD are the owner's.
type CQ interface {
	// Poll moves the provider's work on and returns up to len(wc) completions,
	// without blocking. busy tells that work was done (bytes moved) even when n is 0,
	// so that an adaptive poller does not go to sleep in the middle of a transfer.
	Poll(wc []WC) (n int, busy bool, err error)
	// Arm asks for FD to become readable at the next completion (or whatever else
	// needs a Poll). One shot. If again is true the owner must Poll once more before
	// it sleeps on FD, and go on if that brought anything; a provider whose FD is
	// level readable on the transport itself returns false and saves that Poll.
	Arm() (again bool, err error)
	// FD is a descriptor for epoll; level readable. It stays the CQ's own.
	FD() int
	// Close fails with ErrInvalid while QPs are attached.
	Close() error
}

// ListenConfig bounds what strangers can cost.
type ListenConfig struct {
	Backlog int // connections accepted by the kernel and not yet by us; default 128
	// MaxPending bounds connections that have not been handed out by Accept yet
	// (half-open, or waiting for their request frame); more are closed at once. Default 256.
	MaxPending int
}

// A Listener hands out incoming connection requests.
type Listener interface {
	// Accept blocks until a connection request is there; after Close it returns
	// ErrClosed. The Conn has a ConnectRequest; answer it with Accept or Reject, or Close it.
	Accept() (Conn, error)
	Addr() netip.AddrPort
	Close() error
}

// ConnParam is what both sides tell each other when they connect.
type ConnParam struct {
	PrivateData []byte // see DeviceInfo.MaxPrivate
	// ResponderResources (IRD): inbound Reads that we will serve at a time.
	ResponderResources int
	// InitiatorDepth (ORD): outbound Reads that we want to have outstanding.
	InitiatorDepth int
	// RNRRetry and Retry as in rdma_conn_param; ignored by iWARP. 7 = for ever.
	RNRRetry, Retry uint8
}

// ConnectRequest is what the connecting side sent.
type ConnectRequest struct {
	PrivateData        []byte // IB/RoCE pads it with zeros to 56; never compare its length for equality
	ResponderResources int    // Reads the peer will serve: the bound of our outbound Reads
	InitiatorDepth     int    // Reads the peer wants to have outstanding towards us
}

// A Conn is a connection identifier (rdma_cm_id): address, state and one QP.
// Methods may be called from any goroutine. Close it in the end, after its QP.
type Conn interface {
	Device() Device
	LocalAddr() netip.AddrPort
	RemoteAddr() netip.AddrPort
	// Request is the connect request on the accepting side, nil on the other.
	Request() *ConnectRequest
	// CreateQP makes the Conn's QP; once. Post receives before Accept or Connect. If
	// those fail the owner of the CQ has never seen the QP: nothing it holds completes,
	// and the goroutine that made it closes it.
	CreateQP(pd PD, cfg QPConfig) (QP, error)
	// Connect sends the request and blocks until the connection is established, was
	// rejected (*RejectError), failed, or ctx ended. It returns the peer's reply:
	// private data and the read depths that are in force for us.
	Connect(ctx context.Context, p ConnParam) (Established, error)
	// Accept answers the request and blocks (bounded by ctx) until established. Depths above
	// what the request allows are lowered.
	Accept(ctx context.Context, p ConnParam) (Established, error)
	// Reject refuses the request with private data and closes the connection.
	Reject(private []byte) error
	// Done is closed when the connection has ended, for whatever reason; Err then
	// tells the reason (ErrDisconnected for an orderly end).
	Done() <-chan struct{}
	Err() error
	// Disconnect ends the connection. Outstanding work requests are flushed when the owner polls.
	Disconnect() error
	Close() error
}

// Established tells what was agreed.
type Established struct {
	PrivateData []byte
	IRD, ORD    int // inbound Reads we serve, outbound Reads we may have outstanding
}
