//! `rekindle reboot`: a guest's own operating system.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

#[path = "../common/mod.rs"]
mod common;

mod damage;
mod health;
mod kexec;
mod leak;
mod phase;
mod updates;
