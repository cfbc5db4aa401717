//! Checkpoints of a running guest to a store, and restoring it from there (HydraVM, HPL-2011-24).
//!
//! | module | what it is for |
//! |---|---|
//! | [`target`] | the guest to be protected: where it is, who it is |
//! | [`recipe`] | how to build its VM again, as it is stored with each checkpoint |
//! | [`policy`] | what is copied when: `basic`, `cow`, `precopy` |
//! | [`protector`] | the loop |
//! | [`candidate`] | snapshots of phases of a boot |
//! | [`event`] | what the loop tells |
//! | [`owned`] | with which owner epoch a guest began to run here, and when it may not any more |
//! | [`restore`] | a guest goes on from a checkpoint, its pages come on demand |
//! | [`pager`] | brings them |
//! | [`output`] | what a guest has sent, let out |
//! | [`moving`] | a guest goes on on another host |
//!
//! `docs/protect.md` has the sequences and the argument.

pub mod candidate;
mod epochs;
pub mod event;
mod filling;
mod first;
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
