//! Compares a stopped guest's memory with a checkpoint, to detect pages that a restore would load wrongly.
//!
//! Pages that were written since that checkpoint are known and skipped. If any other page differs, its write was not
//! tracked, or the page is wrong in the store.

use super::{CheckpointError, Tracking, TrackingSession};
use crate::event::Comparison;
use crate::runs::{BATCH, Runs, merged, read};
use rekindle_memory::ram::GuestRam;
use rekindle_memory::tracker::{Dirty, Tracker};
use rekindle_pages::PAGE_SIZE;
use rekindle_store::Image;

/// Maximum number of wrong pages that are named.
const NAMED: usize = 8;

impl TrackingSession {
    /// Stops the guest, compares its memory with `image`, and resumes it. Pages that the guest has written since
    /// `image` are owed to the next checkpoint.
    ///
    /// `image`: the newest checkpoint of this session.
    pub(crate) fn compare(&mut self, image: &Image) -> Result<Comparison, CheckpointError> {
        let run_state = self.target.hold_run_state()?;
        let (ram, owed, tracking, served) = (&self.ram, &mut self.owed, &mut self.tracking, &mut self.served);
        let paused = self.monitors.pause(|stopped, laps| {
            let dirty = match tracking {
                Tracking::Asynchronous(tracker) => tracker.collect(stopped)?,
                Tracking::Synchronous(tracker, _) => tracker.collect(stopped)?,
                // A missing page would be read as zeros.
                Tracking::Filling(_) => {
                    return Err(CheckpointError::Filling { why: "only complete memory can be compared".into() });
                }
            };
            *owed = merged(owed, &dirty);
            *owed = merged(owed, &served.with(dirty, ram)?);
            laps.steps.collect = laps.lap();
            let compared = all_but(ram, owed, image)?;
            laps.steps.copy = laps.lap();
            Ok::<_, CheckpointError>(compared)
        })?;
        drop(run_state);
        let stopped_us = paused.resumed_host_us.saturating_sub(paused.stopped_host_us);
        Ok(Comparison { stopped_us, ..paused.result })
    }
}

/// Compares all pages except those in `owed`.
fn all_but(ram: &GuestRam, owed: &Dirty, image: &Image) -> Result<Comparison, CheckpointError> {
    let mut compared = Comparison { checkpoint: image.info().number, ..Comparison::default() };
    let mut buffer = Vec::new();
    for (index, block) in ram.blocks().iter().enumerate() {
        let get = |runs: &Runs| runs.get(index).cloned().unwrap_or_default();
        let since = get(&owed.written).union(&get(&owed.zero));
        let length = block.info.used;
        compared.written_since += since.bytes() / PAGE_SIZE as u64;
        let Some(position) = image.block(&block.info.id) else {
            return Err(CheckpointError::Reshaped(format!("the checkpoint has no block {}", block.info.id)));
        };
        for batch in since.complement(length).split(BATCH) {
            read(ram, block, &batch, &mut buffer)?;
            let (contents, _) = buffer.as_chunks::<PAGE_SIZE>();
            let ids: Vec<_> = batch.numbers().map(|page| (position, page)).collect();
            let mut ours = contents.iter();
            image.read_many(&ids, |(_, number), theirs| {
                compared.pages += 1;
                if ours.next() != Some(theirs) {
                    compared.wrong += 1;
                    if compared.named.len() < NAMED {
                        compared.named.push(format!("{} page {number}", block.info.id));
                    }
                }
            })?;
        }
    }
    Ok(compared)
}
