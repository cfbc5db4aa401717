//! Replaces the QEMU of a guest that Rekindle did not start, and that was not prepared for it: the steps that do not depend
//! on the program that manages the guest. [`crate::libvirt`] uses them for domains of libvirt, [`crate::bare`] for QEMUs that a script
//! or a service has started.
//!
//! A destination QEMU is started in the surroundings of the source, with its command line. The guest's RAM is copied into
//! files that the destination maps. Then the guest is stopped, its taps go to the destination, the rest of the RAM and the
//! state of the devices are copied, and the guest resumes in the destination, which gets the source's listening sockets.
//!
//! | module | contents |
//! |---|---|
//! | `inspect` | what the guest is, and what prevents the replacement |
//! | `obstacles` | leases, and the memory that a copy needs |
//! | `recheck` | whether the guest is still as it was found |
//! | `environment` | where the destination starts, and what it inherits |
//! | `start` | the start of the destination, and the first copy of the RAM |
//! | `hand_over` | the hand-over of the guest |
//! | `give` | what the destination gets when the source is frozen: listening sockets |
//! | `vnc`, `spice` | servers that show the screen |
//! | `stand_in` | sockets at which such a server listens first |
//! | `pid_file` | files that name a process |
//! | `tpm` | the emulator of the guest's TPM |
//! | `forwards` | ports that user networks forward |
//! | `source` | freezing the source, and resuming the guest in it |
//! | `way_back` | the return to the source after a failure |
//! | `recover` | where the guest of an interrupted replacement continues |
//!
//! Exactly one QEMU may run the guest at each instant. Until the decision ([`rekindle_vm::journal::Step::Resume`]) that
//! is the source, to which every failure returns; after it the guest may have written to its disks, so that only the
//! destination can continue. The source is frozen before the decision.

pub(crate) mod environment;
pub(crate) mod forwards;
pub(crate) mod give;
pub(crate) mod hand_over;
pub(crate) mod inspect;
mod obstacles;
pub(crate) mod pid_file;
pub(crate) mod recheck;
pub(crate) mod recover;
pub(crate) mod source;
pub(crate) mod spice;
pub(crate) mod stand_in;
pub(crate) mod start;
pub(crate) mod tpm;
pub(crate) mod vnc;
pub(crate) mod way_back;

pub(crate) use crate::unprepared_error::UnpreparedError;
pub(crate) use obstacles::LEASE_REMEDY;

use crate::error::{Problem, RebootError};
use inspect::Inspected;
use rekindle_handover::Handover;
use rekindle_vm::journal::PassedParts;
use std::io;

/// Generation of the destination. The source, which Rekindle did not start, is the first.
pub(crate) const DESTINATION_GENERATION: u32 = 2;
/// Name of the operation, for other processes that find the guest locked.
pub(crate) const OPERATION: &str = "replace-qemu";

/// Returns what the journal has to name before the destination is started.
pub(crate) fn passed_parts(inspected: &Inspected) -> PassedParts {
    let Inspected { baseline, listeners, forwards, tpm, .. } = inspected;
    PassedParts {
        listeners: listeners.clone(),
        forwards: forwards.clone(),
        vnc: vnc::listeners(&baseline.line),
        vnc_stand_ins: vnc::stand_ins(&baseline.line),
        spice_stand_ins: spice::stand_ins(&baseline.line),
        tpm: tpm.as_ref().map(|tpm| tpm.passed.clone()),
    }
}

/// Returns what the journal has of the parts that pass to the destination.
pub(crate) fn passed(handover: &Handover) -> Result<&PassedParts, RebootError> {
    let missing = || {
        let path = handover.rundir.file("operation.json");
        RebootError::File { path, source: io::Error::other("it does not name what passes to the new QEMU") }
    };
    handover.journal.operation.passed.as_ref().ok_or_else(missing)
}

pub(crate) fn preflight_error(name: &str, problems: Vec<String>) -> RebootError {
    RebootError::Preflight { name: name.into(), problems: problems.into_iter().map(Problem).collect() }
}
