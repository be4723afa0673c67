package main

import (
	"os"
	"reflect"
	"strings"
	"testing"

	"rdblk/internal/cli"
	"rdblk/internal/cli/clitest"
)

func TestGuideDescribesTheSettings(t *testing.T) {
	keys, _ := attachFlags(cli.NewFlagSet("attach"), &cli.Env{})
	flags := map[string]string{"address": "argument"}
	for f, k := range keys {
		flags[k] = "`--" + f + "`"
	}
	clitest.CheckSettingsTable(t, "../../docs/operating.md", "rdinit", defaultSettings(), flags)
}

func TestGuideNamesMetricsAndStatus(t *testing.T) {
	metrics, err := os.ReadFile("testdata/metrics.txt")
	if err != nil {
		t.Fatal(err)
	}
	// The NIC's are listed once, under the other program's prefix.
	clitest.CheckMetricsNamed(t, "../../docs/operating.md", "rdinit_", strings.ReplaceAll(string(metrics), "rdinit_rdma_", "rdtarget_rdma_"))
	clitest.CheckFieldsNamed(t, "../../docs/operating.md", reflect.TypeFor[report]())
}
