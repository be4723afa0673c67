// Package losses remembers, from one run of a server to the next, how often a
// store may have lost writes that it had taken.
//
// The kernel tells of a failed write-back once, to whoever asks first. The process
// that was told knows for as long as it lives; its successor opens a store that looks
// clean. So each failure is counted in a file of its own for every store, in a
// directory that is the same however the server was started, and the count is on
// file before anybody hears of the failure. It need not survive a boot: that is noticed by itself.
//
// Between the kernel's report and the mark is a moment, and a server that is killed while it waits in
// fdatasync never sees the report, which counts as given. A second file, mapped into memory, holds
// how many such calls are under way, and tells the successor that one was.
package losses

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"rdblk/blockdev"
	"rdblk/internal/control"
)

// header begins every file; one byte follows for each loss. It is written when the
// server starts, so that counting later needs no new inode and no new page of a file
// system that may be full by then.
const header = "rdblk: one mark for each time that writes may have been lost\n"

// maxFile bounds what is believed of a file.
const maxFile = 1 << 30

// DefaultDir is where this user's counts are: /run/rdblk/losses for root, else
// /tmp/rdblk-UID/losses. Unlike the run directory it depends on no variable, and not
// on a directory that goes when the user logs out: it must be found again by a server
// that is started in another way.
func DefaultDir() string {
	if os.Geteuid() == 0 {
		return "/run/rdblk/losses"
	}
	return fmt.Sprintf("/tmp/rdblk-%d/losses", os.Geteuid())
}

// Key names the store that spec opens, the same in every run: by its UUID, or else
// by its place. It is empty for what ends with the process (mem: and null:).
func Key(spec string, info blockdev.Info) string {
	var st unix.Stat_t
	if unix.Stat(spec, &st) != nil {
		return ""
	}
	switch {
	case info.UUID != [16]byte{}:
		return fmt.Sprintf("uuid-%x", info.UUID)
	case st.Mode&unix.S_IFMT == unix.S_IFBLK:
		return fmt.Sprintf("disk-%d-%d", unix.Major(uint64(st.Rdev)), unix.Minor(uint64(st.Rdev)))
	default:
		return fmt.Sprintf("file-%d-%d-%d", unix.Major(uint64(st.Dev)), unix.Minor(uint64(st.Dev)), st.Ino)
	}
}

// A Counter counts the losses of one store. Its methods may be called from any goroutine.
type Counter struct {
	path string
	log  *slog.Logger
	n    atomic.Uint64

	page  []byte // of the second file; nil: not kept
	doubt bool

	mu sync.Mutex
	f  *os.File // nil: not kept
}

// Open returns the counter of the store with that key in dir, which it makes with
// its parent if need be. If it cannot be kept, which is logged, the counter begins at
// a number that no other run had, so that every restart counts as a loss.
func Open(dir, key string, log *slog.Logger) *Counter {
	c := &Counter{path: filepath.Join(dir, key), log: log}
	n, err := c.open(dir)
	if err != nil {
		n = uint64(time.Now().UnixMicro())
		log.Error("failed flushes cannot be remembered beyond the end of this program; so that none is missed, "+
			"attachments with unflushed writes will take every restart for one", "store", key, "err", err)
	}
	c.n.Store(n)
	return c
}

func (c *Counter) open(dir string) (uint64, error) {
	for _, d := range []string{filepath.Dir(dir), dir} {
		if err := control.EnsurePrivateDir(d); err != nil {
			return 0, err
		}
	}
	f, err := create(c.path)
	if err != nil {
		return 0, err
	}
	n, err := marks(f)
	if err != nil {
		f.Close()
		return 0, fmt.Errorf("%s: %w (remove it when nothing is attached)", c.path, err)
	}
	if c.page, err = mapPage(c.path + busySuffix); err != nil {
		f.Close()
		return 0, err
	}
	if busy := c.busy(); busy.Load() != 0 {
		c.doubt = true
		c.log.Warn("the last server of this store was killed while it made writes durable: the next flush looks whether some were lost, and may take longer", "store", filepath.Base(c.path))
	}
	c.busy().Store(0)
	c.f = f
	return n, nil
}

const (
	busySuffix = ".busy"
	pageSize   = 4096
)

// mapPage maps a file of one page, whose memory is there: touching it cannot fail.
func mapPage(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err == nil && !fi.Mode().IsRegular() {
		err = fmt.Errorf("%s: it is not a file", path)
	}
	if err == nil && fi.Size() < pageSize {
		_, err = f.WriteAt(make([]byte, pageSize-fi.Size()), fi.Size())
	}
	if err != nil {
		return nil, err
	}
	p, err := unix.Mmap(int(f.Fd()), 0, pageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", path, err)
	}
	return p, nil
}

func (c *Counter) busy() *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&c.page[0])) }

// Watch lets dev, which has not been used yet, keep account of calls under way. The counter
// must not be closed before it.
func (c *Counter) Watch(dev blockdev.Device) {
	if w, ok := dev.(blockdev.Watchable); ok && c.page != nil {
		w.Watch(c.busy(), c.doubt)
	}
}

// create opens the file for appending, and begins it if it is new.
func create(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_APPEND|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	fi, err := f.Stat()
	if err == nil && fi.Size() == 0 {
		_, err = f.WriteString(header)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func marks(f *os.File) (uint64, error) {
	fi, err := f.Stat()
	if err != nil {
		return 0, err
	}
	b := make([]byte, len(header))
	if _, err := f.ReadAt(b, 0); err != nil || string(b) != header || !fi.Mode().IsRegular() || fi.Size() > maxFile {
		return 0, errors.New("it is not a file of marks")
	}
	return uint64(fi.Size() - int64(len(header))), nil
}

// Count is the number of losses, those of earlier runs included.
func (c *Counter) Count() uint64 { return c.n.Load() }

// Add counts one more. It returns when that is on file; if it cannot be, that is logged.
func (c *Counter) Add(cause error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.n.Add(1)
	if c.f == nil {
		return // not kept: it was said at the start, and the next run begins at another number anyway
	}
	if err := c.mark(n); err != nil {
		c.log.Error("WRITES MAY HAVE BEEN LOST AND THIS CANNOT BE REMEMBERED: detach all that is attached to this store before it is served again",
			"cause", cause, "count", n, "err", err)
		return
	}
	c.log.Error("writes may have been lost: attachments with unflushed writes will fail when they reconnect", "cause", cause, "count", n, "file", c.path)
}

// mark appends a mark, or, should somebody have tidied up, as many as there must be.
func (c *Counter) mark(n uint64) error {
	ours, err := c.f.Stat()
	if err != nil {
		return err
	}
	if there, err := os.Lstat(c.path); err == nil && os.SameFile(ours, there) {
		_, err = c.f.Write([]byte{'x'})
		return err
	}
	f, err := create(c.path)
	if err != nil {
		return err
	}
	have, err := marks(f)
	if err != nil {
		f.Close()
		return err
	}
	c.f.Close()
	c.f = f
	for more := have; more < n || more == have; more++ {
		if _, err := f.Write([]byte{'x'}); err != nil {
			return err
		}
	}
	return nil
}

// Close ends the use of the file, which goes if it has no marks. To be called while
// the store is still locked against other servers, and not used any more.
func (c *Counter) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.f == nil {
		return nil
	}
	if fi, err := c.f.Stat(); err == nil && fi.Size() == int64(len(header)) && c.n.Load() == 0 {
		os.Remove(c.path)
	}
	// A device that hangs may come back to it: then it stays, and tells the next server.
	if c.busy().Load() == 0 {
		os.Remove(c.path + busySuffix)
		unix.Munmap(c.page)
		c.page = nil
	}
	err := c.f.Close()
	c.f = nil
	return err
}
