package main

import (
	"encoding/binary"
	"fmt"
	"strings"
)

// Sizes of the NVMe capsules.
const (
	commandLen    = 64
	completionLen = 16
)

// A record is one thing worth a golden file: a message, or the data that a command moved.
type record struct {
	name  string // file name without extension, unique
	what  string
	dir   int
	wire  string // message kind and header, as captured
	bytes []byte
}

// A command waits for its completion.
type command struct {
	label string
	key   uint32
	addr  uint64
	size  uint32
	data  []byte
	moved string // kind of message that moved data
	dir   int
}

// records names what an NVMe over RDMA connection (initiator = host) carried. The first of each
// name counts. A connection whose private data is not that of the RDMA binding yields nothing.
func records(ms []message) ([]record, error) {
	if len(ms) == 0 || !ms[0].start || len(ms[0].payload) != 4+32 {
		return nil, nil
	}
	kind := "io"
	if binary.LittleEndian.Uint16(ms[0].payload[6:]) == 0 {
		kind = "admin"
		if discovery(ms) {
			kind = "discovery"
		}
	}
	var out []record
	seen := map[string]bool{}
	put := func(m *message, name, what string, dir int, wire string, b []byte) {
		if strings.HasPrefix(name, "-") {
			return
		}
		if name = kind + "-" + name; !seen[name] {
			seen[name] = true
			if wire == "" {
				wire = fmt.Sprintf("%s, header %x", m.name(), m.header)
			}
			out = append(out, record{name, what, dir, wire, b})
		}
	}
	open := map[uint16]*command{}
	var fetches []*command // Read Requests without a response yet
	byKey := func(key uint32, addr uint64, n int) *command {
		for _, c := range open {
			if c.key == key && addr-c.addr < uint64(c.size) && uint64(n) <= uint64(c.size)-(addr-c.addr) {
				return c
			}
		}
		return nil
	}
	for i := range ms {
		m := &ms[i]
		switch {
		case m.start && m.dir == 0:
			put(m, "mpa-request", "MPA Request with IRD/ORD and the RDMA_CM request private data", 0, "", append(append([]byte{}, m.header...), m.payload...))
		case m.start:
			put(m, "mpa-reply", "MPA Reply with IRD/ORD and the RDMA_CM reply private data", 1, "", append(append([]byte{}, m.header...), m.payload...))
		case m.dir == 0 && m.op == opSend && len(m.payload) >= commandLen:
			c := newCommand(m.payload, kind != "io")
			open[binary.LittleEndian.Uint16(m.payload[2:])] = c
			put(m, c.label+"-capsule", "command capsule", 0, "", m.payload)
		case m.dir == 1 && m.op == opReadRequest:
			r, err := parseReadRequest(m)
			if err != nil {
				return nil, err
			}
			c := byKey(r.srcSTag, r.srcTO, int(r.size))
			if c == nil {
				return nil, fmt.Errorf("packet %d: a read of key %#x address %#x size %d, which no open command names", m.pkt, r.srcSTag, r.srcTO, r.size)
			}
			fetches = append(fetches, c)
			put(m, c.label+"-read-request", "RDMA Read Request for the command's data", 1, "", m.payload)
		case m.dir == 0 && m.op == opReadResponse:
			if len(fetches) == 0 {
				return nil, fmt.Errorf("packet %d: a read response nobody asked for", m.pkt)
			}
			c := fetches[0]
			fetches = fetches[1:]
			c.data, c.moved, c.dir = append(c.data, m.payload...), "RDMA Read Response", 0
		case m.dir == 1 && m.op == opWrite:
			c := byKey(m.stag, m.to, len(m.payload))
			if c == nil {
				return nil, fmt.Errorf("packet %d: a write to key %#x address %#x size %d, which no open command names", m.pkt, m.stag, m.to, len(m.payload))
			}
			if c.data == nil {
				c.data = make([]byte, c.size)
			}
			copy(c.data[m.to-c.addr:], m.payload)
			c.moved, c.dir = "RDMA Write", 1
		case m.dir == 1 && m.op >= opSend && m.op <= opSendSEInv && len(m.payload) == completionLen:
			cid := binary.LittleEndian.Uint16(m.payload[12:])
			c := open[cid]
			if c == nil {
				return nil, fmt.Errorf("packet %d: a completion for command %#x, which is not open", m.pkt, cid)
			}
			delete(open, cid)
			label := c.label
			if binary.LittleEndian.Uint16(m.payload[14:])>>1 != 0 {
				label += "-refused"
			} else if c.data != nil && kind != "io" {
				put(m, label+"-data", "data of the command", c.dir, c.moved, c.data)
			}
			put(m, label+"-completion", "completion capsule", 1, "", m.payload)
		}
	}
	return out, nil
}

// discovery tells whether the first Connect's data names the discovery subsystem.
func discovery(ms []message) bool {
	for i := range ms {
		if m := &ms[i]; m.dir == 0 && m.op == opReadResponse && !m.start && len(m.payload) == 1024 {
			const nqn = "nqn.2014-08.org.nvmexpress.discovery\x00"
			return string(m.payload[256:256+len(nqn)]) == nqn
		}
	}
	return false
}

var properties = map[uint32]string{0: "cap", 8: "vs", 0x14: "cc", 0x1c: "csts"}

var identifies = map[byte]string{0: "ns", 1: "ctrl", 2: "ns-list", 3: "ns-desc", 5: "cs-ns", 6: "cs-ctrl", 8: "cs-indep-ns"}

// newCommand reads what the name of a command needs. Opcodes mean different things on admin
// and I/O queues.
func newCommand(p []byte, admin bool) *command {
	cdw := func(n int) uint32 { return binary.LittleEndian.Uint32(p[4*n:]) }
	c := &command{addr: binary.LittleEndian.Uint64(p[24:]), size: uint32(p[32]) | uint32(p[33])<<8 | uint32(p[34])<<16, key: binary.LittleEndian.Uint32(p[35:])}
	if sglType := p[39] >> 4; sglType != 4 { // not a keyed data block: in the capsule, or none
		c.key, c.size = 0, 0
	}
	name := func(m map[byte]string, b byte) string {
		if s, ok := m[b]; ok {
			return s
		}
		return fmt.Sprintf("%02x", b)
	}
	property := func() string {
		if s, ok := properties[cdw(11)]; ok {
			return s
		}
		return fmt.Sprintf("%x", cdw(11))
	}
	io := c.size
	if io == 0 {
		io = (cdw(12)&0xffff + 1) * 512
	}
	switch p[0] {
	case 0x7f:
		switch p[4] {
		case 0:
			c.label = "property-set-" + property()
		case 1:
			c.label = "connect"
		case 4:
			c.label = "property-get-" + property()
		default:
			c.label = fmt.Sprintf("fabrics-%02x", p[4])
		}
		return c
	}
	if !admin {
		switch p[0] {
		case 0x00:
			c.label = "flush"
		case 0x01:
			c.label = sized("write", io)
		case 0x02:
			c.label = sized("read", io)
		case 0x08:
			c.label = "write-zeroes"
		case 0x09:
			c.label = "dsm"
		default:
			c.label = fmt.Sprintf("opcode-%02x", p[0])
		}
		return c
	}
	switch p[0] {
	case 0x02:
		c.label = fmt.Sprintf("get-log-%02x-%d", byte(cdw(10)), c.size)
	case 0x06:
		c.label = "identify-" + name(identifies, byte(cdw(10)))
	case 0x09:
		c.label = fmt.Sprintf("set-features-%02x", byte(cdw(10)))
	case 0x0a:
		c.label = fmt.Sprintf("get-features-%02x", byte(cdw(10)))
	case 0x0c:
		c.label = "aer"
	case 0x18:
		c.label = "keep-alive"
	default:
		c.label = fmt.Sprintf("opcode-%02x", p[0])
	}
	return c
}

// sized names a read or write by its bytes. Sizes that ../guest/capture.sh does not ask for
// come from the kernel's readahead, which nothing fixes: they get no name and no file.
func sized(name string, n uint32) string {
	switch n {
	case 512, 4096, 131072:
		return fmt.Sprintf("%s-%d", name, n)
	}
	return ""
}
