//! Checks whether the disks of a VM are unchanged since a boot snapshot (phase).
//!
//! A served disk is watched by its server ([`rekindle_disk::ledger`]). A disk that is only read is unchanged as long
//! as its file has not been written.

use crate::definition::Definition;
use crate::disks;
use crate::host::Host;
use crate::names::unique_name;
use crate::rundir::RunDir;
use rekindle_disk::control::{Control, ControlCommand, ControlError};
use rekindle_disk::ledger::{Moment, StaleReason};
use rekindle_qemu::command::Hardware;
use rekindle_qemu::mark::Mark;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::PathBuf;

/// File in the run directory. It exists while the guest is expected to become healthy.
const EXPECTED: &str = "phase.expected";
/// Operation of the process that saves a phase, as [`crate::lock::holder`] returns it.
pub const SAVING: &str = "saving a phase";

/// One disk at the moment of a boot snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskThen {
    /// Id of the disk.
    pub id: String,
    /// The record with which a later change is detected.
    #[serde(flatten)]
    pub known: Known,
}

/// The record with which a later change of a disk is detected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Known {
    /// A moment in the ledger of the disk's server.
    Moment(Moment),
    /// The identity of a file that is not written.
    File(Mark),
}

/// Why a disk cannot be part of a boot snapshot.
#[derive(Debug, thiserror::Error)]
pub enum PhaseError {
    /// The disk's server returns an error or does not answer.
    #[error("disk {id}")]
    Server {
        /// Id of the disk.
        id: String,
        /// The server's answer, or the error of the connection.
        #[source]
        source: ControlError,
    },
    /// The disk's image cannot be inspected.
    #[error("disk {id}: {}", path.display())]
    Image {
        /// Id of the disk.
        id: String,
        /// Path of the image.
        path: PathBuf,
        /// The error of `stat(2)`.
        #[source]
        source: io::Error,
    },
    /// No process records the disk's writes.
    #[error("disk {id}: its writes are not recorded; let Rekindle serve it, or make it a raw image that is `readonly`")]
    Unwatched {
        /// Id of the disk.
        id: String,
    },
}

/// Returns the directory of a VM's candidates. It is next to the files of saved reboots.
#[must_use]
pub fn directory(host: &Host, rundir: &RunDir, definition: &Definition) -> PathBuf {
    let directory = definition.save_dir.as_ref().unwrap_or(&host.save_dir);
    directory.join(format!("{}.phase", unique_name(rundir)))
}

fn ask<T: serde::de::DeserializeOwned>(rundir: &RunDir, id: &str, ask: &ControlCommand) -> Result<T, PhaseError> {
    let asked = Control::connect(&disks::control(rundir, id)).and_then(|mut control| control.ask(ask));
    asked.map_err(|source| PhaseError::Server { id: id.into(), source })
}

/// Notifies the disk servers that a guest is about to boot, so that they record which blocks it touches. Without this
/// message a boot has no candidates.
///
/// *Needs:* no QEMU is connected to the servers.
pub fn begin(rundir: &RunDir, hardware: &Hardware, definition: &Definition) {
    expect_healthy(rundir, definition);
    for disk in disks::served(hardware).filter(|_| hardware.phase) {
        if let Err(e) = ask::<()>(rundir, &disk.id, &ControlCommand::PhaseBegin {}) {
            tracing::debug!("{e}: no phase of this boot can be kept");
        }
    }
}

/// Requests that a phase is saved, once, when the guest that boots now is healthy. Called at each boot, and when a
/// guest continues from an earlier phase. It is not called for a guest that has been up for a long time, whose memory
/// holds more than its boot has put into it.
pub fn expect_healthy(rundir: &RunDir, definition: &Definition) {
    if definition.phase.healthy.is_some()
        && let Err(e) = fs::write(rundir.file(EXPECTED), b"")
    {
        tracing::debug!("{EXPECTED}: {e}: no phase is kept of when it is healthy");
    }
}

/// Returns whether a phase was requested, and withdraws the request, so that after a kill no process waits for a
/// guest of unknown age.
#[must_use]
pub fn take_expected(rundir: &RunDir) -> bool {
    fs::remove_file(rundir.file(EXPECTED)).is_ok()
}

/// Records the disks of a stopped guest as they are now.
///
/// # Errors
/// [`PhaseError`], for the first disk whose writes are not recorded or whose server fails.
pub fn mark(rundir: &RunDir, hardware: &Hardware) -> Result<Vec<DiskThen>, PhaseError> {
    let marked = hardware.disks.iter().map(|disk| {
        let id = disk.id.clone();
        let known = if disk.server {
            Known::Moment(ask(rundir, &id, &ControlCommand::PhaseMark {})?)
        } else if disk.readonly && disk.format == "raw" {
            let failed = |source| PhaseError::Image { id: id.clone(), path: disk.path.clone(), source };
            Known::File(Mark::of(&disk.path).map_err(failed)?)
        } else {
            return Err(PhaseError::Unwatched { id });
        };
        Ok(DiskThen { id, known })
    });
    marked.collect()
}

/// Describes why a guest of the moment `then` may not continue with the present disks; `None` if it may.
#[must_use]
pub fn check(rundir: &RunDir, hardware: &Hardware, then: &[DiskThen]) -> Option<String> {
    let named = |disks: &mut dyn Iterator<Item = &String>| {
        let mut all: Vec<_> = disks.cloned().collect();
        all.sort();
        all
    };
    if named(&mut then.iter().map(|disk| &disk.id)) != named(&mut hardware.disks.iter().map(|disk| &disk.id)) {
        return Some("it has other disks now".into());
    }
    then.iter().find_map(|disk| {
        let void = match &disk.known {
            Known::Moment(moment) => {
                match ask::<Option<StaleReason>>(rundir, &disk.id, &ControlCommand::PhaseCheck { moment: *moment }) {
                    Ok(void) => void.map(|void| void.to_string()),
                    Err(e) => Some(format!("its server does not report what was written: {e}")),
                }
            }
            Known::File(mark) => (!mark.holds()).then(|| format!("{} has changed since", mark.path.display())),
        };
        void.map(|why| format!("disk {}: {why}", disk.id))
    })
}

/// Notifies the disk servers that the next guest continues from the moment `then`, and that its memory is loaded
/// while it runs.
///
/// *Needs:* no QEMU is connected to the servers.
///
/// # Errors
/// The reason why the guest may not continue with the present disks.
pub fn continue_from(rundir: &RunDir, hardware: &Hardware, then: &[DiskThen]) -> Result<(), String> {
    if let Some(why) = check(rundir, hardware, then) {
        return Err(why);
    }
    then.iter().try_for_each(|disk| {
        let Known::Moment(moment) = &disk.known else { return Ok(()) };
        match ask::<Option<StaleReason>>(rundir, &disk.id, &ControlCommand::PhaseResume { moment: *moment }) {
            Ok(None) => Ok(()),
            Ok(Some(void)) => Err(format!("disk {}: {void}", disk.id)),
            Err(e) => Err(e.to_string()),
        }
    })
}
