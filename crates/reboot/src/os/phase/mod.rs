//! Phase-based reboot: the guest continues from a boot snapshot, taken at a phase of an earlier boot (section 3.2 of
//! the evaluation). The snapshot of a phase is called its *candidate*.
//!
//! | module | purpose |
//! |---|---|
//! | [`candidates`] | the candidates of a VM: where they are stored, and whether they may be used |
//! | `port` | the port through which a guest announces phases and gets answers |
//! | `health` | the phase that is detected from outside |
//! | [`saver`] | the process that waits for phases and has candidates saved |
//! | `save` | saving one candidate |
//! | `reboot` | the reboot |
//! | `successor` | the destination QEMU, which is prepared while the previous guest still runs |
//!
//! A candidate may be used as long as none of the blocks that its guest had read or written has been written since:
//! `docs/os-reboot.md` has the argument.

pub mod candidates;
mod health;
mod port;
mod reboot;
mod save;
pub mod saver;
mod successor;

pub use candidates::Candidate;
pub(super) use reboot::{find_problem, reboot};

use rekindle_protect::restore::ClockOutcome;
use rekindle_qemu::command::Hardware;
use serde::{Deserialize, Serialize};

/// Result of a reboot by phase.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseOutcome {
    /// The candidate that was used. `None`: none was usable, and the guest was booted.
    pub candidate: Option<String>,
    /// Candidates of later phases that were not usable.
    pub skipped: Vec<SkippedCandidate>,
    /// Whether the guest's clock was set. `None`: the guest was booted, or no agent runs in it.
    pub clock: Option<ClockOutcome>,
    /// Time from the command to the resume of the guest, in µs, without the shutdown of the previous guest.
    pub load_us: Option<u64>,
}

/// Returns the reason why no candidate of a machine with this hardware is usable, whatever the candidate holds. `None`:
/// candidates are usable.
fn why_unfit(hardware: &Hardware) -> Option<String> {
    super::huge_page_directory(hardware).map(|directory| {
        let directory = directory.display();
        format!("its RAM is in huge pages ({directory}), which still hold the previous guest's data")
    })
}

/// A candidate that was not usable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedCandidate {
    pub name: String,
    pub why: String,
}
