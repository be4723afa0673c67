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
// Tests run in parallel: [Run] waits for a free slot (RDBLK_VM_SLOTS). A test is skipped only where
// the machine cannot be set up (not root and packages missing, or no network for them),
// never when CI=true: there it fails.
//
// There is a suite, which make test runs (VMTESTS in the Makefile names its tests), and there is all of it, make vm.
// One switch makes the difference within a test: with RDBLK_VM_LONG=1 in the environment, as make vm has it, it runs
// on all its devices, with more rounds and more cases; [Long] tells tests, "long" of lib.sh tells scripts. Give
// go test -timeout 60m for the suite and 150m for all; -short boots none.
//
// What is shown of rdinit, rdtarget and the provider verbs on real devices, and where (the kernel as the peer is in
// docs/interop.md):
//
//	                                              suite                                  make vm, in addition
//	the contract of rdma/rdmatest, on rxe, siw    TestVerbs
//	a device removed under its users              TestVerbs (TestDeviceRemoval)          TestVerbsDeviceRemoved: under load
//	rping of rdma-core, both ways, each provider  TestRping                              sizes, CRC by whom, segment sizes
//	fio verify, software on one end and rdma-core
//	on the other, both ways; devices both ends    TestVerbsEndToEnd                      target killed under each pair
//	both providers on one port                    TestVerbsEndToEnd
//	an ordinary user who may lock 64 KiB          TestVerbsEndToEnd
//	ext4, xfs, a source tree, fsck, blkdiscard,
//	lsblk, partitions, fio verify of 4 jobs       TestBlockDeviceFileSystems/rxe, /siw   /iwarp; io_uring
//	target killed under fio on a mounted ext4     TestBlockDeviceFileSystems/rxe         /siw, /iwarp
//	blocks of 4096 bytes; test/fio/run            TestBlockDeviceFileSystems/siw         /rxe, /iwarp
//	geometry, flags, growth, devices in use,
//	detach, by force, ioctl                       TestBlockDevice
//	rdinit killed, another takes the device over  TestBlockDeviceKill                    three times; SIGTERM while mounted
//	nobody takes it over, or late                                                        TestBlockDeviceDead
//	memory is short                                                                      TestBlockDeviceMemory
//	rounds that leave nothing                     TestBlockDeviceRounds: 3               200
//	reboot while attached, nobody waited for      TestBlockDeviceReboot/systemd          /busybox, /sysrq
//	two machines, CRC32C in use                                                          TestWire
//	this harness                                  TestHarness, TestInitrdIsOfItsCheckout TestPeer, TestSmoke
//
// Figures taken in emulation are good only as ratios within one run.
package vmtest
