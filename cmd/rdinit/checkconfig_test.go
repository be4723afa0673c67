package main

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"rdblk/internal/cli/clitest"
)

func TestCheckConfig(t *testing.T) {
	dir := clitest.Dir(t)
	write := func(name, text string) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	ln, err := net.Listen("unix", filepath.Join(dir, "there"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	for _, c := range []struct{ text, want string }{
		{"address: 192.0.2.1\nsocket: " + dir + "/s\n", "192.0.2.1 as " + dir + "/s"},
		{"address: '[::1]:4421'\nlocal_address: ::1\nsocket: " + dir + "/there\n", "[::1]:4421 as " + dir + "/there"},
		{"address: localhost\nlocal_address: 127.0.0.5\ndevice: /dev/nbd0\n", "localhost as /dev/nbd0"},
		{"address: 10.0.0.5:4420\ndevice: auto\n", "10.0.0.5:4420 as auto"},
	} {
		f := write("good.yaml", c.text)
		code, out, errw := clitest.Do(t, newProgram, nil, "check-config", f)
		if want := f + ": good: " + c.want + "\n"; code != 0 || out != want || errw != "" {
			t.Errorf("%s: exit %d, %q, %q; want %q", c.text, code, out, errw, want)
		}
	}
	// Each fault, and nothing else.
	plain := write("plain", "")
	for _, c := range []struct {
		text    string
		environ []string
		want    []string
	}{
		{"", nil, []string{"name the target: ADDR[:PORT]", "say how to attach: --device auto"}},
		{"address: 10.0.0.5\n", nil, []string{"say how to attach: --device auto"}},
		{"address: 10.0.0.5\ndevice: auto\nsocket: " + dir + "/s\n", nil, []string{"--device and --socket exclude each other"}},
		{"address: 10.0.0.5\ndevice: auto\n", []string{"RDINIT_SOCKET=" + dir + "/s"}, []string{"--device and --socket exclude each other"}},
		{"adress: 10.0.0.5\ndevice: /dev/sda\nmax_poll: 10h\n", nil, []string{"adress: no such setting in ", "device: ", "max_poll: 10h is outside 1µs to 10ms"}},
		{"address: nowhere.invalid\ndevice: auto\n", nil, []string{"address: look up \"nowhere.invalid\": "}},
		{"address: ':4420'\ndevice: auto\n", nil, []string{"address: \":4420\" names no machine"}},
		{"address: 10.0.0.5\nlocal_address: 192.0.2.1\ndevice: auto\n", nil, []string{"local_address: 192.0.2.1: cannot assign requested address (this machine has no such address, it has "}},
		{"address: 10.0.0.5\nlocal_address: eth0\ndevice: auto\n", nil, []string{"local_address: \"eth0\" is no IP address"}},
		{"address: 10.0.0.5\nsocket: /nonexistent/s\n", nil, []string{"socket: /nonexistent/s: /nonexistent: no such file or directory (its directory must exist)"}},
		{"address: 10.0.0.5\nsocket: " + plain + "\n", nil, []string{"socket: " + plain + ": something else than a socket is there"}},
		{"address: 10.0.0.5\nsocket: " + plain + "/s\n", nil, []string{"socket: " + plain + "/s: not a directory"}},
	} {
		code, out, errw := clitest.Do(t, newProgram, c.environ, "check-config", write("bad.yaml", c.text))
		if code != 2 || out != "" {
			t.Errorf("%s: exit %d, %q, %q", c.text, code, out, errw)
		}
		lines := strings.Split(strings.TrimSpace(errw), "\n")
		if len(lines) != len(c.want)+1 || lines[len(lines)-1] != "See 'rdinit check-config --help'." {
			t.Errorf("%s: %q", c.text, errw)
		}
		for i, w := range c.want {
			if !strings.HasPrefix(lines[min(i, len(lines)-1)], "rdinit: check-config: "+w) {
				t.Errorf("%s: line %d does not begin with %q in %q", c.text, i, w, errw)
			}
		}
	}
	if os.Geteuid() != 0 { // root may write anywhere
		code, _, errw := clitest.Do(t, newProgram, nil, "check-config", write("bad.yaml", "address: 10.0.0.5\nsocket: /proc/s\n"))
		if code != 2 || !strings.Contains(errw, "this user may not make a socket there") {
			t.Errorf("exit %d, %q", code, errw)
		}
	}
}
