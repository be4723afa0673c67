package main

import (
	"net"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"rdblk/internal/cli/clitest"
)

// Every command that waits for somebody ends when it is told to, not when its timeout is over.
func TestSignalEndsWhatWaits(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0") // takes connections and says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	for _, args := range [][]string{
		{"discover", ln.Addr().String(), "--connect-timeout", "1h"},
		{"bench", ln.Addr().String(), "--nqn", testNQN, "--connect-timeout", "1h"},
	} {
		r := clitest.Start(newProgram, nil, args...)
		c, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		r.Signal(unix.SIGTERM)
		if code := r.Wait(t); code != 1 || !strings.Contains(r.Err.String(), "stopped by a signal (terminated)") {
			t.Errorf("%s: exit %d: %s", args[0], code, r.Err)
		}
		c.Close()
	}
}
