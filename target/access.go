package target

import (
	"fmt"
	"slices"

	"rdblk/protocol"
)

// hostList is who may connect. It is replaced as a whole, never changed.
type hostList struct {
	any   bool
	hosts map[string]struct{}
}

func newHostList(hosts []string, anyHost bool) *hostList {
	l := &hostList{any: anyHost, hosts: make(map[string]struct{}, len(hosts))}
	for _, h := range hosts {
		l.hosts[h] = struct{}{}
	}
	return l
}

func checkHosts(hosts []string) error {
	if len(hosts) > MaxHosts {
		return fmt.Errorf("%d hosts, the limit is %d", len(hosts), MaxHosts)
	}
	for _, h := range hosts {
		if err := protocol.CheckNQN(h); err != nil {
			return err
		}
	}
	return nil
}

// allows compares byte by byte, as the specification demands.
func (l *hostList) allows(nqn string) bool {
	if l.any {
		return true
	}
	_, ok := l.hosts[nqn]
	return ok
}

// SetHosts replaces the allow list. Associations of hosts that are not on the new
// list are ended; discovery controllers are told if it changes what their host sees.
func (t *Target) SetHosts(hosts []string, anyHost bool) error {
	if err := checkHosts(hosts); err != nil {
		return fmt.Errorf("hosts: %w", err)
	}
	l := newHostList(slices.Clone(hosts), anyHost)
	t.mu.Lock()
	old := t.hosts.Swap(l)
	t.discoveryChangedFor(func(host string) bool { return old.allows(host) != l.allows(host) })
	var denied []*controller
	for _, c := range t.sub.controllers {
		if !l.allows(c.hostNQN) {
			denied = append(denied, c)
		}
	}
	t.mu.Unlock()
	for _, c := range denied {
		c.kill(errHostDenied)
	}
	return nil
}

// Hosts returns the allow list in order, and whether it is open to any host.
func (t *Target) Hosts() (hosts []string, anyHost bool) {
	l := t.hosts.Load()
	for h := range l.hosts {
		hosts = append(hosts, h)
	}
	slices.Sort(hosts)
	return hosts, l.any
}
