package blockdev

import "rdblk/internal/worker"

// ringEntries bounds what a queue has in flight in its io_uring; more goes to the executor.
const ringEntries = 256

// ringState is the part of a syncQueue that does I/O by io_uring, on files and
// disks, for what must wait for the medium. It is a source of the queue's worker: what is submitted in one turn of
// the loop goes to the kernel in one system call, and no other thread takes part.
//
// The ring carries the plain cases only. A result that is not the whole length is
// handed to the executor, which goes on from there and finds the reason.
type ringState struct {
	disk   *file // nil: no ring
	opened bool
	u      *uring
	handle *worker.Handle
	slots  []ringSlot
	free   []uint16
}

type ringSlot struct {
	r *Request
	s span
}

// ringSource is the queue as a worker.Source.
type ringSource struct{ q *syncQueue }

// openRing makes the ring on first use, on the worker's thread. Where the kernel or the
// administrator has none for us there is the executor.
func (q *syncQueue) openRing() bool {
	g := &q.ring
	if g.opened {
		return g.u != nil
	}
	g.opened = true
	u, err := newURing(ringEntries)
	if err != nil {
		g.disk.log.Debug("no io_uring, using threads", "dev", g.disk.path, "err", err)
		return false
	}
	if g.handle, err = q.w.Add(u.fd, ringSource{q}); err != nil {
		g.disk.log.Debug("no io_uring, using threads", "dev", g.disk.path, "err", err)
		u.close()
		return false
	}
	g.u = u
	g.slots = make([]ringSlot, u.entries)
	g.free = make([]uint16, u.entries)
	for i := range g.free {
		g.free[i] = uint16(i)
	}
	return true
}

// toRing starts r by io_uring, if it can be.
func (q *syncQueue) toRing(r *Request) bool {
	g := &q.ring
	if g.disk == nil || !q.near.mayTry(g.disk, OpRead) || r.Op > OpWrite || r.Flags&WriteFUA != 0 || r.Op == OpWrite && !g.disk.direct {
		return false
	}
	if !q.openRing() || !g.u.room() {
		return false
	}
	s, ok := g.disk.startAsync(r)
	if !ok {
		return false
	}
	id := g.free[len(g.free)-1]
	g.free = g.free[:len(g.free)-1]
	g.slots[id] = ringSlot{r, s}
	op := uint8(uringOpRead)
	if r.Op == OpWrite {
		op = uringOpWrite
	}
	g.u.queue(op, g.disk.fd, r.Buf, r.Off, uint64(id))
	q.outstanding++
	q.async.Store(q.async.Load() + 1)
	g.handle.Kick()
	return true
}

// Poll submits and collects.
func (s ringSource) Poll() bool {
	q := s.q
	g := &q.ring
	if g.u == nil {
		return false
	}
	g.u.submit()
	if !g.u.ready() {
		return g.u.queued > 0
	}
	q.busy = true
	q.cost = 0
	for {
		id, res, ok := g.u.next()
		if !ok {
			break
		}
		slot := g.slots[id]
		g.slots[id] = ringSlot{}
		g.free = append(g.free, uint16(id))
		q.outstanding--
		q.cost += requestCost
		r := slot.r
		if g.disk.endAsync(r, slot.s, res) {
			r.Done(r)
		} else {
			q.toExecutor(r)
		}
	}
	q.drain()
	q.busy = false
	g.u.submit()
	q.release()
	return true
}

// Arm is part of worker.Source.
func (s ringSource) Arm() bool {
	u := s.q.ring.u
	return u == nil || u.queued == 0 && !u.ready()
}

func (q *syncQueue) closeRing() {
	g := &q.ring
	if g.u == nil {
		return
	}
	g.handle.Remove()
	g.u.close()
	g.u = nil
	g.disk = nil
}

// startAsync checks r and takes its range; false if it is better made the ordinary way.
func (d *file) startAsync(r *Request) (s span, ok bool) {
	if len(r.Buf) == 0 || len(r.Buf) > maxSyscall || d.check(r.Buf, r.Off) != nil {
		return s, false
	}
	s = d.locks.span(r.Off, int64(len(r.Buf)))
	if r.Op == OpRead {
		return s, d.locks.tryRLock(s) && (!d.locks.closed.Load() || d.letGo(r, s))
	}
	// A file that is not local may have to ask its server how long it is: not here.
	if d.info.ReadOnly || !d.block && !d.local || d.uncut() != nil {
		return s, false
	}
	return s, d.locks.tryLock(s) && (!d.locks.closed.Load() || d.letGo(r, s))
}

// letGo gives back the range of r; it is false.
func (d *file) letGo(r *Request, s span) bool {
	if r.Op == OpRead {
		d.locks.runlock(s)
	} else {
		d.locks.unlock(s)
	}
	return false
}

// endAsync gives back the range of r and reports whether r is done. If not, r.pos tells how much of it is.
func (d *file) endAsync(r *Request, s span, res int32) bool {
	d.letGo(r, s)
	if res > 0 {
		r.pos = d.whole(int(res), len(r.Buf))
	}
	return r.pos == len(r.Buf)
}
