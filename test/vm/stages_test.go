package vmtest

import "testing"

// matches reads a pattern as go test does.
func TestMatches(t *testing.T) {
	for _, c := range []struct {
		pattern, name string
		want          bool
	}{
		{"", "TestKernelHost/soft/io", true},
		{"KernelHost", "TestKernelHost/soft/io", true},
		{"^TestKernelHost$/^soft$", "TestKernelHost/soft/io", true},
		{"^TestKernelHost$/^soft$", "TestKernelHost/siw/io", false},
		{"^TestKernelHost$/^soft$/io", "TestKernelHost/soft/io", true},
		{"^TestKernelHost$/^soft$/io", "TestKernelHost/soft/churn", false},
		{"TestWire|TestKernelHost/(soft|siw)/^(io|churn)$", "TestKernelHost/siw/churn", true},
		{"TestWire|TestKernelHost/(soft|siw)/^(io|churn)$", "TestKernelHost/rxe/churn", false},
		{"TestKernelHost/soft/io|TestKernelTarget/rxe/[a|/]", "TestKernelTarget/rxe/a", true},
		{`a\|b/c`, "a|b/c", true},
	} {
		if got := matches(c.pattern, c.name); got != c.want {
			t.Errorf("%q matches %q: %v", c.pattern, c.name, got)
		}
	}
}
