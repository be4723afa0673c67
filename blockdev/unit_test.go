package blockdev

import (
	"errors"
	"math"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestCheckRange(t *testing.T) {
	const size, bs = 1 << 20, 4096
	for _, c := range []struct {
		off, n int64
		want   error
	}{
		{0, size, nil}, {0, 0, nil}, {size, 0, nil}, {size - bs, bs, nil}, {bs, bs, nil},
		{size, bs, ErrOutOfRange}, {0, size + bs, ErrOutOfRange}, {-bs, bs, ErrOutOfRange}, {0, -bs, ErrOutOfRange},
		{math.MaxInt64, 1, ErrOutOfRange}, {math.MaxInt64, math.MaxInt64, ErrOutOfRange}, {bs, math.MaxInt64, ErrOutOfRange},
		{math.MinInt64, math.MinInt64, ErrOutOfRange}, {math.MinInt64, math.MaxInt64, ErrOutOfRange}, {size + bs, 0, ErrOutOfRange},
		{1, bs, ErrUnaligned}, {bs, 1, ErrUnaligned}, {512, 512, ErrUnaligned}, {1, 0, ErrUnaligned},
	} {
		err := CheckRange(size, bs, c.off, c.n)
		if c.want == nil && err != nil || !errors.Is(err, c.want) {
			t.Errorf("%d bytes at %d: %v, want %v", c.n, c.off, err, c.want)
		}
	}
	if err := CheckRange(math.MaxInt64&^4095, 4096, math.MaxInt64&^4095-4096, 4096); err != nil {
		t.Errorf("the last block of the largest device: %v", err)
	}
}

func FuzzCheckRange(f *testing.F) {
	f.Add(int64(1<<20), uint8(0), int64(0), int64(4096))
	f.Add(int64(math.MaxInt64), uint8(7), int64(math.MaxInt64), int64(math.MaxInt64))
	f.Fuzz(func(t *testing.T, size int64, order uint8, off, n int64) {
		bs := int64(MinBlockSize) << (order % 8)
		size = max(size, 0) &^ (bs - 1)
		if CheckRange(size, int(bs), off, n) != nil {
			return
		}
		if off < 0 || n < 0 || off%bs != 0 || n%bs != 0 || uint64(off)+uint64(n) > uint64(size) {
			t.Errorf("%d bytes at %d of %d with blocks of %d are taken", n, off, size, bs)
		}
	})
}

// Every lock of a span covers its range, is in it once, and spans are rising.
func TestSpans(t *testing.T) {
	l := newRangeLocks(4096, 16)
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		off := rng.Int64N(1 << 20)
		n := 1 + rng.Int64N(100<<10)
		s := l.span(off, n)
		if s.a0 > s.a1 || s.b0 > s.b1 || s.b1 > 0 && s.b0 < s.a1 {
			t.Fatalf("%d at %d: %+v does not rise", n, off, s)
		}
		held := map[int64]bool{}
		for i := s.a0; i < s.a1; i++ {
			held[int64(i)] = true
		}
		for i := s.b0; i < s.b1; i++ {
			held[int64(i)] = true
		}
		need := map[int64]bool{}
		for c := off / 4096; c <= (off+n-1)/4096; c++ {
			need[c%16] = true
		}
		if len(held) != len(need) {
			t.Fatalf("%d at %d: holds %v, needs %v", n, off, held, need)
		}
		for c := range need {
			if !held[c] {
				t.Fatalf("%d at %d: holds %v, needs %v", n, off, held, need)
			}
		}
	}
}

func TestRangeLocksExcludeAndLetGo(t *testing.T) {
	l := newRangeLocks(4096, 16)
	a, wrap, far := l.span(0, 8192), l.span(15*4096, 8192), l.span(4*4096, 4096)
	if !l.lock(a) {
		t.Fatal("closed")
	}
	if l.tryLock(wrap) || l.tryRLock(wrap) || l.tryRLock(a) {
		t.Error("overlapping ranges do not exclude each other")
	}
	if !l.tryLock(far) {
		t.Error("ranges apart exclude each other")
	}
	l.unlock(far)
	l.unlock(a)
	if !l.tryRLock(wrap) || !l.tryRLock(a) || l.tryLock(a) {
		t.Error("readers share, and keep writers out")
	}
	l.runlock(a)
	l.runlock(wrap)
	// Nothing must have been left behind by what failed.
	if !l.close() || l.close() {
		t.Error("close works once")
	}
	if l.lock(a) || l.rlock(a) {
		t.Error("locks after close")
	}
	for i := range l.locks {
		if !l.locks[i].TryLock() {
			t.Errorf("lock %d is held for ever", i)
		}
	}
}

// A flush that a caller shares must have begun after the call.
func TestFlushesAreShared(t *testing.T) {
	enter, leave := make(chan int), make(chan error)
	var n atomic.Int32
	f := newFlusher("x", func() error { enter <- int(n.Add(1)); return <-leave }, nil)
	done := make(chan error)
	flush := func() { done <- f.Flush() }
	go flush()
	<-enter
	const late = 10
	for range late {
		go flush()
	}
	// All of them wait for a sync that has not begun.
	for {
		f.mu.Lock()
		waiting := f.waiting
		f.mu.Unlock()
		if waiting == late {
			break
		}
	}
	leave <- nil
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	select {
	case <-done:
		t.Fatal("a flush was answered by a sync that began before it")
	case k := <-enter:
		if k != 2 {
			t.Fatalf("sync %d", k)
		}
	}
	leave <- nil
	for range late {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if n.Load() != 2 {
		t.Errorf("%d syncs for 11 flushes, want 2", n.Load())
	}
}

func TestAFailedFlushFailsAllThatWait(t *testing.T) {
	enter, leave := make(chan struct{}), make(chan error)
	f := newFlusher("x", func() error { enter <- struct{}{}; return <-leave }, nil)
	done := make(chan error)
	go func() { done <- f.Flush() }()
	<-enter
	for range 4 {
		go func() { done <- f.Flush() }()
	}
	for {
		f.mu.Lock()
		waiting := f.waiting
		f.mu.Unlock()
		if waiting == 4 {
			break
		}
	}
	leave <- unix.EIO
	first := 0
	for range 5 {
		err := <-done
		if !errors.Is(err, unix.EIO) {
			t.Errorf("%v", err)
		}
		if !errors.Is(err, ErrFlushFailed) {
			first++
		}
	}
	if first != 1 {
		t.Errorf("%d first failures", first)
	}
	if err := f.Flush(); !errors.Is(err, ErrFlushFailed) || !errors.Is(err, unix.EIO) {
		t.Errorf("later: %v", err)
	}
}

// Whoever keeps account of failures has done so before anybody is told of one: the
// caller, those who wait, those who come later.
func TestAFailureIsOnRecordBeforeItIsTold(t *testing.T) {
	for _, durable := range []bool{false, true} { // by a flush, by a durable write
		enter, leave := make(chan struct{}), make(chan error)
		told, record := make(chan error), make(chan struct{})
		var recorded atomic.Int32
		f := newFlusher("x", func() error { enter <- struct{}{}; return <-leave },
			func(err error) { told <- err; <-record; recorded.Add(1) })
		done := make(chan int32)
		call := func(do func() error) {
			if err := do(); !errors.Is(err, unix.EIO) {
				t.Errorf("%v", err)
			}
			done <- recorded.Load()
		}
		if durable {
			go call(func() error { f.fail(unix.EIO); return unix.EIO })
		} else {
			go call(f.Flush)
			<-enter
			go call(f.Flush)
			leave <- unix.EIO
		}
		if err := <-told; !errors.Is(err, unix.EIO) {
			t.Errorf("reported %v", err)
		}
		go call(f.Failed)
		select {
		case <-done:
			t.Error("somebody was told first")
		case <-time.After(20 * time.Millisecond):
		}
		close(record)
		for range map[bool]int{false: 3, true: 2}[durable] {
			if n := <-done; n != 1 {
				t.Errorf("told when %d were on record", n)
			}
		}
		go f.fail(unix.EIO) // another durable write that was on its way: news again
		<-told
	}
}

// A durable write that failed while a flush was running: the flush may have been
// the one that did not hear of it.
func TestAFlushBesideAFailureIsNoSuccess(t *testing.T) {
	enter, leave := make(chan struct{}), make(chan error)
	f := newFlusher("x", func() error { enter <- struct{}{}; return <-leave }, nil)
	done := make(chan error)
	go func() { done <- f.Flush() }()
	<-enter
	f.fail(unix.EIO)
	leave <- nil
	if err := <-done; !errors.Is(err, ErrFlushFailed) {
		t.Errorf("%v", err)
	}
}

// fakeTime drives a writeGuard.
type fakeTime struct{ at, waits int64 }

func (f *fakeTime) guard() *writeGuard {
	return &writeGuard{now: func() int64 { return f.at }, waited: func() int64 { return f.waits }}
}

func TestWriteGuard(t *testing.T) {
	var f fakeTime
	f.at = int64(time.Hour)
	g := f.guard()
	write := func(took time.Duration, waits int64) bool {
		m, ok := g.begin()
		if !ok {
			return false
		}
		f.at += int64(took)
		f.waits += waits
		g.end(m)
		return true
	}
	const quick = 5 * time.Microsecond
	for range 1000 {
		if !write(quick, 0) {
			t.Fatal("quick writes are refused")
		}
	}
	// A worker that was preempted is slow but did not wait.
	for range 1000 {
		if !write(3*time.Millisecond, 0) {
			t.Fatal("a preempted worker is taken for a throttled one")
		}
	}
	// A throttled writer: refused after the second at the latest.
	inline := 0
	for f.at += int64(time.Hour); write(100*time.Millisecond, 1); inline++ {
		if inline > 2 {
			t.Fatal("stalls are not noticed")
		}
	}
	if write(quick, 0) {
		t.Fatal("a hold ends at once")
	}
	// The executor sees slow writes: the hold goes on.
	for range 20 {
		start := f.at
		f.at += int64(15 * time.Millisecond)
		g.executed(start)
		if write(quick, 0) {
			t.Fatal("the hold ended while writes are slow")
		}
	}
	// Nothing slow any more: it ends.
	f.at += int64(holdMin) + 1
	if !write(quick, 0) {
		t.Fatal("the hold does not end")
	}
	// It happens again: the hold doubles, up to its bound.
	last := time.Duration(0)
	for range 12 {
		if !write(100*time.Millisecond, 1) {
			t.Fatal("refused after the hold")
		}
		hold := time.Duration(g.holdUntil.Load() - f.at)
		if hold < last || hold > holdMax {
			t.Errorf("hold %v after %v", hold, last)
		}
		last = hold
		f.at += int64(hold) + 1
	}
	if last != holdMax {
		t.Errorf("longest hold %v, want %v", last, holdMax)
	}
	// Good for a while: forgiven.
	for range suspects {
		write(quick, 0)
	}
	write(100*time.Millisecond, 1)
	write(100*time.Millisecond, 1)
	if hold := time.Duration(g.holdUntil.Load() - f.at); hold != holdMin {
		t.Errorf("hold %v after good behaviour, want %v", hold, holdMin)
	}
}

// The real sources of time: a thread that sleeps in the kernel is seen.
func TestWriteGuardSeesAWait(t *testing.T) {
	g := newWriteGuard()
	g.state.Store(suspects)
	var held bool
	var wg sync.WaitGroup
	wg.Go(func() {
		runtime.LockOSThread() // as a worker is
		defer runtime.UnlockOSThread()
		m, _ := g.begin()
		// Blocks this thread in the kernel, as throttling would.
		ts := unix.NsecToTimespec(int64(20 * time.Millisecond))
		for {
			_, _, errno := unix.RawSyscall(unix.SYS_NANOSLEEP, uintptrOf(&ts), uintptrOf(&ts), 0)
			if errno != unix.EINTR { // the runtime's signals
				break
			}
		}
		g.end(m)
		_, ok := g.begin()
		held = !ok
	})
	wg.Wait()
	if !held {
		t.Error("a wait of 20 ms in the kernel is not noticed")
	}
}
