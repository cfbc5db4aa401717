//! Why a host could not be rebooted, or guests not be suspended.

use crate::vmm::{Problem, RebootError};
use std::io;
use std::path::PathBuf;

/// Why a host could not be rebooted, or guests not be suspended. Unless it says otherwise, all guests run as before.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// Something speaks against it; nothing was stopped.
    #[error("nothing was stopped; these VMs speak against it:\n{}", by_vm(.0))]
    Preflight(Vec<(String, Vec<Problem>)>),
    /// Guests could not be suspended; all go on.
    #[error("no guest was suspended, and all go on; these could not be:\n{}", failures(.0))]
    Suspend(Vec<(String, RebootError)>),
    /// A guest of an earlier time is still suspended.
    #[error(
        "still suspended: {}; first let them go on (rekindle host resume), or give them up (rekindle stop NAME)",
        .0.join(", ")
    )]
    StillSuspended(Vec<String>),
    /// The record of suspended guests cannot be written or read.
    #[error("the record of suspended guests: {}", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// All are suspended, and their QEMUs ought to end.
    #[error("all guests are suspended, but not all of their QEMUs have ended:\n{}", failures(.0))]
    Ending(Vec<(String, RebootError)>),
    /// No kernel to go on with.
    #[error("{0}")]
    Kernel(String),
    /// The kernel cannot be loaded.
    #[error("the next kernel cannot be loaded, and guests go on as if nothing had been")]
    Load(#[source] io::Error),
    /// systemd does not do it.
    #[error("`{command}`: {said}")]
    Command {
        /// What was run.
        command: String,
        /// Its words.
        said: String,
    },
    /// A file.
    #[error("{}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// This host is not set up for it.
    #[error("{0}")]
    Setup(String),
}

fn by_vm(all: &[(String, Vec<Problem>)]) -> String {
    let lines =
        all.iter().flat_map(|(name, problems)| problems.iter().map(move |problem| format!("  - {name}: {problem}")));
    lines.collect::<Vec<_>>().join("\n")
}

fn failures(all: &[(String, RebootError)]) -> String {
    let lines = all.iter().map(|(name, error)| {
        let mut text = format!("  - {name}: {error}");
        let mut cause = std::error::Error::source(error);
        while let Some(error) = cause {
            let more = error.to_string();
            if !text.ends_with(&more) {
                text += &format!("\n    because: {more}");
            }
            cause = error.source();
        }
        text
    });
    lines.collect::<Vec<_>>().join("\n")
}
