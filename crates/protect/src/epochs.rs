//! Epochs of the disks on disk servers: with them, a checkpoint includes the disks as they were at its moment.
//!
//! `docs/disk-epochs.md` defines which writes are durable at what time.

use crate::target::Target;
use rekindle_disk::control::{Control, ControlCommand, ControlError};
use rekindle_disk::keeper::EpochId;
use rekindle_vm::disks;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::PathBuf;

/// The key of the epochs in a checkpoint's metadata.
pub(crate) const KEY: &str = "disks";

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
    at: EpochId,
}

/// Reads the epochs from a checkpoint's metadata.
pub(crate) fn read(metadata: &Value) -> Result<disks::Epochs, serde_json::Error> {
    let found = metadata.get(KEY).map_or(Ok(Vec::new()), Vec::<DiskEpoch>::deserialize)?;
    Ok(named(&found))
}

/// Returns the epochs by disk id.
pub(crate) fn named(marked: &[DiskEpoch]) -> disks::Epochs {
    marked.iter().map(|disk| (disk.id.clone(), disk.at)).collect()
}

/// The writable disks of a guest that are on disk servers.
#[derive(Debug)]
pub(crate) struct EpochDisks {
    /// For each disk: its id, the path of its server's control socket, and the connection for the checkpoint in
    /// progress.
    disks: Vec<(String, PathBuf, Option<Control>)>,
}

impl EpochDisks {
    pub(crate) fn of(target: &Target) -> Self {
        let disks = target.state().hardware.disks.iter().filter(|disk| disk.server && !disk.readonly);
        let of = |id: &String| (id.clone(), disks::control(target.rundir(), id), None);
        Self { disks: disks.map(|disk| of(&disk.id)).collect() }
    }

    /// Redirects writes to redo logs. A disk that already has a redo log keeps it.
    pub(crate) fn begin(&mut self) -> Result<(), EpochError> {
        self.disks.iter_mut().try_for_each(|(id, path, connected)| {
            // Reconnects each time: the server may have been replaced.
            let connection = Control::connect(path).and_then(|mut control| {
                control.ask::<EpochId>(&ControlCommand::EpochBegin {})?;
                Ok(control)
            });
            *connected = Some(connection.map_err(|source| EpochError { id: id.clone(), source })?);
            Ok(())
        })
    }

    /// Marks the state of the disks while the guest is stopped.
    pub(crate) fn mark(&mut self) -> Result<Vec<DiskEpoch>, EpochError> {
        let marked = self.disks.iter_mut().filter_map(|(id, _, connected)| {
            let at = connected.as_mut()?.ask(&ControlCommand::EpochMark {});
            let id = id.clone();
            Some(match at {
                Ok(at) => Ok(DiskEpoch { id, at }),
                Err(source) => Err(EpochError { id, source }),
            })
        });
        marked.collect()
    }

    /// Makes the marked state durable. Must be called before the commit.
    pub(crate) fn seal(&mut self, marked: &[DiskEpoch]) -> Result<(), EpochError> {
        self.each(marked, |epoch| ControlCommand::EpochSeal { epoch })
    }

    /// Reports the commit to the disk servers, which then need no older epochs.
    pub(crate) fn committed(&mut self, marked: &[DiskEpoch]) {
        if let Err(e) = self.each(marked, |epoch| ControlCommand::EpochCommitted { epoch }) {
            // The report of the next commit covers this one, too.
            tracing::debug!("{e}: {}", e.source);
        }
    }

    fn each(&mut self, marked: &[DiskEpoch], ask: impl Fn(u64) -> ControlCommand) -> Result<(), EpochError> {
        marked.iter().try_for_each(|DiskEpoch { id, at }| {
            let control =
                self.disks.iter_mut().find(|(of, _, _)| of == id).and_then(|(_, _, connected)| connected.as_mut());
            let result = control.map_or(Ok(()), |control| control.ask::<()>(&ask(at.epoch)));
            result.map_err(|source| EpochError { id: id.clone(), source })
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn metadata_lists_epochs_and_may_list_none() {
        let at = EpochId { disk: uuid::Uuid::from_u128(7), epoch: 3 };
        let metadata = json!({ (KEY): [DiskEpoch { id: "disk0".into(), at }] });
        assert_eq!(read(&metadata).unwrap(), disks::Epochs::from([("disk0".into(), at)]));
        assert!(read(&json!({})).unwrap().is_empty());
        assert!(read(&json!({ (KEY): [{"id": "disk0"}] })).is_err());
    }
}
