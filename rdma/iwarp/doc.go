// Package iwarp is a software RDMA NIC: the rdma engine's provider that needs no
// hardware. It speaks iWARP over TCP, on the same wire as iWARP adapters and as
// Linux's siw.
//
// # Layers
//
// One file per layer, each rule cites its document:
//
//   - mpa.go: MPA start-up frames and FPDU framing with CRC32C (RFC 5044),
//     enhanced connection set-up with read depths (RFC 6581); cm.go runs it
//   - ddp.go: direct data placement headers (RFC 5041)
//   - rdmap.go: RDMAP opcodes and their rules (RFC 5040)
//   - terminate.go: the Terminate message
//   - mr.go: steering tags: memory regions and type 2B windows
//   - cq.go, qp.go, tx.go, rx.go: the queues and the data path
//
// Not implemented: markers (a peer that wants them is refused, as Linux does),
// immediate data and atomics (RFC 7306), shared receive queues.
//
// # Concurrency
//
// The data path has no thread and no lock. A CQ and its QPs are driven by the
// goroutine that polls the CQ; its Poll moves bytes between the QPs' sockets and
// registered memory. Everything else (device, PD, MR, listener, connection) may
// be called from any goroutine. What crosses to the owner (a new QP, a request
// to disconnect) goes through the CQ's mailbox and wakes its descriptor.
//
// System calls of the data path never block, so they are made without telling
// the scheduler. One call moves at most 256 KiB: that bounds how long a
// stop-the-world pause can wait for it.
//
// # Buffers
//
// Transmit: headers are gathered in a staging buffer, payload of more than a few
// hundred bytes goes to the socket straight from registered memory. Receive:
// one large read brings a batch of FPDUs into a staging buffer, from which
// payload is copied to its place; the rest of a segment that has not arrived
// yet is read by the kernel directly into its place. With CRC a segment is
// staged and checked as a whole before a byte of it is placed.
//
// Memory of an MR is touched only inside Poll and Arm of the CQs, and
// Deregister waits until those that were running have returned; so after it
// returns the memory may be unmapped.
//
// # The end of a connection
//
// Conn.Disconnect is orderly: what has completed on the send queue is delivered
// (TCP gets up to Config.CloseLinger for it), then a FIN follows. QP.Close on a
// connection that nobody disconnected before is abortive: the socket is reset, so
// nothing that its send queue still holds can reach the peer after Close has
// returned. An initiator that gives up on a connection and sends its requests
// again elsewhere wants the second kind.
//
// A protocol error of the peer is answered with a Terminate message, best
// effort; the socket is then shut down and drained in the background (reading
// nothing would make the kernel send a reset that overtakes the Terminate).
//
// # Trust
//
// iWARP has no encryption and no authentication. A peer reaches exactly what
// regions and windows of the QP's protection domain open to it; keys are random.
// The data sink of a Read is named on the wire by a tag that exists for that
// purpose alone, so a Read gives no key away.
package iwarp
