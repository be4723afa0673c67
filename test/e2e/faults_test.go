package e2e

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"rdblk/nbd/nbdtest"
)

// What was acknowledged with FUA is in the file, whenever the target dies: a client
// keeps a journal of the answers it got, and the file is compared with it.
func TestKillLosesNoAcknowledgedFUAWrite(t *testing.T) {
	const (
		rounds = 6
		blocks = 256
		size   = 4096
		depth  = 16
	)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	w := newWorld(t, blocks*size)
	p := w.serve()
	a := w.attach("disk")
	c, err := nbdtest.Open("unix", a.sock, "", true)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()

	// Block b is written only while no other write of it is in flight, so that a
	// version that was answered is the least that must be there.
	var mu sync.Mutex
	acked, sent := make([]uint64, blocks), make([]uint64, blocks)
	busy := make([]bool, blocks)
	inFlight, total := 0, 0
	cond := sync.NewCond(&mu)
	stop := false
	var wg sync.WaitGroup
	wg.Go(func() { // answers
		for {
			r, err := c.ReadReply()
			mu.Lock()
			if err != nil || r.Errno != 0 {
				if !stop {
					t.Errorf("reply %+v, %v", r, err)
				}
				stop = true
				cond.Broadcast()
				mu.Unlock()
				return
			}
			b := int(r.Cookie)
			acked[b] = sent[b]
			busy[b] = false
			inFlight--
			total++
			cond.Broadcast()
			mu.Unlock()
		}
	})
	wg.Go(func() { // requests
		buf := make([]byte, size)
		for version := uint64(1); ; version++ {
			mu.Lock()
			for inFlight >= depth && !stop {
				cond.Wait()
			}
			b := rnd.IntN(blocks)
			for busy[b] {
				b = (b + 1) % blocks
			}
			if stop {
				mu.Unlock()
				return
			}
			busy[b] = true
			inFlight++
			sent[b] = version
			mu.Unlock()
			for i := 0; i < size; i += 16 {
				binary.LittleEndian.PutUint64(buf[i:], version)
				binary.LittleEndian.PutUint64(buf[i+8:], uint64(b))
			}
			if err := c.Send(nbdtest.CmdFlagFUA, nbdtest.CmdWrite, uint64(b), uint64(b)*size, size, buf); err != nil {
				return // the reader says why
			}
		}
	})
	for round := range rounds {
		mu.Lock()
		want := total + 200 + rnd.IntN(300)
		for total < want && !stop {
			cond.Wait()
		}
		mu.Unlock()
		p.kill(t)
		mu.Lock()
		least, most := append([]uint64(nil), acked...), append([]uint64(nil), sent...)
		mu.Unlock()
		file, err := os.ReadFile(w.disk)
		if err != nil {
			t.Fatal(err)
		}
		bad := 0
		for b := range blocks {
			got := binary.LittleEndian.Uint64(file[b*size:])
			if got < least[b] || got > most[b] {
				t.Errorf("round %d: block %d has version %d; %d was acknowledged and %d sent", round, b, got, least[b], most[b])
				if bad++; bad > 5 {
					break
				}
			}
		}
		p = w.serve()
	}
	mu.Lock()
	for inFlight > 0 && !stop { // all that was cut off is answered in the end
		want := total + 1
		for total < want && !stop {
			cond.Wait()
		}
		if total > 200*rounds+depth {
			break
		}
	}
	stop = true
	cond.Broadcast()
	mu.Unlock()
	c.Close()
	wg.Wait()
	if st := a.status(); st.Reconnects < rounds || st.Errors != 0 || st.FlushFault != "" {
		t.Errorf("after %d kills: %+v", rounds, st)
	}
	t.Logf("%d acknowledged FUA writes over %d kills", total, rounds)
}

// The target is killed, or told to stop, and comes back: to the client that is a pause.
func TestTargetRestartUnderLoad(t *testing.T) {
	nbdtest.Require(t, "fio")
	w := newWorld(t, 256*MiB)
	p := w.serve()
	a := w.attach("disk")
	rate := ",3m" // of writes, so that one run sees all restarts as a rule: fio catches up after each
	if raceDetector {
		rate = ",1m"
	}
	fio := underLoad(t, "--name=load", "--ioengine=nbd", "--uri="+a.uri(), "--rw=randwrite", "--bssplit=512/20:4k/50:64k/20:1m/10", "--blockalign=512",
		"--iodepth=64", "--numjobs=4", "--size=60M", "--offset_increment=64M", "--rate="+rate, "--verify=crc32c", "--verify_fatal=1", "--do_verify=1")
	for i, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM, syscall.SIGKILL} {
		before := a.status()
		eventually(t, "it is under load", func() bool {
			st := a.status()
			return st.WriteOps+st.ReadOps > before.WriteOps+before.ReadOps+100 && st.Requests > 0
		})
		p.end(t, sig)
		eventually(t, "the loss is seen and requests wait", func() bool { st := a.status(); return st.State == "reconnecting" && st.Waiting > 0 })
		p = w.serve()
		eventually(t, "it is live again", func() bool { st := a.status(); return st.State == "live" && st.Reconnects == i+1 })
	}
	fio.wait(t)
	if st := a.status(); st.Errors != 0 || st.FlushFault != "" {
		t.Errorf("after the restarts: %+v", st)
	}
	if code, _, errw := do(t, "rdinit", "detach", "disk", "--run-dir", w.run); code != 0 {
		t.Errorf("detach: %d, %s", code, errw)
	}
}

// The target does not come back: requests fail after the loss timeout, not before and not never.
func TestTargetDoesNotComeBack(t *testing.T) {
	w := newWorld(t, 16*MiB)
	p := w.serve()
	a := w.attach("disk", "--loss-timeout", "5s")
	c, err := nbdtest.Open("unix", a.sock, "", true)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	p.kill(t)
	begin := time.Now() // the timeout counts from the loss, a moment before
	r, err := c.Do(0, nbdtest.CmdRead, 0, 4096, nil)
	if took := time.Since(begin); err != nil || r.Errno != nbdtest.EIO || took < time.Second || took > 30*time.Second {
		t.Errorf("%+v, %v after %v", r, err, took)
	}
	begin = time.Now()
	r, err = c.Do(0, nbdtest.CmdRead, 0, 4096, nil)
	if took := time.Since(begin); err != nil || r.Errno != nbdtest.EIO || took > 4*time.Second {
		t.Errorf("the next: %+v, %v after %v", r, err, took)
	}
	if st := a.status(); st.State != "lost" {
		t.Errorf("status %+v", st)
	}
	w.serve() // late, but not too late for what comes now
	eventually(t, "it is live again", func() bool { return a.status().State == "live" })
	if r, err := c.Do(0, nbdtest.CmdRead, 0, 4096, nil); err != nil || r.Errno != 0 {
		t.Errorf("after the return: %+v, %v", r, err)
	}
}

// Others at the target's port: whoever they are, they are told to go or bounded, and
// the host that is served does not notice.
func TestStrangersAtThePort(t *testing.T) {
	w := newWorld(t, 32*MiB)
	p := w.serve()
	a := w.attach("disk")
	c, err := nbdtest.Open("unix", a.sock, "", true)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	work := func() time.Duration {
		t.Helper()
		begin := time.Now()
		data := bytes.Repeat([]byte{7}, 65536)
		for i := range 50 {
			off := uint64(i) * 65536
			if r, err := c.Do(0, nbdtest.CmdWrite, off, 65536, data); err != nil || r.Errno != 0 {
				t.Fatalf("write: %+v, %v", r, err)
			}
			if r, err := c.Do(0, nbdtest.CmdRead, off, 65536, nil); err != nil || r.Errno != 0 || !bytes.Equal(r.Data, data) {
				t.Fatalf("read: errno %d, %v", r.Errno, err)
			}
		}
		return time.Since(begin)
	}
	work()
	rss := p.rss(t)

	// The connection is closed without an answer within the time that a request may take.
	ends := func(what string, send []byte) {
		t.Helper()
		s, err := net.Dial("tcp", w.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		s.SetDeadline(time.Now().Add(patience))
		s.Write(send)
		b, err := io.ReadAll(s)
		var ne net.Error
		if errors.As(err, &ne) && ne.Timeout() || len(b) > 0 {
			t.Errorf("%s: %d bytes %q, %v", what, len(b), b, err)
		}
	}
	ends("an HTTP client", []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
	ends("a TLS client", []byte{0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	ends("zeros", make([]byte, 4096))
	ends("an MPA request with more private data than there may be", append([]byte("MPA ID Req Frame\x40\x01\xff\xff"), make([]byte, 600)...))

	// A thousand connections that say nothing, or half a request. They are made from
	// here, so that the descriptors are ours too.
	lim := syscall.Rlimit{}
	syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim)
	if lim.Cur < 2000 {
		lim.Cur = min(lim.Max, 4000)
		syscall.Setrlimit(syscall.RLIMIT_NOFILE, &lim)
	}
	var open []net.Conn
	defer func() {
		for _, s := range open {
			s.Close()
		}
	}()
	for i := range 1000 {
		s, err := net.DialTimeout("tcp", w.addr, patience)
		if errors.Is(err, syscall.ECONNRESET) { // over the limit, and told so before we were done
			continue
		}
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		if i%2 == 1 {
			s.Write([]byte("MPA ID Req Fr"))
		}
		open = append(open, s)
	}
	took := work()
	t.Logf("100 requests of 64 KiB beside 1000 half-open connections: %v", took)
	if took > 10*time.Second {
		t.Errorf("the host was served slowly: %v", took)
	}
	if now := p.rss(t); now > rss+64*MiB && !raceDetector {
		t.Errorf("resident memory went from %d to %d MiB", rss>>20, now>>20)
	}
	// Another host gets in while they stand there.
	if code, _, errw := do(t, "rdinit", "discover", w.addr); code != 0 {
		t.Errorf("discover beside them: %s", errw)
	}
	// And they do not stay.
	eventually(t, "the half-open connections are closed", func() bool {
		m := metrics(t, w.http)
		return m[`rdtarget_rdma_accepted_total`]-m[`rdtarget_rdma_established_total`] >= 1000 && p.fds(t) < 100
	})
	if st := a.status(); st.State != "live" || st.Reconnects != 0 || st.Errors != 0 {
		t.Errorf("the host: %+v", st)
	}
}

// rdinit at a port that is something else: a clear error in a bounded time.
func TestAttachToSomethingElse(t *testing.T) {
	w := newWorld(t, MiB)
	for what, serve := range map[string]func(net.Conn){
		"an HTTP server": func(c net.Conn) { c.Read(make([]byte, 100)); c.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n")) },
		"hangs up":       func(c net.Conn) {},
		"random bytes":   func(c net.Conn) { c.Write(bytes.Repeat([]byte{0xa5, 7, 0, 255}, 5000)) },
		"silence":        func(c net.Conn) { io.Copy(io.Discard, c) },
	} {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				go func() { serve(c); c.Close() }()
			}
		}()
		begin := time.Now()
		code, out, errw := do(t, "rdinit", "attach", ln.Addr().String(), "--socket", w.dir+"/s", "--run-dir", w.run, "--connect-timeout", "3s")
		if took := time.Since(begin); code != 1 || out != "" || !strings.Contains(errw, ln.Addr().String()) || took > 20*time.Second {
			t.Errorf("%s: exit %d after %v, %q, %q", what, code, took, out, errw)
		}
		t.Logf("%s: %s", what, strings.TrimSpace(errw))
		ln.Close()
	}
	if _, err := os.Lstat(w.dir + "/s"); err == nil {
		t.Error("a socket is left")
	}
}

// An NBD client that asks and never reads: it costs bounded memory and nobody else waits for it.
func TestClientThatNeverReads(t *testing.T) {
	w := newWorld(t, 64*MiB)
	w.serve()
	a := w.attach("disk", "--queues", "1")
	good, err := nbdtest.Open("unix", a.sock, "", true)
	if err != nil {
		t.Fatal(err)
	}
	defer good.Close()
	rss := a.rss(t)
	for range 4 {
		bad, err := nbdtest.Open("unix", a.sock, "", true)
		if err != nil {
			t.Fatal(err)
		}
		defer bad.Close()
		bad.SetWriteDeadline(time.Now().Add(2 * time.Second))
		for i := range 2000 { // 2 GiB of answers, if they were made
			if err := bad.Send(0, nbdtest.CmdRead, uint64(i), 0, MiB, nil); err != nil {
				break // it is not read any more either
			}
		}
	}
	begin := time.Now()
	for i := range 200 {
		if r, err := good.Do(0, nbdtest.CmdRead, uint64(i)*4096, 4096, nil); err != nil || r.Errno != 0 {
			t.Fatalf("%+v, %v", r, err)
		}
	}
	if took := time.Since(begin); took > 20*time.Second {
		t.Errorf("200 reads beside them took %v", took)
	}
	if now := a.rss(t); now > rss+256*MiB && !raceDetector {
		t.Errorf("resident memory went from %d to %d MiB", rss>>20, now>>20)
	} else {
		t.Logf("resident memory %d MiB, was %d", now>>20, rss>>20)
	}
	// They do not keep it from ending in good order either.
	if code, took := a.end(t, syscall.SIGTERM); code != 0 || took > 10*time.Second {
		t.Errorf("ended with %d after %v", code, took)
	}
}

// Load does not make memory grow without a bound: what is resident after a
// hard minute's worth of work is within what the guide computes.
func TestMemoryIsBounded(t *testing.T) {
	nbdtest.Require(t, "fio")
	w := newWorld(t, 128*MiB)
	p := w.serve("--workers", "2")
	a := w.attach("disk", "--queues", "2")
	for _, bs := range []string{"4k", "1m"} {
		inBackground(t, "fio", "--name=load", "--ioengine=nbd", "--uri="+a.uri(), "--rw=randrw", "--bs="+bs, "--iodepth=64", "--numjobs=4", "--size=128M",
			"--time_based", "--runtime=3").wait(t)
	}
	// 2 × 64 MiB of buffers and 16 MiB of the admin worker, receive buffers, the program itself.
	const limit = 250 * MiB
	for _, x := range []*process{p, a.process} {
		rss := x.rss(t)
		t.Logf("%s: %d MiB resident", x.name, rss>>20)
		if rss > limit && !raceDetector { // which has memory of its own
			t.Errorf("%s: %d MiB resident, over %d", x.name, rss>>20, limit>>20)
		}
	}
}

// Attached and without work, both programs sleep.
func TestIdleCostsNothing(t *testing.T) {
	w := newWorld(t, 16*MiB)
	p := w.serve()
	list := []*process{p}
	for i := range 4 {
		list = append(list, w.attach(fmt.Sprintf("disk%d", i)).process)
	}
	const span = 4 * time.Second
	before := make([]time.Duration, len(list))
	for i, x := range list {
		before[i] = x.cpu(t)
	}
	timer := time.NewTimer(span) // the span of a measurement, not a wait for something
	<-timer.C
	for i, x := range list {
		used := x.cpu(t) - before[i]
		t.Logf("%s: %v of processor time in %v", x.name, used, span)
		if used > span/40 && !raceDetector {
			t.Errorf("%s used %v in %v without work", x.name, used, span)
		}
	}
}

// Hosts that are not on the list are refused with the remedy, and let in after a reload.
func TestHostList(t *testing.T) {
	w := newWorld(t, MiB)
	cfg := w.dir + "/c.yaml"
	const host = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555"
	write := func(hosts string) {
		if err := os.WriteFile(cfg, []byte(fmt.Sprintf("namespaces: [%s]\nhosts: [%s]\n", w.disk, hosts)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("nqn.2026-11.io.rdblk:somebody-else")
	p := w.serve("--config", cfg, "--nqn", "nqn.2026-11.io.rdblk:test")
	attach := []string{"bench", w.addr, "--nqn", "nqn.2026-11.io.rdblk:test", "--host-nqn", host, "--runtime", "10ms"}
	code, _, errw := do(t, "rdinit", attach...)
	if code != 1 || !strings.Contains(errw, host) || !strings.Contains(errw, "list of hosts") {
		t.Errorf("a host that is not on the list: exit %d, %q", code, errw)
	}
	if code, _, errw := do(t, "rdinit", "discover", w.addr, "--host-nqn", host); code != 1 || !strings.Contains(errw, host) {
		t.Errorf("discovery of such a host: exit %d, %q", code, errw)
	}
	if code, out, errw := do(t, "rdinit", "discover", w.addr, "--host-nqn", host, "-o", "json"); code != 1 || !strings.HasPrefix(out, "[") || !strings.Contains(errw, host) {
		t.Errorf("the same as JSON: exit %d, %q, %q", code, out, errw)
	}
	write("nqn.2026-11.io.rdblk:somebody-else, " + host)
	p.Process.Signal(syscall.SIGHUP)
	p.log.Await(t, "msg=reloaded hosts=2")
	if code, _, errw := do(t, "rdinit", attach...); code != 0 {
		t.Errorf("after the reload: exit %d, %q", code, errw)
	}
}
