package target

import (
	"slices"

	"rdblk/protocol"
)

// logPages are the pages of an I/O controller; a discovery controller has the
// discovery log and the list of pages.
var logPages = []protocol.LogID{protocol.LogSupportedPages, protocol.LogError, protocol.LogSmart, protocol.LogFirmwareSlot,
	protocol.LogChangedNamespaces, protocol.LogEffects}

var discoveryLogPages = []protocol.LogID{protocol.LogSupportedPages, protocol.LogDiscovery}

func checkGetLog(r *request) protocol.Status {
	n := r.cmd.LogLength()
	if n > uint64(r.q.t.cfg.MaxIO) || r.cmd.LPO()%4 != 0 || r.cmd.OT() {
		return protocol.StatusInvalidField.WithDNR()
	}
	r.xfer = uint32(n)
	return 0
}

func runGetLog(r *request) {
	page, s := r.q.ctrl.logPage(r)
	if !s.OK() {
		r.fail(s)
		return
	}
	// Everything beyond the page reads as zeros, wherever the host begins.
	n := copy(r.data, protocol.LogWindow(page, r.cmd.LPO(), uint64(len(r.data))))
	clear(r.data[n:])
	r.ok()
}

func (c *controller) logPage(r *request) ([]byte, protocol.Status) {
	cmd := &r.cmd
	pages := logPages
	if c.sub.discovery {
		pages = discoveryLogPages
	}
	if !slices.Contains(pages, cmd.LID()) {
		return nil, protocol.StatusInvalidLogPage.WithDNR()
	}
	var ns *namespace // nil: the page is the controller's
	if nsid := cmd.NSID(); nsid != 0 && nsid != protocol.NSIDAll {
		if cmd.LID() != protocol.LogSmart || c.sub.discovery {
			return nil, protocol.StatusInvalidField.WithDNR()
		}
		if ns = c.ns.Load().get(nsid); ns == nil {
			return nil, protocol.StatusInvalidNamespace.WithDNR()
		}
	}
	switch cmd.LID() {
	case protocol.LogSupportedPages:
		return protocol.AppendSupportedLogPages(nil, pages...), 0
	case protocol.LogError:
		return c.errorLog(nil), 0
	case protocol.LogSmart:
		return c.t.smartLog(c, ns), 0
	case protocol.LogFirmwareSlot:
		d := protocol.FirmwareSlotLog{AFI: 1}
		d.Revisions[0] = c.t.cfg.Firmware
		b, _ := d.AppendBinary(nil)
		return b, 0
	case protocol.LogChangedNamespaces:
		c.mu.Lock()
		defer c.mu.Unlock()
		b := protocol.AppendChangedNamespaces(nil, c.changed)
		if !cmd.RAE() {
			c.changed = nil
			c.logRead(eventNamespace)
		}
		return b, 0
	case protocol.LogEffects:
		if cmd.LogCSI() != protocol.CSINVM {
			return nil, protocol.StatusInvalidField.WithDNR()
		}
		var d protocol.EffectsLog
		for i := range d.Admin {
			if k := adminCommands[i]; k != nil {
				d.Admin[i] = k.effects
			}
			if k := ioCommands[i]; k != nil {
				d.IO[i] = k.effects
			}
		}
		b, _ := d.AppendBinary(nil)
		return b, 0
	case protocol.LogDiscovery:
		b := c.discoveryLog()
		if !cmd.RAE() {
			c.mu.Lock()
			c.logRead(eventDiscovery)
			c.mu.Unlock()
		}
		return b, 0
	}
	return nil, protocol.StatusInvalidLogPage.WithDNR()
}

// smartLog sums up what this process has done for all hosts, in one namespace or (nil) in all.
func (t *Target) smartLog(c *controller, one *namespace) []byte {
	var read, written, reads, writes, media uint64
	nsid, table := uint32(0), *t.sub.ns.Load()
	if one != nil {
		nsid, table = one.id, nsTable{one}
	}
	for _, ns := range table {
		if ns == nil {
			continue
		}
		for i := range ns.lanes {
			s := &ns.lanes[i].stats
			read += s[opRead].bytes.Load()
			reads += s[opRead].ops.Load()
			written += s[opWrite].bytes.Load()
			writes += s[opWrite].ops.Load()
			for o := range s {
				media += s[o].media.Load()
			}
		}
	}
	c.mu.Lock()
	errs := c.errCount
	c.mu.Unlock()
	d := protocol.SmartLog{
		AvailableSpare: 100,
		DataUnitsRead:  protocol.SmartDataUnits(read), DataUnitsWritten: protocol.SmartDataUnits(written),
		HostReads: protocol.Uint128{Lo: reads}, HostWrites: protocol.Uint128{Lo: writes},
		PowerCycles:  protocol.Uint128{Lo: t.cfg.PowerCycles},
		PowerOnHours: protocol.Uint128{Lo: uint64(t.uptime().Hours())},
		MediaErrors:  protocol.Uint128{Lo: media}, ErrorLogEntries: protocol.Uint128{Lo: errs},
	}
	if f := t.cfg.UnsafeShutdowns; f != nil {
		d.UnsafeShutdowns.Lo = f(nsid)
	}
	b, _ := d.AppendBinary(nil)
	return b
}
