package provider

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"golang.org/x/sys/unix"

	"rdblk/rdma"
	"rdblk/rdma/iwarp"
)

// A Report is what the command "devices" prints; as JSON it is stable: fields are added, never renamed.
type Report struct {
	Providers    []ProviderReport `json:"providers"`
	LockedMemory LockedReport     `json:"locked_memory"`
}

// ProviderReport is one provider with its devices.
type ProviderReport struct {
	Name string `json:"name"`
	// Missing says what keeps it, or a part of it, from being used, and what to do.
	Missing []string       `json:"missing"`
	Devices []DeviceReport `json:"devices"`
}

// DeviceReport is a device with its limits.
type DeviceReport struct {
	Name           string   `json:"name"`
	Transport      string   `json:"transport"`
	Addresses      []string `json:"addresses"`     // none: see AnyAddress
	AnyAddress     bool     `json:"any_address"`   // every address of the machine
	MaxQPWR        int      `json:"max_qp_wr"`     // work requests of a queue
	MaxCQE         int      `json:"max_cqe"`       // entries of a completion queue
	MaxSGE         int      `json:"max_sge"`       // pieces of memory of a work request
	MaxReadSGE     int      `json:"max_read_sge"`  // of an RDMA Read
	MaxInline      int      `json:"max_inline"`    // bytes
	MaxReadDepth   int      `json:"max_rd_atomic"` // RDMA Reads outstanding on a queue pair
	MaxMRBytes     int64    `json:"max_mr_size"`   // bytes of a memory region
	MemoryWindows  bool     `json:"memory_windows"`
	SendInvalidate bool     `json:"send_invalidate"`
	RNRRetry       bool     `json:"rnr_retry"`
}

// LockedReport is about memory that RDMA devices pin. Sizes are bytes; a limit of -1 is none.
type LockedReport struct {
	Needed int64 `json:"needed"` // with the settings in force
	Soft   int64 `json:"soft_limit"`
	Hard   int64 `json:"hard_limit"`
	Exempt bool  `json:"exempt"` // the process has CAP_IPC_LOCK
}

// Inspect looks at what there is. need is as Config.LockedMemory.
func Inspect(need uint64) Report { return inspect(need, thisMachine()) }

func inspect(need uint64, m machine) Report {
	r := Report{LockedMemory: locked(need)}
	hard := ProviderReport{Name: Verbs, Missing: []string{}, Devices: []DeviceReport{}}
	p, err := m.verbs(nil)
	if err != nil {
		hard.Missing = append(hard.Missing, plain(err))
		if len(kernelDevices()) == 0 {
			hard.Missing = append(hard.Missing, plain(noDevice()))
		}
	} else {
		devs, err := p.Devices()
		for _, d := range devs {
			hard.Devices = append(hard.Devices, describe(d))
			if len(d.Addrs) == 0 {
				hard.Missing = append(hard.Missing, d.Name+" has no IP address, which connections need: give its network interface one")
			}
		}
		switch {
		case err != nil:
			hard.Missing = append(hard.Missing, plain(err))
		case len(devs) == 0:
			hard.Missing = append(hard.Missing, plain(noDevice()))
		default:
			hard.Missing = append(hard.Missing, missingModules()...)
		}
		if err := m.memlock(need); err != nil && len(devs) > 0 {
			hard.Missing = append(hard.Missing, plain(err))
		}
	}
	soft := ProviderReport{Name: IWARP, Missing: []string{}, Devices: []DeviceReport{}}
	if s, err := iwarp.New(iwarp.Config{}); err == nil {
		devs, _ := s.Devices()
		for _, d := range devs {
			soft.Devices = append(soft.Devices, describe(d))
		}
	}
	r.Providers = []ProviderReport{hard, soft}
	return r
}

// plain is an error's text without the sentinel in front.
func plain(err error) string {
	s := err.Error()
	for _, e := range []error{rdma.ErrNotSupported, rdma.ErrNoResources} {
		s = strings.TrimPrefix(s, e.Error()+": ")
	}
	return s
}

func describe(d rdma.DeviceInfo) DeviceReport {
	r := DeviceReport{Name: d.Name, Transport: d.Transport.String(), Addresses: []string{}, AnyAddress: len(d.Addrs) == 0 && d.Provider == IWARP,
		MaxQPWR: d.MaxQPWR, MaxCQE: d.MaxCQE, MaxSGE: d.MaxSGE, MaxReadSGE: d.MaxReadSGE, MaxInline: d.MaxInline, MaxReadDepth: d.MaxReadDepth,
		MaxMRBytes: d.MaxMRBytes, MemoryWindows: d.MemWindows, SendInvalidate: d.SendInv, RNRRetry: d.RNRRetry}
	for _, a := range d.Addrs {
		r.Addresses = append(r.Addresses, a.String())
	}
	return r
}

func locked(need uint64) LockedReport {
	l := LockedReport{Needed: int64(need), Exempt: mayLock()}
	var r unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r) == nil {
		l.Soft, l.Hard = limit(r.Cur), limit(r.Max)
	}
	return l
}

func limit(n uint64) int64 {
	if n == unix.RLIM_INFINITY || n > 1<<62 {
		return -1
	}
	return int64(n)
}

// Print writes the report for people.
func (r *Report) Print(w io.Writer) {
	for i, p := range r.Providers {
		if i > 0 {
			fmt.Fprintln(w)
		}
		what := map[string]string{Verbs: "RDMA devices (InfiniBand, RoCE, iWARP)", IWARP: "software NIC (iWARP over TCP)"}[p.Name]
		fmt.Fprintf(w, "%s: %s\n", p.Name, what)
		for _, d := range p.Devices {
			addrs := strings.Join(d.Addresses, ", ")
			switch {
			case d.AnyAddress:
				addrs = "every address of this machine"
			case addrs == "":
				addrs = "none"
			}
			t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
			fmt.Fprintf(t, "  %s\t%s\n", d.Name, d.Transport)
			fmt.Fprintf(t, "    addresses\t%s\n", addrs)
			fmt.Fprintf(t, "    queue\t%d work requests, completion queue %d\n", d.MaxQPWR, d.MaxCQE)
			fmt.Fprintf(t, "    work request\t%d SGEs (RDMA Read %d), %d bytes inline\n", d.MaxSGE, d.MaxReadSGE, d.MaxInline)
			fmt.Fprintf(t, "    RDMA Reads\t%d outstanding\n", d.MaxReadDepth)
			fmt.Fprintf(t, "    memory windows\t%s\n", yesNo(d.MemoryWindows))
			fmt.Fprintf(t, "    Send with Invalidate\t%s\n", yesNo(d.SendInvalidate))
			t.Flush()
		}
		for _, m := range p.Missing {
			fmt.Fprintf(w, "  missing: %s\n", m)
		}
	}
	l := r.LockedMemory
	allowed := "unlimited"
	if l.Hard >= 0 {
		allowed = fmt.Sprintf("%d KiB", l.Hard>>10)
		if l.Exempt {
			allowed += ", and this user may exceed it (CAP_IPC_LOCK)"
		}
	}
	fmt.Fprintf(w, "\nlocked memory: RDMA devices need %d MiB with these settings; limit %s\n", (l.Needed+1<<20-1)>>20, allowed)
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}
