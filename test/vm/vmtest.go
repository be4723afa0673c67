package vmtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Exit statuses of test/vm/run that are not the program's own.
const (
	statusTimeLimit = 124
	statusDied      = 125
	statusCannot    = 77
)

// defaultTimeout covers boot and a script of a few file systems on a busy machine.
const defaultTimeout = 5 * time.Minute

// Config says what to run. Only Program is required.
type Config struct {
	Program string        // path, absolute or relative to the working directory; or a command's name
	Args    []string      //
	Env     []string      // NAME=VALUE, in addition to what test/vm/run sets
	Dir     string        // working directory inside; default: the caller's
	Show    []string      // directories below /tmp or /run that must be visible inside
	Peer    string        // program of a second machine, joined by an Ethernet wire
	Timeout time.Duration // of the machine, boot included; default 5 minutes, at least 20 s
	Memory  int           // MiB; default 3072
	PeerMem int           // of the second machine; default Memory
	CPUs    int           // default 2
}

// A Result is what a machine left behind.
type Result struct {
	Output string // what the program printed
	Dir    string // results directory ($VM_OUT inside), removed with the test
}

// Long reports whether the long forms of tests are asked for, RDBLK_VM_LONG=1: more fabrics, rounds and sizes than
// it takes to show a claim. test/vm/run tells the scripts.
func Long() bool { return os.Getenv("RDBLK_VM_LONG") == "1" }

// Dir returns the directory of this package's scripts.
func Dir() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Dir(file)
}

var setup = sync.OnceValues(func() (string, error) {
	out, err := exec.Command(filepath.Join(Dir(), "setup")).CombinedOutput()
	return string(out), err
})

// Require prepares the machine. It skips the test if that is impossible here, unless CI=true, and
// fails it if it went wrong.
func Require(t testing.TB) {
	t.Helper()
	out, err := setup()
	if err == nil {
		return
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == statusCannot && os.Getenv("CI") != "true" {
		t.Skipf("no virtual machine here: %s", strings.TrimSpace(out))
	}
	t.Fatalf("test/vm/setup: %v\n%s", err, out)
}

// Run runs a program in a machine of its own and fails the test unless it exits with 0.
// It blocks until the machine has ended; before that it may wait for a slot.
func Run(t testing.TB, c Config) Result {
	t.Helper()
	r, err := run(t, c)
	if err != nil {
		t.Fatalf("%s in the virtual machine: %v\n%s", c.Program, err, r.Output)
	}
	t.Logf("%s:\n%s", filepath.Base(c.Program), r.Output)
	return r
}

func run(t testing.TB, c Config) (Result, error) {
	t.Helper()
	Require(t)
	if c.Timeout == 0 {
		c.Timeout = defaultTimeout
	}
	r := Result{Dir: t.TempDir()}
	args := []string{"--out", r.Dir, "--timeout", strconv.Itoa(int(c.Timeout / time.Second))}
	if c.Memory != 0 {
		args = append(args, "-m", strconv.Itoa(c.Memory))
	}
	if c.PeerMem != 0 {
		args = append(args, "--peer-m", strconv.Itoa(c.PeerMem))
	}
	if c.CPUs != 0 {
		args = append(args, "-c", strconv.Itoa(c.CPUs))
	}
	if c.Dir != "" {
		args = append(args, "--cwd", c.Dir)
	}
	if c.Peer != "" {
		args = append(args, "--peer", c.Peer)
	}
	for _, s := range c.Show {
		args = append(args, "--show", s)
	}
	for _, e := range c.Env {
		args = append(args, "--env", e)
	}
	args = append(append(args, "--", c.Program), c.Args...)
	// The test's context ends before its cleanups: whatever ends the test ends the machine.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(Dir(), "run"), args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // it ends its qemu
	cmd.WaitDelay = 20 * time.Second
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	r.Output = out.String()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		switch exit.ExitCode() {
		case statusTimeLimit:
			err = fmt.Errorf("not done after %v: %w", c.Timeout, err)
		case statusDied:
			err = fmt.Errorf("the machine died: %w", err)
		}
	}
	return r, err
}

// Build compiles a command of this module outside the machine and returns the program's path, which
// Run makes visible inside. CGO_ENABLED etc. are taken from the environment. What is built once serves
// all tests of a process; [Clean] removes it.
func Build(t testing.TB, pkg string) string {
	t.Helper()
	return compile(t, pkg, "build")
}

// BuildTests compiles a package's tests to a program ("go test -c"). Run it with Dir set to the
// package's directory if the tests read testdata.
func BuildTests(t testing.TB, pkg string) string {
	t.Helper()
	return compile(t, pkg, "test", "-c")
}

// built is what compile has made.
var built struct {
	sync.Mutex
	dir  string
	made map[string]string // how and package: path
}

// Clean removes what Build and BuildTests have made.
func Clean() {
	built.Lock()
	defer built.Unlock()
	os.RemoveAll(built.dir)
	built.dir, built.made = "", nil
}

func compile(t testing.TB, pkg string, how ...string) string {
	t.Helper()
	built.Lock() // also while it compiles: one compiler has all processors already
	defer built.Unlock()
	key := fmt.Sprint(how, pkg)
	if out, ok := built.made[key]; ok {
		return out
	}
	if built.dir == "" {
		dir, err := os.MkdirTemp("", "rdblk-vmtest")
		if err != nil {
			t.Fatal(err)
		}
		built.dir, built.made = dir, map[string]string{}
	}
	out := filepath.Join(built.dir, filepath.Base(pkg))
	if how[0] == "test" {
		out += ".test"
	}
	cmd := exec.Command("go", append(how, "-o", out, pkg)...)
	cmd.Dir = filepath.Join(Dir(), "..", "..")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go %s %s: %v\n%s", strings.Join(how, " "), pkg, err, text)
	}
	built.made[key] = out
	return out
}
