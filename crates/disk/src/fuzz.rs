//! Functions that parse a guest's request, or a segment of a redo log, from any bytes. The targets in `fuzz/` call
//! them, and tests call them on every build with a fixed budget.

use crate::descriptor_chain::{DescriptorTable, read_chain};
use crate::redo::format::PAGE_BYTES;
use crate::redo::recover::{SegmentContent, scan};
use crate::request::{DiskProperties, RequestKind, parse};
use rekindle_kernel::durable_file::DurableFile;
use std::io;
use std::sync::Arc;
use uuid::Uuid;

const DISK: DiskProperties = DiskProperties { capacity: 1 << 30, readonly: false };
/// The queue's descriptors, at the start of the guest's memory.
const TABLE: DescriptorTable = DescriptorTable { address: 0, entries: 32 };
/// Epoch of the segment.
const EPOCH: u64 = 3;

/// Parses the request at descriptor 0 of a guest whose memory is `memory`.
///
/// # Panics
/// If the parsed request exceeds the disk or is inconsistent, which is a bug.
pub fn request(memory: &[u8]) {
    let read = |address: u64, target: &mut [u8]| {
        let start = usize::try_from(address).ok()?;
        target.copy_from_slice(memory.get(start..start.checked_add(target.len())?)?);
        Some(())
    };
    let Ok(segments) = read_chain(read, TABLE, 0) else { return };
    let Ok(request) = parse(segments.into_iter(), read, DISK) else { return };
    let Ok(kind) = &request.kind else { return };
    if let RequestKind::Read(range) | RequestKind::Write(range) = kind {
        let sum: u64 = request.data.iter().map(|segment| segment.len).sum();
        assert_eq!(sum, range.bytes, "its data has the length of its range");
    }
    for range in kind.ranges() {
        let end = range.start.checked_add(range.bytes);
        assert!(end.is_some_and(|end| end <= DISK.capacity), "{range:?} exceeds the disk");
    }
}

/// The content of a segment, in memory.
#[derive(Debug, Clone)]
struct MemoryFile(Arc<Vec<u8>>);

impl DurableFile for MemoryFile {
    fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        let content = usize::try_from(offset).ok().and_then(|offset| self.0.get(offset..)).unwrap_or_default();
        let len = content.len().min(target.len());
        target.iter_mut().zip(content).for_each(|(target, byte)| *target = *byte);
        Ok(len)
    }

    fn write_at(&self, _bytes: &[u8], _offset: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn zero(&self, _offset: u64, _len: u64, _hole: bool) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn truncate(&self, _len: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

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
    let file = MemoryFile(Arc::new(bytes.to_vec()));
    let Ok(Some(SegmentContent { end, mut entries, .. })) = scan(&file, EPOCH, Uuid::nil()) else { return };
    entries.sort_by_key(|entry| entry.offset);
    let mut next_free = PAGE_BYTES;
    for entry in &entries {
        assert!(
            entry.offset >= next_free && entry.offset.is_multiple_of(PAGE_BYTES),
            "{entry:?} overlaps the previous one"
        );
        assert!(
            entry.bytes > 0 && entry.disk_offset.checked_add(entry.bytes).is_some(),
            "{entry:?} is outside the disk"
        );
        next_free = entry.offset + entry.length();
    }
    assert!(next_free <= end, "the next entry would overlap the last one");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::redo::format::{EntryHeader, EntryKind, SegmentHead, checksum, write_head, write_header};

    /// Returns a segment with three entries.
    fn valid_segment() -> Vec<u8> {
        let nonce = 77;
        let mut bytes = write_head(&SegmentHead { epoch: EPOCH, disk: Uuid::nil(), nonce }).to_vec();
        let mut add_entry = |sequence: u64, disk_offset: u64, length: u64, kind: EntryKind| {
            let data = if kind == EntryKind::Data { vec![sequence as u8; length as usize] } else { Vec::new() };
            let header = EntryHeader { sequence, disk_offset, bytes: length, kind, data_checksum: checksum(&data) };
            bytes.extend(write_header(&header, nonce, bytes.len() as u64));
            bytes.extend(data);
            bytes.resize(bytes.len().next_multiple_of(PAGE_BYTES as usize), 0);
        };
        add_entry(1, 0, 4096, EntryKind::Data);
        add_entry(2, 512, 1 << 20, EntryKind::Hole);
        add_entry(3, 0, 512, EntryKind::Data);
        bytes
    }

    #[test]
    fn no_bytes_make_an_entry_exceed_its_segment() {
        let valid = valid_segment();
        let content = |bytes: &[u8]| scan(&MemoryFile(Arc::new(bytes.to_vec())), EPOCH, Uuid::nil()).ok().flatten();
        assert_eq!(content(&valid).map(|content| content.entries.len()), Some(3));
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..3000 {
            let mut bytes = valid.clone();
            for _ in 0..random.usize(1..6) {
                let position = random.usize(..5) * PAGE_BYTES as usize + random.usize(..128);
                bytes[position] = [0, 1, 0x7f, 0xff, random.u8(..)][random.usize(..5)];
            }
            bytes.truncate(random.usize(..bytes.len() + 1));
            segment(&bytes);
        }
    }

    /// Returns the memory of a guest with a valid request: header at 1024, data at 2048, status at 1040.
    fn valid_request(kind: u32, sector: u64) -> Vec<u8> {
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
            request(&valid_request(kind, 8));
            for _ in 0..20_000 {
                let mut bytes = valid_request(kind, random(1 << 22) as u64);
                for _ in 0..random(8) {
                    // Changes a byte of the descriptors, the header or the start of the data.
                    let position = [random(96), 1024 + random(16), 2048 + random(64)][random(3)];
                    bytes[position] = [0, 1, 0x7f, 0x80, 0xff, random(256) as u8][random(6)];
                }
                request(&bytes);
            }
        }
    }
}
