package nbd

import (
	"encoding/binary"
	"fmt"

	"github.com/pojntfx/go-nbd/pkg/protocol"
)

// Names are those of proto.md without the NBD_ prefix. Everything on the wire is
// big-endian. Values that go-nbd defines are taken from there; it lacks many.

// Handshake: magic numbers and flags ("Newstyle negotiation", "Handshake flags", "Client flags").
const (
	magicInit        = protocol.NEGOTIATION_MAGIC_OLDSTYLE // "NBDMAGIC"
	magicOption      = protocol.NEGOTIATION_MAGIC_OPTION   // "IHAVEOPT"
	magicOptionReply = protocol.NEGOTIATION_MAGIC_REPLY

	flagFixedNewstyle = protocol.NEGOTIATION_HANDSHAKE_FLAG_FIXED_NEWSTYLE
	flagNoZeroes      = uint16(1 << 1)

	flagCFixedNewstyle = uint32(flagFixedNewstyle)
	flagCNoZeroes      = uint32(flagNoZeroes)
)

// Option types.
const (
	optExportName      = uint32(1)
	optAbort           = protocol.NEGOTIATION_ID_OPTION_ABORT
	optList            = protocol.NEGOTIATION_ID_OPTION_LIST
	optStartTLS        = uint32(5)
	optInfo            = protocol.NEGOTIATION_ID_OPTION_INFO
	optGo              = protocol.NEGOTIATION_ID_OPTION_GO
	optStructuredReply = uint32(8)
)

// Option reply types.
const (
	repAck         = protocol.NEGOTIATION_TYPE_REPLY_ACK
	repServer      = protocol.NEGOTIATION_TYPE_REPLY_SERVER
	repInfo        = protocol.NEGOTIATION_TYPE_REPLY_INFO
	repErrUnsup    = protocol.NEGOTIATION_TYPE_REPLY_ERR_UNSUPPORTED
	repErrPolicy   = uint32(2 | 1<<31)
	repErrInvalid  = uint32(3 | 1<<31)
	repErrUnknown  = protocol.NEGOTIATION_TYPE_REPLY_ERR_UNKNOWN
	repErrShutdown = uint32(7 | 1<<31)
	repErrTooBig   = uint32(9 | 1<<31)
)

// Information types.
const (
	infoExport      = protocol.NEGOTIATION_TYPE_INFO_EXPORT
	infoName        = protocol.NEGOTIATION_TYPE_INFO_NAME
	infoDescription = protocol.NEGOTIATION_TYPE_INFO_DESCRIPTION
	infoBlockSize   = protocol.NEGOTIATION_TYPE_INFO_BLOCKSIZE
)

// maxString is the longest string that the protocol allows, in bytes.
const maxString = 4096

// Transmission flags: what an export offers.
const (
	flagHasFlags        = protocol.NEGOTIATION_REPLY_FLAGS_HAS_FLAGS
	flagReadOnly        = uint16(1 << 1)
	flagSendFlush       = uint16(1 << 2)
	flagSendFUA         = uint16(1 << 3)
	flagRotational      = uint16(1 << 4)
	flagSendTrim        = uint16(1 << 5)
	flagSendWriteZeroes = uint16(1 << 6)
	flagSendDF          = uint16(1 << 7)
	flagCanMultiConn    = protocol.NEGOTIATION_REPLY_FLAGS_CAN_MULTI_CONN
)

// Transmission: magic numbers and sizes.
const (
	magicRequest    = protocol.TRANSMISSION_MAGIC_REQUEST
	magicSimple     = protocol.TRANSMISSION_MAGIC_REPLY
	magicStructured = uint32(0x668e33ef)

	requestSize         = 28 // magic, flags, type, cookie, offset, length
	simpleReplySize     = 16 // magic, error, cookie
	structuredReplySize = 20 // magic, flags, type, cookie, length
)

// command is a request type.
type command uint16

const (
	cmdRead        = command(protocol.TRANSMISSION_TYPE_REQUEST_READ)
	cmdWrite       = command(protocol.TRANSMISSION_TYPE_REQUEST_WRITE)
	cmdDisc        = command(protocol.TRANSMISSION_TYPE_REQUEST_DISC)
	cmdFlush       = command(3)
	cmdTrim        = command(4)
	cmdCache       = command(5)
	cmdWriteZeroes = command(6)
	cmdBlockStatus = command(7)
)

func (c command) String() string {
	switch c {
	case cmdRead:
		return "READ"
	case cmdWrite:
		return "WRITE"
	case cmdDisc:
		return "DISC"
	case cmdFlush:
		return "FLUSH"
	case cmdTrim:
		return "TRIM"
	case cmdCache:
		return "CACHE"
	case cmdWriteZeroes:
		return "WRITE_ZEROES"
	case cmdBlockStatus:
		return "BLOCK_STATUS"
	}
	return fmt.Sprintf("command %d", uint16(c))
}

// Command flags.
const (
	cmdFlagFUA    = uint16(1 << 0)
	cmdFlagNoHole = uint16(1 << 1)
	cmdFlagDF     = uint16(1 << 2)
)

// Structured reply flags and types.
const (
	replyFlagDone = uint16(1 << 0)

	replyNone       = uint16(0)
	replyOffsetData = uint16(1)
	replyError      = uint16(1<<15 + 1)
)

// request is a request header without its magic number.
type request struct {
	flags  uint16
	cmd    command
	cookie uint64 // opaque to us
	off    uint64
	length uint32
}

// parseRequest reads a header of requestSize bytes; false if the magic number is wrong.
func parseRequest(b []byte) (r request, ok bool) {
	_ = b[requestSize-1]
	return request{
		flags:  binary.BigEndian.Uint16(b[4:]),
		cmd:    command(binary.BigEndian.Uint16(b[6:])),
		cookie: binary.BigEndian.Uint64(b[8:]),
		off:    binary.BigEndian.Uint64(b[16:]),
		length: binary.BigEndian.Uint32(b[24:]),
	}, binary.BigEndian.Uint32(b) == magicRequest
}

func putSimpleReply(b []byte, e Errno, cookie uint64) int {
	binary.BigEndian.PutUint32(b, magicSimple)
	binary.BigEndian.PutUint32(b[4:], uint32(e))
	binary.BigEndian.PutUint64(b[8:], cookie)
	return simpleReplySize
}

// putChunk writes the header of a structured reply that is the only chunk of its reply.
func putChunk(b []byte, typ uint16, cookie uint64, length uint32) int {
	binary.BigEndian.PutUint32(b, magicStructured)
	binary.BigEndian.PutUint16(b[4:], replyFlagDone)
	binary.BigEndian.PutUint16(b[6:], typ)
	binary.BigEndian.PutUint64(b[8:], cookie)
	binary.BigEndian.PutUint32(b[16:], length)
	return structuredReplySize
}

// putDataChunk writes the header of an OFFSET_DATA chunk; n bytes of data follow it.
func putDataChunk(b []byte, cookie, off uint64, n int) int {
	k := putChunk(b, replyOffsetData, cookie, uint32(8+n))
	binary.BigEndian.PutUint64(b[k:], off)
	return k + 8
}

// putErrorChunk writes a whole ERROR chunk; b has room for a message of len(why).
func putErrorChunk(b []byte, e Errno, cookie uint64, why string) int {
	k := putChunk(b, replyError, cookie, uint32(6+len(why)))
	binary.BigEndian.PutUint32(b[k:], uint32(e))
	binary.BigEndian.PutUint16(b[k+4:], uint16(len(why)))
	return k + 6 + copy(b[k+6:], why)
}
