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

// hookLate is a NIC whose connections lose sight of the first message until more comes, as the kernel's siw at
// the other end does now and then.
type hookLate struct {
	*iwarp.Provider
	found atomic.Int64 // messages that came to light by an empty Write
}

type hookLateConn struct {
	rdma.Conn
	p *hookLate
}

type hookLateQP struct {
	rdma.QP
	p     *hookLate
	first []rdma.SendWR
	seen  bool
}

func (p *hookLate) Dial(ctx context.Context, local netip.Addr, remote netip.AddrPort) (rdma.Conn, error) {
	c, err := p.Provider.Dial(ctx, local, remote)
	if err != nil {
		return nil, err
	}
	return &hookLateConn{c, p}, nil
}

func (c *hookLateConn) CreateQP(pd rdma.PD, cfg rdma.QPConfig) (rdma.QP, error) {
	q, err := c.Conn.CreateQP(pd, cfg)
	if err != nil {
		return nil, err
	}
	return &hookLateQP{QP: q, p: c.p}, nil
}

func (q *hookLateQP) PostSend(wrs ...rdma.SendWR) (int, error) {
	if q.seen {
		return q.QP.PostSend(wrs...)
	}
	for i, wr := range wrs {
		switch {
		case wr.Op == rdma.OpBindMW: // sends nothing
			if n, err := q.QP.PostSend(wrs[i : i+1]...); n == 0 {
				return i, err
			}
			continue
		case q.first == nil:
			wr.SGL = append([]rdma.SGE(nil), wr.SGL...)
			q.first = []rdma.SendWR{wr}
			continue
		}
		if wr.Op == rdma.OpWrite && len(wr.SGL) == 0 {
			q.p.found.Add(1)
		}
		q.seen = true
		if _, err := q.QP.PostSend(q.first...); err != nil {
			return i, err
		}
		n, err := q.QP.PostSend(wrs[i:]...)
		return i + n, err
	}
	return len(wrs), nil
}

// A Connect that the other end's NIC did not notice is answered after all, on every queue.
func TestConnectIsNotNoticed(t *testing.T) {
	s := serve(t, target.Config{}, mem(t, 1<<20, blockdev.Options{}))
	p := &hookLate{Provider: nic(t)}
	cfg := s.config()
	cfg.Provider = p
	ss, err := initiator.Connect(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer ss.Close(t.Context())
	if n := p.found.Load(); n != 3 {
		t.Errorf("an empty Write on %d connections, not on 3", n)
	}
	d, err := ss.Device(0)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.WriteAt(make([]byte, 512), 0, 0); err != nil {
		t.Fatal(err)
	}
}
