//! Copies runs of pages from the guest's memory into a checkpoint.

use crate::session::CheckpointError;
use rekindle_memory::pages;
use rekindle_memory::ram::{Block, GuestRam, GuestRamError};
use rekindle_memory::tracker::Dirty;
use rekindle_store::types::{PAGE_SIZE, Page};
use rekindle_store::{Checkpoint, StoreError};
use std::ops::Range;

/// Bytes that are read from the guest at a time.
pub(crate) const BATCH: u64 = 1 << 20;
const ZEROES: Page = [0; PAGE_SIZE];

/// Byte ranges of pages, for each block.
pub(crate) type Runs = Vec<Vec<Range<u64>>>;

/// Pages of one block that were copied while the guest was stopped.
pub(crate) struct CopiedPages {
    pub(crate) block: usize,
    pub(crate) runs: Vec<Range<u64>>,
    pub(crate) bytes: Vec<u8>,
}

pub(crate) fn no_pages(ram: &GuestRam) -> Dirty {
    let none: Runs = ram.blocks().iter().map(|_| Vec::new()).collect();
    Dirty { written: none.clone(), zero: none }
}

/// The union of `older` and `newer`: where both have a page, the newer state wins.
pub(crate) fn merged(older: &Dirty, newer: &Dirty) -> Dirty {
    let blocks = older.written.len().max(newer.written.len());
    let get = |all: &Runs, n: usize| all.get(n).cloned().unwrap_or_default();
    let (mut written, mut zero) = (Runs::new(), Runs::new());
    for n in 0..blocks {
        let (new_written, new_zero) = (get(&newer.written, n), get(&newer.zero, n));
        written.push(pages::union(&pages::difference(&get(&older.written, n), &new_zero), &new_written));
        zero.push(pages::union(&pages::difference(&get(&older.zero, n), &new_written), &new_zero));
    }
    Dirty { written, zero }
}

/// Splits `runs` into parts of at most [`BATCH`] bytes.
pub(crate) fn batches(runs: &[Range<u64>]) -> Vec<Vec<Range<u64>>> {
    let mut all = vec![Vec::new()];
    let mut room = BATCH;
    for run in runs {
        let mut at = run.start;
        while at < run.end {
            if room == 0 {
                all.push(Vec::new());
                room = BATCH;
            }
            let end = run.end.min(at + room);
            if let Some(last) = all.last_mut() {
                last.push(at..end);
            }
            room -= end - at;
            at = end;
        }
    }
    all.retain(|batch| !batch.is_empty());
    all
}

pub(crate) fn read(
    ram: &GuestRam,
    block: &Block,
    runs: &[Range<u64>],
    buffer: &mut Vec<u8>,
) -> Result<(), GuestRamError> {
    buffer.resize(pages::bytes(runs) as usize, 0);
    ram.read(block, runs, buffer)
}

pub(crate) fn copy_all(ram: &GuestRam, written: &Runs) -> Result<Vec<CopiedPages>, GuestRamError> {
    let mut all = Vec::new();
    for (index, runs) in written.iter().enumerate().filter(|(_, runs)| !runs.is_empty()) {
        let Some(block) = ram.blocks().get(index) else { continue };
        let mut bytes = Vec::new();
        read(ram, block, runs, &mut bytes)?;
        all.push(CopiedPages { block: index, runs: runs.clone(), bytes });
    }
    Ok(all)
}

/// Numbers of the pages in `runs`.
pub(crate) fn numbers(runs: &[Range<u64>]) -> impl Iterator<Item = u64> + '_ {
    runs.iter().flat_map(|run| run.start / PAGE_SIZE as u64..run.end / PAGE_SIZE as u64)
}

pub(crate) fn send(
    checkpoint: &mut Checkpoint<'_>,
    block: usize,
    runs: &[Range<u64>],
    bytes: &[u8],
) -> Result<(), StoreError> {
    let (pages, _) = bytes.as_chunks::<PAGE_SIZE>();
    checkpoint.pages(block, numbers(runs).zip(pages))
}

/// As [`send`], directly from the guest's memory.
pub(crate) fn send_from(
    checkpoint: &mut Checkpoint<'_>,
    number: usize,
    runs: &[Range<u64>],
    ram: &GuestRam,
    block: &Block,
) -> Result<(), CheckpointError> {
    let page = PAGE_SIZE as u64;
    let numbers: Vec<_> = runs.iter().map(|run| run.start / page..run.end / page).collect();
    checkpoint.read(number, &numbers, |runs, room| {
        let runs: Vec<_> = runs.iter().map(|run| run.start * page..run.end * page).collect();
        Ok(ram.read(block, &runs, room)?)
    })
}

pub(crate) fn send_zeroes(checkpoint: &mut Checkpoint<'_>, zero: &Runs) -> Result<(), StoreError> {
    for (block, runs) in zero.iter().enumerate() {
        checkpoint.pages(block, numbers(runs).map(|number| (number, &ZEROES)))?;
    }
    Ok(())
}
