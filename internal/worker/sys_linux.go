package worker

import (
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
