package target

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"rdblk/blockdev"
	"rdblk/protocol"
	"rdblk/rdma"
)

// Linux before 6.2 fills every slot of the queue: the receive for the next command
// must be posted before the response that allows it leaves.
func TestEverySlotInUse(t *testing.T) {
	r := newRig(t, Config{Workers: 1}, memDevice(t, 16<<20))
	for _, depth := range []int{2, 3, 16} {
		q := r.attach(sessionOptions{queues: 1, depth: depth}).io[0]
		q.quick = true
		sent := 0
		for q.count < 3000 {
			for sent < 3000 && sent-q.count < depth {
				var c *protocol.Command
				switch sent % 3 {
				case 0:
					c = q.rw(protocol.OpRead, 0, 4096, 0, 0)
				case 1:
					c = q.rw(protocol.OpWrite, 8, 4096, 4096, 0)
				case 2:
					c = q.rw(protocol.OpWrite, 16, 512, 0, 0)
					c.SetInCapsuleSGL(0, 512)
					q.send(c, make([]byte, 512))
					sent++
					continue
				}
				q.send(c, nil)
				sent++
			}
			q.poll(true)
			if q.broken != nil {
				t.Fatalf("depth %d, %d of %d answered: %v", depth, q.count, sent, q.broken)
			}
		}
	}
	// The same on the admin queue, with event requests in four of the slots.
	s := r.attach(sessionOptions{})
	for range 4 {
		s.admin.aer()
	}
	s.admin.quick = true
	sent := 0
	for s.admin.count < 1000 {
		for sent < 1000 && sent-s.admin.count < 28 {
			var c protocol.Command
			c.InitPropertyGet(s.admin.cid(), protocol.PropertyCAP)
			s.admin.send(&c, nil)
			sent++
		}
		s.admin.poll(true)
		if s.admin.broken != nil {
			t.Fatal(s.admin.broken)
		}
	}
}

// To the target a command identifier is opaque: even two live commands with the
// same one are both answered.
func TestCommandIdentifiersAreOpaque(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	q := r.attach(sessionOptions{queues: 1}).io[0]
	q.quick = true
	for range 10 {
		c := q.rw(protocol.OpRead, 0, 4096, 0, 0)
		c.SetID(0xFFFF)
		q.send(c, nil)
	}
	eventually(t, "10 answers", func() bool { q.poll(true); return q.count == 10 || q.broken != nil })
	if q.last.ID() != 0xFFFF || q.broken != nil {
		t.Errorf("answer to %#x, %v", q.last.ID(), q.broken)
	}
}

// Hosts that give up while the connection is being made leave nothing behind.
func TestAbandonedConnects(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	for i := range 200 {
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rand.IntN(1500))*time.Microsecond)
		conn, err := r.host.Dial(ctx, netip.Addr{}, r.addr)
		if err != nil {
			cancel()
			continue
		}
		dev := conn.Device()
		pd, err1 := dev.AllocPD()
		cq, err2 := dev.CreateCQ(8)
		if err := errors.Join(err1, err2); err != nil {
			t.Fatal(err)
		}
		qp, err := conn.CreateQP(pd, rdma.QPConfig{SendCQ: cq, RecvCQ: cq, MaxSend: 2, MaxRecv: 2})
		if err != nil {
			t.Fatal(err)
		}
		_, err = conn.Connect(ctx, rdma.ConnParam{PrivateData: private(uint16(i%2), 32, 31), ResponderResources: 4})
		if err == nil && i%3 == 0 {
			conn.Disconnect()
		}
		qp.Close()
		cq.Close()
		pd.Close()
		conn.Close()
		cancel()
	}
	r.gone()
	r.attach(sessionOptions{queues: 1})
}

// chaotic is a device that is slow and fails at random.
type chaotic struct {
	blockdev.TryDevice
	mu  sync.Mutex
	rng *rand.Rand
}

func (d *chaotic) Info() blockdev.Info {
	i := d.TryDevice.Info()
	i.WriteCache = true
	return i
}

func (d *chaotic) dice(n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.rng.IntN(n)
}

func (d *chaotic) mishap() error {
	switch d.dice(20) {
	case 0:
		return syscall.EIO
	case 1, 2, 3: // slow
		<-time.After(time.Duration(d.dice(3000)) * time.Microsecond)
	}
	return nil
}

func (d *chaotic) TryReadAt(p []byte, off int64) error {
	if d.dice(3) == 0 {
		return blockdev.ErrWouldBlock
	}
	return d.TryDevice.TryReadAt(p, off)
}

func (d *chaotic) TryWriteAt(p []byte, off int64, f blockdev.WriteFlags) error {
	if d.dice(3) == 0 {
		return blockdev.ErrWouldBlock
	}
	return d.TryDevice.TryWriteAt(p, off, f)
}

func (d *chaotic) ReadAt(p []byte, off int64) error {
	if err := d.mishap(); err != nil {
		return err
	}
	return d.TryDevice.ReadAt(p, off)
}

func (d *chaotic) WriteAt(p []byte, off int64, f blockdev.WriteFlags) error {
	if err := d.mishap(); err != nil {
		return err
	}
	return d.TryDevice.WriteAt(p, off, f)
}

func (d *chaotic) Zero(off, n int64, f blockdev.WriteFlags) error {
	if err := d.mishap(); err != nil {
		return err
	}
	return d.TryDevice.Zero(off, n, f)
}

func (d *chaotic) Flush() error { return d.mishap() }

// Hosts that do everything, in any order, and leave in any way; storage that is
// slow and fails. Nothing may hang, panic (with the race detector the state
// machines are checked), or stay behind.
func TestChaos(t *testing.T) {
	seed := newSeed(t)
	dev := &chaotic{TryDevice: memDevice(t, 8<<20).(blockdev.TryDevice), rng: rand.New(rand.NewPCG(seed, 0))}
	r := newRig(t, Config{MaxIO: 64 << 10, BufferMemory: 256 << 10, ReadDepth: 3}, dev, memDevice(t, 1<<20))
	stop := make(chan struct{})
	var wg sync.WaitGroup
	hosts := 4
	who := make([]identity, hosts)
	for i := range who {
		who[i] = newIdentity()
	}
	for i := range hosts {
		wg.Add(1)
		go func() {
			defer wg.Done()
			rng := rand.New(rand.NewPCG(seed, uint64(i+1)))
			for {
				select {
				case <-stop:
					return
				default:
				}
				r.chaoticHost(rng, who[i/2*2+i%2*(1-i/2)]) // the last two are the same host
			}
		}()
	}
	wg.Add(1)
	go func() { // and the operator is busy, too
		defer wg.Done()
		rng := rand.New(rand.NewPCG(seed, 99))
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(rng.IntN(5000)) * time.Microsecond):
			}
			switch rng.IntN(4) {
			case 0:
				if id, err := r.tgt.AddNamespace(0, memDevice(t, 1<<20)); err == nil {
					r.tgt.RemoveNamespace(id)
				}
			case 1:
				r.tgt.Status()
			case 2:
				r.tgt.Stats()
				r.tgt.Refresh()
			case 3:
				r.tgt.SetHosts([]string{who[0].nqn}, rng.IntN(40) > 0)
			}
		}
	}()
	// Until enough has happened, however slow the machine is.
	begin := time.Now()
	enough := func() bool {
		st := r.tgt.Stats()
		return time.Since(begin) > 3*time.Second && st.Connections >= 100 && st.Fenced >= 5 && st.Namespaces[0].Ops[opWrite].Ops >= 200
	}
	for !enough() && time.Since(begin) < 3*patience {
		<-time.After(10 * time.Millisecond)
	}
	st := r.tgt.Stats()
	if !enough() {
		t.Error("too little happened for a test")
	}
	close(stop)
	wg.Wait()
	r.gone()
	t.Logf("%d connections, %d returned hosts, %d reads, %d writes, %d events", st.Connections, st.Fenced,
		st.Namespaces[0].Ops[opRead].Ops, st.Namespaces[0].Ops[opWrite].Ops, st.Events)
	r.tgt.SetHosts(nil, true)
	s := r.attach(sessionOptions{queues: 2})
	c := s.io[0].rw(protocol.OpRead, 0, 4096, 0, 0)
	c.SetNSID(2)
	s.io[0].ok(c)
}

// chaoticHost makes one association and uses it.
func (r *rig) chaoticHost(rng *rand.Rand, who identity) {
	admin, err := r.dial(0, dialOptions{})
	if err != nil {
		return
	}
	defer admin.close()
	step := func(q *hostQueue, c *protocol.Command) (answer, bool) {
		q.send(c, nil)
		a, err := q.take(c.ID())
		return a, err == nil && a.Status().OK()
	}
	nqn := testNQN
	if rng.IntN(10) == 0 {
		nqn = protocol.DiscoveryNQN
	}
	a, ok := step(admin, admin.connectCommand(who, nqn, protocol.CNTLIDDynamic, uint32(rng.IntN(3))*5000))
	if !ok {
		return
	}
	cntlid := uint16(a.DW0())
	var c protocol.Command
	c.InitPropertySet(admin.cid(), protocol.PropertyCC, uint64(protocol.CCDefault.WithEN(true)))
	if _, ok := step(admin, &c); !ok {
		return
	}
	queues := []*hostQueue{admin}
	for i := range rng.IntN(4) {
		q, err := r.dial(uint16(i+1), dialOptions{depth: 2 + rng.IntN(30)})
		if err != nil {
			break
		}
		defer q.close()
		if _, ok := step(q, q.connectCommand(who, testNQN, cntlid, 0)); ok {
			queues = append(queues, q)
		}
	}
	for range rng.IntN(300) {
		q := queues[rng.IntN(len(queues))]
		if q.broken != nil {
			break
		}
		q.quick = true
		cmd := new(protocol.Command)
		n := 512 << rng.IntN(8)
		lba := uint64(rng.IntN(16384 - 128))
		if q == admin {
			switch rng.IntN(8) {
			case 0:
				cmd.InitAdmin(protocol.AdminAsyncEventRequest, q.cid(), 0)
			case 1:
				cmd.InitAbort(q.cid(), uint16(rng.IntN(3)), uint16(7*rng.IntN(50)))
			case 2:
				cmd.InitGetLogPage(q.cid(), protocol.LogID(rng.IntN(6)), protocol.NSIDAll, 0, uint32(n), false)
				q.keyed(cmd, 0, n)
			case 3:
				cmd.InitAdmin(protocol.AdminKeepAlive, q.cid(), 0)
			case 4:
				v := protocol.CCDefault.WithEN(rng.IntN(5) > 0)
				if rng.IntN(5) == 0 {
					v = v.WithSHN(protocol.SHNNormal)
				}
				cmd.InitPropertySet(q.cid(), protocol.PropertyCC, uint64(v))
			default:
				cmd.InitIdentify(q.cid(), protocol.CNS(rng.IntN(9)), uint32(rng.IntN(4)))
				q.keyed(cmd, 0, 4096)
			}
		} else {
			ops := []protocol.Opcode{protocol.OpRead, protocol.OpWrite, protocol.OpCompare, protocol.OpFlush, protocol.OpWriteZeroes,
				protocol.OpDatasetManagement, protocol.OpVerify, protocol.OpDatasetManagement}
			op := ops[rng.IntN(len(ops))]
			cmd.InitRW(op, q.cid(), uint32(1+rng.IntN(3)), lba, uint32(n/512), uint16(rng.IntN(2))<<14)
			switch op {
			case protocol.OpRead, protocol.OpWrite, protocol.OpCompare:
				q.keyed(cmd, 0, n)
			case protocol.OpDatasetManagement:
				cmd.InitDSM(q.cid(), 1, 1+rng.IntN(20), protocol.DSMDeallocate)
				q.keyed(cmd, 1<<20, 4096)
			}
		}
		if q.sends >= q.depth {
			q.poll(true)
			continue
		}
		q.send(cmd, nil)
		for range rng.IntN(4) {
			queues[rng.IntN(len(queues))].poll(false)
		}
		// Never more in flight than the queue has slots: wait for an answer now and then.
		for end := time.Now().Add(patience); q.broken == nil && q.inFlight() >= q.depth-1; {
			for _, o := range queues { // a Read that is not served holds buffers that others wait for
				o.poll(false)
			}
			if q.poll(true); q == admin && q.inFlight() < 8 {
				break
			}
			if time.Now().After(end) {
				if q == admin { // all slots hold event requests
					return
				}
				r.t.Errorf("queue %d: no answer\n%+v", q.qid, r.tgt.Status())
				return
			}
		}
	}
	if rng.IntN(2) == 0 { // leave in another order
		for i := len(queues) - 1; i >= 0; i-- {
			queues[i].close()
		}
	}
}

// Connections are evicted in every phase of their establishment.
func TestEvictionWhileConnecting(t *testing.T) {
	r := newRig(t, Config{MaxPending: 2}, memDevice(t, 1<<20))
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for range 60 {
				q, err := r.dial(uint16(i%3), dialOptions{})
				if err != nil {
					continue // refused or evicted
				}
				if i%2 == 0 {
					q.send(q.connectCommand(newIdentity(), testNQN, protocol.CNTLIDDynamic, 0), nil)
				}
				q.close()
			}
		}()
	}
	wg.Wait()
	r.gone()
	r.attach(sessionOptions{queues: 1})
}
