//! RAM blocks that end with their QEMU, and so must be carried to the next one.
//!
//! The destination maps the main RAM from a file. Firmware, option ROMs, ACPI tables and video memory are anonymous
//! memory of the QEMU process. Their populated pages are read from the process and sent in the migration stream.

use rekindle_kernel::memory::{self, PageMap};
use rekindle_kernel::process::Process;
use rekindle_pages::{PAGE_SIZE, Page, ZERO_PAGE};
use rekindle_qemu::ramblock::{MAIN_RAM, RamBlock};
use rekindle_qemu::stream::StreamBlocks;
use std::io;

/// A RAM block other than the main RAM, with its content.
#[derive(Debug, Clone)]
pub struct CarriedBlock {
    /// QEMU's name of the block.
    pub id: String,
    /// Bytes of the block that QEMU uses.
    pub used: u64,
    /// Runs of populated pages by byte offset, ascending, not adjacent. The pages between the runs are zero.
    runs: Vec<(u64, Vec<u8>)>,
}

impl CarriedBlock {
    /// Returns the pages that are not all zero, by byte offset, ascending.
    pub fn pages(&self) -> impl Iterator<Item = (u64, &Page)> {
        self.runs
            .iter()
            .flat_map(|(start, bytes)| (*start..).step_by(PAGE_SIZE).zip(bytes.as_chunks::<PAGE_SIZE>().0))
            .filter(|(_, page)| **page != ZERO_PAGE)
    }
}

impl PartialEq for CarriedBlock {
    fn eq(&self, other: &Self) -> bool {
        (&self.id, self.used) == (&other.id, other.used) && self.pages().eq(other.pages())
    }
}

impl Eq for CarriedBlock {}

/// The content of all RAM blocks but the main RAM, at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CarriedBlocks {
    /// The blocks in QEMU's order.
    pub blocks: Vec<CarriedBlock>,
}

impl CarriedBlocks {
    /// Reads `blocks` of a QEMU process.
    ///
    /// The caller must have stopped the guest, so that the content belongs to one moment.
    ///
    /// # Errors
    /// `Unsupported` when this QEMU does not report the addresses of its blocks; errors of [`memory::read`].
    pub fn read(process: Process, blocks: &[RamBlock]) -> io::Result<Self> {
        let map = PageMap::open(process)?;
        let mut carried = Self::default();
        for block in blocks {
            let Some(address) = block.address else {
                let text = format!("this QEMU does not report the address of its RAM block {}", block.id);
                return Err(io::Error::new(io::ErrorKind::Unsupported, text));
            };
            let mut runs = Vec::new();
            for run in map.populated(address, block.used)? {
                let mut bytes = vec![0; (run.end - run.start) as usize];
                memory::read(process, address + run.start, &mut bytes)?;
                runs.push((run.start, bytes));
            }
            carried.blocks.push(CarriedBlock { id: block.id.clone(), used: block.used, runs });
        }
        Ok(carried)
    }

    /// Returns the pages to write over `older` to get this content, as `(block, offset, page)`. Pages that became zero
    /// are included.
    ///
    /// `None` if blocks were added, removed or resized: then all content must be written again.
    #[must_use]
    pub fn changes_since<'a>(&'a self, older: &'a Self) -> Option<Vec<(&'a str, u64, &'a Page)>> {
        if self.blocks.len() != older.blocks.len() {
            return None;
        }
        let mut changes = Vec::new();
        for (new, old) in self.blocks.iter().zip(&older.blocks) {
            if (&new.id, new.used) != (&old.id, old.used) {
                return None;
            }
            // The pages of both versions are ascending, so one pass finds added, removed and changed pages.
            let mut old_pages = old.pages().peekable();
            let mut new_pages = new.pages().peekable();
            loop {
                let old_at = old_pages.peek().map_or(u64::MAX, |(offset, _)| *offset);
                let new_at = new_pages.peek().map_or(u64::MAX, |(offset, _)| *offset);
                let before = old_pages.next_if(|(offset, _)| *offset <= new_at);
                let after = new_pages.next_if(|(offset, _)| *offset <= old_at);
                match (before, after) {
                    (None, None) => break,
                    (Some((removed, _)), None) => changes.push((new.id.as_str(), removed, &ZERO_PAGE)),
                    (Some((_, before)), Some((_, after))) if before == after => {}
                    (_, Some((offset, after))) => changes.push((new.id.as_str(), offset, after)),
                }
            }
        }
        Some(changes)
    }

    /// Returns name and size of each block, as listed at the start of a stream's `ram` section.
    pub fn sizes(&self) -> impl Iterator<Item = (&str, u64)> + Clone {
        self.blocks.iter().map(|block| (block.id.as_str(), block.used))
    }

    /// Converts the blocks read from a migration stream; leaves out the main RAM.
    #[must_use]
    pub fn from_stream(blocks: StreamBlocks) -> Self {
        let blocks = blocks
            .into_iter()
            .filter(|(id, _)| id != MAIN_RAM)
            .map(|(id, block)| CarriedBlock { id, used: block.used, runs: block.pages.into_iter().collect() })
            .collect();
        Self { blocks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn carried(pages: &BTreeMap<u64, u8>) -> CarriedBlocks {
        let runs = pages.iter().map(|(n, byte)| (n * PAGE_SIZE as u64, vec![*byte; PAGE_SIZE])).collect();
        CarriedBlocks { blocks: vec![CarriedBlock { id: "vga.vram".into(), used: 1 << 20, runs }] }
    }

    fn block(used: u64, address: Option<u64>) -> RamBlock {
        RamBlock { id: "pc.bios".into(), used, total: used, page_size: PAGE_SIZE as u64, offset: 0, address }
    }

    #[test]
    fn a_resized_block_gives_no_patch() {
        let old = carried(&BTreeMap::new());
        let mut new = old.clone();
        new.blocks[0].used *= 2;
        assert!(new.changes_since(&old).is_none());
    }

    #[test]
    fn the_error_for_a_block_without_address_names_the_block() {
        let me = Process::current().unwrap();
        let blocks = [block(4096, None)];
        let e = CarriedBlocks::read(me, &blocks).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::Unsupported);
        assert!(e.to_string().contains("pc.bios"), "{e}");
    }

    #[test]
    fn a_block_is_read_from_a_process() {
        let me = Process::current().unwrap();
        let mut area = vec![0u8; 5 * PAGE_SIZE];
        let start = (area.as_ptr() as usize).next_multiple_of(PAGE_SIZE) - area.as_ptr() as usize;
        area[start + PAGE_SIZE + 3] = 9;
        let address = Some((area.as_ptr() as usize + start) as u64);
        let blocks = [block(4 * PAGE_SIZE as u64, address)];
        let carried = CarriedBlocks::read(me, &blocks).unwrap();
        let pages: Vec<_> = carried.blocks[0].pages().map(|(offset, page)| (offset, page[3])).collect();
        assert_eq!(pages, [(PAGE_SIZE as u64, 9)]);
    }

    proptest! {
        #[test]
        fn old_and_its_changes_make_new(
            old in proptest::collection::btree_map(0u64..20, 0u8..4, 0..20),
            new in proptest::collection::btree_map(0u64..20, 0u8..4, 0..20),
        ) {
            let (before, after) = (carried(&old), carried(&new));
            let mut patched = old.clone();
            for (_, offset, page) in after.changes_since(&before).unwrap() {
                patched.insert(offset / PAGE_SIZE as u64, page[0]);
            }
            prop_assert_eq!(carried(&patched), after);
        }
    }
}
