#!/bin/bash
# Memory is short on the machine that has /dev/nbd0 mounted (run --peer: the target is on the second one, which
# has enough). rdinit must neither be killed nor wait for what only it can write.
# Arguments: the rdtarget and the rdinit program.
. "$VM_REPO/test/vm/lib.sh"
. "$VM_REPO/test/vm/guest/nbd-lib.sh"
ADDR=10.99.0.2
if [ $VM_ROLE = 1 ]; then
	serve mem:320m
	vm_signal ready
	vm_wait over 600
	kill $server; wait $server
	trap - EXIT
	exit
fi
modprobe nbd
vm_wait ready 120
# Two emulated machines on a busy one: let a connection be silent for a while.
export RDINIT_KEEP_ALIVE=30s
attach --device /dev/nbd0 --queues 2
kb() { sed -n "s/^$2:[^0-9]*\([0-9]*\) kB/\1/p" $1; } # FILE KEY
[ "$(cat /proc/$client/oom_score_adj)" = -1000 ]
[ "$(kb /proc/$client/status VmLck)" -gt $((128 << 10)) ] || die "not locked: $(grep Vm /proc/$client/status)"
[ "$(kb /proc/$client/status VmRSS)" -gt $((32 << 10)) ] || die "no resident buffers: $(grep Vm /proc/$client/status)"
threads() {
	local f flags
	for f in /proc/$client/task/*/stat; do # PF_MEMALLOC_NOIO, PF_LOCAL_THROTTLE
		flags=$(sed 's/.*) //' $f | cut -d' ' -f7)
		[ $((flags & 0x180000)) = $((0x180000)) ] || die "thread ${f%/stat} is not protected: flags $flags"
	done
	note "$(ls /proc/$client/task | wc -l) threads protected, resident $(kb /proc/$client/status VmRSS) kB"
}
threads
mkfs.ext4 -q -F -E nodiscard $DEV
mkdir -p /mnt/m; mount $DEV /mnt/m
# Nearly all that there is as somebody's memory that cannot be written anywhere (tmpfs, no swap). Of the rest
# three times as much may be dirty as usual, so that everybody who needs some waits for the device.
echo 40 >/proc/sys/vm/dirty_background_ratio; echo 60 >/proc/sys/vm/dirty_ratio
left=72 # MiB
mkdir /mnt/hog; mount -t tmpfs -o size=100% hog /mnt/hog
head -c $((($(kb /proc/meminfo MemAvailable) / 1024 - left) << 20)) /dev/zero >/mnt/hog/hog
free -m
# From it more than twice as much as is left goes to the device.
n=$((left * 9 / 4)) most=0
head -c $((n << 20)) /dev/urandom | tee /mnt/m/f | sha256sum >/run/sum & w=$!
while kill -0 $w 2>/dev/null; do
	d=$(kb /proc/meminfo Dirty)
	[ "$d" -le $most ] || most=$d
	sleep 0.3
done
wait $w
start=$SECONDS
sync
note "$n MiB written with $left MiB free, up to $((most / 1024)) MiB of it dirty; sync took $((SECONDS - start)) s; $(grep -E '^(allocstall_normal|allocstall_movable|pgscan_kswapd|pgscan_direct|oom_kill) ' /proc/vmstat | tr '\n' ' ')"
[ $((most / 1024)) -gt $((left / 5)) ] || die "memory was not short"
[ "$(sed -n 's/^oom_kill //p' /proc/vmstat)" = 0 ] || die "somebody was killed"
rm /mnt/hog/hog
echo 3 >/proc/sys/vm/drop_caches
[ "$(sha256sum </mnt/m/f)" = "$(cat /run/sum)" ] || die "the file differs"
note "all as written"
threads
umount /mnt/m
e2fsck -fn $DEV >"$VM_OUT/fsck.txt" 2>&1 || { cat "$VM_OUT/fsck.txt"; die "not clean"; }
detach
vm_signal over
nbd_clean
trap - EXIT
note done
