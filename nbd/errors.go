package nbd

import "errors"

// Sentinel errors; match with errors.Is.
var (
	// ErrServerClosed is returned by Serve after Shutdown or Close.
	ErrServerClosed = errors.New("nbd: server closed")
	// ErrNotLoopback refuses a listener that other machines can reach.
	ErrNotLoopback = errors.New("address is not on the loopback interface")
	// ErrSocketInUse says that somebody answers on the socket path already.
	ErrSocketInUse = errors.New("socket is in use by another server")
	// ErrBusy says that requests are still with the device.
	ErrBusy = errors.New("requests are still with the device")
)
