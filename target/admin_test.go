package target

import (
	"bytes"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"rdblk/blockdev"
	"rdblk/blockdev/blockdevtest"
	"rdblk/protocol"
)

// sized is a device whose store changes its size.
type sized struct {
	blockdev.TryDevice
	size atomic.Int64 // what Refresh finds
	now  atomic.Int64
}

func newSized(d blockdev.Device, size int64) *sized {
	s := &sized{TryDevice: d.(blockdev.TryDevice)}
	s.size.Store(size)
	s.now.Store(size)
	return s
}

func (s *sized) Info() blockdev.Info {
	i := s.TryDevice.Info()
	i.Size = s.now.Load()
	return i
}

func (s *sized) Refresh() (blockdev.Info, error) {
	if n := s.size.Load(); n >= s.now.Load() {
		s.now.Store(n)
		return s.Info(), nil
	}
	return s.Info(), blockdev.ErrOutOfRange
}

func TestIdentifyController(t *testing.T) {
	r := newRig(t, Config{Serial: "0123", Model: "model", Firmware: "1.2", QueueDepth: 64, MaxIO: 512 << 10, InCapsule: 8192},
		cached{memDevice(t, 1<<20).(blockdev.TryDevice)})
	s := r.attach(sessionOptions{})
	var d protocol.IdentifyController
	if err := d.UnmarshalBinary(s.identify(protocol.CNSController, 0)); err != nil {
		t.Fatal(err)
	}
	check := func(name string, got, want any) {
		t.Helper()
		if got != want {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
	check("CNTLID", d.CNTLID, s.cntlid)
	check("SN", d.SN, "0123")
	check("MN", d.MN, "model")
	check("FR", d.FR, "1.2")
	check("VER", d.VER, protocol.Version1_4)
	check("CMIC", d.CMIC, uint8(3))
	check("MDTS", d.MDTS, uint8(7))
	check("KAS", d.KAS, uint16(10))
	check("OAES", uint32(d.OAES), uint32(0x100))
	check("CTRATT", d.CTRATT, uint32(0x41))
	check("CNTRLTYPE", d.CNTRLTYPE, uint8(1))
	check("ACL", d.ACL, uint8(3))
	check("AERL", d.AERL, uint8(3))
	check("LPA", d.LPA, uint8(7))
	check("SQES", d.SQES, uint8(0x66))
	check("CQES", d.CQES, uint8(0x44))
	check("MAXCMD", d.MAXCMD, uint16(64))
	check("NN", d.NN, uint32(1024))
	check("ONCS", d.ONCS, uint16(protocol.ONCSCompare|protocol.ONCSDatasetManagement|protocol.ONCSWriteZeroes|protocol.ONCSVerify))
	check("VWC", d.VWC, uint8(5))
	check("SGLS", d.SGLS, uint32(0x00100005))
	check("SUBNQN", d.SUBNQN, testNQN)
	check("IOCCSZ", d.IOCCSZ, uint32(4+512))
	check("in-capsule size", d.InCapsuleSize(), uint32(8192))
	check("IORCSZ", d.IORCSZ, uint32(1))
	check("ICDOFF", d.ICDOFF, uint16(0))
	check("MSDBD", d.MSDBD, uint8(1))
	check("OFCS", d.OFCS, uint16(1))
}

func TestNoInCapsuleData(t *testing.T) {
	r := newRig(t, Config{InCapsule: -1}, memDevice(t, 1<<20))
	s := r.attach(sessionOptions{queues: 1})
	var d protocol.IdentifyController
	d.UnmarshalBinary(s.identify(protocol.CNSController, 0))
	if d.IOCCSZ != 4 || d.SGLS != 5 {
		t.Errorf("IOCCSZ %d, SGLS %#x", d.IOCCSZ, d.SGLS)
	}
	q := s.io[0]
	q.ok(q.rw(protocol.OpWrite, 0, 4096, 0, 0))
	w := q.rw(protocol.OpWrite, 0, 512, 0, 0)
	w.SetInCapsuleSGL(0, 512)
	q.want(protocol.StatusSGLOffsetInvalid|dnr, w)
	// A capsule with data is longer than the receive: the connection ends.
	q.send(w, make([]byte, 512))
	q.awaitEnd()
}

func TestIdentifyOthers(t *testing.T) {
	ro, err := blockdev.NewMem("ro", 1<<20, blockdev.Options{ReadOnly: true, BlockSize: 4096})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ro.Close() })
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	if _, err := r.tgt.AddNamespace(7, ro); err != nil {
		t.Fatal(err)
	}
	s := r.attach(sessionOptions{})
	var ns protocol.IdentifyNamespace
	ns.UnmarshalBinary(s.identify(protocol.CNSNamespace, 1))
	if ns.NSZE != 2048 || ns.NCAP != 2048 || ns.LBAF[0].LBADS != 9 || ns.NSATTR != 0 || ns.NMIC != 1 || ns.DLFEAT != 9 || ns.NPWG != 7 {
		t.Errorf("namespace 1: %+v", ns)
	}
	ns.UnmarshalBinary(s.identify(protocol.CNSNamespace, 7))
	if ns.NSZE != 256 || ns.LBAF[0].LBADS != 12 || ns.NSATTR != 1 {
		t.Errorf("namespace 7: %+v", ns)
	}
	zero := make([]byte, 4096)
	for _, nsid := range []uint32{2, 1024} {
		if !bytes.Equal(s.identify(protocol.CNSNamespace, nsid), zero) {
			t.Errorf("inactive namespace %d is not all zeros", nsid)
		}
	}
	if got := slices.Collect(protocol.NamespaceList(s.identify(protocol.CNSActiveNamespaces, 0))); !slices.Equal(got, []uint32{1, 7}) {
		t.Errorf("active namespaces %v", got)
	}
	if got := slices.Collect(protocol.NamespaceList(s.identify(protocol.CNSActiveNamespaces, 1))); !slices.Equal(got, []uint32{7}) {
		t.Errorf("active namespaces after 1: %v", got)
	}
	if got := slices.Collect(protocol.NamespaceList(s.identify(protocol.CNSAllocatedNamespaceList, 7))); len(got) != 0 {
		t.Errorf("allocated namespaces after 7: %v", got)
	}
	var ids, again protocol.NamespaceIDs
	if err := ids.UnmarshalBinary(s.identify(protocol.CNSNamespaceDescriptors, 1)); err != nil || ids.UUID.IsZero() || ids.NGUID.IsZero() || !ids.HasCSI {
		t.Errorf("descriptors: %v %+v", err, ids)
	}
	again.UnmarshalBinary(s.identify(protocol.CNSNamespaceDescriptors, 7))
	if ids.UUID == again.UUID {
		t.Error("two namespaces have one UUID")
	}
	var nvm protocol.IdentifyNVMController
	nvm.UnmarshalBinary(s.identify(protocol.CNSCommandSetController, 0))
	if nvm.WZSL != 13 {
		t.Errorf("NVM limits: %+v", nvm)
	}
	var ind protocol.IdentifyIndependentNamespace
	ind.UnmarshalBinary(s.identify(protocol.CNSIndependentNamespace, 7))
	if ind.NSTAT != protocol.NSTATReady || ind.NSATTR != 1 || ind.NSFEAT&protocol.IndependentNoWriteCache == 0 {
		t.Errorf("independent namespace: %+v", ind)
	}
	s.identify(protocol.CNSAllocatedNamespace, 1)
	s.identify(protocol.CNSCommandSetNamespace, 1)
	s.identify(protocol.CNSCommandSetActiveList, 0)
	if b := s.identify(protocol.CNSControllers, 0); b[0] != 1 || b[2] != byte(s.cntlid) {
		t.Errorf("controller list % x", b[:8])
	}
	if b := s.identify(protocol.CNSNamespaceControllers, 1); b[0] != 1 {
		t.Errorf("controller list of namespace 1 % x", b[:8])
	}
	refuse := func(st protocol.Status, cns protocol.CNS, nsid uint32, change func(*protocol.Command)) {
		t.Helper()
		var c protocol.Command
		c.InitIdentify(s.admin.cid(), cns, nsid)
		s.admin.keyed(&c, 0, 4096)
		if change != nil {
			change(&c)
		}
		s.admin.want(st|dnr, &c)
	}
	for _, nsid := range []uint32{0, 1025, protocol.NSIDAll} {
		refuse(protocol.StatusInvalidNamespace, protocol.CNSNamespace, nsid, nil)
	}
	refuse(protocol.StatusInvalidNamespace, protocol.CNSActiveNamespaces, 0xFFFFFFFE, nil)
	refuse(protocol.StatusInvalidNamespace, protocol.CNSNamespaceDescriptors, 2, nil)
	refuse(protocol.StatusInvalidNamespace, protocol.CNSNamespaceControllers, 2, nil)
	refuse(protocol.StatusInvalidField, protocol.CNSCommandSetController, 0, func(c *protocol.Command) { c.SetIdentifyCSI(protocol.CSIZNS) })
	refuse(protocol.StatusInvalidField, protocol.CNSCommandSets, 0, nil)
	refuse(protocol.StatusInvalidField, protocol.CNS(0xFF), 0, nil)
	refuse(protocol.StatusDataSGLLengthInvalid, protocol.CNSController, 0, func(c *protocol.Command) { s.admin.keyed(c, 0, 4092) })
	refuse(protocol.StatusInvalidField, protocol.CNSController, 0, func(c *protocol.Command) { c.SetInCapsuleSGL(0, 4096) })
	var c protocol.Command
	for _, op := range []protocol.AdminOpcode{protocol.AdminDeleteSQ, protocol.AdminCreateSQ, protocol.AdminDeleteCQ, protocol.AdminCreateCQ, 0x80, 0xFF} {
		c.InitAdmin(op, s.admin.cid(), 0)
		s.admin.want(protocol.StatusInvalidOpcode|dnr, &c)
	}
	c.InitFabrics(protocol.FabricsAuthSend, s.admin.cid())
	s.admin.want(protocol.StatusInvalidOpcode|dnr, &c)
}

// The identity of a namespace without one of its own must survive a restart.
func TestNamespaceUUIDIsStable(t *testing.T) {
	read := func() protocol.UUID {
		d, err := blockdev.NewNull("null", 1<<20, blockdev.Options{})
		if err != nil {
			t.Fatal(err)
		}
		r := newRig(t, Config{}, d)
		var ids protocol.NamespaceIDs
		ids.UnmarshalBinary(r.attach(sessionOptions{}).identify(protocol.CNSNamespaceDescriptors, 1))
		return ids.UUID
	}
	if a, b := read(), read(); a != b || a.IsZero() {
		t.Errorf("UUID %v, then %v", a, b)
	}
}

func (s *session) setFeature(want protocol.Status, fid protocol.FeatureID, v uint32) uint32 {
	s.t.Helper()
	var c protocol.Command
	c.InitSetFeatures(s.admin.cid(), fid, 0, v)
	a := s.admin.want(want, &c)
	return a.DW0()
}

func (s *session) getFeature(want protocol.Status, fid protocol.FeatureID) uint32 {
	s.t.Helper()
	var c protocol.Command
	c.InitGetFeatures(s.admin.cid(), fid, protocol.SelectCurrent, 0)
	a := s.admin.want(want, &c)
	return a.DW0()
}

func TestFeatures(t *testing.T) {
	r := newRig(t, Config{MaxQueuesPerController: 6}, cached{memDevice(t, 1<<20).(blockdev.TryDevice)})
	s := r.attach(sessionOptions{kato: 4500})
	const bad = protocol.StatusInvalidField | dnr
	for _, asked := range []uint32{0, 3<<16 | 3, 100<<16 | 100} {
		if got := s.setFeature(0, protocol.FeatureNumberOfQueues, asked); got != 5<<16|5 {
			t.Errorf("number of queues %#x for %#x", got, asked)
		}
	}
	s.setFeature(bad, protocol.FeatureNumberOfQueues, 0xFFFF)
	s.setFeature(bad, protocol.FeatureNumberOfQueues, 0xFFFF0000)
	if got := s.getFeature(0, protocol.FeatureNumberOfQueues); got != 5<<16|5 {
		t.Errorf("number of queues %#x", got)
	}
	if got := s.getFeature(0, protocol.FeatureKeepAliveTimer); got != 5000 {
		t.Errorf("keep-alive timeout %d ms, want 5000 (rounded up)", got)
	}
	s.setFeature(0, protocol.FeatureKeepAliveTimer, 60_001)
	if got := s.getFeature(0, protocol.FeatureKeepAliveTimer); got != 61_000 {
		t.Errorf("keep-alive timeout %d ms, want 61000", got)
	}
	if got := s.getFeature(0, protocol.FeatureAsyncEventConfig); got != 0x100 {
		t.Errorf("event configuration %#x", got)
	}
	s.setFeature(0, protocol.FeatureAsyncEventConfig, 0x11F)
	if got := s.getFeature(0, protocol.FeatureAsyncEventConfig); got != 0x11F {
		t.Errorf("event configuration %#x", got)
	}
	s.setFeature(bad, protocol.FeatureAsyncEventConfig, 1<<31)
	s.setFeature(bad, protocol.FeatureAsyncEventConfig, 1<<9)
	if got := s.getFeature(0, protocol.FeatureVolatileCache); got != 1 {
		t.Errorf("volatile write cache %d", got)
	}
	s.setFeature(0, protocol.FeatureVolatileCache, 1)
	s.setFeature(protocol.StatusFeatureNotChangeable|dnr, protocol.FeatureVolatileCache, 0)
	for _, f := range []protocol.FeatureID{protocol.FeatureArbitration, protocol.FeatureErrorRecovery, protocol.FeatureTemperature} {
		s.setFeature(0, f, 5)
		if got := s.getFeature(0, f); got != 5 {
			t.Errorf("%v is %d", f, got)
		}
	}
	s.setFeature(0, protocol.FeaturePowerManagement, 0)
	s.setFeature(bad, protocol.FeaturePowerManagement, 1)
	s.setFeature(protocol.StatusCommandSequenceError|dnr, protocol.FeatureHostIdentifier, 1)
	for _, f := range []protocol.FeatureID{0, protocol.FeatureTimestamp, protocol.FeatureHostBehavior, protocol.FeatureWriteProtection, 0xFF} {
		s.setFeature(bad, f, 0)
		s.getFeature(bad, f)
	}
	var c protocol.Command
	c.InitSetFeatures(s.admin.cid(), protocol.FeatureArbitration, 0, 1)
	c.SetSV(true)
	s.admin.want(protocol.StatusFeatureNotSaveable|dnr, &c)
	c.InitGetFeatures(s.admin.cid(), protocol.FeatureArbitration, protocol.SelectDefault, 0)
	s.admin.want(bad, &c)

	c.InitGetFeatures(s.admin.cid(), protocol.FeatureHostIdentifier, protocol.SelectCurrent, 0)
	c.SetFeatureValue(1)
	b := s.admin.keyed(&c, 0, 16)
	s.admin.ok(&c)
	if !bytes.Equal(b, s.who.id[:]) {
		t.Errorf("host identifier % x", b)
	}
	c.SetFeatureValue(0)
	c.SetID(s.admin.cid())
	s.admin.want(bad, &c)

	s.addQueue(1, 32)
	s.setFeature(protocol.StatusCommandSequenceError|dnr, protocol.FeatureNumberOfQueues, 3<<16|3)
}

func TestLogPages(t *testing.T) {
	var losses atomic.Uint64
	r := newRig(t, Config{Firmware: "7.1", UnsafeShutdowns: func(nsid uint32) uint64 { return losses.Load() + uint64(nsid) }}, memDevice(t, 1<<20))
	s := r.attach(sessionOptions{queues: 1})
	q := s.io[0]
	q.ok(q.rw(protocol.OpWrite, 0, 65536, 0, 0))
	q.ok(q.rw(protocol.OpRead, 0, 4096, 0, 0))
	// An error is remembered, and its completion says so.
	bad := q.rw(protocol.OpRead, 1<<40, 4096, 0, 0)
	if a := q.do(bad); !a.Status().More() {
		t.Errorf("status %v without More", a.Status())
	}
	var e protocol.ErrorLogEntry
	b := s.log(protocol.LogError, 0, 64*64, true)
	e.UnmarshalBinary(b)
	if e.Count != 1 || e.SQID != 1 || e.CID != bad.ID() || e.Status.Code() != protocol.StatusLBAOutOfRange || e.LBA != 1<<40 || e.NSID != 1 {
		t.Errorf("error log: %+v", e)
	}
	e.UnmarshalBinary(b[64:])
	if e.Count != 0 {
		t.Errorf("second entry: %+v", e)
	}
	for range 100 { // round the ring
		q.do(q.rw(protocol.OpRead, 1<<40, 4096, 0, 0))
	}
	b = s.log(protocol.LogError, 0, 64*64, true)
	for i := range 64 {
		e.UnmarshalBinary(b[64*i:])
		if e.Count != uint64(101-i) {
			t.Fatalf("entry %d has count %d", i, e.Count)
		}
	}
	var smart protocol.SmartLog
	smart.UnmarshalBinary(s.log(protocol.LogSmart, 0, 512, true))
	if smart.PowerCycles.Lo != bootNumber() || smart.PowerCycles.Lo == 0 {
		t.Errorf("power cycles %d", smart.PowerCycles.Lo)
	}
	if smart.UnsafeShutdowns.Lo != 0 {
		t.Errorf("unsafe shutdowns %d", smart.UnsafeShutdowns.Lo)
	}
	losses.Store(1 << 40) // while it runs
	smart.UnmarshalBinary(s.log(protocol.LogSmart, 0, 512, true))
	if smart.UnsafeShutdowns.Lo != 1<<40 {
		t.Errorf("unsafe shutdowns %d", smart.UnsafeShutdowns.Lo)
	}
	var own protocol.SmartLog
	own.UnmarshalBinary(s.logOf(1, protocol.LogSmart, 0, 512, true))
	if own.UnsafeShutdowns.Lo != 1<<40+1 || own.PowerCycles != smart.PowerCycles || own.HostWrites != smart.HostWrites {
		t.Errorf("health log of the namespace: %+v", own)
	}
	if smart.HostWrites.Lo != 1 || smart.DataUnitsWritten.Lo != 1 || smart.ErrorLogEntries.Lo != 101 || smart.MediaErrors.Lo != 0 || smart.CriticalWarning != 0 {
		t.Errorf("health log: %+v", smart)
	}
	var fw protocol.FirmwareSlotLog
	fw.UnmarshalBinary(s.log(protocol.LogFirmwareSlot, 0, 512, true))
	if fw.AFI != 1 || fw.Revisions[0] != "7.1" {
		t.Errorf("firmware log: %+v", fw)
	}
	var fx protocol.EffectsLog
	fx.UnmarshalBinary(s.log(protocol.LogEffects, 0, 4096, true))
	if fx.Admin[protocol.AdminIdentify] != 1 || fx.IO[protocol.OpRead] != 1 || fx.IO[protocol.OpWrite] != 3 || fx.IO[protocol.OpWriteZeroes] != 3 ||
		fx.IO[protocol.OpCopy] != 0 || fx.Admin[protocol.AdminCreateSQ] != 0 {
		t.Errorf("effects log: %v %v", fx.Admin[:16], fx.IO[:16])
	}
	pages := s.log(protocol.LogSupportedPages, 0, 1024, true)
	if !protocol.LogPageSupported(pages, protocol.LogSmart) || protocol.LogPageSupported(pages, protocol.LogANA) {
		t.Error("supported log pages are wrong")
	}
	// Any offset and length in dwords, beyond the end zeros.
	whole := bytes.Clone(s.log(protocol.LogEffects, 0, 4096, true))
	for _, w := range []struct{ off, n int }{{4, 4}, {100, 20}, {4000, 96}, {4092, 64}, {1024, 8192}} {
		want := make([]byte, w.n)
		copy(want, whole[w.off:])
		if got := s.log(protocol.LogEffects, uint64(w.off), w.n, true); !bytes.Equal(got, want) {
			t.Errorf("%d bytes from %d of the page differ", w.n, w.off)
		}
	}
	if got := s.log(protocol.LogEffects, 1<<63, 64, true); !bytes.Equal(got, make([]byte, 64)) {
		t.Error("far beyond the page is not zeros")
	}
	refuse := func(st protocol.Status, change func(c *protocol.Command)) {
		t.Helper()
		var c protocol.Command
		c.InitGetLogPage(s.admin.cid(), protocol.LogSmart, protocol.NSIDAll, 0, 512, true)
		s.admin.keyed(&c, 0, 512)
		change(&c)
		s.admin.want(st|dnr, &c)
	}
	refuse(protocol.StatusInvalidLogPage, func(c *protocol.Command) { c.SetLID(protocol.LogDiscovery) })
	refuse(protocol.StatusInvalidLogPage, func(c *protocol.Command) { c.SetLID(protocol.LogANA) })
	refuse(protocol.StatusInvalidField, func(c *protocol.Command) { c.SetLID(protocol.LogError); c.SetNSID(1) })
	refuse(protocol.StatusInvalidNamespace, func(c *protocol.Command) { c.SetNSID(2) })
	refuse(protocol.StatusInvalidNamespace, func(c *protocol.Command) { c.SetNSID(MaxNamespaces + 1) })
	refuse(protocol.StatusInvalidField, func(c *protocol.Command) { c.SetDW(12, 2) })                               // LPO 2
	refuse(protocol.StatusInvalidField, func(c *protocol.Command) { c.SetDW(14, 1<<23) })                           // OT
	refuse(protocol.StatusInvalidField, func(c *protocol.Command) { c.SetDW(10, 0xFFFF0002); c.SetDW(11, 0xFFFF) }) // 16 GiB
	refuse(protocol.StatusDataSGLLengthInvalid, func(c *protocol.Command) { c.SetLogLength(516) })
}

func TestKeepAliveCommand(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	s := r.attach(sessionOptions{})
	var c protocol.Command
	c.InitAdmin(protocol.AdminKeepAlive, s.admin.cid(), 0)
	s.admin.want(protocol.StatusKeepAliveInvalid, &c)
	s.setFeature(0, protocol.FeatureKeepAliveTimer, 60_000)
	c.SetID(s.admin.cid())
	s.admin.ok(&c)
}

func TestKeepAliveExpiry(t *testing.T) {
	clock := newFakeClock()
	r := newRig(t, Config{clock: clock}, memDevice(t, 1<<20))
	s := r.attach(sessionOptions{kato: 5000, queues: 2})
	quiet := r.attach(sessionOptions{}) // no timeout: stays
	ka := func() {
		t.Helper()
		var c protocol.Command
		c.InitAdmin(protocol.AdminKeepAlive, s.admin.cid(), 0)
		s.admin.ok(&c)
	}
	for range 10 { // Keep Alive keeps it
		ka()
		clock.Advance(5 * time.Second)
	}
	for i := range 10 { // so does any other traffic, on any queue
		q := s.io[i%2]
		q.ok(q.rw(protocol.OpRead, 0, 512, 0, 0))
		clock.Advance(5 * time.Second)
	}
	ka()
	// The clock stands still: traffic of any age keeps it.
	clock.Advance(4900 * time.Millisecond)
	ka()
	if st := r.tgt.Status(); len(st.Controllers) != 2 || st.Controllers[0].Timer != "keep-alive" || st.Controllers[1].Timer != "none" {
		t.Errorf("controllers %+v", st.Controllers)
	}
	for range 3 {
		clock.Advance(5 * time.Second)
	}
	s.admin.awaitEnd()
	s.io[0].awaitEnd()
	s.io[1].awaitEnd()
	eventually(t, "association gone", func() bool { return r.tgt.Stats().Controllers == 1 })
	if n := r.tgt.Stats().KeepAliveTimeouts; n != 1 {
		t.Errorf("%d keep-alive timeouts counted", n)
	}
	clock.Advance(time.Hour)
	quiet.identify(protocol.CNSController, 0)
}

// A process that did not run for a while must not take that for the silence of its hosts.
func TestKeepAliveAfterSuspension(t *testing.T) {
	clock := newFakeClock()
	r := newRig(t, Config{clock: clock}, memDevice(t, 1<<20))
	s := r.attach(sessionOptions{kato: 5000})
	r.tgt.mu.Lock()
	c := r.tgt.sub.controllers[s.cntlid]
	r.tgt.mu.Unlock()
	c.mu.Lock()
	gen := c.timerGen
	c.mu.Unlock()
	c.traffic.Store(false)
	c.expired(gen, clock.Now().Add(-time.Minute), 5*time.Second) // as if it fired a minute late
	s.identify(protocol.CNSController, 0)
	clock.Advance(5 * time.Second)
	clock.Advance(5 * time.Second)
	s.admin.awaitEnd()
}

func TestAssociationTimeout(t *testing.T) {
	clock := newFakeClock()
	r := newRig(t, Config{clock: clock}, memDevice(t, 1<<20))
	never := r.attach(sessionOptions{disable: true})
	reset := r.attach(sessionOptions{kato: 5000})
	reset.setCC(protocol.CCDefault)
	down := r.attach(sessionOptions{kato: 5000})
	down.setCC(protocol.CCDefault.WithEN(true).WithSHN(protocol.SHNNormal))
	clock.Advance(119 * time.Second) // hosts send no Keep Alive now
	for _, s := range []*session{never, reset, down} {
		s.csts()
	}
	clock.Advance(2 * time.Second)
	for _, s := range []*session{never, reset, down} {
		s.admin.awaitEnd()
	}
}

func (q *hostQueue) aer() uint16 {
	var c protocol.Command
	c.InitAdmin(protocol.AdminAsyncEventRequest, q.cid(), 0)
	q.send(&c, nil)
	return c.ID()
}

// sync makes sure that the target has seen everything sent so far.
func (s *session) sync() { s.t.Helper(); s.get(protocol.PropertyVS) }

func (s *session) none(cid uint16) {
	s.t.Helper()
	s.sync()
	if a, ok := s.admin.answers[cid]; ok {
		s.t.Fatalf("event request is answered: %v, %v", protocol.AsyncEvent(a.DW0()), a.Status())
	}
}

func (s *session) event(cid uint16, want protocol.AsyncEvent) {
	s.t.Helper()
	a, err := s.admin.take(cid)
	if err != nil {
		s.t.Fatal(err)
	}
	if !a.Status().OK() || protocol.AsyncEvent(a.DW0()) != want {
		s.t.Fatalf("event %v (%v), want %v", protocol.AsyncEvent(a.DW0()), a.Status(), want)
	}
}

func TestResizeIsTold(t *testing.T) {
	dev := newSized(memDevice(t, 64<<20), 1<<20)
	r := newRig(t, Config{}, dev, memDevice(t, 1<<20))
	s := r.attach(sessionOptions{queues: 1})
	s.setFeature(0, protocol.FeatureAsyncEventConfig, 0x100)
	aer := s.admin.aer()
	s.none(aer)
	q := s.io[0]
	beyond := uint64(1 << 20 / 512)
	q.want(protocol.StatusLBAOutOfRange|dnr, q.rw(protocol.OpRead, beyond, 4096, 0, 0))

	dev.size.Store(2 << 20)
	if err := r.tgt.Refresh(); err != nil {
		t.Fatal(err)
	}
	s.event(aer, protocol.EventNamespaceChanged)
	var ns protocol.IdentifyNamespace
	ns.UnmarshalBinary(s.identify(protocol.CNSNamespace, 1))
	if ns.NSZE != 4096 {
		t.Errorf("NSZE %d after growth", ns.NSZE)
	}
	q.ok(q.rw(protocol.OpWrite, beyond, 4096, 0, 0))

	// Until the log is read nothing more is told, but everything recorded.
	aer = s.admin.aer()
	dev.size.Store(3 << 20)
	if err := r.tgt.Refresh(); err != nil {
		t.Fatal(err)
	}
	id, err := r.tgt.AddNamespace(0, memDevice(t, 1<<20))
	if err != nil || id != 3 {
		t.Fatal(id, err)
	}
	s.none(aer)
	if got := slices.Collect(protocol.ChangedNamespaces(s.log(protocol.LogChangedNamespaces, 0, 4096, true))); !slices.Equal(got, []uint32{1, 3}) {
		t.Errorf("changed namespaces %v", got)
	}
	s.none(aer) // that was with RAE
	s.log(protocol.LogChangedNamespaces, 0, 4096, false)
	s.none(aer)
	if got := slices.Collect(protocol.ChangedNamespaces(s.log(protocol.LogChangedNamespaces, 0, 4096, false))); len(got) != 0 {
		t.Errorf("changed namespaces %v after the list was read", got)
	}
	if err := r.tgt.RemoveNamespace(3); err != nil {
		t.Fatal(err)
	}
	s.event(aer, protocol.EventNamespaceChanged)

	// An event without a request waits for one.
	s.log(protocol.LogChangedNamespaces, 0, 4096, false)
	dev.size.Store(4 << 20)
	r.tgt.Refresh()
	s.event(s.admin.aer(), protocol.EventNamespaceChanged)

	// A host that does not want to know is not told.
	s.log(protocol.LogChangedNamespaces, 0, 4096, false)
	s.setFeature(0, protocol.FeatureAsyncEventConfig, 0)
	aer = s.admin.aer()
	dev.size.Store(5 << 20)
	r.tgt.Refresh()
	s.none(aer)

	// A shrink is refused and changes nothing.
	dev.size.Store(1 << 20)
	if err := r.tgt.Refresh(); err == nil {
		t.Error("a shrink is taken")
	}
	ns.UnmarshalBinary(s.identify(protocol.CNSNamespace, 1))
	if ns.NSZE != 5<<20/512 {
		t.Errorf("NSZE %d after a refused shrink", ns.NSZE)
	}
}

func TestAsyncEventLimitAndReset(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	s := r.attach(sessionOptions{})
	var aers []uint16
	for range 4 {
		aers = append(aers, s.admin.aer())
	}
	var c protocol.Command
	c.InitAdmin(protocol.AdminAsyncEventRequest, s.admin.cid(), 0)
	s.admin.want(protocol.StatusAsyncEventLimitExceeded|dnr, &c)
	for _, a := range aers {
		s.none(a)
	}
	s.setCC(protocol.CCDefault) // reset ends them
	for _, id := range aers {
		a, err := s.admin.take(id)
		if err != nil || a.Status().Code() != protocol.StatusAbortRequested {
			t.Errorf("event request after reset: %v %v", a.Status(), err)
		}
	}
	s.setCC(protocol.CCDefault.WithEN(true))
	s.none(s.admin.aer())
}

func (s *session) abort(sqid, cid uint16) bool {
	s.t.Helper()
	var c protocol.Command
	c.InitAbort(s.admin.cid(), sqid, cid)
	a := s.admin.ok(&c)
	return a.DW0()&protocol.AbortedNot == 0
}

func TestAbort(t *testing.T) {
	dev := blockdevtest.Delayed(memDevice(t, 16<<20))
	// Memory for two transfers of the largest size: the third waits for a buffer.
	r := newRig(t, Config{Workers: 1, MaxIO: 1 << 20, BufferMemory: 2 << 20}, dev)
	s := r.attach(sessionOptions{queues: 2})
	aer := s.admin.aer()
	if !s.abort(0, aer) {
		t.Error("event request is not aborted")
	}
	if a, err := s.admin.take(aer); err != nil || a.Status().Code() != protocol.StatusAbortRequested {
		t.Errorf("aborted event request: %v %v", a.Status(), err)
	}
	if s.abort(0, 999) || s.abort(1, 999) || s.abort(77, 1) {
		t.Error("a command that does not exist is aborted")
	}
	gate := dev.Hold(blockdevtest.Match{Ops: []blockdev.Op{blockdev.OpRead}})
	q := s.io[0]
	var cids []uint16
	for i := range 3 {
		c := q.rw(protocol.OpRead, 0, 1<<20, i<<20, 0)
		q.send(c, nil)
		cids = append(cids, c.ID())
	}
	gate.Await(t, 2)
	eventually(t, "third read waits", func() bool { q.poll(false); return r.tgt.Stats().Workers[0].WaitingBuffer == 1 })
	if s.abort(1, cids[0]) {
		t.Error("a read in the back end is said to be aborted")
	}
	if s.abort(2, cids[2]) {
		t.Error("a command of another queue is aborted")
	}
	if !s.abort(1, cids[2]) {
		t.Error("a waiting read is not aborted")
	}
	a, err := q.take(cids[2])
	if err != nil || a.Status().Code() != protocol.StatusAbortRequested {
		t.Errorf("aborted read: %v %v", a.Status(), err)
	}
	gate.Open()
	for _, id := range cids[:2] {
		if a, err := q.take(id); err != nil || !a.Status().OK() {
			t.Errorf("read: %v %v", a.Status(), err)
		}
	}
	q.ok(q.rw(protocol.OpRead, 0, 1<<20, 0, 0)) // the memory is all there
}
