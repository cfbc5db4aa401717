//! Pages of the guest's memory on their way into a checkpoint: merging sets of dirty pages, reading the pages, sending
//! them. A *run* is a range of adjacent pages.

use crate::error::CheckpointError;
use rekindle_memory::ram::{Block, GuestRam, GuestRamError};
use rekindle_memory::tracker::Dirty;
use rekindle_pages::{BlockId, PAGE_SIZE, PageRuns, ZERO_PAGE};
use rekindle_store::{Checkpoint, StoreError, types};

/// Maximum number of bytes that are read from the guest at a time.
pub(crate) const MAX_READ_BYTES: u64 = 1 << 20;

/// Runs of pages, for each RAM block by its position.
pub(crate) type BlockRuns = Vec<PageRuns>;

/// Pages of one RAM block that were copied before the guest could change them.
#[derive(Debug)]
pub(crate) struct CopiedPages {
    pub(crate) block: BlockId,
    pub(crate) runs: PageRuns,
    pub(crate) bytes: Vec<u8>,
}

/// Returns the empty set of dirty pages of all RAM blocks.
pub(crate) fn no_pages(ram: &GuestRam) -> Dirty {
    let none: BlockRuns = ram.blocks().iter().map(|_| PageRuns::new()).collect();
    Dirty { written: none.clone(), zero: none }
}

/// Returns the RAM block table in the store's types.
pub(crate) fn block_table(ram: &GuestRam) -> Vec<types::Block> {
    let table = ram.blocks().iter().map(|block| types::Block {
        id: block.info.id.clone(),
        used: block.info.used,
        max: block.info.total,
        page_size: block.info.page_size,
    });
    table.collect()
}

/// Returns the runs of the RAM block at `index`; none if the list is shorter.
pub(crate) fn runs_of_block(all: &BlockRuns, index: usize) -> PageRuns {
    all.get(index).cloned().unwrap_or_default()
}

/// Returns the union of `older` and `newer`. If a page is in both, `newer` decides whether it is zero.
pub(crate) fn merged(older: &Dirty, newer: &Dirty) -> Dirty {
    let (mut written, mut zero) = (BlockRuns::new(), BlockRuns::new());
    for index in 0..older.written.len().max(newer.written.len()) {
        let new_written = runs_of_block(&newer.written, index);
        let new_zero = runs_of_block(&newer.zero, index);
        written.push(runs_of_block(&older.written, index).difference(&new_zero).union(&new_written));
        zero.push(runs_of_block(&older.zero, index).difference(&new_written).union(&new_zero));
    }
    Dirty { written, zero }
}

/// Reads `runs` of a block into `buffer`, which gets their size.
pub(crate) fn read(ram: &GuestRam, block: &Block, runs: &PageRuns, buffer: &mut Vec<u8>) -> Result<(), GuestRamError> {
    buffer.resize(runs.bytes() as usize, 0);
    ram.read(block, runs, buffer)
}

/// Copies the pages `written` from the guest's memory.
pub(crate) fn copy_pages(ram: &GuestRam, written: &BlockRuns) -> Result<Vec<CopiedPages>, GuestRamError> {
    let mut copied = Vec::new();
    for (index, (block, runs)) in ram.blocks().iter().zip(written).enumerate() {
        if runs.is_empty() {
            continue;
        }
        let mut bytes = Vec::new();
        read(ram, block, runs, &mut bytes)?;
        copied.push(CopiedPages { block: BlockId(index), runs: runs.clone(), bytes });
    }
    Ok(copied)
}

/// Adds pages with the content `bytes` to the checkpoint.
pub(crate) fn send(
    checkpoint: &mut Checkpoint<'_>,
    block: BlockId,
    runs: &PageRuns,
    bytes: &[u8],
) -> Result<(), StoreError> {
    let (pages, _) = bytes.as_chunks::<PAGE_SIZE>();
    checkpoint.pages(block, runs.numbers().zip(pages))
}

/// Does the same as [`send`], directly from the guest's memory.
pub(crate) fn send_from_guest(
    checkpoint: &mut Checkpoint<'_>,
    id: BlockId,
    runs: &PageRuns,
    ram: &GuestRam,
    block: &Block,
) -> Result<(), CheckpointError> {
    checkpoint.read(id, runs, |runs, buffer| Ok(ram.read(block, runs, buffer)?))
}

/// Adds zero pages to the checkpoint.
pub(crate) fn send_zeroes(checkpoint: &mut Checkpoint<'_>, zero: &BlockRuns) -> Result<(), StoreError> {
    for (block, runs) in zero.iter().enumerate() {
        checkpoint.pages(BlockId(block), runs.numbers().map(|page| (page, &ZERO_PAGE)))?;
    }
    Ok(())
}
