package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"rdblk/blockdev"
	"rdblk/initiator"
	"rdblk/internal/cli"
	"rdblk/internal/config"
	"rdblk/internal/control"
	"rdblk/internal/metrics"
	"rdblk/internal/provider"
	"rdblk/internal/timeout"
	"rdblk/internal/version"
	"rdblk/internal/worker"
	"rdblk/nbd"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
)

const attachHelp = `Attaches a namespace of the target at ADDR, in the foreground: as a block device of the kernel
(--device, needs root and the module nbd), or for NBD clients on the Unix socket PATH (--socket; mode
0600, export name empty). One line is printed when it is ready.

If rdinit dies without detaching, the kernel keeps /dev/nbdN and all requests for loss_timeout and a
minute. The same command with --device /dev/nbdN takes it over, and a mounted file system goes on.

When the connection to the target is lost, requests wait while rdinit connects again, and go on;
after loss_timeout without the target they fail.

SIGTERM and SIGINT drain: running requests are answered, the device is flushed, and the program ends
within detach_timeout; a second one cuts. If the flush fails it says so and exits with 1. A /dev/nbdN that
is mounted gets a part of this time to be unmounted before it is disconnected.
'rdinit detach' does the same but refuses while it cannot be done safely. SIGUSR1 writes the
state to the log.`

// attachFlags are attach's own and those it has in common with others; keys names their settings.
func attachFlags(fs *pflag.FlagSet, env *cli.Env) (keys map[string]string, cfgFile *string) {
	d := defaultSettings()
	keys = map[string]string{}
	connectFlags(fs, keys)
	fs.String("socket", "", "serve NBD on the Unix socket `PATH`")
	fs.String("device", "", "attach as block device `/dev/nbdN`, or auto for the first free one")
	fs.String("name", "", "`name` for list, status and detach (default the NQN's last part)")
	fs.String("http", "", "serve /metrics, /status and /healthz on `ADDR:PORT`")
	fs.Bool("pprof", false, "also serve Go's profiler at /debug/pprof/ there")
	fs.String("run-dir", "", "`directory` of control sockets (default /run/rdblk, $XDG_RUNTIME_DIR/rdblk or /tmp/rdblk-UID)")
	fs.Duration("wait", d.Wait, "how long to try to attach while the target is not there, as when machines start together (default one attempt)")
	fs.Duration("loss-timeout", d.LossTimeout, "how long requests wait for a lost target before they fail; negative: for ever")
	for _, k := range []string{"socket", "device", "name", "http", "pprof", "run-dir", "wait", "loss-timeout"} {
		keys[k] = strings.ReplaceAll(k, "-", "_")
	}
	more, cfgFile := commonFlags(fs, env, d)
	for k, v := range more {
		keys[k] = v
	}
	return keys, cfgFile
}

func newAttachCommand(env *cli.Env) *cli.Command {
	fs := cli.NewFlagSet("attach")
	keys, cfgFile := attachFlags(fs, env)
	return &cli.Command{
		Name: "attach", Args: "ADDR[:PORT] --device DEVICE|--socket PATH [flags]", Short: "attach a disk as a block device or NBD socket", Long: attachHelp, Flags: fs,
		Run: func(ctx context.Context, args []string) error {
			if len(args) > 1 {
				return cli.Usagef("unexpected argument %q", args[1])
			}
			s := defaultSettings()
			if err := config.Load(s, source(env, fs, keys, *cfgFile, args)); err != nil {
				return cli.Usage(err)
			}
			if err := s.complete(); err != nil {
				return cli.Usage(err)
			}
			return attach(ctx, env, s)
		},
	}
}

// complete says what is missing to attach, or one too many.
func (s *settings) complete() error {
	var errs []error
	if s.Address == "" {
		errs = append(errs, errNoAddress)
	}
	switch {
	case s.Socket == "" && s.Device == "":
		errs = append(errs, errors.New("say how to attach: --device auto (or /dev/nbdN), or --socket PATH for NBD clients"))
	case s.Socket != "" && s.Device != "":
		errs = append(errs, fmt.Errorf("--device and --socket exclude each other (settings device %q, socket %q)", s.Device, s.Socket))
	}
	return errors.Join(errs...)
}

// An attachment is one run of attach.
type attachment struct {
	env     *cli.Env
	log     *slog.Logger
	s       *settings
	started time.Time

	nic     *provider.Chooser
	session *initiator.Session
	nqn     string // of the subsystem
	dev     *initiator.Device
	nbd     *nbd.Server
	entry   *control.Entry
	socket  string // absolute; empty with a kernel device
	kdev    *nbd.KernelDevice

	detaching atomic.Bool
	flushes   atomic.Int32 // of this program's own, without an answer

	mu      sync.Mutex    // serialises detach
	ended   bool          // detached; guarded by mu
	endErr  error         // why the program is to exit with 1; set before endedCh is closed
	endedCh chan struct{} // closed when ended
	cut     chan struct{} // closed by the second signal
}

func attach(ctx context.Context, env *cli.Env, s *settings) error {
	log, err := cli.NewLogger(env.Stderr, s.Log.Level, s.Log.Format)
	if err != nil {
		return cli.Usage(err)
	}
	if s.Device != "" && s.ProtectMemory {
		if err := protectMemory(env); err != nil { // or it does not return, but starts anew
			log.Warn("not protected against memory shortage", "reason", oneLine(err))
		}
	}
	a := &attachment{env: env, log: log, s: s, started: time.Now(), endedCh: make(chan struct{}), cut: make(chan struct{})}
	if s.Socket != "" {
		if a.socket, err = filepath.Abs(s.Socket); err != nil {
			return err
		}
	}
	var c initiator.Config
	if err := a.patiently(ctx, func(ctx context.Context) (err error) {
		c, a.nic, err = s.resolved(ctx, log, initiator.Config.LockedMemory)
		return err
	}); err != nil {
		return err
	}
	defer needProcs(c.Queues + 2)()
	if err := worker.CalmMonitor(); err != nil {
		a.log.Debug("the Go scheduler's monitor stays as it is", "err", err)
	}

	var closers []func()
	defer func() {
		for i := len(closers) - 1; i >= 0; i-- {
			closers[i]()
		}
	}()
	closer := func(f func()) { closers = append(closers, f) }
	closeTrace, err := s.openTrace(env, &c)
	if err != nil {
		return err
	}
	closer(closeTrace)

	// The socket or device first: what is wrong with it shows before anybody is bothered.
	var ln net.Listener
	var lock *nbd.DeviceLock
	if s.Device != "" {
		if lock, err = lockDevice(env, s.Device); err != nil {
			return err
		}
		closer(func() {
			if a.kdev == nil { // else it is that one's
				lock.Close()
			}
		})
		c.HostID = hostIDOf(lock.Orphan)
		if c.HostID.IsZero() && s.Device != "auto" {
			c.HostID = attachmentHostID(c.HostNQN, s.Device)
		}
	} else {
		if ln, err = nbd.ListenUnix(a.socket, 0o600); err != nil {
			return err
		}
		closer(func() { ln.Close() })
		// Only now: nobody else has the socket.
		c.HostID = attachmentHostID(c.HostNQN, a.socket)
	}

	if err := a.connect(ctx, c); err != nil {
		return err
	}
	closer(func() { a.closeSession(time.Second, slog.LevelWarn) })

	name, unique := s.Name, s.Name != ""
	if !unique {
		name = control.CleanName(a.nqn[strings.LastIndexByte(a.nqn, ':')+1:])
	}
	dir := s.RunDir
	if dir == "" {
		dir = control.DefaultDir(env.Getenv)
	}
	if a.entry, err = control.Register(dir, "rdinit", name, unique); err != nil {
		return err
	}
	closer(func() { a.entry.Close() })

	cfg := s.nbdConfig()
	cfg.Logger, cfg.Exports = log, []nbd.Export{{Description: a.dev.Info().Name, Device: a.dev}}
	a.nbd, err = nbd.NewServer(cfg)
	if err != nil {
		return err
	}
	closer(func() { a.nbd.Close() })

	served := make(chan error, 1)
	if lock != nil {
		if a.kdev, err = a.nbd.AttachDevice(lock, "", nbd.DeviceOptions{
			Identifier: identifier(a.session.Status().HostID, a.dev.NSID(), a.nqn), Sockets: a.dev.NumQueues(), DeadTimeout: a.deadTimeout(), Logger: log,
		}); err != nil {
			return err
		}
		closer(a.dropDevice)
		how := "attached"
		if a.kdev.TookOver() {
			how = "took over"
		}
		log.Info(how, "device", a.kdev.Path(), "by", a.kdev.Method(), "queues", a.dev.NumQueues())
	} else {
		go func() { served <- a.nbd.Serve(ln) }()
	}
	if s.HTTP != "" {
		h, err := metrics.Listen(s.HTTP, metrics.Config{
			Registry: metrics.Registry("rdinit_", a.collect), Status: func() any { return a.report() },
			Healthy: a.healthy, Pprof: s.Pprof, Log: log,
		})
		if err != nil {
			return err
		}
		closer(h.Close)
		log.Info("http endpoint", "addr", h.Addr.String(), "pprof", s.Pprof)
	}
	a.entry.Serve(a.controlHandler(), log)

	info, st := a.dev.Info(), a.session.Status()
	env.Printf("rdinit: attached %s namespace %d at %s (%s), %s, as %s: %s\n", a.nqn, a.dev.NSID(), st.Addr, provider.Via(st.Provider, st.RDMADevice),
		config.FormatSize(info.Size), a.entry.Name, a.where())
	if err := env.Notify("READY=1", "STATUS=attached "+a.nqn); err != nil {
		log.Warn("service manager", "err", err)
	}
	if a.kdev != nil {
		a.settle()
	}
	return a.wait(ctx, served)
}

// settle flushes, beside everything else, what earlier attachments may have left. From then on a
// flush with nothing to make durable needs no target, and so the kernel's own, at the end of a
// device that nobody has written to, does not wait for one that is away. A failure shows in the state of
// the device, as that of any flush.
func (a *attachment) settle() {
	if a.dev.Info().ReadOnly {
		return
	}
	a.flushes.Add(1)
	go func() {
		defer a.flushes.Add(-1)
		_ = a.dev.Flush()
	}()
}

// connect attaches.
func (a *attachment) connect(ctx context.Context, c initiator.Config) error {
	return a.patiently(ctx, func(ctx context.Context) (err error) {
		if a.session, err = initiator.Connect(ctx, c); err != nil {
			return offers(ctx, c, err)
		}
		a.nqn = a.session.Status().SubNQN
		if a.dev, err = device(a.session, a.s.NSID); err != nil {
			a.closeSession(time.Second, slog.LevelDebug)
		}
		return err
	})
}

// where is what users of the disk need: the device, or the socket as NBD clients want it.
func (a *attachment) where() string {
	if a.kdev != nil {
		return a.kdev.Path()
	}
	return a.uri()
}

func (a *attachment) uri() string {
	if a.socket == "" {
		return ""
	}
	return "nbd+unix:///?socket=" + (&url.URL{Path: a.socket}).EscapedPath()
}

// wait handles signals until the attachment has ended.
func (a *attachment) wait(ctx context.Context, served <-chan error) error {
	stopped := ctx.Done()
	var lost <-chan struct{}
	if a.kdev != nil {
		lost = a.kdev.Ended()
	}
	var result chan error
	var first time.Time
	cutting := false
	begin := func() {
		stopped = nil
		result = make(chan error, 1)
		go func() { result <- a.stop() }()
	}
	for {
		select {
		case <-a.endedCh: // by detach
			if result == nil {
				return a.endErr
			}
			return <-result
		case err := <-result:
			return err
		case err := <-served:
			if !errors.Is(err, nbd.ErrServerClosed) && !a.detaching.Load() {
				return errors.Join(err, a.stop())
			}
		case <-lost:
			lost = nil
			if !a.detaching.Load() {
				return errors.Join(a.kdev.Err(), a.stop())
			}
		case <-stopped:
			begin()
		case sig := <-a.env.Signals:
			switch {
			case sig == unix.SIGUSR1:
				a.dump()
			case sig == unix.SIGHUP:
				a.log.Info("SIGHUP: nothing to reload; sizes are followed by themselves")
			case result == nil:
				a.log.Info("stopping", "signal", sig.String())
				first = time.Now()
				begin()
			case time.Since(first) > cli.SecondSignal && !cutting:
				// A process group and its parent are often told at once, so that one order comes twice.
				a.log.Warn("second signal: cutting", "signal", sig.String())
				cutting = true
				close(a.cut)
			}
		}
	}
}

// stop ends the attachment because of a signal: as well as can be done in the time there is.
func (a *attachment) stop() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ended {
		return nil
	}
	a.detaching.Store(true)
	a.env.Notify("STOPPING=1")
	if a.kdev == nil {
		return a.end(false, nil)
	}
	if err := a.kdev.ShortenDeadTimeout(a.s.DetachTimeout); err != nil {
		a.log.Warn("stopping", "err", err)
	}
	err := a.releaseDevice()
	return a.end(false, err)
}

// detach ends the attachment on request. Without force it changes nothing unless all
// that was written is safe.
func (a *attachment) detach(force bool) (detachAnswer, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ended {
		return detachAnswer{}, errors.New("it is being detached")
	}
	var kernel error
	if a.kdev != nil {
		ctx, cancel := a.part(context.Background(), 5)
		a.detaching.Store(true)
		kernel = a.kdev.Detach(ctx, force)
		cancel()
		if !ended(a.kdev) {
			a.detaching.Store(false)
			if errors.Is(kernel, nbd.ErrDeviceInUse) {
				return detachAnswer{}, fmt.Errorf("%w (still attached; end that use first, or cut it with --force)", kernel)
			}
			if fault := a.dev.Fault(); fault != nil { // the kernel says EIO for everything
				kernel = fmt.Errorf("%w: %w", kernel, fault)
			}
			return detachAnswer{}, fmt.Errorf("%w (still attached; %s)", kernel, remedy(kernel))
		}
	} else if !force {
		if n := a.nbd.Stats().Exports[0].Connections; n > 0 {
			return detachAnswer{}, fmt.Errorf("%s still connected to %s: end them first, or detach with --force (still attached)", counted(n, "NBD client"), a.socket)
		}
		ctx, cancel := a.part(context.Background(), 8)
		err := a.flush(ctx)
		cancel()
		if err != nil {
			return detachAnswer{}, fmt.Errorf("flush: %w: what was written may not be safe (still attached; %s)", err, remedy(err))
		}
	}
	a.detaching.Store(true)
	a.env.Notify("STOPPING=1")
	var warnings []string
	if n := a.nbd.Stats().Exports[0].Connections; a.kdev == nil && n > 0 {
		warnings = append(warnings, fmt.Sprintf("%s of %s cut off; what had no answer yet has failed", counted(n, "connected NBD client"), a.socket))
	}
	err := a.end(force, kernel)
	ans := detachAnswer{Flushed: err == nil}
	if err != nil {
		if !force {
			return ans, err
		}
		warnings = append(warnings, err.Error())
	}
	ans.Warning = strings.Join(warnings, "\n")
	return ans, nil
}

// end drains the NBD clients, flushes, and disconnects, all within DetachTimeout.
// force does not wait for a target that is away. The error says what may be lost, before (what the kernel's
// device has lost already) included; the attachment has ended all the same.
func (a *attachment) end(force bool, before error) (err error) {
	defer func() {
		err = errors.Join(before, err)
		a.ended = true
		// Also if it was forced: who forces it is told, but who supervises this program (a script, a
		// service manager) must not take an end with something lost for a good one.
		a.endErr = err
		close(a.endedCh)
	}()
	patience := a.s.DetachTimeout * 8 / 10
	if a.kdev != nil { // which has had its time
		patience = a.s.DetachTimeout * 3 / 10
	}
	if st := a.session.Status(); force && (st.State != initiator.StateLive || namespaceOf(st, a.dev.NSID()).Fault != "") {
		patience = time.Second
	}
	limited, stopTimer := timeout.With(context.Background(), patience, a.detachTimeout())
	defer stopTimer()
	ctx, cancel := context.WithCancelCause(limited)
	defer cancel(nil)
	go func() {
		select {
		case <-a.cut:
			cancel(errors.New("cut short by a second signal"))
		case <-ctx.Done():
		}
	}()
	// Clients get half of the time: one that does not read its replies must not take the
	// flush's. What they have no answer for was promised to nobody.
	drain, cancelDrain := timeout.With(ctx, patience/2, a.detachTimeout())
	drained := a.nbd.Shutdown(drain)
	cancelDrain()
	if drained != nil {
		a.log.Warn("clients are cut off", "err", drained)
	}
	err = a.flush(ctx)
	if err != nil {
		err = fmt.Errorf("flush: %w: what was written since the last flush may be lost", err)
	}
	// With the session gone every request is answered, so that the NBD server can end.
	level := slog.LevelWarn
	if err != nil {
		level = slog.LevelDebug // it says the same again
	}
	a.closeSession(a.s.DetachTimeout/10, level)
	if drained != nil {
		a.nbd.Close()
	}
	return err
}

// part is so many tenths of detach_timeout.
func (a *attachment) part(ctx context.Context, tenths time.Duration) (context.Context, context.CancelFunc) {
	return timeout.With(ctx, a.s.DetachTimeout*tenths/10, a.detachTimeout())
}

func (a *attachment) detachTimeout() string {
	return "detach_timeout is " + timeout.Text(a.s.DetachTimeout)
}

func (a *attachment) closeSession(patience time.Duration, level slog.Level) {
	ctx, cancel := timeout.With(context.Background(), patience, "")
	defer cancel()
	if err := a.session.Close(ctx); err != nil && !errors.Is(err, initiator.ErrClosed) {
		a.log.Log(ctx, level, "the end of the connection was not in order", "err", err)
	}
}

// flush waits for the device's Flush, but no longer than ctx: a target that is away answers late or never.
func (a *attachment) flush(ctx context.Context) error {
	if a.dev.Info().ReadOnly {
		return nil
	}
	if a.untouched() {
		return nil
	}
	done := make(chan error, 1)
	a.flushes.Add(1)
	go func() {
		defer a.flushes.Add(-1)
		done <- a.dev.Flush()
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		if a.clean() {
			a.log.Warn("the target did not answer the last flush, which had nothing to make durable", "err", context.Cause(ctx))
			return nil
		}
		return fmt.Errorf("the target at %s: %w", a.session.Status().Addr, context.Cause(ctx))
	}
}

// untouched tells that the target is away and nothing was written through this attachment, so
// that its end needs no flush. (One that took a device over answers for what came before it.)
func (a *attachment) untouched() bool {
	st := a.session.Status()
	away := st.State != initiator.StateLive || namespaceOf(st, a.dev.NSID()).Fault != ""
	return away && a.clean()
}

// clean tells that all that was written through this attachment is durable, and nothing but flushes of
// its end has no answer.
func (a *attachment) clean() bool {
	if a.kdev != nil && a.kdev.TookOver() {
		return false
	}
	st := a.session.Status()
	ns := namespaceOf(st, a.dev.NSID())
	return st.Requests <= int(a.flushes.Load()) && !ns.Unflushed && ns.FlushFault == ""
}

// controlHandler answers at the control socket.
func (a *attachment) controlHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, r *http.Request) { control.WriteJSON(w, a.report()) })
	mux.HandleFunc("POST /v1/detach", func(w http.ResponseWriter, r *http.Request) {
		var req detachRequest
		if err := json.NewDecoder(io.LimitReader(r.Body, 1<<16)).Decode(&req); err != nil {
			control.WriteError(w, http.StatusBadRequest, err)
			return
		}
		ans, err := a.detach(req.Force)
		if err != nil {
			a.log.Warn("detach", "force", req.Force, "err", err)
			control.WriteError(w, http.StatusConflict, err)
			return
		}
		a.log.Info("detached", "force", req.Force, "flushed", ans.Flushed)
		control.WriteJSON(w, ans)
	})
	return mux
}

func (a *attachment) healthy() error {
	switch st := a.session.Status(); {
	case a.detaching.Load():
		return errors.New("detaching")
	case st.State != initiator.StateLive:
		return fmt.Errorf("%s: %s", st.State, st.LastError)
	default:
		for _, ns := range st.Namespaces {
			switch {
			case ns.Fault != "":
				return fmt.Errorf("all requests fail: %s", ns.Fault)
			case ns.FlushFault != "":
				return fmt.Errorf("all flushes fail: %s", ns.FlushFault)
			}
		}
	}
	return nil
}

// dump writes the whole state to the log.
func (a *attachment) dump() {
	b, err := json.Marshal(map[string]any{"report": a.report(), "session": a.session.Status(), "clients": a.nbd.Connections()})
	if err != nil {
		a.log.Error("dump", "err", err)
		return
	}
	a.log.Info("state", "status", string(b), "goroutines", runtime.NumGoroutine())
}

// namespaceOf is the part of one namespace.
func namespaceOf(st initiator.Status, nsid uint32) initiator.NamespaceStatus {
	for _, n := range st.Namespaces {
		if n.NSID == nsid {
			return n
		}
	}
	return initiator.NamespaceStatus{}
}

// state is the session's, or detaching: the words of status, list and metrics.
func (a *attachment) state(st initiator.Status) string {
	if a.detaching.Load() || st.State >= initiator.StateClosing {
		return "detaching"
	}
	return st.State.String()
}

func (a *attachment) report() report {
	st := a.session.Status()
	stats := a.session.Stats()
	info := a.dev.Info()
	x := a.nbd.Stats().Exports[0]
	p := report{
		Name: a.entry.Name, PID: os.Getpid(), Version: version.String(), StartedAt: a.started,
		State: a.state(st), NQN: a.nqn, NSID: a.dev.NSID(), Address: st.Addr, Provider: st.Provider, RDMADevice: st.RDMADevice, HostNQN: st.HostNQN,
		Size: info.Size, BlockSize: info.BlockSize, ReadOnly: info.ReadOnly,
		Device: a.devicePath(), Socket: a.socket, URI: a.uri(), Queues: len(st.Queues), Depth: st.Depth,
		Clients: x.Connections, Requests: st.Requests, InFlight: st.Sent, Waiting: st.Waiting,
		Reconnects: st.Reconnects, FailedAttempts: st.FailedAttempts, Namespaces: append([]initiator.NamespaceInfo{}, a.session.Namespaces()...),
	}
	if st.State != initiator.StateLive {
		p.LastError = st.LastError
	}
	ns := namespaceOf(st, p.NSID)
	p.Unflushed, p.Fault, p.FlushFault = ns.Unflushed, ns.Fault, ns.FlushFault
	for op, o := range stats.Ops {
		p.Errors += o.Failed
		switch blockdev.Op(op) {
		case blockdev.OpRead:
			p.ReadOps, p.ReadBytes = o.Answered, o.Bytes
		case blockdev.OpWrite:
			p.WriteOps, p.WrittenBytes = o.Answered, o.Bytes
		case blockdev.OpFlush:
			p.FlushOps = o.Answered
		}
	}
	return p
}
