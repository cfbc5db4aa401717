//! Checks whether the disks of a VM are unchanged since a boot snapshot (phase).
//!
//! A served disk is watched by its server ([`rekindle_disk::ledger`]). A disk that is only read is unchanged as long
//! as its file has not been written.

use crate::definition::Definition;
use crate::disks;
use crate::host::Host;
use crate::names::unique_name;
use crate::rundir::RunDir;
use rekindle_disk::control::{ControlCommand, ControlError};
use rekindle_disk::ledger::{Moment, StaleReason};
use rekindle_qemu::command::Hardware;
use rekindle_qemu::file_identity::FileIdentity;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::PathBuf;

/// File in the run directory. It exists while the guest is expected to become healthy.
const EXPECTED_FILE: &str = "phase.expected";
/// Operation of the process that saves a phase, as [`crate::lock::running_operation`] returns it.
pub const SAVING: &str = "saving a phase";

/// One disk at the moment of a boot snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskSnapshot {
    /// Id of the disk.
    pub id: String,
    /// The record with which a later change is detected.
    #[serde(flatten)]
    pub identity: DiskIdentity,
}

/// The record with which a later change of a disk is detected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskIdentity {
    /// A moment in the ledger of the disk's server.
    Moment(Moment),
    /// The identity of a file that is not written.
    File(FileIdentity),
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
    disks::ask(rundir, id, ask).map_err(|source| PhaseError::Server { id: id.into(), source })
}

/// Notifies the disk servers that a guest is about to boot, so that they record which blocks it touches. Without this
/// message a boot has no candidates.
///
/// *Needs:* no QEMU is connected to the servers.
pub fn begin_boot(rundir: &RunDir, hardware: &Hardware, definition: &Definition) {
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
        && let Err(e) = fs::write(rundir.file(EXPECTED_FILE), b"")
    {
        tracing::debug!("{EXPECTED_FILE}: {e}: no phase is kept of when it is healthy");
    }
}

/// Returns whether a phase was requested, and withdraws the request, so that after a kill no process waits for a
/// guest of unknown age.
#[must_use]
pub fn take_expected(rundir: &RunDir) -> bool {
    fs::remove_file(rundir.file(EXPECTED_FILE)).is_ok()
}

/// Records the disks of a stopped guest as they are now.
///
/// # Errors
/// [`PhaseError`], for the first disk whose writes are not recorded or whose server fails.
pub fn mark_disks(rundir: &RunDir, hardware: &Hardware) -> Result<Vec<DiskSnapshot>, PhaseError> {
    let marked = hardware.disks.iter().map(|disk| {
        let id = disk.id.clone();
        let identity = if disk.server {
            DiskIdentity::Moment(ask(rundir, &id, &ControlCommand::PhaseMark {})?)
        } else if disk.readonly && disk.format == "raw" {
            let failed = |source| PhaseError::Image { id: id.clone(), path: disk.path.clone(), source };
            DiskIdentity::File(FileIdentity::of(&disk.path).map_err(failed)?)
        } else {
            return Err(PhaseError::Unwatched { id });
        };
        Ok(DiskSnapshot { id, identity })
    });
    marked.collect()
}

/// Describes why a guest of the moment of `snapshot` may not continue with the present disks; `None` if it may.
#[must_use]
pub fn why_stale(rundir: &RunDir, hardware: &Hardware, snapshot: &[DiskSnapshot]) -> Option<String> {
    let ids_then: BTreeSet<_> = snapshot.iter().map(|disk| &disk.id).collect();
    let ids_now: BTreeSet<_> = hardware.disks.iter().map(|disk| &disk.id).collect();
    if ids_then != ids_now {
        return Some("it has other disks now".into());
    }
    snapshot.iter().find_map(|disk| {
        let why = match &disk.identity {
            DiskIdentity::Moment(moment) => {
                match ask::<Option<StaleReason>>(rundir, &disk.id, &ControlCommand::PhaseCheck { moment: *moment }) {
                    Ok(stale) => stale?.to_string(),
                    Err(e) => format!("its server does not report what was written: {e}"),
                }
            }
            DiskIdentity::File(mark) if mark.is_unchanged() => return None,
            DiskIdentity::File(mark) => format!("{} has changed since", mark.path.display()),
        };
        Some(format!("disk {}: {why}", disk.id))
    })
}

/// Notifies the disk servers that the next guest continues from the moment of `snapshot`, and that its memory is loaded
/// while it runs.
///
/// *Needs:* no QEMU is connected to the servers.
///
/// # Errors
/// The reason why the guest may not continue with the present disks.
pub fn continue_from(rundir: &RunDir, hardware: &Hardware, snapshot: &[DiskSnapshot]) -> Result<(), String> {
    if let Some(why) = why_stale(rundir, hardware, snapshot) {
        return Err(why);
    }
    snapshot.iter().try_for_each(|disk| {
        let DiskIdentity::Moment(moment) = &disk.identity else { return Ok(()) };
        match ask::<Option<StaleReason>>(rundir, &disk.id, &ControlCommand::PhaseResume { moment: *moment }) {
            Ok(None) => Ok(()),
            Ok(Some(stale)) => Err(format!("disk {}: {stale}", disk.id)),
            Err(e) => Err(e.to_string()),
        }
    })
}
