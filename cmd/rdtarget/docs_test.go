package main

import (
	"os"
	"reflect"
	"testing"

	"rdblk/internal/cli/clitest"
)

func TestGuideDescribesTheSettings(t *testing.T) {
	flags := map[string]string{"namespaces": "arguments"}
	for f, k := range serveKeys {
		flags[k] = "`--" + f + "`"
	}
	clitest.CheckSettingsTable(t, "../../docs/operating.md", "rdtarget", defaultSettings(), flags)
}

func TestGuideNamesMetricsAndStatus(t *testing.T) {
	metrics, err := os.ReadFile("testdata/metrics.txt")
	if err != nil {
		t.Fatal(err)
	}
	clitest.CheckMetricsNamed(t, "../../docs/operating.md", "rdtarget_", string(metrics))
	clitest.CheckFieldsNamed(t, "../../docs/operating.md", reflect.TypeFor[report]())
}
