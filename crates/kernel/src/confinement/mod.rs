//! The confinement of a process that reads what a guest, a QEMU or a store sends: an attacker that takes control of it
//! gets only what its work needs.
//!
//! | part | what it removes |
//! |---|---|
//! | [`files`] | files, TCP ports, signals to other processes, tracing of other processes (Landlock) |
//! | [`capabilities`] | what root may do in addition to other users |
//! | [`system_calls`] | system calls; another one kills the process (seccomp) |
//! | [`broker`] | nothing: a few fixed operations that the process still needs, in a child process outside of the confinement |
//!
//! Landlock and capabilities belong to a thread, and a new thread inherits them. So a process enters its confinement
//! before it starts its threads; [`Confinement::enter`] checks this.

pub mod broker;
mod capabilities;
mod files;
pub mod status;
mod system_calls;
#[cfg(test)]
mod tests;

pub use capabilities::{CapabilitySet, capabilities_for};
pub use files::{Access, Grant, Support, support};
pub use system_calls::Calls;

use crate::userfault::remote::DEVICE;
use std::fs;
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Why a process cannot be confined.
#[derive(Debug, thiserror::Error)]
pub enum ConfinementError {
    /// Other threads would not be confined.
    #[error("cannot confine this process: it already has {count} threads, and only one thread can be confined")]
    Threads {
        /// Number of threads.
        count: usize,
    },
    /// A system call failed.
    #[error("cannot confine this process: {doing}")]
    Io {
        /// The step that failed.
        doing: &'static str,
        /// Its error.
        #[source]
        source: io::Error,
    },
    /// Landlock has rejected the rules.
    #[error("cannot restrict the files of this process (Landlock)")]
    Files(#[from] landlock::RulesetError),
    /// The filter is not valid.
    #[error("cannot make the system call filter of this process (seccomp)")]
    Filter(#[from] seccompiler::BackendError),
    /// The kernel has rejected the filter.
    #[error("cannot install the system call filter of this process (seccomp)")]
    Install(#[from] seccompiler::Error),
}

/// What a process still may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Confinement {
    /// The paths that it may open.
    pub files: Vec<Grant>,
    /// The system calls that it may make in addition to those of each process.
    pub calls: Calls,
    /// The user that it becomes, which must have access to the files. `None`: it stays the user that has started it.
    pub user: Option<u32>,
}

impl Confinement {
    /// Confines this process for the rest of its life. Its files must be open, except the granted ones.
    ///
    /// *On success:* the limits that this kernel supports are in force; a missing one is logged.
    /// *On failure:* the process may be confined in part, and must end.
    ///
    /// # Errors
    /// [`ConfinementError`].
    pub fn enter(&self) -> Result<(), ConfinementError> {
        check_single_thread()?;
        let mut kept = if self.user.is_some() { CapabilitySet::empty() } else { capabilities_for(&self.files) };
        if !kept.is_empty() {
            tracing::warn!("keeps {kept:?}: a file that it uses belongs to another user; chown the files to remove it");
        }
        if self.calls.contains(Calls::USERFAULTFD) && needs_privilege_for_userfaultfd() {
            tracing::warn!("keeps SYS_PTRACE: this kernel has no /dev/userfaultfd (Linux 6.1)");
            kept |= CapabilitySet::SYS_PTRACE;
        }
        files::restrict(self)?;
        capabilities::reduce_to(kept, self.user)
            .map_err(|source| ConfinementError::Io { doing: "dropping its capabilities", source })?;
        system_calls::install(self.calls)
    }
}

/// Returns whether root can wait for missing pages only by a system call that needs a capability.
#[must_use]
pub fn needs_privilege_for_userfaultfd() -> bool {
    let is_unprivileged =
        || fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|text| text.trim() == "1");
    !Path::new(DEVICE).exists() && !is_unprivileged()
}

/// Rejects a process with more than one thread.
fn check_single_thread() -> Result<(), ConfinementError> {
    /// How long the kernel may take to remove a thread that has ended.
    const END_TIMEOUT: Duration = Duration::from_millis(100);
    let failed = |source| ConfinementError::Io { doing: "counting its threads", source };
    let started = Instant::now();
    loop {
        match fs::read_dir("/proc/self/task").map_err(failed)?.count() {
            1 => return Ok(()),
            count if started.elapsed() > END_TIMEOUT => return Err(ConfinementError::Threads { count }),
            _ => thread::sleep(Duration::from_millis(1)),
        }
    }
}
