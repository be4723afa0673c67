#!/bin/bash
# After kill -9 of rdinit under load: nobody comes, and requests fail after the documented time (with one queue
# and with several); somebody comes late, and everything goes on; somebody comes after the errors,
# and the device works again.
# Arguments: the rdtarget and the rdinit program.
. "$VM_REPO/test/vm/lib.sh"
. "$VM_REPO/test/vm/guest/nbd-lib.sh"
modprobe nbd
serve mem:64m mem:64m mem:64m
loss=2s # and a minute: 62 s; a request that was on a socket waits for its timeout before, 30 s
clients=()
one() { # N QUEUES: $client, namespace N as /dev/nbdN
	attach --nsid $1 --device /dev/nbd$1 --queues $2 --loss-timeout $loss --name disk$1
	clients+=($client)
}
one 1 1; one 2 2; one 3 2
mkfs.ext4 -q -F -E nodiscard /dev/nbd3
mkdir /mnt/late; mount /dev/nbd3 /mnt/late
echo before >/mnt/late/file; sync /mnt/late/file
# What each writes until it fails: DIRECT, one request at a time and some beside each other.
load() { timeout 280 fio --name=load --filename=/dev/nbd$1 --rw=randwrite --bs=4k --iodepth=8 --ioengine=libaio --direct=1 --size=48m --loops=9999 --output="$VM_OUT/fio$1.txt"; }
load 1 & load1=$!
load 2 & load2=$!
fio_verify /mnt/late/fio size=16m loops=4 bsrange=4k-64k iodepth=8 & load3=$!
sleep 3
for p in $load1 $load2 $load3; do kill -0 $p || die "a load was done too early"; done
kill -9 "${clients[@]}"
for p in "${clients[@]}"; do wait $p || true; done
killed=$SECONDS
note "3 rdinit killed under load"
sleep 33 # longer than a request's timeout
note "the third comes back"
kill -0 $load1 && kill -0 $load2 || die "requests failed already"
one 3 2
took=$client
wait $load3
note "verify clean, $((SECONDS - killed)) s after the kill"
ended() { ! kill -0 $1 2>/dev/null; }
for q in 1 2; do
	p=load$q rc=0
	wait_for $((killed + 105 - SECONDS)) ended ${!p}
	wait ${!p} || rc=$?
	[ $rc != 0 ] && [ $rc != 124 ] || die "exit $rc without anybody who answers"
	grep -q 'Input/output error' "$VM_OUT/fio$q.txt" || { cat "$VM_OUT/fio$q.txt"; die "no I/O error"; }
	note "$q queues: I/O errors after $((SECONDS - killed)) s"
	[ $((SECONDS - killed)) -ge 55 ] || die "too early"
done
# From now on they fail at once.
for q in 1 2; do
	start=$SECONDS
	! dd if=/dev/nbd$q of=/dev/null bs=4k count=1 skip=99 iflag=direct status=none 2>/dev/null || die "read from nobody"
	[ $((SECONDS - start)) -lt 5 ] || die "not at once"
done
not_stuck
# The next attachment takes them over and they work again.
for q in 1 2; do
	attach --nsid $q --device /dev/nbd$q --loss-timeout $loss --name disk$q
	[ "$(ls /sys/block/nbd$q/mq | wc -l)" = $q ]
	fio_verify $DEV size=4m
	detach
done
note "taken over after the errors"
umount /mnt/late
e2fsck -fn /dev/nbd3 >"$VM_OUT/fsck.txt" 2>&1 || { cat "$VM_OUT/fsck.txt"; die "not clean"; }
client=$took DEV=/dev/nbd3
detach
kill $server; wait $server
not_stuck
if dmesg | grep -E 'BUG:|Oops|WARNING:|Call Trace|blocked for more than|invalid socket'; then die "the kernel complained"; fi
trap - EXIT
note done
