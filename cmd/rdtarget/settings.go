package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"rdblk/blockdev"
	"rdblk/internal/cli"
	"rdblk/internal/config"
	"rdblk/internal/control"
	"rdblk/internal/provider"
	"rdblk/protocol"
	"rdblk/rdma/iwarp"
	"rdblk/target"

	"golang.org/x/sys/unix"
)

// envPrefix is what the program's environment variables begin with.
const envPrefix = "RDTARGET_"

// settings is everything that can be set; docs/operating.md and
// configs/rdtarget.yaml describe each, and tests hold them to this struct.
type settings struct {
	Listen       []string    `mapstructure:"listen"`
	Provider     string      `mapstructure:"provider"`
	CRC          string      `mapstructure:"crc"`
	Congestion   string      `mapstructure:"congestion_control"`
	NQN          string      `mapstructure:"nqn"`
	Serial       string      `mapstructure:"serial"`
	Hosts        []string    `mapstructure:"hosts"`
	AllowAnyHost bool        `mapstructure:"allow_any_host"`
	Namespaces   []namespace `mapstructure:"namespaces"`

	taken map[uint32]bool // identifiers not to be given out by numberNamespaces

	Name            string        `mapstructure:"name"`
	RunDir          string        `mapstructure:"run_dir"`
	HTTP            string        `mapstructure:"http"`
	Pprof           bool          `mapstructure:"pprof"`
	ShutdownTimeout time.Duration `mapstructure:"shutdown_timeout"`
	Log             struct {
		Level  string `mapstructure:"level"`
		Format string `mapstructure:"format"`
	} `mapstructure:"log"`

	Trace     string      `mapstructure:"trace"`
	TraceSize config.Size `mapstructure:"trace_size"`

	Workers      int           `mapstructure:"workers"`
	PinCPUs      []int         `mapstructure:"pin_cpus"`
	Polling      string        `mapstructure:"polling"`
	MaxPoll      time.Duration `mapstructure:"max_poll"`
	BufferMemory config.Size   `mapstructure:"buffer_memory"`
	QueueDepth   int           `mapstructure:"queue_depth"`
	InCapsule    config.Size   `mapstructure:"in_capsule"`
	MaxIO        config.Size   `mapstructure:"max_io"`
	ReadDepth    int           `mapstructure:"read_depth"`
	SendInv      bool          `mapstructure:"send_invalidate"`
	Executors    int           `mapstructure:"executors"`

	MaxControllers         int `mapstructure:"max_controllers"`
	MaxQueuesPerController int `mapstructure:"max_queues_per_controller"`
	MaxQueues              int `mapstructure:"max_queues"`
	MaxPending             int `mapstructure:"max_pending"`

	AcceptTimeout      time.Duration `mapstructure:"accept_timeout"`
	ConnectTimeout     time.Duration `mapstructure:"connect_timeout"`
	AssociationTimeout time.Duration `mapstructure:"association_timeout"`
	DiscoveryTimeout   time.Duration `mapstructure:"discovery_timeout"`
	FenceTimeout       time.Duration `mapstructure:"fence_timeout"`
}

// A namespace is one device to serve. In a file it is a path, or a map with these keys.
type namespace struct {
	Path      string      `mapstructure:"path"` // file, block device, mem:SIZE, null:SIZE
	NSID      uint32      `mapstructure:"nsid"` // 0: the next free one, in order
	ReadOnly  bool        `mapstructure:"read_only"`
	Direct    bool        `mapstructure:"direct"`
	BlockSize config.Size `mapstructure:"block_size"`
}

// UnmarshalText makes a namespace of a path alone.
func (n *namespace) UnmarshalText(b []byte) error {
	n.Path = string(b)
	return nil
}

// String is the namespace as a message has it.
func (n namespace) String() string {
	s := n.Path
	if n.ReadOnly {
		s += ", read-only"
	}
	if n.Direct {
		s += ", direct"
	}
	if n.BlockSize != 0 {
		s += ", blocks of " + n.BlockSize.String()
	}
	return s
}

// shareable says that the path makes a new device each time.
func (n namespace) shareable() bool {
	return strings.HasPrefix(n.Path, "mem:") || strings.HasPrefix(n.Path, "null:")
}

func defaultSettings() *settings {
	s := &settings{
		Listen:          []string{fmt.Sprintf("127.0.0.1:%d", cli.DefaultPort)},
		Provider:        provider.Auto,
		CRC:             "auto",
		Congestion:      iwarp.CongestionAuto,
		ShutdownTimeout: 10 * time.Second,

		TraceSize: cli.DefaultTraceSize,

		Polling:      "adaptive",
		MaxPoll:      50 * time.Microsecond,
		BufferMemory: 64 << 20,
		QueueDepth:   128,
		InCapsule:    4 << 10,
		MaxIO:        1 << 20,
		ReadDepth:    128,
		SendInv:      true,

		MaxControllers:         256,
		MaxQueuesPerController: 128,
		MaxQueues:              4096,
		MaxPending:             1024,

		AcceptTimeout:      10 * time.Second,
		ConnectTimeout:     30 * time.Second,
		AssociationTimeout: 2 * time.Minute,
		DiscoveryTimeout:   2 * time.Minute,
		FenceTimeout:       5 * time.Second,
	}
	s.Log.Level, s.Log.Format = "info", "text"
	return s
}

// Validate returns all problems that show without touching the machine, each
// with the setting's name in front.
func (s *settings) Validate() error {
	c := config.NewCheck(defaultSettings())
	bad := c.Bad
	if len(s.Listen) == 0 {
		bad("listen", "there is no address (for example 127.0.0.1:%d)", cli.DefaultPort)
	}
	for _, l := range s.Listen {
		if _, _, err := cli.SplitAddr(l, cli.DefaultPort); err != nil {
			bad("listen", "%v", err)
		}
	}
	if err := provider.CheckMode(s.Provider); err != nil {
		bad("provider", "%v", err)
	}
	if s.NQN != "" {
		if err := protocol.ValidateNQN(s.NQN); err != nil {
			bad("nqn", "%q cannot be a subsystem's name: write nqn.YYYY-MM.reversed.domain:name, for example nqn.2026-11.io.rdblk:disk1", s.NQN)
		} else if s.NQN == protocol.DiscoveryNQN {
			bad("nqn", "%s is the discovery service's (for example nqn.2026-11.io.rdblk:disk1)", s.NQN)
		}
	}
	if len(s.Serial) > 20 || strings.ContainsFunc(s.Serial, func(r rune) bool { return r < 0x20 || r > 0x7e }) {
		bad("serial", "%q is not up to 20 printable ASCII characters (for example 00000001)", s.Serial)
	}
	if len(s.Hosts) > target.MaxHosts {
		bad("hosts", "%d are more than %d", len(s.Hosts), target.MaxHosts)
	}
	badHost := false
	for i, h := range s.Hosts {
		if err := protocol.CheckNQN(h); err != nil || !strings.HasPrefix(h, "nqn.") || strings.Contains(h, ",") {
			bad(fmt.Sprintf("hosts[%d]", i), "%q is no host NQN; write one nqn.… an entry ('rdinit version' prints a machine's)", h)
			badHost = true
		} else if protocol.UUIDFormBroken(h) {
			bad(fmt.Sprintf("hosts[%d]", i), "%q: what follows uuid: is no UUID (copy all of what 'rdinit version' prints on that machine)", h)
			badHost = true
		}
	}
	ids := map[uint32]bool{}
	for i, n := range s.Namespaces {
		key := func(name string) string { return fmt.Sprintf("namespaces[%d].%s", i, name) }
		if n.Path == "" {
			bad(key("path"), "it is empty: name a file, a block device, mem:SIZE or null:SIZE")
		}
		if n.NSID > target.MaxNamespaces {
			bad(key("nsid"), "%d is outside 1 to %d (0: the next free one)", n.NSID, target.MaxNamespaces)
		}
		if n.NSID != 0 && ids[n.NSID] {
			bad(key("nsid"), "%d is used twice", n.NSID)
		}
		ids[n.NSID] = true
		if b := n.BlockSize; b != 0 && (b < blockdev.MinBlockSize || b > blockdev.MaxBlockSize || b&(b-1) != 0) {
			bad(key("block_size"), "%v is not a power of two between 512 and 64K (for example 4K; 0: what the store has)", b)
		}
		if kind, size, ok := strings.Cut(n.Path, ":"); ok && (kind == "mem" || kind == "null") {
			if n, err := blockdev.ParseSize(size); err != nil {
				bad(key("path"), "%s: %v", kind, err)
			} else if n < blockdev.MinBlockSize {
				bad(key("path"), "%s:%s: it needs room for a block at least (for example %s:64M)", kind, size, kind)
			}
		}
	}
	if len(s.Namespaces) > target.MaxNamespaces {
		bad("namespaces", "%d are more than the %d that a subsystem can have: serve the rest with another rdtarget", len(s.Namespaces), target.MaxNamespaces)
	}
	c.OneOf("crc", s.CRC, "auto", "on", "off")
	if err := iwarp.CheckCongestion(s.Congestion); err != nil {
		bad("congestion_control", "%v", err)
	}
	if s.Name != "" {
		if err := control.CheckName(s.Name); err != nil {
			bad("name", "%v", err)
		}
	}
	if s.RunDir != "" && !filepath.IsAbs(s.RunDir) {
		bad("run_dir", "%q is not an absolute path (for example /run/rdblk)", s.RunDir)
	}
	if s.HTTP != "" {
		if err := cli.ListenAddr(s.HTTP, 9420); err != nil {
			bad("http", "%v", err)
		}
	}
	if s.Pprof && s.HTTP == "" {
		bad("pprof", "there is no HTTP endpoint that it could be on: set http too (for example 127.0.0.1:9420)")
	}
	if err := cli.CheckLog(s.Log.Level, s.Log.Format); err != nil {
		word, rest, _ := strings.Cut(err.Error(), ": ")
		bad("log."+word, "%s", rest)
	}
	config.Between(c, "trace_size", s.TraceSize, cli.MinTraceSize, cli.MaxTraceSize, "")
	c.Polling(s.Polling, s.MaxPoll)
	for _, cpu := range s.PinCPUs {
		if cpu < 0 || cpu > 1023 {
			bad("pin_cpus", "%d is outside 0 to 1023 (for example 0,1)", cpu)
		}
	}
	config.Between(c, "workers", s.Workers, 0, 1024, "one per processor")
	config.Between(c, "queue_depth", s.QueueDepth, 2, 1024, "")
	config.Between(c, "in_capsule", s.InCapsule, 0, 16<<10, "no data comes with a command")
	if s.InCapsule%16 != 0 && !c.Has("in_capsule") {
		bad("in_capsule", "%v is no multiple of 16 (for example 4K)", s.InCapsule)
	}
	config.Between(c, "max_io", s.MaxIO, 8<<10, 8<<20, "")
	if s.MaxIO&(s.MaxIO-1) != 0 && !c.Has("max_io") {
		bad("max_io", "%v is no power of two (for example 1M)", s.MaxIO)
	}
	if least := 2 * s.MaxIO; !c.Has("max_io") && (s.BufferMemory < least || s.BufferMemory > 1<<40) {
		bad("buffer_memory", "%v is outside %v to 1T: it must have room for two transfers of max_io, which is %v (for example 64M)", s.BufferMemory, least, s.MaxIO)
	}
	config.Between(c, "read_depth", s.ReadDepth, 1, 128, "")
	config.Between(c, "executors", s.Executors, 0, 4096, fmt.Sprintf("%d", blockdev.DefaultExecutors))
	config.Between(c, "max_controllers", s.MaxControllers, 1, protocol.MaxCNTLID, "")
	config.Between(c, "max_queues_per_controller", s.MaxQueuesPerController, 1, 65534, "")
	config.Between(c, "max_queues", s.MaxQueues, 2, 1<<20, "")
	config.Between(c, "max_pending", s.MaxPending, 1, 1<<20, "")
	config.Between(c, "accept_timeout", s.AcceptTimeout, 100*time.Millisecond, 10*time.Minute, "")
	config.Between(c, "connect_timeout", s.ConnectTimeout, 100*time.Millisecond, 10*time.Minute, "")
	config.Between(c, "association_timeout", s.AssociationTimeout, time.Second, 24*time.Hour, "")
	config.Between(c, "discovery_timeout", s.DiscoveryTimeout, time.Second, 24*time.Hour, "")
	config.Between(c, "fence_timeout", s.FenceTimeout, 100*time.Millisecond, 10*time.Minute, "")
	config.Between(c, "shutdown_timeout", s.ShutdownTimeout, 100*time.Millisecond, time.Hour, "")
	// The library's own rules, in case it has one more.
	t := s.targetConfig()
	if t.NQN == "" {
		t.NQN = "nqn.2026-11.io.rdblk:checked-later" // made of the first namespace's name when it serves
	}
	if err := t.Validate(); err != nil {
		for line := range strings.SplitSeq(err.Error(), "\n") {
			field, rest, _ := strings.Cut(line, ": ")
			key := keyOfField[field]
			if key == "" {
				key = field
			}
			if !c.Has(key) && !(key == "hosts" && badHost) && !(key == "buffer_memory" && c.Has("max_io")) {
				bad(key, "%s", rest)
			}
		}
	}
	return c.Err()
}

// keyOfField translates the field names in target.Config.Validate.
var keyOfField = map[string]string{
	"NQN": "nqn", "Serial": "serial", "Hosts": "hosts", "Workers": "workers", "PinCPUs": "pin_cpus",
	"QueueDepth": "queue_depth", "InCapsule": "in_capsule", "MaxIO": "max_io", "BufferMemory": "buffer_memory",
	"Executors": "executors", "ReadDepth": "read_depth", "MaxControllers": "max_controllers",
	"MaxQueuesPerController": "max_queues_per_controller", "MaxQueues": "max_queues", "MaxPending": "max_pending",
	"AcceptTimeout": "accept_timeout", "ConnectTimeout": "connect_timeout", "AssociationTimeout": "association_timeout",
	"DiscoveryTimeout": "discovery_timeout", "FenceTimeout": "fence_timeout",
}

func (s *settings) targetConfig() target.Config {
	c := target.Config{
		NQN: s.NQN, Serial: s.Serial, Hosts: s.Hosts, AllowAnyHost: s.AllowAnyHost,
		Workers: s.Workers, PinCPUs: s.PinCPUs, MaxPoll: s.MaxPoll, BusyPoll: s.Polling == "busy",
		QueueDepth: s.QueueDepth, InCapsule: int(s.InCapsule), MaxIO: int(s.MaxIO), BufferMemory: int(s.BufferMemory),
		Executors: s.Executors, ReadDepth: s.ReadDepth, NoSendInvalidate: !s.SendInv,
		MaxControllers: s.MaxControllers, MaxQueuesPerController: s.MaxQueuesPerController,
		MaxQueues: s.MaxQueues, MaxPending: s.MaxPending,
		AcceptTimeout: s.AcceptTimeout, ConnectTimeout: s.ConnectTimeout, AssociationTimeout: s.AssociationTimeout,
		DiscoveryTimeout: s.DiscoveryTimeout, FenceTimeout: s.FenceTimeout,
	}
	if s.Polling == "never" {
		c.MaxPoll = -1
	}
	if s.InCapsule == 0 {
		c.InCapsule = -1 // the library's way to say none
	}
	return c
}

// keepNumbers gives every namespace without an identifier the one that its device has now,
// and reserves those of devices that are to go: an identifier is not given to another
// device before hosts have seen the first one go.
func (s *settings) keepNumbers(now []namespace) {
	s.taken = map[uint32]bool{}
	for _, n := range now {
		s.taken[n.NSID] = true
	}
	used := map[uint32]bool{}
	for _, n := range s.Namespaces {
		used[n.NSID] = true
	}
	for i := range s.Namespaces {
		n := &s.Namespaces[i]
		if n.NSID != 0 {
			continue
		}
		for _, o := range now {
			if o.Path == n.Path && !used[o.NSID] {
				n.NSID = o.NSID
				used[o.NSID] = true
				break
			}
		}
	}
}

// numberNamespaces gives every namespace without an identifier the next free one.
func (s *settings) numberNamespaces() {
	used := map[uint32]bool{}
	for _, n := range s.Namespaces {
		used[n.NSID] = true
	}
	next := uint32(1)
	for i := range s.Namespaces {
		if s.Namespaces[i].NSID != 0 {
			continue
		}
		for used[next] || s.taken[next] {
			next++
		}
		s.Namespaces[i].NSID = next
		used[next] = true
	}
}

// defaultNQN is nqn.2026-11.io.rdblk:HOSTNAME:BASENAME of the first namespace.
func (s *settings) defaultNQN(hostname string) string {
	base := "disk"
	if len(s.Namespaces) > 0 {
		base = s.Namespaces[0].Path
		if kind, _, ok := strings.Cut(base, ":"); ok && (kind == "mem" || kind == "null") {
			base = kind
		}
		base = filepath.Base(base)
	}
	return "nqn.2026-11.io.rdblk:" + control.CleanName(hostname) + ":" + control.CleanName(base)
}

// listenAddrs resolves the addresses. Anywhere but on loopback somebody must have
// said who may connect.
func (s *settings) listenAddrs(ctx context.Context) ([]netip.AddrPort, error) {
	var list []netip.AddrPort
	var errs []error
	for _, l := range s.Listen {
		a, err := cli.ResolveAddr(ctx, l, cli.DefaultPort)
		if err != nil {
			errs = append(errs, fmt.Errorf("listen: %w", err))
			continue
		}
		list = append(list, a)
		if !a.Addr().IsLoopback() && len(s.Hosts) == 0 && !s.AllowAnyHost {
			errs = append(errs, cli.Usagef("listen: %s can be reached from other machines, and nothing says who may connect: "+
				"name the hosts with --host NQN (the attaching machine prints its own with 'rdinit version'), or let in everybody with --allow-any-host", l))
		}
	}
	return list, errors.Join(errs...)
}

// hostsInForce is the allow list as the target gets it: on loopback alone, and
// without a list, everybody who can get there may connect.
func (s *settings) hostsInForce(addrs []netip.AddrPort) (hosts []string, any bool) {
	loopback := true
	for _, a := range addrs {
		loopback = loopback && a.Addr().IsLoopback()
	}
	return s.Hosts, s.AllowAnyHost || loopback && len(s.Hosts) == 0
}

// checkPaths tells which of the namespaces cannot be opened, without locking them.
func (s *settings) checkPaths() error {
	var errs []error
	for i, n := range s.Namespaces {
		if n.shareable() || n.Path == "" { // checked by Validate
			continue
		}
		if err := checkPath(n); err != nil {
			errs = append(errs, fmt.Errorf("namespaces[%d].path: %s: %w", i, n.Path, err))
		}
	}
	return errors.Join(errs...)
}

func checkPath(n namespace) error {
	fi, err := os.Stat(n.Path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return errors.New("there is no such file or device (is the path right? truncate -s 10G makes a file)")
	case err != nil:
		return cli.Plain(err)
	case !fi.Mode().IsRegular() && (fi.Mode()&os.ModeDevice == 0 || fi.Mode()&os.ModeCharDevice != 0):
		return errors.New("it is neither a file nor a block device: name one")
	}
	least := int64(max(n.BlockSize, blockdev.MinBlockSize))
	if fi.Mode().IsRegular() && fi.Size() < least {
		return fmt.Errorf("its %d bytes are less than one block of %d (truncate -s 10G makes it larger)", fi.Size(), least)
	}
	mode, what := uint32(unix.R_OK|unix.W_OK), "write to it (change its permissions, or serve it read_only)"
	if n.ReadOnly {
		mode, what = unix.R_OK, "read it (change its permissions)"
	}
	if err := unix.Faccessat(unix.AT_FDCWD, n.Path, mode, unix.AT_EACCESS); err != nil {
		return fmt.Errorf("%w: this user may not %s", err, what)
	}
	return nil
}

// checkTwice finds one device under two names or numbers. Only readers can share one.
func (s *settings) checkTwice() error {
	var errs []error
	infos := make([]os.FileInfo, len(s.Namespaces))
	for i, n := range s.Namespaces {
		if n.shareable() {
			continue
		}
		infos[i], _ = os.Stat(n.Path)
		for k := range i {
			o := s.Namespaces[k]
			if infos[i] != nil && infos[k] != nil && os.SameFile(infos[i], infos[k]) && !(n.ReadOnly && o.ReadOnly) {
				errs = append(errs, fmt.Errorf("namespaces[%d].path: %s is named twice, as %s before: name it once, or serve both read-only", i, n.Path, o.Path))
				break
			}
		}
	}
	return errors.Join(errs...)
}

// checkLocal finds addresses to listen at that this machine does not have.
func (s *settings) checkLocal(ctx context.Context) error {
	var errs []error
	for _, l := range s.Listen {
		a, err := cli.ResolveAddr(ctx, l, cli.DefaultPort)
		if err != nil {
			continue // listenAddrs says so
		}
		if cli.LacksAddr(a.Addr()) {
			errs = append(errs, fmt.Errorf("listen: %s: %w", l, cli.WithAdvice(unix.EADDRNOTAVAIL, cli.ListenAdvice(unix.EADDRNOTAVAIL, a, "listen"))))
		}
	}
	return errors.Join(errs...)
}

// crcMode is what the software NIC asks of its peers.
func (s *settings) crcMode() iwarp.CRCMode {
	switch s.CRC {
	case "on":
		return iwarp.CRCOn
	case "off":
		return iwarp.CRCOff
	}
	return iwarp.CRCAuto
}
