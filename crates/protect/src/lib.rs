//! Takes checkpoints of a running guest into a store, and restores the guest from the store (HydraVM, HPL-2011-24).
//!
//! | module | contents |
//! |---|---|
//! | [`target`] | the guest to protect: its run directory, its QEMU, its identity |
//! | [`recipe`] | the description from which a VM is rebuilt, stored with each checkpoint |
//! | [`policy`] | when pages are copied: `basic`, `cow`, `precopy` |
//! | [`protector`] | takes checkpoints until it is stopped |
//! | `plan` | decides how a guest is protected |
//! | [`estimate`] | whether a guest can be protected, and how much memory its checkpoints would contain |
//! | `session` | tracks what a guest writes, and takes one checkpoint |
//! | `pause`, `runs`, `epochs`, `load_pages` | parts of a checkpoint: pause, pages, disks, pages that a load needs |
//! | [`progress`] | `protect.json`: what a protector has committed |
//! | [`counters`] | `protect-counters.json`: what a protector has done since it started |
//! | [`event`] | the events that a protector reports |
//! | [`owned`] | the owner epoch in which a guest started on this host, and the end of a guest that another host has |
//! | [`known_store`] | what this host knows of the store: its ID, whether it is encrypted, what it has reached |
//! | [`candidate`] | boot snapshots |
//! | [`restore`] | resumes a guest from a checkpoint; its pages load on demand |
//! | [`fill`], [`pager`] | a restored guest whose memory is incomplete, and the process that loads it |
//! | `fill_files` | the files that the pager uses in the run directory, through its broker |
//! | [`fill_progress`] | `fill-progress.json`: how much memory the pager has still to load |
//! | `write_record` | checkpoints of a guest that is still being filled |
//! | [`output`] | releases held network output |
//! | [`moving`] | moves a guest to another host |
//!
//! `docs/protect.md` has the sequences and the reasoning.

#![allow(missing_docs, reason = "an internal crate: a name that needs no comment has none")]

pub mod candidate;
pub mod counters;
mod credential_paths;
mod epochs;
mod error;
pub mod estimate;
pub mod event;
pub mod fill;
mod fill_files;
pub mod fill_progress;
pub mod known_store;
mod load_pages;
pub mod moving;
pub mod output;
pub mod owned;
pub mod pager;
mod pager_confinement;
mod pause;
mod plan;
pub mod policy;
pub mod progress;
pub mod protector;
pub mod recipe;
pub mod restore;
mod runs;
pub mod save_image;
mod session;
pub mod target;
mod write_record;
