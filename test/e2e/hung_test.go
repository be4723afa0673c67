package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"rdblk/internal/envtest"
	"rdblk/nbd/nbdtest"
)

// freezable makes a file in a file system of its own, which can be frozen: then whatever
// modifies it waits in the kernel, for as long as the test likes.
func freezable(t *testing.T, w *world) (disk string, freeze, thaw func()) {
	t.Helper()
	if os.Geteuid() != 0 {
		envtest.Lacks(t, "not root: cannot mount and freeze a file system")
	}
	img, mnt := filepath.Join(w.dir, "frozen.img"), filepath.Join(w.dir, "mnt")
	os.Mkdir(mnt, 0o700)
	run := func(argv ...string) {
		t.Helper()
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", strings.Join(argv, " "), err, out)
		}
	}
	newFile := func(name string, size int64) {
		t.Helper()
		f, err := os.Create(name)
		if err == nil {
			err = errors.Join(f.Truncate(size), f.Close())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	newFile(img, 64*MiB)
	run("mkfs.ext4", "-q", img)
	run("mount", "-o", "loop", img, mnt)
	thaw = func() { exec.Command("fsfreeze", "-u", mnt).Run() }
	t.Cleanup(func() { thaw(); exec.Command("umount", mnt).Run() })
	disk = filepath.Join(mnt, "disk.img")
	newFile(disk, 16*MiB)
	return disk, func() { run("fsfreeze", "-f", mnt) }, thaw
}

// Storage that does not answer (a frozen file system) does not keep rdtarget from
// ending in the time it has, nor from saying why.
func TestStopWhileStorageHangs(t *testing.T) {
	w := newWorld(t, 64*MiB)
	disk, freeze, thaw := freezable(t, w)
	w.disk = disk
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
	freeze()
	if err := c.Send(nbdtest.CmdFlagFUA, nbdtest.CmdWrite, 1, 0, 4096, make([]byte, 4096)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the write is at the storage", func() bool { return a.status().Requests > 0 })
	begin := time.Now()
	if err := p.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.log.Await(t, `rdtarget: serve: (shut down: .*)`)
	took := time.Since(begin)
	t.Logf("given up after %v", took.Round(10*time.Millisecond))
	if took > 20*time.Second { // 10 s, and a busy machine
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

// within fails the test if do takes longer than the patience that there is.
func within(t *testing.T, what string, do func() error) time.Duration {
	t.Helper()
	begin := time.Now()
	done := make(chan error, 1)
	go func() { done <- do() }()
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	case <-time.After(patience):
		t.Fatalf("%s: no answer in %v", what, patience)
	}
	return time.Since(begin)
}

// One namespace's file system hangs, with plain writes, durable ones, zeroes and flushes waiting for it.
// The other namespaces, their hosts and those who come new notice nothing.
func TestStorageHangsAlone(t *testing.T) {
	for _, mode := range []string{"buffered", "direct"} {
		t.Run(mode, func(t *testing.T) {
			w := newWorld(t, 16*MiB)
			disk, freeze, thaw := freezable(t, w)
			cfg := filepath.Join(w.dir, "c.yaml")
			direct := fmt.Sprint(mode == "direct")
			os.WriteFile(cfg, []byte("namespaces:\n  - {path: '"+disk+"', nsid: 1, direct: "+direct+"}\n  - {path: '"+w.disk+"', nsid: 2, direct: "+direct+"}\n  - {path: 'mem:16M', nsid: 3}\n"), 0o600)
			w.serve("--config", cfg)
			t.Cleanup(thaw) // a process that waits in the kernel cannot be killed
			stuck, other, mem := w.attach("stuck", "--nsid", "1"), w.attach("other", "--nsid", "2"), w.attach("mem", "--nsid", "3")
			sc := open(t, stuck)
			fill(t, sc, 0, 4, 'A')
			flush := func(c *nbdtest.Client) error {
				r, err := c.Do(0, nbdtest.CmdFlush, 0, 0, nil)
				if err == nil && r.Errno != 0 {
					err = fmt.Errorf("errno %d", r.Errno)
				}
				return err
			}
			if err := flush(sc); err != nil {
				t.Fatal(err)
			}
			freeze()
			// On every queue there is: connections are spread over them.
			var conns []*nbdtest.Client
			for range 4 {
				conns = append(conns, open(t, stuck))
			}
			sent := 0
			for i, c := range conns {
				cookie := uint64(0)
				send := func(flags, cmd uint16, off uint64, n uint32, data []byte) {
					t.Helper()
					cookie++
					sent++
					if err := c.Send(flags, cmd, cookie, off+uint64(i)*MiB, n, data); err != nil {
						t.Fatal(err)
					}
				}
				send(0, nbdtest.CmdWrite, 0, 4096, make([]byte, 4096))
				send(0, nbdtest.CmdWrite, 8192, 64<<10, make([]byte, 64<<10))
				send(nbdtest.CmdFlagFUA, nbdtest.CmdWrite, 128<<10, 4096, make([]byte, 4096))
				send(0, nbdtest.CmdWriteZeroes, 256<<10, 64<<10, nil)
				send(0, nbdtest.CmdTrim, 512<<10, 64<<10, nil)
			}
			eventually(t, "all is at the storage", func() bool { return stuck.status().Requests >= sent })
			work := func(a *attachment) {
				t.Helper()
				for range 4 {
					c := open(t, a)
					took := within(t, a.name, func() error {
						for i := range uint64(64) {
							data := bytes.Repeat([]byte{byte(i)}, 64<<10)
							if r, err := c.Do(0, nbdtest.CmdWrite, i*64<<10, 64<<10, data); err != nil || r.Errno != 0 {
								return fmt.Errorf("write: errno %d, %v", r.Errno, err)
							}
							r, err := c.Do(0, nbdtest.CmdRead, i*64<<10, 64<<10, nil)
							if err != nil || r.Errno != 0 || !bytes.Equal(r.Data, data) {
								return fmt.Errorf("read: errno %d, %v", r.Errno, err)
							}
						}
						return flush(c)
					})
					t.Logf("%s: 64 writes, 64 reads and a flush in %v", a.name, took.Round(time.Millisecond))
				}
			}
			work(other)
			work(mem)
			// The host of the hanging one too, as long as it asks for what is there.
			within(t, "read of the hanging namespace", func() error {
				r, err := open(t, stuck).Do(0, nbdtest.CmdRead, 3*MiB+512<<10+64<<10, 4096, nil)
				if err == nil && r.Errno != 0 {
					err = fmt.Errorf("errno %d", r.Errno)
				}
				return err
			})
			late := w.attach("late", "--nsid", "2")
			work(late)
			if code, took := late.end(t, syscall.SIGTERM); code != 0 {
				t.Errorf("a host that leaves: exit %d after %v", code, took)
			} else {
				t.Logf("a host left in %v", took.Round(time.Millisecond))
			}
			for _, a := range []*attachment{other, mem} {
				if st := a.status(); st.Reconnects != 0 || st.Errors != 0 {
					t.Errorf("%s: %+v", a.name, st)
				}
			}
			thaw()
			for _, c := range conns {
				within(t, "what waited", func() error {
					for range sent / len(conns) {
						r, err := c.ReadReply()
						if err == nil && r.Errno != 0 {
							err = fmt.Errorf("errno %d", r.Errno)
						}
						if err != nil {
							return err
						}
					}
					return nil
				})
			}
		})
	}
}
