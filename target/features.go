package target

import (
	"rdblk/protocol"
)

// settable are the bits of Asynchronous Event Configuration that a host may set.
// The SMART warnings never happen, but hosts always ask for them.
func (c *controller) settable() protocol.AsyncEventConfig {
	if c.sub.discovery {
		return protocol.EventConfigSmart | protocol.EventConfigDiscovery
	}
	return protocol.EventConfigSmart | protocol.EventConfigNamespace
}

// discoveryFeature: a discovery controller has these two only.
func discoveryFeature(f protocol.FeatureID) bool {
	return f == protocol.FeatureAsyncEventConfig || f == protocol.FeatureKeepAliveTimer
}

func runSetFeatures(r *request) {
	c := r.q.ctrl
	v := r.cmd.FeatureValue()
	if r.cmd.SV() {
		r.fail(protocol.StatusFeatureNotSaveable.WithDNR())
		return
	}
	f := r.cmd.FID()
	if c.sub.discovery && !discoveryFeature(f) {
		r.fail(protocol.StatusInvalidField.WithDNR())
		return
	}
	s, dw0 := protocol.StatusSuccess, uint32(0)
	c.mu.Lock()
	switch f {
	case protocol.FeatureArbitration:
		c.arbit = v
	case protocol.FeaturePowerManagement:
		if v&0x1F != 0 { // the one power state there is
			s = protocol.StatusInvalidField.WithDNR()
		}
		c.power = v &^ 0x1F & 0xFF
	case protocol.FeatureTemperature:
		c.tempTh = v & 0xFFFF
	case protocol.FeatureErrorRecovery:
		c.recovery = v & 0xFFFF
	case protocol.FeatureVolatileCache:
		// The cache is the store's and everybody's: it cannot be switched off from here.
		if v&protocol.VolatileCacheEnable == 0 {
			s = protocol.StatusFeatureNotChangeable.WithDNR()
		}
	case protocol.FeatureNumberOfQueues:
		switch {
		case !protocol.QueueCount(v).Valid():
			s = protocol.StatusInvalidField.WithDNR()
		case len(c.queues) > 0:
			s = protocol.StatusCommandSequenceError.WithDNR()
		default:
			dw0 = uint32(c.t.queueCount())
		}
	case protocol.FeatureAsyncEventConfig:
		if protocol.AsyncEventConfig(v)&^c.settable() != 0 {
			s = protocol.StatusInvalidField.WithDNR()
		} else {
			c.aec = protocol.AsyncEventConfig(v)
		}
	case protocol.FeatureKeepAliveTimer:
		c.setKATO(v)
	case protocol.FeatureHostIdentifier:
		s = protocol.StatusCommandSequenceError.WithDNR() // fabrics: it came with Connect
	default:
		s = protocol.StatusInvalidField.WithDNR()
	}
	c.mu.Unlock()
	r.finish(s, dw0, 0)
}

// queueCount is the number of I/O queues that a host may have. As other targets
// do, it is told whatever the host asked for.
func (t *Target) queueCount() protocol.QueueCount {
	return protocol.NewQueueCount(t.cfg.MaxQueuesPerController, t.cfg.MaxQueuesPerController)
}

func checkGetFeatures(r *request) protocol.Status {
	// ONCS has no Save/Select, so there are only current values.
	if r.cmd.SEL() != protocol.SelectCurrent {
		return protocol.StatusInvalidField.WithDNR()
	}
	if r.cmd.FID() == protocol.FeatureHostIdentifier && !r.q.ctrl.sub.discovery {
		if r.cmd.FeatureValue()&protocol.HostIdentifierExtend == 0 {
			return protocol.StatusInvalidField.WithDNR()
		}
		r.xfer = 16
	}
	return 0
}

func runGetFeatures(r *request) {
	c := r.q.ctrl
	f := r.cmd.FID()
	if c.sub.discovery && !discoveryFeature(f) {
		r.fail(protocol.StatusInvalidField.WithDNR())
		return
	}
	c.mu.Lock()
	s, v := protocol.StatusSuccess, uint32(0)
	switch f {
	case protocol.FeatureArbitration:
		v = c.arbit
	case protocol.FeaturePowerManagement:
		v = c.power
	case protocol.FeatureTemperature:
		v = c.tempTh
	case protocol.FeatureErrorRecovery:
		v = c.recovery
	case protocol.FeatureVolatileCache:
		if c.limits.vwc&protocol.VWCPresent == 0 {
			s = protocol.StatusInvalidField.WithDNR()
		}
		v = protocol.VolatileCacheEnable
	case protocol.FeatureNumberOfQueues:
		v = uint32(c.t.queueCount())
	case protocol.FeatureAsyncEventConfig:
		v = uint32(c.aec)
	case protocol.FeatureKeepAliveTimer:
		v = uint32(c.kato.Milliseconds())
	case protocol.FeatureHostIdentifier:
		copy(r.data, c.path.hostID[:])
	default:
		s = protocol.StatusInvalidField.WithDNR()
	}
	c.mu.Unlock()
	r.finish(s, v, 0)
}
