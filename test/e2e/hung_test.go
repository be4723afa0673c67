package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"rdblk/nbd/nbdtest"
)

// Storage that does not answer (a frozen file system) does not keep rdtarget from
// ending in the time it has, nor from saying why.
func TestStopWhileStorageHangs(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount and freeze a file system")
	}
	w := newWorld(t, 64*MiB)
	mnt := filepath.Join(w.dir, "mnt")
	os.Mkdir(mnt, 0o700)
	run := func(argv ...string) {
		t.Helper()
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", strings.Join(argv, " "), err, out)
		}
	}
	run("mkfs.ext4", "-q", w.disk)
	run("mount", "-o", "loop", w.disk, mnt)
	thaw := func() { exec.Command("fsfreeze", "-u", mnt).Run() }
	t.Cleanup(func() { thaw(); exec.Command("umount", mnt).Run() })
	w.disk = filepath.Join(mnt, "disk.img")
	f, err := os.Create(w.disk)
	if err == nil {
		err = f.Truncate(16 * MiB)
		f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	p := w.serve()
	t.Cleanup(thaw) // a process that waits in the kernel cannot be killed
	a := w.attach("disk")
	c, err := nbdtest.Open("unix", a.sock, "", true)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if r, err := c.Do(0, nbdtest.CmdWrite, 0, 4096, make([]byte, 4096)); err != nil || r.Errno != 0 {
		t.Fatal(r.Errno, err)
	}
	run("fsfreeze", "-f", mnt)
	if err := c.Send(nbdtest.CmdFlagFUA, nbdtest.CmdWrite, 1, 0, 4096, make([]byte, 4096)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the write is at the storage", func() bool { return a.status().Requests > 0 })
	begin := time.Now()
	if err := p.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.await(t, `rdtarget: serve: (shut down: .*)`)
	took := time.Since(begin)
	t.Logf("given up after %v", took.Round(10*time.Millisecond))
	if took > 12*time.Second { // 10 s, and a busy machine
		t.Errorf("the end took %v", took)
	}
	thaw()
	select {
	case <-p.done:
	case <-time.After(patience):
		t.Fatal("it does not end when the storage answers again")
	}
	if code := p.ProcessState.ExitCode(); code != 1 {
		t.Errorf("exit code %d", code)
	}
}
