// Package control is how a command finds and talks to the programs that run on
// this machine: rdinit list, status and detach, and rdtarget status.
//
// A running program takes a name in the run directory: a lock file that it
// holds for its life and a Unix socket beside it that answers HTTP with JSON.
// The lock is the truth: an entry whose lock is free belongs to a program that
// died, and whoever notices removes it. The directory is the user's own (0700)
// and so is every socket in it (0600); who can open them may do what the user may.
package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"rdblk/internal/timeout"

	"golang.org/x/sys/unix"
)

// Errors.
var (
	// ErrNameTaken says that a running program has the name.
	ErrNameTaken = errors.New("the name is taken by a running program")
	// ErrGone says that the program ended while it was asked.
	ErrGone = errors.New("the program ended before it answered")
)

// MaxName is the longest name in bytes.
const MaxName = 64

// DefaultDir is the run directory of this user: /run/rdblk for root, else
// $XDG_RUNTIME_DIR/rdblk, else /tmp/rdblk-UID. getenv looks the environment up.
func DefaultDir(getenv func(string) string) string {
	if os.Geteuid() == 0 {
		return "/run/rdblk"
	}
	if d := getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(d) {
		return filepath.Join(d, "rdblk")
	}
	return fmt.Sprintf("/tmp/rdblk-%d", os.Geteuid())
}

// EnsureDir makes the run directory, or checks that the one that is there belongs to
// this user alone: in /tmp somebody else may have put one in our way.
func EnsureDir(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("make the run directory %s: %w (choose another with --run-dir)", dir, plain(err))
	}
	return checkDir(dir)
}

func checkDir(dir string) error {
	fi, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("run directory %s: %w", dir, plain(err))
	}
	if err := private(fi); err != nil {
		return fmt.Errorf("run directory %s: %w, or choose another with --run-dir", dir, err)
	}
	return nil
}

// EnsurePrivateDir is EnsureDir for a directory whose place nobody chooses.
func EnsurePrivateDir(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	fi, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	if err := private(fi); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	return nil
}

// private says what keeps a directory from being this user's alone, and what to do.
func private(fi os.FileInfo) error {
	st, ok := fi.Sys().(*syscall.Stat_t)
	switch {
	case !fi.IsDir():
		return errors.New("it is not a directory: remove it")
	case !ok:
		return errors.New("its owner cannot be told: have it removed")
	case int(st.Uid) != os.Geteuid():
		return fmt.Errorf("it belongs to another user (number %d): do this as that user, have it removed", st.Uid)
	case fi.Mode().Perm()&0o077 != 0:
		return fmt.Errorf("others have access to it (mode %04o): chmod 700 it", fi.Mode().Perm())
	}
	return nil
}

// CleanName makes a legal name of s: letters, digits, dot, dash and underscore
// stay, everything else becomes a dash.
func CleanName(s string) string {
	b := []byte(s)
	for i, c := range b {
		if !nameByte(c) {
			b[i] = '-'
		}
	}
	n := strings.Trim(string(b[:min(len(b), MaxName)]), ".-")
	if n == "" {
		return "unnamed"
	}
	return n
}

func nameByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' || c == '-' || c == '_'
}

// CheckName says what is wrong with a name that a user chose.
func CheckName(s string) error {
	if s == "" || len(s) > MaxName || CleanName(s) != s {
		return fmt.Errorf("%q cannot be a name: up to %d letters, digits, dots, dashes and underscores, beginning and ending with neither dot nor dash", s, MaxName)
	}
	return nil
}

// An Entry is this program's place in the run directory.
type Entry struct {
	Name string

	dir, base string
	lock      *os.File
	ln        net.Listener
	srv       *http.Server
	done      chan struct{}
}

// Register takes name for program in dir. With unique false a taken name gets a
// number appended instead of failing with ErrNameTaken. Call Serve next.
func Register(dir, program, name string, unique bool) (*Entry, error) {
	if err := EnsureDir(dir); err != nil {
		return nil, err
	}
	try := name
	for i := 2; ; i++ {
		e, err := register(dir, program, try)
		if err == nil || unique || !errors.Is(err, ErrNameTaken) || i > 1000 {
			return e, err
		}
		suffix := fmt.Sprintf("-%d", i)
		try = name[:min(len(name), MaxName-len(suffix))] + suffix
	}
}

func register(dir, program, name string) (*Entry, error) {
	if err := CheckName(name); err != nil {
		return nil, err
	}
	base := filepath.Join(dir, program+"."+name)
	if len(base)+len(".sock") > 107 {
		return nil, fmt.Errorf("control socket %s.sock: the path is longer than the 107 bytes that a Unix socket may have (choose a shorter --run-dir or --name)", base)
	}
	lock, err := takeLock(base + ".lock")
	if err != nil {
		if errors.Is(err, ErrNameTaken) {
			return nil, fmt.Errorf("%q: %w%s: choose another with --name", name, err, holder(base+".lock"))
		}
		return nil, fmt.Errorf("lock file %s.lock: %w (choose another place with --run-dir)", base, plain(err))
	}
	// What is left of a dead program of that name goes; we hold its lock.
	os.Remove(base + ".sock")
	ln, err := net.Listen("unix", base+".sock")
	if err == nil {
		err = os.Chmod(base+".sock", 0o600)
	}
	if err != nil {
		os.Remove(base + ".lock")
		lock.Close()
		return nil, fmt.Errorf("control socket %s.sock: %w (choose another place with --run-dir)", base, plain(err))
	}
	// For messages of those who find the name taken.
	lock.Truncate(0)
	lock.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	ln.(*net.UnixListener).SetUnlinkOnClose(false)
	return &Entry{Name: name, dir: dir, base: base, lock: lock, ln: ln, done: make(chan struct{})}, nil
}

// holder names the process that wrote itself into a lock file.
func holder(path string) string {
	b, err := os.ReadFile(path)
	pid, perr := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || perr != nil {
		return ""
	}
	return fmt.Sprintf(" (process %d)", pid)
}

// plain is the system's error alone; the message around it says on what.
func plain(err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}

// takeLock locks the file, which it makes if need be. Since a holder removes the
// file when it ends, what was locked may not be what is at the path any more: look again then.
func takeLock(path string) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, err
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err != nil {
			f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, ErrNameTaken
			}
			return nil, err
		}
		ours, err1 := f.Stat()
		there, err2 := os.Lstat(path)
		if err1 == nil && err2 == nil && os.SameFile(ours, there) {
			return f, nil
		}
		f.Close()
	}
}

// Serve answers requests with h until Close.
func (e *Entry) Serve(h http.Handler, log *slog.Logger) {
	e.srv = &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 30 * time.Second,
		MaxHeaderBytes: 1 << 16, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn)}
	go func() {
		defer close(e.done)
		if err := e.srv.Serve(e.ln); !errors.Is(err, http.ErrServerClosed) {
			log.Error("control socket", "err", err)
		}
	}()
}

// Close lets running requests be answered for at most a second and gives the name back.
func (e *Entry) Close() error {
	if e.srv != nil {
		ctx, cancel := timeout.With(context.Background(), time.Second, "")
		defer cancel()
		if e.srv.Shutdown(ctx) != nil {
			e.srv.Close()
		}
		<-e.done
	}
	e.ln.Close()
	os.Remove(e.base + ".sock")
	os.Remove(e.base + ".lock")
	return e.lock.Close()
}

// A Client talks to one running program.
type Client struct {
	Name string
	base string // path of its files, without the ending
	http *http.Client
}

func (c *Client) process() string { return holder(c.base + ".lock") }

// List returns the running programs of that kind, by name, and removes what dead ones left.
func List(dir, program string) ([]*Client, error) {
	if err := checkDir(dir); err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil, nil
		}
		return nil, err
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("run directory %s: %w", dir, plain(err))
	}
	var list []*Client
	for _, f := range files {
		name, ok := strings.CutPrefix(f.Name(), program+".")
		name, isLock := strings.CutSuffix(name, ".lock")
		if !ok || !isLock {
			continue
		}
		base := filepath.Join(dir, program+"."+name)
		if removeStale(base) {
			continue
		}
		list = append(list, newClient(name, base))
	}
	slices.SortFunc(list, func(a, b *Client) int { return strings.Compare(a.Name, b.Name) })
	return list, nil
}

// removeStale removes an entry whose program is dead and tells whether it was.
func removeStale(base string) bool {
	if c, err := net.Dial("unix", base+".sock"); err == nil {
		c.Close()
		return false
	}
	if _, err := os.Lstat(base + ".lock"); err != nil {
		return true
	}
	// Only now the lock: trying it at a living program would be in the way of its successor.
	lock, err := takeLock(base + ".lock")
	if err != nil {
		return false
	}
	os.Remove(base + ".sock")
	os.Remove(base + ".lock")
	lock.Close()
	return true
}

func newClient(name, base string) *Client {
	sock := base + ".sock"
	return &Client{Name: name, base: base, http: &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", sock)
		},
	}}}
}

// A RemoteError is what the program answered when it could not do what was asked.
type RemoteError struct {
	Message string `json:"error"`
}

func (e *RemoteError) Error() string { return e.Message }

// Get asks for path and decodes the answer into v. Post sends body as well.
func (c *Client) Get(ctx context.Context, path string, v any) error {
	return c.do(ctx, http.MethodGet, path, nil, v)
}

// Post asks the program to do something.
func (c *Client) Post(ctx context.Context, path string, body, v any) error {
	return c.do(ctx, http.MethodPost, path, body, v)
}

func (c *Client) do(ctx context.Context, method, path string, body, v any) error {
	var r io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return err
		}
		r = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://local"+path, r)
	if err != nil {
		return err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("ask %q: %w", c.Name, ErrGone)
		}
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		var u *url.Error
		if errors.As(err, &u) {
			err = u.Err
		}
		return fmt.Errorf("ask %q%s: %w", c.Name, c.process(), plain(err))
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 16<<20))
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return fmt.Errorf("ask %q%s: %w", c.Name, c.process(), plain(err))
	}
	if resp.StatusCode != http.StatusOK {
		re := &RemoteError{}
		if json.Unmarshal(b, re) != nil || re.Message == "" {
			re.Message = fmt.Sprintf("%s (a different version of the program?)", resp.Status)
		}
		return re
	}
	if v == nil {
		return nil
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("answer of %q: %w", c.Name, err)
	}
	return nil
}

// WriteJSON answers with v, indented for people who use curl.
func WriteJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	enc.Encode(v)
}

// WriteError answers that the request could not be done.
func WriteError(w http.ResponseWriter, code int, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(RemoteError{err.Error()})
}
