#!/bin/bash
# Attach, mkfs, detach, attach, fsck, detach, $ROUNDS times (3; 200 in the long form): always clean, nothing stuck, and nothing left behind
# by rdinit, by rdtarget, in the kernel. What a round costs in emulation is the start of its programs, so most end
# by SIGTERM and only some by a program that asks for it.
# Arguments: the rdtarget and the rdinit program.
. "$VM_REPO/test/vm/lib.sh"
. "$VM_REPO/test/vm/guest/nbd-lib.sh"
modprobe nbd
serve mem:16m --workers 2
export RDINIT_PROTECT_MEMORY=false # which starts the program twice
cp "$rdinit" /run/rdinit; rdinit=/run/rdinit
# What is there when nobody is attached, and rdtarget has taken note of it.
left() {
	echo "descriptors $(ls /proc/$server/fd | wc -l)," \
		"unix sockets $(wc -l </proc/net/unix), control sockets $(find /run/rdblk -name "*rdinit*" | wc -l)," \
		"bound devices $(find /sys/block/nbd*/ -maxdepth 1 -name pid | wc -l), hosts $("$rdtarget" status | grep -c '^  connected' || true)"
}
same() { [ "$(left)" = "$1" ]; }
rests() { # into $before: at rest when it stays so
	before=$(left)
	[[ $before == *'hosts 0' ]] && same "$before"
}
threads() { ls /proc/$server/task | wc -l; } # Go keeps those that it once needed
rss() { sed -n 's/^VmRSS:[^0-9]*\([0-9]*\) kB/\1/p' /proc/$server/status; }
term() { # the other way to end it
	kill $client; wait $client
	[ ! -e /sys/block/nbd0/pid ] || die "round $i: still bound"
}
start=$SECONDS
: ${ROUNDS:=$(long && echo 200 || echo 3)}
for ((i = 1; i <= ROUNDS; i++)); do
	attach --device auto --queues 2
	mkfs.ext4 -q -F -E nodiscard $DEV
	if [ $((i % 5)) = 1 ]; then detach; else term; fi
	attach --device auto --queues 2
	e2fsck -fn $DEV >"$VM_OUT/fsck.txt" 2>&1 || { cat "$VM_OUT/fsck.txt"; die "round $i is not clean"; }
	term
	if [ $i = 2 ]; then wait_for 60 rests; many=$(threads) size=$(rss); note "after 2 rounds: $before, $many threads, $size kB"; fi
	[ $((i % 25)) != 0 ] || note "round $i, $(rss) kB"
done
note "$ROUNDS rounds in $((SECONDS - start)) s: $(left), $(threads) threads, $(rss) kB"
[ $ROUNDS -ge 3 ] || die "3 rounds at least"
wait_for 60 same "$before"
[ "$(threads)" -le $((many + 4)) ] || die "rdtarget has grown from $many to $(threads) threads"
[ "$(rss)" -lt $((size + 16384)) ] || die "rdtarget has grown from $size to $(rss) kB"
kill $server; wait $server
nbd_clean
trap - EXIT
note done
