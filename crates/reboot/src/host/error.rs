//! Errors of rebooting the host, and of suspending and resuming its guests.

use crate::error::{Problem, RebootError};
use std::io;
use std::path::PathBuf;

/// An error of rebooting the host, or of suspending or resuming its guests. Unless a variant states otherwise, all
/// guests run as before.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The preflight found problems. Nothing was stopped.
    #[error("host not rebooted, nothing was stopped; these VMs prevent it:\n{}", by_vm(.0))]
    Preflight(Vec<(String, Vec<Problem>)>),
    /// Guests could not be suspended; all continue to run.
    #[error("no guest was suspended, and all guests still run; these could not be suspended:\n{}", failures(.0))]
    Suspend(Vec<(String, RebootError)>),
    /// Guests of an earlier suspend are still suspended.
    #[error(
        "these guests are still suspended: {}; resume them (rekindle host resume), or discard them (rekindle stop \
         NAME)",
        .0.join(", ")
    )]
    StillSuspended(Vec<String>),
    /// The record of suspended guests cannot be written or read.
    #[error("cannot access the record of suspended guests: {}", path.display())]
    Record {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// All guests are suspended, but not all of their QEMUs have ended.
    #[error("all guests are suspended, but not all of their QEMUs have ended:\n{}", failures(.0))]
    Ending(Vec<(String, RebootError)>),
    /// No kernel to boot was found.
    #[error("{0}")]
    Kernel(String),
    #[error("cannot load the next kernel; all guests run as before")]
    Load(#[source] io::Error),
    /// A command failed.
    #[error("`{command}`: {output}")]
    Command {
        command: String,
        /// Standard error of the command.
        output: String,
    },
    #[error("{}", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// This host is not set up for reboots under its guests.
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
