//! The source host of a move: takes checkpoints while the guest runs, takes the last one in the final pause, and sends
//! [`Message::Go`] to the destination host.
//!
//! | module | step |
//! |---|---|
//! | this one | preflight on both hosts; ends the VM's protector |
//! | `precopy` | takes checkpoints while the guest runs; the destination host prepares a QEMU |
//! | `final_pause` | stops the guest, takes its last checkpoint, and makes the destination host resume it |
//!
//! Before [`Message::Go`] the destination host cannot resume the guest; after it the store decides ([`super::settle`]).

mod final_pause;
mod precopy;

use super::domain::SourceDomain;
use super::protocol::{Answer, Hello, Message, MovingDomain, VERSION};
use super::remote::Connection;
use super::{ConnectionError, MoveError, MoveEvent, MovePause, MoveReport, RemoteHost};
use crate::credential_paths::CredentialPaths;
use crate::known_store::KnownStoreFile;
use crate::owned::OwnerRecord;
use crate::protector::{DiskPolicy, ProtectError, ProtectSettings, reject_dax};
use crate::recipe::permission;
use crate::target::Target;
use final_pause::{FinalPause, MovedGuest};
use precopy::PrecopiedGuest;
use rekindle_kernel::process::Process;
use rekindle_life::attach::{AttachError, ProtectionLock};
use rekindle_qemu::hold::OutputHold;
use rekindle_store::Credentials;
use rekindle_store::keys::KeySource;
use rekindle_store::listing::Listing;
use rekindle_store::{StoreError, StoreUrl, admin};
use rekindle_vm::definition::Name;
use rekindle_vm::error::LifeError;
use rekindle_vm::fault;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{End, JOURNAL_FILE, Journal, Kind};
use rekindle_vm::locked_vm::LockedVm;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::timeline::host_us;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long QEMU may take to send its greeting.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the destination host may take to check whether it can take a VM: it may have to query its QEMU's
/// capabilities.
const HELLO_TIMEOUT: Duration = Duration::from_secs(120);
/// How long the protector may take to end.
const PROTECTOR_END_TIMEOUT: Duration = Duration::from_secs(60);
/// Minimum number of checkpoints that the store keeps during a move.
const MIN_KEPT_CHECKPOINTS: usize = 10;

/// Parameters of a move.
#[derive(Debug, Clone)]
pub struct MoveSettings {
    /// The destination host.
    pub remote: RemoteHost,
    /// The store for checkpoints, which both hosts reach.
    pub store: StoreUrl,
    /// Create the store if there is none.
    pub create_store: bool,
    /// The credentials of both hosts for the store, in the same files.
    pub credentials: Option<Credentials>,
    /// A definition file on the destination host that replaces the recipe's.
    pub definition: Option<PathBuf>,
    /// Path of a QEMU on the destination host, to use instead of the definition's.
    pub qemu: Option<PathBuf>,
    /// libvirt's connection URI on the destination host, for a domain; none: as on this host.
    pub connect: Option<String>,
    /// The user knows that moves of domains are new.
    pub preview: bool,
}

/// Moves VM `name` from this host to another one.
///
/// *Needs:* the VM runs, and Rekindle serves its disks, they are read-only, or the VM is a domain of libvirt; ssh to the destination host; a store and
/// images that both hosts reach.
/// *On success:* the guest runs on the destination host with its memory; nothing of it is left on this host.
/// *On failure:* the guest continues to run on this host, except after errors for which [`MoveError::needs_recovery`]
/// is true.
pub fn start(
    host: &Host,
    name: &Name,
    settings: &MoveSettings,
    stop: &AtomicBool,
    on_event: &mut dyn FnMut(&MoveEvent),
) -> Result<MoveReport, MoveError> {
    let started_us = host_us();
    let Movable { held, target, is_domain, listing, mut connection } = preflight(host, name, settings, on_event)?;
    // It may come back.
    permission::remember(host, name, &target.recipe());
    let EndedProtector { protection, pid: protector } = end_protector(&held.rundir)?;
    if let Some(pid) = protector {
        on_event(&MoveEvent::ProtectorEnded { pid });
    }
    let protect_settings = protect_settings(settings, is_domain, listing.as_ref());
    let journal_failed = |source| MoveError::File { path: held.rundir.file(JOURNAL_FILE), source };
    let journal = Journal::open(&held.rundir, Kind::Move, Some(target.vmm().clone()), held.state.generation + 1)
        .map_err(journal_failed)?;
    fault::point("move.prepare.journalled", Some(target.vmm()), None);
    let precopied = PrecopiedGuest::make(host, &target, &protect_settings, protection, stop, &mut connection, on_event);
    let ready = precopied.and_then(|precopied| {
        // The last opportunity to cancel: the guest is stopped next.
        if stop.load(Ordering::Relaxed) {
            return Err(MoveError::Interrupted { name: name.to_string() });
        }
        Ok((target.hold_run_state()?, precopied))
    });
    let (run_state, precopied) = match ready {
        Ok(ready) => ready,
        Err(e) => {
            journal.close(End::Undone).map_err(journal_failed)?;
            return Err(e);
        }
    };
    let rounds = precopied.rounds.clone();
    let pause = FinalPause { host, held: &held, settings, target: &target, connection, journal, run_state };
    let moved = pause.run(precopied)?;
    Ok(MoveReport { rounds, protector, ..report(name, settings, moved, started_us) })
}

/// Returns the report of a move, without what precedes the final pause.
fn report(name: &Name, settings: &MoveSettings, moved: MovedGuest, started_us: u64) -> MoveReport {
    let MovedGuest { last_checkpoint, running, message_sent_us, answered_us } = moved;
    let resumed_us = answered_us.saturating_sub(running.as_ref().map_or(0, |running| running.answered_after_us));
    let destination = running.map(|running| running.report);
    let (stopped_host_us, read, commit) =
        (last_checkpoint.stopped_host_us, last_checkpoint.stopped_us, last_checkpoint.commit_us);
    MoveReport {
        name: name.to_string(),
        host: settings.remote.host.clone(),
        checkpoint: last_checkpoint.number,
        rounds: Vec::new(),
        last_bytes: last_checkpoint.copied_stopped_bytes,
        stopped_us: resumed_us.saturating_sub(stopped_host_us),
        pause: MovePause {
            read,
            commit,
            release: message_sent_us.saturating_sub(stopped_host_us + read + commit),
            resume: resumed_us.saturating_sub(message_sent_us),
        },
        resumed_after_us: resumed_us.saturating_sub(started_us),
        destination,
        protector: None,
    }
}

/// Returns the parameters for the checkpoints of a move. `listing` has the checkpoints that the store has already.
fn protect_settings(settings: &MoveSettings, is_domain: bool, listing: Option<&Listing>) -> ProtectSettings {
    let kept = listing.map_or(0, |listing| listing.checkpoints.len()).max(MIN_KEPT_CHECKPOINTS);
    ProtectSettings {
        store: settings.store.clone(),
        credentials: settings.credentials.clone(),
        every: Duration::ZERO,
        policy: None,
        keep: u32::try_from(kept).unwrap_or(u32::MAX),
        max_lag: None,
        disks: if is_domain { DiskPolicy::Overlays { parent: None } } else { DiskPolicy::Refuse },
        count: None,
        output_commit: false,
        compare: false,
        stay: false,
        create_store: settings.create_store,
        abandon_old: false,
    }
}

/// A guest that can be moved, and the connection to its destination host.
struct Movable {
    held: LockedVm,
    target: Target,
    is_domain: bool,
    /// The store's listing; none if the store is new or is to be created.
    listing: Option<Listing>,
    connection: Connection,
}

/// Runs the preflight of a move on both hosts. Changes nothing.
pub fn check(
    host: &Host,
    name: &Name,
    settings: &MoveSettings,
    on_event: &mut dyn FnMut(&MoveEvent),
) -> Result<(), MoveError> {
    preflight(host, name, settings, on_event).map(drop)
}

fn preflight(
    host: &Host,
    name: &Name,
    settings: &MoveSettings,
    on_event: &mut dyn FnMut(&MoveEvent),
) -> Result<Movable, MoveError> {
    let held = LockedVm::lock(host, name.as_str(), "move")?;
    let domain = SourceDomain::movable(&held)?;
    check_options(name, settings, domain.is_some())?;
    held.vmm()?;
    let target = Target::of(host, name.as_str())?;
    let announced = domain.as_ref().map(|domain| domain.announce(&target, settings.connect.as_ref())).transpose()?;
    reject_disks(&held)?;
    reject_dax(&target)?;
    KnownStoreFile::of(host, name.as_str()).check(settings.credentials.as_ref()).map_err(ProtectError::from)?;
    let listing = list_store(settings, &held.rundir)?;
    let mut connection = settings.remote.connect()?;
    let store_created_us = listing.as_ref().map(|listing| listing.created_us);
    let remote_host = greet(&mut connection, &target, announced, settings, store_created_us)?;
    on_event(&MoveEvent::Ready { host: remote_host });
    Ok(Movable { held, target, is_domain: domain.is_some(), listing, connection })
}

/// Rejects options that do not fit the kind of guest.
fn check_options(name: &Name, settings: &MoveSettings, is_domain: bool) -> Result<(), MoveError> {
    let name = || name.to_string();
    let definition = settings.definition.as_ref().map(|_| "--definition");
    match definition.or(settings.qemu.as_ref().map(|_| "--qemu")) {
        Some(option) if is_domain => Err(MoveError::DomainOption { name: name(), option }),
        _ if is_domain && !settings.preview => Err(MoveError::Preview { name: name() }),
        _ if !is_domain && settings.connect.is_some() => Err(MoveError::NoDomain { name: name() }),
        _ if has_key_command(settings) => Err(MoveError::KeyCommand),
        _ => Ok(()),
    }
}

fn has_key_command(settings: &MoveSettings) -> bool {
    let keys = settings.credentials.as_ref().and_then(|credentials| credentials.keys.as_ref());
    matches!(keys, Some(KeySource::Command(_)))
}

/// Lists the checkpoints of the store. Returns `None` if the first checkpoint will create the store, or will be the
/// first in it.
fn list_store(settings: &MoveSettings, rundir: &RunDir) -> Result<Option<Listing>, MoveError> {
    let e = match admin::listing(&settings.store, settings.credentials.as_ref()) {
        Ok(listing) => return Ok(Some(listing)),
        Err(e) if e.is_no_store() => e,
        Err(e) => return Err(e.into()),
    };
    match OwnerRecord::read(rundir)?.filter(|record| record.is_of(&settings.store)) {
        Some(record) => Err(ProtectError::from(record.store_gone(rundir, &e)).into()),
        None if settings.create_store || matches!(e, StoreError::Unused { .. }) => Ok(None),
        None => Err(e.into()),
    }
}

/// Rejects disks that QEMU itself writes: the source QEMU would have them open while the destination host uses them.
fn reject_disks(held: &LockedVm) -> Result<(), MoveError> {
    let disks = &held.state.hardware.disks;
    match disks.iter().find(|disk| !disk.server && !disk.readonly) {
        Some(disk) => Err(MoveError::Disk { name: held.rundir.name().into(), disk: disk.id.clone() }),
        None => Ok(()),
    }
}

/// Asks the destination host whether it can take the VM. Returns the host's own name.
fn greet(
    connection: &mut Connection,
    target: &Target,
    domain: Option<MovingDomain>,
    settings: &MoveSettings,
    store_created_us: Option<u64>,
) -> Result<String, MoveError> {
    let recipe = target.recipe();
    let hello = Hello {
        version: VERSION,
        name: recipe.name().clone(),
        recipe,
        store: settings.store.clone(),
        store_created_us,
        credentials: settings.credentials.as_ref().and_then(CredentialPaths::of),
        definition: settings.definition.clone(),
        qemu: settings.qemu.clone(),
        hold_output: output_is_held(target)?,
        domain,
    };
    match connection.ask(&Message::Hello(Box::new(hello)), HELLO_TIMEOUT)? {
        Answer::Ready { version: VERSION, host } => Ok(host),
        answer => Err(unexpected(answer, target.name(), &settings.remote.host)),
    }
}

/// Returns whether the guest's network output is held until a checkpoint is committed.
fn output_is_held(target: &Target) -> Result<bool, MoveError> {
    let hold = target.vmm().connect_watcher(GREETING_TIMEOUT).and_then(|mut qmp| OutputHold::find(&mut qmp));
    Ok(hold.map_err(LifeError::from)?.is_some())
}

/// Returns the error for an unexpected answer.
fn unexpected(answer: Answer, name: &str, host: &str) -> MoveError {
    match answer {
        Answer::Refused { why } => MoveError::Refused { name: name.into(), host: host.into(), why },
        answer => ConnectionError::NotAnAnswer { host: host.into(), answer: format!("{answer:?}") }.into(),
    }
}

struct EndedProtector {
    /// Locks out other protectors.
    protection: ProtectionLock,
    /// The protector's pid, if there was one.
    pid: Option<u32>,
}

/// Stops the VM's protector, because only one process can take checkpoints.
fn end_protector(rundir: &RunDir) -> Result<EndedProtector, MoveError> {
    let deadline = Instant::now() + PROTECTOR_END_TIMEOUT;
    let mut signalled_pid = None;
    loop {
        match ProtectionLock::take(rundir) {
            Ok(protection) => return Ok(EndedProtector { protection, pid: signalled_pid }),
            Err(AttachError::Protected { by: Some(pid), .. }) if signalled_pid.is_none() => {
                let path = rundir.file("protection.lock");
                // The protector holds the lock, so its pid has not been reused.
                let signalled = Process::of(pid).and_then(|process| process.terminate());
                signalled.map_err(|source| MoveError::File { path, source })?;
                signalled_pid = Some(pid);
            }
            Err(AttachError::Protected { .. }) if Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(10));
            }
            Err(e) => return Err(e.into()),
        }
    }
}
