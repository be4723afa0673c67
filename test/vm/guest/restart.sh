#!/bin/bash
# A target that dies and comes back under load is a pause: the kernel's host on rdtarget (killed
# with SIGKILL), rdinit on rdtarget, rdinit on the kernel's target (whose port goes and comes).
# Arguments: the rdtarget and the rdinit program.
. "$VM_REPO/test/vm/lib.sh"
rdtarget=$1 rdinit=$2
siw_up
nqn=nqn.2026-11.io.rdblk:vm sock=/run/rdblk.sock
truncate -s 256m /run/disk.img
serve() {
	"$rdtarget" serve --provider iwarp --listen $SIW:4420 --nqn $nqn --allow-any-host /run/disk.img >>"$VM_OUT/rdtarget.txt" 2>&1 & server=$!
	wait_for 30 sh -c "ss -tln | grep -q $SIW:4420"
}
trap 'tail -n 30 "$VM_OUT"/rdtarget.txt "$VM_OUT"/rdinit.txt; dmesg | tail -30' EXIT
: >"$VM_OUT/rdinit.txt"
serve
nvme_connect $SIW $nqn -i 2 --reconnect-delay=1 --ctrl-loss-tmo=120
fio_verify $NVME size=48m rate_iops=40 & load=$!
for i in 1 2; do
	sleep 5
	kill -0 $load # still at work
	kill -9 $server; wait $server || true
	note "rdtarget killed"
	sleep 2
	serve
	wait_for 60 grep -q live /sys/class/nvme/$CTRL/state
	note "connected again"
done
wait $load
note "kernel host on rdtarget: verify clean after 2 restarts"
nvme_disconnect $nqn

attach() {
	"$rdinit" attach $SIW:4420 --provider iwarp --socket $sock --queues 2 --nqn $nqn >>"$VM_OUT/rdinit.txt" 2>&1 & client=$!
	wait_for 30 test -S $sock
}
detach() { kill $client; wait $client; }
attach
fio_verify '' ioengine=nbd "uri=nbd+unix:///?socket=$sock" direct=0 size=48m rate_iops=40 & load=$!
sleep 5
kill -0 $load
kill -9 $server; wait $server || true
sleep 2
serve
wait $load
note "rdinit on rdtarget: verify clean after a restart"
detach
kill $server; wait $server

null_up nb0 256
nvmet_subsys $nqn
nvmet_ns $nqn 1 $BLK
nvmet_port 1 $SIW 4420 $nqn
attach
fio_verify '' ioengine=nbd "uri=nbd+unix:///?socket=$sock" direct=0 size=48m rate_iops=40 & load=$!
sleep 5
kill -0 $load
nvmet_unlink 1 $nqn
note "the kernel's port is gone"
sleep 2
ln -s $NVMET/subsystems/$nqn $NVMET/ports/1/subsystems/
wait $load
note "rdinit on the kernel's target: verify clean after the port came back"
detach
trap - EXIT
note done
