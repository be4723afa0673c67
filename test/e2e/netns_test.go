package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"rdblk/internal/envtest"
	"rdblk/nbd/nbdtest"
)

// Two machines, as far as the network goes:
//
//	namespace A: rdinit ── 10.77.0.1 ═══ veth ═══ 10.77.0.2 ── rdtarget :namespace B
//
// The cable is pulled and put back under load: to the client that is a pause.
func TestLinkDownAndUp(t *testing.T) {
	if os.Geteuid() != 0 {
		envtest.Lacks(t, "not root: cannot make network namespaces")
	}
	nbdtest.Require(t, "fio")
	ip := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	a, b := fmt.Sprintf("rdblk-a-%d", os.Getpid()), fmt.Sprintf("rdblk-b-%d", os.Getpid())
	if out, err := exec.Command("ip", "netns", "add", a).CombinedOutput(); err != nil {
		envtest.Lacks(t, "no network namespaces here: %v: %s", err, out)
	}
	defer exec.Command("ip", "netns", "del", a).Run()
	ip("netns", "add", b)
	defer exec.Command("ip", "netns", "del", b).Run()
	ip("link", "add", "va", "netns", a, "type", "veth", "peer", "name", "vb", "netns", b)
	for ns, l := range map[string][2]string{a: {"va", "10.77.0.1/24"}, b: {"vb", "10.77.0.2/24"}} {
		ip("-n", ns, "addr", "add", l[1], "dev", l[0])
		ip("-n", ns, "link", "set", l[0], "up")
		ip("-n", ns, "link", "set", "lo", "up")
	}
	in := func(ns string) []string { return []string{"ip", "netns", "exec", ns} }

	w := newWorld(t, 128*MiB)
	// Not loopback: the host must be named.
	host := regexp.MustCompile(`host NQN (\S+)`).FindStringSubmatch(nbdtest.Run(t, filepath.Join(bin, "rdinit"), "version"))[1]
	p := start(t, in(b), "rdtarget", "serve", "--listen", "10.77.0.2", "--host", host, "--run-dir", w.run, "--name", "target", w.disk)
	if !strings.Contains(p.ready, "on 10.77.0.2:4420 ") {
		t.Fatalf("ready line %q", p.ready)
	}
	at := &attachment{w: w, name: "disk", sock: filepath.Join(w.dir, "disk.sock")}
	at.process = start(t, in(a), "rdinit", "attach", "10.77.0.2", "--socket", at.sock, "--run-dir", w.run, "--name", "disk")

	// Unix sockets do not care about network namespaces: the client is in ours.
	fio := inBackground(t, "fio", "--name=load", "--ioengine=nbd", "--uri="+at.uri(), "--rw=randwrite", "--bssplit=4k/70:64k/20:1m/10", "--iodepth=32",
		"--numjobs=2", "--size=60M", "--offset_increment=64M", "--rate=,3m", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1")
	eventually(t, "it is under load", func() bool { return at.status().WriteOps > 100 })
	ip("-n", a, "link", "set", "va", "down")
	begin := time.Now()
	eventually(t, "the loss is seen and requests wait", func() bool { st := at.status(); return st.State == "reconnecting" && st.Waiting > 0 })
	t.Logf("the loss was seen after %v (keep-alive timeout 5 s)", time.Since(begin).Round(time.Millisecond))
	if st := at.status(); st.Errors != 0 {
		t.Errorf("while the link is down: %+v", st)
	}
	ip("-n", a, "link", "set", "va", "up")
	begin = time.Now()
	eventually(t, "it is live again", func() bool { return at.status().State == "live" })
	t.Logf("live again %v after the link", time.Since(begin).Round(time.Millisecond))
	fio.wait(t) // it cannot have ended before, since its requests waited
	if st := at.status(); st.Errors != 0 || st.Reconnects != 1 || st.FlushFault != "" {
		t.Errorf("afterwards: %+v", st)
	}
	// The checksum is on between machines: it was asked for and nothing failed it.
	if code, _, errw := do(t, "rdinit", "detach", "disk", "--run-dir", w.run); code != 0 {
		t.Errorf("detach: %d, %s", code, errw)
	}
}
