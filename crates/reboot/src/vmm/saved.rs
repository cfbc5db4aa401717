//! Saved: the guest's RAM is written to disk and loaded again, by QEMU's own migration. The conventional way to restart
//! a VMM without shutting its guest down, and the baseline for the warm method.

use super::{RebootReport, Replacement, stop};
use crate::error::{Failure, RebootError};
use rekindle_handover::destination::end_failed_load;
use rekindle_handover::ram::SavedRam;
use rekindle_handover::saved_state::{open_with_ram, save_with_ram};
use rekindle_handover::takeover::Taps;
use rekindle_handover::{Destination, Handover, HandoverError, LoadedStage, OwnRunDir};
use rekindle_qemu::binary::Binary;
use rekindle_qemu::command::{Hardware, Start};
use rekindle_qemu::vmm;
use rekindle_vm::error::LifeError;
use rekindle_vm::journal::{Kind, SavedState, Step};
use rekindle_vm::names::saved_path;
use rekindle_vm::timeline::Phase;
use rekindle_vm::{disks, network, ram};
use std::fs;
use std::path::{Path, PathBuf};

/// Returns the path of this VM's saved state.
pub(crate) fn state_path(replacement: &Replacement) -> PathBuf {
    saved_path(&replacement.host, &replacement.locked_vm.rundir, &replacement.locked_vm.state.definition)
}

/// Replaces the QEMU through a saved state on disk.
pub(crate) fn reboot(mut replacement: Replacement) -> Result<RebootReport, Failure> {
    let mut handover = replacement.begin_handover(Kind::VmmSaved).map_err(Failure::unchanged)?;
    let path = state_path(&replacement);
    let suspended = match suspend(&mut replacement, &mut handover, &path) {
        Ok(suspended) => suspended,
        Err(error) => {
            let _ = fs::remove_file(&path);
            handover.journal.operation.saved = None;
            let (guest, error) = handover.abandon(error);
            return Err(Failure::new(guest, error));
        }
    };
    resume(&replacement, handover, &suspended).map_err(Failure::needs_recovery)
}

/// A guest that is stopped in the source QEMU, and whose state is on disk.
struct SuspendedGuest {
    saved: SavedState,
    /// When the guest was stopped: microseconds since 1970.
    stopped_host_us: u64,
}

/// Stops the guest and writes its whole state to disk. The source QEMU stays, with the guest stopped.
fn suspend(replacement: &mut Replacement, handover: &mut Handover, path: &Path) -> Result<SuspendedGuest, RebootError> {
    let mut qmp = replacement.source_qemu.connect(vmm::START_TIMEOUT)?;
    handover.recorder.step("connect");
    replacement.hold_run_state()?;
    replacement.refuse_stopped_disk_servers()?;
    handover.advance(Step::Suspend)?;
    handover.pass("saved.suspend.journalled");
    handover.recorder.phase(Phase::Suspend);
    let stopped_host_us = stop(&mut qmp, replacement.running)?;
    handover.recorder.step("stop");
    handover.pass("saved.suspend.stopped");
    let saved = save_with_ram(&mut qmp, path)?;
    handover.recorder.step("save to disk");
    handover.journal.operation.saved = Some(saved.clone());
    handover.advance(Step::Saved)?;
    handover.pass("saved.suspend.saved");
    Ok(SuspendedGuest { saved, stopped_host_us })
}

/// Resumes the guest from the state on disk. Ends the source QEMU first, to free its RAM for the destination.
fn resume(
    replacement: &Replacement,
    mut handover: Handover,
    suspended: &SuspendedGuest,
) -> Result<RebootReport, RebootError> {
    let hardware = &replacement.locked_vm.state.hardware;
    handover.recorder.phase(Phase::Renew);
    replacement.source_qemu.kill().map_err(replacement.file_error("qemu"))?;
    handover.pass("saved.renew.old-gone");
    handover.recorder.step("end the old QEMU");
    let taps = network::reopen(hardware)?;
    let loaded = load(&mut handover, hardware, &replacement.binary, &suspended.saved, taps)?;
    handover.recorder.step("load from disk");
    let running = loaded.commit(&mut handover, "resume")?;
    let settled = running.settle(handover, "record")?;
    settled.recorder.write(&replacement.locked_vm.rundir);
    Ok(replacement.report(&settled, suspended.stopped_host_us))
}

/// Starts a destination QEMU with new RAM and loads a saved state that includes the guest's RAM. No other QEMU may use
/// the RAM file.
pub(crate) fn load<'a>(
    handover: &mut Handover,
    hardware: &'a Hardware,
    binary: &Binary,
    saved: &SavedState,
    taps: Taps,
) -> Result<Destination<LoadedStage<SavedRam<'a>>>, HandoverError> {
    let rundir = handover.rundir.clone();
    let file = open_with_ram(rundir.name(), saved)?;
    ram::renew(&rundir, hardware)?;
    disks::start(&rundir, hardware).map_err(LifeError::from)?;
    let environment = OwnRunDir { rundir: &rundir, hardware, binary };
    let spawned = Destination::spawn(handover, &environment, Start::Incoming, taps);
    let destination = spawned.map_err(|e| end_failed_load(handover, e))?;
    destination.load_file(handover, &file, SavedRam { hardware })
}
