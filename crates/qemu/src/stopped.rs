//! Proof that a guest is stopped.
//!
//! QEMU writes guest RAM not only when the guest runs: a disk request that was started earlier completes whenever the
//! disk is ready, and a page that was pinned for it (`O_DIRECT`) is written past every protection that came later.
//! When QEMU stops a guest it first waits for all of them. So what must see every write asks for a [`Stopped`].

use crate::guest;
use crate::qmp::{Qmp, QmpError};
use serde::Deserialize;

/// Why a guest does not count as stopped.
#[derive(Debug, thiserror::Error)]
pub enum NotStopped {
    /// It runs, or may at any moment.
    #[error("the guest is not stopped but in run state `{state}`; send QMP `stop` first")]
    Runs {
        /// QEMU's run state.
        state: String,
    },
    /// QEMU does not answer.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

/// The guest is stopped and its I/O has ended, for as long as this lives: it holds the connection over which the guest
/// would be resumed.
///
/// No other client may resume the guest meanwhile (over a second monitor).
#[derive(Debug)]
pub struct Stopped<'q> {
    qmp: Option<&'q mut Qmp>,
}

/// Run states that are reached through QEMU's `vm_stop`, which waits for I/O, or in which no I/O has started yet.
const STOPPED: [&str; 10] = [
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
    /// [`NotStopped::Runs`], also while a state is coming in or the guest sleeps (`suspended`).
    pub fn check(qmp: &'q mut Qmp) -> Result<Self, NotStopped> {
        #[derive(Deserialize)]
        struct Status {
            status: String,
            running: bool,
        }
        let Status { status, running } = qmp.execute("query-status", ())?;
        if running || !STOPPED.contains(&status.as_str()) {
            return Err(NotStopped::Runs { state: status });
        }
        Ok(Self { qmp: Some(qmp) })
    }

    /// Stops a guest that runs, by the command that [`guest::stage_stop`] has staged on `qmp`. QEMU answers when its
    /// I/O has ended.
    ///
    /// Also gives when it was stopped: microseconds of the host's clock since 1970.
    ///
    /// # Errors
    /// When QEMU has gone, or refuses.
    pub fn by_stopping(qmp: &'q mut Qmp) -> Result<(Self, u64), QmpError> {
        let stopped_host_us = guest::stop_staged(qmp)?;
        Ok((Self { qmp: Some(qmp) }, stopped_host_us))
    }

    /// The caller vouches that nothing writes the memory in question: for memory that is not a QEMU's.
    #[must_use]
    pub fn vouched() -> Stopped<'static> {
        Stopped { qmp: None }
    }

    /// The connection, for commands that do not resume the guest.
    pub fn qmp(&mut self) -> Option<&mut Qmp> {
        self.qmp.as_deref_mut()
    }
}
