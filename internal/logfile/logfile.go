// Package logfile is a file of lines with a bound on its size.
package logfile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// MinSize is the least bound of a File.
const MinSize = 1 << 20

// A File is appended to until the next write would exceed its bound; then it is renamed
// to FILE.1, in place of what had that name, and a new one begun. So there are up to two
// files, and a bound's worth of the newest lines at least. Several processes may write
// to one. What is no regular file (a pipe, a terminal) has no bound. A File is one
// goroutine's.
type File struct {
	f       *os.File
	path    string
	limit   int64
	regular bool
}

// Open opens a file, to be appended to, or makes it with mode 0600. limit is the bound
// in bytes, at least MinSize; a single write that is larger exceeds it. A pipe that
// nobody reads is the error ENXIO.
func Open(path string, limit int64) (*File, error) {
	if limit < MinSize {
		return nil, fmt.Errorf("%s: a bound of %d bytes is less than %d", path, limit, MinSize)
	}
	return openFile(path, limit)
}

func openFile(path string, limit int64) (*File, error) {
	f := &File{path: path, limit: limit}
	if err := f.open(); err != nil {
		return nil, err
	}
	// What a symbolic link leads to is renamed, not the link: that may be /dev/stdout.
	if abs, err := filepath.Abs(path); err == nil {
		f.path = abs
	}
	if real, err := filepath.EvalSymlinks(f.path); err == nil {
		f.path = real
	}
	return f, nil
}

// open opens f.path in place of the file that was open.
func (f *File) open() error {
	// Without O_NONBLOCK the program would wait in open for somebody who reads a pipe.
	file, err := os.OpenFile(f.path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|syscall.O_NONBLOCK, 0o600)
	if err != nil {
		return err
	}
	st, err := file.Stat()
	if err != nil {
		file.Close()
		return err
	}
	if f.f != nil {
		f.f.Close()
	}
	f.f, f.regular = file, st.Mode().IsRegular()
	return nil
}

// Write appends whole lines, in a new file if there is no room.
func (f *File) Write(b []byte) (int, error) {
	if f.regular {
		// The size is asked for each time: others may write there too.
		st, err := f.f.Stat()
		if err != nil {
			return 0, err
		}
		if st.Size() > 0 && st.Size()+int64(len(b)) > f.limit {
			if err := f.rotate(st); err != nil {
				return 0, err
			}
		}
	}
	return f.f.Write(b)
}

// rotate begins a new file. st is what the full one is.
func (f *File) rotate(st os.FileInfo) error {
	// One process at a time; where there are no locks there are not several.
	if err := syscall.Flock(int(f.f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); errors.Is(err, syscall.EWOULDBLOCK) {
		return nil // another process is at it: next time
	}
	switch now, err := os.Lstat(f.path); {
	case err == nil && os.SameFile(now, st):
		if err := os.Rename(f.path, f.path+".1"); err != nil {
			return f.cut(err)
		}
	case err == nil, errors.Is(err, fs.ErrNotExist): // somebody else has renamed or removed it
	default:
		return f.cut(err)
	}
	return f.open() // and let the old one, with its lock, go
}

// cut makes room where the file cannot be renamed: the newest lines matter most.
func (f *File) cut(why error) error {
	defer syscall.Flock(int(f.f.Fd()), syscall.LOCK_UN)
	if err := f.f.Truncate(0); err != nil {
		return errors.Join(why, err)
	}
	_, err := fmt.Fprintf(f.f, "%s - the lines before are gone: %v\n", time.Now().Format("15:04:05.000000"), why)
	return err
}

// Close closes the file.
func (f *File) Close() error { return f.f.Close() }
