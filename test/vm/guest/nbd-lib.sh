# What the scripts for rdinit's own attach share; sourced after lib.sh. $1 rdtarget, $2 rdinit.
# $PROVIDER says over what: iwarp (the software NIC on loopback, the default), rxe or siw (the
# provider verbs on the kernel's soft-RoCE or soft-iWARP, both ends in this machine).
# shellcheck shell=bash disable=SC2034
rdtarget=$1 rdinit=$2
nqn=nqn.2026-11.io.rdblk:vm Q=/sys/block/nbd0/queue
: >"$VM_OUT/rdinit.txt"; : >"$VM_OUT/rdtarget.txt"
# After a failure: what both say, with the stacks of all goroutines.
said() {
	"$rdinit" status 2>&1 || true
	"$rdtarget" status 2>&1 || true
	kill -QUIT ${client:-} ${server:-} 2>/dev/null && sleep 2
	echo "--- rdtarget, rdinit said:"; tail -n 200 "$VM_OUT/rdtarget.txt"; tail -n 200 "$VM_OUT/rdinit.txt"; dmesg | tail -30
}
trap said EXIT
case ${PROVIDER:=iwarp} in
iwarp) ADDR=127.0.0.1 by=iwarp ;;
rxe) rxe_up; ADDR=$RXE by=verbs ;;
siw) siw_up; ADDR=$SIW by=verbs; ulimit -l unlimited ;; # siw counts locked memory for root too
*) die "no provider $PROVIDER" ;;
esac
# serve [WHAT [OPTION|NAMESPACE...]]: $server. WHAT: a namespace (mem:SIZE, null:SIZE, a path), a size that
# /run/disk.img is given first, or none; nothing: /run/disk.img as it is.
serve() {
	local what=(/run/disk.img)
	case ${1:-} in
	'') ;;
	none) what=() ;;
	mem:* | null:* | /*) what=("$1") ;;
	*) truncate -s "$1" /run/disk.img ;;
	esac
	: >"$VM_OUT/serving.txt" # the redirection below may come later than the first look
	"$rdtarget" serve --provider $by --listen $ADDR:4420 --nqn $nqn --allow-any-host "${@:2}" "${what[@]}" >"$VM_OUT/serving.txt" 2>>"$VM_OUT/rdtarget.txt" & server=$!
	wait_for 60 has_line "$VM_OUT/serving.txt" 'rdtarget: serving'
}
attach() { # OPTION...: $client, $DEV
	: >"$VM_OUT/ready.txt"
	"$rdinit" attach $ADDR:4420 --provider $by --nqn $nqn "$@" >"$VM_OUT/ready.txt" 2>>"$VM_OUT/rdinit.txt" & client=$!
	wait_for 60 has_line "$VM_OUT/ready.txt" 'rdinit: attached'
	DEV=$(sed -n 's/^rdinit: attached .*: //p' "$VM_OUT/ready.txt")
	[ -b "$DEV" ] || die "no device ($DEV) in: $(cat "$VM_OUT/ready.txt")"
}
detach() { # by request; the kernel says that it is unbound
	"$rdinit" detach "$DEV" >/dev/null
	wait $client
	[ ! -e /sys/block/${DEV#/dev/}/pid ] || die "$DEV is still bound"
}
# not_stuck: nobody stays in uninterruptible sleep. For a moment everybody is who waits for a file of the host.
not_stuck() {
	local end=$((SECONDS + 20)) pid
	for pid in $(asleep); do
		while [[ " $(asleep) " == *" $pid "* ]]; do
			[ $SECONDS -lt $end ] || die "in uninterruptible sleep: $(ps -o pid=,wchan=,args= -p $pid)"
			read -rt 0.1 -u "$NEVER" || :
		done
	done
}
asleep() { # who is in uninterruptible sleep, but the kernel's workers
	local f s all=
	for f in /proc/[0-9]*/stat; do
		{ read -r s <$f; } 2>/dev/null || continue # it has ended meanwhile
		[[ $s == *'(kworker'* || ${s##*) } != D* ]] || all+=" ${s%% *}"
	done
	echo $all
}
nbd_clean() {
	not_stuck; kernel_clean
	if grep 'has no answer after' "$VM_OUT/rdinit.txt"; then die "a request has hung"; fi
}
