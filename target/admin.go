package target

import (
	"rdblk/internal/worker"
	"rdblk/protocol"
)

// runKeepAlive has nothing to do: that the command came is what counts.
func runKeepAlive(r *request) {
	c := r.q.ctrl
	c.mu.Lock()
	off := c.kato == 0 && !c.sub.discovery
	c.mu.Unlock()
	if off {
		r.fail(protocol.StatusKeepAliveInvalid)
		return
	}
	r.ok()
}

// runAbort looks for the command by queue and identifier. One that waits for a
// resource is ended; one that the device, the back end or a handler has is left
// alone, and the answer says so.
func runAbort(r *request) {
	c := r.q.ctrl
	sqid, cid := r.cmd.AbortSQID(), r.cmd.AbortCID()
	if sqid == 0 {
		r.aborted(c.abortOn(r.q, cid, r))
		return
	}
	c.mu.Lock()
	q := c.queues[sqid]
	full := c.aborts >= maxAborts
	if q != nil && !full {
		c.aborts++
	}
	c.mu.Unlock()
	switch {
	case q == nil: // no such command
		r.aborted(false)
		return
	case full:
		r.fail(protocol.StatusAbortLimitExceeded)
		return
	}
	admin := r.q.lane.w
	reply := func(done bool) {
		// Both workers live as long as this request is not finished.
		_ = admin.Submit(worker.TaskFunc(func() {
			c.mu.Lock()
			c.aborts--
			c.mu.Unlock()
			r.aborted(done)
		}))
	}
	if q.lane.w.Submit(worker.TaskFunc(func() { reply(c.abortOn(q, cid, nil)) })) != nil {
		reply(false)
	}
}

// aborted finishes an Abort.
func (r *request) aborted(done bool) {
	if r.q.state >= queueClosing {
		r.q.release(r)
		return
	}
	dw0 := uint32(0)
	if !done {
		dw0 = protocol.AbortedNot
	}
	r.finish(protocol.StatusSuccess, dw0, 0)
}

// abortOn ends command cid of q if that is possible, on q's worker. self is the
// Abort itself.
func (c *controller) abortOn(q *queue, cid uint16, self *request) bool {
	if q.state >= queueClosing || q.ctrl != c {
		return false
	}
	for _, r := range q.requests {
		if r == self || r.cmd.ID() != cid {
			continue
		}
		switch r.state {
		case reqWaitBuffer:
			q.pool.unwait(r)
			r.fail(protocol.StatusAbortRequested)
			q.pool.serve()
			return true
		case reqWaitRead:
			q.waitRead.remove(r)
			r.fail(protocol.StatusAbortRequested)
			return true
		case reqEvent:
			c.dropEvent(r)
			r.fail(protocol.StatusAbortRequested)
			return true
		}
	}
	return false
}
