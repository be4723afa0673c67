package cli

import (
	"fmt"
	"net"
	"strings"

	"golang.org/x/sys/unix"
)

// Notify tells the service manager the state (sd_notify(3)): lines such as
// "READY=1" or "STOPPING=1". Without NOTIFY_SOCKET in the environment it does nothing.
func (e *Env) Notify(state ...string) error {
	path := e.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil
	}
	if path[0] == '@' { // abstract name
		path = "\x00" + path[1:]
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("notify the service manager: %w", err)
	}
	defer c.Close()
	if _, err := c.Write([]byte(strings.Join(state, "\n"))); err != nil {
		return fmt.Errorf("notify the service manager: %w", err)
	}
	return nil
}

// Reloading is the pair of lines with which a reload begins; READY=1 ends it.
func Reloading() []string {
	var t unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &t)
	return []string{"RELOADING=1", fmt.Sprintf("MONOTONIC_USEC=%d", t.Nano()/1000)}
}
