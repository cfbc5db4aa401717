//! Starting a process in the surroundings of another one.
//!
//! The QEMU that replaces another one must be able to do exactly what that one could: it runs as the same user with
//! the same capabilities, in the same namespaces and cgroups, under the same limits and security label. Its *manager*
//! (libvirt, systemd, a script) has set these up for the first QEMU and is not involved in the replacement. So
//! [`ProcessEnvironment::of`] reads them from `/proc`, and [`ProcessEnvironment::spawn`] starts a program with them.
//!
//! Not reproduced: seccomp filters, which the kernel does not return (QEMU installs its own, by `-sandbox`); secure
//! bits, ignored signals and core scheduling cookies. What `/proc` shows but cannot be reproduced is an error.
//!
//! [`ThreadPlaces`] does the same for single threads, which exist only after the program has made them.

mod action;
mod cgroup;
mod credentials;
mod label;
mod limits;
mod location;
mod proc_file;
mod start;
mod threads;

pub use action::Step;
pub use credentials::{Capabilities, Credentials};
pub use label::SecurityLabel;
pub use start::Launch;
pub use threads::{RoleThread, ThreadPlaces, ThreadRole};

use crate::process::Process;
use cgroup::CgroupPlace;
use limits::Limits;
use location::Location;
use proc_file::ProcDirectory;
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use threads::Scheduling;

/// An error of reading or reproducing the surroundings of a process.
#[derive(Debug, thiserror::Error)]
pub enum EnvironmentError {
    /// A file of `/proc` cannot be read, or has an unknown format.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The process ended while it was inspected.
    #[error("process {pid} has ended")]
    Ended {
        /// Its number.
        pid: u32,
    },
    /// The process is in a namespace that only children of a process in it can join completely.
    #[error("process {pid} has a {kind} namespace of its own: run Rekindle inside that container")]
    OwnNamespace {
        /// Its number.
        pid: u32,
        /// `PID` or `user`.
        kind: &'static str,
    },
    /// Real, effective and saved ids differ.
    #[error("process {pid} runs with the ids of two users or groups (set-user-ID): restart it as a single user")]
    TwoUsers {
        /// Its number.
        pid: u32,
    },
    /// The program would have capabilities that the process has dropped.
    #[error(
        "process {pid} has dropped capabilities after its start, which a new process would have: limit them before \
         its start (CapabilityBoundingSet= in a systemd unit)"
    )]
    DroppedCapabilities {
        /// Its number.
        pid: u32,
    },
    /// The calling process may not have what the process has.
    #[error("Rekindle runs with {restriction}, which process {pid} is free of: run Rekindle as root without it")]
    Restricted {
        /// The number of the process.
        pid: u32,
        /// What restricts the caller.
        restriction: &'static str,
    },
    /// A cgroup cannot be reached through the mounted file systems.
    #[error(
        "cgroup {cgroup:?} of a process is removed or not visible from here: mount its hierarchy in /sys/fs/cgroup"
    )]
    UnreachableCgroup {
        /// The line of `/proc/PID/cgroup`.
        cgroup: String,
    },
    /// Two descriptors were to get the same number.
    #[error("descriptor {number} is given twice")]
    DuplicateDescriptor {
        /// The number.
        number: i32,
    },
    /// The new process could not be made to run the program.
    #[error("cannot start {} in the surroundings of process {pid}: {step}: {source}", program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// The process whose surroundings were read.
        pid: u32,
        /// The step that failed.
        step: Step,
        /// The cause.
        source: io::Error,
    },
    /// A thread cannot be placed.
    #[error("cannot place thread {thread} of process {pid} like the {role} of the process that it replaces: {source}")]
    Place {
        /// The process of the thread.
        pid: u32,
        /// The thread.
        thread: u32,
        /// What the thread does.
        role: ThreadRole,
        /// The cause.
        source: io::Error,
    },
    /// The source has no thread of that role.
    #[error("the process that is replaced has no {role}, which its replacement has")]
    UnknownRole {
        /// What the thread does.
        role: ThreadRole,
    },
}

/// Everything that a process has from its manager and not from its program.
#[derive(Debug)]
pub struct ProcessEnvironment {
    process: Process,
    /// User, groups and privileges.
    pub credentials: Credentials,
    /// The security label, if a security module is active.
    pub label: Option<SecurityLabel>,
    location: Location,
    /// The cgroups of which the calling process is no member.
    cgroups: Vec<CgroupPlace>,
    limits: Limits,
    scheduling: Scheduling,
    /// Environment variables, each as `NAME=VALUE`.
    pub variables: Vec<OsString>,
}

impl ProcessEnvironment {
    /// Reads the surroundings of a running process. The namespaces and directories of the result exist as long as the
    /// result.
    ///
    /// # Errors
    /// When the process has ended, when it has something that cannot be reproduced, or without the right to trace it.
    pub fn of(process: Process) -> Result<Self, EnvironmentError> {
        let source = ProcDirectory::of(process.pid);
        let this = ProcDirectory::this();
        let environment = Self {
            process,
            // First: capabilities have no common meaning in two user namespaces.
            location: Location::of(&source, &this)?,
            credentials: Credentials::of(&source, &this)?,
            label: SecurityLabel::of(&source)?,
            cgroups: cgroup::places_missing(&source, &this)?,
            limits: Limits::of(&source)?,
            scheduling: Scheduling::of(process.pid).map_err(|e| source.error("stat", e))?,
            variables: source.variables()?,
        };
        // Checked last: all of the above was read from this process, and not from a later one of the same number.
        if process.is_alive() { Ok(environment) } else { Err(EnvironmentError::Ended { pid: process.pid }) }
    }

    /// Starts a program with these surroundings, in a session of its own.
    ///
    /// The path is resolved inside the root directory and mount namespace of the process. Standard input is
    /// `/dev/null`, standard output and standard error are those of the caller, unless descriptors replace them; no
    /// other descriptors are inherited.
    ///
    /// # Errors
    /// [`EnvironmentError::Start`] names the step that failed. No process is left then.
    pub fn spawn(&self, launch: Launch<'_>) -> Result<Process, EnvironmentError> {
        start::start(self, launch)
    }
}

#[cfg(test)]
mod tests;
