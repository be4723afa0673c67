package vmtest

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"rdblk/protocol"
)

// links are the RDMA devices between the kernel's host and rdtarget; see guest/host-lib.sh.
var links = []string{"soft", "rxe", "siw"}

// onLinks runs a script with rdtarget once for each link and judges what it leaves.
func onLinks(t *testing.T, name string, judge func(t *testing.T, dir, link string), args ...string) {
	boots(t)
	target := Build(t, "rdblk/cmd/rdtarget")
	timeout := 8 * time.Minute
	if os.Getenv("ROUNDS") != "" || os.Getenv("RESETS") != "" {
		timeout = time.Hour
	}
	for _, link := range links {
		t.Run(link, func(t *testing.T) {
			r := Run(t, Config{
				Program: filepath.Join(Dir(), "guest", name), Args: append([]string{target, link}, args...),
				Show: []string{filepath.Dir(target)}, Timeout: timeout,
			})
			if judge != nil {
				judge(t, r.Dir, link)
			}
		})
	}
}

// The kernel's host and nvme-cli: every command, with what the tools print.
func TestKernelHostCommands(t *testing.T) { onLinks(t, "host.sh", judgeCommands) }

// File systems, large commands, FUA and Flush down to the disk behind rdtarget.
func TestKernelHostIO(t *testing.T) { onLinks(t, "host-io.sh", nil) }

// Growth, namespaces and hosts that come and go, a persistent discovery controller.
func TestKernelHostEvents(t *testing.T) { onLinks(t, "host-events.sh", nil) }

// Connect and disconnect in $ROUNDS rounds, then $RESETS resets and lost links under load, without a leak.
func TestKernelHostChurn(t *testing.T) {
	onLinks(t, "host-churn.sh", nil, cmp.Or(os.Getenv("ROUNDS"), "5"), os.Getenv("RESETS"))
}

const (
	hostNQN = "nqn.2014-08.org.nvmexpress:uuid:00112233-4455-6677-8899-aabbccddeeff"
	vmNQN   = "nqn.2026-11.io.rdblk:vm"
)

// judgeCommands reads what nvme-cli has printed in host.sh.
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
	for op, want := range map[string]int{"read": 1, "flush": 1, "write_zeroes": 1, "discard": 1, "compare": 2} {
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
