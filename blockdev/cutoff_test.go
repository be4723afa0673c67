package blockdev_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"testing"

	"rdblk/blockdev"
	"rdblk/blockdev/blockdevtest"
	"rdblk/internal/worker"
)

// Somebody cuts a file off while it is served. What was there never reads as zeros, also not
// when a write, or he himself, has made the file long again.
func TestCutOff(t *testing.T) {
	const size, cut = 1 << 20, 256 << 10
	type writer func(d blockdev.Device, p []byte, off int64) error
	plain := func(d blockdev.Device, p []byte, off int64) error { return d.WriteAt(p, off, 0) }
	queued := func(d blockdev.Device, p []byte, off int64) error {
		w, err := worker.New(worker.Config{})
		if err != nil {
			return err
		}
		defer w.Close()
		q, err := blockdev.NewQueue(d, w, blockdev.QueueConfig{ArenaSize: -1})
		if err != nil {
			return err
		}
		defer w.Call(q.Close)
		done := make(chan error, 1)
		w.Call(func() {
			q.Submit(&blockdev.Request{Op: blockdev.OpWrite, Off: off, Buf: p, Done: func(r *blockdev.Request) { done <- r.Err }})
		})
		return <-done
	}
	for name, write := range map[string]writer{
		"write": plain,
		"queue": queued,
		"fua":   func(d blockdev.Device, p []byte, off int64) error { return d.WriteAt(p, off, blockdev.WriteFUA) },
		"zero": func(d blockdev.Device, p []byte, off int64) error {
			return d.Zero(off, int64(len(p)), blockdev.ZeroNoUnmap)
		},
		"grown again": func(d blockdev.Device, p []byte, off int64) error {
			return errors.Join(d.ReadAt(p, off), os.Truncate(d.Info().Name, size))
		},
	} {
		for _, direct := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/direct=%v", name, direct), func(t *testing.T) {
				path := newFile(t, t.TempDir(), size)
				var told []error
				d := open(t, path, blockdev.Options{Direct: direct, OnFlushFailed: func(err error) { told = append(told, err) }})
				p := blockdevtest.Buffer(4096)
				blockdevtest.Fill(p, 0, 1)
				for off := int64(0); off < size; off += int64(len(p)) {
					must(t, "write", d.WriteAt(p, off, 0))
				}
				must(t, "flush", d.Flush())
				must(t, "cut off", os.Truncate(path, cut))
				// At the very end: if it were done the file would have its old size again.
				if err := write(d, p, size-4096); !errors.Is(err, blockdev.ErrCutOff) {
					t.Errorf("modification behind the cut: %v", err)
				}
				for _, off := range []int64{cut, size / 2, size - 4096} {
					if err := d.ReadAt(p, off); !errors.Is(err, blockdev.ErrCutOff) || !errors.Is(err, io.ErrUnexpectedEOF) {
						t.Errorf("read at %d: %v", off, err)
					}
				}
				if err := d.Flush(); !errors.Is(err, blockdev.ErrFlushFailed) {
					t.Errorf("flush: %v", err)
				}
				if len(told) != 1 {
					t.Errorf("told %d times of the loss: %v", len(told), told)
				}
				must(t, "read of what is left", d.ReadAt(p, 0))
				must(t, "write to what is left", d.WriteAt(p, cut-4096, 0))
				must(t, "grow", os.Truncate(path, 2*size))
				if in, err := d.(blockdev.Resizer).Refresh(); err == nil || in.Size != size {
					t.Errorf("it grows over the hole: %v, size %d", err, in.Size)
				}
				if err := d.ReadAt(p, cut); !errors.Is(err, blockdev.ErrCutOff) {
					t.Errorf("read of the hole: %v", err)
				}
			})
		}
	}
	t.Run("found by flush", func(t *testing.T) {
		path := newFile(t, t.TempDir(), size)
		d := open(t, path, blockdev.Options{})
		must(t, "cut off", os.Truncate(path, cut))
		if err := d.Flush(); !errors.Is(err, blockdev.ErrCutOff) {
			t.Errorf("flush: %v", err)
		}
	})
}
