package target

import (
	"slices"

	"rdblk/internal/worker"
	"rdblk/protocol"
)

// Asynchronous events. A change is always recorded (changed namespaces,
// generation counter); whether the host is told depends on the configuration, on
// whether it has read the log page since it was told last, and on whether it has
// an Asynchronous Event Request outstanding. Events are raised on any goroutine
// and delivered on the admin worker.

type eventSet uint8

const (
	eventNamespace eventSet = 1 << iota
	eventDiscovery
)

// raise records that the host is to be told. c.mu is held.
func (c *controller) raise(e eventSet) {
	enabled := protocol.EventConfigNamespace
	if e == eventDiscovery {
		enabled = protocol.EventConfigDiscovery
	}
	if c.state >= ctrlDying || c.aec&enabled == 0 || c.masked&e != 0 || c.pending&e != 0 {
		return
	}
	c.pending |= e
	if len(c.events) > 0 {
		// The admin worker lives as long as the controller.
		_ = c.admin.lane.w.Submit(worker.TaskFunc(c.deliver))
	}
}

// deliver completes event requests with what is pending. Admin worker.
func (c *controller) deliver() {
	for {
		c.mu.Lock()
		if len(c.events) == 0 || c.pending == 0 {
			c.mu.Unlock()
			return
		}
		e, dw0 := eventNamespace, protocol.EventNamespaceChanged
		if c.pending&e == 0 {
			e, dw0 = eventDiscovery, protocol.EventDiscoveryChanged
		}
		c.pending &^= e
		c.masked |= e
		r := c.events[0]
		c.events = slices.Delete(c.events, 0, 1)
		c.mu.Unlock()
		c.t.stats.events.Add(1)
		r.finish(protocol.StatusSuccess, uint32(dw0), 0)
	}
}

// runAsyncEvent keeps the request until there is an event. It holds its receive
// buffer meanwhile: the host counts it in its queue depth too.
func runAsyncEvent(r *request) {
	c := r.q.ctrl
	c.mu.Lock()
	switch {
	case c.state >= ctrlDying:
		c.mu.Unlock()
		r.fail(protocol.StatusAbortRequested)
		return
	case len(c.events) >= maxAsyncEvents:
		c.mu.Unlock()
		r.fail(protocol.StatusAsyncEventLimitExceeded.WithDNR())
		return
	}
	r.setState(reqEvent)
	c.events = append(c.events, r)
	c.mu.Unlock()
	c.deliver()
}

// dropEvent takes an event request that is being aborted out of the list.
func (c *controller) dropEvent(r *request) {
	c.mu.Lock()
	if i := slices.Index(c.events, r); i >= 0 {
		c.events = slices.Delete(c.events, i, i+1)
	}
	c.mu.Unlock()
}

// logRead tells that the host has read the log page of an event without RAE. c.mu is held.
func (c *controller) logRead(e eventSet) {
	c.masked &^= e
	c.pending &^= e
}

// namespaceChanged records a namespace that was added, removed or resized.
func (c *controller) namespaceChanged(nsid uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !slices.Contains(c.changed, nsid) { // at most MaxNamespaces
		c.changed = append(c.changed, nsid)
	}
	c.raise(eventNamespace)
}
