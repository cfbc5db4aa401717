//! Guests that were suspended go on, each in a new QEMU.

use super::one::operation;
use super::plan::run;
use super::record::{Entry, Record};
use super::survived::{self, Trust};
use super::suspend::side_by_side;
use super::{HostError, How};
use crate::os::watch;
use crate::vmm::recover::{boot, finish, lose, recover_carried, recover_cold};
use crate::vmm::{RebootError, Recovered, handover, resume as let_go, saved, switch};
use rekindle_memory::directory::RamDirectory;
use rekindle_qemu::agent;
use rekindle_qemu::cpu;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::fault;
use rekindle_vm::hardware::{self, has_kvm};
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Step};
use rekindle_vm::life::{Held, LifeError};
use rekindle_vm::lock::RunState;
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

/// How long a bridge may take to be there after a boot.
const BRIDGES: Duration = Duration::from_secs(60);
/// How long `/dev/kvm` may take to be there once its module is.
const KVM: Duration = Duration::from_secs(10);
/// How long a guest's agent may take to answer.
const AGENT: Duration = Duration::from_secs(2);
/// Why a guest is lost that may have run already.
const STRUCK: &str = "the host went down just when it was let go on";
/// How long QEMU may take to tell that an agent listens.
const PORT: Duration = Duration::from_millis(100);

/// What became of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub enum Outcome {
    /// It goes on, with its memory.
    Resumed,
    /// It was shut down, and boots, as was wanted.
    Booted,
    /// Its memory is lost, and it boots from its disks.
    Lost {
        /// Why.
        why: String,
    },
    /// It is suspended still, or needs `rekindle recover`.
    Failed {
        /// Why.
        error: String,
    },
}

/// A guest that was suspended, and what became of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resumed {
    /// The VM.
    pub name: String,
    /// How it was suspended.
    pub how: How,
    /// What became of it.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// When it was stopped: host clock, microseconds since 1970.
    pub stop_us: u64,
    /// When it went on, if it did.
    pub resume_us: Option<u64>,
}

/// Let all guests go on that are suspended.
///
/// *Needs:* what the VMs need: their disks, the bridges of their taps.
/// *On success:* nobody is suspended any more; what became of each is told.
/// *On failure:* the record cannot be read, and nothing was done.
///
/// # Errors
/// [`HostError::Record`].
pub fn resume(host: &Host) -> Result<Vec<Resumed>, HostError> {
    if Record::read(&host.suspend_dir)?.head.is_none() {
        return Ok(Vec::new());
    }
    let record = Record::hold(&host.suspend_dir)?;
    let Some(head) = &record.head else { return Ok(Vec::new()) };
    let trust = Trust::of(head).map_err(|source| HostError::File { path: "/proc".into(), source })?;
    let names = record.names()?;
    let entries: Vec<_> = names.iter().filter_map(|name| record.entry(name).transpose()).collect::<Result<_, _>>()?;
    if entries.iter().any(|entry| entry.state.hardware.accel == "kvm") {
        wait_for_kvm();
    }
    Ok(side_by_side(&entries, |entry| {
        let name = entry.state.hardware.name.clone();
        let (outcome, resume_us) = match go_on(host, &record, entry, trust) {
            Ok((Recovered::Booted, why, at)) => (Outcome::Lost { why: why.unwrap_or_default() }, Some(at)),
            Ok((Recovered::Started, _, at)) => (Outcome::Booted, Some(at)),
            Ok((_, _, at)) => (Outcome::Resumed, Some(at)),
            Err(e) => {
                let cause = std::error::Error::source(&e).map(|cause| format!(": {cause}")).unwrap_or_default();
                (Outcome::Failed { error: format!("{e}{cause}") }, None)
            }
        };
        Resumed { name, how: entry.how, outcome, stop_us: entry.stop_us, resume_us }
    }))
}

/// Early in a boot the module of the processor's vendor may not be loaded yet. Without it QEMUs say themselves what is wrong.
fn wait_for_kvm() {
    if has_kvm() {
        return;
    }
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    if let Some(Err(e)) = hardware::kvm_module(&cpuinfo).map(|module| run("modprobe", &[module])) {
        tracing::debug!("{e}");
    }
    let deadline = Instant::now() + KVM;
    while !has_kvm() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(10));
    }
}

/// Whether VM `name` is suspended.
///
/// # Errors
/// [`HostError`].
pub fn is_suspended(host: &Host, name: &str) -> Result<bool, HostError> {
    Ok(Record::read(&host.suspend_dir)?.entry(name)?.is_some())
}

/// Discards the memory and the record of VM `name` if it is suspended, in this boot or an earlier one. Returns `true` if it was.
///
/// # Errors
/// [`HostError`].
pub fn drop_suspended(host: &Host, name: &str) -> Result<bool, HostError> {
    let record = Record::read(&host.suspend_dir)?;
    let Some(entry) = record.entry(name)? else { return Ok(false) };
    let directory = entry.state.hardware.ram.path.parent().map(std::path::Path::to_owned).unwrap_or_default();
    record.forget(name)?;
    // Where the RAM itself is gone there is nothing to remove.
    if let Ok(directory) = RamDirectory::at(&directory) {
        for (path, _) in entry.state.hardware.ram_files() {
            let removed = directory.remove(&ram::name(&path));
            removed.map_err(|e| HostError::File { path, source: io::Error::other(e) })?;
        }
    }
    Ok(true)
}

type Gone = (Recovered, Option<String>, u64);

/// One guest: its place first, as this boot may not know of it yet.
fn go_on(host: &Host, record: &Record, entry: &Entry, trust: Trust) -> Result<Gone, RebootError> {
    let name = &entry.state.hardware.name;
    let rundir = RunDir::new(&host.root, name);
    let failed = |source| RebootError::File { path: rundir.path().to_owned(), source };
    host.create_run_dir(&rundir).map_err(failed)?;
    if State::read(&rundir).map_err(failed)?.is_none() {
        // No process of another boot is one of this boot, whatever its number.
        let qemu = entry.state.vmm.as_ref().map_or(&entry.state.definition.qemu, |vmm| &vmm.binary).clone();
        let mut state = State { vmm: None, ..entry.state.clone() };
        state.definition.qemu = qemu;
        state.write(&rundir).map_err(failed)?;
        // What its suspend took went with the run directory of that boot.
        if let Err(e) = timeline::append(&rundir, &steps(record, entry)) {
            tracing::debug!("{name}: {e}");
        }
    }
    let (held, left) = Held::take_anyhow(host, name, "host resume")?;
    if let Some(vmm) = held.state.vmm.as_ref().filter(|vmm| left.is_none() && vmm.is_alive()) {
        return Err(LifeError::Running { name: name.clone(), pid: vmm.pid }.into());
    }
    let journal = match left {
        // Somebody who resumed it was cut off just when it was let go: only what he has written down tells whether it runs.
        Some(journal) if entry.struck => {
            let run_state = RunState::acquire(&rundir, crate::vmm::RUN_STATE_PATIENCE).map_err(LifeError::from)?;
            let recovered = recover(host, &held, journal)?;
            let why = matches!(recovered, Recovered::Booted).then(|| STRUCK.to_owned());
            // What lies beside the RAM may only be taken away by who holds the record.
            record.sweep(&rundir, &entry.state);
            drop((run_state, held));
            watch_it(&rundir)?;
            return Ok((recovered, why, host_us()));
        }
        Some(journal) => journal,
        None => {
            let generation = held.state.generation + 1;
            let kind = operation(entry.how).1;
            let mut journal = Journal::open_for(&rundir, kind, None, generation, entry.running).map_err(failed)?;
            journal.operation.saved = entry.saved.clone();
            journal.advance(if entry.how == How::Cold { Step::Suspend } else { Step::Saved }).map_err(failed)?;
            journal
        }
    };
    let run_state = RunState::acquire(&rundir, crate::vmm::RUN_STATE_PATIENCE).map_err(LifeError::from)?;
    let gone = from_entry(host, record, &held, journal, entry, trust)?;
    drop((run_state, held));
    watch_it(&rundir)?;
    Ok(gone)
}

/// Somebody waits for a VM's guest to reboot itself.
fn watch_it(rundir: &RunDir) -> Result<(), RebootError> {
    let state = State::read(rundir).map_err(|source| RebootError::File { path: rundir.path().to_owned(), source })?;
    if let Some(state) = state
        && let Err(e) = watch::start(rundir, &state)
    {
        tracing::warn!("{}: nobody waits for its guest to reboot itself: {e}", rundir.name());
    }
    Ok(())
}

/// The steps of a guest's suspend, with the one that it has in common with all: from when it was saved until the record counted.
fn steps(record: &Record, entry: &Entry) -> Vec<timeline::Entry> {
    let mut steps = entry.steps.clone();
    if let (Some(last), Some(head)) = (entry.steps.last(), &record.head) {
        let begun = last.start_host_us + last.us;
        steps.push(timeline::Entry {
            step: "sync and commit".into(),
            start_host_us: begun,
            start_mono_ns: last.start_mono_ns + last.us * 1000,
            us: head.committed_us.saturating_sub(begun),
            ..last.clone()
        });
    }
    steps
}

/// Finish or undo what a suspend or a resume of the host has left of one VM.
///
/// # Errors
/// [`RebootError`].
pub(crate) fn recover(host: &Host, held: &Held, journal: Journal) -> Result<Recovered, RebootError> {
    let name = held.rundir.name();
    let unread = |error: HostError| RebootError::Record { name: name.into(), why: error.to_string() };
    let record = Record::read(&host.suspend_dir).map_err(unread)?;
    let entry = record.entry(name).map_err(unread)?.filter(|entry| !entry.struck);
    let recovered = match entry {
        Some(entry) if journal.operation.step <= Step::Saved => {
            match journal.operation.from.clone().filter(|old| old.is_alive() && entry.how != How::Cold) {
                Some(old) => {
                    // From here on it is not suspended, and its old QEMU may have it.
                    record.strike(&entry).map_err(unread)?;
                    switch::back(&held.rundir, &old, journal, entry.running)?;
                    Recovered::Undone
                }
                None => {
                    let head = record.head.as_ref();
                    let trust = head.map_or(Ok(Trust::Digests), Trust::of);
                    let trust = trust.map_err(|source| RebootError::File { path: "/proc".into(), source })?;
                    from_entry(host, &record, held, journal, &entry, trust)?.0
                }
            }
        }
        _ if operation(How::Cold).1 == journal.operation.kind => recover_cold(held, journal)?,
        _ => recover_carried(held, journal)?,
    };
    record.forget(name).map_err(unread)?;
    record.sweep(&held.rundir, &held.state);
    Ok(recovered)
}

/// Let the guest of an entry go on, or boot it where its memory is lost.
fn from_entry(
    host: &Host,
    record: &Record,
    held: &Held,
    mut journal: Journal,
    entry: &Entry,
    trust: Trust,
) -> Result<Gone, RebootError> {
    let rundir = &held.rundir;
    let name = rundir.name();
    let unwritten = |error: HostError| RebootError::Record { name: name.into(), why: error.to_string() };
    let failed = |source| RebootError::File { path: rundir.file("operation.json"), source };
    let mut recorder = Recorder::new(name, "host resume");
    let generation = journal.operation.generation;
    switch::end_generation(rundir, generation)?;
    missing_disks(entry)?;
    network::wait_for_bridges(&entry.state.definition, BRIDGES)?;
    recorder.step("wait for its bridges");
    // Opened once: another thread that just starts a QEMU keeps a copy of what is open for a moment, and a tap can be had once.
    let taps = network::create(host, &entry.state)?;
    fault::point("host.resume.placed", None, None);
    recorder.step("make its place");

    let why = lost_why(entry, trust);
    recorder.step("look whether its memory survived");
    if why.is_some() || entry.how == How::Cold {
        // It is booted whatever comes: were this cut off, the next one would boot it too.
        record.strike(entry).map_err(unwritten)?;
        fault::point("host.resume.struck", None, None);
        let recovered = match &why {
            Some(why) => {
                tracing::warn!("{name}: its memory is lost, and it is booted from its disks: {why}");
                lose(held, journal, Some(taps))?
            }
            None => boot(held, journal, Recovered::Started, Some(taps))?,
        };
        record.forget(name).map_err(unwritten)?;
        return Ok((recovered, why, host_us()));
    }

    recorder.phase(Phase::Renew);
    let Some(saved) = &entry.saved else { return Err(LifeError::Unknown { name: name.into() }.into()) };
    let hardware = &held.state.hardware;
    let binary = &held.rundir.binary(held.state.vmm.as_ref().map_or(&held.state.definition.qemu, |vmm| &vmm.binary))?;
    let (new, mut qmp) = match entry.how {
        How::Saved => {
            ram::renew(rundir, hardware)?;
            saved::start_from_disk(rundir, hardware, binary, (generation, saved), taps)?
        }
        _ => handover::start_from(rundir, hardware, binary, (generation, saved), taps)?,
    };
    journal.operation.to = Some(new.clone());
    journal.write().map_err(failed)?;
    recorder.step("load");
    fault::point("host.resume.loaded", None, Some(&new));
    if let Err(error) = compare_cpu(name, entry, &mut qmp) {
        // It stays suspended.
        let _ = new.kill();
        return Err(error);
    }
    recorder.phase(Phase::Resume);
    record.strike(entry).map_err(unwritten)?;
    fault::point("host.resume.struck", None, Some(&new));
    journal.advance(Step::Resume).map_err(failed)?;
    let resumed = let_go(&mut qmp, entry.running)?;
    fault::point("host.resume.resumed", None, Some(&new));
    recorder.step("resume");
    recorder.phase(Phase::Settle);
    settle(record, held, journal, &new, qmp)?;
    recorder.step("record");
    recorder.write(rundir);
    Ok((Recovered::FromState, None, resumed))
}

/// The guest runs: what was kept of it goes, and it is a VM like any other.
fn settle(record: &Record, held: &Held, journal: Journal, new: &Vmm, mut qmp: Qmp) -> Result<(), RebootError> {
    let name = held.rundir.name();
    if held.state.hardware.agent {
        set_clock(&mut qmp, new);
    }
    // Switches may have forgotten where it is.
    let rounds = serde_json::json!({"initial": 50, "max": 550, "rounds": 5, "step": 100});
    if let Err(e) = qmp.execute::<serde_json::Value>("announce-self", rounds) {
        tracing::debug!("{name}: its network cards were not announced: {e}");
    }
    record.forget(name).map_err(|error| RebootError::Record { name: name.into(), why: error.to_string() })?;
    fault::point("host.resume.recorded", None, Some(new));
    finish(held, journal, new, qmp, Recovered::FromState).map(drop)
}

/// Its clock has stood still as long as the host was away.
fn set_clock(qmp: &mut Qmp, vmm: &Vmm) {
    let deadline = Instant::now() + PORT;
    loop {
        match agent::listens(qmp) {
            Ok(true) => break,
            Ok(false) if Instant::now() < deadline => thread::sleep(Duration::from_millis(2)),
            _ => return,
        }
    }
    if let Err(e) = agent::set_time(&vmm.directory().agent(), AGENT) {
        tracing::warn!("the guest's clock is not set: {e}; set it in the guest, e.g. chronyc makestep");
    }
}

/// A disk that is not there yet may come: the guest stays suspended.
fn missing_disks(entry: &Entry) -> Result<(), RebootError> {
    for disk in &entry.state.hardware.disks {
        std::fs::metadata(&disk.path).map_err(|e| {
            let text = format!("{e}; its guest stays suspended: mount what is missing, then rekindle host resume");
            RebootError::File { path: disk.path.clone(), source: io::Error::new(e.kind(), text) }
        })?;
    }
    Ok(())
}

/// Why the memory of a guest is of no use any more, if it is not.
fn lost_why(entry: &Entry, trust: Trust) -> Option<String> {
    if entry.how == How::Cold {
        return None;
    }
    if entry.struck {
        return Some(STRUCK.into());
    }
    if handover::disk_times(&entry.state.hardware) != entry.disks {
        return Some("its disks were written while it was suspended".into());
    }
    match entry.how {
        How::Warm => survived::check(entry, trust).err(),
        _ => None,
    }
}

/// The guest must find what it had of its processors. More than that does it no harm: it has never looked for it.
fn compare_cpu(name: &str, entry: &Entry, qmp: &mut Qmp) -> Result<(), RebootError> {
    let now = cpu::features(qmp)?;
    let differences = cpu::differences(&entry.cpu, &now);
    let gone: Vec<_> = differences.iter().filter(|(_, before, now)| before & !now != 0).collect();
    if gone.is_empty() {
        return Ok(());
    }
    let words = gone.iter().map(|(word, before, now)| format!("{word} was {before:#x} and is {now:#x}"));
    Err(RebootError::FewerFeatures { name: name.into(), words: words.collect::<Vec<_>>().join(", ") })
}
