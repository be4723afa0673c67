#!/bin/bash
# The tests of rdma/verbs on real verbs devices of this machine: soft-RoCE or soft-iWARP, and those that take two
# devices on both.
# Arguments: the test binary; rxe or siw; options for the binary.
. "$VM_REPO/test/vm/lib.sh"
bin=$1 kind=$2
shift 2
"${kind}_up"
case $kind in
rxe) export RDBLK_VERBS_ADDR=$RXE ;;
siw) export RDBLK_VERBS_ADDR=$SIW ;;
esac
cd "$VM_REPO/rdma/verbs"
ulimit -l unlimited # siw counts locked memory for root too
rc=0
"$bin" -test.v "$@" || rc=$?
if [ $rc = 0 ] && [ $kind = siw ]; then
	rxe_up
	RDBLK_VERBS_ADDR2=$RXE "$bin" -test.v -test.run '^TestDeviceByAddress$' "$@" | tee "$VM_OUT/both.txt" || rc=$?
	grep -q -e '--- PASS: TestDeviceByAddress' "$VM_OUT/both.txt" || rc=1
fi
[ $rc = 0 ] || dmesg | tail -n 40
kernel_clean
exit $rc
