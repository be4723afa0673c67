package iwarp

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"

	"rdblk/rdma"
)

// Terminate message (RFC 5040 section 4.8). Payload offsets:
//
//	0 layer and error type  1 code  2 header control  3 reserved
//	4 DDP segment length (2 bytes)  6 DDP header (14 or 18 bytes)  then the Read Request
const (
	termControl = 4

	termHdrLen  = 0x80 // M: DDP segment length valid
	termHdrDDP  = 0x40 // D: DDP header included
	termHdrRead = 0x20 // R: Read Request header included

	termMaxPayload = termControl + 2 + untaggedULPDU + readReqPayload
)

// termCode is layer, error type and code of a Terminate message; 0 is none.
type termCode uint32

const termSet termCode = 1 << 24

func newTermCode(layer, etype, code uint8) termCode {
	return termSet | termCode(layer)<<16 | termCode(etype)<<8 | termCode(code)
}

func (c termCode) layer() uint8 { return uint8(c >> 16) }
func (c termCode) etype() uint8 { return uint8(c >> 8) }
func (c termCode) code() uint8  { return uint8(c) }

// The codes that this receiver sends.
const (
	termLocal = termSet // RDMAP local catastrophic

	// RDMAP remote protection
	termReadSTag     = termSet | 0x000100
	termReadBounds   = termSet | 0x000101
	termAccess       = termSet | 0x000102
	termReadNotAssoc = termSet | 0x000103
	termReadWrap     = termSet | 0x000104
	termInvProtected = termSet | 0x000109
	// RDMAP remote operation
	termRDMAPVersion = termSet | 0x000205
	termOpcode       = termSet | 0x000206
	termStream       = termSet | 0x000207
	termInvUnknown   = termSet | 0x000209
	// DDP local catastrophic
	termDDPLocal = termSet | 0x010000
	// DDP tagged buffer
	termSTag          = termSet | 0x010100
	termBounds        = termSet | 0x010101
	termNotAssoc      = termSet | 0x010102
	termWrap          = termSet | 0x010103
	termTaggedVersion = termSet | 0x010104
	// DDP untagged buffer
	termQN              = termSet | 0x010201
	termNoBuffer        = termSet | 0x010202
	termMSN             = termSet | 0x010203
	termMO              = termSet | 0x010204
	termTooLong         = termSet | 0x010205
	termUntaggedVersion = termSet | 0x010206
	// MPA
	termCRC    = termSet | 0x020002
	termLength = termSet | 0x020003
	termIRD    = termSet | 0x020006
	termRTR    = termSet | 0x020007
)

// headers tells which headers of the offending segment go into the message.
func (c termCode) headers(read bool) uint8 {
	switch {
	case c == termRDMAPVersion || c == termOpcode || c == termTaggedVersion || c == termUntaggedVersion ||
		c.layer() == 2 || c.etype() == 0:
		return 0
	case read && c.layer() == 0 && c.etype() == 1:
		return termHdrLen | termHdrDDP | termHdrRead
	}
	return termHdrLen | termHdrDDP
}

// appendTerminate appends the FPDU of a Terminate message. seg is the beginning
// of the offending FPDU, or nil.
func appendTerminate(b []byte, c termCode, seg []byte, withCRC bool) []byte {
	start := len(b)
	var pay [termMaxPayload]byte
	p := append(pay[:0], c.layer()<<4|c.etype(), c.code(), 0, 0)
	if len(seg) >= 4 {
		tagged := seg[2]&ddpTagged != 0
		read := !tagged && seg[3]&rdmapOpMask == opReadReq
		h := untaggedHeader
		if tagged {
			h = taggedHeader
		}
		hc := c.headers(read && len(seg) >= readReqHeader)
		if hc&termHdrDDP != 0 && len(seg) >= h {
			p[2] = hc
			p = append(p, seg[0], seg[1])
			p = append(p, seg[fpduLenSize:h]...)
			if hc&termHdrRead != 0 {
				p = append(p, seg[h:readReqHeader]...)
			}
		}
	}
	var hdr [untaggedHeader]byte
	putUntagged(hdr[:], opTerminate, true, len(p), 0, qnTerminate, 1, 0)
	b = append(b, hdr[:]...)
	b = append(b, p...)
	b = append(b, make([]byte, padLen(untaggedULPDU+len(p)))...)
	return appendCRC(b, start, withCRC)
}

// TerminateError says that a connection ended with a Terminate message, which
// this side sent (the peer broke the protocol or touched what is not its own) or
// received.
type TerminateError struct {
	Sent              bool
	Layer, Type, Code uint8
	// Raw is the control word as received; siw fills it in an order of its own.
	Raw [4]byte
	// Detail says what the receiver objected to, if this side did.
	Detail string

	read *readRequest // quoted Read Request of a received message
	msn  uint32
}

func (e *TerminateError) Error() string {
	verb := "peer terminated the connection"
	if e.Sent {
		verb = "connection terminated"
	}
	s := fmt.Sprintf("%s: %s", verb, termText(e.Layer, e.Type, e.Code))
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	if !e.Sent {
		s += fmt.Sprintf(" (control word %x)", e.Raw[:])
	}
	return s
}

// Is makes a Terminate match rdma.ErrProtocol.
func (e *TerminateError) Is(target error) bool { return target == rdma.ErrProtocol }

// termNames are the errors that RFC 5040, 5041 and 5044 define, by layer, type and code.
var termNames = map[[3]uint8]string{
	{0, 1, 0}: "invalid STag of a Read or Atomic", {0, 1, 1}: "base or bounds violation", {0, 1, 2}: "access rights violation",
	{0, 1, 3}: "STag not associated with this connection", {0, 1, 4}: "tagged offset wraps", {0, 1, 9}: "STag cannot be invalidated",
	{0, 2, 5}: "invalid RDMAP version", {0, 2, 6}: "unexpected opcode", {0, 2, 7}: "catastrophic error of the stream",
	{0, 2, 8}: "catastrophic error", {0, 2, 9}: "STag cannot be invalidated",
	{1, 1, 0}: "invalid STag", {1, 1, 1}: "base or bounds violation", {1, 1, 2}: "STag not associated with this connection",
	{1, 1, 3}: "tagged offset wraps", {1, 1, 4}: "invalid DDP version",
	{1, 2, 1}: "invalid queue number", {1, 2, 2}: "no receive buffer posted", {1, 2, 3}: "message sequence number out of range",
	{1, 2, 4}: "invalid message offset", {1, 2, 5}: "message too long for the receive buffer", {1, 2, 6}: "invalid DDP version",
	{2, 0, 1}: "TCP connection lost", {2, 0, 2}: "CRC error", {2, 0, 3}: "invalid FPDU length", {2, 0, 4}: "invalid MPA start-up frame",
	{2, 0, 5}: "local catastrophic error", {2, 0, 6}: "insufficient inbound read depth", {2, 0, 7}: "no common ready-to-receive message",
}

// TerminateCodes lists the errors that a Terminate message can name, as layer, type and
// code, in order.
func TerminateCodes() [][3]uint8 {
	return slices.SortedFunc(maps.Keys(termNames), func(a, b [3]uint8) int { return slices.Compare(a[:], b[:]) })
}

func termText(layer, etype, code uint8) string {
	l := [...]string{"RDMAP", "DDP", "MPA"}
	name, ok := termNames[[3]uint8{layer, etype, code}]
	if !ok {
		name = "unspecified error"
		if etype == 0 && layer < 2 {
			name = "local catastrophic error"
		}
	}
	if int(layer) < len(l) {
		return fmt.Sprintf("%s %s (%d/%d/%#02x)", l[layer], name, layer, etype, code)
	}
	return fmt.Sprintf("%s (%d/%d/%#02x)", name, layer, etype, code)
}

// parseTerminate reads the payload of a Terminate message. It takes the form of
// RFC 5040 and the one that siw sends on little-endian hosts: nibbles of the
// first byte swapped, header control bits from bit 0 upward.
func parseTerminate(p []byte) *TerminateError {
	if len(p) < termControl {
		return nil
	}
	e := &TerminateError{Layer: p[0] >> 4, Type: p[0] & 0x0F, Code: p[1], Raw: [4]byte(p[:4])}
	hc := p[2] & (termHdrLen | termHdrDDP | termHdrRead)
	swapped := false
	if hc == 0 && p[2]&0x07 != 0 {
		swapped = true
		hc = p[2]&1<<7 | p[2]&2<<5 | p[2]&4<<3
	} else if hc == 0 {
		// Without headers both forms look alike. Only one reading may make sense.
		swapped = !plausible(e.Layer, e.Type, e.Code) && plausible(e.Type, e.Layer, e.Code)
	}
	if swapped {
		e.Layer, e.Type = e.Type, e.Layer
	}
	if hc&termHdrDDP == 0 {
		return e
	}
	p = p[termControl:]
	if len(p) < 2+2 {
		return e
	}
	p = p[2:] // segment length: senders disagree on its meaning
	if p[0]&ddpTagged != 0 || len(p) < untaggedULPDU {
		return e
	}
	e.msn = binary.BigEndian.Uint32(p[10:])
	p = p[untaggedULPDU:]
	if hc&termHdrRead != 0 && len(p) >= readReqPayload {
		e.read = new(readRequest)
		e.read.get(p)
	}
	return e
}

// plausible tells whether the three fields name something in the code tables.
func plausible(layer, etype, code uint8) bool {
	switch layer {
	case 0:
		return etype == 0 || etype == 1 && (code <= 4 || code == 9 || code == 0xFF) || etype == 2 && (code >= 5 && code <= 9 || code == 0xFF)
	case 1:
		return etype == 0 || etype == 1 && code <= 4 || etype == 2 && code >= 1 && code <= 6
	case 2:
		return etype == 0 && code >= 1 && code <= 7
	}
	return false
}
