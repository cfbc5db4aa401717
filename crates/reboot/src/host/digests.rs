//! Digests of a guest's RAM that cost little of the time for which it is stopped.
//!
//! All pages are digested while the guest runs, those that it wrote meanwhile again while it runs, until few are left, and these when it is
//! stopped. Which they are its page tables tell: by soft-dirty bits where the RAM is in a file with DAX, as it is on a host that is rebooted
//! under its guests, else by a userfaultfd's write protection. Where neither tells all (a disk's server writes through a mapping of its own;
//! a kernel without), or tells somebody else (`rekindle protect`), everything is digested with the guest stopped. A page that was missed all
//! the same has another digest later, and its guest counts as lost: the error is on the safe side.

use crate::vmm::{RebootError, stop};
use rekindle_kernel::inject::Injector;
use rekindle_memory::digest;
use rekindle_memory::directory::is_direct;
use rekindle_memory::pages;
use rekindle_memory::ram::GuestRam;
use rekindle_memory::tracker::{Asynchronous, SoftDirty, Tracker, leftovers};
use rekindle_qemu::command::Hardware;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::ramblock::MAIN_RAM;
use rekindle_qemu::stopped::Stopped;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::fault;
use serde_json::Value;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// So little may be left for when the guest is stopped: a hundredth of a second's work.
const LITTLE: u64 = 16 << 20;
/// How often it is tried to come there.
const ROUNDS: usize = 4;

/// Digests of the pages of a guest that runs, with a record of what it writes since.
pub(super) struct Ahead {
    record: Record,
    path: PathBuf,
    pages: Vec<u64>,
}

/// Which pages were written since the last look.
enum Record {
    SoftDirty(SoftDirty),
    /// With the place of the main RAM among the blocks that are tracked.
    Protected(Box<Asynchronous>, usize),
}

/// Pages, in bytes from the beginning of the RAM.
#[derive(Default)]
struct Changed {
    written: Vec<Range<u64>>,
    zero: Vec<Range<u64>>,
}

impl Ahead {
    /// Digest the RAM of a guest, which is stopped for milliseconds now and then. The caller holds its run state.
    ///
    /// `None`: it is not possible here, which is told in the log; the guest is as it was.
    ///
    /// # Errors
    /// When the guest does not stop or go on.
    pub(super) fn begin(
        vmm: &Vmm,
        qmp: &mut Qmp,
        hardware: &Hardware,
        mark: Option<&Path>,
    ) -> Result<Option<Self>, RebootError> {
        // A protector's record of what was written belongs to it, and a page has one record only.
        let protected = leftovers(vmm.process()).is_ok_and(|found| !found.is_empty());
        if protected || hardware.disks.iter().any(|disk| disk.server) {
            return Ok(None);
        }
        let path = &hardware.ram.path;
        let digested = |e| RebootError::File { path: path.clone(), source: e };
        let record = match with_guest_stopped(vmm, qmp, mark, |qmp| Record::begin(vmm, qmp, path))? {
            Ok(record) => record,
            Err(why) => {
                tracing::debug!("{}: all of its memory is digested with the guest stopped: {why}", hardware.name);
                return Ok(None);
            }
        };
        let mut ahead = Self { record, path: path.clone(), pages: Vec::new() };
        match digest::file_pages(path) {
            Ok(pages) => ahead.pages = pages,
            Err(e) => {
                ahead.give_up();
                return Err(digested(e));
            }
        }
        for _ in 0..ROUNDS {
            let round = with_guest_stopped(vmm, qmp, mark, |qmp| ahead.record.collect(qmp))?;
            let bytes = round.as_ref().map_or(0, |changed| pages::bytes(&changed.written));
            if let Err(why) = round.and_then(|changed| ahead.take(&changed)) {
                tracing::debug!("{}: all of its memory is digested with the guest stopped: {why}", hardware.name);
                ahead.give_up();
                return Ok(None);
            }
            if bytes <= LITTLE {
                break;
            }
        }
        Ok(Some(ahead))
    }

    /// The digests as they are now, with the guest stopped.
    pub(super) fn finish(mut self, qmp: &mut Qmp) -> Result<Vec<u64>, String> {
        let taken = self.record.collect(qmp).and_then(|changed| self.take(&changed));
        let pages = std::mem::take(&mut self.pages);
        self.record.end(&self.path);
        taken.map(|()| pages)
    }

    fn take(&mut self, changed: &Changed) -> Result<(), String> {
        digest::zero_pages(&mut self.pages, &changed.zero);
        digest::file_pages_again(&self.path, &mut self.pages, &changed.written).map_err(|e| e.to_string())
    }

    /// The guest goes on where it is: leave no trace in its QEMU.
    pub(super) fn give_up(self) {
        self.record.end(&self.path);
    }
}

impl Record {
    fn begin(vmm: &Vmm, qmp: &mut Qmp, path: &Path) -> Result<Self, String> {
        let text = |e: &dyn std::error::Error| e.to_string();
        let ram = Arc::new(GuestRam::of(qmp, vmm.process()).map_err(|e| text(&e))?);
        let direct = is_direct(path).map_err(|e| text(&e))?;
        if direct {
            let mut stopped = Stopped::check(qmp).map_err(|e| text(&e))?;
            return Ok(Self::SoftDirty(SoftDirty::attach(&ram, MAIN_RAM, &mut stopped).map_err(|e| text(&e))?));
        }
        let index = ram.blocks().iter().position(|block| block.told.id == MAIN_RAM).ok_or("it has no main RAM")?;
        let injector = Injector::new(vmm.process()).map_err(|e| text(&e))?;
        let mut stopped = Stopped::check(qmp).map_err(|e| text(&e))?;
        let tracker = Asynchronous::attach(injector, ram, &mut stopped, None).map_err(|e| text(&e))?;
        Ok(Self::Protected(Box::new(tracker), index))
    }

    /// What was written since the last time; the guest is stopped.
    fn collect(&mut self, qmp: &mut Qmp) -> Result<Changed, String> {
        let mut stopped = Stopped::check(qmp).map_err(|e| e.to_string())?;
        match self {
            Self::SoftDirty(tracker) => {
                let written = tracker.collect(&mut stopped).map_err(|e| e.to_string())?;
                Ok(Changed { written, zero: Vec::new() })
            }
            Self::Protected(tracker, index) => {
                let dirty = tracker.collect(&mut stopped).map_err(|e| e.to_string())?;
                let of_ram = |runs: &Vec<Vec<_>>| runs.get(*index).cloned().unwrap_or_default();
                Ok(Changed { written: of_ram(&dirty.written), zero: of_ram(&dirty.zero) })
            }
        }
    }

    fn end(self, path: &Path) {
        if let Self::Protected(tracker, _) = self
            && let Err(e) = tracker.detach()
        {
            tracing::warn!("{}: the record of what its guest writes stays in QEMU: {e}", path.display());
        }
    }
}

/// Do something with the guest stopped. If it runs, `mark` is there meanwhile: whoever comes after our death lets it go on.
fn with_guest_stopped<T>(
    vmm: &Vmm,
    qmp: &mut Qmp,
    mark: Option<&Path>,
    work: impl FnOnce(&mut Qmp) -> T,
) -> Result<T, RebootError> {
    let Some(mark) = mark else { return Ok(work(qmp)) };
    let failed = |source| RebootError::File { path: mark.to_owned(), source };
    fs::write(mark, []).map_err(failed)?;
    stop(qmp, true)?;
    fault::point("host.suspend.ahead", Some(vmm), None);
    let done = work(qmp);
    qmp.execute::<Value>("cont", ())?;
    fs::remove_file(mark).map_err(failed)?;
    Ok(done)
}
