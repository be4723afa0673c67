package blockdev

import (
	"fmt"
	"math"
	"strings"
)

// ParseSize reads a number of bytes: digits, then nothing or a unit. As with
// truncate(1), K or KiB is 1024 and KB is 1000, and so on with M, G, T, P and E, in either
// case: "4k", "512", "10G", "1TiB".
func ParseSize(s string) (int64, error) {
	digits := 0
	for digits < len(s) && s[digits] >= '0' && s[digits] <= '9' {
		digits++
	}
	bad := func(why string) (int64, error) {
		return 0, fmt.Errorf("size %q: %s (write a number of bytes with an optional unit, like 10G or 512MiB)", s, why)
	}
	if digits == 0 {
		return bad("it does not begin with a number")
	}
	var n int64
	for _, c := range []byte(s[:digits]) {
		d := int64(c - '0')
		if n > (math.MaxInt64-d)/10 {
			return bad("it is too large")
		}
		n = n*10 + d
	}
	unit := strings.ToLower(s[digits:])
	if unit == "" || unit == "b" {
		return n, nil
	}
	power := strings.IndexByte("kmgtpe", unit[0]) + 1
	base := int64(1024)
	switch unit[1:] {
	case "", "ib":
	case "b":
		base = 1000
	default:
		power = 0
	}
	if power == 0 {
		return bad("unknown unit")
	}
	for range power {
		if n > math.MaxInt64/base {
			return bad("it is too large")
		}
		n *= base
	}
	return n, nil
}
