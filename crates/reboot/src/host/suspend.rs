//! Suspends all guests, or none.
//!
//! All guests are prepared while they run; then they are stopped and saved; then the record is committed; and only then
//! do their QEMUs end. Until the commit, each guest can be resumed in the QEMU in which it was stopped.

use super::guest::{PreparedSuspend, SavedGuest, preflight};
use super::parallel::in_parallel;
use super::plan::PlannedVm;
use super::record::{SuspendRecord, SuspendedGuest, state_directory, write_token};
use super::survived::{BOOT_ID_FILE, boot_id};
use super::{FailedVm, HostError, PreventingVm, RebootMethod};
use crate::error::{Problem, RebootError};
use rekindle_vm::causes::with_causes;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::timeline::host_us;
use rekindle_vm::{disks, fault};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;

/// Action if a guest cannot be suspended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fallback {
    /// Suspend no guest.
    None,
    /// Shut the guest down, and boot it later: a shutdown of the host that is in progress cannot be cancelled.
    Cold,
}

/// Report on one suspended guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SuspendReport {
    pub name: String,
    pub how: RebootMethod,
    /// When the guest was stopped: host clock, microseconds since 1970.
    pub stop_us: u64,
    /// Reason why the guest was shut down although another method was requested.
    pub fell_back: Option<String>,
}

/// Suspends the guests of `vms`, each by its method, in a record with this `token`.
///
/// *Needs:* the VMs run; no other operation holds them; no guest is still suspended.
/// *On success:* the guests' QEMUs have ended, and [`super::resume()`] resumes the guests, also in another boot.
/// *On failure:* all guests continue to run, except with [`HostError::Ending`]: then they are suspended. With
/// [`Fallback::Cold`] only errors of the record are returned.
pub fn suspend(
    host: &Host,
    vms: &[PlannedVm],
    token: &str,
    fallback: Fallback,
) -> Result<Vec<SuspendReport>, HostError> {
    let mut record = SuspendRecord::begin(&host.suspend_dir)?;
    let mut batch = Batch { host, token, fallback, failed: Vec::new(), not_suspended: Vec::new() };
    let prepared = batch.prepare_all(vms)?;
    // Write pending data now, so that syncing takes less time while guests are stopped.
    rustix::fs::sync();
    let warm_vms: Vec<_> = prepared
        .iter()
        .filter(|guest| guest.how() == RebootMethod::Warm)
        .map(|guest| WarmVm { rundir: guest.rundir().clone(), state: guest.state().clone() })
        .collect();
    // Write the tokens before the guests write to these directories concurrently.
    if let Err(error) = write_tokens(&warm_vms, token) {
        cancel_all(prepared);
        return Err(error);
    }
    let saved_guests = batch.save_all(prepared);
    if let Err(error) = batch.commit(&mut record, &saved_guests) {
        in_parallel(saved_guests, SavedGuest::undo);
        warm_vms.iter().for_each(|vm| record.remove_leftovers(&vm.rundir, &vm.state));
        return Err(error);
    }
    fault::point("host.suspend.committed", saved_guests.first().map(SavedGuest::vmm), None);
    let reports = saved_guests.iter().map(|guest| report(&guest.entry)).collect();
    end_all(saved_guests, |guest| {
        let name = guest.name().to_owned();
        guest.end().map_err(|error| FailedVm { name, error })
    })?;
    Ok(reports)
}

fn report(entry: &SuspendedGuest) -> SuspendReport {
    SuspendReport {
        name: entry.state.hardware.name.clone(),
        how: entry.how,
        stop_us: entry.stop_us,
        fell_back: entry.fell_back.clone(),
    }
}

/// A VM whose RAM stays in place, next to which the suspend writes files.
struct WarmVm {
    rundir: RunDir,
    state: State,
}

/// The guests of one call of [`suspend`].
struct Batch<'a> {
    host: &'a Host,
    token: &'a str,
    fallback: Fallback,
    /// VMs that could not be suspended, with [`Fallback::None`]: no guest is to be suspended.
    failed: Vec<FailedVm>,
    /// VMs that could neither be suspended nor shut down, with [`Fallback::Cold`]: they end with the host.
    not_suspended: Vec<FailedVm>,
}

impl Batch<'_> {
    /// Prepares all guests while they run.
    ///
    /// *On failure:* no guest was stopped.
    fn prepare_all(&mut self, vms: &[PlannedVm]) -> Result<Vec<PreparedSuspend>, HostError> {
        let outcomes = in_parallel(vms, |vm| PreparedSuspend::new(self.host, &vm.name, vm.how, None));
        let mut prepared = Vec::new();
        for (vm, outcome) in vms.iter().zip(outcomes) {
            let outcome = match (outcome, self.fallback) {
                (Err(error), Fallback::Cold) => self.prepare_shutdown(&vm.name, &error),
                (outcome, _) => outcome,
            };
            match outcome {
                Ok(guest) => prepared.push(guest),
                Err(error) => self.add_failure(vm.name.clone(), error),
            }
        }
        if self.failed.is_empty() {
            return Ok(prepared);
        }
        cancel_all(prepared);
        Err(preparation_error(std::mem::take(&mut self.failed)))
    }

    /// Stops and saves the guests, those first whose method takes longest: guests to be shut down, then those to be
    /// saved to disk, and last those whose RAM stays in place. After a failure no more guests are stopped.
    fn save_all(&mut self, mut waiting: Vec<PreparedSuspend>) -> Vec<SavedGuest> {
        let mut saved_guests = Vec::new();
        for how in [RebootMethod::Cold, RebootMethod::Saved, RebootMethod::Warm] {
            let (group, later_groups): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|guest| guest.how() == how);
            waiting = later_groups;
            if !self.failed.is_empty() {
                cancel_all(group);
                continue;
            }
            let names: Vec<_> = group.iter().map(|guest| guest.name().to_owned()).collect();
            let outcomes = in_parallel(group, |guest| guest.save(self.host, self.token));
            for (name, outcome) in names.into_iter().zip(outcomes) {
                let outcome = match outcome {
                    Err(error) if self.fallback == Fallback::Cold && how != RebootMethod::Cold => {
                        self.prepare_shutdown(&name, &error).and_then(|guest| guest.save(self.host, self.token))
                    }
                    outcome => outcome,
                };
                match outcome {
                    Ok(guest) => saved_guests.push(guest),
                    Err(error) => self.add_failure(name, error),
                }
            }
        }
        saved_guests
    }

    /// Prepares a guest to be shut down, because of an error of the requested method.
    fn prepare_shutdown(&self, name: &str, error: &RebootError) -> Result<PreparedSuspend, RebootError> {
        let why = with_causes(error);
        tracing::warn!("{name} is shut down instead: {why}");
        PreparedSuspend::new(self.host, name, RebootMethod::Cold, Some(why))
    }

    fn add_failure(&mut self, name: String, error: RebootError) {
        match self.fallback {
            Fallback::None => self.failed.push(FailedVm { name, error }),
            Fallback::Cold => self.not_suspended.push(FailedVm { name, error }),
        }
    }

    /// Makes all saved state durable, then commits the record, unless a guest could not be suspended.
    fn commit(&mut self, record: &mut SuspendRecord, saved_guests: &[SavedGuest]) -> Result<(), HostError> {
        if !self.failed.is_empty() {
            return Err(HostError::Suspend(std::mem::take(&mut self.failed)));
        }
        self.record_not_suspended(record)?;
        let ram_directories: BTreeSet<_> = saved_guests.iter().filter_map(SavedGuest::ram_directory).collect();
        for directory in ram_directories {
            // With DAX, this also writes back RAM that is only in processor caches.
            let failed = HostError::file(directory);
            let file_system = File::open(directory).map_err(&failed)?;
            rustix::fs::syncfs(&file_system).map_err(|e| failed(e.into()))?;
        }
        for guest in saved_guests {
            record.write_entry(&guest.entry_with_steps())?;
        }
        fault::point("host.suspend.listed", saved_guests.first().map(SavedGuest::vmm), None);
        let boot_id = boot_id().map_err(HostError::file(Path::new(BOOT_ID_FILE)))?;
        record.commit(self.token.into(), boot_id, host_us())
    }

    /// Records the guests that end with the host, so that the next boot starts them.
    fn record_not_suspended(&self, record: &SuspendRecord) -> Result<(), HostError> {
        for FailedVm { name, error } in &self.not_suspended {
            let why = with_causes(error);
            tracing::error!("{name} ends with the host and will be booted afterwards: {why}");
            if let Ok(Some(state)) = State::read(&RunDir::new(&self.host.root, name)) {
                record.write_entry(&SuspendedGuest::not_suspended(self.token, state, why))?;
            }
        }
        Ok(())
    }
}

fn write_tokens(warm_vms: &[WarmVm], token: &str) -> Result<(), HostError> {
    for vm in warm_vms {
        write_token(&vm.state, token).map_err(HostError::file(&state_directory(&vm.state)))?;
    }
    Ok(())
}

fn cancel_all(prepared: Vec<PreparedSuspend>) {
    prepared.into_iter().for_each(PreparedSuspend::cancel);
}

/// Returns the error of a failed preparation: the list of problems if all VMs have failed in their preflights.
fn preparation_error(failed: Vec<FailedVm>) -> HostError {
    if failed.iter().any(|vm| !matches!(vm.error, RebootError::Preflight { .. })) {
        return HostError::Suspend(failed);
    }
    let with_problems = |FailedVm { name, error }| match error {
        RebootError::Preflight { problems, .. } => PreventingVm { name, problems },
        error => PreventingVm { name, problems: vec![Problem(error.to_string())] },
    };
    HostError::Preflight(failed.into_iter().map(with_problems).collect())
}

/// Ends the QEMUs of suspended guests in parallel.
fn end_all<T: Send>(guests: Vec<T>, end_one: impl Fn(T) -> Result<(), FailedVm> + Sync) -> Result<(), HostError> {
    let failed: Vec<_> = in_parallel(guests, end_one).into_iter().filter_map(Result::err).collect();
    if failed.is_empty() { Ok(()) } else { Err(HostError::Ending(failed)) }
}

/// Whether one VM can be suspended.
pub struct SuspendCheck {
    pub name: String,
    pub result: Result<(), RebootError>,
}

/// Checks whether [`suspend`] is possible, VM by VM. Changes nothing.
///
/// # Errors
/// [`HostError::StillSuspended`] if guests are suspended, [`HostError::Record`] if the record cannot be read.
pub fn check_suspend(host: &Host, vms: &[PlannedVm]) -> Result<Vec<SuspendCheck>, HostError> {
    let still_suspended = SuspendRecord::read(&host.suspend_dir)?.names()?;
    if !still_suspended.is_empty() {
        return Err(HostError::StillSuspended(still_suspended));
    }
    let check =
        |vm: &PlannedVm| SuspendCheck { name: vm.name.clone(), result: preflight(host, &vm.name, vm.how).map(drop) };
    Ok(vms.iter().map(check).collect())
}

/// If a suspend under `token` was committed, ends the QEMUs that remain of it. Returns whether it was committed.
///
/// # Errors
/// [`HostError::Record`] if the record cannot be read, [`HostError::Ending`] if a QEMU does not end.
pub(crate) fn end_committed_suspend(host: &Host, token: &str) -> Result<bool, HostError> {
    let record = SuspendRecord::lock(&host.suspend_dir)?;
    if record.header.as_ref().is_none_or(|header| header.token != token) {
        return Ok(false);
    }
    // No guest was resumed since then: only another boot, or a process that holds the record, resumes guests.
    end_all(record.entries()?, |entry| {
        let name = entry.state.hardware.name.clone();
        end_remaining(host, &entry).map_err(|error| FailedVm { name, error })
    })?;
    Ok(true)
}

/// Ends the QEMU and the disk servers of a suspended guest, if they still run.
fn end_remaining(host: &Host, entry: &SuspendedGuest) -> Result<(), RebootError> {
    let rundir = RunDir::new(&host.root, &entry.state.hardware.name);
    if let Some(source_qemu) =
        entry.state.vmm.as_ref().filter(|source_qemu| !entry.resume_started && source_qemu.is_alive())
    {
        source_qemu.kill().map_err(RebootError::file(rundir.path()))?;
    }
    Ok(disks::end(&rundir, &entry.state.hardware).map_err(LifeError::from)?)
}
