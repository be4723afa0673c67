// Package envtest helps tests: what they do where they cannot run, what they log, and
// what others have captured for them.
package envtest

import (
	"fmt"
	"os"
	"testing"
)

// CI reports whether the environment says that everything is installed and allowed (CI=true).
func CI() bool { return os.Getenv("CI") == "true" }

// Lacks ends a test for which something is missing on this machine: a tool, a right, a feature
// of the kernel. It is skipped; where CI=true nothing may be missing, and it fails.
// CONTRIBUTING.md lists what may be skipped even there, by t.Skip.
func Lacks(t testing.TB, format string, args ...any) {
	t.Helper()
	msg := fmt.Sprintf(format, args...)
	if CI() {
		t.Fatalf("%s (CI=true: this must not be missing)", msg)
	}
	t.Skip(msg)
}
