//! Rebooting the host under its guests: the guests are suspended in place, and resume in the next kernel.
//!
//! This is RootHammer's warm-VM reboot (TDSC 2010, sections 3 and 4): QEMU takes the VMM's part, kexec is the quick
//! reload, and RAM that no kernel allocates holds the frozen memory images. `docs/host-reboot.md` has the sequence and
//! the argument.
//!
//! | module | purpose |
//! |---|---|
//! | [`setup`] | `rekindle host init`: checks and sets up a host |
//! | [`plan`] | `rekindle reboot-host`: the method for each VM |
//! | `kernel`, `shutdown` | the kernel to boot, and starting the shutdown |
//! | [`suspend()`] | suspends all guests, or none; `guest` has one guest's part |
//! | [`resume()`] | resumes suspended guests in new QEMUs; `resume_guest` has one guest's part |
//! | [`record`] | the record of suspended guests, on a disk and next to their RAM |
//! | `digests`, `files` | shorten suspend and resume: RAM digests taken in advance, QEMU's files read ahead |
//! | `survived` | checks that a guest's RAM is unchanged |
//! | `command`, `parallel` | run the host's programs; run a thread for each guest |

mod command;
mod digests;
mod error;
mod files;
mod guest;
mod kernel;
mod parallel;
pub mod plan;
pub mod record;
mod resume;
mod resume_guest;
pub mod setup;
mod shutdown;
mod survived;
mod suspend;

pub use error::{FailedVm, HostError, PreventingVm};
pub use kernel::InstalledKernel;
pub(crate) use resume::recover;
pub use resume::{ResumeOutcome, ResumeReport, drop_suspended, is_suspended, resume};
pub use shutdown::shut_down_host;
pub(crate) use suspend::end_committed_suspend;
pub use suspend::{Fallback, SuspendCheck, SuspendReport, check_suspend, suspend};

/// A guest survives a reboot of the host by the same methods as a restart of its QEMU.
pub use crate::vmm::RebootMethod;
