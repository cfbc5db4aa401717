//! A guest moves from one QEMU, the *source*, to another, the *destination*. Every technique of Rekindle ends in this:
//!
//! ```text
//!  Spawned ──prepare──> Prepared ──feed──> Loaded ──commit──> Running ──settle──> settled
//!     └─────────── any failure before commit: destination ended, source resumed ───────────┘
//! ```
//!
//! | module | what it is for |
//! |---|---|
//! | [`destination`] | the steps above; the only place that waits for a load |
//! | [`environment`] | where a destination runs; the only place that starts one |
//! | [`operation`] | the VM, the journal and the timeline of a hand-over; the way back to the source |
//! | [`ram`] | how the destination gets the guest's RAM |
//! | [`source_state`] | the device state and the small RAM blocks of a running source |
//! | [`saved_state`] | the same as a file |
//! | [`takeover`] | what passes from the source to the destination: taps |
//! | [`evidence`] | whether a guest has run since a moment |
//! | [`priority`] | the scheduling of the threads that a stopped guest waits for |
//! | [`aftermath`] | after the guest runs: its clock, its place in the network |
//! | [`boot`] | a guest without a source: the first start of a VM |
//!
//! A technique is a composition: it decides which RAM, which state and which environment, and what happens between the
//! steps. At every instant exactly one QEMU may run the guest, and one can always be made to: each step is journalled
//! before it is taken, and `rekindle recover` decides from what exists.

#![allow(missing_docs, reason = "an internal crate: comments only where a name is not enough")]

pub mod aftermath;
pub mod boot;
pub mod destination;
pub mod environment;
pub mod error;
pub mod evidence;
pub mod operation;
pub mod priority;
pub mod ram;
pub mod saved_state;
pub mod source_state;
pub mod takeover;

pub use destination::{Destination, Loaded, Prepared, Running, Settled, Spawned};
pub use environment::{Environment, OwnRunDir};
pub use error::HandoverError;
pub use operation::{GuestStatus, Handover};
