package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"sort"
)

// Opcodes of RDMAP (RFC 5040, 4.3).
const (
	opWrite        = 0
	opReadRequest  = 1
	opReadResponse = 2
	opSend         = 3
	opSendInv      = 4
	opSendSE       = 5
	opSendSEInv    = 6
	opTerminate    = 7
)

var opNames = map[byte]string{
	opWrite: "Write", opReadRequest: "ReadRequest", opReadResponse: "ReadResponse", opSend: "Send", opSendInv: "SendInv",
	opSendSE: "SendSE", opSendSEInv: "SendSEInv", opTerminate: "Terminate",
}

// A message is one RDMAP message, or (start) one of the two MPA start-up frames.
type message struct {
	dir     int // 0 from the initiator, 1 from the responder
	pkt     int // packet that completed it
	start   bool
	op      byte
	fpdus   int
	header  []byte // start: the first 20 bytes; else ULPDU length and headers of the first FPDU
	payload []byte // start: private data; else what the FPDUs carried, joined
	stag    uint32 // tagged: sink STag; SendInv: STag to invalidate
	to      uint64
}

func (m *message) name() string {
	if m.start {
		return [2]string{"MPA Request", "MPA Reply"}[m.dir]
	}
	if n, ok := opNames[m.op]; ok {
		return n
	}
	return fmt.Sprintf("opcode %#x", m.op)
}

const startLen = 20

var startKeys = [2]string{"MPA ID Req Frame", "MPA ID Rep Frame"}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// messages takes the two streams of a connection apart (RFC 5044, 5041, 5040; no markers) and
// returns its messages in the order in which they were complete on the wire. Checks what can
// be checked of framing and sequence, and the CRC where it was agreed on.
func messages(c *conn) ([]message, error) {
	var all []message
	var crc bool
	for dir := range c.dir {
		b := c.dir[dir].data
		if len(b) == 0 {
			continue
		}
		if len(b) < startLen || string(b[:16]) != startKeys[dir] {
			return nil, fmt.Errorf("direction %d: no MPA start-up frame", dir)
		}
		n := startLen + int(binary.BigEndian.Uint16(b[18:]))
		if len(b) < n {
			return nil, fmt.Errorf("direction %d: start-up frame cut short", dir)
		}
		crc = crc || b[16]&0x40 != 0
		all = append(all, message{dir: dir, pkt: c.dir[dir].arrival(n), start: true, header: b[:startLen], payload: b[startLen:n]})
	}
	for dir := range c.dir {
		if len(c.dir[dir].data) == 0 {
			continue
		}
		ms, err := fpdus(dir, &c.dir[dir], crc)
		if err != nil {
			return nil, fmt.Errorf("direction %d: %w", dir, err)
		}
		all = append(all, ms...)
	}
	sort.SliceStable(all, func(i, j int) bool { return all[i].pkt < all[j].pkt })
	return all, nil
}

func fpdus(dir int, s *stream, crc bool) ([]message, error) {
	var ms []message
	var open [2]*message // untagged, tagged
	off := startLen + int(binary.BigEndian.Uint16(s.data[18:]))
	for off < len(s.data) {
		b := s.data[off:]
		if len(b) < 4 {
			return nil, fmt.Errorf("offset %d: FPDU cut short", off)
		}
		l := int(binary.BigEndian.Uint16(b))
		n := (2+l+3)&^3 + 4
		tagged, last, op := b[2]&0x80 != 0, b[2]&0x40 != 0, b[3]&0x0f
		hl := 20
		if tagged {
			hl = 16
		}
		if 2+l < hl || len(b) < n {
			return nil, fmt.Errorf("offset %d: FPDU of ULPDU length %d with %d bytes left", off, l, len(b))
		}
		if b[2]&0x3f != 1 || b[3]&0xf0 != 0x40 {
			return nil, fmt.Errorf("offset %d: control bytes %x", off, b[2:4])
		}
		if crc {
			if got, want := binary.LittleEndian.Uint32(b[n-4:]), crc32.Checksum(b[:n-4], castagnoli); got != want {
				return nil, fmt.Errorf("offset %d: CRC %08x instead of %08x", off, got, want)
			}
		}
		k := 0
		if tagged {
			k = 1
		}
		m := open[k]
		if m == nil {
			m = &message{dir: dir, op: op, header: b[:hl], stag: binary.BigEndian.Uint32(b[4:])}
			if tagged {
				m.to = binary.BigEndian.Uint64(b[8:])
			}
			open[k] = m
		}
		if m.op != op {
			return nil, fmt.Errorf("offset %d: opcode %d within a message of opcode %d", off, op, m.op)
		}
		if tagged {
			if to := binary.BigEndian.Uint64(b[8:]); to != m.to+uint64(len(m.payload)) || m.stag != binary.BigEndian.Uint32(b[4:]) {
				return nil, fmt.Errorf("offset %d: tagged message does not go on where it stopped", off)
			}
		} else if mo := binary.BigEndian.Uint32(b[16:]); int(mo) != len(m.payload) {
			return nil, fmt.Errorf("offset %d: message offset %d after %d bytes", off, mo, len(m.payload))
		}
		m.payload = append(m.payload, b[hl:2+l]...)
		m.fpdus++
		off += n
		if last {
			m.pkt = s.arrival(off)
			ms = append(ms, *m)
			open[k] = nil
		}
	}
	return ms, nil
}

// A readRequest is the payload of an RDMA Read Request (RFC 5040, 4.4).
type readRequest struct {
	sinkSTag uint32
	sinkTO   uint64
	size     uint32
	srcSTag  uint32
	srcTO    uint64
}

func parseReadRequest(m *message) (readRequest, error) {
	if len(m.payload) != 28 {
		return readRequest{}, fmt.Errorf("read request with %d bytes", len(m.payload))
	}
	p := bytes.Clone(m.payload)
	return readRequest{
		binary.BigEndian.Uint32(p), binary.BigEndian.Uint64(p[4:]), binary.BigEndian.Uint32(p[12:]),
		binary.BigEndian.Uint32(p[16:]), binary.BigEndian.Uint64(p[20:]),
	}, nil
}
