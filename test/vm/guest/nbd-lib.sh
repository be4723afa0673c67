# What the scripts for rdinit's own attach share; sourced after lib.sh. $1 rdtarget, $2 rdinit.
# shellcheck shell=bash disable=SC2034
rdtarget=$1 rdinit=$2
nqn=nqn.2026-11.io.rdblk:vm Q=/sys/block/nbd0/queue
: >"$VM_OUT/rdinit.txt"; : >"$VM_OUT/rdtarget.txt"
trap 'echo "--- rdtarget, rdinit said:"; tail -n 20 "$VM_OUT/rdtarget.txt"; tail -n 40 "$VM_OUT/rdinit.txt"; dmesg | tail -30' EXIT
serve() { # [SIZE]: rdtarget on /run/disk.img, made if there is a SIZE
	[ -z "${1:-}" ] || truncate -s "$1" /run/disk.img
	"$rdtarget" serve --listen 127.0.0.1:4420 --nqn $nqn --allow-any-host /run/disk.img >>"$VM_OUT/rdtarget.txt" 2>&1 & server=$!
	wait_for 30 sh -c "ss -tln | grep -q 127.0.0.1:4420"
}
attach() { # OPTION...: $client, $DEV
	"$rdinit" attach 127.0.0.1:4420 --nqn $nqn "$@" >"$VM_OUT/ready.txt" 2>>"$VM_OUT/rdinit.txt" & client=$!
	wait_for 60 grep -q '^rdinit: attached' "$VM_OUT/ready.txt"
	DEV=$(sed -n 's/^rdinit: attached .*: //p' "$VM_OUT/ready.txt")
	[ -b "$DEV" ] || die "no device in: $(cat "$VM_OUT/ready.txt")"
}
detach() { # by request; the kernel says that it is unbound
	"$rdinit" detach "$DEV" >/dev/null
	wait $client
	[ ! -e /sys/block/${DEV#/dev/}/pid ] || die "$DEV is still bound"
}
nbd_clean() {
	local stuck
	stuck=$(ps axo stat=,pid=,comm= | grep '^D' | grep -v kworker || true)
	[ -z "$stuck" ] || die "in uninterruptible sleep: $stuck"
	kernel_clean
}
