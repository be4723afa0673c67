package blockdev

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// What is served is locked twice. flock is what other servers of ours, util-linux
// (--lock) and udev use; an open-file-description lock on all bytes is what QEMU
// and its tools respect. Both belong to the open file, so they go with it however
// the process ends, and a second Open in the same process is refused as well.

// udevPatience is how long a lock on a disk is tried again: udev holds one for a moment
// whenever somebody closes the disk.
const udevPatience = 3 * time.Second

func lockStore(fd int, path string, block, shared bool) error {
	how, typ := unix.LOCK_EX, int16(unix.F_WRLCK)
	if shared {
		how, typ = unix.LOCK_SH, unix.F_RDLCK
	}
	refused := func() error {
		if shared {
			return fmt.Errorf("open %s: %w%s, which writes to it: end that, or serve another", path, ErrInUse, heldBy(path))
		}
		return fmt.Errorf("open %s: %w%s: end that, serve another, or have all open it read-only", path, ErrInUse, heldBy(path))
	}
	lk := unix.Flock_t{Type: typ}
	var err error
	for {
		if err = unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &lk); err != unix.EINTR {
			break
		}
	}
	switch {
	case err == unix.EAGAIN, err == unix.EACCES:
		return refused()
	case err != nil:
		return noLock(path, err)
	}
	switch fsMagic(fd) {
	case unix.NFS_SUPER_MAGIC, unix.CIFS_SUPER_MAGIC, unix.SMB2_SUPER_MAGIC:
		if !block {
			return nil // flock is made of byte locks there and would collide with the one above
		}
	}
	for give := time.Now().Add(udevPatience); ; {
		switch err = unix.Flock(fd, how|unix.LOCK_NB); {
		case err == nil:
			return nil
		case err == unix.EINTR:
		case err == unix.EWOULDBLOCK && block && time.Now().Before(give):
			time.Sleep(20 * time.Millisecond)
		case err == unix.EWOULDBLOCK:
			return refused()
		default:
			return noLock(path, err)
		}
	}
}

func noLock(path string, err error) error {
	return fmt.Errorf("open %s: lock it: %w (if its file system has no locks and nobody else uses it, switch locking off)", path, err)
}

// heldBy names the process that holds a lock on the path, as far as the kernel
// tells, for a message: ` (process 4711, "rdtarget")` or "".
func heldBy(path string) string {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		return ""
	}
	locks, err := os.ReadFile("/proc/locks")
	if err != nil {
		return ""
	}
	// "1: FLOCK  ADVISORY  WRITE 4711 fe:00:9977872 0 EOF". The device is the file system's, and for a
	// block device that of devtmpfs, not its own number.
	id := fmt.Sprintf("%02x:%02x:%d", unix.Major(uint64(st.Dev)), unix.Minor(uint64(st.Dev)), st.Ino)
	for line := range strings.Lines(string(locks)) {
		f := strings.Fields(line)
		if len(f) < 6 || f[1] == "->" || f[5] != id {
			continue
		}
		if pid, err := strconv.Atoi(f[4]); err == nil && pid > 0 {
			comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
			return fmt.Sprintf(" (process %d, %q)", pid, bytes.TrimSpace(comm))
		}
	}
	return ""
}

// checkLoop looks whether the file is the store of a loop device, which honours no
// lock: two writers, and each with a cache of its own.
func checkLoop(path string, st *unix.Stat_t, o Options) error {
	backing, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range backing {
		var ls unix.Stat_t
		name, err := os.ReadFile(f)
		if err != nil || unix.Stat(string(bytes.TrimSpace(name)), &ls) != nil || ls.Dev != st.Dev || ls.Ino != st.Ino {
			continue
		}
		dir := filepath.Dir(filepath.Dir(f))
		loop := "/dev/" + filepath.Base(dir)
		if !o.ReadOnly && !o.NoLock {
			return fmt.Errorf("open %s: %w: it is attached to %s (detach it: losetup -d %s; or serve %s itself)", path, ErrInUse, loop, loop, loop)
		}
		if sysfsInt(dir, "ro") != 1 {
			o.logger().Warn("the file is attached to a loop device that can write to it: what is read while it changes does not fit together", "dev", path, "loop", loop)
		}
	}
	return nil
}

// checkBacking is the other way round: whether the disk is a loop device whose file
// somebody has locked, who will not see what is written through it, and writes himself.
func checkBacking(path string, rdev uint64, o Options) error {
	name := sysfsString(sysfsDisk(rdev), "loop/backing_file")
	if name == "" || o.NoLock {
		return nil
	}
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil // deleted, or of another mount namespace
	}
	defer unix.Close(fd)
	lk := unix.Flock_t{Type: unix.F_WRLCK}
	if o.ReadOnly {
		lk.Type = unix.F_RDLCK
	}
	if unix.FcntlFlock(uintptr(fd), unix.F_OFD_GETLK, &lk) == nil && lk.Type != unix.F_UNLCK {
		return fmt.Errorf("open %s: %w: it is a loop device of %s, which is in use%s: end that, or serve another", path, ErrInUse, name, heldBy(name))
	}
	return nil
}

// sysfsDisk is the directory of a whole disk in sysfs, given the number of the disk or of a
// partition; "" if there is none.
func sysfsDisk(dev uint64) string {
	dir := fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(dev), unix.Minor(dev))
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return ""
	}
	if _, err := os.Stat(filepath.Join(real, "partition")); err == nil {
		return filepath.Dir(real)
	}
	return real
}

func sysfsString(dir, name string) string {
	if dir == "" {
		return ""
	}
	b, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return ""
	}
	return string(bytes.TrimSpace(b))
}

// sysfsInt is -1 if there is no such number.
func sysfsInt(dir, name string) int64 {
	n, err := strconv.ParseInt(sysfsString(dir, name), 10, 64)
	if err != nil && !errors.Is(err, strconv.ErrRange) {
		return -1
	}
	return n
}
