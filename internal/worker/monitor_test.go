package worker

import (
	"errors"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// The thread that CalmMonitor changes is the one that naps while nothing but this goroutine runs.
func TestCalmMonitor(t *testing.T) {
	tid, err := monitor()
	if err != nil {
		t.Fatal(err)
	}
	naps := func() int {
		b, err := os.ReadFile("/proc/self/task/" + tid + "/status")
		if err != nil {
			t.Fatal(err)
		}
		_, rest, _ := strings.Cut(string(b), "\nvoluntary_ctxt_switches:")
		word, _, _ := strings.Cut(rest, "\n")
		n, err := strconv.Atoi(strings.TrimSpace(word))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := naps()
	for end := time.Now().Add(10 * time.Second); naps() < before+5; {
		if time.Now().After(end) {
			t.Fatalf("thread %s has slept %d times in 10 s: it is not the monitor", tid, naps()-before)
		}
	}
	if err := CalmMonitor(); errors.Is(err, fs.ErrPermission) {
		t.Skipf("no CAP_SYS_NICE: %v", err)
	} else if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile("/proc/" + tid + "/timerslack_ns")
	if want := strconv.FormatInt(int64(monitorSlack), 10); err != nil || strings.TrimSpace(string(b)) != want {
		t.Fatalf("timer slack is %q, %v; want %s", b, err, want)
	}
}
