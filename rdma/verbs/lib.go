//go:build cgo && linux && !noverbs

package verbs

/*
#cgo LDFLAGS: -ldl
#cgo noescape vb_poll
#cgo nocallback vb_poll
#cgo noescape vb_arm
#cgo nocallback vb_arm
#cgo noescape vb_post_send
#cgo nocallback vb_post_send
#cgo noescape vb_post_recv
#cgo nocallback vb_post_recv
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"rdblk/rdma"
)

// library is what is one per process: the loaded libraries, the event channel, the devices' asynchronous events.
type library struct {
	channel *C.struct_vb_cm_channel

	// cm is held while an event is fetched and acknowledged and while an id or a queue pair is
	// destroyed. Nothing blocks for long under it. Taken last.
	cm sync.Mutex

	mu        sync.Mutex
	nextToken uint64
	conns     map[uint64]*conn
	listeners map[uint64]*listener
	qps       map[uintptr]*qp // by ibv_qp, for asynchronous events
	cqs       map[uintptr]*cq // by ibv_cq
	opened    map[*C.struct_vb_context]*opened
	known     map[string]known // by device name
	loggers   []*slog.Logger
	stale     bool // a device was let go and librdmacm does not know yet
}

// known is what was found out about a device once.
type known struct {
	info   rdma.DeviceInfo // without addresses
	vendor uint32
}

// opened is a context of librdmacm with a reader of its asynchronous events.
type opened struct {
	l       *library
	ctx     *C.struct_vb_context
	name    string
	file    string // "uverbs0"
	events  *os.File
	reading sync.Mutex // events are fetched and handled under it, and it is let go
	guarded bool       // the next is set; reading
	guard   *C.struct_vb_cq
	objects atomic.Int64 // PDs and CQs
	removed atomic.Bool
	gone    chan struct{} // closed when removed is set
	let     bool          // its descriptors are closed, and librdmacm may free it; reading
}

// errRemoved is the end of everything on a device that was removed.
var errRemoved = errors.New("the RDMA device was removed")

var load = sync.OnceValues(func() (*library, error) {
	if s := C.vb_load(); s != nil {
		return nil, fmt.Errorf("%w: %s; %s", rdma.ErrNotSupported, C.GoString(s), installHint)
	}
	l := &library{conns: map[uint64]*conn{}, listeners: map[uint64]*listener{}, qps: map[uintptr]*qp{}, cqs: map[uintptr]*cq{},
		opened: map[*C.struct_vb_context]*opened{}, known: map[string]known{}}
	if e := C.vb_cm_channel(&l.channel); e != 0 {
		err := syscall.Errno(e)
		if _, there := os.Stat("/dev/infiniband/rdma_cm"); err == unix.ENODEV && there == nil {
			return nil, fmt.Errorf("%w: the kernel has no RDMA device (rdma link show lists them)", rdma.ErrNotSupported)
		}
		if err == unix.ENOENT || err == unix.ENODEV || err == unix.ENXIO {
			return nil, fmt.Errorf("%w: the kernel has no RDMA connection manager: %w; load it with modprobe rdma_ucm", rdma.ErrNotSupported, err)
		}
		return nil, fmt.Errorf("open the RDMA connection manager, /dev/infiniband/rdma_cm: %w", err)
	}
	if _, err := l.watch(int(l.channel.fd), "rdma_cm", l.cmEvents); err != nil {
		return nil, fmt.Errorf("watch /dev/infiniband/rdma_cm: %w", err)
	}
	l.watchRemovals() // where this is forbidden, devices still tell in their own ways
	return l, nil
})

// log passes a message to the loggers of all providers.
func (l *library) log(level slog.Level, msg string, args ...any) {
	l.mu.Lock()
	loggers := l.loggers
	l.mu.Unlock()
	for _, g := range loggers {
		g.Log(context.Background(), level, msg, args...)
	}
}

func (l *library) addLogger(g *slog.Logger) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !slices.Contains(l.loggers, g) {
		l.loggers = append(slices.Clip(l.loggers), g)
	}
}

// watch calls f on a goroutine whenever the non-blocking descriptor is readable, until the file is closed that it
// returns: a duplicate of the descriptor, which is the runtime's own.
func (l *library) watch(fd int, name string, f func()) (*os.File, error) {
	d, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(d, true); err != nil {
		unix.Close(d)
		return nil, err
	}
	file := os.NewFile(uintptr(d), name)
	rc, err := file.SyscallConn()
	if err != nil {
		file.Close()
		return nil, err
	}
	go func() {
		defer file.Close()
		err := rc.Read(func(uintptr) bool { f(); return false })
		if _, e := file.Stat(); errors.Is(e, os.ErrClosed) {
			return // by letGo
		}
		if err != nil {
			l.log(slog.LevelError, "RDMA event channel is lost", "channel", name, "err", err)
		}
	}()
	return file, nil
}

// token returns a number that an id carries as its context.
func (l *library) token() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.nextToken++
	return l.nextToken
}

// cmEvents handles all events that are there.
func (l *library) cmEvents() {
	var ev C.struct_vb_event
	for {
		token := l.token()
		l.cm.Lock()
		e := C.vb_cm_next(l.channel, C.uint64_t(token), &ev)
		l.cm.Unlock()
		if e == C.int(unix.EINTR) {
			continue
		}
		if e != 0 {
			return // EAGAIN, or an event that the library took care of
		}
		l.mu.Lock()
		c := l.conns[uint64(ev.token)]
		ln := l.listeners[uint64(ev.listen_token)]
		own := l.listeners[uint64(ev.token)]
		l.mu.Unlock()
		m := cmEvent{kind: int(ev.event), status: int(ev.status), rr: int(ev.responder_resources), depth: int(ev.initiator_depth),
			private: C.GoBytes(unsafe.Pointer(&ev.private_data[0]), C.int(ev.private_len))}
		if m.kind == evConnectRequest {
			id := (*C.struct_vb_cm_id)(*(*unsafe.Pointer)(unsafe.Pointer(&ev.id)))
			if ln == nil {
				l.cm.Lock()
				C.vb_cm_destroy(id) // the kernel refuses the connection
				l.cm.Unlock()
				continue
			}
			ln.request(token, id, m)
			continue
		}
		switch {
		case c != nil:
			c.event(m)
		case own != nil && m.kind == evDeviceRemoval:
			own.fail(errRemoved)
		}
	}
}

// Asynchronous events, enum ibv_event_type.
const (
	asyncCQ          = 0
	asyncQPFatal     = 1
	asyncQPRequest   = 2
	asyncQPAccess    = 3
	asyncCommEst     = 4
	asyncDeviceFatal = 8
	asyncPortActive  = 9
	asyncPortError   = 10
)

// open returns what there is about a context, with a reader of its asynchronous events.
func (l *library) open(ctx *C.struct_vb_context) (*opened, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if o := l.opened[ctx]; o != nil {
		if o.removed.Load() {
			return nil, errRemoved
		}
		return o, nil
	}
	if C.vb_gone(ctx) != 0 {
		return nil, errRemoved
	}
	if err := unix.SetNonblock(int(ctx.async_fd), true); err != nil {
		return nil, err
	}
	o := &opened{l: l, ctx: ctx, gone: make(chan struct{}), name: C.GoString(&ctx.device.name[0]), file: C.GoString(&ctx.device.dev_name[0])}
	var err error
	if o.events, err = l.watch(int(ctx.async_fd), o.name+" events", o.async); err != nil {
		return nil, err
	}
	l.opened[ctx] = o
	return o, nil
}

// async handles all asynchronous events that are there. A queue pair or completion queue is looked up before its
// event is acknowledged: until then it cannot be destroyed, nor another one come to its address.
func (o *opened) async() {
	o.reading.Lock()
	defer o.reading.Unlock()
	for !o.let {
		var ev C.struct_vb_async_event
		if C.vb_async_next(o.ctx, &ev) != 0 {
			return
		}
		kind, element := int(ev.event_type), uintptr(ev.element)
		o.l.mu.Lock()
		q, c := o.l.qps[element], o.l.cqs[element]
		o.l.mu.Unlock()
		if kind == asyncCommEst && q != nil {
			q.commEst()
		}
		C.vb_async_ack(&ev)
		switch kind {
		case asyncQPFatal, asyncQPRequest, asyncQPAccess:
			if q != nil {
				o.l.log(slog.LevelWarn, "RDMA queue pair failed", "device", o.name, "qp", q.num, "remote", q.c.remote, "event", asyncText[kind])
				q.async(kind)
			}
		case asyncCQ:
			o.l.log(slog.LevelError, "RDMA completion queue failed", "device", o.name)
			if c != nil {
				c.overrun()
			}
		case asyncDeviceFatal:
			o.remove()
		case asyncPortActive:
			o.l.log(slog.LevelInfo, "RDMA port is up", "device", o.name, "port", uint32(element))
		case asyncPortError:
			// Connections live on: the transport tries again, and ends what it cannot deliver.
			o.l.log(slog.LevelWarn, "RDMA port is down", "device", o.name, "port", uint32(element))
		default:
			o.l.log(slog.LevelDebug, "RDMA event", "device", o.name, "event", kind)
		}
	}
}

// remove ends everything on a device that is being removed. The kernel may wait with that until this process has let
// the device go, which it does when its last object is closed.
func (o *opened) remove() {
	if o.removed.Swap(true) {
		return
	}
	close(o.gone)
	o.l.log(slog.LevelError, "RDMA device was removed", "device", o.name)
	o.l.mu.Lock()
	var conns []*conn
	for _, c := range o.l.conns {
		if c.on == o {
			conns = append(conns, c)
		}
	}
	var listeners []*listener
	for _, ln := range o.l.listeners {
		if ln.on == o {
			listeners = append(listeners, ln)
		}
	}
	o.l.mu.Unlock()
	for _, c := range conns {
		c.fail(errRemoved)
	}
	for _, ln := range listeners {
		ln.fail(errRemoved)
	}
	if o.objects.Load() == 0 {
		o.letGo()
	}
}

// watchRemovals listens to the kernel's announcements of devices that come and go. A device without
// disassociate_ucontext (rxe, siw) is not removed, and connections on it are not told, before every process has closed it.
func (l *library) watchRemovals() error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return err
	}
	defer unix.Close(fd) // watch has its own
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1}); err != nil {
		return err
	}
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return err
	}
	buf := make([]byte, 8192)
	if _, err = l.watch(dup, "uevents", func() {
		for {
			n, from, err := unix.Recvfrom(dup, buf, 0)
			if err == unix.EINTR {
				continue
			}
			if err == unix.ENOBUFS { // announcements were lost
				l.lookForRemoved()
				continue
			}
			if err != nil {
				return
			}
			if k, ok := from.(*unix.SockaddrNetlink); ok && k.Pid == 0 && bytes.Contains(buf[:n], []byte("SUBSYSTEM=infiniband_verbs\x00")) {
				l.lookForRemoved()
			}
		}
	}); err != nil {
		unix.Close(dup)
	}
	return err
}

// lookForRemoved finds devices that the system has no more.
func (l *library) lookForRemoved() {
	l.mu.Lock()
	var gone []*opened
	for _, o := range l.opened {
		if _, err := os.Lstat("/sys/class/infiniband_verbs/" + o.file); errors.Is(err, os.ErrNotExist) {
			gone = append(gone, o)
		}
	}
	l.mu.Unlock()
	for _, o := range gone {
		o.remove()
	}
}

// hold counts an object that is going to be made.
func (o *opened) hold() error {
	o.objects.Add(1)
	if o.removed.Load() {
		o.drop()
		return errRemoved
	}
	return nil
}

// drop counts an object that is gone.
func (o *opened) drop() {
	if o.objects.Add(-1) == 0 && o.removed.Load() {
		o.letGo()
	}
}

// letGo closes the files of a device that was removed, on a goroutine: it may be the reader of one of them who asks.
func (o *opened) letGo() {
	go func() {
		o.reading.Lock()
		defer o.reading.Unlock()
		if o.let {
			return
		}
		o.let = true
		C.vb_let_go(o.ctx, o.guard)
		o.l.mu.Lock()
		delete(o.l.opened, o.ctx)
		delete(o.l.known, o.name)
		o.l.stale = true
		o.l.mu.Unlock()
		go o.events.Close() // waits for the reader
	}()
}

// sync makes librdmacm forget devices that were let go, so that it does not take them for new ones of the same
// address. It opens all other devices in doing so; they are watched, so that they can be let go too.
func (l *library) sync() {
	l.mu.Lock()
	stale := l.stale
	l.stale = false
	l.mu.Unlock()
	if !stale {
		return
	}
	var ctxs [64]*C.struct_vb_context
	l.cm.Lock()
	n := int(C.vb_cm_sync(&ctxs[0], C.int(len(ctxs))))
	l.cm.Unlock()
	if n == 0 { // it does nothing while there is no device
		l.mu.Lock()
		l.stale = true
		l.mu.Unlock()
	}
	for _, ctx := range ctxs[:n] {
		l.open(ctx)
	}
}

// opError wraps an error number of the libraries.
func opError(op string, e C.int) error {
	return &rdma.OpError{Op: op, Provider: providerName, Err: errnoError(syscall.Errno(e))}
}

// errnoError says what a number of the libraries means for whoever has to help.
func errnoError(e syscall.Errno) error { return memoryError(e, 0) }

// memoryError is errnoError for something that needs so many bytes of locked memory, 0 if that is not known.
func memoryError(e syscall.Errno, need int) error {
	switch e {
	case unix.ENOMEM, unix.EAGAIN, unix.EPERM:
		var r unix.Rlimit
		if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r) == nil && r.Cur != unix.RLIM_INFINITY {
			locked := lockedKiB()
			text := fmt.Sprintf("the device's queues and buffers are locked memory, of which this process may have %d KiB and has %d KiB", r.Cur/1024, locked)
			if need > 0 {
				text += fmt.Sprintf("; this takes %d KiB more, so allow at least %d KiB", (need+1023)/1024, locked+(need+1023)/1024)
			}
			return fmt.Errorf("%w: %w: %s: raise the limit (shell: ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; "+
				"containers: --ulimit memlock=-1; /etc/security/limits.conf: memlock)", rdma.ErrNoResources, e, text)
		}
		if e == unix.ENOMEM {
			return fmt.Errorf("%w: %w: the device has no more of it", rdma.ErrNoResources, e)
		}
	case unix.EOPNOTSUPP, unix.ENOSYS:
		return fmt.Errorf("%w: %w", rdma.ErrNotSupported, e)
	case unix.ETIMEDOUT:
		return fmt.Errorf("%w: %w", rdma.ErrTimeout, e)
	case unix.ENOTTY: // what letGo has put in its place does not know the request
		return errRemoved
	}
	return e
}

// lockedKiB is how much memory this process has locked or pinned.
func lockedKiB() (n int) {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		var k int
		for _, name := range []string{"VmLck:", "VmPin:"} {
			if rest, ok := strings.CutPrefix(line, name); ok {
				fmt.Sscanf(rest, "%d", &k)
				n += k
			}
		}
	}
	return n
}
