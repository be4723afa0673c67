package logfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

const (
	testLimit = 1000
	testChunk = 300
)

// chunk is number n, of whole lines.
func chunk(n int) []byte {
	return []byte(strings.Repeat(fmt.Sprintf("%09d\n", n), testChunk/10))
}

// numbers are those of the chunks in a file, each of them whole.
func numbers(t *testing.T, path string) (list []int) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for c := range slices.Chunk(b, testChunk) {
		n, err := strconv.Atoi(string(c[:9]))
		if err != nil || !bytes.Equal(c, chunk(n)) {
			t.Fatalf("%s: %q", path, c)
		}
		list = append(list, n)
	}
	return list
}

func names(t *testing.T, dir string) (list []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
}

func open(t *testing.T, path string) *File {
	t.Helper()
	f, err := openFile(path, testLimit)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func write(t *testing.T, f *File, from, to int) {
	t.Helper()
	for n := from; n < to; n++ {
		if k, err := f.Write(chunk(n)); err != nil || k != testChunk {
			t.Fatalf("chunk %d: %d, %v", n, k, err)
		}
	}
}

// TestFileIsBounded: there are two files, each within the bound, the older lines in the
// one and the newer in the other, also when it is opened again.
func TestFileIsBounded(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "trace")
	f := open(t, path)
	write(t, f, 0, 8)
	f.Close()
	write(t, open(t, path), 8, 11)
	if got := names(t, dir); !slices.Equal(got, []string{"trace", "trace.1"}) {
		t.Errorf("files %v", got)
	}
	if got := both(t, path); !slices.Equal(got, []int{6, 7, 8, 9, 10}) {
		t.Errorf("chunks %v", got)
	}
	for _, p := range []string{path, path + ".1"} {
		if st, err := os.Stat(p); err != nil || st.Size() > testLimit || st.Mode() != 0o600 {
			t.Errorf("%s: %v, %v", p, st, err)
		}
	}
	if _, err := Open(path, MinSize-1); err == nil {
		t.Error("a bound that one write exceeds")
	}
}

// TestFileOfTwoProcesses: nobody throws away what the other has just written, and nobody goes on
// in a file that is gone.
func TestFileOfTwoProcesses(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "trace")
	a, b := open(t, path), open(t, path)
	for n := 0; n < 40; n += 2 {
		write(t, a, n, n+1)
		write(t, b, n+1, n+2)
		if got := both(t, path); !slices.Contains(got, n) || !slices.Contains(got, n+1) {
			t.Fatalf("chunks %d and %d are not there: %v", n, n+1, got)
		}
	}
	if got := names(t, dir); !slices.Equal(got, []string{"trace", "trace.1"}) {
		t.Errorf("files %v", got)
	}
	got := both(t, path)
	if first := got[0]; len(got) < 4 || !slices.Equal(got, sequence(first, 40)) {
		t.Errorf("chunks %v", got)
	}
	// While one is at it the other writes where it is.
	a, b = open(t, path), open(t, path)
	if err := syscall.Flock(int(a.f.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	write(t, b, 40, 44)
	if now, err := os.Stat(path); err != nil || !os.SameFile(before, now) || now.Size() != before.Size()+4*testChunk {
		t.Errorf("%v, %v", now, err)
	}
}

// both are the numbers in both files, of which the older may not be there.
func both(t *testing.T, path string) (list []int) {
	t.Helper()
	if _, err := os.Stat(path + ".1"); err == nil {
		list = numbers(t, path+".1")
	}
	return append(list, numbers(t, path)...)
}

func sequence(from, to int) (list []int) {
	for n := from; n < to; n++ {
		list = append(list, n)
	}
	return list
}

// TestFileThatSomebodyElseMoved is begun anew when it is full, and what was moved stays.
func TestFileThatSomebodyElseMoved(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "trace")
	f := open(t, path)
	write(t, f, 0, 2)
	if err := os.Rename(path, path+"-kept"); err != nil {
		t.Fatal(err)
	}
	write(t, f, 2, 5)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	write(t, f, 5, 8)
	if got := names(t, dir); !slices.Equal(got, []string{"trace", "trace-kept"}) {
		t.Errorf("files %v", got)
	}
	if got := append(numbers(t, path+"-kept"), numbers(t, path)...); !slices.Equal(got, []int{0, 1, 2, 6, 7}) {
		t.Errorf("chunks %v", got)
	}
}

// TestFileBehindALink: the file is renamed, not the link, which may be /dev/stdout.
func TestFileBehindALink(t *testing.T) {
	dir, there := t.TempDir(), t.TempDir()
	link := filepath.Join(dir, "link")
	if err := os.Symlink(filepath.Join(there, "trace"), link); err != nil {
		t.Fatal(err)
	}
	write(t, open(t, link), 0, 5)
	if got := append(names(t, dir), names(t, there)...); !slices.Equal(got, []string{"link", "trace", "trace.1"}) {
		t.Errorf("files %v", got)
	}
	if got := numbers(t, link); !slices.Equal(got, []int{3, 4}) {
		t.Errorf("chunks %v", got)
	}
}

// TestFileThatCannotBeRenamed is cut off, and says so.
func TestFileThatCannotBeRenamed(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "trace")
	if err := os.Mkdir(path+".1", 0o700); err != nil {
		t.Fatal(err)
	}
	f := open(t, path)
	write(t, f, 0, 9)
	b, err := os.ReadFile(path)
	if err != nil || len(b) > testLimit {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	first, rest, _ := bytes.Cut(b, []byte("\n"))
	if !regexp.MustCompile(`^\d\d:\d\d:\d\d\.\d{6} - the lines before are gone: rename .*trace.1: `).Match(first) {
		t.Errorf("first line %q", first)
	}
	if !bytes.HasSuffix(rest, chunk(8)) {
		t.Errorf("the last chunk is not there: %q", rest)
	}
	if err := syscall.Flock(int(open(t, path).f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		t.Errorf("still locked: %v", err)
	}
}

// TestPipeHasNoBound: nothing of it is renamed.
func TestPipeHasNoBound(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := openFile(path, testLimit); !errors.Is(err, syscall.ENXIO) {
		t.Errorf("without a reader: %v", err)
	}
	r, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	f := open(t, path)
	write(t, f, 0, 9)
	f.Close()
	if b, err := io.ReadAll(r); err != nil || len(b) != 9*testChunk {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	if got := names(t, dir); !slices.Equal(got, []string{"pipe"}) {
		t.Errorf("files %v", got)
	}
}
