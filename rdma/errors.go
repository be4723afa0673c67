package rdma

import (
	"errors"
	"fmt"
	"net/netip"
)

// Sentinel errors; match them with errors.Is.
var (
	// ErrClosed is returned by every method of an object after its Close.
	ErrClosed = errors.New("rdma: closed")
	// ErrQueueFull says the depth given at creation is used up. Poll the CQ and post again.
	ErrQueueFull = errors.New("queue full")
	// ErrNotSupported says this provider or device does not have the feature.
	ErrNotSupported = errors.New("not supported")
	// ErrNoReply says that the peer took the connection (with TCP: its kernel did) and then sent nothing in
	// the time that there was. It comes with the error that says how long that was.
	ErrNoReply = errors.New("the peer took the connection and sent no reply")
	// ErrTimeout says the peer did not answer within the time that the caller or the provider chose.
	ErrTimeout = errors.New("timed out")
	// ErrDisconnected is the reason of an orderly end of a connection.
	ErrDisconnected = errors.New("disconnected")
	// ErrInvalid says an argument breaks the contract (limit, length, access right, state).
	ErrInvalid = errors.New("invalid argument")
	// ErrNoResources says a limit of the device or of this process is reached.
	ErrNoResources = errors.New("out of RDMA resources")
	// ErrProtocol says that the peer does not speak the wire protocol or broke it.
	ErrProtocol = errors.New("protocol error")
)

// RejectError is returned by Conn.Connect when the peer refused the connection.
type RejectError struct {
	// PrivateData is what the peer sent along; it may be padded (IB/RoCE) or empty.
	PrivateData []byte
}

func (e *RejectError) Error() string { return "connection rejected by peer" }

// OpError says which operation failed, at which provider, towards which address.
type OpError struct {
	Op       string // "listen", "connect", "accept", "register memory", ...
	Provider string // "iwarp", "verbs"
	Addr     netip.AddrPort
	Err      error
}

func (e *OpError) Error() string {
	if e.Addr.IsValid() {
		return fmt.Sprintf("%s %s (%s): %v", e.Op, e.Addr, e.Provider, e.Err)
	}
	return fmt.Sprintf("%s (%s): %v", e.Op, e.Provider, e.Err)
}

func (e *OpError) Unwrap() error { return e.Err }
