#!/bin/bash
# Data of the kernel's host on rdtarget: a file system, fio verify with commands of 1 MiB, FUA and Flush, counted
# at rdtarget and seen by the kernel's tracing at the disk behind it, and answers that close the host's key and that do not.
# Arguments: the rdtarget program, the link (see host-lib.sh).
rdtarget=$1
. "$VM_REPO/test/vm/guest/host-lib.sh"
link "$2"
on_exit
null_up nb0 320 512 discard 1 cache_size 16 # with a volatile write cache
printf 'namespaces:\n  - {path: %s, direct: true}\n' $BLK >/run/c.yaml
serve --allow-any-host --config /run/c.yaml
nvme_connect $ADDR $nqn
note "connected as $NVME by $PROVIDER"
q=/sys/block/${NVME#/dev/}/queue
[ "$(cat $q/write_cache)" = "write back" ] || die "the host sees no write cache"
[ "$(cat $q/fua)" = 1 ] || die "the host sees no FUA"
# MDTS is 1 MiB; over siw the host's own limit, a page less, makes two commands of 1 MiB.
case $NETDEV in d0) most=1020 commands=32 ;; *) most=1024 commands=16 ;; esac
[ "$(cat $q/max_hw_sectors_kb)" = $most ] || die "largest command: $(cat $q/max_hw_sectors_kb) KiB, want $most"

# What the disk behind gets: block_rq_issue lines "MAJ,MIN RWBS BYTES () SECTOR + N".
T=/sys/kernel/tracing
mountpoint -q $T || mount -t tracefs tracefs $T
dev=$(lsblk -dno MAJ:MIN $BLK | tr -d ' ' | tr : ,)
issued() { grep -c "block_rq_issue: $dev $1 " $T/trace || true; }
traced() { echo 0 >$T/trace; echo 1 >$T/events/block/block_rq_issue/enable; "$@"; echo 0 >$T/events/block/block_rq_issue/enable; }
count() { metric "rdtarget_operations_total{nsid=\"1\",op=\"$1\"}"; }
fua() { metric "rdtarget_operation_fua_total{nsid=\"1\",op=\"$1\"}"; }

f=$(fua write) w=$(count write)
traced dd if=/dev/urandom of=$NVME bs=4k count=8 oflag=direct,dsync status=none
f=$(($(fua write) - f)) w=$(($(count write) - w)) b=$(issued 'WF[A-Z]*')
note "8 writes with dsync: $w writes, $f of them FUA at rdtarget; $b with FUA at the disk"
[ $f = 8 ] && [ $w = 8 ] && [ "$b" = 8 ] || { cat $T/trace >"$VM_OUT/trace-fua.txt"; die "FUA is lost on the way"; }
f=$(fua write)
traced dd if=/dev/urandom of=$NVME bs=4k count=8 oflag=direct status=none
[ "$(fua write)" = "$f" ] && [ "$(issued 'WF[A-Z]*')" = 0 ] || die "FUA without being asked for"
n=$(count flush)
traced sh -c "for i in 1 2 3 4 5; do nvme flush $NVME -n 1 >/dev/null; done"
n=$(($(count flush) - n)) b=$(issued 'FF[A-Z]*')
note "5 flushes: $n at rdtarget, $b at the disk"
[ $n = 5 ] && [ "$b" = 5 ] || { cat $T/trace >"$VM_OUT/trace-flush.txt"; die "flushes are lost on the way"; }

bytes() { metric "rdtarget_operation_bytes_total{nsid=\"1\",op=\"$1\"}"; }
for op in write read; do
	n=$(count $op) b=$(bytes $op)
	if [ $op = write ]; then dd if=/dev/zero of=$NVME bs=1M count=16 oflag=direct status=none; else dd if=$NVME of=/dev/null bs=1M count=16 iflag=direct status=none; fi
	n=$(($(count $op) - n)) b=$(($(bytes $op) - b))
	[ $n = $commands ] && [ $b = $((16 << 20)) ] || die "16 MiB by $op of 1 MiB were $n commands, $b bytes"
done
fio_verify $NVME bs=1m bsrange=1m-1m size=16m iodepth=8
fio_verify $NVME bsrange=4m-4m size=16m iodepth=4 offset=64m
fio_verify $NVME bsrange=512-64k size=4m offset=128m
note "fio verify 1M, 4M (several commands each) and 512-64k done"
n=$(count flush)
make_tree /run/tree 2
fs_check $NVME ext4
[ "$(count flush)" -gt "$n" ] || die "a file system without a flush"
note "ext4 done, $(($(count flush) - n)) flushes"
if [ "$2" = soft ]; then
	fs_check $NVME xfs
	note "xfs done"
fi
# The host asks for Send with Invalidate; then rdtarget is told not to; then the host does not ask for it, because it opens
# all its memory by one key (what register_always=N means for commands in one piece).
nvme_disconnect $nqn
answers invalidate
note "16 reads: $inv Sends with Invalidate"
[ $inv = 16 ] || die "keys that are to be closed are not"
nvme_disconnect $nqn
stop
RDTARGET_SEND_INVALIDATE=false serve --allow-any-host --config /run/c.yaml
answers plain
[ $inv = 0 ] || die "$inv keys are closed in spite of send_invalidate: false"
fio_verify $NVME bsrange=512-256k size=2m
nvme_disconnect $nqn
stop
modprobe -r nvme-rdma
modprobe nvme-rdma register_always=N
serve --allow-any-host --config /run/c.yaml
answers unasked
[ $inv = 0 ] || die "$inv keys are closed that the host did not offer"
fio_verify $NVME bsrange=512-256k size=2m
nvme_disconnect $nqn
stop
modprobe -r nvme-rdma # and its parameter
note "none with send_invalidate: false, nor for a host that does not ask"
kernel_clean
note done
