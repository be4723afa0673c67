package main

import (
	"context"

	"rdblk/internal/cli"
	"rdblk/internal/version"
)

func newVersionCommand(env *cli.Env) *cli.Command {
	return &cli.Command{
		Name: "version", Short: "print the version and this machine's host NQN",
		Long: "Prints the version of the program, and the name (host NQN) by which targets know this machine:\n" +
			"the one in /etc/nvme/hostnqn if nvme-cli has made it, else one derived from /etc/machine-id.",
		Flags: cli.NewFlagSet("version"),
		Run: func(_ context.Context, args []string) error {
			if len(args) > 0 {
				return cli.Usagef("unexpected argument %q", args[0])
			}
			env.Printf("%s\nhost NQN %s\n", version.Line("rdinit"), thisHostNQN())
			return nil
		},
	}
}
