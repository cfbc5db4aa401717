//! What the tests with real guests share: a [`Lab`] with its own run directory and network namespace, [`Guest`]s in
//! it, and eyes on their QEMUs.

#![allow(dead_code, reason = "each test binary uses a part of it")]

pub mod bridge;
pub mod device;
pub mod eyes;
pub mod guest;
pub mod huge;
pub mod lab;
pub mod plain;
pub mod protector;
pub mod served;
pub mod vm;

#[allow(unused_imports, reason = "each test binary uses a part of it")]
pub use {
    bridge::Bridge,
    eyes::{Watch, ticks_once, with_argument_containing},
    guest::Guest,
    huge::HugePages,
    lab::{Done, Lab, major, qemu_new, qemu_newest, qemu_old},
    vm::Net,
};

use std::net::{Ipv4Addr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

/// How long something may take that takes seconds: a machine that is busy with other things gets a lot more.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Ask `probe` again and again until it has an answer; panic with `what` at the deadline.
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

/// The first guest that was defined in a lab, on its tap.
pub fn first_guest<'a>(lab: &'a Lab, name: &str) -> Guest<'a> {
    Guest::new(lab, name, Some(lab.namespace.clone()), SocketAddr::from((Ipv4Addr::new(10, 79, 1, 2), 7000)))
}
