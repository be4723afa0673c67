#!/bin/bash
# The kernel's nvme-rdma host over siw against the kernel's target and against rdtarget, in one
# machine and one run, alternating: a table of ratios, nothing else is meant by the figures. Both serve
# RAM (null_blk memory backed; a file in tmpfs).
# Arguments: the rdtarget program, rounds (2), seconds per cell (4).
. "$VM_REPO/test/vm/lib.sh"
rdtarget=$1 rounds=${2:-2} secs=${3:-4}
siw_up
null_up nb0 256
k=nqn.2026-11.io.rdblk:kernel o=nqn.2026-11.io.rdblk:ours
nvmet_subsys $k; nvmet_ns $k 1 $BLK; nvmet_port 1 $SIW 4420 $k
truncate -s 256m /run/disk.img
dd if=/dev/zero of=/run/disk.img bs=1M count=256 conv=notrunc status=none
dd if=/dev/zero of=$BLK bs=1M count=256 oflag=direct status=none
"$rdtarget" serve --provider iwarp --listen $SIW:4421 --nqn $o --allow-any-host /run/disk.img >"$VM_OUT/rdtarget.txt" 2>&1 & server=$!
wait_for 20 sh -c "ss -tln | grep -q $SIW:4421"
nvme_connect $SIW $k -i 2; kdev=$NVME
nvme_connect $SIW $o -i 2 -s 4421; odev=$NVME
ticks() { awk '{print $14+$15}' /proc/$server/stat; }
t0=$(ticks); sleep 5; t1=$(ticks)
note "rdtarget idle with a host connected: $((t1 - t0)) ticks of CPU in 5 s"
cell() { # DEV RW BS DEPTH -> IOPS mean-latency-us p99-us
	fio --name=c --filename=$1 --rw=$2 --bs=$3 --iodepth=$4 --ioengine=libaio --direct=1 --time_based --runtime=$secs --ramp_time=1 --randrepeat=0 \
		--output-format=json >/run/fio.json 2>/dev/null
	# shellcheck disable=SC2046
	printf '%8.0f IOPS %9.0f us mean %9.0f us p99' $(jq '.jobs[0] | if .read.total_ios > 0 then .read else .write end |
		.iops, .clat_ns.mean / 1000, .clat_ns.percentile["99.000000"] / 1000' /run/fio.json)
}
for ((r = 0; r < rounds; r++)); do
	for job in 'randread 4k 1' 'randread 4k 16' 'randwrite 4k 1' 'randwrite 4k 16' 'read 128k 4' 'write 128k 4'; do
		for who in kernel ours; do
			case $who in kernel) d=$kdev ;; ours) d=$odev ;; esac
			# shellcheck disable=SC2086
			printf '%-16s %-7s %s\n' "$job" $who "$(cell $d $job)"
		done
	done
done
nvme_disconnect $k; nvme_disconnect $o
kill $server; wait $server
kernel_clean
