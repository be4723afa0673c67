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
port() { # writes of up to 16 KiB take their data along: see the target that stops
	nvmet_port 1 $ADDR 4420
	echo 16384 >$NVMET/ports/1/param_inline_data_size
	ln -s $NVMET/subsystems/$nqn $NVMET/ports/1/subsystems/
}
port
# A connection may be silent for a while on a busy machine: reconnects are counted below.
export RDINIT_KEEP_ALIVE=20s RDINIT_TRACE=$VM_OUT/trace.txt
attach --device auto --nqn $nqn
q=/sys/block/${DEV#/dev/}

# Growth, told by revalidate_size, and by disable and enable; /dev/nbdN follows without anything being attached anew.
truncate -s 160m /run/one.img
echo 1 >$N/1/revalidate_size
wait_for 60 sh -c "[ \$(blockdev --getsize64 $DEV) = $((160 << 20)) ]"
holds ".size == $((160 << 20)) and .reconnects == 0"
note "grown by revalidate_size"
echo 0 >$N/1/enable
truncate -s 192m /run/one.img
wait_for 60 holds '.fault // "" | contains("no such namespace")'
"$rdinit" list | grep 'live/fault'
echo 1 >$N/1/enable
wait_for 60 sh -c "[ \$(blockdev --getsize64 $DEV) = $((192 << 20)) ]"
wait_for 60 holds ".size == $((192 << 20)) and .fault == null and .reconnects == 0"
dd if=/dev/urandom of=$DEV bs=1M count=1 seek=191 oflag=direct,dsync status=none
cmp <(dd if=$DEV bs=1M skip=191 iflag=direct status=none) <(tail -c 1048576 /run/one.img)
note "grown by disable and enable; the new end is written"

# Namespaces that come and go show.
truncate -s 32m /run/two.img
ns 2 /run/two.img $(cat /proc/sys/kernel/random/uuid)
wait_for 60 holds "[.namespaces[] | .nsid, .size] == [1, $((192 << 20)), 2, $((32 << 20))]"
"$rdinit" status | grep 'others there *2 (32 MiB)'
echo 0 >$N/2/enable; rmdir $N/2
wait_for 60 holds '[.namespaces[].nsid] == [1]'
note "a namespace came and went"

# Disabled and enabled under load: a pause.
rm -f /run/enough; fio_until /run/enough $DEV size=2m rate=,1m bsrange=4k-32k & load=$!
busy $DEV
echo 0 >$N/1/enable
wait_for 60 holds '.fault // "" | contains("no such namespace")'
kill -0 $load
echo 1 >$N/1/enable
touch /run/enough; wait $load
holds '.fault == null and .reconnects == 0 and .errors == 0'
note "disabled and enabled under load: verify clean, no error"

# The target stopped and started under load: a pause. Without Reads: nvmet on siw of Linux 6.1 would wait for ever
# for those that are in flight when it disconnects, and with them for the namespace when that is disabled below.
rm -f /run/enough; fio_until /run/enough $DEV size=2m rate=,1m bsrange=4k-16k & load=$!
busy $DEV
nvmet_unlink 1 $nqn
rmdir $NVMET/ports/1
wait_for 60 holds '.state == "reconnecting" and .last_error != null and .failed_attempts >= 3'
kill -0 $load
port
touch /run/enough; wait $load
holds '.state == "live" and .reconnects == 1 and .errors == 0'
note "target stopped and started under load: verify clean, $(state .failed_attempts) attempts failed"

# Removed, and another one in its place: nothing is written to it, and the right one is taken again. Requests wait for
# retry_timeout only, which here is short; above it must be longer than what this machine takes to disable and enable.
detach $DEV
RDINIT_RETRY_TIMEOUT=8s attach --device auto --nqn $nqn
echo 0 >$N/1/enable; rmdir $N/1
wait_for 60 holds '.fault // "" | contains("no such namespace")'
start=$SECONDS
if dd if=/run/two.img of=$DEV bs=4k count=1 oflag=direct status=none 2>"$VM_OUT/dd.txt"; then die "wrote to a namespace that is gone"; fi
[ $((SECONDS - start)) -le 25 ] || die "it took $((SECONDS - start)) s to fail" # without the setting it would take 30
grep -q 'Input/output error' "$VM_OUT/dd.txt"
truncate -s 192m /run/other.img
ns 1 /run/other.img $(cat /proc/sys/kernel/random/uuid)
wait_for 60 holds '.fault // "" | contains("not the one that was attached")'
if dd if=/dev/urandom of=$DEV bs=4k count=1 oflag=direct status=none 2>"$VM_OUT/dd.txt"; then die "wrote to another disk"; fi
cmp -n $((192 << 20)) /run/other.img /dev/zero
echo 0 >$N/1/enable; rmdir $N/1
ns 1 /run/one.img $uuid
wait_for 60 holds '.fault == null'
dd if=/dev/urandom of=$DEV bs=64k count=4 oflag=direct,dsync status=none
cmp -n 262144 $DEV /run/one.img
note "removed, swapped for another UUID, put back: failed, failed, works"

# The subsystem removed: clear state, no storm, detach works.
before=$(state .failed_attempts) start=$SECONDS
nvmet_unlink 1 $nqn
echo 0 >$N/1/enable; rmdir $N/1
rmdir $NVMET/subsystems/$nqn
wait_for 60 holds '.state == "reconnecting"'
sleep 6 # for attempts to be counted
tried=$(($(state .failed_attempts) - before)) took=$((SECONDS - start))
"$rdinit" status
[ $tried -ge 2 ] && [ $tried -le $((9 + took / 3)) ] || die "$tried attempts to connect in $took s"
note "subsystem removed: $tried attempts in $took s, $(state .last_error)"
detach $DEV
note "detached"

# The same while the port serves another subsystem: the target refuses by name.
other=nqn.2026-11.io.rdblk:other
nvmet_subsys $nqn
ns 1 /run/one.img $uuid
nvmet_subsys $other
ln -s $NVMET/subsystems/$nqn $NVMET/subsystems/$other $NVMET/ports/1/subsystems/
attach --device auto --nqn $nqn
start=$SECONDS
nvmet_unlink 1 $nqn
wait_for 60 holds '.last_error // "" | contains("no subsystem of that name")'
sleep 4 # for attempts to be counted
"$rdinit" status
tried=$(state .failed_attempts) took=$((SECONDS - start))
[ $tried -ge 2 ] && [ $tried -le $((12 + took / 3)) ] || die "$tried attempts to connect in $took s"
[ "$(grep -c 'refused for good' "$SAID")" = 1 ] || die "the log says it $(grep -c 'refused for good' "$SAID") times"
detach $DEV
note "removed while the port goes on: $tried attempts in $took s, refused by name"
# The trace has it in the specification's words.
traced '> Fabrics Connect cid=0x[0-9a-f]+ qid=1 ' '> Identify ' '> Write .*nsid=1' '> Flush ' '< Completion .*event="namespace attribute changed' \
	'> Get Log Page .*lid="Changed Namespace List"' '< Completion .*status="connect invalid parameters'
# The two writes that were to fail have, and nothing else.
[ "$(dmesg | grep -c 'I/O error, dev nbd')" = 2 ] || die "$(dmesg | grep 'I/O error')"
kernel_clean 'I/O error, dev nbd[0-9]+, sector 0 op 0x1'
trap - EXIT
note done
