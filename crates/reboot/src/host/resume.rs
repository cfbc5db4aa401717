//! Resumes suspended guests, each in a new QEMU.

use super::guest::operation;
use super::plan::run;
use super::record::{SuspendRecord, SuspendedGuest};
use super::survived::{self, Trust};
use super::suspend::in_parallel;
use super::{HostError, RebootMethod};
use crate::error::RebootError;
use crate::interrupted::{Recovered, continue_interrupted};
use crate::os::watch;
use crate::vmm::recover::{boot_after_loss, boot_after_shutdown, recover_cold, recover_handover};
use crate::vmm::{saved, warm};
use rekindle_handover::after_resume::{announce, set_clock};
use rekindle_handover::evidence::disk_times;
use rekindle_handover::ram::Ram;
use rekindle_handover::takeover::Taps;
use rekindle_handover::{Destination, Handover, LoadedStage};
use rekindle_memory::directory::RamDirectory;
use rekindle_qemu::cpu;
use rekindle_qemu::qmp::Qmp;
use rekindle_vm::error::LifeError;
use rekindle_vm::fault;
use rekindle_vm::hardware::{self, has_kvm};
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Step};
use rekindle_vm::lock::RunStateLock;
use rekindle_vm::locked_vm::LockedVm;
use rekindle_vm::network;
use rekindle_vm::ram;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::timeline::{self, Phase, Recorder, host_us};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

/// How long a bridge may take to appear after a boot.
const BRIDGE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long `/dev/kvm` may take to appear after its module was loaded.
const KVM_TIMEOUT: Duration = Duration::from_secs(10);
/// Reported reason for the loss of a guest's memory if the guest may have run already.
const STRUCK_REASON: &str = "the host went down just as the guest was resumed";

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
    if SuspendRecord::read(&host.suspend_dir)?.head.is_none() {
        return Ok(Vec::new());
    }
    let record = SuspendRecord::lock(&host.suspend_dir)?;
    let Some(head) = &record.head else { return Ok(Vec::new()) };
    let trust = Trust::of(head).map_err(|source| HostError::File { path: "/proc".into(), source })?;
    let names = record.names()?;
    let entries: Vec<_> = names.iter().filter_map(|name| record.entry(name).transpose()).collect::<Result<_, _>>()?;
    if entries.iter().any(|entry| entry.state.hardware.accel == "kvm") {
        wait_for_kvm();
    }
    Ok(in_parallel(&entries, |entry| {
        let name = entry.state.hardware.name.clone();
        let (outcome, resume_us) = match resume_one(host, &record, entry, trust) {
            Ok((Recovered::Booted, why, at)) => (ResumeOutcome::Lost { why: why.unwrap_or_default() }, Some(at)),
            Ok((Recovered::Started, _, at)) => (ResumeOutcome::Booted, Some(at)),
            Ok((_, _, at)) => (ResumeOutcome::Resumed, Some(at)),
            Err(e) => {
                let cause = std::error::Error::source(&e).map(|cause| format!(": {cause}")).unwrap_or_default();
                (ResumeOutcome::Failed { error: format!("{e}{cause}") }, None)
            }
        };
        ResumeReport { name, how: entry.how, outcome, stop_us: entry.stop_us, resume_us }
    }))
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
        thread::sleep(Duration::from_millis(10));
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
    let directory = entry.state.hardware.ram.path.parent().map(std::path::Path::to_owned).unwrap_or_default();
    record.remove_entry(name)?;
    // Without the RAM's directory, no RAM file is left to remove.
    if let Ok(directory) = RamDirectory::at(&directory) {
        for (path, _) in entry.state.hardware.ram_files() {
            let removed = directory.remove(&ram::file_id(&path));
            removed.map_err(|e| HostError::File { path, source: io::Error::other(e) })?;
        }
    }
    Ok(true)
}

type OneResult = (Recovered, Option<String>, u64);

/// Resumes one guest. Its run directory is created first if this boot has none.
fn resume_one(
    host: &Host,
    record: &SuspendRecord,
    entry: &SuspendedGuest,
    trust: Trust,
) -> Result<OneResult, RebootError> {
    let name = &entry.state.hardware.name;
    let rundir = RunDir::new(&host.root, name);
    let failed = |source| RebootError::File { path: rundir.path().to_owned(), source };
    host.create_run_dir(&rundir).map_err(failed)?;
    if State::read(&rundir).map_err(failed)?.is_none() {
        // The recorded QEMU belongs to another boot, so it does not run, even if a process has its PID.
        let qemu = entry.state.vmm.as_ref().map_or(&entry.state.definition.qemu, |vmm| &vmm.binary).clone();
        let mut state = State { vmm: None, ..entry.state.clone() };
        state.definition.qemu = qemu;
        state.write(&rundir).map_err(failed)?;
        // The timeline of the suspend was lost with the run directory of the previous boot.
        if let Err(e) = timeline::append(&rundir, &steps(record, entry)) {
            tracing::debug!("{name}: {e}");
        }
    }
    let (held, left) = LockedVm::lock_even_if_interrupted(host, name, "host resume")?;
    if let Some(vmm) = held.state.vmm.as_ref().filter(|vmm| left.is_none() && vmm.is_alive()) {
        return Err(LifeError::Running { name: name.clone(), pid: vmm.pid }.into());
    }
    let journal = match left {
        // An earlier resume was interrupted when it resumed the guest: only the journal of that resume shows whether
        // the guest runs.
        Some(journal) if entry.struck => {
            let run_state = RunStateLock::acquire(&rundir, crate::vmm::RUN_STATE_TIMEOUT).map_err(LifeError::from)?;
            let recovered = recover(host, &held, journal)?;
            let why = matches!(recovered, Recovered::Booted).then(|| STRUCK_REASON.to_owned());
            // Only the process that holds the record may remove files next to the RAM.
            record.remove_leftovers(&rundir, &entry.state);
            drop((run_state, held));
            start_watch(&rundir)?;
            return Ok((recovered, why, host_us()));
        }
        Some(journal) => journal,
        None => {
            let generation = held.state.generation + 1;
            let kind = operation(entry.how).1;
            let mut journal = Journal::open_for(&rundir, kind, None, generation, entry.running).map_err(failed)?;
            journal.operation.saved = entry.saved.clone();
            journal
                .advance(if entry.how == RebootMethod::Cold { Step::Suspend } else { Step::Saved })
                .map_err(failed)?;
            journal
        }
    };
    let run_state = RunStateLock::acquire(&rundir, crate::vmm::RUN_STATE_TIMEOUT).map_err(LifeError::from)?;
    let resumed = resume_entry(host, record, continue_interrupted(&held, journal), entry, trust)?;
    drop((run_state, held));
    start_watch(&rundir)?;
    Ok(resumed)
}

/// Starts the watch process of a VM.
fn start_watch(rundir: &RunDir) -> Result<(), RebootError> {
    let state = State::read(rundir).map_err(|source| RebootError::File { path: rundir.path().to_owned(), source })?;
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

/// Returns the steps of a guest's suspend, and a last step that is common to all guests: from the guest's save to the
/// commit of the record.
fn steps(record: &SuspendRecord, entry: &SuspendedGuest) -> Vec<timeline::Entry> {
    let mut steps = entry.steps.clone();
    if let (Some(last), Some(head)) = (entry.steps.last(), &record.head) {
        let start_us = last.start_host_us + last.us;
        steps.push(timeline::Entry {
            step: "sync and commit".into(),
            start_host_us: start_us,
            start_mono_ns: last.start_mono_ns + last.us * 1000,
            us: head.committed_us.saturating_sub(start_us),
            ..last.clone()
        });
    }
    steps
}

/// Finishes or undoes an interrupted suspend or resume of one VM.
pub(crate) fn recover(host: &Host, held: &LockedVm, journal: Journal) -> Result<Recovered, RebootError> {
    let name = held.rundir.name();
    let unread = |error: HostError| RebootError::Record { name: name.into(), why: error.to_string() };
    let record = SuspendRecord::read(&host.suspend_dir).map_err(unread)?;
    let entry = record.entry(name).map_err(unread)?.filter(|entry| !entry.struck);
    let recovered = match entry {
        Some(entry) if journal.operation.step <= Step::Saved => {
            let handover = continue_interrupted(held, journal);
            if handover.live_source().is_some() && entry.how != RebootMethod::Cold {
                // From here on the guest is not suspended, and its source QEMU may run it.
                record.mark_struck(&entry).map_err(unread)?;
                handover.return_to_source()?;
                Recovered::Undone
            } else {
                let trust = record.head.as_ref().map_or(Ok(Trust::Digests), Trust::of);
                let trust = trust.map_err(|source| RebootError::File { path: "/proc".into(), source })?;
                resume_entry(host, &record, handover, &entry, trust)?.0
            }
        }
        _ if operation(RebootMethod::Cold).1 == journal.operation.kind => {
            recover_cold(continue_interrupted(held, journal))?
        }
        _ => recover_handover(continue_interrupted(held, journal))?,
    };
    record.remove_entry(name).map_err(unread)?;
    record.remove_leftovers(&held.rundir, &held.state);
    Ok(recovered)
}

/// Resumes the guest of an entry. Boots it if it was shut down or its memory is lost.
fn resume_entry(
    host: &Host,
    record: &SuspendRecord,
    mut handover: Handover,
    entry: &SuspendedGuest,
    trust: Trust,
) -> Result<OneResult, RebootError> {
    let name = handover.name().to_owned();
    let unwritten = |error: HostError| RebootError::Record { name: name.clone(), why: error.to_string() };
    handover.recorder = Recorder::new(&name, "host resume");
    handover.end_destination()?;
    missing_disks(entry)?;
    network::wait_for_bridges(&entry.state.definition, BRIDGE_TIMEOUT)?;
    handover.recorder.step("wait for its bridges");
    // Open each tap only once: a tap has one user at a time, and a thread that is just starting another QEMU holds
    // copies of open descriptors for a moment.
    let taps = network::create(host, &entry.state)?;
    fault::point("host.resume.placed", None, None);
    handover.recorder.step("make its place");

    let loss = loss_reason(entry, trust);
    handover.recorder.step("check its memory");
    if loss.is_some() || entry.how == RebootMethod::Cold {
        // The guest is booted in any case: if this attempt is interrupted, the next one boots it too.
        record.mark_struck(entry).map_err(unwritten)?;
        fault::point("host.resume.struck", None, None);
        let recovered = match &loss {
            Some(why) => {
                tracing::warn!("{name}: its memory is lost, and it is booted from its disks: {why}");
                boot_after_loss(handover, Some(taps))?
            }
            None => boot_after_shutdown(handover, Some(taps))?,
        };
        record.remove_entry(&name).map_err(unwritten)?;
        return Ok((recovered, loss, host_us()));
    }
    let resumed_host_us = resume_saved(record, handover, entry, taps)?;
    Ok((Recovered::FromState, None, resumed_host_us))
}

/// Resumes the guest of an entry from its saved state. Returns the time of the resume, in µs since 1970.
fn resume_saved(
    record: &SuspendRecord,
    mut handover: Handover,
    entry: &SuspendedGuest,
    taps: Taps,
) -> Result<u64, RebootError> {
    let name = handover.name().to_owned();
    let Some(saved) = &entry.saved else { return Err(LifeError::Unknown { name }.into()) };
    let hardware = handover.state.hardware.clone();
    let last_binary = handover.state.vmm.as_ref().map_or(&handover.state.definition.qemu, |vmm| &vmm.binary);
    let binary = handover.rundir.binary(last_binary)?;
    handover.recorder.phase(Phase::Renew);
    match entry.how {
        RebootMethod::Saved => {
            let loaded = saved::load(&mut handover, &hardware, &binary, saved, taps)?;
            resume_loaded(record, handover, entry, loaded)
        }
        _ => {
            let loaded = warm::load(&mut handover, &hardware, &binary, saved, taps)?;
            resume_loaded(record, handover, entry, loaded)
        }
    }
}

fn resume_loaded<R: Ram>(
    record: &SuspendRecord,
    mut handover: Handover,
    entry: &SuspendedGuest,
    mut loaded: Destination<LoadedStage<R>>,
) -> Result<u64, RebootError> {
    let (name, rundir) = (handover.name().to_owned(), handover.rundir.clone());
    let unwritten = |error: HostError| RebootError::Record { name: name.clone(), why: error.to_string() };
    handover.recorder.step("load");
    if let Err(error) = compare_cpu(&name, entry, &mut loaded.qmp) {
        // The guest stays suspended.
        let _ = loaded.vmm.kill();
        return Err(error);
    }
    record.mark_struck(entry).map_err(unwritten)?;
    handover.pass("host.resume.struck");
    let running = loaded.commit(&mut handover, "resume")?;
    handover.pass("host.resume.resumed");
    // Confirm before the entry is removed: the saved state is removed with it, so a recovery must not need it any more.
    running.confirm(&mut handover)?;
    record.remove_entry(&name).map_err(unwritten)?;
    handover.pass("host.resume.recorded");
    let mut settled = running.settle(handover, "record")?;
    settled.recorder.write(&rundir);
    // Network switches may have forgotten the guest's port, and its clock has stood still since the suspend.
    announce(&mut settled.qmp, &name);
    set_clock(&mut settled.qmp, &settled.vmm, settled.state.hardware.agent);
    Ok(settled.resumed_host_us)
}

/// Rejects a guest with a missing disk, so that it stays suspended: the disk may appear later.
fn missing_disks(entry: &SuspendedGuest) -> Result<(), RebootError> {
    for disk in &entry.state.hardware.disks {
        std::fs::metadata(&disk.path).map_err(|e| {
            let text = format!(
                "{e}; the guest stays suspended: mount the missing file system, then run: rekindle host resume"
            );
            RebootError::File { path: disk.path.clone(), source: io::Error::new(e.kind(), text) }
        })?;
    }
    Ok(())
}

/// Returns the reason why the memory of a guest is lost, or `None` if it is not.
fn loss_reason(entry: &SuspendedGuest, trust: Trust) -> Option<String> {
    if entry.how == RebootMethod::Cold {
        return None;
    }
    if entry.struck {
        return Some(STRUCK_REASON.into());
    }
    if disk_times(&entry.state.hardware) != entry.disks {
        return Some("its disks were written while it was suspended".into());
    }
    match entry.how {
        RebootMethod::Warm => survived::check(entry, trust).err(),
        _ => None,
    }
}

/// Rejects a QEMU in which the guest would miss processor features. Additional features are harmless: the guest has
/// never checked for them.
fn compare_cpu(name: &str, entry: &SuspendedGuest, qmp: &mut Qmp) -> Result<(), RebootError> {
    let now = cpu::features(qmp)?;
    let differences = cpu::differences(&entry.cpu, &now);
    let missing: Vec<_> = differences.iter().filter(|(_, before, now)| before & !now != 0).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let words = missing.iter().map(|(word, before, now)| format!("{word} was {before:#x} and is {now:#x}"));
    Err(RebootError::FewerFeatures { name: name.into(), words: words.collect::<Vec<_>>().join(", ") })
}
