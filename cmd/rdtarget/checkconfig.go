package main

import (
	"context"
	"errors"
	"strings"

	"rdblk/internal/cli"
	"rdblk/internal/config"
)

func newCheckConfigCommand(env *cli.Env) *cli.Command {
	return &cli.Command{
		Name: "check-config", Args: "FILE", Short: "check a configuration file",
		Long: "Reads FILE as serve --config would, with the environment, and says everything that is wrong\n" +
			"with it: unknown settings, values out of range, paths that are not there, are named twice or\n" +
			"that this user may not open, addresses that this machine does not have, and those that other\n" +
			"machines reach without a list of hosts. Nothing is locked or started: what is in use shows when\n" +
			"it is served.",
		Flags: cli.NewFlagSet("check-config"),
		Run: func(ctx context.Context, args []string) error {
			if len(args) != 1 {
				return cli.Usagef("name one file")
			}
			s := defaultSettings()
			err := config.Load(s, config.Source{Prefix: envPrefix, Environ: env.Environ, File: args[0]})
			// What could be read is checked all the same: everything that is wrong, at once.
			s.numberNamespaces()
			_, lerr := s.listenAddrs(ctx)
			errs := []error{err, s.checkPaths(), s.checkTwice(), lerr, s.checkLocal(ctx)}
			if err == nil && len(s.Namespaces) == 0 {
				errs = append(errs, errors.New("namespaces: there is nothing to serve: name files, block devices, mem:SIZE or null:SIZE"))
			}
			if err := oneOfEach(errs); err != nil {
				return cli.Usage(err)
			}
			env.Printf("%s: good: %s on %s\n", args[0], counted(len(s.Namespaces), "namespace"), joinWords(s.Listen))
			return nil
		},
	}
}

// oneOfEach joins errors and leaves out lines that are there already.
func oneOfEach(errs []error) error {
	err := errors.Join(errs...)
	if err == nil {
		return nil
	}
	seen := map[string]bool{}
	var list []error
	for line := range strings.SplitSeq(err.Error(), "\n") {
		key, _, _ := strings.Cut(line, ": ")
		if !seen[line] && !(seen[key] && strings.HasSuffix(key, ".path")) {
			list = append(list, errors.New(line))
		}
		seen[line], seen[key] = true, true
	}
	return errors.Join(list...)
}
