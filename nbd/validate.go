package nbd

import "rdblk/blockdev"

// limits are what a connection's requests are held to.
type limits struct {
	flags      uint16 // transmission flags as the client was told them
	structured bool   // structured replies were negotiated
	maxPayload uint32 // largest read or write in bytes
}

// Reasons, for the text of structured errors and for tests. They name the rule that was broken.
const (
	whyCommand    = "unknown command, or one that was not offered"
	whyFlags      = "command flag that is unknown, not offered, or not for this command"
	whyFlushRange = "FLUSH with an offset or length"
	whyReadOnly   = "export is read-only"
	whyZero       = "length is zero"
	whyAlign      = "offset or length is not a multiple of the minimum block size"
	whyRange      = "range is not inside the export"
	whyTooLong    = "length is over the maximum payload"
	whyShutdown   = "server is shutting down"
)

// validate decides on a request before any work is done for it: 0, or the error
// for the reply and the rule that was broken. It knows nothing but its arguments.
// The order of the rules is part of it: the first that is broken names the error.
//
// DISC always passes; it has no reply that could carry an error.
//
// A length of zero, whose meaning the protocol leaves open, is refused. Nobody
// asks for nothing on purpose, but a client that cut 4 GiB down to 32 bits does,
// and must not be told that it is done.
func validate(r *request, in *blockdev.Info, l *limits) (Errno, string) {
	var allowed uint16
	if l.flags&flagSendFUA != 0 {
		// On every command, to be ignored where it means nothing ("Command flags").
		allowed = cmdFlagFUA
	}
	writes := false
	outside := EINVAL
	switch r.cmd {
	case cmdDisc:
		return 0, ""
	case cmdRead:
		// SEND_DF is offered only with structured replies.
		if l.structured && l.flags&flagSendDF != 0 {
			allowed |= cmdFlagDF
		}
	case cmdWrite:
		writes = true
		outside = ENOSPC
	case cmdFlush:
		if l.flags&flagSendFlush == 0 {
			return EINVAL, whyCommand
		}
		if r.flags&^allowed != 0 {
			return EINVAL, whyFlags
		}
		if r.off != 0 || r.length != 0 {
			return EINVAL, whyFlushRange
		}
		return 0, ""
	case cmdTrim:
		writes = true
	case cmdWriteZeroes:
		writes = true
		outside = ENOSPC
		allowed |= cmdFlagNoHole
	default:
		return EINVAL, whyCommand
	}
	if writes && (l.flags&flagReadOnly != 0 || in.ReadOnly) {
		// Before the flags: FUA is not offered on a read-only export, and EPERM tells
		// more than EINVAL for it. TRIM and WRITE_ZEROES are not offered there either.
		return EPERM, whyReadOnly
	}
	if r.cmd == cmdTrim && l.flags&flagSendTrim == 0 || r.cmd == cmdWriteZeroes && l.flags&flagSendWriteZeroes == 0 {
		return EINVAL, whyCommand
	}
	if r.flags&^allowed != 0 {
		return EINVAL, whyFlags
	}
	if r.length == 0 {
		return EINVAL, whyZero
	}
	if (r.off|uint64(r.length))&uint64(in.BlockSize-1) != 0 {
		return EINVAL, whyAlign
	}
	if size := uint64(in.Size); r.off > size || uint64(r.length) > size-r.off {
		return outside, whyRange
	}
	if r.length > l.maxPayload && (r.cmd == cmdRead || r.cmd == cmdWrite) {
		// EOVERFLOW is only for reads with structured replies ("Error values").
		if r.cmd == cmdRead && l.structured {
			return EOVERFLOW, whyTooLong
		}
		return EINVAL, whyTooLong
	}
	return 0, ""
}
