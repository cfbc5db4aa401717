//! Replaces the QEMU of a *domain*: a guest that libvirt has started and manages. Rekindle did not prepare it.
//!
//! libvirt's daemon survives its own restart: it finds its domains' QEMUs by its *status files*, and connects to their
//! monitor sockets. So a QEMU can be replaced while the daemon is stopped:
//!
//! 1. While the daemon and the guest run: start a destination QEMU in the surroundings of the source, with its command
//!    line, and copy the guest's RAM into files that the destination maps.
//! 2. Stop the daemon. Stop the guest, give its taps to the destination, copy what it has written meanwhile and the state
//!    of its devices, and resume it in the destination.
//! 3. *Give back*: the destination gets the source's listening sockets, libvirt's record names the destination, and the
//!    daemon is started. When it has connected to the destination, the source is ended.
//!
//! Then nothing of Rekindle remains but the destination's own monitors and its RAM, which is a file from then on:
//! the next replacement copies nothing. The VM's run directory exists only during the operation.
//!
//! | module | contents |
//! |---|---|
//! | `selection` | all domains that libvirt runs |
//! | `preflight` | what the domain is, and what prevents the replacement |
//! | `obstacles` | what libvirt has set up besides the QEMU, and would be lost |
//! | `recheck` | whether the domain is still as the preflight has found it |
//! | `graphics` | passwords of the VNC and SPICE servers |
//! | `phases` | the steps for several domains |
//! | `batches` | the domains that are replaced together |
//! | `prepare` | step 1 |
//! | `absence` | steps 2 and 3: everything that happens while the daemon is stopped |
//! | `way_back` | the return to the source after a failure |
//! | `give_back` | the return of one domain to libvirt |
//! | `recover` | the end of an interrupted operation |
//! | `capabilities` | libvirt's names of the destination's features |
//! | `journal` | what the journal has of libvirt |
//! | `record_copy` | a copy of libvirt's record of the domain |
//! | `daemon_guard` | the start of libvirt's daemon at the end of each operation |
//!
//! Several domains share the steps: all are prepared, then the daemon is stopped once, and started when each of them is
//! in its destination or, after a failure, in its source again. So an operation that is interrupted may leave several
//! domains for which the daemon is stopped, and `recover` ends all of them.
//!
//! The steps that every guest needs which Rekindle did not start are in [`crate::unprepared`], the daemon and its status
//! files in the crate `rekindle-libvirt`.

mod absence;
mod batches;
mod capabilities;
mod daemon_guard;
mod give_back;
mod graphics;
mod journal;
mod obstacles;
mod phases;
mod preflight;
mod prepare;
mod recheck;
mod record_copy;
pub(crate) mod recover;
mod selection;
mod way_back;

pub use phases::{ReplacedDomains, replace_domains};
pub use selection::{AllDomains, Selection, SkippedDomain, all_domains};

pub use crate::domain_error::DomainError;

use crate::error::{Failure, RebootError};
use crate::parallel::{ProcessorGate, in_threads};
use crate::vmm::{RebootReport, ReplacementPlan, VmPlan};
use rekindle_handover::ram_transfer::RamTransfer;
use rekindle_libvirt::{daemon, status_file};
use rekindle_vm::host::Host;
use std::path::PathBuf;

/// Options of a replacement of a domain's QEMU.
#[derive(Debug, Clone, Default)]
pub struct DomainOptions {
    /// QEMU binary of the destination. `None`: the one that libvirt would start.
    pub qemu: Option<PathBuf>,
    /// Move its RAM in place, even if there is memory for a copy.
    pub in_place: bool,
}

/// Returns whether libvirt runs a domain of this name.
#[must_use]
pub fn is_domain(name: &str) -> bool {
    status_file::StatusFile::path_of(name).is_file()
}

/// Plans what [`replace_domains`] would do for each of `names`. Changes nothing.
#[must_use]
pub fn plan_domains(host: &Host, names: &[String], options: &DomainOptions) -> Vec<VmPlan> {
    let gate = ProcessorGate::new();
    let plans = in_threads(names, |name| -> Result<ReplacementPlan, RebootError> {
        let inspected = gate.pass(|| preflight::inspect(host, name, options))?.inspected;
        let moves_in_place = inspected.transfer == RamTransfer::InPlace;
        let (from, binary) = (inspected.baseline.source_info(), inspected.binary);
        Ok(ReplacementPlan { from, binary: binary.path, version: binary.version, moves_in_place })
    });
    let plan = |(name, result): (&String, Result<_, _>)| {
        let panicked = || Err(DomainError::Panicked { name: name.clone() }.into());
        VmPlan { name: name.clone(), result: result.unwrap_or_else(|_| panicked()) }
    };
    names.iter().zip(plans).map(plan).collect()
}

/// The result of a domain.
struct DomainResult {
    /// Position of its name in the command.
    position: usize,
    result: Result<RebootReport, Failure>,
}

/// Returns the failure of a domain whose thread has panicked.
fn panicked(name: &str) -> Failure {
    Failure::needs_recovery(DomainError::Panicked { name: name.into() })
}
