package main

import (
	"os"
	"path/filepath"
	"testing"
)

// The program's own mappings can all be read in; a list that is none is refused.
func TestPopulateFiles(t *testing.T) {
	if err := populateFiles("/proc/self/maps"); err != nil {
		t.Error(err)
	}
	f := filepath.Join(t.TempDir(), "maps")
	if err := os.WriteFile(f, []byte("nonsense r-xp 00000000 08:01 5 /bin/x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := populateFiles(f); err == nil {
		t.Error("nonsense understood")
	}
}

func TestLowerOOMScore(t *testing.T) {
	f := filepath.Join(t.TempDir(), "oom_score_adj")
	for _, was := range []string{"0\n", "-999\n", "-1000\n", "1000"} {
		if err := os.WriteFile(f, []byte(was), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := lowerOOMScore(f); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(f)
		if err != nil || (was == "-1000\n") != (string(b) == was) || b[0] != '-' || string(b[:5]) != "-1000" {
			t.Errorf("from %q to %q, %v", was, b, err)
		}
	}
	if err := lowerOOMScore(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("no error without the file")
	}
}
