#!/bin/bash
# rdtarget on the software provider, the kernel's nvme-rdma host over siw against it: discover,
# connect, file systems, fio verify, small and large, discard, disconnect, several at once.
# Arguments: the rdtarget program.
. "$VM_REPO/test/vm/lib.sh"
rdtarget=$1
siw_up
modprobe nvme-rdma
nqn=nqn.2026-11.io.rdblk:vm
truncate -s 512m /run/disk.img
[ -z "${CAPTURE_TO:-}" ] || capture_start lo "$VM_OUT/$CAPTURE_TO" tcp port 4420
"$rdtarget" serve --provider iwarp --listen $SIW:4420 --nqn $nqn --allow-any-host /run/disk.img >"$VM_OUT/rdtarget.txt" 2>&1 &
server=$!
trap 'echo "--- rdtarget said:"; cat "$VM_OUT/rdtarget.txt"; dmesg | tail -30' EXIT
wait_for 20 sh -c "ss -tln | grep -q $SIW:4420"
note "rdtarget listens"
nvme_discover $SIW | tee "$VM_OUT/discover.txt" | grep "subnqn: *$nqn"
nvme_connect $SIW $nqn -i 2
note "connected as $NVME"
nvme list
[ "$(blockdev --getsize64 $NVME)" = $((512 << 20)) ]
nvme id-ctrl /dev/$CTRL >"$VM_OUT/id-ctrl.txt"
nvme id-ns $NVME -n 1 >"$VM_OUT/id-ns.txt"
nvme smart-log /dev/$CTRL >"$VM_OUT/smart.txt"
fs_check $NVME ext4
note "ext4 done"
fs_check $NVME xfs
note "xfs done"
fio_verify $NVME
note "fio verify 4k-128k done"
fio_verify $NVME bsrange=4k-1m numjobs=2 size=32m offset_increment=64m
note "fio verify 4k-1m, 2 jobs done"
blkdiscard -f $NVME
blkdiscard -f -z -o 1048576 -l 1048576 $NVME
nvme flush $NVME -n 1
nvme_disconnect $nqn
note "disconnected"
for i in 1 2 3 4 5; do
	nvme_connect $SIW $nqn -i 2
	dd if=$NVME of=/dev/null bs=64k count=16 iflag=direct status=none
	nvme_disconnect $nqn
done
note "5 times connect and disconnect done"
kill $server
wait $server
[ -z "${CAPTURE_TO:-}" ] || capture_stop
kernel_clean
trap - EXIT
note done
