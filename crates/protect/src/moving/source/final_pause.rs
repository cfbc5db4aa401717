//! The final pause of a move: stops the guest, takes its last checkpoint, and makes the destination host resume it.
//!
//! ```text
//!  suspend: stop the guest, commit its last checkpoint, write move.json, release its disks
//!     ├── failure: resume the guest here
//!     v
//!  send Go, wait for the answer
//!     ├── the guest runs there, or may have run: remove it here
//!     └── any other answer, or none: the store decides (`moving::settle`)
//! ```

use super::MoveSettings;
use super::precopy::{PrecopiedGuest, checkpoint_failed};
use crate::event::CheckpointReport;
use crate::moving::MoveError;
use crate::moving::protocol::{Answer, Go, Message, Running};
use crate::moving::record::MoveRecord;
use crate::moving::remote::Connection;
use crate::moving::settle::{Settled, remote_status, remove_here, resume_here, settle, taken};
use crate::moving::stopped_state::StoppedState;
use crate::owned::OwnerRecord;
use crate::protector::CheckpointSeries;
use crate::session::TrackingSession;
use crate::target::Target;
use rekindle_pages::PageRun;
use rekindle_vm::causes::with_causes;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{End, JOURNAL_FILE, Journal, Step};
use rekindle_vm::lock::RunStateLock;
use rekindle_vm::locked_vm::LockedVm;
use rekindle_vm::timeline::host_us;
use rekindle_vm::{disks, fault};
use std::time::Duration;

/// How long the destination host may take to resume the guest. After that, the source host queries the store which host
/// has the guest.
const GO_ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the destination host may take to read [`Message::Go`]: a short line, for which the pipe has room. The guest
/// is stopped meanwhile.
const GO_READ_TIMEOUT: Duration = Duration::from_secs(10);

/// The final pause of a move, about to start.
pub(super) struct FinalPause<'a> {
    pub host: &'a Host,
    pub held: &'a LockedVm,
    pub settings: &'a MoveSettings,
    pub target: &'a Target,
    pub connection: Connection,
    pub journal: Journal,
    pub run_state: RunStateLock,
}

/// A guest that runs on the destination host.
pub(super) struct MovedGuest {
    pub last_checkpoint: CheckpointReport,
    /// The destination host's report, if it arrived.
    pub running: Option<Running>,
    /// When [`Message::Go`] was sent, in µs since 1970.
    pub message_sent_us: u64,
    /// When [`Message::Go`] was answered, in µs since 1970. The guest does not wait for the source host's clean-up,
    /// which follows.
    pub answered_us: u64,
}

/// A guest that is stopped, and whose last checkpoint is committed.
struct SuspendedGuest {
    last_checkpoint: CheckpointReport,
    record: MoveRecord,
}

impl FinalPause<'_> {
    /// Stops the guest, and makes the destination host resume it.
    pub fn run(mut self, precopied: PrecopiedGuest<'_>) -> Result<MovedGuest, MoveError> {
        let PrecopiedGuest { mut series, mut session, pages_read_remotely, .. } = precopied;
        let (held, vmm) = (self.held, self.target.vmm());
        let (rundir, name) = (&held.rundir, held.rundir.name());
        let suspended = self.suspend(&mut series, &mut session, pages_read_remotely.as_deref());
        let SuspendedGuest { last_checkpoint, record } = match suspended {
            Ok(suspended) => suspended,
            // Another host has the guest by now, and its processes on this host were ended.
            Err(e @ MoveError::Protect(_)) => {
                let path = rundir.file(JOURNAL_FILE);
                self.journal.close(End::Undone).map_err(|source| MoveError::File { path, source })?;
                return Err(e);
            }
            Err(e) => {
                // The destination host has not been notified.
                resume_here(rundir, &held.state, vmm, self.journal, true).map_err(|source| stuck(name, source))?;
                return Err(e);
            }
        };
        let message_sent_us = host_us();
        let message = Message::Go(Go { epoch: record.epoch, checkpoint: last_checkpoint.number });
        let sent = self.connection.send(&message, GO_READ_TIMEOUT);
        fault::point("move.resume.told", Some(vmm), None);
        let answer = sent.and_then(|()| self.connection.read_answer(GO_ANSWER_TIMEOUT));
        let answered_us = host_us();
        let not_resumed = match answer {
            Ok(Answer::Running(running)) => {
                fault::point("move.settle.running", Some(vmm), None);
                self.remove_from_here(&record)?;
                return Ok(MovedGuest { last_checkpoint, running: Some(running), message_sent_us, answered_us });
            }
            Ok(Answer::Failed { resumed: true, why, .. }) => {
                self.remove_from_here(&record)?;
                let (_, status) = remote_status(&record.remote, &held.state.definition.name);
                return Err(taken(&record, format!("{status} ({why})")));
            }
            // The destination host reports that it has not resumed the guest, and it will not. If it became the owner,
            // check whether it still is.
            Ok(Answer::Failed { why, claimed: Some(epoch), .. }) => {
                let path = rundir.file("move.json");
                let written = record.clone().with_owner_epoch(epoch).write(rundir);
                written.map_err(|source| stuck(name, MoveError::File { path, source }))?;
                why
            }
            Ok(Answer::Failed { why, .. } | Answer::Refused { why }) => why,
            Ok(answer) => format!("it answers {answer:?}"),
            Err(e) => with_causes(&e),
        };
        match settle(self.host, held, self.journal)? {
            Settled::ResumedHere => {
                let host = record.remote.host;
                Err(MoveError::ResumedHere { name: name.into(), host, why: not_resumed })
            }
            // Only now is it known that the guest runs on the destination host.
            Settled::RunsThere => {
                Ok(MovedGuest { last_checkpoint, running: None, message_sent_us, answered_us: host_us() })
            }
        }
    }

    /// Stops the guest, commits its last checkpoint and releases its disks. When this returns, all data that recovery
    /// needs is on disk. The destination host, which has the previous content of `pages_read_remotely`, loads the guest
    /// meanwhile.
    fn suspend(
        &mut self,
        series: &mut CheckpointSeries<'_>,
        session: &mut TrackingSession,
        pages_read_remotely: Option<&[PageRun]>,
    ) -> Result<SuspendedGuest, MoveError> {
        let (rundir, vmm) = (&self.held.rundir, self.target.vmm());
        let journal_failed = |source| MoveError::File { path: rundir.file(JOURNAL_FILE), source };
        self.journal.advance(Step::Suspend).map_err(journal_failed)?;
        fault::point("move.suspend.journalled", Some(vmm), None);
        let connection = &mut self.connection;
        let last = series.last_checkpoint(session, &self.run_state, &mut |stopped| {
            if let Some(state) = pages_read_remotely.and_then(|pages| StoppedState::of(stopped, pages)) {
                // No room in the pipe, or a broken connection, is not an error yet: the destination host can read the
                // state from the store.
                let _ = connection.send_if_room(&Message::State(state));
            }
            fault::point("move.suspend.read", Some(vmm), None);
        });
        let last = last.map_err(|e| match series.handle_new_owner(rundir, &e) {
            Some(e) => MoveError::Protect(e),
            None => checkpoint_failed(rundir.name(), e),
        })?;
        fault::point("move.suspend.committed", Some(vmm), None);
        let MoveSettings { remote, store, credentials, .. } = self.settings;
        let run = OwnerRecord::read(rundir)?.map(|record| record.run());
        let (epoch, number) = (last.epoch, last.report.number);
        let vm = self.target.identity();
        let record = MoveRecord::new(remote.clone(), store.clone(), credentials.as_ref(), vm, epoch, run, number);
        record.write(rundir).map_err(|source| MoveError::File { path: rundir.file("move.json"), source })?;
        disks::end(rundir, &self.held.state.hardware)?;
        session.release_overlays();
        fault::point("move.suspend.let-go", Some(vmm), None);
        self.journal.advance(Step::Resume).map_err(journal_failed)?;
        fault::point("move.resume.journalled", Some(vmm), None);
        Ok(SuspendedGuest { last_checkpoint: last.report, record })
    }

    /// Removes the VM from this host, because the guest runs on the destination host.
    fn remove_from_here(self, record: &MoveRecord) -> Result<(), MoveError> {
        remove_here(self.host, self.held, self.journal).map_err(|source| MoveError::Left {
            name: self.held.rundir.name().into(),
            host: record.remote.host.clone(),
            source: Box::new(source),
        })?;
        // Must precede the end of the connection, which takes as long as the remote Rekindle.
        drop(self.run_state);
        Ok(())
    }
}

fn stuck(name: &str, source: MoveError) -> MoveError {
    MoveError::Stuck { name: name.into(), source: Box::new(source) }
}
