package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"time"

	"rdblk/internal/cli"
	"rdblk/internal/control"
	"rdblk/nbd"
	"rdblk/protocol"
)

// The kernel keeps the thread that binds a device as its "pid" and shows it in
// /sys/block/nbdN/pid. attach runs on the main goroutine; on the main thread this is the process.
func init() { runtime.LockOSThread() }

// identifierPrefix begins what the kernel keeps of an attachment. It is followed by the host identifier, the
// namespace and the subsystem. The next process that takes the device over connects with the same host
// identifier, so that the target ends what the one before has left behind first.
const identifierPrefix = "rdblk1 "

func identifier(host protocol.UUID, nsid uint32, nqn string) string {
	return fmt.Sprintf("%s%x %d %s", identifierPrefix, host[:], nsid, nqn)
}

// hostIDOf is the host identifier in one; zero, for a new one, if there is none.
func hostIDOf(identifier string) (id protocol.UUID) {
	if s, ok := strings.CutPrefix(identifier, identifierPrefix); ok {
		word, _, _ := strings.Cut(s, " ")
		if b, err := hex.DecodeString(word); err == nil && len(b) == len(id) {
			copy(id[:], b)
			return id
		}
	}
	return id
}

// lockDevice claims the device among all rdinit of this user, whatever their run_dir is.
func lockDevice(env *cli.Env, device string) (*nbd.DeviceLock, error) {
	dir := control.DefaultDir(env.Getenv)
	if err := control.EnsureDir(dir); err != nil {
		return nil, err
	}
	lock, err := nbd.LockDevice(device, dir, identifierPrefix)
	if errors.Is(err, nbd.ErrDeviceInUse) && device != "auto" {
		err = fmt.Errorf("%w; choose another device, or auto for a free one", err)
	}
	return lock, err
}

// orphans are the devices whose rdinit is gone and which the kernel keeps for the next one.
func orphans(env *cli.Env) []string {
	return nbd.Orphans(control.DefaultDir(env.Getenv), identifierPrefix)
}

// orphaned is what there is to know and to do about an orphan.
func orphaned(device string) string {
	return fmt.Sprintf("%s: the rdinit that attached it is gone and the kernel keeps the device: attach the same namespace with --device %s, which takes it over, or free it with nbd-client -d %s", device, device, device)
}

// deadTimeout is how long the kernel waits for another process: longer than this one makes
// requests wait, so that it is always the one to answer them while it lives.
func (a *attachment) deadTimeout() time.Duration {
	if a.s.LossTimeout < 0 {
		return -1
	}
	return a.s.LossTimeout + time.Minute
}

func (a *attachment) devicePath() string {
	if a.kdev == nil {
		return ""
	}
	return a.kdev.Path()
}

// dropDevice is for an attachment that fails before it is reported: nobody can have used the device
// yet, unless it was taken over; then it is left for the next to take over. After detach it does nothing.
func (a *attachment) dropDevice() {
	if !ended(a.kdev) && !a.kdev.TookOver() {
		ctx, cancel := a.part(context.Background(), 5)
		defer cancel()
		if err := a.kdev.Detach(ctx, false); err != nil {
			a.log.Warn("detach", "err", err)
		}
	}
	a.kdev.Abandon()
}

func ended(k *nbd.KernelDevice) bool {
	select {
	case <-k.Ended():
		return true
	default:
		return false
	}
}

// releaseDevice detaches the kernel because of a signal. While the device is in use it
// waits: on the way down, others are unmounting it.
func (a *attachment) releaseDevice() error {
	ctx, cancel := a.part(context.Background(), 4)
	defer cancel()
	go func() {
		select {
		case <-a.cut:
			cancel()
		case <-ctx.Done():
		}
	}()
	for said := false; ; {
		err := a.kdev.Detach(ctx, false)
		if ended(a.kdev) {
			return err
		}
		if !said {
			a.log.Warn("waiting for the device to be free", "device", a.kdev.Path(), "err", err)
			said = true
		}
		select {
		case <-time.After(100 * time.Millisecond):
			continue
		case <-ctx.Done():
		}
		force, cancelForce := a.part(context.Background(), 2)
		defer cancelForce()
		return a.kdev.Detach(force, true) // which says what is lost
	}
}
