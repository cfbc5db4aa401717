//! Parses the request at descriptor 0 of a guest whose memory is the fuzzer's bytes.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rekindle_disk::fuzz::request;

fuzz_target!(|bytes: &[u8]| request(bytes));
