#!/bin/bash
# Two machines on an Ethernet wire (run --peer): segments are small, CRC32C is in use because the
# addresses are of two hosts. First machine: rdtarget, and the kernel's target over siw. Second machine:
# the kernel's host over siw on the first, rdinit on the second.
# Arguments: the rdtarget and the rdinit program.
. "$VM_REPO/test/vm/lib.sh"
rdtarget=$1 rdinit=$2
siw_on eth0
ours=nqn.2026-11.io.rdblk:ours kernel=nqn.2026-11.io.rdblk:kernel sock=/run/rdblk.sock
if [ $VM_ROLE = 0 ]; then
	truncate -s 256m /run/disk.img
	"$rdtarget" serve --provider iwarp --listen 10.99.0.1:4420 --nqn $ours --allow-any-host /run/disk.img >"$VM_OUT/rdtarget.txt" 2>&1 & server=$!
	wait_for 30 sh -c "ss -tln | grep -q 10.99.0.1:4420"
	null_up nb0 256
	nvmet_subsys $kernel
	nvmet_ns $kernel 1 $BLK
	nvmet_port 1 10.99.0.1 4421 $kernel
	vm_signal ready
	vm_wait verified 500
	kill $server; wait $server
else
	trap 'cat "$VM_OUT"/rdtarget.txt "$VM_OUT"/rdinit.txt; dmesg | tail -30' EXIT
	: >"$VM_OUT/rdinit.txt"
	vm_wait ready 120
	ping -c 1 10.99.0.1 >/dev/null 2>&1 || true
	capture_start eth0 "$VM_OUT/start.pcap" -c 400 tcp portrange 4420-4421
	nvme_connect 10.99.0.1 $ours -i 2
	fio_verify $NVME
	fio_verify $NVME bsrange=512-1m size=24m
	nvme_disconnect $ours
	wait $CAPTURE || true
	note "kernel host on rdtarget: verify clean"
	capture_start eth0 "$VM_OUT/start2.pcap" -c 400 tcp portrange 4420-4421
	"$rdinit" attach 10.99.0.1:4421 --provider iwarp --socket $sock --queues 2 --nqn $kernel >>"$VM_OUT/rdinit.txt" 2>&1 & client=$!
	wait_for 60 test -S $sock
	fio_verify '' ioengine=nbd "uri=nbd+unix:///?socket=$sock" direct=0
	fio_verify '' ioengine=nbd "uri=nbd+unix:///?socket=$sock" direct=0 bsrange=512-1m size=24m
	kill $client; wait $client
	wait $CAPTURE || true
	note "rdinit on the kernel's target: verify clean"
	# Both streams ran with CRC: flag C in the MPA frames.
	for f in start start2; do
		tcpdump -nr "$VM_OUT/$f.pcap" -X 2>/dev/null | grep -A3 'MPA.ID.Rep' | head -4
	done
	trap - EXIT
	vm_signal verified
fi
kernel_clean
note "role $VM_ROLE done"
