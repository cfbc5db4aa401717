//! Shared parts of the tests: a [`victim`] process whose threads write its memory, and real guests ([`qemu`]).

#![allow(dead_code, reason = "each test binary uses a part of it")]

pub mod qemu;
pub mod victim;

use rekindle_memory::ram::{Block, GuestRam};
use rekindle_memory::tracker::Dirty;
use rekindle_pages::PageRuns;
use rekindle_testing::{DEADLINE, poll};

/// Updates a copy of each block with the pages that a tracker has reported.
pub fn apply<C: AsMut<[u8]>>(ram: &GuestRam, dirty: &Dirty, copies: &mut [C]) {
    let reported = dirty.written.iter().zip(&dirty.zero);
    for ((block, copy), (written, zero)) in ram.blocks().iter().zip(copies).zip(reported) {
        let copy = copy.as_mut();
        for run in zero {
            copy[run.start as usize..run.end as usize].fill(0);
        }
        read_runs(ram, block, written, copy);
    }
}

/// Reads runs (offsets) of a block into a copy of the whole block.
pub fn read_runs(ram: &GuestRam, block: &Block, runs: &PageRuns, copy: &mut [u8]) {
    for run in runs {
        let run_copy = &mut copy[run.start as usize..run.end as usize];
        ram.read(block, std::slice::from_ref(run), run_copy).unwrap();
    }
}

/// Returns the content of a block. Only populated runs are read, as Rekindle does.
pub fn content(ram: &GuestRam, block: &Block) -> Vec<u8> {
    let mut copy = vec![0; (block.used().end - block.address) as usize];
    read_runs(ram, block, &ram.populated(block).unwrap(), &mut copy);
    copy
}

/// Calls `probe` until it returns a value. At the deadline, calls `what` and panics with its text.
#[track_caller]
pub fn wait_for<T>(what: impl Fn() -> String, probe: impl FnMut() -> Option<T>) -> T {
    poll(DEADLINE, probe).unwrap_or_else(|| panic!("{}: not within {DEADLINE:?}", what()))
}
