package iwarp

import (
	"encoding/binary"
	"encoding/hex"
	"hash/crc32"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/rdma"
	"rdblk/rdma/rdmatest"
)

var loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// hexBytes reads the notation of the tables: hexadecimal with spaces.
func hexBytes(s string) []byte {
	b, err := hex.DecodeString(strings.NewReplacer(" ", "", "\n", "", "\t", "").Replace(s))
	if err != nil {
		panic(err)
	}
	return b
}

func newProvider(t testing.TB, cfg Config) *Provider {
	t.Helper()
	p, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// rig is a QP in RTS whose peer is the test: peer is the other end of its
// socket. Fixed keys and addresses make its bytes reproducible.
type rig struct {
	t    testing.TB
	dev  *device
	side *rdmatest.Side
	q    *qp
	peer int
	wc   []rdma.WC // polled so far
	out  []byte    // received by the peer and not taken
}

const (
	rigSTag = 0xA1B2C300        // whole memory, all rights
	rigBase = 0x7F0000001000    // where the peer sees it
	rigMem  = 256 << 10         // its size
	rigRO   = 0xA1B2C400        // first page, remote read only
	rigWO   = 0xA1B2C500        // first page, remote write only
	rigHigh = 0xA1B2C600        // all rights, at the very top of the address space
	rigTop  = ^uint64(0) - 8191 // where that begins: two pages
	rigPD2  = 0xA1B2C700        // all rights, in another domain
)

// newRig makes a rig on a socket pair; connected sockets of any kind will do.
func newRig(t testing.TB, a agreed) *rig {
	t.Helper()
	return newRigOn(t, newProvider(t, Config{CloseLinger: 50 * time.Millisecond}).dev, a)
}

func newRigOn(t testing.TB, dev *device, a agreed) *rig {
	t.Helper()
	sp, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, peer: sp[1], dev: dev}
	r.side = rdmatest.NewSide(t, "rig", r.dev, 256, rigMem)
	c := newConn(r.dev, netip.AddrPort{}, netip.AddrPort{})
	p := r.side.PD.(*pd)
	q, err := newQP(c, p, rdma.QPConfig{SendCQ: r.side.CQ, RecvCQ: r.side.CQ, MaxSend: 32, MaxRecv: 32, MaxSendSGE: 4, MaxRecvSGE: 4, MaxInline: 64})
	if err != nil {
		t.Fatal(err)
	}
	r.q = q
	c.state, c.qp = connEstablished, q
	reg := func(stag uint32, dom *pd, base uint64, mem []byte, access rdma.Access) {
		r.dev.tags.place(stag, &stagEntry{mr: &region{pd: dom, stag: stag, access: access, base: base, mem: mem}})
	}
	other := &pd{dev: r.dev}
	reg(rigSTag, p, rigBase, r.side.Mem, rdmatest.AllAccess)
	reg(rigRO, p, rigBase, r.side.Mem[:4096], rdma.AccessLocalWrite|rdma.AccessRemoteRead)
	reg(rigWO, p, rigBase, r.side.Mem[:4096], rdma.AccessLocalWrite|rdma.AccessRemoteWrite)
	reg(rigHigh, p, rigTop, r.side.Mem[240<<10:248<<10], rdmatest.AllAccess)
	reg(rigPD2, other, rigBase, r.side.Mem, rdmatest.AllAccess)
	q.start(sp[0], a)
	t.Cleanup(r.close)
	return r
}

// place puts an entry where a test wants it.
func (t *stagTable) place(stag uint32, e *stagEntry) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := &t.root[stag>>(8+leafBits)]
	if p.Load() == nil {
		p.Store(new(stagLeaf))
	}
	l := p.Load()
	l.slots[stag>>8&(leafSize-1)].Store(e)
	l.used++
	t.count++
}

func (r *rig) close() {
	if r.peer >= 0 {
		unix.Close(r.peer)
		r.peer = -1
	}
	r.q.Close()
	r.side.Close(r.t)
}

// recv posts a receive of n bytes at off.
func (r *rig) recv(id uint64, off, n int) {
	r.t.Helper()
	if _, err := r.q.PostRecv(rdma.RecvWR{ID: id, SGL: []rdma.SGE{r.side.SGE(off, n)}}); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) send(wrs ...rdma.SendWR) {
	r.t.Helper()
	if _, err := r.q.PostSend(wrs...); err != nil {
		r.t.Fatal(err)
	}
}

// poll polls until nothing moves, and collects what the peer gets.
func (r *rig) poll() {
	r.t.Helper()
	var wc [32]rdma.WC
	for {
		n, busy, err := r.side.CQ.Poll(wc[:])
		if err != nil {
			r.t.Fatal(err)
		}
		r.wc = append(r.wc, wc[:n]...)
		r.drain()
		if n == 0 && !busy {
			return
		}
	}
}

func (r *rig) drain() {
	var buf [65536]byte
	for r.peer >= 0 {
		n, e := sysRecv(r.peer, buf[:])
		if e != 0 || n <= 0 {
			return
		}
		r.out = append(r.out, buf[:n]...)
	}
}

// feed gives bytes to the QP, chunk at a time, polling after each.
func (r *rig) feed(b []byte, chunk int) {
	r.t.Helper()
	for len(b) > 0 && r.q.state == stateRTS {
		n, e := sysSendBytes(r.peer, b[:min(chunk, len(b))])
		if e != 0 && e != unix.EAGAIN {
			return
		}
		if n > 0 {
			b = b[n:]
		}
		r.poll()
	}
}

// take returns and forgets what the peer has got.
func (r *rig) take() []byte {
	b := r.out
	r.out = nil
	return b
}

// taken completions
func (r *rig) done() []rdma.WC {
	l := r.wc
	r.wc = nil
	return l
}

// err is the reason of the connection's end, or nil.
func (r *rig) err() error { return r.q.conn.Err() }

// fpdu makes an FPDU of a DDP segment, with a good CRC.
func fpdu(seg ...[]byte) []byte {
	b := []byte{0, 0}
	for _, s := range seg {
		b = append(b, s...)
	}
	l := len(b) - 2
	binary.BigEndian.PutUint16(b, uint16(l))
	b = append(b, make([]byte, padLen(l))...)
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// tagged and untagged make segments; last sets the L bit.
func tagged(op uint8, last bool, stag uint32, to uint64, payload []byte) []byte {
	b := make([]byte, taggedHeader, taggedHeader+len(payload))
	putTagged(b, op, last, len(payload), stag, to)
	return fpdu(b[2:], payload)
}

func untagged(op uint8, last bool, inv, qn, msn, mo uint32, payload []byte) []byte {
	b := make([]byte, untaggedHeader, untaggedHeader+len(payload))
	putUntagged(b, op, last, len(payload), inv, qn, msn, mo)
	return fpdu(b[2:], payload)
}

func readReq(msn uint32, r readRequest) []byte {
	var p [readReqPayload]byte
	r.put(p[:])
	return untagged(opReadReq, true, 0, qnRead, msn, 0, p[:])
}

// terminateOf finds the Terminate in what a peer has got, or 0.
func terminateOf(t testing.TB, b []byte) (termCode, []byte) {
	t.Helper()
	for len(b) >= 8 {
		n := fpduLen(be16(b))
		if n > len(b) {
			break
		}
		if b[3]&rdmapOpMask == opTerminate {
			e := parseTerminate(b[untaggedHeader : 2+be16(b)])
			if e == nil || be32(b[8:]) != qnTerminate || be32(b[12:]) != 1 || be32(b[16:]) != 0 || n != len(b) {
				t.Fatalf("Terminate not well formed: %x", b)
			}
			return newTermCode(e.Layer, e.Type, e.Code), b[:n]
		}
		b = b[n:]
	}
	return 0, nil
}

// finish closes the peer's side and returns the reason of the end.
func (r *rig) finish() error {
	r.t.Helper()
	unix.Shutdown(r.peer, unix.SHUT_WR)
	r.poll()
	return r.err()
}

const syscallReset = unix.ECONNRESET
