package protocol

import (
	"encoding/binary"
	"strconv"
)

// CommandSize is the size of a command in bytes, the least a command capsule has.
const CommandSize = 64

// NSIDAll addresses all namespaces.
const NSIDAll = 0xFFFFFFFF

// FlagsSGL is the FLAGS byte of every command on RDMA: not fused, PSDT 01b (the
// data pointer is an SGL).
const FlagsSGL = 0x40

// Command is a 64-byte submission queue entry (NVMe Base, "Common Command
// Format"; NVMe over Fabrics, "Fabrics Command"), the head of a command capsule.
// It is a view: the methods read and write the bytes in place and do not
// allocate. Which accessors make sense depends on the opcode; each group names
// its command.
//
// The zero value is a Flush without a valid data pointer: start with one of the
// Init methods.
type Command [CommandSize]byte

var _ = [1]struct{}{}[len(Command{})-CommandSize]

// CommandView returns the command at the head of a capsule without copying. ok
// is false if the capsule is shorter than a command, a fatal transport error.
func CommandView(capsule []byte) (c *Command, ok bool) {
	if len(capsule) < CommandSize {
		return nil, false
	}
	return (*Command)(capsule), true
}

func (c *Command) u16(off int) uint16       { return binary.LittleEndian.Uint16(c[off:]) }
func (c *Command) u32(off int) uint32       { return binary.LittleEndian.Uint32(c[off:]) }
func (c *Command) u64(off int) uint64       { return binary.LittleEndian.Uint64(c[off:]) }
func (c *Command) put16(off int, v uint16)  { binary.LittleEndian.PutUint16(c[off:], v) }
func (c *Command) put32(off int, v uint32)  { binary.LittleEndian.PutUint32(c[off:], v) }
func (c *Command) put64(off int, v uint64)  { binary.LittleEndian.PutUint64(c[off:], v) }
func (c *Command) bit(off int, m byte) bool { return c[off]&m != 0 }

func (c *Command) setBit(off int, m byte, on bool) {
	if on {
		c[off] |= m
	} else {
		c[off] &^= m
	}
}

// Init clears c and makes it an I/O command without data: opcode, FLAGS, command
// identifier, namespace, and a well-formed data pointer of length zero.
func (c *Command) Init(op Opcode, id uint16, nsid uint32) {
	*c = Command{0: byte(op), 1: FlagsSGL}
	c.SetID(id)
	c.SetNSID(nsid)
	c.SGL().SetNoData()
}

// InitAdmin is Init for the admin queue.
func (c *Command) InitAdmin(op AdminOpcode, id uint16, nsid uint32) { c.Init(Opcode(op), id, nsid) }

// InitFabrics is Init for a Fabrics command.
func (c *Command) InitFabrics(t FabricsType, id uint16) {
	c.Init(OpFabrics, id, 0)
	c[4] = byte(t)
}

// Opcode returns OPC, read as an I/O command's.
func (c *Command) Opcode() Opcode { return Opcode(c[0]) }

// SetOpcode sets OPC.
func (c *Command) SetOpcode(op Opcode) { c[0] = byte(op) }

// AdminOpcode returns OPC, read as an admin command's.
func (c *Command) AdminOpcode() AdminOpcode { return AdminOpcode(c[0]) }

// SetAdminOpcode sets OPC.
func (c *Command) SetAdminOpcode(op AdminOpcode) { c[0] = byte(op) }

// IsFabrics reports whether it is a Fabrics command; then FabricsType tells which.
func (c *Command) IsFabrics() bool { return Opcode(c[0]) == OpFabrics }

// Direction returns the direction that the opcode, or of a Fabrics command the
// command type, claims for the data.
func (c *Command) Direction() Direction {
	if c.IsFabrics() {
		return Direction(c[4] & 3)
	}
	return Direction(c[0] & 3)
}

// Flags returns the byte that holds FUSE (bits 1:0) and PSDT (bits 7:6).
func (c *Command) Flags() uint8 { return c[1] }

// SetFlags sets the FLAGS byte.
func (c *Command) SetFlags(f uint8) { c[1] = f }

// Fuse returns FUSE; it is 0 in a normal command.
func (c *Command) Fuse() uint8 { return c[1] & 3 }

// PSDT returns the data pointer's format; 1 on RDMA.
func (c *Command) PSDT() uint8 { return c[1] >> 6 }

// CheckFlags returns the status that a target without fused commands owes the
// FLAGS byte: success, or invalid field with Do Not Retry if the command is
// fused or its data pointer is not an SGL. Reserved bits are ignored.
func (c *Command) CheckFlags() Status {
	if c.Fuse() != 0 || c.PSDT() != 1 {
		return StatusInvalidField.WithDNR()
	}
	return StatusSuccess
}

// ID returns CID. To a target it is opaque: hosts let it jump, and it must not
// index anything.
func (c *Command) ID() uint16 { return c.u16(2) }

// SetID sets CID.
func (c *Command) SetID(id uint16) { c.put16(2, id) }

// NSID returns the namespace identifier. A Fabrics command has none.
func (c *Command) NSID() uint32 { return c.u32(4) }

// SetNSID sets the namespace identifier.
func (c *Command) SetNSID(n uint32) { c.put32(4, n) }

// MPTR returns the metadata pointer; it is 0 on RDMA.
func (c *Command) MPTR() uint64 { return c.u64(16) }

// SGL returns the data pointer as a view into the command.
func (c *Command) SGL() *SGL { return (*SGL)(c[24:40]) }

// SetKeyedSGL points the command at n bytes of the sender's memory, see [SGL.SetKeyed].
func (c *Command) SetKeyedSGL(addr uint64, n uint32, key uint32, invalidate bool) {
	c.SGL().SetKeyed(addr, n, key, invalidate)
}

// SetInCapsuleSGL points the command at n bytes behind itself, off bytes into
// the in-capsule data.
func (c *Command) SetInCapsuleSGL(off uint64, n uint32) { c.SGL().SetInCapsule(off, n) }

// SetNoDataSGL gives the command the data pointer of a command without data.
func (c *Command) SetNoDataSGL() { c.SGL().SetNoData() }

// DW returns command dword i, 0..15.
func (c *Command) DW(i int) uint32 { return c.u32(i * 4) }

// SetDW sets command dword i, 0..15.
func (c *Command) SetDW(i int, v uint32) { c.put32(i*4, v) }

// Read, Write, Compare, Write Zeroes, Verify (NVM Command Set).

// Control bits of CDW12 31:16, as a 16-bit value.
const (
	ControlLR    uint16 = 1 << 15 // limited retry
	ControlFUA   uint16 = 1 << 14 // force unit access
	ControlPRACT uint16 = 1 << 13 // protection information action
	ControlGuard uint16 = 1 << 12 // check the guard
	ControlApp   uint16 = 1 << 11 // check the application tag
	ControlRef   uint16 = 1 << 10 // check the reference tag
	ControlDEAC  uint16 = 1 << 9  // Write Zeroes: may deallocate
)

// MaxBlocks is the largest number of blocks that one command names.
const MaxBlocks = 1 << 16

// InitRW makes c a command on a range of blocks (Read, Write, Compare, Write
// Zeroes, Verify) with the Control bits in control. It panics unless blocks is
// 1..MaxBlocks.
func (c *Command) InitRW(op Opcode, id uint16, nsid uint32, slba uint64, blocks uint32, control uint16) {
	c.Init(op, id, nsid)
	c.SetSLBA(slba)
	c.SetBlocks(blocks)
	c.SetControl(control)
}

// SLBA returns the first logical block.
func (c *Command) SLBA() uint64 { return c.u64(40) }

// SetSLBA sets the first logical block.
func (c *Command) SetSLBA(lba uint64) { c.put64(40, lba) }

// NLB returns the number of blocks as on the wire, 0's based.
func (c *Command) NLB() uint16 { return c.u16(48) }

// Blocks returns the number of blocks, 1..65536.
func (c *Command) Blocks() uint32 { return uint32(c.u16(48)) + 1 }

// SetBlocks sets NLB from a count of blocks. It panics unless n is 1..MaxBlocks.
func (c *Command) SetBlocks(n uint32) {
	if n-1 >= MaxBlocks {
		panic("protocol: " + strconv.FormatUint(uint64(n), 10) + " blocks do not fit NLB")
	}
	c.put16(48, uint16(n-1))
}

// Control returns CDW12 31:16, see ControlFUA and its neighbours.
func (c *Command) Control() uint16 { return c.u16(50) }

// SetControl sets CDW12 31:16.
func (c *Command) SetControl(v uint16) { c.put16(50, v) }

// LR returns Limited Retry.
func (c *Command) LR() bool { return c.Control()&ControlLR != 0 }

// FUA returns Force Unit Access: the data is on stable storage before the
// completion.
func (c *Command) FUA() bool { return c.Control()&ControlFUA != 0 }

// SetFUA sets Force Unit Access.
func (c *Command) SetFUA(on bool) { c.setBit(51, byte(ControlFUA>>8), on) }

// DEAC returns Deallocate of a Write Zeroes command.
func (c *Command) DEAC() bool { return c.Control()&ControlDEAC != 0 }

// SetDEAC sets Deallocate of a Write Zeroes command.
func (c *Command) SetDEAC(on bool) { c.setBit(51, byte(ControlDEAC>>8), on) }

// PRINFO returns the protection information bits of Control: PRACT and the
// checks.
func (c *Command) PRINFO() uint16 {
	return c.Control() & (ControlPRACT | ControlGuard | ControlApp | ControlRef)
}

// DTYPE returns the directive type of a write.
func (c *Command) DTYPE() uint8 { return c[50] >> 4 }

// DSM returns the access hints of a Read or Write, CDW13 7:0.
func (c *Command) DSM() uint8 { return c[52] }

// ReferenceTag returns (E)ILBRT.
func (c *Command) ReferenceTag() uint32 { return c.u32(56) }

// ApplicationTag returns LBAT and LBATM.
func (c *Command) ApplicationTag() (tag, mask uint16) { return c.u16(60), c.u16(62) }

// Identify.

// InitIdentify makes c an Identify command; CSI is 0, the NVM command set. The
// payload is IdentifySize bytes.
func (c *Command) InitIdentify(id uint16, cns CNS, nsid uint32) {
	c.InitAdmin(AdminIdentify, id, nsid)
	c[40] = byte(cns)
}

// CNS returns which structure an Identify command asks for.
func (c *Command) CNS() CNS { return CNS(c[40]) }

// SetCNS sets which structure an Identify command asks for.
func (c *Command) SetCNS(n CNS) { c[40] = byte(n) }

// CNTID returns the controller identifier of an Identify command.
func (c *Command) CNTID() uint16 { return c.u16(42) }

// SetCNTID sets the controller identifier of an Identify command.
func (c *Command) SetCNTID(n uint16) { c.put16(42, n) }

// CNSSID returns the CNS specific identifier of an Identify command.
func (c *Command) CNSSID() uint16 { return c.u16(44) }

// IdentifyCSI returns the command set identifier of an Identify command.
func (c *Command) IdentifyCSI() CSI { return CSI(c[47]) }

// SetIdentifyCSI sets the command set identifier of an Identify command.
func (c *Command) SetIdentifyCSI(n CSI) { c[47] = byte(n) }

// Set Features and Get Features.

// InitSetFeatures makes c a Set Features command without data; value is CDW11.
func (c *Command) InitSetFeatures(id uint16, fid FeatureID, nsid uint32, value uint32) {
	c.InitAdmin(AdminSetFeatures, id, nsid)
	c[40] = byte(fid)
	c.put32(44, value)
}

// InitGetFeatures makes c a Get Features command without data.
func (c *Command) InitGetFeatures(id uint16, fid FeatureID, sel FeatureSelect, nsid uint32) {
	c.InitAdmin(AdminGetFeatures, id, nsid)
	c[40] = byte(fid)
	c[41] = byte(sel) & 7
}

// FID returns the feature identifier.
func (c *Command) FID() FeatureID { return FeatureID(c[40]) }

// SetFID sets the feature identifier.
func (c *Command) SetFID(f FeatureID) { c[40] = byte(f) }

// SEL returns which value a Get Features command asks for.
func (c *Command) SEL() FeatureSelect { return FeatureSelect(c[41] & 7) }

// SetSEL sets which value a Get Features command asks for.
func (c *Command) SetSEL(s FeatureSelect) { c[41] = c[41]&^7 | byte(s)&7 }

// SV returns Save of a Set Features command.
func (c *Command) SV() bool { return c.bit(43, 0x80) }

// SetSV sets Save of a Set Features command.
func (c *Command) SetSV(on bool) { c.setBit(43, 0x80, on) }

// FeatureValue returns CDW11, the value or selector of a feature.
func (c *Command) FeatureValue() uint32 { return c.u32(44) }

// SetFeatureValue sets CDW11.
func (c *Command) SetFeatureValue(v uint32) { c.put32(44, v) }

// Get Log Page.

// InitGetLogPage makes c a Get Log Page command for n bytes at byte offset off.
// retain is RAE: do not clear the event that the page belongs to. It panics
// unless n and off are multiples of 4 and n is 4 or more.
func (c *Command) InitGetLogPage(id uint16, lid LogID, nsid uint32, off uint64, n uint32, retain bool) {
	c.InitAdmin(AdminGetLogPage, id, nsid)
	c[40] = byte(lid)
	c.SetRAE(retain)
	c.SetLogLength(n)
	c.SetLPO(off)
}

// LID returns the log page identifier.
func (c *Command) LID() LogID { return LogID(c[40]) }

// SetLID sets the log page identifier.
func (c *Command) SetLID(l LogID) { c[40] = byte(l) }

// LSP returns the log specific parameter, 7 bits.
func (c *Command) LSP() uint8 { return c[41] & 0x7F }

// SetLSP sets the log specific parameter.
func (c *Command) SetLSP(v uint8) { c[41] = c[41]&0x80 | v&0x7F }

// RAE returns Retain Asynchronous Event.
func (c *Command) RAE() bool { return c.bit(41, 0x80) }

// SetRAE sets Retain Asynchronous Event.
func (c *Command) SetRAE(on bool) { c.setBit(41, 0x80, on) }

// NUMD returns the number of dwords, 0's based, from both halves.
func (c *Command) NUMD() uint32 { return c.u32(42) } // NUMDL at 42 and NUMDU at 44 are adjacent

// LogLength returns the length of the transfer in bytes: up to 16 GiB, so check
// it against the SGL before allocating.
func (c *Command) LogLength() uint64 { return (uint64(c.NUMD()) + 1) * 4 }

// SetLogLength sets NUMDL and NUMDU from a length in bytes. It panics unless n
// is a multiple of 4 and not 0.
func (c *Command) SetLogLength(n uint32) {
	if n == 0 || n%4 != 0 {
		panic("protocol: log page length " + strconv.FormatUint(uint64(n), 10) + " is no number of dwords")
	}
	c.put32(42, n/4-1)
}

// LSI returns the log specific identifier.
func (c *Command) LSI() uint16 { return c.u16(46) }

// SetLSI sets the log specific identifier.
func (c *Command) SetLSI(v uint16) { c.put16(46, v) }

// LPO returns the log page offset in bytes. A target refuses one that is no
// multiple of 4.
func (c *Command) LPO() uint64 { return c.u64(48) }

// SetLPO sets the log page offset in bytes. It panics unless off is a multiple
// of 4.
func (c *Command) SetLPO(off uint64) {
	if off%4 != 0 {
		panic("protocol: log page offset " + strconv.FormatUint(off, 10) + " is no multiple of 4")
	}
	c.put64(48, off)
}

// OT returns Offset Type: LPO is an index instead of a byte offset.
func (c *Command) OT() bool { return c.bit(58, 0x80) }

// LogCSI returns the command set identifier of a Get Log Page command.
func (c *Command) LogCSI() CSI { return CSI(c[59]) }

// SetLogCSI sets the command set identifier of a Get Log Page command.
func (c *Command) SetLogCSI(n CSI) { c[59] = byte(n) }

// UUIDIndex returns the UUID index of Identify, Get Log Page and the feature
// commands.
func (c *Command) UUIDIndex() uint8 { return c[56] & 0x7F }

// Abort.

// InitAbort makes c an Abort of command cid on queue sqid.
func (c *Command) InitAbort(id, sqid, cid uint16) {
	c.InitAdmin(AdminAbort, id, 0)
	c.put16(40, sqid)
	c.put16(42, cid)
}

// AbortSQID returns the queue of the command to abort.
func (c *Command) AbortSQID() uint16 { return c.u16(40) }

// AbortCID returns the identifier of the command to abort.
func (c *Command) AbortCID() uint16 { return c.u16(42) }

// Dataset Management.

// Attributes of Dataset Management, CDW11.
const (
	DSMIntegralRead  uint32 = 1 << 0 // IDR
	DSMIntegralWrite uint32 = 1 << 1 // IDW
	DSMDeallocate    uint32 = 1 << 2 // AD
)

// InitDSM makes c a Dataset Management command over ranges ranges, which follow
// as data (see [DSMRanges]). It panics unless ranges is 1..256.
func (c *Command) InitDSM(id uint16, nsid uint32, ranges int, attr uint32) {
	if ranges < 1 || ranges > MaxDSMRanges {
		panic("protocol: " + strconv.Itoa(ranges) + " ranges do not fit NR")
	}
	c.Init(OpDatasetManagement, id, nsid)
	c[40] = byte(ranges - 1)
	c.put32(44, attr)
}

// DSMRangeCount returns the number of ranges of a Dataset Management command,
// 1..256.
func (c *Command) DSMRangeCount() int { return int(c[40]) + 1 }

// DSMAttributes returns CDW11 of a Dataset Management command.
func (c *Command) DSMAttributes() uint32 { return c.u32(44) }

// Fabrics commands.

// FabricsType returns FCTYPE; it means nothing unless IsFabrics.
func (c *Command) FabricsType() FabricsType { return FabricsType(c[4]) }

// SetFabricsType sets FCTYPE.
func (c *Command) SetFabricsType(t FabricsType) { c[4] = byte(t) }

// ConnectAttr is CATTR of a Connect command.
type ConnectAttr uint8

// Bits of CATTR.
const (
	ConnectPriorityMask      ConnectAttr = 3 << 0 // priority class
	ConnectDisableSQFlow     ConnectAttr = 1 << 2 // no SQHD wanted
	ConnectIndividualIOQueue ConnectAttr = 1 << 3 // the host can live with the deletion of one I/O queue
)

// InitConnect makes c a Connect command for queue qid. sqsize is 0's based. kato
// is the keep-alive timeout in milliseconds, 0 on I/O queues. The data is a
// [ConnectData].
func (c *Command) InitConnect(id, qid, sqsize uint16, kato uint32, attr ConnectAttr) {
	c.InitFabrics(FabricsConnect, id)
	c.put16(42, qid)
	c.put16(44, sqsize)
	c[46] = byte(attr)
	c.put32(48, kato)
}

// RECFMT returns the record format of a Connect or Disconnect command; only 0 is
// defined.
func (c *Command) RECFMT() uint16 { return c.u16(40) }

// SetRECFMT sets the record format of a Connect or Disconnect command.
func (c *Command) SetRECFMT(v uint16) { c.put16(40, v) }

// QID returns the queue identifier of a Connect command: 0 is the admin queue.
func (c *Command) QID() uint16 { return c.u16(42) }

// SQSIZE returns the queue size of a Connect command, 0's based.
func (c *Command) SQSIZE() uint16 { return c.u16(44) }

// CATTR returns the attributes of a Connect command.
func (c *Command) CATTR() ConnectAttr { return ConnectAttr(c[46]) }

// KATO returns the keep-alive timeout of a Connect command in milliseconds. It
// means nothing on an I/O queue.
func (c *Command) KATO() uint32 { return c.u32(48) }

// InitPropertyGet makes c a Property Get of p with p's size.
func (c *Command) InitPropertyGet(id uint16, p Property) {
	c.InitFabrics(FabricsPropertyGet, id)
	c.setProperty(p)
}

// InitPropertySet makes c a Property Set of p with p's size.
func (c *Command) InitPropertySet(id uint16, p Property, v uint64) {
	c.InitFabrics(FabricsPropertySet, id)
	c.setProperty(p)
	c.put64(48, v)
}

func (c *Command) setProperty(p Property) {
	if p.Size() == 8 {
		c[40] = 1
	}
	c.put32(44, uint32(p))
}

// PropertySize returns the size in bytes that a Property Get or Set names: 4, 8,
// or 0 for a value that is not defined.
func (c *Command) PropertySize() int {
	switch c[40] & 7 {
	case 0:
		return 4
	case 1:
		return 8
	}
	return 0
}

// Property returns the offset that a Property Get or Set names.
func (c *Command) Property() Property { return Property(c.u32(44)) }

// PropertyValue returns the value of a Property Set; of a 4-byte property only
// the low half counts.
func (c *Command) PropertyValue() uint64 {
	if c.PropertySize() == 4 {
		return uint64(c.u32(48))
	}
	return c.u64(48)
}

// InitDisconnect makes c a Disconnect of the I/O queue it is sent on. Linux and
// SPDK do not have the command: a host must not need it.
func (c *Command) InitDisconnect(id uint16) { c.InitFabrics(FabricsDisconnect, id) }

// AuthTransferLength returns TL of Authentication Send, AL of Receive, in bytes.
func (c *Command) AuthTransferLength() uint32 { return c.u32(44) }

// AuthProtocol returns SPSP0, SPSP1 and SECP of an authentication command; 0x01,
// 0x01 and 0xE9 for NVMe in-band authentication.
func (c *Command) AuthProtocol() (spsp0, spsp1, secp uint8) { return c[41], c[42], c[43] }
