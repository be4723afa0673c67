// Package vmtest runs programs in a virtual machine where what needs kernel modules is real:
// nbd, null_blk, soft-RoCE (rdma_rxe), soft-iWARP (siw), the kernel's NVMe over RDMA host
// and target. The machine is made by the shell scripts of this directory, which can be used without Go:
//
//	test/vm/setup                         packages, kernel, siw, initrd; cached
//	test/vm/run [OPTION...] PROGRAM ...   boot, run, power off; see its head for options
//	test/vm/lib.sh                        functions for scripts that run inside
//	test/vm/guest/*.sh                    such scripts
//	test/vm/mpadump                       takes a TCP capture of iWARP apart, makes golden files
//	protocol/testdata/kernel                      golden files: the kernel's own bytes
//
// A test calls [Run] with a script, or builds a program of this module with [Build] or a package's
// tests with [BuildTests] outside (compiling inside takes minutes) and runs that.
//
// Tests may run in parallel: [Run] waits for a free slot (RDBLK_VM_SLOTS). A test is skipped only where
// the machine cannot be set up (not root and packages missing, or no network for them),
// never when CI=true: there it fails.
//
// The tests of this package boot about a dozen machines: some five minutes on an idle pair of processors,
// more than go test's default limit on a busy one. Give -timeout 30m; -short boots none.
//
// Figures taken in emulation are good only as ratios within one run.
package vmtest
