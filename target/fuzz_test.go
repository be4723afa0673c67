package target

import (
	"testing"
	"time"

	"rdblk/blockdev"
	"rdblk/protocol"
)

// FuzzCapsule sends arbitrary bytes as capsules to a live queue: the first byte
// chooses the queue, then each capsule has a length in two bytes. The target must
// answer everything that is a command or end the connection, must not panic, and
// must go on serving others.
func FuzzCapsule(f *testing.F) {
	add := func(queue byte, capsules ...[]byte) {
		b := []byte{queue}
		for _, c := range capsules {
			b = append(b, byte(len(c)), byte(len(c)>>8))
			b = append(b, c...)
		}
		f.Add(b)
	}
	capsule := func(init func(c *protocol.Command), data ...byte) []byte {
		var c protocol.Command
		init(&c)
		return append(c[:], data...)
	}
	for _, op := range []protocol.Opcode{protocol.OpRead, protocol.OpWrite, protocol.OpFlush, protocol.OpCompare, protocol.OpWriteZeroes,
		protocol.OpDatasetManagement, protocol.OpVerify, protocol.OpFabrics} {
		add(1, capsule(func(c *protocol.Command) { c.InitRW(op, 1, 1, 0, 8, 0); c.SetKeyedSGL(0, 4096, 0, true) }))
		add(1, capsule(func(c *protocol.Command) { c.InitRW(op, 1, 1, 0, 1, 0); c.SetInCapsuleSGL(0, 512) }, make([]byte, 512)...))
	}
	for _, op := range []protocol.AdminOpcode{protocol.AdminIdentify, protocol.AdminGetLogPage, protocol.AdminGetFeatures, protocol.AdminSetFeatures,
		protocol.AdminAbort, protocol.AdminKeepAlive, protocol.AdminAsyncEventRequest} {
		add(0, capsule(func(c *protocol.Command) { c.InitAdmin(op, 1, 0); c.SetKeyedSGL(0, 4096, 0, false) }))
	}
	add(0, capsule(func(c *protocol.Command) { c.InitPropertySet(1, protocol.PropertyCC, 0x460000) }),
		capsule(func(c *protocol.Command) { c.InitPropertySet(2, protocol.PropertyCC, 0x464001) }),
		capsule(func(c *protocol.Command) { c.InitPropertyGet(3, protocol.PropertyCSTS) }))
	add(2, capsule(func(c *protocol.Command) { c.InitConnect(1, 0, 31, 0, 0); c.SetInCapsuleSGL(0, 1024) }, make([]byte, 1024)...))
	add(1, make([]byte, 63))
	add(1, capsule(func(c *protocol.Command) { c.InitDisconnect(1) }))

	// One target for all inputs: what one leaves behind meets the next.
	dev, err := blockdev.NewMem("mem", 1<<20, blockdev.Options{})
	if err != nil {
		f.Fatal(err)
	}
	r := newRig(f, Config{TransferTimeout: 200 * time.Millisecond}, dev)
	good := r.attach(sessionOptions{queues: 1})
	var s *session
	f.Cleanup(func() {
		if s != nil {
			s.close()
		}
	})
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < 3 {
			return
		}
		r.t = t
		good.t, good.io[0].t = t, t
		if s == nil || s.admin.broken != nil || s.io[0].broken != nil {
			if s != nil {
				s.close()
			}
			s = r.attachBare(t)
		}
		s.t, s.admin.t, s.io[0].t = t, t, t
		var q *hostQueue
		switch b[0] % 3 {
		case 0:
			q = s.admin
		case 1:
			q = s.io[0]
		case 2: // not connected
			var err error
			if q, err = r.dial(uint16(b[0]/3%2), dialOptions{}); err != nil {
				t.Fatal(err)
			}
			defer q.close()
		}
		q.t = t
		q.quick, q.count = true, 0
		sent, aers := 0, 0
		for b = b[1:]; len(b) > 2 && sent < q.depth-8; {
			n := min(int(b[0])|int(b[1])<<8, len(b)-2, 64+4096)
			c := b[2 : 2+n]
			b = b[2+n:]
			if n >= 64 {
				c = append([]byte(nil), c...)
				(*protocol.Command)(c).SetID(uint16(1000 + sent))
				if c[0] == byte(protocol.AdminAsyncEventRequest) {
					aers++
				}
			}
			q.sendRaw(c)
			sent++
		}
		// Everything is answered, event requests apart, or the connection ends. Reads of
		// memory that the host does not open end it.
		end := time.Now().Add(patience)
		for q.broken == nil && q.count < sent-aers {
			q.poll(true)
			if time.Now().After(end) {
				t.Fatalf("%d of %d answers\n%+v", q.count, sent, r.tgt.Status())
			}
		}
		q.quick = false
		if b := good.io[0]; b.broken == nil {
			b.ok(b.rw(protocol.OpRead, 0, 512, 0, 0))
		} else {
			t.Fatal("another host's connection ended: ", b.broken)
		}
	})
}

// attachBare is attach without cleanups that pile up in a fuzz worker.
func (r *rig) attachBare(t testing.TB) *session {
	t.Helper()
	s := &session{rig: r, who: newIdentity()}
	var err error
	if s.admin, err = r.dial(0, dialOptions{}); err != nil {
		t.Fatal(err)
	}
	a := s.admin.ok(s.admin.connectCommand(s.who, testNQN, protocol.CNTLIDDynamic, 0))
	s.cntlid = uint16(a.DW0())
	s.enable()
	q, err := r.dial(1, dialOptions{})
	if err != nil {
		t.Fatal(err)
	}
	q.ok(q.connectCommand(s.who, testNQN, s.cntlid, 0))
	s.io = []*hostQueue{q}
	return s
}
