package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"rdblk/internal/cli"

	"golang.org/x/sys/unix"
)

// When memory is short the kernel frees some by writing pages out, to /dev/nbdN too, and whoever asked for memory
// waits. If this process had to wait that way, or were killed for its memory, nobody would do the writing.

// oomNever is the lowest value of oom_score_adj: the kernel does not choose the process.
const oomNever = -1000

// residentMemory is as much of each queue's buffers as the kernel can have in use: its 128 requests of 128 KiB.
const residentMemory = 16 << 20

// protectMemory makes this process one that memory can be freed through. Each of the three is tried; the
// error joins what could not be had. It needs the process for itself, and may start its program anew.
//
//   - No thread waits for writing when it needs memory itself (PR_SET_IO_FLUSHER, Linux 5.6). That is a thread's
//     property, and threads have it from the one that makes them; those that the Go runtime has already made are not
//     to be reached. It survives execve, so the main thread takes it and begins again.
//   - The kernel kills others for their memory.
//   - Nothing of it is swapped out, or dropped and read again from its file. The program is read whole now;
//     other memory stays once it has been used, and residentMemory of each queue's buffers is used at the start.
//     (What the runtime and the buffers have reserved and never use costs nothing.)
func protectMemory(env *cli.Env) error {
	if !env.OwnProcess {
		return nil
	}
	var errs []error
	if err := becomeFlusher(); err != nil {
		errs = append(errs, fmt.Errorf("memory without waiting for writes (PR_SET_IO_FLUSHER): %w", err))
	}
	if err := lowerOOMScore("/proc/self/oom_score_adj"); err != nil {
		errs = append(errs, fmt.Errorf("not to be killed for memory: %w", err))
	}
	if err := unix.Mlockall(unix.MCL_CURRENT | unix.MCL_FUTURE | unix.MCL_ONFAULT); err != nil {
		errs = append(errs, fmt.Errorf("not to be swapped: %w", os.NewSyscallError("mlockall", err)))
	} else if err := populateFiles("/proc/self/maps"); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// becomeFlusher returns nil in a process all of whose threads have the property. On the main thread.
func becomeFlusher() error {
	on, err := unix.PrctlRetInt(unix.PR_GET_IO_FLUSHER, 0, 0, 0, 0)
	if err != nil {
		return os.NewSyscallError("prctl", err)
	}
	if on == 1 {
		return nil
	}
	if err := unix.Prctl(unix.PR_SET_IO_FLUSHER, 1, 0, 0, 0); err != nil {
		return os.NewSyscallError("prctl", err)
	}
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	return os.NewSyscallError("exec "+exe, syscall.Exec(exe, os.Args, os.Environ()))
}

// populateFiles reads in all files that are mapped: the program and its libraries. maps is proc(5)'s list.
func populateFiles(maps string) error {
	b, err := os.ReadFile(maps)
	if err != nil {
		return err
	}
	for line := range strings.SplitSeq(string(b), "\n") {
		f := strings.Fields(line) // from-to, permissions, offset, device, inode, path
		if len(f) < 6 || f[1][0] != 'r' || !strings.HasPrefix(f[5], "/") {
			continue
		}
		var from, to uintptr
		if _, err := fmt.Sscanf(f[0], "%x-%x", &from, &to); err != nil || to <= from {
			return fmt.Errorf("%s: %q: not understood", maps, line)
		}
		_, _, errno := unix.Syscall(unix.SYS_MADVISE, from, to-from, unix.MADV_POPULATE_READ)
		if errno == unix.EINVAL { // Linux before 5.14: begin to read it, and do not wait
			_, _, errno = unix.Syscall(unix.SYS_MADVISE, from, to-from, unix.MADV_WILLNEED)
		}
		if errno != 0 {
			return fmt.Errorf("read %s in: %w", f[5], errno)
		}
	}
	return nil
}

// lowerOOMScore writes oomNever to file unless it is there.
func lowerOOMScore(file string) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if v, err := strconv.Atoi(string(bytes.TrimSpace(b))); err == nil && v <= oomNever {
		return nil
	}
	return os.WriteFile(file, []byte(strconv.Itoa(oomNever)), 0)
}

// oneLine is err without the line breaks of errors.Join.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
