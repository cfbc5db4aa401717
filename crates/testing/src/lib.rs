//! Shared parts of the tests of several crates: the programs and guest images that they need, QEMUs with the micro
//! guest that were not started by Rekindle, QEMUs with the firmware alone, a private libvirt, clients of VNC and SPICE
//! servers, traffic with a guest, loop devices, a hostile program, an object store, a disk in memory that can lose power, real files whose changes fail, a host's clock that jumps, a proxy with latency, huge pages of the host, pages of the documents, and waiting.
//!
//! Only tests depend on this crate. Helpers that need the command-line program are in `crates/rekindle/tests/common`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

pub mod crash_disk;
pub mod firmware;
pub mod foreign;
pub mod hostile;
pub mod hugepages;
pub mod io_faults;
pub mod libvirt;
pub mod loop_device;
pub mod micro;
pub mod object_store;
pub mod page;
pub mod process;
pub mod rfb;
pub mod shifted_clock;
pub mod slow_proxy;
pub mod spice;
pub mod tools;
pub mod tpm;
pub mod traffic;
pub mod websocket;

use std::thread;
use std::time::{Duration, Instant};

/// After this time, an operation that usually takes seconds hangs. A busy machine needs two minutes for the boot of one Debian guest
/// of three.
pub const DEADLINE: Duration = Duration::from_secs(300);

/// Calls `probe` until it returns a value. Panics with `what` at the deadline.
#[track_caller]
pub fn wait_for<T>(what: &str, deadline: Duration, probe: impl FnMut() -> Option<T>) -> T {
    poll(deadline, probe).unwrap_or_else(|| panic!("{what}: not within {deadline:?}"))
}

/// Calls `probe` until it returns a value. Returns `None` at the deadline.
pub fn poll<T>(deadline: Duration, mut probe: impl FnMut() -> Option<T>) -> Option<T> {
    const MAX_INTERVAL: Duration = Duration::from_millis(20);
    let end = Instant::now() + deadline;
    let mut interval = Duration::from_millis(1);
    loop {
        if let Some(value) = probe() {
            return Some(value);
        }
        if Instant::now() >= end {
            return None;
        }
        thread::sleep(interval);
        interval = (interval * 2).min(MAX_INTERVAL);
    }
}
