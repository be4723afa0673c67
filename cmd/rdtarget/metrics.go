package main

import (
	"strconv"

	"rdblk/internal/metrics"
	"rdblk/target"
)

var (
	mStart      = metrics.Gauge("rdtarget_start_time_seconds", "When the program started, in seconds since 1970.")
	mSize       = metrics.Gauge("rdtarget_namespace_size_bytes", "Size of the namespace.", "nsid", "device")
	mOps        = metrics.Counter("rdtarget_operations_total", "Finished commands by operation, with success or not.", "nsid", "op")
	mErrors     = metrics.Counter("rdtarget_operation_errors_total", "Commands that failed, by operation.", "nsid", "op")
	mFUA        = metrics.Counter("rdtarget_operation_fua_total", "Commands that succeeded with Force Unit Access, by operation.", "nsid", "op")
	mBytes      = metrics.Counter("rdtarget_operation_bytes_total", "Bytes of commands that succeeded, by operation.", "nsid", "op")
	mLatency    = metrics.Gauge("rdtarget_operation_duration_seconds", "Time from a command's arrival to its answer, by operation.", "nsid", "op")
	mInline     = metrics.Counter("rdtarget_storage_inline_total", "Storage calls made at once, in the worker.", "nsid")
	mExecuted   = metrics.Counter("rdtarget_storage_executed_total", "Storage calls handed to an executor because they could wait.", "nsid")
	mExecutors  = metrics.Gauge("rdtarget_storage_executors_busy", "Executors in a storage call.", "nsid")
	mExecWait   = metrics.Gauge("rdtarget_storage_waiting", "Storage calls that wait for an executor.", "nsid")
	mCtrls      = metrics.Gauge("rdtarget_controllers", "Associations of hosts, by kind.", "kind")
	mConns      = metrics.Gauge("rdtarget_connections", "RDMA connections that exist.")
	mDevices    = metrics.Gauge("rdtarget_device_connections", "RDMA connections that exist, by RDMA device.", "provider", "device")
	mPending    = metrics.Gauge("rdtarget_connections_pending", "Connections that have not completed a Connect command.")
	mConnsTotal = metrics.Counter("rdtarget_connections_total", "RDMA connection requests.")
	mRejected   = metrics.Counter("rdtarget_connections_rejected_total", "RDMA connection requests refused, by reason.", "reason")
	mAcceptFail = metrics.Counter("rdtarget_connections_failed_total", "RDMA connections that could not be established.")
	mConnRefuse = metrics.Counter("rdtarget_connects_refused_total", "Connect commands refused: wrong NQN, host not allowed, limits.")
	mKATO       = metrics.Counter("rdtarget_keep_alive_timeouts_total", "Associations ended by their keep-alive timer.")
	mFenced     = metrics.Counter("rdtarget_fenced_total", "Associations that were replaced by the return of their host.")
	mEvents     = metrics.Counter("rdtarget_events_total", "Asynchronous events delivered to hosts.")
	mInFlight   = metrics.Gauge("rdtarget_commands_in_flight", "Commands received and not yet answered, on I/O queues.")
	mWQueues    = metrics.Gauge("rdtarget_worker_queues", "Connections on the worker.", "worker")
	mWBuffer    = metrics.Gauge("rdtarget_worker_buffer_bytes", "Buffer memory of the worker.", "worker")
	mWInUse     = metrics.Gauge("rdtarget_worker_buffer_in_use_bytes", "Buffer memory in use.", "worker")
	mWWaiting   = metrics.Gauge("rdtarget_worker_waiting_for_buffer", "Commands that wait for a buffer.", "worker")
	mWWaits     = metrics.Counter("rdtarget_worker_waits_total", "Commands that had to wait, by what for: buffer, read, send, context.", "worker", "for")
	mWReadBytes = metrics.Counter("rdtarget_worker_rdma_read_bytes_total", "Bytes fetched from hosts by RDMA Read.", "worker")
	mWWriteByte = metrics.Counter("rdtarget_worker_rdma_write_bytes_total", "Bytes delivered to hosts by RDMA Write.", "worker")
	mWInCapsule = metrics.Counter("rdtarget_worker_in_capsule_bytes_total", "Bytes that came with their command.", "worker")
	mWSendInv   = metrics.Counter("rdtarget_worker_send_invalidate_total", "Answers that closed a key of the host.", "worker")
	mWSleeps    = metrics.Counter("rdtarget_worker_sleeps_total", "Times the worker went to sleep.", "worker")
	mFabric     = metrics.NewFabric("rdtarget_")
)

// collect is one scrape.
func (sv *server) collect(s metrics.Sink) {
	st := sv.target.Stats()
	s.Put(mStart, float64(sv.started.UnixMilli())/1e3)
	for _, ns := range st.Namespaces {
		id := strconv.Itoa(int(ns.NSID))
		s.Put(mSize, float64(ns.Size), id, ns.Name)
		for i := range target.NumOps {
			op, o := target.OpName(i), &ns.Ops[i]
			s.Put(mOps, float64(o.Ops), id, op)
			s.Put(mErrors, float64(o.Errors), id, op)
			s.Put(mBytes, float64(o.Bytes), id, op)
			if op == "read" || op == "write" || op == "write_zeroes" {
				s.Put(mFUA, float64(o.FUA), id, op)
			}
			s.PutHistogram(mLatency, o.Latency, id, op)
		}
		s.Put(mInline, float64(ns.Queues.Inline), id)
		s.Put(mExecuted, float64(ns.Queues.Executed), id)
		s.Put(mExecutors, float64(ns.Executor.Running), id)
		s.Put(mExecWait, float64(ns.Executor.Waiting), id)
	}
	s.Put(mCtrls, float64(st.Controllers), "io")
	s.Put(mCtrls, float64(st.DiscoveryControllers), "discovery")
	s.Put(mConns, float64(st.Queues))
	s.Put(mPending, float64(st.Pending))
	soft := sv.provider.Software().Device().Info()
	softSeen := false
	for _, d := range st.Devices {
		s.Put(mDevices, float64(d.Queues), d.Provider, d.Device)
		softSeen = softSeen || d.Device == soft.Name
	}
	if !softSeen { // there with 0 before its first connection
		s.Put(mDevices, 0, "iwarp", soft.Name)
	}
	s.Put(mConnsTotal, float64(st.Connections))
	for reason, n := range st.Rejected { // the protocol's reject reasons
		s.Put(mRejected, float64(n), reason)
	}
	s.Put(mAcceptFail, float64(st.AcceptFailed))
	s.Put(mConnRefuse, float64(st.ConnectRefused))
	s.Put(mKATO, float64(st.KeepAliveTimeouts))
	s.Put(mFenced, float64(st.Fenced))
	s.Put(mEvents, float64(st.Events))
	var inFlight uint64
	for i, w := range st.Workers {
		if i < len(st.Workers)-1 && w.Commands > w.Responses { // the last is the admin worker; the counters are not read at one instant
			inFlight += w.Commands - w.Responses
		}
		s.Put(mWQueues, float64(w.Queues), w.Name)
		s.Put(mWBuffer, float64(w.BufferSize), w.Name)
		s.Put(mWInUse, float64(w.BufferInUse), w.Name)
		s.Put(mWWaiting, float64(w.WaitingBuffer), w.Name)
		s.Put(mWWaits, float64(w.WaitBuffer), w.Name, "buffer")
		s.Put(mWWaits, float64(w.WaitRead), w.Name, "read")
		s.Put(mWWaits, float64(w.WaitSend), w.Name, "send")
		s.Put(mWWaits, float64(w.WaitContext), w.Name, "context")
		s.Put(mWReadBytes, float64(w.ReadBytes), w.Name)
		s.Put(mWWriteByte, float64(w.WriteBytes), w.Name)
		s.Put(mWInCapsule, float64(w.InCapsuleBytes), w.Name)
		s.Put(mWSendInv, float64(w.SendInvalidate), w.Name)
		s.Put(mWSleeps, float64(w.Loop.Sleeps), w.Name)
	}
	s.Put(mInFlight, float64(inFlight))
	mFabric.Collect(s, sv.provider.Software().Stats())
}
