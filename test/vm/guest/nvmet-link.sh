#!/bin/bash
# Two machines on a wire (run --peer): the kernel's nvmet-rdma on the first, rdinit on the second, whose link goes
# down and comes back under load: for so short that TCP bridges it, or nearly, and for longer than keep_alive.
# Arguments: the rdinit program. FABRIC: see nvmet-lib.sh.
. "$VM_REPO/test/vm/lib.sh"
. "$VM_REPO/test/vm/guest/nvmet-lib.sh"
ADDR=10.99.0.1
case $FABRIC in
iwarp) [ $VM_ROLE = 1 ] || siw_on eth0; export RDINIT_PROVIDER=iwarp ;;
siw) siw_on eth0; export RDINIT_PROVIDER=verbs ;;
rxe) rxe_on eth0; export RDINIT_PROVIDER=verbs ;;
esac
if [ $VM_ROLE = 0 ]; then
	null_up nb0 128
	nvmet_subsys $nqn
	nvmet_ns $nqn 1 $BLK
	nvmet_port 1 $ADDR 4420 $nqn
	vm_signal ready
	vm_wait verified 500
else
	vm_wait ready 120
	ping -c 1 $ADDR >/dev/null 2>&1 || true
	attach --nqn $nqn --socket $sock
	fio_nbd size=6m rate_iops=20 bsrange=4k-32k & load=$!
	for down in 1 12; do
		sleep 3
		kill -0 $load # still at work
		ip link set eth0 down
		sleep $down
		[ $down -lt 10 ] || holds 's["state"]=="reconnecting" and s["last_error"]!=""'
		ip link set eth0 up
		wait_for 60 holds 's["state"]=="live"'
		note "down for $down s: $(state 's["reconnects"], s["failed_attempts"]') reconnects, failed attempts"
	done
	wait $load
	holds 's["errors"]==0 and s["reconnects"]>=1 and s["failed_attempts"]<=20'
	note "verify clean"
	detach $sock
	vm_signal verified
fi
kernel_clean
trap - EXIT
note "role $VM_ROLE done"
