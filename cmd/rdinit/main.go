// Command rdinit attaches disks that other machines serve with NVMe over Fabrics
// on RDMA, and offers each as an NBD socket.
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
	env := &cli.Env{Stdout: os.Stdout, Stderr: os.Stderr, Environ: os.Environ(), Signals: signals, OwnProcess: true}
	os.Exit(newProgram(env).Main(context.Background(), env, os.Args[1:]))
}

func newProgram(env *cli.Env) *cli.Program {
	return &cli.Program{
		Name:  "rdinit",
		Short: "attach disks of other machines over RDMA (NVMe over Fabrics)",
		Epilog: "Settings come from flags, RDINIT_… environment variables, the file of --config, and\n" +
			"defaults, in this order. Exit codes: 0 done, 1 failed, 2 wrong command line or configuration.\n",
		Usual: "attach",
		Commands: []*cli.Command{
			newDiscoverCommand(env),
			newAttachCommand(env).WithOwnSignals(),
			newDetachCommand(env),
			newListCommand(env),
			newStatusCommand(env),
			newBenchCommand(env),
			newCheckConfigCommand(env),
			newDevicesCommand(env),
			newVersionCommand(env),
		},
	}
}
