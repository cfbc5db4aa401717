//! Digests that distinguish the contents of blocks.
//!
//! A digest has 128 bits of XXH3 with a seed that only this process knows. A page that a fault has changed passes
//! with a probability of 2^-128. To forge a page, a guest would have to know the seed, and would deceive only itself.

use crate::block::Block;
use rustix::rand::{GetRandomFlags, getrandom};
use std::io;
use twox_hash::XxHash3_128;

pub type Digest = u128;

/// Computes digests with a seed.
#[derive(Debug, Clone, Copy)]
pub struct Digester {
    seed: u64,
}

impl Digester {
    /// Creates a digester with a random seed.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub fn new() -> io::Result<Self> {
        let mut seed = [0; 8];
        getrandom(&mut seed, GetRandomFlags::empty())?;
        Ok(Self { seed: u64::from_ne_bytes(seed) })
    }

    /// Returns the digest of a block.
    #[must_use]
    pub fn digest(self, block: &Block) -> Digest {
        XxHash3_128::oneshot_with_seed(self.seed, block)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::block::BLOCK;
    use proptest::prelude::*;
    use xxhash_rust::xxh3::xxh3_128_with_seed;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn a_digest_is_the_same_whichever_instructions_the_processor_has(
            seed in any::<u64>(), bytes in proptest::collection::vec(any::<u8>(), BLOCK),
        ) {
            let block: &Block = bytes.as_slice().try_into().unwrap();
            prop_assert_eq!(Digester { seed }.digest(block), xxh3_128_with_seed(block, seed));
        }
    }
}
