//! Merging what was committed, and ending a log: the work of one thread, in turn.

use super::threads::{Monitor, Threads};
use super::{Keeper, Kept, Tasks, no_log, refused};
use crate::engine::command::Refused;
use crate::engine::visit::VisitEngine;
use crate::redo::error::{RedoError, chain};
use crate::redo::files::Files;
use crate::redo::merge::{Target, merge};
use crate::redo::state::Home;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A log that is shorter is ended in one go, while the guest's writes wait.
const SHORT: u64 = 8 << 20;
/// How often it is tried to become that short.
const ROUNDS: u32 = 16;
/// What a merge does before it rests.
const WORK: Duration = Duration::from_millis(20);

/// What is to be done next.
enum Task {
    Merge { upto: u64 },
    End,
}

/// See [the module](self).
pub(super) struct Merger<D: Files, E, T: Threads> {
    keeper: Arc<Keeper<D, T>>,
    engine: E,
    target: Target<D::File>,
}

impl<D: Files + Clone, E: VisitEngine<File = D::File>, T: Threads> Merger<D, E, T> {
    pub(super) fn new(keeper: Arc<Keeper<D, T>>, engine: E, target: Target<D::File>) -> Self {
        Self { keeper, engine, target }
    }

    /// Does what there is to do, until the server ends.
    pub(super) fn run(mut self) {
        let next = |tasks: &mut Tasks| {
            if tasks.stop {
                Some(None)
            } else if tasks.is_end_wanted {
                Some(Some(Task::End))
            } else {
                let is_merge_wanted = std::mem::take(&mut tasks.is_merge_wanted);
                is_merge_wanted.then_some(Some(Task::Merge { upto: tasks.committed }))
            }
        };
        while let Some(task) = self.keeper.tasks.wait(next) {
            match task {
                Task::Merge { upto } => {
                    let failed = self.merge_to(upto).err().map(|Refused(why)| why);
                    if let Some(why) = &failed {
                        tracing::warn!("the redo log is not merged: {why}");
                    }
                    // A caller that waits for the end must not take this for its result.
                    self.keeper.tasks.with(|tasks| {
                        if !tasks.is_end_wanted {
                            tasks.failed = failed;
                        }
                    });
                }
                Task::End => {
                    if let Err(Refused(why)) = self.end_log() {
                        tracing::warn!("the redo log does not end: {why}");
                        let reopened = self.engine.visit(|reach| {
                            reach.logged.iter_mut().for_each(|logged| logged.closing = false);
                            Ok(())
                        });
                        // An engine that has ended needs no log.
                        drop(reopened);
                        self.keeper.tasks.with(|tasks| (tasks.failed, tasks.is_end_wanted) = (Some(why), false));
                    }
                }
            }
        }
    }

    /// Merges what has ended, up to an epoch.
    pub(super) fn merge_to(&mut self, upto: u64) -> Result<(), Refused> {
        let Self { keeper, engine, target } = self;
        let batch = engine.visit(move |reach| Ok(reach.logged.as_ref().and_then(|logged| logged.log.batch(upto))))?;
        let Some(batch) = batch else { return Ok(()) };
        let mut since = Instant::now();
        let pace = || {
            if keeper.tasks.with(|tasks| tasks.stop) {
                return Err(io::Error::new(io::ErrorKind::Interrupted, "the disk's server ends"));
            }
            let worked = T::elapsed(since);
            if worked < WORK {
                return Ok(());
            }
            let is_long = engine.visit(|reach| {
                let (bytes, limit) = reach.logged.as_ref().map_or((0, 1), |logged| logged.log.bytes());
                Ok(bytes > limit / 2 || reach.logged.as_ref().is_some_and(|logged| logged.closing))
            });
            if matches!(is_long, Ok(false)) {
                keeper.tasks.wait_timeout(worked, |tasks| (tasks.stop || tasks.is_end_wanted).then_some(()));
            }
            since = Instant::now();
            Ok(())
        };
        merge(&**keeper, &batch, target, pace).map_err(|e| refused(&e))?;
        let upto = batch.upto;
        engine.visit(move |reach| {
            if let Some(logged) = reach.logged {
                logged.log.merged_to(upto);
            }
            Ok(())
        })?;
        let removed = keeper.home.with(|kept| kept.home.as_ref().map_or(Ok(()), |home| home.remove_done()));
        if let Err(e) = removed {
            tracing::warn!("{}", chain(&e));
        }
        Ok(())
    }

    /// Merges all, and has no log any more. On success the task is done, too.
    fn end_log(&mut self) -> Result<(), Refused> {
        let has_log = |kept: &mut Kept<D>| {
            if kept.home.is_none() {
                self.keeper.tasks.with(|tasks| tasks.is_end_wanted = false);
            }
            kept.home.is_some()
        };
        if !self.keeper.home.with(has_log) {
            return Ok(());
        }
        for round in 0.. {
            // Without room for a further segment the guest has to wait a little longer.
            let prepared = self.keeper.home.with(|kept| Keeper::<D, T>::prepare(kept, &self.engine));
            let is_last = prepared.is_err() || round >= ROUNDS;
            let (is_short, upto) = self.engine.visit(move |reach| {
                let logged = reach.logged.as_mut().ok_or_else(no_log)?;
                let is_short = logged.log.current_bytes() < SHORT || is_last;
                if is_short {
                    logged.closing = true;
                } else {
                    logged.log.mark();
                }
                Ok((is_short, if is_short { u64::MAX } else { logged.log.closed() }))
            })?;
            self.wait_idle(upto)?;
            if is_short {
                break;
            }
            self.merge_to(u64::MAX)?;
        }
        self.engine.visit(|reach| {
            reach.logged.iter_mut().for_each(|logged| logged.log.close());
            Ok(())
        })?;
        self.merge_to(u64::MAX)?;
        self.remove_log()
    }

    /// All is in the image: from here on what is written goes there.
    fn remove_log(&self) -> Result<(), Refused> {
        let Self { keeper, engine, .. } = self;
        keeper.home.with(|kept| {
            let (is_empty, next) = engine.visit(|reach| {
                let log = &reach.logged.as_ref().ok_or_else(no_log)?.log;
                Ok((log.is_empty(), log.epoch()))
            })?;
            if !is_empty {
                return Err(Refused("something was written meanwhile".into()));
            }
            let home = kept.home.as_mut().ok_or_else(|| refused(&RedoError::Closed))?;
            home.close(next).map_err(|e| refused(&e))?;
            if let Some(Err(e)) = kept.home.take().map(Home::destroy) {
                // What is left has no writes that are not in the image, and no epoch of it can be had.
                tracing::warn!("{}", chain(&e));
            }
            kept.next = kept.next.max(next);
            // What was committed was of this log. Another one may begin when `home` is free.
            keeper.tasks.with(|tasks| {
                (tasks.committed, tasks.is_merge_wanted) = (0, false);
                (tasks.failed, tasks.is_end_wanted) = (None, false);
            });
            // Last: callers that wait for the end check whether the engine has a log.
            engine.visit(|reach| {
                reach.ended = reach.logged.take();
                Ok(())
            })
        })
    }

    /// Waits until nothing is under way into epochs up to `upto`.
    fn wait_idle(&self, upto: u64) -> Result<(), Refused> {
        let tasks = &self.keeper.tasks;
        tasks.with(|tasks| tasks.is_idle = false);
        let idle = Arc::clone(tasks);
        self.engine.visit(move |reach| {
            let log = &mut reach.logged.as_mut().ok_or_else(no_log)?.log;
            log.when_idle(upto, move || idle.with(|tasks| tasks.is_idle = true));
            Ok(())
        })?;
        tasks.wait(|tasks| match tasks {
            tasks if tasks.stop => Some(Err(refused(&RedoError::Closed))),
            tasks => tasks.is_idle.then_some(Ok(())),
        })
    }
}
