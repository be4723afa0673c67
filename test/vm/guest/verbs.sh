#!/bin/bash
# The tests of rdma/verbs on real verbs devices of this machine: soft-RoCE and soft-iWARP.
# Arguments: the test binary, rxe or siw, options for the binary.
. "$VM_REPO/test/vm/lib.sh"
bin=$1 kind=$2
shift 2
case $kind in
rxe) rxe_up; addr=$RXE ;;
siw) siw_up; addr=$SIW ;;
*) die "no such device: $kind" ;;
esac
ulimit -l unlimited # siw counts locked memory for root too
rc=0
RDBLK_VERBS_ADDR=$addr "$bin" -test.v "$@" || rc=$?
dmesg | tail -n 20
exit $rc
