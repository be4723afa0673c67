package target

import (
	"bytes"
	"testing"

	"rdblk/internal/arena"
	"rdblk/protocol"
	"rdblk/rdma"
)

// post posts a request of the host's, outside of the protocol, and waits for its completion's
// status, or for the end of the connection.
func (q *hostQueue) post(wr rdma.SendWR) error {
	q.t.Helper()
	wr.Flags |= rdma.FlagSignaled
	if _, err := q.qp.PostSend(wr); err != nil {
		return err
	}
	q.sends++
	for q.sends > 0 && q.broken == nil {
		q.poll(true)
	}
	return q.broken
}

// window binds mw to n bytes of the data area and returns its key.
func (q *hostQueue) window(mw rdma.MW, n int, access rdma.Access) uint32 {
	q.t.Helper()
	if err := q.post(rdma.SendWR{Op: rdma.OpBindMW, Window: mw, Access: access,
		SGL: []rdma.SGE{{Addr: arena.Addr(q.data), Len: uint32(n), LKey: q.mr.LKey()}}}); err != nil {
		q.t.Fatal(err)
	}
	return mw.RKey()
}

// A host that reaches into the target's memory, though it knows the real keys, or that
// gives keys which do not open what its commands say, loses its connection; nothing of
// the target's memory leaves or changes, nothing is written, and other hosts go on.
func TestHostileHost(t *testing.T) {
	const secret = 0x5A
	dev := memDevice(t, 8<<20)
	r := newRig(t, Config{Workers: 1}, dev)
	good := r.attach(sessionOptions{queues: 1})
	g := good.io[0]
	fill(g.data[:1<<20], secret)
	g.ok(g.rw(protocol.OpWrite, 8192, 1<<20, 0, 0)) // the target's buffers hold another host's data now

	l := r.tgt.lanes[0]
	l.mu.Lock()
	var pool rdma.MR
	for _, d := range l.devs {
		pool = d.mr
	}
	l.mu.Unlock()
	poolMem := l.arena.Bytes()
	if bytes.Count(poolMem, []byte{secret}) < 1<<20 {
		t.Fatal("the other host's data did not pass through the buffers")
	}
	var rings []rdma.MR // where the capsules of all queues arrive
	if err := l.w.Call(func() {
		for q := range l.queues {
			rings = append(rings, q.mr)
		}
	}); err != nil {
		t.Fatal(err)
	}
	if len(rings) == 0 {
		t.Fatal("no queue")
	}
	ring := rings[0]
	sge := func(q *hostQueue, n int) []rdma.SGE {
		return []rdma.SGE{{Addr: arena.Addr(q.data), Len: uint32(n), LKey: q.mr.LKey()}}
	}
	for _, c := range []struct {
		name string
		fn   func(q *hostQueue, mw rdma.MW)
	}{
		{"RDMA Read of the buffers", func(q *hostQueue, mw rdma.MW) {
			q.post(rdma.SendWR{Op: rdma.OpRead, SGL: sge(q, 4096), RemoteAddr: pool.Addr(), RKey: pool.RKey()})
		}},
		{"RDMA Read of received capsules", func(q *hostQueue, mw rdma.MW) {
			q.post(rdma.SendWR{Op: rdma.OpRead, SGL: sge(q, 64), RemoteAddr: ring.Addr(), RKey: ring.RKey()})
		}},
		{"RDMA Write to received capsules", func(q *hostQueue, mw rdma.MW) {
			q.post(rdma.SendWR{Op: rdma.OpWrite, SGL: sge(q, 64), RemoteAddr: ring.Addr(), RKey: ring.RKey()})
		}},
		{"RDMA Write one byte behind the buffers", func(q *hostQueue, mw rdma.MW) {
			q.post(rdma.SendWR{Op: rdma.OpWrite, SGL: sge(q, 1), RemoteAddr: pool.Addr() + uint64(pool.Len()), RKey: pool.RKey()})
		}},
		{"RDMA Write with a guessed key", func(q *hostQueue, mw rdma.MW) {
			q.post(rdma.SendWR{Op: rdma.OpWrite, SGL: sge(q, 64), RemoteAddr: pool.Addr(), RKey: pool.RKey() ^ 0x100})
		}},
		{"invalidates the target's buffers", func(q *hostQueue, mw rdma.MW) {
			q.post(rdma.SendWR{Op: rdma.OpSendInvalidate, InvalidateRKey: pool.RKey(), SGL: sge(q, 64)})
		}},
		{"invalidates nothing there is", func(q *hostQueue, mw rdma.MW) {
			q.post(rdma.SendWR{Op: rdma.OpSendInvalidate, InvalidateRKey: 0x12345600, SGL: sge(q, 64)})
		}},
		{"a key that the answer before closed", func(q *hostQueue, mw rdma.MW) {
			key := q.window(mw, 4096, rdma.AccessRemoteWrite)
			cmd := q.rw(protocol.OpRead, 0, 4096, 0, 0)
			cmd.SetKeyedSGL(arena.Addr(q.data), 4096, key, true)
			q.ok(cmd)
			cmd.SetID(q.cid())
			q.send(cmd, nil)
		}},
		{"a window one byte shorter than the data pointer, read", func(q *hostQueue, mw rdma.MW) {
			cmd := q.rw(protocol.OpRead, 0, 4096, 0, 0)
			cmd.SetKeyedSGL(arena.Addr(q.data), 4096, q.window(mw, 4095, rdma.AccessRemoteWrite), true)
			q.send(cmd, nil)
		}},
		{"a window one byte shorter than the data pointer, write", func(q *hostQueue, mw rdma.MW) {
			cmd := q.rw(protocol.OpWrite, 4096, 4096, 0, 0)
			cmd.SetKeyedSGL(arena.Addr(q.data), 4096, q.window(mw, 4095, rdma.AccessRemoteRead), true)
			q.send(cmd, nil)
		}},
		{"a window for the other direction, read", func(q *hostQueue, mw rdma.MW) {
			cmd := q.rw(protocol.OpRead, 0, 4096, 0, 0)
			cmd.SetKeyedSGL(arena.Addr(q.data), 4096, q.window(mw, 4096, rdma.AccessRemoteRead), true)
			q.send(cmd, nil)
		}},
		{"a window for the other direction, write", func(q *hostQueue, mw rdma.MW) {
			cmd := q.rw(protocol.OpWrite, 4096, 4096, 0, 0)
			cmd.SetKeyedSGL(arena.Addr(q.data), 4096, q.window(mw, 4096, rdma.AccessRemoteWrite), true)
			q.send(cmd, nil)
		}},
		{"the key of another host", func(q *hostQueue, mw rdma.MW) {
			cmd := q.rw(protocol.OpWrite, 4096, 4096, 0, 0)
			cmd.SetKeyedSGL(arena.Addr(g.data), 4096, g.mr.RKey(), false)
			q.send(cmd, nil)
		}},
		{"a capsule one byte longer than allowed", func(q *hostQueue, mw rdma.MW) {
			cmd := q.rw(protocol.OpWrite, 4096, 4096, 0, 0)
			cmd.SetInCapsuleSGL(0, 4096)
			q.send(cmd, make([]byte, 4096+1))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			bad := r.attach(sessionOptions{queues: 1})
			defer bad.close()
			q := bad.io[0]
			q.t = t
			mw, err := q.pd.AllocMW()
			if err != nil {
				t.Fatal(err)
			}
			defer mw.Close()
			fill(q.data[:1<<20], 0x11)
			before := make([]byte, 64<<10)
			if err := dev.ReadAt(before, 2<<20); err != nil {
				t.Fatal(err)
			}
			c.fn(q, mw)
			q.awaitEnd()
			if bytes.Contains(q.data[:1<<20], []byte{secret, secret}) {
				t.Error("another host's data came out")
			}
			after := make([]byte, 64<<10)
			if err := dev.ReadAt(after, 2<<20); err != nil || !bytes.Equal(before, after) {
				t.Errorf("written without data: %v", err)
			}
			fill(g.data[:4096], 0)
			g.ok(g.rw(protocol.OpRead, 8192, 4096, 0, 0))
			if !bytes.Equal(g.data[:4096], bytes.Repeat([]byte{secret}, 4096)) {
				t.Error("another host reads something else")
			}
		})
	}
	good.admin.do(func() *protocol.Command {
		c := new(protocol.Command)
		c.InitAdmin(protocol.AdminKeepAlive, good.admin.cid(), 0)
		return c
	}())
}
