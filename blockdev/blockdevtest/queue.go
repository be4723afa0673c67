package blockdevtest

import (
	"bytes"
	"errors"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/blockdev"
)

// RunQueue is the contract of blockdev.Queue in executable form. open gives a fresh
// queue of a writable device of at least 1 MiB; it cleans up after itself.
func RunQueue(t *testing.T, open func(testing.TB) (blockdev.Queue, blockdev.Device), opts ...Option) {
	s := &suite{}
	for _, o := range opts {
		o(s)
	}
	for _, c := range []struct {
		name string
		run  func(*queueTest, *testing.T)
	}{
		{"Alloc", (*queueTest).alloc},
		{"EachIsAnsweredOnceOnTheWorker", (*queueTest).once},
		{"AFailureIsAlone", (*queueTest).failureIsAlone},
		{"DoneMaySubmit", (*queueTest).doneMaySubmit},
		{"ChainsDoNotStarveTheWorker", (*queueTest).chains},
		{"LargerThanMaxIO", (*queueTest).large},
		{"EveryOperation", (*queueTest).everyOp},
	} {
		t.Run(c.name, func(t *testing.T) {
			q, d := open(t)
			qt := &queueTest{t: t, suite: s, q: q, d: d}
			c.run(qt, t)
		})
	}
}

type queueTest struct {
	*suite
	t *testing.T
	q blockdev.Queue
	d blockdev.Device
}

// on runs fn on the worker.
func (c *queueTest) on(fn func()) {
	c.t.Helper()
	must(c.t, "call the worker", c.q.Worker().Call(fn))
}

// wait gets n signals.
func (c *queueTest) wait(ch <-chan struct{}, n int) {
	c.t.Helper()
	limit := time.After(60 * time.Second)
	for i := range n {
		select {
		case <-ch:
		case <-limit:
			c.t.Fatalf("%d of %d requests were answered", i, n)
		}
	}
}

func (c *queueTest) alloc(t *testing.T) {
	c.on(func() {
		most := c.q.MaxAlloc()
		if most < 4096 {
			t.Errorf("MaxAlloc = %d", most)
			return
		}
		for range 2 { // the second time everything must be back
			var held [][]byte
			sum := 0
			for {
				b := c.q.Alloc(most)
				if b == nil {
					break
				}
				if len(b) != most {
					t.Errorf("Alloc(%d) gave %d bytes", most, len(b))
				}
				held = append(held, b)
				if sum += most; sum > 16<<30 {
					t.Error("memory has no bound")
					break
				}
			}
			if len(held) == 0 {
				t.Error("no buffer of MaxAlloc in a fresh queue")
			}
			for i, b := range held {
				b[0], b[len(b)-1] = byte(i), byte(i)
			}
			for i, b := range held {
				if b[0] != byte(i) || b[len(b)-1] != byte(i) {
					t.Error("buffers overlap")
				}
				c.q.Free(b)
			}
		}
	})
}

// offset is place i of n byte transfers on the device.
func (c *queueTest) offset(i, n int) int64 {
	in := c.d.Info()
	return int64(i) % (in.Size / int64(n)) * int64(n)
}

func (c *queueTest) once(t *testing.T) {
	in := c.d.Info()
	n := max(in.BlockSize, 4096)
	count := min(256, int(in.Size/int64(n)))
	if c.short {
		count = 32
	}
	var tid int
	c.on(func() { tid = unix.Gettid() })
	answers := make([]atomic.Int32, count)
	done := make(chan struct{}, 2*count)
	var waiting []*blockdev.Request
	var submit func(r *blockdev.Request)
	submit = func(r *blockdev.Request) {
		if r.Buf = c.q.Alloc(n); r.Buf == nil {
			waiting = append(waiting, r)
			return
		}
		Fill(r.Buf, r.Off, uint64(r.User.(int)))
		c.q.Submit(r)
	}
	for _, op := range []blockdev.Op{blockdev.OpWrite, blockdev.OpRead} {
		for i := range answers {
			answers[i].Store(0)
		}
		c.on(func() {
			for i := range count {
				r := &blockdev.Request{Op: op, Off: c.offset(i, n), User: i}
				r.Done = func(r *blockdev.Request) {
					answers[i].Add(1)
					if unix.Gettid() != tid {
						t.Error("Done runs on another thread than the worker's")
					}
					if r.Err != nil {
						t.Errorf("%v %d: %v", op, i, r.Err)
					}
					if op == blockdev.OpRead {
						want := make([]byte, n)
						Fill(want, r.Off, uint64(i))
						if !bytes.Equal(r.Buf, c.expect(want)) {
							t.Errorf("read %d: wrong content", i)
						}
					}
					c.q.Free(r.Buf)
					done <- struct{}{}
					if len(waiting) > 0 {
						next := waiting[0]
						waiting = waiting[1:]
						submit(next)
					}
				}
				submit(r)
			}
		})
		c.wait(done, count)
		c.on(func() {})
		for i := range answers {
			if k := answers[i].Load(); k != 1 {
				t.Errorf("%v %d was answered %d times", op, i, k)
			}
		}
	}
}

func (c *queueTest) failureIsAlone(t *testing.T) {
	in := c.d.Info()
	n := in.BlockSize
	done := make(chan struct{}, 8)
	errs := make([]error, 8)
	c.on(func() {
		for i := range 8 {
			r := &blockdev.Request{Op: blockdev.OpWrite, Off: int64(i * n), Buf: c.q.Alloc(n)}
			switch i {
			case 2:
				r.Off = in.Size
			case 3:
				r.Off = 1
			case 5:
				r.Op, r.Buf, r.Len = blockdev.OpZero, nil, -1
			case 6:
				r.Op = blockdev.NumOps
			}
			buf := r.Buf
			r.Done = func(r *blockdev.Request) {
				errs[i] = r.Err
				if buf != nil {
					c.q.Free(buf)
				}
				done <- struct{}{}
			}
			c.q.Submit(r)
		}
	})
	c.wait(done, 8)
	for i, want := range []error{nil, nil, blockdev.ErrOutOfRange, blockdev.ErrUnaligned, nil, blockdev.ErrOutOfRange, blockdev.ErrNotSupported, nil} {
		if !errors.Is(errs[i], want) {
			t.Errorf("request %d: %v, want %v", i, errs[i], want)
		}
	}
}

// doneMaySubmit runs one request that submits itself again 100,000 times, or for
// half a second if each goes round through an executor.
func (c *queueTest) doneMaySubmit(t *testing.T) {
	left := 100_000
	if c.short {
		left = 200
	}
	done := make(chan struct{}, 1)
	depth := 0
	limit := time.Now().Add(time.Second / 2)
	c.on(func() {
		r := &blockdev.Request{Op: blockdev.OpRead, Buf: c.q.Alloc(c.d.Info().BlockSize)}
		buf := r.Buf
		r.Done = func(r *blockdev.Request) {
			if depth++; depth > 1 {
				t.Error("Done runs inside Done")
			}
			if left--; left == 0 || r.Err != nil || left%1024 == 0 && time.Now().After(limit) {
				if r.Err != nil {
					t.Error(r.Err)
				}
				c.q.Free(buf)
				done <- struct{}{}
			} else {
				c.q.Submit(r)
			}
			depth--
		}
		c.q.Submit(r)
	})
	c.wait(done, 1)
}

// chains keeps requests going for ever and looks whether the worker does other things.
func (c *queueTest) chains(t *testing.T) {
	stop, running := false, 0
	done := make(chan struct{}, 8)
	c.on(func() {
		for i := range 8 {
			r := &blockdev.Request{Op: blockdev.OpRead, Off: c.offset(i, c.d.Info().BlockSize), Buf: c.q.Alloc(c.d.Info().BlockSize)}
			running++
			r.Done = func(r *blockdev.Request) {
				if stop || r.Err != nil {
					running--
					c.q.Free(r.Buf)
					done <- struct{}{}
					return
				}
				c.q.Submit(r)
			}
			c.q.Submit(r)
		}
	})
	for range 20 {
		c.on(runtime.Gosched)
	}
	c.on(func() {
		stop = true
		if running != 8 {
			t.Errorf("%d of 8 chains run", running)
		}
	})
	c.wait(done, 8)
}

func (c *queueTest) large(t *testing.T) {
	in := c.d.Info()
	n := min(c.q.MaxAlloc(), int(in.Size), 1<<20) / in.BlockSize * in.BlockSize
	want := make([]byte, n)
	Fill(want, 0, 99)
	done := make(chan struct{}, 1)
	for _, op := range []blockdev.Op{blockdev.OpWrite, blockdev.OpRead} {
		c.on(func() {
			r := &blockdev.Request{Op: op, Buf: c.q.Alloc(n)}
			if op == blockdev.OpWrite {
				copy(r.Buf, want)
			}
			r.Done = func(r *blockdev.Request) {
				if r.Err != nil {
					t.Errorf("%v of %d bytes with MaxIO %d: %v", op, n, in.MaxIO, r.Err)
				} else if op == blockdev.OpRead && !bytes.Equal(r.Buf, c.expect(want)) {
					t.Errorf("read of %d bytes: wrong content", n)
				}
				c.q.Free(r.Buf)
				done <- struct{}{}
			}
			c.q.Submit(r)
		})
		c.wait(done, 1)
	}
}

func (c *queueTest) everyOp(t *testing.T) {
	in := c.d.Info()
	n := in.BlockSize
	done := make(chan struct{}, 1)
	do := func(op blockdev.Op, flags blockdev.WriteFlags, fill uint64) (data []byte) {
		t.Helper()
		c.on(func() {
			r := &blockdev.Request{Op: op, Flags: flags, Off: int64(n), Len: int64(n), Buf: c.q.Alloc(n)}
			Fill(r.Buf, r.Off, fill)
			r.Done = func(r *blockdev.Request) {
				if r.Err != nil {
					t.Errorf("%v flags %d: %v", op, flags, r.Err)
				}
				data = bytes.Clone(r.Buf)
				c.q.Free(r.Buf)
				done <- struct{}{}
			}
			c.q.Submit(r)
		})
		c.wait(done, 1)
		return data
	}
	want := make([]byte, n)
	for i, flags := range []blockdev.WriteFlags{0, blockdev.WriteFUA} {
		Fill(want, int64(n), uint64(i+1))
		do(blockdev.OpWrite, flags, uint64(i+1))
		if !bytes.Equal(do(blockdev.OpRead, 0, 0), c.expect(want)) {
			t.Errorf("write flags %d: wrong content", flags)
		}
	}
	for _, flags := range []blockdev.WriteFlags{0, blockdev.WriteFUA, blockdev.ZeroNoUnmap} {
		do(blockdev.OpWrite, 0, 9)
		do(blockdev.OpZero, flags, 0)
		if !bytes.Equal(do(blockdev.OpRead, 0, 0), make([]byte, n)) {
			t.Errorf("zero flags %d: wrong content", flags)
		}
	}
	do(blockdev.OpDiscard, 0, 0)
	do(blockdev.OpFlush, 0, 0)
	if !in.DiscardZeros {
		return
	}
	if !bytes.Equal(do(blockdev.OpRead, 0, 0), make([]byte, n)) {
		t.Error("discard: not zeros")
	}
}
