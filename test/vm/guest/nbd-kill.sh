#!/bin/bash
# What dies under a mounted /dev/nbd0: rdinit by SIGKILL (a new one takes the device over and the file
# system goes on), rdtarget by SIGKILL under fio (a pause), rdinit by SIGTERM, rdinit after it has refused to detach.
# Arguments: the rdtarget and the rdinit program.
. "$VM_REPO/test/vm/lib.sh"
. "$VM_REPO/test/vm/guest/nbd-lib.sh"
modprobe nbd
serve 512m
attach --device /dev/nbd0 --queues 2
m=/mnt/kill
mkdir -p $m
mkfs.ext4 -q -F -E nodiscard $DEV
mount $DEV $m
fio_until /run/enough $m/fio size=2m bsrange=16k-16k rate_iops=400,100 iodepth=8 & load=$!
busy() { kill -0 $load && awk '{ exit !($1 + $2) }' /sys/block/nbd0/inflight; } # requests of the load are on their way
takeovers=1
! long || takeovers=3
for ((i = 1; i <= takeovers; i++)); do
	wait_for 60 busy
	kill -9 $client; wait $client || true
	[ -e /sys/block/nbd0/pid ] || die "the kernel has dropped the device"
	note "rdinit killed under fio"
	sleep 1
	for ask in list 'detach /dev/nbd0'; do # who looks for it reads where it is
		"$rdinit" $ask >"$VM_OUT/orphan.txt" 2>&1 || [ "$ask" != list ]
		grep -q '/dev/nbd0: the rdinit that attached it is gone' "$VM_OUT/orphan.txt" || { cat "$VM_OUT/orphan.txt"; die "$ask does not know"; }
	done
	RDINIT_DETACH_TIMEOUT=60s attach --device /dev/nbd0 --queues 2 # 24 s for the umount after SIGTERM
	[ "$(grep -c 'took over' "$VM_OUT/rdinit.txt")" = $i ] || die "not taken over"
	note "taken over"
done
echo before >$m/file
wait_for 60 busy
kill -9 $server; wait $server || true
note "rdtarget killed under fio"
sleep 2
kill -0 $load || die "fio has ended without a target"
serve
touch /run/enough
wait $load
note "verify clean after $takeovers takeovers and a restart of rdtarget"
umount $m
e2fsck -fn $DEV >"$VM_OUT/fsck.txt" 2>&1 || { cat "$VM_OUT/fsck.txt"; die "not clean"; }
mount $DEV $m
[ "$(cat $m/file)" = before ]

# SIGTERM while mounted waits for the one who unmounts it.
kill $client
sleep 1
umount $m
wait $client || die "SIGTERM: exit $?"
[ ! -e /sys/block/nbd0/pid ]
note "SIGTERM waits for umount"
attach --device /dev/nbd0
e2fsck -fn $DEV >"$VM_OUT/fsck.txt" 2>&1 || { cat "$VM_OUT/fsck.txt"; die "not clean"; }
detach
kill $server; wait $server
nbd_clean

# The target is away, so that a detach is refused; then rdinit is killed. It is gone at once, whatever the detach had begun, and
# another one takes the device over.
serve
attach --device /dev/nbd0
dd if=/dev/urandom of=$DEV bs=64k count=4 status=none
kill -9 $server; wait $server || true
! "$rdinit" detach $DEV >"$VM_OUT/refused.txt" 2>&1 || die "detached without the target"
grep -q 'still attached; bring the target back' "$VM_OUT/refused.txt" || { cat "$VM_OUT/refused.txt"; die "refused otherwise"; }
not_stuck
kill -9 $client
wait_for 60 eval '! ls /proc/$client/task/* >/dev/null 2>&1' # its threads too
wait $client || true
serve
attach --device /dev/nbd0
[ "$(grep -c 'took over' "$VM_OUT/rdinit.txt")" = $((takeovers + 1)) ] || die "not taken over"
cmp -n 262144 $DEV /run/disk.img
detach
kill $server; wait $server
note "killed after a refused detach, and taken over"

# And one that is not unmounted is disconnected in the end, with a word about it and exit code 1.
if long; then
	serve
	attach --device /dev/nbd0
	mount -o ro $DEV $m
	start=$SECONDS rc=0
	kill $client
	wait $client || rc=$?
	[ $rc = 1 ] && [ $((SECONDS - start)) -lt 25 ] || die "exit $rc after $((SECONDS - start)) s"
	grep -q 'mounted on /mnt/kill' "$VM_OUT/rdinit.txt"
	umount $m
	wait_for 60 test ! -e /sys/block/nbd0/pid
	kill $server; wait $server
fi
trap - EXIT
note done
