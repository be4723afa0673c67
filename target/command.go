package target

import "rdblk/protocol"

// command is what the target knows about one opcode. Commands sit in tables;
// checks, transfer, statistics and the effects log follow from the entry.
type command struct {
	name string
	// dir is the direction of the data, if there is any.
	dir protocol.Direction
	// loose: the host's buffer may be larger than what the command transfers; else it
	// must have that size exactly.
	loose bool
	// check validates the command, except for its data pointer, and sets xfer and
	// scratch. nil = a command without data that is always fine.
	check func(r *request) protocol.Status
	// run executes the command once its data is there, and finishes it then or later.
	// It must not block: it is on the worker.
	run func(r *request)
	// done goes on when the back end has answered r.bd; only of commands that use it.
	done func(r *request)
	// anyState: allowed while CC.EN is 0.
	anyState bool
	op       op   // for statistics
	fua      bool // Force Unit Access means something
	effects  protocol.Effects
}

var (
	adminCommands     [256]*command
	discoveryCommands [256]*command
	ioCommands        [256]*command
	fabricsCommands   [256]*command // by command type; admin and I/O queues
)

// The tables are filled here because the handlers refer to them (effects log).
func init() {
	const sup = protocol.EffectsSupported
	const c2h, h2c = protocol.ControllerToHost, protocol.HostToController

	fabrics := func(t protocol.FabricsType, c command) {
		c.name, c.anyState, c.op = t.String(), true, opNone
		fabricsCommands[t] = &c
	}
	fabrics(protocol.FabricsConnect, command{dir: h2c, loose: true, check: checkConnect, run: runConnect})
	fabrics(protocol.FabricsPropertyGet, command{run: runPropertyGet})
	fabrics(protocol.FabricsPropertySet, command{run: runPropertySet})
	fabrics(protocol.FabricsDisconnect, command{run: runDisconnect})

	admin := func(o protocol.AdminOpcode, discovery bool, c command) {
		c.name, c.op, c.effects = o.String(), opNone, c.effects|sup
		adminCommands[o] = &c
		if discovery {
			// nvmet does not ask for EN on discovery controllers, so hosts exist that do not set it.
			d := c
			d.anyState = true
			discoveryCommands[o] = &d
		}
	}
	admin(protocol.AdminIdentify, true, command{dir: c2h, loose: true, check: checkIdentify, run: runIdentify})
	admin(protocol.AdminGetLogPage, true, command{dir: c2h, loose: true, check: checkGetLog, run: runGetLog})
	admin(protocol.AdminGetFeatures, true, command{dir: c2h, loose: true, check: checkGetFeatures, run: runGetFeatures})
	admin(protocol.AdminSetFeatures, true, command{loose: true, run: runSetFeatures})
	admin(protocol.AdminAsyncEventRequest, true, command{run: runAsyncEvent})
	admin(protocol.AdminKeepAlive, true, command{run: runKeepAlive, anyState: true})
	admin(protocol.AdminAbort, false, command{run: runAbort})

	io := func(o protocol.Opcode, op op, c command) {
		c.name, c.op, c.effects = o.String(), op, c.effects|sup
		ioCommands[o] = &c
	}
	const writes = protocol.EffectsLBContent
	io(protocol.OpRead, opRead, command{dir: c2h, check: checkRead, run: runRead, done: doneRead, fua: true})
	io(protocol.OpWrite, opWrite, command{dir: h2c, check: checkWrite, run: runWrite, done: doneSimple, effects: writes, fua: true})
	io(protocol.OpCompare, opCompare, command{dir: h2c, check: checkCompare, run: runCompare, done: doneCompare})
	io(protocol.OpFlush, opFlush, command{check: checkFlush, run: runFlush, done: doneSimple})
	io(protocol.OpWriteZeroes, opWriteZeroes, command{check: checkWriteZeroes, run: runWriteZeroes, done: doneSimple, effects: writes, fua: true})
	io(protocol.OpDatasetManagement, opDiscard, command{dir: h2c, loose: true, check: checkDSM, run: runDSM, done: doneDSM, effects: writes})
	io(protocol.OpVerify, opVerify, command{check: checkVerify, run: runVerify, done: doneVerify})
}

// lookup finds what a command is in the state that its queue and controller are
// in, or the status to refuse it with.
func (q *queue) lookup(cmd *protocol.Command) (*command, protocol.Status) {
	if q.state == queueUnconnected || q.state == queueConnecting {
		if cmd.IsFabrics() && cmd.FabricsType() == protocol.FabricsConnect && q.state == queueUnconnected {
			return fabricsCommands[protocol.FabricsConnect], 0
		}
		return nil, protocol.StatusCommandSequenceError.WithDNR()
	}
	var c *command
	switch {
	case cmd.IsFabrics():
		switch t := cmd.FabricsType(); t {
		case protocol.FabricsConnect:
			return nil, protocol.StatusCommandSequenceError.WithDNR() // is connected
		case protocol.FabricsPropertyGet, protocol.FabricsPropertySet:
			if q.qid == 0 {
				c = fabricsCommands[t]
			}
		default:
			c = fabricsCommands[t]
		}
	case q.qid > 0:
		// Not looked at per I/O whether CC.EN is 1: when it goes to 0 the queue ends.
		c = ioCommands[cmd.Opcode()]
	case q.ctrl.sub.discovery:
		c = discoveryCommands[cmd.AdminOpcode()]
	default:
		c = adminCommands[cmd.AdminOpcode()]
	}
	if c == nil {
		return nil, protocol.StatusInvalidOpcode.WithDNR()
	}
	if q.qid == 0 && !c.anyState && !q.ctrl.ready() {
		return nil, protocol.StatusCommandSequenceError.WithDNR()
	}
	return c, 0
}

// ready says that CC.EN was set and the controller works.
func (c *controller) ready() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state == ctrlEnabled || c.state == ctrlShuttingDown || c.state == ctrlShutDown
}

// dispatch looks at a command that has just arrived and sets it going.
func (q *queue) dispatch(r *request) {
	if c := q.ctrl; c != nil && !c.traffic.Load() {
		c.traffic.Store(true)
	}
	r.kind = nil
	if s := r.cmd.CheckFlags(); !s.OK() {
		r.fail(s)
		return
	}
	kind, s := q.lookup(&r.cmd)
	if kind == nil {
		r.fail(s)
		return
	}
	r.kind = kind
	if kind.check != nil {
		if s := kind.check(r); !s.OK() {
			r.xfer = 0
			r.fail(s)
			return
		}
	}
	if r.xfer == 0 {
		// What the data pointer of a command without data looks like is not our business,
		// as long as it holds nothing.
		if r.cmd.SGL().Length() != 0 && !kind.loose {
			r.fail(protocol.StatusDataSGLLengthInvalid.WithDNR())
			return
		}
		q.transfer(r)
		return
	}
	d, s := r.cmd.Data(kind.dir, protocol.Capsule{InCapsuleSize: uint32(q.inCapsule), Received: r.recvLen})
	if s.OK() {
		if kind.loose {
			s = d.AtLeast(uint64(r.xfer))
		} else {
			s = d.Exactly(uint64(r.xfer))
		}
	}
	if !s.OK() {
		r.xfer = 0
		r.fail(s)
		return
	}
	r.sgl = d
	q.transfer(r)
}
