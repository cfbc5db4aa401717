//! The ways in which a destination gets the guest's RAM.

use crate::{HandoverError, evidence};
use rekindle_qemu::command::Hardware;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::ramblock::{MAIN_RAM, RamBlock};
use rekindle_qemu::transfer::{Capabilities, Feed};
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::journal::Operation;
use std::path::PathBuf;

/// Migration capabilities of a destination whose RAM is not in the stream. `x-ignore-shared`: the destination maps the
/// RAM from a file. `late-block-activate`: the destination opens disk images and takes their locks when the guest
/// resumes, after the source has released them, and not at the end of the load.
pub const WITHOUT_RAM: Capabilities<'static> =
    &[("events", true), ("x-ignore-shared", true), ("late-block-activate", true)];

/// A destination's RAM, as a source of evidence for recovery.
pub trait Ram {
    /// Adds the evidence to `operation`, just before the decision is journalled. Recovery uses it to detect whether the
    /// guest has run since.
    fn note_evidence(&self, operation: &mut Operation);

    /// Returns whether the destination has the content of the RAM block `id` without a migration stream.
    fn supplies(&self, id: &str) -> bool {
        id == MAIN_RAM
    }

    /// Returns the blocks of the source's block `table` whose content must be in the migration stream.
    fn carried_blocks(&self, table: Vec<RamBlock>) -> Vec<RamBlock> {
        table.into_iter().filter(|block| !self.supplies(&block.id)).collect()
    }
}

/// RAM to which a destination is connected while it waits for device state from a pipe.
pub trait RamSource: Ram {
    type Error: From<HandoverError>;

    /// Connects the destination to the RAM, while the source may still run the guest. Returns the pipe for the device
    /// state.
    ///
    /// # Errors
    /// An error makes the destination unusable; the guest is unchanged.
    fn connect(&mut self, destination: &Vmm, qmp: &mut Qmp) -> Result<Feed, Self::Error>;
}

/// RAM in a file that the source and the destination both map.
#[derive(Debug)]
pub struct SharedRam {
    pub path: PathBuf,
}

impl Ram for SharedRam {
    fn note_evidence(&self, operation: &mut Operation) {
        operation.untouched_since_ns = evidence::mark_ram(&self.path);
    }
}

impl RamSource for SharedRam {
    type Error = HandoverError;

    fn connect(&mut self, _destination: &Vmm, qmp: &mut Qmp) -> Result<Feed, HandoverError> {
        Ok(Feed::open(qmp, WITHOUT_RAM)?)
    }
}

/// RAM that is part of a saved state in a file.
#[derive(Debug)]
pub struct SavedRam<'a> {
    pub hardware: &'a Hardware,
}

impl Ram for SavedRam<'_> {
    fn note_evidence(&self, operation: &mut Operation) {
        operation.disks_at_resume = evidence::disk_times(self.hardware);
    }
}

/// RAM that no guest has used: the guest boots. If this RAM is lost, the guest boots again.
#[derive(Debug)]
pub struct NewRam;

impl Ram for NewRam {
    fn note_evidence(&self, _operation: &mut Operation) {}
}

/// The RAM of a destination that an interrupted operation has left. The evidence that the operation has journalled
/// stays valid.
#[derive(Debug)]
pub struct UnknownRam;

impl Ram for UnknownRam {
    fn note_evidence(&self, _operation: &mut Operation) {}
}
