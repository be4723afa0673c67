package protocol

import "strconv"

// FeatureID is FID.
type FeatureID uint8

// Features.
const (
	FeatureArbitration       FeatureID = 0x01
	FeaturePowerManagement   FeatureID = 0x02
	FeatureTemperature       FeatureID = 0x04
	FeatureErrorRecovery     FeatureID = 0x05
	FeatureVolatileCache     FeatureID = 0x06 // Volatile Write Cache
	FeatureNumberOfQueues    FeatureID = 0x07
	FeatureInterruptCoalesce FeatureID = 0x08
	FeatureInterruptVector   FeatureID = 0x09
	FeatureWriteAtomicity    FeatureID = 0x0A
	FeatureAsyncEventConfig  FeatureID = 0x0B
	FeatureAutonomousPower   FeatureID = 0x0C
	FeatureTimestamp         FeatureID = 0x0E
	FeatureKeepAliveTimer    FeatureID = 0x0F
	FeatureHostBehavior      FeatureID = 0x16
	FeatureHostIdentifier    FeatureID = 0x81
	FeatureReservationMask   FeatureID = 0x82
	FeatureReservationPersis FeatureID = 0x83
	FeatureWriteProtection   FeatureID = 0x84
)

func (f FeatureID) String() string {
	switch f {
	case FeatureArbitration:
		return "Arbitration"
	case FeaturePowerManagement:
		return "Power Management"
	case FeatureTemperature:
		return "Temperature Threshold"
	case FeatureErrorRecovery:
		return "Error Recovery"
	case FeatureVolatileCache:
		return "Volatile Write Cache"
	case FeatureNumberOfQueues:
		return "Number of Queues"
	case FeatureInterruptCoalesce:
		return "Interrupt Coalescing"
	case FeatureInterruptVector:
		return "Interrupt Vector Configuration"
	case FeatureWriteAtomicity:
		return "Write Atomicity Normal"
	case FeatureAsyncEventConfig:
		return "Asynchronous Event Configuration"
	case FeatureAutonomousPower:
		return "Autonomous Power State Transition"
	case FeatureTimestamp:
		return "Timestamp"
	case FeatureKeepAliveTimer:
		return "Keep Alive Timer"
	case FeatureHostBehavior:
		return "Host Behavior Support"
	case FeatureHostIdentifier:
		return "Host Identifier"
	case FeatureReservationMask:
		return "Reservation Notification Mask"
	case FeatureReservationPersis:
		return "Reservation Persistence"
	case FeatureWriteProtection:
		return "Namespace Write Protection Config"
	}
	return "FeatureID(" + hexByte(uint8(f)) + ")"
}

// FeatureSelect is SEL of Get Features.
type FeatureSelect uint8

// Selections.
const (
	SelectCurrent   FeatureSelect = 0
	SelectDefault   FeatureSelect = 1
	SelectSaved     FeatureSelect = 2
	SelectSupported FeatureSelect = 3
)

func (s FeatureSelect) String() string {
	switch s {
	case SelectCurrent:
		return "current"
	case SelectDefault:
		return "default"
	case SelectSaved:
		return "saved"
	case SelectSupported:
		return "supported capabilities"
	}
	return "FeatureSelect(" + strconv.Itoa(int(s)) + ")"
}

// QueueCount is the value of feature Number of Queues: CDW11 of Set Features
// (what the host asks for) and DW0 of the completion (what it may have).
type QueueCount uint32

// NewQueueCount returns the value for sq submission and cq completion queues,
// which are counts of I/O queues and are clipped to 1..65535: 0 and 65536 cannot
// be said.
func NewQueueCount(sq, cq int) QueueCount {
	clip := func(n int) QueueCount { return QueueCount(min(max(n, 1), 65535) - 1) }
	return clip(cq)<<16 | clip(sq)
}

// Valid reports whether neither half is 0xFFFF, which a target refuses as an
// invalid field.
func (q QueueCount) Valid() bool { return q&0xFFFF != 0xFFFF && q>>16 != 0xFFFF }

// SQ returns the number of I/O submission queues, 1..65536.
func (q QueueCount) SQ() int { return int(q&0xFFFF) + 1 }

// CQ returns the number of I/O completion queues, 1..65536.
func (q QueueCount) CQ() int { return int(q>>16) + 1 }

// Pairs returns the number of queue pairs: the smaller of both.
func (q QueueCount) Pairs() int { return min(q.SQ(), q.CQ()) }

// Bits of feature values.
const (
	VolatileCacheEnable  = 1 << 0 // WCE of Volatile Write Cache
	HostIdentifierExtend = 1 << 0 // EXHID: 128-bit host identifier, obligatory on fabrics
)

// AsyncEventConfig is the value of feature Asynchronous Event Configuration, and
// the same bits in Identify Controller OAES.
type AsyncEventConfig uint32

// Bits of AsyncEventConfig.
const (
	EventConfigSmart     AsyncEventConfig = 0x1F    // bits 4:0, SMART critical warnings
	EventConfigNamespace AsyncEventConfig = 1 << 8  // namespace attribute notices
	EventConfigFirmware  AsyncEventConfig = 1 << 9  // firmware activation notices
	EventConfigTelemetry AsyncEventConfig = 1 << 10 // telemetry log notices
	EventConfigANA       AsyncEventConfig = 1 << 11 // asymmetric access change notices
	EventConfigDiscovery AsyncEventConfig = 1 << 31 // discovery log page change
)

// EventType is bits 2:0 of DW0 of a completed Asynchronous Event Request.
type EventType uint8

// Event types.
const (
	EventError     EventType = 0
	EventSmart     EventType = 1
	EventNotice    EventType = 2
	EventImmediate EventType = 3
	EventIO        EventType = 6 // I/O command specific
	EventVendor    EventType = 7
)

// AsyncEvent is DW0 of a completed Asynchronous Event Request.
type AsyncEvent uint32

// The events that fabrics controllers send.
const (
	EventPersistentError    AsyncEvent = 0x00010300
	EventNamespaceChanged   AsyncEvent = 0x00040002
	EventFirmwareActivation AsyncEvent = 0x00030102
	EventANAChanged         AsyncEvent = 0x000C0302
	EventDiscoveryChanged   AsyncEvent = 0x0070F002
)

// NewAsyncEvent builds DW0 from its parts.
func NewAsyncEvent(t EventType, info uint8, log LogID) AsyncEvent {
	return AsyncEvent(t&7) | AsyncEvent(info)<<8 | AsyncEvent(log)<<16
}

// Type returns the event type.
func (e AsyncEvent) Type() EventType { return EventType(e & 7) }

// Info returns the event information.
func (e AsyncEvent) Info() uint8 { return uint8(e >> 8) }

// LogPage returns the log page to read, which also re-arms the event.
func (e AsyncEvent) LogPage() LogID { return LogID(e >> 16) }

func (e AsyncEvent) String() string {
	switch e & 0xFFFF07 {
	case EventPersistentError:
		return "persistent internal error"
	case EventNamespaceChanged:
		return "namespace attribute changed"
	case EventFirmwareActivation:
		return "firmware activation starting"
	case EventANAChanged:
		return "asymmetric namespace access change"
	case EventDiscoveryChanged:
		return "discovery log page change"
	}
	return "event type " + utoa(uint64(e.Type())) + " info " + hexByte(e.Info()) + " log page " + hexByte(uint8(e.LogPage()))
}
