//! The blocks that a guest has touched (read or written) until a moment, and whether any of them was written since.
//!
//! For phase-based reboots: a guest's snapshot may be used again while the guest cannot notice that the disk differs
//! from its state at the snapshot. A guest knows a block if it has read or written it. So the ledger records the
//! *touched* blocks from the guest's boot on. A mark keeps the blocks that were touched until its moment. It becomes
//! stale with the first request that writes any of them, whatever the data and the result.
//!
//! ```text
//! boot ──── reads and writes ──── mark ──── reads and writes ──── check: stale if a block that was touched
//!           touched blocks        keeps a copy                    before the mark was written after it,
//!                                 of them                         or if the image shows another change
//! ```
//!
//! The ledger exists only in the server's memory, and a mark names its server. When a server ends or is killed, or
//! its host fails, its marks are lost, so that writes by another process in between do not matter. While the server
//! runs, the image is locked ([`crate::image`]).

mod block_set;

pub use block_set::BlockSet;

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::ops::Range;
use uuid::Uuid;

/// Most marks that are kept; the oldest is dropped first.
const MAX_MARKS: usize = 32;

/// The moment of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// The server that has the mark.
    pub server: Uuid,
    /// Number of the mark.
    pub mark: u64,
}

/// The reason why a moment cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "why", rename_all = "kebab-case")]
pub enum StaleReason {
    /// The mark belongs to another server.
    #[error("the disk's server was restarted since, and writes in between are unknown")]
    Server,
    #[error("the disk's server has {MAX_MARKS} newer marks, and has dropped this one")]
    Dropped,
    /// A block that the guest had touched was written, or a write of it was attempted.
    #[error("block {block} of 4 KiB, which the guest had read or written until then, was written since")]
    Written {
        /// The first such block.
        block: u64,
    },
    /// The disk has another length.
    #[error("the disk is {now} bytes long, but was {then} then")]
    Resized {
        /// Bytes at the mark.
        then: u64,
        /// Bytes now.
        now: u64,
    },
    /// Another process has changed the image.
    #[error("the image was changed by another process than the guest, or its redo log was started or ended")]
    Foreign,
}

/// Evidence that a process has changed an image: the image's length, and its times in ns since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageStamp {
    pub bytes: u64,
    pub modified_ns: i128,
    pub changed_ns: i128,
}

/// The state of a disk's image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageState {
    /// Bytes of the disk.
    pub capacity: u64,
    /// `None`: the stamp cannot be read, so a change by another process cannot be excluded.
    pub stamp: Option<ImageStamp>,
}

/// The guest and the disk at a moment.
#[derive(Debug)]
struct LedgerMark {
    number: u64,
    /// The blocks that the guest had touched.
    touched: BlockSet,
    image: ImageState,
    /// Number of the guest's writes until the mark.
    write_count: u64,
    /// The first of the touched blocks that was written since.
    overwritten_block: Option<u64>,
}

impl LedgerMark {
    /// Checks that the guest of this mark cannot notice any difference between the disk at the mark and the disk now.
    /// `write_count`: number of the guest's writes until now.
    fn check_unchanged(&self, image: &ImageState, write_count: u64) -> Result<(), StaleReason> {
        if let Some(block) = self.overwritten_block {
            return Err(StaleReason::Written { block });
        }
        if self.image.capacity != image.capacity {
            return Err(StaleReason::Resized { then: self.image.capacity, now: image.capacity });
        }
        // A write of the guest changes the image's times, too. Until the guest writes, only another process can have
        // changed them.
        let is_stamp_valid = self.write_count == write_count;
        let is_same_stamp = self.image.stamp.is_some() && self.image.stamp == image.stamp;
        if is_stamp_valid && !is_same_stamp {
            return Err(StaleReason::Foreign);
        }
        Ok(())
    }
}

/// The record of one disk's touched blocks, and its marks.
#[derive(Debug)]
pub struct Ledger {
    server: Uuid,
    /// The blocks that the guest has touched since its boot. `None`: unknown, because the guest is older than this
    /// server.
    touched: Option<BlockSet>,
    /// Marks by number, the oldest first.
    marks: VecDeque<LedgerMark>,
    next_mark: u64,
    /// Number of the guest's writes.
    write_count: u64,
}

impl Default for Ledger {
    fn default() -> Self {
        Self { server: Uuid::new_v4(), touched: None, marks: VecDeque::new(), next_mark: 1, write_count: 0 }
    }
}

impl Ledger {
    /// Records that a guest boots, which has touched nothing yet.
    pub fn start_boot(&mut self) {
        self.touched = Some(BlockSet::default());
    }

    /// Records that the guest reads blocks.
    pub fn record_read(&mut self, blocks: Range<u64>) {
        if let Some(touched) = &mut self.touched {
            touched.insert(blocks);
        }
    }

    /// Records that the guest is about to write blocks. Called before the write, which may fail.
    pub fn record_write(&mut self, blocks: Range<u64>) {
        self.write_count += 1;
        for mark in self.marks.iter_mut().filter(|mark| mark.overwritten_block.is_none()) {
            mark.overwritten_block = mark.touched.first_in(&blocks);
        }
        // A guest knows the blocks that it has written.
        self.record_read(blocks);
    }

    /// Returns the number of touched blocks; `None` if unknown.
    #[must_use]
    pub fn touched_count(&self) -> Option<u64> {
        self.touched.as_ref().map(BlockSet::len)
    }

    /// Marks the moment; `None` if the touched blocks are unknown. *Needs:* no request is in progress.
    pub fn mark(&mut self, image: ImageState) -> Option<Moment> {
        let touched = self.touched.clone()?;
        if self.marks.len() == MAX_MARKS {
            self.marks.pop_front();
        }
        let number = self.next_mark;
        self.next_mark += 1;
        let write_count = self.write_count;
        self.marks.push_back(LedgerMark { number, touched, image, write_count, overwritten_block: None });
        Some(Moment { server: self.server, mark: number })
    }

    /// Returns the mark of a moment from which a guest may continue.
    fn valid_mark(&self, moment: Moment, image: &ImageState) -> Result<&LedgerMark, StaleReason> {
        if moment.server != self.server {
            return Err(StaleReason::Server);
        }
        let mark = self.marks.iter().find(|mark| mark.number == moment.mark).ok_or(StaleReason::Dropped)?;
        mark.check_unchanged(image, self.write_count)?;
        Ok(mark)
    }

    /// Checks whether a guest of that moment may continue on the disk as it is now.
    ///
    /// # Errors
    /// The reason why the guest may not continue.
    pub fn check(&self, moment: Moment, image: &ImageState) -> Result<(), StaleReason> {
        self.valid_mark(moment, image).map(drop)
    }

    /// Checks the moment like [`Self::check`], and lets the next guest continue from it: that guest has touched the
    /// same blocks.
    ///
    /// # Errors
    /// The reason why the guest may not continue. Nothing has changed then.
    pub fn resume(&mut self, moment: Moment, image: &ImageState) -> Result<(), StaleReason> {
        self.touched = Some(self.valid_mark(moment, image)?.touched.clone());
        Ok(())
    }
}

#[cfg(test)]
mod tests;
