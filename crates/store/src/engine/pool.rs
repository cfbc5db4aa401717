//! The segments of a writer, and how many of their bytes are needed.

use crate::disk::DiskFile;
use crate::format::ALIGNMENT;
use crate::format::base::Location;
use crate::format::manifest::Extent;
use crate::format::segment::{HEADER_LEN, RECORD_LEN};
use std::sync::Arc;

/// Returns the bytes that a record with `len` bytes of content uses in a segment.
pub(crate) fn cost(len: u16) -> u64 {
    u64::from(len) + RECORD_LEN as u64
}

/// Purpose of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Pages of checkpoints.
    Data,
    /// Output of a compaction in progress. No checkpoint uses it until the compaction is done.
    Output,
}

#[derive(Debug)]
pub(crate) struct Segment {
    /// Committed part of the segment.
    pub extent: Extent,
    /// Bytes written.
    pub end: u64,
    pub role: Role,
    /// Open while pages may be appended, and until the last sync.
    pub file: Option<Arc<dyn DiskFile>>,
    /// Bytes were written since the last sync.
    pub dirty: bool,
    /// Pages may be appended. False after a failed sync.
    pub sound: bool,
    /// Bytes of records that are the newest of their page.
    pub live: u64,
    /// Bytes of records that checkpoint n has replaced but older kept checkpoints need, as `(n, bytes)`.
    pub dying: Vec<(u64, u64)>,
    /// Until this checkpoint is the oldest, an older checkpoint may need any of the bytes that are not live.
    pub unknown_until: u64,
    /// The segment's directories are damaged, so that it cannot be compacted.
    pub damaged: bool,
}

impl Segment {
    /// Returns a segment that was just created.
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

    /// Returns a segment that the manifest lists.
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

    /// Returns the bytes that only kept checkpoints older than the newest need, if `oldest` is the oldest.
    pub fn dying_after(&self, oldest: u64) -> u64 {
        self.dying.iter().filter(|(n, _)| *n > oldest).map(|(_, bytes)| bytes).sum()
    }

    /// Returns the bytes that no kept checkpoint needs, if `oldest` is the oldest.
    pub fn garbage(&self, oldest: u64) -> u64 {
        if self.unknown_until > oldest {
            return 0;
        }
        self.extent.len.saturating_sub(HEADER_LEN + self.live + self.dying_after(oldest))
    }

    /// Returns whether no kept checkpoint needs the segment, if `live` of its bytes are live.
    pub fn is_dead(&self, live: u64, oldest: u64) -> bool {
        live == 0 && self.unknown_until <= oldest && self.dying_after(oldest) == 0
    }

    /// Records that checkpoint `n` has replaced `bytes` of the segment.
    pub fn replaced(&mut self, n: u64, bytes: u64) {
        match self.dying.last_mut() {
            Some((last, sum)) if *last == n => *sum += bytes,
            _ => self.dying.push((n, bytes)),
        }
    }

    /// Returns the offset of the next frame.
    pub fn next(&self) -> u64 {
        self.end.next_multiple_of(ALIGNMENT)
    }
}

/// All segments by position. A [`Location`] refers to these positions.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    slots: Vec<Option<Segment>>,
    /// The current or last segment at each position.
    known: Vec<Extent>,
    free: Vec<usize>,
    /// Positions of removed segments. A compaction or base index in progress may still refer to them.
    limbo: Vec<usize>,
}

impl Pool {
    pub fn get(&self, position: usize) -> Option<&Segment> {
        self.slots.get(position)?.as_ref()
    }

    pub fn get_mut(&mut self, position: usize) -> Option<&mut Segment> {
        self.slots.get_mut(position)?.as_mut()
    }

    /// Returns the segment of a place.
    pub fn of(&mut self, place: Location) -> Option<&mut Segment> {
        self.get_mut(place.segment())
    }

    /// Adds a segment and returns its position; `None` if all positions are in use.
    pub fn add(&mut self, segment: Segment) -> Option<usize> {
        let extent = segment.extent;
        if let Some(position) = self.free.pop() {
            if let (Some(slot), Some(known)) = (self.slots.get_mut(position), self.known.get_mut(position)) {
                *slot = Some(segment);
                *known = extent;
            }
            return Some(position);
        }
        if self.slots.len() >= Location::SEGMENTS {
            return None;
        }
        self.slots.push(Some(segment));
        self.known.push(extent);
        Some(self.slots.len() - 1)
    }

    /// Removes a segment. [`Pool::release`] makes its position available again.
    pub fn remove(&mut self, position: usize) -> Option<Segment> {
        let segment = self.slots.get_mut(position)?.take()?;
        self.limbo.push(position);
        Some(segment)
    }

    /// Makes the positions of all removed segments available again.
    pub fn release(&mut self) {
        self.free.append(&mut self.limbo);
    }

    /// Iterates over all segments and their positions.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &Segment)> {
        self.slots.iter().enumerate().filter_map(|(position, slot)| Some((position, slot.as_ref()?)))
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Segment> {
        self.slots.iter_mut().flatten()
    }

    /// Returns the number of positions, including free ones.
    pub fn positions(&self) -> usize {
        self.slots.len()
    }

    /// Returns the current or last segment at each position.
    pub fn known(&self) -> &[Extent] {
        &self.known
    }

    /// Returns the bytes of all segments on the disk.
    pub fn bytes(&self) -> u64 {
        self.iter().map(|(_, segment)| segment.next()).sum()
    }

    /// Returns the bytes that only older checkpoints need or may need.
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

/// For each kept checkpoint, the records that it has replaced.
#[derive(Debug, Default)]
pub(crate) struct History {
    lists: Vec<(u64, Vec<Location>)>,
}

impl History {
    /// Limit of remembered places. Each uses 8 bytes.
    pub const MAX_PLACES: usize = 3_000_000;

    /// Records that checkpoint `n` has replaced these places. If there are too many places, forgets all lists and
    /// returns the newest checkpoint among them.
    pub fn push(&mut self, n: u64, places: Vec<Location>) -> Option<u64> {
        if !places.is_empty() {
            self.lists.push((n, places));
        }
        let total: usize = self.lists.iter().map(|(_, places)| places.len()).sum();
        if total <= Self::MAX_PLACES {
            return None;
        }
        // All lists are cleared, because a later list alone does not determine which records are needed.
        let newest = self.lists.last().map(|(n, _)| *n);
        self.lists.clear();
        newest
    }

    /// Drops the lists that are not needed if checkpoint `oldest` is the oldest.
    pub fn prune(&mut self, oldest: u64) {
        self.lists.retain(|(n, _)| *n > oldest);
    }

    /// Iterates over all places, each with the checkpoint that has replaced it.
    pub fn iter(&self) -> impl Iterator<Item = (u64, Location)> + '_ {
        self.lists.iter().flat_map(|(n, places)| places.iter().map(move |place| (*n, *place)))
    }

    pub fn places_mut(&mut self) -> impl Iterator<Item = &mut Location> {
        self.lists.iter_mut().flat_map(|(_, places)| places)
    }
}
