package worker

import (
	"errors"
	"os"
	"strconv"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// These calls never block, so they skip the scheduler's bookkeeping.

func yield() { unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

func epollWaitNow(epfd int, ev []unix.EpollEvent) int {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(epfd), uintptr(unsafe.Pointer(&ev[0])), uintptr(len(ev)), 0, 0, 0)
	if errno != 0 {
		return 0
	}
	return int(n)
}

// pause does nothing for d. The thread keeps its place in the Go scheduler.
func pause(d time.Duration) {
	ts := unix.NsecToTimespec(int64(d))
	unix.RawSyscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&ts)), 0, 0)
}

// fineTimers lets this thread's pauses end in time: the kernel's default may add 50 µs.
func fineTimers() { unix.Prctl(unix.PR_SET_TIMERSLACK, 1000, 0, 0, 0) }

// monitorSlack is by how much the naps of the Go scheduler's monitor may be late: as long as its longest.
const monitorSlack = 10 * time.Millisecond

// CalmMonitor lets the Go scheduler's monitor thread nap until the processor is awake anyway. A worker never goes through
// the scheduler, so the monitor finds its processor (P) overdue and takes it away whenever the worker sleeps, and having
// taken one it naps for 20 µs, fifty times in a row, before it gives itself more time: on a machine where a timer and
// a switch between threads are expensive (a virtual one) it took a fifth and more of a loaded program's processor time. What
// it does late is to give the P of a goroutine that is stuck in a system call to another goroutine, so there should be as
// many as may be stuck (GOMAXPROCS). Threads that it starts inherit the slack: Go's timers may be as late.
// A process without CAP_SYS_NICE may not do it and gets an error; systemd can:
// TimerSlackNSec. Workers set their own slack in any case.
func CalmMonitor() error {
	tid, err := monitor()
	if err != nil {
		return err
	}
	return os.WriteFile("/proc/"+tid+"/timerslack_ns", []byte(strconv.FormatInt(int64(monitorSlack), 10)), 0)
}

// monitor finds the thread: it is the first that the runtime starts, and the kernel lists threads in that order.
func monitor() (tid string, err error) {
	d, err := os.Open("/proc/self/task")
	if err != nil {
		return "", err
	}
	defer d.Close()
	l, err := d.Readdirnames(2)
	if err != nil {
		return "", err
	}
	if len(l) < 2 {
		return "", errors.New("the Go scheduler has no monitor thread")
	}
	return l[1], nil
}
