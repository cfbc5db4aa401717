//! Boots a guest from its disks, without a source QEMU.

use crate::destination::{Destination, Settled};
use crate::ram::NewRam;
use crate::takeover::Taps;
use crate::{Handover, HandoverError, OwnRunDir};
use rekindle_memory::directory::RamError;
use rekindle_qemu::binary::Binary;
use rekindle_qemu::command::{Hardware, Start};
use rekindle_vm::definition::Definition;
use rekindle_vm::disks::{Epochs, LeftoverLogs, RetainedCache};
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::journal::Kind;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::slot::{SlotResources, VmSlot};
use rekindle_vm::state::State;
use rekindle_vm::timeline::{Phase, Recorder};
use rekindle_vm::{disks, network, phases, ram};
use std::path::PathBuf;
use uuid::Uuid;

/// A VM to start.
#[derive(Debug)]
pub struct NewVm {
    pub definition: Definition,
    /// Path of the QEMU to use instead of the definition's.
    pub qemu: Option<PathBuf>,
    /// UUID of the VM. `None`: the definition's or a new one.
    pub uuid: Option<Uuid>,
    pub leftover_log: LeftoverLog,
}

/// Handling of a redo log that a failure has left with a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeftoverLog {
    /// Merge the log: the guest boots from the newest disk, and the disk's state at any checkpoint is lost.
    Merge,
    /// Fail, so that the user decides.
    Reject,
}

/// Starts a VM. `before_start` is called after all checks, before any redo log is merged and before the guest runs. An
/// error from it prevents both.
///
/// *Needs:* the files and networks that the definition names; room for the guest's RAM; root for taps.
/// *On success:* the guest boots in a QEMU that has its own session; the VM's state is recorded.
/// *On failure:* nothing is left behind.
///
/// # Errors
/// [`HandoverError`], and the errors of `before_start`.
pub fn start<E: From<HandoverError>>(
    host: &Host,
    vm: NewVm,
    before_start: impl FnOnce(&RunDir, &Hardware) -> Result<(), E>,
) -> Result<State, E> {
    let NewVm { definition, qemu, uuid, leftover_log } = vm;
    let adapt = |hardware: &mut Hardware| {
        hardware.uuid = uuid.or(hardware.uuid);
        let leftover_logs = match leftover_log {
            LeftoverLog::Merge => LeftoverLogs::Use,
            LeftoverLog::Reject => LeftoverLogs::Reject,
        };
        let problems = disks::redo_log_problems(hardware, &Epochs::new(), leftover_logs);
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    };
    let slot = VmSlot::take(host, definition, qemu.as_deref(), "run", adapt).map_err(HandoverError::from)?;
    let started = before_start(&slot.rundir, &slot.state.hardware).and_then(|()| Ok(start_in_slot(&slot)?));
    if started.is_err() {
        slot.undo();
    }
    started
}

fn start_in_slot(slot: &VmSlot<'_>) -> Result<State, HandoverError> {
    disks::merge_leftover_logs(&slot.state.hardware).map_err(LifeError::from)?;
    let SlotResources { journal, fds } = slot.make(Kind::Run)?;
    let VmSlot { state, binary, rundir, .. } = slot;
    let recorder = Recorder::new(rundir.name(), "run");
    let mut handover = Handover { rundir: rundir.clone(), state: state.clone(), journal, recorder };
    let environment = OwnRunDir { rundir, hardware: &state.hardware, binary };
    let destination = Destination::spawn(&mut handover, &environment, Start::Boot, fds)?;
    let running = destination.runs_already()?.commit(&mut handover, "boot")?;
    match running.settle(handover, "record") {
        Ok(settled) => Ok(settled.state),
        // No memory is lost with a guest that has just booted.
        Err(HandoverError::DiedRunning { name, log }) => Err(LifeError::Ended { name, log }.into()),
        Err(e) => Err(e),
    }
}

/// Handling of the previous guest's disk cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PreviousCache {
    /// The disk servers retain the cache, and compare each block with the disk before they serve it.
    Retain,
    Discard,
}

#[derive(Debug)]
pub struct Booted {
    pub settled: Settled<NewRam>,
    /// The cache that the disk servers have retained.
    pub retained: Option<RetainedCache>,
}

/// Boots a guest whose previous QEMU has ended, in a new QEMU with new RAM. Uses `taps` or, if there are none, opens
/// the VM's taps again.
///
/// # Errors
/// [`HandoverError`]: the operation needs recovery.
pub fn boot(
    mut handover: Handover,
    binary: &Binary,
    cache: PreviousCache,
    taps: Option<Taps>,
) -> Result<Booted, HandoverError> {
    let rundir = handover.rundir.clone();
    let State { hardware, definition, .. } = handover.state.clone();
    handover.recorder.phase(Phase::Renew);
    let retained = renew_ram(&rundir, &hardware, cache)?;
    handover.pass("cold.renew.memory");
    disks::start(&rundir, &hardware).map_err(LifeError::from)?;
    phases::begin_boot(&rundir, &hardware, &definition);
    handover.recorder.step("renew its memory");
    let taps = taps.map_or_else(|| network::reopen(&hardware), Ok)?;
    let environment = OwnRunDir { rundir: &rundir, hardware: &hardware, binary };
    let destination = Destination::spawn(&mut handover, &environment, Start::Paused, taps)?;
    handover.recorder.step("start the new QEMU");
    let running = destination.without_state().commit(&mut handover, "boot")?;
    Ok(Booted { settled: running.settle(handover, "record")?, retained })
}

/// Makes new RAM files. Returns the retained cache of the previous ones.
fn renew_ram(rundir: &RunDir, hardware: &Hardware, cache: PreviousCache) -> Result<Option<RetainedCache>, RamError> {
    match cache {
        PreviousCache::Retain => ram::renew_keeping_cache(rundir, hardware),
        PreviousCache::Discard => ram::renew(rundir, hardware).map(|()| None),
    }
}
