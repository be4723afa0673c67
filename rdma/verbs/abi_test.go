//go:build cgo && linux && !noverbs

package verbs

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"rdblk/internal/envtest"
)

// TestABI compares abi.h with the headers of rdma-core (libibverbs-dev, librdmacm-dev; test/deps installs them), where
// they are installed or RDBLK_RDMA_INCLUDE says they are. With CI=true they must be.
func TestABI(t *testing.T) {
	dir := os.Getenv("RDBLK_RDMA_INCLUDE")
	if dir == "" {
		dir = "/usr/include"
	}
	if _, err := os.Stat(filepath.Join(dir, "rdma/rdma_cma.h")); err != nil {
		envtest.Lacks(t, "no headers of rdma-core (make deps installs libibverbs-dev and librdmacm-dev): %v", err)
	}
	out, err := exec.Command("cc", "-fsyntax-only", "-I", dir, "testdata/abi.c").CombinedOutput()
	if err != nil {
		t.Fatalf("abi.h differs from the headers: %v\n%s", err, out)
	}
}
