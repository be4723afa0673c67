package initiator

import (
	"fmt"
	"sync"
	"time"
)

// EventKind is what happened to a session.
type EventKind uint8

// Kinds of events.
const (
	EventConnected     EventKind = iota // an association was made; requests flow
	EventDisconnected                   // it was lost (Err); requests wait
	EventLost                           // the loss timeout is over (Err); requests fail
	EventResized                        // namespace NSID has grown to Size
	EventShrunk                         // namespace NSID has become smaller, which is not taken over
	EventChanged                        // namespace NSID is another one now (Err); its requests fail
	EventNamespaceGone                  // namespace NSID was removed or disabled at the target
	EventNamespaces                     // the list of namespaces was read anew
	EventCacheLost                      // the target lost unflushed writes to NSID (Err); its requests fail
)

var eventNames = [...]string{"connected", "disconnected", "lost", "resized", "shrunk", "changed", "namespace gone", "namespaces", "cache lost"}

func (k EventKind) String() string {
	if int(k) < len(eventNames) {
		return eventNames[k]
	}
	return fmt.Sprintf("EventKind(%d)", uint8(k))
}

// Event is something that happened to a session.
type Event struct {
	Kind EventKind
	Time time.Time
	NSID uint32
	Size int64 // bytes
	Err  error
}

// maxEvents bounds the events that wait for a slow OnEvent; the oldest are dropped.
const maxEvents = 256

// dispatcher calls OnEvent on a goroutine of its own. A nil one does nothing.
type dispatcher struct {
	fn   func(Event)
	mu   sync.Mutex
	wake sync.Cond
	list []Event
	end  bool
	done chan struct{}
}

func newDispatcher(fn func(Event)) *dispatcher {
	if fn == nil {
		return nil
	}
	d := &dispatcher{fn: fn, done: make(chan struct{})}
	d.wake.L = &d.mu
	go d.run()
	return d
}

func (d *dispatcher) post(e Event) {
	if d == nil {
		return
	}
	e.Time = time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.end {
		return
	}
	if len(d.list) == maxEvents {
		d.list = append(d.list[:0], d.list[1:]...)
	}
	d.list = append(d.list, e)
	d.wake.Signal()
}

func (d *dispatcher) run() {
	defer close(d.done)
	d.mu.Lock()
	defer d.mu.Unlock()
	for {
		for len(d.list) == 0 {
			if d.end {
				return
			}
			d.wake.Wait()
		}
		e := d.list[0]
		d.list = append(d.list[:0], d.list[1:]...)
		d.mu.Unlock()
		d.fn(e)
		d.mu.Lock()
	}
}

// close delivers what is there and waits for it.
func (d *dispatcher) close() {
	if d == nil {
		return
	}
	d.mu.Lock()
	d.end = true
	d.wake.Signal()
	d.mu.Unlock()
	<-d.done
}
