//! Code that the tests with real guests share: a [`Lab`] with its own run directory and network namespace, [`Guest`]s
//! in it, and observers of their QEMUs.

#![allow(dead_code, reason = "each test binary uses a part of it")]

pub mod bridge;
pub mod device;
pub mod guest;
pub mod hostile;
pub mod huge;
pub mod interrupted;
pub mod lab;
pub mod observe;
pub mod protector;
pub mod served;
pub mod vm;

#[allow(unused_imports, reason = "each test binary uses a part of it")]
pub use {
    bridge::Bridge,
    guest::Guest,
    lab::{CommandResult, Lab, major},
    observe::{Watch, assert_ticks_once, with_argument_containing},
    rekindle_testing::micro::free_port,
    rekindle_testing::tools::{qemu_new, qemu_newest, qemu_old},
    rekindle_testing::{DEADLINE, wait_for},
    vm::Net,
};

use std::net::{Ipv4Addr, SocketAddr};

/// Returns the first guest defined in a lab, reached over its tap.
pub fn first_guest<'a>(lab: &'a Lab, name: &str) -> Guest<'a> {
    Guest::new(lab, name, Some(lab.namespace.clone()), SocketAddr::from((Ipv4Addr::new(10, 79, 1, 2), 7000)))
}
