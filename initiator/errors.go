package initiator

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"rdblk/blockdev"
	"rdblk/protocol"
	"rdblk/rdma"
)

// Sentinel errors; match them with errors.Is.
var (
	// ErrClosed is returned by a Session and its devices after Close has begun. It is
	// blockdev.ErrClosed too.
	ErrClosed = fmt.Errorf("the session has been ended: %w", blockdev.ErrClosed)
	// ErrProtocol says that the target broke the protocol; the association with it was
	// ended.
	ErrProtocol = errors.New("target broke the protocol")
	// ErrTimeout says that the target did not answer a command within the time the
	// configuration gives it; the association was ended.
	ErrTimeout = errors.New("target did not answer in time")
	// ErrChanged says that after a reconnect (or a change event) the namespace is not
	// the one that was attached: another identity, another block size or a smaller
	// size. Requests fail with it, so that nothing is written to a different disk.
	ErrChanged = errors.New("the namespace is not the one that was attached")
	// ErrCacheLost says that the target crashed, or failed to store what it had, with
	// acknowledged writes in its volatile cache that had not been flushed. They are
	// gone, so reads would see older data and a flush would promise what is not there:
	// everything fails until the device is attached anew. It is
	// blockdev.ErrFlushFailed too.
	ErrCacheLost = fmt.Errorf("the target lost acknowledged writes that had not been flushed: %w", blockdev.ErrFlushFailed)
	// ErrNoNamespace says that the target has no such namespace.
	ErrNoNamespace = errors.New("no such namespace")
	// ErrUnknownSubsystem says that the target has no subsystem of the name that was
	// asked for.
	ErrUnknownSubsystem = errors.New("the target has no such subsystem")
	// ErrNoSubsystem says that discovery did not find exactly one subsystem to take.
	ErrNoSubsystem = errors.New("no single subsystem to connect to")
	// ErrUnsupported says that the target, or what it asks for, cannot be used by this
	// initiator.
	ErrUnsupported = errors.New("target is not supported")
	// ErrGenerationChanged says that the discovery log kept changing while it was read.
	ErrGenerationChanged = errors.New("discovery log keeps changing")
)

// errLaneDown is the result of a command whose connection went away before its answer.
var errLaneDown = errors.New("connection was lost before the answer")

// CommandError is a command that the target answered with a failure.
//
// errors.Is finds in it the protocol.Status, through that the errno of the same
// meaning, and of an I/O command the sentinel of blockdev where there is one.
type CommandError struct {
	Op     string // what was asked: "read", "Connect", "Identify", ...
	What   string // on what: "namespace 1 of nqn.…", "" if there is nothing to say
	Status protocol.Status
	// Fabrics: the status is one of a Fabrics command, whose numbers mean other things.
	Fabrics bool
	// Hint is what to do about it, "" if there is no advice.
	Hint string

	is error // a sentinel that it is as well
}

func (e *CommandError) Error() string {
	s := e.Op
	if e.What != "" {
		s += " " + e.What
	}
	status := e.Status.Error()
	if e.Fabrics {
		status = protocol.FabricsError{Status: e.Status}.Error()
	}
	if e.Hint != "" {
		return s + ": " + e.Hint + " (target answered: " + status + ")"
	}
	return s + ": target answered: " + status
}

// Unwrap gives the sentinel of blockdev that it means, and the status.
func (e *CommandError) Unwrap() []error {
	if !e.Fabrics {
		if s := sentinel(e.Status); s != nil {
			return []error{s, e.Status}
		}
	}
	if e.is != nil {
		return []error{e.is, e.Status}
	}
	return []error{e.Status}
}

// sentinel is the error of the device contract with the meaning of an I/O status, or
// nil.
func sentinel(s protocol.Status) error {
	switch s.Code() {
	case protocol.StatusNamespaceWriteProtected, protocol.StatusWriteToReadOnlyRange:
		return blockdev.ErrReadOnly
	case protocol.StatusLBAOutOfRange:
		return blockdev.ErrOutOfRange
	case protocol.StatusInvalidOpcode, protocol.StatusCommandSizeExceeded:
		return blockdev.ErrNotSupported
	case protocol.StatusInvalidNamespace:
		return ErrNoNamespace
	}
	return nil
}

// RejectedError is a connection that the target refused before any command.
type RejectedError struct {
	QID uint16
	// Status is the target's reason, 0 if it gave none that is understood.
	Status protocol.RejectStatus
	Err    error // the engine's
}

func (e *RejectedError) Error() string {
	if e.Status == 0 {
		return fmt.Sprintf("queue %d: connection rejected by the target without a reason (does an NVMe over RDMA target listen there?)", e.QID)
	}
	s := fmt.Sprintf("queue %d: connection rejected by the target: %v", e.QID, e.Status)
	switch e.Status {
	case protocol.RejectNoResources:
		s += " (it has no room for another queue: ask for fewer queues or raise the target's limits)"
	case protocol.RejectInvalidHSQSIZE, protocol.RejectInvalidHRQSIZE:
		s += " (lower the queue depth)"
	case protocol.RejectInvalidIRD:
		s += " (this machine's RDMA device serves no inbound reads)"
	}
	return s
}

// Unwrap gives the target's reason and the engine's error.
func (e *RejectedError) Unwrap() []error {
	if e.Status == 0 {
		return []error{e.Err}
	}
	return []error{e.Err, e.Status}
}

// LostError is what requests fail with when the target did not come back in time. It is
// blockdev.ErrLost, and the reason of the loss.
type LostError struct {
	After time.Duration // how long was waited
	Cause error         // the last thing that went wrong
}

func (e *LostError) Error() string {
	return fmt.Sprintf("%v: no answer from the target within the loss timeout of %v, last: %v", blockdev.ErrLost, e.After, e.Cause)
}

// Unwrap gives blockdev.ErrLost and the cause.
func (e *LostError) Unwrap() []error { return []error{blockdev.ErrLost, e.Cause, syscall.EIO} }

// permanent reports whether trying again cannot help, as far as the target or the
// configuration say so.
func permanent(err error) bool {
	if ce := commandError(err); ce != nil {
		if ce.Fabrics {
			switch ce.Status.Code() {
			case protocol.StatusConnectInvalidHost, protocol.StatusConnectIncompatibleFormat, protocol.StatusAuthenticationRequired:
				return true // SPDK omits Do Not Retry
			}
		}
		return ce.Status.DoNotRetry()
	}
	return errors.Is(err, ErrUnsupported) || errors.Is(err, ErrNoSubsystem) || errors.Is(err, ErrChanged) || errors.Is(err, rdma.ErrNotSupported)
}

func commandError(err error) *CommandError {
	var ce *CommandError
	if errors.As(err, &ce) {
		return ce
	}
	return nil
}
