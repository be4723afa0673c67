// Package version knows what this build is called.
package version

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// Version is set by the Makefile from git describe (-ldflags -X).
var Version = ""

// String is the version, or what the Go tool recorded when the Makefile was not used.
func String() string {
	if Version != "" {
		return Version
	}
	if bi, ok := debug.ReadBuildInfo(); ok {
		for _, s := range bi.Settings {
			if s.Key == "vcs.revision" && len(s.Value) >= 12 {
				return "devel-" + s.Value[:12]
			}
		}
	}
	return "devel"
}

// Line is what "PROGRAM version" prints.
func Line(program string) string {
	return fmt.Sprintf("%s %s (%s, %s/%s)", program, String(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
