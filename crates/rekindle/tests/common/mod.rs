//! What the tests with real guests share: a [`Lab`] with its own run directory and network namespace, [`Guest`]s in
//! it, and observers of their QEMUs.

#![allow(dead_code, reason = "each test binary uses a part of it")]

pub mod bridge;
pub mod device;
pub mod foreign;
pub mod guest;
pub mod huge;
pub mod lab;
pub mod observe;
pub mod protector;
pub mod served;
pub mod vm;

#[allow(unused_imports, reason = "each test binary uses a part of it")]
pub use {
    bridge::Bridge,
    guest::Guest,
    huge::HugePages,
    lab::{CommandResult, Lab, major, qemu_new, qemu_newest, qemu_old},
    observe::{Watch, assert_ticks_once, with_argument_containing},
    vm::Net,
};

use std::net::{Ipv4Addr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

/// The deadline for what usually takes seconds: a busy machine needs a lot more.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Calls `probe` until it returns a value; panics with `what` at the deadline.
pub fn wait_for<T>(what: &str, deadline: Duration, mut probe: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + deadline;
    loop {
        if let Some(answer) = probe() {
            return answer;
        }
        assert!(Instant::now() < end, "{what}: not within {deadline:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Returns the first guest that was defined in a lab, reached over its tap.
pub fn first_guest<'a>(lab: &'a Lab, name: &str) -> Guest<'a> {
    Guest::new(lab, name, Some(lab.namespace.clone()), SocketAddr::from((Ipv4Addr::new(10, 79, 1, 2), 7000)))
}
