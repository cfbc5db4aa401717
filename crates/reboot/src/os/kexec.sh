# shellcheck shell=sh
# Run in the guest by its agent: finds the guest's default kernel and loads it, with the current command line.
# Arguments: kernel and initial RAM disk, empty for the defaults. Prints `loaded KERNEL INITRD`; an exit status from 10
# on states what is missing.
kernel=$1
initrd=$2
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
[ -d /run/systemd/system ] || exit 10
command -v kexec >/dev/null || exit 11
[ -e /sys/kernel/kexec_loaded ] || exit 12
if [ -z "$kernel" ]; then
	# The distribution's default, its link to the default, or another build of the running kernel.
	for kernel in "$(grubby --default-kernel 2>/dev/null)" /boot/vmlinuz /vmlinuz "/boot/vmlinuz-$(uname -r)"; do
		[ ! -f "$kernel" ] || break
	done
fi
[ -f "$kernel" ] || exit 13
kernel=$(readlink -f "$kernel")
if [ -z "$initrd" ]; then
	name=${kernel##*/}
	version=${name#vmlinuz}
	folder=${kernel%/*}
	for initrd in "$folder/initrd.img$version" "$folder/initramfs$version.img" "$folder/initrd$version"; do
		[ ! -f "$initrd" ] || break
	done
	[ -f "$initrd" ] || { echo "$kernel" && exit 14; }
fi
set -- --reuse-cmdline
if [ "$initrd" != none ]; then
	[ -f "$initrd" ] || exit 15
	set -- "$@" "--initrd=$initrd"
fi
# By file descriptor where the kernel supports that (it may then require signatures), else through segments prepared by
# the tool.
kexec -s -l "$kernel" "$@" 2>/dev/null || kexec -c -l "$kernel" "$@" || exit 16
[ "$(cat /sys/kernel/kexec_loaded)" = 1 ] || exit 16
echo "loaded $kernel $initrd"
