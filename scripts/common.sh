# shellcheck shell=bash
# Functions and constants of the shell scripts. Sourced, never run.

RELEASE=bookworm
# The next Debian: that of the emulated host, and, with its backports, that of the newest QEMU.
NEXT_RELEASE=trixie
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
		die "apt-get download $* failed; ${apt_remedy:-if the versions are gone from the archive: apt-get update, then run this again}"
}

# The newest version of a package in Debian 12 itself and its updates: backports never.
release_version() {
	apt-cache madison "$1" | awk -v suite="$RELEASE" -F ' *[|] *' '
		{ split($3, where, " "); sub("/.*", "", where[2]) }
		where[2] == suite || where[2] == suite "-security" || where[2] == suite "-updates" { print $2 }' |
		sort -V | tail -n 1
}

have_suite() { apt_indexes | awk -v suite="$1" '$2 == suite { found = 1 } END { exit !found }'; }

# Prints the archive that apt takes Debian 12 from, and its components: "SITE COMPONENT...".
release_archive() {
	local found
	have_suite $RELEASE || apt_update # a fresh machine has no lists yet
	found=$(apt_indexes | awk -v suite=$RELEASE '
		$2 == suite { site = $1; components = components " " $3 } END { print site components }')
	[ -n "$found" ] || die "apt has no source for Debian 12 ($RELEASE); add one to /etc/apt/sources.list"
	echo "$found"
}

# The option of a line of sources by which the archive's signature is checked, if its keys are where Debian installs them.
signed_by() {
	[ ! -e /usr/share/keyrings/debian-archive-keyring.gpg ] ||
		echo '[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] '
}

# Prints the lines of apt's sources for the next Debian, its updates and its backports, all of them main.
next_sources() {
	local site
	site=$(release_archive) || exit
	site=${site%% *}
	printf "deb $(signed_by)$site %s main\n" $NEXT_RELEASE $NEXT_RELEASE-updates $NEXT_RELEASE-backports
}

# How long the package lists of the next Debian are used, in days.
NEXT_LISTS_DAYS=7
# shellcheck disable=SC2034  # used by the scripts that source this
next_apt_remedy="if the versions are gone from the archive: rm -r $CACHE/apt-$NEXT_RELEASE-*, then run this again"

# Prints the configuration of an apt of the next Debian, for APT_CONFIG. Creates it if there is none or if it is old. It has sources, lists
# and a state of its own, in which nothing is installed: the machine's apt never learns of that release, and nothing of this machine is
# upgraded. In a subshell, since `set -e` does not hold in a command substitution.
next_apt() (
	set -euo pipefail
	mkdir -p "$CACHE"
	exec 7>"$CACHE/.apt-$NEXT_RELEASE.lock"
	flock 7
	sources=$(find "$CACHE" -maxdepth 2 -path "$CACHE/apt-$NEXT_RELEASE-*/sources.list" -mtime -$NEXT_LISTS_DAYS | sort | tail -n 1)
	if [ -n "$sources" ]; then
		echo "${sources%/*}/apt.conf"
		exit
	fi
	rm -rf "$CACHE/.apt-$NEXT_RELEASE".?????? # left by a process that was killed
	temp=$(mktemp -d "$CACHE/.apt-$NEXT_RELEASE.XXXXXX")
	mkdir -p "$temp"/{lists/partial,archives/partial}
	: >"$temp/status"
	next_sources >"$temp/sources.list"
	next_apt_config "$temp" >"$temp/apt.conf"
	say "fetching the package lists of $NEXT_RELEASE"
	APT_CONFIG=$temp/apt.conf apt-get update -qq -o APT::Update::Error-Mode=any >&2 ||
		die "cannot fetch the package lists of $NEXT_RELEASE and its backports (see above)"
	apt=$CACHE/apt-$NEXT_RELEASE-$(date +%s)
	next_apt_config "$apt" >"$temp/apt.conf"
	# Another process may still use lists that have just become too old.
	find "$CACHE" -maxdepth 1 -name "apt-$NEXT_RELEASE-*" -mtime +$((2 * NEXT_LISTS_DAYS)) -exec rm -r {} +
	mv -T "$temp" "$apt"
	echo "$apt/apt.conf"
)

# Prints the configuration of an apt whose files are all below $1.
next_apt_config() {
	cat <<-EOF
		Dir::State "$1"; Dir::State::Lists "$1/lists"; Dir::State::status "$1/status";
		Dir::Cache "$1"; Dir::Cache::Archives "$1/archives";
		Dir::Etc::SourceList "$1/sources.list"; Dir::Etc::SourceParts "/dev/null";
		Dir::Etc::Preferences "/dev/null"; Dir::Etc::PreferencesParts "/dev/null";
		APT::Sandbox::User "root";
	EOF
}
