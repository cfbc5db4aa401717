//! Copies runs of pages from the guest's memory into a checkpoint.

use crate::session::CheckpointError;
use rekindle_memory::ram::{Block, GuestRam, GuestRamError};
use rekindle_memory::tracker::Dirty;
use rekindle_pages::{BlockId, PAGE_SIZE, PageRuns, ZERO_PAGE};
use rekindle_store::{Checkpoint, StoreError};

/// Maximum number of bytes that are read from the guest at a time.
pub(crate) const BATCH: u64 = 1 << 20;

/// Runs of pages, for each RAM block by its position.
pub(crate) type Runs = Vec<PageRuns>;

/// Pages of one RAM block that were copied while the guest was stopped.
pub(crate) struct CopiedPages {
    pub(crate) block: BlockId,
    pub(crate) runs: PageRuns,
    pub(crate) bytes: Vec<u8>,
}

pub(crate) fn no_pages(ram: &GuestRam) -> Dirty {
    let none: Runs = ram.blocks().iter().map(|_| PageRuns::new()).collect();
    Dirty { written: none.clone(), zero: none }
}

/// Returns the union of `older` and `newer`. If a page is in both, `newer` decides whether it is zero.
pub(crate) fn merged(older: &Dirty, newer: &Dirty) -> Dirty {
    let blocks = older.written.len().max(newer.written.len());
    let get = |all: &Runs, n: usize| all.get(n).cloned().unwrap_or_default();
    let (mut written, mut zero) = (Runs::new(), Runs::new());
    for n in 0..blocks {
        let (new_written, new_zero) = (get(&newer.written, n), get(&newer.zero, n));
        written.push(get(&older.written, n).difference(&new_zero).union(&new_written));
        zero.push(get(&older.zero, n).difference(&new_written).union(&new_zero));
    }
    Dirty { written, zero }
}

pub(crate) fn read(ram: &GuestRam, block: &Block, runs: &PageRuns, buffer: &mut Vec<u8>) -> Result<(), GuestRamError> {
    buffer.resize(runs.bytes() as usize, 0);
    ram.read(block, runs, buffer)
}

pub(crate) fn copy_all(ram: &GuestRam, written: &Runs) -> Result<Vec<CopiedPages>, GuestRamError> {
    let mut all = Vec::new();
    for (index, runs) in written.iter().enumerate().filter(|(_, runs)| !runs.is_empty()) {
        let Some(block) = ram.blocks().get(index) else { continue };
        let mut bytes = Vec::new();
        read(ram, block, runs, &mut bytes)?;
        all.push(CopiedPages { block: BlockId(index), runs: runs.clone(), bytes });
    }
    Ok(all)
}

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
pub(crate) fn send_from(
    checkpoint: &mut Checkpoint<'_>,
    id: BlockId,
    runs: &PageRuns,
    ram: &GuestRam,
    block: &Block,
) -> Result<(), CheckpointError> {
    checkpoint.read(id, runs, |runs, room| Ok(ram.read(block, runs, room)?))
}

pub(crate) fn send_zeroes(checkpoint: &mut Checkpoint<'_>, zero: &Runs) -> Result<(), StoreError> {
    for (block, runs) in zero.iter().enumerate() {
        checkpoint.pages(BlockId(block), runs.numbers().map(|page| (page, &ZERO_PAGE)))?;
    }
    Ok(())
}
