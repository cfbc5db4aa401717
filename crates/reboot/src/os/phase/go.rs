//! The reboot itself: the guest is shut down, and the next one goes on from the latest candidate that may be used; where there is none, or
//! it cannot be loaded, it is booted cold. The former guest has ended in order by then, so nothing is lost either way.

use super::candidates::{Good, chain, choose};
use super::port::{Port, wait_read};
use super::{Outcome, Skipped};
use crate::os::Rebooted;
use crate::vmm::{self, Change, Failure, Left, Problem, RebootError, cold, switch};
use rekindle_protect::candidate::{self, Loaded, Next};
use rekindle_protect::pager;
use rekindle_protect::restore::{Clock, RestoreError};
use rekindle_qemu::agent;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::hardware::new_generation;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind, Step};
use rekindle_vm::life::LifeError;
use rekindle_vm::place::Made;
use rekindle_vm::state::State;
use rekindle_vm::timeline::{Phase, host_us};
use rekindle_vm::{disks, fault, life, network, phases};
use std::cell::RefCell;
use std::time::{Duration, Instant};

/// How long a QEMU may take to answer.
const ANSWER: Duration = Duration::from_secs(5);
/// How long a pager of the former guest may take to see that it has gone.
const PAGER: Duration = Duration::from_secs(10);

const OPERATION: &str = "reboot os --how phase";
/// What a guest that has announced nothing is to do.
const RESTORED: &str = "systemctl --no-block start rekindle-restored.target";

/// Reboot the guest of VM `name` from a candidate; `only` from this one; unless `unless` finds something that speaks against it once
/// nobody else is at work on the VM.
///
/// *Needs:* a VM whose definition keeps phases; nothing else at work on it; with `only` that it may be used.
/// *On success:* the guest goes on from the candidate, or boots: [`Outcome`] says which.
/// *On failure:* as [`Failure::left`] says.
pub(in crate::os) fn reboot(
    host: &Host,
    name: &str,
    only: Option<&str>,
    unless: impl FnOnce(&State) -> Option<Problem>,
) -> Result<Rebooted, Failure> {
    let rundir = rekindle_vm::rundir::RunDir::new(&host.root, name);
    let against = |state: &State| unless(state).or_else(|| against(host, &rundir, state, only));
    let mut change = vmm::begin_again(host, name, OPERATION, against)?;
    let mut journal =
        change.open_journal(Kind::OsPhase).map_err(|error| Failure { left: Left::AsItWas, error: error.into() })?;
    let done = shut_down_and_go_on(&mut change, &mut journal, only).and_then(|gone_on| match gone_on {
        GoneOn::Done(rebooted) => Ok(*rebooted),
        GoneOn::Not { skipped, stopped, ended } => {
            let again = cold::boot(&mut change, journal, stopped, ended)?;
            let phase = Some(Outcome { candidate: None, skipped, clock: None, load_us: None });
            Ok(Rebooted { report: again.report, kept: None, ended: Some(ended), kexec: None, phase })
        }
    });
    done.map_err(|error| Failure { left: Left::NeedsRecovery, error: error.into() })
}

/// What speaks against it while the guest still runs. What is written in its shutdown may still make a candidate void.
fn against(host: &Host, rundir: &rekindle_vm::rundir::RunDir, state: &State, only: Option<&str>) -> Option<Problem> {
    let phases = &state.definition.phase.save;
    if phases.is_empty() {
        let why = "no phase of its boot is kept; name those that its guest announces under [phase], start the VM again, or use --how cold";
        return Some(Problem(why.into()));
    }
    let only = only?;
    if !phases.iter().any(|name| name == only) {
        let why = format!("it keeps no phase {only}; there are: {}", phases.join(", "));
        return Some(Problem(why));
    }
    match choose(host, rundir, state, Some(only)) {
        (Some(_), _) => None,
        (None, skipped) => {
            let why = skipped.into_iter().next().map(|skipped| skipped.why).unwrap_or_default();
            Some(Problem(format!("candidate {only} may not be used: {why}; leave --candidate out, or use --how cold")))
        }
    }
}

/// How far it has come.
enum GoneOn {
    /// The guest runs.
    Done(Box<Rebooted>),
    /// It is to be booted.
    Not { skipped: Vec<Skipped>, stopped: u64, ended: life::Ended },
}

fn shut_down_and_go_on(change: &mut Change, journal: &mut Journal, only: Option<&str>) -> Result<GoneOn, RebootError> {
    let (stopped, ended) = cold::shut_down(change, journal)?;
    let began = Instant::now();
    change.recorder.phase(Phase::Renew);
    let (host, rundir) = (change.host.clone(), change.held.rundir.clone());
    let (chosen, mut skipped) = choose(&host, &rundir, &change.held.state, only);
    let Some(good) = chosen else { return Ok(GoneOn::Not { skipped, stopped, ended }) };
    change.recorder.step("choose a candidate");
    fault::point("phase.renew.chosen", Some(&change.old), None);
    let name = good.name.clone();
    match load(change, journal, &good, began) {
        Ok((new, loaded, resumed)) => {
            change.recorder.write(&rundir);
            let state = State::read(&rundir).ok().flatten().unwrap_or_else(|| change.held.state.clone());
            let report = change.report(&new, &state, (stopped, resumed), None);
            let clock = Some(loaded.clock).filter(|clock| *clock != Clock::NoAgent);
            let phase = Some(Outcome { candidate: Some(name), skipped, clock, load_us: Some(loaded.us) });
            Ok(GoneOn::Done(Box::new(Rebooted { report, kept: None, ended: Some(ended), kexec: None, phase })))
        }
        Err(why) => {
            let failed = change.file_error("operation.json");
            let left = Journal::left_behind(&rundir).map_err(failed)?;
            if left.as_ref().is_none_or(|left| left.operation.step >= Step::Resume) {
                // The guest may have run, or runs.
                return Err(why);
            }
            let why = chain(&why);
            tracing::warn!("candidate {name} cannot be loaded, and the guest is booted: {why}");
            switch::end_generation(&rundir, journal.operation.generation)?;
            // They were told that the guest's memory is on its way.
            disks::filled(&rundir);
            skipped.push(Skipped { name, why });
            Ok(GoneOn::Not { skipped, stopped, ended })
        }
    }
}

/// Start the new QEMU and load the candidate into it. Gives when the guest began to run.
fn load(
    change: &mut Change,
    journal: &Journal,
    good: &Good,
    began: Instant,
) -> Result<(Vmm, Loaded, u64), RebootError> {
    let rundir = change.held.rundir.clone();
    let name = rundir.name().to_owned();
    // The former guest's RAM goes; and if it was still being brought, that has no sense any more.
    pager::wait_ended(&rundir, PAGER).map_err(|e| RebootError::Candidate(Box::new(RestoreError::Fill(e))))?;
    life::renew_ram(&rundir, &change.held.state.hardware)?;
    disks::start(&rundir, &change.held.state.hardware).map_err(LifeError::from)?;
    // Another one, so that the guest knows that it was set back; recorded before it is told.
    if change.held.state.hardware.vm_generation.is_some() {
        let unfit = |problem| LifeError::Unfit { name: name.clone(), problems: vec![problem] };
        change.held.state.hardware.vm_generation = Some(new_generation().map_err(unfit)?);
        change.held.state.write(&rundir).map_err(change.file_error("state.json"))?;
    }
    let hardware = change.held.state.hardware.clone();
    // Asked once more, now that no QEMU can write any of them.
    phases::go_on(&rundir, &hardware, good.about.disks())
        .map_err(|why| RebootError::Against { name: name.clone(), problem: Problem(why) })?;
    change.recorder.step("renew its memory");
    let directory = rundir.create_vmm(journal.operation.generation).map_err(change.file_error("vmm"))?;
    let fds = network::reopen(&hardware)?;
    let again = Journal::left_behind(&rundir).map_err(change.file_error("operation.json"))?;
    let again = again.ok_or_else(|| change.file_error("operation.json")(std::io::ErrorKind::NotFound.into()))?;
    let is_announced = change.held.state.definition.phase.healthy.as_ref() != Some(&good.name);
    if is_announced {
        phases::expect_healthy(&rundir, &change.held.state.definition);
    }
    let (port, resumed, new) = (RefCell::new(None), RefCell::new(host_us()), RefCell::new(None));
    let old = change.old.clone();
    let state = change.held.state.clone();
    let next = Next {
        rundir: &rundir,
        hardware: &hardware,
        binary: &change.binary.path.clone(),
        made: Made { journal: again, directory, fds },
        started: &|vmm| {
            // Before the state comes: to the guest the port has been open all the time.
            let connect = || Port::connect(vmm).map_err(|e| tracing::debug!("its port for phases: {e}")).ok();
            *port.borrow_mut() = is_announced.then(connect).flatten();
            *new.borrow_mut() = Some(vmm.clone());
            fault::point("phase.renew.spawned", Some(&old), Some(vmm));
        },
        resumed: &|| {
            *resumed.borrow_mut() = host_us();
            if let Some(Err(e)) = port.borrow_mut().as_mut().map(Port::restored) {
                tracing::warn!("{name}: the guest is not told that it was set back: {e}");
            }
        },
        settle: &|journal, vmm, qmp| {
            let settled = switch::settle(&rundir, state.clone(), None, &vmm, qmp, journal, None);
            settled.map(drop).map_err(|e| RestoreError::Record(Box::new(e)))
        },
    };
    let loaded = candidate::load(&good.store, next, &mut change.recorder, began);
    let loaded = loaded.map_err(|e| RebootError::Candidate(Box::new(e)))?;
    let new = new.into_inner().unwrap_or_else(|| change.old.clone());
    if port.borrow().is_some() {
        match new.watch(ANSWER).and_then(|mut qmp| wait_read(&mut qmp)) {
            Ok(true) => change.recorder.step("tell the guest"),
            Ok(false) => tracing::warn!("{name}: the guest does not take the word that it was set back"),
            Err(e) => tracing::debug!("{name}: whether the guest was told cannot be seen: {e}"),
        }
    }
    if !is_announced && loaded.clock != Clock::NoAgent {
        match agent::run(&new.directory().agent(), "/bin/sh", &["-c", RESTORED], ANSWER) {
            Ok(ran) if ran.status == Some(0) => change.recorder.step("tell the guest's agent"),
            Ok(ran) => tracing::info!("{name}: {RESTORED}: exit status {:?}", ran.status),
            Err(e) => tracing::info!("{name}: its agent does not run {RESTORED}: {e}"),
        }
    }
    Ok((new, loaded, resumed.into_inner()))
}
