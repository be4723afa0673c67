#!/bin/bash
# Four ways over one RDMA device, side by side in one machine and in turns: the kernel's host or
# rdinit with /dev/nbdN, to the kernel's target or rdtarget, both storing in memory: the kernel's target
# in what it is fastest with, a RAM disk; rdtarget in a file in memory. In emulation only the ratios mean
# anything. Samples go to $VM_OUT/bench.jsonl; the table is made of them by test/bench/run --vm FILE.
# Arguments: the rdtarget and the rdinit program, rxe or siw, rounds (5), seconds a sample (2); $JOBS:
# what to run.
. "$VM_REPO/test/vm/lib.sh"
rdtarget=$1 rdinit=$2 net=${3:-rxe} rounds=${4:-5} secs=${5:-2}
: "${JOBS:=4k-randread-16 4k-randwrite-16 128k-read-8 128k-write-8}"
modprobe nbd
case $net in
rxe) rxe_up; A=$RXE ;;
siw) siw_up; A=$SIW; ulimit -l unlimited ;;
*) die "no such device: $net" ;;
esac
k=nqn.2026-11.io.rdblk:kernel o=nqn.2026-11.io.rdblk:ours
null_up nb0 64
dd if=/dev/zero of=$BLK bs=1M oflag=direct status=none || true # to its end
file=/run/bench.img # a tmpfs
dd if=/dev/zero of=$file bs=1M count=64 status=none
nvmet_subsys $k; nvmet_ns $k 1 $BLK; nvmet_port 1 $A 4420 $k
: >"$VM_OUT/rdinit.txt"
trap 'tail -n 20 "$VM_OUT"/rd*.txt; dmesg | tail -20' EXIT
"$rdtarget" serve --provider verbs --listen $A:4421 --nqn $o --allow-any-host $file >"$VM_OUT/rdtarget.txt" 2>&1 & server=$!
wait_for 60 grep -q '^rdtarget: serving' "$VM_OUT/rdtarget.txt"
nvme_connect $A $k -i 2; kk=$NVME
nvme_connect $A $o -i 2 -s 4421; ko=$NVME
attach() { # PORT NQN: $DEV, $client
	: >"$VM_OUT/ready.txt"
	"$rdinit" attach $A:$1 --provider verbs --nqn $2 --queues 2 --device auto >"$VM_OUT/ready.txt" 2>>"$VM_OUT/rdinit.txt" & client=$!
	wait_for 60 grep -q '^rdinit: attached' "$VM_OUT/ready.txt"
	DEV=$(sed -n 's/^rdinit: attached .*: //p' "$VM_OUT/ready.txt")
}
attach 4420 $k; rk=$DEV c1=$client
attach 4421 $o; ro=$DEV c2=$client
ticks() { awk '{print $14+$15}' /proc/$1/stat; }
resting() { # what starting up, filling and scanning have left to do is done
	local t=$(($(ticks $server) + $(ticks $c1) + $(ticks $c2)))
	sleep 1
	[ $(($(ticks $server) + $(ticks $c1) + $(ticks $c2) - t)) -lt 8 ]
}
for _ in {1..20}; do resting && break; done # a loaded host's emulation never rests
note "measuring"
printf '{"kernel": "%s", "machine": "%s processors, emulated", "date": "%s"}\n' "$(uname -r)" "$(nproc)" "$(date +%F)" >"$VM_OUT/bench.jsonl"
paths=(kk kr rk rr)
for ((r = 0; r < rounds; r++)); do
	for job in $JOBS; do
		IFS=- read -r bs rw depth <<<"$job"
		for i in 0 1 2 3; do # in each round another is the first, in each second one in reverse
			path=${paths[(r + (r % 2 ? i : 4 - i)) % 4]}
			case $path in
			kk) d=$kk name='kernel → kernel' ;;
			kr) d=$ko name='kernel → rdtarget' ;;
			rk) d=$rk name='rdinit → kernel' ;;
			rr) d=$ro name='rdinit → rdtarget' ;;
			esac
			t=$(($(ticks $server) + $(ticks $c1) + $(ticks $c2)))
			fio --name=c --filename="$d" --rw="$rw" --bs="$bs" --iodepth="$depth" --ioengine=libaio --direct=1 --time_based --runtime="$secs" \
				--randrepeat=0 --norandommap --output-format=terse --terse-version=3 >/run/fio.txt 2>/dev/null
			t=$(($(ticks $server) + $(ticks $c1) + $(ticks $c2) - t))
			# Terse version 3: KiB, KiB/s and IOPS of reads from field 6, their mean latency in 40; of writes 41 further on.
			awk -F';' -v at=$([[ $rw = *read ]] && echo 6 || echo 47) -v bs="${bs%k}" \
				-v head="\"net\": \"$net\", \"path\": \"$name\", \"job\": \"$bs $rw, depth $depth\", \"round\": $r, \"cpu\": $((t / 100)).$(printf %02d $((t % 100)))" \
				'$1 == 3 { printf "{%s, \"iops\": %d, \"mib\": %.2f, \"mean\": %.1f, \"ios\": %d}\n", head, $(at + 2), $(at + 1) / 1024, $(at + 34), $at / bs }' \
				/run/fio.txt >>"$VM_OUT/bench.jsonl"
			tail -n 1 "$VM_OUT/bench.jsonl"
		done
	done
done
kill $c1 $c2
wait $c1; wait $c2
nvme_disconnect $k; nvme_disconnect $o
kill $server
wait $server
kernel_clean
trap - EXIT
note done
