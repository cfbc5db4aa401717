//! Takes checkpoints of a running guest into a store, and restores the guest from the store (HydraVM, HPL-2011-24).
//!
//! | module | contents |
//! |---|---|
//! | [`target`] | the guest to protect: its run directory, its QEMU, its identity |
//! | [`recipe`] | the description from which a VM is rebuilt, stored with each checkpoint |
//! | [`policy`] | when pages are copied: `basic`, `cow`, `precopy` |
//! | [`protector`] | the loop that takes checkpoints |
//! | [`candidate`] | boot snapshots |
//! | [`event`] | the events that the loop reports |
//! | [`owned`] | the owner epoch in which a guest started on this host, and the end of a guest that another host has |
//! | [`restore`] | resumes a guest from a checkpoint; its pages load on demand |
//! | [`pager`] | loads the pages of a restored guest |
//! | [`output`] | releases held network output |
//! | [`moving`] | moves a guest to another host |
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
