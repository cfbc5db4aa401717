//! The destination QEMU, step by step. Its stage is part of its type, which determines the permitted next steps:
//!
//! ```text
//!  Spawned ──prepare──> Prepared ──finish_feed──> Loading ──wait──> Loaded ──commit──> Running ──settle──> Settled
//!     └────── load_file, load_stream, without_state, runs_already, … ──────^
//! ```
//!
//! The types of the stages are [`SpawnedStage`], [`PreparedStage`], [`LoadedStage`] and [`RunningStage`].

use crate::operation::{PipelinePoint, end_generation};
use crate::ram::{NewRam, Ram, RamSource, SavedRam, SharedRam, UnknownRam};
use crate::saved_state::{DISK_TIMEOUT, remove_stream};
use crate::takeover::Taps;
use crate::{Environment, Handover, HandoverError};
use rekindle_kernel::heap;
use rekindle_kernel::inject::Injector;
use rekindle_qemu::command::Start;
use rekindle_qemu::guest;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::transfer::{Feed, begin_load_from_file, wait_loaded};
use rekindle_qemu::vmm::{Vmm, log_tail};
use rekindle_vm::journal::{End, JOURNAL_FILE, Step};
use rekindle_vm::network;
use rekindle_vm::qemu_user;
use rekindle_vm::state::State;
use rekindle_vm::timeline::{Phase, Recorder, host_us};
use std::fs::{self, File};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

/// How long the destination may take from a staged `cont` to the guest's resume: it may still be loading.
pub const STAGED_RESUME_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval between queries whether a destination has finished loading.
const LOAD_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A destination QEMU at a stage of the hand-over. Dropping this does not end the QEMU: [`Handover::abandon`] does.
#[derive(Debug)]
pub struct Destination<Stage> {
    pub vmm: Vmm,
    pub qmp: Qmp,
    start: Start,
    pub stage: Stage,
}

/// Stage: QEMU answers, and has no guest yet.
#[derive(Debug)]
pub struct SpawnedStage;

/// Stage: QEMU has its RAM, and reads device state from a pipe.
#[derive(Debug)]
pub struct PreparedStage<R> {
    pub ram: R,
    pub feed: Feed,
}

/// Stage: QEMU has the guest's state. It has not run the guest, except after [`Destination::runs_already`] or
/// [`Destination::wait_for_interrupted_load`].
#[derive(Debug)]
pub struct LoadedStage<R> {
    pub ram: R,
    resume: ResumeCommand,
}

/// Stage: QEMU runs the guest; the source, if there is one, is stopped.
#[derive(Debug)]
pub struct RunningStage<R> {
    pub ram: R,
    /// Time of the guest's resume, in µs since 1970.
    pub resumed_host_us: u64,
}

/// The result of a hand-over: the destination is the VM's QEMU, and the operation has ended.
#[derive(Debug)]
pub struct Settled<R> {
    pub vmm: Vmm,
    pub qmp: Qmp,
    pub ram: R,
    /// Time of the guest's resume, in µs since 1970.
    pub resumed_host_us: u64,
    /// The VM's state as recorded at the end of the operation.
    pub state: State,
    pub recorder: Recorder,
}

/// How the guest is resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ResumeCommand {
    /// By a command after the load, which has ended.
    AfterLoad,
    /// By a staged command, at the end of the load, which may still be in progress.
    Staged,
    /// The guest runs already.
    NotNeeded,
}

impl Destination<SpawnedStage> {
    /// Starts a destination and records it in the journal.
    ///
    /// # Errors
    /// [`HandoverError`]. No destination remains.
    pub fn spawn(
        handover: &mut Handover,
        environment: &impl Environment,
        start: Start,
        taps: Taps,
    ) -> Result<Self, HandoverError> {
        let vmm = environment.spawn(handover.journal.operation.generation, start, taps)?;
        handover.journal.operation.to = Some(vmm.clone());
        handover.pass_pipeline(PipelinePoint::Spawned, start);
        let connected = handover.write_journal().and_then(|()| {
            handover.pass_pipeline(PipelinePoint::Recorded, start);
            let qmp = handover.connect(&vmm)?;
            qemu_user::seal(handover.name(), &vmm.directory())?;
            Ok(qmp)
        });
        match connected {
            Ok(qmp) => Ok(Self { vmm, qmp, start, stage: SpawnedStage }),
            Err(e) => {
                let _ = vmm.kill();
                if let Some(user) = qemu_user::starting_user(&vmm.directory()) {
                    tracing::warn!(
                        "QEMU ran as user {user}, with the files of its VM only. If it needs more: The user of a VM in \
                         docs/run-directory.md"
                    );
                }
                Err(e)
            }
        }
    }

    /// Adopts a QEMU that an earlier operation has started. Its command line shows whether it waits for device state.
    ///
    /// # Errors
    /// [`HandoverError::File`]: the command line cannot be read.
    pub fn adopt(vmm: Vmm, qmp: Qmp) -> Result<Self, HandoverError> {
        let path = PathBuf::from(format!("/proc/{}/cmdline", vmm.pid));
        let arguments = fs::read(&path).map_err(|source| HandoverError::File { path, source })?;
        let is_incoming = arguments.split(|byte| *byte == 0).any(|argument| argument == b"-incoming");
        let start = if is_incoming { Start::Incoming } else { Start::Paused };
        Ok(Self { vmm, qmp, start, stage: SpawnedStage })
    }

    /// Connects the destination to the guest's RAM.
    ///
    /// # Errors
    /// The errors of [`RamSource::connect`].
    pub fn prepare<R: RamSource>(mut self, mut ram: R) -> Result<Destination<PreparedStage<R>>, R::Error> {
        let feed = ram.connect(&self.vmm, &mut self.qmp)?;
        Ok(self.into_stage(PreparedStage { ram, feed }))
    }

    /// Loads RAM and device state from a file.
    ///
    /// # Errors
    /// [`HandoverError::DestinationFailed`]: the destination cannot load the file; it has ended.
    pub fn load_file<'a>(
        mut self,
        handover: &Handover,
        file: &File,
        ram: SavedRam<'a>,
    ) -> Result<Destination<LoadedStage<SavedRam<'a>>>, HandoverError> {
        let started = begin_load_from_file(&mut self.qmp, file).map_err(HandoverError::from);
        let loaded = started.and_then(|()| self.wait_loaded(handover, DISK_TIMEOUT));
        loaded.map_err(|e| end_failed_load(handover, e))?;
        Ok(self.into_stage(LoadedStage { ram, resume: ResumeCommand::AfterLoad }))
    }

    /// Treats the destination as loaded: it was started with [`Start::Boot`], so that its guest runs already.
    ///
    /// # Errors
    /// [`HandoverError::Qmp`]: the destination does not answer.
    pub fn runs_already(mut self) -> Result<Destination<LoadedStage<NewRam>>, HandoverError> {
        guest::run_state(&mut self.qmp)?;
        Ok(self.into_stage(LoadedStage { ram: NewRam, resume: ResumeCommand::NotNeeded }))
    }

    /// Treats the destination as loaded: a guest that boots has no state to load.
    #[must_use]
    pub fn without_state(self) -> Destination<LoadedStage<NewRam>> {
        self.into_stage(LoadedStage { ram: NewRam, resume: ResumeCommand::AfterLoad })
    }

    /// Waits until a destination has loaded that was found in an interrupted operation, whose journal has the decision
    /// for it. The process that sent `cont` may have died during the load: then QEMU resumes the guest at the end of
    /// the load, or the guest stays paused.
    ///
    /// # Errors
    /// [`HandoverError::Qmp`]: the destination does not answer.
    pub fn wait_for_interrupted_load(mut self) -> Result<Destination<LoadedStage<UnknownRam>>, HandoverError> {
        let deadline = Instant::now() + DISK_TIMEOUT;
        let mut run_state = guest::run_state(&mut self.qmp)?;
        while run_state == "inmigrate" && Instant::now() < deadline {
            thread::sleep(LOAD_POLL_INTERVAL);
            run_state = guest::run_state(&mut self.qmp)?;
        }
        let resume = if run_state == "running" { ResumeCommand::NotNeeded } else { ResumeCommand::AfterLoad };
        Ok(self.into_stage(LoadedStage { ram: UnknownRam, resume }))
    }

    /// Loads a stream of device state into a destination that maps the RAM file.
    ///
    /// # Errors
    /// [`HandoverError::DestinationFailed`]: the destination has ended.
    pub fn load_stream(
        self,
        handover: &Handover,
        stream: &[u8],
        ram: SharedRam,
    ) -> Result<Destination<LoadedStage<SharedRam>>, HandoverError> {
        self.prepare(ram)
            .and_then(|prepared| prepared.feed(handover, stream, DISK_TIMEOUT))
            .map_err(|e| end_failed_load(handover, e))
    }
}

impl<R> Destination<PreparedStage<R>> {
    /// Populates the heap, so that the load has no page faults: QEMU has returned the freed pages of its heap to the
    /// kernel. `injector`: of this destination. Without effect if the kernel cannot do it.
    pub fn populate_heap(&self, injector: Injector) {
        if let Err(e) = heap::populate(injector) {
            tracing::debug!("cannot populate the destination QEMU's heap in advance: {e}");
        }
    }

    /// Sends the command that resumes the guest, except its end. [`Destination::commit`] sends the end.
    ///
    /// # Errors
    /// [`HandoverError::Qmp`]: the destination has ended.
    pub fn stage_resume(&mut self) -> Result<(), HandoverError> {
        self.qmp.drop_events();
        Ok(guest::stage_resume(&mut self.qmp)?)
    }

    /// Writes the whole device state and waits until it is loaded.
    ///
    /// # Errors
    /// [`HandoverError::Transfer`]: the destination has ended, or cannot load the state within `timeout`.
    pub fn feed(
        mut self,
        handover: &Handover,
        stream: &[u8],
        timeout: Duration,
    ) -> Result<Destination<LoadedStage<R>>, HandoverError> {
        self.stage.feed.write(stream)?;
        self.finish_feed().wait(handover, timeout)
    }

    /// Closes the feed. The caller has written the whole device state to it.
    pub fn finish_feed(self) -> Loading<R> {
        let Self { vmm, qmp, start, stage: PreparedStage { ram, feed } } = self;
        drop(feed);
        let stage = LoadedStage { ram, resume: ResumeCommand::AfterLoad };
        Loading { destination: Destination { vmm, qmp, start, stage } }
    }
}

/// A destination that loads the device state.
#[derive(Debug)]
#[must_use]
pub struct Loading<R> {
    /// The destination as it will be when the load has succeeded.
    destination: Destination<LoadedStage<R>>,
}

impl<R> Loading<R> {
    /// Waits until the device state is loaded.
    ///
    /// # Errors
    /// [`HandoverError::Transfer`]: the destination has ended, or cannot load the state within `timeout`.
    pub fn wait(
        mut self,
        handover: &Handover,
        timeout: Duration,
    ) -> Result<Destination<LoadedStage<R>>, HandoverError> {
        self.destination.wait_loaded(handover, timeout)?;
        Ok(self.destination)
    }

    /// Returns without waiting. The command that [`Destination::stage_resume`] has staged resumes the guest at the end
    /// of a successful load. A load that fails ends the destination before it has run the guest.
    pub fn resume_when_loaded(mut self) -> Destination<LoadedStage<R>> {
        self.destination.stage.resume = ResumeCommand::Staged;
        self.destination
    }
}

impl<R: Ram> Destination<LoadedStage<R>> {
    /// Journals the decision for the destination, and resumes the guest in it unless the user had paused the guest.
    ///
    /// # Errors
    /// [`HandoverError`]. Before the journal is at [`Step::Resume`], the guest has not run in the destination. After
    /// that it may have: see [`Handover::has_not_run`].
    pub fn commit(
        mut self,
        handover: &mut Handover,
        step: &str,
    ) -> Result<Destination<RunningStage<R>>, HandoverError> {
        handover.recorder.phase(Phase::Resume);
        self.stage.ram.note_evidence(&mut handover.journal.operation);
        if handover.journal.operation.step < Step::Resume {
            handover.advance(Step::Resume)?;
        }
        if self.stage.resume == ResumeCommand::Staged {
            handover.recorder.step("decide");
        }
        handover.pass_pipeline(PipelinePoint::Decided, self.start);
        let resumed_host_us = match self.stage.resume {
            ResumeCommand::Staged => guest::resume_staged(&mut self.qmp, STAGED_RESUME_TIMEOUT)?,
            ResumeCommand::AfterLoad if handover.journal.operation.running => guest::resume(&mut self.qmp)?,
            ResumeCommand::AfterLoad | ResumeCommand::NotNeeded => host_us(),
        };
        handover.recorder.step(step);
        let Self { vmm, qmp, start, stage: LoadedStage { ram, .. } } = self;
        let stage = RunningStage { ram, resumed_host_us };
        Ok(Destination { vmm, qmp, start, stage })
    }
}

impl<R> Destination<RunningStage<R>> {
    /// Journals that the guest runs. From then on the guest's old state is obsolete, whatever the evidence shows.
    ///
    /// # Errors
    /// [`HandoverError::DiedRunning`]: the destination has died. [`HandoverError::File`]: the journal cannot be
    /// written.
    pub fn confirm(&self, handover: &mut Handover) -> Result<(), HandoverError> {
        handover.recorder.phase(Phase::Settle);
        journal_running(handover, Step::Settle)?;
        handover.pass_pipeline(PipelinePoint::Settling, self.start);
        self.check_alive(handover)
    }

    /// Journals that the guest runs, like [`Destination::confirm`], and that its manager gets it back next. The source
    /// is kept, stopped, until [`Destination::settle`].
    ///
    /// # Errors
    /// As for [`Destination::confirm`].
    pub fn begin_give_back(&self, handover: &mut Handover) -> Result<(), HandoverError> {
        journal_running(handover, Step::GiveBack)?;
        self.check_alive(handover)
    }

    fn check_alive(&self, handover: &Handover) -> Result<(), HandoverError> {
        if self.vmm.is_alive() {
            return Ok(());
        }
        let log = log_tail(&self.vmm.directory(), 10);
        Err(HandoverError::DiedRunning { name: handover.name().into(), log })
    }

    /// Ends the source, records the destination as the VM's QEMU, and ends the operation.
    ///
    /// # Errors
    /// [`HandoverError::DiedRunning`]: the destination has died. Others: the operation needs recovery.
    pub fn settle(mut self, mut handover: Handover, step: &str) -> Result<Settled<R>, HandoverError> {
        handover.pass_pipeline(PipelinePoint::Resumed, self.start);
        self.confirm(&mut handover)?;
        // The recorded path of the binary is the user's, not the one that the kernel has resolved.
        let recorded = handover.destination().filter(|recorded| recorded.process() == self.vmm.process());
        let destination = recorded.unwrap_or(&self.vmm).clone();
        end_source(&handover, &destination, self.start)?;
        let state = self.write_state(&mut handover, destination)?;
        // The saved state is obsolete since the guest runs. It must not outlive the journal that names it.
        if let Some(saved) = &handover.journal.operation.saved {
            let _ = fs::remove_file(&saved.path);
        }
        remove_stream(&handover.rundir);
        // Must precede the journal's end, so that a recovery repeats it. The source has ended, so the ports are free.
        if self.start == Start::Incoming {
            network::forward_ports(&mut self.qmp, &state.hardware);
        }
        let failed = handover.file_error(JOURNAL_FILE);
        let Handover { journal, mut recorder, .. } = handover;
        let operation = journal.operation.clone();
        journal.close(End::Done).map_err(failed)?;
        recorder.step(step);
        PipelinePoint::Closed.pass(&operation, self.start);
        let Self { vmm, qmp, stage: RunningStage { ram, resumed_host_us }, .. } = self;
        Ok(Settled { vmm, qmp, ram, resumed_host_us, state, recorder })
    }

    /// Writes the state file with the destination as the VM's QEMU.
    fn write_state(&self, handover: &mut Handover, destination: Vmm) -> Result<State, HandoverError> {
        let mut state = handover.state.clone();
        let generation = handover.journal.operation.generation;
        let previous_binary = state.vmm.as_ref().map(|vmm| vmm.binary.clone());
        if state.generation != generation
            && let Some(previous_binary) = previous_binary.filter(|binary| *binary != destination.binary)
        {
            state.previous = Some(previous_binary);
        }
        state.generation = generation;
        state.vmm = Some(destination);
        state.version = Some(self.qmp.version().clone());
        state.prepared = None;
        let path = handover.rundir.file("state.json");
        let name = handover.name().to_owned();
        state.write(&handover.rundir).map_err(|source| HandoverError::NotRecorded { name, path, source })?;
        handover.pass_pipeline(PipelinePoint::StateWritten, self.start);
        Ok(state)
    }
}

/// Journals that the guest runs in the destination, before `step`.
fn journal_running(handover: &mut Handover, step: Step) -> Result<(), HandoverError> {
    handover.journal.operation.untouched_since_ns = None;
    handover.journal.operation.disks_at_resume = None;
    handover.advance(step)
}

/// Ends the source and every other QEMU of its generation.
fn end_source(handover: &Handover, destination: &Vmm, start: Start) -> Result<(), HandoverError> {
    if let Some(source) = handover.live_source().filter(|source| source.process() != destination.process()) {
        source.kill().map_err(handover.file_error("qemu"))?;
    }
    // If an earlier attempt recorded the destination and was interrupted before it closed the journal, the state's
    // generation is the destination's: do not end it.
    let source_generation = handover.state.generation;
    let is_destination_recorded = source_generation == handover.journal.operation.generation;
    if !is_destination_recorded {
        end_generation(&handover.rundir, source_generation)?;
    }
    handover.pass_pipeline(PipelinePoint::SourceEnded, start);
    if !is_destination_recorded {
        let _ = fs::remove_dir_all(handover.rundir.vmm(source_generation).0);
    }
    Ok(())
}

impl<Stage> Destination<Stage> {
    fn into_stage<Next>(self, stage: Next) -> Destination<Next> {
        Destination { vmm: self.vmm, qmp: self.qmp, start: self.start, stage }
    }

    fn wait_loaded(&mut self, handover: &Handover, timeout: Duration) -> Result<(), HandoverError> {
        wait_loaded(&mut self.qmp, timeout)?;
        handover.pass_pipeline(PipelinePoint::Loaded, self.start);
        Ok(())
    }
}

/// Ends a destination that could not load a saved state. Returns the error with the end of its log.
#[must_use]
pub fn end_failed_load(handover: &Handover, error: HandoverError) -> HandoverError {
    let Some(destination) = handover.destination() else { return error };
    let _ = destination.kill();
    let log = log_tail(&destination.directory(), 10);
    let doing = "load the saved state";
    HandoverError::DestinationFailed { name: handover.name().into(), doing, log, source: Box::new(error) }
}

/// Returns the time in µs until the guest resumed, for a measurement that has taken `elapsed` by now.
#[must_use]
pub fn time_to_resume(elapsed: Duration, resumed_host_us: u64) -> u64 {
    (elapsed.as_micros() as u64).saturating_sub(host_us().saturating_sub(resumed_host_us))
}
