package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"text/tabwriter"

	"rdblk/initiator"
	"rdblk/internal/cli"
	"rdblk/internal/config"
	"rdblk/protocol"
)

// A discovered entry, also as JSON.
type discovered struct {
	NQN       string `json:"nqn"`
	Type      string `json:"type"`
	Transport string `json:"transport"`
	Address   string `json:"address"`
	Port      string `json:"port"`
}

func newDiscoverCommand(env *cli.Env) *cli.Command {
	fs := cli.NewFlagSet("discover")
	output := cli.OutputFlag(fs)
	keys, cfgFile := commonFlags(fs, env, briefSettings())
	return &cli.Command{
		Name: "discover", Args: "ADDR[:PORT] [flags]", Short: "ask a target what there is to attach", Flags: fs,
		Long: "Asks the discovery service at ADDR which subsystems this host may attach, and prints them.",
		Run: func(ctx context.Context, args []string) error {
			var bad []error
			if len(args) > 1 {
				bad = append(bad, fmt.Errorf("unexpected argument %q", args[1]))
			}
			s := briefSettings()
			bad = append(bad, cli.CheckOutput(*output), config.Load(s, source(env, fs, keys, *cfgFile, args)))
			if err := errors.Join(bad...); err != nil {
				return cli.Usage(err)
			}
			log, err := cli.NewLogger(env.Stderr, s.Log.Level, s.Log.Format)
			if err != nil {
				return cli.Usage(err)
			}
			c, _, err := s.resolved(ctx, log, func(initiator.Config) uint64 { return initiator.DiscoverConfig{}.LockedMemory() })
			if err != nil {
				return err
			}
			closeTrace, err := s.openTrace(env, &c)
			if err != nil {
				return err
			}
			defer closeTrace()
			defer needProcs(3)()
			entries, err := initiator.Discover(ctx, initiator.DiscoverConfig{
				Provider: c.Provider, Addr: c.Addr, LocalAddr: c.LocalAddr, HostNQN: c.HostNQN, Timeout: c.ConnectTimeout, NoWindows: c.NoWindows, Logger: log, Trace: c.Trace,
			})
			if err != nil {
				return err
			}
			list := []discovered{}
			for i := range entries {
				e := &entries[i]
				list = append(list, discovered{NQN: e.SUBNQN, Type: e.SUBTYPE.String(), Transport: e.TRTYPE.String(), Address: e.TRADDR, Port: e.TRSVCID})
			}
			if *output == "json" {
				if err := env.PrintJSON(list); err != nil {
					return err
				}
			}
			w := tabwriter.NewWriter(env.Stdout, 0, 0, 2, ' ', 0)
			n := 0
			for i, d := range list {
				if entries[i].SUBTYPE != protocol.SubsystemNVM {
					continue // the discovery service itself
				}
				n++
				if *output == "json" {
					continue
				}
				if n == 1 {
					fmt.Fprintln(w, "TRANSPORT\tADDRESS\tPORT\tNQN")
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", d.Transport, quoted(d.Address), quoted(d.Port), quoted(d.NQN))
			}
			w.Flush()
			if n == 0 {
				return fmt.Errorf("%s lists nothing for this host (%s): is its NQN on the target's list?", s.Address, c.HostNQN)
			}
			return nil
		},
	}
}

// quoted shows text of a peer as it is if it is harmless, else quoted.
func quoted(s string) string {
	if q := strconv.QuoteToGraphic(s); q[1:len(q)-1] != s {
		return q
	}
	return s
}
