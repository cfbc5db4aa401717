# shellcheck shell=sh
# Run in the guest by its agent: finds its default kernel and loads it, with the command line that it runs with. Arguments: kernel and
# initial RAM disk, empty for the default ones. Says `loaded KERNEL INITRD`; an exit status from 10 on says what is missing.
kernel=$1
initrd=$2
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
[ -d /run/systemd/system ] || exit 10
command -v kexec >/dev/null || exit 11
[ -e /sys/kernel/kexec_loaded ] || exit 12
if [ -z "$kernel" ]; then
	# What the distribution says, its link to the default one, or another build of the one that runs.
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
# By its file where the kernel can (it may insist on signatures then), else as the tool has taken it apart.
kexec -s -l "$kernel" "$@" 2>/dev/null || kexec -c -l "$kernel" "$@" || exit 16
[ "$(cat /sys/kernel/kexec_loaded)" = 1 ] || exit 16
echo "loaded $kernel $initrd"
