#!/bin/bash
# Several scripts in one machine, one after the other. Each has a results directory of its own, $VM_OUT/NAME, with output.txt,
# dmesg.txt and, when it has ended, its status and how long it took in a file of that name. What a script has left (devices,
# what nvmet was told, files) is taken down before the next; one that has failed may leave what cannot be, and the others fail.
# Arguments: NAME SCRIPT ARGUMENT... [-- NAME SCRIPT ARGUMENT...]...; SCRIPT is one of this directory.
. "$VM_REPO/test/vm/lib.sh"

takedown() {
	local d n
	shopt -s nullglob
	for d in "$NVMET"/ports/*/subsystems/*; do rm "$d"; done
	for d in "$NVMET"/subsystems/*/namespaces/*; do echo 0 >"$d/enable"; rmdir "$d"; done
	for d in "$NVMET"/ports/* "$NVMET"/subsystems/*; do rmdir "$d"; done
	for d in /sys/class/infiniband/*; do rdma link delete "${d##*/}"; done
	for n in $(ip netns list | cut -d' ' -f1); do ip netns delete "$n"; done
	for n in d0 v0; do [ ! -e /sys/class/net/$n ] || ip link delete $n; done
	for d in /sys/kernel/config/nullb/*/; do echo 0 >"$d/power"; rmdir "$d"; done
	[ ! -e /sys/kernel/tracing/events/enable ] || { echo 0 >/sys/kernel/tracing/events/enable; echo >/sys/kernel/tracing/trace; }
	rm -rf /run/{*.img,*.sock,*.yaml,tree,data,enough,rdblk}
	shopt -u nullglob
	dmesg -C
}

# end_session PID: what the script with that session of its own has left in the background ends.
end_session() {
	local stat rest
	for stat in /proc/[0-9]*/stat; do
		{ read -r rest <"$stat"; } 2>/dev/null || continue # it has ended meanwhile
		rest=(${rest##*) }) # state, parent, group, session
		[ "${rest[3]}" != $1 ] || kill -KILL "${stat//[!0-9]/}" 2>/dev/null || true
	done
}

out=$VM_OUT failed=0
while [ $# -gt 0 ]; do
	name=$1 script=$2 args=() rc=0 start=$SECONDS
	shift 2
	while [ $# -gt 0 ]; do
		case $1 in --) shift; break ;; esac
		args+=("$1")
		shift
	done
	mkdir "$out/$name"
	note "$name:"
	VM_OUT=$out/$name setsid bash "$VM_REPO/test/vm/guest/$script" "${args[@]}" >"$out/$name/output.txt" 2>&1 & pid=$!
	wait $pid || rc=$?
	end_session $pid
	dmesg >"$out/$name/dmesg.txt"
	echo "$rc $((SECONDS - start))" >"$out/$name/status"
	[ $rc = 0 ] || { failed=$rc; timeout 60 nvme disconnect-all || true; }
	[ $# = 0 ] || takedown
done
exit $failed
