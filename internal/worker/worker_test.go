package worker

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// pipe is a Source that counts the bytes that arrive on a socket pair.
type pipe struct {
	h     *Handle
	fds   [2]int
	got   atomic.Int64
	polls atomic.Int64
	drain bool
}

func newPipe(t *testing.T, w *Worker) *pipe {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	p := &pipe{fds: fds, drain: true}
	if err := w.Call(func() { p.h, err = w.Add(fds[0], p) }); err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *pipe) close(w *Worker) {
	w.Call(func() { p.h.Remove() })
	unix.Close(p.fds[0])
	unix.Close(p.fds[1])
}

func (p *pipe) Poll() bool {
	p.polls.Add(1)
	if !p.drain {
		return false
	}
	var b [256]byte
	n, _ := unix.Read(p.fds[0], b[:])
	if n <= 0 {
		return false
	}
	p.got.Add(int64(n))
	return true
}

func (p *pipe) Arm() bool { return true }

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(60 * time.Second); !ok(); runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatal("never happened: " + what)
		}
	}
}

func each(t *testing.T, f func(t *testing.T, cfg Config)) {
	for name, cfg := range map[string]Config{"adaptive": {}, "sleepy": {MaxPoll: -1}, "busy": {Busy: true}, "quiet": {MaxPoll: -1, Quiet: true}} {
		t.Run(name, func(t *testing.T) { f(t, cfg) })
	}
}

func TestSourceIsPolledWhenReady(t *testing.T) {
	each(t, func(t *testing.T, cfg Config) {
		w, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		var ps []*pipe
		for range directSources + 3 {
			ps = append(ps, newPipe(t, w))
		}
		for round := range 200 {
			p := ps[round%len(ps)]
			want := p.got.Load() + 3
			unix.Write(p.fds[1], []byte("abc"))
			eventually(t, "bytes polled", func() bool { return p.got.Load() == want })
		}
		for _, p := range ps {
			p.close(w)
		}
	})
}

// endless is a source that always has done something.
type endless struct{ polls atomic.Int64 }

func (e *endless) Poll() bool { e.polls.Add(1); return true }
func (e *endless) Arm() bool  { return false }

// again is a task that is in the mail all the time.
type again struct {
	w    *Worker
	stop atomic.Bool
}

func (a *again) Run() {
	if !a.stop.Load() {
		a.w.Submit(a)
	}
}

// A source, or a task, that never rests does not keep other sources from being noticed.
func TestBusySourceDoesNotStarveOthers(t *testing.T) {
	each(t, func(t *testing.T, cfg Config) {
		for _, n := range []int{1, directSources + 3} {
			w, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer w.Close()
			var ps []*pipe
			for range n {
				ps = append(ps, newPipe(t, w))
			}
			check := func(what string) {
				for round := range 20 {
					p := ps[round%len(ps)]
					want := p.got.Load() + 3
					unix.Write(p.fds[1], []byte("abc"))
					eventually(t, "bytes polled beside "+what, func() bool { return p.got.Load() == want })
				}
			}
			a := &again{w: w}
			w.Submit(a)
			check("a busy task")
			a.stop.Store(true)

			e := &endless{}
			fds, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
			if err != nil {
				t.Fatal(err)
			}
			var h *Handle
			w.Call(func() { h, err = w.Add(fds, e) })
			if err != nil {
				t.Fatal(err)
			}
			check("a busy source")
			w.Call(func() { h.Remove() })
			unix.Close(fds)
			for _, p := range ps {
				p.close(w)
			}
		}
	})
}

// awake calls f with workers that never sleep: because they shall not, or because one source has work for ever. They have
// so many sources that these are found by their descriptors.
func awake(t *testing.T, f func(t *testing.T, w *Worker)) {
	each(t, func(t *testing.T, cfg Config) {
		w, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		for range directSources {
			p := newPipe(t, w)
			defer p.close(w)
		}
		if !cfg.Busy {
			fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(fd)
			var h *Handle
			w.Call(func() { h, err = w.Add(fd, &endless{}) })
			if err != nil {
				t.Fatal(err)
			}
			defer w.Call(func() { h.Remove() })
		}
		f(t, w)
	})
}

// armed is a source that decides in Arm what its descriptor tells, as one does whose socket is full.
type armed struct{ *pipe }

func (a *armed) Poll() bool {
	a.h.SetInterest(false, false)
	return a.pipe.Poll()
}

func (a *armed) Arm() bool {
	a.h.SetInterest(true, false)
	return true
}

// A worker that never sleeps does not wait for descriptors to tell what they tell only after Arm.
func TestSourcesAreArmedWhileTheWorkerIsAwake(t *testing.T) {
	awake(t, func(t *testing.T, w *Worker) {
		a := &armed{newPipe(t, w)}
		defer a.close(w)
		var err error
		w.Call(func() {
			a.h.Remove()
			a.h, err = w.Add(a.fds[0], a)
		})
		if err != nil {
			t.Fatal(err)
		}
		for i := range int64(100) {
			unix.Write(a.fds[1], []byte("x"))
			eventually(t, "a byte polled", func() bool { return a.got.Load() == i+1 })
		}
	})
}

// A source that has put something off is polled again also where nobody rests.
func TestWhoAskedForARestIsPolledWhileTheWorkerIsAwake(t *testing.T) {
	awake(t, func(t *testing.T, w *Worker) {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		l := &lazy{rests: 100}
		w.Call(func() { l.h, err = w.Add(fd, l) })
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, "polls after each wish to rest", func() bool { return l.polls.Load() > 100 })
		w.Call(func() { l.h.Remove() })
	})
}

// Tasks of many goroutines all run, in each one's order, whatever state the loop is in.
func TestSubmitLosesNothing(t *testing.T) {
	each(t, func(t *testing.T, cfg Config) {
		w, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		const from, n = 4, 2000
		var next [from]int // on the worker only
		var wg sync.WaitGroup
		for g := range from {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for i := range n {
					if err := w.Submit(TaskFunc(func() {
						if next[g] != i {
							t.Errorf("goroutine %d: task %d ran in place of %d", g, i, next[g])
						}
						next[g]++
					})); err != nil {
						t.Error(err)
					}
					if i%100 == 0 {
						w.Call(func() {})
					}
				}
			}()
		}
		wg.Wait()
		w.Close()
		if next != [from]int{n, n, n, n} {
			t.Fatalf("ran %v", next)
		}
	})
}

func TestClose(t *testing.T) {
	w, err := New(Config{Name: "x"})
	if err != nil {
		t.Fatal(err)
	}
	ran := false
	w.Submit(TaskFunc(func() { ran = true }))
	w.Close()
	if !ran {
		t.Error("a task submitted before Close did not run")
	}
	if err := w.Submit(TaskFunc(func() {})); !errors.Is(err, ErrClosed) {
		t.Errorf("Submit after Close: %v", err)
	}
	if err := w.Call(func() {}); !errors.Is(err, ErrClosed) {
		t.Errorf("Call after Close: %v", err)
	}
	w.Close()
}

func TestRemovedSourceIsNotPolled(t *testing.T) {
	w, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	a, b := newPipe(t, w), newPipe(t, w)
	w.Call(func() { a.h.Remove() })
	n := a.polls.Load()
	unix.Write(a.fds[1], []byte("x"))
	unix.Write(b.fds[1], []byte("x"))
	eventually(t, "the other source is served", func() bool { return b.got.Load() == 1 })
	if a.polls.Load() != n {
		t.Error("polled after Remove")
	}
	a.close(w)
	b.close(w)
}

// lazy is a source that asks for a rest the first times it is polled, and may think better of it.
type lazy struct {
	h      *Handle
	rests  int
	cancel bool
	polls  atomic.Int64
}

func (l *lazy) Poll() bool {
	if l.polls.Add(1); l.rests > 0 {
		l.rests--
		l.h.Rest(time.Second) // 20 µs at most
		if l.cancel {
			l.h.Rest(0)
		}
	}
	return false
}
func (l *lazy) Arm() bool { return true }

// A source that asked for a rest is polled again after it, before the worker sleeps; a
// wish that is taken back, or that a busy worker hears, does nothing.
func TestRest(t *testing.T) {
	for name, c := range map[string]struct {
		cfg    Config
		cancel bool
		want   uint64
	}{"adaptive": {want: 3}, "sleepy": {cfg: Config{MaxPoll: -1}, want: 3}, "busy": {cfg: Config{Busy: true}}, "taken back": {cancel: true}} {
		t.Run(name, func(t *testing.T) {
			w, err := New(c.cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer w.Close()
			fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(fd)
			l := &lazy{rests: 3, cancel: c.cancel}
			if err := w.Call(func() {
				if l.h, err = w.Add(fd, l); err != nil {
					t.Error(err)
				}
			}); err != nil {
				t.Fatal(err)
			}
			// Each Call is a turn with work, behind which the source is polled.
			for left, end := 1, time.Now().Add(10*time.Second); left > 0; {
				if time.Now().After(end) {
					t.Fatalf("polled %d times", l.polls.Load())
				}
				w.Call(func() { left = l.rests; l.h.Kick() })
			}
			if c.want > 0 {
				eventually(t, "a rest", func() bool { return w.Stats().Rests > 0 })
			}
			w.Call(func() {}) // the turn of the last Poll is over
			if n := w.Stats().Rests; n > c.want {
				t.Errorf("rested %d times, want up to %d", n, c.want)
			}
			w.Call(func() { l.h.Remove() })
		})
	}
}

// A source that cannot take more input masks it, and the worker sleeps instead of spinning on the ready descriptor.
func TestMaskedSourceLetsTheWorkerSleep(t *testing.T) {
	w, err := New(Config{MaxPoll: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	p := newPipe(t, w)
	w.Call(func() { p.drain = false; p.h.SetInterest(false, false) })
	unix.Write(p.fds[1], []byte("x"))
	w.Call(func() {})
	eventually(t, "asleep", func() bool { return w.sleeping.Load() })
	before := w.Stats().Sleeps
	for range 100 {
		runtime.Gosched()
	}
	if d := w.Stats().Sleeps - before; d > 1 {
		t.Errorf("woke %d times for a masked descriptor", d)
	}
	w.Call(func() { p.drain = true; p.h.SetInterest(true, false) })
	eventually(t, "served again", func() bool { return p.got.Load() == 1 })
	p.close(w)
}

func TestPinToUnknownCPUFails(t *testing.T) {
	if w, err := New(Config{Pin: true, CPU: 1000}); err == nil {
		w.Close()
		t.Fatal("pinned to a processor that does not exist")
	}
}

// A worker whose core others want sleeps instead of looking for work, whatever it has learnt.
func TestCrowdedWorkerSleeps(t *testing.T) {
	w, err := New(Config{MaxPoll: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	p := newPipe(t, w)
	w.Call(func() { w.budget, w.crowdedUntil = time.Hour, clock()+time.Hour })
	eventually(t, "asleep", func() bool { return w.sleeping.Load() })
	unix.Write(p.fds[1], []byte("x"))
	eventually(t, "served", func() bool { return p.got.Load() == 1 })
	p.close(w)
}

func TestLearn(t *testing.T) {
	w := &Worker{cfg: Config{MaxPoll: 50 * time.Microsecond}}
	for range 4 {
		w.learn(20 * time.Microsecond)
	}
	if w.budget != 50*time.Microsecond {
		t.Errorf("short sleeps grew the budget to %v, want the maximum", w.budget)
	}
	for range 4 {
		w.learn(time.Millisecond)
	}
	if w.budget != 0 {
		t.Errorf("long sleeps left a budget of %v", w.budget)
	}
}

func TestSubmitTaskDoesNotAllocate(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates; the plain run counts")
	}
	w, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	task := &chanTask{make(chan struct{}, 1)}
	for range 100 { // let the mail slices grow
		w.Submit(task)
		<-task.c
	}
	if n := testing.AllocsPerRun(500, func() { w.Submit(task); <-task.c }); n != 0 {
		t.Errorf("%v allocations per task", n)
	}
}

type chanTask struct{ c chan struct{} }

func (c *chanTask) Run() { c.c <- struct{}{} }

func TestNoDescriptorsLeak(t *testing.T) {
	count := func() int {
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
		return fd // the lowest free one
	}
	before := count()
	for i := range 50 {
		w, err := New(Config{Quiet: i%2 == 0})
		if err != nil {
			t.Fatal(err)
		}
		w.Close()
	}
	if after := count(); after != before {
		t.Errorf("lowest free descriptor was %d, is %d", before, after)
	}
}

// muteSource is a completion queue of a device: its descriptor is silent until it is armed.
type muteSource struct {
	*pipe
	work, done atomic.Int64
}

func (m *muteSource) Poll() bool {
	if n := m.work.Load(); n > m.done.Load() {
		m.done.Store(n)
		return true
	}
	return false
}

// A source that is silent while the worker is awake is found although others keep the worker awake for ever.
func TestMuteSourceIsPolledWhileTheWorkerIsAwake(t *testing.T) {
	w, err := New(Config{Busy: true})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for range directSources + 2 {
		p := newPipe(t, w)
		defer p.close(w)
	}
	m := &muteSource{pipe: newPipe(t, w)}
	defer m.pipe.close(w)
	w.Call(func() {
		m.h.Remove()
		if m.h, err = w.Add(m.fds[0], m); err == nil {
			m.h.SetMute(true)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range int64(100) {
		m.work.Store(i + 1)
		eventually(t, "work of a mute source done", func() bool { return m.done.Load() == i+1 })
	}
}
