//! The keeper of a served disk's redo log: carries out requests about epochs, and does the background work of creating
//! segments, sealing and merging.
//!
//! An *epoch* is what a guest wrote to its disk between two checkpoints, and a *segment* is the log's file with it. To
//! *seal* an epoch is to make it durable, and to *merge* it is to copy it to the image (`docs/disk-epochs.md`).
//!
//! | thread | work |
//! |---|---|
//! | the caller's | `begin`, `mark`, `seal`; `committed` and `end` leave a task |
//! | `create_segments` | creates segments before they are needed |
//! | [`merging::Merger`] | merges and ends logs. It alone has the [`MergeTarget`], so there is one merge at a time |
//!
//! The engine never waits for this work: the keeper visits the engine's state between two of its steps. Locks:
//! `current` is held while the directory changes and while a log begins or ends, so that directory, log and tasks
//! always belong to one log. The engine may be visited while `current` is held. `tasks` is taken last, and no thread
//! waits while it holds `tasks`.

mod merging;
#[cfg(test)]
mod model;
pub mod threads;

use crate::broker::{DiskBroker, ServedFiles};
use crate::engine::redo_log::{EngineLog, KeeperCallback, RedoStatus};
use crate::engine::refusal::Refusal;
use crate::engine::visit::{EngineView, VisitEngine};
use crate::image::{Image, OpenMode};
use crate::redo::directory::LogDirectory;
use crate::redo::error::{RedoError, error_chain};
use crate::redo::files::{LocalFiles, LogFiles, Synced};
use crate::redo::log::seal::{SealRecord, SegmentToSeal};
use crate::redo::log::{Log, SyncOutcome};
use crate::redo::merge::{MergeTarget, SharedDirectory};
use crate::redo::offline::{default_directory, image_name};
use crate::redo::recover::{self, DiskVersion, RecoveredLog};
use merging::Merger;
use rekindle_kernel::durable_file::LocalFile;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use threads::{Monitor, SystemThreads, Threads};
use uuid::Uuid;

/// Smallest default limit of a log, in bytes.
const MIN_DEFAULT_LIMIT: u64 = 4 << 30;

/// The options for opening a disk's log.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LogOptions {
    /// The log's directory; by default next to the image. Required for a block device.
    pub directory: Option<PathBuf>,
    pub version: DiskVersion,
    /// Most bytes of the log; by default a quarter of the disk, at least 4 GiB.
    pub limit: Option<u64>,
    /// The file name of the image, of a process that cannot find it any more; by default it is found.
    pub image_name: Option<String>,
    /// The previous file name of a renamed image.
    pub renamed_from: Option<String>,
}

impl LogOptions {
    /// Returns the log's directory; `None` for a block device without one.
    #[must_use]
    pub fn directory_for(&self, image: &Image) -> Option<PathBuf> {
        self.directory.clone().or_else(|| (!image.is_device).then(|| default_directory(&image.path)))
    }

    /// Returns the log's directory, also if it can only be checked that there is none.
    #[must_use]
    pub fn files(&self, image: &Image, mode: OpenMode) -> LocalFiles {
        let directory = self.directory_for(image).unwrap_or_else(|| default_directory(&image.path));
        LocalFiles::new(&directory, mode.direct)
    }
}

/// An epoch of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EpochId {
    pub disk: Uuid,
    pub epoch: u64,
}

/// The log's directory, while there is a log.
#[derive(Debug)]
struct CurrentLog<D: LogFiles> {
    log_dir: Option<LogDirectory<D>>,
    /// The first epoch of the next log. Requests in progress may still refer to epochs of the previous log.
    next_epoch: u64,
}

/// What a seal makes durable.
struct SealRequest<F> {
    disk: Uuid,
    segments: Vec<SegmentToSeal<F>>,
    /// The image may have writes that are not durable.
    is_image_dirty: bool,
}

/// A segment that was synced for a seal.
struct SyncedSegment {
    epoch: u64,
    /// Number of entries that were written before the sync.
    written: u64,
    outcome: SyncOutcome,
}

/// Requests to the keeper's threads. All but `is_stopping` and `is_protected` end with the current log.
#[derive(Debug, Default)]
struct Tasks {
    /// The server ends.
    is_stopping: bool,
    /// A protector has taken checkpoints since the server started.
    is_protected: bool,
    /// A segment or free space is needed.
    is_segment_wanted: bool,
    /// The newest epoch of a committed checkpoint.
    committed_epoch: u64,
    is_merge_wanted: bool,
    /// The log is to end. False again once the log has ended or could not be ended.
    is_end_wanted: bool,
    /// No write that the end of the log waits for is in progress.
    is_idle: bool,
    /// Why the last merge failed.
    why_failed: Option<String>,
}

/// The server's part for requests about epochs, and the state that its threads share.
pub struct Keeper<D: LogFiles = ServedFiles, T: Threads = SystemThreads> {
    files: D,
    /// The image, for seals. `None` when the server ends.
    image: T::Monitor<Option<Synced<D::File>>>,
    bytes: u64,
    limit: u64,
    is_readonly: bool,
    /// The directory of a log is known.
    has_directory: bool,
    image_name: Option<String>,
    current: T::Monitor<CurrentLog<D>>,
    tasks: Arc<T::Monitor<Tasks>>,
    threads: T::Monitor<Vec<T::Thread>>,
}

impl<D: LogFiles, T: Threads> std::fmt::Debug for Keeper<D, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keeper").field("files", &self.files).finish_non_exhaustive()
    }
}

/// An opened log for the engine, and its keeper, which starts after the engine.
#[derive(Debug)]
pub struct OpenedLog<D: LogFiles = ServedFiles, T: Threads = SystemThreads> {
    pub engine_log: Option<EngineLog<D::File>>,
    keeper: Keeper<D, T>,
    target: MergeTarget<D::File>,
}

fn refused(error: &RedoError) -> Refusal {
    Refusal(error_chain(error))
}

fn no_log() -> Refusal {
    Refusal("the disk has no redo log, because its VM is not protected".into())
}

fn end_pending() -> Refusal {
    Refusal("the disk's redo log is being merged and removed; try again when that is done".into())
}

/// Opens the log of an image, if it has one. A confined process has a broker.
///
/// # Errors
/// After a [`RedoError`] nothing has changed.
pub fn open(image: &Image, options: LogOptions, broker: Option<Arc<DiskBroker>>) -> Result<OpenedLog, RedoError> {
    let has_directory = options.directory_for(image).is_some();
    let files = ServedFiles::new(options.files(image, image.mode), broker);
    let limit = options.limit.unwrap_or_else(|| (image.bytes / 4).max(MIN_DEFAULT_LIMIT));
    let mut recovered = if image.mode.readonly {
        if LogDirectory::exists(&files)? {
            return Err(RedoError::ReadOnly { path: files.path().to_owned() });
        }
        recover::require_no_log(files.path(), options.version)?;
        None
    } else {
        recover::open(files.clone(), image.bytes, options.version, limit)?
    };
    let image_name = options.image_name.or_else(|| image_name(&image.path));
    if let (Some(recovered), Some(name)) = (&mut recovered, &image_name) {
        recovered.log_dir.check_image(name, options.renamed_from.as_deref())?;
    }
    let synced = Synced::new(LocalFile(Arc::clone(&image.file)), Arc::clone(&image.durability));
    let mut opened = OpenedLog::new(files, recovered, synced, image.bytes, limit);
    (opened.keeper.is_readonly, opened.keeper.has_directory) = (image.mode.readonly, has_directory);
    opened.keeper.image_name = image_name;
    Ok(opened)
}

impl<D: LogFiles + Clone, T: Threads> OpenedLog<D, T> {
    /// Creates a keeper. `bytes`: length of the disk; `limit`: most bytes of its log.
    fn new(files: D, recovered: Option<RecoveredLog<D>>, image: Synced<D::File>, bytes: u64, limit: u64) -> Self {
        let (log_dir, log) = recovered.map(|recovered| (recovered.log_dir, recovered.log)).unzip();
        let keeper = Keeper {
            files,
            image: Monitor::new(Some(image.clone())),
            bytes,
            limit,
            is_readonly: false,
            has_directory: true,
            image_name: None,
            current: Monitor::new(CurrentLog { log_dir, next_epoch: 1 }),
            tasks: Arc::new(Monitor::new(Tasks::default())),
            threads: Monitor::new(Vec::new()),
        };
        let engine_log = log.map(|log| EngineLog::new(log, keeper.segment_request(), false));
        Self { engine_log, keeper, target: MergeTarget::new(image) }
    }

    /// Starts the keeper's threads. They end with the engine or by [`Keeper::release`].
    #[must_use]
    pub fn start(self, engine: &impl VisitEngine<File = D::File>) -> Arc<Keeper<D, T>> {
        let Self { keeper, target, .. } = self;
        let keeper = Arc::new(keeper);
        // Epochs are discarded by the guest's first write, not before.
        if keeper.current.with(|current| current.log_dir.as_ref().is_some_and(|log_dir| !log_dir.is_rewound())) {
            keeper.segment_request().send();
        }
        let (segment_keeper, segment_engine) = (Arc::clone(&keeper), engine.clone());
        let segment_thread = T::spawn(move || segment_keeper.create_segments(&segment_engine));
        let merger = Merger::new(Arc::clone(&keeper), engine.clone(), target);
        let merge_thread = T::spawn(move || merger.run());
        keeper.threads.with(|threads| threads.extend([segment_thread, merge_thread]));
        keeper
    }
}

impl<D: LogFiles + Clone, T: Threads> Keeper<D, T> {
    /// Ends the threads and releases image and log before the server ends. A merge ends after its current step; the
    /// next server repeats it.
    pub fn release(&self) {
        self.tasks.with(|tasks| tasks.is_stopping = true);
        self.threads.with(std::mem::take).into_iter().for_each(T::join);
        drop(self.image.with(Option::take));
        drop(self.current.with(|current| current.log_dir.take()));
    }

    /// Returns a callback that requests a segment or free space.
    fn segment_request(&self) -> KeeperCallback {
        let tasks = Arc::clone(&self.tasks);
        KeeperCallback::new(move || tasks.with(|tasks| tasks.is_segment_wanted = true))
    }

    /// Creates segments when they are needed, until the server ends.
    fn create_segments(&self, engine: &impl VisitEngine<File = D::File>) {
        let next = |tasks: &mut Tasks| {
            let is_wanted = std::mem::take(&mut tasks.is_segment_wanted);
            (tasks.is_stopping || is_wanted).then_some(!tasks.is_stopping)
        };
        while self.tasks.wait(next) {
            let created = self.current.with(|current| Self::create_missing_segments(current, engine));
            let ended = self.end_full_log(engine, created.is_err());
            for Refusal(why) in [created.err(), ended.err()].into_iter().flatten() {
                tracing::warn!("{why}");
            }
        }
    }

    /// Creates the segments that the log needs.
    fn create_missing_segments(
        current: &mut CurrentLog<D>,
        engine: &impl VisitEngine<File = D::File>,
    ) -> Result<(), Refusal> {
        let Some(log_dir) = current.log_dir.as_mut() else { return Ok(()) };
        let missing = engine.visit(|view| Ok(view.log.as_ref().map(|engine_log| engine_log.log.missing_segments())))?;
        for epoch in missing.unwrap_or_default() {
            let segment = log_dir.create_segment(epoch).map_err(|e| refused(&e))?;
            engine.visit(move |view| {
                if let Some(engine_log) = view.log {
                    engine_log.log.add_ready(segment);
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Ends a full log that no protector commits, as after a restore. Otherwise the guest's writes would wait
    /// indefinitely.
    fn end_full_log(&self, engine: &impl VisitEngine<File = D::File>, is_failing: bool) -> Result<(), Refusal> {
        let is_full = |view: &mut EngineView<'_, D::File>| Ok(view.log.as_ref().is_some_and(EngineLog::is_full));
        if self.tasks.with(|tasks| tasks.is_protected) || !(is_failing || engine.visit(is_full)?) {
            return Ok(());
        }
        tracing::warn!(
            "the redo log is full and no protector takes checkpoints of the VM; merging and removing the log"
        );
        self.end();
        Ok(())
    }

    /// Starts a log for the writes of the guest. A disk that has a log keeps it.
    ///
    /// *On success:* the log exists durably; returns the disk's identity and the current epoch.
    /// *On failure:* the disk has its previous log, or none.
    pub fn begin(&self, engine: &impl VisitEngine<File = D::File>) -> Result<EpochId, Refusal> {
        if self.is_readonly {
            return Err(Refusal("the disk is served read-only, so it has no epochs".into()));
        }
        if !self.has_directory {
            let why = "the redo log of a block device has no default directory: name one (`redo = \"FOLDER\"` in its [[disk]], or rekindle disk serve --redo DIR)";
            return Err(Refusal(why.into()));
        }
        let set_protected = |tasks: &mut Tasks| {
            tasks.is_protected |= !tasks.is_end_wanted;
            if tasks.is_end_wanted { Err(end_pending()) } else { Ok(()) }
        };
        self.tasks.with(set_protected)?;
        self.current.with(|current| {
            // The end of the log may have been requested since the first check.
            self.tasks.with(set_protected)?;
            let is_new = current.log_dir.is_none();
            if is_new {
                self.begin_log(current, engine)?;
            }
            // Without space for a segment all writes would wait, so the log must not begin.
            let first_epoch = Self::create_missing_segments(current, engine).and_then(|()| {
                engine.visit(|view| {
                    let log = &view.log.as_ref().ok_or_else(no_log)?.log;
                    Ok(EpochId { disk: log.disk(), epoch: log.epoch() })
                })
            });
            if first_epoch.is_err() && is_new && !Self::end_empty(current, engine) {
                // The guest has already written to the log, and no protector commits these writes.
                self.end();
            }
            first_epoch
        })
    }

    fn begin_log(&self, current: &mut CurrentLog<D>, engine: &impl VisitEngine<File = D::File>) -> Result<(), Refusal> {
        let log_dir =
            LogDirectory::create(self.files.clone(), self.bytes, self.image_name.clone()).map_err(|e| refused(&e))?;
        let log = Log::new(log_dir.state().disk, current.next_epoch, 0, 0, self.limit);
        let engine_log = EngineLog::new(log, self.segment_request(), true);
        current.log_dir = Some(log_dir);
        engine.visit(move |view| {
            *view.log = Some(engine_log);
            Ok(())
        })
    }

    /// Removes the log if it has no writes. Returns whether it was removed.
    fn end_empty(current: &mut CurrentLog<D>, engine: &impl VisitEngine<File = D::File>) -> bool {
        let removed = engine.visit(|view| {
            view.ended = view.log.take_if(|engine_log| engine_log.log.is_empty());
            Ok(view.ended.is_some())
        });
        let is_removed = matches!(removed, Ok(true));
        if is_removed
            && let Some(log_dir) = current.log_dir.take()
            && let Err(e) = log_dir.destroy()
        {
            tracing::warn!("{}", error_chain(&e));
        }
        is_removed
    }

    /// Ends the current epoch. Returns the epoch whose content the disk now has. Does no I/O if the previous epoch
    /// was sealed.
    ///
    /// *Needs:* the guest is stopped: no queue runs, no request is in progress.
    ///
    /// # Errors
    /// After [`Refusal`] the epoch continues.
    pub fn mark(&self, engine: &impl VisitEngine<File = D::File>) -> Result<EpochId, Refusal> {
        // `None`: the next epoch has no segment yet.
        let try_mark = || {
            engine.visit(|view| {
                let is_running = view.is_running;
                let log = &mut view.log.as_mut().ok_or_else(no_log)?.log;
                if is_running {
                    let why =
                        "the guest runs, so the checkpoint's memory would miss its latest writes; stop the guest first";
                    return Err(Refusal(why.into()));
                }
                Ok(log.mark().map(|epoch| EpochId { disk: log.disk(), epoch }))
            })
        };
        if self.tasks.with(|tasks| tasks.is_end_wanted) {
            return Err(no_log());
        }
        if let Some(epoch) = try_mark()? {
            return Ok(epoch);
        }
        self.current.with(|current| Self::create_missing_segments(current, engine))?;
        try_mark()?.ok_or_else(|| Refusal("the next epoch has no segment yet".into()))
    }

    /// Makes all writes up to an epoch durable.
    ///
    /// *Needs:* the epoch was marked.
    /// *On success:* the disk of that epoch survives any crash, until a later epoch is committed.
    ///
    /// # Errors
    /// After [`Refusal`], a checkpoint with this epoch must not be committed.
    pub fn seal(&self, engine: &impl VisitEngine<File = D::File>, epoch: u64) -> Result<(), Refusal> {
        let request = engine.visit(move |view| {
            let engine_log = view.log.as_ref().ok_or_else(no_log)?;
            let segments =
                engine_log.log.segments_to_seal(epoch).map_err(|e| Refusal(format!("epoch {epoch}: {e}")))?;
            Ok(SealRequest { disk: engine_log.log.disk(), segments, is_image_dirty: engine_log.is_image_dirty })
        })?;
        let disk = request.disk;
        let epochs_with_record = self.make_durable(engine, request)?;
        self.current.with(|current| {
            // The log may have ended since, and another log may have been created.
            let log_dir = current.log_dir.as_mut().filter(|log_dir| log_dir.state().disk == disk).ok_or_else(no_log)?;
            if log_dir.state().floor > epoch {
                return Err(Refusal(format!("epoch {epoch} is no longer available: later writes are being merged")));
            }
            log_dir.record(|state| state.seal(epoch, &epochs_with_record)).map_err(|e| refused(&e))?;
            engine.visit(move |view| {
                view.log.iter_mut().for_each(|engine_log| engine_log.log.mark_sealed(&epochs_with_record));
                Ok(())
            })
        })?;
        // Create the next segment in advance, so that the next mark need not wait.
        self.segment_request().send();
        Ok(())
    }

    /// Makes image and segments durable. Returns the epochs whose segments have a seal record.
    fn make_durable(
        &self,
        engine: &impl VisitEngine<File = D::File>,
        request: SealRequest<D::File>,
    ) -> Result<Vec<u64>, Refusal> {
        let SealRequest { disk, segments, is_image_dirty } = request;
        let image = self.image.with(|image| image.clone()).ok_or_else(|| refused(&RedoError::Closed))?;
        let mut error = if is_image_dirty { image.sync().err() } else { image.check().err() };
        let mut synced_segments = Vec::new();
        let mut epochs_with_record = Vec::new();
        for segment in segments {
            let (epoch, written) = (segment.epoch, segment.written);
            let result = segment.make_durable(self.files.path());
            synced_segments.push(SyncedSegment { epoch, written, outcome: SyncOutcome::from(&result) });
            match result {
                Ok(SealRecord::Written) => epochs_with_record.push(epoch),
                Ok(SealRecord::Missing) => {}
                Err(e) => error = error.or(Some(e)),
            }
        }
        let (is_all_synced, shared_image) = (error.is_none(), image.clone());
        let is_durable = engine.visit(move |view| {
            let engine_log = view.log.as_mut().filter(|engine_log| engine_log.log.disk() == disk).ok_or_else(no_log)?;
            // Every result is recorded, also after a failed sync.
            let mut is_durable = true;
            for SyncedSegment { epoch, written, outcome } in synced_segments {
                is_durable &= engine_log.log.record_sync(epoch, written, outcome);
            }
            engine_log.is_image_dirty &= !(is_all_synced && shared_image.check().is_ok());
            Ok(is_durable)
        })?;
        // A concurrent flush of the guest may have received the error for this data.
        let error = error.or_else(|| image.check().err());
        let error = error.or_else(|| (!is_durable).then(|| io::Error::other("a flush of the guest has failed")));
        match error {
            Some(e) => Err(refused(&RedoError::io(self.files.path(), "making it durable")(e))),
            None => Ok(epochs_with_record),
        }
    }

    /// Records that a checkpoint with this epoch is committed: the epoch may be merged, and older epochs are not
    /// needed. Does not wait.
    pub fn committed(&self, epoch: u64) -> Result<(), Refusal> {
        self.current.with(|current| {
            let sealed = current.log_dir.as_ref().map(|log_dir| log_dir.state().sealed).ok_or_else(no_log)?;
            if epoch > sealed {
                return Err(Refusal(format!("epoch {epoch} was not sealed; the newest sealed epoch is {sealed}")));
            }
            self.tasks.with(|tasks| {
                tasks.committed_epoch = tasks.committed_epoch.max(epoch);
                tasks.is_merge_wanted = true;
            });
            Ok(())
        })
    }

    /// Requests that the log is merged and removed while the guest runs. Does not wait: when that is done, the
    /// server's status has no log.
    pub fn end(&self) {
        self.tasks.with(|tasks| {
            if !std::mem::replace(&mut tasks.is_end_wanted, true) {
                tasks.why_failed = None;
            }
        });
    }

    /// Completes the engine's report on its log.
    pub fn complete_status(&self, status: &mut RedoStatus) {
        self.current.with(|current| {
            if let Some(log_dir) = &current.log_dir {
                (status.sealed, status.rewound) = (log_dir.state().sealed, log_dir.is_rewound());
            }
        });
        status.failed = self.tasks.with(|tasks| tasks.why_failed.clone());
    }
}

impl<D: LogFiles, T: Threads> SharedDirectory<D> for Keeper<D, T> {
    fn with_directory(
        &self,
        change: &mut dyn FnMut(&mut LogDirectory<D>) -> Result<(), RedoError>,
    ) -> Result<(), RedoError> {
        self.current.with(|current| current.log_dir.as_mut().map_or(Err(RedoError::Closed), change))
    }
}
