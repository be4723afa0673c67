package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"rdblk/nbd/nbdtest"
)

const MiB = 1 << 20

// Everything that other people's clients do, through both programs.
func TestForeignClients(t *testing.T) {
	w := newWorld(t, 128*MiB)
	w.serve()
	a := w.attach("disk")
	nbdtest.Target{Socket: a.sock, Size: 128 * MiB, BlockSize: 512, Trim: true, Zero: true}.All(t)
	if st := a.status(); st.Errors != 0 || st.State != "live" || st.Reconnects != 0 {
		t.Errorf("after all clients: %+v", st)
	}
}

func TestForeignClientsOnAReadOnlyDevice(t *testing.T) {
	w := newWorld(t, 32*MiB)
	w.serve("--read-only")
	a := w.attach("disk")
	nbdtest.Target{Socket: a.sock, Size: 32 * MiB, BlockSize: 512, ReadOnly: true, Trim: true, Zero: true}.All(t)
}

// Larger blocks, and the pages of the file past the cache.
func TestForeignClientsOnBlocksOf4096Direct(t *testing.T) {
	w := newWorld(t, 64*MiB)
	cfg := filepath.Join(w.dir, "c.yaml")
	os.WriteFile(cfg, []byte(fmt.Sprintf("namespaces:\n  - path: %s\n    block_size: 4k\n    direct: true\n", w.disk)), 0o600)
	w.serve("--config", cfg)
	a := w.attach("disk")
	tg := nbdtest.Target{Socket: a.sock, Size: 64 * MiB, BlockSize: 4096, Trim: true, Zero: true}
	t.Run("nbdinfo", tg.Info)
	t.Run("nbdcopy", tg.Copy)
	t.Run("fio", tg.Fio)
}

// What is counted is what was done, on both sides.
func TestMetricsCountWhatWasDone(t *testing.T) {
	w := newWorld(t, 16*MiB)
	w.serve()
	a := w.attach("disk", "--queues", "1")
	c, err := nbdtest.Open("unix", a.sock, "", true)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	do := func(flags, cmd uint16, off uint64, n uint32, payload []byte, errno uint32) {
		t.Helper()
		r, err := c.Do(flags, cmd, off, n, payload)
		if err != nil || r.Errno != errno {
			t.Fatalf("command %d: %+v, %v", cmd, r, err)
		}
	}
	for i := range 10 {
		do(0, nbdtest.CmdWrite, uint64(i)*8192, 8192, make([]byte, 8192), 0)
	}
	do(nbdtest.CmdFlagFUA, nbdtest.CmdWrite, 0, 4096, make([]byte, 4096), 0)
	for range 7 {
		do(0, nbdtest.CmdRead, 4096, 16384, nil, 0)
	}
	do(0, nbdtest.CmdFlush, 0, 0, nil, 0)
	do(0, nbdtest.CmdWriteZeroes, 0, 65536, nil, 0)
	do(0, nbdtest.CmdTrim, 1<<20, 65536, nil, 0)
	do(0, nbdtest.CmdRead, 16*MiB, 512, nil, nbdtest.EINVAL) // refused before it reaches the device

	// A request is counted when its reply is on its way: the last may be a moment late.
	eventually(t, "the last request counted", func() bool {
		return metrics(t, a.http)[`rdinit_nbd_operation_errors_total{op="read"}`] == 1 && metrics(t, w.http)[`rdtarget_commands_in_flight`] == 0
	})
	for name, want := range map[string]float64{
		`rdinit_nbd_operations_total{op="write"}`:                 11,
		`rdinit_nbd_operation_bytes_total{op="write"}`:            10*8192 + 4096,
		`rdinit_nbd_operations_total{op="read"}`:                  8,
		`rdinit_nbd_operation_errors_total{op="read"}`:            1,
		`rdinit_operations_total{op="read"}`:                      7,
		`rdinit_operation_bytes_total{op="read"}`:                 7 * 16384,
		`rdinit_operations_total{op="write"}`:                     11,
		`rdinit_operations_total{op="flush"}`:                     1,
		`rdinit_operations_total{op="zero"}`:                      1,
		`rdinit_operations_total{op="discard"}`:                   1,
		`rdinit_operation_errors_total{op="read"}`:                0,
		`rdinit_operation_duration_seconds_count{op="read"}`:      7,
		`rdinit_session_state{state="live"}`:                      1,
		`rdinit_nbd_connections`:                                  1,
		`rdinit_device_size_bytes`:                                16 * MiB,
		`rdinit_reconnects_total`:                                 0,
		`rdinit_nbd_operation_duration_seconds_count{op="flush"}`: 1,
	} {
		if got, ok := metrics(t, a.http)[name]; !ok || got != want {
			t.Errorf("%s is %v (there: %v), want %v", name, got, ok, want)
		}
	}
	m := metrics(t, w.http)
	for name, want := range map[string]float64{
		`rdtarget_operations_total{nsid="1",op="read"}`:                   7,
		`rdtarget_operation_bytes_total{nsid="1",op="read"}`:              7 * 16384,
		`rdtarget_operations_total{nsid="1",op="write"}`:                  11,
		`rdtarget_operations_total{nsid="1",op="flush"}`:                  1,
		`rdtarget_operations_total{nsid="1",op="discard"}`:                1,
		`rdtarget_operation_duration_seconds_count{nsid="1",op="read"}`:   7,
		`rdtarget_operation_errors_total{nsid="1",op="read"}`:             0,
		`rdtarget_controllers{kind="io"}`:                                 1,
		`rdtarget_connections`:                                            2, // admin and one I/O queue
		`rdtarget_commands_in_flight`:                                     0,
		`rdtarget_operation_duration_seconds_count{nsid="1",op="verify"}`: 0,
	} {
		if got, ok := m[name]; !ok || got != want {
			t.Errorf("%s is %v (there: %v), want %v", name, got, ok, want)
		}
	}
}

func TestTwoServersOfOneFile(t *testing.T) {
	w := newWorld(t, MiB)
	w.serve()
	code, _, errw := do(t, "rdtarget", "serve", "--listen", "127.0.0.1:0", "--run-dir", w.run, w.disk)
	if code != 1 || !strings.Contains(errw, "in use") || !strings.Contains(errw, w.disk) {
		t.Errorf("the second server: exit %d, %q", code, errw)
	}
	code, _, errw = do(t, "rdtarget", "serve", "--listen", w.addr, "--run-dir", w.run, "mem:1M")
	if code != 1 || !strings.Contains(errw, "address already in use") || !strings.Contains(errw, "--listen") {
		t.Errorf("a second server at the address: exit %d, %q", code, errw)
	}
}

func TestDeviceGrowsUnderAnAttachment(t *testing.T) {
	w := newWorld(t, 16*MiB)
	p := w.serve()
	a := w.attach("disk")
	if got := strings.TrimSpace(nbdtest.Run(t, "nbdinfo", "--size", a.uri())); got != fmt.Sprint(16*MiB) {
		t.Fatalf("size %s", got)
	}
	if err := os.Truncate(w.disk, 48*MiB); err != nil {
		t.Fatal(err)
	}
	p.Process.Signal(syscall.SIGHUP)
	eventually(t, "the attachment has the new size", func() bool { return a.status().Size == 48*MiB })
	if got := strings.TrimSpace(nbdtest.Run(t, "nbdinfo", "--size", a.uri())); got != fmt.Sprint(48*MiB) {
		t.Errorf("size %s after it grew", got)
	}
	nbdtest.Run(t, "qemu-io", "-f", "raw", "-c", "write -P 7 47M 1M", "-c", "read -P 7 47M 1M", a.uri())

	// Refused: the size stays, what was cut off fails, and is never zeros.
	if err := os.Truncate(w.disk, 16*MiB); err != nil {
		t.Fatal(err)
	}
	c := open(t, a)
	if r, err := c.Do(0, nbdtest.CmdWrite, 48*MiB-4096, 4096, make([]byte, 4096)); err != nil || r.Errno != nbdtest.EIO {
		t.Errorf("a write that would make the file long again: errno %d, %v", r.Errno, err)
	}
	recorded(t, p)
	for _, off := range []uint64{16 * MiB, 47 * MiB} {
		if r, err := c.Do(0, nbdtest.CmdRead, off, 4096, nil); err != nil || r.Errno != nbdtest.EIO {
			t.Errorf("read at %d, where the file was cut off: errno %d, %v", off, r.Errno, err)
		}
	}
	flushFails(t, "the client", c)
	p.Process.Signal(syscall.SIGHUP)
	p.log.Await(t, `msg="sizes of the devices"`)
	if got := a.status(); got.Size != 48*MiB || got.State != "live" {
		t.Errorf("after a shrink: %+v", got)
	}
	nbdtest.Run(t, "qemu-io", "-f", "raw", "-c", "read 0 4096", a.uri())
}

func TestUsage(t *testing.T) {
	never := filepath.Join(t.TempDir(), "never.sock")
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"rdtarget", 2, "Usage: rdtarget COMMAND"},
		{"rdtarget serve", 2, "nothing to serve"},
		{"rdtarget serve --nope x", 2, "unknown flag"},
		{"rdtarget serve --listen 0.0.0.0 mem:1M", 2, "--allow-any-host"},
		{"rdtarget check-config /nonexistent", 2, "no such file"},
		{"rdinit", 2, "Usage: rdinit COMMAND"},
		{"rdinit check-config /nonexistent", 2, "no such file"},
		{"rdinit attach 127.0.0.1", 2, "--socket"},
		{"rdinit attach 127.0.0.1:1 --socket " + never, 1, "refused"},
		{"rdinit atach", 2, `no command "atach"`},
		{"rdinit bench 127.0.0.1 --rw write", 2, "--destroy-data"},
	} {
		f := strings.Fields(c.args)
		code, out, errw := do(t, f[0], f[1:]...)
		if code != c.code || out != "" || !strings.Contains(errw, c.want) {
			t.Errorf("%s: exit %d, stdout %q, stderr %q", c.args, code, out, errw)
		}
	}
	for _, program := range []string{"rdtarget", "rdinit"} {
		if code, out, errw := do(t, program, "check-config", "../../configs/"+program+".yaml"); code != 0 || !strings.Contains(out, "good") {
			t.Errorf("%s: exit %d, %q, %q", program, code, out, errw)
		}
	}
}

func TestListStatusDetach(t *testing.T) {
	w := newWorld(t, 16*MiB)
	w.serve()
	a, b := w.attach("one"), w.attach("two")
	_, out, _ := do(t, "rdinit", "list", "--run-dir", w.run)
	if !strings.Contains(out, "\none ") || !strings.Contains(out, "\ntwo ") {
		t.Errorf("list\n%s", out)
	}
	// Both attachments are hosts of their own at the target, though the machine is one.
	if got := metrics(t, w.http)[`rdtarget_controllers{kind="io"}`]; got != 2 {
		t.Errorf("%v controllers, want 2", got)
	}
	if code, _, errw := do(t, "rdinit", "detach", "three", "--run-dir", w.run); code != 1 || !strings.Contains(errw, "one, two") {
		t.Errorf("unknown name: exit %d, %q", code, errw)
	}
	if code, out, errw := do(t, "rdinit", "detach", a.sock, "--run-dir", w.run); code != 0 || out != "rdinit: detached one\n" {
		t.Errorf("detach: exit %d, %q, %q", code, out, errw)
	}
	<-a.done
	if a.ProcessState.ExitCode() != 0 {
		t.Errorf("attach ended with %d", a.ProcessState.ExitCode())
	}
	if _, err := os.Lstat(a.sock); err == nil {
		t.Error("the socket is left")
	}

	// A killed attachment leaves things behind; nobody stumbles over them.
	var killed []string
	eventually(t, "the target has one association", func() bool { killed = hostIDs(t, w.http); return len(killed) == 1 })
	b.kill(t)
	if _, err := os.Lstat(b.sock); err != nil {
		t.Error("a killed process removed its socket: the test shows nothing")
	}
	if _, out, _ := do(t, "rdinit", "list", "--run-dir", w.run); out != "" {
		t.Errorf("list after the kill\n%s", out)
	}
	b = w.attach("two")
	if got := strings.TrimSpace(nbdtest.Run(t, "nbdinfo", "--size", b.uri())); got != fmt.Sprint(16*MiB) {
		t.Errorf("size %s", got)
	}
	// It is the same host to the target, which ends what a killed one left before it lets the new one in.
	if ids := hostIDs(t, w.http); !slices.Equal(ids, killed) {
		t.Errorf("host identifiers %v after the restart, want %v", ids, killed)
	}
}

// hostIDs lists the host identifiers of the associations that rdtarget has.
func hostIDs(t testing.TB, url string) (ids []string) {
	t.Helper()
	resp, err := http.Get(url + "/status")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var st struct {
		Target struct {
			Controllers []struct {
				HostID    string
				Discovery bool
			}
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&st); err != nil {
		t.Fatal(err)
	}
	for _, c := range st.Target.Controllers {
		if !c.Discovery {
			ids = append(ids, c.HostID)
		}
	}
	return ids
}

// SIGTERM while everything is busy: no more than ten seconds, and exit code 0.
func TestStopUnderLoad(t *testing.T) {
	nbdtest.Require(t, "fio")
	w := newWorld(t, 128*MiB)
	p := w.serve()
	a := w.attach("disk")
	load := func() *background {
		f := inBackground(t, "fio", "--name=load", "--ioengine=nbd", "--uri="+a.uri(), "--rw=randrw", "--bssplit=4k/70:256k/30", "--iodepth=64",
			"--numjobs=4", "--size=16M", "--time_based", "--runtime=60") // all of which is flushed at the end
		before := a.status().WriteOps
		eventually(t, "it is under load", func() bool { st := a.status(); return st.WriteOps > before+1000 && st.Requests > 0 })
		return f
	}
	f := load()
	code, took := a.end(t, syscall.SIGTERM)
	if code != 0 || took > 10*time.Second {
		t.Errorf("rdinit ended with %d after %v", code, took)
	}
	t.Logf("rdinit drained in %v", took)
	f.Process.Kill()

	a = w.attach("disk")
	load()
	code, took = p.end(t, syscall.SIGTERM)
	if code != 0 || took > 10*time.Second {
		t.Errorf("rdtarget ended with %d after %v", code, took)
	}
	t.Logf("rdtarget drained in %v", took)
	// The attachment waits; it can be ended too, and says that it could not flush.
	eventually(t, "requests wait", func() bool { return a.status().Waiting > 0 })
	code, took = a.end(t, syscall.SIGTERM)
	if code != 1 || took > 20*time.Second || // 10 s, and a busy machine
		!strings.Contains(a.log.String(), "may be lost") {
		t.Errorf("rdinit without a target ended with %d after %v", code, took)
	}
}

func TestSecondSignalCuts(t *testing.T) {
	w := newWorld(t, 16*MiB)
	p := w.serve()
	a := w.attach("disk")
	c, err := nbdtest.Open("unix", a.sock, "", true)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if r, err := c.Do(0, nbdtest.CmdWrite, 0, 512, make([]byte, 512)); err != nil || r.Errno != 0 {
		t.Fatal(r, err)
	}
	p.kill(t)
	a.Process.Signal(syscall.SIGTERM)
	a.log.Await(t, "msg=stopping")
	timer := time.NewTimer(500 * time.Millisecond) // less would be the same order
	<-timer.C
	if code, took := a.end(t, syscall.SIGTERM); code != 1 || took > 5*time.Second {
		t.Errorf("ended with %d after %v", code, took)
	}
}

// Attach and detach, again and again: nothing accumulates at the target.
func TestManyAttachments(t *testing.T) {
	w := newWorld(t, 16*MiB)
	p := w.serve()
	round := func() {
		if code, _, errw := do(t, "rdinit", "bench", w.addr, "--runtime", "20ms", "--iodepth", "4"); code != 0 {
			t.Fatalf("exit %d: %s", code, errw)
		}
	}
	settle := func() map[string]float64 {
		eventually(t, "all connections are gone", func() bool {
			m := metrics(t, w.http)
			return m["rdtarget_connections"] == 0 && m[`rdtarget_rdma_objects{kind="qp"}`] == 0 && m["rdtarget_rdma_lingering_sockets"] == 0
		})
		return metrics(t, w.http)
	}
	for range 5 {
		round()
	}
	m0, fds, rss := settle(), p.fds(t), p.rss(t)
	for range 40 {
		round()
	}
	settle()
	for _, k := range []string{`rdtarget_rdma_objects{kind="cq"}`, `rdtarget_rdma_objects{kind="mr"}`} { // they go after their queue pairs
		eventually(t, k+" is back", func() bool { return metrics(t, w.http)[k] <= m0[k] })
	}
	eventually(t, "the descriptors are back", func() bool { return p.fds(t) <= fds })
	if now := p.rss(t); now > rss+32*MiB && !raceDetector {
		t.Errorf("resident memory grew from %d to %d MiB", rss>>20, now>>20)
	}
}
