#!/bin/bash
# The kernel against itself over rxe and over siw: what the laboratory must be able to do before
# anything of ours is judged in it. Arguments: the RDMA devices to try (rxe siw).
. "$VM_REPO/test/vm/lib.sh"
[ $# -gt 0 ] || set -- rxe siw
for dev in "$@"; do
	note "$dev: up"
	"${dev}_up"
	case $dev in rxe) addr=$RXE ;; siw) addr=$SIW ;; esac
	rping -s -a $addr -C 5 >/dev/null & server=$!
	wait_for 60 rping -c -a $addr -C 5
	wait $server
	note "$dev: rping done"
	nqn=nqn.2026-11.io.rdblk:vm:$dev
	null_up nb$dev 256
	nvmet_subsys $nqn
	nvmet_ns $nqn 1 $BLK
	nvmet_port 1$((RANDOM % 1000)) $addr 4420 $nqn
	nvme_discover $addr | grep "subnqn: *$nqn"
	nvme_connect $addr $nqn -i 2
	note "$dev: connected as $NVME"
	[ "$(blockdev --getsize64 $NVME)" = $((256 << 20)) ]
	fs_check $NVME
	note "$dev: file system done"
	fio_verify $NVME
	note "$dev: fio verify done"
	nvme_disconnect $nqn
done
kernel_clean
note done
