package nbd

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// Two that close at a time, while Accept still holds the socket: the file goes all the same.
func TestListenUnixClosedTwiceAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	for i := range 300 {
		ln, err := ListenUnix(path, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				c.Close()
			}
		})
		for range 3 {
			wg.Go(func() { ln.Close() })
		}
		wg.Wait()
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("round %d: the socket is left (%v)", i, err)
		}
	}
}
