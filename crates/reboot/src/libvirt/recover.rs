//! Ends interrupted replacements of domains' QEMUs.
//!
//! [`crate::unprepared`] decides where each guest continues.
//!
//! Interrupted replacements share libvirt's daemon. While one of them is between its decision and its new record, a daemon
//! that is started would connect to its frozen source. So all of them are ended together: first each guest is placed in
//! one of its QEMUs, then the daemon is started once, then the rest.
//!
//! In each case libvirt's daemon runs at the end. If no QEMU has the guest, libvirt shows the domain as shut off.

use super::DomainError;
use super::daemon_guard::DaemonGuard;
use super::give_back::{GivenBack, give_back, settle};
use super::journal::operation;
use super::way_back::{Returned, end_without_guest, return_to_source};
use crate::error::RebootError;
use crate::interrupted::{Recovered, SilentQemuPolicy, continue_interrupted, restore_priorities};
use crate::parallel::in_threads;
use crate::unprepared::give::finish_move;
use crate::unprepared::recover::{GuestPlace, PlacedInDestination, place, resume_destination};
use crate::vmm::RUN_STATE_TIMEOUT;
use rekindle_handover::Handover;
use rekindle_libvirt::daemon::DaemonError;
use rekindle_libvirt::daemon::lock::DaemonLock;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind, Step};
use rekindle_vm::lock::RunStateLock;
use rekindle_vm::locked_vm::LockedVm;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use std::sync::Arc;

/// The recovery of one domain.
pub(crate) struct RecoveredDomain {
    pub name: String,
    pub result: Result<Recovered, RebootError>,
}

/// Returns whether `name` is a domain whose replacement was interrupted.
pub(crate) fn is_interrupted(host: &Host, name: &str) -> bool {
    let rundir = RunDir::new(&host.root, name);
    let is_replacement = Journal::read(&rundir)
        .is_ok_and(|journal| journal.is_some_and(|Journal { operation, .. }| operation.kind == Kind::LibvirtReplace));
    // An attempt that was interrupted before it started anything has no state.
    is_replacement && State::read(&rundir).is_ok_and(|state| state.is_some())
}

/// Ends all interrupted replacements of this host. Can be repeated.
///
/// # Errors
/// [`RebootError`]: nothing was changed, because one of them cannot be locked.
pub(crate) fn recover_replacements(host: &Host, policy: SilentQemuPolicy) -> Result<Vec<RecoveredDomain>, RebootError> {
    // Before the locks of the domains, as a replacement does: its holder need not wait for any of those.
    let _daemon_lock = DaemonLock::acquire()?;
    let names = RunDir::list(&host.root).map_err(RebootError::file(&host.root))?;
    let names = names.into_iter().filter(|name| is_interrupted(host, name));
    let interrupted = names.map(|name| Interrupted::lock(host, &name)).collect::<Result<Vec<_>, _>>()?;
    let interrupted: Vec<_> = interrupted.into_iter().flatten().collect();
    let operations = interrupted.iter().filter_map(|domain| operation(&domain.handover).ok());
    let guard = DaemonGuard::of_interrupted(operations);
    let names: Vec<_> = interrupted.iter().map(|domain| domain.handover.name().to_owned()).collect();
    let (locks, handovers): (Vec<_>, Vec<_>) =
        interrupted.into_iter().map(|Interrupted { locks, handover }| (locks, handover)).unzip();
    let placed = in_threads(handovers, |handover| place_guest(handover, policy));
    let started = guard.start().map(drop).map_err(Arc::new);
    let ended = in_threads(placed.into_iter().zip(&names), |(guest, name)| {
        let guest = guest.unwrap_or_else(|_| Err(DomainError::Panicked { name: name.clone() }.into()))?;
        guest.end(started.as_ref().copied())
    });
    drop(locks);
    let recovered = |(name, result): (String, Result<_, _>)| {
        let panicked = DomainError::Panicked { name: name.clone() };
        RecoveredDomain { name, result: result.unwrap_or_else(|_| Err(panicked.into())) }
    };
    Ok(names.into_iter().zip(ended).map(recovered).collect())
}

/// A domain whose replacement was interrupted.
struct Interrupted {
    locks: (LockedVm, RunStateLock),
    handover: Handover,
}

impl Interrupted {
    /// Returns `None` if another process has recovered it meanwhile.
    fn lock(host: &Host, name: &str) -> Result<Option<Self>, RebootError> {
        let (locked_vm, journal) = LockedVm::lock_even_if_interrupted(host, name, "recover")?;
        let Some(journal) = journal else { return Ok(None) };
        restore_priorities(&journal.operation);
        let run_state = RunStateLock::acquire(&locked_vm.rundir, RUN_STATE_TIMEOUT).map_err(LifeError::from)?;
        let handover = continue_interrupted(&locked_vm, journal);
        Ok(Some(Self { locks: (locked_vm, run_state), handover }))
    }
}

/// A domain of which libvirt's daemon can be started.
enum PlacedGuest {
    /// The operation has ended.
    Settled,
    GivenBack(Box<GivenBack>),
    Returned(Box<Returned>),
}

impl PlacedGuest {
    /// Ends the operation. `daemon`: whether the daemon runs.
    fn end(self, daemon: Result<(), &Arc<DaemonError>>) -> Result<Recovered, RebootError> {
        daemon.map_err(|error| DomainError::Daemon(Arc::clone(error)))?;
        match self {
            Self::Settled => Ok(Recovered::Finished),
            Self::GivenBack(mut given_back) => {
                given_back.wait_reconnected()?;
                given_back.finish_move()?;
                given_back.settle()?;
                Ok(Recovered::Finished)
            }
            Self::Returned(returned) => returned.close(),
        }
    }
}

/// Places the guest in one of its QEMUs, and makes libvirt's record agree with that.
fn place_guest(handover: Handover, policy: SilentQemuPolicy) -> Result<PlacedGuest, RebootError> {
    let returned = |returned| PlacedGuest::Returned(Box::new(returned));
    match place(&handover, policy)? {
        GuestPlace::Source => return_to_source(handover, policy).map(returned),
        GuestPlace::Destination(destination) => finish(handover, *destination),
        GuestPlace::Lost => end_without_guest(handover).map(returned),
    }
}

/// Resumes the guest in the destination unless it runs there, and gives the domain back to libvirt.
fn finish(mut handover: Handover, destination: PlacedInDestination) -> Result<PlacedGuest, RebootError> {
    let mut resumed = resume_destination(&mut handover, destination)?;
    if handover.journal.operation.step == Step::Settle {
        finish_move(&mut handover, resumed.ram_move.take())?;
        settle(handover, &resumed.vmm, &mut resumed.qmp)?;
        return Ok(PlacedGuest::Settled);
    }
    Ok(PlacedGuest::GivenBack(Box::new(give_back(handover, resumed)?)))
}
