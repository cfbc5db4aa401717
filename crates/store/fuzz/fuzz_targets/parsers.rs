//! Passes any bytes to the parsers of the store. The first byte selects the parser.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rekindle_store::fuzz::TARGETS;

fuzz_target!(|bytes: &[u8]| {
    if let Some((choice, rest)) = bytes.split_first() {
        if let Some((_, target)) = TARGETS.get(usize::from(*choice) % TARGETS.len()) {
            target(rest);
        }
    }
});
