//! The disks of a protected guest that have servers of their own: a checkpoint has them as they were at its moment.
//!
//! `docs/disk-epochs.md` has what is durable when.

use crate::target::Target;
use rekindle_disk::control::{Ask, Control, ControlError};
use rekindle_disk::redo::keeper::EpochId;
use rekindle_vm::disks;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::PathBuf;

/// Where a checkpoint's metadata names them.
pub(crate) const KEY: &str = "disks";

/// A disk did not do as it was asked.
#[derive(Debug, thiserror::Error)]
#[error("disk {id}: no checkpoint can be taken of it")]
pub(crate) struct EpochError {
    id: String,
    #[source]
    source: ControlError,
}

impl EpochError {
    /// Whether its server does not answer.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(self.source, ControlError::Connect { .. })
    }
}

/// A disk at a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DiskEpoch {
    id: String,
    #[serde(flatten)]
    at: EpochId,
}

/// The epochs that a checkpoint's metadata names.
pub(crate) fn read(metadata: &Value) -> Result<disks::Epochs, serde_json::Error> {
    let found = metadata.get(KEY).map_or(Ok(Vec::new()), Vec::<DiskEpoch>::deserialize)?;
    Ok(named(&found))
}

/// The same, of disks that were marked.
pub(crate) fn named(marked: &[DiskEpoch]) -> disks::Epochs {
    marked.iter().map(|disk| (disk.id.clone(), disk.at)).collect()
}

/// The disks of one guest.
#[derive(Debug)]
pub(crate) struct Epochs {
    /// Id, where its server is asked, and the connection of a checkpoint that is being taken.
    disks: Vec<(String, PathBuf, Option<Control>)>,
}

impl Epochs {
    /// Those of `target` that it writes.
    pub(crate) fn of(target: &Target) -> Self {
        let disks = target.state().hardware.disks.iter().filter(|disk| disk.server && !disk.readonly);
        let of = |id: &String| (id.clone(), disks::control(target.rundir(), id), None);
        Self { disks: disks.map(|disk| of(&disk.id)).collect() }
    }

    /// What they write from here on goes to a log. A disk that has one keeps it.
    pub(crate) fn begin(&mut self) -> Result<(), EpochError> {
        self.disks.iter_mut().try_for_each(|(id, path, connected)| {
            // Anew each time: its server may have been another one the last time.
            let begun = Control::connect(path).and_then(|mut control| {
                control.ask::<EpochId>(&Ask::EpochBegin {})?;
                Ok(control)
            });
            *connected = Some(begun.map_err(|source| EpochError { id: id.clone(), source })?);
            Ok(())
        })
    }

    /// The guest is stopped: what they are as of now.
    pub(crate) fn mark(&mut self) -> Result<Vec<DiskEpoch>, EpochError> {
        let marked = self.disks.iter_mut().filter_map(|(id, _, connected)| {
            let at = connected.as_mut()?.ask(&Ask::EpochMark {});
            let id = id.clone();
            Some(match at {
                Ok(at) => Ok(DiskEpoch { id, at }),
                Err(source) => Err(EpochError { id, source }),
            })
        });
        marked.collect()
    }

    /// Make them durable, before the checkpoint counts.
    pub(crate) fn seal(&mut self, marked: &[DiskEpoch]) -> Result<(), EpochError> {
        self.each(marked, |epoch| Ask::EpochSeal { epoch })
    }

    /// The checkpoint counts: no older one is wanted any more.
    pub(crate) fn committed(&mut self, marked: &[DiskEpoch]) {
        if let Err(e) = self.each(marked, |epoch| Ask::EpochCommitted { epoch }) {
            // The next one says the same of more.
            tracing::debug!("{e}: {}", e.source);
        }
    }

    fn each(&mut self, marked: &[DiskEpoch], ask: impl Fn(u64) -> Ask) -> Result<(), EpochError> {
        marked.iter().try_for_each(|DiskEpoch { id, at }| {
            let control =
                self.disks.iter_mut().find(|(of, _, _)| of == id).and_then(|(_, _, connected)| connected.as_mut());
            let asked = control.map_or(Ok(()), |control| control.ask::<()>(&ask(at.epoch)));
            asked.map_err(|source| EpochError { id: id.clone(), source })
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn metadata_names_each_disk_and_may_name_none() {
        let at = EpochId { disk: uuid::Uuid::from_u128(7), epoch: 3 };
        let metadata = json!({ (KEY): [DiskEpoch { id: "disk0".into(), at }] });
        assert_eq!(read(&metadata).unwrap(), disks::Epochs::from([("disk0".into(), at)]));
        assert!(read(&json!({})).unwrap().is_empty());
        assert!(read(&json!({ (KEY): [{"id": "disk0"}] })).is_err());
    }
}
