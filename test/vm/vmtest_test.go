package vmtest

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	rc := m.Run()
	Clean()
	os.Exit(rc)
}

// boots marks a test that boots virtual machines: not with -short, and beside others as far as there are slots.
func boots(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("boots virtual machines")
	}
	t.Parallel()
}

// forms are what a test is run on: a part of it in the suite, all with RDBLK_VM_LONG=1.
func forms(suite, more string) []string {
	if Long() {
		suite += " " + more
	}
	return strings.Fields(suite)
}

// each runs a subtest for each of these forms, beside each other as far as there are slots.
func each(t *testing.T, forms []string, run func(t *testing.T, form string)) {
	for _, f := range forms {
		t.Run(f, func(t *testing.T) {
			t.Parallel()
			run(t, f)
		})
	}
}

// ours runs a script of guest with these of our programs as its first arguments and those of c behind them.
func ours(t *testing.T, c Config, name string, programs ...string) Result {
	t.Helper()
	c.Program = filepath.Join(Dir(), "guest", name)
	if c.Timeout == 0 {
		c.Timeout = 10 * time.Minute
	}
	var args []string
	for _, p := range programs {
		b := Build(t, p)
		args, c.Show = append(args, b), append(c.Show, filepath.Dir(b))
	}
	c.Args = append(args, c.Args...)
	return Run(t, c)
}

const rdtarget, rdinit = "rdblk/cmd/rdtarget", "rdblk/cmd/rdinit"

func script(t *testing.T, text string) string {
	t.Helper()
	f := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(f, []byte("#!/bin/bash\n"+text), 0o755); err != nil {
		t.Fatal(err)
	}
	return f
}

// The cache is shared by all checkouts of a user, and an initrd is not: one with another init boots another one,
// and leaves those of others as they are.
func TestInitrdIsOfItsCheckout(t *testing.T) {
	boots(t)
	Require(t)
	base := os.Getenv("RDBLK_VM_CACHE")
	if base == "" {
		home, err := os.UserCacheDir()
		if err != nil {
			t.Fatal(err)
		}
		base = filepath.Join(home, "rdblk-vm")
	}
	cache := t.TempDir()
	if err := os.Symlink(filepath.Join(base, "k"), filepath.Join(cache, "k")); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"release", "version"} {
		b, err := os.ReadFile(filepath.Join(base, f))
		if err == nil {
			err = os.WriteFile(filepath.Join(cache, f), b, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	checkout := func(more string) (initrd string, content []byte) {
		t.Helper()
		dir := t.TempDir()
		for _, f := range []string{"setup", "init", "stage2"} {
			b, err := os.ReadFile(filepath.Join(Dir(), f))
			if f == "init" {
				b = append(b, more...)
			}
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, f), b, 0o755)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		cmd := exec.Command(filepath.Join(dir, "setup"))
		cmd.Env = append(os.Environ(), "RDBLK_VM_CACHE="+cache)
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		initrd = strings.TrimSuffix(string(out), "\n")
		if content, err = os.ReadFile(initrd); err != nil || len(content) == 0 {
			t.Fatalf("%d bytes, %v", len(content), err)
		}
		return initrd, content
	}
	one, content := checkout("")
	if other, _ := checkout("# changed\n"); other == one {
		t.Errorf("two checkouts share %s", one)
	}
	if again, now := checkout(""); again != one || !bytes.Equal(now, content) {
		t.Errorf("%s, then %s, %d and %d bytes", one, again, len(content), len(now))
	}
	if left, err := filepath.Glob(filepath.Join(cache, "*")); err != nil || len(left) != 6 { // k, release, version, lock, two initrds
		t.Errorf("%q, %v", left, err)
	}
}

// The harness itself: output, status, results, the read-only host, and what a dead or endless
// machine looks like.
func TestHarness(t *testing.T) {
	boots(t)
	t.Run("status and results", func(t *testing.T) {
		t.Parallel()
		shown := t.TempDir()
		if err := os.WriteFile(filepath.Join(shown, "there"), nil, 0o644); err != nil {
			t.Fatal(err)
		}
		r, err := run(t, Config{
			Program: script(t, `. "$VM_REPO/test/vm/lib.sh"
				echo "args $*"; echo "word $WORD"; echo result >"$VM_OUT/file"; [ -e '`+shown+`/there' ]; echo lost >"$VM_REPO/test/vm/probe" || true # vanishes, or is refused
				[ "$(cat "$VM_REPO/go.mod" | head -1)" = "module rdblk" ]
				grep -q ^nbd /proc/modules && exit 1; modprobe nbd; [ -b /dev/nbd0 ]
				exit 41`),
			Args: []string{"a b", "$c"}, Env: []string{"WORD=x 'y' $z"}, Show: []string{shown},
		})
		if exit, ok := err.(*exec.ExitError); !ok || exit.ExitCode() != 41 {
			t.Fatalf("%v\n%s", err, r.Output)
		}
		if !strings.Contains(r.Output, "args a b $c\nword x 'y' $z\n") {
			t.Errorf("output: %s", r.Output)
		}
		if b, err := os.ReadFile(filepath.Join(r.Dir, "file")); err != nil || string(b) != "result\n" {
			t.Errorf("result: %q, %v", b, err)
		}
		if _, err := os.Stat(filepath.Join(Dir(), "probe")); err == nil {
			t.Error("the machine wrote to the host")
		}
		if !strings.Contains(r.Output, "Power Off") {
			t.Error("a failure does not show the console's end")
		}
	})
	t.Run("panic", func(t *testing.T) {
		t.Parallel()
		r, err := run(t, Config{Program: script(t, "echo before; sleep 1; echo c >/proc/sysrq-trigger; sleep 99")})
		console, _ := os.ReadFile(filepath.Join(r.Dir, "console.txt")) // the output has its last lines, as many as the trace may be long
		if err == nil || !strings.Contains(err.Error(), "the machine died") || !strings.Contains(string(console), "sysrq triggered crash") || !strings.Contains(r.Output, "Kernel Offset") {
			t.Fatalf("%v\n%s", err, r.Output)
		}
	})
	t.Run("time limit", func(t *testing.T) {
		t.Parallel()
		start := time.Now()
		r, err := run(t, Config{Program: script(t, "echo stuck; sleep 999"), Timeout: 100 * time.Second}) // of which 80 to boot
		if err == nil || !strings.Contains(err.Error(), "not done after") || !strings.Contains(r.Output, "sleep 999") {
			t.Fatalf("%v\n%s", err, r.Output)
		}
		t.Logf("after %v", time.Since(start))
	})
}

// Two machines on one wire.
func TestPeer(t *testing.T) {
	boots(t)
	one := script(t, `. "$VM_REPO/test/vm/lib.sh"
		rxe_on eth0
		if [ $VM_ROLE = 0 ]; then
			rping -s -a 10.99.0.1 -C 3 & p=$!
			wait_for 30 sh -c 'rdma resource show cm_id | grep -q LISTEN'
			vm_signal listening "hello"
			wait $p
			[ "$(vm_wait over 120)" = bye ]
		else
			[ "$(vm_wait listening 120)" = hello ]
			wait_for 60 rping -c -a 10.99.0.1 -C 3
			vm_signal over bye
		fi
		echo "role $VM_ROLE done"`)
	r := Run(t, Config{Program: one, Peer: one})
	for _, want := range []string{"role 0 done\n", "peer: role 1 done\n"} {
		if !strings.Contains("\n"+r.Output, "\n"+want) {
			t.Errorf("no %q in the output", want)
		}
	}
	bad := script(t, `sleep 1; exit 9`)
	r, err := run(t, Config{Program: script(t, "sleep 999"), Peer: bad})
	if exit, ok := err.(*exec.ExitError); !ok || exit.ExitCode() != 9 {
		t.Errorf("a peer that fails: %v\n%s", err, r.Output)
	}
}

// The kernel against itself: the ground every other test in the machine stands on.
func TestSmoke(t *testing.T) {
	boots(t)
	each(t, []string{"rxe", "siw"}, func(t *testing.T, dev string) { ours(t, Config{Args: []string{dev}}, "smoke.sh") })
}

// Our providers, with rdma-core's rping on the other side: software on siw, devices on siw and on rxe.
func TestRping(t *testing.T) {
	boots(t)
	ours(t, Config{}, "rping.sh", "rdblk/rdma/examples/rping")
}

// rdinit attaches /dev/nbdN by itself.
func TestBlockDevice(t *testing.T) {
	boots(t)
	ours(t, Config{}, "nbd.sh", rdtarget, rdinit)
}

// The provider on rdma-core, over the kernel's two software devices: the contract, and what happens to devices.
func TestVerbs(t *testing.T) {
	boots(t)
	bin := BuildTests(t, "rdblk/rdma/verbs")
	each(t, []string{"rxe", "siw"}, func(t *testing.T, dev string) {
		ours(t, Config{Args: []string{bin, dev, "-test.short", "-test.timeout=8m"}, Show: []string{filepath.Dir(bin)}}, "verbs.sh")
	})
}

// What is done with a /dev/nbdN: file systems, discard, fio, a target that is killed under it.
func TestBlockDeviceFileSystems(t *testing.T) {
	boots(t)
	each(t, forms("rxe siw", "iwarp"), func(t *testing.T, p string) {
		ours(t, Config{Env: []string{"PROVIDER=" + p}}, "nbd-fs.sh", rdtarget, rdinit)
	})
}

// Attach, mkfs, detach, attach, fsck, detach: 3 times, 200 times in the long form, or $ROUNDS.
func TestBlockDeviceRounds(t *testing.T) {
	boots(t)
	c := Config{}
	if n := os.Getenv("ROUNDS"); n != "" {
		c.Env = []string{"ROUNDS=" + n}
	}
	if Long() || c.Env != nil {
		c.Timeout = 90 * time.Minute
	}
	ours(t, c, "nbd-rounds.sh", rdtarget, rdinit)
}

// The machine that has the device mounted is short of memory.
func TestBlockDeviceMemory(t *testing.T) {
	boots(t)
	ours(t, Config{Peer: filepath.Join(Dir(), "guest", "nbd-memory.sh"), Memory: 512, PeerMem: 1600}, "nbd-memory.sh", rdtarget, rdinit)
}

// The machine reboots while the device is mounted and written to. It must come to its end, soon, and
// what was on stable storage when it began must be there.
// The others of the ends that the script knows are harsher.
func TestBlockDeviceReboot(t *testing.T) {
	boots(t)
	each(t, forms("systemd", "busybox sysrq"), func(t *testing.T, how string) {
		r := ours(t, Config{Args: []string{how}, Env: []string{"VM_INIT=1"}}, "nbd-reboot.sh", rdtarget, rdinit)
		end := time.Now()
		going := filepath.Join(r.Dir, "going")
		st, err := os.Stat(going)
		if err != nil {
			t.Fatalf("the end has not begun: %v", err)
		}
		console, err := os.ReadFile(filepath.Join(r.Dir, "console.txt"))
		// The file has the moment's time by the host's clock: the share is the host's file system. 10 s are usual; on
		// a busy machine that nobody is waited for is what systemd says, which does not kill him in silence.
		took := end.Sub(st.ModTime())
		t.Logf("the end took %v", took)
		if late := regexp.MustCompile(`(?m)^.*timed out.*$`).Find(console); took > time.Minute || late != nil {
			t.Errorf("the end took %v: %s", took, late)
		}
		last := "reboot: "
		if how == "sysrq" { // resets at once, and only the key's name is said
			last = "sysrq: Resetting"
		}
		if err != nil || !strings.Contains(string(console), last) {
			t.Errorf("no reboot on the console (%v):\n%s", err, console)
		}
		stable, err := os.ReadFile(going)
		if err != nil {
			t.Fatal(err)
		}
		disk := filepath.Join(r.Dir, "disk.img")
		if how == "systemd" { // it unmounts in time: nothing is left to repair
			if out, err := exec.Command("e2fsck", "-fn", disk).CombinedOutput(); err != nil {
				t.Errorf("not clean: %v\n%s", err, out)
			}
		}
		// Replays the journal. 1: repaired, which for a journal's replay it does not say.
		out, err := exec.Command("e2fsck", "-fy", disk).CombinedOutput()
		if exit, ok := err.(*exec.ExitError); err != nil && (!ok || exit.ExitCode() != 1) {
			t.Fatalf("%v\n%s", err, out)
		}
		log, err := exec.Command("debugfs", "-R", "cat /log", disk).Output()
		if err != nil || !strings.Contains("\n"+string(log), "\n"+strings.TrimSpace(string(stable))+"\n") {
			t.Errorf("%s was on stable storage, and is lost (%v); the file ends with %q", stable, err, log[max(0, len(log)-100):])
		}
	})
}

// rdinit is killed and nobody takes the device over, or somebody does late.
func TestBlockDeviceDead(t *testing.T) {
	boots(t)
	ours(t, Config{}, "nbd-dead.sh", rdtarget, rdinit)
}

// rdtarget and rdinit over RDMA devices, and with the software NIC on either side of siw.
func TestVerbsEndToEnd(t *testing.T) {
	boots(t)
	each(t, []string{"rxe", "siw"}, func(t *testing.T, kind string) {
		pairs := []string{"verbs:verbs"}
		if kind == "siw" {
			pairs = append(pairs, "verbs:iwarp", "iwarp:verbs")
		}
		ours(t, Config{Args: append([]string{kind}, pairs...)}, "verbs-e2e.sh", rdtarget, rdinit)
	})
}

// The device of both programs is removed under load, and comes back.
func TestVerbsDeviceRemoved(t *testing.T) {
	boots(t)
	ours(t, Config{Timeout: 6 * time.Minute}, "verbs-removal.sh", rdtarget, rdinit)
}

// Two machines on a wire: CRC in use, small segments, both directions.
func TestWire(t *testing.T) {
	boots(t)
	ours(t, Config{Peer: filepath.Join(Dir(), "guest", "wire.sh"), Memory: 2048}, "wire.sh", rdtarget, rdinit)
}

// rdinit, or rdtarget, is killed under a mounted /dev/nbdN.
func TestBlockDeviceKill(t *testing.T) {
	boots(t)
	ours(t, Config{}, "nbd-kill.sh", rdtarget, rdinit)
}
