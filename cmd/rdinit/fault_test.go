package main

import (
	"path/filepath"
	"strings"
	"testing"

	"rdblk/internal/cli/clitest"
)

// The connection is live and every request fails, because another disk came back:
// who watches must not read that all is well.
func TestFaultIsSeen(t *testing.T) {
	addr, tg := startTarget(t, "127.0.0.1:0", mem(t, "mem:64M"))
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
