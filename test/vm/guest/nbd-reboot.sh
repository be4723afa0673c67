#!/bin/bash
# Process 1 (VM_INIT=1) of a machine that reboots while /dev/nbd0 is attached and a file system on it is written to:
#   systemd  the units of docs/operating.md, then systemctl reboot
#   busybox  an init that knows nothing of rdinit and gives everybody one second between SIGTERM and SIGKILL
#   sysrq    SIGTERM and SIGKILL to all, sync, remount, reboot, by the keys of the kernel
# rdtarget runs in this machine too, so that it goes down as well. The disk is $VM_OUT/disk.img; the caller looks
# what is in it and how long the end took: $VM_OUT/going is written when it begins, with the last
# number that was on stable storage then.
# Arguments: the rdtarget and the rdinit program; systemd, busybox or sysrq.
. "$VM_REPO/test/vm/lib.sh"
rdtarget=$1 rdinit=$2 kind=$3
port=/dev/console
nqn=nqn.2026-11.io.rdblk:vm img=$VM_OUT/disk.img
truncate -s 64m "$img"
mkfs.ext4 -q -F "$img"
[ $kind = systemd ] || modprobe nbd
mkdir -p /mnt/data
cat >/run/load.sh <<END
#!/bin/bash
# Numbers, each on stable storage before it counts.
for ((i = 1; ; i++)); do
	echo \$i >>/mnt/data/log && sync /mnt/data/log && echo \$i >>/run/acked || exit 1
	head -c 300000 /dev/urandom >/mnt/data/more.\$((i % 8)) # dirty, and not synced
done
END
cat >/run/going.sh <<END
#!/bin/bash
# Load for a while, then the word.
echo "== \$(cut -d' ' -f1 /proc/uptime) attached and mounted" >$port
for _ in {1..600}; do [ "\$(tail -n 1 /run/acked)" -gt 5 ] && break; sleep 0.2; done
grep ' /mnt/data ' /proc/mounts >$port
tail -n 1 /run/acked >"$VM_OUT/going.new"; sync -f "$VM_OUT"; mv "$VM_OUT/going.new" "$VM_OUT/going"
echo "== \$(cut -d' ' -f1 /proc/uptime) going down at \$(tail -n 1 /run/acked)" >$port
echo 0 >/run/vm/ctl/rc
END
echo 0 >/run/acked
chmod +x /run/load.sh /run/going.sh
serve=("$rdtarget" serve --nqn $nqn "$img") attach=("$rdinit" attach 127.0.0.1 --device /dev/nbd0)
case $kind in
systemd)
	u=/etc/systemd/system
	# Not needed, slow in emulation, or (tmpfiles) not to be let loose on the shares.
	for s in systemd-{tmpfiles-setup,tmpfiles-setup-dev,timesyncd,journald,journal-flush,udev-trigger,modules-load,binfmt,random-seed,sysusers,pstore,update-utmp}.service \
		systemd-{hwdb-update,journal-catalog-update,machine-id-commit,remount-fs,firstboot}.service systemd-journald{,-dev-log,-audit}.socket networking.service \
		kmod-static-nodes.service {console,keyboard}-setup.service dev-{hugepages,mqueue}.mount sys-kernel-{debug,tracing,config}.mount \
		sys-fs-fuse-connections.mount systemd-ask-password-{console,wall}.path swap.target cryptsetup.target; do ln -sf /dev/null $u/$s; done
	# The units and the line in fstab are those of configs/ and docs/operating.md.
	mkdir -p /etc/rdblk
	echo "namespaces: [$img]" >/etc/rdblk/rdtarget.yaml
	printf 'address: 127.0.0.1\nnqn: %s\ndevice: /dev/nbd0\n' $nqn >/etc/rdblk/disk1.yaml
	echo "nqn: $nqn" >>/etc/rdblk/rdtarget.yaml
	sed "s,/usr/local/bin/rdtarget,$rdtarget," "$VM_REPO/configs/rdtarget.service" >$u/rdtarget.service
	sed "s,/usr/local/bin/rdinit,$rdinit," "$VM_REPO/configs/rdinit@.service" >$u/rdinit@.service
	mkdir -p $u/{rdtarget,rdinit@disk1}.service.d
	printf '[Service]\nStandardError=append:%s\n' "$VM_OUT/rdinit.txt" | tee $u/rdinit@disk1.service.d/log.conf >$u/rdtarget.service.d/log.conf
	# On a machine of its own the target does not go down first.
	printf '[Unit]\nAfter=rdtarget.service\n' >$u/rdinit@disk1.service.d/order.conf
	echo "/dev/nbd0 /mnt/data ext4 _netdev,x-systemd.requires=rdinit@disk1.service 0 0" >/etc/fstab
	cat >$u/load.service <<END
[Unit]
RequiresMountsFor=/mnt/data
[Service]
ExecStart=/run/load.sh
END
	cat >$u/going.service <<END
[Unit]
After=load.service
[Service]
Type=oneshot
ExecStart=/run/going.sh
ExecStart=systemctl reboot
END
	cat >$u/rdblk.target <<END
[Unit]
Requires=rdtarget.service rdinit@disk1.service remote-fs.target load.service going.service
END
	mkdir -p /run/systemd
	exec /lib/systemd/systemd --unit=rdblk.target --log-target=kmsg --show-status=false </dev/null >/dev/console 2>&1
	;;
busybox | sysrq)
	"${serve[@]}" >/run/serving 2>"$VM_OUT/rdtarget.txt" &
	wait_for 60 has_line /run/serving 'rdtarget: serving'
	"${attach[@]}" >/run/ready 2>"$VM_OUT/rdinit.txt" &
	wait_for 60 has_line /run/ready 'rdinit: attached'
	mount /dev/nbd0 /mnt/data
	;;
esac
case $kind in
busybox)
	cat >/etc/inittab <<END
::once:/run/load.sh
::once:/bin/bash -c '/run/going.sh; exec /bin/busybox reboot'
END
	exec /bin/busybox init </dev/null >/dev/console 2>&1
	;;
sysrq)
	/run/load.sh &
	/run/going.sh
	for key in e i s u; do echo $key >/proc/sysrq-trigger; sleep 2; done # not to process 1
	echo b >/proc/sysrq-trigger
	;;
esac
