//! The successor: a destination QEMU that is prepared with a candidate while the source QEMU still runs the previous
//! guest, and then replaces the source.
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
use super::port::{PhasePort, wait_until_read};
use crate::error::{Problem, RebootError};
use crate::vmm::Replacement;
use crate::vmm::cold::{self, Shutdown};
use rekindle_handover::after_resume::{ClockOutcome, announce, set_clock};
use rekindle_handover::destination::time_to_resume;
use rekindle_handover::takeover::TapTakeover;
use rekindle_handover::{Destination, Handover, OwnRunDir, RunningStage, Settled};
use rekindle_life::shutdown::EndMethod;
use rekindle_memory::directory::PreviousRam;
use rekindle_protect::candidate::{self, PreparedCandidate};
use rekindle_protect::pager;
use rekindle_protect::restore::RestoreError;
use rekindle_protect::restore::on_demand::OnDemandRam;
use rekindle_qemu::agent;
use rekindle_qemu::command::Hardware;
use rekindle_qemu::vmm::{Vmm, log_tail};
use rekindle_vm::error::LifeError;
use rekindle_vm::hardware::new_generation;
use rekindle_vm::state::State;
use rekindle_vm::timeline::Phase;
use rekindle_vm::{disks, fault, network, phases, ram};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// How long QEMU, or the guest's agent, may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the previous guest's pager may take to detect that the guest has ended.
const PAGER_TIMEOUT: Duration = Duration::from_secs(10);
/// Command that the agent runs in a guest that did not announce the phase itself.
const RESTORED_COMMAND: &str = "systemctl --no-block start rekindle-restored.target";

/// A guest that was resumed from a candidate.
pub(super) struct ResumedGuest {
    pub(super) settled: Settled<OnDemandRam>,
    /// Whether the guest's clock was set.
    pub(super) clock: ClockOutcome,
    /// Time from the command to the guest's resume, in µs, without the shutdown of the previous guest.
    pub(super) load_us: u64,
    /// RAM of the previous guest that is still to be freed.
    pub(super) previous_ram: Vec<PreviousRam>,
}

/// A candidate that is to replace the running guest.
pub(super) struct Succession<'a> {
    pub(super) candidate: &'a UsableCandidate,
    /// How the previous guest is to be ended.
    pub(super) end: EndMethod,
    /// When the reboot command started.
    pub(super) started: Instant,
}

/// Loads the candidate into a destination QEMU, ends the previous guest unless `shutdown` shows that it has ended,
/// and resumes the new guest.
///
/// *On failure:* the journal's step states the result: before [`Step::Suspend`](rekindle_vm::journal::Step::Suspend)
/// the previous guest runs; before [`Step::Resume`](rekindle_vm::journal::Step::Resume) the new one has not run.
pub(super) fn load(
    replacement: &mut Replacement,
    handover: &mut Handover,
    succession: &Succession<'_>,
    shutdown: &mut Option<Shutdown>,
) -> Result<RunningSuccessor, RebootError> {
    let rundir = handover.rundir.clone();
    let candidate = succession.candidate;
    let is_announced = handover.state.definition.phase.healthy.as_ref() != Some(&candidate.name);
    let mut state = handover.state.clone();
    state.hardware.vm_generation = next_generation(rundir.name(), &state.hardware)?;
    let waiting_hardware = ram::create_waiting(&state.hardware)?;
    disks::start(&rundir, &state.hardware).map_err(LifeError::from)?;
    // As long as the source has the real taps, the destination starts with stand-ins.
    let (start_taps, mut tap_takeover) = match shutdown {
        Some(_) => (network::reopen(&state.hardware)?, None),
        None => {
            let (stand_ins, takeover) =
                TapTakeover::prepare(state.hardware.tap_slots(), replacement.source_qemu.process())?;
            (stand_ins, Some(takeover))
        }
    };
    handover.recorder.step(if shutdown.is_some() { "make its place again" } else { "make its place" });

    let mut phase_port = None;
    let environment = OwnRunDir { rundir: &rundir, hardware: &waiting_hardware, binary: &replacement.binary.clone() };
    let prepared = candidate::prepare(&candidate.store, handover, environment, start_taps, |vmm| {
        // Connect before the state is loaded, because for the guest the port has been open all the time.
        let connect =
            || PhasePort::connect(vmm).map_err(|e| tracing::debug!("cannot connect to its port for phases: {e}")).ok();
        phase_port = is_announced.then(connect).flatten();
    });
    let prepared = prepared.map_err(candidate_failed)?;
    let ReplacedSource { previous_ram, shutdown_time } =
        replace_source(replacement, handover, &prepared, state, tap_takeover.as_mut(), succession, shutdown)?;
    let running = prepared.resume(handover).map_err(candidate_failed)?;
    let elapsed = succession.started.elapsed().saturating_sub(shutdown_time);
    let load_us = time_to_resume(elapsed, running.stage.resumed_host_us);
    let notification = match phase_port {
        Some(mut port) => {
            if let Err(e) = port.notify_restored() {
                tracing::warn!("{}: cannot notify the guest that it was set back: {e}", rundir.name());
            }
            Notification::Sent
        }
        None if is_announced => Notification::NotSent,
        None => Notification::ByAgent,
    };
    Ok(RunningSuccessor { running, notification, load_us, previous_ram, _tap_takeover: tap_takeover })
}

fn candidate_failed(error: RestoreError) -> RebootError {
    RebootError::Candidate(Box::new(error))
}

/// Returns a new VM generation ID if the machine has one, so that the guest can detect that it was rolled back.
fn next_generation(name: &str, hardware: &Hardware) -> Result<Option<Uuid>, RebootError> {
    let unfit = |problem| LifeError::Unfit { name: name.into(), problems: vec![problem] };
    Ok(match hardware.vm_generation {
        Some(_) => Some(new_generation().map_err(unfit)?),
        None => None,
    })
}

/// A guest that runs again from a candidate.
pub(super) struct RunningSuccessor {
    running: Destination<RunningStage<OnDemandRam>>,
    notification: Notification,
    /// Time as in [`ResumedGuest::load_us`].
    load_us: u64,
    previous_ram: Vec<PreviousRam>,
    /// Kept until the end: dropping them removes the stand-ins, for which the kernel takes many milliseconds.
    _tap_takeover: Option<TapTakeover>,
}

/// Way in which the guest is notified that it was rolled back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Notification {
    /// The notification was sent through the port on which the guest has announced its phase.
    Sent,
    /// The guest has announced its phase, but the port cannot be used.
    NotSent,
    /// The guest has announced no phase: its agent notifies it.
    ByAgent,
}

impl RunningSuccessor {
    /// Ends the operation: the destination becomes the VM's QEMU, and a pager process loads the guest's memory.
    pub(super) fn settle(self, handover: Handover) -> Result<ResumedGuest, RebootError> {
        let Self { mut running, notification, load_us, previous_ram, .. } = self;
        let rundir = handover.rundir.clone();
        announce(&mut running.qmp, rundir.name());
        let mut settled = running.settle(handover, "record")?;
        settled.ram.hand_over_to_pager(&rundir);
        settled.recorder.step("start its pager");
        fault::point("restore.settle.handed-over", None, Some(&settled.vmm));
        let clock = set_guest_clock(&mut settled, notification);
        if notification == Notification::ByAgent
            && clock != ClockOutcome::NoAgent
            && notify_through_agent(rundir.name(), &settled.vmm)
        {
            settled.recorder.step("notify the guest's agent");
        }
        Ok(ResumedGuest { settled, clock, load_us, previous_ram })
    }
}

/// Sets the guest's clock, unless the guest was notified and sets it itself: an agent that sets the clock keeps a
/// processor of the guest busy for a second (`hwclock --systohc`).
fn set_guest_clock(settled: &mut Settled<OnDemandRam>, notification: Notification) -> ClockOutcome {
    let Settled { vmm, qmp, state, recorder, .. } = settled;
    if notification == Notification::Sent && has_read_notification(&state.hardware.name, vmm) {
        recorder.step("notify the guest of the time");
        return ClockOutcome::SetByGuest;
    }
    let clock = set_clock(qmp, vmm, state.hardware.agent);
    recorder.step("set its clock");
    clock
}

/// The remains of the previous guest.
struct ReplacedSource {
    /// RAM of the previous guest that is to be freed.
    previous_ram: Vec<PreviousRam>,
    /// Duration of the previous guest's shutdown.
    shutdown_time: Duration,
}

/// Ends the previous guest and gives its disks, taps and run directory to the destination. `state`: the state of the VM
/// with the new guest.
fn replace_source(
    replacement: &mut Replacement,
    handover: &mut Handover,
    prepared: &PreparedCandidate<'_>,
    state: State,
    tap_takeover: Option<&mut TapTakeover>,
    succession: &Succession<'_>,
    shutdown: &mut Option<Shutdown>,
) -> Result<ReplacedSource, RebootError> {
    let rundir = handover.rundir.clone();
    let (hardware, candidate) = (state.hardware.clone(), succession.candidate);
    let ram = &prepared.destination.stage.ram;
    handover.pass("phase.prepare.ready");
    check_alive(handover)?;
    let mut shutdown_time = Duration::ZERO;
    if shutdown.is_none() {
        let started = Instant::now();
        // The destination has time until the previous guest has shut down: it may load all memory now, so that its
        // guest need not wait for pages later.
        ram.fill_in_background(ram::has_room(&hardware));
        *shutdown = Some(cold::shut_down(replacement, handover, succession.end)?);
        ram.fill_in_background(false);
        shutdown_time = started.elapsed();
        handover.recorder.phase(Phase::Renew);
    }
    // The pager of the previous guest may still load its memory, which is not needed any more: wait until it has ended.
    pager::wait_ended(&rundir, PAGER_TIMEOUT).map_err(|e| candidate_failed(RestoreError::Fill(e)))?;
    let previous_ram = ram::replace(&rundir, &hardware)?;
    handover.pass("phase.renew.replaced");
    disks::start(&rundir, &hardware).map_err(LifeError::from)?;
    handover.recorder.step("renew its memory");
    // Check again, now that no QEMU can write to the disks.
    phases::continue_from(&rundir, &hardware, candidate.info.disks())
        .map_err(|why| RebootError::Prevented { name: rundir.name().into(), problem: Problem(why) })?;
    // Record the state before the guest can be notified.
    state.write(&rundir).map_err(replacement.file_error("state.json"))?;
    if state.definition.phase.healthy.as_ref() != Some(&candidate.name) {
        phases::expect_healthy(&rundir, &state.definition);
    }
    replacement.locked_vm.state = state.clone();
    handover.state = state;
    if let (Some(takeover), Some(injector)) = (tap_takeover, ram.injector()) {
        takeover.give(injector)?;
    }
    handover.pass("phase.renew.agreed");
    handover.recorder.step("take its place");
    check_alive(handover)?;
    Ok(ReplacedSource { previous_ram, shutdown_time })
}

/// Rejects a destination QEMU that has died while it waited.
fn check_alive(handover: &Handover) -> Result<(), RebootError> {
    match handover.destination().filter(|destination| !destination.is_alive()) {
        None => Ok(()),
        Some(destination) => {
            let log = log_tail(&destination.directory(), 10);
            Err(RebootError::DiedWaiting { name: handover.name().into(), log })
        }
    }
}

/// Returns whether the guest has read the notification that it was rolled back.
fn has_read_notification(name: &str, vmm: &Vmm) -> bool {
    match vmm.connect_watcher(ANSWER_TIMEOUT).and_then(|mut qmp| wait_until_read(&mut qmp)) {
        Ok(true) => return true,
        Ok(false) => tracing::warn!("{name}: the guest does not read the notification that it was set back"),
        Err(e) => tracing::debug!("{name}: cannot check whether the guest was notified: {e}"),
    }
    false
}

/// Notifies a guest that did not announce the phase itself, through its agent. Returns whether that succeeded.
fn notify_through_agent(name: &str, vmm: &Vmm) -> bool {
    match agent::run(&vmm.directory().agent(), "/bin/sh", &["-c", RESTORED_COMMAND], ANSWER_TIMEOUT) {
        Ok(ran) if ran.status == Some(0) => return true,
        Ok(ran) => tracing::info!("{name}: {RESTORED_COMMAND}: exit status {:?}", ran.status),
        Err(e) => tracing::info!("{name}: its agent cannot run {RESTORED_COMMAND}: {e}"),
    }
    false
}
