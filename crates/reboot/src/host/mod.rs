//! Rebooting the host under its guests: the guests are suspended in place, and resume in the next kernel.
//!
//! This is RootHammer's warm-VM reboot (TDSC 2010, sections 3 and 4): QEMU takes the VMM's part, kexec is the quick
//! reload, and RAM that no kernel allocates holds the frozen memory images. `docs/host-reboot.md` has the sequence and
//! the argument.
//!
//! | module | purpose |
//! |---|---|
//! | [`setup`] | `rekindle host init`: checks and sets up a host |
//! | [`plan`] | `rekindle reboot host`: the method for each VM, the kernel, the shutdown |
//! | [`suspend()`] | suspends all guests, or none |
//! | [`resume()`] | resumes suspended guests in new QEMUs |
//! | [`record`] | the record of suspended guests, on a disk and next to their RAM |
//! | `digests`, `files` | shorten suspend and resume: RAM digests taken in advance, QEMU's files read ahead |
//! | `survived` | checks that a guest's RAM is unchanged |

mod digests;
mod error;
mod files;
mod guest;
pub mod plan;
pub mod record;
mod resume;
pub mod setup;
mod survived;
mod suspend;

pub use error::HostError;
pub(crate) use resume::recover;
pub use resume::{ResumeOutcome, ResumeReport, drop_suspended, is_suspended, resume};
pub use suspend::{CheckResult, Fallback, SuspendReport, check, suspend};
pub(crate) use suspend::{end_committed_suspend, with_cause};

/// A guest survives a reboot of the host by the same methods as a restart of its QEMU.
pub use crate::vmm::RebootMethod;
