package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"rdblk/internal/cli"
	"rdblk/internal/config"
	"rdblk/internal/control"
	"rdblk/internal/losses"
	"rdblk/internal/metrics"
	"rdblk/internal/provider"
	"rdblk/internal/timeout"
	"rdblk/internal/worker"
	"rdblk/rdma/iwarp"
	"rdblk/target"

	"golang.org/x/sys/unix"
)

const serveHelp = `Serves each PATH (a file, a block device, mem:SIZE or null:SIZE) as a namespace of one NVMe
subsystem and stays in the foreground. One line is printed when it is ready to be attached.

On the loopback interface any host may connect. On other addresses somebody must be named with
--host, or --allow-any-host given: there is no encryption and no other authentication.

SIGTERM and SIGINT drain: running commands are answered, the devices flushed, and the program ends
within --shutdown-timeout; a second one cuts. SIGHUP takes over what a device has grown by and reads
namespaces, hosts and allow_any_host of the --config file again: what is new there is served, what is
gone is not any more, and hosts that are connected are told. SIGUSR1 writes the state to the log.`

// serveKeys names the setting of each flag that is one.
var serveKeys = map[string]string{
	"listen": "listen", "provider": "provider", "nqn": "nqn", "host": "hosts", "allow-any-host": "allow_any_host", "http": "http",
	"pprof": "pprof", "workers": "workers", "name": "name", "run-dir": "run_dir", "shutdown-timeout": "shutdown_timeout",
	"log-level": "log.level", "log-format": "log.format", "trace": "trace",
}

func newServeCommand(env *cli.Env) *cli.Command {
	d := defaultSettings()
	fs := cli.NewFlagSet("serve")
	fs.StringArray("listen", d.Listen, "`ADDR:PORT` to listen on; may be repeated")
	fs.String("provider", d.Provider, "RDMA `provider`: verbs (RDMA devices), iwarp (software NIC), or auto (the devices that have the addresses)")
	fs.String("nqn", "", "`NQN` of the subsystem (default nqn.2026-11.io.rdblk:HOSTNAME:BASENAME)")
	fs.StringArray("host", nil, "`NQN` of a host that may connect; may be repeated")
	fs.Bool("allow-any-host", false, "let every host connect")
	cfgFile := fs.String("config", env.Getenv(envPrefix+"CONFIG"), "read settings from `FILE`")
	fs.String("http", "", "serve /metrics, /status and /healthz on `ADDR:PORT`")
	fs.Bool("pprof", false, "also serve Go's profiler at /debug/pprof/ there")
	readOnly := fs.Bool("read-only", false, "serve all devices read-only")
	fs.Int("workers", d.Workers, "I/O worker threads (default one per processor)")
	fs.String("name", "", "`name` in 'rdtarget status' (default the NQN's last part)")
	fs.String("run-dir", "", "`directory` of control sockets (default /run/rdblk, $XDG_RUNTIME_DIR/rdblk or /tmp/rdblk-UID)")
	fs.Duration("shutdown-timeout", d.ShutdownTimeout, "longest time to drain")
	fs.String("log-level", d.Log.Level, "log from this `level` on: debug, info, warn, error")
	fs.String("log-format", d.Log.Format, "log as text or json")
	cli.TraceFlag(fs)
	return &cli.Command{
		Name: "serve", Args: "[flags] [PATH | mem:SIZE | null:SIZE]...", Short: "serve files, disks or memory", Long: serveHelp, Flags: fs,
		Run: func(ctx context.Context, args []string) error {
			load := func(now *settings) (*settings, error) {
				s := defaultSettings()
				src := config.Source{Prefix: envPrefix, Environ: env.Environ, File: *cfgFile, Flags: fs, Keys: serveKeys, Set: map[string]any{}}
				if len(args) > 0 {
					src.Set["namespaces"] = args
				}
				if err := config.Load(s, src); err != nil {
					return nil, cli.Usage(err)
				}
				if len(s.Namespaces) == 0 {
					return nil, cli.Usagef("there is nothing to serve: name a file, a block device, mem:SIZE or null:SIZE")
				}
				if now != nil { // a reload: what is served keeps its numbers and its name
					s.keepNumbers(now.Namespaces)
					if s.NQN == "" {
						s.NQN = now.NQN
					}
				}
				s.numberNamespaces()
				for i := range s.Namespaces {
					s.Namespaces[i].ReadOnly = s.Namespaces[i].ReadOnly || *readOnly
				}
				if s.NQN == "" {
					host, _ := os.Hostname()
					s.NQN = s.defaultNQN(host)
				}
				return s, nil
			}
			s, err := load(nil)
			if err != nil {
				return err
			}
			return serve(ctx, env, s, load)
		},
	}
}

// A server is one run of serve.
type server struct {
	env   *cli.Env
	log   *slog.Logger
	s     *settings
	load  func(now *settings) (*settings, error) // reads the settings again
	addrs []netip.AddrPort                       // as configured
	bound []bound                                // as bound, port 0 filled in

	namespaces map[uint32]*served // by NSID; the goroutine of serve and reload alone
	removals   []*served          // taken out and not closed yet; the same

	// Of signals that came while a device was being opened; the same.
	opening     map[string]chan struct{} // by path, of those given up; closed when there is an answer
	stopSignal  os.Signal                // nil: none
	reloadAgain bool

	mu     sync.Mutex
	losses map[string]*losses.Counter // by key, of all that is and was served; guarded by mu
	counts map[uint32]*losses.Counter // by NSID, of what is served; guarded by mu

	trace    io.WriteCloser // nil: none
	target   *target.Target
	provider *provider.Chooser
	entry    *control.Entry
	httpAddr atomic.Pointer[string]
	started  time.Time
	draining atomic.Bool
	busy     bool // the target could not be shut down for its storage
}

func serve(ctx context.Context, env *cli.Env, s *settings, load func(now *settings) (*settings, error)) (err error) {
	log, err := cli.NewLogger(env.Stderr, s.Log.Level, s.Log.Format)
	if err != nil {
		return cli.Usage(err)
	}
	sv := &server{env: env, log: log, s: s, load: load, started: time.Now(),
		namespaces: map[uint32]*served{}, opening: map[string]chan struct{}{}, losses: map[string]*losses.Counter{}, counts: map[uint32]*losses.Counter{}}
	if sv.addrs, err = s.listenAddrs(ctx); err != nil {
		return err
	}
	if err := s.checkTwice(); err != nil {
		return cli.Usage(err)
	}
	if s.Workers == 0 {
		s.Workers = runtime.NumCPU()
	}
	sv.provider, err = provider.New(provider.Config{Mode: s.Provider, Software: iwarp.Config{CRC: s.crcMode(), CongestionControl: s.Congestion, ReadDepth: s.ReadDepth, Logger: log},
		LockedMemory: s.targetConfig().LockedMemory(), Logger: log})
	if err != nil {
		return err
	}
	defer needProcs(s.Workers + 2)()
	if err := worker.CalmMonitor(); err != nil {
		log.Debug("the Go scheduler's monitor stays as it is", "err", err)
	}

	// Whatever happens from here on, what was opened is closed, the newest first.
	var closers []func()
	defer func() {
		for i := len(closers) - 1; i >= 0; i-- {
			closers[i]()
		}
	}()
	closer := func(f func()) { closers = append(closers, f) }

	if sv.trace, err = env.OpenTrace(s.Trace, int64(s.TraceSize)); err != nil {
		return err
	}
	if sv.trace != nil {
		closer(func() { sv.trace.Close() })
	}
	if err := sv.open(closer); err != nil {
		return err
	}
	name, unique := s.Name, s.Name != ""
	if !unique {
		name = control.CleanName(s.NQN[strings.LastIndexByte(s.NQN, ':')+1:])
	}
	dir := s.RunDir
	if dir == "" {
		dir = control.DefaultDir(env.Getenv)
	}
	if sv.entry, err = control.Register(dir, "rdtarget", name, unique); err != nil {
		return err
	}
	closer(func() { sv.entry.Close() })
	if s.HTTP != "" {
		h, err := metrics.Listen(s.HTTP, metrics.Config{
			Registry: metrics.Registry("rdtarget_", sv.collect), Status: func() any { return sv.status() },
			Healthy: sv.healthy, Pprof: s.Pprof, Log: log,
		})
		if err != nil {
			return err
		}
		closer(h.Close)
		addr := h.Addr.String()
		sv.httpAddr.Store(&addr)
		log.Info("http endpoint", "addr", addr, "pprof", s.Pprof)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, r *http.Request) { control.WriteJSON(w, sv.status()) })
	sv.entry.Serve(mux, log)

	// Listening comes last: whoever connects finds everything in place.
	if err := sv.listen(); err != nil {
		return err
	}
	env.Printf("rdtarget: serving %s on %s: %s\n", s.NQN, joinBound(sv.bound), sv.contents())
	if err := env.Notify("READY=1", "STATUS=serving "+s.NQN); err != nil {
		log.Warn("service manager", "err", err)
	}
	sv.wait(ctx)
	return sv.shutdown()
}

// needProcs raises GOMAXPROCS to n: a worker that looks for work politely keeps
// its P, and what is not a worker (admin queue, timers, metrics) needs one as well.
// It returns the undoing, for tests.
func needProcs(n int) (undo func()) {
	old := runtime.GOMAXPROCS(0)
	if old >= n {
		return func() {}
	}
	runtime.GOMAXPROCS(n)
	return func() { runtime.GOMAXPROCS(old) }
}

// open opens the devices and makes the target of them.
func (sv *server) open(closer func(func())) error {
	c := sv.s.targetConfig()
	c.Logger = sv.log
	if sv.trace != nil {
		c.Trace = sv.trace
	}
	c.Hosts, c.AllowAnyHost = sv.s.hostsInForce(sv.addrs)
	c.UnsafeShutdowns = sv.unsafeShutdowns
	t, err := target.New(c)
	if err != nil {
		return err
	}
	sv.target = t
	closer(func() { // the target first: it uses the devices
		if sv.busy || t.Close() != nil {
			return // it still waits for its storage, and so would a device's Close
		}
		for _, c := range sv.losses {
			c.Close()
		}
		for _, n := range sv.namespaces {
			n.dev.Close()
		}
	})
	for _, n := range sv.s.Namespaces {
		if err := sv.add(n); err != nil {
			return err
		}
	}
	return nil
}

// unsafeShutdowns is how often the store of that namespace, or (0) what is or was served here,
// may have lost writes since the machine booted, under earlier servers too.
func (sv *server) unsafeShutdowns(nsid uint32) (n uint64) {
	sv.mu.Lock()
	defer sv.mu.Unlock()
	if nsid != 0 {
		if c := sv.counts[nsid]; c != nil {
			n = c.Count()
		}
		return n
	}
	for _, c := range sv.losses {
		n += c.Count()
	}
	return n
}

// bound is an address that is listened on, with one or two providers.
type bound struct {
	addr netip.AddrPort
	by   string // "iwarp", "verbs", "verbs+iwarp"
}

func (sv *server) listen() error {
	for _, a := range sv.addrs {
		list, err := sv.provider.Endpoints(a)
		if err != nil {
			return err
		}
		port := a.Port()
		for _, e := range list {
			b, err := sv.target.Listen(e.Provider, netip.AddrPortFrom(e.Addr.Addr(), port))
			switch {
			case err != nil && e.Extra:
				sv.log.Warn("not listening with this provider too", "addr", e.Addr, "provider", e.Provider.Name(), "err", err)
				continue
			case err != nil:
				return cli.WithAdvice(err, cli.ListenAdvice(err, netip.AddrPortFrom(e.Addr.Addr(), port), "--listen"))
			}
			port = b.Port()
			sv.bound = addBound(sv.bound, bound{b, e.Provider.Name()})
		}
	}
	return nil
}

// addBound adds b, or its provider to what is bound there already.
func addBound(list []bound, b bound) []bound {
	for i := range list {
		if x := &list[i]; x.addr == b.addr {
			if x.by != b.by { // the device first
				x.by = provider.Verbs + "+" + provider.IWARP
			}
			return list
		}
	}
	return append(list, b)
}

// providers are the names of the providers in use, "verbs+iwarp" if both are.
func providers(list []bound) string {
	by := ""
	for _, b := range list {
		if by == "" {
			by = b.by
		} else if by != b.by {
			by = provider.Verbs + "+" + provider.IWARP
		}
	}
	return by
}

// contents says in a few words what is served.
func (sv *server) contents() string {
	var size int64
	for _, n := range sv.namespaces {
		size += n.dev.Info().Size
	}
	return counted(len(sv.namespaces), "namespace") + ", " + config.FormatSize(size)
}

// wait handles signals until one of them, or ctx, says to stop.
func (sv *server) wait(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case sig := <-sv.env.Signals:
			switch sig {
			case unix.SIGHUP:
				sv.env.Notify(cli.Reloading()...)
				for again := true; again && sv.stopSignal == nil; again = sv.reloadAgain {
					sv.reloadAgain = false
					sv.reload()
				}
				sv.env.Notify("READY=1")
				if sig := sv.stopSignal; sig != nil {
					sv.log.Info("stopping", "signal", sig.String())
					return
				}
			case unix.SIGUSR1:
				sv.dump()
			default:
				sv.log.Info("stopping", "signal", sig.String())
				return
			}
		}
	}
}

// reload takes over grown devices, namespaces that were added and removed, and the list of hosts.
func (sv *server) reload() {
	if err := sv.target.Refresh(); err != nil {
		sv.log.Error("sizes of the devices", "err", err)
	}
	s, err := sv.load(sv.s)
	if err != nil {
		sv.log.Error("configuration is not taken over", "err", err)
		return
	}
	if _, err := s.listenAddrs(context.Background()); err != nil {
		sv.log.Error("configuration is not taken over", "err", err)
		return
	}
	s.Workers = sv.s.Workers
	var later []string
	for _, key := range config.Changed(sv.s, s) {
		switch key {
		case "hosts", "allow_any_host", "namespaces":
		default:
			later = append(later, key)
		}
	}
	if len(later) > 0 {
		sv.log.Warn("these settings changed and need a restart", "settings", strings.Join(later, " "))
	}
	hosts, any := s.hostsInForce(sv.addrs)
	if err := sv.target.SetHosts(hosts, any); err != nil { // first: a host that is off the list sees nothing new
		sv.log.Error("list of hosts is not taken over", "err", err)
		return
	}
	sv.s.Hosts, sv.s.AllowAnyHost = s.Hosts, s.AllowAnyHost
	added, removed := sv.reloadNamespaces(s.Namespaces)
	sv.log.Info("reloaded", "hosts", len(hosts), "any", any, "namespaces", len(sv.namespaces), "added", added, "removed", removed)
}

// dump writes the whole state to the log.
func (sv *server) dump() {
	b, err := json.Marshal(sv.status())
	if err != nil {
		sv.log.Error("dump", "err", err)
		return
	}
	sv.log.Info("state", "status", string(b), "goroutines", runtime.NumGoroutine())
}

func (sv *server) healthy() error {
	if sv.draining.Load() {
		return errors.New("draining")
	}
	return nil
}

// shutdown drains for at most ShutdownTimeout; another signal to stop cuts it short.
func (sv *server) shutdown() error {
	sv.draining.Store(true)
	sv.env.Notify("STOPPING=1")
	of := "shutdown_timeout is " + timeout.Text(sv.s.ShutdownTimeout)
	limited, stopTimer := timeout.With(context.Background(), sv.s.ShutdownTimeout, of)
	defer stopTimer()
	ctx, cancel := context.WithCancelCause(limited)
	defer cancel(nil)
	// A target that has to be cut still waits up to 5 s for its storage, and what else there is to close
	// takes another second; that is part of the time there is.
	drain, cancelDrain := timeout.With(ctx, max(sv.s.ShutdownTimeout-6500*time.Millisecond, sv.s.ShutdownTimeout/3), of)
	defer cancelDrain()
	done := make(chan struct{})
	defer close(done)
	start := time.Now()
	go func() {
		for {
			select {
			case sig := <-sv.env.Signals:
				// A process group and its parent are often told at once, so that one order comes twice.
				if (sig == unix.SIGTERM || sig == unix.SIGINT) && time.Since(start) > cli.SecondSignal {
					sv.log.Warn("second signal: cutting", "signal", sig.String())
					cancel(fmt.Errorf("cut short by a second signal (%v)", sig))
					return
				}
			case <-done:
				return
			}
		}
	}()
	if err := sv.target.Shutdown(drain); err != nil {
		sv.busy = errors.Is(err, target.ErrBusy) // it has waited for the storage long enough
		if sv.busy {
			// Among what it still does may be a flush that fails when nobody listens any more. (A
			// shutdown that was merely cut has lost nothing: what was written is the kernel's, which
			// tells the next server if it cannot store it.)
			for _, n := range sv.namespaces {
				n.lost(err)
			}
			for _, n := range sv.removals {
				n.lost(err)
			}
		}
		return fmt.Errorf("shut down: %w", err)
	}
	drained := time.Since(start)
	// What hosts wrote and did not flush goes to stable storage too: nobody is left to ask for it.
	if err := sv.flush(ctx); err != nil {
		return fmt.Errorf("shut down: %w", err)
	}
	sv.log.Info("stopped", "drained_in", drained.Round(time.Millisecond), "flushed_in", (time.Since(start) - drained).Round(time.Millisecond))
	return nil
}

// flush flushes all devices at once and waits no longer than ctx, also for those that are
// being closed after they were taken out. A flush that is left without an answer may fail
// when nobody listens any more: it counts as failed.
func (sv *server) flush(ctx context.Context) error {
	type result struct {
		n   *served
		err error
	}
	results := make(chan result, len(sv.namespaces)+len(sv.removals))
	waiting := map[*served]string{}
	for _, n := range sv.namespaces {
		if info := n.dev.Info(); !info.ReadOnly {
			waiting[n] = info.Name
			go func() { results <- result{n, n.dev.Flush()} }()
		}
	}
	for _, n := range sv.removals {
		waiting[n] = n.dev.Info().Name
		go func() { <-n.closed; results <- result{n, n.closeErr} }()
	}
	var errs []error
	for len(waiting) > 0 {
		select {
		case r := <-results:
			if r.err != nil {
				errs = append(errs, fmt.Errorf("flush %s: %w", waiting[r.n], r.err))
			}
			delete(waiting, r.n)
		case <-ctx.Done():
			for n, name := range waiting {
				err := fmt.Errorf("flush %s: %w: its storage hangs", name, context.Cause(ctx))
				n.lost(err)
				errs = append(errs, err)
			}
			return errors.Join(errs...)
		}
	}
	return errors.Join(errs...)
}

// joinBound names the provider once if it is the same everywhere.
func joinBound(list []bound) string {
	same := true
	for _, b := range list {
		same = same && b.by == list[0].by
	}
	var s []string
	for i, b := range list {
		if a := b.addr.String(); same && i < len(list)-1 {
			s = append(s, a)
		} else {
			s = append(s, fmt.Sprintf("%s (%s)", a, b.by))
		}
	}
	return joinWords(s)
}

func joinWords(list []string) string { return strings.Join(list, ", ") }

func counted(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
