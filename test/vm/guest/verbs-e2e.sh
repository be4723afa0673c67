#!/bin/bash
# rdtarget and rdinit over a verbs device of this machine, or one of them in software (siw only, one wire):
# NBD clients verify what they write, small and large; the long form kills the target under each pair's load, too
# (in the suite nbd-fs.sh does, on devices).
# Arguments: the rdtarget and the rdinit program, rxe or siw, and pairs of rdtarget's and rdinit's provider (verbs:iwarp).
. "$VM_REPO/test/vm/lib.sh"
rdtarget=$1 rdinit=$2 kind=$3
shift 3
"${kind}_up"
case $kind in rxe) addr=$RXE ;; siw) addr=$SIW ;; esac
nqn=nqn.2026-11.io.rdblk:vm sock=/run/rdblk.sock
via() { case $1 in iwarp) echo iwarp ;; *) echo "verbs ${kind}0" ;; esac; } # what is to be shown for a provider
: >"$VM_OUT/rdinit.txt"
said() {
	"$rdinit" status || true
	"$rdtarget" status -o json | grep -A14 -E '"(queues|oldest|workers)"' || true
	kill -QUIT $client $server 2>/dev/null && sleep 1
	echo "--- rdtarget, rdinit said:"
	tail -n 150 "$VM_OUT/rdtarget.txt"; tail -n 150 "$VM_OUT/rdinit.txt"; dmesg | tail -30
}
trap said EXIT
serve() { # ADDR
	rm -f "$VM_OUT/serving.txt"
	"$rdtarget" serve --provider $at_target --listen "${1-$addr}:4420" --nqn $nqn --allow-any-host /run/disk.img >"$VM_OUT/serving.txt" 2>>"$VM_OUT/rdtarget.txt" & server=$!
	wait_for 60 has_line "$VM_OUT/serving.txt" 'rdtarget: serving'
}
attach() { # [OPTION...]: to $addr
	rm -f "$VM_OUT/attached.txt"
	"$rdinit" attach $addr:4420 --provider $at_init --socket $sock --queues 2 --nqn $nqn "$@" >"$VM_OUT/attached.txt" 2>>"$VM_OUT/rdinit.txt" & client=$!
	wait_for 60 has_line "$VM_OUT/attached.txt" 'rdinit: attached'
}
detach() { "$rdinit" detach $sock >/dev/null; wait $client; }
nbd=(ioengine=nbd "uri=nbd+unix:///?socket=$sock" direct=0)
"$rdtarget" devices
"$rdinit" devices -o json | python3 -c "
import json, sys
d = {p['name']: p for p in json.load(sys.stdin)['providers']}
assert [x for x in d['verbs']['devices'] if x['name'] == '${kind}0' and '$addr' in x['addresses'] and x['max_qp_wr'] > 0], d
assert not d['verbs']['missing'], d['verbs']['missing']"
gone() { ! kill -0 $1; }
restart() {
	fio_verify '' "${nbd[@]}" size=24m bsrange=32k-32k rate_iops=80 & load=$! # writes for 10 s
	sleep 4
	kill -0 $load
	kill -9 $server; wait $server || true
	note "rdtarget killed under load"
	sleep 2
	serve
	wait_for 80 gone $load
	wait $load
	"$rdinit" status | grep -E 'state +live'
	"$rdinit" status | grep -E 'reconnects +[1-9]'
	note "verify clean over the restart"
}
for pair; do
	at_target=${pair%:*} at_init=${pair#*:}
	truncate -s 256m /run/disk.img
	serve
	cat "$VM_OUT/serving.txt"
	"$rdinit" discover --provider $at_init $addr:4420 | grep $nqn
	attach
	cat "$VM_OUT/attached.txt"
	grep -qF "($(via $at_init))" "$VM_OUT/attached.txt"
	"$rdinit" list
	"$rdtarget" status
	"$rdtarget" status | grep -F "connected" | has -F "($(via $at_target))"
	dd if=/dev/urandom of=/run/data bs=1M count=8 status=none
	nbdcopy /run/data "nbd+unix:///?socket=$sock"
	cmp -n 8388608 /run/data /run/disk.img
	note "data is in the target's file"
	fio_verify '' "${nbd[@]}" numjobs=4 iodepth=32 bsrange=4k-1m size=$(long && echo 16m || echo 8m) offset_increment=32m
	note "fio verify, 4 jobs, depth 32, 4k-1m done"
	! long || restart
	detach
	kill $server
	wait $server
	rm /run/disk.img
	note "rdtarget $at_target, rdinit $at_init over ${kind}0: done"
done
# A wildcard address: with both providers on one port, and each host takes the one that suits its way.
at_target=auto at_init=auto
truncate -s 64m /run/disk.img
serve ''
cat "$VM_OUT/serving.txt"
own=$addr
reach() { # ADDR PROVIDER WHAT-IS-TO-BE-SHOWN
	addr=$1 at_init=$2
	attach
	grep -qF "at $1:4420 ($3)" "$VM_OUT/attached.txt" || die "attached: $(cat "$VM_OUT/attached.txt")"
	head -c 1048576 /dev/urandom >/run/data
	nbdcopy /run/data "nbd+unix:///?socket=$sock"
	detach
	cmp -n 1048576 /run/data /run/disk.img
}
reach 127.0.0.1 auto iwarp
reach $own auto "verbs ${kind}0"
reach $own iwarp iwarp
note "wildcard done"
kill $server
wait $server
# A user who may lock 64 KiB: a device would need more, and how much is said; by itself it goes on in software.
user=(env HOME=/tmp prlimit --memlock=65536:65536 setpriv --reuid 65534 --regid 65534 --clear-groups)
if "${user[@]}" "$rdtarget" serve --provider verbs --listen $own:4421 --allow-any-host mem:16M >"$VM_OUT/user.txt" 2>&1; then die "it serves"; fi
cat "$VM_OUT/user.txt"
grep -q 'need [0-9]* MiB of locked memory.*may lock 64 KiB.*ulimit -l unlimited' "$VM_OUT/user.txt"
"${user[@]}" "$rdtarget" serve --listen $own:4421 --nqn $nqn:user --allow-any-host mem:16M >"$VM_OUT/serving.txt" 2>>"$VM_OUT/rdtarget.txt" & server=$!
wait_for 60 grep -qs "on $own:4421 (iwarp)" "$VM_OUT/serving.txt"
"${user[@]}" "$rdinit" bench $own:4421 --nqn $nqn:user --queues 1 --runtime 1s 2>&1
kill $server
wait $server
note "an ordinary user done"
kernel_clean
trap - EXIT
note done
