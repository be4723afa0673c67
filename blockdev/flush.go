package blockdev

import (
	"fmt"
	"sync"
	"sync/atomic"
)

// flusher runs a device's synchronisation: one at a time, shared by those who
// wait for the same one, and never again after it has failed.
//
// One at a time is not thrift. Linux reports a failed write-back once per open
// file: of two fdatasync calls that overlap, one gets the error and the other
// success, though its data may be what was lost.
type flusher struct {
	name   string
	sync   func() error
	report func(error) // nil, or told of each failure

	mu      sync.Mutex
	ended   sync.Cond
	running bool
	begun   uint64 // syncs begun
	done    uint64 // syncs ended
	waiting int    // callers that wait for a sync to end
	failed  atomic.Pointer[error]
	busy    *atomic.Uint32 // see Watchable; never nil

	reporting sync.Mutex // held until report has returned
}

func newFlusher(name string, sync func() error, report func(error)) *flusher {
	f := &flusher{name: name, sync: sync, report: report, busy: new(atomic.Uint32)}
	f.ended.L = &f.mu
	return f
}

// Flush returns nil if a sync that began after the call ended well. A caller that
// comes while one is running shares the next one with all others that wait.
func (f *flusher) Flush() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	mine := f.begun + 1
	for f.done < mine {
		if f.running {
			f.waiting++
			f.ended.Wait()
			f.waiting--
			continue
		}
		if err := f.Failed(); err != nil {
			return err
		}
		f.running = true
		f.begun++
		f.mu.Unlock()
		f.busy.Add(1)
		err := f.sync()
		if err != nil {
			err = fmt.Errorf("%s: flush: %w", f.name, err)
			f.fail(err)
		}
		f.busy.Add(^uint32(0))
		f.mu.Lock()
		f.running = false
		f.done++
		f.ended.Broadcast()
		if err != nil {
			return err
		}
	}
	return f.Failed()
}

// fail makes the device failed for ever, at once. Whoever keeps account hears of it
// before anybody else does, and of every failure: each may be news that the kernel tells once.
func (f *flusher) fail(err error) {
	f.reporting.Lock()
	defer f.reporting.Unlock()
	f.failed.CompareAndSwap(nil, &err)
	if f.report != nil {
		f.report(err)
	}
}

// Failed is the error of every durable operation after the first failure, or nil.
func (f *flusher) Failed() error {
	if first := f.failed.Load(); first != nil {
		f.reporting.Lock() // not before it is on record
		f.reporting.Unlock()
		return fmt.Errorf("%w (%w)", ErrFlushFailed, *first)
	}
	return nil
}
