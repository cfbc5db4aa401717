//! Shared by the tests: a [`victim`] process whose threads write its memory, and real guests ([`qemu`]).

#![allow(dead_code, reason = "each test binary uses a part of it")]

pub mod qemu;
pub mod victim;

use std::thread;
use std::time::{Duration, Instant};

/// Limit for what usually takes seconds: a busy machine needs a lot more time.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Calls `probe` until it returns a value; panics with `what` at the deadline.
#[track_caller]
pub fn wait_for<T>(what: impl Fn() -> String, mut probe: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + DEADLINE;
    loop {
        if let Some(answer) = probe() {
            return answer;
        }
        assert!(Instant::now() < end, "{}: not within {DEADLINE:?}", what());
        thread::sleep(Duration::from_millis(2));
    }
}
