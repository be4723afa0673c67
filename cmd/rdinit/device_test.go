package main

import (
	"testing"

	"rdblk/protocol"
)

// What is written into the kernel is understood by the next process.
func TestIdentifier(t *testing.T) {
	id := protocol.RandomUUID()
	s := identifier(id, 7, "nqn.2026-11.io.rdblk:x")
	if got := hostIDOf(s); got != id {
		t.Errorf("%q: %v, want %v", s, got, id)
	}
	for _, bad := range []string{"", "rdblk1 ", "rdblk1 00ff 1 nqn", "other " + s} {
		if got := hostIDOf(bad); !got.IsZero() {
			t.Errorf("%q: %v", bad, got)
		}
	}
}
