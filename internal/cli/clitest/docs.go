package clitest

import (
	"fmt"
	"maps"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"rdblk/internal/config"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
)

// CheckSettingsTable compares a table in a document with a settings struct that
// holds the defaults. The table is the first after the heading "### PROGRAM"; its columns are
// key, default, flag, text.
func CheckSettingsTable(t testing.TB, doc, program string, defaults any, flags map[string]string) {
	t.Helper()
	want := map[string]string{}
	values := config.Values(defaults)
	for k, v := range values {
		want[k] = strings.TrimSpace(fmt.Sprintf("%s | %s", defaultText(v), flags[k]))
	}
	_, text, ok := strings.Cut(read(t, doc), "\n### "+program+"\n")
	if !ok {
		t.Fatalf("%s has no section %q", doc, program)
	}
	row := regexp.MustCompile("^\\| `([a-z_.]+)` \\|(.*?)\\|(.*?)\\| \\S")
	for l := range strings.SplitSeq(text, "\n") {
		if strings.HasPrefix(l, "#") {
			break
		}
		m := row.FindStringSubmatch(l)
		if m == nil {
			continue
		}
		got := strings.TrimSpace(strings.TrimSpace(m[2]) + " | " + strings.TrimSpace(m[3]))
		if w, ok := want[m[1]]; !ok {
			t.Errorf("%s: there is no setting %s", doc, m[1])
		} else if got != w {
			t.Errorf("%s: %s is %q, the program has %q", doc, m[1], got, w)
		}
		delete(want, m[1])
	}
	for k := range want {
		t.Errorf("%s lacks the setting %s", doc, k)
	}
}

// CheckBounds compares what a program says about a value that is out of bounds, "KEY: V is outside LOW to HIGH …",
// with the setting's row in the table of [CheckSettingsTable] and the comment behind it in a sample configuration.
func CheckBounds(t testing.TB, doc, program, sample, message string) {
	t.Helper()
	m := regexp.MustCompile(`^([a-z_.]+): \S+ is outside (\S+ to \S+)`).FindStringSubmatch(message)
	if m == nil {
		t.Errorf("%q does not name the bounds", message)
		return
	}
	key, bounds := m[1], regexp.QuoteMeta(strings.TrimRight(m[2], ":,"))
	_, text, _ := strings.Cut(read(t, doc), "\n### "+program+"\n")
	text, _, _ = strings.Cut(text, "\n#")
	if !regexp.MustCompile("(?m)^\\| `" + key + "` \\|.*\\b" + bounds + "\\b.*\\|$").MatchString(text) {
		t.Errorf("%s does not give the bounds of %s: %s", doc, key, m[2])
	}
	if !regexp.MustCompile("(?m)^" + key + ": .* # .*\\b" + bounds + "\\b").MatchString(read(t, sample)) {
		t.Errorf("%s does not give the bounds behind %s: %s", sample, key, m[2])
	}
}

func defaultText(v any) string {
	s := fmt.Sprint(v)
	if d, ok := v.(time.Duration); ok && d >= time.Minute && d%time.Minute == 0 {
		s = strings.TrimSuffix(s, "0s")
	}
	if s == "" {
		return ""
	}
	return "`" + s + "`"
}

// CheckMetricsNamed tells which metrics of an exposition are not in the document, which of the document are
// not there (prefix is that of the program), and which values of labels its table has wrong:
//
//	| `label` | `metric`, … | `value`, … |
func CheckMetricsNamed(t testing.TB, doc, prefix, exposition string) {
	t.Helper()
	_, text, ok := strings.Cut(read(t, doc), "\n## Metrics\n")
	text, _, ok2 := strings.Cut(text, "\n## ")
	if !ok || !ok2 {
		t.Fatalf("%s has no section Metrics", doc)
	}
	there := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^# TYPE (\S+) `).FindAllStringSubmatch(exposition, -1) {
		there[m[1]] = true
		if !strings.Contains(text, "`"+m[1]+"`") {
			t.Errorf("%s lacks the metric %s", doc, m[1])
		}
	}
	if len(there) == 0 {
		t.Error("there are no metrics")
	}
	for _, m := range regexp.MustCompile("`("+prefix+"[a-z0-9_]+)`").FindAllStringSubmatch(text, -1) {
		if !there[m[1]] {
			t.Errorf("%s: there is no metric %s", doc, m[1])
		}
	}
	word := regexp.MustCompile("`([^`]+)`")
	rows := 0
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z]+)` \\| ([^|]+) \\| ([^|]+) \\|$").FindAllStringSubmatch(text, -1) {
		want := map[string]bool{}
		for _, w := range word.FindAllStringSubmatch(m[3], -1) {
			want[w[1]] = true
		}
		for _, name := range word.FindAllStringSubmatch(m[2], -1) {
			if !there[name[1]] { // of the other program
				continue
			}
			rows++
			got := map[string]bool{}
			for _, v := range regexp.MustCompile(`(?m)^`+name[1]+`(?:_count)?\{[^}]*\b`+m[1]+`="([^"]*)"`).FindAllStringSubmatch(exposition, -1) {
				got[v[1]] = true
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("%s: %s of %s is said to be %v and is %v", doc, m[1], name[1], slices.Sorted(maps.Keys(want)), slices.Sorted(maps.Keys(got)))
			}
		}
	}
	if rows < 4 {
		t.Errorf("%s says what the labels of %d metrics are", doc, rows)
	}
}

// LintMetrics holds an exposition to Prometheus' own rules for names, help and units.
func LintMetrics(t testing.TB, exposition string) {
	t.Helper()
	problems, err := promlint.New(strings.NewReader(exposition)).Lint()
	if err != nil {
		t.Error(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// CheckFieldsNamed tells which JSON fields of a struct are not in the document.
func CheckFieldsNamed(t testing.TB, doc string, s reflect.Type) {
	t.Helper()
	text := read(t, doc)
	for i := range s.NumField() {
		name, _, _ := strings.Cut(s.Field(i).Tag.Get("json"), ",")
		if !strings.Contains(text, "`"+name+"`") {
			t.Errorf("%s lacks the field %s", doc, name)
		}
	}
}

func read(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
