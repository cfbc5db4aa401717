//! Shared parts of the tests: a [`victim`] process whose threads write its memory, and real guests ([`qemu`]).

#![allow(dead_code, reason = "each test binary uses a part of it")]

pub mod qemu;
pub mod victim;

use rekindle_testing::{DEADLINE, poll};

/// Calls `probe` until it returns a value. At the deadline, calls `what` and panics with its text.
#[track_caller]
pub fn wait_for<T>(what: impl Fn() -> String, probe: impl FnMut() -> Option<T>) -> T {
    poll(DEADLINE, probe).unwrap_or_else(|| panic!("{}: not within {DEADLINE:?}", what()))
}
