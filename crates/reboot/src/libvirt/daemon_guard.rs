//! Starts libvirt's daemon again at the end of an operation, however it ends: without the daemon, no domain of the host
//! can be managed.

use super::daemon;
use crate::error::{RebootError, with_causes};
use rekindle_vm::journal::{Absence, DaemonRecord, LibvirtOperation};

/// Starts the daemon when it is dropped, if the operation has stopped it.
#[derive(Debug, Default)]
pub(super) struct DaemonGuard {
    /// `Some` once the operation has begun to stop the daemon.
    stopped: Option<DaemonRecord>,
}

impl DaemonGuard {
    /// Returns the guard of an interrupted operation.
    pub(super) fn of_interrupted(libvirt: &LibvirtOperation) -> Self {
        let is_stopped = libvirt.absence != Absence::Present;
        Self { stopped: is_stopped.then(|| libvirt.daemon.clone()) }
    }

    /// Stops the daemon.
    ///
    /// # Errors
    /// As for [`daemon::stop`].
    pub(super) fn stop(&mut self, record: &DaemonRecord) -> Result<(), RebootError> {
        self.stopped = Some(record.clone());
        Ok(daemon::stop(record)?)
    }
}

impl Drop for DaemonGuard {
    fn drop(&mut self) {
        if let Some(record) = &self.stopped
            && let Err(error) = daemon::start_if_absent(record)
        {
            tracing::error!("{}", with_causes(&error));
        }
    }
}
