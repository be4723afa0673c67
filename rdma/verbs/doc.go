// Package verbs is the RDMA provider on libibverbs and librdmacm: InfiniBand, RoCE and iWARP
// adapters, and the kernel's software devices rdma_rxe and siw, do the work.
//
// The libraries are opened when [New] is called (dlopen); a program that contains this package
// starts and works without them, and New then returns an error that is [rdma.ErrNotSupported] and
// says what to install. Builds without cgo, for other systems, or with the tag noverbs contain a
// New that always does so. No header of rdma-core is needed to build; abi.h declares what is used,
// and TestABI compares it with the real headers.
//
// # Data path
//
// Work requests are checked in Go (limits, local keys, bounds and rights, as [rdma.QP] promises),
// written to a ring in C memory and handed to the device in one call per PostSend or PostRecv.
// Poll takes completions in one call. There is no lock and no allocation on that path. A queue
// accepts exactly as many requests as it was made for, whatever the device rounded up to.
//
// CQ.FD is the completion channel. Arm takes what events there are, arms the device and polls
// once more, as the race between the two demands; what that Poll brought is kept for the next Poll
// and reported by again.
//
// # Connections
//
// All connection identifiers of the process share one event channel, read by one goroutine through
// the runtime's poller. Each event is copied and acknowledged in the same critical section in which
// it was fetched, and identifiers and queue pairs are destroyed under that same lock, so that no
// destruction ever waits for an event, or meets one half way.
//
// Retry counts that are 0 in a ConnParam become 7 (for ever, for RNR), and the RNR timer that the
// connection manager leaves at 655 ms is set to 0.64 ms: a 0 there is in practice an omission.
//
// # Ends of connections
//
// InfiniBand and RoCE do not tell the peer of a queue pair that has failed; the provider disconnects
// it when its owner polls the failed completion. An orderly end is told from a failure by the state of
// the queue pair at that moment. On iWARP the adapter tells failures by asynchronous events on the side
// that found them; the other side can only see that the connection has ended.
//
// # What devices do that the contract does not say
//
// A device serves its peer's Reads and Writes, and flushes, without anybody polling
// ([rdma.DeviceInfo.Autonomous]). Posts to a queue pair that has failed are flushed by this package, because
// some devices (siw) refuse them. A receive that completes with "remote invalid request" (rxe, for a message
// longer than its buffer) is reported as StatusLocalLength, the only meaning it can have there.
package verbs
