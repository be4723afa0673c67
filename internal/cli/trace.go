package cli

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"syscall"

	"rdblk/internal/logfile"

	"github.com/spf13/pflag"
)

// TraceStderr is the destination of a trace that means the program's standard error.
const TraceStderr = "-"

// TraceFlag adds --trace, alone or with a file: --trace=FILE. It is the setting "trace".
func TraceFlag(fs *pflag.FlagSet) {
	fs.String("trace", "", "write each command, answer, connection and event on a line, to standard error or to `FILE`")
	fs.Lookup("trace").NoOptDefVal = TraceStderr
}

// Bounds of the setting trace_size, and its default.
const (
	MinTraceSize     = logfile.MinSize
	MaxTraceSize     = 1 << 40
	DefaultTraceSize = 256 << 20
)

// OpenTrace opens the destination of a trace as a user names it: "" none (nil is
// returned), [TraceStderr], or a [logfile.File] of up to so many bytes, with mode 0600, since
// it tells who uses what.
func (e *Env) OpenTrace(dest string, size int64) (io.WriteCloser, error) {
	switch dest {
	case "":
		return nil, nil
	case TraceStderr:
		return unclosed{e.Stderr}, nil
	}
	f, err := logfile.Open(dest, size)
	if errors.Is(err, syscall.ENXIO) {
		return nil, fmt.Errorf("trace: open %s: nobody reads this pipe (start the reader first)", dest)
	}
	if errors.Is(err, syscall.EISDIR) {
		return nil, fmt.Errorf("trace: %w (--trace=FILE names the file itself: add a file name)", err)
	}
	if err != nil {
		return nil, fmt.Errorf("trace: %w (its directory must exist, and this user be allowed to write there: choose another with --trace=FILE)", err)
	}
	return f, nil
}

// traceHint adds to err how a file for --trace is written, if the word behind a --trace alone is what
// nobody knows what to do with.
func traceHint(args []string, err error) error {
	for i, a := range args[:max(0, len(args)-1)] {
		word := args[i+1]
		if a == "--" {
			break
		}
		if a != "--trace" || !errors.Is(err, fs.ErrNotExist) && !strings.HasSuffix(err.Error(), fmt.Sprintf("unexpected argument %q", word)) || !strings.Contains(err.Error(), word) {
			continue
		}
		return fmt.Errorf("%w (if that is meant to be the trace's file: --trace=%s)", err, word)
	}
	return err
}

// unclosed is a writer that Close does not close.
type unclosed struct{ io.Writer }

func (unclosed) Close() error { return nil }
