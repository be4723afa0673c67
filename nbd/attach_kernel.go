package nbd

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// sysKernel is the real kernel: a binder, and what /sys and /proc tell.
type sysKernel struct {
	binder
	sys, proc, dev string // where these are; tests have their own
}

// openKernel finds how this kernel binds devices.
func openKernel() (kernelNBD, error) {
	k := &sysKernel{sys: "/sys", proc: "/proc", dev: "/dev"}
	family, err := lookupFamily()
	if err == nil {
		k.binder = &netlinkBinder{family}
		return k, nil
	}
	if !errors.Is(err, errNoFamily) {
		return nil, err
	}
	// Kernels before 4.12 have no such family, nor has a network namespace of a container.
	if _, err := os.Stat(k.sys + "/module/nbd"); err != nil {
		return nil, ErrNoModule
	}
	k.binder = &ioctlBinder{kern: k, bound: map[int]*ioctlDevice{}}
	return k, nil
}

func (k *sysKernel) dir(index int) string {
	return filepath.Join(k.sys, "block", "nbd"+strconv.Itoa(index))
}

// attribute reads a line of /sys; empty if it is not there.
func attribute(path string) (string, error) {
	b, err := os.ReadFile(path)
	// The device may go while we look: reading its attributes fails with ENODEV then.
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return "", nil
	}
	return strings.TrimSpace(string(b)), err
}

func (k *sysKernel) devices() (all []int) {
	names, _ := filepath.Glob(filepath.Join(k.sys, "block", "nbd*"))
	for _, n := range names {
		if i, err := ParseDevice("/dev/" + filepath.Base(n)); err == nil {
			all = append(all, i)
		}
	}
	slices.Sort(all)
	return all
}

func (k *sysKernel) state(index int) (devState, error) {
	var st devState
	d := k.dir(index)
	if _, err := os.Stat(d); err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			return st, err
		}
		if k.method() == "netlink" { // the kernel makes it when it is asked for
			return st, nil
		}
		return st, fmt.Errorf("there is no such device: %w (load nbd with a larger nbds_max)", fs.ErrNotExist)
	}
	st.exists = true
	pid, err := attribute(d + "/pid")
	if err != nil || pid == "" { // the attribute is there while the device is bound
		return st, err
	}
	st.bound = true
	st.pid, _ = strconv.Atoi(pid)
	if st.backend, err = attribute(d + "/backend"); err != nil {
		return st, err
	}
	// A hardware queue per socket.
	mq, err := os.ReadDir(d + "/mq")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return st, err
	}
	st.sockets = len(mq)
	return st, nil
}

// schedule: the file names all schedulers, the one in use in brackets.
func (k *sysKernel) schedule(index int, from, to string) (bool, error) {
	path := filepath.Join(k.dir(index), "queue", "scheduler")
	l, err := attribute(path)
	if err != nil || !strings.Contains(l, "["+from+"]") {
		return false, err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return false, err
	}
	defer f.Close()
	if _, err := f.WriteString(to); err != nil {
		return false, err
	}
	return true, nil
}

// users looks at mounts, swap, the block layer's holders, and open descriptors. It sees what
// this process may see.
func (k *sysKernel) users(index int) []string {
	var l []string
	nums := map[string]bool{}  // major:minor of the device and its partitions
	names := map[string]bool{} // their paths
	name := "nbd" + strconv.Itoa(index)
	dirs := []string{k.dir(index)}
	parts, _ := filepath.Glob(filepath.Join(k.dir(index), name+"p*"))
	dirs = append(dirs, parts...)
	for _, d := range dirs {
		if s, err := attribute(d + "/dev"); err == nil && s != "" {
			nums[s] = true
		}
		names["/dev/"+filepath.Base(d)] = true
		holders, _ := os.ReadDir(d + "/holders")
		for _, h := range holders {
			l = append(l, "held by "+h.Name())
		}
	}
	mounts, _ := os.ReadFile(k.proc + "/self/mountinfo")
	for line := range strings.SplitSeq(string(mounts), "\n") {
		if f := strings.Fields(line); len(f) > 5 && nums[f[2]] {
			l = append(l, "mounted on "+f[4])
		} else if _, source, ok := strings.Cut(line, " - "); ok && len(f) > 5 {
			// Some file systems (btrfs) have numbers of their own.
			if s := strings.Fields(source); len(s) > 1 && names[s[1]] {
				l = append(l, "mounted on "+f[4])
			}
		}
	}
	swaps, _ := os.ReadFile(k.proc + "/swaps")
	for line := range strings.SplitSeq(string(swaps), "\n") {
		if f := strings.Fields(line); len(f) > 0 && names[f[0]] {
			l = append(l, "swap")
		}
	}
	procs, _ := filepath.Glob(k.proc + "/[0-9]*")
	for _, p := range procs {
		pid := filepath.Base(p)
		if pid == strconv.Itoa(os.Getpid()) {
			continue
		}
		fds, _ := os.ReadDir(p + "/fd")
		for _, fd := range fds {
			if t, err := os.Readlink(p + "/fd/" + fd.Name()); err == nil && names[t] {
				comm, _ := attribute(p + "/comm")
				l = append(l, fmt.Sprintf(openIn+"%s (%s)", pid, comm))
				break
			}
		}
	}
	return l
}

// probe: the kernel uses the socket that belongs to the processor.
func (k *sysKernel) probe(index, i int) error {
	list, err := attribute(filepath.Join(k.dir(index), "mq", strconv.Itoa(i), "cpu_list"))
	if err != nil {
		return err
	}
	word, _, _ := strings.Cut(list, ",")
	word, _, _ = strings.Cut(word, "-")
	cpu, err := strconv.Atoi(strings.TrimSpace(word))
	if err != nil {
		return nil // no processor uses it
	}
	runtime.LockOSThread() // never unlocked: the thread with its affinity ends with the goroutine
	var set unix.CPUSet
	set.Set(cpu)
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return nil // not one of ours
	}
	f, err := os.OpenFile(filepath.Join(k.dev, "nbd"+strconv.Itoa(index)), os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	page := os.Getpagesize()
	b, err := unix.Mmap(-1, 0, page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return err
	}
	defer unix.Munmap(b)
	_, err = f.ReadAt(b, 0)
	if errors.Is(err, io.EOF) { // less than a page
		err = nil
	}
	return err
}

// process: what the kernel keeps as "pid" is the thread that has bound the device.
func (k *sysKernel) process(tid int) string {
	b, err := os.ReadFile(filepath.Join(k.proc, strconv.Itoa(tid), "status"))
	if err != nil {
		return fmt.Sprintf("%d, which is gone", tid)
	}
	name, pid := "", strconv.Itoa(tid)
	for line := range strings.SplitSeq(string(b), "\n") {
		if v, ok := strings.CutPrefix(line, "Name:"); ok {
			name = strings.TrimSpace(v)
		}
		if v, ok := strings.CutPrefix(line, "Tgid:"); ok {
			pid = strings.TrimSpace(v)
		}
	}
	return pid + " " + strconv.Quote(name)
}

func (k *sysKernel) open(index int, exclusive, readOnly bool) (blockFile, error) {
	flags := os.O_RDWR
	if readOnly {
		flags = os.O_RDONLY
	}
	if exclusive {
		flags |= unix.O_EXCL // on a block device: nobody else may have claimed it, as a mount does
	}
	return os.OpenFile(filepath.Join(k.dev, "nbd"+strconv.Itoa(index)), flags, 0)
}

// Requests of ioctl(2) on a device (linux/nbd.h).
const (
	ioctlSetSock       = 0xab<<8 | 0
	ioctlSetBlockSize  = 0xab<<8 | 1
	ioctlDoIt          = 0xab<<8 | 3
	ioctlClearSock     = 0xab<<8 | 4
	ioctlSetSizeBlocks = 0xab<<8 | 7
	ioctlDisconnect    = 0xab<<8 | 8
	ioctlSetTimeout    = 0xab<<8 | 9
	ioctlSetFlags      = 0xab<<8 | 10
)

func ioctl(f *os.File, req, arg uintptr, what string) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), req, arg); errno != 0 {
		return os.NewSyscallError(what, errno)
	}
	return nil
}

// ioctlBinder binds devices the old way. The device lives as long as a thread stays inside NBD_DO_IT,
// so it cannot outlive the process, and its sockets cannot be replaced.
type ioctlBinder struct {
	kern *sysKernel

	mu    sync.Mutex
	bound map[int]*ioctlDevice
}

type ioctlDevice struct {
	f    *os.File
	done chan struct{} // closed when the thread is out of NBD_DO_IT
}

func (b *ioctlBinder) method() string { return "ioctl" }

func (b *ioctlBinder) connect(r *binding) error {
	f, err := os.OpenFile(filepath.Join(b.kern.dev, "nbd"+strconv.Itoa(r.index)), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	d := &ioctlDevice{f: f, done: make(chan struct{})}
	ready := make(chan error, 1)
	go d.run(r, ready)
	if err := <-ready; err != nil {
		return err
	}
	b.mu.Lock()
	b.bound[r.index] = d
	b.mu.Unlock()
	return nil
}

// run is the device's thread: the kernel wants sockets from the one that does NBD_DO_IT.
func (d *ioctlDevice) run(r *binding, ready chan<- error) {
	runtime.LockOSThread() // and never unlocked: the thread, with its signal mask, ends with the goroutine
	defer close(d.done)
	defer d.f.Close()
	// A signal to the process that came to this thread would end the device.
	var all unix.Sigset_t
	for i := range all.Val {
		all.Val[i] = ^all.Val[i]
	}
	err := unix.PthreadSigmask(unix.SIG_SETMASK, &all, nil)
	for _, c := range []struct {
		req, arg uintptr
		what     string
	}{
		{ioctlSetBlockSize, uintptr(r.blockSize), "NBD_SET_BLKSIZE"},
		{ioctlSetSizeBlocks, uintptr(r.size / r.blockSize), "NBD_SET_SIZE_BLOCKS"},
		{ioctlSetFlags, uintptr(r.serverFlags), "NBD_SET_FLAGS"},
		{ioctlSetTimeout, uintptr(r.timeout), "NBD_SET_TIMEOUT"},
	} {
		if err == nil {
			err = ioctl(d.f, c.req, c.arg, c.what)
		}
	}
	for _, fd := range r.sockets {
		if err == nil {
			err = ioctl(d.f, ioctlSetSock, uintptr(fd), "NBD_SET_SOCK")
		}
	}
	ready <- err
	if err != nil {
		return
	}
	// Its end, with or without an error, shows in the device's state.
	_ = ioctl(d.f, ioctlDoIt, 0, "NBD_DO_IT")
	_ = ioctl(d.f, ioctlClearSock, 0, "NBD_CLEAR_SOCK")
}

func (b *ioctlBinder) device(index int) (*ioctlDevice, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	d := b.bound[index]
	if d == nil {
		return nil, unix.ENOENT
	}
	return d, nil
}

func (b *ioctlBinder) reconfigure(r *binding) error {
	if len(r.sockets) > 0 {
		return fmt.Errorf("new sockets: %w by ioctl", errors.ErrUnsupported)
	}
	d, err := b.device(r.index)
	if err != nil {
		return err
	}
	return ioctl(d.f, ioctlSetSizeBlocks, uintptr(r.size/r.blockSize), "NBD_SET_SIZE_BLOCKS")
}

func (b *ioctlBinder) disconnect(index int) error {
	d, err := b.device(index)
	if err != nil {
		return err
	}
	if err := ioctl(d.f, ioctlDisconnect, 0, "NBD_DISCONNECT"); err != nil {
		return err
	}
	// The thread follows when the server has closed its ends, which the kernel told it to.
	<-d.done
	b.mu.Lock()
	delete(b.bound, index)
	b.mu.Unlock()
	return nil
}

// connected: with this method the device is bound while its thread runs.
func (b *ioctlBinder) connected(index int) (bool, error) {
	st, err := b.kern.state(index)
	return st.bound, err
}
