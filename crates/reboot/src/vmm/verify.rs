//! Checks that a guest's memory did not change while its QEMU was replaced.
//!
//! The main RAM is a file that both QEMUs map. The other RAM blocks are *carried*: their content is sent from the
//! source QEMU to the destination ([`rekindle_memory::carried`]).

use rekindle_memory::carried::CarriedBlocks;
use rekindle_memory::digest;
use rekindle_pages::PAGE_SIZE;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Result of comparing a guest's whole memory before and after the hand-over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryComparison {
    /// Bytes of main RAM in pages that differ.
    pub ram_changed_bytes: u64,
    /// For each RAM block except the main RAM: `true` if it differs. Empty if the blocks of a QEMU cannot be read.
    pub blocks_changed: BTreeMap<String, bool>,
    /// Names of RAM blocks that could be read in one of the QEMUs only.
    pub not_compared: Vec<String>,
}

/// Digests of a stopped guest's memory: of each page of the RAM file, and of each other RAM block (`None` if the blocks
/// could not be read).
pub(crate) struct MemoryDigests {
    ram: Vec<u64>,
    blocks: Option<BTreeMap<String, u128>>,
}

impl MemoryDigests {
    /// Combines the digests of the RAM file's pages with digests of the other RAM blocks, if those could be read.
    pub(crate) fn new(ram: Vec<u64>, carried: Option<&CarriedBlocks>) -> Self {
        Self { ram, blocks: carried.map(digest::carried) }
    }

    /// Compares these digests with those taken `later`.
    pub(crate) fn compare(&self, later: &Self) -> MemoryComparison {
        let pages = self.ram.iter().zip(&later.ram).filter(|(before, after)| before != after).count();
        let missing = self.ram.len().abs_diff(later.ram.len());
        let mut memory = MemoryComparison {
            ram_changed_bytes: ((pages + missing) * PAGE_SIZE) as u64,
            blocks_changed: BTreeMap::new(),
            not_compared: Vec::new(),
        };
        match (&self.blocks, &later.blocks) {
            (Some(before), Some(after)) => {
                for (id, digest) in before {
                    memory.blocks_changed.insert(id.clone(), after.get(id) != Some(digest));
                }
                for id in after.keys().filter(|id| !before.contains_key(*id)) {
                    memory.blocks_changed.insert(id.clone(), true);
                }
            }
            (Some(blocks), None) | (None, Some(blocks)) => memory.not_compared = blocks.keys().cloned().collect(),
            (None, None) => {}
        }
        memory
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_page_and_a_changed_block_are_counted() {
        let blocks = |bios: u128| Some(BTreeMap::from([("pc.bios".to_owned(), bios), ("vga.vram".to_owned(), 5)]));
        let before = MemoryDigests { ram: vec![1, 2, 3], blocks: blocks(1) };
        assert_eq!(before.compare(&before).ram_changed_bytes, 0);
        let after = MemoryDigests { ram: vec![1, 9, 3], blocks: blocks(2) };
        let memory = before.compare(&after);
        assert_eq!(memory.ram_changed_bytes, 4096);
        assert!(memory.blocks_changed["pc.bios"] && !memory.blocks_changed["vga.vram"]);
        let unknown = MemoryDigests { ram: vec![1, 2], blocks: None };
        let memory = before.compare(&unknown);
        assert_eq!((memory.ram_changed_bytes, memory.not_compared.len()), (4096, 2));
    }
}
