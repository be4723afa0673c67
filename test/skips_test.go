package test

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// A check that is skipped looks green. So a skip is made by envtest.Lacks, which fails
// where CI=true, or it is in the list of CONTRIBUTING.md with its reason.
func TestSkipsAreListed(t *testing.T) {
	guide, err := os.ReadFile("../CONTRIBUTING.md")
	if err != nil {
		t.Fatal(err)
	}
	_, list, _ := strings.Cut(string(guide), "| file | skips | why |")
	list, _, _ = strings.Cut(list, "\n\n")
	listed := map[string]bool{}
	for _, row := range regexp.MustCompile(`(?m)^\| (.*?) \|`).FindAllStringSubmatch(list, -1) {
		for _, f := range regexp.MustCompile("`([^`]+\\.go)`").FindAllStringSubmatch(row[1], -1) {
			listed[f[1]] = true
		}
	}
	skip := regexp.MustCompile(`\.(Skip|Skipf|SkipNow)\(`)
	err = filepath.WalkDir("..", func(path string, e fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || path == "../test/skips_test.go" {
			return err
		}
		b, err := os.ReadFile(path)
		if name := strings.TrimPrefix(path, "../"); skip.Match(b) {
			if !listed[name] {
				t.Errorf("%s skips tests and is not in the list of CONTRIBUTING.md (use internal/envtest, or say why)", name)
			}
			delete(listed, name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range slices.Sorted(maps.Keys(listed)) {
		t.Errorf("CONTRIBUTING.md lists %s, which skips nothing", name)
	}
}
