//! The state of a VM: `state.json`.

use crate::definition::Definition;
use crate::rundir::{RunDir, read_record, write_json};
use rekindle_qemu::command::Hardware;
use rekindle_qemu::file_identity::FileIdentity;
use rekindle_qemu::qmp::Version;
use rekindle_qemu::ramblock::RamBlock;
use rekindle_qemu::vmm::Vmm;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;

/// The newest format that this Rekindle reads. It writes an older format if that is sufficient, so that older
/// versions can read it.
pub const NEWEST_FORMAT: u32 = 9;

/// The content of `state.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Format of this file.
    pub format: u32,
    /// The definition when the VM was started, with every default filled in.
    pub definition: Definition,
    /// The machine that the guest sees, which stays the same over every QEMU.
    pub hardware: Hardware,
    /// Number of the current QEMU of this VM, from 1.
    pub generation: u32,
    /// The QEMU that runs the guest. None while the VM is being started.
    pub vmm: Option<Vmm>,
    /// The QEMU's version.
    pub version: Option<Version>,
    /// The QEMU binary before the last upgrade, for `--rollback`.
    pub previous: Option<PathBuf>,
    /// The origin of a VM that Rekindle did not start. Since format 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attached: Option<Attached>,
    /// A QEMU that waits for a checkpoint. If present, no QEMU runs the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prepared: Option<Prepared>,
}

/// The origin of a VM that Rekindle did not start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// The user that the QEMU runs as.
    pub uid: u32,
    /// Description of the program that started the QEMU, as far as that is visible.
    pub starter: String,
}

/// Returns the oldest format in which a VM with this hardware can be recorded.
#[must_use]
pub fn format_of(hardware: &Hardware) -> u32 {
    match hardware {
        hardware if hardware.taps().any(|(_, tap)| tap.queues > 1 || tap.vhost) => 9,
        Hardware { foreign: Some(machine), .. } if !machine.overlays.is_empty() => 7,
        Hardware { phase: true, .. } => 6,
        Hardware { disks, .. } if disks.iter().any(|disk| disk.redo.is_some()) => 5,
        Hardware { disks, .. } if disks.iter().any(|disk| disk.server) => 4,
        Hardware { agent: true, agent_ports: Some(_), .. } => 3,
        Hardware { foreign: Some(_), .. } => 2,
        _ => 1,
    }
}

/// A QEMU that waits with empty RAM, so that a restore only has to load and resume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prepared {
    /// The waiting QEMU.
    pub vmm: Vmm,
    /// RAM blocks of that QEMU.
    pub blocks: Vec<RamBlock>,
    /// The files that the QEMU has read or opened: binary, kernel, images. It can be used only while they are
    /// unchanged.
    pub files: Vec<FileIdentity>,
    /// The definition from which to build the VM, if one was given when it was prepared.
    pub given: Option<Definition>,
    /// The QEMU binary to use, if one was given.
    pub qemu: Option<PathBuf>,
}

/// A VM that has no guest because its QEMU waits for a checkpoint.
#[derive(Debug, thiserror::Error)]
#[error(
    "VM {name} does not run: it is prepared for a restore (QEMU process {pid} waits); continue with `rekindle restore {name} \
     --store URL`, or remove it: rekindle stop {name}"
)]
pub struct PreparedError {
    /// Name of the VM.
    pub name: String,
    /// Process number of the waiting QEMU.
    pub pid: u32,
}

impl Prepared {
    /// Checks that the waiting QEMU can still be used.
    ///
    /// # Errors
    /// A text: the QEMU has ended, or a file has changed since the QEMU read it.
    pub fn check(&self) -> Result<(), String> {
        if !self.vmm.is_alive() {
            return Err(format!("QEMU process {} has ended", self.vmm.pid));
        }
        match self.files.iter().find(|mark| !mark.is_unchanged()) {
            Some(mark) => Err(format!("{} has changed since", mark.path.display())),
            None => Ok(()),
        }
    }
}

impl State {
    /// Reads the state of the VM, if there is one.
    ///
    /// # Errors
    /// When the file exists but cannot be read, or was written by a newer Rekindle.
    pub fn read(rundir: &RunDir) -> io::Result<Option<Self>> {
        let path = path(rundir);
        let text = match read_record(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(io::Error::new(e.kind(), format!("{}: {e}", path.display()))),
        };
        #[derive(Deserialize)]
        struct Format {
            format: u32,
        }
        let not_understood =
            |e: serde_json::Error| io::Error::other(format!("{} cannot be understood: {e}", path.display()));
        let Format { format } = serde_json::from_slice(&text).map_err(not_understood)?;
        if format > NEWEST_FORMAT {
            let text = format!("{} is of format {format}, written by a newer Rekindle; use that one", path.display());
            return Err(io::Error::other(text));
        }
        serde_json::from_slice(&text).map(Some).map_err(not_understood)
    }

    /// Returns the recorded QEMUs: the one that runs the guest and the one that waits for a checkpoint.
    pub fn qemus(&self) -> impl Iterator<Item = &Vmm> {
        self.vmm.iter().chain(self.prepared.iter().map(|prepared| &prepared.vmm))
    }

    /// Rejects a VM that has no guest because its QEMU waits for a checkpoint.
    ///
    /// # Errors
    /// [`PreparedError`].
    pub fn refuse_prepared(&self) -> Result<(), PreparedError> {
        match self.prepared.as_ref().filter(|prepared| prepared.vmm.is_alive()) {
            Some(Prepared { vmm, .. }) => Err(PreparedError { name: self.hardware.name.clone(), pid: vmm.pid }),
            None => Ok(()),
        }
    }

    /// Writes the state file.
    ///
    /// # Errors
    /// As for [`write_json`].
    pub fn write(&self, rundir: &RunDir) -> io::Result<()> {
        write_json(&path(rundir), self)
    }
}

fn path(rundir: &RunDir) -> PathBuf {
    rundir.file("state.json")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_newer_format_is_named_and_nonsense_too() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        assert!(State::read(&rundir).unwrap().is_none());
        fs::write(path(&rundir), r#"{"format": 99}"#).unwrap();
        assert!(State::read(&rundir).unwrap_err().to_string().contains("newer Rekindle"));
        fs::write(path(&rundir), r#"{"format": 1}"#).unwrap();
        assert!(State::read(&rundir).unwrap_err().to_string().contains("state.json"));
    }
}
