package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"rdblk/internal/cli"
	"rdblk/internal/config"
	"rdblk/internal/control"
	"rdblk/internal/provider"
	"rdblk/internal/timeout"
)

// askTimeout bounds one question to a running program.
const askTimeout = 10 * time.Second

// runDirFlag adds --run-dir to a command that looks for running programs.
func runDirFlag(fs interface {
	String(name, value, usage string) *string
}, env *cli.Env) func() string {
	f := fs.String("run-dir", env.Getenv(envPrefix+"RUN_DIR"), "`directory` of control sockets (default /run/rdblk, $XDG_RUNTIME_DIR/rdblk or /tmp/rdblk-UID)")
	return func() string {
		if *f != "" {
			return *f
		}
		return control.DefaultDir(env.Getenv)
	}
}

// A running attachment.
type running struct {
	*control.Client
	report report
}

// attachments asks all running ones for their state. One that ends meanwhile is left out.
func attachments(ctx context.Context, dir string) ([]running, error) {
	cs, err := control.List(dir, "rdinit")
	if err != nil {
		return nil, err
	}
	list := []running{}
	var errs []error
	for _, c := range cs {
		r := running{Client: c}
		ctx, cancel := timeout.With(ctx, askTimeout, "is the program stopped or hung?")
		err := c.Get(ctx, "/v1/status", &r.report)
		cancel()
		if errors.Is(err, control.ErrGone) {
			continue
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		list = append(list, r)
	}
	return list, errors.Join(errs...)
}

// matches tells whether the user's word means r: its name, its socket or its device.
func (r *running) matches(word string) bool {
	if word == r.Name {
		return true
	}
	path := r.report.Socket + r.report.Device // one of them
	if path == "" {
		return false
	}
	abs, err := filepath.Abs(word)
	if err != nil {
		return false
	}
	if abs == path {
		return true
	}
	a, err1 := filepath.EvalSymlinks(abs)
	b, err2 := filepath.EvalSymlinks(path)
	return err1 == nil && err2 == nil && a == b
}

func reports(list []running) []report {
	rs := []report{}
	for _, r := range list {
		rs = append(rs, r.report)
	}
	return rs
}

func newListCommand(env *cli.Env) *cli.Command {
	fs := cli.NewFlagSet("list")
	output := cli.OutputFlag(fs)
	dir := runDirFlag(fs, env)
	return &cli.Command{
		Name: "list", Args: "[flags]", Short: "list what this user has attached on this machine", Flags: fs,
		Long: "Prints one line for each attachment of this user. With -o json the same as status -o json.",
		Run: func(ctx context.Context, args []string) error {
			if len(args) > 0 {
				return cli.Usagef("unexpected argument %q", args[0])
			}
			if err := cli.CheckOutput(*output); err != nil {
				return err
			}
			list, err := attachments(ctx, dir())
			if *output == "json" {
				return errors.Join(env.PrintJSON(reports(list)), err)
			}
			if len(list) == 0 && err == nil {
				sayNothing(env, dir())
			}
			for _, device := range orphans(env) {
				fmt.Fprintf(env.Stderr, "rdinit: %s\n", orphaned(device))
			}
			if len(list) > 0 {
				w := tabwriter.NewWriter(env.Stdout, 0, 0, 2, ' ', 0)
				fmt.Fprintln(w, "NAME\tSTATE\tSIZE\tNSID\tTARGET\tVIA\tATTACHED AS\tNQN")
				for _, r := range list {
					p := r.report
					fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\n", p.Name, p.shortState(), config.FormatSize(p.Size), p.NSID, p.Address, provider.Via(p.Provider, p.RDMADevice), p.Device+p.Socket, p.NQN)
				}
				w.Flush()
			}
			return err
		},
	}
}

func newStatusCommand(env *cli.Env) *cli.Command {
	fs := cli.NewFlagSet("status")
	output := cli.OutputFlag(fs)
	dir := runDirFlag(fs, env)
	return &cli.Command{
		Name: "status", Args: "[NAME | DEVICE | SOCKET] [flags]", Short: "show the state of attachments", Flags: fs,
		Long: "Prints the state of all attachments of this user, or of the one that is named.\n" +
			"docs/operating.md describes the fields of -o json.",
		Run: func(ctx context.Context, args []string) error {
			if len(args) > 1 {
				return cli.Usagef("unexpected argument %q", args[1])
			}
			if err := cli.CheckOutput(*output); err != nil {
				return err
			}
			list, err := attachments(ctx, dir())
			if len(args) == 1 {
				r, ferr := find(env, list, args[0], dir())
				if ferr != nil {
					return errors.Join(ferr, err)
				}
				list = []running{*r}
			}
			if *output == "json" {
				return errors.Join(env.PrintJSON(reports(list)), err)
			}
			if len(list) == 0 && err == nil {
				sayNothing(env, dir())
			}
			for i, r := range list {
				if i > 0 {
					env.Printf("\n")
				}
				r.report.print(env)
			}
			return err
		},
	}
}

// sayNothing says that an empty list is no mistake; results are on standard output, so there is none.
func sayNothing(env *cli.Env, dir string) {
	fmt.Fprintf(env.Stderr, "rdinit: this user has nothing attached (looked in %s)\n", dir)
}

func (p *report) print(env *cli.Env) {
	w := tabwriter.NewWriter(env.Stdout, 0, 0, 2, ' ', 0)
	row := func(k, format string, a ...any) { fmt.Fprintf(w, "  %s\t%s\n", k, fmt.Sprintf(format, a...)) }
	env.Printf("%s\n", p.Name)
	row("state", "%s", p.State)
	if p.LastError != "" {
		row("last error", "%s", p.LastError)
	}
	row("target", "%s (%s)", p.Address, provider.Via(p.Provider, p.RDMADevice))
	row("subsystem", "%s", p.NQN)
	ro := ""
	if p.ReadOnly {
		ro = ", read-only"
	}
	row("namespace", "%d: %s in blocks of %d bytes%s", p.NSID, config.FormatSize(p.Size), p.BlockSize, ro)
	if others := p.otherNamespaces(); others != "" {
		row("others there", "%s", others)
	}
	if p.Device != "" {
		row("device", "%s", p.Device)
	} else {
		row("socket", "%s", p.URI)
	}
	row("queues", "%d of depth %d", p.Queues, p.Depth)
	row("clients", "%d", p.Clients)
	row("requests", "%d with the target, %d waiting", p.InFlight, p.Waiting)
	row("reads", "%d, %s", p.ReadOps, config.FormatSize(int64(p.ReadBytes)))
	row("writes", "%d, %s", p.WriteOps, config.FormatSize(int64(p.WrittenBytes)))
	unflushed := ""
	if p.Unflushed {
		unflushed = ", there are unflushed writes"
	}
	row("flushes", "%d%s", p.FlushOps, unflushed)
	row("errors", "%d", p.Errors)
	if p.Fault != "" {
		row("fault", "%s", p.Fault)
	}
	if p.FlushFault != "" {
		row("flush fault", "%s", p.FlushFault)
	}
	row("reconnects", "%d", p.Reconnects)
	row("process", "%d, %s, since %s", p.PID, p.Version, p.StartedAt.Format(time.DateTime))
	w.Flush()
}

func find(env *cli.Env, list []running, word, dir string) (*running, error) {
	for i := range list {
		if list[i].matches(word) {
			return &list[i], nil
		}
	}
	if slices.Contains(orphans(env), word) {
		return nil, errors.New(orphaned(word))
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("%s: nothing is attached by this user (looked in %s; another user's attachments are seen by that user only)", strconv.Quote(word), dir)
	}
	var names []string
	for _, r := range list {
		names = append(names, r.Name)
	}
	return nil, fmt.Errorf("%s: no such attachment; there are: %s", strconv.Quote(word), strings.Join(names, ", "))
}

// detachRequest and detachAnswer are spoken at POST /v1/detach.
type detachRequest struct {
	Force bool `json:"force"`
}

type detachAnswer struct {
	// Flushed: everything that was written is on stable storage.
	Flushed bool `json:"flushed"`
	// Warning is what --force passed over; empty otherwise.
	Warning string `json:"warning,omitempty"`
}

const detachHelp = `Detaches what NAME, DEVICE or SOCKET names: running requests are answered, the device is flushed, the
kernel's device is unbound or the socket removed, the connections to the target are ended, and the
'rdinit attach' process ends.

It is refused, and everything stays attached, while the device is mounted or open or NBD clients are
connected, and when the flush fails: then it is not known that all data is safe. --force detaches even
so, and says what may be lost.`

func newDetachCommand(env *cli.Env) *cli.Command {
	fs := cli.NewFlagSet("detach")
	force := fs.Bool("force", false, "detach though clients are connected or data could not be flushed")
	dir := runDirFlag(fs, env)
	return &cli.Command{
		Name: "detach", Args: "NAME | DEVICE | SOCKET [flags]", Short: "end an attachment safely", Long: detachHelp, Flags: fs,
		Run: func(ctx context.Context, args []string) error {
			if len(args) != 1 {
				return cli.Usagef("name one attachment: NAME, DEVICE or SOCKET as 'rdinit list' shows them")
			}
			list, err := attachments(ctx, dir())
			r, ferr := find(env, list, args[0], dir())
			if ferr != nil {
				return errors.Join(ferr, err)
			}
			var a detachAnswer
			if err := r.Post(ctx, "/v1/detach", detachRequest{*force}, &a); err != nil {
				return fmt.Errorf("%s: %w", r.Name, err)
			}
			if a.Warning != "" {
				for line := range strings.SplitSeq(a.Warning, "\n") {
					fmt.Fprintf(env.Stderr, "rdinit: detach: %s: %s\n", r.Name, line)
				}
			}
			if !gone(ctx, dir(), r.Name) {
				return fmt.Errorf("%s: detached, but process %d has not ended yet", r.Name, r.report.PID)
			}
			env.Printf("rdinit: detached %s\n", r.Name)
			return nil
		},
	}
}

// gone waits up to five seconds for the end of the process.
func gone(ctx context.Context, dir, name string) bool {
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end) && ctx.Err() == nil; time.Sleep(10 * time.Millisecond) {
		cs, err := control.List(dir, "rdinit")
		if err != nil {
			return false
		}
		there := false
		for _, c := range cs {
			there = there || c.Name == name
		}
		if !there {
			return true
		}
	}
	return false
}
