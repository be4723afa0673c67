package nbd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/internal/worker"

	"rdblk/internal/timeout"
)

// The kernel as NBD client: /dev/nbdN, fed by one socket pair per queue.
//
// # Timeouts, and requests that come twice
//
// The kernel gives a socket up when a request on it has no answer within its timeout (30 s), and sends the
// request again on another one. Were the first copy of a write executed after the second had been
// answered, it could undo a later write. So no socket is left to that timeout: when a request is older than
// parkAfter (the target is away, or slow), or one of the sockets has ended, all sockets of the device are
// closed ("parked"); the kernel keeps its requests. Once the block device has answered everything it had,
// so that nothing old can have an effect any more, the kernel gets new sockets and sends what is open again.
//
// The kernel receives on each socket with a work item of its own. When it is slow to make threads for them,
// its rescue thread takes several, one behind the other, and the first never ends: replies on the others
// stay unread. Sockets on which replies lie for unreadAfter are parked as well; with new ones it has threads.
//
// After the death of this process the kernel keeps the device and its requests for
// DeviceOptions.DeadTimeout. A new process that finds it takes it over in the same way. If none comes,
// requests fail: the first when it has waited so long, and those that were on a socket when
// the process died 30 s later, since they wait for their timeout first.

const (
	// maxIndex bounds device numbers: the kernel has 20 bits of minor numbers.
	maxIndex = 1<<20 - 1
	// maxSockets is more queues than anybody has.
	maxSockets = 256

	// kernelTimeout is the kernel's limit for a request, in seconds. It is the default; but 0, which means
	// the same, would leave the requests on the only socket of a device alone for ever, also when
	// nobody is left to answer them.
	kernelTimeout = 30
	parkAfter     = 20 * time.Second
	unreadAfter   = 3 * time.Second
	watchPeriod   = time.Second
	// settle is how long the kernel gets to notice that sockets are closed.
	settle = 300 * time.Millisecond
	// maxDeadTimeout stands for "for ever".
	maxDeadTimeout = 10 * 365 * 24 * time.Hour
	// bindWait bounds the wait for a device that has been bound to show it.
	bindWait = 10 * time.Second
	// cutWait is how long after its sockets are cut the kernel gets to answer.
	cutWait = 3 * time.Second
	// heldWait is the same for a device that others hold open after a forced detach.
	heldWait = 500 * time.Millisecond
	// proveAfter is how long the kernel gets to take a reply on a new socket.
	proveAfter = 400 * time.Millisecond
	// The kernel chooses an I/O scheduler when it makes a device: schedulerOne for one with one queue, as all nbd
	// devices are then, and schedulerMany for those with several. nbd gets its queues later and keeps the choice,
	// which passes every request from whoever makes it to a thread of the kernel.
	schedulerOne  = "mq-deadline"
	schedulerMany = "none"
	// openIn begins what users says of them.
	openIn = "open in process "
)

// lookWait is how long Detach waits for processes that have the device open, and LockDevice for those that look for
// orphans. Tests lengthen it.
var lookWait = time.Second

// Errors of devices; match with errors.Is.
var (
	// ErrNoModule: the kernel has no nbd driver.
	ErrNoModule = errors.New("the kernel's nbd driver is not loaded (modprobe nbd)")
	// ErrDeviceInUse: somebody else has the device, or uses what is on it.
	ErrDeviceInUse = errors.New("device is in use")
	// ErrStillBound: the kernel has not let the device go.
	ErrStillBound = errors.New("the kernel has not unbound the device")
	// ErrUnbound: somebody else has disconnected the device.
	ErrUnbound = errors.New("the device was disconnected by another program")
)

// devState is what the kernel tells about a device.
type devState struct {
	exists  bool
	bound   bool
	pid     int    // thread that bound it first; 0 unknown
	backend string // identifier given with CONNECT; empty: none, or an old kernel
	sockets int
}

// binder binds devices to sockets; errors are the kernel's.
type binder interface {
	method() string
	connect(*binding) error
	reconfigure(*binding) error
	disconnect(index int) error
	// connected may report true for a device that somebody merely has open.
	connected(index int) (bool, error)
}

// blockFile is an open block device.
type blockFile interface {
	Sync() error // page cache and device
	Close() error
}

// kernelNBD is everything that attaching needs of the kernel, so that a test can be it.
type kernelNBD interface {
	binder
	// devices gives the numbers of those that there are, in order.
	devices() []int
	state(index int) (devState, error)
	// users names what keeps the device or one of its partitions: mounts, swap, holders, processes.
	users(index int) []string
	open(index int, exclusive, readOnly bool) (blockFile, error)
	// probe reads a block through socket i, from the device itself.
	probe(index, i int) error
	// schedule gives the device the I/O scheduler to if it has from, and tells whether it had.
	schedule(index int, from, to string) (bool, error)
	// process describes the process that the thread tid belongs to, by number and name.
	process(tid int) string
}

// A DeviceLock is a /dev/nbdN that this process has claimed among ours, bound or not yet.
type DeviceLock struct {
	// Orphan is the identifier of the attachment that a process which is gone has left on
	// the device; Attach takes it over. Empty: the device is free.
	Orphan string

	kern  kernelNBD
	index int
	file  *os.File
	state devState
}

// LockDevice claims device, "/dev/nbdN" or "auto" for the first free one. dir is the directory for
// lock files; all attaching programs use the same. A device that is in use is
// refused with ErrDeviceInUse naming the holder, unless the holder is gone and
// the identifier that it left begins with prefix: then it is an orphan.
// Close gives the lock back.
func LockDevice(device, dir, prefix string) (*DeviceLock, error) {
	if err := privileged(); err != nil { // said before anything is asked of a target
		return nil, fmt.Errorf("attach to %s: %w", device, err)
	}
	kern, err := openKernel()
	if err != nil {
		return nil, fmt.Errorf("attach to %s: %w", device, err)
	}
	return lockDevice(kern, device, dir, prefix)
}

// Orphans lists the paths of devices that LockDevice, with the same dir and prefix, would give
// as orphans. None for who may not attach.
func Orphans(dir, prefix string) []string {
	if privileged() != nil {
		return nil
	}
	kern, err := openKernel()
	if err != nil {
		return nil
	}
	return orphans(kern, dir, prefix)
}

func orphans(kern kernelNBD, dir, prefix string) (paths []string) {
	if kern.method() != "netlink" { // what ioctl has left is nobody's
		return nil
	}
	for _, i := range kern.devices() {
		if st, err := kern.state(i); err != nil || !st.bound || !strings.HasPrefix(st.backend, prefix) {
			continue
		}
		// Who takes the device over in this moment waits: see lockIndex.
		f, err := os.Open(lockFile(dir, i))
		if err == nil {
			err = unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
			f.Close()
		}
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			paths = append(paths, devicePath(i))
		}
	}
	return paths
}

func lockFile(dir string, index int) string {
	return filepath.Join(dir, "nbd"+strconv.Itoa(index)+".lock")
}

// privileged tells whether the kernel lets this thread bind devices, as far as can be said
// without trying.
func privileged() error {
	h, d := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, [2]unix.CapUserData{}
	if err := unix.Capget(&h, &d[0]); err == nil && d[unix.CAP_SYS_ADMIN/32].Effective&(1<<(unix.CAP_SYS_ADMIN%32)) == 0 {
		return needsRoot(unix.EPERM)
	}
	return nil
}

func needsRoot(err error) error {
	return fmt.Errorf("%w (it needs CAP_SYS_ADMIN: run it as root, or use --socket)", err)
}

// ParseDevice gives the number in "/dev/nbdN"; -1 for "auto".
func ParseDevice(device string) (int, error) {
	if device == "auto" {
		return -1, nil
	}
	num, ok := strings.CutPrefix(device, "/dev/nbd")
	n, err := strconv.Atoi(num)
	if !ok || err != nil || n < 0 || n > maxIndex || strconv.Itoa(n) != num {
		return 0, fmt.Errorf("%q is neither auto nor /dev/nbdN", device)
	}
	return n, nil
}

func devicePath(index int) string { return "/dev/nbd" + strconv.Itoa(index) }

func lockDevice(kern kernelNBD, device, dir, prefix string) (*DeviceLock, error) {
	index, err := ParseDevice(device)
	if err != nil {
		return nil, err
	}
	if index >= 0 {
		l, err := lockIndex(kern, index, dir, prefix)
		if err != nil {
			return nil, fmt.Errorf("attach to %s: %w", device, err)
		}
		return l, nil
	}
	for i := 0; i <= maxIndex; i++ {
		l, err := lockIndex(kern, i, dir, "")
		if err == nil {
			return l, nil
		}
		if errors.Is(err, fs.ErrNotExist) && i > 0 {
			return nil, fmt.Errorf("nbd: no free device: %w: all %d there are (load nbd with a larger nbds_max)", ErrDeviceInUse, i)
		}
		if !errors.Is(err, ErrDeviceInUse) {
			return nil, fmt.Errorf("attach to %s: %w", devicePath(i), err)
		}
	}
	return nil, fmt.Errorf("no free device: %w", ErrDeviceInUse)
}

func lockIndex(kern kernelNBD, index int, dir, prefix string) (l *DeviceLock, err error) {
	st, err := kern.state(index)
	if err != nil {
		return nil, err
	}
	name := lockFile(dir, index)
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	// Whoever only looks for orphans has the lock for a moment. With auto there are other devices.
	for end := time.Now().Add(lookWait); err == unix.EWOULDBLOCK && prefix != "" && time.Now().Before(end); {
		time.Sleep(5 * time.Millisecond)
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if err != nil {
		if err != unix.EWOULDBLOCK {
			return nil, fmt.Errorf("lock %s: %w", name, err)
		}
		b := make([]byte, 32)
		n, _ := f.ReadAt(b, 0) // for the message only
		return nil, fmt.Errorf("%w by process %s (%s)", ErrDeviceInUse, strings.TrimSpace(string(b[:n])), describeUse(st))
	}
	if st, err = kern.state(index); err != nil {
		return nil, err
	}
	l = &DeviceLock{kern: kern, index: index, file: f, state: st}
	if st.bound {
		// The lock is free: the holder is no program of ours, or it is gone.
		if prefix == "" || !strings.HasPrefix(st.backend, prefix) {
			return nil, fmt.Errorf("%w by process %s (%s)", ErrDeviceInUse, kern.process(st.pid), describeUse(st))
		}
		if kern.method() != "netlink" {
			return nil, fmt.Errorf("%w: process %d has left it, and it can be taken over by netlink only", ErrDeviceInUse, st.pid)
		}
		if st.sockets < 1 || st.sockets > maxSockets {
			return nil, fmt.Errorf("the kernel says that it has %d sockets", st.sockets)
		}
		l.Orphan = st.backend
	} else if u := kern.users(index); len(u) > 0 {
		return nil, fmt.Errorf("%w: %s", ErrDeviceInUse, strings.Join(u, ", "))
	}
	if err := f.Truncate(0); err != nil {
		return nil, err
	}
	if _, err := f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0); err != nil {
		return nil, err
	}
	return l, nil
}

// What a forced detach may do.
const (
	usersLose = "what its users had not flushed is lost, and they get I/O errors"
	cacheLost = "what the page cache had not written is lost"
)

func describeUse(st devState) string {
	switch {
	case !st.bound:
		return "which is attaching it"
	case st.backend == "":
		return "it has no back end identifier"
	}
	return "back end " + strconv.Quote(st.backend)
}

// Path is /dev/nbdN.
func (l *DeviceLock) Path() string { return devicePath(l.index) }

// Close gives the lock back; not to be called after Attach has succeeded.
func (l *DeviceLock) Close() error { return l.file.Close() }

// DeviceOptions say how to attach.
type DeviceOptions struct {
	// Identifier is what a later process recognises the attachment by if this one dies;
	// printable, at most 1024 bytes.
	Identifier string
	// Sockets is the number of connections, one per queue of the device as a rule. A device
	// that is taken over keeps its number.
	Sockets int
	// DeadTimeout is how long the kernel keeps requests when nobody serves them; in whole seconds, at
	// least 1 s. Negative: ten years.
	DeadTimeout time.Duration
	// Logger may be nil.
	Logger *slog.Logger

	parkAfter, watchPeriod, settle time.Duration // tests shorten these
}

// A KernelDevice is an export of a server that the kernel is attached to as /dev/nbdN.
type KernelDevice struct {
	log  *slog.Logger
	lock *DeviceLock
	kern kernelNBD
	srv  *Server
	exp  *export
	opt  DeviceOptions
	took bool

	ended   chan struct{} // closed when the device is not ours any more
	kick    chan struct{} // a connection has ended
	stopped chan struct{} // closed with the watcher
	stop    chan struct{}
	once    sync.Once

	flushing atomic.Int32 // flushes of attempts to detach that have no answer yet

	op   sync.Mutex // serialises changes of the device; guards what follows
	size int64      // what the kernel was told, bytes
	many bool       // the scheduler was changed to schedulerMany
	down bool       // detached, or on the way
	err  error      // why it ended; set before ended is closed

	mu        sync.Mutex // guards what follows; a leaf
	conns     map[*conn]*linkAge
	disc      bool      // the kernel has said good-bye
	parked    bool      // all connections are to end and to come anew
	parkedFor string    // why
	lastGone  time.Time // when the last connection was gone
}

// linkAge is what the watch wants to know of a connection, asked for on its worker.
type linkAge struct {
	oldest atomic.Int64 // nanotime of the oldest request; 0: there is none
	unread atomic.Int64 // nanotime since when the kernel reads no replies though there are; 0: it does
	queued int          // bytes of replies that lay unread; the worker's
	seen   uint64       // replies so far, when it was asked last; the watch's
}

// ask is the question; on the worker.
func (a *linkAge) ask(c *conn) {
	if c.phase >= phaseDead {
		return
	}
	a.oldest.Store(c.oldest())
	n, err := unix.IoctlGetInt(c.fd, unix.SIOCOUTQ)
	switch {
	case err != nil || n == 0:
		a.unread.Store(0)
	case n != a.queued || a.unread.Load() == 0: // less: it reads; more: it has more to read
		if n < a.queued || a.unread.Load() == 0 {
			a.unread.Store(nanotime())
		}
	}
	a.queued = n
}

// AttachDevice attaches the kernel to the export with this name. The lock belongs to the
// KernelDevice when it succeeds. Detach the device before Shutdown of the server: requests
// of the kernel would fail.
func (s *Server) AttachDevice(l *DeviceLock, exportName string, o DeviceOptions) (*KernelDevice, error) {
	fail := func(err error) (*KernelDevice, error) { return nil, fmt.Errorf("attach %s: %w", l.Path(), err) }
	x := s.find([]byte(exportName))
	if x == nil {
		return fail(fmt.Errorf("there is no export %q", exportName))
	}
	in := x.dev.Info()
	if in.BlockSize < 512 || in.BlockSize > os.Getpagesize() {
		return fail(fmt.Errorf("the kernel takes blocks from 512 bytes to a page of %d; this device has %d (attach it with --socket)", os.Getpagesize(), in.BlockSize))
	}
	if in.Size == 0 {
		return fail(errors.New("a device of no bytes cannot be attached"))
	}
	if o.Sockets < 1 || o.Sockets > maxSockets {
		return fail(fmt.Errorf("%d sockets are not between 1 and %d", o.Sockets, maxSockets))
	}
	if len(o.Identifier) > 1024 || strings.ContainsFunc(o.Identifier, func(r rune) bool { return r < ' ' }) {
		return fail(fmt.Errorf("the identifier %.80q is not printable or too long", o.Identifier))
	}
	if o.DeadTimeout < 0 || o.DeadTimeout > maxDeadTimeout {
		o.DeadTimeout = maxDeadTimeout
	}
	o.DeadTimeout = max(o.DeadTimeout, time.Second)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	for p, v := range map[*time.Duration]time.Duration{&o.parkAfter: parkAfter, &o.watchPeriod: watchPeriod, &o.settle: settle} {
		if *p == 0 {
			*p = v
		}
	}
	if l.Orphan != "" {
		if l.Orphan != o.Identifier {
			return fail(fmt.Errorf("%w: what is left on it is %q, not %q (detach it with nbd-client -d %s, or attach that again)", ErrDeviceInUse, l.Orphan, o.Identifier, l.Path()))
		}
		o.Sockets = l.state.sockets
	}
	if l.kern.method() == "ioctl" {
		o.Sockets, o.parkAfter = 1, maxDeadTimeout // see binding
	}
	k := &KernelDevice{
		log: o.Logger, lock: l, kern: l.kern, srv: s, exp: x, opt: o, took: l.Orphan != "",
		ended: make(chan struct{}), kick: make(chan struct{}, 1), stopped: make(chan struct{}), stop: make(chan struct{}),
		conns: map[*conn]*linkAge{},
	}
	if err := k.bind(!k.took); err != nil {
		k.cutAll("not attached")
		if errors.Is(err, unix.EBUSY) {
			err = fmt.Errorf("%w: %w", ErrDeviceInUse, err)
		} else if k.took && errors.Is(err, unix.EINVAL) {
			used := append(k.Users(), "the kernel")
			err = fmt.Errorf("%w: it was disconnected under its users and is free when the last has gone: %s: %w", ErrDeviceInUse, strings.Join(used, ", "), err)
		} else if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
			err = needsRoot(err)
		}
		return fail(err)
	}
	if err := k.waitBound(); err != nil {
		// Best effort: the error is what counts.
		_ = k.kern.disconnect(l.index)
		k.cutAll("not attached")
		return fail(err)
	}
	if k.opt.Sockets > 1 {
		k.many = k.schedule(context.Background(), schedulerOne, schedulerMany)
	}
	go k.watch()
	k.prove()
	return k, nil
}

// schedule changes the I/O scheduler if it is from. That waits for the requests that the device has.
func (k *KernelDevice) schedule(ctx context.Context, from, to string) (done bool) {
	ctx, cancel := timeout.With(ctx, bindWait, "")
	defer cancel()
	result := make(chan bool, 1)
	if err := inTime(ctx, "change", func() error {
		ok, err := k.kern.schedule(k.lock.index, from, to)
		result <- ok
		return err
	}); err != nil {
		k.log.Warn("nbd: the device keeps its I/O scheduler", "device", k.Path(), "scheduler", from, "err", err)
		return false
	}
	return <-result
}

// binding is what the kernel is to know of the device.
func (k *KernelDevice) binding() *binding {
	in := k.exp.dev.Info()
	b := &binding{
		index: k.lock.index, size: uint64(in.Size), blockSize: uint64(in.BlockSize),
		timeout: kernelTimeout, deadConn: uint64(k.opt.DeadTimeout / time.Second),
		serverFlags: transmissionFlags(&in, false), backend: k.opt.Identifier,
	}
	if k.kern.method() == "ioctl" {
		// Sockets that cannot be replaced must not be given up. With 0 the kernel does
		// not, if there is only one.
		b.timeout = 0
	}
	return b
}

// bind makes the connections and hands their other ends to the kernel.
func (k *KernelDevice) bind(fresh bool) error {
	b := k.binding()
	defer func() {
		for _, fd := range b.sockets {
			unix.Close(fd)
		}
	}()
	for range k.opt.Sockets {
		fd, err := k.link()
		if err != nil {
			return err
		}
		b.sockets = append(b.sockets, fd)
	}
	k.size = int64(b.size)
	if fresh {
		return k.kern.connect(b)
	}
	return k.kern.reconfigure(b)
}

// link starts a connection and gives the socket for the kernel.
func (k *KernelDevice) link() (int, error) {
	s, x := k.srv, k.exp
	q, err := s.reserve(x)
	if err != nil {
		return -1, err
	}
	d, err := x.domain(q)
	if err != nil {
		s.unreserve(x, q)
		return -1, err
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		s.unreserve(x, q)
		return -1, os.NewSyscallError("socketpair", err)
	}
	for _, fd := range fds {
		widen(fd, s.cfg.sendBuffer)
	}
	if err := unix.SetNonblock(fds[0], true); err != nil { // ours alone: the kernel's end has to block
		unix.Close(fds[0])
		unix.Close(fds[1])
		s.unreserve(x, q)
		return -1, os.NewSyscallError("socketpair", err)
	}
	// Memory that the worker needs must not wait for pages that are written through this very
	// device. Kernels before 5.6 do not know it; not root, not allowed.
	_ = d.w.Call(func() { _ = unix.Prctl(unix.PR_SET_IO_FLUSHER, 1, 0, 0, 0) })
	in := x.dev.Info()
	lim := limits{flags: transmissionFlags(&in, false), maxPayload: uint32(min(s.cfg.MaxPayload, d.maxAlloc) &^ (in.BlockSize - 1))}
	s.mu.Lock()
	s.nextID++
	h := &handshake{srv: s, id: s.nextID, peer: "kernel:" + k.lock.Path(), kernel: k}
	s.mu.Unlock()
	if err := s.start(h, d, fds[0], lim); err != nil { // closes it
		unix.Close(fds[1])
		s.unreserve(x, q)
		return -1, err
	}
	return fds[1], nil
}

// joined and gone keep the list of connections; gone is called on workers.
func (k *KernelDevice) joined(c *conn) {
	k.mu.Lock()
	k.conns[c] = &linkAge{}
	k.mu.Unlock()
}

func (k *KernelDevice) gone(c *conn, disconnected bool) {
	k.mu.Lock()
	delete(k.conns, c)
	k.lastGone = time.Now()
	if disconnected {
		k.disc = true
	}
	k.mu.Unlock()
	select {
	case k.kick <- struct{}{}:
	default:
	}
}

// waitBound waits for the kernel to report the device bound.
func (k *KernelDevice) waitBound() error {
	for end := time.Now().Add(bindWait); ; {
		st, err := k.kern.state(k.lock.index)
		if err != nil {
			return err
		}
		if st.bound {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("the kernel does not report it bound after %v", bindWait)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// prove reads a block over each of the kernel's sockets, so that the device works when the attachment is
// reported; the first open makes the kernel read the partition table besides. Sockets that
// the kernel does not receive on are parked at once. A device that cannot be read is attached all the same.
func (k *KernelDevice) prove() {
	for i, end := 0, time.Now().Add(bindWait); i < k.opt.Sockets; i++ {
		done := make(chan error, 1)
		go func() { done <- k.kern.probe(k.lock.index, i) }()
	wait:
		for {
			select {
			case err := <-done:
				if err != nil {
					k.log.Warn("nbd: cannot read the device", "device", k.Path(), "socket", i, "err", err)
				}
				break wait
			case <-k.ended:
				return
			case <-time.After(proveAfter):
			}
			if time.Now().After(end) {
				k.log.Warn("nbd: reading the device takes long", "device", k.Path(), "socket", i)
				return
			}
			if k.unread() {
				k.op.Lock()
				if !k.down && k.kern.method() != "ioctl" {
					k.log.Debug("nbd: the kernel does not receive on a socket", "device", k.Path())
					k.park("the kernel did not receive on all sockets")
					k.look()
				}
				k.op.Unlock()
			}
		}
	}
}

// unread tells whether there are replies that lie unread for a while.
func (k *KernelDevice) unread() bool {
	look := func() map[*conn]int {
		k.mu.Lock()
		l := slices.Collect(maps.Keys(k.conns))
		k.mu.Unlock()
		m := map[*conn]int{}
		for _, c := range l {
			_ = c.dom.w.Call(func() {
				if c.phase < phaseDead {
					m[c], _ = unix.IoctlGetInt(c.fd, unix.SIOCOUTQ)
				}
			})
		}
		return m
	}
	before := look()
	time.Sleep(proveAfter / 2)
	for c, n := range look() {
		if n > 0 && before[c] == n {
			return true
		}
	}
	return false
}

// Path is /dev/nbdN.
func (k *KernelDevice) Path() string { return k.lock.Path() }

// TookOver reports whether the device was attached by a process that is gone.
func (k *KernelDevice) TookOver() bool { return k.took }

// Method is how the kernel is spoken to: netlink or ioctl.
func (k *KernelDevice) Method() string { return k.kern.method() }

// Users names what uses the device: mounts, swap, holders, processes that have it open.
func (k *KernelDevice) Users() []string { return k.kern.users(k.lock.index) }

// Ended is closed when the device is not attached any more; Err tells why.
func (k *KernelDevice) Ended() <-chan struct{} { return k.ended }

// Err is nil after Detach.
func (k *KernelDevice) Err() error {
	select {
	case <-k.ended:
		return k.err
	default:
		return nil
	}
}

// finish ends the watch; under k.op.
func (k *KernelDevice) finish(err error) {
	k.down = true
	k.once.Do(func() {
		k.err = err
		close(k.stop)
		close(k.ended)
		// The kernel's view of the device was checked; the next may have it.
		_ = k.lock.Close()
	})
}

// watch looks after the connections and the size.
func (k *KernelDevice) watch() {
	defer close(k.stopped)
	t := time.NewTicker(k.opt.watchPeriod)
	defer t.Stop()
	for {
		select {
		case <-k.stop:
			return
		case <-t.C:
		case <-k.kick:
		}
		k.op.Lock()
		if !k.down {
			k.look()
		}
		k.op.Unlock()
	}
}

// look is one round of the watch; under k.op.
func (k *KernelDevice) look() {
	st, err := k.kern.state(k.lock.index)
	if err != nil {
		k.log.Warn("nbd: cannot look at the device", "device", k.Path(), "err", err)
		return
	}
	k.mu.Lock()
	left, disc := len(k.conns), k.disc
	if left < k.opt.Sockets && !k.parked {
		k.parked, k.parkedFor = true, "a connection has ended"
	}
	if !k.parked {
		now := nanotime()
		for c, a := range k.conns {
			o, u, n := a.oldest.Load(), a.unread.Load(), c.pub.answered.Load()
			if o != 0 && time.Duration(now-o) > k.opt.parkAfter {
				k.parked, k.parkedFor = true, fmt.Sprintf("a request has no answer after %v", k.opt.parkAfter)
			}
			if u != 0 && time.Duration(now-u) > unreadAfter {
				k.parked, k.parkedFor = true, fmt.Sprintf("the kernel has not read a reply for %v", unreadAfter)
			}
			if c.pub.used.Load() == 0 && o == 0 && u == 0 && a.seen == n {
				continue // idle: its worker may sleep on
			}
			a.seen = n
			// The answer is for the next round. A worker that has ended gives none.
			_ = c.dom.w.Submit(worker.TaskFunc(func() { a.ask(c) }))
		}
	}
	parked, why, quiet := k.parked, k.parkedFor, time.Since(k.lastGone) >= k.opt.settle
	k.mu.Unlock()

	if !st.bound || disc && left == 0 {
		k.cutAll("device disconnected")
		k.finish(ErrUnbound)
		return
	}
	switch {
	case disc: // the rest of the connections follows
	case parked && k.kern.method() == "ioctl":
		k.cutAll(why)
		k.finish(fmt.Errorf("%s: %s, which is the end without netlink", k.Path(), why))
	case parked && left > 0:
		k.cutAll(why)
	case parked && !quiet:
		time.AfterFunc(k.opt.settle, func() {
			select {
			case k.kick <- struct{}{}:
			default:
			}
		})
	case parked:
		k.mu.Lock()
		k.parked = false
		k.mu.Unlock()
		if err := k.bind(false); err != nil {
			k.log.Warn("nbd: cannot give the kernel new connections, trying again", "device", k.Path(), "err", err)
			k.park("the kernel has not taken new connections")
			k.cutAll("not attached")
			return
		}
		k.log.Info("nbd: the kernel has new connections", "device", k.Path(), "reason", why)
	default:
		k.resize()
	}
}

func (k *KernelDevice) park(why string) {
	k.mu.Lock()
	k.parked, k.parkedFor = true, why
	k.mu.Unlock()
}

// ShortenDeadTimeout is for a process that has been told to end: if it is killed before it has
// detached, the kernel keeps requests for d (whole seconds, at least 1 s) instead of
// DeviceOptions.DeadTimeout. On the way down of a machine nobody comes to take the device over, and
// who syncs there must not wait for that.
func (k *KernelDevice) ShortenDeadTimeout(d time.Duration) error {
	k.op.Lock()
	defer k.op.Unlock()
	d = max(d, time.Second)
	if k.down || d >= k.opt.DeadTimeout || k.kern.method() == "ioctl" { // there it goes with its process
		return nil
	}
	k.opt.DeadTimeout = d
	b := k.binding()
	b.size = uint64(k.size) // resize's business
	if err := k.kern.reconfigure(b); err != nil {
		return fmt.Errorf("nbd: shorten the dead timeout of %s: %w", k.Path(), err)
	}
	return nil
}

// resize tells the kernel when the device has grown. It cannot shrink under a file system.
func (k *KernelDevice) resize() {
	b := k.binding()
	if int64(b.size) <= k.size {
		return
	}
	if err := k.kern.reconfigure(b); err != nil {
		k.log.Warn("nbd: cannot tell the kernel the new size, trying again", "device", k.Path(), "size", b.size, "err", err)
		return
	}
	k.log.Info("nbd: device has grown", "device", k.Path(), "from", k.size, "to", b.size)
	k.size = int64(b.size)
}

// cutAll closes all connections; they are gone when the device has answered their requests.
func (k *KernelDevice) cutAll(why string) {
	k.mu.Lock()
	var l []*conn
	for c := range k.conns {
		l = append(l, c)
	}
	k.mu.Unlock()
	for _, c := range l {
		k.srv.onWorker(c, func(c *conn) { c.cut(why) })
	}
}

// inTime runs fn on a goroutine of its own and waits no longer than ctx. A system call that hangs
// ends when the kernel's sockets do.
func inTime(ctx context.Context, what string, fn func() error) error {
	done := make(chan error, 1)
	go func() { done <- fn() }()
	select {
	case err := <-done:
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", what, context.Cause(ctx))
	}
}

// Detach ends the attachment: the device is opened exclusively, what the page cache has is written and
// flushed, the kernel is told to disconnect, and nil is returned when it reports the device unbound.
//
// Without force it is refused, and nothing is changed, while the device is used (ErrDeviceInUse names by
// whom), or when the flush fails or takes longer than ctx. With force it disconnects in any case; users get
// I/O errors from then on. The error tells what may be lost. ErrStillBound says that the kernel
// has not let go of the device; it will do so when its users do.
func (k *KernelDevice) Detach(ctx context.Context, force bool) error {
	k.op.Lock()
	defer k.op.Unlock()
	if k.down {
		return nil
	}
	var warnings []error
	// The error to return if this is the end; forced it goes on, and this is what may be lost.
	warn := func(err error, lost string) error {
		if !force {
			return fmt.Errorf("detach %s: %w", k.Path(), err)
		}
		warnings = append(warnings, fmt.Errorf("detach %s: %w: disconnected all the same; %s", k.Path(), err, lost))
		return nil
	}
	used := k.Users()
	// Whoever only looks what the device is, as udev does after each change, is gone in a moment.
	for end := time.Now().Add(lookWait); !force && len(used) > 0 && time.Now().Before(end) && ctx.Err() == nil &&
		!slices.ContainsFunc(used, func(u string) bool { return !strings.HasPrefix(u, openIn) }); used = k.Users() {
		time.Sleep(20 * time.Millisecond)
	}
	if len(used) > 0 {
		if err := warn(fmt.Errorf("%w: %s", ErrDeviceInUse, strings.Join(used, ", ")), usersLose); err != nil {
			return err
		}
	}
	// The store is asked before the kernel. A thread that waits for this device in the kernel can only be set free by this
	// device: not even SIGKILL ends it, and until then the process has its sockets and its lock, so that nobody can take over.
	if !force && !k.exp.dev.Info().ReadOnly {
		if err := inTime(ctx, "flush", k.exp.dev.Flush); err != nil {
			return fmt.Errorf("detach %s: %w", k.Path(), err)
		}
	}
	// While we have it open exclusively nobody mounts it.
	f, err := k.open(ctx, len(used) == 0)
	if err != nil {
		lost := cacheLost
		if errors.Is(err, unix.EBUSY) {
			if k.flushing.Load() > 0 { // it is us
				err = fmt.Errorf("the flush of an earlier attempt has no answer yet: %w", context.DeadlineExceeded)
			} else {
				err, lost = fmt.Errorf("%w: %w", ErrDeviceInUse, err), usersLose
			}
		}
		if err := warn(err, lost); err != nil {
			return err
		}
	}
	closed := func() {
		if f != nil {
			go f.Close() // it can wait for requests that hang
			f = nil
		}
	}
	defer closed()
	if f != nil && !k.exp.dev.Info().ReadOnly {
		sync, cancel := context.WithCancel(ctx)
		if d, ok := ctx.Deadline(); ok && force { // the disconnect needs time too
			sync, cancel = timeout.With(ctx, time.Until(d)/2, "half of the time to detach")
		}
		flush := f.Sync
		err := inTime(sync, "flush", func() error {
			k.flushing.Add(1) // it goes on, with the device open, when its time is over
			defer k.flushing.Add(-1)
			return flush()
		})
		cancel()
		if err != nil {
			if err := warn(err, cacheLost); err != nil {
				return err
			}
		}
	}
	k.down = true
	if err := inTime(ctx, "disconnect", func() error { return k.kern.disconnect(k.lock.index) }); err != nil {
		// A kernel that hangs in a send is set free by the end of the socket.
		k.cutAll("detaching")
		more, cancel := timeout.With(context.Background(), cutWait, "")
		err2 := inTime(more, "disconnect", func() error { return k.kern.disconnect(k.lock.index) })
		cancel()
		if err2 != nil && !errors.Is(err2, unix.ENOENT) && !errors.Is(err2, unix.EINVAL) {
			warnings = append(warnings, fmt.Errorf("detach %s: %w", k.Path(), err))
		}
	}
	if f != nil {
		// Nothing is left to write; the kernel unbinds with the last close.
		g := f
		f = nil
		if err := inTime(ctx, "close", g.Close); err != nil {
			warnings = append(warnings, fmt.Errorf("detach %s: %w", k.Path(), err))
		}
	}
	wait := ctx
	if len(used) > 0 {
		var cancel context.CancelFunc
		wait, cancel = timeout.With(ctx, heldWait, "")
		defer cancel()
	}
	if err := k.waitUnbound(wait); err != nil {
		warnings = append(warnings, fmt.Errorf("detach %s: %w", k.Path(), err))
	} else if k.many {
		k.schedule(ctx, schedulerMany, schedulerOne)
	}
	k.cutAll("detached")
	k.finish(nil)
	return errors.Join(warnings...)
}

// open opens the device, which may hang when the kernel looks for partitions.
func (k *KernelDevice) open(ctx context.Context, exclusive bool) (blockFile, error) {
	files, failed := make(chan blockFile), make(chan error, 1)
	go func() {
		f, err := k.kern.open(k.lock.index, exclusive, k.exp.dev.Info().ReadOnly)
		if err != nil {
			failed <- err
			return
		}
		select {
		case files <- f:
		case <-ctx.Done(): // nobody waits for it any more
			f.Close()
		}
	}()
	select {
	case f := <-files:
		return f, nil
	case err := <-failed:
		return nil, fmt.Errorf("open: %w", err)
	case <-ctx.Done():
		return nil, fmt.Errorf("open: %w", context.Cause(ctx))
	}
}

func (k *KernelDevice) waitUnbound(ctx context.Context) error {
	for {
		st, err := k.kern.state(k.lock.index)
		if err == nil && !st.bound {
			var c bool
			if c, err = k.kern.connected(k.lock.index); err == nil && !c {
				return nil
			}
			// Another program may have it open for a moment, to look what it is.
		}
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w yet; it does when this has ended: %s", ErrStillBound, strings.Join(append(k.Users(), "requests in the kernel"), ", "))
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// Abandon forgets the device without detaching it, as the end of the process would: the
// kernel keeps it and its requests for DeadTimeout, and another process can take it over.
func (k *KernelDevice) Abandon() {
	k.op.Lock()
	defer k.op.Unlock()
	if !k.down {
		k.cutAll("abandoned")
		k.finish(nil)
	}
}
