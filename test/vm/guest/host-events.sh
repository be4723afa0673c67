#!/bin/bash
# What changes at rdtarget while the kernel's host is connected: a file grows, namespaces come and go under
# load, hosts are let in and kept out; a persistent discovery controller is told.
# Arguments: the rdtarget program, the link (see host-lib.sh).
rdtarget=$1
. "$VM_REPO/test/vm/guest/host-lib.sh"
link "$2"
on_exit
other=nqn.2014-08.org.nvmexpress:uuid:00112233-4455-6677-8899-000000000001
otherid=(--hostnqn $other --hostid 00112233-4455-6677-8899-000000000001)
truncate -s 64m /run/a.img
truncate -s 96m /run/b.img
config() { # HOSTS NAMESPACE...
	printf 'hosts: [%s]\nnamespaces:\n' "$1"
	shift
	printf '  - %s\n' "$@"
} >/run/c.yaml
reloads=0
hup() {
	reloads=$((reloads + 1))
	kill -HUP $server
	wait_for 60 sh -c "[ \$(grep -c msg=reloaded '$VM_OUT/rdtarget.txt') -ge $reloads ]"
}
nsdev() { # NSID: the host's block device of it
	local b
	for b in /sys/block/nvme*n*; do
		case ${b##*/} in *c*) continue ;; esac # the path below a multipath device
		[ "$(cat $b/nsid 2>/dev/null)" = "$1" ] && [ -b /dev/${b##*/} ] && { echo /dev/${b##*/}; return 0; }
	done
	return 1
}
udevadm monitor --kernel --property --subsystem-match=nvme >"$VM_OUT/uevents.txt" &
wait_for 60 grep -q KERNEL "$VM_OUT/uevents.txt"
aens() { grep -c "^NVME_AEN=$1" "$VM_OUT/uevents.txt" || true; }

config $host /run/a.img
serve --config /run/c.yaml --trace="$VM_OUT/trace.txt"
ask discover.json nvme discover -t rdma -a $ADDR -s 4420 "${otherid[@]}" --persistent --keep-alive-tmo=20 -o json
disc=$(nvme_ctrl nqn.2014-08.org.nvmexpress.discovery)
[ "$(cat /sys/class/nvme/$disc/kato)" = 20 ] || die "KATO of the discovery controller: $(cat /sys/class/nvme/$disc/kato)"
entries() { nvme get-log /dev/$disc --log-id=0x70 --log-len=16 -b | od -An -tu8 -j8 -N8 | tr -d ' '; }
[ "$(entries)" = 1 ] || die "discovery shows a stranger $(entries) entries"
nvme_connect $ADDR $nqn "${id[@]}" --keep-alive-tmo=20 --reconnect-delay=1 --ctrl-loss-tmo=4
cntlid=$(cat /sys/class/nvme/$CTRL/cntlid)
same() { [ "$(cat /sys/class/nvme/$CTRL/state) $(cat /sys/class/nvme/$CTRL/cntlid)" = "live $cntlid" ] || die "the host had to connect again"; }
note "connected as $NVME by $PROVIDER, $disc for discovery"

truncate -s 80m /run/a.img
hup
wait_for 60 sh -c "[ \$(blockdev --getsize64 $NVME) = $((80 << 20)) ]"
dd if=/dev/urandom of=$NVME bs=1M seek=79 count=1 oflag=direct status=none
same
note "growth seen"

config $host /run/a.img /run/b.img
hup
wait_for 60 nsdev 2
b=$(nsdev 2)
[ "$(blockdev --getsize64 $b)" = $((96 << 20)) ] || die "size of $b"
uuid=$(curl -sf http://$HTTP/status | jq -r '.target.namespaces[] | select(.nsid == 2).uuid')
[ "$(cat /sys/block/${b#/dev/}/uuid)" = "$uuid" ] || die "UUID $(cat /sys/block/${b#/dev/}/uuid), rdtarget says $uuid"
fio_verify $b size=4m
head -c 1048576 /dev/urandom >/run/data
dd if=/run/data of=$b bs=64k seek=512 oflag=direct status=none
same
note "namespace 2 came as $b"

# It goes under load: the load fails, nothing hangs, namespace 1 goes on.
fio --name=load --filename=$b --size=16m --rw=randrw --bs=4k --iodepth=8 --ioengine=libaio --direct=1 --time_based --runtime=280 --output="$VM_OUT/load.txt" 2>&1 &
load=$!
fio_verify $NVME size=8m & quiet=$!
busy 2
config $host /run/a.img
hup
wait_for 60 sh -c "! grep -qx 2 /sys/block/nvme*n*/nsid"
r=0; wait $load || r=$?
[ $r != 0 ] || die "the load did not notice"
wait $quiet
wait_for 60 grep -q 'device closed.*ns=2' "$VM_OUT/rdtarget.txt"
same
note "namespace 2 went under load"

config $host /run/a.img '{path: /run/b.img, nsid: 2}'
hup
wait_for 60 nsdev 2
b=$(nsdev 2)
dd if=$b bs=64k skip=512 count=16 iflag=direct status=none | cmp - /run/data
config $host /run/a.img '{path: /run/b.img, nsid: 2, read_only: true}'
hup
grep -q 'a namespace is not changed while it is served.* ns=2' "$VM_OUT/rdtarget.txt" || die "changed in place"
config $host /run/a.img
hup
wait_for 60 sh -c "! grep -qx 2 /sys/block/nvme*n*/nsid"
wait_for 60 sh -c "[ \$(grep -c 'device closed.*ns=2' '$VM_OUT/rdtarget.txt') = 2 ]"
config $host /run/a.img '{path: /run/b.img, nsid: 2, read_only: true}'
hup
wait_for 60 nsdev 2
b=$(nsdev 2)
[ "$(blockdev --getro $b)" = 1 ] || die "$b can be written"
same
note "namespace 2 came back with its data, and again read-only"

# Discovery: none of this was its business. A host that is let in is told, and so is one that is kept out.
[ "$(aens 0x70f002)" = 0 ] || die "$(aens 0x70f002) discovery events for namespaces"
config $host,$other /run/a.img '{path: /run/b.img, nsid: 2, read_only: true}'
hup
wait_for 60 sh -c "grep -q '^NVME_AEN=0x70f002' '$VM_OUT/uevents.txt'"
[ "$(entries)" = 2 ] || die "discovery shows a host $(entries) entries"
same
config $other /run/a.img '{path: /run/b.img, nsid: 2, read_only: true}'
from=$(said)
hup
# The host is off the list: its association ends, it is refused for good, and it gives up.
wait_for 60 sh -c "! [ -e /sys/class/nvme/$CTRL ]"
told $from denied.dmesg
grep -q "is not allowed, hostnqn: $host" "$VM_OUT/denied.dmesg" || die "the host's message does not name the cause"
grep -q 'connect refused.*host is not on the allow list.*connect invalid host' "$VM_OUT/rdtarget.txt" || die "rdtarget's log does not say it"
grep -Eq 'Completion .*connect invalid host.*do not retry' "$VM_OUT/trace.txt" || die "no Do Not Retry in the trace"
[ "$(aens 0x70f002)" = 1 ] || die "the other host was told of what does not concern it"
config $host /run/a.img
hup
wait_for 60 sh -c "[ \$(grep -c '^NVME_AEN=0x70f002' '$VM_OUT/uevents.txt') = 2 ]"
[ "$(entries)" = 1 ] || die "discovery shows a stranger $(entries) entries"
note "discovery events seen"

# The discovery controller was kept alive all the time.
[ "$(cat /sys/class/nvme/$disc/state)" = live ] || die "the discovery controller is $(cat /sys/class/nvme/$disc/state)"
[ "$(metric rdtarget_keep_alive_timeouts_total)" = 0 ] || die "keep-alive ran out"
[ "$(metric rdtarget_fenced_total)" = 0 ] || die "an association was fenced"
wait_for 60 grep -q 'Keep Alive' "$VM_OUT/trace.txt" # every 10 s
nvme disconnect -d $disc
stop
for want in 'event="namespace attribute changed' 'event="discovery log page change' 'lid="Changed Namespace List"'; do
	grep -q "$want" "$VM_OUT/trace.txt" || { grep -i 'event=' "$VM_OUT/trace.txt" | head -3; grep 'Get Log' "$VM_OUT/trace.txt" | tail -3; die "no $want in the trace"; }
done
note done
