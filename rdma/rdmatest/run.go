package rdmatest

import (
	"flag"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"

	"rdblk/rdma"
)

var seedFlag = flag.Uint64("rdmatest.seed", 0, "seed of the random tests; 0 draws one")

// Option changes how the suite runs.
type Option func(*options)

type options struct {
	addr   netip.Addr
	except map[string]string
}

// WithAddr is the address to listen on and connect to; default 127.0.0.1.
func WithAddr(a netip.Addr) Option { return func(o *options) { o.addr = a } }

// Except names cases, or parts of cases, that a device is known not to keep, with the reason, which each run shows. It is
// for devices only: a provider in this module has no exceptions of its own making. The parts are
//
//	WindowRights/ATTEMPT          one of its attempts ("WindowRights/Read over the end")
//	RemoteKeysRead/ATTEMPT        one of its attempts ("RemoteKeysRead/right missing")
//	RemoteKeysRead/status         a refused Read may come back flushed
//	ZeroLengthSkipsKeys/OP, KEY   one of its attempts ("ZeroLengthSkipsKeys/Write, stale key")
//	SendInvalidateForeign/TARGET  one of what a peer must not invalidate ("SendInvalidateForeign/registered memory")
//	RandomTraffic/both wait       both sides read, but the send queue of one never waits for its Reads
//	RandomTraffic/empty Reads     none of them
//	Depths/lowered                Accept may serve more Reads than it was told to, up to what was asked for
//	EndReasons                    a connection that ends because of a fault may end like an orderly one; all else
//	                              about it is still tested
func Except(cases map[string]string) Option { return func(o *options) { o.except = cases } }

// Run runs the whole suite. open makes a fresh provider for each test.
func Run(t *testing.T, open func(t testing.TB) rdma.Provider, opts ...Option) {
	o := options{addr: netip.AddrFrom4([4]byte{127, 0, 0, 1})}
	for _, f := range opts {
		f(&o)
	}
	for _, what := range slices.Sorted(maps.Keys(o.except)) {
		t.Logf("this device does not keep the contract in %s: %s", what, o.except[what])
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if why := o.except[c.name]; why != "" {
				t.Skipf("this device does not keep the contract here: %s", why)
			}
			p := open(t)
			var dev rdma.Device
			// Registered first, so run last: by then everything made from the device is gone.
			t.Cleanup(func() {
				if dev != nil {
					if err := dev.Close(); err != nil {
						t.Error(err)
					}
				}
			})
			s := NewSuite(t, p, o.addr)
			s.seen = func(d rdma.Device) { dev = d }
			s.except = o.except
			c.run(s)
		})
	}
}

var cases = []struct {
	name string
	run  func(*Suite)
}{
	{"SendSizes", testSendSizes},
	{"SendGatherScatter", testGatherScatter},
	{"SendInline", testInline},
	{"SendOrder", testSendOrder},
	{"WriteSizes", testWriteSizes},
	{"WriteThenSend", testWriteThenSend},
	{"ReadSizes", testReadSizes},
	{"ReadDepth", testReadDepth},
	{"ReadWithoutDepth", testReadWithoutDepth},
	{"Fence", testFence},
	{"Unsignalled", testUnsignalled},
	{"UnsignalledRead", testUnsignalledRead},
	{"RandomTraffic", testRandomTraffic},
	{"TwoQueues", testTwoQueues},
	{"ManyQPs", testManyQPs},

	{"QueueFull", testQueueFull},
	{"PostLimits", testPostLimits},
	{"CreateLimits", testCreateLimits},
	{"CQDepth", testCQDepth},
	{"ReceiverNotReady", testReceiverNotReady},
	{"MessageTooLong", testMessageTooLong},

	{"RemoteKeys", testRemoteKeys},
	{"RemoteKeysRead", testRemoteKeysRead},
	{"ZeroLengthSkipsKeys", testZeroLength},
	{"Windows", testWindows},
	{"WindowsInOnePost", testWindowsInOnePost},
	{"WindowRights", testWindowRights},
	{"WindowOfShutRegion", testWindowOfShutRegion},
	{"SendInvalidate", testSendInvalidate},
	{"SendInvalidateForeign", testSendInvalidateForeign},
	{"WindowOfClosedQP", testWindowOfClosedQP},
	{"DeregisterUnderFire", testDeregister},

	{"PrivateData", testPrivateData},
	{"Reject", testReject},
	{"ConnectFailures", testConnectFailures},
	{"ConnectTwice", testConnectTwice},
	{"Depths", testDepths},
	{"AcceptGone", testAcceptGone},
	{"ListenerClose", testListenerClose},

	{"DisconnectFlushes", testDisconnectFlushes},
	{"DisconnectFlushesReads", testDisconnectFlushesReads},
	{"DisconnectDelivers", testDisconnectDelivers},
	{"DisconnectWakes", testDisconnectWakes},
	{"CloseDropsEverything", testCloseDrops},
	{"CloseOrder", testCloseOrder},
	{"ClosedObjects", testClosedObjects},
	{"BetweenPollAndArm", testBetweenPollAndArm},
	{"SleepingOwners", testSleepingOwners},
	{"ManyOwners", testManyOwners},
	{"PeerNeverPolls", testPeerNeverPolls},
	{"ConnectDisconnectRounds", testRounds},
}

// rng is a seeded generator whose seed a failing test shows.
func rng(t testing.TB) *rand.Rand {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("seed: -rdmatest.seed=%d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// rounds is n, or fewer with -short: a device in an emulated machine is slow.
func rounds(n, short int) int {
	if testing.Short() {
		return short
	}
	return n
}

// fill writes a pattern that differs for every seed and position.
func fill(b []byte, seed uint64) {
	x := seed*0x9E3779B97F4A7C15 + 1
	for i := range b {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b[i] = byte(x)
	}
}

// Resources counts goroutines and open descriptors of the process.
func Resources(t testing.TB) (goroutines, fds int) {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return runtime.NumGoroutine(), len(d) - 1 // one is the directory itself
}

// NoLeak fails unless goroutines and descriptors come back to what they were.
func NoLeak(t testing.TB, goroutines, fds int) {
	t.Helper()
	deadline := time.Now().Add(Patience)
	for {
		g, f := Resources(t)
		if g <= goroutines && f <= fds {
			return
		}
		if time.Now().After(deadline) {
			buf := make([]byte, 1<<20)
			t.Fatalf("%d goroutines and %d descriptors, started with %d and %d\n%s", g, f, goroutines, fds, buf[:runtime.Stack(buf, true)])
		}
		runtime.Gosched()
	}
}
