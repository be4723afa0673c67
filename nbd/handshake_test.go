package nbd

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"rdblk/blockdev"
	"rdblk/nbd/nbdtest"
)

// optionError checks that err is the error reply wanted.
func optionError(t *testing.T, err error, typ uint32) {
	t.Helper()
	var oe *nbdtest.OptionError
	if !errors.As(err, &oe) || oe.Type != typ {
		t.Fatalf("%v, want option error %d", err, typ&^(1<<31))
	}
	if oe.Text == "" {
		t.Error("the error has no text")
	}
}

func TestHandshakeInfo(t *testing.T) {
	a, b := newMemDevice(1<<20), newMemDevice(8<<20, func(i *blockdev.Info) { i.ReadOnly = true; i.BlockSize = 4096 })
	s := serve(t, nil, func(c *Config) {
		c.Exports = []Export{{Name: "", Device: a, Description: "the default"}, {Name: "ro ü", Device: b}}
	})
	c := s.connect(t)
	in, err := c.Query(nbdtest.OptInfo, "", nbdtest.InfoName, nbdtest.InfoDescription, nbdtest.InfoBlockSize, 4711)
	if err != nil {
		t.Fatal(err)
	}
	want := nbdtest.Info{Size: 1 << 20, Flags: 0x16d, HasName: true, HasDescription: true, Description: "the default",
		HasBlockSize: true, Minimum: 512, Preferred: 4096, Maximum: 32 << 20}
	if in != want {
		t.Errorf("%+v, want %+v", in, want)
	}
	if err := c.StructuredReply(); err != nil {
		t.Fatal(err)
	}
	in, err = c.Query(nbdtest.OptInfo, "ro ü")
	if err != nil {
		t.Fatal(err)
	}
	// Nothing was asked for, but sizes are enforced and so announced.
	if want := (nbdtest.Info{Size: 8 << 20, Flags: 0x187, HasBlockSize: true, Minimum: 4096, Preferred: 4096, Maximum: 32 << 20}); in != want {
		t.Errorf("%+v, want %+v", in, want)
	}
	_, err = c.Query(nbdtest.OptInfo, "nobody\x00\n")
	optionError(t, err, nbdtest.RepErrUnknown)
	if strings.Contains(err.Error(), "\n") {
		t.Error("a name from the network was not quoted")
	}
	var names []string
	if err := c.Ask(nbdtest.OptList, nil, func(typ uint32, d []byte) error {
		n := binary.BigEndian.Uint32(d)
		names = append(names, string(d[4:4+n])+"|"+string(d[4+n:]))
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if fmt.Sprint(names) != fmt.Sprint([]string{"|the default", "ro ü|"}) {
		t.Errorf("%q", names)
	}
	// GO says the same as INFO, and transmission begins.
	if err := c.Go("ro ü"); err != nil {
		t.Fatal(err)
	}
	if c.Info != in {
		t.Errorf("GO %+v, INFO %+v", c.Info, in)
	}
	do(t, c, 0, nbdtest.CmdRead, 4096, 4096, nil, 0)
}

func TestHandshakeExportName(t *testing.T) {
	s := serve(t, newMemDevice(1<<20), func(c *Config) { c.Exports[0].Name = "disk" })
	for _, zeroes := range []bool{false, true} {
		for _, fixed := range []uint32{0, nbdtest.ClientFixed} {
			for _, name := range []string{"", "disk"} { // a single export is the default too
				flags := fixed
				if !zeroes {
					flags |= nbdtest.ClientNoZeroes
				}
				c, err := nbdtest.Connect("unix", s.path, flags)
				if err != nil {
					t.Fatal(err)
				}
				if err := c.ExportName(name, zeroes); err != nil {
					t.Fatal(err)
				}
				if c.Info.Size != 1<<20 || c.Info.Flags != 0x16d {
					t.Errorf("%+v", c.Info)
				}
				do(t, c, 0, nbdtest.CmdRead, 0, 512, nil, 0)
				c.Close()
			}
		}
	}
	c := s.connect(t)
	c.SendOption(nbdtest.OptExportName, []byte("nobody"))
	if err := c.AtEnd(); err != nil {
		t.Error(err)
	}
	// The canonical name is told to who came by another.
	c = s.connect(t)
	if in, err := c.Query(nbdtest.OptInfo, ""); err != nil || in.Name != "disk" {
		t.Errorf("%+v %v", in, err)
	}
}

func TestHandshakeOptions(t *testing.T) {
	s := serve(t, newMemDevice(1<<20))
	c := s.connect(t)
	for _, o := range []struct {
		opt  uint32
		data []byte
		want uint32 // 0 = ACK
	}{
		{nbdtest.OptStartTLS, nil, nbdtest.RepErrUnsup},
		{nbdtest.OptStartTLS, []byte{1}, nbdtest.RepErrInvalid},
		{nbdtest.OptList, []byte("x"), nbdtest.RepErrInvalid},
		{nbdtest.OptStructuredReply, []byte("x"), nbdtest.RepErrInvalid},
		{nbdtest.OptStructuredReply, nil, 0},
		{nbdtest.OptStructuredReply, nil, 0},
		{nbdtest.OptListMetaContext, nbdtest.InfoData(""), nbdtest.RepErrUnsup},
		{nbdtest.OptSetMetaContext, nil, nbdtest.RepErrUnsup},
		{nbdtest.OptExtendedHeaders, nil, nbdtest.RepErrUnsup},
		{4, nil, nbdtest.RepErrUnsup},
		{0, nil, nbdtest.RepErrUnsup},
		{0xffffffff, make([]byte, 100), nbdtest.RepErrUnsup},
		{nbdtest.OptInfo, nil, nbdtest.RepErrInvalid},
		{nbdtest.OptInfo, []byte{0, 0, 0, 9, 0, 0}, nbdtest.RepErrInvalid},
		{nbdtest.OptGo, []byte{0xff, 0xff, 0xff, 0xff, 0, 0}, nbdtest.RepErrInvalid},
		{nbdtest.OptGo, append(nbdtest.InfoData(""), 1), nbdtest.RepErrInvalid},
		{nbdtest.OptGo, nbdtest.InfoData(strings.Repeat("x", 4096)), nbdtest.RepErrUnknown},
		{nbdtest.OptGo, nbdtest.InfoData(strings.Repeat("x", 4097)), nbdtest.RepErrInvalid},
		{nbdtest.OptGo, make([]byte, maxOptionData+1), nbdtest.RepErrTooBig},
		{99, make([]byte, 100_000), nbdtest.RepErrTooBig},
	} {
		err := c.Ask(o.opt, o.data, nil)
		if o.want == 0 {
			if err != nil {
				t.Fatalf("option %d: %v", o.opt, err)
			}
			continue
		}
		optionError(t, err, o.want)
	}
	// All of it has left the stream in step.
	if err := c.Go(""); err != nil {
		t.Fatal(err)
	}
	c.Structured = true
	do(t, c, 0, nbdtest.CmdRead, 0, 512, nil, 0)

	c = s.connect(t)
	if err := c.Ask(nbdtest.OptAbort, []byte("ignored"), nil); err != nil {
		t.Fatal(err)
	}
	if err := c.AtEnd(); err != nil {
		t.Error(err)
	}
	// Without FIXED_NEWSTYLE there is EXPORT_NAME and nothing else.
	c, err := nbdtest.Connect("unix", s.path, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	optionError(t, c.Ask(nbdtest.OptList, nil, nil), nbdtest.RepErrInvalid)
}

// TestHandshakeViolations: each ends the connection, and the log says why.
func TestHandshakeViolations(t *testing.T) {
	s := serve(t, newMemDevice(1<<20))
	option := func(magic uint64, opt, n uint32) []byte {
		b := binary.BigEndian.AppendUint64(nil, magic)
		b = binary.BigEndian.AppendUint32(b, opt)
		return binary.BigEndian.AppendUint32(b, n)
	}
	fixed := []byte{0, 0, 0, 3}
	many := append([]byte(nil), fixed...)
	for range maxOptions {
		many = append(many, option(magicOption, 99, 0)...)
	}
	for _, c := range []struct {
		name string
		send []byte
		log  string
	}{
		{"unknown client flags", []byte{0, 0, 0, 7}, "unknown client flags 0x7"},
		{"an HTTP request", []byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), "unknown client flags 0x47455420"},
		{"wrong option magic", append(fixed, option(magicInit, 1, 0)...), "option with wrong magic number 0x4e42444d41474943"},
		{"option of 4 GiB", append(fixed, option(magicOption, 99, 0xffffffff)...), "option 99 with 4294967295 bytes"},
		{"export name of 20000 bytes", append(fixed, append(option(magicOption, optExportName, 20000), make([]byte, 20000)...)...), "export name of 20000 bytes"},
		{"too many options", many, "more than 4096 options"},
	} {
		nc, err := net.Dial("unix", s.path)
		if err != nil {
			t.Fatal(err)
		}
		nc.SetDeadline(time.Now().Add(patience))
		go io.Copy(io.Discard, nc) // replies
		// The server may close before it has read everything.
		if _, err := nc.Write(c.send); err != nil && !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: %v", c.name, err)
		}
		s.log.Await(t, regexp.QuoteMeta(c.log))
		nc.Close()
	}
	if n := s.Stats().HandshakesFailed; n != 6 {
		t.Errorf("%d failed handshakes", n)
	}
	do(t, s.open(t, true), 0, nbdtest.CmdRead, 0, 512, nil, 0)
}

func TestHandshakeTimeout(t *testing.T) {
	s := serve(t, newMemDevice(1<<20), func(c *Config) { c.HandshakeTimeout = 50 * time.Millisecond })
	nc, err := net.Dial("unix", s.path)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	nc.SetDeadline(time.Now().Add(patience))
	if _, err := io.Copy(io.Discard, nc); err != nil {
		t.Fatal(err)
	}
	// Haggling does not extend it. On a busy machine the time may be over before it begins.
	failures, asked := uint64(1), 0
	for start := time.Now(); asked == 0; failures++ {
		c, err := nbdtest.Connect("unix", s.path, nbdtest.ClientFixed|nbdtest.ClientNoZeroes)
		for ; err == nil; asked++ {
			if err = c.Ask(nbdtest.OptList, nil, func(uint32, []byte) error { return nil }); err != nil {
				c.Close()
				break
			}
			if time.Since(start) > patience/2 {
				t.Fatal("haggling goes on for ever")
			}
		}
		if time.Since(start) > patience {
			t.Fatalf("nobody got through to haggle: %v", err)
		}
	}
	eventually(t, "the failures", func() bool { return s.Stats().HandshakesFailed == failures })
	eventually(t, "the log to say so", func() bool { return strings.Contains(s.log.String(), "not finished within 50ms") })
	// A connection in transmission has no such limit.
	s = serve(t, newMemDevice(1<<20), func(c *Config) { c.HandshakeTimeout = 500 * time.Millisecond })
	var c *nbdtest.Client
	eventually(t, "a handshake in time", func() bool { c, err = nbdtest.Open("unix", s.path, "", false); return err == nil })
	defer c.Close()
	<-time.After(600 * time.Millisecond)
	do(t, c, 0, nbdtest.CmdRead, 0, 512, nil, 0)
}

// TestThousandHalfOpen: connections that say nothing, or half of something, are
// bounded, and somebody who means it is served all the time.
func TestThousandHalfOpen(t *testing.T) {
	s := serve(t, newMemDevice(1<<20), func(c *Config) { c.MaxHandshakes = 16 })
	goroutines := runtime.NumGoroutine()
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	for i := range 1000 {
		nc, err := net.Dial("unix", s.path)
		if errors.Is(err, syscall.EAGAIN) { // the listener's backlog is full for a moment
			runtime.Gosched()
			continue
		}
		if err != nil {
			t.Fatal(i, err)
		}
		conns = append(conns, nc)
		if i%2 == 0 {
			nc.Write([]byte{0, 0, 0, 3, 'I', 'H', 'A', 'V', 'E'}) // may be evicted already
		}
		if n := s.Stats().Handshakes; n > 16 {
			t.Fatalf("%d handshakes", n)
		}
		if i%100 == 99 {
			c := s.open(t, true)
			do(t, c, 0, nbdtest.CmdRead, 0, 4096, nil, 0)
			c.Close()
		}
	}
	if len(conns) < 900 {
		t.Fatalf("only %d connections", len(conns))
	}
	eventually(t, "few goroutines", func() bool { return runtime.NumGoroutine() < goroutines+50 })
	st := s.Stats()
	if st.HandshakesEvicted < 800 {
		t.Errorf("%+v", st)
	}
	if n := strings.Count(s.log.String(), "make room"); n > 200 {
		t.Errorf("%d log lines", n)
	}
}

func TestMaxConnections(t *testing.T) {
	s := serve(t, newMemDevice(1<<20), func(c *Config) { c.MaxConnections = 2 })
	a, b := s.open(t, true), s.open(t, true)
	c := s.connect(t)
	err := c.Go("")
	optionError(t, err, nbdtest.RepErrPolicy)
	if !strings.Contains(err.Error(), "maximum of 2 connections") {
		t.Error(err)
	}
	a.Send(0, nbdtest.CmdDisc, 1, 0, 0, nil)
	if err := a.AtEnd(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a place", func() bool { return s.Stats().Exports[0].Connections == 1 })
	if err := c.Go(""); err != nil { // the same handshake may try again
		t.Fatal(err)
	}
	do(t, c, 0, nbdtest.CmdRead, 0, 512, nil, 0)
	do(t, b, 0, nbdtest.CmdRead, 0, 512, nil, 0)
	// A connection is counted when its worker has it, which may serve it at once.
	eventually(t, "three counted", func() bool { return s.Stats().Exports[0].Connected == 3 })
	if st := s.Stats(); st.Refused != 1 {
		t.Errorf("%+v", st)
	}
}

// TestConnectionsSpread: a client's connections are on different queues, and one that went makes room.
func TestConnectionsSpread(t *testing.T) {
	d := newHeldDevice(t, 1<<20, 4, 1<<20)
	for _, q := range d.queues {
		q.open()
	}
	s := serve(t, d)
	var conns []*nbdtest.Client
	on := func() (n [4]int) {
		for _, c := range s.Connections() {
			if c.State != "handshake" {
				n[c.Queue]++
			}
		}
		return n
	}
	for range 8 {
		c := s.open(t, true)
		do(t, c, 0, nbdtest.CmdRead, 0, 512, nil, 0)
		conns = append(conns, c)
	}
	if n := on(); n != [4]int{2, 2, 2, 2} {
		t.Errorf("%v", n)
	}
	conns[2].Close() // on queue 2
	eventually(t, "seven", func() bool { return on() == [4]int{2, 2, 1, 2} })
	do(t, s.open(t, true), 0, nbdtest.CmdRead, 0, 512, nil, 0)
	if n := on(); n != [4]int{2, 2, 2, 2} {
		t.Errorf("%v", n)
	}
}

func TestServeRefusesRemote(t *testing.T) {
	s, err := NewServer(Config{Exports: []Export{{Device: newMemDevice(1 << 20)}}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, addr := range []string{"0.0.0.0:0", "[::]:0"} {
		ln, err := net.Listen("tcp", addr)
		if err != nil {
			t.Logf("%s: %v", addr, err)
			continue
		}
		if err := s.Serve(ln); !errors.Is(err, ErrNotLoopback) {
			t.Errorf("%s: %v", addr, err)
		}
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() { done <- s.Serve(ln) }()
	c, err := nbdtest.Open("tcp", ln.Addr().String(), "", true)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	do(t, c, 0, nbdtest.CmdRead, 0, 512, nil, 0)
	if p := s.Connections()[0].Peer; p != c.LocalAddr().String() {
		t.Errorf("peer %q", p)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := <-done; err != ErrServerClosed {
		t.Error(err)
	}
}

func TestConfigValidate(t *testing.T) {
	dev := newMemDevice(1 << 20)
	err := Config{Workers: -1, MaxPayload: 1, MaxConnections: -5, HandshakeTimeout: -1, Exports: []Export{
		{Name: "a", Device: dev}, {Name: "a", Device: dev}, {Name: "b"}, {Name: "c\x00", Device: dev},
		{Name: strings.Repeat("x", 5000), Device: dev}, {Name: "odd", Device: newMemDevice(1000)},
	}}.Validate()
	if err == nil {
		t.Fatal("no error")
	}
	for _, part := range []string{"Workers is -1", "MaxPayload is 1", "MaxConnections is -5", "HandshakeTimeout", `"a" is there twice`, `("b") has no device`, "Exports[3]", "Exports[4]", `("odd")`} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q is not in\n%v", part, err)
		}
	}
	if err := (Config{}).Validate(); err == nil {
		t.Error("nothing to serve is no error")
	}
}

func TestListenUnix(t *testing.T) {
	dir := tempDir(t)
	path := dir + "/s"
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	ln, err := ListenUnix(path, 0o660)
	if err != nil {
		t.Fatal(err)
	}
	if st, err := os.Lstat(path); err != nil || st.Mode().Perm() != 0o660 {
		t.Errorf("%v %v", st.Mode(), err)
	}
	if _, err := ListenUnix(path, 0o600); !errors.Is(err, ErrSocketInUse) {
		t.Errorf("in use: %v", err)
	}
	// A server that died leaves its file behind.
	ln.(*unixListener).UnixListener.Close()
	if _, err := os.Lstat(path); err != nil {
		t.Fatal(err)
	}
	ln2, err := ListenUnix(path, 0o600)
	if err != nil {
		t.Fatalf("stale: %v", err)
	}
	if st, err := os.Lstat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", st.Mode(), err)
	}
	// The first must not remove what is not its own.
	ln.Close()
	if _, err := os.Lstat(path); err != nil {
		t.Error("another server's socket was removed")
	}
	ln2.Close()
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Error("the socket is still there")
	}
	// What is no socket is left alone.
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ListenUnix(path, 0o600); err == nil || !strings.Contains(err.Error(), "no socket") {
		t.Errorf("a file: %v", err)
	}
	if b, _ := os.ReadFile(path); !bytes.Equal(b, []byte("precious")) {
		t.Error("the file has changed")
	}
	if _, err := ListenUnix(dir+"/"+strings.Repeat("x", 120), 0o600); err == nil || !strings.Contains(err.Error(), "shorter") {
		t.Errorf("long path: %v", err)
	}
	if _, err := ListenUnix(dir+"/missing/s", 0o600); !os.IsNotExist(errors.Unwrap(err)) && !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no directory: %v", err)
	}
}

// TestListenUnixRace: of many servers that find the same stale socket one gets it.
func TestListenUnixRace(t *testing.T) {
	path := tempDir(t) + "/s"
	ln, err := ListenUnix(path, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	ln.(*unixListener).UnixListener.Close() // stale
	type result struct {
		ln  net.Listener
		err error
	}
	ch := make(chan result)
	const n = 16
	for range n {
		go func() {
			ln, err := ListenUnix(path, 0o600)
			ch <- result{ln, err}
		}()
	}
	var won []net.Listener
	for range n {
		r := <-ch
		if r.err == nil {
			won = append(won, r.ln)
		} else if !errors.Is(r.err, ErrSocketInUse) {
			t.Error(r.err)
		}
	}
	if len(won) != 1 {
		t.Errorf("%d servers listen", len(won))
	}
	for _, ln := range won {
		ln.Close()
	}
}

func TestShutdownEndsHandshakes(t *testing.T) {
	s := serve(t, newMemDevice(1<<20))
	c := s.connect(t)
	if err := c.Ask(nbdtest.OptStructuredReply, nil, nil); err != nil {
		t.Fatal(err)
	}
	s.shutdown(t)
	if err := c.AtEnd(); err != nil {
		t.Error(err)
	}
	if _, err := net.Dial("unix", s.path); err == nil {
		t.Error("somebody still listens")
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Serve(ln); err != ErrServerClosed {
		t.Error(err)
	}
	if err := s.Shutdown(context.Background()); err != nil { // again is no error
		t.Error(err)
	}
}

func TestRateLimitedLog(t *testing.T) {
	s := serve(t, newMemDevice(1<<20))
	for range 100 {
		nc, err := net.Dial("unix", s.path)
		if err != nil {
			t.Fatal(err)
		}
		nc.Write([]byte{0xff, 0xff, 0xff, 0xff})
		io.Copy(io.Discard, nc)
		nc.Close()
	}
	eventually(t, "100 failures", func() bool { return s.Stats().HandshakesFailed == 100 })
	lines := func() int { return strings.Count(s.log.String(), "unknown client flags") }
	eventually(t, "the lines", func() bool { return lines() >= logBurst }) // a failure is counted before it is told
	if n := lines(); n > 3*logBurst {
		t.Errorf("%d lines", n)
	}
}

// failingListener gives errors, then connections, then the last error.
type failingListener struct {
	net.Listener
	errs chan error
	last error
}

func (l *failingListener) Accept() (net.Conn, error) {
	select {
	case err := <-l.errs:
		return nil, &net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", err)}
	default:
	}
	nc, err := l.Listener.Accept()
	if err == nil && len(l.errs) == 0 && l.last != nil {
		nc.Close()
		return nil, l.last
	}
	return nc, err
}

// TestAcceptErrors: a lack of descriptors is waited out, anything unknown ends Serve with its error.
func TestAcceptErrors(t *testing.T) {
	s := serve(t, newMemDevice(1<<20))
	path := tempDir(t) + "/s"
	ln, err := ListenUnix(path, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	l := &failingListener{Listener: ln, errs: make(chan error, 3)}
	for _, e := range []error{syscall.EMFILE, syscall.ECONNABORTED, syscall.ENFILE} {
		l.errs <- e
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	c, err := nbdtest.Open("unix", path, "", true)
	if err != nil {
		t.Fatal(err)
	}
	do(t, c, 0, nbdtest.CmdRead, 0, 512, nil, 0)
	c.Close()
	if !strings.Contains(s.log.String(), "cannot accept a connection") {
		t.Error("nothing in the log")
	}

	path = tempDir(t) + "/s"
	if ln, err = ListenUnix(path, 0o600); err != nil {
		t.Fatal(err)
	}
	odd := errors.New("something odd")
	go func() { done <- s.Serve(&failingListener{Listener: ln, errs: make(chan error), last: odd}) }()
	if nc, err := net.Dial("unix", path); err == nil {
		nc.Close()
	}
	if err := <-done; !errors.Is(err, odd) {
		t.Error(err)
	}
	s.Close()
	if err := <-done; err != ErrServerClosed {
		t.Error(err)
	}
}

// TestQueueCannotBeOpened: the client is told, and may try again.
func TestQueueCannotBeOpened(t *testing.T) {
	d := &shyDevice{heldDevice: newHeldDevice(t, 1<<20, 1, 1<<20), err: blockdev.ErrLost}
	d.queues[0].open()
	s := serve(t, d)
	c := s.connect(t)
	optionError(t, c.Go(""), nbdtest.RepErrPolicy)
	d.err = blockdev.ErrClosed
	optionError(t, c.Go(""), nbdtest.RepErrShutdown)
	d.err = nil
	if err := c.Go(""); err != nil {
		t.Fatal(err)
	}
	do(t, c, 0, nbdtest.CmdRead, 0, 512, nil, 0)
	if n := s.Stats().Exports[0].Connections; n != 1 {
		t.Errorf("%d connections: the failed ones kept their places", n)
	}
}

type shyDevice struct {
	*heldDevice
	err error
}

func (d *shyDevice) OpenQueue(i int) (blockdev.Queue, error) {
	if d.err != nil {
		return nil, d.err
	}
	return d.heldDevice.OpenQueue(i)
}
