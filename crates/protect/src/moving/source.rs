//! The host that has the guest: checkpoints while it runs, the last one in the pause, and the word to the other host.
//!
//! Until the word nothing there can let the guest go on; from the word on the store decides ([`super::settle`]).

use super::protocol::{Answer, Go, Hello, Running, Say, State, VERSION};
use super::record::{Record, files};
use super::settle::{Settled, go_on, let_go, look, settle, taken};
use super::{Event, Far, LineError, MoveError, Moved, Pause, Round, There};
use crate::event::Done;
use crate::first::Run;
use crate::moving::far::Line;
use crate::owned::Owned;
use crate::protector::{self, Disks, Failure, Loop, ProtectError, refuse_direct};
use crate::session::Session;
use crate::target::Target;
use rekindle_kernel::process::Process;
use rekindle_qemu::hold::Hold;
use rekindle_store::listing::Listing;
use rekindle_store::remote::Identity;
use rekindle_store::{StoreError, StoreUrl, admin};
use rekindle_vm::attach::{AttachError, Protection};
use rekindle_vm::definition::Name;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind, Step};
use rekindle_vm::life::{Held, LifeError};
use rekindle_vm::lock::RunState;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::timeline::host_us;
use rekindle_vm::{disks, fault};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long QEMU may take to greet.
const GREETING: Duration = Duration::from_secs(5);
/// How long the other host may take to see whether it can have a VM: it may have to ask its QEMU what that can do.
const HELLO: Duration = Duration::from_secs(120);
/// How long it may take to start a QEMU, or to read of a checkpoint what a load needs.
const PREPARE: Duration = Duration::from_secs(300);
/// How long it may take to let the guest go on. After that the store is asked who has it.
const GO: Duration = Duration::from_secs(60);
/// How long it may take to read [`Say::Go`]: a short line, for which there is room. The guest is stopped meanwhile.
const WORD: Duration = Duration::from_secs(10);
/// How long who takes checkpoints may take to end.
const PROTECTOR: Duration = Duration::from_secs(60);
/// Fewer dirty bytes than these are left for the pause.
const SMALL: u64 = 2 << 20;
/// Passes over the guest's memory at most.
const ROUNDS: usize = 16;
/// Checkpoints that are kept, at least.
const KEEP: usize = 10;

/// What is wanted.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where the other host is.
    pub far: Far,
    /// Where checkpoints go, for both.
    pub store: StoreUrl,
    /// Create the store if there is none.
    pub create_store: bool,
    /// Who both are to a store on a server.
    pub identity: Option<Identity>,
    /// A file there that says how the VM is to be built there.
    pub definition: Option<PathBuf>,
    /// The QEMU there to use instead of the definition's.
    pub qemu: Option<PathBuf>,
}

/// Move VM `name`, which runs here.
///
/// *Needs:* the VM runs, with disks that Rekindle serves, or that are only read; ssh to the other host; a store and images that both reach.
/// *On success:* the guest runs there with its memory; nothing of it is left here.
/// *On failure:* it goes on here, but for what [`MoveError::needs_recovery`] is true of.
///
/// # Errors
/// [`MoveError`].
pub fn start(
    host: &Host,
    name: &Name,
    settings: &Settings,
    stop: &AtomicBool,
    tell: &mut dyn FnMut(&Event),
) -> Result<Moved, MoveError> {
    let began = host_us();
    let Movable { held, target, found, mut line } = get_ready(host, name, settings, tell)?;
    let (only, protector) = end_protector(&held.rundir)?;
    if let Some(pid) = protector {
        tell(&Event::ProtectorEnded { pid });
    }
    let keep = found.map_or(0, |listing| listing.checkpoints.len()).max(KEEP);
    let wanted = protector::Settings {
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
    let prepared = Prepared::make(host, &target, &wanted, only, stop, &mut line, tell);
    let run_state = prepared.and_then(|prepared| {
        // The last moment: from here on the guest is stopped.
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
    let going = Going { host, held: &held, settings, target: &target, line, journal, run_state };
    let Gone { done, said, told, heard } = going.go(prepared)?;
    let (there, since) = match said {
        Some(Running { us, since_us, pid, prepared, ahead, unused, clock }) => {
            (Some(There { pid, us, prepared, ahead, unused, clock }), since_us)
        }
        None => (None, 0),
    };
    let runs_at = heard.saturating_sub(since);
    let (read, commit) = (done.stopped_us, done.commit_us);
    let pause = Pause {
        read,
        commit,
        let_go: told.saturating_sub(done.stopped_host_us + read + commit),
        there: runs_at.saturating_sub(told),
    };
    Ok(Moved {
        name: name.to_string(),
        host: settings.far.host.clone(),
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

/// A guest that can be moved, and the line to the host that can take it.
struct Movable {
    held: Held,
    target: Target,
    /// What the store has; none if it is new, or to be created.
    found: Option<Listing>,
    line: Line,
}

/// Looks at whether VM `name` could be moved, here and on the other host. Nothing is changed.
///
/// # Errors
/// [`MoveError`].
pub fn check(host: &Host, name: &Name, settings: &Settings, tell: &mut dyn FnMut(&Event)) -> Result<(), MoveError> {
    get_ready(host, name, settings, tell).map(drop)
}

fn get_ready(
    host: &Host,
    name: &Name,
    settings: &Settings,
    tell: &mut dyn FnMut(&Event),
) -> Result<Movable, MoveError> {
    let held = Held::take(host, name.as_str(), "move")?;
    held.refuse_attached("moving it")?;
    held.vmm()?;
    let target = Target::of(host, name.as_str())?;
    refuse_disks(&held)?;
    refuse_direct(&target)?;
    let found = match admin::listing(&settings.store, settings.identity.as_ref()) {
        Ok(listing) => Some(listing),
        Err(e) if e.is_no_store() => match Owned::read(&held.rundir)?.filter(|owned| owned.is_of(&settings.store)) {
            Some(owned) => return Err(ProtectError::from(owned.gone(&held.rundir, &e)).into()),
            // The first checkpoint creates it.
            None if settings.create_store || matches!(e, StoreError::Unused { .. }) => None,
            None => return Err(e.into()),
        },
        Err(e) => return Err(e.into()),
    };
    let mut line = settings.far.connect()?;
    let created_us = found.as_ref().map(|listing| listing.created_us);
    hello(&mut line, &target, name, settings, created_us, tell)?;
    Ok(Movable { held, target, found, line })
}

/// Disks that QEMU itself writes: it would have them open here while the other host's has.
fn refuse_disks(held: &Held) -> Result<(), MoveError> {
    let disks = &held.state.hardware.disks;
    match disks.iter().find(|disk| !disk.server && !disk.readonly) {
        Some(disk) => Err(MoveError::Disk { name: held.rundir.name().into(), disk: disk.id.clone() }),
        None => Ok(()),
    }
}

/// Ask the other host whether it could have the VM.
fn hello(
    line: &mut Line,
    target: &Target,
    name: &Name,
    settings: &Settings,
    created_us: Option<u64>,
    tell: &mut dyn FnMut(&Event),
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
    match line.ask(&Say::Hello(Box::new(hello)), HELLO)? {
        Answer::Ready { version: VERSION, host } => {
            tell(&Event::Ready { host });
            Ok(())
        }
        other => Err(refused(other, name.as_str(), &settings.far.host)),
    }
}

/// Whether what the guest sends is held until a checkpoint counts.
fn is_held(target: &Target) -> Result<bool, MoveError> {
    let found = target.vmm().watch(GREETING).and_then(|mut qmp| Hold::found(&mut qmp));
    Ok(found.map_err(LifeError::from)?.is_some())
}

/// An answer that is not the one that was hoped for.
fn refused(answer: Answer, name: &str, host: &str) -> MoveError {
    match answer {
        Answer::Refused { why } => MoveError::Refused { name: name.into(), host: host.into(), why },
        other => LineError::Odd { host: host.into(), said: format!("{other:?}") }.into(),
    }
}

/// End who takes checkpoints of the VM: only one can. Gives the right to, and its process if there was one.
fn end_protector(rundir: &RunDir) -> Result<(Protection, Option<u32>), MoveError> {
    let deadline = Instant::now() + PROTECTOR;
    let mut asked = None;
    loop {
        match Protection::take(rundir) {
            Ok(only) => return Ok((only, asked)),
            Err(AttachError::Protected { by: Some(pid), .. }) if asked.is_none() => {
                let path = rundir.file("protection.lock");
                // It holds the lock, so it is this process and no later one of its number.
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

/// Little is left to be read, and a QEMU waits on the other host.
struct Prepared<'a> {
    taker: Loop<'a>,
    session: Session,
    rounds: Vec<Round>,
    /// The pages of the last of them that are in the QEMU there; none if they have to be read again.
    known: Option<Vec<Run>>,
}

impl<'a> Prepared<'a> {
    fn make(
        host: &'a Host,
        target: &Target,
        wanted: &'a protector::Settings,
        only: Protection,
        stop: &'a AtomicBool,
        line: &mut Line,
        tell: &mut dyn FnMut(&Event),
    ) -> Result<Self, MoveError> {
        let name = target.name();
        let failed =
            |e: crate::session::SessionError| MoveError::Checkpoint { name: name.to_string(), source: Box::new(e) };
        let mut taker = Loop::open(host, target, wanted, stop, &format!("move {name}"), only)?;
        let mut session = taker.attach(target).map_err(|e| match e {
            Failure::Fatal(e) => MoveError::Protect(e),
            Failure::Session(e) => failed(e),
        })?;
        let mut rounds: Vec<Round> = Vec::new();
        loop {
            if stop.load(Ordering::Relaxed) {
                return Err(MoveError::Interrupted { name: name.to_string() });
            }
            let done = taker.checkpoint(&mut session).map_err(|e| match taker.given_up(target.rundir(), &e) {
                Some(over) => MoveError::Protect(over),
                None => failed(e),
            })?;
            let before = rounds.last().map(|round| round.dirty_bytes);
            let round = Round {
                checkpoint: done.number,
                dirty_bytes: done.dirty_bytes,
                bytes: done.bytes,
                stopped_us: done.stopped_us,
                took_us: done.took_us,
            };
            tell(&Event::Round(round.clone()));
            let dirty = round.dirty_bytes;
            rounds.push(round);
            match before {
                None => {
                    // From here on the store has what a QEMU there needs.
                    match line.ask(&Say::Prepare {}, PREPARE)? {
                        Answer::Prepared { pid, .. } => tell(&Event::Prepared { pid }),
                        other => return Err(refused(other, name, line.host())),
                    }
                    fault::point("move.prepare.prepared", Some(target.vmm()), None);
                }
                // What is left is little, or does not get less.
                Some(before) if dirty <= SMALL || dirty >= before / 10 * 9 || rounds.len() >= ROUNDS => break,
                Some(_) => {}
            }
        }
        let known = match line.ask(&Say::Look {}, PREPARE)? {
            Answer::Looked { checkpoint, pages } => {
                let newest = rounds.last().map(|round| round.checkpoint);
                (checkpoint.is_some() && checkpoint == newest).then_some(pages)
            }
            other => return Err(refused(other, name, line.host())),
        };
        Ok(Self { taker, session, rounds, known })
    }
}

/// A guest whose pause is about to begin.
struct Going<'a> {
    host: &'a Host,
    held: &'a Held,
    settings: &'a Settings,
    target: &'a Target,
    line: Line,
    journal: Journal,
    run_state: RunState,
}

/// A guest that has gone.
struct Gone {
    /// Its last checkpoint.
    done: Done,
    /// What the other host says.
    said: Option<Running>,
    /// When it was told, in µs since 1970.
    told: u64,
    /// When it had answered: what is cleared away here afterwards the guest does not wait for.
    heard: u64,
}

impl Going<'_> {
    /// Stop the guest, and have the other host let it go on.
    fn go(mut self, prepared: Prepared<'_>) -> Result<Gone, MoveError> {
        let Prepared { mut taker, mut session, known, .. } = prepared;
        let vmm = self.target.vmm();
        let name = self.held.rundir.name();
        let rundir = &self.held.rundir;
        let stopped = self.suspend(&mut taker, &mut session, known.as_deref());
        let (done, record) = match stopped {
            Ok(stopped) => stopped,
            // Another host has it by now: nothing runs of it here any more.
            Err(e @ MoveError::Protect(_)) => {
                let path = rundir.file("operation.json");
                self.journal.close().map_err(|source| MoveError::File { path, source })?;
                return Err(e);
            }
            Err(e) => {
                // The other host was told nothing.
                go_on(rundir, &self.held.state, vmm, self.journal, true).map_err(|source| stuck(name, source))?;
                return Err(e);
            }
        };
        let told = host_us();
        let go = Say::Go(Go { epoch: record.epoch });
        let said = self.line.say(&go, WORD);
        fault::point("move.resume.told", Some(vmm), None);
        let said = said.and_then(|()| self.line.answer(GO));
        let heard = host_us();
        let host = record.far.host.clone();
        let left = |source| MoveError::Left { name: name.into(), host: host.clone(), source: Box::new(source) };
        match said {
            Ok(Answer::Running(running)) => {
                fault::point("move.settle.running", Some(vmm), None);
                let_go(self.host, self.held, self.journal).map_err(left)?;
                drop(self.run_state);
                Ok(Gone { done, said: Some(running), told, heard })
            }
            Ok(Answer::Failed { begun: true, why, .. }) => {
                let_go(self.host, self.held, self.journal).map_err(left)?;
                let (_, status) = look(&record.far, &self.held.state.definition.name);
                Err(taken(&record, format!("{status} ({why})")))
            }
            other => {
                let why = match other {
                    Err(e) => protector::chain(&e),
                    // By its word it has not, and will not. If it had become the owner, it is asked whether it still is.
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
                    Settled::Back => Err(MoveError::Back { name: name.into(), host, why }),
                    // That it runs there is known now only.
                    Settled::Away => Ok(Gone { done, said: None, told, heard: host_us() }),
                }
            }
        }
    }

    /// Stop the guest, commit its last checkpoint and let go of its disks. What has to be known from here on is on disk when this returns.
    /// The other host, which has `known` pages as they were before, loads it meanwhile.
    fn suspend(
        &mut self,
        taker: &mut Loop<'_>,
        session: &mut Session,
        known: Option<&[Run]>,
    ) -> Result<(Done, Record), MoveError> {
        let (rundir, vmm) = (&self.held.rundir, self.target.vmm());
        let journalled = |source| MoveError::File { path: rundir.file("operation.json"), source };
        self.journal.advance(Step::Suspend).map_err(journalled)?;
        fault::point("move.suspend.journalled", Some(vmm), None);
        let line = &mut self.line;
        let last = taker.last(session, &self.run_state, &mut |read| {
            if let Some(state) = known.and_then(|known| State::of(read, known)) {
                // A line that is too short or breaks is no failure yet: at the word, all of it can be read out of the store.
                let _ = line.say_at_once(&Say::State(state));
            }
            fault::point("move.suspend.read", Some(vmm), None);
        });
        let (done, epoch) = last.map_err(|e| match taker.given_up(rundir, &e) {
            Some(over) => MoveError::Protect(over),
            None => MoveError::Checkpoint { name: rundir.name().into(), source: Box::new(e) },
        })?;
        fault::point("move.suspend.committed", Some(vmm), None);
        let Settings { far, store, identity, .. } = self.settings;
        let (far, store, vm) = (far.clone(), store.clone(), self.target.identity());
        let run = Owned::read(rundir)?.map(|owned| owned.run());
        let record = Record::new(far, store, identity.as_ref(), vm, (epoch, run), done.number);
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
