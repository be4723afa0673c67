package protocol

import (
	"math"
	"math/bits"
)

// RangeOK reports whether the n units from off lie inside limit units, that is
// off+n <= limit in arithmetic that cannot wrap. It is the one place where
// numbers of a peer are added.
func RangeOK(off, n, limit uint64) bool {
	return n <= limit && off <= limit-n
}

// BlocksToBytes converts a count of blocks of 1<<shift bytes. ok is false if the
// product does not fit 64 bits.
func BlocksToBytes(blocks uint64, shift uint8) (n uint64, ok bool) {
	if shift >= 64 {
		return 0, blocks == 0
	}
	hi, lo := bits.Mul64(blocks, 1<<shift)
	return lo, hi == 0
}

// ByteRange converts a range of logical blocks to bytes: blocks of 1<<shift
// bytes from slba, in a namespace of nsze blocks. ok is false if the range does
// not lie inside the namespace, or if the bytes are beyond what a file offset
// can name (63 bits); the answer is then [StatusLBAOutOfRange].
func ByteRange(slba, blocks uint64, shift uint8, nsze uint64) (off, n int64, ok bool) {
	if !RangeOK(slba, blocks, nsze) {
		return 0, 0, false
	}
	o, ok1 := BlocksToBytes(slba, shift)
	l, ok2 := BlocksToBytes(blocks, shift)
	if !ok1 || !ok2 || !RangeOK(o, l, math.MaxInt64) {
		return 0, 0, false
	}
	return int64(o), int64(l), true
}

// MaxTransferBytes converts Identify Controller MDTS: the largest data transfer
// of one command in bytes, for a smallest page of 1<<(12+mpsmin) bytes. It
// returns 0 for no limit, also if the limit is beyond 64 bits.
func MaxTransferBytes(mdts, mpsmin uint8) uint64 {
	shift := uint(mdts) + uint(mpsmin) + 12
	if mdts == 0 || shift >= 64 {
		return 0
	}
	return 1 << shift
}
