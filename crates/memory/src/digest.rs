//! Digests of a stopped guest's memory.
//!
//! A comparison of digests shows whether the memory changed between two moments. XXH3 suffices for that. It does not
//! protect against deliberate collisions.
//!
//! The main RAM is a file, with a digest for each page. The other RAM blocks (firmware, video memory) are *carried*:
//! they end with their QEMU, so their content is sent to the next one ([`crate::carried`]). They have a digest for each
//! block. A *run* is a range of adjacent bytes.

use crate::carried::{CarriedBlock, CarriedBlocks};
use rekindle_pages::{PAGE_SIZE, Page};
use rustix::fs::{SeekFrom, seek};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Bytes per read.
const CHUNK_BYTES: usize = 1 << 20;
const PAGE_BYTES: u64 = PAGE_SIZE as u64;

/// Returns the digest of each page of the RAM file at `path`. The digest of a zero page is 0, whether the page is
/// populated or not.
///
/// # Errors
/// Errors of opening and reading the file.
pub fn file_pages(path: &Path) -> io::Result<Vec<u64>> {
    let file = File::open(path)?;
    let len = file.metadata()?.len();
    let mut digests = vec![0; (len / PAGE_BYTES) as usize];
    let mut offset = 0;
    while offset < len {
        let data = match seek(&file, SeekFrom::Data(offset)) {
            // Data from `len` on was appended after `len` was read.
            Ok(data) if data >= len => break,
            Ok(data) => data,
            // The rest of the file is a hole.
            Err(rustix::io::Errno::NXIO) => break,
            Err(e) => return Err(e.into()),
        };
        let hole = seek(&file, SeekFrom::Hole(data))?.min(len);
        // The pages between two runs of data are holes, which read as zeros: their digests stay 0.
        let whole_pages = data - data % PAGE_BYTES..hole.next_multiple_of(PAGE_BYTES).min(len);
        offset = whole_pages.end;
        digest_run(&file, &mut digests, whole_pages)?;
    }
    Ok(digests)
}

/// Updates `digests`, the result of [`file_pages`], for the pages in `runs` (byte offsets in the file).
///
/// # Errors
/// Errors of opening and reading the file; then `digests` is invalid.
pub fn update_file_pages(path: &Path, digests: &mut [u64], runs: &[Range<u64>]) -> io::Result<()> {
    let file = File::open(path)?;
    runs.iter().try_for_each(|run| {
        let whole_pages = run.start - run.start % PAGE_BYTES..run.end.next_multiple_of(PAGE_BYTES);
        digest_run(&file, digests, whole_pages)
    })
}

/// Computes the digests of the pages in `run`, whose byte offsets in the file are those of whole pages.
fn digest_run(file: &File, digests: &mut [u64], run: Range<u64>) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK_BYTES.min((run.end - run.start) as usize)];
    for offset in run.clone().step_by(CHUNK_BYTES) {
        let length = (run.end - offset).min(CHUNK_BYTES as u64);
        let chunk = buffer.get_mut(..length as usize).unwrap_or_default();
        file.read_exact_at(chunk, offset)?;
        // `digest_run` is called with whole pages, and a chunk is 256 of them, so no page is divided between two
        // chunks.
        let digests_of_chunk = digests.iter_mut().skip((offset / PAGE_BYTES) as usize);
        for (digest, page) in digests_of_chunk.zip(chunk.as_chunks::<PAGE_SIZE>().0) {
            *digest = page_digest(page);
        }
    }
    Ok(())
}

/// Sets the digests of the pages in `runs` (byte offsets in the file) to 0, the digest of a zero page. A page that is
/// only partly in a run is included.
pub fn zero_pages(digests: &mut [u64], runs: &[Range<u64>]) {
    for run in runs {
        let (first, end) = (run.start / PAGE_BYTES, run.end.div_ceil(PAGE_BYTES));
        digests.iter_mut().take(end as usize).skip(first as usize).for_each(|digest| *digest = 0);
    }
}

/// Returns 0 for a page of zeros, so that a hole needs no hashing.
fn page_digest(page: &Page) -> u64 {
    if page.iter().any(|&byte| byte != 0) { xxh3_64(page) } else { 0 }
}

/// Returns the digest of each block, by block name.
#[must_use]
pub fn carried(carried: &CarriedBlocks) -> BTreeMap<String, u128> {
    let digest = |block: &CarriedBlock| {
        let mut digest = Xxh3::new();
        // Length and offsets are digested, too: zero pages are left out, and the same pages at other offsets are a
        // change.
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
    fn a_hole_has_the_digest_of_zeroes_and_one_byte_changes_one_digest() {
        let directory = tempfile::tempdir().unwrap();
        // Returns the digests of a sparse file that contains `byte` and, if requested, two pages of written zeros.
        let digests_of = |name: &str, zeroes_at: Option<u64>, byte: u8| {
            let path = directory.path().join(name);
            let mut file = File::create(&path).unwrap();
            // 5 chunks of 256 pages, and one page after them: the last chunk is short.
            file.set_len(5 * CHUNK_BYTES as u64 + 4096).unwrap();
            if let Some(at) = zeroes_at {
                file.write_all_at(&[0; 8192], at).unwrap();
            }
            file.write_all_at(&[byte], 3 * CHUNK_BYTES as u64 + 77).unwrap();
            file.write_all_at(&[1], 5 * CHUNK_BYTES as u64 + 4000).unwrap();
            file.flush().unwrap();
            file_pages(&path).unwrap()
        };
        let sparse = digests_of("a", None, 5);
        assert_eq!(sparse.len(), 5 * 256 + 1);
        assert_eq!(sparse.iter().filter(|&&digest| digest != 0).count(), 2);
        // Zeros within a chunk, and zeros across the end of a chunk.
        assert_eq!(sparse, digests_of("b", Some(12288), 5));
        assert_eq!(sparse, digests_of("c", Some(CHUNK_BYTES as u64 - 4096), 5));
        let other = digests_of("d", None, 6);
        // The byte at 3 chunks + 77 is in the first page of its chunk.
        let changed: Vec<_> = (0..sparse.len()).filter(|&page| sparse[page] != other[page]).collect();
        assert_eq!(changed, [3 * 256]);
        // An update of the written pages has the same result as a full pass.
        let mut updated = sparse.clone();
        update_file_pages(
            &directory.path().join("d"),
            &mut updated,
            &[0..10, 3 * CHUNK_BYTES as u64 + 70..3 * CHUNK_BYTES as u64 + 80],
        )
        .unwrap();
        assert_eq!(updated, other);
        zero_pages(&mut updated, std::slice::from_ref(&(3 * CHUNK_BYTES as u64..3 * CHUNK_BYTES as u64 + 4096)));
        assert_eq!(updated.iter().filter(|&&digest| digest != 0).count(), 1);
    }
}
