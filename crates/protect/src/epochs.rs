//! Epochs of the disks on disk servers: with them, a checkpoint includes the disks as they were at its moment.
//!
//! An *epoch* of a disk is what the guest wrote to it between two checkpoints. The disk's server keeps it in a *redo
//! log*, apart from the image, until its checkpoint is committed.
//!
//! `docs/disk-epochs.md` defines which writes are durable at what time.

use crate::target::Target;
use rekindle_disk::control::{Control, ControlCommand, ControlError};
use rekindle_disk::keeper::EpochId;
use rekindle_vm::disks;
use rekindle_vm::overlays::OverlayEpoch;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::PathBuf;

/// The key of the epochs in a checkpoint's metadata.
pub(crate) const KEY: &str = "disks";
/// The key of the disks that QEMU itself serves, with the overlays that they need.
pub(crate) const OVERLAYS_KEY: &str = "overlays";

/// Why a disk server cannot take part in a checkpoint.
#[derive(Debug, thiserror::Error)]
#[error("disk {id}: no checkpoint can be taken of it")]
pub(crate) struct EpochError {
    id: String,
    #[source]
    source: ControlError,
}

impl EpochError {
    /// Returns whether no connection to the server is possible.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(self.source, ControlError::Connect { .. })
    }
}

/// The epoch of a disk at a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DiskEpoch {
    id: String,
    #[serde(flatten)]
    epoch_id: EpochId,
}

/// Reads the epochs from a checkpoint's metadata.
pub(crate) fn read(metadata: &Value) -> Result<disks::Epochs, serde_json::Error> {
    let listed = metadata.get(KEY).map_or(Ok(Vec::new()), Vec::<DiskEpoch>::deserialize)?;
    Ok(by_disk_id(&listed))
}

/// Reads the disks on overlays from a checkpoint's metadata.
pub(crate) fn read_overlays(metadata: &Value) -> Result<Vec<OverlayEpoch>, serde_json::Error> {
    metadata.get(OVERLAYS_KEY).map_or(Ok(Vec::new()), Vec::<OverlayEpoch>::deserialize)
}

/// Returns the epochs by disk id.
pub(crate) fn by_disk_id(epochs: &[DiskEpoch]) -> disks::Epochs {
    epochs.iter().map(|disk| (disk.id.clone(), disk.epoch_id)).collect()
}

/// The writable disks of a guest that are on disk servers.
#[derive(Debug)]
pub(crate) struct EpochDisks {
    disks: Vec<EpochDisk>,
}

#[derive(Debug)]
struct EpochDisk {
    id: String,
    /// The control socket of the disk's server.
    control_path: PathBuf,
    /// The connection for the checkpoint in progress.
    connection: Option<Control>,
}

impl EpochDisk {
    fn failed(&self, source: ControlError) -> EpochError {
        EpochError { id: self.id.clone(), source }
    }

    /// Reconnects, because the server may have been replaced, and redirects writes to the redo log.
    fn begin(&mut self) -> Result<(), ControlError> {
        let mut connection = Control::connect(&self.control_path)?;
        connection.ask::<EpochId>(&ControlCommand::EpochBegin {})?;
        self.connection = Some(connection);
        Ok(())
    }
}

impl EpochDisks {
    pub(crate) fn of(target: &Target) -> Self {
        let writable = target.state().hardware.disks.iter().filter(|disk| disk.server && !disk.readonly);
        let disks = writable.map(|disk| EpochDisk {
            id: disk.id.clone(),
            control_path: disks::control_socket(target.rundir(), &disk.id),
            connection: None,
        });
        Self { disks: disks.collect() }
    }

    /// Redirects writes to redo logs. A disk that already has a redo log keeps it.
    pub(crate) fn begin(&mut self) -> Result<(), EpochError> {
        self.disks.iter_mut().try_for_each(|disk| disk.begin().map_err(|source| disk.failed(source)))
    }

    /// Marks the state of the disks while the guest is stopped.
    pub(crate) fn mark(&mut self) -> Result<Vec<DiskEpoch>, EpochError> {
        let mut marked = Vec::new();
        for disk in &mut self.disks {
            let Some(connection) = &mut disk.connection else { continue };
            let epoch_id = connection.ask(&ControlCommand::EpochMark {});
            marked.push(DiskEpoch { id: disk.id.clone(), epoch_id: epoch_id.map_err(|source| disk.failed(source))? });
        }
        Ok(marked)
    }

    /// Makes the marked state durable. Must be called before the commit.
    pub(crate) fn seal(&mut self, marked: &[DiskEpoch]) -> Result<(), EpochError> {
        self.ask_each(marked, |epoch| ControlCommand::EpochSeal { epoch })
    }

    /// Reports the commit to the disk servers, which then need no older epochs.
    pub(crate) fn report_commit(&mut self, marked: &[DiskEpoch]) {
        if let Err(e) = self.ask_each(marked, |epoch| ControlCommand::EpochCommitted { epoch }) {
            // The report of the next commit covers this one, too.
            tracing::debug!("{e}: {}", e.source);
        }
    }

    /// Sends the server of each marked disk the request that `request` returns for its epoch.
    fn ask_each(&mut self, marked: &[DiskEpoch], request: impl Fn(u64) -> ControlCommand) -> Result<(), EpochError> {
        for DiskEpoch { id, epoch_id } in marked {
            let Some(disk) = self.disks.iter_mut().find(|disk| disk.id == *id) else { continue };
            let Some(connection) = &mut disk.connection else { continue };
            connection.ask::<()>(&request(epoch_id.epoch)).map_err(|source| disk.failed(source))?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn metadata_lists_epochs_and_may_list_none() {
        let epoch_id = EpochId { disk: uuid::Uuid::from_u128(7), epoch: 3 };
        let metadata = json!({ (KEY): [DiskEpoch { id: "disk0".into(), epoch_id }] });
        assert_eq!(read(&metadata).unwrap(), disks::Epochs::from([("disk0".into(), epoch_id)]));
        assert!(read(&json!({})).unwrap().is_empty());
        assert!(read(&json!({ (KEY): [{"id": "disk0"}] })).is_err());
    }
}
