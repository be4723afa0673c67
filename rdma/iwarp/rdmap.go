package iwarp

import "encoding/binary"

// RDMAP control byte and opcodes (RFC 5040 section 4.1).
const (
	rdmapVersion = 0x40
	rdmapVerMask = 0xC0
	rdmapOpMask  = 0x0F

	opWrite     = 0x0
	opReadReq   = 0x1
	opReadResp  = 0x2
	opSend      = 0x3
	opSendInv   = 0x4
	opSendSE    = 0x5
	opSendSEInv = 0x6
	opTerminate = 0x7
)

const (
	readReqPayload = 28
	readReqHeader  = untaggedHeader + readReqPayload // with the length field
	readReqULPDU   = readReqHeader - fpduLenSize
)

// opInfo is what the receiver knows of an opcode before it looks at the rest.
type opInfo struct {
	known    bool
	tagged   bool
	qn       uint32
	minULPDU int // shortest legal ULPDU_Length
	header   int // bytes to have before the segment can be checked, with the length field
}

var opTable = [16]opInfo{
	opWrite:     {true, true, 0, taggedULPDU, taggedHeader},
	opReadReq:   {true, false, qnRead, readReqULPDU, readReqHeader},
	opReadResp:  {true, true, 0, taggedULPDU, taggedHeader},
	opSend:      {true, false, qnSend, untaggedULPDU, untaggedHeader},
	opSendInv:   {true, false, qnSend, untaggedULPDU, untaggedHeader},
	opSendSE:    {true, false, qnSend, untaggedULPDU, untaggedHeader},
	opSendSEInv: {true, false, qnSend, untaggedULPDU, untaggedHeader},
	opTerminate: {true, false, qnTerminate, untaggedULPDU + termControl, untaggedHeader + termControl},
	// Immediate data and atomics (RFC 7306) are unknown here; the length of an
	// unknown opcode is judged by the T bit.
}

// lookupOp gives the rules for a segment's two control bytes.
func lookupOp(ddp, rdmap uint8) opInfo {
	o := opTable[rdmap&rdmapOpMask]
	if !o.known {
		if ddp&ddpTagged != 0 {
			return opInfo{tagged: true, minULPDU: taggedULPDU, header: taggedHeader}
		}
		return opInfo{minULPDU: untaggedULPDU, header: untaggedHeader}
	}
	return o
}

// readRequest is the payload of a Read Request (RFC 5040 section 4.4).
type readRequest struct {
	sinkSTag uint32
	sinkTO   uint64
	size     uint32
	srcSTag  uint32
	srcTO    uint64
}

func (r *readRequest) put(b []byte) {
	_ = b[readReqPayload-1]
	binary.BigEndian.PutUint32(b, r.sinkSTag)
	binary.BigEndian.PutUint64(b[4:], r.sinkTO)
	binary.BigEndian.PutUint32(b[12:], r.size)
	binary.BigEndian.PutUint32(b[16:], r.srcSTag)
	binary.BigEndian.PutUint64(b[20:], r.srcTO)
}

func (r *readRequest) get(b []byte) {
	_ = b[readReqPayload-1]
	r.sinkSTag = binary.BigEndian.Uint32(b)
	r.sinkTO = binary.BigEndian.Uint64(b[4:])
	r.size = binary.BigEndian.Uint32(b[12:])
	r.srcSTag = binary.BigEndian.Uint32(b[16:])
	r.srcTO = binary.BigEndian.Uint64(b[20:])
}
