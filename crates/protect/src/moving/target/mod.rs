//! The destination host of a move: `rekindle receive`. The source host starts it over ssh and sends messages to its
//! standard input.
//!
//! A move is a restore on this host of the guest's last *checkpoint* (its memory and devices at one moment), which the
//! source host commits to the VM's *store*, reachable from both hosts. [`receive`] reads the messages; an
//! [`IncomingVm`] does what they request. What is done before `state` does not cost time while the guest is stopped:
//!
//! ```text
//! message      the guest        this host then has
//! hello        runs             nothing; it has checked that the VM fits
//! prepare      runs             a QEMU that waits, started from an earlier checkpoint; *primed*: its memory is
//!                               registered for loading pages on demand (`primed_qemu`)
//! read-newest  runs             the newest checkpoint's data, read for that QEMU (`early_load`, which owns the QEMU)
//! state        stopped          an *early load* in progress: that data, with the changes since that the message has
//! go           stopped, and     resumed the guest from the early load or, if there is none or it has failed before
//!              committed        the guest could run, from the store
//! ```
//!
//! Only one host may run the guest. The store counts its owners in *owner epochs*. The source host sends the epoch of
//! its commit in `go`. This host resumes the guest only after it has become the next owner; the source host resumes it
//! only if this host certainly has not. A [`MoveClaim`] is this host's side of that: `owner_epoch` is the epoch of `go`
//! and, once this host is the owner, its own; `may_run` is set before the guest can have run here.

mod connection;

use super::DestinationReport;
use super::protocol::{Answer, Go, Hello, Message, MovingDomain, Running, VERSION};
use super::stopped_state::StoppedState;
use crate::credential_paths::CredentialPaths;
use crate::known_store::KnownStoreFile;
use crate::recipe::permission::Permission;
use crate::restore::checkpoint::ChosenCheckpoint;
use crate::restore::concurrent::{EarlyLoad, SentState};
use crate::restore::into_libvirt::preflight::{check_disks, check_domain};
use crate::restore::into_libvirt::restore_into_libvirt;
use crate::restore::prepare::{PreparedQemu, PrimedQemu, prepare};
use crate::restore::{ClockOutcome, MoveClaim, Request, RestoreError, Restored, restore_in};
use connection::{Rejection, SourceConnection, TIMEOUTS};
use rekindle_life::stop;
use rekindle_store::admin;
use rekindle_store::types::KnownState;
use rekindle_vm::causes::with_causes;
use rekindle_vm::definition::{Definition, Name};
use rekindle_vm::disks::{self, Epochs};
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::slot::IdleSlot;
use rekindle_vm::state::State;
use rekindle_vm::status::{self, Status};
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// How long a status query waits for an operation on the VM.
const BUSY_TIMEOUT: Duration = Duration::from_secs(60);
/// Delay between two status queries of a VM on which an operation works.
const BUSY_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Serves a move until the source host has sent its last message. `input` and `output` are pipes or sockets, without a
/// buffer. Calls `on_running` with the name of a VM that runs on this host from then on.
///
/// *Needs:* the same as `rekindle restore`.
/// *On success:* the last answer states the result. If the guest did not arrive, the prepared QEMU was removed.
/// *On failure:* the prepared QEMU was removed.
///
/// # Errors
/// An I/O error if `input` cannot be read, or the source host exceeds a time limit.
pub fn receive(
    host: &Host,
    input: impl Read + AsFd,
    output: impl Write + AsFd,
    on_running: &dyn Fn(&str),
) -> io::Result<()> {
    let mut source = SourceConnection::new(input, output, TIMEOUTS);
    let hello = match source.read_message(TIMEOUTS.hello)? {
        None => return Ok(()),
        Some(Ok(Message::Hello(hello))) if hello.version == VERSION => hello,
        Some(Ok(Message::QueryStatus { version: VERSION, name })) => {
            source.send(&vm_status(host, &name));
            return Ok(());
        }
        Some(Ok(Message::Hello(_) | Message::QueryStatus { .. })) => {
            return source.reject(format!(
                "it has version {VERSION} of the protocol for moves; use the same Rekindle on both hosts"
            ));
        }
        Some(Ok(_)) => return source.reject("a message arrived before one that names a VM"),
        Some(Err(why)) => return source.reject(why),
    };
    let mut incoming = match IncomingVm::new(host, *hello) {
        Ok(incoming) => incoming,
        Err(why) => return source.reject(why),
    };
    let host_name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mut answer_was_read = source.send(&Answer::Ready { version: VERSION, host: host_name });
    // A source host that does not read an answer has abandoned the move.
    while answer_was_read {
        answer_was_read = match source.read_message(TIMEOUTS.checkpoints)? {
            // The source host has cancelled the move, or has failed.
            None => return Ok(()),
            Some(Ok(Message::Prepare {})) => match incoming.prepare() {
                Ok(answer) => source.send(&answer),
                Err(why) => return source.reject(why),
            },
            Some(Ok(Message::ReadNewest {})) => source.send(&incoming.read_newest()),
            Some(Ok(Message::State(state))) => return load_and_answer(source, incoming, state, on_running),
            Some(Ok(Message::Go(go))) => {
                let answer = incoming.resume(&go);
                source.send(&answer);
                incoming.notify_running(&answer, on_running);
                return Ok(());
            }
            Some(Ok(_)) => return source.reject("a second message names a VM"),
            Some(Err(why)) => return source.reject(why),
        };
    }
    Ok(())
}

/// Loads a guest that is stopped. [`Message::Go`] arrives during the load; its answer ends the move.
fn load_and_answer(
    mut source: SourceConnection<impl Read + AsFd, impl Write + AsFd>,
    mut incoming: IncomingVm<'_>,
    state: StoppedState,
    on_running: &dyn Fn(&str),
) -> io::Result<()> {
    let mut read_error = None;
    let answer = incoming.load(state, &mut || match source.read_message(TIMEOUTS.go) {
        Ok(Some(Ok(Message::Go(go)))) => Some(go),
        Ok(_) => None,
        Err(e) => {
            read_error = Some(e);
            None
        }
    });
    let Some(answer) = answer else { return read_error.map_or(Ok(()), Err) };
    source.send(&answer);
    incoming.notify_running(&answer, on_running);
    Ok(())
}

/// A VM that is being moved to this host.
struct IncomingVm<'a> {
    host: &'a Host,
    name: Name,
    request: Request,
    /// Set for a domain.
    domain: Option<MovingDomain>,
    /// A destination QEMU may have been prepared, which is removed on drop unless the guest runs in it.
    may_have_qemu: bool,
    /// The prepared QEMU, if its memory is registered. At most one of this and `early_load` is present.
    primed_qemu: Option<PrimedQemu>,
    /// The prepared QEMU together with the data of the newest checkpoint that a load needs. Locks the VM.
    early_load: Option<EarlyLoad<'a>>,
}

impl<'a> IncomingVm<'a> {
    /// Checks whether the VM can run on this host. Creates nothing.
    fn new(host: &'a Host, hello: Hello) -> Result<Self, Rejection> {
        let Hello { name, recipe, store, store_created_us, credentials, definition, qemu, hold_output, domain, .. } =
            hello;
        // The source host names these. Both are this host's own only if its configuration or its owner has chosen them.
        definition.as_deref().map_or(Ok(()), require_own_file)?;
        domain.as_ref().and_then(|domain| domain.connect.as_deref()).map_or(Ok(()), require_local)?;
        qemu.as_deref().map_or(Ok(()), |path| host.restore_rules.check_program(path))?;
        let definition = definition.as_deref().map(Definition::load).transpose().map_err(|e| with_causes(&e))?;
        if let Some(other) = definition.as_ref().map(|definition| &definition.name).filter(|other| **other != name) {
            return Err(format!("the definition on the other host is of the VM {other}, not of {name}"));
        }
        if credentials.as_ref().is_some_and(CredentialPaths::has_key_command) {
            // The other host must not be able to run commands here.
            return Err("a move cannot use a key command (--key-command): use a key file (--key-file)".into());
        }
        let credentials = credentials.as_ref().map(CredentialPaths::credentials);
        if let Some(created_us) = store_created_us {
            let listing = admin::listing(&store, credentials.as_ref()).map_err(|e| with_causes(&e))?;
            if listing.created_us != created_us {
                return Err(format!(
                    "{store} is a different store there; both hosts must reach the same store by that URL"
                ));
            }
        }
        let request = Request {
            store,
            credentials,
            at: None,
            at_least: KnownState::default(),
            known_store: KnownStoreFile::of(host, name.as_str()),
            is_store_of_source: true,
            eager: false,
            // A domain is defined by its XML.
            definition: definition.filter(|_| domain.is_none()),
            local_definition: None,
            local_domain: None,
            qemu: qemu.filter(|_| domain.is_none()),
            hold_output,
            move_claim: None,
        };
        let permission = Permission::of(host, &name, request.choice());
        if let Some(MovingDomain { connect, images }) = &domain {
            check_domain(host, &name, &permission, recipe, images, connect.clone()).map_err(|e| with_causes(&e))?;
            return Ok(Self { host, name, request, domain, may_have_qemu: false, primed_qemu: None, early_load: None });
        }
        let recipe = permission.allow(recipe, &[]).map_err(|e| with_causes(&e))?;
        let idle_slot = IdleSlot::lock(host, name.as_str(), "move").map_err(|e| with_causes(&e))?;
        // The last checkpoint needs all of the disks.
        let plan =
            idle_slot.plan(recipe.definition().clone(), recipe.qemu(), &Epochs::new(), |hardware| recipe.fit(hardware));
        let checked = plan.and_then(|plan| plan.check_room());
        idle_slot.release();
        checked.map_err(|e| with_causes(&e))?;
        Ok(Self { host, name, request, domain, may_have_qemu: false, primed_qemu: None, early_load: None })
    }

    /// Prepares a destination QEMU. This also checks whether this host has everything that the QEMU needs. libvirt starts
    /// the QEMU of a domain later.
    fn prepare(&mut self) -> Result<Answer, Rejection> {
        if self.domain.is_some() {
            let permission = Permission::of(self.host, &self.name, self.request.choice());
            let chosen = ChosenCheckpoint::open_unchecked(&permission, &self.request).map_err(|e| with_causes(&e))?;
            check_disks(&self.name, &chosen).map_err(|e| with_causes(&e))?;
            return Ok(Answer::Prepared { checkpoint: chosen.image.info().number, pid: None });
        }
        // From here on there may be a QEMU to remove.
        self.may_have_qemu = true;
        let PreparedQemu { checkpoint, pid, .. } =
            prepare(self.host, &self.name, &self.request).map_err(|e| with_causes(&e))?;
        let permission = Permission::of(self.host, &self.name, self.request.choice());
        let chosen = ChosenCheckpoint::open(&permission, &self.request).map_err(|e| with_causes(&e))?;
        let state = State::read(&RunDir::new(&self.host.root, self.name.as_str())).map_err(|e| with_causes(&e))?;
        let differing_disks =
            state.map(|state| disks::identity_problems(&state.hardware, &chosen.epochs)).unwrap_or_default();
        if !differing_disks.is_empty() {
            return Err(differing_disks.join("; "));
        }
        // If this fails, the restore registers the memory, or starts another QEMU.
        self.primed_qemu =
            PrimedQemu::take(self.host, &self.name).inspect_err(|e| tracing::debug!("{}", with_causes(e))).ok();
        Ok(Answer::Prepared { checkpoint, pid: Some(pid) })
    }

    /// Reads the data of the newest checkpoint that a load needs.
    fn read_newest(&mut self) -> Answer {
        if self.domain.is_some() {
            return Answer::NewestRead { checkpoint: None, pages: Vec::new() };
        }
        match EarlyLoad::new(self.host, &self.name, &self.request, &mut self.primed_qemu) {
            Ok(early_load) => {
                let (checkpoint, pages) = (Some(early_load.number()), early_load.pages());
                self.early_load = Some(early_load);
                Answer::NewestRead { checkpoint, pages }
            }
            Err(e) => {
                tracing::debug!("{} is loaded after its last checkpoint is committed: {}", self.name, with_causes(&e));
                Answer::NewestRead { checkpoint: None, pages: Vec::new() }
            }
        }
    }

    /// Loads the guest while its last checkpoint is being committed, and resumes it when `wait_for_go` returns a
    /// message. `None`: no message arrived.
    fn load(&mut self, state: StoppedState, wait_for_go: &mut dyn FnMut() -> Option<Go>) -> Option<Answer> {
        let started = Instant::now();
        let Some(early_load) = self.early_load.take() else { return wait_for_go().map(|go| self.resume(&go)) };
        let Some(sent_state) = state.decode(early_load.devices()) else {
            // The restore from the store uses the same QEMU.
            self.early_load = Some(early_load);
            return wait_for_go().map(|go| self.resume(&go));
        };
        let ConcurrentLoad { commit_report, move_claim, restored } =
            load_until_go(early_load, sent_state, &self.request, wait_for_go, started);
        let commit_report = commit_report?;
        match restored {
            Err(e) if !move_claim.may_run.load(Ordering::SeqCst) => {
                let why = with_causes(&e);
                tracing::warn!("the load of {} before its commit failed; loading from the store: {why}", self.name);
                Some(self.restore(&commit_report, move_claim, Some(why)))
            }
            restored => Some(self.answer(&commit_report, &move_claim, restored, LoadTime::BeforeCommit, started)),
        }
    }

    /// Resumes the guest from the store.
    fn resume(&mut self, go: &Go) -> Answer {
        let move_claim = MoveClaim {
            owner_epoch: AtomicU64::new(go.epoch),
            checkpoint: AtomicU64::new(go.checkpoint),
            ..MoveClaim::default()
        };
        self.restore(go, Arc::new(move_claim), None)
    }

    /// Resumes the guest from the store. `early_load_failure`: why the load before the commit was not used.
    fn restore(&mut self, go: &Go, move_claim: Arc<MoveClaim>, early_load_failure: Option<String>) -> Answer {
        let started = Instant::now();
        if let Some(early_load) = self.early_load.take() {
            // Unlocks the VM, which the restore locks again.
            self.primed_qemu = Some(early_load.into_primed());
        }
        let request = Request { move_claim: Some(Arc::clone(&move_claim)), ..self.request.clone() };
        let mut restored = match &self.domain {
            Some(MovingDomain { connect, .. }) => restore_domain(self.host, &self.name, &request, connect.clone()),
            None => restore_in(self.host, &self.name, &request, self.primed_qemu.take()),
        };
        if let Ok(restored) = &mut restored {
            restored.unused_reason = early_load_failure.or(restored.unused_reason.take());
        }
        self.answer(go, &move_claim, restored, LoadTime::AfterCommit, started)
    }

    fn answer(
        &mut self,
        go: &Go,
        move_claim: &MoveClaim,
        restored: Result<Restored, RestoreError>,
        load_time: LoadTime,
        started: Instant,
    ) -> Answer {
        match restored {
            Ok(restored) => {
                self.may_have_qemu = false;
                let total_us = started.elapsed().as_micros() as u64;
                Answer::Running(Running {
                    answered_after_us: total_us.saturating_sub(restored.resumed_after_us),
                    report: DestinationReport {
                        pid: restored.pid,
                        resumed_after_us: restored.resumed_after_us,
                        prepared: restored.prepared,
                        loaded_before_commit: load_time == LoadTime::BeforeCommit,
                        unused_reason: restored.unused_reason,
                        clock: restored.clock,
                    },
                })
            }
            Err(e) => {
                let owner_epoch = move_claim.owner_epoch.load(Ordering::SeqCst);
                Answer::Failed {
                    why: with_causes(&e),
                    resumed: move_claim.may_run.load(Ordering::SeqCst),
                    claimed: (owner_epoch != go.epoch).then_some(owner_epoch),
                }
            }
        }
    }

    /// Reports the VM to `on_running` if its guest was resumed. A domain has no helpers of Rekindle's.
    fn notify_running(&self, answer: &Answer, on_running: &dyn Fn(&str)) {
        if self.domain.is_none() && matches!(answer, Answer::Running(_)) {
            on_running(self.name.as_str());
        }
    }
}

impl Drop for IncomingVm<'_> {
    fn drop(&mut self) {
        // Releases the VM's lock.
        (self.primed_qemu, self.early_load) = (None, None);
        let rundir = RunDir::new(&self.host.root, self.name.as_str());
        let has_waiting_qemu = || State::read(&rundir).ok().flatten().is_some_and(|state| state.prepared.is_some());
        if self.may_have_qemu
            && has_waiting_qemu()
            && let Err(e) = stop::stop_immediately(self.host, self.name.as_str())
        {
            tracing::warn!("cannot remove what was prepared for {}: {}", self.name, with_causes(&e));
        }
    }
}

/// Checks that only this user can have written a definition. One that is missing is reported when it is read.
fn require_own_file(path: &Path) -> Result<(), Rejection> {
    let Ok(file) = fs::metadata(path) else { return Ok(()) };
    let user = rustix::process::geteuid().as_raw();
    let is_own = file.uid() == user && file.mode() & 0o022 == 0;
    let shown = path.display();
    let fix =
        || format!("{shown}: others could have written this definition: chown {user} {shown} && chmod go-w {shown}");
    if is_own { Ok(()) } else { Err(fix()) }
}

/// Checks that a URI names a libvirt of this host. Others can name a program that libvirt's client starts.
fn require_local(uri: &str) -> Result<(), Rejection> {
    let is_local = ["qemu:///system", "qemu:///session"].contains(&uri);
    if is_local { Ok(()) } else { Err(format!("{uri}: only qemu:///system and qemu:///session are allowed")) }
}

/// Restores a domain into libvirt.
fn restore_domain(
    host: &Host,
    name: &Name,
    request: &Request,
    connect: Option<String>,
) -> Result<Restored, RestoreError> {
    let restored = restore_into_libvirt(host, name, request, connect, &mut |_, _| ())?;
    Ok(Restored {
        name: restored.name,
        checkpoint: restored.checkpoint,
        taken_us: restored.taken_us,
        resumed_after_us: restored.resumed_after_us,
        pid: restored.pid,
        filled: restored.filled,
        prepared: false,
        unused_reason: None,
        clock: ClockOutcome::NotSet,
    })
}

/// When the guest was loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LoadTime {
    /// While its last checkpoint was being committed.
    BeforeCommit,
    AfterCommit,
}

/// An early load that has ended.
struct ConcurrentLoad {
    /// The message that reported the commit meanwhile, if it arrived.
    commit_report: Option<Go>,
    move_claim: Arc<MoveClaim>,
    restored: Result<Restored, RestoreError>,
}

/// Loads the guest in the background while `wait_for_go` waits. The load resumes the guest if a message arrives, and
/// fails if none does.
fn load_until_go(
    early_load: EarlyLoad<'_>,
    sent_state: SentState,
    request: &Request,
    wait_for_go: &mut dyn FnMut() -> Option<Go>,
    started: Instant,
) -> ConcurrentLoad {
    let move_claim = Arc::new(MoveClaim::default());
    let request = Request { move_claim: Some(Arc::clone(&move_claim)), ..request.clone() };
    thread::scope(|scope| {
        let (commit_sender, commit_receiver) = mpsc::sync_channel(1);
        let request = &request;
        let load = scope.spawn(move || early_load.load(sent_state, commit_receiver, request, started));
        let commit_report = wait_for_go();
        if let Some(go) = &commit_report {
            move_claim.owner_epoch.store(go.epoch, Ordering::SeqCst);
            move_claim.checkpoint.store(go.checkpoint, Ordering::SeqCst);
            // Fails only if the load has ended with an error, which the caller handles.
            let _ = commit_sender.send(());
        }
        // A closed channel without a message: there is no commit.
        drop(commit_sender);
        let restored = load.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        ConcurrentLoad { commit_report, move_claim: Arc::clone(&move_claim), restored }
    })
}

/// Returns the status of a VM on this host.
fn vm_status(host: &Host, name: &Name) -> Answer {
    let rundir = RunDir::new(&host.root, name.as_str());
    let deadline = Instant::now() + BUSY_TIMEOUT;
    loop {
        if !rundir.exists() {
            return Answer::Found { runs: false, status: "absent".into() };
        }
        match status::status(&rundir) {
            Ok(Status::Busy(_)) if Instant::now() < deadline => thread::sleep(BUSY_POLL_INTERVAL),
            Ok(status) => {
                let runs = matches!(status, Status::Running | Status::Degraded(_) | Status::Protected);
                return Answer::Found { runs, status: status.to_string() };
            }
            Err(e) => return Answer::Refused { why: with_causes(&e) },
        }
    }
}
