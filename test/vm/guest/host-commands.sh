#!/bin/bash
# The kernel's nvme-rdma host and nvme-cli on rdtarget: discovery, connect with every option, every
# command nvme-cli has for what the target supports, refusals. What the tools print is left in $VM_OUT and
# judged by TestKernelHost; nvmet's answers to the same questions lie beside it.
# Arguments: the rdtarget program, the link (see host-lib.sh).
rdtarget=$1
. "$VM_REPO/test/vm/guest/host-lib.sh"
link "$2"
on_exit
truncate -s 128m /run/disk.img
head -c 1048576 /dev/urandom >/run/data
RDTARGET_SERIAL=SERIAL-0123 serve --host $host /run/disk.img
note "rdtarget listens by $PROVIDER"

ask discover.json nvme discover -t rdma -a $ADDR -s 4420 "${id[@]}" -o json
note "discovered"

# Options of connect, as sysfs tells what came of them.
connected() { # NAME OPTION...
	local name=$1
	shift
	nvme_connect $ADDR $nqn "${id[@]}" "$@"
	( cd /sys/class/nvme/$CTRL && for f in address kato queue_count sqsize cntlid hostnqn hostid state transport; do echo "$f=$(cat $f)"; done ) >"$VM_OUT/connect-$name.txt"
	dd if=$NVME of=/dev/null bs=64k count=4 iflag=direct status=none
}
connected plain; nvme_disconnect $nqn
connected some --nr-io-queues=1 --queue-size=16 --keep-alive-tmo=3; nvme_disconnect $nqn
connected all --nr-io-queues=2 --queue-size=64 --keep-alive-tmo=7 --host-traddr=$ADDR
note "connected as $NVME"

c=/dev/$CTRL
questions() { # PREFIX CONTROLLER NAMESPACE
	local p=$1 c=$2 d=$3
	ask $p-id-ctrl.json nvme id-ctrl $c -o json
	ask $p-id-ns.json nvme id-ns $d -n 1 -o json
	ask $p-ns-descs.json nvme ns-descs $c -n 1 -o json
	ask $p-list-ns.txt nvme list-ns $c
	ask $p-smart.json nvme smart-log $c -o json
	ask $p-fw.json nvme fw-log $c -o json
	ask $p-effects.bin nvme get-log $c --log-id=5 --log-len=4096 -b
}
questions ours $c $NVME
ask list.txt nvme list -v
ask error.json nvme error-log $c -e 8 -o json
ask changed.txt nvme changed-ns-list-log $c
for l in 1:512 2:512 3:512 4:4096; do
	ask log-${l%:*}.bin nvme get-log $c --log-id=${l%:*} --log-len=${l#*:} -b
done
refused log-112.txt nvme get-log $c --log-id=0x70 --log-len=1024 -b
for f in 1 2 4 5 6 7 0xb 0xf; do
	ask feature-$((f)).txt nvme get-feature $c -f $f -H
done
ask feature-129.bin nvme get-feature $c -f 0x81 --cdw11=1 -l 16 -b
refused feature-3.txt nvme get-feature $c -f 3
note "asked"

# Commands with an effect, and the effect in the file behind.
counts() { get /metrics | sed -n 's/^rdtarget_operations_total{nsid="1",op="\([a-z_]*\)"}/\1/p'; }
counts >"$VM_OUT/ops-before.txt"
dd if=/run/data of=$NVME bs=1M count=1 oflag=direct status=none
cmp -n 1048576 /run/data /run/disk.img
ask flush.txt nvme flush $NVME -n 1
dd if=/run/data bs=4096 count=1 status=none | nvme compare $NVME -s 0 -c 7 -z 4096 >"$VM_OUT/compare.txt" 2>&1 || die "compare of equal blocks: $(cat "$VM_OUT/compare.txt")"
head -c 4096 /run/data | tr '\000-\377' '\001-\377\000' >/run/other
refused compare-other.txt nvme compare $NVME -s 0 -c 7 -z 4096 -d /run/other
ask write-zeroes.txt nvme write-zeroes $NVME -s 8 -c 7
cmp -n 4096 -i 4096:0 /run/disk.img /dev/zero
cmp -n 4096 /run/data /run/disk.img
cmp -n 4096 -i 8192 /run/data /run/disk.img
blocks=$(stat -c %b /run/disk.img)
ask dsm.txt nvme dsm $NVME -n 1 -d -s 1024 -b 512
[ "$(stat -c %b /run/disk.img)" -le $((blocks - 512)) ] || die "the deallocated blocks are still there: $blocks, $(stat -c %b /run/disk.img)"
cmp -n 262144 -i 524288:0 /run/disk.img /dev/zero
ask verify.txt nvme verify $NVME -n 1 -s 0 -c 7
refused beyond.txt nvme read $NVME -s 262144 -c 0 -z 512
counts >"$VM_OUT/ops-after.txt"
ask error-after.json nvme error-log $c -e 4 -o json
note "commands done"

old=$(cat /sys/class/nvme/$CTRL/cntlid)
ask reset.txt nvme reset $c
wait_for 60 grep -q live /sys/class/nvme/$CTRL/state
[ "$(cat /sys/class/nvme/$CTRL/cntlid)" != "$old" ] || die "the same controller after a reset"
cmp -n 4096 /run/data $NVME
nvme_disconnect $nqn
note "reset and disconnected"

# Refusals: the host's message names the cause, and it is over.
from=$(said)
refused wrong-nqn.txt nvme connect -t rdma -a $ADDR -s 4420 -n nqn.2026-11.io.rdblk:other "${id[@]}"
told $from wrong-nqn.dmesg
from=$(said)
refused wrong-host.txt nvme connect -t rdma -a $ADDR -s 4420 -n $nqn --hostnqn nqn.2026-11.io.rdblk:stranger --hostid 00112233-4455-6677-8899-000000000000
told $from wrong-host.dmesg
from=$(said)
refused no-listener.txt nvme connect -t rdma -a $ADDR -s 4477 -n $nqn "${id[@]}"
told $from no-listener.dmesg
[ -z "$(ls /sys/class/nvme)" ] || die "a controller is left: $(ls /sys/class/nvme)"
ask discover-stranger.json nvme discover -t rdma -a $ADDR -s 4420 --hostnqn nqn.2026-11.io.rdblk:stranger --hostid 00112233-4455-6677-8899-000000000000 -o json
note "refusals seen"
stop
grep connect.refused "$VM_OUT/rdtarget.txt" >"$VM_OUT/refused.txt"
kernel_clean

# nvmet on the same RDMA device, with a disk of the same size, asked the same.
null_up nb0 128 512 discard 1
k=nqn.2026-11.io.rdblk:nvmet
nvmet_subsys $k
echo SERIAL-0123 >$NVMET/subsystems/$k/attr_serial
nvmet_ns $k 1 $BLK
nvmet_port 1 $ADDR 4420 $k
nvme_connect $ADDR $k "${id[@]}"
questions nvmet /dev/$CTRL $NVME
ask nvmet-discover.json nvme discover -t rdma -a $ADDR -s 4420 "${id[@]}" -o json
nvme_disconnect $k
note done
