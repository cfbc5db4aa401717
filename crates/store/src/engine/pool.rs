//! The segments that a writer knows, and what in them is needed.

use crate::disk::DiskFile;
use crate::format::ALIGNMENT;
use crate::format::base::Place;
use crate::format::manifest::Extent;
use crate::format::segment::{HEADER_LEN, RECORD_LEN};
use std::sync::Arc;

/// Bytes that a record takes.
pub(crate) fn cost(len: u16) -> u64 {
    u64::from(len) + RECORD_LEN as u64
}

/// What a segment is written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Checkpoints.
    Data,
    /// A compaction in hand: it counts for nothing until that is done.
    Output,
}

/// A segment.
#[derive(Debug)]
pub(crate) struct Segment {
    /// `len` bytes of it count.
    pub extent: Extent,
    /// Bytes of it that are written.
    pub end: u64,
    pub role: Role,
    /// Open for appending, or until it is synced.
    pub file: Option<Arc<dyn DiskFile>>,
    /// Whether something was written since the last sync.
    pub dirty: bool,
    /// Whether it may be appended to: not after a sync has failed.
    pub sound: bool,
    /// Bytes of records that are their page's newest.
    pub live: u64,
    /// Bytes of records that checkpoint n has replaced, but older kept checkpoints need: `(n, bytes)`.
    pub dying: Vec<(u64, u64)>,
    /// It is not known what of the rest is needed before this checkpoint is the oldest.
    pub unknown_until: u64,
    /// Whether it cannot be compacted because its directories are damaged.
    pub damaged: bool,
}

impl Segment {
    /// One that was just made.
    pub fn new(extent: Extent, role: Role, file: Arc<dyn DiskFile>) -> Self {
        Self {
            extent,
            end: HEADER_LEN,
            role,
            file: Some(file),
            dirty: true,
            sound: true,
            live: 0,
            dying: Vec::new(),
            unknown_until: 0,
            damaged: false,
        }
    }

    /// One that was there before.
    pub fn found(extent: Extent) -> Self {
        Self {
            extent,
            end: extent.len,
            role: Role::Data,
            file: None,
            dirty: false,
            sound: false,
            live: 0,
            dying: Vec::new(),
            unknown_until: 0,
            damaged: false,
        }
    }

    /// Bytes that only older checkpoints need, when `oldest` is the oldest.
    pub fn dying_after(&self, oldest: u64) -> u64 {
        self.dying.iter().filter(|(n, _)| *n > oldest).map(|(_, bytes)| bytes).sum()
    }

    /// Bytes that nothing needs.
    pub fn garbage(&self, oldest: u64) -> u64 {
        if self.unknown_until > oldest {
            return 0;
        }
        self.extent.len.saturating_sub(HEADER_LEN + self.live + self.dying_after(oldest))
    }

    /// Whether nothing in it is needed, when `live` bytes are live.
    pub fn is_dead(&self, live: u64, oldest: u64) -> bool {
        live == 0 && self.unknown_until <= oldest && self.dying_after(oldest) == 0
    }

    /// That checkpoint `n` has replaced `bytes` of it.
    pub fn replaced(&mut self, n: u64, bytes: u64) {
        match self.dying.last_mut() {
            Some((last, sum)) if *last == n => *sum += bytes,
            _ => self.dying.push((n, bytes)),
        }
    }

    /// Where the next frame begins.
    pub fn next(&self) -> u64 {
        self.end.next_multiple_of(ALIGNMENT)
    }
}

/// All segments, by position; places refer to them by that.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    slots: Vec<Option<Segment>>,
    /// Which segment a position stands or last stood for.
    known: Vec<Extent>,
    free: Vec<usize>,
    /// Positions that may still be referred to by a compaction or a base index in hand.
    limbo: Vec<usize>,
}

impl Pool {
    /// The segment at a position.
    pub fn get(&self, position: usize) -> Option<&Segment> {
        self.slots.get(position)?.as_ref()
    }

    /// The segment at a position.
    pub fn get_mut(&mut self, position: usize) -> Option<&mut Segment> {
        self.slots.get_mut(position)?.as_mut()
    }

    /// The segment of a place.
    pub fn of(&mut self, place: Place) -> Option<&mut Segment> {
        self.get_mut(place.segment())
    }

    /// Put a segment in; its position. `None` when there are more than places can tell apart.
    pub fn add(&mut self, segment: Segment) -> Option<usize> {
        let extent = segment.extent;
        if let Some(position) = self.free.pop() {
            if let (Some(slot), Some(known)) = (self.slots.get_mut(position), self.known.get_mut(position)) {
                *slot = Some(segment);
                *known = extent;
            }
            return Some(position);
        }
        if self.slots.len() >= Place::SEGMENTS {
            return None;
        }
        self.slots.push(Some(segment));
        self.known.push(extent);
        Some(self.slots.len() - 1)
    }

    /// Take a segment out. Its position is not used again before [`Pool::release`].
    pub fn remove(&mut self, position: usize) -> Option<Segment> {
        let segment = self.slots.get_mut(position)?.take()?;
        self.limbo.push(position);
        Some(segment)
    }

    /// Nothing refers to positions of removed segments any more.
    pub fn release(&mut self) {
        self.free.append(&mut self.limbo);
    }

    /// All segments with their positions.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &Segment)> {
        self.slots.iter().enumerate().filter_map(|(position, slot)| Some((position, slot.as_ref()?)))
    }

    /// All segments.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Segment> {
        self.slots.iter_mut().flatten()
    }

    /// Positions that there are or were.
    pub fn positions(&self) -> usize {
        self.slots.len()
    }

    /// Which segment each position stands or last stood for.
    pub fn known(&self) -> &[Extent] {
        &self.known
    }

    /// Bytes of all segments on the disk.
    pub fn bytes(&self) -> u64 {
        self.iter().map(|(_, segment)| segment.next()).sum()
    }

    /// Bytes that only older checkpoints need, or of which that is not known.
    pub fn history(&self, oldest: u64) -> u64 {
        let held = |segment: &Segment| {
            if segment.unknown_until > oldest {
                segment.extent.len.saturating_sub(HEADER_LEN + segment.live)
            } else {
                segment.dying_after(oldest)
            }
        };
        self.iter().map(|(_, segment)| held(segment)).sum()
    }
}

/// Which records each kept checkpoint has replaced.
#[derive(Debug, Default)]
pub(crate) struct History {
    lists: Vec<(u64, Vec<Place>)>,
}

impl History {
    /// Places remembered at most: 8 bytes each.
    pub const MOST: usize = 3_000_000;

    /// That checkpoint `n` has replaced these. Gives the oldest checkpoint whose list is given up because there are too many, if one is.
    pub fn push(&mut self, n: u64, places: Vec<Place>) -> Option<u64> {
        if !places.is_empty() {
            self.lists.push((n, places));
        }
        let total: usize = self.lists.iter().map(|(_, places)| places.len()).sum();
        if total <= Self::MOST {
            return None;
        }
        // All of them: a later one alone does not tell what is needed.
        let newest = self.lists.last().map(|(n, _)| *n);
        self.lists.clear();
        newest
    }

    /// Checkpoint `oldest` is the oldest now.
    pub fn prune(&mut self, oldest: u64) {
        self.lists.retain(|(n, _)| *n > oldest);
    }

    /// The places with the checkpoint that has replaced each.
    pub fn iter(&self) -> impl Iterator<Item = (u64, Place)> + '_ {
        self.lists.iter().flat_map(|(n, places)| places.iter().map(move |place| (*n, *place)))
    }

    /// The places, to be changed.
    pub fn places_mut(&mut self) -> impl Iterator<Item = &mut Place> {
        self.lists.iter_mut().flat_map(|(_, places)| places)
    }
}
