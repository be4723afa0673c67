package target

import (
	"log/slog"
	"time"

	"rdblk/internal/worker"
	"rdblk/protocol"
)

// statusInvalidQueueType answers a Disconnect on the admin queue.
const statusInvalidQueueType protocol.Status = 0x185

// The controller properties that do not change.
const (
	version      = protocol.Version1_4
	readyTimeout = 15 * time.Second // CAP.TO
)

// cap is the CAP property: only the NVM command set, 4 KiB pages.
func (c *controller) cap() protocol.CAP {
	return protocol.CAP(0).WithMQES(uint16(c.queueDepth() - 1)).WithCQR(true).WithTO(readyTimeout).WithCSS(protocol.CSSNVM)
}

func checkConnect(r *request) protocol.Status {
	if r.cmd.RECFMT() != 0 {
		return protocol.StatusConnectIncompatibleFormat.WithDNR()
	}
	r.q.state = queueConnecting // one at a time: what strangers can keep waiting is bounded
	r.xfer = protocol.ConnectDataSize
	return 0
}

func runConnect(r *request) {
	q := r.q
	var d protocol.ConnectData
	if err := d.UnmarshalBinary(r.data); err != nil {
		r.fail(protocol.StatusDataSGLLengthInvalid.WithDNR())
		return
	}
	if q.qid > 0 {
		q.connected(r, &d, q.t.connectIO(q, &r.cmd, &d))
		return
	}
	cmd := r.cmd
	go func() {
		res := q.t.connectAdmin(q, &cmd, &d)
		// The worker lives as long as the queue, the queue as long as this request.
		_ = q.lane.w.Submit(worker.TaskFunc(func() { q.connected(r, &d, res) }))
	}()
}

// connected ends a Connect command.
func (q *queue) connected(r *request, d *protocol.ConnectData, res connectResult) {
	attrs := func() []slog.Attr {
		return []slog.Attr{slog.Any("remote", q.remote), slog.Int("qid", int(q.qid)), slog.String("host", d.HOSTNQN),
			slog.String("subsys", d.SUBNQN)}
	}
	if res.c == nil {
		q.t.stats.connectRefused.Add(1)
		q.t.strangers.Log(slog.LevelWarn, "connect refused", append(attrs(), slog.String("why", res.why), slog.String("status", res.status.Name(true)))...)
		r.finish(res.status, res.dw0, 0)
		return
	}
	q.ctrl = res.c
	if q.state >= queueClosing { // the connection ended meanwhile
		res.c.queueClosing(q)
		q.release(r)
		return
	}
	q.connTask.Stop()
	q.t.notPending(q)
	q.growFull()
	q.share = &res.c.shares[q.lane.index+1]
	q.sqSize = r.cmd.SQSIZE() + 1
	if r.cmd.CATTR()&protocol.ConnectDisableSQFlow != 0 {
		q.flowControl = false
		q.sqhd = protocol.SQHDNone
	}
	if q.state == queueConnecting {
		q.state = queueLive
	}
	if q.qid == 0 {
		q.t.hostLog.Log(slog.LevelInfo, "association begins", append(attrs(), slog.Int("cntlid", int(res.c.id)),
			slog.String("hostid", d.HOSTID.String()), slog.Duration("kato", roundKATO(r.cmd.KATO())))...)
	} else {
		q.t.hostLog.Log(slog.LevelInfo, "I/O queue connected", append(attrs(), slog.Int("cntlid", int(res.c.id)),
			slog.Int("depth", int(q.sqSize)), slog.Int("worker", q.lane.index))...)
	}
	r.finish(protocol.StatusSuccess, res.dw0, 0)
}

func runPropertyGet(r *request) {
	c := r.q.ctrl
	p := r.cmd.Property()
	var v uint64
	switch p {
	case protocol.PropertyCAP:
		v = uint64(c.cap())
	case protocol.PropertyVS:
		v = uint64(version)
	case protocol.PropertyCC:
		c.mu.Lock()
		v = uint64(c.cc)
		c.mu.Unlock()
	case protocol.PropertyCSTS:
		c.mu.Lock()
		v = uint64(c.csts())
		c.mu.Unlock()
	default:
		r.fail(protocol.StatusInvalidField.WithDNR())
		return
	}
	if r.cmd.PropertySize() != p.Size() {
		r.fail(protocol.StatusInvalidField.WithDNR())
		return
	}
	r.finish(protocol.StatusSuccess, uint32(v), uint32(v>>32))
}

// runPropertySet knows CC only. Reserved bits are kept and otherwise ignored:
// hosts write odd values and read them back.
func runPropertySet(r *request) {
	if r.cmd.Property() != protocol.PropertyCC || r.cmd.PropertySize() != protocol.PropertyCC.Size() {
		r.fail(protocol.StatusInvalidField.WithDNR())
		return
	}
	r.q.ctrl.setCC(protocol.CC(r.cmd.PropertyValue()))
	r.ok()
}

// runDisconnect deletes the I/O queue that it came on (OFCS bit 0): answered
// first, then disconnected once everything else has been answered too.
func runDisconnect(r *request) {
	switch {
	case r.q.qid == 0:
		r.fail(statusInvalidQueueType.WithDNR())
	case r.cmd.RECFMT() != 0:
		r.fail(protocol.StatusConnectIncompatibleFormat.WithDNR())
	default:
		q := r.q
		r.ok()
		q.drain(errQueueDeleted)
	}
}
