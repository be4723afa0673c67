// Command rping is the smallest use of the verbs engine that does everything once: it speaks the protocol of
// rdma-core's rping, as client or server, on either provider. Between it and the original the two
// implementations check each other's Sends, Reads and Writes; each end compares the data.
//
//	rping -s -a ADDR [-provider auto|verbs|iwarp] [-C count]              one connection, then it ends
//	rping -c -a ADDR [-provider auto|verbs|iwarp] [-C count] [-S size]
//
// The protocol: the client sends address, rkey and length (16 bytes, big endian) of a buffer with a
// text; the server reads it by RDMA Read and sends 16 bytes of no meaning; the client sends address, rkey
// and length of a second buffer; the server writes the text into it by RDMA Write and sends again.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/internal/provider"
	"rdblk/rdma"
	"rdblk/rdma/iwarp"
)

// patience bounds every wait for the peer.
const patience = 20 * time.Second

const (
	infoLen = 16
	maxSize = 1 << 20
	recvs   = 2 // as rping has
	bufInfo = 0 // offsets in memory: our message
	bufRecv = 64
	bufText = 4096
	bufBack = bufText + maxSize
	memSize = bufBack + maxSize
	idRecv  = 1
	idSend  = 2
	idMove  = 3
)

func main() {
	server := flag.Bool("s", false, "server")
	client := flag.Bool("c", false, "client")
	addr := flag.String("a", "", "`address` to listen on or connect to")
	port := flag.Uint("p", 7174, "port")
	count := flag.Int("C", 0, "rounds; 0: until the peer ends (server)")
	size := flag.Int("S", 64, "bytes of text (client)")
	crc := flag.Bool("crc", false, "ask for CRC (iwarp)")
	mode := flag.String("provider", provider.Auto, "RDMA `provider`: auto, verbs or iwarp")
	flag.Parse()
	ip, err := netip.ParseAddr(*addr)
	if err != nil || *server == *client || *port > 65535 || *size < 32 || *size > maxSize {
		flag.Usage()
		os.Exit(2)
	}
	at := netip.AddrPortFrom(ip, uint16(*port))
	cfg := provider.Config{Mode: *mode, Software: iwarp.Config{CRC: iwarp.CRCOff}, LockedMemory: memSize}
	if *crc {
		cfg.Software.CRC = iwarp.CRCOn
	}
	var n int
	p, err := provider.New(cfg)
	switch {
	case err != nil:
	case *server:
		n, err = serve(p, at, *count)
	default:
		n, err = ping(p, at, *count, *size)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "rping: after %d rounds: %v\n", n, err)
		os.Exit(1)
	}
	fmt.Printf("rping: %d rounds\n", n)
}

// An end is one side of a connection with its memory.
type end struct {
	cq     rdma.CQ
	qp     rdma.QP
	mr     rdma.MR
	mem    []byte
	wc     [8]rdma.WC
	got    map[uint64]int
	failed *rdma.WC // the first completion that was not a success
	conn   rdma.Conn
}

func newEnd(c rdma.Conn) (*end, error) {
	dev := c.Device()
	pd, err := dev.AllocPD()
	if err != nil {
		return nil, err
	}
	mem, err := unix.Mmap(-1, 0, memSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, err
	}
	e := &end{mem: mem, got: map[uint64]int{}, conn: c}
	if e.mr, err = pd.Register(mem, rdma.AccessLocalWrite|rdma.AccessRemoteRead|rdma.AccessRemoteWrite); err != nil {
		return nil, err
	}
	if e.cq, err = dev.CreateCQ(16); err != nil {
		return nil, err
	}
	if e.qp, err = c.CreateQP(pd, rdma.QPConfig{SendCQ: e.cq, RecvCQ: e.cq, MaxSend: 8, MaxRecv: recvs}); err != nil {
		return nil, err
	}
	for range recvs {
		if err := e.postRecv(); err != nil {
			return nil, err
		}
	}
	return e, nil
}

func (e *end) sge(off, n int) []rdma.SGE {
	return []rdma.SGE{{Addr: e.mr.Addr() + uint64(off), Len: uint32(n), LKey: e.mr.LKey()}}
}

func (e *end) postRecv() error {
	_, err := e.qp.PostRecv(rdma.RecvWR{ID: idRecv, SGL: e.sge(bufRecv, infoLen)})
	return err
}

// wait polls until a completion with this ID has come.
func (e *end) wait(id uint64) error {
	for deadline := time.Now().Add(patience); ; {
		if e.got[id] > 0 {
			e.got[id]--
			return nil
		}
		if e.failed != nil {
			select {
			case <-e.conn.Done():
			case <-time.After(time.Second):
				return fmt.Errorf("work request %d: %v on a live connection", e.failed.ID, e.failed.Status)
			}
			return fmt.Errorf("work request %d: %v: %w", e.failed.ID, e.failed.Status, e.conn.Err())
		}
		n, _, err := e.cq.Poll(e.wc[:])
		if err != nil {
			return err
		}
		for _, wc := range e.wc[:n] {
			if wc.Status != rdma.StatusSuccess {
				// A peer that has what it wants may be gone before we look: what was done counts first.
				if e.failed == nil {
					e.failed = &rdma.WC{ID: wc.ID, Status: wc.Status}
				}
				continue
			}
			if wc.ID == idRecv && wc.ByteLen != infoLen {
				return fmt.Errorf("a message of %d bytes", wc.ByteLen)
			}
			e.got[wc.ID]++
		}
		if n > 0 {
			continue
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("nothing from the peer for %v", patience)
		}
		if again, err := e.cq.Arm(); err != nil {
			return err
		} else if again {
			continue
		}
		fds := []unix.PollFd{{Fd: int32(e.cq.FD()), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, 100); err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func (e *end) post(wr rdma.SendWR) error {
	wr.Flags |= rdma.FlagSignaled
	if _, err := e.qp.PostSend(wr); err != nil {
		return err
	}
	return e.wait(wr.ID)
}

func (e *end) send() error {
	return e.post(rdma.SendWR{ID: idSend, Op: rdma.OpSend, SGL: e.sge(bufInfo, infoLen)})
}

// advertise sends address, key and length of a buffer and waits for the answer.
func (e *end) advertise(off, n int) error {
	binary.BigEndian.PutUint64(e.mem[bufInfo:], e.mr.Addr()+uint64(off))
	binary.BigEndian.PutUint32(e.mem[bufInfo+8:], e.mr.RKey())
	binary.BigEndian.PutUint32(e.mem[bufInfo+12:], uint32(n))
	if err := e.send(); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	if err := e.wait(idRecv); err != nil {
		return fmt.Errorf("wait for the answer: %w", err)
	}
	return e.postRecv()
}

// advertisement waits for one from the client.
func (e *end) advertisement() (addr uint64, key uint32, n int, err error) {
	if err := e.wait(idRecv); err != nil {
		return 0, 0, 0, err
	}
	m := e.mem[bufRecv:]
	addr, key, n = binary.BigEndian.Uint64(m), binary.BigEndian.Uint32(m[8:]), int(binary.BigEndian.Uint32(m[12:]))
	if n < 1 || n > maxSize {
		return 0, 0, 0, fmt.Errorf("the peer offers %d bytes", n)
	}
	return addr, key, n, e.postRecv()
}

// text is what rping sends in round i: a line number, then the printable characters from i on.
func text(b []byte, i int) {
	n := copy(b, fmt.Sprintf("rdma-ping-%d: ", i))
	for c := 65 + i%58; n < len(b)-1; n++ {
		b[n] = byte(c)
		if c++; c > 122 {
			c = 65
		}
	}
	b[len(b)-1] = 0
}

func ping(p rdma.Provider, to netip.AddrPort, count, size int) (done int, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := p.Dial(ctx, netip.Addr{}, to)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	e, err := newEnd(c)
	if err != nil {
		return 0, err
	}
	defer e.qp.Close()
	if _, err := c.Connect(ctx, rdma.ConnParam{ResponderResources: 1, InitiatorDepth: 1}); err != nil {
		return 0, err
	}
	out, back := e.mem[bufText:bufText+size], e.mem[bufBack:bufBack+size]
	for ; done < count; done++ {
		text(out, done)
		clear(back)
		if err := e.advertise(bufText, size); err != nil {
			return done, err
		}
		if err := e.advertise(bufBack, size); err != nil {
			return done, err
		}
		if !bytes.Equal(out, back) {
			return done, fmt.Errorf("the text came back different: %q", back)
		}
	}
	return done, c.Disconnect()
}

func serve(p rdma.Provider, at netip.AddrPort, count int) (done int, err error) {
	l, err := p.Listen(at, rdma.ListenConfig{})
	if err != nil {
		return 0, err
	}
	defer l.Close()
	fmt.Println("rping: listening on", l.Addr())
	c, err := l.Accept()
	if err != nil {
		return 0, err
	}
	defer c.Close()
	e, err := newEnd(c)
	if err != nil {
		return 0, err
	}
	defer e.qp.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if _, err := c.Accept(ctx, rdma.ConnParam{ResponderResources: 1, InitiatorDepth: 1}); err != nil {
		return 0, err
	}
	for {
		addr, key, n, err := e.advertisement()
		if err != nil {
			if done > 0 && done >= count && c.Err() != nil {
				return done, nil // a client that has had its rounds may go as it likes
			}
			return done, err
		}
		if err := e.post(rdma.SendWR{ID: idMove, Op: rdma.OpRead, SGL: e.sge(bufText, n), RemoteAddr: addr, RKey: key}); err != nil {
			return done, fmt.Errorf("read: %w", err)
		}
		if head := fmt.Sprintf("rdma-ping-%d: ", done); !bytes.HasPrefix(e.mem[bufText:], []byte(head)) {
			return done, fmt.Errorf("read %q, which does not begin with %q", e.mem[bufText:bufText+min(n, 64)], head)
		}
		if err := e.send(); err != nil {
			return done, fmt.Errorf("send: %w", err)
		}
		if addr, key, n, err = e.advertisement(); err != nil {
			return done, err
		}
		// rping writes the text as a string; with all of it the client can compare the whole.
		if err := e.post(rdma.SendWR{ID: idMove, Op: rdma.OpWrite, SGL: e.sge(bufText, n), RemoteAddr: addr, RKey: key}); err != nil {
			return done, fmt.Errorf("write: %w", err)
		}
		if err := e.send(); err != nil {
			return done, fmt.Errorf("send: %w", err)
		}
		done++
	}
}
