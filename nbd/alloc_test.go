package nbd

import (
	"encoding/binary"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"rdblk/nbd/nbdtest"
)

// rawPeer is a client that itself allocates nothing, so that what AllocsPerRun
// counts is the server's.
type rawPeer struct {
	t    testing.TB
	fd   int
	send []byte
	recv []byte
}

func newRawPeer(t testing.TB, c *nbdtest.Client, requests [][]byte, replyBytes int) *rawPeer {
	fd, err := takeDescriptor(c.Conn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.SetNonblock(fd, false); err != nil {
		t.Fatal(err)
	}
	p := &rawPeer{t: t, fd: fd, recv: make([]byte, replyBytes)}
	for _, r := range requests {
		p.send = append(p.send, r...)
	}
	return p
}

// round sends all requests and takes all replies.
func (p *rawPeer) round() {
	for b := p.send; len(b) > 0; {
		n, err := unix.Write(p.fd, b)
		if err != nil {
			p.t.Fatal(err)
		}
		b = b[n:]
	}
	for b := p.recv; len(b) > 0; {
		n, err := unix.Read(p.fd, b)
		if err != nil || n == 0 {
			p.t.Fatal(n, err)
		}
		b = b[n:]
	}
}

// TestNoAllocations: a 4 KiB read, a 4 KiB write and a flush cost no allocation,
// alone and in a batch, with both kinds of replies.
func TestNoAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	both(t, func(t *testing.T, structured bool) {
		s := serve(t, tryMemDevice{newMemDevice(1 << 20)})
		readReply := simpleReplySize + 4096
		if structured {
			readReply = structuredReplySize + 8 + 4096
		}
		read := nbdtest.Header(0, nbdtest.CmdRead, 1, 8192, 4096)
		write := append(nbdtest.Header(0, nbdtest.CmdWrite, 2, 8192, 4096), make([]byte, 4096)...)
		big := append(nbdtest.Header(0, nbdtest.CmdWrite, 2, 0, 65536), make([]byte, 65536)...)
		invalid := append(nbdtest.Header(0, nbdtest.CmdWrite, 2, 1, 4096), make([]byte, 4096)...)
		invalidReply := simpleReplySize
		if structured {
			invalidReply = structuredReplySize + 6 + len(whyAlign)
		}
		for _, c := range []struct {
			name     string
			requests [][]byte
			reply    int
		}{
			{"read", [][]byte{read}, readReply},
			{"write", [][]byte{write}, simpleReplySize},
			{"write 64 KiB", [][]byte{big}, simpleReplySize},
			{"refused write", [][]byte{invalid}, invalidReply},
			{"batch", [][]byte{read, write, read, write, read, read, write, write}, 4*readReply + 4*simpleReplySize},
		} {
			cl := s.open(t, structured)
			p := newRawPeer(t, cl, c.requests, c.reply)
			for range 10 {
				p.round()
			}
			if n := testing.AllocsPerRun(200, p.round); n != 0 {
				t.Errorf("%s: %v allocations", c.name, n)
			}
			cl.Close()
		}
	})
}

func benchmark(b *testing.B, depth int, request []byte, reply int) {
	s := serve(b, tryMemDevice{newMemDevice(64 << 20)})
	c := s.open(b, true)
	c.SetDeadline(time.Time{})
	var l [][]byte
	for range depth {
		l = append(l, request)
	}
	p := newRawPeer(b, c, l, depth*reply)
	b.SetBytes(int64(depth * binaryLength(request)))
	b.ReportAllocs()
	for b.Loop() {
		p.round()
	}
	b.ReportMetric(float64(b.N*depth)/b.Elapsed().Seconds(), "IOPS")
}

func binaryLength(header []byte) int { return int(binary.BigEndian.Uint32(header[24:])) }

func BenchmarkRead4k(b *testing.B) {
	benchmark(b, 1, nbdtest.Header(0, nbdtest.CmdRead, 1, 8192, 4096), structuredReplySize+8+4096)
}

func BenchmarkRead4kDepth32(b *testing.B) {
	benchmark(b, 32, nbdtest.Header(0, nbdtest.CmdRead, 1, 8192, 4096), structuredReplySize+8+4096)
}

func BenchmarkWrite4k(b *testing.B) {
	benchmark(b, 1, append(nbdtest.Header(0, nbdtest.CmdWrite, 1, 8192, 4096), make([]byte, 4096)...), simpleReplySize)
}

func BenchmarkWrite128k(b *testing.B) {
	benchmark(b, 4, append(nbdtest.Header(0, nbdtest.CmdWrite, 1, 0, 128<<10), make([]byte, 128<<10)...), simpleReplySize)
}

func BenchmarkRead128k(b *testing.B) {
	benchmark(b, 4, nbdtest.Header(0, nbdtest.CmdRead, 1, 0, 128<<10), structuredReplySize+8+128<<10)
}
