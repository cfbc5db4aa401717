//! Proof that a guest is stopped.
//!
//! QEMU also writes guest RAM while the guest does not run. A disk request that was started earlier completes
//! whenever the disk is ready, and a page that was pinned for it (`O_DIRECT`) is written regardless of any later
//! write protection. When QEMU stops a guest, it first waits for all such requests. Therefore code that must see
//! every write requires a [`Stopped`].

use crate::guest;
use crate::piped_save::HeldSave;
use crate::qmp::{Qmp, QmpError};
use serde::Deserialize;

/// Why a guest does not count as stopped.
#[derive(Debug, thiserror::Error)]
pub enum NotStopped {
    #[error("the guest is not stopped but in run state `{state}`; send QMP `stop` first")]
    Runs { state: String },
    /// QEMU does not answer.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

/// Proof that the guest is stopped and its I/O has ended, for as long as this value exists: it holds the connection
/// over which the guest would be resumed.
///
/// No other client may resume the guest in the meantime (over a second monitor).
#[derive(Debug)]
pub struct Stopped<'q> {
    qmp: Option<&'q mut Qmp>,
}

/// Run states that QEMU enters through `vm_stop`, which waits for I/O, or in which no I/O has started yet.
const STOPPED_STATES: [&str; 10] = [
    "paused",
    "prelaunch",
    "postmigrate",
    "finish-migrate",
    "save-vm",
    "io-error",
    "internal-error",
    "guest-panicked",
    "shutdown",
    "watchdog",
];

impl<'q> Stopped<'q> {
    /// Asks QEMU whether its guest is stopped.
    ///
    /// # Errors
    /// [`NotStopped::Runs`], also during an incoming migration or if the guest sleeps (`suspended`).
    pub fn check(qmp: &'q mut Qmp) -> Result<Self, NotStopped> {
        #[derive(Deserialize)]
        struct Status {
            status: String,
            running: bool,
        }
        let Status { status, running } = qmp.execute("query-status", ())?;
        if running || !STOPPED_STATES.contains(&status.as_str()) {
            return Err(NotStopped::Runs { state: status });
        }
        Ok(Self { qmp: Some(qmp) })
    }

    /// Stops a running guest by the command that [`guest::stage_stop`] has staged on `qmp`. QEMU answers when the
    /// guest's I/O has ended.
    ///
    /// Also returns when the guest was stopped, in µs of the host's clock since 1970.
    ///
    /// # Errors
    /// When QEMU has ended, or rejects the command.
    pub fn by_stopping(qmp: &'q mut Qmp) -> Result<(Self, u64), QmpError> {
        let stopped_host_us = guest::stop_staged(qmp)?;
        Ok((Self { qmp: Some(qmp) }, stopped_host_us))
    }

    /// The guest of a save that waits. QEMU answers no command meanwhile.
    pub fn by_held_save(_save: &'q HeldSave) -> Self {
        Self { qmp: None }
    }

    /// Makes a proof without a QEMU: the caller guarantees that nothing writes the memory, which is not a QEMU's.
    pub fn vouched() -> Stopped<'static> {
        Stopped { qmp: None }
    }

    /// Returns the connection, for commands that do not resume the guest; none if QEMU answers no commands.
    pub fn qmp(&mut self) -> Option<&mut Qmp> {
        self.qmp.as_deref_mut()
    }
}
