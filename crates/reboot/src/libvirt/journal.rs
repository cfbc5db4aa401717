//! The part of the journal that concerns libvirt.

use crate::error::RebootError;
use rekindle_handover::Handover;
use rekindle_vm::journal::{Absence, LibvirtOperation};
use std::io;

/// Journals whether libvirt's daemon is stopped.
pub(super) fn set_absence(handover: &mut Handover, absence: Absence) -> Result<(), RebootError> {
    if let Some(libvirt) = &mut handover.journal.operation.libvirt {
        libvirt.absence = absence;
    }
    Ok(handover.write_journal()?)
}

/// Returns the part of the journal that concerns libvirt.
pub(super) fn operation(handover: &Handover) -> Result<&LibvirtOperation, RebootError> {
    let missing = || {
        let path = handover.rundir.file("operation.json");
        RebootError::File { path, source: io::Error::other("it has no record of libvirt") }
    };
    handover.journal.operation.libvirt.as_ref().ok_or_else(missing)
}
