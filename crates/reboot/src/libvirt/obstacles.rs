//! What libvirt has set up for a domain besides its QEMU, and what a replacement would lose: leases on its disks, limits
//! and places of its memory. And the memory that a second QEMU needs.

use super::DomainError;
use crate::error::RebootError;
use rekindle_handover::copied_ram::{CopiedRam, CopyError};
use rekindle_kernel::process::Process;
use rekindle_memory::ram::GuestRam;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::takeover_command::SourceDescriptor;
use roxmltree::Document;
use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::path::Path;

/// Names of the sockets of the lock managers, virtlockd and sanlock. libvirt leaves a connection open in QEMU: the lease
/// lasts as long as it does, and belongs to that process.
const LEASE_SOCKETS: [&str; 2] = ["virtlockd-sock", "sanlock.sock"];

const LEASE_REMEDY: &str = "it ends with the running QEMU, and another host could use its disks: start the domain without \
                            lock_manager in qemu.conf";

/// Returns what a status file has that a replacement would not keep.
///
/// # Errors
/// If it is no XML.
pub(super) fn of_status(name: &str, status: &str) -> Result<Vec<String>, roxmltree::Error> {
    let document = Document::parse(status)?;
    let root = document.root_element();
    let mut problems = Vec::new();
    if root.children().any(|node| node.has_tag_name("lockstate")) {
        problems.push(format!("lock manager: libvirt has a lease for it; {LEASE_REMEDY}"));
    }
    let Some(domain) = root.children().find(|node| node.has_tag_name("domain")) else { return Ok(problems) };
    for (path, problem) in [
        (&["devices", "lease"][..], "leases are not passed on: start the domain without <lease>".to_owned()),
        (
            &["memtune"],
            format!(
                "limits of memory are not kept, and two copies of the RAM may exceed them: virsh memtune {name} --live \
                 --hard-limit -1 --soft-limit -1 --swap-hard-limit -1"
            ),
        ),
        (&["numatune"], "the place of its memory is not kept: start the domain without <numatune>".into()),
        (&["cputune", "cachetune"], "it is not kept: start the domain without <cachetune>".into()),
        (&["cputune", "memorytune"], "it is not kept: start the domain without <memorytune>".into()),
    ] {
        let found = path.iter().try_fold(domain, |node, name| node.children().find(|child| child.has_tag_name(*name)));
        if found.is_some() {
            problems.push(format!("<{}>: {problem}", path.last().unwrap_or(&"")));
        }
    }
    Ok(problems)
}

/// Returns the problem of a QEMU that holds a lease on its disks.
pub(super) fn lease(open: &BTreeMap<RawFd, SourceDescriptor>) -> Option<String> {
    open.values().find_map(|descriptor| {
        let SourceDescriptor::Client { server } = descriptor else { return None };
        let is_lease = LEASE_SOCKETS.iter().any(|socket| Path::new(server).ends_with(socket));
        is_lease.then(|| format!("lock manager: QEMU holds a lease at {server}; {LEASE_REMEDY}"))
    })
}

/// The memory that a copy of a domain's RAM needs.
#[derive(Debug, Default)]
pub(super) struct Room {
    pub needed_bytes: u64,
    /// The host and the control groups that do not have as much.
    pub problems: Vec<String>,
}

/// Returns the room that a copy of the RAM blocks `blocks` needs. Rekindle pays for the copy; what the guest uses besides
/// is charged to the domain.
pub(super) fn room(qmp: &mut Qmp, source: Process, blocks: &[String]) -> Result<Room, RebootError> {
    let ram = GuestRam::of(qmp, source).map_err(CopyError::from).map_err(DomainError::from)?;
    let this = Process::current().map_err(RebootError::file(Path::new("/proc/self/stat")))?;
    let mut room = Room::default();
    for payer in [this, source] {
        match CopiedRam::plan(&ram, blocks, payer) {
            Ok(copy) => room.needed_bytes = copy.needed_bytes(),
            Err(e @ CopyError::NoRoom { .. }) => room.problems.push(e.to_string()),
            Err(e) => return Err(DomainError::from(e).into()),
        }
    }
    Ok(room)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(inside: &str) -> Vec<String> {
        let status = format!("<domstatus state='running'>{inside}</domstatus>");
        of_status("web", &status).unwrap()
    }

    #[test]
    fn leases_and_limits_are_named() {
        assert_eq!(problems("<domain><devices/><cputune><shares>7</shares></cputune></domain>"), Vec::<String>::new());
        let cases = [
            ("<lockstate>4:/images</lockstate><domain/>", "lock manager"),
            ("<domain><devices><lease><key>k</key></lease></devices></domain>", "<lease>"),
            ("<domain><memtune><hard_limit unit='KiB'>9</hard_limit></memtune></domain>", "virsh memtune web"),
            ("<domain><numatune><memory mode='strict' nodeset='0'/></numatune></domain>", "<numatune>"),
            ("<domain><cputune><cachetune vcpus='0'/></cputune></domain>", "<cachetune>"),
        ];
        for (inside, expected) in cases {
            let found = problems(inside);
            assert!(found.len() == 1 && found[0].contains(expected), "{inside}: {found:?}");
        }
    }

    #[test]
    fn a_connection_to_a_lock_manager_is_a_lease() {
        let open = |server: &str| BTreeMap::from([(7, SourceDescriptor::Client { server: server.into() })]);
        assert!(lease(&open("/run/libvirt/virtlockd-sock")).unwrap().contains("virtlockd-sock"));
        assert!(lease(&open("/run/sanlock/sanlock.sock")).is_some());
        assert_eq!(lease(&open("/run/libvirt/virtlogd-sock")), None);
    }
}
