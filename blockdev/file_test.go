package blockdev_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"rdblk/blockdev"
	"rdblk/blockdev/blockdevtest"
	"rdblk/internal/envtest"
)

func logged(o *blockdev.Options) *envtest.Log {
	log := new(envtest.Log)
	o.Logger = log.Logger()
	return log
}

func TestOpenErrorsSayWhatToDo(t *testing.T) {
	dir := t.TempDir()
	empty, small := newFile(t, dir, 0), newFile(t, dir, 100)
	odd := newFile(t, dir, 1000)
	fifo := filepath.Join(dir, "fifo")
	must(t, "mkfifo", unix.Mkfifo(fifo, 0o600))
	dangling := filepath.Join(dir, "dangling")
	must(t, "symlink", os.Symlink(filepath.Join(dir, "nothing"), dangling))
	for _, c := range []struct {
		spec string
		o    blockdev.Options
		want []string
		is   error
	}{
		{filepath.Join(dir, "missing"), blockdev.Options{}, []string{"missing", "truncate -s"}, os.ErrNotExist},
		{"/dev/sdzz9", blockdev.Options{}, []string{"no such device"}, os.ErrNotExist},
		{dangling, blockdev.Options{}, []string{"leads nowhere"}, os.ErrNotExist},
		{filepath.Join(dir, "unmounted", "disk"), blockdev.Options{}, []string{"directory does not exist"}, os.ErrNotExist},
		{dir, blockdev.Options{}, []string{"directory", "block device"}, nil},
		{"/dev/null", blockdev.Options{}, []string{"character device"}, nil},
		{fifo, blockdev.Options{}, []string{"pipe"}, nil},
		{empty, blockdev.Options{}, []string{"empty", "truncate -s"}, nil},
		{small, blockdev.Options{}, []string{"less than one block"}, nil},
		{odd, blockdev.Options{ExactSize: true}, []string{"no multiple", "truncate -s %512"}, nil},
		{odd, blockdev.Options{BlockSize: 1000}, []string{"power of two"}, nil},
		{odd, blockdev.Options{BlockSize: 131072}, []string{"power of two"}, nil},
		{odd, blockdev.Options{BlockSize: -512}, []string{"power of two"}, nil},
		{"mem:", blockdev.Options{}, []string{"number"}, nil},
		{"mem:0", blockdev.Options{}, []string{"at least one block"}, nil},
		{"mem:100", blockdev.Options{}, []string{"less than one block"}, nil},
		{"mem:9E", blockdev.Options{}, []string{"too large"}, nil},
		{"mem:7E", blockdev.Options{}, []string{"make it smaller"}, unix.ENOMEM},
		{"null:-1", blockdev.Options{}, []string{"number"}, nil},
		{"null:1k", blockdev.Options{BlockSize: 4096}, []string{"less than one block"}, nil},
	} {
		d, err := blockdev.Open(c.spec, c.o)
		if err == nil {
			d.Close()
			t.Errorf("open %s: no error", c.spec)
			continue
		}
		for _, w := range c.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("open %s: %v, want it to say %q", c.spec, err, w)
			}
		}
		if c.is != nil && !errors.Is(err, c.is) {
			t.Errorf("open %s: %v, want %v", c.spec, err, c.is)
		}
	}
}

func TestSizeIsRoundedDownWithAWarning(t *testing.T) {
	var o blockdev.Options
	log := logged(&o)
	d := open(t, newFile(t, t.TempDir(), 10*512+100), o)
	if n := d.Info().Size; n != 10*512 {
		t.Errorf("size %d, want %d", n, 10*512)
	}
	if !strings.Contains(log.String(), "rest=100") {
		t.Errorf("no warning: %q", log)
	}
	log.Reset()
	open(t, newFile(t, t.TempDir(), 10*512), o)
	if log.Len() > 0 {
		t.Errorf("a warning about nothing: %s", log)
	}
	for _, spec := range []string{"mem:1300", "null:1300"} {
		log.Reset()
		if n := open(t, spec, o).Info().Size; n != 1024 || log.Len() == 0 {
			t.Errorf("%s: size %d, want 1024 and a warning: %q", spec, n, log)
		}
	}
}

func TestInfoOfAFile(t *testing.T) {
	in := open(t, newFile(t, t.TempDir(), 1<<20), blockdev.Options{}).Info()
	if in.Size != 1<<20 || in.BlockSize != 512 || in.PhysBlock < 4096 || in.MemAlign > 1 || !in.WriteCache || in.ReadOnly {
		t.Errorf("%+v", in)
	}
	in = open(t, newFile(t, t.TempDir(), 1<<20), blockdev.Options{Direct: true}).Info()
	if in.MemAlign < 1 || !in.WriteCache {
		t.Errorf("direct: %+v", in)
	}
	if _, err := blockdev.Open(newFile(t, t.TempDir(), 1<<20), blockdev.Options{Direct: true, BlockSize: in.BlockSize / 2}); err == nil {
		t.Errorf("direct with half of the smallest block of %d is taken", in.BlockSize)
	}
}

func TestTwoServersOfOneFile(t *testing.T) {
	file := newFile(t, t.TempDir(), 1<<20)
	other := func(readOnly bool) error {
		release, _, err := hold(t, file, readOnly)
		release()
		return err
	}
	t.Run("writer", func(t *testing.T) {
		d := open(t, file, blockdev.Options{})
		for _, ro := range []bool{false, true} {
			if err := other(ro); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("process %d", os.Getpid())) {
				t.Errorf("second server, read-only %v: %v, want it to name process %d", ro, err, os.Getpid())
			}
			if _, err := blockdev.Open(file, blockdev.Options{ReadOnly: ro}); !errors.Is(err, blockdev.ErrInUse) {
				t.Errorf("second open in this process, read-only %v: %v", ro, err)
			}
		}
		must(t, "close", d.Close())
		must(t, "after close", other(false))
	})
	t.Run("reader", func(t *testing.T) {
		d := open(t, file, blockdev.Options{ReadOnly: true})
		must(t, "second reader", other(true))
		if err := other(false); err == nil || !strings.Contains(err.Error(), "in use") {
			t.Errorf("writer beside a reader: %v", err)
		}
		d.Close()
	})
	t.Run("a killed server leaves no lock", func(t *testing.T) {
		release, pid, err := hold(t, file, false)
		must(t, "hold", err)
		if _, err := blockdev.Open(file, blockdev.Options{}); !errors.Is(err, blockdev.ErrInUse) || !strings.Contains(err.Error(), fmt.Sprint(pid)) {
			t.Errorf("%v, want it to name process %d", err, pid)
		}
		must(t, "kill", unix.Kill(pid, unix.SIGKILL))
		release()
		open(t, file, blockdev.Options{}).Close()
	})
	t.Run("no lock", func(t *testing.T) {
		d := open(t, file, blockdev.Options{})
		open(t, file, blockdev.Options{NoLock: true}).Close()
		d.Close()
	})
	t.Run("QEMU's kind of lock", func(t *testing.T) {
		f, err := os.OpenFile(file, os.O_RDWR, 0)
		must(t, "open", err)
		defer f.Close()
		// What qemu-img and QEMU hold while an image is open for writing.
		lk := unix.Flock_t{Type: unix.F_RDLCK, Start: 101, Len: 1}
		must(t, "lock", unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &lk))
		if _, err := blockdev.Open(file, blockdev.Options{}); !errors.Is(err, blockdev.ErrInUse) {
			t.Errorf("open beside QEMU: %v", err)
		}
	})
	t.Run("flock(1)", func(t *testing.T) {
		f, err := os.Open(file)
		must(t, "open", err)
		defer f.Close()
		must(t, "lock", unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB))
		if _, err := blockdev.Open(file, blockdev.Options{}); !errors.Is(err, blockdev.ErrInUse) {
			t.Errorf("open beside a flock: %v", err)
		}
	})
}

func TestALoopDevicesFileIsInUse(t *testing.T) {
	file := newFile(t, t.TempDir(), 1<<20)
	dev := loop(t, file)
	if _, err := blockdev.Open(file, blockdev.Options{}); !errors.Is(err, blockdev.ErrInUse) || !strings.Contains(err.Error(), dev) {
		t.Errorf("open for writing: %v, want it to name %s", err, dev)
	}
	var o blockdev.Options
	o.ReadOnly = true
	log := logged(&o)
	open(t, file, o)
	if !strings.Contains(log.String(), dev) {
		t.Errorf("open for reading warns of nothing: %q", log)
	}
}

// A loop device takes no lock on its file, and can be made of one that is served.
func TestALoopDeviceOfAServedFile(t *testing.T) {
	file := newFile(t, t.TempDir(), 1<<20)
	d := open(t, file, blockdev.Options{})
	dev := loop(t, file)
	for _, readOnly := range []bool{false, true} {
		if _, err := blockdev.Open(dev, blockdev.Options{ReadOnly: readOnly}); !errors.Is(err, blockdev.ErrInUse) || !strings.Contains(err.Error(), file) {
			t.Errorf("read-only %v: %v, want it to name %s", readOnly, err, file)
		}
	}
	d.Close()
	open(t, dev, blockdev.Options{})
}

func TestTwoServersOfOneDisk(t *testing.T) {
	file := newFile(t, t.TempDir(), 20<<20)
	dev := loop(t, file)
	d := open(t, dev, blockdev.Options{})
	if release, _, err := hold(t, dev, false); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("second server: %v", err)
		release()
	}
	if _, err := blockdev.Open(dev, blockdev.Options{ReadOnly: true}); !errors.Is(err, blockdev.ErrInUse) {
		t.Errorf("reader beside a writer: %v", err)
	}
	d.Close()

	run(t, "mkfs.ext4", "-q", "-F", dev)
	dir := t.TempDir()
	run(t, "mount", dev, dir)
	_, err := blockdev.Open(dev, blockdev.Options{})
	var o blockdev.Options
	o.ReadOnly = true
	log := logged(&o)
	ro, roErr := blockdev.Open(dev, o)
	run(t, "umount", dir)
	if !errors.Is(err, blockdev.ErrInUse) || !strings.Contains(err.Error(), "mounted") {
		t.Errorf("open of a mounted disk: %v", err)
	}
	must(t, "read a mounted disk", roErr)
	if !strings.Contains(log.String(), "mounted") {
		t.Errorf("no warning about a mounted disk: %q", log)
	}
	second := open(t, dev, blockdev.Options{ReadOnly: true})
	second.Close()
	ro.Close()
	open(t, dev, blockdev.Options{}).Close()
}

func TestUUIDSurvives(t *testing.T) {
	dir := t.TempDir()
	file, other := newFile(t, dir, 1<<20), newFile(t, dir, 1<<20)
	uuid := func(spec string, ro bool) [16]byte {
		d := open(t, spec, blockdev.Options{ReadOnly: ro})
		defer d.Close()
		return d.Info().UUID
	}
	id := uuid(file, false)
	if id == [16]byte{} || id[6]>>4 != 8 || id[8]>>6 != 2 {
		t.Errorf("UUID %x is none of version 8", id)
	}
	if uuid(file, true) != id {
		t.Error("another after reopening")
	}
	if uuid(other, false) == id {
		t.Error("two files have the same")
	}
	moved := filepath.Join(dir, "moved")
	must(t, "rename", os.Rename(file, moved))
	must(t, "write", os.WriteFile(moved, make([]byte, 4096), 0o600))
	if uuid(moved, false) != id {
		t.Error("another after rename and change")
	}
	if uuid("mem:1M", false) == uuid("mem:1M", false) {
		t.Error("two memories have the same")
	}
	if uuid("null:1M", false) != [16]byte{} {
		t.Error("null is no store")
	}
	dev := loop(t, other)
	a := uuid(dev, false)
	if a == [16]byte{} || uuid(dev, true) != a {
		t.Error("loop device: not the same after reopening")
	}
	if b := uuid(loop(t, newFile(t, dir, 1<<20)), false); a == b {
		t.Error("loop devices of two files have the same")
	}
}

func TestGrowthAndShrink(t *testing.T) {
	type resizable interface {
		blockdev.Device
		blockdev.Resizer
	}
	check := func(t *testing.T, d blockdev.Device, resize func(size int64)) {
		r := d.(resizable)
		old := r.Info().Size
		p := blockdevtest.Buffer(4096)
		if err := r.ReadAt(p, old); !errors.Is(err, blockdev.ErrOutOfRange) {
			t.Errorf("read behind the end: %v", err)
		}
		resize(2*old + 100)
		if r.Info().Size != old {
			t.Error("the size grew without Refresh")
		}
		in, err := r.Refresh()
		must(t, "refresh", err)
		if in.Size != 2*old || r.Info().Size != 2*old {
			t.Errorf("size %d, want %d", in.Size, 2*old)
		}
		blockdevtest.Fill(p, old, 1)
		must(t, "write into the growth", r.WriteAt(p, old, 0))

		resize(old)
		in, err = r.Refresh()
		if err == nil || !strings.Contains(err.Error(), "shrank") || in.Size != 2*old || r.Info().Size != 2*old {
			t.Errorf("shrink: %v, size %d, want an error and %d", err, in.Size, 2*old)
		}
		if err := r.ReadAt(p, old); err == nil {
			t.Error("read of what was cut off succeeds")
		}
		if td, ok := d.(blockdev.TryDevice); ok {
			if err := td.TryReadAt(p, old); err == nil {
				t.Error("try read of what was cut off succeeds")
			}
		}
		must(t, "the rest still works", r.ReadAt(p, 0))
		d.Close()
		if _, err := r.Refresh(); !errors.Is(err, blockdev.ErrClosed) {
			t.Errorf("refresh after close: %v", err)
		}
	}
	t.Run("file", func(t *testing.T) {
		file := newFile(t, t.TempDir(), 1<<20)
		check(t, open(t, file, blockdev.Options{}), func(n int64) { must(t, "truncate", os.Truncate(file, n)) })
	})
	t.Run("direct", func(t *testing.T) {
		file := newFile(t, t.TempDir(), 1<<20)
		check(t, open(t, file, blockdev.Options{Direct: true}), func(n int64) { must(t, "truncate", os.Truncate(file, n)) })
	})
	t.Run("disk", func(t *testing.T) {
		file := newFile(t, t.TempDir(), 1<<20)
		dev := loop(t, file)
		check(t, open(t, dev, blockdev.Options{}), func(n int64) {
			must(t, "truncate", os.Truncate(file, n))
			run(t, "losetup", "-c", dev)
		})
	})
}

func blocks(t testing.TB, file string) int64 {
	t.Helper()
	var st unix.Stat_t
	must(t, "stat", unix.Stat(file, &st))
	return st.Blocks * 512
}

func TestSpaceIsFreedAndKept(t *testing.T) {
	for _, direct := range []bool{false, true} {
		t.Run(fmt.Sprintf("direct=%v", direct), func(t *testing.T) {
			file := newFile(t, t.TempDir(), 8<<20)
			d := open(t, file, blockdev.Options{Direct: direct})
			if !d.Info().Discard {
				envtest.Lacks(t, "no holes on the file system of the tests")
			}
			p := blockdevtest.Buffer(4 << 20)
			blockdevtest.Fill(p, 0, 1)
			fill := func() {
				must(t, "write", d.WriteAt(p, 0, blockdev.WriteFUA))
				if n := blocks(t, file); n < 4<<20 {
					t.Fatalf("%d bytes allocated after a write of 4 MiB", n)
				}
			}
			fill()
			must(t, "discard", d.Discard(0, 4<<20))
			if n := blocks(t, file); n > 1<<20 {
				t.Errorf("%d bytes allocated after a discard", n)
			}
			fill()
			must(t, "zero", d.Zero(0, 4<<20, 0))
			if n := blocks(t, file); n > 1<<20 {
				t.Errorf("%d bytes allocated after a zero that may unmap", n)
			}
			fill()
			must(t, "zero", d.Zero(0, 4<<20, blockdev.ZeroNoUnmap|blockdev.WriteFUA))
			if n := blocks(t, file); n < 4<<20 {
				t.Errorf("%d bytes allocated after a zero that may not unmap", n)
			}
		})
	}
	t.Run("mem", func(t *testing.T) {
		d := open(t, "mem:64M", blockdev.Options{})
		resident := func() int64 {
			b, err := os.ReadFile("/proc/self/statm")
			must(t, "statm", err)
			var size, rss int64
			fmt.Sscan(string(b), &size, &rss)
			return rss * int64(os.Getpagesize())
		}
		p := make([]byte, 64<<20)
		blockdevtest.Fill(p, 0, 1)
		must(t, "write", d.WriteAt(p, 0, 0))
		full := resident()
		must(t, "discard", d.Discard(0, 64<<20))
		if now := resident(); full-now < 48<<20 {
			t.Errorf("%d MiB resident before a discard of 64 MiB, %d after", full>>20, now>>20)
		}
	})
}

// TestAFullFileSystem: ENOSPC is ENOSPC, harms nobody else, and ends when there is room again.
func TestAFullFileSystem(t *testing.T) {
	for _, kind := range [][]string{{"ext4", "-q", "-F", "-m", "0"}, {"xfs", "-q"}} {
		for _, direct := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/direct=%v", kind[0], direct), func(t *testing.T) {
				size := int64(24 << 20)
				if kind[0] == "xfs" {
					size = 300 << 20
				}
				dir := mount(t, kind[0], size, kind[1:]...)
				if kind[0] == "xfs" { // leave 16 MiB
					var s unix.Statfs_t
					must(t, "statfs", unix.Statfs(dir, &s))
					run(t, "fallocate", "-l", fmt.Sprint(int64(s.Bavail)*s.Bsize-16<<20), filepath.Join(dir, "ballast"))
				}
				d := open(t, newFile(t, dir, 64<<20), blockdev.Options{Direct: direct})
				p := blockdevtest.Buffer(64 << 10)
				var full int64 = -1
				for off := int64(0); off < 64<<20; off += int64(len(p)) {
					blockdevtest.Fill(p, off, 1)
					if err := d.WriteAt(p, off, 0); err != nil {
						if !errors.Is(err, unix.ENOSPC) {
							t.Fatalf("write at %d: %v, want %v", off, err, unix.ENOSPC)
						}
						full = off
						break
					}
				}
				if full < 0 {
					t.Fatal("a file system of 24 MiB took 64")
				}
				must(t, "flush of what was acknowledged", d.Flush())
				far := int64(48 << 20)
				for name, call := range map[string]func() error{
					"write":        func() error { return d.WriteAt(p, far, 0) },
					"FUA write":    func() error { return d.WriteAt(p, far, blockdev.WriteFUA) },
					"zero no hole": func() error { return d.Zero(far, 8<<20, blockdev.ZeroNoUnmap) },
				} {
					if err := call(); !errors.Is(err, unix.ENOSPC) {
						t.Errorf("%s into a full file system: %v", name, err)
					}
				}
				must(t, "flush: ENOSPC of a write is no failed flush", d.Flush())
				blockdevtest.Fill(p, 0, 2)
				must(t, "overwrite", d.WriteAt(p, 0, blockdev.WriteFUA))
				got := blockdevtest.Buffer(len(p))
				for off := int64(len(p)); off < full; off += int64(len(p)) {
					must(t, "read", d.ReadAt(got, off))
					if tag, ok := blockdevtest.Tag(got, off); !ok || tag != 1 {
						t.Fatalf("content at %d is lost", off)
					}
				}
				must(t, "discard", d.Discard(full/2&^65535, 4<<20))
				must(t, "flush", d.Flush())
				must(t, "write after room was made", d.WriteAt(p, far, blockdev.WriteFUA))
			})
		}
	}
}

// brokenDisk is a disk that takes writes into its cache and cannot keep them: a loop
// device whose file is sparse on a file system without room.
func brokenDisk(t *testing.T) (dev string, backing string) {
	dir := mount(t, "ext4", 24<<20, "-q", "-F", "-m", "0")
	backing = newFile(t, dir, 64<<20)
	return loop(t, backing), backing
}

func TestAFailedFlushIsForEver(t *testing.T) {
	fail := func(t *testing.T, d blockdev.Device) {
		p := blockdevtest.Buffer(1 << 20)
		for off := int64(0); off < 64<<20; off += 1 << 20 {
			blockdevtest.Fill(p, off, 1)
			if err := d.WriteAt(p, off, 0); err != nil {
				return // the failure came through already; what counts is the flush
			}
		}
	}
	after := func(t *testing.T, d blockdev.Device) {
		t.Helper()
		p := blockdevtest.Buffer(4096)
		for name, err := range map[string]error{
			"flush": d.Flush(), "FUA write": d.WriteAt(p, 0, blockdev.WriteFUA), "FUA zero": d.Zero(0, 4096, blockdev.WriteFUA),
		} {
			if !errors.Is(err, blockdev.ErrFlushFailed) {
				t.Errorf("%s after a failed flush: %v, want %v", name, err, blockdev.ErrFlushFailed)
			}
		}
		must(t, "read after a failed flush", d.ReadAt(p, 0))
	}
	t.Run("flush", func(t *testing.T) {
		dev, _ := brokenDisk(t)
		d := open(t, dev, blockdev.Options{})
		fail(t, d)
		if err := d.Flush(); err == nil || !errors.Is(err, unix.EIO) && !errors.Is(err, unix.ENOSPC) {
			t.Fatalf("flush of a disk without room: %v", err)
		}
		after(t, d)
		d.Close()
		d = open(t, dev, blockdev.Options{})
		p := blockdevtest.Buffer(4096)
		must(t, "durable write after opening anew", d.WriteAt(p, 0, blockdev.WriteFUA))
		must(t, "flush after opening anew", d.Flush())
	})
	t.Run("FUA", func(t *testing.T) {
		dev, _ := brokenDisk(t)
		d := open(t, dev, blockdev.Options{})
		p := blockdevtest.Buffer(1 << 20)
		var err error
		for off := int64(0); off < 64<<20 && err == nil; off += 1 << 20 {
			err = d.WriteAt(p, off, blockdev.WriteFUA)
		}
		if err == nil {
			t.Fatal("64 MiB are durable on a disk of 24")
		}
		after(t, d)
	})
	// Durable writes at the same time: each that is acknowledged is on the disk, whoever hears of the error first.
	t.Run("FUA at the same time", func(t *testing.T) {
		dev, backing := brokenDisk(t)
		d := open(t, dev, blockdev.Options{})
		const n = 64 << 10
		acked := make([]bool, 64<<20/n)
		var wg sync.WaitGroup
		for w := range 16 {
			wg.Go(func() {
				p := blockdevtest.Buffer(n)
				for i := w; i < len(acked); i += 16 {
					blockdevtest.Fill(p, int64(i)*n, 7)
					acked[i] = d.WriteAt(p, int64(i)*n, blockdev.WriteFUA) == nil
				}
			})
		}
		wg.Wait()
		d.Close()
		f, err := os.Open(backing)
		must(t, "open", err)
		defer f.Close()
		count := 0
		p := make([]byte, n)
		for i, ok := range acked {
			if !ok {
				continue
			}
			count++
			_, err := f.ReadAt(p, int64(i)*n)
			must(t, "read", err)
			if tag, ok := blockdevtest.Tag(p, int64(i)*n); !ok || tag != 7 {
				t.Errorf("write %d was acknowledged as durable and is lost", i)
			}
		}
		if count == 0 || count == len(acked) {
			t.Errorf("%d of %d writes acknowledged: this tests nothing", count, len(acked))
		}
	})
}

// evict makes the page cache forget the file. Pages on their way to the disk or
// through the kernel's lists are not forgotten at once, so it looks and asks again.
func evict(t testing.TB, file string) {
	t.Helper()
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	must(t, "open", err)
	defer f.Close()
	st, err := f.Stat()
	must(t, "stat", err)
	m, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_SHARED)
	must(t, "map", err)
	defer unix.Munmap(m)
	resident := make([]byte, (len(m)+os.Getpagesize()-1)/os.Getpagesize())
	for limit := time.Now().Add(60 * time.Second); ; {
		must(t, "sync", f.Sync())
		must(t, "evict", unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
		_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&m[0])), uintptr(len(m)), uintptr(unsafe.Pointer(&resident[0])))
		if errno != 0 {
			t.Fatalf("mincore: %v", errno)
		}
		if !slices.ContainsFunc(resident, func(b byte) bool { return b&1 != 0 }) {
			return
		}
		if time.Now().After(limit) {
			t.Fatal("the page cache does not forget the file")
		}
	}
}

// soon calls a Try method until it does not say that it would block, with the
// ordinary call in between: XFS wants one per tick of the clock, for the time stamp.
func soon(try, ordinary func() error) (err error) {
	for range 1000 {
		if err = try(); !errors.Is(err, blockdev.ErrWouldBlock) {
			return err
		}
		if err := ordinary(); err != nil {
			return err
		}
	}
	return err
}

func TestTryDoesNotWaitForTheDisk(t *testing.T) {
	for _, kind := range [][]string{{"ext4", "-q", "-F"}, {"xfs", "-q"}} {
		t.Run(kind[0], func(t *testing.T) {
			file := newFile(t, mount(t, kind[0], 320<<20, kind[1:]...), 8<<20)
			d := open(t, file, blockdev.Options{}).(blockdev.TryDevice)
			p, got := blockdevtest.Buffer(1<<20), blockdevtest.Buffer(4096)
			blockdevtest.Fill(p, 0, 1)
			must(t, "write", d.WriteAt(p, 0, 0))
			must(t, "try read of what was just written", soon(func() error { return d.TryReadAt(got, 8192) }, func() error { return nil }))
			if tag, ok := blockdevtest.Tag(got, 8192); !ok || tag != 1 {
				t.Error("wrong content")
			}
			must(t, "try write of a page in memory", soon(func() error { return d.TryWriteAt(p[:4096], 0, 0) }, func() error { return d.WriteAt(p[:4096], 0, 0) }))
			must(t, "try write of a block in a page in memory", soon(func() error { return d.TryWriteAt(p[512:1024], 512, 0) }, func() error { return d.WriteAt(p[512:1024], 512, 0) }))
			if err := d.TryWriteAt(p[:4096], 0, blockdev.WriteFUA); !errors.Is(err, blockdev.ErrWouldBlock) {
				t.Errorf("try durable write: %v", err)
			}

			// The kernel begins to read what it says it would wait for, and may be quick:
			// now and then the second look succeeds. Mostly it must not.
			refused := func(what string, prepare func(), try func() error) {
				t.Helper()
				for range 20 {
					evict(t, file)
					prepare()
					err := try()
					if errors.Is(err, blockdev.ErrWouldBlock) {
						return
					}
					must(t, what, err)
				}
				t.Errorf("%s never says that it would block", what)
			}
			const at = 512 << 10
			refused("try write of a part of a page on disk", func() {}, func() error { return d.TryWriteAt(p[at+512:at+1024], at+512, 0) })
			refused("try read of what is on disk only", func() {}, func() error { return d.TryReadAt(got, at) })
			must(t, "read", d.ReadAt(got, at))
			must(t, "try read of what was read", soon(func() error { return d.TryReadAt(got, at) }, func() error { return nil }))

			// Half in memory: nothing is answered by half. The kernel reads ahead what the
			// first look missed and may be done by the second, so both answers are good.
			big := blockdevtest.Buffer(256 << 10)
			for range 20 {
				evict(t, file)
				f, err := os.Open(file)
				must(t, "open", err)
				unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_RANDOM) // no read-ahead
				_, err = f.ReadAt(got, 0)
				f.Close()
				must(t, "read the first page", err)
				clear(big)
				switch err := d.TryReadAt(big, 0); {
				case errors.Is(err, blockdev.ErrWouldBlock):
				case err != nil || !bytes.Equal(big, p[:len(big)]):
					t.Fatalf("try read of a range that is half in memory: %v, or half an answer", err)
				}
			}
			must(t, "read", blockdevtest.ViaTry(d).ReadAt(big, 0))
			if !bytes.Equal(big, p[:len(big)]) {
				t.Error("wrong content")
			}
		})
	}
	t.Run("direct", func(t *testing.T) {
		d := open(t, newFile(t, t.TempDir(), 1<<20), blockdev.Options{Direct: true}).(blockdev.TryDevice)
		p := blockdevtest.Buffer(4096)
		if r, w := d.TryReadAt(p, 0), d.TryWriteAt(p, 0, 0); !errors.Is(r, blockdev.ErrWouldBlock) || !errors.Is(w, blockdev.ErrWouldBlock) {
			t.Errorf("direct I/O always waits: %v, %v", r, w)
		}
	})
}

// Content goes where another program finds it, and comes from there.
func TestOthersSeeTheSame(t *testing.T) {
	for _, direct := range []bool{false, true} {
		file := newFile(t, t.TempDir(), 1<<20)
		want := make([]byte, 1<<20)
		blockdevtest.Fill(want, 0, 5)
		must(t, "write", os.WriteFile(file, want, 0o600))
		d := open(t, file, blockdev.Options{Direct: direct})
		p := blockdevtest.Buffer(1 << 20)
		must(t, "read", d.ReadAt(p, 0))
		if !bytes.Equal(p, want) {
			t.Error("the device does not show what is in the file")
		}
		blockdevtest.Fill(p, 0, 6)
		must(t, "write", d.WriteAt(p, 0, 0))
		got, err := os.ReadFile(file)
		must(t, "read", err)
		if !bytes.Equal(got, p) {
			t.Error("the file does not have what was written")
		}
	}
}

func TestParseSize(t *testing.T) {
	for in, want := range map[string]int64{
		"0": 0, "1": 1, "512": 512, "512b": 512, "4k": 4096, "4K": 4096, "4KiB": 4096, "4kib": 4096, "4KB": 4000, "10G": 10 << 30, "1MiB": 1 << 20,
		"3MB": 3000000, "1T": 1 << 40, "1P": 1 << 50, "7E": 7 << 60, "9223372036854775807": 1<<63 - 1, "0000001k": 1024, "9EB": 9e18,
	} {
		if got, err := blockdev.ParseSize(in); err != nil || got != want {
			t.Errorf("%q: %d, %v, want %d", in, got, err, want)
		}
	}
	for _, in := range []string{"", "k", "-1", "+1", "1.5G", "1X", "1kk", "1Gib2", "8E", "10EB", "9223372036854775808", "99999999999999999999", "18446744073709551616k", " 1", "1 k", "0x10", "１"} {
		if got, err := blockdev.ParseSize(in); err == nil {
			t.Errorf("%q: %d, want an error", in, got)
		}
	}
}

func FuzzParseSize(f *testing.F) {
	for _, s := range []string{"4k", "10GiB", "9223372036854775807", "8E", "", "x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if n, err := blockdev.ParseSize(s); err == nil && n < 0 {
			t.Errorf("%q: %d", s, n)
		}
	})
}

var _ io.Closer = blockdev.Device(nil)
