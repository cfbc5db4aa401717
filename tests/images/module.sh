# shellcheck shell=bash
# Kernel modules for the guests' own kernel. Sourced by the builds of images that have one, after scripts/common.sh; uses $temp, a folder
# of theirs, and $release and $kernel_version, the kernel's.

# Unpacks what modules are built with to $temp/headers, and makes its absolute paths lead there. They are not installed. The package
# linux-kbuild may be newer than the headers: the archive has only its newest version.
headers_unpack() {
	local common=linux-headers-${release%-cloud-amd64}-common package kbuild kbuild_version
	kbuild=linux-kbuild-$(cut -d . -f 1,2 <<<"$release")
	kbuild_version=$(release_version "$kbuild")
	say "fetching the headers of $release $kernel_version"
	mkdir "$temp/deb" "$temp/headers"
	(
		cd "$temp/deb"
		apt_download "linux-headers-$release=$kernel_version" "$common=$kernel_version" "$kbuild=$kbuild_version"
	)
	for package in "$temp"/deb/*.deb; do
		dpkg -x "$package" "$temp/headers"
	done
	headers=$temp/headers/usr/src/linux-headers-$release
	sed -i "s|/usr/src/|$temp/headers/usr/src/|" "$headers/Makefile"
}

# module SOURCE.c: compiles it to $temp/module/SOURCE.ko.
module() {
	local name
	name=$(basename "$1" .c)
	mkdir "$temp/module"
	cp "$1" "$temp/module/"
	echo "obj-m := $name.o" >"$temp/module/Makefile"
	make -s -C "$headers" M="$temp/module" CC=gcc modules >"$temp/module/log" 2>&1 || {
		cat "$temp/module/log" >&2
		die "cannot build the module against the headers of $release (see above)"
	}
	strip --strip-debug "$temp/module/$name.ko"
}
