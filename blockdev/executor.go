package blockdev

import "sync"

// DefaultExecutors is the bound of an executor that was made without one: deep
// enough to keep a disk's queue busy, few enough that their threads (each waiting
// call holds one) do not count.
const DefaultExecutors = 32

// Executor runs calls that may wait for a medium, on a bounded number of
// goroutines, for any number of queues. Queues with waiting requests take turns,
// a queue's own requests begin in the order they came.
//
// Goroutines are started when they are needed first and park when idle. Queues
// of devices that share an Executor share its bound too: a device that hangs can
// hold all of it, so give each device its own.
type Executor struct {
	max int

	mu       sync.Mutex // guards what follows and syncQueue.waiting, .turn
	work     sync.Cond  // signalled per request when somebody is idle
	turns    turnList   // queues with waiting requests
	started  int
	idle     int
	waiting  int
	peak     int // most waiting at one time
	executed uint64
	closed   bool
	ended    sync.WaitGroup
}

// ExecutorStats is a snapshot of an Executor.
type ExecutorStats struct {
	Max      int    // bound on calls at one time
	Running  int    // calls being made now
	Waiting  int    // requests that wait for their turn
	Peak     int    // most that ever waited at one time
	Executed uint64 // requests taken up so far
}

// NewExecutor makes an executor for at most n calls at one time, DefaultExecutors
// if n is not positive. It starts nothing yet.
func NewExecutor(n int) *Executor {
	if n <= 0 {
		n = DefaultExecutors
	}
	e := &Executor{max: n}
	e.work.L = &e.mu
	return e
}

// Stats may be called from any goroutine.
func (e *Executor) Stats() ExecutorStats {
	e.mu.Lock()
	defer e.mu.Unlock()
	return ExecutorStats{Max: e.max, Running: e.started - e.idle, Waiting: e.waiting, Peak: e.peak, Executed: e.executed}
}

// Close waits for every request taken so far to be executed and ends the
// goroutines. Requests that come later are answered with ErrClosed.
func (e *Executor) Close() {
	e.mu.Lock()
	e.closed = true
	e.work.Broadcast()
	e.mu.Unlock()
	e.ended.Wait()
}

// push takes r for q; false after Close.
func (e *Executor) push(q *syncQueue, r *Request) bool {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return false
	}
	if q.waiting.empty() {
		e.turns.push(q)
	}
	q.waiting.push(r)
	e.waiting++
	e.peak = max(e.peak, e.waiting)
	spawn := false
	switch {
	case e.idle >= e.waiting:
		e.work.Signal()
	case e.started < e.max:
		e.started++
		e.ended.Add(1)
		spawn = true
	}
	e.mu.Unlock()
	if spawn {
		go e.run()
	}
	return true
}

func (e *Executor) run() {
	defer e.ended.Done()
	e.mu.Lock()
	for {
		for e.turns.head == nil {
			if e.closed {
				e.started--
				e.mu.Unlock()
				return
			}
			e.idle++
			e.work.Wait()
			e.idle--
		}
		q := e.turns.pop()
		r := q.waiting.pop()
		if !q.waiting.empty() {
			e.turns.push(q) // behind the others
		}
		e.waiting--
		e.executed++
		e.mu.Unlock()

		q.execute(r)

		e.mu.Lock()
	}
}

// requestList is a FIFO through Request.next.
type requestList struct{ head, tail *Request }

func (l *requestList) empty() bool { return l.head == nil }

func (l *requestList) push(r *Request) {
	r.next = nil
	if l.tail == nil {
		l.head = r
	} else {
		l.tail.next = r
	}
	l.tail = r
}

func (l *requestList) pop() *Request {
	r := l.head
	if r == nil {
		return nil
	}
	if l.head = r.next; l.head == nil {
		l.tail = nil
	}
	r.next = nil
	return r
}

// turnList is a FIFO through syncQueue.turn.
type turnList struct{ head, tail *syncQueue }

func (l *turnList) push(q *syncQueue) {
	q.turn = nil
	if l.tail == nil {
		l.head = q
	} else {
		l.tail.turn = q
	}
	l.tail = q
}

func (l *turnList) pop() *syncQueue {
	q := l.head
	if l.head = q.turn; l.head == nil {
		l.tail = nil
	}
	q.turn = nil
	return q
}
