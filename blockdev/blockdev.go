package blockdev

import "sync/atomic"

// Access to a Device is by absolute byte offset; every offset and length is a
// multiple of Info.BlockSize and inside Info.Size, or the call fails with
// ErrUnaligned or ErrOutOfRange and does nothing.

// Info describes a device. Everything in it comes from the store itself.
type Info struct {
	Name      string // for messages and status: the path, "mem:1G", a target's NQN and NSID
	Size      int64  // bytes, a multiple of BlockSize
	BlockSize int    // logical block in bytes: unit of addressing and of atomicity; 512 … 65536, a power of two
	PhysBlock int    // physical block in bytes: the write size without read-modify-write; >= BlockSize
	OptimalIO int    // preferred I/O size in bytes, 0 if unknown
	MaxIO     int    // largest single read or write in bytes, 0 = no limit
	MemAlign  int    // alignment that buffers need in bytes (direct I/O), 0 or 1 = none

	ReadOnly     bool
	WriteCache   bool // a completed write may be lost by a crash until Flush, or FUA
	FUA          bool // WriteFUA, which is honoured in any case, costs less than a write and a Flush
	Discard      bool // Discard frees space
	DiscardZeros bool // discarded blocks read as zeros
	WriteZeroes  bool // Zero is better than writing zeros
	Rotational   bool

	// UUID identifies the store itself for ever and the same on all paths; zero if it has none.
	UUID [16]byte
}

// WriteFlags modify a write or a zeroing.
type WriteFlags uint8

const (
	// WriteFUA: the data is on stable storage when the call returns.
	WriteFUA WriteFlags = 1 << iota
	// ZeroNoUnmap: Zero must leave the space allocated.
	ZeroNoUnmap
)

// Device is a fixed-block random-access store. Methods may be called
// concurrently. There are no short counts: a call does all it was asked or
// returns an error, and then the range it was given is undefined. A call for no
// bytes at an offset that is good does nothing and returns nil. A block is never torn: a read that
// runs beside a write of the same block sees all of it or nothing.
//
// Durability: a write, zeroing or discard that has returned nil is seen by every
// later read. It is on stable storage only after a Flush that began later has
// returned nil, or if WriteFUA was set, or if Info.WriteCache is false. After a
// failed Flush (or FUA write) durability of what was written earlier is unknown: the device
// answers every later Flush and FUA with ErrFlushFailed until it is opened anew.
type Device interface {
	// Info tells the current geometry; it may change in size only.
	Info() Info
	ReadAt(p []byte, off int64) error
	WriteAt(p []byte, off int64, flags WriteFlags) error
	// Zero makes n bytes at off read as zeros.
	Zero(off, n int64, flags WriteFlags) error
	// Discard is a hint that the content is not needed. It promises zeros only if
	// Info.DiscardZeros, and does nothing and returns nil if not Info.Discard.
	Discard(off, n int64) error
	Flush() error
	// Close waits for running calls; later calls, of Close too, return ErrClosed. It does
	// not promise a Flush.
	Close() error
}

// TryDevice is a Device that can do some calls without waiting for a slow
// medium. The Try methods either do the whole call at memory speed and return nil or its
// error, or do nothing (or: nothing that a repetition would not overwrite with
// the same) and return ErrWouldBlock: then make the ordinary call where waiting is allowed.
type TryDevice interface {
	Device
	TryReadAt(p []byte, off int64) error
	TryWriteAt(p []byte, off int64, flags WriteFlags) error
}

// Resizer is a Device whose store may grow under it.
type Resizer interface {
	// Refresh looks at the store's size again. Growth is taken over; a shrink is
	// refused with an error and the old size stays.
	Refresh() (Info, error)
}

// Watchable is a Device whose writes can be lost without anybody hearing of it: the kernel
// tells of a failed write-back once, and if the process that is told is killed before it has
// OnFlushFailed remember it, or while it still waits in the kernel, nobody knows.
type Watchable interface {
	Device
	// Watch is called before the device is used. busy is above zero while a flush or a durable
	// write is with the kernel or its failure is being reported; in memory that outlives the
	// process it tells the next one that this one was killed at such a moment. If it was, doubt is
	// true: the next Flush then asks the file system as a whole whether something was lost, and
	// fails if so. Disks cannot be asked.
	Watch(busy *atomic.Uint32, doubt bool)
}
