package iwarp

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"rdblk/rdma"
)

const (
	// Up to so many QPs on a CQ are read, and written when they were blocked, without
	// asking epoll which of them is ready.
	directQPs = 2
	// Every so many polls the counters are published even if the owner never arms.
	publishEvery = 4096
)

// cqe is a completion on its way to the owner. It gives back the queue slots of
// its work request and of the unsignalled ones before it when it is polled.
type cqe struct {
	wc    rdma.WC
	q     *qp // nil: discarded
	slots uint32
}

// cq is a completion queue: a ring of completions and the event loop of the QPs
// attached to it. Its descriptor is an epoll instance over their sockets and a
// mailbox.
//
// The ring cannot overrun. A queue slot is given back when the completion that
// frees it is polled, so there are never more completions than slots, and a QP
// is attached only if the ring has an entry for each of its slots.
type cq struct {
	dev  *device
	epfd int
	evfd int // mailbox: makes epfd readable

	epoch atomic.Uint32 // odd while Poll or Arm runs
	attn  atomic.Bool   // look at pending and at the QPs' requests

	// The owner's.
	ring       []cqe
	mask       uint32
	head, tail uint32
	running    bool // inside Poll or Arm
	rearm      bool // Arm has asked for one more Poll, after which the owner may sleep
	live       []*qp
	byFD       map[int32]*qp
	txq        []*qp // have something to transmit
	txSpare    []*qp
	polls      uint32
	events     [64]unix.EpollEvent

	mu       sync.Mutex // guards the rest
	pending  []*qp      // established, not seen by the owner yet
	depth    int
	reserved int // entries promised to QPs
	qps      int // queues of QPs attached, also those in error
	closed   bool
}

var _ rdma.CQ = (*cq)(nil)

// CreateCQ makes a completion queue.
func (d *device) CreateCQ(depth int) (rdma.CQ, error) {
	if depth < 1 || depth > maxCQE {
		return nil, fmt.Errorf("%w: create completion queue: depth %d is not within 1 to %d", rdma.ErrInvalid, depth, maxCQE)
	}
	size := 1
	for size < depth {
		size *= 2
	}
	epfd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create completion queue: epoll: %w", err)
	}
	evfd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		unix.Close(epfd)
		return nil, fmt.Errorf("create completion queue: eventfd: %w", err)
	}
	ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(evfd)}
	if err := unix.EpollCtl(epfd, unix.EPOLL_CTL_ADD, evfd, &ev); err != nil {
		unix.Close(epfd)
		unix.Close(evfd)
		return nil, fmt.Errorf("create completion queue: epoll: %w", err)
	}
	c := &cq{dev: d, epfd: epfd, evfd: evfd, ring: make([]cqe, size), mask: uint32(size - 1), depth: size, byFD: map[int32]*qp{}}
	d.mu.Lock()
	d.cqs[c] = struct{}{}
	d.mu.Unlock()
	return c, nil
}

// FD is the epoll descriptor.
func (c *cq) FD() int { return c.epfd }

// reserve promises n entries to a QP. Any goroutine.
func (c *cq) reserve(n int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return rdma.ErrClosed
	}
	if n > c.depth-c.reserved {
		return fmt.Errorf("%w: completion queue of %d entries has %d left, the queue pair needs %d (one for each work request it can hold; make the CQ deeper)",
			rdma.ErrInvalid, c.depth, c.depth-c.reserved, n)
	}
	c.reserved += n
	c.qps++
	return nil
}

func (c *cq) unreserve(n int) {
	c.mu.Lock()
	c.reserved -= n
	c.qps--
	c.mu.Unlock()
}

// post puts an established QP into the mailbox. Any goroutine.
func (c *cq) post(q *qp) {
	c.mu.Lock()
	c.pending = append(c.pending, q)
	c.mu.Unlock()
	c.wake()
}

// wake makes the owner look at its mailbox. Any goroutine.
func (c *cq) wake() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.attn.Load() {
		return
	}
	c.attn.Store(true)
	one := [8]byte{1}
	unix.Write(c.evfd, one[:])
}

// enter and leave bracket every use of registered memory (see device.quiesce).
func (c *cq) enter() { c.epoch.Add(1); c.running = true }
func (c *cq) leave() { c.running = false; c.epoch.Add(1) }

// attend empties the mailbox: new QPs, and QPs that another goroutine wants
// disconnected.
func (c *cq) attend() {
	c.mu.Lock()
	c.attn.Store(false) // together with the descriptor, see wake
	var b [8]byte
	unix.Read(c.evfd, b[:])
	pend := c.pending
	c.pending = nil
	c.mu.Unlock()
	for _, q := range pend {
		c.adopt(q)
	}
	for i := len(c.live) - 1; i >= 0; i-- { // backwards: the end of q takes it out of live
		if q := c.live[i]; q.hangup.Load() {
			q.end(rdma.ErrDisconnected)
		}
	}
}

// adopt starts to drive q.
func (c *cq) adopt(q *qp) {
	if q.state != stateRTS {
		return
	}
	ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(q.fd)}
	if q.outSet {
		ev.Events |= unix.EPOLLOUT
	}
	if err := unix.EpollCtl(c.epfd, unix.EPOLL_CTL_ADD, q.fd, &ev); err != nil {
		q.end(fmt.Errorf("watch socket: %w", err))
		return
	}
	c.byFD[int32(q.fd)] = q
	c.live = append(c.live, q)
	for _, o := range c.live { // the number decides how sockets are watched
		o.watchWrite(o.tx.blocked)
	}
	q.resume()
}

// drop stops to drive q; its descriptor is still open.
func (c *cq) drop(q *qp) {
	if c.byFD[int32(q.fd)] != q {
		return
	}
	unix.EpollCtl(c.epfd, unix.EPOLL_CTL_DEL, q.fd, nil)
	delete(c.byFD, int32(q.fd))
	for i, o := range c.live {
		if o == q {
			c.live = append(c.live[:i], c.live[i+1:]...)
			break
		}
	}
}

// kick puts q on the list of those with something to transmit.
func (c *cq) kick(q *qp) {
	if !q.inTx {
		q.inTx = true
		c.txq = append(c.txq, q)
	}
}

// push adds a completion.
func (c *cq) push(q *qp, slots uint32, wc rdma.WC) {
	if c.tail-c.head > c.mask { // cannot happen, see the type
		panic("iwarp: completion queue overrun")
	}
	c.ring[c.tail&c.mask] = cqe{wc, q, slots}
	c.tail++
	if !c.running { // the owner is polling another CQ and may sleep on this one
		c.wake()
	}
}

// detach forgets q, drops its completions and takes its reservation back.
func (c *cq) detach(q *qp, n int) {
	if q.fd >= 0 { // else the owner has never heard of q, and this is not the owner
		c.drop(q)
		c.txq = slices.DeleteFunc(c.txq, func(o *qp) bool { return o == q })
		for i := c.head; i != c.tail; i++ {
			if e := &c.ring[i&c.mask]; e.q == q {
				e.q = nil
			}
		}
	}
	c.mu.Lock()
	for i, o := range c.pending {
		if o == q {
			c.pending = append(c.pending[:i], c.pending[i+1:]...)
			break
		}
	}
	c.mu.Unlock()
	c.unreserve(n)
}

// take moves completions to the owner.
func (c *cq) take(wc []rdma.WC) int {
	n := 0
	for n < len(wc) && c.head != c.tail {
		e := &c.ring[c.head&c.mask]
		c.head++
		if e.q == nil {
			continue
		}
		wc[n] = e.wc
		n++
		if e.wc.Recv {
			e.q.rqUsed -= e.slots
		} else {
			e.q.sqUsed -= e.slots
		}
		e.q = nil
	}
	return n
}

// transmit gives every QP on the list its turn. Those that are not done put
// themselves back.
func (c *cq) transmit() bool {
	moved := false
	list := c.txq
	c.txq = c.txSpare[:0]
	for i, q := range list {
		list[i] = nil
		q.inTx = false
		if q.state == stateRTS && q.transmit() {
			moved = true
		}
	}
	c.txSpare = list[:0]
	return moved
}

// receive reads from the QPs that have something. A few are asked directly: an
// empty read costs more than asking epoll in vain, but when there is something
// epoll comes on top, and that is the path that counts.
func (c *cq) receive() bool {
	moved := false
	if len(c.live) <= directQPs {
		for i := 0; i < len(c.live); {
			q := c.live[i]
			if c.serve(q, q.tx.blocked) {
				moved = true
			}
			if i < len(c.live) && c.live[i] == q { // it may have come to its end
				i++
			}
		}
		return moved
	}
	n := sysEpollNow(c.epfd, c.events[:])
	for i := range n {
		ev := &c.events[i]
		q := c.byFD[ev.Fd]
		if q == nil {
			continue
		}
		if ev.Events == unix.EPOLLOUT {
			q.resume()
		} else if c.serve(q, ev.Events&(unix.EPOLLOUT|unix.EPOLLERR|unix.EPOLLHUP) != 0) {
			moved = true
		}
	}
	return moved
}

// serve receives on q. What that gives cause to transmit leaves in the same Poll.
func (c *cq) serve(q *qp, writable bool) bool {
	moved := q.receive()
	if q.state != stateRTS {
		return moved
	}
	if writable {
		q.resume()
	}
	if q.scq != c && q.inTx { // this Poll does not look at the list of the other CQ
		q.transmit()
	}
	return moved
}

// Poll sends what was posted, receives what has come, answers Reads, and returns
// completions.
func (c *cq) Poll(wc []rdma.WC) (int, bool, error) {
	if c.epfd < 0 {
		return 0, false, rdma.ErrClosed
	}
	c.enter()
	if c.attn.Load() {
		c.attend()
	}
	busy := false
	if len(c.txq) > 0 && c.transmit() {
		busy = true
	}
	if c.receive() {
		busy = true
	}
	if len(c.txq) > 0 && c.transmit() { // what receiving gave cause to
		busy = true
	}
	if c.rearm {
		c.rearm = false
		c.watch()
	}
	n := c.take(wc)
	if c.polls++; c.polls%publishEvery == 0 {
		c.publish()
	}
	c.leave()
	return n, busy || n > 0, nil
}

// Arm sends what was posted and prepares for sleep on FD. The sockets themselves
// make FD readable, so there is nothing to ask for.
func (c *cq) Arm() (bool, error) {
	if c.epfd < 0 {
		return false, rdma.ErrClosed
	}
	c.enter()
	if c.attn.Load() {
		c.attend()
	}
	if len(c.txq) > 0 {
		c.transmit()
	}
	again := c.head != c.tail
	for _, q := range c.txq {
		if q.state == stateRTS {
			again = true
		}
	}
	c.watch()
	c.rearm = again
	c.publish()
	c.leave()
	return again, nil
}

// watch makes FD tell when a full socket can take more.
func (c *cq) watch() {
	for _, q := range c.live {
		q.watchWrite(q.tx.blocked)
	}
}

func (c *cq) publish() {
	for _, q := range c.live {
		q.publish()
	}
}

// Close fails while QPs are attached. Owner only.
func (c *cq) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	if c.qps > 0 {
		n := c.qps
		c.mu.Unlock()
		return fmt.Errorf("%w: close completion queue: %d queues of queue pairs are attached", rdma.ErrInvalid, n)
	}
	c.closed = true
	unix.Close(c.evfd)
	c.mu.Unlock()
	unix.Close(c.epfd)
	c.epfd = -1
	c.dev.mu.Lock()
	delete(c.dev.cqs, c)
	c.dev.mu.Unlock()
	return nil
}
