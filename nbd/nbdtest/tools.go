package nbdtest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"rdblk/internal/envtest"
)

// packages tells how to get the tools.
const packages = "apt-get install -y libnbd-bin python3-libnbd qemu-utils fio"

// toolTimeout ends a tool that hangs.
const toolTimeout = 3 * time.Minute

// Target is an export on a Unix socket, and what is to be expected of it.
type Target struct {
	Socket    string
	Export    string
	Size      int64 // bytes; at least 32 MiB and at most 1 GiB keeps the tests short and worth it
	BlockSize int   // minimum block size in bytes
	ReadOnly  bool
	Trim      bool
	Zero      bool
}

// URI is the target's address as NBD clients understand it.
func (tg Target) URI() string {
	return "nbd+unix:///" + url.PathEscape(tg.Export) + "?socket=" + tg.Socket
}

// Require skips the test if a tool is missing, or fails it where CI=true, because
// there the tools are installed.
func Require(t testing.TB, tools ...string) {
	t.Helper()
	var missing []string
	for _, tool := range tools {
		if tool == "nbdsh" {
			if _, err := shell(); err != nil {
				missing = append(missing, tool)
			}
		} else if _, err := exec.LookPath(tool); err != nil {
			missing = append(missing, tool)
		}
	}
	if len(missing) == 0 {
		return
	}
	envtest.Lacks(t, "missing: %s (install: %s)", strings.Join(missing, ", "), packages)
}

// shell finds a Python that has libnbd: nbdsh takes the first python3 in the path,
// which need not be the one that the distribution's module is for.
func shell() ([]string, error) {
	for _, py := range []string{"python3", "/usr/bin/python3"} {
		cmd := exec.Command(py, "-c", "import nbd; nbd.NBD()")
		cmd.Dir = os.TempDir() // not one with a directory called nbd, which would be taken for the module
		if cmd.Run() == nil {
			return []string{py, "-m", "nbd"}, nil
		}
	}
	return nil, errors.New("no python3 with the module nbd")
}

// Run runs a tool and gives its output; the test fails if the tool does.
func Run(t testing.TB, args ...string) string {
	t.Helper()
	out, err := run(t, args...)
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// run runs a tool in a directory of its own: some leave files behind, and Python
// would take a directory called nbd for the module.
func run(t testing.TB, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), toolTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir = t.TempDir()
	cmd.WaitDelay = 5 * time.Second
	var b bytes.Buffer
	cmd.Stdout, cmd.Stderr = &b, &b
	err := cmd.Run()
	if ctx.Err() != nil {
		err = fmt.Errorf("not finished within %v", toolTimeout)
	}
	return b.String(), err
}

// All runs every client that fits the target, as subtests.
func (tg Target) All(t *testing.T) {
	t.Run("nbdinfo", tg.Info)
	t.Run("nbdsh", tg.Shell)
	if tg.ReadOnly {
		return
	}
	t.Run("nbdcopy", tg.Copy)
	t.Run("qemu-img", tg.QemuImg)
	t.Run("qemu-io", tg.QemuIO)
	t.Run("fio", tg.Fio)
}

// Info compares what nbdinfo reports.
func (tg Target) Info(t *testing.T) {
	Require(t, "nbdinfo")
	out := Run(t, "nbdinfo", "--json", "--no-content", tg.URI())
	var v struct {
		Protocol   string
		Structured bool
		Exports    []map[string]any
	}
	if err := json.Unmarshal([]byte(out), &v); err != nil || len(v.Exports) != 1 {
		t.Fatalf("%v\n%s", err, out)
	}
	if v.Protocol != "newstyle-fixed" || !v.Structured {
		t.Errorf("protocol %q, structured %v", v.Protocol, v.Structured)
	}
	e := v.Exports[0]
	for key, want := range map[string]any{
		"export-size":        float64(tg.Size),
		"is_read_only":       tg.ReadOnly,
		"can_flush":          true,
		"can_multi_conn":     true,
		"can_df":             true,
		"can_fua":            !tg.ReadOnly,
		"can_trim":           tg.Trim && !tg.ReadOnly,
		"can_zero":           tg.Zero && !tg.ReadOnly,
		"can_fast_zero":      false,
		"can_cache":          false,
		"block_size_minimum": float64(tg.BlockSize),
	} {
		if got := e[key]; got != want {
			t.Errorf("%s: %v, want %v", key, got, want)
		}
	}
	if t.Failed() {
		t.Log(out)
	}
	list := Run(t, "nbdinfo", "--list", "--json", tg.URI())
	if !strings.Contains(list, fmt.Sprintf("%q: %q", "export-name", tg.Export)) {
		t.Errorf("the export %q is not in the list:\n%s", tg.Export, list)
	}
}

// image makes a file of random data with holes and gives its path.
func image(t testing.TB, size int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	seed := rand.Uint64()
	t.Logf("image seed %d", seed)
	src := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16), byte(seed >> 24), byte(seed >> 32), byte(seed >> 40), byte(seed >> 48), byte(seed >> 56)})
	rnd := rand.New(src)
	b := make([]byte, 1<<20)
	for off := int64(0); off < size; {
		n := min(int64(rnd.IntN(len(b)/512)+1)*512, size-off)
		if rnd.IntN(4) > 0 {
			src.Read(b[:n])
			if _, err := f.WriteAt(b[:n], off); err != nil {
				t.Fatal(err)
			}
		}
		off += n
	}
	return path
}

// same compares two files byte by byte.
func same(t testing.TB, a, b string) {
	t.Helper()
	x, err := os.ReadFile(a)
	if err != nil {
		t.Fatal(err)
	}
	y, err := os.ReadFile(b)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Equal(x, y) {
		return
	}
	for i := range min(len(x), len(y)) {
		if x[i] != y[i] {
			t.Fatalf("%d and %d bytes; they differ first at %d", len(x), len(y), i)
		}
	}
	t.Fatalf("%d and %d bytes; one is the beginning of the other", len(x), len(y))
}

// Copy writes the whole export with nbdcopy and reads it back, on one connection and on four.
func (tg Target) Copy(t *testing.T) {
	Require(t, "nbdcopy")
	for _, opts := range [][]string{{"--connections=1"}, {"--connections=4", "--requests=64"}} {
		src := image(t, tg.Size)
		back := filepath.Join(t.TempDir(), "back")
		Run(t, append(append([]string{"nbdcopy", "--flush"}, opts...), src, tg.URI())...)
		Run(t, append(append([]string{"nbdcopy"}, opts...), tg.URI(), back)...)
		same(t, src, back)
	}
}

// QemuImg converts an image into the export, compares it, and puts a qcow2 image on it that it checks.
func (tg Target) QemuImg(t *testing.T) {
	Require(t, "qemu-img")
	src := image(t, tg.Size)
	uri := tg.URI()
	Run(t, "qemu-img", "convert", "-n", "-W", "-m", "8", "-f", "raw", "-O", "raw", src, uri)
	Run(t, "qemu-img", "compare", "-f", "raw", "-F", "raw", src, uri)
	back := filepath.Join(t.TempDir(), "back")
	Run(t, "qemu-img", "convert", "-f", "raw", "-O", "raw", uri, back)
	same(t, src, back)

	inside := image(t, tg.Size/2)
	Run(t, "qemu-img", "create", "-f", "qcow2", uri, fmt.Sprint(tg.Size/2))
	Run(t, "qemu-img", "convert", "-n", "-f", "raw", "-O", "qcow2", inside, uri)
	if out := Run(t, "qemu-img", "check", "-f", "qcow2", uri); !strings.Contains(out, "No errors were found") {
		t.Error(out)
	}
	Run(t, "qemu-img", "compare", "-f", "raw", "-F", "qcow2", inside, uri)
}

// QemuIO writes and reads patterns at odd offsets and lengths, which qemu turns
// into reads and writes of whole blocks, with FUA, zeroes and discards between them.
func (tg Target) QemuIO(t *testing.T) {
	Require(t, "qemu-io")
	var args []string
	add := func(format string, a ...any) { args = append(args, "-c", fmt.Sprintf(format, a...)) }
	add("write -P 0x11 0 1M")
	add("write -P 0x5a 513 1023")
	add("read -P 0x5a 513 1023")
	add("read -P 0x11 0 513")
	add("read -P 0x11 1536 4096")
	add("write -f -P 0xa5 %d 7", tg.Size-7)
	add("read -P 0xa5 %d 7", tg.Size-7)
	add("write -P 0x77 1 3000001")
	add("read -P 0x77 1 3000001")
	add("read -P 0x11 0 1")
	add("write -z 65537 131071")
	add("read -P 0 65537 131071")
	add("read -P 0x77 65536 1")
	add("write -z -u 262144 1M")
	add("read -P 0 262144 1M")
	add("discard 4M 1M")
	add("aio_write -P 0x21 8M 4M")
	add("aio_write -P 0x22 12M 4M")
	add("aio_write -P 0x23 16M 333")
	add("aio_flush")
	add("read -P 0x21 8M 4M")
	add("read -P 0x22 12M 4M")
	add("read -P 0x23 16M 333")
	add("flush")
	out := Run(t, append(append([]string{"qemu-io", "-f", "raw"}, args...), tg.URI())...)
	if strings.Contains(out, "failed") || strings.Contains(out, "rror") {
		t.Error(out)
	}
	if n := strings.Count(out, "ops;"); n != len(args)/2-2 { // all but the two flushes print a line
		t.Errorf("%d results of %d commands\n%s", n, len(args)/2, out)
	}
	// A pattern that is not there must be noticed, or all of the above says nothing.
	if out, _ := run(t, "qemu-io", "-f", "raw", "-c", "read -P 0x99 8M 4M", tg.URI()); !strings.Contains(out, "Pattern verification failed") {
		t.Error("qemu-io does not verify:", out)
	}
}

// Fio verifies checksums of random writes of 512 bytes to 4 MiB, 64 deep, from four
// connections that each have a quarter of the export.
func (tg Target) Fio(t *testing.T) {
	Require(t, "fio")
	quarter := tg.Size / 4 / (1 << 20) * (1 << 20)
	lo := max(512, tg.BlockSize)
	out := Run(t, "fio", "--name=verify", "--ioengine=nbd", "--uri="+tg.URI(), "--rw=randwrite", "--output-format=json",
		fmt.Sprintf("--bssplit=%d/30:4k/30:64k/20:1m/15:4m/5", lo), fmt.Sprintf("--blockalign=%d", lo),
		"--iodepth=64", "--numjobs=4", "--group_reporting", "--allow_file_create=0",
		fmt.Sprintf("--size=%d", quarter), fmt.Sprintf("--offset_increment=%d", quarter),
		"--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--verify_state_save=0")
	i := strings.Index(out, "{")
	var v struct {
		Jobs []struct {
			Error       int
			Read, Write struct {
				IOBytes int64 `json:"io_bytes"`
				Total   int64 `json:"total_ios"`
			}
		}
	}
	if i < 0 || json.Unmarshal([]byte(out[i:]), &v) != nil || len(v.Jobs) != 1 {
		t.Fatalf("fio's output:\n%s", out)
	}
	j := v.Jobs[0]
	if j.Error != 0 || j.Write.IOBytes < tg.Size/4 || j.Read.Total < j.Write.Total {
		t.Errorf("error %d, %d bytes written by %d requests, %d verified by %d\n%s", j.Error, j.Write.IOBytes, j.Write.Total, j.Read.IOBytes, j.Read.Total, out)
	}
	t.Logf("%d MiB written by %d requests and verified", j.Write.IOBytes>>20, j.Write.Total)
}

// Shell provokes errors with nbdsh, libnbd's own checks being off.
func (tg Target) Shell(t *testing.T) {
	Require(t, "nbdsh")
	sh, err := shell()
	if err != nil {
		t.Fatal(err)
	}
	script := tg.script()
	out := Run(t, append(append([]string(nil), sh...), "-c", script)...)
	if !strings.Contains(out, "all as expected") {
		t.Errorf("the script did not end:\n%s", out)
	}
}

func (tg Target) script() string {
	b := fmt.Sprintf(`
import errno, nbd
h = nbd.NBD()
h.set_strict_mode(0)
h.connect_uri(%q)
size, block, read_only, trim, zero = %d, %d, %v, %v, %v
`, tg.URI(), tg.Size, tg.BlockSize, pyBool(tg.ReadOnly), pyBool(tg.Trim), pyBool(tg.Zero))
	return b + `
assert h.get_size() == size

def fails(want, f, *args, **kw):
    try:
        f(*args, **kw)
    except nbd.Error as e:
        assert e.errnum == want, "%s%s: %s, wanted %s" % (f.__name__, args, e, errno.errorcode[want])
    else:
        assert False, "%s%s: no error" % (f.__name__, args)
    h.pread(block, 0) # the connection goes on

E = errno
fails(E.EINVAL, h.pread, block, size)
fails(E.EINVAL, h.pread, 2 * block, size - block)
fails(E.EINVAL, h.pread, block, 2**63 - block)
fails(E.EINVAL, h.pread, block, 2**64 - block)
fails(E.EINVAL, h.pread, 0, 0)
fails(E.EINVAL, h.pread, block, 1)
fails(E.EINVAL, h.pread, block + 1, 0)
fails(E.EINVAL, h.pread, block, 0, flags=nbd.CMD_FLAG_NO_HOLE)
fails(E.EINVAL, h.cache, block, 0)
h.pread(block, 0, flags=nbd.CMD_FLAG_DF)
h.flush()
data = bytes([7]) * block
if read_only:
    fails(E.EPERM, h.pwrite, data, 0)
    fails(E.EPERM, h.pwrite, data, 0, flags=nbd.CMD_FLAG_FUA)
    fails(E.EPERM, h.zero, block, 0)
    fails(E.EPERM, h.trim, block, 0)
else:
    h.pwrite(data, size - block, flags=nbd.CMD_FLAG_FUA)
    assert h.pread(block, size - block) == data
    fails(E.ENOSPC, h.pwrite, data, size)
    fails(E.ENOSPC, h.pwrite, data * 2, size - block)
    fails(E.ENOSPC, h.pwrite, data, 2**64 - block)
    fails(E.EINVAL, h.pwrite, data, 1)
    fails(E.EINVAL, h.pwrite, b"", 0)
    fails(E.EINVAL, h.pwrite, data, 0, flags=nbd.CMD_FLAG_DF)
    if zero:
        h.zero(block, size - block)
        assert h.pread(block, size - block) == bytes(block)
        h.zero(block, size - block, flags=nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
        fails(E.ENOSPC, h.zero, 2 * block, size - block)
        fails(E.EINVAL, h.zero, 0, 0)
        fails(E.EINVAL, h.zero, block, 0, flags=nbd.CMD_FLAG_FAST_ZERO)
    else:
        fails(E.EINVAL, h.zero, block, 0)
    if trim:
        h.trim(block, size - block)
        h.trim(block, 0, flags=nbd.CMD_FLAG_FUA)
        fails(E.EINVAL, h.trim, block, size)
        fails(E.EINVAL, h.trim, 0, 0)
    else:
        fails(E.EINVAL, h.trim, block, 0)
h.shutdown()
print("all as expected")
`
}

func pyBool(b bool) string {
	if b {
		return "True"
	}
	return "False"
}
