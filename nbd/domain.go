package nbd

import (
	"fmt"
	"sync/atomic"

	"rdblk/blockdev"
	"rdblk/internal/worker"
)

// domain is what the connections on one queue of one export share: the queue, its
// memory, the line of those that wait for memory, and counters. Fields without a
// remark are the worker's.
type domain struct {
	exp      *export
	index    int
	q        blockdev.Queue // not changed after creation
	w        *worker.Worker // not changed after creation
	maxAlloc int            // not changed after creation

	conns   []*conn
	waiters waitList

	// attention counts connections that a clock has to look after: only then is there a tick.
	attention atomic.Int32
	ticking   atomic.Bool // a tick is on its way to the worker
	tick      tickTask

	nconns int // connections and reservations; guarded by Server.mu

	stats domainCounters
}

// waitList is a FIFO of connections through conn.nextWaiter.
type waitList struct{ head, tail *conn }

func (l *waitList) push(c *conn) {
	c.nextWaiter = nil
	if l.tail == nil {
		l.head = c
	} else {
		l.tail.nextWaiter = c
	}
	l.tail = c
}

func (l *waitList) pop() *conn {
	c := l.head
	if l.head = c.nextWaiter; l.head == nil {
		l.tail = nil
	}
	c.nextWaiter = nil
	return c
}

func (l *waitList) remove(c *conn) {
	var prev *conn
	for o := l.head; o != nil; prev, o = o, o.nextWaiter {
		if o != c {
			continue
		}
		if prev == nil {
			l.head = c.nextWaiter
		} else {
			prev.nextWaiter = c.nextWaiter
		}
		if l.tail == c {
			l.tail = prev
		}
		c.nextWaiter = nil
		return
	}
}

// alloc gives c a buffer of n bytes. If there is none, or others came first, c is
// put in line and nil returned; grant will serve it.
func (d *domain) alloc(c *conn, n int) []byte {
	if d.waiters.head == nil {
		if b := d.q.Alloc(n); b != nil {
			return b
		}
	}
	d.stats.bufferWaits.add(1)
	d.waiters.push(c)
	return nil
}

func (d *domain) free(b []byte) {
	d.q.Free(b)
	if d.waiters.head != nil {
		d.grant()
	}
}

// grant serves those who wait, in order, while there is memory. A large request at the head is not
// overtaken: it would wait for ever among small ones.
func (d *domain) grant() {
	for d.waiters.head != nil {
		b := d.q.Alloc(d.waiters.head.cur.size())
		if b == nil {
			return
		}
		d.waiters.pop().granted(b)
	}
}

// tickTask is the domain's clock, run on the worker about once a second while attention is not zero.
type tickTask struct{ d *domain }

func (t *tickTask) Run() {
	d := t.d
	d.ticking.Store(false)
	now := nanotime()
	for i := len(d.conns) - 1; i >= 0; i-- { // backwards: one may remove itself
		if i < len(d.conns) { // and others
			d.conns[i].tick(now)
		}
	}
	// Memory may have come back from users of the queue that we know nothing of.
	d.grant()
}

// openDomain makes the queue. It may block.
func (e *export) openDomain(i int) (*domain, error) {
	d := &domain{exp: e, index: i}
	d.tick.d = d
	var err error
	if e.qdev != nil {
		d.q, err = e.qdev.OpenQueue(i)
	} else {
		w := e.srv.workers[i]
		d.q, err = blockdev.NewQueue(e.dev, w, blockdev.QueueConfig{Executor: e.executor, ArenaSize: e.srv.cfg.QueueMemory})
	}
	if err != nil {
		return nil, fmt.Errorf("open queue %d of %s: %w", i, e.dev.Info().Name, err)
	}
	d.w = d.q.Worker()
	if err := d.w.Call(func() { d.maxAlloc = d.q.MaxAlloc() }); err != nil {
		return nil, fmt.Errorf("open queue %d of %s: %w", i, e.dev.Info().Name, err)
	}
	if bs := e.dev.Info().BlockSize; d.maxAlloc < bs {
		d.close()
		return nil, fmt.Errorf("open queue %d of %s: its largest buffer has %d bytes, the device's block %d (give the queue more memory)", i, e.dev.Info().Name, d.maxAlloc, bs)
	}
	return d, nil
}

// close gives the queue back. No request is outstanding and no connection left.
func (d *domain) close() {
	// A worker that has ended has taken its queues with it.
	_ = d.w.Call(d.q.Close)
}
