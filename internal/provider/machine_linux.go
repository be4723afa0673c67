package provider

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"rdblk/rdma"
)

// kernelDevices are the RDMA devices that the kernel has, usable or not.
func kernelDevices() []string {
	l, _ := filepath.Glob("/sys/class/infiniband/*")
	for i := range l {
		l[i] = filepath.Base(l[i])
	}
	return l
}

// noDevice says why the libraries list no device.
func noDevice() error {
	names := kernelDevices()
	if len(names) == 0 {
		return fmt.Errorf("%w: the kernel has no RDMA device (is there an adapter, and is its driver loaded? In software: "+
			"modprobe rdma_rxe && rdma link add rxe0 type rxe netdev NAME)", rdma.ErrNotSupported)
	}
	list := strings.Join(names, ", ")
	if l, _ := filepath.Glob("/dev/infiniband/uverbs*"); len(l) == 0 {
		return fmt.Errorf("%w: the kernel has %s and no /dev/infiniband/uverbsN: modprobe ib_uverbs, and in a container pass the devices in", rdma.ErrNotSupported, list)
	}
	return fmt.Errorf("%w: the kernel has %s, and rdma-core has no driver for it: apt install ibverbs-providers", rdma.ErrNotSupported, list)
}

// LockedMemory makes sure that this process may lock need bytes, raising its limit as far as it may. The error
// says how much is needed and how to raise it.
func LockedMemory(need uint64) error {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r); err != nil {
		return fmt.Errorf("locked-memory limit: %w", err)
	}
	if r.Cur == unix.RLIM_INFINITY {
		return nil
	}
	// Those who may pin what they want still have a limit that some devices (siw) look at.
	all := unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}
	if unix.Setrlimit(unix.RLIMIT_MEMLOCK, &all) == nil {
		return nil
	}
	if r.Cur < r.Max {
		r.Cur = r.Max
		_ = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &r)
	}
	if r.Cur >= need || mayLock() {
		return nil
	}
	return fmt.Errorf("%w: RDMA devices need %d MiB of locked memory with these settings, and this process may lock %d KiB: raise it "+
		"(ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; containers: --ulimit memlock=-1), or lower buffer_memory and the number of workers or queues",
		rdma.ErrNoResources, (need+1<<20-1)>>20, r.Cur>>10)
}

// mayLock tells whether the process has CAP_IPC_LOCK.
func mayLock() bool {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var d [2]unix.CapUserData
	if unix.Capget(&h, &d[0]) != nil {
		return false
	}
	return d[0].Effective&(1<<unix.CAP_IPC_LOCK) != 0
}

// missingModules says what of the kernel's part is not there.
func missingModules() []string {
	var l []string
	if _, err := os.Stat("/dev/infiniband/rdma_cm"); errors.Is(err, os.ErrNotExist) {
		l = append(l, "no /dev/infiniband/rdma_cm: modprobe rdma_ucm")
	}
	if _, err := os.Stat("/sys/class/infiniband_verbs"); errors.Is(err, os.ErrNotExist) {
		l = append(l, "no user access to RDMA devices: modprobe ib_uverbs")
	}
	return l
}
