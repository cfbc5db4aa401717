//! What the tests share: a [`victim`] whose memory is written by several threads, and real guests ([`qemu`]).

#![allow(dead_code, reason = "each test binary uses a part of it")]

pub mod qemu;
pub mod victim;

use std::thread;
use std::time::{Duration, Instant};

/// How long something may take that takes seconds: a machine that is busy with other things gets a lot more.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Ask `probe` again and again until it has an answer; panic with `what` at the deadline.
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
