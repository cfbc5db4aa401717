# shellcheck shell=bash
# What the builds of guest and host images share: initrds, and images in the cache. Sourced after scripts/common.sh. The hash of an
# image includes this file.
# shellcheck disable=SC2154  # the build sets kernel_package, kernel_version, kernel_release and hash

# Unpacks the kernel $kernel_package in $kernel_version to $temp/kernel.
kernel_unpack() {
	say "fetching $kernel_package $kernel_version"
	mkdir "$temp/deb"
	(cd "$temp/deb" && apt_download "$kernel_package=$kernel_version")
	dpkg -x "$temp"/deb/*.deb "$temp/kernel"
}

# initrd_root ROOT MODULES_FILE INIT: busybox, the modules and what they depend on, in the order in which they are loaded, INIT as /init.
initrd_root() {
	local root=$1 modules=$2 init=$3 name path
	mkdir -p "$root"/{bin,dev,etc,modules,newroot,proc,sys}
	cp /bin/busybox "$root/bin/busybox"
	for name in $(busybox --list); do
		[ "$name" = busybox ] || ln -s busybox "$root/bin/$name"
	done
	/sbin/depmod -b "$temp/kernel" "$kernel_release"
	sed 's/#.*//' "$modules" | xargs -n 1 /sbin/modprobe -d "$temp/kernel" -S "$kernel_release" --show-depends |
		awk '$1 == "insmod" && !seen[$2]++ { print $2 }' >"$temp/modules"
	while read -r path; do
		name=${path##*/}
		cp "$path" "$root/modules/$name"
		echo "${name%.ko}" >>"$root/modules/order"
	done <"$temp/modules"
	install -m 755 "$init" "$root/init"
}

# archive ROOT: prints ROOT as an archive that the kernel unpacks, the same bytes each time. Not compressed: QEMU copies it into the guest
# faster than a guest unpacks anything.
archive() {
	find "$1" -exec touch -h -d @0 {} +
	(cd "$1" && find . | LC_ALL=C sort | cpio --quiet -o -H newc -R 0:0 --reproducible)
}

# Options that hand the machine's apt proxies on to mmdebstrap's apt.
proxy_options() {
	apt-config dump | sed -n 's/^Acquire::https\?::Proxy .*/--aptopt=&/p'
}

# Makes a machine id and up-to-date marks in the root file system $1: without them systemd takes each boot of the image for a first boot.
mark_as_booted() {
	printf '%.32s\n' "$(sha256sum <<<"$hash")" | as_root tee "$1/etc/machine-id" >/dev/null
	as_root touch -r "$1/usr" "$1/etc/.updated" "$1/var/.updated"
}

# Writes the root file system $1 to the disk $2 of size $3. Tables are initialised now: otherwise the kernel writes them in its first minutes.
disk_write() {
	say "writing its disk"
	truncate -s "$3" "$2"
	as_root /sbin/mkfs.ext4 -q -L root -E lazy_itable_init=0,lazy_journal_init=0 -d "$1" "$2"
	as_root chown "$(id -u):$(id -g)" "$2"
}

# hash_of FILE...: a hash of files and folders, by their paths below the current directory, and of standard input.
hash_of() {
	{ find "$@" -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum && cat; } | sha256sum | cut -c 1-12
}

# Removes folders, also those that hold root's files.
remove() { rm -rf "$@" 2>/dev/null || as_root rm -rf "$@"; }

# image FOLDER NAME BUILD: prints the directory of an image in the cache, FOLDER/NAME-$hash. If it is missing, the function BUILD writes
# it to $out; $temp is a folder for its other files. It appears by a rename once complete; older ones of the same NAME are removed then.
image() {
	local folder=$CACHE/$1 name=$2 final=$CACHE/$1/$2-$hash
	mkdir -p "$folder"
	if [ ! -d "$final" ]; then
		exec 8>"$folder/.$name.lock"
		flock -n 8 || { say "waiting for another build of $name"; flock 8; }
	fi
	if [ ! -d "$final" ]; then
		remove "$folder/.$name".?????? # left by a build that was killed
		temp=$(mktemp -d "$folder/.$name.XXXXXX")
		out=$temp/out
		mkdir "$out"
		say "building $name"
		"$3"
		remove "$folder/$name"-????????????
		mv -T "$out" "$final"
		remove "$temp"
	fi
	echo "$final"
}
