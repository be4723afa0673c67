package target

import (
	"bytes"
	"log/slog"

	"rdblk/blockdev"
	"rdblk/protocol"
)

// The NVM command set. A check looks the namespace up and takes it; a run submits
// to the worker's blockdev.Queue of the namespace, whose Done arrives on the same
// worker, possibly before Submit has returned.

// onNamespace finds and takes the namespace of a command.
func (r *request) onNamespace(changes bool) (*namespace, protocol.Status) {
	ns := r.q.ctrl.ns.Load().get(r.cmd.NSID())
	if ns == nil {
		return nil, protocol.StatusInvalidNamespace.WithDNR()
	}
	r.take(ns)
	if changes && ns.info.ReadOnly {
		return nil, protocol.StatusNamespaceWriteProtected.WithDNR()
	}
	return ns, 0
}

// onRange is onNamespace for commands with SLBA and NLB: it sets off and left.
func (r *request) onRange(changes bool) (*namespace, protocol.Status) {
	ns, s := r.onNamespace(changes)
	if ns == nil {
		return nil, s
	}
	var ok bool
	r.off, r.left, ok = protocol.ByteRange(r.cmd.SLBA(), uint64(r.cmd.Blocks()), ns.shift, ns.blocks())
	if !ok {
		return nil, protocol.StatusLBAOutOfRange.WithDNR()
	}
	r.moved = uint64(r.left)
	return ns, 0
}

// checkTransfer is the check of commands that transfer the range.
func checkTransfer(r *request, changes bool) protocol.Status {
	ns, s := r.onRange(changes)
	if ns == nil {
		return s
	}
	if r.left > int64(ns.t.cfg.MaxIO) { // MDTS
		return protocol.StatusInvalidField.WithDNR()
	}
	r.xfer = uint32(r.left)
	return 0
}

// submit starts a back-end call; kind.done goes on.
func (r *request) submit(op blockdev.Op, buf []byte, off, n int64, flags blockdev.WriteFlags) {
	b := &r.bd
	b.Op, b.Buf, b.Off, b.Len, b.Flags = op, buf, off, n, flags
	r.ns.q.Submit(b)
}

// backendDone is Done of every back-end request.
func backendDone(b *blockdev.Request) {
	r := b.User.(*request)
	b.Buf = nil
	if r.q.state >= queueClosing {
		r.q.release(r) // nobody waits for the answer
		return
	}
	r.kind.done(r)
}

// backendFailed ends a request whose back-end call failed.
func (r *request) backendFailed() {
	err := r.bd.Err
	s := backendStatus(r.cmd.Opcode(), err)
	ns := r.ns.ns
	ns.t.storageLog.Log(slog.LevelError, "storage error", slog.Int("ns", int(ns.id)), slog.String("dev", ns.info.Name),
		slog.String("op", r.bd.Op.String()), slog.Int64("off", r.bd.Off), slog.Uint64("bytes", r.moved),
		slog.Any("err", err), slog.String("status", s.Name(false)))
	r.fail(s)
}

// fua says that the command asks for Force Unit Access and that there is something to
// force: where every write is durable there is not.
func (r *request) fua() bool { return r.cmd.FUA() && r.ns.ns.info.WriteCache }

// durable is the flag for a write that must be durable when it is answered: because it
// asks for it, or because its host has been told that there is no write cache.
func (r *request) durable() blockdev.WriteFlags {
	if r.ns.ns.info.WriteCache && (r.cmd.FUA() || r.q.ctrl.limits.vwc == 0) {
		return blockdev.WriteFUA
	}
	return 0
}

// doneSimple ends commands of one call.
func doneSimple(r *request) {
	if r.bd.Err != nil {
		r.backendFailed()
		return
	}
	r.ok()
}

func checkRead(r *request) protocol.Status { return checkTransfer(r, false) }

// runRead reads. With FUA the data must come from the medium, so what the cache
// holds goes there first.
func runRead(r *request) {
	if r.fua() && r.step == 0 && !r.ns.ns.info.ReadOnly {
		r.step = 1
		r.submit(blockdev.OpFlush, nil, 0, 0, 0)
		return
	}
	r.step = 2
	r.submit(blockdev.OpRead, r.data, r.off, 0, 0)
}

func doneRead(r *request) {
	if r.bd.Err == nil && r.step == 1 {
		runRead(r)
		return
	}
	doneSimple(r)
}

func checkWrite(r *request) protocol.Status { return checkTransfer(r, true) }

func runWrite(r *request) { r.submit(blockdev.OpWrite, r.data, r.off, 0, r.durable()) }

func checkCompare(r *request) protocol.Status {
	s := checkTransfer(r, false)
	r.scratch = r.xfer
	return s
}

func runCompare(r *request) { r.submit(blockdev.OpRead, r.tmp, r.off, 0, 0) }

func doneCompare(r *request) {
	switch {
	case r.bd.Err != nil:
		r.backendFailed()
	case !bytes.Equal(r.data, r.tmp):
		r.fail(protocol.StatusCompareFailure.WithDNR())
	default:
		r.ok()
	}
}

func checkFlush(r *request) protocol.Status {
	// VWC says that Flush does not take NSIDAll, which is no namespace to onNamespace.
	_, s := r.onNamespace(false)
	return s
}

func runFlush(r *request) {
	if info := &r.ns.ns.info; !info.WriteCache || info.ReadOnly {
		r.ok()
		return
	}
	r.submit(blockdev.OpFlush, nil, 0, 0, 0)
}

func checkWriteZeroes(r *request) protocol.Status {
	_, s := r.onRange(true)
	return s
}

// runWriteZeroes leaves the blocks allocated unless the host allows otherwise by DEAC.
func runWriteZeroes(r *request) {
	flags := r.durable()
	if !r.cmd.DEAC() {
		flags |= blockdev.ZeroNoUnmap
	}
	r.submit(blockdev.OpZero, nil, r.off, r.left, flags)
}

// checkDSM: the hints IDR and IDW mean nothing here, and deallocation is one too
// where the store cannot do it; then the ranges need not be fetched.
func checkDSM(r *request) protocol.Status {
	if r.cmd.DSMAttributes()&protocol.DSMDeallocate == 0 {
		_, s := r.onNamespace(false)
		return s
	}
	ns, s := r.onNamespace(true)
	if ns != nil && ns.info.Discard {
		r.xfer = uint32(r.cmd.DSMRangeCount() * protocol.DSMRangeSize)
	}
	return s
}

func runDSM(r *request) {
	if r.xfer == 0 {
		r.ok()
		return
	}
	ranges, ok := protocol.DSMRangesView(r.data, r.cmd.DSMRangeCount())
	if !ok {
		r.fail(protocol.StatusInternalError)
		return
	}
	if !ranges.Inside(r.ns.ns.blocks()) {
		r.fail(protocol.StatusLBAOutOfRange.WithDNR())
		return
	}
	r.step = 0
	nextDSM(r)
}

// nextDSM discards range r.step or the first after it that is not empty.
func nextDSM(r *request) {
	ns := r.ns.ns
	ranges, _ := protocol.DSMRangesView(r.data, r.cmd.DSMRangeCount())
	for ; int(r.step) < ranges.Len(); r.step++ {
		d := ranges.At(int(r.step))
		if d.NLB == 0 {
			continue
		}
		off, n, ok := protocol.ByteRange(d.SLBA, uint64(d.NLB), ns.shift, ns.blocks())
		if !ok {
			r.fail(protocol.StatusLBAOutOfRange.WithDNR())
			return
		}
		r.step++
		r.moved += uint64(n)
		r.submit(blockdev.OpDiscard, nil, off, n, 0)
		return
	}
	r.ok()
}

func doneDSM(r *request) {
	if r.bd.Err != nil {
		r.backendFailed()
		return
	}
	nextDSM(r)
}

func checkVerify(r *request) protocol.Status {
	ns, s := r.onRange(false)
	if ns != nil {
		r.scratch = uint32(min(r.left, int64(ns.t.cfg.MaxIO)))
	}
	return s
}

// runVerify reads the range piece by piece and looks for nothing but errors.
func runVerify(r *request) {
	n := min(r.left, int64(len(r.tmp)))
	r.submit(blockdev.OpRead, r.tmp[:n], r.off, 0, 0)
}

func doneVerify(r *request) {
	if r.bd.Err != nil {
		r.backendFailed()
		return
	}
	n := min(r.left, int64(len(r.tmp)))
	r.off += n
	if r.left -= n; r.left == 0 {
		r.ok()
		return
	}
	runVerify(r)
}
