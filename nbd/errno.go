package nbd

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/pojntfx/go-nbd/pkg/protocol"

	"rdblk/blockdev"
)

// Errno is an error value of the protocol ("Error values"). They look like
// Linux's numbers and are the protocol's own.
type Errno uint32

// All error values that the protocol has.
const (
	EPERM     = Errno(protocol.TRANSMISSION_ERROR_EPERM)
	EIO       = Errno(5)
	ENOMEM    = Errno(12)
	EINVAL    = Errno(protocol.TRANSMISSION_ERROR_EINVAL)
	ENOSPC    = Errno(28)
	EOVERFLOW = Errno(75)
	ENOTSUP   = Errno(95)
	ESHUTDOWN = Errno(108)
)

// errnos pairs the protocol's values with the system's, in both directions: the first
// pair with a value is its translation.
var errnos = []struct {
	nbd Errno
	sys syscall.Errno
}{
	{EPERM, syscall.EPERM},
	{EIO, syscall.EIO},
	{ENOMEM, syscall.ENOMEM},
	{EINVAL, syscall.EINVAL},
	{ENOSPC, syscall.ENOSPC},
	{EOVERFLOW, syscall.EOVERFLOW},
	{ENOTSUP, syscall.EOPNOTSUPP},
	{ESHUTDOWN, syscall.ESHUTDOWN},
	// One way: more names for the same to the protocol.
	{ENOSPC, syscall.EDQUOT},
	{ENOSPC, syscall.EFBIG},
	{EPERM, syscall.EROFS},
	{EPERM, syscall.EACCES},
}

// sentinels pairs the errors of blockdev with the protocol's values.
var sentinels = []struct {
	err error
	nbd Errno
}{
	{blockdev.ErrReadOnly, EPERM},
	{blockdev.ErrOutOfRange, EINVAL},
	{blockdev.ErrUnaligned, EINVAL},
	{blockdev.ErrNotSupported, ENOTSUP},
	{blockdev.ErrClosed, ESHUTDOWN},
	{blockdev.ErrFlushFailed, EIO},
	{blockdev.ErrLost, EIO},
}

// errnoOf translates a device's error. What it does not know is EIO: the
// client shall not think that a repetition in another form would help.
func errnoOf(err error) Errno {
	if err == nil {
		return 0
	}
	for _, s := range sentinels {
		if errors.Is(err, s.err) {
			return s.nbd
		}
	}
	var sys syscall.Errno
	if errors.As(err, &sys) {
		for _, p := range errnos {
			if p.sys == sys {
				return p.nbd
			}
		}
	}
	var own Errno
	if errors.As(err, &own) && own != 0 {
		return own
	}
	return EIO
}

// replyErrno is errnoOf for the reply to a request. The protocol allows ENOTSUP
// only to fast zero requests, which are not offered; a device that cannot do
// what was offered has failed.
func replyErrno(err error) Errno {
	e := errnoOf(err)
	if e == ENOTSUP {
		e = EIO
	}
	return e
}

// Errno makes the value an error that is the system's errno of the same meaning,
// for clients: errors.Is(EIO, syscall.EIO). An unknown value counts as EINVAL, as the protocol asks.
func (e Errno) Is(target error) bool {
	sys, ok := target.(syscall.Errno)
	return ok && e.Sys() == sys
}

// Sys is the system's errno with the meaning of e, 0 for 0.
func (e Errno) Sys() syscall.Errno {
	if e == 0 {
		return 0
	}
	for _, p := range errnos {
		if p.nbd == e {
			return p.sys
		}
	}
	return syscall.EINVAL
}

// Error gives the value's name.
func (e Errno) Error() string { return "nbd: " + e.String() }

func (e Errno) String() string {
	switch e {
	case 0:
		return "success"
	case EPERM:
		return "EPERM"
	case EIO:
		return "EIO"
	case ENOMEM:
		return "ENOMEM"
	case EINVAL:
		return "EINVAL"
	case ENOSPC:
		return "ENOSPC"
	case EOVERFLOW:
		return "EOVERFLOW"
	case ENOTSUP:
		return "ENOTSUP"
	case ESHUTDOWN:
		return "ESHUTDOWN"
	}
	return fmt.Sprintf("error %d", uint32(e))
}
