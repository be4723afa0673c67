package losses

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"rdblk/blockdev"
	"rdblk/internal/envtest"
)

var errTest = errors.New("the disk is full")

func open(t *testing.T, dir, key string) (*Counter, *envtest.Log) {
	t.Helper()
	log := new(envtest.Log)
	c := Open(dir, key, log.Logger())
	t.Cleanup(func() { c.Close() })
	return c, log
}

func want(t *testing.T, c *Counter, n uint64) {
	t.Helper()
	if got := c.Count(); got != n {
		t.Errorf("count %d, want %d", got, n)
	}
}

// A successor counts on, even if the one before never closed, and each store by itself.
func TestCountOutlivesItsProcess(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run", "losses")
	a, log := open(t, dir, "a")
	want(t, a, 0)
	if log.Len() > 0 {
		t.Errorf("said at the start: %s", log)
	}
	a.Add(errTest)
	want(t, a, 1)
	if s := log.String(); !strings.Contains(s, "level=ERROR") || !strings.Contains(s, errTest.Error()) {
		t.Errorf("said: %s", s)
	}
	b, _ := open(t, dir, "b")
	want(t, b, 0)
	next, _ := open(t, dir, "a")
	want(t, next, 1)
	next.Add(errTest)
	last, _ := open(t, dir, "a")
	want(t, last, 2)
}

// A run without a loss leaves nothing behind, one with a loss does.
func TestClose(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run", "losses")
	c, _ := open(t, dir, "a")
	c.Close()
	if l, _ := os.ReadDir(dir); len(l) != 0 {
		t.Errorf("left behind: %v", l)
	}
	c, _ = open(t, dir, "a")
	c.Add(errTest)
	c.Close()
	c, _ = open(t, dir, "a")
	c.Close()
	c, _ = open(t, dir, "a")
	want(t, c, 1)
}

func TestConcurrentAdds(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "losses")
	os.Chmod(filepath.Dir(dir), 0o700)
	c := Open(dir, "a", slog.New(slog.DiscardHandler))
	defer c.Close()
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() { c.Add(errTest) })
	}
	wg.Wait()
	next, _ := open(t, dir, "a")
	want(t, next, 50)
}

// Somebody tidied the directory: the count is made whole again with the next loss.
func TestRemovedFile(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run", "losses")
	c, _ := open(t, dir, "a")
	c.Add(errTest)
	c.Add(errTest)
	if err := os.Remove(filepath.Join(dir, "a")); err != nil {
		t.Fatal(err)
	}
	c.Add(errTest)
	next, _ := open(t, dir, "a")
	want(t, next, 3)
}

// Where nothing can be kept, no two runs may look alike.
func TestWithoutAFile(t *testing.T) {
	base := t.TempDir()
	os.Chmod(base, 0o700)
	open1 := func(name string) {
		t.Helper()
		dir := filepath.Join(base, name)
		a, log := open(t, dir, "a")
		if !strings.Contains(log.String(), "cannot be remembered") {
			t.Errorf("%s: said: %s", name, log)
		}
		before := a.Count()
		a.Add(errTest)
		want(t, a, before+1)
		if b, _ := open(t, dir, "a"); b.Count() <= a.Count() {
			t.Errorf("%s: count %d, and in the next run %d", name, a.Count(), b.Count())
		}
	}
	os.WriteFile(filepath.Join(base, "file"), nil, 0o600) // in the directory's place
	open1("file")
	os.Mkdir(filepath.Join(base, "open"), 0o700)
	os.Chmod(filepath.Join(base, "open"), 0o777) // others can write there
	open1("open")
	os.Mkdir(filepath.Join(base, "foreign"), 0o700)
	os.WriteFile(filepath.Join(base, "foreign", "a"), bytes.Repeat([]byte("something else\n"), 100), 0o600)
	open1("foreign")
	os.Mkdir(filepath.Join(base, "link"), 0o700)
	os.Symlink(filepath.Join(base, "elsewhere"), filepath.Join(base, "link", "a"))
	open1("link")
	if _, err := os.Lstat(filepath.Join(base, "elsewhere")); err == nil {
		t.Error("a symbolic link was followed")
	}
}

func TestFailedMarkIsSaidLoudly(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run", "losses")
	c, log := open(t, dir, "a")
	c.f.Close() // as if writing failed
	c.Add(errTest)
	want(t, c, 1)
	if !strings.Contains(log.String(), "CANNOT BE REMEMBERED") {
		t.Errorf("said: %s", log)
	}
}

func TestKey(t *testing.T) {
	p := filepath.Join(t.TempDir(), "f")
	os.WriteFile(p, nil, 0o600)
	a := Key(p, blockdev.Info{UUID: [16]byte{1}})
	b := Key(p, blockdev.Info{})
	if a != "uuid-01000000000000000000000000000000" || !strings.HasPrefix(b, "file-") {
		t.Errorf("%q, %q", a, b)
	}
	if k := Key("mem:1M", blockdev.Info{UUID: [16]byte{1}}); k != "" {
		t.Errorf("memory: %q", k)
	}
}

// watched is a device that is told what a Counter remembers.
type watched struct {
	blockdev.Device
	busy  *atomic.Uint32
	doubt bool
}

func (d *watched) Watch(busy *atomic.Uint32, doubt bool) { d.busy, d.doubt = busy, doubt }

// A server is killed in a flush: its successor knows that, and the one after that does not.
func TestKilledInAFlush(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run", "losses")
	a, _ := open(t, dir, "a")
	var d watched
	a.Watch(&d)
	if d.busy == nil || d.doubt {
		t.Fatalf("the first: %+v", d)
	}
	d.busy.Add(1) // and no more: it is killed
	b, log := open(t, dir, "a")
	b.Watch(&d)
	if !d.doubt || !strings.Contains(log.String(), "level=WARN") {
		t.Errorf("the successor: %+v, log %q", d, log)
	}
	want(t, b, 0)
	d.busy.Add(1)
	d.busy.Add(^uint32(0))
	c, log := open(t, dir, "a")
	c.Watch(&d)
	if d.doubt || log.Len() > 0 {
		t.Errorf("the one after a kill outside of a flush: %+v, log %q", d, log)
	}
	d.busy.Add(1) // hangs at the end
	c.Close()
	d.busy.Add(^uint32(0)) // and comes back late
	e, _ := open(t, dir, "a")
	e.Watch(&d)
	if d.doubt {
		t.Error("what came back in the end is in doubt")
	}
	e.Close()
	if l, _ := filepath.Glob(dir + "/*"); len(l) != 0 {
		t.Errorf("left behind: %v", l)
	}
}
