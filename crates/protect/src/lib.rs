//! Checkpoints of a running guest in a store, and restoring it from there (HydraVM, HPL-2011-24).
//!
//! | module | contents |
//! |---|---|
//! | [`target`] | the guest to protect: its run directory, its QEMU, its identity |
//! | [`recipe`] | how to rebuild its VM, stored with each checkpoint |
//! | [`policy`] | what is copied when: `basic`, `cow`, `precopy` |
//! | [`protector`] | the loop that takes checkpoints |
//! | [`candidate`] | boot snapshots |
//! | [`event`] | what the loop reports |
//! | [`owned`] | the owner epoch in which a guest started here, and the end of a guest that another host has |
//! | [`restore`] | a guest resumes from a checkpoint, and its pages load on demand |
//! | [`pager`] | loads the pages |
//! | [`output`] | releases held network output |
//! | [`moving`] | a guest moves to another host |
//!
//! `docs/protect.md` has the sequences and the reasoning.

#![allow(missing_docs, reason = "an internal crate: a name that needs no comment has none")]

pub mod candidate;
mod epochs;
pub mod event;
mod filling;
mod load_pages;
pub mod moving;
pub mod output;
pub mod owned;
pub mod pager;
mod pause;
pub mod policy;
pub mod progress;
pub mod protector;
pub mod recipe;
pub mod restore;
mod runs;
mod session;
pub mod target;
