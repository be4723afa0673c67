// Package initiator is the attaching side of NVMe over Fabrics on RDMA: it connects to
// a subsystem of a target and offers its namespaces as block devices.
//
// It implements the host's part of NVMe over Fabrics with the RDMA transport
// (discovery, Connect, controller initialisation, capsules, keyed and in-capsule data,
// keep-alive, asynchronous events) and of the NVM command set (Read, Write, Flush,
// Write Zeroes, Dataset Management). The wire formats are package protocol's, the
// connections package rdma's, the device contract package blockdev's. There is no
// in-band authentication, no multipath and no metadata.
//
// # Use
//
// Open gives the one device that a Config names; Connect gives a Session, for those who
// want its namespaces, status, statistics and events. A Device has the synchronous
// methods of blockdev.Device, and queues (blockdev.QueueDevice) for those who care
// about speed: queue i is a worker thread with its own connection and its own
// registered memory, and its user runs on that worker too.
//
// # Shape
//
// A Session lives as long as the attachment. It owns the workers, their buffer memory
// and their ledgers of requests (ioQueue), and a manager goroutine. An association is
// what comes and goes: an admin queue and I/O queues (lane), each with a connection,
// queue pair and completion queue. It is one unit: a failed work request, a lost
// connection, a request or Keep Alive without an answer in time, or an answer that
// makes no sense ends all of it, whichever queue saw it.
//
//	blockdev.Request ─► ioQueue (ledger, worker i) ─► lane (queue pair i) ─► target
//
// # Threads
//
// An ioQueue and its lane are their worker's alone: an I/O takes no lock, no goroutine
// hop and no allocation. The admin queue has a worker of its own that no I/O runs on.
// Everything that waits runs on ordinary goroutines: the manager, keep-alive,
// asynchronous events, one per connection that waits for its end. Session.mu guards the
// state that Status shows and is held for moments only.
//
// # Requests
//
// Every accepted request is answered exactly once. Commands are cut to the target's
// limits; a command is over when its response is here, its Send has completed, and the
// key that opened its data to the target is invalid again. Where the device has memory
// windows, that key covers exactly the bytes of the command, in its direction, on its
// queue; else it is that of the queue's whole buffer memory, which the target can then
// read and write at any time.
//
// The namespaces of a Session share its queues, their entries and their buffers, without
// shares: one whose requests have no answer can hold all of them, until RequestTimeout
// ends the association. Who attaches namespaces that must not hold up each other makes a
// Session for each, as rdinit does: an attachment is one namespace.
//
// # Loss of the connection
//
// All queue pairs are destroyed first, so that nothing the target still does can reach
// a buffer. Requests without an answer stay in the ledger and new ones join it. The
// manager makes a new association, with exponential backoff and jitter: at once, then
// after ReconnectDelay and so on. It checks that each namespace in use is the one that
// was attached (identifiers, block size, not smaller), because anything else would be
// writing to someone else's disk: then requests fail with ErrChanged. Then all that is
// unanswered is sent again in the order in which it was accepted. After LossTimeout
// everything waiting fails with blockdev.ErrLost, and new requests fail at once; the
// session goes on trying, and works again when it succeeds. A request under which
// association after association breaks is given up when it is older than LossTimeout
// and the oldest there is.
//
// One timeline, by default: 0 s the target's machine dies. 5 to 7.5 s: a Keep Alive has
// had no answer for KeepAlive (a killed process or a closed port is seen at once), so
// queues are torn down and requests wait. Attempts follow at once, after 0.1, 0.2, 0.4 s
// and so on up to every 5 s, each at most 15 s long. 600 s after the loss was seen:
// ErrLost.
//
// Sending a write again is safe only if the target does not carry out the lost first
// one later. rdtarget ends the old association and everything it handed to its back end
// before it takes a new one of the same host (HOSTNQN and HOSTID), so it is, from
// whatever address the host comes back if the HOSTID is of the form of
// protocol.SinglePathHostID. The same holds for the writes of a process that was killed
// if the next one is given the same Config.HostID. Linux and SPDK targets do not promise
// that; Linux hosts take the same risk.
//
// # A namespace that goes away
//
// A namespace that the target removes or disables while the association stays up is
// looked for every second, and when the target tells of a change. Until it is found with
// the same identity nothing is sent to it. Requests wait for it for RetryTimeout, counted
// from when it went, so that disabling and enabling it is a pause; then they fail with
// ErrNoNamespace, and later ones at once. With another identity they fail with
// ErrChanged. The window between a swap of two disks under one number and the target's
// word of it is the target's to close, as for every host.
//
// # Durability
//
// A Flush or FUA write that succeeds means what blockdev says, for whatever the target
// says of itself (VWC). Two cases need more than sending the command again:
//
// A failed Flush stays failed. The target's process may be restarted and its store be
// opened anew, and then it flushes successfully what is left. So the device remembers,
// and answers every later Flush and FUA write with blockdev.ErrFlushFailed until it is
// attached anew.
//
// A Flush while the target is away, with no write acknowledged since the last one that
// succeeded, succeeds at once: there is nothing that it could make durable. The first one of
// an attachment always goes to the target: it is for the writes of an earlier attachment, too.
//
// A lost write cache. Writes that were acknowledged and not flushed are in the target's
// cache. If its process dies they are still in its kernel's; if its machine dies they
// are gone, and after the reconnect reads would see older data and a Flush would
// succeed without them. So they are if its kernel failed to store them and told a
// process that has ended since. The device knows whether it has such writes. After a
// reconnect it compares what the SMART log says of power cycles and unsafe shutdowns
// with what it said before; if either differs the cache was lost, and everything fails
// with ErrCacheLost until the device is attached anew (and what is on it is checked and
// repaired like after any crash). rdtarget's power cycles change with each boot of its
// machine, and its unsafe shutdowns, in the log of the namespace, whenever a flush of its
// store failed, or had no answer when it ended. A target that counts neither, as Linux's and SPDK's,
// cannot be caught at this: a warning says so. What would close the gap for every target is to keep
// unflushed writes and send them again, as NFS clients do; nothing here stands in the
// way (namespace.mark and flushDone know what a Flush covered).
//
// # Memory
//
// Per queue: Config.BufferMemory for Alloc, 4 MiB for the synchronous methods, both
// address space until used (but pinned by RDMA hardware, and see Config.ResidentMemory); about 100 bytes of control
// memory per entry and 64 KiB of zeros. Per request in the ledger about 300 bytes,
// recycled.
package initiator
