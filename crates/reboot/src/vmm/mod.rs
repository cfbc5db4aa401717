//! Replacing the QEMU process of a VM.
//!
//! | how | what happens to the guest |
//! |---|---|
//! | [`RebootMethod::Warm`] | stopped for some milliseconds; its RAM does not move |
//! | [`RebootMethod::Saved`] | stopped while its RAM is written to disk and read back |
//! | [`RebootMethod::Cold`] | shut down and booted |
//!
//! `docs/vmm-restart.md` has the sequence and the argument for it; `docs/run-directory.md` lists the journal entries of
//! each step.

mod batch;
pub(crate) mod cold;
pub(crate) mod preflight;
pub(crate) mod recover;
pub(crate) mod saved;
mod verify;
mod vm_generation_id;
pub(crate) mod warm;

pub use batch::{ReplacementPlan, VmOutcome, VmPlan, plan, reboot};
pub(crate) use cold::ColdReboot;
pub use verify::MemoryComparison;

use crate::error::{Failure, Problem, RebootError};
use rekindle_handover::moved_ram::MoveReport;
use rekindle_handover::{Handover, OwnRunDir, Settled};
use rekindle_qemu::binary::{Binary, BinaryError};
use rekindle_qemu::guest;
use rekindle_qemu::qmp::{Qmp, QmpError, Version};
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::error::LifeError;
use rekindle_vm::hardware;
use rekindle_vm::helpers;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind};
use rekindle_vm::lock;
use rekindle_vm::locked_vm::LockedVm;
use rekindle_vm::state::State;
use rekindle_vm::timeline::{Entry, Recorder, host_us};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long to wait for a checkpoint that holds the run-state lock.
pub(crate) const RUN_STATE_TIMEOUT: Duration = Duration::from_secs(30);

/// Method by which a QEMU is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RebootMethod {
    /// The guest's RAM stays in place; only device state passes from the source QEMU to the destination QEMU.
    Warm,
    /// The guest's RAM is saved to disk and loaded again, by QEMU's own migration.
    Saved,
    /// The guest is shut down and booted.
    Cold,
}

impl std::fmt::Display for RebootMethod {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Warm => "warm",
            Self::Saved => "saved",
            Self::Cold => "cold",
        })
    }
}

/// Options of a replacement of a VM's QEMU.
#[derive(Debug, Clone)]
pub struct ReplaceOptions {
    pub how: RebootMethod,
    /// QEMU binary of the destination. `None`: the source's binary.
    pub qemu: Option<PathBuf>,
    /// Use the binary that ran before the last upgrade.
    pub rollback: bool,
    /// Compare digests of all guest memory, taken in the source and in the destination QEMU while the guest is stopped.
    pub verify_memory: bool,
}

impl ReplaceOptions {
    /// Returns the options of a replacement by the same binary, without a memory comparison.
    pub(crate) fn same_qemu(how: RebootMethod) -> Self {
        Self { how, qemu: None, rollback: false, verify_memory: false }
    }
}

/// A QEMU as reports show it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct QemuInfo {
    pub binary: PathBuf,
    pub version: Option<Version>,
    pub pid: u32,
}

/// Result of a reboot.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RebootReport {
    pub name: String,
    /// Guest-stopped time in microseconds of the host's clock: from the `STOP` of the source QEMU (cold: from the end
    /// of the source QEMU) to the `RESUME` of the destination QEMU.
    pub stopped_us: u64,
    /// When the guest stopped: microseconds since 1970.
    pub stop_host_us: u64,
    /// When the guest resumed: microseconds since 1970.
    pub resume_host_us: u64,
    pub steps: Vec<Entry>,
    pub from: QemuInfo,
    pub to: QemuInfo,
    /// `None` without [`ReplaceOptions::verify_memory`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryComparison>,
    /// For a domain of libvirt: how long its daemon was away, in microseconds: from the request to stop it until it
    /// accepted connections again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub daemon_away_us: Option<u64>,
    /// For a guest that Rekindle did not start, and whose RAM was moved in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved_in_place: Option<MoveReport>,
}

/// A replacement of a QEMU that has passed the preflight. The VM is locked.
pub(crate) struct Replacement {
    pub(crate) host: Host,
    pub(crate) locked_vm: LockedVm,
    pub(crate) source_qemu: Vmm,
    pub(crate) binary: Binary,
    pub(crate) options: ReplaceOptions,
    pub(crate) recorder: Recorder,
    /// `false` if the VM's owner has paused the guest: it stays paused.
    pub(crate) running: bool,
    /// Prevents other processes from stopping or resuming the guest.
    run_state_lock: Option<lock::RunStateLock>,
}

impl Replacement {
    pub(crate) fn name(&self) -> &str {
        self.locked_vm.rundir.name()
    }

    fn source_info(&self) -> QemuInfo {
        QemuInfo {
            binary: self.source_qemu.binary.clone(),
            version: self.locked_vm.state.version.clone(),
            pid: self.source_qemu.pid,
        }
    }

    /// Returns the report of a guest that was stopped at `stopped_host_us` and whose hand-over has been settled.
    pub(crate) fn report<R>(&self, settled: &Settled<R>, stopped_host_us: u64) -> RebootReport {
        RebootReport {
            name: self.name().into(),
            stopped_us: settled.resumed_host_us.saturating_sub(stopped_host_us),
            stop_host_us: stopped_host_us,
            resume_host_us: settled.resumed_host_us,
            steps: settled.recorder.entries().to_vec(),
            from: self.source_info(),
            to: QemuInfo {
                binary: settled.vmm.binary.clone(),
                version: settled.state.version.clone(),
                pid: settled.vmm.pid,
            },
            memory: None,
            daemon_away_us: None,
            moved_in_place: None,
        }
    }

    /// Prevents other processes from stopping or resuming the guest until this replacement is dropped.
    pub(crate) fn hold_run_state(&mut self) -> Result<(), RebootError> {
        let lock = lock::RunStateLock::acquire(&self.locked_vm.rundir, RUN_STATE_TIMEOUT).map_err(LifeError::from)?;
        self.run_state_lock = Some(lock);
        Ok(())
    }

    /// Fails if a disk server is stopped: the source QEMU could not stop its guest, nor resume it. Must be called right before
    /// the guest is stopped.
    pub(crate) fn refuse_stopped_disk_servers(&self) -> Result<(), RebootError> {
        let rundir = &self.locked_vm.rundir;
        let stopped = helpers::stopped_disk_servers(rundir).map_err(RebootError::file(rundir.path()))?;
        stopped.first().map_or(Ok(()), |server| {
            Err(RebootError::Prevented { name: self.name().into(), problem: Problem(server.to_string()) })
        })
    }

    /// Journals the operation. The returned hand-over has the recorder of this replacement and records all further
    /// steps.
    pub(crate) fn begin_handover(&mut self, kind: Kind) -> Result<Handover, RebootError> {
        let rundir = self.locked_vm.rundir.clone();
        let source = Some(self.source_qemu.clone());
        let journal = Journal::open_for(&rundir, kind, source, self.locked_vm.state.generation + 1, self.running);
        let journal = journal.map_err(self.file_error("operation.json"))?;
        let recorder = std::mem::replace(&mut self.recorder, Recorder::new(self.locked_vm.rundir.name(), ""));
        Ok(Handover { rundir, state: self.locked_vm.state.clone(), journal, recorder })
    }

    /// Returns the environment of the destination QEMU: the VM's own run directory.
    pub(crate) fn environment(&self) -> OwnRunDir<'_> {
        OwnRunDir { rundir: &self.locked_vm.rundir, hardware: &self.locked_vm.state.hardware, binary: &self.binary }
    }

    pub(crate) fn file_error(&self, file: &str) -> impl Fn(io::Error) -> RebootError + use<> {
        RebootError::file(&self.locked_vm.rundir.file(file))
    }
}

/// Begins a replacement: locks the VM, probes the destination's binary with `probe`, and runs the preflight. Stops
/// nothing.
pub(crate) fn begin(
    host: &Host,
    name: &str,
    operation: &str,
    options: &ReplaceOptions,
    probe: impl FnOnce(&Path) -> Result<Binary, BinaryError>,
) -> Result<Replacement, RebootError> {
    let recorder = Recorder::new(name, operation);
    let locked_vm = LockedVm::lock_after_phase_save(host, name, operation)?;
    let source_qemu = locked_vm.vmm()?.clone();
    locked_vm.refuse_attached("giving its guest to another QEMU")?;
    if locked_vm.state.hardware.foreign.is_some() {
        return Err(LifeError::Foreign { name: name.into() }.into());
    }
    let binary_path = match (&options.qemu, options.rollback) {
        (Some(path), _) => path.clone(),
        (None, true) => {
            locked_vm.state.previous.clone().ok_or_else(|| RebootError::NoRollback { name: name.into() })?
        }
        (None, false) => source_qemu.binary.clone(),
    };
    let binary = hardware::binary_for(&locked_vm.state.hardware, probe(&binary_path)?, &host.binaries())?;
    let options = options.clone();
    let mut replacement = Replacement {
        host: host.clone(),
        locked_vm,
        source_qemu,
        binary,
        options,
        recorder,
        running: true,
        run_state_lock: None,
    };
    replacement.running = preflight::check(&replacement)?;
    replacement.recorder.step("preflight");
    Ok(replacement)
}

/// Begins a cold reboot: locks the VM and runs the preflight. Stops nothing.
pub(crate) fn begin_cold_reboot(
    host: &Host,
    name: &str,
    operation: &str,
    find_problem: impl FnOnce(&State) -> Option<Problem>,
) -> Result<Replacement, Failure> {
    let options = ReplaceOptions::same_qemu(RebootMethod::Cold);
    let replacement = begin(host, name, operation, &options, |path| Binary::probe_cached(path, &host.binaries()));
    let replacement = replacement.and_then(|replacement| match find_problem(&replacement.locked_vm.state) {
        None => Ok(replacement),
        Some(problem) => Err(RebootError::Prevented { name: name.into(), problem }),
    });
    replacement.map_err(Failure::unchanged)
}

/// Stops the guest if it is `running`. Returns the time of the stop, in µs since 1970; of this call if it is not.
pub(crate) fn stop(qmp: &mut Qmp, running: bool) -> Result<u64, QmpError> {
    if running { guest::stop(qmp) } else { Ok(host_us()) }
}
