//! The processes that serve a VM in addition to its QEMU, and which of them are missing.
//!
//! | helper | without it | restarted by |
//! |---|---|---|
//! | the server of a disk | the guest waits for that disk | `rekindle watch` |
//! | the pager of a restore | the guest waits for each page that is not loaded yet | `rekindle watch` |
//! | the process that saves phases | no phase of the guest's boot is saved | `rekindle watch` |
//! | `rekindle watch` | nothing restarts the others, and logs are not rotated | the next `rekindle recover`, `reboot` or `restore` |
//!
//! Each helper has a lock file or a socket in the run directory, through which its process is found. No process is
//! identified by its arguments.

use crate::disks;
use crate::rundir::{self, RunDir, write_json};
use crate::state::State;
use rekindle_kernel::file::{FlockTable, flock_holder};
use rekindle_kernel::process::Process;
use rekindle_qemu::vmm::Vmm;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::PathBuf;

/// A process that serves a VM in addition to its QEMU.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Helper {
    /// The server of the disk with this id.
    Disk(String),
    /// The pager of a restore that is not complete.
    Pager,
    /// The process that saves phases of the guest's boot.
    Phases,
    /// The process that restarts the other helpers.
    Watch,
}

impl Helper {
    /// Returns the helper's name in [`RestartRecord`] and in `show --json`.
    #[must_use]
    pub fn key(&self) -> String {
        match self {
            Self::Disk(id) => format!("disk:{id}"),
            Self::Pager => "pager".into(),
            Self::Phases => "phases".into(),
            Self::Watch => "watch".into(),
        }
    }

    /// Returns the helper's process, if it runs.
    #[must_use]
    pub fn process(&self, rundir: &RunDir) -> Option<Process> {
        let Some(lock) = self.lock_file(rundir) else {
            let Self::Disk(id) = self else { return None };
            return disks::server(rundir, id);
        };
        let pid = flock_holder(&lock).ok().flatten()?;
        Process::of(pid).ok().filter(Process::is_alive)
    }

    /// Returns the file with the `flock` that the helper holds; `None` for the server of a disk.
    fn lock_file(&self, rundir: &RunDir) -> Option<PathBuf> {
        match self {
            Self::Disk(_) => None,
            Self::Pager => Some(rundir.pager_lock()),
            Self::Phases => Some(rundir.phases_lock()),
            Self::Watch => Some(rundir.watch_lock()),
        }
    }

    /// Returns whether the helper holds its lock. Unlike [`Self::process`], this needs no right to connect to the helper.
    fn holds_lock(&self, rundir: &RunDir, locks: &FlockTable) -> bool {
        match (self, self.lock_file(rundir)) {
            (_, Some(lock)) => locks.holder(&lock).is_ok_and(|holder| holder.is_some()),
            (Self::Disk(id), None) => disks::is_served(rundir, id),
            (_, None) => false,
        }
    }
}

impl fmt::Display for Helper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disk(id) => write!(f, "the server of disk {id}"),
            Self::Pager => f.write_str("the pager"),
            Self::Phases => f.write_str("the process that saves phases"),
            Self::Watch => f.write_str("`rekindle watch`"),
        }
    }
}

/// A process of a helper that a signal has stopped (`SIGSTOP`). What it serves waits until it continues or is killed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoppedHelper {
    /// The helper that cannot serve.
    pub helper: Helper,
    /// The process is the broker of the helper.
    pub is_broker: bool,
    /// The process that is stopped.
    pub process: Process,
}

impl fmt::Display for StoppedHelper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { helper, is_broker, process: Process { pid, .. } } = self;
        let broker = if *is_broker { "the broker of " } else { "" };
        write!(f, "{broker}{helper} (process {pid}) was stopped by a signal; to resume it: kill -CONT {pid}")
    }
}

/// Returns the helpers of a VM that are stopped, and those whose broker is stopped.
///
/// # Errors
/// When the run directory, or `/proc`, cannot be read.
pub fn stopped(rundir: &RunDir) -> io::Result<Vec<StoppedHelper>> {
    stopped_among(rundir, needed(rundir)?)
}

/// Returns which of these helpers of a VM are stopped, or have a broker that is stopped.
///
/// # Errors
/// When `/proc` cannot be read.
pub fn stopped_among(rundir: &RunDir, helpers: impl IntoIterator<Item = Helper>) -> io::Result<Vec<StoppedHelper>> {
    let mut stopped = Vec::new();
    for helper in helpers {
        let Some(process) = helper.process(rundir) else { continue };
        // A broker stays in the session of its helper.
        let brokers = process.others_in_session()?.into_iter().map(|broker| (broker, true));
        let processes = [(process, false)].into_iter().chain(brokers).filter(|(process, _)| process.is_stopped());
        stopped.extend(processes.map(|(process, is_broker)| StoppedHelper {
            helper: helper.clone(),
            is_broker,
            process,
        }));
    }
    Ok(stopped)
}

/// Returns the disk servers that are stopped. Takes less time than [`stopped`].
///
/// # Errors
/// When the run directory cannot be read.
pub fn stopped_disk_servers(rundir: &RunDir) -> io::Result<Vec<StoppedHelper>> {
    let servers = needed(rundir)?.into_iter().filter(|helper| matches!(helper, Helper::Disk(_)));
    Ok(servers.filter_map(|helper| without_broker(rundir, &helper)).collect())
}

/// Returns the helper's process, not its broker, if it is stopped.
fn without_broker(rundir: &RunDir, helper: &Helper) -> Option<StoppedHelper> {
    let process = helper.process(rundir).filter(Process::is_stopped)?;
    Some(StoppedHelper { helper: helper.clone(), is_broker: false, process })
}

/// The restarts of one helper by `rekindle watch`: an entry of `helpers.json`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restarts {
    /// Number of restarts.
    pub count: u64,
    /// Time of the last restart, in µs since 1970.
    pub last_host_us: Option<u64>,
    /// Duration of the last outage in µs: from the helper's death, or from when it was found missing, until it served
    /// again.
    pub last_took_us: Option<u64>,
    /// Why the helper is not restarted any more.
    #[serde(default, rename = "given_up", skip_serializing_if = "Option::is_none")]
    pub abandoned: Option<String>,
}

/// `helpers.json`: the restarts of each helper, by [`Helper::key`].
pub type RestartRecord = BTreeMap<String, Restarts>;

/// Returns the record of a VM; empty if there is none, or if it cannot be read.
#[must_use]
pub fn read_record(rundir: &RunDir) -> RestartRecord {
    let text = rundir::read_record(&rundir.helpers()).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

/// Writes the record of a VM.
///
/// # Errors
/// As for [`write_json`].
pub fn write_record(rundir: &RunDir, record: &RestartRecord) -> io::Result<()> {
    write_json(&rundir.helpers(), record)
}

/// Returns the helpers that a VM needs now.
///
/// # Errors
/// When the run directory cannot be read.
pub fn needed(rundir: &RunDir) -> io::Result<Vec<Helper>> {
    let Some(state) = State::read(rundir)? else { return Ok(Vec::new()) };
    needed_in(rundir, &state)
}

/// Returns the helpers that a VM with this state needs now, and that do not hold their locks. `locks` is a table for many
/// VMs. A helper that has just ended because it is no longer needed may be among them.
///
/// # Errors
/// When the run directory cannot be read.
pub fn without_lock(rundir: &RunDir, state: &State, locks: &FlockTable) -> io::Result<Vec<Helper>> {
    let mut needed = needed_in(rundir, state)?;
    needed.retain(|helper| !helper.holds_lock(rundir, locks));
    Ok(needed)
}

fn needed_in(rundir: &RunDir, state: &State) -> io::Result<Vec<Helper>> {
    let mut needed = Vec::new();
    if disks::need_servers(rundir, state)? {
        needed.extend(disks::served(&state.hardware).map(|disk| Helper::Disk(disk.id.clone())));
    }
    if state.vmm.as_ref().is_some_and(Vmm::is_alive) {
        if rundir.fill().exists() {
            needed.push(Helper::Pager);
        }
        if !state.definition.phase.is_empty() {
            needed.push(Helper::Phases);
        }
        if state.attached.is_none() {
            needed.push(Helper::Watch);
        }
    }
    Ok(needed)
}

/// A helper that a VM needs, as shown in a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HelperStatus {
    /// The helper's name, as of [`Helper::key`].
    pub helper: String,
    /// Process number; none if the helper is missing.
    pub pid: Option<u32>,
    /// The helper's restarts.
    #[serde(flatten)]
    pub restarts: Restarts,
}

/// Returns the helpers that a VM needs now, with their processes and restarts.
///
/// # Errors
/// When the run directory cannot be read.
pub fn list(rundir: &RunDir) -> io::Result<Vec<HelperStatus>> {
    let mut record = read_record(rundir);
    let running = |helper: Helper| HelperStatus {
        helper: helper.key(),
        pid: helper.process(rundir).map(|process| process.pid),
        restarts: record.remove(&helper.key()).unwrap_or_default(),
    };
    Ok(needed(rundir)?.into_iter().map(running).collect())
}

/// Describes which helpers of a VM are missing or stopped; returns `None` if all run.
///
/// # Errors
/// When the run directory cannot be read.
pub fn describe_problems(rundir: &RunDir) -> io::Result<Option<String>> {
    let stopped: Vec<_> = needed(rundir)?.iter().filter_map(|helper| without_broker(rundir, helper)).collect();
    let problems = stopped.iter().map(ToString::to_string).chain(describe_missing(rundir)?);
    let text = problems.collect::<Vec<_>>().join("; ");
    Ok((!text.is_empty()).then_some(text))
}

/// Describes which helpers of a VM are missing; returns `None` if all run.
fn describe_missing(rundir: &RunDir) -> io::Result<Option<String>> {
    let missing: Vec<_> = needed(rundir)?.into_iter().filter(|helper| helper.process(rundir).is_none()).collect();
    if missing.is_empty() {
        return Ok(None);
    }
    // A helper that has just ended because it is no longer needed is not missing.
    let still_needed = needed(rundir)?;
    let missing: Vec<_> = missing.into_iter().filter(|helper| still_needed.contains(helper)).collect();
    Ok((!missing.is_empty()).then(|| describe(&missing, &read_record(rundir), rundir.name())))
}

fn describe(missing: &[Helper], record: &RestartRecord, vm_name: &str) -> String {
    let is_unwatched = missing.contains(&Helper::Watch);
    let mut needs_recover = is_unwatched;
    let mut descriptions = Vec::new();
    for helper in missing {
        let abandoned = record.get(&helper.key()).and_then(|restarts| restarts.abandoned.as_deref());
        needs_recover |= abandoned.is_some();
        descriptions.push(match abandoned {
            Some(why) => format!("{helper} is missing and is not restarted any more: {why}"),
            None if is_unwatched => format!("{helper} is missing"),
            None => format!("{helper} is missing and is being restarted"),
        });
    }
    let text = descriptions.join("; ");
    if needs_recover { format!("{text}; to restart: rekindle recover {vm_name}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_described_with_what_to_do() {
        let disk = Helper::Disk("disk0".into());
        let mut record = RestartRecord::new();
        let text = describe(std::slice::from_ref(&disk), &record, "web");
        assert_eq!(text, "the server of disk disk0 is missing and is being restarted");
        let text = describe(&[disk.clone(), Helper::Watch], &record, "web");
        assert!(text.ends_with("`rekindle watch` is missing; to restart: rekindle recover web"), "{text}");
        record.insert(disk.key(), Restarts { abandoned: Some("it died 7 times".into()), ..Restarts::default() });
        let text = describe(&[disk], &record, "web");
        assert!(text.contains("not restarted any more: it died 7 times; to restart: rekindle recover web"), "{text}");
    }

    #[test]
    fn a_vm_without_a_qemu_needs_no_helper() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        assert_eq!(needed(&rundir).unwrap(), []);
        assert_eq!(describe_problems(&rundir).unwrap(), None);
        assert_eq!(stopped(&rundir).unwrap(), []);
        assert_eq!(read_record(&rundir), RestartRecord::new());
    }
}
