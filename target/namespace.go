package target

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"

	"rdblk/blockdev"
	"rdblk/internal/histogram"
	"rdblk/internal/worker"
	"rdblk/protocol"
)

// namespace is a device under an identifier.
type namespace struct {
	t    *Target
	id   uint32
	dev  blockdev.Device
	info blockdev.Info // as it was when the namespace was added; Size is not kept up
	uuid protocol.UUID
	exec *blockdev.Executor

	losses uint64 // Config.UnsafeShutdowns when it was added

	shift uint8          // log2 of the block size
	size  atomic.Int64   // bytes
	lanes []nsLane       // one per I/O worker
	users sync.WaitGroup // flushes of controllers that shut down; Add under Target.mu
}

// nsLane is a namespace's part on one worker, and the worker's own.
type nsLane struct {
	ns       *namespace
	q        blockdev.Queue
	inFlight int
	share    share         // of the worker's buffers
	removed  chan struct{} // not nil: closed when inFlight is 0

	stats [numOps]opStats
}

// op is an operation in statistics.
type op uint8

const (
	opRead op = iota
	opWrite
	opFlush
	opWriteZeroes
	opDiscard
	opCompare
	opVerify
	numOps
	opNone = numOps
)

var opNames = [numOps]string{"read", "write", "flush", "write_zeroes", "discard", "compare", "verify"}

func (o op) String() string {
	if o < numOps {
		return opNames[o]
	}
	return "none"
}

// opStats have one writer, the worker.
type opStats struct {
	ops, errors, bytes, fua atomic.Uint64
	media                   atomic.Uint64 // of errors: the store's
	latency                 histogram.Histogram
}

// observe counts a request that is going to be answered; its time ends with the next flush.
func (s *opStats) observe(r *request) {
	s.ops.Add(1)
	if r.status.OK() {
		s.bytes.Add(r.moved)
		if r.cmd.FUA() && r.kind.fua {
			s.fua.Add(1)
		}
	} else {
		s.errors.Add(1)
		if c := r.status.Code(); c.SCT() == protocol.SCTMedia && c != protocol.StatusCompareFailure {
			s.media.Add(1)
		}
	}
	r.q.timed = append(r.q.timed, timedRequest{&s.latency, r.start})
}

// AddNamespace serves dev under the namespace identifier nsid, 0 = the lowest free
// one, and returns the identifier. Hosts that are connected are told, except those that
// knew another disk under that identifier (another UUID or block size, or one that has
// lost writes since, see Config.UnsafeShutdowns): they see the new
// one once they have connected again, because commands that they sent to the old one may
// arrive at any time. The device stays the caller's, who closes it after RemoveNamespace,
// Shutdown or Close.
func (t *Target) AddNamespace(nsid uint32, dev blockdev.Device) (uint32, error) {
	info := dev.Info()
	fail := func(err error) (uint32, error) {
		return 0, fmt.Errorf("add %s as a namespace: %w", info.Name, err)
	}
	if info.BlockSize < 512 || bits.OnesCount(uint(info.BlockSize)) != 1 || info.BlockSize > t.cfg.MaxIO {
		return fail(fmt.Errorf("block size %d is not a power of two between 512 and the largest transfer (%d)", info.BlockSize, t.cfg.MaxIO))
	}
	if info.Size <= 0 || info.Size%int64(info.BlockSize) != 0 {
		return fail(fmt.Errorf("size %d is not a positive multiple of the block size %d", info.Size, info.BlockSize))
	}
	if nsid > MaxNamespaces {
		return fail(fmt.Errorf("%w: namespace identifier %d is over %d", ErrTooMany, nsid, MaxNamespaces))
	}
	ns := &namespace{t: t, dev: dev, info: info, exec: blockdev.NewExecutor(t.cfg.Executors), shift: uint8(bits.TrailingZeros(uint(info.BlockSize)))}
	ns.size.Store(info.Size)
	ns.lanes = make([]nsLane, len(t.lanes))
	for i, l := range t.lanes {
		// Buffers are the lane's, so that RDMA and storage work on the same memory.
		q, err := blockdev.NewQueue(dev, l.w, blockdev.QueueConfig{Executor: ns.exec, ArenaSize: -1})
		if err != nil {
			ns.exec.Close()
			return fail(err)
		}
		ns.lanes[i].ns, ns.lanes[i].q, ns.lanes[i].share.namespace = ns, q, true
	}

	t.mu.Lock()
	table := *t.sub.ns.Load()
	err := error(nil)
	switch {
	case t.closing:
		err = ErrClosed
	case nsid == 0:
		for nsid = 1; table.get(nsid) != nil; nsid++ {
		}
		if nsid > MaxNamespaces {
			err = fmt.Errorf("%w: %d namespaces", ErrTooMany, MaxNamespaces)
		}
	case table.get(nsid) != nil:
		err = fmt.Errorf("%w: %d", ErrNamespaceExists, nsid)
	}
	if err != nil {
		t.mu.Unlock()
		ns.exec.Close()
		return fail(err)
	}
	ns.id = nsid
	ns.uuid = protocol.UUID(info.UUID)
	if ns.uuid.IsZero() {
		// Not random: it must be the same after a restart and on every path.
		ns.uuid = protocol.NameUUID(namespaceUUIDs, fmt.Sprintf("%s/%d", t.sub.nqn, nsid))
	}
	if f := t.cfg.UnsafeShutdowns; f != nil {
		ns.losses = f(nsid)
	}
	next := table.with(nsid, ns)
	t.sub.ns.Store(&next)
	t.namespaces.Add(1)
	t.trace.Event(protocol.EventNamespaceChanged.String(), nsid)
	hidden := 0
	for _, c := range t.sub.controllers {
		if c.added(ns, &next) {
			c.namespaceChanged(nsid)
		} else {
			hidden++
		}
	}
	t.mu.Unlock()
	if hidden > 0 {
		t.log.Warn("hosts that are connected knew another disk under this namespace identifier: they see the new one when they have connected again",
			"ns", nsid, "dev", info.Name, "associations", hidden)
	}
	t.log.Info("namespace added", "ns", nsid, "dev", info.Name, "bytes", info.Size, "block", info.BlockSize,
		"read_only", info.ReadOnly, "uuid", ns.uuid)
	return nsid, nil
}

// namespaceUUIDs is the name space of UUIDs that are derived from subsystem and NSID.
var namespaceUUIDs = protocol.UUID{0x6b, 0x0f, 0x6d, 0x3e, 0x5a, 0x55, 0x4c, 0x0f, 0x9d, 0x2a, 0x52, 0x44, 0x42, 0x4c, 0x4b, 0x01}

// RemoveNamespace ends a namespace: commands that come from now on and name it fail
// with Invalid Namespace or Format, those that are being worked on are answered as
// usual, hosts that are connected are told. It returns when the device is not in use any
// more, so it waits for what the back end is doing, and Shutdown and Close wait for it.
func (t *Target) RemoveNamespace(nsid uint32) error {
	wait, err := t.BeginRemoveNamespace(nsid)
	if err != nil {
		return err
	}
	wait()
	return nil
}

// BeginRemoveNamespace is the part of RemoveNamespace that does not wait: when it has
// returned without an error no new command finds the namespace. wait, to be called once,
// is the rest. With an error (ErrNoNamespace, or ErrClosed once Shutdown or Close was
// called) nothing has changed, and the device is in use for as long as the target.
func (t *Target) BeginRemoveNamespace(nsid uint32) (wait func(), err error) {
	t.mu.Lock()
	table := *t.sub.ns.Load()
	ns := table.get(nsid)
	if ns == nil {
		t.mu.Unlock()
		return nil, fmt.Errorf("%w: %d", ErrNoNamespace, nsid)
	}
	if t.closing { // Shutdown or Close ends it with all others
		t.mu.Unlock()
		return nil, ErrClosed
	}
	next := table.with(nsid, nil)
	t.sub.ns.Store(&next)
	t.namespaces.Add(-1)
	t.trace.Event(protocol.EventNamespaceChanged.String(), nsid)
	for _, c := range t.sub.controllers {
		if c.removed(ns, &next) {
			c.namespaceChanged(nsid)
		}
	}
	t.retiring++
	hosts := len(t.sub.controllers)
	t.mu.Unlock()
	t.log.Info("namespace removed", "ns", nsid, "dev", ns.info.Name, "associations", hosts)
	return func() {
		ns.retire()
		t.mu.Lock()
		t.retiring--
		t.mu.Unlock()
	}, nil
}

// retire waits until nothing uses the namespace and releases what it has. It is in
// no table any more.
func (ns *namespace) retire() {
	ns.users.Wait()
	for i := range ns.lanes {
		nl := &ns.lanes[i]
		idle := make(chan struct{})
		// Requests look the namespace up and take it within one step of the worker, so
		// after this task nobody new can come.
		_ = ns.t.lanes[i].w.Submit(worker.TaskFunc(func() {
			nl.removed = idle
			nl.checkRemoved()
		}))
		<-idle
	}
	ns.exec.Close()
}

func (nl *nsLane) checkRemoved() {
	if nl.removed != nil && nl.inFlight == 0 {
		nl.q.Close()
		close(nl.removed)
		nl.removed = nil
	}
}

// take makes r a user of the namespace on its worker.
func (r *request) take(ns *namespace) {
	r.ns = &ns.lanes[r.q.lane.index]
	r.ns.inFlight++
}

// dropNamespace is the opposite; it may be called more than once.
func (r *request) dropNamespace() {
	if nl := r.ns; nl != nil {
		r.ns = nil
		nl.inFlight--
		nl.checkRemoved()
	}
}

// blocks is NSZE.
func (ns *namespace) blocks() uint64 { return uint64(ns.size.Load()) >> ns.shift }

// Refresh looks at the size of every namespace again. Growth is taken over and told
// to the hosts; a shrink is refused: the old size stays and the error names the
// device.
func (t *Target) Refresh() error {
	var errs []error
	for _, ns := range *t.sub.ns.Load() {
		if ns == nil {
			continue
		}
		info := ns.dev.Info()
		if rs, ok := ns.dev.(blockdev.Resizer); ok {
			var err error
			if info, err = rs.Refresh(); err != nil {
				errs = append(errs, fmt.Errorf("refresh namespace %d: %w", ns.id, err))
				continue
			}
		}
		old := ns.size.Load()
		switch {
		case info.Size < old:
			errs = append(errs, fmt.Errorf("refresh namespace %d: %w: %s has %d bytes, %d are served", ns.id, ErrShrunk, info.Name, info.Size, old))
		case info.Size > old:
			t.mu.Lock()
			ns.size.Store(info.Size)
			t.trace.Event(protocol.EventNamespaceChanged.String(), ns.id)
			for _, c := range t.sub.controllers {
				c.namespaceChanged(ns.id)
			}
			t.mu.Unlock()
			t.log.Info("namespace grew", "ns", ns.id, "dev", info.Name, "from_bytes", old, "bytes", info.Size)
		}
	}
	return errors.Join(errs...)
}
