package nbd

import (
	"math/bits"

	"rdblk/blockdev"
)

// transmissionFlags tells what an export offers, from nothing but the device's
// Info and whether the client has negotiated structured replies.
//
// FLUSH is always there: a device without a cache answers it at once. So is FUA
// on a writable export, since a device that does not know it gets the write and a Flush.
// CAN_MULTI_CONN is true of every blockdev.Device: see "Durability" in the package comment.
// CACHE, RESIZE, FAST_ZERO are not offered: nothing below them would do what the client hopes for.
func transmissionFlags(in *blockdev.Info, structured bool) uint16 {
	f := flagHasFlags | flagSendFlush | flagCanMultiConn
	if structured {
		f |= flagSendDF
	}
	if in.Rotational {
		f |= flagRotational
	}
	if in.ReadOnly {
		return f | flagReadOnly
	}
	f |= flagSendFUA
	if in.Discard {
		f |= flagSendTrim
	}
	if in.WriteZeroes {
		f |= flagSendWriteZeroes
	}
	return f
}

// blockSizes gives the NBD_INFO_BLOCK_SIZE values ("Size constraints"). maxPayload is the
// server's limit for this device in bytes.
func blockSizes(in *blockdev.Info, maxPayload int) (minimum, preferred, maximum uint32) {
	minimum = uint32(in.BlockSize)
	// What avoids read-modify-write, and at least 4096: the page is what caches on
	// both sides work with. It has to be a power of two and to fit a request.
	p := max(in.BlockSize, in.PhysBlock, 4096)
	p = 1 << (bits.Len(uint(p)) - 1)
	for p > maxPayload && p > in.BlockSize {
		p >>= 1
	}
	return minimum, uint32(p), uint32(maxPayload)
}
