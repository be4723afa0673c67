package arena

import (
	"flag"
	"math/rand/v2"
	"testing"
	"time"
)

var seed = flag.Int64("seed", 0, "seed of random tests; 0 = from the clock")

func rng(t *testing.T) *rand.Rand {
	s := *seed
	if s == 0 {
		s = time.Now().UnixNano()
	}
	t.Logf("repeat with -seed=%d", s)
	return rand.New(rand.NewPCG(uint64(s), 1))
}

func TestSizes(t *testing.T) {
	a, err := New(1<<20 - 1)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if a.Size() != 1<<20 {
		t.Fatalf("size %d, want it rounded up to 1 MiB", a.Size())
	}
	for _, n := range []int{0, 1, 4096, 4097, 1 << 20} {
		b := a.Alloc(n)
		if b == nil || len(b) != n || cap(b) < MinSize || Addr(b)%MinSize != 0 || !a.Owns(b) {
			t.Fatalf("Alloc(%d): len %d cap %d addr %#x", n, len(b), cap(b), Addr(b))
		}
		if Addr(b)%uint64(min(cap(b), 4096)) != 0 {
			t.Fatalf("Alloc(%d) is not aligned", n)
		}
		a.Free(b)
	}
	for _, n := range []int{-1, 1<<20 + 1, 1 << 62} {
		if a.Alloc(n) != nil {
			t.Fatalf("Alloc(%d) succeeded", n)
		}
	}
	if a.Owns(make([]byte, 10)) || a.Owns(nil) {
		t.Fatal("Owns claims foreign memory")
	}
}

// Live buffers never overlap, keep what their users wrote, and when all have come
// back the largest size is available again.
func TestRandomUse(t *testing.T) {
	r := rng(t)
	a, err := New(4 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	type held struct {
		b   []byte
		tag byte
	}
	var live []held
	free := func(i int) {
		h := live[i]
		for _, c := range h.b[:cap(h.b)] {
			if c != h.tag {
				t.Fatalf("a buffer of %d bytes was overwritten by another user", len(h.b))
			}
		}
		a.Free(h.b[:r.IntN(len(h.b)+1)]) // a prefix is good enough
		live[i] = live[len(live)-1]
		live = live[:len(live)-1]
	}
	for i := range 20000 {
		if len(live) > 0 && (r.IntN(2) == 0 || len(live) > 300) {
			free(r.IntN(len(live)))
			continue
		}
		n := 1 << r.IntN(22)
		b := a.Alloc(1 + r.IntN(n))
		if b == nil {
			if len(live) == 0 {
				t.Fatal("an empty arena gave nothing")
			}
			continue
		}
		h := held{b, byte(i)}
		for j := range b[:cap(b)] {
			b[:cap(b)][j] = h.tag
		}
		live = append(live, h)
		sum := 0
		for _, h := range live {
			sum += cap(h.b)
		}
		if sum != a.InUse() || a.Peak() < sum {
			t.Fatalf("InUse %d Peak %d, live buffers hold %d", a.InUse(), a.Peak(), sum)
		}
	}
	for len(live) > 0 {
		free(0)
	}
	if a.InUse() != 0 {
		t.Fatalf("%d bytes in use after everything was freed", a.InUse())
	}
	for o, l := range a.free {
		if len(l) > len(a.state)>>o+1 {
			t.Fatalf("free list of order %d grew to %d entries", o, len(l))
		}
	}
	if b := a.Alloc(4 << 20); b == nil {
		t.Fatal("free neighbours did not merge")
	}
}

func TestFreeOfForeignMemoryPanics(t *testing.T) {
	a, err := New(64 << 10)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	b := a.Alloc(8192)
	for name, x := range map[string][]byte{"heap": make([]byte, 4096), "inner": b[4096:], "odd": b[1:]} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("Free(%s) did not panic", name)
				}
			}()
			a.Free(x)
		}()
	}
	a.Free(b)
	defer func() {
		if recover() == nil {
			t.Error("double Free did not panic")
		}
	}()
	a.Free(b)
}

func TestAllocDoesNotAllocate(t *testing.T) {
	a, err := New(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if n := testing.AllocsPerRun(1000, func() {
		x, y := a.Alloc(4096), a.Alloc(128<<10)
		a.Free(x)
		a.Free(y)
	}); n != 0 {
		t.Fatalf("%v allocations per round", n)
	}
}

func BenchmarkAllocFree4K(b *testing.B) {
	a, err := New(64 << 20)
	if err != nil {
		b.Fatal(err)
	}
	defer a.Close()
	for b.Loop() {
		a.Free(a.Alloc(4096))
	}
}
