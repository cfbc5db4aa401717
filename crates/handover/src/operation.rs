//! A hand-over in progress: its journal, its fault points, and the return to the source after a failure.

use crate::saved_state::remove_stream;
use crate::{HandoverError, evidence};
use rekindle_kernel::{descriptor, tap};
use rekindle_qemu::command::Start;
use rekindle_qemu::guest;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::vmm::{self, Vmm};
use rekindle_vm::disks;
use rekindle_vm::fault;
use rekindle_vm::helpers::{self, Helper};
use rekindle_vm::journal::{End, JOURNAL_FILE, Journal, Kind, Operation, Step};
use rekindle_vm::qemu::processes_of;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::timeline::Recorder;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::fd::{AsFd, RawFd};
use std::time::Duration;

/// How long the threads of a QEMU may take to stop.
const FREEZE_TIMEOUT: Duration = Duration::from_millis(100);
/// How long a QEMU may be silent until its disk servers are checked.
const SILENCE_BEFORE_CHECK: Duration = Duration::from_secs(5);
/// How long a killed QEMU may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// State of the guest after a failed operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestStatus {
    /// The guest runs as before.
    #[serde(rename = "as-it-was")]
    Unchanged,
    /// `rekindle recover` must finish or undo the operation.
    NeedsRecovery,
}

/// A hand-over in progress. The caller holds the VM's lock.
#[derive(Debug)]
pub struct Handover {
    pub rundir: RunDir,
    /// The VM's state as recorded before the destination runs the guest.
    pub state: State,
    /// Records the source, the destination and the step.
    pub journal: Journal,
    pub recorder: Recorder,
}

impl Handover {
    #[must_use]
    pub fn name(&self) -> &str {
        self.rundir.name()
    }

    /// Returns the QEMU that ran the guest before, if there was one. That QEMU may have ended.
    #[must_use]
    pub fn source(&self) -> Option<&Vmm> {
        self.journal.operation.from.as_ref()
    }

    /// Returns the destination, once it has been started.
    #[must_use]
    pub fn destination(&self) -> Option<&Vmm> {
        self.journal.operation.to.as_ref()
    }

    /// Returns the source if it has not ended.
    #[must_use]
    pub fn live_source(&self) -> Option<&Vmm> {
        self.source().filter(|source| source.is_alive())
    }

    /// Journals that `step` is about to be taken.
    ///
    /// # Errors
    /// [`HandoverError::File`]: the journal cannot be written; then the step must not be taken.
    pub fn advance(&mut self, step: Step) -> Result<(), HandoverError> {
        self.journal.advance(step).map_err(self.file_error(JOURNAL_FILE))
    }

    /// Writes the journal without a new step.
    ///
    /// # Errors
    /// [`HandoverError::File`]: the journal cannot be written.
    pub fn write_journal(&self) -> Result<(), HandoverError> {
        self.journal.write().map_err(self.file_error(JOURNAL_FILE))
    }

    /// Passes the fault point `name`, at which a test can make a process fail.
    pub fn pass(&self, name: &'static str) {
        fault::point(name, self.source(), self.destination());
    }

    /// Passes the fault point of a pipeline step, if this kind of operation has one for a destination that was started
    /// with `start`.
    pub(crate) fn pass_pipeline(&self, point: PipelinePoint, start: Start) {
        point.pass(&self.journal.operation, start);
    }

    /// Connects to a QEMU of this hand-over, as [`Vmm::connect`] does. A QEMU whose disk server is stopped or has ended does
    /// not answer: the error names the server, and comes earlier.
    ///
    /// # Errors
    /// [`HandoverError::WaitsForServer`]; [`HandoverError::Vmm`], as for [`Vmm::connect`].
    pub(crate) fn connect(&self, qemu: &Vmm) -> Result<Qmp, HandoverError> {
        match qemu.connect(SILENCE_BEFORE_CHECK) {
            Err(e) if e.is_silence() => {}
            connected => return Ok(connected?),
        }
        if let Some(problem) = self.describe_server_problem() {
            return Err(HandoverError::WaitsForServer { name: self.name().into(), pid: qemu.pid, problem });
        }
        Ok(qemu.connect(vmm::START_TIMEOUT)?)
    }

    /// Describes a disk server for which a QEMU of this hand-over waits.
    fn describe_server_problem(&self) -> Option<String> {
        let servers: Vec<_> = disks::served(&self.state.hardware).map(|disk| Helper::Disk(disk.id.clone())).collect();
        if let Some(missing) = servers.iter().find(|server| server.process(&self.rundir).is_none()) {
            return Some(format!("{missing} has ended"));
        }
        let stopped = helpers::stopped_among(&self.rundir, servers).unwrap_or_default();
        stopped.first().map(ToString::to_string)
    }

    /// Returns a function that adds the path of a file of the run directory to an error.
    pub fn file_error(&self, file: &str) -> impl Fn(io::Error) -> HandoverError + use<> {
        let path = self.rundir.file(file);
        move |source| HandoverError::File { path: path.clone(), source }
    }

    /// Ends the destination, even if the journal does not record it yet.
    ///
    /// # Errors
    /// [`HandoverError::File`]: the destination cannot be ended.
    pub fn end_destination(&self) -> Result<(), HandoverError> {
        end_generation(&self.rundir, self.journal.operation.generation)
    }

    /// Ends the destination and removes its files, so that the operation is as before the destination's start.
    ///
    /// # Errors
    /// [`HandoverError::File`]: the destination cannot be ended.
    pub fn discard_destination(&self) -> Result<(), HandoverError> {
        self.end_destination()?;
        let _ = fs::remove_dir_all(self.rundir.vmm(self.journal.operation.generation).0);
        remove_stream(&self.rundir);
        Ok(())
    }

    /// Returns whether the journal and the files prove that the guest has not run in the destination.
    #[must_use]
    pub fn has_not_run(&self) -> bool {
        let operation = &self.journal.operation;
        match operation.step {
            Step::Prepare | Step::Suspend | Step::Saved => true,
            Step::Resume if operation.saved.as_ref().is_some_and(|saved| !saved.without_ram) => {
                let times = evidence::disk_times(&self.state.hardware);
                operation.disks_at_resume.is_some() && times == operation.disks_at_resume
            }
            Step::Resume => evidence::is_untouched(&self.state.hardware.ram.path, operation.untouched_since_ns),
            Step::GiveBack | Step::Settle => false,
        }
    }

    /// Returns to the source: ends the destination, then resumes the guest in the source if this operation has stopped
    /// it. Before [`Step::Suspend`] this operation has not stopped the guest; if the guest is stopped, that is another
    /// process's decision.
    ///
    /// *Needs:* the guest has not run in the destination; the source lives.
    ///
    /// # Errors
    /// [`HandoverError`]: the operation needs recovery.
    pub fn return_to_source(mut self) -> Result<(), HandoverError> {
        self.end_destination()?;
        if self.journal.operation.step == Step::Resume {
            // The source may run the guest, and thus write to its RAM, before it answers: the evidence that
            // `has_not_run` reads is gone then.
            self.advance(Step::Suspend)?;
        }
        if self.journal.operation.step >= Step::Suspend
            && let Some(source) = self.source()
        {
            if !self.journal.operation.detached_queues.is_empty() {
                self.attach_queues(source)?;
                source.process().resume().map_err(self.file_error("qemu"))?;
            }
            let mut qmp = self.connect(source)?;
            if self.journal.operation.running && guest::run_state(&mut qmp)? != "running" {
                guest::resume_after_save(&mut qmp)?;
            }
        }
        self.discard_destination()?;
        let failed = self.file_error(JOURNAL_FILE);
        self.journal.close(End::Undone).map_err(failed)
    }

    /// Attaches the queues of taps that the hand-over has detached ([`crate::takeover`]), for the source. Can be repeated.
    ///
    /// A queue that the guest itself has turned off between the record and its stop is attached, too: frames in it are
    /// lost until the guest changes the number of its queues.
    ///
    /// # Errors
    /// [`HandoverError::File`]: a queue cannot be attached.
    pub fn attach_queues(&self, source: &Vmm) -> Result<(), HandoverError> {
        let attach = |number: &RawFd| -> io::Result<()> {
            let queue = descriptor::take(source.process(), *number)?;
            if tap::queue(queue.as_fd())?.is_detached { tap::attach(queue.as_fd()) } else { Ok(()) }
        };
        let failed = |e| HandoverError::File { path: format!("/proc/{}/fd", source.pid).into(), source: e };
        self.journal.operation.detached_queues.iter().try_for_each(attach).map_err(failed)
    }

    /// Freezes the source (`SIGSTOP`) if queues of its taps were detached: the destination attaches them again when it
    /// loads, and the source would read frames from them.
    ///
    /// # Errors
    /// [`HandoverError::File`]: it cannot be sent a signal.
    pub fn freeze_reader_of_queues(&self) -> Result<(), HandoverError> {
        match self.live_source().filter(|_| !self.journal.operation.detached_queues.is_empty()) {
            Some(source) => {
                let frozen = source.process().stop_fully(FREEZE_TIMEOUT).map_err(self.file_error("qemu"))?;
                if !frozen {
                    tracing::debug!("{}: a thread of the old QEMU still runs; frames may be sent again", self.name());
                }
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Handles a failure before the decision for the destination. Returns to the source if it is alive. If it is not,
    /// the guest is lost or, if its state is saved, `rekindle recover` can resume it. Returns the state of the guest
    /// and the error to report.
    pub fn abandon<E: From<HandoverError>>(self, error: E) -> (GuestStatus, E) {
        if self.live_source().is_none() {
            // No QEMU runs the guest; `rekindle recover` decides whether it can run again.
            let _ = self.end_destination();
            let is_saved = self.journal.operation.saved.is_some();
            let error = if is_saved { error } else { HandoverError::Lost { name: self.name().into() }.into() };
            return (GuestStatus::NeedsRecovery, error);
        }
        let name = self.name().to_owned();
        match self.return_to_source() {
            Ok(()) => (GuestStatus::Unchanged, error),
            Err(e) => {
                tracing::error!("{name}: cannot resume the guest in its source QEMU: {e}");
                (GuestStatus::NeedsRecovery, error)
            }
        }
    }
}

/// Ends every QEMU of `generation`, even a QEMU that is not recorded.
///
/// # Errors
/// [`HandoverError::File`]: a QEMU cannot be ended.
pub fn end_generation(rundir: &RunDir, generation: u32) -> Result<(), HandoverError> {
    let failed = |source| HandoverError::File { path: rundir.path().to_owned(), source };
    for process in processes_of(&rundir.vmm(generation)).map_err(failed)? {
        process.kill().map_err(failed)?;
        process.wait_end(END_TIMEOUT).map_err(failed)?;
    }
    Ok(())
}

/// The moments of the pipeline at which a test can make a process fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PipelinePoint {
    /// The destination was started, and is not recorded in the journal yet.
    Spawned,
    /// The destination is recorded in the journal.
    Recorded,
    /// The device state is loaded.
    Loaded,
    /// The decision for the destination is journalled.
    Decided,
    /// The guest runs in the destination.
    Resumed,
    /// The end of the source is journalled.
    Settling,
    /// The source has ended.
    SourceEnded,
    /// The destination is recorded as the VM's QEMU; the journal is still open.
    StateWritten,
    /// The journal is closed.
    Closed,
}

impl PipelinePoint {
    /// Passes the fault point that `operation` has at this moment, if it has one.
    pub(crate) fn pass(self, operation: &Operation, start: Start) {
        if let Some(name) = self.fault_point(operation.kind, start) {
            fault::point(name, operation.from.as_ref(), operation.to.as_ref());
        }
    }

    /// Returns the name of the fault point. There is none where the technique itself passes a fault point at the same
    /// moment.
    fn fault_point(self, kind: Kind, start: Start) -> Option<&'static str> {
        match start {
            Start::Boot => None,
            // Every operation that starts a paused destination boots the guest in it.
            Start::Paused => Some(match self {
                Self::Spawned => "cold.renew.spawned",
                Self::Recorded => "cold.renew.recorded",
                Self::Decided => "cold.resume.journalled",
                Self::Resumed => "cold.resume.resumed",
                Self::Closed => "cold.settle.recorded",
                Self::Loaded | Self::Settling | Self::SourceEnded | Self::StateWritten => return None,
            }),
            Start::Incoming => self.fault_point_of_load(kind),
        }
    }

    /// Returns the name of the fault point for a destination that loads device state.
    fn fault_point_of_load(self, kind: Kind) -> Option<&'static str> {
        Some(match (kind, self) {
            (Kind::VmmWarm, Self::Spawned) => "warm.prepare.spawned",
            (Kind::VmmWarm, Self::Recorded) => "warm.prepare.recorded",
            (Kind::VmmWarm, Self::Decided) => "warm.resume.journalled",
            (Kind::VmmWarm, Self::Resumed) => "warm.resume.resumed",
            (Kind::VmmWarm, Self::Settling) => "warm.settle.journalled",
            (Kind::VmmWarm, Self::SourceEnded) => "warm.settle.old-gone",
            (Kind::VmmWarm, Self::StateWritten) => "warm.settle.recorded",
            (Kind::VmmSaved, Self::Spawned) => "saved.renew.spawned",
            (Kind::VmmSaved, Self::Recorded) => "saved.renew.recorded",
            (Kind::VmmSaved, Self::Loaded) => "saved.renew.loaded",
            (Kind::VmmSaved, Self::Decided) => "saved.resume.journalled",
            (Kind::VmmSaved, Self::Resumed) => "saved.resume.resumed",
            (Kind::VmmSaved, Self::Closed) => "saved.settle.recorded",
            (Kind::Prepare, Self::Spawned) => "prepare.spawned",
            (Kind::LibvirtReplace | Kind::BareReplace, Self::Decided) => "replace.resume.journalled",
            (Kind::Restore, Self::Spawned) => "restore.prepare.spawned",
            (Kind::Restore, Self::Recorded) => "restore.prepare.recorded",
            (Kind::OsPhase, Self::Spawned) => "phase.prepare.spawned",
            (Kind::Restore | Kind::OsPhase, Self::Loaded) => "restore.renew.loaded",
            (Kind::Restore | Kind::OsPhase, Self::Decided) => "restore.resume.journalled",
            (Kind::Restore | Kind::OsPhase, Self::Resumed) => "restore.resume.resumed",
            (Kind::Restore | Kind::OsPhase, Self::Closed) => "restore.settle.recorded",
            (Kind::HostWarm | Kind::HostSaved, Self::Loaded) => "host.resume.loaded",
            _ => return None,
        })
    }
}
