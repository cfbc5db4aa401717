//! Errors of rebooting the host, and of suspending and resuming its guests.

use crate::error::{Problem, RebootError};
use std::io;
use std::path::{Path, PathBuf};

/// A VM that prevents a reboot of the host, with all reasons.
#[derive(Debug)]
pub struct PreventingVm {
    pub name: String,
    pub problems: Vec<Problem>,
}

/// A VM for which a step of a suspend has failed.
#[derive(Debug)]
pub struct FailedVm {
    pub name: String,
    pub error: RebootError,
}

/// An error of rebooting the host, or of suspending or resuming its guests. Unless a variant states otherwise, all
/// guests run as before.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The preflight found problems. Nothing was stopped.
    #[error("host not rebooted, nothing was stopped; these VMs prevent it:\n{}", list_problems(.0))]
    Preflight(Vec<PreventingVm>),
    /// Guests could not be suspended; all continue to run.
    #[error("no guest was suspended, and all guests still run; these could not be suspended:\n{}", list_failures(.0))]
    Suspend(Vec<FailedVm>),
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
    #[error("all guests are suspended, but not all of their QEMUs have ended:\n{}", list_failures(.0))]
    Ending(Vec<FailedVm>),
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

impl HostError {
    /// Returns a function that adds the path of a file to an I/O error.
    pub(super) fn file(path: &Path) -> impl Fn(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::File { path: path.clone(), source }
    }

    /// Returns a function that adds the path of a file of the record of suspended guests to an I/O error.
    pub(super) fn record(path: &Path) -> impl Fn(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Record { path: path.clone(), source }
    }
}

fn list_problems(vms: &[PreventingVm]) -> String {
    let mut lines = Vec::new();
    for PreventingVm { name, problems } in vms {
        lines.extend(problems.iter().map(|problem| format!("  - {name}: {problem}")));
    }
    lines.join("\n")
}

/// Formats a line for each VM's error, and a line for each cause of it.
fn list_failures(vms: &[FailedVm]) -> String {
    let mut lines = Vec::new();
    for FailedVm { name, error } in vms {
        let mut text = format!("  - {name}: {error}");
        let mut cause = std::error::Error::source(error);
        while let Some(error) = cause {
            let cause_text = error.to_string();
            if !text.ends_with(&cause_text) {
                text += &format!("\n    because: {cause_text}");
            }
            cause = error.source();
        }
        lines.push(text);
    }
    lines.join("\n")
}
