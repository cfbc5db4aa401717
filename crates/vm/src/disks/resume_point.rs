//! The disk epochs from which a restored guest resumed, for servers that replace those of the restore.
//!
//! Epochs newer than the checkpoint are discarded when the guest writes for the first time (`docs/disk-epochs.md`). A
//! server that starts before that must not take them for the guest's.

use super::server::server_status;
use super::{DisksError, Epochs, served};
use crate::rundir::{RunDir, write_json};
use rekindle_disk::keeper::EpochId;
use rekindle_qemu::command::{Disk, Hardware};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::PathBuf;

/// The point at which the guest of a checkpoint resumed: an argument of a replacement server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ResumePoint {
    /// Disk and epoch of the checkpoint.
    #[serde(flatten)]
    pub at: EpochId,
    /// First epoch of the resumed guest's own writes.
    pub first: u64,
}

fn path(rundir: &RunDir, disk: &Disk) -> PathBuf {
    rundir.file(&format!("disk-{}.since", disk.id))
}

/// Reads the record of a disk. `None` if its guest has not resumed from a checkpoint.
pub(super) fn read(rundir: &RunDir, disk: &Disk) -> Result<Option<ResumePoint>, DisksError> {
    let failed =
        |source| DisksError::Io { id: disk.id.clone(), doing: "reading since which epoch its guest runs", source };
    match fs::read(path(rundir, disk)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        text => serde_json::from_slice(&text.map_err(failed)?).map(Some).map_err(|e| failed(e.into())),
    }
}

/// Records the epochs. Must be called before the guest runs.
pub(super) fn record(rundir: &RunDir, hardware: &Hardware, epochs: &Epochs) -> Result<(), DisksError> {
    for disk in served(hardware) {
        let Some(at) = epochs.get(&disk.id) else { continue };
        let refused = |source| DisksError::Refused { id: disk.id.clone(), source };
        let Some(redo) = server_status(rundir, &disk.id).map_err(refused)?.redo else { continue };
        let failed =
            |source| DisksError::Io { id: disk.id.clone(), doing: "noting since which epoch its guest runs", source };
        write_json(&path(rundir, disk), &ResumePoint { at: *at, first: redo.epoch }).map_err(failed)?;
    }
    Ok(())
}
