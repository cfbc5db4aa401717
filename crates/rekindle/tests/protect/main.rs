//! `rekindle protect`, `restore` and `store`: checkpoints.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

#[path = "../common/mod.rs"]
mod common;

mod checkpoints;
mod clocks;
mod commits;
mod creating;
mod dry_run;
mod encrypted;
mod epochs;
mod filling;
mod object_store;
mod output;
mod owner;
mod prepare;
mod prometheus;
mod service;
mod store;
mod trust;
mod tutorial;
mod without_root;
