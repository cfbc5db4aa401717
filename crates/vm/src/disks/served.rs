//! Which disks have a server, and when.

use crate::journal::{Journal, Kind, Step};
use crate::rundir::RunDir;
use crate::state::State;
use rekindle_qemu::command::{Disk, Hardware};
use rekindle_qemu::vmm::Vmm;
use std::io;

/// Returns the disks that have a server.
pub fn served(hardware: &Hardware) -> impl Iterator<Item = &Disk> {
    hardware.disks.iter().filter(|disk| disk.server)
}

/// Returns the hardware whose disks need servers now, because a QEMU uses them. None while an operation prevents
/// serving them.
///
/// # Errors
/// When the run directory cannot be read.
pub fn served_now(rundir: &RunDir) -> io::Result<Option<Hardware>> {
    let Some(state) = State::read(rundir)? else { return Ok(None) };
    Ok(need_servers(rundir, &state)?.then_some(state.hardware))
}

/// Returns whether a QEMU uses the disks of a VM with this state, so that they need servers now.
///
/// # Errors
/// When the journal cannot be read.
pub fn need_servers(rundir: &RunDir, state: &State) -> io::Result<bool> {
    let mut qemus = vec![state.vmm.clone()];
    if let Some(Journal { operation, .. }) = Journal::read(rundir)? {
        // A move has ended the servers of a stopped guest, and the destination host may have its disks by now.
        if operation.kind == Kind::Move && operation.step >= Step::Suspend {
            return Ok(false);
        }
        qemus.push(operation.from);
        // The servers of a QEMU that waits for a checkpoint wait as well: the restore starts them.
        qemus.push(operation.to.filter(|_| !matches!(operation.kind, Kind::Restore | Kind::Prepare)));
    }
    Ok(qemus.iter().flatten().any(Vmm::is_alive))
}
