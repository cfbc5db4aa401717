//! All guests, or none, out of their QEMUs.

use super::one::{Ready, Saved, look};
use super::record::{Entry, Record, beside, pair};
use super::survived::boot_id;
use super::{HostError, How};
use crate::vmm::{Patience, Problem, RebootError};
use rekindle_qemu::binary::Binary;
use rekindle_vm::host::Host;
use rekindle_vm::life::{self, LifeError, Status};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::timeline::host_us;
use rekindle_vm::{disks, fault};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::Path;
use std::thread;

/// What becomes of a guest that cannot be suspended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fallback {
    /// Then none is.
    None,
    /// It is shut down, and booted after: a shutdown of the host that is under way cannot be called off.
    Cold,
}

/// A guest that was suspended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Suspended {
    /// The VM.
    pub name: String,
    /// How.
    pub how: How,
    /// When it was stopped: host clock, microseconds since 1970.
    pub stop_us: u64,
    /// Why it was shut down although something else was wanted.
    pub fell_back: Option<String>,
}

/// Suspend the guests of `wanted`, each in its way, under `token`.
///
/// *Needs:* the VMs run; nothing else is at work on them; none is suspended still.
/// *On success:* their QEMUs have ended, and [`super::resume()`] lets them go on, also in another boot of the host.
/// *On failure:* all go on, but for [`HostError::Ending`]: those are suspended. With [`Fallback::Cold`] only the record can fail.
///
/// Nobody is stopped before everybody is ready. Those that are shut down go first, then those that are saved, and last those whose RAM
/// stays, since they take least time.
///
/// # Errors
/// [`HostError`].
pub fn suspend(
    host: &Host,
    wanted: &[(String, How)],
    token: &str,
    fallback: Fallback,
) -> Result<Vec<Suspended>, HostError> {
    let mut record = Record::begin(&host.suspend_dir)?;
    let mut failed = Vec::new();
    let mut given_up = Vec::new();
    let mut ready = Vec::new();
    for (name, got) in side_by_side(wanted, |(name, how)| (name.clone(), get_ready(host, name, *how))) {
        match got {
            Ok(one) => ready.push((one, None)),
            Err(error) => failed.push((name, error)),
        }
    }
    if fallback == Fallback::Cold {
        for (name, error) in std::mem::take(&mut failed) {
            let why = why(&error);
            tracing::warn!("{name} is shut down instead: {why}");
            match get_ready(host, &name, How::Cold) {
                Ok(one) => ready.push((one, Some(why))),
                Err(e) => given_up.push((name, e)),
            }
        }
    }
    if !failed.is_empty() {
        ready.into_iter().for_each(|(one, _)| one.give_up());
        return Err(refused(failed));
    }
    // What is on its way to the disks anyway is not to be waited for with guests stopped.
    rustix::fs::sync();

    // Before all of them write there side by side.
    let places: Vec<_> = ready.iter().filter(|(one, _)| one.how() == How::Warm).map(|(one, _)| one.place()).collect();
    let paired = places.iter().try_for_each(|(_, state)| pair(state, token));
    if let Err(source) = paired {
        let path = places.first().map(|(_, state)| beside(state)).unwrap_or_default();
        ready.into_iter().for_each(|(one, _)| one.give_up());
        return Err(HostError::File { path, source });
    }

    let mut saved = Vec::new();
    for how in [How::Cold, How::Saved, How::Warm] {
        let (now, later): (Vec<_>, Vec<_>) = ready.into_iter().partition(|(one, _)| one.how() == how);
        ready = later;
        if !failed.is_empty() {
            now.into_iter().for_each(|(one, _)| one.give_up());
            continue;
        }
        let outcomes = side_by_side_owned(now, |(one, fell_back)| {
            let name = one.name().to_owned();
            (name, one.save(host, token, fell_back))
        });
        for (name, outcome) in outcomes {
            match outcome {
                Ok(one) => saved.push(one),
                Err(error) if fallback == Fallback::Cold && how != How::Cold => {
                    let why = why(&error);
                    tracing::warn!("{name} is shut down instead: {why}");
                    match get_ready(host, &name, How::Cold).and_then(|one| one.save(host, token, Some(why))) {
                        Ok(one) => saved.push(one),
                        Err(e) => given_up.push((name, e)),
                    }
                }
                Err(error) if fallback == Fallback::Cold => given_up.push((name, error)),
                Err(error) => failed.push((name, error)),
            }
        }
    }
    let listed = given_up.iter().try_for_each(|(name, error)| {
        let why = why(error);
        tracing::error!("{name} ends with the host, and is booted after: {why}");
        match State::read(&RunDir::new(&host.root, name)) {
            Ok(Some(state)) => record.list(&Entry::given_up(token, state, why)),
            _ => Ok(()),
        }
    });
    let committed = match failed.is_empty() {
        true => listed.and_then(|()| commit(&mut record, &saved, token)),
        false => Err(HostError::Suspend(failed)),
    };
    if let Err(error) = committed {
        side_by_side_owned(saved, |one| one.back(host));
        places.iter().for_each(|(rundir, state)| record.sweep(rundir, state));
        return Err(error);
    }
    fault::point("host.suspend.committed", saved.first().map(Saved::vmm), None);

    let told = saved.iter().map(|one| Suspended {
        name: one.name().into(),
        how: one.entry.how,
        stop_us: one.entry.stop_us,
        fell_back: one.entry.fell_back.clone(),
    });
    let told = told.collect();
    let ended = side_by_side_owned(saved, |one| (one.name().to_owned(), one.end()));
    let left: Vec<_> = ended.into_iter().filter_map(|(name, ended)| Some((name, ended.err()?))).collect();
    if left.is_empty() { Ok(told) } else { Err(HostError::Ending(left)) }
}

/// A VM, and why it cannot be suspended, if it cannot.
pub type Checked = (String, Result<(), RebootError>);

/// Looks at whether [`suspend`] could be done, VM by VM. Nothing is changed.
///
/// # Errors
/// [`HostError::StillSuspended`], [`HostError::Record`].
pub fn check(host: &Host, wanted: &[(String, How)]) -> Result<Vec<Checked>, HostError> {
    let still = Record::read(&host.suspend_dir)?.names()?;
    if !still.is_empty() {
        return Err(HostError::StillSuspended(still));
    }
    let one = |name: &str, how| look(host, name, how, |path| Binary::known(path, &host.binaries())).map(drop);
    Ok(wanted.iter().map(|(name, how)| (name.clone(), one(name, *how))).collect())
}

/// Finish or undo what a suspend under `token` that was cut off has left of the VMs `names`, so that it can be tried again: at the end of a
/// shutdown there is nobody else to see to it.
///
/// *On success:* `true`, and the suspend had been committed: the QEMUs that were left have ended. `false`: it had not, and the guests
/// go on; what of one cannot be undone is told in the log.
/// *On failure:* nothing was done, or only some of the QEMUs have ended.
///
/// # Errors
/// [`HostError::Record`], [`HostError::Ending`].
pub fn take_up(host: &Host, names: &[String], token: &str) -> Result<bool, HostError> {
    let record = Record::hold(&host.suspend_dir)?;
    if record.head.as_ref().is_some_and(|head| head.token == token) {
        let listed = record.names()?;
        let entries: Vec<_> =
            listed.iter().filter_map(|name| record.entry(name).transpose()).collect::<Result<_, _>>()?;
        // Nobody has let one of them go since: that is for another boot, or for somebody who holds the record.
        let ended = side_by_side_owned(entries, |entry| (entry.state.hardware.name.clone(), end_left(host, &entry)));
        let left: Vec<_> = ended.into_iter().filter_map(|(name, ended)| Some((name, ended.err()?))).collect();
        return if left.is_empty() { Ok(true) } else { Err(HostError::Ending(left)) };
    }
    drop(record);
    for name in names {
        let rundir = RunDir::new(&host.root, name);
        if matches!(life::status(&rundir), Ok(Status::NeedsRecovery))
            && let Err(error) = crate::vmm::recover(host, name, Patience::default())
        {
            tracing::warn!("{name}: {}", why(&error));
        }
    }
    Ok(false)
}

/// The QEMU of a guest that is suspended goes, and the servers of its disks, if they are still there.
fn end_left(host: &Host, entry: &Entry) -> Result<(), RebootError> {
    let rundir = RunDir::new(&host.root, &entry.state.hardware.name);
    if let Some(old) = entry.state.vmm.as_ref().filter(|old| !entry.struck && old.is_alive()) {
        old.kill().map_err(|source| RebootError::File { path: rundir.path().to_owned(), source })?;
    }
    Ok(disks::end(&rundir, &entry.state.hardware).map_err(LifeError::from)?)
}

fn get_ready(host: &Host, name: &str, how: How) -> Result<Ready, RebootError> {
    Ready::new(look(host, name, how, |path| Binary::known(path, &host.binaries()))?)
}

fn why(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
}

/// Everything is on its place, and lasts; then the record says so.
fn commit(record: &mut Record, saved: &[Saved], token: &str) -> Result<(), HostError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| HostError::File { path: path.clone(), source }
    };
    let mut directories: Vec<_> = saved.iter().filter_map(Saved::ram_directory).collect();
    directories.sort_unstable();
    directories.dedup();
    for directory in directories {
        // With DAX, also what of the RAM is in the processors' caches only.
        let opened = File::open(directory).map_err(failed(directory))?;
        rustix::fs::syncfs(&opened).map_err(|e| failed(directory)(e.into()))?;
    }
    saved.iter().try_for_each(|one| record.list(&one.told()))?;
    fault::point("host.suspend.listed", saved.first().map(Saved::vmm), None);
    let boot_id = boot_id().map_err(failed(Path::new("/proc/sys/kernel/random/boot_id")))?;
    record.commit(token.into(), boot_id, host_us())
}

fn refused(failed: Vec<(String, RebootError)>) -> HostError {
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

/// Do `work` with each, all at once; the results are in their order.
pub(super) fn side_by_side<'a, T: Sync, R: Send>(all: &'a [T], work: impl Fn(&'a T) -> R + Sync) -> Vec<R> {
    side_by_side_owned(all.iter().collect(), work)
}

/// The same with each given away.
pub(super) fn side_by_side_owned<T: Send, R: Send>(all: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
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
