//! Finish or undo an operation that was cut off.
//!
//! What is alive and what is on disk decides, in this order:
//!
//! 1. The new QEMU runs the guest: it is finished.
//! 2. The old QEMU is there and the guest has not run in the new one: it goes on in the old one.
//! 3. The saved state is whole and the guest has not run since: a fresh QEMU is started from it.
//! 4. Otherwise the guest's memory is lost; that is said, and the guest is booted from its disks.

use super::answer::{self, Patience};
use super::handover::Taps;
use super::{RUN_STATE_PATIENCE, RebootError, handover, resume, saved, switch};
use rekindle_kernel::sched;
use rekindle_protect::moving::settle::{Settled, settle};
use rekindle_qemu::command::Start;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::vmm::{self, Vmm};
use rekindle_vm::disks;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind, Step};
use rekindle_vm::life::{self, Held, LifeError};
use rekindle_vm::lock::RunState;
use rekindle_vm::network;
use rekindle_vm::phases;
use rekindle_vm::ram;
use rekindle_vm::state::State;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// What `recover` did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Recovered {
    /// There was nothing to do.
    Nothing,
    /// A checkpoint that was cut off had left the guest stopped; it goes on.
    Unpaused,
    /// The server of a disk had ended; it is there again.
    Served,
    /// The operation was undone: the guest runs in the QEMU that it ran in before, with its memory.
    Undone,
    /// The operation was finished: the guest runs in the new QEMU, with its memory.
    Finished,
    /// The guest was started again from its saved state, with its memory.
    FromState,
    /// A start or a cold reboot was finished: the guest was booted, as was wanted.
    Started,
    /// The guest's memory was lost; it was booted from its disks.
    Booted,
    /// A QEMU was prepared for a restore, as was wanted.
    Prepared,
    /// A move was undone: the guest goes on here.
    MovedBack,
    /// A move was finished: the guest runs on the other host, and nothing of it is left here.
    MovedAway,
    /// The VM is gone, as was wanted, or because it had never been started.
    Removed,
}

impl std::fmt::Display for Recovered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Nothing => "there was nothing to recover",
            Self::Unpaused => "a checkpoint or a suspend that was cut off had left the guest stopped; it goes on",
            Self::Served => "the server of a disk had ended; it is there again",
            Self::Undone => "undone: the guest runs in the QEMU that it ran in before, with its memory",
            Self::Finished => "finished: the guest runs in the new QEMU, with its memory",
            Self::FromState => "the guest was started again from its saved state, with its memory",
            Self::Started => "finished: the guest was booted",
            Self::Booted => "the guest's memory was lost; it was booted from its disks",
            Self::Prepared => "finished: a QEMU waits for a checkpoint",
            Self::MovedBack => "undone: the guest goes on here, with its memory",
            Self::MovedAway => "finished: the guest runs on the other host, and nothing of it is left here",
            Self::Removed => "the VM is removed",
        })
    }
}

/// Finish or undo what an operation on VM `name` left behind, or boot a guest whose QEMU has died.
///
/// *Needs:* nothing else at work on the VM.
/// *On success:* as [`Recovered`] says; exactly one QEMU runs the guest.
/// *On failure:* nothing runs that did not before; it can be done again.
///
/// # Errors
/// [`RebootError`]; [`RebootError::Silent`] if a QEMU that may run the guest does not answer.
pub fn recover(host: &Host, name: &str, patience: Patience) -> Result<Recovered, RebootError> {
    let (held, journal) = Held::take_anyhow(host, name, "recover")?;
    let _run_state = RunState::acquire(&held.rundir, RUN_STATE_PATIENCE).map_err(life::LifeError::from)?;
    let Some(journal) = journal else { return recover_idle(host, &held, patience) };
    answer::require(&held, &journal.operation, patience)?;
    for vmm in [&journal.operation.from, &journal.operation.to].into_iter().flatten().filter(|vmm| vmm.is_alive()) {
        // A hand-over that was cut off has left its threads first; harmless, and not to stay.
        let _ = sched::normal(vmm.process());
    }
    let recovered = match journal.operation.kind {
        Kind::Run => recover_run(host, &held, journal),
        Kind::Prepare => recover_prepare(host, &held, journal),
        Kind::Restore => recover_restore(host, &held, journal),
        Kind::Move => recover_move(host, &held, journal),
        Kind::Stop => {
            life::clean_up(host, &held.rundir, &held.state)?;
            Ok(Recovered::Removed)
        }
        Kind::HostWarm | Kind::HostSaved | Kind::HostCold => return crate::host::recover(host, &held, journal),
        Kind::OsKexec => recover_kexec(&held, journal, patience.force),
        // A candidate whose guest was not let go is booted instead.
        Kind::VmmCold | Kind::OsCold | Kind::OsWarmCache | Kind::OsPhase => recover_cold(&held, journal),
        Kind::VmmWarm | Kind::VmmSaved => recover_carried(&held, journal),
    }?;
    forget_saved(host, &held);
    Ok(recovered)
}

/// A VM on which no operation was under way.
fn recover_idle(host: &Host, held: &Held, patience: Patience) -> Result<Recovered, RebootError> {
    if let Ok(vmm) = held.vmm()
        && held.state.hardware.disks.iter().any(|disk| disk.server)
    {
        if has_ended(vmm, patience.wait) {
            return boot_ended(held, vmm);
        }
        // It was asked, and may have been about to end.
        vmm.wait_released().map_err(|source| file(held, source))?;
    }
    match held.vmm() {
        Ok(vmm) => {
            forget_saved(host, held);
            // Its guest waits for it, and may not answer before.
            let served = disks::start(&held.rundir, &held.state.hardware).map_err(LifeError::from)?;
            // Of one that Rekindle has not started, the only monitor may be its protector's.
            if held.state.attached.is_none() && !answer::wait(held.rundir.name(), vmm, patience)? {
                return boot_lost(held);
            }
            match end_pause(held, vmm)? {
                Recovered::Nothing if served > 0 => Ok(Recovered::Served),
                recovered => Ok(recovered),
            }
        }
        // What it was started with is not ours to do again.
        Err(_) if held.state.attached.is_some() => {
            held.refuse_attached("starting it again, as its QEMU has ended")?;
            Ok(Recovered::Nothing)
        }
        Err(LifeError::Prepared { .. }) => Ok(Recovered::Nothing),
        // A start that was cut off before it began, or a QEMU that has waited and ended.
        Err(_) if held.state.vmm.is_none() => {
            life::clean_up(host, &held.rundir, &held.state)?;
            Ok(Recovered::Removed)
        }
        Err(_) => boot_lost(held),
    }
}

/// Boots a guest whose QEMU has ended with the guest's memory.
fn boot_lost(held: &Held) -> Result<Recovered, RebootError> {
    let generation = held.state.generation + 1;
    let journal = Journal::open(&held.rundir, Kind::VmmCold, held.state.vmm.clone(), generation);
    lose(held, journal.map_err(|source| file(held, source))?, None)
}

/// Whether a guest has rebooted itself or panicked, and QEMU was told to stop there; who was to boot it has died.
fn has_ended(vmm: &Vmm, wait: Duration) -> bool {
    let state = vmm.connect(wait).map_err(RebootError::from).and_then(|mut qmp| Ok(life::run_state(&mut qmp)?));
    state.is_ok_and(|state| life::SHUT_DOWN.contains(&state.as_str()))
}

/// Boot it.
fn boot_ended(held: &Held, vmm: &Vmm) -> Result<Recovered, RebootError> {
    let generation = held.state.generation + 1;
    let journal = Journal::open(&held.rundir, Kind::OsWarmCache, held.state.vmm.clone(), generation);
    let mut journal = journal.map_err(|source| file(held, source))?;
    journal.advance(Step::Suspend).map_err(|source| file(held, source))?;
    life::shut_down(vmm, held.state.definition.shutdown_timeout.as_duration())?;
    boot(held, journal, Recovered::Started, None)
}

/// Let a guest go on whose checkpoint was cut off in the pause.
pub(super) fn end_pause(held: &Held, vmm: &Vmm) -> Result<Recovered, RebootError> {
    let mark = held.rundir.paused();
    if !mark.exists() {
        return Ok(Recovered::Nothing);
    }
    // Its threads may still go before all others.
    let _ = sched::normal(vmm.process());
    let mut qmp = vmm.connect(vmm::START)?;
    if life::run_state(&mut qmp)? == "paused" {
        resume(&mut qmp, true)?;
    }
    std::fs::remove_file(&mark).map_err(|source| RebootError::File { path: mark, source })?;
    Ok(Recovered::Unpaused)
}

/// Remove a saved state that nobody needs: the guest runs. Also one that was cut off before a journal named it, or that
/// a recovery left which was itself cut off.
fn forget_saved(host: &Host, held: &Held) {
    let _ = std::fs::remove_file(life::saved_path(host, &held.rundir, &held.state.definition));
}

fn file(held: &Held, source: std::io::Error) -> RebootError {
    RebootError::File { path: held.rundir.path().to_owned(), source }
}

/// A start is finished if the QEMU was recorded, else undone.
fn recover_run(host: &Host, held: &Held, journal: Journal) -> Result<Recovered, RebootError> {
    if held.vmm().is_ok() {
        journal.close().map_err(|source| file(held, source))?;
        return Ok(Recovered::Started);
    }
    life::clean_up(host, &held.rundir, &held.state)?;
    Ok(Recovered::Removed)
}

/// A preparation is finished if its QEMU was recorded, else undone.
fn recover_prepare(host: &Host, held: &Held, journal: Journal) -> Result<Recovered, RebootError> {
    if let Err(LifeError::Prepared { .. }) = held.vmm() {
        journal.close().map_err(|source| file(held, source))?;
        return Ok(Recovered::Prepared);
    }
    life::clean_up(host, &held.rundir, &held.state)?;
    Ok(Recovered::Removed)
}

/// A move is settled by who owns the store; of a guest whose QEMU has died before the other host was told, the memory is lost.
fn recover_move(host: &Host, held: &Held, journal: Journal) -> Result<Recovered, RebootError> {
    if journal.operation.step < Step::Resume && !journal.operation.from.as_ref().is_some_and(Vmm::is_alive) {
        return lose(held, journal, None);
    }
    Ok(match settle(host, held, journal)? {
        Settled::Back => Recovered::MovedBack,
        Settled::Away => Recovered::MovedAway,
    })
}

/// A restore is finished if its guest was let go, else undone: the checkpoint is where it was.
fn recover_restore(host: &Host, held: &Held, journal: Journal) -> Result<Recovered, RebootError> {
    let failed = |source| file(held, source);
    let to = journal.operation.to.clone().filter(Vmm::is_alive);
    if let Some(vmm) = to.filter(|_| journal.operation.step >= Step::Resume) {
        let mut qmp = vmm.connect(vmm::START)?;
        if life::run_state(&mut qmp)? != "running" {
            resume(&mut qmp, true)?;
        }
        let state =
            State { version: Some(qmp.version().clone()), vmm: Some(vmm), prepared: None, ..held.state.clone() };
        state.write(&held.rundir).map_err(failed)?;
        journal.close().map_err(failed)?;
        network::forward_ports(&mut qmp, &held.state.hardware);
        return Ok(Recovered::Finished);
    }
    life::clean_up(host, &held.rundir, &held.state)?;
    Ok(Recovered::Removed)
}

/// A guest that was to start another kernel: it has, or goes on as it was, or is booted.
fn recover_kexec(held: &Held, mut journal: Journal, force: bool) -> Result<Recovered, RebootError> {
    match crate::os::recover_kexec(held, &journal, force)? {
        Some(another) => {
            journal.close().map_err(|source| file(held, source))?;
            Ok(if another { Recovered::Started } else { Recovered::Undone })
        }
        None => {
            journal.operation.kind = Kind::OsCold;
            journal.advance(Step::Suspend).map_err(|source| file(held, source))?;
            recover_cold(held, journal)
        }
    }
}

/// A cold reboot, or a boot after a loss.
pub(crate) fn recover_cold(held: &Held, journal: Journal) -> Result<Recovered, RebootError> {
    let generation = journal.operation.generation;
    let lost = journal.operation.lost;
    if journal.operation.step >= Step::Resume
        && let Some((new, qmp)) = alive(held, generation)?
    {
        return finish(held, journal, &new, qmp, if lost { Recovered::Booted } else { Recovered::Started });
    }
    switch::end_generation(&held.rundir, generation)?;
    if lost {
        return lose(held, journal, None);
    }
    if let Some(old) = journal.operation.from.as_ref().filter(|old| old.is_alive()) {
        if journal.operation.step == Step::Prepare {
            // A QEMU may have waited beside it.
            ram::forget_waiting(&held.state.hardware)?;
            let _ = std::fs::remove_dir_all(held.rundir.vmm(generation).0);
            journal.close().map_err(|source| file(held, source))?;
            return Ok(Recovered::Undone);
        }
        // It may have been asked to shut down already, and would be gone in a moment.
        life::shut_down(old, held.state.definition.shutdown_timeout.as_duration())?;
    }
    // A guest that shut itself down has lost nothing; it is booted as was wanted.
    boot(held, journal, Recovered::Started, None)
}

/// The QEMU of `generation`, if it runs.
fn alive(held: &Held, generation: u32) -> Result<Option<(Vmm, Qmp)>, RebootError> {
    let Some(vmm) = answer::of_generation(held, generation)? else { return Ok(None) };
    match vmm.connect(vmm::START) {
        Ok(qmp) => Ok(Some((vmm, qmp))),
        Err(_) if vmm.process().wait_end(Duration::ZERO).map_err(|source| file(held, source))? => Ok(None),
        Err(_) => Err(RebootError::Silent { name: held.rundir.name().into(), pid: vmm.pid, waited: vmm::START }),
    }
}

/// A warm or saved reboot.
pub(crate) fn recover_carried(held: &Held, mut journal: Journal) -> Result<Recovered, RebootError> {
    let operation = journal.operation.clone();
    let generation = operation.generation;
    // The decision for the new QEMU was written: it is asked whether it obeyed.
    if operation.step >= Step::Resume
        && let Some((new, qmp)) = alive(held, generation)?
    {
        return finish(held, journal, &new, qmp, Recovered::Finished);
    }
    switch::end_generation(&held.rundir, generation)?;

    let ram = &held.state.hardware.ram.path;
    let with_ram = operation.saved.as_ref().is_some_and(|saved| !saved.without_ram);
    let has_not_run = match operation.step {
        Step::Prepare | Step::Suspend | Step::Saved => true,
        Step::Resume if with_ram => {
            let times = handover::disk_times(&held.state.hardware);
            operation.disks_at_resume.is_some() && times == operation.disks_at_resume
        }
        Step::Resume => handover::untouched(ram, operation.untouched_since_ns),
        Step::Settle => false,
    };
    let old = operation.from.clone().filter(Vmm::is_alive);
    match (old, operation.saved) {
        (Some(old), _) if has_not_run => {
            switch::back(&held.rundir, &old, journal, operation.running)?;
            Ok(Recovered::Undone)
        }
        (_, Some(saved)) if has_not_run => {
            let hardware = &held.state.hardware;
            let start = |binary: &Path| {
                let binary = &held.rundir.binary(binary)?;
                if with_ram {
                    ram::renew(&held.rundir, hardware)?;
                    saved::start_from_disk(
                        &held.rundir,
                        hardware,
                        binary,
                        (generation, &saved),
                        network::reopen(hardware)?,
                    )
                } else {
                    handover::start_from(
                        &held.rundir,
                        hardware,
                        binary,
                        (generation, &saved),
                        network::reopen(hardware)?,
                    )
                }
            };
            let from = operation.from.as_ref().map_or(&held.state.definition.qemu, |vmm| &vmm.binary);
            let to = operation.to.as_ref().map_or(from, |vmm| &vmm.binary);
            let (new, qmp) = match start(to) {
                // The new binary may be what is wrong; the old one has run this guest.
                Err(error @ (RebootError::NewFailed { .. } | RebootError::Vmm(_))) if to != from => {
                    tracing::warn!("{error}; trying {}", from.display());
                    start(from)?
                }
                started => started?,
            };
            journal.operation.to = Some(new.clone());
            journal.operation.untouched_since_ns = handover::mark(ram).filter(|_| !with_ram);
            journal.operation.disks_at_resume = handover::disk_times(hardware).filter(|_| with_ram);
            journal.advance(Step::Resume).map_err(|source| file(held, source))?;
            finish(held, journal, &new, qmp, Recovered::FromState)
        }
        _ => lose(held, journal, None),
    }
}

/// On with the new QEMU, told to go on if it was not yet.
pub(crate) fn finish(
    held: &Held,
    mut journal: Journal,
    new: &Vmm,
    mut qmp: Qmp,
    recovered: Recovered,
) -> Result<Recovered, RebootError> {
    let operation = journal.operation.clone();
    // What told it to go on may have died while it loads: it goes on by itself then, or stays paused.
    let deadline = Instant::now() + handover::LOAD;
    let mut run_state = life::run_state(&mut qmp)?;
    while run_state == "inmigrate" && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(10));
        run_state = life::run_state(&mut qmp)?;
    }
    if operation.running && run_state != "running" {
        resume(&mut qmp, true)?;
    }
    if !new.is_alive() {
        let said = vmm::log_tail(&new.directory(), 10);
        return Err(RebootError::DiedRunning { name: held.rundir.name().into(), said });
    }
    // The binary as it was named, not as the kernel resolves it.
    let new = operation.to.filter(|to| to.pid == new.pid && to.started == new.started).unwrap_or_else(|| new.clone());
    journal.advance(Step::Settle).map_err(|source| file(held, source))?;
    let old = operation.from.filter(|old| old.is_alive() && old.pid != new.pid);
    switch::settle(&held.rundir, held.state.clone(), old.as_ref(), &new, &qmp, journal, None)?;
    network::forward_ports(&mut qmp, &held.state.hardware);
    Ok(recovered)
}

/// The guest's memory is lost: that is written down first, so that a recovery which is cut off here still says it.
pub(crate) fn lose(held: &Held, mut journal: Journal, taps: Option<Taps>) -> Result<Recovered, RebootError> {
    if let Some(old) = journal.operation.from.as_ref().filter(|old| old.is_alive()) {
        old.kill().map_err(|source| file(held, source))?;
    }
    if let Some(saved) = journal.operation.saved.take() {
        let _ = std::fs::remove_file(saved.path);
    }
    journal.operation.kind = Kind::VmmCold;
    journal.operation.lost = true;
    journal.operation.running = true;
    journal.advance(Step::Suspend).map_err(|source| file(held, source))?;
    boot(held, journal, Recovered::Booted, taps)
}

/// Boot the guest from its disks in a new QEMU with new RAM, with `taps` or, where none are given, its taps opened again.
pub(crate) fn boot(
    held: &Held,
    mut journal: Journal,
    recovered: Recovered,
    taps: Option<Taps>,
) -> Result<Recovered, RebootError> {
    let hardware = &held.state.hardware;
    let generation = journal.operation.generation;
    // However it came to its end: what its disks' servers know of its memory is compared with the disk before it is given out.
    ram::renew_keeping_cache(&held.rundir, hardware)?;
    disks::start(&held.rundir, hardware).map_err(LifeError::from)?;
    phases::begin(&held.rundir, hardware, &held.state.definition);
    let directory = held.rundir.create_vmm(generation).map_err(|source| file(held, source))?;
    let fds = taps.map_or_else(|| network::reopen(hardware), Ok)?;
    let binary = held.rundir.binary(held.state.vmm.as_ref().map_or(&held.state.definition.qemu, |vmm| &vmm.binary))?;
    let arguments = hardware.arguments(&directory, &held.rundir.console_log(), Start::Paused, binary.syntax);
    let vmm = Vmm::spawn(&binary.path, &arguments, &directory, fds)?;
    let qmp = vmm.connect(vmm::START)?;
    journal.operation.to = Some(vmm.clone());
    journal.advance(Step::Resume).map_err(|source| file(held, source))?;
    finish(held, journal, &vmm, qmp, recovered)
}
