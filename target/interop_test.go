package target

import (
	"context"
	"testing"
	"time"

	"rdblk/blockdev"
	"rdblk/blockdev/blockdevtest"
	"rdblk/protocol"
	"rdblk/rdma"
)

// What hosts of others do and targets have stumbled over. docs/interop.md has the list.

// A host that would like to issue RDMA Reads itself (ESXi) is let in; it is only that
// nobody serves them.
func TestHostThatAsksToRead(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, err := r.host.Dial(ctx, r.addr.Addr(), r.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	dev := conn.Device()
	pd, err := dev.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	defer pd.Close()
	cq, err := dev.CreateCQ(8)
	if err != nil {
		t.Fatal(err)
	}
	defer cq.Close()
	qp, err := conn.CreateQP(pd, rdma.QPConfig{SendCQ: cq, RecvCQ: cq, MaxSend: 4, MaxRecv: 4})
	if err != nil {
		t.Fatal(err)
	}
	defer qp.Close()
	req := protocol.RDMAConnectRequest{HRQSIZE: 32, HSQSIZE: 31}
	private, _ := req.AppendBinary(nil)
	if _, err := conn.Connect(ctx, rdma.ConnParam{PrivateData: private, ResponderResources: 8, InitiatorDepth: 8, RNRRetry: 7, Retry: 7}); err != nil {
		t.Errorf("refused: %v", err)
	}
}

// Keep Alive is answered while the storage hangs under every queue of the host, and so
// are Identify and Property Get.
func TestKeepAliveWhileStorageHangs(t *testing.T) {
	dev := blockdevtest.Delayed(memDevice(t, 1<<20))
	r := newRig(t, Config{Executors: 1}, dev)
	s := r.attach(sessionOptions{queues: 2, kato: 60_000})
	gate := hold(dev, blockdev.OpRead)
	var sent []uint16
	for _, q := range s.io {
		for range 8 {
			c := q.rw(protocol.OpRead, 0, 512, 0, 0)
			q.send(c, nil)
			sent = append(sent, c.ID())
		}
	}
	gate.Await(t, 1)
	start := time.Now()
	for range 10 {
		var c protocol.Command
		c.InitAdmin(protocol.AdminKeepAlive, s.admin.cid(), 0)
		s.admin.ok(&c)
		s.identify(protocol.CNSController, 0)
		s.csts()
	}
	if d := time.Since(start); d > patience/3 {
		t.Errorf("admin commands took %v behind hung storage", d)
	}
	gate.Open()
	for i, cid := range sent {
		if a, err := s.io[i/8].take(cid); err != nil || !a.Status().OK() {
			t.Fatalf("read %d: %v, %v", i, a.Status(), err)
		}
	}
}

// Identify Controller says the same for the life of an association, whatever comes and
// goes: NN above all, by which hosts size tables.
func TestControllerDoesNotChange(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	s := r.attach(sessionOptions{})
	page := func() string { return string(append([]byte(nil), s.identify(protocol.CNSController, 0)...)) }
	before := page()
	var d protocol.IdentifyController
	if err := d.UnmarshalBinary([]byte(before)); err != nil || d.NN != MaxNamespaces {
		t.Fatalf("NN %d, %v", d.NN, err)
	}
	if _, err := r.tgt.AddNamespace(MaxNamespaces, &recorder{TryDevice: cached{memDevice(t, 1<<20).(blockdev.TryDevice)}}); err != nil {
		t.Fatal(err)
	}
	if page() != before {
		t.Error("Identify Controller changed with a namespace that came")
	}
	if err := r.tgt.RemoveNamespace(1); err != nil {
		t.Fatal(err)
	}
	if page() != before {
		t.Error("Identify Controller changed with a namespace that went")
	}
}

// A host connects an I/O queue to a controller whose admin queue has just died: it is
// told so, and may connect again.
func TestIOConnectAfterAdminQueueDied(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	s := r.attach(sessionOptions{})
	q := r.mustDial(1, 32) // before, as Linux does with all its queues
	s.admin.close()
	eventually(t, "controller gone", func() bool { return r.tgt.Stats().Controllers == 0 })
	a := q.want(protocol.StatusConnectInvalidParameters, q.connectCommand(s.who, testNQN, s.cntlid, 0))
	if f := protocol.ConnectInvalid(a.DW0()); f != protocol.ConnectInvalidCNTLID {
		t.Errorf("at fault: %v", f)
	}
	again := r.attach(sessionOptions{who: s.who, queues: 1})
	again.io[0].ok(again.io[0].rw(protocol.OpRead, 0, 512, 0, 0))
}
