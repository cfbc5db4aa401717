//! The replacement of the QEMUs of several domains, in phases, and the hand-over of one of them.

use super::absence::{AbsenceResult, replace_in_absence};
use super::batches::divide;
use super::journal::operation;
use super::preflight;
use super::prepare::{Candidate, OPERATION, Prepared, prepare};
use super::recheck::Baseline;
use super::{DomainError, DomainOptions, panicked, source};
use crate::error::{Failure, RebootError};
use crate::parallel::{Panicked, ProcessorGate, in_threads};
use crate::vmm::{RebootReport, VmOutcome};
use rekindle_handover::copied_ram::{CopiedRam, CopyError, CopyLimit};
use rekindle_handover::ram::Ram;
use rekindle_handover::source_state::{SourceState, StateSink, StreamForm};
use rekindle_handover::{Destination, Handover, PreparedStage, RunningStage};
use rekindle_kernel::process::Process;
use rekindle_libvirt::daemon::DaemonError;
use rekindle_libvirt::daemon::lock::{DaemonLock, check_jobs};
use rekindle_memory::ram::GuestRam;
use rekindle_memory::room::available_to;
use rekindle_qemu::guest;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::stopped::Stopped;
use rekindle_qemu::stream;
use rekindle_vm::host::Host;
use rekindle_vm::journal::Step;
use rekindle_vm::timeline::{Phase, Recorder};
use std::sync::Arc;
use std::time::Duration;

/// How long the source's monitor may take to greet, while libvirt's daemon is stopped.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the destination may take to load the devices, in the pause. It usually takes milliseconds.
const LOAD_TIMEOUT: Duration = Duration::from_secs(30);

/// Result of [`replace_domains`].
pub struct ReplacedDomains {
    pub outcomes: Vec<VmOutcome>,
    /// How long libvirt's daemon was away, in microseconds: one entry for each time that it was stopped.
    pub absences_us: Vec<u64>,
}

/// Replaces the QEMUs of domains of libvirt, in parallel.
///
/// All are prepared before libvirt's daemon is stopped, and handed over before it is started again. If there is no
/// memory for the copies of their RAM at the same time, this is done in as many batches as needed.
///
/// *Needs:* root; the domains run; libvirt's daemon runs.
/// *On success:* each guest runs in its destination QEMU, and libvirt manages it as before.
/// *On failure:* [`Failure::guest`] states the guest's status for each domain. The other domains continue.
#[must_use]
pub fn replace_domains(host: &Host, names: &[String], options: &DomainOptions) -> ReplacedDomains {
    let results = names.iter().map(|_| None).collect();
    let mut replacement = Replacement { host, names, options, results, absences_us: Vec::new() };
    let error = if names.is_empty() { None } else { replacement.replace_all().err().map(Arc::new) };
    let Replacement { results, absences_us, .. } = replacement;
    let outcome = |(name, result): (&String, Option<_>)| {
        let not_begun = || Err(error.as_ref().map_or_else(|| panicked(name), daemon_failure));
        VmOutcome { name: name.clone(), result: result.unwrap_or_else(not_begun) }
    };
    ReplacedDomains { outcomes: names.iter().zip(results).map(outcome).collect(), absences_us }
}

fn daemon_failure(error: &Arc<DaemonError>) -> Failure {
    Failure::unchanged(DomainError::Daemon(Arc::clone(error)))
}

/// A replacement of several domains' QEMUs.
struct Replacement<'a> {
    host: &'a Host,
    names: &'a [String],
    options: &'a DomainOptions,
    /// Of each name; `None` until its replacement has ended.
    results: Vec<Option<Result<RebootReport, Failure>>>,
    absences_us: Vec<u64>,
}

impl Replacement<'_> {
    /// Fails before any domain is changed.
    fn replace_all(&mut self) -> Result<(), DaemonError> {
        let _daemon_lock = DaemonLock::acquire()?;
        check_jobs()?;
        loop {
            // Each batch has its own preflight: the daemon is another process after an absence, and ends only if no
            // connection to it is left.
            let candidates = self.inspect_rest();
            let batch = Self::next_batch(candidates);
            if batch.is_empty() {
                return Ok(());
            }
            let prepared = self.prepare(batch);
            if prepared.is_empty() {
                continue;
            }
            let AbsenceResult { domains, away } = replace_in_absence(prepared);
            domains.into_iter().for_each(|domain| self.record(domain.position, domain.result));
            self.absences_us.extend(away.map(|away| away.as_micros() as u64));
        }
    }

    fn record(&mut self, position: usize, result: Result<RebootReport, Failure>) {
        if let Some(entry) = self.results.get_mut(position) {
            *entry = Some(result);
        }
    }

    /// Inspects all domains that have no result yet, and returns those that can be replaced.
    fn inspect_rest(&mut self) -> Vec<Candidate> {
        let results = self.results.iter().enumerate();
        let rest: Vec<usize> = results.filter(|(_, result)| result.is_none()).map(|(position, _)| position).collect();
        let domains: Vec<_> = self.names.iter().enumerate().filter(|(position, _)| rest.contains(position)).collect();
        let (host, options, gate) = (self.host, self.options, ProcessorGate::new());
        let inspected = in_threads(domains, |(position, name)| {
            let mut recorder = Recorder::new(name, OPERATION);
            let inspected = gate.pass(|| preflight::inspect(host, name, options)).map_err(Failure::unchanged)?;
            recorder.step("preflight");
            Ok(Candidate { position, name: name.clone(), recorder, inspected })
        });
        self.keep_successes(&rest, inspected)
    }

    /// Chooses the domains of the next absence: as many as there is memory for.
    fn next_batch(candidates: Vec<Candidate>) -> Vec<Candidate> {
        let needs: Vec<u64> = candidates.iter().map(|candidate| candidate.inspected.copy_bytes).collect();
        // The preflight has read it, too. Without it, each domain is a batch of its own.
        let available = Process::current().and_then(available_to).unwrap_or(0);
        let batches = divide(&needs, available);
        if batches.len() > 1 {
            tracing::info!("memory for {} of {} domains at a time", batches[0].len(), needs.len());
        }
        let first = batches.into_iter().next().unwrap_or_default();
        let chosen = candidates.into_iter().enumerate().filter(|(number, _)| first.contains(number));
        chosen.map(|(_, candidate)| candidate).collect()
    }

    /// Prepares the domains of one absence.
    fn prepare(&mut self, batch: Vec<Candidate>) -> Vec<Prepared> {
        let positions: Vec<usize> = batch.iter().map(|candidate| candidate.position).collect();
        let (host, gate) = (self.host, ProcessorGate::new());
        let prepared = in_threads(batch, |candidate| gate.pass(|| prepare(host, candidate)));
        let mut prepared = self.keep_successes(&positions, prepared);
        if prepared.len() > 1 {
            let positions: Vec<usize> = prepared.iter().map(|domain| domain.position).collect();
            let copied = in_threads(prepared, |domain| gate.pass(|| domain.copy_again()));
            prepared = self.keep_successes(&positions, copied);
        }
        prepared.iter_mut().for_each(Prepared::disconnect);
        prepared
    }

    /// Records the failures, and returns the other results.
    fn keep_successes<T>(&mut self, positions: &[usize], results: Vec<Result<Result<T, Failure>, Panicked>>) -> Vec<T> {
        let mut successes = Vec::new();
        for (position, result) in positions.iter().zip(results) {
            let name = self.names.get(*position).map_or("", String::as_str);
            match result.unwrap_or_else(|_| Err(panicked(name))) {
                Ok(success) => successes.push(success),
                Err(failure) => self.record(*position, Err(failure)),
            }
        }
        successes
    }
}

/// The guest runs in the destination. The source is stopped.
pub(super) struct Transferred {
    pub running: Destination<RunningStage<CopiedRam>>,
    pub stopped_host_us: u64,
}

/// A source that is still the domain's QEMU as it was inspected. Its guest runs, and little of its RAM is left to copy.
pub(super) struct Approached {
    qmp: Qmp,
    state: SourceState,
}

/// Does what must wait until libvirt's daemon is stopped, and can be done while the guest runs: no client can change the
/// domain any more.
pub(super) fn approach(
    handover: &mut Handover,
    baseline: &Baseline,
    destination: &mut Destination<PreparedStage<CopiedRam>>,
) -> Result<Approached, RebootError> {
    let libvirt = operation(handover)?.clone();
    let source = handover.source().cloned().ok_or_else(|| DomainError::Lost { name: handover.name().into() })?;
    let mut source_qmp = source.connect(MONITOR_TIMEOUT)?;
    baseline.check_unchanged(&libvirt, &mut source_qmp)?;
    handover.recorder.step("check the source");
    let ram = &mut destination.stage.ram;
    ram.copy_while_running(&mut source_qmp, CopyLimit::default()).map_err(DomainError::from)?;
    // Not from QEMU's own list: QEMU 7.2 does not report the addresses of its blocks.
    let blocks = GuestRam::of(&mut source_qmp, source.process()).map_err(CopyError::from).map_err(DomainError::from)?;
    let carried = ram.carried_blocks(blocks.blocks().iter().map(|block| block.info.clone()).collect());
    // No file: without the source's private RAM, the state of the devices is useless.
    let mut sink = StateSink { feed: Some(&mut destination.stage.feed), file: None };
    let form = StreamForm::Foreign { machine: baseline.adopted.machine.clone() };
    let state = SourceState::prepare(&source, &mut source_qmp, carried, form, &mut sink)?;
    handover.recorder.step("copy memory");
    Ok(Approached { qmp: source_qmp, state })
}

/// Moves the guest from the source to the destination.
pub(super) fn hand_over(
    handover: &mut Handover,
    source: Approached,
    mut destination: Destination<PreparedStage<CopiedRam>>,
) -> Result<Transferred, RebootError> {
    let Approached { qmp: mut source_qmp, state: mut source_state } = source;
    handover.advance(Step::Suspend)?;
    handover.pass("libvirt.suspend.journalled");
    handover.recorder.phase(Phase::Suspend);
    let stopped_host_us = guest::stop(&mut source_qmp)?;
    handover.pass("libvirt.suspend.stopped");
    handover.recorder.step("stop");
    source_state.begin(&mut source_qmp)?;
    let mut sink = StateSink { feed: Some(&mut destination.stage.feed), file: None };
    source_state.send_blocks(&mut sink)?;
    let devices = source_state.send_devices(&mut source_qmp, None)?.bytes;
    handover.recorder.step("save devices");
    // The last of the guest's requests to its disks ended when it was stopped, so its RAM does not change any more.
    let resumed = |_| DomainError::Changed { name: handover.name().into(), what: "its guest was resumed".into() };
    let mut stopped = Stopped::check(&mut source_qmp).map_err(resumed)?;
    destination.stage.ram.copy_rest(&mut stopped).map_err(DomainError::from)?;
    handover.recorder.step("copy the rest");
    // Not earlier: a destination that loads a virtio device compares its state with the rings in RAM.
    destination.stage.feed.write(&devices)?;
    destination.stage.feed.write(&stream::EMPTY_DESCRIPTION)?;
    handover.pass("libvirt.suspend.copied");
    let loaded = destination.finish_feed().wait(handover, LOAD_TIMEOUT)?;
    handover.recorder.step("load");
    handover.pass("libvirt.suspend.loaded");
    source::freeze(handover)?;
    handover.recorder.step("freeze");
    handover.pass("libvirt.suspend.frozen");
    let running = loaded.commit(handover, "resume")?;
    handover.pass("libvirt.resume.resumed");
    Ok(Transferred { running, stopped_host_us })
}
