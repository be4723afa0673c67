// Command handoff measures what it costs one processor to write where another has just read. Data that goes from program
// to program does so all the time: the kernel's pages for a socket come back from the reader to the writer. In a virtual
// machine the host may move processors between places that share a cache and places that do not, within minutes, and
// the speed of every program with a socket in it changes with that; samples say little without this beside them.
//
// It prints the bytes a second, in GB, at which the writer copies 64 KiB at a time into rings of a size that both caches
// hold and of one that they do not, as JSON.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	piece = 64 << 10
	small = 512 << 10
	large = 32 << 20
	each  = 40 * time.Millisecond
)

func main() {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		fail(err)
	}
	var cpus []int
	for i := 0; len(cpus) < 2 && i < 1024; i++ {
		if set.IsSet(i) {
			cpus = append(cpus, i)
		}
	}
	if len(cpus) < 2 {
		fail(fmt.Errorf("this takes two processors, and there is one"))
	}
	json.NewEncoder(os.Stdout).Encode(map[string]any{"cpus": cpus, "small": measure(cpus, small), "large": measure(cpus, large)})
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "handoff:", err)
	os.Exit(1)
}

func pin(cpu int) {
	runtime.LockOSThread()
	var set unix.CPUSet
	set.Set(cpu)
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		fail(err)
	}
}

// measure lets one processor write round and round in a ring and another read behind it, at most two pieces later.
func measure(cpus []int, size int64) float64 {
	ring := make([]byte, size)
	var written, read atomic.Int64
	var stop atomic.Bool
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		pin(cpus[1])
		buf := make([]byte, piece)
		for !stop.Load() {
			if at := read.Load(); at < written.Load() {
				copy(buf, ring[at%size:][:piece])
				read.Add(piece)
			}
		}
	}()
	result := make(chan float64)
	go func() {
		pin(cpus[0])
		src := make([]byte, piece)
		var busy time.Duration
		var done int64
		begin := time.Now()
		for first := true; first || time.Since(begin) < each; {
			at := written.Load()
			if at-read.Load() > piece {
				continue
			}
			if first && at >= size { // every page is there, and has been on the other side
				first, begin, busy, done = false, time.Now(), 0, 0
			}
			t := time.Now()
			copy(ring[at%size:][:piece], src)
			busy += time.Since(t)
			done += piece
			written.Add(piece)
		}
		result <- float64(done) / busy.Seconds() / 1e9
	}()
	gbs := <-result
	stop.Store(true)
	<-ended
	return gbs
}
