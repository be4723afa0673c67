package vmtest

import (
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"rdblk/protocol"
)

// A stage is a script of guest, and what is made of the results that it leaves. Its first arguments are the programs.
type stage struct {
	name, script string
	suite, more  string // links that it runs on, and those with RDBLK_VM_LONG=1 besides
	programs     []string
	args         func(link string) []string
	judge        func(t *testing.T, dir, link string)
	limit        time.Duration // on a busy machine; default 6 minutes
}

// stages runs, for each link, the stages that are for it in one machine, as a subtest each. -run chooses among them
// as among all subtests; what is not chosen is not run.
func stages(t *testing.T, links []string, all []stage) {
	boots(t)
	for _, link := range links {
		t.Run(link, func(t *testing.T) {
			var chosen []stage
			c := Config{Program: filepath.Join(Dir(), "guest", "several.sh"), Env: []string{"FABRIC=" + link}, Timeout: 2 * time.Minute}
			for _, s := range all {
				on := strings.Fields(s.suite)
				if Long() || named(t.Name(), s.name) {
					on = append(on, strings.Fields(s.more)...)
				}
				if !slices.Contains(on, link) || !runs(t.Name(), s.name) {
					continue
				}
				if len(chosen) > 0 {
					c.Args = append(c.Args, "--")
				}
				chosen = append(chosen, s)
				c.Args = append(c.Args, s.name, s.script)
				for _, p := range s.programs {
					b := Build(t, p)
					c.Args, c.Show = append(c.Args, b), append(c.Show, filepath.Dir(b))
				}
				if s.args != nil {
					c.Args = append(c.Args, s.args(link)...)
				}
				c.Timeout += cmp.Or(s.limit, 6*time.Minute)
			}
			if len(chosen) == 0 {
				return // -run has chosen others
			}
			t.Parallel() // beside others as far as there are slots
			r, err := run(t, c)
			for _, s := range chosen {
				t.Run(s.name, func(t *testing.T) {
					dir := filepath.Join(r.Dir, s.name)
					output, _ := os.ReadFile(filepath.Join(dir, "output.txt"))
					t.Logf("%s:\n%s", s.script, output)
					status, e := os.ReadFile(filepath.Join(dir, "status"))
					var rc, seconds int
					switch _, e2 := fmt.Sscan(string(status), &rc, &seconds); {
					case e != nil && err != nil:
						t.Fatal("not run to its end: the machine ended before")
					case e != nil || e2 != nil:
						t.Fatalf("no status: %v, %v", e, e2)
					case rc != 0:
						t.Fatalf("%s: exit status %d", s.script, rc)
					}
					t.Logf("%d s", seconds)
					if s.judge != nil {
						s.judge(t, dir, link)
					}
				})
			}
			if err != nil {
				t.Fatalf("%v\n%s", err, r.Output)
			}
			t.Log(r.Output)
		})
	}
}

// The kernel's host and rdtarget; the links, which are RDMA devices, are explained in guest/host-lib.sh.
func TestKernelHost(t *testing.T) {
	target := func(name, suite, more string, judge func(*testing.T, string, string)) stage {
		return stage{name: name, script: "host-" + name + ".sh", suite: suite, more: more, programs: []string{rdtarget}, judge: judge,
			args: func(link string) []string { return []string{link} }}
	}
	// $CONNECTS rounds over soft, and $RESETS, with time for them.
	churn := target("churn", "soft", "rxe siw", nil)
	churn.args = func(link string) []string {
		connects := "5"
		if link == "soft" {
			connects = cmp.Or(os.Getenv("CONNECTS"), connects)
		}
		return []string{link, connects, cmp.Or(os.Getenv("RESETS"), "2")}
	}
	if os.Getenv("CONNECTS")+os.Getenv("RESETS") != "" {
		churn.limit = time.Hour
	}
	stages(t, []string{"soft", "rxe", "siw"}, []stage{
		// nvme-cli: every command, with what the tools print.
		target("commands", "rxe", "soft siw", judgeCommands),
		// File systems, large commands, FUA and Flush down to the disk behind rdtarget, answers that close keys.
		target("io", "siw", "soft rxe", func(t *testing.T, dir, link string) {
			if link != "rxe" { // its packets are not seen by a capture
				judgeAnswers(t, dir, "invalidate", "plain", "unasked")
			}
		}),
		// Growth, namespaces and hosts that come and go, a persistent discovery controller.
		target("events", "soft", "rxe siw", nil),
		// Connect and disconnect in rounds, then resets and lost links under load, without a leak.
		churn,
		// rdtarget is killed and started again under the load of the kernel's host and of rdinit, and the kernel's
		// target goes and comes under that of rdinit.
		{name: "restart", script: "restart.sh", more: "soft", programs: []string{rdtarget, rdinit}},
	})
}

// rdinit and the kernel's target; the links are explained in guest/nvmet-lib.sh.
func TestKernelTarget(t *testing.T) {
	attach := func(name, suite, more string) stage {
		return stage{name: name, script: "nvmet-" + name + ".sh", suite: suite, more: more, programs: []string{rdinit}}
	}
	io := attach("io", "iwarp", "rxe siw") // every kind of I/O
	io.judge = func(t *testing.T, dir, link string) {
		if link == "iwarp" { // the only one that has windows and can be captured
			judgeAnswers(t, dir, "invalidate", "plain")
		}
	}
	stages(t, []string{"iwarp", "rxe", "siw"}, []stage{
		io,
		attach("events", "rxe", "iwarp siw"), // growth, namespaces that come, go and are swapped, restarts and removals
		attach("link", "", "iwarp"),          // down and up under load
		attach("churn", "siw", "iwarp rxe"),  // attached and detached, cut and connected; the last, because of what siw keeps
	})
}

// runs reports whether -run, as go test reads it, runs the subtest of that name; named whether it asks for it by name.
func runs(test, sub string) bool {
	return matches(flag.Lookup("test.run").Value.String(), test+"/"+sub)
}
func named(test, sub string) bool { return runs(test, sub) && !runs(test, "\x00") }

// matches reports whether a pattern of -run matches a test's name: alternatives of expressions between slashes, one for each
// level; levels that the pattern does not have match.
func matches(pattern, name string) bool {
	names := strings.Split(name, "/")
next:
	for _, alternative := range outside(pattern, '|') {
		for i, e := range outside(alternative, '/') {
			if i < len(names) && !regexp.MustCompile(e).MatchString(names[i]) {
				continue next
			}
		}
		return true
	}
	return false
}

// outside splits at what is in no group and no class of an expression.
func outside(pattern string, at byte) (parts []string) {
	depth, from := 0, 0
	for i := 0; i < len(pattern); i++ {
		switch c := pattern[i]; {
		case c == '\\':
			i++
		case c == '(' || c == '[':
			depth++
		case c == ')' || c == ']':
			depth--
		case c == at && depth == 0:
			parts, from = append(parts, pattern[from:i]), i+1
		}
	}
	return append(parts, pattern[from:])
}

// judgeAnswers looks for Sends with Invalidate in what was captured, with the witness that shares no code with the
// providers: at least 16 in invalidate.pcap, and none but as many answers in the others.
func judgeAnswers(t *testing.T, dir string, captures ...string) {
	dump := Build(t, "rdblk/test/vm/mpadump")
	for _, name := range captures {
		closes := name == "invalidate"
		out, err := exec.Command(dump, filepath.Join(dir, name+".pcap")).CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v\n%s", name, err, out)
			continue
		}
		sends := map[string]int{}
		for _, m := range regexp.MustCompile(`(?m)^ *\d+ <- (Send\w*) `).FindAllSubmatch(out, -1) {
			sends[string(m[1])]++
		}
		closing, all := 0, 0
		for op, n := range sends {
			if all += n; strings.HasSuffix(op, "Inv") {
				closing += n
			}
		}
		if all < 16 || closes && closing < 16 || !closes && closing > 0 {
			t.Errorf("%s: answers on the wire: %v", name, sends)
		}
	}
}

const (
	hostNQN = "nqn.2014-08.org.nvmexpress:uuid:00112233-4455-6677-8899-aabbccddeeff"
	vmNQN   = "nqn.2026-11.io.rdblk:vm"
)

// judgeCommands reads what nvme-cli has printed in host-commands.sh.
func judgeCommands(t *testing.T, dir, link string) {
	read := func(name string) string {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	object := func(name string, v any) {
		d := json.NewDecoder(strings.NewReader(read(name)))
		d.UseNumber()
		if err := d.Decode(v); err != nil {
			t.Fatalf("%s: %v\n%s", name, err, read(name))
		}
	}
	has := func(name string, want ...string) {
		text := read(name)
		for _, w := range want {
			if !strings.Contains(text, w) {
				t.Errorf("%s has no %q:\n%s", name, w, text)
			}
		}
	}
	addr := map[string]string{"soft": "10.77.0.1", "siw": "10.77.0.1", "rxe": "10.88.0.1"}[link]

	// Discovery: this host sees the subsystem, a stranger only the service.
	type record struct {
		Trtype, Adrfam, Subtype, Treq, Trsvcid, Subnqn, Traddr, Eflags string
		Portid, Rdma_pkey                                              int
		Rdma_prtype, Rdma_qptype, Rdma_cms                             string
	}
	type log struct {
		Genctr, Records json.RawMessage
	}
	records := func(name string) (l []record) {
		var d log
		object(name, &d)
		if err := json.Unmarshal(d.Records, &l); err != nil {
			t.Fatal(err)
		}
		return l
	}
	service := record{"rdma", "ipv4", "current discovery subsystem", "not specified, sq flow control disable supported", "4420",
		protocol.DiscoveryNQN, addr, "explicit discovery connections", 1, 0, "not specified", "connected", "rdma-cm"}
	subsystem := service
	subsystem.Subtype, subsystem.Subnqn, subsystem.Eflags = "nvme subsystem", vmNQN, "none"
	if l := records("discover.json"); !slices.Equal(l, []record{service, subsystem}) {
		t.Errorf("discovery: %+v", l)
	}
	if l := records("discover-stranger.json"); !slices.Equal(l, []record{service}) {
		t.Errorf("discovery by a stranger: %+v", l)
	}
	kernels := records("nvmet-discover.json")
	for i := range kernels { // ours says that it keeps discovery connections, and has another subsystem
		if kernels[i].Subnqn != protocol.DiscoveryNQN {
			kernels[i].Subnqn = vmNQN
		} else {
			kernels[i].Eflags = service.Eflags
		}
	}
	if !slices.Equal(kernels, []record{service, subsystem}) {
		t.Errorf("discovery by nvmet differs: %+v", kernels)
	}

	// What became of connect's options. The machine has two processors.
	for name, want := range map[string][]string{
		"plain": {"address=traddr=" + addr + ",trsvcid=4420\n", "kato=5\n", "queue_count=3\n", "sqsize=127\n"},
		"some":  {"address=traddr=" + addr + ",trsvcid=4420\n", "kato=3\n", "queue_count=2\n", "sqsize=15\n"},
		"all":   {"address=traddr=" + addr + ",trsvcid=4420,host_traddr=" + addr + "\n", "kato=7\n", "queue_count=3\n", "sqsize=63\n"},
	} {
		has("connect-"+name+".txt", append(want, "state=live\n", "transport=rdma\n", "hostnqn="+hostNQN+"\n", "hostid="+hostNQN[len(hostNQN)-36:]+"\n")...)
	}

	// Identify: each field is nvmet's, or listed here with our value and why.
	compare := func(what string, ours map[string]string) {
		var o, k map[string]any
		object("ours-"+what+".json", &o)
		object("nvmet-"+what+".json", &k)
		for _, key := range slices.Sorted(maps.Keys(o)) {
			got := strings.TrimSpace(fmt.Sprint(o[key]))
			if want, ok := ours[key]; ok {
				if want != "*" && got != want {
					t.Errorf("%s: %s is %q, want %q", what, key, got, want)
				}
				continue
			}
			if kernels := strings.TrimSpace(fmt.Sprint(k[key])); got != kernels {
				t.Errorf("%s: %s is %q, nvmet has %q, and nothing says why", what, key, got, kernels)
			}
		}
		if len(o) < 20 || len(k) != len(o) {
			t.Errorf("%s has %d fields, nvmet's %d", what, len(o), len(k))
		}
	}
	compare("id-ctrl", map[string]string{
		"sn": "SERIAL-0123", "mn": "rdblk", "fr": "1", "subnqn": vmNQN,
		"cmic":   "3", // several ports and controllers; no ANA, so none of its fields
		"cntlid": "*", "anatt": "0", "anacap": "0", "anagrpmax": "0", "nanagrpid": "0", "mnan": "0",
		"ver":    strconv.Itoa(int(protocol.Version1_4)),
		"rtd3e":  "30000000", // a shutdown waits for a flush
		"oaes":   "256",      // namespace attribute; no ANA
		"elpe":   "63",
		"maxcmd": "128", // MQES + 1; nvmet promises more than its queues have
		"oncs":   strconv.Itoa(int(protocol.ONCSCompare | protocol.ONCSDatasetManagement | protocol.ONCSWriteZeroes | protocol.ONCSVerify)),
		"vwc":    "5", // present; says that Flush does not take all namespaces
		"nwpc":   "0", // no write protection by hosts
		"ofcs":   "1", // Disconnect deletes an I/O queue
		"psds":   "*", // nvmet claims 25 W
	})
	compare("id-ns", map[string]string{
		"nsfeat": "16",                                       // optimal performance fields; no promise of atomic writes over power failure
		"npwg":   "7", "npwa": "7", "npdg": "7", "npda": "7", // the file's blocks of 4 KiB
		"dlfeat":   "9", // a file's holes are zeros, and Write Zeroes may make some
		"anagrpid": "0", "nguid": "*",
	})
	var descs struct {
		D []map[string]any `json:"ns-descs"`
	}
	object("ours-ns-descs.json", &descs)
	if len(descs.D) != 3 {
		t.Fatalf("namespace descriptors: %+v", descs.D)
	}
	uuid, nguid := fmt.Sprint(descs.D[1]["uuid"]), fmt.Sprint(descs.D[0]["nguid"])
	if strings.ReplaceAll(uuid, "-", "") != nguid || len(nguid) != 32 || strings.Trim(nguid, "0") == "" || fmt.Sprint(descs.D[2]["csi"]) != "0" {
		t.Errorf("namespace descriptors: %+v", descs.D)
	}
	var ns map[string]any
	if object("ours-id-ns.json", &ns); ns["nguid"] != nguid {
		t.Errorf("NGUID %v in Identify Namespace, %v among the descriptors", ns["nguid"], nguid)
	}
	has("ours-list-ns.txt", "[   0]:0x1\n")
	if n := strings.Count(read("ours-list-ns.txt"), "]:"); n != 1 {
		t.Errorf("%d namespaces listed", n)
	}
	has("list.txt", vmNQN, "SERIAL-0123", "rdblk ", " rdma ", "traddr="+addr+",trsvcid=4420", "134.22  MB / 134.22  MB", "512   B +  0 B")

	// Log pages.
	var smart map[string]json.Number
	object("ours-smart.json", &smart)
	var page protocol.SmartLog
	if err := page.UnmarshalBinary([]byte(read("log-2.bin"))); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]uint64{
		"critical_warning": 0, "avail_spare": 100, "percent_used": 0, "host_read_commands": page.HostReads.Lo, "host_write_commands": 0,
		"power_cycles": page.PowerCycles.Lo, "unsafe_shutdowns": 0, "media_errors": 0, "num_err_log_entries": 0,
	} {
		if got := strings.Trim(string(smart[key]), `"`); got != strconv.FormatUint(want, 10) {
			t.Errorf("SMART: %s is %s, want %d", key, got, want)
		}
	}
	if page.HostReads.Lo == 0 || page.PowerCycles.Lo == 0 {
		t.Errorf("SMART: %d reads, %d power cycles", page.HostReads.Lo, page.PowerCycles.Lo)
	}
	type errorEntry struct {
		Count  int    `json:"error_count"`
		SQID   int    `json:"sqid"`
		Status int    `json:"status_field"`
		LBA    uint64 `json:"lba"`
		TRTYPE int    `json:"trtype"`
	}
	var errs struct{ Errors []errorEntry }
	object("error.json", &errs)
	if len(errs.Errors) != 8 || errs.Errors[0].Count != 0 {
		t.Errorf("error log before any error: %+v", errs.Errors)
	}
	object("error-after.json", &errs)
	wantErrs := []errorEntry{
		{4, 1, int(protocol.StatusLBAOutOfRange), 262144, int(protocol.TransportRDMA)}, {3, 1, int(protocol.StatusCompareFailure), 0, int(protocol.TransportRDMA)},
		{2, 0, int(protocol.StatusInvalidField), 0, int(protocol.TransportRDMA)}, {1, 0, int(protocol.StatusInvalidLogPage), 0, int(protocol.TransportRDMA)},
	}
	for i, e := range errs.Errors {
		e.Status &= 0x7FF // without More and DNR
		e.SQID = min(e.SQID, 1)
		if i >= len(wantErrs) || e != wantErrs[i] {
			t.Errorf("error log entry %d: %+v", i, e)
		}
	}
	if b := read("log-1.bin"); len(b) != 512 || strings.Trim(b, "\x00") != "" {
		t.Errorf("error log before any error: %d bytes, %q", len(b), b)
	}
	if b := read("log-4.bin"); len(b) != 4096 || strings.Trim(b, "\x00") != "" {
		t.Errorf("changed namespaces when there are none: %d bytes, %q", len(b), b)
	}
	if s := strings.TrimSpace(read("changed.txt")); s != "" {
		t.Errorf("changed namespaces: %s", s)
	}
	if b := read("log-3.bin"); len(b) != 512 || b[0] != 1 || b[8:16] != "1       " {
		t.Errorf("firmware slots: % x", b[:min(len(b), 16)])
	}
	has("ours-fw.json", `"Active Firmware Slot (afi)":1`, "(1.......)")
	var ours, kernel protocol.EffectsLog
	for name, l := range map[string]*protocol.EffectsLog{"ours": &ours, "nvmet": &kernel} {
		if err := l.UnmarshalBinary([]byte(read(name + "-effects.bin"))); err != nil {
			t.Fatal(err)
		}
	}
	extra := map[int]protocol.Effects{ // commands that nvmet does not have
		int(protocol.OpCompare): protocol.EffectsSupported, int(protocol.OpVerify): protocol.EffectsSupported,
		// What changes the content of blocks, which nvmet of Linux 6.1 says of none.
		int(protocol.OpWrite):             protocol.EffectsSupported | protocol.EffectsLBContent,
		int(protocol.OpDatasetManagement): protocol.EffectsSupported | protocol.EffectsLBContent,
		int(protocol.OpWriteZeroes):       protocol.EffectsSupported | protocol.EffectsLBContent,
	}
	for i := range ours.IO {
		want, ok := extra[i]
		if !ok {
			want = kernel.IO[i]
		}
		if ours.IO[i] != want || ours.Admin[i] != kernel.Admin[i] {
			t.Errorf("effects of opcode %#x: I/O %#x, want %#x; admin %#x, want %#x", i, ours.IO[i], want, ours.Admin[i], kernel.Admin[i])
		}
	}
	has("log-112.txt", "Invalid Log Page")

	// Features.
	for f, want := range map[int][]string{
		1:  {"(Arbitration), Current value:00000000"},
		2:  {"(Power Management), Current value:00000000", "Power State   (PS): 0"},
		4:  {"(Temperature Threshold)"},
		5:  {"(Error Recovery), Current value:00000000", "Disabled"},
		6:  {"Volatile Write Cache Enable (WCE): Enabled"},
		7:  {"(NCQA): 128\n", "(NSQA): 128\n"},
		11: {"Namespace Attribute Notices                               : Send async event", "Discovery Log Page Change Notices                         : Do not send async event"},
		15: {"Keep Alive Timeout (KATO) in milliseconds: 7000"},
	} {
		has(fmt.Sprintf("feature-%d.txt", f), want...)
	}
	has("feature-3.txt", "Invalid Field in Command")
	if id := fmt.Sprintf("%x", read("feature-129.bin")); id != "00112233445566778899aabbccddeeff" {
		t.Errorf("host identifier %s", id)
	}

	// Commands, and what rdtarget has counted of them.
	has("compare.txt", "compare: Success")
	has("compare-other.txt", "Compare Failure")
	has("flush.txt", "success")
	has("write-zeroes.txt", "Success")
	has("dsm.txt", "success")
	has("verify.txt", "Success")
	has("beyond.txt", "LBA Out of Range")
	counts := func(name string) map[string]int {
		m := map[string]int{}
		for line := range strings.Lines(read(name)) {
			op, n, _ := strings.Cut(strings.TrimSpace(line), " ")
			m[op], _ = strconv.Atoi(n)
		}
		return m
	}
	before, after := counts("ops-before.txt"), counts("ops-after.txt")
	for op, want := range map[string]int{"read": 1, "flush": 1, "write_zeroes": 1, "discard": 1, "compare": 2, "verify": 1} {
		if n := after[op] - before[op]; n != want {
			t.Errorf("%d commands counted as %s, want %d", n, op, want)
		}
	}
	if n := after["write"] - before["write"]; n < 1 || n > 2 {
		t.Errorf("1 MiB was written by %d commands", n)
	}

	// Refusals: status and Do Not Retry as the kernel prints them (ret is decimal), nvme-cli's message.
	dnr := func(s protocol.Status) string { return fmt.Sprintf("ret=%d\n", uint16(s.WithDNR())) }
	has("wrong-nqn.dmesg", `Connect Invalid Data Parameter, subsysnqn "nqn.2026-11.io.rdblk:other"`, dnr(protocol.StatusConnectInvalidParameters))
	has("wrong-host.dmesg", "Connect for subsystem "+vmNQN+" is not allowed, hostnqn: nqn.2026-11.io.rdblk:stranger", dnr(protocol.StatusConnectInvalidHost))
	has("refused.txt", `why="no such subsystem"`, `why="host is not on the allow list"`)
	if link == "rxe" {
		has("no-listener.dmesg", "Connect rejected: status 8 (invalid service ID)")
	} else {
		has("no-listener.dmesg", "rdma connection establishment failed (-111)") // ECONNREFUSED
		has("no-listener.txt", "Connection refused")
	}
}
