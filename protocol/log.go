package protocol

import (
	"fmt"
	"iter"
	"strconv"
)

// LogID is LID, a log page identifier.
type LogID uint8

// Log pages.
const (
	LogSupportedPages    LogID = 0x00
	LogError             LogID = 0x01
	LogSmart             LogID = 0x02 // SMART / Health Information
	LogFirmwareSlot      LogID = 0x03
	LogChangedNamespaces LogID = 0x04
	LogEffects           LogID = 0x05 // Commands Supported and Effects
	LogANA               LogID = 0x0C // Asymmetric Namespace Access
	LogDiscovery         LogID = 0x70
	LogReservation       LogID = 0x80
)

func (l LogID) String() string {
	switch l {
	case LogSupportedPages:
		return "Supported Log Pages"
	case LogError:
		return "Error Information"
	case LogSmart:
		return "SMART / Health Information"
	case LogFirmwareSlot:
		return "Firmware Slot Information"
	case LogChangedNamespaces:
		return "Changed Namespace List"
	case LogEffects:
		return "Commands Supported and Effects"
	case LogANA:
		return "Asymmetric Namespace Access"
	case LogDiscovery:
		return "Discovery"
	case LogReservation:
		return "Reservation Notification"
	}
	return "LogID(" + hexByte(uint8(l)) + ")"
}

// LogWindow returns the part of a log page that a Get Log Page command asks for:
// n bytes from off (LogLength and LPO), cut at the page's end. What is missing
// to n is zeros, which the caller has to deliver. An offset beyond the page gives
// nothing.
func LogWindow(page []byte, off, n uint64) []byte {
	size := uint64(len(page))
	if off >= size {
		return nil
	}
	return page[off : off+min(n, size-off)]
}

// Sizes of log pages in bytes.
const (
	SupportedLogPagesSize    = 1024
	ErrorLogEntrySize        = 64
	SmartLogSize             = 512
	FirmwareSlotLogSize      = 512
	ChangedNamespacesLogSize = 4096
	EffectsLogSize           = 4096
	ReservationLogSize       = 64
)

// AppendSupportedLogPages appends the 1024-byte page LogSupportedPages.
func AppendSupportedLogPages(b []byte, pages ...LogID) []byte {
	all, part := grow(b, SupportedLogPagesSize)
	for _, p := range pages {
		part[4*int(p)] = 1
	}
	return all
}

// LogPageSupported looks a page up in LogSupportedPages.
func LogPageSupported(b []byte, p LogID) bool {
	off := 4 * int(p)
	return off < len(b) && b[off]&1 != 0
}

// ErrorLogEntry is one 64-byte entry of LogError; the newest comes first.
type ErrorLogEntry struct {
	Count     uint64 // 0 is an unused entry
	SQID      uint16
	CID       uint16
	Status    Status
	Location  uint16 // byte in bits 7:0, bit in 10:8 of the command's field
	LBA       uint64
	NSID      uint32
	Vendor    uint8
	TRTYPE    TransportType
	Command   uint64 // command specific information
	Transport uint16 // transport specific information
}

func (d *ErrorLogEntry) layout(x codec) {
	x.u64(0, &d.Count)
	x.u16(8, &d.SQID)
	x.u16(10, &d.CID)
	w := d.Status.Wire(false)
	x.u16(12, &w)
	d.Status = StatusFromWire(w)
	x.u16(14, &d.Location)
	x.u64(16, &d.LBA)
	x.u32(24, &d.NSID)
	x.u8(28, &d.Vendor)
	x.u8(29, (*uint8)(&d.TRTYPE))
	x.u64(32, &d.Command)
	x.u16(40, &d.Transport)
}

// AppendBinary appends the 64 bytes. The error is always nil.
func (d *ErrorLogEntry) AppendBinary(b []byte) ([]byte, error) {
	all, part := grow(b, ErrorLogEntrySize)
	d.layout(codec{part, true})
	return all, nil
}

// UnmarshalBinary parses one entry. Its only error is ErrShort.
func (d *ErrorLogEntry) UnmarshalBinary(b []byte) error {
	if err := short("error log entry", b, ErrorLogEntrySize); err != nil {
		return err
	}
	d.layout(codec{b: b})
	return nil
}

// Bits of SmartLog.CriticalWarning.
const (
	SmartSpareLow     = 1 << 0
	SmartTemperature  = 1 << 1
	SmartUnreliable   = 1 << 2
	SmartReadOnly     = 1 << 3
	SmartBackupFailed = 1 << 4
)

// SmartLog is the 512-byte page LogSmart.
type SmartLog struct {
	CriticalWarning    uint8
	Temperature        uint16 // K, 0 if not known
	AvailableSpare     uint8  // %
	SpareThreshold     uint8  // %
	PercentageUsed     uint8
	DataUnitsRead      Uint128 // thousands of 512 bytes, rounded up
	DataUnitsWritten   Uint128 // thousands of 512 bytes, rounded up
	HostReads          Uint128 // commands
	HostWrites         Uint128 // commands
	BusyTime           Uint128 // minutes
	PowerCycles        Uint128
	PowerOnHours       Uint128
	UnsafeShutdowns    Uint128
	MediaErrors        Uint128
	ErrorLogEntries    Uint128
	WarningTempTime    uint32 // minutes
	CriticalTempTime   uint32 // minutes
	TemperatureSensors [8]uint16
}

func (d *SmartLog) layout(x codec) {
	x.u8(0, &d.CriticalWarning)
	x.u16(1, &d.Temperature)
	x.u8(3, &d.AvailableSpare)
	x.u8(4, &d.SpareThreshold)
	x.u8(5, &d.PercentageUsed)
	x.u128(32, &d.DataUnitsRead)
	x.u128(48, &d.DataUnitsWritten)
	x.u128(64, &d.HostReads)
	x.u128(80, &d.HostWrites)
	x.u128(96, &d.BusyTime)
	x.u128(112, &d.PowerCycles)
	x.u128(128, &d.PowerOnHours)
	x.u128(144, &d.UnsafeShutdowns)
	x.u128(160, &d.MediaErrors)
	x.u128(176, &d.ErrorLogEntries)
	x.u32(192, &d.WarningTempTime)
	x.u32(196, &d.CriticalTempTime)
	for i := range d.TemperatureSensors {
		x.u16(200+2*i, &d.TemperatureSensors[i])
	}
}

// AppendBinary appends the 512 bytes. The error is always nil.
func (d *SmartLog) AppendBinary(b []byte) ([]byte, error) {
	all, part := grow(b, SmartLogSize)
	d.layout(codec{part, true})
	return all, nil
}

// UnmarshalBinary parses the 512 bytes. Its only error is ErrShort.
func (d *SmartLog) UnmarshalBinary(b []byte) error {
	if err := short("SMART log", b, SmartLogSize); err != nil {
		return err
	}
	d.layout(codec{b: b})
	return nil
}

// SmartDataUnits converts bytes to the unit of DataUnitsRead and
// DataUnitsWritten: thousands of 512 bytes, rounded up.
func SmartDataUnits(bytes uint64) Uint128 {
	const unit = 512 * 1000
	n := bytes / unit
	if bytes%unit != 0 {
		n++
	}
	return Uint128{Lo: n}
}

// FirmwareSlotLog is the 512-byte page LogFirmwareSlot.
type FirmwareSlotLog struct {
	AFI       uint8     // active slot in bits 2:0, next in 6:4
	Revisions [7]string // of slots 1 to 7, 8 ASCII characters each; empty is unused
}

func (d *FirmwareSlotLog) layout(x codec) {
	x.u8(0, &d.AFI)
	for i := range d.Revisions {
		if x.put && d.Revisions[i] == "" {
			continue // an unused slot is zeros, not spaces
		}
		x.ascii(8+8*i, 8, &d.Revisions[i])
	}
}

// AppendBinary appends the 512 bytes. The error is always nil.
func (d *FirmwareSlotLog) AppendBinary(b []byte) ([]byte, error) {
	all, part := grow(b, FirmwareSlotLogSize)
	d.layout(codec{part, true})
	return all, nil
}

// UnmarshalBinary parses the 512 bytes. Its only error is ErrShort.
func (d *FirmwareSlotLog) UnmarshalBinary(b []byte) error {
	if err := short("firmware slot log", b, FirmwareSlotLogSize); err != nil {
		return err
	}
	d.layout(codec{b: b})
	return nil
}

// AppendChangedNamespaces appends the 4096-byte page LogChangedNamespaces: nsids
// in order of their first change, or the one entry 0xFFFFFFFF if there are more
// than 1024.
func AppendChangedNamespaces(b []byte, nsids []uint32) []byte {
	all, part := grow(b, ChangedNamespacesLogSize)
	if len(nsids) > MaxNamespaceList {
		nsids = []uint32{NSIDAll}
	}
	for i := range nsids {
		codec{part, true}.u32(4*i, &nsids[i])
	}
	return all
}

// ChangedNamespaces returns the entries of LogChangedNamespaces up to the first
// zero. The single entry NSIDAll says that any namespace may have changed.
func ChangedNamespaces(b []byte) iter.Seq[uint32] {
	return func(yield func(uint32) bool) {
		b := b[:min(len(b), ChangedNamespacesLogSize)]
		for ; len(b) >= 4; b = b[4:] {
			n := le32(b)
			if n == 0 || !yield(n) {
				return
			}
		}
	}
}

// Effects is what the effects log tells about one opcode.
type Effects uint32

// Bits of Effects.
const (
	EffectsSupported  Effects = 1 << 0 // CSUPP
	EffectsLBContent  Effects = 1 << 1 // LBCC: changes the content of blocks
	EffectsNamespace  Effects = 1 << 2 // NCC: changes capabilities of a namespace
	EffectsInventory  Effects = 1 << 3 // NIC: adds or removes namespaces
	EffectsController Effects = 1 << 4 // CCC: changes capabilities of the controller
)

// CSE returns how the command must be kept apart from others, 3 bits.
func (e Effects) CSE() uint8 { return uint8(e>>16) & 7 }

// EffectsLog is the 4096-byte page LogEffects.
type EffectsLog struct {
	Admin [256]Effects // by AdminOpcode
	IO    [256]Effects // by Opcode
}

func (d *EffectsLog) layout(x codec) {
	for i := range d.Admin {
		x.u32(4*i, (*uint32)(&d.Admin[i]))
		x.u32(1024+4*i, (*uint32)(&d.IO[i]))
	}
}

// AppendBinary appends the 4096 bytes. The error is always nil.
func (d *EffectsLog) AppendBinary(b []byte) ([]byte, error) {
	all, part := grow(b, EffectsLogSize)
	d.layout(codec{part, true})
	return all, nil
}

// UnmarshalBinary parses the 4096 bytes. Its only error is ErrShort.
func (d *EffectsLog) UnmarshalBinary(b []byte) error {
	if err := short("effects log", b, EffectsLogSize); err != nil {
		return err
	}
	d.layout(codec{b: b})
	return nil
}

// Sizes of the discovery log page in bytes.
const (
	DiscoveryLogHeaderSize = 1024
	DiscoveryLogEntrySize  = 1024
	// DiscoveryLogPeek is what a host reads to see whether the page changed: the
	// generation counter, the number of records and the format, in dwords.
	DiscoveryLogPeek = 20
)

// DiscoveryLogHeader is the 1024-byte head of the page LogDiscovery.
type DiscoveryLogHeader struct {
	GENCTR uint64 // increments with each change and wraps
	NUMREC uint64 // entries that follow; compare it with a bound before use
}

// AppendBinary appends the 1024 bytes. The error is always nil.
func (d *DiscoveryLogHeader) AppendBinary(b []byte) ([]byte, error) {
	all, part := grow(b, DiscoveryLogHeaderSize)
	codec{part, true}.u64(0, &d.GENCTR)
	codec{part, true}.u64(8, &d.NUMREC)
	return all, nil
}

// UnmarshalBinary parses the header; DiscoveryLogPeek bytes are enough. It
// returns ErrFormat for a record format other than 0.
func (d *DiscoveryLogHeader) UnmarshalBinary(b []byte) error {
	if err := short("discovery log", b, 18); err != nil {
		return err
	}
	if v := le16(b[16:]); v != 0 {
		return fmt.Errorf("discovery log: %w %d", ErrFormat, v)
	}
	d.GENCTR, d.NUMREC = le64(b), le64(b[8:])
	return nil
}

// TransportType is TRTYPE.
type TransportType uint8

// Transport types.
const (
	TransportRDMA TransportType = 1
	TransportFC   TransportType = 2
	TransportTCP  TransportType = 3
	TransportLoop TransportType = 254
)

func (t TransportType) String() string {
	switch t {
	case TransportRDMA:
		return "rdma"
	case TransportFC:
		return "fc"
	case TransportTCP:
		return "tcp"
	case TransportLoop:
		return "loop"
	}
	return "TransportType(" + strconv.Itoa(int(t)) + ")"
}

// AddressFamily is ADRFAM.
type AddressFamily uint8

// Address families.
const (
	FamilyIPv4 AddressFamily = 1
	FamilyIPv6 AddressFamily = 2
	FamilyIB   AddressFamily = 3
	FamilyFC   AddressFamily = 4
	FamilyLoop AddressFamily = 254
)

func (f AddressFamily) String() string {
	switch f {
	case FamilyIPv4:
		return "ipv4"
	case FamilyIPv6:
		return "ipv6"
	case FamilyIB:
		return "ib"
	case FamilyFC:
		return "fc"
	case FamilyLoop:
		return "loop"
	}
	return "AddressFamily(" + strconv.Itoa(int(f)) + ")"
}

// SubsystemType is SUBTYPE.
type SubsystemType uint8

// Subsystem types.
const (
	SubsystemReferral  SubsystemType = 1 // another discovery subsystem
	SubsystemNVM       SubsystemType = 2
	SubsystemDiscovery SubsystemType = 3 // the discovery subsystem that was asked
)

func (t SubsystemType) String() string {
	switch t {
	case SubsystemReferral:
		return "discovery subsystem referral"
	case SubsystemNVM:
		return "nvme subsystem"
	case SubsystemDiscovery:
		return "current discovery subsystem"
	}
	return "SubsystemType(" + strconv.Itoa(int(t)) + ")"
}

// Bits of TREQ.
const (
	TREQSecureRequired    = 1 << 0
	TREQSecureNotRequired = 2 << 0
	TREQSecureMask        = 3 << 0
	TREQDisableSQFlow     = 1 << 2
)

// Bits of EFLAGS.
const (
	EFLAGSDuplicate  = 1 << 0 // DUPRETINFO
	EFLAGSPersistent = 1 << 1 // EPCSD
	EFLAGSNoCDC      = 1 << 2 // NCC
)

// RDMA values of TSAS.
const (
	RDMAQPConnected = 1 // RDMA_QPTYPE
	RDMAQPDatagram  = 2

	RDMAProviderAny    = 1 // RDMA_PRTYPE: not specified
	RDMAProviderIB     = 2
	RDMAProviderRoCE   = 3
	RDMAProviderRoCEv2 = 4
	RDMAProviderIWARP  = 5

	RDMACMSRdmaCM = 1 // RDMA_CMS
)

// DiscoveryLogEntry is one 1024-byte entry of the page LogDiscovery; the
// transport specific part is that of RDMA.
type DiscoveryLogEntry struct {
	TRTYPE  TransportType
	ADRFAM  AddressFamily
	SUBTYPE SubsystemType
	TREQ    uint8
	PORTID  uint16
	CNTLID  uint16 // CNTLIDDynamic or CNTLIDStatic
	ASQSZ   uint16 // entries, not 0's based; 32 or more
	EFLAGS  uint16
	TRSVCID string // 32 characters, the port as text
	SUBNQN  string
	TRADDR  string // 256 characters, a numeric address without brackets

	RDMA_QPTYPE uint8
	RDMA_PRTYPE uint8
	RDMA_CMS    uint8
	RDMA_PKEY   uint16
}

func (d *DiscoveryLogEntry) layout(x codec) {
	x.u8(0, (*uint8)(&d.TRTYPE))
	x.u8(1, (*uint8)(&d.ADRFAM))
	x.u8(2, (*uint8)(&d.SUBTYPE))
	x.u8(3, &d.TREQ)
	x.u16(4, &d.PORTID)
	x.u16(6, &d.CNTLID)
	x.u16(8, &d.ASQSZ)
	x.u16(10, &d.EFLAGS)
	x.text(32, 32, &d.TRSVCID)
	x.nqn(256, &d.SUBNQN)
	x.text(512, 256, &d.TRADDR)
	x.u8(768, &d.RDMA_QPTYPE)
	x.u8(769, &d.RDMA_PRTYPE)
	x.u8(770, &d.RDMA_CMS)
	x.u16(776, &d.RDMA_PKEY)
}

// AppendBinary appends the 1024 bytes. It refuses texts that do not fit: a cut
// name or address is another one.
func (d *DiscoveryLogEntry) AppendBinary(b []byte) ([]byte, error) {
	if err := CheckNQN(d.SUBNQN); err != nil {
		return b, fmt.Errorf("discovery log entry: SUBNQN: %w", err)
	}
	if len(d.TRSVCID) > 31 || len(d.TRADDR) > 255 {
		return b, fmt.Errorf("discovery log entry: %w: TRADDR %q or TRSVCID %q is too long", ErrInvalid, d.TRADDR, d.TRSVCID)
	}
	all, part := grow(b, DiscoveryLogEntrySize)
	d.layout(codec{part, true})
	return all, nil
}

// UnmarshalBinary parses one entry; padding of the texts is dropped. Its only
// error is ErrShort: the values are a stranger's, quote them before printing.
func (d *DiscoveryLogEntry) UnmarshalBinary(b []byte) error {
	if err := short("discovery log entry", b, DiscoveryLogEntrySize); err != nil {
		return err
	}
	d.layout(codec{b: b})
	return nil
}
