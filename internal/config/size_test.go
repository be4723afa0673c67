package config

import (
	"math"
	"testing"
)

func TestSizes(t *testing.T) {
	for in, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 64 << 20: "64 MiB", 1000 << 20: "1000 MiB", 1023 << 20: "1023 MiB", 1 << 40: "1 TiB", math.MaxInt64: "8192 PiB"} {
		if got := FormatSize(in); got != want {
			t.Errorf("FormatSize(%d) = %q, want %q", in, got, want)
		}
	}
}

func TestSizeText(t *testing.T) {
	for in, want := range map[string]string{"4096": "4K", "1536k": "1536K", "1024M": "1G", "0": "0", "513": "513"} {
		var s Size
		if err := s.Set(in); err != nil || s.String() != want {
			t.Errorf("%q reads as %v, %v; want %s", in, s, err, want)
		}
	}
	var s Size
	if err := s.Set("4q"); err == nil {
		t.Errorf("4q reads as %v", s)
	}
}
