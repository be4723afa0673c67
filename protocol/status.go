package protocol

import "strconv"

// Status is the status field of a completion without the phase bit (NVMe Base,
// "Status Field Definition"): SC in bits 7:0, SCT in 10:8, CRD in 12:11, More in
// 13 and Do Not Retry in 14. It is an error; the zero value is success, so turn
// one into an error by [Status.Err].
type Status uint16

// Fields of a Status.
const (
	StatusCodeMask Status = 0x07FF // SCT and SC
	StatusCRDMask  Status = 0x1800 // command retry delay
	StatusMore     Status = 0x2000 // the error log has more
	StatusDNR      Status = 0x4000 // a retry of the same command would fail too
)

// Status code types, SCT.
const (
	SCTGeneric         = 0
	SCTCommandSpecific = 1
	SCTMedia           = 2
	SCTPath            = 3
	SCTVendor          = 7
)

// Generic command status (SCT 0).
const (
	StatusSuccess                    Status = 0x00
	StatusInvalidOpcode              Status = 0x01
	StatusInvalidField               Status = 0x02
	StatusCommandIDConflict          Status = 0x03
	StatusDataTransferError          Status = 0x04
	StatusAbortedPowerLoss           Status = 0x05
	StatusInternalError              Status = 0x06
	StatusAbortRequested             Status = 0x07
	StatusAbortedSQDeletion          Status = 0x08
	StatusAbortedFailedFused         Status = 0x09
	StatusAbortedMissingFused        Status = 0x0A
	StatusInvalidNamespace           Status = 0x0B // Invalid Namespace or Format
	StatusCommandSequenceError       Status = 0x0C
	StatusInvalidSGLSegment          Status = 0x0D
	StatusInvalidSGLCount            Status = 0x0E // Invalid Number of SGL Descriptors
	StatusDataSGLLengthInvalid       Status = 0x0F
	StatusMetadataSGLLengthInvalid   Status = 0x10
	StatusSGLTypeInvalid             Status = 0x11
	StatusInvalidCMBUse              Status = 0x12
	StatusPRPOffsetInvalid           Status = 0x13
	StatusAtomicWriteUnitExceeded    Status = 0x14
	StatusOperationDenied            Status = 0x15
	StatusSGLOffsetInvalid           Status = 0x16
	StatusHostIDInconsistent         Status = 0x18
	StatusKeepAliveExpired           Status = 0x19
	StatusKeepAliveInvalid           Status = 0x1A
	StatusAbortedPreempt             Status = 0x1B
	StatusSanitizeFailed             Status = 0x1C
	StatusSanitizeInProgress         Status = 0x1D
	StatusSGLGranularityInvalid      Status = 0x1E
	StatusNotSupportedInCMBQueue     Status = 0x1F
	StatusNamespaceWriteProtected    Status = 0x20
	StatusCommandInterrupted         Status = 0x21
	StatusTransientTransportError    Status = 0x22
	StatusProhibitedByLockdown       Status = 0x23
	StatusAdminMediaNotReady         Status = 0x24
	StatusInvalidIOCommandSetGeneric Status = 0x2C // Linux's number for StatusInvalidIOCommandSet
	StatusLBAOutOfRange              Status = 0x80
	StatusCapacityExceeded           Status = 0x81
	StatusNamespaceNotReady          Status = 0x82
	StatusReservationConflict        Status = 0x83
	StatusFormatInProgress           Status = 0x84
)

// Command specific status (SCT 1). From 0x180 the meaning depends on the kind of
// command: the same numbers are one thing to Connect and another to I/O.
const (
	StatusCQInvalid                    Status = 0x100
	StatusInvalidQueueID               Status = 0x101
	StatusInvalidQueueSize             Status = 0x102
	StatusAbortLimitExceeded           Status = 0x103
	StatusAsyncEventLimitExceeded      Status = 0x105
	StatusInvalidFirmwareSlot          Status = 0x106
	StatusInvalidFirmwareImage         Status = 0x107
	StatusInvalidInterruptVector       Status = 0x108
	StatusInvalidLogPage               Status = 0x109
	StatusInvalidFormat                Status = 0x10A
	StatusFirmwareConventionalReset    Status = 0x10B
	StatusInvalidQueueDeletion         Status = 0x10C
	StatusFeatureNotSaveable           Status = 0x10D
	StatusFeatureNotChangeable         Status = 0x10E
	StatusFeatureNotNamespace          Status = 0x10F // Feature Not Namespace Specific
	StatusFirmwareSubsystemReset       Status = 0x110
	StatusFirmwareReset                Status = 0x111
	StatusFirmwareMaxTime              Status = 0x112
	StatusFirmwareProhibited           Status = 0x113
	StatusOverlappingRange             Status = 0x114
	StatusNamespaceNoCapacity          Status = 0x115
	StatusNamespaceIDUnavailable       Status = 0x116
	StatusNamespaceAlreadyAttached     Status = 0x118
	StatusNamespacePrivate             Status = 0x119
	StatusNamespaceNotAttached         Status = 0x11A
	StatusThinProvisioningNotSupported Status = 0x11B
	StatusControllerListInvalid        Status = 0x11C
	StatusSelfTestInProgress           Status = 0x11D
	StatusBootPartitionProhibited      Status = 0x11E
	StatusInvalidControllerID          Status = 0x11F
	StatusInvalidSecondaryState        Status = 0x120
	StatusInvalidControllerResources   Status = 0x121
	StatusInvalidResourceID            Status = 0x122
	StatusSanitizeProhibitedPMR        Status = 0x123
	StatusANAGroupIDInvalid            Status = 0x124
	StatusANAAttachFailed              Status = 0x125
	StatusInsufficientCapacity         Status = 0x126
	StatusNamespaceAttachLimit         Status = 0x127
	StatusProhibitNotSupported         Status = 0x128
	StatusIOCommandSetNotSupported     Status = 0x129
	StatusIOCommandSetNotEnabled       Status = 0x12A
	StatusIOCommandSetCombination      Status = 0x12B
	StatusInvalidIOCommandSet          Status = 0x12C
	StatusIDUnavailable                Status = 0x12D

	StatusConflictingAttributes Status = 0x180 // I/O
	StatusInvalidPI             Status = 0x181 // I/O: Invalid Protection Information
	StatusWriteToReadOnlyRange  Status = 0x182 // I/O
	StatusCommandSizeExceeded   Status = 0x183 // I/O; older name: ONCS Not Supported

	StatusConnectIncompatibleFormat  Status = 0x180 // Fabrics
	StatusConnectControllerBusy      Status = 0x181 // Fabrics
	StatusConnectInvalidParameters   Status = 0x182 // Fabrics; DW0 is a ConnectInvalid
	StatusConnectRestartDiscovery    Status = 0x183 // Fabrics
	StatusConnectInvalidHost         Status = 0x184 // Fabrics
	StatusDisconnectInvalidQueueType Status = 0x185 // Fabrics
	StatusDiscoveryRestart           Status = 0x190 // Fabrics
	StatusAuthenticationRequired     Status = 0x191 // Fabrics
)

// Media and data integrity errors (SCT 2).
const (
	StatusWriteFault           Status = 0x280
	StatusUnrecoveredRead      Status = 0x281
	StatusGuardCheckError      Status = 0x282
	StatusAppTagCheckError     Status = 0x283
	StatusRefTagCheckError     Status = 0x284
	StatusCompareFailure       Status = 0x285
	StatusAccessDenied         Status = 0x286
	StatusDeallocatedBlock     Status = 0x287 // Deallocated or Unwritten Logical Block
	StatusStorageTagCheckError Status = 0x288
)

// Path related status (SCT 3).
const (
	StatusInternalPathError   Status = 0x300
	StatusANAPersistentLoss   Status = 0x301
	StatusANAInaccessible     Status = 0x302
	StatusANATransition       Status = 0x303
	StatusControllerPathError Status = 0x360
	StatusHostPathError       Status = 0x370 // made by a host: the command could not be sent
	StatusAbortedByHost       Status = 0x371 // made by a host: the association was torn down
)

// statusNames has one name per code. Where Fabrics and I/O commands share a
// number, this is the I/O commands' name and fabricsStatusNames has the other.
var statusNames = map[Status]string{
	StatusSuccess:                      "success",
	StatusInvalidOpcode:                "invalid command opcode",
	StatusInvalidField:                 "invalid field in command",
	StatusCommandIDConflict:            "command ID conflict",
	StatusDataTransferError:            "data transfer error",
	StatusAbortedPowerLoss:             "command aborted due to power loss notification",
	StatusInternalError:                "internal error",
	StatusAbortRequested:               "command abort requested",
	StatusAbortedSQDeletion:            "command aborted due to SQ deletion",
	StatusAbortedFailedFused:           "command aborted due to failed fused command",
	StatusAbortedMissingFused:          "command aborted due to missing fused command",
	StatusInvalidNamespace:             "invalid namespace or format",
	StatusCommandSequenceError:         "command sequence error",
	StatusInvalidSGLSegment:            "invalid SGL segment descriptor",
	StatusInvalidSGLCount:              "invalid number of SGL descriptors",
	StatusDataSGLLengthInvalid:         "data SGL length invalid",
	StatusMetadataSGLLengthInvalid:     "metadata SGL length invalid",
	StatusSGLTypeInvalid:               "SGL descriptor type invalid",
	StatusInvalidCMBUse:                "invalid use of controller memory buffer",
	StatusPRPOffsetInvalid:             "PRP offset invalid",
	StatusAtomicWriteUnitExceeded:      "atomic write unit exceeded",
	StatusOperationDenied:              "operation denied",
	StatusSGLOffsetInvalid:             "SGL offset invalid",
	StatusHostIDInconsistent:           "host identifier inconsistent format",
	StatusKeepAliveExpired:             "keep alive timer expired",
	StatusKeepAliveInvalid:             "keep alive timeout invalid",
	StatusAbortedPreempt:               "command aborted due to preempt and abort",
	StatusSanitizeFailed:               "sanitize failed",
	StatusSanitizeInProgress:           "sanitize in progress",
	StatusSGLGranularityInvalid:        "SGL data block granularity invalid",
	StatusNamespaceWriteProtected:      "namespace is write protected",
	StatusCommandInterrupted:           "command interrupted",
	StatusTransientTransportError:      "transient transport error",
	StatusProhibitedByLockdown:         "command prohibited by command and feature lockdown",
	StatusAdminMediaNotReady:           "admin command media not ready",
	StatusInvalidIOCommandSet:          "invalid I/O command set",
	StatusLBAOutOfRange:                "LBA out of range",
	StatusCapacityExceeded:             "capacity exceeded",
	StatusNamespaceNotReady:            "namespace not ready",
	StatusReservationConflict:          "reservation conflict",
	StatusFormatInProgress:             "format in progress",
	StatusCQInvalid:                    "completion queue invalid",
	StatusInvalidQueueID:               "invalid queue identifier",
	StatusInvalidQueueSize:             "invalid queue size",
	StatusAbortLimitExceeded:           "abort command limit exceeded",
	StatusAsyncEventLimitExceeded:      "asynchronous event request limit exceeded",
	StatusInvalidFirmwareSlot:          "invalid firmware slot",
	StatusInvalidFirmwareImage:         "invalid firmware image",
	StatusInvalidInterruptVector:       "invalid interrupt vector",
	StatusInvalidLogPage:               "invalid log page",
	StatusInvalidFormat:                "invalid format",
	StatusFeatureNotSaveable:           "feature identifier not saveable",
	StatusFeatureNotChangeable:         "feature not changeable",
	StatusFeatureNotNamespace:          "feature not namespace specific",
	StatusOverlappingRange:             "overlapping range",
	StatusNamespaceNoCapacity:          "namespace insufficient capacity",
	StatusNamespaceIDUnavailable:       "namespace identifier unavailable",
	StatusNamespaceAlreadyAttached:     "namespace already attached",
	StatusNamespacePrivate:             "namespace is private",
	StatusNamespaceNotAttached:         "namespace not attached",
	StatusThinProvisioningNotSupported: "thin provisioning not supported",
	StatusControllerListInvalid:        "controller list invalid",
	StatusInvalidControllerID:          "invalid controller identifier",
	StatusANAGroupIDInvalid:            "ANA group identifier invalid",
	StatusANAAttachFailed:              "ANA attach failed",
	StatusConflictingAttributes:        "conflicting attributes",
	StatusInvalidPI:                    "invalid protection information",
	StatusWriteToReadOnlyRange:         "attempted write to read only range",
	StatusCommandSizeExceeded:          "command size limit exceeded",
	StatusWriteFault:                   "write fault",
	StatusUnrecoveredRead:              "unrecovered read error",
	StatusGuardCheckError:              "end-to-end guard check error",
	StatusAppTagCheckError:             "end-to-end application tag check error",
	StatusRefTagCheckError:             "end-to-end reference tag check error",
	StatusCompareFailure:               "compare failure",
	StatusAccessDenied:                 "access denied",
	StatusDeallocatedBlock:             "deallocated or unwritten logical block",
	StatusInternalPathError:            "internal path error",
	StatusANAPersistentLoss:            "asymmetric access persistent loss",
	StatusANAInaccessible:              "asymmetric access inaccessible",
	StatusANATransition:                "asymmetric access transition",
	StatusControllerPathError:          "controller pathing error",
	StatusHostPathError:                "host pathing error",
	StatusInvalidIOCommandSetGeneric:   "invalid I/O command set",
	StatusNotSupportedInCMBQueue:       "command not supported for queue in CMB",
	StatusFirmwareConventionalReset:    "firmware activation requires conventional reset",
	StatusInvalidQueueDeletion:         "invalid queue deletion",
	StatusFirmwareSubsystemReset:       "firmware activation requires NVM subsystem reset",
	StatusFirmwareReset:                "firmware activation requires controller level reset",
	StatusFirmwareMaxTime:              "firmware activation requires maximum time violation",
	StatusFirmwareProhibited:           "firmware activation prohibited",
	StatusSelfTestInProgress:           "device self-test in progress",
	StatusBootPartitionProhibited:      "boot partition write prohibited",
	StatusInvalidSecondaryState:        "invalid secondary controller state",
	StatusInvalidControllerResources:   "invalid number of controller resources",
	StatusInvalidResourceID:            "invalid resource identifier",
	StatusSanitizeProhibitedPMR:        "sanitize prohibited while persistent memory region is enabled",
	StatusInsufficientCapacity:         "insufficient capacity",
	StatusNamespaceAttachLimit:         "namespace attachment limit exceeded",
	StatusProhibitNotSupported:         "prohibition of command execution not supported",
	StatusIOCommandSetNotSupported:     "I/O command set not supported",
	StatusIOCommandSetNotEnabled:       "I/O command set not enabled",
	StatusIOCommandSetCombination:      "I/O command set combination rejected",
	StatusIDUnavailable:                "identifier unavailable",
	StatusStorageTagCheckError:         "end-to-end storage tag check error",
	StatusAbortedByHost:                "command aborted by host",
}

var fabricsStatusNames = map[Status]string{
	StatusConnectIncompatibleFormat:  "connect incompatible format",
	StatusConnectControllerBusy:      "connect controller busy",
	StatusConnectInvalidParameters:   "connect invalid parameters",
	StatusConnectRestartDiscovery:    "connect restart discovery",
	StatusConnectInvalidHost:         "connect invalid host",
	StatusDisconnectInvalidQueueType: "disconnect invalid queue type",
	StatusDiscoveryRestart:           "discovery restart",
	StatusAuthenticationRequired:     "authentication required",
}

// StatusFromWire returns the status of the last two bytes of a completion; the
// phase bit is dropped.
func StatusFromWire(v uint16) Status { return Status(v >> 1) }

// Wire returns the last two bytes of a completion. The phase is false on
// fabrics.
func (s Status) Wire(phase bool) uint16 {
	v := uint16(s) << 1
	if phase {
		v |= 1
	}
	return v
}

// OK reports success: SCT and SC are 0, whatever the flags say.
func (s Status) OK() bool { return s&StatusCodeMask == 0 }

// Err returns nil for a success and s for everything else.
func (s Status) Err() error {
	if s.OK() {
		return nil
	}
	return s
}

// Code returns SCT and SC alone, comparable with the constants.
func (s Status) Code() Status { return s & StatusCodeMask }

// SCT returns the status code type.
func (s Status) SCT() uint8 { return uint8(s>>8) & 7 }

// SC returns the status code.
func (s Status) SC() uint8 { return uint8(s) }

// CRD returns the command retry delay, 0..3; 1 to 3 select a time that Identify
// Controller tells.
func (s Status) CRD() uint8 { return uint8(s>>11) & 3 }

// WithCRD returns s with a command retry delay of 0..3.
func (s Status) WithCRD(n uint8) Status { return s&^StatusCRDMask | Status(n&3)<<11 }

// More reports that the error log has an entry for it. It is no error in itself.
func (s Status) More() bool { return s&StatusMore != 0 }

// DoNotRetry reports that a retry would fail too.
func (s Status) DoNotRetry() bool { return s&StatusDNR != 0 }

// WithDNR returns s with Do Not Retry set. Success stays success.
func (s Status) WithDNR() Status {
	if s.OK() {
		return s
	}
	return s | StatusDNR
}

// WithoutDNR returns s without Do Not Retry.
func (s Status) WithoutDNR() Status { return s &^ StatusDNR }

// IsPath reports a path related status: another path, or the same one later, may
// do.
func (s Status) IsPath() bool { return s.SCT() == SCTPath }

// Name returns the specification's name of the code; fabrics tells that it
// answers a Fabrics command, where some numbers mean something else. An unknown
// code gives its numbers.
func (s Status) Name(fabrics bool) string {
	code := s.Code()
	if n, ok := fabricsStatusNames[code]; ok && (fabrics || statusNames[code] == "") {
		return n
	}
	if n, ok := statusNames[code]; ok {
		return n
	}
	return "status SCT " + strconv.Itoa(int(s.SCT())) + " SC " + hexByte(s.SC())
}

// Error returns the name, the number and the flags. It does not know the
// command: a number that is shared by Fabrics and I/O commands gives both names.
func (s Status) Error() string {
	name := s.Name(false)
	if f := s.Name(true); f != name {
		name += " or " + f
	}
	return s.format(name)
}

// FabricsError is an error of a Fabrics command: as a Status, but with the
// Fabrics names.
type FabricsError struct{ Status Status }

func (e FabricsError) Error() string { return e.Status.format(e.Status.Name(true)) }

// Unwrap returns the status.
func (e FabricsError) Unwrap() error { return e.Status }

func (s Status) format(name string) string {
	name += " (" + hexUint(uint64(s.Code()))
	if s.DoNotRetry() {
		name += ", do not retry"
	}
	if n := s.CRD(); n != 0 {
		name += ", retry delay " + strconv.Itoa(int(n))
	}
	return name + ")"
}

func (s Status) String() string { return s.Error() }

// Is makes errors.Is compare SCT and SC only.
func (s Status) Is(target error) bool {
	t, ok := target.(Status)
	return ok && t.Code() == s.Code()
}

// Unwrap returns the errno that the status amounts to, so that errors.Is and
// errors.As find a syscall.Errno in it; nil for success.
func (s Status) Unwrap() error {
	if e := s.Errno(); e != 0 {
		return e
	}
	return nil
}

var _ error = Status(0)
