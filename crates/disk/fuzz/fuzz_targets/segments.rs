//! Reads the entries of a redo log segment whose content is the fuzzer's bytes.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rekindle_disk::fuzz::segment;

fuzz_target!(|bytes: &[u8]| segment(bytes));
