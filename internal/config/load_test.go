package config

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

type sample struct {
	Name   string        `mapstructure:"name"`
	Count  int           `mapstructure:"count"`
	On     bool          `mapstructure:"on"`
	Wait   time.Duration `mapstructure:"wait"`
	Hosts  []string      `mapstructure:"hosts"`
	Things []thing       `mapstructure:"things"`
	Log    struct {
		Level string `mapstructure:"level"`
	} `mapstructure:"log"`
}

type thing struct {
	Path string `mapstructure:"path"`
	ID   uint32 `mapstructure:"id"`
}

func (t *thing) UnmarshalText(b []byte) error { t.Path = string(b); return nil }

func (s *sample) Validate() error {
	var errs []error
	if s.Count < 0 {
		errs = append(errs, fmt.Errorf("count: %d is negative", s.Count))
	}
	return errors.Join(errs...)
}

func defaults() *sample {
	s := &sample{Name: "default", Count: 1, Wait: time.Second}
	s.Log.Level = "info"
	return s
}

func write(t *testing.T, text string) string {
	t.Helper()
	p := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPrecedenceIsFlagEnvironmentFileDefault(t *testing.T) {
	file := write(t, "name: file\ncount: 3\nwait: 3s\nlog:\n  level: warn\nhosts: [x, y]\n")
	env := []string{"T_NAME=env", "T_COUNT=2", "T_LOG_LEVEL=debug", "OTHER=1", "T_ON=", "T_CONFIG=whatever"}
	fs := pflag.NewFlagSet("t", pflag.ContinueOnError)
	fs.String("name", "", "")
	fs.String("wait", "99s", "")
	fs.StringArray("host", nil, "")
	keys := map[string]string{"name": "name", "wait": "wait", "host": "hosts"}

	got := defaults()
	if err := Load(got, Source{Prefix: "T_", Environ: env, File: file, Flags: fs, Keys: keys}); err != nil {
		t.Fatal(err)
	}
	want := defaults()
	want.Name, want.Count, want.Wait, want.Hosts, want.Log.Level = "env", 2, 3*time.Second, []string{"x", "y"}, "debug"
	if !reflect.DeepEqual(got, want) {
		t.Errorf("without flags\n got %+v\nwant %+v", got, want)
	}

	if err := fs.Parse([]string{"--name=flag", "--host", "a,b", "--host=c"}); err != nil {
		t.Fatal(err)
	}
	got = defaults()
	if err := Load(got, Source{Prefix: "T_", Environ: env, File: file, Flags: fs, Keys: keys, Set: map[string]any{"count": 7}}); err != nil {
		t.Fatal(err)
	}
	want.Name, want.Hosts, want.Count = "flag", []string{"a,b", "c"}, 7
	if !reflect.DeepEqual(got, want) {
		t.Errorf("with flags\n got %+v\nwant %+v", got, want)
	}
}

func TestListsAndStructuresFromFileAndEnvironment(t *testing.T) {
	file := write(t, "things:\n  - path: /a\n    id: 7\n  - /b\n")
	got := defaults()
	if err := Load(got, Source{File: file}); err != nil {
		t.Fatal(err)
	}
	if want := []thing{{"/a", 7}, {Path: "/b"}}; !reflect.DeepEqual(got.Things, want) {
		t.Errorf("things %+v, want %+v", got.Things, want)
	}
	got = defaults()
	if err := Load(got, Source{Prefix: "T_", Environ: []string{"T_THINGS=/c, /d", "T_HOSTS=one"}, File: file}); err != nil {
		t.Fatal(err)
	}
	if want := []thing{{Path: "/c"}, {Path: "/d"}}; !reflect.DeepEqual(got.Things, want) || !reflect.DeepEqual(got.Hosts, []string{"one"}) {
		t.Errorf("things %+v hosts %v, want %+v [one]", got.Things, got.Hosts, want)
	}
}

// What a number would silently become another one of, or a truth value, is refused.
func TestNumbersAreTakenAsTheyAre(t *testing.T) {
	for text, want := range map[string]string{
		"count: 1.5": `count: "1.5" is no whole number`, "count: true": `count: "true" is no whole number`,
		"things: [{path: /a, id: 2.5}]": `id: "2.5" is no whole number`,
		"on: 2":                         `on: "2" is neither true nor false`, "on: 0.5": `on: "0.5" is neither true nor false`,
	} {
		if err := Load(defaults(), Source{File: write(t, text+"\n")}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
	got := defaults()
	if err := Load(got, Source{File: write(t, "count: 3.0\non: 1\n")}); err != nil || got.Count != 3 || !got.On {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestEverythingWrongIsSaidAtOnce(t *testing.T) {
	file := write(t, "nmae: x\ncount: -5\nwait: 10\nlog:\n  levle: debug\nthings:\n  - path: /a\n    idd: 1\n    id: -1\n")
	err := Load(defaults(), Source{Prefix: "T_", Environ: []string{"T_ON=perhaps", "T_NOPE=1", "T_LOG_LEVLE=x", "T_COUNT=many"}, File: file})
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		"nmae: no such setting in " + file + " (did you mean name?)", "log.levle: no such setting in " + file + " (did you mean level?)",
		"things[0].idd: no such setting in " + file + " (did you mean id?)",
		"environment variable T_NOPE: no such setting", "wait: 10 has no unit", "things[0].id: -1 is negative",
		`on: "perhaps" is neither true nor false`, "T_LOG_LEVLE: no such setting (did you mean T_LOG_LEVEL?)", `count: "many" is no whole number`,
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing", want)
		}
	}
	for line := range strings.SplitSeq(err.Error(), "\n") {
		if line == "" || strings.Contains(line, "strconv") || strings.Contains(line, "parse value") {
			t.Errorf("a line that is no operator's: %q", line)
		}
	}
	t.Logf("the message:\n%v", err)
}

func TestFileProblems(t *testing.T) {
	for name, c := range map[string]struct{ file, want string }{
		"directory":  {os.TempDir(), "read configuration " + os.TempDir() + ": is a directory (name the file in it)"},
		"missing":    {"/nonexistent/x.yaml", "read configuration /nonexistent/x.yaml: no such file or directory (is its name right?"},
		"no type":    {os.DevNull, "none of .yaml"},
		"list":       {write(t, "count: [1, 2]\n"), "count: it is a list, and one value is wanted"},
		"group":      {write(t, "count: {a: 1}\n"), "count: it is a group, and one value is wanted"},
		"not yaml":   {write(t, "a: [\n"), "c.yaml"},
		"tabs":       {write(t, "hosts:\n\t- a\n"), "indent with spaces, not with tabs"},
		"wrong kind": {write(t, "log: debug\n"), "log: it is a group of settings"},
		"duplicate":  {write(t, "name: a\nname: b\n"), "already defined"},
	} {
		if err := Load(defaults(), Source{File: c.file}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want one with %q", name, err, c.want)
		}
	}
	// A key without a value is the default, an empty file all defaults.
	for _, text := range []string{"", "name:\nhosts:\n"} {
		got := defaults()
		if err := Load(got, Source{File: write(t, text)}); err != nil || !reflect.DeepEqual(got, defaults()) {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
}

func TestKeys(t *testing.T) {
	want := []string{"count", "hosts", "log.level", "name", "on", "things", "wait"}
	if got := Keys(defaults()); !reflect.DeepEqual(got, want) {
		t.Errorf("keys %v, want %v", got, want)
	}
	if got := EnvName("T_", "log.level"); got != "T_LOG_LEVEL" {
		t.Error(got)
	}
}

func TestChanged(t *testing.T) {
	a, b := defaults(), defaults()
	b.Hosts = []string{}
	if got := Changed(a, b); got != nil {
		t.Errorf("nothing changed, but %v", got)
	}
	b.Hosts, b.Log.Level, b.Things = []string{"x"}, "warn", []thing{{Path: "/a"}}
	if got := fmt.Sprint(Changed(a, b)); got != "[hosts log.level things]" {
		t.Errorf("changed %v", got)
	}
}

// A text that looks like a number is not silently another text.
func TestUnquotedNumbersAreNoTexts(t *testing.T) {
	for _, v := range []string{"0010", "007", "1e3", "1.10", "12345678901234567890", "true"} {
		err := Load(defaults(), Source{File: write(t, "name: "+v+"\n")})
		if err == nil || !strings.Contains(err.Error(), "name") || !strings.Contains(err.Error(), "quotes") {
			t.Errorf("name: %s: %v", v, err)
		}
		got := defaults()
		if err := Load(got, Source{File: write(t, "name: '"+v+"'\n")}); err != nil || got.Name != v {
			t.Errorf("name: '%s': %q, %v", v, got.Name, err)
		}
	}
}

func TestCheck(t *testing.T) {
	c := NewCheck(defaults())
	Between(c, "count", 5, 1, 5, "")
	Between(c, "wait", 0, time.Second, time.Minute, "not at all")
	if err := c.Err(); err != nil {
		t.Error(err)
	}
	Between(c, "count", 6, 1, 5, "")
	Between(c, "threads", -1, 0, 5, "one per processor")
	Between(c, "wait", 2*time.Hour, time.Second, 90*time.Minute, "")
	Between(c, "wait", time.Duration(0), time.Second, 90*time.Minute, "")
	Between(c, "wait", time.Nanosecond, time.Second, time.Minute, "not at all")
	c.OneOf("name", "x", "y", "z")
	want := "count: 6 is outside 1 to 5 (for example 1)\nthreads: -1 is outside 0 to 5 (0: one per processor)\n" +
		"wait: 2h is outside 1s to 1h30m (for example 1s)\nwait: 0s is outside 1s to 1h30m (for example 1s)\n" +
		"wait: 1ns is outside 1s to 1m (0: not at all)\nname: \"x\" is none of y, z"
	if err := c.Err(); err == nil || err.Error() != want || !c.Has("name") || c.Has("nam") {
		t.Errorf("%v", err)
	}
}
