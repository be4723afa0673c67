// Package blockdev defines what a block device promises, in the synchronous form
// (Device) and the asynchronous one bound to a worker (Queue), and has the back
// ends: files, raw block devices, memory, null, and anything that was written
// for go-nbd (FromBackend). Package blockdevtest holds every one of them to the contract.
//
// # Promises
//
// All or an error, never a short count. Durable after a Flush that began later, or with
// WriteFUA; after one failed Flush never again. A block is never torn, neither by
// a crash (that is the medium's promise) nor between a write and a read at the same time.
// What Info tells is asked of the store, and what the store cannot do is done with what it
// can: zeroing goes from unmapping to writing zeros, a FUA write from RWF_DSYNC to fdatasync.
//
// # Concurrency
//
// Devices may be called from any goroutine. A Queue belongs to its worker's thread,
// and so does every callback. An Executor may be shared by all.
//
// # Buffers
//
// A buffer belongs to the callee while a call runs, and from Submit until Done.
// Queues made by NewQueue have memory of their own for those who want it and take any other.
//
// # Three ways to do I/O
//
// What is in the page cache, and buffered writes that are only a copy, are done on the
// worker by RWF_NOWAIT and its substitutes (writeGuard): 3 µs for 4 KiB; writes only if
// all queues of the worker are on one file system or disk (neighbours). What has to wait for a
// medium and is plain (direct I/O, cold reads) goes through an io_uring that is a source of the
// worker. All else (flush, FUA, zero, discard, and everything where there is no
// io_uring) runs on the bounded goroutines of an Executor. Measured on two cores that were busy with
// other things, 4 KiB random reads of one file by one worker, direct unless told otherwise:
//
//	                     ring          executor      fio, io_uring
//	depth 1              11–19k IOPS   5–10k         12–16k
//	depth 32             44–73k        15–26k        53–76k
//	cold cache, depth 1  9–20k         3–10k
//
// and for a cached read the ring is no match for a plain call: 26 µs against 3.
// A hop through the executor costs 50 µs and more when the machine is busy, most of it the Go
// scheduler waking a thread; programs with workers that poll should set GOMAXPROCS above the number of workers.
//
// # What this package does not do
//
// It creates no files, caches nothing, retries nothing, orders nothing: requests in flight
// together have no order. It keeps no latency histograms; who submits measures.
package blockdev
