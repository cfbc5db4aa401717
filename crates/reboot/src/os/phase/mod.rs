//! Phase-based reboot: the guest goes on from a snapshot of a phase of an earlier boot (section 3.2 of the evaluation).
//!
//! | module | what it is for |
//! |---|---|
//! | [`candidates`] | the snapshots of a VM: where they are, and whether they may be used |
//! | `port` | the port by which a guest announces phases, and is answered |
//! | `health` | the phase that no guest announces |
//! | [`keeper`] | the process that waits for both |
//! | `save` | what it has saved |
//! | `go` | the reboot |
//! | `next` | the guest that goes on, from a QEMU that waits beside the former one |
//!
//! A candidate may be used while none of the blocks that its guest had read or written has been written since: `docs/os-reboot.md` has the
//! argument.

pub mod candidates;
mod go;
mod health;
pub mod keeper;
mod next;
mod port;
mod save;

pub use candidates::Candidate;
pub(super) use go::{against, reboot};

use rekindle_protect::restore::Clock;
use rekindle_qemu::command::Hardware;
use serde::{Deserialize, Serialize};

/// What has come of a reboot by phase.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// The candidate; none: none could be used, and it was booted cold.
    pub candidate: Option<String>,
    /// Later ones that could not be used.
    pub skipped: Vec<Skipped>,
    /// What became of the guest's clock, if an agent ran in it.
    pub clock: Option<Clock>,
    /// From the command to the guest's running, in µs, without the end of the former one.
    pub load_us: Option<u64>,
}

/// Why no candidate of such a machine can be used, whatever it holds.
fn unfit(hardware: &Hardware) -> Option<String> {
    super::huge_pages(hardware).map(|directory| {
        let directory = directory.display();
        format!("its RAM is in huge pages ({directory}), which keep what the former guest has left in them")
    })
}

/// A candidate that could not be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// Its phase.
    pub name: String,
    /// Why.
    pub why: String,
}
