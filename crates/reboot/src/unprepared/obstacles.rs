//! Leases of a guest on its disks, which end with its QEMU, and the memory that a second QEMU needs.

use super::UnpreparedError;
use crate::error::RebootError;
use rekindle_handover::ram_transfer::RamTransfer;
use rekindle_handover::ram_transfer_error::RamTransferError;
use rekindle_handover::source_ram::SourceRam;
use rekindle_kernel::process::Process;
use rekindle_memory::moving::droppable;
use rekindle_memory::ram::GuestRam;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::takeover_command::SourceDescriptor;
use rekindle_vm::causes::with_causes;
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

/// How a guest's private RAM gets to the destination, and the memory that this needs.
#[derive(Debug)]
pub(crate) struct Room {
    pub transfer: RamTransfer,
    pub needed_bytes: u64,
    /// The host and the control groups that do not have as much.
    pub problems: Vec<String>,
}

/// Chooses how the RAM blocks `blocks` get to the destination: in place if there is no room for a copy, or if the user
/// `prefers_in_place`. Rekindle pays for a copy; what the guest uses besides is charged to the guest's own control group.
pub(crate) fn room(
    qmp: &mut Qmp,
    source: Process,
    blocks: &[String],
    prefers_in_place: bool,
) -> Result<Room, RebootError> {
    let ram = GuestRam::of(qmp, source).map_err(RamTransferError::from).map_err(UnpreparedError::from)?;
    let ram = SourceRam::of(&ram, blocks).map_err(UnpreparedError::from)?;
    let this = Process::current().map_err(RebootError::file(Path::new("/proc/self/stat")))?;
    let problems_of = |transfer| {
        let checks = [this, source].map(|payer| ram.check(payer, transfer));
        let mut problems = Vec::new();
        for check in checks {
            match check {
                Ok(()) => {}
                Err(e @ RamTransferError::NoRoom { .. }) => problems.push(e.to_string()),
                Err(e) => return Err(UnpreparedError::from(e)),
            }
        }
        Ok(problems)
    };
    let mut room = Room { transfer: RamTransfer::Copied, needed_bytes: 0, problems: problems_of(RamTransfer::Copied)? };
    if ram.has_private() && (prefers_in_place || !room.problems.is_empty()) {
        room.transfer = RamTransfer::InPlace;
        room.problems = problems_of(RamTransfer::InPlace)?;
        // A process that cannot be traced must not be found only when the destination has been started.
        if let Err(e) = droppable(source) {
            room.problems.push(format!("its RAM cannot be moved in place: {}", with_causes(&e)));
        }
    }
    room.needed_bytes = ram.needed_bytes(room.transfer);
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
