//! Merging what was committed, and ending a log.

use super::{Keeper, lock, no_log, refused};
use crate::engine::Handle;
use crate::engine::command::Refused;
use crate::engine::visit::Reach;
use crate::redo::error::chain;
use crate::redo::merge::merge;
use crate::redo::state::Home;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// A log that is shorter is ended in one go, while the guest's writes wait.
const SHORT: u64 = 8 << 20;
/// How often it is tried to become that short.
const ROUNDS: u32 = 16;
/// What a merge does before it rests.
const WORK: Duration = Duration::from_millis(20);
/// Between two looks whether what is under way has ended.
const LOOK: Duration = Duration::from_millis(1);

impl Keeper {
    /// A checkpoint with this epoch counts: it may be merged, and no older one is wanted any more.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn committed(self: &Arc<Self>, engine: &Handle, epoch: u64) -> Result<(), Refused> {
        let sealed = lock(&self.home).as_ref().map(|home| home.state().sealed).ok_or_else(no_log)?;
        if epoch > sealed {
            return Err(Refused(format!("epoch {epoch} was not sealed: the last that was is {sealed}")));
        }
        let mut merging = lock(&self.merging);
        merging.committed = merging.committed.max(epoch);
        if !std::mem::replace(&mut merging.is_under_way, true) {
            let (keeper, engine) = (Arc::clone(self), engine.clone());
            thread::spawn(move || keeper.merge_committed(&engine));
        }
        Ok(())
    }

    fn merge_committed(&self, engine: &Handle) {
        loop {
            let upto = lock(&self.merging).committed;
            let merged = self.merge_to(engine, upto);
            let mut merging = lock(&self.merging);
            merging.failed = merged.as_ref().err().map(|Refused(why)| why.clone());
            if let Some(why) = &merging.failed {
                tracing::warn!("the redo log is not merged: {why}");
            }
            if merged.is_err() || merging.committed == upto {
                merging.is_under_way = false;
                return;
            }
        }
    }

    /// Merge what has ended, up to an epoch.
    fn merge_to(&self, engine: &Handle, upto: u64) -> Result<(), Refused> {
        let batch = engine.visit(move |reach| Ok(reach.logged.as_ref().and_then(|logged| logged.log.batch(upto))))?;
        let Some(batch) = batch else { return Ok(()) };
        let mut since = Instant::now();
        let pace = || {
            let worked = since.elapsed();
            if worked < WORK {
                return;
            }
            let is_long = engine.visit(|reach| {
                let (bytes, limit) = reach.logged.as_ref().map_or((0, 1), |logged| logged.log.bytes());
                Ok(bytes > limit / 2 || reach.logged.as_ref().is_some_and(|logged| logged.closing))
            });
            if matches!(is_long, Ok(false)) {
                thread::sleep(worked);
            }
            since = Instant::now();
        };
        merge(&self.home, &batch, &self.image()?, pace).map_err(|e| refused(&e))?;
        let upto = batch.upto;
        engine.visit(move |reach| {
            if let Some(logged) = reach.logged {
                logged.log.merged_to(upto);
            }
            Ok(())
        })?;
        if let Some(home) = lock(&self.home).as_ref()
            && let Err(e) = home.remove_done()
        {
            tracing::warn!("{}", chain(&e));
        }
        Ok(())
    }

    /// Merge all and have no log any more, while the guest goes on. Answers at once; [`Told`] goes when it is done.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn end(self: &Arc<Self>, engine: &Handle) -> Result<(), Refused> {
        if std::mem::replace(&mut *lock(&self.ending), true) {
            return Ok(());
        }
        lock(&self.merging).failed = None;
        let (keeper, engine) = (Arc::clone(self), engine.clone());
        thread::spawn(move || {
            let ended = keeper.end_now(&engine);
            lock(&keeper.merging).failed = ended.as_ref().err().map(|Refused(why)| why.clone());
            if let Err(Refused(why)) = ended {
                tracing::warn!("the redo log does not end: {why}");
                let reopened = engine.visit(|reach| {
                    reach.logged.iter_mut().for_each(|logged| logged.closing = false);
                    Ok(())
                });
                drop(reopened);
            }
            *lock(&keeper.ending) = false;
        });
        Ok(())
    }

    fn end_now(&self, engine: &Handle) -> Result<(), Refused> {
        // One merge at a time.
        while lock(&self.merging).is_under_way {
            thread::sleep(LOOK);
        }
        if lock(&self.home).is_none() {
            return Ok(());
        }
        for round in 0.. {
            // Without room for a further segment the guest has to wait a little longer.
            let is_last = self.prepare(engine).is_err() || round >= ROUNDS;
            let is_short = engine.visit(move |reach| {
                let logged = reach.logged.as_mut().ok_or_else(no_log)?;
                let is_short = logged.log.current_bytes() < SHORT || is_last;
                if is_short {
                    logged.closing = true;
                } else {
                    logged.log.mark();
                }
                Ok(is_short)
            })?;
            self.wait_idle(engine, is_short)?;
            if is_short {
                break;
            }
            self.merge_to(engine, u64::MAX)?;
        }
        engine.visit(|reach| {
            reach.logged.iter_mut().for_each(|logged| logged.log.close());
            Ok(())
        })?;
        self.merge_to(engine, u64::MAX)?;
        let is_empty = |reach: &mut Reach<'_>| Ok(reach.logged.as_ref().is_none_or(|logged| logged.log.is_empty()));
        if !engine.visit(is_empty)? {
            return Err(Refused("something was written meanwhile".into()));
        }
        if let Some(Err(e)) = lock(&self.home).take().map(Home::destroy) {
            // What is left has no writes that are not in the image.
            tracing::warn!("{}", chain(&e));
        }
        engine.visit(|reach| {
            reach.ended = reach.logged.take();
            Ok(())
        })
    }

    /// Until nothing is under way into epochs that have ended; `all`: into any.
    fn wait_idle(&self, engine: &Handle, all: bool) -> Result<(), Refused> {
        loop {
            let is_idle = engine.visit(move |reach| {
                let log = &reach.logged.as_ref().ok_or_else(no_log)?.log;
                Ok(if all {
                    !log.is_busy()
                } else {
                    log.batch(u64::MAX).is_none_or(|batch| batch.upto == log.closed())
                })
            })?;
            if is_idle {
                return Ok(());
            }
            thread::sleep(LOOK);
        }
    }
}
