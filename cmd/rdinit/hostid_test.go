package main

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"rdblk/protocol"
)

func TestAttachmentHostID(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(dir, "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	id := func(machine, host, nqn, path string) protocol.UUID {
		read := func(p string) ([]byte, error) {
			if p == "/etc/machine-id" && machine != "" {
				return []byte(machine), nil
			}
			return nil, os.ErrNotExist
		}
		name := func() (string, error) {
			if host == "" {
				return "", errors.New("none")
			}
			return host, nil
		}
		u := localHostID(read, name, nqn, path)
		if !u.SinglePath() {
			t.Errorf("%s is not of the form", u)
		}
		return u
	}
	sock := filepath.Join(dir, "s")
	first := id("m1\n", "h1", "n1", sock)
	for _, again := range []protocol.UUID{id("m1\n", "h1", "n1", sock), id("m1", "h1", "n1", filepath.Join(link, "s"))} {
		if again != first {
			t.Errorf("%s, then %s: the target cannot know the killed one", first, again)
		}
	}
	seen := map[protocol.UUID]bool{first: true}
	for _, other := range [][4]string{{"m2", "h1", "n1", sock}, {"m1", "h2", "n1", sock}, {"m1", "h1", "n2", sock}, {"m1", "h1", "n1", sock + "2"},
		{"", "h1", "n1", sock}, {"m1", "", "n1", sock}, {"", "", "n1", sock}, {"m1", "h1", "n1", "/dev/nbd0"}, {"m1", "h1", "n1", "/nowhere/there/s"}} {
		u := id(other[0], other[1], other[2], other[3])
		if seen[u] {
			t.Errorf("%q is another's", other)
		}
		seen[u] = true
	}
}
