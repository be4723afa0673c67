# What the scripts for rdinit on the kernel's nvmet-rdma share; sourced after lib.sh. $1 is the rdinit
# program, $FABRIC what is between them:
#   iwarp   rdinit's software NIC, siw under nvmet      siw   siw under both, rdinit by rdma-core
#   rxe     rxe under both, rdinit by rdma-core
# shellcheck shell=bash disable=SC2034
rdinit=$1 FABRIC=${FABRIC:-iwarp}
nqn=nqn.2026-11.io.rdblk:vm sock=/run/rdblk.sock SAID=$VM_OUT/rdinit.txt
: >"$SAID"
export RDINIT_LOG_FORMAT=text
trap 'echo "--- rdinit said:"; tail -n 60 "$SAID"; dmesg | tail -30' EXIT
# fabric_up: the devices, address $ADDR, and which provider rdinit is to use.
fabric_up() {
	case $FABRIC in
	iwarp) siw_up; ADDR=$SIW RDINIT_PROVIDER=iwarp ;;
	siw) siw_up; ADDR=$SIW RDINIT_PROVIDER=verbs ;;
	rxe) rxe_up; ADDR=$RXE RDINIT_PROVIDER=verbs ;;
	*) die "FABRIC=$FABRIC" ;;
	esac
	export RDINIT_PROVIDER
}
# attach OPTION...: $nqn at $ADDR:4420 unless -p PORT comes first; process $client, and $DEV with --device.
# Its one line is in $VM_OUT/ready.txt.
attach() {
	local port=4420
	if [ "${1:-}" = -p ]; then port=$2; shift 2; fi
	: >"$VM_OUT/ready.txt"
	"$rdinit" attach "$ADDR:$port" --queues 2 "$@" >"$VM_OUT/ready.txt" 2>>"$SAID" & client=$!
	wait_for 60 attached
	DEV=$(sed -n 's/^rdinit: attached .*: //p' "$VM_OUT/ready.txt")
	[ -n "$DEV" ] || die "attach ended without a word"
}
attached() { grep -q '^rdinit: attached' "$VM_OUT/ready.txt" || ! kill -0 $client; }
# detach WHAT [OPTION]: by request, within the 10 s of detach_timeout and what emulation costs; the process ends well.
detach() {
	local start=$SECONDS
	timeout 30 "$rdinit" detach "$@" >/dev/null
	[ $((SECONDS - start)) -le 12 ] || die "detach took $((SECONDS - start)) s"
	wait $client || die "attach ended with $?"
}
# busy DEV: the load is at work; the block device DEV has 32 more writes behind it.
busy() {
	local s
	read -ra s </sys/block/${1#/dev/}/stat
	wait_for 60 written $1 $((s[4] + 32))
}
written() { local s; read -ra s </sys/block/${1#/dev/}/stat; [ "${s[4]}" -ge $2 ]; }
# traced PATTERN...: each is in what rdinit wrote to $RDINIT_TRACE.
traced() {
	local p
	for p in "$@"; do grep -Eq "$p" "$RDINIT_TRACE" || { tail -20 "$RDINIT_TRACE"; die "no line of the trace has: $p"; }; done
}
# state EXPRESSION: jq's, of the first attachment's status: .size
state() { "$rdinit" status -o json | jq -r ".[0] | $1"; }
holds() { [ "$(state "$1")" = true ]; }
# nbd_uri: what fio wants.
nbd_uri="nbd+unix:///?socket=$sock"
fio_nbd() { fio_verify '' ioengine=nbd "uri=$nbd_uri" direct=0 "$@"; }
# nvmet's own word of the commands that come: trace_start; count PATTERN
T=/sys/kernel/tracing
trace_start() {
	mountpoint -q $T || mount -t tracefs tracefs $T
	echo 16384 >$T/buffer_size_kb
	echo 1 >$T/events/nvmet/nvmet_req_init/enable
	echo >$T/trace
}
count() { grep -c "nvmet_req_init:.*$1" $T/trace || true; }
seen() { [ "$(count "$1")" -ge "${2:-1}" ] || { tail -20 $T/trace; die "nvmet saw $(count "$1") of: $1, not ${2:-1}"; }; }
