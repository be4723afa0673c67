package blockdev_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"rdblk/blockdev"
	"rdblk/blockdev/blockdevtest"
	"rdblk/internal/envtest"
)

// TestMain is also the other process of the locking tests: asked by an environment
// variable it opens a device, says so, and keeps it until its input ends.
func TestMain(m *testing.M) {
	if spec, ok := os.LookupEnv("BLOCKDEV_TEST_HOLD"); ok {
		d, err := blockdev.Open(spec, blockdev.Options{ReadOnly: os.Getenv("BLOCKDEV_TEST_READONLY") != ""})
		if err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		fmt.Println("open")
		bufio.NewReader(os.Stdin).ReadString('\n')
		d.Close()
		os.Exit(0)
	}
	if r, w, err := os.Pipe(); err == nil { // starts the runtime's poller, which has descriptors too
		r.Close()
		w.Close()
	}
	before := descriptors()
	code := m.Run()
	if code == 0 {
		code = leaks(before)
	}
	os.Exit(code)
}

func descriptors() int {
	l, _ := os.ReadDir("/proc/self/fd")
	return len(l)
}

// leaks gives goroutines that are about to end the time to do so.
func leaks(before int) int {
	var fds, gos int
	for limit := time.Now().Add(30 * time.Second); time.Now().Before(limit); runtime.Gosched() {
		fds, gos = descriptors(), runtime.NumGoroutine()
		if fds <= before && gos <= 2 {
			return 0
		}
	}
	fmt.Printf("leak: %d descriptors (%d at the start), %d goroutines\n", fds, before, gos)
	buf := make([]byte, 1<<20)
	os.Stdout.Write(buf[:runtime.Stack(buf, true)])
	return 1
}

// hold opens spec in another process and returns how to end that, and its number.
func hold(t *testing.T, spec string, readOnly bool) (release func(), pid int, err error) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "BLOCKDEV_TEST_HOLD="+spec)
	if readOnly {
		cmd.Env = append(cmd.Env, "BLOCKDEV_TEST_READONLY=1")
	}
	in, e1 := cmd.StdinPipe()
	out, e2 := cmd.StdoutPipe()
	if e1 != nil || e2 != nil {
		t.Fatal(e1, e2)
	}
	must(t, "start the other process", cmd.Start())
	line, _ := bufio.NewReader(out).ReadString('\n')
	release = func() { in.Close(); cmd.Wait() }
	if line != "open\n" {
		release()
		return func() {}, cmd.Process.Pid, fmt.Errorf("%s", line)
	}
	return release, cmd.Process.Pid, nil
}

func must(t testing.TB, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// run runs a program or fails the test.
func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

// needLoop skips where loop devices and mounts cannot be had, and only there.
func needLoop(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		envtest.Lacks(t, "not root: loop devices and mounts need it")
	}
	f, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		envtest.Lacks(t, "no loop devices here: %v", err)
	}
	f.Close()
}

// needFileSystem skips where the kernel has no such file system, not even as a module.
func needFileSystem(t testing.TB, kind string) {
	t.Helper()
	exec.Command("modprobe", kind).Run()
	supported, err := os.ReadFile("/proc/filesystems")
	must(t, "file systems", err)
	if !strings.Contains(string(supported), "\t"+kind+"\n") {
		t.Skipf("this kernel has no %s", kind)
	}
}

// newFile makes a sparse file.
func newFile(t testing.TB, dir string, size int64) string {
	t.Helper()
	f, err := os.CreateTemp(dir, "disk-*.img")
	must(t, "create", err)
	defer f.Close()
	must(t, "truncate", f.Truncate(size))
	return f.Name()
}

// mount makes a file system of a kind in a file and mounts it.
func mount(t testing.TB, kind string, size int64, mkfs ...string) string {
	t.Helper()
	needLoop(t)
	img := newFile(t, t.TempDir(), size)
	run(t, "mkfs."+kind, append(mkfs, img)...)
	dir := t.TempDir()
	run(t, "mount", "-o", "loop", img, dir)
	t.Cleanup(func() { run(t, "umount", dir) })
	return dir
}

// loop makes a loop device of a file.
func loop(t testing.TB, file string, args ...string) string {
	t.Helper()
	needLoop(t)
	dev := run(t, "losetup", append(append([]string{"-f", "--show"}, args...), file)...)
	t.Cleanup(func() { run(t, "losetup", "-d", dev) })
	return dev
}

func open(t testing.TB, spec string, o blockdev.Options) blockdev.Device {
	t.Helper()
	d, err := blockdev.Open(spec, o)
	must(t, "open", err)
	t.Cleanup(func() { d.Close() })
	return d
}

// suite runs the device suite on new files in dir.
func suite(t *testing.T, dir string, size int64, o blockdev.Options, opts ...blockdevtest.Option) {
	t.Helper()
	blockdevtest.Run(t, func(t testing.TB) blockdev.Device {
		d, err := blockdev.Open(newFile(t, dir, size), o)
		must(t, "open", err)
		return d
	}, opts...)
}

func TestFile(t *testing.T) {
	suite(t, t.TempDir(), 2<<20, blockdev.Options{})
}

func TestFileWithLargeBlocks(t *testing.T) {
	suite(t, t.TempDir(), 4<<20, blockdev.Options{BlockSize: 65536}, blockdevtest.Short())
}

func TestFileDirect(t *testing.T) {
	suite(t, t.TempDir(), 2<<20, blockdev.Options{Direct: true}, blockdevtest.Short())
}

func TestFileInMemory(t *testing.T) {
	dir, err := os.MkdirTemp("/dev/shm", "blockdev")
	if err != nil {
		envtest.Lacks(t, "no file system in memory: %v", err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	suite(t, dir, 2<<20, blockdev.Options{}, blockdevtest.Short())
}

// TestFileSystems runs the suite on file systems of their own, with and without the
// page cache. The long random parts are TestFile's.
func TestFileSystems(t *testing.T) {
	for _, fs := range []struct {
		kind string
		args []string
	}{
		{"ext4", []string{"-q", "-F"}},
		{"ext2", []string{"-q", "-F", "-b", "1024"}},
		{"xfs", []string{"-q"}},
		{"vfat", nil}, // can do nothing of what we like: no hole, no zero range
	} {
		t.Run(fs.kind, func(t *testing.T) {
			needLoop(t)
			needFileSystem(t, fs.kind)
			if _, err := exec.LookPath("mkfs." + fs.kind); err != nil {
				envtest.Lacks(t, "no mkfs.%s here", fs.kind)
			}
			dir := mount(t, fs.kind, 320<<20, fs.args...)
			t.Run("Buffered", func(t *testing.T) { suite(t, dir, 2<<20, blockdev.Options{}, blockdevtest.Short()) })
			t.Run("Direct", func(t *testing.T) { suite(t, dir, 2<<20, blockdev.Options{Direct: true}, blockdevtest.Short()) })
		})
	}
}

func TestOverlay(t *testing.T) {
	needLoop(t)
	needFileSystem(t, "overlay")
	base := mount(t, "ext4", 64<<20, "-q", "-F")
	for _, d := range []string{"lower", "upper", "work", "all"} {
		must(t, "mkdir", os.Mkdir(filepath.Join(base, d), 0o755))
	}
	dir := filepath.Join(base, "all")
	run(t, "mount", "-t", "overlay", "-o", fmt.Sprintf("lowerdir=%s/lower,upperdir=%s/upper,workdir=%s/work", base, base, base), "overlay", dir)
	t.Cleanup(func() { run(t, "umount", dir) })
	suite(t, dir, 2<<20, blockdev.Options{}, blockdevtest.Short())
}

// TestDisks runs the suite on block devices.
func TestDisks(t *testing.T) {
	for _, sector := range []string{"512", "4096"} {
		for _, direct := range []bool{false, true} {
			name := map[bool]string{false: "Buffered", true: "Direct"}[direct] + sector
			t.Run(name, func(t *testing.T) {
				dev := loop(t, newFile(t, t.TempDir(), 2<<20), "-b", sector)
				var opts []blockdevtest.Option
				if direct {
					opts = append(opts, blockdevtest.Short())
				}
				blockdevtest.Run(t, func(t testing.TB) blockdev.Device {
					d, err := blockdev.Open(dev, blockdev.Options{Direct: direct})
					must(t, "open", err)
					return d
				}, opts...)
				in := open(t, dev, blockdev.Options{Direct: direct}).Info()
				if want := map[string]int{"512": 512, "4096": 4096}[sector]; in.BlockSize != want {
					t.Errorf("block of %d, want %d", in.BlockSize, want)
				}
			})
		}
	}
}

// TestAStoreThatCanDoNothing: every fall-back, down to writing zeros.
func TestAStoreThatCanDoNothing(t *testing.T) {
	for _, direct := range []bool{false, true} {
		t.Run(fmt.Sprintf("direct=%v", direct), func(t *testing.T) {
			dir := t.TempDir()
			blockdevtest.Run(t, func(t testing.TB) blockdev.Device {
				d, err := blockdev.Open(newFile(t, dir, 2<<20), blockdev.Options{Direct: direct})
				must(t, "open", err)
				blockdev.LackEverything(d)
				return d
			}, blockdevtest.Short())
		})
	}
	t.Run("disk", func(t *testing.T) {
		dev := loop(t, newFile(t, t.TempDir(), 2<<20))
		blockdevtest.Run(t, func(t testing.TB) blockdev.Device {
			d, err := blockdev.Open(dev, blockdev.Options{})
			must(t, "open", err)
			blockdev.LackEverything(d)
			return d
		}, blockdevtest.Short())
	})
}

func TestMem(t *testing.T) {
	blockdevtest.Run(t, func(t testing.TB) blockdev.Device {
		d, err := blockdev.Open("mem:2M", blockdev.Options{})
		must(t, "open", err)
		return d
	})
}

func TestNull(t *testing.T) {
	blockdevtest.Run(t, func(t testing.TB) blockdev.Device {
		d, err := blockdev.Open("null:2M", blockdev.Options{})
		must(t, "open", err)
		return d
	}, blockdevtest.Forgets())
}

func TestReadOnly(t *testing.T) {
	file := newFile(t, t.TempDir(), 1<<20)
	specs := map[string]string{"file": file, "mem": "mem:1M", "null": "null:1M"}
	for name, spec := range specs {
		for _, direct := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/direct=%v", name, direct), func(t *testing.T) {
				blockdevtest.RunReadOnly(t, func(t testing.TB) blockdev.Device {
					d, err := blockdev.Open(spec, blockdev.Options{ReadOnly: true, Direct: direct})
					must(t, "open", err)
					return d
				})
			})
		}
	}
	t.Run("disk", func(t *testing.T) {
		dev := loop(t, newFile(t, t.TempDir(), 1<<20), "-r")
		if _, err := blockdev.Open(dev, blockdev.Options{}); err == nil || !strings.Contains(err.Error(), "read-only") {
			t.Errorf("open a write-protected disk for writing: %v", err)
		}
		blockdevtest.RunReadOnly(t, func(t testing.TB) blockdev.Device {
			d, err := blockdev.Open(dev, blockdev.Options{ReadOnly: true})
			must(t, "open", err)
			return d
		})
	})
}
