package main

import (
	"context"

	"rdblk/internal/cli"
	"rdblk/internal/version"
)

func newVersionCommand(env *cli.Env) *cli.Command {
	return &cli.Command{
		Name: "version", Short: "print the version", Long: "Prints the version of the program.",
		Flags: cli.NewFlagSet("version"),
		Run: func(_ context.Context, args []string) error {
			if len(args) > 0 {
				return cli.Usagef("unexpected argument %q", args[0])
			}
			env.Printf("%s\n", version.Line("rdtarget"))
			return nil
		},
	}
}
