package main

import (
	"os"
	"path/filepath"
	"strings"

	"rdblk/protocol"
)

// attachmentHostID is the host identifier of what is attached at path, a socket or device: the same when
// the program is started again, so that the target first ends what a killed one has left behind, and no
// write of it lands on a newer one. Two attachments of a machine have different paths.
func attachmentHostID(hostNQN, path string) protocol.UUID {
	return localHostID(os.ReadFile, os.Hostname, hostNQN, path)
}

// localHostID tells apart what may be up at the same time: two with one identifier would throw each
// other out again and again. So the machine's identity and its host name go in as well: a host NQN may
// be configured on several machines, cloned machines may have one identity, and containers of one image may have
// one name for everything but their host.
func localHostID(readFile func(string) ([]byte, error), hostname func() (string, error), hostNQN, path string) protocol.UUID {
	machine, _ := readFile("/etc/machine-id") // containers often have none
	host, _ := hostname()
	if dir, err := filepath.EvalSymlinks(filepath.Dir(path)); err == nil { // as /var/run is /run
		path = filepath.Join(dir, filepath.Base(path))
	}
	return protocol.SinglePathHostID(hostNQN, strings.TrimSpace(string(machine)), host, path)
}
