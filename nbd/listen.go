package nbd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func sortByID(l []ConnStatus) {
	slices.SortFunc(l, func(a, b ConnStatus) int {
		switch {
		case a.ID < b.ID:
			return -1
		case a.ID > b.ID:
			return 1
		}
		return 0
	})
}

// maxSocketPath is what a sockaddr_un holds, with its terminating zero.
const maxSocketPath = 107

// ListenUnix listens on a Unix socket that only this user (mode 0600), or whom mode
// lets, can connect to: the permissions are there before the socket is. A socket file that
// nobody listens on any more is replaced; one that is in use is ErrSocketInUse, and
// anything else at path is left alone. Closing the listener removes its file.
func ListenUnix(path string, mode fs.FileMode) (net.Listener, error) {
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("listen on %q: a socket's path may have %d bytes and this one has %d (use a shorter one)", path, maxSocketPath, len(path))
	}
	// Two servers that find the same stale socket must not remove each other's new
	// one: between look and listen the directory is locked.
	unlock, err := lockDirectory(filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("listen on %q: %w", path, plain(err))
	}
	defer unlock()
	if err := removeStale(path); err != nil {
		return nil, fmt.Errorf("listen on %q: %w", path, plain(err))
	}
	lc := net.ListenConfig{Control: func(_, _ string, rc syscall.RawConn) error {
		var err error
		// The file gets the mode that its socket has when it is bound, less the umask.
		cerr := rc.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), uint32(mode.Perm())) })
		return errors.Join(cerr, err)
	}}
	ln, err := lc.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on %q: %w", path, plain(err))
	}
	ul := ln.(*net.UnixListener)
	ul.SetUnlinkOnClose(false) // it would remove whatever is there by then
	l := &unixListener{UnixListener: ul, path: path}
	st, err := os.Lstat(path)
	if err == nil && st.Mode().Perm() != mode.Perm() {
		err = os.Chmod(path, mode.Perm()) // the umask took something away
	}
	if err != nil {
		ul.Close()
		return nil, fmt.Errorf("listen on %q: %w", path, err)
	}
	return l, nil
}

// lockDirectory takes the directory's lock, waiting for it for a moment. If somebody
// else keeps it, which anybody may who can read a directory like /tmp, we go on without:
// it only guards against a race that is unlikely.
func lockDirectory(dir string) (unlock func(), err error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(2 * time.Second); ; {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if err != unix.EWOULDBLOCK && err != unix.EINTR {
			f.Close()
			return nil, fmt.Errorf("lock directory %q: %w", dir, err)
		}
		if time.Now().After(end) {
			return func() { f.Close() }, nil
		}
		<-time.After(10 * time.Millisecond)
	}
}

func removeStale(path string) error {
	st, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return plain(err)
	}
	if st.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("it exists and is no socket but %s; remove it or choose another path", kindOfFile(st.Mode()))
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		who := listenerOf(c)
		c.Close()
		return fmt.Errorf("%w%s: stop it or choose another path", ErrSocketInUse, who)
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		// Full backlog, no permission: somebody may well be there.
		return fmt.Errorf("%w, or cannot be tried: %w", ErrSocketInUse, plain(err))
	}
	return os.Remove(path)
}

// listenerOf names the process at the other end of a connection to a Unix socket, for a
// message; empty if the kernel does not tell.
func listenerOf(c net.Conn) string {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return ""
	}
	rc, err := u.SyscallConn()
	if err != nil {
		return ""
	}
	var cred *unix.Ucred
	if cerr := rc.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); cerr != nil || err != nil || cred.Pid <= 0 {
		return ""
	}
	comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", cred.Pid))
	return fmt.Sprintf(" (process %d, %q)", cred.Pid, bytes.TrimSpace(comm))
}

func kindOfFile(m fs.FileMode) string {
	switch {
	case m.IsRegular():
		return "a file"
	case m.IsDir():
		return "a directory"
	case m&fs.ModeSymlink != 0:
		return "a symbolic link"
	case m&fs.ModeNamedPipe != 0:
		return "a pipe"
	case m&fs.ModeDevice != 0:
		return "a device"
	}
	return "something special"
}

// plain is the system's error with what to do about it; the message around it says on what.
func plain(err error) error {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return err
	}
	switch errno {
	case unix.EACCES, unix.EPERM, unix.EROFS:
		return fmt.Errorf("%w (this user must be able to write to its directory: choose another path)", errno)
	case unix.ENOENT, unix.ENOTDIR:
		return fmt.Errorf("%w (its directory must exist: make it, or choose another path)", errno)
	}
	return errno
}

// unixListener removes its socket file when it is closed.
type unixListener struct {
	*net.UnixListener
	path string
	once sync.Once
}

// Close is called by several, at the same time. Only the first to close the socket waits until nobody accepts on it any
// more; until then it answers, and its file would be taken for another server's.
func (l *unixListener) Close() error {
	err := net.ErrClosed
	l.once.Do(func() {
		err = l.UnixListener.Close()
		// By now it may be another server's: that one answers, then it stays.
		// A file that cannot be removed is stale and the next server's to replace.
		if unlock, err := lockDirectory(filepath.Dir(l.path)); err == nil {
			_ = removeStale(l.path)
			unlock()
		}
	})
	return err
}
