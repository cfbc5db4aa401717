//! The successor: a destination QEMU that loads everything of a candidate that it needs to resume, while the source
//! QEMU still runs the previous guest; and the moment at which it replaces the source.
//!
//! ```text
//! source QEMU       runs previous guest ───────────────> ends │
//! destination QEMU  starts, registers its memory, waits ──────┤ gets RAM, disks and taps; loads devices; resumes
//! ```
//!
//! Until the source has ended, the destination has temporary RAM of its own, stand-ins for its taps, and unused
//! connections to its disk servers. Whether the candidate may be used is checked before the load, and again when no
//! QEMU can write to a disk any more.

use super::candidates::UsableCandidate;
use super::port::{PhasePort, wait_read};
use super::reboot::ShutdownResult;
use crate::vmm::{Problem, RebootError, Replacement, cold, switch};
use rekindle_kernel::inject::Injector;
use rekindle_kernel::stand_in::StandIn;
use rekindle_memory::directory::PreviousRam;
use rekindle_protect::candidate::{self, BeforeLoad, CandidateLoad, LoadedCandidate};
use rekindle_protect::pager;
use rekindle_protect::restore::{Clock, RestoreError};
use rekindle_qemu::agent;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::error::LifeError;
use rekindle_vm::hardware::new_generation;
use rekindle_vm::journal::Journal;
use rekindle_vm::place::Made;
use rekindle_vm::shutdown::End;
use rekindle_vm::state::State;
use rekindle_vm::timeline::{Phase, Recorder, host_us};
use rekindle_vm::{disks, fault, network, phases, ram};
use std::cell::RefCell;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the previous guest's pager may take to notice that the guest has ended.
const PAGER_TIMEOUT: Duration = Duration::from_secs(10);
/// Command for a guest that did not announce the phase itself.
const RESTORED_COMMAND: &str = "systemctl --no-block start rekindle-restored.target";

/// A guest that was resumed from a candidate.
pub(super) struct ResumedGuest {
    pub(super) vmm: Vmm,
    pub(super) state: State,
    pub(super) loaded: LoadedCandidate,
    /// When it was resumed: host clock, µs.
    pub(super) resumed: u64,
    /// Memory of the previous guest that is still to be freed.
    pub(super) previous_ram: Vec<PreviousRam>,
}

/// Loads the candidate into a destination QEMU, ends the previous guest as `end` states unless `shutdown` shows that it
/// has ended, and resumes the new guest.
///
/// *On failure:* as the journal states: before [`Step::Suspend`](rekindle_vm::journal::Step::Suspend) the previous
/// guest runs; before [`Step::Resume`](rekindle_vm::journal::Step::Resume) the new one has not run.
pub(super) fn load(
    replacement: &mut Replacement,
    journal: Journal,
    candidate: &UsableCandidate,
    end: End,
    began: Instant,
    shutdown: &mut Option<ShutdownResult>,
) -> Result<ResumedGuest, RebootError> {
    let rundir = replacement.held.rundir.clone();
    let name = rundir.name().to_owned();
    let (source_qemu, binary) = (replacement.source_qemu.clone(), replacement.binary.clone());
    let already_ended = shutdown.is_some();
    let mut state = replacement.held.state.clone();
    // A new ID, so that the guest can detect that it was set back.
    if state.hardware.vm_generation.is_some() {
        let unfit = |problem| LifeError::Unfit { name: name.clone(), problems: vec![problem] };
        state.hardware.vm_generation = Some(new_generation().map_err(unfit)?);
    }
    let waits = ram::waiting(&state.hardware)?;
    disks::start(&rundir, &state.hardware).map_err(LifeError::from)?;
    let directory = rundir.create_vmm(journal.operation.generation).map_err(replacement.file_error("vmm"))?;
    let taps = SuccessorTaps::of(replacement, already_ended)?;
    let is_announced = state.definition.phase.healthy.as_ref() != Some(&candidate.name);
    replacement.recorder.step(if already_ended { "make its place again" } else { "make its place" });

    let (port, resumed, destination_qemu) = (RefCell::new(None), RefCell::new(host_us()), RefCell::new(None));
    let mut recorder = std::mem::replace(&mut replacement.recorder, Recorder::new(&name, ""));
    let mut previous_ram = Vec::new();
    let mut ready = |moment: BeforeLoad<'_>| {
        std::mem::swap(moment.recorder, &mut replacement.recorder);
        let next_guest = GuestToResume { candidate, end, state: &state, stand_ins: &taps.stand_ins };
        let taken =
            replace_source(replacement, moment.journal, moment.injector, moment.fill_all, shutdown, &next_guest);
        std::mem::swap(moment.recorder, &mut replacement.recorder);
        let (freed, elsewhere) = taken.map_err(|e| RestoreError::Before(Box::new(e)))?;
        previous_ram = freed;
        Ok(elsewhere)
    };
    let next = CandidateLoad {
        rundir: &rundir,
        hardware: &waits,
        binary: &binary,
        made: Made { journal, directory, fds: taps.fds },
        started: &|vmm| {
            // Connect before the state is loaded: to the guest, the port has been open all the time.
            let connect = || {
                PhasePort::connect(vmm).map_err(|e| tracing::debug!("cannot connect to its port for phases: {e}")).ok()
            };
            *port.borrow_mut() = is_announced.then(connect).flatten();
            *destination_qemu.borrow_mut() = Some(vmm.clone());
            fault::point("phase.prepare.spawned", Some(&source_qemu), Some(vmm));
        },
        ready: &mut ready,
        resumed: &|| {
            *resumed.borrow_mut() = host_us();
            if let Some(Err(e)) = port.borrow_mut().as_mut().map(PhasePort::notify_restored) {
                tracing::warn!("{name}: cannot notify the guest that it was set back: {e}");
            }
        },
        clock_notified: &|| {
            let destination_qemu = destination_qemu.borrow();
            port.borrow().is_some()
                && destination_qemu.as_ref().is_some_and(|destination_qemu| has_read(&name, destination_qemu))
        },
        settle: &|journal, vmm, qmp| {
            let settled = switch::settle(&rundir, state.clone(), None, &vmm, qmp, journal, None);
            settled.map(drop).map_err(|e| RestoreError::Record(Box::new(e)))
        },
    };
    let loaded = candidate::load(&candidate.store, next, &mut recorder, began);
    replacement.recorder = recorder;
    let loaded = loaded.map_err(|e| RebootError::Candidate(Box::new(e)))?;
    let vmm = destination_qemu.into_inner().unwrap_or(source_qemu);
    if !is_announced && loaded.clock != Clock::NoAgent {
        notify_agent(replacement, &vmm);
    }
    let state = State::read(&rundir).ok().flatten().unwrap_or(state);
    Ok(ResumedGuest { vmm, state, loaded, resumed: resumed.into_inner(), previous_ram })
}

/// Taps of the destination: stand-ins as long as the source QEMU has the real ones.
struct SuccessorTaps {
    fds: Vec<(OwnedFd, RawFd)>,
    /// To be held until the guest runs: see [`network::Duplicates::stand_ins`]. Empty if the destination has the real
    /// taps.
    stand_ins: Vec<StandIn>,
}

impl SuccessorTaps {
    fn of(replacement: &Replacement, already_ended: bool) -> Result<Self, RebootError> {
        let hardware = &replacement.held.state.hardware;
        if already_ended {
            return Ok(Self { fds: network::reopen(hardware)?, stand_ins: Vec::new() });
        }
        let taps = network::duplicate(hardware, replacement.source_qemu.process())?;
        Ok(Self { fds: taps.fds, stand_ins: taps.stand_ins })
    }
}

/// The guest that is to be resumed.
struct GuestToResume<'a> {
    candidate: &'a UsableCandidate,
    end: End,
    state: &'a State,
    stand_ins: &'a [StandIn],
}

/// Ends the previous guest and gives its disks, taps and run directory to the destination. Returns the previous guest's
/// memory that is to be freed, and how long its end took.
fn replace_source(
    replacement: &mut Replacement,
    journal: &mut Journal,
    injector: Injector,
    load_all: &AtomicBool,
    shutdown: &mut Option<ShutdownResult>,
    next_guest: &GuestToResume<'_>,
) -> Result<(Vec<PreviousRam>, Duration), RebootError> {
    let rundir = replacement.held.rundir.clone();
    let destination_qemu = journal.operation.to.clone();
    fault::point("phase.prepare.ready", Some(&replacement.source_qemu), destination_qemu.as_ref());
    check_alive(replacement, destination_qemu.as_ref())?;
    let mut elsewhere = Duration::ZERO;
    if shutdown.is_none() {
        let started = Instant::now();
        // The destination has time until the guest has shut down: it may load all memory now, and its guest need not
        // wait for it later.
        load_all.store(ram::has_room(&next_guest.state.hardware), Ordering::Relaxed);
        *shutdown = Some(cold::shut_down(replacement, journal, next_guest.end)?);
        load_all.store(false, Ordering::Relaxed);
        elsewhere = started.elapsed();
        replacement.recorder.phase(Phase::Renew);
    }
    // If the previous guest's memory was still being loaded, that is pointless now.
    pager::wait_ended(&rundir, PAGER_TIMEOUT).map_err(|e| RebootError::Candidate(Box::new(RestoreError::Fill(e))))?;
    let previous_ram = ram::replace(&rundir, &next_guest.state.hardware)?;
    fault::point("phase.renew.replaced", Some(&replacement.source_qemu), destination_qemu.as_ref());
    disks::start(&rundir, &next_guest.state.hardware).map_err(LifeError::from)?;
    replacement.recorder.step("renew its memory");
    // Checked again, now that no QEMU can write to the disks.
    phases::continue_from(&rundir, &next_guest.state.hardware, next_guest.candidate.info.disks())
        .map_err(|why| RebootError::Prevented { name: rundir.name().into(), problem: Problem(why) })?;
    // Recorded before the guest can be notified.
    next_guest.state.write(&rundir).map_err(replacement.file_error("state.json"))?;
    replacement.held.state = next_guest.state.clone();
    if next_guest.state.definition.phase.healthy.as_ref() != Some(&next_guest.candidate.name) {
        phases::expect_healthy(&rundir, &next_guest.state.definition);
    }
    let pid = injector.process().pid;
    let failed = |source| RebootError::File { path: format!("/proc/{pid}/fd").into(), source };
    if !next_guest.stand_ins.is_empty() {
        network::replace_stand_ins(injector, &next_guest.state.hardware, next_guest.stand_ins).map_err(failed)?;
    }
    fault::point("phase.renew.agreed", Some(&replacement.source_qemu), destination_qemu.as_ref());
    replacement.recorder.step("take its place");
    check_alive(replacement, destination_qemu.as_ref())?;
    Ok((previous_ram, elsewhere))
}

/// Returns an error if the destination QEMU has died while it waited.
fn check_alive(replacement: &Replacement, destination_qemu: Option<&Vmm>) -> Result<(), RebootError> {
    match destination_qemu.filter(|destination_qemu| !destination_qemu.is_alive()) {
        None => Ok(()),
        Some(destination_qemu) => {
            let log = rekindle_qemu::vmm::log_tail(&destination_qemu.directory(), 10);
            Err(RebootError::DiedWaiting { name: replacement.name().into(), log })
        }
    }
}

/// Returns whether the guest has read the notification that it was set back.
fn has_read(name: &str, vmm: &Vmm) -> bool {
    match vmm.watch(ANSWER_TIMEOUT).and_then(|mut qmp| wait_read(&mut qmp)) {
        Ok(true) => return true,
        Ok(false) => tracing::warn!("{name}: the guest does not read the notification that it was set back"),
        Err(e) => tracing::debug!("{name}: cannot check whether the guest was notified: {e}"),
    }
    false
}

/// Notifies, through its agent, a guest that did not announce the phase itself.
fn notify_agent(replacement: &mut Replacement, vmm: &Vmm) {
    let name = replacement.name().to_owned();
    match agent::run(&vmm.directory().agent(), "/bin/sh", &["-c", RESTORED_COMMAND], ANSWER_TIMEOUT) {
        Ok(ran) if ran.status == Some(0) => replacement.recorder.step("notify the guest's agent"),
        Ok(ran) => tracing::info!("{name}: {RESTORED_COMMAND}: exit status {:?}", ran.status),
        Err(e) => tracing::info!("{name}: its agent cannot run {RESTORED_COMMAND}: {e}"),
    }
}
