package protocol

import "strconv"

// Direction is the direction of a command's data, the low two bits of an opcode
// or of a Fabrics command type.
type Direction uint8

// The directions, seen as the specification does.
const (
	NoData           Direction = 0
	HostToController Direction = 1 // H2C: the target reads the host's buffer
	ControllerToHost Direction = 2 // C2H: the target writes the host's buffer
	Bidirectional    Direction = 3
)

func (d Direction) String() string {
	switch d {
	case NoData:
		return "none"
	case HostToController:
		return "host to controller"
	case ControllerToHost:
		return "controller to host"
	case Bidirectional:
		return "bidirectional"
	}
	return "Direction(" + strconv.Itoa(int(d)) + ")"
}

// Opcode is an opcode of the NVM command set: commands on an I/O queue. The same
// numbers mean other things on the admin queue, see [AdminOpcode].
type Opcode uint8

// NVM command set opcodes.
const (
	OpFlush               Opcode = 0x00
	OpWrite               Opcode = 0x01
	OpRead                Opcode = 0x02
	OpWriteUncorrectable  Opcode = 0x04
	OpCompare             Opcode = 0x05
	OpWriteZeroes         Opcode = 0x08
	OpDatasetManagement   Opcode = 0x09
	OpVerify              Opcode = 0x0C
	OpReservationRegister Opcode = 0x0D
	OpReservationReport   Opcode = 0x0E
	OpReservationAcquire  Opcode = 0x11
	OpReservationRelease  Opcode = 0x15
	OpCopy                Opcode = 0x19
	OpFabrics             Opcode = 0x7F // Connect and authentication come on I/O queues too
)

// Direction returns the direction that the opcode claims. For OpFabrics ask
// [Command.Direction], which looks at the command type.
func (o Opcode) Direction() Direction { return Direction(o & 3) }

func (o Opcode) String() string {
	switch o {
	case OpFlush:
		return "Flush"
	case OpWrite:
		return "Write"
	case OpRead:
		return "Read"
	case OpWriteUncorrectable:
		return "Write Uncorrectable"
	case OpCompare:
		return "Compare"
	case OpWriteZeroes:
		return "Write Zeroes"
	case OpDatasetManagement:
		return "Dataset Management"
	case OpVerify:
		return "Verify"
	case OpReservationRegister:
		return "Reservation Register"
	case OpReservationReport:
		return "Reservation Report"
	case OpReservationAcquire:
		return "Reservation Acquire"
	case OpReservationRelease:
		return "Reservation Release"
	case OpCopy:
		return "Copy"
	case OpFabrics:
		return "Fabrics"
	}
	return "Opcode(" + hexByte(uint8(o)) + ")"
}

// AdminOpcode is the opcode of a command on an admin queue.
type AdminOpcode uint8

// Admin opcodes. Those about queues exist only to be refused: fabrics has no
// such commands.
const (
	AdminDeleteSQ          AdminOpcode = 0x00
	AdminCreateSQ          AdminOpcode = 0x01
	AdminGetLogPage        AdminOpcode = 0x02
	AdminDeleteCQ          AdminOpcode = 0x04
	AdminCreateCQ          AdminOpcode = 0x05
	AdminIdentify          AdminOpcode = 0x06
	AdminAbort             AdminOpcode = 0x08
	AdminSetFeatures       AdminOpcode = 0x09
	AdminGetFeatures       AdminOpcode = 0x0A
	AdminAsyncEventRequest AdminOpcode = 0x0C
	AdminKeepAlive         AdminOpcode = 0x18
	AdminFabrics           AdminOpcode = 0x7F
)

// Direction returns the direction that the opcode claims. Set Features and Get
// Features claim one although most features carry no data: there the SGL's
// length decides.
func (o AdminOpcode) Direction() Direction { return Direction(o & 3) }

func (o AdminOpcode) String() string {
	switch o {
	case AdminDeleteSQ:
		return "Delete I/O Submission Queue"
	case AdminCreateSQ:
		return "Create I/O Submission Queue"
	case AdminGetLogPage:
		return "Get Log Page"
	case AdminDeleteCQ:
		return "Delete I/O Completion Queue"
	case AdminCreateCQ:
		return "Create I/O Completion Queue"
	case AdminIdentify:
		return "Identify"
	case AdminAbort:
		return "Abort"
	case AdminSetFeatures:
		return "Set Features"
	case AdminGetFeatures:
		return "Get Features"
	case AdminAsyncEventRequest:
		return "Asynchronous Event Request"
	case AdminKeepAlive:
		return "Keep Alive"
	case AdminFabrics:
		return "Fabrics"
	}
	return "AdminOpcode(" + hexByte(uint8(o)) + ")"
}

// FabricsType is FCTYPE, the kind of a Fabrics command (opcode 0x7F).
type FabricsType uint8

// Fabrics command types.
const (
	FabricsPropertySet FabricsType = 0x00
	FabricsConnect     FabricsType = 0x01
	FabricsPropertyGet FabricsType = 0x04
	FabricsAuthSend    FabricsType = 0x05
	FabricsAuthReceive FabricsType = 0x06
	FabricsDisconnect  FabricsType = 0x08
)

// Direction returns the direction of the command's data.
func (t FabricsType) Direction() Direction { return Direction(t & 3) }

func (t FabricsType) String() string {
	switch t {
	case FabricsPropertySet:
		return "Property Set"
	case FabricsConnect:
		return "Connect"
	case FabricsPropertyGet:
		return "Property Get"
	case FabricsAuthSend:
		return "Authentication Send"
	case FabricsAuthReceive:
		return "Authentication Receive"
	case FabricsDisconnect:
		return "Disconnect"
	}
	return "FabricsType(" + hexByte(uint8(t)) + ")"
}

func hexByte(b uint8) string {
	const digits = "0123456789abcdef"
	return string([]byte{'0', 'x', digits[b>>4], digits[b&15]})
}

func hexUint(v uint64) string { return "0x" + strconv.FormatUint(v, 16) }
