//! Digests of a guest's memory while it is stopped.
//!
//! They answer one question: did this memory change between two moments? XXH3 is for that; it is no protection
//! against somebody who constructs collisions.

use crate::carried::Carried;
use rekindle_kernel::memory::PAGE_SIZE;
use rustix::fs::{SeekFrom, seek};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

const CHUNK: usize = 1 << 20;

/// The digest of each page of the RAM file at `path`; 0 for a page of zeroes, whether it is populated or not.
///
/// # Errors
/// When the file cannot be read.
pub fn file_pages(path: &Path) -> io::Result<Vec<u64>> {
    let file = File::open(path)?;
    let len = file.metadata()?.len();
    let mut digests = vec![0; (len / PAGE_SIZE as u64) as usize];
    let mut buffer = vec![0; CHUNK];
    let mut at = 0;
    while at < len {
        let data = match seek(&file, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(rustix::io::Errno::NXIO) => break,
            Err(e) => return Err(e.into()),
        };
        let end = seek(&file, SeekFrom::Hole(data))?.min(len);
        at = data - data % PAGE_SIZE as u64;
        while at < end {
            let some = (end - at).min(CHUNK as u64).next_multiple_of(PAGE_SIZE as u64).min(len - at);
            let chunk = buffer.get_mut(..some as usize).unwrap_or_default();
            file.read_exact_at(chunk, at)?;
            let (pages, _) = chunk.as_chunks::<PAGE_SIZE>();
            let places = digests.iter_mut().skip((at / PAGE_SIZE as u64) as usize);
            for (digest, page) in places.zip(pages) {
                *digest = page_digest(page);
            }
            at += some;
        }
    }
    Ok(digests)
}

/// Digest those pages of the RAM file at `path` anew that lie in `runs` (bytes from its beginning), in `digests`, which is as
/// [`file_pages`] gives it.
///
/// # Errors
/// When the file cannot be read; then `digests` is worth nothing.
pub fn file_pages_again(path: &Path, digests: &mut [u64], runs: &[Range<u64>]) -> io::Result<()> {
    let file = File::open(path)?;
    let mut buffer = vec![0; CHUNK];
    for run in runs {
        let end = run.end.next_multiple_of(PAGE_SIZE as u64);
        let mut at = run.start - run.start % PAGE_SIZE as u64;
        while at < end {
            let some = (end - at).min(CHUNK as u64);
            let chunk = buffer.get_mut(..some as usize).unwrap_or_default();
            file.read_exact_at(chunk, at)?;
            let places = digests.iter_mut().skip((at / PAGE_SIZE as u64) as usize);
            for (digest, page) in places.zip(chunk.as_chunks::<PAGE_SIZE>().0) {
                *digest = page_digest(page);
            }
            at += some;
        }
    }
    Ok(())
}

/// The same for pages that are known to be zero.
pub fn zero_pages(digests: &mut [u64], runs: &[Range<u64>]) {
    for run in runs {
        let (first, end) = (run.start / PAGE_SIZE as u64, run.end.div_ceil(PAGE_SIZE as u64));
        digests.iter_mut().take(end as usize).skip(first as usize).for_each(|digest| *digest = 0);
    }
}

/// That of one page.
fn page_digest(page: &[u8; PAGE_SIZE]) -> u64 {
    if page.iter().any(|&byte| byte != 0) { xxh3_64(page) } else { 0 }
}

/// The digest of each carried block, by name.
#[must_use]
pub fn carried(carried: &Carried) -> BTreeMap<String, u128> {
    let digest = |block: &crate::carried::Block| {
        let mut digest = Xxh3::new();
        digest.update(&block.used.to_le_bytes());
        for (offset, page) in block.pages() {
            digest.update(&offset.to_le_bytes());
            digest.update(page);
        }
        digest.digest128()
    };
    carried.blocks.iter().map(|block| (block.id.clone(), digest(block))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn holes_and_zeroes_are_the_same_and_a_byte_makes_a_difference() {
        let directory = tempfile::tempdir().unwrap();
        let make = |name: &str, zeroes_at: Option<u64>, byte: u8| {
            let path = directory.path().join(name);
            let mut file = File::create(&path).unwrap();
            file.set_len(5 * CHUNK as u64 + 4096).unwrap();
            if let Some(at) = zeroes_at {
                file.write_all_at(&[0; 8192], at).unwrap();
            }
            file.write_all_at(&[byte], 3 * CHUNK as u64 + 77).unwrap();
            file.write_all_at(&[1], 5 * CHUNK as u64 + 4000).unwrap();
            file.flush().unwrap();
            file_pages(&path).unwrap()
        };
        let sparse = make("a", None, 5);
        assert_eq!(sparse.len(), 5 * 256 + 1);
        assert_eq!(sparse.iter().filter(|&&digest| digest != 0).count(), 2);
        assert_eq!(sparse, make("b", Some(12288), 5));
        assert_eq!(sparse, make("c", Some(CHUNK as u64 - 4096), 5));
        let other = make("d", None, 6);
        let changed: Vec<_> = (0..sparse.len()).filter(|&page| sparse[page] != other[page]).collect();
        assert_eq!(changed, [3 * 256]);
        // Digested again where it was written, it is the same as digested anew.
        let mut again = sparse.clone();
        file_pages_again(
            &directory.path().join("d"),
            &mut again,
            &[0..10, 3 * CHUNK as u64 + 70..3 * CHUNK as u64 + 80],
        )
        .unwrap();
        assert_eq!(again, other);
        zero_pages(&mut again, std::slice::from_ref(&(3 * CHUNK as u64..3 * CHUNK as u64 + 4096)));
        assert_eq!(again.iter().filter(|&&digest| digest != 0).count(), 1);
    }
}
