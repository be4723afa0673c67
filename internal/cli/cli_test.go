package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestMainExitCodesAndMessages(t *testing.T) {
	fs := NewFlagSet("work")
	n := fs.Int("n", 1, "how `many`")
	var got []string
	p := &Program{Name: "prog", Short: "a program.", Usual: "work", Commands: []*Command{{
		Name: "work", Args: "[flags] THING", Short: "do it", Long: "Does it.", Flags: fs,
		Run: func(_ context.Context, args []string) error {
			got = args
			switch *n {
			case 2:
				return Usage(errors.Join(errors.New("a: wrong"), errors.New("b: wrong")))
			case 3:
				return fmt.Errorf("wrapped: %w", Usagef("c"))
			case 4:
				return errors.New("it broke")
			}
			return nil
		},
	}}}
	for _, c := range []struct {
		args     string
		code     int
		out, err string
	}{
		{"", 2, "", "prog: a program.\n\nUsage: prog COMMAND [arguments]\n\nCommands:\n  work          do it\n  help          explain a command: prog help COMMAND\n"},
		{"work x y", 0, "", ""},
		{"work --n=2", 2, "", "prog: work: a: wrong\nprog: work: b: wrong\nSee 'prog work --help'.\n"},
		{"work --n=3", 2, "", "prog: work: wrapped: c\nSee 'prog work --help'.\n"},
		{"work --n=4", 1, "", "prog: work: it broke\n"},
		{"work --nope", 2, "", "prog: work: unknown flag: --nope\nSee 'prog work --help'.\n"},
		{"work --n=x", 2, "", "prog: work: --n: \"x\" is no whole number: write one such as 4\nSee 'prog work --help'.\n"},
		{"wrok", 2, "", "prog: there is no command \"wrok\" (did you mean work?)\nSee 'prog help'.\n"},
		{"fly", 2, "", "prog: there is no command \"fly\"\nSee 'prog help'.\n"},
		{"a.img", 2, "", "prog: there is no command \"a.img\" (did you mean 'prog work a.img'?)\nSee 'prog help'.\n"},
		{"work --n", 2, "", "prog: work: --n needs a value: --n many\nSee 'prog work --help'.\n"},
		{"--nope work", 2, "", "prog: unknown flag \"--nope\" before the command\nSee 'prog help'.\n"},
		{"help wrok", 2, "", "prog: there is no command \"wrok\" (did you mean work?)\nSee 'prog help'.\n"},
		{"work --help", 0, "Usage: prog work [flags] THING\n\nDoes it.\n\nFlags:\n      --n many   how many (default 1)\n", ""},
		{"help work", 0, "Usage: prog work [flags] THING\n\nDoes it.\n\nFlags:\n      --n many   how many (default 1)\n", ""},
	} {
		*n = 1
		var out, errw bytes.Buffer
		code := p.Main(context.Background(), &Env{Stdout: &out, Stderr: &errw}, strings.Fields(c.args))
		if code != c.code || out.String() != c.out || errw.String() != c.err {
			t.Errorf("%q: exit %d\nstdout %q\nstderr %q\nwant %d\n%q\n%q", c.args, code, out.String(), errw.String(), c.code, c.out, c.err)
		}
	}
	if strings.Join(got, " ") != "" { // the last run had no arguments
		t.Errorf("args %v", got)
	}
}

func TestAddresses(t *testing.T) {
	for in, want := range map[string]string{
		"10.0.0.1": "10.0.0.1:4420", "10.0.0.1:7": "10.0.0.1:7", "::1": "[::1]:4420", "[::1]": "[::1]:4420", "[::1]:0": "[::1]:0",
		":4421": "[::]:4421", "localhost:5": "127.0.0.1:5", "fe80::1%lo": "[fe80::1%lo]:4420", "::ffff:1.2.3.4": "1.2.3.4:4420",
	} {
		got, err := ResolveAddr(context.Background(), in, DefaultPort)
		if err != nil || got != netip.MustParseAddrPort(want) {
			t.Errorf("%q → %v, %v; want %s", in, got, err, want)
		}
	}
	for _, in := range []string{"", "1.2.3.4:x", "1.2.3.4:70000", "a:b:c", "[::1", "h:"} {
		if got, err := ResolveAddr(context.Background(), in, DefaultPort); err == nil || !IsUsage(err) {
			t.Errorf("%q → %v, %v; want a usage error", in, got, err)
		}
	}
}

func TestNotify(t *testing.T) {
	if err := (&Env{}).Notify("READY=1"); err != nil {
		t.Errorf("without a service manager: %v", err)
	}
	dir, err := os.MkdirTemp("", "n")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "s")
	for _, name := range []string{path, "@rdblk-test-" + filepath.Base(dir)} {
		addr := name
		if name[0] == '@' {
			addr = "\x00" + name[1:]
		}
		ln, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: addr, Net: "unixgram"})
		if err != nil {
			t.Fatal(err)
		}
		e := &Env{Environ: []string{"NOTIFY_SOCKET=" + name}}
		if err := e.Notify("READY=1", "STATUS=serving"); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 100)
		n, err := ln.Read(b)
		if err != nil || string(b[:n]) != "READY=1\nSTATUS=serving" {
			t.Errorf("%s: received %q, %v", name, b[:n], err)
		}
		ln.Close()
	}
	if err := (&Env{Environ: []string{"NOTIFY_SOCKET=/nonexistent"}}).Notify("X"); err == nil {
		t.Error("no error though nobody listens")
	}
}

func TestLogger(t *testing.T) {
	var b bytes.Buffer
	l, err := NewLogger(&b, "warn", "json")
	if err != nil {
		t.Fatal(err)
	}
	l.Info("no")
	l.Warn("yes")
	if s := b.String(); strings.Contains(s, "no") || !strings.Contains(s, `"msg":"yes"`) {
		t.Errorf("logged %q", s)
	}
	if _, err := NewLogger(&b, "loud", "text"); err == nil || !strings.Contains(err.Error(), "level") {
		t.Error(err)
	}
	if _, err := NewLogger(&b, "info", "xml"); err == nil || !strings.Contains(err.Error(), "format") {
		t.Error(err)
	}
}

// A log that machines read says what its durations are in.
func TestLoggedDurationsHaveAUnit(t *testing.T) {
	for _, format := range []string{"json", "text"} {
		var b bytes.Buffer
		l, err := NewLogger(&b, "info", format)
		if err != nil {
			t.Fatal(err)
		}
		l.Info("x", "after", 90*time.Second, slog.Group("g", "in", 5*time.Millisecond))
		for _, want := range []string{"1m30s", "5ms"} {
			if !strings.Contains(b.String(), want) {
				t.Errorf("%s: no %q in %s", format, want, b.String())
			}
		}
	}
}

func TestMisfit(t *testing.T) {
	for _, c := range [][3]string{
		{"int", "x", `"x" is no whole number: write one such as 4`},
		{"int", "4.5", `"4.5" is no whole number: write one such as 4`},
		{"int", "99999999999999999999", "99999999999999999999 is too large"},
		{"uint32", "-1", "-1 is negative: write a whole number such as 1"},
		{"uint32", "4294967296", "4294967296 is too large"},
		{"duration", "5", "5 has no unit: write a duration such as 500ms, 10s, 2m"},
		{"duration", "soon", `"soon" is no duration: write 500ms, 10s, 2m`},
		{"bool", "maybe", `"maybe" is neither true nor false`},
		{"size", "lots", `"lots" is no size: write a number of bytes with an optional unit, such as 4096, 64k, 1M, 10G`},
	} {
		if got := Misfit(c[0], c[1]); got != c[2] {
			t.Errorf("%s %s: %s", c[0], c[1], got)
		}
	}
}

func TestDidYouMean(t *testing.T) {
	words := []string{"listen", "log.level", "queue_depth", "nqn", "nsid"}
	for word, want := range map[string]string{
		"listne": "listen", "Listen": "listen", "queue-depth": "queue_depth", "queue_dept": "queue_depth", "log.levle": "log.level", "nsdi": "nsid",
		"depth": "", "x": "", "": "", "completely": "", strings.Repeat("listen", 100): "",
	} {
		if got := closest(word, words); got != want {
			t.Errorf("%.20q: %q, want %q", word, got, want)
		}
	}
}

func TestListenAdvice(t *testing.T) {
	at := netip.MustParseAddrPort("192.0.2.1:443")
	for err, want := range map[error][]string{
		unix.EADDRINUSE:    {"ss -ltnp sport = :443", "--listen"},
		unix.EADDRNOTAVAIL: {"no such address", "127.0.0.1", "--listen"},
		unix.EACCES:        {"below 1024", "CAP_NET_BIND_SERVICE", "--listen"},
	} {
		got := WithAdvice(Plain(&net.OpError{Op: "listen", Net: "tcp", Err: os.NewSyscallError("bind", err)}), ListenAdvice(err, at, "--listen")).Error()
		for _, w := range append(want, err.Error()) {
			if strings.Count(got, w) == 0 || strings.Contains(got, "bind:") {
				t.Errorf("%v: no %q in %s", err, w, got)
			}
		}
	}
	if got := WithAdvice(unix.EIO, ListenAdvice(unix.EIO, at, "--listen")); got != error(unix.EIO) {
		t.Error(got)
	}
}

// A pipe that nobody reads must not keep the program from starting, or from hearing that it is to stop.
func TestTraceToAPipe(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	type result struct {
		w   io.WriteCloser
		err error
	}
	results := make(chan result, 1)
	env := &Env{}
	go func() {
		w, err := env.OpenTrace(pipe, DefaultTraceSize)
		results <- result{w, err}
	}()
	select {
	case r := <-results:
		if r.err == nil || !strings.Contains(r.err.Error(), "nobody reads this pipe") {
			t.Errorf("%v", r.err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("it waits for a reader")
	}
	reader, err := os.OpenFile(pipe, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	w, err := env.OpenTrace(pipe, DefaultTraceSize)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := w.Write([]byte("line\n")); err != nil {
		t.Error(err)
	}
	b := make([]byte, 16)
	if n, err := reader.Read(b); string(b[:n]) != "line\n" {
		t.Errorf("%q, %v", b[:n], err)
	}
}
