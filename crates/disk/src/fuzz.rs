//! What a guest may ask for, out of any bytes: the target in `fuzz/`, and the test below, which does the same on every build
//! with a fixed budget.

use crate::chain::walk;
use crate::request::{Disk, Kind, parse};

const DISK: Disk = Disk { capacity: 1 << 30, readonly: false };
/// Descriptors of the queue.
const SIZE: u16 = 32;

/// Take `bytes` for the memory of a guest whose descriptors are at its beginning, and read the request at descriptor 0.
///
/// # Panics
/// When what comes out leads beyond the disk or makes no sense: a bug.
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
            assert_eq!(sum, range.bytes, "its data is as long as what it is for");
            vec![*range]
        }
        Ok(Kind::Discard(ranges)) => ranges.clone(),
        Ok(Kind::Zeroes(ranges)) => ranges.iter().map(|(range, _)| *range).collect(),
        _ => Vec::new(),
    };
    for range in ranges {
        let end = range.at.checked_add(range.bytes);
        assert!(end.is_some_and(|end| end <= DISK.capacity), "{range:?} leads beyond the disk");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest that has put a valid request: header at 1024, data at 2048, status at 1040.
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
    fn no_bytes_lead_beyond_the_disk() {
        let mut random = fastrand::Rng::with_seed(1);
        let mut random = |below: usize| random.usize(..below);
        for kind in [0, 1, 4, 8, 11, 13] {
            request(&seed(kind, 8));
            for _ in 0..20_000 {
                let mut bytes = seed(kind, random(1 << 22) as u64);
                for _ in 0..random(8) {
                    // Descriptors, header and the beginning of the data.
                    let at = [random(96), 1024 + random(16), 2048 + random(64)][random(3)];
                    bytes[at] = [0, 1, 0x7f, 0x80, 0xff, random(256) as u8][random(6)];
                }
                request(&bytes);
            }
        }
    }
}
