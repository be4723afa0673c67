package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"rdblk/internal/cli"
	"rdblk/internal/config"
	"rdblk/internal/timeout"

	"golang.org/x/sys/unix"
)

// lookupTimeout bounds how long check-config waits for a name server.
const lookupTimeout = 10 * time.Second

func newCheckConfigCommand(env *cli.Env) *cli.Command {
	return &cli.Command{
		Name: "check-config", Args: "FILE", Short: "check a configuration file",
		Long: "Reads FILE as attach --config would, with the environment, and says everything that is wrong\n" +
			"with it: unknown settings, values out of range, no target, or one whose name cannot be looked\n" +
			"up, no device and no socket, or both, a socket whose directory is not there or that this user\n" +
			"may not make, and a local address that this machine does not have. Nothing is connected,\n" +
			"attached or started: whether the target is there, and what is in use, shows when it is attached.",
		Flags: cli.NewFlagSet("check-config"),
		Run: func(ctx context.Context, args []string) error {
			if len(args) != 1 {
				return cli.Usagef("name one file")
			}
			s := defaultSettings()
			err := config.Load(s, config.Source{Prefix: envPrefix, Environ: env.Environ, File: args[0]})
			// What could be read is checked all the same: everything that is wrong, at once.
			errs := []error{err, s.checkName(ctx), s.checkLocal(), s.checkSocket()}
			if err == nil {
				errs = append(errs, s.complete())
			}
			if err := errors.Join(errs...); err != nil {
				return cli.Usage(err)
			}
			env.Printf("%s: good: %s as %s\n", args[0], s.Address, s.Device+s.Socket)
			return nil
		},
	}
}

// checkName finds a name of the target that cannot be looked up.
func (s *settings) checkName(ctx context.Context) error {
	if _, _, err := cli.SplitAddr(s.Address, cli.DefaultPort); err != nil {
		return nil // Validate or complete says so
	}
	ctx, cancel := timeout.With(ctx, lookupTimeout, "")
	defer cancel()
	if _, err := cli.ResolveAddr(ctx, s.Address, cli.DefaultPort); err != nil {
		return fmt.Errorf("address: %w", err)
	}
	return nil
}

// checkLocal finds a local address that this machine does not have.
func (s *settings) checkLocal() error {
	a, err := netip.ParseAddr(s.Local)
	if err != nil {
		return nil // there is none, or Validate says so
	}
	if cli.LacksAddr(a) {
		return fmt.Errorf("local_address: %s: %w", s.Local, cli.WithAdvice(unix.EADDRNOTAVAIL, cli.ListenAdvice(unix.EADDRNOTAVAIL, netip.AddrPortFrom(a, 0), "local_address")))
	}
	return nil
}

// checkSocket finds a path at which no socket can be made.
func (s *settings) checkSocket() error {
	if s.Socket == "" {
		return nil
	}
	bad := func(format string, a ...any) error {
		return fmt.Errorf("socket: %s: %s", s.Socket, fmt.Sprintf(format, a...))
	}
	switch fi, err := os.Lstat(s.Socket); {
	case err == nil && fi.Mode().Type() != fs.ModeSocket:
		return bad("something else than a socket is there: remove it or choose another path")
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return bad("%v", cli.Plain(err))
	}
	dir := filepath.Dir(s.Socket)
	if fi, err := os.Stat(dir); err != nil {
		return bad("%s: %v (its directory must exist)", dir, cli.Plain(err))
	} else if !fi.IsDir() {
		return bad("%s is no directory", dir)
	}
	if err := unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK|unix.X_OK, unix.AT_EACCESS); err != nil {
		return bad("%s: %v: this user may not make a socket there", dir, err)
	}
	return nil
}
