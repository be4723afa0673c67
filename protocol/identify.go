package protocol

import (
	"fmt"
	"iter"
	"strconv"
)

// IdentifySize is the size of every Identify payload in bytes.
const IdentifySize = 4096

// CNS tells which structure Identify returns.
type CNS uint8

// CNS values.
const (
	CNSNamespace              CNS = 0x00
	CNSController             CNS = 0x01
	CNSActiveNamespaces       CNS = 0x02
	CNSNamespaceDescriptors   CNS = 0x03
	CNSCommandSetNamespace    CNS = 0x05
	CNSCommandSetController   CNS = 0x06
	CNSCommandSetActiveList   CNS = 0x07
	CNSIndependentNamespace   CNS = 0x08
	CNSAllocatedNamespaceList CNS = 0x10
	CNSAllocatedNamespace     CNS = 0x11
	CNSNamespaceControllers   CNS = 0x12
	CNSControllers            CNS = 0x13
	CNSCommandSets            CNS = 0x1C
)

func (c CNS) String() string {
	switch c {
	case CNSNamespace:
		return "namespace"
	case CNSController:
		return "controller"
	case CNSActiveNamespaces:
		return "active namespace list"
	case CNSNamespaceDescriptors:
		return "namespace identification descriptors"
	case CNSCommandSetNamespace:
		return "command set specific namespace"
	case CNSCommandSetController:
		return "command set specific controller"
	case CNSCommandSetActiveList:
		return "command set specific active namespace list"
	case CNSIndependentNamespace:
		return "command set independent namespace"
	case CNSAllocatedNamespaceList:
		return "allocated namespace list"
	case CNSAllocatedNamespace:
		return "allocated namespace"
	case CNSNamespaceControllers:
		return "controllers of the namespace"
	case CNSControllers:
		return "controllers"
	case CNSCommandSets:
		return "I/O command sets"
	}
	return "CNS(" + hexByte(uint8(c)) + ")"
}

// CSI identifies a command set.
type CSI uint8

// Command sets.
const (
	CSINVM CSI = 0
	CSIKV  CSI = 1
	CSIZNS CSI = 2
)

func (c CSI) String() string {
	switch c {
	case CSINVM:
		return "NVM"
	case CSIKV:
		return "Key Value"
	case CSIZNS:
		return "Zoned Namespace"
	}
	return "CSI(" + strconv.Itoa(int(c)) + ")"
}

// Bits of Identify Controller fields.
const (
	CMICMultiPort       = 1 << 0
	CMICMultiController = 1 << 1
	CMICANA             = 1 << 3

	CTRATTHostID128   = 1 << 0
	CTRATTTrafficKeep = 1 << 6  // TBKAS: traffic based keep alive
	CTRATTExtendedLBA = 1 << 15 // ELBAS

	ControllerTypeIO        = 1
	ControllerTypeDiscovery = 2
	ControllerTypeAdmin     = 3

	LPASmartPerNamespace = 1 << 0
	LPAEffects           = 1 << 1 // log page 0x05
	LPAExtended          = 1 << 2 // LPO and NUMDU

	ONCSCompare            = 1 << 0
	ONCSWriteUncorrectable = 1 << 1
	ONCSDatasetManagement  = 1 << 2
	ONCSWriteZeroes        = 1 << 3
	ONCSSaveSelect         = 1 << 4
	ONCSReservations       = 1 << 5
	ONCSTimestamp          = 1 << 6
	ONCSVerify             = 1 << 7
	ONCSCopy               = 1 << 8

	VWCPresent       = 1 << 0
	VWCFlushNoAll    = 2 << 1 // Flush does not take NSID 0xFFFFFFFF
	VWCFlushAll      = 3 << 1 // Flush of NSID 0xFFFFFFFF flushes all namespaces
	VWCFlushAllMask  = 3 << 1
	NWPCWriteProtect = 1 << 0

	SGLSByteAligned   = 1 << 0
	SGLSDwordAligned  = 2 << 0
	SGLSSupportMask   = 3 << 0
	SGLSKeyed         = 1 << 2
	SGLSBitBucket     = 1 << 16
	SGLSOffset        = 1 << 20 // in-capsule data
	SGLSTransportData = 1 << 21

	FCATTStatic    = 1 << 0
	OFCSDisconnect = 1 << 0
)

// IdentifyController is Identify data of CNS 0x01, 4096 bytes (NVMe Base,
// "Identify Controller data structure"). Fields have the names of the
// specification; those it lacks here are reserved or belong to PCIe.
type IdentifyController struct {
	VID, SSVID uint16
	SN         string // 20 ASCII characters
	MN         string // 40
	FR         string // 8
	RAB        uint8
	IEEE       [3]uint8 // OUI, least significant byte first
	CMIC       uint8
	MDTS       uint8 // largest transfer: 4 KiB << MDTS, 0 is no limit
	CNTLID     uint16
	VER        Version
	RTD3R      uint32 // µs
	RTD3E      uint32 // µs
	OAES       AsyncEventConfig
	CTRATT     uint32
	RRLS       uint16
	CNTRLTYPE  uint8
	FGUID      [16]uint8
	CRDT       [3]uint16 // 100 ms
	OACS       uint16
	ACL        uint8 // 0's based
	AERL       uint8 // 0's based
	FRMW       uint8
	LPA        uint8
	ELPE       uint8 // 0's based
	NPSS       uint8 // 0's based
	AVSCC      uint8
	APSTA      uint8
	WCTEMP     uint16 // K
	CCTEMP     uint16 // K
	MTFA       uint16 // 100 ms
	TNVMCAP    Uint128
	UNVMCAP    Uint128
	RPMBS      uint32
	EDSTT      uint16
	DSTO       uint8
	FWUG       uint8
	KAS        uint16 // 100 ms; a Linux host refuses an I/O controller with 0
	HCTMA      uint16
	SANICAP    uint32
	ANATT      uint8 // s
	ANACAP     uint8
	ANAGRPMAX  uint32
	NANAGRPID  uint32
	SQES       uint8
	CQES       uint8
	MAXCMD     uint16 // 0 makes some Linux hosts fail
	NN         uint32 // largest NSID, constant during an association
	ONCS       uint16
	FUSES      uint16
	FNA        uint8
	VWC        uint8
	AWUN       uint16 // 0's based
	AWUPF      uint16 // 0's based
	NVSCC      uint8
	NWPC       uint8
	ACWU       uint16 // 0's based
	SGLS       uint32
	MNAN       uint32
	SUBNQN     string // 256 bytes, at most 223 characters
	IOCCSZ     uint32 // 16 bytes
	IORCSZ     uint32 // 16 bytes
	ICDOFF     uint16 // 16 bytes; a Linux host wants 0
	FCATT      uint8
	MSDBD      uint8
	OFCS       uint16
	DCTYPE     uint8
	PSD        [32]PowerState
}

// PowerState is a 32-byte power state descriptor, of which only the maximum
// power is interpreted.
type PowerState struct {
	MP   uint16   // maximum power, in 0.01 W unless Rest says otherwise
	Rest [30]byte // bytes 2..31
}

func (d *IdentifyController) layout(x codec) {
	x.u16(0, &d.VID)
	x.u16(2, &d.SSVID)
	x.ascii(4, 20, &d.SN)
	x.ascii(24, 40, &d.MN)
	x.ascii(64, 8, &d.FR)
	x.u8(72, &d.RAB)
	x.bytes(73, d.IEEE[:])
	x.u8(76, &d.CMIC)
	x.u8(77, &d.MDTS)
	x.u16(78, &d.CNTLID)
	x.u32(80, (*uint32)(&d.VER))
	x.u32(84, &d.RTD3R)
	x.u32(88, &d.RTD3E)
	x.u32(92, (*uint32)(&d.OAES))
	x.u32(96, &d.CTRATT)
	x.u16(100, &d.RRLS)
	x.u8(111, &d.CNTRLTYPE)
	x.bytes(112, d.FGUID[:])
	for i := range d.CRDT {
		x.u16(128+2*i, &d.CRDT[i])
	}
	x.u16(256, &d.OACS)
	x.u8(258, &d.ACL)
	x.u8(259, &d.AERL)
	x.u8(260, &d.FRMW)
	x.u8(261, &d.LPA)
	x.u8(262, &d.ELPE)
	x.u8(263, &d.NPSS)
	x.u8(264, &d.AVSCC)
	x.u8(265, &d.APSTA)
	x.u16(266, &d.WCTEMP)
	x.u16(268, &d.CCTEMP)
	x.u16(270, &d.MTFA)
	x.u128(280, &d.TNVMCAP)
	x.u128(296, &d.UNVMCAP)
	x.u32(312, &d.RPMBS)
	x.u16(316, &d.EDSTT)
	x.u8(318, &d.DSTO)
	x.u8(319, &d.FWUG)
	x.u16(320, &d.KAS)
	x.u16(322, &d.HCTMA)
	x.u32(328, &d.SANICAP)
	x.u8(342, &d.ANATT)
	x.u8(343, &d.ANACAP)
	x.u32(344, &d.ANAGRPMAX)
	x.u32(348, &d.NANAGRPID)
	x.u8(512, &d.SQES)
	x.u8(513, &d.CQES)
	x.u16(514, &d.MAXCMD)
	x.u32(516, &d.NN)
	x.u16(520, &d.ONCS)
	x.u16(522, &d.FUSES)
	x.u8(524, &d.FNA)
	x.u8(525, &d.VWC)
	x.u16(526, &d.AWUN)
	x.u16(528, &d.AWUPF)
	x.u8(530, &d.NVSCC)
	x.u8(531, &d.NWPC)
	x.u16(532, &d.ACWU)
	x.u32(536, &d.SGLS)
	x.u32(540, &d.MNAN)
	x.nqn(768, &d.SUBNQN)
	x.u32(1792, &d.IOCCSZ)
	x.u32(1796, &d.IORCSZ)
	x.u16(1800, &d.ICDOFF)
	x.u8(1802, &d.FCATT)
	x.u8(1803, &d.MSDBD)
	x.u16(1804, &d.OFCS)
	x.u8(1806, &d.DCTYPE)
	for i := range d.PSD {
		x.u16(2048+32*i, &d.PSD[i].MP)
		x.bytes(2048+32*i+2, d.PSD[i].Rest[:])
	}
}

// AppendBinary appends the 4096 bytes. SN, MN and FR are cut if they are too
// long. A SUBNQN that is too long is refused, since a cut name is another name;
// an empty one is written.
func (d *IdentifyController) AppendBinary(b []byte) ([]byte, error) {
	if d.SUBNQN != "" {
		if err := CheckNQN(d.SUBNQN); err != nil {
			return b, fmt.Errorf("identify controller: SUBNQN: %w", err)
		}
	}
	all, part := grow(b, IdentifySize)
	d.layout(codec{part, true})
	return all, nil
}

// UnmarshalBinary parses the 4096 bytes. Its only error is ErrShort: what the
// values mean to a host is the host's affair.
func (d *IdentifyController) UnmarshalBinary(b []byte) error {
	if err := short("identify controller", b, IdentifySize); err != nil {
		return err
	}
	d.layout(codec{b: b})
	return nil
}

// InCapsuleSize returns the room for in-capsule data of an I/O command in bytes;
// 0 if the controller takes none. Numbers that contradict themselves give 0.
func (d *IdentifyController) InCapsuleSize() uint32 {
	const room = 1<<28 - 4 // x 16 fits 32 bits
	if d.SGLS&SGLSOffset == 0 || d.IOCCSZ <= CommandSize/16 || d.IOCCSZ-CommandSize/16 > room ||
		uint32(d.ICDOFF) >= d.IOCCSZ-CommandSize/16 {
		return 0
	}
	return (d.IOCCSZ - CommandSize/16 - uint32(d.ICDOFF)) * 16
}

// SetInCapsuleSize sets IOCCSZ, IORCSZ, ICDOFF and the SGLS bits of a controller
// on RDMA that takes n bytes of in-capsule data, rounded down to 16.
func (d *IdentifyController) SetInCapsuleSize(n uint32) {
	d.IOCCSZ = CommandSize/16 + n/16
	d.IORCSZ = CompletionSize / 16
	d.ICDOFF = 0
	d.SGLS = d.SGLS&^uint32(SGLSSupportMask|SGLSOffset) | SGLSByteAligned | SGLSKeyed
	if n >= 16 {
		d.SGLS |= SGLSOffset
	}
}

// LBAFormat is one entry of LBAF.
type LBAFormat struct {
	MS    uint16 // metadata bytes per block
	LBADS uint8  // block size as a power of two; 0 is an unused entry
	RP    uint8  // relative performance, 2 bits
}

// Bits of Identify Namespace fields.
const (
	NSFEATThin        = 1 << 0
	NSFEATAtomic      = 1 << 1 // NAWUN, NAWUPF and NACWU are valid
	NSFEATDeallocErr  = 1 << 2
	NSFEATUIDReuse    = 1 << 3
	NSFEATOptPerf     = 1 << 4 // NPWG, NPWA, NPDG, NPDA and NOWS are valid
	NMICShared        = 1 << 0
	NSATTRProtected   = 1 << 0 // write protected
	DLFEATReadZeros   = 1 << 0 // deallocated blocks read as zeros
	DLFEATReadOnes    = 2 << 0
	DLFEATReadMask    = 7 << 0
	DLFEATDEAC        = 1 << 3 // Write Zeroes honours DEAC
	FLBASExtended     = 1 << 4 // metadata is part of the block
	maxLBAFormats     = 64
	identifyLBAFStart = 128
)

// IdentifyNamespace is Identify data of CNS 0x00, 4096 bytes (NVM Command Set,
// "Identify Namespace data structure"). All zero means an inactive namespace.
type IdentifyNamespace struct {
	NSZE     uint64 // blocks
	NCAP     uint64 // blocks; 0 is an inactive namespace
	NUSE     uint64 // blocks
	NSFEAT   uint8
	NLBAF    uint8 // 0's based
	FLBAS    uint8
	MC       uint8
	DPC      uint8
	DPS      uint8
	NMIC     uint8
	RESCAP   uint8
	FPI      uint8
	DLFEAT   uint8
	NAWUN    uint16 // 0's based
	NAWUPF   uint16 // 0's based
	NACWU    uint16 // 0's based
	NABSN    uint16
	NABO     uint16
	NABSPF   uint16
	NOIOB    uint16 // blocks
	NVMCAP   Uint128
	NPWG     uint16 // 0's based
	NPWA     uint16 // 0's based
	NPDG     uint16 // 0's based
	NPDA     uint16 // 0's based
	NOWS     uint16 // 0's based
	MSSRL    uint16
	MCL      uint32
	MSRC     uint8
	ANAGRPID uint32
	NSATTR   uint8
	NVMSETID uint16
	ENDGID   uint16
	NGUID    NGUID
	EUI64    EUI64
	LBAF     [maxLBAFormats]LBAFormat
}

func (d *IdentifyNamespace) layout(x codec) {
	x.u64(0, &d.NSZE)
	x.u64(8, &d.NCAP)
	x.u64(16, &d.NUSE)
	x.u8(24, &d.NSFEAT)
	x.u8(25, &d.NLBAF)
	x.u8(26, &d.FLBAS)
	x.u8(27, &d.MC)
	x.u8(28, &d.DPC)
	x.u8(29, &d.DPS)
	x.u8(30, &d.NMIC)
	x.u8(31, &d.RESCAP)
	x.u8(32, &d.FPI)
	x.u8(33, &d.DLFEAT)
	x.u16(34, &d.NAWUN)
	x.u16(36, &d.NAWUPF)
	x.u16(38, &d.NACWU)
	x.u16(40, &d.NABSN)
	x.u16(42, &d.NABO)
	x.u16(44, &d.NABSPF)
	x.u16(46, &d.NOIOB)
	x.u128(48, &d.NVMCAP)
	x.u16(64, &d.NPWG)
	x.u16(66, &d.NPWA)
	x.u16(68, &d.NPDG)
	x.u16(70, &d.NPDA)
	x.u16(72, &d.NOWS)
	x.u16(74, &d.MSSRL)
	x.u32(76, &d.MCL)
	x.u8(80, &d.MSRC)
	x.u32(92, &d.ANAGRPID)
	x.u8(99, &d.NSATTR)
	x.u16(100, &d.NVMSETID)
	x.u16(102, &d.ENDGID)
	x.bytes(104, d.NGUID[:])
	x.bytes(120, d.EUI64[:])
	for i := range d.LBAF {
		f, off := &d.LBAF[i], identifyLBAFStart+4*i
		x.u16(off, &f.MS)
		x.u8(off+2, &f.LBADS)
		x.u8(off+3, &f.RP)
	}
}

// AppendBinary appends the 4096 bytes. The error is always nil.
func (d *IdentifyNamespace) AppendBinary(b []byte) ([]byte, error) {
	all, part := grow(b, IdentifySize)
	d.layout(codec{part, true})
	return all, nil
}

// UnmarshalBinary parses the 4096 bytes. Its only error is ErrShort.
func (d *IdentifyNamespace) UnmarshalBinary(b []byte) error {
	if err := short("identify namespace", b, IdentifySize); err != nil {
		return err
	}
	d.layout(codec{b: b})
	return nil
}

// Format returns the LBA format in use. It fails if FLBAS names one that is not
// there, or one whose block size is no power of two from 512 bytes to 2 GiB.
func (d *IdentifyNamespace) Format() (LBAFormat, error) {
	i := d.FLBAS & 0xF
	if d.NLBAF >= 16 {
		i |= d.FLBAS >> 1 & 0x30 // bits 6:5 are the upper ones of the index
	}
	if i > d.NLBAF {
		return LBAFormat{}, fmt.Errorf("identify namespace: %w: FLBAS names format %d of %d", ErrInvalid, i, int(d.NLBAF)+1)
	}
	f := d.LBAF[i] // i is at most 63
	if f.LBADS < 9 || f.LBADS > 31 {
		return LBAFormat{}, fmt.Errorf("identify namespace: %w: block size 2^%d", ErrInvalid, f.LBADS)
	}
	return f, nil
}

// MaxNamespaceList is the largest number of namespaces in one list.
const MaxNamespaceList = IdentifySize / 4

// AppendNamespaceList appends the 4096-byte list of CNS 0x02: the first 1024 of
// nsids, which must be ascending and not contain 0, and zeros behind.
func AppendNamespaceList(b []byte, nsids []uint32) []byte {
	all, part := grow(b, IdentifySize)
	for i := range nsids[:min(len(nsids), MaxNamespaceList)] {
		codec{part, true}.u32(4*i, &nsids[i])
	}
	return all
}

// NamespaceList returns the entries of a namespace list (CNS 0x02) up to the
// first zero. It stops too at one that is not larger than the one before, so
// that a host which continues after the last entry cannot be kept going for
// ever. The bytes are read while the iterator runs.
func NamespaceList(b []byte) iter.Seq[uint32] {
	return func(yield func(uint32) bool) {
		var last uint32
		for range MaxNamespaceList {
			if len(b) < 4 {
				return
			}
			n := le32(b)
			if n <= last || !yield(n) {
				return
			}
			last, b = n, b[4:]
		}
	}
}

// NIDType is the type of a namespace identification descriptor.
type NIDType uint8

// Descriptor types.
const (
	NIDEUI64 NIDType = 1
	NIDNGUID NIDType = 2
	NIDUUID  NIDType = 3
	NIDCSI   NIDType = 4
)

// size returns the length that NIDL must have, 0 for an unknown type.
func (t NIDType) size() int {
	switch t {
	case NIDEUI64:
		return 8
	case NIDNGUID, NIDUUID:
		return 16
	case NIDCSI:
		return 1
	}
	return 0
}

func (t NIDType) String() string {
	switch t {
	case NIDEUI64:
		return "EUI64"
	case NIDNGUID:
		return "NGUID"
	case NIDUUID:
		return "UUID"
	case NIDCSI:
		return "CSI"
	}
	return "NIDType(" + strconv.Itoa(int(t)) + ")"
}

// NamespaceIDs is Identify data of CNS 0x03, the namespace identification
// descriptor list. A zero identifier is not written.
type NamespaceIDs struct {
	EUI64  EUI64
	NGUID  NGUID
	UUID   UUID
	CSI    CSI
	HasCSI bool // write CSI even though it is 0; obligatory with CAP.CSS bit 6
}

// AppendBinary appends the 4096-byte list. The error is always nil.
func (d *NamespaceIDs) AppendBinary(b []byte) ([]byte, error) {
	all, part := grow(b, IdentifySize)
	off := 0
	add := func(t NIDType, id []byte) {
		part[off], part[off+1] = byte(t), byte(len(id))
		off += 4 + copy(part[off+4:], id)
	}
	if !d.EUI64.IsZero() {
		add(NIDEUI64, d.EUI64[:])
	}
	if !d.NGUID.IsZero() {
		add(NIDNGUID, d.NGUID[:])
	}
	if !d.UUID.IsZero() {
		add(NIDUUID, d.UUID[:])
	}
	if d.HasCSI || d.CSI != 0 {
		add(NIDCSI, []byte{byte(d.CSI)})
	}
	return all, nil
}

// UnmarshalBinary parses a descriptor list, see [NamespaceDescriptors]. It
// returns ErrInvalid for one that ends in a malformed descriptor; what stood
// before it has been taken then. Of two descriptors of a type the first counts.
func (d *NamespaceIDs) UnmarshalBinary(b []byte) error {
	*d = NamespaceIDs{}
	var seen [5]bool
	for t, id := range NamespaceDescriptors(b) {
		if t.size() == 0 {
			continue
		}
		if len(id) != t.size() {
			return fmt.Errorf("namespace identification descriptors: %w: %d bytes of %s", ErrInvalid, len(id), t)
		}
		if seen[t] {
			continue
		}
		seen[t] = true
		switch t {
		case NIDEUI64:
			d.EUI64 = EUI64(id)
		case NIDNGUID:
			d.NGUID = NGUID(id)
		case NIDUUID:
			d.UUID = UUID(id)
		case NIDCSI:
			d.CSI, d.HasCSI = CSI(id[0]), true
		}
	}
	return nil
}

// NamespaceDescriptors returns type and identifier of each descriptor in a list,
// up to one with length zero or one that does not fit; at most 4096 bytes are
// looked at. The lengths of known types are not checked. The identifiers are
// part of b.
func NamespaceDescriptors(b []byte) iter.Seq2[NIDType, []byte] {
	return func(yield func(NIDType, []byte) bool) {
		b := b[:min(len(b), IdentifySize)]
		for len(b) >= 4 {
			n := int(b[1])
			if n == 0 || n > len(b)-4 {
				return
			}
			if !yield(NIDType(b[0]), b[4:4+n:4+n]) {
				return
			}
			b = b[4+n:]
		}
	}
}

// IdentifyNVMController is Identify data of CNS 0x06 for the NVM command set, the
// limits of commands without data transfer. 0 in a field is no limit of its own.
type IdentifyNVMController struct {
	VSL   uint8  // Verify: 4 KiB << VSL
	WZSL  uint8  // Write Zeroes: 4 KiB << WZSL; with 0 hosts use MDTS
	WUSL  uint8  // Write Uncorrectable: 4 KiB << WUSL
	DMRL  uint8  // ranges per Dataset Management
	DMRSL uint32 // blocks per range
	DMSL  uint64 // blocks per Dataset Management
}

func (d *IdentifyNVMController) layout(x codec) {
	x.u8(0, &d.VSL)
	x.u8(1, &d.WZSL)
	x.u8(2, &d.WUSL)
	x.u8(3, &d.DMRL)
	x.u32(4, &d.DMRSL)
	x.u64(8, &d.DMSL)
}

// AppendBinary appends the 4096 bytes. The error is always nil.
func (d *IdentifyNVMController) AppendBinary(b []byte) ([]byte, error) {
	all, part := grow(b, IdentifySize)
	d.layout(codec{part, true})
	return all, nil
}

// UnmarshalBinary parses the 4096 bytes. Its only error is ErrShort.
func (d *IdentifyNVMController) UnmarshalBinary(b []byte) error {
	if err := short("identify NVM controller", b, IdentifySize); err != nil {
		return err
	}
	d.layout(codec{b: b})
	return nil
}

// Bits of IdentifyIndependentNamespace.
const (
	IndependentRotational   = 1 << 4 // NSFEAT
	IndependentNoWriteCache = 1 << 5 // NSFEAT
	NSTATReady              = 1 << 0
)

// IdentifyIndependentNamespace is Identify data of CNS 0x08, the command set
// independent part of a namespace.
type IdentifyIndependentNamespace struct {
	NSFEAT   uint8
	NMIC     uint8
	RESCAP   uint8
	FPI      uint8
	ANAGRPID uint32
	NSATTR   uint8
	NVMSETID uint16
	ENDGID   uint16
	NSTAT    uint8 // without NSTATReady a host hides the namespace
}

func (d *IdentifyIndependentNamespace) layout(x codec) {
	x.u8(0, &d.NSFEAT)
	x.u8(1, &d.NMIC)
	x.u8(2, &d.RESCAP)
	x.u8(3, &d.FPI)
	x.u32(4, &d.ANAGRPID)
	x.u8(8, &d.NSATTR)
	x.u16(10, &d.NVMSETID)
	x.u16(12, &d.ENDGID)
	x.u8(14, &d.NSTAT)
}

// AppendBinary appends the 4096 bytes. The error is always nil.
func (d *IdentifyIndependentNamespace) AppendBinary(b []byte) ([]byte, error) {
	all, part := grow(b, IdentifySize)
	d.layout(codec{part, true})
	return all, nil
}

// UnmarshalBinary parses the 4096 bytes. Its only error is ErrShort.
func (d *IdentifyIndependentNamespace) UnmarshalBinary(b []byte) error {
	if err := short("identify independent namespace", b, IdentifySize); err != nil {
		return err
	}
	d.layout(codec{b: b})
	return nil
}
