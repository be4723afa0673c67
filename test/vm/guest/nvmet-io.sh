#!/bin/bash
# rdinit on the kernel's nvmet-rdma: every kind of I/O, through the NBD socket and /dev/nbdN; namespaces of
# both block sizes, in-capsule data of three sizes, keys by window and of whole regions.
# Arguments: the rdinit program. FABRIC: see nvmet-lib.sh.
. "$VM_REPO/test/vm/lib.sh"
. "$VM_REPO/test/vm/guest/nvmet-lib.sh"
fabric_up
modprobe nbd
null_up nb0 256 512 discard 1 cache_size 64; one=$BLK
null_up nb1 320 4096 discard 1; two=$BLK # xfs wants 300 MiB
nvmet_subsys $nqn
nvmet_ns $nqn 1 $one
nvmet_ns $nqn 2 $two
port() { # ID PORT INLINE
	mkdir $NVMET/ports/$1
	echo $3 >$NVMET/ports/$1/param_inline_data_size
	echo $ADDR >$NVMET/ports/$1/addr_traddr; echo rdma >$NVMET/ports/$1/addr_trtype
	echo $2 >$NVMET/ports/$1/addr_trsvcid; echo ipv4 >$NVMET/ports/$1/addr_adrfam
	ln -s $NVMET/subsystems/$nqn $NVMET/ports/$1/subsystems/
}
port 1 4420 16384
port 2 4421 0
port 3 4422 4096
for p in 4420 4421 4422; do # nvmet tells of the port that is asked
	"$rdinit" discover $ADDR:$p >"$VM_OUT/discover.txt"
	grep "$ADDR *$p *$nqn" "$VM_OUT/discover.txt"
done
if "$rdinit" attach $ADDR --socket $sock >"$VM_OUT/two.txt" 2>&1; then die "attached one of two namespaces without being told which"; fi
grep -q 'namespaces 1 (256 MiB), 2 (320 MiB): choose one with --nsid' "$VM_OUT/two.txt" || { cat "$VM_OUT/two.txt"; die "the choice is not named"; }
# captured NAME PORT ATTACH-ARGUMENT...: attaches, reads 16 times; over iwarp what is on the wire goes to $VM_OUT/NAME.pcap,
# for TestKernelTarget: siw has no windows, and rxe keeps packets to itself.
captured() {
	[ $FABRIC != iwarp ] || capture_start lo "$VM_OUT/$1.pcap" tcp port $2
	attach -p "${@:2}"
	local reads=()
	for i in {1..16}; do reads+=(-c 'read 0 32k'); done
	qemu-io -f raw -t none "$nbd_uri" "${reads[@]}" >/dev/null
	[ $FABRIC != iwarp ] || capture_stop
}
trace_start
note "discovery; two namespaces are named"

# The first namespace, by socket, found by discovery.
attach --nsid 1 --socket $sock
grep "in_capsule=16384" "$SAID" | tail -1
holds ".state == \"live\" and .block_size == 512 and .size == $((256 << 20)) and [.namespaces[].nsid] == [1, 2]"
fio_nbd size=8m
fio_nbd bsrange=512-1m size=4m numjobs=2 offset_increment=64m fsync=4
seen 'nvme_cmd_flush'
# Zeros, with and without deallocation, and a discard, by name (the kernel's nbd of 6.1 has no write zeroes).
head -c 1048576 /dev/urandom >/run/data
qemu-io -f raw -t none "$nbd_uri" -c 'write -s /run/data 0 1M' -c 'write -z 64k 64k' -c 'write -z -u 256k 64k' -c 'discard 512k 64k' -c 'write -f 1M 4k' >"$VM_OUT/qemu-io.txt"
! grep -i 'fail\|error' "$VM_OUT/qemu-io.txt" || die "$(cat "$VM_OUT/qemu-io.txt")"
seen 'nsid=1.*nvme_cmd_write_zeroes' 2
seen 'nsid=1.*nvme_cmd_dsm'
seen 'nsid=1.*nvme_cmd_write,.*ctrl=0x4000' # FUA
same() { # DISK OFFSET...: /run/data with 64 KiB of zeros at each offset
	dd if=$1 of=/run/got bs=1M count=1 iflag=direct status=none # not what is cached of it
	cp /run/data /run/want
	local off
	for off in "${@:2}"; do dd if=/dev/zero of=/run/want bs=64k count=1 seek="$off" oflag=seek_bytes conv=notrunc status=none; done
	cmp /run/want /run/got || die "what is on $1 is not what was written"
}
same $one 65536 262144 524288
note "NBD socket: verify 4k-128k, 512-1m with flushes; write zeroes, discard, FUA; same bytes on the kernel's disk"
detach $sock

# The second, of 4096-byte blocks, as block device: geometry, discard, write zeroes, FUA, and the bytes themselves.
attach --nsid 2 --device auto --nqn $nqn
[ -b $DEV ]
[ "$(lsblk -bdno SIZE,LOG-SEC $DEV | tr -s ' ' | sed 's/^ //')" = "$((320 << 20)) 4096" ] || die "lsblk: $(lsblk -bdno SIZE,LOG-SEC $DEV)"
q=/sys/block/${DEV#/dev/}/queue
[ "$(cat $q/write_cache)" = "write back" ] && [ "$(cat $q/fua)" = 1 ]
fio_verify $DEV bs=4k bsrange=4k-1m size=8m
echo >$T/trace
dd if=/run/data of=$DEV bs=64k oflag=direct status=none
seen 'nsid=2.*nvme_cmd_write,' 16
echo >$T/trace
dd if=/run/data of=$DEV bs=64k seek=16 oflag=direct,dsync status=none
seen 'nvme_cmd_write,.*ctrl=0x4000' 16 # FUA
same $two
blkdiscard -o 65536 -l 65536 $DEV
seen 'nvme_cmd_dsm'
blkdiscard -z -o 524288 -l 65536 $DEV
sync $DEV
same $two 65536 524288
note "/dev/nbdN, blocks of 4096: verify, direct, FUA, discard, zeroing, same bytes on the kernel's disk"
# The first beside it: two attachments of one subsystem, one file system each.
other=$DEV first=$client
make_tree /run/tree 2
attach --nsid 1 --device auto --nqn $nqn
[ $DEV != $other ]
fs_check $DEV ext4 & fs=$!
fio_verify $other bs=4k bsrange=4k-64k size=2m offset=64m
wait $fs
detach $DEV
if [ $FABRIC = siw ]; then fs_check $other xfs; fi
client=$first
detach $other
note "both at a time"

# No data in capsules; then 4096 bytes, and keys of whole regions instead of windows.
attach -p 4421 --nsid 1 --nqn $nqn --socket $sock
grep 'msg=connected' "$SAID" | tail -1 | grep -q in_capsule=0
fio_nbd bsrange=512-64k size=2m
detach $sock
export RDINIT_MEMORY_WINDOWS=false
captured plain 4422 --nsid 1 --nqn $nqn --socket $sock
grep 'msg=connected' "$SAID" | tail -1 | grep -q 'windows=false in_capsule=4096'
fio_nbd bsrange=512-256k size=2m
detach $sock
unset RDINIT_MEMORY_WINDOWS
note "in-capsule data 0 and 4096, no windows"
# The kernel as a client of the socket, by two connections, and the same bytes on the disk.
captured invalidate 4420 --nsid 1 --nqn $nqn --socket $sock
nbd-client -unix $sock /dev/nbd15 -C 2 >/dev/null
[ "$(blockdev --getsize64 /dev/nbd15)" = $((256 << 20)) ]
dd if=/run/data of=/dev/nbd15 bs=64k oflag=direct conv=fsync status=none
nbd-client -d /dev/nbd15 >/dev/null
same $one
detach $sock
note "nbd-client"
kernel_clean
trap - EXIT
note done
