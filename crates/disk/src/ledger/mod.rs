//! The blocks that a guest has touched, that is read or written, until a moment, and whether any of them was written since.
//!
//! For phase-based reboots: a guest's snapshot may be used again while the disk is, for all that the guest can know, as it was at the
//! snapshot. A guest knows a block if it has read or written it. So the ledger records the *touched* blocks from the guest's boot on. A
//! mark keeps those of its moment, and becomes stale with the first request that writes any of them, whatever the data and the result.
//!
//! The ledger exists only in the server's memory, and a mark names its server. When a server ends or is killed, or its host fails, its
//! marks are lost, so that writes by another process in between do not matter. While the server runs, the image is locked
//! ([`crate::image`]).

mod set;

pub use set::Blocks;

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::ops::Range;
use uuid::Uuid;

/// Most marks that are kept; the oldest is dropped first.
const MARKS: usize = 32;

/// The moment of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// The server that has the mark.
    pub server: Uuid,
    /// Number of the mark.
    pub mark: u64,
}

/// Why a moment cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "why", rename_all = "kebab-case")]
pub enum StaleReason {
    /// The mark belongs to another server.
    #[error("the disk's server was restarted since, and writes in between are unknown")]
    Server,
    #[error("the disk's server has {MARKS} newer marks, and has dropped this one")]
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

/// Length of an image, and its modification and change time in ns since 1970.
pub type ImageStamp = (u64, i128, i128);

#[derive(Debug)]
struct LedgerMark {
    number: u64,
    touched: Blocks,
    capacity: u64,
    /// Number of changes until then, and the stamp of the image: it is valid until the next change.
    changes: u64,
    stamp: Option<ImageStamp>,
    written: Option<u64>,
}

/// See [the module](self).
#[derive(Debug)]
pub struct Ledger {
    server: Uuid,
    /// `None`: unknown, because the guest is older than this server.
    touched: Option<Blocks>,
    marks: VecDeque<LedgerMark>,
    next: u64,
    changes: u64,
}

impl Default for Ledger {
    fn default() -> Self {
        Self { server: Uuid::new_v4(), touched: None, marks: VecDeque::new(), next: 1, changes: 0 }
    }
}

impl Ledger {
    /// A guest boots, and has touched nothing yet.
    pub fn begin(&mut self) {
        self.touched = Some(Blocks::default());
    }

    /// Records that the guest reads blocks.
    pub fn reads(&mut self, blocks: Range<u64>) {
        if let Some(touched) = &mut self.touched {
            touched.insert(blocks);
        }
    }

    /// Records that the guest is about to change blocks. Called before the write, which may fail.
    pub fn changes(&mut self, blocks: Range<u64>) {
        self.changes += 1;
        for mark in self.marks.iter_mut().filter(|mark| mark.written.is_none()) {
            mark.written = mark.touched.first_of(&blocks);
        }
        self.reads(blocks);
    }

    /// Number of touched blocks; `None` if unknown.
    #[must_use]
    pub fn touched(&self) -> Option<u64> {
        self.touched.as_ref().map(Blocks::len)
    }

    /// Marks the moment; `None` if the touched blocks are unknown. *Needs:* no request is in progress.
    pub fn mark(&mut self, capacity: u64, stamp: Option<ImageStamp>) -> Option<Moment> {
        let touched = self.touched.clone()?;
        let (number, changes) = (self.next, self.changes);
        self.next += 1;
        if self.marks.len() == MARKS {
            self.marks.pop_front();
        }
        self.marks.push_back(LedgerMark { number, touched, capacity, changes, stamp, written: None });
        Some(Moment { server: self.server, mark: number })
    }

    fn find(&self, moment: Moment, capacity: u64, stamp: Option<ImageStamp>) -> Result<&LedgerMark, StaleReason> {
        if moment.server != self.server {
            return Err(StaleReason::Server);
        }
        let mark = self.marks.iter().find(|mark| mark.number == moment.mark).ok_or(StaleReason::Dropped)?;
        match *mark {
            LedgerMark { written: Some(block), .. } => Err(StaleReason::Written { block }),
            LedgerMark { capacity: then, .. } if then != capacity => Err(StaleReason::Resized { then, now: capacity }),
            LedgerMark { changes, stamp: then, .. }
                if changes == self.changes && (then != stamp || stamp.is_none()) =>
            {
                Err(StaleReason::Foreign)
            }
            _ => Ok(mark),
        }
    }

    /// Checks whether a guest of that moment may continue.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self, moment: Moment, capacity: u64, stamp: Option<ImageStamp>) -> Result<(), StaleReason> {
        self.find(moment, capacity, stamp).map(drop)
    }

    /// As [`Self::check`], and the next guest continues from that moment: it has touched the same blocks.
    ///
    /// # Errors
    /// Why not; nothing has changed then.
    pub fn resume(&mut self, moment: Moment, capacity: u64, stamp: Option<ImageStamp>) -> Result<(), StaleReason> {
        self.touched = Some(self.find(moment, capacity, stamp)?.touched.clone());
        Ok(())
    }
}

#[cfg(test)]
mod tests;
