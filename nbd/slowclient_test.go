package nbd

import (
	"bytes"
	"io"
	"testing"
	"time"

	"rdblk/nbd/nbdtest"
)

// TestTrickles: a client that moves all the time, but by a few bytes, is in the others' way
// just like one that stands still: it loses the shared memory, not its data.
func TestTrickles(t *testing.T) {
	const memory, pause = 1 << 20, 2 * time.Millisecond
	for _, what := range []string{"a payload", "replies"} {
		t.Run(what, func(t *testing.T) {
			d := newHeldDevice(t, 16<<20, 1, memory)
			d.queues[0].open()
			s := serve(t, d, func(c *Config) {
				c.MaxPayload = memory
				c.tickPeriod, c.evacuateAfter = 10*time.Millisecond, time.Second
			})
			slow, good := s.open(t, true), s.open(t, true)
			data := make([]byte, memory)
			fill(newRand(t), data)
			stop, done := make(chan struct{}), make(chan int)
			moving := func(move func() bool) {
				n := 0
				tick := time.NewTicker(pause) // far below evacuateAfter
				defer tick.Stop()
				for move() {
					n++
					select {
					case <-stop:
						done <- n
						return
					case <-tick.C:
					}
				}
				done <- -1
			}
			var got []byte
			if what == "replies" {
				do(t, good, 0, nbdtest.CmdWrite, 0, memory, data, 0)
				if err := slow.Send(0, nbdtest.CmdRead, 1, 0, memory, nil); err != nil {
					t.Fatal(err)
				}
				go moving(func() bool {
					b := make([]byte, 64)
					k, err := slow.Conn.Read(b)
					got = append(got, b[:k]...)
					return err == nil
				})
			} else {
				slow.Expect(nbdtest.CmdWrite, 1, 2<<20, memory)
				slow.Write(nbdtest.Header(0, nbdtest.CmdWrite, 1, 2<<20, memory))
				i := 0
				go moving(func() bool { i++; _, err := slow.Write(data[i-1 : i]); return err == nil })
			}
			eventually(t, "the memory taken", func() bool { return d.queues[0].memory() == memory })
			do(t, good, 0, nbdtest.CmdWrite, 0, memory, data, 0) // waits until the other has lost it
			close(stop)
			n := <-done
			if n < 0 {
				t.Fatal("the slow client was cut off")
			}
			if st := s.Stats().Exports[0]; st.Evacuations != 1 {
				t.Errorf("%d evacuations", st.Evacuations)
			}
			if what == "replies" { // chunk of a structured reply: 20 bytes, offset, data
				rest := make([]byte, 28+memory-len(got))
				if _, err := io.ReadFull(slow.Conn, rest); err != nil || !bytes.Equal(append(got, rest...)[28:], data) {
					t.Errorf("what it read is wrong (%v)", err)
				}
				return
			}
			slow.Write(data[n:])
			if r, err := slow.ReadReply(); err != nil || r.Errno != 0 {
				t.Fatalf("%+v %v", r, err)
			}
			if r := do(t, good, 0, nbdtest.CmdRead, 2<<20, memory, nil, 0); !bytes.Equal(r.Data, data) {
				t.Error("the payload was damaged on the way")
			}
		})
	}
}
