#!/bin/bash
# The device that rdtarget and rdinit use is removed under load: the kernel has it back soon, for both let it go. It comes
# again: both use it again, and no data is lost. On soft-RoCE and on soft-iWARP, in each case twice.
# Arguments: the rdtarget and the rdinit program.
. "$VM_REPO/test/vm/lib.sh"
rdtarget=$1 rdinit=$2
nqn=nqn.2026-11.io.rdblk:vm sock=/run/rdblk.sock
said() {
	"$rdinit" status || true
	kill -QUIT $client $server 2>/dev/null && sleep 1
	echo "--- rdtarget, rdinit said:"
	tail -n 200 "$VM_OUT/rdtarget.txt"; tail -n 200 "$VM_OUT/rdinit.txt"; dmesg | tail -30
}
trap said EXIT
gone() { ! kill -0 $1; }
live() { "$rdinit" status | has -E 'state +live'; }
rxe_up
siw_up
for kind in rxe siw; do
	case $kind in rxe) addr=$RXE netdev=v0 ;; siw) addr=$SIW netdev=d0 ;; esac
	truncate -s 64m /run/disk.img
	rm -f "$VM_OUT/serving.txt" "$VM_OUT/attached.txt"
	"$rdtarget" serve --provider verbs --listen $addr:4420 --nqn $nqn --allow-any-host /run/disk.img >"$VM_OUT/serving.txt" 2>>"$VM_OUT/rdtarget.txt" & server=$!
	wait_for 60 has_line "$VM_OUT/serving.txt" 'rdtarget: serving'
	"$rdinit" attach $addr:4420 --provider verbs --socket $sock --queues 2 --nqn $nqn >"$VM_OUT/attached.txt" 2>>"$VM_OUT/rdinit.txt" & client=$!
	wait_for 60 has_line "$VM_OUT/attached.txt" 'rdinit: attached'
	fio_verify '' ioengine=nbd "uri=nbd+unix:///?socket=$sock" direct=0 size=16m bsrange=32k-32k rate_iops=40 & load=$!
	for round in 1 2; do
		sleep 2
		timeout 30 rdma link del ${kind}0 || die "the kernel does not get ${kind}0 back"
		note "${kind}0 removed"
		sleep 2
		rdma link add ${kind}0 type $kind netdev $netdev
		wait_for 60 rdma_active ${kind}0
		wait_for 60 live
		note "live again"
	done
	wait_for 80 gone $load
	wait $load
	"$rdinit" status | grep -E 'reconnects +[2-9]'
	"$rdtarget" status | grep -F "(verbs ${kind}0)" || { "$rdtarget" status; die "which device it uses is not said"; }
	"$rdinit" detach $sock >/dev/null
	wait $client
	kill $server
	wait $server
	rm /run/disk.img
	grep -E 'listening again|device in use|was removed' "$VM_OUT/rdtarget.txt" | tail -n 12
	[ "$(grep -c 'accept failed' "$VM_OUT/rdtarget.txt")" -le 12 ] || die "rdtarget repeats itself"
	note "${kind}: done"
done
kernel_clean
trap - EXIT
note done
