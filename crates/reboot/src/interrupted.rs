//! The parts that all recoveries share: their results, and the check that the QEMUs answer. A QEMU that does not answer
//! may still run its guest, so it is killed only with `--force`.

use crate::error::RebootError;
use rekindle_handover::{Handover, HandoverError};
use rekindle_kernel::sched;
use rekindle_qemu::guest::{self, run_state};
use rekindle_qemu::program::Program;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::vmm::{self, Vmm};
use rekindle_vm::journal::{Journal, Kind, Operation, Step};
use rekindle_vm::locked_vm::LockedVm;
use rekindle_vm::qemu::processes_of;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::timeline::Recorder;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Result of `recover`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Recovered {
    Nothing,
    /// An interrupted checkpoint had left the guest stopped; it was resumed.
    Unpaused,
    /// A disk server had ended; it was started again.
    Served,
    /// The operation was undone: the guest runs in the source QEMU, with its memory.
    Undone,
    /// The operation was finished: the guest runs in the destination QEMU, with its memory.
    Finished,
    /// The guest was resumed from its saved state, with its memory.
    FromState,
    /// A start or a cold reboot was finished: the guest was booted.
    Started,
    /// The guest's memory was lost, and it was booted from its disks.
    Booted,
    /// The QEMU of a domain of libvirt has ended. libvirt shows the domain as shut off.
    ShutOff,
    /// The QEMU of a guest that Rekindle did not start has ended.
    Ended,
    /// A preparation was finished: a QEMU waits for a restore.
    Prepared,
    /// A move was undone: the guest runs on this host.
    MovedBack,
    /// A move was finished: the guest runs on the destination host, and nothing of it remains on this host.
    MovedAway,
    /// The VM was removed: a stop was finished, or a start was undone.
    Removed,
}

impl fmt::Display for Recovered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Nothing => "there was nothing to recover",
            Self::Unpaused => "an interrupted checkpoint or suspend had left the guest stopped; it was resumed",
            Self::Served => "a disk server had ended; it was started again",
            Self::Undone => "undone: the guest runs in the same QEMU as before, with its memory",
            Self::Finished => "finished: the guest runs in the destination QEMU, with its memory",
            Self::FromState => "the guest was resumed from its saved state, with its memory",
            Self::Started => "finished: the guest was booted",
            Self::Booted => "the guest's memory was lost; it was booted from its disks",
            Self::ShutOff => "the QEMU has ended, and the guest's memory is lost; libvirt shows the domain as shut off",
            Self::Ended => "the QEMU has ended, and the guest's memory is lost; start the guest as usual",
            Self::Prepared => "finished: a QEMU waits for a checkpoint",
            Self::MovedBack => "undone: the guest runs on this host, with its memory",
            Self::MovedAway => "finished: the guest runs on the other host, and nothing of it remains here",
            Self::Removed => "the VM is removed",
        })
    }
}

/// How long to wait on one of the two monitor sockets before trying the other.
const SOCKET_TIMEOUT: Duration = Duration::from_secs(2);

/// How `recover` treats a QEMU that runs and does not answer.
#[derive(Debug, Clone, Copy)]
pub struct SilentQemuPolicy {
    /// How long to wait for an answer.
    pub wait: Duration,
    /// `true`: kill the QEMU after [`wait`](Self::wait). `false`: the recovery fails and changes nothing.
    pub force: bool,
}

impl Default for SilentQemuPolicy {
    fn default() -> Self {
        Self { wait: Duration::from_secs(60), force: false }
    }
}

/// Waits for an answer from each QEMU that the recovery of an operation depends on.
///
/// *On success:* each of these QEMUs answers, has ended, or was killed because of [`SilentQemuPolicy::force`].
pub(crate) fn require_answers(
    locked_vm: &LockedVm,
    operation: &Operation,
    policy: SilentQemuPolicy,
) -> Result<(), RebootError> {
    // Recovery ends the QEMUs of these operations without asking them: they have run no guest, or the VM is to be
    // removed.
    if matches!(operation.kind, Kind::Stop | Kind::Run | Kind::Prepare) {
        return Ok(());
    }
    let name = locked_vm.rundir.name();
    if operation.step >= Step::Resume
        && let Some(destination_qemu) = live_destination(locked_vm, operation)?
        && wait_for_answer(name, &destination_qemu, policy)?
    {
        // The destination runs the guest; the source does not matter.
        return Ok(());
    }
    if let Some(source_qemu) = operation.from.as_ref().or(locked_vm.state.vmm.as_ref()) {
        // The hand-over freezes it then: `Handover::freeze_reader_of_queues`.
        if !operation.detached_queues.is_empty() {
            source_qemu.process().resume().map_err(RebootError::file(&source_qemu.directory))?;
        }
        wait_for_answer(name, source_qemu, policy)?;
    }
    Ok(())
}

/// Returns the live QEMU that the operation started, also if the journal does not name it yet.
fn live_destination(locked_vm: &LockedVm, operation: &Operation) -> Result<Option<Vmm>, RebootError> {
    match operation.to.clone().filter(Vmm::is_alive) {
        Some(recorded) => Ok(Some(recorded)),
        None => live_qemu_of_generation(&locked_vm.rundir, &locked_vm.state, operation.generation),
    }
}

/// Returns the live QEMU of a generation of the VM.
pub(crate) fn live_qemu_of_generation(
    rundir: &RunDir,
    state: &State,
    generation: u32,
) -> Result<Option<Vmm>, RebootError> {
    let directory = rundir.vmm(generation);
    let processes = processes_of(&directory).map_err(RebootError::file(&directory.0))?;
    let Some(process) = processes.into_iter().find(|process| process.is_alive()) else {
        return Ok(None);
    };
    // Prefer the recorded binary: the program of the process may be a dynamic loader.
    let recorded = state.vmm.as_ref().filter(|vmm| vmm.process() == process).map(|vmm| vmm.binary.clone());
    let binary = recorded.or_else(|| Some(Program::of(process).ok()?.start)).unwrap_or_else(|| PathBuf::from("qemu"));
    Ok(Some(Vmm {
        binary,
        pid: process.pid,
        started: process.started,
        directory: directory.0,
        monitor: None,
        direct_monitors: None,
    }))
}

/// Waits until a QEMU answers. Returns `false` if it has ended, or was killed because of [`SilentQemuPolicy::force`].
///
/// # Errors
/// [`HandoverError::Silent`]: nothing was changed.
pub(crate) fn wait_for_answer(name: &str, vmm: &Vmm, policy: SilentQemuPolicy) -> Result<bool, RebootError> {
    let failed = RebootError::file(&vmm.directory);
    let answers = |qmp: &mut Qmp| run_state(qmp).is_ok();
    let deadline = Instant::now() + policy.wait;
    let mut is_wait_logged = false;
    loop {
        if vmm.process().wait_end(Duration::ZERO).map_err(&failed)? {
            return Ok(false);
        }
        let remaining_time = deadline.saturating_duration_since(Instant::now());
        let timeout = remaining_time.min(SOCKET_TIMEOUT).max(Duration::from_millis(1));
        // QEMU serves one client per socket, and another client may occupy one of the two sockets.
        if vmm.connect(timeout).is_ok_and(|mut qmp| answers(&mut qmp))
            || vmm.connect_watcher(timeout).is_ok_and(|mut qmp| answers(&mut qmp))
        {
            return Ok(true);
        }
        if remaining_time.is_zero() {
            break;
        }
        if !std::mem::replace(&mut is_wait_logged, true) {
            tracing::warn!(
                "{name}: QEMU (process {}) runs but does not answer; waiting up to {} s",
                vmm.pid,
                policy.wait.as_secs()
            );
        }
    }
    if vmm.process().wait_end(Duration::ZERO).map_err(&failed)? {
        return Ok(false);
    }
    if !policy.force {
        return Err(HandoverError::Silent { name: name.into(), pid: vmm.pid, waited: policy.wait }.into());
    }
    tracing::warn!("{name}: QEMU (process {}) does not answer; killing it (--force)", vmm.pid);
    vmm.kill().map_err(&failed)?;
    Ok(false)
}

/// Returns the hand-over of an interrupted operation, for its recovery. The timeline of a recovery is not recorded.
pub(crate) fn continue_interrupted(locked_vm: &LockedVm, journal: Journal) -> Handover {
    let recorder = Recorder::new(locked_vm.rundir.name(), "recover");
    Handover { rundir: locked_vm.rundir.clone(), state: locked_vm.state.clone(), journal, recorder }
}

/// Restores the priority of the threads of both QEMUs, which an interrupted hand-over may have left raised.
pub(crate) fn restore_priorities(operation: &Operation) {
    for vmm in [&operation.from, &operation.to].into_iter().flatten().filter(|vmm| vmm.is_alive()) {
        let _ = sched::normal(vmm.process());
    }
}

/// Resumes a guest that an interrupted checkpoint or suspend left stopped.
pub(crate) fn end_pause(locked_vm: &LockedVm, vmm: &Vmm) -> Result<Recovered, RebootError> {
    let mark = locked_vm.rundir.paused();
    if !mark.exists() {
        return Ok(Recovered::Nothing);
    }
    // QEMU's threads may still have raised priority.
    let _ = sched::normal(vmm.process());
    let mut qmp = vmm.connect(vmm::START_TIMEOUT)?;
    if run_state(&mut qmp)? == "paused" {
        guest::resume(&mut qmp)?;
    }
    fs::remove_file(&mark).map_err(RebootError::file(&mark))?;
    Ok(Recovered::Unpaused)
}
