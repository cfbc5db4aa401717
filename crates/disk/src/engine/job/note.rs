//! Records moved blocks in the block map: small pieces immediately, large ones after another thread has digested them and the guest has
//! its answer. Blocks that change on the disk in between are not recorded.

use super::{Job, Work};
use crate::block::{BLOCK, whole};
use crate::engine::Engine;
use crate::engine::digest_thread::{DigestedPiece, LARGE, Piece, digests};
use crate::map::Frame;
use crate::memory::Memory;
use crate::request::Range;
use rekindle_kernel::uring::Buffer;
use std::sync::Arc;

/// Adjacent blocks that are still to be recorded, and the guest's frames that hold them.
pub(in crate::engine) struct PendingRecord {
    memory: Arc<Memory>,
    first: u64,
    frames: Vec<Option<Frame>>,
    /// They were written, so that blocks in no frame are forgotten.
    written: bool,
    /// Their content on the disk has changed since, or may have.
    pub stale: bool,
}

impl PendingRecord {
    /// The blocks of part `number` of a job, and the offset of the first in the data. `None`: there are none.
    fn of(job: &Job, number: u32) -> Option<(Self, usize)> {
        let part = job.parts.get(number as usize)?;
        let written = match part.work {
            Work::Write => true,
            Work::Read => false,
            _ => return None,
        };
        let mut blocks = whole(part.at, part.bytes);
        let (first, begin) = blocks.next()?;
        let frames = job.frames(part.offset + begin as u64).take(1 + blocks.count()).collect();
        Some((Self { memory: Arc::clone(&job.memory), first, frames, written, stale: job.stale }, begin))
    }

    /// Whether it has a block of `range`.
    pub fn touches(&self, range: Range) -> bool {
        let touched = crate::block::touched(range.at, range.bytes);
        self.first < touched.end && touched.start < self.first + self.frames.len() as u64
    }
}

impl Engine {
    /// Returns what is to be recorded of a part, before its job ends.
    pub(in crate::engine) fn to_note(&self, number: usize, part: u32) -> Option<(PendingRecord, usize)> {
        self.map.as_ref()?;
        PendingRecord::of(self.jobs.get(number)?, part)
    }

    /// Records blocks whose data begins at byte `at` of the buffer.
    pub(in crate::engine) fn note_moved(&mut self, note: Option<(PendingRecord, usize)>, buffer: Buffer, at: usize) {
        let Some((late, begin)) = note else { return self.put_back(Some(buffer)) };
        let bytes = at + begin..at + begin + late.frames.len() * BLOCK;
        if bytes.len() >= LARGE && !late.stale && self.digest_thread.is_free() {
            let of = self.late.insert(late);
            match self.digest_thread.give(Piece { of, buffer, bytes, digester: self.digester }) {
                Ok(()) => {}
                // The thread has ended: digest on this one.
                Err(piece) => self.noted(piece.digest()),
            }
            return;
        }
        let found = digests(self.digester, buffer.get(bytes).unwrap_or_default());
        self.enter(&late, found);
        self.put_back(Some(buffer));
    }

    fn noted(&mut self, back: DigestedPiece) {
        let DigestedPiece { of, buffer, digests } = back;
        if let Some(late) = self.late.try_remove(of) {
            self.enter(&late, digests.into_iter());
        }
        self.put_back(Some(buffer));
    }

    fn enter(&mut self, late: &PendingRecord, digests: impl Iterator<Item = crate::digest::Digest>) {
        let Some((map, memory)) = &mut self.map else { return };
        let is_ours = Arc::ptr_eq(memory, &late.memory) && !late.stale;
        for (block, (frame, digest)) in (late.first..).zip(late.frames.iter().zip(digests)) {
            match frame {
                Some(frame) if is_ours => map.moved(block, *frame, digest),
                _ if late.written => map.changed(block),
                _ => {}
            }
        }
    }

    /// Records what has been digested.
    pub(in crate::engine) fn note_digested(&mut self) {
        while let Some(back) = self.digest_thread.take_back() {
            self.noted(back);
        }
    }

    /// Waits until everything is recorded, before the map is taken or its memory changes. Takes a few milliseconds at most.
    pub(in crate::engine) fn note_all(&mut self) {
        while !self.late.is_empty()
            && let Some(back) = self.digest_thread.wait_back()
        {
            self.noted(back);
        }
        self.late.clear();
    }
}
