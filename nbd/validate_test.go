package nbd

import (
	"errors"
	"fmt"
	"math"
	"syscall"
	"testing"

	"rdblk/blockdev"
)

const (
	vSize  = int64(1 << 30)
	vBlock = 4096
	vMax   = 1 << 20
)

// limitsFor makes limits as a handshake would for a device that can everything.
func limitsFor(readOnly, structured bool) (blockdev.Info, limits) {
	in := blockdev.Info{Size: vSize, BlockSize: vBlock, PhysBlock: vBlock, ReadOnly: readOnly, WriteCache: true, FUA: true, Discard: true, WriteZeroes: true}
	return in, limits{flags: transmissionFlags(&in, structured), structured: structured, maxPayload: vMax}
}

// TestValidateExamples is the table to read: one line per rule.
func TestValidateExamples(t *testing.T) {
	const end = uint64(vSize)
	for _, c := range []struct {
		name                 string
		cmd                  command
		flags                uint16
		off                  uint64
		length               uint32
		readOnly, structured bool
		want                 Errno
		why                  string
	}{
		{name: "read", cmd: cmdRead, length: vBlock},
		{name: "read the last block", cmd: cmdRead, off: end - vBlock, length: vBlock},
		{name: "read over the end", cmd: cmdRead, off: end - vBlock, length: 2 * vBlock, want: EINVAL, why: whyRange},
		{name: "read at the end", cmd: cmdRead, off: end, length: vBlock, want: EINVAL, why: whyRange},
		{name: "read at 2^64 - block", cmd: cmdRead, off: math.MaxUint64 - vBlock + 1, length: vBlock, want: EINVAL, why: whyRange},
		{name: "read at 2^64 - 1", cmd: cmdRead, off: math.MaxUint64, length: vBlock, want: EINVAL, why: whyAlign},
		{name: "read at 2^63", cmd: cmdRead, off: 1 << 63, length: vBlock, want: EINVAL, why: whyRange},
		{name: "read wraps to the start", cmd: cmdRead, off: math.MaxUint64 - 2*vBlock + 1, length: 4 * vBlock, want: EINVAL, why: whyRange},
		{name: "read 4 GiB - 1", cmd: cmdRead, length: math.MaxUint32, want: EINVAL, why: whyAlign},
		{name: "read 4 GiB - block", cmd: cmdRead, length: math.MaxUint32 - vBlock + 1, want: EINVAL, why: whyRange},
		{name: "read odd offset", cmd: cmdRead, off: 512, length: vBlock, want: EINVAL, why: whyAlign},
		{name: "read odd length", cmd: cmdRead, length: vBlock + 512, want: EINVAL, why: whyAlign},
		{name: "read nothing", cmd: cmdRead, want: EINVAL, why: whyZero},
		{name: "read the maximum", cmd: cmdRead, length: vMax},
		{name: "read over the maximum", cmd: cmdRead, length: vMax + vBlock, want: EINVAL, why: whyTooLong},
		{name: "read over the maximum, structured", cmd: cmdRead, length: vMax + vBlock, structured: true, want: EOVERFLOW, why: whyTooLong},
		{name: "read with DF", cmd: cmdRead, flags: cmdFlagDF, length: vBlock, structured: true},
		{name: "read with DF, not structured", cmd: cmdRead, flags: cmdFlagDF, length: vBlock, want: EINVAL, why: whyFlags},
		{name: "read with FUA is allowed", cmd: cmdRead, flags: cmdFlagFUA, length: vBlock},
		{name: "read with FUA that was not offered", cmd: cmdRead, flags: cmdFlagFUA, length: vBlock, readOnly: true, want: EINVAL, why: whyFlags},
		{name: "read with NO_HOLE", cmd: cmdRead, flags: cmdFlagNoHole, length: vBlock, want: EINVAL, why: whyFlags},
		{name: "read with an unknown flag", cmd: cmdRead, flags: 1 << 15, length: vBlock, want: EINVAL, why: whyFlags},
		{name: "write", cmd: cmdWrite, length: vBlock},
		{name: "write with FUA", cmd: cmdWrite, flags: cmdFlagFUA, length: vBlock},
		{name: "write over the end", cmd: cmdWrite, off: end - vBlock, length: 2 * vBlock, want: ENOSPC, why: whyRange},
		{name: "write far over the end", cmd: cmdWrite, off: math.MaxUint64 - vBlock + 1, length: vBlock, want: ENOSPC, why: whyRange},
		{name: "write to read-only", cmd: cmdWrite, length: vBlock, readOnly: true, want: EPERM, why: whyReadOnly},
		{name: "write with FUA to read-only", cmd: cmdWrite, flags: cmdFlagFUA, length: vBlock, readOnly: true, want: EPERM, why: whyReadOnly},
		{name: "write over the maximum", cmd: cmdWrite, length: vMax + vBlock, structured: true, want: EINVAL, why: whyTooLong},
		{name: "write nothing", cmd: cmdWrite, want: EINVAL, why: whyZero},
		{name: "write with DF", cmd: cmdWrite, flags: cmdFlagDF, length: vBlock, structured: true, want: EINVAL, why: whyFlags},
		{name: "write odd", cmd: cmdWrite, off: 1, length: vBlock, want: EINVAL, why: whyAlign},
		{name: "flush", cmd: cmdFlush},
		{name: "flush of read-only", cmd: cmdFlush, readOnly: true},
		{name: "flush with FUA is allowed", cmd: cmdFlush, flags: cmdFlagFUA},
		{name: "flush with a range", cmd: cmdFlush, off: vBlock, want: EINVAL, why: whyFlushRange},
		{name: "flush with a length", cmd: cmdFlush, length: vBlock, want: EINVAL, why: whyFlushRange},
		{name: "flush with NO_HOLE", cmd: cmdFlush, flags: cmdFlagNoHole, want: EINVAL, why: whyFlags},
		{name: "trim", cmd: cmdTrim, length: vBlock},
		{name: "trim of all that 32 bits can say", cmd: cmdTrim, length: uint32(vSize)},
		{name: "trim over the end", cmd: cmdTrim, off: end, length: vBlock, want: EINVAL, why: whyRange},
		{name: "trim of read-only", cmd: cmdTrim, length: vBlock, readOnly: true, want: EPERM, why: whyReadOnly},
		{name: "trim with FUA", cmd: cmdTrim, flags: cmdFlagFUA, length: vBlock},
		{name: "write zeroes", cmd: cmdWriteZeroes, length: vBlock},
		{name: "write zeroes over the maximum payload", cmd: cmdWriteZeroes, length: 4 * vMax},
		{name: "write zeroes with NO_HOLE and FUA", cmd: cmdWriteZeroes, flags: cmdFlagNoHole | cmdFlagFUA, length: vBlock},
		{name: "write zeroes with FAST_ZERO", cmd: cmdWriteZeroes, flags: 1 << 4, length: vBlock, want: EINVAL, why: whyFlags},
		{name: "write zeroes over the end", cmd: cmdWriteZeroes, off: end - vBlock, length: 2 * vBlock, want: ENOSPC, why: whyRange},
		{name: "write zeroes to read-only", cmd: cmdWriteZeroes, length: vBlock, readOnly: true, want: EPERM, why: whyReadOnly},
		{name: "cache", cmd: cmdCache, length: vBlock, want: EINVAL, why: whyCommand},
		{name: "block status", cmd: cmdBlockStatus, length: vBlock, structured: true, want: EINVAL, why: whyCommand},
		{name: "unknown", cmd: 4711, length: vBlock, want: EINVAL, why: whyCommand},
		{name: "disconnect, whatever it says", cmd: cmdDisc, flags: 0xffff, off: math.MaxUint64, length: 1},
	} {
		in, l := limitsFor(c.readOnly, c.structured)
		r := request{cmd: c.cmd, flags: c.flags, off: c.off, length: c.length}
		if got, why := validate(&r, &in, &l); got != c.want || why != c.why {
			t.Errorf("%s: %v %q, want %v %q", c.name, got, why, c.want, c.why)
		}
	}
}

// TestValidateAll goes through every command × flag set × range × kind of
// connection and compares with the rules written down a second time, as sets.
func TestValidateAll(t *testing.T) {
	offsets := []uint64{0, 1, 511, 512, vBlock - 1, vBlock, uint64(vSize) - 2*vBlock, uint64(vSize) - vBlock, uint64(vSize) - 1, uint64(vSize),
		uint64(vSize) + vBlock, 1 << 32, 1<<63 - vBlock, 1 << 63, math.MaxUint64 - vBlock + 1, math.MaxUint64 - 1, math.MaxUint64}
	lengths := []uint32{0, 1, 512, vBlock, vBlock + 1, 2 * vBlock, vMax - vBlock, vMax, vMax + vBlock, 1 << 30, 1 << 31, math.MaxUint32 - vBlock + 1, math.MaxUint32}
	commands := []command{0, 1, 2, 3, 4, 5, 6, 7, 8, 255, 0x100, 0x8000, 0xffff}
	var flagSets []uint16
	for f := range uint16(1 << 6) {
		flagSets = append(flagSets, f)
	}
	for b := 6; b < 16; b++ {
		flagSets = append(flagSets, 1<<b, 1<<b|cmdFlagFUA)
	}
	n, passed := 0, 0
	for kind := range 16 {
		in := blockdev.Info{Size: vSize, BlockSize: vBlock, ReadOnly: kind&1 != 0, WriteCache: true, Discard: kind&4 != 0, WriteZeroes: kind&8 != 0}
		l := limits{structured: kind&2 != 0, maxPayload: vMax}
		l.flags = transmissionFlags(&in, l.structured)
		for _, cmd := range commands {
			for _, flags := range flagSets {
				for _, off := range offsets {
					for _, length := range lengths {
						r := request{cmd: cmd, flags: flags, off: off, length: length}
						got, why := validate(&r, &in, &l)
						if (got == 0) != (why == "") {
							t.Fatalf("%v: %v with reason %q", r, got, why)
						}
						ok, errs := expect(&r, &in, &l)
						if ok && got != 0 || !ok && !errs[got] {
							t.Fatalf("%+v, read-only %v, structured %v: %v (%s), want one of %v", r, in.ReadOnly, l.structured, got, why, errs)
						}
						n++
						if got == 0 {
							passed++
							// What passes can be computed with: nothing of it wraps or is negative.
							if cmd != cmdDisc && (int64(r.off) < 0 || int64(r.off)+int64(r.length) > in.Size || int64(r.off)+int64(r.length) < 0) {
								t.Fatalf("%+v passed", r)
							}
						}
					}
				}
			}
		}
	}
	t.Logf("%d requests, %d passed", n, passed)
	if passed == 0 {
		t.Fatal("nothing passed")
	}
}

// expect says whether r is valid, and if not which errors name a rule that it breaks.
func expect(r *request, in *blockdev.Info, l *limits) (bool, map[Errno]bool) {
	errs := map[Errno]bool{}
	type spec struct {
		offered        bool
		flags          uint16
		writes, ranged bool
		payload        bool
		outside        Errno
	}
	w := !in.ReadOnly
	s, known := map[command]spec{
		cmdRead:        {offered: true, flags: map[bool]uint16{true: cmdFlagDF}[l.structured], ranged: true, payload: true, outside: EINVAL},
		cmdWrite:       {offered: w, writes: true, ranged: true, payload: true, outside: ENOSPC},
		cmdDisc:        {offered: true, flags: 0xffff},
		cmdFlush:       {offered: true},
		cmdTrim:        {offered: w && in.Discard, writes: true, ranged: true, outside: EINVAL},
		cmdWriteZeroes: {offered: w && in.WriteZeroes, flags: cmdFlagNoHole, writes: true, ranged: true, outside: ENOSPC},
	}[r.cmd]
	if !known {
		return false, map[Errno]bool{EINVAL: true}
	}
	if r.cmd == cmdDisc {
		return true, nil
	}
	if s.writes && in.ReadOnly {
		return false, map[Errno]bool{EPERM: true} // nothing goes before it
	}
	if w {
		s.flags |= cmdFlagFUA
	}
	if !s.offered || r.flags&^s.flags != 0 {
		errs[EINVAL] = true
	}
	if !s.ranged && (r.off != 0 || r.length != 0) {
		errs[EINVAL] = true
	}
	if s.ranged {
		if r.length == 0 || r.off%vBlock != 0 || r.length%vBlock != 0 {
			errs[EINVAL] = true
		}
		// In float64 nothing wraps and these numbers are exact enough to compare with 2^30.
		if float64(r.off)+float64(r.length) > float64(in.Size) {
			errs[s.outside] = true
		}
		if s.payload && r.length > l.maxPayload {
			if r.cmd == cmdRead && l.structured {
				errs[EOVERFLOW] = true
			} else {
				errs[EINVAL] = true
			}
		}
	}
	return len(errs) == 0, errs
}

func TestTransmissionFlags(t *testing.T) {
	all := blockdev.Info{BlockSize: 512, WriteCache: true, FUA: true, Discard: true, DiscardZeros: true, WriteZeroes: true, Rotational: true}
	for _, c := range []struct {
		name       string
		change     func(*blockdev.Info)
		structured bool
		want       uint16
	}{
		{"everything", func(*blockdev.Info) {}, true, 0x1fd},
		{"simple replies", func(*blockdev.Info) {}, false, 0x17d},
		{"read-only", func(i *blockdev.Info) { i.ReadOnly = true }, false, 0x117},
		{"no rotation", func(i *blockdev.Info) { i.Rotational = false }, false, 0x16d},
		{"no FUA, no cache", func(i *blockdev.Info) { i.FUA, i.WriteCache = false, false }, false, 0x17d},
		{"no discard", func(i *blockdev.Info) { i.Discard = false }, false, 0x15d},
		{"no zeroes", func(i *blockdev.Info) { i.WriteZeroes = false }, false, 0x13d},
	} {
		in := all
		c.change(&in)
		if got := transmissionFlags(&in, c.structured); got != c.want {
			t.Errorf("%s: %#x, want %#x", c.name, got, c.want)
		}
	}
}

func TestBlockSizes(t *testing.T) {
	for _, c := range []struct {
		block, phys, max int
		want             [3]uint32
	}{
		{512, 512, 32 << 20, [3]uint32{512, 4096, 32 << 20}},
		{512, 4096, 32 << 20, [3]uint32{512, 4096, 32 << 20}},
		{4096, 65536, 32 << 20, [3]uint32{4096, 65536, 32 << 20}},
		{4096, 1 << 20, 64 << 10, [3]uint32{4096, 64 << 10, 64 << 10}},
		{512, 3 << 10, 32 << 20, [3]uint32{512, 4096, 32 << 20}},
		{512, 6 << 10, 32 << 20, [3]uint32{512, 4096, 32 << 20}},
		{65536, 65536, 64 << 10, [3]uint32{65536, 65536, 64 << 10}},
	} {
		in := blockdev.Info{BlockSize: c.block, PhysBlock: c.phys}
		lo, pref, hi := blockSizes(&in, c.max)
		if got := [3]uint32{lo, pref, hi}; got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
		if pref < lo || pref < 512 || pref&(pref-1) != 0 || hi < pref {
			t.Errorf("%+v: %d %d %d breaks the protocol", c, lo, pref, hi)
		}
	}
}

func TestErrno(t *testing.T) {
	wrap := func(err error) error { return fmt.Errorf("write to the device: %w", err) }
	for _, c := range []struct {
		err   error
		want  Errno
		reply Errno // 0 = want
	}{
		{nil, 0, 0},
		{blockdev.ErrReadOnly, EPERM, 0},
		{blockdev.ErrOutOfRange, EINVAL, 0},
		{blockdev.ErrUnaligned, EINVAL, 0},
		{blockdev.ErrNotSupported, ENOTSUP, EIO},
		{blockdev.ErrClosed, ESHUTDOWN, 0},
		{blockdev.ErrFlushFailed, EIO, 0},
		{blockdev.ErrLost, EIO, 0},
		{syscall.ENOSPC, ENOSPC, 0},
		{syscall.EDQUOT, ENOSPC, 0},
		{syscall.EFBIG, ENOSPC, 0},
		{syscall.EIO, EIO, 0},
		{syscall.EPERM, EPERM, 0},
		{syscall.EACCES, EPERM, 0},
		{syscall.EROFS, EPERM, 0},
		{syscall.EINVAL, EINVAL, 0},
		{syscall.ENOMEM, ENOMEM, 0},
		{syscall.EOPNOTSUPP, ENOTSUP, EIO},
		{syscall.EOVERFLOW, EOVERFLOW, 0},
		{syscall.ESHUTDOWN, ESHUTDOWN, 0},
		{syscall.EBADF, EIO, 0},
		{errors.New("something else"), EIO, 0},
		{ENOSPC, ENOSPC, 0},
	} {
		want := c.reply
		if want == 0 {
			want = c.want
		}
		for _, err := range []error{c.err, wrap(c.err)} {
			if c.err == nil {
				err = nil
			}
			if got := errnoOf(err); got != c.want {
				t.Errorf("errnoOf(%v) = %v, want %v", err, got, c.want)
			}
			if got := replyErrno(err); got != want {
				t.Errorf("replyErrno(%v) = %v, want %v", err, got, want)
			}
		}
	}
	// And back: every value of the protocol is an errno that is the same value again.
	for _, e := range []Errno{EPERM, EIO, ENOMEM, EINVAL, ENOSPC, EOVERFLOW, ENOTSUP, ESHUTDOWN} {
		if back := errnoOf(e.Sys()); back != e {
			t.Errorf("%v is %v is %v", e, e.Sys(), back)
		}
		if !errors.Is(wrap(e), e.Sys()) {
			t.Errorf("%v is not %v", e, e.Sys())
		}
	}
	if got := Errno(4711).Sys(); got != syscall.EINVAL {
		t.Errorf("unknown value: %v", got)
	}
	if got := Errno(4711).String(); got != "error 4711" {
		t.Error(got)
	}
}
