//! One absence of libvirt's daemon: everything from the moment before it is stopped until it has its domains back.
//!
//! All prepared domains are handed over in it, as many at a time as there are processors. The daemon is started once, as
//! soon as each guest runs in its destination, which libvirt's record names, or in its source again. What can wait is
//! done after that.

use super::daemon_guard::DaemonGuard;
use super::give_back::{GivenBack, give_back};
use super::journal::{operation, set_absence};
use super::prepare::Prepared;
use super::recheck::check_record;
use super::way_back::{Abandoned, abandon, fail_after_decision};
use super::{DomainError, DomainResult, panicked};
use crate::error::{Failure, RebootError};
use crate::parallel::{ProcessorGate, in_threads};
use crate::unprepared::UnpreparedError;
use crate::unprepared::hand_over::{Transferred, approach, hand_over};
use crate::unprepared::recover::ResumedDestination;
use crate::unprepared::start::{Waiting, place_threads};
use crate::vmm::{QemuInfo, RebootReport};
use rekindle_handover::{Handover, priority};
use rekindle_kernel::surroundings::ThreadPlaces;
use rekindle_libvirt::daemon::DaemonError;
use rekindle_libvirt::daemon::lock::check_jobs;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::fault;
use rekindle_vm::journal::{Absence, Step};
use rekindle_vm::lock::OperationLock;
use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

/// How long the source's monitor may take to greet, while libvirt's daemon is stopped.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(10);

/// What has become of the domains of one absence.
pub(super) struct AbsenceResult {
    pub domains: Vec<DomainResult>,
    /// How long the daemon was away; `None` if it was not stopped, or does not run again.
    pub away: Option<Duration>,
}

/// Hands over all `prepared` domains while libvirt's daemon is stopped.
///
/// *Needs:* this process has the daemon's lock, and no connection to the daemon.
/// *On failure* of a domain: its guest runs in its source, or needs recovery; the other domains continue.
pub(super) fn replace_in_absence(prepared: Vec<Prepared>) -> AbsenceResult {
    // Deferred signals end this process when the guard is dropped.
    let mut guard = DaemonGuard::default();
    let (prepared, mut placed) = journal_absence(prepared);
    let points = DaemonPoints::of(prepared.first());
    let stopped = prepared.first().map(|first| stop_daemon(&mut guard, &first.handover, &points));
    placed.extend(match stopped {
        Some(Err(error)) => abandon_all(prepared, &error),
        Some(Ok(())) | None => transfer_all(prepared),
    });
    let started = guard.start().map_err(Arc::new);
    if let Ok(Some(_)) = started {
        points.pass("libvirt.give-back.daemon-started");
    }
    let positions: Vec<_> = placed.iter().map(|domain| (domain.position, domain.name.clone())).collect();
    let results = in_threads(placed, |domain| domain.conclude(started.as_ref().map(Option::as_ref)));
    let results = results.into_iter().zip(positions).map(|(result, (position, name))| DomainResult {
        position,
        result: result.unwrap_or_else(|_| Err(panicked(&name))),
    });
    AbsenceResult { domains: results.collect(), away: started.ok().flatten() }
}

/// The fault points that are passed once for all domains. A test can kill the QEMUs of the first one at them.
struct DaemonPoints {
    source: Option<Vmm>,
    destination: Option<Vmm>,
}

impl DaemonPoints {
    fn of(first: Option<&Prepared>) -> Self {
        let handover = first.map(|first| &first.handover);
        Self {
            source: handover.and_then(Handover::source).cloned(),
            destination: handover.and_then(Handover::destination).cloned(),
        }
    }

    fn pass(&self, name: &'static str) {
        fault::point(name, self.source.as_ref(), self.destination.as_ref());
    }
}

/// Journals for each domain that the daemon is stopped. Returns those whose journal could be written, and the others,
/// whose guests continue in their sources.
fn journal_absence(prepared: Vec<Prepared>) -> (Vec<Prepared>, Vec<Placed>) {
    // A job may have been started while the RAM was copied.
    if let Err(error) = check_jobs() {
        return (Vec::new(), abandon_all(prepared, &Arc::new(error)));
    }
    let (mut journalled, mut failed) = (Vec::new(), Vec::new());
    for mut domain in prepared {
        match set_absence(&mut domain.handover, Absence::Stopped) {
            Ok(()) => {
                domain.handover.recorder.step("wait for other domains");
                journalled.push(domain);
            }
            Err(error) => failed.push(Placed::abandoned(domain, error)),
        }
    }
    (journalled, failed)
}

/// Stops the daemon, which is recorded in the journal of each domain.
fn stop_daemon(guard: &mut DaemonGuard, first: &Handover, points: &DaemonPoints) -> Result<(), Arc<DaemonError>> {
    points.pass("libvirt.daemon.stopping");
    if let Ok(libvirt) = operation(first) {
        guard.stop(&libvirt.daemon)?;
    }
    points.pass("libvirt.daemon.stopped");
    Ok(())
}

fn abandon_all(prepared: Vec<Prepared>, error: &Arc<DaemonError>) -> Vec<Placed> {
    let abandoned = |domain: Prepared| Placed::abandoned(domain, DomainError::Daemon(Arc::clone(error)).into());
    place_all(prepared, abandoned)
}

fn transfer_all(prepared: Vec<Prepared>) -> Vec<Placed> {
    let gate = ProcessorGate::new();
    place_all(prepared, |domain| transfer(domain, &gate))
}

fn place_all(prepared: Vec<Prepared>, place: impl Fn(Prepared) -> Placed + Sync) -> Vec<Placed> {
    let names: Vec<_> = prepared.iter().map(|domain| (domain.position, domain.handover.name().to_owned())).collect();
    let placed = in_threads(prepared, place).into_iter().zip(names);
    let or_panicked = |(result, (position, name)): (Result<Placed, _>, (usize, String))| {
        let side = Side::Unknown(panicked(&name));
        result.unwrap_or(Placed { position, name, side, _lock: None })
    };
    placed.map(or_panicked).collect()
}

/// A domain of which libvirt's daemon can be started.
struct Placed {
    position: usize,
    name: String,
    side: Side,
    _lock: Option<OperationLock>,
}

/// Where the guest of a domain is.
enum Side {
    /// In the destination, which libvirt's record names.
    Destination(Box<GivenBack>, HandedOver),
    /// In the source, to which a failure has returned it.
    Source(Box<Abandoned>),
    /// `rekindle recover` decides.
    Unknown(Failure),
}

/// What a report states of a hand-over.
struct HandedOver {
    from: QemuInfo,
    stopped_host_us: u64,
    resumed_host_us: u64,
}

/// Moves the guest of one domain to its destination, and gives the domain back to libvirt.
fn transfer(prepared: Prepared, gate: &ProcessorGate) -> Placed {
    let Prepared { position, lock, mut handover, record, baseline, waiting, .. } = prepared;
    let Waiting { mut destination, mut taps, ram_files, places } = waiting;
    let name = handover.name().to_owned();
    handover.recorder.step("stop libvirt's daemon");
    let transferred = gate.pass(|| {
        handover.recorder.step("wait for a processor");
        check_record(&record, &baseline, operation(&handover)?)?;
        let ended = || UnpreparedError::Ended { name: handover.name().into() };
        let source_qmp = handover.source().ok_or_else(ended)?.connect(MONITOR_TIMEOUT)?;
        let approached = approach(&mut handover, &baseline, source_qmp, &mut destination, &mut taps)?;
        // Guests that already run again must not delay this hand-over.
        let _boosts = (priority::boost_this_thread(), priority::boost_hand_over(handover.source(), &destination.vmm));
        hand_over(&mut handover, approached, destination, &mut taps)
    });
    let side = match transferred {
        Ok(transferred) => return_to_libvirt(handover, baseline.source_info(), &places, transferred),
        Err(error) => {
            let side = return_to_source(handover, &ram_files, error);
            taps.takeover.send_again_to_source();
            side
        }
    };
    Placed { position, name, side, _lock: Some(lock) }
}

/// Returns the guest of one domain to its source after a failure.
fn return_to_source(handover: Handover, ram_files: &[File], error: RebootError) -> Side {
    if handover.journal.operation.step < Step::Resume {
        return Side::Source(Box::new(abandon(handover, error)));
    }
    let abandoned = fail_after_decision(handover, ram_files, error).map(Box::new);
    abandoned.map_or_else(Side::Unknown, Side::Source)
}

fn return_to_libvirt(mut handover: Handover, from: QemuInfo, places: &ThreadPlaces, transferred: Transferred) -> Side {
    let Transferred { mut running, stopped_host_us } = transferred;
    place_threads(places, running.vmm.process(), &mut running.qmp);
    let handed_over = HandedOver { from, stopped_host_us, resumed_host_us: running.stage.resumed_host_us };
    let ram_move = running.stage.ram.take_move();
    let confirmed = running.begin_give_back(&mut handover).map_err(RebootError::from);
    if let Some(ram_move) = &ram_move {
        ram_move.move_all(&handover);
    }
    let resumed = ResumedDestination { vmm: running.vmm, qmp: running.qmp, ram_move };
    match confirmed.and_then(|()| give_back(handover, resumed)) {
        Ok(given_back) => Side::Destination(Box::new(given_back), handed_over),
        Err(error) => Side::Unknown(Failure::needs_recovery(error)),
    }
}

impl Placed {
    fn abandoned(prepared: Prepared, error: RebootError) -> Self {
        let Prepared { position, lock, handover, .. } = prepared;
        let name = handover.name().to_owned();
        Self { position, name, side: Side::Source(Box::new(abandon(handover, error))), _lock: Some(lock) }
    }

    /// Ends the operation. `away`: how long the daemon, which runs again, was away; `None` if it was not stopped.
    fn conclude(self, away: Result<Option<&Duration>, &Arc<DaemonError>>) -> Result<RebootReport, Failure> {
        let away = away.map_err(|error| DomainError::Daemon(Arc::clone(error)));
        match self.side {
            Side::Unknown(failure) => Err(failure),
            Side::Source(abandoned) => Err(abandoned.end(away.map(drop))),
            Side::Destination(given_back, handed_over) => {
                let away = away.map_err(Failure::needs_recovery)?;
                finish(*given_back, handed_over, away).map_err(Failure::needs_recovery)
            }
        }
    }
}

/// Waits until libvirt manages the domain again, and ends its source.
fn finish(
    mut given_back: GivenBack,
    handed_over: HandedOver,
    away: Option<&Duration>,
) -> Result<RebootReport, RebootError> {
    given_back.wait_reconnected()?;
    let moved_in_place = given_back.finish_move()?;
    let HandedOver { from, stopped_host_us, resumed_host_us } = handed_over;
    let GivenBack { handover, destination, qmp, .. } = &given_back;
    let report = RebootReport {
        name: handover.name().into(),
        stopped_us: resumed_host_us.saturating_sub(stopped_host_us),
        stop_host_us: stopped_host_us,
        resume_host_us: resumed_host_us,
        steps: handover.recorder.entries().to_vec(),
        from,
        to: QemuInfo { binary: destination.binary.clone(), version: Some(qmp.version().clone()), pid: destination.pid },
        memory: None,
        daemon_away_us: away.map(|away| away.as_micros() as u64),
        moved_in_place,
    };
    given_back.settle()?;
    Ok(report)
}
