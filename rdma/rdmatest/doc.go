// Package rdmatest is the contract of package rdma as a test suite: every
// provider runs it and passes.
//
//	func TestContract(t *testing.T) {
//		rdmatest.Run(t, func(t testing.TB) rdma.Provider { ... })
//	}
//
// Both ends of a connection are driven by the test's own goroutine, which owns
// both completion queues and polls them in turn; only the connection managers
// use other goroutines. A behaviour that only one provider has is a bug in the
// other or in the contract.
//
// Pair, End and their helpers are exported for providers' own tests and
// benchmarks.
package rdmatest
