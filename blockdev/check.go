package blockdev

import (
	"fmt"
	"unsafe"
)

// CheckRange tells whether n bytes at off are whole blocks inside a device of
// size bytes. It is the one place where offsets and lengths are compared, for
// numbers from anybody: nothing in it can wrap. n may be 0.
//
// The error is ErrOutOfRange or ErrUnaligned with the numbers.
func CheckRange(size int64, blockSize int, off, n int64) error {
	if off < 0 || n < 0 || off > size || n > size-off {
		return fmt.Errorf("%w: %d bytes at %d of a device of %d bytes", ErrOutOfRange, n, off, size)
	}
	if (off|n)&int64(blockSize-1) != 0 {
		return fmt.Errorf("%w: %d bytes at %d, the block has %d bytes", ErrUnaligned, n, off, blockSize)
	}
	return nil
}

// CheckRange is CheckRange with the device's size and block.
func (in *Info) CheckRange(off, n int64) error {
	return CheckRange(in.Size, in.BlockSize, off, n)
}

// CheckBuffer is ErrUnaligned if p does not lie as MemAlign asks.
func (in *Info) CheckBuffer(p []byte) error {
	if in.MemAlign <= 1 || len(p) == 0 || uintptr(unsafe.Pointer(unsafe.SliceData(p)))%uintptr(in.MemAlign) == 0 {
		return nil
	}
	return fmt.Errorf("%w: the buffer must start at a multiple of %d", ErrUnaligned, in.MemAlign)
}
