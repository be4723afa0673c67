package target

import "errors"

// Sentinel errors; match them with errors.Is.
var (
	// ErrClosed is returned by methods of a Target after Shutdown or Close has begun.
	ErrClosed = errors.New("target: closed")
	// ErrNamespaceExists says the namespace identifier is taken.
	ErrNamespaceExists = errors.New("namespace identifier is in use")
	// ErrNoNamespace says there is no namespace of that identifier.
	ErrNoNamespace = errors.New("no such namespace")
	// ErrTooMany says that a limit of Config is reached.
	ErrTooMany = errors.New("limit reached")
	// ErrShrunk says that the store behind a namespace became smaller. The old size stays in force.
	ErrShrunk = errors.New("the device became smaller")
	// ErrBusy says that the back end still works on requests, so nothing that it may touch was freed.
	ErrBusy = errors.New("the storage has not answered yet")
)

// Reasons for the end of a queue or an association; they appear in logs and in
// Status.
var (
	errPeerGone      = errors.New("connection ended")
	errKeepAlive     = errors.New("keep-alive timeout")
	errConnectTime   = errors.New("no Connect command in time")
	errIdle          = errors.New("controller was not enabled in time")
	errShortCapsule  = errors.New("command capsule shorter than 64 bytes")
	errAdminLost     = errors.New("admin queue lost")
	errHostDisabled  = errors.New("controller disabled by the host")
	errHostShutdown  = errors.New("controller shut down by the host")
	errHostReturned  = errors.New("the host came back with a new association")
	errHostDenied    = errors.New("host is no longer allowed")
	errQueueDeleted  = errors.New("queue deleted by Disconnect")
	errShutdown      = errors.New("target shuts down")
	errEvicted       = errors.New("too many connections without a Connect command")
	errPostRefused   = errors.New("work request refused by the RDMA device")
	errWorkerPoll    = errors.New("completion queue failed")
	errFlushFailed   = errors.New("flush at shutdown failed")
	errStalled       = errors.New("the host does not move its data")
	errTransferError = errors.New("RDMA transfer failed")
)
