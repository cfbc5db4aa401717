//! Who answers for a disk: its engine, and the keeper of its log, once there is a disk.
//!
//! A server may be started before it is known which disk it is to have: for a QEMU that waits for a checkpoint (`rekindle restore
//! --prepare`), which asks how long its disk is, and nothing else. Such a server has looked at the image and let go of it: somebody else
//! writes that, on this host or another. No queue runs until it is told which epoch it is to be; then it opens and locks the image as
//! any server does, or refuses and waits on.

use crate::engine::Handle;
use crate::engine::command::{Command, Refused};
use crate::image::{How, Image};
use crate::redo::error::chain;
use crate::redo::keeper::{self, EpochId, Keeper, LogOptions};
use crate::redo::recover::DiskVersion;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// What a server waits with.
#[derive(Debug)]
pub struct Waiting {
    /// The image that it is going to have.
    pub image: PathBuf,
    /// How that is opened.
    pub how: How,
    /// Where its log is.
    pub redo: LogOptions,
    /// Whether a restore still brings the guest's memory.
    pub filling: Arc<AtomicBool>,
}

/// See [the module](self).
#[derive(Debug)]
pub struct Desk {
    /// The engine.
    pub engine: Handle,
    keeper: OnceLock<Arc<Keeper>>,
    waiting: Mutex<Option<Waiting>>,
}

impl Desk {
    /// Of a server that has its disk.
    #[must_use]
    pub fn new(engine: Handle, keeper: Arc<Keeper>) -> Self {
        Self { engine, keeper: OnceLock::from(keeper), waiting: Mutex::new(None) }
    }

    /// Of one that waits for it.
    #[must_use]
    pub fn waiting(engine: Handle, waiting: Waiting) -> Self {
        Self { engine, keeper: OnceLock::new(), waiting: Mutex::new(Some(waiting)) }
    }

    /// Who keeps the log.
    ///
    /// # Errors
    /// [`Refused`]: there is no disk yet.
    pub fn keeper(&self) -> Result<&Arc<Keeper>, Refused> {
        self.keeper.get().ok_or_else(|| Refused("it waits for a restore, and has no disk yet".into()))
    }

    /// Have the disk: as it was at a checkpoint, or the newest. `filling`: the guest's memory still comes.
    ///
    /// *On success:* queues may run. *On failure:* it waits on; nobody else is kept from the image.
    ///
    /// # Errors
    /// [`Refused`]: somebody else has the image, its log is another one; it has its disk already.
    pub fn have(&self, at: Option<EpochId>, filling: bool) -> Result<(), Refused> {
        let mut waits = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = waits.as_ref().ok_or_else(|| Refused("it has its disk already".into()))?;
        let image = Image::open(&waiting.image, waiting.how).map_err(|e| Refused(chain(&e)))?;
        let version = at.map_or(DiskVersion::Newest, |EpochId { disk, epoch }| DiskVersion::Epoch { epoch, disk });
        let options = LogOptions { version, ..waiting.redo.clone() };
        let mut opened = keeper::open(&image, options).map_err(|e| Refused(chain(&e)))?;
        let logged = opened.logged.take();
        waiting.filling.store(filling, Ordering::Relaxed);
        self.engine.ask(|answer| Command::Have(Box::new((image, logged)), answer))?;
        // Nobody else sets it: that needs what waits, which is locked.
        let _ = self.keeper.set(opened.start(&self.engine));
        *waits = None;
        Ok(())
    }

    /// The server ends.
    pub fn release(&self) {
        if let Some(keeper) = self.keeper.get() {
            keeper.release();
        }
    }
}
