package initiator

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"rdblk/blockdev"
	"rdblk/protocol"
)

// Bounds on what a target may say about a namespace.
const (
	maxBlockShift = 16                  // blockdev.Info: blocks of at most 64 KiB; zeroSize is a multiple
	maxSize       = 1<<63 - 1<<16       // a byte offset has 63 bits
	maxHint       = 64 << 20            // physical block and optimal size
	maxZeroBytes  = 32 << 20            // of one Write Zeroes where the target names no limit
	maxRange      = int64(1<<32-1) << 9 // of one Dataset Management range, for the smallest block
)

// identity is what makes a namespace the same one on all paths and for ever.
type identity struct {
	IDs protocol.NamespaceIDs
	// Serial is the controller's, which stands in if there is no identifier.
	Serial string
}

func (id identity) none() bool {
	return id.IDs.UUID.IsZero() && id.IDs.NGUID.IsZero() && id.IDs.EUI64.IsZero()
}

// same reports whether other is the same namespace. Identifiers of a kind that only one
// of them has do not count; there must be one that both have, or none at all and equal
// serial numbers.
func (id identity) same(other identity) error {
	a, b := id.IDs, other.IDs
	both := false
	differ := func(kind string, x, y fmt.Stringer) error {
		return fmt.Errorf("%s was %s and is %s", kind, x, y)
	}
	if !a.UUID.IsZero() && !b.UUID.IsZero() {
		if both = true; a.UUID != b.UUID {
			return differ("UUID", a.UUID, b.UUID)
		}
	}
	if !a.NGUID.IsZero() && !b.NGUID.IsZero() {
		if both = true; a.NGUID != b.NGUID {
			return differ("NGUID", a.NGUID, b.NGUID)
		}
	}
	if !a.EUI64.IsZero() && !b.EUI64.IsZero() {
		if both = true; a.EUI64 != b.EUI64 {
			return differ("EUI64", a.EUI64, b.EUI64)
		}
	}
	switch {
	case both:
		return nil
	case !id.none() || !other.none():
		return errors.New("the identifiers that were there are gone or of another kind")
	case id.Serial != other.Serial:
		return fmt.Errorf("it has no identifier, and the controller's serial number was %q and is %q", id.Serial, other.Serial)
	}
	return nil
}

// geometry is what the data path needs to know of a namespace and its controller. It is
// never changed, only replaced.
type geometry struct {
	info        blockdev.Info
	shift       uint8
	maxTransfer int64 // bytes of one Read or Write, a multiple of the block
	maxZero     int64 // bytes of one Write Zeroes
	maxDiscard  int64 // bytes of one range
	writeZeroes bool  // the command exists
	deallocate  bool  // it takes DEAC and then reads zeros
	crdt        [4]time.Duration
}

// part is the length of the next command for a request of op with left bytes to do.
func (g *geometry) part(op blockdev.Op, left int64) int64 {
	switch op {
	case blockdev.OpRead, blockdev.OpWrite:
		return min(left, g.maxTransfer)
	case blockdev.OpZero:
		if !g.writeZeroes {
			return min(left, g.maxTransfer, zeroSize)
		}
		return min(left, g.maxZero)
	case blockdev.OpDiscard:
		return min(left, g.maxDiscard)
	}
	return left
}

// description is what Identify tells about one namespace.
type description struct {
	nsid uint32
	ns   protocol.IdentifyNamespace
	id   identity
}

// controllerLimits is what Identify tells about the controller.
type controllerLimits struct {
	ctrl        protocol.IdentifyController
	nvm         protocol.IdentifyNVMController
	mpsmin      uint8
	maxTransfer int // of the configuration
	subnqn      string
}

// geometryOf turns Identify data into a geometry. The error says what cannot be used.
func geometryOf(lim *controllerLimits, d *description) (*geometry, error) {
	f, err := d.ns.Format()
	if err != nil {
		return nil, err
	}
	switch {
	case f.LBADS > maxBlockShift:
		return nil, fmt.Errorf("%w: blocks of 2^%d bytes", ErrUnsupported, f.LBADS)
	case f.MS != 0:
		return nil, fmt.Errorf("%w: blocks with %d bytes of metadata", ErrUnsupported, f.MS)
	}
	size, ok := protocol.BlocksToBytes(d.ns.NSZE, f.LBADS)
	if !ok || size > maxSize {
		return nil, fmt.Errorf("%w: %d blocks of 2^%d bytes", ErrUnsupported, d.ns.NSZE, f.LBADS)
	}
	c := &lim.ctrl
	block := int64(1) << f.LBADS
	g := &geometry{shift: f.LBADS}

	// A transfer is bounded by MDTS, by the 24-bit length of a keyed descriptor, by the
	// 16-bit block count, and by what the configuration wants.
	g.maxTransfer = min(int64(lim.maxTransfer), protocol.MaxKeyedLength, protocol.MaxBlocks<<f.LBADS)
	if n := protocol.MaxTransferBytes(c.MDTS, lim.mpsmin); n > 0 {
		g.maxTransfer = min(g.maxTransfer, int64(min(n, protocol.MaxKeyedLength)))
	}
	if g.maxTransfer = g.maxTransfer &^ (block - 1); g.maxTransfer == 0 {
		return nil, fmt.Errorf("%w: the largest transfer (MDTS %d, maximum %d) is smaller than a block of %d bytes", ErrUnsupported, c.MDTS, lim.maxTransfer, block)
	}
	g.maxZero = limitOf(lim.nvm.WZSL, lim.mpsmin, maxZeroBytes, block)
	g.maxZero = min(g.maxZero, protocol.MaxBlocks<<f.LBADS)
	g.maxDiscard = maxRange >> 9 << f.LBADS
	if n := lim.nvm.DMRSL; n > 0 {
		g.maxDiscard = min(g.maxDiscard, int64(n)<<f.LBADS)
	}
	if n := lim.nvm.DMSL; n > 0 && n < 1<<32 {
		g.maxDiscard = min(g.maxDiscard, int64(n)<<f.LBADS)
	}
	g.writeZeroes = c.ONCS&protocol.ONCSWriteZeroes != 0
	g.deallocate = d.ns.DLFEAT&protocol.DLFEATDEAC != 0 && d.ns.DLFEAT&protocol.DLFEATReadMask == protocol.DLFEATReadZeros
	for i, n := range c.CRDT {
		g.crdt[i+1] = time.Duration(n) * 100 * time.Millisecond
	}

	g.info = blockdev.Info{
		Name:       fmt.Sprintf("%s namespace %d", lim.subnqn, d.nsid),
		Size:       int64(size),
		BlockSize:  int(block),
		PhysBlock:  int(block),
		ReadOnly:   d.ns.NSATTR&protocol.NSATTRProtected != 0,
		WriteCache: c.VWC&protocol.VWCPresent != 0,
		FUA:        true, // every NVMe write has it
		Discard:    c.ONCS&protocol.ONCSDatasetManagement != 0,
		// DiscardZeros stays false: DLFEAT tells what a deallocated block reads as, but
		// a controller need not deallocate what Dataset Management names. Zero has DEAC
		// for that.
		WriteZeroes: g.writeZeroes,
		UUID:        d.id.IDs.UUID,
	}
	if g.info.ReadOnly {
		g.info.Discard, g.info.WriteZeroes = false, false
	}
	if d.id.IDs.UUID.IsZero() {
		g.info.UUID = d.id.IDs.NGUID
	}
	if d.ns.NSFEAT&protocol.NSFEATOptPerf != 0 {
		if n := (int64(d.ns.NPWG) + 1) << f.LBADS; n <= maxHint && bits.OnesCount64(uint64(n)) == 1 {
			g.info.PhysBlock = int(n)
		}
		if n := (int64(d.ns.NOWS) + 1) << f.LBADS; d.ns.NOWS != 0 && n <= maxHint {
			g.info.OptimalIO = int(n)
		}
	}
	if n := int64(d.ns.NOIOB) << f.LBADS; g.info.OptimalIO == 0 && n <= maxHint {
		g.info.OptimalIO = int(n)
	}
	return g, nil
}

// limitOf converts a 2^n page limit to bytes, a multiple of the block of at least one;
// without a limit it is none.
func limitOf(shift, mpsmin uint8, none, block int64) int64 {
	n := int64(min(protocol.MaxTransferBytes(shift, mpsmin), 1<<62))
	if n == 0 {
		n = none
	}
	return max(n&^(block-1), block)
}

// padded is a counter on a cache line of its own.
type padded struct {
	atomic.Uint64
	_ [56]byte
}

// A namespace is one that a Device was made for, over all associations.
type namespace struct {
	s    *Session
	nsid uint32
	id   identity

	mu    sync.Mutex // serialises changes of geo
	geo   atomic.Pointer[geometry]
	epoch cacheEpoch // as it was told last while nothing had been lost; guarded by mu
	// fault is why no request can be sent to it now: it is another one.
	fault atomic.Pointer[error]
	// gone is since when (nano) it has not been there at the target, 0 if it is. Nothing is
	// sent to it then: what comes in its place may be another disk, and only a scan tells.
	gone atomic.Int64
	// ruined is why no request can be sent to it ever again: acknowledged data is gone.
	ruined atomic.Pointer[error]
	// flushFailed is why Flush and FUA fail for good.
	flushFailed atomic.Pointer[error]

	// What was acknowledged without being durable, and how much of that was when a
	// Flush that has succeeded was sent; a counter per queue, which is its writer.
	acked   []padded
	flushed []padded
	// covered: a Flush has succeeded since the attachment. Before that there may be
	// writes of an earlier one that died, which its users count on this one to flush.
	covered atomic.Bool
}

func newNamespace(s *Session, d *description, g *geometry) *namespace {
	n := &namespace{s: s, nsid: d.nsid, id: d.id, acked: make([]padded, len(s.queues)), flushed: make([]padded, len(s.queues))}
	n.geo.Store(g)
	return n
}

func (n *namespace) geometry() *geometry { return n.geo.Load() }

func (n *namespace) name() string { return n.geometry().info.Name }

// adopt takes over a new description of the namespace, after a reconnect or, live,
// after an event. It refuses another namespace, another block size and a smaller size:
// the error is ErrChanged, the old geometry stays, and requests fail with it. Only a
// live namespace that shrank goes on, since it is the same one for certain: the target
// refuses what is beyond its end. grown tells that it has become larger.
func (n *namespace) adopt(d *description, g *geometry, live bool) (grown bool, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	old := n.geo.Load()
	shrank := false
	defer func() {
		if err != nil {
			err = fmt.Errorf("%s: %w: %w", old.info.Name, ErrChanged, err)
			if !shrank || !live {
				n.fault.Store(&err)
			}
		}
	}()
	if err := n.id.same(d.id); err != nil {
		return false, err
	}
	if n.gone.Load() != 0 {
		n.s.log.Info("namespace is back at the target", "ns", n.nsid)
	}
	if g.info.BlockSize != old.info.BlockSize {
		return false, fmt.Errorf("blocks had %d bytes and have %d", old.info.BlockSize, g.info.BlockSize)
	}
	if shrank = g.info.Size < old.info.Size; shrank {
		if live {
			n.gone.Store(0)
		}
		return false, fmt.Errorf("it had %d bytes and has %d", old.info.Size, g.info.Size)
	}
	n.geo.Store(g)
	n.fault.Store(nil)
	n.gone.Store(0)
	return g.info.Size > old.info.Size, nil
}

// vanished takes note that the target has it no more. Any goroutine.
func (n *namespace) vanished() {
	if !n.gone.CompareAndSwap(0, nano()) {
		return
	}
	n.s.log.Error("namespace is gone at the target: requests wait for it, and fail when the retry timeout is over", "ns", n.nsid, "retry_timeout", n.s.cfg.RetryTimeout)
	select {
	case n.s.missing <- struct{}{}:
	default:
	}
	n.s.events.post(Event{Kind: EventNamespaceGone, NSID: n.nsid, Err: ErrNoNamespace})
}

// goneError is why requests wait or fail; nil if it is there.
func (n *namespace) goneError() error {
	since := n.gone.Load()
	if since == 0 {
		return nil
	}
	return fmt.Errorf("%s: %w: removed or disabled at the target %v ago (%s)", n.name(), ErrNoNamespace, time.Duration(nano()-since).Round(time.Second), goneHint)
}

const goneHint = "put it back there, or detach"

// withdraw takes note that the target refused a form of a command that it had
// advertised, and reports whether there is another form to try.
func (n *namespace) withdraw(op protocol.Opcode, deac bool) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	g := *n.geo.Load()
	switch op {
	case protocol.OpWriteZeroes:
		if deac {
			g.deallocate = false
		} else {
			g.writeZeroes, g.info.WriteZeroes = false, false
		}
	case protocol.OpDatasetManagement:
		g.info.Discard = false
	default:
		return false
	}
	n.geo.Store(&g)
	return op == protocol.OpWriteZeroes
}

// acknowledged counts a write of queue q that is not durable yet.
func (n *namespace) acknowledged(q int) {
	c := &n.acked[q]
	c.Store(c.Load() + 1)
}

// mark appends what has been acknowledged so far: what a Flush sent now covers.
func (n *namespace) mark(m []uint64) []uint64 {
	for i := range n.acked {
		m = append(m, n.acked[i].Load())
	}
	return m
}

// flushDone takes note that a Flush with these marks succeeded.
func (n *namespace) flushDone(marks []uint64) {
	n.covered.Store(true)
	for i, m := range marks {
		f := &n.flushed[i]
		for old := f.Load(); m > old && !f.CompareAndSwap(old, m); old = f.Load() {
		}
	}
}

// dirty reports whether something was acknowledged that no Flush has covered.
func (n *namespace) dirty() bool {
	if !n.geometry().info.WriteCache {
		return false
	}
	for i := range n.acked {
		if n.acked[i].Load() > n.flushed[i].Load() {
			return true
		}
	}
	return false
}

// failed takes note of a failed request. After a failed Flush (or FUA write) nobody
// knows what of the earlier writes is stable, and a second Flush may find nothing left
// to write; so all later ones fail, over reconnects and restarts of the target too.
func (n *namespace) failed(r *request) {
	if !r.durable() || errors.Is(r.err, ErrClosed) || errors.Is(r.err, blockdev.ErrFlushFailed) {
		return
	}
	if r.op != blockdev.OpFlush {
		var ce *CommandError
		if !errors.As(r.err, &ce) || harmless(ce.Status) {
			return
		}
	}
	n.condemn(fmt.Errorf("%w: %w", blockdev.ErrFlushFailed, r.err))
}

// condemn makes every later Flush and FUA write fail with err, which wraps
// blockdev.ErrFlushFailed. The first one stays.
func (n *namespace) condemn(err error) {
	if n.flushFailed.CompareAndSwap(nil, &err) {
		n.s.log.Error("durability of acknowledged writes is unknown; flushes fail until the device is attached anew", "ns", n.nsid, "error", err)
	}
}

// NamespaceInfo describes a namespace of the target.
type NamespaceInfo struct {
	NSID      uint32         `json:"nsid"`
	Size      int64          `json:"size"`       // bytes
	BlockSize int            `json:"block_size"` // bytes
	ReadOnly  bool           `json:"read_only,omitempty"`
	UUID      protocol.UUID  `json:"uuid"`
	NGUID     protocol.NGUID `json:"-"`
	EUI64     protocol.EUI64 `json:"-"`
	// Problem is why the namespace cannot be used, "" if it can.
	Problem string `json:"problem,omitempty"`
}
