//! The cgroups of a process or thread. There is one hierarchy of cgroups for each controller (version 1), one for all
//! (version 2), or both: hybrid hosts, where version 2 has no controllers.

use super::EnvironmentError;
use super::action::{Action, Step};
use super::proc_file::ProcDirectory;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};

/// A line of `/proc/PID/cgroup`: membership in one cgroup of one hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Membership {
    /// Comma-separated; empty for version 2.
    controllers: String,
    /// From the root of the hierarchy.
    path: PathBuf,
}

/// The directory of a cgroup.
#[derive(Debug)]
pub(super) struct CgroupPlace {
    pub directory: PathBuf,
    version: Version,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// A mounted hierarchy, or a subtree of one.
struct Mount<'a> {
    version: Version,
    /// The cgroup that is mounted.
    root: &'a Path,
    directory: &'a Path,
    options: &'a str,
}

impl CgroupPlace {
    /// Returns the action by which a new process joins the cgroup.
    pub fn action(&self) -> Result<Action, (Step, io::Error)> {
        let step = Step::Cgroup(self.directory.clone());
        let file = open(&self.directory.join("cgroup.procs")).map_err(|e| (step.clone(), e))?;
        // 0 is the process that writes.
        Ok(Action::new(step, move || (&file).write_all(b"0")))
    }

    /// Moves a thread of another process. In version 2 only between the cgroups of the process.
    pub fn move_thread(&self, thread: u32) -> io::Result<()> {
        let name = match self.version {
            Version::One => "tasks",
            Version::Two => "cgroup.threads",
        };
        let path = self.directory.join(name);
        let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
        open(&path).and_then(|mut file| file.write_all(thread.to_string().as_bytes())).map_err(named)
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).open(path)
}

/// Returns the cgroups of which `source` is a member and `other` is not.
pub(super) fn places_missing(
    source: &ProcDirectory,
    other: &ProcDirectory,
) -> Result<Vec<CgroupPlace>, EnvironmentError> {
    places_not_among(&memberships(source)?, &memberships(other)?)
}

/// Returns the places of those of `memberships` that are not among `present`.
pub(super) fn places_not_among(
    memberships: &[Membership],
    present: &[Membership],
) -> Result<Vec<CgroupPlace>, EnvironmentError> {
    let missing: Vec<_> = memberships.iter().filter(|membership| !present.contains(membership)).collect();
    if missing.is_empty() {
        return Ok(Vec::new());
    }
    let mounts = ProcDirectory::this().text("mountinfo")?;
    let unreachable = |membership: &Membership| EnvironmentError::UnreachableCgroup {
        cgroup: format!("{}:{}", membership.controllers, membership.path.display()),
    };
    missing.into_iter().map(|membership| find(membership, &mounts).ok_or_else(|| unreachable(membership))).collect()
}

/// Returns the memberships of a process or thread.
pub(super) fn memberships(directory: &ProcDirectory) -> Result<Vec<Membership>, EnvironmentError> {
    let text = directory.text("cgroup")?;
    let parse = |line: &str| {
        let mut fields = line.splitn(3, ':').skip(1);
        Some(Membership { controllers: fields.next()?.to_owned(), path: fields.next()?.into() })
    };
    text.lines().map(|line| parse(line).ok_or_else(|| directory.invalid("cgroup", line))).collect()
}

/// Returns the place of a cgroup in the mounted file systems that `/proc/PID/mountinfo` lists. `None` if it is not
/// below a mount.
fn find(membership: &Membership, mountinfo: &str) -> Option<CgroupPlace> {
    mountinfo.lines().filter_map(Mount::parse).find_map(|mount| {
        let version = if membership.controllers.is_empty() { Version::Two } else { Version::One };
        let has = |controller| mount.options.split(',').any(|option| option == controller);
        if mount.version != version || version == Version::One && !membership.controllers.split(',').all(has) {
            return None;
        }
        let below = membership.path.strip_prefix(mount.root).ok()?;
        // The kernel shows a cgroup outside of our cgroup namespace with `..`.
        let is_below = below.components().all(|component| matches!(component, Component::Normal(_)));
        is_below.then(|| CgroupPlace { directory: mount.directory.join(below), version })
    })
}

impl<'a> Mount<'a> {
    /// Parses a line like `35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory`.
    fn parse(line: &'a str) -> Option<Self> {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(3);
        let mut file_system = file_system.split(' ');
        let version = match file_system.next()? {
            "cgroup" => Version::One,
            "cgroup2" => Version::Two,
            _ => return None,
        };
        let (root, directory) = (Path::new(mount.next()?), Path::new(mount.next()?));
        Some(Self { version, root, directory, options: file_system.nth(1)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "23 1 0:20 / / rw - ext4 /dev/sda rw\n\
        32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n\
        40 31 0:37 /pod /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd\n\
        41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn a_cgroup_is_found_below_the_mount_of_its_hierarchy() {
        for (controllers, path, directory) in [
            (
                "cpu,cpuacct",
                "/machine/qemu-1-web.libvirt-qemu",
                Some("/sys/fs/cgroup/cpu,cpuacct/machine/qemu-1-web.libvirt-qemu"),
            ),
            ("name=systemd", "/pod/vm", Some("/sys/fs/cgroup/systemd/vm")),
            ("name=systemd", "/other", None),
            (
                "",
                "/machine.slice/machine-qemu\\x2d1.scope",
                Some("/sys/fs/cgroup/unified/machine.slice/machine-qemu\\x2d1.scope"),
            ),
            ("", "/../outside", None),
            ("memory", "/", None),
        ] {
            let membership = Membership { controllers: controllers.into(), path: path.into() };
            let place = find(&membership, MOUNTS).map(|place| place.directory);
            assert_eq!(place.as_deref(), directory.map(Path::new), "{controllers}:{path}");
        }
    }
}
