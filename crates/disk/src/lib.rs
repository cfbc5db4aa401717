//! One guest disk: a vhost-user-blk server that records where each block is in the guest's memory, so that a rebooted
//! guest's cache is warm.
//!
//! | module | contents |
//! |---|---|
//! | [`server`] | the process and its sockets |
//! | [`session`] | the vhost-user connection of a front end |
//! | [`channel`] | notifications to a front end |
//! | [`confinement`] | what the process may still use while it serves |
//! | [`broker`] | files and memory that the process uses through a process outside of its confinement |
//! | [`control`] | the protocol for management commands |
//! | [`served_disk`] | the disk that these commands refer to, or the disk that the server waits for |
//! | [`engine`] | the thread that moves the data |
//! | [`descriptor_chain`], [`request`] | parsing of a guest's requests, from descriptors with any content |
//! | [`fuzz`] | fuzzing of this parsing |
//! | [`config`] | features and configuration space |
//! | [`image`] | the raw file or block device |
//! | [`memory`] | the guest's memory, mapped, and a record of the pages that are written through it |
//! | [`missing_pages`] | pages that a restore has not filled yet |
//! | [`inflight`] | the record of requests in progress, in memory that outlives this process |
//! | [`limit`] | rate limits |
//! | [`report`] | rate-limited warnings |
//! | [`block`], [`digest`], [`block_map`] | which frame holds which block, and its digest |
//! | [`redo`] | the redo log of a protected VM's disk |
//! | [`slots`] | a small durable record in a file of two slots |
//! | [`overlay`] | the epochs of a disk that QEMU itself serves: one overlay file for each |
//! | [`keeper`] | requests about the epochs of a served disk, and the background work on its redo log |
//! | [`ledger`] | the blocks that a guest has read or written until a moment, and whether they were written since |
//! | `background` | slow work that no thread waits for |
//! | [`retained`] | the retained cache: the memory of the guest's previous boot |
//!
//! `docs/disk.md` explains why a guest never gets a block that differs from the disk.

#![allow(missing_docs, reason = "an internal crate: a comment is only where the name does not suffice")]

mod background;
pub mod block;
pub mod block_map;
pub mod broker;
pub mod channel;
pub mod config;
pub mod confinement;
pub mod control;
pub mod descriptor_chain;
pub mod digest;
pub mod engine;
pub mod fuzz;
pub mod image;
pub mod inflight;
pub mod keeper;
pub mod ledger;
pub mod limit;
pub mod memory;
pub mod missing_pages;
pub mod overlay;
pub mod redo;
pub mod report;
pub mod request;
pub mod retained;
pub mod served_disk;
pub mod server;
pub mod session;
pub mod slots;
