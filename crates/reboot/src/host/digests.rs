//! Digests of a guest's RAM, taken so that they add little to the guest-stopped time.
//!
//! All pages are digested while the guest runs. Then the pages that the guest has written since are digested,
//! repeatedly, until few are left; these are digested while it is stopped. Written pages are found through the page
//! tables: by soft-dirty bits if the RAM is a file with DAX, as on a host that is rebooted under its guests, otherwise
//! by a userfaultfd's write protection.
//!
//! Everything is digested with the guest stopped if neither can be used: the kernel has no support, a disk server
//! writes through a mapping of its own, or `rekindle protect` tracks writes already. A written page that is
//! nevertheless missed has a wrong digest, and its guest counts as lost: an error on the safe side.

use crate::error::RebootError;
use rekindle_kernel::inject::Injector;
use rekindle_memory::digest;
use rekindle_memory::directory::is_direct;
use rekindle_memory::ram::GuestRam;
use rekindle_memory::tracker::{Asynchronous, SoftDirty, Tracker, leftovers};
use rekindle_pages::PageRuns;
use rekindle_qemu::command::Hardware;
use rekindle_qemu::guest;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::ramblock::MAIN_RAM;
use rekindle_qemu::stopped::Stopped;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::fault;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// At most this many bytes may remain to be digested while the guest is stopped: about 10 ms of work.
const MAX_REMAINING: u64 = 16 << 20;
/// How many rounds may be used to reach [`MAX_REMAINING`].
const MAX_ROUNDS: usize = 4;

/// Digests of a running guest's pages, and a record of the pages that the guest has written since.
pub(super) struct EarlyDigests {
    record: WriteTracker,
    path: PathBuf,
    pages: Vec<u64>,
}

/// A record of the pages that were written since the last collection.
enum WriteTracker {
    SoftDirty(SoftDirty),
    /// The index is that of the main RAM among the tracked blocks.
    Protected(Box<Asynchronous>, usize),
}

/// Changed ranges of RAM, in bytes from its start.
#[derive(Default)]
struct ChangedPages {
    written: PageRuns,
    zero: PageRuns,
}

impl EarlyDigests {
    /// Digests the RAM of a running guest, which is stopped a few times for milliseconds each. The caller holds the
    /// guest's run state.
    ///
    /// Returns `None` if writes to this guest's RAM cannot be tracked. The guest is then unchanged.
    ///
    /// # Errors
    /// [`RebootError`] if the guest cannot be stopped or resumed, or if its RAM file cannot be read.
    pub(super) fn begin(
        vmm: &Vmm,
        qmp: &mut Qmp,
        hardware: &Hardware,
        mark: Option<&Path>,
    ) -> Result<Option<Self>, RebootError> {
        // A page can have one write record only, and an existing one belongs to a protector.
        let protected = leftovers(vmm.process()).is_ok_and(|found| !found.is_empty());
        if protected || hardware.disks.iter().any(|disk| disk.server) {
            return Ok(None);
        }
        let path = &hardware.ram.path;
        let digested = |e| RebootError::File { path: path.clone(), source: e };
        let record = match with_guest_stopped(vmm, qmp, mark, |qmp| WriteTracker::begin(vmm, qmp, path))? {
            Ok(record) => record,
            Err(why) => {
                tracing::debug!("{}: all of its memory is digested with the guest stopped: {why}", hardware.name);
                return Ok(None);
            }
        };
        let mut early = Self { record, path: path.clone(), pages: Vec::new() };
        match digest::file_pages(path) {
            Ok(pages) => early.pages = pages,
            Err(e) => {
                early.discard();
                return Err(digested(e));
            }
        }
        for _ in 0..MAX_ROUNDS {
            let round = with_guest_stopped(vmm, qmp, mark, |qmp| early.record.collect(qmp))?;
            let bytes = round.as_ref().map_or(0, |changed| changed.written.bytes());
            if let Err(why) = round.and_then(|changed| early.update(&changed)) {
                tracing::debug!("{}: all of its memory is digested with the guest stopped: {why}", hardware.name);
                early.discard();
                return Ok(None);
            }
            if bytes <= MAX_REMAINING {
                break;
            }
        }
        Ok(Some(early))
    }

    /// Returns the current digests. The guest must be stopped.
    pub(super) fn finish(mut self, qmp: &mut Qmp) -> Result<Vec<u64>, String> {
        let taken = self.record.collect(qmp).and_then(|changed| self.update(&changed));
        let pages = std::mem::take(&mut self.pages);
        self.record.end(&self.path);
        taken.map(|()| pages)
    }

    fn update(&mut self, changed: &ChangedPages) -> Result<(), String> {
        digest::zero_pages(&mut self.pages, &changed.zero);
        digest::update_file_pages(&self.path, &mut self.pages, &changed.written).map_err(|e| e.to_string())
    }

    /// Ends tracking and leaves no trace in QEMU, in which the guest resumes.
    pub(super) fn discard(self) {
        self.record.end(&self.path);
    }
}

impl WriteTracker {
    fn begin(vmm: &Vmm, qmp: &mut Qmp, path: &Path) -> Result<Self, String> {
        let text = |e: &dyn std::error::Error| e.to_string();
        let ram = Arc::new(GuestRam::of(qmp, vmm.process()).map_err(|e| text(&e))?);
        let direct = is_direct(path).map_err(|e| text(&e))?;
        if direct {
            let mut stopped = Stopped::check(qmp).map_err(|e| text(&e))?;
            return Ok(Self::SoftDirty(SoftDirty::attach(&ram, MAIN_RAM, &mut stopped).map_err(|e| text(&e))?));
        }
        let index = ram.blocks().iter().position(|block| block.info.id == MAIN_RAM).ok_or("it has no main RAM")?;
        let injector = Injector::new(vmm.process()).map_err(|e| text(&e))?;
        let mut stopped = Stopped::check(qmp).map_err(|e| text(&e))?;
        let tracker = Asynchronous::attach(injector, ram, &mut stopped, None).map_err(|e| text(&e))?;
        Ok(Self::Protected(Box::new(tracker), index))
    }

    /// Returns the pages that were written since the last call. The guest must be stopped.
    fn collect(&mut self, qmp: &mut Qmp) -> Result<ChangedPages, String> {
        let mut stopped = Stopped::check(qmp).map_err(|e| e.to_string())?;
        match self {
            Self::SoftDirty(tracker) => {
                let written = tracker.collect(&mut stopped).map_err(|e| e.to_string())?;
                Ok(ChangedPages { written, zero: PageRuns::new() })
            }
            Self::Protected(tracker, index) => {
                let dirty = tracker.collect(&mut stopped).map_err(|e| e.to_string())?;
                let of_ram = |runs: &Vec<PageRuns>| runs.get(*index).cloned().unwrap_or_default();
                Ok(ChangedPages { written: of_ram(&dirty.written), zero: of_ram(&dirty.zero) })
            }
        }
    }

    fn end(self, path: &Path) {
        if let Self::Protected(tracker, _) = self
            && let Err(e) = tracker.detach()
        {
            tracing::warn!("{}: cannot end write tracking in QEMU: {e}", path.display());
        }
    }
}

/// Runs `work` with the guest stopped. If the guest was running, the file `mark` exists during `work`, so that
/// `recover` resumes the guest if this process dies. `mark`: `None` for a guest that is stopped already.
fn with_guest_stopped<T>(
    vmm: &Vmm,
    qmp: &mut Qmp,
    mark: Option<&Path>,
    work: impl FnOnce(&mut Qmp) -> T,
) -> Result<T, RebootError> {
    let Some(mark) = mark else { return Ok(work(qmp)) };
    let failed = |source| RebootError::File { path: mark.to_owned(), source };
    fs::write(mark, []).map_err(failed)?;
    guest::stop(qmp)?;
    fault::point("host.suspend.ahead", Some(vmm), None);
    let done = work(qmp);
    guest::resume(qmp)?;
    fs::remove_file(mark).map_err(failed)?;
    Ok(done)
}
