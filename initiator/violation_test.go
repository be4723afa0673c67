package initiator

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"rdblk/blockdev"
	"rdblk/protocol"
	"rdblk/rdma"
)

// once runs a hook for the first command of an opcode on an I/O queue.
func once(op protocol.Opcode, fn func(*fakeCommand)) func(*fakeCommand) bool {
	var done atomic.Bool
	return func(k *fakeCommand) bool {
		if k.req.QID == 0 || k.cmd.IsFabrics() || k.cmd.Opcode() != op || done.Swap(true) {
			return false
		}
		fn(k)
		return true
	}
}

// The retry timeout is for one stretch of refusals. A request that was refused for a moment, and
// taken then, may be refused for a moment again long after, when its association was lost.
func TestRetryTimeoutBeginsAnew(t *testing.T) {
	f := newFakeTarget(t)
	cfg := testConfig(f, newProvider(t))
	cfg.RetryTimeout = 300 * time.Millisecond
	d := device(t, connect(t, cfg))
	var sent atomic.Int32
	f.set(func() {
		f.hook = func(k *fakeCommand) bool {
			if k.req.QID == 0 || k.cmd.IsFabrics() || k.cmd.Opcode() != protocol.OpWrite {
				return false
			}
			switch sent.Add(1) {
			case 1, 3:
				_ = k.respond(protocol.StatusNamespaceNotReady, 0)
				return true
			case 2: // storage that is slow, and a connection that ends over it
				time.AfterFunc(2*cfg.RetryTimeout, func() { f.cut(nil) })
				return true
			}
			return false
		}
	})
	if err := d.WriteAt(pattern(1, 512), 0, 0); err != nil || sent.Load() != 4 {
		t.Errorf("sent %d times: %v", sent.Load(), err)
	}
}

// What waits because the target says "later" (nvmet does while its ANA state is inaccessible) shows in no state: the log says
// it, once for all requests, and not for what was put off for a moment.
func TestPostponedIsLogged(t *testing.T) {
	f := newFakeTarget(t)
	cfg := testConfig(f, newProvider(t))
	cfg.RetryTimeout = 20 * time.Second
	var mu sync.Mutex
	var text bytes.Buffer
	cfg.Logger = slog.New(slog.NewTextHandler(writerFunc(func(b []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return text.Write(b)
	}), nil))
	said := func() int {
		mu.Lock()
		defer mu.Unlock()
		return strings.Count(text.String(), "the target puts requests off")
	}
	d := device(t, connect(t, cfg))
	var refuse atomic.Int64     // so many more
	var refused [4]atomic.Int64 // how often each block
	f.set(func() {
		f.hook = func(k *fakeCommand) bool {
			if k.req.QID == 0 || k.cmd.IsFabrics() || refuse.Add(-1) < 0 {
				return false
			}
			refused[k.cmd.SLBA()].Add(1)
			_ = k.respond(protocol.StatusANAInaccessible, 0)
			return true
		}
	})
	refuse.Store(1) // more of them may take more than a moment
	if err := d.WriteAt(pattern(1, 512), 0, 0); err != nil || said() != 0 {
		t.Errorf("put off for a moment: %v, %d lines", err, said())
	}
	refused[0].Store(0)
	refuse.Store(math.MaxInt64)
	var wait sync.WaitGroup
	for i := range 4 {
		wait.Go(func() {
			if err := d.WriteAt(pattern(1, 512), int64(i)*512, 0); err != nil {
				t.Error(err)
			}
		})
	}
	eventually(t, "a line in the log", func() bool { return said() > 0 })
	for i := range refused { // by its fifth refusal each has waited for longer than that, and could have said it
		eventually(t, "five refusals", func() bool { return refused[i].Load() >= 5 })
	}
	refuse.Store(0)
	wait.Wait()
	if mu.Lock(); !strings.Contains(text.String(), protocol.StatusANAInaccessible.Name(false)) {
		t.Errorf("the log does not say why: %s", text.String())
	}
	mu.Unlock()
	if n := said(); n != 1 {
		t.Errorf("%d lines in the log", n)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

// A target that breaks the protocol loses the association, the request that was under
// way is sent again, and the application sees nothing but time.
func TestProtocolViolations(t *testing.T) {
	respond := func(k *fakeCommand, cqe protocol.Completion) { _ = k.execute(k.raw(cqe)) }
	for _, c := range []struct {
		name string
		op   protocol.Opcode
		fn   func(*fakeCommand)
		says string
	}{
		{"response to a command that is not there", protocol.OpRead, func(k *fakeCommand) {
			var cqe protocol.Completion
			cqe.Init(k.cmd.ID()^1, 0)
			respond(k, cqe)
		}, "not outstanding"},
		{"response to a slot that does not exist", protocol.OpRead, func(k *fakeCommand) {
			var cqe protocol.Completion
			cqe.Init(0x3FF, 0)
			respond(k, cqe)
		}, "not outstanding"},
		{"another generation of the slot", protocol.OpRead, func(k *fakeCommand) {
			var cqe protocol.Completion
			cqe.Init(k.cmd.ID()+1<<slotBits, 0)
			respond(k, cqe)
		}, "not outstanding"},
		{"two responses", protocol.OpFlush, func(k *fakeCommand) {
			_ = k.respond(0, 0)
			_ = k.respond(0, 0)
		}, "not outstanding"},
		{"short response", protocol.OpRead, func(k *fakeCommand) {
			wr := k.response(0, 0)
			wr.Op, wr.SGL[0].Len = rdma.OpSend, 8
			_ = k.execute(wr)
		}, "response of 8 bytes"},
		{"empty response", protocol.OpRead, func(k *fakeCommand) {
			wr := k.response(0, 0)
			wr.Op, wr.SGL = rdma.OpSend, nil
			_ = k.execute(wr)
		}, "response of 0 bytes"},
		{"long response", protocol.OpRead, func(k *fakeCommand) {
			wr := k.response(0, 0)
			wr.Op, wr.SGL[0].Len = rdma.OpSend, 64
			_ = k.execute(wr)
		}, "queue"},
		{"the key of nothing is invalidated", protocol.OpRead, func(k *fakeCommand) {
			wr := k.response(0, 0)
			wr.Op, wr.InvalidateRKey = rdma.OpSendInvalidate, k.data.Key^0x5500
			_ = k.execute(wr)
		}, "queue"},
		{"a key is invalidated though the data came along", protocol.OpWrite, func(k *fakeCommand) {
			wr := k.response(0, 0)
			wr.Op, wr.InvalidateRKey = rdma.OpSendInvalidate, 0x12345600
			_ = k.execute(wr)
		}, "queue"},
		{"writes behind the buffer", protocol.OpRead, func(k *fakeCommand) {
			_ = k.execute(rdma.SendWR{Op: rdma.OpWrite, SGL: k.sge(k.depth*k.slot, 512), RemoteAddr: k.data.Addr + uint64(k.data.Len), RKey: k.data.Key}, k.response(0, 0))
		}, "queue"},
		{"reads where it may only write", protocol.OpRead, func(k *fakeCommand) {
			_ = k.execute(rdma.SendWR{Op: rdma.OpRead, SGL: k.sge(k.depth*k.slot, 512), RemoteAddr: k.data.Addr, RKey: k.data.Key})
		}, "queue"},
		{"writes with the key after the response", protocol.OpRead, func(k *fakeCommand) {
			_ = k.run()
			_ = k.execute(rdma.SendWR{Op: rdma.OpWrite, SGL: k.sge(k.depth*k.slot, 512), RemoteAddr: k.data.Addr, RKey: k.data.Key})
		}, "queue"},
		{"dies", protocol.OpRead, func(k *fakeCommand) { k.killed.Store(true) }, "connection lost"},
		{"dies with a write half done", protocol.OpWrite, func(k *fakeCommand) {
			f := k.f
			f.spaces[1].mu.Lock()
			copy(f.spaces[1].data, k.in[:100])
			f.spaces[1].mu.Unlock()
			k.killed.Store(true)
		}, "connection lost"},
		{"never answers", protocol.OpRead, func(k *fakeCommand) {}, ErrTimeout.Error()},
		{"never answers a flush", protocol.OpFlush, func(k *fakeCommand) {}, ErrTimeout.Error()},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFakeTarget(t)
			copy(f.spaces[1].data, pattern(3, 8192))
			f.hook = once(c.op, c.fn)
			var reason error
			var mu sync.Mutex
			cfg := testConfig(f, newProvider(t))
			if c.says == ErrTimeout.Error() {
				cfg.RequestTimeout = 200 * time.Millisecond
			}
			cfg.OnEvent = func(e Event) {
				if e.Kind == EventDisconnected {
					mu.Lock()
					reason = e.Err
					mu.Unlock()
				}
			}
			s := connect(t, cfg)
			d := device(t, s)
			got := make([]byte, 512)
			if err := d.ReadAt(got, 512); err != nil || !bytes.Equal(got, pattern(3, 8192)[512:1024]) {
				t.Errorf("read: %v", err)
			}
			if err := d.WriteAt(pattern(4, 512), 0, 0); err != nil || !bytes.Equal(f.spaces[1].content(0, 512), pattern(4, 512)) {
				t.Errorf("write: %v", err)
			}
			if err := d.Flush(); err != nil {
				t.Errorf("flush: %v", err)
			}
			eventually(t, "the association is rebuilt", func() bool { st := s.Status(); return st.State == StateLive && st.Reconnects >= 1 })
			var why error // events come when they come
			eventually(t, "the event", func() bool { mu.Lock(); defer mu.Unlock(); why = reason; return why != nil })
			if !strings.Contains(why.Error(), c.says) {
				t.Errorf("association ended: %v, want %q", why, c.says)
			}
			if err := d.ReadAt(got, 512); err != nil {
				t.Errorf("afterwards: %v", err)
			}
		})
	}
}

// A request is over only when its Send has completed and its window is closed, whatever
// the order in which things are reported.
func TestCompletionNeedsEverything(t *testing.T) {
	for _, c := range []struct {
		name  string
		op    blockdev.Op
		n     int
		plain bool
		hold  func(wc *rdma.WC) bool
	}{
		{"Send of in-capsule data", blockdev.OpWrite, 512, false, func(wc *rdma.WC) bool { return !wc.Recv && wc.ID&kindMask == kindSend }},
		{"Send of a keyed read", blockdev.OpRead, 8192, false, func(wc *rdma.WC) bool { return !wc.Recv && wc.ID&kindMask == kindSend }},
		{"Local Invalidate", blockdev.OpRead, 8192, true, func(wc *rdma.WC) bool { return !wc.Recv && wc.ID&kindMask == kindInvalidate }},
		{"the response", blockdev.OpWrite, 8192, false, func(wc *rdma.WC) bool { return wc.Recv }},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFakeTarget(t)
			f.plainSend = c.plain
			p := &crooked{Provider: newProvider(t)}
			cfg := testConfig(f, p)
			cfg.Queues = 1
			s := connect(t, cfg)
			d := device(t, s)
			var held []rdma.WC
			holding, seen := true, make(chan struct{})
			var mu sync.Mutex
			p.mu.Lock()
			p.poll = func(qid uint16, wcs []rdma.WC) []rdma.WC {
				if qid != 1 {
					return wcs
				}
				mu.Lock()
				defer mu.Unlock()
				var out []rdma.WC
				if !holding {
					out, held = append(out, held...), nil
				}
				for _, wc := range wcs {
					if holding && c.hold(&wc) {
						if held = append(held, wc); len(held) == 1 {
							close(seen)
						}
						continue
					}
					out = append(out, wc)
				}
				return out
			}
			p.mu.Unlock()
			q, _ := d.OpenQueue(0)
			done := make(chan error, 1)
			r := &blockdev.Request{Op: c.op, Done: func(r *blockdev.Request) { done <- r.Err }}
			_ = q.Worker().Call(func() {
				r.Buf = q.Alloc(c.n)
				q.Submit(r)
			})
			select {
			case <-seen:
			case <-time.After(time.Minute):
				t.Fatal("nothing to hold came")
			}
			eventually(t, "the target has done its part", func() bool {
				return f.spaces[1].reads.Load()+f.spaces[1].writes.Load() > 0
			})
			for range 20 { // give what is wrong a chance to happen
				_ = q.Worker().Call(func() {})
				select {
				case err := <-done:
					t.Fatalf("answered (%v) without it", err)
				case <-time.After(time.Millisecond):
				}
			}
			mu.Lock()
			holding = false
			mu.Unlock()
			_ = q.Worker().Call(func() { s.as.lanes[0].h.Kick() })
			if err := <-done; err != nil {
				t.Error(err)
			}
			_ = q.Worker().Call(func() { q.Free(r.Buf) })
		})
	}
}

// A failed work completion ends the association, and what was flushed with it is sent
// again.
func TestFailedCompletions(t *testing.T) {
	for _, status := range []rdma.Status{rdma.StatusFlush, rdma.StatusLocalProtection, rdma.StatusRemoteAccess, rdma.StatusMWBind, rdma.StatusGeneral} {
		for _, recv := range []bool{false, true} {
			f := newFakeTarget(t)
			p := &crooked{Provider: newProvider(t)}
			s := connect(t, testConfig(f, p))
			d := device(t, s)
			var once sync.Once
			p.mu.Lock()
			p.poll = func(qid uint16, wcs []rdma.WC) []rdma.WC {
				for i := range wcs {
					if wcs[i].Recv == recv && qid > 0 {
						once.Do(func() { wcs[i].Status = status })
					}
				}
				return wcs
			}
			p.mu.Unlock()
			if err := d.WriteAt(pattern(1, 8192), 0, 0); err != nil {
				t.Errorf("%v, receive %v: %v", status, recv, err)
			}
			eventually(t, "reconnected", func() bool { return s.Status().Reconnects == 1 })
		}
	}
}

func TestStatusesOfRequests(t *testing.T) {
	f := newFakeTarget(t)
	cfg := testConfig(f, newProvider(t))
	cfg.RetryTimeout = 30 * time.Second // for what is refused once or twice, on a busy machine
	s := connect(t, cfg)
	d := device(t, s)
	b := make([]byte, 512)
	with := func(op protocol.Opcode, s protocol.Status, times int) {
		var n atomic.Int32
		f.set(func() {
			f.hook = func(k *fakeCommand) bool {
				if k.req.QID == 0 || k.cmd.Opcode() != op || int(n.Add(1)) > times {
					return false
				}
				_ = k.respond(s, 0)
				return true
			}
		})
	}
	const always = 1 << 20
	for _, c := range []struct {
		name  string
		op    protocol.Opcode
		s     protocol.Status
		times int
		call  func() error
		is    error
	}{
		{"no space", protocol.OpWrite, protocol.StatusCapacityExceeded.WithDNR(), always, func() error { return d.WriteAt(b, 0, 0) }, syscall.ENOSPC},
		{"write fault", protocol.OpWrite, protocol.StatusWriteFault.WithDNR(), always, func() error { return d.WriteAt(b, 0, 0) }, syscall.EIO},
		{"unreadable", protocol.OpRead, protocol.StatusUnrecoveredRead.WithDNR(), always, func() error { return d.ReadAt(b, 0) }, syscall.EIO},
		{"read-only", protocol.OpWrite, protocol.StatusNamespaceWriteProtected, always, func() error { return d.WriteAt(b, 0, 0) }, blockdev.ErrReadOnly},
		{"beyond the end", protocol.OpRead, protocol.StatusLBAOutOfRange.WithDNR(), always, func() error { return d.ReadAt(b, 0) }, blockdev.ErrOutOfRange},
		{"vendor specific", protocol.OpRead, 0x7C0 | protocol.StatusDNR, always, func() error { return d.ReadAt(b, 0) }, syscall.EIO},
		{"not ready twice", protocol.OpRead, protocol.StatusNamespaceNotReady, 2, func() error { return d.ReadAt(b, 0) }, nil},
		{"interrupted", protocol.OpWrite, protocol.StatusCommandInterrupted.WithCRD(1), 1, func() error { return d.WriteAt(b, 0, 0) }, nil},
		{"path error", protocol.OpFlush, protocol.StatusInternalPathError, 1, func() error { return d.Flush() }, nil},
		{"one part of many fails", protocol.OpRead, protocol.StatusUnrecoveredRead.WithDNR(), 1, func() error { return d.ReadAt(make([]byte, 512<<10), 0) }, syscall.EIO},
		{"one part of many is delayed", protocol.OpRead, protocol.StatusNamespaceNotReady, 1, func() error { return d.ReadAt(make([]byte, 512<<10), 0) }, nil},
	} {
		with(c.op, c.s, c.times)
		if err := c.call(); !errors.Is(err, c.is) || c.is != nil && !strings.Contains(err.Error(), "namespace 1") {
			t.Errorf("%s: %v, want %v", c.name, err, c.is)
		}
	}
	f.set(func() { f.hook = nil })
	if err := d.ReadAt(b, 0); err != nil {
		t.Errorf("one failed request disturbed others: %v", err)
	}
	if st := s.Status(); st.Reconnects != 0 || st.State != StateLive {
		t.Errorf("failed requests cost %d associations", st.Reconnects)
	}
	if st := s.Stats(); st.Retried < 5 || st.Ops[blockdev.OpRead].Failed != 4 || st.Ops[blockdev.OpWrite].Failed != 3 {
		t.Errorf("counted %+v", st.Ops)
	}
	// What is refused for ever fails when the retry timeout is over.
	f2 := newFakeTarget(t)
	cfg2 := testConfig(f2, newProvider(t))
	cfg2.RetryTimeout = 2 * time.Second
	s2 := connect(t, cfg2)
	d2 := device(t, s2)
	for _, c := range []struct {
		name string
		set  func()
		is   error
	}{
		{"not ready for ever", func() { f2.hook = answer("Read", protocol.StatusNamespaceNotReady, 0) }, protocol.StatusNamespaceNotReady},
		{"namespace gone", func() { f2.hook = nil; delete(f2.spaces, 1) }, ErrNoNamespace},
	} {
		f2.set(c.set)
		if err := d2.ReadAt(b, 0); !errors.Is(err, c.is) || !strings.Contains(err.Error(), "namespace 1") {
			t.Errorf("%s: %v, want %v", c.name, err, c.is)
		}
	}
	if st, ops := s2.Status(), s2.Stats().Ops[blockdev.OpRead]; st.Reconnects != 0 || st.State != StateLive || ops.Failed != 2 {
		t.Errorf("refused for ever: %d associations, counted %+v", st.Reconnects, ops)
	}
	// What the device itself refuses never reaches the target.
	before := f.count("Read") + f.count("Write")
	for _, c := range []struct {
		err  error
		want error
	}{
		{d.ReadAt(b, 1<<20), blockdev.ErrOutOfRange},
		{d.ReadAt(b, -512), blockdev.ErrOutOfRange},
		{d.ReadAt(b, 1<<62), blockdev.ErrOutOfRange},
		{d.WriteAt(b[:100], 0, 0), blockdev.ErrUnaligned},
		{d.WriteAt(b, 1, 0), blockdev.ErrUnaligned},
		{d.WriteAt(make([]byte, 2<<20), 0, 0), blockdev.ErrOutOfRange},
		{d.Zero(512, 1<<20, 0), blockdev.ErrOutOfRange},
		{d.Zero(0, -512, 0), blockdev.ErrOutOfRange},
		{d.Discard(1<<63-512, 512), blockdev.ErrOutOfRange},
		{d.Zero(0, 0, 0), nil},
		{d.ReadAt(nil, 512), nil},
		{d.WriteAt(nil, 1<<20, 0), nil},
	} {
		if !errors.Is(c.err, c.want) {
			t.Errorf("%v, want %v", c.err, c.want)
		}
	}
	if n := f.count("Read") + f.count("Write"); n != before {
		t.Errorf("%d commands were sent for them", n-before)
	}
}

// What a target says it can and then refuses is done in another way, and remembered.
func TestFallbacks(t *testing.T) {
	refuse := func(cond func(*protocol.Command) bool, s protocol.Status) func(*fakeCommand) bool {
		return func(k *fakeCommand) bool {
			return k.req.QID > 0 && !k.cmd.IsFabrics() && cond(&k.cmd) && k.respond(s, 0) == nil
		}
	}
	zeros := func(t *testing.T, f *fakeTarget, d *Device, flags blockdev.WriteFlags) {
		t.Helper()
		f.spaces[1].mu.Lock()
		copy(f.spaces[1].data, pattern(1, 256<<10))
		f.spaces[1].mu.Unlock()
		if err := d.Zero(512, 200<<10, flags); err != nil {
			t.Error(err)
		}
		got := f.spaces[1].content(0, 256<<10)
		if !bytes.Equal(got[512:512+200<<10], make([]byte, 200<<10)) || !bytes.Equal(got[:512], pattern(1, 512)) || !bytes.Equal(got[512+200<<10:], pattern(1, 256<<10)[512+200<<10:]) {
			t.Error("not zero, or too much")
		}
	}
	t.Run("DEAC", func(t *testing.T) {
		f := newFakeTarget(t)
		f.hook = refuse(func(c *protocol.Command) bool { return c.Opcode() == protocol.OpWriteZeroes && c.DEAC() }, protocol.StatusInvalidField.WithDNR())
		d := device(t, connect(t, testConfig(f, newProvider(t))))
		zeros(t, f, d, 0)
		zeros(t, f, d, 0)
		if n, m := f.count("Write Zeroes"), f.spaces[1].zeroes.Load(); n != 3 || m != 2 || !d.Info().WriteZeroes {
			t.Errorf("%d sent, %d done, %+v", n, m, d.Info())
		}
	})
	t.Run("Write Zeroes", func(t *testing.T) {
		f := newFakeTarget(t)
		f.hook = refuse(func(c *protocol.Command) bool { return c.Opcode() == protocol.OpWriteZeroes }, protocol.StatusInvalidOpcode.WithDNR())
		d := device(t, connect(t, testConfig(f, newProvider(t))))
		zeros(t, f, d, 0)
		zeros(t, f, d, blockdev.WriteFUA)
		if n := f.count("Write Zeroes"); n != 2 || d.Info().WriteZeroes || f.spaces[1].fua.Load() == 0 {
			t.Errorf("%d sent, %d FUA, %+v", n, f.spaces[1].fua.Load(), d.Info())
		}
	})
	t.Run("not advertised", func(t *testing.T) {
		for _, inCapsule := range []bool{true, false} {
			f := newFakeTarget(t)
			f.ctrl.ONCS = 0
			f.ctrl.SetInCapsuleSize(16384)
			cfg := testConfig(f, newProvider(t))
			cfg.NoInCapsule = !inCapsule
			d := device(t, connect(t, cfg))
			zeros(t, f, d, 0)
			if err := d.Discard(0, 4096); !errors.Is(err, blockdev.ErrNotSupported) || d.Info().Discard {
				t.Errorf("discard: %v", err)
			}
			if f.count("Write Zeroes")+f.count("Dataset Management") != 0 {
				t.Error("sent what the target does not have")
			}
		}
	})
	t.Run("no unmapping", func(t *testing.T) {
		f := newFakeTarget(t)
		var deac atomic.Bool
		f.hook = func(k *fakeCommand) bool {
			if k.req.QID > 0 && k.cmd.Opcode() == protocol.OpWriteZeroes {
				deac.Store(k.cmd.DEAC())
			}
			return false
		}
		d := device(t, connect(t, testConfig(f, newProvider(t))))
		zeros(t, f, d, 0)
		if !deac.Load() {
			t.Error("DEAC not set though the target honours it")
		}
		zeros(t, f, d, blockdev.ZeroNoUnmap)
		if deac.Load() {
			t.Error("DEAC set against the flag")
		}
	})
	t.Run("Dataset Management", func(t *testing.T) {
		f := newFakeTarget(t)
		f.hook = refuse(func(c *protocol.Command) bool { return c.Opcode() == protocol.OpDatasetManagement }, protocol.StatusCommandSizeExceeded.WithDNR())
		d := device(t, connect(t, testConfig(f, newProvider(t))))
		for range 2 {
			if err := d.Discard(0, 4096); !errors.Is(err, blockdev.ErrNotSupported) {
				t.Error(err)
			}
		}
		if f.count("Dataset Management") != 1 || d.Info().Discard {
			t.Error("asked again")
		}
	})
	t.Run("limits of a range", func(t *testing.T) {
		f := newFakeTarget(t)
		f.nvm.DMRSL, f.nvm.WZSL = 8, 1
		d := device(t, connect(t, testConfig(f, newProvider(t))))
		if err := d.Discard(0, 20*512); err != nil || f.count("Dataset Management") != 3 {
			t.Errorf("%v, %d commands", err, f.count("Dataset Management"))
		}
		if err := d.Zero(0, 20*512, 0); err != nil || f.count("Write Zeroes") != 2 {
			t.Errorf("%v, %d commands", err, f.count("Write Zeroes"))
		}
	})
	t.Run("write protected", func(t *testing.T) {
		f := newFakeTarget(t)
		f.spaces[1].ns.NSATTR = protocol.NSATTRProtected
		d := device(t, connect(t, testConfig(f, newProvider(t))))
		if err := d.WriteAt(make([]byte, 512), 0, 0); !errors.Is(err, blockdev.ErrReadOnly) || !d.Info().ReadOnly {
			t.Error(err)
		}
		if err := d.Flush(); err != nil {
			t.Error(err)
		}
		if err := d.ReadAt(make([]byte, 512), 0); err != nil {
			t.Error(err)
		}
	})
	t.Run("no write cache", func(t *testing.T) {
		f := newFakeTarget(t)
		f.ctrl.VWC = 0
		d := device(t, connect(t, testConfig(f, newProvider(t))))
		if err := errors.Join(d.WriteAt(make([]byte, 512), 0, blockdev.WriteFUA), d.Flush()); err != nil {
			t.Error(err)
		}
		if f.count("Flush") != 0 || f.spaces[1].fua.Load() != 0 || d.Info().WriteCache {
			t.Error("flushed a cache that is not there")
		}
	})
}

func TestOpenUsesTheConfiguredNamespace(t *testing.T) {
	f := newFakeTarget(t)
	f.spaces[5] = newFakeSpace(2<<20, 9)
	cfg := testConfig(f, newProvider(t))
	cfg.NSID = 5
	d, err := Open(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if d.NSID() != 5 || d.Info().Size != 2<<20 {
		t.Errorf("namespace %d", d.NSID())
	}
	if err := errors.Join(d.WriteAt(pattern(1, 512), 0, 0), d.Close()); err != nil {
		t.Error(err)
	}
	if err := d.Close(); !errors.Is(err, blockdev.ErrClosed) {
		t.Error(err)
	}
	if err := d.ReadAt(make([]byte, 512), 0); !errors.Is(err, blockdev.ErrClosed) {
		t.Error(err)
	}
	if _, err := d.OpenQueue(0); !errors.Is(err, blockdev.ErrClosed) {
		t.Error(err)
	}
	if d.Session().Status().State != StateClosed {
		t.Error("session lives on")
	}
}

// A target that lists a namespace and refuses all commands to it: it is found and lost once a second, which is no news for a request.
func TestListedAndRefused(t *testing.T) {
	f := newFakeTarget(t)
	f.set(func() {
		f.hook = func(k *fakeCommand) bool {
			if k.req.QID == 0 || k.cmd.Opcode() != protocol.OpRead {
				return false
			}
			_ = k.respond(protocol.StatusInvalidNamespace.WithDNR(), 0)
			return true
		}
	})
	cfg := testConfig(f, newProvider(t))
	cfg.RetryTimeout = 4 * time.Second
	d := device(t, connect(t, cfg))
	done := make(chan error, 1)
	go func() { done <- d.ReadAt(make([]byte, 512), 0) }()
	select {
	case err := <-done:
		if !errors.Is(err, protocol.StatusInvalidNamespace) && !errors.Is(err, ErrNoNamespace) {
			t.Errorf("the read ended with %v", err)
		}
	case <-time.After(time.Minute):
		t.Fatal("the read waits without end")
	}
}
