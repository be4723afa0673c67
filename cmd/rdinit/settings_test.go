package main

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"rdblk/internal/cli/clitest"
	"rdblk/internal/config"
	"rdblk/protocol"
)

// The sample shows every setting with its default, but for the two that have none.
func TestSampleConfigurationIsTheDefaults(t *testing.T) {
	const file = "../../configs/rdinit.yaml"
	got := defaultSettings()
	if err := config.Load(got, config.Source{File: file}); err != nil {
		t.Fatal(err)
	}
	want := defaultSettings()
	want.Address, want.Socket = "127.0.0.1:4420", "/tmp/disk.sock"
	if d := config.Changed(got, want); len(d) > 0 {
		t.Errorf("the sample differs from the defaults in %v", d)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range config.Keys(want) {
		if !strings.Contains(string(text), k[strings.LastIndexByte(k, '.')+1:]+":") {
			t.Errorf("%s lacks %s", file, k)
		}
	}
}

func TestValidateSaysEverything(t *testing.T) {
	if err := defaultSettings().Validate(); err != nil {
		t.Fatalf("the defaults are invalid: %v", err)
	}
	s := defaultSettings()
	s.Address = ":4420"
	s.Local = "eth0"
	s.Provider = "rocket"
	s.NQN = strings.Repeat("n", 224)
	s.HostNQN = strings.Repeat("h", 224)
	s.Device = "/dev/sda"
	s.Name = ".."
	s.RunDir = "x"
	s.Socket = strings.Repeat("s", 108)
	s.HTTP = "x"
	s.Log.Format = "xml"
	s.Polling = "often"
	s.Queues = 5000
	s.Depth = 1
	s.BufferMemory = 4096
	s.KeepAlive = 1
	s.LossTimeout = 0
	err := s.Validate()
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{"address: ", "local_address: ", "provider: ", "nqn: ", "host_nqn: ", "device: ", "name: ", "run_dir: ",
		"socket: ", "http: ", "log.format: ", "polling: ", "queues: ", "depth: ", "buffer_memory: ", "keep_alive: ", "loss_timeout: "} {
		if !strings.Contains("\n"+err.Error(), "\n"+want) {
			t.Errorf("nothing about %q in\n%v", want, err)
		}
	}
	for line := range strings.SplitSeq(err.Error(), "\n") {
		if key, _, ok := strings.Cut(line, ": "); !ok || strings.ToLower(key) != key {
			t.Errorf("a line does not begin with a setting's name: %q", line)
		}
	}
}

func TestHostNQNIsStable(t *testing.T) {
	files := map[string]string{}
	read := func(p string) ([]byte, error) {
		if s, ok := files[p]; ok {
			return []byte(s), nil
		}
		return nil, os.ErrNotExist
	}
	host := func() (string, error) { return "alpha", nil }
	byName := localHostNQN(read, host)
	files["/etc/machine-id"] = "0123456789abcdef0123456789abcdef\n"
	byID := localHostNQN(read, host)
	noHost := func() (string, error) { return "", errors.New("none") }
	if byID != localHostNQN(read, noHost) || byID == byName {
		t.Errorf("%s, %s: the machine's identity decides", byName, byID)
	}
	if strings.Contains(byID, "0123456789abcdef") {
		t.Error("the machine's identity leaves in clear")
	}
	for _, n := range []string{byName, byID} {
		if err := protocol.CheckNQN(n); err != nil {
			t.Errorf("%s: %v", n, err)
		}
	}
	files[hostNQNFile] = " nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555\n"
	if got := localHostNQN(read, host); got != strings.TrimSpace(files[hostNQNFile]) {
		t.Errorf("%s: nvme-cli's name is not taken", got)
	}
	files[hostNQNFile] = "garbage"
	if got := localHostNQN(read, host); got != byID {
		t.Errorf("%s: an invalid file is taken", got)
	}
}

// The ranges that the program names are the library's: what is said to be allowed is, and what is next to it is
// refused in the operator's words.
func TestRangesAreTheLibrarys(t *testing.T) {
	for _, c := range [][5]string{
		{"queues", "0", "1024", "-1", "1025"},
		{"depth", "2", "1024", "1", "1025"},
		{"buffer_memory", "1M", "64G", "1048575", "65G"},
		{"trace_size", "1M", "1T", "0", "2T"},
		{"max_clients", "1", "1048576", "0", "1048577"},
		{"client_memory", "4K", "1T", "4095", "2T"},
		{"spill_memory", "0", "1T", "", "2T"},
		{"max_transfer", "4K", "16777215", "4095", "16M"},
		{"keep_alive", "100ms", "1h", "99ms", "61m"},
		{"reconnect_delay", "1ms", "5s", "1us", "2h"},
		{"reconnect_max_delay", "100ms", "1h", "99ms", "2h"},
		{"request_timeout", "10ms", "24h", "9ms", "25h"},
		{"connect_timeout", "10ms", "1h", "9ms", "2h"},
		{"retry_timeout", "1ms", "24h", "1us", "25h"},
		{"max_poll", "1us", "10ms", "1ns", "10h"}, {"max_poll", "", "", "0s", "-50us"},
		{"detach_timeout", "100ms", "1h", "1ns", "61m"}, {"detach_timeout", "", "", "0s", "2562047h"},
		{"wait", "100ms", "24h", "1ns", "25h"}, {"wait", "0s", "", "-1s", ""},
		{"loss_timeout", "1ms", "720h", "1ns", "721h"}, {"loss_timeout", "-1s", "-1ns", "0s", ""},
		{"pin_cpus", "0", "1023", "-1", "1024"},
		{"nsid", "0", "4294967294", "", "4294967295"},
	} {
		load := func(v string) error {
			return config.Load(defaultSettings(), config.Source{Prefix: envPrefix, Environ: []string{config.EnvName(envPrefix, c[0]) + "=" + v}})
		}
		for _, v := range []string{c[1], c[2]} {
			if v == "" {
				continue
			}
			if err := load(v); err != nil {
				t.Errorf("%s=%s: %v", c[0], v, err)
			}
		}
		for _, v := range []string{c[3], c[4]} {
			err := load(v)
			if v == "" {
				continue
			}
			if err == nil {
				t.Errorf("%s=%s: accepted", c[0], v)
				continue
			}
			if line := err.Error(); !strings.HasPrefix(line, c[0]+": ") || !strings.Contains(line, "for example") && !strings.Contains(line, "(0: ") {
				t.Errorf("%s=%s: %q does not name the setting and an example", c[0], v, line)
			}
			switch value := config.Values(defaultSettings())[c[0]]; value.(type) {
			case time.Duration, config.Size:
				if c[0] != "reconnect_max_delay" { // its bound is a word: reconnect_delay
					clitest.CheckBounds(t, "../../docs/operating.md", "rdinit", "../../configs/rdinit.yaml", err.Error())
				}
			}
		}
	}
}
