package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"syscall"
	"testing"
	"time"

	"rdblk/internal/envtest"
	"rdblk/nbd/nbdtest"
)

// verifying puts load on an attachment: writes for some seconds, then everything is read back and compared.
func verifying(t *testing.T, a *attachment) *load {
	t.Helper()
	nbdtest.Require(t, "fio")
	rate := "10m"
	if raceDetector {
		rate = "2m"
	}
	f := underLoad(t, "--name=load", "--ioengine=nbd", "--uri="+a.uri(), "--rw=randwrite", "--bssplit=4k/70:64k/20:1m/10", "--iodepth=32",
		"--numjobs=2", "--size=60M", "--offset_increment=64M", "--rate="+rate, "--verify=crc32c", "--verify_fatal=1", "--do_verify=1")
	before := a.status()
	eventually(t, "it is under load", func() bool { return a.status().WriteOps > before.WriteOps+100 })
	return f
}

// A host that stands still (a suspended machine) loses its association and comes
// back to a new one; what it had in flight is done once more, and others are served meanwhile.
func TestFrozenHost(t *testing.T) {
	t.Setenv("RDINIT_KEEP_ALIVE", "4s") // less, and the other one may be given up on a busy machine, too
	w := newWorld(t, 128*MiB)
	cfg := filepath.Join(w.dir, "c.yaml")
	os.WriteFile(cfg, []byte("namespaces: ['"+w.disk+"', 'mem:64M']\n"), 0o600)
	w.serve("--config", cfg)
	a, other := w.attach("disk", "--nsid", "1"), w.attach("other", "--nsid", "2")
	fio := verifying(t, a)
	a.Process.Signal(syscall.SIGSTOP)
	eventually(t, "the target gives the frozen host up", func() bool {
		m := metrics(t, w.http)
		return m["rdtarget_keep_alive_timeouts_total"] >= 1 && m[`rdtarget_controllers{kind="io"}`] == 1
	})
	nbdtest.Run(t, "qemu-io", "-f", "raw", "-c", "write -P 3 0 8M", "-c", "read -P 3 0 8M", other.uri())
	a.Process.Signal(syscall.SIGCONT)
	eventually(t, "it is back", func() bool { st := a.status(); return st.State == "live" && st.Reconnects >= 1 })
	fio.wait(t)
	for _, x := range []*attachment{a, other} {
		if st := x.status(); st.Errors != 0 || st.FlushFault != "" {
			t.Errorf("%s: %+v", x.name, st)
		}
	}
	if st := other.status(); st.Reconnects != 0 {
		t.Errorf("the other host noticed: %+v", st)
	}
}

// A target that stands still is noticed by keep-alive; when it moves again it meets a
// host that has given it up, and nothing that it still does is harmful.
func TestFrozenTarget(t *testing.T) {
	t.Setenv("RDINIT_KEEP_ALIVE", "1s")
	w := newWorld(t, 128*MiB)
	p := w.serve()
	a := w.attach("disk")
	fio := verifying(t, a)
	p.Process.Signal(syscall.SIGSTOP)
	begin := time.Now()
	eventually(t, "the host gives the frozen target up", func() bool { st := a.status(); return st.State == "reconnecting" && st.Waiting > 0 })
	t.Logf("noticed after %v (keep-alive timeout 1 s)", time.Since(begin).Round(time.Millisecond))
	p.Process.Signal(syscall.SIGCONT)
	eventually(t, "it is live again", func() bool { st := a.status(); return st.State == "live" && st.Reconnects >= 1 })
	fio.wait(t)
	if st := a.status(); st.Errors != 0 || st.FlushFault != "" {
		t.Errorf("afterwards: %+v", st)
	}
}

// The target's file system is full: that write fails with ENOSPC, and nothing else does.
func TestFullFileSystem(t *testing.T) {
	if os.Geteuid() != 0 {
		envtest.Lacks(t, "not root: cannot mount a small file system")
	}
	w := newWorld(t, 4096)
	mnt := filepath.Join(w.dir, "mnt")
	os.Mkdir(mnt, 0o700)
	if out, err := exec.Command("mount", "-t", "tmpfs", "-o", "size=8m", "none", mnt).CombinedOutput(); err != nil {
		envtest.Lacks(t, "cannot mount here: %v: %s", err, out)
	}
	// Registered before the processes are: those end first.
	t.Cleanup(func() { exec.Command("umount", mnt).Run() })
	w.disk = filepath.Join(mnt, "disk.img")
	f, err := os.Create(w.disk)
	if err == nil {
		err = f.Truncate(32 * MiB) // more than there is room for
		f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	w.serve()
	a := w.attach("disk")
	c, err := nbdtest.Open("unix", a.sock, "", true)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	full := -1
	for i := range 32 {
		r, err := c.Do(0, nbdtest.CmdWrite, uint64(i)*MiB, MiB, make([]byte, MiB))
		if err != nil {
			t.Fatal(err)
		}
		if r.Errno == nbdtest.ENOSPC {
			full = i
			break
		}
		if r.Errno != 0 {
			t.Fatalf("write of MiB %d: errno %d %q", i, r.Errno, r.Text)
		}
	}
	if full < 4 {
		t.Fatalf("the file system was full after %d MiB", full)
	}
	for _, op := range []struct {
		cmd  uint16
		off  uint64
		n    uint32
		data []byte
	}{
		{nbdtest.CmdRead, 0, MiB, nil}, {nbdtest.CmdWrite, 0, MiB, make([]byte, MiB)}, {nbdtest.CmdFlush, 0, 0, nil},
		{nbdtest.CmdTrim, 0, 2 * MiB, nil}, {nbdtest.CmdWrite, 31 * MiB, MiB, make([]byte, MiB)}, // there is room again
	} {
		if r, err := c.Do(0, op.cmd, op.off, op.n, op.data); err != nil || r.Errno != 0 {
			t.Errorf("command %d at %d: %+v, %v", op.cmd, op.off, r.Errno, err)
		}
	}
	if st := a.status(); st.State != "live" || st.Reconnects != 0 || st.FlushFault != "" {
		t.Errorf("afterwards: %+v", st)
	}
	if got := metrics(t, w.http)[`rdtarget_operation_errors_total{nsid="1",op="write"}`]; got != 1 {
		t.Errorf("%v failed writes counted", got)
	}
}

// An attachment says which of several namespaces it wants.
func TestSeveralNamespaces(t *testing.T) {
	w := newWorld(t, MiB)
	cfg := filepath.Join(w.dir, "c.yaml")
	os.WriteFile(cfg, []byte("namespaces:\n  - "+w.disk+"\n  - {path: 'mem:3M', nsid: 7, block_size: 4k}\n  - 'null:5M'\n"), 0o600)
	w.serve("--config", cfg)
	for nsid, size := range map[string]int64{"1": MiB, "2": 5 * MiB, "7": 3 * MiB} {
		a := w.attach("ns"+nsid, "--nsid", nsid)
		if got := a.status().Size; got != size {
			t.Errorf("namespace %s has %d bytes, want %d", nsid, got, size)
		}
	}
	code, _, errw := do(t, "rdinit", "attach", w.addr, "--socket", w.dir+"/s", "--run-dir", w.run)
	if code != 1 || !regexp.MustCompile(`namespaces 1 \(.*\), 2 \(.*\), 7 \(.*\): choose one with --nsid`).MatchString(errw) {
		t.Errorf("without a choice: exit %d, %q", code, errw)
	}
}
