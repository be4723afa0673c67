package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"text/tabwriter"
	"time"

	"rdblk/internal/cli"
	"rdblk/internal/config"
	"rdblk/internal/control"
	"rdblk/internal/provider"
	"rdblk/internal/timeout"
	"rdblk/internal/version"
	"rdblk/target"
)

// A report is the state of one serving program: the answer at its control socket, at
// /status of its HTTP endpoint, and an element of what "rdtarget status -o json" prints.
type report struct {
	Name      string        `json:"name"`
	PID       int           `json:"pid"`
	Version   string        `json:"version"`
	StartedAt time.Time     `json:"started_at"`
	State     string        `json:"state"` // serving or draining
	Provider  string        `json:"provider"`
	HTTP      string        `json:"http,omitempty"`
	Target    target.Status `json:"target"`
}

func (sv *server) status() report {
	r := report{Name: sv.entry.Name, PID: os.Getpid(), Version: version.String(), StartedAt: sv.started, State: "serving",
		Provider: providers(sv.bound), Target: sv.target.Status()}
	if r.Target.Hosts == nil {
		r.Target.Hosts = []string{}
	}
	if sv.draining.Load() {
		r.State = "draining"
	}
	if a := sv.httpAddr.Load(); a != nil {
		r.HTTP = *a
	}
	return r
}

func newStatusCommand(env *cli.Env) *cli.Command {
	fs := cli.NewFlagSet("status")
	output := cli.OutputFlag(fs)
	dir := fs.String("run-dir", env.Getenv(envPrefix+"RUN_DIR"), "`directory` of control sockets (default /run/rdblk, $XDG_RUNTIME_DIR/rdblk or /tmp/rdblk-UID)")
	return &cli.Command{
		Name: "status", Args: "[flags]", Short: "show what this user serves on this machine", Flags: fs,
		Long: "Prints the state of every rdtarget of this user: namespaces, hosts, and where they are connected.\n" +
			"docs/operating.md describes the fields of -o json.",
		Run: func(ctx context.Context, args []string) error {
			if len(args) > 0 {
				return cli.Usagef("unexpected argument %q", args[0])
			}
			if err := cli.CheckOutput(*output); err != nil {
				return err
			}
			d := *dir
			if d == "" {
				d = control.DefaultDir(env.Getenv)
			}
			cs, err := control.List(d, "rdtarget")
			if err != nil {
				return err
			}
			list := []report{}
			var errs []error
			for _, c := range cs {
				var r report
				ctx, cancel := timeout.With(ctx, 30*time.Second, "is the program stopped or hung?")
				err := c.Get(ctx, "/v1/status", &r)
				cancel()
				switch {
				case errors.Is(err, control.ErrGone):
				case err != nil:
					errs = append(errs, err)
				default:
					list = append(list, r)
				}
			}
			if *output == "json" {
				return errors.Join(append(errs, env.PrintJSON(list))...)
			}
			if len(list) == 0 && len(errs) == 0 {
				fmt.Fprintf(env.Stderr, "rdtarget: this user serves nothing (looked in %s)\n", d)
			}
			for i := range list {
				if i > 0 {
					env.Printf("\n")
				}
				list[i].print(env)
			}
			return errors.Join(errs...)
		},
	}
}

func (r *report) print(env *cli.Env) {
	t := &r.Target
	env.Printf("%s\n", r.Name)
	w := tabwriter.NewWriter(env.Stdout, 0, 0, 2, ' ', 0)
	row := func(k, format string, a ...any) { fmt.Fprintf(w, "  %s\t%s\n", k, fmt.Sprintf(format, a...)) }
	row("subsystem", "%s", t.NQN)
	row("state", "%s", r.State)
	var at []bound
	for _, l := range t.Listening {
		if a, err := netip.ParseAddrPort(l.Address); err == nil {
			at = addBound(at, bound{a, l.Provider})
		}
	}
	row("listening", "%s", joinBound(at))
	switch {
	case t.AnyHost:
		row("hosts", "any")
	default:
		row("hosts", "%s", joinWords(t.Hosts))
	}
	for _, n := range t.Namespaces {
		ro := ""
		if n.ReadOnly {
			ro = ", read-only"
		}
		row("namespace", "%d: %s, %s in blocks of %d bytes%s", n.NSID, n.Device, config.FormatSize(n.Bytes), n.BlockSize, ro)
	}
	for _, c := range t.Controllers {
		kind := counted(c.IOQueues, "queue")
		if c.Discovery {
			kind = "discovery"
		}
		row("connected", "%q from %s (%s): %s, %s for %s", c.Host, c.Remote, provider.Via(c.Provider, c.Device), c.State, kind, c.Age)
	}
	row("process", "%d, %s, since %s", r.PID, r.Version, r.StartedAt.Format(time.DateTime))
	w.Flush()
}
