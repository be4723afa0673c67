package main

import (
	"context"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"rdblk/internal/cli"
	"rdblk/internal/cli/clitest"
	"rdblk/internal/config"
)

// The sample shows every setting with its default, but for the namespace.
func TestSampleConfigurationIsTheDefaults(t *testing.T) {
	const file = "../../configs/rdtarget.yaml"
	got := defaultSettings()
	if err := config.Load(got, config.Source{File: file}); err != nil {
		t.Fatal(err)
	}
	want := defaultSettings()
	want.Namespaces = []namespace{{Path: "mem:64M", NSID: 1}}
	if d := config.Changed(got, want); len(d) > 0 {
		t.Errorf("the sample differs from the defaults in %v", d)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	checkKeysIn(t, string(text), file, config.Keys(want))
	for i := range reflect.TypeFor[namespace]().NumField() {
		if k := reflect.TypeFor[namespace]().Field(i).Tag.Get("mapstructure"); !strings.Contains(string(text), " "+k+":") {
			t.Errorf("%s lacks namespaces[].%s", file, k)
		}
	}
}

func checkKeysIn(t *testing.T, text, file string, keys []string) {
	t.Helper()
	for _, k := range keys {
		if !strings.Contains(text, k[strings.LastIndexByte(k, '.')+1:]+":") {
			t.Errorf("%s lacks %s", file, k)
		}
	}
}

func TestDefaultsAreTheLibrarys(t *testing.T) {
	s := defaultSettings()
	if err := s.Validate(); err != nil {
		t.Fatalf("the defaults are invalid: %v", err)
	}
}

// The one truth value that the library has the other way round.
func TestSendInvalidate(t *testing.T) {
	for _, on := range []bool{true, false} {
		s := defaultSettings()
		err := config.Load(s, config.Source{Prefix: envPrefix, Environ: []string{config.EnvName(envPrefix, "send_invalidate") + "=" + strconv.FormatBool(on)}})
		if err != nil || s.targetConfig().NoSendInvalidate == on {
			t.Errorf("send_invalidate=%v: NoSendInvalidate is %v, %v", on, s.targetConfig().NoSendInvalidate, err)
		}
	}
}

func TestValidateSaysEverything(t *testing.T) {
	s := defaultSettings()
	s.Listen = []string{"1.2.3.4:x"}
	s.Provider = "magic"
	s.NQN = "disk"
	s.Serial = strings.Repeat("x", 21)
	s.Hosts = []string{strings.Repeat("h", 224)}
	s.Namespaces = []namespace{{Path: "/a", NSID: 3}, {Path: "/b", NSID: 3}, {NSID: 5000}, {Path: "/c", BlockSize: 1000}}
	s.Name = "a/b"
	s.RunDir = "run"
	s.HTTP = "localhost"
	s.Log.Level = "loud"
	s.Polling = "often"
	s.QueueDepth = 5000
	s.InCapsule = 100
	s.MaxIO = 5000
	s.ConnectTimeout = 0
	s.ShutdownTimeout = -1
	err := s.Validate()
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{
		"listen: ", "provider: ", "nqn: ", "serial: ", "hosts[0]: ", "namespaces[1].nsid: 3 is used twice", "namespaces[2].nsid: 5000",
		"namespaces[2].path: ", "namespaces[3].block_size: ", "name: ", "run_dir: ", "http: ", "log.level: ", "polling: ", "queue_depth: ",
		"in_capsule: ", "max_io: ", "connect_timeout: ", "shutdown_timeout: ",
	} {
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

func TestNumberNamespaces(t *testing.T) {
	s := &settings{Namespaces: []namespace{{Path: "a"}, {Path: "b", NSID: 2}, {Path: "c"}, {Path: "d", NSID: 1}, {Path: "e"}}}
	s.numberNamespaces()
	var got []uint32
	for _, n := range s.Namespaces {
		got = append(got, n.NSID)
	}
	if !reflect.DeepEqual(got, []uint32{3, 2, 4, 1, 5}) {
		t.Errorf("numbers %v", got)
	}
}

func TestDefaultNQN(t *testing.T) {
	for path, want := range map[string]string{
		"/srv/disk.img":    "nqn.2026-11.io.rdblk:host:disk.img",
		"mem:64M":          "nqn.2026-11.io.rdblk:host:mem",
		"null:1T":          "nqn.2026-11.io.rdblk:host:null",
		"/srv/my disk.img": "nqn.2026-11.io.rdblk:host:my-disk.img",
	} {
		s := &settings{Namespaces: []namespace{{Path: path}}}
		if got := s.defaultNQN("host"); got != want {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
}

func TestWhoMayConnect(t *testing.T) {
	for _, c := range []struct {
		listen []string
		hosts  []string
		any    bool
		err    bool
		anyNow bool
	}{
		{[]string{"127.0.0.1:4420"}, nil, false, false, true},
		{[]string{"[::1]:4420"}, nil, false, false, true},
		{[]string{"127.0.0.1"}, []string{"nqn.2014-08.a:b"}, false, false, false},
		{[]string{"127.0.0.1", "192.0.2.1"}, nil, false, true, false},
		{[]string{":4420"}, nil, false, true, false},
		{[]string{"0.0.0.0:4420"}, nil, true, false, true},
		{[]string{"192.0.2.1"}, []string{"nqn.2014-08.a:b"}, false, false, false},
	} {
		s := &settings{Listen: c.listen, Hosts: c.hosts, AllowAnyHost: c.any}
		addrs, err := s.listenAddrs(context.Background())
		if (err != nil) != c.err {
			t.Errorf("%v: %v", c, err)
			continue
		}
		if err != nil {
			if !cli.IsUsage(err) || !strings.Contains(err.Error(), "--host") || !strings.Contains(err.Error(), "--allow-any-host") {
				t.Errorf("%v: the message names no remedy: %v", c, err)
			}
			continue
		}
		if _, any := s.hostsInForce(addrs); any != c.anyNow {
			t.Errorf("%v: any host is %v", c, any)
		}
	}
}

func TestCheckPaths(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "disk")
	os.WriteFile(file, make([]byte, 4096), 0o600)
	s := &settings{Namespaces: []namespace{{Path: file}, {Path: "mem:1G"}, {Path: "null:4k"}}}
	if err := s.checkPaths(); err != nil {
		t.Error(err)
	}
	s = &settings{Namespaces: []namespace{{Path: dir}, {Path: file + "x"}, {Path: "/dev/null"}, {Path: file, BlockSize: 8192}}}
	err := s.checkPaths()
	for _, want := range []string{"namespaces[0].path: " + dir, "namespaces[1].path: ", "namespaces[2].path: /dev/null", "namespaces[3].path: "} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("nothing about %q in %v", want, err)
		}
	}
}

// The ranges that the program names are the library's: what is said to be allowed is, and what is next to it is
// refused in the operator's words.
func TestRangesAreTheLibrarys(t *testing.T) {
	for _, c := range []struct {
		key, low, high, below, above string
		also                         string // a setting that the bound depends on
	}{
		{"workers", "0", "1024", "-1", "1025", ""},
		{"queue_depth", "2", "1024", "1", "1025", ""},
		{"in_capsule", "0", "16384", "", "16400", ""}, {"in_capsule", "16", "", "8", "", ""},
		{"max_io", "8K", "8M", "4K", "16M", ""},
		{"buffer_memory", "2M", "1T", "2097151", "1099511627777", ""},
		{"buffer_memory", "16M", "1T", "8M", "2T", "max_io=8M"},
		{"trace_size", "1M", "1T", "1048575", "2T", ""},
		{"executors", "0", "4096", "-1", "4097", ""},
		{"read_depth", "1", "128", "0", "129", ""},
		{"max_controllers", "1", "65519", "0", "65520", ""},
		{"max_queues_per_controller", "1", "65534", "0", "65535", ""},
		{"max_queues", "2", "1048576", "1", "1048577", ""},
		{"max_pending", "1", "1048576", "0", "1048577", ""},
		{"accept_timeout", "100ms", "10m", "1ns", "11m", ""},
		{"connect_timeout", "100ms", "10m", "99ms", "10h", ""},
		{"association_timeout", "1s", "24h", "-1s", "25h", ""},
		{"discovery_timeout", "1s", "24h", "1ns", "2400h", ""},
		{"fence_timeout", "100ms", "10m", "0s", "11m", ""},
		{"shutdown_timeout", "100ms", "1h", "1ns", "61m", ""}, {"shutdown_timeout", "", "", "-1s", "2562047h", ""},
		{"max_poll", "1us", "10ms", "1ns", "10h", ""}, {"max_poll", "", "", "0s", "-50us", ""},
		{"pin_cpus", "0", "1023", "-1", "1024", ""},
	} {
		load := func(v string) error {
			env := []string{config.EnvName(envPrefix, c.key) + "=" + v}
			if key, val, ok := strings.Cut(c.also, "="); ok {
				env = append(env, config.EnvName(envPrefix, key)+"="+val)
			}
			return config.Load(defaultSettings(), config.Source{Prefix: envPrefix, Environ: env})
		}
		for _, v := range []string{c.low, c.high} {
			if v == "" {
				continue
			}
			if err := load(v); err != nil {
				t.Errorf("%s=%s %s: %v", c.key, v, c.also, err)
			}
		}
		for _, v := range []string{c.below, c.above} {
			if v == "" {
				continue
			}
			err := load(v)
			if err == nil {
				t.Errorf("%s=%s %s: accepted", c.key, v, c.also)
				continue
			}
			line := err.Error()
			if !strings.HasPrefix(line, c.key+": ") || strings.Contains(line, "\n") || !strings.Contains(line, "for example") && !strings.Contains(line, "(0: ") {
				t.Errorf("%s=%s: %q does not name the setting and an example, once", c.key, v, line)
			}
			for _, word := range []string{"MaxIO", "BufferMemory", "Workers", "is negative"} {
				if strings.Contains(line, word) {
					t.Errorf("%s=%s: %q is not the operator's word in %q", c.key, v, word, line)
				}
			}
			switch value := config.Values(defaultSettings())[c.key]; value.(type) {
			case time.Duration, config.Size:
				if c.key != "buffer_memory" && !strings.Contains(line, "multiple of") { // whose bound is a word: twice max_io
					clitest.CheckBounds(t, "../../docs/operating.md", "rdtarget", "../../configs/rdtarget.yaml", line)
				}
			}
		}
	}
}
