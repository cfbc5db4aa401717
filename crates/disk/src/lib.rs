//! One guest disk: a vhost-user-blk server that remembers where each block went, so that a rebooted guest finds its cache warm.
//!
//! | module | what it is for |
//! |---|---|
//! | [`server`] | the process: its sockets |
//! | [`session`] | a front end's connection: vhost-user |
//! | [`channel`] | what a front end is told unasked |
//! | [`control`] | what else a server is asked for |
//! | [`desk`] | who answers for the disk, also before there is one |
//! | [`engine`] | the thread that moves the data |
//! | [`chain`], [`request`] | what a guest asks for, out of descriptors filled with anything |
//! | [`fuzz`] | the same, for fuzzing |
//! | [`config`] | what a guest is told of its disk |
//! | [`image`] | the raw file or block device |
//! | [`memory`] | the guest's memory, mapped; which pages are written through it |
//! | [`missing`] | pages of it that a restore still brings |
//! | [`inflight`] | requests under way, in memory that outlives this process |
//! | [`limit`] | the rates that a disk is held to |
//! | [`report`] | warnings that a guest can cause as often as it likes |
//! | [`block`], [`digest`], [`map`] | which frame got which block, and what it was |
//! | [`redo`] | the log of a protected VM's disk: epochs |
//! | [`ledger`] | what the guest has touched until a moment, and whether that was written since |
//! | `run_in_background` | what takes long and is waited for by nobody |
//! | [`retained`] | the memory of the guest's former life, as a cache |
//!
//! `docs/disk.md` has the argument for why a guest is never given a block that is not what is on the disk.

#![allow(missing_docs, reason = "an internal crate: a comment is only where the name does not suffice")]

mod background;
pub mod block;
pub mod chain;
pub mod channel;
pub mod config;
pub mod control;
pub mod desk;
pub mod digest;
pub mod engine;
pub mod fuzz;
pub mod image;
pub mod inflight;
pub mod ledger;
pub mod limit;
pub mod map;
pub mod memory;
pub mod missing;
pub mod redo;
pub mod report;
pub mod request;
pub mod retained;
pub mod server;
pub mod session;
