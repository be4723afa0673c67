// Command rdtarget serves files and disks to other machines over RDMA, as an
// NVMe over Fabrics target.
package main

import (
	"context"
	"os"
	"os/signal"

	"rdblk/internal/cli"

	"golang.org/x/sys/unix"
)

func main() {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGUSR1)
	env := &cli.Env{Stdout: os.Stdout, Stderr: os.Stderr, Environ: os.Environ(), Signals: signals}
	os.Exit(newProgram(env).Main(context.Background(), env, os.Args[1:]))
}

func newProgram(env *cli.Env) *cli.Program {
	return &cli.Program{
		Name:  "rdtarget",
		Short: "serve files and disks to other machines over RDMA (NVMe over Fabrics)",
		Epilog: "Settings come from flags, RDTARGET_… environment variables, the file of --config, and\n" +
			"defaults, in this order. Exit codes: 0 done, 1 failed, 2 wrong command line or configuration.\n",
		Usual: "serve",
		Commands: []*cli.Command{
			newServeCommand(env).WithOwnSignals(),
			newCheckConfigCommand(env),
			newStatusCommand(env),
			newDevicesCommand(env),
			newVersionCommand(env),
		},
	}
}
