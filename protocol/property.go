package protocol

import "time"

// Property is the offset of a controller property.
type Property uint32

// Controller properties.
const (
	PropertyCAP  Property = 0x00
	PropertyVS   Property = 0x08
	PropertyCC   Property = 0x14
	PropertyCSTS Property = 0x1C
	PropertyNSSR Property = 0x20
	PropertyCRTO Property = 0x68
)

// Size returns the size of the property in bytes: 8 for CAP, 4 for the others,
// also for those this package does not know.
func (p Property) Size() int {
	if p == PropertyCAP {
		return 8
	}
	return 4
}

func (p Property) String() string {
	switch p {
	case PropertyCAP:
		return "CAP"
	case PropertyVS:
		return "VS"
	case PropertyCC:
		return "CC"
	case PropertyCSTS:
		return "CSTS"
	case PropertyNSSR:
		return "NSSR"
	case PropertyCRTO:
		return "CRTO"
	}
	return "Property(" + hexUint(uint64(p)) + ")"
}

// NSSRReset is the value ("NVMe") that resets the NVM subsystem when written to
// NSSR.
const NSSRReset = 0x4E564D65

// field returns bits hi:lo of v.
func field(v uint64, hi, lo uint) uint64 { return v >> lo & (1<<(hi-lo+1) - 1) }

// with returns v with bits hi:lo set to n, cut to the field.
func with(v uint64, hi, lo uint, n uint64) uint64 {
	m := uint64(1)<<(hi-lo+1) - 1
	return v&^(m<<lo) | n&m<<lo
}

func bit(on bool) uint64 {
	if on {
		return 1
	}
	return 0
}

// CAP is the Controller Capabilities property. The With methods return a changed
// copy; a value too large for its field is cut.
type CAP uint64

// MQES returns the largest queue size, 0's based.
func (c CAP) MQES() uint16 { return uint16(c) }

// WithMQES sets the largest queue size, 0's based.
func (c CAP) WithMQES(n uint16) CAP { return CAP(with(uint64(c), 15, 0, uint64(n))) }

// CQR returns Contiguous Queues Required.
func (c CAP) CQR() bool { return field(uint64(c), 16, 16) != 0 }

// WithCQR sets Contiguous Queues Required.
func (c CAP) WithCQR(on bool) CAP { return CAP(with(uint64(c), 16, 16, bit(on))) }

// TO returns how long RDY may take to follow EN, a multiple of 500 ms.
func (c CAP) TO() time.Duration {
	return time.Duration(field(uint64(c), 31, 24)) * 500 * time.Millisecond
}

// WithTO sets how long RDY may take: rounded up to 500 ms, at most 127.5 s.
func (c CAP) WithTO(d time.Duration) CAP {
	return CAP(with(uint64(c), 31, 24, uint64(halfSeconds(d, 255))))
}

// DSTRD returns the doorbell stride; 0 on fabrics.
func (c CAP) DSTRD() uint8 { return uint8(field(uint64(c), 35, 32)) }

// CSS returns the command sets supported, see CSSNVM and its neighbours.
func (c CAP) CSS() uint8 { return uint8(field(uint64(c), 44, 37)) }

// WithCSS sets the command sets supported.
func (c CAP) WithCSS(n uint8) CAP { return CAP(with(uint64(c), 44, 37, uint64(n))) }

// Bits of CAP.CSS.
const (
	CSSNVM       = 1 << 0 // the NVM command set
	CSSCommand   = 1 << 6 // one or more I/O command sets (CSI)
	CSSAdminOnly = 1 << 7
)

// MPSMIN returns the smallest memory page as a shift over 4 KiB.
func (c CAP) MPSMIN() uint8 { return uint8(field(uint64(c), 51, 48)) }

// MPSMAX returns the largest memory page as a shift over 4 KiB.
func (c CAP) MPSMAX() uint8 { return uint8(field(uint64(c), 55, 52)) }

// CRWMS returns Controller Ready With Media Support: CRTO is valid.
func (c CAP) CRWMS() bool { return field(uint64(c), 59, 59) != 0 }

// CRIMS returns Controller Ready Independent of Media Support.
func (c CAP) CRIMS() bool { return field(uint64(c), 60, 60) != 0 }

func halfSeconds(d time.Duration, limit time.Duration) time.Duration {
	const unit = 500 * time.Millisecond
	return min(max((d+unit-1)/unit, 0), limit)
}

// Version is the VS property and Identify Controller VER.
type Version uint32

// Versions of the base specification.
const (
	Version1_3 Version = 0x00010300
	Version1_4 Version = 0x00010400
	Version2_0 Version = 0x00020000
)

func (v Version) String() string {
	s := utoa(uint64(v>>16)) + "." + utoa(uint64(v>>8&0xFF))
	if t := v & 0xFF; t != 0 {
		s += "." + utoa(uint64(t))
	}
	return s
}

// CC is the Controller Configuration property.
type CC uint32

// CCDefault is what a host writes, without EN: the NVM command set, 4 KiB pages,
// 64-byte commands and 16-byte completions.
const CCDefault CC = 0x00460000

// Shutdown notifications, CC.SHN.
const (
	SHNNone   = 0
	SHNNormal = 1
	SHNAbrupt = 2
)

// EN returns Enable.
func (c CC) EN() bool { return c&1 != 0 }

// WithEN sets Enable.
func (c CC) WithEN(on bool) CC { return CC(with(uint64(c), 0, 0, bit(on))) }

// CSS returns the selected command sets: 0 NVM, 6 all, 7 admin only.
func (c CC) CSS() uint8 { return uint8(field(uint64(c), 6, 4)) }

// MPS returns the memory page size as a shift over 4 KiB.
func (c CC) MPS() uint8 { return uint8(field(uint64(c), 10, 7)) }

// AMS returns the arbitration mechanism.
func (c CC) AMS() uint8 { return uint8(field(uint64(c), 13, 11)) }

// SHN returns the shutdown notification.
func (c CC) SHN() uint8 { return uint8(field(uint64(c), 15, 14)) }

// WithSHN sets the shutdown notification.
func (c CC) WithSHN(n uint8) CC { return CC(with(uint64(c), 15, 14, uint64(n))) }

// IOSQES returns the I/O command size as a power of two; 6.
func (c CC) IOSQES() uint8 { return uint8(field(uint64(c), 19, 16)) }

// IOCQES returns the I/O completion size as a power of two; 4.
func (c CC) IOCQES() uint8 { return uint8(field(uint64(c), 23, 20)) }

// CRIME returns Controller Ready Independent of Media Enable.
func (c CC) CRIME() bool { return c&(1<<24) != 0 }

// CSTS is the Controller Status property.
type CSTS uint32

// Shutdown states, CSTS.SHST.
const (
	SHSTNone       = 0
	SHSTInProgress = 1
	SHSTComplete   = 2
)

// RDY returns Ready.
func (c CSTS) RDY() bool { return c&1 != 0 }

// WithRDY sets Ready.
func (c CSTS) WithRDY(on bool) CSTS { return CSTS(with(uint64(c), 0, 0, bit(on))) }

// CFS returns Controller Fatal Status.
func (c CSTS) CFS() bool { return c&2 != 0 }

// WithCFS sets Controller Fatal Status.
func (c CSTS) WithCFS(on bool) CSTS { return CSTS(with(uint64(c), 1, 1, bit(on))) }

// SHST returns the shutdown state.
func (c CSTS) SHST() uint8 { return uint8(field(uint64(c), 3, 2)) }

// WithSHST sets the shutdown state.
func (c CSTS) WithSHST(n uint8) CSTS { return CSTS(with(uint64(c), 3, 2, uint64(n))) }

// NSSRO returns NVM Subsystem Reset Occurred.
func (c CSTS) NSSRO() bool { return c&(1<<4) != 0 }

// PP returns Processing Paused.
func (c CSTS) PP() bool { return c&(1<<5) != 0 }

// CRTO is the Controller Ready Timeouts property.
type CRTO uint32

// CRWMT returns how long ready with media may take.
func (c CRTO) CRWMT() time.Duration { return time.Duration(c&0xFFFF) * 500 * time.Millisecond }

// CRIMT returns how long ready independent of media may take.
func (c CRTO) CRIMT() time.Duration { return time.Duration(c>>16) * 500 * time.Millisecond }

// NewCRTO returns the timeouts rounded up to 500 ms.
func NewCRTO(withMedia, independent time.Duration) CRTO {
	return CRTO(halfSeconds(withMedia, 0xFFFF)) | CRTO(halfSeconds(independent, 0xFFFF))<<16
}
