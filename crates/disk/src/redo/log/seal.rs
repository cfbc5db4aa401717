//! Sealing ended epochs: their segments become durable, each with a seal record.
//!
//! A seal record follows the last entry of a segment and lists the entries. Without the record, a damaged entry would
//! be mistaken for an entry whose write was interrupted. The keeper takes these steps:
//!
//! ```text
//! Log::segments_to_seal ──> SegmentToSeal::make_durable ──> the state names the epochs ──> Log::mark_sealed
//! ```

use super::{Log, Segment};
use crate::redo::format::{seal_length, segment_name, write_seal};
use crate::report::warn_limited;
use rekindle_kernel::durable_file::DurableFile;
use rekindle_kernel::uring::Buffer;
use std::collections::BTreeSet;
use std::io;
use std::path::Path;

/// The reason why epochs cannot be sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CannotSeal {
    /// The epoch may still be written to.
    #[error("it has not ended: the last epoch that has is {closed}")]
    NotEnded { closed: u64 },
    /// A sync of one of the segments has failed.
    #[error("a sync of the redo log has failed before, so it is not known what of it is durable")]
    Broken,
    /// A write into one of the segments is still in progress.
    #[error("writes of it are still in progress; stop the guest before its epoch is marked")]
    Busy,
}

/// The presence of a seal record in a durable segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SealRecord {
    Written,
    /// The record could not be written. The state must not name the epoch, so that a partially written record is
    /// ignored.
    Missing,
}

/// A segment whose epoch is to be sealed.
#[derive(Debug, Clone)]
pub struct SegmentToSeal<F> {
    pub epoch: u64,
    /// Number of entries that become durable.
    pub written: u64,
    file: F,
    nonce: u128,
    /// Offset of the seal record: after the last entry.
    record_offset: u64,
    /// Offsets of the entries that the record lists.
    entry_offsets: Vec<u64>,
}

impl<F: DurableFile> SegmentToSeal<F> {
    /// Writes the seal record, and waits until entries and record are durable. `directory` is the log's directory,
    /// for messages.
    ///
    /// A record that cannot be written, as on a full file system, is no error: without the seal nothing could be
    /// merged, and no space would become free. A repeated call writes the same bytes.
    ///
    /// # Errors
    /// Errors of the sync. It is then unknown which data is durable.
    pub fn make_durable(&self, directory: &Path) -> io::Result<SealRecord> {
        let written = self.write_record();
        self.file.sync()?;
        match written {
            Ok(()) => Ok(SealRecord::Written),
            Err(e) => {
                warn_limited!(
                    "the redo log {}: cannot write the seal record of {}: {e}; epoch {} is sealed without it, so damage to this \
                     segment would not be detected when the log is opened",
                    directory.display(),
                    segment_name(self.epoch),
                    self.epoch
                );
                Ok(SealRecord::Missing)
            }
        }
    }

    fn write_record(&self) -> io::Result<()> {
        let (header, list) = write_seal(&self.entry_offsets, self.nonce, self.record_offset);
        let mut record = Buffer::new(header.len() + list.len());
        let bytes = header.into_iter().chain(list);
        record.iter_mut().zip(bytes).for_each(|(target, byte)| *target = byte);
        self.file.write_at(&record, self.record_offset)
    }
}

impl<F: Clone> Segment<F> {
    /// Returns what is needed to seal the segment outside the engine's thread.
    fn to_seal(&self) -> SegmentToSeal<F> {
        // Other entries have overwritten these entries, whose space may be reclaimed at any time.
        let overwritten: BTreeSet<u64> = self.overwritten.iter().map(|entry| entry.sequence).collect();
        let remaining = self.entries.iter().filter(|(sequence, _)| !overwritten.contains(sequence));
        SegmentToSeal {
            epoch: self.epoch,
            written: self.written,
            file: self.file.clone(),
            nonce: self.nonce,
            record_offset: self.tail,
            entry_offsets: remaining.map(|(_, written)| written.entry.offset).collect(),
        }
    }
}

impl<F: Clone> Log<F> {
    /// Returns the segments up to epoch `upto` that have no seal record yet.
    pub fn segments_to_seal(&self, upto: u64) -> Result<Vec<SegmentToSeal<F>>, CannotSeal> {
        if upto > self.closed {
            return Err(CannotSeal::NotEnded { closed: self.closed });
        }
        let segments = || self.segments.range(..=upto).map(|(_, segment)| segment);
        if segments().any(|segment| segment.has_failed_sync) {
            return Err(CannotSeal::Broken);
        }
        // The entry of that write would be missing in the record.
        if segments().any(|segment| segment.unfinished > 0) {
            return Err(CannotSeal::Busy);
        }
        Ok(segments().filter(|segment| !segment.is_sealed).map(Segment::to_seal).collect())
    }

    /// Records that the state names these epochs: their segments have seal records.
    pub fn mark_sealed(&mut self, epochs: &[u64]) {
        for epoch in epochs {
            let Some(segment) = self.segments.get_mut(epoch).filter(|segment| !segment.is_sealed) else { continue };
            let record_bytes = seal_length(segment.entries.len() as u64);
            segment.is_sealed = true;
            segment.bytes += record_bytes;
            self.bytes += record_bytes;
        }
    }
}
