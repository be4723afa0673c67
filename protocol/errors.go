package protocol

import (
	"errors"
	"fmt"
)

// Sentinel errors of the parsers; they are wrapped with what was parsed.
var (
	// ErrShort says that there are fewer bytes than the structure has.
	ErrShort = errors.New("too short")
	// ErrFormat says that the record format (RECFMT) is one this package does
	// not know.
	ErrFormat = errors.New("unknown record format")
	// ErrInvalid says that a value is outside what the specification allows.
	ErrInvalid = errors.New("invalid value")
)

// short checks that b has n bytes for what.
func short(what string, b []byte, n int) error {
	if len(b) < n {
		return fmt.Errorf("%s: %w: %d bytes, want %d", what, ErrShort, len(b), n)
	}
	return nil
}
