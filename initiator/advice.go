package initiator

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"syscall"

	"rdblk/rdma"
)

// AttemptError is an attempt to connect to a target, or to ask its discovery service,
// that failed. Its text names the address once, and what may help.
type AttemptError struct {
	Op     string // "connect to" or "ask the discovery service at"
	Addr   netip.AddrPort
	SubNQN string // the subsystem; empty if none was named yet
	Err    error
}

func (e *AttemptError) Error() string {
	s, why := e.Op+" "+e.Addr.String(), e.Err.Error()
	var op *rdma.OpError
	if errors.As(e.Err, &op) && op.Addr == e.Addr {
		if rest, ok := strings.CutPrefix(why, op.Op+" "+op.Addr.String()+" ("+op.Provider+"): "); ok {
			s += " (" + op.Provider + ")"
			why = rest
		}
	}
	s += ": " + why
	if a := advice(e.Err); a != "" {
		s += " (" + a + ")"
	}
	return s
}

// Unwrap gives the reason.
func (e *AttemptError) Unwrap() error { return e.Err }

// Transient reports whether the reason may pass by itself while a machine or a network
// starts: nothing answers, or the target says that it is busy or not ready.
func (e *AttemptError) Transient() bool { return transient(e.Err) }

func transient(err error) bool {
	if permanent(err) {
		return false
	}
	var op *rdma.OpError
	var rejected *RejectedError
	switch {
	case errors.As(err, &rejected):
		return true
	case errors.Is(err, rdma.ErrInvalid), errors.Is(err, rdma.ErrNoResources), errors.Is(err, ErrClosed):
		return false
	case errors.As(err, &op), errors.Is(err, ErrTimeout), errors.Is(err, errLaneDown), errors.Is(err, rdma.ErrDisconnected), errors.Is(err, ErrNoNamespace):
		return true
	}
	return commandError(err) != nil
}

// advice is what may help against an error of the network; empty if the error says it
// itself or nobody knows.
func advice(err error) string {
	var op *rdma.OpError
	if !errors.As(err, &op) {
		if errors.Is(err, ErrTimeout) && commandError(err) == nil {
			return "something took the connection and does not answer: is it rdtarget that listens there?"
		}
		return ""
	}
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return "nothing listens there: is rdtarget running on that machine, and is the port right?"
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return "no way leads there: is the address right, and the network up?"
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return "is local_address an address of this machine?"
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return "a firewall of this machine forbids it"
	case errors.Is(err, rdma.ErrNoReply):
		return "is it rdtarget that listens there, and not stopped?"
	case errors.Is(err, syscall.ETIMEDOUT), errors.Is(err, rdma.ErrTimeout), errors.Is(err, ErrTimeout):
		return "is the machine up, the address right, and does a firewall let the port through?"
	case errors.Is(err, syscall.ECONNRESET):
		return "something listens there and does not speak iWARP: is the port right?"
	}
	return ""
}

// withoutAddr is the text of an error for a log line that names the address already.
func withoutAddr(err error, addr netip.AddrPort) string {
	var op *rdma.OpError
	if errors.As(err, &op) && error(op) == err && op.Addr == addr {
		return fmt.Sprintf("%s (%s): %v", op.Op, op.Provider, op.Err)
	}
	return err.Error()
}
