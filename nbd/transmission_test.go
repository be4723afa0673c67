package nbd

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"rdblk/blockdev"
	"rdblk/internal/worker"
	"rdblk/nbd/nbdtest"
)

// both runs a test with simple and with structured replies.
func both(t *testing.T, f func(t *testing.T, structured bool)) {
	t.Run("simple", func(t *testing.T) { f(t, false) })
	t.Run("structured", func(t *testing.T) { f(t, true) })
}

func TestCommands(t *testing.T) {
	both(t, func(t *testing.T, structured bool) {
		mem := newMemDevice(16 << 20)
		s := serve(t, mem)
		c := s.open(t, structured)
		rnd := newRand(t)
		for _, n := range []uint32{512, 4096, 64<<10 - 512, 64 << 10, 64<<10 + 512, 1 << 20, 4 << 20} {
			data := make([]byte, n)
			fill(rnd, data)
			const off = 1 << 20
			do(t, c, 0, nbdtest.CmdWrite, off, n, data, 0)
			if r := do(t, c, 0, nbdtest.CmdRead, off, n, nil, 0); !bytes.Equal(r.Data, data) {
				t.Fatalf("%d bytes read back differ", n)
			}
			do(t, c, 0, nbdtest.CmdFlush, 0, 0, nil, 0)
			do(t, c, 0, nbdtest.CmdWriteZeroes, off, n, nil, 0)
			if r := do(t, c, 0, nbdtest.CmdRead, off, n, nil, 0); !bytes.Equal(r.Data, make([]byte, n)) {
				t.Fatalf("%d bytes are not zero", n)
			}
			do(t, c, 0, nbdtest.CmdTrim, off, n, nil, 0)
		}
		if structured {
			do(t, c, nbdtest.CmdFlagDF, nbdtest.CmdRead, 0, 4<<20, nil, 0)
		}
		// The counters follow the reply: it may be here before they are.
		eventually(t, "all counted", func() bool { return s.Connections()[0].Requests == 0 })
		st := s.Stats().Exports[0]
		for op, want := range map[Op]uint64{OpRead: 14, OpWrite: 7, OpFlush: 7, OpTrim: 7, OpWriteZeroes: 7} {
			if structured && op == OpRead {
				want++
			}
			o := st.Ops[op]
			if o.Count != want || o.Errors != 0 || o.Latency.Count() != want {
				t.Errorf("%v: %d requests, %d errors, %d latencies, want %d", op, o.Count, o.Errors, o.Latency.Count(), want)
			}
		}
		if got, want := st.Ops[OpWrite].Bytes, uint64(512+4096+3*64<<10+1<<20+4<<20); got != want {
			t.Errorf("%d bytes written, want %d", got, want)
		}
	})
}

// TestFlagsReachTheDevice: what the device is asked for each command and flag.
func TestFlagsReachTheDevice(t *testing.T) {
	type step struct {
		cmd, flags uint16
		want       string
	}
	const fua, noHole = nbdtest.CmdFlagFUA, nbdtest.CmdFlagNoHole
	for _, c := range []struct {
		name   string
		change func(*blockdev.Info)
		steps  []step
	}{
		{"FUA", func(*blockdev.Info) {}, []step{
			{nbdtest.CmdWrite, 0, "write 512+512"},
			{nbdtest.CmdWrite, fua, "write 512+512 flags 1"},
			{nbdtest.CmdWriteZeroes, 0, "zero 512+512"},
			{nbdtest.CmdWriteZeroes, noHole, "zero 512+512 flags 2"},
			{nbdtest.CmdWriteZeroes, noHole | fua, "zero 512+512 flags 3"},
			{nbdtest.CmdTrim, 0, "discard 512+512"},
			{nbdtest.CmdTrim, fua, "discard 512+512; flush 0+0"},
			{nbdtest.CmdRead, fua, "read 512+512"},
		}},
		{"no FUA", func(i *blockdev.Info) { i.FUA = false }, []step{
			{nbdtest.CmdWrite, 0, "write 512+512"},
			{nbdtest.CmdWrite, fua, "write 512+512; flush 0+0"},
			{nbdtest.CmdWriteZeroes, fua, "zero 512+512; flush 0+0"},
			{nbdtest.CmdWriteZeroes, noHole | fua, "zero 512+512 flags 2; flush 0+0"},
			{nbdtest.CmdTrim, fua, "discard 512+512; flush 0+0"},
			{nbdtest.CmdRead, fua, "read 512+512"},
		}},
		{"no cache", func(i *blockdev.Info) { i.FUA, i.WriteCache = false, false }, []step{
			{nbdtest.CmdWrite, fua, "write 512+512"},
			{nbdtest.CmdWriteZeroes, fua, "zero 512+512"},
			{nbdtest.CmdTrim, fua, "discard 512+512"},
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			mem := newMemDevice(1<<20, c.change)
			mem.keep = true
			cl := serve(t, mem).open(t, true)
			for _, s := range c.steps {
				var payload []byte
				if s.cmd == nbdtest.CmdWrite {
					payload = make([]byte, 512)
				}
				do(t, cl, s.flags, s.cmd, 512, 512, payload, 0)
				if got := strings.Join(mem.log(), "; "); got != s.want {
					t.Errorf("command %d flags %d: %s, want %s", s.cmd, s.flags, got, s.want)
				}
			}
			do(t, cl, 0, nbdtest.CmdFlush, 0, 0, nil, 0)
			if got := strings.Join(mem.log(), "; "); got != "flush 0+0" {
				t.Errorf("flush: %s", got)
			}
		})
	}
}

// TestFUAIsNotAnsweredBeforeTheFlush on a device without FUA, and fails when the flush fails.
func TestFUAIsNotAnsweredBeforeTheFlush(t *testing.T) {
	d := newHeldDevice(t, 1<<20, 1, 1<<20)
	d.info.FUA = false
	s := serve(t, d)
	q := d.queues[0]
	c := s.open(t, true)
	c.Send(nbdtest.CmdFlagFUA, nbdtest.CmdWrite, 1, 0, 512, make([]byte, 512))
	eventually(t, "the write", func() bool { return q.count() == 1 })
	q.release(0)
	eventually(t, "the flush", func() bool { return q.count() == 1 })
	q.mu.Lock()
	op := q.held[0].Op
	q.mu.Unlock()
	if op != blockdev.OpFlush {
		t.Fatalf("a %v follows the write", op)
	}
	c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if r, err := c.ReadReply(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("answered before the flush: %+v %v", r, err)
	}
	c.SetReadDeadline(time.Now().Add(patience))
	d.setFail(func(op blockdev.Op, _, _ int64) error {
		if op == blockdev.OpFlush {
			return syscall.EIO
		}
		return nil
	})
	q.release(0)
	if r, err := c.ReadReply(); err != nil || r.Errno != nbdtest.EIO {
		t.Errorf("%+v %v", r, err)
	}
	// A write that fails is not flushed.
	d.setFail(func(op blockdev.Op, _, _ int64) error { return syscall.ENOSPC })
	c.Send(nbdtest.CmdFlagFUA, nbdtest.CmdWrite, 2, 0, 512, make([]byte, 512))
	eventually(t, "the write", func() bool { return q.count() == 1 })
	q.release(0)
	if r, err := c.ReadReply(); err != nil || r.Errno != nbdtest.ENOSPC {
		t.Errorf("%+v %v", r, err)
	}
	if q.count() != 0 {
		t.Error("flush after a failed write")
	}
}

// TestFlushCoversOtherConnections: what multi-conn promises. A flush on one
// connection reaches the device after a write that another had answered.
func TestFlushCoversOtherConnections(t *testing.T) {
	mem := newMemDevice(1 << 20)
	mem.keep = true
	s := serve(t, mem, func(c *Config) { c.Workers = 4 })
	var conns []*nbdtest.Client
	for range 4 {
		conns = append(conns, s.open(t, true))
	}
	for i := range 100 {
		w, f := conns[i%4], conns[(i+1)%4]
		do(t, w, 0, nbdtest.CmdWrite, 0, 512, bytes.Repeat([]byte{byte(i)}, 512), 0)
		do(t, f, 0, nbdtest.CmdFlush, 0, 0, nil, 0)
		if got := strings.Join(mem.log(), "; "); got != "write 0+512; flush 0+0" {
			t.Fatal(got)
		}
		if r := do(t, conns[(i+2)%4], 0, nbdtest.CmdRead, 0, 512, nil, 0); r.Data[0] != byte(i) {
			t.Fatal("a third connection reads something else")
		}
		mem.log()
	}
}

// TestErrors: every command with every error of a device. Each is one reply and
// the connection, and its neighbours, go on.
func TestErrors(t *testing.T) {
	both(t, func(t *testing.T, structured bool) {
		mem := newMemDevice(1 << 20)
		s := serve(t, mem)
		c := s.open(t, structured)
		payload := make([]byte, 4096)
		for _, e := range []struct {
			err  error
			want uint32
		}{
			{syscall.ENOSPC, nbdtest.ENOSPC}, {syscall.EIO, nbdtest.EIO}, {blockdev.ErrReadOnly, nbdtest.EPERM},
			{blockdev.ErrNotSupported, nbdtest.EIO}, {blockdev.ErrFlushFailed, nbdtest.EIO},
			{blockdev.ErrLost, nbdtest.EIO}, {blockdev.ErrClosed, nbdtest.ESHUTDOWN}, {fmt.Errorf("write to disk 7: %w", syscall.EDQUOT), nbdtest.ENOSPC},
		} {
			for cmd := range uint16(7) {
				if cmd == nbdtest.CmdDisc || cmd == nbdtest.CmdCache {
					continue
				}
				mem.setFail(func(blockdev.Op, int64, int64) error { return e.err })
				off, n, p := uint64(4096), uint32(4096), []byte(nil)
				switch cmd {
				case nbdtest.CmdWrite:
					p = payload
				case nbdtest.CmdFlush:
					off, n = 0, 0
				}
				r := do(t, c, 0, cmd, off, n, p, e.want)
				if structured && !strings.HasPrefix(e.err.Error(), r.Text[:min(len(r.Text), 30)]) {
					t.Errorf("command %d: text %q for %q", cmd, r.Text, e.err)
				}
				mem.setFail(nil)
				do(t, c, 0, cmd, off, n, p, 0)
			}
		}
		eventually(t, "16 writes, 8 errors", func() bool {
			st := s.Stats().Exports[0].Ops[OpWrite]
			return st.Count == 16 && st.Errors == 8
		})
	})
}

// TestErrorIsolation: in a deep pipeline where some requests fail, exactly those fail.
func TestErrorIsolation(t *testing.T) {
	both(t, func(t *testing.T, structured bool) {
		for name, wrap := range map[string]func(*memDevice) blockdev.Device{
			"inline":   func(m *memDevice) blockdev.Device { return tryMemDevice{m} },
			"executor": func(m *memDevice) blockdev.Device { return m },
		} {
			t.Run(name, func(t *testing.T) {
				mem := newMemDevice(16 << 20)
				rnd := newRand(t)
				fill(rnd, mem.data)
				bad := func(block uint64) bool { return block%7 == 3 }
				mem.fail = func(_ blockdev.Op, off, _ int64) error {
					if bad(uint64(off) / 4096) {
						return syscall.EIO
					}
					return nil
				}
				want := bytes.Clone(mem.data)
				s := serve(t, wrap(mem))
				c := s.open(t, structured)
				const n = 4096
				go func() {
					for i := range uint64(n) {
						cmd, p := uint16(nbdtest.CmdRead), []byte(nil)
						if i%3 == 0 {
							cmd, p = nbdtest.CmdWrite, want[i*4096:(i+1)*4096]
						}
						if c.Send(0, cmd, i, i*4096, 4096, p) != nil {
							return
						}
					}
				}()
				for range n {
					r, err := c.ReadReply()
					if err != nil {
						t.Fatal(err)
					}
					if failed := r.Errno != 0; failed != bad(r.Cookie) {
						t.Fatalf("block %d: error %d", r.Cookie, r.Errno)
					}
					if r.Data != nil && !bytes.Equal(r.Data, want[r.Cookie*4096:(r.Cookie+1)*4096]) {
						t.Fatalf("block %d: wrong data", r.Cookie)
					}
				}
				if !bytes.Equal(mem.content(), want) {
					t.Error("the device has changed")
				}
			})
		}
	})
}

// TestInvalidRequests: the wire side of validate, above all that a write's payload is skipped.
func TestInvalidRequests(t *testing.T) {
	both(t, func(t *testing.T, structured bool) {
		s := serve(t, newMemDevice(64<<20), func(c *Config) { c.MaxPayload = 1 << 20 })
		c := s.open(t, structured)
		tooLong := uint32(nbdtest.EINVAL)
		if structured {
			tooLong = nbdtest.EOVERFLOW
		}
		for _, r := range []struct {
			flags, cmd uint16
			off        uint64
			n          uint32
			payload    int
			want       uint32
		}{
			{0, nbdtest.CmdRead, 64 << 20, 512, 0, nbdtest.EINVAL},
			{0, nbdtest.CmdRead, math.MaxUint64, 512, 0, nbdtest.EINVAL},
			{0, nbdtest.CmdRead, math.MaxUint64 - 511, 512, 0, nbdtest.EINVAL},
			{0, nbdtest.CmdRead, 0, math.MaxUint32, 0, nbdtest.EINVAL},
			{0, nbdtest.CmdRead, 0, math.MaxUint32 - 511, 0, nbdtest.EINVAL},
			{0, nbdtest.CmdRead, 0, 2 << 20, 0, tooLong},
			{0, nbdtest.CmdRead, 0, 0, 0, nbdtest.EINVAL},
			{0, nbdtest.CmdRead, 1, 512, 0, nbdtest.EINVAL},
			{1 << 9, nbdtest.CmdRead, 0, 512, 0, nbdtest.EINVAL},
			{0, nbdtest.CmdWrite, 64 << 20, 512, 512, nbdtest.ENOSPC},
			{0, nbdtest.CmdWrite, math.MaxUint64 - 511, 512, 512, nbdtest.ENOSPC},
			{0, nbdtest.CmdWrite, 0, 0, 0, nbdtest.EINVAL},
			{0, nbdtest.CmdWrite, 1, 100_001, 100_001, nbdtest.EINVAL},
			{0, nbdtest.CmdWrite, 0, 2 << 20, 2 << 20, nbdtest.EINVAL},
			{0, nbdtest.CmdWrite, 0, 48 << 20, 48 << 20, nbdtest.EINVAL},
			{nbdtest.CmdFlagDF, nbdtest.CmdWrite, 0, 512, 512, nbdtest.EINVAL},
			{0, nbdtest.CmdTrim, math.MaxUint64 - 511, 1024, 0, nbdtest.EINVAL},
			{0, nbdtest.CmdWriteZeroes, 32 << 20, 1 << 30, 0, nbdtest.ENOSPC},
			{0, nbdtest.CmdWriteZeroes, 0, 64 << 20, 0, 0}, // has no payload: no maximum
			{0, nbdtest.CmdTrim, 0, 64 << 20, 0, 0},
			{nbdtest.CmdFlagFastZero, nbdtest.CmdWriteZeroes, 0, 512, 0, nbdtest.EINVAL},
			{0, nbdtest.CmdFlush, 512, 0, 0, nbdtest.EINVAL},
			{0, nbdtest.CmdCache, 0, 512, 0, nbdtest.EINVAL},
			{0, nbdtest.CmdBlockStatus, 0, 512, 0, nbdtest.EINVAL},
			{0, 4711, 0, 512, 0, nbdtest.EINVAL},
			{0xffff, 0xffff, math.MaxUint64, math.MaxUint32, 0, nbdtest.EINVAL},
		} {
			rep := do(t, c, r.flags, r.cmd, r.off, r.n, make([]byte, r.payload), r.want)
			if structured && r.want != 0 && rep.Text == "" {
				t.Errorf("%+v: no text", r)
			}
			do(t, c, 0, nbdtest.CmdRead, 0, 512, nil, 0) // still in step
		}
		eventually(t, "4 requests that were no command", func() bool { return s.Stats().Exports[0].Ops[OpOther].Errors == 4 })
	})
}

// TestWriteOf4GiB: the longest payload that a header can announce is read, thrown
// away in bounded memory and answered.
func TestWriteOf4GiB(t *testing.T) {
	if testing.Short() {
		t.Skip("4 GiB through a socket; not with -short")
	}
	s := serve(t, newMemDevice(1<<20))
	c := s.open(t, true)
	const n = math.MaxUint32
	go func() {
		if c.Send(0, nbdtest.CmdWrite, 7, 0, n, nil) != nil {
			return
		}
		chunk := make([]byte, 1<<20)
		for left := uint64(n); left > 0; {
			k, err := c.Write(chunk[:min(left, uint64(len(chunk)))])
			if err != nil {
				return
			}
			left -= uint64(k)
		}
	}()
	if r, err := c.ReadReply(); err != nil || r.Cookie != 7 || r.Errno != nbdtest.EINVAL {
		t.Fatalf("%+v %v", r, err)
	}
	do(t, c, 0, nbdtest.CmdRead, 0, 512, nil, 0)
}

func TestReadOnly(t *testing.T) {
	mem := newMemDevice(1<<20, func(i *blockdev.Info) { i.ReadOnly = true })
	mem.keep = true
	c := serve(t, mem).open(t, true)
	for _, r := range []struct {
		flags, cmd uint16
		n          int
	}{
		{0, nbdtest.CmdWrite, 4096}, {nbdtest.CmdFlagFUA, nbdtest.CmdWrite, 4096}, {0, nbdtest.CmdTrim, 0}, {0, nbdtest.CmdWriteZeroes, 0},
	} {
		do(t, c, r.flags, r.cmd, 0, 4096, make([]byte, r.n), nbdtest.EPERM)
	}
	do(t, c, 0, nbdtest.CmdRead, 0, 4096, nil, 0)
	do(t, c, 0, nbdtest.CmdFlush, 0, 0, nil, 0)
	if got := strings.Join(mem.log(), "; "); got != "read 0+4096; flush 0+0" {
		t.Error(got)
	}
}

// TestWrongMagicEnds the connection, after what was asked before it is answered or not;
// others go on.
func TestWrongMagicEnds(t *testing.T) {
	s := serve(t, newMemDevice(1<<20))
	other := s.open(t, true)
	c := s.open(t, true)
	b := nbdtest.Header(0, nbdtest.CmdRead, 1, 0, 512)
	b[0] ^= 0xff
	c.Write(b)
	if err := c.AtEnd(); err != nil {
		t.Error(err)
	}
	s.log.Await(t, "wrong magic number")
	do(t, other, 0, nbdtest.CmdRead, 0, 512, nil, 0)
}

// TestPipelined10k sends ten thousand requests before it reads a reply; each gets its one answer.
func TestPipelined10k(t *testing.T) {
	both(t, func(t *testing.T, structured bool) {
		mem := newMemDevice(1 << 20)
		rnd := newRand(t)
		fill(rnd, mem.data)
		s := serve(t, tryMemDevice{mem})
		c := s.open(t, structured)
		const n = 10_000
		sent := make(chan error, 1)
		go func() {
			var b []byte
			for i := range uint64(n) {
				off := i % 2048 * 512
				c.Expect(nbdtest.CmdRead, i, off, 512)
				b = append(b, nbdtest.Header(0, nbdtest.CmdRead, i, off, 512)...)
			}
			_, err := c.Write(b) // 280 KB: more than the socket holds
			sent <- err
		}()
		// Nothing is read until the server has stopped on its own, bounded.
		eventually(t, "the server to block", func() bool {
			st := s.Connections()
			return len(st) == 1 && st[0].Blocked
		})
		st := s.Connections()[0]
		if st.Requests > defaultMaxInFlight || st.Bytes > DefaultMaxConnBytes {
			t.Errorf("%+v", st)
		}
		for range n {
			r, err := c.ReadReply()
			if err != nil {
				t.Fatal(err)
			}
			if off := r.Cookie % 2048 * 512; r.Errno != 0 || !bytes.Equal(r.Data, mem.data[off:off+512]) {
				t.Fatalf("request %d: error %d or wrong data", r.Cookie, r.Errno)
			}
		}
		if err := <-sent; err != nil {
			t.Fatal(err)
		}
		if c.Pending() != 0 {
			t.Error("some were not answered")
		}
	})
}

// TestOutOfOrder: replies leave as the device answers, and carry their own cookie and data.
func TestOutOfOrder(t *testing.T) {
	both(t, func(t *testing.T, structured bool) {
		d := newHeldDevice(t, 1<<20, 1, 1<<20)
		for i := range d.data {
			d.data[i] = byte(i / 512)
		}
		s := serve(t, d)
		c := s.open(t, structured)
		q := d.queues[0]
		const n = 50
		for i := range uint64(n) {
			c.Send(0, nbdtest.CmdRead, i<<40|i, i*512, 512, nil)
		}
		eventually(t, "all at the device", func() bool { return q.count() == n })
		order := newRand(t)
		left := make([]uint64, n)
		for i := range left {
			left[i] = uint64(i)
		}
		for len(left) > 0 {
			i := order.IntN(len(left))
			q.release(i)
			r, err := c.ReadReply()
			if err != nil {
				t.Fatal(err)
			}
			if want := left[i]; r.Cookie != want<<40|want || r.Data[0] != byte(want) || r.Data[511] != byte(want) {
				t.Fatalf("reply %#x with %d for request %d", r.Cookie, r.Data[0], want)
			}
			left = append(left[:i], left[i+1:]...)
		}
	})
}

// TestByteByByte feeds a mixed stream in pieces of every kind of size.
func TestByteByByte(t *testing.T) {
	rnd := newRand(t)
	mem := newMemDevice(4 << 20)
	model := make([]byte, len(mem.data))
	s := serve(t, tryMemDevice{mem})
	c := s.open(t, true)
	type expect struct{ data []byte }
	var stream []byte
	var wants []expect
	size := 0
	for i := uint64(0); size < 1<<20; i++ {
		n := uint32(rnd.IntN(64)+1) * 512
		if i%17 == 0 {
			n = 40 << 10 // directly into the buffer
		}
		off := uint64(rnd.IntN((len(model)-int(n))/512)) * 512
		if rnd.IntN(2) == 0 {
			p := make([]byte, n)
			fill(rnd, p)
			bad := rnd.IntN(8) == 0
			o := off
			if bad {
				o += 1 // unaligned: payload to be skipped
			} else {
				copy(model[off:], p)
			}
			c.Expect(nbdtest.CmdWrite, i, o, n)
			stream = append(append(stream, nbdtest.Header(0, nbdtest.CmdWrite, i, o, n)...), p...)
			wants = append(wants, expect{nil})
		} else {
			c.Expect(nbdtest.CmdRead, i, off, n)
			stream = append(stream, nbdtest.Header(0, nbdtest.CmdRead, i, off, n)...)
			// An inline device answers in order, so the model of this moment is the answer.
			wants = append(wants, expect{bytes.Clone(model[off : off+uint64(n)])})
		}
		size = len(stream)
	}
	go func() {
		for len(stream) > 0 {
			k := min(len(stream), []int{1, 7, 27, 28, 29, 512, 4096, 100_000}[rnd.IntN(8)])
			if k < 100 {
				k = min(len(stream), k)
			}
			if _, err := c.Write(stream[:k]); err != nil {
				return
			}
			stream = stream[k:]
		}
	}()
	for i, w := range wants {
		r, err := c.ReadReply()
		if err != nil {
			t.Fatal(i, err)
		}
		if w.data != nil && !bytes.Equal(r.Data, w.data) {
			t.Fatalf("reply %d of %d (cookie %d): wrong data, error %d", i, len(wants), r.Cookie, r.Errno)
		}
	}
	if !bytes.Equal(mem.content(), model) {
		t.Error("the device differs from the model")
	}
}

// TestNeverReadsReplies: such a client is stopped within its limits and disturbs nobody on the
// same queue, although it asks for as much as the queue's memory or four times that.
func TestNeverReadsReplies(t *testing.T) {
	const memory = 1 << 20 // buffers for all
	for _, limit := range []int{memory, 4 * memory} {
		t.Run(fmt.Sprintf("limit %d MiB", limit>>20), func(t *testing.T) {
			d := newHeldDevice(t, 16<<20, 1, memory)
			d.queues[0].open()
			s := serve(t, d, func(c *Config) {
				c.MaxConnBytes = limit
				c.MaxPayload = memory
				c.tickPeriod, c.evacuateAfter = 10*time.Millisecond, 20*time.Millisecond
			})
			good := s.open(t, true)
			bad := s.open(t, true)
			go func() {
				for i := uint64(0); ; i++ {
					if bad.Send(0, nbdtest.CmdRead, i, 0, 64<<10, nil) != nil {
						return
					}
				}
			}()
			eventually(t, "the client to be stopped", func() bool {
				for _, c := range s.Connections() {
					if c.Blocked && strings.HasPrefix(c.State, "paused") && c.Bytes >= memory-64<<10 {
						return true
					}
				}
				return false
			})
			start := time.Now()
			for i := range 40 {
				data := bytes.Repeat([]byte{byte(i)}, memory)
				do(t, good, 0, nbdtest.CmdWrite, 0, memory, data, 0)
				if r := do(t, good, 0, nbdtest.CmdRead, 0, memory, nil, 0); !bytes.Equal(r.Data, data) {
					t.Fatal("wrong data")
				}
			}
			t.Logf("80 requests of 1 MiB beside it took %v", time.Since(start))
			st := s.Stats().Exports[0]
			if st.Evacuations == 0 || st.BufferWaits == 0 {
				t.Errorf("nothing was moved: %+v", st)
			}
			for _, c := range s.Connections() {
				// Once it stands still it gets no more, whatever its limit is.
				if c.Bytes > 2*memory || c.Requests > defaultMaxInFlight {
					t.Errorf("%+v", c)
				}
			}
			// Its replies are not lost: when it reads, all are right.
			bad.SetDeadline(time.Now().Add(patience))
			for range 64 {
				r, err := bad.ReadReply()
				if err != nil {
					t.Fatal(err)
				}
				if r.Errno != 0 || len(r.Data) != 64<<10 {
					t.Fatalf("%+v", r.Errno)
				}
			}
			bad.Close()
			eventually(t, "the memory back", func() bool { return d.queues[0].memory() == 0 })
		})
	}
}

// countTask notes by how much a number grows between two turns of a worker's loop.
type countTask struct {
	w          *worker.Worker
	count      func() int
	last, most int
	stop       atomic.Bool
	done       chan struct{}
}

func (c *countTask) Run() {
	n := c.count()
	c.most = max(c.most, n-c.last)
	c.last = n
	if c.stop.Load() || c.w.Submit(c) != nil {
		close(c.done)
	}
}

// TestOneTurnIsBounded: a client that has thousands of requests in the socket does
// not keep the worker from its other sources until all are begun.
func TestOneTurnIsBounded(t *testing.T) {
	d := newHeldDevice(t, 1<<20, 1, 1<<20)
	q := d.queues[0]
	s := serve(t, d, func(c *Config) { c.MaxInFlight = 1 << 16 })
	count := &countTask{w: q.w, count: q.count, done: make(chan struct{})}
	if err := q.w.Submit(count); err != nil {
		t.Fatal(err)
	}
	const n = 4000
	c := s.connect(t)
	// The requests are in the socket before the handshake ends and the worker sees the connection.
	var b []byte
	for i := range uint64(n) {
		c.Expect(nbdtest.CmdFlush, i, 0, 0)
		b = append(b, nbdtest.Header(0, nbdtest.CmdFlush, i, 0, 0)...)
	}
	c.Write(append(optionBytes(optExportName, nil), b...))
	if _, err := io.CopyN(io.Discard, c, 10); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all at the device", func() bool { return q.count() == n })
	count.stop.Store(true)
	<-count.done
	t.Logf("at most %d requests in one turn", count.most)
	if count.most > 128 {
		t.Error("over 128")
	}
	go q.open()
	for range n {
		if r, err := c.ReadReply(); err != nil || r.Errno != 0 {
			t.Fatal(r.Errno, err)
		}
	}
}

// TestStopsInsidePayload: a client that announces a large write and stands still gets its buffer
// taken away when others want it, and the write is right all the same.
func TestStopsInsidePayload(t *testing.T) {
	d := newHeldDevice(t, 16<<20, 1, 1<<20)
	d.queues[0].open()
	s := serve(t, d, func(c *Config) {
		c.tickPeriod, c.evacuateAfter = 10*time.Millisecond, 20*time.Millisecond
	})
	slow, good := s.open(t, true), s.open(t, true)
	rnd := newRand(t)
	data := make([]byte, 1<<20)
	fill(rnd, data)
	slow.Send(0, nbdtest.CmdWrite, 1, 2<<20, 1<<20, data[:700_000])
	eventually(t, "the buffer taken", func() bool { return d.queues[0].memory() == 1<<20 })
	do(t, good, 0, nbdtest.CmdWrite, 0, 1<<20, make([]byte, 1<<20), 0) // waits until it has moved
	if st := s.Stats().Exports[0]; st.Evacuations != 1 || st.BufferWaits == 0 {
		t.Errorf("%+v", st)
	}
	slow.Write(data[700_000:])
	if r, err := slow.ReadReply(); err != nil || r.Errno != 0 {
		t.Fatalf("%+v %v", r, err)
	}
	if r := do(t, good, 0, nbdtest.CmdRead, 2<<20, 1<<20, nil, 0); !bytes.Equal(r.Data, data) {
		t.Error("the payload was damaged on the way")
	}
}

// TestStallTimeout ends who stands still inside something, and nobody else.
func TestStallTimeout(t *testing.T) {
	s := serve(t, newMemDevice(16<<20), func(c *Config) {
		c.StallTimeout = 100 * time.Millisecond
		c.tickPeriod = 10 * time.Millisecond
	})
	idle := s.open(t, true)
	half := s.open(t, true)
	half.Write(nbdtest.Header(0, nbdtest.CmdRead, 1, 0, 512)[:14])
	payload := s.open(t, true)
	payload.Send(0, nbdtest.CmdWrite, 1, 0, 1<<20, make([]byte, 1000))
	skip := s.open(t, true)
	skip.Send(0, nbdtest.CmdWrite, 1, 1, 1<<20, make([]byte, 1000))
	deaf := s.open(t, true)
	go func() {
		for i := uint64(0); deaf.Send(0, nbdtest.CmdRead, i, 0, 1<<20, nil) == nil; i++ {
		}
	}()
	eventually(t, "four stalls", func() bool { return s.Stats().Exports[0].Stalls == 4 })
	for _, c := range []*nbdtest.Client{half, payload, skip} {
		if err := c.AtEnd(); err != nil {
			t.Error(err)
		}
	}
	do(t, idle, 0, nbdtest.CmdRead, 0, 512, nil, 0)
	eventually(t, "one connection left", func() bool { return len(s.Connections()) == 1 }) // an end is counted before it is one
	for _, text := range []string{"does not take its replies", "stopped in the middle of a request"} {
		eventually(t, text+" in the log", func() bool { return strings.Contains(s.log.String(), text) })
	}
}

// TestBuffersFirstComeFirstServed: a large request that waits for memory is not
// overtaken for ever by small ones of other connections.
func TestBuffersFirstComeFirstServed(t *testing.T) {
	d := newHeldDevice(t, 16<<20, 1, 256<<10)
	q := d.queues[0]
	s := serve(t, d)
	a, b, c, late := s.open(t, true), s.open(t, true), s.open(t, true), s.open(t, true)
	for i := range uint64(4) {
		a.Send(0, nbdtest.CmdRead, i, 0, 64<<10, nil) // takes all
	}
	eventually(t, "all memory taken", func() bool { return q.count() == 4 })
	state := func(n int, state string) func() bool {
		return func() bool {
			k := 0
			for _, c := range s.Connections() {
				if c.State == state {
					k++
				}
			}
			return k == n
		}
	}
	b.Send(0, nbdtest.CmdRead, 100, 0, 256<<10, nil)
	eventually(t, "the large one waits", state(1, "paused: memory"))
	c.Send(0, nbdtest.CmdRead, 200, 0, 4096, nil)
	eventually(t, "the small one waits behind it", state(2, "paused: memory"))
	for i := range 4 {
		q.release(0)
		if _, err := a.ReadReply(); err != nil {
			t.Fatal(err)
		}
		if i == 0 { // there is room for this one now, and still it is not its turn
			late.Send(0, nbdtest.CmdRead, 300, 0, 4096, nil)
			eventually(t, "the late one waits too", state(3, "paused: memory"))
		}
		if i < 3 && q.count() != 3-i {
			t.Fatalf("somebody was served before there was room for the first: %d at the device", q.count())
		}
	}
	eventually(t, "the large one at the device", func() bool { return q.count() == 1 })
	q.release(0)
	if r, err := b.ReadReply(); err != nil || len(r.Data) != 256<<10 {
		t.Fatal(err)
	}
	eventually(t, "the small ones at the device", func() bool { return q.count() == 2 })
	q.release(0) // there is room for both: which of them comes first is left to the worker
	q.release(0)
	for _, c := range []*nbdtest.Client{c, late} {
		if _, err := c.ReadReply(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestConnectionLimits: in-flight requests and bytes of one connection.
func TestConnectionLimits(t *testing.T) {
	d := newHeldDevice(t, 16<<20, 1, 16<<20)
	q := d.queues[0]
	s := serve(t, d, func(c *Config) { c.MaxInFlight, c.MaxConnBytes = 8, 1<<20 })
	c := s.open(t, true)
	for i := range uint64(20) {
		c.Send(0, nbdtest.CmdFlush, i, 0, 0, nil)
	}
	eventually(t, "the limit of requests", func() bool { return s.Connections()[0].State == "paused: requests" })
	if n := q.count(); n != 8 {
		t.Errorf("%d requests at the device", n)
	}
	go q.open()
	for range 20 {
		if _, err := c.ReadReply(); err != nil {
			t.Fatal(err)
		}
	}
	q.mu.Lock()
	q.pass = false
	q.mu.Unlock()
	for i := range uint64(5) {
		c.Send(0, nbdtest.CmdRead, i, 0, 300<<10, nil)
	}
	eventually(t, "the limit of bytes", func() bool { return s.Connections()[0].State == "paused: bytes" })
	if st := s.Connections()[0]; q.count() != 3 || st.Bytes != 900<<10 {
		t.Errorf("%d requests, %+v", q.count(), st)
	}
	go q.open()
	for range 5 {
		if _, err := c.ReadReply(); err != nil {
			t.Fatal(err)
		}
	}
	// One request alone may be larger than the limit.
	do(t, c, 0, nbdtest.CmdRead, 0, 4<<20, nil, 0)
	eventually(t, "no bytes held at rest", func() bool { return s.Connections()[0].Bytes == 0 })
}

func TestDisconnect(t *testing.T) {
	both(t, func(t *testing.T, structured bool) {
		d := newHeldDevice(t, 1<<20, 1, 1<<20)
		s := serve(t, d)
		c := s.open(t, structured)
		for i := range uint64(10) {
			c.Send(0, nbdtest.CmdWrite, i, i*512, 512, bytes.Repeat([]byte{byte(i + 1)}, 512))
		}
		c.Write(nbdtest.Header(0, nbdtest.CmdDisc, 99, 0, 0))
		c.Write(nbdtest.Header(0, nbdtest.CmdWrite, 100, 0, 512)) // not allowed after it; ignored
		eventually(t, "ten writes", func() bool { return d.queues[0].count() == 10 && s.Connections()[0].State == "closing" })
		d.queues[0].open()
		for range 10 {
			if r, err := c.ReadReply(); err != nil || r.Errno != 0 {
				t.Fatalf("%+v %v", r, err)
			}
		}
		if err := c.AtEnd(); err != nil {
			t.Error(err)
		}
		if d.content()[9*512] != 10 {
			t.Error("a write before DISC is missing")
		}
	})
}

// TestHalfClose: a client that closes its sending side still gets its replies.
func TestHalfClose(t *testing.T) {
	d := newHeldDevice(t, 1<<20, 1, 1<<20)
	s := serve(t, d)
	c := s.open(t, true)
	for i := range uint64(10) {
		c.Send(0, nbdtest.CmdRead, i, 0, 512, nil)
	}
	c.Write(nbdtest.Header(0, nbdtest.CmdRead, 99, 0, 512)[:20])
	c.Conn.(*net.UnixConn).CloseWrite()
	eventually(t, "the end seen", func() bool { return d.queues[0].count() == 10 && s.Connections()[0].State == "closing" })
	d.queues[0].open()
	for range 10 {
		if _, err := c.ReadReply(); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.AtEnd(); err != nil {
		t.Error(err)
	}
}

// TestHangUp in each state that a connection can be in: everything comes back.
func TestHangUp(t *testing.T) {
	d := newHeldDevice(t, 16<<20, 1, 1<<20)
	q := d.queues[0]
	s := serve(t, d, func(c *Config) { c.MaxInFlight, c.MaxConnBytes, c.sendBuffer = 16, 1<<20, 64<<10 })
	rest := func(t *testing.T) {
		t.Helper()
		q.open()
		eventually(t, "nothing left", func() bool { return len(s.Connections()) == 0 && q.memory() == 0 && s.Stats().Exports[0].InFlight == 0 })
		q.mu.Lock()
		q.pass = false
		q.mu.Unlock()
	}
	send := func(c *nbdtest.Client, n int, size uint32) {
		for i := range uint64(n) {
			c.Send(0, nbdtest.CmdRead, i, 0, size, nil)
		}
	}
	for name, f := range map[string]func(t *testing.T, c *nbdtest.Client){
		"idle":           func(t *testing.T, c *nbdtest.Client) {},
		"half a header":  func(t *testing.T, c *nbdtest.Client) { c.Write(make([]byte, 3)) },
		"half a payload": func(t *testing.T, c *nbdtest.Client) { c.Send(0, nbdtest.CmdWrite, 1, 0, 1<<20, make([]byte, 100_000)) },
		"in skipping":    func(t *testing.T, c *nbdtest.Client) { c.Send(0, nbdtest.CmdWrite, 1, 1, 1<<20, make([]byte, 100_000)) },
		"with the device": func(t *testing.T, c *nbdtest.Client) {
			send(c, 4, 4096)
			eventually(t, "4", func() bool { return q.count() == 4 })
		},
		"paused: requests": func(t *testing.T, c *nbdtest.Client) {
			send(c, 30, 512)
			eventually(t, "paused", func() bool { return s.Connections()[0].State == "paused: requests" })
		},
		"paused: bytes": func(t *testing.T, c *nbdtest.Client) {
			send(c, 3, 400<<10)
			eventually(t, "paused", func() bool { return s.Connections()[0].State == "paused: bytes" })
		},
		"paused: memory": func(t *testing.T, c *nbdtest.Client) {
			o := s.open(t, true)
			defer o.Close()
			send(o, 1, 1<<20)
			eventually(t, "taken", func() bool { return q.count() == 1 })
			send(c, 1, 1<<20)
			eventually(t, "paused", func() bool { return s.Connections()[0].State == "paused: memory" })
		},
		"after DISC": func(t *testing.T, c *nbdtest.Client) {
			send(c, 2, 512)
			c.Write(nbdtest.Header(0, nbdtest.CmdDisc, 0, 0, 0))
		},
		"blocked": func(t *testing.T, c *nbdtest.Client) {
			q.open()
			send(c, 16, 64<<10)
			eventually(t, "blocked", func() bool { return s.Connections()[0].Blocked })
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := s.open(t, true)
			f(t, c)
			before := s.Connections()
			c.Close()
			if q.count() > 0 {
				// What is with the device stays until it is answered; the socket does not.
				eventually(t, "the socket closed", func() bool { return len(s.Connections()) < len(before) || s.Connections()[0].State == "closing" })
			}
			rest(t)
		})
	}
}

// TestShutdownUnderLoad: every request that was answered with success is done, none is
// answered twice, and afterwards nothing touches the device.
func TestShutdownUnderLoad(t *testing.T) {
	mem := newMemDevice(16 << 20)
	s := serve(t, mem, func(c *Config) { c.Workers = 2 })
	var wg sync.WaitGroup
	var mu sync.Mutex
	acked := map[uint64]bool{}
	refused := 0
	for k := range uint64(4) {
		c := s.open(t, true)
		wg.Add(2)
		go func() {
			defer wg.Done()
			for i := uint64(0); i < 1024; i++ {
				block := k*1024 + i
				p := make([]byte, 4096)
				binary.BigEndian.PutUint64(p, block+1)
				if c.Send(0, nbdtest.CmdWrite, block, block*4096, 4096, p) != nil {
					return
				}
			}
		}()
		go func() {
			defer wg.Done()
			for {
				r, err := c.ReadReply()
				if err != nil {
					if !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
						t.Error(err)
					}
					return
				}
				mu.Lock()
				switch {
				case r.Errno == 0 && !acked[r.Cookie]:
					acked[r.Cookie] = true
				case r.Errno == nbdtest.ESHUTDOWN:
					refused++
				default:
					t.Errorf("request %d: error %d, or twice", r.Cookie, r.Errno)
				}
				mu.Unlock()
			}
		}()
	}
	eventually(t, "some writes", func() bool { return s.Stats().Exports[0].Ops[OpWrite].Count > 250 })
	s.shutdown(t)
	mem.mu.Lock()
	mem.keep = true
	mem.mu.Unlock()
	wg.Wait()
	content := mem.content()
	for b := range acked {
		if binary.BigEndian.Uint64(content[b*4096:]) != b+1 {
			t.Errorf("block %d was acknowledged and is not there", b)
		}
	}
	if len(acked) < 200 {
		t.Errorf("%d acknowledged", len(acked))
	}
	t.Logf("%d acknowledged, %d refused", len(acked), refused)
	if l := mem.log(); len(l) != 0 {
		t.Errorf("after Shutdown: %v", l)
	}
}

// TestShutdownWaits for the device, within the context, and answers what was with it.
func TestShutdownWaits(t *testing.T) {
	d := newHeldDevice(t, 16<<20, 1, 1<<20)
	q := d.queues[0]
	s := serve(t, d)
	c := s.open(t, true)
	c.Send(0, nbdtest.CmdRead, 1, 0, 1<<20, nil)
	c.Send(0, nbdtest.CmdRead, 2, 0, 512, nil) // waits for memory
	c.Send(0, nbdtest.CmdFlush, 3, 0, 0, nil)  // received, not looked at
	eventually(t, "paused", func() bool { return s.Connections()[0].State == "paused: memory" })
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	err := s.Shutdown(ctx)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "1 connections with 1 requests") {
		t.Fatal(err)
	}
	q.open()
	got := map[uint64]uint32{}
	for range 3 {
		r, err := c.ReadReply()
		if err != nil {
			t.Fatal(err)
		}
		got[r.Cookie] = r.Errno
	}
	if got[1] != 0 || got[2] != nbdtest.ESHUTDOWN || got[3] != nbdtest.ESHUTDOWN {
		t.Errorf("%v", got)
	}
	if err := c.AtEnd(); err != nil {
		t.Error(err)
	}
	s.shutdown(t)
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.opened != q.closed {
		t.Errorf("queue opened %d times, closed %d", q.opened, q.closed)
	}
}

// TestCloseWithStuckDevice: Close does not hang, says what is left, and the rest is freed
// when the device answers at last.
func TestCloseWithStuckDevice(t *testing.T) {
	d := newHeldDevice(t, 1<<20, 1, 1<<20)
	q := d.queues[0]
	s, err := NewServer(Config{Exports: []Export{{Device: d}}})
	if err != nil {
		t.Fatal(err)
	}
	path := tempDir(t) + "/s"
	ln, err := ListenUnix(path, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	go s.Serve(ln)
	c, err := nbdtest.Open("unix", path, "", true)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	c.Send(0, nbdtest.CmdWrite, 1, 0, 512, make([]byte, 512))
	eventually(t, "the write", func() bool { return q.count() == 1 })
	if err := s.Close(); !errors.Is(err, ErrBusy) || !strings.Contains(err.Error(), "1 requests") {
		t.Errorf("%v", err)
	}
	if err := c.AtEnd(); err != nil {
		t.Error(err)
	}
	q.open()
	eventually(t, "the queue closed", func() bool { q.mu.Lock(); defer q.mu.Unlock(); return q.closed == 1 })
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if n := q.memory(); n != 0 {
		t.Errorf("%d bytes of memory lost", n)
	}
}

// TestDeviceClosedFirst is the wrong order: the workers end while connections live. It must not hang.
func TestDeviceClosedFirst(t *testing.T) {
	d := newHeldDevice(t, 1<<20, 1, 1<<20)
	s := serve(t, d)
	c := s.open(t, true)
	c.Send(0, nbdtest.CmdWrite, 1, 0, 512, make([]byte, 512))
	eventually(t, "the write", func() bool { return d.queues[0].count() == 1 })
	d.queues[0].w.Close()
	s.shutdown(t)
	if err := c.AtEnd(); err != nil {
		t.Error(err)
	}
}

// TestGrownDevice: new connections see the new size and old ones may use it.
func TestGrownDevice(t *testing.T) {
	mem := newMemDevice(1 << 20)
	s := serve(t, mem)
	old := s.open(t, true)
	do(t, old, 0, nbdtest.CmdRead, 1<<20, 512, nil, nbdtest.EINVAL)
	mem.mu.Lock()
	mem.data = append(mem.data, make([]byte, 1<<20)...)
	mem.info.Size = 2 << 20
	mem.mu.Unlock()
	c := s.open(t, true)
	if c.Info.Size != 2<<20 {
		t.Errorf("size %d", c.Info.Size)
	}
	do(t, c, 0, nbdtest.CmdRead, 1<<20, 512, nil, 0)
	do(t, old, 0, nbdtest.CmdRead, 1<<20, 512, nil, 0)
}

// TestThousandRounds: connecting and disconnecting leaves nothing behind.
func TestThousandRounds(t *testing.T) {
	mem := newMemDevice(1 << 20)
	s := serve(t, tryMemDevice{mem})
	round := func(i int) {
		c, err := nbdtest.Open("unix", s.path, "", i%2 == 0)
		if err != nil {
			t.Fatal(i, err)
		}
		c.SetDeadline(time.Now().Add(patience))
		do(t, c, 0, nbdtest.CmdWrite, 0, 512, make([]byte, 512), 0)
		do(t, c, 0, nbdtest.CmdRead, 0, 65536, nil, 0)
		if i%3 == 0 {
			c.Send(0, nbdtest.CmdRead, 1, 0, 65536, nil) // and does not wait
		}
		c.Close()
	}
	rest := func() { eventually(t, "no connections", func() bool { return len(s.Connections()) == 0 }) }
	for i := range 10 {
		round(i)
	}
	rest()
	goroutines, fds := runtime.NumGoroutine(), countFDs(t)
	for i := range 1000 {
		round(i)
	}
	rest()
	eventually(t, "the start value of goroutines", func() bool { return runtime.NumGoroutine() <= goroutines })
	if n := countFDs(t); n > fds {
		t.Errorf("%d descriptors, %d at the start", n, fds)
	}
	for _, e := range s.exports {
		for _, d := range e.opened() {
			if n := d.attention.Load(); n != 0 {
				t.Errorf("attention %d", n)
			}
			d.w.Call(func() {
				if len(d.conns) != 0 || d.waiters.head != nil {
					t.Error("connections left at the domain")
				}
				b := d.q.Alloc(d.maxAlloc)
				if b == nil {
					t.Error("memory was lost")
				} else {
					d.q.Free(b)
				}
			})
		}
	}
}

func countFDs(t *testing.T) int {
	l, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(l)
}

// TestManyConnections drives all connections at once against a model of each one's own region.
func TestManyConnections(t *testing.T) {
	for name, wrap := range map[string]func(*memDevice) blockdev.Device{
		"inline":   func(m *memDevice) blockdev.Device { return tryMemDevice{m} },
		"executor": func(m *memDevice) blockdev.Device { return m },
	} {
		t.Run(name, func(t *testing.T) {
			const conns, region = 16, 1 << 20
			mem := newMemDevice(conns * region)
			s := serve(t, wrap(mem), func(c *Config) {
				c.Workers, c.QueueMemory, c.MaxConnBytes, c.MaxInFlight = 2, 1<<20, 512<<10, 32
			})
			var wg sync.WaitGroup
			rnd := newRand(t)
			for k := range conns {
				seed := rnd.Uint64()
				c := s.open(t, k%2 == 0)
				wg.Add(1)
				go func() {
					defer wg.Done()
					if err := hammer(c, uint64(k)*region, region, seed); err != nil {
						t.Errorf("connection %d: %v", k, err)
					}
				}()
			}
			wg.Wait()
			if st := s.Stats().Exports[0]; st.BufferWaits == 0 {
				t.Log("nobody had to wait for memory")
			}
		})
	}
}

// hammer writes and reads a region with 16 requests in flight that do not overlap and compares.
func hammer(c *nbdtest.Client, base uint64, size int, seed uint64) error {
	const lanes, steps = 16, 20
	lane := size / lanes
	model := make([]byte, size)
	state := seed
	next := func(n int) int {
		state = state*6364136223846793005 + 1442695040888963407
		return int(state>>33) % n
	}
	type op struct {
		read bool
		off  int
		n    int
	}
	ops := make([]op, lanes)
	start := func(l int) error {
		n := (next(lane/512) + 1) * 512
		off := l*lane + next((lane-n)/512+1)*512
		ops[l] = op{next(2) == 0, off, n}
		if ops[l].read {
			return c.Send(0, nbdtest.CmdRead, uint64(l), base+uint64(off), uint32(n), nil)
		}
		p := model[off : off+n]
		for i := 0; i < n; i += 8 {
			binary.LittleEndian.PutUint64(p[i:], uint64(next(1<<31))<<32|uint64(off+i))
		}
		return c.Send(uint16(next(2)), nbdtest.CmdWrite, uint64(l), base+uint64(off), uint32(n), p)
	}
	// Sending must not wait for reading, or both sides may be blocked: one goroutine each.
	todo := make(chan int, lanes)
	errs := make(chan error, 1)
	go func() {
		for l := range todo {
			if err := start(l); err != nil {
				errs <- err
				return
			}
		}
		errs <- nil
	}()
	for l := range lanes {
		todo <- l
	}
	for i := range lanes * steps {
		r, err := c.ReadReply()
		if err != nil {
			return err
		}
		l := int(r.Cookie)
		if o := ops[l]; r.Errno != 0 || o.read && !bytes.Equal(r.Data, model[o.off:o.off+o.n]) {
			return fmt.Errorf("lane %d, %+v: error %d or wrong data", l, o, r.Errno)
		}
		if i < lanes*(steps-1) {
			todo <- l
		}
	}
	close(todo)
	return <-errs
}
