package config

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"rdblk/internal/timeout"
)

// A Check collects what is wrong with settings, each with its name, its value, what it may be and an example.
type Check struct {
	defaults map[string]any
	errs     []error
}

// NewCheck begins one; the defaults are the examples.
func NewCheck(defaults any) *Check { return &Check{defaults: Values(defaults)} }

// Bad notes a problem of a setting.
func (c *Check) Bad(key, format string, a ...any) {
	c.errs = append(c.errs, fmt.Errorf("%s: %s", key, fmt.Sprintf(format, a...)))
}

// Has tells whether a problem of the setting has been noted.
func (c *Check) Has(key string) bool {
	for _, e := range c.errs {
		if strings.HasPrefix(e.Error(), key+": ") {
			return true
		}
	}
	return false
}

// Err is all problems, or nil.
func (c *Check) Err() error { return errors.Join(c.errs...) }

// Between notes a value that is outside low to high. zero says what 0 means if that is allowed and
// special, else it is empty.
func Between[T int | Size | time.Duration](c *Check, key string, v, low, high T, zero string) {
	switch {
	case v >= low && v <= high:
	case zero != "":
		c.Bad(key, "%s is outside %s to %s (0: %s)", show(v), show(low), show(high), zero)
	default:
		c.Bad(key, "%s is outside %s to %s (for example %s)", show(v), show(low), show(high), show(c.defaults[key]))
	}
}

// Positive notes a duration or size that is not above zero.
func Positive[T int | Size | time.Duration](c *Check, key string, v T) {
	if v <= 0 {
		c.Bad(key, "%s is not above 0 (for example %s)", show(v), show(c.defaults[key]))
	}
}

// OneOf notes a word that is none of those that there are.
func (c *Check) OneOf(key, v string, words ...string) {
	for _, w := range words {
		if v == w {
			return
		}
	}
	c.Bad(key, "%q is none of %s", v, strings.Join(words, ", "))
}

func show(v any) string {
	if d, ok := v.(time.Duration); ok {
		return timeout.Text(d)
	}
	return fmt.Sprint(v)
}
