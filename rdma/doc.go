// Package rdma is the verbs engine: the part of the verbs model that a block
// storage target and initiator need, in front of interchangeable providers.
//
// The words are the field's own: a Device has protection domains (PD), memory
// regions (MR) and windows (MW) with keys, completion queues (CQ), reliable
// connected queue pairs (QP) and a connection manager (Conn, Listener) that
// carries private data. Work requests are posted to a QP; each signalled one,
// each receive and each one that fails comes back as a work completion (WC)
// from the CQ.
//
// # Providers
//
// Package rdma/iwarp is a software RDMA NIC (iWARP over TCP). Package
// rdma/rdmatest is this contract in executable form; every provider passes it.
//
// # Threads
//
// A CQ and all QPs created on it have one owner: the goroutine (on a worker's
// locked thread) that polls the CQ. QP post methods, CQ.Poll, CQ.Arm and
// QP.Close are called by the owner only, without locks. Device, PD, MR,
// Listener and Conn methods may be called from any goroutine. Between
// Conn.CreateQP and the return of Conn.Accept or Conn.Connect the goroutine
// that created the QP may post receives on it; from then on the QP belongs to
// the owner of its CQ, which may see completions before Accept or Connect has
// returned to the caller.
//
// # Progress
//
// A software provider has no thread of its own on the data path: it moves data
// inside CQ.Poll, on the owner's thread. Work posted to a QP is on its way at
// the latest when the next Poll or Arm of its send CQ returns, so everything
// posted between two polls leaves in one batch (one doorbell). An owner that
// stops polling stops the QPs of that CQ.
//
// # Buffers
//
// Memory that a work request names lies in a registered MR, outside the Go heap
// (internal/arena). It belongs to the provider from the post until the
// completion of that work request, or of a later signalled one on the same send
// queue, has been returned by Poll, also when that completion is an error.
// Exception: FlagInline data is copied when it is posted.
//
// # Portability rules that callers keep (see the verbs notes in docs)
//
// RC only; a Read has one local SGE, and its sink MR has AccessRemoteWrite as
// well as AccessLocalWrite; there is no RNR retry on iWARP, so a Send must never
// meet an empty receive queue; the side that called Connect sends first; at most
// 251 bytes of private data (56 on IB/RoCE requests).
package rdma
