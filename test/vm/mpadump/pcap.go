package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"sort"
)

// A segment is the TCP part of one captured packet.
type segment struct {
	src, dst netip.AddrPort
	seq      uint32
	syn, fin bool
	data     []byte
}

// Link types of the pcap file format.
const (
	linkEthernet = 1
	linkRaw      = 101
	linkSLL      = 113
)

const (
	maxPacket    = 1 << 20 // more than any capture here holds in one packet
	etherIPv4    = 0x0800
	protocolTCP  = 6
	flagFIN      = 1
	flagSYN      = 2
	pcapMicros   = 0xa1b2c3d4
	pcapNanos    = 0xa1b23c4d
	pcapFileLen  = 24
	pcapEntryLen = 16
)

// readPcap returns the TCP over IPv4 segments of a pcap file (the classic format, as
// tcpdump -w writes it) in file order. A packet that was cut short is an error: what is made
// of the file must be whole.
func readPcap(r io.Reader) ([]segment, error) {
	var head [pcapFileLen]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, fmt.Errorf("pcap header: %w", err)
	}
	var order binary.ByteOrder = binary.LittleEndian
	if m := order.Uint32(head[:]); m != pcapMicros && m != pcapNanos {
		order = binary.BigEndian
		if m := order.Uint32(head[:]); m != pcapMicros && m != pcapNanos {
			return nil, fmt.Errorf("not a pcap file: it begins with %x", head[:4])
		}
	}
	link := order.Uint32(head[20:])
	var segs []segment
	for n := 1; ; n++ {
		var entry [pcapEntryLen]byte
		if _, err := io.ReadFull(r, entry[:]); err == io.EOF {
			return segs, nil
		} else if err != nil {
			return nil, fmt.Errorf("packet %d: %w", n, err)
		}
		got, full := order.Uint32(entry[8:]), order.Uint32(entry[12:])
		if got > maxPacket {
			return nil, fmt.Errorf("packet %d: length %d", n, got)
		}
		p := make([]byte, got)
		if _, err := io.ReadFull(r, p); err != nil {
			return nil, fmt.Errorf("packet %d: %w", n, err)
		}
		if got != full {
			return nil, fmt.Errorf("packet %d: only %d of %d bytes captured", n, got, full)
		}
		s, ok, err := parsePacket(link, p)
		if err != nil {
			return nil, fmt.Errorf("packet %d: %w", n, err)
		}
		if ok {
			segs = append(segs, s)
		}
	}
}

var errShort = errors.New("shorter than its headers say")

func parsePacket(link uint32, p []byte) (s segment, ok bool, err error) {
	skip, proto := 0, uint16(etherIPv4)
	switch link {
	case linkEthernet:
		skip = 14
	case linkSLL:
		skip = 16
	case linkRaw:
	default:
		return s, false, fmt.Errorf("link type %d is not known here", link)
	}
	if len(p) < skip {
		return s, false, errShort
	}
	if skip > 0 {
		proto = binary.BigEndian.Uint16(p[skip-2:])
	}
	if proto != etherIPv4 {
		return s, false, nil
	}
	ip := p[skip:]
	if len(ip) < 20 || ip[0]>>4 != 4 {
		return s, false, errShort
	}
	hl, total := int(ip[0]&15)*4, int(binary.BigEndian.Uint16(ip[2:]))
	if total == 0 { // segmentation offload of a packet above 64 KiB
		total = len(ip)
	}
	if hl < 20 || total < hl || len(ip) < total {
		return s, false, errShort
	}
	if ip[9] != protocolTCP {
		return s, false, nil
	}
	src, _ := netip.AddrFromSlice(ip[12:16])
	dst, _ := netip.AddrFromSlice(ip[16:20])
	tcp := ip[hl:total]
	if len(tcp) < 20 {
		return s, false, errShort
	}
	off := int(tcp[12]>>4) * 4
	if off < 20 || len(tcp) < off {
		return s, false, errShort
	}
	return segment{
		src:  netip.AddrPortFrom(src, binary.BigEndian.Uint16(tcp)),
		dst:  netip.AddrPortFrom(dst, binary.BigEndian.Uint16(tcp[2:])),
		seq:  binary.BigEndian.Uint32(tcp[4:]),
		syn:  tcp[13]&flagSYN != 0,
		fin:  tcp[13]&flagFIN != 0,
		data: tcp[off:],
	}, true, nil
}

// A conn is one TCP connection: the byte streams of its two directions, and for each byte the
// index of the packet that completed it, which gives messages of both directions one order.
type conn struct {
	initiator, responder netip.AddrPort
	dir                  [2]stream // 0 from the initiator, 1 from the responder
}

type stream struct {
	started bool
	next    uint32 // sequence number that follows data
	data    []byte
	marks   []mark
	early   map[uint32][]byte
}

// A mark says that the stream had grown to end bytes when packet number pkt had come.
type mark struct{ end, pkt int }

// arrival returns the number of the packet with which the stream's first n bytes were there.
func (s *stream) arrival(n int) int {
	i := sort.Search(len(s.marks), func(i int) bool { return s.marks[i].end >= n })
	if i == len(s.marks) {
		return -1
	}
	return s.marks[i].pkt
}

// add takes a segment's data in; a repeated part is dropped, an early one kept until the gap before
// it is closed by packet pkt.
func (s *stream) add(seq uint32, data []byte, pkt int) {
	if len(data) == 0 {
		return
	}
	if d := int32(seq - s.next); d > 0 {
		if old, ok := s.early[seq]; !ok || len(old) < len(data) {
			s.early[seq] = data
		}
		return
	} else if d < 0 {
		old := -int64(d) // of an int32 it would not be positive for the smallest of them
		if old >= int64(len(data)) {
			return
		}
		data = data[old:]
	}
	s.data = append(s.data, data...)
	s.next += uint32(len(data))
	s.marks = append(s.marks, mark{len(s.data), pkt})
	for again := true; again; {
		again = false
		for seq, p := range s.early {
			if int32(seq-s.next) <= 0 {
				delete(s.early, seq)
				s.add(seq, p, pkt)
				again = true
			}
		}
	}
}

// connections puts the segments together. Connections whose SYN was not captured are left out;
// one with a hole is an error.
func connections(segs []segment) ([]*conn, error) {
	type key struct{ a, b netip.AddrPort }
	open := map[key]*conn{}
	var all []*conn
	for n, s := range segs {
		c, dir := open[key{s.src, s.dst}], 0
		if c == nil {
			c, dir = open[key{s.dst, s.src}], 1
		}
		if s.syn && (c == nil || dir == 0 && c.dir[0].started && c.dir[0].next-uint32(len(c.dir[0].data)) != s.seq+1) {
			c, dir = &conn{initiator: s.src, responder: s.dst}, 0
			open[key{s.src, s.dst}] = c
			delete(open, key{s.dst, s.src})
			all = append(all, c)
		}
		if c == nil {
			continue
		}
		st := &c.dir[dir]
		if s.syn {
			if !st.started {
				*st = stream{started: true, next: s.seq + 1, early: map[uint32][]byte{}}
			}
			continue
		}
		if st.started {
			st.add(s.seq, s.data, n)
		}
	}
	for _, c := range all {
		for d := range c.dir {
			if len(c.dir[d].early) > 0 {
				return nil, fmt.Errorf("connection %s to %s: bytes are missing in the capture", c.initiator, c.responder)
			}
		}
	}
	return all, nil
}
