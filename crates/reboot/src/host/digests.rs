//! Digests of a guest's RAM that cost little of the time for which it is stopped.
//!
//! All pages are digested while the guest runs, and those that it wrote meanwhile once more when it is stopped: which those are
//! its page tables tell. Where they do not tell all (a disk's server writes through a mapping of its own; Linux before 6.7), or tell
//! somebody else (`rekindle protect`), everything is digested with the guest stopped. A page that was missed all the same has another digest later, and its
//! guest counts as lost: the error is on the safe side.

use crate::vmm::{RebootError, stop};
use rekindle_kernel::inject::Injector;
use rekindle_memory::digest;
use rekindle_memory::ram::GuestRam;
use rekindle_memory::tracker::{Asynchronous, Tracker, leftovers};
use rekindle_qemu::command::Hardware;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::ramblock::MAIN_RAM;
use rekindle_qemu::stopped::Stopped;
use rekindle_qemu::vmm::Vmm;
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;

/// Digests of the pages of a guest that runs, with a record of what it writes since.
pub(super) struct Ahead {
    tracker: Asynchronous,
    /// The main RAM among the blocks that are tracked.
    index: usize,
    path: PathBuf,
    pages: Vec<u64>,
}

impl Ahead {
    /// Begin, with the guest stopped for the milliseconds that it takes to arm. The caller holds its run state.
    ///
    /// `None`: it is not possible here, which is told in the log; the guest is as it was.
    ///
    /// # Errors
    /// When the guest does not stop or go on.
    pub(super) fn begin(
        vmm: &Vmm,
        qmp: &mut Qmp,
        hardware: &Hardware,
        running: bool,
    ) -> Result<Option<Self>, RebootError> {
        // A protector's record of what was written belongs to it, and a page has one record only.
        let protected = leftovers(vmm.process()).is_ok_and(|found| !found.is_empty());
        if protected || hardware.disks.iter().any(|disk| disk.server) {
            return Ok(None);
        }
        stop(qmp, running)?;
        let begun = Self::arm(vmm, qmp, hardware);
        if running {
            qmp.execute::<Value>("cont", ())?;
        }
        let mut ahead = match begun {
            Ok(ahead) => ahead,
            Err(why) => {
                tracing::debug!("{}: all of its memory is digested with the guest stopped: {why}", hardware.name);
                return Ok(None);
            }
        };
        let path = &hardware.ram.path;
        ahead.pages = digest::file_pages(path).map_err(|source| RebootError::File { path: path.clone(), source })?;
        Ok(Some(ahead))
    }

    fn arm(vmm: &Vmm, qmp: &mut Qmp, hardware: &Hardware) -> Result<Self, String> {
        let text = |e: &dyn std::error::Error| e.to_string();
        let ram = Arc::new(GuestRam::of(qmp, vmm.process()).map_err(|e| text(&e))?);
        let index = ram.blocks().iter().position(|block| block.told.id == MAIN_RAM).ok_or("it has no main RAM")?;
        let injector = Injector::new(vmm.process()).map_err(|e| text(&e))?;
        let mut stopped = Stopped::check(qmp).map_err(|e| text(&e))?;
        let tracker = Asynchronous::attach(injector, ram, &mut stopped, None).map_err(|e| text(&e))?;
        Ok(Self { tracker, index, path: hardware.ram.path.clone(), pages: Vec::new() })
    }

    /// The digests as they are now, with the guest stopped.
    pub(super) fn finish(mut self, qmp: &mut Qmp) -> Result<Vec<u64>, String> {
        let mut stopped = Stopped::check(qmp).map_err(|e| e.to_string())?;
        let dirty = self.tracker.collect(&mut stopped).map_err(|e| e.to_string())?;
        let of_ram = |runs: &Vec<Vec<_>>| runs.get(self.index).cloned().unwrap_or_default();
        digest::zero_pages(&mut self.pages, &of_ram(&dirty.zero));
        digest::file_pages_again(&self.path, &mut self.pages, &of_ram(&dirty.written)).map_err(|e| e.to_string())?;
        let pages = std::mem::take(&mut self.pages);
        if let Err(e) = self.tracker.detach() {
            tracing::debug!("{}: {e}", self.path.display());
        }
        Ok(pages)
    }

    /// The guest goes on where it is: leave no trace in its QEMU.
    pub(super) fn give_up(self) {
        if let Err(e) = self.tracker.detach() {
            tracing::warn!("{}: the record of what its guest writes stays in QEMU: {e}", self.path.display());
        }
    }
}
