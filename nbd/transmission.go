package nbd

import (
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/blockdev"
	"rdblk/internal/worker"
)

const (
	// recvSize is the receive buffer: this much of headers and small payloads comes with one call.
	recvSize = 64 << 10
	// Payloads of bigWrite or more are received where they belong. What follows such a
	// payload in the stream is read ahead by no more than smallWindow, because all of
	// it but a header would have to be copied.
	bigWrite    = 16 << 10
	smallWindow = 2 << 10
	// recvRounds bounds how often one Poll receives and pollCost the requests that it
	// begins, in bytes that they move plus requestCost each, so that other sources have their turn.
	recvRounds  = 4
	pollCost    = 1 << 20
	requestCost = 8 << 10
	// The same for what is refused on Shutdown.
	drainRounds = 16
	drainCost   = 1 << 40
	// sendBatch is the number of replies that leave without waiting for the rest of
	// what was received: the client works on them meanwhile.
	sendBatch = 16
	// maxIovecs bounds one send: a header and a payload per reply.
	maxIovecs = 128
	// maxWhy is the longest error text in a reply, in bytes.
	maxWhy = 94

	tickPeriod = time.Second
	// evacuateAfter is how long a client may stand still before its data has to leave
	// the memory that others wait for.
	evacuateAfter = time.Second
)

// slotState is where a request is.
//
//	free ─► need bytes ─► need memory ─► payload ─► device ─► flush ─► reply ─► free
//	  │                                  (write)            (FUA)      ▲
//	  └──────────────► skip payload (a write that was refused) ────────┘
//
// Stages that a request does not need are left out.
type slotState uint8

const (
	slotFree    slotState = iota
	slotBytes             // waits until the connection holds fewer bytes
	slotMemory            // waits in the domain's line for a buffer
	slotGranted           // has got the buffer it waited for
	slotPayload           // its payload is being received
	slotSkip              // its payload is being thrown away
	slotDevice            // is with the device
	slotFlush             // its data is written, the Flush that makes it FUA is with the device
	slotReply             // its reply waits for the socket
)

func (s slotState) String() string {
	return [...]string{"free", "need bytes", "need memory", "granted", "payload", "skip payload", "device", "flush", "reply"}[s]
}

// slot is one request of a connection from its header to its reply.
type slot struct {
	req   blockdev.Request
	c     *conn
	next  *slot // free list
	state slotState

	cmd     command
	fua     bool // flush before the reply
	private bool // buf is ordinary memory, not the queue's; see Config.SpillMemory
	whole   bool // a write whose payload has arrived while it was private
	errno   Errno
	cookie  uint64
	off     uint64
	length  uint32
	start   int64  // nanotime of the header
	buf     []byte // the data, length bytes
	why     string // text with errno

	hdr  [structuredReplySize + 6 + maxWhy]byte
	hdrN int
}

// size is the number of bytes that the request needs a buffer for.
func (s *slot) size() int { return int(s.length) }

// pauseReason is why a connection does not read.
type pauseReason uint8

const (
	pauseNone     pauseReason = iota
	pauseRequests             // all slots are in use
	pauseBytes                // the request would exceed Config.MaxConnBytes, or replies stand still
	pauseMemory               // the request waits for the queue's memory
)

// phase is what a connection is up to.
type phase uint8

const (
	phaseOpen    phase = iota
	phaseClosing       // reads no more; answers what it has, then closes
	phaseDead          // socket closed; the device still has requests
	phaseGone          // nothing left
)

// conn is a connection in transmission, a source of its domain's worker. Fields
// without a remark are the worker's.
type conn struct {
	// Not changed after creation.
	srv   *Server
	dom   *domain
	id    uint64
	peer  string
	since time.Time
	lim   limits
	// kernel is set when the client is the kernel's block device.
	kernel *KernelDevice

	fd     int
	h      *worker.Handle
	phase  phase
	kicked bool // Poll has something to do
	// refusing answers new requests with ESHUTDOWN.
	refusing bool
	orphan   bool // the worker has ended and took the queue's memory with it

	// Receiving.
	rbuf   []byte
	r, w   int // rbuf[r:w] is not looked at yet
	window int // how much of rbuf to offer to the next receive
	cur    *slot
	got    int   // bytes of cur's payload that are there
	skip   int64 // bytes of payload to throw away still
	pause  pauseReason
	budget int   // what this Poll may begin still
	moved  int64 // nanotime when bytes came last

	// Sending: out[(head+i)%len(out)], i < queued, is the replies in order.
	out       []*slot
	head      int
	queued    int
	sent      int  // bytes of the first reply that are in the socket
	blocked   bool // the socket takes no more
	blockedAt int64
	lagging   int64 // nanotime since when there have always been replies that the socket did not take; 0: not so
	payloadAt int64 // nanotime when cur got the memory for its payload
	stalled   bool  // blocked for so long that the data was moved: gets no shared memory until it reads

	slots    []slot
	free     *slot
	used     int // slots not free
	inflight int // requests with the device
	held     int // bytes of buffers

	nextWaiter *conn
	attention  bool
	closeWhy   string
	blame      bool // it ends for what the client did wrong
	disc       bool // the client has sent DISC
	answered   uint64
	failed     uint64

	iov [maxIovecs]unix.Iovec
	msg unix.Msghdr

	// For Status, stored at the end of each Poll.
	pub struct {
		state    atomic.Uint32 // phase<<8 | pause
		blocked  atomic.Bool
		inflight atomic.Int32
		used     atomic.Int32
		held     atomic.Int64
		answered atomic.Uint64
	}
}

// newConn prepares everything that a connection needs for its life; fd belongs to it from here.
func newConn(s *Server, d *domain, fd int, lim limits) *conn {
	n := s.cfg.MaxInFlight
	c := &conn{
		srv: s, dom: d, fd: fd, lim: lim, since: time.Now(),
		rbuf: make([]byte, recvSize), window: recvSize,
		out: make([]*slot, n), slots: make([]slot, n),
	}
	for i := len(c.slots) - 1; i >= 0; i-- {
		sl := &c.slots[i]
		sl.c = c
		sl.req.User = sl
		sl.req.Done = slotDone
		sl.next = c.free
		c.free = sl
	}
	return c
}

// Run joins the worker; it is the task that the handshake submits.
func (c *conn) Run() {
	if c.phase >= phaseDead { // cut before it began
		return
	}
	c.moved = nanotime()
	h, err := c.dom.w.Add(c.fd, c)
	c.dom.conns = append(c.dom.conns, c)
	if err != nil {
		c.cut(err.Error())
		return
	}
	c.h = h
}

func (c *conn) kick() {
	c.kicked = true
	if c.h != nil {
		c.h.Kick()
	}
}

// Poll sends, receives, and sends what was answered at once.
func (c *conn) Poll() bool {
	if c.phase >= phaseDead {
		return false
	}
	c.kicked = false
	c.budget = pollCost
	progress := c.flush()
	if c.receive() {
		progress = true
	}
	if !c.blocked && c.flush() {
		progress = true
	}
	c.settle()
	return progress
}

// Arm sets what shall wake the worker. Doing it here and not on each change saves
// system calls while the worker is awake.
func (c *conn) Arm() bool {
	if c.phase >= phaseDead {
		return true
	}
	if c.kicked || c.queued > 0 && !c.blocked {
		return false
	}
	if err := c.h.SetInterest(c.reading(), c.blocked); err != nil {
		c.cut(err.Error())
	}
	return true
}

func (c *conn) reading() bool { return c.phase == phaseOpen && c.pause == pauseNone }

// settle ends a Poll: it closes when all is done and publishes the state.
func (c *conn) settle() {
	if c.phase == phaseClosing && c.used == 0 {
		c.cut("")
	}
	c.attend(c.phase < phaseDead && (c.blocked || c.pause == pauseMemory || c.midRequest()))
	c.publish()
}

func (c *conn) publish() {
	c.pub.state.Store(uint32(c.phase)<<8 | uint32(c.pause))
	c.pub.blocked.Store(c.blocked)
	c.pub.inflight.Store(int32(c.inflight))
	c.pub.used.Store(int32(c.used))
	c.pub.held.Store(int64(c.held))
	c.pub.answered.Store(c.answered)
}

// attend tells whether the clock has to look after this connection.
func (c *conn) attend(on bool) {
	if on == c.attention {
		return
	}
	c.attention = on
	if on {
		if c.dom.attention.Add(1) == 1 && c.srv.dozing.Load() {
			select {
			case c.srv.attention <- struct{}{}:
			default: // it is being woken
			}
		}
	} else {
		c.dom.attention.Add(-1)
	}
}

// midRequest reports whether the client has sent a part of a request and owes the rest.
func (c *conn) midRequest() bool {
	return c.reading() && (c.cur != nil || c.r < c.w)
}

// ---- receiving

// receive takes in what the socket has, as far as the limits allow.
func (c *conn) receive() bool {
	c.unpause()
	progress := c.parse() // what the last Poll or a pause has left
	for range recvRounds {
		if !c.reading() || c.budget <= 0 {
			break
		}
		n, more := c.recv()
		if n <= 0 {
			break
		}
		progress = true
		c.parse()
		if !more {
			break
		}
	}
	if c.phase < phaseDead && !c.reading() && hungUp(c.fd) {
		// Without interest in reading epoll still reports a hang-up, and nothing but
		// closing stops that. Nobody is there to take the replies; what was not read
		// yet is dropped, as on every hang-up that is not preceded by DISC.
		why := c.closeWhy
		if why == "" {
			why = "client hung up"
		}
		c.cut(why)
		return true
	}
	return progress
}

// unpause looks whether the reason not to read is over.
func (c *conn) unpause() {
	over := false
	switch c.pause {
	case pauseNone:
		return
	case pauseRequests:
		over = c.free != nil
	case pauseBytes:
		over = !c.stalled && c.fits(c.cur.size())
	case pauseMemory:
		over = c.cur.state == slotGranted
	}
	if over {
		c.pause = pauseNone
		c.moved = nanotime()
	}
}

// recv receives once: the rest of a payload to where it belongs and what follows to
// rbuf. more is false when the socket was emptied.
func (c *conn) recv() (n int, more bool) {
	if c.r == c.w {
		c.r, c.w = 0, 0
	} else if c.r > 0 {
		c.w = copy(c.rbuf, c.rbuf[c.r:c.w])
		c.r = 0
	}
	iov := c.iov[:0]
	want := 0
	if s := c.cur; s != nil && s.state == slotPayload {
		rest := s.buf[c.got:] // rbuf is empty: payload was taken out of it
		iov = append(iov, iovec(rest))
		want = len(rest)
	}
	win := c.rbuf[c.w:min(c.w+c.window, len(c.rbuf))]
	iov = append(iov, iovec(win))
	want += len(win)
	n, errno := recvInto(c.fd, iov, &c.msg)
	switch {
	case errno == unix.EAGAIN:
		return 0, false
	case errno != 0:
		c.cut("receive: " + errno.Error())
		return 0, false
	case n == 0:
		c.endOfStream()
		return 0, false
	}
	c.moved = nanotime()
	inBuf := n
	if len(iov) == 2 {
		direct := min(n, int(iov[0].Len))
		c.got += direct
		inBuf -= direct
	}
	c.w += inBuf
	return n, n == want
}

// endOfStream: the client will send no more. What it sent completely is answered, in case it still reads.
func (c *conn) endOfStream() {
	if c.closeWhy == "" {
		c.closeWhy = "client closed without DISC"
		if c.midRequest() {
			c.closeWhy = "client closed in the middle of a request"
		}
	}
	c.stopReading()
}

// stopReading ends the intake; a request that is not complete is forgotten.
func (c *conn) stopReading() {
	if c.phase != phaseOpen {
		return
	}
	c.phase = phaseClosing
	if s := c.cur; s != nil {
		c.cur = nil
		if s.state == slotMemory {
			c.dom.waiters.remove(c)
		}
		c.release(s)
	}
	c.pause = pauseNone
	c.r, c.w = 0, 0
	c.kick()
}

// parse works off what is in rbuf, until more bytes are needed or the reader is
// paused. It reports whether it did anything.
func (c *conn) parse() bool {
	progress := false
	for c.reading() {
		if c.cur != nil {
			if !c.proceed() {
				break
			}
			progress = true
			continue
		}
		if c.w-c.r < requestSize {
			break
		}
		if c.free == nil {
			c.pause = pauseRequests
			break
		}
		if c.budget <= 0 {
			c.kick() // go on in the next turn of the loop
			break
		}
		r, ok := parseRequest(c.rbuf[c.r:c.w])
		if !ok {
			c.blame = true
			c.cut(fmt.Sprintf("request with wrong magic number %#x", c.rbuf[c.r:c.r+4]))
			return true
		}
		c.r += requestSize
		progress = true
		c.begin(&r)
		if c.queued >= sendBatch && !c.blocked {
			c.flush()
		}
	}
	return progress
}

// begin takes a request whose header has arrived.
func (c *conn) begin(r *request) {
	if r.cmd == cmdDisc {
		c.closeWhy = "client disconnected"
		c.disc = true
		c.stopReading()
		return
	}
	s := c.free
	c.free = s.next
	c.used++
	c.budget -= requestCost
	if r.cmd == cmdRead || r.cmd == cmdWrite {
		c.budget -= int(r.length)
	}
	s.cmd, s.cookie, s.off, s.length = r.cmd, r.cookie, r.off, r.length
	s.start = c.moved
	s.errno, s.why, s.fua, s.private, s.whole = 0, "", false, false, false

	in := c.dom.q.Info()
	e, why := validate(r, &in, &c.lim)
	if c.refusing {
		e, why = ESHUTDOWN, whyShutdown
	}
	if e != 0 {
		left := 0
		if r.cmd == cmdWrite { // whatever the header says, the payload is behind it
			left = int(r.length)
		}
		c.refuse(s, e, why, left)
		return
	}
	s.req.Flags = 0
	s.req.Off = int64(r.off)
	s.req.Len = int64(r.length)
	if r.flags&cmdFlagFUA != 0 {
		switch r.cmd {
		case cmdWrite, cmdWriteZeroes:
			if in.FUA {
				s.req.Flags = blockdev.WriteFUA
			} else {
				s.fua = in.WriteCache
			}
		case cmdTrim:
			s.fua = in.WriteCache // Discard has no FUA of its own
		}
	}
	switch r.cmd {
	case cmdRead:
		s.req.Op = blockdev.OpRead
		c.cur = s
		c.want(s)
	case cmdWrite:
		s.req.Op = blockdev.OpWrite
		c.window = recvSize
		if r.length >= bigWrite {
			c.window = smallWindow
		}
		c.cur = s
		c.want(s)
	case cmdFlush:
		s.req.Op = blockdev.OpFlush
		c.submit(s)
	case cmdTrim:
		s.req.Op = blockdev.OpDiscard
		c.submit(s)
	case cmdWriteZeroes:
		s.req.Op = blockdev.OpZero
		if r.flags&cmdFlagNoHole != 0 {
			s.req.Flags |= blockdev.ZeroNoUnmap
		}
		c.submit(s)
	}
}

// refuse answers s with an error, after left bytes of its payload have been thrown away.
func (c *conn) refuse(s *slot, e Errno, why string, left int) {
	s.errno, s.why = e, why
	if left > 0 {
		s.state = slotSkip
		c.skip = int64(left)
		c.window = recvSize
		c.cur = s
		return
	}
	c.reply(s)
}

// proceed carries the current request on with what is in rbuf; false if more bytes or a buffer are needed.
func (c *conn) proceed() bool {
	s := c.cur
	switch s.state {
	case slotBytes:
		c.want(s)
		return c.pause == pauseNone
	case slotGranted:
		c.has(s)
		return true
	case slotPayload:
		n := copy(s.buf[c.got:], c.rbuf[c.r:c.w])
		c.r += n
		c.got += n
		if c.got < len(s.buf) {
			return false
		}
		if s.private { // evacuated while it was on its way
			s.whole = true
			c.wantMemory(s)
			return c.pause == pauseNone
		}
		c.cur = nil
		c.submit(s)
		return true
	case slotSkip:
		n := min(c.skip, int64(c.w-c.r))
		c.r += int(n)
		c.skip -= n
		if c.skip > 0 {
			return false
		}
		c.cur = nil
		c.reply(s)
		return true
	}
	return false
}

// fits tells whether the connection may hold n more bytes. A single request always may.
func (c *conn) fits(n int) bool { return c.held == 0 || c.held+n <= c.srv.cfg.MaxConnBytes }

// want gets a buffer for the current request or pauses the reader until there is one.
func (c *conn) want(s *slot) {
	if c.stalled || !c.fits(s.size()) {
		s.state = slotBytes
		c.pause = pauseBytes
		return
	}
	c.held += s.size()
	c.wantMemory(s)
}

func (c *conn) wantMemory(s *slot) {
	b := c.dom.alloc(c, s.size())
	if b == nil {
		s.state = slotMemory
		c.pause = pauseMemory
		return
	}
	c.give(s, b)
	c.has(s)
}

// granted is called by the domain with the buffer that the current request waited for.
func (c *conn) granted(b []byte) {
	c.give(c.cur, b)
	c.cur.state = slotGranted
	c.kick()
}

func (c *conn) give(s *slot, b []byte) {
	if s.private {
		copy(b, s.buf)
		c.srv.unspill(s.buf)
		s.private = false
	}
	s.buf = b
}

// has goes on with the current request, which has its buffer now.
func (c *conn) has(s *slot) {
	switch {
	case s.whole:
		c.cur = nil
		c.submit(s)
	case s.cmd == cmdWrite:
		s.state = slotPayload
		c.got = 0
		c.payloadAt = nanotime()
	default:
		c.cur = nil
		c.submit(s)
	}
}

// ---- the device

func (c *conn) submit(s *slot) {
	s.state = slotDevice
	s.req.Buf = s.buf
	c.inflight++
	c.dom.stats.inFlight.Store(c.dom.stats.inFlight.Load() + 1)
	c.dom.q.Submit(&s.req)
}

// slotDone is the Done of every request.
func slotDone(r *blockdev.Request) {
	s := r.User.(*slot)
	c := s.c
	if r.Err == nil && s.fua && c.phase < phaseDead {
		// FUA on a device that has none: what was written is durable after a Flush that
		// begins now, whatever else it covers.
		s.fua = false
		s.state = slotFlush
		r.Op, r.Flags, r.Off, r.Len, r.Buf = blockdev.OpFlush, 0, 0, 0, nil
		c.dom.q.Submit(r)
		return
	}
	c.inflight--
	c.dom.stats.inFlight.Store(c.dom.stats.inFlight.Load() - 1)
	if c.phase >= phaseDead {
		c.release(s)
		if c.inflight == 0 {
			c.gone()
		}
		return
	}
	if r.Err != nil {
		s.errno = replyErrno(r.Err)
		if c.lim.structured {
			s.why = r.Err.Error()
		}
	}
	c.reply(s)
	c.kick()
}

// ---- replies

// reply makes s's reply and puts it in line.
func (c *conn) reply(s *slot) {
	if s.buf != nil && (s.cmd != cmdRead || s.errno != 0) {
		c.freeBuf(s)
	}
	b := s.hdr[:]
	switch {
	case s.errno != 0 && c.lim.structured:
		// Also for commands that a simple reply would do for: only this one has room for the reason.
		s.hdrN = putErrorChunk(b, s.errno, s.cookie, clip(s.why))
	case s.cmd == cmdRead && s.errno == 0 && c.lim.structured:
		// One chunk with DONE: all of the data is there, nothing can go wrong any more.
		// So DF is always honoured.
		s.hdrN = putDataChunk(b, s.cookie, s.off, len(s.buf))
	default:
		s.hdrN = putSimpleReply(b, s.errno, s.cookie)
	}
	s.state = slotReply
	c.out[(c.head+c.queued)%len(c.out)] = s
	c.queued++
}

// clip cuts a text to maxWhy bytes, not inside a character.
func clip(s string) string {
	if len(s) <= maxWhy {
		return s
	}
	n := maxWhy
	for n > 0 && s[n]&0xc0 == 0x80 {
		n--
	}
	return s[:n]
}

// flush sends replies until there are none left or the socket takes no more.
func (c *conn) flush() bool {
	progress := false
	for c.queued > 0 {
		iov := c.iov[:0]
		want := 0
		skip := c.sent
		for i := 0; i < c.queued && len(iov)+2 <= maxIovecs; i++ {
			s := c.out[(c.head+i)%len(c.out)]
			for _, part := range [2][]byte{s.hdr[:s.hdrN], s.buf} {
				if skip >= len(part) { // sent already, or empty
					skip -= len(part)
					continue
				}
				iov = append(iov, iovec(part[skip:]))
				want += len(part) - skip
				skip = 0
			}
		}
		n, errno := sendFrom(c.fd, iov, &c.msg)
		switch {
		case errno == unix.EAGAIN:
			c.block()
			return progress
		case errno != 0:
			c.cut("send: " + errno.Error())
			return true
		}
		progress = true
		c.took(n)
		if c.queued == 0 {
			c.stalled, c.lagging = false, 0
		}
		if n < want {
			c.blocked = false // it moved: the time starts anew
			c.block()
			return true
		}
		c.blocked = false
	}
	return progress
}

func (c *conn) block() {
	if !c.blocked {
		c.blocked = true
		c.blockedAt = nanotime()
		if c.lagging == 0 {
			c.lagging = c.blockedAt
		}
	}
}

// took accounts for n bytes that are in the socket now.
func (c *conn) took(n int) {
	now := nanotime()
	n += c.sent
	for c.queued > 0 {
		s := c.out[c.head]
		size := s.hdrN + len(s.buf)
		if n < size {
			break
		}
		n -= size
		c.out[c.head] = nil
		if c.head++; c.head == len(c.out) {
			c.head = 0
		}
		c.queued--
		c.count(s, now)
		c.release(s)
	}
	c.sent = n
}

func (c *conn) count(s *slot, now int64) {
	c.answered++
	o := &c.dom.stats.ops[s.cmd.op()]
	o.count.add(1)
	if s.errno != 0 {
		c.failed++
		o.errors.add(1)
		return
	}
	o.bytes.add(uint64(s.length))
	o.latency.Observe(time.Duration(now - s.start))
}

func (c *conn) freeBuf(s *slot) {
	b, private := s.buf, s.private
	s.buf, s.private, s.req.Buf = nil, false, nil
	c.held -= s.size()
	switch {
	case private:
		c.srv.unspill(b)
	case !c.orphan:
		c.dom.free(b)
	}
}

// dropBuf gives up the buffer that s has or waits for.
func (c *conn) dropBuf(s *slot) {
	if s.buf != nil {
		c.freeBuf(s)
	} else if s.state == slotMemory {
		c.held -= s.size()
	}
}

// release makes a slot free again.
func (c *conn) release(s *slot) {
	c.dropBuf(s)
	s.state = slotFree
	s.why = ""
	s.next = c.free
	c.free = s
	c.used--
}

// ---- time

// tick looks for a client that stands still. The domain's clock calls it.
func (c *conn) tick(now int64) {
	if c.phase >= phaseDead {
		return
	}
	var still time.Duration
	what := ""
	if c.blocked {
		still, what = time.Duration(now-c.blockedAt), "client does not take its replies"
	}
	if c.midRequest() {
		if d := time.Duration(now - c.moved); d > still {
			still, what = d, "client stopped in the middle of a request"
		}
	}
	if what == "" {
		return
	}
	// The kernel moves, unless this process has been frozen: then it is not to blame.
	if t := c.srv.cfg.StallTimeout; t > 0 && still >= t && c.kernel == nil {
		c.dom.stats.stalls.add(1)
		c.blame = true
		c.cut(fmt.Sprintf("%s for %v (stall timeout)", what, t))
		return
	}
	// A client that moves, but slowly, is in the others' way just like one that stands still.
	if c.dom.waiters.head != nil {
		c.evacuate(now)
		if c.phase < phaseDead {
			c.publish()
		}
	}
}

// evacuate moves the data of a client that stands still to memory of its own, so
// that others get the queue's. The bytes still count against the connection, and against
// Config.SpillMemory: when that is used up somebody has to go.
func (c *conn) evacuate(now int64) {
	if c.blocked && time.Duration(now-c.lagging) >= c.srv.cfg.evacuateAfter {
		c.stalled = true
		if s := c.cur; s != nil && s.state == slotMemory && !s.private {
			// What it would get next would end in the same place: it leaves the line.
			c.dom.waiters.remove(c)
			c.held -= s.size()
			s.state, c.pause = slotBytes, pauseBytes
		}
		for i := 0; i < c.queued; i++ {
			if !c.takeOut(c.out[(c.head+i)%len(c.out)]) {
				return
			}
		}
	}
	if s := c.cur; s != nil && s.state == slotPayload && time.Duration(now-c.payloadAt) >= c.srv.cfg.evacuateAfter {
		c.takeOut(s)
	}
}

// takeOut is false if there is no memory to put the data of s in, or c had to go for it.
func (c *conn) takeOut(s *slot) bool {
	if s.buf == nil || s.private {
		return true
	}
	for !c.srv.spill(len(s.buf)) {
		v := c.victim()
		if v == nil {
			return false
		}
		c.dom.stats.spillCuts.add(1)
		v.blame = true
		v.cut("client does not take its replies or send its requests, and the memory for what such clients leave is used up (spill memory)")
		if v == c {
			return false
		}
	}
	own := make([]byte, len(s.buf))
	if s.state == slotPayload {
		copy(own, s.buf[:c.got]) // the rest is to come and its pages need not be there yet
	} else {
		copy(own, s.buf)
	}
	b := s.buf
	s.buf, s.private, s.req.Buf = own, true, nil
	c.dom.stats.evacuations.add(1)
	c.dom.free(b)
	return true
}

// victim is who has to go when there is no more room for data of clients that stand still: of those
// on this queue the one that has done so for the longest time, in the end c itself. The kernel
// stays, its users have nobody else.
func (c *conn) victim() *conn {
	var worst *conn
	since := int64(0)
	for _, o := range c.dom.conns {
		if o.kernel != nil || o.phase >= phaseDead {
			continue
		}
		if at := o.spilling(); at != 0 && (worst == nil || at < since) {
			worst, since = o, at
		}
	}
	if worst == nil && c.kernel == nil {
		worst = c
	}
	return worst
}

// spilling is since when the client has stood still, 0 if nothing of it is in spill memory.
func (c *conn) spilling() int64 {
	if s := c.cur; s != nil && s.private && s.buf != nil {
		return c.payloadAt
	}
	for i := range c.queued {
		if s := c.out[(c.head+i)%len(c.out)]; s.private && s.buf != nil {
			return c.lagging
		}
	}
	return 0
}

// ---- the end

// drain ends the connection softly, for Shutdown: what is with the device is
// answered; what the client has sent besides is refused with ESHUTDOWN, as far as
// it is there; nothing more is read.
func (c *conn) drain() {
	if c.phase != phaseOpen {
		return
	}
	c.closeWhy = whyShutdown
	c.refusing = true
	if s := c.cur; s != nil {
		if s.state == slotMemory {
			c.dom.waiters.remove(c)
		}
		left := int(s.length) // of its payload
		switch {
		case s.state == slotSkip:
			left = int(c.skip)
		case s.state == slotPayload, s.whole:
			left -= c.got
		}
		c.dropBuf(s)
		c.cur, c.pause = nil, pauseNone
		if s.cmd != cmdWrite {
			left = 0
		}
		c.refuse(s, ESHUTDOWN, whyShutdown, left)
	}
	c.budget = drainCost
	c.parse()
	for range drainRounds {
		if !c.reading() {
			break
		}
		n, more := c.recv()
		if n > 0 {
			c.parse()
		}
		if !more {
			break
		}
	}
	c.stopReading()
}

// cut closes the socket now. Requests that the device has are waited for and
// forgotten; replies that are not sent are lost. why is empty for a clean end.
func (c *conn) cut(why string) {
	if c.phase >= phaseDead {
		return
	}
	level := slog.LevelInfo
	if c.blame {
		level = slog.LevelWarn
	}
	if why == "" {
		why = c.closeWhy
	}
	c.phase = phaseDead
	if c.h != nil {
		c.h.Remove()
	}
	unix.Close(c.fd)
	c.fd = -1
	if s := c.cur; s != nil {
		c.cur = nil
		if s.state == slotMemory {
			c.dom.waiters.remove(c)
		}
		c.release(s)
	}
	for c.queued > 0 {
		s := c.out[c.head]
		c.out[c.head] = nil
		c.head = (c.head + 1) % len(c.out)
		c.queued--
		c.release(s)
	}
	c.blocked, c.pause = false, pauseNone
	c.attend(false)
	c.publish()
	c.srv.lines.Log(level, "nbd: connection closed", slog.Uint64("conn", c.id), slog.String("peer", c.peer),
		slog.String("export", c.dom.exp.Name), slog.String("reason", why), slog.Uint64("requests", c.answered),
		slog.Uint64("errors", c.failed), slog.Int("in_flight", c.inflight))
	if c.inflight == 0 {
		c.gone()
	}
}

// gone is the very end: no socket, no request.
func (c *conn) gone() {
	c.phase = phaseGone
	for i, o := range c.dom.conns {
		if o == c {
			last := len(c.dom.conns) - 1
			c.dom.conns[i] = c.dom.conns[last]
			c.dom.conns[last] = nil
			c.dom.conns = c.dom.conns[:last]
			break
		}
	}
	c.publish()
	c.srv.connGone(c)
}

// leaveKernel tells the kernel device, if it is one's, that the connection is over.
func (c *conn) leaveKernel() {
	if c.kernel != nil {
		c.kernel.gone(c, c.disc)
	}
}

// oldest is the time of the oldest request, 0 if there is none; on the worker.
func (c *conn) oldest() int64 {
	var t int64
	for i := range c.slots {
		if s := &c.slots[i]; s.state != slotFree && (t == 0 || s.start < t) {
			t = s.start
		}
	}
	return t
}
