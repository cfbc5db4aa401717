//! Throws bytes at every parser of the store; the first one chooses which.

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
