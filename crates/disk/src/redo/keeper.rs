//! What a disk's server is asked about epochs, and what it does in the background: making segments, sealing, merging.
//!
//! | thread | what it does |
//! |---|---|
//! | the caller's | `begin`, `mark`, `seal`; `committed` and `end` leave a task |
//! | `make_segments` | makes segments before they are needed |
//! | [`merging::Merger`] | merges and ends logs. It alone has the [`Target`], so there is one merge at a time |
//!
//! The engine never waits for any of it: it is visited between two of its steps. Locks: `home` is held while the directory is changed,
//! and a log begins and goes under it, so that directory, log and tasks are of one log. The engine may be visited under it. `tasks` is
//! taken last, and nothing is waited for under it.

mod merging;
#[cfg(test)]
mod model;
pub mod threads;

use super::error::{RedoError, chain};
use super::files::{Files, LocalFile, LocalFiles, Synced};
use super::left::{beside, image_name};
use super::log::Log;
use super::merge::{SharedHome, Target};
use super::recover::{self, Wanted};
use super::state::Home;
use crate::engine::command::Refused;
use crate::engine::logged::{Logged, Notify, Told};
use crate::engine::visit::{Reach, VisitEngine};
use crate::image::Image;
use merging::Merger;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use threads::{Monitor, System, Threads};
use uuid::Uuid;

/// The shortest that a log may be by default.
const LEAST: u64 = 4 << 30;
/// Where a disk's log is, and how it is opened.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Place {
    /// Its directory, if it is not the one beside the image. A block device has none beside it.
    pub directory: Option<PathBuf>,
    /// Which disk is wanted.
    pub wanted: Wanted,
    /// Bytes that it may take; a quarter of the disk, at least 4 GiB, if nothing is said.
    pub limit: Option<u64>,
    /// File name that the image had when the log was begun, if it was renamed since.
    pub renamed_from: Option<String>,
}

/// Which disk, and which of its epochs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct At {
    /// The disk's identity.
    pub disk: Uuid,
    /// The epoch.
    pub epoch: u64,
}

/// The directory of the log, while there is one.
#[derive(Debug)]
struct Kept<D: Files> {
    home: Option<Home<D>>,
    /// The first epoch of the next log. Requests may still be under way that know epochs of the one before.
    next: u64,
}

/// What the threads have to do. Of the log that there is: all but `stop` and `is_protected` end with it.
#[derive(Debug, Default)]
struct Tasks {
    /// The server ends.
    stop: bool,
    /// A protector takes checkpoints, or did so since the server was started.
    is_protected: bool,
    /// A segment, or room, is wanted.
    is_segment_wanted: bool,
    /// The newest epoch that a checkpoint has, and whether that is new.
    committed: u64,
    is_merge_wanted: bool,
    /// The log is to end. Until it has, or cannot.
    is_end_wanted: bool,
    /// What the end of the log waits for is not under way any more.
    is_idle: bool,
    /// Why the last merge failed.
    failed: Option<String>,
}

/// See [the module](self).
pub struct Keeper<D: Files = LocalFiles, T: Threads = System> {
    files: D,
    /// For seals. Released when the server ends.
    image: T::Monitor<Option<Synced<D::File>>>,
    bytes: u64,
    limit: u64,
    is_readonly: bool,
    /// It is known where a log would be.
    is_placed: bool,
    /// File name of the image.
    image_name: Option<String>,
    home: T::Monitor<Kept<D>>,
    tasks: Arc<T::Monitor<Tasks>>,
    threads: T::Monitor<Vec<T::Thread>>,
}

impl<D: Files, T: Threads> std::fmt::Debug for Keeper<D, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keeper").field("files", &self.files).finish_non_exhaustive()
    }
}

/// What the engine is to be started with, and the keeper, which begins when the engine has.
#[derive(Debug)]
pub struct Opened<D: Files = LocalFiles, T: Threads = System> {
    /// The log, if there is one.
    pub logged: Option<Logged<D::File>>,
    keeper: Keeper<D, T>,
    target: Target<D::File>,
}

fn refused(error: &RedoError) -> Refused {
    Refused(chain(error))
}

fn no_log() -> Refused {
    Refused("the disk has no redo log: its VM is not protected".into())
}

fn ending() -> Refused {
    Refused("the disk's redo log is being merged, to end: ask again when it has".into())
}

/// Open the log of an image, if it has one.
///
/// # Errors
/// [`RedoError`]; nothing has changed.
pub fn open(image: &Image, place: Place) -> Result<Opened, RedoError> {
    let is_placed = place.directory.is_some() || !image.is_device;
    let directory = place.directory.unwrap_or_else(|| beside(&image.path));
    let files = LocalFiles::new(&directory, image.how.direct);
    let limit = place.limit.unwrap_or_else(|| (image.bytes / 4).max(LEAST));
    let mut found = recover::open(files.clone(), image.bytes, place.wanted, limit)?;
    let image_name = image_name(&image.path);
    if let (Some((home, _)), Some(name)) = (&mut found, &image_name) {
        home.check_image(name, place.renamed_from.as_deref())?;
    }
    if found.is_some() && image.how.readonly {
        return Err(RedoError::ReadOnly { path: directory });
    }
    let synced = Synced::new(LocalFile(Arc::clone(&image.file)), Arc::clone(&image.durability));
    let mut opened = Opened::new(files, found, synced, image.bytes, limit);
    (opened.keeper.is_readonly, opened.keeper.is_placed) = (image.how.readonly, is_placed);
    opened.keeper.image_name = image_name;
    Ok(opened)
}

impl<D: Files + Clone, T: Threads> Opened<D, T> {
    /// With the log that was found, for a disk of so many bytes whose log may take `limit`.
    fn new(files: D, found: Option<(Home<D>, Log<D::File>)>, image: Synced<D::File>, bytes: u64, limit: u64) -> Self {
        let (home, log) = found.unzip();
        let keeper = Keeper {
            files,
            image: Monitor::new(Some(image.clone())),
            bytes,
            limit,
            is_readonly: false,
            is_placed: true,
            image_name: None,
            home: Monitor::new(Kept { home, next: 1 }),
            tasks: Arc::new(Monitor::new(Tasks::default())),
            threads: Monitor::new(Vec::new()),
        };
        let logged = log.map(|log| Logged::new(log, keeper.notify(), false));
        Self { logged, keeper, target: Target::new(image) }
    }

    /// Begin to keep the log, for as long as the engine is there.
    #[must_use]
    pub fn start(self, engine: &impl VisitEngine<File = D::File>) -> Arc<Keeper<D, T>> {
        let Self { keeper, target, .. } = self;
        let keeper = Arc::new(keeper);
        // Epochs that are to be given up are so when the guest writes, not before.
        if keeper.home.with(|kept| kept.home.as_ref().is_some_and(|home| !home.is_rewound())) {
            keeper.notify().send();
        }
        let (for_segments, for_merges) = (Arc::clone(&keeper), Arc::clone(&keeper));
        let (engine, other) = (engine.clone(), engine.clone());
        let segments = T::spawn(move || for_segments.make_segments(&engine));
        let merges = T::spawn(move || Merger::new(for_merges, other, target).run());
        keeper.threads.with(|threads| threads.extend([segments, merges]));
        keeper
    }
}

impl<D: Files + Clone, T: Threads> Keeper<D, T> {
    /// Releases image and log: the server ends. A merge that is under way ends after its step; the next server repeats it.
    pub fn release(&self) {
        self.tasks.with(|tasks| tasks.stop = true);
        self.threads.with(std::mem::take).into_iter().for_each(T::join);
        drop(self.image.with(Option::take));
        drop(self.home.with(|kept| kept.home.take()));
    }

    fn notify(&self) -> Notify {
        let tasks = Arc::clone(&self.tasks);
        Notify::new(move || tasks.with(|tasks| tasks.is_segment_wanted = true))
    }

    /// Makes segments whenever some are wanted.
    fn make_segments(&self, engine: &impl VisitEngine<File = D::File>) {
        let next = |tasks: &mut Tasks| {
            let is_wanted = std::mem::take(&mut tasks.is_segment_wanted);
            (tasks.stop || is_wanted).then_some(!tasks.stop)
        };
        while self.tasks.wait(next) {
            let prepared = self.home.with(|kept| Self::prepare(kept, engine));
            let room = self.make_room(engine, prepared.is_err());
            for Refused(why) in [prepared.err(), room.err()].into_iter().flatten() {
                tracing::warn!("{why}");
            }
        }
    }

    /// Makes the segments that will be needed.
    fn prepare(kept: &mut Kept<D>, engine: &impl VisitEngine<File = D::File>) -> Result<(), Refused> {
        let Some(home) = kept.home.as_mut() else { return Ok(()) };
        let wanted = engine.visit(|reach| Ok(reach.logged.as_ref().map(|logged| logged.log.wanted())))?;
        for epoch in wanted.unwrap_or_default() {
            let segment = home.prepare(epoch).map_err(|e| refused(&e))?;
            engine.visit(move |reach| {
                if let Some(logged) = reach.logged {
                    logged.log.provide(segment);
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// A log of which no protector takes checkpoints, as after a restore, ends when there is no more room for it: nothing would be
    /// committed, and the guest would wait for ever.
    fn make_room(&self, engine: &impl VisitEngine<File = D::File>, is_failing: bool) -> Result<(), Refused> {
        let is_full = |reach: &mut Reach<'_, D::File>| Ok(reach.logged.as_ref().is_some_and(Logged::is_full));
        if self.tasks.with(|tasks| tasks.is_protected) || !(is_failing || engine.visit(is_full)?) {
            return Ok(());
        }
        tracing::warn!("the redo log is full and no protector takes checkpoints of the VM: it is merged, and ends");
        self.end();
        Ok(())
    }

    /// From here on writes go to a log. A disk that has one keeps it.
    ///
    /// *On success:* the log is there, durably; gives the disk's identity and the epoch of what is written now.
    /// *On failure:* the disk has the log that it had, or none.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn begin(&self, engine: &impl VisitEngine<File = D::File>) -> Result<At, Refused> {
        if self.is_readonly {
            return Err(Refused("the disk is served read-only: it has no epochs".into()));
        }
        if !self.is_placed {
            let why = "a block device has nothing beside it: say where its redo log is to be (`redo = \"FOLDER\"` in its [[disk]], or rekindle disk serve --redo DIR)";
            return Err(Refused(why.into()));
        }
        let allow = |tasks: &mut Tasks| {
            tasks.is_protected |= !tasks.is_end_wanted;
            if tasks.is_end_wanted { Err(ending()) } else { Ok(()) }
        };
        self.tasks.with(allow)?;
        self.home.with(|kept| {
            // Its end may have been requested while this waited.
            self.tasks.with(allow)?;
            let is_new = kept.home.is_none();
            if is_new {
                self.begin_log(kept, engine)?;
            }
            // Where there is no room for segments, there is a log and its writes wait: that is no way to begin.
            let begun = Self::prepare(kept, engine).and_then(|()| {
                engine.visit(|reach| {
                    let log = &reach.logged.as_ref().ok_or_else(no_log)?.log;
                    Ok(At { disk: log.disk(), epoch: log.epoch() })
                })
            });
            if begun.is_err() && is_new && !Self::end_empty(kept, engine) {
                // Something was written to it already, and no protector is going to commit that.
                self.end();
            }
            begun
        })
    }

    fn begin_log(&self, kept: &mut Kept<D>, engine: &impl VisitEngine<File = D::File>) -> Result<(), Refused> {
        let home = Home::create(self.files.clone(), self.bytes, self.image_name.clone()).map_err(|e| refused(&e))?;
        let log = Log::new(home.state().disk, kept.next, 0, 0, self.limit);
        let logged = Logged::new(log, self.notify(), true);
        kept.home = Some(home);
        engine.visit(move |reach| {
            *reach.logged = Some(logged);
            Ok(())
        })
    }

    /// Undoes a beginning, if nothing was written since. Gives whether it has.
    fn end_empty(kept: &mut Kept<D>, engine: &impl VisitEngine<File = D::File>) -> bool {
        let gone = engine.visit(|reach| {
            reach.ended = reach.logged.take_if(|logged| logged.log.is_empty());
            Ok(reach.ended.is_some())
        });
        let is_gone = matches!(gone, Ok(true));
        if is_gone
            && let Some(home) = kept.home.take()
            && let Err(e) = home.destroy()
        {
            tracing::warn!("{}", chain(&e));
        }
        is_gone
    }

    /// Later writes are of the next epoch. Gives the one that the disk is as of now. Writes nothing to any disk, if the one before was
    /// sealed.
    ///
    /// *Needs:* that the guest is stopped: no queue runs, nothing is under way.
    ///
    /// # Errors
    /// [`Refused`]; the epoch goes on.
    pub fn mark(&self, engine: &impl VisitEngine<File = D::File>) -> Result<At, Refused> {
        let mark = || {
            engine.visit(|reach| {
                let is_running = reach.is_running;
                let log = &mut reach.logged.as_mut().ok_or_else(no_log)?.log;
                if is_running {
                    let why = "the guest runs: what it writes now is not in its checkpoint's memory; stop it first";
                    return Err(Refused(why.into()));
                }
                Ok(log.mark().map(|epoch| At { disk: log.disk(), epoch }))
            })
        };
        if self.tasks.with(|tasks| tasks.is_end_wanted) {
            return Err(no_log());
        }
        if let Some(at) = mark()? {
            return Ok(at);
        }
        self.home.with(|kept| Self::prepare(kept, engine))?;
        mark()?.ok_or_else(|| Refused("the next epoch has no segment yet".into()))
    }

    /// Make everything up to an epoch durable.
    ///
    /// *Needs:* that it was marked.
    /// *On success:* the disk of that epoch can be had after any crash, until a later one is committed.
    ///
    /// # Errors
    /// [`Refused`]; a checkpoint with this epoch must not be committed.
    pub fn seal(&self, engine: &impl VisitEngine<File = D::File>, epoch: u64) -> Result<(), Refused> {
        let (disk, segments, is_image_dirty) = engine.visit(move |reach| {
            let logged = reach.logged.as_ref().ok_or_else(no_log)?;
            let segments = logged.log.unsealed(epoch).map_err(|e| Refused(format!("epoch {epoch}: {e}")))?;
            Ok((logged.log.disk(), segments, logged.image_dirty))
        })?;
        let image = self.image.with(|image| image.clone()).ok_or_else(|| refused(&RedoError::Closed))?;
        let mut failed = if is_image_dirty { image.sync().err() } else { image.check().err() };
        let mut synced = Vec::new();
        let sealed: Vec<u64> = segments.iter().map(|segment| segment.epoch).collect();
        for segment in segments {
            if let Err(e) = segment.write() {
                failed = failed.or(Some(e));
                continue;
            }
            let done = segment.sync();
            synced.push((segment.epoch, segment.written, done.is_ok()));
            failed = failed.or(done.err());
        }
        let (is_good, shared) = (failed.is_none(), image.clone());
        let is_durable = engine.visit(move |reach| {
            let logged = reach.logged.as_mut().filter(|logged| logged.log.disk() == disk).ok_or_else(no_log)?;
            let log = &mut logged.log;
            // All of them, also after one that failed.
            let is_durable =
                synced.into_iter().fold(true, |all, (epoch, written, good)| log.synced(epoch, written, good) && all);
            logged.image_dirty &= !(is_good && shared.check().is_ok());
            Ok(is_durable)
        })?;
        // A flush of the guest that ran at the same time may have got the error of what this was for.
        let failed = failed.or_else(|| image.check().err());
        let failed = failed.or_else(|| (!is_durable).then(|| io::Error::other("a flush of the guest has failed")));
        if let Some(e) = failed {
            return Err(refused(&RedoError::io(self.files.path(), "making it durable")(e)));
        }
        self.home.with(|kept| {
            // The log may have ended since, and another one have begun.
            let home = kept.home.as_mut().filter(|home| home.state().disk == disk).ok_or_else(no_log)?;
            if home.state().floor > epoch {
                return Err(Refused(format!("epoch {epoch} is no longer available: later writes are being merged")));
            }
            home.record(|state| state.seal(epoch, &sealed)).map_err(|e| refused(&e))?;
            engine.visit(move |reach| {
                reach.logged.iter_mut().for_each(|logged| logged.log.sealed(&sealed));
                Ok(())
            })
        })?;
        // The next mark finds its segment made.
        self.notify().send();
        Ok(())
    }

    /// A checkpoint with this epoch counts: it may be merged, and no older one is wanted any more. Does not wait for that.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn committed(&self, epoch: u64) -> Result<(), Refused> {
        self.home.with(|kept| {
            let sealed = kept.home.as_ref().map(|home| home.state().sealed).ok_or_else(no_log)?;
            if epoch > sealed {
                return Err(Refused(format!("epoch {epoch} was not sealed: the last that was is {sealed}")));
            }
            self.tasks.with(|tasks| {
                tasks.committed = tasks.committed.max(epoch);
                tasks.is_merge_wanted = true;
            });
            Ok(())
        })
    }

    /// Merge all and have no log any more, while the guest runs. Does not wait for that: [`Told`] goes when it is done.
    pub fn end(&self) {
        self.tasks.with(|tasks| {
            if !std::mem::replace(&mut tasks.is_end_wanted, true) {
                tasks.failed = None;
            }
        });
    }

    /// Complete what the engine says of its log.
    pub fn tell(&self, told: &mut Told) {
        self.home.with(|kept| {
            if let Some(home) = &kept.home {
                (told.sealed, told.rewound) = (home.state().sealed, home.is_rewound());
            }
        });
        told.failed = self.tasks.with(|tasks| tasks.failed.clone());
    }
}

impl<D: Files, T: Threads> SharedHome<D> for Keeper<D, T> {
    fn with_home(&self, change: &mut dyn FnMut(&mut Home<D>) -> Result<(), RedoError>) -> Result<(), RedoError> {
        self.home.with(|kept| kept.home.as_mut().map_or(Err(RedoError::Closed), change))
    }
}
