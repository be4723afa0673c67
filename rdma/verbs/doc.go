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
// CQ.FD is the completion channel. One event is asked for at a time: Arm takes it, arms the device anew and polls
// once more, as the race between the two demands; what that Poll brought is kept for the next Poll and reported by
// again. While the event is still to come the device is armed, or about to tell, and Arm has nothing to do.
//
// # Connections
//
// All connection identifiers of the process share one event channel, read by one goroutine through
// the runtime's poller. Each event is copied and acknowledged in the same critical section in which
// it was fetched; identifiers are destroyed, and queue pairs taken from them, under that same lock, so
// that no destruction ever waits for an event, or meets one half way. iWARP drivers make whoever destroys a
// queue pair or identifier wait while its request is unanswered (siw: 10 s, or as long as TCP tries): a
// goroutine does it, and Close of the completion queue and the protection domain wait for that.
//
// Retry counts that are 0 in a ConnParam become 7 (for ever, for RNR), and the RNR timer that the
// connection manager leaves at 655 ms is set to 0.64 ms: a 0 there is in practice an omission. On rxe, which takes a
// Retry of 7 for "for ever" too, it becomes 6. The connecting side's counts are in force for both.
//
// The device, port and GID are those that the kernel's routing finds for an address; nothing is chosen by
// its number.
//
// # Ends of connections
//
// InfiniBand and RoCE do not tell the peer of a queue pair that has failed; the provider disconnects
// it when its owner polls the failed completion. An orderly end is told from a failure by the state of
// the queue pair at that moment. On iWARP the adapter tells failures by asynchronous events on the side
// that found them; the other side can only see that the connection has ended.
//
// # Asynchronous events and removed devices
//
// Each device's asynchronous events are read by a goroutine and acknowledged at once. One about a queue pair
// ends its connection, one about a completion queue those of its queue pairs, a fatal one of the device all
// of the device; a port that goes down or comes up is logged only, since transports try again. When a device is
// removed (the connection manager and the kernel's announcements tell of that) [rdma.Device.Removed] is closed, its
// connections end, what is outstanding is flushed, and nothing new can be made on it. Listeners on its address return
// an error from Accept, and try to listen again at each later Accept. The kernel may wait with the removal until no
// process has the device open: it is let go when the last PD and CQ on it are closed. A device that comes
// later is found by its address as usual.
//
// # What devices do that the contract does not say
//
// A device serves its peer's Reads and Writes, and flushes, without anybody polling
// ([rdma.DeviceInfo.Autonomous]). Posts to a queue pair that has failed are flushed by this package, because
// some devices (siw) refuse them. A queue pair of siw is failed before it is disconnected: siw would forget the Reads
// that wait for their answers. A receive that completes with "remote invalid request" (rxe, for a message
// longer than its buffer) is reported as StatusLocalLength, the only meaning it can have there. A fence is left out of
// Reads on iWARP, where Reads are served in order anyway: siw stops for ever at one. Inline Sends with Invalidate, at
// which siw stops too, leave it from a registered copy.
//
// # What devices do not keep
//
// Measured with Linux 6.1 and rdma-core 44; TestContract names each case, and nothing else is excepted.
//
//   - rxe checks an access through a memory window against the bounds of the memory region, not those of the window,
//     and lets a peer invalidate windows of other connections by Send with Invalidate. A window is no protection there
//     from a peer that has one; rights, and keys of other connections, are checked.
//   - siw lets a peer read all registered memory of the protection domain, also without AccessRemoteRead.
//   - siw serves no Reads of its peer while its own send queue waits for Reads, because of a fence or because as many
//     as ORD are outstanding: two sides that both wait stand still for ever. In NVMe over Fabrics only the target reads.
//   - siw answers an empty Read that had to wait with as many bytes as it has sent before, and the requester ends the
//     connection.
//   - siw, on the accepting side, serves as many Reads as were asked for, up to 128, whatever
//     ConnParam.ResponderResources says.
//   - siw ends a connection after an unknown key, a missing receive or a Terminate of the peer without an
//     asynchronous event: Err is ErrDisconnected there, as after an orderly end. A Read that the peer refuses comes back
//     flushed.
//   - siw's library does not tell that a received message has invalidated a key.
package verbs
