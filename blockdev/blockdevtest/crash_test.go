package blockdevtest

import (
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"rdblk/blockdev"
)

func TestCrashableKeepsTheContract(t *testing.T) {
	Run(t, func(t testing.TB) blockdev.Device { return NewCrashable(2<<20, 1) })
}

func TestCrashableWithLargeBlocksAndDiscardZeros(t *testing.T) {
	Run(t, func(t testing.TB) blockdev.Device {
		d := NewCrashable(2<<20, 1)
		d.SetBlockSize(4096)
		d.SetDiscardZeros(true)
		return d
	})
}

func crashConfig(seed uint64) RandomConfig {
	return RandomConfig{Seed: seed, Ops: 400, Workers: 6, MaxLen: 32 << 10, Window: 128 << 10, Flushes: 12}
}

// onQueue puts a queue and a worker on the disk.
func onQueue(t testing.TB) func(*Crashable) (blockdev.Device, func()) {
	return func(d *Crashable) (blockdev.Device, func()) {
		q := openQueue(t, d)
		v := ViaQueue(q, d)
		return v, func() { v.Close() }
	}
}

func TestEveryStateAfterACrashIsLegal(t *testing.T) {
	for name, above := range map[string]func(*Crashable) (blockdev.Device, func()){"Device": nil, "Queue": onQueue(t)} {
		for _, zeros := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				seed := Seed(t)
				d := NewCrashable(256<<10, seed)
				d.SetDiscardZeros(zeros)
				if err := RunCrashes(d, 60, crashConfig(seed), above); err != nil {
					t.Fatal(err)
				}
			})
		}
	}
}

// A crash clone is legal at any time, also while everything goes on.
func TestCrashClonesOfARunningDevice(t *testing.T) {
	seed := Seed(t)
	d := NewCrashable(256<<10, seed)
	h := NewHistory(d.Info().Size, 512)
	done := make(chan error)
	cfg := crashConfig(seed)
	cfg.Ops = 4000
	go func() { done <- RunRandom(Record(d, h), cfg) }()
	for { // at least one, however the machine shares out its time
		mark := h.Mark()
		if err := h.CheckAt(mark, d.CrashClone()); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			if err := h.Check(d.CrashClone()); err != nil {
				t.Fatal(err)
			}
			return
		default:
		}
	}
}

// TestADiskThatLiesIsCaught shows that the checks can fail: for each promise that a
// disk may break, a state or a read is found that is illegal.
func TestADiskThatLiesIsCaught(t *testing.T) {
	for name, lies := range map[string]Lies{
		"Flush": {Flush: true}, "FUA": {FUA: true}, "ZeroFUA": {Zero: true}, "Tear": {Tear: true}, "Read": {Read: true},
	} {
		t.Run(name, func(t *testing.T) {
			seed := Seed(t)
			for try := range uint64(20) {
				d := NewCrashable(256<<10, seed+try)
				d.SetLies(lies)
				if err := RunCrashes(d, 60, crashConfig(seed+try), nil); err != nil {
					if testing.Verbose() {
						t.Logf("caught: %.600v", err)
					}
					// A tear at the edge of what differs leaves a whole block of an older
					// write: caught as well, by another name.
					if strings.Contains(err.Error(), "torn") && !lies.Tear {
						t.Errorf("the message does not tell what is wrong: %v", err)
					}
					return
				}
			}
			t.Error("not caught")
		})
	}
}

func TestHistoryRules(t *testing.T) {
	const bs = 512
	content := func(tag uint64) []byte {
		p := make([]byte, bs)
		if tag != 0 {
			Fill(p, 0, tag)
		}
		return p
	}
	state := func(tag uint64) Reader {
		return ReaderFunc(func(p []byte, off int64) error {
			clear(p)
			copy(p, content(tag))
			return nil
		})
	}
	failed := errors.New("failed")
	for _, c := range []struct {
		name  string
		do    func(h *History)
		legal []uint64 // tags that a crash may leave; 0 = zeros
		not   []uint64
	}{
		{"nothing", func(h *History) {}, []uint64{0}, []uint64{1}},
		{"write", func(h *History) { h.Write(0, content(1), false).Done(nil) }, []uint64{0, 1}, []uint64{2}},
		{"unanswered write", func(h *History) { h.Write(0, content(1), true) }, []uint64{0, 1}, []uint64{2}},
		{"failed write", func(h *History) { h.Write(0, content(1), true).Done(failed); h.Flush().Done(nil) }, []uint64{0, 1}, []uint64{2}},
		{"FUA", func(h *History) { h.Write(0, content(1), true).Done(nil) }, []uint64{1}, []uint64{0}},
		{"flush", func(h *History) { h.Write(0, content(1), false).Done(nil); h.Flush().Done(nil) }, []uint64{1}, []uint64{0}},
		{"failed flush", func(h *History) { h.Write(0, content(1), false).Done(nil); h.Flush().Done(failed) }, []uint64{0, 1}, []uint64{2}},
		{"unanswered flush", func(h *History) { h.Write(0, content(1), false).Done(nil); h.Flush() }, []uint64{0, 1}, []uint64{2}},
		{"flush too early", func(h *History) {
			f := h.Flush()
			h.Write(0, content(1), false).Done(nil)
			f.Done(nil)
		}, []uint64{0, 1}, []uint64{2}},
		{"write answered after the flush began", func(h *History) {
			w := h.Write(0, content(1), false)
			f := h.Flush()
			w.Done(nil)
			f.Done(nil)
		}, []uint64{0, 1}, nil},
		{"write after a durable one", func(h *History) {
			h.Write(0, content(1), true).Done(nil)
			h.Write(0, content(2), false).Done(nil)
			h.Write(0, content(3), false).Done(nil)
		}, []uint64{1, 2, 3}, []uint64{0}},
		{"two durable ones", func(h *History) {
			h.Write(0, content(1), true).Done(nil)
			h.Write(0, content(2), true).Done(nil)
		}, []uint64{2}, []uint64{0, 1}},
		{"two durable ones at the same time", func(h *History) {
			a, b := h.Write(0, content(1), true), h.Write(0, content(2), true)
			a.Done(nil)
			b.Done(nil)
		}, []uint64{1, 2}, []uint64{0}},
		{"two at the same time, a read saw one, flush", func(h *History) {
			a, b := h.Write(0, content(1), false), h.Write(0, content(2), false)
			a.Done(nil)
			b.Done(nil)
			if err := h.Read(0, bs).DoneRead(content(1), nil); err != nil {
				t.Error(err)
			}
			h.Flush().Done(nil)
		}, []uint64{1}, []uint64{0, 2}},
		{"zero", func(h *History) {
			h.Write(0, content(1), true).Done(nil)
			h.Zero(0, bs, true).Done(nil)
		}, []uint64{0}, []uint64{1}},
		{"discard", func(h *History) {
			h.Write(0, content(1), true).Done(nil)
			h.Discard(0, bs, false).Done(nil)
		}, []uint64{0, 1, 2}, nil},
		{"discard and a durable write", func(h *History) {
			h.Discard(0, bs, false).Done(nil)
			h.Write(0, content(1), true).Done(nil)
		}, []uint64{1}, []uint64{0, 2}},
		{"discard that zeroes, flush", func(h *History) {
			h.Write(0, content(1), true).Done(nil)
			h.Discard(0, bs, true).Done(nil)
			h.Flush().Done(nil)
		}, []uint64{0}, []uint64{1}},
		{"much history", func(h *History) {
			for i := range uint64(100) {
				h.Write(0, content(i+10), i%3 == 0).Done(nil)
			}
			h.Flush().Done(nil)
		}, []uint64{109}, []uint64{0, 10, 107, 108}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := NewHistory(4*bs, bs)
			c.do(h)
			for _, tag := range c.legal {
				if err := h.Check(state(tag)); err != nil {
					t.Errorf("%d after a crash: %v", tag, err)
				}
			}
			for _, tag := range c.not {
				if h.Check(state(tag)) == nil {
					t.Errorf("%d after a crash is taken for legal", tag)
				}
			}
		})
	}

	t.Run("reads", func(t *testing.T) {
		h := NewHistory(4*bs, bs)
		see := func(tag uint64) error { return h.Read(0, bs).DoneRead(content(tag), nil) }
		early := h.Read(0, bs)
		w := h.Write(0, content(1), false)
		if see(0) != nil || see(1) != nil {
			t.Error("during a write old and new are legal")
		}
		w.Done(nil)
		if see(0) == nil || see(2) == nil {
			t.Error("after a write only the new is legal")
		}
		if see(1) != nil || early.DoneRead(content(0), nil) != nil {
			t.Error("a legal read is refused")
		}
		if h.Err() == nil {
			t.Error("Err forgot")
		}
	})

	t.Run("restart", func(t *testing.T) {
		h := NewHistory(4*bs, bs)
		h.Write(0, content(1), false).Done(nil)
		if err := h.Restart(state(0)); err != nil {
			t.Fatal(err)
		}
		if h.Check(state(1)) == nil {
			t.Error("what a crash lost came back")
		}
	})
}

// The checker must notice one flipped bit anywhere.
func TestFillTag(t *testing.T) {
	p := make([]byte, 4096)
	Fill(p, 8192, 12345)
	for off := 0; off < len(p); off += 512 {
		if tag, ok := Tag(p[off:off+512], int64(8192+off)); !ok || tag != 12345 {
			t.Errorf("tag of the block at %d: %d, %v", off, tag, ok)
		}
	}
	if tag, ok := Tag(p, 8192); !ok || tag != 12345 {
		t.Errorf("tag of all: %d, %v", tag, ok)
	}
	if _, ok := Tag(p, 8192+512); ok {
		t.Error("a misplaced block has a tag")
	}
	p[700] ^= 4
	if _, ok := Tag(p, 8192); ok {
		t.Error("a damaged block has a tag")
	}
}

func TestFaulty(t *testing.T) {
	d := Faulty(newMem(t), Rule{Match: Match{Ops: []blockdev.Op{blockdev.OpWrite}, Off: 4096, Len: 4096}, Skip: 1, Count: 2, Err: unix.ENOSPC, Partial: true})
	p := Buffer(4096)
	Fill(p, 4096, 1)
	must(t, "write elsewhere", d.WriteAt(p, 0, 0))
	must(t, "skipped", d.WriteAt(p, 4096, 0))
	q := Buffer(4096)
	Fill(q, 4096, 2)
	for range 2 {
		if err := d.WriteAt(q, 4096, 0); !errors.Is(err, unix.ENOSPC) {
			t.Errorf("write: %v", err)
		}
	}
	got := Buffer(4096)
	must(t, "read", d.ReadAt(got, 4096))
	if string(got[:2048]) != string(q[:2048]) || string(got[2048:]) != string(p[2048:]) {
		t.Error("a partial write must do the first half")
	}
	must(t, "used up", d.WriteAt(q, 4096, 0))
	if d.Hits() != 2 {
		t.Errorf("%d hits", d.Hits())
	}

	d.Set(Rule{Match: Match{Ops: []blockdev.Op{blockdev.OpFlush}}, Count: 1, Err: unix.EIO})
	if err := d.Flush(); !errors.Is(err, unix.EIO) || errors.Is(err, blockdev.ErrFlushFailed) {
		t.Errorf("first flush: %v", err)
	}
	for _, err := range []error{d.Flush(), d.WriteAt(p, 0, blockdev.WriteFUA), d.Zero(0, 4096, blockdev.WriteFUA)} {
		if !errors.Is(err, blockdev.ErrFlushFailed) {
			t.Errorf("after a failed flush: %v", err)
		}
	}
	must(t, "an ordinary write", d.WriteAt(p, 0, 0))
	if err := d.TryWriteAt(p, 0, 0); err != nil {
		t.Errorf("no rule cares: %v", err)
	}
}

func TestDelayed(t *testing.T) {
	d := Delayed(newMem(t))
	p := Buffer(4096)
	g := d.Hold(Match{Ops: []blockdev.Op{blockdev.OpWrite}})
	if err := d.TryWriteAt(p, 0, 0); !errors.Is(err, blockdev.ErrWouldBlock) {
		t.Errorf("try at a gate: %v", err)
	}
	done := make(chan error)
	for i := range 3 {
		go func() { q := Buffer(4096); Fill(q, 0, uint64(i)); done <- d.WriteAt(q, 0, 0) }()
	}
	g.Await(t, 3)
	must(t, "a read passes", d.ReadAt(p, 0))
	if _, ok := Tag(p, 0); ok {
		t.Error("a held write took effect")
	}
	g.Pass(1)
	must(t, "write", <-done)
	g.Await(t, 2)
	g.Open()
	must(t, "write", <-done)
	must(t, "write", <-done)

	g = d.HoldAnswer(Match{Ops: []blockdev.Op{blockdev.OpZero}})
	go func() { done <- d.Zero(0, 4096, 0) }()
	g.Await(t, 1)
	must(t, "read", d.ReadAt(p, 0))
	if p[0] != 0 || p[4095] != 0 {
		t.Error("the call must have taken effect before its answer")
	}
	g.Open()
	must(t, "zero", <-done)
}

func TestFull(t *testing.T) {
	d := Full(newMem(t), 8192)
	p := Buffer(16384)
	Fill(p, 0, 1)
	if err := d.WriteAt(p, 0, 0); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("write of more than there is room: %v", err)
	}
	got := Buffer(16384)
	must(t, "read", d.ReadAt(got, 0))
	if string(got[:8192]) != string(p[:8192]) || got[8192] != 0 {
		t.Error("the write must be done as far as there is room")
	}
	must(t, "overwrite", d.WriteAt(p[:8192], 0, 0))
	if err := d.Zero(8192, 512, blockdev.ZeroNoUnmap); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("allocating zero: %v", err)
	}
	must(t, "zero", d.Zero(8192, 4096, 0))
	must(t, "discard", d.Discard(0, 4096))
	if d.Room() != 4096 {
		t.Errorf("room: %d", d.Room())
	}
	must(t, "write into the room", d.WriteAt(p[:4096], 65536, 0))
	d.Grow(512)
	must(t, "write into more room", d.WriteAt(p[:512], 0, 0))
}

// The wrappers must not break the contract when nothing is injected.
func TestWrappersKeepTheContract(t *testing.T) {
	t.Run("Faulty", func(t *testing.T) {
		Run(t, func(t testing.TB) blockdev.Device { return Faulty(newMem(t)) })
	})
	t.Run("Delayed", func(t *testing.T) {
		Run(t, func(t testing.TB) blockdev.Device { return Delayed(newMem(t)) })
	})
	t.Run("Full", func(t *testing.T) {
		Run(t, func(t testing.TB) blockdev.Device { return Full(newMem(t), 1<<40) })
	})
}

func newMem(t testing.TB) blockdev.Device {
	t.Helper()
	d, err := blockdev.Open("mem:2M", blockdev.Options{})
	must(t, "open", err)
	return d
}
