//! How much memory a process can still allocate: the host's, and what the limits of its control groups leave.

use crate::directory::available_memory;
use rekindle_kernel::process::Process;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Mount points of the hierarchies that can limit memory, each with the names of its files.
const HIERARCHIES: [Hierarchy; 3] = [
    Hierarchy { root: "/sys/fs/cgroup", ..V2 },
    // Hosts that have both versions mount the newer one here.
    Hierarchy { root: "/sys/fs/cgroup/unified", ..V2 },
    Hierarchy {
        is_v2: false,
        root: "/sys/fs/cgroup/memory",
        limit: "memory.limit_in_bytes",
        usage: "memory.usage_in_bytes",
        inactive: "total_inactive_file",
    },
];
const V2: Hierarchy =
    Hierarchy { is_v2: true, root: "", limit: "memory.max", usage: "memory.current", inactive: "inactive_file" };

/// A mounted hierarchy of control groups.
struct Hierarchy {
    is_v2: bool,
    root: &'static str,
    limit: &'static str,
    usage: &'static str,
    /// Entry of `memory.stat` with the cached file pages that the kernel drops first.
    inactive: &'static str,
}

/// Returns how many bytes `process` can still allocate without swapping, and without being killed for a limit of its
/// control groups or of their parents.
///
/// # Errors
/// Errors of reading `/proc/meminfo`, or `/proc/PID/cgroup` of a process that has ended.
pub fn available_to(process: Process) -> io::Result<u64> {
    let groups = fs::read_to_string(format!("/proc/{}/cgroup", process.pid))?;
    let below_limits = HIERARCHIES.iter().filter_map(|hierarchy| {
        let group = group_in(&groups, hierarchy.is_v2)?;
        below_limits(Path::new(hierarchy.root), group, hierarchy)
    });
    Ok(below_limits.fold(available_memory()?, u64::min))
}

/// Finds the process's group in a line `NUMBER:CONTROLLERS:GROUP` of `/proc/PID/cgroup`. Version 2 has no controllers.
fn group_in(groups: &str, is_v2: bool) -> Option<&str> {
    groups.lines().find_map(|line| {
        let (controllers, group) = line.split_once(':')?.1.split_once(':')?;
        let is_wanted =
            if is_v2 { controllers.is_empty() } else { controllers.split(',').any(|name| name == "memory") };
        is_wanted.then_some(group.trim_start_matches('/'))
    })
}

/// Returns the smallest number of bytes that the limits of a group and of its parents leave. `None` without a limit.
fn below_limits(root: &Path, group: &str, hierarchy: &Hierarchy) -> Option<u64> {
    let directory = root.join(group);
    let parents = directory.ancestors().take_while(|parent| parent.starts_with(root));
    parents.filter_map(|parent| below_limit(parent, hierarchy)).min()
}

fn below_limit(group: &Path, hierarchy: &Hierarchy) -> Option<u64> {
    let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
    // `max` is not a number: no limit.
    let limit = number(hierarchy.limit)?;
    let usage = number(hierarchy.usage)?.saturating_sub(inactive_bytes(group.join("memory.stat"), hierarchy));
    Some(limit.saturating_sub(usage))
}

fn inactive_bytes(stat: PathBuf, hierarchy: &Hierarchy) -> u64 {
    let text = fs::read_to_string(stat).unwrap_or_default();
    let value = |line: &str| line.strip_prefix(hierarchy.inactive)?.strip_prefix(' ')?.parse::<u64>().ok();
    text.lines().find_map(value).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_of_each_version_is_found() {
        let both = "6:cpu,memory:/machine/qemu-1-web\n9:name=systemd:/other\n0::/machine.slice/web:1\n";
        assert_eq!(group_in(both, false), Some("machine/qemu-1-web"));
        assert_eq!(group_in(both, true), Some("machine.slice/web:1"));
        assert_eq!(group_in("9:name=systemd:/\n", false), None);
    }

    #[test]
    fn the_lowest_limit_of_a_group_and_its_parents_counts() {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("machine/web");
        fs::create_dir_all(&group).unwrap();
        let write = |directory: &Path, limit: &str, usage: &str, stat: &str| {
            fs::write(directory.join("memory.max"), limit).unwrap();
            fs::write(directory.join("memory.current"), usage).unwrap();
            fs::write(directory.join("memory.stat"), stat).unwrap();
        };
        assert_eq!(below_limits(root.path(), "machine/web", &V2), None);
        write(&group, "max\n", "700\n", "");
        assert_eq!(below_limits(root.path(), "machine/web", &V2), None);
        write(group.parent().unwrap(), "1000\n", "700\n", "active_file 9\ninactive_file 50\n");
        assert_eq!(below_limits(root.path(), "machine/web", &V2), Some(350));
        write(&group, "800\n", "900\n", "");
        assert_eq!(below_limits(root.path(), "machine/web", &V2), Some(0), "above its limit");
    }

    #[test]
    fn a_running_process_can_allocate_memory() {
        assert!(available_to(Process::current().unwrap()).unwrap() > 0);
    }
}
