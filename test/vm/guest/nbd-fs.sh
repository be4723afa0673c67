#!/bin/bash
# What people do with /dev/nbd0, over $PROVIDER (iwarp, rxe, siw): ext4 with a source tree, xfs, discard, fio verify
# with 4 jobs, partitions; and where it is rxe, or in the long form, a target that is killed under fio on a mounted
# ext4, where it is siw, or in the long form, blocks of 4096 bytes and test/fio/run.
# Arguments: the rdtarget and the rdinit program.
. "$VM_REPO/test/vm/lib.sh"
. "$VM_REPO/test/vm/guest/nbd-lib.sh"
modprobe nbd
truncate -s 512m /run/disk.img
truncate -s 128m /run/disk4k.img
# One with a partition table (MBR): 64 MiB from sector 2048, 32 MiB behind it.
truncate -s 128m /run/parts.img
{
	printf '\0\0\0\0\203\0\0\0\0\10\0\0\0\0\2\0'
	printf '\0\0\0\0\203\0\0\0\0\10\2\0\0\0\1\0'
	printf '%32s\125\252' '' | tr ' ' '\0'
} | dd of=/run/parts.img bs=1 seek=446 conv=notrunc status=none
cat >/run/target.yaml <<END
namespaces:
  - path: /run/disk.img
    nsid: 1
  - path: /run/disk4k.img
    nsid: 2
    block_size: 4096
  - path: /run/parts.img
    nsid: 3
END
serve none --config /run/target.yaml
attach --nsid 1 --device /dev/nbd0 --queues 2
note "attached over $PROVIDER: $(cat "$VM_OUT/ready.txt")"
geometry() { # SIZE BLOCK: what lsblk and the queue say of $DEV
	local got
	got=$(lsblk -bdno SIZE,LOG-SEC,RO $DEV | tr -s ' ' | sed 's/^ //')
	[ "$got" = "$1 $2 0" ] || die "lsblk: $got, not $1 $2 0"
	[ "$(cat /sys/block/${DEV#/dev/}/queue/write_cache) $(cat /sys/block/${DEV#/dev/}/queue/fua)" = "write back 1" ] || die "write cache, fua"
}
geometry $((512 << 20)) 512

# A source tree: copied, unmounted, checked, attached again, equal.
mkdir -p /run/src /mnt/t
tar -C "$VM_REPO" -cf - cmd/rdinit nbd docs | tar -C /run/src -xf -
mkfs.ext4 -q -F $DEV
mount $DEV /mnt/t
cp -a /run/src /mnt/t/
umount /mnt/t
e2fsck -fn $DEV >"$VM_OUT/fsck.txt" 2>&1 || { cat "$VM_OUT/fsck.txt"; die "not clean"; }
detach
attach --nsid 1 --device /dev/nbd0 --queues 2
mount -o ro $DEV /mnt/t
diff -r --no-dereference /run/src /mnt/t/src || die "the tree differs"
umount /mnt/t
note "ext4: $(find /run/src -type f | wc -l) files copied, clean, equal after another attach"

fio_verify $DEV bsrange=4k-1m numjobs=4 iodepth=32 size=8m offset_increment=64m
note "fio verify, 4 jobs, depth 32, 4k-1m"
! long || fio_verify $DEV bsrange=4k-1m iodepth=32 size=4m ioengine=io_uring

if long || [ $PROVIDER = rxe ]; then
	mkfs.ext4 -q -F -E nodiscard $DEV
	mount $DEV /mnt/t
	rm -f /run/enough; fio_until /run/enough /mnt/t/fio size=2m bsrange=16k-16k rate_iops=200,32 iodepth=8 & load=$!
	writes() { local s; read -ra s </sys/block/nbd0/stat; echo ${s[4]}; }
	written() { [ $(writes) -ge $1 ]; }
	lost() { "$rdinit" status | has -E 'state +reconnecting'; }
	wait_for 60 written $(($(writes) + 32))
	kill -9 $server; wait $server || true
	note "rdtarget killed under fio"
	wait_for 60 lost # what it had answered has come through
	before=$(writes)
	sleep 3
	[ "$before" = "$(writes)" ] || die "I/O without a target"
	kill -0 $load || die "fio has ended without a target"
	serve none --config /run/target.yaml
	touch /run/enough; wait $load
	note "I/O paused, went on, verify clean"
	umount /mnt/t
	e2fsck -fn $DEV >"$VM_OUT/fsck.txt" 2>&1 || { cat "$VM_OUT/fsck.txt"; die "not clean"; }
fi

fs_check $DEV xfs /run/src
note "xfs: the same"

# Discard. A file gives zeros where it was discarded; nothing else changes.
pattern() { head -c "$1" /dev/zero | tr '\0' '\245'; }
pattern $((4 << 20)) | dd of=$DEV bs=1M seek=16 oflag=direct iflag=fullblock status=none
blkdiscard -f -o $((17 << 20)) -l $((1 << 20)) $DEV
blkdiscard -f -z -o $((18 << 20)) -l $((1 << 20)) $DEV
for at in "16 pattern" "17 zero" "18 zero" "19 pattern"; do
	read -r mb what <<<"$at"
	case $what in
	zero) want=$(head -c 1M /dev/zero | sha256sum) ;;
	pattern) want=$(pattern $((1 << 20)) | sha256sum) ;;
	esac
	[ "$(dd if=$DEV bs=1M skip=$mb count=1 iflag=direct status=none | sha256sum)" = "$want" ] || die "MiB $mb is not $what"
done
blkdiscard -f $DEV
[ "$(dd if=$DEV bs=1M skip=16 count=4 iflag=direct status=none | tr -d '\0' | wc -c)" = 0 ] || die "not zero after blkdiscard"
[ "$(du -m /run/disk.img | cut -f1)" -lt 16 ] || die "the file has kept its blocks: $(du -m /run/disk.img)"
note "blkdiscard: part, zeroes, whole"
detach

attach --nsid 3 --device /dev/nbd0
wait_for 60 test -b /dev/nbd0p2
lsblk -b -o NAME,SIZE,LOG-SEC,RO $DEV
[ "$(blockdev --getsize64 /dev/nbd0p1) $(blockdev --getsize64 /dev/nbd0p2)" = "$((64 << 20)) $((32 << 20))" ] || die "partitions"
detach
note "partitions"

if long || [ $PROVIDER = siw ]; then
	attach --nsid 2 --device auto --queues 2
	geometry $((128 << 20)) 4096
	fs_check $DEV ext4 /run/src
	fio_verify $DEV size=4m
	mkdir /run/bin; ln -s "$rdtarget" "$rdinit" /run/bin/
	BIN=/run/bin RUNTIME=2 "$VM_REPO/test/fio/run" $DEV randread-4k-d32 | tee "$VM_OUT/fio-run.txt"
	grep -q "provider $by.*; back end /run/disk4k.img; queues 2 of depth .* fio-.*, Linux .*, rdinit .*, rdtarget " "$VM_OUT/fio-run.txt" || die "what it was measured on is not told"
	grep -q 'IOPS=' "$VM_OUT/fio-run.txt"
	! "$VM_REPO/test/fio/run" $DEV verify 2>/dev/null || die "fio writes unasked"
	detach
	note "blocks of 4096 bytes"
fi

kill $server; wait $server
nbd_clean
trap - EXIT
note done
