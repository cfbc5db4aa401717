//! A guest's memory, and which of its pages the next checkpoint must contain.
//!
//! A page is *dirty* if it was written since the last checkpoint. While a restore still fills the memory, the *pager*
//! (the process that loads it) has the record of written pages: the *write record* ([`crate::write_record`]).

use super::cow;
use super::disk_servers::DiskServers;
use super::tracking::{StartedTracking, Tracking};
use crate::error::CheckpointError;
use crate::pause::LapTimer;
use crate::runs::{CopiedPages, copy_pages, merged, no_pages, send_from_guest, send_zeroes};
use rekindle_memory::ram::GuestRam;
use rekindle_memory::tracker::{Asynchronous, Dirty};
use rekindle_pages::{BlockId, PAGE_SIZE};
use rekindle_qemu::stopped::Stopped;
use rekindle_store::Checkpoint;
use rekindle_vm::fault;
use std::os::fd::RawFd;
use std::sync::Arc;

/// The memory of a guest, with the records of writes to it.
pub(super) struct TrackedMemory {
    pub ram: Arc<GuestRam>,
    pub tracking: Tracking,
    disk_servers: DiskServers,
    /// Pages that were collected since the last commit: the next checkpoint must contain them.
    owed: Dirty,
    /// All of the memory is owed.
    all_owed: bool,
}

/// How a stopped guest's pages are collected.
#[derive(Debug, Clone, Copy)]
pub(super) struct CollectOptions {
    /// The owed pages were sent while the guest ran.
    pub were_sent: bool,
    /// A restore has loaded all pages: track the memory without its pager from now on.
    pub end_pager: bool,
    /// The descriptor number of `/dev/userfaultfd` in QEMU, if `end_pager` needs it.
    pub device: Option<RawFd>,
}

/// The pages that were collected while the guest was stopped.
pub(super) struct CollectedPages {
    pub dirty: Dirty,
    /// The content of the written pages in `dirty`; empty with policy `cow`, which copies them later.
    pub copied: Vec<CopiedPages>,
    /// The tracker that replaces a pager's write record.
    pub own_tracker: Option<Asynchronous>,
}

impl TrackedMemory {
    pub fn new(
        ram: Arc<GuestRam>,
        started: StartedTracking,
        disk_servers: DiskServers,
    ) -> Result<Self, CheckpointError> {
        let StartedTracking { mut tracking, is_incremental } = started;
        // Unrecorded writes of the disk servers may be in any page.
        let is_incremental = is_incremental && disk_servers.record_is_complete;
        let owed = match (&mut tracking, is_incremental) {
            (Tracking::Filling(tracker), true) => tracker.all_of_other_blocks()?,
            (Tracking::Filling(tracker), false) => tracker.everything()?,
            (_, true) => no_pages(&ram),
            (_, false) => Dirty::everything(&ram)?,
        };
        Ok(Self { ram, tracking, disk_servers, owed, all_owed: !is_incremental })
    }

    pub fn owed(&self) -> &Dirty {
        &self.owed
    }

    /// Returns whether the next checkpoint contains all of the memory, not only changes.
    pub fn is_all_owed(&self) -> bool {
        self.all_owed
    }

    /// Records that a checkpoint with all owed pages was committed.
    pub fn note_commit(&mut self) {
        self.owed = no_pages(&self.ram);
        self.all_owed = false;
    }

    /// Collects the pages that were written since the last collection, and adds them to the owed pages.
    pub fn collect(&mut self, stopped: &mut Stopped<'_>) -> Result<Dirty, CheckpointError> {
        let written = self.tracking.collect(stopped)?;
        self.owe(written)
    }

    /// Adds `written` to the owed pages, with the pages that disk servers have written. Returns both.
    fn owe(&mut self, mut written: Dirty) -> Result<Dirty, CheckpointError> {
        if fault::forgets_page() {
            forget_page(&mut written);
        }
        // Collected pages stay owed even if a disk server fails.
        self.owed = merged(&self.owed, &written);
        if self.disk_servers.is_empty() {
            return Ok(written);
        }
        let written = self.disk_servers.add_written(written, &self.ram)?;
        self.owed = merged(&self.owed, &written);
        Ok(written)
    }

    /// Collects the pages of a checkpoint while the guest is stopped. Copies them, or starts to protect them (`cow`).
    pub fn collect_stopped(
        &mut self,
        options: CollectOptions,
        stopped: &mut Stopped<'_>,
        laps: &mut LapTimer,
    ) -> Result<CollectedPages, CheckpointError> {
        let mut own_tracker = None;
        let written = match &mut self.tracking {
            Tracking::Filling(tracker) if options.end_pager => {
                fault::point("fill.handover.stopped", None, None);
                let (written, tracker) = tracker.hand_over(stopped, options.device)?;
                fault::point("fill.handover.tracked", None, None);
                own_tracker = Some(tracker);
                written
            }
            Tracking::Filling(tracker) => {
                let written = tracker.collect(stopped)?;
                fault::point("fill.checkpoint.collected", None, None);
                written
            }
            tracking => tracking.collect(stopped)?,
        };
        let written = self.owe(written)?;
        laps.steps.collect = laps.lap();
        let (dirty, copied) = if let Tracking::Synchronous { tracker, .. } = &self.tracking {
            tracker.begin(&self.owed.written, stopped)?;
            (self.owed.clone(), Vec::new())
        } else {
            // Pages that were sent before the pause have not changed since, or they are in `written`.
            let dirty = if options.were_sent { written } else { self.owed.clone() };
            let copied = copy_pages(&self.ram, &dirty.written)?;
            (dirty, copied)
        };
        laps.steps.copy = laps.lap();
        Ok(CollectedPages { dirty, copied, own_tracker })
    }

    /// Sends `dirty` pages from the guest's memory. Returns their size in bytes.
    pub fn send(
        &self,
        checkpoint: &mut Checkpoint<'_>,
        dirty: &Dirty,
        store_is_empty: bool,
    ) -> Result<u64, CheckpointError> {
        for ((index, block), runs) in self.ram.blocks().iter().enumerate().zip(&dirty.written) {
            send_from_guest(checkpoint, BlockId(index), runs, &self.ram, block)?;
        }
        if !store_is_empty {
            send_zeroes(checkpoint, &dirty.zero)?;
        }
        Ok(dirty.bytes())
    }

    /// Releases all blocked writers after a failure. Their pages stay owed.
    pub fn release_writers(&self) {
        if let Tracking::Synchronous { tracker, copies } = &self.tracking {
            cow::release_writers(tracker, copies);
        }
    }

    /// Removes all traces of the tracking from QEMU and from the disk servers.
    pub fn detach(self) -> Result<(), CheckpointError> {
        self.tracking.detach()?;
        self.disk_servers.stop_recording();
        Ok(())
    }
}

/// Drops the first written page.
fn forget_page(dirty: &mut Dirty) {
    for runs in &mut dirty.written {
        if let Some(first) = runs.first().map(|run| run.start..run.start + PAGE_SIZE as u64) {
            *runs = runs.difference(std::slice::from_ref(&first));
            return;
        }
    }
}
