package trace

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"rdblk/internal/envtest"
	"rdblk/internal/logfile"
	"rdblk/protocol"
)

// What is written at once fits into a file with the least bound.
var _ [logfile.MinSize - BufferSize]struct{}

var update = flag.Bool("update", false, "write testdata anew")

var peer = netip.MustParseAddrPort("10.77.0.1:50312")

// fixed is a clock that moves on by 10 µs with each look.
func fixed() func() time.Time {
	at := time.Date(2026, 11, 29, 14, 3, 7, 418_000_000, time.UTC)
	return func() time.Time {
		at = at.Add(10 * time.Microsecond)
		return at
	}
}

// kernel reads one of the kernel's own messages.
func kernel(t *testing.T, name string) []byte {
	t.Helper()
	return envtest.Hex(t, "../../protocol/testdata/kernel/"+name+".hex")
}

// TestKernelConnect traces what the Linux kernel's host and target said when they
// connected: private data, capsules and completions as captured, in the order of the
// protocol.
func TestKernelConnect(t *testing.T) {
	const header = 24 // MPA and the read depths
	var out bytes.Buffer
	tr := newTracer(&out, fixed())
	queue := func(name string, qid uint16) {
		var req protocol.RDMAConnectRequest
		if err := req.UnmarshalBinary(kernel(t, name+"-mpa-request")[header:]); err != nil {
			t.Fatal(err)
		}
		var acc protocol.RDMAConnectAccept
		if err := acc.UnmarshalBinary(kernel(t, name+"-mpa-reply")[header:]); err != nil {
			t.Fatal(err)
		}
		tr.Request(peer, &req, 16)
		tr.Accepted(peer, qid, acc.CRQSIZE, 16)
	}
	both := func(qid uint16, names ...string) {
		for _, n := range names {
			c := (*protocol.Command)(kernel(t, n+"-capsule"))
			tr.Command(peer, qid, c)
			for _, kind := range []string{"", "-refused"} {
				if _, err := os.Stat("../../protocol/testdata/kernel/" + n + kind + "-completion.hex"); err == nil {
					tr.Completion(peer, qid, (*protocol.Completion)(kernel(t, n+kind+"-completion")), c)
				}
			}
		}
	}
	queue("admin", 0)
	both(0, "admin-connect", "admin-property-get-cap", "admin-property-set-cc", "admin-property-get-cc", "admin-property-get-csts",
		"admin-property-get-vs", "admin-identify-ctrl", "admin-get-log-05-4096", "admin-get-log-0c-8208", "admin-get-log-02-512", "admin-set-features-07")
	queue("io", 1)
	both(1, "io-connect")
	both(0, "admin-set-features-0b", "admin-aer", "admin-identify-cs-ctrl", "admin-identify-ns-list", "admin-identify-ns-desc", "admin-identify-ns", "admin-keep-alive")
	both(1, "io-write-4096", "io-write-131072", "io-read-4096", "io-read-512", "io-flush", "io-dsm", "io-write-zeroes")
	tr.Event("namespace attribute changed", 1)
	tr.Disconnected(peer, 1, errors.New("a text with a\nline end"))
	tr.Disconnected(peer, 0, nil)
	tr.Rejected(peer, NoQueue, protocol.RejectNoResources, errors.New("too many connections"))
	if err := tr.Close(); err != nil {
		t.Fatal(err)
	}
	const file = "testdata/kernel-connect.txt"
	if *update {
		if err := os.WriteFile(file, out.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if out.String() != string(want) {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
	if n := strings.Count(out.String(), "\n"); n < 50 {
		t.Errorf("%d lines", n)
	}
}

// sample does one of everything.
func sample(tr *Tracer, c *protocol.Command, e *protocol.Completion) {
	tr.Command(peer, 1, c)
	tr.Completion(peer, 1, e, c)
}

// TestOffCostsNothing: a nil Tracer takes everything.
func TestOffCostsNothing(t *testing.T) {
	if tr := New(nil); tr != nil {
		t.Error("a Tracer that writes nowhere")
	}
	var tr *Tracer
	c, e := new(protocol.Command), new(protocol.Completion)
	c.InitRW(protocol.OpRead, 1, 1, 8, 8, 0)
	if n := testing.AllocsPerRun(1000, func() {
		sample(tr, c, e)
		tr.Request(peer, &protocol.RDMAConnectRequest{}, 1)
		tr.Accepted(peer, 0, 1, 1)
		tr.Rejected(peer, 0, 1, nil)
		tr.Disconnected(peer, 0, nil)
		tr.Event("x", 1)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if tr.Lost() != 0 || tr.Close() != nil {
		t.Error("nil Tracer lost something")
	}
}

func TestOnAllocatesNothing(t *testing.T) {
	tr := New(io.Discard)
	defer tr.Close()
	c, e := new(protocol.Command), new(protocol.Completion)
	c.InitRW(protocol.OpWrite, 1, 1, 8, 8, 0)
	c.SetKeyedSGL(0x1000, 4096, 7, true)
	e.Init(1, protocol.StatusSuccess)
	if n := testing.AllocsPerRun(10000, func() { sample(tr, c, e) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// gate is a writer that is stuck until it is opened.
type gate struct {
	mu   sync.Mutex
	open chan struct{}
	buf  bytes.Buffer
	n    int // calls
	most int // bytes of one
}

func (g *gate) Write(b []byte) (int, error) {
	<-g.open
	g.mu.Lock()
	defer g.mu.Unlock()
	g.n++
	g.most = max(g.most, len(b))
	return g.buf.Write(b)
}

// TestSlowWriter: nothing waits for it, memory is bounded, and what is left out is told
// at its place.
func TestSlowWriter(t *testing.T) {
	g := &gate{open: make(chan struct{})}
	tr := New(g)
	c := new(protocol.Command)
	c.InitRW(protocol.OpRead, 1, 1, 8, 8, 0)
	const lines = 100_000
	for range lines {
		tr.Command(peer, 1, c)
	}
	lost := tr.Lost()
	if lost == 0 || lost >= lines {
		t.Fatalf("%d of %d lines lost", lost, lines)
	}
	close(g.open)
	// There is room again once the first buffer is out.
	deadline := time.After(60 * time.Second)
	for before := lost; tr.Lost() == before; {
		tr.Command(peer, 1, c)
		if g.mu.Lock(); g.n > 1 {
			g.mu.Unlock()
			break
		}
		g.mu.Unlock()
		before = tr.Lost()
		select {
		case <-deadline:
			t.Fatal("no room comes back")
		default:
		}
	}
	tr.Event("last", 0)
	if err := tr.Close(); err != nil {
		t.Fatal(err)
	}
	text := g.buf.String()
	told := uint64(0)
	for _, m := range regexp.MustCompile(`(?m)^\S+ - (\d+) lines left out`).FindAllStringSubmatch(text, -1) {
		var n uint64
		fmt.Sscan(m[1], &n)
		told += n
	}
	if told != tr.Lost() {
		t.Errorf("%d lines left out, %d told", tr.Lost(), told)
	}
	if !strings.HasSuffix(text, "- last\n") {
		t.Errorf("ends with %q", text[max(0, len(text)-100):])
	}
	if g.most > BufferSize {
		t.Errorf("%d bytes at once", g.most)
	}
}

// TestClosedAndBroken: a writer that fails or hangs is told by Close, and lines that come
// later go nowhere.
func TestClosedAndBroken(t *testing.T) {
	tr := New(writerFunc(func([]byte) (int, error) { return 0, io.ErrShortWrite }))
	tr.Event("x", 0)
	if err := tr.Close(); !errors.Is(err, io.ErrShortWrite) {
		t.Errorf("close: %v", err)
	}
	tr.Event("y", 0)
	if tr.Lost() == 0 {
		t.Error("a line after Close is not counted")
	}
	stuck := make(chan struct{})
	defer close(stuck)
	tr = New(writerFunc(func([]byte) (int, error) { <-stuck; return 0, io.EOF }))
	tr.Event("x", 0)
	if err := tr.Close(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("close of one that hangs: %v", err)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

// TestLinesStayWhole under many goroutines.
func TestLinesStayWhole(t *testing.T) {
	var out bytes.Buffer
	tr := New(&out)
	var wg sync.WaitGroup
	for q := range uint16(8) {
		wg.Go(func() {
			c, e := new(protocol.Command), new(protocol.Completion)
			c.InitRW(protocol.OpRead, q, 1, 8, 8, 0)
			e.Init(q, protocol.StatusLBAOutOfRange.WithDNR())
			for range 200 {
				tr.Command(peer, 1, c)
				tr.Completion(peer, 1, e, c)
			}
		})
	}
	wg.Wait()
	if err := tr.Close(); err != nil {
		t.Fatal(err)
	}
	line := regexp.MustCompile(`^\d\d:\d\d:\d\d\.\d{6} 10\.77\.0\.1:50312 q1 (> Read cid=0x\d nsid=1 slba=8 blocks=8.*|< Completion cid=0x\d sqhd=0 status="LBA out of range.*)$`)
	n := 0
	for l := range strings.Lines(out.String()) {
		if n++; !line.MatchString(strings.TrimSuffix(l, "\n")) {
			t.Fatalf("line %d: %q", n, l)
		}
	}
	if want := 8 * 200 * 2; n != want {
		t.Errorf("%d lines, want %d", n, want)
	}
}

// BenchmarkOn is the cost of one command and its completion.
func BenchmarkOn(b *testing.B) {
	tr := New(io.Discard)
	defer tr.Close()
	c, e := new(protocol.Command), new(protocol.Completion)
	c.InitRW(protocol.OpWrite, 1, 1, 8, 8, 0)
	c.SetKeyedSGL(0x1000, 4096, 7, true)
	b.ReportAllocs()
	for b.Loop() {
		sample(tr, c, e)
	}
}
