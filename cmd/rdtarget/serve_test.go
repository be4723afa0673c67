package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"rdblk/blockdev"
	"rdblk/internal/cli/clitest"
	"rdblk/internal/losses"
	"rdblk/internal/timeout"
	"rdblk/internal/version"

	"golang.org/x/sys/unix"
)

func TestHelpTexts(t *testing.T) {
	for _, c := range []string{"", "serve", "check-config", "status", "devices", "version"} {
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
	for _, arg := range []string{"version", "--version"} {
		code, out, _ := clitest.Do(t, newProgram, nil, arg)
		if want := version.Line("rdtarget") + "\n"; code != 0 || out != want {
			t.Errorf("%s: exit %d, %q, want %q", arg, code, out, want)
		}
	}
}

func diskFile(t *testing.T, size int64) string {
	t.Helper()
	p := filepath.Join(t.TempDir(), "disk.img")
	f, err := os.Create(p)
	if err == nil {
		err = f.Truncate(size)
		f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// What is wrong ends with 2 and says what to do; what fails ends with 1.
func TestServeRefusals(t *testing.T) {
	dir := clitest.Dir(t)
	disk := diskFile(t, 1<<20)
	cfg := filepath.Join(dir, "c.yaml")
	os.WriteFile(cfg, []byte("listne: [127.0.0.1]\nlog: {level: loud}\n"), 0o600)
	other, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	busy := other.Addr().String()
	for _, c := range []struct {
		args    string
		environ []string
		code    int
		want    []string
	}{
		{"serve", nil, 2, []string{"there is nothing to serve", "See 'rdtarget serve --help'"}},
		{"serve --nope " + disk, nil, 2, []string{"unknown flag: --nope"}},
		{"serve --listen 0.0.0.0:0 " + disk, nil, 2, []string{"0.0.0.0:0 can be reached from other machines", "--host NQN", "--allow-any-host"}},
		{"serve --listen :0 " + disk, nil, 2, []string{"--allow-any-host"}},
		{"serve --listen 1.2.3.4:x " + disk, nil, 2, []string{"listen: ", "is no address"}},
		{"serve --provider magic " + disk, nil, 2, []string{"provider: \"magic\""}},
		{"serve --nqn disk " + disk, nil, 2, []string{"nqn: "}},
		{"serve --http here " + disk, nil, 2, []string{"http: "}},
		{"serve --config " + cfg + " " + disk, nil, 2, []string{"listne: no such setting in " + cfg + " (did you mean listen?)", "log.level: "}},
		{"serve --config /nonexistent.yaml " + disk, nil, 2, []string{"/nonexistent.yaml"}},
		{"serve " + disk, []string{"RDTARGET_LISTNE=x"}, 2, []string{"environment variable RDTARGET_LISTNE: no such setting (did you mean RDTARGET_LISTEN?)"}},
		{"serve " + disk, []string{"RDTARGET_QUEUE_DEPTH=9999"}, 2, []string{"queue_depth: "}},
		{"serve --listen 127.0.0.1:0 --run-dir " + dir + " " + disk + ".missing", nil, 1, []string{"disk.img.missing", "truncate -s"}},
		{"serve --listen 127.0.0.1:0 --run-dir " + dir + " " + disk + " " + disk, nil, 2, []string{disk + " is named twice", "name it once"}},
		{"serve --listen 127.0.0.1:0 --run-dir " + dir + " " + disk + " " + filepath.Dir(disk) + "/./disk.img", nil, 2, []string{"is named twice, as " + disk}},
		{"serve mem:abc", nil, 2, []string{"namespaces[0].path: mem: size \"abc\"", "like 10G"}},
		{"serve mem:0", nil, 2, []string{"namespaces[0].path: mem:0: it needs room", "mem:64M"}},
		{"serve --workers -1 " + disk, nil, 2, []string{"workers: -1 is outside 0 to 1024 (0: one per processor)"}},
		{"serve --workers x " + disk, nil, 2, []string{"--workers: \"x\" is no whole number"}},
		{"serve --shutdown-timeout 5 " + disk, nil, 2, []string{"--shutdown-timeout: 5 has no unit", "10s"}},
		{"serve --http 15021 " + disk, nil, 2, []string{"http: \"15021\" is no ADDR:PORT", "127.0.0.1:15021"}},
		{"serve --host me " + disk, nil, 2, []string{"hosts[0]: \"me\" is no host NQN", "rdinit version"}},
		{"serve --host nqn.2014-08.org.nvmexpress:uuid:60e5b6dc-77c5 " + disk, nil, 2, []string{"hosts[0]: ", "is no UUID", "rdinit version"}},
		{"serve --pprof " + disk, nil, 2, []string{"pprof: there is no HTTP endpoint", "127.0.0.1:9420"}},
		{"serve men:64M", nil, 1, []string{"open men:64M: no such file or directory (memory is mem:64M"}},
		{"serve --listen 127.0.0.1:0 --trace " + disk + ".log " + disk, nil, 1, []string{disk + ".log: no such file", "--trace=" + disk + ".log"}},
		{"serve --listen 127.0.0.1:0 --trace=" + dir + " " + disk, nil, 1, []string{"trace: open " + dir + ": is a directory (", "add a file name"}},
		{"serve --listen 127.0.0.1:0 --trace=/nonexistent/log " + disk, nil, 1, []string{"trace: open /nonexistent/log", "directory must exist"}},
		{"serve " + disk, []string{"RDTARGET_MAX_IO=3M", "RDTARGET_BUFFER_MEMORY=64K"}, 2, []string{"max_io: 3M is no power of two"}},
		{disk, nil, 2, []string{"there is no command", "did you mean 'rdtarget serve " + disk + "'?"}},
		{"serve --listen 127.0.0.1:0 --http " + busy + " --run-dir " + dir + " " + disk, nil, 1, []string{"http endpoint " + busy + ": address already in use (", "ss -ltnp", "--http"}},
		{"serve --listen " + busy + " --run-dir " + dir + " " + disk, nil, 1, []string{"listen " + busy + " (iwarp): address already in use (", "ss -ltnp", "--listen"}},
		{"serve --listen 192.0.2.1 --allow-any-host --run-dir " + dir + " " + disk, nil, 1, []string{"192.0.2.1:4420", "127.0.0.1", "--listen"}},
		{"serve --listen 127.0.0.1:0 --run-dir " + cfg + " " + disk, nil, 1, []string{"--run-dir"}},
		{"check-config", nil, 2, []string{"name one file"}},
		{"check-config " + cfg, nil, 2, []string{"listne: no such setting", "log.level: "}},
		{"status extra", nil, 2, []string{"unexpected argument"}},
		{"status -o xml", nil, 2, []string{"neither text nor json"}},
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
			for _, w := range []string{busy, "192.0.2.1", "deadline", "strconv", "target: ", "listen tcp", "bind: ", "MaxIO"} {
				if n := strings.Count(strings.ReplaceAll(line, "rdtarget: ", ""), w); n > 1 || n == 1 && w != busy && w != "192.0.2.1" {
					t.Errorf("%s: %d times %q in\n%s", c.args, n, w, line)
				}
			}
		}
	}
}

func TestCheckConfig(t *testing.T) {
	dir := t.TempDir()
	good := filepath.Join(dir, "good.yaml")
	os.WriteFile(good, []byte("namespaces: ["+diskFile(t, 4096)+", mem:1M]\n"), 0o600)
	code, out, errw := clitest.Do(t, newProgram, nil, "check-config", good)
	if want := good + ": good: 2 namespaces on 127.0.0.1:4420\n"; code != 0 || out != want {
		t.Errorf("exit %d, %q, %q; want %q", code, out, errw, want)
	}
	bad := filepath.Join(dir, "bad.yaml")
	same := diskFile(t, 4096)
	small := diskFile(t, 100)
	os.WriteFile(bad, []byte("lsiten: x\nnamespaces: [/nonexistent/disk, "+same+", "+same+", "+small+", 'mem:x']\nlisten: [192.0.2.1]\n"), 0o600)
	code, _, errw = clitest.Do(t, newProgram, nil, "check-config", bad)
	for _, w := range []string{"namespaces[0].path: /nonexistent/disk: there is no such file", "listen: 192.0.2.1 can be reached", "listen: 192.0.2.1: cannot assign",
		"lsiten: no such setting in " + bad + " (did you mean listen?)", "namespaces[2].path: " + same + " is named twice", "namespaces[3].path: " + small + ": its 100 bytes",
		"namespaces[4].path: mem: "} {
		if code != 2 || !strings.Contains(errw, w) {
			t.Errorf("exit %d, no %q in %q", code, w, errw)
		}
	}
	empty := filepath.Join(dir, "empty.yaml")
	os.WriteFile(empty, nil, 0o600)
	if code, _, errw = clitest.Do(t, newProgram, nil, "check-config", empty); code != 2 || !strings.Contains(errw, "nothing to serve") {
		t.Errorf("empty file: exit %d, %q", code, errw)
	}
}

func get(t *testing.T, url string) string {
	t.Helper()
	r, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil || r.StatusCode != 200 {
		t.Fatalf("%s: %d, %v, %s", url, r.StatusCode, err, b)
	}
	return string(b)
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

func checkNoGoroutinesLeft(t *testing.T, before int) {
	t.Helper()
	http.DefaultClient.CloseIdleConnections()
	clitest.Eventually(t, "the goroutines end", func() bool { return runtime.NumGoroutine() <= before })
}

func TestServeFromStartToEnd(t *testing.T) {
	before := runtime.NumGoroutine()
	dir := clitest.Dir(t)
	disk := diskFile(t, 1<<20)
	notify, await := clitest.Notifications(t)
	r := clitest.Start(newProgram, []string{notify}, "serve", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--workers", "1",
		"--nqn", "nqn.2026-11.io.rdblk:test:disk", "--run-dir", dir, disk, "mem:2M")
	ready := r.Out.Await(t, `^rdtarget: serving nqn\.2026-11\.io\.rdblk:test:disk on 127\.0\.0\.1:(\d+) \(iwarp\): 2 namespaces, 3 MiB\n$`)
	await("READY=1")

	st := statusOf(t, dir)
	if st.Name != "disk" || st.PID != os.Getpid() || st.State != "serving" || len(st.Target.Namespaces) != 2 ||
		st.Target.Namespaces[0].Bytes != 1<<20 || st.Target.Listeners[0] != "127.0.0.1:"+ready[1] || !st.Target.AnyHost {
		t.Errorf("status %+v", st)
	}
	_, text, _ := clitest.Do(t, newProgram, nil, "status", "--run-dir", dir)
	for _, w := range []string{"disk\n", "nqn.2026-11.io.rdblk:test:disk", "1: " + disk + ", 1 MiB in blocks of 512 bytes", "2: mem:2M"} {
		if !strings.Contains(text, w) {
			t.Errorf("no %q in\n%s", w, text)
		}
	}

	url := "http://" + r.Err.Await(t, `msg="http endpoint" addr=(\S+)`)[1]
	if got := get(t, url+"/healthz"); got != "ok\n" {
		t.Errorf("healthz %q", got)
	}
	var viaHTTP report
	if err := json.Unmarshal([]byte(get(t, url+"/status")), &viaHTTP); err != nil || viaHTTP.Target.NQN != st.Target.NQN {
		t.Errorf("/status %+v, %v", viaHTTP, err)
	}
	m := get(t, url+"/metrics")
	clitest.LintMetrics(t, m)
	m = strings.ReplaceAll(m, disk, "DISK")
	m = regexp.MustCompile(`(rdtarget_start_time_seconds) .*`).ReplaceAllString(m, "$1 TIME")
	m = regexp.MustCompile(`(rdtarget_worker_sleeps_total\{.*\}) .*`).ReplaceAllString(m, "$1 N")
	m = regexp.MustCompile(`rdtarget_build_info\{.*\}`).ReplaceAllString(m, "rdtarget_build_info{BUILD}")
	clitest.Golden(t, "metrics.txt", m)

	r.Signal(unix.SIGUSR1)
	r.Err.Await(t, `msg=state status=.*nqn\.2026-11\.io\.rdblk:test:disk`)

	if err := os.Truncate(disk, 3<<20); err != nil {
		t.Fatal(err)
	}
	r.Signal(unix.SIGHUP)
	await("RELOADING=1")
	await("READY=1")
	if got := statusOf(t, dir).Target.Namespaces[0].Bytes; got != 3<<20 {
		t.Errorf("size after growth and SIGHUP: %d", got)
	}
	if err := os.Truncate(disk, 1<<20); err != nil {
		t.Fatal(err)
	}
	r.Signal(unix.SIGHUP)
	file := r.Err.Await(t, `level=ERROR msg="writes may have been lost.* file=(\S+)`)[1]
	t.Cleanup(func() { os.Remove(file) })
	r.Err.Await(t, `level=ERROR msg="sizes of the devices"`)
	if got := statusOf(t, dir).Target.Namespaces[0].Bytes; got != 3<<20 {
		t.Errorf("size after a shrink: %d, want the old one", got)
	}

	r.Signal(unix.SIGTERM)
	await("STOPPING=1")
	if code := r.Wait(t); code != 1 || !strings.Contains(r.Err.String(), "cut off") { // data is lost
		t.Errorf("exit %d: %s", code, r.Err)
	}
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("left in the run directory: %v", left)
	}
	if _, out, errw := clitest.Do(t, newProgram, nil, "status", "--run-dir", dir, "-o", "json"); out != "[]\n" || errw != "" {
		t.Errorf("status after the end: %q, %q", out, errw)
	}
	if code, out, errw := clitest.Do(t, newProgram, nil, "status", "--run-dir", dir); code != 0 || out != "" || errw != "rdtarget: this user serves nothing (looked in "+dir+")\n" {
		t.Errorf("status after the end: exit %d, %q, %q", code, out, errw)
	}
	checkNoGoroutinesLeft(t, before)
}

func TestReloadTakesHostsOver(t *testing.T) {
	dir := clitest.Dir(t)
	cfg := filepath.Join(dir, "c.yaml")
	write := func(s string) {
		if err := os.WriteFile(cfg, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const a, b = "nqn.2014-08.org.nvmexpress:uuid:11111111-1111-1111-1111-111111111111", "nqn.2014-08.org.nvmexpress:uuid:22222222-2222-2222-2222-222222222222"
	write("listen: ['127.0.0.1:0']\nnamespaces: ['mem:1M']\nworkers: 1\nhosts: [" + a + "]\n")
	run := filepath.Join(dir, "run")
	r := clitest.Start(newProgram, nil, "serve", "--config", cfg, "--run-dir", run)
	r.Out.Await(t, "serving")
	if h := statusOf(t, run).Target; len(h.Hosts) != 1 || h.Hosts[0] != a || h.AnyHost {
		t.Errorf("hosts %v, any %v", h.Hosts, h.AnyHost)
	}

	write("listen: ['127.0.0.1:0']\nnamespaces: ['mem:1M']\nworkers: 1\nqueue_depth: 64\nhosts: [" + a + ", " + b + "]\n")
	r.Signal(unix.SIGHUP)
	r.Err.Await(t, `need a restart" settings=queue_depth`)
	r.Err.Await(t, `msg=reloaded hosts=2 any=false`)
	if h := statusOf(t, run).Target; len(h.Hosts) != 2 {
		t.Errorf("hosts %v", h.Hosts)
	}

	write("hosts: [" + a + "\n")
	r.Signal(unix.SIGHUP)
	r.Err.Await(t, `msg="configuration is not taken over"`)
	if h := statusOf(t, run).Target; len(h.Hosts) != 2 {
		t.Errorf("hosts %v after a broken file", h.Hosts)
	}
	r.Signal(unix.SIGINT)
	if code := r.Wait(t); code != 0 {
		t.Errorf("exit %d: %s", code, r.Err)
	}
}

// Namespaces come and go on SIGHUP; what is still there is not touched.
func TestReloadAddsAndRemovesNamespaces(t *testing.T) {
	dir := clitest.Dir(t)
	before := runtime.NumGoroutine()
	cfg, run := filepath.Join(dir, "c.yaml"), filepath.Join(dir, "run")
	path := func(name string) string { return filepath.Join(dir, name) }
	for i, name := range []string{"a", "b", "c"} {
		if err := os.WriteFile(path(name), make([]byte, (i+1)<<20), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write := func(list ...string) {
		text := "listen: ['127.0.0.1:0']\nworkers: 1\nnamespaces:\n"
		for _, n := range list {
			text += "  - " + strings.ReplaceAll(n, "@", dir+"/") + "\n"
		}
		if err := os.WriteFile(cfg, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var r *clitest.Run
	n := 0
	reload := func(want string) {
		t.Helper()
		n++
		r.Signal(unix.SIGHUP)
		r.Err.Await(t, fmt.Sprintf(`(?s)(?:msg=reloaded.*?){%d}`, n))
		var got []string
		for _, ns := range statusOf(t, run).Target.Namespaces {
			got = append(got, fmt.Sprintf("%d:%s:%dM", ns.NSID, filepath.Base(ns.Device), ns.Bytes>>20))
		}
		if s := strings.Join(got, " "); s != want {
			t.Errorf("served %q, want %q", s, want)
		}
	}
	write("@a", "@b")
	r = clitest.Start(newProgram, nil, "serve", "--config", cfg, "--run-dir", run)
	r.Out.Await(t, "serving")
	nqn := statusOf(t, run).Target.NQN

	write("@a", "@b", "@c")
	reload("1:a:1M 2:b:2M 3:c:3M")
	r.Err.Await(t, "namespaces=3 added=1 removed=0")
	write("@a", "@c") // c keeps its number
	reload("1:a:1M 3:c:3M")
	r.Err.Await(t, `msg="device closed" ns=2`)
	write("@c", "{path: @b, nsid: 7, read_only: true}", "@missing") // the first is another one now: the NQN stays; one fails, the other does not
	reload("3:c:3M 7:b:2M")
	r.Err.Await(t, `msg="namespace is not added" ns=2`)
	if got := statusOf(t, run).Target; got.NQN != nqn || !got.Namespaces[1].ReadOnly {
		t.Errorf("NQN %s, was %s; %+v", got.NQN, nqn, got.Namespaces)
	}
	if strings.Contains(r.Err.String(), "need a restart") {
		t.Errorf("a restart is asked for: %s", r.Err)
	}

	// What hosts could not follow is refused, and everything stays.
	write("@c", "{path: @b, nsid: 7}")
	reload("3:c:3M 7:b:2M")
	r.Err.Await(t, "a namespace is not changed while it is served: leave it out, reload, and add it again\" ns=7 serves=\""+path("b")+", read-only\" wanted="+path("b"))
	write("{path: @c, nsid: 4}", "{path: @b, nsid: 7, read_only: true}")
	reload("7:b:2M")
	r.Err.Await(t, "a device does not change its namespace identifier at once: leave it out, reload, and add it again\" ns=4")
	r.Err.Await(t, `msg="device closed" ns=3`)
	reload("4:c:3M 7:b:2M")
	write()
	r.Signal(unix.SIGHUP)
	r.Err.Await(t, "there is nothing to serve")
	if l := statusOf(t, run).Target.Namespaces; len(l) != 2 {
		t.Errorf("after a file without namespaces: %+v", l)
	}

	r.Signal(unix.SIGTERM)
	if code := r.Wait(t); code != 0 {
		t.Errorf("exit %d: %s", code, r.Err)
	}
	checkNoGoroutinesLeft(t, before)
	for _, name := range []string{"a", "b", "c"} { // nobody holds them
		if d, err := blockdev.Open(path(name), blockdev.Options{}); err != nil {
			t.Error(err)
		} else {
			d.Close()
		}
	}
}

// reloadable is a program whose namespaces a test changes: write puts them into its file, start starts it with them.
// img is a file of 1 MiB that may be one.
func reloadable(t *testing.T, settings string) (write func(ns string), start func(ns string) *clitest.Run, img string) {
	t.Helper()
	dir := clitest.Dir(t)
	cfg, img := filepath.Join(dir, "c.yaml"), filepath.Join(dir, "a")
	if err := os.WriteFile(img, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	write = func(ns string) {
		t.Helper()
		if err := os.WriteFile(cfg, []byte("listen: ['127.0.0.1:0']\nworkers: 1\n"+settings+"namespaces: ["+ns+"]\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	start = func(ns string) *clitest.Run {
		t.Helper()
		write(ns)
		r := clitest.Start(newProgram, nil, "serve", "--config", cfg, "--run-dir", filepath.Join(dir, "run"))
		r.Out.Await(t, "serving")
		return r
	}
	return write, start, img
}

// What a reload takes out is out when the order to stop comes, be it in the same moment: the
// device is not closed under a target that uses it, and nothing is reported lost.
func TestStopRightAfterReload(t *testing.T) {
	write, start, img := reloadable(t, "")
	for range 20 {
		r := start(img)
		write("'null:1M'")
		r.Signal(unix.SIGHUP)
		r.Signal(unix.SIGTERM)
		if code := r.Wait(t); code != 0 || !strings.Contains(r.Err.String(), "device closed") {
			t.Fatalf("exit %d: %s", code, r.Err)
		}
	}
}

// A device that was opened and could not be served leaves nothing: another server may have it
// by the time this one ends, and must find the files of its losses untouched.
func TestNotAddedLeavesNothing(t *testing.T) {
	write, start, img := reloadable(t, "max_io: 8k\n")
	r := start("'null:1M'")
	write("'null:1M', {path: '" + img + "', block_size: 64K}")
	r.Signal(unix.SIGHUP)
	r.Err.Await(t, `msg="namespace is not added"`)
	d, err := blockdev.Open(img, blockdev.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	count := losses.Open(losses.DefaultDir(), losses.Key(img, d.Info()), slog.New(slog.DiscardHandler))
	defer count.Close()
	r.Signal(unix.SIGTERM)
	if code := r.Wait(t); code != 0 {
		t.Fatalf("exit %d: %s", code, r.Err)
	}
	for _, end := range []string{"", ".busy"} {
		if _, err := os.Stat(filepath.Join(losses.DefaultDir(), losses.Key(img, d.Info())) + end); err != nil {
			t.Errorf("another server's file has been removed: %v", err)
		}
	}
}

// Storage that does not answer when a device is opened keeps nobody from stopping the program,
// nor from reloading again; what is opened late is closed.
func TestReloadWhileOpeningHangs(t *testing.T) {
	write, start, img := reloadable(t, "")
	thaw, opening := make(chan struct{}), make(chan struct{}, 8)
	opened := make(chan blockdev.Device, 8)
	oldOpen, oldPatience := openDevice, openPatience
	defer func() { openDevice, openPatience = oldOpen, oldPatience }()
	openDevice = func(path string, o blockdev.Options) (blockdev.Device, error) {
		if path != img {
			return oldOpen(path, o)
		}
		opening <- struct{}{}
		<-thaw
		d, err := oldOpen(path, o)
		opened <- d
		return d, err
	}
	serve := func() *clitest.Run {
		r := start("'null:1M'")
		write("'null:1M', " + img)
		return r
	}

	r := serve()
	r.Signal(unix.SIGHUP)
	<-opening
	r.Signal(unix.SIGHUP) // not forgotten
	r.Signal(unix.SIGTERM)
	if code := r.Wait(t); code != 0 || !strings.Contains(r.Err.String(), "msg=stopping") {
		t.Errorf("exit %d: %s", code, r.Err)
	}

	openPatience = 5 * time.Second // enough for those that do not hang
	r = serve()
	r.Signal(unix.SIGHUP)
	<-opening
	r.Err.Await(t, `its storage gave no answer within 5s`)
	write("'null:1M', " + img + ", 'mem:1M'")
	r.Signal(unix.SIGHUP)
	r.Err.Await(t, `has not answered an earlier attempt yet`)
	r.Err.Await(t, `namespaces=2 added=1 removed=0`)
	close(thaw)
	for range 2 {
		d := <-opened
		if d == nil { // the other one had it
			continue
		}
		clitest.Eventually(t, "it is closed", func() bool { return errors.Is(d.Flush(), blockdev.ErrClosed) })
	}
	openPatience = oldPatience
	clitest.Eventually(t, "it is served", func() bool {
		r.Signal(unix.SIGHUP)
		return strings.Contains(r.Err.String(), "namespaces=3")
	})
	r.Signal(unix.SIGTERM)
	if code := r.Wait(t); code != 0 {
		t.Errorf("exit %d: %s", code, r.Err)
	}
}

func TestNameOfASecondServer(t *testing.T) {
	dir := clitest.Dir(t)
	start := func(args ...string) *clitest.Run {
		return clitest.Start(newProgram, nil, append([]string{"serve", "--listen", "127.0.0.1:0", "--workers", "1", "--run-dir", dir}, args...)...)
	}
	a := start("mem:1M")
	a.Out.Await(t, "serving")
	b := start("mem:1M")
	b.Out.Await(t, "serving")
	if _, out, _ := clitest.Do(t, newProgram, nil, "status", "--run-dir", dir); !strings.Contains(out, "mem\n") || !strings.Contains(out, "mem-2\n") {
		t.Errorf("status\n%s", out)
	}
	c := start("--name", "mem", "mem:1M")
	if code := c.Wait(t); code != 1 || !strings.Contains(c.Err.String(), fmt.Sprintf(`"mem": the name is taken by a running program (process %d): choose another with --name`, os.Getpid())) {
		t.Errorf("a taken name: exit %d, %s", code, c.Err)
	}
	for _, r := range []*clitest.Run{a, b} {
		r.Signal(unix.SIGTERM)
		if code := r.Wait(t); code != 0 {
			t.Errorf("exit %d: %s", code, r.Err)
		}
	}
}

// The documented ways to set a thing, on the real command.
func TestPrecedenceOnTheCommand(t *testing.T) {
	dir := clitest.Dir(t)
	cfg := filepath.Join(dir, "c.yaml")
	os.WriteFile(cfg, []byte("nqn: nqn.2026-11.io.rdblk:file\nlisten: ['127.0.0.1:0']\nnamespaces: ['mem:1M']\nworkers: 1\n"), 0o600)
	for i, c := range []struct {
		environ []string
		flags   []string
		want    string
	}{
		{nil, nil, "nqn.2026-11.io.rdblk:file"},
		{[]string{"RDTARGET_NQN=nqn.2026-11.io.rdblk:env"}, nil, "nqn.2026-11.io.rdblk:env"},
		{[]string{"RDTARGET_NQN=nqn.2026-11.io.rdblk:env"}, []string{"--nqn", "nqn.2026-11.io.rdblk:flag"}, "nqn.2026-11.io.rdblk:flag"},
	} {
		r := clitest.Start(newProgram, append(c.environ, "RDTARGET_CONFIG="+cfg), append([]string{"serve", "--run-dir", filepath.Join(dir, "run")}, c.flags...)...)
		if got := r.Out.Await(t, `serving (\S+) on`)[1]; got != c.want {
			t.Errorf("%d: %s, want %s", i, got, c.want)
		}
		r.Signal(unix.SIGTERM)
		r.Wait(t)
	}
}

// stuck is a device whose flush has no answer before the test ends, or fails.
type stuck struct {
	blockdev.Device
	name  string
	flush func() error
}

func (d stuck) Info() blockdev.Info { return blockdev.Info{Name: d.name} }
func (d stuck) Flush() error        { return d.flush() }

// A flush that has no answer when the program must end counts as failed; those that
// have one count themselves.
func TestFlushWithoutAnAnswerIsCounted(t *testing.T) {
	dir := filepath.Join(clitest.Dir(t), "losses")
	synctest.Test(t, func(t *testing.T) { // the time is over when those that answer have
		release := make(chan struct{})
		defer close(release)
		sv := &server{namespaces: map[uint32]*served{}, losses: map[string]*losses.Counter{}}
		for i, d := range []stuck{
			{name: "good", flush: func() error { return nil }},
			{name: "hangs", flush: func() error { <-release; return nil }},
			{name: "bad", flush: func() error { return unix.EIO }},
		} {
			c := losses.Open(dir, d.name, slog.New(slog.DiscardHandler))
			defer c.Close()
			sv.namespaces[uint32(i)], sv.losses[d.name] = &served{dev: d, count: c}, c
		}
		sv.namespaces[3] = &served{dev: sv.namespaces[1].dev} // one that is not kept account of
		gone := losses.Open(dir, "gone", slog.New(slog.DiscardHandler))
		defer gone.Close()
		sv.losses["gone"] = gone // taken out, and still being closed
		sv.removals = append(sv.removals, &served{dev: stuck{name: "gone"}, count: gone, closed: release})
		ctx, cancel := timeout.With(context.Background(), 100*time.Millisecond, "shutdown_timeout")
		defer cancel()
		err := sv.flush(ctx)
		if err == nil || !errors.Is(err, unix.EIO) || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "flush hangs: no answer within 100ms (shutdown_timeout): its storage hangs") {
			t.Errorf("%v", err)
		}
		if g, h, b, r := sv.losses["good"].Count(), sv.losses["hangs"].Count(), sv.losses["bad"].Count(), gone.Count(); g != 0 || h != 1 || b != 0 || r != 1 {
			t.Errorf("counted %d, %d, %d, %d", g, h, b, r)
		}
		if n := sv.unsafeShutdowns(0); n != 2 {
			t.Errorf("%d unsafe shutdowns", n)
		}
	})
}
