//! Saved: the guest's RAM goes to disk and back, by QEMU's own migration. The usual way to restart a VMM without
//! shutting its guest down, and what the warm way is measured against.

use super::{Change, Failure, Left, RebootError, Report, handover, resume, stop, switch};
use rekindle_qemu::binary::Binary;
use rekindle_qemu::command::Start;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::transfer::{load_from_file, save_to_file};
use rekindle_qemu::vmm::{self, Vmm, log_tail};
use rekindle_vm::fault;
use rekindle_vm::journal::{Journal, Kind, SavedState, Step};
use rekindle_vm::life::LifeError;
use rekindle_vm::timeline::Phase;
use rekindle_vm::{disks, life, network, ram};
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Where this VM's RAM is saved.
pub(crate) fn path(change: &Change) -> PathBuf {
    life::saved_path(&change.host, &change.held.rundir, &change.held.state.definition)
}

/// Replace the VMM by way of the disk.
pub(crate) fn reboot(mut change: Change) -> Result<Report, Failure> {
    let rundir = change.held.rundir.clone();
    let mut journal = change.open_journal(Kind::VmmSaved).map_err(|error| Failure::new(Left::AsItWas, error))?;
    let path = path(&change);
    let (stopped, saved) = match suspend(&mut change, &mut journal, &path) {
        Ok(suspended) => suspended,
        Err(error) => {
            let _ = fs::remove_file(&path);
            journal.operation.saved = None;
            return Err(switch::give_up(&rundir, &change.old, journal, change.running, error));
        }
    };
    finish(&mut change, journal, stopped, &saved).map_err(|error| Failure::new(Left::NeedsRecovery, error))
}

/// Until the guest's whole state is on disk, with the old QEMU still there.
fn suspend(change: &mut Change, journal: &mut Journal, path: &Path) -> Result<(u64, SavedState), RebootError> {
    let file = change.file_error("operation.json");
    let old = change.old.clone();
    let points = |name| fault::point(name, Some(&old), None);
    let mut qmp = old.connect(vmm::START)?;
    change.recorder.step("connect");
    change.hold_run_state()?;
    journal.advance(Step::Suspend).map_err(&file)?;
    points("saved.suspend.journalled");
    change.recorder.phase(Phase::Suspend);
    let stopped = stop(&mut qmp, change.running)?;
    change.recorder.step("stop");
    points("saved.suspend.stopped");
    let saved = save(&mut qmp, path)?;
    change.recorder.step("save to disk");
    journal.operation.saved = Some(saved.clone());
    journal.advance(Step::Saved).map_err(&file)?;
    points("saved.suspend.saved");
    Ok((stopped, saved))
}

/// Write RAM and devices to `path`, and make them last.
pub(crate) fn save(qmp: &mut Qmp, path: &Path) -> Result<SavedState, RebootError> {
    let failed = |source: io::Error| RebootError::File { path: path.to_owned(), source };
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
    let file = file.map_err(failed)?;
    save_to_file(qmp, &file, handover::LOAD)?;
    file.sync_all().map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    Ok(SavedState { path: path.to_owned(), bytes, digest: 0, without_ram: false })
}

/// From the state on disk to the guest running: the old QEMU goes, so that its RAM is free for the new one.
fn finish(change: &mut Change, journal: Journal, stopped: u64, saved: &SavedState) -> Result<Report, RebootError> {
    let rundir = change.held.rundir.clone();
    let old = change.old.clone();
    change.recorder.phase(Phase::Renew);
    old.kill().map_err(change.file_error("qemu"))?;
    fault::point("saved.renew.old-gone", Some(&old), None);
    change.recorder.step("end the old QEMU");
    ram::renew(&rundir, &change.held.state.hardware)?;
    let (hardware, generation) = (&change.held.state.hardware, journal.operation.generation);
    let (new, mut qmp) =
        start_from_disk(&rundir, hardware, &change.binary, (generation, saved), network::reopen(hardware)?)?;
    change.recorder.step("load from disk");
    fault::point("saved.renew.loaded", Some(&old), Some(&new));
    let mut journal = journal;
    change.recorder.phase(Phase::Resume);
    journal.operation.disks_at_resume = handover::disk_times(&change.held.state.hardware);
    journal.advance(Step::Resume).map_err(change.file_error("operation.json"))?;
    fault::point("saved.resume.journalled", Some(&old), Some(&new));
    let resumed = resume(&mut qmp, change.running)?;
    change.recorder.step("resume");
    fault::point("saved.resume.resumed", Some(&old), Some(&new));
    network::forward_ports(&mut qmp, &change.held.state.hardware);
    change.recorder.phase(Phase::Settle);
    journal.operation.disks_at_resume = None;
    journal.advance(Step::Settle).map_err(change.file_error("operation.json"))?;
    if !new.is_alive() {
        let said = log_tail(&new.directory(), 10);
        return Err(RebootError::DiedRunning { name: rundir.name().into(), said });
    }
    let state = change.held.state.clone();
    // The guest runs: its old state is of no use, and must not outlive the journal that names it.
    let _ = fs::remove_file(&saved.path);
    let state = switch::settle(&rundir, state, None, &new, &qmp, journal, None)?;
    change.recorder.step("record");
    fault::point("saved.settle.recorded", Some(&old), Some(&new));
    change.recorder.write(&rundir);
    Ok(change.report(&new, &state, (stopped, resumed), None))
}

/// Start a QEMU, of a generation, from a state that holds all of the guest's RAM; the RAM file must have been renewed.
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
    let new = Vmm::spawn(&binary.path, &arguments, &directory, taps)?;
    fault::point("saved.renew.spawned", None, Some(&new));
    let load = || -> Result<Qmp, RebootError> {
        let mut qmp = new.connect(vmm::START)?;
        load_from_file(&mut qmp, &file, handover::LOAD)?;
        Ok(qmp)
    };
    match load() {
        Ok(qmp) => Ok((new, qmp)),
        Err(source) => {
            let _ = new.kill();
            let said = log_tail(&new.directory(), 10);
            let doing = "load the saved state";
            Err(RebootError::NewFailed { name: name.into(), doing, said, source: Box::new(source) })
        }
    }
}
