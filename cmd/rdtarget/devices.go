package main

import (
	"context"
	"runtime"

	"rdblk/internal/cli"
	"rdblk/internal/config"
	"rdblk/internal/provider"
)

func newDevicesCommand(env *cli.Env) *cli.Command {
	fs := cli.NewFlagSet("devices")
	output := cli.OutputFlag(fs)
	cfgFile := fs.String("config", env.Getenv(envPrefix+"CONFIG"), "read settings from `FILE`")
	return &cli.Command{
		Name: "devices", Args: "[flags]", Short: "show the RDMA devices of this machine and what is missing", Flags: fs,
		Long: "Prints what each provider offers: devices, the addresses that select them, their limits, how much\n" +
			"locked memory rdtarget needs for them with the settings in force, and what keeps them from being used.",
		Run: func(_ context.Context, args []string) error {
			if len(args) > 0 {
				return cli.Usagef("unexpected argument %q", args[0])
			}
			if err := cli.CheckOutput(*output); err != nil {
				return err
			}
			s := defaultSettings()
			if err := config.Load(s, config.Source{Prefix: envPrefix, Environ: env.Environ, File: *cfgFile}); err != nil {
				return cli.Usage(err)
			}
			if s.Workers == 0 {
				s.Workers = runtime.NumCPU()
			}
			r := provider.Inspect(s.targetConfig().LockedMemory())
			if *output == "json" {
				return env.PrintJSON(r)
			}
			r.Print(env.Stdout)
			return nil
		},
	}
}
