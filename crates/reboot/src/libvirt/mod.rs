//! Replaces the QEMU of a *domain*: a guest that libvirt has started and manages. Rekindle did not prepare it.
//!
//! libvirt's daemon survives its own restart: it finds its domains' QEMUs by its *status files*, and connects to their
//! monitor sockets. So a QEMU can be replaced while the daemon is stopped:
//!
//! 1. While the daemon and the guest run: start a destination QEMU in the surroundings of the source, with its command
//!    line, and copy the guest's RAM into files that the destination maps.
//! 2. Stop the daemon. Stop the guest, copy what it has written meanwhile and the state of its devices, and resume it
//!    in the destination.
//! 3. *Give back*: the destination gets the source's listening sockets, libvirt's record names the destination, and the
//!    daemon is started. When it has connected to the destination, the source is ended.
//!
//! Then nothing of Rekindle remains but the destination's own monitors and its RAM, which is a file from then on:
//! the next replacement copies nothing. The VM's run directory exists only during the operation.
//!
//! | module | contents |
//! |---|---|
//! | `preflight` | what the domain is, and what prevents the replacement |
//! | `obstacles` | what libvirt has set up besides the QEMU, and would be lost |
//! | `recheck` | whether the domain is still as the preflight has found it |
//! | `environment` | where the destination starts, and what it inherits |
//! | `forwards` | ports that user networks forward |
//! | `vnc` | the VNC server's password and listening sockets |
//! | `replace` | steps 1 and 2 |
//! | `source` | freezing the source, and resuming the guest in it |
//! | `way_back` | the return to the source after a failure |
//! | `give_back` | step 3 |
//! | `recover` | the end of an interrupted operation |
//! | `capabilities` | libvirt's names of the destination's features |
//! | `journal` | what the journal has of libvirt |
//! | `record_copy` | a copy of libvirt's record of the domain |
//! | `daemon_guard` | the start of libvirt's daemon at the end of each operation |
//! | `deferred_signals` | Ctrl-C while it is stopped |
//!
//! The daemon and its status files are in the crate `rekindle-libvirt`.
//!
//! Exactly one QEMU may run the guest at each instant. Until the decision ([`rekindle_vm::journal::Step::Resume`]) that
//! is the source, to which every failure returns; after it the guest may have written to its disks, so that only the
//! destination can continue. The source is frozen before the decision.

mod capabilities;
mod daemon_guard;
mod deferred_signals;
mod environment;
mod forwards;
mod give_back;
mod journal;
mod obstacles;
mod preflight;
mod recheck;
mod record_copy;
pub(crate) mod recover;
mod replace;
mod source;
mod vnc;
mod way_back;

pub use replace::replace_domains;

pub use crate::domain_error::DomainError;

use crate::error::{Problem, RebootError};
use crate::vmm::{QemuInfo, ReplacementPlan, VmPlan};
use rekindle_libvirt::{daemon, status_file};
use rekindle_vm::host::Host;
use std::path::PathBuf;

/// Options of a replacement of a domain's QEMU.
#[derive(Debug, Clone, Default)]
pub struct DomainOptions {
    /// QEMU binary of the destination. `None`: the one that libvirt would start.
    pub qemu: Option<PathBuf>,
}

/// Returns whether libvirt runs a domain of this name.
#[must_use]
pub fn is_domain(name: &str) -> bool {
    status_file::StatusFile::path_of(name).is_file()
}

/// Plans what [`replace_domains`] would do for each of `names`. Changes nothing.
#[must_use]
pub fn plan_domains(host: &Host, names: &[String], options: &DomainOptions) -> Vec<VmPlan> {
    let plan = |name: &String| -> Result<ReplacementPlan, RebootError> {
        let preflight::Inspected { baseline, binary, .. } = preflight::inspect(host, name, options)?;
        let adopted = baseline.adopted;
        let from = QemuInfo { binary: adopted.binary, version: Some(adopted.version), pid: adopted.pid };
        Ok(ReplacementPlan { from, binary: binary.path, version: binary.version })
    };
    names.iter().map(|name| VmPlan { name: name.clone(), result: plan(name) }).collect()
}

fn preflight_error(name: &str, problems: Vec<String>) -> RebootError {
    RebootError::Preflight { name: name.into(), problems: problems.into_iter().map(Problem).collect() }
}
