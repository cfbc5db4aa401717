//! The next guest: a QEMU that has all of a candidate that it needs to go on, beside the one that runs the former guest; and the moment at which the
//! one takes the other's place.
//!
//! ```text
//! former guest   runs ──────────────────────────────> ends │
//! new QEMU       starts, registers its memory, waits ──────┤ RAM, disks and taps are its own; loads devices; decided; goes on
//! ```
//!
//! Until the former one has ended, the new one has RAM of its own, of which nothing is promised to it, stand-ins for its taps, and
//! connections to the servers of its disks on which nothing has begun. Whether the candidate may be used is asked before it is loaded, and once more when nobody
//! can write a disk any more.

use super::candidates::Good;
use super::go::Over;
use super::port::{Port, wait_read};
use crate::vmm::{Change, Problem, RebootError, cold, switch};
use rekindle_kernel::inject::Injector;
use rekindle_kernel::stand_in::StandIn;
use rekindle_memory::directory::PreviousRam;
use rekindle_protect::candidate::{self, Loaded, Moment, Next};
use rekindle_protect::pager;
use rekindle_protect::restore::{Clock, RestoreError};
use rekindle_qemu::agent;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::hardware::new_generation;
use rekindle_vm::journal::Journal;
use rekindle_vm::life::{End, LifeError};
use rekindle_vm::place::Made;
use rekindle_vm::state::State;
use rekindle_vm::timeline::{Phase, Recorder, host_us};
use rekindle_vm::{disks, fault, network, phases, ram};
use std::cell::RefCell;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a QEMU may take to answer.
const ANSWER: Duration = Duration::from_secs(5);
/// How long a pager of the former guest may take to see that it has gone.
const PAGER: Duration = Duration::from_secs(10);
/// What a guest that has announced nothing is to do.
const RESTORED: &str = "systemctl --no-block start rekindle-restored.target";

/// A guest that has gone on.
pub(super) struct Went {
    pub(super) vmm: Vmm,
    pub(super) state: State,
    pub(super) loaded: Loaded,
    /// When it began to run, by the host's clock in µs.
    pub(super) resumed: u64,
    /// Memory of the former guest that is to be given back.
    pub(super) former: Vec<PreviousRam>,
}

/// Load the candidate into a new QEMU; bring the former guest to its `end`, if that is not `over`; and let the new one go on.
///
/// *On failure:* as the journal says: before [`Step::Suspend`](rekindle_vm::journal::Step::Suspend) the former guest runs; before the resume the new
/// one has not run.
pub(super) fn load(
    change: &mut Change,
    journal: Journal,
    good: &Good,
    end: End,
    began: Instant,
    over: &mut Option<Over>,
) -> Result<Went, RebootError> {
    let rundir = change.held.rundir.clone();
    let name = rundir.name().to_owned();
    let (old, binary) = (change.old.clone(), change.binary.clone());
    let was_over = over.is_some();
    let mut state = change.held.state.clone();
    // Another one, so that the guest knows that it was set back.
    if state.hardware.vm_generation.is_some() {
        let unfit = |problem| LifeError::Unfit { name: name.clone(), problems: vec![problem] };
        state.hardware.vm_generation = Some(new_generation().map_err(unfit)?);
    }
    let waits = ram::waiting(&state.hardware)?;
    disks::start(&rundir, &state.hardware).map_err(LifeError::from)?;
    let directory = rundir.create_vmm(journal.operation.generation).map_err(change.file_error("vmm"))?;
    let taps = Taps::of(change, was_over)?;
    let is_announced = state.definition.phase.healthy.as_ref() != Some(&good.name);
    change.recorder.step(if was_over { "make its place again" } else { "make its place" });

    let (port, resumed, new) = (RefCell::new(None), RefCell::new(host_us()), RefCell::new(None));
    let mut recorder = std::mem::replace(&mut change.recorder, Recorder::new(&name, ""));
    let mut former = Vec::new();
    let mut ready = |moment: Moment<'_>| {
        std::mem::swap(moment.recorder, &mut change.recorder);
        let coming = Coming { good, end, state: &state, stand_ins: &taps.stand_ins };
        let taken = take_place(change, moment.journal, moment.injector, moment.bring_all, over, &coming);
        std::mem::swap(moment.recorder, &mut change.recorder);
        let (given_up, elsewhere) = taken.map_err(|e| RestoreError::Before(Box::new(e)))?;
        former = given_up;
        Ok(elsewhere)
    };
    let next = Next {
        rundir: &rundir,
        hardware: &waits,
        binary: &binary,
        made: Made { journal, directory, fds: taps.fds },
        started: &|vmm| {
            // Before the state comes: to the guest the port has been open all the time.
            let connect = || Port::connect(vmm).map_err(|e| tracing::debug!("its port for phases: {e}")).ok();
            *port.borrow_mut() = is_announced.then(connect).flatten();
            *new.borrow_mut() = Some(vmm.clone());
            fault::point("phase.prepare.spawned", Some(&old), Some(vmm));
        },
        ready: &mut ready,
        resumed: &|| {
            *resumed.borrow_mut() = host_us();
            if let Some(Err(e)) = port.borrow_mut().as_mut().map(Port::restored) {
                tracing::warn!("{name}: the guest is not told that it was set back: {e}");
            }
        },
        told: &|| {
            let new = new.borrow();
            port.borrow().is_some() && new.as_ref().is_some_and(|new| has_read(&name, new))
        },
        settle: &|journal, vmm, qmp| {
            let settled = switch::settle(&rundir, state.clone(), None, &vmm, qmp, journal, None);
            settled.map(drop).map_err(|e| RestoreError::Record(Box::new(e)))
        },
    };
    let loaded = candidate::load(&good.store, next, &mut recorder, began);
    change.recorder = recorder;
    let loaded = loaded.map_err(|e| RebootError::Candidate(Box::new(e)))?;
    let vmm = new.into_inner().unwrap_or(old);
    if !is_announced && loaded.clock != Clock::NoAgent {
        tell_agent(change, &vmm);
    }
    let state = State::read(&rundir).ok().flatten().unwrap_or(state);
    Ok(Went { vmm, state, loaded, resumed: resumed.into_inner(), former })
}

/// Its taps: as long as the former QEMU has them, stand-ins, and the real ones beside.
struct Taps {
    fds: Vec<(OwnedFd, RawFd)>,
    /// To be held until the guest runs: see [`network::Duplicates::stand_ins`]. Empty: it has the real ones.
    stand_ins: Vec<StandIn>,
}

impl Taps {
    fn of(change: &Change, is_over: bool) -> Result<Self, RebootError> {
        let hardware = &change.held.state.hardware;
        if is_over {
            return Ok(Self { fds: network::reopen(hardware)?, stand_ins: Vec::new() });
        }
        let taps = network::duplicate(hardware, change.old.process())?;
        Ok(Self { fds: taps.fds, stand_ins: taps.stand_ins })
    }
}

/// The guest that is to go on.
struct Coming<'a> {
    good: &'a Good,
    end: End,
    state: &'a State,
    stand_ins: &'a [StandIn],
}

/// End the former guest, and give what it had to the one that waits. Gives what of its memory is to be given back, and how long its end has taken.
fn take_place(
    change: &mut Change,
    journal: &mut Journal,
    injector: Injector,
    bring_all: &AtomicBool,
    over: &mut Option<Over>,
    coming: &Coming<'_>,
) -> Result<(Vec<PreviousRam>, Duration), RebootError> {
    let rundir = change.held.rundir.clone();
    let new = journal.operation.to.clone();
    fault::point("phase.prepare.ready", Some(&change.old), new.as_ref());
    alive(change, new.as_ref())?;
    let mut elsewhere = Duration::ZERO;
    if over.is_none() {
        let begun = Instant::now();
        // Who has so much time until its guest goes on need not wait for its memory afterwards.
        bring_all.store(ram::has_room(&coming.state.hardware), Ordering::Relaxed);
        *over = Some(cold::shut_down(change, journal, coming.end)?);
        bring_all.store(false, Ordering::Relaxed);
        elsewhere = begun.elapsed();
        change.recorder.phase(Phase::Renew);
    }
    // If the former guest's memory was still being brought, that has no sense any more.
    pager::wait_ended(&rundir, PAGER).map_err(|e| RebootError::Candidate(Box::new(RestoreError::Fill(e))))?;
    let former = ram::replace(&rundir, &coming.state.hardware)?;
    fault::point("phase.renew.replaced", Some(&change.old), new.as_ref());
    disks::start(&rundir, &coming.state.hardware).map_err(LifeError::from)?;
    change.recorder.step("renew its memory");
    // Asked once more, now that nobody can write any of them.
    phases::continue_from(&rundir, &coming.state.hardware, coming.good.about.disks())
        .map_err(|why| RebootError::Against { name: rundir.name().into(), problem: Problem(why) })?;
    // Recorded before the guest can be told.
    coming.state.write(&rundir).map_err(change.file_error("state.json"))?;
    change.held.state = coming.state.clone();
    if coming.state.definition.phase.healthy.as_ref() != Some(&coming.good.name) {
        phases::expect_healthy(&rundir, &coming.state.definition);
    }
    let pid = injector.process().pid;
    let failed = |source| RebootError::File { path: format!("/proc/{pid}/fd").into(), source };
    if !coming.stand_ins.is_empty() {
        network::replace_stand_ins(injector, &coming.state.hardware, coming.stand_ins).map_err(failed)?;
    }
    fault::point("phase.renew.agreed", Some(&change.old), new.as_ref());
    change.recorder.step("take its place");
    alive(change, new.as_ref())?;
    Ok((former, elsewhere))
}

/// That the new QEMU has not died while it waited.
fn alive(change: &Change, new: Option<&Vmm>) -> Result<(), RebootError> {
    match new.filter(|new| !new.is_alive()) {
        None => Ok(()),
        Some(new) => {
            let said = rekindle_qemu::vmm::log_tail(&new.directory(), 10);
            Err(RebootError::DiedWaiting { name: change.name().into(), said })
        }
    }
}

/// Whether the guest has read that it was set back.
fn has_read(name: &str, vmm: &Vmm) -> bool {
    match vmm.watch(ANSWER).and_then(|mut qmp| wait_read(&mut qmp)) {
        Ok(true) => return true,
        Ok(false) => tracing::warn!("{name}: the guest does not take the word that it was set back"),
        Err(e) => tracing::debug!("{name}: whether the guest was told cannot be seen: {e}"),
    }
    false
}

/// A guest that has announced nothing is told by its agent.
fn tell_agent(change: &mut Change, vmm: &Vmm) {
    let name = change.name().to_owned();
    match agent::run(&vmm.directory().agent(), "/bin/sh", &["-c", RESTORED], ANSWER) {
        Ok(ran) if ran.status == Some(0) => change.recorder.step("tell the guest's agent"),
        Ok(ran) => tracing::info!("{name}: {RESTORED}: exit status {:?}", ran.status),
        Err(e) => tracing::info!("{name}: its agent does not run {RESTORED}: {e}"),
    }
}
