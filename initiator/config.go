package initiator

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/bits"
	"net/netip"
	"runtime"
	"time"

	"rdblk/protocol"
	"rdblk/rdma"
)

// Defaults of a Config, and bounds that Validate holds.
const (
	DefaultDepth             = 128
	DefaultKeepAlive         = 5 * time.Second
	DefaultReconnectDelay    = 100 * time.Millisecond
	DefaultReconnectMaxDelay = 5 * time.Second
	DefaultLossTimeout       = 600 * time.Second
	DefaultRequestTimeout    = 30 * time.Second
	DefaultConnectTimeout    = 15 * time.Second
	DefaultRetryTimeout      = 30 * time.Second
	DefaultBufferMemory      = 64 << 20
	DefaultMaxTransfer       = 1 << 20

	MinDepth        = 2
	MaxDepth        = 1024
	MaxQueues       = 1024
	MinKeepAlive    = 100 * time.Millisecond
	MinBufferMemory = 1 << 20
	MaxBufferMemory = 1 << 36
)

// Config tells Connect what to attach and how. Provider and Addr are needed; the zero
// value of everything else is a good default. Durations that are zero take the default.
type Config struct {
	// Provider is the RDMA engine to connect with.
	Provider rdma.Provider
	// Addr is the target's address; a zero port means 4420.
	Addr netip.AddrPort
	// LocalAddr chooses the local address and so the RDMA device; zero: the route
	// decides.
	LocalAddr netip.Addr

	// HostNQN is this host's name for the target's access list. Empty: the UUID form
	// made of HostID.
	HostNQN string
	// HostID identifies this attachment. A target that sees the same (HostNQN, HostID)
	// again takes it for the same host coming back after a loss and ends the old
	// association, so it must not be shared by attachments that live at the same time.
	// It should be of the form of protocol.SinglePathHostID: only then rdtarget knows
	// the host also when its address has changed. To have a process that was killed
	// replaced by its successor, with nothing of it landing later, give both the same,
	// made of what they have in common and no other attachment has. Zero: a random one
	// of that form, which covers the losses of this session and not its end by a kill.
	HostID protocol.UUID
	// SubNQN is the subsystem. Empty: ask discovery at Addr and take the only NVM
	// subsystem.
	SubNQN string
	// NSID is the namespace that Open and Device(0) give. 0: the only one, or the
	// lowest.
	NSID uint32

	// Queues is the number of I/O queues, each with a connection and a worker thread.
	// 0: one per processor. The target may grant fewer. At most MaxQueues.
	Queues int
	// Depth is the size of an I/O queue; Depth-1 commands can be outstanding. Default
	// 128, MinDepth … MaxDepth. Lowered to what target and RDMA device can do.
	Depth int
	// KeepAlive is the keep-alive timeout (KATO) that the target is told: when it hears
	// nothing for so long it ends the association. A Keep Alive is sent twice in that
	// time, and one that is not answered within it is a lost connection. Default 5 s,
	// at least MinKeepAlive.
	KeepAlive time.Duration

	// ReconnectDelay is the wait after the first failed attempt to reconnect, doubled
	// with each further one up to ReconnectMaxDelay, with jitter. The first attempt
	// after a loss is made at once. Defaults 100 ms and 5 s.
	ReconnectDelay    time.Duration
	ReconnectMaxDelay time.Duration
	// LossTimeout is how long requests wait for a lost target before they fail with
	// blockdev.ErrLost. The session goes on trying, and new requests fail at once,
	// until the target is back. Default 600 s; negative: requests wait for ever.
	LossTimeout time.Duration
	// RequestTimeout is how long the target may take to answer a command. Then the
	// association is torn down and, after a reconnect, the command sent again. Default
	// 30 s.
	RequestTimeout time.Duration
	// ConnectTimeout bounds one attempt to establish an association: all its
	// connections, commands of initialisation and namespaces. Default 15 s.
	ConnectTimeout time.Duration
	// RetryTimeout is how long a request is repeated while the target answers that it
	// cannot be done just now (namespace not ready, path errors). Then it fails with
	// that status. Default 30 s.
	RetryTimeout time.Duration

	// BufferMemory is the memory for data per queue in bytes, registered with the RDMA
	// device and rounded up to a power of two. It bounds the data in flight, and one
	// buffer is at most half of it. Default 64 MiB, MinBufferMemory … MaxBufferMemory.
	BufferMemory int
	// ResidentMemory is how much of BufferMemory is touched at the start, in bytes, so that it need not be
	// found when memory is short. Default 0; more than BufferMemory is all of it.
	ResidentMemory int
	// MaxTransfer is the largest data transfer of one command in bytes; requests beyond
	// it, or beyond the target's limit (MDTS), are split. Default 1 MiB.
	MaxTransfer int

	// PinCPUs are the processors the workers are pinned to, worker i to PinCPUs[i mod
	// len]. Empty: not pinned.
	PinCPUs []int
	// MaxPoll is the longest time a worker looks for work before it sleeps; 0: the
	// worker's default, negative: not at all. Busy: workers never sleep.
	MaxPoll time.Duration
	Busy    bool

	// NoWindows gives the target the key of a queue's whole buffer memory instead of a
	// memory window per command. Devices without windows do so anyway.
	NoWindows bool
	// NoInCapsule sends no data with the command even if the target takes it.
	NoInCapsule bool

	// Logger takes life-cycle messages; nil: none.
	Logger *slog.Logger
	// Trace gets a line for each capsule, connection and event, as package
	// internal/trace describes; nil: none, at no cost. Lines are written from a goroutine
	// of its own, many at once, until Close; a Trace that is slow loses lines and holds
	// nothing up. It stays the caller's.
	Trace io.Writer
	// OnEvent, if set, is called for each Event, one at a time and in order, on a
	// goroutine of its own. It may take its time and call the session's methods except
	// Close.
	OnEvent func(Event)
}

// withDefaults gives a copy in which zero values are replaced.
func (c Config) withDefaults() Config {
	c.Addr = defaultPort(c.Addr)
	if c.HostID.IsZero() {
		c.HostID = protocol.RandomSinglePathHostID()
	}
	if c.HostNQN == "" {
		c.HostNQN = protocol.UUIDNQN(c.HostID)
	}
	if c.Queues == 0 {
		c.Queues = min(runtime.GOMAXPROCS(0), MaxQueues)
	}
	setDefault(&c.Depth, DefaultDepth)
	setDefault(&c.KeepAlive, DefaultKeepAlive)
	setDefault(&c.ReconnectDelay, DefaultReconnectDelay)
	setDefault(&c.ReconnectMaxDelay, max(DefaultReconnectMaxDelay, c.ReconnectDelay))
	setDefault(&c.LossTimeout, DefaultLossTimeout)
	setDefault(&c.RequestTimeout, DefaultRequestTimeout)
	setDefault(&c.ConnectTimeout, DefaultConnectTimeout)
	setDefault(&c.RetryTimeout, DefaultRetryTimeout)
	setDefault(&c.BufferMemory, DefaultBufferMemory)
	setDefault(&c.MaxTransfer, DefaultMaxTransfer)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// LockedMemory is how much memory, in bytes, an RDMA device pins for the session.
func (c Config) LockedMemory() uint64 {
	c = c.withDefaults()
	ctl, aux := laneMemory(c.Depth)
	return uint64(c.Queues*(1<<bits.Len(uint(c.BufferMemory-1))+sideMemory+ctl+aux)) + DiscoverConfig{}.LockedMemory()
}

// LockedMemory is how much memory, in bytes, an RDMA device pins for Discover.
func (c DiscoverConfig) LockedMemory() uint64 {
	ctl, aux := laneMemory(protocol.AdminQueueDepth)
	return uint64(adminMemory + ctl + aux)
}

func setDefault[T int | time.Duration](p *T, v T) {
	if *p == 0 {
		*p = v
	}
}

func defaultPort(a netip.AddrPort) netip.AddrPort {
	if a.Addr().IsValid() && a.Port() == 0 {
		return netip.AddrPortFrom(a.Addr(), protocol.DefaultPort)
	}
	return a
}

// Validate reports everything that is wrong with c, joined, each with the name of its
// field. What is zero is not wrong where a default exists.
func (c Config) Validate() error {
	var bad problems
	bad.endpoint(c.Provider, c.Addr)
	if c.HostNQN != "" {
		bad.nqn("HostNQN", c.HostNQN)
	}
	if c.SubNQN != "" {
		bad.nqn("SubNQN", c.SubNQN)
		if c.SubNQN == protocol.DiscoveryNQN {
			bad.add("SubNQN: %s is the discovery subsystem and has no disks", c.SubNQN)
		}
	}
	if c.NSID == protocol.NSIDAll {
		bad.add("NSID: %#x means all namespaces, name one", c.NSID)
	}
	bad.number("Queues", c.Queues, 1, MaxQueues)
	bad.number("Depth", c.Depth, MinDepth, MaxDepth)
	bad.number("ResidentMemory", c.ResidentMemory, 0, MaxBufferMemory)
	bad.number("BufferMemory", c.BufferMemory, MinBufferMemory, MaxBufferMemory)
	bad.number("MaxTransfer", c.MaxTransfer, 4096, protocol.MaxKeyedLength)
	bad.duration("KeepAlive", c.KeepAlive, MinKeepAlive, time.Hour)
	bad.duration("ReconnectDelay", c.ReconnectDelay, time.Millisecond, time.Hour)
	bad.duration("ReconnectMaxDelay", c.ReconnectMaxDelay, max(time.Millisecond, c.ReconnectDelay), time.Hour)
	bad.duration("RequestTimeout", c.RequestTimeout, 10*time.Millisecond, 24*time.Hour)
	bad.duration("ConnectTimeout", c.ConnectTimeout, 10*time.Millisecond, time.Hour)
	bad.duration("RetryTimeout", c.RetryTimeout, time.Millisecond, 24*time.Hour)
	for _, cpu := range c.PinCPUs {
		if cpu < 0 {
			bad.add("PinCPUs: %d is no processor", cpu)
		}
	}
	return errors.Join(bad...)
}

// problems collects what is wrong with a configuration.
type problems []error

func (p *problems) add(format string, args ...any) { *p = append(*p, fmt.Errorf(format, args...)) }

func (p *problems) endpoint(prov rdma.Provider, a netip.AddrPort) {
	if prov == nil {
		p.add("Provider: not set")
	}
	switch {
	case !a.Addr().IsValid():
		p.add("Addr: not set")
	case a.Addr().IsUnspecified() || a.Addr().IsMulticast():
		p.add("Addr: %s is no address of a target", a)
	}
}

func (p *problems) nqn(field, s string) {
	if err := protocol.CheckNQN(s); err != nil {
		p.add("%s: %w", field, err)
	}
}

func (p *problems) number(field string, v, low, high int) {
	if v != 0 && (v < low || v > high) {
		p.add("%s: %d is outside %d to %d", field, v, low, high)
	}
}

func (p *problems) duration(field string, v, low, high time.Duration) {
	if v != 0 && (v < low || v > high) {
		p.add("%s: %v is outside %v to %v", field, v, low, high)
	}
}
