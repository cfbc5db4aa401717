//! What a disk's server is asked about epochs, and what it does beside its guest's requests: making segments, sealing, merging.
//!
//! The engine never waits for any of it: it is visited between two of its steps. Locks: that of the directory may be held while the
//! engine is visited, never the other way round.

mod merging;

use super::error::{RedoError, chain};
use super::files::{LocalFile, LocalFiles, LogFile};
use super::left::beside;
use super::log::Log;
use super::recover::{self, Wanted};
use super::state::Home;
use crate::engine::Handle;
use crate::engine::command::Refused;
use crate::engine::logged::{Logged, Told};
use crate::engine::visit::Reach;
use crate::image::Image;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
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
}

/// Which disk, and which of its epochs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct At {
    /// The disk's identity.
    pub disk: Uuid,
    /// The epoch.
    pub epoch: u64,
}

/// What is to be merged, and how that goes.
#[derive(Debug, Default)]
struct Merging {
    committed: u64,
    is_under_way: bool,
    failed: Option<String>,
}

/// See [the module](self).
#[derive(Debug)]
pub struct Keeper {
    files: LocalFiles,
    /// Let go of when the server ends.
    image: Mutex<Option<LocalFile>>,
    bytes: u64,
    limit: u64,
    is_readonly: bool,
    /// It is known where a log would be.
    is_placed: bool,
    /// Somebody takes checkpoints, or did so when this server was there already.
    is_protected: AtomicBool,
    home: Mutex<Option<Home<LocalFiles>>>,
    merging: Mutex<Merging>,
    wanted: Sender<()>,
    /// The log is about to go.
    ending: Mutex<bool>,
}

/// What the engine is to be started with, and the keeper, which begins when the engine has.
#[derive(Debug)]
pub struct Opened {
    /// The log, if there is one.
    pub logged: Option<Logged>,
    keeper: Keeper,
    asked: Receiver<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn refused(error: &RedoError) -> Refused {
    Refused(chain(error))
}

fn no_log() -> Refused {
    Refused("the disk has no redo log: its VM is not protected".into())
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
    let found = recover::open(files.clone(), image.bytes, place.wanted, limit)?;
    if found.is_some() && image.how.readonly {
        return Err(RedoError::ReadOnly { path: directory });
    }
    let (wanted, asked) = channel();
    let (home, log) = found.unzip();
    let logged = log.map(|log| Logged::new(log, wanted.clone(), false));
    let keeper = Keeper {
        files,
        image: Mutex::new(Some(LocalFile(Arc::clone(&image.file)))),
        bytes: image.bytes,
        limit,
        is_readonly: image.how.readonly,
        is_placed,
        is_protected: AtomicBool::new(false),
        home: Mutex::new(home),
        merging: Mutex::default(),
        wanted,
        ending: Mutex::new(false),
    };
    Ok(Opened { logged, keeper, asked })
}

impl Opened {
    /// Begin to keep the log, for as long as the engine is there.
    #[must_use]
    pub fn start(self, engine: &Handle) -> Arc<Keeper> {
        let Self { keeper, asked, .. } = self;
        let keeper = Arc::new(keeper);
        // Epochs that are to be given up are so when the guest writes, not before.
        if lock(&keeper.home).as_ref().is_some_and(|home| !home.is_rewound()) {
            let _ = keeper.wanted.send(());
        }
        let (engine, kept) = (engine.clone(), Arc::clone(&keeper));
        thread::spawn(move || {
            while asked.recv().is_ok() {
                while asked.try_recv().is_ok() {}
                let prepared = kept.prepare(&engine);
                let room = kept.make_room(&engine, prepared.is_err());
                for Refused(why) in [prepared.err(), room.err()].into_iter().flatten() {
                    tracing::warn!("{why}");
                }
            }
        });
        keeper
    }
}

impl Keeper {
    /// Let go of image and log: the server ends. A merge that is under way goes on to its end, or is done again by the next one.
    pub fn release(&self) {
        drop(lock(&self.image).take());
        drop(lock(&self.home).take());
    }

    fn image(&self) -> Result<LocalFile, Refused> {
        lock(&self.image).clone().ok_or_else(|| Refused("the server ends".into()))
    }

    /// Make the segments that will be needed.
    fn prepare(&self, engine: &Handle) -> Result<(), Refused> {
        let mut home = lock(&self.home);
        let Some(home) = home.as_mut() else { return Ok(()) };
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

    /// A log of which nobody takes checkpoints, as after a restore, ends when there is no more room for it: nobody would commit
    /// one, and the guest would wait for ever.
    fn make_room(self: &Arc<Self>, engine: &Handle, is_failing: bool) -> Result<(), Refused> {
        if self.is_protected.load(Ordering::Relaxed) {
            return Ok(());
        }
        let is_waiting = |reach: &mut Reach<'_>| Ok(reach.logged.as_ref().is_some_and(Logged::is_full));
        if is_failing || engine.visit(is_waiting)? {
            tracing::warn!("the redo log is full and nobody protects the VM: it is merged, and ends");
            self.end(engine)?;
        }
        Ok(())
    }

    /// From here on writes go to a log. A disk that has one keeps it.
    ///
    /// *On success:* the log is there, durably; gives the disk's identity and the epoch of what is written now.
    /// *On failure:* the disk has no log.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn begin(&self, engine: &Handle) -> Result<At, Refused> {
        if self.is_readonly {
            return Err(Refused("the disk is served read-only: it has no epochs".into()));
        }
        if !self.is_placed {
            let why = "a block device has nothing beside it: say where its redo log is to be (`redo = \"FOLDER\"` in its [[disk]], or rekindle disk serve --redo DIR)";
            return Err(Refused(why.into()));
        }
        if *lock(&self.ending) {
            return Err(Refused("the disk's redo log is being merged, to end: ask again when it has".into()));
        }
        self.is_protected.store(true, Ordering::Relaxed);
        let mut home = lock(&self.home);
        if home.is_none() {
            let made = Home::create(self.files.clone(), self.bytes).map_err(|e| refused(&e))?;
            let made = home.insert(made);
            let log = Log::new(made.state().disk, 1, 0, 0, self.limit);
            let logged = Logged::new(log, self.wanted.clone(), true);
            engine.visit(move |reach| {
                *reach.logged = Some(logged);
                Ok(())
            })?;
        }
        drop(home);
        // Where there is no room for segments, there is a log and its writes wait: that is no way to begin.
        if let Err(refused) = self.prepare(engine) {
            self.end_empty(engine);
            return Err(refused);
        }
        engine.visit(|reach| {
            let log = &reach.logged.as_ref().ok_or_else(no_log)?.log;
            Ok(At { disk: log.disk(), epoch: log.epoch() })
        })
    }

    /// Undo a beginning, if nothing was written since.
    fn end_empty(&self, engine: &Handle) {
        let gone = engine.visit(|reach| {
            let logged = reach.logged.take_if(|logged| logged.log.is_empty() && logged.log.merged() == 0);
            reach.ended = logged;
            Ok(reach.ended.is_some())
        });
        if matches!(gone, Ok(true))
            && let Some(home) = lock(&self.home).take()
            && let Err(e) = home.destroy()
        {
            tracing::warn!("{}", chain(&e));
        }
    }

    /// Later writes are of the next epoch. Gives the one that the disk is as of now. Writes nothing to any disk, if the one before was
    /// sealed.
    ///
    /// *Needs:* that the guest is stopped: no queue runs, nothing is under way.
    ///
    /// # Errors
    /// [`Refused`]; the epoch goes on.
    pub fn mark(&self, engine: &Handle) -> Result<At, Refused> {
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
        if *lock(&self.ending) {
            return Err(no_log());
        }
        if let Some(at) = mark()? {
            return Ok(at);
        }
        self.prepare(engine)?;
        mark()?.ok_or_else(|| Refused("the next epoch has no segment yet".into()))
    }

    /// Make everything up to an epoch durable.
    ///
    /// *Needs:* that it was marked.
    /// *On success:* the disk of that epoch can be had after any crash, until a later one is committed.
    ///
    /// # Errors
    /// [`Refused`]; a checkpoint with this epoch must not be committed.
    pub fn seal(&self, engine: &Handle, epoch: u64) -> Result<(), Refused> {
        let (segments, image) = engine.visit(move |reach| {
            let logged = reach.logged.as_ref().ok_or_else(no_log)?;
            if epoch > logged.log.closed() {
                return Err(Refused(format!(
                    "epoch {epoch} has not ended: the last that has is {}",
                    logged.log.closed()
                )));
            }
            let broken =
                || Refused("the redo log has not become durable before, and what of it is, is not known".into());
            Ok((logged.log.unsynced(epoch).ok_or_else(broken)?, logged.image_dirty))
        })?;
        let mut failed = None;
        if image && let Err(e) = self.image()?.sync() {
            failed = Some(e);
        }
        let mut synced = Vec::new();
        for segment in segments {
            let done = segment.file.sync();
            synced.push((segment.epoch, segment.written, done.is_ok()));
            failed = failed.or(done.err());
        }
        let is_good = failed.is_none();
        engine.visit(move |reach| {
            if let Some(logged) = reach.logged {
                synced.into_iter().for_each(|(epoch, written, good)| logged.log.synced(epoch, written, good));
                logged.image_dirty &= !is_good;
            }
            Ok(())
        })?;
        if let Some(e) = failed {
            return Err(refused(&RedoError::io(self.directory(), "making it durable")(e)));
        }
        let mut home = lock(&self.home);
        let home = home.as_mut().ok_or_else(no_log)?;
        home.record(|state| state.sealed = state.sealed.max(epoch)).map_err(|e| refused(&e))?;
        // The next mark finds its segment made.
        let _ = self.wanted.send(());
        Ok(())
    }

    fn directory(&self) -> &std::path::Path {
        use super::files::Files;
        self.files.path()
    }

    /// Complete what the engine says of its log.
    pub fn tell(&self, told: &mut Told) {
        if let Some(home) = lock(&self.home).as_ref() {
            (told.sealed, told.rewound) = (home.state().sealed, home.is_rewound());
        }
        told.failed.clone_from(&lock(&self.merging).failed);
    }
}
