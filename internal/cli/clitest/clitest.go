// Package clitest runs commands in-process: output that can be waited for, signals
// without a process, golden files.
package clitest

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"rdblk/internal/cli"
	"rdblk/internal/envtest"
)

var update = flag.Bool("update", false, "write golden files instead of comparing with them")

// timeout is how long a test waits for what must come.
const timeout = envtest.Patience

// A Run is a command that runs.
type Run struct {
	Out, Err *envtest.Log
	signals  chan os.Signal
	done     chan struct{}
	code     int
}

// Start runs program(env) with args on a goroutine.
func Start(program func(*cli.Env) *cli.Program, environ []string, args ...string) *Run {
	r := &Run{Out: &envtest.Log{}, Err: &envtest.Log{}, signals: make(chan os.Signal, 8), done: make(chan struct{})}
	env := &cli.Env{Stdout: r.Out, Stderr: r.Err, Environ: environ, Signals: r.signals}
	go func() {
		defer close(r.done)
		r.code = program(env).Main(context.Background(), env, args)
	}()
	return r
}

// Signal delivers a signal to the command.
func (r *Run) Signal(s os.Signal) { r.signals <- s }

// Done is closed at the command's end.
func (r *Run) Done() <-chan struct{} { return r.done }

// Wait waits for the end and gives the exit code.
func (r *Run) Wait(t testing.TB) int {
	t.Helper()
	select {
	case <-r.done:
		return r.code
	case <-time.After(timeout):
		t.Fatalf("the command does not end; stdout:\n%s\nstderr:\n%s", r.Out, r.Err)
		return -1
	}
}

// Do runs a command to its end.
func Do(t testing.TB, program func(*cli.Env) *cli.Program, environ []string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	r := Start(program, environ, args...)
	code = r.Wait(t)
	return code, r.Out.String(), r.Err.String()
}

// Golden compares got with testdata/NAME, or writes it with -update.
func Golden(t testing.TB, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v (run the test with -update to make it)", err)
	}
	if got != string(want) {
		t.Errorf("differs from %s (if it is meant to, run the test with -update):\n%s", path, diff(string(want), got))
	}
}

// diff names the lines of one side only.
func diff(want, got string) string {
	var b strings.Builder
	count := map[string]int{}
	for l := range strings.SplitSeq(want, "\n") {
		count[l]++
	}
	for l := range strings.SplitSeq(got, "\n") {
		if count[l]--; count[l] < 0 {
			fmt.Fprintf(&b, "+ %s\n", l)
		}
	}
	for l := range strings.SplitSeq(got, "\n") {
		count[l] = 0
	}
	seen := map[string]int{}
	for l := range strings.SplitSeq(got, "\n") {
		seen[l]++
	}
	for l := range strings.SplitSeq(want, "\n") {
		if seen[l]--; seen[l] < 0 {
			fmt.Fprintf(&b, "- %s\n", l)
		}
	}
	return b.String()
}

// Dir makes a directory with a path short enough for sockets.
func Dir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "rdblk-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// Notifications listens as a service manager does and returns the variable to set
// and a function that waits for a state.
func Notifications(t testing.TB) (variable string, await func(state string)) {
	t.Helper()
	path := filepath.Join(Dir(t), "notify")
	ln, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	return "NOTIFY_SOCKET=" + path, func(state string) {
		t.Helper()
		ln.SetReadDeadline(time.Now().Add(timeout))
		b := make([]byte, 4096)
		for {
			n, err := ln.Read(b)
			if err != nil {
				t.Fatalf("the service manager was not told %q: %v", state, err)
			}
			for l := range strings.SplitSeq(string(b[:n]), "\n") {
				if l == state {
					return
				}
			}
		}
	}
}

// Eventually waits for cond.
func Eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(timeout); !cond(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("it does not come to pass: %s", what)
		}
	}
}
