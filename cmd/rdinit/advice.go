package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"rdblk/blockdev"
	"rdblk/initiator"
	"rdblk/internal/cli"
	"rdblk/internal/timeout"
	"rdblk/protocol"

	"golang.org/x/sys/unix"
)

// offers says what the target has, if err is that it does not have the subsystem that was named.
func offers(ctx context.Context, c initiator.Config, err error) error {
	if !errors.Is(err, initiator.ErrUnknownSubsystem) {
		return err
	}
	list, derr := initiator.Discover(ctx, initiator.DiscoverConfig{
		Provider: c.Provider, Addr: c.Addr, LocalAddr: c.LocalAddr, HostNQN: c.HostNQN, Timeout: c.ConnectTimeout, NoWindows: c.NoWindows, Logger: c.Logger,
	})
	if derr != nil {
		return err
	}
	var names []string
	for i := range list {
		if list[i].SUBTYPE == protocol.SubsystemNVM && len(names) < 16 {
			names = append(names, quoted(list[i].SUBNQN))
		}
	}
	if len(names) == 0 {
		return fmt.Errorf("%s has no subsystem %q, and lists none for this host (%s): is its NQN among the target's hosts?", c.Addr, c.SubNQN, c.HostNQN)
	}
	return fmt.Errorf("%s has no subsystem %q; what it offers this host is %s (choose with --nqn)", c.Addr, c.SubNQN, strings.Join(names, ", "))
}

// remedy is what to do about an attachment that cannot be detached because of err: for some things
// trying again is right, for others it never will be.
func remedy(err error) string {
	switch {
	case errors.Is(err, initiator.ErrCacheLost):
		return "those writes are gone and trying again cannot bring them back: detach with --force, check the file system, attach again"
	case errors.Is(err, initiator.ErrChanged):
		return "it will fail as long as the target serves another disk in its place: have it serve the one that was attached, or give up what was not flushed with --force"
	case errors.Is(err, initiator.ErrNoNamespace):
		return "have the target serve the namespace again, or give up what was not flushed with --force"
	case errors.Is(err, blockdev.ErrFlushFailed):
		return "every flush will fail from now on, trying again cannot help: look at the target's log and storage, detach with --force, check the file system, attach again"
	case errors.Is(err, blockdev.ErrLost), errors.Is(err, context.DeadlineExceeded), errors.Is(err, initiator.ErrTimeout):
		return "bring the target back and try again, or give up what was not flushed with --force"
	}
	return "look at the target's log; what was not flushed is given up with --force"
}

// Waits between attempts to attach.
const (
	firstRetry = 200 * time.Millisecond
	lastRetry  = 5 * time.Second
)

// patiently tries for as long as the setting wait says, if what is in the way may pass by itself. A
// signal to stop ends it.
func (a *attachment) patiently(ctx context.Context, try func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done := make(chan error, 1)
	go func() { done <- a.repeat(ctx, try) }()
	for {
		select {
		case err := <-done:
			return err
		case sig := <-a.env.Signals:
			if sig == unix.SIGTERM || sig == unix.SIGINT {
				cancel(fmt.Errorf("stopped by a signal (%v)", sig))
			}
		}
	}
}

func (a *attachment) repeat(ctx context.Context, try func(context.Context) error) error {
	until := a.started.Add(a.s.Wait)
	said := ""
	for delay := firstRetry; ; delay = min(2*delay, lastRetry) {
		err := try(ctx)
		left := time.Until(until)
		switch {
		case err == nil || ctx.Err() != nil || !passing(err):
			return err
		case left <= 0 && a.s.Wait > 0:
			return fmt.Errorf("%w; this went on for %s (wait)", err, timeout.Text(a.s.Wait))
		case left <= 0:
			return err
		}
		if s := err.Error(); s != said {
			said = s
			a.log.Warn("cannot attach yet, trying again", "err", err, "for", left.Round(time.Second))
			_ = a.env.Notify("STATUS=waiting for the target: " + s)
		}
		select {
		case <-time.After(min(delay, left)):
		case <-ctx.Done():
			return fmt.Errorf("%w; %w", err, context.Cause(ctx))
		}
	}
}

// passing tells whether an error may pass by itself when machines and networks start.
func passing(err error) bool {
	var attempt *initiator.AttemptError
	var lookup *cli.LookupError
	return errors.As(err, &attempt) && attempt.Transient() || errors.As(err, &lookup) || errors.Is(err, initiator.ErrNoNamespace)
}
