# Functions for the scripts that put the kernel's nvme-rdma host on rdtarget.
# shellcheck shell=bash disable=SC2034
. "$VM_REPO/test/vm/lib.sh"
nqn=nqn.2026-11.io.rdblk:vm
HTTP=127.0.0.1:9421
# The host that nvme-cli comes as, where it matters.
host=nqn.2014-08.org.nvmexpress:uuid:00112233-4455-6677-8899-aabbccddeeff
id=(--hostnqn $host --hostid 00112233-4455-6677-8899-aabbccddeeff)

# link KIND: the kernel's RDMA device and what rdtarget uses, into $ADDR, $PROVIDER and $NETDEV:
#   soft  the kernel's siw, and rdtarget's software provider
#   siw   the kernel's siw on both sides, rdtarget's by rdma-core
#   rxe   soft-RoCE on both sides, rdtarget's by rdma-core
link() {
	case $1 in
	soft) siw_up; ADDR=$SIW PROVIDER=iwarp NETDEV=d0 ;;
	siw) siw_up; ADDR=$SIW PROVIDER=verbs NETDEV=d0 ;;
	rxe) rxe_up; ADDR=$RXE PROVIDER=verbs NETDEV=v0 ;;
	*) die "no such link: $1" ;;
	esac
	ulimit -l unlimited # siw counts locked memory for root too
	modprobe nvme-rdma
}
# serve OPTION...: rdtarget in the background, into $server.
serve() {
	: >"$VM_OUT/ready.txt"
	"$rdtarget" serve --provider $PROVIDER --listen $ADDR:4420 --nqn $nqn --http $HTTP --pprof "$@" >"$VM_OUT/ready.txt" 2>>"$VM_OUT/rdtarget.txt" &
	server=$!
	local i
	for ((i = 0; i < 600; i++)); do
		grep -q '^rdtarget: serving' "$VM_OUT/ready.txt" && return
		kill -0 $server 2>/dev/null || break
		sleep 0.1
	done
	die "rdtarget does not serve"
}
stop() { kill $server; wait $server || die "rdtarget ended with $?"; }
# on_exit: what a failed script leaves to read.
on_exit() { trap 'r=$?; [ $r = 0 ] || { echo "--- rdtarget said:"; tail -n 40 "$VM_OUT/rdtarget.txt"; echo "--- the kernel said:"; dmesg | tail -n 30; }' EXIT; }

# get PATH: rdtarget's answer, header and all; in emulation curl takes a second to start.
get() {
	local c
	exec {c}<>"/dev/tcp/${HTTP/://}"
	printf 'GET %s HTTP/1.0\r\n\r\n' "$1" >&$c
	cat <&$c
	exec {c}>&-
}
# metric NAME{LABELS}: its value at rdtarget.
metric() { get /metrics | awk -v m="$1" '$1 == m {printf "%d\n", $2; found = 1} END {exit !found}'; }
# objects: what rdtarget holds, one figure a line, to be compared later.
objects() {
	# The request itself has a connection and its goroutines; both samples have them. Executors that a load has made begin
	# wait for the next one: there are up to 32 for each namespace.
	get "/debug/pprof/goroutine?debug=1" >"$VM_OUT/goroutines.txt"
	awk '/^[0-9]+ @/ {n = $1; all += n; cond = 0} /sync.\(\*Cond\).Wait/ {cond = 1} cond && /blockdev.\(\*Executor\).run/ {all -= n; cond = 0}
		END {print "goroutines", all}' "$VM_OUT/goroutines.txt"
	echo "descriptors $(find /proc/$server/fd -mindepth 1 -printf '%l\n' 2>/dev/null | sed 's/[0-9]*//g' | sort | uniq -c | tr -s ' \n' ' ,')"
	get /metrics | grep -E '^rdtarget_(rdma_objects|connections |controllers|worker_queues|worker_buffer_in_use_bytes|connections_pending)'
}
# settled FILE: objects says again what is in FILE.
settled() { objects >"$VM_OUT/objects.txt" && diff "$1" "$VM_OUT/objects.txt" >"$VM_OUT/objects.diff"; }
# rests FILE: what rdtarget holds, into FILE. It is at rest when that stays so: who was there a moment ago takes a moment to
# go, the program that asked for it, too.
rests() { objects >"$1" && sleep 1 && settled "$1"; }
# no_leak FILE: settled within 60 s.
no_leak() {
	local end=$((SECONDS + 60))
	until settled "$1"; do
		[ $SECONDS -lt $end ] || { cat "$VM_OUT/objects.diff" "$VM_OUT/goroutines.txt" >&2; die "rdtarget holds more than before"; }
		sleep 0.2
	done
}
# answers NAME: connects, reads a page 16 times; $inv of the answers close a key as rdtarget counts them. What is on the wire goes to
# $VM_OUT/NAME.pcap, for TestKernelHost, but over rxe, which keeps packets to itself.
answers() {
	[ $NETDEV = v0 ] || capture_start lo "$VM_OUT/$1.pcap" tcp port 4420
	nvme_connect $ADDR $nqn
	local before= now
	until now=$(sent_inv); [ "$now" = "$before" ]; do before=$now; sleep 1; done # the host looks for partitions
	dd if=$NVME of=/dev/null bs=4k count=16 iflag=direct status=none
	inv=$(($(sent_inv) - before))
	[ $NETDEV = v0 ] || capture_stop
}
sent_inv() { get /metrics | awk '/^rdtarget_worker_send_invalidate_total/ {n += $2} END {print n + 0}'; }
# busy [NSID]: the load is at work; rdtarget has written to that namespace (1) 32 more times.
busy() { wait_for 60 written ${1:-1} $(($(writes ${1:-1}) + 32)); }
written() { [ "$(writes $1)" -ge $2 ]; }
writes() { metric "rdtarget_operations_total{nsid=\"$1\",op=\"write\"}"; }
# ask FILE COMMAND...: its output into $VM_OUT/FILE; it must succeed.
ask() {
	local f=$VM_OUT/$1
	shift
	timeout 60 "$@" >"$f" 2>"$f.err" || { local r=$?; cat "$f" "$f.err" >&2; die "$* ended with $r"; }
	[ -s "$f.err" ] || rm -f "$f.err"
}
# refused FILE COMMAND...: output and messages into $VM_OUT/FILE; it must fail by itself.
refused() {
	local f=$VM_OUT/$1 r=0
	shift
	timeout 60 "$@" >"$f" 2>&1 || r=$?
	[ $r != 0 ] || die "went through: $*"
	[ $r != 124 ] || die "had to be ended: $*"
}
# told FROM FILE: what the kernel has said since line FROM of its log.
said() { dmesg | wc -l; }
told() { dmesg | tail -n +$(($1 + 1)) >"$VM_OUT/$2"; }
