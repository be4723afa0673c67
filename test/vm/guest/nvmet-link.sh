#!/bin/bash
# rdinit's link to the kernel's nvmet-rdma goes down and comes back under load: for so short that TCP bridges it,
# and for longer than keep_alive. nvmet is on siw on one end of a veth pair; rdinit, on the software provider, in a
# network namespace on the other.
# Arguments: the rdinit program.
. "$VM_REPO/test/vm/lib.sh"
. "$VM_REPO/test/vm/guest/nvmet-lib.sh"
modprobe veth
ip netns add host
ip link add v0 type veth peer name v1 netns host
ip addr add 10.88.0.1/24 dev v0; ip link set v0 up
ip -n host addr add 10.88.0.2/24 dev v1; ip -n host link set v1 up
siw_on v0
ADDR=10.88.0.1
export RDINIT_PROVIDER=iwarp
printf '#!/bin/sh\nexec ip netns exec host %s "$@"\n' "$rdinit" >/run/rdinit-host
chmod +x /run/rdinit-host
rdinit=/run/rdinit-host
null_up nb0 128
nvmet_subsys $nqn
nvmet_ns $nqn 1 $BLK
nvmet_port 1 $ADDR 4420 $nqn
attach --nqn $nqn --socket $sock
fio_until /run/enough '' ioengine=nbd "uri=$nbd_uri" direct=0 size=2m rate=,1m bsrange=4k-32k & load=$!
for down in 1 12; do
	busy $BLK
	kill -0 $load
	ip -n host link set v1 down
	sleep $down
	[ $down -lt 10 ] || holds '.state == "reconnecting" and .last_error != null'
	ip -n host link set v1 up
	wait_for 60 holds '.state == "live"'
	note "down for $down s: $(state '"\(.reconnects) reconnects, \(.failed_attempts) attempts failed"')"
done
touch /run/enough; wait $load
holds '.errors == 0 and .reconnects >= 1 and .failed_attempts <= 20'
detach $sock
kernel_clean
trap - EXIT
note "verify clean"
