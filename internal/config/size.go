package config

import (
	"fmt"
	"strconv"

	"rdblk/blockdev"
)

var units = [...]struct {
	suffix string
	factor int64
}{{"K", 1 << 10}, {"M", 1 << 20}, {"G", 1 << 30}, {"T", 1 << 40}, {"P", 1 << 50}}

// FormatSize writes a number of bytes with the largest unit that keeps it exact
// to three digits: "64 MiB", "1.5 GiB", "513 B".
func FormatSize(n int64) string {
	if n < 1<<10 {
		return fmt.Sprintf("%d B", n)
	}
	f, u := float64(n), 0
	for f >= 1024 && u < len(units) {
		f /= 1024
		u++
	}
	return strconv.FormatFloat(f, 'g', digits(f), 64) + " " + units[u-1].suffix + "iB"
}

func digits(f float64) int {
	if f >= 1000 {
		return 4
	}
	return 3
}

// Size is a number of bytes that is written with a unit: 4096, 4k, 64M, 1GiB.
type Size int64

// UnmarshalText reads a size.
func (s *Size) UnmarshalText(b []byte) error {
	n, err := blockdev.ParseSize(string(b))
	*s = Size(n)
	return err
}

// Set reads a size from a flag.
func (s *Size) Set(v string) error { return s.UnmarshalText([]byte(v)) }

// Type is the word for a size in help texts.
func (s *Size) Type() string { return "size" }

func (s Size) String() string {
	if s == 0 {
		return "0"
	}
	for i := len(units) - 1; i >= 0; i-- {
		if int64(s)%units[i].factor == 0 {
			return strconv.FormatInt(int64(s)/units[i].factor, 10) + units[i].suffix
		}
	}
	return strconv.FormatInt(int64(s), 10)
}
