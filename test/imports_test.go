package test

import (
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// What each package may import of ours, directly or through others, beside itself. Imports go
// one way: commands, then target, initiator and nbd, then rdma, protocol and
// blockdev, then internal helpers.
var mayImport = map[string][]string{
	"rdblk/protocol":           {},
	"rdblk/rdma":               {},
	"rdblk/rdma/iwarp":         {"rdblk/rdma", "rdblk/internal/..."},
	"rdblk/rdma/verbs":         {"rdblk/rdma", "rdblk/internal/..."},
	"rdblk/blockdev":           {"rdblk/internal/..."},
	"rdblk/target":             {"rdblk/protocol", "rdblk/rdma", "rdblk/blockdev", "rdblk/internal/..."},
	"rdblk/initiator":          {"rdblk/protocol", "rdblk/rdma", "rdblk/blockdev", "rdblk/internal/..."},
	"rdblk/nbd":                {"rdblk/blockdev", "rdblk/internal/..."},
	"rdblk/internal/worker":    {},
	"rdblk/internal/arena":     {},
	"rdblk/internal/histogram": {},
	"rdblk/internal/version":   {},
	"rdblk/internal/logfile":   {},
	"rdblk/internal/cli":       {"rdblk/internal/timeout", "rdblk/internal/logfile"},
	"rdblk/internal/timeout":   {},
	"rdblk/internal/control":   {"rdblk/internal/timeout"},
	"rdblk/internal/config":    {"rdblk/internal/cli", "rdblk/internal/logfile", "rdblk/internal/timeout", "rdblk/blockdev", "rdblk/internal/worker", "rdblk/internal/arena"},
	"rdblk/internal/losses":    {"rdblk/blockdev", "rdblk/internal/..."},
	"rdblk/internal/trace":     {"rdblk/protocol"},
	"rdblk/internal/provider":  {"rdblk/rdma/...", "rdblk/rdma", "rdblk/internal/..."},
	"rdblk/internal/metrics":   {"rdblk/rdma/...", "rdblk/rdma", "rdblk/internal/..."},
	"rdblk/cmd/rdtarget":       {"rdblk/target", "rdblk/protocol", "rdblk/rdma", "rdblk/rdma/...", "rdblk/blockdev", "rdblk/internal/..."},
	"rdblk/cmd/rdinit":         {"rdblk/initiator", "rdblk/nbd", "rdblk/protocol", "rdblk/rdma", "rdblk/rdma/...", "rdblk/blockdev", "rdblk/internal/..."},
}

// Configuration, flags, metrics and the process's environment are the commands' alone.
var onlyCommands = []string{"github.com/spf13/", "github.com/prometheus/"}

func allowed(dep string, list []string) bool {
	return slices.ContainsFunc(list, func(p string) bool {
		base, tree := strings.CutSuffix(p, "/...")
		return dep == base || tree && strings.HasPrefix(dep, base+"/")
	})
}

func TestImportsGoOneWay(t *testing.T) {
	out, err := exec.Command("go", "list", "-json=ImportPath,Deps", "rdblk/...").Output()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for dec := json.NewDecoder(strings.NewReader(string(out))); dec.More(); {
		var p struct {
			ImportPath string
			Deps       []string
		}
		if err := dec.Decode(&p); err != nil {
			t.Fatal(err)
		}
		list, ok := mayImport[p.ImportPath]
		if !ok {
			if strings.HasPrefix(p.ImportPath, "rdblk/test") || strings.HasSuffix(p.ImportPath, "test") || strings.Contains(p.ImportPath, "/examples/") {
				continue
			}
			t.Errorf("%s is not in the table of this test: say what it may import", p.ImportPath)
			continue
		}
		seen[p.ImportPath] = true
		command := strings.HasPrefix(p.ImportPath, "rdblk/cmd/")
		helper := slices.Contains([]string{"rdblk/internal/cli", "rdblk/internal/config", "rdblk/internal/metrics"}, p.ImportPath)
		for _, d := range p.Deps {
			if strings.HasPrefix(d, "rdblk/") && !allowed(d, list) {
				t.Errorf("%s must not import %s", p.ImportPath, d)
			}
			for _, x := range onlyCommands {
				if strings.HasPrefix(d, x) && !command && !helper {
					t.Errorf("%s must not import %s", p.ImportPath, d)
				}
			}
		}
	}
	for p := range mayImport {
		if !seen[p] {
			t.Errorf("%s is in the table and does not exist", p)
		}
	}
}

// The library packages read neither environment nor command line.
func TestLibrariesDoNotReadTheEnvironment(t *testing.T) {
	forbidden := regexp.MustCompile(`\bos\.(Getenv|LookupEnv|Environ|Args)\b|"flag"`)
	for _, dir := range []string{"protocol", "rdma", "blockdev", "target", "initiator", "nbd", "internal/worker", "internal/arena", "internal/histogram"} {
		err := filepath.WalkDir(filepath.Join("..", dir), func(path string, e fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			if e.IsDir() && (strings.HasSuffix(path, "test") || e.Name() == "testdata" || e.Name() == "examples") {
				return filepath.SkipDir
			}
			if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return nil
			}
			b, err := os.ReadFile(path)
			if m := forbidden.Find(b); m != nil {
				t.Errorf("%s has %s", path, m)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
}
