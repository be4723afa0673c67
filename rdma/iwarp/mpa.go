package iwarp

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
)

// MPA start-up frames (RFC 5044 section 7.1; RFC 6581 section 4).
const (
	mpaKeySize    = 16
	mpaHeaderSize = 20
	mpaMaxPrivate = 512 // PD_Length, with the 4 bytes of the enhanced set-up
	mpaMaxFrame   = mpaHeaderSize + mpaMaxPrivate

	mpaKeyRequest = "MPA ID Req Frame"
	mpaKeyReply   = "MPA ID Rep Frame"
)

// Flags of a start-up frame, byte 16.
const (
	mpaMarkers  = 0x80 // M: send me markers
	mpaCRC      = 0x40 // C: use CRC
	mpaReject   = 0x20 // R: Reply only
	mpaEnhanced = 0x10 // S: read depths precede the private data

	// Bits that RFC 5044 reserves ("ignored on receive").
	//
	// mpaGSO is siw's experiment: FPDUs may be larger than a TCP segment. siw echoes
	// it, and takes such FPDUs in any case.
	mpaGSO = 0x08
	// mpaOwnRequest and mpaOwnReply tell a peer that is this software too, which needs
	// none of the care that siw does. Two bits, because siw echoes what the
	// Request carried: only this provider answers the one with the other.
	mpaOwnRequest = 0x02
	mpaOwnReply   = 0x04
	mpaVendor     = 0x07
)

// The words of the enhanced set-up, bytes 20 to 23 (RFC 6581 section 4).
const (
	enhPeerToPeer = 0x8000 // A, in the IRD word
	enhRTRSend    = 0x4000 // B, in the IRD word
	enhRTRWrite   = 0x8000 // C, in the ORD word
	enhRTRRead    = 0x4000 // D, in the ORD word
	enhDepth      = 0x3FFF // depth; all ones: not negotiated here
	enhSize       = 4
)

var (
	errFrameShort = errors.New("iwarp: MPA frame incomplete")
	errFrameKey   = errors.New("iwarp: not an MPA start-up frame")
	errFrameSize  = errors.New("iwarp: MPA private data longer than 512 bytes")
)

// mpaFrame is a start-up frame. private is all of the private data, with the
// words of the enhanced set-up if there are any.
type mpaFrame struct {
	flags   uint8
	rev     uint8
	private []byte
}

// parseMPA reads a frame with the given key from the front of b and tells its
// length. errFrameShort asks for more bytes; it is returned only while what is
// there is the beginning of a frame, so a stranger is recognised by the first
// wrong byte. private is a part of b.
func parseMPA(b []byte, key string) (f mpaFrame, n int, err error) {
	k := min(len(b), mpaKeySize)
	if string(b[:k]) != key[:k] {
		return f, 0, errFrameKey
	}
	if len(b) < mpaHeaderSize {
		return f, 0, errFrameShort
	}
	pd := int(binary.BigEndian.Uint16(b[18:]))
	if pd > mpaMaxPrivate {
		return f, 0, errFrameSize
	}
	n = mpaHeaderSize + pd
	if len(b) < n {
		return f, 0, errFrameShort
	}
	return mpaFrame{flags: b[16], rev: b[17], private: b[mpaHeaderSize:n]}, n, nil
}

func appendMPA(b []byte, key string, f mpaFrame) []byte {
	b = append(b, key...)
	b = append(b, f.flags, f.rev)
	b = binary.BigEndian.AppendUint16(b, uint16(len(f.private)))
	return append(b, f.private...)
}

// depths are the words of the enhanced set-up.
type depths struct{ ird, ord uint16 }

func parseDepths(private []byte) (d depths, rest []byte) {
	return depths{binary.BigEndian.Uint16(private), binary.BigEndian.Uint16(private[2:])}, private[enhSize:]
}

func (d depths) append(b []byte) []byte {
	return binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(b, d.ird), d.ord)
}

// depth limits a depth from the wire; all ones means "not negotiated", so as much
// as we have.
func depth(w uint16, limit int) int {
	return min(int(w&enhDepth), limit)
}

// FPDU framing (RFC 5044 section 4): ULPDU_Length, ULPDU, pad, CRC.
const (
	fpduLenSize = 2
	fpduCRCSize = 4
	maxULPDU    = 65535
	maxFPDU     = fpduLenSize + maxULPDU + 3 + fpduCRCSize
	minEMSS     = 128 + 6 // an MPA layer offers at least 128 bytes (RFC 5044 section 4.5)
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// padLen is the number of pad bytes behind a ULPDU of l bytes.
func padLen(l int) int { return -(fpduLenSize + l) & 3 }

// fpduLen is the length on the wire of an FPDU with a ULPDU of l bytes.
func fpduLen(l int) int { return fpduLenSize + l + padLen(l) + fpduCRCSize }

// mulpdu is the largest ULPDU whose FPDU fits a TCP segment of emss bytes
// (RFC 5044 section 4.5, no markers), at least 128.
func mulpdu(emss int) int {
	return min(max(emss-fpduLenSize-fpduCRCSize-emss%4, 128), maxULPDU)
}

// crcOK checks a whole FPDU. The CRC is stored least significant byte first.
func crcOK(fpdu []byte) bool {
	n := len(fpdu) - fpduCRCSize
	return crc32.Checksum(fpdu[:n], castagnoli) == binary.LittleEndian.Uint32(fpdu[n:])
}
