package blockdev

import "rdblk/internal/worker"

// Op is what a Request asks for.
type Op uint8

// Operations.
const (
	OpRead Op = iota
	OpWrite
	OpZero
	OpDiscard
	OpFlush
	NumOps
)

func (o Op) String() string {
	switch o {
	case OpRead:
		return "read"
	case OpWrite:
		return "write"
	case OpZero:
		return "zero"
	case OpDiscard:
		return "discard"
	case OpFlush:
		return "flush"
	}
	return "unknown"
}

// Request is one asynchronous operation. Its user allocates and reuses it; from
// Queue.Submit until Done is called it, and Buf, belong to the queue.
type Request struct {
	Op    Op
	Flags WriteFlags
	Off   int64
	Len   int64  // zero, discard: bytes; read, write: len(Buf)
	Buf   []byte // read, write
	Err   error  // the result when Done is called

	// Done is called once per submission, on the queue's worker, possibly from inside
	// Submit. It may submit again.
	Done func(*Request)
	// User is the user's own.
	User any

	// The queue's, while it owns the request.
	next *Request
	pos  int // bytes of a read or write that are done
}

// Queue is an asynchronous way to a Device, bound to one worker: all methods are
// called on that worker's thread, none blocks, none allocates on the path of an I/O.
// It accepts any number of requests (the user bounds them); each is answered
// exactly once, and a failed one does not disturb the others. Requests in flight together have no order.
type Queue interface {
	// Info is the device's current Info.
	Info() Info
	// Alloc gives an n byte buffer from the queue's bounded memory, or nil when there
	// is none now: wait for a Free. n is at most MaxAlloc.
	Alloc(n int) []byte
	Free(b []byte)
	MaxAlloc() int
	// Submit starts r. For read and write, Buf is (part of) a buffer from Alloc of this
	// queue, unless the queue says that it takes others. A request may be larger than Info.MaxIO; the queue splits it.
	Submit(r *Request)
	// Worker is the loop that the queue lives on.
	Worker() *worker.Worker
	// Close is called when no request is outstanding. It does not close the device.
	Close()
}

// QueueDevice is a Device that has queues of its own (a remote device: one per
// connection). Devices without get them from NewQueue.
type QueueDevice interface {
	Device
	// NumQueues is how many independent queues there are.
	NumQueues() int
	// OpenQueue returns a handle on queue i mod NumQueues. Several handles on one
	// queue share its worker and memory. May be called from any goroutine.
	OpenQueue(i int) (Queue, error)
}
