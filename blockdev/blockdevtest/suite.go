package blockdevtest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/blockdev"
	"rdblk/internal/worker"
)

// Option changes what Run expects.
type Option func(*suite)

// Forgets says that the device forgets what is written and reads as zeros.
func Forgets() Option { return func(s *suite) { s.forgets = true } }

// Short makes the random parts short: for devices that take milliseconds per call.
func Short() Option { return func(s *suite) { s.short = true } }

type suite struct {
	open    func(testing.TB) blockdev.Device
	forgets bool
	short   bool
}

// Run is the contract of blockdev.Device in executable form. open gives a fresh device of
// at least 1 MiB with any content, whose store nobody else uses; Run closes it.
//
// The whole suite runs on the device itself, through its Try methods if it has
// some, and through a Queue: its own if it is a QueueDevice, else from blockdev.NewQueue.
func Run(t *testing.T, open func(testing.TB) blockdev.Device, opts ...Option) {
	s := &suite{open: open}
	for _, o := range opts {
		o(s)
	}
	d := open(t)
	_, try := d.(blockdev.TryDevice)
	_, queues := d.(blockdev.QueueDevice)
	if err := d.Close(); err != nil {
		t.Fatalf("close of a fresh device: %v", err)
	}

	t.Run("Sync", s.all)
	if try {
		via := *s
		via.open = func(t testing.TB) blockdev.Device { return ViaTry(open(t).(blockdev.TryDevice)) }
		t.Run("Try", via.all)
	}
	via := *s
	via.open = func(t testing.TB) blockdev.Device {
		d := open(t)
		return ViaQueue(openQueue(t, d), d)
	}
	t.Run("Queue", via.all)
	t.Run("QueueContract", func(t *testing.T) {
		RunQueue(t, func(t testing.TB) (blockdev.Queue, blockdev.Device) {
			d := open(t)
			q := openQueue(t, d)
			t.Cleanup(func() { closeQueue(t, q); d.Close() })
			return q, d
		}, opts...)
	})
	if !queues && try { // the executor's way for everything
		t.Run("QueueWithoutTry", func(t *testing.T) {
			RunQueue(t, func(t testing.TB) (blockdev.Queue, blockdev.Device) {
				d := open(t)
				q := openQueue(t, struct{ blockdev.Device }{d})
				t.Cleanup(func() { closeQueue(t, q); d.Close() })
				return q, d
			}, opts...)
		})
	}
}

func openQueue(t testing.TB, d blockdev.Device) blockdev.Queue {
	t.Helper()
	if qd, ok := d.(blockdev.QueueDevice); ok {
		q, err := qd.OpenQueue(0)
		if err != nil {
			t.Fatalf("open queue 0: %v", err)
		}
		return q
	}
	w, err := worker.New(worker.Config{Name: "blockdevtest"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	q, err := blockdev.NewQueue(d, w, blockdev.QueueConfig{ArenaSize: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	return q
}

func closeQueue(t testing.TB, q blockdev.Queue) {
	if err := q.Worker().Call(q.Close); err != nil {
		t.Errorf("close queue: %v", err)
	}
}

func (s *suite) all(t *testing.T) {
	for _, c := range []struct {
		name string
		run  func(*testing.T, blockdev.Device)
	}{
		{"Info", s.info},
		{"WriteRead", s.writeRead},
		{"Bounds", s.bounds},
		{"BufferAlignment", s.bufferAlignment},
		{"ZeroLength", s.zeroLength},
		{"Zero", s.zero},
		{"Discard", s.discard},
		{"Flush", s.flush},
		{"BlocksAreWhole", s.blocksAreWhole},
		{"ConcurrentRanges", s.concurrentRanges},
		{"Random", s.random},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := s.open(t)
			defer d.Close()
			if d.Info().ReadOnly {
				t.Fatal("the suite needs a writable device; use RunReadOnly")
			}
			c.run(t, d)
		})
	}
	t.Run("CloseWhileBusy", s.closeWhileBusy)
}

func (s *suite) info(t *testing.T, d blockdev.Device) {
	in := d.Info()
	power := func(name string, n int) {
		if n <= 0 || n&(n-1) != 0 {
			t.Errorf("%s = %d, want a power of two", name, n)
		}
	}
	power("BlockSize", in.BlockSize)
	power("PhysBlock", in.PhysBlock)
	if in.BlockSize < blockdev.MinBlockSize || in.BlockSize > blockdev.MaxBlockSize {
		t.Errorf("BlockSize = %d, want 512 … 65536", in.BlockSize)
	}
	if in.PhysBlock < in.BlockSize {
		t.Errorf("PhysBlock %d < BlockSize %d", in.PhysBlock, in.BlockSize)
	}
	if in.Size <= 0 || in.Size%int64(in.BlockSize) != 0 {
		t.Errorf("Size = %d, want whole blocks of %d", in.Size, in.BlockSize)
	}
	if in.MaxIO < 0 || in.MaxIO%in.BlockSize != 0 {
		t.Errorf("MaxIO = %d, want whole blocks of %d", in.MaxIO, in.BlockSize)
	}
	if in.MemAlign > 1 {
		power("MemAlign", in.MemAlign)
		if in.MemAlign > 4096 {
			t.Errorf("MemAlign = %d: arenas align to 4096", in.MemAlign)
		}
	}
	if in.DiscardZeros && !in.Discard {
		t.Error("DiscardZeros without Discard")
	}
	if in.Name == "" {
		t.Error("no Name")
	}
	if in != d.Info() {
		t.Error("Info changes by itself")
	}
}

// lengths are the transfer sizes that tests try, in bytes.
func lengths(in blockdev.Info) []int {
	bs := in.BlockSize
	l := []int{bs, 2 * bs, 3 * bs, 7 * bs, 64 << 10, 64<<10 + bs, 256<<10 - bs, 512 << 10}
	if in.MaxIO > 0 && int64(in.MaxIO) < in.Size/2 {
		l = append(l, in.MaxIO)
	}
	return l
}

// limit keeps n within MaxIO.
func limit(in blockdev.Info, n int) int {
	if in.MaxIO > 0 && n > in.MaxIO {
		return in.MaxIO
	}
	return n
}

func (s *suite) expect(p []byte) []byte {
	if s.forgets {
		return make([]byte, len(p))
	}
	return p
}

func must(t testing.TB, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

func (s *suite) writeRead(t *testing.T, d blockdev.Device) {
	in := d.Info()
	bs := int64(in.BlockSize)
	tag := uint64(1)
	for _, n := range lengths(in) {
		n := int64(limit(in, n)) / bs * bs
		for _, off := range []int64{0, bs, 3 * bs, in.Size/2/bs*bs - bs, in.Size - n} {
			if off < 0 || off+n > in.Size {
				continue
			}
			for _, flags := range []blockdev.WriteFlags{0, blockdev.WriteFUA} {
				tag++
				// The neighbours must not be touched.
				lo, hi := max(off-bs, 0), min(off+n+bs, in.Size)
				around := Buffer(int(hi - lo))
				Fill(around, lo, tag<<32)
				must(t, "write the surroundings", writeAll(d, around, lo))
				p := Buffer(int(n))
				Fill(p, off, tag)
				must(t, fmt.Sprintf("write %d at %d", n, off), d.WriteAt(p, off, flags))
				copy(around[off-lo:], p)
				got := Buffer(len(around))
				must(t, "read", readAll(d, got, lo))
				if !bytes.Equal(got, s.expect(around)) {
					t.Fatalf("write of %d at %d flags %d: content differs at byte %d of the surroundings from %d", n, off, flags, differ(got, s.expect(around)), lo)
				}
			}
		}
	}
}

func differ(a, b []byte) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}

// readAll and writeAll split to MaxIO.
func readAll(d blockdev.Device, p []byte, off int64) error {
	for in := d.Info(); len(p) > 0; {
		n := limit(in, len(p))
		if err := d.ReadAt(p[:n], off); err != nil {
			return err
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

func writeAll(d blockdev.Device, p []byte, off int64) error {
	for in := d.Info(); len(p) > 0; {
		n := limit(in, len(p))
		if err := d.WriteAt(p[:n], off, 0); err != nil {
			return err
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

func (s *suite) bounds(t *testing.T, d blockdev.Device) {
	in := d.Info()
	bs := int64(in.BlockSize)
	before := Buffer(int(bs))
	Fill(before, in.Size-bs, 77)
	must(t, "write", d.WriteAt(before, in.Size-bs, 0))

	for _, c := range []struct {
		off, n int64
		want   error
	}{
		{in.Size, bs, blockdev.ErrOutOfRange},
		{in.Size - bs, 2 * bs, blockdev.ErrOutOfRange},
		{in.Size + bs, bs, blockdev.ErrOutOfRange},
		{-bs, bs, blockdev.ErrOutOfRange},
		{math.MaxInt64 &^ (bs - 1), bs, blockdev.ErrOutOfRange},
		{math.MaxInt64&^(bs-1) - bs, 2 * bs, blockdev.ErrOutOfRange},
		{math.MinInt64, bs, blockdev.ErrOutOfRange},
		{0, bs / 2, blockdev.ErrUnaligned},
		{bs / 2, bs, blockdev.ErrUnaligned},
		{1, bs, blockdev.ErrUnaligned},
		{0, bs + 1, blockdev.ErrUnaligned},
		{in.Size - bs - 1, bs, blockdev.ErrUnaligned},
	} {
		p := Buffer(int(c.n))
		check := func(op string, err error) {
			t.Helper()
			if !errors.Is(err, c.want) {
				t.Errorf("%s of %d at %d: %v, want %v", op, c.n, c.off, err, c.want)
			}
		}
		check("read", d.ReadAt(p, c.off))
		check("write", d.WriteAt(p, c.off, 0))
		check("FUA write", d.WriteAt(p, c.off, blockdev.WriteFUA))
		check("zero", d.Zero(c.off, c.n, 0))
		check("zero without unmap", d.Zero(c.off, c.n, blockdev.ZeroNoUnmap))
		check("discard", d.Discard(c.off, c.n))
	}
	for _, c := range [][2]int64{{0, -bs}, {bs, math.MinInt64}, {bs, math.MaxInt64 &^ (bs - 1)}, {in.Size, math.MaxInt64 &^ (bs - 1)}, {0, in.Size + bs}} {
		if err := d.Zero(c[0], c[1], 0); !errors.Is(err, blockdev.ErrOutOfRange) {
			t.Errorf("zero of %d at %d: %v, want %v", c[1], c[0], err, blockdev.ErrOutOfRange)
		}
		if err := d.Discard(c[0], c[1]); !errors.Is(err, blockdev.ErrOutOfRange) {
			t.Errorf("discard of %d at %d: %v, want %v", c[1], c[0], err, blockdev.ErrOutOfRange)
		}
	}
	got := Buffer(int(bs))
	must(t, "read", d.ReadAt(got, in.Size-bs))
	if !bytes.Equal(got, s.expect(before)) {
		t.Error("a refused call changed the last block")
	}
	if now := d.Info(); now.Size != in.Size {
		t.Errorf("a refused call changed the size from %d to %d", in.Size, now.Size)
	}
}

func (s *suite) bufferAlignment(t *testing.T, d blockdev.Device) {
	in := d.Info()
	p := Buffer(2*in.BlockSize + 8)[8:][:in.BlockSize]
	r, w := d.ReadAt(p, 0), d.WriteAt(p, 0, 0)
	switch {
	case in.MemAlign > 8:
		if _, via := d.(*viaQueue); via {
			return // copies into aligned memory
		}
		if !errors.Is(r, blockdev.ErrUnaligned) || !errors.Is(w, blockdev.ErrUnaligned) {
			t.Errorf("buffer at 8 with MemAlign %d: read %v, write %v, want %v", in.MemAlign, r, w, blockdev.ErrUnaligned)
		}
	case r != nil || w != nil:
		t.Errorf("buffer at 8 with MemAlign %d: read %v, write %v", in.MemAlign, r, w)
	}
}

func (s *suite) zeroLength(t *testing.T, d blockdev.Device) {
	size := d.Info().Size
	for _, off := range []int64{0, size} {
		must(t, "empty read", d.ReadAt(nil, off))
		must(t, "empty write", d.WriteAt(nil, off, 0))
		must(t, "empty FUA write", d.WriteAt(nil, off, blockdev.WriteFUA))
		must(t, "empty zero", d.Zero(off, 0, 0))
		must(t, "empty discard", d.Discard(off, 0))
	}
}

// ranges for zero and discard: off, n in bytes.
func ranges(in blockdev.Info) [][2]int64 {
	bs := int64(in.BlockSize)
	half := in.Size / 2 / bs * bs
	return [][2]int64{{0, bs}, {bs, bs}, {bs, 9 * bs}, {5 * bs, 128 << 10}, {half - bs, 64<<10 + bs}, {half, 256 << 10}, {in.Size - 3*bs, 3 * bs}, {0, in.Size}}
}

func (s *suite) zero(t *testing.T, d blockdev.Device) {
	in := d.Info()
	for i, r := range ranges(in) {
		for _, flags := range []blockdev.WriteFlags{0, blockdev.ZeroNoUnmap, blockdev.WriteFUA, blockdev.ZeroNoUnmap | blockdev.WriteFUA} {
			s.erase(t, d, r[0], r[1], uint64(i)<<8|uint64(flags)+1, true, func() error { return d.Zero(r[0], r[1], flags) })
		}
	}
}

func (s *suite) discard(t *testing.T, d blockdev.Device) {
	in := d.Info()
	for i, r := range ranges(in) {
		s.erase(t, d, r[0], r[1], uint64(i)+1, in.DiscardZeros, func() error { return d.Discard(r[0], r[1]) })
	}
}

// erase fills a range and a margin, calls op for the range and looks at both.
func (s *suite) erase(t *testing.T, d blockdev.Device, off, n int64, tag uint64, zeros bool, op func() error) {
	t.Helper()
	in := d.Info()
	margin := int64(4 * in.PhysBlock)
	lo, hi := max(off-margin, 0), min(off+n+margin, in.Size)
	if hi-lo > 4<<20 { // look at both ends of a large device
		off, n = 0, 2<<20
		lo, hi = off, off+n
	}
	want := Buffer(int(hi - lo))
	Fill(want, lo, tag)
	must(t, "write", writeAll(d, want, lo))
	must(t, fmt.Sprintf("erase %d at %d", n, off), op())
	got := Buffer(len(want))
	must(t, "read", readAll(d, got, lo))
	if zeros {
		clear(want[off-lo : off-lo+n])
	} else {
		copy(want[off-lo:], got[off-lo:off-lo+n]) // whatever it is
	}
	if want = s.expect(want); !bytes.Equal(got, want) {
		t.Fatalf("after erasing %d at %d: differs at %d", n, off, lo+int64(differ(got, want)))
	}
}

func (s *suite) flush(t *testing.T, d blockdev.Device) {
	p := Buffer(d.Info().BlockSize)
	for i := range 10 {
		Fill(p, 0, uint64(i))
		must(t, "write", d.WriteAt(p, 0, 0))
		must(t, "flush", d.Flush())
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 10 {
				if err := d.Flush(); err != nil {
					t.Errorf("flush: %v", err)
				}
			}
		})
	}
	wg.Wait()
}

// blocksAreWhole writes a block again and again while others read it.
func (s *suite) blocksAreWhole(t *testing.T, d blockdev.Device) {
	if s.forgets {
		t.Skip("the device forgets")
	}
	in := d.Info()
	n := 20000
	if s.short {
		n = 200
	}
	limit := time.Now().Add(time.Second) // a queue on a busy machine takes long for a read
	// A block in the middle of a transfer, so that its neighbours move too.
	bs := in.BlockSize
	size := max(bs, 4096)
	whole := func(p []byte) bool {
		for b := 0; b < len(p); b += bs {
			first := binary.LittleEndian.Uint64(p[b:])
			for i := 8; i < bs; i += 8 {
				if binary.LittleEndian.Uint64(p[b+i:]) != first {
					return false
				}
			}
		}
		return true
	}
	must(t, "zero", d.Zero(0, int64(size), 0))
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for w := range 2 {
		wg.Go(func() {
			p := Buffer(size)
			for i := uint64(w); ; i += 2 {
				select {
				case <-stop:
					return
				default:
				}
				for j := 0; j < len(p); j += 8 {
					binary.LittleEndian.PutUint64(p[j:], i)
				}
				var err error
				if i%64 == 1 {
					err = d.Zero(0, int64(size), 0)
				} else {
					err = d.WriteAt(p, 0, 0)
				}
				if err != nil {
					t.Errorf("write: %v", err)
					return
				}
			}
		})
	}
	p := Buffer(size)
	for i := range n {
		if i%64 == 0 && time.Now().After(limit) {
			break
		}
		must(t, "read", d.ReadAt(p, 0))
		if !whole(p) {
			t.Error("a read returned a mixture of two writes within one block")
			break
		}
	}
	close(stop)
	wg.Wait()
}

func (s *suite) concurrentRanges(t *testing.T, d blockdev.Device) {
	in := d.Info()
	bs := int64(in.BlockSize)
	const workers = 8
	part := in.Size / workers / bs * bs
	rounds := 50
	if s.short {
		rounds = 5
	}
	seed := Seed(t)
	var wg sync.WaitGroup
	for w := range int64(workers) {
		wg.Go(func() {
			rng := NewRand(seed, uint64(w))
			for i := range rounds {
				n := bs * (1 + rng.Int64N(min(part/bs, max(1, int64(limit(in, 256<<10))/bs))))
				off := w*part + bs*rng.Int64N((part-n)/bs+1)
				p, got := Buffer(int(n)), Buffer(int(n))
				Fill(p, off, uint64(w)<<32|uint64(i))
				if err := d.WriteAt(p, off, 0); err != nil {
					t.Errorf("write: %v", err)
					return
				}
				if err := d.ReadAt(got, off); err != nil {
					t.Errorf("read: %v", err)
					return
				}
				if !bytes.Equal(got, s.expect(p)) {
					t.Errorf("worker %d round %d: %d bytes at %d differ at %d", w, i, n, off, differ(got, s.expect(p)))
					return
				}
			}
		})
	}
	wg.Wait()
}

func (s *suite) random(t *testing.T, d blockdev.Device) {
	if s.forgets {
		t.Skip("the device forgets")
	}
	seed := Seed(t)
	cfg := RandomConfig{Seed: seed, Ops: 2000, Workers: 4}
	if s.short {
		cfg.Ops = 200
	}
	in := d.Info()
	h := NewHistory(in.Size, in.BlockSize)
	must(t, "read the content", h.Adopt(d))
	r := Record(d, h)
	must(t, "random operations", RunRandom(r, cfg))
	must(t, "flush", r.Flush())
	must(t, "content at the end", h.CheckCurrent(d))
	must(t, "history", h.Err())
	// Everything is flushed, so a crash may leave only this.
	must(t, "state after a flush", h.Check(d))
}

func (s *suite) closeWhileBusy(t *testing.T) {
	d := s.open(t)
	in := d.Info()
	var wg, started sync.WaitGroup
	for w := range 6 {
		started.Add(1)
		wg.Go(func() {
			p := Buffer(limit(in, 64<<10))
			begun := false
			for i := 0; ; i++ {
				off := int64(0)
				var err error
				switch w {
				case 0:
					err = d.WriteAt(p, off, 0)
				case 1:
					err = d.Zero(off, int64(len(p)), 0)
				case 2:
					err = d.Discard(off, int64(len(p)))
				case 3:
					err = d.Flush()
				default:
					err = d.ReadAt(p, off)
				}
				if !begun {
					begun = true
					started.Done()
				}
				if err != nil {
					if !errors.Is(err, blockdev.ErrClosed) {
						t.Errorf("call %d of worker %d during Close: %v, want %v", i, w, err, blockdev.ErrClosed)
					}
					return
				}
			}
		})
	}
	started.Wait()
	must(t, "close", d.Close())
	wg.Wait()
	p := Buffer(in.BlockSize)
	for op, err := range map[string]error{
		"read": d.ReadAt(p, 0), "write": d.WriteAt(p, 0, 0), "zero": d.Zero(0, int64(in.BlockSize), 0),
		"discard": d.Discard(0, int64(in.BlockSize)), "flush": d.Flush(), "close": d.Close(),
	} {
		if !errors.Is(err, blockdev.ErrClosed) {
			t.Errorf("%s after Close: %v, want %v", op, err, blockdev.ErrClosed)
		}
	}
	if d.Info().BlockSize != in.BlockSize {
		t.Error("Info after Close is not what it was")
	}
}

// RunReadOnly is the part of the contract that a read-only device keeps.
func RunReadOnly(t *testing.T, open func(testing.TB) blockdev.Device) {
	d := open(t)
	defer d.Close()
	in := d.Info()
	if !in.ReadOnly {
		t.Fatal("Info.ReadOnly is not set")
	}
	if in.Discard || in.DiscardZeros || in.WriteZeroes {
		t.Errorf("a read-only device offers modifications: %+v", in)
	}
	before, p := Buffer(in.BlockSize), Buffer(in.BlockSize)
	must(t, "read", d.ReadAt(before, 0))
	Fill(p, 0, 4711)
	for op, err := range map[string]error{
		"write": d.WriteAt(p, 0, 0), "FUA write": d.WriteAt(p, 0, blockdev.WriteFUA),
		"zero": d.Zero(0, int64(in.BlockSize), 0), "discard": d.Discard(0, int64(in.BlockSize)),
	} {
		if !errors.Is(err, blockdev.ErrReadOnly) {
			t.Errorf("%s: %v, want %v", op, err, blockdev.ErrReadOnly)
		}
	}
	if td, ok := d.(blockdev.TryDevice); ok {
		if err := td.TryWriteAt(p, 0, 0); !errors.Is(err, blockdev.ErrReadOnly) && !errors.Is(err, blockdev.ErrWouldBlock) {
			t.Errorf("try write: %v, want %v", err, blockdev.ErrReadOnly)
		}
	}
	must(t, "flush", d.Flush())
	must(t, "read", d.ReadAt(p, 0))
	if !bytes.Equal(p, before) {
		t.Error("a refused write changed the content")
	}
}

// RandomConfig tells RunRandom what to do.
type RandomConfig struct {
	Seed    uint64
	Ops     int // in all
	Workers int // operations at one time
	MaxLen  int // longest in bytes; 0 = 64 KiB
	// Window is how much of the device is used, from its start, in bytes; 0 = 1 MiB. A small one makes overlaps.
	Window int64
	// Flushes is one in so many; 0 = 40.
	Flushes int
	// Stop, if not nil, ends the run early without an error when an operation fails with it.
	Stop error
}

// RunRandom makes random operations on d at the same time. Give it a device from
// Record: it looks at errors only. It returns the first error.
func RunRandom(d blockdev.Device, cfg RandomConfig) error {
	in := d.Info()
	bs := int64(in.BlockSize)
	if cfg.MaxLen == 0 {
		cfg.MaxLen = 64 << 10
	}
	if cfg.Window == 0 {
		cfg.Window = 1 << 20
	}
	if cfg.Flushes == 0 {
		cfg.Flushes = 40
	}
	window := min(cfg.Window, in.Size) / bs
	most := min(max(1, int64(limit(in, cfg.MaxLen))/bs), window)
	var mu sync.Mutex
	var first error
	failed := func(err error) {
		mu.Lock()
		defer mu.Unlock()
		if first == nil {
			first = err
		}
	}
	var wg sync.WaitGroup
	for w := range cfg.Workers {
		wg.Go(func() {
			rng := NewRand(cfg.Seed, uint64(w)+1)
			buf := Buffer(int(most * bs))
			for i := range cfg.Ops / cfg.Workers {
				n := 1 + rng.Int64N(most)
				if rng.IntN(2) == 0 {
					n = min(1+rng.Int64N(8), most)
				}
				off := rng.Int64N(window-n+1) * bs
				p := buf[:n*bs]
				var flags blockdev.WriteFlags
				if rng.IntN(6) == 0 {
					flags = blockdev.WriteFUA
				}
				var err error
				switch k := rng.IntN(100); {
				case rng.IntN(cfg.Flushes) == 0:
					err = d.Flush()
				case k < 45:
					Fill(p, off, cfg.Seed<<40^uint64(w+1)<<32^uint64(i+1))
					err = d.WriteAt(p, off, flags)
				case k < 55:
					if rng.IntN(2) == 0 {
						flags |= blockdev.ZeroNoUnmap
					}
					err = d.Zero(off, n*bs, flags)
				case k < 60:
					err = d.Discard(off, n*bs)
				default:
					err = d.ReadAt(p, off)
				}
				if err != nil {
					if cfg.Stop == nil || !errors.Is(err, cfg.Stop) {
						failed(err)
					}
					return
				}
			}
		})
	}
	wg.Wait()
	return first
}

// RunCrashes makes rounds of random operations on a Crashable, cuts the power in
// the middle of each, and checks what is left. above, if not nil, puts layers on
// the disk (a queue, a server and its client) and returns what the operations
// go to and how to take it down after the crash. It returns the first illegal state.
func RunCrashes(d *Crashable, rounds int, cfg RandomConfig, above func(*Crashable) (dev blockdev.Device, down func())) error {
	in := d.Info()
	h := NewHistory(in.Size, in.BlockSize)
	rng := NewRand(cfg.Seed, 0xdead)
	for round := range rounds {
		dev, down := blockdev.Device(d), func() {}
		if above != nil {
			dev, down = above(d)
		}
		c := &crashAfter{Device: Record(dev, h), left: 1 + rng.IntN(max(1, cfg.Ops-1)), crash: make(chan struct{})}
		cfg := cfg
		cfg.Seed += uint64(round) * 1000003
		cfg.Stop = unix.EIO
		done := make(chan struct{})
		var err error
		go func() { err = RunRandom(c, cfg); close(done) }()
		select {
		case <-c.crash:
		case <-done:
		}
		next := d.Crash()
		<-done
		down()
		if err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if err := h.Restart(next); err != nil {
			return fmt.Errorf("round %d, after %d operations: %w", round, h.Ops(), err)
		}
		d = next
	}
	return h.Err()
}
