package iwarp

import (
	"bytes"
	"container/list"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/rdma"
)

// connState is the state of a Conn.
//
//	dialing:   idle ──Connect──► busy ──► established ──► ended
//	accepting: requested ──Accept──► busy ──► established ──► ended
//	                     ──Reject──► ended
type connState uint8

const (
	connIdle connState = iota
	connRequested
	connBusy
	connEstablished
	connEnded
)

func (s connState) String() string {
	return [...]string{"idle", "requested", "connecting", "established", "ended"}[s]
}

// conn is a connection identifier.
type conn struct {
	dev  *device
	bind netip.AddrPort
	done chan struct{}

	// Of the peer's Request, on the accepting side.
	frame    mpaFrame
	peer     depths
	enhanced bool
	request  *rdma.ConnectRequest

	mu     sync.Mutex // guards the rest
	state  connState
	local  netip.AddrPort
	remote netip.AddrPort
	nc     *net.TCPConn // until established
	qp     *qp
	err    error
	closed bool
	cancel context.CancelFunc // of a Connect or Accept that is running
}

var _ rdma.Conn = (*conn)(nil)

func newConn(d *device, bind, remote netip.AddrPort) *conn {
	return &conn{dev: d, bind: bind, remote: remote, done: make(chan struct{})}
}

func (c *conn) Device() rdma.Device           { return c.dev }
func (c *conn) Request() *rdma.ConnectRequest { return c.request }
func (c *conn) Done() <-chan struct{}         { return c.done }

func (c *conn) LocalAddr() netip.AddrPort {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.local
}

func (c *conn) RemoteAddr() netip.AddrPort {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.remote
}

func (c *conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

func (c *conn) opError(op string, err error) error {
	return &rdma.OpError{Op: op, Provider: providerName, Addr: c.RemoteAddr(), Err: err}
}

// ended notes the end of the connection; the first reason stays.
func (c *conn) ended(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.endedLocked(err)
}

func (c *conn) endedLocked(err error) {
	if c.state == connEnded {
		return
	}
	c.state = connEnded
	c.err = err
	close(c.done)
}

// CreateQP makes the QP.
func (c *conn) CreateQP(p rdma.PD, cfg rdma.QPConfig) (rdma.QP, error) {
	dom, ok := p.(*pd)
	if !ok || dom == nil {
		return nil, c.opError("create queue pair", fmt.Errorf("%w: protection domain missing or of another provider", rdma.ErrInvalid))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var err error
	switch {
	case c.closed:
		err = rdma.ErrClosed
	case c.qp != nil:
		err = fmt.Errorf("%w: the connection has its queue pair", rdma.ErrInvalid)
	case c.state != connIdle && c.state != connRequested:
		err = fmt.Errorf("%w: connection is %v", rdma.ErrInvalid, c.state)
	}
	if err == nil {
		var q *qp
		if q, err = newQP(c, dom, cfg); err == nil {
			c.qp = q
			return q, nil
		}
	}
	return nil, &rdma.OpError{Op: "create queue pair", Provider: providerName, Addr: c.remote, Err: err}
}

// begin enters the busy state of op. The returned context ends with the caller's
// and with Close.
func (c *conn) begin(ctx context.Context, from connState, p rdma.ConnParam) (context.Context, context.CancelFunc, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return nil, nil, rdma.ErrClosed
	case c.state == connEnded && c.err != nil:
		return nil, nil, c.err
	case c.state != from:
		return nil, nil, fmt.Errorf("%w: connection is %v", rdma.ErrInvalid, c.state)
	case c.qp == nil:
		return nil, nil, fmt.Errorf("%w: connection has no queue pair", rdma.ErrInvalid)
	case len(p.PrivateData) > maxPrivate:
		return nil, nil, fmt.Errorf("%w: %d bytes of private data, limit %d", rdma.ErrInvalid, len(p.PrivateData), maxPrivate)
	case p.ResponderResources < 0 || p.InitiatorDepth < 0:
		return nil, nil, fmt.Errorf("%w: negative read depth", rdma.ErrInvalid)
	}
	c.state = connBusy
	ctx, cancel := context.WithCancel(ctx)
	c.cancel = cancel
	return ctx, cancel, nil
}

// plain is the system's error without what package net puts around it: an OpError names
// operation and address.
func plain(err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}

// guard makes blocking calls on nc fail when ctx ends.
func guard(ctx context.Context, nc *net.TCPConn) (stop func() bool) {
	return context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })
}

// broke ends a connection that could not be established and makes the error
// that the caller reads.
func (c *conn) broke(op string, ctx context.Context, err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		} else {
			err = rdma.ErrTimeout
			c.dev.cm.timeouts.Add(1)
		}
		if op == "connect" {
			err = fmt.Errorf("%w: %w", err, rdma.ErrNoReply)
		}
	}
	c.mu.Lock()
	if c.closed {
		err = rdma.ErrClosed
	}
	if c.nc != nil {
		c.nc.SetLinger(0)
		c.nc.Close()
		c.nc = nil
	}
	c.endedLocked(err)
	c.mu.Unlock()
	return c.opError(op, plain(err))
}

// Connect establishes the TCP connection and exchanges the start-up frames.
func (c *conn) Connect(ctx context.Context, p rdma.ConnParam) (rdma.Established, error) {
	ctx, cancel, err := c.begin(ctx, connIdle, p)
	if err != nil {
		return rdma.Established{}, c.opError("connect", err)
	}
	defer cancel()
	est, err := c.connect(ctx, p)
	if err != nil {
		return rdma.Established{}, c.broke("connect", ctx, err)
	}
	return est, nil
}

func (c *conn) connect(ctx context.Context, p rdma.ConnParam) (rdma.Established, error) {
	cfg := &c.dev.cfg
	deadline := time.Now().Add(cfg.ReplyTimeout)
	d := net.Dialer{Deadline: deadline, KeepAlive: -1, Control: func(_, _ string, rc syscall.RawConn) error {
		return rc.Control(func(fd uintptr) { setBuffers(int(fd), cfg.SendBuffer, cfg.RecvBuffer) })
	}}
	if c.bind.Addr().IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(c.bind)
	}
	n, err := d.DialContext(ctx, "tcp", c.remote.String())
	if err != nil {
		var ne net.Error
		timedOut := errors.As(err, &ne) && ne.Timeout()
		if end, ok := ctx.Deadline(); timedOut && ok && end.Before(deadline) && !errors.Is(err, syscall.ETIMEDOUT) {
			<-ctx.Done() // its time is over, but the dialer has a clock of its own
		}
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		} else if timedOut {
			err = rdma.ErrTimeout
		}
		return rdma.Established{}, plain(err)
	}
	nc := n.(*net.TCPConn)
	c.mu.Lock()
	c.nc = nc
	c.local = addrPort(nc.LocalAddr())
	c.mu.Unlock()
	nc.SetDeadline(deadline)
	defer guard(ctx, nc)()

	// RFC 5044 section 7.1, RFC 6581 section 4.
	ird, ord := min(p.ResponderResources, cfg.ReadDepth), min(p.InitiatorDepth, cfg.ReadDepth)
	wantCRC := c.dev.wantCRC(c.local, c.remote)
	words := depths{uint16(ird), uint16(ord)}
	if cfg.PeerToPeer {
		words.ird |= enhPeerToPeer
		words.ord |= enhRTRWrite | enhRTRRead
	}
	f := mpaFrame{flags: mpaEnhanced, rev: 2}
	if wantCRC {
		f.flags |= mpaCRC
	}
	if !cfg.PlainFlags {
		f.flags |= mpaGSO | mpaOwnRequest
	}
	f.private = append(words.append(nil), p.PrivateData...)
	if _, err := nc.Write(appendMPA(nil, mpaKeyRequest, f)); err != nil { // in one piece: some adapters need that
		return rdma.Established{}, err
	}

	r, err := readReply(nc)
	if err != nil {
		return rdma.Established{}, err
	}
	private := r.private
	enhanced := r.rev == 2 && r.flags&mpaEnhanced != 0 && len(private) >= enhSize
	var peer depths
	if enhanced {
		peer, private = parseDepths(private)
	}
	if r.flags&mpaReject != 0 {
		return rdma.Established{}, &rdma.RejectError{PrivateData: bytes.Clone(private)}
	}
	switch {
	case r.flags&mpaMarkers != 0:
		return rdma.Established{}, fmt.Errorf("%w: peer wants markers", rdma.ErrProtocol)
	case r.rev != 2 || !enhanced:
		return rdma.Established{}, fmt.Errorf("%w: peer answered without read depths (MPA revision %d)", rdma.ErrProtocol, r.rev)
	}
	a := agreed{crc: wantCRC || r.flags&mpaCRC != 0}
	own := !cfg.PlainFlags && r.flags&mpaVendor == mpaOwnReply
	a.largeFPDU = !cfg.PlainFlags && r.flags&mpaGSO != 0
	a.careful = a.crc && !own
	// The peer may raise what it wants to have outstanding, up to our limit.
	peerORD := int(peer.ord & enhDepth)
	if peerORD == enhDepth {
		peerORD = ird
	}
	if peerORD > cfg.ReadDepth {
		c.refuse(nc, termIRD, a.crc)
		return rdma.Established{}, fmt.Errorf("%w: peer wants %d Reads at a time, limit %d", rdma.ErrProtocol, peerORD, cfg.ReadDepth)
	}
	a.ird, a.ord = max(ird, peerORD), min(ord, depth(peer.ird, cfg.ReadDepth))
	if cfg.PeerToPeer && peer.ird&enhPeerToPeer != 0 {
		switch {
		case peer.ord&enhRTRWrite != 0:
			a.rtr = enhRTRWrite
		case peer.ord&enhRTRRead != 0:
			a.rtr = enhRTRRead
			a.ord = max(a.ord, 1)
		default:
			c.refuse(nc, termRTR, a.crc)
			return rdma.Established{}, fmt.Errorf("%w: no common ready-to-receive message", rdma.ErrProtocol)
		}
	}
	if !own && cfg.FirstFPDUDelay > 0 {
		t := time.NewTimer(cfg.FirstFPDUDelay)
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
			return rdma.Established{}, context.Cause(ctx)
		}
	}
	est := rdma.Established{PrivateData: bytes.Clone(private), IRD: a.ird, ORD: a.ord}
	return est, c.establish(a)
}

// readReply reads exactly the Reply: what follows are FPDUs.
func readReply(nc *net.TCPConn) (mpaFrame, error) {
	buf := make([]byte, mpaHeaderSize, mpaMaxFrame)
	n := 0
	for {
		k, err := nc.Read(buf[n:])
		n += k
		f, size, perr := parseMPA(buf[:n], mpaKeyReply)
		switch {
		case perr == nil && n == size:
			return f, nil
		case perr != nil && perr != errFrameShort:
			return f, fmt.Errorf("%w: answer is no MPA Reply (is that an iWARP port?)", rdma.ErrProtocol)
		case n == mpaHeaderSize:
			buf = buf[:mpaHeaderSize+be16(buf[18:])]
		}
		if err != nil && n < len(buf) {
			if errors.Is(err, io.EOF) {
				return f, fmt.Errorf("%w before it answered (not an iWARP port, or too many connections there)", rdma.ErrDisconnected)
			}
			return f, err
		}
	}
}

// refuse sends a Terminate for a Reply that cannot be used.
func (c *conn) refuse(nc *net.TCPConn, code termCode, crc bool) {
	c.dev.countTerminate(&TerminateError{Sent: true, Layer: code.layer(), Type: code.etype(), Code: code.code()}, c.RemoteAddr())
	nc.Write(appendTerminate(nil, code, nil, crc))
	nc.CloseWrite()
	c.mu.Lock()
	c.nc = nil
	c.mu.Unlock()
	if fd, err := dupConn(nc); err == nil {
		c.dev.linger(fd)
	}
}

// establish hands the socket to the QP, whose owner drives it from now on.
func (c *conn) establish(a agreed) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.qp.closed {
		return rdma.ErrClosed
	}
	fd, err := dupConn(c.nc)
	if err != nil {
		return fmt.Errorf("take over socket: %w", err)
	}
	c.nc = nil
	tune(fd, c.dev.cfg.UserTimeout)
	if name := c.dev.congestion(c.local, c.remote); name != "" {
		if err := setCongestion(fd, name); err != nil { // it was there when the device was made
			c.dev.cfg.Logger.Debug("iwarp: the system's congestion control is used", "peer", c.remote, "err", err)
		}
	}
	c.state = connEstablished
	c.dev.cm.established.Add(1)
	c.dev.cfg.Logger.Debug("iwarp: connection established", "local", c.local, "peer", c.remote, "qp", c.qp.num,
		"crc", a.crc, "ird", a.ird, "ord", a.ord, "large_fpdu", a.largeFPDU)
	c.qp.start(fd, a)
	return nil
}

// Accept answers the request.
func (c *conn) Accept(ctx context.Context, p rdma.ConnParam) (rdma.Established, error) {
	ctx, cancel, err := c.begin(ctx, connRequested, p)
	if err != nil {
		return rdma.Established{}, c.opError("accept", err)
	}
	defer cancel()
	est, err := c.accept(ctx, p)
	if err != nil {
		return rdma.Established{}, c.broke("accept", ctx, err)
	}
	return est, nil
}

func (c *conn) accept(ctx context.Context, p rdma.ConnParam) (rdma.Established, error) {
	cfg := &c.dev.cfg
	c.mu.Lock()
	nc := c.nc
	c.mu.Unlock()
	nc.SetDeadline(time.Now().Add(cfg.ReplyTimeout))
	defer guard(ctx, nc)()
	if err := silent(nc); err != nil {
		return rdma.Established{}, err
	}
	f := mpaFrame{rev: c.frame.rev}
	a := agreed{responder: true, crc: c.frame.flags&mpaCRC != 0 || c.dev.wantCRC(c.local, c.remote)}
	if a.crc {
		f.flags |= mpaCRC
	}
	own := false
	if !cfg.PlainFlags {
		if c.frame.flags&mpaGSO != 0 {
			f.flags |= mpaGSO
			a.largeFPDU = true
		}
		if own = c.frame.flags&mpaVendor == mpaOwnRequest; own {
			f.flags |= mpaOwnReply
		}
	}
	a.careful = a.crc && !own
	if c.enhanced {
		// RFC 6581 section 4: our IRD covers the peer's ORD and the reverse.
		a.ird = min(p.ResponderResources, depth(c.peer.ord, cfg.ReadDepth))
		a.ord = min(p.InitiatorDepth, depth(c.peer.ird, cfg.ReadDepth))
		words := depths{uint16(a.ird), uint16(a.ord)}
		if c.peer.ird&enhPeerToPeer != 0 {
			words.ird |= enhPeerToPeer
			if c.peer.ord&enhRTRWrite == 0 && c.peer.ord&enhRTRRead != 0 {
				words.ord |= enhRTRRead
				a.ird = max(a.ird, 1) // for that Read
			} else {
				words.ord |= enhRTRWrite
			}
		}
		f.flags |= mpaEnhanced
		f.private = words.append(nil)
	} // else the Request says nothing of Reads, and so there are none
	f.private = append(f.private, p.PrivateData...)
	if _, err := nc.Write(appendMPA(nil, mpaKeyReply, f)); err != nil {
		return rdma.Established{}, err
	}
	return rdma.Established{IRD: a.ird, ORD: a.ord}, c.establish(a)
}

// silent checks that the peer has neither closed nor sent anything behind its
// Request: it must wait for the Reply (RFC 5044 section 7.1).
func silent(nc *net.TCPConn) error {
	rc, err := nc.SyscallConn()
	if err != nil {
		return err
	}
	var b [1]byte
	n := 0
	if cerr := rc.Control(func(fd uintptr) {
		n, _, err = unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
	}); cerr != nil {
		return cerr
	}
	switch {
	case err == unix.EAGAIN:
		return nil
	case err != nil:
		return err
	case n == 0:
		return fmt.Errorf("%w before the answer", rdma.ErrDisconnected)
	}
	return fmt.Errorf("%w: peer sent data before it had an answer", rdma.ErrProtocol)
}

// rejectFrame is the answer to the Request f that refuses it.
func rejectFrame(f mpaFrame, private []byte) []byte {
	r := mpaFrame{flags: mpaReject, rev: f.rev}
	if f.rev == 2 && f.flags&mpaEnhanced != 0 {
		r.flags |= mpaEnhanced
		r.private = depths{}.append(nil)
	}
	r.private = append(r.private, private...)
	return appendMPA(nil, mpaKeyReply, r)
}

// Reject refuses the request.
func (c *conn) Reject(private []byte) error {
	c.mu.Lock()
	var err error
	switch {
	case c.closed:
		err = rdma.ErrClosed
	case c.state == connEnded:
		err = c.err
	case c.state != connRequested:
		err = fmt.Errorf("%w: connection is %v", rdma.ErrInvalid, c.state)
	case len(private) > maxPrivate:
		err = fmt.Errorf("%w: %d bytes of private data, limit %d", rdma.ErrInvalid, len(private), maxPrivate)
	}
	if err != nil {
		c.mu.Unlock()
		return c.opError("reject", err)
	}
	nc := c.nc
	c.nc = nil
	c.endedLocked(errors.New("rejected"))
	c.mu.Unlock()
	c.dev.cm.rejected.Add(1)
	return c.dev.sendReject(nc, rejectFrame(c.frame, private))
}

// sendReject writes a frame and closes without destroying it.
func (d *device) sendReject(nc *net.TCPConn, frame []byte) error {
	nc.SetDeadline(time.Now().Add(d.cfg.CloseLinger))
	_, err := nc.Write(frame)
	if err != nil {
		nc.Close()
		return err
	}
	nc.CloseWrite()
	fd, err := dupConn(nc)
	if err != nil {
		nc.Close()
		return err
	}
	d.linger(fd)
	return nil
}

// Disconnect ends the connection; its QP is flushed when the owner polls.
func (c *conn) Disconnect() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return rdma.ErrClosed
	}
	c.cutLocked(rdma.ErrDisconnected)
	return nil
}

// cutLocked ends the connection in whatever state it is.
func (c *conn) cutLocked(err error) {
	if c.cancel != nil {
		c.cancel()
	}
	if c.state == connEstablished {
		c.qp.disconnect()
	}
	if c.state == connBusy { // Connect or Accept cleans up
		return
	}
	if c.nc != nil {
		c.nc.Close()
		c.nc = nil
	}
	c.endedLocked(err)
}

// Close gives the identifier up. A connection that is still up is disconnected.
func (c *conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed = true
	c.cutLocked(rdma.ErrDisconnected)
	return nil
}

// wantCRC says whether this side asks for CRC.
func (d *device) wantCRC(local, remote netip.AddrPort) bool {
	switch d.cfg.CRC {
	case CRCOn:
		return true
	case CRCOff:
		return false
	}
	return !sameHost(local, remote)
}

// congestion is the congestion control to ask for, empty for the system's.
func (d *device) congestion(local, remote netip.AddrPort) string {
	switch name := d.cfg.CongestionControl; {
	case name == CongestionSystem, name == CongestionAuto && !sameHost(local, remote):
		return ""
	case name == CongestionAuto:
		return congestionInside
	default:
		return name
	}
}

// sameHost says that nothing between the two can leave this host.
func sameHost(local, remote netip.AddrPort) bool {
	return remote.Addr().Unmap().IsLoopback() || local.Addr().Unmap() == remote.Addr().Unmap()
}

func addrPort(a net.Addr) netip.AddrPort {
	if t, ok := a.(*net.TCPAddr); ok {
		ap := t.AddrPort()
		return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	}
	return netip.AddrPort{}
}

// linger closes fd when the peer has closed its side, after at most CloseLinger.
// What is read meanwhile is thrown away: closing a socket with unread data makes
// the kernel send a reset, which can overtake what was sent last.
func (d *device) linger(fd int) {
	select {
	case d.lingering <- struct{}{}:
	default: // too many at once: no courtesy
		abort(fd)
		return
	}
	go func() {
		defer func() { <-d.lingering }()
		f := os.NewFile(uintptr(fd), "iwarp")
		defer f.Close()
		f.SetReadDeadline(time.Now().Add(d.cfg.CloseLinger))
		var b [4096]byte
		for total := 0; total < 64<<20; {
			n, err := f.Read(b[:])
			total += n
			if err == io.EOF {
				return
			}
			if err != nil {
				break
			}
		}
		unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	}()
}

// listener hands out incoming connection requests.
type listener struct {
	dev  *device
	l    *net.TCPListener
	cfg  rdma.ListenConfig
	out  chan *conn
	done chan struct{}

	pending atomic.Int64
	wg      sync.WaitGroup

	mu     sync.Mutex
	closed bool
	shakes map[*net.TCPConn]*list.Element // waiting for their Request
	order  list.List                      // of them, the oldest first
}

var _ rdma.Listener = (*listener)(nil)

// Listen opens a listener.
func (p *Provider) Listen(addr netip.AddrPort, cfg rdma.ListenConfig) (rdma.Listener, error) {
	fail := func(err error) (rdma.Listener, error) {
		return nil, &rdma.OpError{Op: "listen", Provider: providerName, Addr: addr, Err: err}
	}
	if cfg.Backlog == 0 {
		cfg.Backlog = defaultBacklog
	}
	if cfg.MaxPending == 0 {
		cfg.MaxPending = defaultPending
	}
	if !addr.IsValid() || cfg.Backlog < 0 || cfg.MaxPending < 0 {
		return fail(fmt.Errorf("%w: no address, or a negative limit", rdma.ErrInvalid))
	}
	lc := net.ListenConfig{KeepAlive: -1, Control: func(_, _ string, rc syscall.RawConn) error {
		return rc.Control(func(fd uintptr) { setBuffers(int(fd), p.cfg.SendBuffer, p.cfg.RecvBuffer) })
	}}
	lc.SetMultipathTCP(false) // no TCP_MAXSEG, no user timeout there, and slower
	network := "tcp"
	if addr.Addr().Is4() {
		network = "tcp4"
	}
	nl, err := lc.Listen(context.Background(), network, addr.String())
	if err != nil {
		return fail(plain(err))
	}
	l := &listener{dev: p.dev, l: nl.(*net.TCPListener), cfg: cfg, out: make(chan *conn, cfg.MaxPending), done: make(chan struct{}), shakes: map[*net.TCPConn]*list.Element{}}
	if rc, err := l.l.SyscallConn(); err == nil {
		rc.Control(func(fd uintptr) { unix.Listen(int(fd), cfg.Backlog) }) // package net takes the system's maximum
	}
	l.wg.Add(1)
	go l.run()
	return l, nil
}

func (l *listener) Addr() netip.AddrPort { return addrPort(l.l.Addr()) }

func (l *listener) run() {
	defer l.wg.Done()
	delay := time.Duration(0)
	for {
		nc, err := l.l.AcceptTCP()
		if err != nil {
			select {
			case <-l.done:
				return
			default:
			}
			// Out of descriptors, or the peer was gone already. Go on, but not in a tight loop.
			delay = min(max(2*delay, time.Millisecond), 100*time.Millisecond)
			t := time.NewTimer(delay)
			select {
			case <-t.C:
			case <-l.done:
				t.Stop()
				return
			}
			continue
		}
		delay = 0
		l.dev.cm.accepted.Add(1)
		l.mu.Lock()
		if l.closed {
			l.mu.Unlock()
			nc.Close()
			return
		}
		victim := l.makeRoom(nc)
		if victim != nc {
			l.shakes[nc] = l.order.PushBack(nc)
			l.pending.Add(1)
			l.wg.Add(1)
			go l.shake(nc)
		}
		l.mu.Unlock()
		if victim != nil {
			l.dev.cm.pendingRefused.Add(1)
			l.dev.warn("iwarp: too many connections waiting to be set up, the oldest without a Request closed", "peer", victim.RemoteAddr().String(), "limit", l.cfg.MaxPending)
			victim.SetLinger(0)
			victim.Close()
		}
	}
}

// makeRoom chooses who has to go for a new connection if MaxPending are pending:
// the one that has owed its Request for longest, since an honest peer sends it at
// once, so that strangers who connect and say nothing do not shut others out. If
// all pending ones have sent theirs and wait for Accept, it is the new one. nil:
// there is room. mu is held.
func (l *listener) makeRoom(nc *net.TCPConn) *net.TCPConn {
	if l.pending.Load() < int64(l.cfg.MaxPending) {
		return nil
	}
	e := l.order.Front()
	if e == nil {
		return nc
	}
	old := l.order.Remove(e).(*net.TCPConn)
	delete(l.shakes, old)
	l.pending.Add(-1)
	return old
}

// shake reads the Request of a new connection.
func (l *listener) shake(nc *net.TCPConn) {
	defer l.wg.Done()
	c, answer, err := l.readRequest(nc)
	l.mu.Lock()
	e := l.shakes[nc]
	if e == nil { // it had to make room
		l.mu.Unlock()
		nc.Close()
		return
	}
	delete(l.shakes, nc)
	l.order.Remove(e)
	closed := l.closed
	if err == nil && answer == nil && !closed {
		l.out <- c // has room for all that are pending
		l.mu.Unlock()
		return
	}
	l.mu.Unlock()
	l.pending.Add(-1)
	if !closed {
		if err == nil {
			err = errors.New("it wants markers, or has no room for read depths")
		}
		l.dev.warn("iwarp: connection refused while it was being set up", "peer", nc.RemoteAddr().String(), "err", err.Error())
	}
	switch {
	case answer != nil && !closed:
		l.dev.cm.rejected.Add(1)
		l.dev.sendReject(nc, answer)
		return
	case errors.Is(err, os.ErrDeadlineExceeded):
		l.dev.cm.timeouts.Add(1)
	default:
		l.dev.cm.failures.Add(1)
		if errors.Is(err, errFrameExtra) || errors.Is(err, errFrameSize) {
			nc.SetLinger(0)
		}
	}
	nc.Close()
}

var errFrameExtra = errors.New("iwarp: data behind the MPA Request")

// readRequest reads and judges the Request. answer is a frame that refuses it.
func (l *listener) readRequest(nc *net.TCPConn) (c *conn, answer []byte, err error) {
	nc.SetDeadline(time.Now().Add(l.dev.cfg.RequestTimeout))
	buf := make([]byte, mpaMaxFrame+1) // one more shows that there is more
	n := 0
	var f mpaFrame
	for {
		k, err := nc.Read(buf[n:])
		n += k
		var size int
		var perr error
		f, size, perr = parseMPA(buf[:n], mpaKeyRequest)
		if perr == nil {
			if n > size {
				return nil, nil, errFrameExtra
			}
			break
		}
		if perr != errFrameShort {
			return nil, nil, perr
		}
		if err != nil {
			return nil, nil, err
		}
	}
	nc.SetDeadline(time.Time{})
	if f.rev != 1 && f.rev != 2 {
		return nil, nil, fmt.Errorf("iwarp: MPA revision %d", f.rev)
	}
	l.dev.cm.requests.Add(1)
	enhanced := f.rev == 2 && f.flags&mpaEnhanced != 0
	if f.flags&mpaMarkers != 0 || enhanced && len(f.private) < enhSize {
		return nil, rejectFrame(f, nil), nil
	}
	c = newConn(l.dev, netip.AddrPort{}, addrPort(nc.RemoteAddr()))
	c.state = connRequested
	c.local = addrPort(nc.LocalAddr())
	c.nc = nc
	c.frame, c.enhanced = f, enhanced
	private := f.private
	c.request = &rdma.ConnectRequest{}
	if enhanced {
		c.peer, private = parseDepths(private)
		c.request.ResponderResources = depth(c.peer.ird, maxDepth)
		c.request.InitiatorDepth = depth(c.peer.ord, maxDepth)
	}
	c.request.PrivateData = bytes.Clone(private)
	return c, nil, nil
}

// Accept waits for a connection request.
func (l *listener) Accept() (rdma.Conn, error) {
	select {
	case <-l.done:
		return nil, rdma.ErrClosed
	default:
	}
	select {
	case c := <-l.out:
		l.pending.Add(-1)
		return c, nil
	case <-l.done:
		return nil, rdma.ErrClosed
	}
}

// Close stops listening and drops the requests that Accept has not handed out.
func (l *listener) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil
	}
	l.closed = true
	close(l.done)
	for nc := range l.shakes {
		nc.Close()
	}
	l.mu.Unlock()
	err := l.l.Close()
	l.wg.Wait()
	for {
		select {
		case c := <-l.out:
			c.Close()
		default:
			return err
		}
	}
}
