//! Functions that parse a guest's request, or a segment of a redo log, from any bytes. The targets in `fuzz/` call
//! them, and tests call them on every build with a fixed budget.

use crate::descriptor_chain::walk;
use crate::redo::files::LogFile;
use crate::redo::format::PAGE;
use crate::redo::recover::{SegmentContent, scan};
use crate::request::{Disk, Kind, parse};
use std::io;
use std::sync::Arc;
use uuid::Uuid;

const DISK: Disk = Disk { capacity: 1 << 30, readonly: false };
/// Number of descriptors of the queue.
const SIZE: u16 = 32;

/// Parses the request at descriptor 0 of a guest whose memory is `bytes`. The descriptors are at the start of the
/// memory.
///
/// # Panics
/// If the parsed request exceeds the disk or is inconsistent, which is a bug.
pub fn request(bytes: &[u8]) {
    let read = |at: u64, into: &mut [u8]| {
        let at = usize::try_from(at).ok()?;
        into.copy_from_slice(bytes.get(at..at.checked_add(into.len())?)?);
        Some(())
    };
    let Ok(segments) = walk(read, 0, SIZE, 0) else { return };
    let Ok(request) = parse(segments.into_iter(), read, DISK) else { return };
    let ranges = match &request.what {
        Ok(Kind::Read(range) | Kind::Write(range)) => {
            let sum: u64 = request.data.iter().map(|segment| segment.len).sum();
            assert_eq!(sum, range.bytes, "its data has the length of its range");
            vec![*range]
        }
        Ok(Kind::Discard(ranges)) => ranges.clone(),
        Ok(Kind::Zeroes(ranges)) => ranges.iter().map(|(range, _)| *range).collect(),
        _ => Vec::new(),
    };
    for range in ranges {
        let end = range.at.checked_add(range.bytes);
        assert!(end.is_some_and(|end| end <= DISK.capacity), "{range:?} exceeds the disk");
    }
}

/// Epoch of the segment.
const EPOCH: u64 = 3;

/// The content of a segment, in memory.
#[derive(Debug, Clone)]
struct Bytes(Arc<Vec<u8>>);

impl LogFile for Bytes {
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let rest = usize::try_from(offset).ok().and_then(|offset| self.0.get(offset..)).unwrap_or_default();
        let len = rest.len().min(into.len());
        into.iter_mut().zip(rest).for_each(|(place, byte)| *place = *byte);
        Ok(len)
    }

    fn write_at(&self, _bytes: &[u8], _offset: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn zero(&self, _offset: u64, _len: u64, _hole: bool) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn reserve(&self, _len: u64) {}

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.0.len() as u64)
    }
}

/// Reads a segment that consists of these bytes.
///
/// # Panics
/// If an entry exceeds the segment, overlaps another entry or is inconsistent, which is a bug.
pub fn segment(bytes: &[u8]) {
    let file = Bytes(Arc::new(bytes.to_vec()));
    let Ok(Some(SegmentContent { end, mut entries, .. })) = scan(&file, EPOCH, Uuid::nil()) else { return };
    entries.sort_by_key(|entry| entry.offset);
    let mut free = PAGE;
    for entry in &entries {
        assert!(entry.offset >= free && entry.offset.is_multiple_of(PAGE), "{entry:?} overlaps the previous one");
        assert!(entry.bytes > 0 && entry.at.checked_add(entry.bytes).is_some(), "{entry:?} is outside the disk");
        free = entry.offset + entry.length();
    }
    assert!(free <= end, "the next entry would overlap the last one");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::redo::format::{EntryHeader, EntryKind, SegmentHead, checksum, write_head, write_header};

    /// Returns a segment with three entries.
    fn log() -> Vec<u8> {
        let nonce = 77;
        let mut bytes = write_head(&SegmentHead { epoch: EPOCH, disk: Uuid::nil(), nonce }).to_vec();
        for (sequence, at, length, what) in
            [(1, 0, 4096, EntryKind::Data), (2, 512, 1 << 20, EntryKind::Hole), (3, 0, 512, EntryKind::Data)]
        {
            let data = if what == EntryKind::Data { vec![sequence as u8; length as usize] } else { Vec::new() };
            let header = EntryHeader { sequence, at, bytes: length, what, data: checksum(&data) };
            bytes.extend(write_header(&header, nonce, bytes.len() as u64));
            bytes.extend(data);
            bytes.resize(bytes.len().next_multiple_of(PAGE as usize), 0);
        }
        bytes
    }

    #[test]
    fn no_bytes_make_an_entry_exceed_its_segment() {
        let whole = log();
        let found = |bytes: &[u8]| scan(&Bytes(Arc::new(bytes.to_vec())), EPOCH, Uuid::nil()).ok().flatten();
        assert_eq!(found(&whole).map(|found| found.entries.len()), Some(3));
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..3000 {
            let mut bytes = whole.clone();
            for _ in 0..random.usize(1..6) {
                let at = random.usize(..5) * PAGE as usize + random.usize(..128);
                bytes[at] = [0, 1, 0x7f, 0xff, random.u8(..)][random.usize(..5)];
            }
            bytes.truncate(random.usize(..bytes.len() + 1));
            segment(&bytes);
        }
    }

    /// Returns the memory of a guest with a valid request: header at 1024, data at 2048, status at 1040.
    fn seed(kind: u32, sector: u64) -> Vec<u8> {
        let descriptor = |address: u64, len: u32, flags: u16, next: u16| {
            [&address.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat()
        };
        let writable = if kind == 0 { 3 } else { 1 };
        let chain =
            [descriptor(1024, 16, 1, 1), descriptor(2048, 512, writable, 2), descriptor(1040, 1, 2, 0)].concat();
        let mut bytes = vec![0; 4096];
        bytes[..chain.len()].copy_from_slice(&chain);
        bytes[1024..1028].copy_from_slice(&kind.to_le_bytes());
        bytes[1032..1040].copy_from_slice(&sector.to_le_bytes());
        bytes
    }

    #[test]
    fn no_bytes_make_a_request_exceed_the_disk() {
        let mut random = fastrand::Rng::with_seed(1);
        let mut random = |below: usize| random.usize(..below);
        for kind in [0, 1, 4, 8, 11, 13] {
            request(&seed(kind, 8));
            for _ in 0..20_000 {
                let mut bytes = seed(kind, random(1 << 22) as u64);
                for _ in 0..random(8) {
                    // Changes a byte of the descriptors, the header or the start of the data.
                    let at = [random(96), 1024 + random(16), 2048 + random(64)][random(3)];
                    bytes[at] = [0, 1, 0x7f, 0x80, 0xff, random(256) as u8][random(6)];
                }
                request(&bytes);
            }
        }
    }
}
