package blockdev

import (
	"sync"
	"sync/atomic"
)

// rangeLocks keep a block whole: a read sees all of a write to a block or nothing
// of it. The kernel does not promise that (a buffered read copies from a page
// while a write copies into it; on ext4 and on block devices about one in a
// hundred reads of a block that is being written comes out mixed), but
// everything above expects it of a disk.
//
// The device is cut into chunks of a power of two of at least a block; neighbouring chunks fall
// on neighbouring locks, so a range holds each of its locks once and locks
// are always taken in rising order.
//
// They also are how Close waits for running calls.
type rangeLocks struct {
	shift  uint
	locks  []paddedRWMutex // a power of two of them
	closed atomic.Bool
}

type paddedRWMutex struct {
	sync.RWMutex
	_ [64 - 24]byte
}

func newRangeLocks(chunk, n int) *rangeLocks {
	l := &rangeLocks{locks: make([]paddedRWMutex, n)}
	for 1<<l.shift < chunk {
		l.shift++
	}
	return l
}

// span is one or two rising runs of locks.
type span struct{ a0, a1, b0, b1 int }

func (l *rangeLocks) span(off, n int64) span {
	c0, c1 := off>>l.shift, (off+n-1)>>l.shift
	m := int64(len(l.locks))
	if c1-c0 >= m {
		return span{a1: len(l.locks)}
	}
	s0, s1 := int(c0&(m-1)), int(c1&(m-1))
	if s0 <= s1 {
		return span{a0: s0, a1: s1 + 1}
	}
	return span{a1: s1 + 1, b0: s0, b1: len(l.locks)}
}

// rlock and lock take the range; false, and nothing is held, if the device is closed.
func (l *rangeLocks) rlock(s span) bool {
	for i := s.a0; i < s.a1; i++ {
		l.locks[i].RLock()
	}
	for i := s.b0; i < s.b1; i++ {
		l.locks[i].RLock()
	}
	if l.closed.Load() {
		l.runlock(s)
		return false
	}
	return true
}

func (l *rangeLocks) runlock(s span) {
	for i := s.a0; i < s.a1; i++ {
		l.locks[i].RUnlock()
	}
	for i := s.b0; i < s.b1; i++ {
		l.locks[i].RUnlock()
	}
}

func (l *rangeLocks) lock(s span) bool {
	for i := s.a0; i < s.a1; i++ {
		l.locks[i].Lock()
	}
	for i := s.b0; i < s.b1; i++ {
		l.locks[i].Lock()
	}
	if l.closed.Load() {
		l.unlock(s)
		return false
	}
	return true
}

func (l *rangeLocks) unlock(s span) {
	for i := s.a0; i < s.a1; i++ {
		l.locks[i].Unlock()
	}
	for i := s.b0; i < s.b1; i++ {
		l.locks[i].Unlock()
	}
}

// tryRLock and tryLock never wait; false, and nothing is held, if somebody is in the way.
func (l *rangeLocks) tryRLock(s span) bool {
	for i := s.a0; i < s.a1; i++ {
		if !l.locks[i].TryRLock() {
			l.runlock(span{a0: s.a0, a1: i})
			return false
		}
	}
	for i := s.b0; i < s.b1; i++ {
		if !l.locks[i].TryRLock() {
			l.runlock(span{a0: s.a0, a1: s.a1, b0: s.b0, b1: i})
			return false
		}
	}
	return true
}

func (l *rangeLocks) tryLock(s span) bool {
	for i := s.a0; i < s.a1; i++ {
		if !l.locks[i].TryLock() {
			l.unlock(span{a0: s.a0, a1: i})
			return false
		}
	}
	for i := s.b0; i < s.b1; i++ {
		if !l.locks[i].TryLock() {
			l.unlock(span{a0: s.a0, a1: s.a1, b0: s.b0, b1: i})
			return false
		}
	}
	return true
}

// close waits for all holders; false if it was closed before.
func (l *rangeLocks) close() bool {
	all := span{a1: len(l.locks)}
	if !l.lock(all) {
		return false
	}
	l.closed.Store(true)
	l.unlock(all)
	return true
}
