//! The command line: a VM's life, reports, errors and exit statuses.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

#[path = "../common/mod.rs"]
mod common;

mod bad_input;
mod dry_run;
mod life;
mod messages;
mod monitor;
mod ocf;
mod status;
mod wrong_invocations;
