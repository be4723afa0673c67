package test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The messages that the guide explains are messages of the code (or of the C library).
func TestTroubleshootingQuotesTheCode(t *testing.T) {
	var code strings.Builder
	err := filepath.WalkDir("..", func(path string, e fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") {
			var b []byte
			if b, err = os.ReadFile(path); err == nil {
				code.Write(b)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	// Long messages are joined of literals.
	all := regexp.MustCompile(`"\s*\+\s*"`).ReplaceAllString(code.String(), "")
	all += "connection refused address already in use"
	guide, err := os.ReadFile("../docs/operating.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, ok := strings.Cut(string(guide), "\n## Troubleshooting\n")
	rows := regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllStringSubmatch(section, -1)
	if !ok || len(rows) < 10 {
		t.Fatalf("%d messages in the section", len(rows))
	}
	for _, m := range rows {
		if !strings.Contains(all, m[1]) {
			t.Errorf("no code says %q", m[1])
		}
	}
}

// Links between the documents lead somewhere.
func TestLinksInDocuments(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`)
	for _, pattern := range []string{"../*.md", "../docs/*.md"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %v, %v", pattern, files, err)
		}
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range link.FindAllStringSubmatch(string(b), -1) {
				if _, err := os.Stat(filepath.Join(filepath.Dir(f), m[1])); err != nil {
					t.Errorf("%s: %v", f, err)
				}
			}
		}
	}
}

// The README's commands exist, with their flags.
func TestReadmeCommandsExist(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	flag := regexp.MustCompile(`--[a-z-]+`)
	help := map[string]string{}
	for _, prog := range []string{"rdtarget", "rdinit"} {
		files, _ := filepath.Glob("../cmd/" + prog + "/testdata/help-*.txt")
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			help[prog+" "+strings.TrimSuffix(strings.TrimPrefix(filepath.Base(f), "help-"), ".txt")] = string(b)
		}
	}
	n := 0
	for _, m := range regexp.MustCompile(`(?m)^(?:bin/)?(rdtarget|rdinit) ([a-z-]+)(.*)$`).FindAllStringSubmatch(string(readme), -1) {
		text, ok := help[m[1]+" "+m[2]]
		if !ok {
			t.Errorf("there is no command %s %s", m[1], m[2])
			continue
		}
		for _, f := range flag.FindAllString(m[3], -1) {
			if !strings.Contains(text, f+" ") && !strings.Contains(text, f+"\n") {
				t.Errorf("%s %s has no flag %s", m[1], m[2], f)
			}
		}
		n++
	}
	if n < 10 {
		t.Errorf("only %d commands found", n)
	}
}

// The tests that the page on interoperation names exist.
func TestInteroperationNamesTests(t *testing.T) {
	page, err := os.ReadFile("../docs/interop.md")
	if err != nil {
		t.Fatal(err)
	}
	var code strings.Builder
	err = filepath.WalkDir("..", func(path string, e fs.DirEntry, err error) error {
		if err == nil && (strings.HasSuffix(path, "_test.go") || strings.HasSuffix(path, "rdmatest/run.go")) {
			var b []byte
			if b, err = os.ReadFile(path); err == nil {
				code.Write(b)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile("`((?:Test|Fuzz)[A-Z][A-Za-z]+)").FindAllStringSubmatch(string(page), -1)
	if len(names) < 50 {
		t.Fatalf("%d names of tests on the page", len(names))
	}
	for _, m := range names {
		if !strings.Contains(code.String(), "func "+m[1]+"(") {
			t.Errorf("there is no %s", m[1])
		}
	}
	// The cases of the contract go without Test.
	_, list, _ := strings.Cut(string(page), "\n## iWARP: known problems\n")
	for _, m := range regexp.MustCompile("`([A-Z][a-z]+[A-Z][A-Za-z]+)`").FindAllStringSubmatch(list, -1) {
		if n := m[1]; !strings.HasPrefix(n, "Test") && !strings.HasPrefix(n, "Fuzz") && !strings.Contains(code.String(), `{"`+n+`", test`) {
			t.Errorf("the contract has no case %s", n)
		}
	}
}

// Every wait that ends by itself says whose time it was: what a context of package context alone says is no message
// for an operator.
func TestTimeoutsSayWhoseTheyAre(t *testing.T) {
	bare := regexp.MustCompile(`context\.With(Timeout|Deadline)\(|(return|err =|Errorf\(.*,) ctx\.Err\(\)`)
	n := 0
	for _, dir := range []string{"../cmd", "../internal", "../initiator", "../target", "../nbd", "../rdma/iwarp", "../rdma/verbs"} {
		err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || strings.Contains(path, "nbdtest") {
				return err
			}
			b, err := os.ReadFile(path)
			n++
			for i, line := range strings.Split(string(b), "\n") {
				if bare.MatchString(line) {
					t.Errorf("%s:%d: use internal/timeout, and context.Cause: %s", path, i+1, strings.TrimSpace(line))
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if n < 100 {
		t.Errorf("only %d files", n)
	}
}

// The units start commands that there are, with settings that there are, and tell systemd no shorter times than the
// programs take.
func TestUnitsStartCommandsThatExist(t *testing.T) {
	files, err := filepath.Glob("../configs/*.service")
	if err != nil || len(files) != 2 {
		t.Fatalf("%v, %v", files, err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		m := regexp.MustCompile(`(?m)^ExecStart=/usr/local/bin/(rdtarget|rdinit) ([a-z]+) (.*)$`).FindStringSubmatch(string(b))
		if m == nil {
			t.Errorf("%s starts nothing", f)
			continue
		}
		help, err := os.ReadFile("../cmd/" + m[1] + "/testdata/help-" + m[2] + ".txt")
		if err != nil {
			t.Errorf("%s: %v", f, err)
			continue
		}
		for _, flag := range regexp.MustCompile(`--[a-z-]+`).FindAllString(m[3], -1) {
			if !strings.Contains(string(help), flag+" ") {
				t.Errorf("%s: %s %s has no flag %s", f, m[1], m[2], flag)
			}
		}
		for _, line := range []string{"Type=notify", "RestartPreventExitStatus=2", "RuntimeDirectoryPreserve=yes", "TimeoutStopSec=20"} {
			if !strings.Contains(string(b), "\n"+line+"\n") {
				t.Errorf("%s lacks %s", f, line)
			}
		}
	}
}
