package blockdev

import (
	"sync"
	"sync/atomic"

	"rdblk/internal/worker"
)

// neighbours are the queues of one worker, as far as a store that hangs would make
// them wait for each other.
//
// A plain buffered write on the worker is a copy, but it is one that can wait: for a
// journal whose disk does not answer, for a file system that is frozen (that not even RWF_NOWAIT
// finds out), for the write-back of the page. So can a read that has to note its time.
// Where all queues of the worker are on one store they would have waited for it anyway.
// As soon as there is another one, such calls are made by the executor of
// their device, which costs a hop, and a store that hangs for ever is nobody else's trouble.
type neighbours struct {
	w      *worker.Worker
	shared atomic.Bool // there is more than one store

	stores map[store]int // queues on each; guarded by neighbourhood.mu
}

// store is what hangs as a whole: a file system, a disk, or the device of one queue.
type store struct {
	disk bool
	dev  uint64
	q    *syncQueue
}

var neighbourhood struct {
	mu sync.Mutex
	of map[*worker.Worker]*neighbours
}

func neighboursOf(w *worker.Worker) *neighbours {
	neighbourhood.mu.Lock()
	defer neighbourhood.mu.Unlock()
	n := neighbourhood.of[w]
	if n == nil {
		n = &neighbours{w: w, stores: map[store]int{}}
		if neighbourhood.of == nil {
			neighbourhood.of = map[*worker.Worker]*neighbours{}
		}
		neighbourhood.of[w] = n
	}
	return n
}

func (q *syncQueue) store() store {
	if d := q.file; d != nil {
		return store{disk: d.block, dev: d.dev}
	}
	return store{q: q}
}

func (n *neighbours) join(q *syncQueue) {
	neighbourhood.mu.Lock()
	defer neighbourhood.mu.Unlock()
	neighbourhood.of[n.w] = n // the last one may have left in between
	n.stores[q.store()]++
	n.shared.Store(len(n.stores) > 1)
}

func (n *neighbours) leave(q *syncQueue) {
	neighbourhood.mu.Lock()
	defer neighbourhood.mu.Unlock()
	s := q.store()
	if n.stores[s]--; n.stores[s] <= 0 {
		delete(n.stores, s)
	}
	n.shared.Store(len(n.stores) > 1)
	if len(n.stores) == 0 {
		delete(neighbourhood.of, n.w)
	}
}

// mayTry reports whether d may be asked on the worker; d is nil if it never waits.
func (n *neighbours) mayTry(d *file, op Op) bool {
	if d == nil || !n.shared.Load() || d.inMemory {
		return true
	}
	return op == OpRead && !d.notesReads
}
