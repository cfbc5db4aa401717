//! Finishes or undoes an interrupted operation. Each operation recovers itself; this decides which one that is.
//!
//! The live processes and the files decide, in this order:
//!
//! 1. The destination QEMU runs the guest: the operation is finished.
//! 2. The source QEMU lives and the guest has not run in the destination: it resumes in the source.
//! 3. The saved state is complete and the guest has not run since: a new QEMU is started from it.
//! 4. Otherwise the guest's memory is lost: that is reported, and the guest is booted from its disks.

mod answer;
mod idle;

pub use answer::SilentQemuPolicy;
pub(crate) use answer::of_generation;
pub(crate) use idle::end_pause;

use crate::vmm::recover::{recover_cold, recover_handover};
use crate::vmm::{RUN_STATE_TIMEOUT, RebootError};
use rekindle_handover::Handover;
use rekindle_kernel::sched;
use rekindle_protect::moving::settle::{Settled, settle};
use rekindle_protect::restore;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::cleanup::clean_up;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind, Step};
use rekindle_vm::life::Held;
use rekindle_vm::lock::RunState;
use rekindle_vm::timeline::Recorder;
use serde::{Deserialize, Serialize};
use std::fmt;

/// What `recover` did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Recovered {
    Nothing,
    /// An interrupted checkpoint had left the guest stopped; it was resumed.
    Unpaused,
    /// A disk server had ended; it was started again.
    Served,
    /// The operation was undone: the guest runs in the source QEMU, with its memory.
    Undone,
    /// The operation was finished: the guest runs in the destination QEMU, with its memory.
    Finished,
    /// The guest was resumed from its saved state, with its memory.
    FromState,
    /// A start or a cold reboot was finished: the guest was booted.
    Started,
    /// The guest's memory was lost, and it was booted from its disks.
    Booted,
    /// A preparation was finished: a QEMU waits for a restore.
    Prepared,
    /// A move was undone: the guest runs on this host.
    MovedBack,
    /// A move was finished: the guest runs on the other host, and nothing of it remains here.
    MovedAway,
    /// The VM was removed: a stop was finished, or a start was undone.
    Removed,
}

impl fmt::Display for Recovered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Nothing => "there was nothing to recover",
            Self::Unpaused => "an interrupted checkpoint or suspend had left the guest stopped; it was resumed",
            Self::Served => "a disk server had ended; it was started again",
            Self::Undone => "undone: the guest runs in the same QEMU as before, with its memory",
            Self::Finished => "finished: the guest runs in the destination QEMU, with its memory",
            Self::FromState => "the guest was resumed from its saved state, with its memory",
            Self::Started => "finished: the guest was booted",
            Self::Booted => "the guest's memory was lost; it was booted from its disks",
            Self::Prepared => "finished: a QEMU waits for a checkpoint",
            Self::MovedBack => "undone: the guest runs on this host, with its memory",
            Self::MovedAway => "finished: the guest runs on the other host, and nothing of it remains here",
            Self::Removed => "the VM is removed",
        })
    }
}

/// Finishes or undoes an interrupted operation on VM `name`, or boots a guest whose QEMU has died.
///
/// *Needs:* no other operation on the VM.
/// *On success:* as [`Recovered`] states; exactly one QEMU runs the guest.
/// *On failure:* no additional QEMU runs; the recovery can be repeated.
///
/// # Errors
/// [`RebootError`]; [`RebootError::needs_recovery`] if a QEMU that may run the guest does not answer.
pub fn recover(host: &Host, name: &str, policy: SilentQemuPolicy) -> Result<Recovered, RebootError> {
    let (held, journal) = Held::take_anyhow(host, name, "recover")?;
    let _run_state = RunState::acquire(&held.rundir, RUN_STATE_TIMEOUT).map_err(LifeError::from)?;
    let Some(journal) = journal else { return idle::recover_idle(host, &held, policy) };
    answer::require_answers(&held, &journal.operation, policy)?;
    for vmm in [&journal.operation.from, &journal.operation.to].into_iter().flatten().filter(|vmm| vmm.is_alive()) {
        // An interrupted hand-over has left its threads at raised priority: harmless, but not meant to last.
        let _ = sched::normal(vmm.process());
    }
    let recovered = match journal.operation.kind {
        Kind::Run => recover_run(host, &held, journal),
        Kind::Prepare => Ok(match restore::recover::recover_prepare(host, &held, journal)? {
            restore::recover::Outcome::Finished => Recovered::Prepared,
            restore::recover::Outcome::Removed => Recovered::Removed,
        }),
        Kind::Restore => Ok(match restore::recover::recover_restore(host, &held, journal)? {
            restore::recover::Outcome::Finished => Recovered::Finished,
            restore::recover::Outcome::Removed => Recovered::Removed,
        }),
        Kind::Move => recover_move(host, &held, journal),
        Kind::Stop => {
            clean_up(host, &held.rundir, &held.state)?;
            Ok(Recovered::Removed)
        }
        Kind::HostWarm | Kind::HostSaved | Kind::HostCold => return crate::host::recover(host, &held, journal),
        Kind::OsKexec => recover_kexec(&held, journal, policy),
        // A guest that was not yet resumed from a boot snapshot is booted instead.
        Kind::VmmCold | Kind::OsCold | Kind::OsWarmCache | Kind::OsPhase => recover_cold(handover(&held, journal)),
        Kind::VmmWarm | Kind::VmmSaved => recover_handover(handover(&held, journal)),
    }?;
    idle::forget_saved(host, &held);
    Ok(recovered)
}

/// Continues an interrupted operation. Its timeline is not recorded.
pub(crate) fn handover(held: &Held, journal: Journal) -> Handover {
    let recorder = Recorder::new(held.rundir.name(), "recover");
    Handover { rundir: held.rundir.clone(), state: held.state.clone(), journal, recorder }
}

/// Finishes a start if its QEMU was recorded, else undoes it.
fn recover_run(host: &Host, held: &Held, journal: Journal) -> Result<Recovered, RebootError> {
    if held.vmm().is_ok() {
        let path = held.rundir.file("operation.json");
        journal.close().map_err(|source| RebootError::File { path, source })?;
        return Ok(Recovered::Started);
    }
    clean_up(host, &held.rundir, &held.state)?;
    Ok(Recovered::Removed)
}

/// Settles a move by the owner of the store. If the guest's QEMU died before the other host was notified, the memory is
/// lost.
fn recover_move(host: &Host, held: &Held, journal: Journal) -> Result<Recovered, RebootError> {
    if journal.operation.step < Step::Resume && !journal.operation.from.as_ref().is_some_and(Vmm::is_alive) {
        return crate::vmm::recover::boot_after_loss(handover(held, journal), None);
    }
    Ok(match settle(host, held, journal).map_err(RebootError::Move)? {
        Settled::ResumedHere => Recovered::MovedBack,
        Settled::RunsThere => Recovered::MovedAway,
    })
}

/// Recovers a kexec: the guest has started the other kernel, or runs as before, or is booted.
fn recover_kexec(held: &Held, mut journal: Journal, policy: SilentQemuPolicy) -> Result<Recovered, RebootError> {
    let path = held.rundir.file("operation.json");
    let failed = |source| RebootError::File { path: path.clone(), source };
    match crate::os::recover_kexec(held, &journal, policy.force)? {
        Some(another) => {
            journal.close().map_err(failed)?;
            Ok(if another { Recovered::Started } else { Recovered::Undone })
        }
        None => {
            journal.operation.kind = Kind::OsCold;
            journal.advance(Step::Suspend).map_err(failed)?;
            recover_cold(handover(held, journal))
        }
    }
}
