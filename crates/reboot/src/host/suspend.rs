//! Suspends all guests, or none.

use super::guest::{PreparedSuspend, SavedGuest, preflight};
use super::record::{SuspendRecord, SuspendedGuest, state_directory, write_token};
use super::survived::boot_id;
use super::{HostError, RebootMethod};
use crate::error::{Problem, RebootError};
use rekindle_qemu::binary::Binary;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::timeline::host_us;
use rekindle_vm::{disks, fault};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::Path;
use std::thread;

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

/// Suspends the guests named in `wanted`, each by its method, in a record with this `token`.
///
/// *Needs:* the VMs run; no other operation holds them; no guest is still suspended.
/// *On success:* the guests' QEMUs have ended, and [`super::resume()`] resumes the guests, also in another boot.
/// *On failure:* all guests continue to run, except with [`HostError::Ending`]: then they are suspended. With
/// [`Fallback::Cold`] only errors of the record are returned.
///
/// No guest is stopped before all are prepared. Guests to be shut down are processed first, then those to be saved, and
/// last those whose RAM stays in place, because they take the least time.
pub fn suspend(
    host: &Host,
    wanted: &[(String, RebootMethod)],
    token: &str,
    fallback: Fallback,
) -> Result<Vec<SuspendReport>, HostError> {
    let mut record = SuspendRecord::begin(&host.suspend_dir)?;
    let mut failed = Vec::new();
    let mut not_suspended = Vec::new();
    let mut prepared = Vec::new();
    for (name, result) in in_parallel(wanted, |(name, how)| (name.clone(), prepare(host, name, *how))) {
        match result {
            Ok(one) => prepared.push((one, None)),
            Err(error) => failed.push((name, error)),
        }
    }
    if fallback == Fallback::Cold {
        for (name, error) in std::mem::take(&mut failed) {
            let why = with_cause(&error);
            tracing::warn!("{name} is shut down instead: {why}");
            match prepare(host, &name, RebootMethod::Cold) {
                Ok(one) => prepared.push((one, Some(why))),
                Err(e) => not_suspended.push((name, e)),
            }
        }
    }
    if !failed.is_empty() {
        prepared.into_iter().for_each(|(one, _)| one.cancel());
        return Err(preparation_error(failed));
    }
    // Write pending data now, so that syncing takes less time while guests are stopped.
    rustix::fs::sync();

    // Write the tokens before the guests write to these directories concurrently.
    let warm_guests: Vec<_> = prepared
        .iter()
        .filter(|(one, _)| one.how() == RebootMethod::Warm)
        .map(|(one, _)| one.rundir_and_state())
        .collect();
    let paired = warm_guests.iter().try_for_each(|(_, state)| write_token(state, token));
    if let Err(source) = paired {
        let path = warm_guests.first().map(|(_, state)| state_directory(state)).unwrap_or_default();
        prepared.into_iter().for_each(|(one, _)| one.cancel());
        return Err(HostError::File { path, source });
    }

    let mut saved = Vec::new();
    for how in [RebootMethod::Cold, RebootMethod::Saved, RebootMethod::Warm] {
        let (now, later): (Vec<_>, Vec<_>) = prepared.into_iter().partition(|(one, _)| one.how() == how);
        prepared = later;
        if !failed.is_empty() {
            now.into_iter().for_each(|(one, _)| one.cancel());
            continue;
        }
        let outcomes = in_parallel_owned(now, |(one, fell_back)| {
            let name = one.name().to_owned();
            (name, one.save(host, token, fell_back))
        });
        for (name, outcome) in outcomes {
            match outcome {
                Ok(one) => saved.push(one),
                Err(error) if fallback == Fallback::Cold && how != RebootMethod::Cold => {
                    let why = with_cause(&error);
                    tracing::warn!("{name} is shut down instead: {why}");
                    match prepare(host, &name, RebootMethod::Cold).and_then(|one| one.save(host, token, Some(why))) {
                        Ok(one) => saved.push(one),
                        Err(e) => not_suspended.push((name, e)),
                    }
                }
                Err(error) if fallback == Fallback::Cold => not_suspended.push((name, error)),
                Err(error) => failed.push((name, error)),
            }
        }
    }
    let listed = not_suspended.iter().try_for_each(|(name, error)| {
        let why = with_cause(error);
        tracing::error!("{name} ends with the host and will be booted afterwards: {why}");
        match State::read(&RunDir::new(&host.root, name)) {
            Ok(Some(state)) => record.write_entry(&SuspendedGuest::not_suspended(token, state, why)),
            _ => Ok(()),
        }
    });
    let committed = match failed.is_empty() {
        true => listed.and_then(|()| commit(&mut record, &saved, token)),
        false => Err(HostError::Suspend(failed)),
    };
    if let Err(error) = committed {
        in_parallel_owned(saved, SavedGuest::undo);
        warm_guests.iter().for_each(|(rundir, state)| record.remove_leftovers(rundir, state));
        return Err(error);
    }
    fault::point("host.suspend.committed", saved.first().map(SavedGuest::vmm), None);

    let entry_with_steps = saved.iter().map(|one| SuspendReport {
        name: one.name().into(),
        how: one.entry.how,
        stop_us: one.entry.stop_us,
        fell_back: one.entry.fell_back.clone(),
    });
    let entry_with_steps = entry_with_steps.collect();
    let ended = in_parallel_owned(saved, |one| (one.name().to_owned(), one.end()));
    let left: Vec<_> = ended.into_iter().filter_map(|(name, ended)| Some((name, ended.err()?))).collect();
    if left.is_empty() { Ok(entry_with_steps) } else { Err(HostError::Ending(left)) }
}

/// Name of a VM, and the error that prevents its suspend, if there is one.
pub type CheckResult = (String, Result<(), RebootError>);

/// Checks whether [`suspend`] is possible, VM by VM. Changes nothing.
///
/// # Errors
/// [`HostError::StillSuspended`] if guests are suspended, [`HostError::Record`] if the record cannot be read.
pub fn check(host: &Host, wanted: &[(String, RebootMethod)]) -> Result<Vec<CheckResult>, HostError> {
    let still = SuspendRecord::read(&host.suspend_dir)?.names()?;
    if !still.is_empty() {
        return Err(HostError::StillSuspended(still));
    }
    let one =
        |name: &str, how| preflight(host, name, how, |path| Binary::probe_cached(path, &host.binaries())).map(drop);
    Ok(wanted.iter().map(|(name, how)| (name.clone(), one(name, *how))).collect())
}

/// If a suspend under `token` was committed, ends the QEMUs that remain of it. Returns whether it was committed.
///
/// # Errors
/// [`HostError::Record`] if the record cannot be read, [`HostError::Ending`] if a QEMU does not end.
pub(crate) fn end_committed_suspend(host: &Host, token: &str) -> Result<bool, HostError> {
    let record = SuspendRecord::lock(&host.suspend_dir)?;
    if record.head.as_ref().is_none_or(|head| head.token != token) {
        return Ok(false);
    }
    let listed = record.names()?;
    let entries: Vec<_> = listed.iter().filter_map(|name| record.entry(name).transpose()).collect::<Result<_, _>>()?;
    // No guest was resumed since then: only another boot, or a process that holds the record, resumes guests.
    let ended = in_parallel_owned(entries, |entry| (entry.state.hardware.name.clone(), end_remaining(host, &entry)));
    let failures: Vec<_> = ended.into_iter().filter_map(|(name, ended)| Some((name, ended.err()?))).collect();
    if failures.is_empty() { Ok(true) } else { Err(HostError::Ending(failures)) }
}

/// Ends the QEMU and the disk servers of a suspended guest, if they still run.
fn end_remaining(host: &Host, entry: &SuspendedGuest) -> Result<(), RebootError> {
    let rundir = RunDir::new(&host.root, &entry.state.hardware.name);
    if let Some(source_qemu) = entry.state.vmm.as_ref().filter(|source_qemu| !entry.struck && source_qemu.is_alive()) {
        source_qemu.kill().map_err(|source| RebootError::File { path: rundir.path().to_owned(), source })?;
    }
    Ok(disks::end(&rundir, &entry.state.hardware).map_err(LifeError::from)?)
}

fn prepare(host: &Host, name: &str, how: RebootMethod) -> Result<PreparedSuspend, RebootError> {
    PreparedSuspend::new(preflight(host, name, how, |path| Binary::probe_cached(path, &host.binaries()))?)
}

pub(crate) fn with_cause(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
}

/// Makes all saved state durable, then commits the record.
fn commit(record: &mut SuspendRecord, saved: &[SavedGuest], token: &str) -> Result<(), HostError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| HostError::File { path: path.clone(), source }
    };
    let mut directories: Vec<_> = saved.iter().filter_map(SavedGuest::ram_directory).collect();
    directories.sort_unstable();
    directories.dedup();
    for directory in directories {
        // With DAX, this also writes back RAM that is only in processor caches.
        let opened = File::open(directory).map_err(failed(directory))?;
        rustix::fs::syncfs(&opened).map_err(|e| failed(directory)(e.into()))?;
    }
    saved.iter().try_for_each(|one| record.write_entry(&one.entry_with_steps()))?;
    fault::point("host.suspend.listed", saved.first().map(SavedGuest::vmm), None);
    let boot_id = boot_id().map_err(failed(Path::new("/proc/sys/kernel/random/boot_id")))?;
    record.commit(token.into(), boot_id, host_us())
}

fn preparation_error(failed: Vec<(String, RebootError)>) -> HostError {
    let all_against = failed.iter().all(|(_, error)| matches!(error, RebootError::Preflight { .. }));
    if !all_against {
        return HostError::Suspend(failed);
    }
    let problems = |error| match error {
        RebootError::Preflight { problems, .. } => problems,
        other => vec![Problem(other.to_string())],
    };
    HostError::Preflight(failed.into_iter().map(|(name, error)| (name, problems(error))).collect())
}

/// Runs `work` on all items in parallel. The results are in the order of the items.
pub(super) fn in_parallel<'a, T: Sync, R: Send>(all: &'a [T], work: impl Fn(&'a T) -> R + Sync) -> Vec<R> {
    in_parallel_owned(all.iter().collect(), work)
}

/// Runs `work` on all items in parallel as [`in_parallel`] does, but passes each item by value.
pub(super) fn in_parallel_owned<T: Send, R: Send>(all: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let work = &work;
    thread::scope(|scope| {
        let workers: Vec<_> = all.into_iter().map(|one| scope.spawn(move || work(one))).collect();
        let join = |worker: thread::ScopedJoinHandle<'_, R>| worker.join();
        workers
            .into_iter()
            .map(|worker| join(worker).unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}
