package histogram

import (
	"math/bits"
	"time"
)

// Fine resolves every duration to about 3 % (32 steps per power of two of
// nanoseconds), for benchmarks that print percentiles. One goroutine uses it at a
// time; Merge puts several together. About 15 KiB.
type Fine struct {
	counts [fineBuckets]uint64
	n      uint64
	sum    uint64
	max    uint64
}

const (
	fineBits    = 5
	fineSteps   = 1 << fineBits
	fineBuckets = (64-fineBits)*fineSteps + fineSteps
)

// fineBucket: the first 32 buckets are exact, then each power of two has 32 steps.
func fineBucket(ns uint64) int {
	if ns < fineSteps {
		return int(ns)
	}
	shift := bits.Len64(ns) - 1 - fineBits
	return shift<<fineBits + int(ns>>shift)
}

// fineUpper is the largest duration in bucket i.
func fineUpper(i int) uint64 {
	if i < fineSteps {
		return uint64(i)
	}
	shift := i>>fineBits - 1
	return (uint64(i&(fineSteps-1))+fineSteps+1)<<shift - 1
}

// Observe counts d; negative counts as zero.
func (f *Fine) Observe(d time.Duration) {
	ns := uint64(max(d, 0))
	f.counts[fineBucket(ns)]++
	f.n++
	f.sum += ns
	f.max = max(f.max, ns)
}

// Merge adds what o counted.
func (f *Fine) Merge(o *Fine) {
	for i, c := range &o.counts {
		f.counts[i] += c
	}
	f.n += o.n
	f.sum += o.sum
	f.max = max(f.max, o.max)
}

// Count is the number of observations.
func (f *Fine) Count() uint64 { return f.n }

// Max is the longest observation.
func (f *Fine) Max() time.Duration { return time.Duration(f.max) }

// Mean is the average, zero when there are no observations.
func (f *Fine) Mean() time.Duration {
	if f.n == 0 {
		return 0
	}
	return time.Duration(f.sum / f.n)
}

// Quantile is the upper end of the bucket that the share q (0 … 1) of the
// observations reaches into, never above Max; zero without observations.
func (f *Fine) Quantile(q float64) time.Duration {
	rank := min(max(q, 0), 1) * float64(f.n)
	var sum uint64
	for i, c := range &f.counts {
		sum += c
		if c != 0 && float64(sum) >= rank {
			return time.Duration(min(fineUpper(i), f.max))
		}
	}
	return time.Duration(f.max)
}
