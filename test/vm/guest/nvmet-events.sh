#!/bin/bash
# What happens to rdinit when things change at the kernel's nvmet-rdma while it is attached: growth, namespaces
# that come, go and are swapped, the target stopped and started under load, the subsystem removed.
# Arguments: the rdinit program. FABRIC: see nvmet-lib.sh.
. "$VM_REPO/test/vm/lib.sh"
. "$VM_REPO/test/vm/guest/nvmet-lib.sh"
fabric_up
modprobe nbd
N=$NVMET/subsystems/$nqn/namespaces
uuid=$(cat /proc/sys/kernel/random/uuid)
truncate -s 128m /run/one.img
nvmet_subsys $nqn
ns() { # NSID PATH UUID: nvmet_ns with an identity of our choice
	mkdir $N/$1
	printf %s "$2" >$N/$1/device_path
	echo "$3" >$N/$1/device_uuid
	echo 1 >$N/$1/buffered_io # tmpfs has no direct I/O
	echo 1 >$N/$1/enable
}
ns 1 /run/one.img $uuid
nvmet_port 1 $ADDR 4420 $nqn
export RDINIT_RETRY_TIMEOUT=8s
attach --device auto --nqn $nqn
q=/sys/block/${DEV#/dev/}
fault() { state 's.get("fault","")'; }

# Growth, told by revalidate_size, and by disable and enable; /dev/nbdN follows without anything being attached anew.
truncate -s 160m /run/one.img
echo 1 >$N/1/revalidate_size
wait_for 20 sh -c "[ \$(blockdev --getsize64 $DEV) = $((160 << 20)) ]"
holds "s['size']==$((160 << 20)) and s['reconnects']==0"
note "grown by revalidate_size"
echo 0 >$N/1/enable
truncate -s 192m /run/one.img
wait_for 20 holds '"no such namespace" in s.get("fault","")'
"$rdinit" list | grep 'live/fault'
echo 1 >$N/1/enable
wait_for 20 sh -c "[ \$(blockdev --getsize64 $DEV) = $((192 << 20)) ]"
wait_for 20 holds "s['size']==$((192 << 20)) and 'fault' not in s and s['reconnects']==0"
dd if=/dev/urandom of=$DEV bs=1M count=1 seek=191 oflag=direct,dsync status=none
cmp <(dd if=$DEV bs=1M skip=191 iflag=direct status=none) <(tail -c 1048576 /run/one.img)
note "grown by disable and enable; the new end is written"

# Namespaces that come and go show.
truncate -s 32m /run/two.img
ns 2 /run/two.img $(cat /proc/sys/kernel/random/uuid)
wait_for 20 holds "[(n['nsid'],n['size']) for n in s['namespaces']]==[(1,$((192 << 20))),(2,$((32 << 20)))]"
"$rdinit" status | grep 'others there *2 (32 MiB)'
echo 0 >$N/2/enable; rmdir $N/2
wait_for 20 holds "[n['nsid'] for n in s['namespaces']]==[1]"
note "a namespace came and went"

# Disabled and enabled under load: a pause.
fio_verify $DEV size=4m rate_iops=30 bsrange=4k-32k & load=$!
sleep 3
kill -0 $load
echo 0 >$N/1/enable
wait_for 20 holds '"no such namespace" in s.get("fault","")'
sleep 2
kill -0 $load
echo 1 >$N/1/enable
wait $load
holds "'fault' not in s and s['reconnects']==0 and s['errors']==0"
note "disabled and enabled under load: verify clean, no error"

# The target stopped and started under load: a pause.
fio_verify $DEV size=4m rate_iops=30 bsrange=4k-32k & load=$!
sleep 3
kill -0 $load
nvmet_unlink 1 $nqn
rmdir $NVMET/ports/1
wait_for 20 holds 's["state"]=="reconnecting" and s["last_error"]!=""'
sleep 3
kill -0 $load
nvmet_port 1 $ADDR 4420 $nqn
wait $load
holds "s['state']=='live' and s['reconnects']==1 and s['errors']==0"
note "target stopped and started under load: verify clean, $(state 's["failed_attempts"]') attempts failed"

# Removed, and another one in its place: nothing is written to it, and the right one is taken again.
echo 0 >$N/1/enable; rmdir $N/1
wait_for 20 holds '"no such namespace" in s.get("fault","")'
start=$SECONDS
if dd if=/run/two.img of=$DEV bs=4k count=1 oflag=direct status=none 2>"$VM_OUT/dd.txt"; then die "wrote to a namespace that is gone"; fi
[ $((SECONDS - start)) -le 20 ] || die "it took $((SECONDS - start)) s to fail"
grep -q 'Input/output error' "$VM_OUT/dd.txt"
truncate -s 192m /run/other.img
ns 1 /run/other.img $(cat /proc/sys/kernel/random/uuid)
wait_for 20 holds '"not the one that was attached" in s.get("fault","")'
if dd if=/dev/urandom of=$DEV bs=4k count=1 oflag=direct status=none 2>"$VM_OUT/dd.txt"; then die "wrote to another disk"; fi
cmp -n $((192 << 20)) /run/other.img /dev/zero
echo 0 >$N/1/enable; rmdir $N/1
ns 1 /run/one.img $uuid
wait_for 20 holds "'fault' not in s"
dd if=/dev/urandom of=$DEV bs=64k count=4 oflag=direct,dsync status=none
cmp -n 262144 $DEV /run/one.img
note "removed, swapped for another UUID, put back: failed, failed, works"

# The subsystem removed: clear state, no storm, detach works.
before=$(state 's["failed_attempts"]')
nvmet_unlink 1 $nqn
echo 0 >$N/1/enable; rmdir $N/1
rmdir $NVMET/subsystems/$nqn
wait_for 20 holds 's["state"]=="reconnecting"'
sleep 10
tried=$(($(state 's["failed_attempts"]') - before))
"$rdinit" status
[ $tried -ge 2 ] && [ $tried -le 14 ] || die "$tried attempts to connect in 10 s"
note "subsystem removed: $tried attempts in 10 s, $(state 's["last_error"]')"
detach $DEV
note "detached"

# The same while the port serves another subsystem: the target refuses by name.
other=nqn.2026-11.io.rdblk:other
nvmet_subsys $nqn
ns 1 /run/one.img $uuid
nvmet_subsys $other
ln -s $NVMET/subsystems/$nqn $NVMET/subsystems/$other $NVMET/ports/1/subsystems/
attach --device auto --nqn $nqn
nvmet_unlink 1 $nqn
wait_for 20 holds '"no subsystem of that name" in s.get("last_error","")'
sleep 6
tried=$(state 's["failed_attempts"]')
[ $tried -ge 2 ] && [ $tried -le 14 ] || die "$tried attempts to connect in 6 s"
[ "$(grep -c 'refused for good' "$SAID")" = 1 ] || die "the log says it $(grep -c 'refused for good' "$SAID") times"
detach $DEV
note "removed while the port goes on: $tried attempts in 6 s, refused by name"
# The two writes that were to fail have, and nothing else.
[ "$(dmesg | grep -c 'I/O error, dev nbd')" = 2 ] || die "$(dmesg | grep 'I/O error')"
kernel_clean 'I/O error, dev nbd0, sector 0 op 0x1'
trap - EXIT
note done
