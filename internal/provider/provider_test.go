package provider

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"rdblk/internal/envtest"
	"rdblk/rdma"
	"rdblk/rdma/iwarp"
)

// nic stands in for package verbs: devices with addresses, and notes of what it was asked for.
type nic struct {
	rdma.Provider
	devs    []rdma.DeviceInfo
	dialErr error
	dials   int
}

type nicConn struct {
	rdma.Conn
	err error
}

func (c *nicConn) Connect(context.Context, rdma.ConnParam) (rdma.Established, error) {
	return rdma.Established{}, c.err
}

func (n *nic) Name() string                        { return Verbs }
func (n *nic) Devices() ([]rdma.DeviceInfo, error) { return n.devs, nil }
func (n *nic) Dial(context.Context, netip.Addr, netip.AddrPort) (rdma.Conn, error) {
	n.dials++
	if n.dialErr != nil {
		return nil, n.dialErr
	}
	return &nicConn{err: errors.New("refused")}, nil
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

var (
	roce  = rdma.DeviceInfo{Name: "mlx5_0", Provider: Verbs, Transport: rdma.TransportIB, Addrs: []netip.Addr{addr("10.0.0.1"), addr("fd00::1")}}
	rnic  = rdma.DeviceInfo{Name: "siw0", Provider: Verbs, Transport: rdma.TransportIWARP, Addrs: []netip.Addr{addr("10.0.1.1")}}
	bare  = rdma.DeviceInfo{Name: "mlx5_1", Provider: Verbs, Transport: rdma.TransportIB}
	addrs = []netip.Addr{addr("127.0.0.1"), addr("10.0.0.1"), addr("10.0.1.1"), addr("192.168.0.1"), addr("::1"), addr("fd00::1")}
)

func newTest(t *testing.T, mode string, n *nic, change func(*machine)) (*Chooser, *envtest.Log, error) {
	t.Helper()
	m := machine{
		verbs:   func(*slog.Logger) (rdma.Provider, error) { return n, nil },
		memlock: func(uint64) error { return nil },
		route:   func(netip.AddrPort) (netip.Addr, error) { return addr("10.0.0.1"), nil },
		local:   func() ([]netip.Addr, error) { return addrs, nil },
	}
	if change != nil {
		change(&m)
	}
	log := new(envtest.Log)
	c, err := newChooser(Config{Mode: mode, Logger: log.Logger()}, m)
	return c, log, err
}

func TestEndpoints(t *testing.T) {
	both, ib, none := []rdma.DeviceInfo{roce, rnic}, []rdma.DeviceInfo{roce}, []rdma.DeviceInfo{bare}
	for _, c := range []struct {
		name, mode string
		devs       []rdma.DeviceInfo
		listen     string
		want       string // provider@address, ? if it may fail
		err        string
	}{
		{"software asked for", IWARP, both, "10.0.0.1:4420", "iwarp@10.0.0.1:4420", ""},
		{"RoCE address: both, the device first", Auto, both, "10.0.0.1:4420", "verbs@10.0.0.1:4420 iwarp@10.0.0.1:4420?", ""},
		{"iWARP address: the device alone, it has the TCP port", Auto, both, "10.0.1.1:4420", "verbs@10.0.1.1:4420", ""},
		{"an address of no device", Auto, both, "192.168.0.1:4420", "iwarp@192.168.0.1:4420", ""},
		{"loopback", Auto, both, "127.0.0.1:4420", "iwarp@127.0.0.1:4420", ""},
		{"IPv6 of a device", Auto, both, "[fd00::1]:4420", "verbs@[fd00::1]:4420 iwarp@[fd00::1]:4420?", ""},
		{"wildcard, no TCP ports at stake", Auto, ib, "0.0.0.0:0", "iwarp@0.0.0.0:0 verbs@0.0.0.0:0", ""},
		{"wildcard, a device without addresses", Auto, none, "[::]:4420", "iwarp@[::]:4420", ""},
		{"wildcard with an iWARP device", Auto, both, "[::]:4420", "verbs@10.0.0.1:4420 verbs@10.0.1.1:4420 verbs@[fd00::1]:4420 " +
			"iwarp@127.0.0.1:4420 iwarp@10.0.0.1:4420? iwarp@192.168.0.1:4420 iwarp@[::1]:4420 iwarp@[fd00::1]:4420?", ""},
		{"IPv4 wildcard with an iWARP device", Auto, []rdma.DeviceInfo{rnic}, "0.0.0.0:4420",
			"verbs@10.0.1.1:4420 iwarp@127.0.0.1:4420 iwarp@10.0.0.1:4420 iwarp@192.168.0.1:4420", ""},
		{"devices asked for", Verbs, both, "10.0.0.1:4420", "verbs@10.0.0.1:4420", ""},
		{"devices asked for, wildcard", Verbs, both, "[::]:4420", "verbs@[::]:4420", ""},
		{"devices asked for, loopback", Verbs, both, "127.0.0.1:4420", "", "no loopback"},
		{"devices asked for, IPv6 loopback", Verbs, both, "[::1]:4420", "", "no loopback"},
		{"devices asked for, an address of none", Verbs, both, "192.168.0.1:4420", "", "mlx5_0 has 10.0.0.1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ch, _, err := newTest(t, c.mode, &nic{devs: c.devs}, nil)
			if err != nil {
				t.Fatal(err)
			}
			list, err := ch.Endpoints(netip.MustParseAddrPort(c.listen))
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Fatalf("%v, want %q", err, c.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, e := range list {
				s := e.Provider.Name() + "@" + e.Addr.String()
				if e.Extra {
					s += "?"
				}
				got = append(got, s)
			}
			if s := strings.Join(got, " "); s != c.want {
				t.Errorf("%s\nwant %s", s, c.want)
			}
		})
	}
}

func TestDial(t *testing.T) {
	ctx := t.Context()
	to := netip.MustParseAddrPort("10.0.0.9:4420")
	kind := func(c rdma.Conn) string {
		switch c := c.(type) {
		case *hinting:
			return "verbs, " + c.dev.Name
		case *nicConn:
			return "verbs"
		}
		return c.Device().Info().Provider
	}
	for _, c := range []struct {
		name, mode string
		local      string // asked for
		route      string
		devs       []rdma.DeviceInfo
		dialErr    error
		want       string
	}{
		{"software asked for", IWARP, "", "10.0.0.1", []rdma.DeviceInfo{roce}, nil, "iwarp"},
		{"the device has the route's address", Auto, "", "10.0.0.1", []rdma.DeviceInfo{roce}, nil, "verbs, mlx5_0"},
		{"another interface has it", Auto, "", "192.168.0.1", []rdma.DeviceInfo{roce}, nil, "iwarp"},
		{"the address that is asked for", Auto, "10.0.1.1", "192.168.0.1", []rdma.DeviceInfo{roce, rnic}, nil, "verbs"},
		{"the device does not get there", Auto, "", "10.0.0.1", []rdma.DeviceInfo{roce}, fmt.Errorf("x: %w", rdma.ErrNotSupported), "iwarp"},
		{"device asked for", Verbs, "", "192.168.0.1", []rdma.DeviceInfo{roce}, nil, "verbs"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ch, _, err := newTest(t, c.mode, &nic{devs: c.devs, dialErr: c.dialErr}, func(m *machine) {
				m.route = func(netip.AddrPort) (netip.Addr, error) { return addr(c.route), nil }
			})
			if err != nil {
				t.Fatal(err)
			}
			var local netip.Addr
			if c.local != "" {
				local = addr(c.local)
			}
			conn, err := ch.Dial(ctx, local, to)
			if err != nil {
				t.Fatal(err)
			}
			if got := kind(conn); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
			if c.want == "iwarp" {
				conn.Close()
			}
		})
	}
	// A refusal says that the device was tried, and what else there is; the peer's own reject does not.
	ch, _, _ := newTest(t, Auto, &nic{devs: []rdma.DeviceInfo{roce}}, nil)
	conn, _ := ch.Dial(ctx, netip.Addr{}, to)
	if _, err := conn.Connect(ctx, rdma.ConnParam{}); err == nil || !strings.Contains(err.Error(), "mlx5_0") || !strings.Contains(err.Error(), "--provider iwarp") {
		t.Error(err)
	}
	conn.(*hinting).Conn.(*nicConn).err = &rdma.RejectError{}
	if _, err := conn.Connect(ctx, rdma.ConnParam{}); err == nil || strings.Contains(err.Error(), "--provider") {
		t.Error(err)
	}
	ch, _, _ = newTest(t, Verbs, &nic{devs: []rdma.DeviceInfo{roce}, dialErr: errors.New("no route")}, nil)
	if _, err := ch.Dial(ctx, netip.Addr{}, to); err == nil || !strings.Contains(err.Error(), "mlx5_0 has 10.0.0.1") {
		t.Error(err)
	}
	if _, err := ch.Dial(ctx, netip.Addr{}, netip.MustParseAddrPort("127.0.0.1:4420")); err == nil || !strings.Contains(err.Error(), "loopback") {
		t.Error(err)
	}
}

// What is missing ends a program that was told to use devices, and is a remark in the log otherwise.
func TestMissing(t *testing.T) {
	lack := map[string]func(*machine){
		"install rdma-core": func(m *machine) {
			m.verbs = func(*slog.Logger) (rdma.Provider, error) {
				return nil, fmt.Errorf("%w: install rdma-core", rdma.ErrNotSupported)
			}
		},
		"RDMA device": func(m *machine) {
			m.verbs = func(*slog.Logger) (rdma.Provider, error) { return &nic{}, nil }
		},
		"locked memory": func(m *machine) {
			m.memlock = func(uint64) error { return errors.New("locked memory") }
		},
	}
	for what, change := range lack {
		t.Run(what, func(t *testing.T) {
			n := &nic{devs: []rdma.DeviceInfo{roce}}
			if _, _, err := newTest(t, Verbs, n, change); err == nil || !strings.Contains(err.Error(), what) || !strings.Contains(err.Error(), "--provider iwarp") {
				t.Errorf("verbs: %v", err)
			}
			c, log, err := newTest(t, Auto, n, change)
			if err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(log.String(), what) {
				t.Errorf("log: %s", log)
			}
			conn, err := c.Dial(t.Context(), netip.Addr{}, netip.MustParseAddrPort("10.0.0.9:4420"))
			if err != nil || conn.Device().Info().Provider != IWARP {
				t.Errorf("%v", err)
			}
			conn.Close()
			if l, err := c.Endpoints(netip.MustParseAddrPort("10.0.0.1:1")); err != nil || len(l) != 1 || l[0].Provider.Name() != IWARP {
				t.Errorf("%v, %v", l, err)
			}
		})
	}
	if _, err := New(Config{Mode: "magic"}); err == nil || !strings.Contains(err.Error(), `"magic"`) {
		t.Error(err)
	}
}

func TestReport(t *testing.T) {
	m := machine{
		verbs:   func(*slog.Logger) (rdma.Provider, error) { return &nic{devs: []rdma.DeviceInfo{roce, bare}}, nil },
		memlock: func(uint64) error { return fmt.Errorf("%w: not enough", rdma.ErrNoResources) },
	}
	r := inspect(144<<20, m)
	var out bytes.Buffer
	r.Print(&out)
	for _, want := range []string{"mlx5_0", "10.0.0.1, fd00::1", "mlx5_1 has no IP address", "missing: not enough", "iwarp0", "every address", "need 144 MiB"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	b, err := json.Marshal(r)
	if err != nil || !strings.Contains(string(b), `"max_rd_atomic"`) || strings.Contains(string(b), "null") {
		t.Errorf("%s, %v", b, err)
	}
}

// On this machine, whatever it has: the real questions have answers.
func TestThisMachine(t *testing.T) {
	r := Inspect(1 << 20)
	if len(r.Providers) != 2 || r.Providers[1].Name != IWARP || len(r.Providers[1].Devices) != 1 || len(r.Providers[1].Missing) != 0 {
		t.Errorf("%+v", r)
	}
	if hard := r.Providers[0]; len(hard.Devices) == 0 && len(hard.Missing) == 0 {
		t.Error("no device, and nothing is missing")
	}
	c, err := New(Config{Mode: Auto, Software: iwarp.Config{}, LockedMemory: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	l, err := c.Listen(netip.MustParseAddrPort("127.0.0.1:0"), rdma.ListenConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if a, err := route(l.Addr()); err != nil || a != addr("127.0.0.1") {
		t.Errorf("%v, %v", a, err)
	}
	if a, err := localAddrs(); err != nil || len(a) == 0 {
		t.Errorf("%v, %v", a, err)
	}
}
