package target

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"rdblk/internal/arena"
	"rdblk/internal/worker"
	"rdblk/rdma"
)

// adminMemory is the data buffer memory of the admin worker in bytes. Its
// transfers are pages of 4 KiB and log pages of up to MaxIO; a request that finds
// none waits like any other.
const adminMemory = 16 << 20

// pollBatch is how many completions are taken from a completion queue at a time.
const pollBatch = 64

// lane is one worker with what its queues share: the data buffers and their
// registrations. The admin worker is a lane too.
type lane struct {
	t     *Target
	index int // number of the I/O worker, -1 = admin
	w     *worker.Worker

	load    atomic.Int64 // queues assigned
	private atomic.Int64 // bytes of buffers that connections have of their own

	mu   sync.Mutex // guards devs; held while memory is being registered
	devs map[rdma.Device]*laneDevice

	// The worker's.
	pool   // the buffers that its queues share
	queues map[*queue]struct{}
	wcs    [pollBatch]rdma.WC

	stats laneStats
}

// pool is a bounded piece of buffer memory: a lane's, or that of one connection, see laneDevice.exposed. It is
// the worker's, but for size and the arena's bytes.
type pool struct {
	l       *lane
	size    int // bytes
	quota   int // of those, for one association
	arena   *arena.Arena
	waiting requestList        // for memory of the arena, first come first served
	blocked []*share           // with requests that wait for others of their namespace or association
	stored  int                // bytes on account of namespaces
	shares  map[*nsLane]*share // of a connection's pool: what namespaces have of it; nil in a lane's
	serving bool
	again   bool
	counted int // bytes of it in the lane's statistics
}

// make makes the pool one of l.
func (p *pool) make(l *lane, memory int) error {
	a, err := arena.New(memory)
	if err != nil {
		return err
	}
	p.l, p.arena, p.size = l, a, a.Size()
	p.quota = max(a.Size()/2, 2*l.t.cfg.MaxIO)
	return nil
}

// laneStats have one writer, the worker.
type laneStats struct {
	inUse, peak                      atomic.Int64  // bytes of buffers
	waitingNow                       atomic.Int64  // requests in reqWaitBuffer
	active                           atomic.Int64  // requests that are not free
	waitBuffer, waitRead, waitSend   atomic.Uint64 // requests that ever had to wait, by kind
	waitContext                      atomic.Uint64 // capsules that had to wait for a request context
	commands, responses              atomic.Uint64
	readBytes, writeBytes, inCapsule atomic.Uint64 // moved by RDMA Write, RDMA Read, in capsules
	sendInv                          atomic.Uint64 // responses that invalidated a key
}

// laneDevice is what a lane has on one RDMA device.
type laneDevice struct {
	dev  rdma.Device
	info rdma.DeviceInfo
	// exposed: the device tells the peer the key of the memory that an RDMA Read puts data into, and the peer may
	// write there as long as it stands. So each connection has a protection domain and buffers of its own, and
	// what its peer can reach is what it has sent or will be sent itself. Without that:
	pd      rdma.PD
	mr      rdma.MR // the lane's pool
	exposed bool

	users int // its queues, and lane.devs; lane.mu
}

// exposes tells whether a device gives the keys of Read sinks away. On iWARP a Read Request names its sink by a
// key that the peer's adapter writes to; the software NIC makes up one for each Read, an adapter takes the
// region's. On InfiniBand and RoCE the sink is known to this side alone.
func exposes(info rdma.DeviceInfo) bool {
	return info.Transport == rdma.TransportIWARP && info.Autonomous
}

// privateMemory is how much buffer memory a connection has on a device that exposes it: enough for two
// of the largest transfers, which is what a command may need, and for a fair part of a full queue.
func (t *Target) privateMemory(depth int) int {
	return max(2*t.cfg.MaxIO, min(t.cfg.BufferMemory, depth<<16))
}

func newLane(t *Target, index, memory int, cfg worker.Config) (*lane, error) {
	l := &lane{t: t, index: index, devs: map[rdma.Device]*laneDevice{}, queues: map[*queue]struct{}{}}
	if err := l.pool.make(l, memory); err != nil {
		return nil, err
	}
	var err error
	if l.w, err = worker.New(cfg); err != nil {
		l.arena.Close()
		return nil, err
	}
	return l, nil
}

// device registers the lane's buffers with a device when it is used first. The caller has to leave it.
func (l *lane) device(dev rdma.Device) (*laneDevice, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if d := l.devs[dev]; d != nil {
		d.users++
		return d, nil
	}
	info := dev.Info()
	if info.MaxSGE == 1 && l.t.cfg.InCapsule > 0 {
		return nil, fmt.Errorf("device %s has one SGE per receive, in-capsule data needs two (set the in-capsule size to none)", info.Name)
	}
	d := &laneDevice{dev: dev, info: info, exposed: exposes(info)}
	if !d.exposed {
		var err error
		if d.pd, d.mr, err = l.registerPool(&l.pool, dev); err != nil {
			return nil, err
		}
	}
	d.users = 2
	l.devs[dev] = d
	if gone := dev.Removed(); gone != nil {
		go func() {
			select {
			case <-gone:
				l.forget(d)
			case <-l.t.closingCh:
			}
		}()
	}
	l.announce(d)
	return d, nil
}

// leave is called by a queue that has closed everything on a device.
func (l *lane) leave(d *laneDevice) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.leaveLocked(d)
}

func (l *lane) leaveLocked(d *laneDevice) {
	if d.users--; d.users > 0 || d.exposed {
		return
	}
	if err := errors.Join(d.mr.Deregister(), d.pd.Close()); err != nil {
		l.t.log.Error("release the buffers of a device", "device", d.info.Name, "err", err)
	}
}

// forget gives up a device that is being removed, when its last queue has gone: the kernel waits for that. Should the
// device come back it is another one.
func (l *lane) forget(d *laneDevice) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.devs[d.dev] == d {
		delete(l.devs, d.dev)
		l.leaveLocked(d)
	}
}

// announce tells of a device that is used from now on, and of settings that it cuts.
func (l *lane) announce(d *laneDevice) {
	if l.index != -1 { // the admin worker meets every device, and meets it first
		return
	}
	in, cfg := d.info, &l.t.cfg
	l.t.log.Info("RDMA device in use", "provider", in.Provider, "device", in.Name, "transport", in.Transport.String(), "max_qp_wr", in.MaxQPWR,
		"max_cqe", in.MaxCQE, "max_rd_atomic", in.MaxReadDepth, "inline", in.MaxInline, "private_buffers", d.exposed)
	if n := fitDepth(in, cfg.QueueDepth); n < cfg.QueueDepth {
		l.t.log.Warn("the device has less room in a queue than queue_depth says, hosts are offered what it has", "device", in.Name, "queue_depth", cfg.QueueDepth, "offered", n)
	}
	if n := in.MaxReadDepth; n > 0 && n < cfg.ReadDepth {
		l.t.log.Info("the device has fewer RDMA Reads outstanding than read_depth says", "device", in.Name, "read_depth", cfg.ReadDepth, "in_force", n)
	}
}

// fitDepth lowers a queue depth to what a device can do: a receive for each entry, and completions for those
// and as many sends at least.
func fitDepth(info rdma.DeviceInfo, depth int) int {
	if n := info.MaxQPWR; n > 0 {
		depth = min(depth, n)
	}
	if n := info.MaxCQE; n > 0 {
		depth = min(depth, n/2)
	}
	return max(depth, 2)
}

// queueDepth is how many entries an I/O queue of this host may have. The device that carries its admin queue is
// the one that its I/O queues will come to.
func (c *controller) queueDepth() int { return fitDepth(c.admin.dev.info, c.t.cfg.QueueDepth) }

// registerPool registers a pool in a protection domain of its own, as memory that RDMA Reads put data into.
func (l *lane) registerPool(p *pool, dev rdma.Device) (rdma.PD, rdma.MR, error) {
	info := dev.Info()
	if n := info.MaxMRBytes; n > 0 && int64(p.size) > n {
		return nil, nil, fmt.Errorf("%w: device %s has memory regions of up to %d bytes, the buffers are %d (lower the buffer memory)", rdma.ErrNoResources, info.Name, n, p.size)
	}
	pd, err := dev.AllocPD()
	if err != nil {
		return nil, nil, fmt.Errorf("allocate protection domain on %s: %w", info.Name, err)
	}
	access := rdma.AccessLocalWrite
	if info.Transport == rdma.TransportIWARP {
		access |= rdma.AccessRemoteWrite // see exposes
	}
	mr, err := pd.Register(p.arena.Bytes(), access)
	if err != nil {
		pd.Close()
		return nil, nil, fmt.Errorf("register %d bytes of buffers with %s: %w", p.size, info.Name, err)
	}
	return pd, mr, nil
}

// close releases everything; no queue is left and the worker runs nothing more.
func (l *lane) close() {
	l.w.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	for dev, d := range l.devs {
		delete(l.devs, dev)
		l.leaveLocked(d)
	}
	l.arena.Close()
}

// share is what one association, or one namespace, holds of a lane's buffers.
//
// An association may have half of them, so that a host that takes its data slowly, or never,
// leaves room for others. A namespace, where there are several, may have as much as is left
// over when it asks: half of them if its storage is the only one that hangs, a third if
// there is a second one, and so on, so that something is always left for those that work.
type share struct {
	namespace bool
	used      int // bytes, and what its requests that wait further on will get
	waiting   requestList
	blocked   bool // in pool.blocked
}

// fits reports whether s may have n bytes more.
func (p *pool) fits(s *share, n int) bool {
	switch {
	case !s.namespace:
		return s.used+n <= p.quota
	case s.used == 0 || p.l.t.namespaces.Load() < 2:
		return true
	}
	return s.used+n <= p.size-p.stored
}

// charge adds n bytes, which may be negative, to what s has.
func (p *pool) charge(s *share, n int) {
	s.used += n
	if s.namespace {
		p.stored += n
	}
}

// bufferSize is what n bytes cost in the arena.
func bufferSize(n int) int {
	if n <= arena.MinSize {
		return arena.MinSize
	}
	return 1 << bits.Len(uint(n-1))
}

// alloc gives r its buffer at once, or puts it in a list: then gotBuffer is called
// later. Worker only, as everything below.
func (p *pool) alloc(r *request, n int) bool {
	r.allocLen = n
	r.shares = [2]*share{nil, r.q.share}
	if r.ns != nil {
		r.shares[0] = p.shareOf(r.ns)
	}
	r.stage = 0
	list := p.admit(r)
	if list == &p.waiting && list.empty() && p.take(r) {
		return true
	}
	r.setState(reqWaitBuffer)
	p.l.stats.waitBuffer.Add(1)
	p.l.stats.waitingNow.Add(1)
	r.list = list
	list.push(r)
	return false
}

// shareOf is what a namespace has of the pool.
func (p *pool) shareOf(ns *nsLane) *share {
	if p.shares == nil {
		return &ns.share
	}
	s := p.shares[ns]
	if s == nil {
		for old, x := range p.shares { // of namespaces that are gone
			if x.used == 0 && x.waiting.head == nil && len(p.shares) >= MaxNamespaces {
				delete(p.shares, old)
			}
		}
		s = &share{namespace: true}
		p.shares[ns] = s
	}
	return s
}

// admit takes r through the shares that it has not passed yet and returns the list
// that it has to wait in next.
func (p *pool) admit(r *request) *requestList {
	n := bufferSize(r.allocLen)
	for ; r.stage < len(r.shares); r.stage++ {
		s := r.shares[r.stage]
		if s == nil {
			continue
		}
		if s.waiting.head != nil || !p.fits(s, n) {
			if !s.blocked {
				s.blocked = true
				p.blocked = append(p.blocked, s)
			}
			return &s.waiting
		}
		p.charge(s, n)
	}
	return &p.waiting
}

func (p *pool) take(r *request) bool {
	b := p.arena.Alloc(r.allocLen)
	if b == nil {
		return false
	}
	r.buf = b
	p.publish()
	return true
}

// unwait takes r out of the list that it waits in.
func (p *pool) unwait(r *request) {
	r.list.remove(r)
	for _, s := range r.shares[:r.stage] {
		if s != nil {
			p.charge(s, -bufferSize(r.allocLen))
		}
	}
	r.list, r.shares = nil, [2]*share{}
	p.l.stats.waitingNow.Add(-1)
}

func (p *pool) publish() {
	n := p.arena.InUse()
	st := &p.l.stats
	now := st.inUse.Add(int64(n - p.counted))
	p.counted = n
	st.peak.Store(max(st.peak.Load(), now))
}

// free takes a buffer back that was given on account of shares.
func (p *pool) free(b []byte, shares [2]*share) {
	for _, s := range shares {
		if s != nil {
			p.charge(s, -cap(b))
		}
	}
	p.arena.Free(b)
	p.publish()
	p.serve()
}

// serve gives buffers to those who wait. It is called whenever buffers or shares
// come back, also from inside itself.
func (p *pool) serve() {
	p.again = true
	if p.serving {
		return
	}
	p.serving = true
	for p.again {
		p.again = false
		for i := 0; i < len(p.blocked); {
			s := p.blocked[i]
			for r := s.waiting.head; r != nil && p.fits(s, bufferSize(r.allocLen)); r = s.waiting.head {
				s.waiting.remove(r)
				p.charge(s, bufferSize(r.allocLen))
				r.stage++
				r.list = p.admit(r)
				r.list.push(r)
			}
			if s.waiting.head == nil {
				s.blocked = false
				p.blocked = slices.Delete(p.blocked, i, i+1)
			} else {
				i++
			}
		}
		for r := p.waiting.head; r != nil && p.take(r); r = p.waiting.head {
			p.waiting.remove(r)
			r.list = nil
			p.l.stats.waitingNow.Add(-1)
			r.q.gotBuffer(r)
			r.q.kick()
		}
	}
	p.serving = false
}

func (l *lane) active(n int64) { l.stats.active.Store(l.stats.active.Load() + n) }

// sweepTicks is how many sweeps make Config.TransferTimeout.
const sweepTicks = 8

// sweep ends queues whose host does not move: it keeps an RDMA Read or a response
// unfinished for Config.TransferTimeout, and with it buffers.
func (l *lane) sweep() {
	for q := range l.queues {
		for _, r := range q.requests {
			if r.state != reqReading && r.state != reqResponding {
				continue
			}
			if r.sweeps++; r.sweeps > sweepTicks {
				q.breakdown(fmt.Errorf("%w: %s (command %d) is %v since %v or longer", errStalled, r.opcodeName(), r.cmd.ID(), r.state, l.t.cfg.TransferTimeout))
				break
			}
		}
	}
}

// requestList is a FIFO of requests that allows removal in the middle. A request
// is in one list at a time.
type requestList struct {
	head, tail *request
	n          int
}

func (l *requestList) empty() bool { return l.head == nil }

func (l *requestList) push(r *request) {
	r.prev, r.next = l.tail, nil
	if l.tail == nil {
		l.head = r
	} else {
		l.tail.next = r
	}
	l.tail = r
	l.n++
}

func (l *requestList) remove(r *request) {
	if r.prev == nil {
		l.head = r.next
	} else {
		r.prev.next = r.next
	}
	if r.next == nil {
		l.tail = r.prev
	} else {
		r.next.prev = r.prev
	}
	r.prev, r.next = nil, nil
	l.n--
}

func (l *requestList) pop() *request {
	r := l.head
	if r != nil {
		l.remove(r)
	}
	return r
}
