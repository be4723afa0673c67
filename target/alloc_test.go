package target

import (
	"fmt"
	"testing"

	"rdblk/internal/arena"
	"rdblk/protocol"
	"rdblk/rdma"
)

// quickIO sends one prepared command and polls until its answer is there, without
// allocating: what remains is the path under test.
type quickIO struct {
	q    *hostQueue
	cmd  protocol.Command
	size int // of the capsule
	sge  [1]rdma.SGE
	wr   [1]rdma.SendWR
}

func (o *quickIO) post() {
	q := o.q
	for q.sends >= q.depth {
		q.poll(false)
	}
	off := q.slot * capsuleSlot
	q.slot = (q.slot + 1) % q.depth
	copy(q.caps[off:], o.cmd[:])
	o.sge[0] = rdma.SGE{Addr: arena.Addr(q.caps) + uint64(off), Len: uint32(o.size), LKey: q.mr.LKey()}
	o.wr[0] = rdma.SendWR{Op: rdma.OpSend, Flags: rdma.FlagSignaled, SGL: o.sge[:]}
	if _, err := q.qp.PostSend(o.wr[:]...); err != nil {
		q.t.Fatal(err)
	}
	q.sends++
}

func (o *quickIO) run() {
	o.post()
	for want := o.q.count + 1; o.q.count < want; {
		o.q.poll(true)
		if o.q.broken != nil {
			o.q.t.Fatal(o.q.broken)
		}
	}
	if s := o.q.last.Status(); !s.OK() {
		o.q.t.Fatal(s)
	}
}

// quickOps are the operations whose path must not allocate.
func quickOps(q *hostQueue, n int) map[string]*quickIO {
	q.quick = true
	ops := map[string]*quickIO{}
	ops["read"] = &quickIO{q: q, cmd: *q.rw(protocol.OpRead, 8, n, 0, 0), size: 64}
	ops["write"] = &quickIO{q: q, cmd: *q.rw(protocol.OpWrite, 8, n, 0, 0), size: 64}
	if n <= 4096 {
		w := q.rw(protocol.OpWrite, 8, n, 0, 0)
		w.SetInCapsuleSGL(0, uint32(n))
		ops["write in capsule"] = &quickIO{q: q, cmd: *w, size: 64 + n}
	}
	return ops
}

func TestNoAllocations(t *testing.T) {
	r := newRig(t, Config{Workers: 1}, memDevice(t, 16<<20))
	testNoAllocations(t, r, "")
	// And with the connection's own buffers.
	r.listenOn(newAdapter(r.nic, func(i *rdma.DeviceInfo) { i.Autonomous = true }))
	testNoAllocations(t, r, ", exposed device")
}

func testNoAllocations(t *testing.T, r *rig, how string) {
	s := r.attach(sessionOptions{queues: 1})
	for name, op := range quickOps(s.io[0], 4096) {
		t.Run(name+how, func(t *testing.T) {
			for range 100 { // what grows once has grown
				op.run()
			}
			if n := testing.AllocsPerRun(500, op.run); n != 0 {
				t.Errorf("%v allocations per command", n)
			}
		})
	}
}

func BenchmarkIO(b *testing.B) {
	for _, size := range []int{4096, 131072} {
		for _, depth := range []int{1, 32} {
			for _, name := range []string{"read", "write", "write in capsule"} {
				if name == "write in capsule" && size > 4096 {
					continue
				}
				b.Run(fmt.Sprintf("%s/%d/depth%d", name, size, depth), func(b *testing.B) {
					r := newRig(b, Config{Workers: 1}, memDevice(b, 16<<20))
					s := r.attach(sessionOptions{queues: 1, depth: 64})
					op := quickOps(s.io[0], size)[name]
					b.SetBytes(int64(size))
					b.ReportAllocs()
					b.ResetTimer()
					posted := 0
					for op.q.count < b.N {
						for posted < b.N && posted-op.q.count < depth {
							op.post()
							posted++
						}
						op.q.poll(true)
						if op.q.broken != nil {
							b.Fatal(op.q.broken)
						}
					}
				})
			}
		}
	}
}
