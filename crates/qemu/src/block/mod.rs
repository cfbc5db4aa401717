//! Overlays on a guest's disks, made and merged by QEMU itself.
//!
//! An *overlay* is an empty qcow2 file that QEMU puts above a disk while the guest is stopped. From then on the guest
//! writes into the overlay, so the disk below keeps the content of that moment. Later QEMU copies (*merges*) the
//! overlay into the *base*, the node that the device had when nothing of ours was on it. This works for every image
//! format and every storage that QEMU has, because only QEMU touches it.
//!
//! ```text
//! create ──> mark ──> (the next overlays) ──> merge ──> remove        end: all overlays merged, the device is on its
//! (runs)     (stopped)                        (runs)                  base again (stopped)
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`flash`] | flash memories, which are no disks |
//! | [`graph`] | which nodes a device has, read from QEMU |
//! | [`jobs`] | block jobs: waiting for their end, cancelling |
//! | [`libvirt`] | the steps above, by libvirt's calls |
//! | [`migration`] | rejecting migrations while a disk has overlays |
//! | [`names`] | the names of nodes and jobs |
//! | [`overlay`] | the steps above |
//!
//! Nothing here is durable or decides which overlay may be merged; that is the caller's task (`disk::overlay`). QEMU
//! keeps these promises, which the tests check with each supported version: while a merge runs, it rejects both a mark
//! and a backup of that disk; a cancelled merge leaves the chain as it was; the base is read-only while an overlay is
//! above it, and again after a merge, which includes a flush of what the merge wrote into it.

pub mod flash;
pub mod graph;
pub mod jobs;
pub mod libvirt;
pub mod migration;
pub mod names;
pub mod overlay;

use crate::qmp::QmpError;
use crate::stopped::NotStopped;
use std::io;
use std::time::Duration;

/// Why a step on a guest's disk failed.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    #[error("QEMU has no block device `{device}` with a medium")]
    UnknownDevice { device: String },
    #[error("block node `{node}` above the overlays of `{device}` is not Rekindle's; end the operation that added it")]
    ForeignNode { device: String, node: String },
    #[error(
        "the disk of `{device}` is behind the filter `{node}` ({driver}), on which no overlay can be merged; give the \
         device its image without the filter"
    )]
    Filter { device: String, node: String, driver: String },
    #[error("`{device}` is read-only: its disk needs no overlay")]
    ReadOnly { device: String },
    #[error("the disk of `{device}` was resized after its next overlay was made, so no overlay was put on it")]
    Resized { device: String },
    #[error("QEMU described block node `{node}` incompletely")]
    IncompleteNode { node: String },
    #[error("block job `{job}` failed: {message}")]
    JobFailed { job: String, message: String },
    #[error("block job `{job}` disappeared before its end; another client of QEMU's monitor has dismissed it")]
    JobVanished { job: String },
    #[error("block job `{job}` did not end within {} s", after.as_secs())]
    JobTimeout { job: String, after: Duration },
    #[error("QEMU ended a merge without a flush of `{base}`; keep the overlay, whose data may be in memory only")]
    BaseNotFlushed { base: String },
    #[error("`{device}` is on node `{actual}` after the end of its overlays, not on its base `{base}`")]
    NotOnBase { device: String, base: String, actual: String },
    #[error(
        "it is unknown whether `{device}` is on its overlay or on its base; keep the guest stopped and repeat this"
    )]
    EndUnknown {
        device: String,
        #[source]
        source: Box<BlockError>,
    },
    #[error("libvirt does not {step}: {message}")]
    LibvirtRejected { step: &'static str, message: String },
    #[error("cannot make a file in memory")]
    Memory {
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    NotStopped(#[from] NotStopped),
    #[error(transparent)]
    Qmp(#[from] QmpError),
}
