#!/bin/bash
# Our rping against rdma-core's, as client and as server. On the software provider with siw on the other side:
# sizes around segment boundaries, CRC asked for by either side, small MTU, peer-to-peer set-up, large FPDUs. Then
# on devices at both ends, siw and rxe.
# Arguments: our rping program.
. "$VM_REPO/test/vm/lib.sh"
ours=$1
siw_up
P=/sys/module/siw/parameters
[ -z "${CAPTURE_TO:-}" ] || capture_start lo "$VM_OUT/$CAPTURE_TO" tcp portrange 7000-7400
port=7000 bad=0 provider=iwarp addr=$SIW
report() { # NAME STATUS FILE...
	if [ "$2" = 0 ]; then note "ok: $1"; else note "FAILED ($2): $1"; tail -n 3 "${@:3}"; bad=$((bad + 1)); fi
}
up() {
	case $addr in
	"$SIW") wait_for 60 listens $port ;;
	*) wait_for 60 rdma_listens $port ;;
	esac
}
both() { # NAME SIZE [OPTION of ours]
	local rc server
	port=$((port + 1))
	timeout 60 rping -s -a $addr -p $port -C 10 -S "$2" >"$VM_OUT/s.txt" 2>&1 & server=$!
	up
	rc=0
	timeout 60 "$ours" -c -provider $provider -a $addr -p $port -C 10 -S "$2" "${@:3}" >"$VM_OUT/c.txt" 2>&1 || rc=$?
	wait $server || rc="$rc, server $?"
	report "$1, $2 bytes ($provider), ours connects" "$rc" "$VM_OUT/s.txt" "$VM_OUT/c.txt"
	port=$((port + 1))
	timeout 60 "$ours" -s -provider $provider -a $addr -p $port -C 10 "${@:3}" >"$VM_OUT/s.txt" 2>&1 & server=$!
	up
	rc=0
	timeout 60 rping -c -a $addr -p $port -C 10 -S "$2" -V >"$VM_OUT/c.txt" 2>&1 || rc=$?
	wait $server || rc="$rc, server $?"
	report "$1, $2 bytes ($provider), theirs connects" "$rc" "$VM_OUT/s.txt" "$VM_OUT/c.txt"
}
more() { ! long || both "$@"; } # beyond the suite
for size in 64 4096 32768; do more plain $size; done
for size in 1023 65535; do both plain $size; done
more "CRC by ours" 65535 -crc
echo 1 >$P/mpa_crc_required; both "CRC by siw" 4097; more "CRC by both" 65535 -crc; echo 0 >$P/mpa_crc_required
echo 1 >$P/peer_to_peer; both "peer to peer" 4096; echo 0 >$P/peer_to_peer
ip link set lo mtu 1500
more "MTU 1500" 65535
both "MTU 1500, CRC" 65535 -crc
echo 1 >$P/try_gso; more "MTU 1500, large FPDUs" 65535; echo 0 >$P/try_gso
[ -z "${CAPTURE_TO:-}" ] || capture_stop
provider=verbs
for size in 64 1023; do more "siw, devices" $size; done
both "siw, devices" 65535
rdma link delete siw0
rxe_up
addr=$RXE
for size in 64 1023; do more "rxe, devices" $size; done
both "rxe, devices" 65535
provider=auto
more "rxe, the device that has the address" 4096
kernel_clean
[ $bad = 0 ] || die "$bad cases"
note done
