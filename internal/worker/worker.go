// Package worker is the event loop that every data path of rdblk runs on.
//
// A Worker is one goroutine locked to one OS thread. It owns Sources: completion
// queues, sockets, anything that has a descriptor and can do its work without
// blocking. One I/O is carried from socket to completion queue and back inside
// the loop: no lock, no goroutine hop, no allocation.
//
// The loop polls sources while there is work, goes on polling politely (giving
// the core away between looks) for a short, adaptive time, and then sleeps in
// epoll. An idle worker costs nothing. The time it is worth to keep looking is
// learnt as the kernel's halt polling does: a sleep that ended soon grows it, a
// long one shrinks it to nothing. When the core stays away for long after it was given
// away, others need it, and the worker sleeps for a while instead of looking: on a busy
// machine who wakes up has his turn soon, who only yields has it last.
//
// Work that costs less in company can be put off: with Handle.Rest a source asks for a
// pause of some microseconds, in which the core is another's, instead of that looking.
// On a machine that is busy with requests this is worth more than anything else.
//
// A Worker knows nothing of block devices, NVMe or NBD.
package worker

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A Source is something a worker drives. Methods are called on the worker only.
type Source interface {
	// Poll does what can be done without blocking and reports whether it did anything.
	// It is called when FD is ready, after Kick, and while the worker looks for work.
	Poll() bool
	// Arm is called before the worker relies on FD: before it sleeps, and where there are
	// many sources also while others keep it awake. Afterwards, until the next Poll, FD must
	// become readable (or writable, as asked with SetInterest) when Poll has something to do.
	// It returns false if there is work already.
	Arm() bool
}

// A Task is a piece of work handed to a worker without allocation.
type Task interface{ Run() }

// TaskFunc makes a Task of a function.
type TaskFunc func()

// Run calls the function.
func (f TaskFunc) Run() { f() }

// Config tells how a worker runs. The zero value is good.
type Config struct {
	Name string // for dumps
	// CPU pins the thread to a processor when Pin is set.
	CPU int
	Pin bool
	// MaxPoll is the longest time to keep looking for work before sleeping;
	// 0 = 50 µs, negative = never.
	MaxPoll time.Duration
	// Busy never sleeps: for those who own the core.
	Busy bool
	// Quiet is for a worker that seldom has work which is not urgent: it sleeps as a
	// goroutine waits for a socket. A worker that sleeps in a system call keeps the Go
	// scheduler looking for some 10 ms, with 60 wake-ups of its monitor thread, until that
	// takes away what the worker needs no more.
	Quiet bool
}

const (
	defaultMaxPoll = 50 * time.Microsecond
	minPoll        = 8 * time.Microsecond
	maxRest        = 20 * time.Microsecond
	crowdedYield   = time.Millisecond
	crowdedTime    = 50 * time.Millisecond
	directSources  = 4 // up to so many sources are polled directly while looking for work
	busyLook       = 2 // while there is work, sources that did not ask for a turn are noticed every so many turns
)

// ErrClosed is returned by Submit and Call after Close.
var ErrClosed = errors.New("worker: closed")

// Stats are a worker's counters, for metrics and dumps.
type Stats struct {
	Polls, Sleeps, Wakeups uint64
	Rests                  uint64 // see Handle.Rest
	PollBudget             time.Duration
}

// Worker is an event loop on a thread of its own.
type Worker struct {
	cfg  Config
	epfd int
	evfd int

	file    *os.File // of epfd, if Quiet
	raw     syscall.RawConn
	collect func(uintptr) bool
	found   int // events that collect has found

	// Owned by the loop.
	sources []*Handle
	byFD    map[int32]*Handle
	budget  time.Duration
	// The core was others' for long when it was given away: until then the worker sleeps
	// instead of looking. Who wakes up has his turn before those that only yielded.
	crowdedUntil time.Duration
	rest         time.Duration // to pause before looking for work again, see Handle.Rest
	events       [64]unix.EpollEvent

	polls, sleeps, wakeups, rests, budgetStat atomic.Uint64

	sleeping atomic.Bool // the loop is in, or about to enter, epoll_wait
	mailed   atomic.Bool // mail is not empty

	mu     sync.Mutex // guards mail, closed
	mail   []Task
	spare  []Task
	closed bool
	done   chan struct{}
}

// Handle is a source's registration.
type Handle struct {
	w        *Worker
	src      Source
	fd       int
	interest uint32
	runnable bool
	removed  bool
	mute     bool
	unarmed  bool // polled since Arm: the descriptor need not tell of everything
	resting  bool // has put something off, see Rest
}

// New starts a worker.
func New(cfg Config) (*Worker, error) {
	if cfg.MaxPoll == 0 {
		cfg.MaxPoll = defaultMaxPoll
	}
	epfd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll: %w", err)
	}
	evfd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		unix.Close(epfd)
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	w := &Worker{cfg: cfg, epfd: epfd, evfd: evfd, byFD: map[int32]*Handle{}, done: make(chan struct{})}
	ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(evfd)}
	if err := unix.EpollCtl(epfd, unix.EPOLL_CTL_ADD, evfd, &ev); err != nil {
		unix.Close(epfd)
		unix.Close(evfd)
		return nil, fmt.Errorf("epoll: %w", err)
	}
	if cfg.Quiet {
		if err := w.quiet(); err != nil {
			unix.Close(evfd)
			w.closePoll()
			return nil, fmt.Errorf("worker: %w", err)
		}
	}
	started := make(chan error, 1)
	go w.run(started)
	if err := <-started; err != nil {
		<-w.done
		return nil, err
	}
	return w, nil
}

// quiet gives the descriptor of epoll to Go's own poller.
func (w *Worker) quiet() error {
	if err := unix.SetNonblock(w.epfd, true); err != nil {
		return fmt.Errorf("epoll descriptor: %w", err)
	}
	w.file = os.NewFile(uintptr(w.epfd), "epoll")
	var err error
	if w.raw, err = w.file.SyscallConn(); err != nil {
		return fmt.Errorf("epoll descriptor: %w", err)
	}
	w.collect = func(uintptr) bool {
		w.found = epollWaitNow(w.epfd, w.events[:])
		return w.found > 0
	}
	return nil
}

func (w *Worker) closePoll() {
	if w.file != nil {
		w.file.Close()
	} else {
		unix.Close(w.epfd)
	}
}

// Name is the name given at creation.
func (w *Worker) Name() string { return w.cfg.Name }

// Stats may be called from any goroutine.
func (w *Worker) Stats() Stats {
	return Stats{w.polls.Load(), w.sleeps.Load(), w.wakeups.Load(), w.rests.Load(), time.Duration(w.budgetStat.Load())}
}

// Submit hands t to the worker from any goroutine; tasks run in order. It never
// blocks for the worker. After Close it returns ErrClosed and t will not run.
func (w *Worker) Submit(t Task) error {
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		return ErrClosed
	}
	w.mail = append(w.mail, t)
	w.mailed.Store(true)
	w.mu.Unlock()
	w.wake()
	return nil
}

// Call runs fn on the worker and waits for it. Never call it on the worker itself.
func (w *Worker) Call(fn func()) error {
	done := make(chan struct{})
	if err := w.Submit(TaskFunc(func() { fn(); close(done) })); err != nil {
		return err
	}
	select {
	case <-done:
		return nil
	case <-w.done:
		select {
		case <-done:
			return nil
		default:
			return ErrClosed
		}
	}
}

func (w *Worker) wake() {
	if w.sleeping.Load() && w.sleeping.CompareAndSwap(true, false) {
		one := [8]byte{1}
		unix.Write(w.evfd, one[:])
	}
}

// Close stops the loop after the tasks submitted so far and waits for it. Sources are not closed.
func (w *Worker) Close() error {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.wake()
	<-w.done
	return nil
}

// Add registers a source with its descriptor (level triggered, readable).
// Worker only, as all methods of Handle.
func (w *Worker) Add(fd int, src Source) (*Handle, error) {
	h := &Handle{w: w, src: src, fd: fd, interest: unix.EPOLLIN, runnable: true}
	ev := unix.EpollEvent{Events: h.interest, Fd: int32(fd)}
	if err := unix.EpollCtl(w.epfd, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		return nil, fmt.Errorf("watch descriptor: %w", err)
	}
	w.byFD[int32(fd)] = h
	w.sources = append(w.sources, h)
	return h, nil
}

// SetMute says that Arm is dear, and good for one event only (a completion queue of an RDMA device), so that
// while the worker does not sleep the source is polled to find out. Level triggered descriptors (a
// socket) need no such polling, which is cheaper when there are many.
func (h *Handle) SetMute(mute bool) { h.mute = mute }

// Kick makes the worker poll the source again before it sleeps.
func (h *Handle) Kick() { h.runnable = true }

// Rest asks for a pause of d, at most 20 µs, when the worker next has nothing to do: the
// source puts something off that is cheaper in company. Other sources wait as well.
// 0 takes the wish back; a busy worker does not rest. Until then the source is polled
// whenever the worker looks for work, whatever keeps it from resting.
func (h *Handle) Rest(d time.Duration) {
	h.w.rest = min(d, maxRest)
	h.resting = d > 0
}

// SetInterest chooses what wakes the worker for this source.
func (h *Handle) SetInterest(read, write bool) error {
	var e uint32
	if read {
		e |= unix.EPOLLIN
	}
	if write {
		e |= unix.EPOLLOUT
	}
	if e == h.interest || h.removed {
		return nil
	}
	ev := unix.EpollEvent{Events: e, Fd: int32(h.fd)}
	if err := unix.EpollCtl(h.w.epfd, unix.EPOLL_CTL_MOD, h.fd, &ev); err != nil {
		return fmt.Errorf("change interest: %w", err)
	}
	h.interest = e
	return nil
}

// Remove ends the registration; call it before the descriptor is closed. The
// source is not polled again, also when its own Poll calls Remove.
func (h *Handle) Remove() {
	if h.removed {
		return
	}
	h.removed = true
	unix.EpollCtl(h.w.epfd, unix.EPOLL_CTL_DEL, h.fd, nil)
	delete(h.w.byFD, int32(h.fd))
	for i, o := range h.w.sources {
		if o == h { // a new slice: the loop may be ranging over the old one
			h.w.sources = append(append(make([]*Handle, 0, len(h.w.sources)), h.w.sources[:i]...), h.w.sources[i+1:]...)
			break
		}
	}
}

func (w *Worker) run(started chan<- error) {
	runtime.LockOSThread() // never unlocked: the thread ends with the loop, its affinity with it
	defer func() {
		w.closePoll()
		unix.Close(w.evfd)
		close(w.done)
	}()
	if w.cfg.Pin {
		var set unix.CPUSet
		set.Set(w.cfg.CPU)
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			started <- fmt.Errorf("worker %s: pin to CPU %d: %w (is that processor online and allowed for this process?)", w.cfg.Name, w.cfg.CPU, err)
			return
		}
	}
	fineTimers()
	started <- nil
	idleSince := time.Duration(-1) // -1: not idle
	for turn := 0; ; turn++ {
		progress := w.runMail()
		if w.pollRunnable() {
			progress = true
		}
		if progress {
			idleSince = -1
			if turn%busyLook == 0 {
				w.notice() // or a source that never rests would keep the others out
			}
			continue
		}
		if w.stopping() {
			return
		}
		if w.rest > 0 && !w.cfg.Busy {
			d := w.rest
			w.rest = 0
			w.rests.Add(1)
			pause(d)
			w.notice()
			continue
		}
		now := clock()
		if idleSince < 0 {
			idleSince = now
		}
		if w.cfg.Busy || now-idleSince < w.budget && now > w.crowdedUntil {
			w.look()
			if d := clock() - now; d > crowdedYield {
				w.crowdedUntil = now + d + crowdedTime
			}
			continue
		}
		if !w.arm() {
			idleSince = -1
			continue
		}
		w.sleep()
		w.learn(clock() - idleSince)
		idleSince = -1
	}
}

var clockStart = time.Now()

// clock is a monotonic clock. time.Now looks at two, each of which may be a system call and a slow device.
func clock() time.Duration { return time.Since(clockStart) }

func (w *Worker) stopping() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.closed && len(w.mail) == 0
}

func (w *Worker) runMail() bool {
	if !w.mailed.Load() {
		return false
	}
	w.mu.Lock()
	mail := w.mail
	w.mail, w.spare = w.spare[:0], nil
	w.mailed.Store(false)
	w.mu.Unlock()
	for i, t := range mail {
		mail[i] = nil
		t.Run()
	}
	w.mu.Lock()
	w.spare = mail[:0]
	w.mu.Unlock()
	return len(mail) > 0
}

func (w *Worker) pollRunnable() bool {
	progress := false
	for _, h := range w.sources {
		if !h.runnable || h.removed {
			continue
		}
		h.runnable = false
		w.polls.Add(1)
		if h.src.Poll() {
			h.runnable = true
			progress = true
		} else {
			h.unarmed = true
		}
	}
	return progress
}

// look finds sources that may have work, without sleeping: all of them if they
// are few, else those whose descriptor is ready or does not tell. For it to tell they
// are armed: a socket that is full says so only then when it can take more.
func (w *Worker) look() {
	yield()
	w.notice()
}

// notice makes sources runnable that may have work.
func (w *Worker) notice() {
	if len(w.sources) <= directSources {
		for _, h := range w.sources {
			h.runnable = true
		}
		return
	}
	for _, h := range w.sources {
		switch {
		case h.runnable || h.removed:
		case h.mute || h.resting:
			h.runnable = true
		case h.unarmed:
			h.unarmed = false
			h.runnable = !h.src.Arm()
		}
	}
	w.ready(epollWaitNow(w.epfd, w.events[:]))
}

func (w *Worker) arm() bool {
	ok := true
	for _, h := range w.sources {
		if !h.removed && !h.src.Arm() {
			h.runnable = true
			ok = false
		}
	}
	return ok
}

func (w *Worker) sleep() {
	w.sleeping.Store(true)
	if w.mailed.Load() || w.stopping() {
		w.sleeping.Store(false)
		return
	}
	w.sleeps.Add(1)
	var n int
	var err error
	if w.cfg.Quiet {
		err = w.raw.Read(w.collect)
		n = w.found
	} else {
		n, err = unix.EpollWait(w.epfd, w.events[:], -1)
	}
	w.sleeping.Store(false)
	w.wakeups.Add(1)
	if err != nil { // EINTR: look again
		return
	}
	w.ready(n)
}

func (w *Worker) ready(n int) {
	for i := range n {
		fd := w.events[i].Fd
		if h := w.byFD[fd]; h != nil {
			h.runnable = true
		} else if int(fd) == w.evfd {
			var b [8]byte
			unix.Read(w.evfd, b[:])
		}
	}
}

// learn adapts the polling budget to how long the worker was without work.
func (w *Worker) learn(idle time.Duration) {
	switch {
	case w.cfg.MaxPoll < 0:
		w.budget = 0
	case idle > w.cfg.MaxPoll:
		if w.budget /= 2; w.budget < minPoll {
			w.budget = 0
		}
	case w.budget < w.cfg.MaxPoll:
		w.budget = min(max(2*w.budget, minPoll), w.cfg.MaxPoll)
	}
	w.budgetStat.Store(uint64(w.budget))
}
