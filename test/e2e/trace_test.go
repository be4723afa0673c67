package e2e

import (
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

// --trace in both programs: what a host did, its refusal, and a namespace that came, on
// lines. The file is its owner's; without a file it is standard error.
func TestTrace(t *testing.T) {
	w := newWorld(t, MiB)
	cfg, more := w.dir+"/c.yaml", w.dir+"/more.img"
	write := func(s string) {
		if err := os.WriteFile(cfg, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("hosts: [nqn.2026-11.io.rdblk:a]\nnamespaces: [" + w.disk + "]\n")
	file := w.dir + "/target.trace"
	p := w.serve("--config", cfg, "--nqn", "nqn.2026-11.io.rdblk:test", "--trace="+file)
	bench := func(host string) (int, string) {
		code, _, errw := do(t, "rdinit", "bench", w.addr, "--nqn", "nqn.2026-11.io.rdblk:test", "--host-nqn", host, "--runtime", "20ms", "--queues", "1", "--iodepth", "1", "--trace")
		return code, errw
	}
	code, errw := bench("nqn.2026-11.io.rdblk:a")
	if code != 0 {
		t.Fatalf("exit %d: %s", code, errw)
	}
	reads := regexp.MustCompile(` q1 > Read cid=0x[0-9a-f]+ nsid=1 slba=\d+ blocks=8 sgl=keyed `)
	if n := len(reads.FindAllString(errw, -1)); n == 0 {
		t.Errorf("no Read in the host's trace: %s", errw)
	}
	if code, errw = bench("nqn.2026-11.io.rdblk:b"); code != 1 || !strings.Contains(errw, `< Completion cid=0x400 sqhd=1 status="connect invalid host (0x184, do not retry)" result=0x10200`) {
		t.Errorf("a host that is not on the list: exit %d, %s", code, errw)
	}
	if err := os.WriteFile(more, make([]byte, MiB), 0o600); err != nil {
		t.Fatal(err)
	}
	write("hosts: [nqn.2026-11.io.rdblk:a]\nnamespaces: [" + w.disk + ", " + more + "]\n")
	p.Process.Signal(syscall.SIGHUP)
	p.log.Await(t, "msg=reloaded .*added=1")
	if code, _ := p.end(t, syscall.SIGTERM); code != 0 {
		t.Errorf("exit %d", code)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(file); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
	text := string(b)
	if n := len(reads.FindAllString(text, -1)); n == 0 {
		t.Error("no Read in the target's trace")
	}
	for _, want := range []string{" > RDMA connection request ", " > Fabrics Connect ", `status="connect invalid host (0x184, do not retry)"`, " - namespace attribute changed nsid=2\n", " - disconnected"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in the target's trace:\n%.3000s", want, text)
		}
	}
	line := regexp.MustCompile(`^\d\d:\d\d:\d\d\.\d{6} (127\.0\.0\.1:\d+ q\d+ [<>-] |- )[A-Za-z]`)
	for l := range strings.Lines(text) {
		if !line.MatchString(l) {
			t.Errorf("line %q", l)
			break
		}
	}
	if code, _, errw := do(t, "rdtarget", "serve", "--trace=/nowhere/trace", "mem:1M"); code != 1 || !strings.Contains(errw, "/nowhere/trace") {
		t.Errorf("a trace that cannot be written: exit %d, %s", code, errw)
	}
}
