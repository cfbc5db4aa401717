//! Rebooting the host under its guests: they are suspended where they are, and go on in the next kernel.
//!
//! RootHammer's warm-VM reboot (TDSC 2010, sections 3 and 4) with QEMU for the VMM's part of a VM, kexec for its quick reload, and RAM that
//! no kernel hands out for its frozen memory images. `docs/host-reboot.md` has the sequence and the argument.
//!
//! | module | what it is for |
//! |---|---|
//! | [`setup`] | `rekindle host init`: what a host needs for it, and whether it is there |
//! | [`plan`] | `rekindle reboot host`: what is going to be done with each VM; the kernel; the shutdown |
//! | [`suspend()`] | all guests, or none, out of their QEMUs |
//! | [`resume()`] | those that were suspended, into new ones |
//! | [`record`] | what is known of suspended guests, on a disk and beside their RAM |
//! | `digests`, `files` | what makes both short: digests of RAM taken ahead, a QEMU's files read ahead |
//! | `survived` | whether RAM is what it was |

mod digests;
mod error;
mod files;
mod one;
pub mod plan;
pub mod record;
mod resume;
pub mod setup;
mod survived;
mod suspend;

pub use error::HostError;
pub(crate) use resume::recover;
pub use resume::{Outcome, Resumed, drop_suspended, is_suspended, resume};
pub use suspend::{Checked, Fallback, Suspended, check, suspend, take_up};

/// How a guest is carried over a reboot of the host: as over one of its VMM.
pub use crate::vmm::How;
