#!/bin/bash
# A target that dies and comes back under load is a pause, three times at once: the kernel's host and rdinit on
# rdtarget (killed with SIGKILL), rdinit on the kernel's target (whose subsystem leaves the port and comes back).
# Arguments: the rdtarget and the rdinit program.
. "$VM_REPO/test/vm/guest/host-lib.sh"
rdtarget=$1 rdinit=$2
siw_up
k=nqn.2026-11.io.rdblk:kernel
truncate -s 64m /run/one.img /run/two.img
serve() {
	: >"$VM_OUT/ready.txt"
	"$rdtarget" serve --provider iwarp --listen $SIW:4420 --nqn $nqn --http $HTTP --allow-any-host /run/one.img /run/two.img >"$VM_OUT/ready.txt" 2>>"$VM_OUT/rdtarget.txt" & server=$!
	wait_for 60 grep -q '^rdtarget: serving' "$VM_OUT/ready.txt"
}
trap 'tail -n 30 "$VM_OUT"/rdtarget.txt "$VM_OUT"/rdinit.txt; dmesg | tail -30' EXIT
: >"$VM_OUT/rdinit.txt"
serve
null_up nb0 64; disk=/sys/block/${BLK#/dev/}/stat
nvmet_subsys $k
nvmet_ns $k 1 $BLK
nvmet_port 1 $SIW 4421 $k
attach() { # SOCKET ADDRESS OPTION...: its process into $client
	"$rdinit" attach "$2" --provider iwarp --socket "$1" --queues 1 "${@:3}" >>"$VM_OUT/rdinit.txt" 2>&1 & client=$!
	wait_for 60 test -S "$1"
}
load() { fio_until /run/enough "$1" size=2m rate=,1m "${@:2}" & loads+=($!); }
loads=()
nvme_connect $SIW $nqn -i 1 --reconnect-delay=1 --ctrl-loss-tmo=120
load $NVME
attach /run/ours.sock $SIW:4420 --nqn $nqn --nsid 2; ours=$client
load '' ioengine=nbd "uri=nbd+unix:///?socket=/run/ours.sock" direct=0
attach /run/kernels.sock $SIW:4421 --nqn $k; kernels=$client
load '' ioengine=nbd "uri=nbd+unix:///?socket=/run/kernels.sock" direct=0
again() { [ "$("$rdinit" status "$1" -o json | jq '.[0] | .state == "live" and .reconnects == '"$2"' and .errors == 0')" = true ]; }
lost() { [ "$("$rdinit" status "$1" -o json | jq -r '.[0].state')" = reconnecting ]; }
note "three at work"
for i in 1 2; do
	busy 1; busy 2
	read -ra s <$disk; wait_for 60 eval 'read -ra t <$disk; [ ${t[4]} -ge $((s[4] + 32)) ]'
	for l in "${loads[@]}"; do kill -0 $l || die "a load has failed"; done
	kill -9 $server; wait $server || true
	nvmet_unlink 1 $k
	wait_for 60 grep -q connecting /sys/class/nvme/$CTRL/state
	wait_for 60 lost /run/ours.sock
	wait_for 60 lost /run/kernels.sock
	for l in "${loads[@]}"; do kill -0 $l || die "a load has failed"; done
	serve
	ln -s $NVMET/subsystems/$k $NVMET/ports/1/subsystems/
	wait_for 60 grep -q live /sys/class/nvme/$CTRL/state
	wait_for 60 again /run/ours.sock $i
	wait_for 60 again /run/kernels.sock $i
	note "connected again"
done
touch /run/enough
for l in "${loads[@]}"; do wait $l; done
again /run/ours.sock 2
again /run/kernels.sock 2
note "verify clean, no error"
nvme_disconnect $nqn
for p in $ours $kernels; do kill $p; wait $p || die "rdinit ended with $?"; done
kill $server; wait $server || die "rdtarget ended with $?"
kernel_clean
trap - EXIT
note done
