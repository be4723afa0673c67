package config

import (
	"math"
	"testing"
)

func TestSizes(t *testing.T) {
	for in, want := range map[string]int64{"0": 0, "513": 513, "4k": 4096, "4KiB": 4096, "4kb": 4096, "64M": 64 << 20, "1GiB": 1 << 30, " 2T ": 2 << 40, "7P": 7 << 50, "5B": 5} {
		if got, err := ParseSize(in); err != nil || got != want {
			t.Errorf("ParseSize(%q) = %d, %v; want %d", in, got, err, want)
		}
	}
	for _, in := range []string{"", "k", "1.5G", "-1", "4x", "4 kk", "9999999999999999999", "8192P", "1e3", "0x10"} {
		if got, err := ParseSize(in); err == nil {
			t.Errorf("ParseSize(%q) = %d", in, got)
		}
	}
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
