package main

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"rdblk/internal/cli/clitest"
	"rdblk/internal/envtest"
)

// The connection is live and every request fails, because another disk came back:
// who watches must not read that all is well.
func TestFaultIsSeen(t *testing.T) {
	addr, tg := startTarget(t, envtest.Port(t).String(), mem(t, "mem:64M"))
	dir := clitest.Dir(t)
	run := filepath.Join(dir, "run")
	r, _ := attached(t, addr, dir, nil, "--http", "127.0.0.1:0")
	url := "http://" + r.Err.Await(t, `msg="http endpoint" addr=(\S+)`)[1]
	tg.Close()
	startTarget(t, addr, mem(t, "mem:64M"))
	clitest.Eventually(t, "the other disk is noticed", func() bool {
		st := statusOf(t, run)
		return st.State == "live" && st.Fault != ""
	})
	if code, text := get(t, url+"/healthz"); code != 503 || !strings.HasPrefix(text, "all requests fail: ") {
		t.Errorf("healthz %d %q", code, text)
	}
	if code, out, _ := clitest.Do(t, newProgram, nil, "list", "--run-dir", run); code != 0 || !strings.Contains(out, " live/fault ") {
		t.Errorf("list: exit %d, %q", code, out)
	}
}

// A namespace is taken out at the target and comes back, another one beside it: the status
// shows both, and what is attached can be detached while it is away.
func TestNamespacesComeAndGo(t *testing.T) {
	dev := file(t)
	addr, tg := startTarget(t, "127.0.0.1:0", dev)
	dir := clitest.Dir(t)
	run := filepath.Join(dir, "run")
	r, sock := attached(t, addr, dir, nil)
	if _, err := tg.AddNamespace(7, mem(t, "mem:16M")); err != nil {
		t.Fatal(err)
	}
	clitest.Eventually(t, "the second one shows", func() bool {
		l := statusOf(t, run).Namespaces
		return len(l) == 2 && l[0].NSID == 1 && l[0].Size == 64<<20 && l[1].NSID == 7 && l[1].Size == 16<<20
	})
	if _, out, _ := clitest.Do(t, newProgram, nil, "status", "--run-dir", run); !strings.Contains(out, "7 (16 MiB)") {
		t.Errorf("status: %s", out)
	}
	if err := tg.RemoveNamespace(1); err != nil {
		t.Fatal(err)
	}
	clitest.Eventually(t, "the first one is missed", func() bool {
		st := statusOf(t, run)
		return st.State == "live" && strings.Contains(st.Fault, "no such namespace") && len(st.Namespaces) == 1
	})
	if code, out, _ := clitest.Do(t, newProgram, nil, "list", "--run-dir", run); code != 0 || !strings.Contains(out, " live/fault ") {
		t.Errorf("list: exit %d, %q", code, out)
	}
	if _, err := tg.AddNamespace(1, dev); err != nil {
		t.Fatal(err)
	}
	clitest.Eventually(t, "it is back", func() bool { st := statusOf(t, run); return st.Fault == "" && len(st.Namespaces) == 2 })
	c := nbdClient(t, sock)
	nbdWrite(t, c)
	c.Close()
	if err := tg.RemoveNamespace(1); err != nil {
		t.Fatal(err)
	}
	clitest.Eventually(t, "it is missed again", func() bool { st := statusOf(t, run); return st.Fault != "" && st.Clients == 0 })
	start := time.Now()
	code, _, errw := clitest.Do(t, newProgram, nil, "detach", "disk", "--force", "--run-dir", run)
	if code != 0 || !strings.Contains(errw, "may be lost") {
		t.Errorf("by force, with unflushed writes: exit %d, %q", code, errw)
	}
	if d := time.Since(start); d > 9*time.Second {
		t.Errorf("detach took %v", d)
	}
	if code := r.Wait(t); code != 1 {
		t.Errorf("attach ended with %d although something may be lost", code)
	}
}
