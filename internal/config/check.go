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
	case v >= low && v <= high, v == 0 && zero != "":
	case zero != "":
		c.Bad(key, "%s is outside %s to %s (0: %s)", show(v), show(low), show(high), zero)
	default:
		c.Bad(key, "%s is outside %s to %s (for example %s)", show(v), show(low), show(high), show(c.defaults[key]))
	}
}

// Bounds of max_poll, of both programs: below a microsecond is never, and who would look for work
// for longer than some hundred times what a wake-up costs wants busy.
const (
	minMaxPoll = time.Microsecond
	maxMaxPoll = 10 * time.Millisecond
)

// Polling checks the settings polling and max_poll.
func (c *Check) Polling(polling string, maxPoll time.Duration) {
	c.OneOf("polling", polling, "adaptive", "never", "busy")
	if maxPoll < minMaxPoll || maxPoll > maxMaxPoll {
		c.Bad("max_poll", "%s is outside %s to %s (for example %s; polling: never sleeps at once, polling: busy never)",
			show(maxPoll), show(minMaxPoll), show(maxMaxPoll), show(c.defaults["max_poll"]))
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
