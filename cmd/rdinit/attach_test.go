package main

import (
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"rdblk/blockdev"
	"rdblk/internal/cli/clitest"
	"rdblk/internal/envtest"
	"rdblk/internal/version"
	"rdblk/rdma/iwarp"
	"rdblk/target"

	"golang.org/x/sys/unix"
)

const testNQN = "nqn.2026-11.io.rdblk:test:disk"

// startTarget serves memory in this process and returns its address.
func startTarget(t *testing.T, at string, devs ...blockdev.Device) (string, *target.Target) {
	t.Helper()
	return startTargetWith(t, target.Config{}, at, devs...)
}

// startTargetWith does with settings of its own.
func startTargetWith(t *testing.T, cfg target.Config, at string, devs ...blockdev.Device) (string, *target.Target) {
	t.Helper()
	cfg.NQN, cfg.AllowAnyHost, cfg.Workers, cfg.Logger = testNQN, true, 1, slog.New(slog.DiscardHandler)
	tg, err := target.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tg.Close() })
	for _, d := range devs {
		if _, err := tg.AddNamespace(0, d); err != nil {
			t.Fatal(err)
		}
	}
	nic, err := iwarp.New(iwarp.Config{})
	if err != nil {
		t.Fatal(err)
	}
	a, err := tg.Listen(nic, netip.MustParseAddrPort(at))
	if err != nil {
		t.Fatal(err)
	}
	return a.String(), tg
}

func mem(t *testing.T, spec string) blockdev.Device {
	t.Helper()
	d, err := blockdev.Open(spec, blockdev.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// file is a store with a write cache.
func file(t *testing.T) blockdev.Device {
	t.Helper()
	f := filepath.Join(t.TempDir(), "disk.img")
	if err := errors.Join(os.WriteFile(f, nil, 0o600), os.Truncate(f, 64<<20)); err != nil {
		t.Fatal(err)
	}
	return mem(t, f)
}

func TestHelpTexts(t *testing.T) {
	for _, c := range []string{"", "discover", "attach", "detach", "list", "status", "bench", "check-config", "devices", "version"} {
		code, out, errw := clitest.Do(t, newProgram, nil, strings.Fields("help "+c)...)
		if code != 0 || errw != "" {
			t.Errorf("help %s: exit %d, %q", c, code, errw)
		}
		name := "help.txt"
		if c != "" {
			name = "help-" + c + ".txt"
		}
		clitest.Golden(t, name, out)
	}
}

func TestVersion(t *testing.T) {
	code, out, _ := clitest.Do(t, newProgram, nil, "version")
	if want := version.Line("rdinit") + "\nhost NQN " + thisHostNQN() + "\n"; code != 0 || out != want {
		t.Errorf("exit %d, %q, want %q", code, out, want)
	}
}

// What is wrong ends with 2 and says what to do; what fails ends with 1.
func TestRefusals(t *testing.T) {
	dir := clitest.Dir(t)
	addr, _ := startTarget(t, "127.0.0.1:0", mem(t, "mem:1M"), mem(t, "mem:2M"))
	nobody := envtest.Port(t).String()
	mute, err := net.Listen("tcp", "127.0.0.1:0") // its kernel takes connections, and that is all
	if err != nil {
		t.Fatal(err)
	}
	defer mute.Close()
	silent := mute.Addr().String()
	sock := filepath.Join(dir, "s")
	plain := filepath.Join(dir, "plain")
	os.WriteFile(plain, []byte("precious"), 0o600)
	taken := filepath.Join(dir, "taken")
	server, err := net.Listen("unix", taken)
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	for _, c := range []struct {
		args    string
		environ []string
		code    int
		want    []string
	}{
		{"attach", nil, 2, []string{"name the target: ADDR[:PORT]", "--socket PATH"}},
		{"attach --socket " + sock, nil, 2, []string{"name the target: ADDR[:PORT]"}},
		{"attach " + addr, nil, 2, []string{"--socket PATH"}},
		{"attach " + addr + " more --socket " + sock, nil, 2, []string{`unexpected argument "more"`}},
		{"attach " + addr + " --device /dev/sda", nil, 2, []string{"device: ", "neither auto nor /dev/nbdN"}},
		{"attach " + addr + " --device auto --socket " + sock, nil, 2, []string{"--device and --socket exclude each other"}},
		{"attach " + addr + " --provider magic --socket " + sock, nil, 2, []string{"provider: "}},
		{"attach " + addr + " --queues -1 --socket " + sock, nil, 2, []string{"queues: "}},
		{"attach " + addr + " --depth 1 --socket " + sock, nil, 2, []string{"depth: "}},
		{"attach " + addr + " --socket " + sock, []string{"RDINIT_DEPHT=3"}, 2, []string{"RDINIT_DEPHT: no such setting"}},
		{"attach " + nobody + " --socket " + sock, nil, 1, []string{
			"ask the discovery service at " + nobody + " (iwarp): connection refused (nothing listens there: is rdtarget running on that machine, and is the port right?)"}},
		{"attach " + nobody + " --nqn " + testNQN + " --socket " + sock, nil, 1, []string{"connect to " + nobody + " (iwarp): connection refused (nothing listens there"}},
		{"attach " + nobody + " --wait 300ms --socket " + sock, nil, 1, []string{"connection refused", "this went on for 300ms (wait)"}},
		{"attach " + addr + " --socket " + sock, nil, 1, []string{"namespaces 1 (1 MiB), 2 (2 MiB)", "--nsid"}},
		{"attach " + addr + " --nsid 7 --socket " + sock, nil, 1, []string{"namespace 7", "no such namespace; it has 1 (1 MiB), 2 (2 MiB): choose with --nsid"}},
		{"attach " + addr + " --nqn nqn.2026-11.io.rdblk:other --nsid 1 --socket " + sock, nil, 1, []string{addr + ` has no subsystem "nqn.2026-11.io.rdblk:other"`, "what it offers this host is " + testNQN, "--nqn"}},
		{"attach " + addr + " --nsid 1 --socket " + plain, nil, 1, []string{"exists and is no socket but a file; remove it or choose another path"}},
		{"attach " + addr + " --nsid 1 --socket " + dir, nil, 1, []string{"no socket but a directory"}},
		{"attach " + addr + " --nsid 1 --socket " + taken, nil, 1, []string{"in use by another server (process " + strconv.Itoa(os.Getpid()), "choose another path"}},
		{"attach " + addr + " --nsid 1 --socket /etc/hostname/s", nil, 1, []string{"not a directory (its directory must exist"}},
		{"attach " + addr + " --nsid 1 --socket /nonexistent/s", nil, 1, []string{"no such file or directory (its directory must exist"}},
		{"attach " + addr + " --nqn foo --socket " + sock, nil, 2, []string{`nqn: "foo" is no NQN`, "rdinit discover"}},
		{"attach " + addr + " --host-nqn foo --socket " + sock, nil, 2, []string{`host_nqn: "foo" is no NQN`, "rdinit version"}},
		{"attach " + addr + " --loss-timeout 5 --socket " + sock, nil, 2, []string{"--loss-timeout: 5 has no unit", "10s"}},
		{"attach " + addr + " --queues x --socket " + sock, nil, 2, []string{`--queues: "x" is no whole number`}},
		{"attach " + addr + " --queues 2000 --socket " + sock, nil, 2, []string{"queues: 2000 is outside 0 to 1024"}},
		{"attach " + addr + " --http 15021 --socket " + sock, nil, 2, []string{`http: "15021" is no ADDR:PORT`, "127.0.0.1:15021"}},
		{"attach " + addr + " --http " + addr + " --nsid 1 --socket " + sock + " --run-dir " + filepath.Join(dir, "r"), nil, 1, []string{"http endpoint " + addr + ": address already in use", "--http"}},
		{"attach " + addr + " --http 192.0.2.1:1 --nsid 1 --socket " + sock + " --run-dir " + filepath.Join(dir, "r"), nil, 1, []string{"cannot assign requested address", "127.0.0.1", "--http"}},
		{"attach " + addr + " --trace t.log --socket " + sock, nil, 2, []string{`unexpected argument "t.log"`, "--trace=t.log"}},
		{"attach --trace " + nobody + " --socket " + sock, nil, 1, []string{"connection refused"}},
		{"attach " + addr + " --pprof --socket " + sock, nil, 2, []string{"pprof: there is no HTTP endpoint", "127.0.0.1:9421"}},
		{"attach " + addr + " --host-nqn nqn.2014-08.org.nvmexpress:uuid:1 --socket " + sock, nil, 2, []string{"host_nqn: ", "is no UUID", "rdinit version"}},
		{addr, nil, 2, []string{"did you mean 'rdinit attach " + addr + "'?"}},
		{"attach " + silent + " --connect-timeout 2s --socket " + sock, nil, 1, []string{
			"no answer within 2s (connect_timeout): the peer took the connection and sent no reply (is it rdtarget that listens there, and not stopped?)"}},
		{"attach nowhere.invalid --socket " + sock, nil, 1, []string{`look up "nowhere.invalid": `, "is the name right"}},
		{"attach " + addr + " --wiat 3s --socket " + sock, nil, 2, []string{"unknown flag: --wiat (did you mean --wait?)"}},
		{"attach " + addr + " --nsid 1 --run-dir " + plain + " --socket " + sock, nil, 1, []string{"--run-dir"}},
		{"discover", nil, 2, []string{"name the target"}},
		{"discover " + nobody, nil, 1, []string{"refused"}},
		{"detach", nil, 2, []string{"name one attachment"}},
		{"detach x --run-dir " + dir, nil, 1, []string{`"x": nothing is attached`}},
		{"list more", nil, 2, []string{"unexpected argument"}},
		{"status -o xml", nil, 2, []string{"neither text nor json"}},
		{"check-config", nil, 2, []string{"name one file"}},
		{"check-config a b", nil, 2, []string{"name one file"}},
		{"bench " + addr + " --nsid 1 --rw sideways", nil, 2, []string{"none of read, write, randread, randwrite"}},
		{"bench " + addr + " --nsid 1 --rw randwrite", nil, 2, []string{"destroys", "--destroy-data"}},
		{"bench " + addr + " --nsid 1 --bs 1000", nil, 2, []string{"multiple of the device's block size"}},
		{"bench " + addr + " --nsid 1 --bs 64M", nil, 2, []string{"no room"}},
	} {
		code, out, errw := clitest.Do(t, newProgram, c.environ, strings.Fields(c.args)...)
		if code != c.code || out != "" {
			t.Errorf("%s: exit %d, want %d; stdout %q, stderr %q", c.args, code, c.code, out, errw)
		}
		for _, w := range c.want {
			if !strings.Contains(errw, w) {
				t.Errorf("%s: no %q in\n%s", c.args, w, errw)
			}
		}
		for line := range strings.SplitSeq(errw, "\n") {
			if strings.Contains(line, "cannot attach yet") { // a line of the log, before the one that counts
				continue
			}
			for _, w := range []string{nobody, "deadline", "strconv", "initiator: ", "nbd: ", "rdma: ", "dial tcp", "listen tcp"} {
				if n := strings.Count(line, w); n > 1 || n == 1 && w != nobody {
					t.Errorf("%s: %d times %q in\n%s", c.args, n, w, line)
				}
			}
		}
	}
	if b, err := os.ReadFile(plain); string(b) != "precious" {
		t.Errorf("a file in the way of the socket: %q, %v", b, err)
	}
	if _, err := os.Lstat(sock); err == nil {
		t.Error("a socket is left after failed attachments")
	}
}

func TestDiscover(t *testing.T) {
	addr, _ := startTarget(t, "127.0.0.1:0", mem(t, "mem:1M"))
	ip, port, _ := strings.Cut(addr, ":")
	code, out, errw := clitest.Do(t, newProgram, nil, "discover", addr)
	if want := "TRANSPORT  ADDRESS    PORT   NQN\nrdma       " + ip + "  " + port + "  " + testNQN + "\n"; code != 0 || out != want || errw != "" {
		t.Errorf("exit %d, %q, %q; want %q", code, out, errw, want)
	}
	_, out, _ = clitest.Do(t, newProgram, nil, "discover", addr, "-o", "json")
	var list []discovered
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		t.Fatal(err)
	}
	found := false
	for _, d := range list {
		found = found || d.NQN == testNQN && d.Port == port && d.Address == ip && d.Transport == "rdma"
	}
	if !found {
		t.Errorf("%s not in %s", testNQN, out)
	}
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	r, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(b)
}

func statusOf(t *testing.T, dir string) report {
	t.Helper()
	code, out, errw := clitest.Do(t, newProgram, nil, "status", "--run-dir", dir, "-o", "json")
	var list []report
	if err := json.Unmarshal([]byte(out), &list); code != 0 || err != nil || len(list) != 1 {
		t.Fatalf("status: exit %d, %v, %q, %q", code, err, out, errw)
	}
	return list[0]
}

func attached(t *testing.T, addr, dir string, environ []string, flags ...string) (*clitest.Run, string) {
	t.Helper()
	sock := filepath.Join(dir, "disk.sock")
	r := clitest.Start(newProgram, environ, append([]string{"attach", addr, "--socket", sock, "--run-dir", filepath.Join(dir, "run"), "--queues", "1"}, flags...)...)
	r.Out.Await(t, "(?s)attached.*\n")
	return r, sock
}

func TestAttachFromStartToEnd(t *testing.T) {
	addr, _ := startTarget(t, "127.0.0.1:0", mem(t, "mem:64M"))
	before := runtime.NumGoroutine()
	dir := clitest.Dir(t)
	run := filepath.Join(dir, "run")
	notify, await := clitest.Notifications(t)
	r, sock := attached(t, addr, dir, []string{notify}, "--http", "127.0.0.1:0")
	want := "rdinit: attached " + testNQN + " namespace 1 at " + addr + " (iwarp), 64 MiB, as disk: nbd+unix:///?socket=" + sock + "\n"
	if got := r.Out.String(); got != want {
		t.Errorf("ready line %q, want %q", got, want)
	}
	await("READY=1")
	if fi, err := os.Stat(sock); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("socket %v, %v", fi, err)
	}

	st := statusOf(t, run)
	if st.Name != "disk" || st.State != "live" || st.NQN != testNQN || st.NSID != 1 || st.Address != addr || st.Size != 64<<20 ||
		st.BlockSize != 512 || st.Socket != sock || st.Queues != 1 || st.PID != os.Getpid() {
		t.Errorf("status %+v", st)
	}
	_, out, _ := clitest.Do(t, newProgram, nil, "list", "--run-dir", run)
	if !regexp.MustCompile(`(?m)^disk +live +64 MiB +1 +` + addr + ` +iwarp +` + sock + ` +` + testNQN + `$`).MatchString(out) {
		t.Errorf("list\n%s", out)
	}
	_, byList, _ := clitest.Do(t, newProgram, nil, "list", "--run-dir", run, "-o", "json")
	var keys []map[string]any
	if err := json.Unmarshal([]byte(byList), &keys); err != nil || len(keys) != 1 {
		t.Fatalf("list -o json: %v, %s", err, byList)
	}
	code, out, errw := clitest.Do(t, newProgram, nil, "status", "nope", "--run-dir", run)
	if code != 1 || !strings.Contains(errw, `"nope": no such attachment; there are: disk`) {
		t.Errorf("status of an unknown name: %d %q %q", code, out, errw)
	}
	_, out, _ = clitest.Do(t, newProgram, nil, "status", sock, "--run-dir", run)
	out = strings.NewReplacer(addr, "ADDR", sock, "SOCK", st.Version, "VERSION").Replace(out)
	out = regexp.MustCompile(`process .*`).ReplaceAllString(out, "process     PROCESS")
	clitest.Golden(t, "status.txt", out)

	url := "http://" + r.Err.Await(t, `msg="http endpoint" addr=(\S+)`)[1]
	if code, text := get(t, url+"/healthz"); code != 200 || text != "ok\n" {
		t.Errorf("healthz %d %q", code, text)
	}
	_, m := get(t, url+"/metrics")
	clitest.LintMetrics(t, m)
	m = strings.ReplaceAll(m, addr, "ADDR")
	m = regexp.MustCompile(`(rdinit_start_time_seconds) .*`).ReplaceAllString(m, "$1 TIME")
	m = regexp.MustCompile(`(rdinit_worker_sleeps_total\{.*\}|rdinit_rdma_(?:received|transmitted|direct)_bytes_total|rdinit_rdma_messages_total\{.*\}) .*`).ReplaceAllString(m, "$1 N")
	m = regexp.MustCompile(`rdinit_build_info\{.*\}`).ReplaceAllString(m, "rdinit_build_info{BUILD}")
	clitest.Golden(t, "metrics.txt", m)

	r.Signal(unix.SIGUSR1)
	r.Err.Await(t, `msg=state status=.*hostid`)

	r.Signal(unix.SIGTERM)
	await("STOPPING=1")
	if code := r.Wait(t); code != 0 {
		t.Errorf("exit %d: %s", code, r.Err)
	}
	if _, err := os.Lstat(sock); err == nil {
		t.Error("the socket is left")
	}
	if left, _ := os.ReadDir(run); len(left) > 0 {
		t.Errorf("left in the run directory: %v", left)
	}
	http.DefaultClient.CloseIdleConnections()
	clitest.Eventually(t, "the goroutines end", func() bool { return runtime.NumGoroutine() <= before })
}

// nbdClient connects and goes into transmission, as any client does.
func nbdClient(t *testing.T, sock string) net.Conn {
	t.Helper()
	c, err := net.Dial("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(20 * time.Second))
	read := func(n int) {
		t.Helper()
		if _, err := io.ReadFull(c, make([]byte, n)); err != nil {
			t.Fatal(err)
		}
	}
	read(18)
	c.Write([]byte{0, 0, 0, 3})                                 // fixed newstyle, no zeroes
	c.Write(append([]byte("IHAVEOPT"), 0, 0, 0, 1, 0, 0, 0, 0)) // NBD_OPT_EXPORT_NAME ""
	read(10)                                                    // size and flags
	return c
}

func nbdWrite(t *testing.T, c net.Conn) {
	t.Helper()
	header := append([]byte{0x25, 0x60, 0x95, 0x13, 0, 0, 0, 1}, make([]byte, 20)...) // WRITE at 0
	header[26] = 2                                                                    // of 512 bytes
	c.Write(append(header, make([]byte, 512)...))
	b := make([]byte, 16)
	if _, err := io.ReadFull(c, b); err != nil || b[0] != 0x67 || b[7] != 0 {
		t.Fatalf("reply %x, %v", b, err)
	}
}

func TestDetach(t *testing.T) {
	addr, _ := startTarget(t, "127.0.0.1:0", mem(t, "mem:64M"))
	dir := clitest.Dir(t)
	run := filepath.Join(dir, "run")

	r, sock := attached(t, addr, dir, nil)
	c := nbdClient(t, sock)
	clitest.Eventually(t, "the client counts", func() bool { return statusOf(t, run).Clients == 1 })
	code, _, errw := clitest.Do(t, newProgram, nil, "detach", "disk", "--run-dir", run)
	if code != 1 || !strings.Contains(errw, "1 NBD client still connected") || !strings.Contains(errw, "--force") {
		t.Errorf("in use: exit %d, %q", code, errw)
	}
	if st := statusOf(t, run); st.State != "live" {
		t.Errorf("after the refusal: %+v", st)
	}
	c.Close()
	clitest.Eventually(t, "the client is gone", func() bool { return statusOf(t, run).Clients == 0 })
	code, out, errw := clitest.Do(t, newProgram, nil, "detach", sock, "--run-dir", run)
	if code != 0 || out != "rdinit: detached disk\n" || errw != "" {
		t.Errorf("by socket: exit %d, %q, %q", code, out, errw)
	}
	if code := r.Wait(t); code != 0 {
		t.Errorf("attach ended with %d: %s", code, r.Err)
	}
	if _, err := os.Lstat(sock); err == nil {
		t.Error("the socket is left")
	}

	r, sock = attached(t, addr, dir, nil, "--name", "mine")
	nbdClient(t, sock)
	code, out, errw = clitest.Do(t, newProgram, nil, "detach", "mine", "--force", "--run-dir", run)
	if code != 0 || out != "rdinit: detached mine\n" {
		t.Errorf("by force: exit %d, %q, %q", code, out, errw)
	}
	if code := r.Wait(t); code != 0 {
		t.Errorf("attach ended with %d: %s", code, r.Err)
	}
}

// Nothing is called detached that may not be on stable storage.
func TestDetachWhileTheTargetIsAway(t *testing.T) {
	addr, tg := startTarget(t, envtest.Port(t).String(), file(t))
	dir := clitest.Dir(t)
	run := filepath.Join(dir, "run")
	environ := []string{"RDINIT_DETACH_TIMEOUT=500ms"}
	r, sock := attached(t, addr, dir, environ)
	c := nbdClient(t, sock)
	nbdWrite(t, c)
	c.Close()
	tg.Close()
	clitest.Eventually(t, "the loss is seen and the client gone", func() bool {
		st := statusOf(t, run)
		return st.State == "reconnecting" && st.Clients == 0
	})
	code, _, errw := clitest.Do(t, newProgram, nil, "detach", "disk", "--run-dir", run)
	if code != 1 || !strings.Contains(errw, "still attached") || !strings.Contains(errw, "--force") {
		t.Errorf("exit %d, %q", code, errw)
	}
	if st := statusOf(t, run); st.State != "reconnecting" || st.LastError == "" {
		t.Errorf("after the refusal: %+v", st)
	}
	code, _, errw = clitest.Do(t, newProgram, nil, "detach", "disk", "--force", "--run-dir", run)
	if code != 0 || !strings.Contains(errw, "may be lost") {
		t.Errorf("by force: exit %d, %q", code, errw)
	}
	if code := r.Wait(t); code != 1 {
		t.Errorf("attach ended with %d although something may be lost", code)
	}

	// A signal cannot be refused: it says what was lost by the exit code.
	addr, tg = startTarget(t, envtest.Port(t).String(), file(t))
	r, sock = attached(t, addr, dir, environ)
	c = nbdClient(t, sock)
	nbdWrite(t, c)
	c.Close()
	tg.Close()
	clitest.Eventually(t, "the loss is seen", func() bool { return statusOf(t, run).State == "reconnecting" })
	start := time.Now()
	r.Signal(unix.SIGTERM)
	if code := r.Wait(t); code != 1 || !strings.Contains(r.Err.String(), "may be lost") {
		t.Errorf("exit %d: %s", code, r.Err)
	}
	if d := time.Since(start); d > 10*time.Second {
		t.Errorf("it took %v", d)
	}

	// Without unflushed writes there is nothing to lose, and nobody has to force anything.
	addr, tg = startTarget(t, envtest.Port(t).String(), file(t))
	r, _ = attached(t, addr, dir, nil)
	tg.Close()
	clitest.Eventually(t, "the loss is seen", func() bool { return statusOf(t, run).State == "reconnecting" })
	if code, _, errw := clitest.Do(t, newProgram, nil, "detach", "disk", "--run-dir", run); code != 0 {
		t.Errorf("nothing unflushed: exit %d, %q", code, errw)
	}
	if code := r.Wait(t); code != 0 {
		t.Errorf("attach ended with %d: %s", code, r.Err)
	}
	if left, _ := os.ReadDir(run); len(left) > 0 {
		t.Errorf("left in the run directory: %v", left)
	}
}

func TestTargetComesBack(t *testing.T) {
	dev := mem(t, "mem:64M")
	addr, tg := startTarget(t, envtest.Port(t).String(), dev)
	dir := clitest.Dir(t)
	run := filepath.Join(dir, "run")
	r, _ := attached(t, addr, dir, nil, "--http", "127.0.0.1:0")
	url := "http://" + r.Err.Await(t, `msg="http endpoint" addr=(\S+)`)[1]
	tg.Close()
	clitest.Eventually(t, "the loss is seen", func() bool { return statusOf(t, run).State == "reconnecting" })
	if code, text := get(t, url+"/healthz"); code != 503 || !strings.HasPrefix(text, "reconnecting: ") {
		t.Errorf("healthz %d %q", code, text)
	}
	startTarget(t, addr, dev)
	clitest.Eventually(t, "it is live again", func() bool { return statusOf(t, run).State == "live" })
	if st := statusOf(t, run); st.Reconnects != 1 || st.LastError != "" {
		t.Errorf("status %+v", st)
	}
	if _, m := get(t, url+"/metrics"); !strings.Contains(m, "\nrdinit_reconnects_total 1\n") || !strings.Contains(m, `rdinit_session_state{state="live"} 1`) {
		t.Error("the reconnect is not in the metrics")
	}
	r.Signal(unix.SIGTERM)
	if code := r.Wait(t); code != 0 {
		t.Errorf("exit %d: %s", code, r.Err)
	}
}

// Giving up while it still tries to connect.
func TestSignalDuringConnect(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0") // accepts, and never answers
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	dir := clitest.Dir(t)
	r := clitest.Start(newProgram, nil, "attach", ln.Addr().String(), "--socket", filepath.Join(dir, "s"), "--run-dir", dir, "--nqn", testNQN)
	c, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	r.Signal(unix.SIGTERM)
	if code := r.Wait(t); code != 1 || !strings.Contains(r.Err.String(), "stopped by a signal (terminated)") {
		t.Errorf("exit %d: %s", code, r.Err)
	}
}

func TestBench(t *testing.T) {
	addr, _ := startTarget(t, "127.0.0.1:0", mem(t, "mem:64M"))
	for _, args := range []string{
		"--rw randread --bs 4k --iodepth 8 --queues 2",
		"--rw read --bs 128k --iodepth 4 --queues 2",
		"--rw randwrite --bs 4k --iodepth 8 --queues 1 --destroy-data",
		"--rw write --bs 1M --iodepth 2 --queues 1 --destroy-data",
	} {
		code, out, errw := clitest.Do(t, newProgram, nil, append([]string{"bench", addr, "--runtime", "200ms", "-o", "json"}, strings.Fields(args)...)...)
		var r benchResult
		if err := json.Unmarshal([]byte(out), &r); code != 0 || err != nil || errw != "" {
			t.Errorf("%s: exit %d, %v, %q, %q", args, code, err, out, errw)
			continue
		}
		l := r.Latency
		if r.Operations == 0 || r.Bytes != r.Operations*uint64(r.BS) || r.Seconds < 0.1 || r.Seconds > 5 ||
			l.P50 <= 0 || l.P50 > l.P99 || l.P99 > l.P999 || l.P999 > l.Max {
			t.Errorf("%s: %+v", args, r)
		}
	}
	code, out, _ := clitest.Do(t, newProgram, nil, "bench", addr, "--runtime", "100ms", "--queues", "1")
	if code != 0 || !regexp.MustCompile(`^`+testNQN+` namespace 1: randread 4 KiB, 1 queue, depth 32 each, \d+\.\d s\n  \d+ IOPS, [\d.]+ MiB/s\n  latency in µs: mean .*, p50 .*, p99 .*, p99\.9 .*, max .*\n$`).MatchString(out) {
		t.Errorf("exit %d\n%s", code, out)
	}
}

// A trace file is bounded: it becomes FILE.1, and lines go on in a new one, whole and in order.
func TestTraceFileIsBounded(t *testing.T) {
	addr, _ := startTarget(t, "127.0.0.1:0", mem(t, "mem:1M"))
	file := filepath.Join(clitest.Dir(t), "trace")
	fi := func(path string) int64 {
		if st, err := os.Stat(path); err == nil {
			return st.Size()
		}
		return 0
	}
	for i := 0; fi(file+".1") == 0; i++ {
		if i == 200 {
			t.Fatalf("there is no second file; the first has %d bytes", fi(file))
		}
		code, _, errw := clitest.Do(t, newProgram, []string{"RDINIT_TRACE_SIZE=1M"}, "bench", addr, "--runtime", "200ms", "--queues", "1", "--trace="+file)
		if code != 0 || errw != "" {
			t.Fatalf("exit %d, %s", code, errw)
		}
		if n := fi(file); n == 0 || n > 1<<20 {
			t.Fatalf("%d bytes", n)
		}
	}
	var last string
	for _, f := range []string{file + ".1", file} {
		b, err := os.ReadFile(f)
		if err != nil || len(b) > 1<<20 {
			t.Fatalf("%s: %d bytes, %v", f, len(b), err)
		}
		for l := range strings.Lines(string(b)) {
			if !regexp.MustCompile(`^\d\d:\d\d:\d\d\.\d{6} .*\n$`).MatchString(l) {
				t.Fatalf("%s: line %q", f, l)
			}
			if at := l[:15]; at < last && !strings.HasPrefix(last, "23:59") {
				t.Fatalf("%s: %s after %s", f, at, last)
			} else {
				last = at
			}
		}
	}
}

// Writes really arrive, and all over the device.
func TestBenchWritesWhatItSays(t *testing.T) {
	dev := mem(t, "mem:1M")
	addr, _ := startTarget(t, "127.0.0.1:0", dev)
	var missing []int
	for _, span := range []string{"300ms", "3s", "30s"} { // how far it gets is up to the machine
		if code, _, errw := clitest.Do(t, newProgram, nil, "bench", addr, "--rw", "write", "--bs", "64k", "--iodepth", "2", "--queues", "1", "--runtime", span, "--destroy-data"); code != 0 {
			t.Fatal(errw)
		}
		b := make([]byte, 1<<20)
		if err := dev.ReadAt(b, 0); err != nil {
			t.Fatal(err)
		}
		missing = nil
		for off := 0; off < len(b); off += 64 << 10 {
			if b[off+1] == 0 && b[off+2] == 0 {
				missing = append(missing, off)
			}
		}
		if missing == nil {
			return
		}
	}
	t.Errorf("nothing was written at %d", missing)
}

func TestBenchAgainstALostTarget(t *testing.T) {
	addr, tg := startTarget(t, envtest.Port(t).String(), mem(t, "mem:1M"))
	r := clitest.Start(newProgram, []string{"RDINIT_LOSS_TIMEOUT=300ms", "RDINIT_DETACH_TIMEOUT=300ms"}, "bench", addr, "--runtime", "20s", "--queues", "1", "--log-level", "info")
	r.Err.Await(t, "msg=connected")
	tg.Close()
	if code := r.Wait(t); code != 1 || !strings.Contains(r.Err.String(), "lost") {
		t.Errorf("exit %d: %s", code, r.Err)
	}
}
