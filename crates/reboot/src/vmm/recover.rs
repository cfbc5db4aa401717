//! Finish or undo an operation that was cut off.
//!
//! What is alive and what is on disk decides, in this order:
//!
//! 1. The new QEMU runs the guest: it is finished.
//! 2. The old QEMU is there and the guest has not run in the new one: it goes on in the old one.
//! 3. The saved state is whole and the guest has not run since: a fresh QEMU is started from it.
//! 4. Otherwise the guest's memory is lost; that is said, and the guest is booted from its disks.

use super::{RebootError, handover, resume, saved, switch};
use rekindle_qemu::command::Start;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::vmm::{self, Vmm};
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind, Step};
use rekindle_vm::life::{self, Held};
use rekindle_vm::network;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// What `recover` did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Recovered {
    /// There was nothing to do.
    Nothing,
    /// The operation was undone: the guest runs in the QEMU that it ran in before, with its memory.
    Undone,
    /// The operation was finished: the guest runs in the new QEMU, with its memory.
    Finished,
    /// The guest was started again from its saved state, with its memory.
    FromState,
    /// The guest's memory was lost; it was booted from its disks.
    Booted,
    /// The VM is gone, as was wanted.
    Removed,
}

impl std::fmt::Display for Recovered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Nothing => "there was nothing to recover",
            Self::Undone => "undone: the guest runs in the QEMU that it ran in before, with its memory",
            Self::Finished => "finished: the guest runs in the new QEMU, with its memory",
            Self::FromState => "the guest was started again from its saved state, with its memory",
            Self::Booted => "the guest's memory was lost; it was booted from its disks",
            Self::Removed => "the VM is removed",
        })
    }
}

/// Finish or undo what an operation on VM `name` left behind, or boot a guest whose QEMU has died.
///
/// *Needs:* nothing else at work on the VM.
/// *On success:* as [`Recovered`] says; exactly one QEMU runs the guest.
/// *On failure:* nothing runs that did not before; it can be done again.
///
/// # Errors
/// [`RebootError`].
pub fn recover(host: &Host, name: &str) -> Result<Recovered, RebootError> {
    let (held, journal) = Held::take_anyhow(host, name, "recover")?;
    let Some(journal) = journal else {
        return match held.vmm() {
            Ok(_) => Ok(Recovered::Nothing),
            Err(_) => boot(&held, None, held.state.generation + 1),
        };
    };
    match journal.operation.kind {
        Kind::Run => recover_run(host, held, journal),
        Kind::Stop => {
            life::clean_up(host, &held.rundir, &held.state)?;
            Ok(Recovered::Removed)
        }
        Kind::VmmCold => recover_cold(held, journal),
        Kind::VmmWarm | Kind::VmmSaved => recover_carried(held, journal),
    }
}

fn close(held: &Held, journal: Journal) -> Result<(), RebootError> {
    let file = held.rundir.file("operation.json");
    journal.close().map_err(|source| RebootError::File { path: file, source })
}

/// A start is finished if the QEMU was recorded, else undone.
fn recover_run(host: &Host, held: Held, journal: Journal) -> Result<Recovered, RebootError> {
    if held.vmm().is_ok() {
        close(&held, journal)?;
        return Ok(Recovered::Finished);
    }
    life::clean_up(host, &held.rundir, &held.state)?;
    Ok(Recovered::Removed)
}

fn recover_cold(held: Held, journal: Journal) -> Result<Recovered, RebootError> {
    let generation = journal.operation.generation;
    // Not yet asked to shut down, or asked and still at it: it is the guest that it was.
    let old = journal.operation.from.clone().filter(Vmm::is_alive);
    let new = runs(&held, generation);
    match (new, old) {
        (Some((new, qmp)), _) => {
            switch::settle(&held.rundir, held.state.clone(), None, &new, &qmp, journal, None)?;
            Ok(Recovered::Finished)
        }
        (None, Some(_)) => {
            switch::end_generation(&held.rundir, generation)?;
            close(&held, journal)?;
            Ok(Recovered::Undone)
        }
        (None, None) => {
            switch::end_generation(&held.rundir, generation)?;
            // A guest that shut itself down has lost nothing; it is booted as was wanted.
            boot(&held, Some(journal), generation)
        }
    }
}

/// The QEMU of `generation` if it runs the guest.
fn runs(held: &Held, generation: u32) -> Option<(Vmm, Qmp)> {
    let (vmm, mut qmp) = alive(held, generation)?;
    (life::run_state(&mut qmp).ok()? == "running").then_some((vmm, qmp))
}

/// The QEMU of `generation` if it lives and answers.
fn alive(held: &Held, generation: u32) -> Option<(Vmm, Qmp)> {
    let directory = held.rundir.vmm(generation);
    let process = life::processes_of(&directory).ok()?.into_iter().find(|process| process.is_alive())?;
    let binary = std::fs::read_link(format!("/proc/{}/exe", process.pid)).unwrap_or_else(|_| PathBuf::from("qemu"));
    let vmm = Vmm { binary, pid: process.pid, started: process.started, directory: directory.0 };
    let qmp = vmm.connect(Duration::from_secs(10)).ok()?;
    Some((vmm, qmp))
}

/// A warm or saved reboot.
fn recover_carried(held: Held, mut journal: Journal) -> Result<Recovered, RebootError> {
    let operation = journal.operation.clone();
    let generation = operation.generation;
    let old = operation.from.clone().filter(Vmm::is_alive);
    let new = alive(&held, generation);

    // The decision for the new QEMU was written: it is asked whether it obeyed.
    if operation.step >= Step::Resume
        && let Some((new, mut qmp)) = new
    {
        if life::run_state(&mut qmp)? != "running" {
            resume(&mut qmp, true)?;
        }
        let new = operation.to.clone().filter(|to| to.pid == new.pid).unwrap_or(new);
        journal.advance(Step::Settle).map_err(|source| file(&held, source))?;
        let saved = operation.saved.clone().filter(|saved| !saved.without_ram);
        switch::settle(&held.rundir, held.state.clone(), old.as_ref(), &new, &qmp, journal, None)?;
        handover::forward_ports(&mut qmp, &held.state.hardware);
        if let Some(saved) = saved {
            let _ = std::fs::remove_file(saved.path);
        }
        return Ok(Recovered::Finished);
    }
    switch::end_generation(&held.rundir, generation)?;

    let ram = &held.state.hardware.ram.path;
    let untouched = operation.step < Step::Resume || handover::untouched(ram, operation.untouched_since_ns);
    if let Some(old) = old.filter(|_| untouched) {
        switch::back(&held.rundir, &old, journal, true)?;
        if let Some(saved) = operation.saved.filter(|saved| !saved.without_ram) {
            let _ = std::fs::remove_file(saved.path);
        }
        return Ok(Recovered::Undone);
    }
    if let Some(old) = operation.from.as_ref().filter(|old| old.is_alive()) {
        old.kill().map_err(|source| file(&held, source))?;
    }
    let binary = operation.to.as_ref().or(operation.from.as_ref()).map(|vmm| vmm.binary.clone());
    let binary = binary.unwrap_or_else(|| held.state.definition.qemu.clone());
    match &operation.saved {
        // A state with RAM in it can be loaded as often as one likes, as long as no disk has moved on.
        Some(saved) if untouched => {
            let (new, mut qmp) = if saved.without_ram {
                handover::start_from(&held.rundir, &held.state.hardware, &binary, generation, saved)?
            } else {
                life::renew_ram(&held.rundir, &held.state.hardware)?;
                saved::start_from_disk(&held.rundir, &held.state.hardware, &binary, generation, saved)?
            };
            journal.operation.to = Some(new.clone());
            journal.operation.untouched_since_ns = handover::mark(ram).filter(|_| saved.without_ram);
            journal.advance(Step::Resume).map_err(|source| file(&held, source))?;
            handover::let_go(&mut qmp, &held.state.hardware, true)?;
            let with_ram = (!saved.without_ram).then(|| saved.path.clone());
            switch::settle(&held.rundir, held.state.clone(), None, &new, &qmp, journal, None)?;
            if let Some(path) = with_ram {
                let _ = std::fs::remove_file(path);
            }
            Ok(Recovered::FromState)
        }
        _ => boot(&held, Some(journal), generation),
    }
}

fn file(held: &Held, source: std::io::Error) -> RebootError {
    RebootError::File { path: held.rundir.path().to_owned(), source }
}

/// Boot the guest from its disks in a new QEMU with new RAM.
fn boot(held: &Held, journal: Option<Journal>, generation: u32) -> Result<Recovered, RebootError> {
    let journal = match journal {
        Some(journal) => journal,
        None => Journal::open(&held.rundir, Kind::VmmCold, held.state.vmm.clone(), generation)
            .map_err(|source| file(held, source))?,
    };
    let shut_down_by_itself = journal.operation.kind == Kind::VmmCold && journal.operation.step >= Step::Suspend;
    let hardware = &held.state.hardware;
    if let Some(saved) = journal.operation.saved.as_ref().filter(|saved| !saved.without_ram) {
        let _ = std::fs::remove_file(&saved.path);
    }
    life::renew_ram(&held.rundir, hardware)?;
    let directory = held.rundir.create_vmm(generation).map_err(|source| file(held, source))?;
    let fds = network::reopen(hardware)?;
    let arguments = hardware.arguments(&directory, &held.rundir.console_log(), Start::Boot);
    let binary = held.state.vmm.as_ref().map_or(&held.state.definition.qemu, |vmm| &vmm.binary);
    let vmm = Vmm::spawn(binary, &arguments, &directory, fds)?;
    let qmp = vmm.connect(vmm::START)?;
    switch::settle(&held.rundir, held.state.clone(), None, &vmm, &qmp, journal, None)?;
    Ok(if shut_down_by_itself { Recovered::Finished } else { Recovered::Booted })
}
