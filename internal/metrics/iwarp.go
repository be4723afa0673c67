package metrics

import (
	"strconv"

	"rdblk/rdma/iwarp"
)

// Fabric describes the metrics of the software RDMA NIC, under the program's prefix.
type Fabric struct {
	objects, lingering                                 *Desc
	rx, tx, direct                                     *Desc
	accepted, established, rejected, refused, failures *Desc
	crc, messages, stalls, terminates                  *Desc
}

// NewFabric makes the descriptions.
func NewFabric(prefix string) *Fabric {
	p := prefix + "rdma_"
	return &Fabric{
		objects:     Gauge(p+"objects", "Open objects of the software RDMA NIC: queue pairs, completion queues, memory regions.", "kind"),
		lingering:   Gauge(p+"lingering_sockets", "Sockets that are being drained after the end of their connection."),
		rx:          Counter(p+"received_bytes_total", "Bytes received on TCP streams."),
		tx:          Counter(p+"transmitted_bytes_total", "Bytes sent on TCP streams."),
		direct:      Counter(p+"direct_bytes_total", "Bytes received straight into registered memory."),
		accepted:    Counter(p+"accepted_total", "TCP connections accepted."),
		established: Counter(p+"established_total", "Connections established, as either side."),
		rejected:    Counter(p+"rejected_total", "Connection requests refused."),
		refused:     Counter(p+"pending_refused_total", "TCP connections closed because too many were half-open."),
		failures:    Counter(p+"handshake_failures_total", "TCP connections that did not become RDMA connections.", "reason"),
		crc:         Counter(p+"crc_errors_total", "Frames with a wrong CRC32C."),
		messages:    Counter(p+"messages_total", "Messages by operation.", "op"),
		stalls:      Counter(p+"read_stalls_total", "Times a send queue waited for a read slot or a fence."),
		terminates:  Counter(p+"terminates_total", "Terminate messages by direction and error (layer, type, code).", "direction", "error"),
	}
}

// Collect sends the NIC's state.
func (f *Fabric) Collect(s Sink, st iwarp.Stats) {
	s.Put(f.objects, float64(st.QPs), "qp")
	s.Put(f.objects, float64(st.CQs), "cq")
	s.Put(f.objects, float64(st.MRs), "mr")
	s.Put(f.lingering, float64(st.Lingering))
	s.Put(f.rx, float64(st.RxBytes))
	s.Put(f.tx, float64(st.TxBytes))
	s.Put(f.direct, float64(st.DirectBytes))
	s.Put(f.accepted, float64(st.Accepted))
	s.Put(f.established, float64(st.Established))
	s.Put(f.rejected, float64(st.Rejected))
	s.Put(f.refused, float64(st.PendingRefused))
	s.Put(f.failures, float64(st.HandshakeTimeouts), "timeout")
	s.Put(f.failures, float64(st.HandshakeFailures), "not_mpa")
	s.Put(f.crc, float64(st.CRCErrors))
	for op, n := range map[string]uint64{"send": st.Sends, "write": st.Writes, "read": st.Reads, "receive": st.Receives,
		"read_served": st.ReadsServed, "bind": st.Binds, "invalidate": st.Invalidates} {
		s.Put(f.messages, float64(n), op)
	}
	s.Put(f.stalls, float64(st.ReadStalls))
	counts := map[[2]string]uint64{} // those that the protocol defines are there from the start
	for _, c := range iwarp.TerminateCodes() {
		counts[[2]string{"sent", terminateError(c[0], c[1], c[2])}] = 0
		counts[[2]string{"received", terminateError(c[0], c[1], c[2])}] = 0
	}
	for _, t := range st.Terminates { // at most one for each of the few errors that there can be
		dir := "received"
		if t.Sent {
			dir = "sent"
		}
		counts[[2]string{dir, terminateError(t.Layer, t.Type, t.Code)}] += t.Count
	}
	for k, n := range counts {
		s.Put(f.terminates, float64(n), k[0], k[1])
	}
}

func terminateError(layer, etype, code uint8) string {
	return strconv.Itoa(int(layer)) + "/" + strconv.Itoa(int(etype)) + "/" + strconv.Itoa(int(code))
}
