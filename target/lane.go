package target

import (
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

	load  atomic.Int64 // queues assigned
	size  int          // bytes of buffers
	quota int          // of those, for one association

	mu   sync.Mutex // guards devs; held while memory is being registered
	devs map[rdma.Device]*laneDevice

	// The worker's.
	arena   *arena.Arena
	waiting requestList // for memory of the arena, first come first served
	blocked []*share    // with requests that wait for others of their namespace or association
	stored  int         // bytes on account of namespaces
	serving bool
	again   bool
	queues  map[*queue]struct{}
	wcs     [pollBatch]rdma.WC

	stats laneStats
}

// laneStats have one writer, the worker.
type laneStats struct {
	inUse, peak                      atomic.Int64  // bytes of buffers
	waitingNow                       atomic.Int64  // requests in reqWaitBuffer
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
	pd   rdma.PD
	mr   rdma.MR // the arena
}

func newLane(t *Target, index, memory int, cfg worker.Config) (*lane, error) {
	a, err := arena.New(memory)
	if err != nil {
		return nil, err
	}
	w, err := worker.New(cfg)
	if err != nil {
		a.Close()
		return nil, err
	}
	return &lane{t: t, index: index, w: w, arena: a, size: a.Size(), quota: max(a.Size()/2, 2*t.cfg.MaxIO), devs: map[rdma.Device]*laneDevice{}, queues: map[*queue]struct{}{}}, nil
}

// device registers the lane's buffers with a device when it is used first.
func (l *lane) device(dev rdma.Device) (*laneDevice, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if d := l.devs[dev]; d != nil {
		return d, nil
	}
	info := dev.Info()
	if info.MaxSGE == 1 && l.t.cfg.InCapsule > 0 {
		return nil, fmt.Errorf("device %s has one SGE per receive, in-capsule data needs two (set the in-capsule size to none)", info.Name)
	}
	pd, err := dev.AllocPD()
	if err != nil {
		return nil, fmt.Errorf("allocate protection domain on %s: %w", info.Name, err)
	}
	mr, err := pd.Register(l.arena.Bytes(), sinkAccess(info))
	if err != nil {
		pd.Close()
		return nil, fmt.Errorf("register %d bytes of buffers with %s: %w", len(l.arena.Bytes()), info.Name, err)
	}
	d := &laneDevice{dev: dev, info: info, pd: pd, mr: mr}
	l.devs[dev] = d
	return d, nil
}

// sinkAccess are the rights of memory that RDMA Reads put data into.
func sinkAccess(info rdma.DeviceInfo) rdma.Access {
	if info.Transport == rdma.TransportIWARP {
		// An iWARP Read names its sink by a key that the peer's RNIC writes to. The
		// software NIC makes up a key for each Read; an adapter shows the peer the
		// region's, so there hosts that share a worker must trust each other.
		return rdma.AccessLocalWrite | rdma.AccessRemoteWrite
	}
	return rdma.AccessLocalWrite
}

// close releases everything; no queue is left and the worker runs nothing more.
func (l *lane) close() {
	l.w.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	for dev, d := range l.devs {
		d.mr.Deregister()
		d.pd.Close()
		delete(l.devs, dev)
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
	blocked   bool // in lane.blocked
}

// fits reports whether s may have n bytes more.
func (l *lane) fits(s *share, n int) bool {
	switch {
	case !s.namespace:
		return s.used+n <= l.quota
	case s.used == 0 || l.t.namespaces.Load() < 2:
		return true
	}
	return s.used+n <= l.size-l.stored
}

// charge adds n bytes, which may be negative, to what s has.
func (l *lane) charge(s *share, n int) {
	s.used += n
	if s.namespace {
		l.stored += n
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
func (l *lane) alloc(r *request, n int) bool {
	r.allocLen = n
	r.shares = [2]*share{nil, r.q.share}
	if r.ns != nil {
		r.shares[0] = &r.ns.share
	}
	r.stage = 0
	list := l.admit(r)
	if list == &l.waiting && list.empty() && l.take(r) {
		return true
	}
	r.setState(reqWaitBuffer)
	l.stats.waitBuffer.Add(1)
	l.stats.waitingNow.Add(1)
	r.list = list
	list.push(r)
	return false
}

// admit takes r through the shares that it has not passed yet and returns the list
// that it has to wait in next.
func (l *lane) admit(r *request) *requestList {
	n := bufferSize(r.allocLen)
	for ; r.stage < len(r.shares); r.stage++ {
		s := r.shares[r.stage]
		if s == nil {
			continue
		}
		if s.waiting.head != nil || !l.fits(s, n) {
			if !s.blocked {
				s.blocked = true
				l.blocked = append(l.blocked, s)
			}
			return &s.waiting
		}
		l.charge(s, n)
	}
	return &l.waiting
}

func (l *lane) take(r *request) bool {
	b := l.arena.Alloc(r.allocLen)
	if b == nil {
		return false
	}
	r.buf = b
	l.publish()
	return true
}

// unwait takes r out of the list that it waits in.
func (l *lane) unwait(r *request) {
	r.list.remove(r)
	for _, s := range r.shares[:r.stage] {
		if s != nil {
			l.charge(s, -bufferSize(r.allocLen))
		}
	}
	r.list, r.shares = nil, [2]*share{}
	l.stats.waitingNow.Add(-1)
}

func (l *lane) publish() {
	l.stats.inUse.Store(int64(l.arena.InUse()))
	l.stats.peak.Store(int64(l.arena.Peak()))
}

// free takes a buffer back that was given on account of shares.
func (l *lane) free(b []byte, shares [2]*share) {
	for _, s := range shares {
		if s != nil {
			l.charge(s, -cap(b))
		}
	}
	l.arena.Free(b)
	l.publish()
	l.serve()
}

// serve gives buffers to those who wait. It is called whenever buffers or shares
// come back, also from inside itself.
func (l *lane) serve() {
	l.again = true
	if l.serving {
		return
	}
	l.serving = true
	for l.again {
		l.again = false
		for i := 0; i < len(l.blocked); {
			s := l.blocked[i]
			for r := s.waiting.head; r != nil && l.fits(s, bufferSize(r.allocLen)); r = s.waiting.head {
				s.waiting.remove(r)
				l.charge(s, bufferSize(r.allocLen))
				r.stage++
				r.list = l.admit(r)
				r.list.push(r)
			}
			if s.waiting.head == nil {
				s.blocked = false
				l.blocked = slices.Delete(l.blocked, i, i+1)
			} else {
				i++
			}
		}
		for r := l.waiting.head; r != nil && l.take(r); r = l.waiting.head {
			l.waiting.remove(r)
			r.list = nil
			l.stats.waitingNow.Add(-1)
			r.q.gotBuffer(r)
			r.q.kick()
		}
	}
	l.serving = false
}

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
