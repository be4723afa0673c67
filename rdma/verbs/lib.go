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
	"fmt"
	"log/slog"
	"os"
	"sync"
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
	qps       map[uintptr]*qp                 // by ibv_qp, for asynchronous events
	watched   map[*C.struct_vb_context]string // contexts with a reader of asynchronous events
	infos     map[string]rdma.DeviceInfo      // by device name, without addresses
	rxe       map[string]bool                 // device is soft-RoCE
	log       *slog.Logger
}

var load = sync.OnceValues(func() (*library, error) {
	if s := C.vb_load(); s != nil {
		return nil, fmt.Errorf("%w: %s; %s", rdma.ErrNotSupported, C.GoString(s), installHint)
	}
	l := &library{conns: map[uint64]*conn{}, listeners: map[uint64]*listener{}, qps: map[uintptr]*qp{},
		watched: map[*C.struct_vb_context]string{}, infos: map[string]rdma.DeviceInfo{}, rxe: map[string]bool{}, log: slog.New(slog.DiscardHandler)}
	if e := C.vb_cm_channel(&l.channel); e != 0 {
		err := syscall.Errno(e)
		if err == unix.ENOENT || err == unix.ENODEV || err == unix.ENXIO {
			return nil, fmt.Errorf("%w: the kernel has no RDMA connection manager: %w; load it with modprobe rdma_ucm", rdma.ErrNotSupported, err)
		}
		return nil, fmt.Errorf("open the RDMA connection manager, /dev/infiniband/rdma_cm: %w", err)
	}
	if err := l.watch(int(l.channel.fd), "rdma_cm", l.cmEvents); err != nil {
		return nil, fmt.Errorf("watch /dev/infiniband/rdma_cm: %w", err)
	}
	return l, nil
})

// watch calls f on a goroutine whenever the non-blocking descriptor is readable, for the life of the
// process: libraries keep the descriptor open that long. The runtime gets a duplicate of its own.
func (l *library) watch(fd int, name string, f func()) error {
	d, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := unix.SetNonblock(d, true); err != nil {
		unix.Close(d)
		return err
	}
	file := os.NewFile(uintptr(d), name)
	rc, err := file.SyscallConn()
	if err != nil {
		file.Close()
		return err
	}
	go func() {
		defer file.Close()
		if err := rc.Read(func(uintptr) bool { f(); return false }); err != nil {
			l.log.Error("RDMA event channel is lost", "channel", name, "err", err)
		}
	}()
	return nil
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
		if c != nil {
			c.event(m)
		}
	}
}

// Asynchronous events, enum ibv_event_type.
const (
	asyncQPFatal     = 1
	asyncQPRequest   = 2
	asyncQPAccess    = 3
	asyncDeviceFatal = 8
)

// watchDevice reads the asynchronous events of a context, once per context.
func (l *library) watchDevice(ctx *C.struct_vb_context, name string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := l.watched[ctx]; ok {
		return nil
	}
	if err := unix.SetNonblock(int(ctx.async_fd), true); err != nil {
		return err
	}
	err := l.watch(int(ctx.async_fd), name+" events", func() {
		for {
			var kind C.int
			var element C.uintptr_t
			if C.vb_async_next(ctx, &kind, &element) != 0 {
				return
			}
			l.mu.Lock()
			q := l.qps[uintptr(element)]
			l.mu.Unlock()
			switch kind {
			case asyncQPFatal, asyncQPRequest, asyncQPAccess:
				if q != nil {
					q.async(int(kind))
				}
			case asyncDeviceFatal:
				l.log.Error("RDMA device failed", "device", name)
			}
		}
	})
	if err == nil {
		l.watched[ctx] = name
	}
	return err
}

// opError wraps an error number of the libraries.
func opError(op string, e C.int) error {
	return &rdma.OpError{Op: op, Provider: providerName, Err: errnoError(syscall.Errno(e))}
}

// errnoError says what a number of the libraries means for whoever has to help.
func errnoError(e syscall.Errno) error {
	switch e {
	case unix.ENOMEM, unix.EAGAIN, unix.EPERM:
		var r unix.Rlimit
		if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r) == nil && r.Cur != unix.RLIM_INFINITY {
			return fmt.Errorf("%w: %w; memory of queues and buffers is locked, and this process may lock %d KiB: raise it "+
				"(ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; containers: --ulimit memlock=-1)", rdma.ErrNoResources, e, r.Cur/1024)
		}
		if e == unix.ENOMEM {
			return fmt.Errorf("%w: %w: the device has no more of it", rdma.ErrNoResources, e)
		}
	case unix.EOPNOTSUPP, unix.ENOSYS:
		return fmt.Errorf("%w: %w", rdma.ErrNotSupported, e)
	case unix.ETIMEDOUT:
		return fmt.Errorf("%w: %w", rdma.ErrTimeout, e)
	}
	return e
}
