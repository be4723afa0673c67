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
				c.tickPeriod, c.evacuateAfter, c.sendBuffer = 10*time.Millisecond, time.Second, 64<<10
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

// TestSpillMemory: clients that do not read cost no more than the memory there is for them. When
// it is used up the one that has stood still for the longest time goes; everybody else is served.
func TestSpillMemory(t *testing.T) {
	const memory = 1 << 20
	d := newHeldDevice(t, 16<<20, 1, memory)
	d.queues[0].open()
	s := serve(t, d, func(c *Config) {
		c.MaxPayload, c.SpillMemory = memory, memory
		c.tickPeriod, c.evacuateAfter, c.sendBuffer = 10*time.Millisecond, 20*time.Millisecond, 64<<10
	})
	good := s.open(t, true)
	data := make([]byte, memory)
	fill(newRand(t), data)
	do(t, good, 0, nbdtest.CmdWrite, 0, memory, data, 0)
	const hostile = 4
	var slow []*nbdtest.Client
	for i := range hostile {
		c := s.open(t, true)
		slow = append(slow, c)
		if err := c.Send(0, nbdtest.CmdRead, 1, 0, memory, nil); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the memory taken", func() bool { return d.queues[0].memory() == memory })
		do(t, good, 0, nbdtest.CmdWrite, 0, memory, data, 0) // waits until the other has lost it
		st := s.Stats()
		if st.SpillBytes > memory || st.Exports[0].SpillCuts != uint64(i) {
			t.Fatalf("after %d clients that do not read: %d bytes outside the queue, %d clients ended", i+1, st.SpillBytes, st.Exports[0].SpillCuts)
		}
	}
	for i, c := range slow {
		r, err := c.ReadReply()
		switch {
		case i < hostile-1 && err == nil:
			t.Errorf("client %d of %d is still there", i+1, hostile)
		case i == hostile-1 && (err != nil || !bytes.Equal(r.Data, data)):
			t.Errorf("the last one, for which there is room: errno %d, %v", r.Errno, err)
		}
	}
	eventually(t, "all memory back", func() bool { return s.Stats().SpillBytes == 0 && d.queues[0].memory() == 0 })
}

// TestNoSpillMemory: where there is none, who stands in others' way goes.
func TestNoSpillMemory(t *testing.T) {
	const memory = 1 << 20
	d := newHeldDevice(t, 16<<20, 1, memory)
	d.queues[0].open()
	s := serve(t, d, func(c *Config) {
		c.MaxPayload, c.SpillMemory = memory, -1
		c.tickPeriod, c.evacuateAfter, c.sendBuffer = 10*time.Millisecond, 20*time.Millisecond, 64<<10
	})
	slow, good := s.open(t, true), s.open(t, true)
	slow.Expect(nbdtest.CmdWrite, 1, 0, memory)
	slow.Write(nbdtest.Header(0, nbdtest.CmdWrite, 1, 0, memory)) // and no payload
	eventually(t, "the memory taken", func() bool { return d.queues[0].memory() == memory })
	do(t, good, 0, nbdtest.CmdWrite, 0, memory, make([]byte, memory), 0)
	if st := s.Stats(); st.Exports[0].SpillCuts != 1 || st.SpillBytes != 0 {
		t.Errorf("%+v", st)
	}
	if _, err := slow.ReadReply(); err == nil {
		t.Error("the client that stood still is there")
	}
}
