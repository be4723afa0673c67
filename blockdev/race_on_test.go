//go:build race

package blockdev

// The race detector's own bookkeeping allocates.
const raceDetector = true
