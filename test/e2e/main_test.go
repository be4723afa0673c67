// Package e2e drives the two programs as their users do: processes, sockets,
// signals, and other people's clients. Traffic stays on this machine.
package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"rdblk/internal/envtest"
)

// patience is how long a test waits for what must come. It is long because the
// machine may be busy; nothing waits for it in vain when all is well.
const patience = 60 * time.Second

var bin string // directory of the programs

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "rdblk-bin-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	args := []string{"build", "-o", dir}
	if raceDetector { // then the programs are looked at too
		args = append(args, "-race")
		os.Setenv("GORACE", "halt_on_error=1 exitcode=66")
	}
	cmd := exec.Command("go", append(args, "rdblk/cmd/rdtarget", "rdblk/cmd/rdinit")...)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "build:", err)
		return 1
	}
	bin = dir
	return m.Run()
}

// A process that a test started. It is ended with the test, by its pid.
type process struct {
	*exec.Cmd
	name  string
	ready string // its first line
	log   *envtest.Log
	done  chan struct{}
}

// start runs a program and waits for its ready line. prefix is put before it (ip netns exec …).
func start(t testing.TB, prefix []string, name string, args ...string) *process {
	t.Helper()
	argv := append(append(append([]string(nil), prefix...), filepath.Join(bin, name)), args...)
	p := &process{Cmd: exec.Command(argv[0], argv[1:]...), name: name, log: &envtest.Log{}, done: make(chan struct{})}
	out, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.Stderr = p.log
	p.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	// Pdeathsig belongs to the thread that forks: the runtime's threads outlive the test.
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	lines := make(chan string, 1)
	go func() {
		r := bufio.NewReader(out)
		line, _ := r.ReadString('\n')
		lines <- line
		io.Copy(io.Discard, r)
		p.Wait()
		close(p.done)
	}()
	t.Cleanup(func() {
		p.Process.Kill()
		<-p.done
		if strings.Contains(p.log.String(), "DATA RACE") {
			t.Errorf("%s: data race", name)
		}
		if t.Failed() {
			l := p.log.String()
			t.Logf("%s %s said:\n%s", name, strings.Join(args, " "), l[max(0, len(l)-4000):])
		}
	})
	select {
	case p.ready = <-lines:
	case <-time.After(patience):
	}
	if p.ready == "" {
		t.Fatalf("%s %s is not ready: %s", name, strings.Join(args, " "), p.log)
	}
	return p
}

// end sends a signal and waits for the end; it returns the exit code and how long that took.
func (p *process) end(t testing.TB, sig os.Signal) (int, time.Duration) {
	t.Helper()
	begin := time.Now()
	if err := p.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.done:
	case <-time.After(patience):
		t.Fatalf("%s does not end on %v", p.name, sig)
	}
	return p.ProcessState.ExitCode(), time.Since(begin)
}

func (p *process) kill(t testing.TB) {
	t.Helper()
	p.end(t, syscall.SIGKILL)
}

// rss is the resident memory in bytes.
func (p *process) rss(t testing.TB) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`VmRSS:\s+(\d+) kB`).FindSubmatch(b)
	if m == nil {
		t.Fatalf("no VmRSS in\n%s", b)
	}
	n, _ := strconv.ParseInt(string(m[1]), 10, 64)
	return n << 10
}

// cpu is the processor time that it has used.
func (p *process) cpu(t testing.TB) time.Duration {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+2:]))
	user, _ := strconv.Atoi(f[11])
	system, _ := strconv.Atoi(f[12])
	return time.Duration(user+system) * 10 * time.Millisecond // USER_HZ is 100
}

// fds is the number of open descriptors.
func (p *process) fds(t testing.TB) int {
	t.Helper()
	l, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(l)
}

// do runs a program to its end.
func do(t testing.TB, name string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	cmd := exec.Command(filepath.Join(bin, name), args...)
	var out, errw bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errw
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(patience, func() { cmd.Process.Kill() })
	defer timer.Stop()
	err := cmd.Wait()
	var ee *exec.ExitError
	if err != nil && !errors.As(err, &ee) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errw.String()
}

// A world is a directory with a disk, and what runs on it.
type world struct {
	t    *testing.T
	dir  string
	run  string // control sockets
	disk string
	addr string // of the target; it stays the target's while that is away
	http string // of the target's endpoint
}

func newWorld(t *testing.T, size int64) *world {
	t.Helper()
	dir, err := os.MkdirTemp("", "rdblk-e2e-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	w := &world{t: t, dir: dir, run: filepath.Join(dir, "run"), disk: filepath.Join(dir, "disk.img"), addr: envtest.Port(t).String()}
	f, err := os.Create(w.disk)
	if err == nil {
		err = errors.Join(f.Truncate(size), f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	return w
}

var servingLine = regexp.MustCompile(`^rdtarget: serving (\S+) on (\S+?),? `)

// serve starts rdtarget on the disk, the second time at the address of the first.
func (w *world) serve(flags ...string) *process {
	w.t.Helper()
	args := append([]string{"serve", "--listen", w.addr, "--http", "127.0.0.1:0", "--run-dir", w.run, "--name", "target"}, flags...)
	if !strings.Contains(strings.Join(flags, " "), "--config") {
		args = append(args, w.disk)
	}
	p := start(w.t, nil, "rdtarget", args...)
	m := servingLine.FindStringSubmatch(p.ready)
	if m == nil {
		w.t.Fatalf("ready line %q", p.ready)
	}
	w.addr = m[2]
	w.http = httpOf(w.t, p)
	return p
}

func httpOf(t testing.TB, p *process) string {
	t.Helper()
	return "http://" + p.log.Await(t, `msg="http endpoint" addr=(\S+)`)[1]
}

// An attachment is a running rdinit attach.
type attachment struct {
	*process
	w    *world
	name string
	sock string
	http string
}

func (w *world) attach(name string, flags ...string) *attachment {
	w.t.Helper()
	a := &attachment{w: w, name: name, sock: filepath.Join(w.dir, name+".sock")}
	a.process = start(w.t, nil, "rdinit", append([]string{"attach", w.addr, "--socket", a.sock, "--http", "127.0.0.1:0", "--run-dir", w.run, "--name", name}, flags...)...)
	a.http = httpOf(w.t, a.process)
	return a
}

func (a *attachment) uri() string { return "nbd+unix:///?socket=" + a.sock }

// A report is what rdinit status -o json prints, as far as the tests need it.
type report struct {
	Name, State  string
	PID          int
	Size         int64
	Clients      int
	Requests     int
	Waiting      int
	Reconnects   int
	Errors       int
	Unflushed    bool
	ReadOps      int    `json:"read_ops"`
	WriteOps     int    `json:"write_ops"`
	FlushOps     int    `json:"flush_ops"`
	ReadBytes    int64  `json:"read_bytes"`
	WrittenBytes int64  `json:"written_bytes"`
	FlushFault   string `json:"flush_fault"`
}

func (a *attachment) status() report {
	a.w.t.Helper()
	code, out, errw := do(a.w.t, "rdinit", "status", a.name, "--run-dir", a.w.run, "-o", "json")
	var l []report
	if err := json.Unmarshal([]byte(out), &l); code != 0 || err != nil || len(l) != 1 {
		a.w.t.Fatalf("status: exit %d, %v, %q, %q", code, err, out, errw)
	}
	return l[0]
}

// eventually waits for cond.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); !cond(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("it does not come to pass: %s", what)
		}
	}
}

// metrics reads an endpoint's metrics: name with labels → value.
func metrics(t testing.TB, url string) map[string]float64 {
	t.Helper()
	r, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	m := map[string]float64{}
	for s := bufio.NewScanner(r.Body); s.Scan(); {
		if l := s.Text(); l != "" && l[0] != '#' {
			i := strings.LastIndexByte(l, ' ')
			v, err := strconv.ParseFloat(l[i+1:], 64)
			if err != nil {
				t.Fatalf("%q: %v", l, err)
			}
			m[l[:i]] = v
		}
	}
	if len(m) == 0 {
		t.Fatalf("no metrics at %s", url)
	}
	return m
}

// A load is fio that writes, reads everything back and compares, again and again until it is waited for: how far the
// test has come by the end of one run is up to the machine.
type load struct {
	args []string
	out  envtest.Log
	last chan struct{} // closed when no further run is wanted
	done chan error
}

func underLoad(t testing.TB, args ...string) *load {
	l := &load{args: args, last: make(chan struct{}), done: make(chan error, 1)}
	dir := t.(*testing.T).TempDir()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	go func() {
		for seed := 1; ; seed++ {
			l.out.Reset()
			// Other data than the run before, which is no proof of this one's.
			c := exec.CommandContext(ctx, "fio", append(args[:len(args):len(args)], "--randseed="+strconv.Itoa(seed))...)
			c.Stdout, c.Stderr, c.Dir = &l.out, &l.out, dir
			if err := c.Run(); err != nil {
				l.done <- err
				return
			}
			select {
			case <-l.last:
				l.done <- nil
				return
			default:
			}
		}
	}()
	return l
}

// wait lets the run that goes on be the last. Every one of them must have been without an error.
func (l *load) wait(t testing.TB) {
	t.Helper()
	close(l.last)
	select {
	case err := <-l.done:
		if err != nil {
			t.Fatalf("fio %s: %v\n%s", strings.Join(l.args, " "), err, &l.out)
		}
	case <-time.After(2 * patience):
		t.Fatalf("fio %s does not end\n%s", strings.Join(l.args, " "), &l.out)
	}
}

// A command in the background whose output counts when it has ended.
type background struct {
	*exec.Cmd
	out  envtest.Log
	done chan error
}

func inBackground(t testing.TB, args ...string) *background {
	t.Helper()
	b := &background{Cmd: exec.Command(args[0], args[1:]...), done: make(chan error, 1)}
	b.Stdout, b.Stderr = &b.out, &b.out
	b.Dir = t.(*testing.T).TempDir()
	if err := b.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { b.done <- b.Wait() }()
	t.Cleanup(func() { b.Process.Kill() })
	return b
}

func (b *background) wait(t testing.TB) string {
	t.Helper()
	select {
	case err := <-b.done:
		if err != nil {
			t.Fatalf("%s: %v\n%s", strings.Join(b.Args, " "), err, &b.out)
		}
	case <-time.After(2 * patience):
		t.Fatalf("%s does not end\n%s", strings.Join(b.Args, " "), &b.out)
	}
	return b.out.String()
}
