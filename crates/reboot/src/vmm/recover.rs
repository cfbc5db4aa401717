//! Finishes or undoes an interrupted operation.
//!
//! The live processes and the files decide, in this order:
//!
//! 1. The destination QEMU runs the guest: the operation is finished.
//! 2. The source QEMU lives and the guest has not run in the destination: it resumes in the source.
//! 3. The saved state is complete and the guest has not run since: a new QEMU is started from it.
//! 4. Otherwise the guest's memory is lost: that is reported, and the guest is booted from its disks.

use super::answer::{self, SilentQemuPolicy};
use super::handover::Taps;
use super::{RUN_STATE_TIMEOUT, RebootError, handover, resume, saved, switch};
use rekindle_kernel::sched;
use rekindle_protect::moving::settle::{Settled, settle};
use rekindle_qemu::command::Start;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::vmm::{self, Vmm};
use rekindle_vm::cleanup::clean_up;
use rekindle_vm::disks;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind, Step};
use rekindle_vm::life::Held;
use rekindle_vm::lock::RunState;
use rekindle_vm::names::saved_path;
use rekindle_vm::network;
use rekindle_vm::phases;
use rekindle_vm::qemu::{self, SHUT_DOWN};
use rekindle_vm::ram;
use rekindle_vm::shutdown;
use rekindle_vm::state::State;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// What `recover` did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Recovered {
    Nothing,
    /// An interrupted checkpoint had left the guest stopped; it was resumed.
    Unpaused,
    /// A disk server had ended; it was started again.
    Served,
    /// The operation was undone: the guest runs in the source QEMU, with its memory.
    Undone,
    /// The operation was finished: the guest runs in the destination QEMU, with its memory.
    Finished,
    /// The guest was resumed from its saved state, with its memory.
    FromState,
    /// A start or a cold reboot was finished: the guest was booted.
    Started,
    /// The guest's memory was lost, and it was booted from its disks.
    Booted,
    /// A preparation was finished: a QEMU waits for a restore.
    Prepared,
    /// A move was undone: the guest runs on this host.
    MovedBack,
    /// A move was finished: the guest runs on the other host, and nothing of it remains here.
    MovedAway,
    /// The VM was removed: a stop was finished, or a start was undone.
    Removed,
}

impl std::fmt::Display for Recovered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Nothing => "there was nothing to recover",
            Self::Unpaused => "an interrupted checkpoint or suspend had left the guest stopped; it was resumed",
            Self::Served => "a disk server had ended; it was started again",
            Self::Undone => "undone: the guest runs in the same QEMU as before, with its memory",
            Self::Finished => "finished: the guest runs in the destination QEMU, with its memory",
            Self::FromState => "the guest was resumed from its saved state, with its memory",
            Self::Started => "finished: the guest was booted",
            Self::Booted => "the guest's memory was lost; it was booted from its disks",
            Self::Prepared => "finished: a QEMU waits for a checkpoint",
            Self::MovedBack => "undone: the guest runs on this host, with its memory",
            Self::MovedAway => "finished: the guest runs on the other host, and nothing of it remains here",
            Self::Removed => "the VM is removed",
        })
    }
}

/// Finishes or undoes an interrupted operation on VM `name`, or boots a guest whose QEMU has died.
///
/// *Needs:* no other operation on the VM.
/// *On success:* as [`Recovered`] states; exactly one QEMU runs the guest.
/// *On failure:* no additional QEMU runs; the recovery can be repeated.
///
/// # Errors
/// [`RebootError`]; [`RebootError::Silent`] if a QEMU that may run the guest does not answer.
pub fn recover(host: &Host, name: &str, policy: SilentQemuPolicy) -> Result<Recovered, RebootError> {
    let (held, journal) = Held::take_anyhow(host, name, "recover")?;
    let _run_state = RunState::acquire(&held.rundir, RUN_STATE_TIMEOUT).map_err(LifeError::from)?;
    let Some(journal) = journal else { return recover_idle(host, &held, policy) };
    answer::require_answers(&held, &journal.operation, policy)?;
    for vmm in [&journal.operation.from, &journal.operation.to].into_iter().flatten().filter(|vmm| vmm.is_alive()) {
        // An interrupted hand-over has left its threads at raised priority: harmless, but not meant to last.
        let _ = sched::normal(vmm.process());
    }
    let recovered = match journal.operation.kind {
        Kind::Run => recover_run(host, &held, journal),
        Kind::Prepare => recover_prepare(host, &held, journal),
        Kind::Restore => recover_restore(host, &held, journal),
        Kind::Move => recover_move(host, &held, journal),
        Kind::Stop => {
            clean_up(host, &held.rundir, &held.state)?;
            Ok(Recovered::Removed)
        }
        Kind::HostWarm | Kind::HostSaved | Kind::HostCold => return crate::host::recover(host, &held, journal),
        Kind::OsKexec => recover_kexec(&held, journal, policy.force),
        // A guest that was not yet resumed from a boot snapshot is booted instead.
        Kind::VmmCold | Kind::OsCold | Kind::OsWarmCache | Kind::OsPhase => recover_cold(&held, journal),
        Kind::VmmWarm | Kind::VmmSaved => recover_handover(&held, journal),
    }?;
    forget_saved(host, &held);
    Ok(recovered)
}

/// Recovers a VM that has no interrupted operation.
fn recover_idle(host: &Host, held: &Held, policy: SilentQemuPolicy) -> Result<Recovered, RebootError> {
    if let Ok(vmm) = held.vmm()
        && held.state.hardware.disks.iter().any(|disk| disk.server)
    {
        if guest_has_ended(vmm, policy.wait) {
            return boot_ended(held, vmm);
        }
        // It may have been about to end when it was queried.
        vmm.wait_released().map_err(|source| file(held, source))?;
    }
    match held.vmm() {
        Ok(vmm) => {
            forget_saved(host, held);
            // Start disk servers first: the guest waits for its disks, and QEMU may not answer before.
            let served = disks::start(&held.rundir, &held.state.hardware).map_err(LifeError::from)?;
            // The protector may use the only monitor of an adopted QEMU.
            if held.state.attached.is_none() && !answer::wait_for_answer(held.rundir.name(), vmm, policy)? {
                return boot_lost(held);
            }
            match end_pause(held, vmm)? {
                Recovered::Nothing if served > 0 => Ok(Recovered::Served),
                recovered => Ok(recovered),
            }
        }
        // Rekindle does not know how an adopted QEMU was started.
        Err(_) if held.state.attached.is_some() => {
            held.refuse_attached("starting it again, as its QEMU has ended")?;
            Ok(Recovered::Nothing)
        }
        Err(LifeError::Prepared { .. }) => Ok(Recovered::Nothing),
        // A start that was interrupted before it began, or a QEMU that waited for a restore and ended.
        Err(_) if held.state.vmm.is_none() => {
            clean_up(host, &held.rundir, &held.state)?;
            Ok(Recovered::Removed)
        }
        Err(_) => boot_lost(held),
    }
}

/// Boots a guest whose memory was lost with its QEMU.
fn boot_lost(held: &Held) -> Result<Recovered, RebootError> {
    let generation = held.state.generation + 1;
    let journal = Journal::open(&held.rundir, Kind::VmmCold, held.state.vmm.clone(), generation);
    boot_after_loss(held, journal.map_err(|source| file(held, source))?, None)
}

/// Returns whether a guest has rebooted itself, powered off or panicked, and QEMU has stopped there as configured. The
/// process that would have booted it has died.
fn guest_has_ended(vmm: &Vmm, wait: Duration) -> bool {
    let state = vmm.connect(wait).map_err(RebootError::from).and_then(|mut qmp| Ok(qemu::run_state(&mut qmp)?));
    state.is_ok_and(|state| SHUT_DOWN.contains(&state.as_str()))
}

fn boot_ended(held: &Held, vmm: &Vmm) -> Result<Recovered, RebootError> {
    let generation = held.state.generation + 1;
    let journal = Journal::open(&held.rundir, Kind::OsWarmCache, held.state.vmm.clone(), generation);
    let mut journal = journal.map_err(|source| file(held, source))?;
    journal.advance(Step::Suspend).map_err(|source| file(held, source))?;
    shutdown::shut_down(vmm, held.state.definition.shutdown_timeout.as_duration())?;
    boot(held, journal, Recovered::Started, None)
}

/// Resumes a guest that an interrupted checkpoint left stopped.
pub(super) fn end_pause(held: &Held, vmm: &Vmm) -> Result<Recovered, RebootError> {
    let mark = held.rundir.paused();
    if !mark.exists() {
        return Ok(Recovered::Nothing);
    }
    // Its threads may still have raised priority.
    let _ = sched::normal(vmm.process());
    let mut qmp = vmm.connect(vmm::START)?;
    if qemu::run_state(&mut qmp)? == "paused" {
        resume(&mut qmp, true)?;
    }
    std::fs::remove_file(&mark).map_err(|source| RebootError::File { path: mark, source })?;
    Ok(Recovered::Unpaused)
}

/// Removes a saved state that is not needed because the guest runs, also one that an interrupted operation or recovery
/// left without naming it in a journal.
fn forget_saved(host: &Host, held: &Held) {
    let _ = std::fs::remove_file(saved_path(host, &held.rundir, &held.state.definition));
}

fn file(held: &Held, source: std::io::Error) -> RebootError {
    RebootError::File { path: held.rundir.path().to_owned(), source }
}

/// Finishes a start if its QEMU was recorded, else undoes it.
fn recover_run(host: &Host, held: &Held, journal: Journal) -> Result<Recovered, RebootError> {
    if held.vmm().is_ok() {
        journal.close().map_err(|source| file(held, source))?;
        return Ok(Recovered::Started);
    }
    clean_up(host, &held.rundir, &held.state)?;
    Ok(Recovered::Removed)
}

/// Finishes a preparation if its QEMU was recorded, else undoes it.
fn recover_prepare(host: &Host, held: &Held, journal: Journal) -> Result<Recovered, RebootError> {
    if let Err(LifeError::Prepared { .. }) = held.vmm() {
        journal.close().map_err(|source| file(held, source))?;
        return Ok(Recovered::Prepared);
    }
    clean_up(host, &held.rundir, &held.state)?;
    Ok(Recovered::Removed)
}

/// Settles a move by the owner of the store. If the guest's QEMU died before the other host was notified, the memory is
/// lost.
fn recover_move(host: &Host, held: &Held, journal: Journal) -> Result<Recovered, RebootError> {
    if journal.operation.step < Step::Resume && !journal.operation.from.as_ref().is_some_and(Vmm::is_alive) {
        return boot_after_loss(held, journal, None);
    }
    Ok(match settle(host, held, journal)? {
        Settled::ResumedHere => Recovered::MovedBack,
        Settled::RunsThere => Recovered::MovedAway,
    })
}

/// Finishes a restore if its guest was resumed, else undoes it: the checkpoint is still in the store.
fn recover_restore(host: &Host, held: &Held, journal: Journal) -> Result<Recovered, RebootError> {
    let failed = |source| file(held, source);
    let to = journal.operation.to.clone().filter(Vmm::is_alive);
    if let Some(vmm) = to.filter(|_| journal.operation.step >= Step::Resume) {
        let mut qmp = vmm.connect(vmm::START)?;
        if qemu::run_state(&mut qmp)? != "running" {
            resume(&mut qmp, true)?;
        }
        let state =
            State { version: Some(qmp.version().clone()), vmm: Some(vmm), prepared: None, ..held.state.clone() };
        state.write(&held.rundir).map_err(failed)?;
        journal.close().map_err(failed)?;
        network::forward_ports(&mut qmp, &held.state.hardware);
        return Ok(Recovered::Finished);
    }
    clean_up(host, &held.rundir, &held.state)?;
    Ok(Recovered::Removed)
}

/// Recovers a kexec: the guest has started the other kernel, or runs as before, or is booted.
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

/// Recovers a cold reboot, or a boot after a loss of memory.
pub(crate) fn recover_cold(held: &Held, journal: Journal) -> Result<Recovered, RebootError> {
    let generation = journal.operation.generation;
    let lost = journal.operation.lost;
    if journal.operation.step >= Step::Resume
        && let Some((destination_qemu, qmp)) = running_destination(held, generation)?
    {
        return finish(
            held,
            journal,
            &destination_qemu,
            qmp,
            if lost { Recovered::Booted } else { Recovered::Started },
        );
    }
    switch::end_generation(&held.rundir, generation)?;
    if lost {
        return boot_after_loss(held, journal, None);
    }
    if let Some(source_qemu) = journal.operation.from.as_ref().filter(|source_qemu| source_qemu.is_alive()) {
        if journal.operation.step == Step::Prepare {
            // A successor QEMU may have waited, with RAM of its own.
            ram::forget_waiting(&held.state.hardware)?;
            let _ = std::fs::remove_dir_all(held.rundir.vmm(generation).0);
            journal.close().map_err(|source| file(held, source))?;
            return Ok(Recovered::Undone);
        }
        // The guest may already be shutting down.
        shutdown::shut_down(source_qemu, held.state.definition.shutdown_timeout.as_duration())?;
    }
    // A guest that shut itself down has lost nothing.
    boot(held, journal, Recovered::Started, None)
}

/// Returns the QEMU of `generation` with a connection to it, if it runs.
fn running_destination(held: &Held, generation: u32) -> Result<Option<(Vmm, Qmp)>, RebootError> {
    let Some(vmm) = answer::of_generation(held, generation)? else { return Ok(None) };
    match vmm.connect(vmm::START) {
        Ok(qmp) => Ok(Some((vmm, qmp))),
        Err(_) if vmm.process().wait_end(Duration::ZERO).map_err(|source| file(held, source))? => Ok(None),
        Err(_) => Err(RebootError::Silent { name: held.rundir.name().into(), pid: vmm.pid, waited: vmm::START }),
    }
}

/// Recovers a warm or saved reboot.
pub(crate) fn recover_handover(held: &Held, mut journal: Journal) -> Result<Recovered, RebootError> {
    let operation = journal.operation.clone();
    let generation = operation.generation;
    // The decision for the destination QEMU was journalled: check whether it runs the guest.
    if operation.step >= Step::Resume
        && let Some((destination_qemu, qmp)) = running_destination(held, generation)?
    {
        return finish(held, journal, &destination_qemu, qmp, Recovered::Finished);
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
        Step::Resume => handover::is_untouched(ram, operation.untouched_since_ns),
        Step::Settle => false,
    };
    let source_qemu = operation.from.clone().filter(Vmm::is_alive);
    match (source_qemu, operation.saved) {
        (Some(source_qemu), _) if has_not_run => {
            switch::return_to_source(&held.rundir, &source_qemu, journal, operation.running)?;
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
            let (destination_qemu, qmp) = match start(to) {
                // The new binary may be the cause; the previous one has run this guest.
                Err(error @ (RebootError::DestinationFailed { .. } | RebootError::Vmm(_))) if to != from => {
                    tracing::warn!("{error}; trying {}", from.display());
                    start(from)?
                }
                started => started?,
            };
            journal.operation.to = Some(destination_qemu.clone());
            journal.operation.untouched_since_ns = handover::mark_ram(ram).filter(|_| !with_ram);
            journal.operation.disks_at_resume = handover::disk_times(hardware).filter(|_| with_ram);
            journal.advance(Step::Resume).map_err(|source| file(held, source))?;
            finish(held, journal, &destination_qemu, qmp, Recovered::FromState)
        }
        _ => boot_after_loss(held, journal, None),
    }
}

/// Finishes with the destination QEMU: resumes the guest in it if necessary.
pub(crate) fn finish(
    held: &Held,
    mut journal: Journal,
    destination_qemu: &Vmm,
    mut qmp: Qmp,
    recovered: Recovered,
) -> Result<Recovered, RebootError> {
    let operation = journal.operation.clone();
    // The process that sent `cont` may have died during the load: the QEMU resumes the guest by itself then, or stays
    // paused.
    let deadline = Instant::now() + handover::LOAD_TIMEOUT;
    let mut run_state = qemu::run_state(&mut qmp)?;
    while run_state == "inmigrate" && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(10));
        run_state = qemu::run_state(&mut qmp)?;
    }
    if operation.running && run_state != "running" {
        resume(&mut qmp, true)?;
    }
    if !destination_qemu.is_alive() {
        let log = vmm::log_tail(&destination_qemu.directory(), 10);
        return Err(RebootError::DiedRunning { name: held.rundir.name().into(), log });
    }
    // Record the binary by the name given, not as the kernel resolves it.
    let destination_qemu = operation
        .to
        .filter(|to| to.pid == destination_qemu.pid && to.started == destination_qemu.started)
        .unwrap_or_else(|| destination_qemu.clone());
    journal.advance(Step::Settle).map_err(|source| file(held, source))?;
    let source_qemu =
        operation.from.filter(|source_qemu| source_qemu.is_alive() && source_qemu.pid != destination_qemu.pid);
    switch::settle(&held.rundir, held.state.clone(), source_qemu.as_ref(), &destination_qemu, &qmp, journal, None)?;
    network::forward_ports(&mut qmp, &held.state.hardware);
    Ok(recovered)
}

/// Boots a guest whose memory is lost. The loss is journalled first, so that a recovery that is interrupted here still
/// reports it.
pub(crate) fn boot_after_loss(held: &Held, mut journal: Journal, taps: Option<Taps>) -> Result<Recovered, RebootError> {
    if let Some(source_qemu) = journal.operation.from.as_ref().filter(|source_qemu| source_qemu.is_alive()) {
        source_qemu.kill().map_err(|source| file(held, source))?;
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

/// Boots the guest from its disks in a new QEMU with new RAM, with `taps` or, if there are none, with its taps opened
/// again.
pub(crate) fn boot(
    held: &Held,
    mut journal: Journal,
    recovered: Recovered,
    taps: Option<Taps>,
) -> Result<Recovered, RebootError> {
    let hardware = &held.state.hardware;
    let generation = journal.operation.generation;
    // However the guest ended: its disk servers compare each retained block with the disk before they serve it.
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
