//! A guest's request (virtio 1.2, 5.2.6), parsed from descriptors with any content.
//!
//! ```text
//! readable  | type u32 | - u32 | sector u64 | data of a write, ranges of a discard |
//! writable  | data of a read | status u8 |
//! ```
//!
//! The division into descriptors does not matter (2.7.4.2). Parsing accesses only the header and the ranges in the
//! guest's memory. Whether the data is in the guest's memory is checked when the data is moved.

use crate::block::SECTOR;
use crate::config::{MAX_RANGE_SECTORS, MAX_RANGES};

/// Bytes of the header.
const HEADER_BYTES: usize = 16;
/// Bytes that describe one range of a discard or of a write of zeros.
const RANGE_BYTES: usize = 16;
/// Most bytes of the serial number that the guest sees.
pub const IDENTITY_BYTES: usize = 20;
/// Flag of a range of a write of zeros: its space may be released.
const UNMAP_FLAG: u32 = 1;

/// `VIRTIO_BLK_T_*`.
mod request_type {
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const GET_ID: u32 = 8;
    pub const DISCARD: u32 = 11;
    pub const WRITE_ZEROES: u32 = 13;
}

/// A parsed request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The operation, or the status to answer with immediately.
    pub kind: Result<RequestKind, RequestStatus>,
    /// The data in the guest's memory.
    pub data: Vec<BufferSegment>,
    /// Address of the status byte.
    pub status_address: u64,
    /// Bytes for the used ring if the request succeeds, including the status.
    pub written: u32,
}

/// The operation of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestKind {
    Read(DiskRange),
    Write(DiskRange),
    /// Make earlier writes durable.
    Flush,
    /// Return the serial number in `data`.
    Identity,
    /// Make the content of these ranges undefined.
    Discard(Vec<DiskRange>),
    /// Write zeros.
    Zero(Vec<ZeroRange>),
}

impl RequestKind {
    /// Returns the parts of the disk that the operation accesses.
    pub fn ranges(&self) -> impl Iterator<Item = DiskRange> {
        let (single, discards, zeros): (_, &[DiskRange], &[ZeroRange]) = match self {
            Self::Read(range) | Self::Write(range) => (Some(*range), &[], &[]),
            Self::Discard(ranges) => (None, ranges, &[]),
            Self::Zero(ranges) => (None, &[], ranges),
            Self::Flush | Self::Identity => (None, &[], &[]),
        };
        single.into_iter().chain(discards.iter().copied()).chain(zeros.iter().map(|zero| zero.range))
    }

    /// Returns whether the operation changes the disk's content.
    #[must_use]
    pub fn changes_disk(&self) -> bool {
        matches!(self, Self::Write(_) | Self::Discard(_) | Self::Zero(_))
    }
}

/// A range of the disk, in whole sectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskRange {
    /// First byte on the disk.
    pub start: u64,
    pub bytes: u64,
}

impl DiskRange {
    /// Returns a range of sectors, if it is within a disk of `capacity` bytes.
    fn within(first_sector: u64, bytes: u64, capacity: u64) -> Option<Self> {
        let start = first_sector.checked_mul(SECTOR)?;
        let end = start.checked_add(bytes)?;
        (end <= capacity && bytes.is_multiple_of(SECTOR)).then_some(Self { start, bytes })
    }
}

/// A range to fill with zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZeroRange {
    pub range: DiskRange,
    /// The space of the range may be released.
    pub may_unmap: bool,
}

/// The value of the status byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum RequestStatus {
    Ok = 0,
    Failed = 1,
    /// The operation is not supported.
    Unsupported = 2,
}

/// Contiguous bytes of the guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferSegment {
    pub address: u64,
    pub len: u64,
    /// The device writes the segment instead of reading it.
    pub writable: bool,
}

/// A chain without a status byte, which cannot be answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unanswerable;

/// The properties of the disk that requests are checked against.
#[derive(Debug, Clone, Copy)]
pub struct DiskProperties {
    /// Length of the disk in bytes.
    pub capacity: u64,
    pub readonly: bool,
}

/// Parses a chain. `read` copies bytes of the guest's memory, and returns `None` if they are outside of it.
pub fn parse(
    chain: impl Iterator<Item = BufferSegment>,
    mut read: impl FnMut(u64, &mut [u8]) -> Option<()>,
    disk: DiskProperties,
) -> Result<Request, Unanswerable> {
    let (mut readable, mut writable, mut is_ordered) = (Vec::new(), Vec::new(), true);
    for segment in chain {
        if segment.writable {
            writable.push(segment);
        } else {
            is_ordered &= writable.is_empty();
            readable.push(segment);
        }
    }
    let status_address = take_status_byte(&mut writable).ok_or(Unanswerable)?;
    let kind =
        if is_ordered { parse_kind(&mut readable, &writable, &mut read, disk) } else { Err(RequestStatus::Failed) };
    let (data, data_written) = match &kind {
        Ok(RequestKind::Read(range)) => (writable, range.bytes),
        Ok(RequestKind::Identity) => {
            let space = total_bytes(&writable).unwrap_or(0);
            (writable, space.min(IDENTITY_BYTES as u64))
        }
        Ok(RequestKind::Write(_)) => (readable, 0),
        _ => (Vec::new(), 0),
    };
    let written = u32::try_from(data_written + 1).unwrap_or(u32::MAX);
    Ok(Request { kind, data, status_address, written })
}

/// Parses the header, and the ranges if there are any. Removes what it has parsed from `readable`.
fn parse_kind(
    readable: &mut [BufferSegment],
    writable: &[BufferSegment],
    read: &mut impl FnMut(u64, &mut [u8]) -> Option<()>,
    disk: DiskProperties,
) -> Result<RequestKind, RequestStatus> {
    let mut header = [0; HEADER_BYTES];
    take_bytes(readable, &mut header, read).ok_or(RequestStatus::Failed)?;
    let [kind, _, sector_low, sector_high] = header.as_chunks::<4>().0 else { return Err(RequestStatus::Failed) };
    let first_sector = u64_from_halves(*sector_low, *sector_high);
    let readable_bytes = total_bytes(readable).ok_or(RequestStatus::Failed)?;
    let writable_bytes = total_bytes(writable).ok_or(RequestStatus::Failed)?;
    let disk_range = |bytes| DiskRange::within(first_sector, bytes, disk.capacity).ok_or(RequestStatus::Failed);
    match u32::from_le_bytes(*kind) {
        request_type::IN => disk_range(writable_bytes).map(RequestKind::Read),
        request_type::OUT | request_type::DISCARD | request_type::WRITE_ZEROES if disk.readonly => {
            Err(RequestStatus::Failed)
        }
        request_type::OUT => disk_range(readable_bytes).map(RequestKind::Write),
        request_type::FLUSH => Ok(RequestKind::Flush),
        request_type::GET_ID => Ok(RequestKind::Identity),
        request_type::DISCARD => {
            let ranges = parse_ranges(readable, readable_bytes, read, disk.capacity, 0)?;
            Ok(RequestKind::Discard(ranges.into_iter().map(|parsed| parsed.range).collect()))
        }
        request_type::WRITE_ZEROES => {
            parse_ranges(readable, readable_bytes, read, disk.capacity, UNMAP_FLAG).map(RequestKind::Zero)
        }
        _ => Err(RequestStatus::Unsupported),
    }
}

/// Parses the ranges of a discard or of a write of zeros, in all `readable_bytes` bytes of `readable`.
/// `allowed_flags`: the flags that a range may have.
fn parse_ranges(
    readable: &mut [BufferSegment],
    readable_bytes: u64,
    read: &mut impl FnMut(u64, &mut [u8]) -> Option<()>,
    capacity: u64,
    allowed_flags: u32,
) -> Result<Vec<ZeroRange>, RequestStatus> {
    let count = readable_bytes / RANGE_BYTES as u64;
    if readable_bytes == 0 || !readable_bytes.is_multiple_of(RANGE_BYTES as u64) || count > u64::from(MAX_RANGES) {
        return Err(RequestStatus::Failed);
    }
    let mut ranges = Vec::new();
    for _ in 0..count {
        let mut raw = [0; RANGE_BYTES];
        take_bytes(readable, &mut raw, read).ok_or(RequestStatus::Failed)?;
        let [sector_low, sector_high, sectors, flags] = raw.as_chunks::<4>().0 else {
            return Err(RequestStatus::Failed);
        };
        let flags = u32::from_le_bytes(*flags);
        if flags & !allowed_flags != 0 {
            return Err(RequestStatus::Unsupported);
        }
        let sectors = u32::from_le_bytes(*sectors);
        if sectors > MAX_RANGE_SECTORS {
            return Err(RequestStatus::Failed);
        }
        let first_sector = u64_from_halves(*sector_low, *sector_high);
        let range = DiskRange::within(first_sector, u64::from(sectors) * SECTOR, capacity);
        let range = range.ok_or(RequestStatus::Failed)?;
        ranges.push(ZeroRange { range, may_unmap: flags & UNMAP_FLAG != 0 });
    }
    Ok(ranges)
}

fn u64_from_halves(low: [u8; 4], high: [u8; 4]) -> u64 {
    u64::from(u32::from_le_bytes(low)) | u64::from(u32::from_le_bytes(high)) << 32
}

/// Removes the last writable byte, which is the status, and returns its address. The remaining bytes are data.
fn take_status_byte(writable: &mut Vec<BufferSegment>) -> Option<u64> {
    loop {
        let last = writable.last_mut()?;
        match last.len.checked_sub(1) {
            None => drop(writable.pop()),
            Some(data_bytes) => {
                last.len = data_bytes;
                return last.address.checked_add(data_bytes);
            }
        }
    }
}

/// Returns the bytes of all segments together; `None` if they are too many for the used ring.
fn total_bytes(segments: &[BufferSegment]) -> Option<u64> {
    let sum = segments.iter().try_fold(0u64, |sum, segment| sum.checked_add(segment.len))?;
    // The used ring has 32-bit lengths.
    (sum < u64::from(u32::MAX)).then_some(sum)
}

/// Moves the first bytes of the segments to `target`: copies them and removes them from the segments.
fn take_bytes(
    segments: &mut [BufferSegment],
    target: &mut [u8],
    read: &mut impl FnMut(u64, &mut [u8]) -> Option<()>,
) -> Option<()> {
    let mut unfilled = target;
    for segment in segments {
        if unfilled.is_empty() {
            break;
        }
        let taken = segment.len.min(unfilled.len() as u64);
        let (from_segment, after) = unfilled.split_at_mut(taken as usize);
        read(segment.address, from_segment)?;
        segment.address = segment.address.checked_add(taken)?;
        segment.len -= taken;
        unfilled = after;
    }
    unfilled.is_empty().then_some(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::request_type::{DISCARD, FLUSH, IN, OUT, WRITE_ZEROES};
    use super::*;
    use proptest::prelude::*;

    const DISK: DiskProperties = DiskProperties { capacity: 1 << 20, readonly: false };

    /// Returns a `read` function for a guest whose memory starts with `bytes`.
    fn guest_memory(bytes: &[u8]) -> impl FnMut(u64, &mut [u8]) -> Option<()> {
        |address, target| {
            let start = usize::try_from(address).ok()?;
            target.copy_from_slice(bytes.get(start..start.checked_add(target.len())?)?);
            Some(())
        }
    }

    fn header(kind: u32, sector: u64) -> Vec<u8> {
        [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
    }

    fn readable(address: u64, len: u64) -> BufferSegment {
        BufferSegment { address, len, writable: false }
    }

    fn writable(address: u64, len: u64) -> BufferSegment {
        BufferSegment { address, len, writable: true }
    }

    fn parse_chain(bytes: &[u8], chain: &[BufferSegment]) -> Result<Request, Unanswerable> {
        parse(chain.iter().copied(), guest_memory(bytes), DISK)
    }

    #[test]
    fn a_read_has_its_data_before_the_status_however_it_is_cut() {
        let bytes = header(IN, 8);
        let separate = parse_chain(&bytes, &[readable(0, 16), writable(0x1000, 4096), writable(0x5000, 1)]).unwrap();
        let range = DiskRange { start: 4096, bytes: 4096 };
        assert_eq!(
            (separate.kind, separate.status_address, separate.written),
            (Ok(RequestKind::Read(range)), 0x5000, 4097)
        );
        assert_eq!(separate.data, [writable(0x1000, 4096), writable(0x5000, 0)]);
        let merged = parse_chain(&bytes, &[readable(0, 3), readable(3, 13), writable(0x1000, 4097)]).unwrap();
        assert_eq!((merged.kind, merged.status_address), (Ok(RequestKind::Read(range)), 0x2000));
        assert_eq!(merged.data, [writable(0x1000, 4096)]);
    }

    #[test]
    fn a_write_has_its_data_after_the_header() {
        let bytes = header(OUT, 0);
        let request = parse_chain(&bytes, &[readable(0, 528), writable(0x5000, 1)]).unwrap();
        assert_eq!(request.kind, Ok(RequestKind::Write(DiskRange { start: 0, bytes: 512 })));
        assert_eq!((request.data, request.written), (vec![readable(16, 512)], 1));
        let readonly = DiskProperties { readonly: true, ..DISK };
        let chain = [readable(0, 528), writable(0x5000, 1)];
        assert_eq!(parse(chain.into_iter(), guest_memory(&bytes), readonly).unwrap().kind, Err(RequestStatus::Failed));
    }

    #[test]
    fn what_exceeds_the_disk_or_is_no_request_is_rejected() {
        let status = writable(0x5000, 1);
        let parsed_kind = |kind, sector, data: &[BufferSegment]| {
            let chain = [&[readable(0, 16)], data, &[status]].concat();
            parse_chain(&header(kind, sector), &chain).unwrap().kind
        };
        let failed = Err(RequestStatus::Failed);
        assert_eq!(parsed_kind(IN, 2048, &[writable(0x1000, 512)]), failed, "after the end");
        assert_eq!(parsed_kind(IN, 2047, &[writable(0x1000, 1024)]), failed, "across the end");
        assert_eq!(parsed_kind(IN, u64::MAX / 512 + 2, &[writable(0x1000, 512)]), failed, "an overflow");
        assert_eq!(parsed_kind(IN, 0, &[writable(0x1000, 513)]), failed, "not whole sectors");
        assert_eq!(parsed_kind(IN, 0, &[writable(0x1000, 1 << 31), writable(0x1000, 1 << 31)]), failed, "too long");
        assert_eq!(parsed_kind(99, 0, &[]), Err(RequestStatus::Unsupported));
        assert_eq!(parsed_kind(FLUSH, 0, &[]), Ok(RequestKind::Flush));
        assert_eq!(parse_chain(&header(IN, 0), &[readable(0, 16)]), Err(Unanswerable));
        assert_eq!(parse_chain(&header(IN, 0), &[]), Err(Unanswerable));
        assert_eq!(parse_chain(&header(IN, 0), &[readable(0, 16), writable(7, 0)]), Err(Unanswerable));
        assert_eq!(parse_chain(&[], &[readable(0, 16), status]).unwrap().kind, failed, "outside the memory");
        assert_eq!(parse_chain(&header(FLUSH, 0), &[readable(0, 15), status]).unwrap().kind, failed, "half a header");
        assert_eq!(parse_chain(&header(FLUSH, 0), &[status, readable(0, 16)]).unwrap().kind, failed, "out of order");
    }

    #[test]
    fn ranges_are_on_the_disk_and_have_no_flags_but_unmap() {
        let range = |sector: u64, sectors: u32, flags: u32| {
            [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
        };
        let parsed_kind = |kind, ranges: &[Vec<u8>]| {
            let bytes = [header(kind, 0), ranges.concat()].concat();
            parse_chain(&bytes, &[readable(0, bytes.len() as u64), writable(0x5000, 1)]).unwrap().kind
        };
        let first = DiskRange { start: 0, bytes: 4096 };
        let zeroed = |may_unmap| ZeroRange { range: first, may_unmap };
        assert_eq!(parsed_kind(DISCARD, &[range(0, 8, 0)]), Ok(RequestKind::Discard(vec![first])));
        assert_eq!(
            parsed_kind(WRITE_ZEROES, &[range(0, 8, 1), range(0, 8, 0)]),
            Ok(RequestKind::Zero(vec![zeroed(true), zeroed(false)]))
        );
        assert_eq!(parsed_kind(DISCARD, &[range(0, 8, 1)]), Err(RequestStatus::Unsupported));
        assert_eq!(parsed_kind(WRITE_ZEROES, &[range(0, 8, 2)]), Err(RequestStatus::Unsupported));
        assert_eq!(parsed_kind(WRITE_ZEROES, &[range(2047, 8, 0)]), Err(RequestStatus::Failed));
        let parsed_large_kind = |kind, sectors| {
            let bytes = [header(kind, 0), range(8, sectors, 0)].concat();
            let chain = [readable(0, bytes.len() as u64), writable(0x5000, 1)];
            parse(chain.into_iter(), guest_memory(&bytes), DiskProperties { capacity: 1 << 40, ..DISK }).unwrap().kind
        };
        let whole = DiskRange { start: 4096, bytes: 1 << 30 };
        assert_eq!(parsed_large_kind(DISCARD, MAX_RANGE_SECTORS), Ok(RequestKind::Discard(vec![whole])));
        assert_eq!(
            parsed_large_kind(DISCARD, MAX_RANGE_SECTORS + 1),
            Err(RequestStatus::Failed),
            "above the reported limit"
        );
        assert_eq!(parsed_large_kind(WRITE_ZEROES, u32::MAX), Err(RequestStatus::Failed));
        assert_eq!(parsed_kind(DISCARD, &[]), Err(RequestStatus::Failed));
        assert_eq!(parsed_kind(DISCARD, &[vec![0; 15]]), Err(RequestStatus::Failed));
        assert_eq!(parsed_kind(DISCARD, &vec![range(0, 8, 0); 65]), Err(RequestStatus::Failed));
    }

    proptest! {
        #[test]
        fn no_request_exceeds_the_disk(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            kind in prop_oneof![Just(0u8), Just(1), Just(4), Just(8), Just(11), Just(13), any::<u8>()],
            chain in proptest::collection::vec(
                (prop_oneof![0..300u64, any::<u64>()], prop_oneof![0..5000u64, any::<u64>()], any::<bool>())
                    .prop_map(|(address, len, writable)| BufferSegment { address, len, writable }), 0..6),
        ) {
            let mut bytes = bytes;
            if let Some(first) = bytes.first_mut() {
                *first = kind;
            }
            let is_on_disk = |range: &DiskRange| range.start.checked_add(range.bytes).is_some_and(|end| end <= DISK.capacity);
            if let Ok(request) = parse_chain(&bytes, &chain) {
                let sum: u64 = request.data.iter().map(|segment| segment.len).sum();
                match request.kind {
                    Ok(RequestKind::Read(range)) => {
                        prop_assert!(is_on_disk(&range) && sum == range.bytes);
                        prop_assert!(request.data.iter().all(|segment| segment.writable));
                    }
                    Ok(RequestKind::Write(range)) => {
                        prop_assert!(is_on_disk(&range) && sum == range.bytes);
                        prop_assert!(request.data.iter().all(|segment| !segment.writable));
                    }
                    Ok(RequestKind::Discard(ranges)) => prop_assert!(ranges.iter().all(is_on_disk)),
                    Ok(RequestKind::Zero(ranges)) => prop_assert!(ranges.iter().all(|zero| is_on_disk(&zero.range))),
                    _ => {}
                }
            }
        }
    }
}
