package target

import (
	"math/bits"

	"rdblk/blockdev"
	"rdblk/protocol"
)

func checkIdentify(r *request) protocol.Status {
	r.xfer = protocol.IdentifySize
	return 0
}

func runIdentify(r *request) {
	page, s := r.q.ctrl.identify(&r.cmd, r.data[:0])
	if !s.OK() {
		r.fail(s)
		return
	}
	clear(r.data[copy(r.data, page):])
	r.ok()
}

// identify appends the structure to b, which has room for it.
func (c *controller) identify(cmd *protocol.Command, b []byte) ([]byte, protocol.Status) {
	const (
		badField = protocol.StatusInvalidField | protocol.StatusDNR
		badNS    = protocol.StatusInvalidNamespace | protocol.StatusDNR
	)
	nsid := cmd.NSID()
	if cmd.CNS() == protocol.CNSController {
		return c.identifyController(b), 0
	}
	if c.sub.discovery {
		return nil, badField
	}
	table := *c.ns.Load()
	ns := table.get(nsid)
	switch cmd.CNS() {
	case protocol.CNSNamespace, protocol.CNSAllocatedNamespace:
		switch {
		case nsid == 0 || nsid > MaxNamespaces:
			return nil, badNS
		case ns == nil: // valid and inactive: all zeros
			return b, 0
		}
		d := ns.identify()
		b, _ = d.AppendBinary(b)
		return b, 0
	case protocol.CNSActiveNamespaces, protocol.CNSAllocatedNamespaceList, protocol.CNSCommandSetActiveList:
		if nsid >= 0xFFFFFFFE {
			return nil, badNS
		}
		if cmd.CNS() == protocol.CNSCommandSetActiveList && cmd.IdentifyCSI() != protocol.CSINVM {
			return nil, badField
		}
		var ids []uint32
		for _, ns := range table {
			if ns != nil && ns.id > nsid {
				ids = append(ids, ns.id)
			}
		}
		return protocol.AppendNamespaceList(b, ids), 0
	case protocol.CNSNamespaceDescriptors:
		if ns == nil {
			return nil, badNS
		}
		d := protocol.NamespaceIDs{NGUID: protocol.NGUID(ns.uuid), UUID: ns.uuid, CSI: protocol.CSINVM, HasCSI: true}
		b, _ = d.AppendBinary(b)
		return b, 0
	case protocol.CNSCommandSetNamespace: // no extended formats, no protection information
		switch {
		case cmd.IdentifyCSI() != protocol.CSINVM:
			return nil, badField
		case nsid == 0 || nsid > MaxNamespaces:
			return nil, badNS
		}
		return b, 0
	case protocol.CNSCommandSetController:
		if cmd.IdentifyCSI() != protocol.CSINVM {
			return nil, badField
		}
		d := protocol.IdentifyNVMController{WZSL: writeZeroesLimit}
		b, _ = d.AppendBinary(b)
		return b, 0
	case protocol.CNSIndependentNamespace:
		switch {
		case nsid == 0 || nsid > MaxNamespaces:
			return nil, badNS
		case ns == nil:
			return b, 0
		}
		d := protocol.IdentifyIndependentNamespace{NMIC: protocol.NMICShared, NSTAT: protocol.NSTATReady}
		if ns.info.Rotational {
			d.NSFEAT |= protocol.IndependentRotational
		}
		if !ns.info.WriteCache {
			d.NSFEAT |= protocol.IndependentNoWriteCache
		}
		if ns.info.ReadOnly {
			d.NSATTR |= protocol.NSATTRProtected
		}
		b, _ = d.AppendBinary(b)
		return b, 0
	case protocol.CNSNamespaceControllers, protocol.CNSControllers:
		if cmd.CNS() == protocol.CNSNamespaceControllers && ns == nil {
			return nil, badNS
		}
		return c.t.appendControllerList(b, cmd.CNTID()), 0
	}
	return nil, badField
}

// writeZeroesLimit (WZSL) is 32 MiB: all that NLB can say with blocks of 512 bytes.
// Nothing has to be transferred, so MDTS is no limit, and hosts that are not told
// stay within MDTS. More is accepted.
const writeZeroesLimit = 13

// appendControllerList appends the controllers of the NVM subsystem from
// identifier first on: a count, then the identifiers, 16 bits each.
func (t *Target) appendControllerList(b []byte, first uint16) []byte {
	const room = protocol.IdentifySize/2 - 1
	t.mu.Lock()
	defer t.mu.Unlock()
	var ids []uint16
	for _, c := range t.sub.sortedControllers() {
		if c.id >= first && len(ids) < room {
			ids = append(ids, c.id)
		}
	}
	put := func(v uint16) { b = append(b, byte(v), byte(v>>8)) }
	put(uint16(len(ids)))
	for _, id := range ids {
		put(id)
	}
	return b
}

// limits is what a controller advertises because of its namespaces. A controller
// has one set of them: what one namespace can do is offered, and the others do
// their best (a discard is a hint, zeros can be written). They are those of the
// namespaces that there were when it began, because hosts read them once: one that was
// told of no write cache sends no Flush to a namespace that comes later, so its writes
// are made durable at once (see request.durable).
type limits struct {
	oncs uint16
	vwc  uint8
}

func (t *Target) limits() limits {
	l := limits{oncs: protocol.ONCSCompare | protocol.ONCSWriteZeroes | protocol.ONCSVerify}
	for _, ns := range *t.sub.ns.Load() {
		if ns == nil {
			continue
		}
		if ns.info.WriteCache && !ns.info.ReadOnly {
			l.vwc = protocol.VWCPresent | protocol.VWCFlushNoAll
		}
		if ns.info.Discard {
			l.oncs |= protocol.ONCSDatasetManagement
		}
	}
	return l
}

// identifyController appends Identify data of CNS 1.
func (c *controller) identifyController(b []byte) []byte {
	cfg := &c.t.cfg
	d := protocol.IdentifyController{
		SN: cfg.Serial, MN: cfg.Model, FR: cfg.Firmware, RAB: 6,
		CMIC: protocol.CMICMultiPort | protocol.CMICMultiController,
		MDTS: mdts(cfg.MaxIO), CNTLID: c.id, VER: version,
		RTD3E:     30_000_000, // CC.SHN waits for a flush: Linux gives up after this, 5 s without
		OAES:      protocol.EventConfigNamespace,
		CTRATT:    protocol.CTRATTHostID128 | protocol.CTRATTTrafficKeep,
		CNTRLTYPE: protocol.ControllerTypeIO,
		ACL:       maxAborts - 1, AERL: maxAsyncEvents - 1,
		FRMW: 1 | 1<<1, // one slot, read-only
		LPA:  protocol.LPASmartPerNamespace | protocol.LPAEffects | protocol.LPAExtended,
		ELPE: errorLogSize - 1,
		KAS:  uint16(kasUnit.Milliseconds() / 100),
		SQES: 0x66, CQES: 0x44, MAXCMD: uint16(c.queueDepth()), NN: MaxNamespaces,
		NWPC: 0, MSDBD: 1, OFCS: protocol.OFCSDisconnect, SUBNQN: c.sub.nqn,
	}
	d.SetInCapsuleSize(uint32(cfg.InCapsule))
	if c.sub.discovery {
		d.CNTRLTYPE = protocol.ControllerTypeDiscovery
		d.OAES = protocol.EventConfigDiscovery
		d.CMIC, d.NN, d.OFCS = 0, 0, 0
		d.LPA = protocol.LPAExtended
		d.DCTYPE = 1
	} else {
		d.ONCS, d.VWC = c.limits.oncs, c.limits.vwc
	}
	b, _ = d.AppendBinary(b)
	return b
}

// identify is Identify data of CNS 0: everything in it follows from the device.
func (ns *namespace) identify() protocol.IdentifyNamespace {
	d := describe(&ns.info, ns.blocks())
	d.NGUID = protocol.NGUID(ns.uuid)
	return d
}

// describe computes what a namespace advertises from its device's Info.
func describe(info *blockdev.Info, blocks uint64) protocol.IdentifyNamespace {
	shift := bits.TrailingZeros(uint(info.BlockSize))
	d := protocol.IdentifyNamespace{NSZE: blocks, NCAP: blocks, NUSE: blocks, NMIC: protocol.NMICShared}
	d.LBAF[0].LBADS = uint8(shift)
	// 0's based counts of blocks; what is unknown is one block.
	in := func(bytes int) uint16 { return uint16(min(max(bytes>>shift, 1), 65536) - 1) }
	d.NSFEAT = protocol.NSFEATOptPerf
	d.NPWG, d.NPWA = in(info.PhysBlock), in(info.PhysBlock)
	d.NPDG, d.NPDA = in(info.PhysBlock), in(info.PhysBlock)
	d.NOWS = in(info.OptimalIO)
	if info.DiscardZeros {
		d.DLFEAT = protocol.DLFEATReadZeros
		if info.Discard && !info.ReadOnly {
			d.DLFEAT |= protocol.DLFEATDEAC // Write Zeroes with DEAC frees space
		}
	}
	if info.ReadOnly {
		d.NSATTR = protocol.NSATTRProtected
	}
	return d
}
