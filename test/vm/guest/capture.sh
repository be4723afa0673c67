#!/bin/bash
# A TCP capture of the kernel's nvme-rdma host at work against nvmet-rdma over siw: discovery,
# connect, identify, small and large reads and writes, flush, discard, write zeroes, keep-alive,
# disconnect. Leaves nvme.pcap; `go run ./test/vm/mpadump -golden DIR nvme.pcap` makes golden files of it.
# With the rdtarget program as argument that is the target instead: the two sets of files can be compared.
. "$VM_REPO/test/vm/lib.sh"
siw_up
nqn=nqn.2026-11.io.rdblk:golden
if [ $# = 0 ]; then
	null_up nb0 64 512 discard 1
	nvmet_subsys $nqn
	nvmet_ns $nqn 1 $BLK
	nvmet_port 1 $SIW 4420 $nqn
else
	truncate -s 64m /run/disk.img
	"$1" serve --listen $SIW:4420 --nqn $nqn --allow-any-host /run/disk.img >"$VM_OUT/rdtarget.txt" 2>&1 &
	wait_for 60 sh -c "ss -tln | grep -q $SIW:4420"
fi
capture_start lo "$VM_OUT/nvme.pcap" tcp port 4420
modprobe nvme-rdma
id=(--hostnqn nqn.2014-08.org.nvmexpress:uuid:00112233-4455-6677-8899-aabbccddeeff --hostid 00112233-4455-6677-8899-aabbccddeeff)
timeout 60 nvme discover -t rdma -a $SIW -s 4420 "${id[@]}"
nvme_connect $SIW $nqn -i 1 -Q 32 -k 2 "${id[@]}"
seq -w 1000000 | head -c 262144 >/run/data || true # seq: broken pipe
dd if=/run/data of=$NVME bs=4096 count=1 oflag=direct status=none       # in the capsule
dd if=/run/data of=$NVME bs=131072 count=1 seek=1 oflag=direct status=none # by RDMA Read
dd if=$NVME of=/run/back bs=4096 count=1 iflag=direct status=none
dd if=$NVME of=/run/back2 bs=131072 count=1 skip=1 iflag=direct status=none
cmp -n 4096 /run/data /run/back
cmp -n 131072 /run/data /run/back2
nvme flush $NVME -n 1
blkdiscard -o 1048576 -l 65536 $NVME
blkdiscard -z -o 2097152 -l 65536 $NVME
nvme smart-log $NVME >/dev/null
nvme read $NVME -s 131072 -c 0 -z 512 >/dev/null 2>&1 && die "a read beyond the end went through" || true
sleep 3 # a keep-alive
nvme_disconnect $nqn
capture_stop
grep -q '^0 packets dropped by kernel' "$VM_OUT/tcpdump.txt"
uname -rv >"$VM_OUT/kernel.txt"
kernel_clean
