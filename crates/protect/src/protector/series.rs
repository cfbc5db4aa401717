//! A series of checkpoints in one store, each on top of the one before it.

use super::ProtectSettings;
use super::ownership::{become_owner, end_guest};
use crate::epochs;
use crate::error::{CheckpointError, ProtectError, TrackingStartError};
use crate::event::{CheckpointReport, Comparison};
use crate::known_store::KnownStoreFile;
use crate::owned::OwnerRecord;
use crate::plan::ProtectionPlan;
use crate::policy::Policy;
use crate::progress::{CommitId, Progress, uptime};
use crate::session::{InitialTracking, OnStopped, TrackingSession};
use crate::target::Target;
use crate::write_record::{LockedWriteRecord, RecordUsability, judge_write_record};
use rekindle_life::attach::ProtectionLock;
use rekindle_qemu::vmm::Vmm;
use rekindle_store::types::{OnlyIf, Owner};
use rekindle_store::{Image, Options, ReadOptions, StoreError, Writer};
use rekindle_vm::host::Host;
use rekindle_vm::lock::RunStateLock;
use rekindle_vm::rundir::RunDir;
use std::time::{Duration, Instant};

/// How often it is recorded on the disk which checkpoint the store has reached. Also at the end.
const NOTE_INTERVAL: Duration = Duration::from_secs(5);

/// The checkpoints that this process takes of a guest.
pub(crate) struct CheckpointSeries<'a> {
    settings: &'a ProtectSettings,
    store_options: Options,
    /// This host's record as the store's owner.
    owner_record: OwnerRecord,
    /// `None` after the store was closed: it is reopened at the next checkpoint.
    writer: Option<Writer>,
    /// The checkpoint that the next one builds on, if its owner is known.
    base: Option<CommitId>,
    /// When a checkpoint of this guest was last committed, by this process or an earlier one, in ms since this host was
    /// booted.
    committed_at_ms: Option<u64>,
    /// What this host knows of the store, and when that was recorded.
    known_store: KnownStoreFile,
    /// `None` before the first commit.
    noted_at: Option<Instant>,
    /// Locks out other protectors, detach and moves.
    _protection: ProtectionLock,
}

/// The last checkpoint of a guest that stays stopped.
pub(crate) struct LastCheckpoint {
    pub(crate) report: CheckpointReport,
    /// The owner epoch that has committed it.
    pub(crate) epoch: u64,
}

impl<'a> CheckpointSeries<'a> {
    /// Makes this host the owner of the store. `operation` is the reason that the store records.
    pub(crate) fn open(
        host: &Host,
        target: &Target,
        settings: &'a ProtectSettings,
        operation: &str,
        protection: ProtectionLock,
    ) -> Result<Self, ProtectError> {
        let mut store_options = Options::new(target.identity(), operation);
        store_options.keep = settings.keep;
        store_options.credentials.clone_from(&settings.credentials);
        let known_store = KnownStoreFile::of(host, target.name());
        known_store.check(settings.credentials.as_ref())?;
        let (owner_record, writer) = become_owner(target, settings, &store_options)?;
        store_options.only_if = Some(OnlyIf::Run { run: owner_record.run() });
        let progress = Progress::read(target.rundir())
            .filter(|progress| progress.is_of(target.vmm()) && progress.store == settings.store);
        Ok(Self {
            settings,
            store_options,
            owner_record,
            writer: Some(writer),
            base: None,
            committed_at_ms: progress.and_then(|progress| progress.committed_at_ms),
            known_store,
            noted_at: None,
            _protection: protection,
        })
    }

    /// Records for later restores on this host what the store has reached since the last commit.
    fn note_known_store(&mut self) {
        let Some(known) = self.writer.as_ref().map(Writer::known_store) else { return };
        match self.noted_at {
            // This checkpoint is of the guest that runs here, so it is newer than any state that the store had before.
            None => self.known_store.replace(&self.settings.store, known),
            Some(_) => self.known_store.note(&self.settings.store, known),
        }
        self.noted_at = Some(Instant::now());
    }

    /// Starts to track the memory of `target`.
    pub(crate) fn start_session(&mut self, target: &Target) -> Result<TrackingSession, TrackingStartError> {
        let record = LockedWriteRecord::take(target.rundir())?;
        let plan = ProtectionPlan::make(target, self.settings.policy, &self.settings.disks)?;
        let initial = match record {
            Some(record) => self.continue_fill(target, &plan, record)?,
            None => self.continue_or_start(target, &plan),
        };
        let run_state = target.hold_run_state().map_err(CheckpointError::Target)?;
        let mut session = TrackingSession::attach(target.clone(), plan, initial)?;
        drop(run_state);
        session.hold_output(self.settings.output_commit)?;
        self.note_committed_overlays(&mut session);
        Ok(session)
    }

    /// Reads from the store which overlays may be merged: those of a checkpoint that certainly counts.
    pub(crate) fn note_committed_overlays(&self, session: &mut TrackingSession) {
        if !session.has_overlays() {
            return;
        }
        let metadata = Image::open(&self.settings.store, &self.read_options(None)).and_then(|image| image.metadata());
        match metadata.as_ref().map(epochs::read_overlays) {
            Ok(Ok(committed)) => session.note_committed_overlays(&committed),
            Err(StoreError::Empty { .. }) => session.note_committed_overlays(&[]),
            Ok(Err(e)) => tracing::warn!("cannot read the disks of the newest checkpoint: {e}"),
            Err(e) => tracing::warn!("cannot read the newest checkpoint, so its overlays are not merged yet: {e}"),
        }
    }

    /// Returns how tracking starts if all of the memory is loaded.
    fn continue_or_start(&mut self, target: &Target, plan: &ProtectionPlan) -> InitialTracking {
        self.base = None;
        let Some(writer) = &mut self.writer else { return InitialTracking::Fresh };
        writer.hold(None);
        let newest = writer.next_number() - 1;
        match Progress::read(target.rundir()) {
            Some(progress)
                if progress.policy == plan.policy
                    && is_same_history(&progress, writer)
                    && progress.is_all_committed(&self.settings.store, target.vmm(), newest) =>
            {
                InitialTracking::Continue
            }
            _ => InitialTracking::Fresh,
        }
    }

    /// Returns how tracking starts while a restore still fills the memory: with the write record of its pager.
    fn continue_fill(
        &mut self,
        target: &Target,
        plan: &ProtectionPlan,
        record: LockedWriteRecord,
    ) -> Result<InitialTracking, CheckpointError> {
        self.base = None;
        let store = &self.settings.store;
        let not_now = |why: &str| CheckpointError::Filling { why: why.into() };
        if plan.policy == Policy::Cow {
            return Err(not_now("policy cow cannot share the memory with the pager"));
        }
        let newest = match Image::open(store, &self.read_options(None)) {
            Ok(image) => CommitId { number: image.info().number, epoch: image.info().epoch },
            Err(StoreError::Empty { .. }) => return Err(not_now("it is a checkpoint of another store")),
            Err(e) => return Err(e.into()),
        };
        let progress = Progress::read(target.rundir());
        let usability = judge_write_record(&record.fill, progress.as_ref(), store, target.vmm(), newest);
        let writer = self.reopened_writer()?;
        if usability == RecordUsability::Unusable || writer.next_number() != newest.number + 1 {
            return Err(not_now("it is not the newest checkpoint of this store"));
        }
        // The pager still reads the restored checkpoint, so the store must keep it.
        writer.hold(Some(record.fill.number));
        self.base = Some(newest);
        let all_committed = usability == RecordUsability::Complete;
        Ok(InitialTracking::Filling { record: Box::new(record), all_committed })
    }

    /// Takes one checkpoint and commits it.
    pub(crate) fn checkpoint(&mut self, session: &mut TrackingSession) -> Result<CheckpointReport, CheckpointError> {
        let every = self.settings.every;
        let report = self.record_progress(session, |session, writer| session.checkpoint(writer, every))?;
        if self.noted_at.is_none_or(|noted_at| noted_at.elapsed() >= NOTE_INTERVAL) {
            self.note_known_store();
        }
        Ok(report)
    }

    /// Takes the last checkpoint of a guest that stays stopped: see [`TrackingSession::last_checkpoint`].
    pub(crate) fn last_checkpoint(
        &mut self,
        session: &mut TrackingSession,
        run_state: &RunStateLock,
        on_stopped: &mut OnStopped<'_>,
    ) -> Result<LastCheckpoint, CheckpointError> {
        let report =
            self.record_progress(session, |session, writer| session.last_checkpoint(writer, run_state, on_stopped))?;
        Ok(LastCheckpoint { report, epoch: self.base.map_or(0, |base| base.epoch) })
    }

    /// Takes a checkpoint with `take`. Records before it that pages are collected, and after it that they are
    /// committed.
    fn record_progress(
        &mut self,
        session: &mut TrackingSession,
        take: impl FnOnce(&mut TrackingSession, &mut Writer) -> Result<CheckpointReport, CheckpointError>,
    ) -> Result<CheckpointReport, CheckpointError> {
        let mut progress = self.progress_of(session);
        let writer = self.reopened_writer()?;
        writer.hold(session.restored_checkpoint());
        progress.collected = writer.next_number();
        progress.committed = progress.collected - 1;
        progress.epoch = writer.epoch();
        progress.write(session.target.rundir());
        let report = take(session, writer)?;
        (progress.collected, progress.committed) = (report.number, report.number);
        progress.committed_at_ms = u64::try_from(uptime().as_millis()).ok();
        progress.base = Some(CommitId { number: report.number, epoch: progress.epoch });
        progress.known = Some(writer.known_store());
        progress.write(session.target.rundir());
        (self.committed_at_ms, self.base) = (progress.committed_at_ms, progress.base);
        Ok(report)
    }

    /// Returns a progress record without the fields that depend on the checkpoint.
    fn progress_of(&self, session: &TrackingSession) -> Progress {
        let Vmm { pid, started, .. } = *session.target.vmm();
        Progress {
            store: self.settings.store.clone(),
            pid,
            started,
            policy: session.policy(),
            collected: 0,
            committed: 0,
            committed_at_ms: self.committed_at_ms,
            epoch: 0,
            base: self.base,
            known: self.writer.as_ref().map(Writer::known_store),
        }
    }

    /// Compares the guest's memory with checkpoint `newest`, the newest one of this session.
    pub(crate) fn compare(
        &self,
        session: &mut TrackingSession,
        newest: Option<u64>,
    ) -> Result<Comparison, CheckpointError> {
        let committed = newest.unwrap_or_default();
        // The collected pages are not committed: if this process is killed, a later protector must not continue
        // incrementally.
        let progress = Progress { collected: committed + 1, committed, ..self.progress_of(session) };
        progress.write(session.target.rundir());
        session.compare(&Image::open(&self.settings.store, &self.read_options(newest))?)
    }

    fn read_options(&self, checkpoint: Option<u64>) -> ReadOptions {
        ReadOptions { at: checkpoint, credentials: self.settings.credentials.clone(), ..ReadOptions::default() }
    }

    /// Returns the writer. Reopens the store if the writer is closed.
    fn reopened_writer(&mut self) -> Result<&mut Writer, StoreError> {
        match &mut self.writer {
            Some(writer) => Ok(writer),
            closed => Ok(closed.insert(Writer::open(&self.settings.store, &self.store_options)?)),
        }
    }

    /// Closes the store, which the next checkpoint reopens.
    pub(crate) fn close_writer(&mut self) {
        self.writer = None;
    }

    pub(crate) fn owner_record(&self) -> &OwnerRecord {
        &self.owner_record
    }

    /// Handles the failure of a checkpoint because another host has the guest: ends the guest's processes on this host
    /// and returns the error to report. `None`: `e` has another cause.
    pub(crate) fn handle_new_owner(&self, rundir: &RunDir, e: &CheckpointError) -> Option<ProtectError> {
        let CheckpointError::Store(e) = e else { return None };
        let owner = e.guest_is_over(self.owner_record.run())?;
        Some(self.end_guest(rundir, owner))
    }

    /// Ends the guest's processes on this host, because `owner` has the guest. Returns the error to report.
    pub(crate) fn end_guest(&self, rundir: &RunDir, owner: &Owner) -> ProtectError {
        end_guest(&self.owner_record, rundir, owner)
    }
}

/// Returns whether the newest checkpoint of the store is the one that the protector of `progress` has committed. In a store
/// that was rolled back and written again, it may have the same number.
fn is_same_history(progress: &Progress, writer: &Writer) -> bool {
    progress.known.is_some_and(|committed| committed.has_same_checkpoint(&writer.known_store()))
}

impl Drop for CheckpointSeries<'_> {
    fn drop(&mut self) {
        if self.noted_at.is_some() {
            self.note_known_store();
        }
    }
}
