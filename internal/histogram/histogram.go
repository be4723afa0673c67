// Package histogram counts latencies in fixed buckets, cheaply enough to sit on
// the path of every I/O.
//
// A Histogram has one writer (the worker that owns it) and any number of
// readers: Observe is a handful of nanoseconds, takes no lock and does not
// allocate; Snapshot may be called from any goroutine at any time. What several
// workers counted is put together with Snapshot.Merge.
//
// The buckets are the 1-2-5 series from 10 µs to 10 s, the same in both
// programs, so that what one exports can be laid beside the other. Fine has
// narrower buckets, for benchmarks that print percentiles.
package histogram

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// NumBuckets is the number of bounded buckets; one more counts what is above the last bound.
const NumBuckets = 19

// bounds are the inclusive upper bounds in nanoseconds.
var bounds = [NumBuckets]uint64{
	10_000, 20_000, 50_000,
	100_000, 200_000, 500_000,
	1_000_000, 2_000_000, 5_000_000,
	10_000_000, 20_000_000, 50_000_000,
	100_000_000, 200_000_000, 500_000_000,
	1_000_000_000, 2_000_000_000, 5_000_000_000,
	10_000_000_000,
}

// first is, by the bit length of a duration, the first bucket that it can be in.
// A doubling of the duration crosses at most two bounds, so that few comparisons are left.
var first = func() (t [65]uint8) {
	for n := range t {
		low := uint64(0) // the smallest number of n bits
		if n > 0 {
			low = 1 << (n - 1)
		}
		i := 0
		for i < NumBuckets && bounds[i] < low {
			i++
		}
		t[n] = uint8(i)
	}
	return t
}()

func bucket(ns uint64) int {
	i := int(first[bits.Len64(ns)])
	for i < NumBuckets && ns > bounds[i] {
		i++
	}
	return i
}

// Bounds returns the inclusive upper bounds of the buckets, ascending.
func Bounds() []time.Duration {
	d := make([]time.Duration, NumBuckets)
	for i, b := range bounds {
		d[i] = time.Duration(b)
	}
	return d
}

// A Histogram counts durations. The zero value is empty and ready. It must not be
// copied after the first Observe.
type Histogram struct {
	sum    atomic.Uint64 // nanoseconds; wraps after 584 years of waiting
	counts [NumBuckets + 1]atomic.Uint64
}

// Observe counts d; a negative duration (a clock that was set back) counts as
// zero. Only one goroutine at a time may call it.
func (h *Histogram) Observe(d time.Duration) {
	if d < 0 {
		d = 0
	}
	c := &h.counts[bucket(uint64(d))]
	c.Store(c.Load() + 1)
	h.sum.Store(h.sum.Load() + uint64(d))
}

// Snapshot copies the counters. Taken while the writer runs it may be short of
// the observation that is just being made, never torn or decreasing.
func (h *Histogram) Snapshot() Snapshot {
	var s Snapshot
	for i := range h.counts {
		s.Counts[i] = h.counts[i].Load()
	}
	s.Sum = time.Duration(h.sum.Load())
	return s
}

// A Snapshot is the content of one histogram, or of several merged ones.
type Snapshot struct {
	// Counts[i] is how many observations were in (Bounds()[i-1], Bounds()[i]]; the
	// last entry is what was above the last bound. Not cumulative.
	Counts [NumBuckets + 1]uint64 `json:"counts"`
	// Sum is the sum of all observations.
	Sum time.Duration `json:"sum_ns"`
}

// Count is the number of observations.
func (s *Snapshot) Count() uint64 {
	var n uint64
	for _, c := range s.Counts {
		n += c
	}
	return n
}

// Mean is the average, zero when there are no observations.
func (s *Snapshot) Mean() time.Duration {
	n := s.Count()
	if n == 0 {
		return 0
	}
	return s.Sum / time.Duration(n)
}

// Merge adds what o counted.
func (s *Snapshot) Merge(o Snapshot) {
	for i, c := range o.Counts {
		s.Counts[i] += c
	}
	s.Sum += o.Sum
}

// Sub takes away an earlier snapshot of the same histogram: what is left is what happened between.
func (s *Snapshot) Sub(earlier Snapshot) {
	for i, c := range earlier.Counts {
		s.Counts[i] -= c
	}
	s.Sum -= earlier.Sum
}

// Quantile estimates the duration that the share q (0 … 1) of the observations
// did not exceed, interpolating inside a bucket. It is exact to the bucket only.
// What is above the last bound is given as the last bound; without observations it is zero.
func (s *Snapshot) Quantile(q float64) time.Duration {
	n := s.Count()
	if n == 0 {
		return 0
	}
	rank := min(max(q, 0), 1) * float64(n)
	var below float64
	for i, c := range s.Counts {
		if c == 0 || below+float64(c) < rank {
			below += float64(c)
			continue
		}
		if i == NumBuckets {
			break
		}
		low := uint64(0)
		if i > 0 {
			low = bounds[i-1]
		}
		part := max(rank-below, 0) / float64(c)
		return time.Duration(float64(low) + part*float64(bounds[i]-low))
	}
	return time.Duration(bounds[NumBuckets-1])
}
