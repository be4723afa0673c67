package initiator_test

import (
	"bytes"
	"context"
	"net/netip"
	"sync/atomic"
	"testing"

	"rdblk/blockdev"
	"rdblk/initiator"
	"rdblk/rdma"
	"rdblk/rdma/iwarp"
	"rdblk/target"
)

// adapter is a software NIC that says of itself what a small adapter would.
type adapter struct {
	*iwarp.Provider
	inline, whole, deepest atomic.Int64 // commands posted; the largest send queue asked for
}

type adapterConn struct {
	rdma.Conn
	a *adapter
}

type adapterDevice struct{ rdma.Device }

type adapterQP struct {
	rdma.QP
	a *adapter
}

func (a *adapter) Dial(ctx context.Context, local netip.Addr, remote netip.AddrPort) (rdma.Conn, error) {
	c, err := a.Provider.Dial(ctx, local, remote)
	if err != nil {
		return nil, err
	}
	return &adapterConn{c, a}, nil
}

func (c *adapterConn) Device() rdma.Device { return &adapterDevice{c.Conn.Device()} }

func (d *adapterDevice) Info() rdma.DeviceInfo {
	i := d.Device.Info()
	i.Autonomous, i.MemWindows, i.MaxQPWR, i.MaxCQE, i.Name = true, false, 60, 100, "small0"
	return i
}

func (c *adapterConn) CreateQP(pd rdma.PD, cfg rdma.QPConfig) (rdma.QP, error) {
	c.a.deepest.Store(max(c.a.deepest.Load(), int64(cfg.MaxSend)))
	q, err := c.Conn.CreateQP(pd, cfg)
	if err != nil {
		return nil, err
	}
	return &adapterQP{q, c.a}, nil
}

func (q *adapterQP) PostSend(wrs ...rdma.SendWR) (int, error) {
	for i := range wrs {
		if wrs[i].Flags&rdma.FlagInline != 0 {
			q.a.inline.Add(1)
		} else {
			q.a.whole.Add(1)
		}
	}
	return q.QP.PostSend(wrs...)
}

// An adapter with small queues, without windows: commands travel inline unless data rides along, queues
// are cut to what it has, and the session names it.
func TestSmallAdapter(t *testing.T) {
	s := serve(t, target.Config{}, mem(t, 8<<20, blockdev.Options{}))
	a := &adapter{Provider: nic(t)}
	cfg := s.config()
	cfg.Provider = a
	ss, err := initiator.Connect(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer ss.Close(t.Context())
	d, err := ss.Device(0)
	if err != nil {
		t.Fatal(err)
	}
	in, out := bytes.Repeat([]byte("rdblk-42"), 32<<10), make([]byte, 256<<10)
	if err := d.WriteAt(in, 4096, 0); err != nil {
		t.Fatal(err)
	}
	if err := d.WriteAt(in[:512], 0, 0); err != nil { // in the capsule
		t.Fatal(err)
	}
	if err := d.ReadAt(out, 4096); err != nil || !bytes.Equal(in, out) {
		t.Fatalf("read: %v", err)
	}
	if a.inline.Load() == 0 || a.whole.Load() == 0 {
		t.Errorf("%d commands inline, %d not", a.inline.Load(), a.whole.Load())
	}
	if n := a.deepest.Load(); n > 60 {
		t.Errorf("a send queue of %d entries was asked for", n)
	}
	st := ss.Status()
	if st.Provider != "iwarp" || st.RDMADevice != "small0" || st.Depth > 20 || st.Queues[1].RDMADevice != "small0" {
		t.Errorf("%+v", st)
	}
}
