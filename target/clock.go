package target

import "time"

// clock is time as tests want to control it.
type clock interface {
	Now() time.Time
	// AfterFunc calls f once, on a goroutine of its own, d from now unless stopped.
	AfterFunc(d time.Duration, f func()) timer
}

type timer interface{ Stop() bool }

type systemClock struct{}

func (systemClock) Now() time.Time { return time.Now() }
func (systemClock) AfterFunc(d time.Duration, f func()) timer {
	return time.AfterFunc(d, f)
}
