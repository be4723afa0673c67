//go:build !invariants && !race

package target

const invariants = false
