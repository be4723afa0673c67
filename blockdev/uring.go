package blockdev

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// uring is a minimal io_uring: reads and writes of one descriptor or another,
// submitted in batches, no system call to collect. It has one owner, the thread of a worker.
//
// The structures are those of linux/io_uring.h; sizes are asserted below.
type uring struct {
	fd      int
	ringMem []byte
	sqeMem  []byte

	sqTail, sqMask    *uint32
	sqHead            *uint32
	cqHead, cqTail    *uint32
	cqMask            uint32
	cqes              []uringCQE
	sqes              []uringSQE
	tail              uint32 // of what was written, published by submit
	queued            uint32 // written and not taken by the kernel yet
	entries, inKernel uint32
}

type uringParams struct {
	sqEntries, cqEntries, flags, threadCPU, threadIdle, features, wqFD uint32
	_                                                                  [3]uint32
	sq                                                                 struct {
		head, tail, ringMask, ringEntries, flags, dropped, array, _ uint32
		_                                                           uint64
	}
	cq struct {
		head, tail, ringMask, ringEntries, overflow, cqes, flags, _ uint32
		_                                                           uint64
	}
}

type uringSQE struct {
	opcode, flags uint8
	ioprio        uint16
	fd            int32
	off           uint64
	addr          uint64
	len           uint32
	rwFlags       uint32
	userData      uint64
	_             [3]uint64
}

type uringCQE struct {
	userData uint64
	res      int32
	flags    uint32
}

var (
	_ = [1]struct{}{}[unsafe.Sizeof(uringParams{})-120]
	_ = [1]struct{}{}[unsafe.Sizeof(uringSQE{})-64]
	_ = [1]struct{}{}[unsafe.Sizeof(uringCQE{})-16]
)

const (
	uringSetupClamp        = 1 << 4
	uringSetupCoopTaskrun  = 1 << 8  // Linux 5.19
	uringSetupSingleIssuer = 1 << 12 // Linux 6.0

	uringFeatSingleMmap = 1 << 0
	uringFeatNoDrop     = 1 << 1
	uringFeatRWCurPos   = 1 << 3 // came with uringOpRead and uringOpWrite, Linux 5.6

	uringOpRead  = 22
	uringOpWrite = 23

	uringOffSQRing = 0
	uringOffSQEs   = 0x10000000
)

// newURing must be called on the thread that will use it. entries is a power of two and
// bounds what is in flight.
func newURing(entries int) (_ *uring, err error) {
	p := uringParams{flags: uringSetupClamp | uringSetupCoopTaskrun | uringSetupSingleIssuer}
	fd, err := uringSetup(entries, &p)
	if err == unix.EINVAL { // an older kernel
		p = uringParams{flags: uringSetupClamp}
		fd, err = uringSetup(entries, &p)
	}
	if err != nil {
		return nil, fmt.Errorf("io_uring: %w", err)
	}
	r := &uring{fd: fd}
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	if need := uint32(uringFeatSingleMmap | uringFeatNoDrop | uringFeatRWCurPos); p.features&need != need {
		return nil, errors.New("io_uring: the kernel's is too old (Linux 5.6 has what is needed)")
	}
	size := max(int(p.sq.array+4*p.sqEntries), int(p.cq.cqes+16*p.cqEntries))
	if r.ringMem, err = unix.Mmap(fd, uringOffSQRing, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return nil, fmt.Errorf("io_uring: map: %w", err)
	}
	if r.sqeMem, err = unix.Mmap(fd, uringOffSQEs, int(64*p.sqEntries), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return nil, fmt.Errorf("io_uring: map: %w", err)
	}
	at := func(off uint32) *uint32 { return (*uint32)(unsafe.Pointer(&r.ringMem[off])) }
	r.sqHead, r.sqTail, r.sqMask = at(p.sq.head), at(p.sq.tail), at(p.sq.ringMask)
	r.cqHead, r.cqTail, r.cqMask = at(p.cq.head), at(p.cq.tail), *at(p.cq.ringMask)
	r.sqes = unsafe.Slice((*uringSQE)(unsafe.Pointer(&r.sqeMem[0])), p.sqEntries)
	r.cqes = unsafe.Slice((*uringCQE)(unsafe.Pointer(&r.ringMem[p.cq.cqes])), p.cqEntries)
	for i := range p.sqEntries { // entry i of the queue is always SQE i
		*at(p.sq.array + 4*i) = i
	}
	r.entries = p.sqEntries
	r.tail = atomic.LoadUint32(r.sqTail)
	return r, nil
}

func uringSetup(entries int, p *uringParams) (int, error) {
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, uintptr(entries), uintptr(unsafe.Pointer(p)), 0)
	if errno != 0 {
		return -1, errno
	}
	unix.CloseOnExec(int(fd))
	return int(fd), nil
}

// room reports whether another operation may be queued.
func (r *uring) room() bool { return r.queued+r.inKernel < r.entries }

// queue writes an operation; submit hands it to the kernel. p must stay where and
// what it is until the completion with this id. Call it only if there is room.
func (r *uring) queue(op uint8, fd int, p []byte, off int64, id uint64) {
	e := &r.sqes[r.tail&*r.sqMask]
	*e = uringSQE{opcode: op, fd: int32(fd), off: uint64(off), addr: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(p)))), len: uint32(len(p)), userData: id}
	r.tail++
	r.queued++
	atomic.StoreUint32(r.sqTail, r.tail)
}

// submit hands over what is queued. What the kernel does not take now (it may be short of memory) stays.
func (r *uring) submit() {
	if r.queued == 0 {
		return
	}
	// The kernel issues everything as IOCB_NOWAIT, so this does not wait.
	n, _, errno := unix.RawSyscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), uintptr(r.queued), 0, 0, 0, 0)
	if errno == 0 {
		r.queued -= uint32(n)
		r.inKernel += uint32(n)
	}
}

// next takes a completion.
func (r *uring) next() (id uint64, res int32, ok bool) {
	head := *r.cqHead // ours alone
	if head == atomic.LoadUint32(r.cqTail) {
		return 0, 0, false
	}
	e := &r.cqes[head&r.cqMask]
	id, res = e.userData, e.res
	atomic.StoreUint32(r.cqHead, head+1)
	r.inKernel--
	return id, res, true
}

// ready reports whether next would give something.
func (r *uring) ready() bool { return *r.cqHead != atomic.LoadUint32(r.cqTail) }

// close is called when nothing is in flight.
func (r *uring) close() {
	if r.sqeMem != nil {
		unix.Munmap(r.sqeMem)
	}
	if r.ringMem != nil {
		unix.Munmap(r.ringMem)
	}
	unix.Close(r.fd)
}
