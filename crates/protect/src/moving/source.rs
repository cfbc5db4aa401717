//! The source host of a move: takes checkpoints while the guest runs, takes the last one in the final pause, and sends
//! [`Message::Go`] to the destination host.
//!
//! Before [`Message::Go`] the destination host cannot resume the guest; after it the store decides ([`super::settle`]).

use super::protocol::{Answer, Go, Hello, Message, Running, StoppedState, VERSION};
use super::record::{Record, files};
use super::settle::{Settled, remote_status, remove_here, resume_here, settle, taken};
use super::{ConnectionError, DestinationReport, MoveError, MoveEvent, MovePause, MoveReport, RemoteHost, Round};
use crate::event::CheckpointReport;
use crate::moving::remote::Connection;
use crate::owned::OwnerRecord;
use crate::protector::{self, Disks, Failure, ProtectError, ProtectLoop, reject_dax};
use crate::session::TrackingSession;
use crate::target::Target;
use rekindle_kernel::process::Process;
use rekindle_life::attach::{AttachError, ProtectionLock};
use rekindle_pages::PageRun;
use rekindle_qemu::hold::Hold;
use rekindle_store::listing::Listing;
use rekindle_store::remote::Identity;
use rekindle_store::{StoreError, StoreUrl, admin};
use rekindle_vm::definition::Name;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind, Step};
use rekindle_vm::lock::RunStateLock;
use rekindle_vm::locked_vm::LockedVm;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::timeline::host_us;
use rekindle_vm::{disks, fault};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long QEMU may take to send its greeting.
const GREETING: Duration = Duration::from_secs(5);
/// How long the destination host may take to check whether it can take a VM: it may have to query its QEMU's
/// capabilities.
const HELLO: Duration = Duration::from_secs(120);
/// How long the destination host may take to start a QEMU, or to read the data of a checkpoint that a load needs.
const PREPARE: Duration = Duration::from_secs(300);
/// How long the destination host may take to resume the guest. After that, the source host queries the store which host
/// has the guest.
const GO: Duration = Duration::from_secs(60);
/// How long the destination host may take to read [`Message::Go`]: a short line, for which the pipe has room. The guest
/// is stopped meanwhile.
const GO_READ: Duration = Duration::from_secs(10);
/// How long the protector may take to end.
const PROTECTOR: Duration = Duration::from_secs(60);
/// Checkpoints while the guest runs end when one has no more dirty bytes than this: about as many are left for the
/// final pause.
const FEW_BYTES: u64 = 2 << 20;
/// Maximum number of checkpoints that are taken while the guest runs.
const MAX_ROUNDS: usize = 16;
/// Minimum number of checkpoints that the store keeps during a move.
const MIN_KEPT: usize = 10;

/// Parameters of a move.
#[derive(Debug, Clone)]
pub struct MoveSettings {
    /// The destination host.
    pub remote: RemoteHost,
    /// The store for checkpoints, which both hosts reach.
    pub store: StoreUrl,
    /// Create the store if there is none.
    pub create_store: bool,
    /// The identity of both hosts for a store on a server.
    pub identity: Option<Identity>,
    /// A definition file on the destination host that replaces the recipe's.
    pub definition: Option<PathBuf>,
    /// Path of a QEMU on the destination host, to use instead of the definition's.
    pub qemu: Option<PathBuf>,
}

/// Moves VM `name` from this host to another one.
///
/// *Needs:* the VM runs, and Rekindle serves its disks or they are read-only; ssh to the destination host; a store and
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
    let began = host_us();
    let Movable { held, target, found, mut connection } = preflight(host, name, settings, on_event)?;
    let (protection, protector) = end_protector(&held.rundir)?;
    if let Some(pid) = protector {
        on_event(&MoveEvent::ProtectorEnded { pid });
    }
    let keep = found.map_or(0, |listing| listing.checkpoints.len()).max(MIN_KEPT);
    let wanted = protector::ProtectSettings {
        store: settings.store.clone(),
        identity: settings.identity.clone(),
        every: Duration::ZERO,
        policy: None,
        keep: u32::try_from(keep).unwrap_or(u32::MAX),
        max_lag: None,
        disks: Disks::Refuse,
        count: None,
        output_commit: false,
        compare: false,
        stay: false,
        create_store: settings.create_store,
        abandon_old: false,
    };
    let failed = |source| MoveError::File { path: held.rundir.file("operation.json"), source };
    let journal = Journal::open(&held.rundir, Kind::Move, Some(target.vmm().clone()), held.state.generation + 1);
    let journal = journal.map_err(failed)?;
    fault::point("move.prepare.journalled", Some(target.vmm()), None);
    let prepared = PrecopiedGuest::make(host, &target, &wanted, protection, stop, &mut connection, on_event);
    let run_state = prepared.and_then(|prepared| {
        // The last opportunity to cancel: the guest is stopped next.
        if stop.load(Ordering::Relaxed) {
            return Err(MoveError::Interrupted { name: name.to_string() });
        }
        Ok((target.hold_run_state()?, prepared))
    });
    let (run_state, prepared) = match run_state {
        Ok(both) => both,
        Err(e) => {
            journal.close().map_err(failed)?;
            return Err(e);
        }
    };
    let rounds = prepared.rounds.clone();
    let pause = FinalPause { host, held: &held, settings, target: &target, connection, journal, run_state };
    let MovedGuest { done, answer, sent_us, answered_us } = pause.run(prepared)?;
    let (there, since) = match answer {
        Some(Running { us, since_us, pid, prepared, ahead, unused, clock }) => {
            (Some(DestinationReport { pid, us, prepared, ahead, unused, clock }), since_us)
        }
        None => (None, 0),
    };
    let runs_at = answered_us.saturating_sub(since);
    let (read, commit) = (done.stopped_us, done.commit_us);
    let pause = MovePause {
        read,
        commit,
        release: sent_us.saturating_sub(done.stopped_host_us + read + commit),
        there: runs_at.saturating_sub(sent_us),
    };
    Ok(MoveReport {
        name: name.to_string(),
        host: settings.remote.host.clone(),
        checkpoint: done.number,
        rounds,
        last_bytes: done.copied_stopped_bytes,
        stopped_us: runs_at.saturating_sub(done.stopped_host_us),
        pause,
        us: runs_at.saturating_sub(began),
        there,
        protector,
    })
}

/// A guest that can be moved, and the connection to its destination host.
struct Movable {
    held: LockedVm,
    target: Target,
    /// The store's listing; none if the store is new or is to be created.
    found: Option<Listing>,
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
    held.refuse_attached("moving it")?;
    held.vmm()?;
    let target = Target::of(host, name.as_str())?;
    reject_disks(&held)?;
    reject_dax(&target)?;
    let found = match admin::listing(&settings.store, settings.identity.as_ref()) {
        Ok(listing) => Some(listing),
        Err(e) if e.is_no_store() => {
            match OwnerRecord::read(&held.rundir)?.filter(|owned| owned.is_of(&settings.store)) {
                Some(owned) => return Err(ProtectError::from(owned.store_gone(&held.rundir, &e)).into()),
                // The first checkpoint creates the store, or uses the new one.
                None if settings.create_store || matches!(e, StoreError::Unused { .. }) => None,
                None => return Err(e.into()),
            }
        }
        Err(e) => return Err(e.into()),
    };
    let mut connection = settings.remote.connect()?;
    let created_us = found.as_ref().map(|listing| listing.created_us);
    hello(&mut connection, &target, name, settings, created_us, on_event)?;
    Ok(Movable { held, target, found, connection })
}

/// Rejects disks that QEMU itself writes: the source QEMU would have them open while the destination host uses them.
fn reject_disks(held: &LockedVm) -> Result<(), MoveError> {
    let disks = &held.state.hardware.disks;
    match disks.iter().find(|disk| !disk.server && !disk.readonly) {
        Some(disk) => Err(MoveError::Disk { name: held.rundir.name().into(), disk: disk.id.clone() }),
        None => Ok(()),
    }
}

/// Asks the destination host whether it can take the VM.
fn hello(
    connection: &mut Connection,
    target: &Target,
    name: &Name,
    settings: &MoveSettings,
    created_us: Option<u64>,
    on_event: &mut dyn FnMut(&MoveEvent),
) -> Result<(), MoveError> {
    let hello = Hello {
        version: VERSION,
        name: name.clone(),
        recipe: target.recipe(),
        store: settings.store.clone(),
        created_us,
        identity: settings.identity.as_ref().map(files),
        definition: settings.definition.clone(),
        qemu: settings.qemu.clone(),
        hold_output: is_held(target)?,
    };
    match connection.ask(&Message::Hello(Box::new(hello)), HELLO)? {
        Answer::Ready { version: VERSION, host } => {
            on_event(&MoveEvent::Ready { host });
            Ok(())
        }
        other => Err(unexpected(other, name.as_str(), &settings.remote.host)),
    }
}

/// Returns whether the guest's network output is held until a checkpoint is committed.
fn is_held(target: &Target) -> Result<bool, MoveError> {
    let found = target.vmm().watch(GREETING).and_then(|mut qmp| Hold::found(&mut qmp));
    Ok(found.map_err(LifeError::from)?.is_some())
}

/// Returns the error for an unexpected answer.
fn unexpected(answer: Answer, name: &str, host: &str) -> MoveError {
    match answer {
        Answer::Refused { why } => MoveError::Refused { name: name.into(), host: host.into(), why },
        other => ConnectionError::NotAnAnswer { host: host.into(), answer: format!("{other:?}") }.into(),
    }
}

/// Stops the VM's protector, because only one process can take checkpoints. Returns the protection lock, and the
/// protector's pid if there was one.
fn end_protector(rundir: &RunDir) -> Result<(ProtectionLock, Option<u32>), MoveError> {
    let deadline = Instant::now() + PROTECTOR;
    let mut asked = None;
    loop {
        match ProtectionLock::take(rundir) {
            Ok(protection) => return Ok((protection, asked)),
            Err(AttachError::Protected { by: Some(pid), .. }) if asked.is_none() => {
                let path = rundir.file("protection.lock");
                // The protector holds the lock, so its pid has not been reused.
                let ended = Process::of(pid).and_then(|process| process.terminate());
                ended.map_err(|source| MoveError::File { path, source })?;
                asked = Some(pid);
            }
            Err(AttachError::Protected { .. }) if Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(10));
            }
            Err(e) => return Err(e.into()),
        }
    }
}

/// A guest with few dirty pages, for which a destination QEMU waits.
struct PrecopiedGuest<'a> {
    protect_loop: ProtectLoop<'a>,
    session: TrackingSession,
    rounds: Vec<Round>,
    /// The pages of the newest checkpoint that the destination host has read; none if it must read them again.
    known: Option<Vec<PageRun>>,
}

impl<'a> PrecopiedGuest<'a> {
    fn make(
        host: &'a Host,
        target: &Target,
        wanted: &'a protector::ProtectSettings,
        protection: ProtectionLock,
        stop: &'a AtomicBool,
        connection: &mut Connection,
        on_event: &mut dyn FnMut(&MoveEvent),
    ) -> Result<Self, MoveError> {
        let name = target.name();
        let failed =
            |e: crate::session::CheckpointError| MoveError::Checkpoint { name: name.to_string(), source: Box::new(e) };
        let mut protect_loop = ProtectLoop::open(host, target, wanted, stop, &format!("move {name}"), protection)?;
        let mut session = protect_loop.attach(target).map_err(|e| match e {
            Failure::Fatal(e) => MoveError::Protect(e),
            Failure::Tracking(e) => failed(e),
        })?;
        let mut rounds: Vec<Round> = Vec::new();
        loop {
            if stop.load(Ordering::Relaxed) {
                return Err(MoveError::Interrupted { name: name.to_string() });
            }
            let done = protect_loop.checkpoint(&mut session).map_err(|e| {
                match protect_loop.owned_elsewhere(target.rundir(), &e) {
                    Some(e) => MoveError::Protect(e),
                    None => failed(e),
                }
            })?;
            let before = rounds.last().map(|round| round.dirty_bytes);
            let round = Round {
                checkpoint: done.number,
                dirty_bytes: done.dirty_bytes,
                bytes: done.bytes,
                stopped_us: done.stopped_us,
                took_us: done.took_us,
            };
            on_event(&MoveEvent::Round(round.clone()));
            let dirty = round.dirty_bytes;
            rounds.push(round);
            match before {
                None => {
                    // After the first checkpoint, the store has the data that a destination QEMU needs to start.
                    match connection.ask(&Message::Prepare {}, PREPARE)? {
                        Answer::Prepared { pid, .. } => on_event(&MoveEvent::Prepared { pid }),
                        other => return Err(unexpected(other, name, connection.host())),
                    }
                    fault::point("move.prepare.prepared", Some(target.vmm()), None);
                }
                // Few dirty bytes are left, or their number does not decrease.
                Some(before) if dirty <= FEW_BYTES || dirty >= before / 10 * 9 || rounds.len() >= MAX_ROUNDS => break,
                Some(_) => {}
            }
        }
        let known = match connection.ask(&Message::ReadNewest {}, PREPARE)? {
            Answer::NewestRead { checkpoint, pages } => {
                let newest = rounds.last().map(|round| round.checkpoint);
                (checkpoint.is_some() && checkpoint == newest).then_some(pages)
            }
            other => return Err(unexpected(other, name, connection.host())),
        };
        Ok(Self { protect_loop, session, rounds, known })
    }
}

/// The final pause of a move, about to start.
struct FinalPause<'a> {
    host: &'a Host,
    held: &'a LockedVm,
    settings: &'a MoveSettings,
    target: &'a Target,
    connection: Connection,
    journal: Journal,
    run_state: RunStateLock,
}

struct MovedGuest {
    done: CheckpointReport,
    /// The destination host's report, if it arrived.
    answer: Option<Running>,
    /// When [`Message::Go`] was sent, in µs since 1970.
    sent_us: u64,
    /// When [`Message::Go`] was answered, in µs since 1970. The guest does not wait for the source host's clean-up,
    /// which follows.
    answered_us: u64,
}

impl FinalPause<'_> {
    /// Stops the guest, and makes the destination host resume it.
    fn run(mut self, prepared: PrecopiedGuest<'_>) -> Result<MovedGuest, MoveError> {
        let PrecopiedGuest { mut protect_loop, mut session, known, .. } = prepared;
        let vmm = self.target.vmm();
        let name = self.held.rundir.name();
        let rundir = &self.held.rundir;
        let stopped = self.suspend(&mut protect_loop, &mut session, known.as_deref());
        let (done, record) = match stopped {
            Ok(stopped) => stopped,
            // Another host has the guest by now, and its processes on this host were ended.
            Err(e @ MoveError::Protect(_)) => {
                let path = rundir.file("operation.json");
                self.journal.close().map_err(|source| MoveError::File { path, source })?;
                return Err(e);
            }
            Err(e) => {
                // The destination host has not been notified.
                resume_here(rundir, &self.held.state, vmm, self.journal, true).map_err(|source| stuck(name, source))?;
                return Err(e);
            }
        };
        let sent_us = host_us();
        let message = Message::Go(Go { epoch: record.epoch });
        let answer = self.connection.send(&message, GO_READ);
        fault::point("move.resume.told", Some(vmm), None);
        let answer = answer.and_then(|()| self.connection.read_answer(GO));
        let answered_us = host_us();
        let host = record.remote.host.clone();
        let left = |source| MoveError::Left { name: name.into(), host: host.clone(), source: Box::new(source) };
        match answer {
            Ok(Answer::Running(running)) => {
                fault::point("move.settle.running", Some(vmm), None);
                remove_here(self.host, self.held, self.journal).map_err(left)?;
                drop(self.run_state);
                Ok(MovedGuest { done, answer: Some(running), sent_us, answered_us })
            }
            Ok(Answer::Failed { resumed: true, why, .. }) => {
                remove_here(self.host, self.held, self.journal).map_err(left)?;
                let (_, status) = remote_status(&record.remote, &self.held.state.definition.name);
                Err(taken(&record, format!("{status} ({why})")))
            }
            other => {
                let why = match other {
                    Err(e) => protector::chain(&e),
                    // The destination host reports that it has not resumed the guest, and it will not. If it became the
                    // owner, check whether it still is.
                    Ok(Answer::Failed { why, claimed, .. }) => {
                        if let Some(epoch) = claimed {
                            let record = record.at(epoch);
                            let path = rundir.file("move.json");
                            record.write(rundir).map_err(|source| stuck(name, MoveError::File { path, source }))?;
                        }
                        why
                    }
                    Ok(Answer::Refused { why }) => why,
                    Ok(other) => format!("it answers {other:?}"),
                };
                match settle(self.host, self.held, self.journal)? {
                    Settled::ResumedHere => Err(MoveError::ResumedHere { name: name.into(), host, why }),
                    // Only now is it known that the guest runs on the destination host.
                    Settled::RunsThere => Ok(MovedGuest { done, answer: None, sent_us, answered_us: host_us() }),
                }
            }
        }
    }

    /// Stops the guest, commits its last checkpoint and releases its disks. When this returns, all data that recovery
    /// needs is on disk. The destination host, which has the previous content of the pages `known`, loads the guest
    /// meanwhile.
    fn suspend(
        &mut self,
        protect_loop: &mut ProtectLoop<'_>,
        session: &mut TrackingSession,
        known: Option<&[PageRun]>,
    ) -> Result<(CheckpointReport, Record), MoveError> {
        let (rundir, vmm) = (&self.held.rundir, self.target.vmm());
        let journalled = |source| MoveError::File { path: rundir.file("operation.json"), source };
        self.journal.advance(Step::Suspend).map_err(journalled)?;
        fault::point("move.suspend.journalled", Some(vmm), None);
        let connection = &mut self.connection;
        let last = protect_loop.last(session, &self.run_state, &mut |read| {
            if let Some(state) = known.and_then(|known| StoppedState::of(read, known)) {
                // No room in the pipe, or a broken connection, is not an error yet: the destination host can read the
                // state from the store.
                let _ = connection.send_if_room(&Message::State(state));
            }
            fault::point("move.suspend.read", Some(vmm), None);
        });
        let (done, epoch) = last.map_err(|e| match protect_loop.owned_elsewhere(rundir, &e) {
            Some(e) => MoveError::Protect(e),
            None => MoveError::Checkpoint { name: rundir.name().into(), source: Box::new(e) },
        })?;
        fault::point("move.suspend.committed", Some(vmm), None);
        let MoveSettings { remote, store, identity, .. } = self.settings;
        let (remote, store, vm) = (remote.clone(), store.clone(), self.target.identity());
        let run = OwnerRecord::read(rundir)?.map(|owned| owned.run());
        let record = Record::new(remote, store, identity.as_ref(), vm, (epoch, run), done.number);
        record.write(rundir).map_err(|source| MoveError::File { path: rundir.file("move.json"), source })?;
        disks::end(rundir, &self.held.state.hardware)?;
        fault::point("move.suspend.let-go", Some(vmm), None);
        self.journal.advance(Step::Resume).map_err(journalled)?;
        fault::point("move.resume.journalled", Some(vmm), None);
        Ok((done, record))
    }
}

fn stuck(name: &str, source: MoveError) -> MoveError {
    MoveError::Stuck { name: name.into(), source: Box::new(source) }
}
