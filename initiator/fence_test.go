package initiator_test

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"rdblk/blockdev"
	"rdblk/blockdev/blockdevtest"
	"rdblk/initiator"
	"rdblk/protocol"
	"rdblk/target"
)

// route is what lies between host and target: it gives the host a source address, and
// loses connections so that one side notices and the other does not.
type route struct {
	t    testing.TB
	to   netip.AddrPort
	ln   net.Listener
	mu   sync.Mutex
	src  string // source address of new connections to the target; empty: none gets through
	host []net.Conn
	tgt  []net.Conn
}

func newRoute(t testing.TB, to netip.AddrPort, src string) *route {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &route{t: t, to: to, ln: ln, src: src}
	ended := make(chan struct{})
	var copies sync.WaitGroup
	go func() {
		defer close(ended)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			r.pass(c, &copies)
		}
	}()
	t.Cleanup(func() {
		ln.Close()
		<-ended
		r.mu.Lock()
		for _, c := range append(r.host, r.tgt...) {
			c.Close()
		}
		r.mu.Unlock()
		copies.Wait()
	})
	return r
}

func (r *route) addr() netip.AddrPort { return netip.MustParseAddrPort(r.ln.Addr().String()) }

func (r *route) pass(c net.Conn, copies *sync.WaitGroup) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.src == "" {
		c.Close()
		return
	}
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(r.src)}}
	s, err := d.Dial("tcp", r.to.String())
	if err != nil {
		r.t.Error(err)
		c.Close()
		return
	}
	r.host, r.tgt = append(r.host, c), append(r.tgt, s)
	// Neither end is passed on by itself: lose says who notices.
	copies.Go(func() { io.Copy(s, c) })
	copies.Go(func() { io.Copy(c, s); c.Close() })
}

// lose breaks all connections at the host's side, at the target's only if noticed is
// true, and gives the host another source address.
func (r *route) lose(noticed bool, src string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.src = src
	for _, c := range r.host {
		c.Close()
	}
	for _, c := range r.tgt {
		if noticed {
			c.Close()
		}
	}
}

// fenceRig is a target over a disk that holds every write to block 0 until released,
// and the configuration of a host behind a route.
func fenceRig(t *testing.T) (*server, *blockdevtest.Gate, *route, initiator.Config) {
	d := blockdevtest.Delayed(mem(t, 1<<20, blockdev.Options{}))
	gate := d.Hold(blockdevtest.Match{Ops: []blockdev.Op{blockdev.OpWrite}, Len: 4096})
	s := serve(t, target.Config{}, d)
	r := newRoute(t, s.addr, "127.0.0.2")
	cfg := s.config()
	cfg.Addr, cfg.Queues, cfg.HostNQN = r.addr(), 1, "nqn.2026-11.io.rdblk:host"
	cfg.KeepAlive = time.Minute // only the fence ends the old association
	return s, gate, r, cfg
}

// awaitFence waits until the target has met the old association, and fails if instead a
// second write is let in beside the one that hangs in the disk.
func awaitFence(t *testing.T, s *server, gate *blockdevtest.Gate, passed func() bool) {
	t.Helper()
	for end := time.Now().Add(60 * time.Second); s.tgt.Stats().Fenced == 0; {
		if gate.Waiting() > 1 || passed() {
			t.Fatal("the new association is let in while a write of the old one is with the disk")
		}
		if time.Now().After(end) {
			t.Fatal("the host did not come back")
		}
		time.Sleep(time.Millisecond)
	}
	if n := gate.Waiting(); n != 1 {
		t.Fatalf("%d writes are with the disk, want the old one", n)
	}
}

func block(b byte) []byte { return bytes.Repeat([]byte{b}, 4096) }

// The host comes back from another address (its link went down and it has two, a NAT
// gateway has several, DHCP gave it a new one). What it wrote first must not land on
// what it writes then.
func TestFenceWhenTheSourceAddressChanges(t *testing.T) {
	for name, noticed := range map[string]bool{"loss noticed by the target": true, "loss not noticed": false} {
		t.Run(name, func(t *testing.T) {
			s, gate, r, cfg := fenceRig(t)
			defer gate.Open() // before anything is closed, which waits for what is with the disk
			dev := attach(t, cfg)
			first := make(chan error, 1)
			go func() { first <- dev.WriteAt(block('A'), 0, 0) }()
			gate.Await(t, 1)
			r.lose(noticed, "127.0.0.3")
			awaitFence(t, s, gate, func() bool { return len(first) > 0 })
			gate.Open()
			if err := <-first; err != nil {
				t.Fatal(err)
			}
			if err := dev.WriteAt(block('B'), 0, 0); err != nil {
				t.Fatal(err)
			}
			got := make([]byte, 4096)
			if err := dev.ReadAt(got, 0); err != nil || !bytes.Equal(got, block('B')) {
				t.Errorf("%v, the disk reads %q after B was acknowledged", err, got[:4])
			}
			if n := s.tgt.Stats().Controllers; n != 1 {
				t.Errorf("%d associations, want the new one", n)
			}
		})
	}
}

// The host's process is killed, and started again with the HostID it had, from another
// address even. A write of the first that hangs in the disk must not land on what the
// second writes.
func TestFenceWhenTheInitiatorRestarts(t *testing.T) {
	for name, noticed := range map[string]bool{"end noticed by the target": true, "end not noticed": false} {
		t.Run(name, func(t *testing.T) {
			s, gate, r, cfg := fenceRig(t)
			defer gate.Open() // before anything is closed, which waits for what is with the disk
			cfg.HostID = protocol.SinglePathHostID(cfg.HostNQN, "/run/disk.sock")
			killed := cfg
			killed.LossTimeout = 10 * time.Millisecond // so that the test can end it
			dead := attach(t, killed)
			end := make(chan error, 1)
			go func() { end <- dead.WriteAt(block('A'), 0, 0) }()
			gate.Await(t, 1)
			r.lose(noticed, "") // it never comes back
			if err := <-end; err == nil {
				t.Fatal("the write that hangs in the disk is acknowledged")
			}

			cfg.Addr = s.addr
			type opened struct {
				dev *initiator.Device
				err error
			}
			second := make(chan opened, 1)
			go func() {
				dev, err := initiator.Open(context.Background(), cfg)
				second <- opened{dev, err}
			}()
			awaitFence(t, s, gate, func() bool { return len(second) > 0 })
			gate.Open()
			o := <-second
			if o.err != nil {
				t.Fatal(o.err)
			}
			defer o.dev.Close()
			got := make([]byte, 4096)
			if err := o.dev.ReadAt(got, 0); err != nil || !bytes.Equal(got, block('A')) {
				t.Errorf("%v, the disk reads %q: the first one's write is not over", err, got[:4])
			}
			if err := o.dev.WriteAt(block('B'), 0, 0); err != nil {
				t.Fatal(err)
			}
			if err := o.dev.ReadAt(got, 0); err != nil || !bytes.Equal(got, block('B')) {
				t.Errorf("%v, the disk reads %q after B was acknowledged", err, got[:4])
			}
		})
	}
}
