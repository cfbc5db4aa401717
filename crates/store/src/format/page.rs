//! Digests and compression of pages.

use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into};
use rekindle_pages::{PAGE_SIZE, Page};
use std::fmt;
use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_64_with_seed;

const ZERO: Page = [0; PAGE_SIZE];

/// Computes the digests of the pages of one store.
#[derive(Debug, Clone, Copy)]
pub struct Digester {
    seed: u64,
}

impl Digester {
    /// Returns the digester of the store `id`. The ID seeds the hash.
    #[must_use]
    pub fn new(id: Uuid) -> Self {
        let (high, low) = id.as_u64_pair();
        Self { seed: high ^ low }
    }

    /// Returns the digest of a page. It is 0 for a page of zeroes, and for no other page.
    #[must_use]
    pub fn digest(self, page: &Page) -> u64 {
        if *page == ZERO { 0 } else { xxh3_64_with_seed(page, self.seed).max(1) }
    }
}

/// A page as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredPage {
    /// Digest of the page's content.
    pub digest: u64,
    /// Compressed or plain content; empty for a page of zeroes.
    pub bytes: Vec<u8>,
}

/// Distance in bytes between samples of a page before compression. It is not a multiple of a word's length, so that the
/// samples include every byte position of a word.
const SAMPLE_DISTANCE: usize = 7;
/// A page with fewer distinct values among its samples is compressed. 586 random bytes have about 230 different
/// values, and hardly ever fewer than this; machine code has about 150.
const MIN_RANDOM_VALUES: u32 = 210;

/// Returns whether a page appears to be compressed, encrypted or random. An attempt to compress takes ten times as long
/// as this check. If the result is wrong, the page only uses more space.
fn is_probably_random(page: &Page) -> bool {
    // One bit for each value of a byte.
    let mut seen_values = [0u64; 4];
    for byte in page.iter().step_by(SAMPLE_DISTANCE) {
        if let Some(word) = seen_values.get_mut(usize::from(byte >> 6)) {
            *word |= 1 << (byte & 63);
        }
    }
    seen_values.iter().map(|word| word.count_ones()).sum::<u32>() >= MIN_RANDOM_VALUES
}

/// Compresses pages. The working memory is reused.
pub struct Packer {
    table: CompressTable,
    buffer: Vec<u8>,
}

impl fmt::Debug for Packer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Packer")
    }
}

impl Default for Packer {
    fn default() -> Self {
        let max_len = lz4_flex::block::get_maximum_output_size(PAGE_SIZE);
        Self { table: CompressTable::small(), buffer: vec![0; max_len] }
    }
}

impl Packer {
    /// Compresses a page. Returns `None` if that does not shorten it; the page is then stored uncompressed.
    pub fn pack(&mut self, page: &Page) -> Option<&[u8]> {
        if is_probably_random(page) {
            return None;
        }
        let len = compress_into_with_table(page, &mut self.buffer, &mut self.table).ok()?;
        self.buffer.get(..len).filter(|stored| stored.len() < PAGE_SIZE)
    }
}

/// Decompresses a page from its stored bytes and checks its digest.
///
/// # Errors
/// A text that describes what is wrong. The content of `page` must not be used then.
pub fn unpack(digester: Digester, stored: &[u8], digest: u64, page: &mut Page) -> Result<(), &'static str> {
    match stored.len() {
        // Only a page of zeroes has the digest 0.
        0 => {
            *page = ZERO;
            return if digest == 0 { Ok(()) } else { Err("nothing is stored of it, and it is not zero") };
        }
        PAGE_SIZE => page.copy_from_slice(stored),
        _ => match decompress_into(stored, page) {
            Ok(PAGE_SIZE) => {}
            Ok(_) => return Err("its stored bytes are not a whole page"),
            Err(_) => return Err("its stored bytes cannot be decompressed"),
        },
    }
    if digester.digest(page) == digest { Ok(()) } else { Err("its content does not have the digest that was stored") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_page_of_zeroes_and_only_that_has_digest_0() {
        let digester = Digester::new(Uuid::from_u128(7));
        assert_eq!(digester.digest(&ZERO), 0);
        let mut page = ZERO;
        page[4095] = 1;
        assert_ne!(digester.digest(&page), 0);
        assert_ne!(digester.digest(&page), Digester::new(Uuid::from_u128(8)).digest(&page));
    }

    #[test]
    fn what_is_probably_random_is_not_compressed_and_the_rest_is() {
        let mut state = 88_172_645_463_325_252u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for _ in 0..1000 {
            let page: Page = std::array::from_fn(|_| next() as u8);
            assert!(is_probably_random(&page));
            assert_eq!(Packer::default().pack(&page), None);
        }
        let words =
            |of: &dyn Fn(u64) -> u64| -> Page { std::array::from_fn(|n| of(n as u64 / 8).to_le_bytes()[n % 8]) };
        let pointers = words(&|n| 0xffff_8880_0000_0000 + n.wrapping_mul(0x9e37_79b9) % (1 << 30) * 64);
        let counters = words(&|n| n);
        let text: Page = std::array::from_fn(|n| b"The guest is never given a page that is not what it was. "[n % 57]);
        for page in [pointers, counters, text] {
            assert!(!is_probably_random(&page));
            assert!(Packer::default().pack(&page).unwrap().len() < 4096);
        }
    }

    proptest! {
        #[test]
        fn a_page_comes_back_and_a_flipped_bit_does_not(
            pattern in proptest::collection::vec(any::<u8>(), 1..4096), flip in any::<u32>(),
        ) {
            let page: Page = std::array::from_fn(|n| pattern[n % pattern.len()]);
            let digester = Digester::new(Uuid::from_u128(7));
            let digest = digester.digest(&page);
            let mut stored = Packer::default().pack(&page).unwrap_or(&page).to_vec();
            let mut back = [1; PAGE_SIZE];
            prop_assert_eq!(unpack(digester, &stored, digest, &mut back), Ok(()));
            prop_assert!(back == page);
            let bit = flip as usize % (stored.len() * 8);
            stored[bit / 8] ^= 1 << (bit % 8);
            // Different bytes may decompress to the same page. The page is correct then.
            if unpack(digester, &stored, digest, &mut back).is_ok() {
                prop_assert!(back == page);
            }
        }

        #[test]
        fn no_bytes_make_a_page_panic(stored in proptest::collection::vec(any::<u8>(), 0..5000)) {
            let mut page = ZERO;
            let _ = unpack(Digester::new(Uuid::nil()), &stored, 5, &mut page);
        }
    }
}
