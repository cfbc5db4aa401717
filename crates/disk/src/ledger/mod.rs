//! What a guest has touched of its disk until a moment, and whether any of it has been changed since.
//!
//! For phase-based reboots: a snapshot of a guest may be used again while the disk is, for all that the guest can know of it, what it
//! was at the snapshot. A guest knows of a block what it has read of it, and what it has written to it. So the ledger keeps the
//! blocks that were *touched*, read or written, from the guest's start on; a mark keeps those of its moment, and is void from the
//! first request on that writes any of them, whatever it writes and whatever becomes of it.
//!
//! It is in the memory of the server and nowhere else, and a mark names the server that has it. A server that was ended or killed, and
//! a host that has died, take their marks with them: what may have been written meanwhile by anybody else is never asked. While it is there,
//! the image is locked against others ([`crate::image`]).

mod set;

pub use set::Blocks;

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::ops::Range;
use uuid::Uuid;

/// Marks that are kept; for more the oldest goes.
const MARKS: usize = 32;

/// The moment at which a snapshot was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// The server that has the mark.
    pub server: Uuid,
    /// Its number there.
    pub mark: u64,
}

/// Why a mark is none, or void.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "why", rename_all = "kebab-case")]
pub enum Void {
    /// It is of another server.
    #[error("the disk's server is another one since, and what was written in between is not known")]
    Server,
    /// It has been dropped.
    #[error("the disk's server has {MARKS} newer marks, and has dropped this one")]
    Dropped,
    /// A block that the guest had touched has another content, or may have.
    #[error("block {block} of 4 KiB, which the guest had read or written until then, was written since")]
    Written {
        /// The first such block that was written.
        block: u64,
    },
    /// It is longer or shorter.
    #[error("the disk is {now} bytes long, and was {then}")]
    Resized {
        /// Bytes at the mark.
        then: u64,
        /// Bytes now.
        now: u64,
    },
    /// Somebody else has changed the image.
    #[error("the image was changed by somebody else than the guest, or its redo log has begun or ended")]
    Foreign,
}

/// What an image looked like from outside: length, modification and change time in ns since 1970.
pub type Look = (u64, i128, i128);

#[derive(Debug)]
struct Mark {
    number: u64,
    touched: Blocks,
    capacity: u64,
    /// Changes that were begun until then, and what the image looked like. As long as no more were begun, it looks the same.
    changes: u64,
    look: Option<Look>,
    written: Option<u64>,
}

/// See [the module](self).
#[derive(Debug)]
pub struct Ledger {
    server: Uuid,
    /// None: what the guest had touched before this server came is not known.
    touched: Option<Blocks>,
    marks: VecDeque<Mark>,
    next: u64,
    changes: u64,
}

impl Default for Ledger {
    fn default() -> Self {
        Self { server: Uuid::new_v4(), touched: None, marks: VecDeque::new(), next: 1, changes: 0 }
    }
}

impl Ledger {
    /// A guest begins that has touched nothing yet.
    pub fn begin(&mut self) {
        self.touched = Some(Blocks::default());
    }

    /// The guest reads blocks.
    pub fn reads(&mut self, blocks: Range<u64>) {
        if let Some(touched) = &mut self.touched {
            touched.insert(blocks);
        }
    }

    /// The guest is about to change blocks. To be told before it is done, and also if it then fails.
    pub fn changes(&mut self, blocks: Range<u64>) {
        self.changes += 1;
        for mark in self.marks.iter_mut().filter(|mark| mark.written.is_none()) {
            mark.written = mark.touched.first_of(&blocks);
        }
        self.reads(blocks);
    }

    /// How many blocks the guest has touched; none: that is not known.
    #[must_use]
    pub fn touched(&self) -> Option<u64> {
        self.touched.as_ref().map(Blocks::len)
    }

    /// Mark the moment; `None` if it is not known what the guest has touched. *Needs:* that nothing is under way.
    pub fn mark(&mut self, capacity: u64, look: Option<Look>) -> Option<Moment> {
        let touched = self.touched.clone()?;
        let (number, changes) = (self.next, self.changes);
        self.next += 1;
        if self.marks.len() == MARKS {
            self.marks.pop_front();
        }
        self.marks.push_back(Mark { number, touched, capacity, changes, look, written: None });
        Some(Moment { server: self.server, mark: number })
    }

    fn find(&self, moment: Moment, capacity: u64, look: Option<Look>) -> Result<&Mark, Void> {
        if moment.server != self.server {
            return Err(Void::Server);
        }
        let mark = self.marks.iter().find(|mark| mark.number == moment.mark).ok_or(Void::Dropped)?;
        match *mark {
            Mark { written: Some(block), .. } => Err(Void::Written { block }),
            Mark { capacity: then, .. } if then != capacity => Err(Void::Resized { then, now: capacity }),
            Mark { changes, look: then, .. } if changes == self.changes && (then != look || look.is_none()) => {
                Err(Void::Foreign)
            }
            _ => Ok(mark),
        }
    }

    /// Whether a guest of that moment may go on from here.
    ///
    /// # Errors
    /// [`Void`]: why not.
    pub fn check(&self, moment: Moment, capacity: u64, look: Option<Look>) -> Result<(), Void> {
        self.find(moment, capacity, look).map(drop)
    }

    /// The same, and the next guest is one of that moment: it has touched what that had.
    ///
    /// # Errors
    /// [`Void`]; then nothing has changed.
    pub fn go_on(&mut self, moment: Moment, capacity: u64, look: Option<Look>) -> Result<(), Void> {
        self.touched = Some(self.find(moment, capacity, look)?.touched.clone());
        Ok(())
    }
}

#[cfg(test)]
mod tests;
