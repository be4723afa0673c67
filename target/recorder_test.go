package target

import (
	"fmt"
	"strings"
	"sync"

	"rdblk/blockdev"
)

// recorder notes the calls that reach a device.
type recorder struct {
	blockdev.TryDevice
	noDiscard bool

	mu    sync.Mutex
	calls []string
}

func (d *recorder) note(format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls = append(d.calls, fmt.Sprintf(format, args...))
}

func (d *recorder) take() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := strings.Join(d.calls, "; ")
	d.calls = nil
	return s
}

func flagText(f blockdev.WriteFlags) string {
	s := ""
	if f&blockdev.WriteFUA != 0 {
		s += " fua"
	}
	if f&blockdev.ZeroNoUnmap != 0 {
		s += " keep"
	}
	return s
}

func (d *recorder) Info() blockdev.Info {
	i := d.TryDevice.Info()
	if d.noDiscard {
		i.Discard, i.DiscardZeros = false, false
	}
	return i
}

func (d *recorder) TryReadAt(p []byte, off int64) error {
	d.note("read %d+%d", off, len(p))
	return d.TryDevice.TryReadAt(p, off)
}

func (d *recorder) TryWriteAt(p []byte, off int64, f blockdev.WriteFlags) error {
	d.note("write %d+%d%s", off, len(p), flagText(f))
	return d.TryDevice.TryWriteAt(p, off, f)
}

func (d *recorder) WriteAt(p []byte, off int64, f blockdev.WriteFlags) error {
	d.note("write %d+%d%s", off, len(p), flagText(f))
	return d.TryDevice.WriteAt(p, off, f)
}

func (d *recorder) Zero(off, n int64, f blockdev.WriteFlags) error {
	d.note("zero %d+%d%s", off, n, flagText(f))
	return d.TryDevice.Zero(off, n, f)
}

func (d *recorder) Discard(off, n int64) error {
	d.note("discard %d+%d", off, n)
	return d.TryDevice.Discard(off, n)
}

func (d *recorder) Flush() error {
	d.note("flush")
	return d.TryDevice.Flush()
}
