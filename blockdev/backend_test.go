package blockdev_test

import (
	"errors"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/pojntfx/go-nbd/pkg/backend"
	"golang.org/x/sys/unix"

	"rdblk/blockdev"
	"rdblk/blockdev/blockdevtest"
)

func TestGoNBDBackends(t *testing.T) {
	t.Run("memory", func(t *testing.T) {
		blockdevtest.Run(t, func(t testing.TB) blockdev.Device {
			d, err := blockdev.FromBackend("memory", backend.NewMemoryBackend(make([]byte, 2<<20)), blockdev.Options{})
			must(t, "open", err)
			return d
		})
	})
	t.Run("file", func(t *testing.T) {
		dir := t.TempDir()
		blockdevtest.Run(t, func(t testing.TB) blockdev.Device {
			f, err := os.OpenFile(newFile(t, dir, 2<<20), os.O_RDWR, 0)
			must(t, "open", err)
			t.Cleanup(func() { f.Close() })
			d, err := blockdev.FromBackend("file", backend.NewFileBackend(f), blockdev.Options{BlockSize: 4096})
			must(t, "open", err)
			return d
		})
	})
}

// odd is a Backend with manners that io.ReaderAt and io.WriterAt allow, or not.
type odd struct {
	size     int64
	sizeErr  error
	read     func(p []byte, off int64) (int, error)
	write    func(p []byte, off int64) (int, error)
	syncErr  error
	syncs    int
	closings int
}

func (b *odd) ReadAt(p []byte, off int64) (int, error)  { return b.read(p, off) }
func (b *odd) WriteAt(p []byte, off int64) (int, error) { return b.write(p, off) }
func (b *odd) Size() (int64, error)                     { return b.size, b.sizeErr }
func (b *odd) Sync() error                              { b.syncs++; return b.syncErr }
func (b *odd) Close() error                             { b.closings++; return nil }

func TestOddBackends(t *testing.T) {
	b := &odd{size: 1 << 20}
	b.read = func(p []byte, off int64) (int, error) { return len(p), nil }
	b.write = func(p []byte, off int64) (int, error) { return len(p), nil }
	d, err := blockdev.FromBackend("odd", b, blockdev.Options{})
	must(t, "open", err)
	p := make([]byte, 4096)

	b.read = func(p []byte, off int64) (int, error) { return len(p), io.EOF }
	must(t, "all of it and EOF", d.ReadAt(p, 1<<20-4096))
	for name, read := range map[string]func(p []byte, off int64) (int, error){
		"a short count and EOF": func(p []byte, off int64) (int, error) { return 100, io.EOF },
		"a short count":         func(p []byte, off int64) (int, error) { return 100, nil },
		"nothing":               func(p []byte, off int64) (int, error) { return 0, nil },
	} {
		b.read = read
		if err := d.ReadAt(p, 0); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%s: %v", name, err)
		}
	}
	b.read = func(p []byte, off int64) (int, error) { return 0, unix.EIO }
	if err := d.ReadAt(p, 0); !errors.Is(err, unix.EIO) {
		t.Errorf("read: %v", err)
	}
	b.write = func(p []byte, off int64) (int, error) { return len(p) - 1, nil }
	if err := d.WriteAt(p, 0, 0); !errors.Is(err, io.ErrShortWrite) {
		t.Errorf("a short write: %v", err)
	}
	b.write = func(p []byte, off int64) (int, error) { return 0, unix.ENOSPC }
	for name, err := range map[string]error{"write": d.WriteAt(p, 0, 0), "FUA": d.WriteAt(p, 0, blockdev.WriteFUA), "zero": d.Zero(0, 8192, 0)} {
		if !errors.Is(err, unix.ENOSPC) {
			t.Errorf("%s: %v", name, err)
		}
	}
	must(t, "flush", d.Flush())

	b.write = func(p []byte, off int64) (int, error) { return len(p), nil }
	syncs := b.syncs
	must(t, "FUA", d.WriteAt(p, 0, blockdev.WriteFUA))
	must(t, "FUA zero", d.Zero(0, 8192, blockdev.WriteFUA))
	if b.syncs != syncs+2 {
		t.Errorf("%d syncs for two FUA calls", b.syncs-syncs)
	}
	b.syncErr = unix.EIO
	if err := d.WriteAt(p, 0, blockdev.WriteFUA); !errors.Is(err, unix.EIO) {
		t.Errorf("FUA with a sync that fails: %v", err)
	}
	b.syncErr = nil
	if err := d.Flush(); !errors.Is(err, blockdev.ErrFlushFailed) {
		t.Errorf("flush after a failed one: %v", err)
	}

	b.size = 3<<20 + 7
	in, err := d.(blockdev.Resizer).Refresh()
	if err != nil || in.Size != 3<<20 {
		t.Errorf("growth: %v, %d", err, in.Size)
	}
	b.size = 1 << 20
	if in, err := d.(blockdev.Resizer).Refresh(); err == nil || in.Size != 3<<20 {
		t.Errorf("shrink: %v, %d", err, in.Size)
	}
	b.sizeErr = unix.EIO
	if _, err := d.(blockdev.Resizer).Refresh(); !errors.Is(err, unix.EIO) {
		t.Errorf("refresh: %v", err)
	}
	must(t, "close", d.Close())
	if b.closings != 1 {
		t.Errorf("closed %d times", b.closings)
	}

	for name, b := range map[string]*odd{"fails": {sizeErr: unix.EIO}, "negative": {size: -1}, "empty": {}, "small": {size: 100}} {
		if _, err := blockdev.FromBackend(name, b, blockdev.Options{}); err == nil || !strings.HasPrefix(err.Error(), name+":") {
			t.Errorf("size %s: %v", name, err)
		}
	}
}

func TestReadOnlyBackend(t *testing.T) {
	blockdevtest.RunReadOnly(t, func(t testing.TB) blockdev.Device {
		d, err := blockdev.FromBackend("memory", backend.NewMemoryBackend(make([]byte, 1<<20)), blockdev.Options{ReadOnly: true})
		must(t, "open", err)
		return d
	})
}
