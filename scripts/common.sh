# shellcheck shell=bash
# Functions and constants of the shell scripts. Sourced, never run.

RELEASE=bookworm
# shellcheck disable=SC2034  # used by the scripts that source this
CACHE=${REKINDLE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rekindle}

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() {
	say "$*"
	exit 1
}

# Runs a command as root.
as_root() {
	if [ "$(id -u)" = 0 ]; then
		"$@"
	elif command -v sudo >/dev/null; then
		sudo -- "$@"
	else
		die "'$1' needs root, and sudo is not installed; run this as root, or: apt-get install sudo"
	fi
}

apt_update() {
	say "updating apt's package lists"
	as_root apt-get update -qq ||
		die "apt-get update failed (see above); fix the sources in /etc/apt, or run this again if another apt held the lock"
}

# "SITE SUITE COMPONENT" for each package index apt has, whichever form its sources are written in.
apt_indexes() {
	# shellcheck disable=SC2016  # apt fills the names in
	apt-get indextargets --format '$(SITE) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' | sort -u
}

# Downloads packages, each NAME, NAME=VERSION or NAME/SUITE, to the current directory.
# Its own user for downloads (_apt) often cannot write there, and apt would warn of it each time.
apt_download() {
	apt-get download -qq -o APT::Sandbox::User=root "$@" >&2 ||
		die "apt-get download $* failed; if the versions are gone from the archive: apt-get update, then run this again"
}

# The newest version of a package in Debian 12 itself and its updates: backports never.
release_version() {
	apt-cache madison "$1" | awk -v suite="$RELEASE" -F ' *[|] *' '
		{ split($3, where, " "); sub("/.*", "", where[2]) }
		where[2] == suite || where[2] == suite "-security" || where[2] == suite "-updates" { print $2 }' |
		sort -V | tail -n 1
}
