package blockdev

import (
	"errors"
	"fmt"
	"io"
)

// Sentinel errors; devices wrap them or the store's errno, so match with errors.Is.
var (
	ErrClosed       = errors.New("device is closed")
	ErrReadOnly     = errors.New("device is read-only")
	ErrOutOfRange   = errors.New("range is outside the device")
	ErrUnaligned    = errors.New("offset, length or buffer is not aligned to the device's blocks")
	ErrNotSupported = errors.New("operation is not supported by the device")
	ErrFlushFailed  = errors.New("an earlier flush failed: durability of earlier writes is unknown until the device is opened again")
	ErrWouldBlock   = errors.New("would block")
	ErrInUse        = errors.New("device is in use by another process")
	// ErrCutOff says that somebody made a file smaller while it was open: what was there is
	// lost. It is an io.ErrUnexpectedEOF too.
	ErrCutOff = errors.New("the file was cut off by somebody while it was in use: what was behind is lost")
	// ErrLost says that a remote device did not come back within its loss timeout.
	ErrLost = errors.New("connection to the device is lost")
)

var errCutOff = fmt.Errorf("%w (%w)", ErrCutOff, io.ErrUnexpectedEOF)
