//! The RAM blocks that do not outlive their QEMU by themselves.
//!
//! The main RAM is a shared file. Firmware, option ROMs, ACPI tables and video memory are anonymous memory of the
//! QEMU process; they are read from it, page by page where it is populated, and travel in the stream.

use rekindle_kernel::memory::{self, PAGE_SIZE, PageMap};
use rekindle_kernel::process::Process;
use rekindle_qemu::ramblock::{MAIN_RAM, RamBlock};
use rekindle_qemu::stream::Blocks;
use std::io;

/// One page.
pub type Page = [u8; PAGE_SIZE];

/// One block with its content.
#[derive(Debug, Clone)]
pub struct Block {
    /// QEMU's name for it.
    pub id: String,
    /// Bytes in use.
    pub used: u64,
    /// Runs of populated pages by byte offset, ascending and apart. What is between them is zero.
    runs: Vec<(u64, Vec<u8>)>,
}

impl Block {
    /// The pages that are not all zero, by byte offset, ascending.
    pub fn pages(&self) -> impl Iterator<Item = (u64, &Page)> {
        self.runs
            .iter()
            .flat_map(|(start, bytes)| (*start..).step_by(PAGE_SIZE).zip(bytes.as_chunks::<PAGE_SIZE>().0))
            .filter(|(_, page)| **page != ZERO)
    }
}

impl PartialEq for Block {
    fn eq(&self, other: &Self) -> bool {
        (&self.id, self.used) == (&other.id, other.used) && self.pages().eq(other.pages())
    }
}

impl Eq for Block {}

const ZERO: Page = [0; PAGE_SIZE];

/// The content of all RAM blocks but the main RAM, at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Carried {
    /// The blocks, in QEMU's order.
    pub blocks: Vec<Block>,
}

impl Carried {
    /// Read the blocks of a QEMU process, given what it says of them.
    ///
    /// While the guest runs the content may be of different moments; with the guest stopped it is exact.
    ///
    /// # Errors
    /// `Unsupported` when this QEMU does not tell where its blocks are; otherwise as [`memory::read`].
    pub fn read(process: Process, blocks: &[RamBlock]) -> io::Result<Self> {
        let map = PageMap::open(process)?;
        let mut carried = Self::default();
        for block in blocks.iter().filter(|block| block.id != MAIN_RAM) {
            let Some(address) = block.address else {
                let text = format!("this QEMU does not tell where its RAM block {} is", block.id);
                return Err(io::Error::new(io::ErrorKind::Unsupported, text));
            };
            let mut runs = Vec::new();
            for run in map.populated(address, block.used)? {
                let mut bytes = vec![0; (run.end - run.start) as usize];
                memory::read(process, address + run.start, &mut bytes)?;
                runs.push((run.start, bytes));
            }
            carried.blocks.push(Block { id: block.id.clone(), used: block.used, runs });
        }
        Ok(carried)
    }

    /// What must be written over `older` to get this: `(block, offset, page)`, pages that became zero among them.
    ///
    /// `None` when blocks have come, gone or changed their size: then there is no patch, only a new start.
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
            // Both ascend: one walk along them finds what came, went and changed.
            let mut old_pages = old.pages().peekable();
            let mut new_pages = new.pages().peekable();
            loop {
                let old_at = old_pages.peek().map_or(u64::MAX, |(offset, _)| *offset);
                let new_at = new_pages.peek().map_or(u64::MAX, |(offset, _)| *offset);
                let before = old_pages.next_if(|(offset, _)| *offset <= new_at);
                let after = new_pages.next_if(|(offset, _)| *offset <= old_at);
                match (before, after) {
                    (None, None) => break,
                    (Some((gone, _)), None) => changes.push((new.id.as_str(), gone, &ZERO)),
                    (Some((_, before)), Some((_, after))) if before == after => {}
                    (_, Some((offset, after))) => changes.push((new.id.as_str(), offset, after)),
                }
            }
        }
        Some(changes)
    }

    /// Name and size of each block, as a stream's `ram` section starts with them.
    pub fn sizes(&self) -> impl Iterator<Item = (&str, u64)> + Clone {
        self.blocks.iter().map(|block| (block.id.as_str(), block.used))
    }

    /// The blocks as read back from a stream.
    #[must_use]
    pub fn from_stream(blocks: Blocks) -> Self {
        let blocks = blocks
            .into_iter()
            .filter(|(id, _)| id != MAIN_RAM)
            .map(|(id, (used, pages))| Block { id, used, runs: pages.into_iter().collect() })
            .collect();
        Self { blocks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn carried(pages: &BTreeMap<u64, u8>) -> Carried {
        let runs = pages.iter().map(|(n, byte)| (n * PAGE_SIZE as u64, vec![*byte; PAGE_SIZE])).collect();
        Carried { blocks: vec![Block { id: "vga.vram".into(), used: 1 << 20, runs }] }
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
    fn a_block_without_an_address_is_refused_by_name() {
        let me = Process::current().unwrap();
        let blocks = [block(4096, None)];
        let e = Carried::read(me, &blocks).unwrap_err();
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
        let carried = Carried::read(me, &blocks).unwrap();
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
