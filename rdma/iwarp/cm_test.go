package iwarp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/rdma"
	"rdblk/rdma/rdmatest"
)

// answerer accepts every request of a listener with the same parameters.
type answerer struct {
	t    *testing.T
	p    *Provider
	l    rdma.Listener
	side *rdmatest.Side
	// reject, if set, is the private data to refuse with.
	reject []byte
	param  rdma.ConnParam
	ends   chan *rdmatest.End
	reqs   chan *rdma.ConnectRequest
}

func newAnswerer(t *testing.T, cfg Config, lc rdma.ListenConfig) *answerer {
	a := &answerer{t: t, p: newProvider(t, cfg), ends: make(chan *rdmatest.End, 1), reqs: make(chan *rdma.ConnectRequest, 1),
		param: rdma.ConnParam{ResponderResources: 128, InitiatorDepth: 128}}
	var err error
	if a.l, err = a.p.Listen(netip.AddrPortFrom(loopback, 0), lc); err != nil {
		t.Fatal(err)
	}
	a.side = rdmatest.NewSide(t, "answerer", a.p.dev, 1024, 4096)
	t.Cleanup(func() { a.l.Close(); a.side.Close(t) })
	return a
}

// one answers one request.
func (a *answerer) one() {
	c, err := a.l.Accept()
	if err != nil {
		return
	}
	a.reqs <- c.Request()
	if a.reject != nil {
		if err := c.Reject(a.reject); err != nil {
			a.t.Error(err)
		}
		c.Close()
		a.ends <- nil
		return
	}
	q, err := c.CreateQP(a.side.PD, rdma.QPConfig{SendCQ: a.side.CQ, RecvCQ: a.side.CQ, MaxSend: 8, MaxRecv: 8})
	if err != nil {
		a.t.Error(err)
		return
	}
	e := &rdmatest.End{Side: a.side, Conn: c, QP: q}
	e.PostRecv(a.t, 1, 0, 64)
	e.Est, err = c.Accept(context.Background(), a.param)
	if err != nil {
		e.Est.IRD = -1
	}
	a.ends <- e
}

// request waits for the request that one answers. One that the listener has given up, which takes too long to come, is
// none, and Accept would wait for it for ever.
func (a *answerer) request() *rdma.ConnectRequest {
	a.t.Helper()
	select {
	case r := <-a.reqs:
		return r
	case <-time.After(rdmatest.Patience):
		a.t.Fatalf("no request in %v: %+v", rdmatest.Patience, a.p.Stats())
		return nil
	}
}

// mpa makes a start-up frame by hand.
func mpa(key string, flags, rev uint8, private []byte) []byte {
	return appendMPA(nil, key, mpaFrame{flags: flags, rev: rev, private: private})
}

func (a *answerer) dial() *net.TCPConn {
	a.t.Helper()
	c, err := net.Dial("tcp", a.l.Addr().String())
	if err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(rdmatest.Patience))
	return c.(*net.TCPConn)
}

// TestResponder is the table of what a responder answers to each Request. Where
// siw's behaviour is known it is the same, except: reserved bits are not
// echoed, revision 0 is refused, and the limit of private data is the RFC's.
func TestResponder(t *testing.T) {
	words := func(ird, ord uint16, pd string) []byte { return append(depths{ird, ord}.append(nil), pd...) }
	for _, c := range []struct {
		what     string
		req      []byte
		cfg      Config
		reply    []byte // after the key; nil: none
		reset    bool   // closed by a reset, not a FIN
		accepted bool   // reaches the application
		reject   []byte
		ird, ord int // in the ConnectRequest: what the peer serves and wants
		private  string
	}{
		{what: "enhanced", req: mpa(mpaKeyRequest, 0x10, 2, words(1, 1, "")), reply: hexBytes("10 02 0004 0001 0001"), accepted: true, ird: 1, ord: 1},
		{what: "CRC, depths cross", req: mpa(mpaKeyRequest, 0x50, 2, words(4, 8, "pd")), reply: hexBytes("50 02 0004 0008 0004"), accepted: true, ird: 4, ord: 8, private: "pd"},
		{what: "CRC that we want", cfg: Config{CRC: CRCOn}, req: mpa(mpaKeyRequest, 0x10, 2, words(0, 0, "")), reply: hexBytes("50 02 0004 0000 0000"), accepted: true},
		{what: "large depths are clamped", cfg: Config{ReadDepth: 128}, req: mpa(mpaKeyRequest, 0x10, 2, words(300, 300, "")), reply: hexBytes("10 02 0004 0080 0080"), accepted: true, ird: 128, ord: 128},
		{what: "depths not negotiated", cfg: Config{ReadDepth: 16}, req: mpa(mpaKeyRequest, 0x10, 2, words(0x3FFF, 0x3FFF, "")), reply: hexBytes("10 02 0004 0010 0010"), accepted: true, ird: 128, ord: 128},
		{what: "no Reads", req: mpa(mpaKeyRequest, 0x10, 2, words(0, 0, "x")), reply: hexBytes("10 02 0004 0000 0000"), accepted: true, private: "x"},
		{what: "peer to peer, Write or Read", req: mpa(mpaKeyRequest, 0x10, 2, words(0x8001, 0xC001, "")), reply: hexBytes("10 02 0004 8001 8001"), accepted: true, ird: 1, ord: 1},
		{what: "peer to peer, Read only", req: mpa(mpaKeyRequest, 0x10, 2, words(0x8001, 0x4001, "")), reply: hexBytes("10 02 0004 8001 4001"), accepted: true, ird: 1, ord: 1},
		{what: "peer to peer, Send only", req: mpa(mpaKeyRequest, 0x10, 2, words(0xC001, 0x0001, "")), reply: hexBytes("10 02 0004 8001 8001"), accepted: true, ird: 1, ord: 1},
		{what: "revision 1, CRC", req: mpa(mpaKeyRequest, 0x40, 1, nil), reply: hexBytes("40 01 0000"), accepted: true},
		{what: "revision 1, private data", req: mpa(mpaKeyRequest, 0, 1, []byte("0123456789")), reply: hexBytes("00 01 0000"), accepted: true, private: "0123456789"},
		{what: "revision 1 with S", req: mpa(mpaKeyRequest, 0x10, 1, []byte("0123")), reply: hexBytes("00 01 0000"), accepted: true, private: "0123"},
		{what: "revision 2 without S", req: mpa(mpaKeyRequest, 0, 2, []byte("0123")), reply: hexBytes("00 02 0000"), accepted: true, private: "0123"},
		{what: "revision 0", req: mpa(mpaKeyRequest, 0, 0, nil)},
		{what: "revision 3", req: mpa(mpaKeyRequest, 0, 3, nil)},
		{what: "a Reply instead", req: mpa(mpaKeyReply, 0x10, 2, words(1, 1, ""))},
		{what: "markers", req: mpa(mpaKeyRequest, 0x90, 2, words(1, 1, "")), reply: hexBytes("30 02 0004 0000 0000")},
		{what: "markers, revision 1", req: mpa(mpaKeyRequest, 0x80, 1, nil), reply: hexBytes("20 01 0000")},
		{what: "S without words", req: mpa(mpaKeyRequest, 0x10, 2, []byte{1, 2, 3}), reply: hexBytes("30 02 0004 0000 0000")},
		{what: "siw's large FPDUs", req: mpa(mpaKeyRequest, 0x18, 2, words(1, 1, "")), reply: hexBytes("18 02 0004 0001 0001"), accepted: true, ird: 1, ord: 1},
		{what: "reserved bits", req: mpa(mpaKeyRequest, 0x17, 2, words(1, 1, "")), reply: hexBytes("10 02 0004 0001 0001"), accepted: true, ird: 1, ord: 1},
		{what: "this software", req: mpa(mpaKeyRequest, 0x1A, 2, words(1, 1, "")), reply: hexBytes("1c 02 0004 0001 0001"), accepted: true, ird: 1, ord: 1},
		{what: "this software, plain", cfg: Config{PlainFlags: true}, req: mpa(mpaKeyRequest, 0x1A, 2, words(1, 1, "")), reply: hexBytes("10 02 0004 0001 0001"), accepted: true, ird: 1, ord: 1},
		{what: "512 bytes", req: mpa(mpaKeyRequest, 0x10, 2, words(1, 1, strings.Repeat("p", 508))), reply: hexBytes("10 02 0004 0001 0001"), accepted: true, ird: 1, ord: 1, private: strings.Repeat("p", 508)},
		{what: "513 bytes", req: mpa(mpaKeyRequest, 0x10, 2, make([]byte, 513)), reset: true},
		{what: "65535 bytes announced", req: append([]byte(mpaKeyRequest), 0x10, 2, 0xFF, 0xFF), reset: true},
		{what: "data behind the Request", req: append(mpa(mpaKeyRequest, 0x10, 2, words(1, 1, "")), 0), reset: true},
		{what: "wrong key", req: []byte("MPA ID Req Fram3....0000")},
		{what: "no MPA at all", req: []byte("hello\n")},
		{what: "refused", req: mpa(mpaKeyRequest, 0x10, 2, words(1, 1, "")), reject: []byte("nope"), reply: append(hexBytes("30 02 0008 0000 0000"), "nope"...), accepted: true, ird: 1, ord: 1},
		{what: "refused, revision 1", req: mpa(mpaKeyRequest, 0, 1, nil), reject: []byte("nope"), reply: append(hexBytes("20 01 0004"), "nope"...), accepted: true},
	} {
		t.Run(c.what, func(t *testing.T) {
			a := newAnswerer(t, c.cfg, rdma.ListenConfig{})
			a.reject = c.reject
			if c.accepted {
				go a.one()
			}
			nc := a.dial()
			if _, err := nc.Write(c.req); err != nil {
				t.Fatal(err)
			}
			if c.reply == nil || c.reject != nil || !c.accepted {
				// Everything up to the end of the stream.
				got, err := io.ReadAll(nc)
				if c.reset != errors.Is(err, syscallReset) {
					t.Errorf("end of the stream: %v", err)
				}
				var want []byte
				if c.reply != nil {
					want = append([]byte(mpaKeyReply), c.reply...)
				}
				same(t, "answer", got, want)
			} else {
				got := make([]byte, mpaKeySize+len(c.reply))
				if _, err := io.ReadFull(nc, got); err != nil {
					t.Fatal(err)
				}
				same(t, "answer", got, append([]byte(mpaKeyReply), c.reply...))
			}
			if !c.accepted {
				if st := a.p.Stats(); st.Established != 0 || st.HandshakeFailures+st.Rejected != 1 {
					t.Errorf("%+v", st)
				}
				return
			}
			req := a.request()
			if req.ResponderResources != c.ird || req.InitiatorDepth != c.ord || string(req.PrivateData) != c.private {
				t.Errorf("request %+v", req)
			}
			if e := <-a.ends; e != nil {
				// The first message works, and closing ends it.
				nc.Write(untagged(opSend, true, 0, 0, 1, 0, []byte("hi")))
				nc.CloseWrite()
				rdmatest.Until(t, "the end", func() { e.Poll(t) }, func() bool {
					select {
					case <-e.Conn.Done():
						return true
					default:
						return false
					}
				})
				if l := e.Pending(); len(l) != 1 || l[0].Status != rdma.StatusSuccess || l[0].ByteLen != 2 || !errors.Is(e.Conn.Err(), rdma.ErrDisconnected) {
					t.Errorf("%+v, %v", l, e.Conn.Err())
				}
				e.Close(t)
			}
		})
	}
}

// TestPieces: a Request may come in any pieces.
func TestPieces(t *testing.T) {
	a := newAnswerer(t, Config{}, rdma.ListenConfig{})
	req := mpa(mpaKeyRequest, 0x10, 2, append(depths{1, 1}.append(nil), "private"...))
	for cut := 1; cut < len(req); cut++ {
		go a.one()
		nc := a.dial()
		nc.Write(req[:cut])
		// Each piece arrives on its own: the answerer has read it when nothing is unread.
		nc.Write(req[cut:])
		if r := a.request(); string(r.PrivateData) != "private" {
			t.Fatalf("cut at %d: %q", cut, r.PrivateData)
		}
		(<-a.ends).Close(t)
		nc.Close()
	}
}

// TestStrangers: what does not speak MPA is closed at once or in time, and costs
// nothing afterwards.
func TestStrangers(t *testing.T) {
	a := newAnswerer(t, Config{}, rdma.ListenConfig{})
	// For those who stop talking; whoever talks has more time, for the machine may stand still.
	short := newAnswerer(t, Config{RequestTimeout: time.Second}, rdma.ListenConfig{})
	rdmatest.NoLeakSoon(t)
	g, f := rdmatest.Resources(t)
	// An HTTP client reads an end of the connection at once.
	start := time.Now()
	hc := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: rdmatest.Patience}
	if resp, err := hc.Get("http://" + a.l.Addr().String() + "/"); err == nil {
		resp.Body.Close()
		t.Errorf("answered an HTTP request: %v", resp.Status)
	}
	hc.CloseIdleConnections()
	if d := time.Since(start); d > 30*time.Second {
		t.Errorf("HTTP client waited %v", d)
	}
	silent := map[string]net.Conn{}
	for what, in := range map[string]string{"silence": "", "half a Request": "MPA ID Req Frame\x10", "all but the last byte": string(mpa(mpaKeyRequest, 0x10, 2, make([]byte, 4))[:23])} {
		silent[what] = short.dial()
		io.WriteString(silent[what], in)
	}
	for what, nc := range silent {
		if n, err := io.Copy(io.Discard, nc); err != nil || n != 0 {
			t.Errorf("%s: %d bytes, %v", what, n, err)
		}
		nc.Close()
	}
	for _, in := range []string{"", "M", "\x16\x03\x01"} { // comes and goes
		nc := a.dial()
		io.WriteString(nc, in)
		nc.Close()
	}
	rdmatest.NoLeak(t, g, f)
	if st := a.p.Stats(); st.HandshakeTimeouts != 0 || st.HandshakeFailures < 4 || st.Established != 0 {
		t.Errorf("%+v", st)
	}
	if st := short.p.Stats(); st.HandshakeTimeouts != 3 || st.HandshakeFailures != 0 || st.Established != 0 {
		t.Errorf("who stops talking: %+v", st)
	}
}

// TestHalfOpenFlood: a thousand connections that say nothing are bounded, go away
// in time, and a real one gets through meanwhile.
func TestHalfOpenFlood(t *testing.T) {
	const pending, flood = 32, 1000
	// Long enough for an honest request on a machine that stands still for a while: it would not come.
	a := newAnswerer(t, Config{RequestTimeout: 5 * time.Second}, rdma.ListenConfig{MaxPending: pending})
	rdmatest.NoLeakSoon(t)
	g, _ := rdmatest.Resources(t)
	var conns []net.Conn
	for range flood {
		nc, err := net.Dial("tcp", a.l.Addr().String())
		if err != nil { // refused before we knew that we were connected
			continue
		}
		defer nc.Close()
		nc.SetDeadline(time.Now().Add(rdmatest.Patience))
		conns = append(conns, nc)
	}
	// While as many as may be are pending, a real one gets through: the oldest has to go.
	if _, err := conns[len(conns)-1].Write([]byte("M")); err != nil {
		t.Fatalf("the last of the flood is gone before its time: %v", err)
	}
	go a.one()
	real := a.dial()
	real.Write(mpa(mpaKeyRequest, 0x10, 2, make([]byte, 4)))
	a.request()
	(<-a.ends).Close(t)
	// All of them end, the ones over the limit at once. Their goroutines end as the scheduler lets them.
	peak := 0
	rdmatest.Until(t, "goroutines for what is pending alone", func() {}, func() bool {
		n, _ := rdmatest.Resources(t)
		peak = max(peak, n-g)
		return n-g <= pending+2
	})
	for i, nc := range conns {
		nc.SetDeadline(time.Now().Add(rdmatest.Patience)) // looking takes its time on a busy machine
		if _, err := nc.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
	if peak > flood/4 {
		t.Errorf("%d goroutines for %d half-open connections at a time", peak, pending)
	}
	st := a.p.Stats()
	if st.Accepted != flood+1 || st.PendingRefused+st.HandshakeTimeouts != flood || st.PendingRefused < flood/2 {
		t.Errorf("%+v", st)
	}
	go a.one()
	nc := a.dial()
	nc.Write(mpa(mpaKeyRequest, 0x10, 2, make([]byte, 4)))
	a.request()
	(<-a.ends).Close(t)
	// Requests that nobody accepts count as well.
	for range pending {
		a.dial().Write(mpa(mpaKeyRequest, 0x10, 2, make([]byte, 4)))
	}
	rdmatest.Until(t, "requests", func() {}, func() bool { return a.p.Stats().Requests == pending+2 })
	if nc, err := net.Dial("tcp", a.l.Addr().String()); err == nil {
		nc.SetDeadline(time.Now().Add(rdmatest.Patience))
		if _, err := nc.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("one more than the limit: %v", err)
		}
		nc.Close()
	}
	for range pending {
		c, err := a.l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
}

// TestInitiator: what an initiator makes of each Reply.
func TestInitiator(t *testing.T) {
	words := func(ird, ord uint16, pd string) []byte { return append(depths{ird, ord}.append(nil), pd...) }
	for _, c := range []struct {
		what    string
		cfg     Config
		request []byte // after the key
		reply   []byte
		want    error
		est     rdma.Established
		term    termCode // sent in answer
	}{
		{what: "plain", request: hexBytes("1a 02 0006 0004 0003"), reply: mpa(mpaKeyReply, 0x10, 2, words(4, 3, "ok")), est: rdma.Established{PrivateData: []byte("ok"), IRD: 4, ORD: 3}},
		{what: "nothing reserved", cfg: Config{PlainFlags: true, CRC: CRCOn}, request: hexBytes("50 02 0006 0004 0003"), reply: mpa(mpaKeyReply, 0x50, 2, words(4, 3, "")), est: rdma.Established{IRD: 4, ORD: 3}},
		{what: "fewer Reads", reply: mpa(mpaKeyReply, 0x10, 2, words(2, 1, "")), est: rdma.Established{IRD: 4, ORD: 2}},
		{what: "no Reads", reply: mpa(mpaKeyReply, 0x10, 2, words(0, 0, "")), est: rdma.Established{IRD: 4, ORD: 0}},
		{what: "more Reads than we asked for", reply: mpa(mpaKeyReply, 0x10, 2, words(200, 20, "")), est: rdma.Established{IRD: 20, ORD: 3}},
		{what: "depths not negotiated", reply: mpa(mpaKeyReply, 0x10, 2, words(0x3FFF, 0x3FFF, "")), est: rdma.Established{IRD: 4, ORD: 3}},
		{what: "more Reads than we can", reply: mpa(mpaKeyReply, 0x10, 2, words(4, 33, "")), want: rdma.ErrProtocol, term: termIRD},
		{what: "CRC unasked", reply: mpa(mpaKeyReply, 0x50, 2, words(4, 3, "")), est: rdma.Established{IRD: 4, ORD: 3}},
		{what: "peer to peer unasked", reply: mpa(mpaKeyReply, 0x10, 2, words(0x8004, 0x8003, "")), est: rdma.Established{IRD: 4, ORD: 3}},
		{what: "peer to peer", cfg: Config{PeerToPeer: true}, request: hexBytes("1a 02 0006 8004 c003"), reply: mpa(mpaKeyReply, 0x10, 2, words(0x8004, 0x8003, "")), est: rdma.Established{IRD: 4, ORD: 3}},
		{what: "peer to peer, refused", cfg: Config{PeerToPeer: true}, reply: mpa(mpaKeyReply, 0x10, 2, words(4, 3, "")), est: rdma.Established{IRD: 4, ORD: 3}},
		{what: "peer to peer, no message", cfg: Config{PeerToPeer: true}, reply: mpa(mpaKeyReply, 0x10, 2, words(0x8004, 3, "")), want: rdma.ErrProtocol, term: termRTR},
		{what: "rejected", reply: mpa(mpaKeyReply, 0x30, 2, words(0, 0, "why")), want: &rdma.RejectError{PrivateData: []byte("why")}},
		{what: "rejected, revision 1", reply: mpa(mpaKeyReply, 0x20, 1, []byte("why")), want: &rdma.RejectError{PrivateData: []byte("why")}},
		{what: "rejected, no words", reply: mpa(mpaKeyReply, 0x30, 2, nil), want: &rdma.RejectError{}},
		{what: "revision 1", reply: mpa(mpaKeyReply, 0, 1, nil), want: rdma.ErrProtocol},
		{what: "no S", reply: mpa(mpaKeyReply, 0, 2, words(4, 3, "")), want: rdma.ErrProtocol},
		{what: "S without words", reply: mpa(mpaKeyReply, 0x10, 2, []byte{0}), want: rdma.ErrProtocol},
		{what: "markers", reply: mpa(mpaKeyReply, 0x90, 2, words(4, 3, "")), want: rdma.ErrProtocol},
		{what: "a Request", reply: mpa(mpaKeyRequest, 0x10, 2, words(4, 3, "")), want: rdma.ErrProtocol},
		{what: "too much private data", reply: mpa(mpaKeyReply, 0x10, 2, make([]byte, 513)), want: rdma.ErrProtocol},
		{what: "an SSH server", reply: []byte("SSH-2.0-OpenSSH_9.2p1\r\n"), want: rdma.ErrProtocol},
		{what: "closed", reply: nil, want: rdma.ErrDisconnected},
		{what: "closed in the middle", reply: mpa(mpaKeyReply, 0x10, 2, words(4, 3, "abc"))[:25], want: rdma.ErrDisconnected},
	} {
		for _, pieces := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/pieces=%v", c.what, pieces), func(t *testing.T) {
				p := newProvider(t, c.cfg)
				side := rdmatest.NewSide(t, "initiator", p.dev, 64, 4096)
				t.Cleanup(func() { side.Close(t) })
				l, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				got := make(chan []byte, 2)
				go func() {
					nc, err := l.Accept()
					if err != nil {
						return
					}
					defer nc.Close()
					nc.SetDeadline(time.Now().Add(rdmatest.Patience))
					req := make([]byte, mpaHeaderSize+4+2)
					io.ReadFull(nc, req)
					got <- req
					step := len(c.reply)
					if pieces {
						step = 1
					}
					for b := c.reply; len(b) > 0; b = b[min(step, len(b)):] {
						nc.Write(b[:min(step, len(b))])
					}
					if c.want == nil || c.term != 0 { // else the end of the stream is part of the answer
						rest, _ := io.ReadAll(nc)
						got <- rest
					}
				}()
				conn, err := p.Dial(context.Background(), netip.Addr{}, l.Addr().(*net.TCPAddr).AddrPort())
				if err != nil {
					t.Fatal(err)
				}
				q, err := conn.CreateQP(side.PD, rdma.QPConfig{SendCQ: side.CQ, RecvCQ: side.CQ, MaxSend: 4, MaxRecv: 4})
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithTimeout(context.Background(), rdmatest.Patience)
				defer cancel()
				est, err := conn.Connect(ctx, rdma.ConnParam{PrivateData: []byte("pd"), ResponderResources: 4, InitiatorDepth: 3})
				req := <-got
				if c.request != nil {
					same(t, "request", req, append([]byte(mpaKeyRequest), append(c.request, "pd"...)...))
				}
				var rej *rdma.RejectError
				switch want := c.want.(type) {
				case nil:
					if err != nil || est.IRD != c.est.IRD || est.ORD != c.est.ORD || !bytes.Equal(est.PrivateData, c.est.PrivateData) {
						t.Errorf("%+v, %v; want %+v", est, err, c.est)
					}
				case *rdma.RejectError:
					if !errors.As(err, &rej) || !bytes.Equal(rej.PrivateData, want.PrivateData) {
						t.Errorf("%v", err)
					}
				default:
					if !errors.Is(err, c.want) {
						t.Errorf("%v, want %v", err, c.want)
					}
				}
				if c.term != 0 {
					if code, _ := terminateOf(t, <-got); code != c.term {
						t.Errorf("Terminate %06x, want %06x", code, c.term)
					}
				}
				if q.Close(); c.want == nil {
					<-got
				}
				conn.Close()
			})
		}
	}
}

// TestReplyTimeout: a server that accepts and says nothing does not hold Connect.
func TestReplyTimeout(t *testing.T) {
	p := newProvider(t, Config{ReplyTimeout: 100 * time.Millisecond})
	side := rdmatest.NewSide(t, "initiator", p.dev, 64, 4096)
	defer side.Close(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn, err := p.Dial(context.Background(), netip.Addr{}, l.Addr().(*net.TCPAddr).AddrPort())
	if err != nil {
		t.Fatal(err)
	}
	q, err := conn.CreateQP(side.PD, rdma.QPConfig{SendCQ: side.CQ, RecvCQ: side.CQ, MaxSend: 4, MaxRecv: 4})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Connect(context.Background(), rdma.ConnParam{}); !errors.Is(err, rdma.ErrTimeout) || !errors.Is(err, rdma.ErrNoReply) {
		t.Errorf("%v", err)
	}
	q.Close()
	conn.Close()
	if st := p.Stats(); st.HandshakeTimeouts != 1 {
		t.Errorf("%+v", st)
	}
}

// TestEarlyData: a peer that does not wait for the Reply is cut off by Accept.
func TestEarlyData(t *testing.T) {
	a := newAnswerer(t, Config{}, rdma.ListenConfig{})
	nc := a.dial()
	nc.Write(mpa(mpaKeyRequest, 0x10, 2, make([]byte, 4)))
	rdmatest.Until(t, "the request", func() {}, func() bool { return a.p.Stats().Requests == 1 })
	nc.Write(untagged(opSend, true, 0, 0, 1, 0, nil))
	// What has been acknowledged has arrived.
	raw, err := nc.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	rdmatest.Until(t, "it to arrive", func() {}, func() bool {
		left := -1
		raw.Control(func(fd uintptr) { left, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
		return err == nil && left == 0
	})
	go a.one()
	a.request()
	e := <-a.ends
	if e.Est.IRD != -1 || !errors.Is(e.Conn.Err(), rdma.ErrProtocol) {
		t.Errorf("accepted: %v", e.Conn.Err())
	}
	e.Close(t)
}

// TestPeerToPeer: in the peer-to-peer model the responder may speak first,
// whichever message opens the way.
func TestPeerToPeer(t *testing.T) {
	for _, rtr := range []uint16{enhRTRWrite, enhRTRRead} {
		r := newRig(t, agreed{rtr: rtr, ord: 1})
		r.poll()
		first := r.take()
		peer := newRig(t, agreed{responder: true, ird: 1})
		peer.send(rdma.SendWR{ID: 1, Op: rdma.OpSend, Flags: rdma.FlagSignaled})
		peer.poll()
		if out := peer.take(); len(out) != 0 {
			t.Fatalf("responder spoke first: %x", out)
		}
		peer.feed(first, 100)
		if l := peer.done(); len(l) != 1 || l[0].Status != rdma.StatusSuccess {
			t.Fatalf("%#x: %+v", rtr, l)
		}
		r.recv(1, 0, 8)
		r.send(rdma.SendWR{ID: 2, Op: rdma.OpRead, Flags: rdma.FlagSignaled}) // has to wait for the slot
		r.feed(peer.take(), 100)
		peer.feed(r.take(), 100)
		r.feed(peer.take(), 100)
		if l := r.done(); len(l) != 2 || l[0].Status != rdma.StatusSuccess || l[1].Status != rdma.StatusSuccess || r.err() != nil {
			t.Errorf("%#x: %+v %v", rtr, l, r.err())
		}
	}
}

func TestConfig(t *testing.T) {
	if err := (Config{}).Validate(); err != nil {
		t.Error(err)
	}
	bad := Config{CRC: 9, ReadDepth: 129, MaxFPDU: 100, RequestTimeout: -1, ReplyTimeout: -1, CloseLinger: -1, SendBuffer: -1, RecvBuffer: -1}
	err := bad.Validate()
	for _, field := range []string{"CRC", "ReadDepth", "MaxFPDU", "RequestTimeout", "ReplyTimeout", "CloseLinger", "SendBuffer", "RecvBuffer"} {
		if err == nil || !strings.Contains(err.Error(), field+":") {
			t.Errorf("%s is not reported: %v", field, err)
		}
	}
	if _, err := New(bad); !errors.Is(err, rdma.ErrInvalid) {
		t.Errorf("%v", err)
	}
	for m, want := range map[CRCMode][3]bool{CRCAuto: {false, false, true}, CRCOn: {true, true, true}, CRCOff: {false, false, false}} {
		d := newProvider(t, Config{CRC: m}).dev
		here, there := netip.MustParseAddrPort("192.0.2.1:1"), netip.MustParseAddrPort("192.0.2.2:1")
		lo, mapped := netip.MustParseAddrPort("127.0.0.1:1"), netip.MustParseAddrPort("[::ffff:192.0.2.1]:1")
		if got := [3]bool{d.wantCRC(lo, lo), d.wantCRC(here, mapped), d.wantCRC(here, there)}; got != want {
			t.Errorf("%v: %v, want %v", m, got, want)
		}
	}
}

func TestCongestionControl(t *testing.T) {
	lo, here := netip.MustParseAddrPort("127.0.0.1:1"), netip.MustParseAddrPort("192.0.2.1:1")
	mapped, there := netip.MustParseAddrPort("[::ffff:192.0.2.1]:2"), netip.MustParseAddrPort("192.0.2.2:1")
	for name, want := range map[string][3]string{"": {"reno", "reno", ""}, CongestionAuto: {"reno", "reno", ""}, CongestionSystem: {"", "", ""}, "reno": {"reno", "reno", "reno"}} {
		d := newProvider(t, Config{CongestionControl: name}).dev
		if got := [3]string{d.congestion(lo, lo), d.congestion(here, mapped), d.congestion(here, there)}; got != want {
			t.Errorf("%q: %v, want %v", name, got, want)
		}
	}
	for name, says := range map[string]string{"no-such": "modprobe tcp_no-such", "longer-than-sixteen": "up to 15 letters", "re\nno": "tcp_available", "a b": "tcp_available"} {
		if _, err := New(Config{CongestionControl: name}); !errors.Is(err, rdma.ErrInvalid) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", name, err)
		}
	}
	system, err := os.ReadFile("/proc/sys/net/ipv4/tcp_congestion_control")
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"": "reno", CongestionSystem: strings.TrimSpace(string(system))} {
		a := newAnswerer(t, Config{CongestionControl: name}, rdma.ListenConfig{})
		go a.one()
		nc := a.dial()
		nc.Write(mpa(mpaKeyRequest, 0x10, 2, depths{1, 1}.append(nil)))
		a.request()
		e := <-a.ends
		if got, err := unix.GetsockoptString(e.QP.(*qp).fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION); got != want || err != nil {
			t.Errorf("%q: the connection has %q, not %q (%v)", name, got, want, err)
		}
		e.Close(t)
		nc.Close()
	}
}

// lateContext is a context whose clock is behind: it ends some time after its deadline.
type lateContext struct{ context.Context }

func (lateContext) Deadline() (time.Time, bool) { return time.Now().Add(-time.Millisecond), true }

// The caller's deadline ends Connect as the caller's also where the dialer sees it first.
func TestConnectEndsWithItsCaller(t *testing.T) {
	p := newProvider(t, Config{})
	side := rdmatest.NewSide(t, "active", p.dev, 16, 4096)
	c, err := p.Dial(t.Context(), netip.Addr{}, netip.MustParseAddrPort("127.0.0.1:9"))
	if err != nil {
		t.Fatal(err)
	}
	q, err := c.CreateQP(side.PD, rdma.QPConfig{SendCQ: side.CQ, RecvCQ: side.CQ, MaxSend: 4, MaxRecv: 4})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := c.Connect(lateContext{ctx}, rdma.ConnParam{}); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, rdma.ErrTimeout) {
		t.Errorf("%v", err)
	}
	if err := errors.Join(q.Close(), c.Close()); err != nil {
		t.Error(err)
	}
	side.Close(t)
}

// TestSystemLeak: see that the tests of this package left nothing behind. Runs last.
func TestZNoLeak(t *testing.T) {
	rdmatest.NoLeak(t, 2, 16)
}
