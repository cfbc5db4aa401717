//! Parses a request in a guest's memory of these bytes.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rekindle_disk::fuzz::request;

fuzz_target!(|bytes: &[u8]| request(bytes));
