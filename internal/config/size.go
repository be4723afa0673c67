package config

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

var units = [...]struct {
	suffix string
	factor int64
}{{"K", 1 << 10}, {"M", 1 << 20}, {"G", 1 << 30}, {"T", 1 << 40}, {"P", 1 << 50}}

// ParseSize reads a number of bytes: "4096", "4k", "64M", "1GiB". Units are
// powers of 1024, large or small letters, with or without "B" or "iB".
func ParseSize(s string) (int64, error) {
	t := strings.ToUpper(strings.TrimSpace(s))
	factor := int64(1)
	u := strings.TrimLeft(t, "0123456789.")
	num := t[:len(t)-len(u)]
	if u != "" && u != "B" {
		factor = 0
		for _, x := range units {
			if u == x.suffix || u == x.suffix+"B" || u == x.suffix+"IB" {
				factor = x.factor
			}
		}
	}
	n, err := strconv.ParseInt(num, 10, 64)
	if err != nil || factor == 0 || n > math.MaxInt64/factor {
		return 0, fmt.Errorf("%q is no size: write a whole number and a unit, as in 4k, 64M, 1GiB", s)
	}
	return n * factor, nil
}

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
	n, err := ParseSize(string(b))
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
