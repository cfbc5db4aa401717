//! Finishes or undoes an interrupted operation. Each operation has its own recovery; this module chooses it.
//!
//! The live processes and the files decide, in this order:
//!
//! 1. The destination QEMU runs the guest: the operation is finished.
//! 2. The source QEMU lives and the guest has not run in the destination: it resumes in the source.
//! 3. The saved state is complete and the guest has not run since: a new QEMU is started from the saved state.
//! 4. Otherwise the guest's memory is lost: the loss is reported, and the guest is booted from its disks.

mod idle;

pub use crate::interrupted::{Recovered, SilentQemuPolicy};

use crate::bare;
use crate::error::RebootError;
use crate::host::{self, HostError};
use crate::interrupted::{continue_interrupted, require_answers, restore_priorities};
use crate::libvirt::is_domain;
use crate::libvirt::recover::{RecoveredDomain, is_interrupted, recover_replacements};
use crate::moving::reconnect_disks;
use crate::os::KexecRecovery;
use crate::vmm::RUN_STATE_TIMEOUT;
use crate::vmm::recover::{boot_after_loss, recover_cold, recover_handover};
use rekindle_protect::moving::settle::{Settled, settle};
use rekindle_protect::restore;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::causes::with_causes;
use rekindle_vm::cleanup::clean_up;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{End, Journal, Kind, Step};
use rekindle_vm::lock::RunStateLock;
use rekindle_vm::locked_vm::LockedVm;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::status::{Status, status};

/// Finishes or undoes an interrupted operation on VM `name`, or boots a guest whose QEMU has died.
///
/// *Needs:* no other operation on the VM.
/// *On success:* as [`Recovered`] states; exactly one QEMU runs the guest.
/// *On failure:* no additional QEMU runs; the recovery can be repeated.
///
/// # Errors
/// [`RebootError`]; [`RebootError::needs_recovery`] if a QEMU that may run the guest does not answer.
pub fn recover(host: &Host, name: &str, policy: SilentQemuPolicy) -> Result<Recovery, RebootError> {
    if is_interrupted(host, name) {
        return recover_domain(host, name, policy);
    }
    if bare::is_interrupted(host, name) {
        return bare::recover(host, name, policy).map(Recovery::of);
    }
    if !RunDir::new(&host.root, name).exists() && is_domain(name) {
        // The recovery of another domain has recovered this one, too.
        return Ok(Recovery::of(Recovered::Nothing));
    }
    let recovered = recover_locked(host, name, policy)?;
    if recovered == Recovered::MovedBack {
        reconnect_disks(host, name)?;
    }
    Ok(Recovery::of(recovered))
}

/// Result of [`recover`].
#[derive(Debug)]
pub struct Recovery {
    pub recovered: Recovered,
    /// Domains of libvirt that were recovered together with the named one, because they share libvirt's daemon.
    pub others: Vec<(String, Recovered)>,
}

impl Recovery {
    fn of(recovered: Recovered) -> Self {
        Self { recovered, others: Vec::new() }
    }
}

/// Recovers a domain of libvirt, and all others whose replacement was interrupted. Failures of the others are logged.
fn recover_domain(host: &Host, name: &str, policy: SilentQemuPolicy) -> Result<Recovery, RebootError> {
    let mut recovery = Recovery::of(Recovered::Nothing);
    let mut failure = None;
    for RecoveredDomain { name: domain, result } in recover_replacements(host, policy)? {
        match result {
            Ok(recovered) if domain == name => recovery.recovered = recovered,
            Ok(recovered) => recovery.others.push((domain, recovered)),
            Err(error) if domain == name => failure = Some(error),
            Err(error) => tracing::error!("{domain}: {}", with_causes(&error)),
        }
    }
    failure.map_or(Ok(recovery), Err)
}

/// As [`recover`]. A guest that a move has left here may not have its disks yet.
fn recover_locked(host: &Host, name: &str, policy: SilentQemuPolicy) -> Result<Recovered, RebootError> {
    let (locked_vm, journal) = LockedVm::lock_even_if_interrupted(host, name, "recover")?;
    let _run_state = RunStateLock::acquire(&locked_vm.rundir, RUN_STATE_TIMEOUT).map_err(LifeError::from)?;
    let Some(journal) = journal else { return idle::recover_idle(host, &locked_vm, policy) };
    require_answers(&locked_vm, &journal.operation, policy)?;
    restore_priorities(&journal.operation);
    let recovered = match journal.operation.kind {
        Kind::Run => recover_run(host, &locked_vm, journal),
        Kind::Prepare => Ok(match restore::recover::recover_prepare(host, &locked_vm, journal)? {
            restore::recover::Outcome::Finished => Recovered::Prepared,
            restore::recover::Outcome::Removed => Recovered::Removed,
        }),
        Kind::Restore => Ok(match restore::recover::recover_restore(host, &locked_vm, journal)? {
            restore::recover::Outcome::Finished => Recovered::Finished,
            restore::recover::Outcome::Removed => Recovered::Removed,
        }),
        Kind::LibvirtRestore => Ok(match restore::into_libvirt::recover(host, &locked_vm, journal)? {
            restore::recover::Outcome::Finished => Recovered::Finished,
            restore::recover::Outcome::Removed => Recovered::Removed,
        }),
        Kind::Move => recover_move(host, &locked_vm, journal, policy),
        Kind::Stop => {
            clean_up(host, &locked_vm.rundir, &locked_vm.state)?;
            Ok(Recovered::Removed)
        }
        Kind::HostWarm | Kind::HostSaved | Kind::HostCold => return host::recover(host, &locked_vm, journal),
        Kind::OsKexec => recover_kexec(&locked_vm, journal, policy),
        // `OsPhase`: a guest that was not resumed from its boot snapshot yet is booted instead.
        Kind::VmmCold | Kind::OsCold | Kind::OsWarmCache | Kind::OsPhase => {
            recover_cold(continue_interrupted(&locked_vm, journal))
        }
        // Recovered before, unless it was interrupted only now.
        Kind::LibvirtReplace | Kind::BareReplace => {
            return Err(LifeError::NeedsRecovery {
                name: name.into(),
                kind: journal.operation.kind,
                step: journal.operation.step,
            }
            .into());
        }
        Kind::VmmWarm | Kind::VmmSaved => recover_handover(continue_interrupted(&locked_vm, journal)),
    }?;
    idle::remove_saved_state(host, &locked_vm);
    Ok(recovered)
}

/// Finishes a start if its QEMU was recorded; otherwise undoes the start.
fn recover_run(host: &Host, locked_vm: &LockedVm, journal: Journal) -> Result<Recovered, RebootError> {
    if locked_vm.vmm().is_ok() {
        journal.close(End::Done).map_err(RebootError::file(&locked_vm.rundir.file("operation.json")))?;
        return Ok(Recovered::Started);
    }
    clean_up(host, &locked_vm.rundir, &locked_vm.state)?;
    Ok(Recovered::Removed)
}

/// Settles a move: the store's owner decides which host has the guest. If the source QEMU died before the destination
/// host was notified, the memory is lost.
fn recover_move(
    host: &Host,
    locked_vm: &LockedVm,
    journal: Journal,
    policy: SilentQemuPolicy,
) -> Result<Recovered, RebootError> {
    if journal.operation.step < Step::Resume && !journal.operation.from.as_ref().is_some_and(Vmm::is_alive) {
        if locked_vm.state.attached.is_some() {
            journal.close(End::Undone).map_err(RebootError::file(&locked_vm.rundir.file("operation.json")))?;
            return idle::recover_idle(host, locked_vm, policy);
        }
        return boot_after_loss(continue_interrupted(locked_vm, journal), None);
    }
    Ok(match settle(host, locked_vm, journal).map_err(RebootError::Move)? {
        Settled::ResumedHere => Recovered::MovedBack,
        Settled::RunsThere => Recovered::MovedAway,
    })
}

/// Recovers a kexec: determines whether the guest runs the other kernel or the previous one. If neither, boots it.
fn recover_kexec(
    locked_vm: &LockedVm,
    mut journal: Journal,
    policy: SilentQemuPolicy,
) -> Result<Recovered, RebootError> {
    let failed = RebootError::file(&locked_vm.rundir.file("operation.json"));
    match crate::os::recover_kexec(locked_vm, &journal, policy.force)? {
        KexecRecovery::RunsOtherKernel => {
            journal.close(End::Done).map_err(failed)?;
            Ok(Recovered::Started)
        }
        KexecRecovery::RunsPreviousKernel => {
            journal.close(End::Undone).map_err(failed)?;
            Ok(Recovered::Undone)
        }
        KexecRecovery::MustBoot => {
            journal.operation.kind = Kind::OsCold;
            journal.advance(Step::Suspend).map_err(failed)?;
            recover_cold(continue_interrupted(locked_vm, journal))
        }
    }
}

/// Finishes or undoes an interrupted suspend of the VMs `names` under `token`, so that the suspend can be repeated. At
/// the end of a shutdown no other process can do this.
///
/// *On success:* `true`: the suspend had been committed, and the remaining QEMUs have ended. `false`: the suspend had
/// not been committed, and the guests run; guests that could not be recovered are logged.
/// *On failure:* nothing was changed, or only some of the QEMUs have ended.
///
/// # Errors
/// [`HostError::Record`] if the record cannot be read, [`HostError::Ending`] if a QEMU does not end.
pub fn recover_suspend(host: &Host, names: &[String], token: &str) -> Result<bool, HostError> {
    if host::end_committed_suspend(host, token)? {
        return Ok(true);
    }
    for name in names {
        if matches!(status(&RunDir::new(&host.root, name)), Ok(Status::NeedsRecovery))
            && let Err(error) = recover(host, name, SilentQemuPolicy::default())
        {
            tracing::warn!("{name}: {}", with_causes(&error));
        }
    }
    Ok(false)
}
