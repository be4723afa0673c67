package iwarp

import (
	"testing"

	"golang.org/x/sys/unix"

	"rdblk/rdma"
)

// TestFullSocketInTheLastPoll: Arm has asked for one more Poll, and that one finds
// the socket full and moves nothing. The owner may sleep then, so FD must wake it
// when the socket has room.
func TestFullSocketInTheLastPoll(t *testing.T) {
	r := newRig(t, agreed{ird: 4, ord: 4})
	r.poll()
	junk := make([]byte, 4096)
	filled := 0
	for {
		n, e := sysSendBytes(r.q.fd, junk)
		if e == unix.EAGAIN {
			break
		}
		if e != 0 {
			t.Fatal(e)
		}
		filled += n
	}
	// The owner polls until nothing moves, arms with the last batch of the budget
	// gone and more to send, and polls once more.
	q := r.side.CQ.(*cq)
	q.rearm = true
	r.send(rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: []rdma.SGE{r.side.SGE(0, 4096)}})
	if n, busy, err := q.Poll(make([]rdma.WC, 4)); n != 0 || busy || err != nil {
		t.Fatalf("%d completions, busy %v, %v: the socket is not full", n, busy, err)
	}
	ready := func() bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(q.FD()), Events: unix.POLLIN}}, 0)
		return err == nil && n == 1
	}
	if ready() {
		t.Fatal("FD is readable though nothing can be done")
	}
	r.drain()
	if len(r.out) != filled {
		t.Fatalf("peer got %d bytes of %d", len(r.out), filled)
	}
	if !ready() {
		t.Fatal("the socket has room and nobody wakes the owner")
	}
	r.poll()
	if d := r.done(); len(d) != 1 || d[0].Status != rdma.StatusSuccess {
		t.Fatalf("%+v", d)
	}
}
