//go:build invariants || race

package target

// invariants switches checks on that are too dear for every I/O.
const invariants = true
