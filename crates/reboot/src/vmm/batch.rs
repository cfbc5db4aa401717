//! Replaces the QEMUs of several VMs in parallel: all are prepared before a guest is stopped, and no more guests are
//! handed over at a time than there are processors.

use super::{QemuInfo, RebootMethod, RebootReport, ReplaceOptions, begin, cold, saved, warm};
use crate::error::{Failure, RebootError};
use crate::parallel::{ProcessorGate, in_threads};
use rekindle_handover::priority;
use rekindle_life::shutdown::EndMethod;
use rekindle_qemu::binary::{Binary, BinaryError};
use rekindle_qemu::qmp::Version;
use rekindle_vm::host::Host;
use rekindle_vm::journal::Kind;
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Barrier, Mutex, PoisonError};

/// Result of a reboot for one VM.
pub struct VmOutcome {
    pub name: String,
    pub result: Result<RebootReport, Failure>,
}

/// Replaces the QEMUs of `names`, in parallel.
///
/// *Needs:* the VMs run; no other operation holds them; the new binary passes the preflight.
/// *On success:* each guest runs in its destination QEMU; the source QEMU has ended.
/// *On failure:* [`Failure::guest`] states the guest's status for each VM. The other VMs continue.
///
/// No guest is stopped before all destinations are prepared, so that guest-stopped time contains no preparation. With
/// [`RebootMethod::Warm`], as many guests are handed over at a time as there are processors.
#[must_use]
pub fn reboot(host: &Host, names: &[String], options: &ReplaceOptions) -> Vec<VmOutcome> {
    let batch = Batch::new(names.len());
    let results = in_threads(names, |name| reboot_one(host, name, options, &batch));
    let outcome = |(name, result): (&String, Result<_, _>)| {
        let panicked = |e| Failure::needs_recovery(RebootError::file(&host.root.join(name))(io::Error::other(e)));
        VmOutcome { name: name.clone(), result: result.unwrap_or_else(|e| Err(panicked(e))) }
    };
    names.iter().zip(results).map(outcome).collect()
}

/// The source QEMU of one VM, and the binary that would replace it.
#[derive(Debug, Clone)]
pub struct ReplacementPlan {
    pub from: QemuInfo,
    pub binary: PathBuf,
    pub version: Version,
    /// Whether the guest's RAM is moved in place, for which the guest waits after it has resumed.
    pub moves_in_place: bool,
}

/// The replacement that [`reboot`] would do for one VM, or the error that prevents it.
pub struct VmPlan {
    pub name: String,
    pub result: Result<ReplacementPlan, RebootError>,
}

/// Plans what [`reboot`] would do for each of `names`. Changes nothing.
#[must_use]
pub fn plan(host: &Host, names: &[String], options: &ReplaceOptions) -> Vec<VmPlan> {
    let batch = Batch::new(1);
    let operation = format!("replace-qemu --how {} --dry-run", options.how);
    let plan_one = |name: &String| {
        let replacement = begin(host, name, &operation, options, |path| batch.probe(host, path))?;
        let (binary, version) = (replacement.binary.path.clone(), replacement.binary.version.clone());
        Ok(ReplacementPlan { from: replacement.source_info(), binary, version, moves_in_place: false })
    };
    names.iter().map(|name| VmPlan { name: name.clone(), result: plan_one(name) }).collect()
}

/// State shared by all VMs of one call of [`reboot`].
struct Batch {
    /// Delays every stop of a guest until all destinations are prepared.
    barrier: Barrier,
    gate: ProcessorGate,
    /// Probed binaries by path. Each binary is probed once.
    binaries: Mutex<HashMap<PathBuf, Binary>>,
}

impl Batch {
    fn new(vms: usize) -> Self {
        Self { barrier: Barrier::new(vms), gate: ProcessorGate::new(), binaries: Mutex::default() }
    }

    fn probe(&self, host: &Host, path: &Path) -> Result<Binary, BinaryError> {
        // Hold the lock during the probe: otherwise other threads would probe the same binary.
        let mut binaries = self.binaries.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(binary) = binaries.get(path) {
            return Ok(binary.clone());
        }
        let binary = Binary::probe_cached(path, &host.binaries())?;
        binaries.insert(path.to_owned(), binary.clone());
        Ok(binary)
    }
}

/// Reboots one VM. Waits at the barrier as often as all other VMs do, also after a failure: the others wait for it.
fn reboot_one(host: &Host, name: &str, options: &ReplaceOptions, batch: &Batch) -> Result<RebootReport, Failure> {
    let operation = format!("replace-qemu --how {}", options.how);
    let replacement =
        begin(host, name, &operation, options, |path| batch.probe(host, path)).map_err(Failure::unchanged);
    match options.how {
        RebootMethod::Warm => {
            let prepared = replacement.and_then(warm::PreparedHandover::new);
            batch.barrier.wait();
            // Guests that already run again must not delay this hand-over. Without the privilege to raise its priority,
            // they do; the hand-over then takes longer.
            let boost = priority::boost_this_thread();
            let completed = prepared.and_then(|prepared| batch.gate.pass(|| prepared.hand_over()));
            drop(boost);
            // Ending a source QEMU takes processor time, which guests that are still stopped need more.
            batch.barrier.wait();
            completed?.settle()
        }
        RebootMethod::Saved => {
            batch.barrier.wait();
            saved::reboot(replacement?)
        }
        RebootMethod::Cold => {
            batch.barrier.wait();
            cold::reboot(replacement?, Kind::VmmCold, EndMethod::Shutdown).map(|booted| booted.report)
        }
    }
}
