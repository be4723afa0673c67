package nbd

import (
	"bytes"
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"testing"
	"time"

	"rdblk/blockdev"
	"rdblk/internal/envtest"
	"rdblk/nbd/nbdtest"
)

var seedFlag = flag.Uint64("seed", 0, "seed of random tests; 0 = a new one")

func TestMain(m *testing.M) {
	flag.Parse()
	code := m.Run()
	if code == 0 {
		code = checkLeaks()
	}
	os.Exit(code)
}

// checkLeaks looks for goroutines and descriptors that outlive all tests.
func checkLeaks() int {
	var left []byte
	ok := within(patience, func() bool {
		runtime.GC()
		var b bytes.Buffer
		pprof.Lookup("goroutine").WriteTo(&b, 2)
		left = b.Bytes()
		return bytes.Count(left, []byte("rdblk/")) <= bytes.Count(left, []byte("rdblk/nbd.checkLeaks"))+
			bytes.Count(left, []byte("rdblk/nbd.TestMain"))+bytes.Count(left, []byte("rdblk/nbd.within"))+countPaths(left)
	})
	if !ok {
		fmt.Fprintf(os.Stderr, "goroutines outlive the tests:\n%s\n", left)
		return 1
	}
	for _, fd := range openSockets() {
		fmt.Fprintf(os.Stderr, "descriptor outlives the tests: %s\n", fd)
		return 1
	}
	return 0
}

// countPaths is how often this file is named in the dump by the goroutine that makes it.
func countPaths(dump []byte) int {
	n := 0
	for _, g := range bytes.Split(dump, []byte("\n\n")) {
		if bytes.Contains(g, []byte("nbd.TestMain")) {
			n += bytes.Count(g, []byte("rdblk/")) - bytes.Count(g, []byte("rdblk/nbd.checkLeaks")) -
				bytes.Count(g, []byte("rdblk/nbd.TestMain")) - bytes.Count(g, []byte("rdblk/nbd.within"))
		}
	}
	return n
}

// openSockets lists this process's sockets.
func openSockets() []string {
	var l []string
	dir, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return nil
	}
	for _, e := range dir {
		if s, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && len(s) > 7 && s[:7] == "socket:" {
			l = append(l, e.Name()+" -> "+s)
		}
	}
	return l
}

// patience is how long a test waits for what must come: long, because the machine may be busy.
// Nothing waits for it in vain when all is well.
const patience = 60 * time.Second

// within asks cond until it is true, at most for d.
func within(d time.Duration, cond func() bool) bool {
	deadline := time.NewTimer(d)
	defer deadline.Stop()
	again := time.NewTicker(2 * time.Millisecond)
	defer again.Stop()
	for {
		if cond() {
			return true
		}
		select {
		case <-again.C:
		case <-deadline.C:
			return cond()
		}
	}
}

func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	if !within(patience, cond) {
		t.Fatalf("not within %v: %s", patience, what)
	}
}

// newRand gives a generator whose seed is in the log of a failing test.
func newRand(t testing.TB) *rand.Rand {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("seed %d (repeat with -seed)", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

func fill(r *rand.Rand, b []byte) {
	for len(b) >= 8 {
		binary.LittleEndian.PutUint64(b, r.Uint64())
		b = b[8:]
	}
	for i := range b {
		b[i] = byte(r.Uint32())
	}
}

// testServer is a server on a Unix socket for the length of a test.
type testServer struct {
	*Server
	path string
	log  *envtest.Log
}

// serve starts a server; dev becomes its default export if cfg has none.
func serve(t testing.TB, dev blockdev.Device, mod ...func(*Config)) *testServer {
	t.Helper()
	log := &envtest.Log{}
	cfg := Config{Logger: slog.New(slog.NewTextHandler(io.MultiWriter(log, testWriter{t}), &slog.HandlerOptions{Level: slog.LevelDebug}))}
	if dev != nil {
		cfg.Exports = []Export{{Device: dev}}
	}
	for _, m := range mod {
		m(&cfg)
	}
	s, err := NewServer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(tempDir(t), "s")
	ln, err := ListenUnix(path, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(ln) }()
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if err := <-done; err != ErrServerClosed {
			t.Errorf("Serve: %v", err)
		}
	})
	return &testServer{s, path, log}
}

// testWriter sends log lines to the test, also those that come when it is over.
type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	defer func() { _ = recover() }() // the test has ended
	w.t.Logf("%s", bytes.TrimSpace(p))
	return len(p), nil
}

// tempDir is short enough for a socket's path.
func tempDir(t testing.TB) string {
	dir, err := os.MkdirTemp("", "nbd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// open connects a client and enters transmission.
func (s *testServer) open(t testing.TB, structured bool) *nbdtest.Client {
	t.Helper()
	c, err := nbdtest.Open("unix", s.path, "", structured)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	return c
}

func (s *testServer) connect(t testing.TB) *nbdtest.Client {
	t.Helper()
	c, err := nbdtest.Connect("unix", s.path, nbdtest.ClientFixed|nbdtest.ClientNoZeroes)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	return c
}

// do sends a request and checks the error value of its reply.
func do(t testing.TB, c *nbdtest.Client, flags, cmd uint16, off uint64, n uint32, payload []byte, errno uint32) nbdtest.Reply {
	t.Helper()
	c.SetDeadline(time.Now().Add(patience))
	r, err := c.Do(flags, cmd, off, n, payload)
	if err != nil {
		t.Fatalf("command %d, %d bytes at %d: %v", cmd, n, off, err)
	}
	if r.Errno != errno {
		t.Fatalf("command %d flags %#x, %d bytes at %d: error %d %q, want %d", cmd, flags, n, off, r.Errno, r.Text, errno)
	}
	return r
}

// shutdown with a generous limit.
func (s *testServer) shutdown(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := s.Shutdown(ctx); err != nil {
		t.Fatal(err)
	}
}

var _ net.Listener = (*unixListener)(nil)

// fileConn makes a connection of a socket's descriptor.
func fileConn(t testing.TB, fd int) *net.UnixConn {
	f := os.NewFile(uintptr(fd), "socket")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	return c.(*net.UnixConn)
}
