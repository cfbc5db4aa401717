//! Seal records: the list of a sealed epoch's entries, written after the last entry of its segment.

use super::{Log, Segment};
use crate::redo::files::LogFile;
use crate::redo::format::{seal_length, write_seal};
use crate::redo::state::segment_name;
use crate::report::warn_limited;
use rekindle_kernel::uring::Buffer;
use std::collections::BTreeSet;
use std::io;
use std::path::Path;

/// Why epochs cannot be sealed.
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

/// A segment whose epoch is to be sealed.
#[derive(Debug, Clone)]
pub struct Unsealed<F> {
    pub epoch: u64,
    /// Number of entries that become durable.
    pub written: u64,
    file: F,
    nonce: u128,
    /// Offset of the seal record: after the last entry.
    offset: u64,
    /// Offsets of the epoch's entries.
    entries: Vec<u64>,
}

impl<F: LogFile> Unsealed<F> {
    /// Writes the seal record, and waits until entries and record are durable. Returns whether there is a record. `directory` is of the log.
    ///
    /// A record that cannot be written, as on a full file system, is no error: without the seal nothing could be merged, so that no space
    /// would become free. The state must not name the epoch then, so a partially written record is ignored. A repeated call writes the
    /// same bytes.
    ///
    /// # Errors
    /// Those of the sync; what is durable is unknown then.
    pub fn make_durable(&self, directory: &Path) -> io::Result<bool> {
        let written = self.write();
        self.file.sync()?;
        if let Err(e) = &written {
            warn_limited!(
                "the redo log {}: cannot write the seal record of {}: {e}; epoch {} is sealed without it, so damage to this \
                 segment would not be detected when the log is opened",
                directory.display(),
                segment_name(self.epoch),
                self.epoch
            );
        }
        Ok(written.is_ok())
    }

    fn write(&self) -> io::Result<()> {
        let (header, list) = write_seal(&self.entries, self.nonce, self.offset);
        let mut record = Buffer::new(header.len() + list.len());
        record.iter_mut().zip(header.into_iter().chain(list)).for_each(|(place, byte)| *place = byte);
        self.file.write_at(&record, self.offset)
    }
}

impl<F: Clone> Log<F> {
    /// The segments up to epoch `upto` that have no seal record yet.
    ///
    /// # Errors
    /// [`CannotSeal`].
    pub fn unsealed(&self, upto: u64) -> Result<Vec<Unsealed<F>>, CannotSeal> {
        if upto > self.closed {
            return Err(CannotSeal::NotEnded { closed: self.closed });
        }
        let segments = || self.segments.range(..=upto).map(|(_, segment)| segment);
        if segments().any(|segment| segment.broken) {
            return Err(CannotSeal::Broken);
        }
        // The entry of that write would be missing in the record.
        if segments().any(|segment| segment.open > 0) {
            return Err(CannotSeal::Busy);
        }
        let unsealed = |segment: &Segment<F>| {
            // Overwritten by other entries of the list; their space may be reclaimed at any time.
            let dead: BTreeSet<u64> = segment.dead.iter().map(|(sequence, _)| *sequence).collect();
            let live = segment.records.iter().filter(|(sequence, _)| !dead.contains(sequence));
            Unsealed {
                epoch: segment.epoch,
                written: segment.written,
                file: segment.file.clone(),
                nonce: segment.nonce,
                offset: segment.tail,
                entries: live.map(|(_, record)| record.placed.offset).collect(),
            }
        };
        Ok(segments().filter(|segment| !segment.is_sealed).map(unsealed).collect())
    }

    /// Notes that the state names these epochs: their segments have seal records.
    pub fn sealed(&mut self, epochs: &[u64]) {
        for epoch in epochs {
            let Some(segment) = self.segments.get_mut(epoch).filter(|segment| !segment.is_sealed) else { continue };
            let bytes = seal_length(segment.records.len() as u64);
            segment.is_sealed = true;
            segment.bytes += bytes;
            self.bytes += bytes;
        }
    }
}
