package histogram

import (
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"
)

func TestBucketIsTheFirstBoundNotBelow(t *testing.T) {
	want := func(ns uint64) int {
		for i, b := range bounds {
			if ns <= b {
				return i
			}
		}
		return NumBuckets
	}
	var in []uint64
	for _, b := range bounds {
		in = append(in, b-1, b, b+1)
	}
	for n := range 64 {
		in = append(in, 1<<n-1, 1<<n, 1<<n+1)
	}
	in = append(in, 0, math.MaxUint64)
	for _, ns := range in {
		if got := bucket(ns); got != want(ns) {
			t.Errorf("bucket(%d) = %d, want %d", ns, got, want(ns))
		}
	}
}

func TestBoundsRunFromTenMicrosecondsToTenSeconds(t *testing.T) {
	b := Bounds()
	if b[0] != 10*time.Microsecond || b[len(b)-1] != 10*time.Second || len(b) != NumBuckets {
		t.Fatalf("bounds %v", b)
	}
	for i := 1; i < len(b); i++ {
		if r := float64(b[i]) / float64(b[i-1]); r < 2 || r > 2.5 {
			t.Errorf("bound %v is %v times the one before", b[i], r)
		}
	}
}

func TestObserveMergeSub(t *testing.T) {
	var a, b Histogram
	a.Observe(-time.Second) // counts as 0
	a.Observe(10 * time.Microsecond)
	a.Observe(11 * time.Microsecond)
	b.Observe(3 * time.Second)
	b.Observe(time.Hour)
	s := a.Snapshot()
	before := s
	s.Merge(b.Snapshot())
	if s.Count() != 5 || s.Counts[0] != 2 || s.Counts[1] != 1 || s.Counts[17] != 1 || s.Counts[NumBuckets] != 1 {
		t.Fatalf("counts %v", s.Counts)
	}
	if want := time.Hour + 3*time.Second + 21*time.Microsecond; s.Sum != want || s.Mean() != want/5 {
		t.Fatalf("sum %v mean %v", s.Sum, s.Mean())
	}
	s.Sub(before)
	if s != b.Snapshot() {
		t.Fatalf("after Sub %v", s)
	}
}

func TestQuantile(t *testing.T) {
	var empty Snapshot
	if empty.Quantile(0.5) != 0 || empty.Mean() != 0 {
		t.Error("empty histogram has a quantile or a mean")
	}
	var h Histogram
	for range 99 {
		h.Observe(150 * time.Microsecond) // bucket (100 µs, 200 µs]
	}
	h.Observe(time.Minute)
	s := h.Snapshot()
	for _, c := range []struct {
		q        float64
		low, upp time.Duration
	}{
		{-1, 100 * time.Microsecond, 100 * time.Microsecond},
		{0.5, 149 * time.Microsecond, 152 * time.Microsecond},
		{0.99, 200 * time.Microsecond, 200 * time.Microsecond},
		{1, 10 * time.Second, 10 * time.Second},
		{2, 10 * time.Second, 10 * time.Second},
	} {
		if got := s.Quantile(c.q); got < c.low || got > c.upp {
			t.Errorf("Quantile(%v) = %v, want %v … %v", c.q, got, c.low, c.upp)
		}
	}
}

func TestFineAgreesWithSortedSamples(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	var a, b Fine
	var all []time.Duration
	for i := range 20000 {
		d := time.Duration(math.Exp(r.Float64() * 25)) // 1 ns … 72 s, even in the logarithm
		all = append(all, d)
		if i%2 == 0 {
			a.Observe(d)
		} else {
			b.Observe(d)
		}
	}
	a.Merge(&b)
	slices.Sort(all)
	if a.Count() != uint64(len(all)) || a.Max() != all[len(all)-1] {
		t.Fatalf("count %d max %v, want %d %v", a.Count(), a.Max(), len(all), all[len(all)-1])
	}
	for _, q := range []float64{0.001, 0.5, 0.9, 0.99, 0.999, 1} {
		want := all[max(int(math.Ceil(q*float64(len(all))))-1, 0)]
		got := a.Quantile(q)
		if got < want || float64(got) > float64(want)*1.04+1 {
			t.Errorf("Quantile(%v) = %v, the samples say %v", q, got, want)
		}
	}
}

func TestFineBucketsTile(t *testing.T) {
	for i := range fineBuckets {
		u := fineUpper(i)
		if fineBucket(u) != i {
			t.Fatalf("upper end %d of bucket %d falls in bucket %d", u, i, fineBucket(u))
		}
		if i+1 < fineBuckets && fineBucket(u+1) != i+1 {
			t.Fatalf("%d falls in bucket %d, not %d", u+1, fineBucket(u+1), i+1)
		}
	}
	if fineBucket(math.MaxUint64) != fineBuckets-1 {
		t.Fatal("the largest duration is outside the last bucket")
	}
}

// Readers run beside the writer: nothing is lost, nothing decreases (and -race is quiet).
func TestSnapshotBesideTheWriter(t *testing.T) {
	const n = 100000
	var h Histogram
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for range 2 {
		wg.Go(func() {
			var last uint64
			for {
				s := h.Snapshot()
				if c := s.Count(); c < last {
					t.Errorf("count fell from %d to %d", last, c)
				} else {
					last = c
				}
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	for i := range n {
		h.Observe(time.Duration(i) * time.Microsecond)
	}
	close(stop)
	wg.Wait()
	if s := h.Snapshot(); s.Count() != n {
		t.Fatalf("%d of %d observations counted", s.Count(), n)
	}
}

func TestObserveDoesNotAllocate(t *testing.T) {
	var h Histogram
	var f Fine
	if n := testing.AllocsPerRun(100, func() { h.Observe(12345); f.Observe(12345) }); n != 0 {
		t.Fatalf("%v allocations per observation", n)
	}
}

func BenchmarkObserve(b *testing.B) {
	var h Histogram
	b.ReportAllocs()
	for i := range b.N {
		h.Observe(time.Duration(i&0xfffff) * 64)
	}
}
