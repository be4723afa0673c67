#!/bin/bash
# rdinit attached and detached again and again at the kernel's nvmet-rdma, and one attachment whose connections
# are cut again and again under load: nothing is left behind in either kernel or process.
# Arguments: the rdinit program. FABRIC: see nvmet-lib.sh; ROUNDS (8) of attach and detach, CUTS (5).
. "$VM_REPO/test/vm/lib.sh"
. "$VM_REPO/test/vm/guest/nvmet-lib.sh"
rounds=${ROUNDS:-8} cuts=${CUTS:-5}
fabric_up
null_up nb0 128
nvmet_subsys $nqn
nvmet_ns $nqn 1 $BLK
nvmet_port 1 $ADDR 4420 $nqn
objects() { rdma resource show | sed 's/ *$//' | tr '\n' ';'; } # of each kind, of each device: what the kernel holds
quiet() { # within 30 s the kernel holds what it held
	local end=$((SECONDS + 30))
	until [ "$(objects)" = "$base" ]; do
		[ $SECONDS -lt $end ] || die "the kernel holds $(objects), at rest $base"
		sleep 0.5
	done
}
export RDINIT_BUFFER_MEMORY=4MiB
round() {
	attach --nqn $nqn --socket $sock
	kill $client
	wait $client || die "round $1 ended with $?"
	[ ! -e $sock ] || die "round $1: the socket is left"
}
round 0
sleep 1
base=$(objects)
note "at rest: $base"
for ((i = 1; i <= rounds; i++)); do round $i; done
quiet
note "$rounds rounds: the kernel holds what it held"

# One process: every cut is a reconnect with everything made anew.
attach --nqn $nqn --socket $sock
fio_until /run/enough '' ioengine=nbd "uri=$nbd_uri" direct=0 size=2m rate=,1m bsrange=4k-32k & load=$!
use() { echo "$(ls /proc/$client/fd | wc -l) $(ls /proc/$client/task | wc -l)"; }
sever() { # the subsystem leaves the port: nvmet ends every controller
	local n
	n=$(state .reconnects)
	nvmet_unlink 1 $nqn
	ln -s $NVMET/subsystems/$nqn $NVMET/ports/1/subsystems/
	wait_for 60 holds ".state == \"live\" and .reconnects > $n"
}
sever; sever # what the runtime makes once
wait_for 30 holds '.state == "live"'
up=$(use) rss=$(awk '/VmRSS/ {print $2}' /proc/$client/status)
for ((i = 1; i <= cuts; i++)); do kill -0 $load; sever; done
touch /run/enough; wait $load
now=$(use) after=$(awk '/VmRSS/ {print $2}' /proc/$client/status)
note "$cuts reconnects: descriptors and threads $up, then $now; $rss kB resident, then $after"
[ ${now% *} -le $((${up% *} + 2)) ] || die "descriptors"
[ ${now#* } -le $((${up#* } + 6)) ] || die "threads"
[ $after -le $((rss + 16384)) ] || die "memory"
holds '.errors == 0'
kill $client; wait $client
quiet
kernel_clean
trap - EXIT
note done
