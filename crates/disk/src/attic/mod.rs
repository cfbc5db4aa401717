//! The attic: the memory of the guest's former life, as a cache of its disk (CacheMind, section 3.1).
//!
//! Nobody runs in it any more. A block is given out only if the frame that got it last still has the digest of what is on the disk: what
//! the guest had changed, used again or damaged before it ended has another one (section 3.2, without protecting any page). What was
//! given out is given back to the host at once, so that attic and new memory together are no more than the guest is long.
//!
//! A VM with several disks has an attic in each of their servers, all in one memory: a frame is given back when none of them needs it
//! (`claim`). That alone is what they have in common; what is served rests on the digest.
//!
//! A guest that starts another kernel by kexec stays in its memory, and no frame of it may be given back. What the former kernel had cached lies
//! there until the new one uses the frames, and is served in the same way ([`Attic::of_guest`]).

mod claim;
mod tend;
#[cfg(test)]
mod tests;

use crate::block::{BLOCK, Block};
use crate::digest::{Digest, Digester};
use crate::map::{BlockMap, Frame};
use crate::memory::{Files, Memory};
use claim::Claim;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use tend::Tending;

/// Whether blocks are served unchecked (feature `unchecked-attic`): the fault experiment without what keeps the guest from damage.
pub const UNCHECKED: bool = cfg!(feature = "unchecked-attic");
/// Frames that are given back together: 1 MiB.
const TOGETHER: usize = 256;

/// Who else needs frames of the memory.
#[derive(Debug)]
enum Others {
    /// Not told yet: nothing is given back.
    Unknown,
    /// A guest runs in it: nothing is ever given back.
    Guest,
    /// These, and nobody else.
    Known(Vec<Claim>),
}

/// See [the module](self).
#[derive(Debug)]
pub struct Attic {
    files: Files,
    /// Which memory that is, for the servers of the other disks.
    identity: u64,
    map: BlockMap,
    digester: Digester,
    /// The frames of the map.
    own: Claim,
    others: Others,
    /// Not needed any more, and not given back.
    done: Vec<Frame>,
    tending: Tending,
    is_given_up: bool,
    told: Told,
}

/// What became of its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Told {
    /// Given to the guest.
    pub served: u64,
    /// They had another digest: changed, used again or damaged.
    pub refused: u64,
    /// The disk got another content meanwhile.
    pub overwritten: u64,
    /// Given up: for want of room, after a time, or because somebody has asked for it.
    pub dropped: u64,
}

impl Attic {
    /// Of a guest that has ended: its memory, and what was in it. `claim`: other servers have attics in the same memory, and see there
    /// which frames this one needs; nothing is given back until [`Attic::share`].
    ///
    /// # Errors
    /// The system's.
    pub fn new(memory: &Memory, map: BlockMap, digester: Digester, claim: Option<&Path>) -> io::Result<Self> {
        let (files, identity) = (memory.files(), memory.identity());
        let own = match claim {
            Some(path) => Claim::at(path, identity, map.frames())?,
            None => Claim::alone(map.frames())?,
        };
        map.held().for_each(|(frame, _)| own.need(frame));
        let others = if claim.is_some() { Others::Unknown } else { Others::Known(Vec::new()) };
        let (done, tending, is_given_up, told) = (Vec::new(), Tending::new(), false, Told::default());
        Ok(Self { files, identity, map, digester, own, others, done, tending, is_given_up, told })
    }

    /// Of a guest that runs on in its memory, with another kernel.
    ///
    /// # Errors
    /// The system's.
    pub fn of_guest(memory: &Memory, map: BlockMap, digester: Digester) -> io::Result<Self> {
        let mut attic = Self::new(memory, map, digester, None)?;
        attic.others = Others::Guest;
        Ok(attic)
    }

    /// Have others see at `path` what it needs. One that they see already stays as it is.
    ///
    /// # Errors
    /// The system's.
    pub fn publish(&mut self, path: &Path) -> io::Result<()> {
        if !self.own.is_shared() {
            let own = Claim::at(path, self.identity, self.map.frames())?;
            self.map.held().for_each(|(frame, _)| own.need(frame));
            (self.own, self.others) = (own, Others::Unknown);
        }
        Ok(())
    }

    /// All others that have an attic in this memory have said at `paths` what they need: what nobody needs is given back from here on.
    ///
    /// # Errors
    /// The system's; nothing has changed.
    pub fn share(&mut self, paths: &[PathBuf]) -> io::Result<()> {
        let others = paths.iter().map(|path| Claim::of_another(path, self.identity));
        let others = others.collect::<io::Result<Vec<_>>>()?;
        self.others = Others::Known(others.into_iter().flatten().collect());
        self.tending.sweep_again();
        Ok(())
    }

    /// Whether it still waits for [`Attic::share`].
    #[must_use]
    pub fn is_unshared(&self) -> bool {
        matches!(self.others, Others::Unknown)
    }

    /// Whether a guest runs in its memory.
    #[must_use]
    pub fn is_of_guest(&self) -> bool {
        matches!(self.others, Others::Guest)
    }

    /// Which memory it is in: [`Memory::identity`].
    #[must_use]
    pub fn identity(&self) -> u64 {
        self.identity
    }

    /// Blocks that it may have.
    #[must_use]
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Whether nobody is to have anything of it any more.
    #[must_use]
    pub fn is_given_up(&self) -> bool {
        self.is_given_up
    }

    /// What became of the others.
    #[must_use]
    pub fn told(&self) -> Told {
        self.told
    }

    /// Take the blocks from `first` on out, as many as fit into `into`: for each its digest, if it is what is on the disk. Either way they are
    /// not here any more.
    pub fn take(&mut self, first: u64, into: &mut [u8]) -> Vec<Option<Digest>> {
        let blocks = into.as_chunks_mut::<BLOCK>().0;
        let known: Vec<_> = (first..).zip(blocks.iter()).map(|(block, _)| self.map.take(block)).collect();
        let mut found = Vec::with_capacity(known.len());
        let mut rest: &mut [Block] = blocks;
        // What lies in one piece is read in one.
        for run in known.chunk_by(|one, next| match (one, next) {
            (Some((one, _)), Some((next, _))) => one + 1 == *next,
            (one, next) => one.is_none() && next.is_none(),
        }) {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(run.len());
            rest = later;
            let begin = run.first().copied().flatten();
            let is_there = begin.is_some_and(|(frame, _)| {
                self.files.read(u64::from(frame) * BLOCK as u64, now.as_flattened_mut()).is_some()
            });
            for (block, known) in now.iter().zip(run) {
                let Some((frame, digest)) = *known else {
                    found.push(None);
                    continue;
                };
                // What is digested is the copy that the guest gets.
                let content = self.digester.of(block);
                let is_right = is_there && (content == digest || UNCHECKED);
                if is_right {
                    self.told.served += 1;
                } else {
                    self.told.refused += 1;
                }
                found.push(is_right.then_some(content));
                self.done.push(frame);
            }
        }
        if self.done.len() >= TOGETHER {
            self.give_back();
        }
        found
    }

    /// The disk gets another content as these blocks.
    pub fn changed(&mut self, blocks: Range<u64>) {
        let (mut done, before) = (std::mem::take(&mut self.done), self.map.len());
        self.map.take_all(blocks, |frame| done.push(frame));
        self.done = done;
        self.told.overwritten += (before - self.map.len()) as u64;
        if self.done.len() >= TOGETHER {
            self.give_back();
        }
    }

    fn forget(&mut self, block: u64) -> bool {
        let Some((frame, _)) = self.map.take(block) else { return false };
        self.done.push(frame);
        if self.done.len() >= TOGETHER {
            self.give_back();
        }
        true
    }

    /// Give back what is not needed any more, but for what others need. What cannot be given back stays; it is not used.
    pub fn give_back(&mut self) {
        if matches!(self.others, Others::Unknown) {
            return;
        }
        let mut done = std::mem::take(&mut self.done);
        if self.is_of_guest() {
            return;
        }
        // First all are let go of, then it is looked who else has not: whoever is last sees that.
        done.iter().for_each(|frame| self.own.let_go(*frame));
        done.retain(|frame| self.needed(*frame as usize / 64) >> (frame % 64) & 1 == 0);
        done.sort_unstable();
        for run in done.chunk_by(|one, next| one + 1 == *next) {
            let Some(first) = run.first() else { continue };
            if let Err(e) = self.punch(*first, run.len() as u64) {
                tracing::debug!("{} frames of the attic from {first} on are not given back: {e}", run.len());
            }
        }
    }

    /// Frames 64 * `word` and up that any server needs.
    fn needed(&self, word: usize) -> u64 {
        let others = match &self.others {
            Others::Unknown | Others::Guest => &[][..],
            Others::Known(others) => others,
        };
        others.iter().fold(self.own.word(word), |needed, other| needed | other.word(word))
    }

    /// Give it up and leave its memory as it is: somebody else uses that now.
    pub fn leave(mut self) {
        self.done.clear();
    }

    /// Whether it is in a file of `memory`.
    #[must_use]
    pub fn is_in(&self, memory: &Memory) -> bool {
        self.files.shares(memory)
    }

    fn punch(&self, frame: Frame, frames: u64) -> io::Result<()> {
        self.files.punch(u64::from(frame) * BLOCK as u64, frames * BLOCK as u64)
    }
}

impl Drop for Attic {
    fn drop(&mut self) {
        self.give_back();
    }
}
