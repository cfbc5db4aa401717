//! The hand-over: a guest moves from one QEMU, the *source*, to another, the *destination*. Every technique of Rekindle
//! ends in a hand-over:
//!
//! ```text
//!  Spawned ──prepare──> Prepared ──feed──> Loaded ──commit──> Running ──settle──> settled
//!     └─────────── any failure before commit: destination ended, source resumed ───────────┘
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`destination`] | the steps above; no other module waits for a load |
//! | [`environment`] | the surroundings of a destination; no other module starts a destination |
//! | [`operation`] | the VM, the journal and the timeline of a hand-over; the return to the source |
//! | [`ram`] | the ways in which the destination gets the guest's RAM |
//! | [`unprepared_ram`] | the RAM of a source that Rekindle did not start, copied or moved |
//! | [`source_ram`], [`supplied_block`] | its blocks; the file of each |
//! | [`copied_ram`], [`moved_ram`] | copying it; moving it in place |
//! | [`ram_transfer`], [`ram_transfer_error`] | which of the two; why it fails |
//! | [`source_state`] | the device state and the small RAM blocks of a running source |
//! | [`saved_state`] | the state of a suspended guest in a file |
//! | [`takeover`] | the transfer of the guest's taps |
//! | [`written_disks`] | writes the guest's disks back before its pause |
//! | [`evidence`] | shows whether a guest has run since a moment |
//! | [`priority`] | raises the priority of the threads that a stopped guest waits for |
//! | [`after_resume`] | steps after the guest has resumed: its clock, its location in the network |
//! | [`boot`] | boots a guest without a source |
//!
//! A technique is a composition of these steps: it chooses the RAM, the state and the environment, and does its own
//! work between the steps. At every instant at most one QEMU may run the guest, and the guest can always be resumed in
//! one: each step is journalled before it is taken, and `rekindle recover` uses the journal and the existing files to
//! decide which one.

#![allow(missing_docs, reason = "an internal crate: comments only where a name is not enough")]

pub mod after_resume;
pub mod boot;
pub mod copied_ram;
pub mod destination;
pub mod environment;
pub mod error;
pub mod evidence;
pub mod moved_ram;
pub mod operation;
pub mod priority;
pub mod ram;
pub mod ram_transfer;
pub mod ram_transfer_error;
pub mod saved_state;
pub mod source_ram;
pub mod source_state;
pub mod supplied_block;
pub mod takeover;
pub mod unprepared_ram;
pub mod written_disks;

pub use destination::{Destination, LoadedStage, PreparedStage, RunningStage, Settled, SpawnedStage};
pub use environment::{Environment, OwnRunDir};
pub use error::HandoverError;
pub use operation::{GuestStatus, Handover};
