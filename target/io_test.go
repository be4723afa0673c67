package target

import (
	"bytes"
	"fmt"
	"math"
	"runtime"
	"syscall"
	"testing"
	"time"

	"rdblk/blockdev"
	"rdblk/blockdev/blockdevtest"
	"rdblk/internal/arena"
	"rdblk/protocol"
	"rdblk/rdma"
)

func TestIOValidation(t *testing.T) {
	ro, err := blockdev.NewMem("ro", 1<<20, blockdev.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ro.Close() })
	const blocks = 2048
	r := newRig(t, Config{MaxIO: 128 << 10}, memDevice(t, blocks*512), ro)
	s := r.attach(sessionOptions{queues: 1})
	q := s.io[0]
	for _, c := range []struct {
		name string
		op   protocol.Opcode
		nsid uint32
		lba  uint64
		n    int // bytes of the command
		sgl  int // bytes of the data pointer, -1 = as n
		want protocol.Status
	}{
		{"read", protocol.OpRead, 1, 0, 4096, -1, 0},
		{"read the last block", protocol.OpRead, 1, blocks - 1, 512, -1, 0},
		{"read past the end", protocol.OpRead, 1, blocks, 512, -1, protocol.StatusLBAOutOfRange},
		{"read across the end", protocol.OpRead, 1, blocks - 1, 1024, -1, protocol.StatusLBAOutOfRange},
		{"read at 2^64-1", protocol.OpRead, 1, math.MaxUint64, 512, -1, protocol.StatusLBAOutOfRange},
		{"read around 2^64", protocol.OpRead, 1, math.MaxUint64, 1024, -1, protocol.StatusLBAOutOfRange},
		{"read whose bytes wrap", protocol.OpRead, 1, 1 << 55, 512, -1, protocol.StatusLBAOutOfRange},
		{"write whose bytes wrap", protocol.OpWrite, 1, 1<<55 + 1, 512, -1, protocol.StatusLBAOutOfRange},
		{"write at 2^63", protocol.OpWrite, 1, 1 << 63, 512, -1, protocol.StatusLBAOutOfRange},
		{"largest transfer", protocol.OpRead, 1, 0, 128 << 10, -1, 0},
		{"over the largest transfer", protocol.OpRead, 1, 0, 128<<10 + 512, -1, protocol.StatusInvalidField},
		{"write over the largest transfer", protocol.OpWrite, 1, 0, 256 << 10, -1, protocol.StatusInvalidField},
		{"namespace 0", protocol.OpRead, 0, 0, 512, -1, protocol.StatusInvalidNamespace},
		{"namespace 3", protocol.OpRead, 3, 0, 512, -1, protocol.StatusInvalidNamespace},
		{"namespace 1025", protocol.OpWrite, 1025, 0, 512, -1, protocol.StatusInvalidNamespace},
		{"all namespaces", protocol.OpRead, protocol.NSIDAll, 0, 512, -1, protocol.StatusInvalidNamespace},
		{"data pointer short", protocol.OpRead, 1, 0, 4096, 4095, protocol.StatusDataSGLLengthInvalid},
		{"data pointer long", protocol.OpRead, 1, 0, 4096, 4097, protocol.StatusDataSGLLengthInvalid},
		{"no data pointer", protocol.OpWrite, 1, 0, 4096, 0, protocol.StatusDataSGLLengthInvalid},
		{"read of read-only", protocol.OpRead, 2, 0, 4096, -1, 0},
		{"write to read-only", protocol.OpWrite, 2, 0, 4096, -1, protocol.StatusNamespaceWriteProtected},
		{"zeroes to read-only", protocol.OpWriteZeroes, 2, 0, 4096, 0, protocol.StatusNamespaceWriteProtected},
		{"zeroes", protocol.OpWriteZeroes, 1, 0, 4096, 0, 0},
		{"zeroes past the end", protocol.OpWriteZeroes, 1, blocks - 1, 1024, 0, protocol.StatusLBAOutOfRange},
		{"zeroes with data", protocol.OpWriteZeroes, 1, 0, 4096, 4096, protocol.StatusDataSGLLengthInvalid},
		{"zeroes of everything, over MDTS", protocol.OpWriteZeroes, 1, 0, blocks * 512, 0, 0},
		{"compare past the end", protocol.OpCompare, 1, blocks, 512, -1, protocol.StatusLBAOutOfRange},
		{"verify", protocol.OpVerify, 1, 0, blocks * 512, 0, 0},
		{"verify past the end", protocol.OpVerify, 1, 1, blocks * 512, 0, protocol.StatusLBAOutOfRange},
		{"write uncorrectable", protocol.OpWriteUncorrectable, 1, 0, 512, 0, protocol.StatusInvalidOpcode},
		{"copy", protocol.OpCopy, 1, 0, 512, -1, protocol.StatusInvalidOpcode},
		{"reservation", protocol.OpReservationReport, 1, 0, 512, -1, protocol.StatusInvalidOpcode},
		{"unknown opcode", 0x99, 1, 0, 512, -1, protocol.StatusInvalidOpcode},
	} {
		t.Run(c.name, func(t *testing.T) {
			q.t = t
			cmd := new(protocol.Command)
			cmd.InitRW(c.op, q.cid(), c.nsid, c.lba, uint32(c.n/512), 0)
			if c.sgl < 0 {
				c.sgl = c.n
			}
			if c.sgl > 0 {
				q.keyed(cmd, 0, c.sgl)
			}
			if c.want != 0 {
				c.want |= dnr
			}
			q.want(c.want, cmd)
		})
	}
	q.t = t
	flush := func(nsid uint32, want protocol.Status) {
		t.Helper()
		var c protocol.Command
		c.Init(protocol.OpFlush, q.cid(), nsid)
		q.want(want, &c)
	}
	flush(1, 0)
	flush(2, 0)
	flush(3, protocol.StatusInvalidNamespace|dnr)
	flush(protocol.NSIDAll, protocol.StatusInvalidNamespace|dnr)
	// An admin command on an I/O queue and the reverse.
	var c protocol.Command
	c.InitPropertyGet(q.cid(), protocol.PropertyCAP)
	q.want(protocol.StatusInvalidOpcode|dnr, &c)
	c.InitRW(protocol.OpWrite, s.admin.cid(), 1, 0, 1, 0)
	s.admin.keyed(&c, 0, 512)
	s.admin.want(protocol.StatusInvalidOpcode|dnr, &c)
}

func TestDataPointers(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	s := r.attach(sessionOptions{queues: 1})
	q := s.io[0]
	type sgl = protocol.SGL
	raw := func(addr uint64, n uint32, kind byte) sgl {
		var d sgl
		d.SetInCapsule(addr, n)
		d[15] = kind
		return d
	}
	for _, c := range []struct {
		name string
		op   protocol.Opcode
		sgl  sgl
		data int // bytes behind the command
		want protocol.Status
	}{
		{"type 0 subtype 0", protocol.OpWrite, raw(0, 512, 0x00), 0, protocol.StatusInvalidField},
		{"type 4 subtype 1", protocol.OpWrite, raw(0, 512, 0x41), 0, protocol.StatusInvalidField},
		{"bit bucket", protocol.OpRead, raw(0, 512, 0x10), 0, protocol.StatusSGLTypeInvalid},
		{"segment", protocol.OpRead, raw(0, 512, 0x20), 0, protocol.StatusSGLTypeInvalid},
		{"last segment", protocol.OpWrite, raw(0, 16, 0x31), 0, protocol.StatusSGLTypeInvalid},
		{"transport", protocol.OpRead, raw(0, 512, 0x5A), 0, protocol.StatusSGLTypeInvalid},
		{"unknown type", protocol.OpRead, raw(0, 512, 0xF0), 0, protocol.StatusSGLTypeInvalid},
		{"in capsule on a read", protocol.OpRead, raw(0, 512, 0x01), 512, protocol.StatusInvalidField},
		{"in capsule", protocol.OpWrite, raw(0, 512, 0x01), 512, 0},
		{"in capsule at an offset", protocol.OpWrite, raw(1024, 512, 0x01), 1536, 0},
		{"in capsule at the end", protocol.OpWrite, raw(4096-512, 512, 0x01), 4096, 0},
		{"in capsule beyond the area", protocol.OpWrite, raw(4096-511, 512, 0x01), 4096, protocol.StatusSGLOffsetInvalid},
		{"in capsule offset near 2^64", protocol.OpWrite, raw(math.MaxUint64-255, 512, 0x01), 512, protocol.StatusSGLOffsetInvalid},
		{"in capsule length near 2^32", protocol.OpWrite, raw(1, math.MaxUint32, 0x01), 512, protocol.StatusSGLOffsetInvalid},
		{"in capsule beyond what was received", protocol.OpWrite, raw(0, 512, 0x01), 511, protocol.StatusDataSGLLengthInvalid},
		{"in capsule with nothing received", protocol.OpWrite, raw(0, 512, 0x01), 0, protocol.StatusDataSGLLengthInvalid},
		{"in capsule too short for the command", protocol.OpWrite, raw(0, 511, 0x01), 511, protocol.StatusDataSGLLengthInvalid},
		{"keyed address that wraps", protocol.OpWrite, func() (d sgl) { d.SetKeyed(math.MaxUint64-100, 512, q.mr.RKey(), false); return }(), 0, protocol.StatusDataSGLLengthInvalid},
	} {
		t.Run(c.name, func(t *testing.T) {
			q.t = t
			cmd := new(protocol.Command)
			cmd.InitRW(c.op, q.cid(), 1, 0, 1, 0)
			*cmd.SGL() = c.sgl
			if c.want != 0 {
				c.want |= dnr
			}
			q.want(c.want, cmd, make([]byte, c.data)...)
		})
	}
}

// In-capsule data must come from this capsule, not from an older one in the same buffer.
func TestNoStaleInCapsuleData(t *testing.T) {
	dev := memDevice(t, 1<<20)
	r := newRig(t, Config{}, dev)
	q := r.attach(sessionOptions{queues: 1, depth: 2}).io[0]
	for range 8 { // every receive buffer has been full of secrets
		w := q.rw(protocol.OpWrite, 100, 4096, 0, 0)
		w.SetInCapsuleSGL(0, 4096)
		q.ok(w, bytes.Repeat([]byte{0x55}, 4096)...)
	}
	for range 8 {
		w := q.rw(protocol.OpWrite, 0, 4096, 0, 0)
		w.SetInCapsuleSGL(0, 4096)
		q.want(protocol.StatusDataSGLLengthInvalid|dnr, w, make([]byte, 100)...)
	}
	got := make([]byte, 4096)
	dev.ReadAt(got, 0)
	if !bytes.Equal(got, make([]byte, 4096)) {
		t.Error("bytes of an older capsule were written")
	}
}

// The memory that data passes through has served other hosts; nothing of that may be seen.
func TestNoStaleDataInResponses(t *testing.T) {
	dev := blockdevtest.Faulty(memDevice(t, 16<<20))
	r := newRig(t, Config{Workers: 1}, dev)
	a := r.attach(sessionOptions{queues: 1})
	secret := bytes.Repeat([]byte{0x5A}, 1<<20)
	for i := range 8 {
		copy(a.io[0].data, secret)
		a.io[0].ok(a.io[0].rw(protocol.OpWrite, uint64(i)*2048, 1<<20, 0, 0))
	}
	b := r.attach(sessionOptions{queues: 1})
	dev.Set(blockdevtest.Rule{Match: blockdevtest.Match{Ops: []blockdev.Op{blockdev.OpRead}}, Err: syscall.EIO})
	q := b.io[0]
	fill(q.data[:1<<20], 0)
	q.want(protocol.StatusUnrecoveredRead|dnr, q.rw(protocol.OpRead, 0, 1<<20, 0, 0))
	if bytes.IndexByte(q.data[:1<<20], 0x5A) >= 0 {
		t.Error("a failed read delivered data")
	}
	if bytes.IndexByte(b.log(protocol.LogError, 1<<20, 1<<20, true), 0x5A) >= 0 {
		t.Error("a log page shows old data")
	}
}

func TestFUAAndFlushReachTheDevice(t *testing.T) {
	var rec recorder
	rec.TryDevice = cached{memDevice(t, 1<<20).(blockdev.TryDevice)}
	r := newRig(t, Config{}, &rec)
	q := r.attach(sessionOptions{queues: 1}).io[0]
	step := func(want string, cmd *protocol.Command, data ...byte) {
		t.Helper()
		q.ok(cmd, data...)
		if got := rec.take(); got != want {
			t.Errorf("device saw %q, want %q", got, want)
		}
	}
	step("write 0+4096", q.rw(protocol.OpWrite, 0, 4096, 0, 0))
	step("write 0+4096 fua", q.rw(protocol.OpWrite, 0, 4096, 0, protocol.ControlFUA))
	inCapsule := q.rw(protocol.OpWrite, 8, 512, 0, protocol.ControlFUA)
	inCapsule.SetInCapsuleSGL(0, 512)
	step("write 4096+512 fua", inCapsule, make([]byte, 512)...)
	step("read 0+4096", q.rw(protocol.OpRead, 0, 4096, 0, 0))
	step("flush; read 0+4096", q.rw(protocol.OpRead, 0, 4096, 0, protocol.ControlFUA))
	var c protocol.Command
	c.Init(protocol.OpFlush, q.cid(), 1)
	step("flush", &c)
	zero := func(control uint16) *protocol.Command {
		c := new(protocol.Command)
		c.InitRW(protocol.OpWriteZeroes, q.cid(), 1, 16, 65536/512, control)
		return c
	}
	step("zero 8192+65536 keep", zero(0))
	step("zero 8192+65536", zero(protocol.ControlDEAC))
	step("zero 8192+65536 fua", zero(protocol.ControlDEAC|protocol.ControlFUA))
	step("zero 8192+65536 fua keep", zero(protocol.ControlFUA))
}

func TestDatasetManagement(t *testing.T) {
	var rec recorder
	rec.TryDevice = memDevice(t, 1<<20).(blockdev.TryDevice)
	r := newRig(t, Config{}, &rec)
	q := r.attach(sessionOptions{queues: 1}).io[0]
	ranges := []protocol.DSMRange{{SLBA: 0, NLB: 8}, {SLBA: 100, NLB: 0}, {SLBA: 2047, NLB: 1}, {SLBA: 16, NLB: 16, CATTR: 0xFFFF}}
	var b []byte
	for _, d := range ranges {
		b = protocol.AppendDSMRange(b, d)
	}
	b = append(b, make([]byte, 4096-len(b))...) // hosts send all of the page
	dsm := func(n int, attr uint32) *protocol.Command {
		c := new(protocol.Command)
		c.InitDSM(q.cid(), 1, n, attr)
		q.keyed(c, 0, 4096)
		copy(q.data, b)
		return c
	}
	step := func(name, want string, c *protocol.Command, data ...byte) {
		t.Helper()
		q.ok(c, data...)
		if got := rec.take(); got != want {
			t.Errorf("%s: device saw %q, want %q", name, got, want)
		}
	}
	const all = "discard 0+4096; discard 1048064+512; discard 8192+8192"
	step("keyed", all, dsm(4, protocol.DSMDeallocate))
	c := dsm(4, protocol.DSMDeallocate|protocol.DSMIntegralRead)
	c.SetInCapsuleSGL(0, 4096)
	step("in capsule", all, c, b...)
	step("one of them", "discard 0+4096", dsm(1, protocol.DSMDeallocate))
	step("only hints", "", dsm(4, protocol.DSMIntegralRead|protocol.DSMIntegralWrite))
	step("256 ranges, most empty", all, dsm(256, protocol.DSMDeallocate))
	// All or nothing when a range is wrong.
	for _, bad := range []protocol.DSMRange{{SLBA: 2048, NLB: 1}, {SLBA: 2040, NLB: 9}, {SLBA: math.MaxUint64, NLB: math.MaxUint32}, {SLBA: 1 << 55, NLB: 8}} {
		protocol.PutDSMRange(b[16:], bad)
		q.want(protocol.StatusLBAOutOfRange|dnr, dsm(4, protocol.DSMDeallocate))
		if got := rec.take(); got != "" {
			t.Errorf("%+v: device saw %q", bad, got)
		}
	}
	short := dsm(4, protocol.DSMDeallocate)
	q.keyed(short, 0, 63)
	q.want(protocol.StatusDataSGLLengthInvalid|dnr, short)
}

// Discard is a hint: where the store cannot, it is not an error.
func TestDatasetManagementWithoutDiscard(t *testing.T) {
	var rec recorder
	rec.TryDevice = memDevice(t, 1<<20).(blockdev.TryDevice)
	rec.noDiscard = true
	r := newRig(t, Config{}, &rec)
	s := r.attach(sessionOptions{queues: 1})
	var d protocol.IdentifyController
	d.UnmarshalBinary(s.identify(protocol.CNSController, 0))
	if d.ONCS&protocol.ONCSDatasetManagement != 0 {
		t.Error("Dataset Management is advertised")
	}
	c := new(protocol.Command)
	c.InitDSM(s.io[0].cid(), 1, 1, protocol.DSMDeallocate)
	s.io[0].keyed(c, 0, 4096)
	s.io[0].ok(c)
	if got := rec.take(); got != "" {
		t.Errorf("device saw %q", got)
	}
}

func TestCompareAndVerify(t *testing.T) {
	dev := blockdevtest.Faulty(memDevice(t, 8<<20))
	r := newRig(t, Config{MaxIO: 64 << 10}, dev)
	q := r.attach(sessionOptions{queues: 1}).io[0]
	want := pattern(1, 64<<10)
	dev.WriteAt(want, 512, 0)
	copy(q.data, want)
	q.ok(q.rw(protocol.OpCompare, 1, 64<<10, 0, 0))
	q.ok(q.rw(protocol.OpCompare, 1, 512, 0, 0))
	inCapsule := q.rw(protocol.OpCompare, 1, 4096, 0, 0)
	inCapsule.SetInCapsuleSGL(0, 4096)
	q.ok(inCapsule, want[:4096]...)
	for _, at := range []int{0, 511, 40_000, 64<<10 - 1} {
		copy(q.data, want)
		q.data[at] ^= 1
		q.want(protocol.StatusCompareFailure|dnr, q.rw(protocol.OpCompare, 1, 64<<10, 0, 0))
	}
	verify := func(lba uint64, blocks uint32) *protocol.Command {
		c := new(protocol.Command)
		c.InitRW(protocol.OpVerify, q.cid(), 1, lba, blocks, 0)
		return c
	}
	q.ok(verify(0, 16384))
	q.ok(verify(16383, 1))
	dev.Set(blockdevtest.Rule{Match: blockdevtest.Match{Ops: []blockdev.Op{blockdev.OpRead}, Off: 5 << 20, Len: 512}, Err: syscall.EIO})
	q.ok(verify(0, 10*1024))
	q.want(protocol.StatusUnrecoveredRead|dnr, verify(0, 16384))
	q.want(protocol.StatusUnrecoveredRead|dnr, q.rw(protocol.OpCompare, 10*1024, 4096, 0, 0))
}

// Each failure is one command's; the connection and the other commands go on.
func TestStorageErrorsStayAlone(t *testing.T) {
	base := memDevice(t, 4<<20)
	faulty := blockdevtest.Faulty(cached{base.(blockdev.TryDevice)})
	full := blockdevtest.Full(memDevice(t, 4<<20), 1<<20)
	r := newRig(t, Config{}, faulty, full)
	s := r.attach(sessionOptions{queues: 2})
	q := s.io[0]
	on := func(nsid uint32, c *protocol.Command) *protocol.Command { c.SetNSID(nsid); return c }
	rule := func(op blockdev.Op, err error) blockdevtest.Rule {
		return blockdevtest.Rule{Match: blockdevtest.Match{Ops: []blockdev.Op{op}, Off: 1 << 20, Len: 4096}, Err: err}
	}
	faulty.Set(rule(blockdev.OpRead, syscall.EIO), rule(blockdev.OpWrite, syscall.EIO), rule(blockdev.OpZero, syscall.EOPNOTSUPP), rule(blockdev.OpDiscard, syscall.EIO))
	const at = 1 << 20 / 512
	for range 3 {
		q.want(protocol.StatusUnrecoveredRead|dnr, q.rw(protocol.OpRead, at, 8192, 0, 0))
		q.ok(q.rw(protocol.OpRead, 0, 8192, 0, 0))
		q.want(protocol.StatusWriteFault|dnr, q.rw(protocol.OpWrite, at, 8192, 0, 0))
		small := q.rw(protocol.OpWrite, at, 512, 0, 0)
		small.SetInCapsuleSGL(0, 512)
		q.want(protocol.StatusWriteFault|dnr, small, make([]byte, 512)...)
		q.ok(q.rw(protocol.OpWrite, 0, 8192, 0, 0))
		z := new(protocol.Command)
		z.InitRW(protocol.OpWriteZeroes, q.cid(), 1, at, 8, 0)
		q.want(protocol.StatusCommandSizeExceeded|dnr, z)
	}
	var smart protocol.SmartLog // counts what the store could not do, and no mistakes of hosts
	if err := smart.UnmarshalBinary(s.log(protocol.LogSmart, 0, 512, true)); err != nil || smart.MediaErrors.Lo != 9 {
		t.Errorf("%d media errors, want 9; %v", smart.MediaErrors.Lo, err)
	}
	// No space: the write that needs it fails, reads and overwrites go on.
	n := 0
	for ; ; n++ {
		a := q.do(on(2, q.rw(protocol.OpWrite, uint64(n)*512, 256<<10, 0, 0)))
		if a.Status().OK() {
			continue
		}
		if got := a.Status() &^ protocol.StatusMore; got != protocol.StatusCapacityExceeded|dnr {
			t.Fatalf("status %v on a full store", got)
		}
		break
	}
	if n != 4 {
		t.Errorf("%d writes before the store was full, want 4", n)
	}
	q.ok(on(2, q.rw(protocol.OpWrite, 0, 256<<10, 0, 0)))
	q.ok(on(2, q.rw(protocol.OpRead, 4096, 256<<10, 0, 0)))
	full.Grow(1 << 20)
	q.ok(on(2, q.rw(protocol.OpWrite, uint64(n)*512, 256<<10, 0, 0)))
	// A failed flush stays failed.
	faulty.Set(blockdevtest.Rule{Match: blockdevtest.Match{Ops: []blockdev.Op{blockdev.OpFlush}}, Count: 1, Err: syscall.EIO})
	flush := func() *protocol.Command {
		c := new(protocol.Command)
		c.Init(protocol.OpFlush, q.cid(), 1)
		return c
	}
	for range 3 {
		q.want(protocol.StatusWriteFault|dnr, flush())
		q.want(protocol.StatusWriteFault|dnr, q.rw(protocol.OpWrite, 0, 4096, 0, protocol.ControlFUA))
	}
	q.ok(q.rw(protocol.OpWrite, 0, 4096, 0, 0))
	q.ok(q.rw(protocol.OpRead, 0, 4096, 0, 0))
	s.io[1].ok(s.io[1].rw(protocol.OpRead, 0, 4096, 0, 0))
	st := r.tgt.Stats()
	if st.Queues != 3 || st.Namespaces[0].Ops[opRead].Errors != 3 || st.Namespaces[1].Ops[opWrite].Errors != 1 {
		t.Errorf("stats: %d queues, %+v", st.Queues, st.Namespaces[0].Ops[opRead])
	}
}

// A key that opens nothing ends the connection of the one who sent it, no other.
func TestWrongKeys(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 8<<20))
	good := r.attach(sessionOptions{queues: 1})
	for name, op := range map[string]protocol.Opcode{"read": protocol.OpRead, "write": protocol.OpWrite} {
		for i, spoil := range []func(q *hostQueue, c *protocol.Command){
			func(q *hostQueue, c *protocol.Command) {
				c.SetKeyedSGL(arena.Addr(q.data), 4096, q.mr.RKey()+0x100, false)
			},
			func(q *hostQueue, c *protocol.Command) {
				c.SetKeyedSGL(arena.Addr(q.data)-1<<30, 4096, q.mr.RKey(), false)
			},
			func(q *hostQueue, c *protocol.Command) {
				b := q.mem.Bytes()
				c.SetKeyedSGL(arena.Addr(b)+uint64(len(b))-100, 4096, q.mr.RKey(), false)
			},
		} {
			t.Run(fmt.Sprintf("%s %d", name, i), func(t *testing.T) {
				bad := r.attach(sessionOptions{queues: 1})
				q := bad.io[0]
				before := r.tgt.Stats().Namespaces[0].Ops[opWrite].Ops
				c := q.rw(op, 0, 4096, 0, 0)
				spoil(q, c)
				q.send(c, nil)
				q.awaitEnd()
				if n := r.tgt.Stats().Namespaces[0].Ops[opWrite].Ops; n != before {
					t.Error("a write without data was executed")
				}
				good.io[0].ok(good.io[0].rw(protocol.OpRead, 0, 4096, 0, 0))
			})
		}
	}
}

func TestCapsuleSizes(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	for _, n := range []int{0, 1, 63} {
		s := r.attach(sessionOptions{queues: 1})
		s.io[0].sendRaw(make([]byte, n))
		s.io[0].awaitEnd()
		s.admin.awaitEnd() // a fatal error of the association
	}
	s := r.attach(sessionOptions{queues: 1})
	s.io[0].sendRaw(make([]byte, 64+4096+1))
	s.io[0].awaitEnd()
	s = r.attach(sessionOptions{queues: 1})
	s.io[0].ok(s.io[0].rw(protocol.OpRead, 0, 512, 0, 0), make([]byte, 4096)...) // bytes that nobody asked for
}

// SendInvalidate: exactly when the host asks for it, with its key.
func TestSendWithInvalidate(t *testing.T) {
	for _, off := range []bool{false, true} {
		t.Run(fmt.Sprintf("switched off %v", off), func(t *testing.T) {
			r := newRig(t, Config{NoSendInvalidate: off}, memDevice(t, 1<<20))
			q := r.attach(sessionOptions{queues: 1}).io[0]
			mw, err := q.pd.AllocMW()
			if err != nil {
				t.Fatal(err)
			}
			defer mw.Close()
			bind := func() uint32 {
				wr := rdma.SendWR{Op: rdma.OpBindMW, Flags: rdma.FlagSignaled, Window: mw, Access: rdma.AccessRemoteRead | rdma.AccessRemoteWrite,
					SGL: []rdma.SGE{{Addr: arena.Addr(q.data), Len: 4096, LKey: q.mr.LKey()}}}
				if _, err := q.qp.PostSend(wr); err != nil {
					t.Fatal(err)
				}
				q.sends++
				return mw.RKey()
			}
			for _, op := range []protocol.Opcode{protocol.OpWrite, protocol.OpRead, protocol.OpCompare} {
				key := bind()
				c := q.rw(op, 0, 4096, 0, 0)
				c.SetKeyedSGL(arena.Addr(q.data), 4096, key, true)
				a := q.ok(c)
				if off {
					if a.invalidated {
						t.Errorf("%v: key invalidated although that is switched off", op)
					}
					wr := rdma.SendWR{Op: rdma.OpLocalInvalidate, Flags: rdma.FlagSignaled, InvalidateRKey: key}
					if _, err := q.qp.PostSend(wr); err != nil {
						t.Fatal(err)
					}
					q.sends++
					continue
				}
				if !a.invalidated || a.key != key {
					t.Errorf("%v: invalidated %v, key %#x, want %#x", op, a.invalidated, a.key, key)
				}
			}
			// Subtype 0 must not be invalidated.
			if a := q.ok(q.rw(protocol.OpRead, 0, 4096, 0, 0)); a.invalidated {
				t.Error("key invalidated without being asked")
			}
			// An error after the data pointer was accepted may close the key, one before must not.
			key := bind()
			c := q.rw(protocol.OpRead, 1<<40, 4096, 0, 0)
			c.SetKeyedSGL(arena.Addr(q.data), 4096, key, true)
			if a := q.want(protocol.StatusLBAOutOfRange|dnr, c); a.invalidated {
				t.Error("key of a refused command invalidated")
			}
		})
	}
}

// More work than buffers: requests wait in turn, none fails, none is lost.
func TestRequestsWaitForBuffers(t *testing.T) {
	r := newRig(t, Config{Workers: 1, MaxIO: 256 << 10, BufferMemory: 512 << 10}, memDevice(t, 32<<20))
	a, b := r.attach(sessionOptions{queues: 1, depth: 32}), r.attach(sessionOptions{queues: 2, depth: 16})
	queues := []*hostQueue{a.io[0], b.io[0], b.io[1]}
	want := map[*hostQueue]int{}
	for round := range 10 {
		for k, q := range queues {
			for i := range q.depth - 1 {
				op := []protocol.Opcode{protocol.OpRead, protocol.OpWrite, protocol.OpCompare}[(i+k)%3]
				n := []int{512, 4096, 65536, 256 << 10}[(i+round)%4]
				c := q.rw(op, uint64(k*8192), n, 0, 0)
				q.send(c, nil)
				want[q]++
			}
		}
		end := time.Now().Add(patience)
		for _, q := range queues {
			for len(q.answers) < q.depth-1 {
				for _, o := range queues {
					o.poll(false)
				}
				if q.broken != nil || time.Now().After(end) {
					t.Fatalf("round %d: %d answers of %d (%v)\n%+v", round, len(q.answers), q.depth-1, q.broken, r.tgt.Status())
				}
				runtime.Gosched()
			}
			for id, an := range q.answers {
				if s := an.Status(); !s.OK() && s.Code() != protocol.StatusCompareFailure {
					t.Fatalf("command %d: %v", id, s)
				}
				delete(q.answers, id)
			}
		}
	}
	w := r.tgt.Stats().Workers[0]
	if w.WaitBuffer == 0 {
		t.Error("nothing ever waited for a buffer: the test is too weak")
	}
	eventually(t, "all buffers back", func() bool { return r.tgt.Stats().Workers[0].BufferInUse == 0 })
}

// A host that stops taking its data must not stop another one on the same worker.
func TestStuckHostLeavesRoom(t *testing.T) {
	r := newRig(t, Config{Workers: 1, MaxIO: 1 << 20, BufferMemory: 16 << 20, TransferTimeout: 2 * time.Second}, memDevice(t, 32<<20))
	stuck := r.attach(sessionOptions{queues: 1, depth: 128})
	q := stuck.io[0]
	for i := range 64 { // 64 MiB of answers that nobody fetches
		q.send(q.rw(protocol.OpRead, 0, 1<<20, 0, 0), nil)
		_ = i
		for range 3 {
			q.poll(false)
		}
	}
	good := r.attach(sessionOptions{queues: 1})
	for range 50 {
		good.io[0].ok(good.io[0].rw(protocol.OpRead, 0, 1<<20, 0, 0))
	}
	// In the end the stuck one is cut off and its memory is free.
	eventually(t, "the stuck host is cut", func() bool { return r.tgt.Stats().Controllers == 1 })
	eventually(t, "all buffers back", func() bool {
		good.io[0].poll(false)
		return r.tgt.Stats().Workers[0].BufferInUse == 0
	})
}

// The send queue of a small device: responses wait for room and nothing overruns.
func TestSmallSendQueueAndReadDepth(t *testing.T) {
	r := newRig(t, Config{Workers: 1, ReadDepth: 2}, memDevice(t, 8<<20))
	s := r.attach(sessionOptions{})
	q, err := r.dial(1, dialOptions{depth: 64, reads: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(q.close)
	q.ok(q.connectCommand(s.who, testNQN, s.cntlid, 0))
	var tq *queue
	for l := range r.tgt.lanes[0].queues {
		tq = l
	}
	if err := r.tgt.lanes[0].w.Call(func() { tq.maxSend = 3 }); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		for i := range 63 {
			op := protocol.OpWrite
			if i%2 == 0 {
				op = protocol.OpRead
			}
			q.send(q.rw(op, uint64(i*8), 4096, i*4096, 0), nil)
		}
		end := time.Now().Add(patience)
		for len(q.answers) < 63 {
			q.poll(true)
			if q.broken != nil || time.Now().After(end) {
				t.Fatalf("%d answers: %v\n%+v", len(q.answers), q.broken, r.tgt.Status().Queues)
			}
		}
		for id, a := range q.answers {
			if !a.Status().OK() {
				t.Fatal(a.Status())
			}
			delete(q.answers, id)
		}
	}
	w := r.tgt.Stats().Workers[0]
	if w.WaitRead == 0 || w.WaitSend == 0 {
		t.Errorf("waited %d times to read, %d to send: the test is too weak", w.WaitRead, w.WaitSend)
	}
}

func TestSQHDAdvances(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	q := r.attach(sessionOptions{queues: 1, depth: 8}).io[0]
	last := uint16(1) // after Connect
	for range 20 {
		a := q.ok(q.rw(protocol.OpRead, 0, 512, 0, 0))
		if want := (last + 1) % 8; a.SQHD() != want {
			t.Fatalf("SQHD %d, want %d", a.SQHD(), want)
		}
		last = a.SQHD()
	}
}

// aligned is a store that can use page-aligned memory only, as with direct I/O.
type aligned struct{ blockdev.TryDevice }

func (d aligned) Info() blockdev.Info {
	i := d.TryDevice.Info()
	i.MemAlign = 4096
	return i
}

func (d aligned) check(p []byte) error {
	info := d.Info()
	return info.CheckBuffer(p)
}

func (d aligned) TryReadAt(p []byte, off int64) error {
	if err := d.check(p); err != nil {
		return err
	}
	return d.TryDevice.TryReadAt(p, off)
}

func (d aligned) TryWriteAt(p []byte, off int64, f blockdev.WriteFlags) error {
	if err := d.check(p); err != nil {
		return err
	}
	return d.TryDevice.TryWriteAt(p, off, f)
}

func TestBuffersAreAlignedForDirectIO(t *testing.T) {
	for _, inCapsule := range []int{512, 4096, 16384} {
		t.Run(fmt.Sprint(inCapsule), func(t *testing.T) {
			dev := memDevice(t, 1<<20)
			r := newRig(t, Config{InCapsule: inCapsule}, aligned{dev.(blockdev.TryDevice)})
			q := r.attach(sessionOptions{queues: 1, depth: 16}).io[0]
			for i := range 40 { // every receive buffer
				off := 0
				if i%2 == 1 && inCapsule > 512 {
					off = 16 * i
				}
				want := pattern(uint64(i), 512)
				w := q.rw(protocol.OpWrite, uint64(i), 512, 0, 0)
				w.SetInCapsuleSGL(uint64(off), 512)
				q.ok(w, append(make([]byte, off), want...)...)
				c := q.rw(protocol.OpCompare, uint64(i), 512, 0, 0)
				c.SetInCapsuleSGL(uint64(off), 512)
				q.ok(c, append(make([]byte, off), want...)...)
				got := make([]byte, 512)
				dev.ReadAt(got, int64(i)*512)
				if !bytes.Equal(got, want) {
					t.Fatalf("write %d: other data", i)
				}
			}
			q.ok(q.rw(protocol.OpRead, 0, 4096, 0, 0))
			q.ok(q.rw(protocol.OpWrite, 0, 4096, 512, 0))
			q.ok(q.rw(protocol.OpCompare, 0, 4096, 512, 0))
		})
	}
}

// Storage that takes its time is no reason to think that the host is stuck.
func TestSlowStorageIsNotAStall(t *testing.T) {
	dev := blockdevtest.Delayed(memDevice(t, 1<<20))
	r := newRig(t, Config{Workers: 1, TransferTimeout: 100 * time.Millisecond}, dev)
	q := r.attach(sessionOptions{queues: 1}).io[0]
	gate := dev.Hold(blockdevtest.Match{Ops: []blockdev.Op{blockdev.OpRead}})
	c := q.rw(protocol.OpRead, 0, 4096, 0, 0)
	q.send(c, nil)
	gate.Await(t, 1)
	l := r.tgt.lanes[0]
	for range 10 * sweepTicks {
		if err := l.w.Call(l.sweep); err != nil {
			t.Fatal(err)
		}
	}
	gate.Open()
	if a, err := q.take(c.ID()); err != nil || !a.Status().OK() {
		t.Errorf("%v %v", a.Status(), err)
	}
}

// A host that does not serve the RDMA Read of its write is cut off.
func TestUnservedReadIsAStall(t *testing.T) {
	r := newRig(t, Config{Workers: 1, TransferTimeout: 100 * time.Millisecond}, memDevice(t, 1<<20))
	s := r.attach(sessionOptions{queues: 1})
	resume := r.pause(0)
	s.io[0].send(s.io[0].rw(protocol.OpWrite, 0, 4096, 0, 0), nil)
	resume()
	r.gone() // without the host's NIC being polled
	s.io[0].awaitEnd()
}

// The search for hosts that do not move leaves workers without requests asleep.
func TestSweepLetsIdleWorkersSleep(t *testing.T) {
	r := newRig(t, Config{Workers: 1, TransferTimeout: 80 * time.Millisecond, MaxPoll: -1}, memDevice(t, 1<<20))
	q := r.attach(sessionOptions{queues: 1}).io[0]
	q.ok(q.rw(protocol.OpRead, 0, 4096, 0, 0))
	io, admin := r.tgt.lanes[0].w, r.tgt.admin.w
	eventually(t, "no request", func() bool { return r.tgt.lanes[0].stats.active.Load() == 0 })
	before, ticks := io.Stats().Wakeups, admin.Stats().Wakeups
	eventually(t, "20 sweeps of the admin worker", func() bool { return admin.Stats().Wakeups >= ticks+20 })
	if n := io.Stats().Wakeups - before; n > 3 {
		t.Errorf("the I/O worker woke up %d times", n)
	}
}

// A host that was told of no write cache sends no Flush, also to a namespace that comes
// later and has one: its writes are durable when they are answered. Hosts that connect
// then are told.
func TestCachedNamespaceForAHostThatDoesNotFlush(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	old := r.attach(sessionOptions{queues: 1})
	vwc := func(s *session) uint8 {
		var d protocol.IdentifyController
		if err := d.UnmarshalBinary(s.identify(protocol.CNSController, 0)); err != nil {
			t.Fatal(err)
		}
		return d.VWC & protocol.VWCPresent
	}
	if v := vwc(old); v != 0 {
		t.Fatalf("VWC %d over memory", v)
	}
	dev := &recorder{TryDevice: cached{memDevice(t, 1<<20).(blockdev.TryDevice)}}
	if id, err := r.tgt.AddNamespace(0, dev); id != 2 || err != nil {
		t.Fatal(id, err)
	}
	if v := vwc(old); v != 0 {
		t.Errorf("VWC becomes %d during an association: hosts do not look again", v)
	}
	young := r.attach(sessionOptions{queues: 1})
	if v := vwc(young); v == 0 {
		t.Error("VWC is not told to a new association")
	}
	write := func(s *session) string {
		q := s.io[0]
		c := q.rw(protocol.OpWrite, 8, 512, 0, 0)
		c.SetNSID(2)
		q.ok(c)
		z := new(protocol.Command)
		z.InitRW(protocol.OpWriteZeroes, q.cid(), 2, 16, 8, 0)
		z.SetNoDataSGL()
		q.ok(z)
		c = q.rw(protocol.OpRead, 8, 512, 0, 0)
		c.SetNSID(2)
		q.ok(c)
		return dev.take()
	}
	if got, want := write(old), "write 4096+512 fua; zero 8192+4096 fua keep; read 4096+512"; got != want {
		t.Errorf("host that does not flush: %q, want %q", got, want)
	}
	if got, want := write(young), "write 4096+512; zero 8192+4096 keep; read 4096+512"; got != want {
		t.Errorf("host that can: %q, want %q", got, want)
	}
}

// Commands with Force Unit Access are counted by themselves.
func TestFUAIsCounted(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	q := r.attach(sessionOptions{queues: 1}).io[0]
	q.ok(q.rw(protocol.OpWrite, 0, 512, 0, protocol.ControlFUA))
	q.ok(q.rw(protocol.OpWrite, 0, 512, 0, 0))
	q.ok(q.rw(protocol.OpRead, 0, 512, 0, protocol.ControlFUA))
	q.want(protocol.StatusLBAOutOfRange|dnr, q.rw(protocol.OpWrite, 1<<20, 512, 0, protocol.ControlFUA))
	ops := r.tgt.Stats().Namespaces[0].Ops
	if w, rd := ops[opWrite], ops[opRead]; w.FUA != 1 || w.Ops != 3 || rd.FUA != 1 {
		t.Errorf("writes %+v, reads %+v", w, rd)
	}
}

// The storage of a namespace hangs while hosts go on writing to it, until no more of their
// requests find a buffer. Another namespace is served on the same worker.
func TestHangingStorageLeavesBuffers(t *testing.T) {
	stuck, stuckToo := blockdevtest.Delayed(memDevice(t, 16<<20)), blockdevtest.Delayed(memDevice(t, 16<<20))
	const memory, transfer = 2 << 20, 64 << 10
	r := newRig(t, Config{Workers: 1, MaxIO: 256 << 10, BufferMemory: memory}, stuck, stuckToo, memDevice(t, 16<<20))
	gates := []*blockdevtest.Gate{hold(stuck, blockdev.OpRead, blockdev.OpWrite), hold(stuckToo, blockdev.OpRead, blockdev.OpWrite)}
	type asked struct {
		q   *hostQueue
		cid uint16
	}
	var waiting []asked
	for i := range 6 { // associations: with half of the buffers for each two would do
		q := r.attach(sessionOptions{queues: 1}).io[0]
		for j := range memory / transfer {
			c := q.rw(protocol.OpRead, uint64(j), transfer, 0, 0)
			c.SetNSID(uint32(1 + i%2))
			q.send(c, nil)
			waiting = append(waiting, asked{q, c.ID()})
		}
	}
	gates[0].Await(t, 1)
	gates[1].Await(t, 1)
	other := r.attach(sessionOptions{queues: 1}).io[0]
	for range 20 {
		for _, op := range []protocol.Opcode{protocol.OpWrite, protocol.OpRead} {
			c := other.rw(op, 0, 256<<10, 0, 0)
			c.SetNSID(3)
			other.ok(c)
		}
	}
	if w := r.tgt.Stats().Workers[0]; w.WaitingBuffer == 0 {
		t.Error("no request waits for a buffer: the test shows nothing")
	}
	for _, g := range gates {
		g.Open()
	}
	for _, a := range waiting {
		if c, err := a.q.take(a.cid); err != nil || !c.Status().OK() {
			t.Fatalf("a read that had to wait: %v, %v", c.Status(), err)
		}
	}
}
