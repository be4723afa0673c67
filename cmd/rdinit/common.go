package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"runtime"
	"strings"

	"rdblk/initiator"
	"rdblk/internal/cli"
	"rdblk/internal/config"
	"rdblk/internal/provider"
	"rdblk/rdma/iwarp"

	"github.com/spf13/pflag"
)

func parseLocal(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	if err != nil {
		return a, fmt.Errorf("%q is no IP address", s)
	}
	return a, nil
}

// source makes the config.Source of a command whose first argument, if any, is the target's address.
func source(env *cli.Env, fs *pflag.FlagSet, keys map[string]string, file string, args []string) config.Source {
	src := config.Source{Prefix: envPrefix, Environ: env.Environ, File: file, Flags: fs, Keys: keys, Set: map[string]any{}}
	if len(args) > 0 {
		src.Set["address"] = args[0]
	}
	return src
}

// briefSettings are the defaults of commands that are over soon: they log only what is wrong.
func briefSettings() *settings {
	s := defaultSettings()
	s.Log.Level = "warn"
	return s
}

// commonFlags are those of every command that connects; d has their defaults, keys names their settings.
func commonFlags(fs *pflag.FlagSet, env *cli.Env, d *settings) (keys map[string]string, cfgFile *string) {
	fs.String("provider", d.Provider, "RDMA `provider`: verbs (RDMA devices), iwarp (software NIC), or auto (a device if one has the address)")
	fs.String("host-nqn", "", "`NQN` of this machine for the target's list of hosts (default as printed by 'rdinit version')")
	fs.Duration("connect-timeout", d.ConnectTimeout, "longest time for one attempt to connect")
	cfgFile = fs.String("config", env.Getenv(envPrefix+"CONFIG"), "read settings from `FILE`")
	fs.String("log-level", d.Log.Level, "log from this `level` on: debug, info, warn, error")
	fs.String("log-format", d.Log.Format, "log as text or json")
	cli.TraceFlag(fs)
	return map[string]string{"provider": "provider", "host-nqn": "host_nqn", "connect-timeout": "connect_timeout",
		"log-level": "log.level", "log-format": "log.format", "trace": "trace"}, cfgFile
}

// connectFlags are those of the commands that attach.
func connectFlags(fs *pflag.FlagSet, keys map[string]string) {
	d := defaultSettings()
	fs.String("nqn", "", "`NQN` of the subsystem (default the only one that the target's discovery names)")
	fs.Uint32("nsid", 0, "namespace `N` of the subsystem (default the only one)")
	fs.Int("queues", d.Queues, "I/O queues, each a connection and a thread (default one per processor)")
	fs.Int("depth", d.Depth, "entries per queue")
	for _, k := range []string{"nqn", "nsid", "queues", "depth"} {
		keys[k] = k
	}
}

var errNoAddress = errors.New("name the target: ADDR[:PORT], for example 10.0.0.5:4420")

// resolved makes the library's configuration of the settings. needs says how much memory an RDMA device will pin.
func (s *settings) resolved(ctx context.Context, log *slog.Logger, needs func(initiator.Config) uint64) (initiator.Config, *provider.Chooser, error) {
	c := s.initiatorConfig()
	if c.Queues == 0 {
		c.Queues = runtime.NumCPU()
	}
	if s.Address == "" {
		return c, nil, cli.Usage(errNoAddress)
	}
	addr, err := cli.ResolveAddr(ctx, s.Address, cli.DefaultPort)
	if err != nil {
		return c, nil, err
	}
	nic, err := provider.New(provider.Config{Mode: s.Provider, Software: iwarp.Config{CRC: s.crcMode(), CongestionControl: s.Congestion, Logger: log}, LockedMemory: needs(c), Logger: log})
	if err != nil {
		return c, nil, err
	}
	c.Addr, c.Provider, c.Logger = addr, nic, log
	if s.Local != "" {
		c.LocalAddr, _ = parseLocal(s.Local) // was checked
	}
	if c.HostNQN == "" {
		c.HostNQN = thisHostNQN()
	}
	return c, nic, nil
}

// openTrace gives the library the destination of the trace, if there is one; close it
// when the session is closed.
func (s *settings) openTrace(env *cli.Env, c *initiator.Config) (close func(), err error) {
	w, err := env.OpenTrace(s.Trace, int64(s.TraceSize))
	if err != nil || w == nil {
		return func() {}, err
	}
	c.Trace = w
	return func() { w.Close() }, nil
}

// needProcs raises GOMAXPROCS to n: a worker that looks for work politely keeps
// its P, and what is not a worker (keep-alive, timers, metrics) needs one as well.
// It returns the undoing, for tests.
func needProcs(n int) (undo func()) {
	old := runtime.GOMAXPROCS(0)
	if old >= n {
		return func() {}
	}
	runtime.GOMAXPROCS(n)
	return func() { runtime.GOMAXPROCS(old) }
}

func counted(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// device chooses the namespace: the one that is named, or the only one.
func device(ss *initiator.Session, nsid uint32) (*initiator.Device, error) {
	var there []string
	for _, n := range ss.Namespaces() {
		s := fmt.Sprintf("%d (%s)", n.NSID, config.FormatSize(n.Size))
		if n.Problem != "" {
			s = fmt.Sprintf("%d (cannot be used: %s)", n.NSID, n.Problem)
		}
		there = append(there, s)
		if len(there) == 16 {
			there = append(there, "more")
			break
		}
	}
	if nsid == 0 && len(there) > 1 {
		return nil, fmt.Errorf("the subsystem has the namespaces %s: choose one with --nsid", strings.Join(there, ", "))
	}
	d, err := ss.Device(nsid)
	if errors.Is(err, initiator.ErrNoNamespace) && len(there) > 0 {
		return nil, fmt.Errorf("%w; it has %s: choose with --nsid", err, strings.Join(there, ", "))
	}
	return d, err
}
