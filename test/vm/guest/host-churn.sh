#!/bin/bash
# The kernel's host comes and goes at rdtarget: connect and disconnect in rounds; with a number of resets, also
# reset under load and the link down and up under load. Nothing hangs, data stays right, rdtarget holds nothing
# more at the end than after two rounds by nvme-cli.
# Arguments: the rdtarget program, the link (see host-lib.sh), rounds of connect and disconnect (5), resets (2).
rdtarget=$1 rounds=${3:-5} resets=${4:-2}
. "$VM_REPO/test/vm/guest/host-lib.sh"
link "$2"
on_exit
truncate -s 192m /run/disk.img
serve --allow-any-host /run/disk.img
round() {
	nvme_connect $ADDR $nqn --nr-io-queues=2
	dd if=$NVME of=/dev/null bs=64k count=4 iflag=direct status=none
	nvme_disconnect $nqn >/dev/null
}
# quick: a round by what nvme-cli does, without starting programs, which takes seconds in emulation.
quick() {
	local f c end=$((SECONDS + 60))
	exec {f}<>/dev/nvme-fabrics
	printf %s "transport=rdma,traddr=$ADDR,trsvcid=4420,nqn=$nqn,nr_io_queues=2" >&$f
	read -r c <&$f # instance=0,cntlid=1
	exec {f}>&-
	c=${c#instance=} c=nvme${c%%,*}
	until [ -b /dev/${c}n1 ]; do [ $SECONDS -lt $end ] || die "round $1: no block device"; done
	head -c 65536 /dev/${c}n1 >/dev/null
	echo 1 >/sys/class/nvme/$c/delete_controller
	[ ! -e /sys/class/nvme/$c ] || die "round $1: $c is still there"
	if (($1 % 50 == 0)); then note "round $1"; fi
}
round
round
wait_for 60 sh -c "[ \$(curl -sf http://$HTTP/metrics | awk '\$1 == \"rdtarget_connections\" {print \$2}') = 0 ]"
memory() { awk '/VmRSS/ {print $2}' /proc/$server/status; }
wait_for 60 rests "$VM_OUT/base.txt"
cat "$VM_OUT/base.txt"
rss=$(memory)
for ((i = 1; i <= rounds; i++)); do quick $i; done
no_leak "$VM_OUT/base.txt"
now=$(memory)
note "rdtarget: $rss kB resident before, $now after"
[ $now -le $((rss + 16384)) ] || die "memory"
note "$rounds times connected and disconnected by $PROVIDER"

live() { wait_for 60 grep -q live /sys/class/nvme/$CTRL/state; }
# A keep-alive that nothing here outlasts: a host that connects again by itself refuses a reset.
nvme_connect $ADDR $nqn --nr-io-queues=2 --keep-alive-tmo=60 --reconnect-delay=1 --ctrl-loss-tmo=120
rm -f /run/enough; fio_until /run/enough $NVME size=4m rate=,2m & load=$!
for ((i = 0; i < resets; i++)); do
	busy
	kill -0 $load || die "the load has failed at reset $i"
	timeout 60 nvme reset /dev/$CTRL
	live
done
touch /run/enough; wait $load
note "$resets resets under load, verify clean"
nvme_disconnect $nqn
nvme_connect $ADDR $nqn --nr-io-queues=2 --keep-alive-tmo=2 --reconnect-delay=1 --ctrl-loss-tmo=120

lost() { # WHAT SECS DEV: it is down for so long, under load
	rm -f /run/enough; fio_until /run/enough $NVME size=4m rate=,2m & load=$!
	busy
	kill -0 $load || die "the load has failed"
	ip link set "$3" down
	sleep "$2"
	ip link set "$3" up
	touch /run/enough; wait $load
	live
	note "$1 down for $2 s under load, verify clean"
}
# Not over soft-RoCE: its packets to the machine itself do not go over the wire, and with the interface it loses its
# connection manager for good (docs/interop.md, "Verbs: known problems").
if [ "$2" != rxe ]; then
	lost "the wire (no packets, and nobody says so)" 7 lo # longer than both sides' keep-alive
	lost "the interface" 3 $NETDEV
fi
nvme_disconnect $nqn
no_leak "$VM_OUT/base.txt"
round
no_leak "$VM_OUT/base.txt"
stop
grep -q level=ERROR "$VM_OUT/rdtarget.txt" && die "rdtarget logs errors: $(grep level=ERROR "$VM_OUT/rdtarget.txt" | head -3)"
note done
