package nbd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/nbd/nbdtest"
)

// fakeKernel is a kernel with NBD devices that the test looks into.
type fakeKernel struct {
	how string
	mu  sync.Mutex
	dev map[int]*fakeDevice

	bindings      []binding // what was asked for, in order
	refuse        error     // of connect and reconfigure
	used          []string
	looks         int  // if set, used is for so many questions
	claimed       bool // an exclusive open fails
	syncErr       error
	syncHangs     chan struct{} // if set, Sync waits for it
	syncing       func()        // if set, called by Sync
	staysBound    bool          // after a disconnect
	disconnecting func()        // if set, called by a disconnect
	opens         int
	deaf          bool // does not read at first
	only          int  // number of devices; 0: the kernel makes more
	scheduler     string
}

func (k *fakeKernel) schedule(_ int, from, to string) (bool, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.scheduler != from {
		return false, nil
	}
	k.scheduler = to
	return true, nil
}

// set changes what the kernel does, also while a device is watched.
func (k *fakeKernel) set(fn func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	fn()
}

type fakeDevice struct {
	st    devState
	socks []*nbdtest.Client
}

func newFakeKernel() *fakeKernel { return &fakeKernel{how: "netlink", dev: map[int]*fakeDevice{}} }

func (k *fakeKernel) method() string { return k.how }

// take duplicates the descriptors, as the kernel takes references.
func take(fds []int) (l []*nbdtest.Client) {
	for _, fd := range fds {
		n, err := unix.Dup(fd)
		if err != nil {
			panic(err)
		}
		f := os.NewFile(uintptr(n), "socket")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			panic(err)
		}
		l = append(l, nbdtest.InTransmission(c))
	}
	return l
}

func (k *fakeKernel) connect(b *binding) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.refuse != nil {
		return k.refuse
	}
	if d := k.dev[b.index]; d != nil && d.st.bound {
		return unix.EBUSY
	}
	k.bindings = append(k.bindings, *b)
	k.dev[b.index] = &fakeDevice{st: devState{exists: true, bound: true, pid: 4711, backend: b.backend, sockets: len(b.sockets)}, socks: take(b.sockets)}
	return nil
}

func (k *fakeKernel) reconfigure(b *binding) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.refuse != nil {
		return k.refuse
	}
	d := k.dev[b.index]
	if d == nil || !d.st.bound || d.st.backend != b.backend {
		return unix.EINVAL
	}
	k.bindings = append(k.bindings, *b)
	if len(b.sockets) > 0 {
		for _, s := range d.socks {
			s.Close()
		}
		d.socks = take(b.sockets)
	}
	return nil
}

func (k *fakeKernel) disconnect(index int) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	d := k.dev[index]
	if d == nil || !d.st.bound {
		return unix.EINVAL
	}
	for _, s := range d.socks {
		s.Send(0, uint16(cmdDisc), 1, 0, 0, nil)
		s.Close()
	}
	d.socks = nil
	d.st.bound = k.staysBound
	if k.disconnecting != nil {
		k.disconnecting()
	}
	return nil
}

func (k *fakeKernel) connected(index int) (bool, error) {
	st, err := k.state(index)
	return st.bound, err
}

func (k *fakeKernel) devices() []int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Sorted(maps.Keys(k.dev))
}

func (k *fakeKernel) state(index int) (devState, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if d := k.dev[index]; d != nil {
		return d.st, nil
	}
	if k.only > 0 && index >= k.only {
		return devState{}, fs.ErrNotExist
	}
	return devState{exists: index < 4}, nil
}

func (k *fakeKernel) users(int) []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	used := slices.Clone(k.used)
	if k.looks > 0 {
		if k.looks--; k.looks == 0 {
			k.used = nil
		}
	}
	return used
}

// probe reads through socket i. A deaf kernel does not take the answer while its sockets are the first ones.
func (k *fakeKernel) probe(index, i int) error {
	for {
		k.mu.Lock()
		k.opens++
		c, deaf := k.dev[index].socks[i], k.deaf && len(k.bindings) == 1
		k.mu.Unlock()
		if err := c.Send(0, uint16(cmdRead), 99, 0, 512, nil); err != nil {
			return err
		}
		c.Expect(uint16(cmdRead), 99, 0, 512)
		if !deaf {
			_, err := c.ReadReply()
			return err
		}
		if !within(patience, func() bool { return len(k.asked()) > 1 }) {
			return fmt.Errorf("no new sockets within %v", patience)
		}
	}
}

func (k *fakeKernel) process(tid int) string { return strconv.Itoa(tid) + " \"someone\"" }

func (k *fakeKernel) open(index int, exclusive, readOnly bool) (blockFile, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.opens++
	if exclusive && k.claimed {
		return nil, unix.EBUSY
	}
	return fakeFile{k}, nil
}

type fakeFile struct{ k *fakeKernel }

func (f fakeFile) Sync() error {
	if f.k.syncing != nil {
		f.k.syncing()
	}
	if f.k.syncHangs != nil {
		<-f.k.syncHangs
	}
	return f.k.syncErr
}
func (f fakeFile) Close() error { return nil }

// sock is socket i of the device now.
func (k *fakeKernel) sock(index, i int) *nbdtest.Client {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.dev[index].socks[i]
}

// close lets go of all sockets.
func (k *fakeKernel) close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, d := range k.dev {
		for _, s := range d.socks {
			s.Close()
		}
	}
}

func (k *fakeKernel) asked() []binding {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.bindings)
}

const testIdentifier = "rdblk1 00 1 nqn.test"

func attachTo(t *testing.T, k *fakeKernel, s *testServer, dir, device string, mod ...func(*DeviceOptions)) (*KernelDevice, error) {
	t.Helper()
	l, err := lockDevice(k, device, dir, "rdblk1 ")
	if err != nil {
		return nil, err
	}
	o := DeviceOptions{Identifier: testIdentifier, Sockets: 2, DeadTimeout: 11 * time.Minute, Logger: slog.New(slog.NewTextHandler(s.log, nil)),
		watchPeriod: 20 * time.Millisecond, settle: 20 * time.Millisecond}
	for _, m := range mod {
		m(&o)
	}
	d, err := s.AttachDevice(l, "", o)
	if err != nil {
		l.Close()
		return nil, err
	}
	t.Cleanup(func() { d.Abandon(); <-d.stopped; k.close() })
	return d, nil
}

func mustAttach(t *testing.T, k *fakeKernel, s *testServer, dir, device string, mod ...func(*DeviceOptions)) *KernelDevice {
	t.Helper()
	d, err := attachTo(t, k, s, dir, device, mod...)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func inSeconds(t *testing.T, n int) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(n)*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// A device of several queues gets the scheduler that the kernel has for such, until it is detached; what somebody
// else has chosen stays.
func TestScheduler(t *testing.T) {
	for _, c := range []struct {
		sockets                 int
		before, attached, after string
		chosen                  string // by somebody else meanwhile
	}{
		{2, "mq-deadline", "none", "mq-deadline", ""},
		{1, "mq-deadline", "mq-deadline", "mq-deadline", ""},
		{2, "bfq", "bfq", "bfq", ""},
		{2, "none", "none", "none", ""},
		{2, "mq-deadline", "none", "kyber", "kyber"},
	} {
		k, s := newFakeKernel(), serve(t, newMemDevice(1<<20))
		k.scheduler = c.before
		d := mustAttach(t, k, s, t.TempDir(), "auto", func(o *DeviceOptions) { o.Sockets = c.sockets })
		now := func() string {
			k.mu.Lock()
			defer k.mu.Unlock()
			return k.scheduler
		}
		if now() != c.attached {
			t.Errorf("%+v: attached with %s", c, now())
		}
		if c.chosen != "" {
			k.schedule(0, c.attached, c.chosen)
		}
		if err := d.Detach(inSeconds(t, 10), false); err != nil {
			t.Fatal(err)
		}
		if now() != c.after {
			t.Errorf("%+v: detached with %s", c, now())
		}
	}
}

// Attach, work on all sockets, detach.
func TestAttachDevice(t *testing.T) {
	dev := newMemDevice(1 << 20)
	k, s := newFakeKernel(), serve(t, dev)
	d := mustAttach(t, k, s, t.TempDir(), "auto")
	if d.Path() != "/dev/nbd0" || d.TookOver() || d.Method() != "netlink" {
		t.Errorf("%s, took over %v, by %s", d.Path(), d.TookOver(), d.Method())
	}
	b := k.asked()[0]
	const flags = 1<<0 | 1<<2 | 1<<3 | 1<<5 | 1<<6 | 1<<8 // linux/nbd.h: HAS_FLAGS, FLUSH, FUA, TRIM, WRITE_ZEROES, CAN_MULTI_CONN
	if b.size != 1<<20 || b.blockSize != 512 || b.timeout != 30 || b.deadConn != 660 || b.serverFlags != flags || b.backend != testIdentifier || len(b.sockets) != 2 {
		t.Errorf("asked for %+v", b)
	}
	if k.opens == 0 {
		t.Error("nobody has looked for partitions")
	}
	for i := range 2 {
		c := k.sock(0, i)
		do(t, c, cmdFlagFUA, uint16(cmdWrite), uint64(i)*4096, 4096, make([]byte, 4096), 0)
		do(t, c, 0, uint16(cmdRead), uint64(i)*4096, 4096, nil, 0)
		do(t, c, 0, uint16(cmdFlush), 0, 0, nil, 0)
	}
	if err := d.Detach(inSeconds(t, 10), false); err != nil {
		t.Fatal(err)
	}
	if st, _ := k.state(0); st.bound || d.Err() != nil {
		t.Errorf("%+v, %v", st, d.Err())
	}
	if err := d.Detach(inSeconds(t, 10), false); err != nil {
		t.Errorf("a second detach: %v", err)
	}
	eventually(t, "connections have ended", func() bool { return len(s.Connections()) == 0 })
}

func TestDeviceInUse(t *testing.T) {
	k, s, dir := newFakeKernel(), serve(t, newMemDevice(1<<20)), t.TempDir()
	d := mustAttach(t, k, s, dir, "/dev/nbd0")
	k.set(func() {
		k.dev[1] = &fakeDevice{st: devState{exists: true, bound: true, pid: 99, backend: "theirs", sockets: 1}}
	})
	for device, want := range map[string]string{
		"/dev/nbd0":  "in use by process " + strconv.Itoa(os.Getpid()) + ` (back end "` + testIdentifier,
		"/dev/nbd1":  `in use by process 99 "someone" (back end "theirs")`,
		"/dev/sda":   "neither auto nor /dev/nbdN",
		"/dev/nbd01": "neither auto nor /dev/nbdN",
	} {
		if _, err := attachTo(t, k, s, dir, device); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", device, err, want)
		} else if strings.HasPrefix(want, "in use") != errors.Is(err, ErrDeviceInUse) {
			t.Errorf("%s: %v", device, err)
		}
	}
	other := mustAttach(t, k, s, dir, "auto")
	if other.Path() != "/dev/nbd2" {
		t.Errorf("auto gave %s", other.Path())
	}
	// A mount of a device that is not bound, as after a forced detach, keeps it.
	k.set(func() { k.used = []string{"mounted on /mnt"} })
	if _, err := attachTo(t, k, s, dir, "/dev/nbd3"); !errors.Is(err, ErrDeviceInUse) || !strings.Contains(err.Error(), "/mnt") {
		t.Errorf("mounted: %v", err)
	}
	k.set(func() { k.used, k.only = nil, 3 })
	if _, err := attachTo(t, k, s, dir, "auto"); !errors.Is(err, ErrDeviceInUse) || !strings.Contains(err.Error(), "all 3 there are") {
		t.Errorf("all in use: %v", err)
	}
	k.set(func() { k.only = 0 })
	// The kernel has the last word.
	for _, c := range []struct {
		err  error
		want string
	}{{unix.EBUSY, "in use"}, {unix.EPERM, "run it as root"}} {
		k.set(func() { k.refuse = c.err })
		if _, err := attachTo(t, k, s, dir, "/dev/nbd3"); !errors.Is(err, c.err) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v", err)
		}
	}
	k.set(func() { k.refuse = nil })
	if err := d.Detach(inSeconds(t, 10), false); err != nil {
		t.Error(err)
	}
	if d := mustAttach(t, k, s, dir, "/dev/nbd0"); d.TookOver() {
		t.Error("took over a device that was detached")
	}
}

// A device whose process is gone is taken over, with as many sockets as it has, and by nobody else.
func TestTakeOver(t *testing.T) {
	k, dir := newFakeKernel(), t.TempDir()
	dev := newMemDevice(1 << 20)
	one := serve(t, dev)
	mustAttach(t, k, one, dir, "/dev/nbd0", func(o *DeviceOptions) { o.Sockets = 3 }).Abandon()
	two := serve(t, dev)
	if l, err := lockDevice(k, "/dev/nbd0", dir, "other "); !errors.Is(err, ErrDeviceInUse) {
		l.Close()
		t.Errorf("orphan of another kind: %v", err)
	}
	if got := orphans(k, dir, "rdblk1 "); !slices.Equal(got, []string{"/dev/nbd0"}) || orphans(k, dir, "other ") != nil {
		t.Errorf("orphans: %q", got)
	}
	if _, err := attachTo(t, k, two, dir, "/dev/nbd0", func(o *DeviceOptions) { o.Identifier = "rdblk1 00 2 nqn.test" }); !errors.Is(err, ErrDeviceInUse) || !strings.Contains(err.Error(), testIdentifier) {
		t.Errorf("orphan of another disk: %v", err)
	}
	if d := mustAttach(t, k, two, dir, "auto"); d.Path() != "/dev/nbd1" {
		t.Errorf("auto gave %s", d.Path())
	}
	if got := orphans(k, dir, "rdblk1 "); !slices.Equal(got, []string{"/dev/nbd0"}) {
		t.Errorf("orphans beside an attachment: %q", got)
	}
	// What was detached by force stays bound for those who have it mounted, and takes no connections.
	k.set(func() { k.refuse, k.used = unix.EINVAL, []string{"mounted on /mnt/x"} })
	if _, err := attachTo(t, k, two, dir, "/dev/nbd0"); !errors.Is(err, ErrDeviceInUse) || !strings.Contains(err.Error(), "mounted on /mnt/x") {
		t.Errorf("disconnected and still mounted: %v", err)
	}
	k.set(func() { k.refuse, k.used = nil, nil })
	d := mustAttach(t, k, two, dir, "/dev/nbd0", func(o *DeviceOptions) { o.Sockets = 1 })
	if l := k.asked(); !d.TookOver() || len(l[len(l)-1].sockets) != 3 {
		t.Errorf("took over %v, asked %+v", d.TookOver(), l)
	}
	for i := range 3 {
		do(t, k.sock(0, i), 0, uint16(cmdRead), 0, 512, nil, 0)
	}
	if err := d.Detach(inSeconds(t, 10), false); err != nil {
		t.Error(err)
	}
}

// Two that want one device: the later one reads what the other is doing with it.
func TestLockHeld(t *testing.T) {
	k, dir := newFakeKernel(), t.TempDir()
	l, err := lockDevice(k, "/dev/nbd0", dir, "rdblk1 ")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	// Who looks for orphans does not keep others from a device.
	k.dev[1] = &fakeDevice{st: devState{exists: true, bound: true, pid: 4711, backend: testIdentifier, sockets: 1}}
	looker, err := os.Create(lockFile(dir, 1))
	if err != nil {
		t.Fatal(err)
	}
	defer looker.Close()
	fd := int(looker.Fd())
	if err := unix.Flock(fd, unix.LOCK_SH); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(20*time.Millisecond, func() { unix.Flock(fd, unix.LOCK_UN) })
	defer timer.Stop()
	looking := lookWait
	lookWait = patience
	taken, err := lockDevice(k, "/dev/nbd1", dir, "rdblk1 ")
	lookWait = looking
	if err != nil || taken.Orphan != testIdentifier {
		t.Fatalf("beside a looker: %v", err)
	}
	if got := orphans(k, dir, "rdblk1 "); got != nil {
		t.Errorf("orphans while one is being taken over: %q", got)
	}
	taken.Close()
	want := fmt.Sprintf("by process %d (which is attaching it)", os.Getpid())
	if _, err := lockDevice(k, "/dev/nbd0", dir, "rdblk1 "); !errors.Is(err, ErrDeviceInUse) || !strings.Contains(err.Error(), want) {
		t.Errorf("%v", err)
	}
}

// Who may not bind devices reads so before a target is asked for anything.
func TestLockNeedsRoot(t *testing.T) {
	if privileged() != nil {
		t.Log("an ordinary user already")
	} else {
		runtime.LockOSThread() // never unlocked: the thread ends with its goroutine
		h, d := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, [2]unix.CapUserData{}
		if err := unix.Capget(&h, &d[0]); err != nil {
			t.Fatal(err)
		}
		d[unix.CAP_SYS_ADMIN/32].Effective &^= 1 << (unix.CAP_SYS_ADMIN % 32)
		if err := unix.Capset(&h, &d[0]); err != nil {
			t.Fatal(err)
		}
	}
	_, err := LockDevice("auto", t.TempDir(), "rdblk1 ")
	if !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "CAP_SYS_ADMIN: run it as root, or use --socket") {
		t.Errorf("%v", err)
	}
	if o := Orphans(t.TempDir(), "rdblk1 "); o != nil {
		t.Errorf("%q", o)
	}
}

// Detach is refused, with nothing changed, while it would lose something; force says what.
func TestDetachRefused(t *testing.T) {
	for _, c := range []struct {
		name   string
		mod    func(*fakeKernel)
		want   error
		forced string
	}{
		{"mounted", func(k *fakeKernel) { k.used = []string{"mounted on /mnt"} }, ErrDeviceInUse, "mounted on /mnt: disconnected all the same; what its users had not flushed is lost"},
		{"opened", func(k *fakeKernel) { k.used = []string{openIn + "9 (dd)"} }, ErrDeviceInUse, "process 9 (dd): disconnected all the same; what its users"},
		{"claimed", func(k *fakeKernel) { k.claimed = true }, ErrDeviceInUse, "open"},
		{"flush fails", func(k *fakeKernel) { k.syncErr = unix.EIO }, unix.EIO, "disconnected all the same; what the page cache had not written is lost"},
		{"flush hangs", func(k *fakeKernel) { k.syncHangs = make(chan struct{}) }, context.DeadlineExceeded, "what the page cache had not written is lost"},
	} {
		t.Run(c.name, func(t *testing.T) {
			k, s := newFakeKernel(), serve(t, newMemDevice(1<<20))
			d := mustAttach(t, k, s, t.TempDir(), "auto")
			k.set(func() { c.mod(k) })
			ctx, timeIsUp := context.WithCancelCause(inSeconds(t, 60))
			defer timeIsUp(nil)
			if k.syncHangs != nil {
				defer close(k.syncHangs)
				// No sooner than the flush has begun, which may take any time.
				k.syncing = func() { timeIsUp(context.DeadlineExceeded) }
			}
			if err := d.Detach(ctx, false); !errors.Is(err, c.want) {
				t.Fatalf("detach: %v", err)
			}
			if st, _ := k.state(0); !st.bound {
				t.Fatal("disconnected")
			}
			do(t, k.sock(0, 0), 0, uint16(cmdRead), 0, 512, nil, 0)
			if k.syncHangs != nil { // the flush goes on, and it is that which has the device open
				k.set(func() { k.claimed = true })
				if err := d.Detach(inSeconds(t, 60), false); err == nil || errors.Is(err, ErrDeviceInUse) || !strings.Contains(err.Error(), "the flush of an earlier attempt") {
					t.Errorf("again: %v", err)
				}
			}
			start := time.Now()
			err := d.Detach(inSeconds(t, 60), true)
			if err == nil || !strings.Contains(err.Error(), c.forced) {
				t.Errorf("forced: %v", err)
			}
			if st, _ := k.state(0); st.bound || time.Since(start) > patience/2 {
				t.Errorf("bound %v after %v", st.bound, time.Since(start))
			}
		})
	}
}

// unanswered is a device whose flushes wait for a gate.
type unanswered struct {
	*memDevice
	gate chan struct{}
}

func (d unanswered) Flush() error {
	<-d.gate
	return d.memDevice.Flush()
}

// While the store does not answer, the kernel is not asked for anything that would make a thread of this process wait for
// it: that outlasts a SIGKILL, and nobody could take the device over.
func TestDetachAsksTheStoreFirst(t *testing.T) {
	dev := unanswered{newMemDevice(1 << 20), make(chan struct{})}
	k, s := newFakeKernel(), serve(t, dev)
	d := mustAttach(t, k, s, t.TempDir(), "auto")
	opens := func() int {
		k.mu.Lock()
		defer k.mu.Unlock()
		return k.opens
	}
	before := opens()
	if err := d.Detach(inSeconds(t, 1), false); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "flush: ") {
		t.Fatal(err)
	}
	if st, _ := k.state(0); !st.bound || opens() != before {
		t.Fatalf("bound %v, opened %d times", st.bound, opens()-before)
	}
	do(t, k.sock(0, 0), 0, uint16(cmdRead), 0, 512, nil, 0)
	close(dev.gate)
	if err := d.Detach(inSeconds(t, 10), false); err != nil || opens() != before+1 {
		t.Errorf("%v, opened %d times", err, opens()-before)
	}
}

// A look of udev's at the device is waited for.
func TestDetachWaitsForLookers(t *testing.T) {
	k, s := newFakeKernel(), serve(t, newMemDevice(1<<20))
	d := mustAttach(t, k, s, t.TempDir(), "auto")
	k.set(func() { k.used, k.looks = []string{openIn + "5 (udevd)"}, 5 })
	looking := lookWait
	lookWait = patience
	defer func() { lookWait = looking }()
	if err := d.Detach(inSeconds(t, 60), false); err != nil {
		t.Error(err)
	}
}

// Success is what the kernel reports, not what we asked for.
func TestDetachNotUnbound(t *testing.T) {
	k, s := newFakeKernel(), serve(t, newMemDevice(1<<20))
	d := mustAttach(t, k, s, t.TempDir(), "auto")
	ctx, timeIsUp := context.WithCancel(inSeconds(t, 60))
	defer timeIsUp()
	k.set(func() { k.staysBound, k.disconnecting = true, timeIsUp })
	if err := d.Detach(ctx, false); !errors.Is(err, ErrStillBound) {
		t.Errorf("%v", err)
	}
}

// A request without answer: all sockets are parked, and new ones are there only when the
// device has answered, so that the first copy of a write cannot come after the second.
func TestPark(t *testing.T) {
	dev := newHeldDevice(t, 1<<20, 2, 1<<20)
	k, s := newFakeKernel(), serve(t, dev)
	pass := func(on bool) {
		for _, q := range dev.queues {
			q.mu.Lock()
			q.pass = on
			q.mu.Unlock()
		}
	}
	pass(true)
	d := mustAttach(t, k, s, t.TempDir(), "auto", func(o *DeviceOptions) { o.parkAfter = patience })
	// The reads of the attachment itself may take their time, and the watch has to have seen their end.
	eventually(t, "nothing is left of attaching", func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		for c, a := range d.conns {
			if c.pub.used.Load() != 0 || a.oldest.Load() != 0 {
				return false
			}
		}
		return true
	})
	pass(false)
	d.op.Lock()
	d.opt.parkAfter = 100 * time.Millisecond
	d.op.Unlock()
	a, b := k.sock(0, 0), k.sock(0, 1)
	if err := a.Send(0, uint16(cmdWrite), 7, 0, 512, make([]byte, 512)); err != nil {
		t.Fatal(err)
	}
	held := func() int { return dev.queues[0].count() + dev.queues[1].count() }
	eventually(t, "the device has the request", func() bool { return held() == 1 })
	for _, c := range []*nbdtest.Client{a, b} {
		c.SetReadDeadline(time.Now().Add(patience))
		if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("%d, %v: not parked", n, err)
		}
	}
	<-time.After(300 * time.Millisecond) // rounds of the watch in which nothing may happen
	if n := len(k.asked()); n != 1 {
		t.Fatalf("new sockets while the device has an old request: asked %d times", n)
	}
	for _, q := range dev.queues {
		if q.count() > 0 {
			q.release(0)
		}
	}
	eventually(t, "new sockets", func() bool { return len(k.asked()) == 2 })
	if l := k.asked(); len(l[1].sockets) != 2 {
		t.Errorf("%+v", l[1])
	}
	d.op.Lock()
	d.opt.parkAfter = patience // the next request may be with the device for longer
	d.op.Unlock()
	c := k.sock(0, 0)
	if err := c.Send(0, uint16(cmdWrite), 8, 0, 512, make([]byte, 512)); err != nil {
		t.Fatal(err)
	}
	c.Expect(uint16(cmdWrite), 8, 0, 512)
	eventually(t, "the device has it again", func() bool { return held() == 1 })
	for _, q := range dev.queues {
		if q.count() > 0 {
			q.release(0)
		}
	}
	c.SetReadDeadline(time.Now().Add(patience))
	if r, err := c.ReadReply(); err != nil || r.Errno != 0 {
		t.Errorf("%+v, %v", r, err)
	}
}

// Replies that the kernel does not read, and a socket that ends: new sockets.
func TestNewSockets(t *testing.T) {
	k, s := newFakeKernel(), serve(t, newMemDevice(1<<20))
	mustAttach(t, k, s, t.TempDir(), "auto")
	if err := k.sock(0, 1).Send(0, uint16(cmdRead), 7, 0, 512, nil); err != nil { // and no ReadReply
		t.Fatal(err)
	}
	eventually(t, "new sockets", func() bool { return len(k.asked()) == 2 })
	do(t, k.sock(0, 1), 0, uint16(cmdRead), 0, 512, nil, 0)
	k.sock(0, 0).Close()
	eventually(t, "new sockets", func() bool { return len(k.asked()) == 3 })
	for i := range 2 {
		do(t, k.sock(0, i), 0, uint16(cmdRead), 0, 512, nil, 0)
	}
}

// A kernel that does not receive on the first sockets gets new ones before the attachment is reported.
func TestDeafKernel(t *testing.T) {
	k, s := newFakeKernel(), serve(t, newMemDevice(1<<20))
	k.deaf = true
	start := time.Now()
	mustAttach(t, k, s, t.TempDir(), "auto")
	if n := len(k.asked()); n != 2 || time.Since(start) > bindWait {
		t.Errorf("asked %d times, %v", n, time.Since(start))
	}
	do(t, k.sock(0, 0), 0, uint16(cmdRead), 0, 512, nil, 0)
}

func TestDeviceGrows(t *testing.T) {
	dev := newMemDevice(1 << 20)
	k, s := newFakeKernel(), serve(t, dev)
	mustAttach(t, k, s, t.TempDir(), "auto")
	dev.mu.Lock()
	dev.info.Size = 2 << 20
	dev.mu.Unlock()
	eventually(t, "the kernel knows", func() bool { return len(k.asked()) == 2 })
	if b := k.asked()[1]; b.size != 2<<20 || len(b.sockets) != 0 {
		t.Errorf("%+v", b)
	}
}

func TestTakenAway(t *testing.T) {
	k, s := newFakeKernel(), serve(t, newMemDevice(1<<20))
	d := mustAttach(t, k, s, t.TempDir(), "auto")
	if err := k.disconnect(0); err != nil {
		t.Fatal(err)
	}
	select {
	case <-d.Ended():
	case <-time.After(patience):
		t.Fatal("not noticed")
	}
	if !errors.Is(d.Err(), ErrUnbound) {
		t.Errorf("%v", d.Err())
	}
}

// A process that has been told to end leaves the kernel with less patience, also after new sockets.
func TestShortenDeadTimeout(t *testing.T) {
	k, s := newFakeKernel(), serve(t, newMemDevice(1<<20))
	d := mustAttach(t, k, s, t.TempDir(), "auto")
	for _, c := range []time.Duration{10 * time.Second, time.Hour} {
		if err := d.ShortenDeadTimeout(c); err != nil {
			t.Fatal(err)
		}
	}
	b := k.asked()
	if len(b) != 2 || b[0].deadConn != 660 || b[1].deadConn != 10 || len(b[1].sockets) != 0 || b[1].size != 1<<20 || b[1].timeout != 30 {
		t.Errorf("asked for %+v", b)
	}
	k.sock(0, 0).Close()
	eventually(t, "new sockets", func() bool { return len(k.asked()) == 3 })
	if b := k.asked()[2]; b.deadConn != 10 || len(b.sockets) != 2 {
		t.Errorf("asked for %+v", b)
	}
	k.mu.Lock()
	k.refuse = unix.EINVAL
	k.mu.Unlock()
	if err := d.ShortenDeadTimeout(time.Millisecond); !errors.Is(err, unix.EINVAL) {
		t.Errorf("refused by the kernel: %v", err)
	}
}

// By ioctl there is one socket, and its end is the device's.
func TestAttachByIoctl(t *testing.T) {
	k, s := newFakeKernel(), serve(t, newMemDevice(1<<20))
	k.how = "ioctl"
	d := mustAttach(t, k, s, t.TempDir(), "auto")
	if b := k.asked()[0]; len(b.sockets) != 1 || b.timeout != 0 {
		t.Errorf("%+v", b)
	}
	if err := d.ShortenDeadTimeout(time.Second); err != nil || len(k.asked()) != 1 {
		t.Errorf("%v, %+v", err, k.asked())
	}
	k.sock(0, 0).Close()
	select {
	case <-d.Ended():
	case <-time.After(patience):
		t.Fatal("not noticed")
	}
	if d.Err() == nil {
		t.Error("no error")
	}
}

func TestUnfitDevices(t *testing.T) {
	k := newFakeKernel()
	for _, c := range []struct {
		size int64
		bs   int
		o    DeviceOptions
		want string
	}{
		{1 << 20, 65536, DeviceOptions{Sockets: 1}, "--socket"},
		{0, 512, DeviceOptions{Sockets: 1}, "no bytes"},
		{1 << 20, 512, DeviceOptions{}, "sockets"},
		{1 << 20, 512, DeviceOptions{Sockets: 1, Identifier: "a\nb"}, "printable"},
	} {
		dev := newMemDevice(c.size)
		dev.info.BlockSize, dev.info.PhysBlock = c.bs, c.bs
		s := serve(t, dev)
		if _, err := attachTo(t, k, s, t.TempDir(), "auto", func(o *DeviceOptions) { *o = c.o }); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// The real reader of /sys and /proc, on a tree made by hand.
func TestSysKernel(t *testing.T) {
	dir := t.TempDir()
	write := func(path, text string) {
		t.Helper()
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	k := &sysKernel{binder: &netlinkBinder{}, sys: dir + "/sys", proc: dir + "/proc", dev: dir + "/dev"}
	if st, err := k.state(5); err != nil || st.exists {
		t.Errorf("%+v, %v", st, err)
	}
	write("sys/block/nbd0/dev", "43:0\n")
	if st, err := k.state(0); err != nil || !st.exists || st.bound {
		t.Errorf("%+v, %v", st, err)
	}
	write("sys/block/nbd0p1/dev", "43:1\n")
	write("sys/block/nbd12/dev", "43:192\n")
	write("sys/block/nbd4/dev", "43:64\n")
	if got := k.devices(); !slices.Equal(got, []int{0, 4, 12}) {
		t.Errorf("%v", got)
	}
	write("sys/block/nbd0/pid", "77\n")
	write("sys/block/nbd0/backend", testIdentifier+"\n")
	write("sys/block/nbd0/mq/0/cpu_list", "")
	write("sys/block/nbd0/mq/1/cpu_list", "")
	write("sys/block/nbd0/nbd0p1/dev", "43:1\n")
	write("sys/block/nbd0/nbd0p1/holders/dm-3/dev", "")
	if st, err := k.state(0); err != nil || st != (devState{exists: true, bound: true, pid: 77, backend: testIdentifier, sockets: 2}) {
		t.Errorf("%+v, %v", st, err)
	}
	write("proc/self/mountinfo", "22 1 43:1 / /mnt/p1 rw - ext4 /dev/nbd0p1 rw\n23 1 43:16 / /other rw - ext4 /dev/nbd1 rw\n24 1 0:50 / /b rw shared:1 - btrfs /dev/nbd0 rw\n")
	write("proc/swaps", "Filename Type\n/dev/nbd0p1 partition 1 0 -2\n")
	write("proc/88/comm", "dd\n")
	write("proc/88/status", "Name:\tdd\nTgid:\t80\n")
	os.MkdirAll(dir+"/proc/88/fd", 0o755)
	os.Symlink("/dev/nbd0", dir+"/proc/88/fd/3")
	os.MkdirAll(dir+"/proc/89/fd", 0o755)
	os.Symlink("/dev/nbd01", dir+"/proc/89/fd/3")
	want := []string{"held by dm-3", "mounted on /mnt/p1", "mounted on /b", "swap", "open in process 88 (dd)"}
	if got := k.users(0); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if ok, err := k.schedule(0, "mq-deadline", "none"); ok || err != nil {
		t.Errorf("without a scheduler: %v, %v", ok, err)
	}
	write("sys/block/nbd0/queue/scheduler", "[mq-deadline] kyber bfq none\n")
	if ok, err := k.schedule(0, "none", "mq-deadline"); ok || err != nil {
		t.Errorf("another scheduler: %v, %v", ok, err)
	}
	if ok, err := k.schedule(0, "mq-deadline", "none"); !ok || err != nil {
		t.Errorf("%v, %v", ok, err)
	}
	if b, err := os.ReadFile(dir + "/sys/block/nbd0/queue/scheduler"); err != nil || string(b) != "none" {
		t.Errorf("%q, %v", b, err)
	}
	if got := k.process(88); got != `80 "dd"` {
		t.Errorf("%q", got)
	}
	if got := k.process(90); !strings.Contains(got, "gone") {
		t.Errorf("%q", got)
	}
}
