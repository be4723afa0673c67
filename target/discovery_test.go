package target

import (
	"bytes"
	"net/netip"
	"slices"
	"testing"
	"time"

	"rdblk/protocol"
)

// page reads the discovery log as hosts do: header, entries in chunks, header.
func (s *session) page() (protocol.DiscoveryLogHeader, []protocol.DiscoveryLogEntry) {
	s.t.Helper()
	var h, again protocol.DiscoveryLogHeader
	if err := h.UnmarshalBinary(s.log(protocol.LogDiscovery, 0, protocol.DiscoveryLogPeek, true)); err != nil {
		s.t.Fatal(err)
	}
	var b []byte
	for off := 1024; off < 1024*(int(h.NUMREC)+1); off += 4096 {
		n := min(4096, 1024*(int(h.NUMREC)+1)-off)
		b = append(b, s.log(protocol.LogDiscovery, uint64(off), n, true)...)
	}
	again.UnmarshalBinary(s.log(protocol.LogDiscovery, 0, protocol.DiscoveryLogPeek, false))
	if again != h {
		s.t.Fatalf("header changed from %+v to %+v", h, again)
	}
	var list []protocol.DiscoveryLogEntry
	for ; len(b) > 0; b = b[1024:] {
		var e protocol.DiscoveryLogEntry
		e.UnmarshalBinary(b[:1024])
		list = append(list, e)
	}
	return h, list
}

func (r *rig) discover(who identity, kato uint32) *session {
	r.t.Helper()
	return r.attach(sessionOptions{who: who, subnqn: protocol.DiscoveryNQN, kato: kato})
}

// nvm filters the entries that hosts connect to.
func nvm(list []protocol.DiscoveryLogEntry) (out []string) {
	for _, e := range list {
		if e.SUBTYPE == protocol.SubsystemNVM {
			out = append(out, e.SUBNQN+" "+netip.MustParseAddr(e.TRADDR).String()+" "+e.TRSVCID)
		}
	}
	slices.Sort(out)
	return out
}

func TestDiscoveryLog(t *testing.T) {
	allowed := newIdentity()
	r := newRig(t, Config{Hosts: []string{allowed.nqn}}, memDevice(t, 1<<20))
	wild, err := r.tgt.Listen(r.nic, netip.MustParseAddrPort("0.0.0.0:0"))
	if err != nil {
		t.Fatal(err)
	}
	port := func(a netip.AddrPort) string { return a.String()[len(a.Addr().String())+1:] }
	s := r.discover(allowed, 0)
	h, list := s.page()
	if int(h.NUMREC) != len(list) || len(list) != 3 {
		t.Fatalf("%d entries, NUMREC %d", len(list), h.NUMREC)
	}
	want := []string{testNQN + " 127.0.0.1 " + port(r.addr), testNQN + " 127.0.0.1 " + port(wild)}
	slices.Sort(want)
	if got := nvm(list); !slices.Equal(got, want) {
		t.Errorf("entries %q, want %q", got, want)
	}
	for _, e := range list {
		if e.TRTYPE != protocol.TransportRDMA || e.ADRFAM != protocol.FamilyIPv4 || e.CNTLID != protocol.CNTLIDDynamic || e.ASQSZ < 32 ||
			e.RDMA_QPTYPE != 1 || e.RDMA_PRTYPE != 1 || e.RDMA_CMS != 1 || e.TREQ&protocol.TREQDisableSQFlow == 0 || e.PORTID == 0 {
			t.Errorf("entry %+v", e)
		}
		if e.SUBTYPE == protocol.SubsystemDiscovery && (e.SUBNQN != protocol.DiscoveryNQN || e.TRSVCID != port(r.addr)) {
			t.Errorf("entry of this discovery subsystem %+v", e)
		}
	}
	// Any aligned piece is the same bytes as of the whole, and zeros follow.
	whole := bytes.Clone(s.log(protocol.LogDiscovery, 0, 4096, true))
	for _, w := range []struct{ off, n int }{{0, 4}, {16, 4}, {4, 2048}, {1000, 100}, {3000, 8192}, {4096, 512}, {1 << 20, 64}} {
		want := make([]byte, w.n)
		if w.off < len(whole) {
			copy(want, whole[w.off:])
		}
		if got := s.log(protocol.LogDiscovery, uint64(w.off), w.n, true); !bytes.Equal(got, want) {
			t.Errorf("%d bytes from %d differ", w.n, w.off)
		}
	}
	// A host that may not connect is answered, and told of nothing to connect to.
	_, list = r.discover(newIdentity(), 0).page()
	if got := nvm(list); len(got) != 0 {
		t.Errorf("a stranger sees %q", got)
	}
	// It comes in by the wildcard listener: the address it used is advertised.
	old := r.addr
	r.addr = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.2"), wild.Port())
	_, list = r.discover(allowed, 0).page()
	r.addr = old
	want = []string{testNQN + " 127.0.0.1 " + port(old), testNQN + " 127.0.0.2 " + port(wild)}
	slices.Sort(want)
	if got := nvm(list); !slices.Equal(got, want) {
		t.Errorf("entries %q, want %q", got, want)
	}
}

func TestDiscoveryController(t *testing.T) {
	r := newRig(t, Config{}, memDevice(t, 1<<20))
	// EN is not needed, as with Linux' target.
	s := r.attach(sessionOptions{subnqn: protocol.DiscoveryNQN, disable: true})
	s.page()
	var d protocol.IdentifyController
	d.UnmarshalBinary(s.identify(protocol.CNSController, 0))
	if d.CNTRLTYPE != protocol.ControllerTypeDiscovery || d.SUBNQN != protocol.DiscoveryNQN || d.MAXCMD == 0 || uint32(d.OAES) != 1<<31 ||
		d.LPA&protocol.LPAExtended == 0 || d.SGLS&protocol.SGLSKeyed == 0 || d.CNTLID != s.cntlid || d.NN != 0 {
		t.Errorf("identify: %+v", d)
	}
	s.enable()
	refuse := func(st protocol.Status, c *protocol.Command) {
		t.Helper()
		s.admin.want(st|dnr, c)
	}
	var c protocol.Command
	for _, cns := range []protocol.CNS{protocol.CNSNamespace, protocol.CNSActiveNamespaces, protocol.CNSNamespaceDescriptors, protocol.CNSCommandSetController} {
		c.InitIdentify(s.admin.cid(), cns, 0)
		s.admin.keyed(&c, 0, 4096)
		refuse(protocol.StatusInvalidField, &c)
	}
	c.InitGetLogPage(s.admin.cid(), protocol.LogSmart, protocol.NSIDAll, 0, 512, true)
	s.admin.keyed(&c, 0, 512)
	refuse(protocol.StatusInvalidLogPage, &c)
	s.setFeature(protocol.StatusInvalidField|dnr, protocol.FeatureNumberOfQueues, 0)
	s.getFeature(protocol.StatusInvalidField|dnr, protocol.FeatureNumberOfQueues)
	s.setFeature(0, protocol.FeatureAsyncEventConfig, 1<<31)
	s.setFeature(protocol.StatusInvalidField|dnr, protocol.FeatureAsyncEventConfig, 1<<8)
	c.InitAbort(s.admin.cid(), 0, 1)
	refuse(protocol.StatusInvalidOpcode, &c)
	c.InitAdmin(protocol.AdminKeepAlive, s.admin.cid(), 0)
	s.admin.ok(&c)
	s.setCC(protocol.CCDefault.WithEN(true).WithSHN(protocol.SHNNormal))
	eventually(t, "shutdown", func() bool { return s.csts().SHST() == protocol.SHSTComplete })
}

func TestDiscoveryChangeIsTold(t *testing.T) {
	a, b := newIdentity(), newIdentity()
	r := newRig(t, Config{Hosts: []string{a.nqn}}, memDevice(t, 1<<20))
	sa, sb := r.discover(a, 30_000), r.discover(b, 30_000)
	h, _ := sa.page()
	sb.page()
	ea, eb := sa.admin.aer(), sb.admin.aer()
	sa.none(ea)
	// What does not change what a host sees is not told to it.
	if err := r.tgt.SetHosts([]string{a.nqn, b.nqn}, false); err != nil {
		t.Fatal(err)
	}
	sb.event(eb, protocol.EventDiscoveryChanged)
	sa.none(ea)
	h2, list := sb.page()
	if h2.GENCTR == h.GENCTR || len(nvm(list)) != 1 {
		t.Errorf("generation %d, then %d; %q", h.GENCTR, h2.GENCTR, nvm(list))
	}
	// A listener concerns all.
	eb = sb.admin.aer()
	if _, err := r.tgt.Listen(r.nic, netip.MustParseAddrPort("127.0.0.1:0")); err != nil {
		t.Fatal(err)
	}
	sa.event(ea, protocol.EventDiscoveryChanged)
	sb.event(eb, protocol.EventDiscoveryChanged)
	// Once told, not again until the page is read.
	ea = sa.admin.aer()
	if _, err := r.tgt.Listen(r.nic, netip.MustParseAddrPort("127.0.0.1:0")); err != nil {
		t.Fatal(err)
	}
	sa.none(ea)
	if _, list := sa.page(); len(nvm(list)) != 3 {
		t.Errorf("entries %q", nvm(list))
	}
	r.tgt.SetHosts(nil, false)
	sa.event(ea, protocol.EventDiscoveryChanged)
	if _, list := sa.page(); len(nvm(list)) != 0 {
		t.Errorf("entries %q", nvm(list))
	}
}

func TestDiscoveryTimeouts(t *testing.T) {
	clock := newFakeClock()
	r := newRig(t, Config{clock: clock}, memDevice(t, 1<<20))
	once := r.discover(newIdentity(), 0)
	lasting := r.discover(newIdentity(), 30_000)
	for range 5 {
		clock.Advance(29 * time.Second)
		lasting.csts()
	}
	once.page() // any command counts
	for range 8 {
		clock.Advance(29 * time.Second)
		lasting.csts()
	}
	once.admin.awaitEnd()
	lasting.page()
}
