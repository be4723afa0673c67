package blockdev

import (
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// A store's UUID must survive restarts and be the same from wherever the store is
// reached, and nothing may be written to the store for it. So it is a hash
// (RFC 9562 version 8) of what identifies the store already:
//
//   - a file: the file system's UUID (its f_fsid where the kernel does not tell),
//     the inode number and the time of birth, so that a new file under an old number or name
//     is a new store. A file that is moved within its file system keeps it, a copy
//     has another. A file system cloned bit by bit yields clones of the UUIDs too, as it does of its own.
//   - a disk: the world-wide name, dm or md UUID, or model and serial number; a
//     partition adds its number and place. A loop device is what its file is.
//   - memory: random, as it is a new store each time.
//
// What has none of these has no UUID.

func storeUUID(kind string, parts ...any) (id [16]byte) {
	h := sha256.New()
	fmt.Fprintf(h, "rdblk store %s", kind)
	for _, p := range parts {
		fmt.Fprintf(h, "\x00%v", p)
	}
	copy(id[:], h.Sum(nil))
	id[6] = id[6]&0x0f | 0x80
	id[8] = id[8]&0x3f | 0x80
	return id
}

func randomUUID() (id [16]byte) {
	rand.Read(id[:])
	id[6] = id[6]&0x0f | 0x40
	id[8] = id[8]&0x3f | 0x80
	return id
}

func fileUUID(fd int, st *unix.Stat_t, x *unix.Statx_t) [16]byte {
	var where any
	if id, ok := fsUUID(fd); ok {
		where = id
	} else {
		var s unix.Statfs_t
		if err := unix.Fstatfs(fd, &s); err != nil || s.Fsid.Val == [2]int32{} {
			return [16]byte{}
		}
		where = s.Fsid.Val
	}
	born := unix.StatxTimestamp{}
	if x.Mask&unix.STATX_BTIME != 0 {
		born = x.Btime
	}
	return storeUUID("file", where, st.Ino, born.Sec, born.Nsec)
}

// diskUUID takes the sysfs directory of the whole disk.
func diskUUID(dir string) [16]byte {
	if dir == "" {
		return [16]byte{}
	}
	for _, name := range []string{"wwid", "device/wwid", "dm/uuid", "md/uuid"} {
		if v := sysfsString(dir, name); strings.Trim(v, "0 ") != "" {
			return storeUUID("disk", name, v)
		}
	}
	for _, name := range []string{"serial", "device/serial"} {
		if v := sysfsString(dir, name); strings.Trim(v, "0 ") != "" {
			return storeUUID("disk", name, sysfsString(dir, "device/model"), v)
		}
	}
	if back := sysfsString(dir, "loop/backing_file"); back != "" {
		f, err := os.Open(back)
		if err != nil {
			return [16]byte{}
		}
		defer f.Close()
		var st unix.Stat_t
		var x unix.Statx_t
		fd := int(f.Fd())
		if unix.Fstat(fd, &st) != nil || unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_BTIME, &x) != nil {
			return [16]byte{}
		}
		if id := fileUUID(fd, &st, &x); id != [16]byte{} {
			return storeUUID("loop", id, sysfsString(dir, "loop/offset"), sysfsString(dir, "loop/sizelimit"))
		}
	}
	return [16]byte{}
}

// deviceUUID is diskUUID for a disk or a partition by its number.
func deviceUUID(rdev uint64) [16]byte {
	id := diskUUID(sysfsDisk(rdev))
	part := fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(rdev), unix.Minor(rdev))
	if id != [16]byte{} {
		if n := sysfsString(part, "partition"); n != "" {
			return storeUUID("partition", id, n, sysfsString(part, "start"))
		}
	}
	return id
}
