#!/bin/bash
# The tests of rdma/verbs on real verbs devices of this machine: soft-RoCE and soft-iWARP.
# Arguments: the test binary; rxe, siw, or both at the same time; options for the binary.
. "$VM_REPO/test/vm/lib.sh"
bin=$1 kind=$2
shift 2
case $kind in
rxe) rxe_up; export RDBLK_VERBS_ADDR=$RXE ;;
siw) siw_up; export RDBLK_VERBS_ADDR=$SIW ;;
both) rxe_up; siw_up; export RDBLK_VERBS_ADDR=$RXE RDBLK_VERBS_ADDR2=$SIW ;;
*) die "no such device: $kind" ;;
esac
cd "$VM_REPO/rdma/verbs"
ulimit -l unlimited # siw counts locked memory for root too
rc=0
"$bin" -test.v "$@" || rc=$?
[ $rc = 0 ] || dmesg | tail -n 40
kernel_clean
exit $rc
