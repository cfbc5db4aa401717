//! The disk that control commands refer to: its engine and, as soon as the disk is open, the keeper of its log.
//!
//! A server may start before the epoch of the disk that it serves is known: for a QEMU that waits for a checkpoint
//! (`rekindle restore --prepare`) and only needs the disk's length. Such a server has inspected the image and
//! released it, because a process on this or another host still writes it. No queue runs until a command names the
//! epoch. Then the server opens and locks the image as usual, or rejects the command and continues to wait.

use crate::broker::DiskBroker;
use crate::engine::Handle;
use crate::engine::command::{Command, OpenDisk};
use crate::engine::refusal::Refusal;
use crate::image::{Image, ImageError, OpenMode};
use crate::keeper::{self, EpochId, Keeper, LogOptions};
use crate::redo::error::error_chain;
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
    /// `None`: this process is not confined.
    pub broker: Option<Arc<DiskBroker>>,
    /// Whether a restore is still filling the guest's memory.
    pub is_filling: Arc<AtomicBool>,
}

/// The engine, with the keeper of the disk's log or the disk that the server waits for.
#[derive(Debug)]
pub struct ServedDisk {
    pub engine: Handle,
    keeper: OnceLock<Arc<Keeper>>,
    pending: Mutex<Option<PendingDisk>>,
    /// The directory of the lists of frames is the working directory of this process, which may be unable to search the directories
    /// above it.
    is_in_frames_directory: bool,
}

impl ServedDisk {
    /// Creates the state of a server that has its disk.
    #[must_use]
    pub fn new(engine: Handle, keeper: Arc<Keeper>) -> Self {
        Self { engine, keeper: OnceLock::from(keeper), pending: Mutex::new(None), is_in_frames_directory: false }
    }

    /// Returns the same disk, of a process whose working directory is that of the lists of frames.
    #[must_use]
    pub fn in_frames_directory(self) -> Self {
        Self { is_in_frames_directory: true, ..self }
    }

    /// Returns the path at which this process finds a list of frames.
    #[must_use]
    pub fn frames_path(&self, path: PathBuf) -> PathBuf {
        let name = path.file_name().filter(|_| self.is_in_frames_directory).map(PathBuf::from);
        name.unwrap_or(path)
    }

    /// Creates the state of a server that waits for its disk.
    #[must_use]
    pub fn awaited(engine: Handle, pending: PendingDisk) -> Self {
        Self { engine, keeper: OnceLock::new(), pending: Mutex::new(Some(pending)), is_in_frames_directory: false }
    }

    /// Returns the keeper of the log.
    ///
    /// # Errors
    /// [`Refusal`] while the server waits for its disk.
    pub fn keeper(&self) -> Result<&Arc<Keeper>, Refusal> {
        self.keeper.get().ok_or_else(|| Refusal("it waits for a restore, and has no disk yet".into()))
    }

    /// Opens the disk as of an epoch; by default the newest disk. `is_filling`: a restore is still filling the guest's
    /// memory.
    ///
    /// *On success:* queues may run. *On failure:* the server continues to wait, and the image is not locked.
    ///
    /// # Errors
    /// [`Refusal`] if another process has the image, the log is of another disk, or the disk is open already.
    pub fn open(&self, epoch: Option<EpochId>, is_filling: bool) -> Result<(), Refusal> {
        let mut pending_disk = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        let pending = pending_disk.as_ref().ok_or_else(|| Refusal("it has its disk already".into()))?;
        let image = Self::open_image(pending).map_err(|e| Refusal(error_chain(&e)))?;
        let version = epoch.map_or(DiskVersion::Newest, |EpochId { disk, epoch }| DiskVersion::Epoch { epoch, disk });
        let options = LogOptions { version, ..pending.redo.clone() };
        let mut opened_log =
            keeper::open(&image, options, pending.broker.clone()).map_err(|e| Refusal(error_chain(&e)))?;
        let log = opened_log.engine_log.take();
        pending.is_filling.store(is_filling, Ordering::Relaxed);
        self.engine.ask(|answer| Command::OpenDisk(Box::new(OpenDisk { image, log }), answer))?;
        // Set only in this function, while `pending_disk` is locked.
        let _ = self.keeper.set(opened_log.start(&self.engine));
        *pending_disk = None;
        Ok(())
    }

    fn open_image(PendingDisk { image, mode, broker, .. }: &PendingDisk) -> Result<Image, ImageError> {
        match broker {
            Some(broker) => Image::open_with(image, *mode, |flags| broker.open_image(flags)),
            None => Image::open(image, *mode),
        }
    }

    /// Releases image and log before the server ends.
    pub fn release(&self) {
        if let Some(keeper) = self.keeper.get() {
            keeper.release();
        }
    }
}
