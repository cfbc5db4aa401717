//! The part of the journal that concerns libvirt.

use crate::error::RebootError;
use rekindle_handover::Handover;
use rekindle_vm::journal::{Absence, LibvirtOperation};
use std::io;

/// Journals whether libvirt's daemon is stopped.
///
/// # Errors
/// [`RebootError::Handover`]: the journal cannot be written, and the operation is as before.
pub(super) fn set_absence(handover: &mut Handover, absence: Absence) -> Result<(), RebootError> {
    let Some(libvirt) = &mut handover.journal.operation.libvirt else { return Ok(()) };
    let previous_absence = std::mem::replace(&mut libvirt.absence, absence);
    handover.write_journal().map_err(|error| {
        if let Some(libvirt) = &mut handover.journal.operation.libvirt {
            libvirt.absence = previous_absence;
        }
        error.into()
    })
}

/// Returns the part of the journal that concerns libvirt.
pub(super) fn operation(handover: &Handover) -> Result<&LibvirtOperation, RebootError> {
    let missing = || {
        let path = handover.rundir.file("operation.json");
        RebootError::File { path, source: io::Error::other("it has no record of libvirt") }
    };
    handover.journal.operation.libvirt.as_ref().ok_or_else(missing)
}
