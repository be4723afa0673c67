package cli

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
)

// Misfit says why a value is none of its kind, and shows one that is. kind is what package
// pflag calls the type of a flag.
func Misfit(kind, value string) string {
	switch {
	case kind == "duration":
		if _, err := strconv.ParseFloat(value, 64); err == nil {
			return fmt.Sprintf("%s has no unit: write a duration such as 500ms, 10s, 2m", value)
		}
		return fmt.Sprintf("%q is no duration: write 500ms, 10s, 2m", value)
	case kind == "bool":
		return fmt.Sprintf("%q is neither true nor false", value)
	case kind == "size":
		return fmt.Sprintf("%q is no size: write a number of bytes with an optional unit, such as 4096, 64k, 1M, 10G", value)
	case strings.HasPrefix(kind, "uint") && strings.HasPrefix(value, "-"):
		return fmt.Sprintf("%s is negative: write a whole number such as 1", value)
	case strings.HasPrefix(kind, "int"), strings.HasPrefix(kind, "uint"):
		if _, err := strconv.ParseFloat(value, 64); errors.Is(err, strconv.ErrRange) || err == nil && strings.Trim(value, "+-0123456789") == "" {
			return fmt.Sprintf("%s is too large", value)
		}
		return fmt.Sprintf("%q is no whole number: write one such as 4", value)
	}
	return fmt.Sprintf("%q is no %s", value, kind)
}

// flagError puts what package pflag has against a command line into our words.
func flagError(fs *pflag.FlagSet, err error) error {
	var value *pflag.InvalidValueError
	var missing *pflag.ValueRequiredError
	var unknown *pflag.NotExistError
	switch {
	case errors.As(err, &value):
		f := value.GetFlag()
		return fmt.Errorf("--%s: %s", f.Name, Misfit(f.Value.Type(), value.GetValue()))
	case errors.As(err, &missing):
		f := missing.GetFlag()
		name, _ := pflag.UnquoteUsage(f)
		return fmt.Errorf("--%s needs a value: --%s %s", f.Name, f.Name, name)
	case errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() == "":
		var names []string
		fs.VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		return fmt.Errorf("unknown flag: --%s%s", unknown.GetSpecifiedName(), DidYouMean("--", unknown.GetSpecifiedName(), names))
	}
	return err
}

// DidYouMean is " (did you mean PREFIXword?)" with the word that is like the one that was written, or
// empty if none is.
func DidYouMean(prefix, word string, words []string) string {
	if w := closest(word, words); w != "" {
		return " (did you mean " + prefix + w + "?)"
	}
	return ""
}

// closest is the word with at most two typing mistakes, and at most one in three letters.
func closest(word string, words []string) string {
	plain := func(s string) string { return strings.ReplaceAll(strings.ToLower(s), "-", "_") }
	best, least := "", min(3, len(word)/3+1)
	if len(word) > 100 {
		return ""
	}
	for _, w := range words {
		if d := typos(plain(word), plain(w)); d < least {
			best, least = w, d
		}
	}
	return best
}

// typos counts the letters that were left out, added, or taken for others, and the neighbours exchanged.
func typos(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		for j := range rows[i] {
			switch {
			case i == 0 || j == 0:
				rows[i][j] = i + j
			default:
				same := 1
				if a[i-1] == b[j-1] {
					same = 0
				}
				d := min(rows[i-1][j]+1, rows[i][j-1]+1, rows[i-1][j-1]+same)
				if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
					d = min(d, rows[i-2][j-2]+1)
				}
				rows[i][j] = d
			}
		}
	}
	return rows[len(a)][len(b)]
}
