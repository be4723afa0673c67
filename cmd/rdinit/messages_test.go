package main

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/blockdev"
	"rdblk/blockdev/blockdevtest"
	"rdblk/initiator"
	"rdblk/internal/cli/clitest"
	"rdblk/internal/envtest"
	"rdblk/internal/timeout"
	"rdblk/target"
)

// What can be put right is told apart from what never will be by trying again.
func TestRemedies(t *testing.T) {
	again := "try again"
	for err, want := range map[error]string{
		fmt.Errorf("x: %w", initiator.ErrCacheLost):                                  "attach again",
		fmt.Errorf("x: %w", initiator.ErrChanged):                                    "another disk in its place",
		fmt.Errorf("x: %w", initiator.ErrNoNamespace):                                "serve the namespace again",
		fmt.Errorf("x: %w", blockdev.ErrFlushFailed):                                 "trying again cannot help",
		error(&initiator.LostError{After: time.Second, Cause: initiator.ErrTimeout}): again,
		error(&timeout.Error{After: time.Second}):                                    again,
		fmt.Errorf("flush: %w", context.DeadlineExceeded):                            again,
		fmt.Errorf("something else"):                                                 "the target's log",
	} {
		got := remedy(err)
		if !strings.Contains(got, want) || (want != again && strings.Contains(got, again)) || !strings.Contains(got, "--force") {
			t.Errorf("%v: %s", err, got)
		}
	}
}

// A detach that has no answer says how long it waited and by which setting; what the advice is depends on
// whether waiting can help.
func TestDetachSaysWhatHelps(t *testing.T) {
	dir := clitest.Dir(t)
	run := filepath.Join(dir, "run")
	write := func(sock string) {
		c := nbdClient(t, sock)
		nbdWrite(t, c)
		c.Close()
	}
	detach := func(args ...string) (int, string) {
		code, _, errw := clitest.Do(t, newProgram, nil, append([]string{"detach", "disk", "--run-dir", run}, args...)...)
		if strings.Contains(errw, "deadline") || strings.Contains(errw, "initiator: ") {
			t.Errorf("not the operator's words: %s", errw)
		}
		return code, errw
	}

	addr, tg := startTarget(t, envtest.Port(t).String(), file(t))
	r, sock := attached(t, addr, dir, []string{"RDINIT_DETACH_TIMEOUT=500ms"})
	write(sock)
	tg.Close()
	clitest.Eventually(t, "the loss is seen and the client gone", func() bool {
		st := statusOf(t, run)
		return st.State == "reconnecting" && st.Clients == 0
	})
	if code, errw := detach(); code != 1 || !strings.Contains(errw, "the target at "+addr+": no answer within 400ms (detach_timeout is 500ms)") || !strings.Contains(errw, "bring the target back and try again") {
		t.Errorf("target away: exit %d, %s", code, errw)
	}
	startTarget(t, addr, file(t))
	clitest.Eventually(t, "the other disk is noticed", func() bool { return statusOf(t, run).Fault != "" })
	if code, errw := detach(); code != 1 || !strings.Contains(errw, "another disk in its place") || strings.Contains(errw, "bring the target back") {
		t.Errorf("another disk: exit %d, %s", code, errw)
	}
	c := nbdClient(t, sock)
	defer c.Close()
	clitest.Eventually(t, "the client counts", func() bool { return statusOf(t, run).Clients == 1 })
	code, errw := detach("--force")
	if code != 0 || !strings.Contains(errw, "1 connected NBD client of "+sock+" cut off") || !strings.Contains(errw, "may be lost") {
		t.Errorf("by force: exit %d, %s", code, errw)
	}
	for line := range strings.SplitSeq(r.Err.String(), "\n") {
		// A busy machine may need longer for the end of the connection than a tenth of detach_timeout: no repetition.
		if strings.Contains(line, "not in order") && strings.Contains(line, "not the one that was attached") {
			t.Errorf("the log repeats what the exit says:\n%s", line)
		}
	}
	r.Wait(t)
}

// attach --wait comes up when the target does, says once that it waits, and ends when it is told to.
func TestAttachWaitsForTheTarget(t *testing.T) {
	addr := envtest.Port(t).String()
	dir := clitest.Dir(t)
	args := []string{"attach", addr, "--wait", "1m", "--socket", filepath.Join(dir, "s"), "--run-dir", filepath.Join(dir, "run"), "--queues", "1"}
	r := clitest.Start(newProgram, nil, args...)
	r.Err.Await(t, `msg="cannot attach yet, trying again".*connection refused`)
	startTarget(t, addr, mem(t, "mem:1M"))
	r.Out.Await(t, "attached")
	if n := strings.Count(r.Err.String(), "cannot attach yet"); n != 1 {
		t.Errorf("said %d times:\n%s", n, r.Err)
	}
	r.Signal(unix.SIGTERM)
	if code := r.Wait(t); code != 0 {
		t.Errorf("exit %d: %s", code, r.Err)
	}

	args[1] = "127.0.0.1:1"
	r = clitest.Start(newProgram, nil, args...)
	r.Err.Await(t, `msg="cannot attach yet, trying again"`)
	r.Signal(unix.SIGTERM)
	if code := r.Wait(t); code != 1 || !strings.Contains(r.Err.String(), "stopped by a signal") {
		t.Errorf("exit %d: %s", code, r.Err)
	}

	// What does not pass by itself is not waited for.
	addr, _ = startTarget(t, "127.0.0.1:0", mem(t, "mem:1M"))
	args[1] = addr
	r = clitest.Start(newProgram, nil, append(args, "--nqn", "nqn.2026-11.io.rdblk:other")...)
	if code := r.Wait(t); code != 1 || strings.Contains(r.Err.String(), "cannot attach yet") {
		t.Errorf("exit %d: %s", code, r.Err)
	}
}

// An empty result is said to be one, where results are not.
func TestNothingAttached(t *testing.T) {
	dir := clitest.Dir(t)
	for _, command := range []string{"list", "status"} {
		code, out, errw := clitest.Do(t, newProgram, nil, command, "--run-dir", dir)
		if code != 0 || out != "" || errw != "rdinit: this user has nothing attached (looked in "+dir+")\n" {
			t.Errorf("%s: exit %d, %q, %q", command, code, out, errw)
		}
		code, out, errw = clitest.Do(t, newProgram, nil, command, "--run-dir", dir, "-o", "json")
		if code != 0 || out != "[]\n" || errw != "" {
			t.Errorf("%s -o json: exit %d, %q, %q", command, code, out, errw)
		}
	}
}

// What was cut to what there is room for is said.
func TestLimitsAreSaid(t *testing.T) {
	addr, _ := startTarget(t, "127.0.0.1:0", mem(t, "mem:1M"))
	code, out, errw := clitest.Do(t, newProgram, nil, "bench", addr, "--iodepth", "1000", "--depth", "16", "--queues", "1", "--runtime", "50ms", "-o", "json")
	var r benchResult
	if err := json.Unmarshal([]byte(out), &r); code != 0 || err != nil || r.Depth != 15 || !strings.Contains(errw, "15 are in flight and not the 1000 of --iodepth") {
		t.Errorf("exit %d, %v, %+v, %s", code, err, r, errw)
	}
	addr, _ = startTargetWith(t, target.Config{MaxQueuesPerController: 3}, "127.0.0.1:0", mem(t, "mem:1M"))
	code, _, errw = clitest.Do(t, newProgram, nil, "bench", addr, "--queues", "5", "--iodepth", "1", "--runtime", "50ms")
	if code != 0 || !strings.Contains(errw, `level=WARN msg="target grants fewer I/O queues than were asked for`) || !strings.Contains(errw, "queues=5 granted=3") {
		t.Errorf("exit %d, %s", code, errw)
	}
}

// A target that hangs holds up no end of an attachment that wrote nothing, or flushed what it wrote: there is
// nothing that its last flush could save. With an unflushed write the end is refused as before.
func TestDetachFromAHangingTarget(t *testing.T) {
	for name, dirty := range map[string]bool{"nothing written": false, "unflushed write": true} {
		t.Run(name, func(t *testing.T) {
			dir := clitest.Dir(t)
			run := filepath.Join(dir, "run")
			dev := blockdevtest.Delayed(file(t))
			gate := dev.Hold(blockdevtest.Match{Ops: []blockdev.Op{blockdev.OpFlush}})
			defer gate.Open()
			addr, _ := startTarget(t, "127.0.0.1:0", dev)
			r, sock := attached(t, addr, dir, []string{"RDINIT_DETACH_TIMEOUT=2s"})
			if dirty {
				c := nbdClient(t, sock)
				nbdWrite(t, c)
				c.Close()
				clitest.Eventually(t, "the client is gone", func() bool { return statusOf(t, run).Clients == 0 })
			}
			code, _, errw := clitest.Do(t, newProgram, nil, "detach", "disk", "--run-dir", run)
			if !dirty {
				if code != 0 {
					t.Errorf("exit %d, %s", code, errw)
				}
				if code := r.Wait(t); code != 0 || !strings.Contains(r.Err.String(), "which had nothing to make durable") {
					t.Errorf("attach: exit %d, %s", code, r.Err)
				}
				return
			}
			if code != 1 || !strings.Contains(errw, "still attached") {
				t.Errorf("exit %d, %s", code, errw)
			}
			if code, _, errw := clitest.Do(t, newProgram, nil, "detach", "disk", "--run-dir", run, "--force"); code != 0 || !strings.Contains(errw, "may be lost") {
				t.Errorf("by force: exit %d, %s", code, errw)
			}
			if code := r.Wait(t); code != 1 {
				t.Errorf("attach: exit %d", code)
			}
		})
	}
}
