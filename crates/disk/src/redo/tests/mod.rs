//! Tests of the whole log, on a disk that can lose power.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod crash;
mod damage;
mod files;
mod model;
mod sealed;
