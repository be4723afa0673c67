#!/bin/bash
# rdinit on the software provider attaches namespaces of the kernel's nvmet-rdma over siw; NBD
# clients of others (fio's, the kernel's through nbd-client) work on them.
# Arguments: the rdinit program.
. "$VM_REPO/test/vm/lib.sh"
rdinit=$1
siw_up
nqn=nqn.2026-11.io.rdblk:vm sock=/run/rdblk.sock
null_up nb0 512 512 discard 1
nvmet_subsys $nqn
nvmet_ns $nqn 1 $BLK
nvmet_port 1 $SIW 4420 $nqn
[ -z "${CAPTURE_TO:-}" ] || capture_start lo "$VM_OUT/$CAPTURE_TO" tcp port 4420
trap 'echo "--- rdinit said:"; cat "$VM_OUT/rdinit.txt"; dmesg | tail -20' EXIT
: >"$VM_OUT/rdinit.txt"
"$rdinit" discover --provider iwarp $SIW:4420 | tee "$VM_OUT/discover.txt"
grep -q "$nqn" "$VM_OUT/discover.txt"
attach() { # OPTION...
	"$rdinit" attach $SIW:4420 --provider iwarp --socket $sock --queues 2 "$@" >>"$VM_OUT/rdinit.txt" 2>&1 & client=$!
	wait_for 30 test -S $sock
}
detach() { kill $client; wait $client; [ ! -e $sock ]; }
attach
note attached
"$rdinit" list
"$rdinit" status
fio_verify '' ioengine=nbd "uri=nbd+unix:///?socket=$sock" direct=0
note "fio verify 4k-128k over NBD done"
fio_verify '' ioengine=nbd "uri=nbd+unix:///?socket=$sock" direct=0 bsrange=4k-1m numjobs=2 size=32m offset_increment=64m
note "fio verify 4k-1m, 2 jobs, over NBD done"
detach
note detached
attach --nqn $nqn
modprobe nbd
nbd-client -unix $sock /dev/nbd0 -C 2 >/dev/null
[ "$(blockdev --getsize64 /dev/nbd0)" = $((512 << 20)) ]
fs_check /dev/nbd0 ext4
note "ext4 on /dev/nbd0 done"
fs_check /dev/nbd0 xfs
note "xfs on /dev/nbd0 done"
blkdiscard -f /dev/nbd0
nbd-client -d /dev/nbd0 >/dev/null
# What was written through NBD is what the kernel's disk holds: the wire was not talking to itself.
head -c 1048576 /dev/urandom >/run/data
nbd-client -unix $sock /dev/nbd0 >/dev/null
dd if=/run/data of=/dev/nbd0 bs=64k oflag=direct conv=fsync status=none
nbd-client -d /dev/nbd0 >/dev/null
detach
cmp -n 1048576 /run/data $BLK
[ -z "${CAPTURE_TO:-}" ] || capture_stop
kernel_clean
trap - EXIT
note done
