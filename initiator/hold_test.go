package initiator

import (
	"os"
	"testing"

	"rdblk/internal/worker"
)

type idleSource struct{}

func (idleSource) Poll() bool { return false }
func (idleSource) Arm() bool  { return true }

// On a busy queue a few commands wait for company, and no command waits for long or
// where posting costs little.
func TestHold(t *testing.T) {
	w, err := worker.New(worker.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	r, p, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer p.Close()
	for _, c := range []struct {
		name           string
		started, usual int
		since          int64 // nanoseconds that the oldest has waited
		autonomous     bool
		want           bool
	}{
		{name: "nothing to post", usual: 128},
		{name: "one of a queue that has one", started: 1, usual: 1},
		{name: "one of a queue that has few", started: 1, usual: holdDepth - 1},
		{name: "few", started: 3, usual: 32, want: true},
		{name: "enough", started: 10, usual: 32},
		{name: "a moment", started: 3, usual: 32, since: holdMax / 4, want: true},
		{name: "long enough", started: 3, usual: 32, since: holdMax},
		{name: "a moment where there are less", started: 1, usual: 12, since: 11 * holdEach, want: true},
		{name: "long enough where there are less", started: 1, usual: 12, since: 12 * holdEach},
		{name: "a NIC", started: 3, usual: 32, autonomous: true},
	} {
		l := &lane{w: w, h: &worker.Handle{}, started: make([]uint16, c.started), usual: c.usual}
		l.info.Autonomous = c.autonomous
		if err := w.Call(func() {
			if l.h, err = w.Add(int(r.Fd()), idleSource{}); err != nil {
				t.Error(err)
				return
			}
			hold := l.hold
			if c.since > 0 {
				l.heldAt = 1
				hold = func() bool { return l.holdAt(l.heldAt + c.since) }
			}
			if got := hold(); got != c.want {
				t.Errorf("%s: hold is %v", c.name, got)
			}
			if c.want && l.heldAt == 0 {
				t.Errorf("%s: nobody knows since when it is held", c.name)
			}
			l.h.Remove()
		}); err != nil {
			t.Fatal(err)
		}
	}
}
