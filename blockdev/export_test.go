package blockdev

import "errors"

// LackEverything makes a file or disk believe that its store can do nothing but
// read, write and fdatasync, as some can.
func LackEverything(dev Device) {
	d := dev.(*file)
	d.noDsync.Store(true)
	d.noPunch.Store(true)
	d.noZeroRange.Store(true)
	d.noZeroOut.Store(true)
	d.noDiscard.Store(true)
	d.tryRead.Store(int32(nowaitNever))
	d.tryWrite.Store(int32(nowaitNever))
}

// FailSync makes every flush of a file fail.
func FailSync(dev Device) {
	dev.(*file).flush.sync = func() error { return errors.New("failed by the test") }
}
