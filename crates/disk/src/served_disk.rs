//! The disk that control commands refer to: its engine and, as soon as the disk is open, the keeper of its log.
//!
//! A server may start before the epoch of the disk that it serves is known: for a QEMU that waits for a checkpoint
//! (`rekindle restore --prepare`) and only needs the disk's length. Such a server has inspected the image and
//! released it, because a process on this or another host still writes it. No queue runs until a command names the
//! epoch. Then the server opens and locks the image as usual, or rejects the command and continues to wait.

use crate::engine::Handle;
use crate::engine::command::{Command, Refused};
use crate::image::{Image, OpenMode};
use crate::redo::error::chain;
use crate::redo::keeper::{self, EpochId, Keeper, LogOptions};
use crate::redo::recover::DiskVersion;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A disk that is not open yet.
#[derive(Debug)]
pub struct PendingDisk {
    pub image: PathBuf,
    pub mode: OpenMode,
    /// How to open the disk's log.
    pub redo: LogOptions,
    /// Whether a restore is still filling the guest's memory.
    pub filling: Arc<AtomicBool>,
}

/// The engine, with the keeper of the disk's log or the disk that the server waits for.
#[derive(Debug)]
pub struct ServedDisk {
    pub engine: Handle,
    keeper: OnceLock<Arc<Keeper>>,
    waiting: Mutex<Option<PendingDisk>>,
}

impl ServedDisk {
    /// Creates the state of a server that has its disk.
    #[must_use]
    pub fn new(engine: Handle, keeper: Arc<Keeper>) -> Self {
        Self { engine, keeper: OnceLock::from(keeper), waiting: Mutex::new(None) }
    }

    /// Creates the state of a server that waits for its disk.
    #[must_use]
    pub fn waiting(engine: Handle, waiting: PendingDisk) -> Self {
        Self { engine, keeper: OnceLock::new(), waiting: Mutex::new(Some(waiting)) }
    }

    /// Returns the keeper of the log.
    ///
    /// # Errors
    /// [`Refused`] while the server waits for its disk.
    pub fn keeper(&self) -> Result<&Arc<Keeper>, Refused> {
        self.keeper.get().ok_or_else(|| Refused("it waits for a restore, and has no disk yet".into()))
    }

    /// Opens the disk as of epoch `at`; by default the newest disk. `filling`: a restore is still filling the guest's
    /// memory.
    ///
    /// *On success:* queues may run. *On failure:* the server continues to wait, and the image is not locked.
    ///
    /// # Errors
    /// [`Refused`] if another process has the image, the log is of another disk, or the disk is open already.
    pub fn open(&self, at: Option<EpochId>, filling: bool) -> Result<(), Refused> {
        let mut waits = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = waits.as_ref().ok_or_else(|| Refused("it has its disk already".into()))?;
        let image = Image::open(&waiting.image, waiting.mode).map_err(|e| Refused(chain(&e)))?;
        let version = at.map_or(DiskVersion::Newest, |EpochId { disk, epoch }| DiskVersion::Epoch { epoch, disk });
        let options = LogOptions { version, ..waiting.redo.clone() };
        let mut opened = keeper::open(&image, options).map_err(|e| Refused(chain(&e)))?;
        let log = opened.engine_log.take();
        waiting.filling.store(filling, Ordering::Relaxed);
        self.engine.ask(|answer| Command::Open(Box::new((image, log)), answer))?;
        // Set only in this function, while `waits` is locked.
        let _ = self.keeper.set(opened.start(&self.engine));
        *waits = None;
        Ok(())
    }

    /// Releases image and log before the server ends.
    pub fn release(&self) {
        if let Some(keeper) = self.keeper.get() {
            keeper.release();
        }
    }
}
