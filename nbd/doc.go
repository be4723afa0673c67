// Package nbd serves block devices by the Network Block Device protocol, as its
// document proto.md defines it: fixed newstyle negotiation, simple and structured
// replies, FLUSH, FUA, TRIM, WRITE_ZEROES and several connections per export.
// There is no TLS, no oldstyle negotiation and no BLOCK_STATUS; options and commands that are
// not offered are refused with the error that the protocol has for it.
//
// # Two phases
//
// The handshake runs on an ordinary goroutine per connection with a deadline; it
// is bounded in time, bytes and options, and so is the number of connections in
// it. Then the socket's descriptor moves to the worker of one of the device's
// queues (blockdev.Queue) and the connection becomes a source of that worker's
// loop: what one receive brings is submitted at once, and what was answered since
// leaves with one send. Nothing is locked, handed over or allocated per request.
//
// A device that has queues of its own (blockdev.QueueDevice) gives the workers;
// a client's connections are spread over them. For other devices the server has
// workers and makes queues on them.
//
// # Ownership of memory
//
// The data of a request lies in a buffer from Queue.Alloc from the moment its
// header is understood until the device has answered (write) or the reply is in
// the socket (read). A request that finds no buffer waits; the connections of a queue are served first
// come first served, and a connection whose request waits does not read further ones.
// A client that stops halfway through a payload or does not take its replies
// keeps buffers that others want: after a second its data moves to memory of its own, of which
// there is so much (Config.SpillMemory); then those who have stood still longest are ended.
//
// # Errors
//
// A request that fails is answered with its error and nothing else happens. A
// connection ends for what leaves the stream without meaning (a wrong magic
// number), for a hang-up, for a client that does not move for Config.StallTimeout in the middle of
// a request or reply, and on Shutdown and Close.
//
// # Durability
//
// NBD's promise is the device's: a write that was answered is stable after a
// FLUSH on any connection that began later, because all connections of an export
// reach the same device and its Flush covers everything the device has answered, wherever it
// came from. That makes CAN_MULTI_CONN true. FUA is passed on
// where the device honours it; elsewhere the write is followed by a Flush before it is answered.
package nbd
