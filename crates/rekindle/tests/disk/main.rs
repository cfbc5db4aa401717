//! Disks served by Rekindle's disk server.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

#[path = "../common/mod.rs"]
mod common;

mod devices;
mod grown;
mod redo;
mod served;
mod servers;
mod two_disks;
