// Package target is the serving side of NVMe over Fabrics on RDMA: it gives
// block devices to hosts as namespaces of one subsystem.
//
// It implements the fabrics target as Linux hosts, SPDK and this project's own
// initiator expect it: dynamic controllers, admin and I/O queues, the NVM
// command set, a discovery subsystem, a host allow list, keep-alive,
// asynchronous events. The wire formats are package protocol's, the connections
// package rdma's, the storage package blockdev's. There is no authentication.
//
// # Shape
//
// The files follow the split of the Linux target: target.go (life cycle),
// listener.go (connection requests), subsystem.go, namespace.go, controller.go
// (associations), keepalive.go, fabrics.go, admin.go, identify.go, features.go,
// logs.go, aer.go, discovery.go, access.go (who may connect), io.go (the NVM
// commands), and the transport side: lane.go (workers and their memory),
// queue.go (a queue pair's life) and rdma.go (capsules, transfers, credits).
//
// # Threads
//
// Every I/O queue lives on one of Config.Workers I/O workers, the least loaded
// one at the time it connects. The queue pair, its completion queue, its
// requests, and the data buffers of the worker have that one owner: an I/O runs
// from capsule to response without a lock, a goroutine hop or an allocation
// (storage that has to wait is the exception: package blockdev takes it to an
// executor goroutine and back). All admin queues, of discovery controllers too,
// live on one more worker that never polls and never runs a back end, so that no
// amount of I/O can delay a Keep Alive. What may block (flush at shutdown, the
// fencing of an old association, registration of memory) runs on goroutines of
// its own.
//
// Locks, in the order in which they may be taken: Target.mu (controllers,
// listeners, hosts, namespaces), controller.mu (queues, state, error log),
// lane.mu (devices). None is held while anything blocks, none is taken on the
// path of an I/O that succeeds.
//
// # A request
//
// Each queue has a fixed set of request contexts; see requestState for the
// states and the order they come in. The command is copied out of the receive
// buffer, so the peer's next message cannot change it. A receive buffer is
// posted again just before the response is (with in-capsule data it has been the
// write's source until then), so a peer that exceeds its queue depth meets an
// empty receive queue and nothing grows. A request that finds no buffer, no room
// in the send queue or no read credit waits in a named, counted state, first
// come first served. Nothing fails for want of memory.
//
// # Buffers
//
// Data moves through one arena per worker, mapped and registered once
// (Config.BufferMemory). A buffer belongs to exactly one request, and to the
// back end or the NIC as long as either may touch it: it returns to the arena
// when the completion of the response has been polled, or, when the connection
// dies, after the queue pair is destroyed and the back end has answered. A write
// is executed only after its RDMA Read completed with success.
//
// Of several namespaces each holds at most as much of a worker's buffers as is free besides,
// so that one whose storage hangs leaves room for the others. An association holds at most half of them, so that a host that
// does not take its data leaves room for others, and is cut off when an RDMA Read
// or a response of it is unfinished for Config.TransferTimeout.
//
// An iWARP adapter shows the peer the key of the memory that an RDMA Read puts data into, and the peer may write
// there. On such a device each connection has data buffers and a protection domain of its own, so that nothing a
// host learns opens what is another's (laneDevice.exposed); a part of its own commands' data is all it can spoil. The
// software NIC makes up a key for each Read, InfiniBand and RoCE show none.
//
// Memory is bounded by Config: per worker BufferMemory (the admin worker has
// 16 MiB); per queue its depth times (64 + InCapsule) bytes of receive buffers,
// which an operating system without RDMA hardware provides only as they are used,
// and about 1 KiB per entry of depth for requests and work requests; at most
// MaxQueues queues, of which at most MaxPending have not completed a Connect. On iWARP adapters each
// queue has up to 64 KiB of data buffers per entry of depth besides (at least 2 × MaxIO, at most
// BufferMemory), and the workers' are not used.
//
// # An association
//
// A controller and its queues are one unit. Loss of the admin queue, keep-alive
// expiry and a broken protocol end all of it. A new admin Connect of the same
// host over the same path means that the host lost the old association: the old
// one is torn down and everything it handed to the back end has ended before the
// Connect is answered, so that a late write cannot land on top of what the host
// does next.
//
// What the same path is, the HOSTID says. One in the form of
// protocol.SinglePathHostID, which package initiator uses, has one association at
// a time: HOSTNQN, HOSTID and SUBNQN are compared, and the addresses are not. Any
// other HOSTID may belong to a host that has several paths at once (Linux with
// multipath), so the listener's address and the remote IP must be the same too;
// the old association of such a host that comes back from another address is left
// to its keep-alive timer, and until then a late write of it can land.
//
// # Durability
//
// A response to Flush, or to a write with FUA, is sent after the store has said that
// it is done. What it has failed is failed for all hosts from then on, as package
// blockdev says. That ends with the process, and acknowledged writes that were not
// flushed may be lost with the machine; a host learns of either when it comes back, by
// numbers of the SMART log that it compares with those it knew: power cycles change with
// each boot (Config.PowerCycles), unsafe shutdowns when a store may have lost writes
// (Config.UnsafeShutdowns, for which the caller has to remember failures beyond the
// process: blockdev.Options.OnFlushFailed tells of them). The log of a namespace has its own
// number, that of the controller the sum, which changes with namespaces that come and go.
//
// # What it does not do
//
// It reads no configuration, environment or signals, exports no metrics (Stats
// and Status return what cmd turns into them), and does not close the devices it
// serves.
package target
