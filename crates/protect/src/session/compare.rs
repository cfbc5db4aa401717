//! Compares a stopped guest's memory with a checkpoint, to detect pages that a restore would load wrongly.
//!
//! Pages that were written since that checkpoint are known and skipped. If any other page differs, its write was not
//! tracked, or the page is wrong in the store. Pages are *owed* if they were written since the last checkpoint, so that
//! the next one must contain them.

use super::TrackingSession;
use crate::error::CheckpointError;
use crate::event::Comparison;
use crate::runs::{MAX_READ_BYTES, read, runs_of_block};
use rekindle_memory::ram::GuestRam;
use rekindle_memory::tracker::Dirty;
use rekindle_pages::PAGE_SIZE;
use rekindle_store::Image;

/// Maximum number of wrong pages that are named.
const MAX_NAMED_PAGES: usize = 8;

impl TrackingSession {
    /// Stops the guest, compares its memory with `image`, and resumes it. Pages that the guest has written since
    /// `image` are owed to the next checkpoint.
    ///
    /// `image`: the newest checkpoint of this session.
    pub(crate) fn compare(&mut self, image: &Image) -> Result<Comparison, CheckpointError> {
        if self.is_filling() {
            // A missing page would be read as zeros.
            return Err(CheckpointError::Filling { why: "only complete memory can be compared".into() });
        }
        let run_state = self.target.hold_run_state()?;
        let paused = self.monitors.pause(|stopped, laps| {
            self.memory.collect(stopped)?;
            laps.steps.collect = laps.lap();
            let comparison = compare_except(&self.memory.ram, self.memory.owed(), image)?;
            laps.steps.copy = laps.lap();
            Ok::<_, CheckpointError>(comparison)
        })?;
        drop(run_state);
        Ok(Comparison { stopped_us: paused.stopped_us(), ..paused.result })
    }
}

/// Compares all pages except those `written_since` the checkpoint.
fn compare_except(ram: &GuestRam, written_since: &Dirty, image: &Image) -> Result<Comparison, CheckpointError> {
    let mut comparison = Comparison { checkpoint: image.info().number, ..Comparison::default() };
    let mut buffer = Vec::new();
    for (index, block) in ram.blocks().iter().enumerate() {
        let id = &block.info.id;
        let skipped = runs_of_block(&written_since.written, index).union(&runs_of_block(&written_since.zero, index));
        comparison.written_since += skipped.bytes() / PAGE_SIZE as u64;
        let Some(stored_block) = image.block(id) else {
            return Err(CheckpointError::Reshaped(format!("the checkpoint has no block {id}")));
        };
        for runs in skipped.complement(block.info.used).split(MAX_READ_BYTES) {
            read(ram, block, &runs, &mut buffer)?;
            let (contents, _) = buffer.as_chunks::<PAGE_SIZE>();
            let mut contents = contents.iter();
            let page_ids: Vec<_> = runs.numbers().map(|page| (stored_block, page)).collect();
            image.read_many(&page_ids, |(_, page), stored_content| {
                comparison.pages += 1;
                if contents.next() != Some(stored_content) {
                    comparison.wrong += 1;
                    if comparison.named.len() < MAX_NAMED_PAGES {
                        comparison.named.push(format!("{id} page {page}"));
                    }
                }
            })?;
        }
    }
    Ok(comparison)
}
