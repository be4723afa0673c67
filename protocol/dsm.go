package protocol

import (
	"encoding/binary"
	"iter"
)

// DSMRangeSize is the size of one Dataset Management range in bytes.
const DSMRangeSize = 16

// MaxDSMRanges is the largest number of ranges in one command; hosts transfer
// room for all of them however many there are.
const MaxDSMRanges = 256

// DSMRange is one range of Dataset Management (NVM Command Set, "Dataset
// Management - Range Definition").
type DSMRange struct {
	CATTR uint32 // context attributes
	NLB   uint32 // blocks, not 0's based; 0 is a range without effect
	SLBA  uint64
}

// DSMRanges is the data of a Dataset Management command, a view of the ranges.
type DSMRanges []byte

// DSMRangesView returns the first n ranges of b. ok is false if b is too short
// for them. n comes from [Command.DSMRangeCount].
func DSMRangesView(b []byte, n int) (r DSMRanges, ok bool) {
	if n < 0 || n > MaxDSMRanges || len(b) < n*DSMRangeSize {
		return nil, false
	}
	return b[: n*DSMRangeSize : n*DSMRangeSize], true
}

// Len returns the number of ranges.
func (r DSMRanges) Len() int { return len(r) / DSMRangeSize }

// At returns range i, 0 <= i < Len.
func (r DSMRanges) At(i int) DSMRange {
	b := r[i*DSMRangeSize : (i+1)*DSMRangeSize]
	return DSMRange{
		CATTR: binary.LittleEndian.Uint32(b[0:]),
		NLB:   binary.LittleEndian.Uint32(b[4:]),
		SLBA:  binary.LittleEndian.Uint64(b[8:]),
	}
}

// All returns the ranges in order.
func (r DSMRanges) All() iter.Seq[DSMRange] {
	return func(yield func(DSMRange) bool) {
		for i := range r.Len() {
			if !yield(r.At(i)) {
				return
			}
		}
	}
}

// Inside reports whether every range lies in a namespace of nsze blocks.
func (r DSMRanges) Inside(nsze uint64) bool {
	for i := range r.Len() {
		if d := r.At(i); !RangeOK(d.SLBA, uint64(d.NLB), nsze) {
			return false
		}
	}
	return true
}

// AppendDSMRange appends the 16 bytes of one range.
func AppendDSMRange(b []byte, d DSMRange) []byte {
	b = binary.LittleEndian.AppendUint32(b, d.CATTR)
	b = binary.LittleEndian.AppendUint32(b, d.NLB)
	return binary.LittleEndian.AppendUint64(b, d.SLBA)
}

// PutDSMRange writes the 16 bytes of one range to the start of b.
func PutDSMRange(b []byte, d DSMRange) {
	_ = b[DSMRangeSize-1]
	binary.LittleEndian.PutUint32(b[0:], d.CATTR)
	binary.LittleEndian.PutUint32(b[4:], d.NLB)
	binary.LittleEndian.PutUint64(b[8:], d.SLBA)
}
