package iwarp

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"sync"
	"time"

	"rdblk/rdma"
)

// providerName is the name in configuration and errors.
const providerName = "iwarp"

// Provider is the software RDMA NIC. It has one device, which serves every
// address of the machine.
type Provider struct {
	cfg Config
	dev *device
}

var _ rdma.Provider = (*Provider)(nil)

// New makes a software RDMA NIC. NICs share nothing: keys of one mean nothing to another.
func New(cfg Config) (*Provider, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("iwarp: %w: %w", rdma.ErrInvalid, err)
	}
	cfg = cfg.withDefaults()
	return &Provider{cfg: cfg, dev: newDevice(cfg)}, nil
}

// Name is "iwarp".
func (p *Provider) Name() string { return providerName }

// Devices lists the one device.
func (p *Provider) Devices() ([]rdma.DeviceInfo, error) { return []rdma.DeviceInfo{p.dev.Info()}, nil }

// Device is the one device, for those who want memory registered before the
// first connection.
func (p *Provider) Device() rdma.Device { return p.dev }

// Dial makes a connection that Connect will establish. It does not block.
func (p *Provider) Dial(ctx context.Context, local netip.Addr, remote netip.AddrPort) (rdma.Conn, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if !remote.IsValid() || remote.Port() == 0 {
		return nil, &rdma.OpError{Op: "dial", Provider: providerName, Addr: remote, Err: fmt.Errorf("%w: no address or no port", rdma.ErrInvalid)}
	}
	c := newConn(p.dev, netip.AddrPortFrom(local, 0), remote)
	return c, nil
}

// device is the software NIC itself.
type device struct {
	cfg  Config
	tags stagTable

	mu       sync.Mutex
	cqs      map[*cq]struct{}
	qps      map[uint32]*qp // by number
	pds      int
	mrs      int
	mws      int
	closedQP QPStats // sum over QPs that are gone
	terms    map[termKey]uint64

	cm        cmCounters
	lingering chan struct{} // one token per socket drained in the background

	logMu      sync.Mutex
	logLast    time.Time
	logDropped int
}

// warn logs what a peer or a stranger can cause: at most one line a second.
func (d *device) warn(msg string, args ...any) {
	d.logMu.Lock()
	if time.Since(d.logLast) < time.Second {
		d.logDropped++
		d.logMu.Unlock()
		return
	}
	d.logLast = time.Now()
	dropped := d.logDropped
	d.logDropped = 0
	d.logMu.Unlock()
	if dropped > 0 {
		args = append(args, "suppressed", dropped)
	}
	d.cfg.Logger.Warn(msg, args...)
}

func newDevice(cfg Config) *device {
	return &device{cfg: cfg, cqs: map[*cq]struct{}{}, qps: map[uint32]*qp{}, terms: map[termKey]uint64{},
		lingering: make(chan struct{}, maxLingering)}
}

var _ rdma.Device = (*device)(nil)

func (d *device) Info() rdma.DeviceInfo {
	return rdma.DeviceInfo{
		Name: "iwarp0", Provider: providerName, Transport: rdma.TransportIWARP,
		MaxQPWR: maxQPWR, MaxSGE: maxSGE, MaxReadSGE: 1, MaxInline: maxInline, MaxCQE: maxCQE,
		MaxReadDepth: d.cfg.ReadDepth, MaxMRBytes: maxMRBytes, MaxPrivate: maxPrivate,
		MemWindows: true, SendInv: true,
	}
}

// Removed is nil: the software NIC is always there.
func (d *device) Removed() <-chan struct{} { return nil }

func (d *device) AllocPD() (rdma.PD, error) {
	d.count(&d.pds, 1)
	return &pd{dev: d}, nil
}

// Close checks that everything made from the device is gone. The device belongs
// to its provider and can be used again.
func (d *device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.cqs)+len(d.qps)+d.pds+d.mrs+d.mws != 0 {
		return fmt.Errorf("%w: close device: %d completion queues, %d queue pairs, %d protection domains, %d memory regions, %d windows still open",
			rdma.ErrInvalid, len(d.cqs), len(d.qps), d.pds, d.mrs, d.mws)
	}
	return nil
}

func (d *device) count(n *int, by int) {
	d.mu.Lock()
	*n += by
	d.mu.Unlock()
}

// addQP gives q a number: random, because a number that is used again soon
// makes completions of the dead look like those of the living.
func (d *device) addQP(q *qp) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for {
		n := rand.Uint32() & 0xFFFFFF
		if n < 2 || d.qps[n] != nil { // 0 and 1 are special on InfiniBand
			continue
		}
		q.num = n
		d.qps[n] = q
		return
	}
}

func (d *device) removeQP(q *qp) {
	st := q.Stats()
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.qps, q.num)
	d.closedQP.add(st)
}

// quiesce waits until every Poll and Arm that is running now has returned. What
// was unlinked before is then out of use.
func (d *device) quiesce() {
	d.mu.Lock()
	var busy []*cq
	var at []uint32
	for c := range d.cqs {
		if e := c.epoch.Load(); e&1 != 0 {
			busy, at = append(busy, c), append(at, e)
		}
	}
	d.mu.Unlock()
	for i, c := range busy {
		for n := 0; c.epoch.Load() == at[i]; n++ {
			if n < 100 {
				runtime.Gosched()
			} else {
				time.Sleep(20 * time.Microsecond)
			}
		}
	}
}
