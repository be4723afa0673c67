package main

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"rdblk/blockdev"
	"rdblk/internal/losses"

	"golang.org/x/sys/unix"
)

// A served namespace: its settings and its device. What is served changes on SIGHUP.
type served struct {
	namespace
	dev   blockdev.Device
	count *losses.Counter // nil if the content ends with the process, or read-only

	closed   chan struct{} // of one that was taken out: closed when the device is
	closeErr error         // of its last flush; set before
}

// lost counts that the device may have lost writes.
func (n *served) lost(err error) {
	if n.count != nil {
		n.count.Add(err)
	}
}

// add opens the device of n and serves it.
func (sv *server) add(n namespace) error {
	s := &served{namespace: n}
	d, err := sv.openDevice(n.Path, blockdev.Options{ReadOnly: n.ReadOnly, Direct: n.Direct, BlockSize: int(n.BlockSize), Logger: sv.log,
		OnFlushFailed: func(err error) { s.lost(err) }}) // count is set before anybody can use the device
	if err != nil {
		if slices.ContainsFunc(sv.removals, func(r *served) bool { return r.Path == n.Path }) {
			err = fmt.Errorf("%w (it was taken out as a namespace and its storage has not answered yet: reload again later)", err)
		}
		return err // names the path
	}
	s.dev = d
	if !n.shareable() {
		// A call that waits for storage keeps its P until the Go scheduler's monitor has seen that, which takes its time
		// (worker.CalmMonitor). For good: a call may still wait when the namespace is gone.
		executors := sv.s.Executors
		if executors == 0 {
			executors = blockdev.DefaultExecutors
		}
		needProcs(sv.s.Workers + 2 + executors)
	}
	key := ""
	if info := d.Info(); !info.ReadOnly {
		if key = losses.Key(n.Path, info); key != "" {
			s.count = losses.Open(losses.DefaultDir(), key, sv.log)
			s.count.Watch(d)
		}
	}
	sv.mu.Lock()
	sv.counts[n.NSID] = s.count
	if s.count != nil {
		sv.losses[key] = s.count
	}
	sv.mu.Unlock()
	if _, err := sv.target.AddNamespace(n.NSID, d); err != nil {
		if s.count != nil {
			s.count.Close() // while the device is ours: it would be another server's file at our end
		}
		d.Close()
		return err
	}
	sv.namespaces[n.NSID] = s
	return nil
}

// openPatience is how long a device may take to be opened: a disk that has to spin up takes
// up to 30 s. A variable for tests, as is what opens.
var (
	openPatience = 40 * time.Second
	openDevice   = blockdev.Open
)

var errStopping = errors.New("the program is told to stop")

// openDevice opens a device on a goroutine: on a file system that is frozen or has lost its disk
// that has no end, and the program must still hear signals. One that comes late is closed.
func (sv *server) openDevice(path string, o blockdev.Options) (blockdev.Device, error) {
	if sv.stopSignal != nil {
		return nil, fmt.Errorf("open %s: %w", path, errStopping)
	}
	if sv.opening[path] != nil {
		select {
		case <-sv.opening[path]:
			delete(sv.opening, path)
		default:
			return nil, fmt.Errorf("open %s: its storage has not answered an earlier attempt yet (is it frozen, or its disk dead?): reload again later", path)
		}
	}
	type result struct {
		d   blockdev.Device
		err error
	}
	results, ended := make(chan result, 1), make(chan struct{})
	open := openDevice
	go func() {
		d, err := open(path, o)
		results <- result{d, err}
	}()
	abandon := func(why error) (blockdev.Device, error) {
		sv.opening[path] = ended
		go func() {
			defer close(ended)
			if r := <-results; r.d != nil {
				r.d.Close()
			}
		}()
		return nil, fmt.Errorf("open %s: %w", path, why)
	}
	patience := time.NewTimer(openPatience)
	defer patience.Stop()
	for {
		select {
		case r := <-results:
			return r.d, r.err
		case <-patience.C:
			return abandon(fmt.Errorf("its storage gave no answer within %v: is it frozen, or its disk dead?", openPatience))
		case sig := <-sv.env.Signals:
			switch sig {
			case unix.SIGHUP:
				sv.reloadAgain = true
			case unix.SIGUSR1:
				if sv.entry != nil { // not at the start
					sv.dump()
				}
			default:
				sv.stopSignal = sig
				return abandon(errStopping)
			}
		}
	}
}

// remove takes a namespace out. Its device is flushed and closed once the storage has
// answered what hosts had asked, on a goroutine: storage that hangs holds up nothing else.
func (sv *server) remove(s *served) {
	// Here and not on the goroutine: a shutdown that comes right after it must not find it half
	// done, with the device in use and about to be closed.
	wait, err := sv.target.BeginRemoveNamespace(s.NSID)
	if err != nil {
		sv.log.Error("namespace is not removed", "ns", s.NSID, "err", err)
		return
	}
	delete(sv.namespaces, s.NSID)
	s.closed = make(chan struct{})
	sv.removals = append(sv.removals, s)
	go func() {
		defer close(s.closed)
		wait()
		name := s.dev.Info().Name
		if info := s.dev.Info(); !info.ReadOnly {
			if err := s.dev.Flush(); err != nil {
				s.closeErr = err
				sv.log.Error("what hosts wrote to a namespace that was removed may be lost", "ns", s.NSID, "dev", name, "err", err)
			}
		}
		if s.count != nil {
			s.count.Close() // before somebody else can serve the device; the number stays
		}
		if err := s.dev.Close(); err != nil {
			sv.log.Error("close the device of a namespace that was removed", "ns", s.NSID, "dev", name, "err", err)
			return
		}
		sv.log.Info("device closed", "ns", s.NSID, "dev", name)
	}()
}

// reloadNamespaces makes what is served what want says: it takes out what is missing
// there and adds what is new. An identifier that stands for another device, or the same in
// another way, is left as it is: hosts must have seen the old one go before they see a new
// one there. Nor can a device have another identifier at once. A failure concerns one
// namespace.
func (sv *server) reloadNamespaces(want []namespace) (added, removed int) {
	byID := map[uint32]namespace{}
	for _, n := range want {
		byID[n.NSID] = n
	}
	inUse := map[string]uint32{}
	var gone []*served
	for id, s := range sv.namespaces {
		inUse[s.Path] = id
		n, ok := byID[id]
		switch {
		case !ok:
			gone = append(gone, s)
		case n != s.namespace:
			sv.log.Error("a namespace is not changed while it is served: leave it out, reload, and add it again", "ns", id,
				"serves", s.namespace.String(), "wanted", n.String())
		}
	}
	sv.removals = slices.DeleteFunc(sv.removals, func(s *served) bool {
		select {
		case <-s.closed:
			return true
		default:
			return false
		}
	})
	for _, s := range gone {
		sv.remove(s)
		removed++
	}
	for _, n := range want {
		if sv.namespaces[n.NSID] != nil {
			continue
		}
		if id, ok := inUse[n.Path]; ok && !n.shareable() {
			sv.log.Error("a device does not change its namespace identifier at once: leave it out, reload, and add it again", "ns", n.NSID,
				"wanted", n.String(), "served_as", id)
			continue
		}
		if err := sv.add(n); err != nil {
			sv.log.Error("namespace is not added", "ns", n.NSID, "err", err)
			continue
		}
		added++
	}
	now := make([]namespace, 0, len(sv.namespaces))
	for _, s := range sv.namespaces {
		now = append(now, s.namespace)
	}
	slices.SortFunc(now, func(a, b namespace) int { return int(a.NSID) - int(b.NSID) })
	sv.s.Namespaces = now
	return added, removed
}
