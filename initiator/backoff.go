package initiator

import "time"

// backoff is how long to wait between attempts to reconnect.
type backoff struct {
	first time.Duration // after the first failed attempt
	limit time.Duration // no wait is longer
	loss  time.Duration // requests fail this long after the association ended; negative = never
}

// next is the reconnect policy as a pure function: how long to wait before attempt
// number attempt (0 is the first after a loss), elapsed after the association ended,
// and whether the loss timeout falls into that wait, which is then cut to end there.
// rnd is a random number in [0,1): the wait is between half and all of the exponential
// value, so that hosts that lost one target do not come back in step. Attempt 0 is made
// at once.
func (b backoff) next(attempt int, elapsed time.Duration, rnd float64) (wait time.Duration, lost bool) {
	if attempt > 0 {
		wait = b.first
		for i := 1; i < attempt && wait < b.limit; i++ {
			wait *= 2 // bounded by limit, which Validate bounds: no overflow
		}
		wait = min(wait, b.limit)
		wait = wait/2 + time.Duration(rnd*float64(wait/2))
	}
	if b.loss >= 0 {
		if left := max(b.loss-elapsed, 0); wait >= left {
			return left, true
		}
	}
	return wait, false
}
