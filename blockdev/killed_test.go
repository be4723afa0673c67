package blockdev_test

import (
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"rdblk/blockdev"
	"rdblk/internal/envtest"
)

// losingFile is a file on a file system that takes 32 MiB into the page cache and can store less
// than 16: the kernel finds out when it writes them back.
func losingFile(t *testing.T) string {
	t.Helper()
	needLoop(t)
	small, mnt := t.TempDir(), t.TempDir()
	if err := unix.Mount("none", small, "tmpfs", 0, "size=16m"); err != nil {
		envtest.Lacks(t, "cannot mount: %v", err)
	}
	t.Cleanup(func() { unix.Unmount(small, unix.MNT_DETACH) })
	img := newFile(t, small, 64<<20)
	run(t, "mkfs.ext4", "-q", "-O", "^has_journal", img)
	run(t, "mount", "-o", "loop", img, mnt)
	t.Cleanup(func() { run(t, "umount", mnt) })
	return newFile(t, mnt, 48<<20)
}

// The last server was killed in fdatasync, which failed: the kernel has told of it, to nobody.
func TestKilledInAFailingFlush(t *testing.T) {
	path := losingFile(t)
	killed, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	must(t, "open", err)
	p := make([]byte, 1<<20)
	for i := range p {
		p[i] = 'A'
	}
	for i := range int64(32) {
		if _, err := unix.Pwrite(killed, p, i<<20); err != nil {
			t.Fatal(err)
		}
	}
	// Until it has been told of all: write-back goes on behind the first failure.
	for n := 0; ; n++ {
		if err := unix.Fdatasync(killed); err == nil {
			if n == 0 {
				t.Fatal("fdatasync succeeds: nothing was lost")
			}
			break
		}
	}
	unix.Close(killed)

	flush := func(doubt bool) (error, int) {
		told := 0
		d := open(t, path, blockdev.Options{OnFlushFailed: func(error) { told++ }})
		defer d.Close()
		var busy atomic.Uint32
		d.(blockdev.Watchable).Watch(&busy, doubt)
		err := d.Flush()
		if busy.Load() != 0 {
			t.Errorf("busy %d after the flush", busy.Load())
		}
		return err, told
	}
	if err, told := flush(false); err != nil || told != 0 {
		t.Fatalf("the kernel tells twice (%v): then this test, and what it tests, is not needed", err)
	}
	if err, told := flush(true); err == nil || told != 1 {
		t.Errorf("the successor's first flush: %v, told %d times", err, told)
	}
	if err, _ := flush(true); err != nil {
		t.Errorf("it was told, and is told again: %v", err)
	}
}

// busy is above zero in flushes and durable writes, whoever is killed in them.
func TestBusyIsSeenInside(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	must(t, "file", os.WriteFile(path, make([]byte, 1<<20), 0o600))
	var busy atomic.Uint32
	inside := uint32(0)
	d := open(t, path, blockdev.Options{OnFlushFailed: func(error) { inside = busy.Load() }})
	d.(blockdev.Watchable).Watch(&busy, false)
	must(t, "flush", d.Flush())
	must(t, "durable write", d.WriteAt(make([]byte, 4096), 0, blockdev.WriteFUA))
	if busy.Load() != 0 {
		t.Errorf("%d at rest", busy.Load())
	}
	blockdev.FailSync(d)
	if err := d.Flush(); err == nil || inside != 1 {
		t.Errorf("while a failure is reported busy is %d (%v)", inside, err)
	}
}
