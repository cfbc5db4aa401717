//! Policy `cow`: the guest has resumed, and each page of the checkpoint is copied before the guest may change it.
//!
//! Two threads copy: this one in the order of memory, and the tracker's thread each page that the guest is about to
//! write.

use crate::error::CheckpointError;
use crate::runs::{CopiedPages, MAX_READ_BYTES, read, send};
use rekindle_memory::ram::{GuestRam, GuestRamError};
use rekindle_memory::tracker::{Synchronous, TrackError};
use rekindle_pages::{BlockId, PageRuns};
use rekindle_store::Checkpoint;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How long faults that are being served may take to end.
const FAULTS_TIMEOUT: Duration = Duration::from_secs(5);
const FAULTS_POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Pages that the tracker's thread has copied because the guest was about to write them.
#[derive(Debug, Clone, Default)]
pub(super) struct CopiesForWrites(Arc<Mutex<Copies>>);

#[derive(Debug, Default)]
struct Copies {
    pages: Vec<CopiedPages>,
    failure: Option<GuestRamError>,
}

impl CopiesForWrites {
    fn lock(&self) -> MutexGuard<'_, Copies> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the callback that copies a page before the guest writes it.
    pub fn into_callback(self) -> impl FnMut(&GuestRam, BlockId, Range<u64>) + Send + use<> {
        move |ram: &GuestRam, id: BlockId, page: Range<u64>| {
            let Some(block) = ram.block(id) else { return };
            let mut bytes = vec![0; (page.end - page.start) as usize];
            match ram.read(block, std::slice::from_ref(&page), &mut bytes) {
                Ok(()) => self.lock().pages.push(CopiedPages { block: id, runs: PageRuns::from(page), bytes }),
                Err(e) => {
                    self.lock().failure.get_or_insert(e);
                }
            }
        }
    }

    /// Removes and returns all copied pages.
    fn take(&self) -> Result<Vec<CopiedPages>, CheckpointError> {
        let Copies { pages, failure } = std::mem::take(&mut *self.lock());
        failure.map_or(Ok(pages), |e| Err(CheckpointError::NotCopied(e)))
    }
}

/// Sends all pages that `tracker` still protects for the checkpoint. Returns the number of pages that were copied
/// because the guest was about to write them.
pub(super) fn send_protected_pages(
    tracker: &Synchronous,
    copies: &CopiesForWrites,
    ram: &GuestRam,
    checkpoint: &mut Checkpoint<'_>,
    buffer: &mut Vec<u8>,
) -> Result<u64, CheckpointError> {
    while let Some(claim) = tracker.claim(MAX_READ_BYTES) {
        let Some(block) = ram.block(claim.block) else { continue };
        read(ram, block, &claim.runs, buffer)?;
        let (id, runs) = (claim.block, claim.runs.clone());
        // From here on the guest may write the claimed pages.
        drop(claim);
        send(checkpoint, id, &runs, buffer)?;
    }
    wait_all_copied(tracker)?;
    let copied = copies.take()?;
    for pages in &copied {
        send(checkpoint, pages.block, &pages.runs, &pages.bytes)?;
    }
    Ok(copied.len() as u64)
}

/// Releases all blocked writers of a checkpoint that has failed.
pub(super) fn release_writers(tracker: &Synchronous, copies: &CopiesForWrites) {
    while let Some(claim) = tracker.claim(u64::MAX) {
        drop(claim);
    }
    let _ = wait_all_copied(tracker);
    *copies.lock() = Copies::default();
}

/// Waits until all pages are copied: a page whose fault is being served counts as not copied for some microseconds
/// after the last claim.
fn wait_all_copied(tracker: &Synchronous) -> Result<(), TrackError> {
    let deadline = Instant::now() + FAULTS_TIMEOUT;
    loop {
        match tracker.check_all_copied() {
            Err(TrackError::InFlight { .. }) if Instant::now() < deadline => thread::sleep(FAULTS_POLL_INTERVAL),
            result => return result,
        }
    }
}
