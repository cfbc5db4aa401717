//! The disks of a VM whose boot's phases are kept: whether they are still what the guest of a phase knew.
//!
//! A disk that has a server is watched by it ([`rekindle_disk::ledger`]); of one that is only read, the file is the
//! same as long as it has not been written.

use crate::definition::Definition;
use crate::disks;
use crate::host::Host;
use crate::names::unique_name;
use crate::rundir::RunDir;
use rekindle_disk::control::{Ask, Control, ControlError};
use rekindle_disk::ledger::{Moment, StaleReason};
use rekindle_qemu::command::Hardware;
use rekindle_qemu::mark::Mark;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::PathBuf;

/// A file of the run directory that exists while the guest is expected to become healthy.
const EXPECTED: &str = "phase.expected";
/// The operation of the process that saves a phase, as [`crate::lock::holder`] returns it.
pub const SAVING: &str = "saving a phase";

/// One disk at the moment of a candidate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskThen {
    /// Its id.
    pub id: String,
    /// How it is known again.
    #[serde(flatten)]
    pub known: Known,
}

/// How a disk is known again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Known {
    /// By its server.
    Moment(Moment),
    /// As a file that is not written.
    File(Mark),
}

/// Why nothing is known of a disk.
#[derive(Debug, thiserror::Error)]
pub enum PhaseError {
    /// Its server.
    #[error("disk {id}")]
    Server {
        /// The disk.
        id: String,
        /// Why.
        #[source]
        source: ControlError,
    },
    /// Its image.
    #[error("disk {id}: {}", path.display())]
    Image {
        /// The disk.
        id: String,
        /// The image.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Its writes are not recorded.
    #[error("disk {id}: its writes are not recorded; let Rekindle serve it, or make it a raw image that is `readonly`")]
    Unwatched {
        /// The disk.
        id: String,
    },
}

/// Where the candidates of a VM are: next to what a saved reboot writes.
#[must_use]
pub fn directory(host: &Host, rundir: &RunDir, definition: &Definition) -> PathBuf {
    let directory = definition.save_dir.as_ref().unwrap_or(&host.save_dir);
    directory.join(format!("{}.phase", unique_name(rundir)))
}

fn ask<T: serde::de::DeserializeOwned>(rundir: &RunDir, id: &str, ask: &Ask) -> Result<T, PhaseError> {
    let asked = Control::connect(&disks::control(rundir, id)).and_then(|mut control| control.ask(ask));
    asked.map_err(|source| PhaseError::Server { id: id.into(), source })
}

/// A guest is about to boot: its disks' servers note what it touches. One that does not get this has no candidates.
///
/// *Needs:* that no QEMU is connected.
pub fn begin(rundir: &RunDir, hardware: &Hardware, definition: &Definition) {
    expect_healthy(rundir, definition);
    for disk in disks::served(hardware).filter(|_| hardware.phase) {
        if let Err(e) = ask::<()>(rundir, &disk.id, &Ask::PhaseBegin {}) {
            tracing::debug!("{e}: no phase of this boot can be kept");
        }
    }
}

/// Requests that a phase is saved, once, when the guest that boots now is healthy. Done at each boot, and when a
/// guest continues from an earlier phase; not for one that has been up for long, which has more in its memory than
/// its boot has put there.
pub fn expect_healthy(rundir: &RunDir, definition: &Definition) {
    if definition.phase.healthy.is_some()
        && let Err(e) = fs::write(rundir.file(EXPECTED), b"")
    {
        tracing::debug!("{EXPECTED}: {e}: no phase is kept of when it is healthy");
    }
}

/// Returns whether that was requested, and withdraws the request, so that after a kill no process waits for a guest
/// of unknown age.
#[must_use]
pub fn take_expected(rundir: &RunDir) -> bool {
    fs::remove_file(rundir.file(EXPECTED)).is_ok()
}

/// The guest is stopped: its disks as they are now.
///
/// # Errors
/// [`PhaseError`].
pub fn mark(rundir: &RunDir, hardware: &Hardware) -> Result<Vec<DiskThen>, PhaseError> {
    let marked = hardware.disks.iter().map(|disk| {
        let id = disk.id.clone();
        let known = if disk.server {
            Known::Moment(ask(rundir, &id, &Ask::PhaseMark {})?)
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

/// Describes why a guest of that moment may not continue with the disks as they are; none if it may.
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
                match ask::<Option<StaleReason>>(rundir, &disk.id, &Ask::PhaseCheck { moment: *moment }) {
                    Ok(void) => void.map(|void| void.to_string()),
                    Err(e) => Some(format!("its server does not report what was written: {e}")),
                }
            }
            Known::File(mark) => (!mark.holds()).then(|| format!("{} has changed since", mark.path.display())),
        };
        void.map(|why| format!("disk {}: {why}", disk.id))
    })
}

/// Notifies the servers that the next guest is one of that moment, whose memory is loaded while it runs, if that is
/// possible. Otherwise returns why not.
///
/// *Needs:* that no QEMU is connected.
///
/// # Errors
/// The reason.
pub fn continue_from(rundir: &RunDir, hardware: &Hardware, then: &[DiskThen]) -> Result<(), String> {
    if let Some(why) = check(rundir, hardware, then) {
        return Err(why);
    }
    then.iter().try_for_each(|disk| {
        let Known::Moment(moment) = &disk.known else { return Ok(()) };
        match ask::<Option<StaleReason>>(rundir, &disk.id, &Ask::PhaseResume { moment: *moment }) {
            Ok(None) => Ok(()),
            Ok(Some(void)) => Err(format!("disk {}: {void}", disk.id)),
            Err(e) => Err(e.to_string()),
        }
    })
}
