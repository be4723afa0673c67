package test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
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
