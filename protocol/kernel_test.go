package protocol

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"rdblk/internal/envtest"
)

var updateKernel = flag.Bool("update-kernel", false, "write testdata/kernel/descriptions.txt anew")

// What the Linux kernel's host and target said to each other (testdata/kernel)
// reads as it should, and our builders make the same bytes.

// captured reads a file of testdata/kernel.
func captured(t *testing.T, name string) []byte {
	t.Helper()
	return envtest.Hex(t, "testdata/kernel/"+name+".hex")
}

// TestKernelCapsules: every captured capsule and completion on one line. The text
// was checked by hand against what the tools were told to do.
func TestKernelCapsules(t *testing.T) {
	files, err := filepath.Glob("testdata/kernel/*-capsule.hex")
	if err != nil || len(files) < 30 {
		t.Fatalf("%d capsules, %v", len(files), err)
	}
	var out strings.Builder
	for _, f := range files {
		name := strings.TrimSuffix(filepath.Base(f), "-capsule.hex")
		admin := !strings.HasPrefix(name, "io-")
		b := captured(t, name+"-capsule")
		if len(b) < CommandSize {
			t.Fatalf("%s has %d bytes", name, len(b))
		}
		c := (*Command)(b)
		fmt.Fprintf(&out, "%s: %s", name, Describe(c, admin))
		if n := len(b) - CommandSize; n > 0 {
			fmt.Fprintf(&out, ", %d bytes in the capsule", n)
		}
		out.WriteByte('\n')
		if s := c.CheckFlags(); s != StatusSuccess {
			t.Errorf("%s: flags refused: %v", name, s)
		}
		for _, kind := range []string{"", "-refused"} {
			answer := name + kind + "-completion"
			if _, err := os.Stat("testdata/kernel/" + answer + ".hex"); err != nil {
				continue // an event that was not awaited, or none of this kind
			}
			e := captured(t, answer)
			if len(e) != CompletionSize {
				t.Fatalf("%s: completion of %d bytes", name, len(e))
			}
			fmt.Fprintf(&out, "  %s\n", DescribeCompletion((*Completion)(e), c, admin))
		}
	}
	const want = "testdata/kernel/descriptions.txt"
	if *updateKernel {
		if err := os.WriteFile(want, []byte(out.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(want)
	if err != nil {
		t.Fatal(err)
	}
	if out.String() != string(b) {
		t.Errorf("got\n%s\nwant\n%s", out.String(), b)
	}
}

// TestKernelStructures: parsed and built again, the kernel's structures are the
// same bytes: nothing it fills lies where we have a gap or another field.
func TestKernelStructures(t *testing.T) {
	for file, s := range map[string]structure{
		"admin-connect-data":             new(ConnectData),
		"discovery-connect-data":         new(ConnectData),
		"admin-identify-ctrl-data":       new(IdentifyController),
		"discovery-identify-ctrl-data":   new(IdentifyController),
		"admin-identify-ns-data":         new(IdentifyNamespace),
		"admin-identify-ns-desc-data":    new(NamespaceIDs),
		"admin-identify-cs-ctrl-data":    new(IdentifyNVMController),
		"admin-get-log-02-512-data":      new(SmartLog),
		"admin-get-log-05-4096-data":     new(EffectsLog),
		"discovery-get-log-70-1024-data": new(DiscoveryLogHeader),
	} {
		b := captured(t, file)
		if err := s.UnmarshalBinary(b); err != nil {
			t.Errorf("%s: %v", file, err)
			continue
		}
		again, err := s.AppendBinary(nil)
		if err != nil {
			t.Errorf("%s: %v", file, err)
			continue
		}
		same(t, file, again, b)
	}
	b := captured(t, "discovery-get-log-70-3072-data")
	for off := DiscoveryLogHeaderSize; off < len(b); off += DiscoveryLogEntrySize {
		var e DiscoveryLogEntry
		if err := e.UnmarshalBinary(b[off:]); err != nil {
			t.Fatal(err)
		}
		again, err := e.AppendBinary(nil)
		if err != nil {
			t.Fatal(err)
		}
		same(t, fmt.Sprintf("discovery entry at %d", off), again, b[off:off+DiscoveryLogEntrySize])
	}
}

// TestKernelPrivateData: the records behind the MPA header (20 bytes) and the
// read depths (4 bytes) of the captured start-up frames.
func TestKernelPrivateData(t *testing.T) {
	const header = 24
	for file, want := range map[string]RDMAConnectRequest{
		"admin-mpa-request":     {QID: 0, HRQSIZE: 32, HSQSIZE: 31},
		"discovery-mpa-request": {QID: 0, HRQSIZE: 32, HSQSIZE: 31},
		"io-mpa-request":        {QID: 1, HRQSIZE: 32, HSQSIZE: 31},
	} {
		var r RDMAConnectRequest
		b := captured(t, file)[header:]
		if err := r.UnmarshalBinary(b); err != nil || r != want {
			t.Errorf("%s: %+v, %v", file, r, err)
		}
		if again, _ := r.AppendBinary(nil); string(again) != string(b) {
			t.Errorf("%s: % x\nwant % x", file, again, b)
		}
	}
	for file, crq := range map[string]uint16{"admin-mpa-reply": 32, "discovery-mpa-reply": 32, "io-mpa-reply": 32} {
		var r RDMAConnectAccept
		b := captured(t, file)[header:]
		if err := r.UnmarshalBinary(b); err != nil || r.CRQSIZE != crq {
			t.Errorf("%s: %+v, %v", file, r, err)
		}
		if again, _ := r.AppendBinary(nil); string(again) != string(b) {
			t.Errorf("%s: % x\nwant % x", file, again, b)
		}
	}
}
