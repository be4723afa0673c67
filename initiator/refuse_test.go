package initiator

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"rdblk/internal/envtest"
	"rdblk/protocol"
)

// answer makes a hook that answers a command by name with a status.
func answer(name string, s protocol.Status, result uint64) func(*fakeCommand) bool {
	return func(k *fakeCommand) bool {
		if commandName(&k.cmd, k.req.QID) != name {
			return false
		}
		_ = k.respond(s, result)
		return true
	}
}

func reject(s protocol.RejectStatus) func(protocol.RDMAConnectRequest) []byte {
	return func(protocol.RDMAConnectRequest) []byte {
		b, _ := (&protocol.RDMAConnectReject{Status: s}).AppendBinary(nil)
		return b
	}
}

func TestConnectRefused(t *testing.T) {
	ident := func(fn func(*protocol.IdentifyController)) func(*fakeTarget) {
		return func(f *fakeTarget) { fn(&f.ctrl) }
	}
	hook := func(h func(*fakeCommand) bool) func(*fakeTarget) { return func(f *fakeTarget) { f.hook = h } }
	for _, c := range []struct {
		name string
		set  func(*fakeTarget)
		is   error  // may be nil
		says string // in the message
	}{
		{"rejected: no resources", func(f *fakeTarget) { f.onRequest = reject(protocol.RejectNoResources) }, protocol.RejectNoResources, "fewer queues"},
		{"rejected: queue size", func(f *fakeTarget) { f.onRequest = reject(protocol.RejectInvalidHSQSIZE) }, protocol.RejectInvalidHSQSIZE, "lower the queue depth"},
		{"rejected without a reason", func(f *fakeTarget) { f.onRequest = func(protocol.RDMAConnectRequest) []byte { return []byte{1} } }, nil, "without a reason"},
		{"I/O queue rejected", func(f *fakeTarget) {
			f.onRequest = func(r protocol.RDMAConnectRequest) []byte {
				if r.QID == 2 {
					return reject(protocol.RejectInvalidQID)(r)
				}
				return nil
			}
		}, protocol.RejectInvalidQID, "queue 2"},
		{"host not allowed", hook(answer("Connect", protocol.StatusConnectInvalidHost.WithDNR(), 0)), protocol.StatusConnectInvalidHost, "list of hosts"},
		{"no such subsystem", hook(answer("Connect", protocol.StatusConnectInvalidParameters.WithDNR(), uint64(protocol.ConnectInvalidSUBNQN))), protocol.StatusConnectInvalidParameters, "no subsystem of that name"},
		{"bad queue size", hook(answer("Connect", protocol.StatusConnectInvalidParameters.WithDNR(), uint64(protocol.ConnectInvalidSQSIZE))), nil, "SQSIZE"},
		{"busy for good", hook(answer("Connect", protocol.StatusConnectControllerBusy.WithDNR(), 0)), protocol.StatusConnectControllerBusy, "no free controller"},
		{"authentication", hook(answer("Connect", 0, uint64(protocol.ConnectATR)|1)), ErrUnsupported, "authentication"},
		{"I/O Connect refused", hook(func(k *fakeCommand) bool {
			return k.req.QID == 1 && answer("Connect", protocol.StatusConnectInvalidParameters.WithDNR(), uint64(protocol.ConnectInvalidCNTLID))(k)
		}), nil, "queue 1"},
		{"no keyed SGLs", ident(func(d *protocol.IdentifyController) { d.SGLS = 1 }), ErrUnsupported, "keyed"},
		{"no keep-alive", ident(func(d *protocol.IdentifyController) { d.KAS = 0 }), ErrUnsupported, "keep-alive"},
		{"small capsules", ident(func(d *protocol.IdentifyController) { d.IOCCSZ = 3 }), ErrUnsupported, "capsules of 48 bytes"},
		{"no responses", ident(func(d *protocol.IdentifyController) { d.IORCSZ = 0 }), ErrUnsupported, "response capsules"},
		{"data at an offset", ident(func(d *protocol.IdentifyController) { d.ICDOFF = 1 }), ErrUnsupported, "ICDOFF"},
		{"a discovery controller", ident(func(d *protocol.IdentifyController) { d.CNTRLTYPE = 2 }), ErrUnsupported, "type 2"},
		{"queues of one", ident(func(d *protocol.IdentifyController) { d.MAXCMD = 1 }), ErrUnsupported, "MAXCMD 1"},
		{"no NVM command set", func(f *fakeTarget) { f.cap = f.cap.WithCSS(0) }, ErrUnsupported, "command set"},
		{"another controller", hook(func(k *fakeCommand) bool {
			if k.cmd.AdminOpcode() != protocol.AdminIdentify || k.req.QID != 0 || k.cmd.CNS() != protocol.CNSController {
				return false
			}
			b, _ := (&protocol.IdentifyController{CNTLID: 99}).AppendBinary(nil)
			_ = k.deliver(b)
			return true
		}), ErrProtocol, "controller 1, Identify says 99"},
		{"fatal status", hook(func(k *fakeCommand) bool {
			return k.cmd.IsFabrics() && k.cmd.FabricsType() == protocol.FabricsPropertyGet && k.cmd.Property() == protocol.PropertyCSTS &&
				k.respond(0, uint64(protocol.CSTS(0).WithCFS(true))) == nil
		}), nil, "fatal status"},
		{"never ready", func(f *fakeTarget) {
			f.cap = f.cap.WithTO(500 * time.Millisecond)
			f.hook = func(k *fakeCommand) bool {
				return k.cmd.IsFabrics() && k.cmd.FabricsType() == protocol.FabricsPropertyGet && k.cmd.Property() == protocol.PropertyCSTS && k.respond(0, 0) == nil
			}
		}, ErrTimeout, "did not become ready within 500ms"},
		{"Identify fails", hook(answer("Identify", protocol.StatusInternalError.WithDNR(), 0)), protocol.StatusInternalError, "Identify controller"},
		{"no queues", hook(answer("Set Features", protocol.StatusInvalidField.WithDNR(), 0)), protocol.StatusInvalidField, "Number of Queues"},
		{"namespace list goes backwards", hook(func(k *fakeCommand) bool {
			if k.req.QID != 0 || k.cmd.AdminOpcode() != protocol.AdminIdentify || k.cmd.CNS() != protocol.CNSActiveNamespaces {
				return false
			}
			ids := make([]uint32, 1024)
			for i := range ids {
				ids[i] = uint32(i + 1) // whatever was asked for: a host that trusts it goes on for ever
			}
			_ = k.deliver(protocol.AppendNamespaceList(nil, ids))
			return true
		}), nil, ""},
		{"dies at Connect", hook(func(k *fakeCommand) bool { k.killed.Store(true); return true }), nil, "connection lost"},
		{"never answers Connect", hook(func(k *fakeCommand) bool { return true }), ErrTimeout, "Connect"},
		{"never answers an I/O Connect", hook(func(k *fakeCommand) bool { return k.req.QID == 2 }), ErrTimeout, "queue 2: Connect"},
		{"never answers Identify", hook(func(k *fakeCommand) bool { return k.req.QID == 0 && k.cmd.AdminOpcode() == protocol.AdminIdentify }), ErrTimeout, "Identify"},
	} {
		t.Run(c.name, func(t *testing.T) {
			waits := c.is == ErrTimeout && c.says != "did not become ready within 500ms"
			if waits {
				t.Parallel()
			}
			f := newFakeTarget(t)
			f.set(func() { c.set(f) })
			p := &crooked{Provider: newProvider(t)}
			cfg := testConfig(f, p)
			if waits {
				cfg.ConnectTimeout = 6 * time.Second // for what comes before the command in question, too
			}
			start := time.Now()
			s, err := Connect(context.Background(), cfg)
			if err == nil {
				ctx, stop := context.WithTimeout(context.Background(), 60*time.Second)
				defer stop()
				s.Close(ctx)
				if c.says == "" {
					return // harmless: what counts is that it ended
				}
				t.Fatal("connected")
			}
			if d := time.Since(start); d > 15*time.Second {
				t.Errorf("took %v", d)
			}
			if c.is != nil && !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), f.addr.String()) {
				t.Errorf("%v\nwant %v, %q", err, c.is, c.says)
			}
			if n, m := p.opened.Load(), p.closed.Load(); n != m {
				t.Errorf("%d queue pairs opened, %d closed", n, m)
			}
		})
	}
}

// A target that is busy (it still ends an earlier association) is asked again.
func TestConnectWaitsForBusyTarget(t *testing.T) {
	f := newFakeTarget(t)
	busy := 3
	f.hook = func(k *fakeCommand) bool {
		if k.req.QID != 0 || !k.cmd.IsFabrics() || k.cmd.FabricsType() != protocol.FabricsConnect || busy == 0 {
			return false
		}
		busy--
		_ = k.respond(protocol.StatusConnectControllerBusy, 0)
		return true
	}
	s := connect(t, testConfig(f, newProvider(t)))
	if s.Status().State != StateLive || f.count("Connect") < 4 {
		t.Errorf("%v after %d Connects", s.Status().State, f.count("Connect"))
	}
}

// What RDMA device and network have against a connection is told too, and nothing stays
// open.
func TestConnectLocalFailures(t *testing.T) {
	broken := errors.New("deliberate failure")
	for _, op := range []string{"dial", "allocate protection domain", "register memory", "allocate memory window", "create completion queue", "create queue pair", "connect"} {
		for at := range 8 {
			t.Run(fmt.Sprintf("%s %d", op, at), func(t *testing.T) {
				f := newFakeTarget(t)
				prov := newProvider(t)
				n := 0
				p := &crooked{Provider: prov, on: func(o string) error {
					if o == op {
						if n++; n == at+1 {
							return broken
						}
					}
					return nil
				}}
				cfg := testConfig(f, p)
				cfg.Depth = 4
				s, err := Connect(context.Background(), cfg)
				if err == nil {
					if n > at {
						t.Error("connected in spite of the failure")
					}
					ctx, stop := context.WithTimeout(context.Background(), 60*time.Second)
					defer stop()
					s.Close(ctx)
				} else if !errors.Is(err, broken) {
					t.Errorf("%v", err)
				}
				if err := prov.Device().Close(); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

func TestConnectToStrangers(t *testing.T) {
	p := newProvider(t)
	try := func(t *testing.T, addr netip.AddrPort, limit time.Duration, says string) {
		t.Helper()
		cfg := Config{Provider: p, Addr: addr, SubNQN: fakeNQN, ConnectTimeout: limit, Queues: 1}
		start := time.Now()
		_, err := Connect(context.Background(), cfg)
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %q", err, says)
		}
		if d := time.Since(start); d > 15*time.Second {
			t.Errorf("took %v", d)
		}
	}
	listen := func(t *testing.T, serve func(net.Conn)) netip.AddrPort {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() { defer c.Close(); serve(c) }()
			}
		}()
		return l.Addr().(*net.TCPAddr).AddrPort()
	}
	t.Run("nobody listens", func(t *testing.T) {
		try(t, envtest.Port(t), 6*time.Second, "connection refused")
	})
	t.Run("an HTTP server", func(t *testing.T) {
		try(t, listen(t, func(c net.Conn) {
			io.CopyN(io.Discard, c, 20)
			io.WriteString(c, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
		}), 6*time.Second, "no MPA Reply")
	})
	t.Run("silence", func(t *testing.T) {
		try(t, listen(t, func(c net.Conn) { io.Copy(io.Discard, c) }), 2*time.Second, "connect")
	})
	t.Run("hangs up", func(t *testing.T) {
		try(t, listen(t, func(c net.Conn) {}), 6*time.Second, "connect")
	})
}

func TestConnectCancelled(t *testing.T) {
	f := newFakeTarget(t)
	arrived := make(chan struct{}, 1)
	f.hook = func(*fakeCommand) bool { arrived <- struct{}{}; return true }
	ctx, cancel := context.WithCancel(context.Background())
	go func() { <-arrived; cancel() }()
	prov := newProvider(t)
	if _, err := Connect(ctx, testConfig(f, prov)); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if err := prov.Device().Close(); err != nil {
		t.Error(err)
	}
}

// Accept private data is not trusted with more than it says, and not needed at all.
func TestAcceptPrivateData(t *testing.T) {
	for _, c := range []struct {
		name  string
		bytes []byte
		limit int // commands at a time
	}{
		{"none", nil, 15},
		{"two bytes", []byte{0, 0}, 15},
		{"unknown format", []byte{1, 0, 16, 0}, 15},
		{"zero", make([]byte, 32), 15},
		{"larger", append([]byte{0, 0, 200, 0}, make([]byte, 192)...), 15},
		{"smaller", append([]byte{0, 0, 4, 0}, make([]byte, 28)...), 3},
		{"one", append([]byte{0, 0, 1, 0}, make([]byte, 28)...), 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFakeTarget(t)
			f.accept = func(protocol.RDMAConnectRequest) []byte { return c.bytes }
			s := connect(t, testConfig(f, newProvider(t)))
			d := device(t, s)
			if got := s.as.lanes[0].sqsize(); got != 15 { // what targets compare with HSQSIZE
				t.Errorf("SQSIZE %d", got)
			}
			if free := s.as.lanes[0].usable; free != c.limit {
				t.Errorf("%d commands at a time, want %d", free, c.limit)
			}
			want := pattern(1, 512<<10)
			if err := d.WriteAt(want, 0, 0); err != nil {
				t.Fatal(err)
			}
			got := make([]byte, len(want))
			if err := d.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%v", err)
			}
		})
	}
}

func TestDiscover(t *testing.T) {
	f := newFakeTarget(t)
	f.ctrl.CNTRLTYPE, f.ctrl.KAS, f.ctrl.IOCCSZ = protocol.ControllerTypeDiscovery, 0, 0
	prov := newProvider(t)
	cfg := DiscoverConfig{Provider: prov, Addr: f.addr, Timeout: 20 * time.Second}
	list, err := Discover(context.Background(), cfg)
	if err != nil || len(list) != 0 {
		t.Fatalf("empty log: %v, %v", list, err)
	}
	f.set(func() {
		for i := range 9 { // more than two chunks
			f.entries = append(f.entries, entry(fmt.Sprintf("nqn.2026-11.io.rdblk:d%d", i), "127.0.0.1", fmt.Sprint(f.addr.Port())))
		}
		f.genctr++
	})
	if list, err = Discover(context.Background(), cfg); err != nil || len(list) != 9 || list[8].SUBNQN != "nqn.2026-11.io.rdblk:d8" {
		t.Fatalf("%v, %v", list, err)
	}
	f.mu.Lock()
	if f.subnqns[0] != protocol.DiscoveryNQN || f.shutdowns.Load() != 2 {
		t.Errorf("connected to %q, %d shutdowns", f.subnqns[0], f.shutdowns.Load())
	}
	f.mu.Unlock()
	f.set(func() { f.hook = answer("Get Log Page", protocol.StatusInvalidLogPage.WithDNR(), 0) })
	if _, err = Discover(context.Background(), cfg); !errors.Is(err, protocol.StatusInvalidLogPage) {
		t.Errorf("%v", err)
	}
	f.set(func() { f.hook = func(k *fakeCommand) bool { k.killed.Store(true); return true } })
	if _, err = Discover(context.Background(), cfg); err == nil || !strings.Contains(err.Error(), "connection lost") {
		t.Errorf("%v", err)
	}
	f.set(func() { f.hook = func(k *fakeCommand) bool { return true } })
	cfg.Timeout = 100 * time.Millisecond
	if _, err = Discover(context.Background(), cfg); !errors.Is(err, ErrTimeout) {
		t.Errorf("%v", err)
	}
	cfg.Timeout = 20 * time.Second
	f.set(func() { f.hook = nil; f.ctrl.CNTRLTYPE = protocol.ControllerTypeIO })
	if _, err = Discover(context.Background(), cfg); !errors.Is(err, ErrUnsupported) {
		t.Errorf("%v", err)
	}
	if err := prov.Device().Close(); err != nil {
		t.Error(err)
	}
}

// Without a name discovery gives it.
func TestConnectByDiscovery(t *testing.T) {
	f := newFakeTarget(t)
	f.hook = func(k *fakeCommand) bool {
		if k.req.QID != 0 || k.cmd.AdminOpcode() != protocol.AdminIdentify || k.cmd.CNS() != protocol.CNSController {
			return false
		}
		f.mu.Lock()
		d := f.ctrl
		if f.subnqns[len(f.subnqns)-1] == protocol.DiscoveryNQN {
			d.CNTRLTYPE = protocol.ControllerTypeDiscovery
		}
		f.mu.Unlock()
		d.CNTLID = k.cntlid
		b, _ := d.AppendBinary(nil)
		_ = k.deliver(b)
		return true
	}
	cfg := testConfig(f, newProvider(t))
	cfg.SubNQN = ""
	if _, err := Connect(context.Background(), cfg); !errors.Is(err, ErrNoSubsystem) {
		t.Fatalf("nothing to discover: %v", err)
	}
	f.set(func() {
		f.entries = []protocol.DiscoveryLogEntry{entry(fakeNQN, "127.0.0.1", fmt.Sprint(f.addr.Port()))}
	})
	s := connect(t, cfg)
	if s.SubNQN() != fakeNQN || s.Addr() != f.addr {
		t.Errorf("%q at %v", s.SubNQN(), s.Addr())
	}
	f.set(func() { f.entries = append(f.entries, entry("nqn.2026-11.io.rdblk:other", "127.0.0.1", "4420")) })
	if _, err := Connect(context.Background(), cfg); !errors.Is(err, ErrNoSubsystem) || !strings.Contains(err.Error(), "nqn.2026-11.io.rdblk:other") {
		t.Errorf("two to choose from: %v", err)
	}
}

func TestDevices(t *testing.T) {
	f := newFakeTarget(t)
	f.spaces = map[uint32]*fakeSpace{3: newFakeSpace(1<<20, 9), 7: newFakeSpace(2<<20, 12), 9: newFakeSpace(1<<20, 9)}
	f.spaces[3].ns.LBAF[0].MS = 8
	s := connect(t, testConfig(f, newProvider(t)))
	l := s.Namespaces()
	if len(l) != 3 || l[0].NSID != 3 || l[0].Problem == "" || l[1].NSID != 7 || l[1].Size != 2<<20 || l[1].BlockSize != 4096 || l[1].Problem != "" || l[1].UUID != f.spaces[7].id.UUID {
		t.Errorf("%+v", l)
	}
	d, err := s.Device(0)
	if err != nil || d.NSID() != 7 || d.Session() != s {
		t.Errorf("%v, %v", d, err)
	}
	if d, err = s.Device(9); err != nil || d.NSID() != 9 || d.Info().Size != 1<<20 {
		t.Errorf("%v, %v", d, err)
	}
	if _, err = s.Device(3); !errors.Is(err, ErrUnsupported) {
		t.Errorf("a namespace with metadata: %v", err)
	}
	if _, err = s.Device(4); !errors.Is(err, ErrNoNamespace) {
		t.Errorf("a namespace that is not there: %v", err)
	}
	if err := d.WriteAt(pattern(1, 512), 512, 0); err != nil {
		t.Error(err)
	}
	if f.spaces[9].writes.Load() != 1 || f.spaces[7].writes.Load() != 0 {
		t.Error("written to the wrong namespace")
	}
	f2 := newFakeTarget(t)
	f2.spaces = nil
	s2 := connect(t, testConfig(f2, newProvider(t)))
	if _, err := s2.Device(0); !errors.Is(err, ErrNoNamespace) {
		t.Errorf("no namespaces: %v", err)
	}
	cfg := testConfig(f2, newProvider(t))
	if _, err := Open(context.Background(), cfg); !errors.Is(err, ErrNoNamespace) {
		t.Errorf("Open: %v", err)
	}
}
