package e2e

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"rdblk/internal/envtest"
	"rdblk/nbd/nbdtest"
)

// newLosingWorld has a disk that takes 32 MiB of writes into the page cache and can
// store less than 8 of them: the kernel finds out when it writes them back, and tells
// of it once.
func newLosingWorld(t *testing.T) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		envtest.Lacks(t, "not root: cannot make a loop device")
	}
	w := newWorld(t, 4096)
	run := func(args ...string) string {
		t.Helper()
		out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
		if err != nil {
			envtest.Lacks(t, "cannot do this here: %s: %v: %s", strings.Join(args, " "), err, out)
		}
		return strings.TrimSpace(string(out))
	}
	mnt := filepath.Join(w.dir, "mnt")
	os.Mkdir(mnt, 0o700)
	run("mount", "-t", "tmpfs", "-o", "size=8m", "none", mnt)
	// Registered before the processes are: those end first.
	t.Cleanup(func() { exec.Command("umount", mnt).Run() })
	back := filepath.Join(mnt, "disk.img")
	if err := os.WriteFile(back, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(back, 64*MiB); err != nil {
		t.Fatal(err)
	}
	w.disk = run("losetup", "--find", "--show", back)
	t.Cleanup(func() { exec.Command("losetup", "--detach", w.disk).Run() })
	return w
}

// recorded checks that the target counted a loss, and forgets it after the test.
func recorded(t *testing.T, p *process) {
	t.Helper()
	file := p.log.Await(t, `level=ERROR msg="writes may have been lost.* file=(\S+)`)[1]
	t.Cleanup(func() { os.Remove(file) })
	if !strings.HasPrefix(file, "/run/rdblk/losses/") { // not in the run directory, which the next target need not share
		t.Errorf("the count is at %s", file)
	}
}

func open(t *testing.T, a *attachment) *nbdtest.Client {
	t.Helper()
	c, err := nbdtest.Open("unix", a.sock, "", true)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// fill writes n MiB from MiB at on, which are acknowledged.
func fill(t *testing.T, c *nbdtest.Client, at, n int, with byte) {
	t.Helper()
	for i := at; i < at+n; i++ {
		if r, err := c.Do(0, nbdtest.CmdWrite, uint64(i)*MiB, MiB, bytes.Repeat([]byte{with}, MiB)); err != nil || r.Errno != 0 {
			t.Fatalf("write of MiB %d: errno %d, %v", i, r.Errno, err)
		}
	}
}

func flushFails(t *testing.T, who string, c *nbdtest.Client) {
	t.Helper()
	if r, err := c.Do(0, nbdtest.CmdFlush, 0, 0, nil); err != nil || r.Errno != nbdtest.EIO {
		t.Errorf("FLUSH of %s: errno %d, %v: acknowledged writes are gone", who, r.Errno, err)
	}
}

// works: who attaches now gets a device that is as good as its store.
func works(t *testing.T, w *world) {
	t.Helper()
	a := w.attach("fresh")
	c := open(t, a)
	if r, err := c.Do(0, nbdtest.CmdRead, 0, 4096, nil); err != nil || r.Errno != 0 {
		t.Errorf("a new attachment: read: errno %d, %v", r.Errno, err)
	}
	if r, err := c.Do(0, nbdtest.CmdFlush, 0, 0, nil); err != nil || r.Errno != 0 {
		t.Errorf("a new attachment: flush: errno %d, %v", r.Errno, err)
	}
}

// The flush with which the target ends fails, and the next target finds a clean
// store: the client's own flush must not succeed.
func TestFailedFlushAtTheEndIsNotForgotten(t *testing.T) {
	w := newLosingWorld(t)
	p := w.serve()
	a := w.attach("disk")
	c := open(t, a)
	fill(t, c, 0, 32, 'A')
	if code, _ := p.end(t, syscall.SIGTERM); code != 1 {
		t.Errorf("rdtarget ended with %d though its flush must have failed", code)
	}
	recorded(t, p)
	w.serve()
	flushFails(t, "the client", c)
	if st := a.status(); st.Reconnects != 1 {
		t.Errorf("status %+v", st)
	}
	works(t, w)
	c.Close()
	if code, _ := a.end(t, syscall.SIGTERM); code == 0 {
		t.Error("rdinit ended with 0")
	}
}

// One host's flush hears of the failure, the target is killed before another host
// has asked: that one's flush must not succeed at the next target.
func TestFailedFlushOfAnotherHostIsNotForgotten(t *testing.T) {
	w := newLosingWorld(t)
	p := w.serve()
	one, two := w.attach("one"), w.attach("two")
	c1, c2 := open(t, one), open(t, two)
	fill(t, c1, 0, 16, 'A')
	fill(t, c2, 16, 16, 'B')
	flushFails(t, "the first", c1)
	recorded(t, p) // before the answer, therefore before the kill
	p.kill(t)
	w.serve()
	flushFails(t, "the second", c2)
	flushFails(t, "the first", c1)
	works(t, w)
	c1.Close()
	c2.Close()
	for _, a := range []*attachment{one, two} {
		if code, _ := a.end(t, syscall.SIGTERM); code == 0 {
			t.Errorf("%s ended with 0", a.name)
		}
	}
}
