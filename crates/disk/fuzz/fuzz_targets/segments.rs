//! Takes bytes for a segment of a redo log, and reads its entries.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rekindle_disk::fuzz::segment;

fuzz_target!(|bytes: &[u8]| segment(bytes));
