package blockdev

import (
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// writeGuard decides whether a plain buffered write may be made on a worker.
//
// Such a write is a copy into the page cache: 3 µs for 4 KiB, against 15 µs and
// more through the executor. Most file systems (ext4, and block devices) have no RWF_NOWAIT for
// it, though, and it may wait: for dirty-page throttling (up to 200 ms at a
// time), for a journal commit, for write-back of the same page. Throttling is
// not a rare accident, it is what a writer that outruns its disk lives in.
//
// So the guard watches. A write that took longer than slowWrite makes the next
// ones suspect: they are made on the worker still, but with a look at whether the
// thread gave up the processor of its own will. That tells a wait in the kernel
// from a worker that was merely preempted. If one did wait, writes go to the
// executor for holdMin, doubled up to holdMax while it happens again, and
// prolonged as long as the executor sees slow writes. A stall is thus paid once at the
// beginning of a throttled phase, not once per write.
type writeGuard struct {
	state     atomic.Int32 // 0 = fine, else this many writes are suspect
	holdUntil atomic.Int64 // monotonic nanoseconds
	mu        sync.Mutex   // guards hold
	hold      time.Duration

	now    func() int64 // monotonic nanoseconds
	waited func() int64 // how often this thread gave up the processor voluntarily
}

const (
	slowWrite    = 1 * time.Millisecond
	slowExecuted = 4 * time.Millisecond
	suspects     = 64
	holdMin      = 20 * time.Millisecond
	holdMax      = time.Second
)

var monoStart = time.Now()

func newWriteGuard() *writeGuard {
	return &writeGuard{
		now: func() int64 { return int64(time.Since(monoStart)) },
		waited: func() int64 {
			var ru unix.Rusage
			if unix.Getrusage(unix.RUSAGE_THREAD, &ru) != nil {
				return 0
			}
			return ru.Nvcsw
		},
	}
}

// guardMark is what begin gives to end.
type guardMark struct {
	start   int64
	waited  int64
	suspect bool
}

// begin is called before a write on the worker; false: do not make it.
func (g *writeGuard) begin() (m guardMark, ok bool) {
	m.start = g.now()
	if m.start < g.holdUntil.Load() {
		return m, false
	}
	if g.state.Load() > 0 {
		m.suspect = true
		m.waited = g.waited()
	}
	return m, true
}

// end is called after it.
func (g *writeGuard) end(m guardMark) {
	now := g.now()
	slow := time.Duration(now-m.start) > slowWrite
	switch {
	case !slow && !m.suspect:
	case !m.suspect:
		g.state.Store(suspects)
	case slow && g.waited() > m.waited:
		g.mu.Lock()
		g.hold = min(max(2*g.hold, holdMin), holdMax)
		g.holdUntil.Store(now + int64(g.hold))
		g.mu.Unlock()
		g.state.Store(suspects)
	default:
		if g.state.Add(-1) == 0 { // a whole row of them without a wait
			g.mu.Lock()
			g.hold = 0
			g.mu.Unlock()
		}
	}
}

// executed tells of a buffered write that was made elsewhere.
func (g *writeGuard) executed(start int64) {
	now := g.now()
	if now >= g.holdUntil.Load() || time.Duration(now-start) < slowExecuted {
		return
	}
	g.mu.Lock()
	g.holdUntil.Store(max(g.holdUntil.Load(), now+int64(max(g.hold, holdMin))))
	g.mu.Unlock()
}
