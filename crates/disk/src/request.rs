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
use crate::config::RANGE_SECTORS;

pub const HEADER: u64 = 16;
const RANGE: u64 = 16;
/// Most ranges in one discard, as in the configuration space.
pub const MOST_RANGES: u32 = 64;
pub const IDENTITY: usize = 20;

/// The value of the status byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum RequestStatus {
    Ok = 0,
    Failed = 1,
    /// The operation is not supported.
    Unsupported = 2,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferSegment {
    pub address: u64,
    pub len: u64,
    /// The device writes the segment instead of reading it.
    pub writable: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    pub at: u64,
    pub bytes: u64,
}

impl Range {
    /// Returns a range of sectors, if it is within a disk of `capacity` bytes.
    fn of(sector: u64, bytes: u64, capacity: u64) -> Option<Self> {
        let at = sector.checked_mul(SECTOR)?;
        let end = at.checked_add(bytes)?;
        (end <= capacity && bytes.is_multiple_of(SECTOR)).then_some(Self { at, bytes })
    }
}

/// The operation of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    Read(Range),
    Write(Range),
    /// Make earlier writes durable.
    Flush,
    /// Return the serial number in `data`.
    Identity,
    /// Make the content of these ranges undefined.
    Discard(Vec<Range>),
    /// Write zeros. `true`: the space may be released.
    Zeroes(Vec<(Range, bool)>),
}

impl Kind {
    /// Returns the parts of the disk that the operation accesses.
    pub fn ranges(&self) -> impl Iterator<Item = Range> {
        let (one, discards, zeroes): (_, &[Range], &[(Range, bool)]) = match self {
            Self::Read(range) | Self::Write(range) => (Some(*range), &[], &[]),
            Self::Discard(ranges) => (None, ranges, &[]),
            Self::Zeroes(ranges) => (None, &[], ranges),
            Self::Flush | Self::Identity => (None, &[], &[]),
        };
        one.into_iter().chain(discards.iter().copied()).chain(zeroes.iter().map(|(range, _)| *range))
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The operation, or the status to answer with immediately.
    pub what: Result<Kind, RequestStatus>,
    /// The data in the guest's memory.
    pub data: Vec<BufferSegment>,
    /// Address of the status byte.
    pub status: u64,
    /// Bytes for the used ring if the request succeeds, including the status.
    pub written: u32,
}

/// A chain without a status byte, which cannot be answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unanswerable;

/// The properties of the disk that requests are checked against.
#[derive(Debug, Clone, Copy)]
pub struct Disk {
    pub capacity: u64,
    pub readonly: bool,
}

/// Parses a chain. `read` copies bytes of the guest's memory, and returns `None` if they are outside of it.
pub fn parse(
    chain: impl Iterator<Item = BufferSegment>,
    mut read: impl FnMut(u64, &mut [u8]) -> Option<()>,
    disk: Disk,
) -> Result<Request, Unanswerable> {
    let (mut readable, mut writable, mut in_order) = (Vec::new(), Vec::new(), true);
    for segment in chain {
        if segment.writable {
            writable.push(segment);
        } else {
            in_order &= writable.is_empty();
            readable.push(segment);
        }
    }
    let status = cut_last(&mut writable).ok_or(Unanswerable)?;
    let mut header = [0; HEADER as usize];
    let refused = |what: RequestStatus| Request { what: Err(what), data: Vec::new(), status, written: 1 };
    if !in_order || gather(&mut readable, &mut header, &mut read).is_none() {
        return Ok(refused(RequestStatus::Failed));
    }
    let [kind, _, low, high] = header.as_chunks::<4>().0 else { return Ok(refused(RequestStatus::Failed)) };
    let (kind, sector) = (u32::from_le_bytes(*kind), u64::from_le_bytes(both(*low, *high)));
    let (Some(given), Some(wanted)) = (total(&readable), total(&writable)) else {
        return Ok(refused(RequestStatus::Failed));
    };
    let what = match kind {
        0 => Range::of(sector, wanted, disk.capacity).map(Kind::Read).ok_or(RequestStatus::Failed),
        1 | 11 | 13 if disk.readonly => Err(RequestStatus::Failed),
        1 => Range::of(sector, given, disk.capacity).map(Kind::Write).ok_or(RequestStatus::Failed),
        4 => Ok(Kind::Flush),
        8 => Ok(Kind::Identity),
        11 => ranges(&mut readable, given, &mut read, disk, 0)
            .map(|all| Kind::Discard(all.into_iter().map(|(range, _)| range).collect())),
        13 => ranges(&mut readable, given, &mut read, disk, 1).map(Kind::Zeroes),
        _ => Err(RequestStatus::Unsupported),
    };
    let (data, written) = match &what {
        Ok(Kind::Read(_)) => (writable, wanted),
        Ok(Kind::Identity) => (writable, wanted.min(IDENTITY as u64)),
        Ok(Kind::Write(_)) => (readable, 0),
        _ => (Vec::new(), 0),
    };
    Ok(Request { what, data, status, written: u32::try_from(written + 1).unwrap_or(u32::MAX) })
}

fn both([a, b, c, d]: [u8; 4], [e, f, g, h]: [u8; 4]) -> [u8; 8] {
    [a, b, c, d, e, f, g, h]
}

/// Removes the last writable byte, which is the status, and returns its address. The remaining bytes are data.
fn cut_last(writable: &mut Vec<BufferSegment>) -> Option<u64> {
    loop {
        let last = writable.last_mut()?;
        match last.len.checked_sub(1) {
            None => drop(writable.pop()),
            Some(rest) => {
                last.len = rest;
                return last.address.checked_add(rest);
            }
        }
    }
}

fn total(segments: &[BufferSegment]) -> Option<u64> {
    let sum = segments.iter().try_fold(0u64, |sum, segment| sum.checked_add(segment.len))?;
    // The used ring has 32-bit lengths.
    (sum < u64::from(u32::MAX)).then_some(sum)
}

/// Moves the first bytes of the segments to `into`: copies them and removes them from the segments.
fn gather(
    segments: &mut [BufferSegment],
    into: &mut [u8],
    read: &mut impl FnMut(u64, &mut [u8]) -> Option<()>,
) -> Option<()> {
    let mut rest = into;
    for segment in segments {
        if rest.is_empty() {
            break;
        }
        let taken = segment.len.min(rest.len() as u64);
        let (now, later) = rest.split_at_mut(taken as usize);
        read(segment.address, now)?;
        segment.address = segment.address.checked_add(taken)?;
        segment.len -= taken;
        rest = later;
    }
    rest.is_empty().then_some(())
}

/// Parses the ranges of a discard (`allowed` flags: none) or of a write of zeros (1: unmap).
fn ranges(
    readable: &mut [BufferSegment],
    given: u64,
    read: &mut impl FnMut(u64, &mut [u8]) -> Option<()>,
    disk: Disk,
    allowed: u32,
) -> Result<Vec<(Range, bool)>, RequestStatus> {
    let count = given / RANGE;
    if given == 0 || !given.is_multiple_of(RANGE) || count > u64::from(MOST_RANGES) {
        return Err(RequestStatus::Failed);
    }
    let mut found = Vec::new();
    for _ in 0..count {
        let mut bytes = [0; RANGE as usize];
        gather(readable, &mut bytes, read).ok_or(RequestStatus::Failed)?;
        let [low, high, sectors, flags] = bytes.as_chunks::<4>().0 else { return Err(RequestStatus::Failed) };
        let (sector, flags) = (u64::from_le_bytes(both(*low, *high)), u32::from_le_bytes(*flags));
        if flags & !allowed != 0 {
            return Err(RequestStatus::Unsupported);
        }
        let sectors = u32::from_le_bytes(*sectors);
        if sectors > RANGE_SECTORS {
            return Err(RequestStatus::Failed);
        }
        let bytes = u64::from(sectors) * SECTOR;
        found.push((Range::of(sector, bytes, disk.capacity).ok_or(RequestStatus::Failed)?, flags & 1 != 0));
    }
    Ok(found)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DISK: Disk = Disk { capacity: 1 << 20, readonly: false };

    /// Returns a `read` function for a guest whose memory starts with `bytes`.
    fn guest(bytes: &[u8]) -> impl FnMut(u64, &mut [u8]) -> Option<()> {
        |at, into| {
            let at = usize::try_from(at).ok()?;
            into.copy_from_slice(bytes.get(at..at.checked_add(into.len())?)?);
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

    fn of(bytes: &[u8], chain: &[BufferSegment]) -> Result<Request, Unanswerable> {
        parse(chain.iter().copied(), guest(bytes), DISK)
    }

    #[test]
    fn a_read_has_its_data_before_the_status_however_it_is_cut() {
        let bytes = header(0, 8);
        let usual = of(&bytes, &[readable(0, 16), writable(0x1000, 4096), writable(0x5000, 1)]).unwrap();
        let range = Range { at: 4096, bytes: 4096 };
        assert_eq!((usual.what, usual.status, usual.written), (Ok(Kind::Read(range)), 0x5000, 4097));
        assert_eq!(usual.data, [writable(0x1000, 4096), writable(0x5000, 0)]);
        let cut = of(&bytes, &[readable(0, 3), readable(3, 13), writable(0x1000, 4097)]).unwrap();
        assert_eq!((cut.what, cut.status), (Ok(Kind::Read(range)), 0x2000));
        assert_eq!(cut.data, [writable(0x1000, 4096)]);
    }

    #[test]
    fn a_write_has_its_data_after_the_header() {
        let bytes = header(1, 0);
        let request = of(&bytes, &[readable(0, 528), writable(0x5000, 1)]).unwrap();
        assert_eq!(request.what, Ok(Kind::Write(Range { at: 0, bytes: 512 })));
        assert_eq!((request.data, request.written), (vec![readable(16, 512)], 1));
        let readonly = Disk { readonly: true, ..DISK };
        let chain = [readable(0, 528), writable(0x5000, 1)];
        assert_eq!(parse(chain.into_iter(), guest(&bytes), readonly).unwrap().what, Err(RequestStatus::Failed));
    }

    #[test]
    fn what_exceeds_the_disk_or_is_no_request_is_rejected() {
        let status = writable(0x5000, 1);
        let what = |kind, sector, more: &[BufferSegment]| {
            let chain = [&[readable(0, 16)], more, &[status]].concat();
            of(&header(kind, sector), &chain).unwrap().what
        };
        let failed = Err(RequestStatus::Failed);
        assert_eq!(what(0, 2048, &[writable(0x1000, 512)]), failed, "after the end");
        assert_eq!(what(0, 2047, &[writable(0x1000, 1024)]), failed, "across the end");
        assert_eq!(what(0, u64::MAX / 512 + 2, &[writable(0x1000, 512)]), failed, "an overflow");
        assert_eq!(what(0, 0, &[writable(0x1000, 513)]), failed, "not whole sectors");
        assert_eq!(what(0, 0, &[writable(0x1000, 1 << 31), writable(0x1000, 1 << 31)]), failed, "too long");
        assert_eq!(what(99, 0, &[]), Err(RequestStatus::Unsupported));
        assert_eq!(what(4, 0, &[]), Ok(Kind::Flush));
        assert_eq!(of(&header(0, 0), &[readable(0, 16)]), Err(Unanswerable));
        assert_eq!(of(&header(0, 0), &[]), Err(Unanswerable));
        assert_eq!(of(&header(0, 0), &[readable(0, 16), writable(7, 0)]), Err(Unanswerable));
        assert_eq!(of(&[], &[readable(0, 16), status]).unwrap().what, failed, "outside the memory");
        assert_eq!(of(&header(4, 0), &[readable(0, 15), status]).unwrap().what, failed, "half a header");
        assert_eq!(of(&header(4, 0), &[status, readable(0, 16)]).unwrap().what, failed, "out of order");
    }

    #[test]
    fn ranges_are_on_the_disk_and_have_no_flags_but_unmap() {
        let range = |sector: u64, sectors: u32, flags: u32| {
            [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
        };
        let what = |kind, ranges: &[Vec<u8>]| {
            let bytes = [header(kind, 0), ranges.concat()].concat();
            of(&bytes, &[readable(0, bytes.len() as u64), writable(0x5000, 1)]).unwrap().what
        };
        let first = Range { at: 0, bytes: 4096 };
        assert_eq!(what(11, &[range(0, 8, 0)]), Ok(Kind::Discard(vec![first])));
        assert_eq!(what(13, &[range(0, 8, 1), range(0, 8, 0)]), Ok(Kind::Zeroes(vec![(first, true), (first, false)])));
        assert_eq!(what(11, &[range(0, 8, 1)]), Err(RequestStatus::Unsupported));
        assert_eq!(what(13, &[range(0, 8, 2)]), Err(RequestStatus::Unsupported));
        assert_eq!(what(13, &[range(2047, 8, 0)]), Err(RequestStatus::Failed));
        let large = |kind, sectors| {
            let bytes = [header(kind, 0), range(8, sectors, 0)].concat();
            let chain = [readable(0, bytes.len() as u64), writable(0x5000, 1)];
            parse(chain.into_iter(), guest(&bytes), Disk { capacity: 1 << 40, ..DISK }).unwrap().what
        };
        let whole = Range { at: 4096, bytes: 1 << 30 };
        assert_eq!(large(11, RANGE_SECTORS), Ok(Kind::Discard(vec![whole])));
        assert_eq!(large(11, RANGE_SECTORS + 1), Err(RequestStatus::Failed), "above the reported limit");
        assert_eq!(large(13, u32::MAX), Err(RequestStatus::Failed));
        assert_eq!(what(11, &[]), Err(RequestStatus::Failed));
        assert_eq!(what(11, &[vec![0; 15]]), Err(RequestStatus::Failed));
        assert_eq!(what(11, &vec![range(0, 8, 0); 65]), Err(RequestStatus::Failed));
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
            let inside = |range: &Range| range.at.checked_add(range.bytes).is_some_and(|end| end <= DISK.capacity);
            if let Ok(request) = of(&bytes, &chain) {
                let sum: u64 = request.data.iter().map(|segment| segment.len).sum();
                match request.what {
                    Ok(Kind::Read(range)) => {
                        prop_assert!(inside(&range) && sum == range.bytes);
                        prop_assert!(request.data.iter().all(|segment| segment.writable));
                    }
                    Ok(Kind::Write(range)) => {
                        prop_assert!(inside(&range) && sum == range.bytes);
                        prop_assert!(request.data.iter().all(|segment| !segment.writable));
                    }
                    Ok(Kind::Discard(ranges)) => prop_assert!(ranges.iter().all(inside)),
                    Ok(Kind::Zeroes(ranges)) => prop_assert!(ranges.iter().all(|(range, _)| inside(range))),
                    _ => {}
                }
            }
        }
    }
}
