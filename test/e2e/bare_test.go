package e2e

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"rdblk/internal/envtest"
)

// bareRoot is a directory to change the root to: the programs, and the libraries that they are linked to.
func bareRoot(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	put := func(from, to string) {
		t.Helper()
		b, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Dir(filepath.Join(root, to)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, to), b, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{"tmp", "run", "proc", "sys", "dev"} {
		if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range []string{"rdtarget", "rdinit"} {
		put(filepath.Join(bin, p), p)
		out, err := exec.Command("ldd", filepath.Join(bin, p)).CombinedOutput()
		if err != nil && !strings.Contains(string(out), "not a dynamic executable") {
			t.Fatalf("ldd %s: %v: %s", p, err, out)
		}
		if regexp.MustCompile(`ibverbs|rdmacm`).Match(out) {
			t.Errorf("%s is linked to RDMA libraries:\n%s", p, out)
		}
		for _, m := range regexp.MustCompile(`(/\S+) \(0x`).FindAllStringSubmatch(string(out), -1) {
			put(m[1], m[1])
		}
	}
	return root
}

// The programs as they are work where there is no rdma-core, in software, and say what a device would need.
func TestWithoutRDMACore(t *testing.T) {
	if os.Geteuid() != 0 {
		envtest.Lacks(t, "changing the root needs root")
	}
	if _, err := exec.LookPath("ldd"); err != nil {
		envtest.Lacks(t, "no ldd")
	}
	root := bareRoot(t)
	inside := func(args ...string) *exec.Cmd {
		c := exec.Command(args[0], args[1:]...)
		c.Path, c.Err = args[0], nil
		c.Dir, c.Env = "/", []string{"HOME=/tmp"}
		c.SysProcAttr = &syscall.SysProcAttr{Chroot: root, Pdeathsig: syscall.SIGKILL}
		return c
	}
	const hint = "apt install libibverbs1 librdmacm1"
	out, err := inside("/rdtarget", "devices").CombinedOutput()
	if err != nil || !strings.Contains(string(out), hint) || !strings.Contains(string(out), "iwarp0") {
		t.Errorf("devices: %v\n%s", err, out)
	}
	if out, err = inside("/rdtarget", "serve", "--provider", "verbs", "mem:1M").CombinedOutput(); err == nil || !strings.Contains(string(out), hint) {
		t.Errorf("verbs: %v\n%s", err, out)
	}
	if out, err = inside("/rdinit", "bench", "127.0.0.1:1", "--provider", "verbs").CombinedOutput(); err == nil || !strings.Contains(string(out), hint) {
		t.Errorf("verbs: %v\n%s", err, out)
	}
	srv := inside("/rdtarget", "serve", "--listen", "127.0.0.1:0", "mem:16M")
	var ready, log envtest.Log
	srv.Stdout, srv.Stderr = &ready, &log
	if err := srv.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- srv.Wait() }()
	t.Cleanup(func() { srv.Process.Kill() })
	addr := ready.Await(t, `on (127\.0\.0\.1:\d+) \(iwarp\)`)[1]
	out, err = inside("/rdinit", "bench", addr, "--queues", "1", "--runtime", "200ms").CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("IOPS")) {
		t.Errorf("bench: %v\n%s", err, out)
	}
	srv.Process.Signal(syscall.SIGTERM)
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("rdtarget: %v\n%s", err, log.String())
		}
	case <-time.After(patience):
		t.Error("rdtarget does not end")
	}
}
