//! Starts libvirt's daemon again at the end of an operation, however it ends: without the daemon, no domain of the host
//! can be managed.

use super::daemon;
use crate::deferred_signals::DeferredSignals;
use rekindle_libvirt::daemon::DaemonError;
use rekindle_vm::causes::with_causes;
use rekindle_vm::journal::{Absence, DaemonRecord, LibvirtOperation};
use std::time::{Duration, Instant};

/// Starts the daemon when it is dropped, if the operation has stopped it.
#[derive(Debug, Default)]
pub(super) struct DaemonGuard(Option<StoppedDaemon>);

#[derive(Debug)]
struct StoppedDaemon {
    record: DaemonRecord,
    since: Instant,
    /// Dropped after the daemon has been started.
    _signals: DeferredSignals,
}

impl DaemonGuard {
    /// Returns the guard of interrupted operations.
    pub(super) fn of_interrupted<'a>(operations: impl Iterator<Item = &'a LibvirtOperation>) -> Self {
        let mut guard = Self::default();
        // The newest daemon is the one that the last of them has stopped.
        let stopped = operations.filter(|libvirt| libvirt.absence != Absence::Present);
        if let Some(libvirt) = stopped.max_by_key(|libvirt| libvirt.daemon.started) {
            guard.arm(&libvirt.daemon);
        }
        guard
    }

    /// Stops the daemon.
    ///
    /// # Errors
    /// As for [`daemon::stop`].
    pub(super) fn stop(&mut self, record: &DaemonRecord) -> Result<(), DaemonError> {
        self.arm(record);
        daemon::stop(record)
    }

    /// Starts the daemon if it was stopped, before this is dropped. Returns how long it was away; `None` if it
    /// was not stopped.
    ///
    /// # Errors
    /// As for [`daemon::start_if_absent`].
    pub(super) fn start(&self) -> Result<Option<Duration>, DaemonError> {
        let Some(stopped) = &self.0 else { return Ok(None) };
        daemon::start_if_absent(&stopped.record)?;
        Ok(Some(stopped.since.elapsed()))
    }

    fn arm(&mut self, record: &DaemonRecord) {
        let (record, since) = (record.clone(), Instant::now());
        self.0 = Some(StoppedDaemon { record, since, _signals: DeferredSignals::begin() });
    }
}

impl Drop for StoppedDaemon {
    fn drop(&mut self) {
        if let Err(error) = daemon::start_if_absent(&self.record) {
            tracing::error!("{}", with_causes(&error));
        }
    }
}
