//! Takes bytes for the memory of a guest, and has a request read out of it.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rekindle_disk::fuzz::request;

fuzz_target!(|bytes: &[u8]| request(bytes));
