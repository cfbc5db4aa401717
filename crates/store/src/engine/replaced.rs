//! Records that a newer checkpoint has replaced but that older kept checkpoints still need. A compaction must copy
//! them.
//!
//! A *record* is a page as one checkpoint has stored it. *Kept* checkpoints are those that the store's options require
//! to stay readable. A *compaction* copies needed records to a new segment and removes the old segments.

use crate::format::base::Location;

/// The records that one checkpoint has replaced.
#[derive(Debug)]
struct ReplacedBy {
    checkpoint: u64,
    locations: Vec<Location>,
}

/// For each kept checkpoint, the records that it has replaced.
#[derive(Debug, Default)]
pub(crate) struct ReplacedRecords {
    by_checkpoint: Vec<ReplacedBy>,
}

impl ReplacedRecords {
    /// Limit of remembered records. Each uses 8 bytes.
    const MAX_RECORDS: usize = 3_000_000;

    /// Adds the records that `checkpoint` has replaced. If there are too many records, forgets all of them and returns
    /// the newest checkpoint that has replaced one.
    pub fn add(&mut self, checkpoint: u64, locations: Vec<Location>) -> Option<u64> {
        if !locations.is_empty() {
            self.by_checkpoint.push(ReplacedBy { checkpoint, locations });
        }
        let total: usize = self.by_checkpoint.iter().map(|replaced| replaced.locations.len()).sum();
        if total <= Self::MAX_RECORDS {
            return None;
        }
        // All lists are cleared, because a later list alone does not determine which records are needed.
        let newest = self.by_checkpoint.last().map(|replaced| replaced.checkpoint);
        self.by_checkpoint.clear();
        newest
    }

    /// Drops the records that are not needed if checkpoint `oldest` is the oldest.
    pub fn prune(&mut self, oldest: u64) {
        self.by_checkpoint.retain(|replaced| replaced.checkpoint > oldest);
    }

    /// Iterates over the locations of all records that are needed if checkpoint `oldest` is the oldest, each with the
    /// checkpoint that has replaced the record.
    pub fn needed_since(&self, oldest: u64) -> impl Iterator<Item = (u64, Location)> + '_ {
        self.by_checkpoint
            .iter()
            .filter(move |replaced| replaced.checkpoint > oldest)
            .flat_map(|replaced| replaced.locations.iter().map(|location| (replaced.checkpoint, *location)))
    }

    pub fn locations_mut(&mut self) -> impl Iterator<Item = &mut Location> {
        self.by_checkpoint.iter_mut().flat_map(|replaced| &mut replaced.locations)
    }
}
