package initiator_test

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"testing"

	"rdblk/blockdev"
	"rdblk/initiator"
	"rdblk/target"
)

// passed takes a trace apart: what passed in each direction of each queue, in order,
// without times and addresses.
func passed(t *testing.T, text string) map[string][]string {
	t.Helper()
	m := map[string][]string{}
	for line := range strings.Lines(text) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), " ", 5)
		if len(f) > 1 && f[1] == "-" {
			continue // not between two
		}
		if len(f) != 5 {
			t.Errorf("line %q", line)
			continue
		}
		if f[3] == "-" {
			f[4] = "" // each side has its own reason for an end
		}
		key := f[2] + " " + f[3]
		m[key] = append(m[key], f[4])
	}
	return m
}

// TestBothTracesAgree: an attachment, traced at both ends, is the same sequence of
// capsules, connection events and statuses on every queue.
func TestBothTracesAgree(t *testing.T) {
	var at, ini bytes.Buffer
	s := serve(t, target.Config{Trace: &at}, file(t, 8<<20, blockdev.Options{}))
	cfg := s.config()
	cfg.Trace = &ini
	cfg.SubNQN = "" // discovery first
	cfg.Depth = 8
	dev, err := initiator.Open(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	b := bytes.Repeat([]byte("0123456789abcdef"), 8192)
	for _, err := range []error{
		dev.WriteAt(b[:512], 4096, blockdev.WriteFUA), dev.WriteAt(b, 65536, 0), dev.ReadAt(b, 65536), dev.Zero(0, 1<<20, 0),
		dev.Discard(1<<20, 1<<20), dev.Flush(),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := dev.Close(); err != nil {
		t.Fatal(err)
	}
	s.stop()
	there, here := passed(t, at.String()), passed(t, ini.String())
	for key, list := range there {
		if !slices.Equal(list, here[key]) {
			t.Errorf("queue and direction %s: the target has\n  %s\nthe host\n  %s", key, strings.Join(list, "\n  "), strings.Join(here[key], "\n  "))
		}
		delete(here, key)
	}
	for key, list := range here {
		t.Errorf("queue and direction %s: only the host has\n  %s", key, strings.Join(list, "\n  "))
	}
	for _, want := range []string{
		"> RDMA connection request hrqsize=32 hsqsize=31 responder-resources=", "< RDMA connection accepted crqsize=32 initiator-depth=",
		// All the Reads that the device can serve, however small the queue; SQSIZE is HSQSIZE.
		" q1 > RDMA connection request hrqsize=8 hsqsize=7 cntlid=1 responder-resources=32\n", " q1 < RDMA connection accepted crqsize=8 initiator-depth=32\n",
		" qid=1 sqsize=7 kato=0 ",
		"> Fabrics Connect ", "cntlid=1\n", `> Fabrics Property Set cid=`, `lid="Discovery" `, ` > Asynchronous Event Request `,
		"slba=8 blocks=1 fua sgl=in-capsule offset=0 len=512\n", "> Write cid=", "slba=128 blocks=256 sgl=keyed ", "> Write Zeroes ",
		"> Dataset Management ", " > Flush cid=", `status="success"`, " - disconnected",
	} {
		if !strings.Contains(at.String(), want) {
			t.Errorf("no %q in the target's trace", want)
		}
	}
	if t.Failed() {
		t.Logf("the target's trace:\n%s", at.String())
	}
}
