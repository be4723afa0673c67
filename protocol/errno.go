package protocol

import (
	"errors"
	"io"
	"syscall"
)

// This file is the only place where the status codes and the errors of an
// operating system meet, once in each direction.

// StatusFromErrno returns the status with which a target answers an I/O command
// whose back end failed with e. op matters: the same EIO is an unrecovered read
// error to a Read and a write fault to what changes the medium or makes it
// durable, and what a back end cannot do is reported so that a host falls back.
//
//	0                                              success
//	ENOSPC, EDQUOT, EFBIG                          capacity exceeded, DNR
//	EREMOTEIO                                      LBA out of range, DNR
//	EROFS                                          namespace is write protected, DNR
//	EPERM, EACCES                                  access denied, DNR
//	EOPNOTSUPP, ENOSYS, ENOTTY                     Dataset Management, Write Zeroes: command size limit exceeded, DNR
//	                                               others: invalid opcode, DNR
//	EIO, ENODATA, EILSEQ, EBADMSG, EUCLEAN         Read, Compare, Verify: unrecovered read error, DNR; others: write fault, DNR
//	EBADE                                          reservation conflict, DNR
//	ENOMEM                                         internal error
//	EAGAIN, EBUSY, EINTR, ETIMEDOUT                namespace not ready
//	ENODEV, ENXIO, ENOLINK, ESHUTDOWN, ENOTCONN,
//	ECONNRESET, ECONNABORTED, EPIPE, ENETDOWN,
//	ENETUNREACH, EHOSTDOWN, EHOSTUNREACH, ESTALE   internal path error
//	every other                                    internal error, DNR
//
// EIO carries Do Not Retry because a medium has retried by itself when it gives
// it, and because a Flush that is repeated after a failure must not seem to
// succeed. What goes away by waiting carries none.
func StatusFromErrno(op Opcode, e syscall.Errno) Status {
	switch e {
	case 0:
		return StatusSuccess
	case syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG:
		return StatusCapacityExceeded.WithDNR()
	case syscall.EREMOTEIO:
		return StatusLBAOutOfRange.WithDNR()
	case syscall.EROFS:
		return StatusNamespaceWriteProtected.WithDNR()
	case syscall.EPERM, syscall.EACCES:
		return StatusAccessDenied.WithDNR()
	case syscall.EOPNOTSUPP, syscall.ENOSYS, syscall.ENOTTY: // ENOTSUP is EOPNOTSUPP
		return StatusNotSupported(op)
	case syscall.EIO, syscall.ENODATA, syscall.EILSEQ, syscall.EBADMSG, syscall.EUCLEAN:
		return StatusMediaError(op)
	case syscall.EBADE:
		return StatusReservationConflict.WithDNR()
	case syscall.ENOMEM:
		return StatusInternalError
	case syscall.EAGAIN, syscall.EBUSY, syscall.EINTR, syscall.ETIMEDOUT:
		return StatusNamespaceNotReady
	case syscall.ENODEV, syscall.ENXIO, syscall.ENOLINK, syscall.ESHUTDOWN, syscall.ENOTCONN,
		syscall.ECONNRESET, syscall.ECONNABORTED, syscall.EPIPE, syscall.ENETDOWN,
		syscall.ENETUNREACH, syscall.EHOSTDOWN, syscall.EHOSTUNREACH, syscall.ESTALE:
		return StatusInternalPathError
	}
	return StatusInternalError.WithDNR()
}

// StatusMediaError is the status of a medium that failed under op.
func StatusMediaError(op Opcode) Status {
	switch op {
	case OpRead, OpCompare, OpVerify:
		return StatusUnrecoveredRead.WithDNR()
	}
	return StatusWriteFault.WithDNR()
}

// StatusNotSupported is the status of an op that the back end cannot do. For
// what is optional it is one that makes a Linux host switch the feature off and
// fall back to plain writes.
func StatusNotSupported(op Opcode) Status {
	switch op {
	case OpDatasetManagement, OpWriteZeroes:
		return StatusCommandSizeExceeded.WithDNR()
	}
	return StatusInvalidOpcode.WithDNR()
}

// StatusFromError is [StatusFromErrno] for an error: nil is success, a [Status]
// inside err is taken as it is, then an errno inside err is mapped, and the end
// of a file that should be longer is a medium error. Every other error is an
// internal error with Do Not Retry. A caller with sentinels of its own (out of
// range, read-only, not supported) asks for those first.
func StatusFromError(op Opcode, err error) Status {
	if err == nil {
		return StatusSuccess
	}
	var s Status
	if errors.As(err, &s) && !s.OK() {
		return s
	}
	var e syscall.Errno
	if errors.As(err, &e) && e != 0 {
		return StatusFromErrno(op, e)
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return StatusMediaError(op)
	}
	return StatusInternalError.WithDNR()
}

// Errno returns what the status of an I/O command means to the one who made the
// I/O; 0 is success. It follows the Linux block layer except where that has no
// better word than "I/O error" or hides the cause: write protection is EROFS, a
// missing namespace ENODEV, a failed medium EIO, a failed comparison EILSEQ.
// Fabrics commands share numbers with I/O commands: look at their status itself.
//
//	capacity exceeded                                                  ENOSPC
//	LBA out of range, namespace not ready, command interrupted         EREMOTEIO
//	namespace is write protected, write to read only range             EROFS
//	invalid namespace or format                                        ENODEV
//	invalid opcode, invalid field, conflicting attributes,
//	command size limit exceeded                                        EOPNOTSUPP
//	guard, tag and compare failures, invalid protection information    EILSEQ
//	access denied, operation denied, invalid host, authentication required   EACCES
//	deallocated or unwritten block                                     ENODATA
//	reservation conflict                                               EBADE
//	every path related status but the next, transient transport error  ENOLINK
//	aborted by the host                                                ECANCELED
//	every other                                                        EIO
func (s Status) Errno() syscall.Errno {
	switch code := s.Code(); code {
	case StatusSuccess:
		return 0
	case StatusCapacityExceeded:
		return syscall.ENOSPC
	case StatusLBAOutOfRange, StatusNamespaceNotReady, StatusCommandInterrupted:
		return syscall.EREMOTEIO
	case StatusNamespaceWriteProtected, StatusWriteToReadOnlyRange:
		return syscall.EROFS
	case StatusInvalidNamespace:
		return syscall.ENODEV
	case StatusInvalidOpcode, StatusInvalidField, StatusConflictingAttributes, StatusCommandSizeExceeded:
		return syscall.EOPNOTSUPP
	case StatusGuardCheckError, StatusAppTagCheckError, StatusRefTagCheckError, StatusStorageTagCheckError, StatusCompareFailure, StatusInvalidPI:
		return syscall.EILSEQ
	case StatusAccessDenied, StatusOperationDenied, StatusConnectInvalidHost, StatusAuthenticationRequired:
		return syscall.EACCES
	case StatusDeallocatedBlock:
		return syscall.ENODATA
	case StatusReservationConflict:
		return syscall.EBADE
	case StatusAbortedByHost:
		return syscall.ECANCELED
	case StatusTransientTransportError:
		return syscall.ENOLINK
	}
	if s.IsPath() {
		return syscall.ENOLINK
	}
	return syscall.EIO
}
