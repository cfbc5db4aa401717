//! Merges committed epochs and ends logs, in one thread.
//!
//! An *epoch* is what a guest wrote between two checkpoints. To *merge* it is to copy it from the redo log to the
//! image, when its checkpoint is committed. To *end* a log is to merge all of it and to remove its files.

use super::threads::{Monitor, Threads};
use super::{CurrentLog, Keeper, Tasks, no_log, refused};
use crate::engine::refusal::Refusal;
use crate::engine::visit::VisitEngine;
use crate::redo::directory::{LogDirectory, last_used_epoch};
use crate::redo::error::{RedoError, error_chain};
use crate::redo::files::LogFiles;
use crate::redo::merge::{MergeTarget, merge};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A log with fewer bytes in its current epoch is merged completely while the guest's writes wait.
const SHORT_LOG_BYTES: u64 = 8 << 20;
/// How often to merge first, to make the log that short.
const MAX_ROUNDS: u32 = 16;
/// How long a merge works before it pauses.
const MAX_WORK_TIME: Duration = Duration::from_millis(20);

/// The next work of the thread.
enum Task {
    /// The server ends.
    Stop,
    Merge {
        upto: u64,
    },
    End,
}

/// The thread that merges epochs and ends logs.
pub(super) struct Merger<D: LogFiles, E, T: Threads> {
    keeper: Arc<Keeper<D, T>>,
    engine: E,
    target: MergeTarget<D::File>,
}

impl<D: LogFiles + Clone, E: VisitEngine<File = D::File>, T: Threads> Merger<D, E, T> {
    pub(super) fn new(keeper: Arc<Keeper<D, T>>, engine: E, target: MergeTarget<D::File>) -> Self {
        Self { keeper, engine, target }
    }

    /// Carries out tasks until the server ends.
    pub(super) fn run(mut self) {
        loop {
            match self.keeper.tasks.wait(next_task) {
                Task::Stop => return,
                Task::Merge { upto } => self.merge_committed(upto),
                Task::End => {
                    if let Err(Refusal(why)) = self.end_log() {
                        self.abandon_end(why);
                    }
                }
            }
        }
    }

    /// Merges committed epochs and records whether that failed.
    fn merge_committed(&mut self, upto: u64) {
        let why_failed = self.merge_to(upto).err().map(|Refusal(why)| why);
        if let Some(why) = &why_failed {
            tracing::warn!("cannot merge the redo log: {why}");
        }
        // A caller that waits for the end of the log must not mistake this failure for its result.
        self.keeper.tasks.with(|tasks| {
            if !tasks.is_end_wanted {
                tasks.why_failed = why_failed;
            }
        });
    }

    /// Lets the log continue, because it cannot be ended.
    fn abandon_end(&self, why: String) {
        tracing::warn!("cannot remove the redo log: {why}");
        let reopened = self.engine.visit(|view| {
            view.log.iter_mut().for_each(|engine_log| engine_log.is_closing = false);
            Ok(())
        });
        // An engine that has ended needs no log.
        drop(reopened);
        self.keeper.tasks.with(|tasks| (tasks.why_failed, tasks.is_end_wanted) = (Some(why), false));
    }

    /// Merges ended epochs up to `upto`.
    pub(super) fn merge_to(&mut self, upto: u64) -> Result<(), Refusal> {
        let Self { keeper, engine, target } = self;
        let batch =
            engine.visit(move |view| Ok(view.log.as_ref().and_then(|engine_log| engine_log.log.batch(upto))))?;
        let Some(batch) = batch else { return Ok(()) };
        let mut work_started = Instant::now();
        let pace = || {
            if keeper.tasks.with(|tasks| tasks.is_stopping) {
                return Err(io::Error::new(io::ErrorKind::Interrupted, "the disk's server is ending"));
            }
            let worked = T::elapsed(work_started);
            if worked < MAX_WORK_TIME {
                return Ok(());
            }
            let is_urgent = engine.visit(|view| {
                Ok(view.log.as_ref().is_some_and(|engine_log| {
                    engine_log.log.bytes() > engine_log.log.limit() / 2 || engine_log.is_closing
                }))
            });
            if matches!(is_urgent, Ok(false)) {
                keeper.tasks.wait_timeout(worked, |tasks| (tasks.is_stopping || tasks.is_end_wanted).then_some(()));
            }
            work_started = Instant::now();
            Ok(())
        };
        merge(&**keeper, &batch, target, pace).map_err(|e| refused(&e))?;
        let upto = batch.upto;
        engine.visit(move |view| {
            if let Some(engine_log) = view.log {
                engine_log.log.merged_to(upto);
            }
            Ok(())
        })?;
        let removed =
            keeper.current.with(|current| current.log_dir.as_ref().map_or(Ok(()), |log_dir| log_dir.remove_done()));
        if let Err(e) = removed {
            tracing::warn!("{}", error_chain(&e));
        }
        Ok(())
    }

    /// Merges all epochs and removes the log. On success also completes the task.
    fn end_log(&mut self) -> Result<(), Refusal> {
        let has_log = |current: &mut CurrentLog<D>| {
            if current.log_dir.is_none() {
                self.keeper.tasks.with(|tasks| tasks.is_end_wanted = false);
            }
            current.log_dir.is_some()
        };
        if !self.keeper.current.with(has_log) {
            return Ok(());
        }
        for round in 0.. {
            // If there is no space for another segment, the guest waits a little longer.
            let created =
                self.keeper.current.with(|current| Keeper::<D, T>::create_missing_segments(current, &self.engine));
            let is_last_round = created.is_err() || round >= MAX_ROUNDS;
            // The epoch that the guest has ended; `None`: its writes wait from now on.
            let marked_epoch = self.engine.visit(move |view| {
                let engine_log = view.log.as_mut().ok_or_else(no_log)?;
                if engine_log.log.current_bytes() < SHORT_LOG_BYTES || is_last_round {
                    engine_log.is_closing = true;
                    return Ok(None);
                }
                engine_log.log.mark();
                Ok(Some(engine_log.log.closed()))
            })?;
            self.wait_idle(marked_epoch.unwrap_or(u64::MAX))?;
            if marked_epoch.is_none() {
                break;
            }
            self.merge_to(u64::MAX)?;
        }
        self.engine.visit(|view| {
            view.log.iter_mut().for_each(|engine_log| engine_log.log.close());
            Ok(())
        })?;
        self.merge_to(u64::MAX)?;
        self.remove_log()
    }

    /// Removes the log, which is merged completely. Later writes go to the image.
    fn remove_log(&self) -> Result<(), Refusal> {
        let Self { keeper, engine, .. } = self;
        keeper.current.with(|current| {
            let (is_empty, next_epoch) = engine.visit(|view| {
                let log = &view.log.as_ref().ok_or_else(no_log)?.log;
                Ok((log.is_empty(), log.epoch()))
            })?;
            if !is_empty {
                return Err(Refusal("the guest wrote to the log while it was merged".into()));
            }
            let log_dir = current.log_dir.as_mut().ok_or_else(|| refused(&RedoError::Closed))?;
            let last_used = last_used_epoch(next_epoch);
            if let Err(e) = log_dir.close(last_used) {
                // The log continues. After a restart, writes in epochs that count as merged would be ignored.
                engine.visit(move |view| {
                    view.log.iter_mut().for_each(|engine_log| engine_log.log.reopen_after(last_used));
                    Ok(())
                })?;
                return Err(refused(&e));
            }
            if let Some(Err(e)) = current.log_dir.take().map(LogDirectory::destroy) {
                // All writes of the remaining files are in the image, and none of the epochs can be opened.
                tracing::warn!("{}", error_chain(&e));
            }
            current.next_epoch = current.next_epoch.max(next_epoch);
            // The commits were of this log. Another log may begin once `current` is unlocked.
            keeper.tasks.with(|tasks| {
                (tasks.committed_epoch, tasks.is_merge_wanted) = (0, false);
                (tasks.why_failed, tasks.is_end_wanted) = (None, false);
            });
            // Must be last: callers that wait for the end check whether the engine has a log.
            engine.visit(|view| {
                view.ended = view.log.take();
                Ok(())
            })
        })
    }

    /// Waits until no write into epochs up to `upto` is in progress.
    fn wait_idle(&self, upto: u64) -> Result<(), Refusal> {
        let tasks = &self.keeper.tasks;
        tasks.with(|tasks| tasks.is_idle = false);
        let callback_tasks = Arc::clone(tasks);
        self.engine.visit(move |view| {
            let log = &mut view.log.as_mut().ok_or_else(no_log)?.log;
            log.when_idle(upto, move || callback_tasks.with(|tasks| tasks.is_idle = true));
            Ok(())
        })?;
        tasks.wait(|tasks| {
            if tasks.is_stopping { Some(Err(refused(&RedoError::Closed))) } else { tasks.is_idle.then_some(Ok(())) }
        })
    }
}

/// Takes the next task; `None`: there is nothing to do yet.
fn next_task(tasks: &mut Tasks) -> Option<Task> {
    if tasks.is_stopping {
        return Some(Task::Stop);
    }
    if tasks.is_end_wanted {
        return Some(Task::End);
    }
    let is_merge_wanted = std::mem::take(&mut tasks.is_merge_wanted);
    is_merge_wanted.then_some(Task::Merge { upto: tasks.committed_epoch })
}
