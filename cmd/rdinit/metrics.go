package main

import (
	"strconv"

	"rdblk/blockdev"
	"rdblk/internal/metrics"
	"rdblk/nbd"
)

var (
	mStart      = metrics.Gauge("rdinit_start_time_seconds", "When the program started, in seconds since 1970.")
	mInfo       = metrics.Gauge("rdinit_attachment_info", "What is attached; always 1.", "name", "nqn", "nsid", "address", "provider", "rdma_device")
	mState      = metrics.Gauge("rdinit_session_state", "1 for the state that the session is in, 0 for the others.", "state")
	mSize       = metrics.Gauge("rdinit_device_size_bytes", "Size of the device.")
	mUnflushed  = metrics.Gauge("rdinit_device_unflushed", "1 if something was written that no flush has made durable yet.")
	mFault      = metrics.Gauge("rdinit_device_fault", "1 if all requests, or all flushes, fail until the device is attached anew.", "kind")
	mQueues     = metrics.Gauge("rdinit_queues", "I/O queues that the target granted.")
	mOps        = metrics.Counter("rdinit_operations_total", "Requests answered, with success or not, by operation.", "op")
	mErrors     = metrics.Counter("rdinit_operation_errors_total", "Requests that failed, by operation.", "op")
	mBytes      = metrics.Counter("rdinit_operation_bytes_total", "Bytes of requests that succeeded, by operation.", "op")
	mLatency    = metrics.Gauge("rdinit_operation_duration_seconds", "Time from a request's acceptance to its answer, waiting for a lost target included, by operation.", "op")
	mInFlight   = metrics.Gauge("rdinit_requests_in_flight", "Requests that are with the target.")
	mWaiting    = metrics.Gauge("rdinit_requests_waiting", "Requests that are not with the target: it is away, or has enough to do.")
	mOldest     = metrics.Gauge("rdinit_oldest_request_seconds", "How long the oldest request has been waiting for its answer.")
	mReconnects = metrics.Counter("rdinit_reconnects_total", "Times the connection was made again.")
	mFailed     = metrics.Counter("rdinit_reconnect_failures_total", "Attempts to reconnect that failed.")
	mResent     = metrics.Counter("rdinit_requests_resent_total", "Requests sent again after a loss of the connection.")
	mRetried    = metrics.Counter("rdinit_requests_retried_total", "Requests repeated because the target could not do them just then.")
	mForwarded  = metrics.Counter("rdinit_commands_forwarded_total", "Commands sent through another worker's connection.")
	mAllocMiss  = metrics.Counter("rdinit_buffer_misses_total", "Buffers asked for and not had at once.")
	mBuffer     = metrics.Gauge("rdinit_queue_buffer_bytes", "Buffer memory of the queue.", "queue")
	mBufferUse  = metrics.Gauge("rdinit_queue_buffer_in_use_bytes", "Buffer memory in use.", "queue")
	mSleeps     = metrics.Counter("rdinit_worker_sleeps_total", "Times the worker went to sleep.", "queue")

	mNBDConns   = metrics.Gauge("rdinit_nbd_connections", "NBD clients connected.")
	mNBDTotal   = metrics.Counter("rdinit_nbd_connections_total", "NBD clients that came so far.")
	mNBDShake   = metrics.Gauge("rdinit_nbd_handshakes", "NBD clients in the handshake.")
	mNBDRefused = metrics.Counter("rdinit_nbd_handshake_failures_total", "NBD connections that ended before they were served, by reason.", "reason")
	mNBDFlight  = metrics.Gauge("rdinit_nbd_requests_in_flight", "NBD requests with the device.")
	mNBDOps     = metrics.Counter("rdinit_nbd_operations_total", "NBD requests answered, with success or not, by operation.", "op")
	mNBDErrors  = metrics.Counter("rdinit_nbd_operation_errors_total", "NBD requests answered with an error, by operation.", "op")
	mNBDBytes   = metrics.Counter("rdinit_nbd_operation_bytes_total", "Bytes of NBD requests that succeeded, by operation.", "op")
	mNBDLatency = metrics.Gauge("rdinit_nbd_operation_duration_seconds", "Time from an NBD request to its reply, by operation.", "op")
	mNBDWaits   = metrics.Counter("rdinit_nbd_buffer_waits_total", "NBD requests that had to wait for a buffer.")
	mNBDSpill   = metrics.Gauge("rdinit_nbd_spill_bytes", "Data of clients that stand still, outside the queues' buffers (spill_memory).")
	mNBDCuts    = metrics.Counter("rdinit_nbd_spill_cuts_total", "NBD connections ended because spill_memory was used up.")
	mNBDStalls  = metrics.Counter("rdinit_nbd_stalls_total", "NBD connections ended because the client stood still.")
	mFabric     = metrics.NewFabric("rdinit_")
)

// collect is one scrape.
func (a *attachment) collect(s metrics.Sink) {
	st, stats := a.session.Status(), a.session.Stats()
	s.Put(mStart, float64(a.started.UnixMilli())/1e3)
	s.Put(mInfo, 1, a.entry.Name, a.nqn, strconv.FormatUint(uint64(a.dev.NSID()), 10), st.Addr, st.Provider, st.RDMADevice)
	now := a.state(st)
	for _, state := range []string{"live", "reconnecting", "lost", "detaching"} {
		s.Put(mState, metrics.Bool(now == state), state)
	}
	s.Put(mSize, float64(a.dev.Info().Size))
	for _, n := range st.Namespaces {
		if n.NSID == a.dev.NSID() {
			s.Put(mUnflushed, metrics.Bool(n.Unflushed))
			s.Put(mFault, metrics.Bool(n.Fault != ""), "requests")
			s.Put(mFault, metrics.Bool(n.FlushFault != ""), "flushes")
		}
	}
	s.Put(mQueues, float64(st.Granted))
	for i := range stats.Ops {
		op, o := blockdev.Op(i).String(), &stats.Ops[i]
		s.Put(mOps, float64(o.Answered), op)
		s.Put(mErrors, float64(o.Failed), op)
		s.Put(mBytes, float64(o.Bytes), op)
		s.PutHistogram(mLatency, o.Latency, op)
	}
	s.Put(mInFlight, float64(st.Sent))
	s.Put(mWaiting, float64(st.Waiting))
	s.Put(mOldest, st.OldestRequest.Seconds())
	s.Put(mReconnects, float64(stats.Reconnects))
	s.Put(mFailed, float64(stats.FailedAttempts))
	s.Put(mResent, float64(stats.Resent))
	s.Put(mRetried, float64(stats.Retried))
	s.Put(mForwarded, float64(stats.Forwarded))
	s.Put(mAllocMiss, float64(stats.AllocMisses))
	for _, q := range st.Queues {
		id := strconv.Itoa(q.QID)
		s.Put(mBuffer, float64(q.BufferMemory), id)
		s.Put(mBufferUse, float64(q.BufferInUse), id)
	}
	for i, w := range stats.Workers {
		s.Put(mSleeps, float64(w.Sleeps), strconv.Itoa(i+1))
	}

	n := a.nbd.Stats()
	x := n.Exports[0]
	s.Put(mNBDConns, float64(x.Connections))
	s.Put(mNBDTotal, float64(x.Connected))
	s.Put(mNBDShake, float64(n.Handshakes))
	s.Put(mNBDRefused, float64(n.HandshakesFailed), "failed")
	s.Put(mNBDRefused, float64(n.HandshakesEvicted), "evicted")
	s.Put(mNBDRefused, float64(n.Refused), "limit")
	s.Put(mNBDFlight, float64(x.InFlight))
	for i := range x.Ops {
		op, o := nbd.Op(i).String(), &x.Ops[i]
		s.Put(mNBDOps, float64(o.Count), op)
		s.Put(mNBDErrors, float64(o.Errors), op)
		s.Put(mNBDBytes, float64(o.Bytes), op)
		s.PutHistogram(mNBDLatency, o.Latency, op)
	}
	s.Put(mNBDWaits, float64(x.BufferWaits))
	s.Put(mNBDSpill, float64(n.SpillBytes))
	s.Put(mNBDCuts, float64(x.SpillCuts))
	s.Put(mNBDStalls, float64(x.Stalls))
	mFabric.Collect(s, a.nic.Software().Stats())
}
