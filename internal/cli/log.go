package cli

import (
	"fmt"
	"io"
	"log/slog"
	"strings"

	"rdblk/internal/timeout"
)

// NewLogger makes the program's logger. level is debug, info, warn or error;
// format is text (key=value) or json.
func NewLogger(w io.Writer, level, format string) (*slog.Logger, error) {
	var l slog.Level
	if err := CheckLog(level, format); err != nil {
		return nil, err
	}
	l.UnmarshalText([]byte(level))
	o := &slog.HandlerOptions{Level: l, ReplaceAttr: logAttr}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, o)), nil
	}
	return slog.New(slog.NewTextHandler(w, o)), nil
}

// logAttr writes durations with their unit, which JSON has no form for.
func logAttr(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindDuration {
		a.Value = slog.StringValue(timeout.Text(a.Value.Duration()))
	}
	return a
}

// CheckLog checks the two words that NewLogger takes.
func CheckLog(level, format string) error {
	switch strings.ToLower(level) {
	case "debug", "info", "warn", "error":
	default:
		return fmt.Errorf("level: %q is none of debug, info, warn, error", level)
	}
	switch format {
	case "text", "json":
	default:
		return fmt.Errorf("format: %q is neither text nor json", format)
	}
	return nil
}
