//! Leases of a guest on its disks, which end with its QEMU, and the memory that a second QEMU needs.

use super::UnpreparedError;
use crate::error::RebootError;
use rekindle_handover::copied_ram::{CopiedRam, CopyError};
use rekindle_kernel::process::Process;
use rekindle_memory::ram::GuestRam;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::takeover_command::SourceDescriptor;
use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::path::Path;

/// Names of the sockets of the lock managers, virtlockd and sanlock. libvirt leaves a connection open in QEMU: the lease
/// lasts as long as it does, and belongs to that process.
const LEASE_SOCKETS: [&str; 2] = ["virtlockd-sock", "sanlock.sock"];

pub(crate) const LEASE_REMEDY: &str = "it ends with the running QEMU, and another host could use its disks: start the domain \
                                       without lock_manager in qemu.conf";

/// Returns the problem of a QEMU that holds a lease on its disks.
pub(crate) fn lease(open: &BTreeMap<RawFd, SourceDescriptor>) -> Option<String> {
    open.values().find_map(|descriptor| {
        let SourceDescriptor::Client { server } = descriptor else { return None };
        let is_lease = LEASE_SOCKETS.iter().any(|socket| Path::new(server).ends_with(socket));
        is_lease.then(|| format!("lock manager: QEMU holds a lease at {server}; {LEASE_REMEDY}"))
    })
}

/// The memory that a copy of a guest's RAM needs.
#[derive(Debug, Default)]
pub(crate) struct Room {
    pub needed_bytes: u64,
    /// The host and the control groups that do not have as much.
    pub problems: Vec<String>,
}

/// Returns the room that a copy of the RAM blocks `blocks` needs. Rekindle pays for the copy; what the guest uses besides
/// is charged to the guest's own control group.
pub(crate) fn room(qmp: &mut Qmp, source: Process, blocks: &[String]) -> Result<Room, RebootError> {
    let ram = GuestRam::of(qmp, source).map_err(CopyError::from).map_err(UnpreparedError::from)?;
    let this = Process::current().map_err(RebootError::file(Path::new("/proc/self/stat")))?;
    let mut room = Room::default();
    for payer in [this, source] {
        match CopiedRam::plan(&ram, blocks, payer) {
            Ok(copy) => room.needed_bytes = copy.needed_bytes(),
            Err(e @ CopyError::NoRoom { .. }) => room.problems.push(e.to_string()),
            Err(e) => return Err(UnpreparedError::from(e).into()),
        }
    }
    Ok(room)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_to_a_lock_manager_is_a_lease() {
        let open = |server: &str| BTreeMap::from([(7, SourceDescriptor::Client { server: server.into() })]);
        assert!(lease(&open("/run/libvirt/virtlockd-sock")).unwrap().contains("virtlockd-sock"));
        assert!(lease(&open("/run/sanlock/sanlock.sock")).is_some());
        assert_eq!(lease(&open("/run/libvirt/virtlogd-sock")), None);
    }
}
