#!/bin/bash
# rdinit attaches /dev/nbdN itself: geometry, flags, partitions, growth, devices in use, detach and detach by
# force, ioctl. (What is done with the device then: nbd-fs.sh.)
# Arguments: the rdtarget and the rdinit program.
. "$VM_REPO/test/vm/lib.sh"
. "$VM_REPO/test/vm/guest/nbd-lib.sh"
if "$rdinit" attach $ADDR:4420 --device auto >"$VM_OUT/nomodule.txt" 2>&1; then die "attached without the module"; fi
grep -q 'modprobe nbd' "$VM_OUT/nomodule.txt" || { cat "$VM_OUT/nomodule.txt"; die "no hint at modprobe nbd"; }
modprobe nbd nbds_max=4
serve 512m

attach --device auto --queues 2
[ $DEV = /dev/nbd0 ] || die "auto gave $DEV"
lsblk -b -o NAME,SIZE,LOG-SEC,RO $DEV
[ "$(blockdev --getsize64 $DEV)" = $((512 << 20)) ]
[ "$(lsblk -bdno SIZE,LOG-SEC $DEV | tr -s ' ' | sed 's/^ //')" = "$((512 << 20)) 512" ] || die "lsblk: $(lsblk -bdno SIZE,LOG-SEC $DEV)"
[ "$(cat $Q/write_cache)" = "write back" ]
[ "$(cat $Q/fua)" = 1 ]
[ "$(ls /sys/block/nbd0/mq | wc -l)" = 2 ]
[ "$(cat /sys/block/nbd0/pid)" = $client ]
[ "$(cat $Q/discard_max_bytes)" != 0 ]
"$rdinit" list | tee "$VM_OUT/list.txt"; grep -q "$DEV" "$VM_OUT/list.txt"
"$rdinit" status $DEV | has "device *$DEV"
note "geometry, flags, list, status"

# In use: by another attachment, by another program.
if "$rdinit" attach $ADDR:4420 --nqn $nqn --device /dev/nbd0 >"$VM_OUT/inuse.txt" 2>&1; then die "attached twice"; fi
grep "in use by process $client" "$VM_OUT/inuse.txt" || { cat "$VM_OUT/inuse.txt"; die "the holder is not named"; }
nbdkit -U /run/kit.sock memory 16M
nbd-client -unix /run/kit.sock /dev/nbd1 >/dev/null
if "$rdinit" attach $ADDR:4420 --nqn $nqn --device /dev/nbd1 >"$VM_OUT/inuse.txt" 2>&1; then die "attached over nbd-client"; fi
grep 'in use by process' "$VM_OUT/inuse.txt" || { cat "$VM_OUT/inuse.txt"; die "the holder is not named"; }
nbd-client -d /dev/nbd1 >/dev/null
note "devices in use are refused"

mkfs.ext4 -q -F -E nodiscard $DEV
mkdir -p /mnt/used
mount $DEV /mnt/used
if "$rdinit" detach $DEV 2>"$VM_OUT/detach.txt"; then die "detached while mounted"; fi
grep 'mounted on /mnt/used' "$VM_OUT/detach.txt" || { cat "$VM_OUT/detach.txt"; die "the mount is not named"; }
echo still >/mnt/used/file; sync /mnt/used/file
exec 9<$DEV # open, not mounted: refused as well, and the process named
umount /mnt/used
if "$rdinit" detach $DEV 2>"$VM_OUT/detach.txt"; then die "detached while open"; fi
grep "open in process $$ " "$VM_OUT/detach.txt" || { cat "$VM_OUT/detach.txt"; die "the process is not named"; }
exec 9<&-
note "detach refused while mounted, while open"

# By force: users get errors, both programs tell what may be lost, and what was on stable storage is there.
kernel_clean
mount $DEV /mnt/used
echo forced >/mnt/used/file; sync /mnt/used/file
"$rdinit" detach --force $DEV >"$VM_OUT/detach.txt" 2>&1
grep "mounted on /mnt/used: .*what its users had not flushed is lost" "$VM_OUT/detach.txt" || { cat "$VM_OUT/detach.txt"; die "the mount is not named, or the loss"; }
rc=0
wait $client || rc=$?
[ $rc = 1 ] || die "the attachment ended with $rc"
echo 3 >/proc/sys/vm/drop_caches
[ "$(dd if=$DEV bs=4k count=1 iflag=direct status=none 2>/dev/null | wc -c)" = 0 ] || die "it can be read without rdinit"
if "$rdinit" attach $ADDR:4420 --nqn $nqn --device $DEV >"$VM_OUT/inuse.txt" 2>&1; then die "attached under a mount that has lost its device"; fi
grep 'mounted on /mnt/used' "$VM_OUT/inuse.txt" || { cat "$VM_OUT/inuse.txt"; die "the old mount is not named"; }
umount /mnt/used
wait_for 60 test ! -e /sys/block/nbd0/pid
dmesg -C # of the errors that are meant to be
attach --device /dev/nbd0 --queues 2
mount $DEV /mnt/used # replays its journal
[ "$(cat /mnt/used/file)" = forced ] || die "what was written before the force is lost"
umount /mnt/used
e2fsck -fn $DEV >"$VM_OUT/fsck.txt" 2>&1 || { cat "$VM_OUT/fsck.txt"; die "not clean"; }
note "detach by force"

# A partition table; the next attachment shows it by itself.
# An MBR: 64 MiB from sector 2048, 32 MiB behind it.
dd if=/dev/zero of=$DEV bs=512 count=1 conv=notrunc status=none
{
	printf '\0\0\0\0\203\0\0\0\0\10\0\0\0\0\2\0'
	printf '\0\0\0\0\203\0\0\0\0\10\2\0\0\0\1\0'
} | dd of=$DEV bs=1 seek=446 conv=notrunc,fsync status=none
printf '\125\252' | dd of=$DEV bs=1 seek=510 conv=notrunc,fsync status=none
detach
[ ! -e /sys/block/nbd0/pid ]
[ "$(blockdev --getsize64 /dev/nbd0)" = 0 ]
attach --device /dev/nbd0
wait_for 60 test -b /dev/nbd0p2
[ "$(blockdev --getsize64 /dev/nbd0p1)" = $((64 << 20)) ]
note "partitions"

# Growth goes through to the kernel.
truncate -s 640m /run/disk.img
kill -HUP $server
wait_for 60 sh -c "[ \$(blockdev --getsize64 /dev/nbd0) = $((640 << 20)) ]"
note "grown"

# Another program disconnects it: the attachment ends, and says why.
nbd-client -d /dev/nbd0 >/dev/null
if wait $client; then die "no error after the device was taken away"; fi
grep -q 'disconnected by another program' "$VM_OUT/rdinit.txt"
[ ! -e /sys/block/nbd0/pid ]
note "taken away"

# The kernel without netlink family, as in a container.
ip link set lo up
cat >/run/inside <<IN
ip link set lo up
"$rdtarget" serve --listen 127.0.0.1:4420 --nqn $nqn --run-dir /run/rdblk2 /run/small.img & t=\$!
until ss -tln | grep 127.0.0.1:4420 >/dev/null; do sleep 0.1; done
"$rdinit" attach 127.0.0.1:4420 --device /dev/nbd2 --run-dir /run/rdblk2 & c=\$!
for i in \$(seq 300); do [ "\$(blockdev --getsize64 /dev/nbd2)" = $((64 << 20)) ] && break; sleep 0.1; done
mkfs.ext4 -q -F /dev/nbd2 && fsck.ext4 -fn /dev/nbd2 && cat /sys/block/nbd2/queue/write_cache
"$rdinit" detach /dev/nbd2 --run-dir /run/rdblk2 && wait \$c && [ ! -e /sys/block/nbd2/pid ] && echo by ioctl
# All that there are in use: four from the start, and one that netlink has made.
: >/run/held
for i in \$(seq 0 9); do
	[ -e /sys/block/nbd\$i ] && [ ! -e /sys/block/nbd\$i/pid ] || continue
	"$rdinit" attach 127.0.0.1:4420 --device /dev/nbd\$i --run-dir /run/rdblk2 --name d\$i >/run/at\$i & echo \$! >>/run/held
	while ! grep -q attached /run/at\$i; do sleep 0.1; done
done
"$rdinit" attach 127.0.0.1:4420 --device auto --run-dir /run/rdblk2 2>&1 && echo 'one too many' && exit 1
kill \$(cat /run/held); wait \$(cat /run/held)
kill \$t; wait \$t
IN
truncate -s 64m /run/small.img
timeout 300 unshare -n bash /run/inside >"$VM_OUT/inside.txt" 2>&1 || { cat "$VM_OUT/inside.txt"; die "attach by ioctl"; }
grep 'no free device.*all .* there are' "$VM_OUT/inside.txt" || { cat "$VM_OUT/inside.txt"; die "all in use, and not said so"; }
grep -q 'write back' "$VM_OUT/inside.txt" && grep -q '^by ioctl' "$VM_OUT/inside.txt" || { cat "$VM_OUT/inside.txt"; die "attach by ioctl"; }
note "attached by ioctl; all in use"

kill $server; wait $server
nbd_clean
trap - EXIT
note done
