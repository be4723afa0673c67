package test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Every test that docs/interop.md names as evidence is there.
func TestInteropNamesTests(t *testing.T) {
	doc, err := os.ReadFile("../docs/interop.md")
	if err != nil {
		t.Fatal(err)
	}
	there := map[string]bool{}
	decl := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	err = filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		b, err := os.ReadFile(path)
		for _, m := range decl.FindAllSubmatch(b, -1) {
			there[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile("`(Test[A-Z]\\w*)[`/]").FindAllSubmatch(doc, -1)
	if len(named) < 50 {
		t.Errorf("only %d tests are named", len(named))
	}
	for _, m := range named {
		if !there[string(m[1])] {
			t.Errorf("docs/interop.md names %s, which does not exist", m[1])
		}
	}
}

// The table of stages says what the code has: the links of each, and which of them are of the suite.
func TestInteropStages(t *testing.T) {
	code, err := os.ReadFile("vm/host_test.go")
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile("../docs/interop.md")
	if err != nil {
		t.Fatal(err)
	}
	type links struct{ all, suite string }
	there := map[string]links{}
	list := func(s ...string) string {
		var l []string
		for _, link := range []string{"soft", "iwarp", "rxe", "siw"} {
			if slices.Contains(strings.Fields(strings.Join(s, " ")), link) {
				l = append(l, link)
			}
		}
		if l == nil {
			return "none"
		}
		return strings.Join(l, ", ")
	}
	for test, stage := range map[string]string{
		"TestKernelHost":   `target\("(\w+)", "([\w ]*)", "([\w ]*)"|name: "(\w+)", script: "[\w.-]+",(?: suite: "([\w ]*)",)? more: "([\w ]*)"`,
		"TestKernelTarget": `attach\("(\w+)", "([\w ]*)", "([\w ]*)"()()()`,
	} {
		_, body, _ := strings.Cut(string(code), "\nfunc "+test+"(")
		body, _, _ = strings.Cut(body, "\n}\n")
		for _, m := range regexp.MustCompile(stage).FindAllStringSubmatch(body, -1) {
			name, suite, more := m[1]+m[4], m[2]+m[5], m[3]+m[6]
			there[test+"/"+name] = links{list(suite, more), list(suite)}
		}
	}
	if len(there) < 9 {
		t.Fatalf("only %d stages in the code: %v", len(there), there)
	}
	_, section, _ := strings.Cut(string(doc), "\n## What runs when\n")
	section, _, _ = strings.Cut(section, "\n## ")
	for _, row := range regexp.MustCompile("(?m)^\\| `(Test\\w+/\\w+)` \\| [^|]* \\| ([^|]*) \\| ([^|]*) \\|$").FindAllStringSubmatch(section, -1) {
		want, ok := there[row[1]]
		if got := (links{row[2], row[3]}); !ok || got != want {
			t.Errorf("docs/interop.md: %s over %v; the code has %v", row[1], got, want)
		}
		delete(there, row[1])
	}
	for name := range there {
		t.Errorf("docs/interop.md: no row for %s", name)
	}
	// Stages that are named as evidence are among them.
	for _, m := range regexp.MustCompile("`(TestKernel(?:Host|Target)/\\w+)`").FindAllSubmatch(doc, -1) {
		if !strings.Contains(section, "| `"+string(m[1])+"` |") {
			t.Errorf("docs/interop.md names %s, which is no stage", m[1])
		}
	}
}
