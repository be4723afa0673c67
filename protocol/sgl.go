package protocol

import (
	"encoding/binary"
	"math"
	"strconv"
)

// SGLSize is the size of an SGL descriptor in bytes.
const SGLSize = 16

// MaxKeyedLength is the largest length of a keyed descriptor in bytes; the field
// has 24 bits.
const MaxKeyedLength = 1<<24 - 1

// SGLType is the high nibble of a descriptor's last byte.
type SGLType uint8

// Descriptor types (NVMe Base, "SGL Descriptor Type").
const (
	SGLDataBlock          SGLType = 0
	SGLBitBucket          SGLType = 1
	SGLSegment            SGLType = 2
	SGLLastSegment        SGLType = 3
	SGLKeyedDataBlock     SGLType = 4
	SGLTransportDataBlock SGLType = 5
)

func (t SGLType) String() string {
	switch t {
	case SGLDataBlock:
		return "data block"
	case SGLBitBucket:
		return "bit bucket"
	case SGLSegment:
		return "segment"
	case SGLLastSegment:
		return "last segment"
	case SGLKeyedDataBlock:
		return "keyed data block"
	case SGLTransportDataBlock:
		return "transport data block"
	}
	return "SGLType(" + strconv.Itoa(int(t)) + ")"
}

// Descriptor subtypes, the low nibble of the last byte.
const (
	SGLSubtypeAddress    = 0x0
	SGLSubtypeOffset     = 0x1 // the address is an offset into the in-capsule data
	SGLSubtypeInvalidate = 0xF // an address; the host asks for Send with Invalidate of the key
)

// SGL is one 16-byte Scatter Gather List descriptor (NVMe Base, "Scatter Gather
// List"; NVMe over Fabrics, "Keyed SGL Data Block descriptor"). On RDMA a
// command carries exactly one.
//
//	keyed data block:  address 0..7, length 8..10, key 11..14, type 15
//	data block:        address 0..7, length 8..11, reserved 12..14, type 15
type SGL [SGLSize]byte

var _ = [1]struct{}{}[len(SGL{})-SGLSize]

// Type returns the descriptor type.
func (s *SGL) Type() SGLType { return SGLType(s[15] >> 4) }

// Subtype returns the descriptor subtype.
func (s *SGL) Subtype() uint8 { return s[15] & 0xF }

// Address returns the remote address, or the offset of an in-capsule block.
func (s *SGL) Address() uint64 { return binary.LittleEndian.Uint64(s[0:]) }

// Length returns the length in bytes: the 24-bit field of a keyed block, the
// 32-bit field of every other type.
func (s *SGL) Length() uint32 {
	n := binary.LittleEndian.Uint32(s[8:])
	if s.Type() == SGLKeyedDataBlock {
		n &= MaxKeyedLength
	}
	return n
}

// Key returns the remote key (rkey, STag) of a keyed block. The field is not
// aligned.
func (s *SGL) Key() uint32 { return binary.LittleEndian.Uint32(s[11:]) }

// SetKeyed makes s a keyed data block: n bytes at the remote address addr under
// key. With invalidate the host asks for the key to be invalidated by the
// response. It panics if n is over MaxKeyedLength.
func (s *SGL) SetKeyed(addr uint64, n uint32, key uint32, invalidate bool) {
	if n > MaxKeyedLength {
		panic("protocol: keyed SGL length " + strconv.FormatUint(uint64(n), 10) + " does not fit 24 bits")
	}
	binary.LittleEndian.PutUint64(s[0:], addr)
	binary.LittleEndian.PutUint32(s[8:], n) // byte 11 is overwritten by the key
	binary.LittleEndian.PutUint32(s[11:], key)
	s[15] = byte(SGLKeyedDataBlock)<<4 | SGLSubtypeAddress
	if invalidate {
		s[15] |= SGLSubtypeInvalidate
	}
}

// SetInCapsule makes s a data block of n bytes at offset off of the in-capsule
// data area.
func (s *SGL) SetInCapsule(off uint64, n uint32) {
	binary.LittleEndian.PutUint64(s[0:], off)
	binary.LittleEndian.PutUint32(s[8:], n)
	binary.LittleEndian.PutUint32(s[12:], 0)
	s[15] = byte(SGLDataBlock)<<4 | SGLSubtypeOffset
}

// SetNoData makes s the descriptor of a command without data: a keyed block of
// length zero. An all-zero descriptor would be refused by a Linux target.
func (s *SGL) SetNoData() {
	*s = SGL{15: byte(SGLKeyedDataBlock) << 4}
}

// DataKind tells where a command's data is.
type DataKind uint8

// The kinds of data.
const (
	DataNone      DataKind = iota // no data: length zero
	DataKeyed                     // in the peer's memory, behind a key
	DataInCapsule                 // in the capsule, behind the command
)

func (k DataKind) String() string {
	switch k {
	case DataNone:
		return "no data"
	case DataKeyed:
		return "keyed"
	case DataInCapsule:
		return "in capsule"
	}
	return "DataKind(" + strconv.Itoa(int(k)) + ")"
}

// Data is a parsed and checked data pointer.
type Data struct {
	// Addr is the remote address of keyed data. For in-capsule data it is the
	// byte position in the received capsule (64 or more), safe to slice with.
	Addr uint64
	Len  uint32 // bytes; 0 only with DataNone
	Key  uint32 // of keyed data
	Kind DataKind
	// Invalidate: the host asks for Send with Invalidate of Key. Only with
	// DataKeyed; without it a target must answer by a plain Send.
	Invalidate bool
}

// Capsule describes the capsule a command came in, for [Command.Data].
type Capsule struct {
	// InCapsuleSize is the room for in-capsule data in bytes that this queue
	// advertised: IOCCSZ x 16 - 64 on I/O queues, 0 where none is taken.
	InCapsuleSize uint32
	// Received is the number of bytes of the message, the command included.
	Received uint32
}

// Data parses and checks the command's data pointer as a target must (NVMe over
// Fabrics, "RDMA transport: SGL support"). dir is the direction of the data,
// normally c.Direction(). It does not know how much data the command implies:
// check that next with [Data.Exactly], [Data.AtLeast] or [Data.None].
//
// The statuses are those of the Linux target:
//
//	type 0 with a subtype other than 1, type 4 with one other than 0 and 0xF   invalid field
//	any other type                                                             SGL descriptor type invalid
//	in-capsule descriptor on a command without host-to-controller data         invalid field
//	offset + length beyond the advertised area                                 SGL offset invalid
//
// and two it lacks, without which a target would hand out bytes of an older
// capsule or address memory past 2^64:
//
//	offset + length beyond what was received        data SGL length invalid
//	remote address + length wraps                   data SGL length invalid
//
// All carry Do Not Retry.
func (c *Command) Data(dir Direction, in Capsule) (Data, Status) {
	s := c.SGL()
	switch s.Type() {
	case SGLKeyedDataBlock:
		sub := s.Subtype()
		if sub != SGLSubtypeAddress && sub != SGLSubtypeInvalidate {
			return Data{}, StatusInvalidField.WithDNR()
		}
		n := s.Length()
		if n == 0 {
			return Data{}, StatusSuccess
		}
		addr := s.Address()
		if !RangeOK(addr, uint64(n), math.MaxUint64) {
			return Data{}, StatusDataSGLLengthInvalid.WithDNR()
		}
		return Data{Kind: DataKeyed, Addr: addr, Len: n, Key: s.Key(), Invalidate: sub == SGLSubtypeInvalidate}, StatusSuccess
	case SGLDataBlock:
		if s.Subtype() != SGLSubtypeOffset || dir != HostToController {
			return Data{}, StatusInvalidField.WithDNR()
		}
		off, n := s.Address(), uint64(s.Length())
		if !RangeOK(off, n, uint64(in.InCapsuleSize)) {
			return Data{}, StatusSGLOffsetInvalid.WithDNR()
		}
		if n == 0 {
			return Data{}, StatusSuccess
		}
		if in.Received < CommandSize || !RangeOK(off, n, uint64(in.Received-CommandSize)) {
			return Data{}, StatusDataSGLLengthInvalid.WithDNR()
		}
		return Data{Kind: DataInCapsule, Addr: CommandSize + off, Len: uint32(n)}, StatusSuccess
	}
	return Data{}, StatusSGLTypeInvalid.WithDNR()
}

// Exactly checks that the data is n bytes long, as the Linux target wants it.
func (d Data) Exactly(n uint64) Status {
	if uint64(d.Len) != n {
		return StatusDataSGLLengthInvalid.WithDNR()
	}
	return StatusSuccess
}

// AtLeast checks that the data is n bytes long or longer.
func (d Data) AtLeast(n uint64) Status {
	if uint64(d.Len) < n {
		return StatusDataSGLLengthInvalid.WithDNR()
	}
	return StatusSuccess
}

// None checks that there is no data.
func (d Data) None() Status { return d.Exactly(0) }

// Bytes returns the in-capsule data inside the received capsule. It returns nil
// for the other kinds. capsule must be the bytes that Capsule.Received counted.
func (d Data) Bytes(capsule []byte) []byte {
	if d.Kind != DataInCapsule {
		return nil
	}
	return capsule[d.Addr : d.Addr+uint64(d.Len) : d.Addr+uint64(d.Len)]
}
