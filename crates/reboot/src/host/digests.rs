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
//!
//! To read the record of writes, a running guest is stopped for milliseconds. While it is stopped, a file, the *paused
//! mark*, exists: if this process dies meanwhile, `rekindle recover` finds the file and resumes the guest. An owner's
//! pause has no such file, and stays.

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
const MAX_REMAINING_BYTES: u64 = 16 << 20;
/// How many rounds may be used to reach [`MAX_REMAINING_BYTES`].
const MAX_ROUNDS: usize = 4;

/// Digests of a running guest's pages, and a record of the pages that the guest has written since.
pub(super) struct EarlyDigests {
    tracker: WriteTracker,
    /// The guest's RAM file.
    ram: PathBuf,
    /// The digest of each page.
    pages: Vec<u64>,
}

/// Tracks the pages that are written from one collection to the next.
enum WriteTracker {
    SoftDirty(SoftDirty),
    /// Tracks all RAM blocks by write protection, of which only one is needed.
    Protected {
        tracker: Box<Asynchronous>,
        main_ram_index: usize,
    },
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
    /// `paused_mark`: as for [`with_guest_stopped`]. Returns `None` if writes to this guest's RAM cannot be tracked. The
    /// guest is then unchanged.
    ///
    /// # Errors
    /// [`RebootError`] if the guest cannot be stopped or resumed, or if its RAM file cannot be read.
    pub(super) fn begin(
        vmm: &Vmm,
        qmp: &mut Qmp,
        hardware: &Hardware,
        paused_mark: Option<&Path>,
    ) -> Result<Option<Self>, RebootError> {
        // A page can have one write record only, and an existing one belongs to a protector.
        let is_protected = leftovers(vmm.process()).is_ok_and(|leftovers| !leftovers.is_empty());
        if is_protected || hardware.disks.iter().any(|disk| disk.server) {
            return Ok(None);
        }
        let ram = &hardware.ram.path;
        let tracker = match with_guest_stopped(vmm, qmp, paused_mark, |qmp| WriteTracker::begin(vmm, qmp, ram))? {
            Ok(tracker) => tracker,
            Err(why) => {
                tracing::debug!("{}: all of its memory is digested with the guest stopped: {why}", hardware.name);
                return Ok(None);
            }
        };
        let mut early = Self { tracker, ram: ram.clone(), pages: Vec::new() };
        match digest::file_pages(ram) {
            Ok(pages) => early.pages = pages,
            Err(e) => {
                early.discard();
                return Err(RebootError::file(ram)(e));
            }
        }
        for _ in 0..MAX_ROUNDS {
            let collected = with_guest_stopped(vmm, qmp, paused_mark, |qmp| early.tracker.collect(qmp))?;
            let written_bytes = collected.as_ref().map_or(0, |changed| changed.written.bytes());
            if let Err(why) = collected.and_then(|changed| early.update(&changed)) {
                tracing::debug!("{}: all of its memory is digested with the guest stopped: {why}", hardware.name);
                early.discard();
                return Ok(None);
            }
            if written_bytes <= MAX_REMAINING_BYTES {
                break;
            }
        }
        Ok(Some(early))
    }

    /// Returns the current digests. The guest must be stopped.
    pub(super) fn finish(mut self, qmp: &mut Qmp) -> Result<Vec<u64>, String> {
        let updated = self.tracker.collect(qmp).and_then(|changed| self.update(&changed));
        self.tracker.end(&self.ram);
        updated.map(|()| self.pages)
    }

    fn update(&mut self, changed: &ChangedPages) -> Result<(), String> {
        digest::zero_pages(&mut self.pages, &changed.zero);
        digest::update_file_pages(&self.ram, &mut self.pages, &changed.written).map_err(|e| e.to_string())
    }

    /// Ends tracking and leaves no trace in QEMU, in which the guest resumes.
    pub(super) fn discard(self) {
        self.tracker.end(&self.ram);
    }
}

impl WriteTracker {
    /// Starts to track writes. `ram`: the guest's RAM file. The guest must be stopped.
    fn begin(vmm: &Vmm, qmp: &mut Qmp, ram: &Path) -> Result<Self, String> {
        let blocks = Arc::new(GuestRam::of(qmp, vmm.process()).map_err(|e| e.to_string())?);
        if is_direct(ram).map_err(|e| e.to_string())? {
            let mut stopped = Stopped::check(qmp).map_err(|e| e.to_string())?;
            let tracker = SoftDirty::attach(&blocks, MAIN_RAM, &mut stopped).map_err(|e| e.to_string())?;
            return Ok(Self::SoftDirty(tracker));
        }
        let main_ram_index =
            blocks.blocks().iter().position(|block| block.info.id == MAIN_RAM).ok_or("it has no main RAM")?;
        let injector = Injector::new(vmm.process()).map_err(|e| e.to_string())?;
        let mut stopped = Stopped::check(qmp).map_err(|e| e.to_string())?;
        let tracker = Asynchronous::attach(injector, blocks, &mut stopped, None).map_err(|e| e.to_string())?;
        Ok(Self::Protected { tracker: Box::new(tracker), main_ram_index })
    }

    /// Returns the pages that were written since the last call. The guest must be stopped.
    fn collect(&mut self, qmp: &mut Qmp) -> Result<ChangedPages, String> {
        let mut stopped = Stopped::check(qmp).map_err(|e| e.to_string())?;
        match self {
            Self::SoftDirty(tracker) => {
                let written = tracker.collect(&mut stopped).map_err(|e| e.to_string())?;
                Ok(ChangedPages { written, zero: PageRuns::new() })
            }
            Self::Protected { tracker, main_ram_index } => {
                let dirty = tracker.collect(&mut stopped).map_err(|e| e.to_string())?;
                let of_main_ram = |runs: &[PageRuns]| runs.get(*main_ram_index).cloned().unwrap_or_default();
                Ok(ChangedPages { written: of_main_ram(&dirty.written), zero: of_main_ram(&dirty.zero) })
            }
        }
    }

    fn end(self, ram: &Path) {
        if let Self::Protected { tracker, .. } = self
            && let Err(e) = tracker.detach()
        {
            tracing::warn!("{}: cannot end write tracking in QEMU: {e}", ram.display());
        }
    }
}

/// Runs `work` with the guest stopped. If the guest was running, the file `paused_mark` exists during `work`, so that
/// `recover` resumes the guest if this process dies. `paused_mark`: `None` for a guest that is stopped already.
fn with_guest_stopped<T>(
    vmm: &Vmm,
    qmp: &mut Qmp,
    paused_mark: Option<&Path>,
    work: impl FnOnce(&mut Qmp) -> T,
) -> Result<T, RebootError> {
    let Some(paused_mark) = paused_mark else { return Ok(work(qmp)) };
    fs::write(paused_mark, []).map_err(RebootError::file(paused_mark))?;
    guest::stop(qmp)?;
    fault::point("host.suspend.ahead", Some(vmm), None);
    let result = work(qmp);
    guest::resume(qmp)?;
    fs::remove_file(paused_mark).map_err(RebootError::file(paused_mark))?;
    Ok(result)
}
