//! Resumes suspended guests, in this boot or a later one.

use super::command::run;
use super::guest::suspend_kind;
use super::parallel::in_parallel;
use super::record::{SuspendRecord, SuspendedGuest};
use super::resume_guest::{INTERRUPTED_RESUME_REASON, ResumedGuest, resume_guest};
use super::survived::Trust;
use super::{HostError, RebootMethod};
use crate::error::RebootError;
use crate::interrupted::{Recovered, continue_interrupted};
use crate::os::watch;
use crate::vmm::RUN_STATE_TIMEOUT;
use crate::vmm::recover::{recover_cold, recover_handover};
use rekindle_memory::directory::RamDirectory;
use rekindle_vm::causes::with_causes;
use rekindle_vm::error::LifeError;
use rekindle_vm::hardware::{self, has_kvm};
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Step};
use rekindle_vm::lock::RunStateLock;
use rekindle_vm::locked_vm::LockedVm;
use rekindle_vm::ram;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::timeline::{self, host_us};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// How long `/dev/kvm` may take to appear after its module was loaded.
const KVM_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Result of resuming a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub enum ResumeOutcome {
    /// The guest was resumed, with its memory.
    Resumed,
    /// The guest had been shut down, and was booted.
    Booted,
    /// The guest's memory is lost, and it was booted from its disks.
    Lost { why: String },
    /// The guest is still suspended, or needs `rekindle recover`.
    Failed { error: String },
}

/// Result of resuming one suspended guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResumeReport {
    pub name: String,
    pub how: RebootMethod,
    #[serde(flatten)]
    pub outcome: ResumeOutcome,
    /// When the guest was stopped: host clock, microseconds since 1970.
    pub stop_us: u64,
    /// When the guest was resumed or booted: host clock, microseconds since 1970. `None` if it was not.
    pub resume_us: Option<u64>,
}

/// Resumes all suspended guests.
///
/// *Needs:* the resources of the VMs: their disks, the bridges of their taps.
/// *On success:* every guest was processed; its report states the outcome.
/// *On failure:* the record cannot be read. Nothing was changed.
///
/// # Errors
/// [`HostError::Record`] if the record cannot be read.
pub fn resume(host: &Host) -> Result<Vec<ResumeReport>, HostError> {
    if SuspendRecord::read(&host.suspend_dir)?.header.is_none() {
        return Ok(Vec::new());
    }
    let record = SuspendRecord::lock(&host.suspend_dir)?;
    let Some(header) = &record.header else { return Ok(Vec::new()) };
    let trust = Trust::of(header).map_err(HostError::file(Path::new("/proc")))?;
    let entries = record.entries()?;
    if entries.iter().any(|entry| entry.state.hardware.accel == "kvm") {
        wait_for_kvm();
    }
    Ok(in_parallel(&entries, |entry| report(entry, resume_vm(host, &record, entry, trust))))
}

fn report(entry: &SuspendedGuest, result: Result<ResumedGuest, RebootError>) -> ResumeReport {
    let resume_us = result.as_ref().ok().map(|guest| guest.resumed_host_us);
    let outcome = match result {
        Ok(ResumedGuest { recovered: Recovered::Booted, loss, .. }) => {
            ResumeOutcome::Lost { why: loss.unwrap_or_default() }
        }
        Ok(ResumedGuest { recovered: Recovered::Started, .. }) => ResumeOutcome::Booted,
        Ok(_) => ResumeOutcome::Resumed,
        Err(e) => ResumeOutcome::Failed { error: with_causes(&e) },
    };
    let name = entry.state.hardware.name.clone();
    ResumeReport { name, how: entry.how, outcome, stop_us: entry.stop_us, resume_us }
}

/// Loads the KVM module and waits for `/dev/kvm`: early in a boot the module of the processor's vendor may not be
/// loaded yet. If it stays missing, QEMU reports the error.
fn wait_for_kvm() {
    if has_kvm() {
        return;
    }
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    if let Some(Err(e)) = hardware::kvm_module(&cpuinfo).map(|module| run("modprobe", &[module])) {
        tracing::debug!("{e}");
    }
    let deadline = Instant::now() + KVM_TIMEOUT;
    while !has_kvm() && Instant::now() < deadline {
        thread::sleep(POLL_INTERVAL);
    }
}

/// Returns whether VM `name` is suspended.
pub fn is_suspended(host: &Host, name: &str) -> Result<bool, HostError> {
    Ok(SuspendRecord::read(&host.suspend_dir)?.entry(name)?.is_some())
}

/// Discards the memory and the record's entry of VM `name` if the VM was suspended, in this boot or an earlier one.
/// Returns whether it was.
pub fn drop_suspended(host: &Host, name: &str) -> Result<bool, HostError> {
    let record = SuspendRecord::read(&host.suspend_dir)?;
    let Some(entry) = record.entry(name)? else { return Ok(false) };
    record.remove_entry(name)?;
    let ram_directory = entry.state.hardware.ram.path.parent().unwrap_or(Path::new(""));
    // Without the RAM's directory, no RAM file is left to remove.
    if let Ok(directory) = RamDirectory::at(ram_directory) {
        for (path, _) in entry.state.hardware.ram_files() {
            directory.remove(&ram::file_id(&path)).map_err(|e| HostError::file(&path)(io::Error::other(e)))?;
        }
    }
    Ok(true)
}

/// Resumes the guest of one VM. Its run directory is created first if this boot has none.
fn resume_vm(
    host: &Host,
    record: &SuspendRecord,
    entry: &SuspendedGuest,
    trust: Trust,
) -> Result<ResumedGuest, RebootError> {
    let name = &entry.state.hardware.name;
    let rundir = RunDir::new(&host.root, name);
    restore_run_dir(host, &rundir, record, entry)?;
    let (locked_vm, interrupted) = LockedVm::lock_even_if_interrupted(host, name, "host resume")?;
    if let Some(vmm) = locked_vm.state.vmm.as_ref().filter(|vmm| interrupted.is_none() && vmm.is_alive()) {
        return Err(LifeError::Running { name: name.clone(), pid: vmm.pid }.into());
    }
    let run_state = RunStateLock::acquire(&rundir, RUN_STATE_TIMEOUT).map_err(LifeError::from)?;
    let resumed = match interrupted {
        Some(journal) if entry.resume_started => finish_resume(host, &locked_vm, journal, record, entry)?,
        Some(journal) => resume_guest(host, record, continue_interrupted(&locked_vm, journal), entry, trust)?,
        None => {
            let journal = open_journal(&locked_vm, entry)?;
            resume_guest(host, record, continue_interrupted(&locked_vm, journal), entry, trust)?
        }
    };
    drop((run_state, locked_vm));
    start_watch(&rundir)?;
    Ok(resumed)
}

/// Creates the run directory of a suspended VM, and the state in it, if this boot has none.
fn restore_run_dir(
    host: &Host,
    rundir: &RunDir,
    record: &SuspendRecord,
    entry: &SuspendedGuest,
) -> Result<(), RebootError> {
    let failed = RebootError::file(rundir.path());
    host.create_run_dir(rundir).map_err(&failed)?;
    if State::read(rundir).map_err(&failed)?.is_some() {
        return Ok(());
    }
    // The recorded QEMU belongs to another boot, so it does not run, even if a process has its PID.
    let mut state = State { vmm: None, ..entry.state.clone() };
    if let Some(vmm) = &entry.state.vmm {
        state.definition.qemu = vmm.binary.clone();
    }
    state.write(rundir).map_err(&failed)?;
    // The timeline of the suspend was lost with the run directory of the previous boot.
    if let Err(e) = timeline::append(rundir, &suspend_steps(record, entry)) {
        tracing::debug!("{}: {e}", rundir.name());
    }
    Ok(())
}

/// Returns the steps of a guest's suspend, and a last step that is common to all guests: from the guest's save to the
/// commit of the record.
fn suspend_steps(record: &SuspendRecord, entry: &SuspendedGuest) -> Vec<timeline::Entry> {
    let mut steps = entry.steps.clone();
    if let (Some(last), Some(header)) = (entry.steps.last(), &record.header) {
        let start_us = last.start_host_us + last.us;
        steps.push(timeline::Entry {
            step: "sync and commit".into(),
            start_host_us: start_us,
            start_mono_ns: last.start_mono_ns + last.us * 1000,
            us: header.committed_us.saturating_sub(start_us),
            ..last.clone()
        });
    }
    steps
}

/// Opens the journal of a resume, in the state in which the suspend has left the guest.
fn open_journal(locked_vm: &LockedVm, entry: &SuspendedGuest) -> Result<Journal, RebootError> {
    let failed = RebootError::file(locked_vm.rundir.path());
    let generation = locked_vm.state.generation + 1;
    let kind = suspend_kind(entry.how);
    let mut journal = Journal::open_for(&locked_vm.rundir, kind, None, generation, entry.running).map_err(&failed)?;
    journal.operation.saved = entry.saved.clone();
    let step = if entry.how == RebootMethod::Cold { Step::Suspend } else { Step::Saved };
    journal.advance(step).map_err(&failed)?;
    Ok(journal)
}

/// Finishes a resume that was interrupted when it resumed the guest: only its journal shows whether the guest runs.
fn finish_resume(
    host: &Host,
    locked_vm: &LockedVm,
    journal: Journal,
    record: &SuspendRecord,
    entry: &SuspendedGuest,
) -> Result<ResumedGuest, RebootError> {
    let recovered = recover(host, locked_vm, journal)?;
    let loss = (recovered == Recovered::Booted).then(|| INTERRUPTED_RESUME_REASON.to_owned());
    // Only the process that holds the record may remove files next to the RAM.
    record.remove_leftovers(&locked_vm.rundir, &entry.state);
    Ok(ResumedGuest { recovered, loss, resumed_host_us: host_us() })
}

/// Starts the watch process of a VM.
fn start_watch(rundir: &RunDir) -> Result<(), RebootError> {
    let state = State::read(rundir).map_err(RebootError::file(rundir.path()))?;
    if let Some(state) = state
        && let Err(e) = watch::start(rundir, &state)
    {
        tracing::warn!(
            "{}: cannot start `rekindle watch`, so its guest stays stopped if it reboots itself: {e}",
            rundir.name()
        );
    }
    Ok(())
}

/// Finishes or undoes an interrupted suspend or resume of one VM.
pub(crate) fn recover(host: &Host, locked_vm: &LockedVm, journal: Journal) -> Result<Recovered, RebootError> {
    let name = locked_vm.rundir.name();
    let unreadable = |error: HostError| RebootError::Record { name: name.into(), why: error.to_string() };
    let record = SuspendRecord::read(&host.suspend_dir).map_err(unreadable)?;
    let entry = record.entry(name).map_err(unreadable)?.filter(|entry| !entry.resume_started);
    let kind = journal.operation.kind;
    let is_stopped_by_suspend = journal.operation.step <= Step::Saved;
    let handover = continue_interrupted(locked_vm, journal);
    let recovered = match entry {
        Some(entry) if is_stopped_by_suspend => {
            if handover.live_source().is_some() && entry.how != RebootMethod::Cold {
                // From here on the guest is not suspended, and its source QEMU may run it.
                record.mark_resume_started(&entry).map_err(unreadable)?;
                handover.return_to_source()?;
                Recovered::Undone
            } else {
                let trust = record.header.as_ref().map_or(Ok(Trust::Digests), Trust::of);
                let trust = trust.map_err(RebootError::file(Path::new("/proc")))?;
                resume_guest(host, &record, handover, &entry, trust)?.recovered
            }
        }
        _ if kind == suspend_kind(RebootMethod::Cold) => recover_cold(handover)?,
        _ => recover_handover(handover)?,
    };
    record.remove_entry(name).map_err(unreadable)?;
    record.remove_leftovers(&locked_vm.rundir, &locked_vm.state);
    Ok(recovered)
}
