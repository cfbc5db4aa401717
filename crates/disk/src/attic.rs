//! The attic: the memory of the guest's former life, as a cache of its disk (CacheMind, section 3.1).
//!
//! Nobody runs in it any more. A block is given out only if the frame that got it last still has the digest of what is on the disk: what
//! the guest had changed, used again or damaged before it ended has another one (section 3.2, without protecting any page). What was
//! given out is given back to the host at once, so that attic and new memory together are no more than the guest is long.

use crate::block::{BLOCK, Block};
use crate::digest::{Digest, Digester};
use crate::map::{BlockMap, Frame};
use crate::memory::{Files, Memory};
use std::io;

/// Whether blocks are served unchecked (feature `unchecked-attic`): the fault experiment without what keeps the guest from damage.
pub const UNCHECKED: bool = cfg!(feature = "unchecked-attic");
/// Frames that are given back together: 1 MiB.
const TOGETHER: usize = 256;

/// See [the module](self).
#[derive(Debug)]
pub struct Attic {
    files: Files,
    map: BlockMap,
    digester: Digester,
    /// Not needed any more, and still there.
    done: Vec<Frame>,
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
    /// Given up for want of room.
    pub dropped: u64,
}

impl Attic {
    /// Of a guest that has ended: its memory, and what was in it.
    #[must_use]
    pub fn new(memory: &Memory, map: BlockMap, digester: Digester) -> Self {
        Self { files: memory.files(), map, digester, done: Vec::new(), told: Told::default() }
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

    /// What became of the others.
    #[must_use]
    pub fn told(&self) -> Told {
        self.told
    }

    /// Whether it may have a block.
    #[must_use]
    pub fn may_have(&self, block: u64) -> bool {
        self.map.get(block).is_some()
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

    /// The disk gets another content as `block`.
    pub fn changed(&mut self, block: u64) {
        if self.forget(block) {
            self.told.overwritten += 1;
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

    /// Give back what is not needed any more. What cannot be given back stays; it is not used.
    pub fn give_back(&mut self) {
        let mut done = std::mem::take(&mut self.done);
        done.sort_unstable();
        for run in done.chunk_by(|one, next| one + 1 == *next) {
            let Some(first) = run.first() else { continue };
            if let Err(e) = self.punch(*first, run.len() as u64) {
                tracing::debug!("{} frames of the attic from {first} on are not given back: {e}", run.len());
            }
        }
    }

    /// Drop blocks until at most `frames` frames are kept: some of each part of the memory, since which will be wanted is not
    /// known.
    pub fn shrink(&mut self, frames: usize) {
        let have = self.map.len();
        if have <= frames {
            return;
        }
        let mut drop = have - frames;
        let held: Vec<_> = self.map.held().collect();
        let every = have as f64 / drop as f64;
        let mut next = 0.0;
        for (n, (_, block)) in held.into_iter().enumerate() {
            if drop > 0 && n as f64 >= next {
                self.told.dropped += 1;
                self.forget(block);
                (drop, next) = (drop - 1, next + every);
            }
        }
        self.give_back();
    }

    /// Give back every frame that holds no block: most of the former memory, where the guest did not cache much.
    ///
    /// # Errors
    /// The system's; the rest stays.
    pub fn sweep(&mut self) -> io::Result<()> {
        let mut kept = self.map.held().map(|(frame, _)| frame).peekable();
        for (first, bytes) in self.files.ranges() {
            let first = (first / BLOCK as u64) as Frame;
            let end = first + (bytes / BLOCK as u64) as Frame;
            let mut at = first;
            while at < end {
                while kept.next_if(|frame| *frame < at).is_some() {}
                let next = kept.next_if(|frame| *frame < end).unwrap_or(end);
                if next > at {
                    self.punch(at, u64::from(next - at))?;
                }
                at = next + 1;
            }
        }
        Ok(())
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::memory::Region;
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;
    use std::sync::Arc;

    const PAGES: u64 = 256;

    /// A guest with PAGES frames, of which each fourth holds a block: 1000 + its number.
    fn former() -> (Attic, Arc<Memory>, File) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(PAGES * BLOCK as u64).unwrap();
        let region =
            Region { address: 0, bytes: PAGES * BLOCK as u64, file: file.try_clone().unwrap(), offset: 0, front: 0 };
        let memory = Arc::new(Memory::map(vec![region]).unwrap());
        let (mut map, digester) = (BlockMap::new(memory.frames()), Digester::new().unwrap());
        for frame in 0..PAGES {
            memory.write(frame * BLOCK as u64, &content(frame)).unwrap();
            if frame % 4 == 0 {
                map.moved(1000 + frame, frame as Frame, digester.of(&content(frame)));
            }
        }
        (Attic::new(&memory, map, digester), memory, file)
    }

    fn content(frame: u64) -> Block {
        [frame as u8 ^ 0x5a; BLOCK]
    }

    fn there(file: &File) -> u64 {
        file.metadata().unwrap().blocks() * 512 / BLOCK as u64
    }

    #[test]
    fn memory_that_somebody_else_uses_now_is_left_alone() {
        let (mut attic, memory, file) = former();
        assert!(attic.is_in(&memory));
        let other = tempfile::tempfile().unwrap();
        other.set_len(BLOCK as u64).unwrap();
        let region = Region { address: 0, bytes: BLOCK as u64, file: other, offset: 0, front: 0 };
        assert!(!attic.is_in(&Memory::map(vec![region]).unwrap()));
        assert!(attic.take(1000, &mut [0; BLOCK])[0].is_some());
        let before = file.metadata().unwrap().blocks();
        attic.leave();
        assert_eq!(file.metadata().unwrap().blocks(), before);
        let mut found = [0; BLOCK];
        memory.read(0, &mut found).unwrap();
        assert_eq!(found, content(0));
    }

    #[test]
    fn a_block_is_given_once_and_its_frame_goes_back() {
        let (mut attic, _memory, file) = former();
        let mut block = [0; BLOCK];
        assert_eq!(attic.take(1001, &mut block), [None], "it never had it");
        assert!(attic.take(1004, &mut block)[0].is_some());
        assert_eq!(block, content(4));
        assert_eq!(attic.take(1004, &mut block), [None], "a second time");
        attic.give_back();
        assert_eq!((attic.len(), there(&file)), (63, PAGES - 1));
        assert_eq!(attic.told(), Told { served: 1, ..Told::default() });
    }

    #[test]
    fn blocks_that_lie_in_one_piece_are_taken_in_one() {
        let (attic, memory, file) = former();
        let (mut map, digester) = (BlockMap::new(memory.frames()), attic.digester);
        // Two pieces, a gap, one that was changed, and one whose frame there is not.
        for (block, frame) in [(7, 20), (8, 21), (9, 22), (10, 3), (12, 40), (13, 41)] {
            map.moved(block, frame, digester.of(&content(frame.into())));
        }
        memory.write(41 * BLOCK as u64, &[0; BLOCK]).unwrap();
        let mut attic = Attic::new(&memory, map, digester);
        let mut bytes = [0; 8 * BLOCK];
        let found = attic.take(7, &mut bytes);
        let is_there: Vec<_> = found.iter().map(Option::is_some).collect();
        assert_eq!(is_there, [true, true, true, true, false, true, false, false]);
        for (place, frame) in [(0, 20), (1, 21), (2, 22), (3, 3), (5, 40)] {
            assert_eq!(bytes.as_chunks::<BLOCK>().0[place], content(frame), "frame {frame}");
        }
        assert_eq!(attic.told(), Told { served: 5, refused: 1, ..Told::default() });
        assert!(attic.is_empty());
        attic.give_back();
        assert_eq!(there(&file), PAGES - 6);
    }

    #[test]
    fn what_is_not_as_the_disk_is_is_not_given() {
        let (mut attic, memory, _file) = former();
        let mut block = [0; BLOCK];
        // A single bit, somewhere.
        memory.write(8 * 4096 + 2000, &[content(8)[0] ^ 0x10]).unwrap();
        assert_eq!(attic.take(1008, &mut block)[0].is_some(), UNCHECKED);
        attic.changed(1012);
        attic.changed(5);
        assert_eq!(attic.take(1012, &mut block), [None], "the disk has another one now");
        assert_eq!(
            attic.told(),
            Told { refused: u64::from(!UNCHECKED), served: u64::from(UNCHECKED), overwritten: 1, ..Told::default() }
        );
    }

    #[test]
    fn it_shrinks_evenly_and_nothing_but_blocks_is_kept() {
        let (mut attic, _memory, file) = former();
        attic.sweep().unwrap();
        assert_eq!(there(&file), 64, "each fourth frame");
        attic.shrink(16);
        assert_eq!((attic.len(), there(&file), attic.told().dropped), (16, 16, 48));
        let left: Vec<_> = attic.map.held().map(|(frame, _)| frame).collect();
        assert!(left.iter().any(|frame| *frame < 64) && left.iter().any(|frame| *frame > 192), "{left:?}");
        let mut block = [0; BLOCK];
        for frame in left {
            assert!(attic.take(1000 + u64::from(frame), &mut block)[0].is_some());
            assert_eq!(block, content(frame.into()));
        }
        drop(attic);
        assert_eq!(there(&file), 0);
    }
}
