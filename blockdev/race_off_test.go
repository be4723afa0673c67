//go:build !race

package blockdev

const raceDetector = false
