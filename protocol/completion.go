package protocol

import "encoding/binary"

// CompletionSize is the size of a completion, and of a response capsule, in bytes.
const CompletionSize = 16

// SQHDNone is SQHD of every completion of a queue whose Connect disabled
// submission queue flow control.
const SQHDNone = 0xFFFF

// Completion is a 16-byte completion queue entry (NVMe Base, "Common Completion
// Queue Entry"), the response capsule. Like [Command] it is a view.
//
// The zero value is a success for command 0.
type Completion [CompletionSize]byte

var _ = [1]struct{}{}[len(Completion{})-CompletionSize]

// CompletionView returns the completion at the head of a response capsule
// without copying. ok is false if the capsule is too short.
func CompletionView(capsule []byte) (c *Completion, ok bool) {
	if len(capsule) < CompletionSize {
		return nil, false
	}
	return (*Completion)(capsule), true
}

// Init clears c and makes it the answer to command id.
func (c *Completion) Init(id uint16, s Status) {
	*c = Completion{}
	c.SetID(id)
	c.SetStatus(s)
}

// DW0 returns the command specific result.
func (c *Completion) DW0() uint32 { return binary.LittleEndian.Uint32(c[0:]) }

// SetDW0 sets the command specific result.
func (c *Completion) SetDW0(v uint32) { binary.LittleEndian.PutUint32(c[0:], v) }

// DW1 returns the upper half of the result.
func (c *Completion) DW1() uint32 { return binary.LittleEndian.Uint32(c[4:]) }

// SetDW1 sets the upper half of the result.
func (c *Completion) SetDW1(v uint32) { binary.LittleEndian.PutUint32(c[4:], v) }

// Result returns DW0 and DW1 as one number: the value of a Property Get.
func (c *Completion) Result() uint64 { return binary.LittleEndian.Uint64(c[0:]) }

// SetResult sets DW0 and DW1.
func (c *Completion) SetResult(v uint64) { binary.LittleEndian.PutUint64(c[0:], v) }

// SQHD returns the submission queue head. Hosts on RDMA need not look at it.
func (c *Completion) SQHD() uint16 { return binary.LittleEndian.Uint16(c[8:]) }

// SetSQHD sets the submission queue head.
func (c *Completion) SetSQHD(v uint16) { binary.LittleEndian.PutUint16(c[8:], v) }

// SQID returns a field that is reserved on fabrics. Targets differ in what they
// put there; a host must not use it.
func (c *Completion) SQID() uint16 { return binary.LittleEndian.Uint16(c[10:]) }

// SetSQID sets SQID.
func (c *Completion) SetSQID(v uint16) { binary.LittleEndian.PutUint16(c[10:], v) }

// ID returns CID of the command that is answered.
func (c *Completion) ID() uint16 { return binary.LittleEndian.Uint16(c[12:]) }

// SetID sets CID.
func (c *Completion) SetID(v uint16) { binary.LittleEndian.PutUint16(c[12:], v) }

// Status returns the status without the phase bit.
func (c *Completion) Status() Status { return StatusFromWire(binary.LittleEndian.Uint16(c[14:])) }

// SetStatus sets the status; the phase bit is 0, as always on fabrics.
func (c *Completion) SetStatus(s Status) { binary.LittleEndian.PutUint16(c[14:], s.Wire(false)) }

// Phase returns the phase bit. Fabrics does not use it.
func (c *Completion) Phase() bool { return c[14]&1 != 0 }

// AbortedNot is bit 0 of DW0 of an Abort's completion: the command was not aborted.
const AbortedNot uint32 = 1

// ConnectResult is DW0 of a successful Connect.
type ConnectResult uint32

// Bits of a Connect's result beside the controller identifier.
const (
	ConnectATR  ConnectResult = 1 << 17 // authentication is required
	ConnectASCR ConnectResult = 1 << 18 // authentication and a secure channel are required
)

// CNTLID returns the controller identifier.
func (r ConnectResult) CNTLID() uint16 { return uint16(r) }

// AuthRequired reports whether the queue must be authenticated before use. Bit
// 16 is counted too, since early revisions had the flag there.
func (r ConnectResult) AuthRequired() bool { return r&(1<<16|ConnectATR|ConnectASCR) != 0 }

// ConnectInvalid is DW0 of a Connect that failed with
// [StatusConnectInvalidParameters]: which field is at fault.
type ConnectInvalid uint32

// The fields that Connect checks.
const (
	ConnectInvalidQID     ConnectInvalid = 42
	ConnectInvalidSQSIZE  ConnectInvalid = 44
	ConnectInvalidHostID  ConnectInvalid = 1<<16 | connectOffHostID
	ConnectInvalidCNTLID  ConnectInvalid = 1<<16 | connectOffCNTLID
	ConnectInvalidSUBNQN  ConnectInvalid = 1<<16 | connectOffSUBNQN
	ConnectInvalidHOSTNQN ConnectInvalid = 1<<16 | connectOffHOSTNQN
)

// InData returns IATTR: the offset is into the Connect data instead of the
// command.
func (v ConnectInvalid) InData() bool { return v&(1<<16) != 0 }

// Offset returns IPO, the byte offset of the field.
func (v ConnectInvalid) Offset() uint16 { return uint16(v) }

func (v ConnectInvalid) String() string {
	switch v {
	case ConnectInvalidQID:
		return "QID"
	case ConnectInvalidSQSIZE:
		return "SQSIZE"
	case ConnectInvalidHostID:
		return "HOSTID"
	case ConnectInvalidCNTLID:
		return "CNTLID"
	case ConnectInvalidSUBNQN:
		return "SUBNQN"
	case ConnectInvalidHOSTNQN:
		return "HOSTNQN"
	}
	where := "command"
	if v.InData() {
		where = "Connect data"
	}
	return "byte " + utoa(uint64(v.Offset())) + " of the " + where
}
