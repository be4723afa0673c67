package control

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func runDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "rdblk-control-") // t.TempDir would be too long for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func serve(t *testing.T, dir, name string) *Entry {
	t.Helper()
	e, err := Register(dir, "prog", name, true)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, r *http.Request) { WriteJSON(w, map[string]string{"name": name}) })
	mux.HandleFunc("POST /v1/stop", func(w http.ResponseWriter, r *http.Request) {
		WriteError(w, http.StatusConflict, errors.New("in use"))
	})
	e.Serve(mux, quiet())
	return e
}

func names(t *testing.T, dir string) string {
	t.Helper()
	cs, err := List(dir, "prog")
	if err != nil {
		t.Fatal(err)
	}
	var s []string
	for _, c := range cs {
		s = append(s, c.Name)
	}
	return strings.Join(s, " ")
}

func TestRegisterAskRelease(t *testing.T) {
	dir := runDir(t)
	b, a := serve(t, dir, "b"), serve(t, dir, "a")
	defer a.Close()
	if got := names(t, dir); got != "a b" {
		t.Fatalf("listed %q, want a and b", got)
	}
	cs, _ := List(dir, "prog")
	var st struct{ Name string }
	if err := cs[1].Get(context.Background(), "/v1/status", &st); err != nil || st.Name != "b" {
		t.Fatalf("status %+v, %v", st, err)
	}
	var re *RemoteError
	if err := cs[1].Post(context.Background(), "/v1/stop", map[string]bool{"force": true}, nil); !errors.As(err, &re) || re.Message != "in use" {
		t.Fatalf("stop: %v", err)
	}
	if err := cs[1].Get(context.Background(), "/v9/unknown", nil); err == nil || !strings.Contains(err.Error(), "404") {
		t.Fatalf("unknown path: %v", err)
	}
	fi, err := os.Stat(filepath.Join(dir, "prog.b.sock"))
	if err != nil || fi.Mode().Perm() != 0o600 {
		t.Fatalf("socket %v, %v: want mode 0600", fi, err)
	}
	b.Close()
	if got := names(t, dir); got != "a" {
		t.Fatalf("listed %q after b ended", got)
	}
	if err := cs[1].Get(context.Background(), "/v1/status", &st); !errors.Is(err, ErrGone) {
		t.Fatalf("asking an ended program: %v", err)
	}
	a.Close()
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Fatalf("left behind: %v", left)
	}
}

func TestTakenName(t *testing.T) {
	dir := runDir(t)
	a := serve(t, dir, "disk")
	defer a.Close()
	if _, err := Register(dir, "prog", "disk", true); !errors.Is(err, ErrNameTaken) {
		t.Fatalf("second of that name: %v", err)
	}
	e, err := Register(dir, "prog", "disk", false)
	if err != nil || e.Name != "disk-2" {
		t.Fatalf("second of that name: %+v, %v", e, err)
	}
	e.Close()
	long := strings.Repeat("x", MaxName)
	e1, err1 := Register(dir, "prog", long, false)
	e2, err2 := Register(dir, "prog", long, false)
	if errors.Join(err1, err2) != nil || len(e2.Name) != MaxName || e2.Name == e1.Name {
		t.Fatalf("long names: %v %v", err1, err2)
	}
	e1.Close()
	e2.Close()
}

// A program that was killed leaves its files; they neither show nor stand in the way.
func TestStaleEntryIsRemoved(t *testing.T) {
	if dir := os.Getenv("CONTROL_TEST_DIR"); dir != "" { // the child
		if _, err := Register(dir, "prog", "dead", true); err != nil {
			fmt.Println(err)
		}
		fmt.Println("ready")
		select {}
	}
	for _, how := range []string{"list", "register"} {
		dir := runDir(t)
		cmd := exec.Command(os.Args[0], "-test.run=^TestStaleEntryIsRemoved$")
		cmd.Env = append(os.Environ(), "CONTROL_TEST_DIR="+dir)
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		if line, _ := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
			t.Fatalf("child: %q", line)
		}
		if got := names(t, dir); got != "dead" {
			t.Fatalf("while it lives: listed %q", got)
		}
		cmd.Process.Kill()
		cmd.Wait()
		if _, err := os.Stat(filepath.Join(dir, "prog.dead.sock")); err != nil {
			t.Fatalf("the killed program left no socket: the test shows nothing: %v", err)
		}
		switch how {
		case "list":
			if got := names(t, dir); got != "" {
				t.Errorf("listed %q", got)
			}
		case "register":
			serve(t, dir, "dead").Close()
		}
		if left, _ := os.ReadDir(dir); len(left) != 0 {
			t.Errorf("%s: left behind: %v", how, left)
		}
	}
}

func TestForeignDirectoryIsRefused(t *testing.T) {
	base := runDir(t)
	open := filepath.Join(base, "open")
	os.Mkdir(open, 0o700)
	os.Chmod(open, 0o755)
	link := filepath.Join(base, "link")
	os.Symlink(base, link)
	file := filepath.Join(base, "file")
	os.WriteFile(file, nil, 0o600)
	for dir, want := range map[string]string{
		open: "chmod 700", link: "not a directory", file: "not a directory", filepath.Join(base, "no", "such"): "--run-dir",
	} {
		if _, err := Register(dir, "prog", "x", true); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", dir, err, want)
		}
	}
	if os.Geteuid() == 0 {
		other := filepath.Join(base, "other")
		os.Mkdir(other, 0o700)
		os.Chown(other, 12345, 12345)
		if _, err := Register(other, "prog", "x", true); err == nil || !strings.Contains(err.Error(), "another user (number 12345): do this as that user") {
			t.Errorf("foreign directory: %v", err)
		}
	}
	if cs, err := List(filepath.Join(base, "none"), "prog"); err != nil || cs != nil {
		t.Errorf("no directory: %v, %v", cs, err)
	}
}

func TestNames(t *testing.T) {
	for in, want := range map[string]string{
		"disk.img": "disk.img", "a b/c": "a-b-c", "..": "unnamed", "": "unnamed", "-x-": "x", "ä": "unnamed", "/etc/passwd": "etc-passwd",
	} {
		if got := CleanName(in); got != want {
			t.Errorf("CleanName(%q) = %q, want %q", in, got, want)
		}
	}
	for _, bad := range []string{"", "a/b", "../x", ".hidden", strings.Repeat("x", MaxName+1)} {
		if CheckName(bad) == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
	long := "/tmp/" + strings.Repeat("d", 100)
	if _, err := register(long, "prog", "x"); err == nil || !strings.Contains(err.Error(), "107") {
		t.Errorf("long path: %v", err)
	}
}

func TestDefaultDir(t *testing.T) {
	got := DefaultDir(func(string) string { return "/run/user/7" })
	want := "/run/user/7/rdblk"
	if os.Geteuid() == 0 {
		want = "/run/rdblk"
	}
	if got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
