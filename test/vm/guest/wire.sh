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
	wait_for 60 listens 4420
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
	capture_start eth0 "$VM_OUT/start.pcap" -c 1000 tcp portrange 4420-4421
	nvme_connect 10.99.0.1 $ours -i 2
	fio_verify $NVME size=16m
	fio_verify $NVME bsrange=512-1m size=8m
	nvme_disconnect $ours
	wait $CAPTURE || true
	note "kernel host on rdtarget: verify clean"
	capture_start eth0 "$VM_OUT/start2.pcap" -c 1000 tcp portrange 4420-4421
	"$rdinit" attach 10.99.0.1:4421 --provider iwarp --socket $sock --queues 2 --nqn $kernel >>"$VM_OUT/rdinit.txt" 2>&1 & client=$!
	wait_for 60 test -S $sock
	fio_verify '' ioengine=nbd "uri=nbd+unix:///?socket=$sock" direct=0 size=16m
	fio_verify '' ioengine=nbd "uri=nbd+unix:///?socket=$sock" direct=0 bsrange=512-1m size=8m
	kill $client; wait $client
	wait $CAPTURE || true
	note "rdinit on the kernel's target: verify clean"
	# All streams ran with CRC: flag C in each "MPA ID Rep Frame".
	p='tcp[12] >> 2 & 0x3c'
	reply="tcp[($p) : 4] = 0x4d504120 and tcp[($p) + 7 : 4] = 0x52657020"
	replies() { tcpdump -nr "$VM_OUT/$1.pcap" "$2" 2>/dev/null | wc -l; }
	for f in start start2; do
		n=$(replies $f "$reply") crc=$(replies $f "$reply and tcp[($p) + 16] & 0x40 != 0")
		note "$f: $crc of $n connections with CRC"
		[ $n -ge 3 ] && [ $crc = $n ] || die "a stream without CRC"
	done
	trap - EXIT
	vm_signal verified
fi
kernel_clean
note "role $VM_ROLE done"
