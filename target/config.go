package target

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/bits"
	"os"
	"runtime"
	"strings"
	"time"

	"rdblk/protocol"
)

// Bounds that are not configurable.
const (
	// MaxNamespaces is Identify Controller NN: namespace identifiers are 1 … MaxNamespaces.
	// It is constant because hosts do not expect it to change during an association.
	MaxNamespaces = 1024

	adminDepth     = 128 // largest admin queue (entries) accepted; Linux uses 32, SPDK up to 128
	minAdminDepth  = 32  // smallest one that discovery advertises
	maxAsyncEvents = 4   // AERL + 1
	maxAborts      = 4   // ACL + 1
	errorLogSize   = 64  // ELPE + 1
	kasUnit        = time.Second
)

// Config is what a Target is made of. The zero value of every field but NQN is a
// working default.
type Config struct {
	// NQN names the subsystem: at most 223 bytes, "nqn.yyyy-mm.reversed.domain:name". Required.
	NQN string
	// Serial is SN of Identify Controller: up to 20 printable ASCII characters, the same
	// for the life of the subsystem. Default: 16 hexadecimal digits derived from NQN.
	Serial string
	// Model is MN: up to 40 printable ASCII characters. Default "rdblk".
	Model string
	// Firmware is FR: up to 8 printable ASCII characters. Default "1".
	Firmware string

	// PowerCycles is told in the SMART log: a number that changes whenever what write
	// caches held may have been lost, so that a host that comes back can notice. 0 =
	// derived from the kernel's boot identifier: the page cache survives the end of
	// this process, and not that of the machine.
	PowerCycles uint64
	// UnsafeShutdowns is asked for the number of that name whenever the SMART log is read:
	// how often the store of namespace nsid, or (0) any store of this subsystem, may have lost
	// acknowledged writes while the machine went on, by a flush that failed or an end without
	// one. It must not go back when the process ends: the next one's store looks clean, and
	// hosts with unflushed writes must notice. It is also asked when a namespace is added, and
	// must know it then. Called concurrently; it must not block, nor call the target. nil = 0.
	UnsafeShutdowns func(nsid uint32) uint64

	// Hosts are the NQNs of the hosts that may connect, at most MaxHosts. Nobody may if
	// it is empty and AllowAnyHost is false. SetHosts changes both.
	Hosts        []string
	AllowAnyHost bool

	// Workers is the number of I/O workers, each one thread with its own buffers;
	// default one per processor (GOMAXPROCS), 1 … 1024.
	Workers int
	// PinCPUs pins worker i to processor PinCPUs[i mod len]; empty = not pinned.
	PinCPUs []int
	// MaxPoll is the longest time an idle worker keeps looking for work before it
	// sleeps; 0 = the worker's default (50 µs), negative = never.
	MaxPoll time.Duration
	// BusyPoll makes I/O workers never sleep.
	BusyPoll bool

	// QueueDepth is the number of entries of an I/O queue that is accepted and
	// advertised (MQES + 1); default 128, 2 … 1024.
	QueueDepth int
	// InCapsule is the room for data in a command capsule in bytes (IOCCSZ): a multiple
	// of 16 up to 16384, negative = none; default 4096. A write that fits needs no RDMA Read.
	InCapsule int
	// MaxIO is the largest data transfer of one command in bytes (MDTS): a power of two
	// from 8 KiB to 8 MiB (4 KiB is MDTS 0, which means "no limit"); default 1 MiB.
	MaxIO int
	// BufferMemory is the data buffer memory of each I/O worker in bytes, rounded up to a
	// power of two, at least 2 × MaxIO; default 64 MiB. It is registered with every
	// device that is used; on RDMA hardware it counts against the locked-memory limit.
	BufferMemory int
	// Executors bounds the back-end calls of one namespace that wait for storage at one
	// time; default blockdev.DefaultExecutors.
	Executors int
	// ReadDepth is the largest number of RDMA Reads outstanding on a queue; the host and
	// the device may allow fewer. Default and bound 128.
	ReadDepth int
	// NoSendInvalidate answers with plain Sends even when a host asks for Send with
	// Invalidate. For devices that advertise it and fail.
	NoSendInvalidate bool

	// MaxControllers bounds the associations, discovery included; default 256.
	MaxControllers int
	// MaxQueuesPerController bounds the I/O queues of one association; default 128.
	MaxQueuesPerController int
	// MaxQueues bounds all connections; default 4096. Each may cost
	// QueueDepth × (64 + InCapsule) bytes of receive buffers when it is used.
	MaxQueues int
	// MaxPending bounds the connections that have not completed a Connect command;
	// default 1024. When it is reached the oldest makes room.
	MaxPending int

	// AcceptTimeout bounds the establishment of one RDMA connection; default 10 s.
	AcceptTimeout time.Duration
	// ConnectTimeout is how long a connection may stay without a successful Connect
	// command; default 30 s. (Linux opens all connections first.)
	ConnectTimeout time.Duration
	// AssociationTimeout ends an association that is not enabled (before CC.EN is set,
	// after it is cleared, after a shutdown); default 120 s.
	AssociationTimeout time.Duration
	// DiscoveryTimeout ends a discovery association without keep-alive timeout that
	// sends nothing; default 120 s.
	DiscoveryTimeout time.Duration
	// FenceTimeout is how long the Connect of a returning host waits for the end of its
	// old association before it is answered with "controller busy"; default 5 s.
	FenceTimeout time.Duration
	// TransferTimeout ends an association whose host leaves an RDMA Read or a response
	// unfinished for so long; default 30 s.
	TransferTimeout time.Duration

	// Logger gets life-cycle events; nil = slog.Default().
	Logger *slog.Logger
	// Trace gets a line for each capsule, connection and event, as package
	// internal/trace describes; nil = none, at no cost. Lines are written from a goroutine
	// of its own, many at once, until the Target has ended; a Trace that is slow loses
	// lines and holds nothing up. It stays the caller's.
	Trace io.Writer

	clock        clock
	closeTimeout time.Duration // how long Close waits for the back end; 0 = closeTimeout
}

// MaxHosts bounds the host allow list.
const MaxHosts = 65536

func (c Config) withDefaults() Config {
	def := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	defD := func(p *time.Duration, v time.Duration) {
		if *p == 0 {
			*p = v
		}
	}
	if c.Serial == "" {
		sum := sha256.Sum256([]byte(c.NQN))
		c.Serial = hex.EncodeToString(sum[:8])
	}
	if c.Model == "" {
		c.Model = "rdblk"
	}
	if c.Firmware == "" {
		c.Firmware = "1"
	}
	def(&c.Workers, runtime.GOMAXPROCS(0))
	def(&c.QueueDepth, 128)
	def(&c.InCapsule, 4096)
	if c.InCapsule < 0 {
		c.InCapsule = 0
	}
	def(&c.MaxIO, 1<<20)
	def(&c.BufferMemory, max(64<<20, 2*c.MaxIO))
	def(&c.ReadDepth, 128)
	def(&c.MaxControllers, 256)
	def(&c.MaxQueuesPerController, 128)
	def(&c.MaxQueues, 4096)
	def(&c.MaxPending, 1024)
	defD(&c.AcceptTimeout, 10*time.Second)
	defD(&c.ConnectTimeout, 30*time.Second)
	defD(&c.AssociationTimeout, 120*time.Second)
	defD(&c.DiscoveryTimeout, 120*time.Second)
	defD(&c.FenceTimeout, 5*time.Second)
	defD(&c.TransferTimeout, 30*time.Second)
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.PowerCycles == 0 {
		c.PowerCycles = bootNumber()
	}
	if c.closeTimeout == 0 {
		c.closeTimeout = closeTimeout
	}
	if c.clock == nil {
		c.clock = systemClock{}
	}
	return c
}

// LockedMemory is how much memory, in bytes, an RDMA device pins for the workers and for one host with
// a queue on each; each further connection adds QueueDepth × (64 + InCapsule).
func (c Config) LockedMemory() uint64 {
	c = c.withDefaults()
	arena := func(n int) uint64 { return 1 << bits.Len(uint(max(n, 1)-1)) }
	queue := arena(c.QueueDepth * (protocol.CommandSize + c.InCapsule + 4*protocol.CompletionSize))
	return uint64(c.Workers)*(arena(c.BufferMemory)+queue) + arena(max(adminMemory, 2*c.MaxIO)) + queue
}

// bootNumber is the same until the machine boots: 31 bits of the kernel's boot
// identifier, or 0 if there is none to read.
func bootNumber() uint64 {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return 0
	}
	sum := sha256.Sum256(id)
	return uint64(binary.LittleEndian.Uint32(sum[:]) >> 1)
}

// Validate returns all problems of c joined, each with the field's name; nil if New would accept it.
func (c *Config) Validate() error {
	d := c.withDefaults()
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%s: %s", field, fmt.Sprintf(format, args...)))
	}
	between := func(field string, v, lo, hi int) {
		if v < lo || v > hi {
			bad(field, "%d is not between %d and %d", v, lo, hi)
		}
	}
	positive := func(field string, v time.Duration) {
		if v < 0 {
			bad(field, "%v is negative", v)
		}
	}
	if err := protocol.CheckNQN(c.NQN); err != nil {
		bad("NQN", "%v", err)
	} else if c.NQN == protocol.DiscoveryNQN {
		bad("NQN", "%s is the discovery subsystem's", c.NQN)
	}
	text := func(field, s string, n int) {
		if len(s) > n {
			bad(field, "%q is longer than %d characters", s, n)
		}
		if strings.IndexFunc(s, func(r rune) bool { return r < 0x20 || r > 0x7e }) >= 0 {
			bad(field, "%q is not printable ASCII", s)
		}
	}
	text("Serial", d.Serial, 20)
	text("Model", d.Model, 40)
	text("Firmware", d.Firmware, 8)
	if err := checkHosts(c.Hosts); err != nil {
		bad("Hosts", "%v", err)
	}
	between("Workers", d.Workers, 1, 1024)
	for _, cpu := range c.PinCPUs {
		if cpu < 0 || cpu > 1023 {
			bad("PinCPUs", "%d is not a processor number", cpu)
		}
	}
	between("QueueDepth", d.QueueDepth, 2, 1024)
	if d.InCapsule > 16384 || d.InCapsule%16 != 0 {
		bad("InCapsule", "%d is not a multiple of 16 up to 16384", d.InCapsule)
	}
	if d.MaxIO < 8192 || d.MaxIO > 8<<20 || bits.OnesCount(uint(d.MaxIO)) != 1 {
		bad("MaxIO", "%d is not a power of two between 8 KiB and 8 MiB", d.MaxIO)
	}
	if d.BufferMemory < 2*d.MaxIO || d.BufferMemory > 1<<40 {
		bad("BufferMemory", "%d is not between 2 × MaxIO (%d) and 1 TiB", d.BufferMemory, 2*d.MaxIO)
	}
	between("Executors", d.Executors, 0, 4096)
	between("ReadDepth", d.ReadDepth, 1, 128)
	between("MaxControllers", d.MaxControllers, 1, maxCNTLID)
	between("MaxQueuesPerController", d.MaxQueuesPerController, 1, 65534)
	between("MaxQueues", d.MaxQueues, 2, 1<<20)
	between("MaxPending", d.MaxPending, 1, 1<<20)
	positive("AcceptTimeout", d.AcceptTimeout)
	positive("ConnectTimeout", d.ConnectTimeout)
	positive("AssociationTimeout", d.AssociationTimeout)
	positive("DiscoveryTimeout", d.DiscoveryTimeout)
	positive("FenceTimeout", d.FenceTimeout)
	positive("TransferTimeout", d.TransferTimeout)
	return errors.Join(errs...)
}

// mdts is Identify Controller MDTS for maxIO bytes.
func mdts(maxIO int) uint8 { return uint8(bits.TrailingZeros(uint(maxIO)) - 12) }
