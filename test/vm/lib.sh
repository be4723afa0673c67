# Functions for scripts that run inside the virtual machine of ./run.
#
#   . "$VM_REPO/test/vm/lib.sh"
#
# A script that sources this stops at the first failing command and says which it was. Functions
# that make something (a device, a subsystem) print nothing and set the variable that is named in
# their comment. Everything vanishes with the machine, so nothing need be taken down, but what a
# test asserts about taking down.
# shellcheck shell=bash disable=SC2034

[ -e /run/vm/ctl ] && [ -n "${VM_OUT:-}" ] || { echo "this runs inside the machine of test/vm/run only" >&2; exit 2; }
set -Eeuo pipefail
trap 'echo "failed: ${BASH_SOURCE[0]##*/}:$LINENO: $BASH_COMMAND (status $?)" >&2' ERR
NVMET=/sys/kernel/config/nvmet

note() { echo "== $(cut -d' ' -f1 /proc/uptime) $*"; }
die() { echo "FAIL: $*" >&2; exit 1; }
# long: whether the long form is asked for (RDBLK_VM_LONG=1): rounds, sizes and cases beyond what shows the claim.
long() { [ "${VM_LONG:-}" = 1 ]; }

# wait_for SECS COMMAND...: until COMMAND succeeds. To start a program costs a tenth of a second in emulation, so that
# one that looks ten times a second takes a processor: it waits by a read from a pipe that nobody writes to, and
# what is waited for is best a builtin or a function, as those below.
exec {NEVER}<> <(:)
wait_for() {
	local end=$((SECONDS + $1)) what="${*:2}"
	shift
	until "$@" >/dev/null 2>&1; do
		[ $SECONDS -lt "$end" ] || die "waited in vain for: $what"
		read -rt 0.1 -u "$NEVER" || :
	done
}

# has_line FILE TEXT: whether a line of FILE begins with TEXT.
has_line() {
	local line
	[ -e "$1" ] || return 1
	while IFS= read -r line; do
		[[ $line != "$2"* ]] || return 0
	done <"$1"
	return 1
}

# listens PORT: whether somebody takes TCP connections there.
listens() {
	local l port
	printf -v port ':%04X 00000000:0000 0A' "$1"
	mapfile -t l </proc/net/tcp
	[[ ${l[*]} == *"$port"* ]]
}
# rdma_listens PORT: and somebody on an RDMA device (rxe has no TCP port to look for).
rdma_listens() { rdma resource show cm_id | has "LISTEN.*:$1"; }

# has [OPTION...] PATTERN: as grep -q behind a pipe, but it reads to the end: what grep leaves unread can end the
# program in front of it (SIGPIPE), and with pipefail that is a failure, or with "!" a success that is none.
has() { grep "$@" >/dev/null; }

# Two machines: a flag one raises and the other waits for; FLAG may carry a line of text.
vm_signal() { echo "${2:-}" >"$VM_SYNC/.$1.$VM_ROLE" && mv "$VM_SYNC/.$1.$VM_ROLE" "$VM_SYNC/$1"; }
vm_wait() { wait_for "${2:-60}" test -e "$VM_SYNC/$1"; cat "$VM_SYNC/$1"; } # FLAG [SECS]

# --- RDMA devices ------------------------------------------------------------------------------

# rxe_on NETDEV: soft-RoCE device rxe0 on it. Not on lo, and not in a network namespace.
rxe_on() {
	modprobe -a crc32_generic rdma_rxe rdma_ucm ib_uverbs
	rdma link add rxe0 type rxe netdev "$1"
	wait_for 60 rdma_active rxe0
}
# rxe_up: rxe0 on a veth pair of its own, address $RXE (10.88.0.1), MTU 4200 (RDMA path MTU 4096).
rxe_up() {
	modprobe veth
	ip link add v0 mtu 4200 type veth peer name v1 mtu 4200
	ip addr add 10.88.0.1/24 dev v0
	ip link set v0 up; ip link set v1 up
	rxe_on v0
	RXE=10.88.0.1
}
# siw_on NETDEV: software iWARP device siw0 on it.
siw_on() {
	modprobe -a siw rdma_ucm ib_uverbs
	rdma link add siw0 type siw netdev "$1"
	wait_for 60 rdma_active siw0
}
# siw_up: siw0 on a dummy device of its own, address $SIW (10.77.0.1). Both ends in this machine:
# the TCP packets cross lo, so capture there, and set the segment size with "ip link set lo mtu 1500".
siw_up() {
	modprobe dummy
	ip link add d0 type dummy
	ip addr add 10.77.0.1/24 dev d0
	ip link set d0 up
	siw_on d0
	SIW=10.77.0.1
}
# rdma link add answers before the port is up; a listener made in that moment gets no device.
rdma_active() { rdma link show "$1/1" | has 'state ACTIVE'; }

# --- Storage -----------------------------------------------------------------------------------

# null_up NAME MB [BLOCKSIZE [KEY VALUE]...]: /dev/NAME, a RAM disk (null_blk, memory backed), into $BLK.
null_up() {
	local d=/sys/kernel/config/nullb/$1 mb=$2 bs=${3:-512} k
	modprobe null_blk nr_devices=0
	mkdir "$d"
	echo "$mb" >"$d/size"; echo "$bs" >"$d/blocksize"; echo 1 >"$d/memory_backed"; echo 0 >"$d/irqmode"
	shift; shift; [ $# -eq 0 ] || shift
	while [ $# -gt 1 ]; do k=$1; echo "$2" >"$d/$k"; shift 2; done
	echo 1 >"$d/power"
	BLK=/dev/$(basename "$d")
	wait_for 60 test -b "$BLK"
}

# --- Kernel target -----------------------------------------------------------------------------

# nvmet_subsys NQN: open to any host.
nvmet_subsys() {
	modprobe -a nvmet nvmet-rdma
	mkdir "$NVMET/subsystems/$1"
	echo 1 >"$NVMET/subsystems/$1/attr_allow_any_host"
}
# nvmet_ns NQN NSID PATH: a block device or a file as namespace.
nvmet_ns() {
	local d=$NVMET/subsystems/$1/namespaces/$2
	mkdir "$d"
	printf %s "$3" >"$d/device_path"
	echo 1 >"$d/enable"
}
# nvmet_port ID ADDR [PORT [NQN...]]: an RDMA port with these subsystems on it.
nvmet_port() {
	local d=$NVMET/ports/$1 n
	mkdir "$d"
	echo "$2" >"$d/addr_traddr"; echo rdma >"$d/addr_trtype"; echo "${3:-4420}" >"$d/addr_trsvcid"; echo ipv4 >"$d/addr_adrfam"
	for n in "${@:4}"; do ln -s "$NVMET/subsystems/$n" "$d/subsystems/"; done
}
nvmet_unlink() { rm "$NVMET/ports/$1/subsystems/$2"; } # ID NQN

# --- Kernel host -------------------------------------------------------------------------------

nvme_ctrl() { # NQN: the name of a controller connected to it (nvme0)
	local c
	for c in /sys/class/nvme/nvme*; do
		if [ "$(cat "$c/subsysnqn" 2>/dev/null)" = "$1" ]; then echo "${c##*/}"; return 0; fi
	done
	return 1
}
nvme_blk() { # NQN: the block device of its first namespace, once it is there
	local c s b
	c=$(nvme_ctrl "$1") || return 1
	for s in /sys/class/nvme-subsystem/*; do
		[ -e "$s/$c" ] || continue
		for b in "$s"/nvme*n*; do
			if [ -b "/dev/${b##*/}" ]; then echo "/dev/${b##*/}"; return 0; fi
		done
	done
	return 1
}
# nvme_discover ADDR [PORT]: the discovery log page, as nvme-cli prints it.
nvme_discover() {
	modprobe nvme-rdma
	timeout 60 nvme discover -t rdma -a "$1" -s "${2:-4420}"
}
# nvme_connect ADDR NQN [OPTION...]: by RDMA, port 4420 unless -s is given; block device into $NVME, controller into $CTRL.
nvme_connect() {
	local addr=$1 nqn=$2 port=(-s 4420)
	shift 2
	modprobe nvme-rdma
	case " $* " in *' -s '*) port=() ;; esac
	timeout 60 nvme connect -t rdma -a "$addr" -n "$nqn" "${port[@]}" "$@"
	wait_for 60 nvme_blk "$nqn"
	NVME=$(nvme_blk "$nqn") CTRL=$(nvme_ctrl "$nqn")
}
nvme_disconnect() { timeout 60 nvme disconnect -n "$1"; ! nvme_ctrl "$1" || die "$1 is still connected"; }

# --- Work and verdicts -------------------------------------------------------------------------

# fio_verify FILE|'' [KEY=VALUE...]: random writes with checksums, read back and checked. The defaults
# fit a device of 128 MiB and emulation: 64 MiB, 4k-128k mixed, depth 16.
fio_verify() {
	local f=$1 a=() out=$VM_OUT/fio$VM_SUFFIX.$BASHPID.txt # several may run at a time
	shift
	[ $# -eq 0 ] || a=("${@/#/--}")
	timeout 280 fio --name=verify ${f:+--filename="$f"} --rw=randwrite --bsrange=4k-128k --size=64m --iodepth=16 --ioengine=libaio --direct=1 \
		--verify=crc32c --verify_fatal=1 --verify_dump=0 --verify_state_save=0 --randrepeat=0 --group_reporting --output="$out" \
		--output-format=normal ${a[@]+"${a[@]}"} || { cat "$out" >&2; die "fio verify on $f"; }
	grep -q 'err= 0' "$out" || { cat "$out" >&2; die "fio verify on $f"; }
}
# fio_until FLAG FILE|'' [KEY=VALUE...]: fio_verify again and again, the last time when the file FLAG exists:
# a load that lasts as long as what is done to it, on slow machines and on fast ones.
fio_until() {
	local flag=$1 over=
	shift
	until [ -n "$over" ]; do
		[ ! -e "$flag" ] || over=1
		fio_verify "$@"
	done
}
# make_tree DIR [MB]: files of several sizes, links and an empty file, of random bytes.
make_tree() {
	mkdir -p "$1"/{small,large}
	head -c $((${2:-8} << 19)) /dev/urandom | split -b 3333 -a 5 - "$1/small/"
	head -c $((${2:-8} << 19)) /dev/urandom | split -b 1500k -a 5 - "$1/large/"
	: >"$1/empty"
	ln "$1/large/aaaaa" "$1/hardlink"
	ln -s large/aaaab "$1/symlink"
}
# fs_check DEV [ext4|xfs [TREE]]: file system on DEV, TREE copied in, unmounted, checked, mounted again, compared.
fs_check() {
	local dev=$1 fs=${2:-ext4} tree=${3:-/run/tree} m=/mnt/fs_check
	[ -e "$tree" ] || make_tree "$tree"
	mkdir -p $m
	case $fs in
	ext4) mkfs.ext4 -q -F "$dev" ;;
	xfs) modprobe xfs; mkfs.xfs -q -f "$dev" ;;
	esac
	mount -t "$fs" "$dev" $m
	cp -a "$tree" $m/tree
	umount $m
	case $fs in
	ext4) e2fsck -fn "$dev" >"$VM_OUT/fsck.txt" 2>&1 || { cat "$VM_OUT/fsck.txt" >&2; die "$dev is not clean"; } ;;
	xfs) xfs_repair -n "$dev" >"$VM_OUT/fsck.txt" 2>&1 || { cat "$VM_OUT/fsck.txt" >&2; die "$dev is not clean"; } ;;
	esac
	echo 3 >/proc/sys/vm/drop_caches
	mount -t "$fs" -o ro "$dev" $m
	diff -r --no-dereference "$tree" $m/tree || die "the tree read back differs"
	umount $m
}
# kernel_clean [PATTERN]: the guest's kernel has met nothing that it calls a bug, but the lines that a test expects.
kernel_clean() {
	if dmesg | grep -vE "${1:-^$}" | grep -E 'BUG:|Oops|WARNING:|Call Trace|blocked for more than|I/O error|invalid socket' >"$VM_OUT/bad.txt"; then
		cat "$VM_OUT/bad.txt" >&2
		die "the kernel complained"
	fi
}
# capture_start NETDEV FILE FILTER   capture_stop (of lo): when a mark has come out of the ring, what was in front of it has.
capture_has() { echo "$1" >/dev/udp/127.0.0.1/9; grep -q "$1" "$CAPTURED"; } # to the discard port; a full ring drops some
capture_start() {
	tcpdump -Z root -i "$1" -s 0 -B 65536 -U -w "$2" "${@:3}" or udp port 9 2>"$VM_OUT/tcpdump.txt" &
	CAPTURE=$! CAPTURED=$2
	wait_for 60 grep -q 'listening on' "$VM_OUT/tcpdump.txt"
}
capture_stop() {
	local mark=captured.$BASHPID.$RANDOM
	wait_for 60 capture_has $mark
	kill -INT "$CAPTURE"
	wait "$CAPTURE" || true
	if ! grep -q '^0 packets dropped by kernel' "$VM_OUT/tcpdump.txt"; then note "the capture lost packets"; fi
}
