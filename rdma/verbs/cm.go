//go:build cgo && linux && !noverbs

package verbs

/*
#include "shim.h"
*/
import "C"

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"rdblk/rdma"
)

// Events of the connection manager, enum rdma_cm_event_type.
const (
	evAddrResolved   = 0
	evAddrError      = 1
	evRouteResolved  = 2
	evRouteError     = 3
	evConnectRequest = 4
	evConnectError   = 6
	evUnreachable    = 7
	evRejected       = 8
	evEstablished    = 9
	evDisconnected   = 10
	evDeviceRemoval  = 11
)

// rejectedByConsumer is the reason of a REJECTED event of InfiniBand that a peer's program sent.
const rejectedByConsumer = 28

// Private data that replies can carry on InfiniBand and RoCE.
const (
	maxAcceptIB = 196
	maxRejectIB = 148
)

// rnrTimer is the code of 0.64 ms, what a receiver asks a sender to wait.
const rnrTimer = 12

// ackTimeout is the code of 268 ms, after which a device sends a request again; with 7 retries a peer that is gone is
// noticed after some seconds. The connection manager's own choice takes up to half a minute.
const ackTimeout = 16

// asyncGrace, where the device may tell one before the other, is how long the end of an iWARP connection waits for the asynchronous event that tells why.
const asyncGrace = 100 * time.Millisecond

type cmEvent struct {
	kind, status int
	rr, depth    int
	private      []byte
}

// conn is a connection identifier.
type conn struct {
	p             *Provider
	dev           *device
	token         uint64
	active        bool
	local, remote netip.AddrPort
	req           *rdma.ConnectRequest
	param         rdma.ConnParam // what was asked for

	on *opened // where dev is; lib.mu

	steps chan cmEvent  // address and route resolution
	up    chan struct{} // closed when established, after est is set
	est   rdma.Established
	done  chan struct{}

	sendable atomic.Bool  // requests may be posted
	ending   atomic.Bool  // this side is ending it
	ended    atomic.Bool  // done is closed
	ord      atomic.Int32 // Reads that the peer serves
	asyncErr atomic.Pointer[asyncError]

	call sync.Mutex // held over a connect that may be long in the kernel; before mu

	mu      sync.Mutex
	id      *C.struct_vb_cm_id
	q       *qp
	started bool // Connect, Accept or Reject was called
	isUp    bool
	settled bool // the connection manager has nothing under way for it, or never had
	closed  bool
	err     error
}

var _ rdma.Conn = (*conn)(nil)

func (p *Provider) newConn(token uint64) *conn {
	c := &conn{p: p, token: token, steps: make(chan cmEvent, 4), up: make(chan struct{}), done: make(chan struct{})}
	c.ord.Store(-1)
	return c
}

func (l *library) addConn(c *conn) {
	l.mu.Lock()
	l.conns[c.token] = c
	l.mu.Unlock()
}

// bind notes which device the connection is on, for the day when that is removed.
func (c *conn) bind() error {
	l := c.p.lib
	l.mu.Lock()
	c.on = c.dev.o
	l.mu.Unlock()
	if c.dev.o.removed.Load() {
		return errRemoved
	}
	return nil
}

func (c *conn) Device() rdma.Device           { return c.dev }
func (c *conn) LocalAddr() netip.AddrPort     { return c.local }
func (c *conn) RemoteAddr() netip.AddrPort    { return c.remote }
func (c *conn) Request() *rdma.ConnectRequest { return c.req }
func (c *conn) Done() <-chan struct{}         { return c.done }

func (c *conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

func (c *conn) wrap(op string, err error) error {
	return &rdma.OpError{Op: op, Provider: providerName, Addr: c.remote, Err: err}
}

// step waits for an event of the resolution.
func (c *conn) step(ctx context.Context, want int) error {
	t := time.NewTimer(c.p.cfg.ResolveTimeout + time.Second)
	defer t.Stop()
	select {
	case ev := <-c.steps:
		if ev.kind == want {
			return nil
		}
		return resolveError(syscall.Errno(max(ev.status, -ev.status)))
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return rdma.ErrTimeout
	}
}

// event handles an event, on the goroutine that reads them.
func (c *conn) event(ev cmEvent) {
	switch ev.kind {
	case evAddrResolved, evAddrError, evRouteResolved, evRouteError:
		select {
		case c.steps <- ev:
		default:
		}
	case evEstablished:
		c.established(ev)
	case evRejected:
		c.settle()
		if c.dev.iwarp() || ev.status == rejectedByConsumer {
			c.end(&rdma.RejectError{PrivateData: ev.private})
			return
		}
		c.end(fmt.Errorf("connection refused: nobody listens there, or the connection manager of the peer refused it (reason %d)", ev.status))
	case evUnreachable:
		c.settle()
		c.end(fmt.Errorf("%w: no answer (status %d)", rdma.ErrTimeout, ev.status))
	case evConnectError:
		c.settle()
		c.end(fmt.Errorf("%w: connection failed (status %d)", rdma.ErrProtocol, ev.status))
	case evDeviceRemoval:
		c.fail(errRemoved)
		c.p.lib.mu.Lock()
		o := c.on
		c.p.lib.mu.Unlock()
		if o != nil {
			o.remove()
		}
	case evDisconnected:
		c.disconnected()
	}
}

// settle notes that the kernel has done with a connection request, and destructions will not wait for it.
func (c *conn) settle() {
	c.mu.Lock()
	c.settled = true
	c.mu.Unlock()
}

// slow tells whether the kernel may make whoever destroys the queue pair or the id wait. iWARP drivers do so while a
// request is under way: 10 s with siw, or as long as it takes TCP to give up.
func (c *conn) slow() bool {
	return c.started && !c.settled && !c.isUp && c.dev != nil && c.dev.iwarp()
}

func (c *conn) established(ev cmEvent) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.isUp || c.ended.Load() || c.q == nil || c.q.q == nil {
		return
	}
	c.isUp = true
	if c.active {
		ird, ord := ev.rr, ev.depth
		if c.dev.iwarp() {
			ird, ord = ord, ird // the kernel reports them crossed
		}
		c.est = rdma.Established{PrivateData: ev.private, IRD: min(c.param.ResponderResources, ird), ORD: min(c.param.InitiatorDepth, ord)}
		c.ord.Store(int32(c.est.ORD))
	}
	if !c.dev.iwarp() {
		C.vb_qp_rnr_timer(c.q.q, rnrTimer) // a courtesy to the peer; without it RNR costs 655 ms
	}
	c.sendable.Store(true)
	close(c.up)
}

// disconnected handles the end of a connection that the peer or the network brought.
func (c *conn) disconnected() {
	if c.dev.siw {
		c.dev.o.async() // what siw tells of a failure it told before this
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended.Load() {
		return
	}
	if c.dev.iwarp() {
		if c.ending.Load() || c.asyncErr.Load() != nil || c.dev.siw {
			c.endLocked(c.reason())
			return
		}
		time.AfterFunc(asyncGrace, func() { c.end(c.reason()) })
		return
	}
	err := rdma.ErrDisconnected
	if c.q != nil && c.q.q != nil {
		if !c.ending.Load() && int(C.vb_qp_state(c.q.q)) == C.VB_QPS_ERR {
			err = fmt.Errorf("%w: the queue pair failed; a request was refused or broken", rdma.ErrProtocol)
		}
	}
	c.endLocked(err)
	c.cutLocked() // flushes, and answers the peer
}

func (c *conn) reason() error {
	if e := c.asyncErr.Load(); e != nil {
		return e.err
	}
	return rdma.ErrDisconnected
}

// end ends the connection for a reason; the first one counts.
func (c *conn) end(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.endLocked(err)
}

func (c *conn) endLocked(err error) {
	if c.ended.Load() {
		return
	}
	c.err = err
	c.ended.Store(true)
	close(c.done)
}

// fail ends the connection because something broke, and tells the peer.
func (c *conn) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.endLocked(err)
	if c.sendable.Load() {
		c.cutLocked()
	}
}

// cutLocked disconnects.
func (c *conn) cutLocked() {
	if c.id == nil || c.q == nil || c.q.q == nil {
		return
	}
	l := c.p.lib
	if c.dev.siw {
		// From its closing state, which disconnecting leads to, siw never completes the Reads that wait for their answers.
		C.vb_qp_error(c.q.q)
	}
	l.cm.Lock()
	C.vb_cm_disconnect(c.id)
	l.cm.Unlock()
}

// begin checks that a connection may be asked for or answered, once.
func (c *conn) begin(active bool, op string, p *rdma.ConnParam, limit int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return rdma.ErrClosed
	case c.active != active:
		return invalid("%s on the wrong side of the connection", op)
	case c.started:
		return invalid("%s for the second time", op)
	case c.q == nil:
		return invalid("%s without a queue pair", op)
	case len(p.PrivateData) > limit:
		return invalid("%d bytes of private data; the device takes %d", len(p.PrivateData), limit)
	case p.ResponderResources < 0 || p.InitiatorDepth < 0:
		return invalid("negative read depth")
	}
	c.started = true
	if c.ended.Load() {
		return c.err
	}
	p.ResponderResources = min(p.ResponderResources, c.dev.info.MaxReadDepth)
	p.InitiatorDepth = min(p.InitiatorDepth, c.dev.info.MaxReadDepth)
	if p.RNRRetry == 0 || p.RNRRetry > 7 {
		p.RNRRetry = 7
	}
	if p.Retry == 0 || p.Retry > 7 {
		p.Retry = 7
	}
	if c.dev.rxe {
		p.Retry = min(p.Retry, 6) // 7 is for ever there, which a peer that is gone would make of it
	}
	return nil
}

// data is the address of private data.
func data(b []byte) unsafe.Pointer {
	if len(b) == 0 {
		return nil
	}
	return unsafe.Pointer(&b[0])
}

func (c *conn) Connect(ctx context.Context, p rdma.ConnParam) (rdma.Established, error) {
	err := c.begin(true, "connect", &p, c.dev.info.MaxPrivate)
	if err == nil {
		err = context.Cause(ctx)
		if err != nil {
			c.end(err)
		}
	}
	if err != nil {
		return rdma.Established{}, c.wrap("connect", err)
	}
	c.param = p
	// Some drivers open the TCP connection within the call.
	go func() {
		c.call.Lock()
		defer c.call.Unlock()
		c.mu.Lock()
		id := c.id
		gone := c.ended.Load() || c.closed || id == nil
		c.mu.Unlock()
		if gone {
			c.settle()
			c.end(rdma.ErrDisconnected)
			return
		}
		e := C.vb_cm_connect(id, data(p.PrivateData), C.int(len(p.PrivateData)), C.int(p.ResponderResources), C.int(p.InitiatorDepth), C.int(p.Retry), C.int(p.RNRRetry))
		if e != 0 {
			c.settle()
			c.end(errnoError(syscall.Errno(e)))
		}
	}()
	return c.await(ctx, "connect")
}

// await waits until the connection is established or has failed.
func (c *conn) await(ctx context.Context, op string) (rdma.Established, error) {
	select {
	case <-c.up:
		return c.est, nil
	default:
	}
	select {
	case <-c.up:
		return c.est, nil
	case <-c.done:
	case <-ctx.Done():
		c.end(context.Cause(ctx))
	}
	return rdma.Established{}, c.wrap(op, c.Err())
}

func (c *conn) replyLimit(ib int) int {
	if c.dev.iwarp() {
		return c.dev.info.MaxPrivate
	}
	return ib
}

func (c *conn) Accept(ctx context.Context, p rdma.ConnParam) (rdma.Established, error) {
	if err := c.begin(false, "accept", &p, c.replyLimit(maxAcceptIB)); err != nil {
		return rdma.Established{}, c.wrap("accept", err)
	}
	p.ResponderResources = min(p.ResponderResources, c.req.InitiatorDepth)
	p.InitiatorDepth = min(p.InitiatorDepth, c.req.ResponderResources)
	c.param = p
	c.est = rdma.Established{IRD: p.ResponderResources, ORD: p.InitiatorDepth}
	c.ord.Store(int32(p.InitiatorDepth))
	c.mu.Lock()
	e := C.int(unix.ECONNRESET)
	if !c.ended.Load() && c.id != nil && c.q.q != nil {
		// The owner may see the peer's first message, and answer it, before the event is here.
		c.sendable.Store(true)
		e = C.vb_cm_accept(c.id, data(p.PrivateData), C.int(len(p.PrivateData)), C.int(p.ResponderResources), C.int(p.InitiatorDepth), C.int(p.RNRRetry))
		if e != 0 {
			c.settled = true
			c.endLocked(errnoError(syscall.Errno(e)))
		}
	}
	c.mu.Unlock()
	if e != 0 {
		return rdma.Established{}, c.wrap("accept", c.Err())
	}
	return c.await(ctx, "accept")
}

func (c *conn) Reject(private []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch limit := c.replyLimit(maxRejectIB); {
	case c.closed:
		return rdma.ErrClosed
	case c.active || c.started:
		return c.wrap("reject", invalid("there is no request to reject"))
	case len(private) > limit:
		return c.wrap("reject", invalid("%d bytes of private data; the device takes %d", len(private), limit))
	}
	c.started, c.settled = true, true
	if c.ended.Load() {
		return nil // it has gone by itself
	}
	e := C.vb_cm_reject(c.id, data(private), C.int(len(private)))
	c.endLocked(fmt.Errorf("%w: rejected by this side", rdma.ErrDisconnected))
	if e != 0 {
		return c.wrap("reject", errnoError(syscall.Errno(e)))
	}
	return nil
}

func (c *conn) Disconnect() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return rdma.ErrClosed
	}
	if c.ending.Swap(true) || c.ended.Load() {
		return nil
	}
	if c.sendable.Load() {
		c.cutLocked()
	}
	c.endLocked(rdma.ErrDisconnected)
	return nil
}

func (c *conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed = true
	if c.q != nil && c.q.q != nil {
		// The queue pair is its owner's: cut the connection, the id goes with the queue pair.
		if !c.ended.Load() && c.sendable.Load() {
			c.ending.Store(true)
			c.cutLocked()
		}
		c.endLocked(rdma.ErrClosed)
		return nil
	}
	c.endLocked(rdma.ErrClosed)
	c.destroyLocked()
	return nil
}

// destroyLocked destroys the id. An unanswered request is refused by that.
func (c *conn) destroyLocked() {
	if c.id == nil {
		return
	}
	l := c.p.lib
	l.mu.Lock()
	delete(l.conns, c.token)
	l.mu.Unlock()
	id := c.id
	c.id = nil
	if c.slow() {
		// Nobody else shall wait: the library itself makes a destruction wait for events that are not acknowledged.
		go func() {
			c.call.Lock() // a Connect that is in the kernel with this id
			defer c.call.Unlock()
			C.vb_cm_destroy(id)
		}()
		return
	}
	l.cm.Lock()
	C.vb_cm_destroy(id)
	l.cm.Unlock()
}

// listener hands out connection requests.
type listener struct {
	p       *Provider
	addr    netip.AddrPort
	backlog int
	queue   chan *conn
	on      *opened // the device of its address; lib.mu

	mu     sync.Mutex
	token  uint64
	id     *C.struct_vb_cm_id
	stop   chan struct{} // closed when err is set
	err    error         // of Accept
	closed bool
}

// Listen opens a listener. On a wildcard address it listens on all devices. When the device of its address is removed,
// Accept returns an error, and each Accept after that tries to listen again: the device may have come back.
func (p *Provider) Listen(addr netip.AddrPort, cfg rdma.ListenConfig) (rdma.Listener, error) {
	if cfg.Backlog <= 0 {
		cfg.Backlog = 128
	}
	if cfg.MaxPending <= 0 {
		cfg.MaxPending = 256
	}
	l := &listener{p: p, addr: addr, backlog: cfg.Backlog, queue: make(chan *conn, cfg.MaxPending), stop: make(chan struct{})}
	err := invalid("no address")
	if addr.IsValid() {
		err = l.listen()
	}
	if err != nil {
		return nil, &rdma.OpError{Op: "listen", Provider: providerName, Addr: addr, Err: err}
	}
	return l, nil
}

// listen makes the identifier; l.mu is held, or l is not known yet.
func (l *listener) listen() error {
	lib := l.p.lib
	lib.sync()
	l.token = lib.token()
	if e := C.vb_cm_create(lib.channel, C.uint64_t(l.token), &l.id); e != 0 {
		l.id = nil
		return errnoError(syscall.Errno(e))
	}
	lib.mu.Lock()
	lib.listeners[l.token] = l
	lib.mu.Unlock()
	e := C.vb_cm_bind(l.id, unsafe.Pointer(sockaddr(l.addr)))
	if e == 0 {
		e = C.vb_cm_listen(l.id, C.int(l.backlog))
	}
	if e != 0 {
		l.destroy()
		if err := syscall.Errno(e); err == unix.ENODEV || err == unix.EADDRNOTAVAIL {
			return fmt.Errorf("%w: no RDMA device has this address", err)
		}
		return errnoError(syscall.Errno(e))
	}
	if l.id.verbs != nil {
		o, err := lib.open(l.id.verbs)
		if err == nil {
			lib.mu.Lock()
			l.on = o
			lib.mu.Unlock()
			if o.removed.Load() {
				err = errRemoved
			}
		}
		if err != nil {
			l.destroy()
			return err
		}
	}
	if a := addrOf(unsafe.Pointer(&l.id.src_addr[0])); a.IsValid() && a.Port() != 0 {
		l.addr = a
	}
	return nil
}

// destroy ends the identifier, as listen does.
func (l *listener) destroy() {
	if l.id == nil {
		return
	}
	lib := l.p.lib
	lib.mu.Lock()
	delete(lib.listeners, l.token)
	l.on = nil
	lib.mu.Unlock()
	lib.cm.Lock()
	C.vb_cm_destroy(l.id)
	lib.cm.Unlock()
	l.id = nil
}

// request takes a connection request, on the goroutine that reads events.
func (l *listener) request(token uint64, id *C.struct_vb_cm_id, ev cmEvent) {
	c := l.p.newConn(token)
	c.id = id
	C.vb_cm_ack_timeout(id, ackTimeout)
	var err error
	if c.dev, err = l.p.device(id.verbs); err == nil {
		c.local, c.remote = addrOf(unsafe.Pointer(&id.src_addr[0])), addrOf(unsafe.Pointer(&id.dst_addr[0]))
		c.req = &rdma.ConnectRequest{PrivateData: ev.private, ResponderResources: ev.depth, InitiatorDepth: ev.rr}
		l.p.lib.addConn(c)
		err = c.bind()
	}
	if err == nil {
		l.mu.Lock()
		if !l.closed && l.err == nil {
			select {
			case l.queue <- c:
				l.mu.Unlock()
				return
			default: // too many wait already
			}
		}
		l.mu.Unlock()
	} else {
		l.p.cfg.Logger.Error("connection request dropped", "err", err)
	}
	c.Close()
}

func (l *listener) Accept() (rdma.Conn, error) {
	stop, err := l.ready()
	if err != nil {
		return nil, err
	}
	select {
	case c := <-l.queue:
		return c, nil
	case <-stop:
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.err == nil {
			return nil, rdma.ErrTimeout // another Accept has made it work again meanwhile
		}
		return nil, l.err
	}
}

// ready sees to it that the listener listens, and returns what tells that it does no longer.
func (l *listener) ready() (<-chan struct{}, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, rdma.ErrClosed
	}
	if l.err != nil {
		l.destroy()
		if err := l.listen(); err != nil {
			l.err = &rdma.OpError{Op: "listen again", Provider: providerName, Addr: l.addr, Err: err}
			return nil, l.err
		}
		l.err, l.stop = nil, make(chan struct{})
	}
	return l.stop, nil
}

// fail ends Accept because something broke. On a wildcard address nothing breaks: there may be other devices.
func (l *listener) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return
	}
	l.err = &rdma.OpError{Op: "accept", Provider: providerName, Addr: l.addr, Err: err}
	close(l.stop)
}

func (l *listener) Addr() netip.AddrPort {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.addr
}

func (l *listener) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil
	}
	l.closed = true
	if l.err == nil {
		close(l.stop)
	}
	l.err = rdma.ErrClosed
	l.destroy()
	l.mu.Unlock()
	for {
		select {
		case c := <-l.queue:
			c.Close()
		default:
			return nil
		}
	}
}
