package iwarp

import "encoding/binary"

// DDP headers (RFC 5041 section 4). Offsets count from the FPDU's length field.
//
//	tagged:    0 length  2 control  3 RDMAP control  4 STag      8 TO               16 payload
//	untagged:  0 length  2 control  3 RDMAP control  4 RsvdULP   8 QN  12 MSN  16 MO  20 payload
const (
	ddpTagged  = 0x80
	ddpLast    = 0x40
	ddpVersion = 0x01
	ddpVerMask = 0x03

	taggedHeader   = 16
	untaggedHeader = 20
	taggedULPDU    = taggedHeader - fpduLenSize   // ULPDU_Length of an empty tagged segment
	untaggedULPDU  = untaggedHeader - fpduLenSize // of an empty untagged one
)

// Queue numbers of untagged messages (RFC 5040 section 4.2).
const (
	qnSend      = 0
	qnRead      = 1
	qnTerminate = 2
)

// putTagged writes the header of a tagged segment with n bytes of payload.
func putTagged(b []byte, op uint8, last bool, n int, stag uint32, to uint64) {
	_ = b[taggedHeader-1]
	c := uint8(ddpTagged | ddpVersion)
	if last {
		c |= ddpLast
	}
	binary.BigEndian.PutUint16(b, uint16(taggedULPDU+n))
	b[2], b[3] = c, rdmapVersion|op
	binary.BigEndian.PutUint32(b[4:], stag)
	binary.BigEndian.PutUint64(b[8:], to)
}

// putUntagged writes the header of an untagged segment with n bytes of payload.
func putUntagged(b []byte, op uint8, last bool, n int, inv, qn, msn, mo uint32) {
	_ = b[untaggedHeader-1]
	c := uint8(ddpVersion)
	if last {
		c |= ddpLast
	}
	binary.BigEndian.PutUint16(b, uint16(untaggedULPDU+n))
	b[2], b[3] = c, rdmapVersion|op
	binary.BigEndian.PutUint32(b[4:], inv)
	binary.BigEndian.PutUint32(b[8:], qn)
	binary.BigEndian.PutUint32(b[12:], msn)
	binary.BigEndian.PutUint32(b[16:], mo)
}
