// Package blockdevtest holds devices to the contract of package blockdev and
// breaks them on purpose.
//
//   - Run is the contract in executable form. Every device runs it: as it is, over its
//     Try methods, and over a Queue. RunQueue is the contract of queues.
//   - Faulty, Delayed and Full wrap a device: errors by rule, calls that stop at
//     a gate until the test lets them go, space that runs out.
//   - Crashable is a disk with a volatile cache whose power can be cut: Crash gives one of the
//     states that may be left. History records operations where they were issued, however
//     many layers above, and tells whether what is read back is legal.
//
// A crash test through any number of layers: put a Crashable at the bottom, at the
// client call History.Write and the like around each request (or wrap the client's Device with
// Record), cut the power with Crash while requests are in flight, end the layers, and give what Crash
// returned to History.Restart, which names every block that may not be so. RunCrashes does all of
// it for a client that is a Device.
//
// Random tests print their seed and take it back with -blockdev.seed.
package blockdevtest

import (
	"flag"
	"math/rand/v2"
	"testing"
)

var seedFlag = flag.Uint64("blockdev.seed", 0, "seed of the random block device tests, 0 = a new one each time")

// Seed gives a seed for a random test: from the flag, or a new one. The test's
// log tells how to repeat it.
func Seed(t testing.TB) uint64 {
	t.Helper()
	s := *seedFlag
	for s == 0 {
		s = rand.Uint64()
	}
	t.Logf("random test: repeat with -blockdev.seed=%d", s)
	return s
}

// NewRand is a generator for one part of a test with a seed.
func NewRand(seed, part uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, part)) }
