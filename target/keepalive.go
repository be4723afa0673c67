package target

import "time"

// Every controller has one timer. What it waits for depends on the state:
//
//	after a reset or shutdown, when hosts
//	stop keep-alive                        CC.EN within Config.AssociationTimeout
//	kato set                               a command within the keep-alive timeout
//	discovery without kato                 a command within Config.DiscoveryTimeout
//	not yet enabled, without kato          CC.EN within Config.AssociationTimeout
//	enabled, without kato                  nothing: only the connection tells
//
// Keep-alive is traffic based (CTRATT TBKAS): any command on any queue of the
// association counts. The timer looks once per timeout whether there was one
// since it looked last, so an association ends between one and two timeouts after
// its last command.

type timerKind uint8

const (
	timerNone timerKind = iota
	timerKeepAlive
	timerAssociation
)

func (k timerKind) String() string {
	switch k {
	case timerKeepAlive:
		return "keep-alive"
	case timerAssociation:
		return "association"
	}
	return "none"
}

// roundKATO converts a keep-alive timeout in milliseconds, rounded up to KAS.
func roundKATO(ms uint32) time.Duration {
	d := time.Duration(ms) * time.Millisecond
	return (d + kasUnit - 1) / kasUnit * kasUnit
}

// startTimer starts the timer that the state asks for. c.mu is held.
func (c *controller) startTimer() {
	c.stopTimer()
	switch {
	case c.state >= ctrlDying:
	case c.hostQuiet:
		c.arm(timerAssociation, c.t.cfg.AssociationTimeout)
	case c.kato > 0:
		c.arm(timerKeepAlive, c.kato)
	case c.sub.discovery:
		c.arm(timerKeepAlive, c.t.cfg.DiscoveryTimeout)
	case c.state != ctrlEnabled:
		c.arm(timerAssociation, c.t.cfg.AssociationTimeout)
	}
}

// arm is called with c.mu held.
func (c *controller) arm(k timerKind, d time.Duration) {
	c.timerGen++
	gen := c.timerGen
	c.timerFor = k
	at := c.t.cfg.clock.Now()
	c.timer = c.t.cfg.clock.AfterFunc(d, func() { c.expired(gen, at, d) })
}

// stopTimer is called with c.mu held.
func (c *controller) stopTimer() {
	c.timerGen++
	c.timerFor = timerNone
	if c.timer != nil {
		c.timer.Stop()
		c.timer = nil
	}
}

func (c *controller) expired(gen uint64, at time.Time, d time.Duration) {
	c.mu.Lock()
	if gen != c.timerGen {
		c.mu.Unlock()
		return
	}
	reason := errIdle
	if c.timerFor == timerKeepAlive {
		// A timer that is very late says that this process did not run. What the host
		// sent meanwhile has not been looked at, so it gets another period.
		late := c.t.cfg.clock.Now().Sub(at) > d+d/2
		if c.traffic.Swap(false) || late {
			c.arm(timerKeepAlive, d)
			c.mu.Unlock()
			return
		}
		reason = errKeepAlive
	}
	c.mu.Unlock()
	c.kill(reason)
}

// setKATO is Set Features 0x0F. c.mu is held.
func (c *controller) setKATO(ms uint32) {
	c.kato = roundKATO(ms)
	c.startTimer()
}
