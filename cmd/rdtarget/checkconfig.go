package main

import (
	"context"
	"errors"
	"fmt"

	"rdblk/internal/cli"
	"rdblk/internal/config"
)

func newCheckConfigCommand(env *cli.Env) *cli.Command {
	return &cli.Command{
		Name: "check-config", Args: "FILE", Short: "check a configuration file",
		Long: "Reads FILE as serve --config would, with the environment, and says everything that is wrong\n" +
			"with it: unknown settings, values out of range, paths that are not there, addresses that\n" +
			"other machines reach without a list of hosts. Nothing is opened or started.",
		Flags: cli.NewFlagSet("check-config"),
		Run: func(ctx context.Context, args []string) error {
			if len(args) != 1 {
				return cli.Usagef("name one file")
			}
			s := defaultSettings()
			err := config.Load(s, config.Source{Prefix: envPrefix, Environ: env.Environ, File: args[0]})
			if err == nil {
				s.numberNamespaces()
				_, lerr := s.listenAddrs(ctx)
				err = errors.Join(s.checkPaths(), lerr)
				if len(s.Namespaces) == 0 {
					err = errors.Join(err, errors.New("namespaces: there is nothing to serve"))
				}
			}
			if err != nil {
				return cli.Usage(fmt.Errorf("%s:\n%w", args[0], err))
			}
			env.Printf("%s: good: %s on %s\n", args[0], counted(len(s.Namespaces), "namespace"), joinWords(s.Listen))
			return nil
		},
	}
}
