package initiator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"time"

	"rdblk/internal/timeout"
	"rdblk/internal/trace"
	"rdblk/protocol"
	"rdblk/rdma"
)

// Bounds of discovery.
const (
	discoveryChunk = 4096 // bytes of the log per command, as libnvme reads it
	discoveryTries = 10   // readings until the log holds still
	discoveryMax   = 4096 // entries that are taken
)

// DiscoverConfig tells Discover whom to ask. Provider and Addr are needed.
type DiscoverConfig struct {
	Provider  rdma.Provider
	Addr      netip.AddrPort // a zero port means 4420
	LocalAddr netip.Addr
	HostNQN   string // empty: the UUID form made of HostID
	HostID    protocol.UUID
	Timeout   time.Duration // for all of it; default DefaultConnectTimeout
	NoWindows bool          // as in Config
	Logger    *slog.Logger
	Trace     io.Writer // as in Config

	tracer *trace.Tracer // of the session that asks, instead
}

// Validate reports everything that is wrong with c, joined.
func (c DiscoverConfig) Validate() error {
	var bad problems
	bad.endpoint(c.Provider, c.Addr)
	if c.HostNQN != "" {
		bad.nqn("HostNQN", c.HostNQN)
	}
	bad.duration("Timeout", c.Timeout, 10*time.Millisecond, time.Hour)
	return errors.Join(bad...)
}

// Discover asks the discovery subsystem at cfg.Addr what there is for this host (NVMe
// over Fabrics, "Discovery Service"). The entries' texts are the target's: quote them
// before printing.
func Discover(ctx context.Context, cfg DiscoverConfig) (_ []protocol.DiscoveryLogEntry, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	full := Config{Provider: cfg.Provider, Addr: cfg.Addr, LocalAddr: cfg.LocalAddr, HostNQN: cfg.HostNQN, HostID: cfg.HostID, Logger: cfg.Logger}.withDefaults()
	defer func() {
		if err != nil {
			err = &AttemptError{Op: "ask the discovery service at", Addr: full.Addr, SubNQN: protocol.DiscoveryNQN, Err: err}
		}
	}()
	setDefault(&cfg.Timeout, DefaultConnectTimeout)
	ctx, stop := timeout.WithKind(ctx, cfg.Timeout, "connect_timeout", ErrTimeout)
	defer stop()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	tracer := cfg.tracer
	if tracer == nil {
		tracer = trace.New(cfg.Trace)
		defer tracer.Close()
	}
	admin, err := newAdminSide()
	if err != nil {
		return nil, err
	}
	defer admin.close()
	c, err := connectController(ctx, controllerConfig{
		lane: laneConfig{
			provider: full.Provider, local: full.LocalAddr, remote: full.Addr,
			depth: protocol.AdminQueueDepth, noWindows: cfg.NoWindows,
			w: admin.w, regions: []region{admin.region}, numRegion: 1, log: full.Logger, trace: tracer, fail: cancel,
		},
		mem:  admin.mem,
		data: protocol.ConnectData{HOSTID: full.HostID, CNTLID: protocol.CNTLIDDynamic, SUBNQN: protocol.DiscoveryNQN, HOSTNQN: full.HostNQN},
	})
	orderly := false
	if c != nil {
		defer func() { c.lane.end(orderly) }()
	}
	if err == nil {
		var list []protocol.DiscoveryLogEntry
		if list, err = readDiscovery(ctx, c.log); err == nil {
			if err := c.shutdown(ctx); err == nil {
				orderly = true
			} else {
				full.Logger.Debug("discovery controller not shut down in order", "error", err)
			}
			return list, nil
		}
	}
	if cause := context.Cause(ctx); errors.Is(err, errLaneDown) && cause != nil {
		err = cause
	}
	return nil, err
}

// readLog is controller.log.
type readLog func(ctx context.Context, lid protocol.LogID, nsid uint32, off uint64, n int, retain bool) ([]byte, error)

// readDiscovery reads the whole log as one generation of it: the head, the entries in
// chunks, and the head again, until both heads are equal.
func readDiscovery(ctx context.Context, log readLog) ([]protocol.DiscoveryLogEntry, error) {
	head := func() (h protocol.DiscoveryLogHeader, err error) {
		b, err := log(ctx, protocol.LogDiscovery, 0, 0, protocol.DiscoveryLogPeek, true)
		if err == nil {
			err = h.UnmarshalBinary(b)
		}
		return h, err
	}
	for range discoveryTries {
		h, err := head()
		if err != nil {
			return nil, err
		}
		if h.NUMREC > discoveryMax {
			return nil, fmt.Errorf("%w: discovery log of %d entries, the limit is %d", ErrUnsupported, h.NUMREC, discoveryMax)
		}
		list := make([]protocol.DiscoveryLogEntry, 0, h.NUMREC)
		off, left := uint64(protocol.DiscoveryLogHeaderSize), int(h.NUMREC)*protocol.DiscoveryLogEntrySize
		for left > 0 {
			n := min(left, discoveryChunk)
			b, err := log(ctx, protocol.LogDiscovery, 0, off, n, left > n)
			if err != nil {
				return nil, err
			}
			for ; len(b) >= protocol.DiscoveryLogEntrySize; b = b[protocol.DiscoveryLogEntrySize:] {
				var e protocol.DiscoveryLogEntry
				if err := e.UnmarshalBinary(b); err != nil {
					return nil, err
				}
				list = append(list, e)
			}
			off += uint64(n)
			left -= n
		}
		again, err := head()
		if err != nil {
			return nil, err
		}
		if again.GENCTR == h.GENCTR {
			if again.NUMREC != h.NUMREC {
				return nil, fmt.Errorf("%w: discovery log had %d entries and has %d in the same generation", ErrProtocol, h.NUMREC, again.NUMREC)
			}
			return list, nil
		}
	}
	return nil, fmt.Errorf("%w: %d readings", ErrGenerationChanged, discoveryTries)
}

// discover finds the subsystem to connect to when the configuration names none.
func (s *Session) discover(ctx context.Context) error {
	list, err := Discover(ctx, DiscoverConfig{
		Provider: s.cfg.Provider, Addr: s.cfg.Addr, LocalAddr: s.cfg.LocalAddr,
		HostNQN: s.cfg.HostNQN, HostID: s.cfg.HostID, Timeout: s.cfg.ConnectTimeout, NoWindows: s.cfg.NoWindows, Logger: s.cfg.Logger, tracer: s.trace,
	})
	if err != nil {
		return err
	}
	if s.subnqn, s.addr, err = choose(list, s.cfg.Addr); err != nil {
		return &AttemptError{Op: "choose a subsystem at", Addr: s.cfg.Addr, Err: err}
	}
	return nil
}

// choose takes the only NVM subsystem of a discovery log, at the address that was asked
// if it is there too, else at the first one that can be used.
func choose(list []protocol.DiscoveryLogEntry, asked netip.AddrPort) (nqn string, addr netip.AddrPort, err error) {
	names := map[string]netip.AddrPort{}
	for i := range list {
		e := &list[i]
		if e.SUBTYPE != protocol.SubsystemNVM || e.TRTYPE != protocol.TransportRDMA || protocol.CheckNQN(e.SUBNQN) != nil {
			continue
		}
		at, err := netip.ParseAddrPort(joinHostPort(e.TRADDR, e.TRSVCID))
		if err != nil || at.Addr().IsUnspecified() {
			continue // an address that cannot be used is no path
		}
		if old, ok := names[e.SUBNQN]; !ok || at == asked && old != asked {
			names[e.SUBNQN] = at
		}
	}
	switch len(names) {
	case 0:
		return "", asked, fmt.Errorf("%w: discovery lists no NVM subsystem for this host (is its NQN, as 'rdinit version' prints it, among the target's hosts?)", ErrNoSubsystem)
	case 1:
		for n, a := range names {
			return n, a, nil
		}
	}
	var l []string
	for n := range names {
		l = append(l, fmt.Sprintf("%q", n))
	}
	slices.Sort(l)
	const show = 16
	more := ""
	if len(l) > show {
		more = fmt.Sprintf(" and %d more", len(l)-show)
		l = l[:show]
	}
	return "", asked, fmt.Errorf("%w: discovery lists %d, name one with --nqn: %s%s", ErrNoSubsystem, len(names), strings.Join(l, ", "), more)
}

func joinHostPort(host, port string) string {
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	return host + ":" + port
}
