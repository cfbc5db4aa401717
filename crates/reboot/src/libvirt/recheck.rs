//! Checks that libvirt's record of a domain is still as the preflight has found it, when the daemon has been stopped.

use super::status_file::{DomainRecord, StatusFile};
use crate::error::RebootError;
use crate::unprepared::recheck::Baseline;
use rekindle_vm::journal::LibvirtOperation;

/// Rejects a domain that has another QEMU, other devices or a job now.
///
/// *Needs:* libvirt's daemon is stopped.
pub(super) fn check_record(
    before: &DomainRecord,
    baseline: &Baseline,
    libvirt: &LibvirtOperation,
) -> Result<(), RebootError> {
    let record = StatusFile::read(&libvirt.status_file)?.parse()?;
    if (record.pid, &record.devices) != (before.pid, &before.devices) {
        return Err(baseline.changed("it has other devices"));
    }
    if record.job.is_some() || record.state != "running" {
        return Err(baseline.changed("libvirt has started a job with it"));
    }
    Ok(())
}
