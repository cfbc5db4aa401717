//! Saved: the guest's RAM is written to disk and loaded again, by QEMU's own migration. The conventional way to restart
//! a VMM without shutting its guest down, and the baseline for the warm method.

use super::{Failure, GuestStatus, RebootError, RebootReport, Replacement, handover, resume, stop, switch};
use rekindle_qemu::binary::Binary;
use rekindle_qemu::command::Start;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::transfer::{load_from_file, save_to_file};
use rekindle_qemu::vmm::{self, Vmm, log_tail};
use rekindle_vm::error::LifeError;
use rekindle_vm::fault;
use rekindle_vm::journal::{Journal, Kind, SavedState, Step};
use rekindle_vm::names::saved_path;
use rekindle_vm::timeline::Phase;
use rekindle_vm::{disks, network, ram};
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Path of this VM's saved state.
pub(crate) fn path(replacement: &Replacement) -> PathBuf {
    saved_path(&replacement.host, &replacement.held.rundir, &replacement.held.state.definition)
}

/// Replaces the QEMU through a saved state on disk.
pub(crate) fn reboot(mut replacement: Replacement) -> Result<RebootReport, Failure> {
    let rundir = replacement.held.rundir.clone();
    let mut journal =
        replacement.open_journal(Kind::VmmSaved).map_err(|error| Failure::new(GuestStatus::Unchanged, error))?;
    let path = path(&replacement);
    let (stopped, saved) = match suspend(&mut replacement, &mut journal, &path) {
        Ok(suspended) => suspended,
        Err(error) => {
            let _ = fs::remove_file(&path);
            journal.operation.saved = None;
            return Err(switch::abandon(&rundir, &replacement.source_qemu, journal, replacement.running, error));
        }
    };
    finish(&mut replacement, journal, stopped, &saved).map_err(|error| Failure::new(GuestStatus::NeedsRecovery, error))
}

/// Stops the guest and writes its whole state to disk. The source QEMU stays.
fn suspend(
    replacement: &mut Replacement,
    journal: &mut Journal,
    path: &Path,
) -> Result<(u64, SavedState), RebootError> {
    let file = replacement.file_error("operation.json");
    let source_qemu = replacement.source_qemu.clone();
    let points = |name| fault::point(name, Some(&source_qemu), None);
    let mut qmp = source_qemu.connect(vmm::START)?;
    replacement.recorder.step("connect");
    replacement.hold_run_state()?;
    journal.advance(Step::Suspend).map_err(&file)?;
    points("saved.suspend.journalled");
    replacement.recorder.phase(Phase::Suspend);
    let stopped = stop(&mut qmp, replacement.running)?;
    replacement.recorder.step("stop");
    points("saved.suspend.stopped");
    let saved = save(&mut qmp, path)?;
    replacement.recorder.step("save to disk");
    journal.operation.saved = Some(saved.clone());
    journal.advance(Step::Saved).map_err(&file)?;
    points("saved.suspend.saved");
    Ok((stopped, saved))
}

/// Writes RAM and device state to `path`, durably.
pub(crate) fn save(qmp: &mut Qmp, path: &Path) -> Result<SavedState, RebootError> {
    let failed = |source: io::Error| RebootError::File { path: path.to_owned(), source };
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
    let file = file.map_err(failed)?;
    save_to_file(qmp, &file, handover::LOAD_TIMEOUT)?;
    file.sync_all().map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    Ok(SavedState { path: path.to_owned(), bytes, digest: 0, without_ram: false })
}

/// Resumes the guest from the state on disk. The source QEMU is ended first, to free its RAM for the destination.
fn finish(
    replacement: &mut Replacement,
    journal: Journal,
    stopped: u64,
    saved: &SavedState,
) -> Result<RebootReport, RebootError> {
    let rundir = replacement.held.rundir.clone();
    let source_qemu = replacement.source_qemu.clone();
    replacement.recorder.phase(Phase::Renew);
    source_qemu.kill().map_err(replacement.file_error("qemu"))?;
    fault::point("saved.renew.old-gone", Some(&source_qemu), None);
    replacement.recorder.step("end the old QEMU");
    ram::renew(&rundir, &replacement.held.state.hardware)?;
    let (hardware, generation) = (&replacement.held.state.hardware, journal.operation.generation);
    let (destination_qemu, mut qmp) =
        start_from_disk(&rundir, hardware, &replacement.binary, (generation, saved), network::reopen(hardware)?)?;
    replacement.recorder.step("load from disk");
    fault::point("saved.renew.loaded", Some(&source_qemu), Some(&destination_qemu));
    let mut journal = journal;
    replacement.recorder.phase(Phase::Resume);
    journal.operation.disks_at_resume = handover::disk_times(&replacement.held.state.hardware);
    journal.advance(Step::Resume).map_err(replacement.file_error("operation.json"))?;
    fault::point("saved.resume.journalled", Some(&source_qemu), Some(&destination_qemu));
    let resumed = resume(&mut qmp, replacement.running)?;
    replacement.recorder.step("resume");
    fault::point("saved.resume.resumed", Some(&source_qemu), Some(&destination_qemu));
    network::forward_ports(&mut qmp, &replacement.held.state.hardware);
    replacement.recorder.phase(Phase::Settle);
    journal.operation.disks_at_resume = None;
    journal.advance(Step::Settle).map_err(replacement.file_error("operation.json"))?;
    if !destination_qemu.is_alive() {
        let log = log_tail(&destination_qemu.directory(), 10);
        return Err(RebootError::DiedRunning { name: rundir.name().into(), log });
    }
    let state = replacement.held.state.clone();
    // The guest runs: its saved state is obsolete, and must not outlive the journal that names it.
    let _ = fs::remove_file(&saved.path);
    let state = switch::settle(&rundir, state, None, &destination_qemu, &qmp, journal, None)?;
    replacement.recorder.step("record");
    fault::point("saved.settle.recorded", Some(&source_qemu), Some(&destination_qemu));
    replacement.recorder.write(&rundir);
    Ok(replacement.report(&destination_qemu, &state, (stopped, resumed), None))
}

/// Starts a QEMU of a generation from a state that holds all of the guest's RAM. The RAM file must have been renewed.
pub(crate) fn start_from_disk(
    rundir: &rekindle_vm::rundir::RunDir,
    hardware: &rekindle_qemu::command::Hardware,
    binary: &Binary,
    (generation, saved): (u32, &SavedState),
    taps: handover::Taps,
) -> Result<(Vmm, Qmp), RebootError> {
    let name = rundir.name();
    let damaged = |what: String| RebootError::Damaged { name: name.into(), path: saved.path.clone(), what };
    let file = fs::File::open(&saved.path).map_err(|e| damaged(e.to_string()))?;
    let bytes = file.metadata().map_err(|e| damaged(e.to_string()))?.len();
    if bytes != saved.bytes {
        return Err(damaged(format!("it has {bytes} bytes instead of {}", saved.bytes)));
    }
    let made = |source| RebootError::File { path: rundir.path().to_owned(), source };
    disks::start(rundir, hardware).map_err(LifeError::from)?;
    let directory = rundir.create_vmm(generation).map_err(made)?;
    let arguments = hardware.arguments(&directory, &rundir.console_log(), Start::Incoming, binary.syntax);
    let destination_qemu = Vmm::spawn(&binary.path, &arguments, &directory, taps)?;
    fault::point("saved.renew.spawned", None, Some(&destination_qemu));
    let load = || -> Result<Qmp, RebootError> {
        let mut qmp = destination_qemu.connect(vmm::START)?;
        load_from_file(&mut qmp, &file, handover::LOAD_TIMEOUT)?;
        Ok(qmp)
    };
    match load() {
        Ok(qmp) => Ok((destination_qemu, qmp)),
        Err(source) => {
            let _ = destination_qemu.kill();
            let log = log_tail(&destination_qemu.directory(), 10);
            let doing = "load the saved state";
            Err(RebootError::DestinationFailed { name: name.into(), doing, log, source: Box::new(source) })
        }
    }
}
