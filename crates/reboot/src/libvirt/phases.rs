//! The replacement of the QEMUs of several domains, phase by phase.

use super::absence::{AbsenceResult, replace_in_absence};
use super::batches::divide;
use super::prepare::{Candidate, Prepared, prepare};
use super::{DomainError, DomainOptions, panicked, preflight};
use crate::error::Failure;
use crate::parallel::{Panicked, ProcessorGate, in_threads};
use crate::unprepared::OPERATION;
use crate::vmm::{RebootReport, VmOutcome};
use rekindle_kernel::process::Process;
use rekindle_libvirt::daemon::DaemonError;
use rekindle_libvirt::daemon::lock::{DaemonLock, check_jobs};
use rekindle_memory::room::available_to;
use rekindle_vm::host::Host;
use rekindle_vm::timeline::Recorder;
use std::sync::Arc;

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
        let not_started = || Err(error.as_ref().map_or_else(|| panicked(name), daemon_failure));
        VmOutcome { name: name.clone(), result: result.unwrap_or_else(not_started) }
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
            let domain = gate.pass(|| preflight::inspect(host, name, options)).map_err(Failure::unchanged)?;
            recorder.step("preflight");
            Ok(Candidate { position, name: name.clone(), recorder, domain })
        });
        self.keep_successes(&rest, inspected)
    }

    /// Chooses the domains of the next absence: as many as there is memory for.
    fn next_batch(candidates: Vec<Candidate>) -> Vec<Candidate> {
        let needs: Vec<u64> = candidates.iter().map(|candidate| candidate.domain.inspected.transfer_bytes).collect();
        // The preflight has read it, too. Without it, each domain is a batch of its own.
        let available = Process::current().and_then(available_to).unwrap_or(0);
        let mut batches = divide(&needs, available).into_iter();
        let first = batches.next().unwrap_or_default();
        if !batches.as_slice().is_empty() {
            tracing::info!("there is memory for {} of {} domains at a time", first.len(), needs.len());
        }
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
