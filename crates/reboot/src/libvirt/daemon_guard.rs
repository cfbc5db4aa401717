//! Starts libvirt's daemon again at the end of an operation, however it ends: without the daemon, no domain of the host
//! can be managed.

use super::daemon;
use super::deferred_signals::DeferredSignals;
use crate::error::{RebootError, with_causes};
use rekindle_vm::journal::{Absence, DaemonRecord, LibvirtOperation};

/// Starts the daemon when it is dropped, if the operation has stopped it.
#[derive(Debug, Default)]
pub(super) struct DaemonGuard(Option<StoppedDaemon>);

#[derive(Debug)]
struct StoppedDaemon {
    record: DaemonRecord,
    /// Dropped after the daemon has been started.
    _signals: DeferredSignals,
}

impl DaemonGuard {
    /// Returns the guard of an interrupted operation.
    pub(super) fn of_interrupted(libvirt: &LibvirtOperation) -> Self {
        let mut guard = Self::default();
        if libvirt.absence != Absence::Present {
            guard.arm(&libvirt.daemon);
        }
        guard
    }

    /// Stops the daemon.
    ///
    /// # Errors
    /// As for [`daemon::stop`].
    pub(super) fn stop(&mut self, record: &DaemonRecord) -> Result<(), RebootError> {
        self.arm(record);
        Ok(daemon::stop(record)?)
    }

    fn arm(&mut self, record: &DaemonRecord) {
        self.0 = Some(StoppedDaemon { record: record.clone(), _signals: DeferredSignals::begin() });
    }
}

impl Drop for StoppedDaemon {
    fn drop(&mut self) {
        if let Err(error) = daemon::start_if_absent(&self.record) {
            tracing::error!("{}", with_causes(&error));
        }
    }
}
